//! Structs, numbers and constants of the driver.
#![no_std]
mod generation;
pub use generation::Generation;
