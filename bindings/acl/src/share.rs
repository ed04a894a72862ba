//! Physical memory shared with other processes, by the vendor's two forms of a shareable handle.

use crate::border::{In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::handles::Handle;
use crate::{context, devices, physical, process};
use ascend_vmm::share::{self, BareTgid, FabricHandle, HandleKind, ShareableHandle, Source};
use ascend_vmm::{Error, LogicalId};

/// `aclrtMemSharedHandleType`.
const PLAIN: i32 = 1;
const FABRIC: i32 = 2;

type Bytes = [u8; FabricHandle::LENGTH];

/// The most processes in one call.
const PROCESSES: usize = 65_535;

/// `aclrtMemExportToShareableHandle`.
pub fn export(handle: Handle, kind: i32, flags: u64, shareable: Out<u64>) -> Outcome {
    let shareable = shareable.check("shareableHandle")?;
    physical::check(handle)?;
    if kind != 0 {
        return Err(invalid(format!("handleType is {kind}. Only ACL_MEM_HANDLE_TYPE_NONE (0) is known.")));
    }
    shareable.write(physical::export(handle, anyone(flags)?)?.handle().to_u64());
    Ok(())
}

/// `aclrtMemExportToShareableHandleV2`.
pub fn export_v2(handle: Handle, flags: u64, kind: i32, shareable: Out<Bytes>) -> Outcome {
    let shareable = shareable.check("shareableHandle")?;
    physical::check(handle)?;
    check_kind(kind)?;
    let anyone = anyone(flags)?;
    if kind == FABRIC {
        // Before the export, which is possible once: programs fall back to the plain form then.
        if devices::by_user(context::current()?.user.into())?.super_pod.is_none() {
            let text = "the device is in no super pod, so other servers could not import the memory. Use the default \
                        form (1), or aclrtMemExportToShareableHandle.";
            return Err(unsupported(text));
        }
        let export = physical::export(handle, anyone)?;
        shareable.write(export.fabric_handle(HandleKind::Fabric)?.to_bytes());
    } else {
        let short = physical::export(handle, anyone)?.handle().to_u64();
        shareable.cast::<u64>().write(short);
    }
    Ok(())
}

/// Whether any process may import.
fn anyone(flags: u64) -> Outcome<bool> {
    match flags {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(refused(format!("flags are {other}. They are 0 (trust list) or 1 (any process)."))),
    }
}

fn check_kind(kind: i32) -> Outcome {
    match kind {
        PLAIN | FABRIC => Ok(()),
        other => Err(refused(format!("shareType is {other}. It is default (1) or fabric (2)."))),
    }
}

/// `aclrtMemSetPidToShareableHandle`.
pub fn trust(shareable: u64, processes: In<i32>, count: usize) -> Outcome {
    let processes = read_processes(processes, count)?;
    let export = physical::export_of(shareable).ok_or_else(not_exported)?;
    match export.trust(&processes) {
        // A process that does not exist cannot import, and the vendor's library takes it.
        Err(Error::Invalid(_)) => processes.iter().try_for_each(|&process| match export.trust(&[process]) {
            Err(Error::Invalid(_)) => Ok(()),
            trusted => Ok(trusted?),
        }),
        trusted => Ok(trusted?),
    }
}

pub(crate) fn not_exported() -> Box<Fault> {
    let text = "this is not a shareable handle of this process. Only the exporter can trust processes, while it has \
                the memory.";
    Fault::new(code::RT_INVALID_HANDLE, text)
}

/// `aclrtMemSetPidToShareableHandleV2`.
pub fn trust_v2(shareable: In<Bytes>, kind: i32, processes: In<i32>, count: usize) -> Outcome {
    if shareable.is_null() {
        return Err(invalid("shareableHandle is NULL. Pass what aclrtMemExportToShareableHandleV2 wrote."));
    }
    read_processes(processes, count)?;
    check_kind(kind)?;
    trust(short_form(shareable, kind)?, processes, count)
}

/// The ids of processes.
pub(crate) fn read_processes(processes: In<i32>, count: usize) -> Outcome<Vec<BareTgid>> {
    if processes.is_null() || count == 0 {
        return Err(invalid("there are no process ids. Pass those that aclrtDeviceGetBareTgid returned."));
    }
    if count > PROCESSES {
        return Err(refused(format!("{count} processes are more than the {PROCESSES} of one call.")));
    }
    (0..count).map(|index| Ok(BareTgid::from_raw(processes.read_at(index, "pid")?)?)).collect()
}

/// The 64-bit form of either kind.
fn short_form(shareable: In<Bytes>, kind: i32) -> Outcome<u64> {
    if kind == PLAIN {
        return shareable.cast::<u64>().read("shareableHandle");
    }
    Ok(long_form(shareable)?.handle.to_u64())
}

pub(crate) fn long_form(shareable: In<Bytes>) -> Outcome<FabricHandle> {
    FabricHandle::from_bytes(&shareable.read("shareableHandle")?).ok_or_else(malformed)
}

pub(crate) fn malformed() -> Box<Fault> {
    Fault::new(code::RT_INVALID_HANDLE, "this is not a shareable handle. Pass what the exporter got, unchanged.")
}

/// `aclrtMemImportFromShareableHandle`.
pub fn import(shareable: u64, device: i32, handle: Out<Handle>) -> Outcome {
    let handle = handle.check("handle")?;
    let device = devices::by_user(device.into())?.logical;
    context::current()?;
    let short = ShareableHandle::from_u64(shareable).ok_or_else(malformed)?;
    handle.write(import_on(device, short.into())?);
    Ok(())
}

/// `aclrtMemImportFromShareableHandleV2`: on the current device.
pub fn import_v2(shareable: In<Bytes>, kind: i32, flags: u64, handle: Out<Handle>) -> Outcome {
    let handle = handle.check("handle")?;
    if shareable.is_null() || flags != 0 {
        return Err(invalid("shareableHandle is NULL, or flags are not 0."));
    }
    check_kind(kind)?;
    let device = context::current()?.device;
    if kind == FABRIC {
        handle.write(import_on(device, (&long_form(shareable)?).into())?);
    } else {
        let short = ShareableHandle::from_u64(short_form(shareable, kind)?).ok_or_else(malformed)?;
        handle.write(import_on(device, short.into())?);
    }
    Ok(())
}

/// Imports on a device. Memory that this process has already imported there gets the same handle.
pub(crate) fn import_on(device: LogicalId, source: Source<'_>) -> Outcome<Handle> {
    let target = process::device(device)?;
    let memory = share::import(&target, source).map_err(Fault::driver)?;
    match physical::retain_same(&memory) {
        Some(handle) => Ok(handle),
        None => physical::import(memory, device),
    }
}

/// `aclrtDeviceGetBareTgid`.
pub fn bare_tgid(process: Out<i32>) -> Outcome {
    let process = process.check("pid")?;
    process.write(BareTgid::of_this_process(&process::session()?)?.as_raw());
    Ok(())
}
