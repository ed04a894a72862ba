//! `ascend-vmm serve` and `ascend-vmm service` on the emulated driver.

use crate::support::{PROGRAM, refusal, run_emulated, run_program, stderr, stdout};
use ascend_emulator::pod::Pod;
use ascend_emulator::{Config, Emulator};
use ascend_vmm_service::{Client, FabricTicket};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A directory for a socket, which is removed at the end.
pub struct Directory(pub PathBuf);

impl Directory {
    pub fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("ascend-vmm-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join("socket")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A service on an emulated host; it is killed at the end.
pub struct Served(pub Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn serve(emulator: &Emulator, socket: &Path) -> Served {
    let mut command = Command::new(PROGRAM);
    command.args(["serve", "--socket"]).arg(socket).stdout(Stdio::null());
    let served = Served(emulator.spawn(&mut command).unwrap());
    await_front(socket, |_| true);
    served
}

/// Waits for a front.
pub fn await_front(socket: &Path, wanted: impl Fn(i32) -> bool) -> i32 {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        match Client::new(socket).status() {
            Ok(status) if wanted(status.front) => return status.front,
            _ => assert!(Instant::now() < deadline, "no front serves"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn service(socket: &Path, arguments: &[&str]) -> std::process::Output {
    run_program(&[&["service", "--socket", socket.to_str().unwrap()], arguments].concat())
}

#[test]
fn a_service_is_looked_at_and_its_front_is_replaced() {
    let directory = Directory::new("serve");
    let socket = directory.socket();
    let emulator = Emulator::start(Config::default()).unwrap();
    let served = serve(&emulator, &socket);
    let text = stdout(&service(&socket, &["top"]));
    assert!(text.starts_with("keeper ") && text.contains("64 GiB"), "{text}");
    let status: serde_json::Value = serde_json::from_slice(&service(&socket, &["top", "--json"]).stdout).unwrap();
    assert_eq!(status["devices"].as_array().unwrap().len(), 2);
    let front = i32::try_from(status["front"].as_i64().unwrap()).unwrap();
    let mut command = Command::new(PROGRAM);
    let newer = Served(command.args(["serve", "--replace", "--socket"]).arg(&socket).spawn().unwrap());
    let replaced = await_front(&socket, |now| now != front);
    assert_eq!(replaced, newer.0.id() as i32);
    // The keeper starts a front again when that one is gone.
    drop(newer);
    await_front(&socket, |now| now != replaced);
    let text = stdout(&service(&socket, &["events"]));
    assert!(text.contains("the front took over"), "{text}");
    drop(served);
    drop(directory);
}

#[test]
fn a_closed_terminal_ends_neither_the_keeper_nor_its_front() {
    let directory = Directory::new("hangup");
    let socket = directory.socket();
    let emulator = Emulator::start(Config::default()).unwrap();
    let _served = serve(&emulator, &socket);
    write_weights(&emulator, &socket);
    let before = Client::new(&socket).status().unwrap();
    for process in [before.front, before.keeper] {
        kill(Pid::from_raw(process), Signal::SIGHUP).unwrap();
    }
    for _ in 0..20 {
        let now = Client::new(&socket).status().unwrap();
        assert_eq!((now.keeper, now.front, now.domains.len()), (before.keeper, before.front, 1));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn with_a_wrong_configuration_the_memory_stays_until_it_is_mended() {
    let directory = Directory::new("wrong");
    let (socket, config) = (directory.socket(), directory.0.join("service.toml"));
    std::fs::write(&config, "clients = 200").unwrap();
    let emulator = Emulator::start(Config::default()).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["serve", "--socket"]).arg(&socket).arg("--config").arg(&config);
    let _served = Served(emulator.spawn(command.stdout(Stdio::null()).stderr(Stdio::null())).unwrap());
    let front = await_front(&socket, |_| true);
    write_weights(&emulator, &socket);
    std::fs::remove_file(&config).unwrap();
    std::fs::create_dir(&config).unwrap();
    kill(Pid::from_raw(front), Signal::SIGKILL).unwrap();
    // Nobody is served now; some fronts end meanwhile.
    std::thread::sleep(Duration::from_millis(500));
    std::fs::remove_dir(&config).unwrap();
    std::fs::write(&config, "clients = 200").unwrap();
    await_front(&socket, |now| now != front);
    let domains = Client::new(&socket).status().unwrap().domains;
    assert_eq!((domains.len(), domains[0].version), (1, 1));
}

/// Not a test: an engine that writes a few tensors. Without a socket it does nothing.
#[test]
fn engine_process() {
    let Some(socket) = std::env::var_os("ENGINE_TEST_SOCKET") else { return };
    let device = ascend_vmm::Session::open().unwrap().device(ascend_vmm::LogicalId(1)).unwrap();
    let domain = "llama/tp1/weights".parse().unwrap();
    let options = ascend_vmm_service::OpenOptions::new();
    let client = Client::new(PathBuf::from(socket));
    let mut writer = client.write(&device, &domain, ascend_vmm_service::Mode::Write, 8 << 20, &options).unwrap();
    writer.put("embed", 5000, b"u8").unwrap().write(&[7; 5000]).unwrap();
    writer.put("norm", 10, b"u8").unwrap().write(&[9; 10]).unwrap();
    writer.commit().unwrap();
}

/// Lets an engine write `llama/tp1/weights`, on the second NPU.
pub fn write_weights(emulator: &Emulator, socket: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["service::engine_process", "--exact", "--nocapture"])
        .env("ENGINE_TEST_SOCKET", socket)
        .stdout(Stdio::null());
    assert!(emulator.spawn(&mut command).unwrap().wait().unwrap().success());
}

/// Not a test: an engine that reads weights of another server. Without a ticket it does nothing.
#[test]
fn engine_on_another_server() {
    let Some(file) = std::env::var_os("ENGINE_TEST_TICKET") else { return };
    let device = ascend_vmm::Session::open().unwrap().device(ascend_vmm::LogicalId(0)).unwrap();
    let ticket = FabricTicket::from_bytes(&std::fs::read(file).unwrap()).unwrap();
    let reader = ticket.open(&device).unwrap();
    let read = |key: &str| {
        let slice = reader.get(key).unwrap();
        let mut bytes = vec![0; slice.size() as usize];
        slice.read(&mut bytes).unwrap();
        bytes
    };
    assert_eq!((read("embed"), read("norm")), (vec![7; 5000], vec![9; 10]));
    assert_eq!(reader.entries()["norm"].value, b"u8");
    assert!(matches!(reader.get("other"), Err(ascend_vmm_service::Error::NoKey { .. })));
}

#[test]
fn weights_of_one_server_are_read_and_loaded_on_another_by_a_ticket() {
    let directory = Directory::new("fabric");
    let pod = directory.0.join("pod");
    let start = |server| {
        let pod = Pod::join(&pod, server).unwrap();
        let emulator = Emulator::start(Config { server, pod: Some(pod), ..Config::default() }).unwrap();
        let socket = directory.0.join(format!("socket-{server}"));
        let served = serve(&emulator, &socket);
        (emulator, served, socket)
    };
    let ((one, served_one, socket_one), (two, served_two, socket_two)) = (start(1), start(2));
    write_weights(&one, &socket_one);
    let run = |emulator: &Emulator, socket: &Path, arguments: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(["service", "--socket"]).arg(socket).args(arguments).current_dir(&directory.0);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        emulator.spawn(&mut command).unwrap().wait_with_output().unwrap()
    };
    let made = run(&one, &socket_one, &["ticket", "llama/tp1/weights", "ticket"]);
    assert_eq!(
        stdout(&made),
        "ticket is a ticket for version 1 of llama/tp1/weights: 8 MiB, 2 keys\n",
        "{}",
        stderr(&made)
    );
    // An engine of the other server reads the memory where it is.
    let mut engine = Command::new(std::env::current_exe().unwrap());
    engine.args(["service::engine_on_another_server", "--exact"]).stdout(Stdio::null());
    engine.env("ENGINE_TEST_TICKET", directory.0.join("ticket"));
    assert!(two.spawn(&mut engine).unwrap().wait().unwrap().success());
    // Or its service gets a copy.
    let load = ["load", "copy", "--ticket", "ticket", "--device", "1"];
    let loaded = run(&two, &socket_two, &load);
    assert_eq!(
        stdout(&loaded),
        "committed version 1 of copy: 8 MiB, 2 keys, from version 1 of llama/tp1/weights\n",
        "{}",
        stderr(&loaded)
    );
    let header = r#"{"embed":{"data_offsets":[0,5000]},"norm":{"data_offsets":[5000,5010]}}"#;
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[7; 5000], &[9; 10]].concat();
    std::fs::create_dir(directory.0.join("model")).unwrap();
    std::fs::write(directory.0.join("model/model.safetensors"), file).unwrap();
    let compared = run(&two, &socket_two, &["verify", "copy", "--safetensors", "model"]);
    assert_eq!(stdout(&compared), "version 1 of copy: 2 tensors equal (5010 bytes), 0 not\n", "{}", stderr(&compared));
    // On the server that has the memory it is of no use, and neither when that is gone or it is
    // damaged.
    let refused = |output: std::process::Output, sentence: &str| {
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(sentence), "{}", stderr(&output));
    };
    refused(run(&one, &socket_one, &load), "llama/tp1/weights is on this server; open it at the service");
    assert!(run(&one, &socket_one, &["remove", "llama/tp1/weights"]).status.success());
    let load = ["load", "again", "--ticket", "ticket"];
    refused(run(&two, &socket_two, &load), "the other server has no such share");
    let mut bytes = std::fs::read(directory.0.join("ticket")).unwrap();
    bytes[60] ^= 1;
    std::fs::write(directory.0.join("ticket"), bytes).unwrap();
    refused(run(&two, &socket_two, &load), "the ticket is not good: its checksum is wrong; make a new ticket");
    let status = Client::new(&socket_two).status().unwrap();
    assert_eq!(status.domains.iter().map(|it| it.name.to_string()).collect::<Vec<_>>(), ["copy"]);
    drop((served_one, served_two));
}

#[test]
fn a_server_in_no_super_pod_gives_no_ticket() {
    let directory = Directory::new("no-pod");
    let socket = directory.socket();
    let emulator = Emulator::start(Config { super_pod: false, ..Config::default() }).unwrap();
    let _served = serve(&emulator, &socket);
    write_weights(&emulator, &socket);
    let mut command = Command::new(PROGRAM);
    command.args(["service", "--socket"]).arg(&socket).args(["ticket", "llama/tp1/weights"]);
    command.arg(directory.0.join("ticket")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let refused = emulator.spawn(&mut command).unwrap().wait_with_output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("NPU 1 is in no super pod"), "{}", stderr(&refused));
    assert!(!directory.0.join("ticket").exists());
}

#[test]
fn weights_are_saved_verified_and_loaded_by_commands() {
    let directory = Directory::new("save");
    let socket = directory.socket();
    let emulator = Emulator::start(Config::default()).unwrap();
    let mut served = serve(&emulator, &socket);
    write_weights(&emulator, &socket);
    let run = |arguments: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(["service", "--socket"]).arg(&socket).args(arguments).current_dir(&directory.0);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        emulator.spawn(&mut command).unwrap().wait_with_output().unwrap()
    };
    let saved = run(&["save", "llama/tp1/weights", "one", "two"]);
    assert_eq!(stderr(&saved), "");
    assert_eq!(stdout(&saved), "saved version 1 of llama/tp1/weights: 8 MiB, 2 keys, 1 shard\n");
    let missing = run(&["save", "llama/tp7/weights", "three"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr(&missing).contains("there is no domain llama/tp7/weights"), "{}", stderr(&missing));
    // A host that starts again has an empty service.
    served.0.kill().unwrap();
    served.0.wait().unwrap();
    drop(served);
    let served = serve(&emulator, &socket);
    let loaded = run(&["load", "llama/tp1/weights", "two", "one", "--device", "1"]);
    assert_eq!(
        stdout(&loaded),
        "committed version 1 of llama/tp1/weights: 8 MiB, 2 keys, from version 1 of llama/tp1/weights\n",
        "{}",
        stderr(&loaded)
    );
    let header = r#"{"embed":{"data_offsets":[0,5000]},"other":{"data_offsets":[0,1]}}"#;
    let file = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[7; 5000]].concat();
    std::fs::create_dir(directory.0.join("model")).unwrap();
    std::fs::write(directory.0.join("model/model.safetensors"), file).unwrap();
    let compared = run(&["verify", "llama/tp1/weights", "--safetensors", "model"]);
    assert_eq!(compared.status.code(), Some(1));
    assert_eq!(
        stdout(&compared),
        "norm is served and in no file\nother is in model/model.safetensors and not served\n\
         version 1 of llama/tp1/weights: 1 tensor equal (5000 bytes), 2 not\n"
    );
    drop(served);
}

#[test]
fn what_cannot_be_served_is_said_in_a_sentence() {
    let directory = Directory::new("serve-refused");
    let socket = directory.socket();
    let path = socket.to_str().unwrap();
    let error = refusal(&["service", "--socket", path, "top"]);
    assert!(error.contains("cannot be reached"), "{error}");
    let config = directory.0.join("service.toml");
    std::fs::write(&config, "\nclient = 3\n").unwrap();
    let error = refusal(&["serve", "--socket", path, "--config", config.to_str().unwrap()]);
    assert!(error.contains("service.toml") && error.contains("line 2"), "{error}");
    std::fs::write(&socket, "a file of somebody").unwrap();
    let error = refusal(&["serve", "--socket", path]);
    assert!(error.contains("it is no socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "a file of somebody");
    let error = refusal(&["serve", "--socket", directory.0.to_str().unwrap()]);
    assert!(error.contains("it is no socket"), "{error}");
    let error = refusal(&["serve", "--socket", path, "--config", directory.0.to_str().unwrap()]);
    assert!(error.contains("Is a directory"), "{error}");
    let before = std::fs::read_dir(&directory.0).unwrap().count();
    let error = refusal(&["serve", "--socket", directory.0.join("s".repeat(108)).to_str().unwrap()]);
    assert!(error.contains("bytes, and 107 are allowed"), "{error}");
    assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), before, "nothing is left of it");
    let emulator = Emulator::start(Config::default()).unwrap();
    let socket = directory.0.join("other");
    let served = serve(&emulator, &socket);
    let error = refusal(&["serve", "--socket", socket.to_str().unwrap()]);
    assert!(error.contains("a service answers at"), "{error}");
    let output = service(&socket, &["remove", "llama/tp0"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("there is no domain llama/tp0"), "{}", stderr(&output));
    drop(served);
}

#[test]
fn without_a_driver_nothing_is_served() {
    let directory = Directory::new("serve-nothing");
    let config = Config { door: ascend_emulator::config::Door::Missing, ..Config::default() };
    let mut command = Command::new(PROGRAM);
    let output = run_emulated(config, &[], command.args(["serve", "--socket"]).arg(directory.socket()));
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).starts_with("error: "), "{}", stderr(&output));
}
