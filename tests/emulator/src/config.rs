//! What the emulated host is made of.

use ascend_ioctl::Generation;

/// How the devices hang on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Attachment {
    /// PCI Express: the host-pin segment is at 7 TiB, devices cannot reach host memory by address.
    #[default]
    Pcie,
    /// HCCS: the host-pin segment is at 8 TiB, devices can be granted access to host memory.
    Hccs,
}

/// Whether SETUP_DEVICE needs a device process that was started through `/dev/hisi_hdc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceProcess {
    /// SETUP_DEVICE answers EFAULT until the TSD dialogue started one.
    #[default]
    Required,
    /// SETUP_DEVICE starts one by itself.
    Automatic,
}

/// The emulated host.
#[derive(Debug, Clone)]
pub struct Config {
    /// Driver generation.
    pub generation: Generation,
    /// Number of NPUs.
    pub devices: u32,
    /// Bytes of HBM of each.
    pub hbm: u64,
    /// How they are attached.
    pub attachment: Attachment,
    /// Whether the device process must be started by the client.
    pub device_process: DeviceProcess,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            generation: Generation::NEWEST,
            devices: 2,
            hbm: 64 << 30,
            attachment: Attachment::default(),
            device_process: DeviceProcess::default(),
        }
    }
}
