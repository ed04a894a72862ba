//! Reserved addresses, the mappings in them, and access to these.
//!
//! Reservations, mappings and physical memory are in tables behind one lock. The lock is never held
//! over a system call: a mapping is entered without its object before it is made, and the entry
//! stays until it is undone.

use crate::border::{Address, In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::{Handle, Table};
use crate::physical::{self, Location, Memories, Physical};
use crate::{devices, malloc, process};
use ascend_vmm::{
    Error, Failed, Location as Place, LogicalId, Mapping, Page, PhysicalMemory, Reservation, ReserveOptions,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The size of a huge page: what addresses are multiples of.
const PAGE: u64 = Page::Huge.size();

pub(crate) static TABLES: Mutex<Tables> =
    Mutex::new(Tables { reservations: BTreeMap::new(), mappings: BTreeMap::new(), physical: Table::new() });

/// The addresses and the physical memory of the process.
pub(crate) struct Tables {
    /// By their start.
    reservations: BTreeMap<u64, Reservation>,
    /// By their address.
    mappings: BTreeMap<u64, Mapped>,
    pub(crate) physical: Memories,
}

struct Mapped {
    /// Of the memory, which stays in its table as long as it is mapped.
    handle: Handle,
    /// `None` while it is being made or undone.
    mapping: Option<Mapping>,
}

impl Tables {
    /// The reservation that contains an address.
    fn reservation_at(&self, address: u64) -> Option<&Reservation> {
        let (start, reservation) = self.reservations.range(..=address).next_back()?;
        (address - start < reservation.size()).then_some(reservation)
    }

    /// Enters a mapping that is about to be made. Returns its reservation and its memory.
    fn begin(&mut self, address: u64, size: u64, handle: Handle) -> Outcome<(Reservation, PhysicalMemory)> {
        let reservation = self.reservation_at(address).cloned().ok_or_else(|| outside(address))?;
        let physical = self.physical.get_mut(handle).filter(|physical| physical.is_held());
        let physical = physical.ok_or_else(physical::unknown)?;
        let Entry::Vacant(place) = self.mappings.entry(address) else {
            let text = format!("memory is mapped at {address:#x}. Call aclrtUnmapMem first.");
            return Err(Fault::new(code::RT_DRIVER, text));
        };
        let memory = &physical.memory;
        // A size that is no multiple of a page means whole pages.
        if size.checked_next_multiple_of(memory.page().size()) != Some(memory.size()) {
            return Err(other_size(size, memory));
        }
        place.insert(Mapped { handle, mapping: None });
        physical.mappings += 1;
        Ok((reservation, memory.clone()))
    }

    /// Stores a mapping that was made, or could not be undone. Returns it if there is no entry.
    fn put(&mut self, address: u64, mapping: Mapping) -> Option<Mapping> {
        match self.mappings.get_mut(&address) {
            Some(mapped) => mapped.mapping.replace(mapping),
            None => Some(mapping),
        }
    }
}

/// `aclrtReserveMemAddress`.
pub fn reserve(address: Out<Address>, size: usize, alignment: usize, wanted: Address, flags: u64) -> Outcome {
    let address = address.check("virPtr")?;
    if size == 0 {
        return Err(invalid("the size is 0. Reserve 2 MiB or more."));
    }
    if flags > 1 {
        return Err(invalid(format!("flags are {flags}. They are 0 or 1.")));
    }
    if alignment != 0 {
        return Err(refused(format!("the alignment is {alignment}. It is reserved: pass 0.")));
    }
    let size = (size as u64).checked_next_multiple_of(PAGE).unwrap_or(u64::MAX - PAGE + 1);
    let alignment = alignment_of(size);
    let options = match wanted.0 {
        0 => ReserveOptions::default().alignment(alignment),
        wanted if wanted % alignment == 0 => ReserveOptions::default().address(wanted),
        wanted => {
            return Err(refused(format!(
                "expectPtr {wanted:#x} is not a multiple of {alignment:#x}, which this size needs."
            )));
        }
    };
    let reserved = process::session()?.reserve_with(size, &options);
    let reservation = reserved.map_err(|error| not_reserved(error, size, wanted))?;
    address.write(Address(reservation.address()));
    enter(reservation);
    Ok(())
}

/// `aclrtReserveMemAddressNoUCMemory`: its own addresses, from 40 TiB on, need hardware that this
/// library does not support. Otherwise the same as `aclrtReserveMemAddress`.
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

/// The alignment of a reservation, as in the vendor's library: its size rounded up to a power of
/// two, from 2 MiB to 1 GiB. Memory in 1 GiB pages needs multiples of 1 GiB.
fn alignment_of(size: u64) -> u64 {
    size.checked_next_power_of_two().map_or(Page::Giant.size(), |power| power.clamp(PAGE, Page::Giant.size()))
}

/// The size of the driver's largest reservation.
const MOST: u64 = 128 << 30;

fn not_reserved(error: Error, size: u64, wanted: Address) -> Box<Fault> {
    let fault = Box::<Fault>::from(error);
    // The size is more than the driver's, or any address would do: the addresses are used up.
    match fault.code {
        code::RT_PARAM_INVALID if wanted.0 == 0 || size > MOST => fault.with_code(code::RT_MEMORY),
        _ => fault,
    }
}

fn enter(reservation: Reservation) {
    TABLES.lock().reservations.insert(reservation.address(), reservation);
}

/// `aclrtReleaseMemAddress`.
pub fn release(address: Address) -> Outcome {
    let address = address.check("virPtr")?;
    let mut tables = TABLES.lock();
    let Tables { reservations, mappings, .. } = &mut *tables;
    let Entry::Occupied(reservation) = reservations.entry(address) else {
        let text = format!("{address:#x} is not what aclrtReserveMemAddress returned, or is released already.");
        return Err(refused(text));
    };
    let mapped = mappings.range(address..address + reservation.get().size()).count();
    if mapped > 0 {
        let text =
            format!("{mapped} mapping(s) are in the reservation at {address:#x}. Call aclrtUnmapMem for each first.");
        return Err(Fault::new(code::RT_DRIVER, text));
    }
    let reservation = reservation.remove();
    drop(tables);
    match reservation.free() {
        // In use: another thread is copying there, and frees the addresses when it has finished.
        Ok(()) | Err(Failed { error: Error::InUse { .. }, .. }) => Ok(()),
        Err(Failed { error, object }) => {
            enter(object);
            Err(Fault::driver(error))
        }
    }
}

/// `aclrtMapMem`; `aclrtMemMapNoAccess` too, where the owning device has access all the same.
pub fn map(address: Address, size: usize, offset: usize, handle: Handle, flags: u64) -> Outcome {
    let address = address.check("virPtr")?;
    physical::check(handle)?;
    if size == 0 {
        return Err(invalid("the size is 0. Pass the size of the physical memory."));
    }
    if flags != 0 {
        return Err(invalid(format!("flags are {flags}. They are reserved: pass 0.")));
    }
    if offset != 0 {
        return Err(refused(format!("the offset is {offset}. Only all of the memory can be mapped: pass 0.")));
    }
    let (reservation, memory) = TABLES.lock().begin(address, size as u64, handle)?;
    match reservation.map(address - reservation.address(), &memory) {
        Ok(mapping) => {
            let left = TABLES.lock().put(address, mapping);
            drop(left);
            Ok(())
        }
        Err(error) => {
            // Their references would keep memory in use that `end` releases.
            drop((reservation, memory));
            let _ = end(address);
            Err(Fault::driver(error))
        }
    }
}

/// Removes the entry of a mapping that was not made or is undone, and releases the memory if
/// nothing else uses it.
fn end(address: u64) -> Outcome {
    let mut tables = TABLES.lock();
    let unused = tables.mappings.remove(&address).and_then(|mapped| tables.physical.end_mapping(mapped.handle));
    drop(tables);
    unused.map_or(Ok(()), Physical::release)
}

fn outside(address: u64) -> Box<Fault> {
    Fault::new(code::RT_DRIVER, format!("{address:#x} is not in addresses that aclrtReserveMemAddress returned."))
}

fn other_size(size: u64, memory: &PhysicalMemory) -> Box<Fault> {
    let text = format!("the size is {size}, and the memory has {} bytes. Only all of it can be mapped.", memory.size());
    // The kernel takes a size beyond the memory for a lack of memory.
    Fault::new(if size > memory.size() { code::RT_MEMORY } else { code::RT_DRIVER }, text)
}

/// `aclrtUnmapMem`.
pub fn unmap(address: Address) -> Outcome {
    let address = address.check("virPtr")?;
    let mapping = take(address).ok_or_else(|| not_mapped(address))?;
    match mapping.unmap() {
        Ok(()) => end(address),
        Err(Failed { object, error }) => {
            let left = TABLES.lock().put(address, object);
            drop(left);
            Err(Fault::driver(error))
        }
    }
}

/// Takes a mapping out of its entry to undo it. The entry keeps its place until then.
fn take(address: u64) -> Option<Mapping> {
    TABLES.lock().mappings.get_mut(&address)?.mapping.take()
}

/// Unmaps all memory of a device: now, or when nothing uses the mapping any more.
pub(crate) fn end_mappings(device: LogicalId) {
    let tables = TABLES.lock();
    let is_on_device = |handle| tables.physical.get(handle).is_some_and(|physical| physical.is_on(device));
    let on_device = tables.mappings.iter().filter(|(_, mapped)| is_on_device(mapped.handle));
    let addresses: Vec<u64> = on_device.map(|(&address, _)| address).collect();
    drop(tables);
    for address in addresses {
        if let Some(mapping) = take(address) {
            drop(mapping);
            let _ = end(address);
        }
    }
}

fn not_mapped(address: u64) -> Box<Fault> {
    Fault::new(code::RT_DRIVER, format!("{address:#x} is not where aclrtMapMem mapped memory, or is unmapped already."))
}

/// The handle of the memory whose mapping begins at an address.
pub(crate) fn handle_at(address: u64) -> Option<Handle> {
    let tables = TABLES.lock();
    let mapped = tables.mappings.get(&address)?;
    mapped.mapping.is_some().then_some(mapped.handle)
}

/// The reservation that contains an address: its start and size.
pub(crate) fn reserved_at(address: u64) -> Option<(u64, u64)> {
    TABLES.lock().reservation_at(address).map(|reservation| (reservation.address(), reservation.size()))
}

/// Whether anything is reserved.
pub(crate) fn is_used() -> bool {
    !TABLES.lock().reservations.is_empty()
}

/// A grant of access: `aclrtMemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Access {
    flags: i32,
    location: Location,
    reserved: [u8; 12],
}

impl Access {
    pub(crate) fn new(flags: i32, location: Location) -> Access {
        Access { flags, location, reserved: [0; 12] }
    }
}

const READ_WRITE: i32 = 3;

/// The driver's device numbers are below this.
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
            0 | 1 => return Err(unsupported("the driver supports read-write access only: pass 3.")),
            other => return Err(refused(format!("{other} is not a kind of access. Pass 3, read and write."))),
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

/// The mappings that exactly cover a range.
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
    let text = format!("{address:#x} with {size} bytes is not exactly one mapping, or several side by side.");
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
    let (start, length) = found.ok_or_else(|| refused(format!("{address:#x} is not in memory of this library.")))?;
    base.write(Address(start));
    size.write(length as usize);
    Ok(())
}
