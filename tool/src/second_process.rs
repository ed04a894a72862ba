//! Starting this program a second time, connected by a Unix socket.
//!
//! This program is the running executable, unless that is an interpreter: then the caller of
//! [`crate::run_tool`] says how it is started.
//!
//! The socket has a name, unlike one of a socket pair: only then do the credentials that the kernel
//! reports for it belong to the other process, and sharing memory over a socket relies on them.

use std::ffi::OsString;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The command line that starts this program, where it is not the running executable.
pub(crate) static PROGRAM: OnceLock<Vec<OsString>> = OnceLock::new();

/// The command that starts this program again, without arguments.
pub(crate) fn this_program() -> io::Result<Command> {
    match PROGRAM.get().and_then(|program| program.split_first()) {
        Some((program, arguments)) => {
            let mut command = Command::new(program);
            command.args(arguments);
            Ok(command)
        }
        None => Ok(Command::new(std::env::current_exe()?)),
    }
}

/// How long each process waits for the other.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A directory that is removed when this is dropped.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Starts this program with these arguments and the path of a socket, and waits until it connects.
pub(crate) fn start(arguments: &[&str]) -> io::Result<(Child, UnixStream)> {
    static STARTED: AtomicU32 = AtomicU32::new(0);
    let name = format!("ascend-vmm-{}-{}", std::process::id(), STARTED.fetch_add(1, Ordering::Relaxed));
    let directory = Directory(std::env::temp_dir().join(name));
    std::fs::create_dir(&directory.0).map_err(|error| {
        let place = directory.0.display();
        io::Error::new(error.kind(), format!("{place} cannot be made: {error}; TMPDIR can name another directory"))
    })?;
    let path = directory.0.join("socket");
    let listener = UnixListener::bind(&path)?;
    let mut child = this_program()?.args(arguments).arg(&path).spawn()?;
    match accept(&listener, &mut child) {
        Ok(socket) => Ok((child, socket)),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

/// Waits for the child to connect, or to end.
fn accept(listener: &UnixListener, child: &mut Child) -> io::Result<UnixStream> {
    listener.set_nonblocking(true)?;
    let start = Instant::now();
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(false)?;
                socket.set_read_timeout(Some(TIMEOUT))?;
                return Ok(socket);
            }
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) => {}
        }
        if let Some(status) = child.try_wait()? {
            return Err(io::Error::other(format!("the second process ended before it connected: {status}")));
        }
        if start.elapsed() > TIMEOUT {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the second process did not connect"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
