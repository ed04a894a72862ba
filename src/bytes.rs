//! Sizes as people write them: `64 MiB`.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, written and read with a unit.
///
/// It is displayed exactly, in the largest unit that divides it, and what is displayed can be
/// parsed again. A text is a whole number with one of the units `K`, `M`, `G` and `T` (or `KiB`,
/// `MiB`, …), each 1024 times the one before, or with `bytes`, `B` or no unit.
///
/// ```
/// use ascend_vmm::Bytes;
///
/// let size: Bytes = "1536MiB".parse()?;
/// assert_eq!(size, Bytes(3 << 29));
/// assert_eq!(size.to_string(), "1536 MiB");
/// assert_eq!(size.rounded(), "1.5 GiB");
/// # Ok::<(), ascend_vmm::NotBytes>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

/// Units from the largest to the smallest, each with the letter that is enough for it.
const UNITS: [(u64, &str, &str); 4] =
    [(1 << 40, "TiB", "T"), (1 << 30, "GiB", "G"), (1 << 20, "MiB", "M"), (1 << 10, "KiB", "K")];

impl Bytes {
    /// The size in the largest unit that is not larger, with one digit after the point where it is
    /// not a whole number: for tables.
    pub fn rounded(self) -> String {
        match UNITS.into_iter().find(|(unit, ..)| self.0 >= *unit) {
            Some((unit, name, _)) if self.0 % unit == 0 => format!("{} {name}", self.0 / unit),
            Some((unit, name, _)) => format!("{:.1} {name}", self.0 as f64 / unit as f64),
            None => format!("{} B", self.0),
        }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.into_iter().find(|(unit, ..)| self.0 != 0 && self.0 % unit == 0) {
            Some((unit, name, _)) => f.pad(&format!("{} {name}", self.0 / unit)),
            None => f.pad(&format!("{} bytes", self.0)),
        }
    }
}

impl FromStr for Bytes {
    type Err = NotBytes;

    fn from_str(text: &str) -> Result<Bytes, NotBytes> {
        let text = text.trim();
        let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = &text[number.len()..];
        let number = number.trim_end();
        let factor = match UNITS.into_iter().find(|(_, name, letter)| [*name, *letter].contains(&unit)) {
            Some((factor, ..)) => factor,
            None if ["", "B", "bytes"].contains(&unit) => 1,
            None => return Err(NotBytes(format!("`{unit}` is not one of the units K, M, G and T"))),
        };
        if number.is_empty() || !number.bytes().all(|digit| digit.is_ascii_digit()) {
            return Err(NotBytes(format!("`{number}` is not a whole number")));
        }
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
        bytes.map(Bytes).ok_or_else(|| NotBytes("the size does not fit into 64 bits".to_owned()))
    }
}

/// The error for a text that is not a size. Displayed, it says why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotBytes(String);

#[cfg(test)]
mod tests {
    use super::*;

    const EXTREMES: [u64; 14] = [
        0,
        1,
        1023,
        1024,
        1025,
        4097,
        2 << 20,
        (1 << 30) + (2 << 20),
        (1 << 40) - 1,
        1 << 40,
        u64::MAX >> 40 << 40,
        u64::MAX - 1023,
        u64::MAX - 1,
        u64::MAX,
    ];

    #[test]
    fn every_size_is_displayed_exactly_and_parsed_again() {
        for size in EXTREMES {
            assert_eq!(Bytes(size).to_string().parse(), Ok(Bytes(size)));
            assert_eq!(size.to_string().parse(), Ok(Bytes(size)));
        }
        for (size, text) in
            [(0, "0 bytes"), (2 << 20, "2 MiB"), ((1 << 30) + (2 << 20), "1026 MiB"), (4097, "4097 bytes")]
        {
            assert_eq!(Bytes(size).to_string(), text);
        }
        assert_eq!(format!("{:>8}|{:<8}|", Bytes(1 << 30), Bytes(0)), "   1 GiB|0 bytes |");
    }

    #[test]
    fn rounded_sizes_have_the_largest_unit_that_fits() {
        for (size, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 10, "1 KiB"),
            (2 << 20, "2 MiB"),
            (64 << 30, "64 GiB"),
            (3 << 29, "1.5 GiB"),
        ] {
            assert_eq!(Bytes(size).rounded(), text);
        }
        assert_eq!(Bytes(u64::MAX).rounded(), "16777216.0 TiB");
    }

    #[test]
    fn units_are_written_with_a_letter_or_whole_and_with_a_blank_or_without() {
        for text in ["64M", "64MiB", "64 MiB", " 64  MiB ", "65536K", "67108864", "67108864 bytes", "067108864B"] {
            assert_eq!(text.parse(), Ok(Bytes(64 << 20)), "{text}");
        }
        assert_eq!("16777215T".parse(), Ok(Bytes(u64::MAX >> 40 << 40)));
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_its_reason() {
        let reason = |text: &str| text.parse::<Bytes>().unwrap_err().to_string();
        for text in ["64MB", "64 mib", "x", "64Q", "2MiBs"] {
            assert!(reason(text).contains("units"), "{text}: {}", reason(text));
        }
        for text in ["", " ", "-1", "+1", "2.5MiB", "1e3", "0x10", "2 0MiB", "2MiB MiB", "２MiB", "M", "1 \u{a0}2"] {
            assert!(reason(text).contains("whole number"), "{text}: {}", reason(text));
        }
        for text in ["18446744073709551616", "16777216T", "99999999999999999999999999K"] {
            assert!(reason(text).contains("64 bits"), "{text}: {}", reason(text));
        }
    }
}
