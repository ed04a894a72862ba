//! The kernel driver's rules, stated one by one and checked by system calls alone.
//!
//! A [`Rule`] is a sentence about the driver and a check of it that speaks only `ascend-ioctl` and system calls. The suite knows neither the
//! library nor the emulator: it runs on any driver. On a real host it is a first look at whether the driver behaves as we believe; on the
//! emulated driver it is what keeps the emulation honest.
//!
//! Each rule runs in a process of its own, touches only memory that it allocated, and survives a driver that answers differently, kills it or
//! does not answer. What is known to crash the real kernel is not in the suite.
//!
//! # Sections
//!
//! Each rule names the section of the driver's description that it comes from:
//!
//! | section | about |
//! |---|---|
//! | 1.1 | `/dev/davinci_manager`: binding, closing (`davinci_intf_init.c`) |
//! | 1.2 | bringing up a session (`svm_module_ops.c`, `svm_proc_mng.c`, `devmm_proc_info.c`) |
//! | 1.3 | fork, exec, munmap (`svm_mmu_notifier.c`, `svm_master_vma_ops.c`) |
//! | 1.4, 1.5 | closing a device; death of a process |
//! | 2 | the dispatcher and its reference step |
//! | 3.2 to 3.5 | heaps and reservations |
//! | 4.1 to 4.11 | physical memory, mapping, access, sharing (`svm_master_mem_create.c`, `svm_master_mem_map.c`, `svm_master_mem_share.c`) |
//! | 5.1 to 5.7 | copies and fills (`svm_master_memcpy.c`, `svm_master_memset.c`, `svm_master_advise.c`) |
//! | C*n* | correction number *n* that running the driver brought |
//! | N*n* | a behaviour that running the driver brought, under its number |
//! | A | answers of the running memory driver |
//! | D1.*n* | answers of the running discovery modules: 1 multiplexer, 2 uda, 6 DEVMNG, 7 URD |
//! | P*n* | the device process: 3 `/dev/hisi_hdc`, 4 identity |
//!
//! C and N were run on generation 26.1 only. See `docs/conformance.md` and `docs/facts.md` for what stands behind them.

pub mod host;
mod manager;
mod peer;
pub mod rule;
mod rules;
mod run;
pub mod session;
mod tsd;

pub use host::Host;
pub use rule::{Evidence, Rule};
pub use rules::rules;
pub use run::{Options, Outcome, Report, Summary, run};
