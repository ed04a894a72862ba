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

pub(super) const CLASSES: usize = 32;
const WORDS: usize = 16;
const NONE: u32 = u32::MAX;

/// The class of a size from 1 to [`LARGEST`].
#[inline]
pub(super) fn class_of(size: u64) -> usize {
    CLASS_OF[((size - 1) / STEP) as usize].into()
}

/// The size of a class's blocks.
#[inline]
pub(super) const fn size_of_class(class: usize) -> u64 {
    SIZES[class] as u64
}

/// The sizes of the classes' blocks: up to 512 bytes in steps of 64, then in four steps from one
/// power of two to the next.
const SIZES: [u32; CLASSES] = {
    let mut sizes = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        sizes[class] = if class < 8 {
            STEP as u32 * (class as u32 + 1)
        } else {
            (512 + 128 * ((class as u32 - 8) % 4 + 1)) << ((class - 8) / 4)
        };
        class += 1;
    }
    sizes
};

/// The class of each size, in steps.
const CLASS_OF: [u8; (LARGEST / STEP) as usize] = {
    let mut classes = [0; (LARGEST / STEP) as usize];
    let (mut step, mut class) = (0, 0);
    while step < classes.len() {
        if SIZES[class] < (step as u32 + 1) * STEP as u32 {
            class += 1;
        }
        classes[step] = class as u8;
        step += 1;
    }
    classes
};

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
    /// Of each block.
    size: u32,
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
    /// Blocks in use that belong to no handle.
    loose: [u64; WORDS],
}

impl Run {
    /// The word and the bit of a block. The address is inside.
    #[inline]
    fn place(&self, address: u64) -> (usize, u64) {
        let index = (address - self.start) as u32 / self.size;
        (index as usize / 64 % WORDS, 1 << (index % 64))
    }
}

#[derive(Debug)]
pub(super) struct SmallBlocks {
    runs: Vec<Run>,
    /// Numbers of runs that are not in use.
    spare: Vec<u32>,
    /// The first run of each class that has room.
    first: [u32; CLASSES],
}

impl Default for SmallBlocks {
    fn default() -> SmallBlocks {
        SmallBlocks { runs: Vec::new(), spare: Vec::new(), first: [NONE; CLASSES] }
    }
}

impl SmallBlocks {
    /// The large block that a run is cut from.
    pub(super) fn block(&self, number: u32) -> u32 {
        self.runs[number as usize].block
    }

    /// A free block of a class, if a run has one: the run's number, and the address.
    #[inline]
    pub(super) fn take(&mut self, class: usize) -> Option<(u32, u64)> {
        let number = *self.first.get(class)?;
        let run = self.runs.get_mut(number as usize)?;
        let word = run.room.trailing_zeros();
        let taken = run.taken.get_mut(word as usize)?;
        let bit = taken.trailing_ones();
        *taken |= 1 << bit;
        run.used += 1;
        let address = run.start + u64::from(word * 64 + bit) * u64::from(run.size);
        if *taken == u64::MAX {
            run.room &= !(1 << word);
            if run.room == 0 {
                self.unlink(number);
            }
        }
        Some((number, address))
    }

    /// Cuts a new run out of a large block; returns its number.
    pub(super) fn add(&mut self, class: usize, start: u64, block: u32) -> u32 {
        let total = run_size(class) / size_of_class(class);
        let mut run = Run {
            start,
            size: size_of_class(class) as u32,
            block,
            class: class as u8,
            used: 0,
            total: total as u16,
            room: 0,
            next: NONE,
            previous: NONE,
            // What lies beyond the end is taken for ever.
            taken: [u64::MAX; WORDS],
            loose: [0; WORDS],
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

    /// Frees a block in use. Returns the large block that its run was cut from if the run is empty
    /// and not needed: that is to be freed too.
    #[inline]
    pub(super) fn free(&mut self, number: u32, address: u64) -> Option<u32> {
        let run = self.runs.get_mut(number as usize)?;
        let (word, bit) = run.place(address);
        let was_full = run.room == 0;
        run.taken[word] &= !bit;
        run.room |= 1 << word;
        run.used -= 1;
        let (empty, class) = (run.used == 0, run.class as usize);
        if was_full {
            self.link(number);
        } else if empty && (self.first[class] != number || run.next != NONE) {
            // Another run has room. The last one is kept: the next block is likely to come soon.
            return Some(self.remove(number));
        }
        None
    }

    /// The size of the block in use that begins at an address.
    #[inline]
    pub(super) fn size(&self, number: u32, address: u64) -> Option<u64> {
        let run = self.runs.get(number as usize)?;
        let (offset, size) = (address.wrapping_sub(run.start), u64::from(run.size));
        if offset >= u64::from(run.total) * size || offset % size != 0 {
            return None;
        }
        let (word, bit) = run.place(address);
        (run.taken[word] & bit != 0).then_some(size)
    }

    /// Notes that a block in use belongs to no handle.
    #[inline]
    pub(super) fn add_loose(&mut self, number: u32, address: u64) {
        let run = &mut self.runs[number as usize];
        let (word, bit) = run.place(address);
        run.loose[word] |= bit;
    }

    /// Whether a block in use belonged to no handle. It does not count as such any more.
    #[inline]
    pub(super) fn remove_loose(&mut self, number: u32, address: u64) -> bool {
        let run = &mut self.runs[number as usize];
        let (word, bit) = run.place(address);
        let was_loose = run.loose[word] & bit != 0;
        run.loose[word] &= !bit;
        was_loose
    }

    /// Removes the runs that are empty: none of their blocks is in use, so none has a size any
    /// more. Returns the large blocks that they were cut from.
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
            let mut blocks = SmallBlocks::default();
            assert_eq!(blocks.take(class), None);
            let run = blocks.add(class, 1 << 30, 7);
            let mut all = std::collections::BTreeSet::new();
            while let Some((number, address)) = blocks.take(class) {
                assert_eq!(number, run);
                assert!(address >= 1 << 30 && address + size_of_class(class) <= (1 << 30) + run_size(class));
                assert!(all.insert(address), "{address:#x} was handed out twice");
            }
            assert_eq!(all.len() as u64, run_size(class) / size_of_class(class));
            for &address in &all {
                assert_eq!(blocks.size(run, address + 1), None);
                assert_eq!(blocks.size(run, address), Some(size_of_class(class)));
                assert!(!blocks.remove_loose(run, address));
                blocks.add_loose(run, address);
                assert!(blocks.remove_loose(run, address));
                assert_eq!(blocks.free(run, address), None);
                assert_eq!(blocks.size(run, address), None);
            }
            for outside in [0, (1 << 30) - size_of_class(class), (1 << 30) + run_size(class), u64::MAX] {
                assert_eq!(blocks.size(run, outside), None, "{outside:#x}");
            }
            assert_eq!(blocks.remove_empty(), [7]);
            assert_eq!((blocks.take(class), blocks.size(run, 1 << 30)), (None, None));
        }
    }

    #[test]
    fn the_last_empty_run_of_a_class_stays_and_others_go() {
        let mut blocks = SmallBlocks::default();
        let one = blocks.add(31, 0, 1);
        let first: Vec<u64> = std::iter::from_fn(|| blocks.take(31)).map(|(_, address)| address).collect();
        let other = blocks.add(31, 1 << 20, 2);
        let (number, last) = blocks.take(31).unwrap();
        assert_eq!((number, blocks.free(other, last)), (other, None), "no other run has room");
        for (number, address) in first.iter().enumerate() {
            assert_eq!(blocks.free(one, *address), (number == first.len() - 1).then_some(1));
        }
    }
}
