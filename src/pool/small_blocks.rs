//! Blocks of up to 32 KiB: runs of equal blocks, with a bit for each.
//!
//! A small block cannot afford a record of its own: with the records of `blocks.rs`, a block of 64
//! bytes would need more bookkeeping than memory. So small sizes are rounded up to one of 32
//! classes, each at most a fifth larger than the one before (64 bytes for the smallest), and each
//! class cuts *runs* of 64 KiB to 512 KiB into blocks. A run takes 300 bytes here.

/// The largest small block.
pub(super) const LARGEST: u64 = 32 << 10;
/// Sizes and addresses of blocks are multiples of this.
const STEP: u64 = 64;

pub(super) const CLASSES: usize = 32;
const WORDS: usize = 16;

/// The class of a size from 1 to [`LARGEST`].
pub(super) fn class_of(size: u64) -> usize {
    let last = size - 1;
    if last < 512 {
        return (last / STEP) as usize;
    }
    let power = last.ilog2();
    8 + 4 * (power as usize - 9) + (last >> (power - 2)) as usize % 4
}

/// The size of a class's blocks.
pub(super) const fn size_of_class(class: usize) -> u64 {
    SIZES[class]
}

/// The sizes of the classes' blocks: up to 512 bytes in steps of 64, then in four steps from one
/// power of two to the next.
const SIZES: [u64; CLASSES] = {
    let mut sizes = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        sizes[class] = if class < 8 {
            STEP * (class as u64 + 1)
        } else {
            (512 + 128 * ((class as u64 - 8) % 4 + 1)) << ((class - 8) / 4)
        };
        class += 1;
    }
    sizes
};

/// The size of a class's runs: at least sixteen blocks.
pub(super) const fn run_size(class: usize) -> u64 {
    let blocks = 16 * size_of_class(class).next_power_of_two();
    if blocks > 64 << 10 { blocks } else { 64 << 10 }
}

const _: () = assert!(size_of_class(CLASSES - 1) == LARGEST && size_of_class(0) == STEP);
const _: () = assert!(run_size(0) / size_of_class(0) == 64 * WORDS as u64);

/// A run of equal blocks.
#[derive(Debug)]
pub(super) struct SmallRun {
    start: u64,
    class: u8,
    /// Number of blocks, in use or free.
    blocks: u16,
    /// Number of blocks in use.
    used: u16,
    /// A bit for each block in use. The bits beyond the last block are set too.
    taken: [u64; WORDS],
    /// A bit for each block in use that no handle owns.
    disowned: [u64; WORDS],
}

impl SmallRun {
    pub(super) fn new(class: usize, start: u64) -> SmallRun {
        let blocks = run_size(class) / size_of_class(class);
        let taken = std::array::from_fn(|word| match blocks.saturating_sub(word as u64 * 64) {
            64.. => 0,
            left => u64::MAX << left,
        });
        SmallRun { start, class: class as u8, blocks: blocks as u16, used: 0, taken, disowned: [0; WORDS] }
    }

    pub(super) fn start(&self) -> u64 {
        self.start
    }

    pub(super) fn class(&self) -> usize {
        self.class.into()
    }

    pub(super) fn block_size(&self) -> u64 {
        size_of_class(self.class())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    pub(super) fn is_full(&self) -> bool {
        self.used == self.blocks
    }

    /// Takes a free block. Returns its address.
    pub(super) fn take(&mut self) -> Option<u64> {
        let word = self.taken.iter().position(|&word| word != u64::MAX)?;
        let bit = self.taken[word].trailing_ones();
        self.taken[word] |= 1 << bit;
        self.used += 1;
        Some(self.start + (word as u64 * 64 + u64::from(bit)) * self.block_size())
    }

    /// Frees a block in use.
    pub(super) fn free(&mut self, address: u64) {
        let (word, bit) = self.place(address);
        self.taken[word] &= !bit;
        self.disowned[word] &= !bit;
        self.used -= 1;
    }

    /// Whether a block in use begins at an address inside of the run.
    pub(super) fn is_block(&self, address: u64) -> bool {
        let (word, bit) = self.place(address);
        let offset = address - self.start;
        let inside = offset / self.block_size() < self.blocks.into();
        inside && offset % self.block_size() == 0 && self.taken[word] & bit != 0
    }

    /// Whether no handle owns a block in use.
    pub(super) fn is_disowned(&self, address: u64) -> bool {
        let (word, bit) = self.place(address);
        self.disowned[word] & bit != 0
    }

    /// Notes that no handle owns a block in use.
    pub(super) fn disown(&mut self, address: u64) {
        let (word, bit) = self.place(address);
        self.disowned[word] |= bit;
    }

    /// The word and the bit of the block at an address inside of the run.
    fn place(&self, address: u64) -> (usize, u64) {
        let index = (address - self.start) / self.block_size();
        (index as usize / 64, 1 << (index % 64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_the_smallest_class_that_fits_and_wastes_at_most_a_fifth() {
        for size in 1..=LARGEST {
            let class = class_of(size);
            assert!(size_of_class(class) >= size, "{size}");
            assert!(class == 0 || size_of_class(class - 1) < size, "{size}");
            assert!(size <= 512 || size_of_class(class) * 4 < size * 5 + 4, "{size} in {}", size_of_class(class));
        }
    }

    #[test]
    fn a_run_hands_out_each_block_once_and_takes_it_back_once() {
        let start = 1 << 30;
        for class in 0..CLASSES {
            let mut run = SmallRun::new(class, start);
            let all: std::collections::BTreeSet<u64> = std::iter::from_fn(|| run.take()).collect();
            assert_eq!(all.len() as u64, run_size(class) / size_of_class(class), "each address once");
            assert!(run.is_full() && all.iter().all(|&block| block + size_of_class(class) <= start + run_size(class)));
            for &address in &all {
                assert!(run.is_block(address) && !run.is_block(address + 1));
                assert!(!run.is_disowned(address));
                run.disown(address);
                assert!(run.is_disowned(address));
                run.free(address);
                assert!(!run.is_block(address) && !run.is_full());
            }
            assert!(run.is_empty());
            let past_the_last = start + all.len() as u64 * size_of_class(class);
            assert!(past_the_last >= start + run_size(class) || !run.is_block(past_the_last));
            assert_eq!(run.take(), Some(start));
            assert!(!run.is_disowned(start), "a new block belongs to its handle");
        }
    }
}
