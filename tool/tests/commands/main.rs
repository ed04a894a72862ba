//! The commands of `ascend-vmm`, run as programs on emulated hosts.

#[path = "../support/mod.rs"]
mod support;

mod complaints;
mod demo;
mod deployment;
mod emulate;
mod help;
#[cfg(feature = "installation")]
mod installation;
mod probe;
mod replay;
mod seeds;
mod selftest;
#[cfg(feature = "service")]
mod service;
mod trace;
mod trace_page;
