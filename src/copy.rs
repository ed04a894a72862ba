//! Copies and fills.
//!
//! MEMCPY finds out by itself which side is device memory. Three of its habits need care. It
//! answers a host-to-host copy with success and does *not* do it, and MEMSET does the same for host
//! memory, so the CPU does those here. It checks the end of a range only if the range starts where
//! a mapping does, so a [`Slice`] is checked to be mapped from end to end before the kernel is
//! called, and keeps what it covers mapped while it lives. Copies are synchronous, except those of
//! [`Pending`].
//!
//! A slice may cover many mappings. The driver uses some facts of the first one for all: the device
//! whose DMA engine copies imports, the share that it fills, and what an asynchronous copy
//! releases. So imports and asynchronous copies are done mapping by mapping.
//!
//! Directions: host to and from device memory; device to device on one or across two devices of
//! this process (for imported memory, the driver refuses its own importing device); rows with a
//! pitch and batches between host and device. Host memory that a device imported cannot be copied
//! at all.

mod pending;

pub use pending::Pending;

use crate::bytes::Bytes;
use crate::device::DeviceInner;
use crate::driver::svm::{BATCH, Direction, Svm};
use crate::error::{Error, Invalid, Refused, Result};
use crate::mapping::{Mapped, Mapping, copy_in, copy_out, fill};
use crate::physical::PhysicalBlock;
use crate::reserve::Reservation;
use crate::session::undo::Live;
use crate::session::{Session, SessionInner};
use crate::share::NamedMemory;
use crate::slots::lock;
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// Mapped memory from an address on, inside one reservation: what a copy reads or writes.
///
/// ```
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
    /// The device whose memory it is. No bytes count as memory of the host, of which the CPU copies
    /// nothing.
    device: Arc<Live<DeviceInner>>,
    /// What keeps it mapped.
    cover: Cover<'a>,
    /// Dropped when the slice, its parts and the copies that they began are over: it keeps a block
    /// of a pool.
    keeper: Option<Keeper>,
}

/// Kept until the last copy is over, and then dropped.
pub(crate) type Keeper = Arc<dyn Any + Send + Sync>;

/// The mappings of a slice, in order of addresses: none for named memory, and for no bytes.
enum Cover<'a> {
    /// Borrowed from a mapping or from another slice.
    Borrowed(&'a [Arc<Live<Mapped>>]),
    /// Found by address.
    One(Arc<Live<Mapped>>),
    Several(Vec<Arc<Live<Mapped>>>),
}

impl fmt::Debug for Slice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slice({:#x}, {})", self.address, Bytes(self.size))
    }
}

/// The layout of rows in memory: each begins `pitch` bytes after the one before.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::copy::Rows;
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// let mapping = session.reserve(2 << 20)?.map(0, &memory)?;
/// // Two rows of three bytes, which lie 512 bytes apart in the memory and densely in the buffer.
/// let rows = Rows { width: 3, height: 2, pitch: 512, buffer_pitch: 3 };
/// mapping.slice(0, 1024)?.write_rows(&rows, b"abcdef")?;
/// let mut second = [0; 3];
/// mapping.read(512, &mut second)?;
/// assert_eq!(&second, b"def");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of each row that are copied.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
    /// Bytes from one row to the next in the mapped memory.
    pub pitch: u64,
    /// Bytes from one row to the next in the buffer.
    pub buffer_pitch: u64,
}

impl Mapping {
    /// `size` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range outside of the mapping.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        Invalid::check_inside("take a part of a mapping", offset, size, self.size())?;
        let (device, mapping) = (self.inner.block.device.clone(), std::slice::from_ref(&self.inner));
        Ok(Slice { address: self.address() + offset, size, device, cover: Cover::Borrowed(mapping), keeper: None })
    }

    /// Copies a buffer into the memory at `offset`. Returns when it is done.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], before anything is copied, for a range outside of the mapping;
    /// [`Error::Refused`] if the kernel or the device could not copy: some bytes may have been
    /// copied then.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.slice(offset, from.len() as u64)?.write(from)
    }

    /// Copies the memory at `offset` into a buffer.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.slice(offset, to.len() as u64)?.read(to)
    }

    /// Sets `size` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    #[doc(alias = "aclrtMemset")]
    #[doc(alias = "cuMemsetD8")]
    #[doc(alias = "cudaMemset")]
    pub fn fill(&self, offset: u64, size: u64, value: u8) -> Result<()> {
        self.slice(offset, size)?.fill(value)
    }
}

impl Reservation {
    /// `size` bytes at `offset`, all of which must be mapped, by any number of mappings. They
    /// cannot be unmapped while the slice lives.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range outside of the reservation, or with a hole.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        Invalid::check_inside("take a part of a reservation", offset, size, self.size())?;
        let session = &self.inner.session;
        slice_of(session, self.address() + offset, size, |address| lock(&session.mappings).find(address))
    }
}

impl Session {
    /// `size` bytes at an address, all of which must be mapped, in one reservation. They cannot be
    /// unmapped while the slice lives.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range that has a hole or lies in two reservations.
    pub fn slice_at(&self, address: u64, size: u64) -> Result<Slice<'static>> {
        slice_of(&self.inner, address, size, |address| lock(&self.inner.mappings).find(address))
    }
}

/// `size` bytes at an address. `find` returns the mapping that contains an address.
pub(crate) fn slice_of(
    session: &Arc<Live<SessionInner>>,
    address: u64,
    size: u64,
    find: impl Fn(u64) -> Option<Arc<Live<Mapped>>>,
) -> Result<Slice<'static>> {
    const OPERATION: &str = "take a part of mapped memory";
    session.check_process()?;
    if size == 0 {
        let device = DeviceInner::host(session);
        return Ok(Slice { address, size, device, cover: Cover::Borrowed(&[]), keeper: None });
    }
    let find = |at: u64| {
        find(at).ok_or_else(|| {
            let problem = format!("not all of {address:#x} with {} is mapped", Bytes(size));
            Invalid::because(OPERATION, problem, "Map all of it first.")
        })
    };
    let first = find(address)?;
    let (device, mut covered) = (first.block.device.clone(), first.after());
    if size <= covered - address {
        return Ok(Slice { address, size, device, cover: Cover::One(first), keeper: None });
    }
    let mut all = vec![first];
    while covered - address < size {
        let next = find(covered)?;
        if !next.is_beside(&all[0]) {
            return Err(Invalid::because(
                OPERATION,
                format!("{address:#x} with {} lies in more than one reservation", Bytes(size)),
                "Take a part of each: the driver copies inside of one reservation.",
            ));
        }
        covered = next.after();
        all.push(next);
    }
    Ok(Slice { address, size, device, cover: Cover::Several(all), keeper: None })
}

impl NamedMemory {
    /// `size` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range outside of the memory.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        Invalid::check_inside("take a part of named memory", offset, size, self.size())?;
        let (address, device) = (self.address() + offset, self.inner.device.clone());
        Ok(Slice { address, size, device, cover: Cover::Borrowed(&[]), keeper: None })
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
    /// [`Error::Invalid`] for a range outside of the slice.
    pub fn part(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        Invalid::check_inside("take a part of a slice", offset, size, self.size)?;
        let address = self.address + offset;
        let (first, last) = (self.index_of(address), self.index_of((address + size).saturating_sub(1)));
        let cover = Cover::Borrowed(self.mappings().get(first..=last).unwrap_or_default());
        Ok(Slice { address, size, device: self.device.clone(), cover, keeper: self.keeper.clone() })
    }

    /// The mappings that it covers: none for named memory, and for no bytes.
    pub(crate) fn mappings(&self) -> &[Arc<Live<Mapped>>] {
        match &self.cover {
            Cover::Borrowed(all) => all,
            Cover::One(mapped) => std::slice::from_ref(mapped),
            Cover::Several(all) => all,
        }
    }

    /// The index of the mapping that contains an address.
    fn index_of(&self, address: u64) -> usize {
        self.mappings().partition_point(|mapped| mapped.address <= address).saturating_sub(1)
    }

    /// The memory of its first mapping. The others are of the same device, and imported if the
    /// first is, because they are in one reservation; imports may be of different exporters.
    fn block(&self) -> Option<&PhysicalBlock> {
        self.mappings().first().map(|mapped| &**mapped.block)
    }

    /// The device whose batches it can be in. The driver refuses batches of host memory, of imports
    /// and of nothing.
    fn batched_on(&self) -> Option<&Live<DeviceInner>> {
        let block = self.block()?;
        (self.size != 0 && !block.is_imported() && !block.device.is_host()).then_some(&*block.device)
    }

    /// Bytes from an offset to the end of the mapping that contains it, or of the slice.
    fn to_border(&self, offset: u64) -> u64 {
        let (address, left) = (self.address + offset, self.size - offset);
        let next = self.mappings().get(self.index_of(address) + 1);
        next.map_or(left, |next| left.min(next.address - address))
    }

    /// True if a command must stay inside of one mapping, because the memory is imported: the
    /// driver would copy all of it with the DMA engine of the first mapping's exporter, and fill
    /// beyond the first mapping in that one's share.
    fn is_split(&self) -> bool {
        self.mappings().len() > 1 && self.block().is_some_and(|block| block.is_imported())
    }

    /// The bytes that one synchronous command takes at an offset.
    fn at_once(&self, offset: u64) -> u64 {
        if self.is_split() { self.to_border(offset) } else { self.size - offset }
    }

    /// Drops `keeper` when this slice, its parts and the copies that they began are over.
    pub(crate) fn keep(&mut self, keeper: Keeper) {
        self.keeper = Some(keeper);
    }

    /// True for named memory and for no bytes, which no mapping keeps: they are copied at once.
    fn has_no_mapping(&self) -> bool {
        self.mappings().is_empty()
    }

    fn svm(&self) -> &Svm {
        &self.device.session.svm
    }

    fn is_host(&self) -> bool {
        self.device.is_host()
    }

    /// True if the device copies into it asynchronously. The CPU copies host memory, and named
    /// memory is copied at once.
    pub(crate) fn is_copied_by_device(&self) -> bool {
        !self.is_host() && !self.has_no_mapping()
    }

    /// The address as the CPU's pointer. For host memory only, which is always mapped for the CPU.
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
        let from = from.as_ptr().expose_provenance() as u64;
        // SAFETY: the slice is mapped while it lives, and `from` is borrowed.
        unsafe { self.memcpy(OPERATION, (self.address, from), |done| self.at_once(done), &[Direction::HostToDevice]) }
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
        let to = to.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the slice is mapped while it lives, and `to` is exclusively borrowed.
        unsafe { self.memcpy(OPERATION, (to, self.address), |done| self.at_once(done), &[Direction::DeviceToHost]) }
    }

    /// Copies other mapped memory of the same size into this. The two must not overlap.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    #[doc(alias = "aclrtMemcpy")]
    #[doc(alias = "cuMemcpy")]
    #[doc(alias = "cudaMemcpy")]
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
        let piece = |done: u64| self.at_once(done).min(from.at_once(done));
        let directions = [Direction::HostToDevice, Direction::DeviceToHost, Direction::DeviceToDevice];
        // SAFETY: both slices are mapped while they live.
        unsafe { self.memcpy(OPERATION, (self.address, from.address), piece, &directions) }
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
        let (svm, device) = (self.svm(), self.device.id);
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
    #[doc(alias = "cuMemcpy2D")]
    #[doc(alias = "cudaMemcpy2D")]
    pub fn write_rows(&self, rows: &Rows, from: &[u8]) -> Result<()> {
        self.check_rows(rows, from.len() as u64)?;
        if self.is_host() || self.is_split() {
            return rows.each(|memory, buffer| self.part(memory, rows.width)?.write(&from[buffer]));
        }
        // SAFETY: `check_rows` made sure that every row is inside the slice, which is mapped while
        // it lives, and inside the buffer, which is borrowed.
        unsafe { self.memcpy2d(rows, from.as_ptr().expose_provenance() as u64, Direction::HostToDevice) }
    }

    /// Copies rows of the memory into a buffer.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::write`].
    pub fn read_rows(&self, rows: &Rows, to: &mut [u8]) -> Result<()> {
        self.check_rows(rows, to.len() as u64)?;
        if self.is_host() || self.is_split() {
            return rows.each(|memory, buffer| self.part(memory, rows.width)?.read(&mut to[buffer]));
        }
        // SAFETY: as for writing, and the buffer is exclusively borrowed.
        unsafe { self.memcpy2d(rows, to.as_mut_ptr().expose_provenance() as u64, Direction::DeviceToHost) }
    }

    /// Copies all of the slice between two addresses, of which one is its own, piece by piece:
    /// `piece` returns the size of the one at an offset. A copy of nothing, which the kernel
    /// refuses, is no command. Fails if the kernel detects another direction than these.
    ///
    /// # Safety
    ///
    /// As for [`Svm::memcpy`](crate::driver::svm::Svm::memcpy).
    unsafe fn memcpy(
        &self,
        operation: &'static str,
        (destination, source): (u64, u64),
        piece: impl Fn(u64) -> u64,
        directions: &[Direction],
    ) -> Result<()> {
        let mut done = 0;
        while done < self.size {
            let size = piece(done);
            // SAFETY: the caller vouches for the addresses.
            let copied = unsafe { self.svm().memcpy(self.device.id, destination + done, source + done, size) };
            let direction = copied.map_err(|refused| self.failed(refused, operation, self.address + done, size))?;
            if !directions.contains(&direction) {
                return Err(not_done(operation, direction));
            }
            done += size;
        }
        Ok(())
    }

    /// One MEMCPY2D between the slice and a buffer.
    ///
    /// # Safety
    ///
    /// All rows must be inside of the slice and of the buffer, which must be valid for the
    /// direction.
    unsafe fn memcpy2d(&self, rows: &Rows, buffer: u64, direction: Direction) -> Result<()> {
        if rows.width == 0 || rows.height == 0 {
            return Ok(());
        }
        let (memory, buffer) = ((self.address, rows.pitch), (buffer, rows.buffer_pitch));
        let (to, from) = if direction == Direction::HostToDevice { (memory, buffer) } else { (buffer, memory) };
        // SAFETY: the caller vouches for the addresses.
        let copied = unsafe { self.svm().memcpy2d(self.device.id, to, from, (rows.width, rows.height), direction) };
        copied.map_err(|refused| self.failed(refused, "copy rows", self.address, self.size))
    }

    /// Checks, before every copy and fill, that this is the right process (a child has nothing
    /// mapped here) and that the driver can copy such memory.
    fn check_copy(&self, operation: &'static str) -> Result<()> {
        self.device.session.check_process()?;
        match self.mappings().iter().find(|mapped| mapped.block.is_host_memory_on_a_device()) {
            None => Ok(()),
            Some(mapped) => Err(Invalid::because(
                operation,
                format!(
                    "{} is host memory, and the driver copies no host memory that a device imported",
                    mapped.block.describe()
                ),
                "Import it on the host as well and use that mapping for copies; the device itself can use this one.",
            )),
        }
    }

    /// Checks before every copy that it is possible and that the sizes agree.
    fn same_size(&self, operation: &'static str, other: u64) -> Result<()> {
        self.check_copy(operation)?;
        if self.size == other {
            return Ok(());
        }
        let problem = format!("{} and {} are not the same", Bytes(self.size), Bytes(other));
        Err(Invalid::because(operation, problem, "Both sides of a copy must have the same size."))
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
        self.device.failed(refused, operation, arguments)
    }
}

impl Rows {
    /// Calls `copy` with the offset of each row in the memory and its range in the buffer.
    fn each(&self, mut copy: impl FnMut(u64, Range<usize>) -> Result<()>) -> Result<()> {
        // Any number of rows without bytes fits anywhere.
        let height = if self.width == 0 { 0 } else { self.height };
        (0..height).try_for_each(|index| {
            let start = index * self.buffer_pitch;
            copy(index * self.pitch, start as usize..(start + self.width) as usize)
        })
    }
}

/// Copies many buffers to many places, with one command per 4096 of a device. Each buffer has the
/// size of its slice.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::copy::{read_batch, write_batch};
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// let mapping = session.reserve(2 << 20)?.map(0, &memory)?;
/// write_batch(&[(mapping.slice(0, 3)?, b"one"), (mapping.slice(4096, 3)?, b"two")])?;
/// let mut back = [0; 3];
/// read_batch(&mut [(mapping.slice(4096, 3)?, &mut back)])?;
/// assert_eq!(&back, b"two");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Those of [`Mapping::write`]; some of the buffers may have been copied.
#[doc(alias = "aclrtMemcpyBatch")]
pub fn write_batch(copies: &[(Slice<'_>, &[u8])]) -> Result<()> {
    let mut batches = Batches { operation: "copy a batch to a device", batches: BTreeMap::new() };
    let mut alone = Vec::new();
    for (to, from) in copies {
        let buffer = from.as_ptr().expose_provenance() as u64;
        if !batches.add(to, to.address, buffer, from.len() as u64)? {
            alone.push((to, from));
        }
    }
    alone.into_iter().try_for_each(|(to, from)| to.write(from))?;
    // SAFETY: the slices are mapped while they live, and the buffers are borrowed.
    unsafe { batches.send() }
}

/// Copies from many places into many buffers, as [`write_batch`] does in the other direction.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::copy::read_batch;
/// use ascend_vmm::{LogicalId, Session};
///
/// let memory = Session::open()?.device(LogicalId(0))?.create(2 << 20)?;
/// let mapping = memory.session().reserve(2 << 20)?.map(0, &memory)?;
/// mapping.write(0, b"one, two")?;
/// let (mut first, mut second) = ([0; 3], [0; 3]);
/// read_batch(&mut [(mapping.slice(0, 3)?, &mut first), (mapping.slice(5, 3)?, &mut second)])?;
/// assert_eq!((&first, &second), (b"one", b"two"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Those of [`Mapping::write`]; some of the buffers may have been copied.
pub fn read_batch(copies: &mut [(Slice<'_>, &mut [u8])]) -> Result<()> {
    let mut batches = Batches { operation: "copy a batch from a device", batches: BTreeMap::new() };
    let mut alone = Vec::new();
    for (from, to) in copies {
        let from = &*from;
        let (buffer, size) = (to.as_mut_ptr().expose_provenance() as u64, to.len() as u64);
        if !batches.add(from, buffer, from.address, size)? {
            alone.push((from, to));
        }
    }
    alone.into_iter().try_for_each(|(from, to)| from.read(to))?;
    // SAFETY: the slices are mapped while they live, and the buffers are borrowed exclusively.
    unsafe { batches.send() }
}

/// Checked copies, by their devices.
struct Batches<'a> {
    operation: &'static str,
    batches: BTreeMap<u32, Batch<'a>>,
}

/// Copies of one device as the kernel takes them: three arrays.
struct Batch<'a> {
    device: &'a Live<DeviceInner>,
    destinations: Vec<u64>,
    sources: Vec<u64>,
    sizes: Vec<u64>,
}

impl<'a> Batches<'a> {
    /// Checks a copy of `size` bytes to or from a slice, and adds it. False if the slice cannot be
    /// in a batch, and must be copied alone.
    fn add(&mut self, slice: &'a Slice<'_>, destination: u64, source: u64, size: u64) -> Result<bool> {
        slice.same_size(self.operation, size)?;
        let Some(device) = slice.batched_on() else { return Ok(false) };
        let batch = self.batches.entry(device.id).or_insert_with(|| Batch {
            device,
            destinations: Vec::new(),
            sources: Vec::new(),
            sizes: Vec::new(),
        });
        batch.destinations.push(destination);
        batch.sources.push(source);
        batch.sizes.push(size);
        Ok(true)
    }

    /// Sends one command for each 4096 copies of a device.
    ///
    /// # Safety
    ///
    /// The slices must be mapped, and the buffers valid, for writes if they are the destination.
    unsafe fn send(self) -> Result<()> {
        let most = BATCH as usize;
        for Batch { device, destinations, sources, sizes } in self.batches.values() {
            let chunks = destinations.chunks(most).zip(sources.chunks(most)).zip(sizes.chunks(most));
            for ((destinations, sources), sizes) in chunks {
                // SAFETY: the caller vouches for the addresses.
                let sent = unsafe { device.session.svm.memcpy_batch(device.id, destinations, sources, sizes) };
                sent.map_err(|refused| {
                    let arguments = format!("{} copies, {}", sizes.len(), Bytes(sizes.iter().sum()));
                    device.failed(refused, self.operation, arguments)
                })?;
            }
        }
        Ok(())
    }
}

/// The kernel reported success but the wrong direction.
fn not_done(operation: &'static str, direction: Direction) -> Error {
    Invalid::because(
        operation,
        format!("the driver took it for a copy of direction {direction:?} and may have done nothing"),
        "This should not happen: the driver and this library disagree on whose memory it is.",
    )
}
