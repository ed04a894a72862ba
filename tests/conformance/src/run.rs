//! Runs the rules, each in a process of its own: a driver that misbehaves cannot stop the run.

use crate::host::Host;
use crate::peer::{End, fork, leave};
use crate::rule::{Failure, Rule, Verdict};
use ascend_ioctl::Generation;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// How to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Only rules whose name or citation contains one of these; all if empty.
    pub only: Vec<String>,
    /// How long a rule may take.
    pub timeout: Duration,
    /// Whether rules may use up a whole resource for a moment: all memory of a device, a whole
    /// list. Not on a host that others use.
    pub exhaustion: bool,
    /// Whether rules may make tens of thousands of calls.
    pub patience: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { only: Vec::new(), timeout: Duration::from_secs(60), exhaustion: false, patience: false }
    }
}

/// The outcome of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The driver follows the rule.
    Passed,
    /// It does not: what was expected and what the driver answered.
    Failed(String),
    /// It was not checked, and why.
    Skipped(String),
}

/// A rule and its outcome.
#[derive(Debug, Clone)]
pub struct Report {
    /// The rule.
    pub rule: &'static Rule,
    /// Its outcome.
    pub outcome: Outcome,
    /// How long it took.
    pub time: Duration,
}

/// The result of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// A description of the host; `None` if there is no driver or no device.
    pub host: Option<String>,
    /// Generation of its driver.
    pub generation: Option<Generation>,
    /// Rules that passed.
    pub passed: usize,
    /// Rules that failed.
    pub failed: usize,
    /// Rules that were skipped.
    pub skipped: usize,
}

impl Summary {
    /// The exit status of a program: 0 all rules passed, 1 some failed, 3 no device.
    pub fn exit_code(&self) -> i32 {
        match (&self.host, self.failed) {
            (None, _) => 3,
            (Some(_), 0) => 0,
            (Some(_), _) => 1,
        }
    }
}

/// Checks the rules and reports each when it is done. It forks, so call it from a process with few
/// threads.
///
/// The host is examined in a process of its own too. If that fails, no rule is checked and the
/// reason is the error.
pub fn run(options: &Options, report: &mut impl FnMut(&Report)) -> Result<Summary, String> {
    // Orphans of a rule become children of this process, so that they can be waited for.
    let before = adopt_orphans(None);
    let result = run_all(options, report);
    adopt_orphans(Some(before));
    result
}

/// Makes this process the parent of its orphaned descendants, or restores the setting `back_to`;
/// returns the previous setting.
fn adopt_orphans(back_to: Option<libc::c_int>) -> libc::c_int {
    let mut before: libc::c_int = 0;
    // SAFETY: the first option writes an int, a local that outlives the call; the second takes a
    // flag and no address.
    unsafe {
        libc::prctl(libc::PR_GET_CHILD_SUBREAPER, std::ptr::from_mut(&mut before), 0, 0, 0);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, libc::c_ulong::from(back_to != Some(0)), 0, 0, 0);
    }
    before
}

fn run_all(options: &Options, report: &mut impl FnMut(&Report)) -> Result<Summary, String> {
    let found = isolated(options.timeout.max(Duration::from_secs(200)), || {
        Host::find().map(|host| host.map_or_else(String::new, |host| host.to_line()))
    });
    let line = match found {
        Ok(line) => line,
        Err(Failure::Broken(text) | Failure::Skipped(text)) => {
            return Err(format!("cannot examine the driver: {text}"));
        }
    };
    let mut summary = Summary::default();
    let Some(mut host) = Host::from_line(&line) else { return Ok(summary) };
    host.exhaustion = options.exhaustion;
    host.patience = options.patience;
    summary.host = Some(host.describe());
    summary.generation = Some(host.generation);
    for rule in crate::rules().filter(|rule| wanted(options, rule)) {
        let began = Instant::now();
        let outcome = match check(rule, &host, options.timeout) {
            Ok(()) => Outcome::Passed,
            Err(Failure::Broken(text)) => Outcome::Failed(text),
            Err(Failure::Skipped(text)) => Outcome::Skipped(text),
        };
        match outcome {
            Outcome::Passed => summary.passed += 1,
            Outcome::Failed(_) => summary.failed += 1,
            Outcome::Skipped(_) => summary.skipped += 1,
        }
        report(&Report { rule, outcome, time: began.elapsed() });
    }
    Ok(summary)
}

fn wanted(options: &Options, rule: &Rule) -> bool {
    options.only.is_empty() || options.only.iter().any(|part| rule.matches(part))
}

fn check(rule: &Rule, host: &Host, timeout: Duration) -> Verdict {
    if !rule.generations.contains(&host.generation) {
        return Err(Failure::skipped(format!("does not apply to generation {}", host.generation)));
    }
    if let Some(reason) = rule.needs.iter().find_map(|need| need.missing(host)) {
        return Err(Failure::skipped(reason));
    }
    isolated(timeout, || (rule.check)(host).map(|()| String::new())).map(drop)
}

/// Runs `body` in a forked process that leads its own process group, and returns its text. No
/// process of the group is left afterwards.
pub(crate) fn isolated(timeout: Duration, body: impl FnOnce() -> Result<String, Failure>) -> Result<String, Failure> {
    let (reader, writer) = UnixStream::pair().map_err(Failure::broken)?;
    let pid = fork();
    if pid < 0 {
        return Err(Failure::broken("fork failed"));
    }
    // Both processes make the group, so that it is there before either goes on: the deadline may
    // pass before the child has run at all, and no signal would reach it then.
    // SAFETY: makes the child the leader of a new group; no memory is involved.
    unsafe { libc::setpgid(pid, pid) };
    if pid == 0 {
        drop(reader);
        child(writer, body);
    }
    drop(writer);
    let (text, late) = read_until(reader, Instant::now() + timeout);
    let end = sweep(pid, late);
    if late {
        return Err(Failure::broken(format!("no answer within {} s", timeout.as_secs())));
    }
    match (end, text.split_at_checked(1)) {
        (_, Some(("o", text))) => Ok(text.to_string()),
        (_, Some(("f", text))) => Err(Failure::Broken(text.to_string())),
        (_, Some(("s", text))) => Err(Failure::Skipped(text.to_string())),
        (End::Signal(signal), _) => Err(Failure::broken(format!("the process was killed by signal {signal}"))),
        (End::Exit(status), _) => Err(Failure::broken(format!("the process exited with {status} without an answer"))),
    }
}

fn child(mut writer: UnixStream, body: impl FnOnce() -> Result<String, Failure>) -> ! {
    let verdict = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| Err(Failure::broken("the rule panicked")));
    let text = match verdict {
        Ok(text) => format!("o{text}"),
        Err(Failure::Broken(text)) => format!("f{text}"),
        Err(Failure::Skipped(text)) => format!("s{text}"),
    };
    let _ = writer.write_all(text.as_bytes());
    leave(0)
}

/// Reads one answer; the flag says that the deadline passed first. The child writes its answer in
/// one piece. A stray process of the rule may keep the socket open, so the end of the stream is not
/// awaited.
fn read_until(mut reader: UnixStream, deadline: Instant) -> (String, bool) {
    let mut bytes = vec![0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut poll = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, a local that outlives the call.
        let ready = unsafe { libc::poll(&mut poll, 1, left.as_millis().min(60_000) as i32) };
        if ready > 0 {
            let length = reader.read(&mut bytes).unwrap_or(0);
            bytes.truncate(length);
            return (String::from_utf8_lossy(&bytes).into_owned(), false);
        }
        if Instant::now() >= deadline {
            return (String::new(), true);
        }
    }
}

/// Waits for the child, kills the processes that it left behind, and waits for those too.
fn sweep(pid: i32, late: bool) -> End {
    if late {
        kill_group(pid);
    }
    let end = crate::peer::wait(pid);
    kill_group(pid);
    loop {
        // SAFETY: waits for children of the inherited group; no status is written.
        let result = unsafe { libc::waitpid(-pid, std::ptr::null_mut(), 0) };
        if result < 0 && crate::manager::errno() != libc::EINTR {
            return end;
        }
    }
}

fn kill_group(pid: i32) {
    // SAFETY: our child leads the group, so the id is of no other group.
    unsafe { libc::kill(-pid, libc::SIGKILL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(result: Result<String, Failure>) -> String {
        match result {
            Err(Failure::Broken(text)) => text,
            other => panic!("not a broken rule: {other:?}"),
        }
    }

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn a_rule_that_answers_is_heard() {
        assert_eq!(isolated(SOON, || Ok("text".to_string())).unwrap(), "text");
        assert!(broken(isolated(SOON, || Err(Failure::broken("reason")))).starts_with("reason"));
        let skipped = isolated(SOON, || Err(Failure::skipped("reason")));
        assert!(matches!(skipped, Err(Failure::Skipped(text)) if text == "reason"));
    }

    #[test]
    fn a_rule_that_is_killed_is_broken() {
        let text = broken(isolated(SOON, || {
            // SAFETY: ends this forked process.
            unsafe { libc::raise(libc::SIGKILL) };
            Ok(String::new())
        }));
        assert!(text.starts_with("the process was killed by signal 9"), "{text}");
    }

    #[test]
    fn a_rule_that_leaves_early_is_broken() {
        let text = broken(isolated(SOON, || leave(7)));
        assert!(text.starts_with("the process exited with 7 without an answer"), "{text}");
    }

    #[test]
    fn a_rule_that_hangs_is_ended() {
        let began = Instant::now();
        // With no time at all most of them end before they have run.
        for timeout in [Duration::from_millis(50)].into_iter().chain([Duration::ZERO; 20]) {
            let text = broken(isolated(timeout, || {
                std::thread::sleep(Duration::from_secs(600));
                Ok(String::new())
            }));
            assert!(text.starts_with("no answer within"), "{text}");
        }
        assert!(began.elapsed() < Duration::from_secs(600));
    }

    #[test]
    fn processes_that_a_rule_leaves_behind_are_ended() {
        let text = isolated(SOON, || {
            let stray = fork();
            if stray == 0 {
                std::thread::sleep(Duration::from_secs(600));
                leave(0);
            }
            Ok(stray.to_string())
        });
        let stray: i32 = text.unwrap().parse().unwrap();
        // This process is no subreaper here: init waits for the stray, which only has to be dead.
        let deadline = Instant::now() + SOON;
        loop {
            let state = std::fs::read_to_string(format!("/proc/{stray}/stat")).unwrap_or_default();
            if state.is_empty() || state.contains(") Z ") || state.contains(") X ") {
                break;
            }
            assert!(Instant::now() < deadline, "the stray process lives: {state}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
