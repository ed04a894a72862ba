//! A session of `/dev/hisi_hdc`: packets to a daemon on the device.
//!
//! Each session has its own file. SET_SESSION_OWNER ties the file to the session that CONNECT made;
//! from then on closing the file closes the session, also when this process is killed. Any thread
//! of the process that connected may send and receive. Nothing is mapped or polled: RECV_PEEK waits
//! for a packet and returns its length, and RECV takes it. The driver's errors are private numbers
//! in errno's place (20 is "nobody listens", not ENOTDIR). 4 is a signal, or an argument that could
//! not be written back.

use super::{ioctl, uninterrupted};
use crate::error::Errno;
use crate::id::LogicalId;
use crate::trace::{self, Call, traced};
use ascend_ioctl::Typed;
pub(crate) use ascend_ioctl::hdc::error as code;
use ascend_ioctl::hdc::{self, Arg, View};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// The device that leads to the daemons.
pub(crate) const PATH: &str = hdc::PATH;

/// The longest wait that CONNECT supports.
pub(crate) const LONGEST_CONNECT: Duration = Duration::from_secs(30);

/// The longest packet.
pub(crate) const MAX_PACKET: usize = hdc::MAX_PACKET;

/// A refused command: its name and the driver's private code, which is not an errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Private {
    pub(crate) command: &'static str,
    pub(crate) code: i32,
}

/// An open file that has no session yet.
#[derive(Debug)]
pub(crate) struct HdcFile(OwnedFd);

/// A connected session.
#[derive(Debug)]
pub(crate) struct Connection {
    file: HdcFile,
    device: LogicalId,
    session: i32,
    /// Distinguishes this use of the session's number from later ones. With a wrong one CLOSE
    /// answers 0 and closes nothing.
    alloc_index: u32,
}

impl HdcFile {
    pub(crate) fn open() -> Result<HdcFile, Errno> {
        // The driver needs read access only. A program that this process executes must not keep the
        // session alive.
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        traced(Call::plain(MODULE, "open"), || uninterrupted(|| open(PATH, flags, Mode::empty()))).map(HdcFile)
    }

    /// CONNECT to the daemon that starts processes, then SET_SESSION_OWNER. The driver waits for
    /// whole seconds, at least one and at most [`LONGEST_CONNECT`]. If CONNECT is refused, the
    /// error returns the file for another try.
    pub(crate) fn connect(
        self,
        device: LogicalId,
        timeout: Duration,
    ) -> Result<Connection, (Private, Option<HdcFile>)> {
        let seconds = timeout.min(LONGEST_CONNECT).as_secs_f64().ceil() as u32;
        let request = hdc::Connect {
            peer_pid: -1,
            device: device.0 as i32,
            service: hdc::SERVICE_TSD,
            timeout: seconds.max(1),
            ..Default::default()
        };
        let connected = match self.call(&hdc::CONNECT, device, &request) {
            Ok(connected) => connected,
            Err(refused) => return Err((refused, Some(self))),
        };
        let (session, alloc_index) = (connected.session, connected.alloc_index);
        let connection = Connection { file: self, device, session, alloc_index };
        let owner = hdc::SetSessionOwner { device: device.0 as i32, session, ..Default::default() };
        match connection.call(&hdc::SET_SESSION_OWNER, &owner) {
            Ok(_) => Ok(connection),
            Err(refused) => Err((refused, None)),
        }
    }

    /// Sends one command with its own view of the argument. Each call has a new argument, because
    /// CONNECT leaves ids in it that must not be sent back.
    fn call<V: View>(&self, command: &Typed<V>, device: LogicalId, view: &V) -> Result<V, Private> {
        let mut arg = Arg::new(view);
        let call = Call { device: Some(device.0), private_codes: true, ..Call::plain(MODULE, command.name) };
        let answer = traced(call, || {
            // SAFETY: the argument is the 200 bytes that the driver copies in and out; the buffers
            // that SEND and RECV name in it are borrowed by the callers of this function, are as
            // long as their arguments say, and live through the call.
            match unsafe { ioctl(&self.0, command.request(), (&raw mut arg).cast()) } {
                // The private codes are returned as errno or as the result.
                Ok(code) if code != 0 => Err(Errno::from_raw(code)),
                answer => answer,
            }
        });
        match answer {
            Ok(_) => Ok(arg.view()),
            Err(errno) => Err(Private { command: command.name, code: errno.raw() }),
        }
    }
}

impl Connection {
    /// SEND: queues one packet. Only the daemon's answer tells whether it was delivered.
    pub(crate) fn send(&self, packet: &[u8], timeout: Duration) -> Result<(), Private> {
        let request = hdc::Send {
            device: self.device.0 as i32,
            session: self.session,
            source: packet.as_ptr().expose_provenance() as u64,
            length: packet.len() as i32,
            wait: hdc::WAIT_TIMEOUT,
            timeout: milliseconds(timeout),
            ..Default::default()
        };
        self.call(&hdc::SEND, &request).map(drop)
    }

    /// RECV_PEEK: waits for a packet and returns its length, or 0 if the session was closed.
    pub(crate) fn recv_peek(&self, timeout: Duration) -> Result<i32, Private> {
        let request = hdc::RecvPeek {
            device: self.device.0 as i32,
            session: self.session,
            wait: hdc::WAIT_TIMEOUT,
            timeout: milliseconds(timeout),
            alloc_index: self.alloc_index,
            ..Default::default()
        };
        Ok(self.call(&hdc::RECV_PEEK, &request)?.length)
    }

    /// RECV: takes the packet that RECV_PEEK announced and returns its length. Never waits.
    pub(crate) fn recv(&self, packet: &mut [u8]) -> Result<i32, Private> {
        let request = hdc::Recv {
            device: self.device.0 as i32,
            session: self.session,
            destination: packet.as_mut_ptr().expose_provenance() as u64,
            length: packet.len() as i32,
            buffers: 1,
            ..Default::default()
        };
        Ok(self.call(&hdc::RECV, &request)?.received)
    }

    /// GET_SESSION_ATTR: true if the device's side is connected. For some seconds after an orderly
    /// close by the device this is still true.
    pub(crate) fn is_connected(&self) -> bool {
        let request = hdc::GetSessionAttr {
            device: self.device.0 as i32,
            kind: hdc::ATTR_STATUS,
            session: self.session,
            alloc_index: self.alloc_index,
            ..Default::default()
        };
        matches!(self.call(&hdc::GET_SESSION_ATTR, &request), Ok(status) if status.output == 0)
    }

    fn call<V: View>(&self, command: &Typed<V>, view: &V) -> Result<V, Private> {
        self.file.call(command, self.device, view)
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
        // Closing the file closes the session too, so a refusal loses nothing. In a child of
        // fork(2) CLOSE is always refused.
        if let Err(refused) = self.call(&hdc::CLOSE, &request) {
            trace::debug(
                format_args!("device {}, code {}", self.device, refused.code),
                "CLOSE was refused; closing the file closes the session",
            );
        }
    }
}

/// The module's name in traces.
const MODULE: &str = "hdc";

/// A timeout in milliseconds. Never 0, which means the driver's default of three seconds.
fn milliseconds(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).clamp(1, i32::MAX as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_never_zero_because_the_driver_would_wait_three_seconds() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_secs(2)), 2000);
        assert_eq!(milliseconds(Duration::MAX), i32::MAX as u32);
    }
}
