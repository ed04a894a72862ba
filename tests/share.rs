//! Sharing memory between real processes, on the emulated driver.

use ascend_emulator::{Config, Line, fork, on_each_generation};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::share::{self, BareTgid, ShareableHandle};
use ascend_vmm::{Device, Error, PhysicalMemory, Session};
use nix::errno::Errno;
use std::os::unix::net::UnixStream;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LONG: Duration = Duration::from_secs(60);

fn device(number: u32) -> Device {
    Session::current().unwrap().device(LogicalId(number)).unwrap()
}

fn write(memory: &PhysicalMemory, bytes: &[u8]) {
    let reservation = memory.session().reserve(memory.size()).unwrap();
    reservation.map(0, memory).unwrap().write(0, bytes).unwrap();
}

fn read(memory: &PhysicalMemory, length: usize) -> Vec<u8> {
    let reservation = memory.session().reserve(memory.size()).unwrap();
    let mapping = reservation.map(0, memory).unwrap();
    let mut bytes = vec![0; length];
    mapping.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_peer_that_asks_in_another_name_gets_nothing() {
    on_each_generation(Config::default(), |_, _| {
        let (exporter, importer) = UnixStream::pair().unwrap();
        let other = fork(|| {
            let error = share::receive(&importer, &device(1), LONG).unwrap_err().to_string();
            assert!(error.contains("closed the socket or died before the ticket"), "{error}");
        });
        // A socketpair knows the process that made it at both ends, which is not the one that asks.
        let device = device(0);
        let memory = device.create(4 * MIB).unwrap();
        write(&memory, b"hello");
        let error = share::send(&exporter, &memory, LONG).unwrap_err().to_string();
        assert!(error.contains("asks in the name of process"), "{error}");
        // Not drop: the child has a copy of this end too.
        exporter.shutdown(std::net::Shutdown::Both).unwrap();
        other.join();
    });
}

#[test]
fn a_connected_socket_names_the_process_that_connected() {
    on_each_generation(Config::default(), |_, _| {
        let directory = std::env::temp_dir().join(format!("ascend-vmm-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let path = directory.join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let other = fork(|| {
            let socket = UnixStream::connect(&path).unwrap();
            let memory = share::receive(&socket, &device(1), LONG).unwrap();
            assert_eq!(read(&memory, 5), b"hello");
            write(&memory, b"world");
        });
        let (socket, _) = listener.accept().unwrap();
        let memory = device(0).create(4 * MIB).unwrap();
        write(&memory, b"hello");
        share::send(&socket, &memory, LONG).unwrap();
        other.join();
        assert_eq!(read(&memory, 5), b"world");
        std::fs::remove_dir_all(directory).unwrap();
    });
}

#[test]
fn a_ticket_and_the_trust_list_let_in_whom_they_name_and_no_other() {
    on_each_generation(Config::default(), |_, _| {
        let pid = Line::new();
        let tickets = Line::new();
        let importer = fork(|| {
            let device = device(0);
            pid.send(BareTgid::of_this_process(&device.session()).unwrap().as_raw() as u64);
            let handle = ShareableHandle::from_u64(tickets.receive()).unwrap();
            let error = share::import(&device, handle).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EACCES), "not trusted yet: {error}");
            pid.send(0);
            tickets.receive();
            let memory = share::import(&device, handle).unwrap();
            assert_eq!(read(&memory, 6), b"secret");
            let again = share::import(&device, handle).unwrap();
            assert!(again.is_same(&memory), "a second import is the same memory");
            pid.send(0);
        });
        let importer_id = pid.receive() as i32;
        let device = device(0);
        let memory = device.create(2 * MIB).unwrap();
        write(&memory, b"secret");
        let export = memory.export().unwrap();
        assert_eq!(export.handle(), memory.export().unwrap().handle(), "exporting twice gives the same");
        tickets.send(export.handle().to_u64());
        pid.receive();
        export.trust(&[BareTgid::from_raw(importer_id).unwrap()]).unwrap();
        tickets.send(0);
        pid.receive();
        importer.join();
        let error = share::import(&device, &export.ticket().unwrap()).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "its own export on its own device: {error}");
    });
}
