//! Mapped memory: copies and fills, and who else has access to it.

mod access;
mod copies;
#[path = "../support/mod.rs"]
mod support;
