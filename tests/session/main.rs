//! The session: opening and closing it, forks, other libraries and subscribers in the process, and
//! the calls that reach the driver.

mod beside_another_library;
mod call_sequences;
mod fork;
mod kernel_hazards;
mod opening;
#[path = "../support/mod.rs"]
mod support;
mod unwinding;
