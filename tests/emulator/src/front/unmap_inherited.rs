//! Takes the driver's mappings that a child inherited away from it.
//!
//! The real driver's mappings are not copied by fork (VM_DONTCOPY), so a child can map the segments
//! at their fixed addresses and have a session of its own. The emulated files' mappings are copied,
//! unless madvise forbids it, and only the process itself can do that or unmap them. So when a
//! child opens one of the driver's nodes for the first time, its call is stopped, and it unmaps
//! them with its own hands (ptrace). Then its call begins again.

use nix::errno::Errno;
use std::ops::Range;
use std::ptr;
use std::sync::mpsc::channel;

/// PTRACE_GETSIGMASK and PTRACE_SETSIGMASK, which not every C library has.
const GET_SIGNAL_MASK: libc::c_uint = 0x420a;
const SET_SIGNAL_MASK: libc::c_uint = 0x420b;

/// NT_PRSTATUS: the general registers.
const GENERAL: usize = 1;

type Registers = libc::user_regs_struct;

/// Lets a thread, which waits for the answer to its call, unmap ranges. If this returns true, the
/// call must be answered with ERESTARTSYS, and is made again when the ranges are gone. False if the
/// thread has another tracer.
pub fn begin(tid: i32, call: i64, ranges: Vec<Range<u64>>) -> bool {
    let (sender, seized) = channel();
    // A tracer is a thread, and it waits for its tracee. The server must answer meanwhile.
    let tracer = std::thread::Builder::new().name("unmap_inherited".into()).spawn(move || {
        let options = libc::PTRACE_O_TRACESYSGOOD as usize;
        let begun = request(libc::PTRACE_SEIZE as _, tid, 0, options)
            .and_then(|()| request(libc::PTRACE_INTERRUPT as _, tid, 0, 0));
        let is_seized = begun.is_ok();
        if sender.send(is_seized).is_ok() && is_seized {
            // If it fails, the thread was killed, or keeps what it inherited.
            let _ = unmap(tid, call, &ranges);
        }
    });
    tracer.is_ok() && seized.recv().unwrap_or(false)
}

/// Waits until the thread stops, unmaps the ranges and lets it go.
fn unmap(tid: i32, call: i64, ranges: &[Range<u64>]) -> Result<(), Errno> {
    wait_for_stop(tid)?;
    let done = unmap_stopped(tid, call, ranges);
    request(libc::PTRACE_DETACH as _, tid, 0, 0).and(done)
}

fn unmap_stopped(tid: i32, call: i64, ranges: &[Range<u64>]) -> Result<(), Errno> {
    let mut again = registers(tid)?;
    if !is_restarting(&mut again, call) {
        return Err(Errno::EAGAIN);
    }
    // No handler may run between the calls.
    let mut mask = 0u64;
    buffer(GET_SIGNAL_MASK, tid, size_of::<u64>(), &mut mask)?;
    buffer(SET_SIGNAL_MASK, tid, size_of::<u64>(), &mut !0u64)?;
    let mut done = Ok(());
    for range in ranges {
        let mut registers = again;
        set_call(&mut registers, libc::SYS_munmap, range.start, range.end - range.start);
        done = done.and_then(|()| set_registers(tid, &mut registers));
        // To its beginning and to its end.
        for _ in 0..2 {
            done = done.and_then(|()| request(libc::PTRACE_SYSCALL as _, tid, 0, 0)).and_then(|()| wait_for_stop(tid));
        }
    }
    let restored = set_registers(tid, &mut again);
    buffer(SET_SIGNAL_MASK, tid, size_of::<u64>(), &mut mask).and(restored).and(done)
}

/// Waits until the thread is stopped for its tracer.
fn wait_for_stop(tid: i32) -> Result<(), Errno> {
    let mut status = 0;
    loop {
        // SAFETY: the kernel writes one integer to the address.
        match Errno::result(unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) }) {
            Ok(_) if libc::WIFSTOPPED(status) => return Ok(()),
            Ok(_) => return Err(Errno::ESRCH),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// A request whose address and data are plain numbers.
fn request(request: libc::c_uint, tid: i32, address: usize, data: usize) -> Result<(), Errno> {
    // SAFETY: the requests that this module makes so take numbers.
    let result = unsafe {
        libc::ptrace(
            request as _,
            tid,
            ptr::without_provenance_mut::<libc::c_void>(address),
            ptr::without_provenance_mut::<libc::c_void>(data),
        )
    };
    Errno::result(result).map(drop)
}

/// A request with a buffer.
fn buffer<T>(request: libc::c_uint, tid: i32, address: usize, data: &mut T) -> Result<(), Errno> {
    // SAFETY: the kernel reads or writes the value, whose size is `address` or in the value itself.
    let result = unsafe {
        libc::ptrace(
            request as _,
            tid,
            ptr::without_provenance_mut::<libc::c_void>(address),
            ptr::from_mut(data).cast::<libc::c_void>(),
        )
    };
    Errno::result(result).map(drop)
}

fn registers(tid: i32) -> Result<Registers, Errno> {
    // SAFETY: all zeroes is a valid value of these integers.
    let mut registers: Registers = unsafe { std::mem::zeroed() };
    let mut part = libc::iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<Registers>() };
    buffer(libc::PTRACE_GETREGSET as _, tid, GENERAL, &mut part)?;
    Ok(registers)
}

fn set_registers(tid: i32, registers: &mut Registers) -> Result<(), Errno> {
    let mut part = libc::iovec { iov_base: ptr::from_mut(registers).cast(), iov_len: size_of::<Registers>() };
    buffer(libc::PTRACE_SETREGSET as _, tid, GENERAL, &mut part)
}

/// Whether the thread is about to make this call again. Then the registers are set to do so.
#[cfg(target_arch = "x86_64")]
fn is_restarting(registers: &mut Registers, call: i64) -> bool {
    const ERESTARTSYS: i64 = 512;
    if registers.orig_rax as i64 != call || registers.rax as i64 != -ERESTARTSYS {
        return false;
    }
    // The kernel has not gone back to the instruction yet, which has two bytes. Without a call in
    // the registers it leaves them as they are.
    registers.rip -= 2;
    registers.rax = call as u64;
    registers.orig_rax = u64::MAX;
    true
}

/// As on x86_64, but the kernel has gone back before the thread stops.
#[cfg(target_arch = "aarch64")]
fn is_restarting(registers: &mut Registers, call: i64) -> bool {
    registers.regs[8] as i64 == call
}

/// Sets the registers, which are before the instruction of a call, to another one.
#[cfg(target_arch = "x86_64")]
fn set_call(registers: &mut Registers, number: i64, first: u64, second: u64) {
    (registers.rax, registers.rdi, registers.rsi) = (number as u64, first, second);
}

#[cfg(target_arch = "aarch64")]
fn set_call(registers: &mut Registers, number: i64, first: u64, second: u64) {
    (registers.regs[8], registers.regs[0], registers.regs[1]) = (number as u64, first, second);
}
