//! Faults that a test or a run can inject: commands that fail, devices that die or stay silent, a
//! link that breaks.
//!
//! As text: `MEM_MAP#3=ENOMEM` fails the third MEM_MAP from now on (1 is the next one),
//! `MEM_CREATE=ENOMEM` every one, `device1=dead` kills a device, `device0=silent:2s` keeps it from
//! answering for a time, `copies=link-error` breaks copies to and from all devices.

use crate::config::Config;
use crate::record;
use nix::errno::Errno;
use std::str::FromStr;
use std::time::Duration;

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A command fails without being executed, and writes nothing back.
    Command {
        /// Its name, as in recordings.
        name: String,
        /// Which of the calls from now on, counted from 1; all of them if `None`.
        nth: Option<u64>,
        /// The error that it returns.
        errno: Errno,
    },
    /// A fault of a device.
    Device {
        /// Physical id.
        device: u32,
        /// What happens to it.
        fault: DeviceFault,
    },
    /// Copies to and from device memory fail on the link.
    Copies,
}

/// What can happen to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFault {
    /// It dies now, with everything on it.
    Dead,
    /// It does not answer messages for this long.
    Silent(Duration),
}

/// Text that is not a fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{spec}` is not a fault: {reason}; examples: MEM_MAP#3=ENOMEM, MEM_CREATE=ENOMEM, device1=dead, \
     device0=silent:2s, copies=link-error"
)]
pub struct BadFault {
    spec: String,
    reason: String,
}

impl Fault {
    /// Checks that the fault is possible on such a host; the error is the reason.
    pub fn check(&self, config: &Config) -> Result<(), String> {
        match self {
            Fault::Command { name, .. } if !record::names(config.generation).any(|known| known == name) => {
                Err(format!("driver {} has no command {name}", config.generation))
            }
            Fault::Device { device, .. } if *device >= config.devices => {
                Err(format!("there is no device {device} among {}", config.devices))
            }
            _ => Ok(()),
        }
    }
}

impl FromStr for Fault {
    type Err = BadFault;

    fn from_str(spec: &str) -> Result<Self, BadFault> {
        let bad = |reason: String| BadFault { spec: spec.to_owned(), reason };
        let Some((subject, effect)) = spec.split_once('=') else { return Err(bad("it has no `=`".into())) };
        if subject == "copies" {
            return match effect {
                "link-error" => Ok(Fault::Copies),
                _ => Err(bad("copies can have a `link-error`".into())),
            };
        }
        if let Some(device) = subject.strip_prefix("device") {
            let device = device.parse().map_err(|_| bad(format!("`{device}` is no device number")))?;
            let fault = match effect.split_once(':') {
                None if effect == "dead" => DeviceFault::Dead,
                Some(("silent", time)) => DeviceFault::Silent(
                    duration(time).ok_or_else(|| bad(format!("`{time}` is no time such as 2s or 500ms")))?,
                ),
                _ => return Err(bad("a device can be `dead` or `silent:TIME`".into())),
            };
            return Ok(Fault::Device { device, fault });
        }
        let (name, nth) = match subject.split_once('#') {
            None => (subject, None),
            Some((name, nth)) => match nth.parse() {
                Ok(nth) if nth > 0 => (name, Some(nth)),
                _ => return Err(bad(format!("`{nth}` does not count from 1"))),
            },
        };
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_') {
            return Err(bad(format!("`{name}` is no command's name")));
        }
        let errno = errno(effect).ok_or_else(|| bad(format!("`{effect}` is no errno's name")))?;
        Ok(Fault::Command { name: name.to_owned(), nth, errno })
    }
}

fn duration(text: &str) -> Option<Duration> {
    if let Some(milliseconds) = text.strip_suffix("ms") {
        return milliseconds.parse().ok().map(Duration::from_millis);
    }
    text.strip_suffix('s')?.parse().ok().map(Duration::from_secs)
}

/// The errno with this name.
fn errno(name: &str) -> Option<Errno> {
    (1..=133).map(Errno::from_raw).find(|errno| *errno != Errno::UnknownErrno && format!("{errno:?}") == name)
}

/// A fault of a command, with its count.
#[derive(Debug)]
pub(crate) struct CommandFault {
    name: String,
    left: Option<u64>,
    errno: Errno,
}

/// The commands that fail.
#[derive(Debug, Default)]
pub(crate) struct CommandFaults(Vec<CommandFault>);

impl CommandFaults {
    /// Adds a fault.
    pub fn add(&mut self, name: String, nth: Option<u64>, errno: Errno) {
        self.0.push(CommandFault { name, left: nth, errno });
    }

    /// Whether there is no fault.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Counts a call of a command; returns the errno if this call fails.
    pub fn strike(&mut self, name: &str) -> Option<Errno> {
        let mut struck = None;
        self.0.retain_mut(|fault| {
            if fault.name != name {
                return true;
            }
            match &mut fault.left {
                None => struck = struck.or(Some(fault.errno)),
                Some(1) => {
                    struck = struck.or(Some(fault.errno));
                    return false;
                }
                Some(left) => *left -= 1,
            }
            true
        });
        struck
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_ioctl::Generation;

    #[test]
    fn faults_are_read_as_documented() {
        let command = |name: &str, nth, errno| Fault::Command { name: name.into(), nth, errno };
        let device = |device, fault| Fault::Device { device, fault };
        for (spec, fault) in [
            ("MEM_MAP#3=ENOMEM", command("MEM_MAP", Some(3), Errno::ENOMEM)),
            ("MEM_CREATE=EIO", command("MEM_CREATE", None, Errno::EIO)),
            ("device1=dead", device(1, DeviceFault::Dead)),
            ("device0=silent:2s", device(0, DeviceFault::Silent(Duration::from_secs(2)))),
            ("device0=silent:50ms", device(0, DeviceFault::Silent(Duration::from_millis(50)))),
            ("copies=link-error", Fault::Copies),
        ] {
            assert_eq!(spec.parse(), Ok(fault));
        }
    }

    #[test]
    fn other_text_is_refused_with_a_reason() {
        for (spec, reason) in [
            ("MEM_MAP", "no `=`"),
            ("MEM_MAP#0=ENOMEM", "does not count from 1"),
            ("MEM_MAP=ENOSUCH", "no errno's name"),
            ("mem map=ENOMEM", "no command's name"),
            ("device=dead", "no device number"),
            ("device0=asleep", "a device can be"),
            ("device0=silent:2", "no time"),
            ("copies=slow", "copies can have"),
        ] {
            let error = spec.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains(reason), "{spec}: {error}");
        }
    }

    #[test]
    fn a_fault_must_fit_the_host() {
        let on = |generation, spec: &str| {
            let fault: Fault = spec.parse().unwrap();
            fault.check(&Config { generation, devices: 2, ..Config::default() })
        };
        assert_eq!(on(Generation::V26_1, "MEM_MAP=ENOMEM"), Ok(()));
        assert_eq!(on(Generation::V26_1, "CONNECT=EIO"), Ok(()));
        assert!(on(Generation::V26_1, "MEM_MELT=ENOMEM").unwrap_err().contains("MEM_MELT"));
        assert_eq!(on(Generation::V26_1, "device1=dead"), Ok(()));
        assert!(on(Generation::V26_1, "device2=dead").unwrap_err().contains("no device 2"));
    }

    #[test]
    fn the_nth_call_fails_and_the_others_do_not() {
        let mut faults = CommandFaults::default();
        faults.add("MEM_MAP".into(), Some(2), Errno::ENOMEM);
        faults.add("MEM_CREATE".into(), None, Errno::EIO);
        let answers: Vec<_> = (0..4).map(|_| faults.strike("MEM_MAP")).collect();
        assert_eq!(answers, [None, Some(Errno::ENOMEM), None, None]);
        assert_eq!(faults.strike("MEM_CREATE"), Some(Errno::EIO));
        assert_eq!(faults.strike("MEM_CREATE"), Some(Errno::EIO));
        assert_eq!(faults.strike("MEM_UNMAP"), None);
    }
}
