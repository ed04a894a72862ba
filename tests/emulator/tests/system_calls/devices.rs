//! Discovery, HDC and the daemon through real system calls of real processes.

use ascend_emulator::config::{Daemon, Door, Phase, Place};
use ascend_emulator::{Config, Line, fork, isolated};
use ascend_ioctl::hdc::{self, Arg, Connect, RecvPeek, Send, SetSessionOwner, View};
use ascend_ioctl::{Typed, davinci, devmng, uda};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

fn path(path: &str) -> Result<OwnedFd, Errno> {
    open(path, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
}

fn call<T>(file: &OwnedFd, command: Typed<T>, arg: &mut T) -> Result<i32, Errno> {
    // SAFETY: each test passes the struct of the command, which is as large as what the driver
    // copies.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), command.request() as _, std::ptr::from_mut(arg)) };
    Errno::result(result)
}

fn module(name: &str) -> OwnedFd {
    let file = path(davinci::PATH).unwrap();
    assert_eq!(call(&file, davinci::OPEN, &mut davinci::OpenArg::new(name)), Ok(0));
    file
}

fn finish(file: OwnedFd) {
    assert_eq!(call(&file, davinci::CLOSE, &mut davinci::OpenArg::new("")), Ok(0));
}

/// An HDC command. A failure is the private code, which comes back as errno.
fn hdc<V: View>(file: &OwnedFd, command: Typed<V>, view: V) -> Result<V, i32> {
    let mut arg = Arg::new(&view);
    // SAFETY: the argument is as large as what the driver copies.
    match unsafe { libc::ioctl(file.as_raw_fd(), command.request() as _, &raw mut arg) } {
        0 => Ok(arg.view()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap()),
    }
}

fn to_daemon(device: i32) -> Connect {
    Connect { peer_pid: -1, device, service: hdc::SERVICE_TSD, timeout: 30, ..Default::default() }
}

fn connected(device: i32) -> (OwnedFd, Connect) {
    let file = open(hdc::PATH, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty()).unwrap();
    let session = hdc(&file, hdc::CONNECT, to_daemon(device)).unwrap();
    hdc(&file, hdc::SET_SESSION_OWNER, SetSessionOwner { session: session.session, ..Default::default() }).unwrap();
    (file, session)
}

fn send(file: &OwnedFd, session: &Connect, body: &[u8]) -> Result<Send, i32> {
    let mut packet: Vec<u8> = [12 + body.len() as u32, 1, 0].into_iter().flat_map(u32::to_le_bytes).collect();
    packet.extend(body);
    let view = Send {
        session: session.session,
        source: packet.as_ptr() as u64,
        length: packet.len() as i32,
        wait: hdc::WAIT_TIMEOUT,
        timeout: 1000,
        ..Default::default()
    };
    hdc(file, hdc::SEND, view)
}

/// `field: value` as protobuf writes small numbers.
fn varint(mut value: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

const GREETING: [u8; 8] = [0x10, 0x20, 0x8A, 2, 3, 8, 0xCE, 9];

/// START for this process on device 0.
fn start(tgid: i32) -> Vec<u8> {
    let pid = varint(tgid as u32);
    let mut body = vec![0x10, 6, 0x72, (1 + pid.len() + 2 + 48) as u8, 8];
    body.extend(pid);
    body.extend([0x12, 48]);
    body.extend([b'0'; 48]);
    body.extend([0x80, 2, 1, 0x9A, 2, 5, 0x0A, 3, b'1', b'0', b'3']);
    body
}

/// Starts a device process, which lives as long as the returned files.
fn with_device_process() -> [OwnedFd; 2] {
    let manager = module(davinci::module::DEVMNG);
    let mut sign = devmng::ProcessSign::default();
    assert_eq!(call(&manager, devmng::GET_PROCESS_SIGN, &mut sign), Ok(0));
    let (file, session) = connected(0);
    send(&file, &session, &GREETING).unwrap();
    send(&file, &session, &start(sign.tgid)).unwrap();
    [manager, file]
}

fn devices(numbering: &OwnedFd) -> Vec<u16> {
    let mut array = [uda::LogicalDevice::default(); 100];
    let mut list = uda::DeviceList { start: 0, end: 100, array: array.as_mut_ptr() as u64 };
    assert_eq!(call(numbering, uda::GET_DEV_LIST, &mut list), Ok(0));
    array.iter().filter(|device| device.valid()).map(|device| device.physical).collect()
}

#[test]
fn nodes_behind_closed_doors_cannot_be_opened() {
    isolated(Config { hdc_door: Door::Missing, ..Config::default() }, |emulator| {
        assert_eq!(path(hdc::PATH).unwrap_err(), Errno::ENOENT);
        assert_eq!(path("/dev/devmm_svm").unwrap_err(), Errno::EACCES);
        for (door, errno) in
            [(Door::Missing, Errno::ENOENT), (Door::Forbidden, Errno::EACCES), (Door::Denied, Errno::EPERM)]
        {
            emulator.control(move |driver| driver.machine.config.door = door);
            assert_eq!(path(davinci::PATH).unwrap_err(), errno);
            assert_eq!(path("/dev/davinci0").unwrap_err(), errno);
        }
    });
}

#[test]
fn a_receiver_sleeps_until_the_answer_comes_or_its_time_is_over() {
    isolated(Config { daemon: Daemon::Silent, ..Config::default() }, |emulator| {
        let (file, session) = connected(0);
        send(&file, &session, &GREETING).unwrap();
        let mut peek = RecvPeek {
            session: session.session,
            alloc_index: session.alloc_index,
            wait: hdc::WAIT_TIMEOUT,
            timeout: 10,
            ..Default::default()
        };
        assert_eq!(hdc(&file, hdc::RECV_PEEK, peek), Err(hdc::error::RECEIVE_TIMEOUT));
        let late = Duration::from_millis(40);
        emulator.control(move |driver| driver.machine.daemon = Daemon::Late(late));
        let sent = Instant::now();
        send(&file, &session, &GREETING).unwrap();
        peek.wait = hdc::WAIT_FOREVER;
        assert!(hdc(&file, hdc::RECV_PEEK, peek).unwrap().length > 12);
        assert!(sent.elapsed() >= late);
    });
}

#[test]
fn a_killed_client_loses_its_device_process_and_leaves_nothing() {
    isolated(Config::default(), |emulator| {
        for _ in 0..10 {
            let started = Line::new();
            let client = fork(|| {
                let _files = with_device_process();
                started.send(1);
                loop {
                    std::thread::park();
                }
            });
            started.receive();
            let state = emulator.state();
            assert_eq!(state.device_processes.len(), 1);
            assert_eq!((state.device_processes[0].tgid, &state.registrations), (client.pid(), &vec![client.pid()]));
            client.kill();
            assert!(emulator.state().is_empty());
        }
    });
}

#[test]
fn a_device_process_can_be_killed_under_a_client() {
    isolated(Config::default(), |emulator| {
        let [manager, file] = with_device_process();
        let own = std::process::id() as i32;
        let mut query = devmng::QueryPid { host_pid: own, ..Default::default() };
        assert_eq!(call(&manager, devmng::QUERY_DEV_PID, &mut query), Ok(0));
        assert!(query.pid > 0);
        assert!(emulator.control(move |driver| driver.machine.end_device_process(own, 0)));
        assert_eq!(call(&manager, devmng::QUERY_DEV_PID, &mut query), Ok(devmng::NO_PROCESS));
        drop(file);
        finish(manager);
    });
}

#[test]
fn a_second_thread_that_opens_the_module_deletes_the_registration() {
    isolated(Config::default(), |emulator| {
        let own = std::process::id() as i32;
        let manager = module(davinci::module::DEVMNG);
        let mut sign = devmng::ProcessSign::default();
        assert_eq!(call(&manager, devmng::GET_PROCESS_SIGN, &mut sign), Ok(0));
        assert_eq!((sign.tgid, emulator.state().registrations), (own, vec![own]));
        let second = std::thread::spawn(|| module(davinci::module::DEVMNG)).join().unwrap();
        assert!(emulator.state().registrations.is_empty());
        finish(second);
        finish(manager);
    });
}

#[test]
fn two_containers_number_the_same_cards_differently() {
    let places = vec![Place::host(), Place::container(&[2, 1]), Place::container(&[3])];
    isolated(Config { devices: 4, places, ..Config::default() }, |emulator| {
        for (place, expected) in [(1, vec![1, 2]), (2, vec![3])] {
            let placed = Line::new();
            let client = fork(|| {
                placed.receive();
                let nodes: Vec<_> = (0..4).filter_map(|id| path(&format!("/dev/davinci{id}")).ok()).collect();
                let numbering = module(davinci::module::UDA);
                let mut setup = uda::SetupTable { devices: nodes.len() as u32 };
                assert_eq!(call(&numbering, uda::SETUP_DEV_TABLE, &mut setup), Ok(0));
                assert_eq!(devices(&numbering), expected);
                finish(numbering);
                // Its child runs in the same container.
                fork(|| {
                    let numbering = module(davinci::module::UDA);
                    assert_eq!(devices(&numbering), expected);
                    finish(numbering);
                })
                .join();
            });
            let pid = client.pid();
            emulator.control(move |driver| driver.machine.put(pid, place));
            placed.send(1);
            client.join();
        }
        let numbering = module(davinci::module::UDA);
        assert_eq!(devices(&numbering), [0, 1, 2, 3]);
        finish(numbering);
    });
}

#[test]
fn the_first_setup_sleeps_until_the_cards_are_up() {
    let boot = Some(Duration::from_millis(150));
    isolated(Config { phases: vec![(1, Phase::Detected)], boot, ..Config::default() }, |_| {
        let numbering = module(davinci::module::UDA);
        assert_eq!(call(&numbering, uda::SETUP_DEV_TABLE, &mut uda::SetupTable { devices: 100 }), Ok(0));
        assert_eq!(devices(&numbering), [0, 1]);
        path("/dev/davinci1").unwrap();
        finish(numbering);
    });
}
