//! Locks that every call takes.
//!
//! The standard library's locks note whether a thread panicked under them, which is half of what
//! they cost, and which nobody here asks: no code of the program runs under our locks, and every
//! change is made in one step, so a thread that panicked left nothing half done. These do not note
//! it. A thread that has to wait does so with the standard library's.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Threads that wait.
#[derive(Debug)]
struct Waiters {
    turn: Mutex<()>,
    woken: Condvar,
}

impl Waiters {
    const fn new() -> Waiters {
        Waiters { turn: Mutex::new(()), woken: Condvar::new() }
    }

    /// Whoever looks under this guard, and then waits, misses no wake-up that comes after.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, turn: MutexGuard<'a, ()>) -> MutexGuard<'a, ()> {
        self.woken.wait(turn).unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_one(&self) {
        let _turn = self.turn();
        self.woken.notify_one();
    }

    fn wake_all(&self) {
        let _turn = self.turn();
        self.woken.notify_all();
    }
}

/// An object that one thread at a time has.
#[derive(Debug)]
pub(crate) struct Lock<T> {
    state: AtomicU32,
    waiters: Waiters,
    object: UnsafeCell<T>,
}

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and a thread may wait for it.
const AWAITED: u32 = 2;

// SAFETY: threads reach the object one at a time, as with a `Mutex`.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(crate) const fn new(object: T) -> Lock<T> {
        Lock { state: AtomicU32::new(FREE), waiters: Waiters::new(), object: UnsafeCell::new(object) }
    }

    /// Waits until no other thread has the object.
    #[inline]
    pub(crate) fn lock(&self) -> Locked<'_, T> {
        if self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait();
        }
        Locked { lock: self, _object: PhantomData }
    }

    #[cold]
    fn wait(&self) {
        let mut turn = self.waiters.turn();
        // Whoever comes out of here says that others may wait: at worst they are woken in vain.
        while self.state.swap(AWAITED, Ordering::Acquire) != FREE {
            turn = self.waiters.wait(turn);
        }
    }
}

/// An object that this thread has, until it is dropped.
#[derive(Debug)]
pub(crate) struct Locked<'a, T> {
    lock: &'a Lock<T>,
    /// Threads that share the guard share the object.
    _object: PhantomData<&'a mut T>,
}

impl<T> Deref for Locked<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: no other thread has it.
        unsafe { &*self.lock.object.get() }
    }
}

impl<T> DerefMut for Locked<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: no other thread has it, and the guard is borrowed exclusively.
        unsafe { &mut *self.lock.object.get() }
    }
}

impl<T> Drop for Locked<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.lock.state.swap(FREE, Ordering::Release) == AWAITED {
            self.wake();
        }
    }
}

impl<T> Locked<'_, T> {
    #[cold]
    fn wake(&self) {
        self.lock.waiters.wake_one();
    }
}

/// An object that many threads read, or one changes.
#[derive(Debug)]
pub(crate) struct Shared<T> {
    /// How many read, and [`WRITER`].
    state: AtomicU32,
    /// The thread that changes it.
    writer: Mutex<()>,
    waiters: Waiters,
    object: UnsafeCell<T>,
}

/// A thread changes the object, or waits for those that read it: nobody begins to read.
const WRITER: u32 = 1 << 31;

// SAFETY: threads reach the object together for reading and one at a time for changing it, as with
// a `RwLock`.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) const fn new(object: T) -> Shared<T> {
        Shared {
            state: AtomicU32::new(0),
            writer: Mutex::new(()),
            waiters: Waiters::new(),
            object: UnsafeCell::new(object),
        }
    }

    /// Waits until no thread changes the object. A thread that reads it must not ask for it again:
    /// another may wait to change it.
    #[inline]
    pub(crate) fn read(&self) -> Reading<'_, T> {
        if self.state.fetch_add(1, Ordering::Acquire) & WRITER != 0 {
            self.wait_to_read();
        }
        Reading { shared: self }
    }

    #[cold]
    fn wait_to_read(&self) {
        self.leave();
        let mut turn = self.waiters.turn();
        while self.state.load(Ordering::Relaxed) & WRITER != 0 {
            turn = self.waiters.wait(turn);
        }
        // Still without one: the mark is set in turn only.
        self.state.fetch_add(1, Ordering::Acquire);
    }

    /// A thread does not read any more. The last one wakes the thread that waits to write.
    #[inline]
    fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::Release) == WRITER + 1 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.waiters.wake_all();
    }

    /// Waits until no other thread has the object.
    #[cold]
    pub(crate) fn write(&self) -> Writing<'_, T> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let mut turn = self.waiters.turn();
        let mut state = self.state.fetch_or(WRITER, Ordering::Acquire);
        while state & !WRITER != 0 {
            turn = self.waiters.wait(turn);
            state = self.state.load(Ordering::Acquire);
        }
        drop(turn);
        Writing { shared: self, _writer: writer }
    }
}

/// An object that this thread reads, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reading<'a, T> {
    shared: &'a Shared<T>,
}

impl<T> Deref for Reading<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: no thread changes it while any is counted as reading.
        unsafe { &*self.shared.object.get() }
    }
}

impl<T> Drop for Reading<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.shared.leave();
    }
}

/// An object that this thread changes, until it is dropped.
#[derive(Debug)]
pub(crate) struct Writing<'a, T> {
    shared: &'a Shared<T>,
    _writer: MutexGuard<'a, ()>,
}

impl<T> Deref for Writing<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: no other thread has it.
        unsafe { &*self.shared.object.get() }
    }
}

impl<T> DerefMut for Writing<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: no other thread has it, and the guard is borrowed exclusively.
        unsafe { &mut *self.shared.object.get() }
    }
}

impl<T> Drop for Writing<'_, T> {
    fn drop(&mut self) {
        self.shared.state.fetch_and(!WRITER, Ordering::Release);
        self.shared.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::thread::scope;

    #[test]
    fn one_thread_at_a_time_has_it() {
        let lock = Lock::new((0_u64, 0_u64));
        scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| {
                    for _ in 0..10_000 {
                        let mut both = lock.lock();
                        assert_eq!(both.0, both.1);
                        both.0 += 1;
                        both.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), (80_000, 80_000));
    }

    #[test]
    fn nobody_reads_what_is_being_changed() {
        let shared = Shared::new((0_u64, 0_u64));
        scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for _ in 0..20_000 {
                        let both = shared.read();
                        assert_eq!(both.0, both.1);
                    }
                });
            }
            for _ in 0..2 {
                threads.spawn(|| {
                    for _ in 0..5_000 {
                        let mut both = shared.write();
                        both.0 += 1;
                        both.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*shared.read(), (10_000, 10_000));
    }

    #[test]
    fn a_thread_that_panics_leaves_them_free() {
        let (lock, shared) = (Lock::new(1), Shared::new(2));
        let panics = AssertUnwindSafe(|| {
            let (_first, _second) = (lock.lock(), shared.read());
            panic!("a bug");
        });
        assert!(catch_unwind(panics).is_err());
        let panics = AssertUnwindSafe(|| {
            let _second = shared.write();
            panic!("a bug");
        });
        assert!(catch_unwind(panics).is_err());
        assert_eq!((*lock.lock(), *shared.write()), (1, 2));
        assert_eq!(*shared.read(), 2);
    }
}
