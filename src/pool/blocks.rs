//! Which parts of a tag's addresses are in use.
//!
//! Addresses are used, free, or a hole without memory, in runs of 4 KiB pages. A segregated fit
//! chooses among free runs and holes; a map finds used runs by address. Blocks of up to 32 KiB are
//! cut from larger ones (`small_blocks.rs`).
//!
//! The cost: sizes are rounded up to a class at most a fifth larger up to 32 KiB, and to 4 KiB
//! beyond. A request needs no new memory if some free run is a sixteenth larger than the request
//! together with its alignment. When there is no new memory, [`Blocks::search`] looks at every free
//! run and misses none that fits. Blocks are never moved, so in the worst case the memory in use is
//! exceeded by a factor of log2(largest / smallest size) / 2 + 1, as for every such allocator
//! (Robson 1974). Tags do not multiply that, but each may have a last handle that is nearly empty.

use super::Statistics;
use super::small_blocks::{self, SmallRun};
use crate::driver::svm::GIANT_PAGE;
use crate::range_map::RangeMap;
use crate::reserve::ReserveOptions;
use crate::segregated_fit::{RunState, SegregatedFit};
use std::collections::BTreeSet;
use std::ops::Range;

const PAGE: u64 = 4096;

/// The size and the alignment of a block, both possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockRequest {
    /// The size that the block will have.
    pub(super) size: u64,
    alignment: u64,
    /// The class of a small block.
    class: Option<usize>,
}

impl BlockRequest {
    /// A request for 1 byte to 128 GiB, aligned to a power of two up to 1 GiB; `None` for others.
    pub(super) fn new(size: u64, alignment: u64) -> Option<BlockRequest> {
        let possible = alignment.is_power_of_two() && alignment <= GIANT_PAGE;
        if size == 0 || size > ReserveOptions::MAX_SIZE || !possible {
            return None;
        }
        let rounded = size.next_multiple_of(alignment);
        if rounded <= small_blocks::LARGEST && alignment <= PAGE {
            let class = small_blocks::class_of(rounded);
            let fits = small_blocks::size_of_class(class) % alignment == 0;
            let class = if fits { class } else { small_blocks::class_of(rounded.next_power_of_two()) };
            return Some(BlockRequest { size: small_blocks::size_of_class(class), alignment, class: Some(class) });
        }
        Some(BlockRequest::in_pages(size, alignment))
    }

    fn in_pages(size: u64, alignment: u64) -> BlockRequest {
        BlockRequest { size: size.next_multiple_of(PAGE), alignment: alignment.max(PAGE), class: None }
    }

    /// How much is cut from free memory: the block, or the run of a small block.
    pub(super) fn run_size(self) -> u64 {
        self.class.map_or(self.size, small_blocks::run_size)
    }

    /// The alignment of that.
    pub(super) fn run_alignment(self) -> u64 {
        if self.class.is_some() { PAGE } else { self.alignment }
    }
}

/// A hole, and how much free memory is right before and after it.
#[derive(Debug, Clone)]
pub(super) struct Hole {
    pub(super) range: Range<u64>,
    pub(super) before: u64,
    pub(super) after: u64,
}

/// A block in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UsedBlock {
    pub(super) address: u64,
    pub(super) size: u64,
    /// The number of its run, if it is a small block.
    small_run: Option<u32>,
    generation: u64,
}

/// Used pages: one block, or a run of small blocks.
#[derive(Debug)]
struct Used {
    /// The number of their run in the segregated fit.
    run: u32,
    /// The number of a run of small blocks.
    small_run: Option<u32>,
    /// Of one block: whether no handle owns it.
    disowned: bool,
}

#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The reservations, each with the number of its first run.
    areas: RangeMap<u32, PAGE>,
    fit: SegregatedFit<PAGE>,
    used: RangeMap<Used, PAGE>,
    small_runs: Vec<SmallRun>,
    /// Numbers of small runs that are not in use.
    spare: Vec<u32>,
    /// The small runs of each class that have a free block.
    with_room: [BTreeSet<u32>; small_blocks::CLASSES],
    /// Number of resets. Blocks with an older number are not in use any more.
    generation: u64,
    /// In use, peak and number of blocks; the rest is 0.
    statistics: Statistics,
}

impl Blocks {
    pub(super) fn statistics(&self) -> Statistics {
        Statistics { largest_free: self.fit.largest_free(), ..self.statistics }
    }

    /// Adds the addresses of a reservation, as a hole.
    pub(super) fn add_area(&mut self, start: u64, size: u64) {
        let first = self.fit.add_area(start, size, RunState::Hole);
        // Reservations do not overlap.
        let _ = self.areas.insert(start, size, first);
    }

    /// Removes the addresses of a reservation that is one hole.
    pub(super) fn remove_area(&mut self, start: u64) {
        if let Some(first) = self.areas.remove(start) {
            self.fit.remove_area(first);
        }
    }

    /// The run around an address: that of the used pages before it, or one of the few after them.
    fn run_at(&self, address: u64) -> Option<u32> {
        let area = self.areas.at(address)?;
        let before = self.used.last_until(address).filter(|before| before.start >= area.start);
        let mut run = before.map_or(area.value, |before| before.value.run);
        while self.fit[run].end() <= address {
            run = self.fit.after(run)?;
        }
        Some(run)
    }

    /// Changes the state of a range that lies in one run. Returns the run that it is in then.
    fn set(&mut self, range: &Range<u64>, state: RunState) -> Option<u32> {
        let run = self.run_at(range.start).filter(|&run| range.end <= self.fit[run].end())?;
        Some(self.fit.set(run, range.start, range.end - range.start, state))
    }

    /// Makes memory free that was mapped just now, or was set aside. Returns its free run.
    pub(super) fn add_memory(&mut self, range: &Range<u64>) -> Option<u32> {
        self.set(range, RunState::Free)
    }

    /// Makes a hole of memory that was set aside and is unmapped now.
    pub(super) fn remove_memory(&mut self, range: &Range<u64>) {
        self.set(range, RunState::Hole);
    }

    /// Sets free memory aside that is about to be unmapped.
    pub(super) fn set_aside(&mut self, range: &Range<u64>) {
        self.set(range, RunState::Used);
    }

    /// Whether a range is part of a hole.
    pub(super) fn is_hole(&self, range: &Range<u64>) -> bool {
        let run = self.run_at(range.start).map(|run| self.fit[run]);
        run.is_some_and(|run| run.state == RunState::Hole && range.end <= run.end())
    }

    /// A small hole of at least `size` bytes.
    pub(super) fn hole(&self, size: u64) -> Option<Hole> {
        self.fit.find(RunState::Hole, size, PAGE).map(|(run, _)| self.hole_of(run))
    }

    /// All holes.
    pub(super) fn holes(&self) -> impl Iterator<Item = Hole> {
        self.fit.all(RunState::Hole, PAGE).map(|run| self.hole_of(run))
    }

    fn hole_of(&self, run: u32) -> Hole {
        let free = |neighbour: Option<u32>| {
            let run = neighbour.map(|run| self.fit[run]).filter(|run| run.state == RunState::Free);
            run.map_or(0, |run| run.size)
        };
        let (before, after) = (free(self.fit.before(run)), free(self.fit.after(run)));
        Hole { range: self.fit[run].start..self.fit[run].end(), before, after }
    }

    /// Allocates a block from free memory. A handle owns it.
    pub(super) fn allocate(&mut self, request: BlockRequest) -> Option<UsedBlock> {
        if let Some(block) = request.class.and_then(|class| self.take_small(class)) {
            return Some(block);
        }
        let (run, start) = self.fit.find(RunState::Free, request.run_size(), request.run_alignment())?;
        self.cut(request, run, start)
    }

    /// Allocates a block from one free run.
    pub(super) fn allocate_in(&mut self, run: u32, request: BlockRequest) -> Option<UsedBlock> {
        let (run, start) = self.fit.fit(run, request.run_size(), request.run_alignment())?;
        self.cut(request, run, start)
    }

    /// Allocates a block where no memory can be added: looks at every free run. A small block may
    /// be of a larger class then, or whole pages.
    pub(super) fn search(&mut self, request: BlockRequest) -> Option<UsedBlock> {
        self.free_empty_runs();
        if let Some(block) = self.allocate(request) {
            return Some(block);
        }
        let mut request = request;
        if let Some(class) = request.class {
            let fits = |class: &usize| small_blocks::size_of_class(*class) % request.alignment == 0;
            let mut larger = (class + 1..small_blocks::CLASSES).filter(fits);
            if let Some(block) = larger.find_map(|class| self.take_small(class)) {
                return Some(block);
            }
            request = BlockRequest::in_pages(request.size, request.alignment);
        }
        let (run, start) = self.fit.search(RunState::Free, request.run_size(), request.run_alignment())?;
        self.cut(request, run, start)
    }

    /// Cuts the pages of a request out of a free run.
    fn cut(&mut self, request: BlockRequest, run: u32, start: u64) -> Option<UsedBlock> {
        let run = self.fit.set(run, start, request.run_size(), RunState::Used);
        let small_run = request.class.map(|class| self.add_small_run(class, start));
        // It was free, so nothing is there.
        let _ = self.used.insert(start, request.run_size(), Used { run, small_run, disowned: false });
        match request.class {
            Some(class) => self.take_small(class),
            None => Some(self.count(start, request.size, None)),
        }
    }

    fn add_small_run(&mut self, class: usize, start: u64) -> u32 {
        let number = self.spare.pop().unwrap_or(self.small_runs.len() as u32);
        let run = SmallRun::new(class, start);
        match self.small_runs.get_mut(number as usize) {
            Some(spare) => *spare = run,
            None => self.small_runs.push(run),
        }
        self.with_room[class].insert(number);
        number
    }

    fn remove_small_run(&mut self, number: u32) {
        let run = &self.small_runs[number as usize];
        self.with_room[run.class()].remove(&number);
        self.spare.push(number);
        self.free_run(run.start());
    }

    fn take_small(&mut self, class: usize) -> Option<UsedBlock> {
        let number = *self.with_room[class].first()?;
        let run = &mut self.small_runs[number as usize];
        let address = run.take()?;
        if run.is_full() {
            self.with_room[class].remove(&number);
        }
        let size = small_blocks::size_of_class(class);
        Some(self.count(address, size, Some(number)))
    }

    fn count(&mut self, address: u64, size: u64, small_run: Option<u32>) -> UsedBlock {
        let Statistics { in_use, peak, blocks, .. } = &mut self.statistics;
        *in_use += size;
        *peak = (*peak).max(*in_use);
        *blocks += 1;
        UsedBlock { address, size, small_run, generation: self.generation }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether no reset has freed a block since it was allocated.
    pub(super) fn is_current(&self, block: UsedBlock) -> bool {
        block.generation == self.generation
    }

    /// The block in use that begins at an address.
    pub(super) fn find(&self, address: u64) -> Option<UsedBlock> {
        let found = self.used.at(address)?;
        let small_run = found.value.small_run;
        let (size, begins) = match small_run {
            Some(number) => {
                let run = &self.small_runs[number as usize];
                (run.block_size(), run.is_block(address))
            }
            None => (found.size, found.start == address),
        };
        begins.then_some(UsedBlock { address, size, small_run, generation: self.generation })
    }

    /// Frees a block in use.
    pub(super) fn free(&mut self, block: UsedBlock) {
        match block.small_run {
            Some(number) => self.free_small(number, block.address),
            None => self.free_run(block.address),
        }
        self.statistics.in_use -= block.size;
        self.statistics.blocks -= 1;
    }

    /// Frees a small block, and its run if that is empty. The last run with room is kept: the next
    /// small block is likely to come soon.
    fn free_small(&mut self, number: u32, address: u64) {
        let run = &mut self.small_runs[number as usize];
        let room = &mut self.with_room[run.class()];
        if run.is_full() {
            room.insert(number);
        }
        run.free(address);
        if run.is_empty() && room.len() > 1 {
            self.remove_small_run(number);
        }
    }

    fn free_run(&mut self, start: u64) {
        if let Some(used) = self.used.remove(start) {
            self.fit.free(used.run);
        }
    }

    /// Frees the runs of small blocks that are empty.
    fn free_empty_runs(&mut self) {
        let with_room = self.with_room.iter().flatten();
        let empty = with_room.filter(|&&number| self.small_runs[number as usize].is_empty());
        let empty: Vec<u32> = empty.copied().collect();
        empty.into_iter().for_each(|number| self.remove_small_run(number));
    }

    /// Detaches a block in use from its handle: it is freed by its address from now on.
    pub(super) fn disown(&mut self, block: UsedBlock) {
        if let Some(number) = block.small_run {
            self.small_runs[number as usize].disown(block.address);
        } else if let Some(used) = self.used.get_mut(block.address) {
            used.disowned = true;
        }
    }

    /// Whether no handle owns a block in use.
    pub(super) fn is_disowned(&self, block: UsedBlock) -> bool {
        match block.small_run {
            Some(number) => self.small_runs[number as usize].is_disowned(block.address),
            None => self.used.get(block.address).is_some_and(|used| used.value.disowned),
        }
    }

    /// Free memory in runs of at least `smallest` bytes, in order of addresses. Empty runs of small
    /// blocks become free first.
    pub(super) fn free_ranges(&mut self, smallest: u64) -> Vec<Range<u64>> {
        self.free_empty_runs();
        let free = self.fit.all(RunState::Free, smallest).map(|run| self.fit[run].start..self.fit[run].end());
        let mut free: Vec<Range<u64>> = free.collect();
        free.sort_unstable_by_key(|range| range.start);
        free
    }

    /// Memory in use, in order of addresses. Runs of small blocks count as a whole.
    pub(super) fn used_ranges(&self) -> Vec<Range<u64>> {
        let mut used: Vec<Range<u64>> = Vec::new();
        for found in self.used.iter() {
            match used.last_mut() {
                // No range lies in two reservations.
                Some(last) if last.end == found.start && self.areas.get(found.start).is_none() => {
                    last.end = found.end();
                }
                _ => used.push(found.start..found.end()),
            }
        }
        used
    }

    /// Frees all blocks, among memory that is mapped.
    pub(super) fn reset(&mut self, mapped: &[Range<u64>]) {
        let old = std::mem::take(self);
        self.generation = old.generation + 1;
        self.statistics.peak = old.statistics.peak;
        for area in old.areas.iter() {
            self.add_area(area.start, area.size);
        }
        for range in mapped {
            self.add_memory(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const BASE: u64 = ReserveOptions::ADDRESSES.start;
    const AREA: u64 = 64 << 20;

    /// Pseudo-random numbers from a seed.
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % limit
        }
    }

    fn blocks(areas: u64) -> Blocks {
        let mut blocks = Blocks::default();
        for area in (0..areas).rev() {
            blocks.add_area(BASE + area * AREA, AREA);
            blocks.add_memory(&(BASE + area * AREA..BASE + (area + 1) * AREA)).unwrap();
        }
        blocks
    }

    fn all_of(areas: u64) -> Range<u64> {
        BASE..BASE + areas * AREA
    }

    fn request(size: u64, alignment: u64) -> BlockRequest {
        BlockRequest::new(size, alignment).unwrap()
    }

    #[test]
    fn impossible_requests_are_none_and_possible_ones_fit() {
        for (size, alignment) in [(0, 1), (1, 0), (1, 3), (1, 2 << 30), (u64::MAX, 1), ((128 << 30) + 1, 1)] {
            assert_eq!(BlockRequest::new(size, alignment), None, "{size} {alignment}");
        }
        for shift in 0..=37 {
            for size in [(1 << shift) - 1, 1 << shift, (1 << shift) + 1].map(|size: u64| size.clamp(1, 128 << 30)) {
                for alignment in (0..=30).map(|shift| 1 << shift) {
                    let request = request(size, alignment);
                    assert!(request.size >= size, "{size} {alignment}");
                    let rounded = size.next_multiple_of(alignment.min(4096));
                    assert!(request.size <= (rounded * 2).max(64).next_multiple_of(4096), "{size} {alignment}");
                }
            }
        }
    }

    #[test]
    fn whatever_is_taken_and_freed_no_two_blocks_overlap_and_all_comes_back() {
        let mut refused = 0;
        for seed in 0..if cfg!(miri) { 1 } else { 20 } {
            let mut random = Random(seed);
            let mut blocks = blocks(2);
            // Each block, and whether it was disowned.
            let mut live: BTreeMap<u64, (UsedBlock, bool)> = BTreeMap::new();
            for _ in 0..if cfg!(miri) { 300 } else { 20_000 } {
                if random.below(100) < 55 {
                    let (magnitude, coarse) = (random.below(26), random.below(8) == 0);
                    let size = 1 + random.below(1 << magnitude);
                    let alignment = 1 << random.below(if coarse { 22 } else { 13 });
                    let (request, disowned) = (request(size, alignment), random.below(2) == 0);
                    let found = blocks.allocate(request).or_else(|| blocks.search(request));
                    let Some(block) = found else {
                        refused += 1;
                        assert!(!fits_beside(&blocks.used_ranges(), size, alignment), "{request:?}");
                        continue;
                    };
                    let (start, end) = (block.address, block.address + block.size);
                    assert!(start % alignment == 0 && start % 64 == 0, "{start:#x} {alignment:#x}");
                    assert!(start >= BASE && end <= BASE + 2 * AREA, "{start:#x}");
                    let before = live.range(..end).next_back();
                    assert!(before.is_none_or(|(before, (block, _))| before + block.size <= start), "seed {seed}");
                    assert!(block.size >= request.size);
                    assert!(!blocks.is_disowned(block));
                    if disowned {
                        blocks.disown(block);
                    }
                    live.insert(start, (block, disowned));
                } else if let Some((&address, &(block, disowned))) = live.range(BASE + random.below(2 * AREA)..).next()
                {
                    assert_eq!(blocks.find(address + 1), None);
                    assert_eq!((blocks.find(address), blocks.is_disowned(block)), (Some(block), disowned));
                    blocks.free(block);
                    assert_eq!(blocks.find(address), None);
                    live.remove(&address);
                }
                assert_eq!(blocks.statistics().blocks, live.len() as u64);
            }
            assert_eq!(blocks.statistics().in_use, live.values().map(|(block, _)| block.size).sum::<u64>());
            let used = blocks.used_ranges();
            for (&address, (block, _)) in &live {
                let end = address + block.size;
                assert!(used.iter().any(|range| range.start <= address && end <= range.end), "{address:#x}");
            }
            for (block, _) in live.into_values() {
                blocks.free(block);
            }
            // One free range for each area: everything that touches was joined.
            let free = blocks.free_ranges(1 << 20);
            assert_eq!(free, [BASE..BASE + AREA, BASE + AREA..BASE + 2 * AREA]);
            assert!(blocks.used_ranges().is_empty());
            assert_eq!(blocks.statistics().largest_free, AREA);
        }
        assert!(refused > 0 || cfg!(miri));
    }

    /// Whether a block of whole pages fits beside the used ranges.
    fn fits_beside(used: &[Range<u64>], size: u64, alignment: u64) -> bool {
        let size = size.next_multiple_of(PAGE);
        [BASE..BASE + AREA, BASE + AREA..BASE + 2 * AREA].into_iter().any(|area| {
            let inside = used.iter().filter(|range| area.contains(&range.start));
            let mut start = area.start;
            inside.chain([&(area.end..area.end)]).any(|range| {
                let first = start.next_multiple_of(alignment.max(PAGE));
                start = range.end;
                first + size <= range.start
            })
        })
    }

    #[test]
    fn the_last_free_pages_are_found_whatever_their_list_and_serve_small_blocks() {
        let mut blocks = Blocks::default();
        blocks.add_area(BASE, AREA);
        let run = blocks.add_memory(&(BASE + 240 * PAGE..BASE + 512 * PAGE)).unwrap();
        // It fits, but the run is in none of the lists that `allocate` looks at.
        let aligned = request(1 << 20, 1 << 20);
        assert_eq!(blocks.allocate(aligned), None);
        assert_eq!(blocks.allocate_in(run, aligned).unwrap().address, BASE + (1 << 20));
        // Of the 16 pages before it, 7 are left: too few for a run of the smallest blocks.
        blocks.allocate(request(9 * PAGE, 1)).unwrap();
        let small = request(100, 64);
        assert_eq!(blocks.allocate(small), None);
        let page = blocks.search(small).unwrap();
        assert_eq!((page.size, blocks.find(page.address)), (PAGE, Some(page)));
        blocks.free(page);
        assert_eq!(blocks.statistics().blocks, 2);
    }

    #[test]
    fn removed_memory_is_not_handed_out_and_can_be_added_again() {
        let mut blocks = blocks(1);
        let part = BASE + (8 << 20)..BASE + (16 << 20);
        blocks.set_aside(&part);
        assert!(!blocks.is_hole(&part), "it is still mapped");
        blocks.remove_memory(&part);
        assert!(blocks.is_hole(&part));
        let taken: Vec<UsedBlock> = std::iter::from_fn(|| blocks.allocate(request(1 << 20, 1))).collect();
        assert_eq!(taken.len(), 56);
        assert!(taken.iter().all(|block| !part.contains(&block.address)));
        let hole = blocks.hole(8 << 20).unwrap();
        assert_eq!((hole.range, hole.before, hole.after), (part.clone(), 0, 0));
        blocks.add_memory(&part).unwrap();
        assert!(blocks.holes().next().is_none());
        for block in taken {
            blocks.free(block);
        }
        assert_eq!(blocks.free_ranges(1), vec![all_of(1)]);
        blocks.allocate(request(100, 1)).unwrap();
        blocks.reset(&[all_of(1)]);
        assert_eq!(blocks.free_ranges(1), vec![all_of(1)]);
    }

    #[test]
    fn the_last_empty_run_of_a_class_stays_and_others_go() {
        let mut blocks = blocks(1);
        let largest = request(small_blocks::LARGEST, 1);
        let all: Vec<UsedBlock> = (0..17).map(|_| blocks.allocate(largest).unwrap()).collect();
        let used = |blocks: &Blocks| blocks.used_ranges().iter().map(|range| range.end - range.start).sum::<u64>();
        assert_eq!(used(&blocks), 2 * largest.run_size());
        blocks.free(all[16]);
        assert_eq!(used(&blocks), 2 * largest.run_size(), "no other run has room");
        for block in &all[..16] {
            blocks.free(*block);
        }
        assert_eq!(used(&blocks), largest.run_size());
        assert_eq!(blocks.free_ranges(1), vec![all_of(1)]);
    }

    #[test]
    fn an_aligned_block_that_was_freed_is_found_again() {
        let mut blocks = blocks(1);
        let aligned = request(2 << 20, 2 << 20);
        let first = blocks.allocate(aligned).unwrap();
        let rest: Vec<UsedBlock> = std::iter::from_fn(|| blocks.allocate(aligned)).collect();
        assert_eq!(rest.len(), 31);
        blocks.free(first);
        assert_eq!(blocks.allocate(aligned), Some(first));
    }

    #[test]
    fn a_hole_counts_the_free_memory_beside_it() {
        let mut blocks = blocks(1);
        let hole = BASE + (8 << 20)..BASE + (16 << 20);
        blocks.set_aside(&hole);
        blocks.remove_memory(&hole);
        let found = blocks.hole(1 << 20).unwrap();
        assert_eq!((found.range, found.before, found.after), (hole, 8 << 20, 48 << 20));
    }
}
