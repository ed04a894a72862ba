//! Physical memory: handles that are counted, with or without an address.
//!
//! A handle counts the calls that made it known to the program (`aclrtMallocPhysical`, imports,
//! `aclrtMemRetainAllocationHandle`), each of which `aclrtFreePhysical` takes back, and its
//! mappings, which keep the memory too. The handle itself lives as long as either does, so that a
//! mapping can be asked for the handle that it was made from.

use crate::addresses::{BOOKS, Books};
use crate::border::{In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::{Handle, Table, kind};
use crate::mappings::Mappings;
use crate::{addresses, context, devices, malloc, process};
use ascend_vmm::share::Export;
use ascend_vmm::{Device, Error, Failed, Kind, Location as Place, LogicalId, MemoryKind, Page, PhysicalMemory};
use parking_lot::MutexGuard;

/// Where memory is: `aclrtMemLocation`.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// Number of the device, or of the NUMA node.
    pub id: u32,
    /// One of `aclrtMemLocationType`.
    pub kind: i32,
}

impl Location {
    /// Host memory that the library knows.
    pub const HOST: i32 = 0;
    /// Memory of a device.
    pub const DEVICE: i32 = 1;
    /// Host memory that the library does not know.
    pub const UNREGISTERED: i32 = 2;
    /// Memory of a NUMA node of the host.
    pub const HOST_NUMA: i32 = 4;
}

/// What memory is asked for: `aclrtPhysicalMemProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Properties {
    handle_type: i32,
    allocation_type: i32,
    attribute: i32,
    location: Location,
    reserve: u64,
}

/// The physical memory of the process, by its handles.
pub(crate) type Memories = Table<Physical, { kind::MEMORY }>;

/// Physical memory that the program has a handle of.
#[derive(Debug, Default)]
pub(crate) struct Physical {
    /// `None` if the program has freed it, as often as it may.
    pub(crate) memory: Option<PhysicalMemory>,
    /// Memory that the program has freed, which is still mapped.
    freed: Option<PhysicalMemory>,
    /// The kind and place that were asked for.
    attribute: i32,
    location: Location,
    /// How often the program may free it.
    users: u32,
    /// The share that it was exported as.
    export: Option<Box<Export>>,
    /// Where it is mapped.
    pub(crate) mappings: Mappings,
}

/// Memory that nothing uses any more, to be released when no lock is held.
#[derive(Debug)]
pub(crate) struct Unused {
    memory: Option<PhysicalMemory>,
    export: Option<Box<Export>>,
}

impl Unused {
    /// Releases it.
    pub(crate) fn release(self) -> Outcome {
        drop(self.export);
        release(self.memory)
    }
}

impl Physical {
    /// The memory, freed or not.
    fn any(&self) -> Option<&PhysicalMemory> {
        self.memory.as_ref().or(self.freed.as_ref())
    }

    /// The program has it once more.
    fn retain(&mut self) {
        self.users += 1;
        self.memory = self.memory.take().or_else(|| self.freed.take());
    }

    /// The program has freed it as often as it may.
    fn give_up(&mut self) {
        self.users = 0;
        self.freed = self.freed.take().or_else(|| self.memory.take());
    }

    fn is_unused(&self) -> bool {
        self.users == 0 && self.mappings.is_empty()
    }
}

impl Memories {
    /// Takes memory in.
    #[inline]
    fn enter(&mut self, memory: PhysicalMemory, attribute: i32, location: Location) -> Outcome<Handle> {
        let (handle, place) = self.insert()?;
        // Nothing else is left of what was there: see `take`.
        std::mem::forget(place.memory.replace(memory));
        place.attribute = attribute;
        place.location = location;
        place.users = 1;
        Ok(handle)
    }

    /// The place of some memory.
    pub(crate) fn place_of(&self, memory: &PhysicalMemory) -> Option<usize> {
        let same = |physical: &Physical| physical.any().is_some_and(|own| own.is_same(memory));
        let (handle, _) = self.iter().find(|(_, physical)| same(physical))?;
        self.find(handle)
    }

    /// Gives the place of memory up, and what is there.
    #[inline]
    fn take(&mut self, place: usize) -> Unused {
        let physical = self.vacate(place);
        Unused { memory: physical.memory.take().or_else(|| physical.freed.take()), export: physical.export.take() }
    }

    /// The same, if nothing uses the memory any more.
    pub(crate) fn take_unused(&mut self, place: usize) -> Option<Unused> {
        self.at(place).is_unused().then(|| self.take(place))
    }
}

impl Properties {
    /// HBM in 2 MiB pages, by the program's number of a device.
    pub(crate) fn on_device(id: u32) -> Properties {
        let location = Location { id, kind: Location::DEVICE };
        Properties { handle_type: 0, allocation_type: 0, attribute: USUAL_ATTRIBUTE, location, reserve: 0 }
    }

    /// Whether this is HBM in 2 MiB pages of any device, and nothing else.
    #[inline]
    fn is_usual(&self) -> bool {
        let types = self.handle_type | self.allocation_type;
        let kinds = self.attribute ^ USUAL_ATTRIBUTE | self.location.kind ^ Location::DEVICE;
        types | kinds == 0 && self.reserve == 0
    }

    /// The checks of the vendor's outer layer, in its order.
    fn check(&self) -> Outcome<Kind> {
        if self.allocation_type != 0 {
            return Err(invalid("allocationType is not ACL_MEM_ALLOCATION_TYPE_PINNED, the only one there is."));
        }
        let host = match self.location.kind {
            Location::HOST | Location::HOST_NUMA => true,
            Location::DEVICE => false,
            _ => return Err(invalid("location.type is not a place for memory: use device (1), host (0) or NUMA (4).")),
        };
        if !host && matches!(self.attribute, 0 | 2 | 3 | 6 | 7) {
            return Err(invalid("memAttr is DDR, which is memory of the host. Use ACL_HBM_MEM_HUGE on a device."));
        }
        let (memory, page) = match self.attribute {
            2 | 3 => (MemoryKind::Ddr, Page::Huge),
            4 | 5 => (MemoryKind::Hbm, Page::Huge),
            6 | 7 => (MemoryKind::P2pDdr, Page::Huge),
            10 => (MemoryKind::Hbm, Page::Giant),
            12 | 13 => (if host { MemoryKind::Ddr } else { MemoryKind::Hbm }, Page::Huge),
            14 => (if host { MemoryKind::Ddr } else { MemoryKind::Hbm }, Page::Giant),
            15 | 16 => (if host { MemoryKind::P2pDdr } else { MemoryKind::P2pHbm }, Page::Huge),
            17 => (if host { MemoryKind::P2pDdr } else { MemoryKind::P2pHbm }, Page::Giant),
            other => {
                return Err(invalid(format!(
                    "memAttr {other} is no kind of physical memory. Use ACL_HBM_MEM_HUGE (4)."
                )));
            }
        };
        Ok(Kind { page, memory })
    }
}

/// `aclrtMallocPhysical`.
#[inline]
pub fn allocate(handle: Out<Handle>, size: usize, properties: In<Properties>, flags: u64) -> Outcome {
    let place = handle.check("handle")?;
    let asked = properties.read("prop")?;
    // What almost all programs ask for.
    if asked.is_usual() && flags == 0 {
        let create = |device: &Device| device.create_with(size as u64, USUAL).map_err(Box::new);
        match process::with_open_device(asked.location.id, create) {
            Some(Ok(memory)) => {
                let location = Location { id: asked.location.id, kind: Location::DEVICE };
                place.write(BOOKS.lock().physical.enter(memory, USUAL_ATTRIBUTE, location)?);
                return Ok(());
            }
            Some(Err(error)) => return allocate_again(*error, place, size, properties),
            None => {}
        }
    }
    allocate_any(place, size, properties, flags)
}

/// HBM in 2 MiB pages.
const USUAL: Kind = Kind { page: Page::Huge, memory: MemoryKind::Hbm };
/// The same, as C names it.
const USUAL_ATTRIBUTE: i32 = 4;

/// The usual memory was not created at once: the size is to be checked or rounded up, or memory is
/// used up.
#[cold]
fn allocate_again(error: Error, place: Out<Handle>, size: usize, properties: In<Properties>) -> Outcome {
    if let Error::Invalid(_) = error {
        return allocate_any(place, size, properties, 0);
    }
    let Properties { attribute, location, .. } = properties.read("prop")?;
    let device = devices::by_user(location.id.into())?.logical;
    let memory = create_again(error, device, size as u64, USUAL)?;
    place.write(BOOKS.lock().physical.enter(memory, attribute, location)?);
    Ok(())
}

/// All of the checks, and what a program asks for once: the rest of [`allocate`].
#[cold]
fn allocate_any(handle: Out<Handle>, size: usize, properties: In<Properties>, flags: u64) -> Outcome {
    let properties = properties.read("prop")?;
    if size == 0 || flags != 0 || properties.handle_type != 0 {
        return Err(wrong_arguments(size, flags));
    }
    let kind = properties.check()?;
    let memory = create(size as u64, kind, &properties)?;
    handle.write(BOOKS.lock().physical.enter(memory, properties.attribute, properties.location)?);
    Ok(())
}

#[cold]
fn wrong_arguments(size: usize, flags: u64) -> Box<Fault> {
    match () {
        () if size == 0 => invalid("the size is 0. Ask for 2 MiB or more."),
        () if flags != 0 => invalid(format!("flags are {flags}. They are reserved: pass 0.")),
        () => invalid("handleType is not ACL_MEM_HANDLE_TYPE_NONE, the only one there is."),
    }
}

fn create(size: u64, kind: Kind, properties: &Properties) -> Outcome<PhysicalMemory> {
    let Location { id, kind: place } = properties.location;
    // The driver counts pages up.
    let page = kind.page.size();
    let rounded = size.checked_next_multiple_of(page).filter(|size| size / page <= u32::MAX.into());
    let too_much = || Fault::new(code::RT_MEMORY, format!("{size} bytes are more than any device or host has."));
    if place == Location::DEVICE {
        let device = devices::by_user(id.into())?.logical;
        reserved(properties)?;
        let (device, size, id) = (process::device(device)?, rounded.ok_or_else(too_much)?, device);
        let created = device.create_with(size, kind);
        return created.or_else(|error| create_again(error, id, size, kind));
    }
    if place == Location::HOST_NUMA {
        context::current()?;
    } else if id != 0 {
        return Err(unsupported(format!("location.id is {id} for the host. There is one host: pass 0.")));
    }
    reserved(properties)?;
    let (host, size) = (process::session()?.host()?, rounded.ok_or_else(too_much)?);
    let memory = match place {
        Location::HOST_NUMA => host.create_on_node(size, kind, id),
        _ => host.create_with(size, kind),
    };
    memory.map_err(|error| not_created(error, kind))
}

fn reserved(properties: &Properties) -> Outcome {
    if properties.reserve == 0 { Ok(()) } else { Err(refused("prop.reserve is not 0. It is reserved.")) }
}

/// Tries again if memory is used up and the pools had some to give back.
#[cold]
fn create_again(error: Error, device: LogicalId, size: u64, kind: Kind) -> Outcome<PhysicalMemory> {
    let created = match error {
        Error::OutOfMemory(_) if malloc::trim() => process::device(device)?.create_with(size, kind),
        error => Err(error),
    };
    created.map_err(|error| not_created(error, kind))
}

#[cold]
fn not_created(error: Error, kind: Kind) -> Box<Fault> {
    let fault = Box::<Fault>::from(error);
    // The only argument that our library refuses here: pages that the device does not have.
    match kind.page {
        Page::Giant if fault.code == code::RT_PARAM_INVALID => fault.with_code(code::RT_NOT_SUPPORTED),
        _ => fault,
    }
}

/// `aclrtFreePhysical`: memory that is mapped stays until it is unmapped.
#[inline]
pub fn free(handle: Handle) -> Outcome {
    let mut books = BOOKS.lock();
    let Some(place) = books.physical.find(handle) else { return Err(not_freed(handle)) };
    let physical = books.physical.at(place);
    if physical.users != 1 || !physical.mappings.is_empty() || physical.export.is_some() {
        return free_shared(books, place);
    }
    let memory = books.physical.vacate(place).memory.take();
    drop(books);
    release(memory)
}

/// Frees memory that is used otherwise too, or exported.
#[cold]
fn free_shared(mut books: MutexGuard<'_, Books>, place: usize) -> Outcome {
    let physical = books.physical.at(place);
    if physical.users == 0 {
        return Err(unknown());
    }
    match physical.users {
        1 => physical.give_up(),
        _ => physical.users -= 1,
    }
    let unused = books.physical.take_unused(place);
    drop(books);
    unused.map_or(Ok(()), Unused::release)
}

#[cold]
fn not_freed(handle: Handle) -> Box<Fault> {
    match handle {
        Handle::NULL => invalid("handle is NULL. Pass one that aclrtMallocPhysical returned."),
        _ => unknown(),
    }
}

#[cold]
pub(crate) fn unknown() -> Box<Fault> {
    refused("this is no handle of physical memory, or it was freed as often as it was allocated, imported or retained.")
}

/// Looks at memory under the books' lock; `None` if there is no such handle.
fn with<R>(handle: Handle, look: impl FnOnce(&mut Physical) -> R) -> Option<R> {
    BOOKS.lock().physical.get_mut(handle).map(look)
}

/// What `pick` takes of all memory.
fn collect<R>(mut pick: impl FnMut(Handle, &Physical) -> Option<R>) -> Vec<R> {
    BOOKS.lock().physical.iter().filter_map(|(handle, physical)| pick(handle, physical)).collect()
}

/// Releases memory that nothing uses any more.
#[inline]
fn release(memory: Option<PhysicalMemory>) -> Outcome {
    let Some(memory) = memory else { return Ok(()) };
    match memory.free() {
        Ok(()) => Ok(()),
        Err(failed) => not_released(failed),
    }
}

#[cold]
fn not_released(failed: Failed<PhysicalMemory>) -> Outcome {
    match failed.error {
        // Another thread is just using it, and will be the last.
        Error::InUse { .. } => Ok(()),
        // Dropping it makes the library keep it, and try again when the device is closed.
        _ => Err(failed.into()),
    }
}

/// `aclrtMemRetainAllocationHandle`: of a mapping's first address.
pub fn retain(address: crate::border::Address, handle: Out<Handle>) -> Outcome {
    let address = address.check("virPtr")?;
    let handle = handle.check("handle")?;
    let found = addresses::handle_at(address)
        .filter(|&found| with(found, Physical::retain).is_some())
        .ok_or_else(|| refused(format!("{address:#x} is not where aclrtMapMem mapped memory.")))?;
    handle.write(found);
    Ok(())
}

/// `aclrtMemGetAllocationPropertiesFromHandle`.
pub fn properties(handle: Handle, properties: Out<Properties>) -> Outcome {
    let properties = properties.check("prop")?;
    if handle.is_null() {
        return Err(invalid("handle is NULL. Pass one that aclrtMallocPhysical returned."));
    }
    let asked = |physical: &mut Physical| (physical.attribute, physical.location);
    let (attribute, location) = with(handle, asked).ok_or_else(unknown)?;
    properties.write(Properties { handle_type: 0, allocation_type: 0, attribute, location, reserve: 0 });
    Ok(())
}

/// `aclrtMemGetAllocationGranularity`.
pub fn granularity(properties: In<Properties>, option: i32, granularity: Out<usize>) -> Outcome {
    let granularity = granularity.check("granularity")?;
    let kind = properties.read("prop")?.check()?;
    if !(0..2).contains(&option) {
        return Err(unsupported(format!("{option} is no option. Use minimum (0) or recommended (1).")));
    }
    granularity.write(kind.granularity().minimum as usize);
    Ok(())
}

/// The handle of memory that the program has already, counted once more.
pub(crate) fn retain_same(memory: &PhysicalMemory) -> Option<Handle> {
    let same = collect(|handle, physical| physical.any().is_some_and(|own| own.is_same(memory)).then_some(handle));
    same.into_iter().find(|&handle| with(handle, Physical::retain).is_some())
}

/// Takes imported memory in.
pub(crate) fn import(memory: PhysicalMemory, device: LogicalId) -> Outcome<Handle> {
    // The kind that the vendor's library reports for memory it knows nothing more of.
    let attribute = match memory.page() {
        Page::Huge => 4,
        Page::Giant => 10,
    };
    let location = match memory.location() {
        Place::Device(_) => Location { id: devices::user_of(device), kind: Location::DEVICE },
        Place::Host => Location { id: 0, kind: Location::HOST },
    };
    BOOKS.lock().physical.enter(memory, attribute, location)
}

/// Exports the memory behind a handle, once.
pub(crate) fn export(handle: Handle, anyone: bool) -> Outcome<Export> {
    let exportable = |physical: &mut Physical| Some((physical.memory.clone()?, physical.export.is_some()));
    let (memory, exported) = with(handle, exportable).flatten().ok_or_else(unknown)?;
    if exported {
        let text = "the handle is exported already, and the driver exports one once. Use the shareable handle of then.";
        return Err(Fault::new(code::RT_DRIVER, text));
    }
    let export = memory.export().map_err(Fault::driver)?;
    if anyone {
        export.trust_anyone()?;
    }
    with(handle, |physical| physical.export = Some(Box::new(export.clone())));
    Ok(export)
}

/// The export of this process with a shareable handle.
pub(crate) fn export_of(shareable: u64) -> Option<Export> {
    let of = |physical: &Physical| physical.export.clone().filter(|export| export.handle().to_u64() == shareable);
    collect(|_, physical| of(physical)).pop().map(|export| *export)
}

/// Whether there is any.
pub(crate) fn is_used() -> bool {
    BOOKS.lock().physical.iter().next().is_some()
}

/// Ends all memory of a device, mapped or not.
pub(crate) fn end(device: LogicalId) {
    let on_device = |memory: &PhysicalMemory| memory.location() == Place::Device(device);
    let of = |physical: &Physical| physical.any().is_some_and(on_device);
    let handles = collect(|handle, physical| of(physical).then_some(handle));
    for handle in handles {
        let left = |physical: &mut Physical| {
            physical.give_up();
            physical.mappings.addresses()
        };
        with(handle, left).unwrap_or_default().into_iter().for_each(addresses::end_mapping);
        let mut books = BOOKS.lock();
        // What another thread is just mapping goes when it is unmapped.
        let ended = books.physical.find(handle).and_then(|place| books.physical.take_unused(place));
        drop(books);
        drop(ended);
    }
}
