//! Asynchronous copies: submitted, then refreshed exactly once. Their memory is busy until then.

use crate::host::Host;
use crate::manager::{NOWHERE, anonymous, munmap, page_size};
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{FIRST_HEAP, GIB, MIB2, Session};
use ascend_ioctl::{Generation, svm};
use libc::{EBUSY, EFAULT, EINVAL, ENOSPC};

pub const RULES: &[Rule] = &[
    rule!(an_asynchronous_copy_is_done_when_refreshed, Ran)
        .decided_by("devmm_cpy_result_refresh, devmm_proc_mem_copy.c"),
    rule!(tasks_are_numbered_from_zero, Ran).decided_by("devmm_idr_alloc, svm_res_idr.c"),
    rule!(refreshing_an_unknown_task_is_einval, Ran).decided_by("devmm_cpy_result_refresh, devmm_proc_mem_copy.c"),
    rule!(refreshing_twice_is_einval, Ran).decided_by("devmm_cpy_result_refresh, devmm_proc_mem_copy.c"),
    rule!(numbers_of_tasks_are_not_reused_at_once, Ran).decided_by("devmm_idr_alloc, svm_res_idr.c"),
    rule!(asynchronous_copies_within_one_side_are_einval, Ran)
        .decided_by("devmm_check_va_direction, svm_master_memcpy.c"),
    rule!(a_task_keeps_its_mapping_until_it_is_refreshed, Ran).decided_by("devmm_vmma_exclusive_set, svm_vmma_mng.c"),
    rule!(a_task_keeps_its_reservation_until_it_is_refreshed, Ran)
        .decided_by("devmm_set_page_ref_free, svm_heap_mng.c"),
    rule!(a_task_keeps_all_of_its_mappings_until_it_is_refreshed, Ran)
        .decided_by("devmm_set_async_cpy_para, devmm_proc_mem_copy.c")
        .since(Generation::V26_1),
    rule!(a_refreshed_task_keeps_all_mappings_but_its_first, Ran)
        .decided_by("devmm_dma_copy_task_set_para, devmm_proc_mem_copy.c")
        .before(Generation::V26_1),
    rule!(tasks_of_one_mapping_each_keep_nothing, Ran)
        .decided_by("devmm_async_cpy_dec_addr_ref, devmm_proc_mem_copy.c"),
    rule!(a_task_over_a_border_may_not_keep_its_second_mapping, Source)
        .decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
    rule!(a_failed_submission_keeps_nothing, Ran).decided_by("devmm_ioctl_async_memcpy_proc, svm_master_memcpy.c"),
    rule!(the_source_may_go_before_the_refresh, Ran).decided_by("devmm_pin_user_pages_fast, devmm_common.c"),
    rule!(finished_tasks_do_not_stop_a_device_from_closing, Ran)
        .decided_by("devmm_proc_dev_async_task_is_empty, svm_master_proc_mng.c"),
    rule!(a_task_can_be_refreshed_after_its_device_was_closed, Ran)
        .decided_by("devmm_wait_async_cpy_result, devmm_proc_mem_copy.c"),
    rule!(finished_tasks_do_not_stop_a_heap_from_going, Ran)
        .decided_by("devmm_wait_svm_heap_unoccupied, devmm_common.c"),
    rule!(the_table_holds_65535_tasks, Ran).decided_by("devmm_idr_alloc, svm_res_idr.c").needs(&[Need::Patience]),
    rule!(of_two_threads_that_refresh_one_wins, Ran).decided_by("devmm_idr_get_and_remove, svm_res_idr.c"),
];

/// A session with 2 MiB of device memory mapped.
fn on_device(host: &Host) -> Result<(Session, u64), Failure> {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    Ok((session, address))
}

fn an_asynchronous_copy_is_done_when_refreshed(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes = *b"there and back";
    let near = bytes.as_mut_ptr() as u64;
    let task = session.copy_async(far, near, 14).granted()?;
    equal("state", session.refresh(task).granted()?, svm::ASYNC_DONE)?;
    equal("bytes on the device", session.read(far, 14).granted()?, b"there and back".to_vec())?;
    let mut back = [0u8; 5];
    let task = session.copy_async(back.as_mut_ptr() as u64, far, 5).granted()?;
    equal("state", session.refresh(task).granted()?, svm::ASYNC_DONE)?;
    equal("bytes on the host", std::hint::black_box(back), *b"there")
}

fn tasks_are_numbered_from_zero(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    for number in 0..3 {
        equal("task", session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?, number)?;
    }
    Ok(())
}

fn refreshing_an_unknown_task_is_einval(host: &Host) -> Verdict {
    let (session, _) = on_device(host)?;
    session.refresh(0).refused(EINVAL)?;
    session.refresh(-1).refused(EINVAL)?;
    session.refresh(1 << 20).refused(EINVAL)
}

fn refreshing_twice_is_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    let task = session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?;
    session.refresh(task).granted()?;
    session.refresh(task).refused(EINVAL)
}

fn numbers_of_tasks_are_not_reused_at_once(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    let task = session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?;
    session.refresh(task).granted()?;
    equal("next task", session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?, task + 1)
}

fn asynchronous_copies_within_one_side_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes = [1u8; 64];
    let near = bytes.as_mut_ptr() as u64;
    session.copy_async(far, far + 64, 8).refused(EINVAL)?;
    session.copy_async(near, near + 32, 8).refused(EINVAL)
}

fn a_task_keeps_its_mapping_until_it_is_refreshed(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    let task = session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?;
    session.unmap(far).refused(EBUSY)?;
    session.refresh(task).granted()?;
    session.unmap(far).granted().map(drop)
}

fn a_task_keeps_its_reservation_until_it_is_refreshed(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    let task = session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?;
    session.free(far).refused(EBUSY)?;
    session.refresh(task).granted()?;
    session.unmap(far).granted()?;
    session.free(far).granted()
}

/// Two neighbouring mappings of 2 MiB, of a device or of the host.
fn neighbours(session: &Session, of_host: bool) -> Result<[u64; 2], Failure> {
    let address = session.reserve(2 * MIB2)?;
    for at in [address, address + MIB2] {
        let handle = if of_host { session.host_huge(MIB2) } else { session.device_huge(0, MIB2) }.granted()?;
        session.map(&handle, at, MIB2).granted()?;
    }
    Ok([address, address + MIB2])
}

/// A task to the device and one back, each over two mappings of one side, with those mappings.
fn tasks_over_two_mappings(session: &Session) -> Result<[(i32, [u64; 2]); 2], Failure> {
    let (_, whole) = session.device_mapping(0, 2 * MIB2)?;
    let [near, far] = [neighbours(session, true)?, neighbours(session, false)?];
    let mut bytes = vec![0u8; 2 * MIB2 as usize];
    let there = session.copy_async(whole, near[0], 2 * MIB2).granted()?;
    let back = session.copy_async(bytes.as_mut_ptr() as u64, far[0], 2 * MIB2).granted()?;
    for address in near.into_iter().chain(far) {
        session.unmap(address).refused(EBUSY)?;
    }
    for task in [there, back] {
        equal("state", session.refresh(task).granted()?, svm::ASYNC_DONE)?;
    }
    Ok([(there, near), (back, far)])
}

fn a_task_keeps_all_of_its_mappings_until_it_is_refreshed(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    for (_, mappings) in tasks_over_two_mappings(&session)? {
        for address in mappings {
            session.unmap(address).granted()?;
        }
    }
    Ok(())
}

fn a_refreshed_task_keeps_all_mappings_but_its_first(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    for (task, [first, second]) in tasks_over_two_mappings(&session)? {
        session.unmap(first).granted()?;
        session.unmap(second).refused(EBUSY)?;
        session.refresh(task).refused(EINVAL)?;
        session.unmap(second).refused(EBUSY)?;
    }
    Ok(())
}

fn tasks_of_one_mapping_each_keep_nothing(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let mappings = neighbours(&session, false)?;
    let bytes = vec![0u8; MIB2 as usize];
    let mut tasks = Vec::new();
    for address in mappings {
        tasks.push(session.copy_async(address, bytes.as_ptr() as u64, MIB2).granted()?);
    }
    for task in tasks {
        equal("state", session.refresh(task).granted()?, svm::ASYNC_DONE)?;
    }
    for address in mappings {
        session.unmap(address).granted()?;
    }
    Ok(())
}

fn a_task_over_a_border_may_not_keep_its_second_mapping(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let [first, second] = neighbours(&session, false)?;
    let bytes = [1u8; 64];
    let task = session.copy_async(second - 32, bytes.as_ptr() as u64, 64).granted()?;
    session.unmap(first).refused(EBUSY)?;
    session.unmap(second).granted()?;
    equal("state", session.refresh(task).granted()?, svm::ASYNC_DONE)?;
    session.unmap(first).granted().map(drop)
}

fn a_failed_submission_keeps_nothing(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.copy_async(far, NOWHERE, 64).refused(EFAULT)?;
    session.copy_async(far, far + 64, 8).refused(EINVAL)?;
    session.unmap(far).granted()?;
    session.free(far).granted()
}

fn the_source_may_go_before_the_refresh(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let page = page_size();
    let near = anonymous(0, page, libc::PROT_READ | libc::PROT_WRITE).granted()?;
    crate::session::poke(near, 0x1357);
    let task = session.copy_async(far, near, 8).granted()?;
    munmap(near, page).granted()?;
    equal("state", session.refresh(task).granted()?, svm::ASYNC_DONE)?;
    equal("bytes", session.read(far, 8).granted()?, 0x1357u64.to_le_bytes().to_vec())
}

fn finished_tasks_do_not_stop_a_device_from_closing(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?;
    session.prepare_close(0).granted()?;
    session.close_device(0).granted()
}

fn a_task_can_be_refreshed_after_its_device_was_closed(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    let task = session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?;
    session.prepare_close(0).granted()?;
    session.close_device(0).granted()?;
    equal("state", session.refresh(task).granted()?, svm::ASYNC_DONE)
}

fn finished_tasks_do_not_stop_a_heap_from_going(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    let task = session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?;
    session.disable(FIRST_HEAP, GIB).granted()?;
    equal("state", session.refresh(task).granted()?, svm::ASYNC_DONE)
}

fn the_table_holds_65535_tasks(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    let near = bytes.as_ptr() as u64;
    for _ in 0..svm::ASYNC_TASKS {
        session.copy_async(far, near, 8).granted()?;
    }
    session.copy_async(far, near, 8).refused(ENOSPC)?;
    session.refresh(7).granted()?;
    session.copy_async(far, near, 8).granted().map(drop)
}

fn of_two_threads_that_refresh_one_wins(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    for _ in 0..20 {
        let task = session.copy_async(far, bytes.as_ptr() as u64, 8).granted()?;
        let (fd, request) = (session.svm.file.fd(), session.svm.request_of(svm::Op::MemcpyResultRefresh));
        let refresh = move || {
            let mut arg = svm::Arg::new(0, &svm::AsyncMemcpy { task, ..Default::default() });
            crate::manager::ioctl(fd, request, std::ptr::from_mut(&mut arg) as u64)
        };
        let other = std::thread::spawn(refresh);
        let mut answers = [refresh(), other.join().map_err(|_| Failure::broken("a thread panicked"))?];
        answers.sort();
        equal("answers", answers, [Ok(0), Err(EINVAL)])?;
    }
    Ok(())
}
