//! A session of `/dev/hisi_hdc`: packets to a daemon on the device.
//!
//! One file per session: SET_SESSION_OWNER ties the file to the session that CONNECT gave, and from then on closing the file closes the
//! session, also when this process is killed. Sending and receiving are for the process that connected, from any of its threads. There is
//! nothing to map and nothing to poll: RECV_PEEK waits for a packet and tells its length, RECV takes it. The driver's errors are private
//! numbers in errno's place (20 is "nobody listens", not ENOTDIR); 4 is a signal or an argument that could not be written back.

use super::{Failure, Step};
use crate::discovery::LogicalId;
use ascend_ioctl::Command;
use ascend_ioctl::hdc::{self, Arg, View, error};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::libc;
use nix::sys::stat::Mode;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long CONNECT is repeated while nobody listens: the daemon comes up some time after its device.
const PATIENCE_STEP: Duration = Duration::from_millis(100);

/// Longest wait that CONNECT honours, in seconds.
const LONGEST_CONNECT: u64 = 30;

/// A connected session.
#[derive(Debug)]
pub(crate) struct Connection {
    fd: OwnedFd,
    device: LogicalId,
    session: i32,
    /// Tells this use of the session's number from later ones: with a wrong one CLOSE answers 0 and closes nothing.
    alloc_index: u32,
}

impl Connection {
    /// Connects to the daemon that starts processes on `device`, until `deadline`. While nobody listens it asks again until `patience`.
    pub(crate) fn open(
        path: &Path,
        device: LogicalId,
        patience: Instant,
        deadline: Instant,
    ) -> Result<Connection, Failure> {
        // Reading is all that the driver wants, and a program that this process executes must not keep the session alive.
        let fd = open(path, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(|errno| Failure::Node { path: path.to_owned(), errno })?;
        let connected = loop {
            let seconds = left(deadline).as_secs_f64().ceil() as u64;
            let request = hdc::Connect {
                peer_pid: -1,
                device: device.0 as i32,
                service: hdc::SERVICE_TSD,
                timeout: seconds.clamp(1, LONGEST_CONNECT) as u32,
                ..Default::default()
            };
            match call::<_, hdc::Connect>(&fd, &hdc::CONNECT, &request) {
                Ok(connected) => break connected,
                // The kernel has freed the half-made session already.
                Err(error::COPY_OUT) if Instant::now() < deadline => {}
                Err(error::NOBODY_LISTENS) if Instant::now() + PATIENCE_STEP < patience.min(deadline) => {
                    std::thread::sleep(PATIENCE_STEP);
                }
                Err(error::CONNECT_TIMEOUT) => return Err(Failure::TimedOut { step: Step::Connect }),
                Err(code) => return Err(Failure::Transport { step: Step::Connect, command: hdc::CONNECT.name, code }),
            }
        };
        let connection = Connection { fd, device, session: connected.session, alloc_index: connected.alloc_index };
        let owner = hdc::SetSessionOwner { device: device.0 as i32, session: connection.session, ..Default::default() };
        connection
            .call::<_, hdc::SetSessionOwner>(&hdc::SET_SESSION_OWNER, &owner)
            .map_err(|code| Failure::transport(Step::Connect, &hdc::SET_SESSION_OWNER, code))?;
        Ok(connection)
    }

    /// Queues one packet; that it was delivered is known only from its answer.
    pub(crate) fn send(&self, step: Step, packet: &[u8], deadline: Instant) -> Result<(), Failure> {
        loop {
            let request = hdc::Send {
                device: self.device.0 as i32,
                session: self.session,
                source: packet.as_ptr() as u64,
                length: packet.len() as i32,
                wait: hdc::WAIT_TIMEOUT,
                timeout: milliseconds(deadline),
                ..Default::default()
            };
            match self.call::<_, hdc::Send>(&hdc::SEND, &request) {
                Ok(_) => return Ok(()),
                Err(error::COPY_OUT) if Instant::now() < deadline => {}
                Err(code) => return Err(Failure::transport(step, &hdc::SEND, code)),
            }
        }
    }

    /// Waits for a packet until `deadline`.
    pub(crate) fn receive(&self, step: Step, deadline: Instant) -> Result<Vec<u8>, Failure> {
        loop {
            let request = hdc::RecvPeek {
                device: self.device.0 as i32,
                session: self.session,
                wait: hdc::WAIT_TIMEOUT,
                timeout: milliseconds(deadline),
                alloc_index: self.alloc_index,
                ..Default::default()
            };
            let length = match self.call::<_, hdc::RecvPeek>(&hdc::RECV_PEEK, &request) {
                Ok(peeked) => peeked.length,
                // A signal, or nothing yet: go on with the time that is left.
                Err(error::COPY_OUT | error::RECEIVE_TIMEOUT | error::NOTHING) if Instant::now() < deadline => continue,
                Err(error::COPY_OUT | error::RECEIVE_TIMEOUT | error::NOTHING) => {
                    return Err(Failure::TimedOut { step });
                }
                Err(code) => return Err(Failure::transport(step, &hdc::RECV_PEEK, code)),
            };
            let wanted = match usize::try_from(length) {
                Ok(0) => return Err(Failure::Closed { step }),
                Ok(wanted) if wanted <= hdc::MAX_PACKET => wanted,
                _ => return Err(Failure::Garbage { step, what: format!("the driver announces {length} bytes") }),
            };
            let mut packet = vec![0; wanted];
            let request = hdc::Recv {
                device: self.device.0 as i32,
                session: self.session,
                destination: packet.as_mut_ptr() as u64,
                length,
                buffers: 1,
                ..Default::default()
            };
            match self.call::<_, hdc::Recv>(&hdc::RECV, &request) {
                Ok(received) if received.received == length => return Ok(packet),
                // Somebody else took the packet: there is nobody else in this process, so this is a driver that we do not understand.
                Ok(received) => {
                    let what = format!("{length} bytes were announced and {} came", received.received);
                    return Err(Failure::Garbage { step, what });
                }
                Err(code) => return Err(Failure::transport(step, &hdc::RECV, code)),
            }
        }
    }

    /// Whether the device's side is still there. For some seconds after an orderly close by the device the driver still says yes.
    pub(crate) fn alive(&self) -> bool {
        let request = hdc::GetSessionAttr {
            device: self.device.0 as i32,
            kind: hdc::ATTR_STATUS,
            session: self.session,
            alloc_index: self.alloc_index,
            ..Default::default()
        };
        matches!(self.call::<_, hdc::GetSessionAttr>(&hdc::GET_SESSION_ATTR, &request), Ok(status) if status.output == 0)
    }

    fn call<V: View, R: View>(&self, command: &Command, view: &V) -> Result<R, i32> {
        call(&self.fd, command, view)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let request = hdc::Close {
            device: self.device.0 as i32,
            session: self.session,
            alloc_index: self.alloc_index,
            ..Default::default()
        };
        // Closing the file closes the session too, so a refusal here loses nothing; in a child of fork(2) it is always refused.
        if let Err(code) = self.call::<_, hdc::Close>(&hdc::CLOSE, &request) {
            tracing::debug!(device = self.device.0, code, "CLOSE of the session was refused; closing its file does it");
        }
    }
}

impl Failure {
    /// A private code that a command gave, with those that mean "closed" and "too late" told apart.
    fn transport(step: Step, command: &Command, code: i32) -> Failure {
        match code {
            error::PEER_CLOSED | error::CLOSED | error::PEER_REBOOT => Failure::Closed { step },
            error::SEND_TIMEOUT | error::RECEIVE_TIMEOUT => Failure::TimedOut { step },
            code => Failure::Transport { step, command: command.name, code },
        }
    }
}

/// What a private code means and what to do about it.
pub(crate) fn explain(code: i32) -> (&'static str, &'static str) {
    match code {
        error::FAILED => ("the driver gave no reason, or the session has an owner already", "look into the kernel log"),
        error::PARAMETER => (
            "a parameter was refused; in a container most often the device is not one of the container's",
            "pass /dev/davinciN of the device into the container and list the devices once before",
        ),
        error::COPY_IN => ("the driver could not read the argument", "report this as a defect of ascend-vmm"),
        error::COPY_OUT => ("a signal interrupted the wait until its end", "block the signal or allow more time"),
        error::NO_BUFFER => {
            ("the driver has no transfer buffer left", "wait until other programs have used less of it")
        }
        error::NO_SESSION => ("every session of the driver is in use", "end other programs that use the NPUs"),
        error::CONTROL => {
            ("the device did not take the driver's control message", "check the device's health; reset it")
        }
        error::REFUSED => ("the device refused the connection", "check that firmware and driver belong together"),
        error::NOT_READY => ("the device is still starting", "wait until it is ready"),
        error::RESET => ("the device was reset", "open the device again once it is back"),
        error::NOT_SUPPORTED => (
            "the driver has no such service for this device; devices on a UB link have another one",
            "Ascend 950 is not supported by ascend-vmm",
        ),
        error::NOBODY_LISTENS => (
            "the daemon that starts processes does not run on the device",
            "wait if the device was just started; otherwise check its health and firmware, and reset it",
        ),
        error::TRANSLATION => (
            "the driver does not know this device in this container or process",
            "pass /dev/davinciN of the device into the container and list the devices once before",
        ),
        error::PERMISSION => (
            "the session belongs to another process",
            "a child of fork(2) cannot use its parent's devices: open them after the fork",
        ),
        error::CHANNEL => ("the driver's channel to the device is not valid", "check the device's health; reset it"),
        _ => ("a code that ascend-vmm does not know", "report it with the driver's version"),
    }
}

/// One command with its own view of the argument; `Err` is the private code. The argument is new for each call: CONNECT leaves ids in it that
/// must not go back.
fn call<V: View, R: View>(fd: &OwnedFd, command: &Command, view: &V) -> Result<R, i32> {
    let mut arg = Arg::new(view);
    let started = tracing::enabled!(tracing::Level::TRACE).then(Instant::now);
    // SAFETY: the argument is the 200 bytes that the driver copies in and out; the buffers that SEND and RECV name in it are owned by the
    // callers of this function, as long as their arguments say, and live through the call. (The request's type differs between C libraries.)
    let returned = unsafe { libc::ioctl(fd.as_raw_fd(), command.request() as _, &raw mut arg) };
    // Not `Errno`: it has no place for the private codes that are no errno of Linux (41 among them).
    let code = if returned == -1 { Errno::last_raw() } else { returned };
    if let Some(started) = started {
        tracing::trace!(module = "hdc", command = command.name, duration = ?started.elapsed(), code);
    }
    if code == 0 { Ok(arg.view()) } else { Err(code) }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// What is left in the driver's unit; never 0, which the driver takes for its default of three seconds.
fn milliseconds(deadline: Instant) -> u32 {
    u32::try_from(left(deadline).as_millis()).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_never_zero_because_the_driver_would_make_it_three_seconds() {
        assert_eq!(milliseconds(Instant::now()), 1);
        assert!(milliseconds(Instant::now() + Duration::from_secs(2)) > 1000);
    }

    #[test]
    fn codes_that_mean_closed_or_too_late_are_told_apart_from_the_rest() {
        let of = |code| Failure::transport(Step::Start, &hdc::RECV_PEEK, code);
        assert!(matches!(of(15), Failure::Closed { .. }));
        assert!(matches!(of(22), Failure::Closed { .. }));
        assert!(matches!(of(49), Failure::Closed { .. }));
        assert!(matches!(of(27), Failure::TimedOut { .. }));
        assert!(matches!(of(41), Failure::Transport { code: 41, .. }));
    }

    #[test]
    fn every_code_of_the_driver_has_its_own_sentence() {
        let codes = [1, 2, 3, 4, 8, 9, 10, 11, 17, 18, 19, 20, 24, 41, 43];
        let mut sentences: Vec<_> = codes.into_iter().map(|code| explain(code).0).collect();
        sentences.sort_unstable();
        sentences.dedup();
        assert_eq!(sentences.len(), codes.len());
        assert!(explain(77).0.contains("does not know"));
    }
}
