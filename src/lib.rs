//! Memory of Huawei Ascend NPUs from user space.

#[allow(dead_code)] // until the session and discovery use all of it
mod davinci;
pub mod discovery;
#[allow(dead_code)]
pub mod error;

pub use error::{Error, Result};
