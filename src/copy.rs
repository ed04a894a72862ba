//! Copies and fills.
//!
//! MEMCPY finds out by itself which side is a device's. Three of its habits need care: host to host is answered with success and *not
//! done*, and so is a fill of host memory, so those are done here, by the CPU; and the end of a range is checked only if the range
//! starts where a mapping does, so a [`Slice`] is checked to be mapped from end to end before the kernel sees it, and keeps what it
//! covers mapped for as long as it lives. Copies are synchronous, except those of [`Pending`].
//!
//! Directions: host to and from device memory; device to device on one or across two devices of this process (imported memory not on
//! its own importing device, says the driver); rows with a pitch and batches between host and device.

mod asynchronous;

pub use asynchronous::Pending;

use crate::error::{Errno, Error, Invalid, Result, bytes};
use crate::mapping::{Hold, Mapped, Mapping, copy_in, copy_out, fill};
use crate::reserve::Reservation;
use crate::session::call::{MEMCPY, MEMCPY_2D, MEMCPY_BATCH, MEMSET, Request};
use ascend_ioctl::svm::{
    BATCH, COPY_DETECT, COPY_DEVICE_TO_HOST, COPY_HOST_TO_DEVICE, COPY_HOST_TO_HOST, Memcpy, Memcpy2d, MemcpyBatch,
    Memset,
};

/// Mapped memory from an address on, inside one reservation: what a copy reads or writes.
#[derive(Debug)]
pub struct Slice<'a> {
    address: u64,
    size: u64,
    cover: Cover<'a>,
}

/// What keeps a slice mapped.
#[derive(Debug)]
enum Cover<'a> {
    /// A part of one mapping, which is borrowed.
    One(&'a Mapping),
    /// Several, or one that is found by its address. Never empty.
    Several(Hold, #[expect(dead_code, reason = "held, not read")] Vec<Hold>),
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
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        check("take a part of a mapping", offset, size, self.size())?;
        Ok(Slice { address: self.address() + offset, size, cover: Cover::One(self) })
    }

    /// Copies a buffer into the memory, from `offset` on. Returns when it is done.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`], before anything is copied, for what lies outside of the mapping; [`Error::Refused`] if the kernel or the device could not copy, and then
    /// some of it may have been.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.slice(offset, from.len() as u64)?.write(from)
    }

    /// Copies memory, from `offset` on, into a buffer. Errors are those of [`Mapping::write`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.slice(offset, to.len() as u64)?.read(to)
    }

    /// Sets `size` bytes from `offset` on. Errors are those of [`Mapping::write`].
    #[doc(alias = "aclrtMemset")]
    pub fn fill(&self, offset: u64, size: u64, value: u8) -> Result<()> {
        self.slice(offset, size)?.fill(value)
    }
}

impl Reservation {
    /// `size` bytes from `offset` on, all of which must be mapped, by however many mappings. They cannot be unmapped while it lives.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        check("take a part of a reservation", offset, size, self.size())?;
        let address = self.address() + offset;
        // An empty slice is at the byte that follows it, if there is one.
        let end = address + size.max(1);
        let session = &self.inner.session;
        session.svm.check_process()?;
        let mut holds = session.mappings.cover(address, end).unwrap_or_default().into_iter();
        let Some(first) = holds.next() else { return Err(hole(address, size)) };
        Ok(Slice { address, size, cover: Cover::Several(first, holds.collect()) })
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

    /// The mapping that it begins in. All of them are of one device, as all of a reservation are.
    fn mapped(&self) -> &Mapped {
        match &self.cover {
            Cover::One(mapping) => &mapping.inner,
            Cover::Several(first, _) => first.mapped(),
        }
    }

    fn is_host(&self) -> bool {
        self.mapped().block.is_host()
    }

    /// The memory as the CPU sees it; only for host memory, which is mapped for the CPU from the start.
    fn pointer(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    /// Copies a buffer of the same size into the memory.
    pub fn write(&self, from: &[u8]) -> Result<()> {
        self.same_size("copy to mapped memory", from.len() as u64)?;
        if self.is_host() {
            // SAFETY: host memory of this slice's range, which is mapped while the slice lives.
            unsafe { copy_in(self.pointer(), from) };
            return Ok(());
        }
        match self.memcpy("copy to a device", self.address, from.as_ptr().expose_provenance() as u64, self.size)? {
            COPY_HOST_TO_DEVICE => Ok(()),
            direction => Err(not_done("copy to a device", direction)),
        }
    }

    /// Copies the memory into a buffer of the same size.
    pub fn read(&self, to: &mut [u8]) -> Result<()> {
        self.same_size("copy from mapped memory", to.len() as u64)?;
        if self.is_host() {
            // SAFETY: host memory of this slice's range, which is mapped while the slice lives.
            unsafe { copy_out(self.pointer(), to) };
            return Ok(());
        }
        match self.memcpy("copy from a device", to.as_mut_ptr().expose_provenance() as u64, self.address, self.size)? {
            COPY_DEVICE_TO_HOST => Ok(()),
            direction => Err(not_done("copy from a device", direction)),
        }
    }

    /// Copies other mapped memory of the same size into this. The two must not overlap.
    #[doc(alias = "aclrtMemcpy")]
    pub fn copy_from(&self, from: &Slice<'_>) -> Result<()> {
        const OPERATION: &str = "copy between mapped memory";
        self.same_size(OPERATION, from.size)?;
        // A child of fork may have a session of its own, and slices of its parent's.
        from.mapped().session().svm.check_process()?;
        if self.address < from.address + from.size && from.address < self.address + self.size {
            return Err(Invalid::because(
                OPERATION,
                format!("{:#x} and {:#x} with {} overlap", self.address, from.address, bytes(self.size)),
                "copy by way of a buffer",
            ));
        }
        if self.is_host() && from.is_host() {
            let mut buffer = [0; 4096];
            let mut done = 0;
            while done < self.size as usize {
                let piece = buffer.len().min(self.size as usize - done);
                // SAFETY: parts of the two slices, which are host memory and mapped while they live.
                unsafe {
                    copy_out(from.pointer().wrapping_add(done), &mut buffer[..piece]);
                    copy_in(self.pointer().wrapping_add(done), &buffer[..piece]);
                }
                done += piece;
            }
            return Ok(());
        }
        match self.memcpy(OPERATION, self.address, from.address, self.size)? {
            COPY_HOST_TO_HOST if self.size > 0 => Err(not_done(OPERATION, COPY_HOST_TO_HOST)),
            _ => Ok(()),
        }
    }

    /// Sets all bytes.
    pub fn fill(&self, value: u8) -> Result<()> {
        const OPERATION: &str = "fill mapped memory";
        let svm = &self.mapped().session().svm;
        svm.check_process()?;
        if self.size == 0 {
            return Ok(());
        }
        if self.is_host() {
            // SAFETY: host memory of this slice's range, which is mapped while the slice lives.
            unsafe { fill(self.pointer(), self.size as usize, value) };
            return Ok(());
        }
        let memset =
            Memset { destination: self.address, value: u64::from(value), size: self.size, ..Default::default() };
        match svm.call(MEMSET, self.mapped().block.device.id, self.size, &memset) {
            Ok(answer) if answer.host_mapped == 0 => Ok(()),
            Ok(_) => Err(not_done(OPERATION, COPY_HOST_TO_HOST)),
            Err(errno) => Err(self.failed(OPERATION, MEMSET, errno)),
        }
    }

    /// Copies rows of a buffer into the memory. Rows of the slice begin at its start.
    #[doc(alias = "aclrtMemcpy2d")]
    pub fn write_rows(&self, rows: &Rows, from: &[u8]) -> Result<()> {
        self.check_rows(rows, from.len() as u64)?;
        if self.is_host() {
            return rows.each(|memory, buffer, width| {
                // SAFETY: `check_rows` made sure that every row is inside the slice, which is mapped host memory.
                unsafe { copy_in(self.pointer().wrapping_add(memory), &from[buffer..buffer + width]) };
            });
        }
        self.memcpy_2d(&Memcpy2d {
            destination: self.address,
            source: from.as_ptr().expose_provenance() as u64,
            destination_pitch: rows.pitch,
            source_pitch: rows.buffer_pitch,
            width: rows.width,
            height: rows.height,
            direction: COPY_HOST_TO_DEVICE,
            ..Default::default()
        })
    }

    /// Copies rows of the memory into a buffer.
    pub fn read_rows(&self, rows: &Rows, to: &mut [u8]) -> Result<()> {
        self.check_rows(rows, to.len() as u64)?;
        if self.is_host() {
            return rows.each(|memory, buffer, width| {
                // SAFETY: `check_rows` made sure that every row is inside the slice, which is mapped host memory.
                unsafe { copy_out(self.pointer().wrapping_add(memory), &mut to[buffer..buffer + width]) };
            });
        }
        self.memcpy_2d(&Memcpy2d {
            destination: to.as_mut_ptr().expose_provenance() as u64,
            source: self.address,
            destination_pitch: rows.buffer_pitch,
            source_pitch: rows.pitch,
            width: rows.width,
            height: rows.height,
            direction: COPY_DEVICE_TO_HOST,
            ..Default::default()
        })
    }

    /// One MEMCPY, and the direction that it took. The buffer's and the slice's ranges are the callers' to vouch for.
    fn memcpy(&self, operation: &'static str, destination: u64, source: u64, size: u64) -> Result<u32> {
        let svm = &self.mapped().session().svm;
        if size == 0 {
            // The kernel refuses it; there is nothing to do.
            return Ok(if destination == self.address { COPY_HOST_TO_DEVICE } else { COPY_DEVICE_TO_HOST });
        }
        let memcpy = Memcpy { destination, source, size, direction: COPY_DETECT, ..Default::default() };
        match svm.call(MEMCPY, self.mapped().block.device.id, size, &memcpy) {
            Ok(answer) => Ok(answer.direction),
            Err(errno) => Err(self.failed(operation, MEMCPY, errno)),
        }
    }

    fn memcpy_2d(&self, copy: &Memcpy2d) -> Result<()> {
        let svm = &self.mapped().session().svm;
        if copy.width == 0 || copy.height == 0 {
            return Ok(());
        }
        match svm.call(MEMCPY_2D, self.mapped().block.device.id, copy.width * copy.height, copy) {
            Ok(_) => Ok(()),
            Err(errno) => Err(self.failed("copy rows", MEMCPY_2D, errno)),
        }
    }

    /// Before every copy: this is the right process (a child has nothing mapped here), and the sizes agree.
    fn same_size(&self, operation: &'static str, other: u64) -> Result<()> {
        self.mapped().session().svm.check_process()?;
        if self.size == other {
            return Ok(());
        }
        let problem = format!("{} and {} are not the same", bytes(self.size), bytes(other));
        Err(Invalid::because(operation, problem, "both sides of a copy must have the same size"))
    }

    fn check_rows(&self, rows: &Rows, buffer: u64) -> Result<()> {
        self.mapped().session().svm.check_process()?;
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
            format!("{rows:?} do not fit in {} of memory and a buffer of {}", bytes(self.size), bytes(buffer)),
            "pitches are at least the width, and all rows must be inside",
        ))
    }

    #[cold]
    fn failed(&self, operation: &'static str, request: Request, errno: Errno) -> Error {
        let arguments = format!("address {:#x}, size {}", self.address, bytes(self.size));
        self.mapped().block.device.failed(operation, request, errno, arguments)
    }
}

impl Rows {
    /// Calls with the offsets of each row in the memory and in the buffer, and its width.
    fn each(&self, mut row: impl FnMut(usize, usize, usize)) -> Result<()> {
        if self.width == 0 {
            // Any number of such rows fits anywhere.
            return Ok(());
        }
        for index in 0..self.height {
            row((index * self.pitch) as usize, (index * self.buffer_pitch) as usize, self.width as usize);
        }
        Ok(())
    }
}

/// Copies many buffers to many places, with one command per 4096 of a device. Each buffer has the size of its slice. On an error some
/// may have been copied.
#[doc(alias = "aclrtMemcpyBatch")]
pub fn write_batch(copies: &[(Slice<'_>, &[u8])]) -> Result<()> {
    let elements = copies.iter().map(|(to, from)| Element {
        slice: to,
        destination: to.address,
        source: from.as_ptr().expose_provenance() as u64,
        buffer: from.len() as u64,
    });
    let single = |index: usize| {
        let (to, from) = &copies[index];
        to.write(from)
    };
    batch("copy a batch to a device", elements.collect(), single)
}

/// Copies from many places into many buffers, with one command per 4096 of a device. Each buffer has the size of its slice. On an
/// error some may have been copied.
pub fn read_batch(copies: &mut [(Slice<'_>, &mut [u8])]) -> Result<()> {
    let mut elements = Vec::with_capacity(copies.len());
    for (from, to) in copies.iter_mut() {
        let destination = to.as_mut_ptr().expose_provenance() as u64;
        elements.push(Element { slice: from, destination, source: from.address, buffer: to.len() as u64 });
    }
    // Those that cannot be in a batch are copied first, one by one, as the elements do not keep the buffers borrowed.
    let mut alone = Vec::new();
    batch("copy a batch from a device", elements, |index| {
        alone.push(index);
        Ok(())
    })?;
    alone.into_iter().try_for_each(|index| {
        let (from, to) = &mut copies[index];
        from.read(to)
    })
}

/// A copy of a batch.
struct Element<'a> {
    slice: &'a Slice<'a>,
    destination: u64,
    source: u64,
    buffer: u64,
}

/// Does those of the copies that can be in a batch, and hands the others to `single`: the driver takes no host memory and no imports.
fn batch(
    operation: &'static str,
    elements: Vec<Element<'_>>,
    mut single: impl FnMut(usize) -> Result<()>,
) -> Result<()> {
    for element in &elements {
        element.slice.same_size(operation, element.buffer)?;
    }
    let mut batched: Vec<&Element<'_>> = Vec::with_capacity(elements.len());
    for (index, element) in elements.iter().enumerate() {
        let block = &element.slice.mapped().block;
        if block.is_host() || block.imported || element.slice.size == 0 {
            single(index)?;
        } else {
            batched.push(element);
        }
    }
    batched.sort_by_key(|element| element.slice.mapped().block.device.id);
    let one_device =
        |a: &&Element<'_>, b: &&Element<'_>| a.slice.mapped().block.device.id == b.slice.mapped().block.device.id;
    for elements in batched.chunk_by(one_device).flat_map(|elements| elements.chunks(BATCH as usize)) {
        let slice = elements[0].slice;
        let svm = &slice.mapped().session().svm;
        let mut destinations: Vec<u64> = elements.iter().map(|element| element.destination).collect();
        let mut sources: Vec<u64> = elements.iter().map(|element| element.source).collect();
        let mut sizes: Vec<u64> = elements.iter().map(|element| element.buffer).collect();
        let copy = MemcpyBatch {
            destinations: destinations.as_mut_ptr().expose_provenance() as u64,
            sources: sources.as_mut_ptr().expose_provenance() as u64,
            sizes: sizes.as_mut_ptr().expose_provenance() as u64,
            count: elements.len() as u32,
            ..Default::default()
        };
        let total = sizes.iter().sum();
        if let Err(errno) = svm.call(MEMCPY_BATCH, slice.mapped().block.device.id, total, &copy) {
            let arguments = format!("{} copies, {}", elements.len(), bytes(total));
            return Err(slice.mapped().block.device.failed(operation, MEMCPY_BATCH, errno, arguments));
        }
    }
    Ok(())
}

fn check(operation: &'static str, offset: u64, size: u64, whole: u64) -> Result<()> {
    if offset <= whole && size <= whole - offset {
        return Ok(());
    }
    let problem = format!("{} at offset {offset:#x} are not inside of {}", bytes(size), bytes(whole));
    Err(Invalid::because(operation, problem, "stay inside"))
}

#[cold]
fn hole(address: u64, size: u64) -> Error {
    Invalid::because(
        "take a part of a reservation",
        format!("not all of {address:#x} with {} is mapped", bytes(size)),
        "map all of it first",
    )
}

/// The kernel says that it did it, but also that it did not.
#[cold]
fn not_done(operation: &'static str, direction: u32) -> Error {
    Invalid::because(
        operation,
        format!("the driver took it for a copy of direction {direction} and may have done nothing"),
        "this should not happen: the driver and this library disagree on whose memory it is",
    )
}
