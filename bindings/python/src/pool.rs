//! `Pool` and `Block`: memory by the byte, with tags that sleep and wake.

use crate::buffer::{Buffer, new_bytes};
use crate::copy::{AnyMapped, extent, length, mapped_memory, rest, rows};
use crate::device::AnyPlace;
use crate::error::{Fault, Outcome, data, fields};
use crate::file::{Purpose, call_back, catching, interrupting, open, with_progress};
use crate::node::{Ends, Node, closable, lock};
use crate::pending::PendingCopy;
use crate::size::{Size, kind};
use ascend_vmm::Bytes;
use ascend_vmm::Error;
use ascend_vmm::pool::{self, CacheOptions, Keep, PageCache, PoolOptions, Statistics, Tag};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use pyo3::{PyTraverseError, PyVisit};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

impl Ends for pool::Pool {
    const CLASS: &'static str = "Pool";
    const CLOSING: &'static str = "close a pool";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        // Its blocks are closed, so this releases everything. What the kernel does not unmap is
        // logged when the pool is dropped; `before_unmap` cannot prevent that.
        match catching(|| self.trim()) {
            Err(fault @ (Fault::Python(_) | Fault::Library(Error::OtherProcess { .. }))) => Err((fault, Some(self))),
            _ => Ok(()),
        }
    }
}

impl Ends for pool::Block {
    const CLASS: &'static str = "Block";
    const CLOSING: &'static str = "free a block";

    fn end(self) -> Result<(), (Fault, Option<Self>)> {
        Ok(())
    }
}

/// Blocks of memory from a few bytes to many GiB. Freed memory stays mapped and is used again;
/// `trim` gives it back.
///
/// Each block has a tag, a number of the caller's choice. A tag can be put to sleep, which releases
/// its memory and keeps its addresses, and woken again:
///
/// >>> with Session() as session, Pool(session.device(0)) as pool:
/// ...     weights = pool.allocate("10MiB", tag=1)
/// ...     weights.write(b"learned")
/// ...     released = pool.sleep(1)
/// ...     pool.wake(1)
/// ...     released, weights.read(7)
/// (10485760, b'learned')
///
/// `page` and `memory` choose the kind of memory, `cache_limit` how much unmapped memory is kept,
/// `handles` the sizes of allocations from the driver, `step` how much is mapped at least.
/// `before_unmap` is called before memory is unmapped, with a list of `(start, end)`: the place to
/// wait for work on the NPU. If it raises, nothing is unmapped, unless the pool is being dropped.
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct Pool {
    node: Arc<Node<pool::Pool>>,
    /// `before_unmap`. Also here, so that the interpreter sees cycles.
    hook: Arc<Mutex<Option<Py<PyAny>>>>,
}

/// A block of a pool. Closing or dropping it frees it.
///
/// >>> with Session() as session, Pool(session.device(0)) as pool, pool.allocate(100) as block:
/// ...     block.write(b"small")
/// ...     block.read(5), block.tag
/// (b'small', 0)
#[pyclass(frozen, weakref, module = "ascend_vmm")]
pub(crate) struct Block {
    pub(crate) node: Arc<Node<pool::Block>>,
}

closable! { Pool {
    /// Frees all blocks and releases all memory.
    fn close;

    #[new]
    #[pyo3(signature = (
        place, *, page=None, memory=None, cache_limit=None, handles=None, step=None, before_unmap=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn new(
        place: AnyPlace,
        page: Option<Size>,
        memory: Option<&str>,
        cache_limit: Option<Size>,
        handles: Option<Vec<Size>>,
        step: Option<Size>,
        before_unmap: Option<Py<PyAny>>,
    ) -> Outcome<Pool> {
        let mut cached = CacheOptions::default().kind(kind(page, memory)?);
        if let Some(Size(limit)) = cache_limit {
            cached = cached.limit(limit);
        }
        let cache = place.with(|place| PageCache::with(place, cached))?;
        let mut options = PoolOptions::default();
        if let Some(handles) = handles {
            options = options.handles(&handles.iter().map(|size| size.0).collect::<Vec<_>>());
        }
        if let Some(Size(step)) = step {
            options = options.step(step);
        }
        let hook = Arc::new(Mutex::new(before_unmap));
        let called = hook.clone();
        options = options.before_unmap(move |ranges| {
            call_back(|py| {
                let hook = lock(&called).as_ref().map(|hook| hook.clone_ref(py));
                let ranges: Vec<(u64, u64)> = ranges.iter().map(|range| (range.start, range.end)).collect();
                hook.map_or(Ok(()), |hook| hook.call1(py, (ranges,)).map(drop))
            });
        });
        Ok(Pool { node: Node::new(pool::Pool::with(&cache, options), [place.node()]), hook })
    }

    /// Takes a block, at a multiple of `alignment`: a power of two. The size is rounded up.
    #[pyo3(
        signature = (size, *, alignment=Size(1), tag=0),
        text_signature = "(self, size, *, alignment=1, tag=0)"
    )]
    fn allocate(&self, py: Python<'_>, size: Size, alignment: Size, tag: u32) -> Outcome<Block> {
        let pool = self.node.get()?;
        let block = interrupting(py, || pool.allocate(size.0, alignment.0, Tag(tag)))?;
        Ok(Block { node: Node::new(block, [self.node.clone()]) })
    }

    /// Frees all blocks of a tag at once. Existing `Block` objects of the tag become invalid.
    fn reset(&self, py: Python<'_>, tag: u32) -> Outcome<()> {
        let pool = self.node.get()?;
        interrupting(py, || pool.reset(Tag(tag)))
    }

    /// Unmaps and releases what no block uses. Returns the number of bytes.
    fn trim(&self, py: Python<'_>) -> Outcome<u64> {
        let pool = self.node.get()?;
        interrupting(py, || pool.trim())
    }

    /// Puts a tag to sleep: its memory is released, its addresses and blocks stay. Returns the
    /// number of bytes released.
    ///
    /// `keep` says where the contents go: "host" keeps them in memory of this process, "pinned" in
    /// the driver's host memory, a path (`os.PathLike`) in a new file; "nothing" drops them.
    /// `progress` is called with the bytes done and their total. If it raises, the tag stays awake.
    #[pyo3(
        signature = (tag, keep=None, *, progress=None),
        text_signature = "(self, tag, keep='host', *, progress=None)"
    )]
    fn sleep(
        &self,
        py: Python<'_>,
        tag: u32,
        keep: Option<&Bound<'_, PyAny>>,
        progress: Option<Py<PyAny>>,
    ) -> Outcome<u64> {
        let (pool, keep) = (self.node.get()?, kept(keep)?);
        with_progress(py, progress, |progress| pool.sleep(Tag(tag), keep, progress))
    }

    /// Wakes tags, all of them or none.
    #[pyo3(signature = (*tags, progress=None))]
    fn wake(&self, py: Python<'_>, tags: Vec<u32>, progress: Option<Py<PyAny>>) -> Outcome<()> {
        let pool = self.node.get()?;
        let tags: Vec<Tag> = tags.into_iter().map(Tag).collect();
        with_progress(py, progress, |progress| pool.wake(&tags, progress))
    }

    /// How much memory the pool has, or one tag of it.
    #[pyo3(signature = (tag=None))]
    fn statistics<'py>(&self, py: Python<'py>, tag: Option<u32>) -> Outcome<Bound<'py, PyAny>> {
        let pool = self.node.get()?;
        let Statistics { in_use, peak, blocks, mapped, reserved, largest_free, cached, asleep, .. } =
            py.detach(|| tag.map_or_else(|| pool.statistics(), |tag| pool.statistics_of(Tag(tag))));
        let fields = fields! { py;
            in_use: in_use,
            peak: peak,
            blocks: blocks,
            mapped: mapped,
            reserved: reserved,
            largest_free: largest_free,
            cached: cached,
            asleep: asleep,
        };
        Ok(data(py, "PoolStatistics", &fields)?)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.hook.try_lock() {
            Ok(hook) => visit.call(&*hook),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        let hook = lock(&self.hook).take();
        drop(hook);
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let Some(pool) = self.node.try_get() else { return "<Pool, closed>".to_owned() };
        let statistics = py.detach(|| pool.statistics());
        format!("<Pool, {} blocks, {} mapped>", statistics.blocks, Bytes(statistics.mapped))
    }
} }

/// What to do with the contents.
fn kept(keep: Option<&Bound<'_, PyAny>>) -> Outcome<Keep> {
    let Some(keep) = keep else { return Ok(Keep::Host) };
    if let Ok(name) = keep.extract::<String>() {
        return match name.as_str() {
            "host" => Ok(Keep::Host),
            "pinned" => Ok(Keep::Pinned),
            "nothing" => Ok(Keep::Nothing),
            // Not taken for a path: a misspelt word would become a file.
            other => Err(Fault::Argument {
                operation: "put a tag to sleep",
                problem: format!("contents cannot be kept in {other:?}"),
                rule: "It is \"host\", \"pinned\", \"nothing\", or a pathlib.Path for a file.",
            }),
        };
    }
    Ok(Keep::File(keep.extract::<PathBuf>()?))
}

mapped_memory! { Block {
    /// Frees it.
    fn close;

    /// Its tag.
    #[getter]
    fn tag(&self) -> Outcome<u32> {
        Ok(self.node.get()?.tag().0)
    }

    fn __len__(&self) -> Outcome<usize> {
        Ok(self.node.get()?.size() as usize)
    }

    fn __repr__(&self) -> String {
        match self.node.try_get() {
            Some(block) => format!("<Block {} at {:#x}, tag {}>", Bytes(block.size()), block.address(), block.tag().0),
            None => "<Block, closed>".to_owned(),
        }
    }
} }
