//! What the kernel reports besides calls: files that were closed, processes and threads that ended,
//! and that time has passed.

use super::{FILES, ORDER, Server, TIME};
use crate::front::client_process::{self, Inode, THREAD};
use crate::record::Record;
use nix::errno::Errno;
use nix::sys::epoll::{EpollEvent, EpollTimeout};
use std::collections::HashSet;

impl Server {
    /// Processes everything that the kernel has reported so far.
    pub(super) fn settle(&mut self) {
        self.processes.release();
        self.read_reports();
        self.settle_known();
    }

    /// Processes the reports of closed files and ended processes.
    pub(super) fn read_reports(&mut self) {
        if !self.uncopied.is_empty() {
            self.spare_forks();
        }
        let mut events = [EpollEvent::empty(); 32];
        let mut ended = Vec::new();
        loop {
            let count = self.reports.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
            for event in &events[..count] {
                match event.data() {
                    FILES => self.files.read_events(),
                    ORDER => self.ordered = true,
                    TIME => {
                        let _ = self.timer.wait();
                        (self.armed, self.due) = (None, true);
                    }
                    thread if thread & THREAD != 0 => self.processes.forget_thread(thread as i32),
                    tgid => ended.push(tgid as i32),
                }
            }
            for tgid in ended.drain(..) {
                self.end_address_space(tgid);
                self.processes.forget(tgid);
            }
            if count < events.len() {
                break;
            }
        }
    }

    /// Processes what needs no report, or is known from earlier ones.
    pub(super) fn settle_known(&mut self) {
        let execed: Vec<i32> = self
            .processes
            .execing()
            .filter(|process| !process.has_address_space())
            .map(|process| process.key.tgid)
            .collect();
        for tgid in execed {
            self.end_address_space(tgid);
        }
        // A sleeping call keeps its file open even if the program closed it, unless the caller was
        // killed.
        self.parked.retain(|parked| parked.listener.waits(parked.notification.id));
        if !self.files.has_suspects() {
            return;
        }
        let busy: HashSet<Inode> = self.parked.iter().map(|parked| parked.file).collect();
        for file in self.files.take_closed(&busy) {
            let mut alive = false;
            for (index, user) in file.users.iter().enumerate() {
                let process = self.processes.get_mut(user.tgid).filter(|process| process.key == *user);
                let Some(process) = process else { continue };
                if process.has_address_space() {
                    alive |= index == 0;
                } else {
                    self.end_address_space(user.tgid);
                }
            }
            if self.recorder.is_on() {
                self.recorder.add(Record { call: "close", file: Some(file.id.0), ..Record::default() });
            }
            self.driver.close(file.id, alive);
            self.kill_trapped_clients();
        }
    }

    /// Reports to the model, once, that the address space in which a process used the driver is
    /// gone.
    fn end_address_space(&mut self, tgid: i32) {
        let Some(process) = self.processes.get_mut(tgid) else { return };
        if process.end_address_space() {
            let key = process.key;
            self.recorder.end(key.tgid);
            self.driver.exit(key.tgid, key.start_time);
            self.kill_trapped_clients();
        }
    }

    /// Kills the clients that triggered traps.
    pub(super) fn kill_trapped_clients(&mut self) {
        for trap in std::mem::take(&mut self.driver.machine.traps) {
            eprintln!("ascend-emulator: {trap}");
            if trap.tgid as u32 == std::process::id() {
                // The client is this process: results after this point would be meaningless.
                self.recorder.flush();
                std::process::abort();
            }
            if let Some(process) = self.processes.get_mut(trap.tgid) {
                client_process::kill(process);
            }
            self.traps.push(trap);
        }
    }

    /// Keeps the driver's mappings out of forked children and core dumps, as the real driver does.
    /// This is not possible for another process. For clients in this process it is done as soon as
    /// the kernel has made the mapping, which is before the next call is answered.
    fn spare_forks(&mut self) {
        self.uncopied.retain(|(start, length)| {
            let advise = |advice| {
                // SAFETY: changes a flag of a mapping of the driver, and no memory.
                let result = unsafe { libc::madvise(*start as *mut libc::c_void, *length as usize, advice) };
                Errno::result(result)
            };
            // ENOMEM: the mapping does not exist yet.
            advise(libc::MADV_DONTDUMP).and_then(|_| advise(libc::MADV_DONTFORK)) == Err(Errno::ENOMEM)
        });
    }
}
