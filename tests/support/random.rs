//! Random sequences that depend on their seed only, so that one that fails can be run again.

use super::MIB2;
use std::ops::Range;

/// A sequence of numbers that depends on its seed only (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    pub fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.next().to_ne_bytes());
        }
        bytes.truncate(length);
        bytes
    }

    /// A range of a few bytes to some pages inside `size`, often at its ends and at borders of
    /// huge pages.
    pub fn range(&mut self, size: u64) -> Range<u64> {
        let length = match self.below(4) {
            0 => self.below(16) + 1,
            1 => 4096,
            _ => self.below(20_000) + 1,
        };
        let last = size - length;
        let start = match self.below(4) {
            0 => 0,
            1 => last,
            2 => (self.below(size / MIB2 + 1) * MIB2).saturating_sub(self.below(length)).min(last),
            _ => self.below(last + 1),
        };
        start..start + length
    }
}

/// Prints the seed if the sequence fails.
pub struct Seed(pub u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("run this sequence again with ASCEND_VMM_SEED={}", self.0);
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The seeds to run: the first `count`, or the one in `ASCEND_VMM_SEED`.
pub fn seeds(count: u64) -> Range<u64> {
    number("ASCEND_VMM_SEED").map_or(0..count, |seed| seed..seed + 1)
}

/// How many steps a sequence has: `usual`, or the number in `ASCEND_VMM_STEPS`.
pub fn steps(usual: u64) -> u64 {
    number("ASCEND_VMM_STEPS").unwrap_or(usual)
}
