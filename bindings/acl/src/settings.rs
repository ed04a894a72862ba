//! Versions, and settings that only other parts of the vendor's stack read: they are accepted,
//! stored if they can be queried, and have no effect.

use crate::border::{In, Out, Text};
use crate::fault::{Fault, Outcome, code, invalid, refused};
use crate::handles::Handle;
use crate::{context, devices, point, process, stream};
use ascend_vmm::{MemoryInfo, MemoryKind};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicI32, Ordering};

/// The version of all packages but the driver. Programs choose by it which functions to call.
const VERSION: &str = "8.5.0";

/// `aclrtGetRunMode`: programs run on the host.
pub fn run_mode(mode: Out<i32>) -> Outcome {
    let mode = mode.check("runMode")?;
    mode.write(1);
    Ok(())
}

/// `aclrtGetVersion`: of the interface.
pub fn interface_version(major: Out<i32>, minor: Out<i32>, patch: Out<i32>) -> Outcome {
    let (major, minor, patch) =
        (major.check("majorVersion")?, minor.check("minorVersion")?, patch.check("patchVersion")?);
    major.write(1);
    minor.write(17);
    patch.write(0);
    Ok(())
}

/// A version in parts: `aclCANNPackageVersion`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PackageVersion {
    version: [u8; 128],
    parts: [[u8; 64]; 4],
    reserved: [u8; 128],
}

/// `aclsysGetCANNVersion`.
pub fn package_version(package: i32, version: Out<PackageVersion>) -> Outcome {
    const DRIVER: i32 = 7;
    let version = version.check("version")?;
    if !(0..=DRIVER).contains(&package) {
        // Programs read it even after a failure.
        version.write(PackageVersion { version: [0; 128], parts: [[0; 64]; 4], reserved: [0; 128] });
        return Err(invalid(format!("{package} is not a package. They are 0 to {DRIVER}.")));
    }
    let text = if package == DRIVER { devices::driver_version() } else { VERSION.to_owned() };
    let mut answer = PackageVersion { version: [0; 128], parts: [[0; 64]; 4], reserved: [0; 128] };
    put(&mut answer.version, &text);
    for (part, text) in answer.parts.iter_mut().zip(text.split(['.', '-'])) {
        put(part, text);
    }
    version.write(answer);
    Ok(())
}

/// Writes a text with a zero at its end.
fn put(to: &mut [u8], text: &str) {
    let length = text.len().min(to.len() - 1);
    to[..length].copy_from_slice(&text.as_bytes()[..length]);
}

/// `aclsysGetVersionStr`: into 128 bytes.
pub fn version_text(package: Text, text: Out<[u8; 128]>) -> Outcome {
    let text = text.check("versionStr")?;
    let package = package.to_text().ok_or_else(|| invalid("pkgName is NULL. Pass a name like runtime."))?;
    let version = match package.to_ascii_lowercase().as_str() {
        "driver" => devices::driver_version(),
        "cann" | "runtime" | "compiler" | "hccl" | "toolkit" | "opp" | "opp_kernel" => VERSION.to_owned(),
        _ => return Err(Fault::new(code::INVALID_FILE, format!("there is no package `{package}`."))),
    };
    let mut bytes = [0; 128];
    put(&mut bytes, &version);
    text.write(bytes);
    Ok(())
}

/// The attributes of the stack.
static ATTRIBUTES: [i32; 3] = [0, 1, 2];

/// `aclGetCannAttributeList`.
pub fn attribute_list(list: Out<*const i32>, count: Out<usize>) -> Outcome {
    let (list, count) = (list.check("cannAttrList")?, count.check("num")?);
    list.write(ATTRIBUTES.as_ptr());
    count.write(ATTRIBUTES.len());
    Ok(())
}

/// `aclGetCannAttribute`: the first two are there on every chip from 910B on.
pub fn attribute(attribute: i32, value: Out<i32>) -> Outcome {
    let value = value.check("value")?;
    // SAFETY: the name of the chip is a string of ours that is never freed.
    let soc = unsafe { CStr::from_ptr(devices::soc_name()?) }.to_string_lossy();
    let newer = !soc.starts_with("Ascend310P") && !["Ascend910A", "Ascend910B", "Ascend910ProA"].contains(&&*soc);
    value.write(match attribute {
        0 | 1 => newer.into(),
        2 => 0,
        _ => return Err(invalid(format!("{attribute} is not an attribute. They are 0 to 2."))),
    });
    Ok(())
}

/// `aclrtGetMemInfo`.
pub fn memory_info(attribute: i32, free: Out<usize>, total: Out<usize>) -> Outcome {
    let (free, total) = (free.check("free")?, total.check("total")?);
    type Part = fn(&MemoryInfo) -> (u64, u64);
    let normal: Part = |info| (info.normal_free, info.normal_total);
    let huge: Part = |info| (info.huge_free, info.huge_total);
    let giant: Part = |info| (info.giant_free, info.giant_total);
    let both: Part = |info| (info.normal_free + info.huge_free, info.normal_total + info.huge_total);
    let (kind, part) = match attribute {
        0 => (MemoryKind::Ddr, both),
        1 => (MemoryKind::Hbm, both),
        2 => (MemoryKind::Ddr, huge),
        3 => (MemoryKind::Ddr, normal),
        4 | 13 => (MemoryKind::Hbm, huge),
        5 | 12 => (MemoryKind::Hbm, normal),
        6 => (MemoryKind::P2pDdr, huge),
        7 => (MemoryKind::P2pDdr, normal),
        8 | 16 => (MemoryKind::P2pHbm, huge),
        9 | 15 => (MemoryKind::P2pHbm, normal),
        10 | 14 => (MemoryKind::Hbm, giant),
        11 | 17 => (MemoryKind::P2pHbm, giant),
        other => {
            return Err(Fault::new(
                code::RT_MEMORY_TYPE,
                format!("{other} is not a kind of memory. They are 0 to 17."),
            ));
        }
    };
    let device = process::device(context::current()?.device)?;
    // A kind that the card lacks is not an error: the card has 0 bytes of it.
    let ask = |kind| device.memory_info(kind).map(|info| part(&info)).unwrap_or_default();
    let mut found = match kind {
        MemoryKind::Hbm => part(&device.memory_info(kind)?),
        kind => ask(kind),
    };
    if found.1 == 0 && attribute == 1 {
        // A card without HBM reports its DDR.
        found = ask(MemoryKind::Ddr);
    }
    free.write(found.0 as usize);
    total.write(found.1 as usize);
    Ok(())
}

/// `aclSetCompileopt`: accepts all options but the one that frameworks set before they run an
/// operator. There are no operators, and frameworks turn a failure here into an exception.
pub fn set_compile_option(option: i32, value: Text) -> Outcome {
    const JIT_COMPILE: i32 = 10;
    if value.is_null() || !(0..=16).contains(&option) {
        return Err(invalid(format!("value is NULL, or {option} is not an option. They are 0 to 16.")));
    }
    if option == JIT_COMPILE {
        let text = "operators need the vendor's kernels, which this library does not have: it serves memory. Copy to \
                    the host and compute there.";
        return Err(Fault::new(code::FAILURE, text));
    }
    Ok(())
}

/// `aclGetCompileoptSize`: every value is empty.
pub fn compile_option_size(_option: i32) -> Outcome<usize> {
    Ok(1)
}

/// `aclGetCompileopt`.
pub fn compile_option(_option: i32, value: Out<c_char>, length: usize) -> Outcome {
    let value = value.check("value")?;
    if length == 0 {
        return Err(invalid("the length is 0. Pass what aclGetCompileoptSize returned, or more."));
    }
    value.write(0);
    Ok(())
}

static SATURATION: AtomicI32 = AtomicI32::new(0);

/// `aclrtSetDeviceSatMode`.
pub fn set_saturation(mode: i32) -> Outcome {
    if !(0..2).contains(&mode) {
        return Err(invalid(format!("{mode} is not a mode. It is 0 or 1.")));
    }
    SATURATION.store(mode, Ordering::Relaxed);
    Ok(())
}

/// `aclrtGetDeviceSatMode`.
pub fn saturation(mode: Out<i32>) -> Outcome {
    let mode = mode.check("mode")?;
    mode.write(SATURATION.load(Ordering::Relaxed));
    Ok(())
}

/// `aclrtSetOpExecuteTimeOutV2`: reports the requested timeout as the actual one.
pub fn set_execute_timeout(timeout: u64, actual: Out<u64>) -> Outcome {
    let actual = actual.check("actualTimeout")?;
    actual.write(timeout);
    Ok(())
}

/// `aclrtSetOpExecuteTimeOut` and `aclrtSetOpWaitTimeout`.
pub fn set_timeout(_timeout: u32) -> Outcome {
    Ok(())
}

static PARAMETERS: Mutex<BTreeMap<i32, i64>> = Mutex::new(BTreeMap::new());

/// `aclrtSetSysParamOpt`.
pub fn set_parameter(option: i32, value: i64) -> Outcome {
    check_parameter(option)?;
    PARAMETERS.lock().insert(option, value);
    Ok(())
}

/// `aclrtCtxSetSysParamOpt`: for the context, and for the process.
pub fn set_context_parameter(option: i32, value: i64) -> Outcome {
    check_parameter(option)?;
    context::current_object()?.parameters.lock().insert(option, value);
    set_parameter(option, value)
}

/// `aclrtGetSysParamOpt`: 0 for an option that was never set.
pub fn parameter(option: i32, value: Out<i64>) -> Outcome {
    let value = value.check("value")?;
    check_parameter(option)?;
    value.write(PARAMETERS.lock().get(&option).copied().unwrap_or(0));
    Ok(())
}

/// `aclrtCtxGetSysParamOpt`.
pub fn context_parameter(option: i32, value: Out<i64>) -> Outcome {
    const NOT_SET: i32 = 107_021;
    let value = value.check("value")?;
    check_parameter(option)?;
    let set = context::current_object()?.parameters.lock().get(&option).copied();
    value.write(set.ok_or_else(|| Fault::new(NOT_SET, format!("option {option} was not set for this context.")))?);
    Ok(())
}

fn check_parameter(option: i32) -> Outcome {
    if (0..4).contains(&option) { Ok(()) } else { Err(invalid(format!("{option} is not an option. They are 0 to 3."))) }
}

/// `aclmdlInitDump`, `aclmdlFinalizeDump` and other settings without an argument.
pub fn nothing() -> Outcome {
    Ok(())
}

/// `aclmdlSetDump`.
pub fn set_dump(path: Text) -> Outcome {
    if path.is_null() { Err(invalid("dumpCfgPath is NULL. Pass a path.")) } else { Ok(()) }
}

/// `aclrtSetExceptionInfoCallback`: nothing computes, so it is never called.
pub fn set_exception_callback(_callback: *const libc::c_void) -> Outcome {
    Ok(())
}

/// `aclmdlRICaptureGetInfo`: no stream is captured.
pub fn capture_info(stream: Handle, status: Out<i32>, model: Out<Handle>) -> Outcome {
    let status = status.check("status")?;
    stream::by_handle(stream)?;
    status.write(0);
    model.write(Handle::NULL);
    Ok(())
}

/// `aclrtGetDeviceResLimit`: all cores.
pub fn core_limit(device: i32, kind: i32, value: Out<u32>) -> Outcome {
    let value = value.check("value")?;
    if !(0..2).contains(&kind) {
        return Err(refused(format!("{kind} is not a kind of core. They are cube (0) and vector (1).")));
    }
    let mut cores = 0;
    devices::capability(device as u32, kind, Out::to(&mut cores))?;
    value.write(cores as u32);
    Ok(())
}

/// `aclrtGetResInCurrentThread`: all cores of the current device.
pub fn cores_of_thread(kind: i32, value: Out<u32>) -> Outcome {
    value.check("value")?;
    core_limit(context::current()?.user as i32, kind, value)
}

/// `aclrtGetErrorVerbose`: no error is known.
pub fn error_details(device: i32, info: Out<[u64; 322]>) -> Outcome {
    let info = info.check("errorInfo")?;
    devices::by_user(device.into())?;
    info.write([0; 322]);
    Ok(())
}

/// `aclrtHostMemMapCapabilities`: no engine of a device computes, so none reads host memory.
pub fn host_map_capabilities(device: u32, engine: i32, capability: Out<i32>) -> Outcome {
    let capability = capability.check("capabilities")?;
    devices::by_user(device.into())?;
    if !(0..10).contains(&engine) {
        return Err(refused(format!("{engine} is not an engine. They are 0 to 9.")));
    }
    capability.write(0);
    Ok(())
}

/// `aclrtGetMemUceInfo`: no memory error is known.
pub fn memory_errors(device: i32, list: In<u8>, room: usize, found: Out<usize>) -> Outcome {
    let found = found.check("retSize")?;
    if list.is_null() || room == 0 {
        return Err(invalid("memUceInfoArray is NULL or has no room."));
    }
    devices::by_user(device.into())?;
    found.write(0);
    Ok(())
}

/// `MsprofGetHashId`: a number for a text.
pub fn hash(text: In<u8>, length: usize) -> Outcome<u64> {
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    for index in 0..length.min(1 << 16) {
        hash = (hash ^ u64::from(text.read_at(index, "hashInfo")?)).wrapping_mul(0x100_0000_01B3);
    }
    Ok(hash)
}

/// `MsprofSysCycleTime`: a clock.
pub fn cycles() -> Outcome<u64> {
    Ok(point::now())
}

/// `MsprofReport…` and `MsprofRegisterCallback`: ignored.
pub fn profile(_number: u32, _data: *const libc::c_void) -> Outcome {
    Ok(())
}
