//! Memory of Huawei Ascend NPUs from user space.

pub mod copy;
mod davinci;
mod device;
mod devmng;
pub mod discovery;
pub mod error;
mod mapping;
mod physical;
pub mod process;
mod reserve;
mod session;
pub mod share;

pub use ascend_ioctl::Generation;
pub use device::{Capabilities, Device, Host, MemoryInfo};
pub use error::{Error, Failed, Result};
pub use mapping::{HostView, Mapping};
pub use physical::{Granularity, Kind, Location, MemoryKind, Page, PhysicalMemory};
pub use reserve::{Reservation, ReserveOptions};
pub use session::{Session, SessionBuilder};
