//! Which NPUs are there, under which numbers.

mod id;

pub use id::{LogicalId, PhysicalId, UserId, VisibleDevices};
