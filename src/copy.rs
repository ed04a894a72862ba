//! Copies and fills.
//!
//! MEMCPY finds out by itself which side is a device's. Three of its habits need care: host to host
//! is answered with success and *not done*, and so is a fill of host memory, so those are done
//! here, by the CPU; and the end of a range is checked only if the range starts where a mapping
//! does, so a [`Slice`] is checked to be mapped from end to end before the kernel sees it, and
//! keeps what it covers mapped for as long as it lives. Copies are synchronous, except those of
//! [`Pending`].
//!
//! A slice may cover many mappings. The driver takes some facts of the first one for all: the
//! device whose DMA engine copies imports, the share that it fills, and what an asynchronous copy
//! releases. So imports and asynchronous copies are done mapping by mapping.
//!
//! Directions: host to and from device memory; device to device on one or across two devices of
//! this process (imported memory not on its own importing device, says the driver); rows with a
//! pitch and batches between host and device. Host memory that a device imported cannot be copied
//! at all.

mod pending;

pub use pending::Pending;

use crate::bytes::Bytes;
use crate::device::DeviceInner;
use crate::driver::svm::{BATCH, CopyRows, Direction, Svm};
use crate::error::{Error, Invalid, Refused, Result};
use crate::mapping::{Mapped, Mapping, copy_in, copy_out, fill};
use crate::physical::Block;
use crate::reserve::Reservation;
use crate::session::Session;
use crate::session::undo::Live;
use crate::share::NamedMemory;
use std::any::Any;
use std::fmt;
use std::ptr;
use std::sync::Arc;

/// Mapped memory from an address on, inside one reservation: what a copy reads or writes.
///
/// ```standalone_crate
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let device = session.device(LogicalId(0))?;
/// let reservation = session.reserve(4 << 20)?;
/// let first = reservation.map(0, &device.create(2 << 20)?)?;
/// let second = reservation.map(2 << 20, &device.create(2 << 20)?)?;
/// // Across both mappings.
/// let slice = reservation.slice((2 << 20) - 4, 8)?;
/// slice.write(b"01234567")?;
/// let mut back = [0; 4];
/// second.read(0, &mut back)?;
/// assert_eq!(&back, b"4567");
/// # drop(slice);
/// # drop(first);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Slice<'a> {
    address: u64,
    size: u64,
    cover: Cover<'a>,
    /// What must not be freed while it, its parts and the copies that they begin are alive: a block
    /// of a pool.
    keeper: Option<Keeper>,
}

/// Keeps something until the last copy of it is over.
pub(crate) type Keeper = Arc<dyn Any + Send + Sync>;

/// What keeps a slice mapped.
enum Cover<'a> {
    /// A part of one mapping, which is borrowed.
    One(&'a Mapping),
    /// Several, or one that was found by its address.
    Several(Vec<Arc<Live<Mapped>>>),
    /// Memory of another process that was opened by its name, and is borrowed.
    Named(&'a Arc<Live<DeviceInner>>),
    /// No bytes, so no mapping: copies of them are done by the CPU, which has nothing to do.
    Empty(Arc<Live<DeviceInner>>),
}

impl fmt::Debug for Slice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slice({:#x}, {})", self.address, Bytes(self.size))
    }
}

/// How rows lie in memory: each `pitch` bytes after the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of each row that are copied.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
    /// Distance of rows in the mapped memory.
    pub pitch: u64,
    /// Distance of rows in the buffer.
    pub buffer_pitch: u64,
}

impl Mapping {
    /// `size` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside of the mapping.
    #[inline]
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        check("take a part of a mapping", offset, size, self.size())?;
        Ok(Slice { address: self.address() + offset, size, cover: Cover::One(self), keeper: None })
    }

    /// Copies a buffer into the memory, from `offset` on. Returns when it is done.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], before anything is copied, for what lies outside of the mapping;
    /// [`Error::Refused`] if the kernel or the device could not copy, and then some of it may have
    /// been.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.slice(offset, from.len() as u64)?.write(from)
    }

    /// Copies memory, from `offset` on, into a buffer.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.slice(offset, to.len() as u64)?.read(to)
    }

    /// Sets `size` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    #[doc(alias = "aclrtMemset")]
    pub fn fill(&self, offset: u64, size: u64, value: u8) -> Result<()> {
        self.slice(offset, size)?.fill(value)
    }
}

impl Reservation {
    /// `size` bytes from `offset` on, all of which must be mapped, by however many mappings. They
    /// cannot be unmapped while it lives.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside of the reservation or is not mapped.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        check("take a part of a reservation", offset, size, self.size())?;
        let address = self.address() + offset;
        let session = &self.inner.session;
        session.check_process()?;
        if size == 0 {
            return Ok(Slice { address, size, cover: Cover::Empty(DeviceInner::host(session)), keeper: None });
        }
        let Some(cover) = session.mappings.cover(address, address + size) else { return Err(hole(address, size)) };
        Ok(Slice { address, size, cover: Cover::Several(cover), keeper: None })
    }
}

impl Session {
    /// `size` bytes from an address on, all of which must be mapped, in one reservation. They
    /// cannot be unmapped while it lives.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what is not mapped, or lies in two reservations.
    pub fn slice_at(&self, address: u64, size: u64) -> Result<Slice<'static>> {
        self.slice_of(address, size, |end| self.inner.mappings.cover(address, end))
    }

    /// `size` bytes from an address on, of the mappings that `cover` finds up to an address.
    pub(crate) fn slice_of(
        &self,
        address: u64,
        size: u64,
        cover: impl FnOnce(u64) -> Option<Vec<Arc<Live<Mapped>>>>,
    ) -> Result<Slice<'static>> {
        let session = &self.inner;
        session.check_process()?;
        if size == 0 {
            return Ok(Slice { address, size, cover: Cover::Empty(DeviceInner::host(session)), keeper: None });
        }
        let end = address.checked_add(size).ok_or_else(|| hole(address, size))?;
        let Some(cover) = cover(end) else { return Err(hole(address, size)) };
        if cover.windows(2).any(|pair| !pair[0].is_beside(&pair[1])) {
            return Err(Invalid::because(
                "take a part of mapped memory",
                format!("{address:#x} with {} lies in more than one reservation", Bytes(size)),
                "Take a part of each: one copy of the driver stays in one reservation.",
            ));
        }
        Ok(Slice { address, size, cover: Cover::Several(cover), keeper: None })
    }
}

impl NamedMemory {
    /// `size` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside of the memory.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        check("take a part of named memory", offset, size, self.size())?;
        Ok(Slice { address: self.address() + offset, size, cover: Cover::Named(&self.inner.device), keeper: None })
    }
}

impl Slice<'_> {
    /// First address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// A part of it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for what lies outside.
    pub fn part(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        check("take a part of a slice", offset, size, self.size)?;
        let address = self.address + offset;
        let cover = match &self.cover {
            Cover::One(mapping) => Cover::One(mapping),
            Cover::Several(all) => {
                let (first, end) = (self.index_of(address), self.index_of((address + size).saturating_sub(1)));
                Cover::Several(all.get(first..=end).unwrap_or_default().to_vec())
            }
            Cover::Named(device) => Cover::Named(device),
            Cover::Empty(host) => Cover::Empty(host.clone()),
        };
        Ok(Slice { address, size, cover, keeper: self.keeper.clone() })
    }

    /// The mappings that it covers: none for named memory, and for no bytes.
    pub(crate) fn mappings(&self) -> &[Arc<Live<Mapped>>] {
        match &self.cover {
            Cover::One(mapping) => std::slice::from_ref(&mapping.inner),
            Cover::Several(all) => all,
            Cover::Named(_) | Cover::Empty(_) => &[],
        }
    }

    /// The place of the mapping that contains an address among them.
    fn index_of(&self, address: u64) -> usize {
        self.mappings().partition_point(|mapped| mapped.address <= address).saturating_sub(1)
    }

    /// The memory that it begins in, unless it is empty. All of it is of one device, and all or
    /// none is imported, as all of a reservation is; imports may be of different exporters.
    fn block(&self) -> Option<&Block> {
        self.mappings().first().map(|mapped| &**mapped.block)
    }

    /// The device to which it can be sent in a batch: the driver takes no host memory, no imports
    /// and nothing empty.
    fn batched_on(&self) -> Option<&Live<DeviceInner>> {
        let block = self.block()?;
        (self.size != 0 && !block.is_imported() && !block.handle.is_host()).then_some(&*block.device)
    }

    /// The device whose memory it is.
    #[inline]
    fn device(&self) -> &Arc<Live<DeviceInner>> {
        match &self.cover {
            Cover::One(mapping) => &mapping.inner.block.device,
            Cover::Several(all) => &all[0].block.device,
            Cover::Named(device) => device,
            Cover::Empty(host) => host,
        }
    }

    /// Bytes from an offset to the end of the mapping that contains it, or of the slice.
    fn to_border(&self, offset: u64) -> u64 {
        let (address, left) = (self.address + offset, self.size - offset);
        let next = self.mappings().get(self.index_of(address) + 1);
        next.map_or(left, |next| left.min(next.address - address))
    }

    /// Whether one command must not go over a border of mappings, because the memory is imported:
    /// the driver would copy all of it with the DMA engine of the first mapping's exporter, and
    /// fill beyond the first mapping in its share.
    fn is_split(&self) -> bool {
        self.mappings().len() > 1 && self.block().is_some_and(|block| block.is_imported())
    }

    /// How much of it one synchronous command takes, from an offset on.
    fn at_once(&self, offset: u64) -> u64 {
        if self.is_split() { self.to_border(offset) } else { self.size - offset }
    }

    /// Keeps something until this, its parts and the copies that they began are over.
    pub(crate) fn keep(&mut self, keeper: Keeper) {
        self.keeper = Some(keeper);
    }

    fn is_named(&self) -> bool {
        matches!(self.cover, Cover::Named(_))
    }

    #[inline]
    fn svm(&self) -> &Svm {
        &self.device().session.svm
    }

    #[inline]
    fn is_host(&self) -> bool {
        self.device().is_host()
    }

    /// Whether a copy into it is the device's work. What is host memory, the CPU copies, and named
    /// memory is copied at once.
    pub(crate) fn is_copied_by_device(&self) -> bool {
        !self.is_host() && !self.is_named()
    }

    /// The memory as the CPU sees it; only for host memory, which is mapped for the CPU from the
    /// start.
    fn pointer(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    /// Copies a buffer of the same size into the memory.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    pub fn write(&self, from: &[u8]) -> Result<()> {
        self.same_size("copy to mapped memory", from.len() as u64)?;
        if self.is_host() {
            // SAFETY: host memory of this slice's range, which is mapped while the slice lives.
            unsafe { copy_in(self.pointer(), from) };
            return Ok(());
        }
        const OPERATION: &str = "copy to a device";
        // SAFETY: the slice is mapped while it lives, and `from` is borrowed.
        unsafe {
            self.memcpy(OPERATION, self.address, from.as_ptr().expose_provenance() as u64, Direction::HostToDevice)
        }
    }

    /// Copies the memory into a buffer of the same size.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    pub fn read(&self, to: &mut [u8]) -> Result<()> {
        self.same_size("copy from mapped memory", to.len() as u64)?;
        if self.is_host() {
            // SAFETY: host memory of this slice's range, which is mapped while the slice lives.
            unsafe { copy_out(self.pointer(), to) };
            return Ok(());
        }
        const OPERATION: &str = "copy from a device";
        // SAFETY: the slice is mapped while it lives, and `to` is exclusively borrowed.
        unsafe {
            self.memcpy(OPERATION, to.as_mut_ptr().expose_provenance() as u64, self.address, Direction::DeviceToHost)
        }
    }

    /// Copies other mapped memory of the same size into this. The two must not overlap.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    #[doc(alias = "aclrtMemcpy")]
    pub fn copy_from(&self, from: &Slice<'_>) -> Result<()> {
        const OPERATION: &str = "copy between mapped memory";
        self.same_size(OPERATION, from.size)?;
        // A child of fork may have a session of its own, and slices of its parent's.
        from.check_copy(OPERATION)?;
        if self.address < from.address + from.size && from.address < self.address + self.size {
            return Err(Invalid::because(
                OPERATION,
                format!("{:#x} and {:#x} with {} overlap", self.address, from.address, Bytes(self.size)),
                "Copy by way of a buffer.",
            ));
        }
        if self.is_host() && from.is_host() {
            let mut buffer = [0; 4096];
            let mut done = 0;
            while done < self.size as usize {
                let piece = buffer.len().min(self.size as usize - done);
                // SAFETY: parts of the two slices, which are host memory and mapped while they
                // live.
                unsafe {
                    copy_out(from.pointer().wrapping_add(done), &mut buffer[..piece]);
                    copy_in(self.pointer().wrapping_add(done), &buffer[..piece]);
                }
                done += piece;
            }
            return Ok(());
        }
        let mut done = 0;
        while done < self.size {
            let size = self.at_once(done).min(from.at_once(done));
            // SAFETY: both slices are mapped while they live.
            match unsafe { self.memcpy_part(OPERATION, self.address + done, from.address + done, size) }? {
                direction @ (Direction::HostToHost | Direction::Other(_)) => {
                    return Err(not_done(OPERATION, direction));
                }
                _ => done += size,
            }
        }
        Ok(())
    }

    /// Sets all bytes.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    pub fn fill(&self, value: u8) -> Result<()> {
        const OPERATION: &str = "fill mapped memory";
        self.check_copy(OPERATION)?;
        if self.size == 0 {
            return Ok(());
        }
        if self.is_host() {
            // SAFETY: host memory of this slice's range, which is mapped while the slice lives.
            unsafe { fill(self.pointer(), self.size as usize, value) };
            return Ok(());
        }
        let (svm, device) = (self.svm(), self.device().id);
        let mut done = 0;
        while done < self.size {
            let (address, size) = (self.address + done, self.at_once(done));
            match svm.memset8(device, address, size, value) {
                Ok(true) => done += size,
                Ok(false) => return Err(not_done(OPERATION, Direction::HostToHost)),
                Err(refused) => return Err(self.failed(refused, OPERATION, address, size)),
            }
        }
        Ok(())
    }

    /// Copies rows of a buffer into the memory. Rows of the slice begin at its start.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    #[doc(alias = "aclrtMemcpy2d")]
    pub fn write_rows(&self, rows: &Rows, from: &[u8]) -> Result<()> {
        self.check_rows(rows, from.len() as u64)?;
        if self.is_host() {
            return rows.each(|memory, buffer, width| {
                // SAFETY: `check_rows` made sure that every row is inside the slice, which is
                // mapped host memory.
                unsafe { copy_in(self.pointer().wrapping_add(memory), &from[buffer..buffer + width]) };
                Ok(())
            });
        }
        if self.is_split() {
            return rows.each(|memory, buffer, width| {
                self.part(memory as u64, width as u64)?.write(&from[buffer..buffer + width])
            });
        }
        let copy = CopyRows {
            destination: self.address,
            destination_pitch: rows.pitch,
            source: from.as_ptr().expose_provenance() as u64,
            source_pitch: rows.buffer_pitch,
            width: rows.width,
            height: rows.height,
            to_device: true,
        };
        // SAFETY: `check_rows` made sure that every row is inside the slice, which is mapped while
        // it lives, and inside the buffer, which is borrowed.
        unsafe { self.memcpy2d(&copy) }
    }

    /// Copies rows of the memory into a buffer.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    pub fn read_rows(&self, rows: &Rows, to: &mut [u8]) -> Result<()> {
        self.check_rows(rows, to.len() as u64)?;
        if self.is_host() {
            return rows.each(|memory, buffer, width| {
                // SAFETY: `check_rows` made sure that every row is inside the slice, which is
                // mapped host memory.
                unsafe { copy_out(self.pointer().wrapping_add(memory), &mut to[buffer..buffer + width]) };
                Ok(())
            });
        }
        if self.is_split() {
            return rows.each(|memory, buffer, width| {
                self.part(memory as u64, width as u64)?.read(&mut to[buffer..buffer + width])
            });
        }
        let copy = CopyRows {
            destination: to.as_mut_ptr().expose_provenance() as u64,
            destination_pitch: rows.buffer_pitch,
            source: self.address,
            source_pitch: rows.pitch,
            width: rows.width,
            height: rows.height,
            to_device: false,
        };
        // SAFETY: as for writing, and the buffer is exclusively borrowed.
        unsafe { self.memcpy2d(&copy) }
    }

    /// Copies all of the slice between two addresses, of which one is its own, in as few commands
    /// as the driver does right. A copy of nothing, which the kernel refuses, is none.
    ///
    /// # Safety
    ///
    /// As for [`Svm::memcpy`](crate::driver::svm::Svm::memcpy).
    unsafe fn memcpy(&self, operation: &'static str, destination: u64, source: u64, expected: Direction) -> Result<()> {
        let mut done = 0;
        while done < self.size {
            let size = self.at_once(done);
            // SAFETY: the caller vouches for the addresses.
            let direction = unsafe { self.memcpy_part(operation, destination + done, source + done, size) }?;
            if direction != expected {
                return Err(not_done(operation, direction));
            }
            done += size;
        }
        Ok(())
    }

    /// One MEMCPY, and the direction that it took.
    ///
    /// # Safety
    ///
    /// As for [`Slice::memcpy`].
    unsafe fn memcpy_part(
        &self,
        operation: &'static str,
        destination: u64,
        source: u64,
        size: u64,
    ) -> Result<Direction> {
        // SAFETY: the caller vouches for the addresses.
        let copied = unsafe { self.svm().memcpy(self.device().id, destination, source, size) };
        copied.map_err(|refused| {
            // The side of it that is the driver's.
            let address = if destination.wrapping_sub(self.address) < self.size { destination } else { source };
            self.failed(refused, operation, address, size)
        })
    }

    /// One MEMCPY2D.
    ///
    /// # Safety
    ///
    /// As for [`Slice::memcpy`].
    unsafe fn memcpy2d(&self, copy: &CopyRows) -> Result<()> {
        if copy.width == 0 || copy.height == 0 {
            return Ok(());
        }
        let (svm, device) = (self.svm(), self.device().id);
        // SAFETY: the caller vouches for the addresses.
        unsafe { svm.memcpy2d(device, copy) }
            .map_err(|refused| self.failed(refused, "copy rows", self.address, self.size))
    }

    /// Before every copy and fill: this is the right process (a child has nothing mapped here), and
    /// the driver can copy such memory.
    fn check_copy(&self, operation: &'static str) -> Result<()> {
        self.device().session.check_process()?;
        match self.mappings().iter().find(|mapped| mapped.block.is_host_memory_on_a_device()) {
            Some(mapped) => Err(host_memory_on_a_device(operation, &mapped.block)),
            None => Ok(()),
        }
    }

    /// Before every copy: it is possible, and the sizes agree.
    fn same_size(&self, operation: &'static str, other: u64) -> Result<()> {
        self.check_copy(operation)?;
        if self.size == other { Ok(()) } else { Err(other_size(operation, self.size, other)) }
    }

    fn check_rows(&self, rows: &Rows, buffer: u64) -> Result<()> {
        self.check_copy("copy rows")?;
        let fits = |pitch: u64, size: u64| {
            let length = rows
                .height
                .checked_sub(1)
                .map_or(Some(0), |before| before.checked_mul(pitch).and_then(|start| start.checked_add(rows.width)));
            rows.width <= pitch && length.is_some_and(|length| length <= size)
        };
        if fits(rows.pitch, self.size) && fits(rows.buffer_pitch, buffer) {
            return Ok(());
        }
        Err(Invalid::because(
            "copy rows",
            format!("{rows:?} do not fit in {} of memory and a buffer of {}", Bytes(self.size), Bytes(buffer)),
            "Pitches are at least the width, and all rows must be inside.",
        ))
    }

    fn failed(&self, refused: Box<Refused>, operation: &'static str, address: u64, size: u64) -> Error {
        let arguments = format!("address {address:#x}, size {}", Bytes(size));
        self.device().failed(refused, operation, arguments)
    }
}

impl Rows {
    /// Calls with the offsets of each row in the memory and in the buffer, and its width.
    fn each(&self, mut row: impl FnMut(usize, usize, usize) -> Result<()>) -> Result<()> {
        if self.width == 0 {
            // Any number of such rows fits anywhere.
            return Ok(());
        }
        for index in 0..self.height {
            row((index * self.pitch) as usize, (index * self.buffer_pitch) as usize, self.width as usize)?;
        }
        Ok(())
    }
}

/// Copies many buffers to many places, with one command per 4096 of a device. Each buffer has the
/// size of its slice.
///
/// # Errors
///
/// Those of [`Mapping::write`]; some of the buffers may have been copied.
#[doc(alias = "aclrtMemcpyBatch")]
pub fn write_batch(copies: &[(Slice<'_>, &[u8])]) -> Result<()> {
    let batch = Batch {
        operation: "copy a batch to a device",
        destinations: copies.iter().map(|(to, _)| to.address).collect(),
        sources: copies.iter().map(|(_, from)| from.as_ptr().expose_provenance() as u64).collect(),
        sizes: copies.iter().map(|(_, from)| from.len() as u64).collect(),
    };
    let plan = batch.plan(copies.iter().map(|(to, _)| to))?;
    for &index in plan.alone() {
        let (to, from) = &copies[index];
        to.write(from)?;
    }
    // SAFETY: every slice is mapped while it lives, every buffer is borrowed, and `plan` has made
    // sure that it is as large as its slice.
    unsafe { batch.send(&plan) }
}

/// Copies from many places into many buffers, with one command per 4096 of a device. Each buffer
/// has the size of its slice.
///
/// # Errors
///
/// Those of [`Mapping::write`]; some of the buffers may have been copied.
pub fn read_batch(copies: &mut [(Slice<'_>, &mut [u8])]) -> Result<()> {
    let batch = Batch {
        operation: "copy a batch from a device",
        destinations: copies.iter_mut().map(|(_, to)| to.as_mut_ptr().expose_provenance() as u64).collect(),
        sources: copies.iter().map(|(from, _)| from.address).collect(),
        sizes: copies.iter().map(|(_, to)| to.len() as u64).collect(),
    };
    let plan = batch.plan(copies.iter().map(|(from, _)| from))?;
    // SAFETY: as for writing, and every buffer is borrowed exclusively.
    unsafe { batch.send(&plan) }?;
    let alone = plan.alone().to_vec();
    for index in alone {
        let (from, to) = &mut copies[index];
        from.read(to)?;
    }
    Ok(())
}

/// Copies as the kernel takes them: three arrays.
struct Batch {
    operation: &'static str,
    destinations: Vec<u64>,
    sources: Vec<u64>,
    sizes: Vec<u64>,
}

/// Which copies are sent together.
enum Plan<'a> {
    /// All of them, to one device: the usual case.
    One(&'a Live<DeviceInner>),
    Several {
        /// The copies of each device, by their index.
        groups: Vec<(&'a Live<DeviceInner>, Vec<usize>)>,
        /// Those that cannot be in a batch: the driver takes no host memory, no imports and nothing
        /// empty.
        alone: Vec<usize>,
    },
}

impl Plan<'_> {
    fn alone(&self) -> &[usize] {
        match self {
            Plan::One(_) => &[],
            Plan::Several { alone, .. } => alone,
        }
    }
}

impl Batch {
    /// Checks all copies, before the first is made. The slices are those of the copies, in order.
    fn plan<'a>(&self, slices: impl Iterator<Item = &'a Slice<'a>> + Clone) -> Result<Plan<'a>> {
        // Most often all are of one device. Then the process is checked once.
        let device = slices.clone().next().and_then(Slice::batched_on);
        let is_usual = |(slice, &size): (&'a Slice<'a>, &u64)| {
            slice.size == size && device.is_some() && slice.batched_on().map(ptr::from_ref) == device.map(ptr::from_ref)
        };
        match device {
            Some(device) if slices.clone().zip(&self.sizes).all(is_usual) => {
                device.session.check_process()?;
                Ok(Plan::One(device))
            }
            _ => self.plan_several(slices),
        }
    }

    fn plan_several<'a>(&self, slices: impl Iterator<Item = &'a Slice<'a>>) -> Result<Plan<'a>> {
        let (mut groups, mut alone) = (Vec::<(&Live<DeviceInner>, Vec<usize>)>::new(), Vec::new());
        for (index, (slice, &size)) in slices.zip(&self.sizes).enumerate() {
            slice.same_size(self.operation, size)?;
            let Some(device) = slice.batched_on() else {
                alone.push(index);
                continue;
            };
            match groups.iter_mut().find(|(other, _)| ptr::eq(*other, device)) {
                Some((_, indices)) => indices.push(index),
                None => groups.push((device, vec![index])),
            }
        }
        Ok(Plan::Several { groups, alone })
    }

    /// Does the copies that are not alone.
    ///
    /// # Safety
    ///
    /// The buffers must be valid, for writes if they are the destination.
    unsafe fn send(&self, plan: &Plan<'_>) -> Result<()> {
        match plan {
            // SAFETY: the caller vouches for the buffers.
            Plan::One(device) => unsafe { self.send_to(device, &self.destinations, &self.sources, &self.sizes) },
            Plan::Several { groups, .. } => groups.iter().try_for_each(|(device, indices)| {
                let those = |array: &[u64]| -> Vec<u64> { indices.iter().map(|&index| array[index]).collect() };
                let (destinations, sources) = (those(&self.destinations), those(&self.sources));
                // SAFETY: as above.
                unsafe { self.send_to(device, &destinations, &sources, &those(&self.sizes)) }
            }),
        }
    }

    /// One command for each 4096 copies.
    ///
    /// # Safety
    ///
    /// The buffers must be valid, for writes if they are the destination.
    unsafe fn send_to(&self, device: &DeviceInner, destinations: &[u64], sources: &[u64], sizes: &[u64]) -> Result<()> {
        let most = BATCH as usize;
        for ((destinations, sources), sizes) in
            destinations.chunks(most).zip(sources.chunks(most)).zip(sizes.chunks(most))
        {
            // SAFETY: the caller vouches for the buffers; slices are mapped while they live.
            if let Err(refused) = unsafe { device.session.svm.memcpy_batch(device.id, destinations, sources, sizes) } {
                let arguments = format!("{} copies, {}", sizes.len(), Bytes(sizes.iter().sum()));
                return Err(device.failed(refused, self.operation, arguments));
            }
        }
        Ok(())
    }
}

fn host_memory_on_a_device(operation: &'static str, block: &Block) -> Error {
    Invalid::because(
        operation,
        format!("{} is host memory, and the driver copies no host memory that a device imported", block.describe()),
        "Import it on the host as well and use that mapping for copies; the device itself can use this one.",
    )
}

fn other_size(operation: &'static str, slice: u64, buffer: u64) -> Error {
    let problem = format!("{} and {} are not the same", Bytes(slice), Bytes(buffer));
    Invalid::because(operation, problem, "Both sides of a copy must have the same size.")
}

#[inline]
fn check(operation: &'static str, offset: u64, size: u64, whole: u64) -> Result<()> {
    if offset <= whole && size <= whole - offset { Ok(()) } else { Err(outside(operation, offset, size, whole)) }
}

fn outside(operation: &'static str, offset: u64, size: u64, whole: u64) -> Error {
    let problem = format!("{} at offset {offset:#x} are not inside of {}", Bytes(size), Bytes(whole));
    Invalid::because(operation, problem, "Stay inside.")
}

fn hole(address: u64, size: u64) -> Error {
    Invalid::because(
        "take a part of a reservation",
        format!("not all of {address:#x} with {} is mapped", Bytes(size)),
        "Map all of it first.",
    )
}

/// The kernel says that it did it, but also that it did not.
fn not_done(operation: &'static str, direction: Direction) -> Error {
    Invalid::because(
        operation,
        format!("the driver took it for a copy of direction {direction:?} and may have done nothing"),
        "This should not happen: the driver and this library disagree on whose memory it is.",
    )
}
