//! The front's end of the socket to the keeper.

use crate::books::{Kept, Npu, Order};
use crate::keeper::packet::{BATCH, KeptPacket, LINK, OrderPacket, PACKET, op, receive, send, status};
use crate::layout::PageSize;
use ascend_vmm::share::Ticket;
use nix::errno::Errno;
use nix::sys::socket::MsgFlags;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use zerocopy::{FromBytes, IntoBytes};

/// The front's end of the socket.
#[derive(Debug)]
pub(crate) struct KeeperLink {
    socket: OwnedFd,
}

/// What the keeper had when the front started.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    pub(crate) npus: Vec<Npu>,
    pub(crate) held: Vec<HeldMemory>,
    /// A ticket of each NPU's memory.
    pub(crate) tickets: Vec<Ticket>,
    pub(crate) journal: Option<OwnedFd>,
    /// The keeper's process.
    pub(crate) keeper: i32,
}

/// A memory of the keeper's.
#[derive(Debug, Clone)]
pub(crate) struct HeldMemory {
    pub(crate) id: u64,
    pub(crate) handle: u64,
}

impl KeeperLink {
    pub(crate) fn new(socket: OwnedFd) -> KeeperLink {
        KeeperLink { socket }
    }

    /// Asks what there is, and waits for it.
    pub(crate) fn start(&self) -> io::Result<Inventory> {
        let order = OrderPacket { op: op::START.into(), ..OrderPacket::default() };
        send(self.socket.as_fd(), order.as_bytes(), &[], None, MsgFlags::empty())?;
        let mut inventory = Inventory::default();
        let mut version = None;
        let mut buffer = vec![0; PACKET];
        loop {
            let received = receive(self.socket.as_fd(), &mut buffer, MsgFlags::empty())?;
            let Some((length, file)) = received else { return Err(io::ErrorKind::UnexpectedEof.into()) };
            let Ok((head, text)) = KeptPacket::read_from_prefix(&buffer[..length]) else { continue };
            match head.status.get() {
                status::LINK => {
                    speaks(head.number.get())?;
                    version = Some(head.number.get());
                }
                status::NPU => inventory.npus.push(Npu {
                    logical: head.device.get(),
                    physical: head.first.get() as u32,
                    identity: String::from_utf8_lossy(text).into_owned(),
                }),
                status::HELD => {
                    inventory.held.push(HeldMemory { id: head.number.get(), handle: head.first.get() });
                    let ticket = Ticket::from_bytes(&head.ticket).map_err(io::Error::other)?;
                    if !inventory.tickets.iter().any(|it| it.device == ticket.device) {
                        inventory.tickets.push(ticket);
                    }
                }
                status::STARTED => {
                    // Keepers that say none are older than these versions.
                    speaks(version.unwrap_or(0))?;
                    (inventory.journal, inventory.keeper) = (file, head.number.get() as i32);
                    return Ok(inventory);
                }
                // An answer to a front before this one.
                _ => {}
            }
        }
    }

    /// Gives the keeper the journal.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the keeper is busy and the flags say so.
    pub(crate) fn keep_journal(&self, journal: BorrowedFd<'_>, flags: MsgFlags) -> io::Result<()> {
        let order = OrderPacket { op: op::JOURNAL.into(), ..OrderPacket::default() };
        Ok(send(self.socket.as_fd(), order.as_bytes(), &[], Some(journal), flags)?)
    }

    /// Tells the keeper how it starts the next front: program and arguments.
    ///
    /// # Errors
    ///
    /// A command that does not fit into a packet.
    pub(crate) fn succeed_with(&self, command: &Command) -> io::Result<()> {
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<u8> = words.flat_map(|word| [word.as_bytes(), &[0]].concat()).collect();
        let order = OrderPacket { op: op::SUCCESSOR.into(), ..OrderPacket::default() };
        if words.len() > PACKET - order.as_bytes().len() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the command of the front is too long"));
        }
        Ok(send(self.socket.as_fd(), order.as_bytes(), &words, None, MsgFlags::empty())?)
    }

    /// Sends an order, if the keeper can take it now: one that waits for the keeper while the
    /// keeper waits for it would wait for ever. `pidfd` is the process to trust.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the keeper is busy: try again when the socket is writable.
    pub(crate) fn order(&self, number: u64, order: &Order, pidfd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut head = OrderPacket { number: number.into(), ..OrderPacket::default() };
        let mut ids = Vec::new();
        match order {
            Order::Create { id, device, size, page, everyone } => {
                (head.op, head.id, head.size, head.device) =
                    (op::CREATE.into(), (*id).into(), (*size).into(), (*device).into());
                (head.giant, head.everyone) = ((*page == PageSize::Giant).into(), (*everyone).into());
            }
            Order::Release { ids: all } => {
                head.op = op::RELEASE.into();
                ids = all.iter().take(BATCH).flat_map(|id| id.to_le_bytes()).collect();
            }
            Order::Ping => head.op = op::PING.into(),
            Order::Memory { device } => (head.op, head.device) = (op::MEMORY.into(), (*device).into()),
            Order::Trust { process, ids: all, .. } => {
                (head.op, head.process) = (op::TRUST.into(), (*process).into());
                ids = all.iter().take(BATCH).flat_map(|id| id.to_le_bytes()).collect();
            }
        }
        Ok(send(self.socket.as_fd(), head.as_bytes(), &ids, pidfd, MsgFlags::MSG_DONTWAIT)?)
    }

    /// The next answer, if one has arrived.
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` when the keeper is gone.
    pub(crate) fn answer(&self) -> io::Result<Option<(u64, Kept)>> {
        let mut buffer = [0; 4096];
        let received = match receive(self.socket.as_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
            Err(Errno::EAGAIN) => return Ok(None),
            // It died before it read an order.
            Err(Errno::ECONNRESET) => return Err(io::ErrorKind::UnexpectedEof.into()),
            received => received?,
        };
        let Some((length, _)) = received else { return Err(io::ErrorKind::UnexpectedEof.into()) };
        let Ok((head, text)) = KeptPacket::read_from_prefix(&buffer[..length]) else { return Ok(None) };
        let text = String::from_utf8_lossy(text).into_owned();
        let kept = match head.status.get() {
            status::DONE => Kept::Done,
            status::CREATED => match Ticket::from_bytes(&head.ticket) {
                Ok(ticket) => Kept::Created { handle: head.first.get(), ticket },
                Err(error) => Kept::Refused { text: format!("the keeper's ticket is not understood: {error}") },
            },
            status::TAKEN => Kept::Taken,
            status::MEMORY => Kept::Memory { free: head.first.get(), total: head.second.get() },
            status::OUT_OF_MEMORY => {
                let known = |bytes: u64| Some(bytes).filter(|&bytes| bytes != u64::MAX);
                Kept::OutOfMemory { free: known(head.first.get()), total: known(head.second.get()), text }
            }
            _ => Kept::Refused { text },
        };
        Ok(Some((head.number.get(), kept)))
    }
}

/// Refuses a keeper whose packets mean something else.
fn speaks(version: u64) -> io::Result<()> {
    if version == u64::from(LINK) {
        return Ok(());
    }
    let problem = format!("the keeper speaks version {version} of its packets, and this front version {LINK}");
    Err(io::Error::new(io::ErrorKind::InvalidData, problem))
}

impl AsFd for KeeperLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::packet::pair;

    #[test]
    fn a_keeper_that_speaks_another_version_is_refused_with_both() {
        for (said, shown) in [(Some(LINK + 1), LINK + 1), (None, 0)] {
            let (own, theirs) = pair().unwrap();
            let version = said.map(|version| KeptPacket::new(version.into(), status::LINK));
            for packet in version.into_iter().chain([KeptPacket::new(1, status::STARTED)]) {
                send(theirs.as_fd(), packet.as_bytes(), &[], None, MsgFlags::empty()).unwrap();
            }
            let refused = KeeperLink::new(own).start().unwrap_err().to_string();
            assert!(refused.contains(&format!("speaks version {shown} of its packets, and this front")), "{refused}");
        }
    }
}
