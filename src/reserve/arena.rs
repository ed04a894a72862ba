//! Chooses the addresses of reservations, because the kernel never does.
//!
//! The kernel wants reservations inside *heaps*, which are whole GiB and at most 128 GiB each.
//! Enabling one takes an exclusive lock in the kernel and sends a message to every device. So heaps
//! are few and large and are enabled on demand, and the arena chooses addresses inside them.

use crate::driver::svm::{DYNAMIC_START, HEAP_UNIT, HUGE_PAGE, NORMAL_START, RESERVE_HEAP_MAX, SVM_START};
use crate::range_map::RangeMap;
use crate::segregated_fit::{RunState, SegregatedFit};
use std::ops::Range;

/// Addresses for heaps: where the vendor's library puts ordinary heaps, up to the end of the SVM
/// segment.
pub(super) const ADDRESSES: Range<u64> = NORMAL_START..DYNAMIC_START;

/// Whole GiB that are a heap or could become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) start: u64,
    pub(crate) size: u64,
}

impl Window {
    /// The kernel's index of the heap: GiB from the start of the SVM segment.
    pub(crate) fn index(self) -> u32 {
        ((self.start - SVM_START) / HEAP_UNIT) as u32
    }
}

/// Why addresses could not be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unavailable {
    /// Some of them are reserved.
    Reserved,
    /// They cross the border of a heap, or need one that does not fit or is too large.
    Border,
    /// This heap must be enabled first.
    NeedsHeap(Window),
}

#[derive(Debug, Default)]
pub(crate) struct Arena {
    /// All heaps, with the number of their first run. `None` for heaps that hold no reservations.
    heaps: RangeMap<Option<u32>, HEAP_UNIT>,
    fit: SegregatedFit<HUGE_PAGE>,
    /// All reservations, with the number of their run.
    reserved: RangeMap<u32, HUGE_PAGE>,
    /// Number of reservations and of heaps that hold none.
    live: usize,
}

impl Arena {
    /// True if nothing is reserved.
    pub(crate) fn is_idle(&self) -> bool {
        self.live == 0
    }

    /// Removes and returns all heaps. Nothing may be reserved.
    pub(crate) fn take_heaps(&mut self) -> Vec<Window> {
        let heaps = std::mem::take(self).heaps;
        heaps.iter().map(|heap| Window { start: heap.start, size: heap.size }).collect()
    }

    /// Takes `size` bytes at a multiple of `alignment`. Both are multiples of 2 MiB, and the
    /// alignment is a power of two. `None` if no enabled heap has room.
    pub(crate) fn take(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let found = self.fit.find(RunState::Free, size, alignment);
        // Look at every run before another heap is enabled.
        let (run, start) = found.or_else(|| self.fit.search(RunState::Free, size, alignment))?;
        let run = self.fit.set(run, start, size, RunState::Used);
        Some(self.enter(run))
    }

    /// Takes exactly the `size` bytes at `address`. Both are multiples of 2 MiB, inside the
    /// addresses for heaps.
    pub(crate) fn take_at(&mut self, address: u64, size: u64) -> Result<(), Unavailable> {
        let end = address + size;
        let Some(heap) = self.heaps.at(address) else {
            return Err(self.window_around(address, end).map_or(Unavailable::Border, Unavailable::NeedsHeap));
        };
        if end > heap.end() {
            return Err(Unavailable::Border);
        }
        let Some(first) = heap.value else { return Err(Unavailable::Reserved) };
        // Adjacent free runs are merged, so a free address lies in the run right after the previous
        // reservation, or in the first run of the heap.
        let before = self.reserved.last_until(address).filter(|before| before.start >= heap.start);
        let run = before.map_or(Some(first), |before| self.fit.after(before.value));
        let run = run.filter(|&run| self.fit[run].state == RunState::Free && self.fit[run].start <= address);
        let run = run.filter(|&run| end <= self.fit[run].end()).ok_or(Unavailable::Reserved)?;
        let run = self.fit.set(run, address, size, RunState::Used);
        self.enter(run);
        Ok(())
    }

    fn enter(&mut self, run: u32) -> u64 {
        let start = self.fit[run].start;
        // It was free, so the map has nothing there.
        let _ = self.reserved.insert(start, self.fit[run].size, run);
        self.live += 1;
        start
    }

    /// Frees the reservation that starts at an address.
    pub(crate) fn free(&mut self, address: u64) {
        if let Some(run) = self.reserved.remove(address) {
            self.fit.free(run);
            self.live -= 1;
        }
    }

    /// The window for the next heap, large enough for `size` bytes, and 128 GiB if there is room.
    /// `None` if the addresses are used up.
    pub(crate) fn next_window(&self, size: u64) -> Option<Window> {
        let wanted = size.next_multiple_of(HEAP_UNIT);
        let gap = self.gaps().find(|gap| gap.end - gap.start >= wanted)?;
        Some(Window { start: gap.start, size: (gap.end - gap.start).min(RESERVE_HEAP_MAX) })
    }

    /// Adds a heap that was enabled.
    pub(crate) fn add_heap(&mut self, window: Window) {
        let first = self.fit.add_area(window.start, window.size, RunState::Free);
        // Windows are chosen from gaps, so the map has nothing there.
        let _ = self.heaps.insert(window.start, window.size, Some(first));
    }

    /// Takes whole GiB for a heap that holds no reservations, from the upper end of the addresses,
    /// where they do not break up a 128 GiB heap. `None` if the addresses are used up.
    pub(crate) fn take_window(&mut self, size: u64) -> Option<Window> {
        let size = size.checked_next_multiple_of(HEAP_UNIT).filter(|&size| size > 0)?;
        let gap = self.gaps().filter(|gap| gap.end - gap.start >= size).last()?;
        let window = Window { start: gap.end - size, size };
        let _ = self.heaps.insert(window.start, size, None);
        self.live += 1;
        Some(window)
    }

    /// Frees a window of [`Arena::take_window`].
    pub(crate) fn free_window(&mut self, window: Window) {
        self.heaps.remove(window.start);
        self.live -= 1;
    }

    /// The addresses between heaps, in order.
    fn gaps(&self) -> impl Iterator<Item = Range<u64>> {
        let heaps = self.heaps.iter().map(|heap| heap.start..heap.end());
        let mut start = ADDRESSES.start;
        heaps.chain(std::iter::once(ADDRESSES.end..ADDRESSES.end)).filter_map(move |heap| {
            let gap = start..heap.start;
            start = heap.end;
            (!gap.is_empty()).then_some(gap)
        })
    }

    /// A free window that covers a range: the 128 GiB that [`Arena::next_window`] would choose if
    /// they are free, otherwise as few GiB as possible.
    fn window_around(&self, start: u64, end: u64) -> Option<Window> {
        let most = ADDRESSES.start + (start - ADDRESSES.start) / RESERVE_HEAP_MAX * RESERVE_HEAP_MAX;
        let needed = start / HEAP_UNIT * HEAP_UNIT..end.next_multiple_of(HEAP_UNIT);
        [most..most + RESERVE_HEAP_MAX, needed].into_iter().find_map(|window| {
            let Range { start: first, end: last } = window;
            let size = last - first;
            let fits = first <= start && end <= last && last <= ADDRESSES.end && size <= RESERVE_HEAP_MAX;
            (fits && !self.heaps.overlaps(first, size)).then_some(Window { start: first, size })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const MIB2: u64 = HUGE_PAGE;
    const GIB: u64 = HEAP_UNIT;

    /// Whole GiB from the start of the addresses on.
    fn window(gib: u64, count: u64) -> Window {
        Window { start: NORMAL_START + gib * GIB, size: count * GIB }
    }

    /// The heaps.
    fn windows(arena: &Arena) -> Vec<Window> {
        arena.heaps.iter().map(|heap| Window { start: heap.start, size: heap.size }).collect()
    }

    /// Takes addresses as a reservation does, with a new heap if one is needed.
    fn reserve(arena: &mut Arena, size: u64, alignment: u64) -> Option<u64> {
        arena.take(size, alignment).or_else(|| {
            let window = arena.next_window(size)?;
            arena.add_heap(window);
            arena.take(size, alignment)
        })
    }

    fn reserve_at(arena: &mut Arena, address: u64, size: u64) -> Result<(), Unavailable> {
        match arena.take_at(address, size) {
            Err(Unavailable::NeedsHeap(window)) => {
                arena.add_heap(window);
                arena.take_at(address, size)
            }
            result => result,
        }
    }

    #[derive(Debug, Clone)]
    enum Action {
        Take { chunks: u64, alignment: u32 },
        TakeAt { chunk: u64, chunks: u64 },
        Free(prop::sample::Index),
    }

    fn action() -> impl Strategy<Value = Action> {
        let chunks = prop_oneof![1..10u64, 1..600u64, 1..66_000u64];
        prop_oneof![
            4 => (chunks.clone(), 0..10u32).prop_map(|(chunks, alignment)| Action::Take { chunks, alignment }),
            1 => (0..300_000u64, chunks).prop_map(|(chunk, chunks)| Action::TakeAt { chunk, chunks }),
            4 => any::<prop::sample::Index>().prop_map(Action::Free),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn runs_never_overlap_are_aligned_and_merge_when_freed(actions in prop::collection::vec(action(), 1..120)) {
            let mut arena = Arena::default();
            let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
            for action in actions {
                match action {
                    Action::Take { chunks, alignment } => {
                        let (size, alignment) = (chunks * MIB2, MIB2 << alignment);
                        match reserve(&mut arena, size, alignment) {
                            Some(address) => {
                                prop_assert_eq!(address % alignment, 0);
                                let before = taken.range(..address + size).next_back();
                                prop_assert!(before.is_none_or(|(&start, &length)| start + length <= address));
                                taken.insert(address, size);
                            }
                            // 120 actions cannot fill 42 heaps of 128 GiB.
                            None => prop_assert!(size > RESERVE_HEAP_MAX),
                        }
                    }
                    Action::TakeAt { chunk, chunks } => {
                        let (address, size) = (NORMAL_START + chunk * MIB2, chunks * MIB2);
                        let before = taken.range(..address + size).next_back();
                        let overlaps = before.is_some_and(|(&start, &length)| start + length > address);
                        match reserve_at(&mut arena, address, size) {
                            Ok(()) => {
                                prop_assert!(!overlaps);
                                taken.insert(address, size);
                            }
                            Err(Unavailable::Reserved) => prop_assert!(overlaps),
                            Err(taken) => prop_assert_eq!(taken, Unavailable::Border),
                        }
                    }
                    Action::Free(index) => {
                        if !taken.is_empty() {
                            let (&address, _) = taken.iter().nth(index.index(taken.len())).unwrap();
                            taken.remove(&address);
                            arena.free(address);
                        }
                    }
                }
                let reserved: BTreeMap<u64, u64> =
                    arena.reserved.iter().map(|found| (found.start, found.size)).collect();
                prop_assert_eq!(&reserved, &taken);
            }
            for &address in taken.keys() {
                arena.free(address);
            }
            prop_assert!(arena.is_idle() && arena.reserved.iter().next().is_none());
        }
    }

    #[test]
    fn the_first_heap_is_128_gib_at_the_first_normal_address() {
        let arena = Arena::default();
        let window = arena.next_window(MIB2).unwrap();
        assert_eq!((window.index(), window.size), (2816, 128 * GIB));
    }

    #[test]
    fn the_whole_range_can_be_reserved_and_then_no_more() {
        let mut arena = Arena::default();
        let mut addresses: Vec<u64> = (0..42).map(|_| reserve(&mut arena, 128 * GIB, GIB).unwrap()).collect();
        assert_eq!(reserve(&mut arena, MIB2, MIB2), None);
        assert_eq!(arena.next_window(MIB2), None);
        addresses.sort_unstable();
        assert_eq!(addresses[0], NORMAL_START);
        assert_eq!(addresses[41] + 128 * GIB, DYNAMIC_START);
        arena.free(addresses[7]);
        assert_eq!(reserve(&mut arena, 128 * GIB, GIB), Some(addresses[7]));
    }

    #[test]
    fn a_fixed_range_across_two_default_heaps_gets_a_heap_of_its_own() {
        let mut arena = Arena::default();
        let address = NORMAL_START + 127 * GIB + 3 * MIB2;
        assert_eq!(reserve_at(&mut arena, address, 2 * GIB), Ok(()));
        assert_eq!(windows(&arena)[0], window(127, 3));
        assert_eq!(reserve_at(&mut arena, address + GIB, MIB2), Err(Unavailable::Reserved));
        assert_eq!(reserve_at(&mut arena, NORMAL_START + 126 * GIB, 2 * GIB), Err(Unavailable::Border));
        // The next heap fills the gap before it.
        assert_eq!(arena.next_window(GIB), Some(window(0, 127)));
        assert_eq!(arena.next_window(128 * GIB), Some(window(130, 128)));
    }

    #[test]
    fn a_fragmented_heap_is_searched_before_another_is_enabled() {
        let mut arena = Arena::default();
        // Leave holes of 9 and 10 chunks, which are in the same list.
        let blocks: Vec<u64> =
            [9u64, 1, 10, 1].iter().map(|chunks| reserve(&mut arena, chunks * MIB2, MIB2).unwrap()).collect();
        let rest = reserve(&mut arena, 128 * GIB - 21 * MIB2, MIB2).unwrap();
        arena.free(blocks[0]);
        arena.free(blocks[2]);
        assert_eq!(arena.take(10 * MIB2, MIB2), Some(blocks[2]));
        assert_eq!(arena.take(9 * MIB2, MIB2), Some(blocks[0]));
        assert_eq!(arena.take(MIB2, MIB2), None);
        arena.free(rest);
        assert_eq!(arena.take(MIB2, MIB2), Some(rest), "the freed run is used again");
        arena.free(rest);
    }

    #[test]
    fn an_idle_arena_gives_up_its_heaps_and_starts_again() {
        let mut arena = Arena::default();
        let address = reserve(&mut arena, GIB, GIB).unwrap();
        assert!(!arena.is_idle());
        arena.free(address);
        assert!(arena.is_idle());
        assert_eq!(arena.take_heaps(), [window(0, 128)]);
        assert_eq!(arena.take(MIB2, MIB2), None);
        assert_eq!(reserve(&mut arena, GIB, GIB), Some(address));
    }

    #[test]
    fn runs_of_neighbouring_heaps_are_not_merged() {
        let mut arena = Arena::default();
        let heaps: Vec<u64> = (0..3).map(|_| reserve(&mut arena, 128 * GIB, GIB).unwrap()).collect();
        for &address in &heaps {
            arena.free(address);
        }
        assert_eq!(windows(&arena).len(), 3);
        assert_eq!(arena.take(129 * GIB, GIB), None);
    }
}
