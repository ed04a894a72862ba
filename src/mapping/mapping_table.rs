//! What is mapped where.
//!
//! A range is entered before MEM_MAP and removed after MEM_UNMAP, so no two threads ever call the
//! kernel for the same addresses. The entry holds weak references. A lookup finds a mapping while
//! its reference can be upgraded: from the return of MEM_MAP to the beginning of MEM_UNMAP. The
//! owner can hide a mapping that nothing else uses: then only the owner can make slices of it.

use super::Mapped;
use crate::driver::svm::HUGE_PAGE;
use crate::physical::PhysicalBlock;
use crate::range_map::{Found, RangeMap};
use crate::session::undo::Live;
use crate::slots::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// All mappings of a session.
#[derive(Debug, Default)]
pub(crate) struct MappingTable(Mutex<Mappings>);

/// The table itself.
#[derive(Debug, Default)]
pub(crate) struct Mappings(RangeMap<Entry, HUGE_PAGE>);

/// A mapping, or one that is being made or undone.
#[derive(Debug)]
struct Entry {
    /// Dead while MEM_MAP or MEM_UNMAP runs, if the kernel would not unmap it, and while hidden.
    mapped: Weak<Live<Mapped>>,
    /// Beside the mapping, so that looking for the memory does not keep the mapping alive.
    block: Weak<Live<PhysicalBlock>>,
}

impl MappingTable {
    /// Keeps other threads from mapping and unmapping.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Mappings> {
        lock(&self.0)
    }

    /// Start and size of the mapping that contains an address. Nothing is kept alive, so the owner
    /// can unmap and free at any time.
    pub(crate) fn range_at(&self, address: u64) -> Option<(u64, u64)> {
        self.lock().at(address).map(|found| (found.start, found.size))
    }

    /// The memory of the mapping that contains an address. The mapping itself is not kept alive.
    pub(crate) fn memory_at(&self, address: u64) -> Option<Arc<Live<PhysicalBlock>>> {
        self.lock().at(address)?.value.block.upgrade()
    }

    /// The mappings that cover `start..end` without a hole; `None` if there is one.
    pub(crate) fn cover(&self, start: u64, end: u64) -> Option<Vec<Arc<Live<Mapped>>>> {
        let table = self.lock();
        let (found, whole) = cover(start, end, |address| table.0.at(address)?.value.mapped.upgrade());
        // Dropped after the lock: the last reference unmaps, which takes it.
        drop(table);
        whole.then_some(found)
    }

    /// How many mappings there are, and their bytes.
    pub(crate) fn total(&self) -> (u64, u64) {
        self.lock().0.iter().fold((0, 0), |(mappings, bytes), found| (mappings + 1, bytes + found.size))
    }

    /// Start and size of what is mapped in a range, in order.
    pub(crate) fn ranges(&self, range: Range<u64>) -> Vec<(u64, u64)> {
        self.lock().0.starting_in(range).map(|found| (found.start, found.size)).collect()
    }
}

impl Mappings {
    /// The mapping that contains an address, if it can be used.
    fn at(&self, address: u64) -> Option<Found<&Entry>> {
        self.0.at(address).filter(|found| found.value.is_alive())
    }

    /// True if any of a range is mapped.
    pub(crate) fn is_occupied(&self, address: u64, size: u64) -> bool {
        self.0.overlaps(address, size)
    }

    /// Enters a range for a mapping of `block` that is about to be made. False if any of it is
    /// occupied.
    pub(crate) fn begin(&mut self, address: u64, block: &Arc<Live<PhysicalBlock>>) -> bool {
        let entry = Entry { mapped: Weak::new(), block: Arc::downgrade(block) };
        self.0.insert(address, block.size, entry).is_ok()
    }

    /// Lets lookups find a mapping that was made, could not be undone, or was hidden.
    pub(crate) fn show(&mut self, mapped: &Arc<Live<Mapped>>) {
        if let Some(entry) = self.0.get_mut(mapped.address) {
            entry.mapped = Arc::downgrade(mapped);
        }
    }

    /// Hides a mapping from lookups. Returns false, and changes nothing, if others than its owner
    /// use it. Lookups take the table's lock, so nothing begins to use it meanwhile.
    pub(crate) fn hide(&mut self, mapped: &mut Arc<Live<Mapped>>) -> bool {
        let Some(entry) = self.0.get_mut(mapped.address) else { return false };
        entry.mapped = Weak::new();
        let is_unused = Arc::get_mut(mapped).is_some();
        if !is_unused {
            entry.mapped = Arc::downgrade(mapped);
        }
        is_unused
    }

    /// Removes a mapping that the kernel does not have any more.
    pub(crate) fn remove(&mut self, address: u64) {
        self.0.remove(address);
    }
}

impl Entry {
    /// True if the mapping can be used.
    fn is_alive(&self) -> bool {
        self.mapped.strong_count() > 0
    }
}

/// The mappings from `start` to `end` or to the first hole, and whether there is none. `at` returns
/// the mapping that contains an address.
pub(crate) fn cover(
    start: u64,
    end: u64,
    at: impl Fn(u64) -> Option<Arc<Live<Mapped>>>,
) -> (Vec<Arc<Live<Mapped>>>, bool) {
    let (mut found, mut covered) = (Vec::with_capacity(1), start);
    while covered < end {
        let Some(mapped) = at(covered) else { return (found, false) };
        covered = mapped.address + mapped.size();
        found.push(mapped);
    }
    (found, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_that_is_not_made_yet_occupies_its_range_and_is_not_found() {
        let table = MappingTable::default();
        let entry = Entry { mapped: Weak::new(), block: Weak::new() };
        table.lock().0.insert(4 * HUGE_PAGE, HUGE_PAGE, entry).unwrap();
        assert!(table.lock().is_occupied(0, 5 * HUGE_PAGE));
        assert_eq!(table.range_at(4 * HUGE_PAGE), None);
        assert!(table.memory_at(4 * HUGE_PAGE).is_none());
        assert!(table.cover(4 * HUGE_PAGE, 5 * HUGE_PAGE).is_none());
    }
}
