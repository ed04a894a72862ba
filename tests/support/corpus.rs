//! Stored inputs, and inputs that are made from them by a fixed seed.
//!
//! A file of `tests/corpus/` has one input per line, in hexadecimal; lines that begin with `#` say
//! what follows. An input that once broke something is added there.

use super::random::Random;
use std::path::Path;

/// The inputs of a file.
#[track_caller]
pub fn stored(file: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let inputs: Vec<Vec<u8>> = text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| bytes(line).unwrap_or_else(|| panic!("{}: {line}", path.display())))
        .collect();
    assert!(!inputs.is_empty(), "{} is empty", path.display());
    inputs
}

fn bytes(digits: &str) -> Option<Vec<u8>> {
    let digits = digits.trim();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()).collect()
}

/// As a line of such a file.
pub fn line(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Another input: one to four changes of the kinds that readers fail on.
pub fn mutate(input: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.index(4) {
        if bytes.is_empty() {
            bytes.push(random.next() as u8);
        }
        let at = random.index(bytes.len());
        match random.index(7) {
            0 => bytes[at] ^= 1 << random.index(8),
            1 => bytes[at] = [0, 1, 0x7F, 0x80, 0xFF][random.index(5)],
            2 => {
                let extreme = [0, 1, u64::MAX, 1 << 63, 1 << 31, u32::MAX.into()][random.index(6)];
                let width = [2, 4, 8][random.index(3)];
                for (byte, other) in bytes[at..].iter_mut().zip(&extreme.to_le_bytes()[..width]) {
                    *byte = *other;
                }
            }
            3 => bytes.truncate(at),
            4 => bytes.insert(at, random.next() as u8),
            5 => drop(bytes.remove(at)),
            _ => {
                let copied = bytes[at..(at + 1 + random.index(16)).min(bytes.len())].to_vec();
                let to = random.index(bytes.len());
                bytes.splice(to..to, copied);
            }
        }
    }
    bytes
}
