//! What an errno most likely means for a command, and what to do about it.
//!
//! The texts follow the checks of the host driver (`svm_master_mem_map.c`,
//! `svm_master_mem_share.c`, `devmm_proc_info.c` and their neighbours). Where the answer comes from
//! the device, whose program is not public, the text says "most likely".

use super::Errno;
use super::SystemCall::{self, Bind, Mmap, Svm};
use ascend_ioctl::svm::Op;

/// Cause and remedy of a failed open(2) of a device node.
pub(super) fn open(errno: Errno) -> (&'static str, &'static str) {
    match errno {
        Errno::ENOENT => (
            "the node does not exist: the driver is not loaded, or the container was started without it",
            "Load the driver, or pass the node into the container.",
        ),
        Errno::EACCES => (
            "no permission: the driver creates its nodes for root and the group that it was installed with",
            "Join that group (HwHiAiUser by default), run as root, or change the node's mode.",
        ),
        Errno::EPERM => (
            "the device cgroup forbids it: the node was made in the container, but not allowed to it",
            "Pass the device with the container runtime's device option.",
        ),
        Errno::ENXIO | Errno::ENODEV => (
            "nothing is behind the node: it is left over from a driver that is no longer loaded",
            "Load the driver, and remove the stale node.",
        ),
        Errno::EBUSY => {
            ("the driver is being unloaded or the device is held exclusively", "Try again when that is over.")
        }
        Errno::EMFILE | Errno::ENFILE => ("too many open files", "Raise the limit, or close files."),
        _ => ("open(2) failed", "See its manual page for this code."),
    }
}

/// Cause and remedy of a refused command.
pub(super) fn command(call: SystemCall, errno: Errno) -> (&'static str, &'static str) {
    special(call, errno).unwrap_or_else(|| general(errno))
}

/// What an errno means for this command only.
fn special(call: SystemCall, errno: Errno) -> Option<(&'static str, &'static str)> {
    Some(match (call, errno) {
        (Bind, Errno::EINVAL) => (
            "the driver has no module of that name, or the process has opened it too often",
            "Check that the module is loaded: a machine whose memory module is named differently \
             has another driver generation.",
        ),
        (Bind, Errno::ENOSYS) => ("the file is already bound to a module", "Open another file."),
        (Bind, Errno::EBUSY) => ("the module is being unloaded", "Try again when the driver is loaded."),
        (Svm(Op::AllocProcStruct), Errno::EALREADY) => ("the file already has a process", "Open another file."),
        (Svm(Op::AllocProcStruct), Errno::EBUSY | Errno::ENOMEM) => (
            "the kernel could not allocate its book-keeping (about 145 MB per process on current drivers)",
            "Free host memory or raise the memory cgroup's limit, then open the session again.",
        ),
        (Svm(Op::GetMmapInfo), Errno::EINVAL) => (
            "the driver has more address segments than this library has room for",
            "Use a newer version of this library.",
        ),
        (Mmap, Errno::EINVAL) => (
            "the addresses that the driver wants are already used in this process, most likely by \
             the vendor's library, a sanitizer or another mapping; on an emulated driver under a \
             debugger, a forked child also has its parent's",
            "Open the session early, or open it without address segments (then the CPU cannot see \
             device memory and the session cannot be reopened).",
        ),
        (Mmap, Errno::ENOMEM) => (
            "this process may not have that much address space (RLIMIT_AS), or the kernel was built for a \
             smaller one (CONFIG_ARM64_VA_BITS_39 or _42)",
            "Raise the limit, boot a kernel that was built with CONFIG_ARM64_VA_BITS_48, or open the \
             session without address segments (then the CPU cannot see device memory and the session \
             cannot be reopened).",
        ),
        (Mmap, Errno::ESRCH) => {
            ("the session was already initialised when the segment was mapped", "Open a new session.")
        }
        (Svm(Op::InitProcess), Errno::ENODEV) => (
            "the driver is loaded but no device has come up yet",
            "Wait until the devices are ready, and look at the kernel log if they never are.",
        ),
        (Svm(Op::InitProcess), Errno::EAGAIN) => ("signals kept interrupting it", "Try again, with fewer signals."),
        (Svm(Op::InitProcess), Errno::ESRCH) => ("the file was already initialised", "Open another session."),
        (Svm(Op::SetupDevice), Errno::EFAULT) => (
            "the device did not accept this process: most likely it runs no device process for it",
            "Let the session start one, as it does by default, or start one first.",
        ),
        (Svm(Op::SetupDevice), Errno::EBUSY) => ("the device is being reset", "Try again when the reset is over."),
        (Svm(Op::SetupDevice), Errno::EINVAL) => {
            ("there is no such device for this process", "List the devices, and use a logical id of that list.")
        }
        (Svm(Op::PrepareCloseDevice | Op::CloseDevice), Errno::EBUSY) => {
            ("asynchronous copies of the device are still running", "Wait for them, then close again.")
        }
        (Svm(Op::UpdateHeap), Errno::EINVAL) => (
            "a heap is already there, or its size or place is not allowed",
            "Another user of the driver in this process may have taken the addresses.",
        ),
        (Svm(Op::UpdateHeap), Errno::EBUSY) => {
            ("addresses of the heap are in use by running commands", "Try again later.")
        }
        (Svm(Op::Alloc), Errno::EBUSY | Errno::EINVAL) => {
            ("the addresses are already reserved", "Reserve without a fixed address, or another one.")
        }
        (Svm(Op::Alloc), Errno::EADDRNOTAVAIL) => ("the range leaves its heap", "Ask for a smaller range."),
        (Svm(Op::FreePages), Errno::EBUSY) => (
            "something in the reservation is still mapped or being copied, or its device was \
             closed while it was mapped",
            "Unmap it and wait for its copies; after a closed device only ending the session gives the addresses back.",
        ),
        (Svm(Op::FreePages), Errno::EINVAL | Errno::EADDRNOTAVAIL) => {
            ("the address does not start a reservation", "Each reservation can be freed once.")
        }
        (Svm(Op::MemCreate), Errno::EINVAL) => (
            "size, page kind, memory kind or NUMA node are not acceptable, or there is no such device",
            "Ask for a multiple of the granularity, of a kind that the device has.",
        ),
        (Svm(Op::MemRelease), Errno::EBUSY) => ("the memory is still mapped", "Unmap it first."),
        (Svm(Op::MemRelease), Errno::EINVAL) => {
            ("the driver does not know the handle", "Each handle can be released once.")
        }
        (Svm(Op::MemMap), Errno::EADDRINUSE) => {
            ("something is already mapped there", "Unmap it, or map at another offset.")
        }
        (Svm(Op::MemMap), Errno::ENOMEM) => (
            "the mapping is larger than the memory, or the page tables could not be allocated",
            "Map at most the handle's size.",
        ),
        (Svm(Op::MemMap), Errno::EADDRNOTAVAIL) => (
            "host memory can be mapped only in a session with address segments",
            "Open the session with address segments.",
        ),
        (Svm(Op::MemMap), Errno::EINVAL) => (
            "the driver does not accept this memory at this address: another device owns the \
             reservation, the range is not reserved, or the handle is stale",
            "Use one device per reservation, and memory that is alive.",
        ),
        (Svm(Op::MemUnmap), Errno::EBUSY) => (
            "an asynchronous copy holds the mapping: one that runs, one that timed out, or (before 26.1) one \
             of other code over several mappings; the last two never let go",
            "Wait for copies that are running, then unmap; if there are none, only ending the session gives it back.",
        ),
        (Svm(Op::MemUnmap), Errno::EINVAL) => ("no mapping starts there", "Each mapping can be undone once."),
        (Svm(Op::MemSetAccess), Errno::EOPNOTSUPP) => (
            "a device can reach host memory by address only when it is attached by HCCS, and \
             imported memory cannot be granted on",
            "Copy instead.",
        ),
        (Svm(Op::MemSetAccess), Errno::EINVAL) => (
            "the device is unknown, the range is not exactly one mapping, or the session has no address segments",
            "Grant access to whole mappings, in a session with address segments.",
        ),
        (Svm(Op::MemSetAccess), Errno::ENOMEM | Errno::EFAULT) => (
            "the memory cannot be made visible to the CPU: most likely it does not lie behind the device's PCI window",
            "Copy instead.",
        ),
        (Svm(Op::MemExport), Errno::EINVAL) => (
            "the memory was already exported, or is itself an import, or the handle is stale",
            "Memory can be exported once, by the process that created it.",
        ),
        (Svm(Op::MemImport), Errno::EFAULT) => (
            "there is no such share (never made, or its last holder is gone), this process already \
             imported it on this device, or the handle is of another server, which does not answer",
            "Ask the exporter for a new handle, or use the import that is there.",
        ),
        (Svm(Op::MemImport), Errno::EACCES) => (
            "this process is not trusted: not in the exporter's list, listed before it was \
             started, or it is the exporter itself on the same device",
            "Let the exporter trust this process now, while it is running, by its process id outside of containers.",
        ),
        (Svm(Op::MemImport), Errno::EBUSY) => ("the share is being freed", "Ask the exporter for a new handle."),
        (Svm(Op::MemImport), Errno::EOPNOTSUPP) => {
            ("this kind of memory cannot be imported there", "Import on a device, or share memory in 2 MiB pages.")
        }
        (Svm(Op::MemSetPid), Errno::EACCES) => ("only the exporting process can trust others", "Ask the exporter."),
        (Svm(Op::MemSetPid), Errno::EPERM) => (
            "the trust list of this share was switched off",
            "Anyone can import it already; export anew for a trust list.",
        ),
        (Svm(Op::MemSetPid), Errno::EFAULT) => ("there is no such share", "Export the memory first."),
        (Svm(Op::MemSetPid), Errno::EINVAL) => (
            "the list of processes is empty, or full (65535)",
            "Trust at least one process, and not more than the limit.",
        ),
        (Svm(Op::MemSetAttr), Errno::EPERM) => (
            "only the exporter can switch the trust list off, and only before it trusted anyone",
            "Choose it right after the export.",
        ),
        (Svm(Op::MemSetAttr | Op::MemGetAttr), Errno::EFAULT) => {
            ("there is no such share", "Its last holder is gone; ask the exporter for a new handle.")
        }
        (Svm(Op::IpcMemQuery), Errno::EINVAL) => (
            "there is no such name: its creator destroyed it or has ended, or the name is from another host",
            "Ask the creator for a new name.",
        ),
        (Svm(Op::IpcMemOpen), Errno::EINVAL) => (
            "this process is not listed for the name or was listed before it started, other code of \
             the process has opened the name, or its memory was freed",
            "Let the creator list this process now, while it is running, by its process id outside of containers.",
        ),
        (Svm(Op::IpcMemClose), Errno::EINVAL) => {
            ("no name is open at the address", "Each open can be closed once; closing its device closes it too.")
        }
        (Svm(Op::IpcMemCreate), Errno::EINVAL) => (
            "only device memory of this process that is neither exported nor imported can have a name",
            "Give a name to mapped memory that was never exported.",
        ),
        (Svm(Op::IpcMemDestroy), Errno::EINVAL | Errno::EFAULT) => {
            ("there is no such name any more", "Each name can be destroyed once; closing its device ends it too.")
        }
        (Svm(Op::IpcMemDestroy), Errno::EACCES) => {
            ("only the process that created a name destroys it", "Close it instead.")
        }
        (Svm(Op::IpcMemSetPid | Op::IpcMemSetAttr), Errno::EPERM) => (
            "the name has no trust list, or it has one with processes on it",
            "Choose one of the two right after the memory got its name.",
        ),
        (Svm(Op::IpcMemSetPid), Errno::EINVAL) => (
            "no other process is named, the list of the name is full (32768), or the name is gone",
            "List at least one process that is not the creator.",
        ),
        (
            Svm(Op::Memcpy | Op::Memcpy2d | Op::MemcpyBatch | Op::AsyncMemcpy | Op::Memset8),
            Errno::EINVAL | Errno::EADDRNOTAVAIL,
        ) => (
            "not all of the range is mapped, or it mixes devices, or own and imported memory",
            "Copy inside mappings of one device.",
        ),
        (Svm(Op::Memcpy | Op::Memcpy2d | Op::MemcpyBatch | Op::AsyncMemcpy | Op::Memset8), Errno::EFAULT) => (
            "the host memory cannot be pinned, the range is just being unmapped, or the transfer failed on the device",
            "Use ordinary memory on the host's side.",
        ),
        (Svm(Op::Memcpy | Op::MemcpyBatch | Op::AsyncMemcpy), Errno::EOPNOTSUPP) => (
            "this direction is not offered: imported memory cannot be copied on its own device, \
             nor device memory through its CPU view",
            "Copy by way of the host.",
        ),
        (
            Svm(Op::Memcpy | Op::Memcpy2d | Op::MemcpyBatch | Op::AsyncMemcpy | Op::Memset8),
            Errno::EIO | Errno::ENXIO,
        ) => ("the transfer failed on the link to the device", "Check the device's health."),
        (Svm(Op::AsyncMemcpy), Errno::ENOSPC) => {
            ("65535 copies are waiting to be collected", "Wait for some of them first.")
        }
        (Svm(Op::MemcpyResultRefresh), Errno::EINVAL) => ("there is no such copy", "Each copy can be waited for once."),
        (Svm(Op::MemcpyResultRefresh), Errno::ETIMEDOUT) => (
            "the device did not finish the copy in time; its buffers may still be written to and stay allocated",
            "Check the device's health.",
        ),
        (Svm(Op::Prefetch), Errno::EINVAL | Errno::EADDRNOTAVAIL) => (
            "the range is not mapped device memory of this process; imported and host memory \
             cannot be granted to peers",
            "Grant access to mapped device memory that this process created.",
        ),
        (Svm(Op::Prefetch), Errno::EBUSY) => {
            ("nothing is mapped there, or the mapping is host memory", "Grant access to mapped device memory.")
        }
        _ => return None,
    })
}

/// What an errno means for any other command.
fn general(errno: Errno) -> (&'static str, &'static str) {
    match errno {
        Errno::ESRCH => (
            "the device does not know this process: it was not set up, or its device process has exited",
            "Open the device, or drop what lives on it and open it again.",
        ),
        Errno::EPERM => ("the driver forbids it to this process", "Ask the process that owns the object."),
        Errno::ENOENT => ("the driver does not find it", "Check that it still exists."),
        Errno::EEXIST => ("it exists already", "Use the one that is there."),
        Errno::ENODEV => (
            "there is no such device, or its link is down",
            "List the devices and their health; the file may also have been released by another close in this process.",
        ),
        Errno::ENXIO => ("the device is offline", "Check the device's health; it may be resetting."),
        Errno::E2BIG => ("a limit of the driver was reached", "Ask for less."),
        Errno::EAGAIN => ("it was interrupted", "Try again."),
        Errno::ENOMEM => ("the kernel or the device has no memory left for it", "Free memory, or ask for less."),
        Errno::EFAULT => {
            ("the driver does not know the object, or could not reach the memory", "Check that it still exists.")
        }
        Errno::EBUSY => ("it is still in use", "End its other uses first."),
        Errno::EINVAL => (
            "the driver does not accept the arguments, or the session is no longer this process's \
             (forked, or its segments were unmapped)",
            "Check the arguments; if all calls fail like this, open a new session.",
        ),
        Errno::ENOSPC => ("a table of the driver is full", "End other uses first."),
        Errno::EOPNOTSUPP => ("this driver or device does not offer it", "Look at the device's capabilities."),
        Errno::ETIMEDOUT => ("the device did not answer in time", "Check the device's health."),
        Errno::EACCES => ("the driver does not trust this process with it", "Ask the process that owns the object."),
        Errno::EADDRINUSE => ("the addresses are in use", "Use others, or end their use first."),
        Errno::EADDRNOTAVAIL => ("the addresses are not reserved, or not mapped", "Reserve and map them first."),
        Errno::EBADRQC => ("the memory is half created or half released", "Release it, and create it anew."),
        Errno::ENONET => ("the device is being closed", "Open the device again."),
        Errno::ENOSYS => ("the device does not answer", "Check the device's health and the kernel log."),
        Errno::EALREADY => ("it was done already", "Do it once."),
        Errno::EBADFD => (
            "the file was released: another file of the driver was closed in this process without its CLOSE command",
            "Find who does that (the vendor's library, or a descriptor inherited through exec), \
             and open a new session.",
        ),
        Errno::EIO => ("the transfer to or from the device failed", "Check the device's health and the kernel log."),
        Errno::EUSERS => ("the driver already lists this process", "End the process's other session first."),
        _ => ("the driver gives no reason that this library knows", "Look at the kernel log."),
    }
}
