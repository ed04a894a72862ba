//! The vendor's two forms of an export.
//!
//! The 64-bit form is the share id with the exporting device above it. The 128-byte form ("V2",
//! "fabric") has the same facts and those that another server would need. Both are bit-compatible
//! with the vendor's, so a process with this library and one with the vendor's can share memory.

use crate::error::{Error, Invalid, Result};
use ascend_ioctl::svm::{DEVICE_IDS, HANDLE_FABRIC, HANDLE_NONE, HOST_ID, PHYSICAL_DEVICES};
use std::fmt;
use std::str::FromStr;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// An export in 64 bits: share id in bits 0 to 31, the exporter's logical device in bits 32 to 39
/// (65 for host memory).
///
/// The device number is the *exporter's*. In a container it may mean another device than yours: a
/// [`Ticket`](crate::share::Ticket) does not have that problem.
///
/// ```
/// use ascend_vmm::share::ShareableHandle;
///
/// let handle = ShareableHandle::from_u64(0x3_0000_0007).unwrap();
/// assert_eq!((handle.device(), handle.share_id()), (3, 7));
/// assert_eq!(ShareableHandle::from_u64(u64::MAX), None);
/// assert_eq!(handle.to_string().parse::<ShareableHandle>()?, handle);
/// assert!("3:7".parse::<ShareableHandle>().is_err());
/// # Ok::<(), ascend_vmm::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShareableHandle {
    device: u8,
    share: u32,
}

impl ShareableHandle {
    pub(crate) const fn new(device: u8, share: u32) -> Self {
        ShareableHandle { device, share }
    }

    /// The vendor's 64-bit value. As text it is a decimal number.
    pub const fn to_u64(self) -> u64 {
        (self.device as u64) << 32 | self.share as u64
    }

    /// Reads the vendor's 64-bit value; `None` if the unused bits are not zero, the share id is
    /// negative or the device cannot exist.
    pub const fn from_u64(value: u64) -> Option<Self> {
        let (device, share) = ((value >> 32) as u8, value as u32);
        let device_exists = (device as u32) < PHYSICAL_DEVICES || device as u32 == HOST_ID;
        if value >> 40 != 0 || share > i32::MAX as u32 || !device_exists {
            return None;
        }
        Some(ShareableHandle { device, share })
    }

    /// The exporter's logical device, 65 for host memory.
    pub const fn device(self) -> u32 {
        self.device as u32
    }

    /// The driver's share id.
    pub const fn share_id(self) -> u32 {
        self.share
    }

    /// True for host memory.
    pub const fn is_host(self) -> bool {
        self.device as u32 == HOST_ID
    }
}

impl fmt::Display for ShareableHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_u64().fmt(f)
    }
}

impl FromStr for ShareableHandle {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let handle = text.parse().ok().and_then(ShareableHandle::from_u64);
        handle.ok_or_else(|| {
            let problem = format!("{text:?} is not a handle of exported memory");
            Invalid::because("read a handle", problem, "It is a decimal number: a share id, with its device above it.")
        })
    }
}

/// The kind of a [`FabricHandle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HandleKind {
    /// For this server, as a [`ShareableHandle`] is.
    Plain,
    /// For other servers of a super-pod too. Never tried: see `docs/facts.md`.
    Fabric,
}

/// An export in 128 bytes, the vendor's "V2" or fabric form.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::share::{FabricHandle, HandleKind};
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let export = session.device(LogicalId(0))?.create(2 << 20)?.export()?;
/// let handle = export.fabric_handle(HandleKind::Plain)?;
/// assert_eq!(FabricHandle::from_bytes(&handle.to_bytes()), Some(handle));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FabricHandle {
    /// Its kind.
    pub kind: HandleKind,
    /// Super-pod id of the exporting device, of the exporter's first device for host memory;
    /// `u32::MAX` where it has none.
    pub sdid: u32,
    /// Physical id of the exporting device, 65 for host memory.
    pub physical: u32,
    /// The same export in the short form.
    pub handle: ShareableHandle,
}

#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
struct FabricBytes {
    kind: u32,
    sdid: u32,
    device: u32,
    physical: u32,
    share: u32,
    rest: [u8; 108],
}

impl FabricHandle {
    /// Bytes of the vendor's form.
    pub const LENGTH: usize = size_of::<FabricBytes>();

    /// The vendor's 128 bytes.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let wire = FabricBytes {
            kind: match self.kind {
                HandleKind::Plain => HANDLE_NONE,
                HandleKind::Fabric => HANDLE_FABRIC,
            },
            sdid: self.sdid,
            device: self.handle.device(),
            physical: self.physical,
            share: self.handle.share_id(),
            rest: [0; 108],
        };
        zerocopy::transmute!(wire)
    }

    /// Reads the vendor's 128 bytes; `None` for a kind or a device that cannot exist. The unused
    /// bytes are ignored: the vendor's library does not clear them.
    pub fn from_bytes(bytes: &[u8; Self::LENGTH]) -> Option<Self> {
        let wire = FabricBytes::read_from_bytes(bytes).ok()?;
        let kind = match wire.kind {
            HANDLE_NONE => HandleKind::Plain,
            HANDLE_FABRIC => HandleKind::Fabric,
            _ => return None,
        };
        let device = u8::try_from(wire.device).ok()?;
        let handle = ShareableHandle::from_u64(u64::from(device) << 32 | u64::from(wire.share))?;
        let physical_exists = wire.physical < DEVICE_IDS;
        physical_exists.then_some(FabricHandle { kind, sdid: wire.sdid, physical: wire.physical, handle })
    }
}

const _: () = assert!(FabricHandle::LENGTH == 128);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_form_is_the_vendors() {
        assert_eq!(ShareableHandle::new(65, 9).to_u64(), 0x41_0000_0009);
        assert_eq!(ShareableHandle::from_u64(0x41_0000_0009), Some(ShareableHandle::new(65, 9)));
        assert!(ShareableHandle::new(65, 9).is_host());
        for bad in [1 << 40, 0x8000_0000, 64 << 32, 66 << 32, u64::MAX] {
            assert_eq!(ShareableHandle::from_u64(bad), None, "{bad:#x}");
        }
    }

    #[test]
    fn the_long_form_is_the_vendors() {
        let handle = FabricHandle {
            kind: HandleKind::Fabric,
            sdid: 0x00CC_0002,
            physical: 2,
            handle: ShareableHandle::new(1, 0x0102_0304),
        };
        let bytes = handle.to_bytes();
        assert_eq!(bytes[..20], [1, 0, 0, 0, 2, 0, 0xCC, 0, 1, 0, 0, 0, 2, 0, 0, 0, 4, 3, 2, 1]);
        assert_eq!(bytes[20..], [0; 108]);
        assert_eq!(FabricHandle::from_bytes(&bytes), Some(handle));
        assert_eq!(FabricHandle::from_bytes(&[0xFF; 128]), None);
    }
}
