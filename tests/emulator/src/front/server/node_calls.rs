//! Calls about the driver's nodes: open, stat and their kin.

use super::{Reply, Server, Who};
use crate::caller::Memory;
use crate::front::client_memory::ProcessMemory;
use crate::front::client_process::{self, Inheritance};
use crate::front::files::Blank;
use crate::front::listener::{Answer, Listener, Notification};
use crate::front::{dev_listing, module_list, node, unmap_inherited};
use libc::c_int;
use nix::errno::Errno;
use std::os::fd::OwnedFd;
use std::time::Instant;

impl Server {
    pub(super) fn open(
        &mut self,
        listener: &Listener,
        call: &Notification,
        at: c_int,
        path: u64,
        flags: c_int,
        arrived: Instant,
    ) -> Reply {
        let Some(path) = node::path_to_open(call.tid, at, path) else { return Answer::Continue.into() };
        if path == node::MODULE_LIST {
            return self.open_module_list(flags);
        }
        // The path was read by thread id: check that the thread was still the caller.
        if !listener.waits(call.id) {
            return Errno::ESRCH.into();
        }
        let Ok(who) = self.who(call.tid, arrived) else { return Errno::ESRCH.into() };
        if self.unmaps_inherited(call, who.key.tgid) {
            return Answer::Restart.into();
        }
        let mut record = who.record("open");
        let result = self.open_file(&who, &path, flags);
        if self.recorder.is_on() {
            record.file = result.as_ref().ok().map(|(id, _)| *id);
            record.path = Some(path);
            record.flags = Some(format!("{flags:#x}"));
            self.finish(record, result.as_ref().map(|_| 0).map_err(|errno| *errno), arrived);
        }
        match result {
            Ok((_, file)) => Answer::Descriptor { file, cloexec: flags & libc::O_CLOEXEC != 0 }.into(),
            Err(errno) => errno.into(),
        }
    }

    /// Makes a process unmap the driver's mappings that it inherited, before it opens its first
    /// node. Returns true if it does so now; the call is then made again.
    fn unmaps_inherited(&mut self, call: &Notification, tgid: i32) -> bool {
        let Some(process) = self.processes.known(call.tid) else { return false };
        if std::mem::replace(&mut process.inheritance, Inheritance::Settled) != Inheritance::Unknown {
            return false;
        }
        let parent = client_process::parent(tgid);
        // This process gives its children no mappings, and a stop of its child would look to it
        // like the child's end.
        if tgid == self.own_tgid || parent == Some(self.own_tgid) {
            return false;
        }
        let mut relatives: Vec<i32> = parent.into_iter().collect();
        let ranges = client_process::mappings(call.tid, |inode| {
            let file = self.files.get_mut(inode);
            relatives.extend(file.iter().flat_map(|file| &file.users).map(|user| user.tgid));
            file.is_some()
        });
        // A child of vfork would unmap its parent's.
        let shares = |relative: &i32| *relative != tgid && client_process::share_memory(call.tid, *relative);
        if ranges.is_empty() || relatives.iter().any(shares) || !unmap_inherited::begin(call.tid, call.number, ranges) {
            return false;
        }
        if let Some(process) = self.processes.known(call.tid) {
            process.inheritance = Inheritance::Unmapping(call.tid);
        }
        true
    }

    fn open_file(&mut self, who: &Who, path: &str, flags: c_int) -> Result<(u64, OwnedFd), Errno> {
        if flags & (libc::O_CREAT | libc::O_EXCL) == libc::O_CREAT | libc::O_EXCL
            && self.driver.exists(who.key.tgid, path)
        {
            return Err(Errno::EEXIST);
        }
        let memory = ProcessMemory(who.tid);
        let blank = Blank::new()?;
        // A driver path that the model does not have must not be opened on the real host.
        let id = self.driver.open(&who.caller(&memory), path, flags, blank.backing()?).unwrap_or(Err(Errno::ENOENT))?;
        match self.files.publish(blank, id, path, flags, who.key) {
            Ok(file) => Ok((id.0, file)),
            Err(errno) => {
                self.driver.close(id, true);
                Err(errno)
            }
        }
    }

    /// open(2) of `/proc/modules` by a process under emulation.
    fn open_module_list(&self, flags: c_int) -> Reply {
        let only_reads = flags & libc::O_ACCMODE == libc::O_RDONLY;
        match module_list::file(&self.driver.machine.config) {
            Ok(file) if only_reads => Answer::Descriptor { file, cloexec: flags & libc::O_CLOEXEC != 0 }.into(),
            _ => Answer::Continue.into(),
        }
    }

    fn exists(&mut self, tid: i32, path: &str) -> bool {
        self.who(tid, Instant::now()).is_ok_and(|who| self.driver.exists(who.key.tgid, path))
    }

    pub(super) fn stat(
        &mut self,
        call: &Notification,
        at: c_int,
        path: u64,
        buffer: u64,
        describe: fn(&str) -> Vec<u8>,
    ) -> Reply {
        let Some(path) = node::driver_path(call.tid, at, path) else { return Answer::Continue.into() };
        if !self.exists(call.tid, &path) {
            return Errno::ENOENT.into();
        }
        match ProcessMemory(call.tid).write(buffer, &describe(&path)) {
            Ok(()) => Answer::Value(0).into(),
            Err(_) => Errno::EFAULT.into(),
        }
    }

    pub(super) fn access(&mut self, call: &Notification, at: c_int, path: u64) -> Reply {
        let Some(path) = node::driver_path(call.tid, at, path) else { return Answer::Continue.into() };
        if self.exists(call.tid, &path) { Answer::Value(0).into() } else { Errno::ENOENT.into() }
    }

    /// stat of a descriptor.
    pub(super) fn fstat(
        &mut self,
        call: &Notification,
        descriptor: c_int,
        buffer: u64,
        describe: fn(&str) -> Vec<u8>,
    ) -> Reply {
        let Some(path) = self.node_of(call.tid, descriptor) else { return Answer::Continue.into() };
        match ProcessMemory(call.tid).write(buffer, &describe(&path)) {
            Ok(()) => Answer::Value(0).into(),
            Err(_) => Errno::EFAULT.into(),
        }
    }

    /// The node that a descriptor of a task was opened at, if it is the driver's.
    fn node_of(&mut self, tid: i32, descriptor: c_int) -> Option<String> {
        let (inode, _) = self.driver_file(tid, descriptor)?;
        self.files.get_mut(inode).map(|file| file.path.clone())
    }

    /// A node is not a symbolic link. realpath(3) asks this of every component. The links in
    /// `/proc/PID/fd` name the nodes.
    pub(super) fn read_link(&mut self, call: &Notification, at: c_int, path: u64, buffer: u64, length: u64) -> Reply {
        let named = node::named_descriptor(call.tid, at, path);
        if let Some(target) = named.and_then(|(task, descriptor)| self.node_of(task, descriptor)) {
            let shown = &target.as_bytes()[..target.len().min(length as usize)];
            return match ProcessMemory(call.tid).write(buffer, shown) {
                _ if length == 0 => Errno::EINVAL.into(),
                Ok(()) => Answer::Value(shown.len() as i64).into(),
                Err(_) => Errno::EFAULT.into(),
            };
        }
        let Some(path) = node::driver_path(call.tid, at, path) else { return Answer::Continue.into() };
        if self.exists(call.tid, &path) { Errno::EINVAL.into() } else { Errno::ENOENT.into() }
    }

    /// getdents64(2): of `/dev`, with the driver's nodes.
    pub(super) fn list_directory(&mut self, call: &Notification, descriptor: c_int, buffer: u64, room: u64) -> Reply {
        if !dev_listing::is_dev(call.tid, descriptor) {
            return Answer::Continue.into();
        }
        let Ok(who) = self.who(call.tid, Instant::now()) else { return Errno::ESRCH.into() };
        let tgid = who.key.tgid;
        let list = dev_listing::entries(call.tid, tgid, descriptor, room, &self.driver.nodes(tgid));
        match list.map(|list| ProcessMemory(call.tid).write(buffer, &list).map(|()| list.len())) {
            None => Answer::Continue.into(),
            Some(Ok(length)) => Answer::Value(length as i64).into(),
            Some(Err(_)) => Errno::EFAULT.into(),
        }
    }
}
