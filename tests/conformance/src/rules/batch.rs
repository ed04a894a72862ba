//! Copies in batches.

use super::copy::{host_memory_on_a_device, on_device, with_import};
use crate::host::Host;
use crate::manager::NOWHERE;
use crate::rule::{Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{MIB2, Session, poke};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, MemcpyBatch, Op};
use libc::{EINVAL, EOPNOTSUPP};

pub const RULES: &[Rule] = &[
    rule!(batches_of_host_memory_imported_on_a_device_are_eopnotsupp, Ran)
        .decided_by("devmm_memcpy_batch_mem_attr_check, svm_master_memcpy.c")
        .since(Generation::V9_0_0),
    rule!(batches_are_copied, Ran).decided_by("devmm_memcpy_batch_proc, svm_master_memcpy.c"),
    rule!(batches_of_nothing_are_einval, Ran).decided_by("devmm_memcpy_batch_para_check, svm_master_memcpy.c"),
    rule!(batches_without_lists_are_einval, Ran).decided_by("devmm_memcpy_batch_addr_info_init, svm_master_memcpy.c"),
    rule!(batches_have_at_most_4096_elements, Ran).decided_by("devmm_memcpy_batch_para_check, svm_master_memcpy.c"),
    rule!(batches_go_one_way, Ran).decided_by("devmm_check_va_direction, svm_master_memcpy.c"),
    rule!(batches_within_one_side_are_einval, Ran).decided_by("devmm_check_va_direction, svm_master_memcpy.c"),
    rule!(batches_with_an_empty_element_are_einval, Ran).decided_by("devmm_memcpy_para_check, svm_master_memcpy.c"),
    rule!(a_failing_batch_leaves_what_it_copied, Ran).decided_by("devmm_memcpy_batch_proc, svm_master_memcpy.c"),
    rule!(a_failing_batch_keeps_no_reference, Ran).decided_by("devmm_memcpy_batch_proc, svm_master_memcpy.c"),
    rule!(batches_of_imported_memory_are_eopnotsupp, Ran)
        .decided_by("devmm_memcpy_batch_mem_attr_check, svm_master_memcpy.c"),
    rule!(batches_take_mapped_host_memory, Ran).decided_by("devmm_memcpy_batch_proc, svm_master_memcpy.c"),
    rule!(batches_to_two_devices_are_einval, Ran)
        .decided_by("devmm_memcpy_batch_mem_attr_check, svm_master_memcpy.c")
        .needs(&[Need::TwoDevices]),
];

fn batches_of_host_memory_imported_on_a_device_are_eopnotsupp(host: &Host) -> Verdict {
    let (session, _, address) = host_memory_on_a_device(host)?;
    let bytes = [0u8; 64];
    let (destinations, sources, sizes) = ([address], [bytes.as_ptr() as u64], [64u64]);
    let para = MemcpyBatch {
        destinations: destinations.as_ptr() as u64,
        sources: sources.as_ptr() as u64,
        sizes: sizes.as_ptr() as u64,
        count: 1,
        ..Default::default()
    };
    session.svm.call(Op::MemcpyBatch, 0, &para).refused(EOPNOTSUPP)
}

/// MEMCPY_BATCH of (destination, source, size).
fn batch(session: &Session, elements: &[(u64, u64, u64)]) -> Result<svm::Arg, i32> {
    let destinations: Vec<u64> = elements.iter().map(|element| element.0).collect();
    let sources: Vec<u64> = elements.iter().map(|element| element.1).collect();
    let sizes: Vec<u64> = elements.iter().map(|element| element.2).collect();
    let para = MemcpyBatch {
        destinations: destinations.as_ptr() as u64,
        sources: sources.as_ptr() as u64,
        sizes: sizes.as_ptr() as u64,
        count: elements.len() as u32,
        ..Default::default()
    };
    session.svm.call(Op::MemcpyBatch, 0, &para)
}

fn batches_are_copied(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes = *b"onetwothree";
    let near = bytes.as_mut_ptr() as u64;
    batch(&session, &[(far, near, 3), (far + 100, near + 3, 3), (far + MIB2, near + 6, 5)]).granted()?;
    equal("second", session.read(far + 100, 3).granted()?, b"two".to_vec())?;
    equal("third", session.read(far + MIB2, 5).granted()?, b"three".to_vec())?;
    let mut back = [0u8; 8];
    let place = back.as_mut_ptr() as u64;
    batch(&session, &[(place, far, 3), (place + 3, far + MIB2, 5)]).granted()?;
    equal("back", std::hint::black_box(back), *b"onethree")
}

fn batches_of_nothing_are_einval(host: &Host) -> Verdict {
    let (session, _) = on_device(host)?;
    batch(&session, &[]).refused(EINVAL)
}

fn batches_without_lists_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let list = [far];
    let good = list.as_ptr() as u64;
    for bad in [0, NOWHERE] {
        for (destinations, sources, sizes) in [(bad, good, good), (good, bad, good), (good, good, bad)] {
            let para = MemcpyBatch { destinations, sources, sizes, count: 1, ..Default::default() };
            session.svm.call(Op::MemcpyBatch, 0, &para).refused(EINVAL)?;
        }
    }
    Ok(())
}

fn batches_have_at_most_4096_elements(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    let element = (far, bytes.as_ptr() as u64, 8);
    batch(&session, &vec![element; svm::BATCH as usize + 1]).refused(EOPNOTSUPP)?;
    batch(&session, &vec![element; svm::BATCH as usize]).granted().map(drop)
}

fn batches_go_one_way(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes = [1u8; 64];
    let near = bytes.as_mut_ptr() as u64;
    batch(&session, &[(far, near, 8), (near, far, 8)]).refused(EINVAL)
}

fn batches_within_one_side_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes = [1u8; 64];
    let near = bytes.as_mut_ptr() as u64;
    batch(&session, &[(near, near + 32, 8)]).refused(EINVAL)?;
    batch(&session, &[(far, far + 64, 8)]).refused(EINVAL)
}

fn batches_with_an_empty_element_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 64];
    batch(&session, &[(far, bytes.as_ptr() as u64, 8), (far + 64, bytes.as_ptr() as u64, 0)]).refused(EINVAL)
}

fn a_failing_batch_leaves_what_it_copied(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = *b"first---";
    let near = bytes.as_ptr() as u64;
    batch(&session, &[(far, near, 8), (far + 100 * MIB2, near, 8)]).refused(EINVAL)?;
    equal("bytes of the first", session.read(far, 8).granted()?, b"first---".to_vec())
}

fn a_failing_batch_keeps_no_reference(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [1u8; 8];
    batch(&session, &[(far, bytes.as_ptr() as u64, 8), (far + 100 * MIB2, 0, 8)]).refused(EINVAL)?;
    session.unmap(far).granted()?;
    session.free(far).granted()
}

fn batches_of_imported_memory_are_eopnotsupp(host: &Host) -> Verdict {
    with_import(host, |session, imported| {
        let bytes = [1u8; 8];
        batch(session, &[(imported, bytes.as_ptr() as u64, 8)]).refused(EOPNOTSUPP)
    })
}

fn batches_take_mapped_host_memory(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let (_, near) = session.host_mapping(MIB2)?;
    poke(near, 0x2468);
    batch(&session, &[(far, near, 8), (far + 64, near, 8)]).granted()?;
    equal("bytes", session.read(far + 64, 8).granted()?, 0x2468u64.to_le_bytes().to_vec())
}

fn batches_to_two_devices_are_einval(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let (_, first) = session.device_mapping(0, MIB2)?;
    let (_, second) = session.device_mapping(1, MIB2)?;
    let bytes = [1u8; 8];
    let near = bytes.as_ptr() as u64;
    batch(&session, &[(first, near, 8), (second, near, 8)]).refused(EINVAL)
}
