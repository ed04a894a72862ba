//! Fills.

use super::copy::{host_memory_on_a_device, on_device};
use crate::host::Host;
use crate::rule::{Failure, Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{GIB, Handle, MIB2, Session, peek};
use libc::EINVAL;

pub const RULES: &[Rule] = &[
    rule!(fills_of_host_memory_imported_on_a_device_are_einval, Ran)
        .decided_by("devmm_get_dma_copy_devid, devmm_proc_mem_copy.c"),
    rule!(device_memory_is_filled, Inferred).decided_by("devmm_send_memset_device_msg, svm_master_memset.c"),
    rule!(filling_host_memory_is_left_to_the_caller, Source)
        .decided_by("devmm_memset_fill_pages_process, svm_master_memset.c"),
    rule!(filling_foreign_memory_is_einval, Source).decided_by("devmm_ioctl_memset_process, svm_master_memset.c"),
    rule!(filling_nothing_is_einval, Source).decided_by("devmm_ioctl_memset_device_check, svm_master_memset.c"),
    rule!(filling_more_than_a_heap_is_einval, Source).decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
    rule!(a_fill_over_two_imports_fills_the_first_and_is_einval, Inferred)
        .decided_by("devmm_share_mem_memset, svm_master_memset.c")
        .needs(&[Need::TwoDevices]),
    rule!(a_fill_over_two_imports_fills_what_is_not_mapped_of_the_first, Ran)
        .decided_by("devmm_share_mem_memset, svm_master_memset.c")
        .needs(&[Need::TwoDevices]),
    rule!(filling_where_nothing_is_mapped_is_einval, Source).decided_by("devmm_vmmas_occupy_inc, svm_vmma_mng.c"),
];

fn fills_of_host_memory_imported_on_a_device_are_einval(host: &Host) -> Verdict {
    let (session, _, address) = host_memory_on_a_device(host)?;
    session.fill(address, 1, 64).refused(EINVAL)
}

/// Two shares of device 0, mapped where their exporter has them, and imported on device 1.
fn imports(session: &Session, sizes: [u64; 2]) -> Result<[(u64, Handle); 2], Failure> {
    let import = |size| {
        let (handle, address) = session.device_mapping(0, size)?;
        session.write(address, &vec![1; size as usize]).granted()?;
        let share = session.export(&handle).granted()?;
        session.trust(0, share, &[session.identity()?.tgid]).granted()?;
        Ok((address, session.import(1, 0, share).granted()?))
    };
    Ok([import(sizes[0])?, import(sizes[1])?])
}

fn a_fill_over_two_imports_fills_the_first_and_is_einval(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let [(first, one), (second, other)] = imports(&session, [MIB2, MIB2])?;
    let address = session.reserve(2 * MIB2)?;
    session.map(&one, address, MIB2).granted()?;
    session.map(&other, address + MIB2, MIB2).granted()?;
    session.fill(address, 0xAB, 2 * MIB2).map(drop).refused(EINVAL)?;
    equal("end of the first", session.read(first + MIB2 - 1, 1).granted()?, vec![0xAB])?;
    equal("start of the second", session.read(second, 1).granted()?, vec![1])
}

fn a_fill_over_two_imports_fills_what_is_not_mapped_of_the_first(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let [(first, one), (second, other)] = imports(&session, [2 * MIB2, MIB2])?;
    let address = session.reserve(2 * MIB2)?;
    session.map(&one, address, MIB2).granted()?;
    session.map(&other, address + MIB2, MIB2).granted()?;
    equal("left to the caller", session.fill(address, 0xAB, 2 * MIB2).granted()?, false)?;
    equal("end of the first, not mapped", session.read(first + 2 * MIB2 - 1, 1).granted()?, vec![0xAB])?;
    equal("start of the second", session.read(second, 1).granted()?, vec![1])
}

fn device_memory_is_filled(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.write(far, &[1; 64]).granted()?;
    equal("left to the caller", session.fill(far + 8, 0xAB, 16).granted()?, false)?;
    let bytes = session.read(far, 64).granted()?;
    equal("before", bytes[7], 1)?;
    equal("filled", &bytes[8..24], &[0xAB; 16])?;
    equal("after", bytes[24], 1)
}

fn filling_host_memory_is_left_to_the_caller(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, near) = session.host_mapping(MIB2)?;
    equal("left to the caller", session.fill(near, 0xAB, 16).granted()?, true)?;
    equal("word", peek(near), 0)
}

fn filling_foreign_memory_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let bytes = [0u8; 64];
    session.fill(bytes.as_ptr() as u64, 1, 64).refused(EINVAL)
}

fn filling_nothing_is_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.fill(far, 1, 0).refused(EINVAL)
}

fn filling_more_than_a_heap_is_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.fill(far, 1, GIB + 1).refused(EINVAL)
}

fn filling_where_nothing_is_mapped_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = session.reserve(MIB2)?;
    session.fill(address, 1, 64).refused(EINVAL)?;
    session.fill(address + 100 * MIB2, 1, 64).refused(EINVAL)
}
