//! Converted addresses: copies that are prepared once and done often, as the vendor's runtime
//! prepares them for the device's task scheduler.

use super::plain_memory::{managed, populated};
use crate::host::Host;
use crate::manager::{NOWHERE, anonymous, munmap, page_size};
use crate::rule::{Answer, Failure, Judge, Need, Rule, Verdict, equal, rule};
use crate::session::{MIB2, Session};
use ascend_ioctl::svm::{
    self, COPY_DETECT, COPY_DEVICE_TO_DEVICE, COPY_DEVICE_TO_HOST, COPY_HOST_TO_DEVICE, COPY_HOST_TO_HOST,
    ConvertAddress, Op,
};
use libc::{EBUSY, EFAULT, EINVAL, EOPNOTSUPP, ETXTBSY};

pub const RULES: &[Rule] = &[
    rule!(a_converted_copy_is_done_as_often_as_it_is_submitted, Inferred)
        .decided_by("devmm_sumbit_convert_dma_proc, devmm_proc_mem_copy.c"),
    rule!(rows_are_converted_at_their_pitches, Inferred).decided_by("devmm_convert2d_addr, svm_master_convert.c"),
    rule!(mapped_memory_is_converted, Inferred).decided_by("devmm_convert2d_addr, svm_master_convert.c"),
    rule!(a_conversion_continues_where_the_last_one_ended, Inferred)
        .decided_by("devmm_make_convrt2d_input, svm_master_convert.c"),
    rule!(a_conversion_has_a_width_and_a_height, Ran).decided_by("devmm_check_memcpy2d_input, svm_master_memcpy.c"),
    rule!(a_conversion_between_host_addresses_is_eopnotsupp, Ran)
        .decided_by("devmm_check_memcpy2d_input, svm_master_memcpy.c"),
    rule!(a_conversion_has_at_most_five_million_rows, Ran)
        .decided_by("devmm_ioctl_convert_para_check, svm_master_convert.c"),
    rule!(converting_more_than_there_is_is_einval, Ran)
        .decided_by("devmm_ioctl_convert_para_check, svm_master_convert.c"),
    rule!(converting_host_memory_alone_is_einval, Ran)
        .decided_by("devmm_convert_check_addr_attr, svm_master_convert.c"),
    rule!(converting_within_a_device_is_einval, Ran).decided_by("devmm_convert_check_addr_attr, svm_master_convert.c"),
    rule!(converting_in_the_wrong_direction_is_einval, Ran).decided_by("devmm_check_va_direction, svm_master_memcpy.c"),
    rule!(memory_without_pages_is_not_converted, Ran).decided_by("devmm_convert_check_addr_attr, svm_master_convert.c"),
    rule!(unmapped_rows_are_not_converted, Ran).decided_by("devmm_convert_vmmas_occupy_inc, svm_master_convert.c"),
    rule!(ordinary_memory_that_is_not_there_is_not_converted, Source)
        .decided_by("devmm_get_user_pages, devmm_proc_mem_copy.c"),
    rule!(converted_memory_is_not_unmapped, Inferred)
        .decided_by("devmm_convert_vmmas_occupy_inc, svm_master_convert.c"),
    rule!(converted_memory_is_not_freed, Inferred).decided_by("devmm_convert_dec_page_ref, svm_master_convert.c"),
    rule!(an_address_that_was_not_converted_is_efault, Ran)
        .decided_by("devmm_ioctl_destroy_addr_proc_inner, devmm_proc_mem_copy.c"),
    rule!(a_converted_address_is_destroyed_once, Inferred)
        .decided_by("devmm_ioctl_destroy_addr_proc_inner, devmm_proc_mem_copy.c"),
    rule!(waiting_for_a_copy_that_does_not_run_is_etxtbsy, Inferred)
        .decided_by("devmm_wait_convert_dma_result, devmm_proc_mem_copy.c"),
    rule!(a_converted_copy_that_runs_is_not_submitted_again, Inferred)
        .decided_by("devmm_convert_node_state_trans, svm_master_convert.c"),
    rule!(converted_addresses_are_destroyed_together, Inferred)
        .decided_by("devmm_destroy_addr_batch_sync, svm_master_convert.c"),
    rule!(a_batch_of_converted_addresses_needs_all_of_them, Ran)
        .decided_by("devmm_destroy_batch_para_init, svm_master_convert.c"),
    rule!(converted_addresses_end_with_their_device, Inferred)
        .decided_by("devmm_convert_nodes_destroy_by_task_release, svm_master_convert.c"),
    rule!(a_copy_between_devices_is_converted, Inferred)
        .decided_by("devmm_convert_pre_process, svm_master_convert.c")
        .needs(&[Need::TwoDevices]),
];

/// One row.
fn row(destination: u64, source: u64, size: u64, direction: u32) -> ConvertAddress {
    ConvertAddress {
        source,
        destination,
        spitch: size,
        dpitch: size,
        len: size,
        height: 1,
        direction,
        ..Default::default()
    }
}

fn convert(session: &Session, para: &ConvertAddress) -> Answer<ConvertAddress> {
    session.svm.ask(Op::ConvertAddr, 0, para)
}

/// A converted address, or a skip where the device wants addresses by offset, which its task
/// scheduler alone can use.
fn converted(session: &Session, para: &ConvertAddress) -> Result<ConvertAddress, Failure> {
    let answer = convert(session, para).granted()?;
    match answer.dma_addr[2] >> 32 & 0xff {
        0 => Err(Failure::skipped("the device converts addresses by offset")),
        _ => Ok(answer),
    }
}

fn destroy(session: &Session, dma_addr: [u64; 5]) -> Answer<()> {
    session.svm.call(Op::DestroyAddr, 0, &svm::DestroyAddress { dma_addr, ..Default::default() }).map(drop)
}

fn destroy_all(session: &Session, addresses: &[u64]) -> Answer<()> {
    let para = svm::DestroyAddressBatch {
        dma_addr: addresses.as_ptr() as u64,
        num: addresses.len() as u32,
        ..Default::default()
    };
    session.svm.call(Op::DestroyAddrBatch, 0, &para).map(drop)
}

/// A copy that is waited for, and one that is not.
const SYNC: i32 = 0;
const ASYNC: i32 = 1;

fn submit(session: &Session, dma_addr: [u64; 5], sync_flag: i32) -> Answer<()> {
    session
        .svm
        .call(Op::SubmitConvertCopy, 0, &svm::ConvertCopy { dma_addr, sync_flag, ..Default::default() })
        .map(drop)
}

fn wait(session: &Session, dma_addr: [u64; 5]) -> Answer<()> {
    session.svm.call(Op::WaitConvertCopy, 0, &svm::ConvertCopy { dma_addr, ..Default::default() }).map(drop)
}

/// Bytes of the host that a copy reads or writes. The driver does so behind the compiler's back.
struct Bytes(Box<[u8; 4096]>);

impl Bytes {
    fn of(value: u8) -> Bytes {
        Bytes(Box::new([value; 4096]))
    }

    fn address(&self) -> u64 {
        std::ptr::from_ref(&*self.0) as u64
    }

    fn set(&mut self, value: u8) {
        self.0.fill(value);
        std::hint::black_box(&mut self.0);
    }

    fn first(&mut self) -> u8 {
        std::hint::black_box(&mut self.0)[0]
    }
}

fn a_converted_copy_is_done_as_often_as_it_is_submitted(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    let mut bytes = Bytes::of(1);
    let there = converted(&session, &row(address, bytes.address(), 4096, COPY_HOST_TO_DEVICE))?;
    submit(&session, there.dma_addr, SYNC).granted()?;
    equal("first copy", session.read(address, 1).granted()?, vec![1])?;
    bytes.set(2);
    submit(&session, there.dma_addr, ASYNC).granted()?;
    wait(&session, there.dma_addr).granted()?;
    equal("second copy", session.read(address, 1).granted()?, vec![2])?;
    destroy(&session, there.dma_addr).granted()?;
    let back = converted(&session, &row(bytes.address(), address, 4096, COPY_DETECT))?;
    session.write(address, &[3; 4096]).granted()?;
    submit(&session, back.dma_addr, SYNC).granted()?;
    equal("copy back", bytes.first(), 3)?;
    destroy(&session, back.dma_addr).granted()
}

fn rows_are_converted_at_their_pitches(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    let bytes = Bytes::of(9);
    let para = ConvertAddress {
        dpitch: 8192,
        height: 4,
        spitch: 512,
        ..row(address, bytes.address(), 256, COPY_HOST_TO_DEVICE)
    };
    let answer = converted(&session, &para)?;
    equal("rows", answer.height, 4)?;
    equal("bytes", answer.dma_addr[4] as u32, 4 * 256)?;
    submit(&session, answer.dma_addr, SYNC).granted()?;
    for at in [0, 8192, 3 * 8192] {
        equal("row", session.read(address + at, 256).granted()?, vec![9; 256])?;
    }
    destroy(&session, answer.dma_addr).granted()
}

fn mapped_memory_is_converted(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let (_, address) = session.device_mapping(0, MIB2)?;
    let bytes = Bytes::of(4);
    let answer = converted(&session, &row(address, bytes.address(), 4096, COPY_HOST_TO_DEVICE))?;
    submit(&session, answer.dma_addr, SYNC).granted()?;
    equal("bytes", session.read(address, 4096).granted()?, vec![4; 4096])?;
    destroy(&session, answer.dma_addr).granted()?;
    session.unmap(address).granted().map(drop)
}

fn a_conversion_continues_where_the_last_one_ended(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    let bytes = Bytes::of(5);
    // The rest of a row comes alone.
    let para = ConvertAddress { fixed_size: 300, height: 4, ..row(address, bytes.address(), 256, COPY_HOST_TO_DEVICE) };
    let answer = converted(&session, &para)?;
    equal("rows", (answer.height, answer.len, answer.fixed_size), (1, 212, 0))?;
    equal("place", (answer.destination, answer.source), (address + 300, bytes.address() + 300))?;
    destroy(&session, answer.dma_addr).granted()?;
    let answer = converted(&session, &ConvertAddress { fixed_size: 512, ..para })?;
    equal("rows", (answer.height, answer.len, answer.destination), (2, 256, address + 512))?;
    destroy(&session, answer.dma_addr).granted()
}

/// A session with device memory, and a row from a byte of the host to it.
fn prepared(host: &Host) -> Result<(Session, ConvertAddress, Bytes), Failure> {
    let session = Session::start(host)?;
    let address = populated(&session, MIB2)?;
    let bytes = Bytes::of(6);
    let para = row(address, bytes.address(), 4096, COPY_HOST_TO_DEVICE);
    Ok((session, para, bytes))
}

fn a_conversion_has_a_width_and_a_height(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    convert(&session, &ConvertAddress { len: 0, ..para }).refused(EINVAL)?;
    convert(&session, &ConvertAddress { height: 0, ..para }).refused(EINVAL)?;
    convert(&session, &ConvertAddress { spitch: 4095, ..para }).refused(EINVAL)?;
    convert(&session, &ConvertAddress { dpitch: 4095, ..para }).refused(EINVAL)
}

fn a_conversion_between_host_addresses_is_eopnotsupp(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    convert(&session, &ConvertAddress { direction: COPY_HOST_TO_HOST, ..para }).refused(EOPNOTSUPP)?;
    convert(&session, &ConvertAddress { direction: COPY_DETECT + 1, ..para }).refused(EOPNOTSUPP)
}

fn a_conversion_has_at_most_five_million_rows(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    convert(&session, &ConvertAddress { height: (5 << 20) + 1, ..para }).refused(EINVAL)
}

fn converting_more_than_there_is_is_einval(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    convert(&session, &ConvertAddress { fixed_size: 4096, ..para }).refused(EINVAL)
}

fn converting_host_memory_alone_is_einval(host: &Host) -> Verdict {
    let (session, para, bytes) = prepared(host)?;
    let other = Bytes::of(0);
    convert(&session, &ConvertAddress { destination: other.address(), ..para }).refused(EINVAL)?;
    drop(bytes);
    Ok(())
}

fn converting_within_a_device_is_einval(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let source = para.destination + 8192;
    convert(&session, &ConvertAddress { source, direction: COPY_DEVICE_TO_DEVICE, ..para }).refused(EINVAL)
}

fn converting_in_the_wrong_direction_is_einval(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    convert(&session, &ConvertAddress { direction: COPY_DEVICE_TO_HOST, ..para }).refused(EINVAL)
}

fn memory_without_pages_is_not_converted(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let source = managed(&session, MIB2)?;
    convert(&session, &ConvertAddress { source, ..para }).refused(EINVAL)
}

fn unmapped_rows_are_not_converted(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let destination = session.reserve(2 * MIB2)?;
    convert(&session, &ConvertAddress { destination, ..para }).refused(EINVAL)?;
    let memory = session.device_huge(0, MIB2).granted()?;
    session.map(&memory, destination, MIB2).granted()?;
    convert(&session, &ConvertAddress { destination, dpitch: MIB2, height: 2, ..para }).refused(EINVAL)
}

fn ordinary_memory_that_is_not_there_is_not_converted(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    convert(&session, &ConvertAddress { source: NOWHERE, ..para }).refused(EFAULT)?;
    // The last page of the source is missing.
    let page = page_size();
    let start = anonymous(0, 2 * page, libc::PROT_READ | libc::PROT_WRITE).granted()?;
    munmap(start + page, page).granted()?;
    let short = ConvertAddress { source: start, len: page + 1, spitch: page + 1, dpitch: page + 1, ..para };
    convert(&session, &short).refused(EFAULT)?;
    // Nothing stays held.
    session.free(para.destination).granted()
}

fn converted_memory_is_not_unmapped(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let (_, destination) = session.device_mapping(0, MIB2)?;
    let answer = converted(&session, &ConvertAddress { destination, ..para })?;
    session.unmap(destination).refused(EBUSY)?;
    destroy(&session, answer.dma_addr).granted()?;
    session.unmap(destination).granted().map(drop)
}

fn converted_memory_is_not_freed(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let answer = converted(&session, &para)?;
    session.free(para.destination).refused(EBUSY)?;
    destroy(&session, answer.dma_addr).granted()?;
    session.free(para.destination).granted()
}

fn an_address_that_was_not_converted_is_efault(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    for address in [[0; 5], [1; 5], [u64::MAX; 5]] {
        destroy(&session, address).refused(EFAULT)?;
        submit(&session, address, SYNC).refused(EFAULT)?;
        wait(&session, address).refused(EFAULT)?;
    }
    Ok(())
}

fn a_converted_address_is_destroyed_once(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let answer = converted(&session, &para)?;
    destroy(&session, answer.dma_addr).granted()?;
    destroy(&session, answer.dma_addr).refused(EFAULT)
}

fn waiting_for_a_copy_that_does_not_run_is_etxtbsy(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let answer = converted(&session, &para)?;
    wait(&session, answer.dma_addr).refused(ETXTBSY)?;
    submit(&session, answer.dma_addr, SYNC).granted()?;
    wait(&session, answer.dma_addr).refused(ETXTBSY)?;
    destroy(&session, answer.dma_addr).granted()
}

fn a_converted_copy_that_runs_is_not_submitted_again(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let answer = converted(&session, &para)?;
    submit(&session, answer.dma_addr, ASYNC).granted()?;
    submit(&session, answer.dma_addr, SYNC).refused(EINVAL)?;
    destroy(&session, answer.dma_addr).refused(EINVAL)?;
    wait(&session, answer.dma_addr).granted()?;
    destroy(&session, answer.dma_addr).granted()
}

fn converted_addresses_are_destroyed_together(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let (first, second) = (converted(&session, &para)?, converted(&session, &para)?);
    let places = [&first, &second].map(|answer| std::ptr::from_ref(&answer.dma_addr) as u64);
    destroy_all(&session, &places).granted()?;
    destroy(&session, first.dma_addr).refused(EFAULT)?;
    destroy_all(&session, &places).refused(EFAULT)?;
    session.free(para.destination).granted()
}

fn a_batch_of_converted_addresses_needs_all_of_them(host: &Host) -> Verdict {
    let session = Session::start(host)?;
    destroy_all(&session, &[]).refused(EINVAL)?;
    destroy_all(&session, &[0]).refused(EINVAL)?;
    destroy_all(&session, &[crate::manager::NOWHERE]).refused(EINVAL)?;
    let para = svm::DestroyAddressBatch { dma_addr: 0, num: 1, ..Default::default() };
    session.svm.call(Op::DestroyAddrBatch, 0, &para).refused(EINVAL)
}

fn converted_addresses_end_with_their_device(host: &Host) -> Verdict {
    let (session, para, _bytes) = prepared(host)?;
    let answer = converted(&session, &para)?;
    session.close_device(0).granted()?;
    destroy(&session, answer.dma_addr).refused(EFAULT)
}

fn a_copy_between_devices_is_converted(host: &Host) -> Verdict {
    let session = Session::with_two(host)?;
    let (_, source) = session.device_mapping(0, MIB2)?;
    let (_, destination) = session.device_mapping(1, MIB2)?;
    session.write(source, b"between").granted()?;
    let answer = converted(&session, &row(destination, source, 4096, COPY_DEVICE_TO_DEVICE))?;
    submit(&session, answer.dma_addr, SYNC).granted()?;
    equal("bytes", session.read(destination, 7).granted()?, b"between".to_vec())?;
    destroy(&session, answer.dma_addr).granted()
}
