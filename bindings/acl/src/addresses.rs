//! Reserved addresses, what is mapped there, and who may use it.
//!
//! One set of books has all reservations by their address, in each the place of every mapping, and
//! the handles of physical memory, so that an address is found without following it. The books'
//! lock is never held over a system call: a mapping is entered without its object before it is
//! made, and gets the object when it is.

use crate::border::{Address, In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::{Handle, Table};
use crate::physical::{self, Location, Memories};
use crate::{devices, malloc, process};
use ascend_vmm::{
    Error, Failed, Location as Place, Mapping, Page, PhysicalMemory, Reservation, ReserveOptions, Session,
};
use parking_lot::Mutex;
use std::collections::BTreeSet;

/// The size of a huge page: what addresses are multiples of.
const PAGE: u64 = Page::Huge.size();

pub(crate) static BOOKS: Mutex<Books> = Mutex::new(Books {
    areas: Areas { list: Vec::new(), recent: 0 },
    mappings: Vec::new(),
    free: Vec::new(),
    physical: Table::new(),
});

/// What the process has of addresses and physical memory.
pub(crate) struct Books {
    areas: Areas,
    /// The mappings, at places that the areas name.
    mappings: Vec<Mapped>,
    /// Places that are free.
    free: Vec<u32>,
    pub(crate) physical: Memories,
}

struct Areas {
    /// By their start.
    list: Vec<Area>,
    /// Where the area was that was used last: programs use one many times.
    recent: usize,
}

struct Area {
    start: u64,
    size: u64,
    reservation: Reservation,
    places: Places,
    /// How many mappings there are, or are being made.
    mapped: u32,
}

/// For each page of a reservation, the place of the mapping that begins there plus 1.
enum Places {
    /// Of the only page.
    One(u32),
    /// Of several: zeroed memory that is not touched before something is mapped.
    Several(Box<[u32]>),
}

struct Mapped {
    /// `None` while it is being made.
    mapping: Option<Mapping>,
    /// The handle that was mapped.
    handle: Handle,
    /// Whether the CPU was given access.
    host: bool,
}

impl Area {
    #[inline]
    fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.start) < self.size
    }

    /// What is said of the page that begins at an address of the area; `None` if none does.
    #[inline]
    fn page(&mut self, address: u64) -> Option<&mut u32> {
        if address % PAGE != 0 {
            return None;
        }
        match &mut self.places {
            Places::One(place) => Some(place),
            Places::Several(places) => places.get_mut(((address - self.start) / PAGE) as usize),
        }
    }
}

impl Areas {
    /// The area that contains an address, and where it is in the list.
    #[inline]
    fn find(&mut self, address: u64) -> Option<(usize, &mut Area)> {
        if !self.list.get(self.recent).is_some_and(|area| area.contains(address)) {
            self.search(address)?;
        }
        Some((self.recent, self.list.get_mut(self.recent)?))
    }

    #[inline(never)]
    fn search(&mut self, address: u64) -> Option<()> {
        let index = self.list.partition_point(|area| area.start <= address).checked_sub(1)?;
        self.recent = index;
        self.list[index].contains(address).then_some(())
    }

    /// The area that contains an address.
    #[inline]
    fn around(&mut self, address: u64) -> Option<&mut Area> {
        self.find(address).map(|(_, area)| area)
    }

    #[inline]
    fn insert(&mut self, area: Area) {
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
}

impl Books {
    /// The mapping that begins at an address.
    fn mapped(&mut self, address: u64) -> Option<&mut Mapped> {
        let place = self.areas.around(address)?.page(address)?.checked_sub(1)?;
        self.mappings.get_mut(place as usize).filter(|mapped| mapped.mapping.is_some())
    }

    /// Takes the mapping that begins at an address out.
    #[inline]
    fn remove(&mut self, address: u64) -> Option<(Mapping, Handle, bool)> {
        let area = self.areas.around(address)?;
        let page = area.page(address)?;
        let place = page.checked_sub(1)?;
        let entry = self.mappings.get_mut(place as usize)?;
        let mapping = entry.mapping.take()?;
        *page = 0;
        area.mapped -= 1;
        self.free.push(place);
        Some((mapping, entry.handle, entry.host))
    }

    /// Enters a mapping again; it comes back if its address is not reserved any more, or taken.
    #[cold]
    fn enter(&mut self, address: u64, mapped: Mapped) -> Result<(), Mapped> {
        let Some(area) = self.areas.around(address) else { return Err(mapped) };
        let Some(page) = area.page(address).filter(|page| **page == 0) else { return Err(mapped) };
        let (place, entry) = next(&mut self.mappings, &mut self.free);
        *page = place + 1;
        area.mapped += 1;
        *entry = mapped;
        Ok(())
    }
}

/// A place for a mapping.
#[inline]
fn next<'a>(mappings: &'a mut Vec<Mapped>, free: &mut Vec<u32>) -> (u32, &'a mut Mapped) {
    let place = free.pop().unwrap_or_else(|| {
        mappings.push(Mapped { mapping: None, handle: Handle::NULL, host: false });
        mappings.len() as u32 - 1
    });
    (place, &mut mappings[place as usize])
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
    let places = match size {
        PAGE => Places::One(0),
        _ => Places::Several(vec![0; (size / PAGE) as usize].into()),
    };
    BOOKS.lock().areas.insert(Area { start, size, reservation, places, mapped: 0 });
}

/// `aclrtReleaseMemAddress`.
#[inline]
pub fn release(address: Address) -> Outcome {
    let address = address.check("virPtr")?;
    let mut books = BOOKS.lock();
    let areas = &mut books.areas;
    let Some((index, area)) = areas.find(address).filter(|(_, area)| area.start == address) else {
        return Err(not_reserved_at(address));
    };
    if area.mapped > 0 {
        return Err(still_mapped(address, area.mapped));
    }
    // Taking the last one out this way moves nothing.
    let area = if index + 1 == areas.list.len() { areas.list.pop() } else { Some(areas.list.remove(index)) };
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
    let address = address.check("virPtr")?;
    if size == 0 || handle.is_null() || flags != 0 || offset != 0 {
        return Err(wrong_mapping(size, handle, offset, flags));
    }
    let mut guard = BOOKS.lock();
    let books = &mut *guard;
    let Some(area) = books.areas.around(address) else { return Err(outside(address)) };
    let Some(physical) = books.physical.get_mut(handle) else { return Err(physical::unknown()) };
    let Some(memory) = physical.memory() else { return Err(physical::unknown()) };
    let Some(page) = area.page(address).filter(|page| **page == 0) else { return Err(taken(address)) };
    let (place, entry) = next(&mut books.mappings, &mut books.free);
    *page = place + 1;
    entry.handle = handle;
    entry.host = false;
    area.mapped += 1;
    physical.mappings += 1;
    let (offset, reservation) = (address - area.start, area.reservation.clone());
    drop(guard);
    let mapped = if size as u64 == memory.size() || rounds_up(size as u64, &memory) {
        map_there(&reservation, offset, &memory)
    } else {
        Err(other_size(size, &memory))
    };
    match mapped {
        Ok(mapping) => {
            BOOKS.lock().mappings[place as usize].mapping = Some(mapping);
            Ok(())
        }
        Err(fault) => {
            give_up(address, place, handle);
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

/// Takes an entry back whose mapping was not made.
#[cold]
fn give_up(address: u64, place: u32, handle: Handle) {
    let mut books = BOOKS.lock();
    if let Some(area) = books.areas.around(address) {
        area.mapped -= 1;
        if let Some(page) = area.page(address) {
            *page = 0;
        }
        books.free.push(place);
    }
    drop(books);
    let _ = physical::end_mapping(handle);
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
    let address = address.check("virPtr")?;
    let mut books = BOOKS.lock();
    let Some((mapping, handle, host)) = books.remove(address) else { return Err(not_mapped(address)) };
    let counted = books.physical.leave_mapping(handle);
    drop(books);
    match mapping.unmap() {
        Ok(()) if counted => Ok(()),
        Ok(()) => physical::end_mapping(handle),
        Err(Failed { object, error }) => {
            Err(not_unmapped(address, Mapped { mapping: Some(object), handle, host }, counted, error))
        }
    }
}

/// Enters a mapping again that the driver has not undone.
#[cold]
fn not_unmapped(address: u64, mapped: Mapped, counted: bool, error: Error) -> Box<Fault> {
    let mut books = BOOKS.lock();
    let handle = mapped.handle;
    if counted {
        books.physical.return_mapping(handle);
    }
    let entered = books.enter(address, mapped);
    drop(books);
    match entered {
        Ok(_) => Fault::driver(error),
        // Another thread has released the addresses: the mapping goes with them, if the driver lets
        // it.
        Err(mapped) => {
            drop(mapped);
            let _ = physical::end_mapping(handle);
            outside(address)
        }
    }
}

#[cold]
fn not_mapped(address: u64) -> Box<Fault> {
    Fault::new(code::RT_DRIVER, format!("{address:#x} is not where aclrtMapMem mapped memory, or is unmapped already."))
}

/// The handle of the mapping that begins at an address.
pub(crate) fn handle_at(address: u64) -> Option<Handle> {
    BOOKS.lock().mapped(address).map(|mapped| mapped.handle)
}

/// The reservation that contains an address: its start and size.
pub(crate) fn reserved_at(address: u64) -> Option<(u64, u64)> {
    BOOKS.lock().areas.around(address).map(|area| (area.start, area.size))
}

/// Unmaps whatever is mapped of these handles. What is in use goes when it is not any more.
pub(crate) fn unmap_all(handles: &[Handle]) {
    let handles: BTreeSet<Handle> = handles.iter().copied().collect();
    let mut books = BOOKS.lock();
    let of = |mapped: &Mapped| handles.contains(&mapped.handle).then_some(mapped.mapping.as_ref()?.address());
    let addresses: Vec<u64> = books.mappings.iter().filter_map(of).collect();
    let mapped: Vec<_> = addresses.into_iter().filter_map(|address| books.remove(address)).collect();
    drop(books);
    drop(mapped);
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
        if let Some(mapped) = BOOKS.lock().mapped(mapping.address()) {
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
            place == Place::Host || BOOKS.lock().mapped(mapping.address()).is_some_and(seen)
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
