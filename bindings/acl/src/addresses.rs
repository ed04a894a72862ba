//! Reserved addresses, what is mapped there, and who may use it.
//!
//! One set of books has all reservations by their address, in each the place of every mapping, and
//! the handles of physical memory, so that an address is found without following it. The books'
//! lock is never held over a system call.

use crate::border::{Address, In, Out, lock, using};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::{Handle, Table};
use crate::physical::{self, Location, Memories, Physical};
use crate::{devices, malloc, process};
use ascend_vmm::{Error, Failed, Location as Place, Mapping, Page, Reservation, ReserveOptions};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// The size of a huge page: what addresses are multiples of.
const PAGE: u64 = Page::Huge.size();

pub(crate) static BOOKS: Mutex<Books> =
    Mutex::new(Books { areas: Vec::new(), mappings: Vec::new(), free: Vec::new(), physical: Table::new() });

/// What the process has of addresses and physical memory.
pub(crate) struct Books {
    /// By their start.
    areas: Vec<Area>,
    /// The mappings, at places that the areas name.
    mappings: Vec<Option<Mapped>>,
    /// Places that are free.
    free: Vec<u32>,
    pub(crate) physical: Memories,
}

struct Area {
    start: u64,
    end: u64,
    reservation: Reservation,
    places: Places,
    /// How many mappings there are.
    mapped: u32,
}

/// For each page of a reservation, the place of the mapping that begins there plus 1.
enum Places {
    /// Of the only page.
    One(u32),
    /// Of several: zeroed memory that is not touched before something is mapped.
    Several(Vec<u32>),
}

struct Mapped {
    mapping: Mapping,
    /// The handle that was mapped.
    handle: Handle,
    /// Whether the CPU was given access.
    host: bool,
}

impl Area {
    #[inline]
    fn place(&mut self, address: u64) -> &mut u32 {
        match &mut self.places {
            Places::One(place) => place,
            Places::Several(places) => &mut places[((address - self.start) / PAGE) as usize],
        }
    }
}

impl Books {
    /// The index of the area that contains an address.
    #[inline]
    fn area(&self, address: u64) -> Option<usize> {
        let index = self.areas.partition_point(|area| area.start <= address).checked_sub(1)?;
        (address < self.areas[index].end).then_some(index)
    }

    /// The mapping that begins at an address.
    #[inline]
    fn mapped(&mut self, address: u64) -> Option<&mut Mapped> {
        let index = if address % PAGE == 0 { self.area(address)? } else { return None };
        let place = self.areas[index].place(address).checked_sub(1)?;
        self.mappings.get_mut(place as usize)?.as_mut()
    }

    /// Enters a mapping at its address; it comes back if that is not reserved any more. `index` is
    /// where its area was a moment ago.
    #[inline]
    fn insert(&mut self, index: usize, address: u64, mapped: Mapped) -> Result<(), Mapped> {
        let around = |area: &Area| area.start <= address && address < area.end;
        let index = if self.areas.get(index).is_some_and(around) { Some(index) } else { self.area(address) };
        let Some(index) = index else { return Err(mapped) };
        let place = match self.free.pop() {
            Some(place) => {
                self.mappings[place as usize] = Some(mapped);
                place
            }
            None => {
                self.mappings.push(Some(mapped));
                self.mappings.len() as u32 - 1
            }
        };
        let area = &mut self.areas[index];
        *area.place(address) = place + 1;
        area.mapped += 1;
        Ok(())
    }

    /// Takes the mapping that begins at an address out.
    #[inline]
    fn remove(&mut self, address: u64) -> Option<Mapped> {
        let index = if address % PAGE == 0 { self.area(address)? } else { return None };
        let area = &mut self.areas[index];
        let entry = area.place(address);
        let place = entry.checked_sub(1)?;
        *entry = 0;
        area.mapped -= 1;
        self.free.push(place);
        self.mappings.get_mut(place as usize)?.take()
    }
}

/// `aclrtReserveMemAddress`.
#[inline]
pub fn reserve(address: Out<Address>, size: usize, alignment: usize, wanted: Address, flags: u64) -> Outcome {
    let address = address.check("virPtr")?;
    if size == 0 || flags > 1 || alignment != 0 {
        return Err(wrong_arguments(size, alignment, flags));
    }
    let size = (size as u64).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX - PAGE + 1);
    let alignment = alignment_of(size);
    let options = match wanted.0 {
        0 => ReserveOptions::new().alignment(alignment),
        wanted if wanted % alignment == 0 => ReserveOptions::new().address(wanted),
        wanted => return Err(not_aligned(wanted, alignment)),
    };
    let reserved = process::with_session(|session| Ok(session.reserve_with(size, &options)))?;
    let reservation = reserved.map_err(|error| not_reserved(error, size, wanted))?;
    address.write(Address(reservation.address()));
    enter(reservation);
    Ok(())
}

/// `aclrtReserveMemAddressNoUCMemory`: its own addresses, from 40 TiB on, are of hardware that our
/// library does not drive; without a wish it is the same as the other.
pub fn reserve_cached(address: Out<Address>, size: usize, alignment: usize, wanted: Address, flags: u64) -> Outcome {
    address.check("virPtr")?;
    if size != 0 && flags <= 1 && wanted.0 >= 40 << 40 {
        return Err(unsupported(format!(
            "expectPtr {:#x} is above the addresses that can be reserved here.",
            wanted.0
        )));
    }
    reserve(address, size, alignment, wanted, flags)
}

#[cold]
fn wrong_arguments(size: usize, alignment: usize, flags: u64) -> Box<Fault> {
    match () {
        () if size == 0 => invalid("the size is 0. Reserve 2 MiB or more."),
        () if flags > 1 => invalid(format!("flags are {flags}. They are 0 or 1.")),
        () => refused(format!("the alignment is {alignment}. It is reserved: pass 0.")),
    }
}

/// What a reservation begins at a multiple of, as in the vendor's library: its size rounded up to a
/// power of two, from 2 MiB to 1 GiB. Memory in 1 GiB pages is mapped at such addresses only.
fn alignment_of(size: u64) -> u64 {
    size.checked_next_power_of_two().unwrap_or(u64::MAX).clamp(PAGE, Page::Giant.size())
}

#[cold]
fn not_aligned(wanted: u64, alignment: u64) -> Box<Fault> {
    refused(format!("expectPtr {wanted:#x} is no multiple of {alignment:#x}, as this size needs."))
}

#[cold]
fn not_reserved(error: Error, size: u64, wanted: Address) -> Box<Fault> {
    let fault = Box::<Fault>::from(error);
    // A size that could be reserved, anywhere: then the addresses are used up.
    match fault.code {
        code::RT_PARAM_INVALID if wanted.0 == 0 && size <= 128 << 30 => fault.with_code(code::RT_MEMORY),
        _ => fault,
    }
}

#[inline]
fn enter(reservation: Reservation) {
    let (start, size) = (reservation.address(), reservation.size());
    let places = if size == PAGE { Places::One(0) } else { Places::Several(vec![0; (size / PAGE) as usize]) };
    let area = Area { start, end: start + size, reservation, places, mapped: 0 };
    let mut books = lock(&BOOKS);
    if books.areas.last().is_none_or(|last| last.start < start) {
        books.areas.push(area);
    } else {
        let place = books.areas.partition_point(|area| area.start < start);
        books.areas.insert(place, area);
    }
}

/// `aclrtReleaseMemAddress`.
#[inline]
pub fn release(address: Address) -> Outcome {
    let address = address.check("virPtr")?;
    using();
    let mut books = lock(&BOOKS);
    let Some(place) = books.area(address).filter(|&place| books.areas[place].start == address) else {
        return Err(not_reserved_at(address));
    };
    let mapped = books.areas[place].mapped;
    if mapped > 0 {
        return Err(still_mapped(address, mapped));
    }
    let last = place + 1 == books.areas.len();
    let area = if last { books.areas.pop() } else { Some(books.areas.remove(place)) };
    drop(books);
    let Some(Area { reservation, places, .. }) = area else { return Ok(()) };
    drop(places);
    match reservation.free() {
        Ok(()) => Ok(()),
        Err(failed) => not_released(failed),
    }
}

#[cold]
fn not_released(failed: Failed<Reservation>) -> Outcome {
    match failed.error {
        // Another thread is just mapping something there: it finds that the addresses are gone, and
        // they are free when it has finished.
        Error::InUse { .. } => Ok(()),
        error => {
            enter(failed.object);
            Err(Fault::driver(error))
        }
    }
}

#[cold]
fn not_reserved_at(address: u64) -> Box<Fault> {
    refused(format!("{address:#x} is not what aclrtReserveMemAddress returned, or is released already."))
}

#[cold]
fn still_mapped(address: u64, mapped: u32) -> Box<Fault> {
    let text =
        format!("{mapped} mapping(s) are in the reservation at {address:#x}. Call aclrtUnmapMem for each first.");
    Fault::new(code::RT_DRIVER, text)
}

/// `aclrtMapMem`.
#[inline]
pub fn map(address: Address, size: usize, offset: usize, handle: Handle, flags: u64) -> Outcome {
    let address = address.check("virPtr")?;
    if size == 0 || handle.is_null() || flags != 0 || offset != 0 {
        return Err(wrong_mapping(size, handle, offset, flags));
    }
    using();
    let mut books = lock(&BOOKS);
    let Some(index) = books.area(address) else { return Err(outside(address)) };
    let (start, reservation) = (books.areas[index].start, books.areas[index].reservation.clone());
    let found = books.physical.get_mut(handle).and_then(Physical::begin_mapping);
    drop(books);
    let Some((memory, page)) = found else { return Err(physical::unknown()) };
    let whole = |size: u64| size == memory.size() || size.checked_next_multiple_of(page) == Some(memory.size());
    let mapped = if whole(size as u64) {
        reservation.map(address - start, &memory).map_err(Fault::driver)
    } else {
        Err(other_size(size, &memory))
    };
    match mapped {
        Ok(mapping) => {
            let entered = lock(&BOOKS).insert(index, address, Mapped { mapping, handle, host: false });
            entered.map_err(|mapped| released_meanwhile(address, mapped))
        }
        Err(fault) => {
            drop(memory);
            let _ = physical::end_mapping(handle);
            Err(fault)
        }
    }
}

#[cold]
fn released_meanwhile(address: u64, mapped: Mapped) -> Box<Fault> {
    let handle = mapped.handle;
    drop(mapped);
    let _ = physical::end_mapping(handle);
    outside(address)
}

#[cold]
fn wrong_mapping(size: usize, handle: Handle, offset: usize, flags: u64) -> Box<Fault> {
    match () {
        () if handle.is_null() => invalid("handle is NULL. Pass one that aclrtMallocPhysical returned."),
        () if size == 0 => invalid("the size is 0. Pass the size of the physical memory."),
        () if flags != 0 => invalid(format!("flags are {flags}. They are reserved: pass 0.")),
        () => refused(format!("the offset is {offset}. Only all of the memory can be mapped: pass 0.")),
    }
}

#[cold]
fn outside(address: u64) -> Box<Fault> {
    Fault::new(code::RT_DRIVER, format!("{address:#x} is not in addresses that aclrtReserveMemAddress returned."))
}

#[cold]
fn other_size(size: usize, memory: &ascend_vmm::PhysicalMemory) -> Box<Fault> {
    let text = format!("{size} bytes are to be mapped of memory of {} bytes. Only all of it can be.", memory.size());
    Fault::new(code::RT_DRIVER, text)
}

/// `aclrtUnmapMem`.
#[inline]
pub fn unmap(address: Address) -> Outcome {
    let address = address.check("virPtr")?;
    using();
    let mut books = lock(&BOOKS);
    let Some(Mapped { mapping, handle, host }) = books.remove(address) else { return Err(not_mapped(address)) };
    let counted = books.physical.leave_mapping(handle);
    drop(books);
    match mapping.unmap() {
        Ok(()) if counted => Ok(()),
        Ok(()) => physical::end_mapping(handle),
        Err(Failed { object: mapping, error }) => {
            Err(not_unmapped(address, Mapped { mapping, handle, host }, counted, error))
        }
    }
}

/// Enters a mapping again that the driver has not undone.
#[cold]
fn not_unmapped(address: u64, mapped: Mapped, counted: bool, error: Error) -> Box<Fault> {
    let mut books = lock(&BOOKS);
    if counted {
        books.physical.return_mapping(mapped.handle);
    }
    let entered = books.insert(0, address, mapped);
    drop(books);
    match entered {
        Ok(()) => Fault::driver(error),
        Err(mapped) => released_meanwhile(address, mapped),
    }
}

#[cold]
fn not_mapped(address: u64) -> Box<Fault> {
    Fault::new(code::RT_DRIVER, format!("{address:#x} is not where aclrtMapMem mapped memory, or is unmapped already."))
}

/// The handle of the mapping that begins at an address.
pub(crate) fn handle_at(address: u64) -> Option<Handle> {
    using();
    lock(&BOOKS).mapped(address).map(|mapped| mapped.handle)
}

/// The reservation that contains an address: its start and size.
pub(crate) fn reserved_at(address: u64) -> Option<(u64, u64)> {
    using();
    let books = lock(&BOOKS);
    books.area(address).map(|index| &books.areas[index]).map(|area| (area.start, area.end - area.start))
}

/// Unmaps whatever is mapped of these handles. What is in use goes when it is not any more.
pub(crate) fn unmap_all(handles: &[Handle]) {
    let handles: BTreeSet<Handle> = handles.iter().copied().collect();
    let mut books = lock(&BOOKS);
    let of = |mapped: &Mapped| handles.contains(&mapped.handle).then(|| mapped.mapping.address());
    let addresses: Vec<u64> = books.mappings.iter().flatten().filter_map(of).collect();
    let mapped: Vec<Mapped> = addresses.into_iter().filter_map(|address| books.remove(address)).collect();
    drop(books);
    drop(mapped);
}

/// Whether anything is reserved.
pub(crate) fn is_used() -> bool {
    !lock(&BOOKS).areas.is_empty()
}

/// Who gets access: `aclrtMemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Access {
    flags: i32,
    location: Location,
    reserved: [u8; 12],
}

const READ_WRITE: i32 = 3;

/// Numbers of devices are below this in the driver.
const DEVICES: u32 = 64;

/// `aclrtMemSetAccess`.
pub fn set_access(address: Address, size: usize, access: In<Access>, count: usize) -> Outcome {
    if address.0 == 0 || access.is_null() || count == 0 {
        return Err(refused("virPtr or desc is NULL, or count is 0. Pass a mapping and who gets access to it."));
    }
    let mappings = mappings_in(address.0, size as u64)?;
    for index in 0..count {
        let Access { flags, location, .. } = access.read_at(index, "desc")?;
        match flags {
            READ_WRITE => {}
            0 | 1 => return Err(unsupported("the driver knows read-write access only: pass 3.")),
            other => return Err(refused(format!("{other} is no access. Pass 3, read and write."))),
        }
        match location.kind {
            Location::HOST if location.id == 0 => {}
            Location::DEVICE if location.id < DEVICES => {}
            _ => {
                let text = format!("location type {}, id {} cannot get access.", location.kind, location.id);
                return Err(refused(text));
            }
        }
        for mapping in &mappings {
            grant(mapping, &location)?;
        }
    }
    Ok(())
}

/// The mappings that make up a range exactly.
fn mappings_in(address: u64, size: u64) -> Outcome<Vec<Mapping>> {
    let (session, mut mappings, mut at) = (process::session()?, Vec::new(), address);
    let end = size.checked_next_multiple_of(PAGE).and_then(|size| address.checked_add(size)).unwrap_or(0);
    while at < end && handle_at(at).is_some() {
        let Some(mapping) = session.mapping(at) else { break };
        at += mapping.size();
        mappings.push(mapping);
    }
    if at == end && !mappings.is_empty() {
        return Ok(mappings);
    }
    let text = format!("{address:#x} with {size} bytes is not a mapping, or several from the first to the last byte.");
    Err(Fault::new(code::RT_DRIVER, text))
}

fn grant(mapping: &Mapping, location: &Location) -> Outcome {
    if location.kind == Location::HOST {
        mapping.host_view().map_err(Fault::driver)?;
        if let Some(mapped) = lock(&BOOKS).mapped(mapping.address()) {
            mapped.host = true;
        }
        return Ok(());
    }
    let device = devices::by_logical_or_user(location.id)?;
    mapping.grant(&process::device(device)?).map_err(Fault::driver)
}

/// `aclrtMemGetAccess`.
pub fn get_access(address: Address, location: In<Location>, flags: Out<u64>) -> Outcome {
    let address = address.check("virPtr")?;
    let location = location.read("location")?;
    let flags = flags.check("flag")?;
    let mapping = process::session()?.mapping(address).ok_or_else(|| not_mapped(address))?;
    let place = mapping.memory().location();
    let granted = match location.kind {
        Location::HOST => {
            let seen = |mapped: &mut Mapped| mapped.host;
            place == Place::Host || lock(&BOOKS).mapped(mapping.address()).is_some_and(seen)
        }
        Location::DEVICE => {
            let device = devices::by_logical_or_user(location.id)?;
            place == Place::Device(device) || mapping.is_granted(&process::device(device)?)?
        }
        other => return Err(refused(format!("location type {other} has no access to memory."))),
    };
    flags.write(if granted { READ_WRITE as u64 } else { 0 });
    Ok(())
}

/// `aclrtMemGetAddressRange`: of the block, the mapping or the reservation around an address.
pub fn range(address: Address, base: Out<Address>, size: Out<usize>) -> Outcome {
    let address = address.check("ptr")?;
    if base.is_null() && size.is_null() {
        return Err(refused("pbase and psize are both NULL. Pass at least one."));
    }
    let mapped = || process::open_session()?.mapping_at(address);
    let found = malloc::block_around(address).or_else(mapped).or_else(|| reserved_at(address));
    let (start, length) = found.ok_or_else(|| refused(format!("{address:#x} is in no memory of this library's.")))?;
    base.write(Address(start));
    size.write(length as usize);
    Ok(())
}
