//! How objects of the kernel are undone.
//!
//! Each object keeps alive what it depends on, so the kernel's objects are undone in this order,
//! whatever order the user drops them in:
//!
//! 0. a name of mapped memory (IPC_MEM_DESTROY), which keeps its mapping; and memory that was
//!    opened by name (IPC_MEM_CLOSE, FREE_PAGES, and its heap), which keeps its device;
//! 1. a mapping (MEM_UNMAP), which keeps its memory and its reservation;
//! 2. a reservation (FREE_PAGES), which keeps the session;
//! 3. physical memory (MEM_RELEASE), which keeps its device;
//! 4. a device (PREPARE_CLOSE_DEVICE, CLOSE_DEVICE, then its device process), which keeps the
//!    session;
//! 5. the session: heaps, address segments, CLOSE, close(2), and the DEVMNG file last.
//!
//! Each of these objects is a [`Live`]. It is undone once, by an explicit call ([`undo`]) or when
//! its last reference is dropped. If the kernel refuses an explicit call, the call returns the
//! object. If the kernel refuses during a drop, the object is kept as a [`Left`], which is plain
//! numbers, and tried again in the same order when a device or the session is closed.

use super::SessionInner;
use crate::device::OpenDevice;
use crate::driver::svm::{Handle, NAME};
use crate::error::{Error, KernelResult, Result};
use crate::share::{ImportKey, OpenedAt};
use crate::slots::lock;
use crate::trace::{self, quiet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An object that the kernel holds for us until it is undone.
pub(crate) trait Undo: Sized {
    /// The name of undoing it in errors, as a verb phrase.
    const OPERATION: &'static str;

    /// The session that it belongs to.
    fn session(&self) -> &SessionInner;

    /// Undoes it. After an error the kernel still has the object, and this can be tried again.
    fn undo(&mut self) -> Result<()>;

    /// Handles an error of [`Undo::undo`] during a drop.
    fn abandon(&mut self, error: Error);

    /// Says who else uses the object and how to resolve that.
    fn users(&self, others: usize) -> String;

    /// Enters an object that could not be undone into the tables again.
    fn restore(_: &Arc<Live<Self>>) {}

    /// In a child of fork: lets go of the parent's resources without undoing them.
    fn forget(&mut self) {}

    /// True if other threads may wait until it is undone. Events are then held back until it is.
    fn is_awaited(&self) -> bool {
        false
    }
}

/// An object that is undone when it is dropped, unless it was undone before.
#[derive(Debug)]
pub(crate) struct Live<T: Undo> {
    undone: bool,
    object: T,
}

impl<T: Undo> Live<T> {
    pub(crate) fn new(object: T) -> Live<T> {
        Live { undone: false, object }
    }

    /// Undoes the object and drops it, also after an error.
    pub(crate) fn end(mut self) -> Result<()> {
        self.undone = true;
        self.object.undo()
    }
}

impl<T: Undo> Deref for Live<T> {
    type Target = T;

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
    fn drop(&mut self) {
        if self.undone {
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

/// Undoes an object through its last reference. Returns the object if there are other references or
/// if the kernel refuses.
pub(crate) fn undo<T: Undo>(object: Arc<Live<T>>) -> Result<(), (Error, Arc<Live<T>>)> {
    if let Err(error) = object.session().check_process() {
        return Err((error, object));
    }
    let _quiet = object.is_awaited().then(quiet);
    match Arc::try_unwrap(object) {
        Ok(mut live) => match live.object.undo() {
            Ok(()) => {
                live.undone = true;
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

/// The error for an object that has other users.
pub(crate) fn in_use<T: Undo>(object: &Arc<Live<T>>) -> Error {
    let others = Arc::strong_count(object).saturating_sub(1);
    Error::InUse { operation: T::OPERATION, users: object.users(others) }
}

/// What a dropped object could not undo. Plain numbers, so that it keeps nothing alive. Only a
/// device also has its process, which must not end before the device is closed.
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
    /// MEM_UNMAP, then removes the mapping from the table.
    pub(crate) fn unmap(&self, address: u64, size: u64) -> KernelResult<()> {
        self.svm.mem_unmap(address, size)?;
        lock(&self.mappings).remove(address);
        Ok(())
    }

    /// FREE_PAGES, then frees the addresses in the arena.
    pub(crate) fn free(&self, address: u64, size: u64) -> KernelResult<()> {
        self.svm.free_pages(address, size)?;
        lock(&self.arena).free(address);
        self.reserved.fetch_sub(size, Ordering::Relaxed);
        Ok(())
    }

    /// MEM_RELEASE, then vacates the slot of an import.
    pub(crate) fn release(&self, handle: Handle, size: u64, import: Option<ImportKey>) -> KernelResult<()> {
        self.svm.mem_release(handle, size)?;
        self.physical.fetch_sub(size, Ordering::Relaxed);
        if let Some(key) = import {
            self.sharing.imports.vacate(&key);
        }
        Ok(())
    }

    /// Keeps what a dropped object could not undo, for a later try.
    pub(crate) fn keep(&self, left: Left, error: Error) {
        lock(&self.left).push(left);
        trace::error(error, "not undone yet; it is tried again when a device or the session is closed");
    }

    /// Tries again to undo what is left, in the order that the module's page lists.
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

    /// True for memory of a closed device: closing released it.
    fn is_gone(&self, left: &Left, is_closed: impl Fn(u32) -> bool) -> bool {
        match left {
            Left::Memory { handle, size } if is_closed(handle.device) => {
                self.physical.fetch_sub(*size, Ordering::Relaxed);
                true
            }
            _ => false,
        }
    }

    /// Tries again to close a device that could not be closed when it was dropped. Returns it if
    /// that fails again, and `None` if there is no such device any more.
    pub(crate) fn take_left_device(&self, id: u32) -> Option<OpenDevice> {
        let is_it = |left: &Left| matches!(left, Left::Device(device) if device.id == id);
        if !lock(&self.left).iter().any(is_it) {
            return None;
        }
        self.retry();
        let mut all = lock(&self.left);
        let at = all.iter().position(is_it)?;
        if let Left::Device(device) = all.swap_remove(at) { Some(device) } else { None }
    }

    /// Forgets memory that a device refused to release. The device was closed, which released the
    /// memory, and new handles of the device may get the same ids.
    pub(crate) fn forget_memory_of(&self, device: u32) {
        // Closing also ended names on the device that were opened. Their addresses are still to
        // free.
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
