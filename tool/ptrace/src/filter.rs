//! The BPF program that stops a thread at the system calls that may concern the driver.
//!
//! All other calls run at full speed. A filter cannot read memory and does not know which
//! descriptors are the driver's, so the tracer decides that at the stop:
//!
//! * open, and every call that copies or closes descriptors or processes;
//! * ioctl, except those of terminals, sockets and file systems;
//! * mmap of files, and any change of mappings at addresses that only the driver uses.

use libc::{c_long, sock_filter};
use nix::errno::Errno;

/// First address whose mappings are watched, 7 TiB: the lowest of the driver's segments.
pub const WATCHED_START: u64 = 0x0700_0000_0000;
/// End of the watched addresses. Programs, heaps and stacks lie higher on both architectures.
pub const WATCHED_END: u64 = 0x5000_0000_0000;
/// A change of at least this length may reach into the watched addresses from anywhere.
pub const HUGE: u64 = 1 << 40;

/// ioctl magic bytes of other subsystems that programs use often: terminals and descriptors (`T`),
/// sockets, block devices, file systems (`f` and btrfs), seccomp. No module of the driver uses
/// them.
pub const FOREIGN_MAGICS: [u8; 6] = [b'T', 0x89, 0x12, b'f', 0x94, b'!'];

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const ANY_OF: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const SHIFT_RIGHT: u16 = (libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const TRACE: u32 = libc::SECCOMP_RET_TRACE;

/// Offset of half of an argument in `seccomp_data`. Both architectures are little-endian.
const fn low(argument: u32) -> u32 {
    16 + 8 * argument
}
const fn high(argument: u32) -> u32 {
    low(argument) + 4
}

/// The rule for one system call: a sequence of tests, each of which may decide it.
struct Rule {
    number: c_long,
    code: Vec<sock_filter>,
}

impl Rule {
    fn of(number: c_long) -> Self {
        Rule { number, code: Vec::new() }
    }

    fn push(&mut self, code: u16, k: u32, jt: u8, jf: u8) {
        self.code.push(sock_filter { code, jt, jf, k });
    }

    /// Returns `verdict` if the word at `offset` passes the test.
    fn when(mut self, offset: u32, test: u16, k: u32, verdict: u32) -> Self {
        self.push(LOAD, offset, 0, 0);
        self.push(test, k, 0, 1);
        self.push(RETURN, verdict, 0, 0);
        self
    }

    fn trace_if_watched(mut self, argument: u32) -> Self {
        self.push(LOAD, high(argument), 0, 0);
        self.push(AT_LEAST, (WATCHED_START >> 32) as u32, 0, 2);
        self.push(AT_LEAST, (WATCHED_END >> 32) as u32, 1, 0);
        self.push(RETURN, TRACE, 0, 0);
        self
    }

    fn otherwise(mut self, verdict: u32) -> Self {
        self.push(RETURN, verdict, 0, 0);
        self
    }

    fn always(number: c_long) -> Self {
        Rule::of(number).otherwise(TRACE)
    }

    fn open(number: c_long, flags: u32) -> Self {
        Rule::of(number).when(low(flags), ANY_OF, (libc::O_DIRECTORY | libc::O_PATH) as u32, ALLOW).otherwise(TRACE)
    }

    /// A change of mappings: address in argument 0, length in argument 1.
    fn change(number: c_long) -> Self {
        Rule::of(number).trace_if_watched(0).when(high(1), AT_LEAST, (HUGE >> 32) as u32, TRACE).otherwise(ALLOW)
    }

    fn fcntl() -> Self {
        let kinds = [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC, libc::F_SETFD];
        let rule = Rule::of(libc::SYS_fcntl);
        kinds.into_iter().fold(rule, |rule, kind| rule.when(low(1), EQUAL, kind as u32, TRACE)).otherwise(ALLOW)
    }

    fn ioctl() -> Self {
        let mut rule = Rule::of(libc::SYS_ioctl);
        rule.push(LOAD, low(1), 0, 0);
        rule.push(SHIFT_RIGHT, 8, 0, 0);
        rule.push(AND, 0xff, 0, 0);
        for magic in FOREIGN_MAGICS {
            rule.push(EQUAL, magic.into(), 0, 1);
            rule.push(RETURN, ALLOW, 0, 0);
        }
        rule.otherwise(TRACE)
    }

    fn mmap() -> Self {
        Rule::of(libc::SYS_mmap)
            .trace_if_watched(0)
            .when(low(3), ANY_OF, libc::MAP_ANONYMOUS as u32, ALLOW)
            .otherwise(TRACE)
    }
}

fn program() -> Vec<sock_filter> {
    let rules = [
        Rule::ioctl(),
        Rule::always(libc::SYS_close),
        Rule::open(libc::SYS_openat, 2),
        Rule::always(libc::SYS_openat2),
        Rule::mmap(),
        Rule::change(libc::SYS_munmap),
        Rule::change(libc::SYS_mprotect),
        Rule::change(libc::SYS_madvise),
        Rule::change(libc::SYS_mremap),
        Rule::change(libc::SYS_mbind),
        Rule::change(libc::SYS_mlock),
        Rule::change(libc::SYS_mlock2),
        Rule::fcntl(),
        Rule::always(libc::SYS_dup),
        Rule::always(libc::SYS_dup3),
        Rule::always(libc::SYS_close_range),
        Rule::always(libc::SYS_clone),
        Rule::always(libc::SYS_clone3),
        Rule::always(libc::SYS_unshare),
        #[cfg(target_arch = "x86_64")]
        Rule::open(libc::SYS_open, 1),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_creat),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_dup2),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_fork),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_vfork),
    ];
    let step = |code, k, jt, jf| sock_filter { code, jt, jf, k };
    let mut program = vec![
        // Calls of another architecture (32-bit programs) have other numbers: allow them.
        step(LOAD, 4, 0, 0),
        step(EQUAL, super::ARCHITECTURE, 1, 0),
        step(RETURN, ALLOW, 0, 0),
    ];
    for rule in rules {
        program.push(step(LOAD, 0, 0, 0));
        program.push(step(EQUAL, rule.number as u32, 0, rule.code.len() as u8));
        program.extend(rule.code);
    }
    program.push(step(RETURN, ALLOW, 0, 0));
    program
}

/// Installs the filter on the calling thread and everything that it will start. This cannot be
/// undone, and without a tracer the filtered calls return ENOSYS.
///
/// # Errors
/// The kernel or the environment does not allow filters.
pub fn install() -> Result<(), Errno> {
    let program = program();
    let header = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    // SAFETY: takes five integers; the flag concerns the calling thread only.
    Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: the header points to the program, which outlives the call; the kernel copies it. The
    // program only allows calls or stops at them, so no call returns what the kernel did not do.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0 as libc::c_ulong, &raw const header)
    };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the program for a system call, by the rules of classic BPF.
    fn run(number: c_long, arguments: [u64; 6]) -> u32 {
        let mut data = [0u8; 64];
        data[0..4].copy_from_slice(&(number as u32).to_le_bytes());
        data[4..8].copy_from_slice(&super::super::ARCHITECTURE.to_le_bytes());
        for (index, argument) in arguments.iter().enumerate() {
            data[16 + 8 * index..24 + 8 * index].copy_from_slice(&argument.to_le_bytes());
        }
        let program = program();
        let (mut at, mut a) = (0, 0u32);
        loop {
            let step = program[at];
            at += 1;
            let jump = |taken: bool| usize::from(if taken { step.jt } else { step.jf });
            match step.code {
                LOAD => a = u32::from_le_bytes(data[step.k as usize..][..4].try_into().unwrap()),
                EQUAL => at += jump(a == step.k),
                AT_LEAST => at += jump(a >= step.k),
                ANY_OF => at += jump(a & step.k != 0),
                SHIFT_RIGHT => a >>= step.k,
                AND => a &= step.k,
                RETURN => return step.k,
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn ordinary_system_calls_run_at_full_speed() {
        for number in [libc::SYS_read, libc::SYS_write, libc::SYS_futex, libc::SYS_recvmsg, libc::SYS_exit_group] {
            assert_eq!(run(number, [3, 0, 0, 0, 0, 0]), ALLOW);
        }
        assert_eq!(run(libc::SYS_mmap, [0, 4096, 3, libc::MAP_ANONYMOUS as u64 | 2, 0, 0]), ALLOW);
        assert_eq!(run(libc::SYS_munmap, [0x7f00_0000_0000, 4096, 0, 0, 0, 0]), ALLOW);
        assert_eq!(run(libc::SYS_ioctl, [1, libc::TCGETS, 0, 0, 0, 0]), ALLOW);
        assert_eq!(run(libc::SYS_fcntl, [1, libc::F_GETFL as u64, 0, 0, 0, 0]), ALLOW);
        assert_eq!(run(libc::SYS_openat, [0, 0, libc::O_DIRECTORY as u64, 0, 0, 0]), ALLOW);
    }

    #[test]
    fn calls_that_may_be_the_drivers_stop() {
        for request in [0x5a00, 0x4158_4d65, 0xc158_4d32, 0x481d, 0x4d14, 0x5500] {
            assert_eq!(run(libc::SYS_ioctl, [3, request, 0, 0, 0, 0]), TRACE, "{request:#x}");
        }
        assert_eq!(run(libc::SYS_openat, [0, 0, libc::O_RDWR as u64, 0, 0, 0]), TRACE);
        assert_eq!(run(libc::SYS_mmap, [0, 4096, 3, libc::MAP_SHARED as u64, 3, 0]), TRACE);
        assert_eq!(run(libc::SYS_mmap, [16 << 40, 4096, 3, libc::MAP_ANONYMOUS as u64, 3, 0]), TRACE);
        assert_eq!(run(libc::SYS_munmap, [WATCHED_START, 4096, 0, 0, 0, 0]), TRACE);
        assert_eq!(run(libc::SYS_munmap, [4096, HUGE, 0, 0, 0, 0]), TRACE);
        for kind in [libc::F_DUPFD, libc::F_DUPFD_CLOEXEC, libc::F_SETFD] {
            assert_eq!(run(libc::SYS_fcntl, [3, kind as u64, 0, 0, 0, 0]), TRACE);
        }
        for number in [libc::SYS_close, libc::SYS_dup, libc::SYS_dup3, libc::SYS_clone, libc::SYS_clone3] {
            assert_eq!(run(number, [3, 0, 0, 0, 0, 0]), TRACE);
        }
    }
}
