//! Converted addresses: CONVERT_ADDR prepares a copy of rows between host and device once,
//! SUBMIT_CONVERT_CPY does it as often as wanted, WAIT_CONVERT_CPY_RESULT waits for one that was
//! submitted without waiting, DESTROY_ADDR and DESTROY_ADDR_BATCH end it.
//!
//! The vendor's runtime gives such an address to the device's task scheduler, which is not
//! emulated: the addresses of the queues in it are made up, and only the driver's own copies use
//! it. The capability for addresses by offset is that of the stand-in device: absent. The driver
//! pins the caller's pages; the model looks whether they are there, and looks them up at each copy.

use super::copy::Mode;
use super::session::Process;
use super::{Call, SvmResult, agent, page_size, put, refuse};
use ascend_ioctl::svm::{self, Arg};
use nix::errno::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Most rows of one conversion, and of its part that one call converts.
const HEIGHT: u64 = 5 << 20;
const DEPTH: u64 = 0x8000;
/// Rows up to this width are converted as they are. Wider ones are cut into rows of `PIECE`.
const WIDEST: u64 = 128 << 20;
const PIECE: u64 = 64 << 20;
/// Most addresses that are destroyed at once.
const BATCH: u32 = 819_200;
/// Handles look like the kernel addresses that the driver returns.
const FIRST_HANDLE: u64 = 0xffff_8880_0000_0000;
const HANDLE_STEP: u64 = 256;
/// `sync_flag` of a copy that is waited for.
const SYNC: i32 = 0;

/// What CONVERT_ADDR returns.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct DmaAddress {
    submission: u64,
    completion: u64,
    length: u32,
    /// Nonzero: the addresses are those of queues.
    flag: u32,
    handle: u64,
    fixed_size: u32,
    virt_id: u32,
}

/// Rows of a copy.
#[derive(Debug, Clone, Copy)]
struct Rows {
    source: u64,
    destination: u64,
    source_pitch: u64,
    destination_pitch: u64,
    width: u64,
    height: u64,
}

impl Rows {
    /// Source and destination of each row.
    fn each(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.height).map(move |row| {
            let at = |start: u64, pitch: u64| start.wrapping_add(pitch.wrapping_mul(row));
            (at(self.source, self.source_pitch), at(self.destination, self.destination_pitch))
        })
    }
}

/// A prepared copy.
#[derive(Debug, Clone, Copy)]
pub struct Converted {
    /// The device that it was prepared on.
    physical: u32,
    rows: Rows,
    direction: u32,
    /// Submitted and not waited for; whether it failed.
    copying: Option<bool>,
}

impl Process {
    /// Ends the prepared copies of a device that is closed. Counters stay raised.
    pub fn end_conversions(&mut self, physical: u32) {
        self.converted.retain(|_, converted| converted.physical != physical);
    }

    /// Pins or unpins the mappings of all rows.
    fn hold_rows(&mut self, rows: Rows, hold: bool) {
        for (source, destination) in rows.each() {
            for address in [source, destination] {
                if self.is_svm(address) && self.heap(address).is_some_and(|heap| heap.is_reserve()) {
                    self.hold_mappings(address, rows.width, hold);
                }
            }
        }
    }

    /// Raises or lowers the counters of both sides. Memory of host heaps can be freed while it is
    /// converted.
    fn count_rows(&mut self, rows: Rows, raise: bool) {
        for address in [rows.source, rows.destination] {
            if !self.is_svm(address) {
                continue;
            }
            let heap = self.heap_mut(address).filter(|heap| heap.sub_kind != svm::SUB_HOST);
            if let Some(found) = heap.and_then(|heap| heap.reservation_mut(address)) {
                found.counter = if raise { found.counter + 1 } else { found.counter.saturating_sub(1) };
            }
        }
    }
}

impl Call<'_, '_> {
    /// CONVERT_ADDR.
    pub(super) fn convert_addr(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::ConvertAddress = arg.para();
        self.process.refer(para.source, None)?;
        self.process.refer(para.destination, None)?;
        check_shape(&para)?;
        cut(&mut para);
        let mut rows = Rows {
            source: para.source,
            destination: para.destination,
            source_pitch: para.spitch,
            destination_pitch: para.dpitch,
            width: para.len,
            height: para.height,
        };
        for (source, destination) in rows.each() {
            for address in [source, destination].into_iter().filter(|address| self.process.is_svm(*address)) {
                let heap = self.process.heap(address);
                if heap.is_none_or(|heap| heap.is_reserve() && heap.walk(address, rows.width).is_none()) {
                    return refuse(Errno::EINVAL, "part of a row is not mapped");
                }
            }
        }
        let mut nodes = 0;
        let mut direction = para.direction;
        for (row, (source, destination)) in (1..).zip(rows.each()) {
            direction = self.check_row(source, destination, rows.width, direction)?;
            // One DMA node for each page; the driver stops before there would be too many.
            nodes += rows.width.div_ceil(page_size());
            if nodes + rows.width / page_size() > DEPTH {
                rows.height = row;
                break;
            }
        }
        if !self.process.agents.contains_key(&self.physical) {
            return refuse(Errno::EINVAL, "the device is not set up");
        }
        self.transfer(self.physical)?;
        self.pin_rows(rows)?;
        let last = self.process.converted.last_key_value().map(|(handle, _)| *handle);
        let handle = last.map_or(FIRST_HANDLE, |last| last + HANDLE_STEP);
        self.process.hold_rows(rows, true);
        self.process.count_rows(rows, true);
        self.process.converted.insert(handle, Converted { physical: self.physical, rows, direction, copying: None });
        let address = DmaAddress {
            submission: handle ^ 0xfff0_0000_0000,
            completion: handle ^ 0xffe0_0000_0000,
            length: nodes as u32,
            flag: 1,
            handle,
            fixed_size: (rows.width * rows.height) as u32,
            virt_id: address_of(&para.dma_addr).virt_id,
        };
        para.height = rows.height;
        para.dma_addr = zerocopy::transmute!(address);
        put(arg, &para);
        Ok(())
    }

    /// The driver pins the caller's pages (`devmm_get_user_pages`), as for a copy. The model only
    /// looks whether they are there.
    fn pin_rows(&mut self, rows: Rows) -> SvmResult {
        let ordinary = |address: &u64| !self.process.is_svm(*address) && !self.process.is_host_pin(*address);
        let places = rows.each().flat_map(|(source, destination)| [source, destination]).filter(ordinary);
        for address in places {
            self.pin(address, rows.width)?;
        }
        Ok(())
    }

    /// The checks of one row; the direction of the copy.
    fn check_row(&mut self, source: u64, destination: u64, width: u64, direction: u32) -> SvmResult<u32> {
        let from = self.process.place(source)?;
        let to = self.process.place(destination)?;
        if from.absent {
            return refuse(Errno::EINVAL, "the source has no pages");
        }
        if from.device.is_none() && to.device.is_none() {
            return refuse(Errno::EINVAL, "neither side is device memory");
        }
        if from.device.is_some() && from.device == to.device {
            return refuse(Errno::EINVAL, "both sides are memory of the same device");
        }
        if from.read_only || to.read_only {
            return refuse(Errno::EINVAL, "read-only memory is not converted");
        }
        if to.absent {
            self.add_written_pages(destination, width)?;
        }
        self.plan(destination, source, width, direction, Mode::Sync).map(|plan| plan.direction)
    }

    /// DESTROY_ADDR.
    pub(super) fn destroy_addr(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::DestroyAddress = arg.para();
        self.destroy(address_of(&para.dma_addr).handle)
    }

    /// DESTROY_ADDR_BATCH: those before a failing one are destroyed.
    pub(super) fn destroy_addr_batch(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::DestroyAddressBatch = arg.para();
        if para.num == 0 || para.num > BATCH || para.dma_addr == 0 {
            return refuse(Errno::EINVAL, "there is nothing to destroy, or too much");
        }
        let addresses = self.read_words(para.dma_addr, para.num)?;
        if addresses.contains(&0) {
            return refuse(Errno::EINVAL, "an address is null");
        }
        for at in addresses {
            let mut address = DmaAddress::default();
            if self.caller.memory.read(at, address.as_mut_bytes()).is_err() {
                return refuse(Errno::EINVAL, "an address cannot be read");
            }
            self.destroy(address.handle)?;
        }
        Ok(())
    }

    fn destroy(&mut self, handle: u64) -> SvmResult {
        let Some(converted) = self.process.converted.get(&handle).copied() else {
            return refuse(Errno::EFAULT, "no such address was converted");
        };
        if converted.copying.is_some() {
            return refuse(Errno::EINVAL, "the copy was not waited for");
        }
        self.process.converted.remove(&handle);
        self.process.hold_rows(converted.rows, false);
        self.process.count_rows(converted.rows, false);
        Ok(())
    }

    /// SUBMIT_CONVERT_CPY. The bytes are copied at once.
    pub(super) fn submit_converted(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::ConvertCopy = arg.para();
        let handle = address_of(&para.dma_addr).handle;
        let Some(converted) = self.process.converted.get(&handle).copied() else {
            return refuse(Errno::EFAULT, "no such address was converted");
        };
        if converted.copying.is_some() {
            return refuse(Errno::EINVAL, "the copy runs already");
        }
        let synchronous = para.sync_flag == SYNC;
        let allowed = |agent: &agent::Agent| agent.allows_async;
        if !synchronous && !self.process.agents.get(&converted.physical).is_some_and(allowed) {
            return refuse(Errno::EFAULT, "the device is closing");
        }
        let broken = agent::link_broken(self.machine);
        if synchronous || !broken {
            for (source, destination) in converted.rows.each() {
                let width = converted.rows.width;
                let plan = self.plan(destination, source, width, converted.direction, Mode::Sync)?;
                self.carry(plan, destination, source, width)?;
            }
        }
        if let Some(converted) = self.process.converted.get_mut(&handle).filter(|_| !synchronous) {
            converted.copying = Some(broken);
        }
        Ok(())
    }

    /// WAIT_CONVERT_CPY_RESULT.
    pub(super) fn wait_converted(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::ConvertCopy = arg.para();
        let Some(converted) = self.process.converted.get_mut(&address_of(&para.dma_addr).handle) else {
            return refuse(Errno::EFAULT, "no such address was converted");
        };
        match converted.copying.take() {
            None => refuse(Errno::ETXTBSY, "the copy does not run"),
            Some(true) => refuse(Errno::EPIPE, "the copy failed on the link"),
            Some(false) => Ok(()),
        }
    }
}

fn address_of(words: &[u64; 5]) -> DmaAddress {
    zerocopy::transmute!(*words)
}

/// The checks of the numbers (`devmm_ioctl_convert_para_check`).
fn check_shape(para: &svm::ConvertAddress) -> SvmResult {
    if para.len > para.dpitch || para.len > para.spitch {
        return refuse(Errno::EINVAL, "the width is larger than a pitch");
    }
    if para.len == 0 || para.height == 0 {
        return refuse(Errno::EINVAL, "there is nothing to convert");
    }
    if para.direction == svm::COPY_HOST_TO_HOST || para.direction > svm::COPY_DETECT {
        return refuse(Errno::EOPNOTSUPP, "the direction must be explicit");
    }
    if para.height > HEIGHT || para.fixed_size >= para.len.wrapping_mul(para.height) {
        return refuse(Errno::EINVAL, "there are too many rows, or all of them are converted");
    }
    Ok(())
}

/// Leaves the part that one call converts, behind the bytes that earlier calls converted
/// (`devmm_make_convrt2d_input`).
fn cut(para: &mut svm::ConvertAddress) {
    let (done, offset) = (para.fixed_size / para.len, para.fixed_size % para.len);
    let left = para.len - offset;
    para.source = para.source.wrapping_add(done.wrapping_mul(para.spitch)).wrapping_add(offset);
    para.destination = para.destination.wrapping_add(done.wrapping_mul(para.dpitch)).wrapping_add(offset);
    para.fixed_size = 0;
    if para.len <= WIDEST && offset == 0 {
        para.height -= done;
    } else if para.len <= WIDEST || left < WIDEST {
        (para.len, para.height) = (left, 1);
    } else {
        (para.len, para.height) = (PIECE, left / PIECE);
        (para.spitch, para.dpitch) = (PIECE, PIECE);
    }
    para.height = para.height.min(DEPTH);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut_of(len: u64, height: u64, fixed_size: u64) -> (u64, u64, u64) {
        let mut para =
            svm::ConvertAddress { len, height, fixed_size, spitch: len, dpitch: 2 * len, ..Default::default() };
        cut(&mut para);
        (para.destination, para.len, para.height)
    }

    #[test]
    fn a_call_converts_what_earlier_ones_left() {
        assert_eq!(cut_of(100, 10, 0), (0, 100, 10));
        assert_eq!(cut_of(100, 10, 300), (600, 100, 7));
        // The rest of a row comes alone.
        assert_eq!(cut_of(100, 10, 350), (650, 50, 1));
        assert_eq!(cut_of(4096, 1 << 20, 0), (0, 4096, DEPTH));
        // Rows that are too wide are cut.
        assert_eq!(cut_of(WIDEST + PIECE, 1, 0), (0, PIECE, 3));
        assert_eq!(cut_of(WIDEST + PIECE, 1, WIDEST), (WIDEST, PIECE, 1));
    }
}
