//! A service, its engines and what they write, for the tests.

// Each test file is a crate of its own and uses only a part of this.
#![allow(dead_code)]

#[path = "../../../tests/support/scenarios.rs"]
pub mod scenarios;

use ascend_emulator::Emulator;
use ascend_vmm::{Device, LogicalId, Session};
use ascend_vmm_service::protocol::Status;
use ascend_vmm_service::{Client, DomainName, Mode, OpenOptions, Policy, Reader};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SOCKET: &str = "SERVICE_TEST_SOCKET";
const POLICY: &str = "SERVICE_TEST_POLICY";
const REPLACES: &str = "SERVICE_TEST_REPLACES";
const SIGNALS: &str = "SERVICE_TEST_SIGNALS";

pub const MIB: u64 = 1 << 20;
/// How long a test waits for something that happens soon, on a busy machine. What a scenario may
/// lose by its events does not happen at all.
fn patience() -> Duration {
    Duration::from_secs(if scenarios::is_disturbed() { 2 } else { 120 })
}

/// This test binary again, as another process of the service.
fn process(test: &str) -> Command {
    process_of(&std::env::current_exe().unwrap(), test)
}

fn process_of(program: &Path, test: &str) -> Command {
    let mut command = Command::new(program);
    command.args([test, "--exact", "--nocapture"]).stdin(Stdio::null());
    if scenarios::is_client() && std::env::var_os(scenarios::ROOT).is_none() {
        command.env(scenarios::ROOT, std::process::id().to_string());
    }
    command
}

fn policy() -> Policy {
    // What a front says about the next one has no environment.
    let words = std::env::args().find_map(|word| word.strip_prefix(NEXT_POLICY).map(str::to_owned));
    let text = words.or_else(|| std::env::var(POLICY).ok()).unwrap_or_default();
    Policy::from_toml(&text).unwrap()
}

/// How the configuration of the next front is passed on: as the name of a test to skip, which the
/// harness ignores.
const NEXT_POLICY: &str = "--skip=policy:";

/// The next front after one that replaced another.
fn successor() -> Command {
    let mut command = process("support::front_process");
    command.arg(format!("{NEXT_POLICY}{}", std::env::var(POLICY).unwrap_or_default()));
    command
}

/// Not a test: the front's process. Without a keeper it does nothing.
#[test]
fn front_process() {
    scenarios::report_broken_promises();
    if std::env::var_os(SIGNALS).is_some() {
        interrupt_every_millisecond();
    }
    if let Some(path) = std::env::var_os(REPLACES) {
        // It ends with its keeper, or when it is replaced.
        let _ = ascend_vmm_service::replace_front(Path::new(&path), policy(), &successor());
    } else if std::env::var_os("ASCEND_VMM_FRONT").is_some() {
        let _ = ascend_vmm_service::run_front(policy());
    }
}

/// From now on every blocking call of this thread is interrupted soon.
fn interrupt_every_millisecond() {
    extern "C" fn nothing(_: i32) {}
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing.
    unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
    // SAFETY: it takes nothing.
    let own = unsafe { nix::libc::pthread_self() } as usize;
    std::thread::spawn(move || {
        loop {
            // SAFETY: the front's thread lives as long as its process.
            unsafe { nix::libc::pthread_kill(own as nix::libc::pthread_t, nix::libc::SIGUSR1) };
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

/// Not a test: the keeper's process. Without a socket it does nothing.
#[test]
fn keeper_process() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    scenarios::report_broken_promises();
    let listener = ascend_vmm_service::bind(Path::new(&path), &policy()).unwrap();
    let session = Session::open().unwrap();
    ascend_vmm_service::keep(session, &listener, || process("support::front_process"), |_| ()).unwrap();
}

/// A service, and its directory.
pub struct Service {
    pub keeper: Child,
    pub directory: PathBuf,
    policy: String,
}

impl Service {
    pub fn start(policy: &str) -> Service {
        Service::start_by(process("support::keeper_process"), policy)
    }

    /// A service whose fronts are interrupted every millisecond.
    pub fn start_with_signals() -> Service {
        let mut command = process("support::keeper_process");
        command.env(SIGNALS, "1");
        Service::start_by(command, "")
    }

    fn start_by(mut command: Command, policy: &str) -> Service {
        let number = std::process::id();
        let directory = std::env::temp_dir().join(format!("ascend-vmm-service-{number}"));
        std::fs::create_dir_all(&directory).unwrap();
        command.env(SOCKET, directory.join("socket")).env(POLICY, policy);
        let service = Service { keeper: command.spawn().unwrap(), directory, policy: policy.into() };
        service.status();
        service
    }

    /// A keeper at the same path, in the place of this one, which was killed.
    pub fn replaced(self) -> Service {
        let service = self.start_again();
        std::mem::forget(self);
        service
    }

    /// Starts a keeper at the same path.
    pub fn start_again(&self) -> Service {
        let mut command = process("support::keeper_process");
        command.env(SOCKET, self.path()).env(POLICY, &self.policy);
        let (directory, policy) = (self.directory.clone(), self.policy.clone());
        let mut service = Service { keeper: command.spawn().unwrap(), directory, policy };
        let deadline = Instant::now() + patience();
        while service.status().keeper != service.keeper.id() as i32 {
            let ended = service.keeper.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "the new keeper does not serve: {ended:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        service
    }

    /// The configuration of fronts that replace others from now on.
    pub fn set_policy(&mut self, policy: &str) {
        self.policy = policy.into();
    }

    pub fn path(&self) -> PathBuf {
        self.directory.join("socket")
    }

    pub fn client(&self) -> Client {
        Client::new(self.path())
    }

    /// The status of whichever front answers first.
    pub fn status(&self) -> Status {
        let deadline = Instant::now() + patience();
        loop {
            match self.client().status() {
                Ok(status) => return status,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The status when nobody writes any more: a process that was killed is noticed a moment later.
    pub fn settled(&self) -> Status {
        let deadline = Instant::now() + patience();
        loop {
            let status = self.status();
            if status.domains.iter().all(|domain| domain.state != "writing") {
                return status;
            }
            assert!(Instant::now() < deadline, "somebody writes: {status:#?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn kill_front(&self) {
        kill(Pid::from_raw(self.status().front), Signal::SIGKILL).unwrap();
    }

    pub fn kill_keeper(&mut self) {
        self.keeper.kill().unwrap();
        self.keeper.wait().unwrap();
    }

    /// Starts a front that takes over from the one that serves.
    pub fn replace_front(&self) -> Child {
        self.replace_front_by(&std::env::current_exe().unwrap())
    }

    /// The same with another program.
    pub fn replace_front_by(&self, program: &Path) -> Child {
        let before = self.status().front;
        let mut command = process_of(program, "support::front_process");
        let child = command.env(REPLACES, self.path()).env(POLICY, &self.policy).spawn().unwrap();
        let deadline = Instant::now() + patience();
        while self.status().front == before {
            assert!(Instant::now() < deadline, "the new front does not serve");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(self.status().front, child.id() as i32);
        child
    }

    /// Ends it, and waits until the driver has forgotten it.
    pub fn end(mut self, emulator: &Emulator) {
        self.kill_keeper();
        self.end_of_driver(emulator);
    }

    /// Waits until the driver has forgotten everybody.
    pub fn end_of_driver(&self, emulator: &Emulator) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let mut state = emulator.state();
            // A process that is killed while it connects to the daemon leaves a connection that
            // nobody claimed, which the driver closes after a minute.
            state.sessions.retain(|connection| connection.owned);
            if state.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "left in the driver: {state:#?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        emulator.control(|driver| driver.pass_time(Duration::from_secs(60)));
        assert!(emulator.state().is_empty(), "left after a minute: {:#?}", emulator.state());
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

pub fn name(text: &str) -> DomainName {
    text.parse().unwrap()
}

pub fn device() -> Device {
    Session::open().unwrap().device(LogicalId(0)).unwrap()
}

pub fn options() -> OpenOptions {
    OpenOptions::new().wait(patience() / 2)
}

/// The bytes of a tensor, which differ from those of every other.
pub fn contents(key: &str, size: u64) -> Vec<u8> {
    let seed = key.bytes().fold(7u8, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte));
    (0..size).map(|at| seed.wrapping_add((at / 7) as u8)).collect()
}

/// Writes some tensors, one of them over the border of two allocations, and commits them.
pub fn write_weights(client: &Client, device: &Device, domain: &DomainName, keys: &[&str]) -> Reader {
    let mut writer = client.write(device, domain, Mode::Write, 64 * MIB, &options()).unwrap();
    writer.allocate(2 * MIB, "first").unwrap();
    for key in keys {
        let size = MIB + 4096;
        writer.put(key, size, key.as_bytes()).unwrap().write(&contents(key, size)).unwrap();
    }
    writer.commit().unwrap()
}

pub fn check_weights(reader: &Reader, keys: &[&str]) {
    assert_eq!(reader.entries().len(), keys.len());
    for key in keys {
        let slice = reader.get(key).unwrap();
        let mut bytes = vec![0; slice.size() as usize];
        slice.read(&mut bytes).unwrap();
        assert!(bytes == contents(key, slice.size()), "the bytes of {key}");
        assert_eq!(reader.entries()[*key].value, key.as_bytes());
    }
}

pub const KEYS: &[&str] = &["embed", "layer.0", "layer.1", "norm"];
