//! Memory of Huawei Ascend NPUs from user space: no CANN, no C library, only the kernel driver's
//! own ioctls.
//!
//! A [`Session`] is this process's one connection to the memory driver. Through it a [`Device`] is
//! set up, [`PhysicalMemory`] is created on it, addresses are reserved as a [`Reservation`], and a
//! [`Mapping`] puts the memory there; then it can be copied to and from ([`copy`]), seen by the CPU
//! ([`HostView`]), granted to other devices, and shared with other processes ([`share`]). Which
//! devices there are, and what is wrong when there are none, is found out without a session
//! ([`discovery`]). Everything is counted: drop things in any order, and the last user undoes them
//! in the order that the driver wants.
//!
//! ```standalone_crate
//! # // On a machine without NPUs: an emulated driver that answers this process's system calls.
//! # let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! # emulator.attach()?;
//! use ascend_vmm::{LogicalId, Session};
//!
//! let session = Session::open()?;
//! let device = session.device(LogicalId(0))?;
//!
//! let memory = device.create(64 << 20)?; // 64 MiB of HBM, without an address
//! let reservation = session.reserve(1 << 30)?; // 1 GiB of addresses, without memory
//! let mapping = reservation.map(0, &memory)?;
//!
//! mapping.write(0, b"hello, NPU")?;
//! let mut back = [0; 10];
//! mapping.read(0, &mut back)?;
//! assert_eq!(&back, b"hello, NPU");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Errors say what was tried, what the kernel answered in its own words, what that means and what
//! to do: [`Error`]. Every system call is a `tracing` event with its name, time and answer.
//!
//! Nothing here has run on hardware yet: docs/facts.md says what stands behind each claim. "Ascend"
//! is a mark of Huawei, used to say which hardware this is for; the project is not affiliated with
//! Huawei.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]
#![deny(clippy::missing_errors_doc)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("the Ascend driver exists for 64-bit Linux only");

// The modules stand on floors: one names only those below its own, except that the nouns own each
// other. docs/library.md draws it, tests/house/floors.rs checks it.
mod bytes;
pub mod copy;
mod deadline;
mod device;
pub mod device_process;
pub mod discovery;
mod driver;
pub mod error;
mod fork;
mod id;
mod kind;
mod mapping;
mod physical;
pub mod pool;
mod range_map;
mod reserve;
mod segregated_fit;
mod session;
pub mod share;
mod signals;
mod slots;
mod trace;

pub use ascend_ioctl::Generation;
pub use bytes::{Bytes, NotBytes};
pub use device::{Capabilities, Device, Host, MemoryInfo};
pub use error::{Error, Failed, Result};
pub use id::{LogicalId, PhysicalId, UserId};
pub use kind::{Kind, MemoryKind, Page, UnknownMemoryKind};
pub use mapping::{HostView, Mapping};
pub use physical::{Location, PhysicalMemory};
pub use reserve::{Reservation, ReserveOptions};
pub use session::{Session, SessionBuilder, SessionStatistics};

/// The programs of the README are compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
