//! A map of address ranges: each range has a value and is found by any address inside it.
//!
//! Ranges do not overlap. They start and end at multiples of a unit. 64 units form a row, which has
//! a bit for each range that starts in it. 64 rows form a region, which has a bit for each row that
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
    rows: [Row<V>; 64],
}

#[derive(Debug)]
struct Row<V> {
    /// A bit for each unit in which a range starts.
    starts: u64,
    /// Size and value of each of those ranges, in order.
    ranges: Vec<(u64, V)>,
}

/// A range and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Found<V> {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) value: V,
}

impl<V> Found<V> {
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
    /// Inserts a range. Returns the value if the range overlaps another.
    pub(crate) fn insert(&mut self, start: u64, size: u64, value: V) -> Result<(), V> {
        debug_assert!(start % UNIT == 0 && size % UNIT == 0 && size > 0, "{start:#x} {size:#x}");
        if self.overlaps(start, size) {
            return Err(value);
        }
        let (number, row, bit) = place::<UNIT>(start);
        let at = self.region(number).unwrap_or_else(|at| {
            let rows = [const { Row { starts: 0, ranges: Vec::new() } }; 64];
            self.regions.insert(at, (number, Box::new(Region { used: 0, rows })));
            at
        });
        let region = &mut self.regions[at].1;
        region.used |= 1 << row;
        let row = &mut region.rows[row];
        if row.ranges.is_empty() {
            // Room for one at first: large ranges have a row to themselves.
            row.ranges.reserve_exact(1);
        }
        row.ranges.insert(row.index(bit), (size, value));
        row.starts |= 1 << bit;
        Ok(())
    }

    /// Removes the range that starts at an address.
    pub(crate) fn remove(&mut self, start: u64) -> Option<V> {
        let (number, row, bit) = place::<UNIT>(start);
        let at = self.region(number).ok()?;
        let region = &mut self.regions[at].1;
        let ranges = &mut region.rows[row];
        if start % UNIT != 0 || !ranges.has(bit) {
            return None;
        }
        let (_, value) = ranges.ranges.remove(ranges.index(bit));
        ranges.starts &= !(1 << bit);
        if ranges.starts == 0 {
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
        if let Ok(at) = self.region(before) {
            if before != number && self.regions[at].1.used == 0 {
                self.regions.remove(at);
            }
        }
    }

    /// The value of the range that starts at an address.
    pub(crate) fn get_mut(&mut self, start: u64) -> Option<&mut V> {
        let (number, row, bit) = place::<UNIT>(start);
        let at = self.region(number).ok()?;
        let row = &mut self.regions[at].1.rows[row];
        let index = row.index(bit);
        let found = start % UNIT == 0 && row.has(bit);
        row.ranges.get_mut(index).filter(|_| found).map(|(_, value)| value)
    }

    /// The range that starts at an address.
    pub(crate) fn get(&self, start: u64) -> Option<Found<&V>> {
        self.last_until(start).filter(|found| found.start == start)
    }

    /// The range that contains an address.
    pub(crate) fn at(&self, address: u64) -> Option<Found<&V>> {
        self.last_until(address).filter(|found| address - found.start < found.size)
    }

    /// True if a range overlaps one of the map.
    pub(crate) fn overlaps(&self, start: u64, size: u64) -> bool {
        // Of the ranges that start before the end, the last one also ends last.
        self.last_until(start + (size - 1)).is_some_and(|found| found.end() > start)
    }

    /// The last range that starts at an address or before it.
    pub(crate) fn last_until(&self, address: u64) -> Option<Found<&V>> {
        let (number, row, bit) = place::<UNIT>(address);
        let before = match self.region(number) {
            Ok(at) => {
                let region = &self.regions[at].1;
                let found = region.row::<UNIT>(number, row, |starts| (starts & upto(bit)).checked_ilog2());
                if let Some(found) = found.or_else(|| region.last::<UNIT>(number, upto(row as u32) >> 1)) {
                    return Some(found);
                }
                at
            }
            Err(at) => at,
        };
        self.regions[..before].iter().rev().find_map(|(number, region)| region.last::<UNIT>(*number, u64::MAX))
    }

    /// The first range that starts at an address or after it.
    pub(crate) fn first_from(&self, address: u64) -> Option<Found<&V>> {
        let (number, row, bit) = place::<UNIT>(address.checked_next_multiple_of(UNIT)?);
        let after = match self.region(number) {
            Ok(at) => {
                let region = &self.regions[at].1;
                let found = region.row::<UNIT>(number, row, |starts| first_bit(starts & u64::MAX << bit));
                if let Some(found) = found.or_else(|| region.first::<UNIT>(number, !upto(row as u32))) {
                    return Some(found);
                }
                at + 1
            }
            Err(at) => at,
        };
        self.regions[after..].iter().find_map(|(number, region)| region.first::<UNIT>(*number, u64::MAX))
    }

    /// The ranges that start inside `range`, in order.
    pub(crate) fn starting_in(&self, range: Range<u64>) -> impl Iterator<Item = Found<&V>> {
        let mut next = Some(range.start);
        std::iter::from_fn(move || {
            let found = self.first_from(next?).filter(|found| found.start < range.end)?;
            next = found.start.checked_add(found.size);
            Some(found)
        })
    }

    /// All values, in order.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        let rows = self.regions.iter_mut().flat_map(|(_, region)| &mut region.rows);
        rows.flat_map(|row| row.ranges.iter_mut().map(|(_, value)| value))
    }

    /// All ranges, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Found<&V>> {
        self.starting_in(0..u64::MAX)
    }

    /// The index of a region, or the index to insert it at.
    fn region(&self, number: u64) -> Result<usize, usize> {
        self.regions.binary_search_by_key(&number, |region| region.0)
    }
}

impl<V> Region<V> {
    /// The last range in the rows that a mask selects.
    fn last<const UNIT: u64>(&self, number: u64, mask: u64) -> Option<Found<&V>> {
        let row = (self.used & mask).checked_ilog2()?;
        self.row::<UNIT>(number, row as usize, u64::checked_ilog2)
    }

    /// The first range in the rows that a mask selects.
    fn first<const UNIT: u64>(&self, number: u64, mask: u64) -> Option<Found<&V>> {
        let row = first_bit(self.used & mask)?;
        self.row::<UNIT>(number, row as usize, first_bit)
    }

    /// The range whose start `choose` picks from a row's starts.
    fn row<const UNIT: u64>(&self, number: u64, row: usize, choose: impl Fn(u64) -> Option<u32>) -> Option<Found<&V>> {
        let ranges = &self.rows[row];
        let bit = choose(ranges.starts)?;
        let (size, value) = ranges.ranges.get(ranges.index(bit))?;
        let unit = number * REGION + row as u64 * ROW + u64::from(bit);
        Some(Found { start: unit * UNIT, size: *size, value })
    }
}

impl<V> Row<V> {
    /// True if a range starts in a unit.
    fn has(&self, bit: u32) -> bool {
        self.starts >> bit & 1 == 1
    }

    /// The number of ranges that start before a unit.
    fn index(&self, bit: u32) -> usize {
        (self.starts & (upto(bit) >> 1)).count_ones() as usize
    }
}

/// Region, row in the region and bit in the row of an address.
fn place<const UNIT: u64>(address: u64) -> (u64, usize, u32) {
    let unit = address / UNIT;
    (unit / REGION, (unit % REGION / ROW) as usize, (unit % ROW) as u32)
}

/// All bits up to and including this one.
fn upto(bit: u32) -> u64 {
    u64::MAX >> (63 - bit)
}

fn first_bit(bits: u64) -> Option<u32> {
    (bits != 0).then(|| bits.trailing_zeros())
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
        fn last_until(&self, address: u64) -> Option<Found<u32>> {
            self.0.range(..=address).next_back().map(|(&start, &(size, value))| Found { start, size, value })
        }

        fn first_from(&self, address: u64) -> Option<Found<u32>> {
            self.0.range(address..).next().map(|(&start, &(size, value))| Found { start, size, value })
        }
    }

    fn copied(found: Option<Found<&u32>>) -> Option<Found<u32>> {
        found.map(|Found { start, size, value }| Found { start, size, value: *value })
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
                    prop_assert_eq!(copied(map.last_until(address)), expected);
                    prop_assert_eq!(copied(map.at(address)), expected.filter(|found| address < found.end()));
                    prop_assert_eq!(copied(map.first_from(address)), model.first_from(address));
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
