//! A command of the driver: its number and its argument.

use crate::layout::Layout;
use core::marker::PhantomData;
use core::ops::Deref;

/// Which way the kernel copies the argument. SVM obeys the *direction bits that the caller passes*;
/// the other modules ignore them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// `_IO`: each handler copies what it needs.
    None,
    /// `_IOR`: copied out.
    Read,
    /// `_IOW`: copied in.
    Write,
    /// `_IOWR`: copied in, and out on success.
    ReadWrite,
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
    /// Name of the struct that the argument points to, if this crate defines it.
    pub argument: Option<&'static str>,
}

impl Command {
    /// A command of a module.
    pub(crate) const fn new(
        name: &'static str,
        c_name: &'static str,
        magic: u8,
        number: u8,
        direction: Direction,
        size: u16,
        argument: Option<&'static str>,
    ) -> Command {
        Command { name, c_name, magic, number, direction, size, argument }
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

/// A command together with the type of its argument, which is also the type of its answer.
///
/// A caller that takes one and a `&mut A` cannot pair a command with another command's struct.
#[derive(Debug)]
pub struct Typed<A> {
    /// The command itself.
    pub command: Command,
    argument: PhantomData<fn(A) -> A>,
}

impl<A> Typed<A> {
    /// A command of a module that has no rules in common with SVM's.
    pub(crate) const fn new(
        name: &'static str,
        c_name: &'static str,
        magic: u8,
        number: u8,
        direction: Direction,
        size: u16,
        argument: Option<&'static str>,
    ) -> Typed<A> {
        let command = Command::new(name, c_name, magic, number, direction, size, argument);
        Typed { command, argument: PhantomData }
    }
}

impl<A> Deref for Typed<A> {
    type Target = Command;

    fn deref(&self) -> &Command {
        &self.command
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

/// Whether the request tells the kernel to copy the argument in.
pub const fn writes(request: u32) -> bool {
    request >> 30 & 1 != 0
}

/// Whether the request tells the kernel to copy the argument out.
pub const fn reads(request: u32) -> bool {
    request >> 30 & 2 != 0
}
