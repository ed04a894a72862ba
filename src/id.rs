//! The numberings of devices, as types that do not mix.
//!
//! The driver numbers the devices of the caller's mount namespace from 0: the **logical** id, which
//! almost every ioctl takes. The **physical** id is the minor number of `/dev/davinciN` and the
//! same for every process of the host; peer access takes it. The **user** id counts the entries of
//! `ASCEND_RT_VISIBLE_DEVICES` and exists only in user space: it is what `aclrtSetDevice` takes.
//! In a super pod a device also has an **SDID**.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

macro_rules! ids {
    ($($(#[$meta:meta])* pub struct $name:ident;)*) => {
        $(
            $(#[$meta])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
            pub struct $name(pub u32);

            impl fmt::Display for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    self.0.fmt(f)
                }
            }

            impl FromStr for $name {
                type Err = ParseIntError;

                fn from_str(text: &str) -> Result<Self, Self::Err> {
                    text.parse().map($name)
                }
            }
        )*
    };
}

ids! {
    /// A device as the driver numbers it in the caller's namespace (container or host), from 0.
    ///
    /// ```
    /// use ascend_vmm::LogicalId;
    ///
    /// let id: LogicalId = "3".parse()?;
    /// assert_eq!((id, id.to_string().as_str()), (LogicalId(3), "3"));
    /// # Ok::<(), std::num::ParseIntError>(())
    /// ```
    pub struct LogicalId;

    /// A device as the host numbers it: the minor number of `/dev/davinciN`. Virtual instances are
    /// 100 and above.
    pub struct PhysicalId;

    /// A device as `ASCEND_RT_VISIBLE_DEVICES` numbers it: the position in that list.
    pub struct UserId;
}

/// A device's place in a super pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuperPod {
    /// Super-pod device id: unique in the super pod. From the low bits: physical id 16, die 2,
    /// chip 4, server 10.
    pub sdid: u32,
    /// Number of the server in the super pod.
    pub server: u32,
    /// Number of the super pod.
    pub super_pod: u32,
    /// Number of the chassis; `u32::MAX` if the hardware has none.
    pub chassis: u32,
    /// The driver's scale type.
    pub scale: u32,
}
