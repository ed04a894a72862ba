//! What is mapped where.
//!
//! A bit for every 2 MiB of the addresses that reservations are made from tells whether it is
//! mapped, another whether a mapping starts there, and a place for every 2 MiB holds the mapping
//! that starts there and its memory; so entering a mapping, taking it out and finding it take a few
//! steps however many there are. The table takes 43 MiB of address space, and memory only where
//! something is mapped: 8 KiB for each GiB of addresses. A range is entered before MEM_MAP and
//! taken out after MEM_UNMAP, so no two threads ever ask the kernel for the same.

use super::Mapped;
use crate::driver::svm::HUGE_PAGE;
use crate::physical::Block;
use crate::reserve::ReserveOptions;
use crate::session::undo::Live;
use crate::slots::lock;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

const START: u64 = ReserveOptions::ADDRESSES.start;
const CHUNKS: usize = ((ReserveOptions::ADDRESSES.end - START) / HUGE_PAGE) as usize;

/// All mappings of a session.
#[derive(Debug, Default)]
pub(crate) struct MappingTable(Mutex<Ranges>);

/// The table itself. Its parts are made when the first mapping comes, all zero, so that no page is
/// touched before it is needed.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// For each 64 chunks: which are mapped, and where mappings start.
    bits: Vec<[u64; 2]>,
    /// For each chunk where a mapping starts, the mapping and its memory as [`keep`] made numbers
    /// of them; zeros elsewhere, and while MEM_MAP runs. A dead mapping is one that is being
    /// unmapped, or that the kernel would not unmap.
    places: Vec<[usize; 2]>,
}

const MAPPED: usize = 0;
const FIRST: usize = 1;

impl MappingTable {
    /// Keeps other threads from mapping and unmapping.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, Ranges> {
        lock(&self.0)
    }

    /// The start and the memory of the mapping that contains an address.
    ///
    /// The mapping itself is not kept for a moment: the code that drops it may count on its
    /// addresses.
    pub(crate) fn find(&self, address: u64) -> Option<(u64, Arc<Live<Block>>)> {
        let table = self.lock();
        let chunk = chunk(address).filter(|&chunk| table.is_mapped(chunk))?;
        let first = table.first(chunk);
        let alive = table.mapping(first)?.strong_count() > 0;
        let block = if alive { table.memory(first)?.upgrade() } else { None };
        // Not dropped under the lock: the last reference releases the memory.
        drop(table);
        block.map(|block| (START + u64::from(first) * HUGE_PAGE, block))
    }

    /// The mappings that cover `start..end` without a hole; `None` if there is one.
    pub(crate) fn cover(&self, start: u64, end: u64) -> Option<Vec<Arc<Live<Mapped>>>> {
        let mut cover = Vec::new();
        let mut covered = start;
        let table = self.lock();
        while covered < end {
            let Some(chunk) = chunk(covered).filter(|&chunk| table.is_mapped(chunk)) else { break };
            let Some(mapped) = table.mapping(table.first(chunk)).and_then(|mapped| mapped.upgrade()) else { break };
            covered = mapped.address + mapped.size();
            cover.push(mapped);
        }
        // Not dropped under the lock, also when it is of no use: the last reference unmaps, which
        // takes the lock.
        drop(table);
        (covered >= end).then_some(cover)
    }

    /// The ranges that are mapped in `start..end`, in order.
    pub(crate) fn ranges(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let table = self.lock();
        let mut found = Vec::new();
        let (Some(mut at), Some(last)) = (chunk(start), chunk(end - 1)) else { return found };
        while at <= last {
            if !table.is_mapped(at) {
                at += 1;
                continue;
            }
            let mut next = at + 1;
            while next <= last && table.is_mapped(next) && !table.bit(next, FIRST) {
                next += 1;
            }
            found.push((START + u64::from(at) * HUGE_PAGE, u64::from(next - at) * HUGE_PAGE));
            at = next;
        }
        found
    }
}

impl Ranges {
    /// Whether any of a range is mapped.
    #[inline]
    pub(crate) fn is_occupied(&self, address: u64, size: u64) -> bool {
        let occupied = |word: usize, mask: u64| self.bits.get(word).is_some_and(|bits| bits[MAPPED] & mask != 0);
        match one_word(address, size) {
            Some((word, mask)) => occupied(word, mask),
            None => words(address, size).any(|(word, mask)| occupied(word, mask)),
        }
    }

    /// Enters a free range.
    #[inline]
    pub(crate) fn insert(&mut self, address: u64, size: u64) {
        if self.bits.is_empty() {
            self.bits = vec![[0; 2]; CHUNKS / 64];
            self.places = vec![[0; 2]; CHUNKS];
        }
        match one_word(address, size) {
            Some((word, mask)) => self.bits[word][MAPPED] |= mask,
            None => words(address, size).for_each(|(word, mask)| self.bits[word][MAPPED] |= mask),
        }
        let first = ((address - START) / HUGE_PAGE) as usize;
        self.bits[first / 64][FIRST] |= 1 << (first % 64);
    }

    /// Puts a mapping into its range, which was entered before.
    #[inline]
    pub(crate) fn fill(&mut self, mapped: &Arc<Live<Mapped>>) {
        let first = ((mapped.address - START) / HUGE_PAGE) as usize;
        if self.places[first] != [0; 2] {
            // It is entered again: the kernel would not unmap it.
            self.vacate(first);
        }
        self.places[first] = [keep(Arc::downgrade(mapped)), keep(Arc::downgrade(&mapped.block))];
    }

    /// Takes a mapping out: the kernel has it no more.
    #[inline]
    pub(crate) fn remove(&mut self, address: u64, size: u64) {
        match one_word(address, size) {
            Some((word, mask)) => self.bits[word][MAPPED] &= !mask,
            None => words(address, size).for_each(|(word, mask)| self.bits[word][MAPPED] &= !mask),
        }
        let first = ((address - START) / HUGE_PAGE) as usize;
        self.bits[first / 64][FIRST] &= !(1 << (first % 64));
        self.vacate(first);
    }

    /// Drops what is kept in a place.
    #[inline]
    fn vacate(&mut self, place: usize) {
        let [mapped, block] = std::mem::take(&mut self.places[place]);
        // SAFETY: `insert` made them of these types, and they were just taken out, so they are not
        // used again.
        unsafe {
            drop_kept::<Live<Mapped>>(mapped);
            drop_kept::<Live<Block>>(block);
        }
    }

    /// The mapping that starts at a chunk.
    fn mapping(&self, first: u32) -> Option<ManuallyDrop<Weak<Live<Mapped>>>> {
        // SAFETY: `insert` made it of this type, and it is not dropped while the table is
        // borrowed.
        self.places.get(first as usize).and_then(|&[mapped, _]| unsafe { kept(mapped) })
    }

    /// The memory of the mapping that starts at a chunk.
    fn memory(&self, first: u32) -> Option<ManuallyDrop<Weak<Live<Block>>>> {
        // SAFETY: `insert` made it of this type, and it is not dropped while the table is
        // borrowed.
        self.places.get(first as usize).and_then(|&[_, block]| unsafe { kept(block) })
    }

    fn bit(&self, chunk: u32, which: usize) -> bool {
        self.bits.get(chunk as usize / 64).is_some_and(|bits| bits[which] >> (chunk % 64) & 1 != 0)
    }

    fn is_mapped(&self, chunk: u32) -> bool {
        self.bit(chunk, MAPPED)
    }

    /// The first chunk of the mapping that a mapped chunk belongs to.
    fn first(&self, chunk: u32) -> u32 {
        let mut word = chunk as usize / 64;
        let mut firsts = self.bits[word][FIRST] & (u64::MAX >> (63 - chunk % 64));
        while firsts == 0 && word > 0 {
            word -= 1;
            firsts = self.bits[word][FIRST];
        }
        word as u32 * 64 + 63_u32.saturating_sub(firsts.leading_zeros())
    }
}

/// The chunk of an address; `None` if it is none that could be reserved.
#[inline]
fn chunk(address: u64) -> Option<u32> {
    ReserveOptions::ADDRESSES.contains(&address).then(|| ((address - START) / HUGE_PAGE) as u32)
}

/// The word and its bits of a range that touches one word only.
#[inline]
fn one_word(address: u64, size: u64) -> Option<(usize, u64)> {
    let (first, count) = ((address - START) / HUGE_PAGE, size / HUGE_PAGE);
    (first % 64 + count <= 64).then(|| ((first / 64) as usize, (u64::MAX >> (64 - count)) << (first % 64)))
}

/// The words that a range touches, each with the bits that it has there.
fn words(address: u64, size: u64) -> impl Iterator<Item = (usize, u64)> {
    let first = (address - START) / HUGE_PAGE;
    let end = first + size / HUGE_PAGE;
    let mut at = first;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let (word, from) = (at / 64, at % 64);
        let count = (64 - from).min(end - at);
        at += count;
        Some((word as usize, (u64::MAX >> (64 - count)) << from))
    })
}

/// A reference as a number, which is not 0. Places are numbers, since only of numbers a table can
/// be made without touching its memory.
#[inline]
fn keep<T>(reference: Weak<T>) -> usize {
    reference.into_raw().expose_provenance()
}

/// The reference that is kept as a number; `None` for 0.
///
/// # Safety
///
/// The number must be 0 or of [`keep`] for the same type. The reference stays kept: it must not be
/// used after it was dropped.
#[inline]
unsafe fn kept<T>(place: usize) -> Option<ManuallyDrop<Weak<T>>> {
    // SAFETY: the caller vouches for the number; the reference is not dropped.
    (place != 0).then(|| ManuallyDrop::new(unsafe { Weak::from_raw(std::ptr::with_exposed_provenance(place)) }))
}

/// Drops the reference that is kept as a number.
///
/// # Safety
///
/// As for [`kept`], and the number must not be used again.
#[inline]
unsafe fn drop_kept<T>(place: usize) {
    // SAFETY: the caller vouches for the number, and does not use it again.
    drop(unsafe { kept::<T>(place) }.map(ManuallyDrop::into_inner));
}

impl Drop for Ranges {
    fn drop(&mut self) {
        // What the kernel would not undo is still here; everything else has taken itself out.
        for word in 0..self.bits.len() {
            let mut firsts = self.bits[word][FIRST];
            // Nearly all are 0: the addresses are many.
            while firsts != 0 {
                self.vacate(word * 64 + firsts.trailing_zeros() as usize);
                firsts &= firsts - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const MIB2: u64 = HUGE_PAGE;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn the_table_agrees_with_a_list_of_ranges(
            actions in prop::collection::vec((any::<bool>(), 0..600u64, prop_oneof![1..4u64, 1..300u64]), 1..80),
        ) {
            let table = MappingTable::default();
            let mut model: BTreeMap<u64, u64> = BTreeMap::new();
            for (insert, offset, chunks) in actions {
                let (address, size) = (START + offset * MIB2, chunks * MIB2);
                let before = model.range(..address + size).next_back();
                let overlaps = before.is_some_and(|(&start, &length)| start + length > address);
                prop_assert_eq!(table.lock().is_occupied(address, size), overlaps);
                if insert && !overlaps {
                    table.lock().insert(address, size);
                    model.insert(address, size);
                } else if let Some((&start, &length)) = model.range(..=address).next_back() {
                    if !insert {
                        table.lock().remove(start, length);
                        model.remove(&start);
                    }
                }
                let ranges: Vec<(u64, u64)> = model.iter().map(|(&start, &length)| (start, length)).collect();
                prop_assert_eq!(table.ranges(START, START + 1000 * MIB2), ranges);
                for (&start, &length) in &model {
                    for inside in [0, length / 2, length - 1] {
                        let table = table.lock();
                        let chunk = chunk(start + inside).unwrap();
                        prop_assert!(table.is_mapped(chunk));
                        prop_assert_eq!(START + u64::from(table.first(chunk)) * MIB2, start);
                    }
                }
            }
        }
    }

    #[test]
    fn addresses_that_cannot_be_reserved_are_not_mapped() {
        let table = MappingTable::default();
        table.lock().insert(START, MIB2);
        for address in [0, START - 1, ReserveOptions::ADDRESSES.end, u64::MAX] {
            assert!(table.find(address).is_none());
        }
    }

    #[test]
    fn the_largest_mapping_is_found_from_its_last_byte() {
        let table = MappingTable::default();
        let (address, size) = (START + 77 * MIB2, 65_536 * MIB2);
        table.lock().insert(address, size);
        let table = table.lock();
        assert_eq!(table.first(chunk(address + size - 1).unwrap()), 77);
        assert!(!table.is_mapped(chunk(address + size).unwrap()));
    }
}
