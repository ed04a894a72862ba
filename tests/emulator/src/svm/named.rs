//! Memory shared by name: IPC_MEM_CREATE, the trust list, IPC_MEM_OPEN, IPC_MEM_QUERY and so on.
//!
//! CREATE gives device memory of the caller a name of 64 characters. A listed process opens the
//! name behind an allocation of its own, outside of reserve heaps, and PREFETCH then puts the pages
//! there. A name does not keep the memory alive: it is gone when its owner frees it or ends. The
//! name itself lives as long as its creator or an open. From the driver's
//! `svm_shmem_interprocess.c` and `svm_shmem_node.c`.

use super::handle::HandleKind;
use super::heap::Heap;
use super::plain::Pages;
use super::share::now;
use super::store::BlockId;
use super::{Call, SvmResult, agent, put, refuse};
use ascend_ioctl::svm::{self, Arg, HUGE_PAGE};
use nix::errno::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Bytes of a name, with its NUL.
const NAME: usize = 65;
/// Most processes in one IPC_MEM_SET_PID.
const PIDS: u32 = 31;
/// Most processes in a trust list.
const TRUSTED: usize = 32768;
/// The attributes of a name: the route of its mappings, and whether it needs no trust list.
const ROUTE: u32 = 0;
const NO_TRUST_LIST: u32 = 1;

/// A listed process.
#[derive(Debug, Default)]
struct TrustedProcess {
    /// When it was listed, in nanoseconds since boot.
    stamp: u64,
    /// The address and the device of its open.
    opened: Option<(u64, u32)>,
}

/// A named piece of device memory.
#[derive(Debug)]
struct Named {
    creator: i32,
    address: u64,
    size: u64,
    physical: u32,
    huge: bool,
    /// Not destroyed.
    valid: bool,
    /// The owner freed the memory, or destroyed the name.
    pages_freed: bool,
    needs_trust: bool,
    route: u64,
    trusted: BTreeMap<i32, TrustedProcess>,
    /// Processes on other servers, with their super-pod ids.
    elsewhere: BTreeSet<(u32, i32)>,
    /// The memory: blocks, with the offset and the size of the part that belongs to the name.
    pieces: Vec<(BlockId, u64, u64)>,
    /// The creator and every open.
    holders: u32,
}

/// All names.
#[derive(Debug, Default)]
pub struct Names {
    names: BTreeMap<String, Named>,
    last: u64,
}

/// An allocation behind which a name was opened.
#[derive(Debug, Clone)]
pub struct Opened {
    name: String,
    size: u64,
    /// The device that it was opened for.
    pub physical: u32,
}

impl Heap {
    /// The open whose range contains an address.
    pub fn opened(&self, address: u64) -> Option<&Opened> {
        let (&start, found) = self.opened.range(..=address).next_back()?;
        (address < start + found.size).then_some(found)
    }
}

impl Names {
    fn get(&mut self, name: &str) -> SvmResult<&mut Named> {
        match self.names.get_mut(name) {
            Some(found) => Ok(found),
            None => refuse(Errno::EINVAL, "there is no such name"),
        }
    }

    fn put(&mut self, name: &str) {
        if let Some(found) = self.names.get_mut(name) {
            found.holders -= 1;
            if found.holders == 0 {
                self.names.remove(name);
            }
        }
    }

    /// Ends what a process opened and created: all of it, or that of one device.
    pub fn forget(&mut self, tgid: i32, physical: Option<u32>) {
        for found in self.names.values_mut() {
            let entry = found.trusted.get_mut(&tgid);
            let open = entry.and_then(|it| it.opened.take_if(|(_, device)| physical.is_none_or(|id| id == *device)));
            found.holders -= u32::from(open.is_some());
            if found.creator == tgid && found.valid && physical.is_none_or(|id| id == found.physical) {
                found.valid = false;
                found.pages_freed = true;
                found.holders -= 1;
            }
        }
        self.names.retain(|_, found| found.holders != 0);
    }

    /// The owner freed a range: names of memory in it can no longer be opened.
    pub fn pages_freed(&mut self, tgid: i32, range: Range<u64>) {
        for found in self.names.values_mut().filter(|found| found.creator == tgid && found.valid) {
            found.pages_freed |= found.address >= range.start && found.address + found.size <= range.end;
        }
    }

    /// Number of names.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// The name that a process opened at an address.
    fn opened_at(&self, tgid: i32, address: u64) -> Option<String> {
        let at = |found: &Named| found.trusted.get(&tgid).and_then(|it| it.opened).map(|(address, _)| address);
        self.names.iter().find(|(_, found)| at(found) == Some(address)).map(|(name, _)| name.clone())
    }
}

/// The text of a name; its last byte counts as a NUL.
fn text(name: &[u8; NAME]) -> String {
    let end = name[..NAME - 1].iter().position(|byte| *byte == 0).unwrap_or(NAME - 1);
    String::from_utf8_lossy(&name[..end]).into_owned()
}

impl Call<'_, '_> {
    /// IPC_MEM_CREATE.
    pub(super) fn ipc_create(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::IpcCreate = arg.para();
        self.process.refer(para.address, None)?;
        if (para.name_len as usize) < NAME {
            return refuse(Errno::EINVAL, "the caller has no room for the name");
        }
        if !self.process.is_svm(para.address) {
            return refuse(Errno::EINVAL, "the module does not manage the address");
        }
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EADDRNOTAVAIL, "the address lies in no heap");
        };
        let (page, physical) = match heap.is_reserve() {
            true => {
                let Some(mapping) = heap.mapping(para.address) else {
                    return refuse(Errno::EADDRNOTAVAIL, "nothing is mapped at the address");
                };
                let table = self.process.agents.get(&mapping.physical).map(|agent| &agent.handles);
                let handle = table.and_then(|table| table.get(mapping.id));
                if mapping.side != svm::SIDE_DEVICE || handle.is_none_or(|it| it.kind != HandleKind::Normal) {
                    return refuse(Errno::EINVAL, "only device memory that is not shared can have a name");
                }
                (heap.chunk, mapping.physical)
            }
            false => match heap.pages(para.address).filter(|run| !run.is_host()) {
                Some(run) => (heap.chunk, run.physical),
                None => return refuse(Errno::EINVAL, "only device memory can have a name"),
            },
        };
        if para.address % page != 0 || !heap.holds(para.address, para.len) {
            return refuse(Errno::EINVAL, "the range does not begin at a page, or leaves the heap");
        }
        let (huge, reserve) = (heap.kind == svm::HEAP_HUGE, heap.is_reserve());
        let reservation = heap.reservation(para.address);
        let locked = reserve || heap.is_locked(para.address);
        let read_only = reservation.is_some_and(|found| found.read_only);
        let whole = heap.is_reserved(heap.chunks(para.address, para.len));
        if !locked || read_only || !whole || heap.opened(para.address).is_some() {
            return refuse(Errno::EINVAL, "the memory is not locked, read-only, or opened by name itself");
        }
        let Some(pieces) = self.process.pieces(para.address, para.len) else {
            return refuse(Errno::EINVAL, "part of the range has no device memory");
        };
        if reserve {
            // The mappings cannot be unmapped while the name exists.
            self.process.hold_mappings(para.address, para.len, true);
        }
        let sdid = self.machine.sdid(physical);
        let names = &mut self.world.names;
        names.last += 1;
        let name = format!("{:08x}{:016x}{physical:02x}00{sdid:08x}", self.caller.tgid, names.last);
        let name = format!("{name:0<64}");
        para.name = [0; NAME];
        para.name[..name.len()].copy_from_slice(name.as_bytes());
        let named = Named {
            creator: self.caller.tgid,
            address: para.address,
            size: para.len,
            physical,
            huge,
            valid: true,
            pages_freed: false,
            needs_trust: true,
            route: 0,
            trusted: BTreeMap::new(),
            elsewhere: BTreeSet::new(),
            pieces,
            holders: 1,
        };
        names.names.insert(name, named);
        put(arg, &para);
        Ok(())
    }

    /// IPC_MEM_DESTROY.
    pub(super) fn ipc_destroy(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::IpcDestroy = arg.para();
        let name = text(&para.name);
        let named = self.world.names.get(&name)?;
        if named.creator != self.caller.tgid {
            return refuse(Errno::EACCES, "only the creator destroys a name");
        }
        if !named.valid {
            return refuse(Errno::EFAULT, "the name is destroyed already");
        }
        named.valid = false;
        named.pages_freed = true;
        let (address, size) = (named.address, named.size);
        if self.process.heap(address).is_some_and(|heap| heap.is_reserve()) {
            self.process.hold_mappings(address, size, false);
        }
        self.world.names.put(&name);
        Ok(())
    }

    /// IPC_MEM_OPEN: marks an allocation as the place of a name. PREFETCH puts the pages there.
    pub(super) fn ipc_open(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::IpcOpen = arg.para();
        self.process.refer_idle(para.address, 1)?;
        let name = text(&para.name);
        let (tgid, start_time, physical) = (self.process.tgid, self.caller.start_time, self.physical);
        let named = self.world.names.get(&name)?;
        if !named.valid || named.pages_freed {
            return refuse(Errno::EINVAL, "the memory of the name is gone");
        }
        let heap = self.process.heap(para.address).filter(|_| self.process.is_svm(para.address));
        let Some(heap) = heap else {
            return refuse(Errno::EINVAL, "the address lies in no heap");
        };
        if heap.is_reserve() && heap.mapping(para.address).is_none() {
            return refuse(Errno::EADDRNOTAVAIL, "nothing is mapped at the address");
        }
        if heap.opened(para.address).is_some() {
            return refuse(Errno::EADDRINUSE, "another name is open at the address");
        }
        if !heap.holds(para.address, named.size) {
            return refuse(Errno::EINVAL, "the memory does not fit the heap");
        }
        let full = named.trusted.len() >= TRUSTED;
        if !named.trusted.contains_key(&tgid) && (named.needs_trust || full) {
            return refuse(Errno::EINVAL, "the process is not listed");
        }
        let entry = named.trusted.entry(tgid).or_insert_with(|| TrustedProcess { stamp: now(), opened: None });
        if entry.stamp < start_time {
            return refuse(Errno::EINVAL, "the process was listed before it started");
        }
        if entry.opened.is_some() {
            return refuse(Errno::EINVAL, "the process has opened the name already");
        }
        entry.opened = Some((para.address, physical));
        named.holders += 1;
        // The driver does not mark pages of another size: the open then has no effect.
        let same_pages = (heap.kind == svm::HEAP_HUGE) == named.huge;
        let size = named.size;
        if let Some(heap) = self.process.heap_mut(para.address).filter(|_| same_pages) {
            heap.opened.insert(para.address, Opened { name, size, physical });
        }
        Ok(())
    }

    /// PREFETCH where a name was opened: puts the pages of its memory there.
    pub(super) fn prefetch_named(&mut self, para: &svm::Advise) -> SvmResult {
        let (logical, physical) = (self.logical, self.physical);
        let Some(heap) = self.process.heap(para.address) else {
            return refuse(Errno::EADDRNOTAVAIL, "the address lies in no heap");
        };
        if let Some(run) = heap.pages(para.address) {
            return match run.logical == logical {
                true => Ok(()),
                false => refuse(Errno::EINVAL, "another device has the memory already"),
            };
        }
        let start = heap.reservation(para.address).map_or(0, |found| found.start);
        let Some(name) = heap.opened.get(&start).map(|found| found.name.clone()) else {
            return refuse(Errno::ENODEV, "no name was opened at the start of the allocation");
        };
        let named = self.world.names.get(&name)?;
        let from = para.address - start;
        let (size, gone) = (named.size, named.pages_freed);
        let pieces = named.pieces.clone();
        self.message(physical)?;
        if gone || from.saturating_add(para.size) > size.next_multiple_of(HUGE_PAGE) {
            return refuse(Errno::EINVAL, "the owner has no such memory");
        }
        let (mut at, mut runs) = (start, Vec::new());
        for (block, offset, size) in pieces {
            let run = Pages { start: at, size, logical, physical, block, offset, view: None, named: true };
            at += size;
            if run.end() > para.address && run.start < para.address + para.size {
                runs.push(run);
            }
        }
        let Some(heap) = self.process.heap_mut(para.address) else { return Ok(()) };
        heap.plain.extend(runs.into_iter().map(|run| (run.start, run)));
        if let Some(reservation) = heap.reservation_mut(para.address) {
            reservation.owner = Some(logical);
            reservation.populated = true;
        }
        Ok(())
    }

    /// IPC_MEM_CLOSE.
    pub(super) fn ipc_close(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::IpcClose = arg.para();
        self.process.refer(para.address, None)?;
        let tgid = self.process.tgid;
        let Some(name) = self.world.names.opened_at(tgid, para.address) else {
            return refuse(Errno::EINVAL, "no name was opened at the address");
        };
        if let Some(entry) = self.world.names.get(&name)?.trusted.get_mut(&tgid) {
            entry.opened = None;
        }
        self.world.names.put(&name);
        let Some(heap) = self.process.heap_mut(para.address) else { return Ok(()) };
        if let Some(opened) = heap.opened.remove(&para.address) {
            // The device keeps the pages until the addresses are freed.
            for (_, run) in heap.plain.range_mut(para.address..para.address + opened.size) {
                run.named = false;
            }
            if let Some(reservation) = heap.reservation_mut(para.address) {
                reservation.owner = None;
            }
        }
        Ok(())
    }

    /// IPC_MEM_QUERY. Any process may ask.
    pub(super) fn ipc_query(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::IpcQuery = arg.para();
        let named = self.world.names.get(&text(&para.name))?;
        para.len = named.size;
        para.is_huge = i32::from(named.huge);
        para.phy_devid = named.physical;
        put(arg, &para);
        Ok(())
    }

    /// IPC_MEM_SET_PID.
    pub(super) fn ipc_set_pid(&mut self, arg: &mut Arg) -> SvmResult {
        self.list(&arg.para(), None)
    }

    /// IPC_MEM_SET_PID_POD: as IPC_MEM_SET_PID, with the server of the processes. No other server
    /// answers here.
    pub(super) fn ipc_set_pid_pod(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::IpcSetPid = arg.para();
        // The device's number is a part of the name, which is read before the name is looked up.
        let name = text(&para.name);
        let digits = name.get(..28).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let device = digits.and_then(|digits| u32::from_str_radix(&digits[24..26], 16).ok());
        if device.is_none_or(|device| device >= svm::DEVICE_IDS) {
            return refuse(Errno::EINVAL, "the name has another form");
        }
        let server = (!agent::is_local(self.machine, para.sdid)).then_some(para.sdid);
        self.list(&para, server)
    }

    /// Lists processes on this server, or on another one (`devmm_ipc_node_set_pids`).
    fn list(&mut self, para: &svm::IpcSetPid, server: Option<u32>) -> SvmResult {
        if para.num > PIDS {
            return refuse(Errno::EINVAL, "there are too many processes");
        }
        let named = self.world.names.get(&text(&para.name))?;
        if !named.needs_trust {
            return refuse(Errno::EPERM, "the name needs no trust list");
        }
        if !named.valid {
            return refuse(Errno::EFAULT, "the name is destroyed");
        }
        if named.creator != self.caller.tgid {
            return refuse(Errno::EINVAL, "only the creator lists processes");
        }
        if para.num == 0 || named.trusted.len() + named.elsewhere.len() + para.num as usize > TRUSTED {
            return refuse(Errno::EINVAL, "the list is empty or too long");
        }
        let stamp = now();
        let listed: Vec<i32> = para.pids[..para.num as usize].to_vec();
        if let Some(server) = server {
            if listed.iter().all(|pid| *pid == 0) {
                return refuse(Errno::EINVAL, "no process is listed");
            }
            named.elsewhere.extend(listed.into_iter().filter(|pid| *pid != 0).map(|pid| (server, pid)));
            return refuse(Errno::EFAULT, "the other server does not answer");
        }
        let mut any = false;
        for pid in listed.into_iter().filter(|pid| *pid != 0 && *pid != named.creator) {
            named.trusted.entry(pid).or_default().stamp = stamp;
            any = true;
        }
        if any { Ok(()) } else { refuse(Errno::EINVAL, "no other process is listed") }
    }

    /// IPC_MEM_SET_ATTR.
    pub(super) fn ipc_set_attr(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::IpcSetAttr = arg.para();
        if !matches!(para.kind, ROUTE | NO_TRUST_LIST) {
            return refuse(Errno::EOPNOTSUPP, "a name has no such attribute");
        }
        if para.attr > 1 {
            return refuse(Errno::EINVAL, "the attribute has no such value");
        }
        let tgid = self.caller.tgid;
        let named = self.world.names.get(&text(&para.name))?;
        if named.creator != tgid {
            return refuse(Errno::EPERM, "only the creator sets attributes");
        }
        if para.kind == ROUTE {
            named.route = para.attr;
            return Ok(());
        }
        if para.attr == 0 {
            return refuse(Errno::EOPNOTSUPP, "the trust list cannot be switched on again");
        }
        if named.needs_trust && !named.trusted.is_empty() {
            return refuse(Errno::EPERM, "processes are listed already");
        }
        named.needs_trust = false;
        Ok(())
    }

    /// IPC_MEM_GET_ATTR. Any process may ask.
    pub(super) fn ipc_get_attr(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::IpcGetAttr = arg.para();
        if !matches!(para.kind, ROUTE | NO_TRUST_LIST) {
            return refuse(Errno::EOPNOTSUPP, "a name has no such attribute");
        }
        let named = self.world.names.get(&text(&para.name))?;
        para.attr = if para.kind == ROUTE { named.route } else { u64::from(!named.needs_trust) };
        put(arg, &para);
        Ok(())
    }
}
