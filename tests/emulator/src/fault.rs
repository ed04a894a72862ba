//! Faults that a test or a run can inject: commands that fail or answer nonsense, devices that die
//! or stay silent, a link that breaks.
//!
//! As text: `MEM_MAP#3=ENOMEM` fails the third MEM_MAP from now on (1 is the next one),
//! `MEM_CREATE=ENOMEM` every one, `MEM_CREATE#1[8]=ffffffff` replaces the four bytes from the ninth
//! on of what the next one writes into the caller's memory, `device1=dead` kills a device,
//! `device0=silent:2s` keeps it from answering for a time, `copies=link-error` breaks copies to and
//! from all devices.

use crate::caller::{self, Memory};
use crate::config::Config;
use crate::record;
use nix::errno::Errno;
use std::cell::RefCell;
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
    /// A command is executed, and a part of its answer is replaced.
    Answer {
        /// Its name, as in recordings.
        name: String,
        /// Which of the calls from now on, counted from 1; all of them if `None`.
        nth: Option<u64>,
        /// What is replaced.
        alteration: Alteration,
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

/// Other bytes in place of some that the driver writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alteration {
    /// Which byte is the first, of all that a call writes into the caller's memory in order.
    pub offset: u64,
    /// What is written instead.
    pub bytes: Vec<u8>,
}

/// What can happen to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceFault {
    /// It dies now, with everything on it.
    Dead,
    /// It does not answer messages for this long.
    Silent(Duration),
}

/// An example of each kind as text, for messages and help.
pub const EXAMPLES: &str = "MEM_MAP#3=ENOMEM, MEM_CREATE=ENOMEM, MEM_CREATE#1[8]=ffffffff, device1=dead, \
                            device0=silent:2s, copies=link-error";

/// Text that is not a fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{spec}` is not a fault: {reason}; examples: {EXAMPLES}", EXAMPLES = EXAMPLES)]
pub struct BadFault {
    spec: String,
    reason: String,
}

impl Fault {
    /// Checks that the fault is possible on such a host; the error is the reason.
    pub fn check(&self, config: &Config) -> Result<(), String> {
        match self {
            Fault::Command { name, .. } | Fault::Answer { name, .. }
                if !record::names(config.generation).any(|known| known == name) =>
            {
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
        let (subject, offset) = match subject.strip_suffix(']').and_then(|subject| subject.split_once('[')) {
            None => (subject, None),
            Some((subject, offset)) => {
                let offset = offset.parse().map_err(|_| bad(format!("`{offset}` is no offset")))?;
                (subject, Some(offset))
            }
        };
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
        if let Some(offset) = offset {
            let bytes = bytes(effect).ok_or_else(|| bad(format!("`{effect}` is no bytes in hexadecimal")))?;
            return Ok(Fault::Answer { name: name.to_owned(), nth, alteration: Alteration { offset, bytes } });
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

/// The bytes that hexadecimal digits stand for.
fn bytes(digits: &str) -> Option<Vec<u8>> {
    if digits.is_empty() || digits.len() % 2 != 0 || !digits.is_ascii() {
        return None;
    }
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).ok()).collect()
}

/// The errno with this name.
fn errno(name: &str) -> Option<Errno> {
    (1..=133).map(Errno::from_raw).find(|errno| *errno != Errno::UnknownErrno && format!("{errno:?}") == name)
}

/// A fault of a command, with its count.
#[derive(Debug)]
struct CommandFault {
    name: String,
    left: Option<u64>,
    strike: Strike,
}

/// What happens to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Strike {
    /// It fails.
    Fails(Errno),
    /// It answers something else.
    Answers(Alteration),
}

impl Strike {
    /// What is replaced in the answer.
    pub fn alteration(&self) -> Option<&Alteration> {
        match self {
            Strike::Fails(_) => None,
            Strike::Answers(alteration) => Some(alteration),
        }
    }
}

/// The commands that fail or answer something else.
#[derive(Debug, Default)]
pub(crate) struct CommandFaults {
    faults: Vec<CommandFault>,
    /// Alterations of calls that sleep, by thread.
    sleeping: Vec<(i32, Alteration)>,
}

impl CommandFaults {
    /// Adds a fault.
    pub fn add(&mut self, name: String, nth: Option<u64>, strike: Strike) {
        self.faults.push(CommandFault { name, left: nth, strike });
    }

    /// Whether there is no fault.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty() && self.sleeping.is_empty()
    }

    /// Counts a call of a command, and returns what happens to it.
    pub fn strike(&mut self, name: &str) -> Option<Strike> {
        let mut struck = None;
        self.faults.retain_mut(|fault| {
            if fault.name != name {
                return true;
            }
            match &mut fault.left {
                None => {
                    struck.get_or_insert_with(|| fault.strike.clone());
                }
                Some(1) => {
                    struck.get_or_insert_with(|| fault.strike.clone());
                    return false;
                }
                Some(left) => *left -= 1,
            }
            true
        });
        struck
    }

    /// Keeps the alteration of a call that sleeps.
    pub fn sleep(&mut self, tid: i32, alteration: Alteration) {
        self.sleeping.push((tid, alteration));
    }

    /// The alteration of a call that slept.
    pub fn wake(&mut self, tid: i32) -> Option<Alteration> {
        let at = self.sleeping.iter().position(|(sleeper, _)| *sleeper == tid)?;
        Some(self.sleeping.swap_remove(at).1)
    }
}

/// A caller's memory. What the driver writes is kept, and perhaps altered.
pub(crate) struct Answers<'a> {
    memory: &'a dyn Memory,
    alteration: Option<&'a Alteration>,
    written: RefCell<Vec<u8>>,
}

impl<'a> Answers<'a> {
    /// Nothing was written yet.
    pub fn new(memory: &'a dyn Memory, alteration: Option<&'a Alteration>) -> Self {
        Answers { memory, alteration, written: RefCell::default() }
    }

    /// What the driver has written, unaltered.
    pub fn into_bytes(self) -> Vec<u8> {
        self.written.into_inner()
    }
}

impl Memory for Answers<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), caller::BadAddress> {
        self.memory.read(address, buffer)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), caller::BadAddress> {
        let start = self.written.borrow().len() as u64;
        self.written.borrow_mut().extend_from_slice(bytes);
        let Some(alteration) = self.alteration else { return self.memory.write(address, bytes) };
        let mut altered = bytes.to_vec();
        for (at, other) in (alteration.offset..).zip(&alteration.bytes) {
            if let Some(byte) = at.checked_sub(start).and_then(|at| altered.get_mut(at as usize)) {
                *byte = *other;
            }
        }
        self.memory.write(address, &altered)
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
            (
                "MEM_CREATE#2[8]=00ff",
                Fault::Answer {
                    name: "MEM_CREATE".into(),
                    nth: Some(2),
                    alteration: Alteration { offset: 8, bytes: vec![0, 255] },
                },
            ),
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
            ("MEM_MAP[x]=00", "no offset"),
            ("MEM_MAP[0]=f", "no bytes"),
            ("MEM_MAP[0]=zz", "no bytes"),
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
        faults.add("MEM_MAP".into(), Some(2), Strike::Fails(Errno::ENOMEM));
        faults.add("MEM_CREATE".into(), None, Strike::Fails(Errno::EIO));
        let answers: Vec<_> = (0..4).map(|_| faults.strike("MEM_MAP")).collect();
        assert_eq!(answers, [None, Some(Strike::Fails(Errno::ENOMEM)), None, None]);
        assert_eq!(faults.strike("MEM_CREATE"), Some(Strike::Fails(Errno::EIO)));
        assert_eq!(faults.strike("MEM_CREATE"), Some(Strike::Fails(Errno::EIO)));
        assert_eq!(faults.strike("MEM_UNMAP"), None);
    }

    #[test]
    fn an_alteration_may_lie_across_several_writes() {
        struct Written(std::cell::RefCell<Vec<u8>>);
        impl Memory for Written {
            fn read(&self, _: u64, _: &mut [u8]) -> Result<(), caller::BadAddress> {
                Err(caller::BadAddress)
            }
            fn write(&self, _: u64, bytes: &[u8]) -> Result<(), caller::BadAddress> {
                self.0.borrow_mut().extend(bytes);
                Ok(())
            }
        }
        let memory = Written(Default::default());
        let alteration = Alteration { offset: 2, bytes: vec![0xEE; 3] };
        let answers = Answers::new(&memory, Some(&alteration));
        for bytes in [&[0; 3][..], &[1; 1], &[2; 4]] {
            assert_eq!(answers.write(0, bytes), Ok(()));
        }
        assert_eq!(answers.into_bytes(), [0, 0, 0, 1, 2, 2, 2, 2]);
        assert_eq!(*memory.0.borrow(), [0, 0, 0xEE, 0xEE, 0xEE, 2, 2, 2]);
    }
}
