//! The process at the other end of a socket, identified by more than its pid.
//!
//! The kernel may give a pid to another process as soon as its owner is gone. It attaches to each
//! message the credentials of its sender (SCM_CREDENTIALS), and since Linux 6.5 a pidfd
//! (SCM_PIDFD), which never means another process. Before that, the pid with its start time, and a
//! socket that is not hung up, identify the sender.

use super::bare_tgid::start_time;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::PassCred;
use nix::sys::socket::{getsockopt, setsockopt};
use nix::{getsockopt_impl, setsockopt_impl, sockopt_impl};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};

// Not in nix yet; the numbers are those of Linux on x86_64 and aarch64.
const SO_PASSPIDFD: i32 = 76;
const SCM_PIDFD: i32 = 4;
sockopt_impl!(
    /// Makes messages carry a pidfd of their sender.
    PassPidfd,
    Both,
    libc::SOL_SOCKET,
    SO_PASSPIDFD,
    bool
);

/// The sender of a message.
#[derive(Debug)]
pub(super) struct PeerProcess {
    /// Its pid in this process's pid namespace; `None` if it is not visible there.
    pub(super) pid: Option<i32>,
    /// Its real user when it sent the message, as this process's user namespace numbers it; `None`
    /// if the message does not say.
    pub(super) user: Option<u32>,
    /// `None` before Linux 6.5, and if the sender added descriptors of its own.
    pidfd: Option<OwnedFd>,
    /// When it started; `None` if /proc does not say.
    pub(super) start: Option<u64>,
}

impl PeerProcess {
    /// The sender of a message, from its control data. Descriptors that a peer added are closed.
    pub(super) fn of(control: &[u8]) -> PeerProcess {
        let (mut pid, mut user, mut pidfd) = (None, None, None);
        for (kind, data) in control_messages(control) {
            let number = |at: usize| Some(i32::from_ne_bytes(*data.get(at..)?.first_chunk()?));
            match kind {
                // A ucred: pid, uid, gid.
                libc::SCM_CREDENTIALS => {
                    pid = number(0).filter(|&pid| pid > 0);
                    user = number(4).map(|user| user as u32);
                }
                SCM_PIDFD => pidfd = number(0).filter(|&file| file >= 0).map(owned),
                libc::SCM_RIGHTS => (0..data.len() / 4).filter_map(|at| number(4 * at)).map(owned).for_each(drop),
                _ => {}
            }
        }
        let start = pid.and_then(|pid| start_time(&pid.to_string()));
        PeerProcess { pid, user, pidfd, start }
    }

    /// True if two messages came from one process, with the same rights.
    pub(super) fn is_same(&self, other: &PeerProcess) -> bool {
        (self.pid, self.user, self.start) == (other.pid, other.user, other.start)
    }

    /// True if the process runs and the socket is not hung up. Its pid has then been its own all
    /// the time: a process that runs has kept its number.
    pub(super) fn is_there(&self, socket: &UnixStream) -> bool {
        // poll(2) always reports a hang-up.
        let hung_up = poll_now(socket, PollFlags::empty()).is_none_or(|events| !events.is_empty());
        let ended = match (&self.pidfd, self.pid) {
            // A pidfd becomes readable when its process ends.
            (Some(pidfd), _) => poll_now(pidfd, PollFlags::POLLIN).is_none_or(|events| !events.is_empty()),
            (None, Some(pid)) => start_time(&pid.to_string()) != self.start,
            (None, None) => false,
        };
        !hung_up && !ended
    }
}

/// The socket's control messages in a buffer that was zeroed before, each with its type. (nix
/// returns none if one was truncated, and leaks the descriptors of the others.)
fn control_messages(mut control: &[u8]) -> impl Iterator<Item = (i32, &[u8])> {
    const HEAD: usize = size_of::<libc::cmsghdr>();
    std::iter::from_fn(move || {
        let word = |at: usize| Some(i32::from_ne_bytes(*control.get(at..)?.first_chunk()?));
        let length = usize::from_ne_bytes(*control.first_chunk()?);
        let (level, kind) = (word(8)?, word(12)?);
        let data = control.get(HEAD..length)?;
        control = control.get(length.next_multiple_of(8)..).unwrap_or_default();
        Some((if level == libc::SOL_SOCKET { kind } else { -1 }, data))
    })
}

/// The events that a descriptor is ready for now; `None` if it cannot be polled.
fn poll_now(file: &impl AsFd, events: PollFlags) -> Option<PollFlags> {
    let mut polled = [PollFd::new(file.as_fd(), events)];
    loop {
        match poll(&mut polled, PollTimeout::ZERO) {
            Ok(_) => return polled[0].revents(),
            Err(nix::Error::EINTR) => {}
            Err(_) => return None,
        }
    }
}

fn owned(file: RawFd) -> OwnedFd {
    // SAFETY: the kernel installed it in this process for this message, which is read once.
    unsafe { OwnedFd::from_raw_fd(file) }
}

/// While this lives, messages on a socket carry the credentials of their sender. Dropping it
/// restores the socket's own settings.
pub(super) struct Credentials<'a> {
    socket: &'a UnixStream,
    credentials: bool,
    /// `None` where the kernel has no pidfds of senders.
    pidfd: Option<bool>,
}

/// Makes all messages from the clients of a listening socket carry credentials: an accepted socket
/// inherits the setting, and the kernel applies it to what is sent before the socket is accepted.
pub(super) fn sign_from_the_first(listener: &UnixListener) -> nix::Result<()> {
    setsockopt(listener, PassCred, &true)?;
    // Not before Linux 6.5.
    let _ = setsockopt(listener, PassPidfd, &true);
    Ok(())
}

impl<'a> Credentials<'a> {
    pub(super) fn on(socket: &'a UnixStream) -> nix::Result<Credentials<'a>> {
        let guard = Credentials {
            socket,
            credentials: getsockopt(socket, PassCred)?,
            pidfd: getsockopt(socket, PassPidfd).ok(),
        };
        setsockopt(socket, PassCred, &true)?;
        if guard.pidfd.is_some() {
            setsockopt(socket, PassPidfd, &true)?;
        }
        Ok(guard)
    }
}

impl Drop for Credentials<'_> {
    fn drop(&mut self) {
        let _ = setsockopt(self.socket, PassCred, &self.credentials);
        if let Some(before) = self.pidfd {
            let _ = setsockopt(self.socket, PassPidfd, &before);
        }
    }
}

#[cfg(test)]
impl PeerProcess {
    /// This process, before Linux 6.5.
    pub(super) fn this() -> PeerProcess {
        let pid = std::process::id();
        PeerProcess { pid: Some(pid as i32), user: None, pidfd: None, start: start_time(&pid.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_there_until_it_ends_or_hangs_up() {
        let (socket, other) = UnixStream::pair().unwrap();
        // Of another pid namespace, before Linux 6.5.
        let unknown = PeerProcess { pid: None, user: None, pidfd: None, start: None };
        let own = PeerProcess::this();
        let later = PeerProcess { start: own.start.map(|start| start + 1), ..PeerProcess::this() };
        assert!(unknown.is_there(&socket) && own.is_there(&socket));
        assert!(!later.is_there(&socket), "another process has its number now");
        drop(other);
        assert!(!unknown.is_there(&socket) && !own.is_there(&socket));
    }

    #[test]
    fn a_sender_that_this_process_cannot_see_has_no_number() {
        for (pid, seen) in [(0, None), (-1, None), (7, Some(7))] {
            let mut control = Vec::from(28usize.to_ne_bytes());
            for word in [libc::SOL_SOCKET, libc::SCM_CREDENTIALS, pid, 65534, 65533] {
                control.extend(word.to_ne_bytes());
            }
            let sender = PeerProcess::of(&control);
            assert_eq!((sender.pid, sender.user), (seen, Some(65534)));
        }
    }

    #[test]
    fn control_data_of_any_shape_are_read_safely() {
        let mut control = Vec::new();
        for (kind, data) in [(libc::SCM_CREDENTIALS, &[7, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0][..]), (99, &[1, 2, 3, 4])] {
            control.extend((16 + data.len()).to_ne_bytes());
            control.extend(libc::SOL_SOCKET.to_ne_bytes());
            control.extend(kind.to_ne_bytes());
            control.extend(data);
            control.resize(control.len().next_multiple_of(8), 0);
        }
        let found: Vec<_> = control_messages(&control).map(|(kind, data)| (kind, data.len())).collect();
        assert_eq!(found, [(libc::SCM_CREDENTIALS, 12), (99, 4)]);
        for cut in 0..control.len() {
            let _ = PeerProcess::of(&control[..cut]);
        }
        control[0] = 255;
        assert_eq!(control_messages(&control).count(), 0, "a length beyond the buffer");
        assert_eq!(control_messages(&[0; 64]).count(), 0);
    }
}
