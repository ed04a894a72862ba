//! Why a device process could not be started or ended: codes of the driver and of the daemon, and
//! failures between them.

use super::{Errno, printable_path, refusal};
use ascend_ioctl::hdc::error;
use std::fmt;
use std::path::PathBuf;

/// A step of starting or ending a device process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// Registering this process with the driver.
    Register,
    /// Connecting to the daemon.
    Connect,
    /// Exchanging versions with it.
    Handshake,
    /// The vendor's other messages before START.
    Prepare,
    /// Starting the process.
    Start,
    /// Ending it.
    Close,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Register => "registering with the driver",
            Step::Connect => "connecting to the device's daemon",
            Step::Handshake => "the handshake with the device's daemon",
            Step::Prepare => "preparing the start",
            Step::Start => "starting the device process",
            Step::Close => "ending the device process",
        })
    }
}

/// Why a device process could not be started or ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProcessFailure {
    /// The node that leads to the daemon could not be opened.
    Node {
        /// Its path.
        path: PathBuf,
        /// What open(2) answered.
        errno: Errno,
    },
    /// The driver did not register this process.
    Register {
        /// Why.
        reason: String,
    },
    /// The driver of `/dev/hisi_hdc` refused a command, with a code of its own.
    Transport {
        /// At which step.
        step: Step,
        /// Which command.
        command: &'static str,
        /// The code; not an errno.
        code: i32,
    },
    /// The device closed the session.
    Closed {
        /// At which step.
        step: Step,
    },
    /// No answer came in time.
    TimedOut {
        /// At which step.
        step: Step,
    },
    /// The caller gave up.
    GivenUp {
        /// At which step.
        step: Step,
    },
    /// The answer is not a valid message.
    Garbage {
        /// At which step.
        step: Step,
        /// What is wrong with it.
        what: String,
    },
    /// The daemon speaks another version of the protocol.
    Version {
        /// Its version.
        theirs: u32,
        /// The version that this library speaks.
        ours: u32,
    },
    /// The daemon refused to start the process.
    Refused {
        /// The daemon's number.
        code: u32,
        /// Its error code, like `E30003`; may be empty.
        error_code: String,
        /// Its own words; may be empty.
        message: String,
        /// The lines of its log that it sent; may be empty and long.
        log: String,
    },
}

const VENDOR_ORDER: &str = "Try the vendor's message order (device_process::Order::Vendor); \
    otherwise the device's log (msnpureport) has the reason.";
const PASS_DEVICE: &str = "Pass /dev/davinciN of the device into the container and list the \
    devices once before.";

impl ProcessFailure {
    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        self.row().1
    }

    /// Sentence and remedy.
    fn row(&self) -> (String, &'static str) {
        match self {
            ProcessFailure::Node { path, errno } => {
                let (cause, remedy) = refusal::open(*errno);
                (format!("{} could not be opened: {errno}: {cause}", printable_path(path)), remedy)
            }
            ProcessFailure::Register { reason } => (
                format!("{}: {reason}", Step::Register),
                "In a container, pass /dev/davinciN of the device in; on the host, end some of the \
                 programs that use NPUs.",
            ),
            ProcessFailure::Transport { step, command, code } => {
                let (cause, remedy) = transport(*code);
                (format!("{step}: {command} failed with the driver's code {code}: {cause}"), remedy)
            }
            ProcessFailure::Closed { step } => (
                format!("{step}: the device closed the session"),
                "Try again: the device was reset or its daemon restarted. Check the device's health.",
            ),
            ProcessFailure::TimedOut { step } => (
                format!("{step}: no answer in the time allowed"),
                match step {
                    Step::Start | Step::Prepare => {
                        "Try the vendor's message order (device_process::Order::Vendor); otherwise \
                         check the device's health and log (msnpureport)."
                    }
                    _ => "Check the device's health; allow more time by device_process::Settings::limit.",
                },
            ),
            ProcessFailure::GivenUp { step } => (
                format!("{step}: the caller gave up before an answer came"),
                "Try again, or look for the reason of the delay: check the device's health.",
            ),
            ProcessFailure::Garbage { step, what } => {
                (format!("{step}: an answer that is not valid: {what}"), UNKNOWN_FIRMWARE)
            }
            ProcessFailure::Version { theirs, ours } => (
                format!("the device's daemon speaks version {theirs} of its protocol, ascend-vmm speaks {ours}"),
                UNKNOWN_FIRMWARE,
            ),
            ProcessFailure::Refused { code, error_code, message, .. } => {
                let (cause, remedy) =
                    daemon(error_code).unwrap_or(("it gives no cause that ascend-vmm knows", VENDOR_ORDER));
                let comma = if error_code.is_empty() { "" } else { ", " };
                let says = if message.is_empty() { "" } else { "; it says: " };
                let codes = format!("{code}{comma}{error_code}");
                (format!("the device refused to start a process (code {codes}): {cause}{says}{message}"), remedy)
            }
        }
    }

    /// True if the vendor's longer dialogue might help: START was refused without a clear cause, or
    /// not answered.
    pub(crate) fn longer_dialogue_may_help(&self) -> bool {
        match self {
            ProcessFailure::TimedOut { step } | ProcessFailure::Closed { step } => *step == Step::Start,
            ProcessFailure::Refused { error_code, .. } => daemon(error_code).is_none() || error_code == "E30006",
            _ => false,
        }
    }
}

impl fmt::Display for ProcessFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.row().0)
    }
}

impl std::error::Error for ProcessFailure {}

const UNKNOWN_FIRMWARE: &str = "The firmware is one that ascend-vmm does not know: please report it \
    with the driver's version; until then start the device process by the vendor's TsdOpen and use \
    device_process::Policy::Never.";

/// What a private code of `/dev/hisi_hdc` means and what to do about it.
fn transport(code: i32) -> (&'static str, &'static str) {
    match code {
        error::FAILED => {
            ("the driver gave no reason, or the session has an owner already", "Look into the kernel log.")
        }
        error::PARAMETER => {
            ("a parameter was refused; in a container most often the device is not one of the container's", PASS_DEVICE)
        }
        error::COPY_IN => ("the driver could not read the argument", "Report this as a defect of ascend-vmm."),
        error::COPY_OUT => ("a signal interrupted the wait until its end", "Block the signal or allow more time."),
        error::NO_BUFFER => {
            ("the driver has no transfer buffer left", "Wait until other programs have used less of it.")
        }
        error::NO_SESSION => ("every session of the driver is in use", "End other programs that use the NPUs."),
        error::CONTROL => {
            ("the device did not take the driver's control message", "Check the device's health; reset it.")
        }
        error::REFUSED => ("the device refused the connection", "Check that firmware and driver belong together."),
        error::NOT_READY => ("the device is still starting", "Wait until it is ready."),
        error::RESET => ("the device was reset", "Open the device again once it is back."),
        error::NOT_SUPPORTED => (
            "the driver has no such service for this device; devices on a UB link have another one",
            "Ascend950 is not supported by ascend-vmm.",
        ),
        error::NOBODY_LISTENS => (
            "the daemon that starts processes does not run on the device",
            "Wait if the device was just started; otherwise check its health and firmware, and reset it.",
        ),
        error::TRANSLATION => ("the driver does not know this device in this container or process", PASS_DEVICE),
        error::PERMISSION => (
            "the session belongs to another process",
            "A child of fork(2) cannot use its parent's devices: open them after the fork.",
        ),
        error::CHANNEL => ("the driver's channel to the device is not valid", "Check the device's health; reset it."),
        _ => ("a code that ascend-vmm does not know", "Report it with the driver's version."),
    }
}

/// What a code of the daemon (E30…), or of the program that it runs (E39…), means and what to
/// do.
fn daemon(code: &str) -> Option<(&'static str, &'static str)> {
    Some(match code {
        "E30003" => (
            "the device runs as many processes as it can",
            "End other programs that use this NPU (each holds one device process), or use another NPU.",
        ),
        "E30004" => (
            "the program that the device should run is damaged",
            "Install the device's firmware and driver package again and restart the device.",
        ),
        "E30006" => (
            "the device could not verify its operator package",
            "Try the vendor's message order (device_process::Order::Vendor); if it stays, install \
             matching versions of firmware, driver and toolkit.",
        ),
        "E30007" => (
            "the device could not put the process into its control group",
            "Restart the device; the device's log (msnpureport) has the reason.",
        ),
        "E39001" => (
            "the device program did not accept an argument that it was started with",
            "This is a defect of ascend-vmm or a firmware that it does not know: please report it \
             with the driver's version.",
        ),
        "E39002" => (
            "a driver call of the device program failed; most often it was not bound to this host process",
            "Check that no other file of the driver's DEVMNG module was opened or closed by this \
             process, then try again.",
        ),
        "E39003" => (
            "the device program failed with a code that no public source explains",
            "The device's log (msnpureport) has the reason.",
        ),
        "E39004" => (
            "the device program could not initialise itself",
            "Check the device's health and free memory; the device's log (msnpureport) has the reason.",
        ),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(error_code: &str) -> ProcessFailure {
        ProcessFailure::Refused { code: 1, error_code: error_code.into(), message: "x".into(), log: String::new() }
    }

    #[test]
    fn a_refusal_says_what_its_code_means() {
        let failure = refused("E30003");
        assert_eq!(
            failure.to_string(),
            "the device refused to start a process (code 1, E30003): the device runs as many \
             processes as it can; it says: x"
        );
        assert!(failure.remedy().contains("End other programs"));
    }

    #[test]
    fn a_refusal_without_a_known_code_still_reads_well() {
        let none = String::new;
        let failure = ProcessFailure::Refused { code: 7, error_code: none(), message: none(), log: none() };
        assert_eq!(
            failure.to_string(),
            "the device refused to start a process (code 7): it gives no cause that ascend-vmm knows"
        );
        assert!(failure.remedy().contains("Order::Vendor"));
    }

    #[test]
    fn the_longer_dialogue_is_tried_only_where_it_can_help() {
        assert!(!refused("E30003").longer_dialogue_may_help(), "a full device stays full");
        assert!(refused("E30006").longer_dialogue_may_help());
        assert!(refused("").longer_dialogue_may_help());
        assert!(ProcessFailure::TimedOut { step: Step::Start }.longer_dialogue_may_help());
        assert!(!ProcessFailure::TimedOut { step: Step::Handshake }.longer_dialogue_may_help());
        assert!(!ProcessFailure::Version { theirs: 1, ours: 2 }.longer_dialogue_may_help());
    }

    #[test]
    fn every_code_of_the_driver_has_its_own_sentence() {
        let codes = [1, 2, 3, 4, 8, 9, 10, 11, 17, 18, 19, 20, 24, 41, 43];
        let mut sentences: Vec<_> = codes.into_iter().map(|code| transport(code).0).collect();
        sentences.sort_unstable();
        sentences.dedup();
        assert_eq!(sentences.len(), codes.len());
        assert!(transport(77).0.contains("does not know"));
    }

    #[test]
    fn each_known_code_of_the_daemon_has_a_sentence_and_a_remedy() {
        for code in ["E30003", "E30004", "E30006", "E30007", "E39001", "E39002", "E39003", "E39004"] {
            let (cause, remedy) = daemon(code).unwrap();
            assert!(!cause.ends_with('.') && remedy.ends_with('.'), "{code}");
        }
        assert!(daemon("E12345").is_none());
    }
}
