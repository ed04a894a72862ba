//! The devices of this process: their number, their ids and their properties.
//!
//! Programs count devices from 0 in the order of `ASCEND_RT_VISIBLE_DEVICES`: the *user* id. They
//! are looked up once, without a session, so that a program may query them, fork, and use the
//! library in the child.

use crate::border::{Address, In, Out, Text};
use crate::context;
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::process;
use ascend_vmm::discovery::{self, Health, Npu, PciAddress, Survey};
use ascend_vmm::{LogicalId, PhysicalId, UserId};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::{CString, c_char};
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The environment variable that overrides the name of the chip.
pub const SOC_NAME: &str = "ASCEND_ACL_SOC_NAME";

/// The devices. Not behind a lock, which may never be released in a child of fork.
static FOUND: AtomicPtr<Found> = AtomicPtr::new(null_mut());

struct Found {
    survey: Survey,
    /// The number of devices that the program sees: user ids are below this.
    visible: u32,
}

/// Looks up the devices. Remembers them once there are any.
fn found() -> Outcome<&'static Found> {
    let known = FOUND.load(Ordering::Acquire);
    // SAFETY: NULL, or a box that was made below and is never freed.
    if let Some(found) = unsafe { known.as_ref() } {
        return Ok(found);
    }
    let survey = discovery::survey(&discovery::Options::default());
    // A list ends before the first device that does not exist.
    let visible = (0..).take_while(|&user| survey.user_device(UserId(user)).is_some()).count() as u32;
    if visible == 0 {
        let text = match survey.findings.first() {
            Some(finding) if survey.devices.is_empty() => format!("no NPU: {finding}. {}", finding.remedy()),
            _ => format!(
                "{} hides every device. Unset it, or list devices of this host.",
                discovery::VisibleDevices::VARIABLE
            ),
        };
        return Err(Fault::new(code::RT_NO_DEVICE, text));
    }
    let new = Box::into_raw(Box::new(Found { survey, visible }));
    match FOUND.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just made, and never freed.
        Ok(_) => Ok(unsafe { &*new }),
        Err(first) => {
            // SAFETY: just made, and no other thread has seen it.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: another thread made it, and it is never freed.
            Ok(unsafe { &*first })
        }
    }
}

/// All devices, with the driver's numbers.
pub(crate) fn all() -> Outcome<&'static [Npu]> {
    Ok(&found()?.survey.devices)
}

/// A device by the number that the program uses.
pub(crate) fn by_user(id: i64) -> Outcome<&'static Npu> {
    let found = found()?;
    let user = u32::try_from(id).ok().filter(|&user| user < found.visible);
    match user.and_then(|user| found.survey.user_device(UserId(user))) {
        Some(npu) => Ok(npu),
        None => Err(Fault::new(
            code::RT_INVALID_DEVICE,
            format!("there is no device {id}: this program sees {}, numbered from 0.", found.visible),
        )),
    }
}

/// The number that the program uses for a device, or 0 for one that it does not see.
pub(crate) fn user_of(logical: LogicalId) -> u32 {
    let npu = found().ok().and_then(|found| found.survey.device(logical));
    npu.and_then(|npu| npu.user).map_or(0, |user| user.0)
}

/// A device by the driver's number, or else by the program's: the vendor's library takes the
/// driver's number here, although the manual says otherwise.
pub(crate) fn by_logical_or_user(id: u32) -> Outcome<LogicalId> {
    let found = found()?;
    let visible = |npu: &&Npu| npu.user.is_some_and(|user| user.0 < found.visible);
    match found.survey.device(LogicalId(id)).filter(visible) {
        Some(npu) => Ok(npu.logical),
        None => by_user(id.into()).map(|npu| npu.logical).map_err(|fault| fault.with_code(code::RT_PARAM_INVALID)),
    }
}

/// `aclrtGetDeviceCount`.
pub fn count(count: Out<u32>) -> Outcome {
    let count = count.check("count")?;
    count.write(found().map_err(|fault| fault.with_code(code::RT_NO_DEVICE))?.visible);
    Ok(())
}

/// `aclrtGetSocName`: NULL without a device.
pub fn soc_name() -> Outcome<*const c_char> {
    static NAME: OnceLock<CString> = OnceLock::new();
    if let Some(name) = NAME.get() {
        return Ok(name.as_ptr());
    }
    let name = match std::env::var(SOC_NAME) {
        Ok(name) => name,
        Err(_) => soc_of(by_user(0)?),
    };
    Ok(NAME.get_or_init(|| CString::new(name).unwrap_or_default()).as_ptr())
}

/// The name of a chip as frameworks know it.
fn soc_of(npu: &Npu) -> String {
    let soc = npu.soc.clone().or_else(|| npu.chip.as_ref().map(|chip| format!("Ascend{chip}")));
    match soc.as_deref() {
        Some("Ascend910") => "Ascend910A".to_owned(),
        Some("Ascend910B") | None => "Ascend910B2".to_owned(),
        Some("Ascend910_93") => "Ascend910_9392".to_owned(),
        Some("Ascend310P") => "Ascend310P3".to_owned(),
        Some(soc) => soc.to_owned(),
    }
}

/// The driver's version, as its package says.
pub(crate) fn driver_version() -> String {
    let package = found().ok().and_then(|found| found.survey.versions.package.clone());
    package.unwrap_or_else(|| "25.5.0".to_owned())
}

/// `aclrtGetLogicDevIdByUserDevId`.
pub fn logical_by_user(user: i32, logical: Out<i32>) -> Outcome {
    let logical = logical.check("logicDevId")?;
    logical.write(by_user(user.into())?.logical.0 as i32);
    Ok(())
}

/// `aclrtGetUserDevIdByLogicDevId`.
pub fn user_by_logical(logical: i32, user: Out<i32>) -> Outcome {
    let user = user.check("userDevid")?;
    user.write(visible(logical, |npu, id| npu.logical == LogicalId(id))?.user.map_or(0, |user| user.0 as i32));
    Ok(())
}

/// `aclrtGetLogicDevIdByPhyDevId`.
pub fn logical_by_physical(physical: i32, logical: Out<i32>) -> Outcome {
    let logical = logical.check("logicDevId")?;
    logical.write(visible(physical, |npu, id| npu.physical == PhysicalId(id))?.logical.0 as i32);
    Ok(())
}

/// `aclrtGetPhyDevIdByLogicDevId`.
pub fn physical_by_logical(logical: i32, physical: Out<i32>) -> Outcome {
    let physical = physical.check("phyDevId")?;
    physical.write(visible(logical, |npu, id| npu.logical == LogicalId(id))?.physical.0 as i32);
    Ok(())
}

/// `aclrtGetPhyDevIdByUserDevId`.
pub fn physical_by_user(user: i32, physical: Out<i32>) -> Outcome {
    let physical = physical.check("phyDevId")?;
    physical.write(by_user(user.into())?.physical.0 as i32);
    Ok(())
}

/// `aclrtGetUserDevIdByPhyDevId`.
pub fn user_by_physical(physical: i32, user: Out<i32>) -> Outcome {
    let user = user.check("userDevId")?;
    user.write(visible(physical, |npu, id| npu.physical == PhysicalId(id))?.user.map_or(0, |user| user.0 as i32));
    Ok(())
}

/// The visible device with this number, as `wanted` compares it.
fn visible(id: i32, wanted: impl Fn(&Npu, u32) -> bool) -> Outcome<&'static Npu> {
    let found = found()?;
    let number = u32::try_from(id).ok();
    let seen = |npu: &&Npu| npu.user.is_some_and(|user| user.0 < found.visible);
    let mut devices = found.survey.devices.iter().filter(seen);
    match number.and_then(|number| devices.find(|npu| wanted(npu, number))) {
        Some(npu) => Ok(npu),
        None => Err(Fault::new(code::RT_INVALID_DEVICE, format!("this program sees no device with the number {id}."))),
    }
}

/// `aclrtDeviceGetPCIBusId`.
pub fn pci_bus_id(device: i32, text: Out<c_char>, length: i32) -> Outcome {
    let text = text.check("pciBusId")?;
    let npu = by_user(device.into())?;
    let Some(address) = npu.pci else {
        return Err(unsupported("the driver does not report the PCI address of the device."));
    };
    let address = PciAddress { domain: Some(address.domain.unwrap_or(0)), ..address }.to_string();
    if length <= address.len() as i32 {
        return Err(refused(format!("{length} bytes are too few for `{address}` and a zero. Pass 13 or more.")));
    }
    for (index, byte) in address.bytes().chain([0]).enumerate() {
        text.write_at(index, byte as c_char);
    }
    Ok(())
}

/// `aclrtDeviceGetByPCIBusId`.
pub fn by_pci_bus_id(text: Text, device: Out<i32>) -> Outcome {
    let device = device.check("deviceId")?;
    let text = text.to_text().ok_or_else(|| invalid("pciBusId is NULL. Pass a text like 0000:c1:00.0."))?;
    let Ok(wanted) = text.parse::<PciAddress>() else {
        return Err(refused(format!("`{text}` is not a PCI address. They look like 0000:c1:00.0.")));
    };
    let place = |address: PciAddress| (address.domain.unwrap_or(0), address.bus, address.device, address.function);
    let at = |npu: &Npu| npu.pci.is_some_and(|address| place(address) == place(wanted));
    let npu = visible(0, |npu, _| at(npu)).map_err(|fault| {
        let text = format!("this program sees no device at {text}.");
        Box::new(Fault { text, ..*fault })
    })?;
    device.write(npu.user.map_or(0, |user| user.0 as i32));
    Ok(())
}

/// `aclrtDeviceGetUuid`: 16 bytes, the same in every container of the host.
pub fn uuid(device: i32, uuid: Out<[u8; 16]>) -> Outcome {
    let uuid = uuid.check("uuid")?;
    let npu = by_user(device.into())?;
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(b"NPU\0");
    if let Some(address) = npu.pci {
        bytes[4..7].copy_from_slice(&[address.bus, address.device, address.function]);
    }
    bytes[8..12].copy_from_slice(&npu.identity.sdid.unwrap_or(0).to_be_bytes());
    bytes[12..].copy_from_slice(&npu.physical.0.to_be_bytes());
    uuid.write(bytes);
    Ok(())
}

/// Vector cores for each AI core, on cards that have both.
const VECTOR_CORES: i64 = 2;

/// `aclGetDeviceCapability`.
pub fn capability(device: u32, wanted: i32, value: Out<i64>) -> Outcome {
    let value = value.check("value")?;
    let npu = by_user(device.into()).map_err(|fault| match fault.code {
        code::RT_INVALID_DEVICE => fault.with_code(code::INVALID_PARAM),
        _ => fault,
    })?;
    let cores = i64::from(npu.ai_cores.unwrap_or(0));
    value.write(match wanted {
        0 => cores,
        1 => cores * VECTOR_CORES,
        // The driver does not report the size of the cache.
        2 => 0,
        _ => return Err(invalid(format!("{wanted} is not a capability. They are 0 to 2."))),
    });
    Ok(())
}

/// `aclrtGetDeviceInfo`.
pub fn info(device: u32, attribute: i32, value: Out<i64>) -> Outcome {
    let value = value.check("value")?;
    let npu = by_user(device.into())?;
    let cores = npu.ai_cores.map(i64::from);
    let known = match attribute {
        101 | 102 => cores,
        201 => cores.map(|cores| cores * VECTOR_CORES),
        301 => npu.hbm.map(|hbm| hbm.total as i64),
        402 => Some(npu.physical.0.into()),
        403 => npu.super_pod.map(|pod| pod.sdid.into()),
        404 => npu.super_pod.map(|pod| pod.server.into()),
        405 => npu.super_pod.map(|pod| pod.super_pod.into()),
        501 => Some(npu.instance.is_some().into()),
        _ => None,
    };
    let known = known.ok_or_else(|| unsupported(format!("the driver does not report attribute {attribute}.")))?;
    value.write(known);
    Ok(())
}

/// `aclrtQueryDeviceStatus`: asks the driver each time.
pub fn status(device: i32, status: Out<i32>) -> Outcome {
    let status = status.check("deviceStatus")?;
    let logical = by_user(device.into())?.logical;
    let survey = discovery::survey(&discovery::Options::default());
    let well = survey
        .device(logical)
        .is_some_and(|npu| npu.is_usable() && !matches!(npu.health, Some(Health::Major | Health::Fatal)));
    status.write(i32::from(!well));
    Ok(())
}

/// The output of `aclrtGetDeviceUtilizationRate`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Utilization {
    cube: i32,
    vector: i32,
    aicpu: i32,
    memory: i32,
    extend: Address,
}

/// `aclrtGetDeviceUtilizationRate`: 0 except for memory, since nothing computes here.
pub fn utilization(device: i32, utilization: Out<Utilization>) -> Outcome {
    let utilization = utilization.check("utilizationInfo")?;
    let npu = by_user(device.into())?;
    let used = |hbm: discovery::Hbm| (hbm.total - hbm.free.min(hbm.total)) * 100 / hbm.total.max(1);
    let memory = npu.hbm.map_or(0, used) as i32;
    utilization.write(Utilization { cube: 0, vector: 0, aicpu: 0, memory, extend: Address(0) });
    Ok(())
}

/// Pairs with enabled access: device and peer, by the driver's numbers.
static PEERS: Mutex<BTreeSet<(u32, u32)>> = Mutex::new(BTreeSet::new());

/// Two different devices, by the program's numbers.
fn pair(device: i32, peer: i32) -> Outcome<(LogicalId, LogicalId)> {
    if device == peer {
        return Err(invalid(format!("device {device} is its own peer. Name two devices.")));
    }
    let device = by_user(device.into())?.logical;
    let peer = by_user(peer.into()).map_err(|fault| match fault.code {
        code::RT_INVALID_DEVICE => fault.with_code(code::RT_PARAM_INVALID),
        _ => fault,
    })?;
    Ok((device, peer.logical))
}

/// `aclrtDeviceCanAccessPeer`.
pub fn can_access_peer(can: Out<i32>, device: i32, peer: i32) -> Outcome {
    let can = can.check("canAccessPeer").map_err(|fault| fault.with_code(code::RT_PARAM_INVALID))?;
    let (device, peer) = pair(device, peer)?;
    can.write(discovery::can_access(device, peer)?.into());
    Ok(())
}

/// `aclrtDeviceEnablePeerAccess`: of the current device.
pub fn enable_peer_access(peer: i32, flags: u32) -> Outcome {
    if flags != 0 {
        return Err(Fault::new(code::FEATURE_UNSUPPORTED, format!("flags are {flags}. They are reserved: pass 0.")));
    }
    let (device, peer) = pair(context::current()?.user as i32, peer)?;
    process::device(device)?.enable_peer_access(&process::device(peer)?)?;
    PEERS.lock().insert((device.0, peer.0));
    Ok(())
}

/// `aclrtDeviceDisablePeerAccess`: changes only what `aclrtDevicePeerAccessStatus` reports. The
/// link stays until a device is reset, because mappings may use it.
pub fn disable_peer_access(peer: i32) -> Outcome {
    let (device, peer) = pair(context::current()?.user as i32, peer)?;
    PEERS.lock().remove(&(device.0, peer.0));
    Ok(())
}

/// `aclrtDevicePeerAccessStatus`.
pub fn peer_access_status(device: i32, peer: i32, status: Out<i32>) -> Outcome {
    let status = status.check("status")?;
    let (device, peer) = pair(device, peer)?;
    status.write(PEERS.lock().contains(&(device.0, peer.0)).into());
    Ok(())
}

/// Forgets the enabled pairs of a device that is closed, or all.
pub(crate) fn forget_peers(device: Option<LogicalId>) {
    let of = |pair: &(u32, u32), id: LogicalId| pair.0 == id.0 || pair.1 == id.0;
    PEERS.lock().retain(|pair| device.is_some_and(|id| !of(pair, id)));
}

/// One entry of `aclrtGetMemUsageInfo`, for a module of the driver.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Usage {
    name: [u8; 32],
    current: u64,
    peak: u64,
    reserved: [usize; 8],
}

/// `aclrtGetMemUsageInfo`: the driver keeps statistics for the vendor's modules only.
pub fn memory_usage(device: i32, usage: In<Usage>, room: usize, filled: Out<usize>) -> Outcome {
    let filled = filled.check("outputNum")?;
    if usage.is_null() || room == 0 {
        return Err(invalid("memUsageInfo is NULL or has no room. Pass an array and its length."));
    }
    by_user(device.into())?;
    filled.write(0);
    Ok(())
}
