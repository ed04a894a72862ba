//! ADVISE, PREFETCH (access for peers), and queries: QUERY_MEM_USEDINFO, CHECK_MEMINFO,
//! MEM_MAP_CAP, DBG_VA_STATUS, PROCESS_STATUS_QUERY, and MAP_DEV_RESERVE, which asks a device for
//! the address of its registers.

use super::{Call, Stop, SvmResult, agent, put, refuse};
use ascend_ioctl::svm::{self, Advice, Arg, GIANT_PAGE};
use nix::errno::Errno;

/// Most addresses of CHECK_MEMINFO.
const ADDRESSES: u32 = 1024;

/// Kinds of units on the device that MEM_MAP_CAP knows.
const UNITS: u32 = 10;

/// The answers of DBG_VA_STATUS: an address without pages, with pages of the host, of a device.
const STATUS_NOTHING: u32 = 1;
const STATUS_HOST: u32 = 2;
const STATUS_DEVICE: u32 = 4;

/// The positive answer of PROCESS_STATUS_QUERY about any other process than the first of a device.
const INVALID_VALUE: i64 = 3;
/// What PROCESS_STATUS_QUERY knows: lack of memory, a page fault that failed, and how many did.
const STATUSES: std::ops::RangeInclusive<u32> = 1..=3;

/// Kinds of registers and buffers that MAP_DEV_RESERVE knows.
const REGISTERS: u32 = 5;
/// Where the emulated device has them. The device chooses the addresses; these are made up.
const REGISTERS_START: u64 = 0xE100_0000_0000;
const REGISTERS_SIZE: u64 = 1 << 20;

impl Call<'_, '_> {
    /// ADVISE. Most advice has no effect on reservations, but the driver checks the range.
    pub(super) fn advise(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::Advise = arg.para();
        let advice = Advice::from_bits_retain(para.advice);
        self.process.refer_idle(para.address, para.size)?;
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EADDRNOTAVAIL, "the address lies in no heap");
        };
        if advice.contains(Advice::HUGE) && !self.allows_huge(heap) {
            return refuse(Errno::EADDRNOTAVAIL, "the heap has no huge pages");
        }
        if !heap.holds(para.address, para.size) {
            return refuse(Errno::EINVAL, "the range is empty or leaves the heap");
        }
        if !heap.is_reserve() {
            return self.advise_plain(&para);
        }
        let chunks = heap.chunks(para.address, para.size);
        if !heap.is_reserved(chunks) {
            return refuse(Errno::EINVAL, "part of the range is not reserved");
        }
        if advice.contains(Advice::PERSISTENT) {
            return self.message(self.physical);
        }
        if advice.contains(Advice::POPULATE) {
            return refuse(Errno::EOPNOTSUPP, "reservations are not populated");
        }
        Ok(())
    }

    /// PREFETCH: gives another device of the process access to device memory.
    pub(super) fn prefetch(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::Advise = arg.para();
        self.process.refer_idle(para.address, para.size)?;
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EADDRNOTAVAIL, "the address lies in no heap");
        };
        if !heap.holds(para.address, para.size) {
            return refuse(Errno::EINVAL, "the range is empty or leaves the heap");
        }
        if !heap.is_reserve() {
            return self.prefetch_plain(&para);
        }
        if !heap.is_reserved(heap.chunks(para.address, para.size)) {
            return refuse(Errno::EINVAL, "part of the range is not reserved");
        }
        let Some(mapping) = heap.mapping(para.address) else {
            return refuse(Errno::EADDRNOTAVAIL, "nothing is mapped at the address");
        };
        if mapping.imported {
            return refuse(Errno::EINVAL, "imported memory cannot be shared with peers");
        }
        if mapping.physical == self.physical {
            return Ok(());
        }
        self.message(self.physical)
    }

    /// QUERY_MEM_USEDINFO. Needs the device, but no session on it.
    pub(super) fn query_used(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemUsedInfo = arg.para();
        agent::link(self.machine, self.physical, self.caller.arrived)?;
        // The emulated device has only HBM, or DDR, which serves huge and normal pages alike. It is
        // reported as huge pages.
        let kinds: [u32; 2] = if self.machine.config.ddr { [1, 3] } else { [2, 4] };
        let has = kinds.contains(&para.memory);
        let total = if has { self.machine.config.hbm } else { 0 };
        let used = if has { self.world.store.used(self.physical) } else { 0 };
        para.normal_total_size = 0;
        para.normal_free_size = 0;
        para.huge_total_size = total;
        para.huge_free_size = total.saturating_sub(used);
        // A page of 1 GiB is made of huge pages, so that what is free as the one is free as the
        // other. The model does not fragment.
        let giant = |size: u64| if self.machine.config.giant_pages { size / GIANT_PAGE * GIANT_PAGE } else { 0 };
        para.giant_total_size = giant(para.huge_total_size);
        para.giant_free_size = giant(para.huge_free_size);
        put(arg, &para);
        Ok(())
    }

    /// DBG_VA_STATUS: what an address of a heap shows.
    pub(super) fn address_status(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::DebugVaStatus = arg.para();
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        let mapping = heap.mapping(para.address).map(|it| (it.side == svm::SIDE_DEVICE, it.logical));
        let pages = heap.pages(para.address).map(|run| (!run.is_host(), run.logical));
        (para.mem_type, para.devid) = match mapping.or(pages) {
            Some((true, logical)) => (STATUS_DEVICE, logical),
            Some((false, _)) => (STATUS_HOST, 0),
            None => (STATUS_NOTHING, 0),
        };
        put(arg, &para);
        Ok(())
    }

    /// PROCESS_STATUS_QUERY: what the device reported about its process. The emulated one reports
    /// nothing, so that nothing has occurred.
    pub(super) fn process_status(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::ProcessStatusQuery = arg.para();
        if para.process_type != 0 {
            return Err(Stop::Number(INVALID_VALUE));
        }
        if !STATUSES.contains(&para.pid_status) {
            return refuse(Errno::EINVAL, "no such status");
        }
        para.status_result = 0;
        put(arg, &para);
        Ok(())
    }

    /// MAP_DEV_RESERVE: the device maps registers into its own process and answers their address.
    pub(super) fn map_registers(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MapDevReserve = arg.para();
        if para.addr_type >= REGISTERS {
            return refuse(Errno::EINVAL, "no such registers");
        }
        self.message(self.physical)?;
        para.address = REGISTERS_START + u64::from(para.addr_type) * REGISTERS_SIZE;
        para.len = REGISTERS_SIZE;
        put(arg, &para);
        Ok(())
    }

    /// CHECK_MEMINFO: checks that all addresses have memory of the given kind on this device.
    pub(super) fn check_info(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::CheckMemInfo = arg.para();
        if para.addresses == 0 {
            return refuse(Errno::EINVAL, "the list is a null pointer");
        }
        if para.count == 0 || para.count > ADDRESSES {
            return refuse(Errno::EINVAL, "the number of addresses is out of range");
        }
        for address in self.read_words(para.addresses, para.count)? {
            let Some(heap) = self.process.heap(address) else {
                return refuse(Errno::EFAULT, "an address lies in no heap");
            };
            let mapping = heap.mapping(address);
            let chunk = heap.chunks(address, 1);
            let pages = heap.pages(address);
            if mapping.is_none() && pages.is_none() && heap.stale.first_in(chunk).is_none() {
                return refuse(Errno::EFAULT, "an address has no memory");
            }
            if para.heap_subtype_mask & 1 << heap.sub_kind == 0 {
                return refuse(Errno::EFAULT, "an address belongs to another kind of heap");
            }
            let foreign = |it: &super::mapping::Mapping| it.side == svm::SIDE_DEVICE && it.physical != self.physical;
            let elsewhere = pages.is_some_and(|run| !run.is_host() && run.physical != self.physical);
            if mapping.is_some_and(foreign) || elsewhere {
                return refuse(Errno::EFAULT, "an address belongs to another device");
            }
        }
        Ok(())
    }
}

/// MEM_MAP_CAP: whether a unit of the device can access host memory. No unit is emulated; the
/// answer is always yes.
pub fn map_capability(arg: &mut Arg) -> SvmResult {
    let mut para: svm::MapCapability = arg.para();
    if para.acc_module_type >= UNITS {
        return refuse(Errno::EINVAL, "no such unit");
    }
    para.mem_map_capability = 1;
    put(arg, &para);
    Ok(())
}
