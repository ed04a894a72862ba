//! Objects of which the driver allows one: a device that is set up, an import.
//!
//! The table holds what is alive, and a slot for what is being made or undone: a thread that wants
//! the same object waits, because the driver would refuse a second one. A thread that finds no
//! object gets its [`Slot`], and fills it or, by dropping it, vacates it.
//!
//! Keys are the driver's small numbers, so they are looked up by a table in pages, which never has
//! to be rearranged as it grows. Each number has a lock of its own: threads that look for different
//! objects do not wait for each other.

use crate::trace::{Quiet, quiet};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Locks a mutex. No user code runs under our locks, and every change is made in one step, so a
/// thread that panicked while it held one left nothing half done.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What objects are found by.
pub(crate) trait Key: Copy + Eq {
    /// A number that few keys share.
    fn number(&self) -> u32;
}

impl Key for u32 {
    #[inline]
    fn number(&self) -> u32 {
        *self
    }
}

/// Numbers of a page.
const PAGE: usize = 512;

/// A table of objects by key, with a power of two of pages.
#[derive(Debug)]
pub(crate) struct Slots<K, T, const PAGES: usize> {
    /// Each is made when its first number comes. Numbers beyond the last page begin again at the
    /// first.
    pages: Box<[OnceLock<Page<K, T>>; PAGES]>,
    waiters: Waiters,
}

/// Threads that wait for a change of any place. Waking takes a system call, so it is done only when
/// a thread waits.
#[derive(Debug, Default)]
struct Waiters {
    number: AtomicUsize,
    turn: Mutex<()>,
    changed: Condvar,
}

/// The places of [`PAGE`] numbers.
type Page<K, T> = Box<[Place<K, T>; PAGE]>;

/// What has one number.
type Place<K, T> = Mutex<Entries<K, T>>;

/// The first key with its object, and those that have the same number. A dead entry is a slot: an
/// object that is being made or undone.
#[derive(Debug)]
struct Entries<K, T> {
    first: Option<(K, Weak<T>)>,
    others: Vec<(K, Weak<T>)>,
}

impl<K: Key, T> Entries<K, T> {
    #[inline(always)]
    fn get(&mut self, key: &K) -> Option<&mut Weak<T>> {
        match &mut self.first {
            Some((first, object)) if first == key => Some(object),
            _ if self.others.is_empty() => None,
            _ => self.others.iter_mut().find_map(|(other, object)| (other == key).then_some(object)),
        }
    }

    #[inline(always)]
    fn insert(&mut self, key: K, object: Weak<T>) {
        match &mut self.first {
            None => self.first = Some((key, object)),
            Some(_) => self.others.push((key, object)),
        }
    }

    #[inline(always)]
    fn fill(&mut self, key: K, object: &Arc<T>) {
        match self.get(&key) {
            Some(slot) => *slot = Arc::downgrade(object),
            None => self.insert(key, Arc::downgrade(object)),
        }
    }

    #[inline(always)]
    fn remove(&mut self, key: &K) {
        match &self.first {
            Some((first, _)) if first == key => self.first = None,
            _ => self.others.retain(|(other, _)| other != key),
        }
    }

    fn is_slot(&mut self, key: &K) -> bool {
        self.get(key).is_some_and(|object| object.strong_count() == 0)
    }
}

/// What a thread finds under a key.
#[derive(Debug)]
pub(crate) enum Found<'a, K: Key, T> {
    /// The object.
    Object(Arc<T>),
    /// Nothing: the caller makes it.
    Vacant(Vacant<'a, K, T>),
}

/// A key that has no object. Its place is locked: the next step is to take its slot.
#[derive(Debug)]
#[must_use = "its place is locked"]
pub(crate) struct Vacant<'a, K: Key, T> {
    waiters: &'a Waiters,
    place: &'a Place<K, T>,
    entries: MutexGuard<'a, Entries<K, T>>,
    key: K,
}

/// The right to make the object of a key. Dropped without an object, it vacates the key; until then
/// other threads wait, and this one reports nothing.
#[derive(Debug)]
#[must_use = "dropping it lets the next thread make the object"]
pub(crate) struct Slot<'a, K: Key, T> {
    claim: Claim<'a, K, T>,
    // Dropped after the claim: what it holds back is reported when the key is vacant.
    _quiet: Quiet,
}

/// A key that is taken. Vacates it when dropped.
#[derive(Debug)]
#[must_use = "dropping it lets the next thread make the object"]
pub(crate) struct Claim<'a, K: Key, T> {
    waiters: &'a Waiters,
    place: &'a Place<K, T>,
    key: K,
}

impl<'a, K: Key, T> Vacant<'a, K, T> {
    /// Takes the slot.
    #[inline(always)]
    pub(crate) fn take(self) -> Slot<'a, K, T> {
        let _quiet = quiet();
        Slot { claim: self.enter(Weak::new()), _quiet }
    }

    /// Takes the key and makes the object. If that fails, `make` drops the claim and returns
    /// something that stands for the object, which the caller drops; otherwise it keeps the claim.
    // The table gets the object's weak reference at once, and finds the object when that has come
    // to life: this takes the place's lock once instead of twice.
    #[inline(always)]
    pub(crate) fn make(self, make: impl FnOnce(Claim<'a, K, T>) -> T) -> Arc<T> {
        let (waiters, _quiet) = (self.waiters, quiet());
        let object = Arc::new_cyclic(|object: &Weak<T>| make(self.enter(object.clone())));
        // The other fence is in `Waiters::wait`: either we see that a thread waits, or that thread
        // sees that the object lives.
        fence(Ordering::SeqCst);
        waiters.wake_if_any();
        object
    }

    #[inline(always)]
    fn enter(mut self, object: Weak<T>) -> Claim<'a, K, T> {
        let Vacant { waiters, place, key, .. } = self;
        self.entries.insert(key, object);
        Claim { waiters, place, key }
    }
}

impl<K: Key, T> Slot<'_, K, T> {
    /// Puts the object into its slot. From now on the object vacates it, when it is undone.
    pub(crate) fn fill(self, object: &Arc<T>) {
        let claim = ManuallyDrop::new(self.claim);
        change(claim.waiters, claim.place, |entries| entries.fill(claim.key, object));
    }
}

impl<K: Key, T> Claim<'_, K, T> {
    /// Leaves the key taken: what was made vacates it when it is undone.
    #[inline(always)]
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl<K: Key, T> Drop for Claim<'_, K, T> {
    // Inlined, and the rest apart: so a claim need not be in memory where it is not dropped.
    #[inline(always)]
    fn drop(&mut self) {
        give_up(self.waiters, self.place, self.key);
    }
}

#[cold]
fn give_up<K: Key, T>(waiters: &Waiters, place: &Place<K, T>, key: K) {
    change(waiters, place, |entries| entries.remove(&key));
}

impl<K: Key, T, const PAGES: usize> Default for Slots<K, T, PAGES> {
    fn default() -> Self {
        const { assert!(PAGES.is_power_of_two()) };
        Slots { pages: boxed(OnceLock::new), waiters: Waiters::default() }
    }
}

impl<K: Key, T, const PAGES: usize> Slots<K, T, PAGES> {
    /// The place of a key.
    #[inline(always)]
    fn place(&self, key: &K) -> &Place<K, T> {
        let number = key.number() as usize;
        &self.pages[number / PAGE % PAGES].get_or_init(new_page)[number % PAGE]
    }

    /// The object of a key, or its slot. Waits while another thread makes or undoes it.
    #[inline(always)]
    pub(crate) fn find(&self, key: K) -> Found<'_, K, T> {
        let place = self.place(&key);
        // Apart from the loop, which is rarely needed: in a loop, what its next round needs is
        // loaded before the first.
        if let Some(found) = self.look(place, key) {
            return found;
        }
        loop {
            self.waiters.wait(place, key);
            if let Some(found) = self.look(place, key) {
                return found;
            }
        }
    }

    /// The same now; `None` while another thread makes or undoes it.
    #[inline(always)]
    fn look<'a>(&'a self, place: &'a Place<K, T>, key: K) -> Option<Found<'a, K, T>> {
        let mut entries = lock(place);
        match entries.get(&key) {
            None => Some(Found::Vacant(Vacant { waiters: &self.waiters, place, entries, key })),
            Some(object) => object.upgrade().map(Found::Object),
        }
    }

    /// Puts an object into a slot that the caller keeps taken.
    pub(crate) fn fill(&self, key: K, object: &Arc<T>) {
        change(&self.waiters, self.place(&key), |entries| entries.fill(key, object));
    }

    /// Vacates a slot: the object is undone, or could not be made.
    #[inline(always)]
    pub(crate) fn vacate(&self, key: &K) {
        change(&self.waiters, self.place(key), |entries| entries.remove(key));
    }

    /// Whether a test holds for all keys, of objects and of slots.
    pub(crate) fn all(&self, mut test: impl FnMut(&K) -> bool) -> bool {
        self.pages.iter().filter_map(OnceLock::get).flat_map(|page| page.iter()).all(|place| {
            let entries = lock(place);
            entries.first.iter().chain(&entries.others).all(|(key, _)| test(key))
        })
    }
}

#[inline(always)]
fn change<K: Key, T>(waiters: &Waiters, place: &Place<K, T>, change: impl FnOnce(&mut Entries<K, T>)) {
    change(&mut lock(place));
    waiters.wake_if_any();
}

impl Waiters {
    /// Waits while another thread makes or undoes an object.
    #[cold]
    fn wait<K: Key, T>(&self, place: &Place<K, T>, key: K) {
        let mut turn = lock(&self.turn);
        // Counted before the place is looked at: a thread that changes it after that sees the
        // number, and then waits for its turn to wake us.
        self.number.fetch_add(1, Ordering::Relaxed);
        loop {
            fence(Ordering::SeqCst);
            if !lock(place).is_slot(&key) {
                break;
            }
            turn = self.changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
        }
        self.number.fetch_sub(1, Ordering::Relaxed);
    }

    #[inline(always)]
    fn wake_if_any(&self) {
        if self.number.load(Ordering::Relaxed) > 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // A thread that looked at the place before the change is waiting when we get the turn.
        drop(lock(&self.turn));
        self.changed.notify_all();
    }
}

#[cold]
fn new_page<K, T>() -> Page<K, T> {
    boxed(|| Mutex::new(Entries { first: None, others: Vec::new() }))
}

/// An array that is made on the heap: a thread may have a small stack.
fn boxed<T, const N: usize>(make: impl Fn() -> T) -> Box<[T; N]> {
    let values: Box<[T]> = (0..N).map(|_| make()).collect();
    values.try_into().unwrap_or_else(|_| unreachable!("there are as many as in the array"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found<K: Key, T, const PAGES: usize>(slots: &Slots<K, T, PAGES>, key: K) -> Option<Arc<T>> {
        match slots.find(key) {
            Found::Object(object) => Some(object),
            Found::Vacant(_) => None,
        }
    }

    #[test]
    fn an_object_is_found_while_it_lives_and_its_slot_is_free_again_when_vacated() {
        let slots = Slots::<u32, &str, 1>::default();
        let Found::Vacant(vacant) = slots.find(7) else { panic!("an object in an empty table") };
        let slot = vacant.take();
        let object = Arc::new("seven");
        slot.fill(&object);
        assert!(Arc::ptr_eq(&found(&slots, 7).unwrap(), &object));
        assert!(found(&slots, 8).is_none(), "another slot");
        drop(object);
        slots.vacate(&7);
        assert!(slots.all(|_| false), "slots that were not filled are vacated");
    }

    #[test]
    fn a_thread_that_panics_with_a_slot_vacates_it() {
        let slots = Slots::<u32, u32, 1>::default();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let Found::Vacant(vacant) = slots.find(1) else { unreachable!() };
            let _slot = vacant.take();
            panic!("while the object is made");
        }));
        assert!(panicked.is_err());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let Found::Vacant(vacant) = slots.find(1) else { unreachable!() };
            vacant.make(|_claim| panic!("while the object is made"))
        }));
        assert!(panicked.is_err());
        assert!(matches!(slots.find(1), Found::Vacant(_)));
    }

    #[test]
    fn a_thread_that_wants_what_is_being_made_waits_for_it() {
        let slots = Slots::<u32, u32, 1>::default();
        let objects: Vec<Arc<u32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|number| {
                    let slots = &slots;
                    scope.spawn(move || match slots.find(1) {
                        Found::Object(object) => object,
                        Found::Vacant(vacant) if number % 2 == 0 => {
                            let slot = vacant.take();
                            let made = Arc::new(number);
                            std::thread::yield_now();
                            slot.fill(&made);
                            made
                        }
                        Found::Vacant(vacant) => vacant.make(|claim| {
                            std::thread::yield_now();
                            claim.keep();
                            number
                        }),
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(objects.windows(2).all(|pair| Arc::ptr_eq(&pair[0], &pair[1])), "one made it, all have it");
    }

    #[test]
    fn a_thread_that_waits_is_woken_when_the_object_is_made() {
        use std::time::Duration;
        for by_slot in [true, false] {
            let slots = Arc::new(Slots::<u32, u32, 1>::default());
            let Found::Vacant(vacant) = slots.find(1) else { unreachable!() };
            let waits = || {
                let (found, finds) = std::sync::mpsc::channel();
                let looking = slots.clone();
                std::thread::spawn(move || found.send(matches!(looking.find(1), Found::Object(_))));
                while slots.waiters.number.load(Ordering::Relaxed) == 0 {
                    std::thread::yield_now();
                }
                // It gave up its turn, so it waits.
                drop(lock(&slots.waiters.turn));
                finds
            };
            let (finds, _object) = if by_slot {
                let (slot, object) = (vacant.take(), Arc::new(1));
                let finds = waits();
                slot.fill(&object);
                (finds, object)
            } else {
                let mut finds = None;
                let object = vacant.make(|claim| {
                    finds = Some(waits());
                    claim.keep();
                    1
                });
                (finds.unwrap(), object)
            };
            assert_eq!(finds.recv_timeout(Duration::from_secs(60)), Ok(true), "it still waits");
        }
    }

    #[test]
    fn what_could_not_be_made_is_not_found() {
        let slots = Slots::<u32, u32, 1>::default();
        let Found::Vacant(vacant) = slots.find(1) else { unreachable!() };
        let nothing = vacant.make(|claim| {
            drop(claim);
            assert!(slots.all(|_| false), "vacant before anything is there");
            0
        });
        assert_eq!(*nothing, 0);
        assert!(matches!(slots.find(1), Found::Vacant(_)));
    }

    #[test]
    fn keys_of_one_number_are_told_apart() {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        struct Pair(u32, u32);
        impl Key for Pair {
            fn number(&self) -> u32 {
                self.0
            }
        }
        let slots = Slots::<Pair, u32, 2>::default();
        // 5, 5 beyond the last page, and 5 of other devices have one place.
        let keys = [Pair(5, 0), Pair(5, 1), Pair(5 + 1024, 0), Pair(5 + 512, 0), Pair(5, 2)];
        let objects: Vec<Arc<u32>> = keys.iter().map(|key| Arc::new(key.1)).collect();
        for (key, object) in keys.iter().zip(&objects) {
            let Found::Vacant(vacant) = slots.find(*key) else { panic!("{key:?} is taken") };
            vacant.take().fill(object);
        }
        for (key, object) in keys.iter().zip(&objects) {
            assert!(Arc::ptr_eq(&found(&slots, *key).unwrap(), object));
        }
        for key in [Pair(5, 0), Pair(5, 2)] {
            slots.vacate(&key);
            assert!(found(&slots, key).is_none());
        }
        assert!(Arc::ptr_eq(&found(&slots, Pair(5, 1)).unwrap(), &objects[1]));
        assert!(!slots.all(|key| *key == Pair(5, 1)), "the others are still there");
    }

    #[test]
    fn threads_that_make_and_undo_the_same_never_have_it_twice() {
        use std::sync::atomic::AtomicU32;
        let slots = Slots::<u32, u32, 1>::default();
        let alive = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..if cfg!(miri) { 50 } else { 500 } {
                        let object = match slots.find(3) {
                            Found::Object(object) => object,
                            Found::Vacant(vacant) => vacant.make(|claim| {
                                assert_eq!(alive.fetch_add(1, Ordering::SeqCst), 0);
                                claim.keep();
                                3
                            }),
                        };
                        if Arc::into_inner(object).is_some() {
                            assert_eq!(alive.fetch_sub(1, Ordering::SeqCst), 1);
                            slots.vacate(&3);
                        }
                    }
                });
            }
        });
        assert!(slots.all(|_| false), "all are undone");
    }
}
