//! A separate process for each test.
//!
//! The driver allows one memory session per process, at fixed addresses, so two tests of the
//! library cannot share a process. A test wrapped in [`isolated`] runs its test binary again for
//! itself alone, with an emulated driver inside, and reports the result. Works with `cargo test`
//! and with nextest.

use crate::config::Config;
use crate::fault::Fault;
use crate::front::Emulator;
use crate::schedule::Schedule;
use ascend_ioctl::Generation;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::any::type_name;
use std::cell::Cell;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode, Stdio, Termination};
use std::time::{Duration, Instant};

/// Set in the process that runs the body. The value says which call of the test it is for, the
/// configuration's index and a word that the process prints at its end.
const MARKER: &str = "ASCEND_EMULATOR_ISOLATED";

/// A test that takes longer is considered hung, on however slow and busy a machine.
const TIMEOUT: Duration = Duration::from_secs(600);

thread_local! {
    /// How many calls this test has made: the harness gives each test a thread of its own.
    static CALLS: Cell<usize> = const { Cell::new(0) };
    /// Whether the body of a function with the attribute runs. Another one in it would not.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test's body in a separate process, on a thread that is attached to an emulated driver,
/// and checks at the end that the body left nothing open.
///
/// A test may call it several times, also in a loop and through functions of its own. Each body has
/// a process of its own. Call it on the test's own thread, whose name is the test's.
///
/// # Panics
/// With the body's output, if the body panics, exits, hangs, triggers a trap or leaves something
/// behind.
pub fn isolated<F: FnOnce(&Emulator)>(config: Config, body: F) {
    isolate(type_name::<F>(), vec![config], true, |_, emulator| body(emulator));
}

/// As [`isolated`], but the body may leave files open and memory allocated.
///
/// # Panics
/// As [`isolated`], except for what is left behind.
pub fn isolated_leaky<F: FnOnce(&Emulator)>(config: Config, body: F) {
    isolate(type_name::<F>(), vec![config], false, |_, emulator| body(emulator));
}

/// As [`isolated`], for each driver generation in turn, each in a process of its own.
///
/// # Panics
/// As [`isolated`], for the first generation that fails.
pub fn on_each_generation<F: FnOnce(Generation, &Emulator)>(config: Config, body: F) {
    let configs = Generation::ALL.iter().map(|generation| Config { generation: *generation, ..config.clone() });
    isolate(type_name::<F>(), configs.collect(), true, |config, emulator| body(config.generation, emulator));
}

/// The hosts that a function with `#[ascend_emulator::test]` runs on: its arguments.
#[doc(hidden)]
#[derive(Default)]
pub struct Hosts {
    pub config: Config,
    pub devices: Option<u32>,
    pub generations: Vec<&'static str>,
    pub faults: Vec<&'static str>,
    pub seeds: Vec<u64>,
}

impl Hosts {
    /// A configuration for each generation with each seed, and the faults that are possible on all.
    fn resolve(self) -> Result<(Vec<Config>, Vec<Fault>), String> {
        let mut generations = Vec::new();
        for name in self.generations {
            match (name, name.parse()) {
                ("all", _) => generations.extend(Generation::ALL),
                (_, Ok(generation)) => generations.push(generation),
                _ => {
                    let known = Generation::ALL.map(|generation| generation.to_string()).join(", ");
                    return Err(format!("`{name}` is not one of {known}, all"));
                }
            }
        }
        if generations.is_empty() {
            generations.push(self.config.generation);
        }
        let faults: Result<Vec<Fault>, _> = self.faults.iter().map(|fault| fault.parse()).collect();
        let faults = faults.map_err(|bad: crate::fault::BadFault| bad.to_string())?;
        let schedules = match self.seeds.is_empty() {
            true => vec![self.config.schedule.clone()],
            false => self.seeds.into_iter().map(|seed| Some(Schedule::seed(seed))).collect(),
        };
        let mut configs = Vec::new();
        for generation in generations {
            let devices = self.devices.unwrap_or(self.config.devices);
            let config = Config { generation, devices, ..self.config.clone() };
            faults.iter().try_for_each(|fault| fault.check(&config))?;
            configs.extend(schedules.iter().map(|it| Config { schedule: it.clone(), ..config.clone() }));
        }
        Ok((configs, faults))
    }
}

/// Runs the body of a function with `#[ascend_emulator::test]` as [`isolated`] does, on each host.
#[doc(hidden)]
#[track_caller]
pub fn run<F: FnOnce(&Emulator) -> T, T: Termination>(hosts: Hosts, body: F) {
    let (configs, faults) = hosts.resolve().unwrap_or_else(|reason| panic!("#[ascend_emulator::test]: {reason}"));
    isolate(type_name::<F>(), configs, true, |_, emulator| {
        faults.into_iter().for_each(|fault| emulator.inject(fault));
        IS_INSIDE.set(true);
        let ended = body(emulator).report();
        IS_INSIDE.set(false);
        assert!(ended == ExitCode::SUCCESS, "the test returned an error");
    });
}

/// Keeps malloc from giving memory back to Linux. For that it opens a file while it holds a lock,
/// and the emulator, which must answer the open, runs in the same process and needs the same lock
/// to free what the client allocated.
fn keep_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number, before there are other threads that allocate much.
    unsafe {
        nix::libc::mallopt(nix::libc::M_TRIM_THRESHOLD, i32::MAX);
    }
}

fn isolate(closure: &str, configs: Vec<Config>, strict: bool, body: impl FnOnce(&Config, &Emulator)) {
    assert!(!IS_INSIDE.get(), "this runs in a process of its own already: call it in the test instead");
    let call = CALLS.get();
    CALLS.set(call + 1);
    let Ok(marker) = std::env::var(MARKER) else {
        for (index, config) in configs.iter().enumerate() {
            run_again(&test_name(closure), call, index, config);
        }
        return;
    };
    let mut parts = marker.splitn(3, ':');
    let (Some(wanted), Some(index), Some(word)) = (parts.next(), parts.next(), parts.next()) else {
        panic!("{MARKER} is set to `{marker}`")
    };
    if wanted != call.to_string() {
        // Another process runs this one.
        return;
    }
    let Some(config) = index.parse().ok().and_then(|index: usize| configs.get(index)) else {
        panic!("no configuration {index}")
    };
    // The parent may give up or be killed: do not outlive it.
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    keep_heaps();
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let emulator = Emulator::start(config.clone()).unwrap_or_else(|unavailable| panic!("{unavailable}"));
        emulator.attach().unwrap_or_else(|unavailable| panic!("{unavailable}"));
        body(config, &emulator);
        emulator.assert_no_traps();
        let state = emulator.state();
        assert!(!strict || state.is_empty(), "the test left this behind in the driver: {state:#?}");
    }));
    // This harness must not judge: the parent's does, by the body's own end.
    let (status, report) = match ended {
        Ok(()) => (0, format!("\n{word}\n")),
        Err(payload) => {
            let said = payload.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without words");
            (101, format!("\n{word} {}\n{said}", said.len()))
        }
    };
    // Not println, which the harness captures.
    let _ = std::io::stdout().write_all(report.as_bytes());
    let _ = std::io::stdout().flush();
    std::process::exit(status);
}

/// The name of the running test, as the harness knows it: its thread's, or that of the function in
/// which the closure was written.
fn test_name(closure: &str) -> String {
    if let Some(name) = std::thread::current().name().filter(|name| *name != "main") {
        return name.to_owned();
    }
    let path = closure.split("::{{closure}}").next().unwrap_or(closure);
    path.split_once("::").map_or(path, |(_crate, test)| test).to_owned()
}

fn run_again(test: &str, call: usize, index: usize, config: &Config) {
    let word = format!("isolated-{}-{call}-{index}-done", std::process::id());
    let output = memfd_create(c"output", MFdFlags::MFD_CLOEXEC).map(File::from);
    let mut output = output.unwrap_or_else(|error| panic!("no room for the test's output: {error}"));
    let stream = || output.try_clone().map_or_else(|_| Stdio::null(), Stdio::from);
    let program = std::env::current_exe().unwrap_or_else(|error| panic!("the test's own program is unknown: {error}"));
    let child = Command::new(program)
        .args([test, "--exact", "--nocapture", "--include-ignored"])
        .env(MARKER, format!("{call}:{index}:{word}"))
        .stdin(Stdio::null())
        .stdout(stream())
        .stderr(stream())
        .process_group(0)
        .spawn();
    let mut child = child.unwrap_or_else(|error| panic!("the test's own program cannot be started: {error}"));
    let ended = wait(child.id(), TIMEOUT);
    // Kill everything that the test started.
    let group = nix::unistd::Pid::from_raw(child.id() as i32);
    let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
    let status = child.wait().unwrap_or_else(|error| panic!("waitpid: {error}"));
    let mut text = Vec::new();
    let _ = output.rewind().and_then(|()| output.read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text);
    let panicked = panic_message(&text, &word);
    if ended && status.success() && panicked.is_none() && text.contains(&word) {
        return;
    }
    let seed = config.schedule.as_ref().map_or_else(String::new, |schedule| format!(", seed {}", schedule.seed));
    let host = format!("`{test}` on driver {:?}{seed}", config.generation);
    if let Some(message) = panicked {
        // Only what the body said may satisfy a `should_panic`, not whatever it printed.
        eprintln!("The output of {host}:\n{text}");
        panic!("{host}: failed in its own process: {message}");
    }
    let reason = match (ended, status.success()) {
        (false, _) => format!("hung for {} s and was killed", TIMEOUT.as_secs()),
        (true, true) => "its body did not run: call it on the test's own thread".to_owned(),
        (true, false) => format!("failed in its own process ({status})"),
    };
    panic!("{host}: {reason}. Its output:\n{text}");
}

/// What the body's panic said, if it ended with one.
fn panic_message<'a>(output: &'a str, word: &str) -> Option<&'a str> {
    let (_, report) = output.split_once(&format!("\n{word} "))?;
    let (length, message) = report.split_once('\n')?;
    Some(message.get(..length.parse().ok()?).unwrap_or(message))
}

/// Waits for the end of a child without reaping it; false on a timeout.
fn wait(pid: u32, timeout: Duration) -> bool {
    // SAFETY: takes two integers.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    assert!(descriptor >= 0, "pidfd_open: {}", Errno::last());
    // SAFETY: the call returned a new descriptor that this value owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut polled = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(0) if left.is_zero() => return false,
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => return true,
            Err(error) => panic!("poll: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn through_a_function(config: Config, body: impl FnOnce(&Emulator)) {
        isolated(config, |emulator| body(emulator));
    }

    #[test]
    fn each_body_of_a_test_runs_in_a_process_of_its_own() {
        static IS_USED: AtomicBool = AtomicBool::new(false);
        for devices in [1, 3] {
            through_a_function(Config { devices, ..Config::default() }, |emulator| {
                assert!(!IS_USED.swap(true, Ordering::Relaxed));
                assert_eq!(emulator.control(|driver| driver.machine.config.devices), devices);
            });
        }
        says(|_| panic!("the third body ran"), "the third body ran");
    }

    /// A body whose panic ends the test with these words. In another body's process there is none.
    fn says(body: fn(&Emulator), words: &str) {
        let ended = catch_unwind(|| isolated(Config::default(), body));
        if std::env::var_os(MARKER).is_none() {
            let said = *ended.unwrap_err().downcast::<String>().unwrap();
            assert!(said.ends_with(&format!(": failed in its own process: {words}")), "{said}");
        }
    }

    /// The harness of a body's process would say what it expected, in words that satisfy the test.
    #[test]
    #[should_panic(expected = "words that no body panics with")]
    fn a_test_that_should_panic_is_judged_by_its_body_alone() {
        isolated(Config::default(), |_| {});
        says(|_| panic!("other words"), "other words");
        let prints = |_: &Emulator| {
            eprintln!("words that no body panics with");
            panic!("{}", 7);
        };
        says(prints, "7");
        assert!(std::env::var_os(MARKER).is_some(), "words that no body panics with");
    }
}
