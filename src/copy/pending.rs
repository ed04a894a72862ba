//! Copies that run while the program goes on.
//!
//! ASYNC_MEMCPY pins the host's pages and returns the number of a task; MEMCPY_RESULT_REFRESH waits
//! for it, and must be called exactly once per task, or the kernel keeps the mapping busy for ever.
//! A [`Pending`] owns its buffer and a claim on the mapping, so it is sound even when it is
//! forgotten: then both simply stay. If the device does not finish in time, its DMA may still be
//! running: then the buffer is leaked rather than freed, and the kernel, which keeps its locks in
//! that case, refuses to unmap the memory until the session is closed.

use super::Slice;
use crate::error::{Errno, Failed, Refused, Result, SystemCall, bytes};
use crate::mapping::{Mapped, Mapping};
use crate::session::undo::Live;
use crate::trace;
use ascend_ioctl::svm::Op;
use std::fmt;
use std::sync::Arc;

/// A copy that is running. Wait for it; dropping it waits too, and logs what goes wrong.
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
pub struct Pending {
    /// `None` once it is the caller's again, or if the device may still be using it: then it is
    /// leaked.
    buffer: Option<Vec<u8>>,
    mapped: Arc<Live<Mapped>>,
    /// The kernel's task; `None` once it was waited for, and where nothing had to be copied.
    task: Option<i32>,
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("task", &self.task).finish_non_exhaustive()
    }
}

impl Mapping {
    /// Begins to copy a buffer into the memory; the buffer comes back when the copy is waited for.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for what lies outside of the mapping;
    /// [`Error::Refused`](crate::Error::Refused) if the kernel does not begin the copy. The buffer
    /// comes back.
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn write_async(&self, offset: u64, from: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        self.begin(offset, from, true)
    }

    /// Begins to copy memory into a buffer, all of it; it comes back when the copy is waited for.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write_async`].
    pub fn read_async(&self, offset: u64, to: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        self.begin(offset, to, false)
    }

    fn begin(&self, offset: u64, mut buffer: Vec<u8>, to_device: bool) -> Result<Pending, Failed<Vec<u8>>> {
        let begun = self.slice(offset, buffer.len() as u64).and_then(|slice| slice.begin(&mut buffer, to_device));
        match begun {
            Ok(task) => Ok(Pending { buffer: Some(buffer), mapped: self.inner.clone(), task }),
            Err(error) => Err(Failed { error, object: buffer }),
        }
    }
}

impl Slice<'_> {
    /// Begins a copy, and returns the number of its task. What the driver does not copy
    /// asynchronously, because it is host memory or nothing, is copied at once.
    fn begin(&self, buffer: &mut [u8], to_device: bool) -> Result<Option<i32>> {
        self.check_copy("begin a copy")?;
        let svm = self.svm();
        if self.is_host() || self.size == 0 {
            if to_device {
                self.write(buffer)?
            } else {
                self.read(buffer)?
            }
            return Ok(None);
        }
        let host = buffer.as_mut_ptr().expose_provenance() as u64;
        let (destination, source) = if to_device { (self.address, host) } else { (host, self.address) };
        let device = self.device().id;
        // SAFETY: the mapping and the buffer live in the `Pending` until the copy is over, or for
        // ever.
        let task = unsafe { svm.async_memcpy(device, destination, source, self.size) };
        task.map(Some).map_err(|refused| self.failed(refused, "begin a copy"))
    }
}

impl Pending {
    /// Waits until the copy is done, and returns the buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused) if the copy failed; the buffer comes back, unless
    /// the device may still be using it.
    pub fn wait(mut self) -> Result<Vec<u8>, Failed<Option<Vec<u8>>>> {
        let waited = self.mapped.session().svm.check_process().and_then(|()| self.finish());
        match (waited, self.buffer.take()) {
            (Ok(()), buffer) => Ok(buffer.unwrap_or_default()),
            (Err(error), object) => Err(Failed { error, object }),
        }
    }

    fn finish(&mut self) -> Result<()> {
        // The kernel takes the task out, whatever it answers: it is never waited for twice.
        let Some(task) = self.task.take() else { return Ok(()) };
        let (device, size) = (&self.mapped.block.device, self.buffer.as_ref().map_or(0, Vec::len) as u64);
        let arguments = || format!("task {task}, size {}", bytes(size));
        match self.mapped.session().svm.memcpy_result_refresh(device.id, task, size) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let refused = Refused::new(SystemCall::Svm(Op::MemcpyResultRefresh), Errno::EIO);
                Err(device.failed(refused, "copy", arguments()))
            }
            Err(refused) => {
                // The device may still be using it.
                std::mem::forget(self.buffer.take());
                Err(device.failed(refused, "wait for a copy", arguments()))
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.mapped.session().svm.guard.in_child() {
            // The parent's copy.
            return;
        }
        if let Err(error) = self.finish() {
            trace::error(error, "a copy that was dropped, not waited for, has failed");
        }
    }
}
