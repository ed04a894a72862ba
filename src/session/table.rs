//! Objects of which the driver allows one: a device that is set up, an import.
//!
//! The table holds what is alive, and a place for what is being made or undone: a thread that wants the same object then waits, because the driver would
//! refuse a second one. Whoever finds no object gets its place, and must fill or vacate it.

use super::lock;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

type Entries<K, T> = HashMap<K, Weak<T>, BuildHasherDefault<Mix>>;

/// A hash for the driver's small numbers, which nobody chooses to do harm; the standard one takes as long as the rest of an import.
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

#[derive(Debug)]
pub(crate) struct WeakTable<K, T> {
    /// A dead entry is an object that is being made or undone.
    entries: Mutex<Entries<K, T>>,
    changed: Condvar,
    /// Threads that wait for a change; changed under the lock. Waking takes a system call, so nobody is woken who does not wait.
    waiting: AtomicUsize,
}

impl<K, T> Default for WeakTable<K, T> {
    fn default() -> Self {
        WeakTable { entries: Mutex::new(HashMap::default()), changed: Condvar::new(), waiting: AtomicUsize::new(0) }
    }
}

impl<K: Hash + Eq + Copy, T> WeakTable<K, T> {
    /// The object; `None` if there is none, and then the caller has the place and must fill or vacate it.
    pub(crate) fn enter(&self, key: K) -> Option<Arc<T>> {
        let mut entries = lock(&self.entries);
        loop {
            let entry = match entries.entry(key) {
                Entry::Occupied(entry) => entry,
                Entry::Vacant(place) => {
                    place.insert(Weak::new());
                    return None;
                }
            };
            if let Some(object) = entry.get().upgrade() {
                return Some(object);
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
            entries = self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Puts the object into its place.
    pub(crate) fn fill(&self, key: K, object: &Arc<T>) {
        self.change(|entries| match entries.get_mut(&key) {
            Some(place) => *place = Arc::downgrade(object),
            // Nobody gives up a place that he does not have.
            None => drop(entries.insert(key, Arc::downgrade(object))),
        });
    }

    /// Gives the place up: the object is undone, or could not be made.
    pub(crate) fn vacate(&self, key: &K) {
        self.change(|entries| entries.remove(key));
    }

    fn change<R>(&self, change: impl FnOnce(&mut Entries<K, T>) -> R) {
        let mut entries = lock(&self.entries);
        change(&mut entries);
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.changed.notify_all();
        }
    }

    /// Whether all keys, of objects and of places, are as `test` wants.
    pub(crate) fn all(&self, test: impl FnMut(&K) -> bool) -> bool {
        lock(&self.entries).keys().all(test)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_found_while_it_lives_and_its_place_is_free_again_when_vacated() {
        let table = WeakTable::<u32, &str>::default();
        assert!(table.enter(7).is_none());
        let object = Arc::new("seven");
        table.fill(7, &object);
        assert!(Arc::ptr_eq(&table.enter(7).unwrap(), &object));
        assert!(table.enter(8).is_none(), "another place");
        table.vacate(&8);
        drop(object);
        table.vacate(&7);
        assert!(table.enter(7).is_none());
        assert!(table.all(|&key| key == 7));
    }

    #[test]
    fn whoever_wants_what_is_being_made_waits_for_it() {
        let table = WeakTable::<u32, u32>::default();
        let objects: Vec<Arc<u32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|number| {
                    let table = &table;
                    scope.spawn(move || {
                        table.enter(1).unwrap_or_else(|| {
                            let made = Arc::new(number);
                            std::thread::yield_now();
                            table.fill(1, &made);
                            made
                        })
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(objects.windows(2).all(|pair| Arc::ptr_eq(&pair[0], &pair[1])), "one made it, all have it");
    }

    #[test]
    fn numbers_that_follow_each_other_do_not_fall_together() {
        let hash = |key: (u32, u32, u32)| {
            let mut mix = Mix::default();
            key.hash(&mut mix);
            mix.finish()
        };
        // As the table uses them: some low bits choose the place, the upper seven tell keys in it apart.
        let places: std::collections::BTreeSet<u64> = (0..1024).map(|share| hash((0, 1, share)) & 1023).collect();
        assert!(places.len() > 512, "{}", places.len());
        let tags: std::collections::BTreeSet<u64> = (0..1024).map(|share| hash((0, 1, share)) >> 57).collect();
        assert!(tags.len() > 64, "{}", tags.len());
    }
}
