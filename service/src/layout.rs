//! What a domain serves: allocations, and what lies where in them.

use crate::entries::EntryRef;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use twox_hash::XxHash3_128;

/// Most bytes of a key.
pub const KEY_MAX: usize = 1024;
/// Most bytes of the value that is stored with a key.
pub const VALUE_MAX: usize = 64 << 10;
/// Most keys of a layout.
pub const KEYS_MAX: usize = 1 << 20;
/// Most allocations of a layout.
pub const ALLOCATIONS_MAX: usize = 1 << 16;
/// Most bytes of all keys and values of a layout, with [`ENTRY_BYTES`] for each.
pub const METADATA_MAX: usize = 64 << 20;
/// What an entry counts besides its key and its value.
pub const ENTRY_BYTES: usize = 64;
/// Most bytes of a tag.
pub const TAG_MAX: usize = 64;

/// Size of the pages of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageSize {
    /// 2 MiB.
    #[default]
    Huge,
    /// 1 GiB.
    Giant,
}

impl PageSize {
    /// Bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            PageSize::Huge => 2 << 20,
            PageSize::Giant => 1 << 30,
        }
    }
}

impl From<PageSize> for ascend_vmm::Page {
    fn from(page: PageSize) -> Self {
        match page {
            PageSize::Huge => ascend_vmm::Page::Huge,
            PageSize::Giant => ascend_vmm::Page::Giant,
        }
    }
}

/// One block of physical memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Its number, unique in the life of the service.
    pub id: u64,
    /// Bytes.
    pub size: u64,
    /// Size of its pages.
    pub page: PageSize,
    /// A word of the writer's, at most 64 bytes.
    pub tag: String,
}

/// Where a key's bytes are, and what its writer says about them.
///
/// The allocations of a layout follow each other in the order in which they were made, as if they
/// were mapped side by side; the bytes of an entry may continue in the next allocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The allocation in which it begins.
    pub allocation: u64,
    /// The offset there.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Whatever the writer wants its readers to know: shape, type, format.
    #[serde(with = "serde_bytes")]
    pub value: Vec<u8>,
}

/// Everything that a domain serves under one version.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Layout {
    /// In the order in which they were made, which is the order of their numbers.
    pub allocations: Vec<Allocation>,
    /// By key.
    pub entries: BTreeMap<String, Entry>,
}

/// A rule that a layout breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {rule}")]
pub struct BadLayout {
    /// The field of the message.
    pub field: &'static str,
    /// The rule.
    pub rule: String,
}

impl Layout {
    /// Bytes of all allocations.
    pub fn bytes(&self) -> u64 {
        self.allocations.iter().map(|allocation| allocation.size).sum()
    }

    /// Whether an entry may be put.
    ///
    /// # Errors
    ///
    /// A key or value that is too long, or bytes that lie outside of the allocations.
    pub fn check(&self, key: &str, entry: &Entry) -> Result<(), BadLayout> {
        check(&self.allocations, &EntryRef::new(key, entry)).map(drop)
    }

    /// A number for the structure: sizes, order, keys, places and values, not the contents of the
    /// memory. Two layouts with the same number can be bound by the same program.
    pub fn hash(&self) -> [u8; 16] {
        let mut hasher = hash_of(&self.allocations);
        for (key, entry) in &self.entries {
            // Allocations may have other numbers in the next life of a service, their order stays.
            let place = self.allocations.binary_search_by_key(&entry.allocation, |it| it.id);
            let entry = EntryRef { allocation: place.map_or(u64::MAX, |at| at as u64), ..EntryRef::new(key, entry) };
            hasher.write(&entry.head());
            hasher.write(key.as_bytes());
            hasher.write(entry.value);
        }
        hasher.finish_128().to_le_bytes()
    }
}

/// The beginning of a layout's hash; its entries follow, with places instead of numbers.
pub(crate) fn hash_of(allocations: &[Allocation]) -> XxHash3_128 {
    let mut hasher = XxHash3_128::new();
    hasher.write(&(allocations.len() as u64).to_le_bytes());
    for allocation in allocations {
        hasher.write(&allocation.size.to_le_bytes());
        hasher.write(&allocation.page.bytes().to_le_bytes());
    }
    hasher
}

/// Whether an entry may be put; the place of its allocation.
pub(crate) fn check(allocations: &[Allocation], entry: &EntryRef<'_>) -> Result<usize, BadLayout> {
    let EntryRef { key, allocation, offset, size, value } = *entry;
    if key.is_empty() || key.len() > KEY_MAX {
        return Err(BadLayout { field: "key", rule: format!("{} bytes; 1 to {KEY_MAX} are allowed", key.len()) });
    }
    let shown = || key.escape_debug();
    if value.len() > VALUE_MAX {
        let rule = format!("{} bytes for {}; at most {VALUE_MAX} are allowed", value.len(), shown());
        return Err(BadLayout { field: "value", rule });
    }
    // Numbers of allocations grow in the order in which they are made.
    let Ok(first) = allocations.binary_search_by_key(&allocation, |it| it.id) else {
        let rule = format!("{} names allocation {allocation}, which this writer does not have", shown());
        return Err(BadLayout { field: "allocation", rule });
    };
    if offset > allocations[first].size {
        let rule = format!("{} begins beyond the end of allocation {allocation}", shown());
        return Err(BadLayout { field: "offset", rule });
    }
    let end = offset.checked_add(size);
    let mut room = 0;
    let fits = allocations[first..].iter().any(|it| {
        room += it.size;
        end.is_some_and(|end| end <= room)
    });
    if !fits {
        let rule = format!("{} has {size} bytes, and {} follow its offset", shown(), room - offset);
        return Err(BadLayout { field: "size", rule });
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        let allocation = |id| Allocation { id, size: 4 << 20, page: PageSize::Huge, tag: String::new() };
        Layout { allocations: vec![allocation(7), allocation(9)], entries: BTreeMap::new() }
    }

    fn entry(allocation: u64, offset: u64, size: u64) -> Entry {
        Entry { allocation, offset, size, value: Vec::new() }
    }

    #[test]
    fn an_entry_may_continue_in_the_next_allocation_but_not_behind_the_last() {
        let layout = layout();
        assert_eq!(layout.check("a", &entry(7, 3 << 20, 5 << 20)), Ok(()));
        assert_eq!(layout.check("b", &entry(7, 3 << 20, (5 << 20) + 1)).unwrap_err().field, "size");
        assert_eq!(layout.check("b", &entry(9, 4 << 20, 0)), Ok(()));
        assert_eq!(layout.check("b", &entry(9, (4 << 20) + 1, 0)).unwrap_err().field, "offset");
        assert_eq!(layout.check("b", &entry(9, 1, u64::MAX)).unwrap_err().field, "size");
        assert_eq!(layout.check("b", &entry(8, 0, 1)).unwrap_err().field, "allocation");
    }

    #[test]
    fn keys_and_values_have_a_greatest_length() {
        let layout = layout();
        assert_eq!(layout.check("", &entry(7, 0, 1)).unwrap_err().field, "key");
        assert_eq!(layout.check(&"k".repeat(KEY_MAX + 1), &entry(7, 0, 1)).unwrap_err().field, "key");
        assert_eq!(layout.check(&"k".repeat(KEY_MAX), &entry(7, 0, 1)), Ok(()));
        let long = Entry { value: vec![0; VALUE_MAX + 1], ..entry(7, 0, 1) };
        assert_eq!(layout.check("a", &long).unwrap_err().field, "value");
    }

    #[test]
    fn the_hash_is_of_the_structure_and_not_of_the_numbers_of_allocations() {
        let (mut one, mut other) = (layout(), layout());
        other.allocations[0].id = 5;
        one.entries.insert("a".into(), entry(7, 0, 5));
        other.entries.insert("a".into(), entry(5, 0, 5));
        assert_eq!(one.hash(), other.hash());
        other.entries.insert("a".into(), entry(9, 0, 5));
        assert_ne!(one.hash(), other.hash());
        other.entries.insert("a".into(), entry(5, 0, 6));
        assert_ne!(one.hash(), other.hash());
        other.entries.insert("a".into(), Entry { value: vec![1], ..entry(5, 0, 5) });
        assert_ne!(one.hash(), other.hash());
    }
}
