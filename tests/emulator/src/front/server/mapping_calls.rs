//! mmap of a file of the driver, and changes of its mappings.

use super::{Reply, Server, Who};
use crate::driver::{AddressSpaceChange, Change, ChangeKind, Mmap};
use crate::front::client_memory::ProcessMemory;
use crate::front::client_process::{self, Inheritance, Inode};
use crate::front::filter::DRIVER_AREA;
use crate::front::listener::{Answer, Notification};
use crate::svm::page_size;
use libc::c_int;
use nix::errno::Errno;
use std::ops::Range;
use std::time::Instant;

/// Whether advice allocates pages.
pub(super) fn is_populating(advice: i32) -> bool {
    const MADV_COLLAPSE: i32 = 25;
    matches!(advice, libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE | MADV_COLLAPSE)
}

impl Server {
    pub(super) fn mmap(&mut self, call: &Notification, arrived: Instant) -> Reply {
        let [_, _, _, flags, descriptor, _] = call.arguments;
        let flags = flags as c_int;
        if flags & libc::MAP_ANONYMOUS == 0 {
            if let Some((who, inode)) = self.file(call.tid, descriptor as c_int, arrived) {
                return self.mmap_file(call, &who, inode);
            }
        }
        if flags & libc::MAP_FIXED != 0 {
            return self.change(call, "mmap", ChangeKind::Unmap, arrived);
        }
        Answer::Continue.into()
    }

    fn mmap_file(&mut self, call: &Notification, who: &Who, inode: Inode) -> Reply {
        let [address, length, prot, flags, _, offset] = call.arguments;
        let (prot, flags, page) = (prot as c_int, flags as c_int, page_size());
        let Some(file) = self.files.get_mut(inode) else { return Answer::Continue.into() };
        if length == 0 || offset % page != 0 {
            // The kernel refuses this before it calls the driver.
            return Answer::Continue.into();
        }
        // The kernel first asks the driver for an address, then checks the access mode, then calls
        // the driver's mmap.
        let fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
        let refused = !fixed && !file.may_map(prot, flags);
        if !refused && flags & (libc::MAP_POPULATE | libc::MAP_LOCKED) != 0 {
            // Linux ignores both for the real driver. Here they would allocate all pages.
            return Errno::ENOMEM.into();
        }
        let id = file.id;
        let hint = address.next_multiple_of(page);
        let length = length.next_multiple_of(page);
        let free = hint != 0 && client_process::range_is_free(call.tid, hint, length);
        let memory = ProcessMemory(call.tid);
        let mmap = Mmap { hint, free, length, prot, flags, offset };
        let result = if refused { Err(Errno::EACCES) } else { self.driver.mmap(&who.caller(&memory), id, &mmap) };
        if self.recorder.is_on() {
            let mut record = who.record("mmap");
            record.file = Some(id.0);
            record.flags = Some(format!("{flags:#x}"));
            record.addr = Some(format!("{hint:#x}"));
            record.len = Some(format!("{length:#x}"));
            record.arg = Some(prot.into());
            record.mapped = (hint != 0).then_some(!free);
            record.offset = (offset != 0).then(|| format!("{offset:#x}"));
            self.finish(record, result.map(|()| hint as i64), who.arrived);
        }
        match result {
            Ok(()) => {
                if let Some(process) = self.processes.known(call.tid) {
                    process.inheritance = Inheritance::Settled;
                }
                if who.key.tgid as u32 == std::process::id() {
                    self.uncopied.push((hint, length));
                } else {
                    client_process::dump_no_shared_memory(who.key.tgid);
                }
                Answer::Continue.into()
            }
            Err(errno) => errno.into(),
        }
    }

    pub(super) fn change(
        &mut self,
        call: &Notification,
        name: &'static str,
        kind: ChangeKind,
        arrived: Instant,
    ) -> Reply {
        let [start, length, argument, ..] = call.arguments;
        // Only a process that used the driver has mappings of the driver.
        if !self.processes.is_client(call.tid) {
            return self.change_by_child(call, kind);
        }
        let known = self.processes.known(call.tid);
        if known.is_some_and(|process| process.inheritance == Inheritance::Unmapping(call.tid)) {
            return Answer::Continue.into();
        }
        let Ok(who) = self.who(call.tid, arrived) else { return Answer::Continue.into() };
        let memory = ProcessMemory(call.tid);
        // It matters only for the areas of the driver, and reading all mappings takes a while.
        let mapped = length < DRIVER_AREA || !client_process::range_is_free(call.tid, start, length);
        let change = AddressSpaceChange { kind, start, length, mapped };
        let result = self.driver.address_space_change(&who.caller(&memory), &change);
        if self.recorder.is_on() {
            let mut record = who.record(name);
            record.addr = Some(format!("{start:#x}"));
            record.len = Some(format!("{length:#x}"));
            record.arg = (kind != ChangeKind::Unmap).then_some(argument as i64);
            record.mapped = (length >= DRIVER_AREA).then_some(mapped);
            let value = if name == "mmap" { start as i64 } else { 0 };
            self.finish(record, result.map(|_| value), arrived);
        }
        match result {
            Ok(Change::ByKernel) => Answer::Continue.into(),
            Ok(Change::Nothing) => Answer::Value(0).into(),
            Err(errno) => errno.into(),
        }
    }

    /// A change by a process that may have inherited mappings of the driver. With the real driver
    /// there is nothing, so pages cannot be locked or populated.
    fn change_by_child(&mut self, call: &Notification, kind: ChangeKind) -> Reply {
        let populates = match kind {
            ChangeKind::Lock => true,
            ChangeKind::Advise(advice) => is_populating(advice),
            _ => false,
        };
        let [start, length, ..] = call.arguments;
        let end = start.saturating_add(length);
        let is_inherited = |inode: Inode| self.files.get_mut(inode).is_some();
        let touched = |mapping: &Range<u64>| mapping.end > start && mapping.start < end;
        if populates && client_process::mappings(call.tid, is_inherited).iter().any(touched) {
            return Errno::ENOMEM.into();
        }
        Answer::Continue.into()
    }
}
