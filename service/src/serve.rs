//! Starting the service: the keeper's process, which starts fronts.

use crate::front::{Ended, Front};
use crate::journal::STATE;
use crate::keeper::{Keeper, Told, packet};
use crate::link::KeeperLink;
use crate::policy::Policy;
use crate::protocol::{self, Answer, Request, ServiceError, VERSION};
use ascend_vmm::Session;
use nix::cmsg_space;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, Flock, FlockArg, fcntl};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::socket::{
    self, AddressFamily, Backlog, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, getsockopt, recvmsg,
    socket, sockopt,
};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{Gid, chown};
use std::fs::{OpenOptions, Permissions};
use std::io::{self, ErrorKind, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// A service that cannot be started or goes wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Another service has the socket.
    #[error("a service answers at {0} already; replace its front with --replace, or use another socket")]
    Taken(PathBuf),
    /// The socket cannot be made.
    #[error("the socket {path} cannot be made: {error}")]
    Socket {
        /// Its path.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] ascend_vmm::Error),
    /// A process or a socket pair cannot be made.
    #[error("{doing}: {error}")]
    System {
        /// What was tried.
        doing: &'static str,
        /// Why it failed.
        error: io::Error,
    },
    /// The service at the socket does not want to be replaced.
    #[error("the service cannot be replaced: {0}")]
    Refused(ServiceError),
    /// The front ended with its keeper.
    #[error("the process that owns the memory is gone")]
    KeeperGone,
}

fn system(doing: &'static str) -> impl Fn(io::Error) -> ServeError {
    move |error| ServeError::System { doing, error }
}

/// The listening socket of a service: made anew, or taken over from a service that is gone.
///
/// # Errors
///
/// [`ServeError::Taken`] if a service answers there; [`ServeError::Socket`].
pub fn bind(path: &Path, policy: &Policy) -> Result<UnixListener, ServeError> {
    let failed = |error| ServeError::Socket { path: path.to_owned(), error };
    if UnixAddr::new(path) == Err(Errno::ENAMETOOLONG) {
        let length = path.as_os_str().len();
        return Err(failed(io::Error::other(format!("its path has {length} bytes, and 107 are allowed"))));
    }
    // Of two services that start at once, one finds the other.
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    // Whoever could open it could hold it, and no service would start.
    let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(name);
    let _lock =
        Flock::lock(lock.map_err(failed)?, FlockArg::LockExclusive).map_err(|(_, error)| failed(error.into()))?;
    if is_served(path) {
        return Err(ServeError::Taken(path.to_owned()));
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) if std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) => {
            std::fs::remove_file(path).map_err(failed)?;
        }
        Ok(_) => return Err(failed(io::Error::new(ErrorKind::AlreadyExists, "it is no socket"))),
        Err(_) => {}
    }
    listen(path, policy).map_err(failed)
}

/// A socket at a path, with the mode and the group of the configuration before anybody can connect.
fn listen(path: &Path, policy: &Policy) -> io::Result<UnixListener> {
    let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // On Linux the file of a socket gets the mode of the socket, whatever the umask allows more.
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    socket::bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    if let Some(group) = policy.group {
        chown(path, None, Some(Gid::from_raw(group)))?;
    }
    std::fs::set_permissions(path, Permissions::from_mode(policy.mode))?;
    // Until now every connect was refused.
    socket::listen(&socket, Backlog::MAXCONN)?;
    Ok(socket.into())
}

/// True if a service that has its keeper is at a socket. One that has lost it serves what others
/// still map until they end, and another service may have its path.
fn is_served(path: &Path) -> bool {
    let deadline = Instant::now() + Duration::from_secs(5);
    while let Ok(socket) = UnixStream::connect(path) {
        match keeper_of(socket) {
            Ok(keeper) => return keeper != 0,
            // A front that is ending, or its keeper starts the next one.
            Err(error) if error.kind() != ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            // Somebody has the socket and says nothing.
            Err(_) => return true,
        }
    }
    false
}

/// The process of the keeper at the other end; 0 if it is gone.
fn keeper_of(mut socket: UnixStream) -> io::Result<i32> {
    let hello = Request::Hello { version: VERSION, process: std::process::id() as i32, program: "serve".into() };
    let frames = [hello, Request::Status {}].map(|request| protocol::encode(&request).unwrap_or_default());
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    socket.write_all(&frames.concat())?;
    let mut arrived = Vec::new();
    let mut part = [0; 4096];
    loop {
        while let Some((length, answer)) = protocol::decode::<Answer>(&arrived).map_err(io::Error::other)? {
            match answer {
                Answer::Status(status) => return Ok(status.keeper),
                Answer::Error(error) => return Err(io::Error::other(error)),
                _ => drop(arrived.drain(..length)),
            }
        }
        match socket.read(&mut part) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => arrived.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The listening socket that systemd passed to this process; `None` if it was not started so.
///
/// # Errors
///
/// More than one descriptor, or one that is no listening Unix socket.
pub fn activated() -> Result<Option<UnixListener>, ServeError> {
    let failed = system("use the socket of systemd");
    let mut numbers = sd_notify::listen_fds().map_err(&failed)?;
    let Some(number) = numbers.next() else { return Ok(None) };
    if numbers.next().is_some() {
        return Err(failed(io::Error::new(ErrorKind::InvalidInput, "there is more than one")));
    }
    let socket = inherited(number).map_err(&failed)?;
    let listens = getsockopt(&socket, sockopt::AcceptConn).is_ok_and(|listens| listens);
    let listener = UnixListener::from(socket);
    // Only for a Unix socket can the standard library decode the address.
    match listens && listener.local_addr().is_ok() {
        true => Ok(Some(listener)),
        false => Err(failed(io::Error::new(ErrorKind::InvalidInput, "it is no listening Unix socket"))),
    }
}

/// Tells systemd, if it started this process and wants to know.
pub fn tell_systemd(told: Told) {
    let sent = match told {
        Told::Serving => notify("READY=1\nSTATUS=serving clients"),
        Told::Alive if sd_notify::watchdog_enabled().is_some() => notify("WATCHDOG=1"),
        Told::Alive => Ok(()),
    };
    if let Err(error) = sent {
        tracing::warn!(%error, "systemd cannot be told");
    }
}

/// As sd_notify(3), but without waiting: the owner of the memory does not depend on a systemd that
/// reads nothing, whose socket is full after some messages.
fn notify(message: &str) -> io::Result<()> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(&path)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to_addr(message.as_bytes(), &address).map(drop)
}

/// The environment variable that tells a front its two descriptors.
const DESCRIPTORS: &str = "ASCEND_VMM_FRONT";

/// Keeps memory, and starts `front` whenever none runs. `front` is a command that calls
/// [`run_front`]; it inherits the listening socket. A front that replaced another may have left a
/// command of its own ([`replace_front`]), which is used instead. `told` hears when a front
/// serves. From then on this process ignores SIGHUP.
///
/// Returns when the first front cannot be started. Later ones are tried for ever: with the keeper,
/// memory would be lost.
///
/// # Errors
///
/// [`ServeError::Driver`], [`ServeError::System`].
pub fn keep(
    session: Session,
    listener: &UnixListener,
    mut front: impl FnMut() -> Command,
    mut told: impl FnMut(Told),
) -> Result<(), ServeError> {
    // A terminal that is closed does not end the owner of the memory. Its fronts inherit this.
    // SAFETY: no handler runs.
    unsafe { signal(Signal::SIGHUP, SigHandler::SigIgn) }.map_err(|error| system("ignore SIGHUP")(error.into()))?;
    let mut keeper = Keeper::new(session);
    let mut children = Vec::new();
    let mut first = true;
    loop {
        // The program of a front that replaced another may be gone by now.
        let started = match keeper.successor().map(|command| start(command, listener)) {
            Some(Ok(started)) => Ok(started),
            _ => start(front(), listener),
        };
        let took_over = match started {
            Ok((child, own)) => {
                children.push(child);
                let took_over = keeper.serve(own.as_fd(), &mut told);
                tracing::warn!("the front is gone; another one is started");
                took_over
            }
            Err(error) if first => return Err(system("start a front")(error)),
            Err(error) => {
                tracing::error!(%error, "no front can be started; it is tried again");
                told(Told::Alive);
                false
            }
        };
        first = false;
        children.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
        // A front that cannot start must not keep the machine busy.
        if !took_over {
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Starts a front, and the keeper's end of the socket to it.
fn start(mut command: Command, listener: &UnixListener) -> io::Result<(Child, OwnedFd)> {
    let (own, theirs) = packet::pair()?;
    command.env(DESCRIPTORS, format!("{},{}", theirs.as_raw_fd(), listener.as_raw_fd()));
    for file in [theirs.as_fd(), listener.as_fd()] {
        fcntl(file, FcntlArg::F_SETFD(FdFlag::empty()))?;
    }
    // From then on only the front has its end.
    Ok((command.spawn()?, own))
}

/// The front's process, started by [`keep`].
///
/// # Errors
///
/// [`ServeError::KeeperGone`] when the keeper ended; [`ServeError::System`].
pub fn run_front(policy: Policy) -> Result<(), ServeError> {
    let numbers = std::env::var(DESCRIPTORS).unwrap_or_default();
    let parsed = numbers.split_once(',').and_then(|(one, other)| Some((one.parse().ok()?, other.parse().ok()?)));
    let Some((link, listener)): Option<(RawFd, RawFd)> = parsed else {
        return Err(system("start a front")(io::Error::new(ErrorKind::InvalidInput, "it is started by `serve` alone")));
    };
    let [link, listener] = [link, listener].map(inherited);
    let link = KeeperLink::new(link.map_err(system("start a front"))?);
    serve_front(link, listener.map_err(system("start a front"))?.into(), policy)
}

/// A descriptor that the keeper's process left open for this one.
fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl takes any number; the result is checked.
    let flags = unsafe { nix::libc::fcntl(number, nix::libc::F_SETFD, nix::libc::FD_CLOEXEC) };
    if number <= 2 || flags < 0 {
        return Err(io::Error::new(ErrorKind::InvalidInput, format!("descriptor {number} is not open")));
    }
    // SAFETY: it is open, and its number was given to this process to be owned here alone.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn serve_front(link: KeeperLink, listener: UnixListener, policy: Policy) -> Result<(), ServeError> {
    let front = Front::start(link, listener, policy).map_err(system("take over from the keeper"))?;
    match front.run().map_err(system("serve clients"))? {
        Ended::Replaced => Ok(()),
        Ended::KeeperGone => Err(ServeError::KeeperGone),
    }
}

/// Takes over from the front of the service at `path`, and serves in its place. Nothing is lost:
/// clients come back by themselves. `successor` is the command with which the keeper starts the
/// next front, as in [`keep`]: program and arguments, not its environment.
///
/// # Errors
///
/// [`ServeError::Refused`], [`ServeError::Socket`], and those of [`run_front`].
pub fn replace_front(path: &Path, policy: Policy, successor: &Command) -> Result<(), ServeError> {
    let failed = |error| ServeError::Socket { path: path.to_owned(), error };
    let mut socket = UnixStream::connect(path).map_err(failed)?;
    socket.set_read_timeout(Some(Duration::from_secs(30))).map_err(failed)?;
    let hello = Request::Hello { version: VERSION, process: std::process::id() as i32, program: "front".into() };
    for request in [hello, Request::Replace { state: STATE, link: packet::LINK }] {
        socket.write_all(&protocol::encode(&request).map_err(ServeError::Refused)?).map_err(failed)?;
    }
    let mut arrived = Vec::new();
    let mut files = Vec::new();
    loop {
        while let Some((length, answer)) = protocol::decode::<Answer>(&arrived).map_err(ServeError::Refused)? {
            arrived.drain(..length);
            match answer {
                Answer::Error(error) => return Err(ServeError::Refused(error)),
                Answer::Replaced {} => {
                    let mut files = files.into_iter();
                    let (Some(listener), Some(link)) = (files.next(), files.next()) else {
                        return Err(failed(io::Error::new(ErrorKind::InvalidData, "no descriptors came")));
                    };
                    drop(socket);
                    let link = KeeperLink::new(link);
                    link.succeed_with(successor).map_err(system("tell the keeper the command of the front"))?;
                    return serve_front(link, OwnedFd::into(listener), policy);
                }
                _ => {}
            }
        }
        let mut part = [0; 4096];
        let mut room = cmsg_space!([RawFd; 2]);
        let mut parts = [IoSliceMut::new(&mut part)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut room), flags) {
            Err(Errno::EINTR) => continue,
            received => received.map_err(|error| failed(error.into()))?,
        };
        for control in message.cmsgs().into_iter().flatten() {
            if let ControlMessageOwned::ScmRights(numbers) = control {
                // SAFETY: the kernel has just installed them in this process, for this message.
                files.extend(numbers.into_iter().map(|number| unsafe { OwnedFd::from_raw_fd(number) }));
            }
        }
        let count = message.bytes;
        if count == 0 {
            return Err(failed(ErrorKind::UnexpectedEof.into()));
        }
        arrived.extend_from_slice(&part[..count]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_takes_the_path_of_a_front_that_ends_instead_of_answering() {
        let directory = std::env::temp_dir().join(format!("ascend-vmm-path-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let path = directory.join("socket");
        let front = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let front = front;
                drop(front.accept().unwrap());
            });
            let listener = bind(&path, &Policy::default()).unwrap();
            // From now on it is taken, also while its service is silent.
            assert!(UnixStream::connect(&path).is_ok());
            drop(listener);
        });
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
