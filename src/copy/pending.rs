//! Asynchronous copies.
//!
//! ASYNC_MEMCPY pins the host's pages and returns the number of a task; MEMCPY_RESULT_REFRESH waits
//! for it, and must be called exactly once per task, or the mapping stays busy until the session is
//! closed. A [`Pending`] owns its buffer and references to the mappings, so it is sound even if it
//! is forgotten: then all of them stay. If the device does not finish in time, its DMA may still be
//! running. Then the buffer is leaked, not freed, and the kernel, which keeps its locks, refuses to
//! unmap the memory until the session is closed.
//!
//! One task stays inside one mapping of each side. Of a longer task older drivers release only the
//! first mapping, and the others cannot be unmapped any more. And no driver holds the second
//! mapping of a task that is not longer than its first one (`devmm_vmmas_occupy_inc`). So a copy
//! over several mappings is several tasks. If one cannot be started, those before it still run: the
//! [`Pending`] waits for them, and then reports the error.
//!
//! The kernel can wait for a task, but cannot say whether it is over. So `try_wait`, and the first
//! poll as a future, start a thread that waits.

use super::{Keeper, Slice};
use crate::bytes::Bytes;
use crate::device::DeviceInner;
use crate::driver::svm::Direction;
use crate::error::{Errno, Error, Failed, Invalid, KernelResult, Refused, Result, SystemCall};
use crate::mapping::{Mapped, Mapping};
use crate::session::undo::Live;
use crate::signals;
use crate::slots::lock;
use crate::trace;
use ascend_ioctl::svm::Op;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::task::{Context, Poll, Waker};

/// A copy that is running. Wait for it; dropping it waits too, and logs what goes wrong.
///
/// It is also a future, for any runtime: the first poll starts a thread that waits for the copy.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// let reservation = session.reserve(2 << 20)?;
/// let mapping = reservation.map(0, &memory)?;
/// let pending = mapping.write_async(0, vec![1; 4096])?;
/// // … something else …
/// let buffer = pending.wait()?;
/// assert_eq!(buffer.len(), 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping it waits for the copy at once"]
pub struct Pending<T = Vec<u8>> {
    /// `None` once the caller has it again, or if the device may still be using it: then it is
    /// leaked.
    buffer: Option<T>,
    state: PendingState,
    size: u64,
    device: Arc<Live<DeviceInner>>,
    /// The mappings that are read and written.
    held: Vec<Arc<Live<Mapped>>>,
    /// Dropped when the copy is over.
    kept: Vec<Keeper>,
}

/// Most tasks of one copy that run at the same time. The driver's table has 65535 places for all
/// tasks of a process.
const MAX_TASKS: usize = 1024;

enum PendingState {
    /// No thread waits for the tasks.
    Running(Tasks),
    /// A thread waits for them.
    Waited(Arc<Waiter>),
    /// Nothing is left to wait for.
    Over,
}

/// The tasks of a copy that were not waited for, oldest first, and the first failure.
#[derive(Default)]
struct Tasks {
    /// Number and size of each.
    pieces: VecDeque<(i32, u64)>,
    failure: Option<Failure>,
}

/// Why a copy was not done.
struct Failure {
    error: Error,
    /// The device may still be using the buffer.
    in_use: bool,
}

/// Where a thread that waits for a copy puts the result.
#[derive(Default)]
struct Waiter {
    result: Mutex<WaiterResult>,
    arrived: Condvar,
}

#[derive(Default)]
struct WaiterResult {
    is_over: bool,
    failure: Option<Failure>,
    waker: Option<Waker>,
}

impl Tasks {
    /// Adds a task. If there are very many, waits for the oldest first.
    fn push(&mut self, task: i32, size: u64, device: &DeviceInner) {
        self.pieces.push_back((task, size));
        if self.pieces.len() > MAX_TASKS {
            self.wait_for_oldest(device);
        }
    }

    /// Keeps the first error, and notes whether the device may be using the buffer after any.
    fn fail(&mut self, error: Error, in_use: bool) {
        match &mut self.failure {
            Some(failure) => failure.in_use |= in_use,
            None => self.failure = Some(Failure { error, in_use }),
        }
    }

    /// Waits for the oldest task. The kernel forgets the task whatever it answers, so it is never
    /// waited for twice.
    fn wait_for_oldest(&mut self, device: &DeviceInner) {
        let Some((task, size)) = self.pieces.pop_front() else { return };
        let failed = |refused: Box<Refused>, operation: &'static str| {
            device.failed(refused, operation, format!("task {task}, size {}", Bytes(size)))
        };
        match device.session.svm.memcpy_result_refresh(device.id, task, size) {
            Ok(true) => {}
            Ok(false) => {
                let refused = Refused::new(SystemCall::Svm(Op::MemcpyResultRefresh), Errno::EIO);
                self.fail(failed(refused, "copy"), false);
            }
            Err(refused) => {
                if refused.errno == Errno::ETIMEDOUT {
                    // The kernel waits tens of seconds for each task. A device that did not finish
                    // one in time does not get that again for each of the others.
                    self.pieces.clear();
                }
                self.fail(failed(refused, "wait for a copy"), true);
            }
        }
    }

    /// Waits for all tasks.
    fn wait(mut self, device: &DeviceInner) -> Option<Failure> {
        while !self.pieces.is_empty() {
            self.wait_for_oldest(device);
        }
        self.failure
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if matches!(self.state, PendingState::Over) { "over" } else { "running" };
        write!(f, "Pending({}, {state})", Bytes(self.size))
    }
}

impl Mapping {
    /// Starts to copy a buffer into the memory at `offset`. [`Pending::wait`] returns the buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range outside of the mapping; [`Error::Refused`] if the kernel does
    /// not start the copy. The buffer comes back.
    #[doc(alias = "aclrtMemcpyAsync")]
    #[doc(alias = "cuMemcpyAsync")]
    #[doc(alias = "cudaMemcpyAsync")]
    pub fn write_async(&self, offset: u64, from: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        match self.slice(offset, from.len() as u64) {
            Ok(slice) => slice.write_async(from),
            Err(error) => Err(Failed { error, object: from }),
        }
    }

    /// Starts to copy the memory at `offset` into a buffer, and fills all of it.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write_async`].
    pub fn read_async(&self, offset: u64, to: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        match self.slice(offset, to.len() as u64) {
            Ok(slice) => slice.read_async(to),
            Err(error) => Err(Failed { error, object: to }),
        }
    }
}

impl Slice<'_> {
    /// Starts to copy a buffer of the same size into the memory. [`Pending::wait`] returns the
    /// buffer; the memory stays mapped until then.
    ///
    /// The driver copies mapping by mapping. Over more than 1024 of them, this returns when 1024
    /// are left to copy.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write_async`]. [`Pending::wait`] reports what fails after the first
    /// mapping.
    pub fn write_async(&self, from: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        self.start(from, Direction::HostToDevice)
    }

    /// Starts to copy the memory into a buffer of the same size, as [`Slice::write_async`] does.
    ///
    /// # Errors
    ///
    /// Those of [`Slice::write_async`].
    pub fn read_async(&self, to: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        self.start(to, Direction::DeviceToHost)
    }

    /// Starts to copy other mapped memory of the same size into this, without a buffer: between
    /// mapped device memory and mapped host memory. The driver has no other asynchronous copies:
    /// others are done at once.
    ///
    /// # Errors
    ///
    /// Those of [`Slice::copy_from`].
    pub fn copy_from_async(&self, from: &Slice<'_>) -> Result<Pending<()>> {
        const OPERATION: &str = "begin a copy between mapped memory";
        self.same_size(OPERATION, from.size)?;
        from.check_copy(OPERATION)?;
        let (device, host) = if self.is_host() { (from, self) } else { (self, from) };
        let state = if self.size == 0 || device.is_host() || !host.is_host() || device.has_no_mapping() {
            self.copy_from(from)?;
            PendingState::Over
        } else {
            let next = |done: u64| self.to_border(done).min(from.to_border(done));
            let start = |done: u64, size: u64| {
                let (to, from) = (self.address + done, from.address + done);
                // SAFETY: the `Pending` keeps both slices mapped until the copy is over.
                unsafe { self.svm().async_memcpy(device.device.id, to, from, size) }
            };
            PendingState::Running(device.start_pieces(OPERATION, next, start)?)
        };
        let held = self.mappings().iter().chain(from.mappings()).cloned().collect();
        let kept = [self, from].into_iter().filter_map(|slice| slice.keeper.clone()).collect();
        Ok(Pending { buffer: Some(()), state, size: self.size, device: device.device.clone(), held, kept })
    }

    fn start(&self, mut buffer: Vec<u8>, direction: Direction) -> Result<Pending, Failed<Vec<u8>>> {
        let started = self.same_size("begin a copy", buffer.len() as u64).and_then(|()| {
            // SAFETY: the `Pending` keeps the buffer until the copy is over, or leaks it.
            unsafe { self.start_at(buffer.as_mut_ptr(), direction) }
        });
        match started {
            Ok(state) => Ok(self.pending(buffer, state)),
            Err(error) => Err(Failed { error, object: buffer }),
        }
    }

    /// Starts to copy bytes of this process, at an address, into all of the memory: for buffers
    /// that are not Rust's.
    ///
    /// # Safety
    ///
    /// The bytes must stay readable until the copy was waited for, and nothing in this process may
    /// write to them; what another process writes there may or may not be copied. If waiting
    /// returns an error without an object, the device may still use them: they must never be freed.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write_async`].
    pub unsafe fn write_async_from(&self, from: *const u8) -> Result<Pending<()>> {
        // SAFETY: the caller vouches for the bytes; nothing is written there.
        unsafe { self.start_at(from.cast_mut(), Direction::HostToDevice) }.map(|state| self.pending((), state))
    }

    /// Starts to copy all of the memory to an address of this process.
    ///
    /// # Safety
    ///
    /// As for [`Slice::write_async_from`], and the bytes must stay writable, with no other access.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write_async`].
    pub unsafe fn read_async_into(&self, to: *mut u8) -> Result<Pending<()>> {
        // SAFETY: the caller vouches for the bytes.
        unsafe { self.start_at(to, Direction::DeviceToHost) }.map(|state| self.pending((), state))
    }

    fn pending<T>(&self, buffer: T, state: PendingState) -> Pending<T> {
        let (device, held) = (self.device.clone(), self.mappings().to_vec());
        let kept = self.keeper.iter().cloned().collect();
        Pending { buffer: Some(buffer), state, size: self.size, device, held, kept }
    }

    /// Starts a copy between the memory and as many bytes at an address of this process. Host
    /// memory is copied at once, because the driver does not copy it asynchronously; so is named
    /// memory, which a running copy could not keep open.
    ///
    /// # Safety
    ///
    /// The bytes must be valid, for the direction of the copy, until it is over.
    unsafe fn start_at(&self, host: *mut u8, direction: Direction) -> Result<PendingState> {
        let to_device = direction == Direction::HostToDevice;
        if self.is_host() || self.size == 0 || self.has_no_mapping() {
            let (pointer, length) = if self.size == 0 { (NonNull::dangling().as_ptr(), 0) } else { (host, self.size) };
            if to_device {
                // SAFETY: the caller vouches for the bytes.
                self.write(unsafe { std::slice::from_raw_parts(pointer, length as usize) })?
            } else {
                // SAFETY: as above.
                self.read(unsafe { std::slice::from_raw_parts_mut(pointer, length as usize) })?
            }
            return Ok(PendingState::Over);
        }
        let host = host.expose_provenance() as u64;
        let (destination, source) = if to_device { (self.address, host) } else { (host, self.address) };
        let device = self.device.id;
        let start = |done: u64, size: u64| {
            // SAFETY: the caller vouches for the bytes; the `Pending` keeps the mappings until the
            // copy is over.
            unsafe { self.svm().async_memcpy(device, destination + done, source + done, size) }
        };
        self.start_pieces("begin a copy", |done| self.to_border(done), start).map(PendingState::Running)
    }

    /// Starts a copy of all of the slice, piece by piece: `next` returns the size of the piece at
    /// an offset, and `start` starts it. Fails if the first piece fails; the tasks keep a later
    /// failure.
    fn start_pieces(
        &self,
        operation: &'static str,
        next: impl Fn(u64) -> u64,
        start: impl Fn(u64, u64) -> KernelResult<i32>,
    ) -> Result<Tasks> {
        let (mut tasks, mut done) = (Tasks::default(), 0);
        while done < self.size && tasks.failure.is_none() {
            let size = next(done);
            match start(done, size).map_err(|refused| self.failed(refused, operation, self.address + done, size)) {
                Ok(task) => tasks.push(task, size, &self.device),
                Err(error) if done == 0 => return Err(error),
                Err(error) => tasks.fail(error, false),
            }
            done += size;
        }
        Ok(tasks)
    }
}

impl<T> Pending<T> {
    /// Waits until the copy is done, and returns the buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the copy failed; the buffer comes back, unless the device may still be
    /// using it.
    pub fn wait(mut self) -> Result<T, Failed<Option<T>>> {
        self.take_result()
    }

    /// The result, once the copy is over; `None` while it is running. The first call starts a
    /// thread that waits for it; if none can be started, this waits.
    ///
    /// # Errors
    ///
    /// Those of [`Pending::wait`]; [`Error::Invalid`] if the result was returned before.
    pub fn try_wait(&mut self) -> Option<Result<T, Failed<Option<T>>>> {
        if self.is_running(None) { None } else { Some(self.take_result()) }
    }

    /// True while the copy may be running. Then `waker` is called when it is over.
    fn is_running(&mut self, waker: Option<&Waker>) -> bool {
        if self.device.session.in_child() {
            return false;
        }
        if matches!(self.state, PendingState::Running(_)) && !self.start_waiter() {
            return false;
        }
        let PendingState::Waited(waiter) = &self.state else { return false };
        // Wakers are the caller's code: cloned before the lock, and dropped after it.
        let waker = waker.cloned();
        let mut result = lock(&waiter.result);
        let is_running = !result.is_over;
        let unused = if is_running && waker.is_some() { std::mem::replace(&mut result.waker, waker) } else { waker };
        drop(result);
        drop(unused);
        is_running
    }

    /// Starts a thread that waits for the tasks; false if none can be started.
    fn start_waiter(&mut self) -> bool {
        let waiter = Arc::<Waiter>::default();
        let (device, results) = (self.device.clone(), waiter.clone());
        // The tasks are handed over once the thread exists.
        let (sender, tasks) = mpsc::sync_channel::<Tasks>(1);
        let wait = move || {
            let Ok(tasks) = tasks.recv() else { return };
            let failure = tasks.wait(&device);
            // The caller may close the device once it sees the result.
            drop(device);
            let mut result = lock(&results.result);
            result.failure = failure;
            result.is_over = true;
            let waker = result.waker.take();
            drop(result);
            results.arrived.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        };
        if signals::spawn("ascend-vmm-copy", wait).is_err() {
            return false;
        }
        if let PendingState::Running(tasks) = std::mem::replace(&mut self.state, PendingState::Waited(waiter)) {
            // Receiving is the first thing that the thread does.
            let _ = sender.send(tasks);
        }
        true
    }

    fn take_result(&mut self) -> Result<T, Failed<Option<T>>> {
        let finished = self.device.session.check_process().and_then(|()| self.finish());
        match (finished, self.buffer.take()) {
            (Ok(()), Some(buffer)) => Ok(buffer),
            (Ok(()), None) => Err(Failed {
                error: Invalid::because(
                    "wait for a copy",
                    "its result was returned before",
                    "The result can be taken only once.",
                ),
                object: None,
            }),
            (Err(error), object) => Err(Failed { error, object }),
        }
    }

    /// Waits for the tasks. After that nothing is held any more.
    fn finish(&mut self) -> Result<()> {
        let failure = match std::mem::replace(&mut self.state, PendingState::Over) {
            PendingState::Running(tasks) => tasks.wait(&self.device),
            PendingState::Waited(waiter) => {
                let mut result = lock(&waiter.result);
                while !result.is_over {
                    result = waiter.arrived.wait(result).unwrap_or_else(PoisonError::into_inner);
                }
                result.failure.take()
            }
            PendingState::Over => None,
        };
        self.held.clear();
        let kept = std::mem::take(&mut self.kept);
        match failure {
            None => Ok(()),
            Some(failure) => {
                if failure.in_use {
                    // The device may still be using them.
                    std::mem::forget((self.buffer.take(), kept));
                }
                Err(failure.error)
            }
        }
    }
}

impl<T: Unpin> Future for Pending<T> {
    type Output = Result<T, Failed<Option<T>>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let pending = self.get_mut();
        if pending.is_running(Some(context.waker())) { Poll::Pending } else { Poll::Ready(pending.take_result()) }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if self.device.session.in_child() {
            // The parent's copy.
            return;
        }
        if let Err(error) = self.finish() {
            trace::error(error, "a copy that was dropped without waiting failed");
        }
    }
}
