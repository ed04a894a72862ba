//! Copies and fills, between any two addresses.
//!
//! The two addresses decide how a copy is done, as in the vendor's library: the kind that the
//! program passes is checked and otherwise ignored. The CPU copies between host addresses; the
//! driver copies everything else, over as many mappings as the range covers. A copy on a stream
//! runs in the background if the library knows all of its host memory, and in the call otherwise.

use crate::border::{Address, In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::Handle;
use crate::host::{self, Pages};
use crate::physical::Location;
use crate::stream::{self, Task};
use crate::{context, ipc, malloc, process};
use ascend_vmm::copy::{Rows, Slice, read_batch, write_batch};
use ascend_vmm::{Error, ReserveOptions};
use std::sync::Arc;

/// Whether an address is in the driver's range.
pub(crate) fn is_drivers(address: u64) -> bool {
    ReserveOptions::ADDRESSES.contains(&address)
}

/// Where an address lies.
#[derive(Debug, Clone)]
enum Side {
    /// In the driver's range.
    Device,
    /// In host memory that the library knows, with the pages that it allocated.
    Known(#[expect(dead_code, reason = "held, not read")] Option<Arc<Pages>>),
    /// Anywhere else.
    Unknown,
}

impl Side {
    fn of(address: u64, size: u64) -> Side {
        if is_drivers(address) {
            return Side::Device;
        }
        host::find(address, size).map_or(Side::Unknown, Side::Known)
    }

    fn is_device(&self) -> bool {
        matches!(self, Side::Device)
    }
}

/// Bytes at a host address, to be read.
///
/// # Safety
///
/// The caller of the C function passes memory of this size, which no thread writes meanwhile.
unsafe fn bytes<'a>(address: u64, size: usize) -> &'a [u8] {
    // SAFETY: by contract. The address comes from C, which has no provenance.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address as usize), size) }
}

/// Bytes at a host address, to be written.
///
/// # Safety
///
/// The caller of the C function passes memory of this size, which no thread uses meanwhile.
unsafe fn bytes_mut<'a>(address: u64, size: usize) -> &'a mut [u8] {
    // SAFETY: as for `bytes`.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address as usize), size) }
}

/// Calls `act` with a range of the driver's memory.
fn with_slice<R>(address: u64, size: u64, act: impl FnOnce(&Slice<'_>) -> Outcome<R>) -> Outcome<R> {
    if let Some((memory, offset)) = ipc::imported_at(address) {
        return act(&memory.slice(offset, size).map_err(Fault::driver)?);
    }
    act(&process::session()?.slice_at(address, size).map_err(Fault::driver)?)
}

/// Copies to the driver's memory from the host's.
///
/// # Safety
///
/// The caller of the C function passes host memory of this size, which no thread writes meanwhile.
unsafe fn write(to: u64, from: u64, size: usize) -> Outcome {
    // SAFETY: by contract.
    with_slice(to, size as u64, |slice| Ok(slice.write(unsafe { bytes(from, size) })?))
}

/// Copies to the host's memory from the driver's.
///
/// # Safety
///
/// The caller of the C function passes host memory of this size, which no thread uses meanwhile.
unsafe fn read(to: u64, from: u64, size: usize) -> Outcome {
    // SAFETY: by contract.
    with_slice(from, size as u64, |slice| Ok(slice.read(unsafe { bytes_mut(to, size) })?))
}

/// Copies, whatever the two sides are.
pub(crate) fn copy(to: u64, from: u64, size: usize) -> Outcome {
    check_range(to, size)?;
    check_range(from, size)?;
    match (is_drivers(to), is_drivers(from)) {
        (false, false) => {
            let (to, from) = (to as usize, from as usize);
            // SAFETY: the caller of the C function passes memory of this size on both sides. They
            // may overlap.
            unsafe {
                let from: *const u8 = std::ptr::with_exposed_provenance(from);
                std::ptr::copy(from, std::ptr::with_exposed_provenance_mut(to), size);
            }
            Ok(())
        }
        // SAFETY: the caller of the C function passes host memory of this size.
        (true, false) => unsafe { write(to, from, size) },
        // SAFETY: the caller of the C function passes host memory of this size.
        (false, true) => unsafe { read(to, from, size) },
        (true, true) => with_slice(to, size as u64, |to| with_slice(from, size as u64, |from| between(to, from))),
    }
}

/// Refuses a range that wraps around or is larger than any object can be.
fn check_range(address: u64, size: usize) -> Outcome {
    let fits = size <= isize::MAX as usize && address.checked_add(size as u64).is_some();
    if fits { Ok(()) } else { Err(beyond(address, size)) }
}

fn beyond(address: u64, size: usize) -> Box<Fault> {
    refused(format!("{size} bytes at {address:#x} reach beyond the last address."))
}

/// Copies between devices. What the driver cannot do goes through the host: within one device if
/// one side is imported, and if the two overlap.
fn between(to: &Slice<'_>, from: &Slice<'_>) -> Outcome {
    match to.copy_from(from) {
        Ok(()) => return Ok(()),
        Err(Error::Refused(_) | Error::Invalid(_)) => {}
        Err(error) => return Err(error.into()),
    }
    const PIECE: u64 = 4 << 20;
    let size = to.size();
    let mut buffer = vec![0; PIECE.min(size) as usize];
    let pieces = size.div_ceil(PIECE);
    for piece in 0..pieces {
        // From the end if the destination begins inside the source.
        let piece = if to.address() > from.address() { pieces - 1 - piece } else { piece };
        let offset = piece * PIECE;
        let buffer = &mut buffer[..PIECE.min(size - offset) as usize];
        let length = buffer.len() as u64;
        with_slice(from.address() + offset, length, |from| Ok(from.read(buffer)?))?;
        with_slice(to.address() + offset, length, |to| Ok(to.write(buffer)?))?;
    }
    Ok(())
}

/// Sets bytes, whatever the memory is.
pub(crate) fn fill(address: u64, size: usize, value: u8) -> Outcome {
    check_range(address, size)?;
    if is_drivers(address) {
        return with_slice(address, size as u64, |slice| Ok(slice.fill(value)?));
    }
    // SAFETY: the caller of the C function passes host memory of this size.
    unsafe { std::ptr::write_bytes(std::ptr::with_exposed_provenance_mut::<u8>(address as usize), value, size) };
    Ok(())
}

/// Sets numbers of 32 bits.
fn fill_numbers(address: u64, count: usize, value: u32) -> Outcome {
    let bytes = value.to_ne_bytes();
    if bytes.iter().all(|&byte| byte == bytes[0]) {
        return fill(address, count * 4, bytes[0]);
    }
    const PIECE: usize = 1 << 18;
    let pattern: Vec<u8> = bytes.iter().copied().cycle().take(PIECE.min(count * 4)).collect();
    let source = pattern.as_ptr().expose_provenance() as u64;
    for offset in (0..count * 4).step_by(PIECE) {
        copy(address + offset as u64, source, PIECE.min(count * 4 - offset))?;
    }
    Ok(())
}

/// Kinds of copies.
const KINDS: u32 = 6;

/// Checks the arguments of a copy, in the vendor's order; `false` if there is nothing to do.
fn begins(to: Address, room: usize, from: Address, size: usize, kind: i32) -> Outcome<bool> {
    if size == 0 {
        return Ok(false);
    }
    to.check("dst")?;
    from.check("src")?;
    if kind as u32 >= KINDS {
        return Err(invalid(format!("{kind} is not a kind of copy. The kinds are 0 to 5.")));
    }
    if size > room {
        return Err(refused(format!("{size} bytes do not fit into destMax, {room}.")));
    }
    Ok(to != from)
}

/// `aclrtMemcpy`.
pub fn memcpy(to: Address, room: usize, from: Address, size: usize, kind: i32) -> Outcome {
    if !begins(to, room, from, size, kind)? {
        return Ok(());
    }
    context::current()?;
    copy(to.0, from.0, size)
}

/// `aclrtMemcpyAsync`.
pub fn memcpy_async(to: Address, room: usize, from: Address, size: usize, kind: i32, stream: Handle) -> Outcome {
    if !begins(to, room, from, size, kind)? {
        return Ok(());
    }
    let stream = stream::find(stream)?;
    check_range(to.0, size)?;
    check_range(from.0, size)?;
    let sides = (Side::of(to.0, size as u64), Side::of(from.0, size as u64));
    check_direction(&sides.0, &sides.1, kind)?;
    run(&stream, sides, move || copy(to.0, from.0, size))
}

/// Refuses what the vendor's library refuses: copies within the host, and a kind in the wrong
/// direction for unknown host memory.
fn check_direction(to: &Side, from: &Side, kind: i32) -> Outcome {
    const TO_DEVICE: [i32; 4] = [1, 3, 4, 5];
    const FROM_DEVICE: [i32; 3] = [2, 3, 4];
    let wrong = || Err(refused(format!("kind {kind} is the wrong direction for these addresses.")));
    match (to, from) {
        (Side::Device, Side::Unknown) if !TO_DEVICE.contains(&kind) => wrong(),
        (Side::Unknown, Side::Device) if !FROM_DEVICE.contains(&kind) => wrong(),
        (Side::Device, _) | (_, Side::Device) => Ok(()),
        _ => Err(unsupported("both are host addresses. Use aclrtMemcpy, or memcpy.")),
    }
}

/// Runs work on a stream: in the background if the library knows the memory, otherwise in this
/// call, after everything before it on the stream.
fn run(stream: &Arc<stream::Stream>, sides: (Side, Side), work: impl FnOnce() -> Outcome + Send + 'static) -> Outcome {
    if matches!(sides, (Side::Unknown, _) | (_, Side::Unknown)) {
        stream.wait(None)?;
        return work();
    }
    stream.push(Task::Work(Box::new(move || {
        // Keeps pages of the library that are freed meanwhile.
        let _kept = sides;
        work()
    })))
}

/// `aclrtMemset`.
pub fn memset(address: Address, room: usize, value: i32, size: usize) -> Outcome {
    if size == 0 {
        return Ok(());
    }
    let address = address.check("devPtr")?;
    check_room(size, room)?;
    context::current()?;
    fill(address, size, value as u8)
}

pub(crate) fn check_room(size: usize, room: usize) -> Outcome {
    if size <= room { Ok(()) } else { Err(refused(format!("{size} bytes do not fit into maxCount, {room}."))) }
}

/// `aclrtMemsetAsync`.
pub fn memset_async(address: Address, room: usize, value: i32, size: usize, stream: Handle) -> Outcome {
    if size == 0 {
        return Ok(());
    }
    let address = address.check("devPtr")?;
    check_room(size, room)?;
    let stream = stream::find(stream)?;
    check_range(address, size)?;
    let side = Side::of(address, size as u64);
    run(&stream, (side, Side::Device), move || fill(address, size, value as u8))
}

/// `aclrtMemsetD32`.
pub fn memset_numbers(address: Address, room: usize, value: u32, count: usize) -> Outcome {
    let Some(address) = numbers(address, room, count)? else { return Ok(()) };
    context::current()?;
    fill_numbers(address, count, value)
}

/// `aclrtMemsetD32Async`.
pub fn memset_numbers_async(address: Address, room: usize, value: u32, count: usize, stream: Handle) -> Outcome {
    let Some(address) = numbers(address, room, count)? else { return Ok(()) };
    let stream = stream::find(stream)?;
    let side = Side::of(address, count as u64 * 4);
    run(&stream, (side, Side::Device), move || fill_numbers(address, count, value))
}

/// Checks numbers of 32 bits; `None` if there are none.
fn numbers(address: Address, room: usize, count: usize) -> Outcome<Option<u64>> {
    if count == 0 {
        return Ok(None);
    }
    let address = address.check("ptr")?;
    let size = count.saturating_mul(4);
    check_room(size, room)?;
    check_range(address, size)?;
    Ok(Some(address))
}

/// Rows of a copy: `aclrtMemcpy2d`.
#[derive(Debug, Clone, Copy)]
struct Rectangle {
    to: u64,
    to_pitch: usize,
    from: u64,
    from_pitch: usize,
    width: usize,
    height: usize,
}

impl Rectangle {
    /// The checks, in the vendor's order; `None` if there is nothing to do.
    fn check(
        (to, to_pitch): (Address, usize),
        (from, from_pitch): (Address, usize),
        (width, height): (usize, usize),
        kind: i32,
    ) -> Outcome<Option<Rectangle>> {
        if width == 0 || height == 0 {
            return Ok(None);
        }
        let (to, from) = (to.check("dst")?, from.check("src")?);
        if width > to_pitch || width > from_pitch {
            return Err(invalid(format!(
                "rows of {width} bytes are wider than the pitches, {to_pitch} and {from_pitch}."
            )));
        }
        if ![1, 2, 4].contains(&kind) {
            return Err(unsupported(format!(
                "kind {kind}: rows are copied from the host to a device (1) or back (2)."
            )));
        }
        let rectangle = Rectangle { to, to_pitch, from, from_pitch, width, height };
        check_range(to, rectangle.length(to_pitch)?)?;
        check_range(from, rectangle.length(from_pitch)?)?;
        Ok(Some(rectangle))
    }

    /// Bytes from the first to the last.
    fn length(&self, pitch: usize) -> Outcome<usize> {
        let length = (self.height - 1).checked_mul(pitch).and_then(|start| start.checked_add(self.width));
        length.ok_or_else(|| refused("the rows reach beyond the last address."))
    }

    fn sides(&self) -> Outcome<(Side, Side)> {
        let to = Side::of(self.to, self.length(self.to_pitch)? as u64);
        let from = Side::of(self.from, self.length(self.from_pitch)? as u64);
        if to.is_device() == from.is_device() {
            return Err(unsupported("rows are copied between the host and a device."));
        }
        Ok((to, from))
    }

    fn copy(&self) -> Outcome {
        let (to_length, from_length) = (self.length(self.to_pitch)?, self.length(self.from_pitch)?);
        let (width, height) = (self.width as u64, self.height as u64);
        if is_drivers(self.to) {
            let rows = Rows { width, height, pitch: self.to_pitch as u64, buffer_pitch: self.from_pitch as u64 };
            return with_slice(self.to, to_length as u64, |slice| {
                // SAFETY: the caller of the C function passes host memory of this size.
                Ok(slice.write_rows(&rows, unsafe { bytes(self.from, from_length) })?)
            });
        }
        let rows = Rows { width, height, pitch: self.from_pitch as u64, buffer_pitch: self.to_pitch as u64 };
        with_slice(self.from, from_length as u64, |slice| {
            // SAFETY: the caller of the C function passes host memory of this size.
            Ok(slice.read_rows(&rows, unsafe { bytes_mut(self.to, to_length) })?)
        })
    }
}

/// `aclrtMemcpy2d`.
pub fn memcpy_2d(
    to: Address,
    to_pitch: usize,
    from: Address,
    from_pitch: usize,
    width: usize,
    height: usize,
    kind: i32,
) -> Outcome {
    let rectangle = Rectangle::check((to, to_pitch), (from, from_pitch), (width, height), kind)?;
    let Some(rectangle) = rectangle else { return Ok(()) };
    context::current()?;
    rectangle.sides()?;
    rectangle.copy()
}

/// `aclrtMemcpy2dAsync`.
#[allow(clippy::too_many_arguments, reason = "the vendor's function has as many")]
pub fn memcpy_2d_async(
    to: Address,
    to_pitch: usize,
    from: Address,
    from_pitch: usize,
    width: usize,
    height: usize,
    kind: i32,
    stream: Handle,
) -> Outcome {
    let rectangle = Rectangle::check((to, to_pitch), (from, from_pitch), (width, height), kind)?;
    let Some(rectangle) = rectangle else { return Ok(()) };
    let stream = stream::find(stream)?;
    run(&stream, rectangle.sides()?, move || rectangle.copy())
}

/// The locations of the two sides of copies in a batch: `aclrtMemcpyBatchAttr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct BatchAttribute {
    to: Location,
    from: Location,
    reserved: [u8; 16],
}

/// The arrays that describe a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchArguments {
    pub(crate) to: In<Address>,
    pub(crate) rooms: In<usize>,
    pub(crate) from: In<Address>,
    pub(crate) sizes: In<usize>,
    pub(crate) count: usize,
    pub(crate) attributes: In<BatchAttribute>,
    pub(crate) attribute_count: usize,
}

/// One copy of a batch.
#[derive(Debug, Clone, Copy)]
struct Element {
    index: usize,
    to: u64,
    from: u64,
    size: usize,
}

/// A failed batch, and the index of the copy that failed, if that is known.
struct Stopped {
    fault: Box<Fault>,
    index: Option<usize>,
}

impl From<Box<Fault>> for Stopped {
    fn from(fault: Box<Fault>) -> Stopped {
        Stopped { fault, index: None }
    }
}

impl BatchArguments {
    /// The copies of the batch that are not empty.
    fn elements(&self) -> Result<Vec<Element>, Stopped> {
        if self.sizes.is_null() || self.count == 0 || self.to.is_null() || self.from.is_null() || self.rooms.is_null() {
            return Err(invalid("an array of the batch is NULL, or the batch is empty.").into());
        }
        if self.attribute_count > self.count || (self.attribute_count > 0 && self.attributes.is_null()) {
            return Err(invalid("attrs is NULL, or there are more attributes than copies.").into());
        }
        for index in 0..self.attribute_count {
            if self.attributes.read_at(index, "attrs")?.reserved != [0; 16] {
                return Err(invalid("the reserved bytes of an attribute are not 0.").into());
            }
        }
        let mut elements = Vec::new();
        for index in 0..self.count {
            let size = self.sizes.read_at(index, "sizes")?;
            if size == 0 {
                continue;
            }
            let at = |fault| Stopped { fault, index: Some(index) };
            let to = self.to.read_at(index, "dsts")?.check("an element of dsts").map_err(at)?;
            let from = self.from.read_at(index, "srcs")?.check("an element of srcs").map_err(at)?;
            let room = self.rooms.read_at(index, "destMaxs")?;
            if size > room {
                return Err(at(invalid(format!("{size} bytes do not fit into destMax, {room}."))));
            }
            check_range(to, size).map_err(at)?;
            check_range(from, size).map_err(at)?;
            elements.push(Element { index, to, from, size });
        }
        Ok(elements)
    }
}

/// Copies a batch, in as few commands as the driver takes if all copies have one direction.
fn copy_batch(elements: &[Element]) -> Result<(), Stopped> {
    let all = |to: bool, from: bool| elements.iter().all(|e| is_drivers(e.to) == to && is_drivers(e.from) == from);
    let imported = |e: &Element| ipc::imported_at(e.to).is_some() || ipc::imported_at(e.from).is_some();
    if elements.iter().any(imported) || !(all(true, false) || all(false, true)) {
        return elements.iter().try_for_each(|element| {
            let copied = copy(element.to, element.from, element.size);
            copied.map_err(|fault| Stopped { fault, index: Some(element.index) })
        });
    }
    let session = process::session()?;
    let slice = |element: &Element, address| {
        let slice = session.slice_at(address, element.size as u64);
        slice.map_err(|error| Stopped { fault: Fault::driver(error), index: Some(element.index) })
    };
    let whole = |error: Error| Stopped { fault: error.into(), index: None };
    if all(true, false) {
        let mut copies = Vec::with_capacity(elements.len());
        for element in elements {
            // SAFETY: the caller of the C function passes host memory of this size.
            copies.push((slice(element, element.to)?, unsafe { bytes(element.from, element.size) }));
        }
        return write_batch(&copies).map_err(whole);
    }
    let mut copies = Vec::with_capacity(elements.len());
    for element in elements {
        // SAFETY: the caller of the C function passes host memory of this size.
        copies.push((slice(element, element.from)?, unsafe { bytes_mut(element.to, element.size) }));
    }
    read_batch(&mut copies).map_err(whole)
}

/// `aclrtMemcpyBatch` and `aclrtMemcpyBatchV2`.
pub(crate) fn memcpy_batch(arguments: BatchArguments, failed: Out<usize>) -> Outcome {
    failed.write(usize::MAX);
    let stopped = |Stopped { fault, index }: Stopped| {
        failed.write(index.unwrap_or(usize::MAX));
        fault
    };
    let elements = arguments.elements().map_err(stopped)?;
    if elements.is_empty() {
        return Ok(());
    }
    context::current()?;
    copy_batch(&elements).map_err(stopped)
}

/// `aclrtMemcpyBatchAsync` and `aclrtMemcpyBatchAsyncV2`.
pub(crate) fn memcpy_batch_async(arguments: BatchArguments, failed: Out<usize>, stream: Handle) -> Outcome {
    failed.write(usize::MAX);
    let stopped = |Stopped { fault, index }: Stopped| {
        failed.write(index.unwrap_or(usize::MAX));
        fault
    };
    let elements = arguments.elements().map_err(stopped)?;
    if elements.is_empty() {
        return Ok(());
    }
    let stream = stream::find(stream)?;
    let mut kept = Vec::new();
    for element in &elements {
        let sides = (Side::of(element.to, element.size as u64), Side::of(element.from, element.size as u64));
        check_direction(&sides.0, &sides.1, 4)
            .map_err(|fault| stopped(Stopped { fault, index: Some(element.index) }))?;
        kept.push(sides);
    }
    if kept.iter().any(|sides| matches!(sides, (Side::Unknown, _) | (_, Side::Unknown))) {
        stream.wait(None)?;
        return copy_batch(&elements).map_err(stopped);
    }
    stream.push(Task::Work(Box::new(move || {
        let _kept = kept;
        copy_batch(&elements).map_err(|stopped| stopped.fault)
    })))
}

/// The kind of copy that the next functions do.
const WITHIN_DEVICE: i32 = 6;

fn check_within_device(kind: i32) -> Outcome {
    if kind == WITHIN_DEVICE {
        return Ok(());
    }
    Err(unsupported(format!("kind is {kind}. Only ACL_MEMCPY_INNER_DEVICE_TO_DEVICE (6) can be used here.")))
}

/// `aclrtMemcpyAsyncWithOffset`: the two addresses are read from device memory when the stream gets
/// there.
#[allow(clippy::too_many_arguments, reason = "the vendor's function has as many")]
pub fn memcpy_with_offsets(
    to: Address,
    room: usize,
    to_offset: usize,
    from: Address,
    size: usize,
    from_offset: usize,
    kind: i32,
    stream: Handle,
) -> Outcome {
    let (to, from) = (to.check("dst")?, from.check("src")?);
    check_within_device(kind)?;
    if size == 0 {
        return Err(invalid("the size is 0. Copy at least one byte."));
    }
    if to_offset.checked_add(size).is_none_or(|end| end > room) {
        return Err(refused(format!("{size} bytes at {to_offset} do not fit into destMax, {room}.")));
    }
    check_number(Address(to))?;
    check_number(Address(from))?;
    stream::find(stream)?.push(Task::Work(Box::new(move || {
        let number = |address: u64| -> Outcome<u64> {
            let mut bytes = [0; 8];
            with_slice(address, 8, |slice| Ok(slice.read(&mut bytes)?))?;
            Ok(u64::from_ne_bytes(bytes))
        };
        let at = |base: u64, offset: usize| base.checked_add(offset as u64).ok_or_else(|| beyond(base, offset));
        copy_within(at(number(to)?, to_offset)?, at(number(from)?, from_offset)?, size)
    })))
}

/// A copy of device memory whose addresses were read from the device.
fn copy_within(to: u64, from: u64, size: usize) -> Outcome {
    if is_drivers(to) && is_drivers(from) {
        return copy(to, from, size);
    }
    Err(refused(format!("{to:#x} or {from:#x} is not device memory.")))
}

/// Describes a copy, in device memory: a mark, source, destination and size.
const DESCRIPTION: usize = 64;
const DESCRIPTION_MARK: u64 = 0x4153_4344_4553_4331;

/// `aclrtGetMemcpyDescSize`.
pub fn description_size(kind: i32, size: Out<usize>) -> Outcome {
    let size = size.check("descSize")?;
    check_within_device(kind)?;
    size.write(DESCRIPTION);
    Ok(())
}

/// `aclrtSetMemcpyDesc`.
pub fn describe(
    description: Address,
    kind: i32,
    from: Address,
    to: Address,
    size: usize,
    config: *const libc::c_void,
) -> Outcome {
    let (from, to) = (from.check("srcAddr")?, to.check("dstAddr")?);
    check_within_device(kind)?;
    if size == 0 || !config.is_null() {
        return Err(invalid("the size is 0, or config is not NULL, which is reserved."));
    }
    let description = check_number(description)?;
    let words = [DESCRIPTION_MARK, from, to, size as u64];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    context::current()?;
    with_slice(description, bytes.len() as u64, |slice| Ok(slice.write(&bytes)?))
}

/// `aclrtMemcpyAsyncWithDesc`: the description is read when the stream gets there.
pub fn memcpy_described(description: Address, kind: i32, stream: Handle) -> Outcome {
    let description = check_number(description)?;
    check_within_device(kind)?;
    stream::find(stream)?.push(Task::Work(Box::new(move || {
        let mut bytes = [0; 32];
        with_slice(description, 32, |slice| Ok(slice.read(&mut bytes)?))?;
        let mut words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_ne_bytes));
        let mut next = || words.next().unwrap_or_default();
        let (mark, from, to, size) = (next(), next(), next(), next());
        if mark != DESCRIPTION_MARK {
            return Err(refused("the description was not written by aclrtSetMemcpyDesc."));
        }
        copy_within(to, from, size as usize)
    })))
}

/// `aclrtValueWrite`: in the order of the stream.
pub fn value_write(address: Address, value: u64, flags: u32, stream: Handle) -> Outcome {
    let address = check_number(address)?;
    if flags != 0 {
        return Err(refused(format!("flag is {flags}. It is reserved: pass 0.")));
    }
    stream::find(stream)?
        .push(Task::Work(Box::new(move || with_slice(address, 8, |slice| Ok(slice.write(&value.to_ne_bytes())?)))))
}

/// `aclrtValueWait`: the stream waits until the number compares.
pub fn value_wait(address: Address, value: u64, flags: u32, stream: Handle) -> Outcome {
    let address = check_number(address)?;
    let compares = match flags {
        0 => |found: u64, value: u64| found.wrapping_sub(value) as i64 >= 0,
        1 => |found, value| found == value,
        2 => |found, value| found & value != 0,
        3 => |found: u64, value: u64| !(found | value) != 0,
        other => return Err(refused(format!("flag is {other}. It is 0 to 3."))),
    };
    stream::find(stream)?.push(Task::Until(Box::new(move || {
        let mut found = [0; 8];
        with_slice(address, 8, |slice| Ok(slice.read(&mut found)?))?;
        Ok(compares(u64::from_ne_bytes(found), value))
    })))
}

fn check_number(address: Address) -> Outcome<u64> {
    let address = address.check("devAddr")?;
    if is_drivers(address) && address % 8 == 0 {
        return Ok(address);
    }
    Err(refused(format!("{address:#x} is not device memory, or not a multiple of 8.")))
}

/// Where memory is: `aclrtPtrAttributes`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Attributes {
    location: Location,
    page: u32,
    reserved: [u32; 4],
}

/// `aclrtPointerGetAttributes`: never fails for an address outside the driver's range.
pub fn attributes(address: Address, attributes: Out<Attributes>) -> Outcome {
    let address = address.check("ptr")?;
    let attributes = attributes.check("attributes")?;
    let answer = |kind: i32, id: u32, page: u64| {
        attributes.write(Attributes { location: Location { id, kind }, page: page as u32, reserved: [0; 4] });
        Ok(())
    };
    // SAFETY: a question for a number.
    let host_page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    if !is_drivers(address) {
        let known = host::find(address, 1).is_some();
        return answer(if known { Location::HOST } else { Location::UNREGISTERED }, 0, host_page);
    }
    if let Some((memory, _)) = ipc::imported_at(address) {
        let device = ipc::device_of(&memory);
        return answer(Location::DEVICE, crate::devices::user_of(device), ascend_vmm::Page::Huge.size());
    }
    let memory = process::open_session().and_then(|session| session.memory_at(address));
    match memory {
        Some(memory) => match memory.location() {
            ascend_vmm::Location::Device(device) => {
                let page = malloc::page_of(address).unwrap_or(memory.page().size());
                answer(Location::DEVICE, crate::devices::user_of(device), page)
            }
            ascend_vmm::Location::Host => answer(Location::HOST, 0, memory.page().size()),
        },
        None => {
            let text = format!("{address:#x} is in the driver's range, but nothing is mapped there.");
            Err(Fault::new(code::RT_DRIVER, text))
        }
    }
}
