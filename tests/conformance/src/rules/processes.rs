//! A session belongs to a process: fork, threads, exec and death.

use crate::host::Host;
use crate::manager::munmap;
use crate::peer::{End, Peer, check_in_child, in_child, leave};
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, holds, rule};
use crate::session::{MIB2, Session, Svm, eventually};
use ascend_ioctl::svm::{self, HOST_ID};
use libc::{EALREADY, EBADFD, EFAULT, EINVAL};

pub const RULES: &[Rule] = &[
    rule!(an_inherited_session_is_einval, Ran).decided_by("devmm_is_svm_process_init, svm_module_ops.c"),
    rule!(an_inherited_file_is_allocated_already, Ran).decided_by("devmm_alloc_svm_proc_set_to_file, svm_proc_mng.c"),
    rule!(an_inherited_file_tells_segments, Source).decided_by("devmm_ioctl_get_mmap_para, devmm_proc_info.c"),
    rule!(a_child_does_not_disturb_its_parents_session, Ran).decided_by("devmm_svm_mmap, svm_module_ops.c"),
    rule!(any_thread_has_the_session, Source).decided_by("devmm_is_svm_process_init, svm_module_ops.c"),
    rule!(the_session_belongs_to_who_initialises_it, Ran).decided_by("devmm_ioctl_init_process, devmm_proc_info.c"),
    rule!(a_child_may_go_on_where_its_parent_began, Ran)
        .decided_by("_devmm_svm_mmap_config_svm_proc, svm_module_ops.c"),
    rule!(a_child_has_a_session_of_its_own, Source)
        .decided_by("devmm_add_to_svm_proc_hashtable, svm_proc_mng.c")
        .needs(&[Need::UntracedChildren]),
    rule!(an_abandoned_second_file_ends_the_session, Ran).decided_by("drv_ascend_intf_release, davinci_intf_init.c"),
    rule!(a_closed_file_lives_on_while_its_segments_are_mapped, Ran).decided_by("__fput, linux/fs/file_table.c"),
    rule!(shares_outlive_the_segments_while_the_file_is_open, Ran)
        .decided_by("devmm_svm_release_private_proc, svm_master_proc_mng.c"),
    rule!(a_child_that_holds_the_file_keeps_its_memory, Ran).decided_by("__fput, linux/fs/file_table.c"),
    rule!(exec_ends_the_session, Source).decided_by("drv_ascend_intf_release, davinci_intf_init.c"),
    rule!(killed_processes_leave_nothing, Ran).decided_by("devmm_svm_release_work, svm_proc_mng.c"),
];

fn an_inherited_session_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    check_in_child(|| {
        session.host_huge(MIB2).refused(EINVAL)?;
        session.setup_device(0).refused(EINVAL)?;
        session.svm.init().refused(libc::ESRCH)?;
        session.get_info(HOST_ID, 0).refused(EINVAL)
    })
}

fn an_inherited_file_is_allocated_already(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    check_in_child(|| session.svm.alloc_process().refused(EALREADY))
}

fn an_inherited_file_tells_segments(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    check_in_child(|| equal("segments", session.svm.segments(16).granted()?, session.segments.clone()))
}

fn a_child_does_not_disturb_its_parents_session(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    equal("end of the child", in_child(|| ()), End::Exit(0))?;
    holds("the session works", session.alive())
}

fn any_thread_has_the_session(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (fd, request) = (session.svm.file.fd(), session.svm.request_of(svm::Op::MemCreate));
    let create = move || {
        let para = crate::session::create_of(svm::SIDE_HOST, svm::PAGE_HUGE, MIB2);
        let mut arg = svm::Arg::new(HOST_ID, &para);
        crate::manager::ioctl(fd, request, std::ptr::from_mut(&mut arg) as u64)
    };
    std::thread::spawn(create).join().map_err(|_| Failure::broken("the thread panicked"))?.granted().map(drop)
}

fn the_session_belongs_to_who_initialises_it(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    let segments = svm.prepare()?;
    let session = Session::of(svm, segments);
    let mut peer = Peer::start(|link| {
        session.svm.init().granted()?;
        session.host_huge(MIB2).granted()?;
        link.send(0)?;
        link.receive().map(drop)
    })?;
    peer.link.receive()?;
    session.host_huge(MIB2).refused(EINVAL)?;
    peer.link.send(0)?;
    peer.finish()
}

fn a_child_may_go_on_where_its_parent_began(host: &Host) -> Verdict {
    let svm = Svm::open(host)?;
    svm.alloc_process().granted()?;
    check_in_child(|| {
        let segments = svm.segments(16).granted()?;
        for segment in &segments {
            svm.map_segment(segment).granted()?;
        }
        svm.init().granted()?;
        let own = Svm::on(svm.file.duplicate().granted()?, host);
        let session = Session::of(own, segments);
        let (_, address) = session.host_mapping(MIB2)?;
        crate::session::poke(address, 6);
        equal("word", crate::session::peek(address), 6)
    })
}

fn a_child_has_a_session_of_its_own(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    check_in_child(|| holds("the child's session works", Session::host(host)?.alive()))?;
    holds("the parent's session works", session.alive())
}

fn an_abandoned_second_file_ends_the_session(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    Svm::open(host)?.file.abandon();
    session.host_huge(MIB2).refused(EBADFD)
}

/// A process that exports device memory to every process, sends the id of the share and, when it is
/// told to, runs `orders`.
fn exporter(host: &Host, orders: impl FnOnce(Session, &mut crate::peer::Link) -> Verdict) -> Result<Peer, Failure> {
    Peer::start(|link| {
        let session = Session::start(host)?;
        let handle = session.device_huge(0, MIB2).granted()?;
        let share = session.export(&handle).granted()?;
        session.set_attr(0, share, 0, 1).granted()?;
        link.send(share as u64)?;
        link.receive()?;
        orders(session, link)
    })
}

fn a_closed_file_lives_on_while_its_segments_are_mapped(host: &Host) -> Verdict {
    let mut peer = exporter(host, |session, link| {
        let segments = session.segments.clone();
        // The device process must outlive the file, so only the file is closed.
        session.svm.file.announce_close().granted()?;
        crate::manager::close(session.svm.file.fd());
        std::mem::forget(session);
        link.send(0)?;
        link.receive()?;
        for segment in &segments {
            munmap(segment.start, segment.size).granted()?;
        }
        link.send(0)?;
        link.receive().map(drop)
    })?;
    let share = peer.link.receive()? as i32;
    let watcher = Session::host(host)?;
    peer.link.send(0)?;
    peer.link.receive()?;
    watcher.get_info(0, share).granted()?;
    peer.link.send(0)?;
    peer.link.receive()?;
    eventually("the share is gone after unmapping", || watcher.get_info(0, share) == Err(EFAULT))?;
    peer.link.send(0)?;
    peer.finish()
}

fn shares_outlive_the_segments_while_the_file_is_open(host: &Host) -> Verdict {
    let mut peer = exporter(host, |session, link| {
        session.end_mappings()?;
        link.send(0)?;
        link.receive()?;
        drop(session);
        link.send(0)?;
        link.receive().map(drop)
    })?;
    let share = peer.link.receive()? as i32;
    let watcher = Session::host(host)?;
    peer.link.send(0)?;
    peer.link.receive()?;
    watcher.get_info(0, share).granted()?;
    peer.link.send(0)?;
    peer.link.receive()?;
    eventually("the share is gone after closing", || watcher.get_info(0, share) == Err(EFAULT))?;
    peer.link.send(0)?;
    peer.finish()
}

fn a_child_that_holds_the_file_keeps_its_memory(host: &Host) -> Verdict {
    let mut peer = exporter(host, |session, link| {
        // The child inherits the files and outlives its parent.
        let child = crate::peer::fork();
        if child == 0 {
            let _ = link.receive();
            leave(0);
        }
        link.send(child as u64)?;
        std::mem::forget(session);
        // SAFETY: pause has no preconditions; the process is killed while it waits.
        unsafe { libc::pause() };
        Ok(())
    })?;
    let share = peer.link.receive()? as i32;
    let watcher = Session::host(host)?;
    peer.link.send(0)?;
    peer.link.receive()?;
    peer.kill();
    watcher.get_info(0, share).granted()?;
    peer.link.send(0)?;
    eventually("the share is gone with the child", || watcher.get_info(0, share) == Err(EFAULT))
}

fn exec_ends_the_session(host: &Host) -> Verdict {
    let mut peer = exporter(host, |session, _| {
        std::mem::forget(session);
        let program = c"/bin/sleep";
        let arguments = [program.as_ptr(), c"60".as_ptr(), std::ptr::null()];
        // SAFETY: the path and the NULL-terminated list of arguments are constants; every
        // descriptor is close-on-exec.
        unsafe { libc::execv(program.as_ptr(), arguments.as_ptr()) };
        Err(Failure::skipped("there is no /bin/sleep"))
    })?;
    let share = peer.link.receive()? as i32;
    let watcher = Session::host(host)?;
    watcher.get_info(0, share).granted()?;
    peer.link.send(0)?;
    eventually("the share is gone", || watcher.get_info(0, share) == Err(EFAULT))?;
    peer.kill();
    Ok(())
}

fn killed_processes_leave_nothing(host: &Host) -> Verdict {
    for _ in 0..5 {
        let mut peer = exporter(host, |session, link| {
            link.send(0)?;
            loop {
                let (handle, address) = session.device_mapping(0, MIB2)?;
                session.write(address, b"bytes").granted()?;
                session.unmap(address).granted()?;
                session.release(&handle).granted()?;
            }
        })?;
        let share = peer.link.receive()? as i32;
        peer.link.send(0)?;
        peer.link.receive()?;
        peer.kill();
        check_in_child(|| {
            let watcher = Session::host(host)?;
            eventually("the share is gone", || watcher.get_info(0, share) == Err(EFAULT))
        })?;
    }
    Ok(())
}
