//! `ascend-vmm service web`: the page in a real browser, the metrics, and clients that misbehave.

use crate::service::{Directory, Served, serve, write_weights};
use crate::support::{PROGRAM, refusal, stderr, stdout};
use ascend_emulator::{Config, Emulator};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The web process, and the line that it printed: where it listens.
fn web(socket: &Path, listen: &str) -> (Served, String) {
    let mut command = Command::new(PROGRAM);
    command.args(["service", "--socket"]).arg(socket).args(["web", "--listen", listen]).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (Served(child), line.trim().to_owned())
}

/// What a connection answers to a request.
fn ask(mut connection: impl Read + Write, request: &str) -> String {
    connection.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    answer
}

fn get(address: &str, path: &str) -> String {
    let connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    ask(connection, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n"))
}

fn address_of(page: &str) -> &str {
    page.strip_prefix("http://").unwrap().trim_end_matches('/')
}

#[test]
fn metrics_tell_what_the_service_holds_on_loopback_and_on_a_unix_socket() {
    let directory = Directory::new("metrics");
    let emulator = Emulator::start(Config::default()).unwrap();
    let served = serve(&emulator, &directory.socket());
    write_weights(&emulator, &directory.socket());
    let (loopback, page) = web(&directory.socket(), "127.0.0.1:0");
    let text = get(address_of(&page), "/metrics");
    let place = directory.0.join("web");
    let (unix, _) = web(&directory.socket(), &format!("unix:{}", place.display()));
    let other = ask(UnixStream::connect(&place).unwrap(), "GET /metrics HTTP/1.0\r\n\r\n");
    for text in [&text, &other] {
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.contains("text/plain; version=0.0.4"), "{text}");
        let domain = r#"domain="llama/tp1/weights",device="1""#;
        for line in [
            "ascend_vmm_service_up 1".to_owned(),
            "ascend_vmm_keeper_up 1".to_owned(),
            format!("ascend_vmm_domain_bytes{{{domain},part=\"committed\"}} 8388608"),
            format!("ascend_vmm_domain_version{{{domain}}} 1"),
            format!("ascend_vmm_domain_readers{{{domain}}} 0"),
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
        // Every line is a comment or a name, labels and a number.
        for line in text.split("\r\n\r\n").nth(1).unwrap().lines().filter(|line| !line.starts_with("# ")) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("ascend_vmm_") && value.parse::<u64>().is_ok(), "{line}");
        }
    }
    let status: serde_json::Value =
        serde_json::from_str(get(address_of(&page), "/status.json").split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(status["domains"][0]["name"], "llama/tp1/weights");
    assert!(!status["events"].as_array().unwrap().is_empty());
    // Without the service the page stays, and says so.
    drop(served);
    std::fs::remove_file(directory.socket()).unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    let text = get(address_of(&page), "/metrics");
    assert!(text.contains("ascend_vmm_service_up 0\n"), "{text}");
    drop((loopback, unix));
    let error = refusal(&["service", "--socket", "x", "web", "--listen", "0.0.0.0:9464"]);
    assert!(error.contains("only an address of this host"), "{error}");
}

#[test]
fn clients_that_misbehave_take_nothing_from_others() {
    let directory = Directory::new("web-hostile");
    let emulator = Emulator::start(Config::default()).unwrap();
    let served = serve(&emulator, &directory.socket());
    let (web, page) = web(&directory.socket(), "127.0.0.1:0");
    let address = address_of(&page);
    // More silent connections than there are places, half a request, and one that reads nothing.
    let mut silent: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    for connection in &mut silent {
        let _ = connection.write_all(b"GET / HTTP/1.1\r\nX: ");
    }
    let mut deaf = TcpStream::connect(address).unwrap();
    deaf.write_all(format!("GET / HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).unwrap();
    assert!(get(address, "/metrics").contains("ascend_vmm_service_up 1\n"));
    let mut nonsense = TcpStream::connect(address).unwrap();
    let _ = nonsense.write_all(&[0xff; 100_000]);
    let mut answer = Vec::new();
    let _ = nonsense.read_to_end(&mut answer);
    assert!(get(address, "/metrics").contains("ascend_vmm_service_up 1\n"));
    drop((silent, deaf, web, served));
}

#[test]
fn the_status_page_shows_devices_domains_and_events_in_a_browser() {
    let Some(browser) = crate::trace_page::browser() else { return };
    let directory = Directory::new("web-page");
    let emulator = Emulator::start(Config::default()).unwrap();
    let served = serve(&emulator, &directory.socket());
    write_weights(&emulator, &directory.socket());
    let waiting = Command::new(PROGRAM)
        .args(["service", "--socket"])
        .arg(directory.socket())
        .args(["wait", "llama/tp0/weights", "--seconds", "600"])
        .spawn()
        .unwrap();
    let waiting = Served(waiting);
    let waits = |client: &ascend_vmm_service::protocol::ClientStatus| !client.waits.is_empty();
    while !ascend_vmm_service::Client::new(directory.socket()).status().unwrap().clients.iter().any(waits) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (web, page) = web(&directory.socket(), "127.0.0.1:0");
    let picture = Path::new(env!("CARGO_TARGET_TMPDIR")).join("status.png");
    let run = |what: &str| {
        let output = Command::new(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1000", "--disable-quic", what])
            .args(["--no-first-run", "--disable-background-networking", "--disable-component-update"])
            .args(["--disable-sync", "--virtual-time-budget=5000"])
            .arg(format!("--user-data-dir={}", directory.0.join("profile").display()))
            .arg(&page)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stdout(&output)
    };
    run(&format!("--screenshot={}", picture.display()));
    let document = run("--dump-dom");
    assert!(document.contains("data-ready=\"2\""), "{document}");
    for text in [
        "NPU 0 ",
        "NPU 1 ",
        "title=\"llama/tp1/weights: 8 MiB\"",
        "committed version 1",
        "nothing newer than version 0 is committed in llama/tp0/weights",
    ] {
        assert!(document.contains(text), "{text} is not in\n{document}");
    }
    drop((web, waiting, served));
}
