//! Physical memory, reservations and mappings: what they can do, how long they live, and what
//! happens when the kernel refuses a command.

mod addresses;
mod faults;
mod lifetimes;
mod objects;
mod refused_close;
mod safeguards;
#[path = "../support/mod.rs"]
mod support;
