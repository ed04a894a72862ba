//! Names of the runtime's inner layer that libraries for shared memory load by name, with the codes
//! of the outer one. Nothing here is new: each is a call of the outer layer in other words.

use crate::border::{Address, In, Out, Text};
use crate::fault::{Outcome, refused, unsupported};
use crate::handles::Handle;
use crate::{copy, devices, ipc, process, share};
use ascend_vmm::PhysicalId;
use ascend_vmm::discovery::Npu;
use libc::c_char;

/// `rtDeviceGetBareTgid`.
pub fn bare_tgid(process: Out<u32>) -> Outcome {
    share::bare_tgid(process.cast())
}

/// A device by the program's number, and one by its number on the host.
fn pair(device: u32, physical: u32) -> Outcome<(&'static Npu, &'static Npu)> {
    let device = devices::by_user(device.into())?;
    let peer = devices::all()?.iter().find(|npu| npu.physical == PhysicalId(physical));
    Ok((device, peer.ok_or_else(|| refused(format!("this host has no device with the physical id {physical}.")))?))
}

/// `rtEnableP2P`.
pub fn enable_peer_access(device: u32, physical: u32, flags: u32) -> Outcome {
    if flags != 0 {
        return Err(refused(format!("flag is {flags}. It is reserved: pass 0.")));
    }
    let (device, peer) = pair(device, physical)?;
    Ok(process::device(device.logical)?.enable_peer_access(&process::device(peer.logical)?)?)
}

/// `rtDisableP2P`: the link stays until a device is reset, because mappings may use it.
pub fn disable_peer_access(device: u32, physical: u32) -> Outcome {
    pair(device, physical).map(drop)
}

/// `rtGetDeviceInfo`: where a device is in its super pod.
pub fn device_info(device: u32, module: i32, kind: i32, value: Out<i64>) -> Outcome {
    let value = value.check("val")?;
    let npu = devices::by_user(device.into())?;
    const SYSTEM: i32 = 0;
    let (SYSTEM, Some(pod)) = (module, npu.super_pod) else {
        let text = format!("module {module}, info {kind} are not known here, or the device is in no super pod.");
        return Err(unsupported(text));
    };
    let answer = match kind {
        // Chip and die are parts of the id in the super pod.
        18 => pod.sdid >> 18 & 0xF,
        19 => pod.sdid >> 16 & 0x3,
        26 => pod.sdid,
        27 => pod.server,
        28 => pod.scale,
        29 => pod.super_pod,
        other => return Err(unsupported(format!("info {other} of a device is not known here."))),
    };
    value.write(answer.into());
    Ok(())
}

/// `rtIpcSetMemoryName`.
pub fn name(address: Address, size: u64, name: Out<c_char>, length: u32) -> Outcome {
    ipc::export_key(address, size as usize, name, length as usize, 0)
}

/// `rtSetIpcMemorySuperPodPid`: processes of this server.
pub fn trust(name: Text, sdid: u32, processes: In<i32>, count: i32) -> Outcome {
    const SERVER: u32 = 22;
    let is_ours = |npu: &Npu| npu.super_pod.is_some_and(|pod| pod.sdid >> SERVER == sdid >> SERVER);
    if !devices::all()?.iter().any(is_ours) {
        return Err(unsupported(format!("{sdid:#x} is a device of another server, and keys are for this one.")));
    }
    ipc::trust(name, processes, usize::try_from(count).unwrap_or(0))
}

/// `rtMemcpyAsyncWithoutCheckKind`: the driver finds the direction.
pub fn memcpy_async(to: Address, room: u64, from: Address, size: u64, _kind: u32, stream: Handle) -> Outcome {
    const ANY: i32 = 4;
    copy::memcpy_async(to, room as usize, from, size as usize, ANY, stream)
}
