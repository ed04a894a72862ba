//! The chores of `cargo xtask`, and what is published.

#[path = "../../../tool/tests/support/mod.rs"]
mod support;

mod abi;
mod help;
mod packages;
mod toolkit;
