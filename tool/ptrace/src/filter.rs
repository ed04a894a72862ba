//! The BPF program that stops a thread at the system calls that may concern the driver.
//!
//! All other calls run at full speed. A filter cannot read memory and does not know which
//! descriptors are the driver's, so the tracer decides that at the stop:
//!
//! * open, and every call that copies or closes descriptors or processes;
//! * ioctl, except those of terminals, sockets and file systems;
//! * mmap of files, and any change of mappings at addresses that only the driver uses.

use ascend_emulator::seccomp::{Filter, Program, Test, low};
use nix::errno::Errno;

fn program() -> Program {
    let filter = Filter::tracing();
    Program::new([
        filter.ioctl(),
        filter.always(libc::SYS_close),
        filter.open(libc::SYS_openat, 2),
        filter.always(libc::SYS_openat2),
        filter
            .rule(libc::SYS_mmap)
            .catch_watched(0)
            .allow_if(low(3), Test::AnyOf(libc::MAP_ANONYMOUS as u32))
            .else_catch(),
        filter.change(libc::SYS_munmap),
        filter.change(libc::SYS_mprotect),
        filter.change(libc::SYS_madvise),
        filter.change(libc::SYS_mremap),
        filter.change(libc::SYS_mbind),
        filter.change(libc::SYS_mlock),
        filter.change(libc::SYS_mlock2),
        filter
            .rule(libc::SYS_fcntl)
            .catch_if(low(1), Test::Equal(libc::F_DUPFD as u32))
            .catch_if(low(1), Test::Equal(libc::F_DUPFD_CLOEXEC as u32))
            .catch_if(low(1), Test::Equal(libc::F_SETFD as u32))
            .else_allow(),
        filter.always(libc::SYS_dup),
        filter.always(libc::SYS_dup3),
        filter.always(libc::SYS_close_range),
        filter.always(libc::SYS_clone),
        filter.always(libc::SYS_clone3),
        filter.always(libc::SYS_unshare),
        #[cfg(target_arch = "x86_64")]
        filter.open(libc::SYS_open, 1),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_creat),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_dup2),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_fork),
        #[cfg(target_arch = "x86_64")]
        filter.always(libc::SYS_vfork),
    ])
}

/// Installs the filter on the calling thread and everything that it will start. This cannot be
/// undone, and without a tracer the filtered calls return ENOSYS.
///
/// # Errors
/// The kernel or the environment does not allow filters.
pub fn install() -> Result<(), Errno> {
    program().install(0).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_emulator::seccomp::{HUGE, WATCHED_START};
    use libc::c_long;

    fn caught(number: c_long, arguments: [u64; 6]) -> bool {
        program().catches(number, arguments)
    }

    #[test]
    fn ordinary_system_calls_run_at_full_speed() {
        for number in [libc::SYS_read, libc::SYS_write, libc::SYS_futex, libc::SYS_recvmsg, libc::SYS_exit_group] {
            assert!(!caught(number, [3, 0, 0, 0, 0, 0]));
        }
        assert!(!caught(libc::SYS_mmap, [0, 4096, 3, libc::MAP_ANONYMOUS as u64 | 2, 0, 0]));
        assert!(!caught(libc::SYS_munmap, [0x7f00_0000_0000, 4096, 0, 0, 0, 0]));
        assert!(!caught(libc::SYS_ioctl, [1, libc::TCGETS, 0, 0, 0, 0]));
        assert!(!caught(libc::SYS_fcntl, [1, libc::F_GETFL as u64, 0, 0, 0, 0]));
        assert!(!caught(libc::SYS_openat, [0, 0, libc::O_DIRECTORY as u64, 0, 0, 0]));
    }

    #[test]
    fn calls_that_may_be_the_drivers_stop() {
        for request in [0x5a00, 0x4158_4d65, 0xc158_4d32, 0x481d, 0x4d14, 0x5500] {
            assert!(caught(libc::SYS_ioctl, [3, request, 0, 0, 0, 0]), "{request:#x}");
        }
        assert!(caught(libc::SYS_openat, [0, 0, libc::O_RDWR as u64, 0, 0, 0]));
        assert!(caught(libc::SYS_mmap, [0, 4096, 3, libc::MAP_SHARED as u64, 3, 0]));
        assert!(caught(libc::SYS_mmap, [16 << 40, 4096, 3, libc::MAP_ANONYMOUS as u64, 3, 0]));
        assert!(caught(libc::SYS_munmap, [WATCHED_START, 4096, 0, 0, 0, 0]));
        assert!(caught(libc::SYS_munmap, [4096, HUGE, 0, 0, 0, 0]));
        for kind in [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC, libc::F_SETFD] {
            assert!(caught(libc::SYS_fcntl, [3, kind as u64, 0, 0, 0, 0]));
        }
        for number in [libc::SYS_close, libc::SYS_dup, libc::SYS_dup3, libc::SYS_clone, libc::SYS_clone3] {
            assert!(caught(number, [3, 0, 0, 0, 0, 0]));
        }
    }
}
