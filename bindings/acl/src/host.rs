//! Host memory that the library knows: what it allocated, and what the program registered.
//!
//! It is ordinary memory. The driver pins the pages of a copy itself, so nothing is gained by
//! allocating them from the driver. That an address is host memory decides how an asynchronous copy
//! is done.

use crate::border::{Address, In, Out};
use crate::fault::{Fault, Outcome, code, invalid, refused, unsupported};
use crate::malloc::Config;
use crate::{context, copy, stream};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::sync::Arc;

static KNOWN: Mutex<Known> = Mutex::new(Known { own: BTreeMap::new(), registered: BTreeMap::new() });

/// By the first address.
struct Known {
    /// What the library allocated.
    own: BTreeMap<u64, Own>,
    /// The sizes of what the program registered. It may be memory of the library.
    registered: BTreeMap<u64, u64>,
}

struct Own {
    size: u64,
    pages: Arc<Pages>,
}

/// Pages of the library. Queued copies keep them, so freeing them early does no harm.
#[derive(Debug)]
pub(crate) struct Pages {
    start: usize,
    size: usize,
}

impl Pages {
    fn new(size: usize) -> Option<Pages> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new pages at an address that the kernel chooses.
        let start = unsafe { libc::mmap(null_mut(), size, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        // Fewer pages to pin for a copy. A failure changes nothing.
        // SAFETY: advice about the pages that were just made.
        unsafe { libc::madvise(start, size, libc::MADV_HUGEPAGE) };
        Some(Pages { start: start.expose_provenance(), size })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: pages of the library that neither the program nor a queued copy uses any more.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.start), self.size) };
    }
}

/// `aclrtMallocHost`.
pub fn allocate(address: Out<Address>, size: usize) -> Outcome {
    let address = address.check("hostPtr")?;
    if size == 0 {
        return Err(invalid("the size is 0. Ask for at least one byte."));
    }
    context::current()?;
    let pages = Pages::new(size).ok_or_else(|| {
        let error = std::io::Error::last_os_error();
        Fault::new(
            code::RT_MEMORY,
            format!("the host has not {size} free bytes: {error}. Free memory or ask for less."),
        )
    })?;
    let start = pages.start as u64;
    KNOWN.lock().own.insert(start, Own { size: size as u64, pages: Arc::new(pages) });
    address.write(Address(start));
    Ok(())
}

/// `aclrtMallocHostWithCfg`.
pub fn allocate_with(address: Out<Address>, size: u64, config: In<Config>) -> Outcome {
    address.check("ptr")?;
    for attribute in crate::malloc::attributes(config)? {
        const VA_FLAG: i32 = 3;
        if attribute.kind == VA_FLAG && attribute.value != 0 {
            return Err(unsupported("one address for host and device needs hardware that is not supported here."));
        }
    }
    allocate(address, size as usize)
}

/// `aclrtFreeHost`.
pub fn free(address: Address) -> Outcome {
    let address = address.check("hostPtr")?;
    if free_own(address) {
        return Ok(());
    }
    Err(refused(format!("{address:#x} is not what aclrtMallocHost returned, or is freed already.")))
}

/// Frees memory that the library allocated. Returns whether there is some at this address. What is
/// registered in it is no longer.
pub(crate) fn free_own(address: u64) -> bool {
    let mut known = KNOWN.lock();
    let Some(freed) = known.own.remove(&address) else { return false };
    known.registered.retain(|&start, _| start.wrapping_sub(address) >= freed.size);
    drop(known);
    drop(freed);
    true
}

/// `aclrtFreeHostWithDevSync`: waits for the device first.
pub fn free_after_work(address: Address) -> Outcome {
    address.check("hostPtr")?;
    stream::synchronize_device()?;
    free(address)
}

/// The known host memory that contains a range: its pages, if the library allocated them.
pub(crate) fn find(address: u64, size: u64) -> Option<Option<Arc<Pages>>> {
    let known = KNOWN.lock();
    let is_in = |start: u64, length: u64| address - start < length && size <= length - (address - start);
    if let Some((&start, own)) = known.own.range(..=address).next_back() {
        if is_in(start, own.size) {
            return Some(Some(own.pages.clone()));
        }
    }
    let (&start, &length) = known.registered.range(..=address).next_back()?;
    is_in(start, length).then_some(None)
}

/// Enters memory of the program.
fn register_range(address: u64, size: u64) -> Outcome {
    if size == 0 {
        return Err(invalid("the size is 0. Register at least one byte."));
    }
    let end = address.checked_add(size).ok_or_else(|| refused("the range reaches beyond the last address."))?;
    if copy::is_drivers(address) {
        return Err(refused(format!("{address:#x} is memory of the driver, not of the host.")));
    }
    let registered = &mut KNOWN.lock().registered;
    let before = registered.range(..end).next_back();
    if before.is_some_and(|(start, size)| start + size > address) {
        let text = format!("host memory at {address:#x} is already registered. Unregister it first.");
        return Err(Fault::new(code::HOST_REGISTERED, text));
    }
    registered.insert(address, size);
    Ok(())
}

/// `aclrtHostRegister`: the device address is the host's, since there are no kernels to use it.
pub fn register(address: Address, size: u64, kind: i32, device: Out<Address>) -> Outcome {
    let address = address.check("ptr")?;
    let device = device.check("devPtr")?;
    if size != 0 && kind & !(4 | 8) != 0 {
        return Err(unsupported(format!(
            "type {kind} is not a way to register memory. Use ACL_HOST_REGISTER_MAPPED (0)."
        )));
    }
    register_range(address, size)?;
    device.write(Address(address));
    Ok(())
}

/// `aclrtHostRegisterV2`.
pub fn register_v2(address: Address, size: u64, flags: u32) -> Outcome {
    let address = address.check("ptr")?;
    if size != 0 && flags & !(2 | 4 | 8 | 0x1000_0000) != 0 {
        return Err(unsupported(format!(
            "flags {flags:#x} are not a way to register memory. Use ACL_HOST_REG_MAPPED (2)."
        )));
    }
    register_range(address, size)
}

/// `aclrtHostUnregister`.
pub fn unregister(address: Address) -> Outcome {
    let address = address.check("ptr")?;
    let removed = KNOWN.lock().registered.remove(&address);
    removed.map(drop).ok_or_else(|| {
        let text = format!("no host memory is registered at {address:#x}.");
        Fault::new(code::HOST_NOT_REGISTERED, text)
    })
}

/// `aclrtHostGetDevicePointer`.
pub fn device_pointer(address: Address, device: Out<Address>, flags: u32) -> Outcome {
    let address = address.check("pHost")?;
    let device = device.check("pDevice")?;
    if flags != 0 {
        return Err(refused(format!("flag is {flags}. It is reserved: pass 0.")));
    }
    find(address, 1).ok_or_else(|| refused(format!("no host memory is registered at {address:#x}.")))?;
    device.write(Address(address));
    Ok(())
}
