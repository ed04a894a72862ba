//! Which parts of a tag's addresses are in use.
//!
//! Every run of pages of 4 KiB is in use, free, or a hole without memory: a segregated fit chooses
//! among them, and a map has the blocks in use by their address. Blocks of up to 32 KiB are cut
//! from larger ones (`small_blocks.rs`).
//!
//! What that costs: a size is rounded up to 64 bytes, by at most a fifth, up to 32 KiB, and to 4
//! KiB beyond. A request goes without new memory whenever a free block is at least a sixteenth
//! larger than it and its alignment together; where there is no new memory, every free block is
//! looked at, so none that fits is missed ([`Blocks::search`]). Free blocks are never moved, so, as
//! for every allocator that moves nothing, an adversary can need one more than half of
//! log2(largest / smallest size) times the memory in use (Robson 1974); the tags, each with memory
//! of its own, multiply that by nothing, but each may have a last handle that is nearly empty.

use super::small_blocks::{self, SmallBlocks};
use crate::driver::svm::GIANT_PAGE;
use crate::range_map::{Found, RangeMap};
use crate::reserve::ReserveOptions;
use crate::segregated_fit::{SegregatedFit, State};
use std::collections::BTreeMap;
use std::ops::Range;

const PAGE: u64 = 4096;

/// In the number of a claim: it is a small block, of the run with this number.
const OF_RUN: u32 = 1 << 31;

/// What is wanted: sizes that can be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    /// Bytes that the block will have.
    pub(super) size: u64,
    alignment: u64,
    /// The class of a small block.
    class: Option<u8>,
}

impl Request {
    /// A request for `size` bytes, from 1 to 128 GiB, at a multiple of a power of two up to 1 GiB;
    /// `None` for others.
    pub(super) fn new(size: u64, alignment: u64) -> Option<Request> {
        let possible = alignment.is_power_of_two() && alignment <= GIANT_PAGE;
        if size == 0 || size > ReserveOptions::MAX_SIZE || !possible {
            return None;
        }
        let rounded = size.next_multiple_of(alignment);
        if rounded <= small_blocks::LARGEST && alignment <= PAGE {
            let class = small_blocks::class_of(rounded);
            let fits = small_blocks::size_of_class(class) % alignment == 0;
            let class = if fits { class } else { small_blocks::class_of(rounded.next_power_of_two()) };
            return Some(Request { size: small_blocks::size_of_class(class), alignment, class: Some(class as u8) });
        }
        Some(Request::large(size, alignment))
    }

    fn large(size: u64, alignment: u64) -> Request {
        Request { size: size.next_multiple_of(PAGE), alignment: alignment.max(PAGE), class: None }
    }

    /// Bytes that are taken at once: of a small block those of its run.
    pub(super) fn taken(self) -> u64 {
        self.class.map_or(self.size, |class| small_blocks::run_size(class.into()))
    }

    /// What the address of that is a multiple of.
    pub(super) fn alignment(self) -> u64 {
        if self.class.is_some() { PAGE } else { self.alignment }
    }
}

/// A block that is in use: its address, its size, and the number by which it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) address: u64,
    /// In bytes: at least those of the request.
    pub(super) size: u64,
    /// Of its run of pages; or of its run of small blocks, with [`OF_RUN`].
    pub(super) number: u32,
}

/// Why a block cannot be freed by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Misuse {
    /// No block begins there.
    NoBlock,
    /// It belongs to a handle, and is freed with it.
    Owned,
}

/// How much is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Usage {
    pub(super) in_use: u64,
    pub(super) peak: u64,
    pub(super) blocks: u64,
}

/// Addresses without memory, and how much free memory is right before and after them.
#[derive(Debug, Clone)]
pub(super) struct Hole {
    pub(super) range: Range<u64>,
    pub(super) before: u64,
    pub(super) after: u64,
}

/// A block in use, or a run of small blocks.
#[derive(Debug)]
struct Used {
    /// As in a claim.
    number: u32,
    /// Whether it belongs to no handle.
    loose: bool,
}

#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The reservations: start, size and the number of their first run.
    areas: BTreeMap<u64, (u64, u32)>,
    fit: SegregatedFit<PAGE>,
    used: RangeMap<Used, PAGE>,
    small: SmallBlocks,
    usage: Usage,
}

impl Blocks {
    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    /// Makes the addresses of a reservation known. None of them has memory yet.
    pub(super) fn add_area(&mut self, start: u64, size: u64) {
        let first = self.fit.add_area(start, size, State::Hole);
        self.areas.insert(start, (size, first));
    }

    /// Forgets the addresses of a reservation, none of which has memory any more.
    pub(super) fn remove_area(&mut self, start: u64) {
        if let Some((_, first)) = self.areas.remove(&start) {
            self.fit.remove_area(first);
        }
    }

    /// The run around an address. It follows the block in use before it, after a few that are free
    /// or holes.
    fn run_at(&self, address: u64) -> Option<u32> {
        let (&start, &(size, first)) = self.areas.range(..=address).next_back()?;
        if address - start >= size {
            return None;
        }
        let before = self.used.last_until(address).filter(|before| before.start >= start);
        let mut run = before.map_or(first, |before| self.run_of(before.value.number));
        while self.fit[run].end() <= address {
            run = self.fit.after(run)?;
        }
        Some(run)
    }

    /// The run of pages behind the number of a claim.
    fn run_of(&self, number: u32) -> u32 {
        if number & OF_RUN == 0 { number } else { self.small.block(number & !OF_RUN) }
    }

    /// Makes a range free or a hole that is neither in use nor the other. Returns its run.
    fn set(&mut self, range: &Range<u64>, state: State) -> Option<u32> {
        let run = self.run_at(range.start).filter(|&run| range.end <= self.fit[run].end())?;
        Some(self.fit.set(run, range.start, range.end - range.start, state))
    }

    /// Makes memory known that was just mapped, or was set aside. Returns the free run that it is
    /// part of now.
    pub(super) fn add_memory(&mut self, range: &Range<u64>) -> Option<u32> {
        self.set(range, State::Free)
    }

    /// Forgets memory that was set aside and is unmapped.
    pub(super) fn remove_memory(&mut self, range: &Range<u64>) {
        self.set(range, State::Hole);
    }

    /// Sets free memory aside, which is about to be unmapped.
    pub(super) fn set_aside(&mut self, range: &Range<u64>) {
        self.set(range, State::Used);
    }

    /// Whether a range has no memory.
    pub(super) fn is_hole(&self, range: &Range<u64>) -> bool {
        let run = self.run_at(range.start).map(|run| self.fit[run]);
        run.is_some_and(|run| run.state == State::Hole && range.end <= run.end())
    }

    /// A small hole of at least `size` bytes.
    pub(super) fn hole(&self, size: u64) -> Option<Hole> {
        self.fit.find(State::Hole, size, PAGE).map(|(run, _)| self.hole_of(run))
    }

    /// All holes.
    pub(super) fn holes(&self) -> impl Iterator<Item = Hole> {
        self.fit.all(State::Hole, PAGE).map(|run| self.hole_of(run))
    }

    fn hole_of(&self, run: u32) -> Hole {
        let free = |neighbour: Option<u32>| {
            let run = neighbour.map(|run| self.fit[run]).filter(|run| run.state == State::Free);
            run.map_or(0, |run| run.size)
        };
        let (before, after) = (free(self.fit.before(run)), free(self.fit.after(run)));
        Hole { range: self.fit[run].start..self.fit[run].end(), before, after }
    }

    /// A block for a request, if there is room in what is mapped. It belongs to the claim.
    pub(super) fn allocate(&mut self, request: Request) -> Option<Claim> {
        if let Some(claim) = request.class.and_then(|class| self.take_small(class.into())) {
            return Some(self.count(claim));
        }
        let (run, start) = self.fit.find(State::Free, request.taken(), request.alignment())?;
        self.cut(request, run, start)
    }

    /// The same, in a free run: the one that memory has just become part of.
    pub(super) fn allocate_in(&mut self, run: u32, request: Request) -> Option<Claim> {
        let (run, start) = self.fit.fit(run, request.taken(), request.alignment())?;
        self.cut(request, run, start)
    }

    /// The same where no memory can be added: looks at every free run. A small block may be one of
    /// a larger class then, or whole pages.
    pub(super) fn search(&mut self, request: Request) -> Option<Claim> {
        self.free_empty_runs();
        if let Some(claim) = self.allocate(request) {
            return Some(claim);
        }
        let mut request = request;
        if let Some(class) = request.class {
            let fits = |class: &usize| small_blocks::size_of_class(*class) % request.alignment == 0;
            let mut larger = (usize::from(class) + 1..small_blocks::CLASSES).filter(fits);
            if let Some(claim) = larger.find_map(|class| self.take_small(class)) {
                return Some(self.count(claim));
            }
            request = Request::large(request.size, request.alignment);
        }
        let (run, start) = self.fit.search(State::Free, request.taken(), request.alignment())?;
        self.cut(request, run, start)
    }

    /// Takes the pages of a request out of a free run, where they fit.
    fn cut(&mut self, request: Request, run: u32, start: u64) -> Option<Claim> {
        let block = self.fit.set(run, start, request.taken(), State::Used);
        let number = match request.class {
            Some(class) => self.small.add(class.into(), start, block) | OF_RUN,
            None => block,
        };
        // It was free, so it is not there yet.
        let _ = self.used.insert(start, request.taken(), Used { number, loose: false });
        let claim = match request.class {
            Some(class) => self.take_small(class.into())?,
            None => Claim { address: start, size: request.size, number },
        };
        Some(self.count(claim))
    }

    fn take_small(&mut self, class: usize) -> Option<Claim> {
        let (run, address) = self.small.take(class)?;
        Some(Claim { address, size: small_blocks::size_of_class(class), number: run | OF_RUN })
    }

    fn count(&mut self, claim: Claim) -> Claim {
        self.usage.in_use += claim.size;
        self.usage.blocks += 1;
        self.usage.peak = self.usage.peak.max(self.usage.in_use);
        claim
    }

    /// Frees the block of a claim. No other call has freed it.
    pub(super) fn free(&mut self, claim: Claim) {
        let Claim { address, size, number } = claim;
        if number & OF_RUN == 0 {
            self.free_run(number);
        } else if let Some(block) = self.small.free(number & !OF_RUN, address) {
            self.free_run(block);
        }
        self.usage.in_use -= size;
        self.usage.blocks -= 1;
    }

    fn free_run(&mut self, run: u32) {
        self.used.remove(self.fit[run].start);
        self.fit.free(run);
    }

    /// Makes runs of small blocks free that are empty.
    fn free_empty_runs(&mut self) {
        for block in self.small.remove_empty() {
            self.free_run(block);
        }
    }

    /// Frees the block that begins at an address and belongs to no claim. Returns its size.
    pub(super) fn free_at(&mut self, address: u64) -> Result<u64, Misuse> {
        let claim = self.claim_at(address)?;
        self.free(claim);
        Ok(claim.size)
    }

    /// Claims the block that begins at an address and belongs to no claim.
    pub(super) fn claim_at(&mut self, address: u64) -> Result<Claim, Misuse> {
        let (number, size, mut loose) = self.used_at(address).ok_or(Misuse::NoBlock)?;
        if number & OF_RUN != 0 {
            loose = self.small.remove_loose(number & !OF_RUN, address);
        } else if let Some(used) = self.used.get_mut(address) {
            used.loose = false;
        }
        if loose { Ok(Claim { address, size, number }) } else { Err(Misuse::Owned) }
    }

    /// The number and the size of the block in use that begins at an address, and whether it is
    /// loose; of a small block its run knows that.
    fn used_at(&self, address: u64) -> Option<(u32, u64, bool)> {
        let Found { start, size, value: &Used { number, loose } } = self.used.at(address)?;
        if number & OF_RUN != 0 {
            return Some((number, self.small.size(number & !OF_RUN, address)?, false));
        }
        (start == address).then_some((number, size, loose))
    }

    /// The size of the block that begins at an address.
    pub(super) fn size(&self, address: u64) -> Option<u64> {
        self.used_at(address).map(|(_, size, _)| size)
    }

    /// Ends a claim without freeing its block: that is freed by its address from now on.
    pub(super) fn disown(&mut self, claim: Claim) {
        let Claim { address, number, .. } = claim;
        if number & OF_RUN != 0 {
            self.small.add_loose(number & !OF_RUN, address);
        } else if let Some(used) = self.used.get_mut(address) {
            used.loose = true;
        }
    }

    /// The size of a free block that is at most a sixteenth smaller than the largest.
    pub(super) fn largest_free(&self) -> u64 {
        self.fit.largest_free()
    }

    /// Free memory, in order of addresses, in runs of at least `smallest` bytes. Empty runs of
    /// small blocks become free first.
    pub(super) fn free_ranges(&mut self, smallest: u64) -> Vec<Range<u64>> {
        self.free_empty_runs();
        let free = self.fit.all(State::Free, smallest).map(|run| self.fit[run].start..self.fit[run].end());
        let mut free: Vec<Range<u64>> = free.collect();
        free.sort_unstable_by_key(|range| range.start);
        free
    }

    /// What is in use, in order; runs of small blocks as a whole.
    pub(super) fn used_ranges(&self) -> Vec<Range<u64>> {
        let mut used: Vec<Range<u64>> = Vec::new();
        for found in self.used.iter() {
            match used.last_mut() {
                // No range lies in two reservations.
                Some(last) if last.end == found.start && !self.areas.contains_key(&found.start) => {
                    last.end = found.end();
                }
                _ => used.push(found.start..found.end()),
            }
        }
        used
    }

    /// Frees all blocks.
    pub(super) fn reset(&mut self, mapped: &[Range<u64>]) {
        let (areas, peak) = (std::mem::take(&mut self.areas), self.usage.peak);
        *self = Blocks { usage: Usage { peak, ..Usage::default() }, ..Blocks::default() };
        for (start, (size, _)) in areas {
            self.add_area(start, size);
        }
        for range in mapped {
            self.add_memory(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = ReserveOptions::ADDRESSES.start;
    const AREA: u64 = 64 << 20;

    /// Numbers that are the same each time.
    struct Numbers(u64);

    impl Numbers {
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

    fn all(areas: u64) -> Range<u64> {
        BASE..BASE + areas * AREA
    }

    fn request(size: u64, alignment: u64) -> Request {
        Request::new(size, alignment).unwrap()
    }

    #[test]
    fn impossible_requests_are_none_and_the_others_fit() {
        for (size, alignment) in [(0, 1), (1, 0), (1, 3), (1, 2 << 30), (u64::MAX, 1), ((128 << 30) + 1, 1)] {
            assert_eq!(Request::new(size, alignment), None, "{size} {alignment}");
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
            let mut numbers = Numbers(seed);
            let mut blocks = blocks(2);
            // Each block with its size, and its claim if it has one.
            let mut live: BTreeMap<u64, (u64, Option<Claim>)> = BTreeMap::new();
            for _ in 0..if cfg!(miri) { 300 } else { 20_000 } {
                if numbers.below(100) < 55 {
                    let (magnitude, coarse) = (numbers.below(26), numbers.below(8) == 0);
                    let size = 1 + numbers.below(1 << magnitude);
                    let alignment = 1 << numbers.below(if coarse { 22 } else { 13 });
                    let (request, owned) = (request(size, alignment), numbers.below(2) == 0);
                    let found = blocks.allocate(request).or_else(|| blocks.search(request));
                    let Some(claim) = found else {
                        refused += 1;
                        assert!(!fits_beside(&blocks.used_ranges(), size, alignment), "{request:?}");
                        continue;
                    };
                    let (address, end) = (claim.address, claim.address + claim.size);
                    if !owned {
                        blocks.disown(claim);
                    }
                    assert!(address % alignment == 0 && address % 64 == 0, "{address:#x} {alignment:#x}");
                    assert!(address >= BASE && end <= BASE + 2 * AREA, "{address:#x}");
                    let before = live.range(..end).next_back();
                    assert!(before.is_none_or(|(start, (size, _))| start + size <= address), "seed {seed}");
                    assert!(claim.size >= request.size && blocks.size(address) == Some(claim.size));
                    live.insert(address, (claim.size, owned.then_some(claim)));
                } else if let Some((&address, &(size, claim))) = live.range(BASE + numbers.below(2 * AREA)..).next() {
                    assert_eq!(blocks.free_at(address + 1), Err(Misuse::NoBlock));
                    if let Some(claim) = claim {
                        assert_eq!(blocks.free_at(address), Err(Misuse::Owned));
                        blocks.free(claim);
                    } else {
                        assert_eq!(blocks.free_at(address), Ok(size));
                    }
                    assert_eq!(blocks.free_at(address), Err(Misuse::NoBlock));
                    assert_eq!(blocks.size(address), None);
                    live.remove(&address);
                }
                assert_eq!(blocks.usage().blocks, live.len() as u64);
            }
            assert_eq!(blocks.usage().in_use, live.values().map(|(size, _)| size).sum::<u64>());
            let used = blocks.used_ranges();
            for (&address, &(size, _)) in &live {
                assert!(used.iter().any(|range| range.start <= address && address + size <= range.end), "{address:#x}");
            }
            for (address, (size, claim)) in live {
                match claim {
                    Some(claim) => blocks.free(claim),
                    None => assert_eq!(blocks.free_at(address), Ok(size)),
                }
            }
            // One free block for each area: all that touches was joined.
            let free = blocks.free_ranges(1 << 20);
            assert_eq!(free, [BASE..BASE + AREA, BASE + AREA..BASE + 2 * AREA]);
            assert!(blocks.used_ranges().is_empty());
            assert_eq!(blocks.largest_free(), AREA);
        }
        assert!(refused > 0 || cfg!(miri));
    }

    /// Whether a block fits beside what is in use, in whole pages.
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
        let number = blocks.add_memory(&(BASE + 240 * PAGE..BASE + 512 * PAGE)).unwrap();
        // It fits, but the block is in none of the lists that are looked at.
        let aligned = request(1 << 20, 1 << 20);
        assert_eq!(blocks.allocate(aligned), None);
        assert_eq!(blocks.allocate_in(number, aligned).unwrap().address, BASE + (1 << 20));
        // Of the 16 pages before it 7 are left: too few for a run of the smallest blocks.
        blocks.allocate(request(9 * PAGE, 1)).unwrap();
        let small = request(100, 64);
        assert_eq!(blocks.allocate(small), None);
        let page = blocks.search(small).unwrap();
        assert_eq!((page.size, blocks.size(page.address)), (PAGE, Some(PAGE)));
        blocks.free(page);
        assert_eq!(blocks.usage().blocks, 2);
    }

    #[test]
    fn memory_that_is_removed_is_not_handed_out_and_fits_in_again() {
        let mut blocks = blocks(1);
        let part = BASE + (8 << 20)..BASE + (16 << 20);
        blocks.set_aside(&part);
        assert!(!blocks.is_hole(&part), "it is still mapped");
        blocks.remove_memory(&part);
        assert!(blocks.is_hole(&part));
        let taken: Vec<Claim> = std::iter::from_fn(|| blocks.allocate(request(1 << 20, 1))).collect();
        assert_eq!(taken.len(), 56);
        assert!(taken.iter().all(|claim| !part.contains(&claim.address)));
        let hole = blocks.hole(8 << 20).unwrap();
        assert_eq!((hole.range, hole.before, hole.after), (part.clone(), 0, 0));
        blocks.add_memory(&part).unwrap();
        assert!(blocks.holes().next().is_none());
        for claim in taken {
            blocks.free(claim);
        }
        assert_eq!(blocks.free_ranges(1), vec![all(1)]);
        blocks.allocate(request(100, 1)).unwrap();
        blocks.reset(&[all(1)]);
        assert_eq!(blocks.free_ranges(1), vec![all(1)]);
    }

    #[test]
    fn an_aligned_block_that_was_freed_is_found_again() {
        let mut blocks = blocks(1);
        let aligned = request(2 << 20, 2 << 20);
        let first = blocks.allocate(aligned).unwrap();
        let rest: Vec<Claim> = std::iter::from_fn(|| blocks.allocate(aligned)).collect();
        assert_eq!(rest.len(), 31);
        blocks.free(first);
        assert_eq!(blocks.allocate(aligned), Some(first));
    }

    #[test]
    fn a_hole_counts_with_what_is_free_beside_it() {
        let mut blocks = blocks(1);
        let hole = BASE + (8 << 20)..BASE + (16 << 20);
        blocks.set_aside(&hole);
        blocks.remove_memory(&hole);
        let found = blocks.hole(1 << 20).unwrap();
        assert_eq!((found.range, found.before, found.after), (hole, 8 << 20, 48 << 20));
    }
}
