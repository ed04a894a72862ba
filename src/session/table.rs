//! Objects of which the driver allows one: a device that is set up, an import.
//!
//! The table holds what is alive, and a place for what is being made or undone: a thread that wants the same object then waits, because the driver would
//! refuse a second one. Whoever finds no object gets its place, and must fill or vacate it.

use super::lock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

#[derive(Debug)]
pub(crate) struct WeakTable<K, T> {
    /// A dead entry is an object that is being made or undone.
    entries: Mutex<BTreeMap<K, Weak<T>>>,
    changed: Condvar,
    /// Threads that wait for a change; changed under the lock. Waking takes a system call, so nobody is woken who does not wait.
    waiting: AtomicUsize,
}

impl<K, T> Default for WeakTable<K, T> {
    fn default() -> Self {
        WeakTable { entries: Mutex::new(BTreeMap::new()), changed: Condvar::new(), waiting: AtomicUsize::new(0) }
    }
}

impl<K: Ord, T> WeakTable<K, T> {
    /// The object; `None` if there is none, and then the caller has the place and must fill or vacate it.
    pub(crate) fn enter(&self, key: K) -> Option<Arc<T>> {
        let mut entries = lock(&self.entries);
        while let Some(entry) = entries.get(&key) {
            if let Some(object) = entry.upgrade() {
                return Some(object);
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
            entries = self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        entries.insert(key, Weak::new());
        None
    }

    /// Puts the object into its place.
    pub(crate) fn fill(&self, key: K, object: &Arc<T>) {
        self.change(|entries| entries.insert(key, Arc::downgrade(object)));
    }

    /// Gives the place up: the object is undone, or could not be made.
    pub(crate) fn vacate(&self, key: &K) {
        self.change(|entries| entries.remove(key));
    }

    fn change<R>(&self, change: impl FnOnce(&mut BTreeMap<K, Weak<T>>) -> R) {
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
