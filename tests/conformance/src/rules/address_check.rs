//! CHECK_MEMINFO: what is at addresses.

use super::copy::on_device;
use crate::host::Host;
use crate::manager::NOWHERE;
use crate::rule::{Judge, Need, Rule, Verdict, rule};
use crate::session::{MIB2, Session};
use ascend_ioctl::svm::{self, Op};
use libc::{EFAULT, EINVAL};

pub const RULES: &[Rule] = &[
    rule!(checking_no_addresses_is_einval, Source).decided_by("devmm_check_mem_info_para_check, devmm_proc_info.c"),
    rule!(checking_too_many_addresses_is_einval, Source)
        .decided_by("devmm_check_mem_info_para_check, devmm_proc_info.c"),
    rule!(checking_addresses_without_a_list_is_einval, Source)
        .decided_by("devmm_check_mem_info_para_check, devmm_proc_info.c"),
    rule!(checking_what_is_not_there_is_efault, Source).decided_by("devmm_check_meminfo, devmm_proc_info.c"),
    rule!(checking_mapped_memory_is_granted, Source).decided_by("devmm_check_meminfo, devmm_proc_info.c"),
    rule!(checking_memory_of_another_device_is_efault, Source)
        .decided_by("devmm_check_meminfo, devmm_proc_info.c")
        .needs(&[Need::TwoDevices]),
    rule!(checking_memory_of_another_sub_kind_is_efault, Source).decided_by("devmm_check_meminfo, devmm_proc_info.c"),
    rule!(checking_an_unmapped_list_is_einval, Source).decided_by("devmm_meminfo_para_init, devmm_proc_info.c"),
];

fn check_addresses(session: &Session, addresses: u64, count: u32) -> Result<svm::Arg, i32> {
    let para = svm::CheckMemInfo { addresses, count, heap_subtype_mask: u32::MAX };
    session.svm.call(Op::CheckMemInfo, 0, &para)
}

fn checking_no_addresses_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let list = [0u64; 4];
    check_addresses(&session, list.as_ptr() as u64, 0).refused(EINVAL)
}

fn checking_too_many_addresses_is_einval(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let list = [0u64; 1025];
    check_addresses(&session, list.as_ptr() as u64, 1025).refused(EINVAL)
}

fn checking_addresses_without_a_list_is_einval(host: &Host) -> Verdict {
    check_addresses(&Session::start(host)?, 0, 1).refused(EINVAL)
}

fn checking_what_is_not_there_is_efault(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let reserved = session.reserve(MIB2)?;
    for address in [reserved, 0x1000] {
        let list = [address];
        check_addresses(&session, list.as_ptr() as u64, 1).refused(EFAULT)?;
    }
    Ok(())
}

fn checking_mapped_memory_is_granted(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let list = [far, far + 100, far + 2 * MIB2 - 1];
    check_addresses(&session, list.as_ptr() as u64, 3).granted().map(drop)
}

fn checking_memory_of_another_device_is_efault(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let (_, first) = session.device_mapping(0, MIB2)?;
    let (_, second) = session.device_mapping(1, MIB2)?;
    let list = [first, second];
    check_addresses(&session, list.as_ptr() as u64, 2).refused(EFAULT)
}

fn checking_memory_of_another_sub_kind_is_efault(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let list = [far];
    let para =
        svm::CheckMemInfo { addresses: list.as_ptr() as u64, count: 1, heap_subtype_mask: !(1 << svm::SUB_RESERVE) };
    session.svm.call(Op::CheckMemInfo, 0, &para).refused(EFAULT)
}

fn checking_an_unmapped_list_is_einval(host: &Host) -> Verdict {
    check_addresses(&Session::start(host)?, NOWHERE, 1).refused(EINVAL)
}
