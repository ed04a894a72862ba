//! The kernel driver of Huawei Ascend NPUs, emulated for tests.
//!
//! Two halves that know nothing of each other's job:
//!
//! * the **model** ([`driver`], [`machine`], [`davinci`], `uda`, `urd`, `devmng`, [`svm`], `hdc`, `tsd`): a state machine that answers open, ioctl, mmap and
//!   close the way the kernel driver does, given a [`caller::Caller`] and its memory. It makes no system calls on the caller's behalf;
//! * the **front** ([`front`]): seccomp user notification, which brings the real system calls of real processes to the model.

pub mod caller;
pub mod child;
pub mod config;
pub mod davinci;
pub mod driver;
pub mod fault;
pub mod front;
pub mod isolated;
pub mod latency;
pub mod machine;
pub mod record;
#[cfg(test)]
mod rig;
pub mod state;
pub mod svm;
pub mod trap;
mod uda;
mod urd;

pub use child::{Client, Line, fork};
pub use config::Config;
pub use front::{Emulator, Unavailable};
pub use isolated::{isolated, isolated_leaky, on_each_generation};
