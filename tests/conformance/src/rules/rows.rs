//! Copies of rows.

use super::copy::{host_memory_on_a_device, on_device};
use crate::host::Host;
use crate::rule::{Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{GIB, MIB2, Session};
use ascend_ioctl::svm::{
    self, COPY_DETECT, COPY_DEVICE_TO_DEVICE, COPY_DEVICE_TO_HOST, COPY_HOST_TO_DEVICE, COPY_HOST_TO_HOST, Memcpy2d, Op,
};
use libc::{EINVAL, EOPNOTSUPP};

pub const RULES: &[Rule] = &[
    rule!(rows_of_host_memory_imported_on_a_device_are_einval, Ran)
        .decided_by("devmm_get_dma_copy_devid, devmm_proc_mem_copy.c")
        .needs(&[Need::Leak]),
    rule!(rows_are_copied_both_ways, Ran).decided_by("devmm_ioctl_memcpy2d_proc, svm_master_memcpy.c"),
    rule!(rows_wider_than_their_pitch_are_einval, Ran).decided_by("devmm_check_memcpy2d_input, svm_master_memcpy.c"),
    rule!(no_rows_and_empty_rows_are_einval, Ran).decided_by("devmm_check_memcpy2d_input, svm_master_memcpy.c"),
    rule!(rows_are_copied_in_explicit_directions_only, Ran)
        .decided_by("devmm_ioctl_memcpy2d_proc, svm_master_memcpy.c"),
    rule!(sizes_of_rows_are_looked_at_before_the_direction, Ran)
        .decided_by("devmm_check_memcpy2d_input, svm_master_memcpy.c"),
    rule!(a_pitch_that_wraps_is_einval, Ran).decided_by("devmm_ioctl_memcpy2d_proc, svm_master_memcpy.c"),
    rule!(one_row_has_any_pitch, Ran).decided_by("devmm_ioctl_memcpy2d_proc, svm_master_memcpy.c"),
    rule!(rows_before_a_failing_one_are_copied, Ran).decided_by("devmm_ioctl_memcpy2d_proc, svm_master_memcpy.c"),
];

fn rows_of_host_memory_imported_on_a_device_are_einval(host: &Host) -> Verdict {
    let (session, _, address) = host_memory_on_a_device(host)?;
    let bytes = [0u8; 256];
    session.svm.call(Op::Memcpy2d, 0, &rows(address, bytes.as_ptr() as u64)).refused(EINVAL)
}

/// Rows of 16 bytes, three of them, 64 bytes apart on the host and 32 on the device.
fn rows(far: u64, near: u64) -> Memcpy2d {
    Memcpy2d {
        destination: far,
        source: near,
        destination_pitch: 32,
        source_pitch: 64,
        width: 16,
        height: 3,
        direction: COPY_HOST_TO_DEVICE,
        ..Default::default()
    }
}

fn copy_rows(session: &Session, para: Memcpy2d) -> Result<svm::Arg, i32> {
    session.svm.call(Op::Memcpy2d, 0, &para)
}

fn rows_are_copied_both_ways(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let mut bytes: Vec<u8> = (0..192).collect();
    session.write(far, &[0xFF; 96]).granted()?;
    copy_rows(&session, rows(far, bytes.as_ptr() as u64)).granted()?;
    let mut expected = vec![0xFF; 96];
    for row in 0..3 {
        expected[row * 32..row * 32 + 16].copy_from_slice(&bytes[row * 64..row * 64 + 16]);
    }
    equal("bytes on the device", session.read(far, 96).granted()?, expected)?;
    let before = bytes.clone();
    bytes.fill(0);
    let back = Memcpy2d {
        destination: bytes.as_mut_ptr() as u64,
        source: far,
        destination_pitch: 64,
        source_pitch: 32,
        direction: COPY_DEVICE_TO_HOST,
        ..rows(0, 0)
    };
    copy_rows(&session, back).granted()?;
    for row in 0..3 {
        equal("row on the host", &bytes[row * 64..row * 64 + 16], &before[row * 64..row * 64 + 16])?;
        equal("gap on the host", bytes[row * 64 + 16], 0)?;
    }
    Ok(())
}

fn rows_wider_than_their_pitch_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [0u8; 4096];
    let near = bytes.as_ptr() as u64;
    copy_rows(&session, Memcpy2d { width: 33, ..rows(far, near) }).refused(EINVAL)?;
    copy_rows(&session, Memcpy2d { width: 65, destination_pitch: 128, ..rows(far, near) }).refused(EINVAL)
}

fn no_rows_and_empty_rows_are_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [0u8; 4096];
    let near = bytes.as_ptr() as u64;
    copy_rows(&session, Memcpy2d { width: 0, ..rows(far, near) }).refused(EINVAL)?;
    copy_rows(&session, Memcpy2d { height: 0, ..rows(far, near) }).refused(EINVAL)
}

fn rows_are_copied_in_explicit_directions_only(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [0u8; 4096];
    for direction in [COPY_HOST_TO_HOST, COPY_DEVICE_TO_DEVICE, COPY_DETECT, 5] {
        let para = Memcpy2d { direction, ..rows(far, bytes.as_ptr() as u64) };
        copy_rows(&session, para).refused(EOPNOTSUPP)?;
    }
    Ok(())
}

fn sizes_of_rows_are_looked_at_before_the_direction(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [0u8; 4096];
    let para = Memcpy2d { direction: COPY_DETECT, ..rows(far, bytes.as_ptr() as u64) };
    copy_rows(&session, Memcpy2d { width: 33, ..para }).refused(EINVAL)?;
    copy_rows(&session, Memcpy2d { height: 0, ..para }).refused(EINVAL)
}

fn a_pitch_that_wraps_is_einval(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [0u8; 4096];
    let near = bytes.as_ptr() as u64;
    copy_rows(&session, Memcpy2d { source_pitch: u64::MAX - 8, ..rows(far, near) }).refused(EINVAL)?;
    copy_rows(&session, Memcpy2d { destination_pitch: u64::MAX - 8, ..rows(far, near) }).refused(EINVAL)
}

fn one_row_has_any_pitch(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [7u8; 4096];
    let para = Memcpy2d { destination_pitch: GIB, source_pitch: GIB, height: 1, ..rows(far, bytes.as_ptr() as u64) };
    copy_rows(&session, para).granted()?;
    equal("bytes", session.read(far, 16).granted()?, vec![7; 16])
}

fn rows_before_a_failing_one_are_copied(host: &Host) -> Verdict {
    let (session, far) = on_device(host)?;
    let bytes = [9u8; 4096];
    let start = far + 2 * MIB2 - 64;
    session.write(start, &[1; 64]).granted()?;
    // Two rows lie in the mapping, the third begins after its end.
    let answer = copy_rows(&session, rows(start, bytes.as_ptr() as u64));
    equal("the copy succeeded", answer.is_ok(), false)?;
    let left = session.read(start, 64).granted()?;
    equal("first row", &left[..16], &[9; 16])?;
    equal("second row", &left[32..48], &[9; 16])
}
