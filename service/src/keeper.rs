//! The keeper: the process that owns the memory.
//!
//! The driver lets only the process that exported memory extend its trust list, and memory that
//! nobody maps lives as long as that process. So the keeper must not die. It talks to its sibling,
//! the front, alone, over a socket pair with packets of a fixed format; it parses nothing that a
//! client sends, maps nothing and copies nothing. The front may be killed or replaced at any time:
//! the keeper holds the front's journal, a memory file that it never looks into, and hands it to
//! the next front.

pub(crate) mod packet;

use ascend_vmm::share::BareTgid;
use ascend_vmm::{Device, Kind, LogicalId, MemoryKind, Page, PhysicalMemory, Session, discovery};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::MsgFlags;
use packet::{KeptPacket, OrderPacket, PACKET, TEXT, op, receive, send, status};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// How often the keeper says that it lives while it has nothing to do, in milliseconds.
const PULSE: u16 = 1000;

/// What the keeper's process tells whoever watches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Told {
    /// A front has taken over, and serves clients.
    Serving,
    /// The keeper is not stuck: at least once a second, but for the time of a call of the driver's.
    Alive,
}

/// The owner of the memory.
pub(crate) struct Keeper {
    session: Session,
    devices: HashMap<u32, Device>,
    /// Exported memory.
    held: BTreeMap<u64, PhysicalMemory>,
    journal: Option<OwnedFd>,
    /// Words of the command that starts the next front, if a front has said one.
    successor: Vec<u8>,
}

impl Keeper {
    pub(crate) fn new(session: Session) -> Keeper {
        Keeper { session, devices: HashMap::new(), held: BTreeMap::new(), journal: None, successor: Vec::new() }
    }

    /// The command that starts the next front, if a front has said one.
    pub(crate) fn successor(&self) -> Option<Command> {
        let mut words =
            self.successor.split_inclusive(|byte| *byte == 0).map(|word| OsStr::from_bytes(&word[..word.len() - 1]));
        let mut command = Command::new(words.next()?);
        command.args(words);
        Some(command)
    }

    /// Serves a front until its end of the socket is closed. True if it has ever taken over.
    pub(crate) fn serve(&mut self, front: BorrowedFd<'_>, told: &mut dyn FnMut(Told)) -> bool {
        let mut took_over = false;
        if let Err(error) = self.serve_packets(front, &mut took_over, told) {
            tracing::debug!(%error, "the front ended in the middle of something");
        }
        took_over
    }

    fn serve_packets(
        &mut self,
        front: BorrowedFd<'_>,
        took_over: &mut bool,
        told: &mut dyn FnMut(Told),
    ) -> io::Result<()> {
        let mut buffer = vec![0; PACKET];
        loop {
            told(Told::Alive);
            match poll(&mut [PollFd::new(front, PollFlags::POLLIN)], PULSE) {
                Ok(0) | Err(Errno::EINTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            let Some((length, file)) = receive(front, &mut buffer, MsgFlags::empty())? else { break };
            let Ok((order, rest)) = OrderPacket::read_from_prefix(&buffer[..length]) else { continue };
            match order.op.get() {
                op::JOURNAL => {
                    if file.is_some() && !std::mem::replace(took_over, true) {
                        told(Told::Serving);
                    }
                    self.journal = file.or(self.journal.take());
                }
                op::SUCCESSOR if rest.last() == Some(&0) => self.successor = rest.to_vec(),
                op::START => self.start(front)?,
                _ => {
                    let reply = self.obey(&order, rest, file).unwrap_or_else(refused);
                    let head = KeptPacket { number: order.number, ..reply.head };
                    match send(front, head.as_bytes(), short(&reply.text), None, MsgFlags::empty()) {
                        Ok(()) | Err(Errno::EPIPE | Errno::ECONNRESET) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        Ok(())
    }

    /// Tells a new front what there is.
    fn start(&mut self, front: BorrowedFd<'_>) -> io::Result<()> {
        let version = KeptPacket::new(packet::LINK.into(), status::LINK);
        send(front, version.as_bytes(), &[], None, MsgFlags::empty())?;
        for npu in discovery::list().unwrap_or_default().iter().filter(|npu| npu.is_usable()) {
            let mut head = KeptPacket::new(0, status::NPU);
            (head.device, head.first) = (npu.logical.0.into(), u64::from(npu.physical.0).into());
            send(front, head.as_bytes(), npu.identity.to_string().as_bytes(), None, MsgFlags::empty())?;
        }
        for (id, memory) in &self.held {
            let Ok(export) = memory.export() else { continue };
            let Ok(ticket) = export.ticket() else { continue };
            let mut head = KeptPacket::new(*id, status::HELD);
            (head.first, head.second) = (export.handle().to_u64().into(), memory.size().into());
            head.ticket = ticket.to_bytes();
            send(front, head.as_bytes(), &[], None, MsgFlags::empty())?;
        }
        let head = KeptPacket::new(u64::from(std::process::id()), status::STARTED);
        send(front, head.as_bytes(), &[], self.journal.as_ref().map(AsFd::as_fd), MsgFlags::empty())?;
        Ok(())
    }

    /// Carries out an order. An error is the sentence for a refusal.
    fn obey(&mut self, order: &OrderPacket, rest: &[u8], file: Option<OwnedFd>) -> Result<Reply, String> {
        match order.op.get() {
            op::CREATE => self.create(order),
            op::RELEASE => {
                // Dropping it drops this process's last reference to the memory.
                let unknown = numbers(rest).filter(|id| self.held.remove(id).is_none()).count();
                match unknown {
                    0 => Ok(Reply::new(status::DONE)),
                    _ => Err(format!("{unknown} of the memories to release are not there")),
                }
            }
            op::TRUST => self.trust(order, rest, file),
            op::MEMORY => {
                let (free, total) = self.memory(order.device.get()).map_err(|error| error.to_string())?;
                Ok(Reply::new(status::MEMORY).numbers(free, total))
            }
            op::PING => Ok(Reply::new(status::DONE)),
            unknown => Err(format!("order {unknown} is not known")),
        }
    }

    fn device(&mut self, logical: u32) -> ascend_vmm::Result<&Device> {
        if !self.devices.contains_key(&logical) {
            self.devices.insert(logical, self.session.device(LogicalId(logical))?);
        }
        Ok(&self.devices[&logical])
    }

    /// Free and all bytes of a device.
    fn memory(&mut self, logical: u32) -> ascend_vmm::Result<(u64, u64)> {
        let info = self.device(logical)?.memory_info(MemoryKind::Hbm)?;
        Ok((info.huge_free, info.huge_total))
    }

    fn create(&mut self, order: &OrderPacket) -> Result<Reply, String> {
        let (id, logical) = (order.id.get(), order.device.get());
        if self.held.contains_key(&id) {
            return Ok(Reply::new(status::TAKEN));
        }
        let page = if order.giant == 0 { Page::Huge } else { Page::Giant };
        let created = self.device(logical).and_then(|device| {
            let memory = device.create_with(order.size.get(), Kind { page, ..Kind::default() })?;
            let export = memory.export()?;
            if order.everyone != 0 {
                export.trust_anyone()?;
            }
            Ok((export.ticket()?, export))
        });
        match created {
            Ok((ticket, export)) => {
                let mut reply = Reply::new(status::CREATED).numbers(export.handle().to_u64(), 0);
                reply.head.ticket = ticket.to_bytes();
                self.held.insert(id, export.memory().clone());
                Ok(reply)
            }
            Err(error) if error.is_out_of_memory() => {
                let (free, total) = self.memory(logical).unwrap_or((u64::MAX, u64::MAX));
                let reply = Reply::new(status::OUT_OF_MEMORY).numbers(free, total);
                Ok(Reply { text: error.to_string(), ..reply })
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Lets a process import. The list holds numbers: the number is the process's if that lives
    /// after it was listed.
    fn trust(&mut self, order: &OrderPacket, ids: &[u8], pidfd: Option<OwnedFd>) -> Result<Reply, String> {
        let process = order.process.get();
        let gone = || format!("process {process} has ended");
        let Some(pidfd) = pidfd else {
            return Err(format!("process {process} is not known by a descriptor"));
        };
        let tgid = BareTgid::from_raw(process).map_err(|error| error.to_string())?;
        if !lives(&pidfd) {
            return Err(gone());
        }
        for id in numbers(ids) {
            let memory = self.held.get(&id).ok_or_else(|| format!("there is no memory {id}"))?;
            memory.export().and_then(|export| export.trust(&[tgid])).map_err(|error| error.to_string())?;
        }
        if lives(&pidfd) { Ok(Reply::new(status::DONE)) } else { Err(gone()) }
    }
}

/// The numbers of memories behind an order.
fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).filter_map(|id| U64::read_from_bytes(id).ok()).map(U64::get)
}

/// An answer to the front.
struct Reply {
    head: KeptPacket,
    text: String,
}

impl Reply {
    fn new(status: u32) -> Reply {
        Reply { head: KeptPacket::new(0, status), text: String::new() }
    }

    fn numbers(mut self, first: u64, second: u64) -> Reply {
        (self.head.first, self.head.second) = (first.into(), second.into());
        self
    }
}

fn refused(text: String) -> Reply {
    Reply { text, ..Reply::new(status::REFUSED) }
}

/// As much of a sentence as fits into a packet.
fn short(text: &str) -> &[u8] {
    let end = (0..=TEXT.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text.as_bytes()[..end]
}

/// True while the process of a pidfd runs.
pub(crate) fn lives(pidfd: &OwnedFd) -> bool {
    loop {
        // A pidfd becomes readable when its process ends.
        match poll(&mut [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO) {
            Ok(ready) => return ready == 0,
            Err(Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    /// Whatever else the service becomes, the process that must not die stays small.
    #[test]
    fn the_keeper_depends_on_the_library_alone() {
        for source in [include_str!("keeper.rs"), include_str!("keeper/packet.rs")] {
            let code = source.split("#[cfg(test)]").next().unwrap();
            for line in code.lines().filter(|line| line.trim_start().starts_with("use ")) {
                let known = ["ascend_vmm::", "nix::", "std::", "zerocopy::", "packet::"];
                assert!(known.iter().any(|it| line.trim_start()[4..].starts_with(it)), "{line}");
            }
            assert!(!code.contains("crate::"));
        }
    }
}
