//! The BPF program that decides which system calls go to the emulator.
//!
//! Calls that cannot concern the driver stay in the kernel, since a notification costs
//! microseconds. Calls that may concern it must all be caught, since any program may run under the
//! emulator. A filter cannot read memory, so paths are checked later. The emulator gets:
//!
//! * every open that does not ask for a directory (the driver's nodes may be opened read-only, and
//!   shells open with O_CREAT), stat, fstat, access and readlink;
//! * getdents64, because `/dev` lists the nodes;
//! * every ioctl except those of terminals, sockets and file systems: the real modules accept other
//!   magic bytes than their own;
//! * mmap of a file if shared or huge, and any change of mappings at addresses that only the driver
//!   uses;
//! * mlockall, process_madvise and fallocate of 4 GiB and more, which could allocate all pages of
//!   the driver's segments;
//! * exec, which ends an address space without ending the process.
//!
//! Not fork: a C library holds the lock of malloc while it forks, and the server, which may be a
//! thread of the same process, allocates memory before it answers.

use crate::seccomp::{Filter, Program, Test, high, low};

/// The smallest range whose unmapping the driver takes for the end of a session.
pub const DRIVER_AREA: u64 = 16 << 30;

/// The whole program. Under a schedule it also catches what gives up the CPU for others or for a
/// time, random numbers, connections, and the first call that glibc makes in a new thread and in a
/// fork's child: so the seed decides whether they or their parents go first, and who connects
/// first.
pub fn program(scheduled: bool) -> Program {
    let filter = Filter::notifying();
    let waits = [
        libc::SYS_sched_yield,
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_getrandom,
        libc::SYS_connect,
        libc::SYS_set_robust_list,
    ];
    let waits = waits.into_iter().filter(|_| scheduled).map(|number| filter.always(number));
    let calls = [
        filter.ioctl(),
        filter.open(libc::SYS_openat, 2),
        filter.always(libc::SYS_openat2),
        // MAP_SHARED and MAP_SHARED_VALIDATE have bit 0 set, MAP_PRIVATE has not.
        filter
            .rule(libc::SYS_mmap)
            .catch_watched(0)
            .allow_if(low(3), Test::AnyOf(libc::MAP_ANONYMOUS as u32))
            .catch_if(low(3), Test::AnyOf(libc::MAP_SHARED as u32))
            .catch_if(high(1), Test::AtLeast(1))
            .else_allow(),
        filter.change(libc::SYS_munmap),
        filter.change(libc::SYS_mprotect),
        filter.change(libc::SYS_madvise),
        filter.change(libc::SYS_mremap),
        filter.change(libc::SYS_mbind),
        filter.change(libc::SYS_mlock),
        filter.change(libc::SYS_mlock2),
        filter.always(libc::SYS_mlockall),
        filter.always(libc::SYS_process_madvise),
        filter.rule(libc::SYS_fallocate).catch_if(high(3), Test::AtLeast(1)).else_allow(),
        filter.always(libc::SYS_newfstatat),
        filter.always(libc::SYS_statx),
        filter.always(libc::SYS_fstat),
        filter.always(libc::SYS_faccessat),
        filter.always(libc::SYS_faccessat2),
        filter.always(libc::SYS_readlinkat),
        filter.always(libc::SYS_getdents64),
        filter.always(libc::SYS_execve),
        filter.always(libc::SYS_execveat),
        #[cfg(target_arch = "x86_64")]
        filter.open(libc::SYS_open, 1),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_creat),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_access),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_readlink),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_stat),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_lstat),
    ];
    Program::new(calls.into_iter().chain(waits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::{WATCHED_END, WATCHED_START};
    use libc::c_long;

    fn caught(number: c_long, arguments: [u64; 6]) -> bool {
        program(false).catches(number, arguments)
    }

    #[test]
    fn ordinary_system_calls_stay_in_the_kernel() {
        for number in [libc::SYS_read, libc::SYS_write, libc::SYS_close, libc::SYS_futex, libc::SYS_exit_group] {
            assert!(!caught(number, [3, 0, 0, 0, 0, 0]));
        }
    }

    #[test]
    fn opens_are_looked_at_unless_they_list() {
        let openat = |flags: i32| caught(libc::SYS_openat, [0, 0, flags as u64, 0, 0, 0]);
        assert!(openat(libc::O_RDWR));
        assert!(openat(libc::O_RDONLY | libc::O_CLOEXEC));
        assert!(openat(libc::O_WRONLY));
        assert!(openat(libc::O_RDWR | libc::O_CREAT));
        assert!(!openat(libc::O_RDONLY | libc::O_DIRECTORY));
    }

    #[test]
    fn ioctls_are_looked_at_unless_a_foreign_subsystem_is_meant() {
        let ioctl = |request: u64| caught(libc::SYS_ioctl, [3, request, 0, 0, 0, 0]);
        for request in [0x5a00, 0x4158_4d65, 0xc158_4d32, 0x481d, 0x4d14, 0x5500, 0x452d, 0x5800] {
            assert!(ioctl(request), "{request:#x}");
        }
        for request in [libc::TCGETS, libc::FIONBIO, libc::TIOCGWINSZ] {
            assert!(!ioctl(request), "{request:#x}");
        }
    }

    #[test]
    fn mappings_are_looked_at_by_kind_and_by_address() {
        let mmap =
            |address: u64, length: u64, flags: i32| caught(libc::SYS_mmap, [address, length, 3, flags as u64, 3, 0]);
        assert!(mmap(0, 4096, libc::MAP_SHARED));
        assert!(!mmap(0, 4096, libc::MAP_PRIVATE));
        assert!(mmap(0, 8 << 40, libc::MAP_PRIVATE));
        assert!(!mmap(0, 8 << 40, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS));
        assert!(mmap(16 << 40, 4096, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED));
        let munmap = |address: u64, length: u64| caught(libc::SYS_munmap, [address, length, 0, 0, 0, 0]);
        assert!(!munmap(0x7f00_0000_0000, 4096));
        assert!(!munmap(WATCHED_START - 4096, 4096));
        assert!(munmap(WATCHED_START, 4096));
        assert!(munmap(WATCHED_END - 4096, 4096));
        assert!(!munmap(WATCHED_END, 4096));
        assert!(munmap(4096, 20 << 40));
    }
}
