//! The vendor's C interface for the memory of Ascend NPUs, on [`ascend_vmm`]: a `libascendcl.so`
//! with which programs that were written for CANN allocate, map, copy and share memory without it.
//!
//! There is no computing here: functions that would need kernels exist and answer that they are
//! not supported. docs/cann.md has the differences to the vendor's. `facts/acl-abi.json` lists
//! all functions with their class; the header and the functions that are not supported come from
//! it.
//!
//! Rust programs use [`ascend_vmm`] itself. Bindings for other languages can call the functions of
//! [`exports`], under their C names.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic))]
#![allow(clippy::missing_errors_doc, reason = "every function answers with the codes of `fault::code`")]

pub mod absent;
mod addresses;
pub mod border;
pub mod calls;
mod context;
mod copy;
mod devices;
mod event;
pub mod exports;
pub mod fault;
pub mod hal;
pub mod handles;
pub mod header;
mod host;
mod ipc;
mod malloc;
mod memory_pool;
mod notify;
mod physical;
mod point;
mod process;
mod report;
mod rt;
mod settings;
mod share;
mod stream;
pub mod toolkit;
