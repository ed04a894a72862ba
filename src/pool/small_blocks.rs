//! Blocks of up to 32 KiB: runs of equal blocks, with a bit for each.
//!
//! A block of a few bytes cannot have a record of its own: that would be more than a hundredth of
//! it. So small sizes are rounded up to one of 32 classes, at most a fifth larger (64 bytes for the
//! smallest), and each class cuts *runs* of 64 KiB to 512 KiB into blocks. A run is 300 bytes here.
//! Runs that have room are in a list of their class, so taking and freeing take the same few steps
//! however many blocks there are.

/// The largest small block.
pub(super) const LARGEST: u64 = 32 << 10;
/// Sizes and addresses of blocks are multiples of this.
pub(super) const STEP: u64 = 64;

const CLASSES: usize = 32;
const WORDS: usize = 16;
const NONE: u32 = u32::MAX;

/// The class of a size from 1 to [`LARGEST`].
#[inline]
pub(super) fn class_of(size: u64) -> usize {
    if size <= 512 {
        return (size.div_ceil(STEP).max(1) - 1) as usize;
    }
    // Four steps from one power of two to the next.
    let power = (size - 1).ilog2();
    let step = ((size - 1) >> (power - 2)) & 3;
    8 + (power as usize - 9) * 4 + step as usize
}

/// The size of a class's blocks.
#[inline]
pub(super) const fn size_of_class(class: usize) -> u64 {
    if class < 8 {
        return STEP * (class as u64 + 1);
    }
    let (power, step) = ((class - 8) / 4, (class - 8) % 4);
    (512 + 128 * (step as u64 + 1)) << power
}

/// Bytes of a class's runs: at least sixteen blocks.
pub(super) const fn run_size(class: usize) -> u64 {
    let blocks = 16 * size_of_class(class).next_power_of_two();
    if blocks > 64 << 10 { blocks } else { 64 << 10 }
}

const _: () = assert!(size_of_class(CLASSES - 1) == LARGEST && size_of_class(0) == STEP);
const _: () = assert!(run_size(0) / size_of_class(0) == 64 * WORDS as u64);

#[derive(Debug, Clone)]
struct Run {
    start: u64,
    /// The large block that it is cut from.
    block: u32,
    class: u8,
    used: u16,
    total: u16,
    /// A bit for each word of `taken` that has a free block.
    room: u16,
    /// In the list of its class, while it has room.
    next: u32,
    previous: u32,
    taken: [u64; WORDS],
    /// Blocks that a handle owns.
    owned: [u64; WORDS],
}

/// Why a block cannot be freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Misuse {
    /// No block begins there.
    NoBlock,
    /// It belongs to a handle, and is freed with it.
    Owned,
}

/// What became of a run when a block in it was freed.
pub(super) enum Freed {
    /// It stays; the block had this size.
    Block(u64),
    /// It is empty and not needed: the large block that it was cut from is to be freed too.
    Run(u64, u32),
}

#[derive(Debug)]
pub(super) struct SmallBlocks {
    runs: Vec<Run>,
    /// Numbers of runs that are not in use.
    spare: Vec<u32>,
    /// The first run of each class that has room.
    first: [u32; CLASSES],
}

impl SmallBlocks {
    pub(super) fn new() -> SmallBlocks {
        SmallBlocks { runs: Vec::new(), spare: Vec::new(), first: [NONE; CLASSES] }
    }

    /// A free block of a class, if a run has one.
    #[inline]
    pub(super) fn take(&mut self, class: usize, owned: bool) -> Option<u64> {
        let number = *self.first.get(class)?;
        let run = self.runs.get_mut(number as usize)?;
        let word = run.room.trailing_zeros() as usize;
        let taken = run.taken.get_mut(word)?;
        let bit = taken.trailing_ones();
        *taken |= 1 << bit;
        run.owned[word] |= u64::from(owned) << bit;
        let full = *taken == u64::MAX;
        run.used += 1;
        let address = run.start + (word as u64 * 64 + u64::from(bit)) * size_of_class(class);
        if full {
            run.room &= !(1 << word);
            if run.room == 0 {
                self.unlink(number);
            }
        }
        Some(address)
    }

    /// Cuts a new run out of a large block; returns its number.
    pub(super) fn add(&mut self, class: usize, start: u64, block: u32) -> u32 {
        let total = run_size(class) / size_of_class(class);
        let mut run = Run {
            start,
            block,
            class: class as u8,
            used: 0,
            total: total as u16,
            room: 0,
            next: NONE,
            previous: NONE,
            // What lies beyond the end is taken for ever.
            taken: [u64::MAX; WORDS],
            owned: [0; WORDS],
        };
        for (word, taken) in run.taken.iter_mut().enumerate() {
            let before = word as u64 * 64;
            if total > before {
                *taken = if total - before >= 64 { 0 } else { u64::MAX << (total - before) };
                run.room |= 1 << word;
            }
        }
        let number = match self.spare.pop() {
            Some(number) => {
                self.runs[number as usize] = run;
                number
            }
            None => {
                self.runs.push(run);
                self.runs.len() as u32 - 1
            }
        };
        self.link(number);
        number
    }

    /// Frees a block in a run.
    #[inline]
    pub(super) fn free(&mut self, number: u32, address: u64, owned: bool) -> Result<Freed, Misuse> {
        let (word, bit, size) = self.find(number, address)?;
        let run = &mut self.runs[number as usize];
        if (run.owned[word] >> bit & 1 != 0) != owned {
            return Err(Misuse::Owned);
        }
        let was_full = run.room == 0;
        run.taken[word] &= !(1 << bit);
        run.owned[word] &= !(1 << bit);
        run.room |= 1 << word;
        run.used -= 1;
        let (empty, class) = (run.used == 0, run.class as usize);
        if was_full {
            self.link(number);
        } else if empty && (self.first[class] != number || self.runs[number as usize].next != NONE) {
            // Another run has room. The last one is kept: the next block is likely to come soon.
            return Ok(Freed::Run(size, self.remove(number)));
        }
        Ok(Freed::Block(size))
    }

    /// The word and bit of a block that is taken, and its size.
    #[inline]
    fn find(&self, number: u32, address: u64) -> Result<(usize, u32, u64), Misuse> {
        let run = self.runs.get(number as usize).ok_or(Misuse::NoBlock)?;
        let size = size_of_class(run.class as usize);
        let offset = address.wrapping_sub(run.start);
        let index = offset / size;
        if index >= u64::from(run.total) || offset % size != 0 {
            return Err(Misuse::NoBlock);
        }
        let (word, bit) = (index as usize / 64, index as u32 % 64);
        if run.taken[word] >> bit & 1 == 0 { Err(Misuse::NoBlock) } else { Ok((word, bit, size)) }
    }

    /// The size of a block that is taken.
    pub(super) fn size(&self, number: u32, address: u64) -> Option<u64> {
        self.find(number, address).ok().map(|(_, _, size)| size)
    }

    /// Leaves a block without its handle: it is freed by its address from now on.
    pub(super) fn disown(&mut self, number: u32, address: u64) {
        if let Ok((word, bit, _)) = self.find(number, address) {
            self.runs[number as usize].owned[word] &= !(1 << bit);
        }
    }

    /// Removes the runs that are empty, and returns the large blocks that they were cut from.
    pub(super) fn remove_empty(&mut self) -> Vec<u32> {
        let mut blocks = Vec::new();
        for class in 0..CLASSES {
            let mut number = self.first[class];
            while number != NONE {
                let run = &self.runs[number as usize];
                let (next, empty) = (run.next, run.used == 0);
                if empty {
                    blocks.push(self.remove(number));
                }
                number = next;
            }
        }
        blocks
    }

    fn remove(&mut self, number: u32) -> u32 {
        self.unlink(number);
        let run = &mut self.runs[number as usize];
        // No address is inside of it any more.
        run.total = 0;
        self.spare.push(number);
        self.runs[number as usize].block
    }

    fn link(&mut self, number: u32) {
        let first = &mut self.first[self.runs[number as usize].class as usize];
        let next = std::mem::replace(first, number);
        self.runs[number as usize].next = next;
        self.runs[number as usize].previous = NONE;
        if let Some(next) = self.runs.get_mut(next as usize) {
            next.previous = number;
        }
    }

    fn unlink(&mut self, number: u32) {
        let Run { next, previous, class, .. } = self.runs[number as usize];
        match self.runs.get_mut(previous as usize) {
            Some(before) => before.next = next,
            None => self.first[class as usize] = next,
        }
        if let Some(after) = self.runs.get_mut(next as usize) {
            after.previous = previous;
        }
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
        for class in 0..CLASSES {
            let mut blocks = SmallBlocks::new();
            assert_eq!(blocks.take(class, false), None);
            let run = blocks.add(class, 1 << 30, 7);
            let mut all = std::collections::BTreeSet::new();
            while let Some(address) = blocks.take(class, false) {
                assert!(address >= 1 << 30 && address + size_of_class(class) <= (1 << 30) + run_size(class));
                assert!(all.insert(address), "{address:#x} was handed out twice");
            }
            assert_eq!(all.len() as u64, run_size(class) / size_of_class(class));
            for &address in &all {
                assert_eq!(blocks.free(run, address + 1, false).err(), Some(Misuse::NoBlock));
                assert_eq!(blocks.free(run, address, true).err(), Some(Misuse::Owned));
                assert!(matches!(blocks.free(run, address, false), Ok(Freed::Block(_))));
                assert_eq!(blocks.free(run, address, false).err(), Some(Misuse::NoBlock));
            }
            assert_eq!(blocks.remove_empty(), [7]);
            assert_eq!(blocks.take(class, false), None);
        }
    }

    #[test]
    fn the_last_empty_run_of_a_class_stays_and_others_go() {
        let mut blocks = SmallBlocks::new();
        let one = blocks.add(31, 0, 1);
        let first: Vec<u64> = std::iter::from_fn(|| blocks.take(31, false)).collect();
        let other = blocks.add(31, 1 << 20, 2);
        let last = blocks.take(31, false).unwrap();
        assert!(matches!(blocks.free(other, last, false), Ok(Freed::Block(_))), "no other run has room");
        for (number, address) in first.iter().enumerate() {
            let freed = blocks.free(one, *address, false).unwrap();
            assert_eq!(matches!(freed, Freed::Run(_, 1)), number == first.len() - 1);
        }
    }
}
