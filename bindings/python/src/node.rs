//! Objects that can be closed, and what was made from them.
//!
//! A Python variable outlives the block that made it, so closing an object first closes what was
//! made from it: a session its devices and reservations, a reservation its mappings, a
//! mapping its views and running copies. An object knows its children by weak references, so it
//! keeps none of them alive. An open child keeps its parents, as it does in the library, so the
//! session finds a mapping even if the variables between the two are gone.
//!
//! A call that works without the interpreter's lock holds a reference of its own. Closing the
//! object meanwhile fails, as for everything that is in use.
//!
//! The locks in here are taken with the interpreter's lock only. So is a fork by Python, and a
//! child finds none of them held by a thread that it does not have.

use crate::error::{Fault, Outcome};
use ascend_vmm::Error;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What can be closed explicitly.
pub(crate) trait Ends: Sized + Send + Sync + 'static {
    /// The name of its class.
    const CLASS: &'static str;
    /// What closing it is, as a verb phrase.
    const CLOSING: &'static str;

    /// Undoes it. An object that comes back with the error is still open.
    fn end(self) -> Result<(), (Fault, Option<Self>)>;
}

/// An object, and what it was made from and what was made from it.
pub(crate) struct Node<T: Ends> {
    // Dropped in this order: the object before its parents.
    object: Mutex<Option<Arc<T>>>,
    children: Mutex<Vec<Weak<dyn Close>>>,
    parents: Mutex<Vec<Arc<dyn Close>>>,
}

/// A node of any type.
pub(crate) trait Close: Send + Sync {
    /// Closes its children, then itself. Nothing happens if it is closed.
    fn close(&self, py: Python<'_>) -> Outcome<()>;
    /// Enters a child.
    fn adopt(&self, child: Weak<dyn Close>);
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Ends> Node<T> {
    /// An object made from these parents.
    pub(crate) fn new<const N: usize>(object: T, parents: [Arc<dyn Close>; N]) -> Arc<Node<T>> {
        let node = Arc::new(Node {
            object: Mutex::new(Some(Arc::new(object))),
            children: Mutex::default(),
            parents: Mutex::default(),
        });
        for parent in &parents {
            let child: Weak<Node<T>> = Arc::downgrade(&node);
            parent.adopt(child);
        }
        *lock(&node.parents) = parents.into();
        node
    }

    /// The object, for one call.
    pub(crate) fn get(&self) -> Outcome<Arc<T>> {
        lock(&self.object).clone().ok_or(Fault::Closed(T::CLASS))
    }

    /// The object, unless it is closed.
    pub(crate) fn try_get(&self) -> Option<Arc<T>> {
        lock(&self.object).clone()
    }
}

impl<T: Ends> Drop for Node<T> {
    /// Releases the interpreter's lock: undoing may wait for a copy or a device, and may call a
    /// Python function.
    fn drop(&mut self) {
        let mut object = self.object.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // When the interpreter is ending, the object is dropped without it.
        Python::try_attach(|py| py.detach(|| drop(object.take())));
    }
}

impl<T: Ends> Close for Node<T> {
    fn adopt(&self, child: Weak<dyn Close>) {
        let mut children = lock(&self.children);
        // Amortised: the list is at most twice as long as what is alive.
        if children.len() == children.capacity() {
            children.retain(|child| child.strong_count() > 0);
            let alive = children.len();
            children.reserve(alive.max(8));
        }
        children.push(child);
    }

    fn close(&self, py: Python<'_>) -> Outcome<()> {
        let mut children = std::mem::take(&mut *lock(&self.children));
        while let Some(child) = children.pop() {
            let closed = child.upgrade().map_or(Ok(()), |child| child.close(py));
            if let Err(fault) = closed {
                children.push(child);
                lock(&self.children).append(&mut children);
                return Err(fault);
            }
        }
        let Some(object) = lock(&self.object).take() else { return Ok(()) };
        match Arc::try_unwrap(object) {
            Ok(object) => {
                let ended = py.detach(|| object.end());
                if let Err((fault, Some(object))) = ended {
                    *lock(&self.object) = Some(Arc::new(object));
                    return Err(fault);
                }
                let parents = std::mem::take(&mut *lock(&self.parents));
                drop(parents);
                ended.map_err(|(fault, _)| fault)
            }
            Err(object) => {
                *lock(&self.object) = Some(object);
                let users = "another thread is using it. Wait for that first.".to_owned();
                Err(Fault::Library(Error::InUse { operation: T::CLOSING, users }))
            }
        }
    }
}

/// The end of a `with` block. A child of fork has nothing to close: it is all the parent's.
pub(crate) fn leave(closed: Outcome<()>) -> Outcome<()> {
    match closed {
        Err(Fault::Library(Error::OtherProcess { .. })) => Ok(()),
        closed => closed,
    }
}

/// `#[pymethods]` of a class with a `node`: its own, and those of every class that can be closed.
/// `fn close;` comes first and has the text of `close`.
macro_rules! closable {
    ($class:ident { $(#[$close:meta])* fn close; $($own:tt)* }) => {
        #[pymethods]
        impl $class {
            /// Whether it is closed.
            #[getter]
            fn closed(&self) -> bool {
                self.node.try_get().is_none()
            }

            $(#[$close])*
            fn close(&self, py: Python<'_>) -> Outcome<()> {
                $crate::node::Close::close(&*self.node, py)
            }

            fn __enter__(slf: Py<Self>) -> Py<Self> {
                slf
            }

            #[pyo3(signature = (*_exception))]
            fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> Outcome<()> {
                $crate::node::leave(self.close(py))
            }

            $($own)*
        }
    };
}
pub(crate) use closable;
