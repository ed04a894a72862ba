//! Processes as the trust list knows them.
//!
//! The kernel compares the importer's process id *in the initial pid namespace*, so `getpid()` is
//! wrong in a container. The driver reports to each process its own number. A process outside of
//! all containers can use any pid as it is. A process inside one cannot translate the pids of
//! others: there the importer has to send its number itself. The kernel stamps each entry with the
//! current time and refuses an importer that started later. This keeps recycled pids out, and means
//! that a process can be trusted only after it has started.

use crate::Session;
use crate::error::{Error, Invalid, Result};
use crate::fork::PerProcess;
use nix::sys::signal::kill;
use nix::unistd::Pid;

/// A process, by its id in the initial pid namespace: what `aclrtDeviceGetBareTgid` returns in that
/// process.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session, share::BareTgid};
///
/// // The importer finds out its number, and sends it to the exporter by any means.
/// let session = Session::open()?;
/// let text = BareTgid::of_this_process(&session)?.to_string();
/// // The exporter, here the same process, trusts it.
/// let export = session.device(LogicalId(0))?.create(2 << 20)?.export()?;
/// export.trust(&[text.parse::<BareTgid>()?])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BareTgid(i32);

const TRUST: &str = "trust a process";

impl BareTgid {
    /// This process. The driver is called once per session.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] or [`Error::Refused`] if the driver's DEVMNG module does not answer.
    #[doc(alias = "aclrtDeviceGetBareTgid")]
    pub fn of_this_process(session: &Session) -> Result<BareTgid> {
        session.inner.process_identity().map(|identity| identity.tgid)
    }

    /// A number that another process got from [`BareTgid::of_this_process`], or from the vendor's
    /// `aclrtDeviceGetBareTgid`.
    ///
    /// The sender of a number decides which process will be trusted: take it only from those that
    /// may have the memory.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a number that is not positive.
    pub fn from_raw(tgid: i32) -> Result<BareTgid> {
        if tgid > 0 { Ok(BareTgid(tgid)) } else { Err(not_a_pid(tgid)) }
    }

    /// The process that `getpid()` in this process's pid namespace calls `pid`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no such process, it is a thread, or this process lives in
    /// another pid namespace than the initial one.
    pub fn of_process(session: &Session, pid: u32) -> Result<BareTgid> {
        let raw = i32::try_from(pid).ok().filter(|&pid| pid > 0).ok_or_else(|| not_a_pid(pid))?;
        if pid == std::process::id() {
            return BareTgid::of_this_process(session);
        }
        if !session.inner.is_initial_namespace()? {
            return Err(Invalid::because(
                TRUST,
                format!(
                    "process {pid} is a number of this pid namespace, and the kernel compares those of the initial one"
                ),
                "A process in a container cannot translate it: let the importer send \
                 BareTgid::of_this_process, or use share::send and share::receive.",
            ));
        }
        check_exists(raw)?;
        if let Some(tgid) = tgid_of_thread(raw).filter(|&tgid| tgid != raw) {
            return Err(Invalid::because(
                TRUST,
                format!("{pid} is a thread of process {tgid}"),
                "The trust list holds processes, not threads.",
            ));
        }
        Ok(BareTgid(raw))
    }

    /// The number.
    pub const fn as_raw(self) -> i32 {
        self.0
    }
}

impl std::fmt::Display for BareTgid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::str::FromStr for BareTgid {
    type Err = Error;

    /// As [`BareTgid::from_raw`].
    fn from_str(text: &str) -> Result<BareTgid> {
        BareTgid::from_raw(text.parse().map_err(|_| not_a_pid(format_args!("{text:?}")))?)
    }
}

fn not_a_pid(value: impl std::fmt::Display) -> Error {
    Invalid::because(TRUST, format!("{value} is not a process id"), "Process ids are positive numbers.")
}

/// Refuses a process that does not exist. The kernel would put it on the list, and refuse it at the
/// import.
pub(super) fn check_exists(pid: i32) -> Result<()> {
    match kill(Pid::from_raw(pid), None) {
        // EPERM is another user's process, which exists.
        Ok(()) | Err(nix::Error::EPERM) => Ok(()),
        Err(_) => Err(Invalid::because(
            TRUST,
            format!("there is no process {pid}"),
            "The kernel refuses a process that started after it was trusted: start it first, then trust it.",
        )),
    }
}

/// The process that a thread belongs to; `None` where /proc does not say.
fn tgid_of_thread(tid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// When a process (a pid, or `self`) started, in clock ticks since boot; `None` if it does not
/// exist or /proc does not say.
pub(super) fn start_time(process: &str) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is the command in parentheses and may contain anything, so count from its
    // end.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The kernel's boot id, which changes at each boot; zeroes if /proc does not say.
pub(super) fn boot_id() -> [u8; 16] {
    static BOOT_ID: PerProcess<[u8; 16]> = PerProcess::new();
    *BOOT_ID.get(|_| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits = text.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8);
        let mut id = [0; 16];
        for (place, digit) in digits.take(32).enumerate() {
            id[place / 2] |= digit << (4 * (1 - place % 2));
        }
        id
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_when_it_started_and_when_the_machine_did() {
        let start = start_time("self");
        assert!(start.is_some_and(|ticks| ticks > 0));
        assert_eq!(start_time(&std::process::id().to_string()), start);
        assert_eq!(start_time(&i32::MAX.to_string()), None);
        let text: String = boot_id().iter().map(|byte| format!("{byte:02x}")).collect();
        let told = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        assert_eq!(text, told.trim().replace('-', ""));
    }

    #[test]
    fn numbers_of_no_process_are_refused() {
        for bad in [0, -1, i32::MIN] {
            assert!(BareTgid::from_raw(bad).is_err());
        }
        assert!(check_exists(std::process::id() as i32).is_ok());
        let error = check_exists(i32::MAX).unwrap_err().to_string();
        assert!(error.contains("start it first"), "{error}");
    }
}
