//! An allocator of addresses: two-level segregated fit.
//!
//! An area of addresses is divided into runs. A run is used, free, or a hole: addresses without
//! memory behind them. A run knows its neighbours in the area; adjacent free runs are merged, and
//! so are adjacent holes. Free runs and holes are kept in lists by size, sixteen for each power of
//! two, with a bit for each list that is not empty. So taking and freeing take a constant number of
//! steps. [`SegregatedFit::search`] looks at every run that might fit. It is for requests that
//! would otherwise be refused.
//!
//! Why not the crate `offset-allocator`: it does the same for 32-bit offsets, but has no alignment,
//! no fixed addresses and no holes.

use std::ops::Index;

/// Lists for each power of two.
const STEPS: u64 = 16;
/// Units of the largest run: 256 TiB in units of 4 KiB.
const LARGEST: u64 = 1 << 36;
const CLASSES: usize = class(LARGEST) + 1;

/// No run.
const NONE: u32 = u32::MAX;

/// What a run is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunState {
    Used,
    Free,
    /// Addresses without memory.
    Hole,
}

/// A run of addresses. Its number does not change while it is used, or while it is the first of its
/// area.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) state: RunState,
    /// Neighbours in the area.
    before: u32,
    after: u32,
    /// Neighbours in the list. `next` also links the unused records.
    next: u32,
    previous: u32,
}

impl Run {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.size
    }
}

/// An allocator in units of `UNIT` bytes.
#[derive(Debug)]
pub(crate) struct SegregatedFit<const UNIT: u64> {
    runs: Vec<Run>,
    /// The first unused record.
    unused: u32,
    free: Lists,
    holes: Lists,
}

/// Lists of runs by size.
#[derive(Debug)]
struct Lists {
    /// A bit for each list that is not empty.
    filled: [u64; CLASSES.div_ceil(64)],
    first: [u32; CLASSES],
}

impl<const UNIT: u64> Default for SegregatedFit<UNIT> {
    fn default() -> Self {
        let lists = || Lists { filled: [0; CLASSES.div_ceil(64)], first: [NONE; CLASSES] };
        SegregatedFit { runs: Vec::new(), unused: NONE, free: lists(), holes: lists() }
    }
}

impl<const UNIT: u64> SegregatedFit<UNIT> {
    /// Adds an area as a single run. Returns the run's number, which remains the number of the
    /// area's first run. Areas are never merged.
    pub(crate) fn add_area(&mut self, start: u64, size: u64, state: RunState) -> u32 {
        debug_assert!(start % UNIT == 0 && size % UNIT == 0 && size > 0, "{start:#x} {size:#x}");
        let area = self.new_run(Run { start, size, state, before: NONE, after: NONE, next: NONE, previous: NONE });
        self.link(area);
        area
    }

    /// Removes an area. It must be a single run again.
    pub(crate) fn remove_area(&mut self, area: u32) {
        debug_assert_eq!(self[area].after, NONE, "more than one run");
        self.unlink(area);
        self.forget(area);
    }

    /// Frees a used run.
    pub(crate) fn free(&mut self, run: u32) {
        let Run { start, size, .. } = self[run];
        self.set(run, start, size, RunState::Free);
    }

    /// Finds a run with room for `size` bytes at a multiple of `alignment`, a power of two. Returns
    /// the run and the aligned address. May miss a run that fits only just.
    pub(crate) fn find(&self, state: RunState, size: u64, alignment: u64) -> Option<(u32, u64)> {
        if size / UNIT > LARGEST {
            return None;
        }
        let lists = self.lists(state);
        // Runs of about this size waste least, but not all of them fit: try a few.
        let near = self.list(lists.first[class(size / UNIT)]).take(8);
        if let Some(found) = near.filter_map(|run| self.fit(run, size, alignment)).next() {
            return Some(found);
        }
        // From this size on every run fits.
        let enough = round_up(size.checked_add(alignment.max(UNIT) - UNIT)? / UNIT);
        self.fit(lists.first_from(class(enough))?, size, alignment)
    }

    /// As [`SegregatedFit::find`], but misses none.
    pub(crate) fn search(&self, state: RunState, size: u64, alignment: u64) -> Option<(u32, u64)> {
        if size / UNIT > LARGEST {
            return None;
        }
        let runs = self.lists(state).first[class(size / UNIT)..].iter().flat_map(|&first| self.list(first));
        runs.filter_map(|run| self.fit(run, size, alignment)).next()
    }

    /// The run, and the aligned address of `size` bytes in it, if they fit.
    pub(crate) fn fit(&self, run: u32, size: u64, alignment: u64) -> Option<(u32, u64)> {
        let Run { start, size: whole, .. } = self[run];
        let aligned = start.next_multiple_of(alignment);
        (aligned - start <= whole && size <= whole - (aligned - start)).then_some((run, aligned))
    }

    /// Changes the state of a part of a run and merges it with its neighbours of the same state.
    /// Returns the number of the resulting run.
    pub(crate) fn set(&mut self, run: u32, start: u64, size: u64, state: RunState) -> u32 {
        self.unlink(run);
        let (mut part, whole) = (run, self[run]);
        if start > whole.start {
            part = self.split(run, start);
            self.link(run);
        }
        if whole.end() > start + size {
            let rest = self.split(part, start + size);
            self.link(rest);
        }
        self.runs[part as usize].state = state;
        if state != RunState::Used {
            part = self.join(part);
        }
        self.link(part);
        part
    }

    /// The number of the neighbour before a run in its area.
    pub(crate) fn before(&self, run: u32) -> Option<u32> {
        Some(self[run].before).filter(|&before| before != NONE)
    }

    /// The number of the neighbour after a run in its area.
    pub(crate) fn after(&self, run: u32) -> Option<u32> {
        Some(self[run].after).filter(|&after| after != NONE)
    }

    /// The size of the largest free run, or up to a sixteenth less.
    pub(crate) fn largest_free(&self) -> u64 {
        self.free.last().map_or(0, |run| self[run].size)
    }

    /// All free runs, or all holes, of at least a size, roughly by size.
    pub(crate) fn all(&self, state: RunState, smallest: u64) -> impl Iterator<Item = u32> {
        let lists = self.lists(state).first.get(class(smallest / UNIT)..).unwrap_or_default();
        lists.iter().flat_map(|&first| self.list(first)).filter(move |&run| self[run].size >= smallest)
    }

    /// Splits a run that is in no list. Returns the second part, which is in no list either.
    fn split(&mut self, run: u32, at: u64) -> u32 {
        let first = &mut self.runs[run as usize];
        let second = Run { start: at, size: first.end() - at, before: run, ..*first };
        first.size = at - first.start;
        let number = self.new_run(second);
        self.runs[run as usize].after = number;
        if let Some(after) = self.runs.get_mut(second.after as usize) {
            after.before = number;
        }
        number
    }

    /// Merges a run that is in no list with neighbours of the same state. Keeps the first's number.
    fn join(&mut self, mut run: u32) -> u32 {
        let Run { before, after, state, .. } = self[run];
        for neighbour in [after, before] {
            if !self.runs.get(neighbour as usize).is_some_and(|neighbour| neighbour.state == state) {
                continue;
            }
            self.unlink(neighbour);
            let (first, second) = if neighbour == before { (neighbour, run) } else { (run, neighbour) };
            let Run { size, after, .. } = self[second];
            self.runs[first as usize].size += size;
            self.runs[first as usize].after = after;
            if let Some(after) = self.runs.get_mut(after as usize) {
                after.before = first;
            }
            self.forget(second);
            run = first;
        }
        run
    }

    fn new_run(&mut self, run: Run) -> u32 {
        match self.runs.get_mut(self.unused as usize) {
            Some(unused) => {
                let number = std::mem::replace(&mut self.unused, unused.next);
                *unused = run;
                number
            }
            None => {
                self.runs.push(run);
                self.runs.len() as u32 - 1
            }
        }
    }

    fn forget(&mut self, run: u32) {
        self.runs[run as usize].next = std::mem::replace(&mut self.unused, run);
    }

    /// The lists of free runs, or of holes.
    fn lists(&self, state: RunState) -> &Lists {
        if state == RunState::Hole { &self.holes } else { &self.free }
    }

    fn lists_mut(&mut self, state: RunState) -> Option<&mut Lists> {
        match state {
            RunState::Used => None,
            RunState::Free => Some(&mut self.free),
            RunState::Hole => Some(&mut self.holes),
        }
    }

    /// Puts a run at the head of its list.
    fn link(&mut self, run: u32) {
        let Run { size, state, .. } = self[run];
        let Some(lists) = self.lists_mut(state) else { return };
        let next = lists.push(class(size / UNIT), run);
        self.runs[run as usize].next = next;
        self.runs[run as usize].previous = NONE;
        if let Some(next) = self.runs.get_mut(next as usize) {
            next.previous = run;
        }
    }

    /// Removes a run from its list.
    fn unlink(&mut self, run: u32) {
        let Run { size, state, next, previous, .. } = self[run];
        let Some(lists) = self.lists_mut(state) else { return };
        if previous == NONE {
            lists.set_first(class(size / UNIT), next);
        } else {
            self.runs[previous as usize].next = next;
        }
        if let Some(next) = self.runs.get_mut(next as usize) {
            next.previous = previous;
        }
    }

    /// The runs of a list, starting at one.
    fn list(&self, first: u32) -> impl Iterator<Item = u32> {
        let some = |run: u32| (run != NONE).then_some(run);
        std::iter::successors(some(first), move |&run| some(self[run].next))
    }
}

impl<const UNIT: u64> Index<u32> for SegregatedFit<UNIT> {
    type Output = Run;

    fn index(&self, run: u32) -> &Run {
        &self.runs[run as usize]
    }
}

impl Lists {
    fn push(&mut self, class: usize, run: u32) -> u32 {
        self.filled[class / 64] |= 1 << (class % 64);
        std::mem::replace(&mut self.first[class], run)
    }

    fn set_first(&mut self, class: usize, run: u32) {
        self.first[class] = run;
        if run == NONE {
            self.filled[class / 64] &= !(1 << (class % 64));
        }
    }

    /// The first run of the first list that is not empty, starting at one.
    fn first_from(&self, class: usize) -> Option<u32> {
        let mut mask = u64::MAX << (class % 64);
        for (word, filled) in self.filled.iter().enumerate().skip(class / 64) {
            let filled = filled & std::mem::replace(&mut mask, u64::MAX);
            if filled != 0 {
                return Some(self.first[word * 64 + filled.trailing_zeros() as usize]);
            }
        }
        None
    }

    /// The first run of the last list that is not empty.
    fn last(&self) -> Option<u32> {
        let (word, filled) = self.filled.iter().enumerate().rev().find(|(_, filled)| **filled != 0)?;
        Some(self.first[word * 64 + filled.ilog2() as usize])
    }
}

/// The list for a size in units. Each size up to 31 has its own.
const fn class(units: u64) -> usize {
    let step = step_bits(units);
    (step as u64 * STEPS + (units >> step)) as usize
}

/// Rounds up to the smallest size of its list.
const fn round_up(units: u64) -> u64 {
    let step = step_bits(units);
    (units + (1 << step) - 1) >> step << step
}

/// The number of low bits of a size that its list ignores.
const fn step_bits(units: u64) -> u32 {
    (units | STEPS).ilog2() - STEPS.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const UNIT: u64 = 4096;
    type Fit = SegregatedFit<UNIT>;

    /// Every area is cut without a gap, no two neighbours could be one, and the lists have exactly
    /// the runs that are free or holes.
    fn check(fit: &Fit, areas: &[(u32, u64, u64)]) {
        let mut unused = vec![true; fit.runs.len()];
        let (mut free, mut holes) = (Vec::new(), Vec::new());
        for &(area, start, size) in areas {
            let (mut at, mut before, mut state) = (start, NONE, RunState::Used);
            for (number, run) in runs(fit, area) {
                assert!(run.start == at && run.before == before && run.size > 0);
                assert!(run.state == RunState::Used || run.state != state, "two runs of {state:?}");
                (at, before, state) = (run.end(), number, run.state);
                unused[number as usize] = false;
                match state {
                    RunState::Used => {}
                    RunState::Free => free.push(number),
                    RunState::Hole => holes.push(number),
                }
            }
            assert_eq!(at, start + size);
        }
        for (lists, mut expected) in [(&fit.free, free), (&fit.holes, holes)] {
            let mut listed = Vec::new();
            for (number, &first) in lists.first.iter().enumerate() {
                assert_eq!(lists.filled[number / 64] >> (number % 64) & 1 == 1, first != NONE);
                for run in fit.list(first) {
                    assert_eq!(class(fit[run].size / UNIT), number);
                    listed.push(run);
                }
            }
            listed.sort_unstable();
            expected.sort_unstable();
            assert_eq!(listed, expected);
        }
        assert_eq!(fit.list(fit.unused).count(), unused.iter().filter(|&&unused| unused).count());
    }

    /// The runs of an area, in order.
    fn runs(fit: &Fit, area: u32) -> impl Iterator<Item = (u32, Run)> {
        std::iter::successors(Some(area), |&run| fit.after(run)).map(|run| (run, fit[run]))
    }

    fn take(fit: &mut Fit, size: u64, alignment: u64) -> Option<u32> {
        let (run, start) = fit.find(RunState::Free, size, alignment)?;
        Some(fit.set(run, start, size, RunState::Used))
    }

    /// True if a request fits anywhere, by looking everywhere.
    fn fits(fit: &Fit, areas: &[(u32, u64, u64)], state: RunState, size: u64, alignment: u64) -> bool {
        let mut all = areas.iter().flat_map(|&(area, ..)| runs(fit, area));
        all.any(|(_, run)| run.state == state && run.start.next_multiple_of(alignment) + size <= run.end())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn runs_never_overlap_and_every_request_that_fits_is_found(
            steps in prop::collection::vec((0..8, 1u64..=120, 0u32..8, any::<prop::sample::Index>()), 1..400),
        ) {
            let mut fit = Fit::default();
            let mut areas = Vec::new();
            // The first two are adjacent and must not be merged.
            let pieces = [(0, 1000, RunState::Free), (1000, 700, RunState::Hole), (1 << 30, 300, RunState::Free)];
            for (start, size, state) in pieces {
                areas.push((fit.add_area(start * UNIT, size * UNIT, state), start * UNIT, size * UNIT));
            }
            let mut used: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
            for (action, units, shift, choice) in steps {
                let (size, alignment) = (units * UNIT, UNIT << shift);
                match action {
                    0..4 => {
                        let expected = fits(&fit, &areas, RunState::Free, size, alignment);
                        let found = fit.find(RunState::Free, size, alignment);
                        let found = found.or_else(|| fit.search(RunState::Free, size, alignment));
                        prop_assert_eq!(found.is_some(), expected);
                        if let Some((number, start)) = found {
                            let number = fit.set(number, start, size, RunState::Used);
                            let run = fit[number];
                            prop_assert!(run.start % alignment == 0 && run.size == size);
                            let before = used.range(..run.end()).next_back();
                            prop_assert!(before.is_none_or(|(start, (size, _))| start + size <= run.start));
                            used.insert(run.start, (size, number));
                        }
                    }
                    4..6 if !used.is_empty() => {
                        let &start = choice.get(&used.keys().copied().collect::<Vec<_>>());
                        let (size, number) = used.remove(&start).unwrap();
                        prop_assert_eq!((fit[number].start, fit[number].size), (start, size));
                        fit.free(number);
                    }
                    _ => {
                        let (from, to) = match action {
                            6 => (RunState::Hole, RunState::Free),
                            _ => (RunState::Free, RunState::Hole),
                        };
                        let expected = fits(&fit, &areas, from, size, alignment);
                        let found = fit.search(from, size, alignment);
                        prop_assert_eq!(found.is_some(), expected);
                        if let Some((run, start)) = found {
                            let now = fit.set(run, start, size, to);
                            prop_assert!(fit[now].start <= start && start + size <= fit[now].end());
                        }
                    }
                }
                check(&fit, &areas);
            }
            used.into_values().for_each(|(_, number)| fit.free(number));
            check(&fit, &areas);
        }
    }

    #[test]
    fn a_full_area_becomes_a_single_run_when_all_is_freed_and_can_be_removed() {
        let mut fit = Fit::default();
        let area = fit.add_area(0, 64 << 20, RunState::Free);
        let taken: Vec<u32> = std::iter::from_fn(|| take(&mut fit, 1 << 20, 1 << 20)).collect();
        assert_eq!((taken.len(), fit.largest_free()), (64, 0));
        taken.into_iter().for_each(|run| fit.free(run));
        assert_eq!((runs(&fit, area).count(), fit.largest_free()), (1, 64 << 20));
        fit.remove_area(area);
        assert_eq!(take(&mut fit, 4096, 4096), None);
    }

    #[test]
    fn sizes_of_a_list_are_at_most_a_sixteenth_apart() {
        for units in (1..5000).chain([LARGEST - 1, LARGEST]) {
            assert!(round_up(units) >= units && round_up(units) - units <= units / STEPS, "{units}");
            assert!(class(units) <= class(units + 1) && class(round_up(units)) <= class(units) + 1);
        }
    }

    #[test]
    fn requests_larger_than_any_run_are_refused() {
        let mut fit = Fit::default();
        fit.add_area(0, LARGEST * UNIT, RunState::Free);
        assert!(take(&mut fit, LARGEST * UNIT, UNIT).is_some());
        for (size, alignment) in [(LARGEST * UNIT + UNIT, UNIT), (1 << 63, 1 << 30), (u64::MAX - UNIT + 1, UNIT)] {
            assert_eq!(fit.find(RunState::Free, size, alignment), None, "{size}");
            assert_eq!(fit.search(RunState::Free, size, alignment), None, "{size}");
        }
    }
}
