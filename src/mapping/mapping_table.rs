//! What is mapped where.
//!
//! A range is entered before MEM_MAP and removed after MEM_UNMAP, so no two threads ever call the
//! kernel for the same addresses. The entry holds weak references. A lookup finds a mapping while
//! its reference can be upgraded: from the return of MEM_MAP to the beginning of MEM_UNMAP. The
//! owner can hide a mapping that nothing else uses: then only the owner can make slices of it.

use super::Mapped;
use crate::driver::svm::HUGE_PAGE;
use crate::physical::PhysicalBlock;
use crate::range_map::{RangeEntry, RangeMap};
use crate::session::undo::Live;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// All mappings of a session.
#[derive(Debug, Default)]
pub(crate) struct MappingTable(RangeMap<Entry, HUGE_PAGE>);

/// A mapping, or one that is being made or undone.
#[derive(Debug)]
struct Entry {
    /// Dead while MEM_MAP or MEM_UNMAP runs, if the kernel would not unmap it, and while hidden.
    mapped: Weak<Live<Mapped>>,
    /// Beside the mapping, so that looking for the memory does not keep the mapping alive.
    block: Weak<Live<PhysicalBlock>>,
}

impl MappingTable {
    /// The mapping that contains an address, if it can be used. Nothing is kept alive, so the owner
    /// can unmap and free at any time.
    fn at(&self, address: u64) -> Option<&RangeEntry<Entry>> {
        self.0.at(address).filter(|found| found.value.mapped.strong_count() > 0)
    }

    /// Start and size of the mapping that contains an address.
    pub(crate) fn range_at(&self, address: u64) -> Option<(u64, u64)> {
        self.at(address).map(|found| (found.start, found.size))
    }

    /// The memory of the mapping that contains an address. The mapping itself is not kept alive.
    pub(crate) fn memory_at(&self, address: u64) -> Option<Arc<Live<PhysicalBlock>>> {
        self.at(address)?.value.block.upgrade()
    }

    /// The mapping that contains an address.
    pub(crate) fn find(&self, address: u64) -> Option<Arc<Live<Mapped>>> {
        self.0.at(address)?.value.mapped.upgrade()
    }

    /// How many mappings there are, and their bytes.
    pub(crate) fn total(&self) -> (u64, u64) {
        self.0.iter().fold((0, 0), |(mappings, bytes), found| (mappings + 1, bytes + found.size))
    }

    /// Start and size of what is mapped in a range, in order.
    pub(crate) fn ranges(&self, range: Range<u64>) -> Vec<(u64, u64)> {
        self.0.starting_in(range).map(|found| (found.start, found.size)).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_that_is_not_made_yet_occupies_its_range_and_is_not_found() {
        let mut table = MappingTable::default();
        let entry = Entry { mapped: Weak::new(), block: Weak::new() };
        table.0.insert(4 * HUGE_PAGE, HUGE_PAGE, entry).unwrap();
        assert!(table.is_occupied(0, 5 * HUGE_PAGE));
        assert_eq!(table.range_at(4 * HUGE_PAGE), None);
        assert!(table.memory_at(4 * HUGE_PAGE).is_none());
        assert!(table.find(4 * HUGE_PAGE).is_none());
    }
}
