//! Seccomp filters that catch the system calls that may concern the driver.
//!
//! The front answers the calls that its filter catches, and `ascend-vmm trace` stops at those that
//! its own catches. A filter cannot read memory and does not know which file a descriptor stands
//! for, so it catches all calls that may be for the driver, and the catcher looks closer. All other
//! calls run at full speed.

use libc::{c_long, c_ulong, sock_filter};
use nix::errno::Errno;

/// First address whose mappings are watched, 7 TiB: the lowest of the driver's segments.
pub const WATCHED_START: u64 = 0x0700_0000_0000;
/// End of the watched addresses. Segments end at 24 TiB and dynamic mappings may lie above;
/// programs, heaps and stacks lie higher on both architectures.
pub const WATCHED_END: u64 = 0x5000_0000_0000;
/// A change of at least this length is always caught, because it may reach into the watched
/// addresses.
pub const HUGE: u64 = 1 << 40;

/// ioctl magic bytes of other subsystems that programs use often: terminals and descriptors (`T`),
/// sockets, block devices, file systems (`f` and btrfs), seccomp itself. No module of the driver
/// uses them.
pub const FOREIGN_MAGICS: [u8; 6] = [b'T', 0x89, 0x12, b'f', 0x94, b'!'];

/// The architecture of this program, as the kernel names it in `seccomp_data` and in ptrace.
#[cfg(target_arch = "x86_64")]
pub const ARCHITECTURE: u32 = 0xc000_003e;
/// The architecture of this program, as the kernel names it in `seccomp_data` and in ptrace.
#[cfg(target_arch = "aarch64")]
pub const ARCHITECTURE: u32 = 0xc000_00b7;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("only the system calls of x86_64 and aarch64 are known");

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const ANY_OF: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const SHIFT_RIGHT: u16 = (libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;

/// Offset of the number and of the architecture in `seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE_OFFSET: u32 = 4;

/// Half of an argument, by its offset in `seccomp_data`.
#[derive(Debug, Clone, Copy)]
pub struct Word(u32);

/// The lower half of an argument. Both architectures are little-endian.
pub const fn low(argument: u32) -> Word {
    Word(16 + 8 * argument)
}

/// The upper half of an argument.
pub const fn high(argument: u32) -> Word {
    Word(low(argument).0 + 4)
}

/// A condition for a [`Word`].
#[derive(Debug, Clone, Copy)]
pub enum Test {
    /// It has this value.
    Equal(u32),
    /// It is not smaller.
    AtLeast(u32),
    /// It has at least one of these bits.
    AnyOf(u32),
}

/// Makes the rules of a filter.
#[derive(Debug, Clone, Copy)]
pub struct Filter {
    /// What it returns for a call that it catches.
    caught: u32,
}

impl Filter {
    /// A filter that passes the calls to a listener.
    pub const fn notifying() -> Filter {
        Filter { caught: libc::SECCOMP_RET_USER_NOTIF }
    }

    /// A filter that stops at the calls for a tracer.
    pub const fn tracing() -> Filter {
        Filter { caught: libc::SECCOMP_RET_TRACE }
    }

    /// A rule without tests for the system call of this number.
    pub fn rule(self, number: c_long) -> Rule {
        Rule { number, caught: self.caught, code: Vec::new() }
    }

    /// Catches every call of this number.
    pub fn always(self, number: c_long) -> Rule {
        self.rule(number).else_catch()
    }

    /// Catches opens, except of directories. `flags` is the argument that has the flags.
    pub fn open(self, number: c_long, flags: u32) -> Rule {
        self.rule(number).allow_if(low(flags), Test::AnyOf((libc::O_DIRECTORY | libc::O_PATH) as u32)).else_catch()
    }

    /// Catches changes of mappings that may be the driver's. The address is argument 0, the length
    /// argument 1.
    pub fn change(self, number: c_long) -> Rule {
        self.rule(number).catch_watched(0).catch_if(high(1), Test::AtLeast((HUGE >> 32) as u32)).else_allow()
    }

    /// Catches ioctls, except those of [`FOREIGN_MAGICS`].
    pub fn ioctl(self) -> Rule {
        let mut rule = self.rule(libc::SYS_ioctl);
        rule.push(LOAD, low(1).0, 0, 0);
        rule.push(SHIFT_RIGHT, 8, 0, 0);
        rule.push(AND, 0xff, 0, 0);
        for magic in FOREIGN_MAGICS {
            rule.push(EQUAL, magic.into(), 0, 1);
            rule.push(RETURN, ALLOW, 0, 0);
        }
        rule.else_catch()
    }
}

/// The rule for one system call: a sequence of tests, each of which may decide it.
#[derive(Debug)]
pub struct Rule {
    number: c_long,
    caught: u32,
    code: Vec<sock_filter>,
}

impl Rule {
    fn push(&mut self, code: u16, k: u32, jt: u8, jf: u8) {
        self.code.push(sock_filter { code, jt, jf, k });
    }

    fn decide_if(mut self, word: Word, test: Test, verdict: u32) -> Rule {
        let (code, operand) = match test {
            Test::Equal(value) => (EQUAL, value),
            Test::AtLeast(value) => (AT_LEAST, value),
            Test::AnyOf(bits) => (ANY_OF, bits),
        };
        self.push(LOAD, word.0, 0, 0);
        self.push(code, operand, 0, 1);
        self.push(RETURN, verdict, 0, 0);
        self
    }

    /// Catches the call if the word passes the test.
    #[must_use]
    pub fn catch_if(self, word: Word, test: Test) -> Rule {
        let caught = self.caught;
        self.decide_if(word, test, caught)
    }

    /// Allows the call if the word passes the test.
    #[must_use]
    pub fn allow_if(self, word: Word, test: Test) -> Rule {
        self.decide_if(word, test, ALLOW)
    }

    /// Catches the call if the address in this argument is watched.
    #[must_use]
    pub fn catch_watched(mut self, argument: u32) -> Rule {
        self.push(LOAD, high(argument).0, 0, 0);
        self.push(AT_LEAST, (WATCHED_START >> 32) as u32, 0, 2);
        self.push(AT_LEAST, (WATCHED_END >> 32) as u32, 1, 0);
        self.push(RETURN, self.caught, 0, 0);
        self
    }

    /// Catches the calls that no test has decided.
    #[must_use]
    pub fn else_catch(mut self) -> Rule {
        self.push(RETURN, self.caught, 0, 0);
        self
    }

    /// Allows the calls that no test has decided.
    #[must_use]
    pub fn else_allow(mut self) -> Rule {
        self.push(RETURN, ALLOW, 0, 0);
        self
    }
}

/// A filter as the kernel takes it.
#[derive(Debug)]
pub struct Program(Vec<sock_filter>);

impl Program {
    /// Joins rules. A call that has no rule is allowed.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Program {
        let step = |code, k, jt, jf| sock_filter { code, jt, jf, k };
        let mut program = vec![
            // Calls of another architecture (32-bit programs) have other numbers: allow them.
            step(LOAD, ARCHITECTURE_OFFSET, 0, 0),
            step(EQUAL, ARCHITECTURE, 1, 0),
            step(RETURN, ALLOW, 0, 0),
        ];
        for rule in rules {
            program.push(step(LOAD, NUMBER, 0, 0));
            program.push(step(EQUAL, rule.number as u32, 0, rule.code.len() as u8));
            program.extend(rule.code);
        }
        program.push(step(RETURN, ALLOW, 0, 0));
        Program(program)
    }

    /// Installs the filter on the calling thread and everything that it will start, with these
    /// flags of seccomp(2). Returns its answer. This cannot be undone.
    ///
    /// # Errors
    /// The kernel or the environment does not allow filters. EBUSY: the thread has a listener.
    pub fn install(&self, flags: c_ulong) -> Result<c_long, Errno> {
        let header = libc::sock_fprog { len: self.0.len() as u16, filter: self.0.as_ptr().cast_mut() };
        // SAFETY: takes five integers; the flag concerns the calling thread only.
        Errno::result(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
        // SAFETY: the header points to the program, which outlives the call; the kernel copies it.
        // The program only allows calls or passes them on, so it makes up no answer.
        Errno::result(unsafe {
            libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const header)
        })
    }

    /// Whether the filter catches this system call: runs it by the rules of classic BPF. For tests.
    pub fn catches(&self, number: c_long, arguments: [u64; 6]) -> bool {
        let mut data = [0u8; 64];
        data[0..4].copy_from_slice(&(number as u32).to_le_bytes());
        data[4..8].copy_from_slice(&ARCHITECTURE.to_le_bytes());
        for (index, argument) in arguments.iter().enumerate() {
            data[16 + 8 * index..24 + 8 * index].copy_from_slice(&argument.to_le_bytes());
        }
        let (mut at, mut accumulator) = (0, 0u32);
        loop {
            let step = self.0[at];
            at += 1;
            let jump = |taken: bool| usize::from(if taken { step.jt } else { step.jf });
            match step.code {
                LOAD => {
                    let from = step.k as usize;
                    accumulator = u32::from_le_bytes([data[from], data[from + 1], data[from + 2], data[from + 3]]);
                }
                EQUAL => at += jump(accumulator == step.k),
                AT_LEAST => at += jump(accumulator >= step.k),
                ANY_OF => at += jump(accumulator & step.k != 0),
                SHIFT_RIGHT => accumulator >>= step.k,
                AND => accumulator &= step.k,
                RETURN => return step.k != ALLOW,
                other => unreachable!("no rule has the instruction {other:#x}"),
            }
        }
    }
}
