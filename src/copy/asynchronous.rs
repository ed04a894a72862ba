//! Copies that run while the program goes on.
//!
//! ASYNC_MEMCPY pins the host's pages and returns the number of a task; MEMCPY_RESULT_REFRESH waits for it, and must be called exactly
//! once per task, or the kernel keeps the mapping busy for ever. A [`Pending`] owns its buffer and a claim on the mapping, so it is
//! sound even when it is forgotten: then both are simply never given back. If the device does not finish in time, its DMA may still be
//! running: then the buffer is given up rather than freed, and the kernel, which keeps its locks in that case, refuses to unmap the
//! memory until the session is closed.

use super::Slice;
use crate::error::{Errno, Error, Failed, Result, bytes};
use crate::mapping::{Hold, Mapping};
use crate::session::call::{ASYNC_MEMCPY, REFRESH};
use ascend_ioctl::svm::{ASYNC_DONE, AsyncMemcpy};
use std::mem::ManuallyDrop;

/// A copy that is running. Wait for it; dropping it waits too, and logs what goes wrong.
#[derive(Debug)]
#[must_use = "dropping it waits for the copy at once"]
pub struct Pending {
    /// Given up, not freed, if the device may still be using it.
    buffer: ManuallyDrop<Vec<u8>>,
    hold: Hold,
    task: Task,
}

/// What the kernel has of a copy.
#[derive(Debug, Clone, Copy)]
enum Task {
    /// A task of this number.
    Running(i32),
    /// Nothing.
    Over,
    /// Nothing that could be asked for, but the device may still be at it.
    Lost,
}

impl Mapping {
    /// Begins to copy a buffer into the memory; the buffer comes back when the copy is waited for.
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn write_async(&self, offset: u64, from: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        let slice = match self.slice(offset, from.len() as u64) {
            Ok(slice) => slice,
            Err(error) => return Err(Failed { error, object: from }),
        };
        let source = from.as_ptr().expose_provenance() as u64;
        let copy = AsyncMemcpy { destination: slice.address(), source, size: slice.size(), ..Default::default() };
        begin(self, &slice, from, copy, |slice, buffer| slice.write(buffer))
    }

    /// Begins to copy memory into a buffer, all of it; it comes back when the copy is waited for.
    pub fn read_async(&self, offset: u64, mut to: Vec<u8>) -> Result<Pending, Failed<Vec<u8>>> {
        let slice = match self.slice(offset, to.len() as u64) {
            Ok(slice) => slice,
            Err(error) => return Err(Failed { error, object: to }),
        };
        let destination = to.as_mut_ptr().expose_provenance() as u64;
        let copy = AsyncMemcpy { destination, source: slice.address(), size: slice.size(), ..Default::default() };
        begin(self, &slice, to, copy, |slice, buffer| slice.read(buffer))
    }
}

fn begin(
    mapping: &Mapping,
    slice: &Slice<'_>,
    mut buffer: Vec<u8>,
    copy: AsyncMemcpy,
    at_once: impl FnOnce(&Slice<'_>, &mut [u8]) -> Result<()>,
) -> Result<Pending, Failed<Vec<u8>>> {
    let svm = &mapping.inner.session().svm;
    if let Err(error) = svm.check_process() {
        return Err(Failed { error, object: buffer });
    }
    let task = if slice.is_host() || slice.size() == 0 {
        // The driver copies between host and device only.
        if let Err(error) = at_once(slice, &mut buffer) {
            return Err(Failed { error, object: buffer });
        }
        Task::Over
    } else {
        match svm.call(ASYNC_MEMCPY, mapping.inner.block.device.id, copy.size, &copy) {
            Ok(answer) => Task::Running(answer.task),
            Err(errno) => {
                return Err(Failed { error: slice.failed("begin a copy", ASYNC_MEMCPY, errno), object: buffer });
            }
        }
    };
    Ok(Pending { buffer: ManuallyDrop::new(buffer), hold: mapping.inner.hold(), task })
}

/// How a copy ended.
enum End {
    Done,
    /// Over, but not done.
    Failed(Error),
    /// Perhaps not over.
    Unknown(Error),
}

impl Pending {
    /// Waits until the copy is done, and gives the buffer back. Also with an error, unless the device may still be writing to it.
    pub fn wait(mut self) -> Result<Vec<u8>, Failed<Option<Vec<u8>>>> {
        if let Err(error) = self.hold.mapped().session().svm.check_process() {
            return Err(Failed { error, object: None });
        }
        let error = match self.finish() {
            End::Done => None,
            End::Failed(error) => Some(error),
            End::Unknown(error) => return Err(Failed { error, object: None }),
        };
        let buffer = std::mem::take(&mut *self.buffer);
        match error {
            None => Ok(buffer),
            Some(error) => Err(Failed { error, object: Some(buffer) }),
        }
    }

    fn finish(&mut self) -> End {
        let Task::Running(task) = self.task else { return End::Done };
        let mapped = self.hold.mapped();
        let refresh = AsyncMemcpy { task, ..Default::default() };
        let answer = mapped.session().svm.call(REFRESH, mapped.block.device.id, self.buffer.len() as u64, &refresh);
        let arguments = || format!("task {task}, size {}", bytes(self.buffer.len() as u64));
        // The kernel has taken the task out, whatever it answers: never ask twice.
        match answer {
            Ok(answer) if answer.state == ASYNC_DONE => {
                self.task = Task::Over;
                End::Done
            }
            Ok(_) => {
                let error = mapped.block.device.failed("copy", REFRESH, Errno::EIO, arguments());
                self.task = Task::Over;
                End::Failed(error)
            }
            Err(errno) => {
                let error = mapped.block.device.failed("wait for a copy", REFRESH, errno, arguments());
                self.task = Task::Lost;
                End::Unknown(error)
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Task::Running(_) = self.task {
            if self.hold.mapped().session().svm.guard.in_child() {
                // The parent's copy.
                return;
            }
            match self.finish() {
                End::Done => {}
                End::Failed(error) => tracing::error!(%error, "a copy that nobody waited for has failed"),
                End::Unknown(error) => tracing::error!(%error, "a copy that nobody waited for has an unknown end"),
            }
        }
        if let Task::Lost = self.task {
            tracing::error!("the device may still use a copy's buffer, which is given up");
            return;
        }
        // SAFETY: this is drop, so it is not used again; the copy is over, so the device does not use it either.
        unsafe { ManuallyDrop::drop(&mut self.buffer) };
    }
}
