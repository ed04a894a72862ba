//! Structs, ioctl numbers and constants of the Huawei Ascend NPU kernel driver, for every known
//! generation of the driver.
//!
//! `no_std`, no system calls: only the bytes that cross the system-call boundary.
//! One module per device or driver module:
//!
//! | module | device | module name |
//! |---|---|---|
//! | [`davinci`] | `/dev/davinci_manager` | (the multiplexer itself) |
//! | [`uda`] | " | `uda`: which devices, under which numbers |
//! | [`urd`] | " | `URD`: feature queries |
//! | [`devmng`] | " | `DEVMNG`: identity of devices and processes |
//! | [`svm`] | " | `SVM`: memory |
//! | [`hdc`] | `/dev/hisi_hdc` | packets to daemons on the device |
//! | [`klog`] | - | the page that the kernel writes error messages to |
//!
//! All structs are `#[repr(C)]` with explicit padding and derive zerocopy's traits, so that a
//! buffer is never partly uninitialised.
//!
//! ```
//! use ascend_ioctl::{Generation, svm::{self, Op}};
//!
//! // A command has a number in each generation that knows it.
//! let alloc = Generation::V8_5_0.svm(Op::AllocProcStruct).unwrap();
//! assert_eq!(alloc.command.request(), 0x4158_4D43);
//! assert_eq!(Generation::V26_1.svm(Op::AllocProcStruct).unwrap().command.number, 101);
//! assert!(Generation::V9_0_0.svm(Op::MemHandleSetAttr).is_none());
//!
//! // The argument of every command is 344 bytes.
//! let (size, side, page) = (2 << 20, svm::SIDE_DEVICE, svm::PAGE_HUGE);
//! let arg = svm::Arg::new(0, &svm::MemCreate { size, side, page, ..Default::default() });
//! assert_eq!(size_of_val(&arg), 344);
//! assert_eq!(arg.para::<svm::MemCreate>().size, 2 << 20);
//! ```
//!
//! This crate is not affiliated with Huawei; "Ascend" is used to say which hardware it is for.

#![no_std]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]
#![deny(clippy::missing_errors_doc)]

pub mod command;
pub mod davinci;
pub mod devmng;
pub mod esched;
mod generation;
pub mod hdc;
pub mod klog;
pub mod layout;
pub mod svm;
pub mod tsdrv;
pub mod uda;
pub mod urd;

pub use command::{Command, Typed};
pub use generation::{Delta, Generation, UnknownGeneration};

/// The program of the README is run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
