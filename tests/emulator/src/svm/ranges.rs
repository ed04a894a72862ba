//! A set of addresses, kept as disjoint ranges: cheap for a hundred thousand adjacent ranges, which
//! merge into one.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint, non-touching ranges by their start.
#[derive(Debug, Default, Clone)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range; merges it with what it overlaps or touches.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start, range.end);
        if let Some((&left, &left_end)) = self.0.range(..=start).next_back() {
            if left_end >= start {
                start = left;
                end = end.max(left_end);
            }
        }
        while let Some((&next, &next_end)) = self.0.range(start..=end).next() {
            self.0.remove(&next);
            end = end.max(next_end);
        }
        self.0.insert(start, end);
    }

    /// Removes a range, and splits ranges that reach beyond it.
    pub fn remove(&mut self, range: Range<u64>) {
        if let Some((&left, &left_end)) = self.0.range(..range.start).next_back() {
            if left_end > range.start {
                self.0.insert(left, range.start);
                if left_end > range.end {
                    self.0.insert(range.end, left_end);
                }
            }
        }
        while let Some((&next, &next_end)) = self.0.range(range.clone()).next() {
            self.0.remove(&next);
            if next_end > range.end {
                self.0.insert(range.end, next_end);
            }
        }
    }

    /// Whether all of a range is in the set.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        self.0.range(..=range.start).next_back().is_some_and(|(_, &end)| end >= range.end)
    }

    /// The first address of `range` that is in the set.
    pub fn first_in(&self, range: Range<u64>) -> Option<u64> {
        if let Some((_, &end)) = self.0.range(..=range.start).next_back() {
            if end > range.start {
                return (!range.is_empty()).then_some(range.start);
            }
        }
        self.0.range(range).next().map(|(&start, _)| start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_split_and_find() {
        let mut set = Ranges::default();
        set.insert(10..20);
        set.insert(30..40);
        set.insert(20..30);
        assert_eq!(set.0.len(), 1);
        assert_eq!(set.first_in(0..100), Some(10));
        assert_eq!(set.first_in(15..16), Some(15));
        assert_eq!(set.first_in(40..100), None);
        set.remove(15..35);
        assert_eq!(set.first_in(15..35), None);
        assert_eq!(set.first_in(12..50), Some(12));
        assert_eq!(set.first_in(20..50), Some(35));
        set.remove(0..100);
        assert_eq!(set.first_in(0..100), None);
    }

    #[test]
    fn removing_the_middle_keeps_both_ends() {
        let mut set = Ranges::default();
        set.insert(0..100);
        set.remove(40..60);
        assert_eq!(set.first_in(0..1), Some(0));
        assert_eq!(set.first_in(40..60), None);
        assert_eq!(set.first_in(50..99), Some(60));
    }
}
