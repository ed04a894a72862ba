//! Where a device is, and a name for it that is the same everywhere.
//!
//! The driver gives no UUID. Every process on the host, in any container, sees the same PCI address
//! (without its domain, which the driver does not report), the same physical id, and in a super pod
//! the same SDID. An [`Identity`] is made of these.

use std::fmt;
use std::str::FromStr;

/// A PCI address. The driver reports bus, device and function. The domain comes from sysfs if that
/// is unambiguous.
///
/// ```
/// use ascend_vmm::discovery::PciAddress;
///
/// let address: PciAddress = "0000:c1:00.0".parse()?;
/// assert_eq!((address.domain, address.bus), (Some(0), 0xc1));
/// # Ok::<(), ascend_vmm::discovery::NotAnAddress>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// `None` if sysfs shows no NPU at this address, or several in different domains.
    pub domain: Option<u32>,
    /// Bus.
    pub bus: u8,
    /// Device on the bus.
    pub device: u8,
    /// Function of the device.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(domain) = self.domain {
            write!(f, "{domain:04x}:")?;
        }
        write!(f, "{:02x}:{:02x}.{:x}", self.bus, self.device, self.function)
    }
}

/// The error for a text that is not a PCI address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a PCI address: expected `bb:dd.f` or `dddd:bb:dd.f`, hexadecimal")]
pub struct NotAnAddress;

impl FromStr for PciAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| u32::from_str_radix(text, 16).map_err(|_| NotAnAddress);
        let byte = |text: &str| number(text)?.try_into().map_err(|_| NotAnAddress);
        let (place, function) = text.rsplit_once('.').ok_or(NotAnAddress)?;
        let (bus, device) = place.rsplit_once(':').ok_or(NotAnAddress)?;
        let (domain, bus) = match bus.split_once(':') {
            Some((domain, bus)) => (Some(number(domain)?), bus),
            None => (None, bus),
        };
        Ok(PciAddress { domain, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

/// The name of a device that is the same inside and outside a container.
///
/// As text, `c1:00.0/0` is physical id 0 at PCI address c1:00.0, and `c1:00.0/0@00cc0000` has the
/// SDID 0xcc0000 as well. The physical id is needed because two devices can share one PCI function,
/// and virtual instances share that of their card. The PCI domain is left out: the driver does not
/// report it, and a container may not see sysfs.
///
/// It names a device *of one host*, as long as the host is not rebuilt: after a reboot the same
/// card has the same PCI address, and the same physical id if the cards were found in the same
/// order. Across hosts only the SDID is unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Bus, device and function; `None` if the device is not on PCI or was removed.
    pub pci: Option<(u8, u8, u8)>,
    /// Physical id.
    pub physical: u32,
    /// SDID, in a super pod.
    pub sdid: Option<u32>,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pci {
            Some((bus, device, function)) => write!(f, "{bus:02x}:{device:02x}.{function:x}")?,
            None => f.write_str("-")?,
        }
        write!(f, "/{}", self.physical)?;
        match self.sdid {
            Some(sdid) => write!(f, "@{sdid:08x}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back_as_they_were_written() {
        for text in ["c1:00.0", "0000:c1:00.0", "0001:01:1f.7"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        for text in ["", "c1", "c1:00", "100:00.0", "c1:00.0.0", "z1:00.0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_identity_has_the_parts_that_are_known() {
        let identity = Identity { pci: Some((0xc1, 0, 0)), physical: 103, sdid: Some(0xcc_0000) };
        assert_eq!(identity.to_string(), "c1:00.0/103@00cc0000");
        assert_eq!(Identity { pci: None, physical: 7, sdid: None }.to_string(), "-/7");
    }
}
