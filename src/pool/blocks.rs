//! Which parts of mapped memory are in use: two-level segregated fit.
//!
//! Memory is counted in pages of 4 KiB here. Every run of pages is a *block*, in use or free, with
//! a record of 16 bytes; free blocks that touch are one block. Free blocks are in lists by size
//! (powers of two, each in sixteen steps), with a bit for each list that is not empty. A table of
//! the addresses has the number of the block at its first and at its last page, so neighbours are
//! found at once. So taking and freeing take a constant number of steps. Blocks of up to 32 KiB are
//! cut from larger ones (`small_blocks.rs`).
//!
//! A block that is freed is often wanted again at once, by a request of the same size. So the last
//! one of each of 64 groups of sizes is *kept* whole, and joined with its neighbours when the next
//! of its group is freed, or when a request would otherwise need new memory.
//!
//! What that costs: a size is rounded up to 64 bytes, by at most a fifth, up to 32 KiB, and to 4
//! KiB beyond. A request goes without new memory whenever a free block is at least a sixteenth
//! larger than it and its alignment together; where there is no new memory, every free block is
//! looked at, so none that fits is missed ([`Blocks::search`]). Free blocks are never moved, so, as for every
//! allocator that moves nothing, an adversary can need log2(largest / smallest size) / 2 + 1 times
//! the memory in use (Robson 1974); the tags, each with memory of its own, multiply that by
//! nothing, but each may have a last handle that is nearly empty.

use super::small_blocks::{self, SmallBlocks};
use crate::driver::svm::GIANT_PAGE;
use crate::reserve::ReserveOptions;
use std::ops::Range;

const PAGE: u64 = 4096;
/// Pages are counted from here, which is a multiple of every possible alignment.
const BASE: u64 = ReserveOptions::ADDRESSES.start;
const _: () = assert!(BASE % GIANT_PAGE == 0);

const STEPS: u32 = 16;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Sizes 1 to 15 have a list each, then each power of two up to 128 GiB has sixteen.
const POWERS: usize = (ReserveOptions::MAX_SIZE / PAGE).trailing_zeros() as usize - STEP_BITS as usize + 2;

/// No block.
const NONE: u32 = u32::MAX;
// States of blocks that are not free, where free ones have the previous block of their list.
const USED: u32 = u32::MAX - 1;
const OWNED: u32 = u32::MAX - 2;
/// Cut into small blocks.
const RUN: u32 = u32::MAX - 3;
/// Not in use, and not joined with its neighbours.
const KEPT: u32 = u32::MAX - 4;
/// No block has this number now.
const DEAD: u32 = u32::MAX - 5;

/// Groups of sizes of which a block is kept.
const GROUPS: usize = 64;

/// In the table: the page belongs to a run of small blocks.
const OF_RUN: u32 = 1 << 31;

#[derive(Debug, Clone, Copy)]
struct Record {
    start: u32,
    pages: u32,
    /// Next in its list; of dead ones in the list of those.
    next: u32,
    /// Previous in its list, or a state.
    previous: u32,
}

impl Record {
    #[inline]
    fn is_free(&self) -> bool {
        self.previous == NONE || self.previous < DEAD
    }

    #[inline]
    fn end(&self) -> u32 {
        self.start + self.pages
    }
}

/// Addresses of one reservation.
#[derive(Debug)]
struct Area {
    start: u32,
    /// For the first and the last page of each block its number plus one; for all pages of a run
    /// the run's number and [`OF_RUN`]. Elsewhere, whatever was there last.
    table: Vec<u32>,
}

/// What is wanted: sizes that can be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    /// Bytes that the block will have.
    pub(super) size: u64,
    shape: Shape,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// A block of a class of small ones, at a multiple of so many bytes.
    Small { class: u8, alignment: u16 },
    /// So many pages at a multiple of so many.
    Large { pages: u32, alignment: u32 },
}

impl Request {
    /// A request for `size` bytes, from 1 to 128 GiB, at a multiple of a power of two up to 1 GiB;
    /// `None` for others.
    #[inline]
    pub(super) fn new(size: u64, alignment: u64) -> Option<Request> {
        let possible = alignment.is_power_of_two() && alignment <= GIANT_PAGE;
        if size == 0 || size > ReserveOptions::MAX_SIZE || !possible {
            return None;
        }
        if size <= small_blocks::LARGEST && alignment <= PAGE {
            // Up to a multiple of a power of two.
            let size = (size + alignment - 1) & !(alignment - 1);
            if size <= small_blocks::LARGEST {
                let class = small_blocks::class_of(size);
                let fits = small_blocks::size_of_class(class) & (alignment - 1) == 0;
                let class = if fits { class } else { small_blocks::class_of(size.next_power_of_two()) };
                let shape = Shape::Small { class: class as u8, alignment: alignment as u16 };
                return Some(Request { size: small_blocks::size_of_class(class), shape });
            }
        }
        let (pages, alignment) = (size.div_ceil(PAGE), alignment.div_ceil(PAGE));
        let shape = Shape::Large { pages: pages as u32, alignment: alignment as u32 };
        Some(Request { size: pages * PAGE, shape })
    }

    /// Bytes that are taken at once: of a small block those of its run.
    pub(super) fn taken(self) -> u64 {
        match self.shape {
            Shape::Small { class, .. } => small_blocks::run_size(class.into()),
            Shape::Large { .. } => self.size,
        }
    }

    /// The same in pages, and of how many pages its address is a multiple.
    fn pages(self) -> (u32, u32) {
        match self.shape {
            Shape::Small { class, .. } => ((small_blocks::run_size(class.into()) / PAGE) as u32, 1),
            Shape::Large { pages, alignment } => (pages, alignment),
        }
    }

    /// What the address of that is a multiple of.
    pub(super) fn alignment(self) -> u64 {
        match self.shape {
            Shape::Small { .. } => PAGE,
            Shape::Large { alignment, .. } => u64::from(alignment) * PAGE,
        }
    }
}

/// A block that is in use: where it is, and the number by which it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) address: u64,
    pub(super) size: u64,
    /// Of its record; or of its run, with [`OF_RUN`].
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

#[derive(Debug)]
pub(super) struct Blocks {
    /// In order of addresses.
    areas: Vec<Area>,
    records: Vec<Record>,
    /// The first record that is dead.
    dead: u32,
    powers: u32,
    steps: [u16; POWERS],
    first: [[u32; STEPS as usize]; POWERS],
    /// The block that is kept of each group of sizes.
    kept: [u32; GROUPS],
    small: SmallBlocks,
    usage: Usage,
}

/// The list of a size.
#[inline]
fn class(pages: u32) -> (usize, usize) {
    if pages < STEPS {
        return (0, pages as usize);
    }
    let power = pages.ilog2();
    ((power - STEP_BITS + 1) as usize, (pages >> (power - STEP_BITS)) as usize - STEPS as usize)
}

/// The group of a size.
#[inline]
fn group(pages: u32) -> usize {
    // The top bits of a product in which all bits of the size count.
    (pages.wrapping_mul(0x9E37_79B1) >> (u32::BITS - GROUPS.trailing_zeros())) as usize
}

#[inline]
fn page(address: u64) -> u32 {
    ((address - BASE) / PAGE) as u32
}

#[inline]
fn address(page: u32) -> u64 {
    BASE + u64::from(page) * PAGE
}

impl Blocks {
    pub(super) fn new() -> Blocks {
        Blocks {
            areas: Vec::new(),
            records: Vec::new(),
            dead: NONE,
            powers: 0,
            steps: [0; POWERS],
            first: [[NONE; STEPS as usize]; POWERS],
            kept: [NONE; GROUPS],
            small: SmallBlocks::new(),
            usage: Usage::default(),
        }
    }

    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    /// Makes the addresses of a reservation known. None of them has memory yet.
    pub(super) fn add_area(&mut self, start: u64, size: u64) {
        let area = Area { start: page(start), table: vec![0; (size / PAGE) as usize] };
        let at = self.areas.partition_point(|other| other.start < area.start);
        self.areas.insert(at, area);
    }

    /// The area of a page, and the page's place in it.
    #[inline]
    fn area(&self, page: u32) -> Option<(usize, usize)> {
        // Most heaps have one.
        let at = match &self.areas[..] {
            [_] => 0,
            areas => areas.partition_point(|area| area.start <= page).checked_sub(1)?,
        };
        let area = self.areas.get(at)?;
        let place = page.checked_sub(area.start)? as usize;
        (place < area.table.len()).then_some((at, place))
    }

    #[inline]
    fn entry(&self, page: u32) -> u32 {
        self.area(page).map_or(0, |(area, place)| self.areas[area].table[place])
    }

    /// The block that begins at a page.
    #[inline]
    fn starting_at(&self, page: u32) -> Option<u32> {
        let number = self.entry(page).wrapping_sub(1);
        let record = self.records.get(number as usize)?;
        (record.start == page && record.previous != DEAD).then_some(number)
    }

    /// The block that ends before a page, in the same area.
    #[inline]
    fn ending_at(&self, page: u32) -> Option<u32> {
        let number = self.entry(page.checked_sub(1)?).wrapping_sub(1);
        let record = self.records.get(number as usize)?;
        (record.end() == page && record.previous != DEAD && self.is_inside(page)).then_some(number)
    }

    /// Whether the page before is in the same area. No block may lie in two reservations.
    #[inline]
    fn is_inside(&self, page: u32) -> bool {
        self.area(page).is_some_and(|(_, place)| place > 0)
    }

    /// Enters a block's number at its first and its last page.
    #[inline]
    fn enter(&mut self, number: u32) {
        let Record { start, pages, .. } = self.records[number as usize];
        if let Some((area, place)) = self.area(start) {
            let table = &mut self.areas[area].table;
            table[place] = number + 1;
            if let Some(last) = table.get_mut(place + pages as usize - 1) {
                *last = number + 1;
            }
        }
    }

    #[inline]
    fn link(&mut self, number: u32) {
        let (power, step) = class(self.records[number as usize].pages);
        let next = std::mem::replace(&mut self.first[power][step], number);
        let record = &mut self.records[number as usize];
        record.next = next;
        record.previous = NONE;
        if let Some(next) = self.records.get_mut(next as usize) {
            next.previous = number;
        }
        self.powers |= 1 << power;
        self.steps[power] |= 1 << step;
    }

    #[inline]
    fn unlink(&mut self, number: u32) {
        let Record { next, previous, pages, .. } = self.records[number as usize];
        match self.records.get_mut(previous as usize) {
            Some(before) => before.next = next,
            None => {
                let (power, step) = class(pages);
                self.first[power][step] = next;
                if next == NONE {
                    self.steps[power] &= !(1 << step);
                    if self.steps[power] == 0 {
                        self.powers &= !(1 << power);
                    }
                }
            }
        }
        if let Some(after) = self.records.get_mut(next as usize) {
            after.previous = previous;
        }
    }

    #[inline]
    fn new_record(&mut self, start: u32, pages: u32) -> u32 {
        let record = Record { start, pages, next: NONE, previous: USED };
        match self.records.get_mut(self.dead as usize) {
            Some(dead) => {
                let number = self.dead;
                self.dead = dead.next;
                *dead = record;
                number
            }
            None => {
                self.records.push(record);
                self.records.len() as u32 - 1
            }
        }
    }

    #[inline]
    fn bury(&mut self, number: u32) {
        self.records[number as usize] = Record { start: NONE, pages: 0, next: self.dead, previous: DEAD };
        self.dead = number;
    }

    /// Makes a block free, together with its neighbours if they are. Returns the block that it is
    /// part of then.
    #[inline]
    fn release(&mut self, mut number: u32) -> u32 {
        let Record { start, .. } = self.records[number as usize];
        let end = self.records[number as usize].end();
        let free = |blocks: &Self, number: &u32| blocks.records[*number as usize].is_free();
        if let Some(before) = self.ending_at(start).filter(|number| free(self, number)) {
            self.unlink(before);
            self.records[before as usize].pages += self.records[number as usize].pages;
            self.bury(number);
            number = before;
        }
        if let Some(after) = self.starting_at(end).filter(|number| free(self, number) && self.is_inside(end)) {
            self.unlink(after);
            self.records[number as usize].pages += self.records[after as usize].pages;
            self.bury(after);
        }
        self.enter(number);
        self.link(number);
        number
    }

    /// Makes memory known that was just mapped. Returns the free block that it is part of.
    pub(super) fn add_memory(&mut self, start: u64, size: u64) -> u32 {
        let number = self.new_record(page(start), (size / PAGE) as u32);
        self.release(number)
    }

    /// Keeps a block that was in use, and makes the one free that was kept of its group.
    #[inline]
    fn keep(&mut self, number: u32) {
        let record = &mut self.records[number as usize];
        record.previous = KEPT;
        let before = std::mem::replace(&mut self.kept[group(record.pages)], number);
        if before != NONE {
            self.release(before);
        }
    }

    /// Takes the block that is kept of a size, if it is aligned.
    #[inline]
    fn take_kept(&mut self, pages: u32, alignment: u32) -> Option<Claim> {
        let kept = &mut self.kept[group(pages)];
        let record = self.records.get_mut(*kept as usize)?;
        if record.pages != pages || record.start & (alignment - 1) != 0 {
            return None;
        }
        record.previous = OWNED;
        let number = std::mem::replace(kept, NONE);
        Some(Claim { address: address(record.start), size: u64::from(pages) * PAGE, number })
    }

    /// Makes all blocks free that are kept.
    fn release_kept(&mut self) {
        for number in std::mem::replace(&mut self.kept, [NONE; GROUPS]) {
            if number != NONE {
                self.release(number);
            }
        }
    }

    /// Makes all free that is not in use: blocks that are kept, and empty runs.
    fn join_all(&mut self) {
        self.release_kept();
        for block in self.small.remove_empty() {
            self.release(block);
        }
    }

    /// A free block into which the request fits, and the page where it would begin.
    fn find(&mut self, pages: u32, alignment: u32) -> Option<(u32, u32)> {
        if let Some(found) = self.find_joined(pages, alignment) {
            return Some(found);
        }
        self.release_kept();
        self.find_joined(pages, alignment)
    }

    /// The page of a free block where the request would begin, if it fits into the block.
    #[inline]
    fn fit(&self, number: u32, pages: u32, alignment: u32) -> Option<u32> {
        let record = self.records.get(number as usize)?;
        let start = record.start.next_multiple_of(alignment);
        (start - record.start <= record.pages.saturating_sub(pages) && pages <= record.pages).then_some(start)
    }

    /// The same, of the blocks that are not kept.
    #[inline]
    fn find_joined(&self, pages: u32, alignment: u32) -> Option<(u32, u32)> {
        let fit = |number: u32| self.fit(number, pages, alignment);
        // Blocks of about this size: some are too small, or not aligned. A few are looked at.
        let (power, step) = class(pages);
        let mut number = self.first[power][step];
        for _ in 0..8 {
            match self.records.get(number as usize) {
                None => break,
                Some(record) => match fit(number) {
                    Some(start) => return Some((number, start)),
                    None => number = record.next,
                },
            }
        }
        // Any of a larger list fits.
        let wanted = pages.checked_add(alignment - 1)?;
        let wanted =
            if wanted < STEPS { wanted } else { wanted.checked_add((1 << (wanted.ilog2() - STEP_BITS)) - 1)? };
        let (mut power, step) = class(wanted);
        let mut steps = *self.steps.get(power)? & (u16::MAX << step);
        if steps == 0 {
            let powers = self.powers & (u32::MAX << power << 1);
            if powers == 0 {
                return None;
            }
            power = powers.trailing_zeros() as usize;
            steps = self.steps[power];
        }
        let number = self.first[power][steps.trailing_zeros() as usize];
        fit(number).map(|start| (number, start))
    }

    /// Takes pages out of a free block; what is left of it stays free.
    #[inline]
    fn carve(&mut self, number: u32, start: u32, pages: u32, state: u32) -> u32 {
        self.unlink(number);
        let Record { start: first, .. } = self.records[number as usize];
        let end = self.records[number as usize].end();
        let mut taken = number;
        if start > first {
            self.records[number as usize].pages = start - first;
            self.enter(number);
            self.link(number);
            taken = self.new_record(start, pages);
        } else {
            self.records[number as usize].pages = pages;
        }
        if end > start + pages {
            let rest = self.new_record(start + pages, end - start - pages);
            self.enter(rest);
            self.link(rest);
        }
        self.records[taken as usize].previous = state;
        self.enter(taken);
        taken
    }

    /// A block for a request, if there is room in what is mapped. It belongs to the claim.
    #[inline]
    pub(super) fn allocate(&mut self, request: Request) -> Option<Claim> {
        let taken = match request.shape {
            Shape::Small { class, .. } => self.take_small(class.into()),
            Shape::Large { pages, alignment } => self.take_kept(pages, alignment),
        };
        match taken {
            Some(claim) => Some(self.count(claim)),
            None => {
                let (pages, alignment) = request.pages();
                let (number, start) = self.find(pages, alignment)?;
                self.cut(request, number, start)
            }
        }
    }

    /// The same, in a free block: the one that memory has just become part of.
    pub(super) fn allocate_in(&mut self, number: u32, request: Request) -> Option<Claim> {
        let (pages, alignment) = request.pages();
        let start = self.fit(number, pages, alignment)?;
        self.cut(request, number, start)
    }

    /// The same where no memory can be added: looks at every free block. A small block may be one
    /// of a larger class then, or whole pages.
    pub(super) fn search(&mut self, request: Request) -> Option<Claim> {
        self.join_all();
        if let Some(claim) = self.allocate(request) {
            return Some(claim);
        }
        let (pages, alignment) = match request.shape {
            Shape::Large { pages, alignment } => (pages, alignment),
            Shape::Small { class, alignment } => {
                let larger = usize::from(class) + 1..small_blocks::CLASSES;
                let fits = |class: &usize| small_blocks::size_of_class(*class) % u64::from(alignment) == 0;
                if let Some(claim) = larger.filter(fits).find_map(|class| self.take_small(class)) {
                    return Some(self.count(claim));
                }
                (request.size.div_ceil(PAGE) as u32, 1)
            }
        };
        let (power, _) = class(pages);
        let (number, start) = self.first[power..].iter().flatten().find_map(|&first| {
            let mut number = first;
            while let Some(record) = self.records.get(number as usize) {
                if let Some(start) = self.fit(number, pages, alignment) {
                    return Some((number, start));
                }
                number = record.next;
            }
            None
        })?;
        let size = u64::from(pages) * PAGE;
        self.cut(Request { size, shape: Shape::Large { pages, alignment } }, number, start)
    }

    /// Takes the pages of a request out of a free block, where they fit.
    fn cut(&mut self, request: Request, number: u32, start: u32) -> Option<Claim> {
        let (pages, _) = request.pages();
        let claim = match request.shape {
            Shape::Small { class, .. } => {
                let block = self.carve(number, start, pages, RUN);
                let run = self.small.add(class.into(), address(start), block);
                if let Some((area, place)) = self.area(start) {
                    self.areas[area].table[place..place + pages as usize].fill(run | OF_RUN);
                }
                self.take_small(class.into())?
            }
            Shape::Large { .. } => {
                let number = self.carve(number, start, pages, OWNED);
                Claim { address: address(start), size: request.size, number }
            }
        };
        Some(self.count(claim))
    }

    #[inline]
    fn take_small(&mut self, class: usize) -> Option<Claim> {
        let (run, address) = self.small.take(class)?;
        Some(Claim { address, size: small_blocks::size_of_class(class), number: run | OF_RUN })
    }

    #[inline]
    fn count(&mut self, claim: Claim) -> Claim {
        self.usage.in_use += claim.size;
        self.usage.blocks += 1;
        self.usage.peak = self.usage.peak.max(self.usage.in_use);
        claim
    }

    /// Frees the block of a claim. No other call has freed it.
    #[inline]
    pub(super) fn free(&mut self, claim: Claim) {
        let Claim { address, size, number } = claim;
        if number & OF_RUN == 0 {
            self.keep(number);
        } else if let Some(block) = self.small.free(number & !OF_RUN, address) {
            self.release(block);
        }
        self.usage.in_use -= size;
        self.usage.blocks -= 1;
    }

    /// Frees the block that begins at an address and belongs to no claim. Returns its size.
    pub(super) fn free_at(&mut self, at: u64) -> Result<u64, Misuse> {
        let claim = self.claim_at(at)?;
        self.free(claim);
        Ok(claim.size)
    }

    /// Claims the block that begins at an address and belongs to no claim.
    pub(super) fn claim_at(&mut self, at: u64) -> Result<Claim, Misuse> {
        let (number, size) = self.used_at(at).ok_or(Misuse::NoBlock)?;
        let is_loose = match number & OF_RUN {
            0 => self.records[number as usize].previous == USED,
            _ => self.small.remove_loose(number & !OF_RUN, at),
        };
        if !is_loose {
            return Err(Misuse::Owned);
        }
        if number & OF_RUN == 0 {
            self.records[number as usize].previous = OWNED;
        }
        Ok(Claim { address: at, size, number })
    }

    /// The number and the size of the block in use that begins at an address.
    #[inline]
    fn used_at(&self, at: u64) -> Option<(u32, u64)> {
        if at < BASE {
            return None;
        }
        let entry = self.entry(page(at));
        if entry & OF_RUN != 0 {
            return Some((entry, self.small.size(entry & !OF_RUN, at)?));
        }
        let number = self.starting_at(page(at)).filter(|_| at % PAGE == 0)?;
        let record = &self.records[number as usize];
        matches!(record.previous, USED | OWNED).then_some((number, u64::from(record.pages) * PAGE))
    }

    /// The size of the block that begins at an address.
    pub(super) fn size(&self, at: u64) -> Option<u64> {
        self.used_at(at).map(|(_, size)| size)
    }

    /// Ends a claim without freeing its block: that is freed by its address from now on.
    #[inline]
    pub(super) fn disown(&mut self, claim: Claim) {
        let Claim { address, number, .. } = claim;
        match number & OF_RUN {
            0 => self.records[number as usize].previous = USED,
            _ => self.small.add_loose(number & !OF_RUN, address),
        }
    }

    /// The free memory that ends at an address: the block that new memory there would become part
    /// of.
    pub(super) fn free_before(&self, at: u64) -> u64 {
        let before = self.ending_at(page(at)).map(|number| self.records[number as usize]);
        before.filter(Record::is_free).map_or(0, |record| u64::from(record.pages) * PAGE)
    }

    /// The free memory that begins at an address, and that new memory before it would become part
    /// of.
    pub(super) fn free_after(&self, at: u64) -> u64 {
        let after = self.starting_at(page(at)).filter(|_| self.is_inside(page(at)));
        let after = after.map(|number| self.records[number as usize]);
        after.filter(Record::is_free).map_or(0, |record| u64::from(record.pages) * PAGE)
    }

    /// The size of a free block that is at most a sixteenth smaller than the largest.
    pub(super) fn largest_free(&mut self) -> u64 {
        self.release_kept();
        let Some(power) = self.powers.checked_ilog2() else { return 0 };
        let Some(step) = self.steps[power as usize].checked_ilog2() else { return 0 };
        let number = self.first[power as usize][step as usize];
        self.records.get(number as usize).map_or(0, |record| u64::from(record.pages) * PAGE)
    }

    /// Free memory, in order of addresses, in blocks of at least `smallest` bytes. Empty runs of
    /// small blocks become free first.
    pub(super) fn free_ranges(&mut self, smallest: u64) -> Vec<Range<u64>> {
        self.join_all();
        let (power, _) = class((smallest / PAGE) as u32);
        let lists = self.first[power..].iter().flatten().copied();
        let mut found = Vec::new();
        for mut number in lists {
            while let Some(record) = self.records.get(number as usize) {
                found.push(address(record.start)..address(record.end()));
                number = record.next;
            }
        }
        found.retain(|range| range.end - range.start >= smallest);
        found.sort_unstable_by_key(|range| range.start);
        found
    }

    /// Forgets memory that is about to be unmapped: a part of a free block, which begins at
    /// `block`.
    pub(super) fn remove_memory(&mut self, block: u64, part: &Range<u64>) {
        let (first, end) = (page(part.start), page(part.end));
        let Some(number) = self.starting_at(page(block)) else { return };
        if self.records[number as usize].is_free() {
            let removed = self.carve(number, first, end - first, USED);
            self.bury(removed);
        }
    }

    /// Forgets the addresses of a reservation, none of which has memory any more.
    pub(super) fn remove_area(&mut self, start: u64) {
        self.areas.retain(|area| area.start != page(start));
    }

    /// What is in use, in order; runs of small blocks as a whole.
    pub(super) fn used_ranges(&self) -> Vec<Range<u64>> {
        let is_used = |record: &&Record| matches!(record.previous, USED | OWNED | RUN);
        let used = self.records.iter().filter(is_used);
        let mut used: Vec<Range<u64>> = used.map(|record| address(record.start)..address(record.end())).collect();
        used.sort_unstable_by_key(|range| range.start);
        used.dedup_by(|next, before| {
            let touches = before.end == next.start && self.is_inside(page(next.start));
            if touches {
                before.end = next.end;
            }
            touches
        });
        used
    }

    /// Frees all blocks.
    pub(super) fn reset(&mut self, mapped: &[Range<u64>]) {
        let peak = self.usage.peak;
        let areas = std::mem::take(&mut self.areas);
        *self = Blocks { areas, usage: Usage { peak, ..Usage::default() }, ..Blocks::new() };
        for range in mapped {
            self.add_memory(range.start, range.end - range.start);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

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
        let mut blocks = Blocks::new();
        for area in (0..areas).rev() {
            blocks.add_area(BASE + area * AREA, AREA);
            blocks.add_memory(BASE + area * AREA, AREA);
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
        let mut blocks = Blocks::new();
        blocks.add_area(BASE, AREA);
        let number = blocks.add_memory(BASE + 240 * PAGE, 272 * PAGE);
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
        blocks.remove_memory(BASE, &part);
        let taken: Vec<Claim> = std::iter::from_fn(|| blocks.allocate(request(1 << 20, 1))).collect();
        assert_eq!(taken.len(), 56);
        assert!(taken.iter().all(|claim| !part.contains(&claim.address)));
        assert_eq!(blocks.free_before(part.end), 0);
        blocks.add_memory(part.start, part.end - part.start);
        assert_eq!(blocks.free_before(part.end), 8 << 20);
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
    fn blocks_that_are_kept_are_joined_before_a_request_is_refused() {
        let mut blocks = blocks(1);
        // One of each size, so that each is kept, but for those that share a group.
        let sizes = (9..=160).map(|pages| pages * PAGE);
        let taken: Vec<Claim> = sizes.map(|size| blocks.allocate(request(size, 1)).unwrap()).collect();
        for &claim in &taken {
            blocks.free(claim);
        }
        assert!(blocks.kept.iter().filter(|&&number| number != NONE).count() > GROUPS / 2);
        let whole = blocks.allocate(request(AREA, 1)).unwrap();
        assert_eq!((whole.address, blocks.usage().blocks), (BASE, 1));
    }

    #[test]
    fn a_kept_block_is_not_handed_out_for_an_alignment_that_it_does_not_have() {
        let mut blocks = blocks(1);
        let first = blocks.allocate(request(10 * PAGE, 1)).unwrap();
        let second = blocks.allocate(request(16 * PAGE, 1)).unwrap();
        assert_ne!(second.address % (16 * PAGE), 0);
        blocks.free(second);
        let aligned = blocks.allocate(request(16 * PAGE, 16 * PAGE)).unwrap();
        assert_eq!(aligned.address % (16 * PAGE), 0);
        blocks.free(first);
    }

    #[test]
    fn a_record_takes_16_bytes_for_4_kib() {
        assert_eq!(size_of::<Record>(), 16);
    }
}
