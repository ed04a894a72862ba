//! Reserved addresses, what is mapped there, and who may use it.
//!
//! One set of books has all reservations by their address, in each what memory is mapped where, and
//! the handles of physical memory, each with its mappings, so that an address is found without
//! following it. The books' lock is never held over a system call: a mapping is entered without its
//! object before it is made, and gets the object when it is.

use crate::border::{Address, In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::{Handle, Table};
use crate::physical::{self, Location, Memories, Unused};
use crate::{devices, malloc, process};
use ascend_vmm::{
    Error, Failed, Location as Place, Mapping, Page, PhysicalMemory, Reservation, ReserveOptions, Session,
};
use parking_lot::Mutex;

/// The size of a huge page: what addresses are multiples of.
const PAGE: u64 = Page::Huge.size();

pub(crate) static BOOKS: Mutex<Books> =
    Mutex::new(Books { areas: Areas { list: Vec::new(), recent: 0, start: 0, size: 0 }, physical: Table::new() });

/// What the process has of addresses and physical memory.
pub(crate) struct Books {
    areas: Areas,
    pub(crate) physical: Memories,
}

struct Areas {
    /// By their start.
    list: Vec<Area>,
    /// Where the area is that was used last, from where to where: programs use one many times.
    recent: usize,
    start: u64,
    size: u64,
}

struct Area {
    start: u64,
    size: u64,
    reservation: Reservation,
    /// For the first page, the place of the memory whose mapping begins there, plus 1. It is good
    /// as long as the mapping is: memory that is mapped stays in its table.
    first: u32,
    /// The same for the other pages: zeroed memory that is not touched before something is mapped.
    others: Box<[u32]>,
    /// How many mappings there are, or are being made.
    mapped: u32,
}

/// A mapping that was entered and is to be made.
struct Begun {
    reservation: Reservation,
    offset: u64,
    memory: PhysicalMemory,
    /// Of the memory.
    place: usize,
}

impl Area {
    /// What is said of the page around an offset in the area.
    #[inline]
    fn page(&mut self, offset: u64) -> Option<&mut u32> {
        if offset < PAGE { Some(&mut self.first) } else { self.others.get_mut((offset / PAGE) as usize - 1) }
    }
}

impl Areas {
    /// The area that contains an address, and the offset there.
    #[inline]
    fn around(&mut self, address: u64) -> Option<(&mut Area, u64)> {
        let mut offset = address.wrapping_sub(self.start);
        if offset >= self.size {
            offset = self.search(address)?;
        }
        Some((self.list.get_mut(self.recent)?, offset))
    }

    /// The page around an address.
    fn page(&mut self, address: u64) -> Option<&mut u32> {
        let (area, offset) = self.around(address)?;
        area.page(offset)
    }

    #[inline(never)]
    fn search(&mut self, address: u64) -> Option<u64> {
        let index = self.list.partition_point(|area| area.start <= address).checked_sub(1)?;
        let &Area { start, size, .. } = self.list.get(index).filter(|area| address - area.start < area.size)?;
        (self.recent, self.start, self.size) = (index, start, size);
        Some(address - start)
    }

    #[inline]
    fn insert(&mut self, area: Area) {
        (self.start, self.size) = (area.start, area.size);
        if self.list.last().is_some_and(|last| last.start > area.start) {
            return self.insert_between(area);
        }
        self.recent = self.list.len();
        self.list.push(area);
    }

    #[inline(never)]
    fn insert_between(&mut self, area: Area) {
        self.recent = self.list.partition_point(|other| other.start < area.start);
        self.list.insert(self.recent, area);
    }

    /// Takes the area out that was just found.
    #[inline]
    fn remove(&mut self) -> Option<Area> {
        self.size = 0;
        // Taking the last one out this way moves nothing.
        if self.recent + 1 == self.list.len() { self.list.pop() } else { Some(self.list.remove(self.recent)) }
    }
}

impl Books {
    /// The place of the memory whose mapping begins at an address.
    fn mapped(&mut self, address: u64) -> Option<usize> {
        let place = self.areas.page(address)?.checked_sub(1)? as usize;
        self.physical.at(place).mappings.has(address).then_some(place)
    }

    /// Enters a mapping of all of some memory, which is to be made. `None`, and no change, if
    /// [`why_not_begun`] knows a reason.
    #[inline]
    fn begin(&mut self, address: u64, size: u64, handle: Handle) -> Option<Begun> {
        let (area, offset) = self.areas.around(address)?;
        let page = area.page(offset).filter(|page| **page == 0)?;
        let place = self.physical.find(handle)?;
        let physical = self.physical.at(place);
        let memory = physical.memory.as_ref()?;
        if size != memory.size() && !rounds_up(size, memory) {
            return None;
        }
        *page = place as u32 + 1;
        area.mapped += 1;
        physical.mappings.begin(address);
        Some(Begun { reservation: area.reservation.clone(), offset, memory: memory.clone(), place })
    }

    /// Takes the mapping that begins at an address out, of memory that the program has not freed.
    #[inline]
    fn remove(&mut self, address: u64) -> Option<Mapping> {
        let (area, offset) = self.areas.around(address)?;
        let page = area.page(offset)?;
        let place = page.checked_sub(1)? as usize;
        let physical = self.physical.at(place);
        physical.memory.as_ref()?;
        let mapping = physical.mappings.take(address)?;
        *page = 0;
        area.mapped -= 1;
        Some(mapping)
    }

    /// Enters a mapping again; it comes back if its address is not reserved any more, or taken.
    #[cold]
    fn enter(&mut self, address: u64, mapping: Mapping) -> Result<(), Mapping> {
        let Some((area, offset)) = self.areas.around(address) else { return Err(mapping) };
        let Some(page) = area.page(offset).filter(|page| **page == 0) else { return Err(mapping) };
        let Some(place) = self.physical.place_of(&mapping.memory()) else { return Err(mapping) };
        *page = place as u32 + 1;
        area.mapped += 1;
        let mappings = &mut self.physical.at(place).mappings;
        mappings.begin(address);
        mappings.complete(address, mapping);
        Ok(())
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
    let reserve = |session: &Session| session.reserve_with(size, &options);
    let reserved = process::with_session(|session| reserve(session).map_err(|error| not_reserved(error, size, wanted)));
    let reservation = reserved?;
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
#[inline]
fn alignment_of(size: u64) -> u64 {
    let power = || size.checked_next_power_of_two().map_or(Page::Giant.size(), |power| power.min(Page::Giant.size()));
    if size <= PAGE { PAGE } else { power() }
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
    let others = if size == PAGE { Box::default() } else { vec![0; (size / PAGE) as usize - 1].into() };
    BOOKS.lock().areas.insert(Area { start, size, reservation, first: 0, others, mapped: 0 });
}

/// `aclrtReleaseMemAddress`.
#[inline]
pub fn release(address: Address) -> Outcome {
    let mut books = BOOKS.lock();
    let areas = &mut books.areas;
    let Some((area, 0)) = areas.around(address.0) else {
        address.check("virPtr")?;
        return Err(not_reserved_at(address.0));
    };
    if area.mapped > 0 {
        return Err(still_mapped(address.0, area.mapped));
    }
    let area = areas.remove();
    drop(books);
    let Some(Area { reservation, others, .. }) = area else { return Ok(()) };
    drop(others);
    match reservation.free() {
        Ok(()) => Ok(()),
        Err(failed) => not_released(failed),
    }
}

#[cold]
fn not_released(failed: Failed<Reservation>) -> Outcome {
    match failed.error {
        // Another thread is just unmapping what was there: the addresses are free when it has
        // finished.
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

/// `aclrtMemMapNoAccess`: the owning device has access all the same.
#[inline(never)]
pub fn map_without_access(address: Address, size: usize, offset: usize, handle: Handle, flags: u64) -> Outcome {
    map(address, size, offset, handle, flags)
}

/// `aclrtMapMem`.
#[inline(always)]
pub fn map(address: Address, size: usize, offset: usize, handle: Handle, flags: u64) -> Outcome {
    if flags | offset as u64 != 0 {
        return Err(why_not_begun(address, size, offset, handle, flags));
    }
    let mut books = BOOKS.lock();
    let Some(Begun { reservation, offset, memory, place }) = books.begin(address.0, size as u64, handle) else {
        drop(books);
        return Err(why_not_begun(address, size, 0, handle, 0));
    };
    drop(books);
    match map_there(&reservation, offset, &memory) {
        Ok(mapping) => {
            BOOKS.lock().physical.at(place).mappings.complete(address.0, mapping);
            Ok(())
        }
        Err(fault) => {
            let _ = end(address.0, place);
            Err(fault)
        }
    }
}

// Not inlined, so that the compiler sees the library's function as any other program's.
#[inline(never)]
fn map_there(reservation: &Reservation, offset: u64, memory: &PhysicalMemory) -> Outcome<Mapping> {
    reservation.map(offset, memory).map_err(Fault::driver)
}

/// Whether a size that is no multiple of a page means all of the memory.
#[cold]
fn rounds_up(size: u64, memory: &PhysicalMemory) -> bool {
    size.checked_next_multiple_of(memory.page().size()) == Some(memory.size())
}

/// Takes the entry of a mapping back that was not made, or is gone, and releases the memory if
/// nothing else uses it.
#[cold]
fn end(address: u64, place: usize) -> Outcome {
    let mut books = BOOKS.lock();
    if let Some((area, offset)) = books.areas.around(address) {
        area.mapped -= 1;
        if let Some(page) = area.page(offset) {
            *page = 0;
        }
    }
    books.physical.at(place).mappings.forget(address);
    let unused = books.physical.take_unused(place);
    drop(books);
    unused.map_or(Ok(()), Unused::release)
}

/// Why a mapping was not entered, in the vendor's order of checks.
#[cold]
fn why_not_begun(address: Address, size: usize, offset: usize, handle: Handle, flags: u64) -> Box<Fault> {
    let address = match address.check("virPtr") {
        Ok(address) => address,
        Err(fault) => return fault,
    };
    if size == 0 || handle.is_null() || flags != 0 || offset != 0 {
        return wrong_mapping(size, handle, offset, flags);
    }
    let mut books = BOOKS.lock();
    let Books { areas, physical } = &mut *books;
    let Some(page) = areas.page(address) else { return outside(address) };
    let Some(memory) = physical.get_mut(handle).and_then(|physical| physical.memory.as_ref()) else {
        return physical::unknown();
    };
    let fits = size as u64 == memory.size() || rounds_up(size as u64, memory);
    match page {
        0 if !fits => other_size(size, memory),
        _ => taken(address),
    }
}

#[cold]
fn taken(address: u64) -> Box<Fault> {
    let text = format!("{address:#x} is not a multiple of 2 MiB, or memory is mapped there. Call aclrtUnmapMem first.");
    Fault::new(code::RT_DRIVER, text)
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
fn other_size(size: usize, memory: &PhysicalMemory) -> Box<Fault> {
    let text = format!("{size} bytes are to be mapped of memory of {} bytes. Only all of it can be.", memory.size());
    Fault::new(code::RT_DRIVER, text)
}

/// `aclrtUnmapMem`.
#[inline]
pub fn unmap(address: Address) -> Outcome {
    let mut books = BOOKS.lock();
    let Some(mapping) = books.remove(address.0) else {
        drop(books);
        address.check("virPtr")?;
        return unmap_last(address.0);
    };
    drop(books);
    match mapping.unmap() {
        Ok(()) => Ok(()),
        Err(failed) => Err(not_unmapped(address.0, failed)),
    }
}

/// Takes a mapping of memory that the program has freed out of the books, which keep its place: the
/// memory goes with its last mapping.
fn suspend(address: u64) -> Option<(usize, Mapping)> {
    let mut books = BOOKS.lock();
    let place = books.mapped(address)?;
    books.physical.at(place).mappings.suspend(address).map(|mapping| (place, mapping))
}

/// Unmaps memory that the program has freed.
#[cold]
fn unmap_last(address: u64) -> Outcome {
    let (place, mapping) = suspend(address).ok_or_else(|| not_mapped(address))?;
    match mapping.unmap() {
        Ok(()) => end(address, place),
        Err(Failed { object, error }) => {
            BOOKS.lock().physical.at(place).mappings.complete(address, object);
            Err(Fault::driver(error))
        }
    }
}

/// Unmaps memory that the program has freed: now, or when nothing uses the mapping any more.
pub(crate) fn end_mapping(address: u64) {
    if let Some((place, mapping)) = suspend(address) {
        drop(mapping);
        let _ = end(address, place);
    }
}

/// Enters a mapping again that the driver has not undone.
#[cold]
fn not_unmapped(address: u64, failed: Failed<Mapping>) -> Box<Fault> {
    // Another thread may have released the addresses, or freed the memory: then the mapping goes
    // with them, if the driver lets it.
    let left = BOOKS.lock().enter(address, failed.object);
    drop(left);
    Fault::driver(failed.error)
}

#[cold]
fn not_mapped(address: u64) -> Box<Fault> {
    Fault::new(code::RT_DRIVER, format!("{address:#x} is not where aclrtMapMem mapped memory, or is unmapped already."))
}

/// The handle of the mapping that begins at an address.
pub(crate) fn handle_at(address: u64) -> Option<Handle> {
    let mut books = BOOKS.lock();
    let place = books.mapped(address)?;
    Some(books.physical.entry(place).0)
}

/// The reservation that contains an address: its start and size.
pub(crate) fn reserved_at(address: u64) -> Option<(u64, u64)> {
    BOOKS.lock().areas.around(address).map(|(area, _)| (area.start, area.size))
}

/// Whether anything is reserved.
pub(crate) fn is_used() -> bool {
    !BOOKS.lock().areas.list.is_empty()
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
        Location::HOST => mapping.is_visible_to_host(),
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
