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
#[cfg(feature = "service")]
mod service_web;
#[cfg(feature = "service")]
mod systemd;
mod trace;
mod trace_page;
