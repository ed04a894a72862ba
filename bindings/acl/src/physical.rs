//! Physical memory: counted handles, mapped or not.
//!
//! A handle counts the calls that returned it (`aclrtMallocPhysical`, imports,
//! `aclrtMemRetainAllocationHandle`), less those of `aclrtFreePhysical`, and its mappings, which
//! also keep the memory. The handle lives as long as either count is above 0, so that a mapping
//! still knows its handle.

use crate::addresses::TABLES;
use crate::border::{In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::{Handle, Table, kind};
use crate::{addresses, context, devices, malloc, process};
use ascend_vmm::share::Export;
use ascend_vmm::{Error, Failed, Kind, Location as Place, LogicalId, MemoryKind, Page, PhysicalMemory};

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
    /// Memory that moves between host and devices.
    pub const MANAGED: i32 = 3;
    /// Memory of a NUMA node of the host.
    pub const HOST_NUMA: i32 = 4;
}

/// The wanted memory: `aclrtPhysicalMemProp`.
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

/// Physical memory with a handle.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) memory: PhysicalMemory,
    /// The requested kind and place.
    attribute: i32,
    location: Location,
    /// How often the program may still free it.
    users: u64,
    /// Its export, if there is one.
    export: Option<Export>,
    /// Mappings, including those being made or undone.
    pub(crate) mappings: u64,
}

impl Physical {
    fn new(memory: PhysicalMemory, attribute: i32, location: Location) -> Physical {
        Physical { memory, attribute, location, users: 1, export: None, mappings: 0 }
    }

    /// Whether the program may still use the handle.
    pub(crate) fn is_held(&self) -> bool {
        self.users > 0
    }

    /// Whether it is memory of a device.
    pub(crate) fn is_on(&self, device: LogicalId) -> bool {
        self.memory.location() == Place::Device(device)
    }

    /// Counts one more user.
    fn retain(&mut self) {
        self.users += 1;
    }

    /// Releases memory that nothing uses any more. Call it without the lock.
    pub(crate) fn release(self) -> Outcome {
        drop(self.export);
        match self.memory.free() {
            // In use: another thread is using it, and releases it when it has finished.
            Ok(()) | Err(Failed { error: Error::InUse { .. }, .. }) => Ok(()),
            // Dropped here: the Rust library tries again when the device is closed.
            Err(failed) => Err(failed.into()),
        }
    }
}

impl Memories {
    /// Counts one mapping less. Returns the memory if nothing uses it any more.
    pub(crate) fn end_mapping(&mut self, handle: Handle) -> Option<Physical> {
        self.get_mut(handle)?.mappings -= 1;
        self.take_unused(handle)
    }

    /// Removes and returns memory that nothing uses any more.
    fn take_unused(&mut self, handle: Handle) -> Option<Physical> {
        let physical = self.get(handle)?;
        if physical.is_held() || physical.mappings > 0 {
            return None;
        }
        self.remove(handle)
    }
}

impl Properties {
    /// HBM in 2 MiB pages, by the program's device number.
    pub(crate) fn on_device(id: u32) -> Properties {
        let location = Location { id, kind: Location::DEVICE };
        Properties { handle_type: 0, allocation_type: 0, attribute: HBM_HUGE, location, reserve: 0 }
    }

    /// The checks of the vendor's outer layer, in its order.
    fn check(&self) -> Outcome<Kind> {
        if self.allocation_type != 0 {
            return Err(invalid("allocationType is not ACL_MEM_ALLOCATION_TYPE_PINNED, the only one there is."));
        }
        let no_place = "location.type has no memory: use device (1), host (0) or NUMA (4).";
        let host = match self.location.kind {
            Location::UNREGISTERED | Location::MANAGED => return Err(invalid(no_place)),
            place => place != Location::DEVICE,
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
                    "memAttr {other} is not a kind of physical memory. Use ACL_HBM_MEM_HUGE (4)."
                )));
            }
        };
        // Other numbers are refused by the vendor's inner layer, which sees them last.
        if !matches!(self.location.kind, Location::DEVICE | Location::HOST | Location::HOST_NUMA) {
            return Err(refused(no_place));
        }
        Ok(Kind { page, memory })
    }
}

/// HBM in 2 MiB pages.
const HBM_HUGE: i32 = 4;

/// `aclrtMallocPhysical`.
pub fn allocate(handle: Out<Handle>, size: usize, properties: In<Properties>, flags: u64) -> Outcome {
    let handle = handle.check("handle")?;
    let properties = properties.read("prop")?;
    if size == 0 {
        return Err(invalid("the size is 0. Ask for 2 MiB or more."));
    }
    if flags != 0 {
        return Err(invalid(format!("flags are {flags}. They are reserved: pass 0.")));
    }
    if properties.handle_type != 0 {
        return Err(invalid("handleType is not ACL_MEM_HANDLE_TYPE_NONE, the only one there is."));
    }
    let kind = properties.check()?;
    let memory = create(size as u64, kind, &properties)?;
    handle.write(enter(Physical::new(memory, properties.attribute, properties.location))?);
    Ok(())
}

/// Enters memory that was created under a name of the driver's own library.
pub(crate) fn enter_created(memory: PhysicalMemory, attribute: i32, location: Location) -> Outcome<Handle> {
    enter(Physical::new(memory, attribute, location))
}

/// Where the memory behind a handle is.
pub(crate) fn place(handle: Handle) -> Outcome<Place> {
    with(handle, |physical| physical.memory.location()).ok_or_else(unknown)
}

/// Enters memory.
fn enter(physical: Physical) -> Outcome<Handle> {
    TABLES.lock().physical.insert(physical)
}

fn create(size: u64, kind: Kind, properties: &Properties) -> Outcome<PhysicalMemory> {
    let Location { id, kind: place } = properties.location;
    let page = kind.page.size();
    // The vendor's library rounds up to 1 GiB, but not to 2 MiB.
    let rounded = size.checked_next_multiple_of(page).filter(|size| size / page <= u32::MAX.into());
    let is_whole = kind.page == Page::Giant || rounded.is_none_or(|rounded| rounded == size);
    let check_whole = || match is_whole {
        true => Ok(()),
        false => Err(Fault::new(code::RT_DRIVER, format!("{size} bytes are not a multiple of the page size, {page}."))),
    };
    let too_much = || Fault::new(code::RT_MEMORY, format!("{size} bytes are more than any device or host has."));
    if place == Location::DEVICE {
        let device = devices::by_user(id.into())?.logical;
        reserved(properties)?;
        check_whole()?;
        let (device, size) = (process::device(device)?, rounded.ok_or_else(too_much)?);
        let created = match device.create_with(size, kind) {
            // The pools may have had free pages.
            Err(Error::OutOfMemory(_)) if malloc::trim() => device.create_with(size, kind),
            created => created,
        };
        return created.map_err(|error| not_created(error, kind));
    }
    if place == Location::HOST_NUMA {
        context::current()?;
    } else if id != 0 {
        return Err(unsupported(format!("location.id is {id} for the host. There is one host: pass 0.")));
    }
    reserved(properties)?;
    check_whole()?;
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

fn not_created(error: Error, kind: Kind) -> Box<Fault> {
    let fault = Box::<Fault>::from(error);
    // The only argument that the Rust library refuses here is a page size that the device lacks.
    match kind.page {
        Page::Giant if fault.code == code::RT_PARAM_INVALID => fault.with_code(code::RT_NOT_SUPPORTED),
        _ => fault,
    }
}

/// `aclrtFreePhysical`: memory that is mapped stays until it is unmapped.
pub fn free(handle: Handle) -> Outcome {
    check(handle)?;
    let mut tables = TABLES.lock();
    let physical = tables.physical.get_mut(handle).filter(|physical| physical.is_held());
    physical.ok_or_else(unknown)?.users -= 1;
    let unused = tables.physical.take_unused(handle);
    drop(tables);
    unused.map_or(Ok(()), Physical::release)
}

/// Refuses NULL.
pub(crate) fn check(handle: Handle) -> Outcome {
    if handle.is_null() { Err(invalid("handle is NULL. Pass one that aclrtMallocPhysical returned.")) } else { Ok(()) }
}

pub(crate) fn unknown() -> Box<Fault> {
    refused(
        "this is not a handle of physical memory, or it was freed as often as it was allocated, imported or retained.",
    )
}

/// Looks at memory under the tables' lock; `None` if there is no such handle.
fn with<R>(handle: Handle, look: impl FnOnce(&mut Physical) -> R) -> Option<R> {
    TABLES.lock().physical.get_mut(handle).map(look)
}

/// What `pick` returns for each memory.
fn collect<R>(mut pick: impl FnMut(Handle, &Physical) -> Option<R>) -> Vec<R> {
    TABLES.lock().physical.iter().filter_map(|(handle, physical)| pick(handle, physical)).collect()
}

/// `aclrtMemRetainAllocationHandle`: for the first address of a mapping.
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
    check(handle)?;
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
        return Err(unsupported(format!("{option} is not an option. Use minimum (0) or recommended (1).")));
    }
    granularity.write(kind.granularity() as usize);
    Ok(())
}

/// The handle of memory that the program already has, counted once more.
pub(crate) fn retain_same(memory: &PhysicalMemory) -> Option<Handle> {
    let same = collect(|handle, physical| physical.memory.is_same(memory).then_some(handle));
    same.into_iter().find(|&handle| with(handle, Physical::retain).is_some())
}

/// Enters imported memory.
pub(crate) fn import(memory: PhysicalMemory, device: LogicalId) -> Outcome<Handle> {
    // The kind that the vendor's library reports for imported memory.
    let attribute = match memory.page() {
        Page::Huge => HBM_HUGE,
        Page::Giant => 10,
    };
    let location = match memory.location() {
        Place::Device(_) => Location { id: devices::user_of(device), kind: Location::DEVICE },
        Place::Host => Location { id: 0, kind: Location::HOST },
    };
    enter(Physical::new(memory, attribute, location))
}

/// Exports the memory behind a handle, once.
pub(crate) fn export(handle: Handle, anyone: bool) -> Outcome<Export> {
    let exportable =
        |physical: &mut Physical| physical.is_held().then(|| (physical.memory.clone(), physical.export.is_some()));
    let (memory, exported) = with(handle, exportable).flatten().ok_or_else(unknown)?;
    if exported {
        let text = "the handle is already exported, and the driver exports a handle once. Use its shareable handle.";
        return Err(Fault::new(code::RT_DRIVER, text));
    }
    let export = memory.export().map_err(Fault::driver)?;
    if anyone {
        export.trust_anyone()?;
    }
    with(handle, |physical| physical.export = Some(export.clone()));
    Ok(export)
}

/// The export of this process with a shareable handle.
pub(crate) fn export_of(shareable: u64) -> Option<Export> {
    let of = |physical: &Physical| physical.export.clone().filter(|export| export.handle().to_u64() == shareable);
    collect(|_, physical| of(physical)).pop()
}

/// Whether there is any.
pub(crate) fn is_used() -> bool {
    TABLES.lock().physical.iter().next().is_some()
}

/// Ends all memory of a device, mapped or not.
pub(crate) fn end(device: LogicalId) {
    let handles = collect(|handle, physical| physical.is_on(device).then_some(handle));
    for &handle in &handles {
        with(handle, |physical| physical.users = 0);
    }
    addresses::end_mappings(device);
    for handle in handles {
        // Memory that another thread is mapping now goes when it is unmapped.
        let ended = TABLES.lock().physical.take_unused(handle);
        drop(ended);
    }
}
