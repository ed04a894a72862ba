//! The service as systemd starts it: a socket that is there before, and notifications.

use crate::service::{Directory, Served, write_weights};
use crate::support::{PROGRAM, stderr};
use ascend_emulator::{Config, Emulator};
use ascend_vmm_service::Client;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The next message that has this word.
fn await_message(socket: &UnixDatagram, word: &str) {
    let deadline = Instant::now() + Duration::from_secs(120);
    socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut buffer = [0; 4096];
    loop {
        let length = socket.recv(&mut buffer).unwrap();
        if String::from_utf8_lossy(&buffer[..length]).lines().any(|line| line == word) {
            return;
        }
        assert!(Instant::now() < deadline, "{word} did not come");
    }
}

/// `serve` with descriptor 3, as systemd would start it: a shell knows its own process id.
fn activated(file: impl Into<Stdio>, notify: &Path) -> Command {
    let mut command = Command::new("sh");
    let script = "LISTEN_PID=$$ LISTEN_FDS=1 WATCHDOG_PID=$$ exec \"$0\" serve 3<&0 0</dev/null";
    command.arg("-c").arg(script).arg(PROGRAM).stdin(file);
    command.env("NOTIFY_SOCKET", notify).env("WATCHDOG_USEC", "30000000").stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

#[test]
fn a_socket_of_systemd_is_served_and_systemd_hears_of_it() {
    let directory = Directory::new("systemd");
    let socket = directory.socket();
    let listener = UnixListener::bind(&socket).unwrap();
    let notify = directory.0.join("notify");
    let systemd = UnixDatagram::bind(&notify).unwrap();
    // A client that comes before the service waits in the socket.
    let early = std::thread::spawn({
        let socket = socket.clone();
        move || Client::new(socket).status().unwrap().keeper
    });
    let emulator = Emulator::start(Config::default()).unwrap();
    let served = Served(emulator.spawn(&mut activated(OwnedFd::from(listener), &notify)).unwrap());
    await_message(&systemd, "READY=1");
    await_message(&systemd, "WATCHDOG=1");
    await_message(&systemd, "WATCHDOG=1");
    assert_eq!(early.join().unwrap(), served.0.id() as i32);
    // A systemd that reads nothing stops nobody.
    let messages = UnixDatagram::unbound().unwrap();
    messages.set_nonblocking(true).unwrap();
    while messages.send_to(b"STATUS=one of many", &notify).is_ok() {}
    write_weights(&emulator, &socket);
    assert_eq!(Client::new(&socket).status().unwrap().domains.len(), 1);
    drop(served);
}

#[test]
fn a_descriptor_that_is_no_listening_socket_is_refused() {
    let directory = Directory::new("systemd-refused");
    let emulator = Emulator::start(Config::default()).unwrap();
    let child = emulator.spawn(&mut activated(Stdio::null(), &directory.0.join("none"))).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("it is no listening Unix socket"), "{}", stderr(&output));
}

#[test]
fn systemd_can_read_the_units() {
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/deploy");
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("units");
    let _ = std::fs::remove_dir_all(&place);
    std::fs::create_dir_all(&place).unwrap();
    let names = ["ascend-vmm.socket", "ascend-vmm.service", "ascend-vmm-web.service"];
    for name in names {
        let text = std::fs::read_to_string(units.join(name)).unwrap();
        for line in text.lines().filter_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/ascend-vmm ")) {
            // Every word is one that the program knows.
            let words: Vec<&str> = line.split(' ').chain(["--help"]).collect();
            let output = crate::support::run_program(&words);
            assert!(output.status.success(), "{line}: {}", stderr(&output));
        }
        std::fs::write(place.join(name), text.replace("/usr/local/bin/ascend-vmm", PROGRAM)).unwrap();
    }
    let Ok(output) = Command::new("systemd-analyze").arg("verify").args(names.map(|name| place.join(name))).output()
    else {
        eprintln!("skipped: there is no systemd-analyze here");
        return;
    };
    let ours: Vec<String> =
        stderr(&output).lines().filter(|line| line.contains("ascend-vmm")).map(str::to_owned).collect();
    assert!(ours.is_empty(), "{ours:#?}");
}
