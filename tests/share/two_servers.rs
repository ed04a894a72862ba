//! Two servers of one super pod: each an emulated driver of its own, with a process of its own.

use crate::support::{MIB, device, read, wait_until, write};
use ascend_emulator::Emulator;
use ascend_emulator::config::Config;
use ascend_emulator::pod::Pod;
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, FabricHandle, HandleKind};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

/// Says which part this process of the test plays.
const PART: &str = "ASCEND_TEST_SERVER";
/// Begins each line that is for the test, among those of the test harness.
const MARK: &str = "pod: ";

/// A line from the other side.
fn hear(from: impl std::io::Read) -> impl FnMut() -> String {
    let mut lines = BufReader::new(from).lines();
    move || loop {
        let line = lines.next().expect("the other side still talks").unwrap();
        if let Some((_, text)) = line.split_once(MARK) {
            return text.to_owned();
        }
    }
}

/// Exports memory with "one", waits, and tells what is there then.
fn export() {
    let mut heard = hear(std::io::stdin());
    let memory = device(1).create(4 * MIB).unwrap();
    write(&memory, b"one");
    let export = memory.export().unwrap();
    let fabric = export.fabric_handle(HandleKind::Fabric).unwrap();
    let hex: String = fabric.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{MARK}{hex}");
    assert_eq!(heard(), "written");
    println!("{MARK}{}", String::from_utf8(read(&memory, 3)).unwrap());
}

/// Imports the memory of the other server, reads it and writes "two".
fn import() {
    let mut heard = hear(std::io::stdin());
    let hex = heard();
    let bytes: Vec<u8> =
        (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()).collect();
    let fabric = FabricHandle::from_bytes(bytes.as_slice().try_into().unwrap()).unwrap();
    let device = device(0);
    let memory = share::import(&device, &fabric).unwrap();
    assert_eq!((memory.size(), read(&memory, 3)), (4 * MIB, b"one".to_vec()));
    write(&memory, b"two");
    println!("{MARK}written");
    // Of a server that does not answer, the error says so.
    let away = FabricHandle { sdid: fabric.sdid & !(0x3FF << 22) | 7 << 22, ..fabric };
    let error = share::import(&device, &away).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EFAULT));
    assert!(error.to_string().contains("the other server does not answer"), "{error}");
    let gone = FabricHandle { handle: fabric.handle, sdid: fabric.sdid ^ 1, physical: 0, ..fabric };
    let error = share::import(&device, &gone).unwrap_err();
    assert!(error.to_string().contains("the other server has no such share"), "{error}");
}

/// Starts a part of the test on its server.
fn start(emulator: &Emulator, part: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "two_servers::memory_of_one_server_is_used_on_another", "--nocapture"]);
    command.env(PART, part).stdin(Stdio::piped()).stdout(Stdio::piped());
    emulator.spawn(&mut command).unwrap()
}

#[test]
fn memory_of_one_server_is_used_on_another() {
    match std::env::var(PART).as_deref() {
        Ok("export") => return export(),
        Ok("import") => return import(),
        _ => {}
    }
    let directory = std::env::temp_dir().join(format!("ascend-two-servers-{}", std::process::id()));
    let server = |server| {
        let pod = Pod::join(&directory, server).unwrap();
        Emulator::start(Config { server, pod: Some(pod), ..Config::default() }).unwrap()
    };
    let (one, two) = (server(1), server(2));
    let (mut exporter, mut importer) = (start(&one, "export"), start(&two, "import"));
    let mut exported = hear(exporter.stdout.take().unwrap());
    let mut imported = hear(importer.stdout.take().unwrap());
    let handle = exported();
    writeln!(importer.stdin.as_ref().unwrap(), "{MARK}{handle}").unwrap();
    assert_eq!(imported(), "written");
    writeln!(exporter.stdin.as_ref().unwrap(), "{MARK}written").unwrap();
    assert_eq!(exported(), "two");
    // What is left of their output is read, so that they can end.
    std::thread::scope(|scope| {
        for child in [&mut exporter, &mut importer] {
            scope.spawn(|| assert!(child.wait().unwrap().success()));
        }
    });
    // The first server hears a moment later that the second one holds its memory no more.
    wait_until("the memory of the first server is free", || {
        one.control(|driver| driver.svm.free_unheld());
        one.state().is_empty()
    });
    assert!(two.state().is_empty(), "{:?}", two.state());
    std::fs::remove_dir_all(directory).unwrap();
}
