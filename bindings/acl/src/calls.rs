//! The exported functions without pointers, for Rust programs that call them as C does: benchmarks
//! and tests.

use crate::border::Address;
use crate::exports;
use crate::handles::Handle;

/// The result of a C function: its output, or its code.
pub type Answer<T = ()> = Result<T, i32>;

fn answer(code: i32) -> Answer {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// Calls a function that writes its result to a place.
fn output<T>(empty: T, call: impl FnOnce(*mut T) -> i32) -> Answer<T> {
    let mut place = empty;
    answer(call(&mut place)).map(|()| place)
}

/// `aclrtSetDevice`.
pub fn set_device(device: i32) -> Answer {
    // SAFETY: no pointers.
    answer(unsafe { exports::aclrtSetDevice(device) })
}

/// `aclrtReserveMemAddress`.
pub fn reserve(size: usize) -> Answer<u64> {
    // SAFETY: the place for the answer is there.
    let reserved = output(Address(0), |place| unsafe {
        exports::aclrtReserveMemAddress(crate::border::Out::to(place), size, 0, Address(0), 1)
    });
    reserved.map(|address| address.0)
}

/// `aclrtReleaseMemAddress`.
pub fn release(address: u64) -> Answer {
    // SAFETY: the address is looked up, not followed.
    answer(unsafe { exports::aclrtReleaseMemAddress(Address(address)) })
}

/// `aclrtMallocPhysical`: HBM of a device.
pub fn malloc_physical(size: usize, device: u32) -> Answer<Handle> {
    let properties = crate::physical::Properties::on_device(device);
    // SAFETY: the place for the answer and the properties are there.
    output(Handle::NULL, |place| unsafe {
        let properties = crate::border::In::of(&properties);
        exports::aclrtMallocPhysical(crate::border::Out::to(place), size, properties, 0)
    })
}

/// `aclrtFreePhysical`.
pub fn free_physical(handle: Handle) -> Answer {
    // SAFETY: the handle is looked up.
    answer(unsafe { exports::aclrtFreePhysical(handle) })
}

/// `aclrtMapMem`.
pub fn map(address: u64, size: usize, handle: Handle) -> Answer {
    // SAFETY: address and handle are looked up.
    answer(unsafe { exports::aclrtMapMem(Address(address), size, 0, handle, 0) })
}

/// `aclrtUnmapMem`.
pub fn unmap(address: u64) -> Answer {
    // SAFETY: the address is looked up.
    answer(unsafe { exports::aclrtUnmapMem(Address(address)) })
}

/// `aclrtMallocAlign32`.
pub fn malloc(size: usize) -> Answer<u64> {
    // SAFETY: the place for the answer is there.
    let allocated =
        output(Address(0), |place| unsafe { exports::aclrtMallocAlign32(crate::border::Out::to(place), size, 0) });
    allocated.map(|address| address.0)
}

/// `aclrtFree`.
pub fn free(address: u64) -> Answer {
    // SAFETY: the address is looked up.
    answer(unsafe { exports::aclrtFree(Address(address)) })
}

/// `aclrtMemcpy` to device memory. A host address is refused, because the function would
/// dereference it.
pub fn write(address: u64, from: &[u8]) -> Answer {
    if !crate::copy::is_drivers(address) {
        return Err(crate::fault::code::RT_PARAM_INVALID);
    }
    let source = Address(from.as_ptr().expose_provenance() as u64);
    // SAFETY: the source is borrowed, and the destination is looked up.
    answer(unsafe { exports::aclrtMemcpy(Address(address), from.len(), source, from.len(), 1) })
}

/// `aclrtMemcpy` from device memory. A host address is refused, because the function would
/// dereference it.
pub fn read(address: u64, to: &mut [u8]) -> Answer {
    if !crate::copy::is_drivers(address) {
        return Err(crate::fault::code::RT_PARAM_INVALID);
    }
    let (place, size) = (Address(to.as_mut_ptr().expose_provenance() as u64), to.len());
    // SAFETY: the destination is borrowed exclusively, and the source is looked up.
    answer(unsafe { exports::aclrtMemcpy(place, size, Address(address), size, 2) })
}
