//! Objects of which the driver allows one: a device that is set up, an import.
//!
//! The table holds what is alive, and a slot for what is being made or undone: a thread that wants
//! the same object waits, because the driver would refuse a second one. A thread that finds no
//! object gets its [`Slot`], and fills it or, by dropping it, vacates it.

use crate::trace::{Quiet, quiet};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// Locks a mutex. No user code runs under our locks, and every change is made in one step, so a
/// thread that panicked while it held one left nothing half done.
#[inline]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Entries<K, T> = HashMap<K, Weak<T>, BuildHasherDefault<Mix>>;

/// A hash for the driver's small numbers, which no attacker chooses; the standard one takes as long
/// as the rest of an import.
#[derive(Debug, Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(byte.into()));
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    #[inline]
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    #[inline]
    fn finish(&self) -> u64 {
        // The upper bits of a product are the well-mixed ones, and the table looks at both ends.
        self.0.rotate_left(26)
    }
}

/// A table of objects by key.
#[derive(Debug)]
pub(crate) struct Slots<K, T> {
    /// A dead entry is a slot: an object that is being made or undone.
    entries: Mutex<Entries<K, T>>,
    changed: Condvar,
    /// Threads that wait for a change; changed under the lock. Waking takes a system call, so it is
    /// done only when a thread waits.
    waiting: AtomicUsize,
}

impl<K, T> Default for Slots<K, T> {
    fn default() -> Self {
        Slots { entries: Mutex::new(HashMap::default()), changed: Condvar::new(), waiting: AtomicUsize::new(0) }
    }
}

/// What a thread finds under a key.
#[derive(Debug)]
pub(crate) enum Found<'a, K: Hash + Eq + Copy, T> {
    /// The object.
    Object(Arc<T>),
    /// Nothing: the caller makes it.
    Slot(Slot<'a, K, T>),
}

/// The right to make the object of a key. Dropped without an object, it vacates the key; until then
/// other threads wait, and this one reports nothing.
#[derive(Debug)]
#[must_use = "dropping it lets the next thread make the object"]
pub(crate) struct Slot<'a, K: Hash + Eq + Copy, T> {
    slots: &'a Slots<K, T>,
    key: K,
    filled: bool,
    _quiet: Quiet,
}

impl<K: Hash + Eq + Copy, T> Slot<'_, K, T> {
    /// Puts the object into its slot.
    pub(crate) fn fill(mut self, object: &Arc<T>) {
        self.filled = true;
        self.slots.fill(self.key, object);
    }

    /// Leaves the slot taken: what was made vacates it when it is undone.
    pub(crate) fn keep(mut self) {
        self.filled = true;
    }
}

impl<K: Hash + Eq + Copy, T> Drop for Slot<'_, K, T> {
    fn drop(&mut self) {
        if !self.filled {
            self.slots.vacate(&self.key);
        }
    }
}

impl<K: Hash + Eq + Copy, T> Slots<K, T> {
    /// The object of a key, or its slot. Waits while another thread makes or undoes it.
    #[inline]
    pub(crate) fn find(&self, key: K) -> Found<'_, K, T> {
        let mut entries = lock(&self.entries);
        loop {
            let entry = match entries.entry(key) {
                Entry::Occupied(entry) => entry,
                Entry::Vacant(vacant) => {
                    vacant.insert(Weak::new());
                    return Found::Slot(Slot { slots: self, key, filled: false, _quiet: quiet() });
                }
            };
            if let Some(object) = entry.get().upgrade() {
                return Found::Object(object);
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
            entries = self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Puts an object into a slot that the caller keeps taken.
    #[inline]
    pub(crate) fn fill(&self, key: K, object: &Arc<T>) {
        self.change(|entries| match entries.get_mut(&key) {
            Some(slot) => *slot = Arc::downgrade(object),
            None => drop(entries.insert(key, Arc::downgrade(object))),
        });
    }

    /// Vacates a slot: the object is undone, or could not be made.
    pub(crate) fn vacate(&self, key: &K) {
        self.change(|entries| drop(entries.remove(key)));
    }

    fn change(&self, change: impl FnOnce(&mut Entries<K, T>)) {
        let mut entries = lock(&self.entries);
        change(&mut entries);
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.changed.notify_all();
        }
    }

    /// Whether a test holds for all keys, of objects and of slots.
    pub(crate) fn all(&self, test: impl FnMut(&K) -> bool) -> bool {
        lock(&self.entries).keys().all(test)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found<K: Hash + Eq + Copy, T>(slots: &Slots<K, T>, key: K) -> Option<Arc<T>> {
        match slots.find(key) {
            Found::Object(object) => Some(object),
            Found::Slot(_) => None,
        }
    }

    #[test]
    fn an_object_is_found_while_it_lives_and_its_slot_is_free_again_when_vacated() {
        let slots = Slots::<u32, &str>::default();
        let Found::Slot(slot) = slots.find(7) else { panic!("an object in an empty table") };
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
        let slots = Slots::<u32, u32>::default();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _slot = slots.find(1);
            panic!("while the object is made");
        }));
        assert!(panicked.is_err());
        assert!(matches!(slots.find(1), Found::Slot(_)));
    }

    #[test]
    fn a_thread_that_wants_what_is_being_made_waits_for_it() {
        let slots = Slots::<u32, u32>::default();
        let objects: Vec<Arc<u32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|number| {
                    let slots = &slots;
                    scope.spawn(move || match slots.find(1) {
                        Found::Object(object) => object,
                        Found::Slot(slot) => {
                            let made = Arc::new(number);
                            std::thread::yield_now();
                            slot.fill(&made);
                            made
                        }
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(objects.windows(2).all(|pair| Arc::ptr_eq(&pair[0], &pair[1])), "one made it, all have it");
    }

    #[test]
    fn numbers_that_follow_each_other_do_not_collide() {
        let hash = |key: (u32, u32, u32)| {
            let mut mix = Mix::default();
            key.hash(&mut mix);
            mix.finish()
        };
        // As the table uses them: some low bits choose the place, the upper seven tell keys in it
        // apart.
        let places: std::collections::BTreeSet<u64> = (0..1024).map(|share| hash((0, 1, share)) & 1023).collect();
        assert!(places.len() > 512, "{}", places.len());
        let tags: std::collections::BTreeSet<u64> = (0..1024).map(|share| hash((0, 1, share)) >> 57).collect();
        assert!(tags.len() > 64, "{}", tags.len());
    }
}
