//! The keeper: the process that owns the memory.
//!
//! The driver lets only the process that exported memory extend its trust list, and memory that
//! nobody maps lives as long as that process. So the keeper must not die. It talks to its sibling,
//! the front, alone, over a socket pair with packets of a fixed format; it parses nothing that a
//! client sends, maps nothing and copies nothing. The front may be killed or replaced at any time:
//! the keeper holds the front's journal, a memory file that it never looks into, and hands it to
//! the next front.

use crate::books::{Kept, Npu, Order};
use crate::layout::PageSize;
use ascend_vmm::share::{BareTgid, Export, Ticket};
use ascend_vmm::{Device, Kind, LogicalId, MemoryKind, Page, Session, discovery};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, socketpair,
};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use zerocopy::little_endian::{I32, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most memories that one packet names.
pub(crate) const BATCH: usize = 4096;
/// Most bytes of a packet.
const PACKET: usize = 64 << 10;
/// Most bytes of a sentence in a packet.
const TEXT: usize = 1024;

/// What a packet asks for.
mod op {
    pub(super) const CREATE: u32 = 1;
    pub(super) const RELEASE: u32 = 2;
    pub(super) const TRUST: u32 = 3;
    pub(super) const MEMORY: u32 = 4;
    /// The journal, as a descriptor. It is not answered.
    pub(super) const JOURNAL: u32 = 5;
    /// From a front that has just started. Answered by a packet for each NPU and each memory, and
    /// one with the journal at the end.
    pub(super) const START: u32 = 6;
}

/// What a packet answers.
mod status {
    pub(super) const DONE: u32 = 0;
    pub(super) const CREATED: u32 = 1;
    pub(super) const MEMORY: u32 = 2;
    pub(super) const OUT_OF_MEMORY: u32 = 3;
    pub(super) const REFUSED: u32 = 4;
    pub(super) const NPU: u32 = 5;
    pub(super) const HELD: u32 = 6;
    pub(super) const STARTED: u32 = 7;
}

/// From the front. Up to [`BATCH`] numbers of memories follow.
#[repr(C)]
#[derive(Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
struct OrderPacket {
    number: U64,
    op: U32,
    device: U32,
    id: U64,
    size: U64,
    giant: u8,
    everyone: u8,
    reserved: [u8; 2],
    process: I32,
}

/// To the front. A sentence may follow.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
struct KeptPacket {
    number: U64,
    status: U32,
    device: U32,
    first: U64,
    second: U64,
    ticket: [u8; Ticket::LENGTH],
}

/// A socket pair for packets.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

/// Sends a packet, with a descriptor if there is one.
fn send(
    socket: BorrowedFd<'_>,
    head: &[u8],
    tail: &[u8],
    file: Option<BorrowedFd<'_>>,
    flags: MsgFlags,
) -> nix::Result<()> {
    let parts = [IoSlice::new(head), IoSlice::new(tail)];
    let files: Vec<RawFd> = file.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&files)];
    let control = if files.is_empty() { &[][..] } else { &rights[..] };
    loop {
        match sendmsg::<()>(socket.as_raw_fd(), &parts, control, flags | MsgFlags::MSG_NOSIGNAL, None) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The next packet, and the descriptor that came with it. `None` when the other end is closed.
fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    flags: MsgFlags,
) -> nix::Result<Option<(usize, Option<OwnedFd>)>> {
    loop {
        let mut room = cmsg_space!([RawFd; 1]);
        let mut parts = [IoSliceMut::new(buffer)];
        let received =
            recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut room), flags | MsgFlags::MSG_CMSG_CLOEXEC);
        let message = match received {
            Ok(message) => message,
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error),
        };
        let mut file = None;
        for control in message.cmsgs().into_iter().flatten() {
            if let ControlMessageOwned::ScmRights(files) = control {
                // SAFETY: the kernel has just installed it in this process, for this message alone.
                file = files.first().map(|&file| unsafe { OwnedFd::from_raw_fd(file) });
            }
        }
        let length = message.bytes;
        return Ok((length > 0).then_some((length, file)));
    }
}

/// The owner of the memory.
pub(crate) struct Keeper {
    session: Session,
    devices: HashMap<u32, Device>,
    held: BTreeMap<u64, Export>,
    journal: Option<OwnedFd>,
}

impl Keeper {
    pub(crate) fn new(session: Session) -> Keeper {
        Keeper { session, devices: HashMap::new(), held: BTreeMap::new(), journal: None }
    }

    /// Serves a front until its end of the socket is closed.
    pub(crate) fn serve(&mut self, front: BorrowedFd<'_>) -> io::Result<()> {
        let mut buffer = vec![0; PACKET];
        while let Some((length, file)) = receive(front, &mut buffer, MsgFlags::empty())? {
            let Ok((order, rest)) = OrderPacket::read_from_prefix(&buffer[..length]) else { continue };
            match order.op.get() {
                op::JOURNAL => self.journal = file.or(self.journal.take()),
                op::START => self.start(front)?,
                _ => {
                    let kept = self.obey(&order, rest, file);
                    let (head, text) = packet(order.number.get(), &kept);
                    match send(front, head.as_bytes(), text.as_bytes(), None, MsgFlags::empty()) {
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
        for npu in discovery::list().unwrap_or_default().iter().filter(|npu| npu.is_usable()) {
            let head = KeptPacket {
                number: 0.into(),
                status: status::NPU.into(),
                device: npu.logical.0.into(),
                first: u64::from(npu.physical.0).into(),
                second: 0.into(),
                ticket: [0; Ticket::LENGTH],
            };
            send(front, head.as_bytes(), npu.identity.to_string().as_bytes(), None, MsgFlags::empty())?;
        }
        for (id, export) in &self.held {
            let Ok(ticket) = export.ticket() else { continue };
            let head = KeptPacket {
                number: (*id).into(),
                status: status::HELD.into(),
                device: 0.into(),
                first: export.handle().to_u64().into(),
                second: export.memory().size().into(),
                ticket: ticket.to_bytes(),
            };
            send(front, head.as_bytes(), &[], None, MsgFlags::empty())?;
        }
        let head = KeptPacket {
            number: u64::from(std::process::id()).into(),
            status: status::STARTED.into(),
            device: 0.into(),
            first: 0.into(),
            second: 0.into(),
            ticket: [0; Ticket::LENGTH],
        };
        send(front, head.as_bytes(), &[], self.journal.as_ref().map(AsFd::as_fd), MsgFlags::empty())?;
        Ok(())
    }

    fn obey(&mut self, order: &OrderPacket, rest: &[u8], file: Option<OwnedFd>) -> Kept {
        match order.op.get() {
            op::CREATE => self.create(order),
            op::RELEASE => match self.held.remove(&order.id.get()) {
                // Dropping an export drops this process's last reference to the memory.
                Some(_) => Kept::Done,
                None => Kept::Refused { text: format!("there is no memory {}", order.id) },
            },
            op::TRUST => self.trust(order, rest, file),
            op::MEMORY => match self.device(order.device.get()).and_then(|it| it.memory_info(MemoryKind::Hbm)) {
                Ok(info) => Kept::Memory { free: info.huge_free, total: info.huge_total },
                Err(error) => Kept::Refused { text: error.to_string() },
            },
            unknown => Kept::Refused { text: format!("order {unknown} is not known") },
        }
    }

    fn device(&mut self, logical: u32) -> ascend_vmm::Result<&Device> {
        if !self.devices.contains_key(&logical) {
            self.devices.insert(logical, self.session.device(LogicalId(logical))?);
        }
        Ok(&self.devices[&logical])
    }

    fn create(&mut self, order: &OrderPacket) -> Kept {
        let page = if order.giant == 0 { Page::Huge } else { Page::Giant };
        let created = self.device(order.device.get()).and_then(|device| {
            let memory = device.create_with(order.size.get(), Kind { page, ..Kind::default() })?;
            let export = memory.export()?;
            if order.everyone != 0 {
                export.trust_anyone()?;
            }
            Ok((export.ticket()?, export))
        });
        match created {
            Ok((ticket, export)) => {
                let handle = export.handle().to_u64();
                self.held.insert(order.id.get(), export);
                Kept::Created { handle, ticket: ticket.to_bytes().to_vec() }
            }
            Err(error) if error.is_out_of_memory() => {
                let info = self.device(order.device.get()).and_then(|it| it.memory_info(MemoryKind::Hbm)).ok();
                Kept::OutOfMemory { free: info.map(|info| info.huge_free), text: error.to_string() }
            }
            Err(error) => Kept::Refused { text: error.to_string() },
        }
    }

    /// Lets a process import. The list holds numbers: the number is the process's if that lives
    /// after it was listed.
    fn trust(&mut self, order: &OrderPacket, ids: &[u8], pidfd: Option<OwnedFd>) -> Kept {
        let process = order.process.get();
        let gone = || Kept::Refused { text: format!("process {process} has ended") };
        let Some(pidfd) = pidfd else {
            return Kept::Refused { text: format!("process {process} is not known by a descriptor") };
        };
        let tgid = match BareTgid::from_raw(process) {
            Ok(tgid) => tgid,
            Err(error) => return Kept::Refused { text: error.to_string() },
        };
        if !lives(&pidfd) {
            return gone();
        }
        for id in ids.chunks_exact(8).filter_map(|id| U64::read_from_bytes(id).ok()) {
            let Some(export) = self.held.get(&id.get()) else {
                return Kept::Refused { text: format!("there is no memory {id}") };
            };
            if let Err(error) = export.trust(&[tgid]) {
                return Kept::Refused { text: error.to_string() };
            }
        }
        if lives(&pidfd) { Kept::Done } else { gone() }
    }
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

fn packet(number: u64, kept: &Kept) -> (KeptPacket, String) {
    let mut head = KeptPacket {
        number: number.into(),
        status: status::DONE.into(),
        device: 0.into(),
        first: 0.into(),
        second: 0.into(),
        ticket: [0; Ticket::LENGTH],
    };
    let mut text = String::new();
    match kept {
        Kept::Done => {}
        Kept::Created { handle, ticket } => {
            (head.status, head.first) = (status::CREATED.into(), (*handle).into());
            if let Ok(ticket) = ticket.as_slice().try_into() {
                head.ticket = ticket;
            }
        }
        Kept::Memory { free, total } => {
            (head.status, head.first, head.second) = (status::MEMORY.into(), (*free).into(), (*total).into());
        }
        Kept::OutOfMemory { free, text: reason } => {
            (head.status, head.first) = (status::OUT_OF_MEMORY.into(), free.unwrap_or(u64::MAX).into());
            text.clone_from(reason);
        }
        Kept::Refused { text: reason } => {
            head.status = status::REFUSED.into();
            text.clone_from(reason);
        }
    }
    let end = (0..=TEXT.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.truncate(end);
    (head, text)
}

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
    pub(crate) journal: Option<OwnedFd>,
    /// The keeper's process.
    pub(crate) keeper: i32,
}

/// A memory of the keeper's.
#[derive(Debug, Clone)]
pub(crate) struct HeldMemory {
    pub(crate) id: u64,
    pub(crate) handle: u64,
    pub(crate) size: u64,
    pub(crate) ticket: Vec<u8>,
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
        let mut buffer = vec![0; PACKET];
        loop {
            let received = receive(self.socket.as_fd(), &mut buffer, MsgFlags::empty())?;
            let Some((length, file)) = received else { return Err(io::ErrorKind::UnexpectedEof.into()) };
            let Ok((head, text)) = KeptPacket::read_from_prefix(&buffer[..length]) else { continue };
            match head.status.get() {
                status::NPU => inventory.npus.push(Npu {
                    logical: head.device.get(),
                    physical: head.first.get() as u32,
                    identity: String::from_utf8_lossy(text).into_owned(),
                }),
                status::HELD => inventory.held.push(HeldMemory {
                    id: head.number.get(),
                    handle: head.first.get(),
                    size: head.second.get(),
                    ticket: head.ticket.to_vec(),
                }),
                status::STARTED => {
                    (inventory.journal, inventory.keeper) = (file, head.number.get() as i32);
                    return Ok(inventory);
                }
                // An answer to a front before this one.
                _ => {}
            }
        }
    }

    /// Gives the keeper the journal, if it can take it now.
    ///
    /// # Errors
    ///
    /// `WouldBlock` if the keeper is busy.
    pub(crate) fn keep_journal(&self, journal: BorrowedFd<'_>) -> io::Result<()> {
        let order = OrderPacket { op: op::JOURNAL.into(), ..OrderPacket::default() };
        Ok(send(self.socket.as_fd(), order.as_bytes(), &[], Some(journal), MsgFlags::MSG_DONTWAIT)?)
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
            Order::Release { id } => (head.op, head.id) = (op::RELEASE.into(), (*id).into()),
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
            received => received?,
        };
        let Some((length, _)) = received else { return Err(io::ErrorKind::UnexpectedEof.into()) };
        let Ok((head, text)) = KeptPacket::read_from_prefix(&buffer[..length]) else { return Ok(None) };
        let text = String::from_utf8_lossy(text).into_owned();
        let kept = match head.status.get() {
            status::DONE => Kept::Done,
            status::CREATED => Kept::Created { handle: head.first.get(), ticket: head.ticket.to_vec() },
            status::MEMORY => Kept::Memory { free: head.first.get(), total: head.second.get() },
            status::OUT_OF_MEMORY => {
                Kept::OutOfMemory { free: Some(head.first.get()).filter(|&free| free != u64::MAX), text }
            }
            _ => Kept::Refused { text },
        };
        Ok(Some((head.number.get(), kept)))
    }
}

impl AsFd for KeeperLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
