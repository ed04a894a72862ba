//! A command of the driver: its number, its argument, and what the kernel demands before it does it.

use crate::layout::Layout;

/// Which way the kernel copies the argument. For SVM the *direction bits that the caller passes* decide it; other modules do not look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// `_IO`: the handler copies as it likes.
    None,
    /// `_IOR`: copied out.
    Read,
    /// `_IOW`: copied in.
    Write,
    /// `_IOWR`: copied in, and out on success.
    ReadWrite,
}

/// The session state that an SVM command needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// An open file that is bound to the module.
    File,
    /// ALLOC_PROC_STRUCT was done on this file.
    Process,
    /// INIT_PROCESS was done by the calling process on this file.
    Session,
}

/// What becomes of `head.devid`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceId {
    /// Not looked at, or taken as it is.
    Raw,
    /// Translated from a logical to a physical id (and written back so).
    Converted,
    /// Translated; 65, the host, is meaningful too.
    ConvertedOrHost,
}

/// How the command takes the process's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// Not at all.
    None,
    /// Shared: runs beside others.
    Shared,
    /// Exclusive: waits for all others, and they for it.
    Exclusive,
}

/// What the kernel does with the reservation that an address of the command lies in, before and after the handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reference {
    /// Nothing.
    None,
    /// The reservation is being made: its counter must be 0.
    Malloc,
    /// The reservation is being freed: its counter must be exactly 1.
    Free,
    /// Counted for the time of the call.
    During,
    /// Counted, and kept on success.
    Keep,
    /// Given back on success.
    GiveBack,
    /// Counted for the time of the call; without a device mapping at its start the counter must be exactly 1.
    Advise,
}

/// A command of one of the driver's modules.
#[derive(Debug, Clone, Copy)]
pub struct Command {
    /// Short name, as traces and errors print it.
    pub name: &'static str,
    /// Name in the driver's headers.
    pub c_name: &'static str,
    /// ioctl magic.
    pub magic: u8,
    /// ioctl number.
    pub number: u8,
    /// Direction bits.
    pub direction: Direction,
    /// Size bits. No module of the driver checks them.
    pub size: u16,
    /// The struct that the argument points to, where it is one of ours.
    pub argument: Option<&'static str>,
    /// Needed state.
    pub needs: Needs,
    /// Treatment of `head.devid`.
    pub device_id: DeviceId,
    /// Lock.
    pub lock: Lock,
    /// Treatment of addresses.
    pub reference: Reference,
    /// Whether the host driver has a handler; without one the answer is EOPNOTSUPP.
    pub handled: bool,
}

impl Command {
    /// A command of a module that has no rules in common with SVM's.
    pub(crate) const fn plain(
        name: &'static str,
        c_name: &'static str,
        magic: u8,
        number: u8,
        direction: Direction,
        size: u16,
        argument: Option<&'static str>,
    ) -> Command {
        Command {
            name,
            c_name,
            magic,
            number,
            direction,
            size,
            argument,
            needs: Needs::File,
            device_id: DeviceId::Raw,
            lock: Lock::None,
            reference: Reference::None,
            handled: true,
        }
    }

    /// The request value of ioctl(2).
    pub const fn request(&self) -> u32 {
        let direction = match self.direction {
            Direction::None => 0,
            Direction::Write => 1,
            Direction::Read => 2,
            Direction::ReadWrite => 3,
        };
        (direction << 30) | ((self.size as u32) << 16) | ((self.magic as u32) << 8) | self.number as u32
    }

    /// The layout of the argument.
    pub fn layout(&self) -> Option<&'static Layout> {
        crate::layout::layouts().find(|layout| Some(layout.name) == self.argument)
    }
}

/// The ioctl number in a request value.
pub const fn number(request: u32) -> u8 {
    request as u8
}

/// The magic in a request value.
pub const fn magic(request: u32) -> u8 {
    (request >> 8) as u8
}

/// Whether the caller says that the kernel reads the argument.
pub const fn writes(request: u32) -> bool {
    request >> 30 & 1 != 0
}

/// Whether the caller says that the kernel writes the argument.
pub const fn reads(request: u32) -> bool {
    request >> 30 & 2 != 0
}
