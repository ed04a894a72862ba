//! The memory service for processes that run the vendor's stack.
//!
//! Such a process has the driver open by the vendor's `libascendcl.so`, and the driver gives a
//! process one memory session. So nothing here opens the driver: memory is imported and mapped by
//! the vendor's own functions, which are looked up in the library that the process has loaded.
//!
//! [`Client::open`] gives a [`Domain`]. A writer asks for memory by [`Domain::put`] or
//! [`Domain::allocate`], fills it, and [`Domain::commit`]s; from then on it reads. A reader finds
//! its bytes by key, sleeps and wakes at the same addresses.
//!
//! **Fail-stop.** A mapping call that fails while a reader wakes leaves nothing mapped, and the
//! reader asleep. Addresses without memory end a kernel that uses them; they never give it wrong
//! bytes.
//!
//! `include/ascend_vmm_service.h` is the same for C, and `ascend_vmm.service` for Python.

#![deny(clippy::missing_errors_doc)]

mod acl;
mod border;
mod domain;
mod error;
mod imports;
mod pool;
mod space;

pub use ascend_vmm_service::{DomainName, Entry, Mode, OpenOptions, Role};
pub use border::{ascend_vmm_pool_free, ascend_vmm_pool_malloc};
pub use domain::{Client, Domain, Opening};
pub use error::{Error, Kind, Result};
pub use pool::{Pool, PoolUse};
