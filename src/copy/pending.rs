//! Copies that run while the program goes on.
//!
//! ASYNC_MEMCPY pins the host's pages and returns the number of a task; MEMCPY_RESULT_REFRESH waits
//! for it, and must be called exactly once per task, or the kernel keeps the mapping busy for ever.
//! A [`Pending`] owns its buffer and a claim on the mappings, so it is sound even when it is
//! forgotten: then all simply stays. If the device does not finish in time, its DMA may still be
//! running: then the buffer is leaked rather than freed, and the kernel, which keeps its locks in
//! that case, refuses to unmap the memory until the session is closed.
//!
//! One task stays inside one mapping of each side. Of a longer one older drivers release the first
//! mapping only, and the others can be unmapped no more; and no driver holds the second mapping of
//! a task that is not longer than its first one (`devmm_vmmas_occupy_inc`). So a copy over several
//! mappings is several tasks. If one of them cannot be begun, those before it run: the [`Pending`]
//! waits for them, and then reports the error.
//!
//! The kernel can wait for a task, but not say whether it is over. So a [`Pending`] that is asked
//! that, or polled as a future, starts a thread that waits.

use super::{Keeper, Slice};
use crate::bytes::Bytes;
use crate::device::DeviceInner;
use crate::error::{Errno, Error, Failed, Invalid, Refused, Result, SystemCall};
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
/// It is also a future, for any runtime: polled the first time, it starts a thread that waits for
/// the copy.
///
/// ```standalone_crate
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
    /// `None` once it is the caller's again, or if the device may still be using it: then it is
    /// leaked.
    buffer: Option<T>,
    task: Task,
    size: u64,
    device: Arc<Live<DeviceInner>>,
    /// What is read and written. Empty where nothing is copied.
    held: Vec<Arc<Live<Mapped>>>,
    /// What must not be freed before the copy is over.
    kept: Vec<Keeper>,
}

/// Most tasks of one copy that run at the same time. The driver's table has 65535 places for all of
/// a process.
const AHEAD: usize = 1024;

/// The kernel's work for a copy.
enum Task {
    /// Not waited for yet.
    Running(Tasks),
    /// A thread waits for it.
    Waited(Arc<Waiter>),
    /// It was waited for, or nothing had to be copied. The result was not taken yet.
    Over,
    /// The result was taken.
    Taken,
}

/// A task of the kernel's, for a piece of a copy.
#[derive(Clone, Copy)]
struct Piece {
    task: i32,
    size: u64,
}

/// The tasks of a copy that were not waited for, and what has failed so far.
struct Tasks {
    first: Option<Piece>,
    others: VecDeque<Piece>,
    failure: Option<Box<Failure>>,
}

/// Why a copy was not done.
struct Failure {
    error: Error,
    /// The device may still be using the buffer.
    in_use: bool,
}

/// Where a thread that waits for a copy puts the answer.
#[derive(Default)]
struct Waiter {
    answer: Mutex<(Option<Answer>, Option<Waker>)>,
    arrived: Condvar,
}

/// Whether the copy was done.
type Answer = Result<(), Box<Failure>>;

impl Tasks {
    fn new(first: Piece) -> Tasks {
        Tasks { first: Some(first), others: VecDeque::new(), failure: None }
    }

    /// Adds a task. If there are very many, waits for the oldest first.
    fn push(&mut self, piece: Piece, device: &DeviceInner) {
        self.others.push_back(piece);
        if self.others.len() >= AHEAD {
            self.wait_first(device);
        }
    }

    /// Remembers the first failure, and whether the device may be using the buffer after any.
    fn fail(&mut self, error: Error, in_use: bool) {
        match &mut self.failure {
            Some(failure) => failure.in_use |= in_use,
            None => self.failure = Some(Box::new(Failure { error, in_use })),
        }
    }

    /// Waits for the oldest task. The kernel takes it out, whatever it answers: it is never waited
    /// for twice.
    fn wait_first(&mut self, device: &DeviceInner) {
        let Some(Piece { task, size }) = self.first.take() else { return };
        self.first = self.others.pop_front();
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
                    self.first = None;
                    self.others.clear();
                }
                self.fail(failed(refused, "wait for a copy"), true);
            }
        }
    }

    /// Waits for all tasks.
    fn wait(mut self, device: &DeviceInner) -> Answer {
        while self.first.is_some() {
            self.wait_first(device);
        }
        self.failure.map_or(Ok(()), Err)
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.task {
            Task::Running(_) | Task::Waited(_) => "running",
            Task::Over | Task::Taken => "over",
        };
        write!(f, "Pending({}, {state})", Bytes(self.size))
    }
}

impl Mapping {
    /// Begins to copy a buffer into the memory; the buffer comes back when the copy is waited for.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside of the mapping; [`Error::Refused`] if the kernel
    /// does not begin the copy. The buffer comes back.
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn write_async(&self, offset: u64, from: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        match self.slice(offset, from.len() as u64) {
            Ok(slice) => slice.write_async(from),
            Err(error) => Err(Failed { error, object: from }),
        }
    }

    /// Begins to copy memory into a buffer, all of it; it comes back when the copy is waited for.
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
    /// Begins to copy a buffer of the same size into the memory; the buffer comes back when the
    /// copy is waited for. What it covers stays mapped until then.
    ///
    /// The driver copies mapping by mapping. Over more than 1024 of them, this returns when 1024
    /// are left to copy.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write_async`]; what fails after the first mapping is an error of
    /// waiting.
    pub fn write_async(&self, from: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        self.begin(from, true)
    }

    /// Begins to copy the memory into a buffer of the same size, as [`Slice::write_async`] does.
    ///
    /// # Errors
    ///
    /// Those of [`Slice::write_async`].
    pub fn read_async(&self, to: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        self.begin(to, false)
    }

    /// Begins to copy other mapped memory of the same size into this, without a buffer: between a
    /// device and host memory of the driver's. Other copies are done at once, because the driver
    /// knows no others that run by themselves.
    ///
    /// # Errors
    ///
    /// Those of [`Slice::copy_from`].
    pub fn copy_from_async(&self, from: &Slice<'_>) -> Result<Pending<()>> {
        const OPERATION: &str = "begin a copy between mapped memory";
        self.same_size(OPERATION, from.size)?;
        from.check_copy(OPERATION)?;
        let (device, host) = if self.is_host() { (from, self) } else { (self, from) };
        let task = if self.size == 0 || device.is_host() || !host.is_host() || device.is_named() {
            self.copy_from(from)?;
            Task::Over
        } else {
            let next = |done: u64| self.to_border(done).min(from.to_border(done));
            let begin = |done: u64, size: u64| {
                let (to, from) = (self.address + done, from.address + done);
                // SAFETY: both slices stay mapped, held by the `Pending` until the copy is over, or
                // for ever.
                unsafe { self.svm().async_memcpy(device.device().id, to, from, size) }
            };
            Task::Running(device.begin_pieces(OPERATION, next, begin)?)
        };
        let held = self.mappings().iter().chain(from.mappings()).cloned().collect();
        let kept = [self, from].into_iter().filter_map(|slice| slice.keeper.clone()).collect();
        Ok(Pending { buffer: Some(()), task, size: self.size, device: device.device().clone(), held, kept })
    }

    /// Begins a copy. What the driver does not copy asynchronously, because it is host memory or
    /// nothing, is copied at once; so is named memory, which a running copy could not keep open.
    fn begin(&self, mut buffer: Vec<u8>, to_device: bool) -> Result<Pending, Failed<Vec<u8>>> {
        let begun = self.same_size("begin a copy", buffer.len() as u64).and_then(|()| {
            // SAFETY: the buffer lives in the `Pending` until the copy is over, or for ever.
            unsafe { self.begin_task(buffer.as_mut_ptr(), to_device) }
        });
        match begun {
            Ok(task) => Ok(self.pending(buffer, task)),
            Err(error) => Err(Failed { error, object: buffer }),
        }
    }

    /// Begins to copy the bytes at an address of this process into the memory, as many as it has:
    /// for buffers that are not Rust's.
    ///
    /// # Safety
    ///
    /// The bytes must stay readable until the copy was waited for, and nothing in this process may
    /// write to them; what another process writes there may or may not be copied.
    /// If waiting returns an error without an object, the device may use them later still: they
    /// must stay for ever.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write_async`].
    pub unsafe fn write_async_from(&self, from: *const u8) -> Result<Pending<()>> {
        // SAFETY: the caller's; nothing is written there.
        unsafe { self.begin_task(from.cast_mut(), true) }.map(|task| self.pending((), task))
    }

    /// Begins to copy the memory, all of it, to an address of this process.
    ///
    /// # Safety
    ///
    /// As for [`Slice::write_async_from`], and the bytes must stay writable, with no other access.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write_async`].
    pub unsafe fn read_async_into(&self, to: *mut u8) -> Result<Pending<()>> {
        // SAFETY: the caller's.
        unsafe { self.begin_task(to, false) }.map(|task| self.pending((), task))
    }

    fn pending<T>(&self, buffer: T, task: Task) -> Pending<T> {
        let (device, held) = (self.device().clone(), self.mappings().to_vec());
        let kept = self.keeper.iter().cloned().collect();
        Pending { buffer: Some(buffer), task, size: self.size, device, held, kept }
    }

    /// Begins a copy between the memory and as many bytes at an address of this process.
    ///
    /// # Safety
    ///
    /// The bytes must be there, for the direction of the copy, until it is over, or for ever.
    unsafe fn begin_task(&self, host: *mut u8, to_device: bool) -> Result<Task> {
        if self.is_host() || self.size == 0 || self.is_named() {
            let (pointer, length) = if self.size == 0 { (NonNull::dangling().as_ptr(), 0) } else { (host, self.size) };
            if to_device {
                // SAFETY: the caller vouches for the bytes.
                self.write(unsafe { std::slice::from_raw_parts(pointer, length as usize) })?
            } else {
                // SAFETY: as above.
                self.read(unsafe { std::slice::from_raw_parts_mut(pointer, length as usize) })?
            }
            return Ok(Task::Over);
        }
        let host = host.expose_provenance() as u64;
        let (destination, source) = if to_device { (self.address, host) } else { (host, self.address) };
        let device = self.device().id;
        let begin = |done: u64, size: u64| {
            // SAFETY: the caller vouches for the bytes; the mappings live in the `Pending` until
            // the copy is over, or for ever.
            unsafe { self.svm().async_memcpy(device, destination + done, source + done, size) }
        };
        self.begin_pieces("begin a copy", |done| self.to_border(done), begin).map(Task::Running)
    }

    /// Begins a copy of all of the slice, piece by piece: `next` says how long the piece at an
    /// offset is, and `begin` begins it. An error if nothing was begun; what fails after that is
    /// known to the tasks.
    fn begin_pieces(
        &self,
        operation: &'static str,
        next: impl Fn(u64) -> u64,
        begin: impl Fn(u64, u64) -> Result<i32, Box<Refused>>,
    ) -> Result<Tasks> {
        let piece = |done: u64| {
            let size = next(done);
            match begin(done, size) {
                Ok(task) => Ok(Piece { task, size }),
                Err(refused) => Err(self.failed(refused, operation, self.address + done, size)),
            }
        };
        let first = piece(0)?;
        let mut done = first.size;
        let mut tasks = Tasks::new(first);
        while done < self.size && tasks.failure.is_none() {
            match piece(done) {
                Ok(piece) => {
                    done += piece.size;
                    tasks.push(piece, self.device());
                }
                Err(error) => tasks.fail(error, false),
            }
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

    /// Whether the copy may still be running. If it is, the waker is called when it is over.
    fn is_running(&mut self, waker: Option<&Waker>) -> bool {
        if self.device.session.in_child() {
            return false;
        }
        if matches!(self.task, Task::Running(_)) && !self.start_waiter() {
            return false;
        }
        let Task::Waited(waiter) = &self.task else { return false };
        // Wakers are the caller's code: cloned before the lock, and dropped after it.
        let waker = waker.cloned();
        let mut answer = lock(&waiter.answer);
        let running = answer.0.is_none();
        let unused = if running && waker.is_some() { std::mem::replace(&mut answer.1, waker) } else { waker };
        drop(answer);
        drop(unused);
        running
    }

    /// Lets a thread wait for the tasks; false if none can be started.
    fn start_waiter(&mut self) -> bool {
        let waiter = Arc::<Waiter>::default();
        let (device, answers) = (self.device.clone(), waiter.clone());
        // Handed over when the thread is there.
        let (sender, tasks) = mpsc::sync_channel::<Tasks>(1);
        let wait = move || {
            let Ok(tasks) = tasks.recv() else { return };
            let answer = tasks.wait(&device);
            // The caller may close the device once it sees the answer.
            drop(device);
            let mut place = lock(&answers.answer);
            place.0 = Some(answer);
            let waker = place.1.take();
            drop(place);
            answers.arrived.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        };
        if signals::spawn("ascend-vmm-copy", wait).is_err() {
            return false;
        }
        if let Task::Running(tasks) = std::mem::replace(&mut self.task, Task::Waited(waiter)) {
            // The thread takes it: it does nothing else before.
            let _ = sender.send(tasks);
        }
        true
    }

    fn take_result(&mut self) -> Result<T, Failed<Option<T>>> {
        let finished = self.device.session.check_process().and_then(|()| self.finish());
        match (finished, self.buffer.take()) {
            (Ok(()), Some(buffer)) => Ok(buffer),
            (Ok(()), None) => Err(Failed {
                error: Invalid::because("wait for a copy", "its result was returned before", "Ask once."),
                object: None,
            }),
            (Err(error), object) => Err(Failed { error, object }),
        }
    }

    /// Waits for the tasks. After that nothing is held any more.
    fn finish(&mut self) -> Result<()> {
        let answer = match std::mem::replace(&mut self.task, Task::Taken) {
            Task::Running(tasks) => tasks.wait(&self.device),
            Task::Waited(waiter) => {
                let mut place = lock(&waiter.answer);
                loop {
                    match place.0.take() {
                        Some(answer) => break answer,
                        None => place = waiter.arrived.wait(place).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            }
            Task::Over | Task::Taken => Ok(()),
        };
        self.held.clear();
        let done = answer.map_err(|failure| {
            // The device may still be using them.
            if failure.in_use {
                std::mem::forget(self.buffer.take());
                std::mem::forget(std::mem::take(&mut self.kept));
            }
            failure.error
        });
        self.kept.clear();
        done
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
            trace::error(error, "a copy that was dropped, not waited for, has failed");
        }
    }
}
