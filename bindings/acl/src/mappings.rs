//! Where some physical memory is mapped.

use ascend_vmm::Mapping;
use std::collections::BTreeMap;

/// The mappings of one physical memory, by their addresses. Almost all memory is mapped at one
/// place.
#[derive(Debug, Default)]
pub(crate) struct Mappings {
    first: Mapped,
    others: BTreeMap<u64, Mapped>,
}

#[derive(Debug, Default)]
struct Mapped {
    /// 0 if there is none.
    address: u64,
    /// `None` while it is being made or undone.
    mapping: Option<Mapping>,
}

impl Mappings {
    /// A mapping at an address, where there is none, is being made.
    #[inline]
    pub(crate) fn begin(&mut self, address: u64) {
        if self.first.address != 0 {
            return self.begin_other(address);
        }
        self.first.address = address;
    }

    #[cold]
    fn begin_other(&mut self, address: u64) {
        self.others.insert(address, Mapped { address, mapping: None });
    }

    /// The mapping that was begun is made, or the one that was suspended stays.
    #[inline]
    pub(crate) fn complete(&mut self, address: u64, mapping: Mapping) {
        if self.first.address != address {
            return self.complete_other(address, mapping);
        }
        // There was none.
        std::mem::forget(self.first.mapping.replace(mapping));
    }

    #[cold]
    fn complete_other(&mut self, address: u64, mapping: Mapping) {
        if let Some(mapped) = self.others.get_mut(&address) {
            mapped.mapping = Some(mapping);
        }
    }

    /// Takes the mapping at an address out, if it is made.
    #[inline]
    pub(crate) fn take(&mut self, address: u64) -> Option<Mapping> {
        if self.first.address != address {
            return self.take_other(address);
        }
        let mapping = self.first.mapping.take()?;
        self.first.address = 0;
        Some(mapping)
    }

    #[cold]
    fn take_other(&mut self, address: u64) -> Option<Mapping> {
        let mapping = self.others.get_mut(&address)?.mapping.take()?;
        self.others.remove(&address);
        Some(mapping)
    }

    /// Takes the mapping at an address out, if it is made, and leaves its place.
    pub(crate) fn suspend(&mut self, address: u64) -> Option<Mapping> {
        let mapped = if self.first.address == address { &mut self.first } else { self.others.get_mut(&address)? };
        mapped.mapping.take()
    }

    /// The place of a mapping that was not made, or is gone, is not needed any more.
    pub(crate) fn forget(&mut self, address: u64) {
        if self.first.address == address {
            self.first.address = 0;
        } else {
            self.others.remove(&address);
        }
    }

    /// Whether a mapping at an address is made.
    pub(crate) fn has(&self, address: u64) -> bool {
        let mapped = if self.first.address == address { Some(&self.first) } else { self.others.get(&address) };
        mapped.is_some_and(|mapped| mapped.mapping.is_some())
    }

    /// Whether there is none, and none is being made or undone.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.address == 0 && self.others.is_empty()
    }

    /// The addresses of those that are made.
    pub(crate) fn addresses(&self) -> Vec<u64> {
        let all = std::iter::once(&self.first).chain(self.others.values());
        all.filter(|mapped| mapped.mapping.is_some()).map(|mapped| mapped.address).collect()
    }
}
