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

use libc::{c_long, sock_filter};

/// First address whose mappings are watched, 7 TiB: the lowest of the driver's segments.
pub const WATCHED_START: u64 = 0x0700_0000_0000;
/// End of the watched addresses. Segments end at 24 TiB and dynamic mappings may lie above;
/// programs, heaps and stacks lie higher on both architectures.
pub const WATCHED_END: u64 = 0x5000_0000_0000;
/// A change of at least this length is always caught, because it may reach into the watched
/// addresses.
pub const HUGE: u64 = 1 << 40;

/// The smallest range whose unmapping the driver takes for the end of a session.
pub const DRIVER_AREA: u64 = 16 << 30;

/// ioctl magic bytes of other subsystems that programs use often: terminals and descriptors (`T`),
/// sockets, block devices, file systems (`f` and btrfs), seccomp itself. No module of the driver
/// uses them.
const FOREIGN_MAGICS: [u8; 6] = [b'T', 0x89, 0x12, b'f', 0x94, b'!'];

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xc000_00b7;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the emulator knows the system calls of x86_64 and aarch64 only");

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const ANY_OF: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const SHIFT_RIGHT: u16 = (libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const NOTIFY: u32 = libc::SECCOMP_RET_USER_NOTIF;

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

    /// Returns a notification if the address in `argument` is watched.
    fn notify_if_watched(mut self, argument: u32) -> Self {
        self.push(LOAD, high(argument), 0, 0);
        self.push(AT_LEAST, (WATCHED_START >> 32) as u32, 0, 2);
        self.push(AT_LEAST, (WATCHED_END >> 32) as u32, 1, 0);
        self.push(RETURN, NOTIFY, 0, 0);
        self
    }

    fn otherwise(mut self, verdict: u32) -> Self {
        self.push(RETURN, verdict, 0, 0);
        self
    }

    fn open(number: c_long, flags: u32) -> Self {
        Rule::of(number).when(low(flags), ANY_OF, (libc::O_DIRECTORY | libc::O_PATH) as u32, ALLOW).otherwise(NOTIFY)
    }

    fn always(number: c_long) -> Self {
        Rule::of(number).otherwise(NOTIFY)
    }

    /// A change of mappings: address in argument 0, length in argument 1.
    fn change(number: c_long) -> Self {
        Rule::of(number).notify_if_watched(0).when(high(1), AT_LEAST, (HUGE >> 32) as u32, NOTIFY).otherwise(ALLOW)
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
        rule.otherwise(NOTIFY)
    }

    fn mmap() -> Self {
        // MAP_SHARED and MAP_SHARED_VALIDATE have bit 0 set, MAP_PRIVATE has not.
        Rule::of(libc::SYS_mmap)
            .notify_if_watched(0)
            .when(low(3), ANY_OF, libc::MAP_ANONYMOUS as u32, ALLOW)
            .when(low(3), ANY_OF, libc::MAP_SHARED as u32, NOTIFY)
            .when(high(1), AT_LEAST, 1, NOTIFY)
            .otherwise(ALLOW)
    }
}

/// The whole program.
pub fn program() -> Vec<sock_filter> {
    let rules = [
        Rule::ioctl(),
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
        Rule::always(libc::SYS_mlockall),
        Rule::always(libc::SYS_process_madvise),
        Rule::of(libc::SYS_fallocate).when(high(3), AT_LEAST, 1, NOTIFY).otherwise(ALLOW),
        Rule::always(libc::SYS_newfstatat),
        Rule::always(libc::SYS_statx),
        Rule::always(libc::SYS_fstat),
        Rule::always(libc::SYS_faccessat),
        Rule::always(libc::SYS_faccessat2),
        Rule::always(libc::SYS_readlinkat),
        Rule::always(libc::SYS_getdents64),
        Rule::always(libc::SYS_execve),
        Rule::always(libc::SYS_execveat),
        #[cfg(target_arch = "x86_64")]
        Rule::open(libc::SYS_open, 1),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_creat),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_access),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_readlink),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_stat),
        #[cfg(target_arch = "x86_64")]
        Rule::always(libc::SYS_lstat),
    ];
    let step = |code, k, jt, jf| sock_filter { code, jt, jf, k };
    let mut program = vec![
        // Calls of another architecture (32-bit programs) have other numbers: allow them.
        step(LOAD, 4, 0, 0),
        step(EQUAL, AUDIT_ARCH, 1, 0),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the program for a system call, by the rules of classic BPF.
    fn run(number: c_long, arguments: [u64; 6]) -> u32 {
        let mut data = [0u8; 64];
        data[0..4].copy_from_slice(&(number as u32).to_le_bytes());
        data[4..8].copy_from_slice(&AUDIT_ARCH.to_le_bytes());
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
    fn ordinary_system_calls_stay_in_the_kernel() {
        for number in [libc::SYS_read, libc::SYS_write, libc::SYS_close, libc::SYS_futex, libc::SYS_exit_group] {
            assert_eq!(run(number, [3, 0, 0, 0, 0, 0]), ALLOW);
        }
    }

    #[test]
    fn opens_are_looked_at_unless_they_list() {
        let openat = |flags: i32| run(libc::SYS_openat, [0, 0, flags as u64, 0, 0, 0]);
        assert_eq!(openat(libc::O_RDWR), NOTIFY);
        assert_eq!(openat(libc::O_RDONLY | libc::O_CLOEXEC), NOTIFY);
        assert_eq!(openat(libc::O_WRONLY), NOTIFY);
        assert_eq!(openat(libc::O_RDWR | libc::O_CREAT), NOTIFY);
        assert_eq!(openat(libc::O_RDONLY | libc::O_DIRECTORY), ALLOW);
    }

    #[test]
    fn ioctls_are_looked_at_unless_a_foreign_subsystem_is_meant() {
        let ioctl = |request: u64| run(libc::SYS_ioctl, [3, request, 0, 0, 0, 0]);
        for request in [0x5a00, 0x4158_4d65, 0xc158_4d32, 0x481d, 0x4d14, 0x5500, 0x452d, 0x5800] {
            assert_eq!(ioctl(request), NOTIFY, "{request:#x}");
        }
        for request in [libc::TCGETS, libc::FIONBIO, libc::TIOCGWINSZ] {
            assert_eq!(ioctl(request), ALLOW, "{request:#x}");
        }
    }

    #[test]
    fn mappings_are_looked_at_by_kind_and_by_address() {
        let mmap =
            |address: u64, length: u64, flags: i32| run(libc::SYS_mmap, [address, length, 3, flags as u64, 3, 0]);
        assert_eq!(mmap(0, 4096, libc::MAP_SHARED), NOTIFY);
        assert_eq!(mmap(0, 4096, libc::MAP_PRIVATE), ALLOW);
        assert_eq!(mmap(0, 8 << 40, libc::MAP_PRIVATE), NOTIFY);
        assert_eq!(mmap(0, 8 << 40, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS), ALLOW);
        assert_eq!(mmap(16 << 40, 4096, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED), NOTIFY);
        let munmap = |address: u64, length: u64| run(libc::SYS_munmap, [address, length, 0, 0, 0, 0]);
        assert_eq!(munmap(0x7f00_0000_0000, 4096), ALLOW);
        assert_eq!(munmap(WATCHED_START - 4096, 4096), ALLOW);
        assert_eq!(munmap(WATCHED_START, 4096), NOTIFY);
        assert_eq!(munmap(WATCHED_END - 4096, 4096), NOTIFY);
        assert_eq!(munmap(WATCHED_END, 4096), ALLOW);
        assert_eq!(munmap(4096, 20 << 40), NOTIFY);
    }
}
