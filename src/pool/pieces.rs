//! What is mapped in a segment: mappings by their offset.
//!
//! Mappings begin at multiples of 2 MiB. Those that begin in the same 128 MiB are in one row of the
//! table, with a bit for each, and there is a bit for each row that has any. So entering a mapping,
//! removing it and finding it take a few steps, however many there are; looking for the next one
//! takes a step for each 8 GiB on the way. A row is made when its first mapping comes, and stays.

use crate::driver::svm::HUGE_PAGE;
use crate::mapping::Mapping;

/// Mappings of a row: one for each 2 MiB.
const ROW: u64 = 64;

#[derive(Default)]
pub(super) struct Pieces {
    rows: Vec<Option<Box<Row>>>,
    /// A bit for each row in which a mapping begins, in words of 64.
    used: Vec<u64>,
}

struct Row {
    /// A bit for each mapping.
    starts: u64,
    mappings: [Option<Mapping>; ROW as usize],
}

/// The row and the bit of an offset.
#[inline]
fn place(offset: u64) -> (usize, u32) {
    let chunk = offset / HUGE_PAGE;
    ((chunk / ROW) as usize, (chunk % ROW) as u32)
}

impl Pieces {
    /// The mapping that begins at an offset.
    pub(super) fn get(&self, offset: u64) -> Option<&Mapping> {
        let (row, bit) = place(offset);
        self.row(row)?.mappings[bit as usize].as_ref().filter(|_| offset % HUGE_PAGE == 0)
    }

    /// Enters a mapping at an offset where none begins.
    #[inline(always)]
    pub(super) fn insert(&mut self, offset: u64, mapping: Mapping) {
        let (number, bit) = place(offset);
        if self.row(number).is_none() {
            self.add_row(number);
        }
        let Some(Some(row)) = self.rows.get_mut(number) else { return };
        if row.starts == 0 {
            self.used[number / 64] |= 1 << (number % 64);
        }
        row.starts |= 1 << bit;
        row.mappings[bit as usize] = Some(mapping);
    }

    #[cold]
    fn add_row(&mut self, row: usize) {
        if self.rows.len() <= row {
            self.rows.resize_with(row + 1, || None);
            self.used.resize(row / 64 + 1, 0);
        }
        self.rows[row] = Some(Box::new(Row { starts: 0, mappings: [const { None }; ROW as usize] }));
    }

    /// Takes the mapping that begins at an offset out.
    #[inline]
    pub(super) fn remove(&mut self, offset: u64) -> Option<Mapping> {
        let (number, bit) = place(offset);
        let row = self.rows.get_mut(number)?.as_deref_mut()?;
        let mapping = row.mappings[bit as usize].take()?;
        row.starts &= !(1 << bit);
        if row.starts == 0 {
            self.used[number / 64] &= !(1 << (number % 64));
        }
        Some(mapping)
    }

    /// The last mapping that begins before an offset, and where.
    #[inline]
    pub(super) fn last_before(&self, end: u64) -> Option<(u64, &Mapping)> {
        let (number, bit) = place(end.checked_sub(1)?);
        if let Some(row) = self.row(number) {
            let starts = row.starts & (u64::MAX >> (63 - bit));
            if starts != 0 {
                return found(number, row, 63 - starts.leading_zeros());
            }
        }
        let number = self.used_before(number)?;
        let row = self.row(number)?;
        found(number, row, 63 - row.starts.leading_zeros())
    }

    /// The first mapping that begins at an offset or after it, and where.
    #[inline]
    pub(super) fn first_from(&self, at: u64) -> Option<(u64, &Mapping)> {
        let (number, bit) = place(at.checked_next_multiple_of(HUGE_PAGE)?);
        if let Some(row) = self.row(number) {
            let starts = row.starts & (u64::MAX << bit);
            if starts != 0 {
                return found(number, row, starts.trailing_zeros());
            }
        }
        let number = self.used_after(number)?;
        let row = self.row(number)?;
        found(number, row, row.starts.trailing_zeros())
    }

    /// All mappings that begin in a range, in order.
    pub(super) fn range(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Mapping)> {
        let mut next = start;
        std::iter::from_fn(move || {
            let (offset, mapping) = self.first_from(next).filter(|&(offset, _)| offset < end)?;
            next = offset + HUGE_PAGE;
            Some((offset, mapping))
        })
    }

    /// All mappings.
    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut Mapping> {
        self.rows.iter_mut().flatten().flat_map(|row| row.mappings.iter_mut().flatten())
    }

    #[inline]
    fn row(&self, number: usize) -> Option<&Row> {
        self.rows.get(number)?.as_deref()
    }

    /// The last row before this one in which a mapping begins.
    fn used_before(&self, row: usize) -> Option<usize> {
        let last = self.used.len().checked_sub(1)?;
        let (mut word, mut mask) = (row / 64, (1 << (row % 64)) - 1);
        if word > last {
            (word, mask) = (last, u64::MAX);
        }
        loop {
            let bits = self.used[word] & mask;
            if bits != 0 {
                return Some(word * 64 + 63 - bits.leading_zeros() as usize);
            }
            (word, mask) = (word.checked_sub(1)?, u64::MAX);
        }
    }

    /// The first row after this one in which a mapping begins.
    fn used_after(&self, row: usize) -> Option<usize> {
        let mut mask = (u64::MAX << (row % 64)) << 1;
        let words = self.used.iter().enumerate().skip(row / 64);
        for (word, used) in words {
            let bits = used & mask;
            if bits != 0 {
                return Some(word * 64 + bits.trailing_zeros() as usize);
            }
            mask = u64::MAX;
        }
        None
    }
}

/// A mapping of a row, with its offset.
#[inline]
fn found(number: usize, row: &Row, bit: u32) -> Option<(u64, &Mapping)> {
    let mapping = row.mappings.get(bit as usize)?.as_ref()?;
    Some(((number as u64 * ROW + u64::from(bit)) * HUGE_PAGE, mapping))
}
