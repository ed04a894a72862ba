//! What the integration tests share: hosts, sessions, memory, recorded calls and waits.
//!
//! [`corpus`] has stored inputs, [`events`] watches what the library traces, [`processes`] starts
//! other processes and talks to them, [`random`] makes numbers from a seed, [`raw`] uses the driver
//! without the library, [`untrusted`] checks readers of bytes from other processes.

// Every test binary compiles all of this and uses its own part of it.
#![allow(dead_code)]

pub mod corpus;
pub mod events;
pub mod processes;
pub mod random;
pub mod raw;
pub mod untrusted;

use ascend_emulator::config::{Daemon, DeviceProcess};
use ascend_emulator::{Config, Emulator};
use ascend_vmm::LogicalId;
use ascend_vmm::device_process::{Settings, Step};
use ascend_vmm::discovery::{Options, VisibleDevices};
use ascend_vmm::share::BareTgid;
use ascend_vmm::{Device, Error, Mapping, PhysicalMemory, ReserveOptions, Session};
use nix::libc;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// The size of a huge page: the smallest piece of memory.
pub const MIB2: u64 = 2 << 20;
pub const GIB: u64 = 1 << 30;

/// What takes longer hangs. No test may expect an answer sooner than this.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Devices that start their processes by themselves, so that a test sees the memory driver only.
pub fn plain() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

/// Devices with this daemon.
pub fn with_daemon(daemon: Daemon) -> Config {
    Config { daemon, ..Config::default() }
}

/// Settings that wait for every daemon that answers at all. An absent one fails at once.
pub fn patient() -> Settings {
    limits(PATIENCE).limit(Step::Connect, Duration::ZERO)
}

/// Settings that give each step this long.
pub fn limits(limit: Duration) -> Settings {
    let steps = [Step::Connect, Step::Handshake, Step::Prepare, Step::Start, Step::Close];
    steps.into_iter().fold(Settings::default(), |settings, step| settings.limit(step, limit))
}

/// Discovery on a host of which only the driver is visible: the files of the machine that runs the
/// test do not count.
pub fn survey_options() -> Options {
    Options::default().root("/nonexistent").visible(VisibleDevices::all()).timeout(PATIENCE)
}

pub fn own_pid() -> i32 {
    std::process::id() as i32
}

/// This process in the numbering of trust lists.
pub fn own_tgid() -> BareTgid {
    BareTgid::of_this_process(&Session::current().unwrap()).unwrap()
}

/// A device of this process's session.
#[track_caller]
pub fn device(number: u32) -> Device {
    Session::current().unwrap().device(LogicalId(number)).unwrap()
}

/// This process's session and a device of it.
#[track_caller]
pub fn open(number: u32) -> (Session, Device) {
    (Session::current().unwrap(), device(number))
}

/// Maps memory at new addresses, which are free again after the mapping.
#[track_caller]
pub fn mapped(memory: &PhysicalMemory) -> Mapping {
    let options = ReserveOptions::default().alignment(memory.page().size());
    let reservation = memory.session().reserve_with(memory.size(), &options).unwrap();
    reservation.map(0, memory).unwrap()
}

/// New memory of a device, mapped.
#[track_caller]
pub fn mapped_on(device: &Device, size: u64) -> Mapping {
    mapped(&device.create(size).unwrap())
}

/// New memory of the host, mapped.
#[track_caller]
pub fn mapped_on_host(size: u64) -> Mapping {
    mapped(&Session::current().unwrap().host().unwrap().create(size).unwrap())
}

/// Bytes of a mapping.
#[track_caller]
pub fn contents(mapping: &Mapping, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    mapping.read(offset, &mut bytes).unwrap();
    bytes
}

/// The first bytes of memory, through a mapping that is removed again.
#[track_caller]
pub fn read(memory: &PhysicalMemory, length: usize) -> Vec<u8> {
    contents(&mapped(memory), 0, length)
}

/// Writes to the beginning of memory, through a mapping that is removed again.
#[track_caller]
pub fn write(memory: &PhysicalMemory, bytes: &[u8]) {
    mapped(memory).write(0, bytes).unwrap();
}

/// The recorded system calls in order: ioctls by the command's name, others by their own.
pub fn calls(emulator: &Emulator) -> Vec<&'static str> {
    emulator.records().iter().map(|record| record.cmd.unwrap_or(record.call)).collect()
}

/// The recorded commands in order.
pub fn commands(emulator: &Emulator) -> Vec<&'static str> {
    emulator.records().iter().filter_map(|record| record.cmd).collect()
}

/// How often a command was recorded.
pub fn count(emulator: &Emulator, command: &str) -> usize {
    commands(emulator).iter().filter(|&&name| name == command).count()
}

/// Injects a fault, such as `MEM_MAP#1=ENOMEM`.
#[track_caller]
pub fn inject(emulator: &Emulator, fault: &str) {
    emulator.inject(fault.parse().unwrap());
}

/// Ends this process's device process on a device.
#[track_caller]
pub fn end_device_process(emulator: &Emulator, device: u32) {
    let tgid = own_pid();
    assert!(emulator.control(move |driver| driver.machine.end_device_process(tgid, device)));
}

/// How many processes hold the only share: the exporter and the importers.
#[track_caller]
pub fn holders(emulator: &Emulator) -> u32 {
    let shares = emulator.state().memory.shares;
    assert_eq!(shares.len(), 1, "{shares:#?}");
    shares[0].holders
}

/// The driver holds nothing for any process.
#[track_caller]
pub fn assert_nothing_left(emulator: &Emulator) {
    let state = emulator.state();
    assert!(state.is_empty(), "{state:#?}");
}

/// The library refused this by itself, in these words.
#[track_caller]
pub fn refused_here(error: &Error, words: &str) {
    assert!(matches!(error, Error::Invalid(_) | Error::InUse { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "{words:?} is not in {error}");
}

/// The library refused to use an object of the parent process.
#[track_caller]
pub fn refused_in_child(error: &Error) {
    assert!(matches!(error, Error::OtherProcess { .. }), "{error}");
}

/// Waits for a condition that other threads or processes bring about.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "waited {PATIENCE:?} for this: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Refuses system calls of this thread from now on.
fn refuse(calls: &[libc::c_long], errno: libc::c_int) {
    let statement = |code: u32, k: u32, jt: u8| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (number, &call) in calls.iter().enumerate() {
        let over = (calls.len() - number) as u8;
        filter.push(statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32, over));
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: a filter that lives until the call returns; it concerns this thread only.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// Does something in a thread whose calls of these kinds are refused.
pub fn without(calls: &[libc::c_long], errno: libc::c_int, work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            refuse(calls, errno);
            work();
        });
    });
}

/// A directory of this test, removed when dropped.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Directory {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("ascend-vmm-test-{}-{number}", std::process::id()));
            match std::fs::create_dir(&path) {
                Ok(()) => return Directory(path),
                // Left by a process that was killed and had this id.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => continue,
                Err(error) => panic!("{}: {error}", path.display()),
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
