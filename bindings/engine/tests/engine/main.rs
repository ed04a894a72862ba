//! Engines with the vendor's stack and a service, as real processes on the emulated driver.

#[path = "../../../../service/tests/support/mod.rs"]
mod support;

mod c_programs;
mod faults;
mod stack;
mod story;
