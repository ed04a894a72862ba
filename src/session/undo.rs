//! One way to undo.
//!
//! What the kernel holds for us is undone in this order, whatever order it is dropped in, because
//! each thing keeps alive what it stands on:
//!
//! 0. a name of mapped memory (IPC_MEM_DESTROY), which keeps its mapping; and memory that was
//!    opened by its name (IPC_MEM_CLOSE, FREE_PAGES, and its heap), which keeps its device;
//! 1. a mapping (MEM_UNMAP), which keeps its memory and its reservation;
//! 2. a reservation (FREE_PAGES), which keeps the session;
//! 3. physical memory (MEM_RELEASE), which keeps its device;
//! 4. a device (PREPARE_CLOSE_DEVICE, CLOSE_DEVICE, then its device process), which keeps the
//!    session;
//! 5. the session: heaps, address segments, CLOSE, close(2), and the DEVMNG file last.
//!
//! An object of these kinds is a [`Live`]: undone once, by an explicit call ([`undo`]) or when
//! its last reference is dropped. An explicit call that the kernel refuses returns the object. What
//! cannot be undone in drop is kept as a [`Left`] of plain numbers and tried again, in the same
//! order, when a device or the session is closed.

use super::SessionInner;
use crate::device::OpenDevice;
use crate::driver::svm::{Handle, NAME};
use crate::error::{Error, Refused, Result};
use crate::share::{ImportKey, OpenedAt};
use crate::slots::lock;
use crate::trace::{self, quiet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Something that the kernel holds for us until it is undone.
pub(crate) trait Undo: Sized {
    /// What undoing it is, as a verb phrase.
    const OPERATION: &'static str;

    /// The session that it belongs to.
    fn session(&self) -> &SessionInner;

    /// Undoes it. After an error the kernel still has it, and it can be tried again.
    fn undo(&mut self) -> Result<()>;

    /// Takes care of what [`Undo::undo`] refused when there is no object any more.
    fn abandon(&mut self, error: Error);

    /// Says who else uses it, and what to do about that.
    fn users(&self, others: usize) -> String;

    /// Enters an object into the tables again that could not be undone.
    fn restore(_: &Arc<Live<Self>>) {}

    /// Lets go of what is the parent's, in a child of fork.
    fn forget(&mut self) {}

    /// Whether other threads wait for it to be undone: then nothing is reported before it is.
    #[inline]
    fn is_awaited(&self) -> bool {
        false
    }
}

/// Something that is undone when it is dropped, unless it was before.
#[derive(Debug)]
pub(crate) struct Live<T: Undo> {
    over: bool,
    object: T,
}

impl<T: Undo> Live<T> {
    #[inline]
    pub(crate) fn new(object: T) -> Live<T> {
        Live { over: false, object }
    }

    /// Undoes it, and drops it whatever came of that.
    pub(crate) fn end(mut self) -> Result<()> {
        self.over = true;
        self.object.undo()
    }
}

impl<T: Undo> Deref for Live<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.object
    }
}

impl<T: Undo> DerefMut for Live<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.object
    }
}

impl<T: Undo> Drop for Live<T> {
    #[inline]
    fn drop(&mut self) {
        if self.over {
            return;
        }
        if self.object.session().in_child() {
            return self.object.forget();
        }
        let _quiet = self.object.is_awaited().then(quiet);
        if let Err(error) = self.object.undo() {
            self.object.abandon(error);
        }
    }
}

/// Undoes an object by its last reference. Otherwise, and if the kernel refuses it, the object
/// comes back.
#[inline]
pub(crate) fn undo<T: Undo>(mut object: Arc<Live<T>>) -> Result<(), (Error, Arc<Live<T>>)> {
    if let Err(error) = object.session().check_process() {
        return Err((error, object));
    }
    let _quiet = object.is_awaited().then(quiet);
    // In place, if no table refers to the object.
    if let Some(live) = Arc::get_mut(&mut object) {
        return match live.object.undo() {
            Ok(()) => {
                live.over = true;
                Ok(())
            }
            Err(error) => Err((error, object)),
        };
    }
    match Arc::try_unwrap(object) {
        Ok(mut live) => match live.object.undo() {
            Ok(()) => {
                live.over = true;
                Ok(())
            }
            Err(error) => {
                let object = Arc::new(live);
                T::restore(&object);
                Err((error, object))
            }
        },
        Err(object) => Err((in_use(&object), object)),
    }
}

/// The error about an object that others use.
pub(crate) fn in_use<T: Undo>(object: &Arc<Live<T>>) -> Error {
    let others = Arc::strong_count(object).saturating_sub(1);
    Error::InUse { operation: T::OPERATION, users: object.users(others) }
}

/// What a dropped object could not undo: plain numbers, so that nothing is kept alive by it. Only a
/// device brings its process along, which must not end before the device is closed.
#[derive(Debug)]
pub(crate) enum Left {
    Name { name: [u8; NAME] },
    Opened(OpenedAt),
    Mapping { address: u64, size: u64 },
    Reservation { address: u64, size: u64 },
    Memory { handle: Handle, size: u64 },
    Device(OpenDevice),
}

impl SessionInner {
    /// MEM_UNMAP, and the table of mappings.
    #[inline]
    pub(crate) fn unmap(&self, address: u64, size: u64) -> Result<(), Box<Refused>> {
        self.svm.mem_unmap(address, size)?;
        self.mappings.lock().remove(address);
        Ok(())
    }

    /// FREE_PAGES, and the arena.
    #[inline]
    pub(crate) fn free(&self, address: u64, size: u64) -> Result<(), Box<Refused>> {
        self.svm.free_pages(address, size)?;
        lock(&self.arena).free(address);
        self.counts.reserved.fetch_sub(size, Ordering::Relaxed);
        Ok(())
    }

    /// MEM_RELEASE, and the table of imports.
    #[inline]
    pub(crate) fn release(&self, handle: Handle, size: u64, import: Option<ImportKey>) -> Result<(), Box<Refused>> {
        self.svm.mem_release(handle, size)?;
        self.counts.physical.fetch_sub(size, Ordering::Relaxed);
        if let Some(key) = import {
            self.sharing.imports.vacate(&key);
        }
        Ok(())
    }

    /// Keeps what a dropped object could not undo.
    pub(crate) fn keep(&self, left: Left, error: Error) {
        lock(&self.left).push(left);
        trace::error(error, "not undone now; it is tried again when the device or the session is closed");
    }

    /// Tries again to undo what is left, in the order of this page.
    pub(crate) fn retry(&self) {
        let _quiet = quiet();
        let mut all = lock(&self.left);
        all.sort_by_key(|left| match left {
            Left::Name { .. } | Left::Opened(_) => 0,
            Left::Mapping { .. } => 1,
            Left::Reservation { .. } => 2,
            Left::Memory { .. } => 3,
            Left::Device(_) => 4,
        });
        let mut closed = Vec::new();
        all.retain_mut(|left| {
            let undone = match left {
                Left::Name { name } => self.svm.ipc_mem_destroy(*name),
                Left::Opened(opened) => self.close_named(opened),
                Left::Mapping { address, size } => self.unmap(*address, *size),
                Left::Reservation { address, size } => self.free(*address, *size),
                Left::Memory { handle, size } => self.release(*handle, *size, None),
                Left::Device(device) => device.close(&self.svm).inspect(|()| closed.push(device.id)),
            };
            undone.is_err()
        });
        all.retain(|left| !self.is_gone(left, |device| closed.contains(&device)));
    }

    /// Whether something is memory of a device that was closed, which released it.
    fn is_gone(&self, left: &Left, is_closed: impl Fn(u32) -> bool) -> bool {
        match left {
            Left::Memory { handle, size } if is_closed(handle.device) => {
                self.counts.physical.fetch_sub(*size, Ordering::Relaxed);
                true
            }
            _ => false,
        }
    }

    /// A device that could not be closed when it was dropped, after another try; `None` if it is
    /// closed now, or was.
    pub(crate) fn take_left_device(&self, id: u32) -> Option<OpenDevice> {
        let is_it = |left: &Left| matches!(left, Left::Device(device) if device.id == id);
        if !lock(&self.left).iter().any(is_it) {
            return None;
        }
        self.retry();
        let mut all = lock(&self.left);
        let at = all.iter().position(is_it)?;
        match all.swap_remove(at) {
            Left::Device(device) => Some(device),
            other => {
                all.push(other);
                None
            }
        }
    }

    /// Forgets the memory that a device would not release: the device was closed, which released
    /// it, and its next handles may get the same ids.
    pub(crate) fn forget_memory_of(&self, device: u32) {
        // It also ended the device's names and opens; addresses are still to be freed.
        lock(&self.left).retain_mut(|left| match left {
            Left::Memory { .. } => !self.is_gone(left, |closed| closed == device),
            Left::Opened(opened) => {
                opened.forget_device(device);
                true
            }
            _ => true,
        });
    }
}
