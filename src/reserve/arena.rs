//! Which addresses are reserved: the kernel never chooses them, so we do.
//!
//! The kernel wants reservations inside *heaps*: runs of whole GiB, at most 128 GiB each, whose
//! enabling takes its exclusive lock and messages every device. So heaps are few and big and
//! enabled when needed, and inside them this arena hands out runs of 2 MiB chunks by itself. Free
//! runs are kept in lists by size class (powers of two, each in eight steps) with a bit for each
//! list that is not empty, so that finding one, and merging it with its neighbours when it comes
//! back, takes the same few steps however many there are. The run that came back last is kept aside
//! for a moment, since programs tend to ask for the same size again.

use crate::driver::svm::{DYNAMIC_START, HEAP_UNIT, HUGE_PAGE, NORMAL_START, RESERVE_HEAP_MAX, SVM_START};

/// Chunks of the largest heap; a chunk's number inside its heap has 16 bits.
const HEAP_CHUNKS: u32 = (RESERVE_HEAP_MAX / HUGE_PAGE) as u32;
const CHUNK_BITS: u32 = HEAP_CHUNKS.trailing_zeros();
/// GiB that heaps can be made of: the range in which the vendor's library puts ordinary heaps, up
/// to the end of the SVM segment.
const GIBS: usize = ((DYNAMIC_START - NORMAL_START) / HEAP_UNIT) as usize;

/// Steps of a power of two.
const STEPS: u32 = 8;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Sizes 1 to 7 have a list each, then each power of two up to 65536 has eight.
const POWERS: usize = (CHUNK_BITS - STEP_BITS + 2) as usize;

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
    heaps: Vec<Heap>,
    /// For each GiB the number of its heap plus one, or 0. Filled when the first heap comes.
    owners: Vec<u16>,
    /// Bit per power of two that has a free run.
    powers: u32,
    /// Bit per step of each power.
    steps: [u8; POWERS],
    /// First free run of each class: heap number and chunk in one.
    first: [[u32; STEPS as usize]; POWERS],
    /// Number of reservations.
    live: usize,
    /// The run that came back last, with its size: kept as it is for a reservation of the same
    /// size, and merged when another comes back or it is in the way. Its heap and chunk in one, or
    /// `NONE`.
    spare: u32,
    spare_chunks: u32,
}

#[derive(Debug)]
struct Heap {
    window: Window,
    chunks: u32,
    /// For the first chunk of each run: its size and whether it is free, and for free ones the next
    /// and previous run of its list.
    runs: Vec<[u32; 3]>,
    /// A bit for each chunk that starts a run.
    starts: Vec<u64>,
    /// A bit for each word of `starts` that is not zero.
    summary: Vec<u64>,
}

const SIZE: usize = 0;
const NEXT: usize = 1;
const PREVIOUS: usize = 2;
const FREE: u32 = 1;

impl Heap {
    fn new(window: Window) -> Heap {
        let chunks = (window.size / HUGE_PAGE) as u32;
        let words = (chunks as usize).div_ceil(64);
        // All zero, so that the pages of these tables are not touched before they are needed.
        Heap {
            window,
            chunks,
            runs: vec![[0; 3]; chunks as usize],
            starts: vec![0; words],
            summary: vec![0; words.div_ceil(64)],
        }
    }

    #[inline]
    fn size(&self, chunk: u32) -> u32 {
        self.runs[chunk as usize][SIZE] >> 1
    }

    #[inline]
    fn is_free(&self, chunk: u32) -> bool {
        self.runs[chunk as usize][SIZE] & FREE != 0
    }

    /// Makes a run that starts at `chunk`.
    #[inline]
    fn set(&mut self, chunk: u32, size: u32, free: u32) {
        self.runs[chunk as usize][SIZE] = size << 1 | free;
        let word = chunk as usize / 64;
        self.starts[word] |= 1 << (chunk % 64);
        self.summary[word / 64] |= 1 << (word % 64);
    }

    /// No run starts at `chunk` any more: it was merged with the one before.
    #[inline]
    fn clear(&mut self, chunk: u32) {
        let word = chunk as usize / 64;
        self.starts[word] &= !(1 << (chunk % 64));
        if self.starts[word] == 0 {
            self.summary[word / 64] &= !(1 << (word % 64));
        }
    }

    /// The start of the run that contains `chunk`.
    #[inline]
    fn run_of(&self, chunk: u32) -> u32 {
        let mut word = chunk as usize / 64;
        let upto = self.starts[word] & (u64::MAX >> (63 - chunk % 64));
        if upto != 0 {
            return word as u32 * 64 + 63 - upto.leading_zeros();
        }
        // The word before with a bit in it. Chunk 0 always starts a run, so there is one.
        let mut block = word / 64;
        let mut words = self.summary[block] & ((1u64 << (word % 64)) - 1);
        while words == 0 && block > 0 {
            block -= 1;
            words = self.summary[block];
        }
        word = block * 64 + (63 - words.leading_zeros() as usize);
        word as u32 * 64 + 63 - self.starts[word].leading_zeros()
    }
}

impl Arena {
    /// Without heaps.
    pub(crate) fn new() -> Arena {
        Arena {
            heaps: Vec::new(),
            owners: Vec::new(),
            powers: 0,
            steps: [0; POWERS],
            first: [[NONE; STEPS as usize]; POWERS],
            live: 0,
            spare: NONE,
            spare_chunks: 0,
        }
    }

    /// Whether nothing is reserved.
    pub(crate) fn is_idle(&self) -> bool {
        self.live == 0
    }

    /// Forgets all heaps and returns them; nothing may be reserved.
    pub(crate) fn take_heaps(&mut self) -> Vec<Window> {
        let heaps = std::mem::replace(self, Arena::new()).heaps;
        heaps.into_iter().map(|heap| heap.window).collect()
    }

    /// Takes a run of `size` bytes at a multiple of `alignment`; both are multiples of 2 MiB, the
    /// alignment a power of two up to 1 GiB. `None` if no enabled heap has one.
    #[inline]
    pub(crate) fn take(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let chunks = u32::try_from(size / HUGE_PAGE).ok().filter(|&chunks| chunks <= HEAP_CHUNKS)?;
        let step = (alignment / HUGE_PAGE) as u32;
        if chunks == self.spare_chunks {
            let (heap, run) = split(self.spare);
            if run & (step - 1) == 0 {
                self.spare_chunks = 0;
                self.spare = NONE;
                self.live += 1;
                return Some(self.heaps[heap].window.start + u64::from(run) * HUGE_PAGE);
            }
        }
        self.take_from_lists(chunks, step)
    }

    // The steps of the lists are a few instructions each: a call would cost as much as the step, so
    // they are inlined by force.
    #[inline(always)]
    fn take_from_lists(&mut self, chunks: u32, step: u32) -> Option<u64> {
        // A run that is this long has an aligned part that fits.
        let (heap, run) = match self.find(chunks + (step - 1)) {
            Some(found) => found,
            None => {
                self.merge_spare();
                self.search(chunks, step)?
            }
        };
        // Heaps start at whole GiB, so chunks are aligned as their addresses are.
        let start = run.next_multiple_of(step);
        let rest = self.heaps[heap].size(run) - chunks;
        if start == run && rest > 0 && class(rest) == class(rest + chunks) {
            // What is left takes its place in the list.
            self.replace(heap, run, run + chunks, rest);
            self.heaps[heap].set(run, chunks, 0);
            self.live += 1;
        } else {
            self.unlink(heap, run);
            self.carve(heap, run, start, chunks);
        }
        Some(self.heaps[heap].window.start + u64::from(start) * HUGE_PAGE)
    }

    /// Takes exactly the run of `size` bytes at `address`; both are multiples of 2 MiB, inside the
    /// range for heaps.
    pub(crate) fn take_at(&mut self, address: u64, size: u64) -> Result<(), Taken> {
        self.merge_spare();
        let (first, last) = (gib(address), gib(address + size - 1));
        let owner = |gib: usize| self.owners.get(gib).copied().unwrap_or(0);
        let heap = owner(first);
        if (first..=last).any(|gib| owner(gib) != heap) {
            return Err(Taken::Border);
        }
        if heap == OTHER {
            return Err(Taken::Reserved);
        }
        if heap == 0 {
            return Err(self.window_around(first, last).map_or(Taken::Border, Taken::NeedsHeap));
        }
        let heap = usize::from(heap) - 1;
        let start = ((address - self.heaps[heap].window.start) / HUGE_PAGE) as u32;
        let chunks = (size / HUGE_PAGE) as u32;
        let run = self.heaps[heap].run_of(start);
        if !self.heaps[heap].is_free(run) || run + self.heaps[heap].size(run) < start + chunks {
            return Err(Taken::Reserved);
        }
        self.unlink(heap, run);
        self.carve(heap, run, start, chunks);
        Ok(())
    }

    /// Gives back the run that was taken at `address`.
    #[inline]
    pub(crate) fn free(&mut self, address: u64) {
        let Some(heap) = self.owners.get(gib(address)).and_then(|&owner| usize::from(owner).checked_sub(1)) else {
            return;
        };
        self.merge_spare();
        let table = &self.heaps[heap];
        let run = ((address - table.window.start) / HUGE_PAGE) as u32;
        self.spare = join(heap, run);
        self.spare_chunks = table.size(run);
        self.live -= 1;
    }

    /// Puts the spare run, if there is one, into the lists, together with its free neighbours.
    #[inline(always)]
    fn merge_spare(&mut self) {
        if self.spare != NONE {
            let (heap, run) = split(self.spare);
            self.spare = NONE;
            self.spare_chunks = 0;
            self.merge(heap, run);
        }
    }

    #[inline(always)]
    fn merge(&mut self, heap: usize, mut run: u32) {
        let table = &mut self.heaps[heap];
        let mut size = table.size(run);
        if run > 0 {
            let before = table.run_of(run - 1);
            if table.is_free(before) {
                size += table.size(before);
                table.clear(run);
                self.unlink(heap, before);
                run = before;
            }
        }
        let table = &mut self.heaps[heap];
        let next = run + size;
        if next < table.chunks && table.is_free(next) {
            let more = table.size(next);
            size += more;
            table.clear(next);
            if class(more) == class(size) {
                // It takes its neighbour's place in the list.
                return self.replace(heap, next, run, size);
            }
            self.unlink(heap, next);
        }
        self.link(heap, run, size);
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
        self.owners.resize(GIBS, 0);
        let heap = self.heaps.len();
        for gib in gib(window.start)..=gib(window.start + window.size - 1) {
            self.owners[gib] = heap as u16 + 1;
        }
        self.heaps.push(Heap::new(window));
        self.link(heap, 0, (window.size / HUGE_PAGE) as u32);
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
    fn find(&self, chunks: u32) -> Option<(usize, u32)> {
        // Round up to the next class, all of whose runs are long enough.
        let power = chunks.ilog2();
        let rounded = if power >= STEP_BITS { chunks + (1 << (power - STEP_BITS)) - 1 } else { chunks };
        if rounded > HEAP_CHUNKS {
            return None;
        }
        let (mut power, mut step) = class(rounded);
        let steps = self.steps[power] & (u8::MAX << step);
        if steps != 0 {
            step = steps.trailing_zeros() as usize;
        } else {
            let powers = self.powers & (u32::MAX << power << 1);
            if powers == 0 {
                return None;
            }
            power = powers.trailing_zeros() as usize;
            step = self.steps[power].trailing_zeros() as usize;
        }
        Some(split(self.first[power][step]))
    }

    /// The same for one that [`Arena::find`] did not see: long enough, but in a class with shorter
    /// ones, or only just aligned.
    #[cold]
    fn search(&self, chunks: u32, alignment: u32) -> Option<(usize, u32)> {
        let (least, _) = class(chunks);
        for power in least..POWERS {
            for first in self.first[power] {
                let mut at = first;
                while at != NONE {
                    let (heap, run) = split(at);
                    let size = self.heaps[heap].size(run);
                    if run.next_multiple_of(alignment) + chunks <= run + size {
                        return Some((heap, run));
                    }
                    at = self.heaps[heap].runs[run as usize][NEXT];
                }
            }
        }
        None
    }

    /// Makes `start..start + chunks` of an unlinked free run taken, and links what is left of it.
    #[inline(always)]
    fn carve(&mut self, heap: usize, run: u32, start: u32, chunks: u32) {
        let end = run + self.heaps[heap].size(run);
        if start > run {
            self.link(heap, run, start - run);
        }
        if end > start + chunks {
            self.link(heap, start + chunks, end - (start + chunks));
        }
        self.heaps[heap].set(start, chunks, 0);
        self.live += 1;
    }

    /// Makes a free run and puts it at the head of its list.
    #[inline]
    fn link(&mut self, heap: usize, run: u32, size: u32) {
        let (power, step) = class(size);
        let at = join(heap, run);
        let next = self.first[power][step];
        let table = &mut self.heaps[heap];
        table.set(run, size, FREE);
        table.runs[run as usize][NEXT] = next;
        table.runs[run as usize][PREVIOUS] = NONE;
        if next != NONE {
            let (heap, run) = split(next);
            self.heaps[heap].runs[run as usize][PREVIOUS] = at;
        }
        self.first[power][step] = at;
        self.steps[power] |= 1 << step;
        self.powers |= 1 << power;
    }

    /// Makes a free run that takes the place of another of the same class in its list.
    #[inline]
    fn replace(&mut self, heap: usize, old: u32, new: u32, size: u32) {
        let at = join(heap, new);
        let table = &mut self.heaps[heap];
        let [_, next, previous] = table.runs[old as usize];
        table.set(new, size, FREE);
        table.runs[new as usize][NEXT] = next;
        table.runs[new as usize][PREVIOUS] = previous;
        if next != NONE {
            let (heap, run) = split(next);
            self.heaps[heap].runs[run as usize][PREVIOUS] = at;
        }
        if previous != NONE {
            let (heap, run) = split(previous);
            self.heaps[heap].runs[run as usize][NEXT] = at;
        } else {
            let (power, step) = class(size);
            self.first[power][step] = at;
        }
    }

    /// Takes a free run out of its list.
    #[inline(always)]
    fn unlink(&mut self, heap: usize, run: u32) {
        let [size, next, previous] = self.heaps[heap].runs[run as usize];
        if next != NONE {
            let (heap, run) = split(next);
            self.heaps[heap].runs[run as usize][PREVIOUS] = previous;
        }
        if previous != NONE {
            let (heap, run) = split(previous);
            self.heaps[heap].runs[run as usize][NEXT] = next;
            return;
        }
        let (power, step) = class(size >> 1);
        self.first[power][step] = next;
        if next == NONE {
            self.steps[power] &= !(1 << step);
            if self.steps[power] == 0 {
                self.powers &= !(1 << power);
            }
        }
    }
}

/// The class of a size: power of two and step, or 0 and the size itself for the smallest.
#[inline]
fn class(chunks: u32) -> (usize, usize) {
    if chunks < STEPS {
        return (0, chunks as usize);
    }
    let power = chunks.ilog2();
    ((power - STEP_BITS + 1) as usize, (chunks >> (power - STEP_BITS)) as usize & (STEPS as usize - 1))
}

#[inline]
fn join(heap: usize, chunk: u32) -> u32 {
    (heap as u32) << CHUNK_BITS | chunk
}

#[inline]
fn split(at: u32) -> (usize, u32) {
    ((at >> CHUNK_BITS) as usize, at & (HEAP_CHUNKS - 1))
}

#[inline]
fn gib(address: u64) -> usize {
    ((address - NORMAL_START) / HEAP_UNIT) as usize
}

fn window(gib: usize, count: usize) -> Window {
    Window { start: NORMAL_START + gib as u64 * HEAP_UNIT, size: count as u64 * HEAP_UNIT }
}

const _: () = {
    // A GiB is a whole number of alignments that can be asked for, and heap numbers fit beside a
    // chunk's.
    assert!(HEAP_UNIT / HUGE_PAGE == 512);
    assert!(GIBS < u16::MAX as usize && (GIBS as u64) << CHUNK_BITS < NONE as u64);
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
        let mut linked = 0;
        for power in 0..POWERS {
            assert_eq!(arena.powers >> power & 1 == 1, arena.steps[power] != 0);
            for step in 0..STEPS as usize {
                let mut at = arena.first[power][step];
                assert_eq!(arena.steps[power] >> step & 1 == 1, at != NONE);
                let mut previous = NONE;
                while at != NONE {
                    let (heap, run) = split(at);
                    let heap = &arena.heaps[heap];
                    assert!(heap.is_free(run));
                    assert_eq!(class(heap.size(run)), (power, step));
                    assert_eq!(heap.runs[run as usize][PREVIOUS], previous);
                    linked += 1;
                    previous = at;
                    at = heap.runs[run as usize][NEXT];
                }
            }
        }
        let mut found = BTreeMap::new();
        let spare = (arena.spare != NONE).then(|| split(arena.spare));
        for (number, heap) in arena.heaps.iter().enumerate() {
            let mut chunk = 0;
            let mut free_before = false;
            while chunk < heap.chunks {
                assert_eq!(heap.run_of(chunk), chunk);
                let size = heap.size(chunk);
                assert_eq!(heap.run_of(chunk + size - 1), chunk);
                if spare == Some((number, chunk)) {
                    assert!(!heap.is_free(chunk));
                    assert_eq!(size, arena.spare_chunks);
                } else if heap.is_free(chunk) {
                    assert!(!free_before, "free neighbours are merged");
                    linked -= 1;
                } else {
                    found.insert(heap.window.start + u64::from(chunk) * MIB2, u64::from(size) * MIB2);
                }
                free_before = heap.is_free(chunk);
                chunk += size;
            }
            assert_eq!(chunk, heap.chunks);
        }
        assert_eq!(linked, 0, "every free run is in exactly one list");
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
                            let (&address, _) = taken.iter().nth(index.index(taken.len())).unwrap();
                            taken.remove(&address);
                            arena.free(address);
                        }
                    }
                }
                check(&arena, &taken);
            }
            for &address in taken.keys() {
                arena.free(address);
            }
            check(&arena, &BTreeMap::new());
            prop_assert!(arena.is_idle());
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
        arena.free(addresses[7]);
        assert_eq!(reserve(&mut arena, 128 * GIB, GIB), Some(addresses[7]));
    }

    #[test]
    fn a_fixed_range_across_two_heaps_that_would_be_gets_a_heap_of_its_own() {
        let mut arena = Arena::new();
        let address = NORMAL_START + 127 * GIB + 3 * MIB2;
        assert_eq!(reserve_at(&mut arena, address, 2 * GIB), Ok(()));
        assert_eq!(arena.heaps[0].window, window(127, 3));
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
        arena.free(blocks[0]);
        arena.free(blocks[2]);
        assert_eq!(arena.take(10 * MIB2, MIB2), Some(blocks[2]));
        assert_eq!(arena.take(9 * MIB2, MIB2), Some(blocks[0]));
        assert_eq!(arena.take(MIB2, MIB2), None);
        arena.free(rest);
        assert_eq!(arena.take(MIB2, MIB2), Some(rest), "what is kept aside is merged when it is needed");
        arena.free(rest);
    }

    #[test]
    fn an_idle_arena_forgets_its_heaps_and_starts_anew() {
        let mut arena = Arena::new();
        let address = reserve(&mut arena, GIB, GIB).unwrap();
        assert!(!arena.is_idle());
        arena.free(address);
        assert!(arena.is_idle());
        assert_eq!(arena.take_heaps(), [window(0, 128)]);
        assert_eq!(arena.take(MIB2, MIB2), None);
        assert_eq!(reserve(&mut arena, GIB, GIB), Some(address));
    }
}
