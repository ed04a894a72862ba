//! A map of address ranges: each range has a value and is found by any address inside it.
//!
//! Ranges do not overlap. They start and end at multiples of a unit. A row is the sorted list of
//! the ranges that start in its 64 units. 64 rows form a region, which has a bit for each row that
//! is not empty. A region is allocated for its first range and found by binary search. So the
//! address space may have any size, and unused parts cost nothing. Inserting, removing and finding
//! take a few steps, which hardly depend on how many ranges there are and how long they are.
//!
//! Why not the crate `rangemap`: it joins equal neighbours and overwrites overlaps, which mappings
//! must never do, and it is a B-tree, where a million ranges more than double the cost of mapping
//! one.

use std::ops::Range;

/// Units of a row, and rows of a region.
const ROW: u64 = 64;
const REGION: u64 = ROW * 64;

/// A map of ranges in units of `UNIT` bytes.
#[derive(Debug)]
pub(crate) struct RangeMap<V, const UNIT: u64> {
    /// Sorted by number. At most one is empty.
    regions: Vec<(u64, Box<Region<V>>)>,
    /// The number of the region that became empty last. It stays until another becomes empty,
    /// because ranges often come and go in the same place.
    emptied: u64,
}

#[derive(Debug)]
struct Region<V> {
    /// A bit for each row that is not empty.
    used: u64,
    rows: [Vec<RangeEntry<V>>; 64],
}

/// A range and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RangeEntry<V> {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) value: V,
}

impl<V> RangeEntry<V> {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.size
    }
}

impl<V, const UNIT: u64> Default for RangeMap<V, UNIT> {
    fn default() -> Self {
        RangeMap { regions: Vec::new(), emptied: 0 }
    }
}

impl<V, const UNIT: u64> RangeMap<V, UNIT> {
    /// Inserts a range. Returns the value if the range overlaps another: of the ranges that start
    /// before its end, the last one also ends last.
    pub(crate) fn insert(&mut self, start: u64, size: u64, value: V) -> Result<(), V> {
        debug_assert!(start % UNIT == 0 && size % UNIT == 0 && size > 0, "{start:#x} {size:#x}");
        let (last, (number, row)) = (start + (size - 1), Self::place(start));
        let region = self.region(number);
        let last_region = if Self::place(last).0 == number { region } else { self.region(Self::place(last).0) };
        if self.last_in(last_region, last).is_some_and(|found| found.end() > start) {
            return Err(value);
        }
        let at = region.unwrap_or_else(|at| {
            let rows = [const { Vec::new() }; 64];
            self.regions.insert(at, (number, Box::new(Region { used: 0, rows })));
            at
        });
        let region = &mut self.regions[at].1;
        region.used |= 1 << row;
        let row = &mut region.rows[row];
        if row.is_empty() {
            // Room for one at first: large ranges have a row to themselves.
            row.reserve_exact(1);
        }
        row.insert(count_until(row, start), RangeEntry { start, size, value });
        Ok(())
    }

    /// Removes the range that starts at an address.
    pub(crate) fn remove(&mut self, start: u64) -> Option<V> {
        let (number, row) = Self::place(start);
        let at = self.region(number).ok()?;
        let region = &mut self.regions[at].1;
        let ranges = &mut region.rows[row];
        let index = starting_at(ranges, start)?;
        let value = ranges.remove(index).value;
        if ranges.is_empty() {
            region.used &= !(1 << row);
            if region.used == 0 {
                self.free_emptied(number);
            }
        }
        Some(value)
    }

    /// Frees the region that became empty before this one, if it is still empty.
    fn free_emptied(&mut self, number: u64) {
        let before = std::mem::replace(&mut self.emptied, number);
        if before == number {
            return;
        }
        if let Ok(at) = self.region(before) {
            if self.regions[at].1.used == 0 {
                self.regions.remove(at);
            }
        }
    }

    /// The value of the range that starts at an address.
    pub(crate) fn get_mut(&mut self, start: u64) -> Option<&mut V> {
        let (number, row) = Self::place(start);
        let at = self.region(number).ok()?;
        let row = &mut self.regions[at].1.rows[row];
        let index = starting_at(row, start)?;
        Some(&mut row[index].value)
    }

    /// The range that starts at an address.
    pub(crate) fn get(&self, start: u64) -> Option<&RangeEntry<V>> {
        self.last_until(start).filter(|found| found.start == start)
    }

    /// The range that contains an address.
    pub(crate) fn at(&self, address: u64) -> Option<&RangeEntry<V>> {
        self.last_until(address).filter(|found| address - found.start < found.size)
    }

    /// True if a range overlaps one of the map.
    pub(crate) fn overlaps(&self, start: u64, size: u64) -> bool {
        // Of the ranges that start before the end, the last one also ends last.
        self.last_until(start + (size - 1)).is_some_and(|found| found.end() > start)
    }

    /// The last range that starts at an address or before it.
    pub(crate) fn last_until(&self, address: u64) -> Option<&RangeEntry<V>> {
        self.last_in(self.region(Self::place(address).0), address)
    }

    /// The same, where the region of the address was looked up.
    fn last_in(&self, region: Result<usize, usize>, address: u64) -> Option<&RangeEntry<V>> {
        let before = match region {
            Ok(at) => {
                let (_, row) = Self::place(address);
                let region = &self.regions[at].1;
                let ranges = &region.rows[row];
                let found = count_until(ranges, address).checked_sub(1).map(|last| &ranges[last]);
                if let Some(found) = found.or_else(|| region.last((1 << row) - 1)) {
                    return Some(found);
                }
                at
            }
            Err(at) => at,
        };
        self.regions[..before].iter().rev().find_map(|(_, region)| region.last(u64::MAX))
    }

    /// The first range that starts at an address or after it.
    pub(crate) fn first_from(&self, address: u64) -> Option<&RangeEntry<V>> {
        let (number, row) = Self::place(address);
        let after = match self.region(number) {
            Ok(at) => {
                let region = &self.regions[at].1;
                let ranges = &region.rows[row];
                let next = ranges.get(ranges.partition_point(|range| range.start < address));
                if let Some(found) = next.or_else(|| region.first(u64::MAX << row << 1)) {
                    return Some(found);
                }
                at + 1
            }
            Err(at) => at,
        };
        self.regions[after..].iter().find_map(|(_, region)| region.first(u64::MAX))
    }

    /// The ranges that start inside `range`, in order.
    pub(crate) fn starting_in(&self, range: Range<u64>) -> impl Iterator<Item = &RangeEntry<V>> {
        let mut next = Some(range.start);
        std::iter::from_fn(move || {
            let found = self.first_from(next?).filter(|found| found.start < range.end)?;
            next = found.start.checked_add(found.size);
            Some(found)
        })
    }

    /// All values, in order.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        let ranges = self.regions.iter_mut().flat_map(|(_, region)| region.rows.iter_mut().flatten());
        ranges.map(|found| &mut found.value)
    }

    /// All ranges, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &RangeEntry<V>> {
        self.regions.iter().flat_map(|(_, region)| region.rows.iter().flatten())
    }

    /// The index of a region, or the index to insert it at.
    fn region(&self, number: u64) -> Result<usize, usize> {
        self.regions.binary_search_by_key(&number, |region| region.0)
    }

    /// Region and row of an address.
    fn place(address: u64) -> (u64, usize) {
        let unit = address / UNIT;
        (unit / REGION, (unit % REGION / ROW) as usize)
    }
}

impl<V> Region<V> {
    /// The last range in the rows that a mask selects.
    fn last(&self, mask: u64) -> Option<&RangeEntry<V>> {
        let row = (self.used & mask).checked_ilog2()?;
        self.rows[row as usize].last()
    }

    /// The first range in the rows that a mask selects.
    fn first(&self, mask: u64) -> Option<&RangeEntry<V>> {
        self.rows.get((self.used & mask).trailing_zeros() as usize)?.first()
    }
}

/// The number of ranges that start at an address or before it.
fn count_until<V>(ranges: &[RangeEntry<V>], address: u64) -> usize {
    ranges.partition_point(|range| range.start <= address)
}

/// The index of the range that starts at an address.
fn starting_at<V>(ranges: &[RangeEntry<V>], start: u64) -> Option<usize> {
    ranges.binary_search_by_key(&start, |range| range.start).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    type Map = RangeMap<u32, 4096>;

    /// A B-tree to compare with.
    #[derive(Default)]
    struct Model(BTreeMap<u64, (u64, u32)>);

    impl Model {
        fn last_until(&self, address: u64) -> Option<RangeEntry<u32>> {
            self.0.range(..=address).next_back().map(|(&start, &(size, value))| RangeEntry { start, size, value })
        }

        fn first_from(&self, address: u64) -> Option<RangeEntry<u32>> {
            self.0.range(address..).next().map(|(&start, &(size, value))| RangeEntry { start, size, value })
        }
    }

    /// Addresses near each other and at both ends of 256 TiB, in units.
    fn units() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..400, (0u64..8).prop_map(|row| row * 4096 - row % 2), (1u64 << 36) - 5000..1u64 << 36]
    }

    proptest! {
        #[test]
        fn it_gives_the_same_results_as_a_b_tree(steps in prop::collection::vec((units(), 1u64..200, 0..10), 1..300)) {
            let (mut map, mut model) = (Map::default(), Model::default());
            for (number, (unit, size, kind)) in steps.into_iter().enumerate() {
                let (start, size) = (unit * 4096, size * 4096);
                if kind < 6 {
                    let free = model.last_until(start + size - 1).is_none_or(|found| found.end() <= start);
                    prop_assert_eq!(map.overlaps(start, size), !free);
                    prop_assert_eq!(map.insert(start, size, number as u32).is_ok(), free);
                    if free {
                        model.0.insert(start, (size, number as u32));
                    }
                } else {
                    let start = model.first_from(start).map_or(start, |found| found.start);
                    prop_assert_eq!(map.remove(start + 1), None);
                    prop_assert_eq!(map.get_mut(start).copied(), model.0.get(&start).map(|&(_, value)| value));
                    prop_assert_eq!(map.remove(start), model.0.remove(&start).map(|(_, value)| value));
                }
                for address in [0, start, start + 1, start + size, u64::MAX] {
                    let expected = model.last_until(address);
                    prop_assert_eq!(map.last_until(address).copied(), expected);
                    prop_assert_eq!(map.at(address).copied(), expected.filter(|found| address < found.end()));
                    prop_assert_eq!(map.first_from(address).copied(), model.first_from(address));
                }
            }
            let all: Vec<u64> = map.iter().map(|found| found.start).collect();
            prop_assert_eq!(all, model.0.keys().copied().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_range_as_long_as_the_addresses_is_found_at_its_last_byte() {
        let mut map = RangeMap::<(), { 2 << 20 }>::default();
        map.insert(24 << 40, 208 << 40, ()).unwrap();
        assert_eq!(map.at((232 << 40) - 1).map(|found| found.start), Some(24 << 40));
        assert_eq!(map.at(232 << 40), None);
        assert_eq!(map.insert(231 << 40, 2 << 20, ()), Err(()));
    }

    #[test]
    fn empty_regions_are_freed() {
        let mut map = Map::default();
        for region in 0..1000 {
            map.insert(region * REGION * 4096, 4096, 1).unwrap();
        }
        for region in 0..1000 {
            map.remove(region * REGION * 4096).unwrap();
        }
        assert!(map.regions.len() <= 1 && map.iter().next().is_none());
    }
}
