//! The ticket: one value that carries everything an importer needs to know about exported memory.
//!
//! A share id alone is a small number that means nothing on another host, after a reboot, or in a
//! container that numbers its devices differently. A ticket has the facts that tell these cases
//! apart *before* the kernel is called. It has a byte form of fixed length, and a text form for
//! environment variables and logs. Both carry a version and a checksum, and parsing trusts nothing.
//! A ticket is not a secret and grants nothing: the trust list does.

use super::ShareableHandle;
use crate::error::TicketError;
use crate::kind::{MemoryKind, Page};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::DEVICE_IDS;
use std::fmt;
use std::str::FromStr;
use zerocopy::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Everything an importer needs to know about exported memory.
///
/// ```
/// use ascend_vmm::share::Ticket;
///
/// // All input is checked.
/// assert!("avm1-00".parse::<Ticket>().is_err());
/// assert!(Ticket::from_bytes(&[0; Ticket::LENGTH]).is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Ticket {
    /// Share id and exporting device, in the exporter's numbering.
    pub handle: ShareableHandle,
    /// Bytes of memory.
    pub size: u64,
    /// Its pages.
    pub page: Page,
    /// Its kind of memory.
    pub memory: MemoryKind,
    /// The exporting device itself; `None` for host memory.
    pub device: Option<TicketDevice>,
    /// The driver generation of the exporter.
    pub generation: Generation,
    /// The exporter's process id in the initial pid namespace.
    pub exporter: i32,
    /// When the exporter started, in clock ticks since boot; 0 if it did not know.
    pub exporter_start: u64,
    /// The kernel's boot id: another one means another machine, or the same after a reboot.
    pub boot_id: [u8; 16],
}

/// The exporting device, by facts that are the same in every container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TicketDevice {
    /// Physical id.
    pub physical: u32,
    /// Super-pod device id, where the device has one.
    pub sdid: Option<u32>,
}

const PREFIX: &str = "avm1-";
const MAGIC: [u8; 4] = *b"AVMT";
const VERSION: u16 = 1;
const NO_SDID: u32 = u32::MAX;

/// The byte form.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
struct TicketBytes {
    magic: [u8; 4],
    version: U16,
    generation: u8,
    page: u8,
    memory: u8,
    host: u8,
    reserved: [u8; 2],
    handle: U64,
    size: U64,
    physical: U32,
    sdid: U32,
    exporter: I32,
    exporter_start: U64,
    boot_id: [u8; 16],
    checksum: U32,
}

impl Ticket {
    /// Bytes of the byte form.
    pub const LENGTH: usize = size_of::<TicketBytes>();

    /// The byte form.
    pub fn to_bytes(&self) -> [u8; Self::LENGTH] {
        let mut wire = TicketBytes {
            magic: MAGIC,
            version: VERSION.into(),
            generation: self.generation.delta().ticket,
            page: self.page.code() as u8,
            memory: self.memory.code() as u8,
            host: self.device.is_none().into(),
            reserved: [0; 2],
            handle: self.handle.to_u64().into(),
            size: self.size.into(),
            physical: self.device.map_or(0, |device| device.physical).into(),
            sdid: self.device.and_then(|device| device.sdid).unwrap_or(NO_SDID).into(),
            exporter: self.exporter.into(),
            exporter_start: self.exporter_start.into(),
            boot_id: self.boot_id,
            checksum: 0.into(),
        };
        wire.checksum = checksum(wire.as_bytes()).into();
        zerocopy::transmute!(wire)
    }

    /// A hash of the exporter's pid and start time, never 0: a later process with the same pid has
    /// another one.
    pub(crate) fn exporter_number(&self) -> u32 {
        // An odd factor spreads start times, which are near each other, over all bits.
        (self.exporter as u32 ^ (self.exporter_start as u32).wrapping_mul(0x9E37_79B1)).max(1)
    }

    /// Reads the byte form.
    ///
    /// # Errors
    ///
    /// [`TicketError`] says what is wrong: length, magic, version, checksum or a field.
    pub fn from_bytes(bytes: &[u8]) -> Result<Ticket, TicketError> {
        let Ok(mut wire) = TicketBytes::read_from_bytes(bytes) else {
            return Err(TicketError::Length { expected: Self::LENGTH, got: bytes.len() });
        };
        if wire.magic != MAGIC {
            return Err(TicketError::Magic);
        }
        if wire.version != VERSION {
            return Err(TicketError::Version { expected: VERSION, got: wire.version.get() });
        }
        let expected = wire.checksum;
        wire.checksum = 0.into();
        if expected != checksum(wire.as_bytes()) {
            return Err(TicketError::Checksum);
        }

        // The checksum keeps accidents out, not malice: every field is checked.
        let field = |ok: bool, name| if ok { Ok(()) } else { Err(TicketError::Field(name)) };
        let page = Page::from_code(wire.page.into()).ok_or(TicketError::Field("page kind"))?;
        let memory = MemoryKind::from_code(wire.memory.into()).ok_or(TicketError::Field("memory kind"))?;
        let mut generations = Generation::ALL.into_iter();
        let generation = generations.find(|generation| generation.delta().ticket == wire.generation);
        let generation = generation.ok_or(TicketError::Field("generation"))?;
        field(wire.host <= 1, "side")?;
        field(wire.reserved == [0; 2], "reserved space")?;
        field(wire.size != 0 && i64::try_from(wire.size.get()).is_ok(), "size")?;
        field(wire.exporter.get() > 0, "exporter")?;
        let handle = ShareableHandle::from_u64(wire.handle.get()).ok_or(TicketError::Field("handle"))?;
        field(handle.is_host() == (wire.host == 1), "side")?;
        let device = (wire.host == 0).then(|| TicketDevice {
            physical: wire.physical.get(),
            sdid: (wire.sdid != NO_SDID).then_some(wire.sdid.get()),
        });
        field(device.is_none_or(|device| device.physical < DEVICE_IDS), "physical device")?;
        // One ticket has one byte form: the host has no device numbers.
        field(device.is_some() || (wire.physical == 0 && wire.sdid == NO_SDID), "physical device")?;
        Ok(Ticket {
            handle,
            size: wire.size.get(),
            page,
            memory,
            device,
            generation,
            exporter: wire.exporter.get(),
            exporter_start: wire.exporter_start.get(),
            boot_id: wire.boot_id,
        })
    }
}

/// The text form: a word and hexadecimal digits, without spaces or anything that a shell would
/// touch.
impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        self.to_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.trim().strip_prefix(PREFIX).ok_or(TicketError::Text)?.as_bytes();
        if digits.len() != 2 * Self::LENGTH {
            return Err(TicketError::Length { expected: Self::LENGTH, got: digits.len() / 2 });
        }
        let nibble = |digit: u8| char::from(digit).to_digit(16).ok_or(TicketError::Text);
        let mut bytes = [0; Self::LENGTH];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (nibble(pair[0])? << 4 | nibble(pair[1])?) as u8;
        }
        Self::from_bytes(&bytes)
    }
}

/// CRC-32 (IEEE).
fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 != 0 { crc >> 1 ^ 0xEDB8_8320 } else { crc >> 1 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket() -> Ticket {
        Ticket {
            handle: ShareableHandle::new(3, 7),
            size: 64 << 20,
            page: Page::Huge,
            memory: MemoryKind::Hbm,
            device: Some(TicketDevice { physical: 5, sdid: Some(0xCC0005) }),
            generation: Generation::V26_1,
            exporter: 4242,
            exporter_start: 123456,
            boot_id: *b"0123456789abcdef",
        }
    }

    #[test]
    fn the_checksum_is_crc32() {
        assert_eq!(checksum(b"123456789"), 0xCBF4_3926);
    }

    #[test]
    fn both_forms_round_trip() {
        for generation in Generation::ALL {
            for device in [ticket().device, Some(TicketDevice { physical: 0, sdid: None })] {
                let ticket = Ticket { generation, device, ..ticket() };
                assert_eq!(Ticket::from_bytes(&ticket.to_bytes()), Ok(ticket));
                assert_eq!(ticket.to_string().parse(), Ok(ticket));
            }
        }
        let host = Ticket { handle: ShareableHandle::new(65, 1), device: None, ..ticket() };
        assert_eq!(host.to_string().parse(), Ok(host));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_detected() {
        let good = ticket().to_bytes();
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Ticket::from_bytes(&bad).is_err(), "bit {bit}");
        }
        for length in 0..good.len() {
            assert!(matches!(Ticket::from_bytes(&good[..length]), Err(TicketError::Length { .. })));
        }
    }

    #[test]
    fn values_that_no_exporter_writes_are_refused_even_with_a_good_checksum() {
        let refused = |change: fn(&mut TicketBytes)| {
            let mut wire = TicketBytes::read_from_bytes(&ticket().to_bytes()).unwrap();
            change(&mut wire);
            wire.checksum = 0.into();
            wire.checksum = checksum(wire.as_bytes()).into();
            Ticket::from_bytes(wire.as_bytes()).unwrap_err()
        };
        assert_eq!(refused(|wire| wire.version = 2.into()), TicketError::Version { expected: 1, got: 2 });
        assert_eq!(refused(|wire| wire.generation = 0), TicketError::Field("generation"));
        assert_eq!(refused(|wire| wire.page = 3), TicketError::Field("page kind"));
        assert_eq!(refused(|wire| wire.page = 0), TicketError::Field("page kind"));
        assert_eq!(refused(|wire| wire.memory = 4), TicketError::Field("memory kind"));
        assert_eq!(refused(|wire| wire.host = 1), TicketError::Field("side"));
        assert_eq!(refused(|wire| wire.size = 0.into()), TicketError::Field("size"));
        assert_eq!(refused(|wire| wire.size = u64::MAX.into()), TicketError::Field("size"));
        assert_eq!(refused(|wire| wire.exporter = 0.into()), TicketError::Field("exporter"));
        assert_eq!(refused(|wire| wire.handle = u64::MAX.into()), TicketError::Field("handle"));
        assert_eq!(refused(|wire| wire.physical = 1124.into()), TicketError::Field("physical device"));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_refused_or_are_exactly_one_ticket(
            noise in proptest::array::uniform32(0u8..),
            more in proptest::array::uniform32(0u8..),
            zeroes in 0..3u32,
        ) {
            let mut bytes = [0; Ticket::LENGTH];
            bytes[..32].copy_from_slice(&noise);
            bytes[32..64].copy_from_slice(&more);
            assert!(Ticket::from_bytes(&bytes).is_err(), "noise has no magic word, or no checksum");
            // Made by an attacker who knows the format.
            let mut wire = TicketBytes::read_from_bytes(&bytes).unwrap();
            (wire.magic, wire.version) = (MAGIC, VERSION.into());
            if zeroes > 0 {
                // Values that are rare in noise, so that some get through.
                wire.reserved = [0; 2];
                (wire.generation, wire.page, wire.memory) = (wire.generation % 4, wire.page % 4, wire.memory % 6);
                wire.host %= 2;
                let device = if wire.host == 1 { 65 } else { wire.handle.get() % 70 };
                wire.handle = (device << 32 | wire.handle.get() & 0xFFFF).into();
                wire.physical = if zeroes > 1 { 0.into() } else { (wire.physical.get() % 2000).into() };
                wire.sdid = if zeroes > 1 { NO_SDID.into() } else { wire.sdid };
            }
            wire.checksum = 0.into();
            wire.checksum = checksum(wire.as_bytes()).into();
            if let Ok(ticket) = Ticket::from_bytes(wire.as_bytes()) {
                assert_eq!(ticket.to_bytes(), wire.as_bytes());
                assert_eq!(ticket.to_string().parse(), Ok(ticket));
            }
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,200}", cut in 0usize..142) {
            assert!(text.parse::<Ticket>().is_err());
            let good = ticket().to_string();
            let mixed = format!("{}{text}", good.get(..cut).unwrap_or_default());
            assert!(mixed.trim() == good || mixed.parse::<Ticket>().is_err());
        }
    }

    #[test]
    fn text_that_is_not_a_ticket_is_refused() {
        for text in ["", "avm1-", "avm2-00", "hello", "avm1-zz"] {
            assert!(text.parse::<Ticket>().is_err(), "{text}");
        }
        let mut text = ticket().to_string();
        text.replace_range(5..7, "é");
        assert!(text.parse::<Ticket>().is_err());
        let good = format!("  {}\n", ticket());
        assert_eq!(good.parse(), Ok(ticket()), "white space around it is not part of it");
    }
}
