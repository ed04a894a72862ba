//! Memory of Huawei Ascend NPUs from user space.

#[allow(dead_code)] // until the session and discovery use all of it
mod davinci;
#[allow(dead_code)] // until the session uses it
mod devmng;
#[allow(dead_code)] // until the session uses it
pub mod discovery;
#[allow(dead_code)]
pub mod error;
#[allow(dead_code)] // until the session uses it
pub mod process;

pub use error::{Error, Result};
