//! Which addresses are reserved: the kernel never chooses them, so we do.
//!
//! The kernel wants reservations inside *heaps*: runs of whole GiB, at most 128 GiB each, whose
//! enabling takes its exclusive lock and messages every device. So heaps are few and big and
//! enabled when needed, and inside them this arena chooses runs of 2 MiB chunks by itself. Free
//! runs are kept in lists by size class (powers of two, each in eight steps) with a bit for each
//! list that is not empty, so that finding one, and merging it with its neighbours when it is
//! freed, takes the same few steps however many there are.
//!
//! Programs tend to want the same size again. So the run that was freed last is kept aside,
//! unmerged, and of each size below 64 chunks the one that was freed last.

use crate::driver::svm::{DYNAMIC_START, HEAP_UNIT, HUGE_PAGE, NORMAL_START, RESERVE_HEAP_MAX, SVM_START};

/// Chunks of the largest heap, and of a GiB.
const HEAP_CHUNKS: u32 = (RESERVE_HEAP_MAX / HUGE_PAGE) as u32;
const GIB_CHUNKS: u32 = (HEAP_UNIT / HUGE_PAGE) as u32;
/// GiB that heaps can be made of: the range in which the vendor's library puts ordinary heaps, up
/// to the end of the SVM segment.
const GIBS: usize = ((DYNAMIC_START - NORMAL_START) / HEAP_UNIT) as usize;
/// Chunks are numbered from the start of that range.
const CHUNKS: usize = GIBS * GIB_CHUNKS as usize;

/// Steps of a power of two.
const STEPS: u32 = 8;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Sizes below 16 have a list each, then each power of two up to 65536 has eight.
const CLASSES: usize = class(HEAP_CHUNKS) + 1;

/// Sizes below this have a spare run each.
const SMALL: usize = 64;

/// No chunk.
const NONE: u32 = u32::MAX;

/// Owner of the GiB of a heap that is not for reservations.
const OTHER: u16 = u16::MAX;

/// A run of whole GiB that is, or could become, a heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    start: u64,
    size: u64,
}

impl Window {
    /// First address.
    pub(crate) fn start(self) -> u64 {
        self.start
    }

    /// The heap's index, as the kernel counts: in GiB from the start of the SVM segment.
    pub(crate) fn index(self) -> u32 {
        ((self.start - SVM_START) / HEAP_UNIT) as u32
    }

    /// Size in bytes.
    pub(crate) fn size(self) -> u64 {
        self.size
    }
}

/// Why a range at a fixed address cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Part of it is reserved.
    Reserved,
    /// It lies across the border of a heap, or would need one larger than the kernel allows.
    Border,
    /// It needs this heap first.
    NeedsHeap(Window),
}

#[derive(Debug)]
pub(crate) struct Arena {
    heaps: Vec<Window>,
    /// For each GiB the number of its heap plus one, or 0. Filled when the first heap comes.
    owners: Vec<u16>,
    runs: Runs,
    /// Bit per class that has a free run.
    filled: [u64; CLASSES.div_ceil(64)],
    /// First free run of each class.
    first: [u32; CLASSES],
    /// Number of reservations.
    live: usize,
    /// Runs that were freed and are kept as they are, for a reservation of the same size: one of
    /// each small size, by its size, and in place 0 one of a larger size. They are merged when
    /// another of the size is freed or they are in the way.
    spares: [u32; SMALL],
    /// The size of the one in place 0.
    large: u32,
}

/// Where runs start, and the records of their starts.
#[derive(Debug, Default)]
struct Runs {
    /// For each [`PAGE`] chunks the index of their records, or 0 if no run ever started there.
    pages: Vec<u32>,
    /// Size of each run and whether it is free, and for free ones the next and previous run of its
    /// list. The first page is for chunks that have none, and stays zero.
    records: Vec<[u32; 3]>,
    /// How many records belong to chunks.
    used: u32,
    /// A bit for each chunk that starts a run.
    starts: Vec<u64>,
    /// A bit for each word of `starts` that is not zero.
    summary: Vec<u64>,
}

/// Chunks whose records are made together. Few, so that a reservation of a GiB costs little memory.
const PAGE: usize = 16;

const SIZE: usize = 0;
const NEXT: usize = 1;
const PREVIOUS: usize = 2;
const FREE: u32 = 1;

impl Runs {
    /// Makes the tables, for all chunks. They are zero, so their memory is not touched before it is
    /// needed, and never have to grow.
    fn make(&mut self) {
        if self.pages.is_empty() {
            self.pages = vec![0; CHUNKS / PAGE];
            self.records = vec![[0; 3]; CHUNKS + PAGE];
            self.used = PAGE as u32;
            self.starts = vec![0; CHUNKS / 64];
            self.summary = vec![0; CHUNKS.div_ceil(64 * 64)];
        }
    }

    #[inline(always)]
    fn index(&self, chunk: u32) -> usize {
        self.pages[chunk as usize / PAGE] as usize + chunk as usize % PAGE
    }

    #[inline(always)]
    fn record(&self, chunk: u32) -> [u32; 3] {
        self.records[self.index(chunk)]
    }

    #[inline(always)]
    fn record_mut(&mut self, chunk: u32) -> &mut [u32; 3] {
        let index = self.index(chunk);
        &mut self.records[index]
    }

    #[inline(always)]
    fn size(&self, chunk: u32) -> u32 {
        self.record(chunk)[SIZE] >> 1
    }

    #[cfg(test)]
    fn is_free(&self, chunk: u32) -> bool {
        self.record(chunk)[SIZE] & FREE != 0
    }

    /// Makes a run that starts at `chunk`, where none started before.
    #[inline(always)]
    fn start(&mut self, chunk: u32, record: [u32; 3]) {
        let page = match self.pages[chunk as usize / PAGE] {
            0 => self.add_page(chunk),
            page => page,
        };
        self.records[page as usize + chunk as usize % PAGE] = record;
        let word = chunk as usize / 64;
        self.starts[word] |= 1 << (chunk % 64);
        self.summary[word / 64] |= 1 << (word % 64);
    }

    #[cold]
    fn add_page(&mut self, chunk: u32) -> u32 {
        let page = self.used;
        self.used += PAGE as u32;
        self.pages[chunk as usize / PAGE] = page;
        page
    }

    /// No run starts at `chunk` any more: it was merged with the one before.
    #[inline(always)]
    fn clear(&mut self, chunk: u32) {
        let word = chunk as usize / 64;
        self.starts[word] &= !(1 << (chunk % 64));
        if self.starts[word] == 0 {
            self.summary[word / 64] &= !(1 << (word % 64));
        }
    }

    /// The start of the run that contains `chunk`, which is in a heap.
    #[inline(always)]
    fn run_of(&self, chunk: u32) -> u32 {
        let word = chunk as usize / 64;
        let upto = self.starts[word] & (u64::MAX >> (63 - chunk % 64));
        if upto != 0 { word as u32 * 64 + 63 - upto.leading_zeros() } else { self.last_before(word) }
    }

    /// The last start before a word of the bits. The first chunk of a heap always starts a run, so
    /// there is one.
    fn last_before(&self, word: usize) -> u32 {
        let mut block = word / 64;
        let mut words = self.summary[block] & ((1u64 << (word % 64)) - 1);
        while words == 0 && block > 0 {
            block -= 1;
            words = self.summary[block];
        }
        let word = block * 64 + (63 - words.leading_zeros() as usize);
        word as u32 * 64 + 63 - self.starts[word].leading_zeros()
    }
}

impl Arena {
    /// Without heaps.
    pub(crate) fn new() -> Arena {
        Arena {
            heaps: Vec::new(),
            owners: Vec::new(),
            runs: Runs::default(),
            filled: [0; CLASSES.div_ceil(64)],
            first: [NONE; CLASSES],
            live: 0,
            spares: [NONE; SMALL],
            large: 0,
        }
    }

    /// Whether nothing is reserved.
    pub(crate) fn is_idle(&self) -> bool {
        self.live == 0
    }

    /// Forgets all heaps and returns them; nothing may be reserved.
    pub(crate) fn take_heaps(&mut self) -> Vec<Window> {
        std::mem::replace(self, Arena::new()).heaps
    }

    /// Takes a run of `size` bytes at a multiple of `alignment`; both are multiples of 2 MiB, the
    /// alignment a power of two up to 1 GiB. `None` if no enabled heap has one.
    #[inline]
    pub(crate) fn take(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let chunks = u32::try_from(size / HUGE_PAGE).ok().filter(|&chunks| chunks <= HEAP_CHUNKS)?;
        // Heaps start at whole GiB, so chunks are aligned as their addresses are.
        let step = (alignment / HUGE_PAGE) as u32;
        let spare = &mut self.spares[place(chunks)];
        if *spare != NONE && *spare & (step - 1) == 0 && (chunks < SMALL as u32 || chunks == self.large) {
            self.live += 1;
            return Some(address(std::mem::replace(spare, NONE)));
        }
        self.take_from_lists(chunks, step)
    }

    // The steps of the lists are a few instructions each: a call would cost as much as the step, so
    // they are inlined by force.
    #[inline(always)]
    fn take_from_lists(&mut self, chunks: u32, step: u32) -> Option<u64> {
        // A run that is this long has an aligned part that fits.
        let run = match self.find(chunks + (step - 1)) {
            Some(run) => run,
            None => self.search(chunks, step)?,
        };
        // The step is a power of two.
        let start = (run + (step - 1)) & !(step - 1);
        let index = self.runs.index(run);
        let [size, next, previous] = self.runs.records[index];
        let (size, rest) = (size >> 1, (size >> 1) - chunks);
        if start == run && is_same_class(size, rest) {
            // What is left takes its place in the list.
            self.runs.records[index] = taken(chunks);
            let record = self.replace(run + chunks, rest, next, previous);
            self.runs.start(run + chunks, record);
            self.live += 1;
        } else {
            self.unlink(size, next, previous);
            self.carve(run, size, start, chunks);
        }
        Some(address(start))
    }

    /// Takes exactly the run of `size` bytes at `address`; both are multiples of 2 MiB, inside the
    /// range for heaps.
    pub(crate) fn take_at(&mut self, address: u64, size: u64) -> Result<(), Taken> {
        self.merge_spares();
        let (first, last) = (gib(address), gib(address + size - 1));
        let heap = self.owner(first);
        if (first..=last).any(|gib| self.owner(gib) != heap) {
            return Err(Taken::Border);
        }
        if heap == OTHER {
            return Err(Taken::Reserved);
        }
        if heap == 0 {
            return Err(self.window_around(first, last).map_or(Taken::Border, Taken::NeedsHeap));
        }
        let (start, chunks) = (chunk(address), (size / HUGE_PAGE) as u32);
        let run = self.runs.run_of(start);
        let [size, next, previous] = self.runs.record(run);
        if size & FREE == 0 || run + (size >> 1) < start + chunks {
            return Err(Taken::Reserved);
        }
        self.unlink(size >> 1, next, previous);
        self.carve(run, size >> 1, start, chunks);
        Ok(())
    }

    /// Frees the run of `size` bytes that was taken at `address`.
    #[inline]
    pub(crate) fn free(&mut self, address: u64, size: u64) {
        let (run, size) = (chunk(address), (size / HUGE_PAGE) as u32);
        debug_assert_eq!(self.runs.size(run), size, "not as it was taken");
        let spare = std::mem::replace(&mut self.spares[place(size)], run);
        // What is in the same place has the same size, or is the large one.
        let spare_size = if size < SMALL as u32 { size } else { std::mem::replace(&mut self.large, size) };
        self.live -= 1;
        if spare != NONE {
            self.merge(spare, spare_size);
        }
    }

    /// Puts the spare runs into the lists.
    #[cold]
    fn merge_spares(&mut self) {
        for spare in std::mem::replace(&mut self.spares, [NONE; SMALL]) {
            if spare != NONE {
                self.merge(spare, self.runs.size(spare));
            }
        }
    }

    /// Puts a run into the lists, together with its free neighbours.
    #[inline(always)]
    fn merge(&mut self, mut run: u32, mut size: u32) {
        if !self.is_border(run) {
            let before = self.runs.run_of(run - 1);
            let [more, next, previous] = self.runs.record(before);
            if more & FREE != 0 {
                size += more >> 1;
                self.runs.clear(run);
                self.unlink(more >> 1, next, previous);
                run = before;
            }
        }
        let end = run + size;
        if !self.is_border(end) {
            let [more, next, previous] = self.runs.record(end);
            if more & FREE != 0 {
                size += more >> 1;
                self.runs.clear(end);
                if is_same_class(size, more >> 1) {
                    // It takes its neighbour's place in the list.
                    *self.runs.record_mut(run) = self.replace(run, size, next, previous);
                    return;
                }
                self.unlink(more >> 1, next, previous);
            }
        }
        *self.runs.record_mut(run) = self.link(run, size);
    }

    /// Whether another heap, or none, is before a chunk.
    #[inline(always)]
    fn is_border(&self, chunk: u32) -> bool {
        chunk % GIB_CHUNKS == 0 && self.is_border_gib((chunk / GIB_CHUNKS) as usize)
    }

    fn is_border_gib(&self, gib: usize) -> bool {
        gib == 0 || self.owner(gib) != self.owner(gib - 1)
    }

    /// The number of the heap of a GiB plus one, or 0.
    fn owner(&self, gib: usize) -> u16 {
        self.owners.get(gib).copied().unwrap_or(0)
    }

    /// The window of the next heap, large enough for `size` bytes: 128 GiB if there is room. `None`
    /// if the address space is used up.
    pub(crate) fn next_window(&self, size: u64) -> Option<Window> {
        let wanted = size.div_ceil(HEAP_UNIT) as usize;
        let most = (RESERVE_HEAP_MAX / HEAP_UNIT) as usize;
        let mut gap = 0;
        for gib in 0..=GIBS {
            let free = gib < GIBS && self.owners.get(gib).is_none_or(|&owner| owner == 0);
            if free {
                gap += 1;
            }
            if gap == most || (!free && gap >= wanted) {
                return Some(window(gib + usize::from(free) - gap, gap));
            }
            if !free {
                gap = 0;
            }
        }
        None
    }

    /// A heap was enabled there.
    pub(crate) fn add_heap(&mut self, window: Window) {
        self.runs.make();
        self.owners.resize(GIBS, 0);
        self.heaps.push(window);
        for gib in gib(window.start)..=gib(window.start + window.size - 1) {
            self.owners[gib] = self.heaps.len() as u16;
        }
        let run = chunk(window.start);
        let record = self.link(run, (window.size / HUGE_PAGE) as u32);
        self.runs.start(run, record);
    }

    /// Takes whole GiB for a heap that is not for reservations, at the upper end of the addresses,
    /// where they are in the way of no 128 GiB heap. `None` if the address space is used up.
    pub(crate) fn take_window(&mut self, size: u64) -> Option<Window> {
        let gibs = usize::try_from(size.div_ceil(HEAP_UNIT)).ok().filter(|&gibs| gibs > 0 && gibs <= GIBS)?;
        self.owners.resize(GIBS, 0);
        let start = (0..=GIBS - gibs).rev().find(|&at| self.owners[at..at + gibs].iter().all(|&owner| owner == 0))?;
        self.owners[start..start + gibs].fill(OTHER);
        self.live += 1;
        Some(window(start, gibs))
    }

    /// Frees what [`Arena::take_window`] took.
    pub(crate) fn free_window(&mut self, window: Window) {
        self.owners[gib(window.start)..=gib(window.start + window.size - 1)].fill(0);
        self.live -= 1;
    }

    /// A free window that covers these GiB: the 128 GiB one that [`Arena::next_window`] would make,
    /// if that is free, or just them.
    fn window_around(&self, first: usize, last: usize) -> Option<Window> {
        let most = (RESERVE_HEAP_MAX / HEAP_UNIT) as usize;
        if last - first + 1 > most {
            return None;
        }
        let start = first / most * most;
        let free = |gib: usize| self.owners.get(gib).is_none_or(|&owner| owner == 0);
        if last < start + most && start + most <= GIBS && (start..start + most).all(free) {
            return Some(window(start, most));
        }
        Some(window(first, last - first + 1))
    }

    /// A free run of at least `chunks`, whatever its place.
    #[inline]
    fn find(&self, chunks: u32) -> Option<u32> {
        // Round up to the next class, all of whose runs are long enough.
        let rounded = chunks + (1 << step_bits(chunks)) - 1;
        if rounded > HEAP_CHUNKS {
            return None;
        }
        let class = class(rounded);
        let mut word = class / 64;
        let mut filled = self.filled[word] & (u64::MAX << (class % 64));
        while filled == 0 {
            word += 1;
            filled = *self.filled.get(word)?;
        }
        Some(self.first[word * 64 + filled.trailing_zeros() as usize])
    }

    /// The same for one that [`Arena::find`] did not see: kept aside, or long enough but in a class
    /// with shorter ones, or only just aligned.
    #[cold]
    fn search(&mut self, chunks: u32, alignment: u32) -> Option<u32> {
        self.merge_spares();
        for &first in &self.first[class(chunks)..] {
            let mut run = first;
            while run != NONE {
                let [size, next, _] = self.runs.record(run);
                if run.next_multiple_of(alignment) + chunks <= run + (size >> 1) {
                    return Some(run);
                }
                run = next;
            }
        }
        None
    }

    /// Makes `start..start + chunks` of an unlinked free run taken, and links what is left of it.
    #[inline(always)]
    fn carve(&mut self, run: u32, size: u32, start: u32, chunks: u32) {
        let end = run + size;
        if end > start + chunks {
            let record = self.link(start + chunks, end - (start + chunks));
            self.runs.start(start + chunks, record);
        }
        if start > run {
            *self.runs.record_mut(run) = self.link(run, start - run);
            self.runs.start(start, taken(chunks));
        } else {
            *self.runs.record_mut(start) = taken(chunks);
        }
        self.live += 1;
    }

    /// Puts a free run at the head of its list. Returns its record.
    #[inline(always)]
    fn link(&mut self, run: u32, size: u32) -> [u32; 3] {
        let class = class(size);
        let next = std::mem::replace(&mut self.first[class], run);
        if next != NONE {
            self.runs.record_mut(next)[PREVIOUS] = run;
        }
        self.filled[class / 64] |= 1 << (class % 64);
        [size << 1 | FREE, next, NONE]
    }

    /// Puts a free run into the place of another of the same class in its list, between two.
    /// Returns its record.
    #[inline(always)]
    fn replace(&mut self, run: u32, size: u32, next: u32, previous: u32) -> [u32; 3] {
        if next != NONE {
            self.runs.record_mut(next)[PREVIOUS] = run;
        }
        if previous != NONE {
            self.runs.record_mut(previous)[NEXT] = run;
        } else {
            self.first[class(size)] = run;
        }
        [size << 1 | FREE, next, previous]
    }

    /// Takes a free run of a size out of its list, from between two.
    #[inline(always)]
    fn unlink(&mut self, size: u32, next: u32, previous: u32) {
        if next != NONE {
            self.runs.record_mut(next)[PREVIOUS] = previous;
        }
        if previous != NONE {
            self.runs.record_mut(previous)[NEXT] = next;
            return;
        }
        let class = class(size);
        self.first[class] = next;
        if next == NONE {
            self.filled[class / 64] &= !(1 << (class % 64));
        }
    }
}

/// The record of a run that is not free.
#[inline(always)]
fn taken(chunks: u32) -> [u32; 3] {
    [chunks << 1, 0, 0]
}

/// The class of a size. Each of the eight steps of a power of two is a class, but for the smallest
/// sizes, where a step would be less than a chunk.
#[inline(always)]
const fn class(chunks: u32) -> usize {
    let step = step_bits(chunks);
    (step * STEPS + (chunks >> step)) as usize
}

/// The step of a size's power of two, as a power of two.
#[inline(always)]
const fn step_bits(chunks: u32) -> u32 {
    (chunks | STEPS).ilog2() - STEP_BITS
}

/// Whether a smaller size is of the same class.
#[inline(always)]
fn is_same_class(size: u32, smaller: u32) -> bool {
    (size ^ smaller) >> step_bits(size) == 0
}

/// The place of the spare run of a size.
#[inline(always)]
fn place(chunks: u32) -> usize {
    if chunks < SMALL as u32 { chunks as usize } else { 0 }
}

#[inline(always)]
fn chunk(address: u64) -> u32 {
    ((address - NORMAL_START) / HUGE_PAGE) as u32
}

#[inline(always)]
fn address(chunk: u32) -> u64 {
    NORMAL_START + u64::from(chunk) * HUGE_PAGE
}

#[inline]
fn gib(address: u64) -> usize {
    ((address - NORMAL_START) / HEAP_UNIT) as usize
}

fn window(gib: usize, count: usize) -> Window {
    Window { start: NORMAL_START + gib as u64 * HEAP_UNIT, size: count as u64 * HEAP_UNIT }
}

const _: () = {
    // A GiB is a whole number of alignments that can be wanted and of pages of records; numbers of
    // heaps and of records fit.
    assert!(GIB_CHUNKS == 512 && GIB_CHUNKS as usize % PAGE == 0);
    assert!(GIBS < u16::MAX as usize && ((CHUNKS + PAGE) as u64) < NONE as u64);
};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const MIB2: u64 = HUGE_PAGE;
    const GIB: u64 = HEAP_UNIT;

    /// Takes like a reservation does: with a new heap when it needs one.
    fn reserve(arena: &mut Arena, size: u64, alignment: u64) -> Option<u64> {
        arena.take(size, alignment).or_else(|| {
            let window = arena.next_window(size)?;
            arena.add_heap(window);
            arena.take(size, alignment)
        })
    }

    fn reserve_at(arena: &mut Arena, address: u64, size: u64) -> Result<(), Taken> {
        match arena.take_at(address, size) {
            Err(Taken::NeedsHeap(window)) => {
                arena.add_heap(window);
                arena.take_at(address, size)
            }
            result => result,
        }
    }

    /// Everything that must hold of the tables, whatever happened before.
    fn check(arena: &Arena, taken: &BTreeMap<u64, u64>) {
        let runs = &arena.runs;
        let mut linked = 0;
        for (of, &first) in arena.first.iter().enumerate() {
            let mut run = first;
            assert_eq!(arena.filled[of / 64] >> (of % 64) & 1 == 1, run != NONE);
            let mut before = NONE;
            while run != NONE {
                let [_, next, previous] = runs.record(run);
                assert!(runs.is_free(run));
                assert_eq!(class(runs.size(run)), of);
                assert_eq!(previous, before);
                linked += 1;
                before = run;
                run = next;
            }
        }
        let mut found = BTreeMap::new();
        let mut spares: Vec<u32> = arena.spares.into_iter().filter(|&spare| spare != NONE).collect();
        for heap in &arena.heaps {
            let mut run = chunk(heap.start);
            let end = run + (heap.size / MIB2) as u32;
            let mut free_before = false;
            while run < end {
                assert_eq!(runs.run_of(run), run);
                let size = runs.size(run);
                assert_eq!(runs.run_of(run + size - 1), run);
                if let Some(spare) = spares.iter().position(|&spare| spare == run) {
                    spares.remove(spare);
                    assert!(!runs.is_free(run));
                    assert_eq!(arena.spares[place(size)], run);
                    assert!(size < SMALL as u32 || size == arena.large);
                } else if runs.is_free(run) {
                    assert!(!free_before, "free neighbours are merged");
                    linked -= 1;
                } else {
                    found.insert(address(run), u64::from(size) * MIB2);
                }
                free_before = runs.is_free(run);
                run += size;
            }
            assert_eq!(run, end, "no run crosses the end of a heap");
        }
        assert_eq!(linked, 0, "every free run is in exactly one list");
        assert!(spares.is_empty(), "every spare run is in a heap");
        assert_eq!(&found, taken);
        assert_eq!(arena.live, taken.len());
    }

    #[derive(Debug, Clone)]
    enum Action {
        Take { chunks: u64, alignment: u32 },
        TakeAt { chunk: u64, chunks: u64 },
        Free(prop::sample::Index),
    }

    fn action() -> impl Strategy<Value = Action> {
        let chunks = prop_oneof![1..10u64, 1..600u64, 1..66_000u64];
        prop_oneof![
            4 => (chunks.clone(), 0..10u32).prop_map(|(chunks, alignment)| Action::Take { chunks, alignment }),
            1 => (0..300_000u64, chunks).prop_map(|(chunk, chunks)| Action::TakeAt { chunk, chunks }),
            4 => any::<prop::sample::Index>().prop_map(Action::Free),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn runs_never_overlap_are_aligned_and_merge_when_freed(actions in prop::collection::vec(action(), 1..120)) {
            let mut arena = Arena::new();
            let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
            for action in actions {
                match action {
                    Action::Take { chunks, alignment } => {
                        let (size, alignment) = (chunks * MIB2, MIB2 << alignment);
                        match reserve(&mut arena, size, alignment) {
                            Some(address) => {
                                prop_assert_eq!(address % alignment, 0);
                                let before = taken.range(..address + size).next_back();
                                prop_assert!(before.is_none_or(|(&start, &length)| start + length <= address));
                                taken.insert(address, size);
                            }
                            // 42 heaps of 128 GiB are more than 120 actions can fill, unless one is
                            // larger than a heap.
                            None => prop_assert!(size > RESERVE_HEAP_MAX),
                        }
                    }
                    Action::TakeAt { chunk, chunks } => {
                        let (address, size) = (NORMAL_START + chunk * MIB2, chunks * MIB2);
                        let before = taken.range(..address + size).next_back();
                        let overlaps = before.is_some_and(|(&start, &length)| start + length > address);
                        match reserve_at(&mut arena, address, size) {
                            Ok(()) => {
                                prop_assert!(!overlaps);
                                taken.insert(address, size);
                            }
                            Err(Taken::Reserved) => prop_assert!(overlaps),
                            Err(taken) => prop_assert_eq!(taken, Taken::Border),
                        }
                    }
                    Action::Free(index) => {
                        if !taken.is_empty() {
                            let (&address, &size) = taken.iter().nth(index.index(taken.len())).unwrap();
                            taken.remove(&address);
                            arena.free(address, size);
                        }
                    }
                }
                check(&arena, &taken);
            }
            for (&address, &size) in &taken {
                arena.free(address, size);
            }
            check(&arena, &BTreeMap::new());
            prop_assert!(arena.is_idle());
        }
    }

    #[test]
    fn classes_follow_each_other_without_a_gap_and_grow_by_an_eighth() {
        for size in 1..=HEAP_CHUNKS {
            assert!((class(size - 1)..=class(size - 1) + 1).contains(&class(size)), "{size}");
            assert!(class(size + size.div_ceil(8)) > class(size), "{size}");
        }
        assert_eq!(class(HEAP_CHUNKS), CLASSES - 1);
    }

    #[test]
    fn sizes_are_of_the_same_class_if_their_classes_are() {
        for size in 1..700 {
            for smaller in 0..size {
                assert_eq!(is_same_class(size, smaller), class(size) == class(smaller), "{size} {smaller}");
            }
        }
    }

    #[test]
    fn the_first_heap_is_128_gib_at_the_first_normal_address() {
        let arena = Arena::new();
        let window = arena.next_window(MIB2).unwrap();
        assert_eq!((window.index(), window.size()), (2816, 128 * GIB));
    }

    #[test]
    fn the_whole_range_can_be_reserved_and_then_no_more() {
        let mut arena = Arena::new();
        let mut addresses: Vec<u64> = (0..42).map(|_| reserve(&mut arena, 128 * GIB, GIB).unwrap()).collect();
        assert_eq!(reserve(&mut arena, MIB2, MIB2), None);
        assert_eq!(arena.next_window(MIB2), None);
        addresses.sort_unstable();
        assert_eq!(addresses[0], NORMAL_START);
        assert_eq!(addresses[41] + 128 * GIB, DYNAMIC_START);
        arena.free(addresses[7], 128 * GIB);
        assert_eq!(reserve(&mut arena, 128 * GIB, GIB), Some(addresses[7]));
    }

    #[test]
    fn a_fixed_range_across_two_heaps_that_would_be_gets_a_heap_of_its_own() {
        let mut arena = Arena::new();
        let address = NORMAL_START + 127 * GIB + 3 * MIB2;
        assert_eq!(reserve_at(&mut arena, address, 2 * GIB), Ok(()));
        assert_eq!(arena.heaps[0], window(127, 3));
        assert_eq!(reserve_at(&mut arena, address + GIB, MIB2), Err(Taken::Reserved));
        assert_eq!(reserve_at(&mut arena, NORMAL_START + 126 * GIB, 2 * GIB), Err(Taken::Border));
        // The next heap goes into the gap before it, as large as the gap is.
        assert_eq!(arena.next_window(GIB), Some(window(0, 127)));
        assert_eq!(arena.next_window(128 * GIB), Some(window(130, 128)));
    }

    #[test]
    fn a_fragmented_heap_is_searched_before_another_is_enabled() {
        let mut arena = Arena::new();
        // Leave holes of 9 and 10 chunks, which are of one class.
        let blocks: Vec<u64> =
            [9u64, 1, 10, 1].iter().map(|chunks| reserve(&mut arena, chunks * MIB2, MIB2).unwrap()).collect();
        let rest = reserve(&mut arena, 128 * GIB - 21 * MIB2, MIB2).unwrap();
        arena.free(blocks[0], 9 * MIB2);
        arena.free(blocks[2], 10 * MIB2);
        assert_eq!(arena.take(10 * MIB2, MIB2), Some(blocks[2]));
        assert_eq!(arena.take(9 * MIB2, MIB2), Some(blocks[0]));
        assert_eq!(arena.take(MIB2, MIB2), None);
        arena.free(rest, 128 * GIB - 21 * MIB2);
        assert_eq!(arena.take(MIB2, MIB2), Some(rest), "what is kept aside is merged when it is needed");
        arena.free(rest, MIB2);
    }

    #[test]
    fn an_idle_arena_forgets_its_heaps_and_starts_anew() {
        let mut arena = Arena::new();
        let address = reserve(&mut arena, GIB, GIB).unwrap();
        assert!(!arena.is_idle());
        arena.free(address, GIB);
        assert!(arena.is_idle());
        assert_eq!(arena.take_heaps(), [window(0, 128)]);
        assert_eq!(arena.take(MIB2, MIB2), None);
        assert_eq!(reserve(&mut arena, GIB, GIB), Some(address));
    }

    #[test]
    fn a_small_size_is_taken_again_from_where_it_was_freed() {
        let mut arena = Arena::new();
        let sizes: Vec<u64> = (1..64).collect();
        let places: Vec<u64> = sizes.iter().map(|size| reserve(&mut arena, size * MIB2, MIB2).unwrap()).collect();
        places.iter().zip(&sizes).for_each(|(&address, size)| arena.free(address, size * MIB2));
        for (size, &address) in sizes.iter().zip(&places).rev() {
            assert_eq!(arena.take(size * MIB2, MIB2), Some(address), "{size}");
        }
        // One that is not aligned as it should be is left aside.
        arena.free(places[0], MIB2);
        arena.free(places[1], 2 * MIB2);
        let aligned = arena.take(2 * MIB2, GIB).unwrap();
        assert_eq!(aligned % GIB, 0);
        assert_ne!(aligned, places[1]);
        assert_eq!(arena.take(2 * MIB2, MIB2), Some(places[1]));
    }

    #[test]
    fn runs_of_neighbouring_heaps_are_not_merged() {
        let mut arena = Arena::new();
        let heaps: Vec<u64> = (0..3).map(|_| reserve(&mut arena, 128 * GIB, GIB).unwrap()).collect();
        for &address in &heaps {
            arena.free(address, 128 * GIB);
        }
        arena.merge_spares();
        check(&arena, &BTreeMap::new());
        assert_eq!(arena.heaps.len(), 3);
    }
}
