//! Objects of which the driver allows only one: a session, a device that is set up, an import.
//!
//! The table holds the objects that are alive and a slot for each one that is being made or undone.
//! A thread that wants such an object waits, because the driver would refuse a second one. A thread
//! that finds nothing under a key gets the [`Slot`]. It fills the slot, or vacates it by dropping
//! it.

use crate::trace::{Quiet, quiet};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

/// Locks a mutex and ignores poisoning: no user code runs under our locks, and every change is a
/// single step, so a thread that panicked left nothing half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A table of objects by key.
#[derive(Debug)]
pub(crate) struct Slots<K, T> {
    table: Mutex<Table<K, T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Table<K, T> {
    /// A dead reference stands for an object that is being made or undone. A tree: it never has to
    /// move everything to grow, as a hash table does.
    objects: BTreeMap<K, Weak<T>>,
    /// Threads that wait for a change. Waking them takes a system call, skipped if there are none.
    waiting: usize,
}

/// What [`Slots::find`] finds under a key.
#[derive(Debug)]
pub(crate) enum Lookup<'a, K: Copy + Ord, T> {
    /// The object.
    Object(Arc<T>),
    /// Nothing. The caller makes the object.
    Vacant(Slot<'a, K, T>),
}

/// The right to make the object of a key. Dropping it without an object vacates the key. Until then
/// other threads wait, and this one reports nothing.
#[derive(Debug)]
#[must_use = "dropping it lets the next thread make the object"]
pub(crate) struct Slot<'a, K: Copy + Ord, T> {
    slots: &'a Slots<K, T>,
    key: K,
    /// Set unless the key keeps its slot when this is dropped.
    vacates: bool,
    // Dropped after `Slot::drop` ran: events that it held back are reported when the key is vacant.
    _quiet: Quiet,
}

impl<K: Copy + Ord, T> Slot<'_, K, T> {
    /// Puts the object into its slot. From now on the object vacates the slot when it is undone.
    pub(crate) fn fill(self, object: &Arc<T>) {
        self.slots.fill(self.key, object);
        self.keep();
    }

    /// Leaves the slot taken. Whatever was made vacates it when it is undone.
    pub(crate) fn keep(mut self) {
        self.vacates = false;
    }
}

impl<K: Copy + Ord, T> Drop for Slot<'_, K, T> {
    fn drop(&mut self) {
        if self.vacates {
            self.slots.vacate(&self.key);
        }
    }
}

impl<K, T> Default for Slots<K, T> {
    fn default() -> Self {
        Slots { table: Mutex::new(Table { objects: BTreeMap::new(), waiting: 0 }), changed: Condvar::new() }
    }
}

impl<K: Copy + Ord, T> Slots<K, T> {
    /// The object of a key, or its slot. Waits while another thread makes or undoes it.
    pub(crate) fn find(&self, key: K) -> Lookup<'_, K, T> {
        let _quiet = quiet();
        loop {
            match self.take(key) {
                Ok(()) => return Lookup::Vacant(Slot { slots: self, key, vacates: true, _quiet }),
                // The object may be gone by now.
                Err(object) => {
                    if let Some(object) = object.upgrade() {
                        return Lookup::Object(object);
                    }
                }
            }
        }
    }

    /// Takes the slot of a key, or returns the object if there is one. The caller fills or vacates
    /// the slot. Waits while another thread makes or undoes the object.
    ///
    /// The reference is weak because a strong one, however short-lived, would keep the owner from
    /// undoing the object.
    pub(crate) fn take(&self, key: K) -> Result<(), Weak<T>> {
        let mut table = lock(&self.table);
        loop {
            match table.objects.entry(key) {
                Entry::Vacant(vacant) => {
                    vacant.insert(Weak::new());
                    return Ok(());
                }
                Entry::Occupied(object) if object.get().strong_count() > 0 => return Err(object.get().clone()),
                Entry::Occupied(_) => {}
            }
            table.waiting += 1;
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
            table.waiting -= 1;
        }
    }

    /// Puts an object into a slot that the caller has taken.
    pub(crate) fn fill(&self, key: K, object: &Arc<T>) {
        self.change(|objects| drop(objects.insert(key, Arc::downgrade(object))));
    }

    /// Vacates a slot, after its object was undone or could not be made.
    pub(crate) fn vacate(&self, key: &K) {
        self.change(|objects| drop(objects.remove(key)));
    }

    /// True if a test holds for all keys, of objects and of slots.
    pub(crate) fn all(&self, test: impl FnMut(&K) -> bool) -> bool {
        lock(&self.table).objects.keys().all(test)
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<K, Weak<T>>)) {
        let mut table = lock(&self.table);
        change(&mut table.objects);
        if table.waiting > 0 {
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(slots: &Slots<u32, u32>, key: u32) -> Option<Arc<u32>> {
        match slots.find(key) {
            Lookup::Object(object) => Some(object),
            Lookup::Vacant(_) => None,
        }
    }

    #[test]
    fn an_object_is_found_while_it_lives_and_its_slot_is_free_again_when_vacated() {
        let slots = Slots::default();
        let Lookup::Vacant(slot) = slots.find(7) else { panic!("an object in an empty table") };
        let object = Arc::new(70);
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
            let Lookup::Vacant(_slot) = slots.find(1) else { unreachable!() };
            panic!("while the object is made");
        }));
        assert!(panicked.is_err());
        assert!(matches!(slots.find(1), Lookup::Vacant(_)));
    }

    #[test]
    fn a_thread_that_wants_what_is_being_made_waits_for_it() {
        let slots = Arc::new(Slots::<u32, u32>::default());
        let Lookup::Vacant(slot) = slots.find(1) else { unreachable!() };
        let (found, finds) = std::sync::mpsc::channel();
        let looking = slots.clone();
        std::thread::spawn(move || found.send(matches!(looking.find(1), Lookup::Object(_))));
        while lock(&slots.table).waiting == 0 {
            std::thread::yield_now();
        }
        let object = Arc::new(1);
        slot.fill(&object);
        assert_eq!(finds.recv_timeout(std::time::Duration::from_secs(60)), Ok(true), "it still waits");
    }

    #[test]
    fn threads_that_make_and_undo_the_same_never_have_it_twice() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let slots = Slots::<u32, u32>::default();
        let alive = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..if cfg!(miri) { 50 } else { 500 } {
                        let object = match slots.find(3) {
                            Lookup::Object(object) => object,
                            Lookup::Vacant(slot) => {
                                assert_eq!(alive.fetch_add(1, Ordering::SeqCst), 0);
                                let object = Arc::new(3);
                                slot.fill(&object);
                                object
                            }
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
