//! Peer access, and advice to reservations.

use super::copy::{on_device, with_import};
use crate::host::Host;
use crate::rule::{Judge, Need, Rule, Verdict, rule};
use crate::session::{GIB, MIB2, Session};
use ascend_ioctl::svm;
use libc::{EADDRNOTAVAIL, EBUSY, EINVAL, EOPNOTSUPP};

pub const RULES: &[Rule] = &[
    rule!(peers_reach_foreign_memory_never, Ran).decided_by("devmm_ioctl_prefetch, svm_master_advise.c"),
    rule!(peers_reach_nothing_where_nothing_is, Ran).decided_by("devmm_get_reserve_mem_attr, devmm_proc_info.c"),
    rule!(peers_reach_no_host_memory, Ran).decided_by("devmm_set_page_ref_advise, svm_heap_mng.h"),
    rule!(peers_reach_only_what_is_mapped, Ran).decided_by("devmm_set_page_ref_of_adivse, devmm_proc_info.c"),
    rule!(a_device_reaches_its_own_memory, Ran).decided_by("devmm_advise_d2d_populate_process, svm_master_advise.c"),
    rule!(a_peer_reaches_device_memory, Inferred)
        .decided_by("devmm_advise_d2d_populate_process, svm_master_advise.c")
        .needs(&[Need::TwoDevices]),
    rule!(a_peer_reaches_no_imported_memory, Ran).decided_by("devmm_prefetch_para_check, svm_master_advise.c"),
    rule!(advice_to_populate_a_reservation_is_eopnotsupp, Ran)
        .decided_by("devmm_ioctl_advise_reserve, svm_master_advise.c"),
    rule!(other_advice_to_a_reservation_is_granted, Ran).decided_by("devmm_ioctl_advise_reserve, svm_master_advise.c"),
    rule!(advice_to_an_unmapped_part_of_a_used_reservation_is_ebusy, Ran)
        .decided_by("devmm_set_page_ref_advise, svm_heap_mng.h"),
];

fn peers_reach_foreign_memory_never(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    session.prefetch(0, 0x1000, MIB2).refused(EADDRNOTAVAIL)
}

fn peers_reach_nothing_where_nothing_is(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = session.reserve(2 * MIB2)?;
    session.prefetch(0, address + 10 * GIB, MIB2).refused(EINVAL)?;
    session.prefetch(0, address + 100 * MIB2, MIB2).refused(EINVAL)?;
    session.prefetch(0, address, MIB2).refused(EADDRNOTAVAIL)
}

fn peers_reach_no_host_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, near) = session.host_mapping(MIB2)?;
    session.prefetch(0, near, MIB2).refused(EBUSY)
}

fn peers_reach_only_what_is_mapped(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&handle, address, MIB2).granted()?;
    session.prefetch(0, address + MIB2, MIB2).refused(EBUSY)?;
    session.prefetch(0, address, 2 * MIB2).refused(EINVAL)?;
    session.prefetch(0, address, 0).refused(EINVAL)
}

fn a_device_reaches_its_own_memory(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.prefetch(0, far, 2 * MIB2).granted()
}

fn a_peer_reaches_device_memory(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    session.prefetch(1, far, MIB2).granted()?;
    session.prefetch(1, far, MIB2).granted()?;
    session.unmap(far).granted()?;
    session.free(far).granted()
}

fn a_peer_reaches_no_imported_memory(host: &Host) -> Verdict {
    with_import(host, |session, imported| session.prefetch(0, imported, MIB2).refused(EINVAL))
}

fn advice_to_populate_a_reservation_is_eopnotsupp(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    session.advise(0, far, MIB2, svm::Advice::POPULATE).refused(EOPNOTSUPP)
}

fn other_advice_to_a_reservation_is_granted(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = session.reserve(MIB2)?;
    session.advise(0, address, MIB2, svm::Advice::HUGE).granted()?;
    session.advise(svm::HOST_ID, address, MIB2, svm::Advice::HUGE).granted()?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    let flags = (0..16).map(|bit| svm::Advice::from_bits_retain(1 << bit));
    for advice in flags.filter(|advice| *advice != svm::Advice::POPULATE) {
        session.advise(0, far, MIB2, advice).granted()?;
    }
    Ok(())
}

fn advice_to_an_unmapped_part_of_a_used_reservation_is_ebusy(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let handle = session.device_huge(0, MIB2).granted()?;
    let address = session.reserve(4 * MIB2)?;
    session.map(&handle, address, MIB2).granted()?;
    session.advise(0, address + MIB2, MIB2, svm::Advice::HUGE).refused(EBUSY)
}
