//! The memory of a program that is not there: the buffers of a trace, and zeros elsewhere.

use ascend_emulator::caller::{BadAddress, Memory};
use std::cell::RefCell;

/// Below this nothing is mapped.
const FIRST: u64 = 4096;

/// Memory during one call.
#[derive(Default)]
pub struct CallMemory {
    blocks: RefCell<Vec<(u64, Vec<u8>)>>,
    holes: RefCell<Vec<(u64, u64)>>,
}

impl CallMemory {
    /// Puts bytes at an address.
    pub fn put(&self, address: u64, bytes: Vec<u8>) {
        self.blocks.borrow_mut().push((address, bytes));
    }

    /// Makes a range that cannot be accessed.
    pub fn hole(&self, address: u64, length: u64) {
        self.holes.borrow_mut().push((address, address.saturating_add(length.max(1))));
    }

    fn check(&self, address: u64, length: u64) -> Result<(), BadAddress> {
        let end = address.saturating_add(length);
        let in_hole = self.holes.borrow().iter().any(|(start, until)| *start < end && address < *until);
        if address < FIRST || in_hole { Err(BadAddress) } else { Ok(()) }
    }

    /// Takes back what was put at an address.
    pub fn take(&self, address: u64) -> Option<Vec<u8>> {
        let mut blocks = self.blocks.borrow_mut();
        let index = blocks.iter().position(|(start, _)| *start == address)?;
        Some(blocks.swap_remove(index).1)
    }
}

/// The part of a block that a range touches: where in the block, where in the range, how long.
fn overlap(start: u64, block: usize, address: u64, length: usize) -> Option<(usize, usize, usize)> {
    let first = start.max(address);
    let end = start.saturating_add(block as u64).min(address.saturating_add(length as u64));
    (first < end).then(|| ((first - start) as usize, (first - address) as usize, (end - first) as usize))
}

impl Memory for CallMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), BadAddress> {
        self.check(address, buffer.len() as u64)?;
        buffer.fill(0);
        for (start, block) in self.blocks.borrow().iter() {
            if let Some((from, to, length)) = overlap(*start, block.len(), address, buffer.len()) {
                buffer[to..to + length].copy_from_slice(&block[from..from + length]);
            }
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), BadAddress> {
        self.check(address, bytes.len() as u64)?;
        for (start, block) in self.blocks.borrow_mut().iter_mut() {
            if let Some((to, from, length)) = overlap(*start, block.len(), address, bytes.len()) {
                block[to..to + length].copy_from_slice(&bytes[from..from + length]);
            }
        }
        Ok(())
    }

    /// No trace has the contents of memory, and they take room.
    fn without_bytes(&self, address: u64, length: u64) -> Option<Result<(), BadAddress>> {
        Some(self.check(address, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_seen_where_they_are_and_zeros_elsewhere() {
        let memory = CallMemory::default();
        memory.put(0x2000, vec![1, 2, 3, 4]);
        let mut bytes = [9; 8];
        memory.read(0x1ffe, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 0, 1, 2, 3, 4, 0, 0]);
        memory.write(0x2002, &[7, 7, 7]).unwrap();
        assert_eq!(memory.take(0x2000), Some(vec![1, 2, 7, 7]));
        assert_eq!(memory.take(0x2000), None);
        assert_eq!(memory.read(0, &mut bytes), Err(BadAddress));
        assert_eq!(memory.read(u64::MAX - 3, &mut bytes), Ok(()));
    }
}
