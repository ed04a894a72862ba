//! Finding devices, and starting the process on a device.

#[path = "../support/mod.rs"]
mod support;

mod device_process;
mod device_process_policy;
mod devices;
