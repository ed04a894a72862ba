//! The kernel driver of Huawei Ascend NPUs, emulated for tests.
//!
//! Two independent halves:
//!
//! * the **model** ([`driver`], [`machine`], [`davinci`], `uda`, `urd`, `devmng`, [`svm`], `hdc`,
//!   `tsd`): a state machine that answers open, ioctl, mmap and close as the kernel driver does,
//!   given a [`caller::Caller`] and its memory. It makes no system calls for the caller;
//! * the **front** ([`front`]): seccomp user notification, which passes the real system calls of
//!   real processes to the model.
//!
//! A test that uses the driver through descriptors and mappings runs in a process of its own and
//! must leave nothing behind ([`isolated()`]). Other tests attach a thread:
//!
//! ```
//! use ascend_emulator::{Config, Emulator};
//!
//! let emulator = Emulator::start(Config::default())?;
//! emulator.attach()?;
//! // From here on this thread, and what it starts, is on a host with two NPUs.
//! let file = std::fs::File::open("/dev/davinci1")?;
//! assert_eq!(emulator.state().files[0].path, "/dev/davinci1");
//! drop(file);
//! assert!(emulator.state().is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod caller;
pub mod child;
mod chip;
pub mod config;
pub mod davinci;
mod devmng;
mod dp_proc_mng;
pub mod driver;
mod esched;
pub mod fault;
pub mod front;
mod hdc;
pub mod hold;
pub mod isolated;
pub mod latency;
pub mod machine;
pub mod oracle;
pub mod pod;
pub mod record;
#[cfg(test)]
mod rig;
pub mod schedule;
#[doc(hidden)]
pub mod seccomp;
pub mod state;
pub mod svm;
pub mod trap;
mod tsd;
mod tsdrv;
mod uda;
mod urd;

pub use ascend_emulator_macros::test;
pub use child::{Client, Line, fork};
pub use config::Config;
pub use front::{Emulator, Unavailable};
pub use hold::Hold;
pub use isolated::{isolated, isolated_leaky, on_each_generation};
