//! The kernel driver's rules, stated one by one and checked by system calls alone.
//!
//! A [`Rule`] is a sentence about the driver and a check that uses only `ascend-ioctl` and system
//! calls. The suite knows neither the library nor the emulator, so it runs on any driver. On a real
//! host it shows whether the driver behaves as we believe; on the emulated driver it shows whether
//! the emulation behaves as the real one.
//!
//! Each rule runs in a process of its own and touches only memory that it allocated. A driver that
//! answers differently, kills the process or does not answer costs one failed rule. What is known
//! to crash the real kernel is not in the suite.
//!
//! # Citations
//!
//! Each rule names the kernel function that decides the answer, and the file that defines it:
//! `devmm_ioctl_mem_map_para_check, svm_master_mem_map.c`. The names are those of the public driver
//! source of generation 26.1 (`src/sdk_driver`); the older trees have most functions under the same
//! names. Where the device decides ([`Evidence::Inferred`]), the citation is the host function that
//! sends it the message or takes its answer. A file below `linux/` is Linux's own: the driver has
//! no say in that answer.
//!
//! `docs/emulator.md` and `docs/facts.md` say what the evidence is worth.

pub mod host;
mod manager;
mod peer;
pub mod random;
pub mod rule;
mod rules;
mod run;
pub mod session;
mod tsd;

pub use host::Host;
pub use rule::{Evidence, Rule};
pub use rules::rules;
pub use run::{Options, Outcome, Report, Summary, run};
