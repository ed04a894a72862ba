//! The names of the driver's own library, `libascend_hal.so`, on the same books: a handle or an
//! address of the one face is one of the other.
//!
//! Here devices have the driver's numbers, no context is needed, and failures have the codes of
//! `drvError_t`. `facts/hal-abi.json` lists the functions.

use crate::addresses::{self, Access};
use crate::border::{self, Address, In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::Handle;
use crate::physical::{self, Location};
use crate::share::{self, long_form};
use crate::{copy, devices, malloc, process};
use ascend_vmm::discovery::Npu;
use ascend_vmm::share::{BareTgid, FabricHandle, HandleKind, ShareableHandle};
use ascend_vmm::{Error, Kind, Location as Place, LogicalId, MemoryKind, Page, PhysicalId};

/// `drv_mem_side` beyond host (0) and device (1), which [`Location`] numbers the same.
const NUMA_SIDE: u32 = 2;
/// `drv_mem_handle_type`.
const PLAIN: i32 = 0;
const FABRIC: i32 = 1;

type Bytes = [u8; FabricHandle::LENGTH];

/// The wanted memory: `drv_mem_prop`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    side: u32,
    device: u32,
    module: u32,
    page: u32,
    memory: u32,
    reserved: u64,
}

/// A grant of access: `drv_mem_access_desc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Grant {
    access: i32,
    location: Location,
    reserved: [u32; 2],
}

/// The value of an attribute: `ShareHandleAttr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ShareAttribute {
    on: u32,
    reserved: [u32; 8],
}

/// The structs that C passes have the sizes of the facts.
const _: () = {
    assert!(size_of::<Properties>() == 32 && size_of::<Grant>() == 20 && size_of::<ShareAttribute>() == 36);
};

/// The code of `drvError_t` for one of the other face.
pub(crate) fn error(code: i32) -> i32 {
    match code {
        0 => 0,
        code::RT_NO_DEVICE => 1,
        code::RT_INVALID_DEVICE => 2,
        code::INVALID_PARAM | code::RT_PARAM_INVALID => 3,
        code::RT_INVALID_HANDLE => 4,
        code::RT_MEMORY => 6,
        code::RT_CONTEXT_NULL => 9,
        code::RT_DRIVER => 17,
        code::RT_RESOURCE => 37,
        code::FEATURE_UNSUPPORTED | code::RT_NOT_SUPPORTED => 0xFFFE,
        _ => 7,
    }
}

/// `drvGetDevNum`.
pub fn device_count(count: Out<u32>) -> Outcome {
    let count = count.check("num_dev")?;
    count.write(devices::all()?.len() as u32);
    Ok(())
}

/// `drvGetDevIDs`.
pub fn device_ids(ids: Out<u32>, length: u32) -> Outcome {
    let ids = ids.check("devices")?;
    for (index, npu) in devices::all()?.iter().enumerate().take(length as usize) {
        ids.write_at(index, npu.logical.0);
    }
    Ok(())
}

/// `drvDeviceGetBareTgid`: -1 without a driver.
pub fn bare_tgid() -> Outcome<i32> {
    border::mark_used();
    Ok(BareTgid::of_this_process(&process::session()?)?.as_raw())
}

fn device_with(what: &str, id: u32, is_it: impl Fn(&Npu) -> bool) -> Outcome<&'static Npu> {
    let found = devices::all()?.iter().find(|npu| is_it(npu));
    found.ok_or_else(|| Fault::new(code::RT_INVALID_DEVICE, format!("no device of this host has the {what} id {id}.")))
}

fn by_logical(id: u32) -> Outcome<&'static Npu> {
    device_with("logical", id, |npu| npu.logical == LogicalId(id))
}

/// `drvDeviceGetPhyIdByIndex`.
pub fn physical_id(index: u32, physical: Out<u32>) -> Outcome {
    let physical = physical.check("phyId")?;
    physical.write(by_logical(index)?.physical.0);
    Ok(())
}

/// `drvDeviceGetIndexByPhyId`.
pub fn logical_id(physical: u32, index: Out<u32>) -> Outcome {
    let index = index.check("devIndex")?;
    index.write(device_with("physical", physical, |npu| npu.physical == PhysicalId(physical))?.logical.0);
    Ok(())
}

/// `drvMemcpy`: waits for the copy. The driver finds the direction.
pub fn memcpy(to: u64, room: usize, from: u64, size: usize) -> Outcome {
    let (to, from) = (Address(to).check("dst")?, Address(from).check("src")?);
    copy::check_room(size, room)?;
    copy::copy(to, from, size)
}

/// `drvMemsetD8`.
pub fn memset(address: u64, room: usize, value: u8, count: usize) -> Outcome {
    let address = Address(address).check("dst")?;
    copy::check_room(count, room)?;
    copy::fill(address, count, value)
}

/// `halMemAddressReserve`. Flag 1 asks for huge pages, which all addresses have.
pub fn reserve(address: Out<Address>, size: usize, alignment: usize, wanted: Address, flags: u64) -> Outcome {
    if flags > 1 {
        return Err(unsupported(format!(
            "flag {flags:#x} asks for addresses of all devices or of other servers, which lie above those that can be \
             reserved here. Pass 0."
        )));
    }
    addresses::reserve(address, size, alignment, wanted, 0)
}

/// The kind of memory, and the number that the other face has for it.
fn kind_of(properties: &Properties) -> Outcome<(Kind, i32)> {
    let page = match properties.page {
        1 => Page::Huge,
        2 => Page::Giant,
        other => return Err(invalid(format!("pg_type {other} has no physical memory. Use MEM_HUGE_PAGE_TYPE (1)."))),
    };
    let (memory, huge, giant) = match properties.memory {
        0 => (MemoryKind::Hbm, 4, 10),
        1 => (MemoryKind::Ddr, 2, 14),
        2 => (MemoryKind::P2pHbm, 15, 17),
        3 => (MemoryKind::P2pDdr, 6, 17),
        other => return Err(invalid(format!("mem_type {other} is not a kind of memory. Use MEM_HBM_TYPE (0)."))),
    };
    Ok((Kind { page, memory }, if page == Page::Huge { huge } else { giant }))
}

/// `halMemCreate`.
pub fn create(handle: Out<Handle>, size: usize, properties: In<Properties>, flags: u64) -> Outcome {
    let handle = handle.check("handle")?;
    let properties = properties.read("prop")?;
    let (kind, attribute) = kind_of(&properties)?;
    if flags != 0 || size == 0 || size as u64 % kind.page.size() != 0 {
        let page = kind.page.size();
        return Err(invalid(format!("flag is {flags}, the size {size}. Pass 0, and a multiple of the page, {page}.")));
    }
    let (size, id) = (size as u64, properties.device);
    let (created, location) = match properties.side {
        0 if id == 0 => (process::session()?.host()?.create_with(size, kind), Location { id, kind: Location::HOST }),
        1 => {
            let device = process::device(by_logical(id)?.logical)?;
            let created = match device.create_with(size, kind) {
                // The pools may have had free pages.
                Err(Error::OutOfMemory(_)) if malloc::trim() => device.create_with(size, kind),
                created => created,
            };
            (created, Location { id: devices::user_of(LogicalId(id)), kind: Location::DEVICE })
        }
        NUMA_SIDE => {
            let created = process::session()?.host()?.create_on_node(size, kind, id);
            (created, Location { id, kind: Location::HOST_NUMA })
        }
        side => return Err(invalid(format!("side {side} with id {id} has no memory. Use the device (1)."))),
    };
    handle.write(physical::enter_created(created?, attribute, location)?);
    Ok(())
}

/// `halMemRetainAllocationHandle`: for any address of a mapping.
pub fn retain(handle: Out<Handle>, address: Address) -> Outcome {
    let first = process::open_session().and_then(|session| session.mapping_at(address.0)).map_or(address.0, |it| it.0);
    physical::retain(Address(first), handle)
}

/// `halMemGetAllocationGranularity`.
pub fn granularity(properties: In<Properties>, option: i32, granularity: Out<usize>) -> Outcome {
    let granularity = granularity.check("granularity")?;
    let (kind, _) = kind_of(&properties.read("prop")?)?;
    if !(0..2).contains(&option) {
        return Err(invalid(format!("{option} is not an option. Use minimum (0) or recommended (1).")));
    }
    granularity.write(kind.granularity() as usize);
    Ok(())
}

/// `halMemSetAccess`.
pub fn set_access(address: Address, size: usize, grants: In<Grant>, count: usize) -> Outcome {
    if count == 0 {
        return Err(invalid("count is 0. Pass at least one description."));
    }
    for index in 0..count {
        let Grant { access, location, .. } = grants.read_at(index, "desc")?;
        let one = Access::new(access, location);
        addresses::set_access(address, size, In::of(&one), 1)?;
    }
    Ok(())
}

/// `halMemExportToShareableHandle`: without a trust list until one is set.
pub fn export(handle: Handle, kind: i32, flags: u64, shareable: Out<u64>) -> Outcome {
    if flags != 0 {
        return Err(invalid(format!("flags are {flags}. They are reserved: pass 0.")));
    }
    share::export(handle, kind, 0, shareable)
}

/// `halMemExportToShareableHandleV2`.
pub fn export_v2(handle: Handle, kind: i32, flags: u64, shareable: Out<Bytes>) -> Outcome {
    let shareable = shareable.check("share_handle")?;
    physical::check(handle)?;
    if flags != 0 || !(PLAIN..=FABRIC).contains(&kind) {
        return Err(invalid(format!("flags are {flags}, the kind {kind}. Pass 0, and 0 or 1.")));
    }
    if kind == PLAIN {
        let mut bytes = [0; FabricHandle::LENGTH];
        bytes[..8].copy_from_slice(&physical::export(handle, false)?.handle().to_u64().to_ne_bytes());
        shareable.write(bytes);
        return Ok(());
    }
    // Before the export, which is possible once.
    let place = physical::place(handle)?;
    let mut on = devices::all()?.iter().filter(|npu| place == Place::Host || place == Place::Device(npu.logical));
    if on.next().is_none_or(|npu| npu.super_pod.is_none()) {
        return Err(unsupported("the device is in no super pod, so other servers could not import the memory."));
    }
    shareable.write(physical::export(handle, false)?.fabric_handle(HandleKind::Fabric)?.to_bytes());
    Ok(())
}

/// `halMemImportFromShareableHandle`.
pub fn import(shareable: u64, device: u32, handle: Out<Handle>) -> Outcome {
    let handle = handle.check("handle")?;
    let short = ShareableHandle::from_u64(shareable).ok_or_else(share::malformed)?;
    handle.write(share::import_on(by_logical(device)?.logical, short.into())?);
    Ok(())
}

/// `halMemImportFromShareableHandleV2`.
pub fn import_v2(kind: i32, shareable: In<Bytes>, device: u32, handle: Out<Handle>) -> Outcome {
    let handle = handle.check("handle")?;
    match kind {
        PLAIN => import(shareable.cast::<u64>().read("share_handle")?, device, handle),
        FABRIC => {
            handle.write(share::import_on(by_logical(device)?.logical, (&long_form(shareable)?).into())?);
            Ok(())
        }
        other => Err(invalid(format!("{other} is not a kind of shareable handle. Use 0 or 1."))),
    }
}

/// `halMemTransShareableHandle`: the short form of a handle, and the server that exported it.
pub fn short_form(kind: i32, shareable: In<Bytes>, server: Out<u32>, short: Out<u64>) -> Outcome {
    let (server, short) = (server.check("server_id")?, short.check("shareable_handle")?);
    let (id, value) = match kind {
        PLAIN => {
            let own = devices::all()?.iter().find_map(|npu| npu.super_pod).map_or(0, |pod| pod.server);
            (own, shareable.cast::<u64>().read("share_handle")?)
        }
        FABRIC => {
            let long = long_form(shareable)?;
            (long.sdid >> 22, long.handle.to_u64())
        }
        other => return Err(invalid(format!("{other} is not a kind of shareable handle. Use 0 or 1."))),
    };
    server.write(id);
    short.write(value);
    Ok(())
}

/// `halMemShareHandleSetAttribute`: whether any process may import.
pub fn set_attribute(shareable: u64, attribute: i32, value: ShareAttribute) -> Outcome {
    const ANYONE: i32 = 0;
    if attribute != ANYONE {
        return Err(refused(format!("{attribute} is not an attribute of a shareable handle. Use 0.")));
    }
    let export = physical::export_of(shareable).ok_or_else(share::not_exported)?;
    if value.on == 0 {
        return Err(unsupported("a handle that any process may import cannot get a trust list again."));
    }
    Ok(export.trust_anyone()?)
}
