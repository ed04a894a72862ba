//! Where a device is, and a name for it that is the same everywhere.
//!
//! The driver gives no UUID. What is the same for every process on the host, in whatever container,
//! is the device's PCI address (without its domain, which the driver does not report), its physical
//! id, and in a super pod its SDID. An [`Identity`] is made of these.

use std::fmt;
use std::str::FromStr;

/// A PCI address. The driver reports bus, device and function; the domain comes from sysfs, where
/// that is unambiguous.
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

/// A text that is no PCI address.
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
/// As text: `c1:00.0/0` is physical id 0 at PCI address c1:00.0; `c1:00.0/0@00cc0000` has the SDID
/// 0xcc0000 besides. The physical id is there because two devices can share one PCI function, and
/// virtual instances share their card's. The PCI domain is left out: the driver does not report it,
/// and a container may not see sysfs.
///
/// It names a device *of one host*, for as long as the host is not rebuilt: after a reboot the same
/// card has the same PCI address, and the same physical id if the cards were found in the same
/// order. Across hosts only the SDID part tells devices apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Bus, device and function; `None` where the device is not on PCI or was taken away.
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

/// A text that is no identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a device identity: expected something like `c1:00.0/0` or `c1:00.0/0@00cc0000`")]
pub struct NotAnIdentity;

impl FromStr for Identity {
    type Err = NotAnIdentity;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (pci, rest) = text.split_once('/').ok_or(NotAnIdentity)?;
        let pci = match pci {
            "-" => None,
            pci => match pci.parse().map_err(|_| NotAnIdentity)? {
                PciAddress { domain: None, bus, device, function } => Some((bus, device, function)),
                PciAddress { domain: Some(_), .. } => return Err(NotAnIdentity),
            },
        };
        let (physical, sdid) = match rest.split_once('@') {
            Some((physical, sdid)) => (physical, Some(u32::from_str_radix(sdid, 16).map_err(|_| NotAnIdentity)?)),
            None => (rest, None),
        };
        Ok(Identity { pci, physical: physical.parse().map_err(|_| NotAnIdentity)?, sdid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_identities_read_back_as_they_were_written() {
        for text in ["c1:00.0", "0000:c1:00.0", "0001:01:1f.7"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        for text in ["c1:00.0/0", "c1:00.0/103@00cc0000", "-/7", "-/7@ffffffff"] {
            assert_eq!(text.parse::<Identity>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn texts_that_are_neither_are_refused() {
        for text in
            ["", "/", "c1:00.0", "c1:00.0/", "c1:00.0/x", "0000:c1:00.0/0", "c1:00.0/0@", "c1:00.0/0@xyz", "c1/0"]
        {
            assert!(text.parse::<Identity>().is_err(), "{text}");
        }
        for text in ["", "c1", "c1:00", "100:00.0", "c1:00.0.0", "z1:00.0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }
}
