//! Opening and closing the session: what can fail, who else may use the driver in this process, and
//! what the errors say.

use crate::support::{
    Directory, MIB2, assert_nothing_left, calls, contents, count, device, inject, mapped_on, open, plain,
};
use ascend_emulator::config::Door;
use ascend_emulator::{Config, isolated, on_each_generation};
use ascend_ioctl::klog;
use ascend_vmm::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::{Error, Generation, Kind, MemoryKind, Session};
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::num::NonZeroUsize;

#[test]
fn a_session_can_be_opened_again_after_it_was_closed() {
    on_each_generation(Config::default(), |_, _| {
        for round in 0..3u8 {
            let session = Session::open().unwrap();
            let device = device(u32::from(round % 2));
            let memory = device.create(MIB2).unwrap();
            let reservation = session.reserve(MIB2).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            mapping.fill(0, MIB2, round).unwrap();
            // In any order.
            match round {
                0 => {
                    drop(session);
                    drop(device);
                    drop(memory);
                    drop(reservation);
                    drop(mapping);
                }
                1 => {
                    drop(mapping);
                    drop(reservation);
                    drop(device);
                    drop(memory);
                    session.close().unwrap();
                }
                _ => {
                    drop(reservation);
                    drop(memory);
                    drop(mapping);
                    drop(device);
                    drop(session);
                }
            }
        }
    });
}

#[test]
fn a_process_has_one_session_and_every_part_of_it_can_use_it() {
    isolated(Config::default(), |_| {
        let first = Session::current().unwrap();
        let second = Session::current().unwrap();
        assert!(matches!(Session::open(), Err(Error::SessionOpen)));
        let failed = first.close().unwrap_err();
        assert!(failed.to_string().contains("1 other reference"), "{failed}");
        let first = failed.object.unwrap();
        drop(second);
        first.close().unwrap();
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn threads_that_open_and_close_at_once_share_one_session_after_the_other() {
    isolated(Config::default(), |emulator| {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for _ in 0..10 {
                        device(thread % 2).create(MIB2).unwrap().free().unwrap();
                    }
                });
            }
        });
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_session_with_live_objects_is_not_closed_but_returned() {
    isolated(Config::default(), |_| {
        let session = Session::open().unwrap();
        let device = device(0);
        let memory = device.create(MIB2).unwrap();
        let failed = session.close().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }));
        let session = failed.object.unwrap();
        let failed = device.close().unwrap_err();
        assert!(failed.to_string().contains("device 0"), "{failed}");
        memory.free().unwrap();
        failed.object.close().unwrap();
        session.close().unwrap();
    });
}

#[test]
fn a_foreign_session_in_the_process_is_reported_and_its_end_is_awaited_on_the_same_file() {
    on_each_generation(Config::default(), |_, emulator| {
        // Another library in this process, which uses the driver without segments.
        let other = foreign::session();
        emulator.record();
        for _ in 0..3 {
            let error = Session::open().unwrap_err();
            assert!(matches!(error, Error::SessionTaken(_)), "{error}");
            assert_eq!(error.errno(), Some(Errno::EEXIST));
            assert!(error.to_string().contains("one memory session per process"), "{error}");
        }
        assert_eq!(count(emulator, "ALLOC_PROC_STRUCT"), 1, "another file would leak kernel memory for good");
        drop(other);
        let session = Session::open().unwrap();
        assert!(!session.has_segments(), "the end of the other session unmapped our segments, for good");
        device(0).create(MIB2).unwrap();
        session.close().unwrap();
    });
}

#[test]
fn a_library_that_mapped_the_segments_is_reported_and_nothing_is_lost() {
    on_each_generation(Config::default(), |_, emulator| {
        let other = foreign::mapped();
        let error = Session::open().unwrap_err();
        assert!(matches!(error, Error::SessionTaken(_)), "{error}");
        assert!(error.to_string().contains("Other code in this process has the driver open"), "{error}");
        drop(other);
        assert_nothing_left(emulator);
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn the_vendors_library_in_the_process_is_reported_by_its_path() {
    isolated(Config::default(), |_| {
        // A loaded library is recognised by the name of its mapped file.
        let directory = Directory::new();
        let path = directory.join("libascend_hal.so");
        std::fs::write(&path, [0; 4096]).unwrap();
        let library = foreign::load(&path);
        drop(directory);
        let name = path.to_string_lossy().into_owned();
        let without_segments = foreign::session();
        let error = Session::builder().segments(false).open().unwrap_err();
        assert!(matches!(error, Error::SessionTaken(_)) && error.to_string().contains(&name), "{error}");
        drop(without_segments);
        Session::builder().segments(false).open().unwrap().close().unwrap();
        let with_segments = foreign::mapped();
        let error = Session::open().unwrap_err();
        assert!(matches!(error, Error::SessionTaken(_)) && error.to_string().contains(&name), "{error}");
        drop((with_segments, library));
    });
}

#[test]
fn without_segments_device_memory_works_and_errors_name_what_is_missing() {
    on_each_generation(Config::default(), |_, emulator| {
        emulator.record();
        let session = Session::builder().segments(false).open().unwrap();
        assert!(!session.has_segments());
        assert!(!calls(emulator).contains(&"mmap"));
        let mapping = mapped_on(&device(0), MIB2);
        mapping.write(5, b"bytes").unwrap();
        assert_eq!(contents(&mapping, 5, 5), b"bytes");
        let error = mapping.host_view().unwrap_err();
        assert!(error.to_string().contains("without address segments"), "{error}");
        let host = session.host().unwrap().create(MIB2).unwrap();
        let elsewhere = session.reserve(MIB2).unwrap();
        let error = elsewhere.map(0, &host).unwrap_err();
        assert!(error.to_string().contains("without address segments"), "{error}");
        drop((mapping, host, elsewhere));
        session.close().unwrap();
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn a_driver_of_an_unknown_generation_is_refused_with_the_known_ones() {
    isolated(Config { unknown_generation: true, ..Config::default() }, |emulator| {
        let error = Session::open().unwrap_err();
        assert!(matches!(error, Error::UnknownGeneration { .. }), "{error}");
        assert!(error.to_string().contains("Known are 8.5.0, 9.0.0, 26.1"), "{error}");
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_missing_driver_is_reported_with_its_path() {
    isolated(Config { door: Door::Missing, ..Config::default() }, |_| {
        let error = Session::open().unwrap_err();
        assert_eq!(error.errno(), Some(Errno::ENOENT));
        assert!(error.to_string().contains("cannot open /dev/davinci_manager"), "{error}");
        assert!(error.to_string().contains("driver is not loaded"), "{error}");
    });
}

#[test]
fn every_step_of_bring_up_can_fail_and_leaves_nothing_behind() {
    on_each_generation(Config::default(), |_, emulator| {
        let steps = ["OPEN", "ALLOC_PROC_STRUCT", "GET_MMAP_INFO", "INIT_PROCESS", "SETUP_DEVICE"];
        for (step, errno) in steps.into_iter().flat_map(|step| [(step, "ENOMEM"), (step, "EBUSY")]) {
            inject(emulator, &format!("{step}#1={errno}"));
            let result = Session::open().and_then(|session| session.device(LogicalId(0)));
            let error = result.unwrap_err();
            assert_eq!(format!("{:?}", error.errno().unwrap()), errno, "{step}: {error}");
            assert!(error.to_string().contains(step), "{error}");
            assert_nothing_left(emulator);
            Session::open().unwrap().close().unwrap();
        }
    });
}

#[test]
fn an_interrupted_init_is_tried_again() {
    isolated(Config::default(), |emulator| {
        for nth in 1..=40 {
            inject(emulator, &format!("INIT_PROCESS#{nth}=EAGAIN"));
        }
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn the_ids_of_the_host_and_of_absent_devices_are_refused_with_the_reason() {
    isolated(Config::default(), |_| {
        let session = Session::open().unwrap();
        for id in [64, 65] {
            let error = session.device(LogicalId(id)).unwrap_err();
            assert!(error.to_string().contains("Session::host"), "{error}");
        }
        let error = session.device(LogicalId(7)).unwrap_err();
        assert!(matches!(error.errno(), Some(Errno::EINVAL)), "{error}");
        assert!(error.to_string().contains("no such device"), "{error}");
        let error = session.device(LogicalId(5000)).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::ENODEV), "{error}");
    });
}

#[test]
fn errors_quote_the_kernels_own_messages() {
    on_each_generation(Config::default(), |_, _| {
        let session = Session::open().unwrap();
        let host = session.host().unwrap();
        let kind = Kind { memory: MemoryKind::Ddr, ..Kind::default() };
        let first = host.create_on_node(MIB2, kind, 60_000).unwrap_err();
        let message = first.kernel_log().unwrap().to_owned();
        assert!(!message.is_empty());
        assert!(first.to_string().contains("The kernel said"), "{first}");
        // Each error quotes its own message, not the earlier ones.
        let second = host.create_on_node(MIB2, kind, 60_000).unwrap_err();
        assert_eq!(second.kernel_log().unwrap().lines().count(), message.lines().count());
    });
}

#[test]
fn a_session_can_be_opened_a_hundred_times() {
    isolated(plain(), |emulator| {
        for round in 0..100 {
            let session = Session::builder().segments(round % 3 != 0).open().unwrap();
            let mapping = mapped_on(&device(round % 2), MIB2);
            mapping.write(0, b"again").unwrap();
            drop((session, mapping));
            assert!(emulator.state().is_empty(), "round {round}");
        }
    });
}

#[test]
fn a_too_small_address_space_is_reported_and_device_memory_works_without_segments() {
    on_each_generation(plain(), |generation, emulator| {
        // First the 8 TiB of the first segment fit and the next one, which only the newest driver
        // needs, does not; then not even the first fits.
        let limits = [9 << 40, 1 << 40];
        for limit in limits.into_iter().skip(usize::from(generation != Generation::V26_1)) {
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            // SAFETY: the limit is a live local.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
            let error = Session::open().unwrap_err();
            assert_eq!(error.errno(), Some(Errno::ENOMEM), "{error}");
            assert!(error.to_string().contains("mmap"), "{error}");
            assert!(error.to_string().contains("without address segments"), "{error}");
            assert_nothing_left(emulator);
        }
        let _session = Session::builder().segments(false).open().unwrap();
        mapped_on(&device(0), MIB2).write(0, b"works").unwrap();
    });
}

#[test]
fn a_foreign_mapping_at_the_address_of_the_kernels_messages_is_left_alone() {
    let protections = [ProtFlags::PROT_NONE, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE];
    on_each_generation(plain(), |_, _| {
        let address = NonZeroUsize::new(klog::SVM_ERRORS as usize).unwrap();
        let length = NonZeroUsize::new(4096).unwrap();
        for protection in protections {
            // SAFETY: without MAP_FIXED the kernel uses free addresses only.
            let page = unsafe { mmap_anonymous(Some(address), length, protection, MapFlags::MAP_PRIVATE) }.unwrap();
            assert_eq!(page.addr(), address);
            let (session, device) = open(0);
            let mapping = mapped_on(&device, MIB2);
            let error = session.host().unwrap().create_on_node(MIB2, Kind::default(), 60_000).unwrap_err();
            assert_eq!(error.kernel_log().unwrap_or_default(), "", "{error}");
            drop((mapping, device));
            session.close().unwrap();
            // SAFETY: the page that was mapped above; nothing borrows from it.
            unsafe { munmap(page, 4096) }.unwrap();
        }
    });
}

/// A second user of the driver in this process, by bare system calls.
mod foreign {
    use crate::support::raw::ModuleFile;
    use ascend_ioctl::Generation;
    use ascend_ioctl::davinci;
    use ascend_ioctl::svm::{Arg, InitProcess, MmapInfo, Op, Para, SVM_SIZE, SVM_START};
    use nix::libc;
    use std::os::fd::AsRawFd;

    pub struct Foreign {
        file: ModuleFile,
    }

    fn svm<P: Para>(file: &ModuleFile, generation: Generation, op: Op, para: &P) -> i32 {
        file.ioctl(generation.svm(op).unwrap().command.request(), &mut Arg::new(0, para))
    }

    fn prepared() -> Foreign {
        let file = ModuleFile::open(davinci::module::SVM);
        let newest = svm(&file, Generation::NEWEST, Op::AllocProcStruct, &MmapInfo::default());
        if newest != 0 {
            assert_eq!(svm(&file, Generation::V8_5_0, Op::AllocProcStruct, &MmapInfo::default()), 0);
        }
        Foreign { file }
    }

    /// With a session, but without segments.
    pub fn session() -> Foreign {
        let foreign = prepared();
        assert_eq!(svm(&foreign.file, Generation::NEWEST, Op::InitProcess, &InitProcess::default()), 0);
        foreign
    }

    /// With the first segment mapped, but without a session.
    pub fn mapped() -> Foreign {
        let foreign = prepared();
        // SAFETY: without MAP_FIXED the kernel uses free addresses only.
        let address = unsafe {
            libc::mmap(
                SVM_START as *mut _,
                SVM_SIZE as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                foreign.file.as_raw_fd(),
                0,
            )
        };
        assert_eq!(address as u64, SVM_START);
        foreign
    }

    /// Maps a file, as a loader does.
    pub fn load(path: &std::path::Path) -> *mut libc::c_void {
        let file = std::fs::File::open(path).unwrap();
        // SAFETY: without MAP_FIXED the kernel uses free addresses only.
        unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) }
    }

    impl Drop for Foreign {
        fn drop(&mut self) {
            // Without segments a session outlives its file; it ends when exactly this range is
            // unmapped, whatever is mapped there. Something must be: Linux does not notify the
            // driver about an empty range.
            // SAFETY: without MAP_FIXED the kernel uses free addresses only, and nothing refers to
            // memory in this range.
            unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                libc::mmap(SVM_START as *mut _, 4096, libc::PROT_NONE, flags, -1, 0);
                libc::munmap(SVM_START as *mut _, SVM_SIZE as usize);
            }
        }
    }
}

#[test]
fn options_after_a_foreign_session_are_those_of_the_new_call() {
    on_each_generation(Config::default(), |_, _| {
        let other = foreign::session();
        let taken = |error: Error| assert!(matches!(error, Error::SessionTaken(_)), "{error}");
        taken(Session::builder().segments(false).open().unwrap_err());
        drop(other);
        let session = Session::open().unwrap();
        assert!(session.has_segments());
        crate::support::mapped_on_host(MIB2).write(0, b"seen by the CPU").unwrap();
        session.close().unwrap();

        let other = foreign::session();
        taken(Session::open().unwrap_err());
        drop(other);
        let session = Session::builder().segments(false).open().unwrap();
        assert!(!session.has_segments());
        let memory = session.host().unwrap().create(MIB2).unwrap();
        assert!(session.reserve(MIB2).unwrap().map(0, &memory).is_err());
    });
}

#[test]
fn an_unknown_generation_that_an_earlier_call_allowed_is_refused_by_one_that_does_not() {
    isolated(Config::default(), |emulator| {
        // The first segment has a size that no known driver gives it.
        inject(emulator, "GET_MMAP_INFO#1[8]=0000200000000000");
        let allowing = || Session::builder().segments(false).allow_unknown_generation(true);
        let unknown = |error: Error| assert!(matches!(error, Error::UnknownGeneration { .. }), "{error}");
        let other = foreign::session();
        let error = allowing().open().unwrap_err();
        assert!(matches!(error, Error::SessionTaken(_)), "{error}");
        unknown(Session::open().unwrap_err());
        drop(other);
        unknown(Session::open().unwrap_err());
        emulator.record();
        allowing().open().unwrap().close().unwrap();
        assert_eq!(count(emulator, "ALLOC_PROC_STRUCT"), 0, "the file of the first call is still there");
    });
}

#[test]
fn a_page_without_the_magic_word_says_nothing() {
    use ascend_ioctl::klog::{PAGE_SIZE, Page, SVM_ERRORS};
    use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
    isolated(plain(), |_| {
        let (start, size) = (std::num::NonZero::new(SVM_ERRORS as usize), std::num::NonZero::new(PAGE_SIZE).unwrap());
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: without MAP_FIXED the kernel only returns addresses that are not in use.
        let page = unsafe { mmap_anonymous(start, size, protection, MapFlags::MAP_PRIVATE) }.unwrap().cast::<Page>();
        let mut text = Page::empty(SVM_ERRORS);
        (text.magic[0], text.write) = (0, 4);
        text.text[..4].copy_from_slice(b"lies");
        // SAFETY: a fresh mapping of the page's size.
        unsafe { page.write(text) };
        let error = device(0).create(1 << 50).unwrap_err();
        assert_eq!(error.kernel_log(), None);
    });
}

#[test]
fn a_log_page_of_another_library_is_read_but_not_moved_and_may_go_away() {
    use ascend_ioctl::klog::{PAGE_SIZE, Page, SVM_ERRORS};
    use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    on_each_generation(plain(), |_, _| {
        let (start, size) = (std::num::NonZero::new(SVM_ERRORS as usize), std::num::NonZero::new(PAGE_SIZE).unwrap());
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: without MAP_FIXED the kernel only returns addresses that are not in use.
        let page = unsafe { mmap_anonymous(start, size, protection, MapFlags::MAP_PRIVATE) }.unwrap().cast::<Page>();
        assert_eq!(page.addr().get() as u64, SVM_ERRORS);
        // What stands in it already may be anything.
        let left = b"\x1b[31mred\x07\n";
        let mut before = Page::empty(SVM_ERRORS);
        before.text[..left.len()].copy_from_slice(left);
        before.write = left.len() as i32;
        // SAFETY: a fresh mapping of the page's size.
        unsafe { page.write(before) };
        let (session, device) = open(0);
        let reservation = session.reserve(MIB2).unwrap();
        let error = device.create(1 << 50).unwrap_err();
        assert!(error.kernel_log().unwrap().starts_with("\\u{1b}[31mred\\u{7}\n"), "{error:?}");
        assert!(!error.to_string().contains(char::is_control), "{error}");
        // SAFETY: still mapped, and nothing writes now.
        let seen = unsafe { page.read_volatile() };
        assert!(seen.read == 0 && seen.write > 0, "read {}, write {}", seen.read, seen.write);
        // SAFETY: this test's own mapping.
        unsafe { munmap(page.cast(), PAGE_SIZE) }.unwrap();
        reservation.free().unwrap();
        let error = device.create(1 << 50).unwrap_err();
        assert_eq!(error.kernel_log(), None);
    });
}
