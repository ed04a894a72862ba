//! What the keeper and its front say to each other: packets of a fixed format.

use ascend_vmm::share::Ticket;
use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use zerocopy::little_endian::{I32, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of these packets. The keeper outlives programs: it says its version to each front,
/// and a front that speaks another one does not take over. What never changes is the first packet
/// of each, [`op::START`] and [`status::LINK`].
pub(crate) const LINK: u32 = 1;
/// Most memories that one packet names.
pub(crate) const BATCH: usize = 4096;
/// Most bytes of a packet.
pub(crate) const PACKET: usize = 64 << 10;
/// Most bytes of a sentence in a packet.
pub(crate) const TEXT: usize = 1024;

/// What a packet asks for.
pub(crate) mod op {
    pub(crate) const CREATE: u32 = 1;
    pub(crate) const RELEASE: u32 = 2;
    pub(crate) const TRUST: u32 = 3;
    pub(crate) const MEMORY: u32 = 4;
    /// The journal, as a descriptor. It is not answered.
    pub(crate) const JOURNAL: u32 = 5;
    /// From a front that has just started. Answered by the version of the packets, a packet for
    /// each NPU and each memory, and one with the journal at the end.
    pub(crate) const START: u32 = 6;
    /// Nothing but an answer.
    pub(crate) const PING: u32 = 7;
    /// The command that starts the next front: its words, each with a zero byte behind it. It is
    /// not answered.
    pub(crate) const SUCCESSOR: u32 = 8;
}

/// What a packet answers.
pub(crate) mod status {
    pub(crate) const DONE: u32 = 0;
    pub(crate) const CREATED: u32 = 1;
    pub(crate) const MEMORY: u32 = 2;
    pub(crate) const OUT_OF_MEMORY: u32 = 3;
    pub(crate) const REFUSED: u32 = 4;
    pub(crate) const NPU: u32 = 5;
    pub(crate) const HELD: u32 = 6;
    pub(crate) const STARTED: u32 = 7;
    /// The version of the keeper's packets, as its number.
    pub(crate) const LINK: u32 = 8;
    /// There is memory with this number already.
    pub(crate) const TAKEN: u32 = 9;
}

/// From the front. Up to [`BATCH`] numbers of memories follow.
#[repr(C)]
#[derive(Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
pub(crate) struct OrderPacket {
    pub(crate) number: U64,
    pub(crate) op: U32,
    pub(crate) device: U32,
    pub(crate) id: U64,
    pub(crate) size: U64,
    pub(crate) giant: u8,
    pub(crate) everyone: u8,
    pub(crate) reserved: [u8; 2],
    pub(crate) process: I32,
}

/// To the front. A sentence may follow.
#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
pub(crate) struct KeptPacket {
    pub(crate) number: U64,
    pub(crate) status: U32,
    pub(crate) device: U32,
    pub(crate) first: U64,
    pub(crate) second: U64,
    pub(crate) ticket: [u8; Ticket::LENGTH],
}

/// A socket pair for packets.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}

/// Sends a packet, with a descriptor if there is one.
pub(crate) fn send(
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
pub(crate) fn receive(
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

impl KeptPacket {
    pub(crate) fn new(number: u64, status: u32) -> KeptPacket {
        KeptPacket {
            number: number.into(),
            status: status.into(),
            device: 0.into(),
            first: 0.into(),
            second: 0.into(),
            ticket: [0; Ticket::LENGTH],
        }
    }
}
