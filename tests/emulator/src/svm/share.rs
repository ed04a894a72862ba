//! Sharing: MEM_EXPORT, the trust list and MEM_IMPORT.
//!
//! A share is identified by the exporting device (65 for the host) and a small number that is never
//! reused. It counts its holders: the exporter and every import. The memory lives as long as one of
//! them. The exporter is identified by its process id alone, a trusted process by its id and the
//! time when it was listed, which must not be before the process started.

use super::behaviour::Behaviour;
use super::handle::{Handle, HandleKind};
use super::store::{BlockId, Store};
use super::{Call, SvmResult, agent, put, refuse, to_physical};
use crate::machine::HOST;
use crate::pod::{OfferedMemory, Pod, Unreachable};
use ascend_ioctl::svm::{self, Arg};
use nix::errno::Errno;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A shared handle of a process.
#[derive(Debug, Clone, Copy)]
pub struct Node {
    /// The exporting device.
    pub physical: u32,
    pub share: i32,
    pub imported: bool,
    /// Imported with the super-pod id of another server. The driver's release then tells that
    /// server, and this one's record of the import stays.
    pub foreign: bool,
}

/// A process in the trust list.
#[derive(Debug, Default)]
pub struct Trusted {
    /// When it was listed, in nanoseconds since boot.
    pub stamp: u64,
    /// The process that had the id at that time.
    pub identity: Option<u64>,
    /// The devices (or 65) on which it has imported.
    pub imported: BTreeSet<u32>,
}

/// A share.
#[derive(Debug)]
pub struct Share {
    pub exporter: i32,
    pub holders: u32,
    /// Only listed processes may import.
    pub needs_trust: bool,
    pub trusted: HashMap<i32, Trusted>,
    pub block: BlockId,
    /// The template of an import's handle.
    pub handle: Handle,
}

/// All shares.
#[derive(Debug, Default)]
pub struct Shares {
    shares: BTreeMap<(u32, i32), Share>,
    next: HashMap<u32, i32>,
    /// Where the shares are offered to other servers.
    pod: Option<Pod>,
    /// Memory of shares that have ended here and that other servers hold.
    kept: Vec<((u32, i32), BlockId)>,
}

impl Shares {
    pub fn iter(&self) -> impl Iterator<Item = (&(u32, i32), &Share)> {
        self.shares.iter()
    }

    fn get(&mut self, physical: u32, share: i32) -> SvmResult<&mut Share> {
        match self.shares.get_mut(&(physical, share)) {
            Some(share) => Ok(share),
            None => refuse(Errno::EFAULT, "there is no such share"),
        }
    }

    /// Removes a holder (`devmm_share_agent_blk_put_with_share_id`). With `erase` the process has
    /// ended, and its entry in the trust list goes too.
    pub fn put(&mut self, store: &mut Store, node: Node, device: u32, tgid: i32, erase: bool) {
        let Some(share) = self.shares.get_mut(&(node.physical, node.share)) else { return };
        if let Some(trusted) = share.trusted.get_mut(&tgid).filter(|_| !node.foreign) {
            trusted.imported.remove(&device);
        }
        if erase && tgid != share.exporter {
            share.trusted.remove(&tgid);
        }
        share.holders -= 1;
        if share.holders == 0 {
            let (key, block) = ((node.physical, node.share), share.block);
            self.shares.remove(&key);
            match &self.pod {
                Some(pod) if pod.is_held(key.0, key.1) => self.kept.push((key, block)),
                _ => store.free(block),
            }
        }
    }

    /// Frees memory of ended shares that no other server holds any more.
    pub fn free_unheld(&mut self, store: &mut Store) {
        let Some(pod) = self.pod.as_ref().filter(|_| !self.kept.is_empty()) else { return };
        self.kept.retain(|((device, share), block)| {
            let held = pod.is_held(*device, *share);
            if !held {
                store.free(*block);
            }
            held
        });
    }
}

/// The current time on the clock of process start times.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

impl Call<'_, '_> {
    /// MEM_EXPORT.
    pub(super) fn mem_export(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemExport = arg.para();
        let physical = self.physical;
        let host = para.side == svm::SIDE_HOST as i32;
        if host && physical != HOST {
            return refuse(Errno::EINVAL, "host memory is exported on device 65");
        }
        if !host {
            self.message(physical)?;
        }
        let Some(handle) = self.table(physical).and_then(|table| table.get_mut(para.id)) else {
            return refuse(Errno::EINVAL, "there is no such handle");
        };
        if handle.kind != HandleKind::Normal {
            return refuse(Errno::EINVAL, "the handle is shared already");
        }
        handle.kind = HandleKind::Exported;
        let handle = Handle { kind: HandleKind::Imported, mapped: 0, half_freed: false, ..handle.clone() };
        let next = self.world.shares.next.entry(physical).or_default();
        let id = *next;
        *next += 1;
        let share = Share {
            exporter: self.process.tgid,
            holders: 1,
            needs_trust: true,
            trusted: HashMap::new(),
            block: handle.block,
            handle,
        };
        if let (Some(pod), false) = (&self.machine.config.pod, host) {
            if let Some((file, offset, length)) = self.world.store.lies_in(share.block) {
                let Handle { pages, page, module, memory, .. } = share.handle;
                let memory = OfferedMemory { offset, length, pages, page, module, memory };
                pod.offer(physical, id, &file, memory);
                self.world.shares.pod = Some(pod.clone());
            }
        }
        self.world.shares.shares.insert((physical, id), share);
        self.process.nodes.insert((physical, para.id), Node { physical, share: id, imported: false, foreign: false });
        para.share = id;
        put(arg, &para);
        Ok(())
    }

    /// MEM_SET_PID.
    pub(super) fn mem_set_pid(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::MemSetPid = arg.para();
        if para.count == 0 || para.count > svm::TRUST_LIST {
            return refuse(Errno::EINVAL, "the number of processes is out of range");
        }
        if para.pids == 0 {
            return refuse(Errno::EINVAL, "the list is a null pointer");
        }
        let mut bytes = vec![0; para.count as usize * 4];
        if self.caller.memory.read(para.pids, &mut bytes).is_err() {
            return refuse(Errno::EFAULT, "the list cannot be read");
        }
        let share = self.world.shares.get(self.physical, para.share)?;
        if share.exporter != self.caller.tgid {
            return refuse(Errno::EACCES, "only the exporter may list processes");
        }
        let stamp = now();
        let mut listed = false;
        for pid in bytes.chunks_exact(4).map(|bytes| i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])) {
            if pid == 0 {
                continue;
            }
            if !share.needs_trust {
                return refuse(Errno::EPERM, "the share needs no trust list");
            }
            if share.trusted.len() >= svm::TRUST_LIST as usize {
                return refuse(Errno::EINVAL, "the trust list is full");
            }
            let entry = share.trusted.entry(pid).or_default();
            (entry.stamp, entry.identity) = (stamp, (self.machine.identity)(pid));
            listed = true;
        }
        if listed { Ok(()) } else { refuse(Errno::EINVAL, "the list contains only zeros") }
    }

    /// MEM_SET_ATTR.
    pub(super) fn mem_set_attr(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::MemSetAttr = arg.para();
        if para.kind != 0 {
            return refuse(Errno::EOPNOTSUPP, "no such attribute");
        }
        let share = self.world.shares.get(self.physical, para.share)?;
        if para.value.no_trust_list > 1 {
            return refuse(Errno::EINVAL, "no such value");
        }
        if share.exporter != self.caller.tgid {
            return refuse(Errno::EPERM, "only the exporter may change the share");
        }
        if para.value.no_trust_list == 0 {
            return refuse(Errno::EOPNOTSUPP, "a trust list cannot be demanded again");
        }
        if share.needs_trust && !share.trusted.is_empty() {
            return refuse(Errno::EPERM, "processes are listed already");
        }
        share.needs_trust = false;
        Ok(())
    }

    /// The physical id of the exporting device.
    fn exporting_device(&mut self, logical: u32) -> SvmResult<u32> {
        if logical == svm::HOST_AGENT_ID {
            return refuse(Errno::EINVAL, "the caller has no such device");
        }
        to_physical(self.machine, self.caller, None, logical)
    }

    /// MEM_GET_ATTR.
    pub(super) fn mem_get_attr(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemGetAttr = arg.para();
        if para.kind != 0 {
            return refuse(Errno::EOPNOTSUPP, "no such attribute");
        }
        let physical = self.exporting_device(para.exporter)?;
        let share = self.world.shares.get(physical, para.share)?;
        para.value.no_trust_list = u32::from(!share.needs_trust);
        put(arg, &para);
        Ok(())
    }

    /// MEM_GET_INFO.
    pub(super) fn mem_get_info(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemGetInfo = arg.para();
        let physical = self.exporting_device(para.exporter)?;
        self.world.shares.get(physical, para.share)?;
        para.info.physical = physical;
        put(arg, &para);
        Ok(())
    }

    /// MEM_IMPORT.
    pub(super) fn mem_import(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemImport = arg.para();
        let generation = self.machine.config.generation;
        let (delta, behaviour) = (generation.delta(), Behaviour::of(generation));
        // The kind "posix" was added in the same generation as the host-pin segment.
        let kinds = if delta.host_pin { svm::HANDLE_POSIX } else { svm::HANDLE_FABRIC };
        if para.kind > kinds {
            return refuse(Errno::EOPNOTSUPP, "no such kind of shareable handle");
        }
        let local = agent::is_local(self.machine, para.sdid);
        if !local && self.physical == HOST {
            return refuse(Errno::EOPNOTSUPP, "the host cannot import from another server");
        }
        if para.kind != svm::HANDLE_NONE && !local {
            return self.import_foreign(arg, &mut para);
        }
        let exporter = self.exporting_device(para.exporter)?;
        let (importing, tgid, start_time) = (self.physical, self.caller.tgid, self.caller.start_time);
        let share = self.world.shares.get(exporter, para.share)?;
        if share.exporter == tgid && exporter == importing {
            return refuse(Errno::EACCES, "the exporter has the memory on this device already");
        }
        let of_host = exporter == HOST;
        let mut handle = share.handle.clone();
        if importing != HOST {
            if of_host && handle.page == svm::PAGE_NORMAL && !behaviour.imports_normal_host_pages {
                return refuse(Errno::EOPNOTSUPP, "normal pages of the host cannot be imported on a device");
            }
            self.message(importing)?;
        } else {
            handle.bar = !of_host;
            // The host checks the page kind that the share reports (`devmm_master_mem_import`).
            handle.giant = handle.page == svm::PAGE_GIANT;
        }
        handle.of_host = of_host && importing != HOST;
        // The driver creates the handle before it checks the list: a refused import uses up an id.
        let Some(id) = self.table(importing).map(|table| table.take_id()) else {
            return refuse(Errno::EINVAL, "the device has no handles");
        };
        let share = self.world.shares.get(exporter, para.share)?;
        if !share.needs_trust && !share.trusted.contains_key(&tgid) {
            let entry = share.trusted.entry(tgid).or_default();
            (entry.stamp, entry.identity) = (now(), Some(self.caller.identity));
        }
        let Some(trusted) = share.trusted.get_mut(&tgid) else {
            return refuse(Errno::EACCES, "the process is not in the trust list");
        };
        if trusted.imported.contains(&importing) {
            return refuse(Errno::EFAULT, "the process has imported it on this device already");
        }
        // The driver compares nanoseconds. The start time here is coarser, so the process that was
        // listed must also be the caller.
        if trusted.stamp < start_time || trusted.identity != Some(self.caller.identity) {
            return refuse(Errno::EACCES, "the process was listed before it started");
        }
        trusted.imported.insert(importing);
        share.holders += 1;
        para.id = id;
        para.side = if importing == HOST { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
        para.module = handle.module;
        para.page = handle.page;
        para.pages = handle.pages;
        if delta.import_tells_memory {
            para.memory = handle.memory;
        }
        if let Some(table) = self.table(importing) {
            table.insert(id, handle);
        }
        let node = Node { physical: exporter, share: para.share, imported: true, foreign: !local };
        self.process.nodes.insert((importing, id), node);
        put(arg, &para);
        Ok(())
    }

    /// MEM_IMPORT from another server of the pod: the share is named by its physical device, and no
    /// list is looked at (`devmm_get_remote_share_mem_info`).
    fn import_foreign(&mut self, arg: &mut Arg, para: &mut svm::MemImport) -> SvmResult {
        let server = para.sdid >> 22;
        let fetched = match &self.machine.config.pod {
            Some(pod) => pod.fetch(server, para.exporter_physical, para.share),
            None => Err(Unreachable::NoAnswer),
        };
        let share = match fetched {
            Ok(share) => share,
            Err(Unreachable::NoShare) => return refuse(Errno::EFAULT, "the other server has no such share"),
            Err(Unreachable::NoAnswer) => return refuse(Errno::EFAULT, "the other server does not answer"),
        };
        self.message(self.physical)?;
        let physical = self.physical;
        let Some(id) = self.table(physical).map(|table| table.take_id()) else {
            return refuse(Errno::EINVAL, "the device has no handles");
        };
        let memory = share.memory;
        let block = self.world.store.adopt(share.file.clone(), memory.offset, memory.length);
        let handle = Handle {
            block,
            kind: HandleKind::Imported,
            pages: memory.pages,
            left: memory.pages,
            page: memory.page,
            page_size: memory.length / memory.pages.max(1),
            giant: memory.page == svm::PAGE_GIANT,
            module: memory.module,
            memory: memory.memory,
            half_freed: false,
            mapped: 0,
            bar: false,
            of_host: false,
            route: 0,
        };
        if let Some(table) = self.table(physical) {
            table.insert(id, handle);
        }
        self.process.foreign.insert((physical, id), (share, block));
        (para.id, para.side) = (id, svm::SIDE_DEVICE);
        (para.module, para.page, para.pages) = (memory.module, memory.page, memory.pages);
        if self.machine.config.generation.delta().import_tells_memory {
            para.memory = memory.memory;
        }
        put(arg, para);
        Ok(())
    }
}
