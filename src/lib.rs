//! Memory of Huawei Ascend NPUs from user space: no CANN, no C library, only the kernel driver's
//! own ioctls.
//!
//! # The objects
//!
//! ```text
//!                     Session                 one per process: its connection to the driver
//!                        |
//!          +-------------+-------------+
//!          |                           |
//!    Device, Host                 Reservation     addresses, without memory
//!          |                           |
//!    PhysicalMemory                    |          memory, without an address
//!          |                           |
//!          +-------------+-------------+
//!                        |
//!                     Mapping                     memory at an address: read, write, fill, grant
//!                        |
//!          +-------------+-------------+
//!          |                           |
//!     copy::Slice                  HostView       a part of it for copies; the CPU's view of it
//! ```
//!
//! Each object keeps alive what is above it in the picture. Drop them in any order: the last user
//! undoes each one in the order that the driver requires. Explicit calls (`unmap`, `free`, `close`)
//! return errors, which a drop can only log.
//!
//! ```
//! # // On a machine without NPUs: an emulated driver that answers this process's system calls.
//! # let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! # emulator.attach()?;
//! use ascend_vmm::{LogicalId, Session};
//!
//! let session = Session::open()?;
//! let device = session.device(LogicalId(0))?;
//!
//! let memory = device.create(64 << 20)?; // 64 MiB of HBM
//! let reservation = session.reserve(1 << 30)?; // 1 GiB of addresses
//! let mapping = reservation.map(0, &memory)?;
//!
//! mapping.write(0, b"hello, NPU")?;
//! let mut back = [0; 10];
//! mapping.read(0, &mut back)?;
//! assert_eq!(&back, b"hello, NPU");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Blocks of any size: `pool`
//!
//! Most programs do not want to handle 2 MiB pages. A [`pool::Pool`] hands out blocks from a few
//! bytes to many GiB, grows and shrinks, and can put all blocks of a tag to sleep: the device gets
//! its memory back, and the addresses stay.
//!
//! ```
//! # let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! # emulator.attach()?;
//! use ascend_vmm::pool::{Keep, PageCache, Pool, Tag};
//! use ascend_vmm::{LogicalId, Session};
//!
//! const WEIGHTS: Tag = Tag(1);
//!
//! let device = Session::open()?.device(LogicalId(0))?;
//! let pool = Pool::new(&PageCache::new(&device));
//! let block = pool.allocate(100_000, 512, WEIGHTS)?;
//! block.write(0, b"weights")?;
//!
//! pool.sleep(WEIGHTS, Keep::Host, |_| ())?;
//! pool.wake(&[WEIGHTS], |_| ())?; // the same address, the same contents
//! let mut back = [0; 7];
//! block.read(0, &mut back)?;
//! assert_eq!(&back, b"weights");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Sharing with other processes: `share`
//!
//! The importer gets the same physical memory, without a copy. The memory lives until the last
//! process that holds it releases it or ends. Every importer can write it: this driver has no
//! read-only share.
//!
//! | the processes have | use |
//! |---|---|
//! | a Unix socket between them | [`share::send`] and [`share::receive`] |
//! | one server and many clients | [`share::Broker`] and [`share::request`] |
//! | any other channel | a [`share::Ticket`]: [`PhysicalMemory::export`], [`share::import`] |
//! | the vendor's library in one of them | a [`share::ShareableHandle`], or [`Mapping::publish`] |
//!
//! Only processes on the export's trust list can import it, unless
//! [`trust_anyone`](share::Export::trust_anyone) says otherwise.
//!
//! # Errors
//!
//! An [`Error`] says what was tried, on which object, what the kernel answered in its own words,
//! what that most likely means and what to do. Programs match on its variants and on
//! [`Error::is_out_of_memory`] and its siblings. A consuming call that fails returns [`Failed`]
//! with the object in it, so nothing is lost. What is wrong with a host without usable NPUs is
//! found without a session: [`discovery::survey`].
//!
//! # Testing without an NPU
//!
//! The crate `ascend-emulator` answers the system calls of a process like the real driver does, for
//! each generation, and can refuse any call. The examples on these pages run on it: they start with
//!
//! ```
//! let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! emulator.attach()?;
//! # drop(ascend_vmm::Session::open()?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `ascend-vmm emulate -- PROGRAM` runs any program on it, in any language. To see what a program
//! does, use `ascend-vmm trace -- PROGRAM`, or subscribe to this library's `tracing` events: every
//! system call is one, with its name, duration and answer.
//!
//! # Status
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
