//! A rule of the driver, the evidence for it, and the result of checking it.

use crate::host::Host;
use ascend_ioctl::Generation;
use std::cell::Cell;
use std::fmt;
use std::panic::Location;

/// How sure we are that the real driver keeps a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// Seen on the running host driver, in a virtual machine with stand-ins for the devices.
    Ran,
    /// Read in the host driver's source.
    Source,
    /// The device decides, and its code is not public: inferred from code that both sides share.
    Inferred,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Evidence::Ran => "proven by running the host driver",
            Evidence::Source => "proven from host source",
            Evidence::Inferred => "inferred (device side)",
        })
    }
}

/// What a rule needs besides one device and its driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// A second device.
    TwoDevices,
    /// Devices on PCI Express.
    Pcie,
    /// Devices on HCCS.
    Hccs,
    /// A caller that sees the host's device table, not a container's.
    Admin,
    /// Character devices of a kernel driver. An emulation on ordinary files cannot refuse read(2),
    /// a CPU access or the copy of a mapping at fork(2).
    OwnFiles,
    /// Children whose inherited mappings the driver can remove. An emulation does that by
    /// ptrace(2), which another tracer keeps from it.
    UntracedChildren,
    /// Permission to use up all memory of a device, or a whole list, for a moment.
    Exhaustion,
    /// Permission to cost the kernel or a device memory, or a reference that delays unloading,
    /// until the driver is loaded anew: the rule does, or a driver that answers differently makes
    /// it so.
    Leak,
    /// `/dev/hisi_hdc`.
    Hdc,
    /// Devices whose firmware keeps the state and health words that the host reads.
    Firmware,
    /// Permission to make tens of thousands of calls.
    Patience,
    /// A super-pod device id.
    Sdid,
}

impl Need {
    /// The reason to skip the rule on this host; `None` if the host has what it needs.
    pub fn missing(self, host: &Host) -> Option<&'static str> {
        let (there, reason) = match self {
            Need::TwoDevices => (host.physical.len() >= 2, "needs two devices"),
            Need::Pcie => (!host.hccs, "needs devices on PCI Express"),
            Need::Hccs => (host.hccs, "needs devices on HCCS"),
            Need::Admin => (host.admin, "needs a caller that sees the host's device table"),
            Need::OwnFiles => (host.own_files, "needs a kernel driver's character devices; these are ordinary files"),
            Need::UntracedChildren => {
                (host.own_files || !is_traced(), "needs a process that no debugger or tracer follows")
            }
            Need::Exhaustion => (host.exhaustion, "uses up a whole resource: not allowed in this run"),
            Need::Leak => (host.exhaustion, "may cost memory until the driver is loaded anew: not allowed in this run"),
            Need::Hdc => (host.hdc, "needs /dev/hisi_hdc, which cannot be opened here"),
            Need::Firmware => (host.firmware, "needs firmware that keeps the state of devices"),
            Need::Patience => (host.patience, "makes tens of thousands of calls: not allowed in this run"),
            Need::Sdid => (host.sdid.is_some(), "needs a super-pod device id"),
        };
        (!there).then_some(reason)
    }
}

/// Whether another process follows this one by ptrace(2).
fn is_traced() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|tracer| tracer.trim() != "0"))
}

/// All generations, oldest first.
const GENERATIONS: &[Generation] = &Generation::ALL;

const fn position(generation: Generation) -> usize {
    let mut index = 0;
    while GENERATIONS[index] as u8 != generation as u8 {
        index += 1;
    }
    index
}

/// One rule of the kernel driver.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// The rule as a sentence, with underscores for spaces.
    pub name: &'static str,
    /// The kernel function that decides the answer, and its file: `function, file.c`. See the
    /// crate's documentation.
    pub decided_by: &'static str,
    /// How sure we are.
    pub evidence: Evidence,
    /// The generations that it applies to.
    pub generations: &'static [Generation],
    /// What it needs.
    pub needs: &'static [Need],
    /// Checks it, in a process of its own.
    pub check: fn(&Host) -> Verdict,
}

impl Rule {
    pub(crate) const fn new(name: &'static str, evidence: Evidence, check: fn(&Host) -> Verdict) -> Rule {
        Rule { name, decided_by: "", evidence, generations: GENERATIONS, needs: &[], check }
    }

    /// The same rule with its citation, `function, file.c`. Every rule has one.
    pub(crate) const fn decided_by(self, decided_by: &'static str) -> Rule {
        Rule { decided_by, ..self }
    }

    /// The same rule, from this generation on.
    pub(crate) const fn since(self, first: Generation) -> Rule {
        Rule { generations: GENERATIONS.split_at(position(first)).1, ..self }
    }

    /// The same rule, for the generations before this one.
    pub(crate) const fn before(self, first: Generation) -> Rule {
        Rule { generations: GENERATIONS.split_at(position(first)).0, ..self }
    }

    /// Whether the name or the citation contains `part`.
    pub fn matches(&self, part: &str) -> bool {
        self.name.contains(part) || self.decided_by.contains(part)
    }

    /// The same rule, with needs.
    pub(crate) const fn needs(self, needs: &'static [Need]) -> Rule {
        Rule { needs, ..self }
    }
}

/// A rule whose check is the function of its name.
macro_rules! rule {
    ($check:ident, $evidence:ident) => {
        $crate::rule::Rule::new(stringify!($check), $crate::rule::Evidence::$evidence, $check)
    };
}
pub(crate) use rule;

/// The result of checking a rule.
pub type Verdict = Result<(), Failure>;

/// Why a rule did not pass.
#[derive(Debug)]
pub enum Failure {
    /// The driver answered differently.
    Broken(String),
    /// The rule cannot be checked on this host.
    Skipped(String),
}

impl Failure {
    /// A failure with this text and the caller's line.
    #[track_caller]
    pub fn broken(text: impl fmt::Display) -> Failure {
        Failure::Broken(format!("{text} ({})", place(Location::caller())))
    }

    /// A check that cannot be made on this host, and why.
    pub fn skipped(reason: impl fmt::Display) -> Failure {
        Failure::Skipped(reason.to_string())
    }
}

thread_local! {
    /// The command that a failure names.
    static LAST: Cell<&'static str> = const { Cell::new("the call") };
}

/// Notes that `name` is the command whose answer is judged next.
pub(crate) fn note_command(name: &'static str) {
    LAST.set(name);
}

fn place(location: &Location<'_>) -> String {
    let file = location.file().rsplit('/').next().unwrap_or_default();
    format!("{file}:{}", location.line())
}

/// An errno's name; private codes of the driver have none.
pub fn errno_name(code: i32) -> String {
    match nix::errno::Errno::from_raw(code) {
        nix::errno::Errno::UnknownErrno => format!("errno {code}"),
        known => format!("{known:?}"),
    }
}

/// What a system call returned: a value, or a raw errno.
pub type Answer<T> = Result<T, i32>;

/// Compares an [`Answer`] with what a rule expects.
pub trait Judge<T> {
    /// The call must succeed.
    #[track_caller]
    fn granted(self) -> Result<T, Failure>;
    /// The call must fail with this errno.
    #[track_caller]
    fn refused(self, code: i32) -> Verdict;
}

impl<T> Judge<T> for Answer<T> {
    #[track_caller]
    fn granted(self) -> Result<T, Failure> {
        let location = Location::caller();
        self.map_err(|code| {
            Failure::Broken(format!(
                "expected success of {}, got {} ({})",
                LAST.get(),
                errno_name(code),
                place(location)
            ))
        })
    }

    #[track_caller]
    fn refused(self, code: i32) -> Verdict {
        let expected = errno_name(code);
        let got = match self {
            Err(answer) if answer == code => return Ok(()),
            Err(answer) => errno_name(answer),
            Ok(_) => "success".to_string(),
        };
        Err(Failure::Broken(format!(
            "expected {expected} from {}, got {got} ({})",
            LAST.get(),
            place(Location::caller())
        )))
    }
}

/// Two values that must be equal.
#[track_caller]
pub fn equal<T: PartialEq + fmt::Debug>(what: &str, got: T, expected: T) -> Verdict {
    if got == expected {
        return Ok(());
    }
    Err(Failure::Broken(format!("{what}: expected {expected:?}, got {got:?} ({})", place(Location::caller()))))
}

/// Something that must be true.
#[track_caller]
pub fn holds(what: &str, true_: bool) -> Verdict {
    if true_ { Ok(()) } else { Err(Failure::Broken(format!("not true: {what} ({})", place(Location::caller())))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_and_before_split_the_generations() {
        const RULE: Rule = Rule::new("name", Evidence::Ran, |_| Ok(()));
        for generation in Generation::ALL {
            let (since, before) = (RULE.since(generation).generations, RULE.before(generation).generations);
            assert_eq!(since[0], generation);
            assert_eq!([before, since].concat(), Generation::ALL);
        }
    }
}
