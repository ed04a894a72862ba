//! What is mapped where.
//!
//! The table knows where mappings start: a bit for every 2 MiB, in one [`Gib`] for each GiB of
//! addresses that was ever mapped, and above a bit for every GiB that has a start. Where a mapping
//! ends follows from its size, and none is larger than 128 GiB. So entering a mapping, taking it
//! out and finding it take a few steps, however many there are and however large they are, and
//! listing takes a few steps for each mapping that is found.
//!
//! A range is entered before MEM_MAP and taken out after MEM_UNMAP, so that no two threads ever
//! call the kernel for the same addresses. The entry holds weak references: to a lookup, a mapping
//! exists while its strong count is not 0, which is from the return of MEM_MAP to the beginning of
//! MEM_UNMAP. Its owner can hide it for a while, if nothing else uses it: then only the owner can
//! make slices of it.

use super::Mapped;
use crate::driver::svm::{HUGE_PAGE, RESERVE_HEAP_MAX};
use crate::physical::Block;
use crate::reserve::ReserveOptions;
use crate::session::undo::Live;
use crate::slots::lock;
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

const START: u64 = ReserveOptions::ADDRESSES.start;
const CHUNKS: usize = ((ReserveOptions::ADDRESSES.end - START) / HUGE_PAGE) as usize;

/// 64-chunk words of a GiB.
const WORDS: usize = 8;
const CHUNKS_OF_GIB: u32 = WORDS as u32 * 64;
const GIBS: usize = CHUNKS / CHUNKS_OF_GIB as usize;

/// All mappings of a session.
#[derive(Debug, Default)]
pub(crate) struct MappingTable(Mutex<Ranges>);

/// The table itself.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// Made when the first mapping comes; a GiB when its first mapping comes.
    gibs: Vec<Option<Box<Gib>>>,
    /// A bit for each GiB in which a mapping starts.
    started: [u64; GIBS.div_ceil(64)],
}

/// The mappings that start in one GiB.
#[derive(Debug, Default, Clone)]
struct Gib {
    /// A bit for each chunk in which one starts.
    starts: [u64; WORDS],
    /// A bit for each word of `starts` that is not 0.
    summary: u8,
    words: [Option<Box<Word>>; WORDS],
}

/// The mappings that start in 64 chunks.
#[derive(Debug, Clone)]
struct Word {
    /// For each chunk in which one starts, the index of its entry.
    indices: [u8; 64],
    entries: Vec<Entry>,
}

/// A mapping, or a range that is about to be one.
#[derive(Debug, Clone)]
struct Entry {
    /// Dead while MEM_MAP or MEM_UNMAP runs, if the kernel would not unmap it, and while hidden.
    mapped: Weak<Live<Mapped>>,
    /// Beside the mapping, so that looking for the memory does not keep the mapping alive.
    block: Weak<Live<Block>>,
    chunks: u32,
    /// The chunk in which it starts, in its word.
    bit: u8,
}

/// The chunk at which a mapping starts, and its entry.
type Found<'a> = (u32, &'a Entry);

impl MappingTable {
    /// Keeps other threads from mapping and unmapping.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, Ranges> {
        lock(&self.0)
    }

    /// Start and size of the mapping that contains an address. Nothing is kept alive, so the owner
    /// can unmap and free at any time.
    pub(crate) fn range_at(&self, address: u64) -> Option<(u64, u64)> {
        let table = self.lock();
        let (first, entry) = table.find(address).filter(|(_, entry)| entry.is_alive())?;
        Some((start(first), entry.size()))
    }

    /// The memory of the mapping that contains an address. The mapping itself is not kept alive.
    pub(crate) fn memory_at(&self, address: u64) -> Option<Arc<Live<Block>>> {
        let table = self.lock();
        let (_, entry) = table.find(address).filter(|(_, entry)| entry.is_alive())?;
        entry.block.upgrade()
    }

    /// The mappings that cover `start..end` without a hole; `None` if there is one.
    pub(crate) fn cover(&self, start: u64, end: u64) -> Option<Cover> {
        let table = self.lock();
        let found = Cover::find(start, end, |address| table.find(address)?.1.mapped.upgrade());
        // Not dropped under the lock, also when it is of no use: the last reference unmaps, which
        // takes the lock.
        drop(table);
        found.and_then(|(cover, covered)| (covered >= end).then_some(cover))
    }

    /// The memory that is mapped in `start..end`, in order.
    pub(crate) fn blocks(&self, start: u64, end: u64) -> Vec<(u64, Arc<Live<Block>>)> {
        let mut found = Vec::new();
        self.lock().each(start, end, |first, entry| {
            if entry.is_alive() {
                found.extend(entry.block.upgrade().map(|block| (self::start(first), block)));
            }
        });
        found
    }

    /// How many mappings there are, and their bytes.
    pub(crate) fn total(&self) -> (u64, u64) {
        let (mut mappings, mut bytes) = (0, 0);
        self.lock().each(ReserveOptions::ADDRESSES.start, ReserveOptions::ADDRESSES.end, |_, entry| {
            mappings += 1;
            bytes += entry.size();
        });
        (mappings, bytes)
    }

    /// The ranges that are mapped in `start..end`, in order. No mapping crosses `start` or `end`.
    pub(crate) fn ranges(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        // Room for what most reservations hold.
        let mut found = Vec::with_capacity(128);
        self.lock().each(start, end, |first, entry| found.push((self::start(first), entry.size())));
        found
    }
}

impl Default for Ranges {
    fn default() -> Self {
        Ranges { gibs: Vec::new(), started: [0; GIBS.div_ceil(64)] }
    }
}

/// Mappings that follow each other without a hole.
#[derive(Debug)]
pub(crate) struct Cover {
    pub(crate) first: Arc<Live<Mapped>>,
    pub(crate) others: Vec<Arc<Live<Mapped>>>,
    /// What must not be freed while they are used: a block of a pool.
    pub(crate) keeper: Option<Keeper>,
}

/// Keeps something until the last copy of it is over.
pub(crate) type Keeper = Arc<dyn Any + Send + Sync>;

impl Cover {
    /// The mappings from `start` on, up to a hole or to `end`, and where they end. `at` returns the
    /// mapping that contains an address.
    pub(crate) fn find(start: u64, end: u64, at: impl Fn(u64) -> Option<Arc<Live<Mapped>>>) -> Option<(Cover, u64)> {
        let next = |address: u64| at(address).map(|mapped| (mapped.address + mapped.size(), mapped));
        let (mut covered, first) = next(start)?;
        let mut cover = Cover { first, others: Vec::new(), keeper: None };
        while covered < end {
            let Some((end, mapped)) = next(covered) else { break };
            covered = end;
            cover.others.push(mapped);
        }
        Some((cover, covered))
    }

    /// Those that cover a part.
    pub(crate) fn part(&self, address: u64, size: u64) -> Cover {
        let begins = |address: u64| self.others.partition_point(|mapped| mapped.address <= address);
        let (first, end) = (begins(address), begins((address + size).saturating_sub(1)));
        // The one before the first that begins after the address contains it.
        let containing = first.checked_sub(1).and_then(|at| self.others.get(at)).unwrap_or(&self.first);
        let others = self.others.get(first..end).unwrap_or_default().to_vec();
        Cover { first: containing.clone(), others, keeper: self.keeper.clone() }
    }

    /// Where the first mapping behind an address begins.
    pub(crate) fn next_border(&self, address: u64) -> Option<u64> {
        let next = self.others.partition_point(|mapped| mapped.address <= address);
        self.others.get(next).map(|mapped| mapped.address)
    }
}

impl Ranges {
    /// Whether any of a range is mapped.
    #[inline]
    pub(crate) fn is_occupied(&self, address: u64, size: u64) -> bool {
        // Of the mappings that start before the range ends, the last one also ends last.
        let (first, end) = (chunk(address), chunk(address + size));
        self.last_from(end - 1).is_some_and(|(found, entry)| found + entry.chunks > first)
    }

    /// Enters a free range, for a mapping of `block` that is about to be made.
    #[inline]
    pub(crate) fn insert(&mut self, address: u64, mapped: &Weak<Live<Mapped>>, block: &Arc<Live<Block>>) {
        let (first, chunks) = (chunk(address), (block.size / HUGE_PAGE) as u32);
        let bit = (first % 64) as u8;
        self.enter(first, Entry { mapped: mapped.clone(), block: Arc::downgrade(block), chunks, bit });
    }

    #[inline]
    fn enter(&mut self, first: u32, entry: Entry) {
        let (gib, word, bit) = split(first);
        if self.gibs.is_empty() {
            // All zero, so no page of it is touched before it is needed.
            self.gibs = vec![None; GIBS];
        }
        let table = self.gibs[gib].get_or_insert_default();
        let others = table.starts[word];
        table.starts[word] = others | 1 << bit;
        if others == 0 {
            table.summary |= 1 << word;
            self.started[gib / 64] |= 1 << (gib % 64);
        }
        let entries = table.words[word].get_or_insert_with(Word::new);
        entries.indices[bit as usize % 64] = entries.entries.len() as u8;
        entries.entries.push(entry);
    }

    /// Takes a mapping out: the kernel does not have it any more.
    #[inline]
    pub(crate) fn remove(&mut self, address: u64) {
        let (gib, word, bit) = split(chunk(address));
        let Some(table) = self.gibs.get_mut(gib).and_then(Option::as_mut) else { return };
        let starts = table.starts[word];
        if starts >> bit & 1 == 0 {
            return;
        }
        let others = starts & !(1 << bit);
        table.starts[word] = others;
        if others == 0 {
            table.summary &= !(1 << word);
            if table.summary == 0 {
                self.started[gib / 64] &= !(1 << (gib % 64));
            }
        }
        if let Some(entries) = &mut table.words[word] {
            entries.remove(bit);
        }
    }

    /// Puts a mapping into its range again that the kernel would not unmap, or that was hidden.
    pub(crate) fn restore(&mut self, mapped: &Arc<Live<Mapped>>) {
        if let Some(entry) = self.entry(mapped.address) {
            entry.mapped = Arc::downgrade(mapped);
        }
    }

    /// Hides a mapping from lookups. Returns false, and changes nothing, if anything but its owner
    /// uses it: lookups take this lock, so nothing begins to use it meanwhile.
    pub(crate) fn hide(&mut self, mapped: &mut Arc<Live<Mapped>>) -> bool {
        let Some(entry) = self.entry(mapped.address) else { return false };
        entry.mapped = Weak::new();
        let is_unused = Arc::get_mut(mapped).is_some();
        if !is_unused {
            entry.mapped = Arc::downgrade(mapped);
        }
        is_unused
    }

    /// The entry of the mapping that starts at an address.
    fn entry(&mut self, address: u64) -> Option<&mut Entry> {
        let (gib, word, bit) = split(chunk(address));
        let entries = self.gibs.get_mut(gib)?.as_mut()?.words[word].as_mut()?;
        let index = usize::from(entries.indices[bit as usize % 64]);
        entries.entries.get_mut(index)
    }

    /// The entry that contains an address.
    #[inline]
    fn find(&self, address: u64) -> Option<Found<'_>> {
        if !ReserveOptions::ADDRESSES.contains(&address) {
            return None;
        }
        let wanted = chunk(address);
        self.last_from(wanted).filter(|(first, entry)| first + entry.chunks > wanted)
    }

    /// The last mapping that starts at a chunk or before it.
    // Inlined by force: in most cases it is the first one that is looked at.
    #[inline(always)]
    fn last_from(&self, chunk: u32) -> Option<Found<'_>> {
        let (gib, word, bit) = split(chunk);
        match self.gibs.get(gib).and_then(Option::as_deref) {
            Some(table) if table.starts[word] & (u64::MAX >> (63 - bit)) != 0 => {
                table.found(gib, word, table.starts[word] & (u64::MAX >> (63 - bit)))
            }
            table => table.and_then(|table| table.last_before(gib, word)).or_else(|| self.last_before(gib)),
        }
    }

    /// The last mapping that starts before a GiB.
    #[inline(always)]
    fn last_before(&self, gib: usize) -> Option<Found<'_>> {
        let gib = self.started_before(gib)?;
        self.gibs.get(gib)?.as_deref()?.last_before(gib, WORDS)
    }

    /// The last GiB before this one in which a mapping starts. Not further away than four words of
    /// GiBs: a mapping is no larger than two, as a reservation is, and so is a range of which the
    /// last GiB is looked for.
    #[inline(always)]
    fn started_before(&self, gib: usize) -> Option<usize> {
        const { assert!(RESERVE_HEAP_MAX / HUGE_PAGE <= 2 * 64 * CHUNKS_OF_GIB as u64) };
        let last = gib / 64;
        let mut word = last;
        let mut bits = self.started[last] & ((1 << (gib % 64)) - 1);
        while bits == 0 {
            if word == 0 || word + 4 == last {
                return None;
            }
            word -= 1;
            bits = self.started[word];
        }
        Some(word * 64 + bits.ilog2() as usize)
    }

    /// Calls with every mapping that starts in `start..end`, in order.
    fn each(&self, start: u64, end: u64, mut call: impl FnMut(u32, &Entry)) {
        let (first, last) = (chunk(start), chunk(end - 1));
        let (mut gib, last_gib) = (split(first).0, split(last).0);
        while gib <= last_gib {
            let ahead = self.started[gib / 64] >> (gib % 64);
            if ahead & 1 == 0 {
                // On to the next GiB in which one starts, or to the next word of their bits.
                gib += if ahead == 0 { 64 - gib % 64 } else { ahead.trailing_zeros() as usize };
                continue;
            }
            if let Some(table) = self.gibs.get(gib).and_then(Option::as_deref) {
                let base = gib as u32 * CHUNKS_OF_GIB;
                table.each(first.max(base) - base, last.min(base + CHUNKS_OF_GIB - 1) - base, |at, entry| {
                    call(base + at, entry);
                });
            }
            gib += 1;
        }
    }
}

impl Gib {
    /// The last mapping that starts before a word.
    #[inline]
    fn last_before(&self, gib: usize, word: usize) -> Option<Found<'_>> {
        let words = u32::from(self.summary) & ((1 << word) - 1);
        let word = 31_u32.checked_sub(words.leading_zeros())? as usize;
        self.found(gib, word, self.starts[word % WORDS])
    }

    /// The mapping of the last of some bits of a word.
    #[inline(always)]
    fn found(&self, gib: usize, word: usize, bits: u64) -> Option<Found<'_>> {
        let bit = bits.checked_ilog2()?;
        Some(((gib * WORDS + word) as u32 * 64 + bit, self.words[word].as_deref()?.get(bit)?))
    }

    /// Calls with every mapping that starts from one chunk of the GiB to another, in order.
    #[inline]
    fn each(&self, first: u32, last: u32, mut call: impl FnMut(u32, &Entry)) {
        let (first_word, last_word) = (first as usize / 64, last as usize / 64);
        let mut words = self.summary & (u8::MAX << (first / 64)) & (u8::MAX >> (7 - last / 64));
        while words != 0 {
            let word = words.trailing_zeros() as usize % WORDS;
            words &= words - 1;
            let base = word as u32 * 64;
            let mut starts = self.starts[word];
            if word == first_word {
                starts &= u64::MAX << (first % 64);
            }
            if word == last_word {
                starts &= u64::MAX >> (63 - last % 64);
            }
            let Some(entries) = self.words[word].as_deref() else { continue };
            while starts != 0 {
                let bit = starts.trailing_zeros();
                starts &= starts - 1;
                if let Some(entry) = entries.get(bit) {
                    call(base + bit, entry);
                }
            }
        }
    }
}

impl Word {
    #[cold]
    fn new() -> Box<Word> {
        // Of a few large mappings there is one here.
        Box::new(Word { indices: [0; 64], entries: Vec::with_capacity(1) })
    }

    /// The entry of a bit that is set.
    #[inline]
    fn get(&self, bit: u32) -> Option<&Entry> {
        self.entries.get(usize::from(self.indices[bit as usize % 64]))
    }

    #[inline]
    fn remove(&mut self, bit: u32) {
        let index = self.indices[bit as usize % 64];
        // The last one takes its place.
        drop(self.entries.swap_remove(usize::from(index)));
        if let Some(moved) = self.entries.get(usize::from(index)) {
            self.indices[usize::from(moved.bit) % 64] = index;
        }
    }
}

impl Entry {
    /// Whether the mapping can be used.
    #[inline]
    fn is_alive(&self) -> bool {
        self.mapped.strong_count() > 0
    }

    #[inline]
    fn size(&self) -> u64 {
        u64::from(self.chunks) * HUGE_PAGE
    }
}

/// The chunk of an address that could be reserved.
#[inline]
fn chunk(address: u64) -> u32 {
    ((address - START) / HUGE_PAGE) as u32
}

/// The address of a chunk.
#[inline]
fn start(chunk: u32) -> u64 {
    START + u64::from(chunk) * HUGE_PAGE
}

/// GiB, word and bit of a chunk.
#[inline]
fn split(chunk: u32) -> (usize, usize, u32) {
    (chunk as usize / (64 * WORDS), chunk as usize / 64 % WORDS, chunk % 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const MIB2: u64 = HUGE_PAGE;
    const GIB: u64 = 512 * MIB2;

    fn enter(table: &MappingTable, address: u64, size: u64) {
        let (first, chunks) = (chunk(address), (size / MIB2) as u32);
        let entry = Entry { mapped: Weak::new(), block: Weak::new(), chunks, bit: (first % 64) as u8 };
        table.lock().enter(first, entry);
    }

    /// The start and the size of the mapping that contains an address, dead as those of tests are.
    fn found(table: &MappingTable, address: u64) -> Option<(u64, u64)> {
        table.lock().find(address).map(|(first, entry)| (start(first), entry.size()))
    }

    /// Sizes and places from one chunk to many GiBs, near the beginning and far from it.
    fn place() -> impl Strategy<Value = (u64, u64)> {
        let offset = prop_oneof![0..600u64, 0..5_000u64, 0..2_000_000u64];
        let chunks = prop_oneof![1..4u64, 1..300u64, 1..65_537u64];
        (offset, chunks).prop_map(|(offset, chunks)| (START + offset * MIB2, chunks * MIB2))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn the_table_agrees_with_a_list_of_ranges(
            actions in prop::collection::vec((any::<bool>(), place()), 1..120),
        ) {
            let table = MappingTable::default();
            let mut model: BTreeMap<u64, u64> = BTreeMap::new();
            for (insert, (address, size)) in actions {
                let before = model.range(..address + size).next_back();
                let overlaps = before.is_some_and(|(&start, &length)| start + length > address);
                prop_assert_eq!(table.lock().is_occupied(address, size), overlaps);
                if insert && !overlaps {
                    enter(&table, address, size);
                    model.insert(address, size);
                } else if let Some((&start, _)) = model.range(..=address).next_back() {
                    if !insert {
                        table.lock().remove(start);
                        model.remove(&start);
                    }
                }
                let ranges: Vec<(u64, u64)> = model.iter().map(|(&start, &length)| (start, length)).collect();
                prop_assert_eq!(table.ranges(START, ReserveOptions::ADDRESSES.end), ranges);
                let inside: Vec<(u64, u64)> =
                    model.range(address..address + size).map(|(&start, &length)| (start, length)).collect();
                prop_assert_eq!(table.ranges(address, address + size), inside);
                for (&start, &length) in &model {
                    for inside in [0, length / 2, length - 1] {
                        prop_assert_eq!(found(&table, start + inside), Some((start, length)));
                    }
                    prop_assert_eq!(found(&table, start + length).is_some(), model.contains_key(&(start + length)));
                }
            }
            for start in model.keys() {
                table.lock().remove(*start);
            }
            let table = table.lock();
            prop_assert!(table.started.iter().all(|&bits| bits == 0), "no bit is left");
        }
    }

    #[test]
    fn addresses_that_cannot_be_reserved_are_not_mapped() {
        let table = MappingTable::default();
        enter(&table, START, MIB2);
        for address in [0, START - 1, ReserveOptions::ADDRESSES.end, u64::MAX] {
            assert!(table.range_at(address).is_none());
            assert!(table.memory_at(address).is_none());
        }
    }

    #[test]
    fn the_largest_mapping_is_found_from_its_last_byte() {
        let table = MappingTable::default();
        let (address, size) = (START + 77 * MIB2, 128 * GIB);
        enter(&table, address, size);
        assert_eq!(found(&table, address + size - 1), Some((address, size)));
        assert_eq!(found(&table, address + size), None);
        assert!(table.lock().is_occupied(address + size - MIB2, MIB2));
        assert!(!table.lock().is_occupied(address + size, MIB2));
    }

    #[test]
    fn the_last_addresses_can_be_mapped() {
        let table = MappingTable::default();
        let address = ReserveOptions::ADDRESSES.end - MIB2;
        enter(&table, address, MIB2);
        assert!(table.lock().is_occupied(ReserveOptions::ADDRESSES.end - GIB, GIB));
        assert_eq!(table.ranges(START, ReserveOptions::ADDRESSES.end), [(address, MIB2)]);
    }

    #[test]
    fn a_mapping_that_is_not_made_yet_occupies_its_range_and_is_not_found() {
        let table = MappingTable::default();
        enter(&table, START, MIB2);
        assert!(table.lock().is_occupied(START, MIB2));
        assert_eq!(table.range_at(START), None);
        assert!(table.cover(START, START + MIB2).is_none());
    }
}
