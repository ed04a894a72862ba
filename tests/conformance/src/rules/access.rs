//! Access to a mapping: the owner has it; others are granted it once, for the mapping's lifetime.

use crate::host::Host;
use crate::rule::{Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{ABSENT, MIB2, Session, peek, poke};
use ascend_ioctl::svm::{ACCESS_READ, ACCESS_READ_WRITE, HOST_ID};
use libc::{EEXIST, EINVAL, EOPNOTSUPP};

pub const RULES: &[Rule] = &[
    rule!(an_owner_has_all_access_from_the_start, Source)
        .decided_by("devmm_ioctl_vmma_info_pack, svm_master_mem_map.c"),
    rule!(an_owners_access_can_be_set_at_will, Ran).decided_by("devmm_ioctl_mem_set_access, svm_master_mem_map.c"),
    rule!(access_of_an_unknown_type_is_einval, Source)
        .decided_by("devmm_is_mem_access_type_valid, svm_master_mem_map.c"),
    rule!(access_of_an_absent_device_is_einval, Source).decided_by("uda_devid_to_udevid_ex, uda_access.c"),
    rule!(access_is_granted_to_whole_mappings, Source).decided_by("devmm_vmma_matched_get, svm_master_mem_map.c"),
    rule!(access_where_nothing_is_mapped_is_einval, Source).decided_by("devmm_vmma_matched_get, svm_master_mem_map.c"),
    rule!(the_cpu_is_granted_access_to_device_memory, Inferred)
        .decided_by("_devmm_h2d_access_mmap, svm_master_mem_map.c"),
    rule!(the_cpus_access_is_granted_once, Ran).decided_by("devmm_ioctl_mem_set_access, svm_master_mem_map.c"),
    rule!(the_cpus_access_ends_with_the_mapping, Source).decided_by("devmm_access_munmap_all, svm_master_mem_map.c"),
    rule!(reading_access_of_the_cpu_lets_it_write, Ran).decided_by("devmm_access_remap_addrs, svm_master_mem_map.c"),
    rule!(devices_on_pci_express_have_no_access_to_host_memory, Ran)
        .decided_by("devmm_d2h_access_mmap, svm_master_mem_map.c")
        .needs(&[Need::Pcie]),
    rule!(devices_on_hccs_are_granted_access_to_host_memory, Inferred)
        .decided_by("devmm_d2h_access_mmap, svm_master_mem_map.c")
        .needs(&[Need::Hccs]),
    rule!(a_peer_is_granted_access_once, Ran)
        .decided_by("devmm_ioctl_mem_set_access, svm_master_mem_map.c")
        .needs(&[Need::TwoDevices]),
    rule!(the_granted_access_is_reported, Source).decided_by("devmm_ioctl_mem_get_access, svm_master_mem_map.c"),
    rule!(access_that_was_not_granted_is_none, Source).decided_by("devmm_ioctl_mem_get_access, svm_master_mem_map.c"),
    rule!(an_access_query_reports_the_whole_mapping, Ran)
        .decided_by("devmm_ioctl_mem_get_access, svm_master_mem_map.c"),
    rule!(the_question_for_access_beyond_the_mapping_is_einval, Source)
        .decided_by("devmm_ioctl_mem_get_access, svm_master_mem_map.c"),
    rule!(the_question_for_access_of_an_absent_device_is_einval, Source)
        .decided_by("uda_devid_to_udevid_ex, uda_access.c"),
    rule!(the_question_for_access_where_nothing_is_mapped_is_einval, Source)
        .decided_by("devmm_ioctl_mem_get_access, svm_master_mem_map.c"),
];

fn an_owner_has_all_access_from_the_start(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, near) = session.host_mapping(MIB2)?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    equal("the host's", session.get_access(near, MIB2, HOST_ID).granted()?.access, ACCESS_READ_WRITE)?;
    equal("the device's", session.get_access(far, MIB2, 0).granted()?.access, ACCESS_READ_WRITE)
}

fn an_owners_access_can_be_set_at_will(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    for access in [ACCESS_READ, ACCESS_READ_WRITE, ACCESS_READ, ACCESS_READ] {
        session.set_access(address, MIB2, HOST_ID, access).granted()?;
        equal("access", session.get_access(address, MIB2, HOST_ID).granted()?.access, access)?;
    }
    poke(address, 5);
    equal("word that the CPU wrote with reading access", peek(address), 5)
}

fn access_of_an_unknown_type_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    session.set_access(address, MIB2, HOST_ID, 2).refused(EINVAL)?;
    session.set_access(address, MIB2, HOST_ID, 4).refused(EINVAL)
}

fn access_of_an_absent_device_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    session.set_access(address, MIB2, ABSENT, ACCESS_READ_WRITE).refused(EINVAL)?;
    session.set_access(address, MIB2, 66, ACCESS_READ_WRITE).refused(EINVAL)
}

fn access_is_granted_to_whole_mappings(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(2 * MIB2)?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ_WRITE).refused(EINVAL)?;
    session.set_access(address + MIB2, MIB2, HOST_ID, ACCESS_READ_WRITE).refused(EINVAL)?;
    session.set_access(address, 4 * MIB2, HOST_ID, ACCESS_READ_WRITE).refused(EINVAL)?;
    session.set_access(address, 2 * MIB2, HOST_ID, ACCESS_READ_WRITE).granted()
}

fn access_where_nothing_is_mapped_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = session.reserve(MIB2)?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ_WRITE).refused(EINVAL)
}

fn the_cpu_is_granted_access_to_device_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.write(address, &0x1234u64.to_le_bytes()).granted()?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ_WRITE).granted()?;
    equal("word through the CPU", peek(address), 0x1234)?;
    poke(address + 8, 0x5678);
    equal("word through a copy", session.read(address + 8, 8).granted()?, 0x5678u64.to_le_bytes().to_vec())
}

fn the_cpus_access_is_granted_once(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ_WRITE).granted()?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ_WRITE).refused(EEXIST)?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ).refused(EEXIST)
}

fn the_cpus_access_ends_with_the_mapping(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (handle, address) = session.device_mapping(0, MIB2)?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ_WRITE).granted()?;
    session.unmap(address).granted()?;
    session.map(&handle, address, MIB2).granted()?;
    equal("access", session.get_access(address, MIB2, HOST_ID).granted()?.access, 0)?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ_WRITE).granted()
}

fn reading_access_of_the_cpu_lets_it_write(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ).granted()?;
    poke(address, 9);
    equal("word through a copy", session.read(address, 8).granted()?, 9u64.to_le_bytes().to_vec())
}

fn devices_on_pci_express_have_no_access_to_host_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    session.set_access(address, MIB2, 0, ACCESS_READ_WRITE).refused(EOPNOTSUPP)
}

fn devices_on_hccs_are_granted_access_to_host_memory(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    session.set_access(address, MIB2, 0, ACCESS_READ_WRITE).granted()?;
    session.set_access(address, MIB2, 0, ACCESS_READ_WRITE).refused(EEXIST)
}

fn a_peer_is_granted_access_once(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.set_access(address, MIB2, 1, ACCESS_READ_WRITE).granted()?;
    session.set_access(address, MIB2, 1, ACCESS_READ_WRITE).refused(EEXIST)
}

fn the_granted_access_is_reported(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    session.set_access(address, MIB2, HOST_ID, ACCESS_READ).granted()?;
    equal("access", session.get_access(address, MIB2, HOST_ID).granted()?.access, ACCESS_READ)
}

fn access_that_was_not_granted_is_none(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, near) = session.host_mapping(MIB2)?;
    let (_, far) = session.device_mapping(0, MIB2)?;
    equal("the host's", session.get_access(far, MIB2, HOST_ID).granted()?.access, 0)?;
    equal("the device's", session.get_access(near, MIB2, 0).granted()?.access, 0)
}

fn an_access_query_reports_the_whole_mapping(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(2 * MIB2)?;
    equal("size for size 0", session.get_access(address, 0, HOST_ID).granted()?.size, 2 * MIB2)?;
    equal("size for an odd address", session.get_access(address + 5, 9, HOST_ID).granted()?.size, 2 * MIB2)
}

fn the_question_for_access_beyond_the_mapping_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    session.get_access(address, 2 * MIB2, HOST_ID).refused(EINVAL)?;
    session.get_access(address + 8, MIB2, HOST_ID).refused(EINVAL)
}

fn the_question_for_access_of_an_absent_device_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let (_, address) = session.host_mapping(MIB2)?;
    session.get_access(address, MIB2, ABSENT).refused(EINVAL)
}

fn the_question_for_access_where_nothing_is_mapped_is_einval(host: &Host) -> Verdict {
    let session = Session::host(host)?;
    let address = session.reserve(MIB2)?;
    session.get_access(address, MIB2, HOST_ID).refused(EINVAL)
}
