//! The slots, the seat and the arena under a model scheduler (`shuttle`), which runs their threads
//! in many orders and notices when all of them wait.
//!
//! The code is the library's own: its files are compiled here once more, with this crate in the
//! place of `std`, so that `std::sync` is the model's. What these files need of the library stands
//! here in a form without system calls. A file that begins to use more needs it here too.

extern crate self as std;
extern crate std as real;

use real::prelude::rust_2024::*;

/// What the files take from `std`.
#[doc(hidden)]
pub use real::{
    cell, collections, fmt, hash, iter, marker, mem, num, ops, option, panic, ptr, result, thread, time, vec,
};

/// The model's `std::sync`.
#[doc(hidden)]
pub mod sync {
    pub use real::sync::{LazyLock, OnceLock};
    pub use shuttle::sync::*;
}

mod trace {
    #[derive(Debug)]
    pub(crate) struct Quiet;

    impl Quiet {
        pub(crate) fn forgotten() -> Quiet {
            Quiet
        }
    }

    impl Drop for Quiet {
        fn drop(&mut self) {}
    }

    pub(crate) fn quiet() -> Quiet {
        Quiet
    }
}

mod fork {
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct ForkGuard;

    impl ForkGuard {
        pub(crate) fn new() -> ForkGuard {
            ForkGuard
        }

        pub(crate) fn in_child(self) -> bool {
            false
        }
    }

    /// One value for each run of the model.
    pub(crate) struct PerProcess<T: 'static>(real::marker::PhantomData<fn() -> T>);

    real::thread_local! {
        static VALUE: real::cell::RefCell<Option<(usize, &'static dyn real::any::Any)>> = const {
            real::cell::RefCell::new(None)
        };
    }

    impl<T: Sync + 'static> PerProcess<T> {
        pub(crate) const fn new() -> PerProcess<T> {
            PerProcess(real::marker::PhantomData)
        }

        /// The threads of a model are all on one thread of the system.
        pub(crate) fn get(&'static self, make: impl Fn(Option<&'static T>) -> T) -> &'static T {
            let run = super::run();
            VALUE.with_borrow_mut(|value| {
                if value.is_none_or(|(of, _)| of != run) {
                    *value = Some((run, Box::leak(Box::new(make(None)))));
                }
                value.and_then(|(_, value)| value.downcast_ref()).expect("one type only")
            })
        }
    }
}

mod driver {
    pub(crate) mod svm {
        pub(crate) use ascend_ioctl::svm::{
            DYNAMIC_START, HEAP_UNIT, HUGE_PAGE, NORMAL_START, RESERVE_HEAP_MAX, SVM_START,
        };
    }
}

#[path = "../../../src/slots.rs"]
#[allow(dead_code, unused_imports)]
mod slots;

#[path = "../../../src/range_map.rs"]
#[allow(dead_code, unused_imports)]
mod range_map;

#[path = "../../../src/segregated_fit.rs"]
#[allow(dead_code, unused_imports)]
mod segregated_fit;

#[path = "../../../src/reserve/arena.rs"]
#[allow(dead_code, unused_imports)]
mod arena;

#[path = "../../../src/session"]
mod session {
    /// What stands for the kernel's session: there must never be two.
    #[derive(Debug)]
    pub(crate) struct SessionInner;

    pub(crate) mod undo {
        #[derive(Debug)]
        pub(crate) struct Live<T>(#[allow(dead_code)] pub(crate) T);
    }

    #[path = "seat.rs"]
    #[allow(dead_code, unused_imports)]
    mod seat;

    use self::seat::Seat;
    use self::undo::Live;
    use real::prelude::rust_2024::*;
    use shuttle::sync::Arc;
    use shuttle::sync::atomic::{AtomicUsize, Ordering};

    /// A session that is on the seat. As in the library, the seat is freed after the kernel's
    /// session is gone.
    pub(crate) struct Session {
        _inner: Arc<Live<SessionInner>>,
        kernel: Arc<AtomicUsize>,
        _seat: Seat,
    }

    /// Opens a session, unless another is open or the kernel refuses it.
    pub(crate) fn open(kernel: &Arc<AtomicUsize>, refused: bool) -> Option<Session> {
        let seat = Seat::take().ok()?;
        if refused {
            return None;
        }
        assert_eq!(kernel.fetch_add(1, Ordering::SeqCst), 0, "two sessions");
        let inner = Arc::new(Live(SessionInner));
        Seat::set_open(&inner);
        Some(Session { _inner: inner, kernel: kernel.clone(), _seat: seat })
    }

    impl Drop for Session {
        fn drop(&mut self) {
            self.kernel.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

real::thread_local! {
    /// The number of the model's run. Its threads are all on one thread of the system.
    static RUN: real::cell::Cell<usize> = const { real::cell::Cell::new(0) };
}

fn run() -> usize {
    RUN.get()
}

/// Runs a model in many orders of its threads.
fn model(body: impl Fn() + Send + Sync + 'static) {
    let body = move || {
        RUN.set(RUN.get() + 1);
        body();
    };
    shuttle::check_pct(body, 1_000, 3);
}

use self::arena::{Arena, Unavailable};
use self::slots::{Lookup, Slots};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::sync::{Arc, Mutex};
use shuttle::thread::spawn;

/// An object of which the kernel allows one.
struct Object {
    slots: Arc<Slots<u32, Object>>,
    kernel: Arc<AtomicUsize>,
}

impl Object {
    fn new(slots: &Arc<Slots<u32, Object>>, kernel: &Arc<AtomicUsize>) -> Object {
        assert_eq!(kernel.fetch_add(1, Ordering::SeqCst), 0, "a second one is made");
        Object { slots: slots.clone(), kernel: kernel.clone() }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        assert_eq!(self.kernel.fetch_sub(1, Ordering::SeqCst), 1, "one that is not there is undone");
        self.slots.vacate(&1);
    }
}

/// Threads that want one object: one makes it, the others wait and get it, or make it anew after it
/// is gone.
pub fn slots_make_one_object() {
    model(|| {
        let slots: Arc<Slots<u32, Object>> = Arc::new(Slots::default());
        let kernel = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let (slots, kernel) = (slots.clone(), kernel.clone());
                spawn(move || {
                    for round in 0..2 {
                        let object = match slots.find(1) {
                            Lookup::Object(object) => object,
                            // The kernel refuses.
                            Lookup::Vacant(slot) if number == 3 && round == 0 => {
                                drop(slot);
                                continue;
                            }
                            Lookup::Vacant(slot) => {
                                let object = Arc::new(Object::new(&slots, &kernel));
                                slot.fill(&object);
                                object
                            }
                        };
                        assert_eq!(object.kernel.load(Ordering::SeqCst), 1);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(kernel.load(Ordering::SeqCst), 0);
        assert!(slots.all(|_| false), "a slot is left");
    });
}

/// Threads that open and close the process's session.
pub fn the_seat_holds_one_session() {
    model(|| {
        let kernel = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let kernel = kernel.clone();
                spawn(move || {
                    for round in 0..2 {
                        drop(session::open(&kernel, number == 3 && round == 0));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(kernel.load(Ordering::SeqCst), 0);
        assert!(session::open(&kernel, false).is_some(), "the seat is free");
    });
}

/// The arena as a session uses it: heaps are enabled and disabled under `growing`, and no call of
/// the kernel is made under the arena's own lock (`src/session.rs`).
#[derive(Default)]
struct Addresses {
    growing: Mutex<()>,
    arena: Mutex<Option<Arena>>,
    /// The kernel's heaps: first address and size.
    heaps: Mutex<Vec<(u32, u64)>>,
    /// The kernel's reservations.
    reserved: Mutex<Vec<(u64, u64)>>,
}

const CHUNK: u64 = driver::svm::HUGE_PAGE;

impl Addresses {
    fn with<T>(&self, action: impl FnOnce(&mut Arena) -> T) -> T {
        action(self.arena.lock().unwrap().get_or_insert_default())
    }

    fn reserve(&self, size: u64) -> u64 {
        let address = self.with(|arena| arena.take(size, CHUNK)).unwrap_or_else(|| self.grow(size));
        let mut reserved = self.reserved.lock().unwrap();
        assert!(reserved.iter().all(|&(start, length)| start + length <= address || address + size <= start));
        reserved.push((address, size));
        assert!(!self.heaps.lock().unwrap().is_empty(), "a reservation outside of all heaps");
        address
    }

    fn grow(&self, size: u64) -> u64 {
        let _growing = self.growing.lock().unwrap();
        let taken = self.with(|arena| match arena.take(size, CHUNK) {
            Some(address) => Ok(address),
            None => Err(arena.next_window(size).map(Unavailable::NeedsHeap)),
        });
        let window = match taken {
            Ok(address) => return address,
            Err(Some(Unavailable::NeedsHeap(window))) => window,
            Err(other) => panic!("{other:?}"),
        };
        let mut heaps = self.heaps.lock().unwrap();
        assert!(!heaps.contains(&(window.index(), window.size)), "a heap is enabled twice");
        heaps.push((window.index(), window.size));
        drop(heaps);
        self.with(|arena| {
            arena.add_heap(window);
            arena.take(size, CHUNK).expect("the new heap has room")
        })
    }

    fn free(&self, address: u64) {
        self.reserved.lock().unwrap().retain(|&(start, _)| start != address);
        self.with(|arena| arena.free(address));
    }

    fn disable_idle_heaps(&self) {
        let _growing = self.growing.lock().unwrap();
        let windows = self.with(|arena| if arena.is_idle() { arena.take_heaps() } else { Vec::new() });
        for window in windows {
            let mut heaps = self.heaps.lock().unwrap();
            let before = heaps.len();
            heaps.retain(|&heap| heap != (window.index(), window.size));
            assert_eq!(heaps.len() + 1, before, "a heap that is not there is disabled");
        }
    }
}

/// Threads that reserve and free addresses, while heaps are enabled and disabled.
pub fn addresses_do_not_overlap() {
    model(|| {
        let addresses = Arc::new(Addresses::default());
        let threads: Vec<_> = (1..4)
            .map(|number| {
                let addresses = addresses.clone();
                spawn(move || {
                    let first = addresses.reserve(number * CHUNK);
                    let second = addresses.reserve(CHUNK);
                    addresses.free(first);
                    addresses.disable_idle_heaps();
                    addresses.free(second);
                    addresses.disable_idle_heaps();
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(addresses.heaps.lock().unwrap().is_empty(), "a heap is left");
    });
}
