//! `ascend-vmm service web`: a status page and metrics over HTTP.
//!
//! A process of its own, which asks the service as any client does: whatever comes over HTTP, the
//! service does not notice. It answers one request on each connection and then closes it. There are
//! at most [`CONNECTIONS`]; when one more comes, the oldest gives way. So slow and silent clients
//! take nothing from others.

mod metrics;

use ascend_vmm_service::protocol::{Event, Status};
use ascend_vmm_service::{Client, Error};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Connections at a time.
const CONNECTIONS: usize = 64;
/// Most bytes of a request.
const REQUEST: usize = 8 << 10;
/// How long a connection may last.
const PATIENCE: Duration = Duration::from_secs(5);
/// The service is asked at most so often.
const PAUSE: Duration = Duration::from_secs(1);
/// Events that the page shows.
const EVENTS: usize = 100;

const PAGE: &str = include_str!("web/page.html");
const SCRIPT: &str = include_str!("web/page.js");

/// Options of `web`.
#[derive(clap::Args)]
pub(super) struct Web {
    /// Where to listen: an address of this host alone, such as 127.0.0.1:9464, or unix: and a path.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9464", value_parser = place)]
    listen: Place,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Loopback(SocketAddr),
    Unix(PathBuf),
}

/// Everybody who reaches the page can read it, so it is reached from this host alone.
fn place(text: &str) -> Result<Place, String> {
    if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
        return Ok(Place::Unix(path.into()));
    }
    match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => Ok(Place::Loopback(address)),
        Ok(_) => Err("only an address of this host, such as 127.0.0.1:9464".into()),
        Err(_) => Err("use an address and a port, such as 127.0.0.1:9464, or unix:/run/metrics.sock".into()),
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn bind(place: &Place) -> io::Result<(Listener, String)> {
        match place {
            Place::Loopback(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                let name = format!("http://{}/", listener.local_addr()?);
                Ok((Listener::Tcp(listener), name))
            }
            Place::Unix(path) => {
                let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
                if is_socket && UnixStream::connect(path).is_err() {
                    std::fs::remove_file(path)?;
                }
                let listener = UnixListener::bind(path)?;
                listener.set_nonblocking(true)?;
                Ok((Listener::Unix(listener), path.display().to_string()))
            }
        }
    }

    fn accept(&self) -> io::Result<OwnedFd> {
        Ok(match self {
            Listener::Tcp(listener) => {
                let (socket, _) = listener.accept()?;
                socket.set_nonblocking(true)?;
                socket.into()
            }
            Listener::Unix(listener) => {
                let (socket, _) = listener.accept()?;
                socket.set_nonblocking(true)?;
                socket.into()
            }
        })
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

impl Web {
    pub(super) fn run(self, client: &Client) -> ExitCode {
        let (listener, name) = match Listener::bind(&self.listen) {
            Ok(bound) => bound,
            Err(error) => return crate::impossible(format_args!("cannot listen there: {error}")),
        };
        crate::outln!("{name}");
        let local = matches!(listener, Listener::Tcp(_));
        let mut server =
            Server { listener, checks_host: local, connections: VecDeque::new(), seen: Seen::new(client.clone()) };
        loop {
            if let Err(error) = server.turn() {
                crate::errln!("error: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
}

struct Connection {
    socket: File,
    input: Vec<u8>,
    /// What is left of the answer, once there is one.
    output: Option<VecDeque<u8>>,
    until: Instant,
}

struct Server {
    listener: Listener,
    /// A page of somebody else's in a browser of this host may reach a port, by a name that it
    /// made point here.
    checks_host: bool,
    /// Oldest first.
    connections: VecDeque<Connection>,
    seen: Seen,
}

impl Server {
    /// Waits until something can be done, and does it.
    fn turn(&mut self) -> io::Result<()> {
        let mut polled = vec![PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        for connection in &self.connections {
            let wanted = if connection.output.is_some() { PollFlags::POLLOUT } else { PollFlags::POLLIN };
            polled.push(PollFd::new(connection.socket.as_fd(), wanted));
        }
        let timeout = match self.connections.front() {
            None => PollTimeout::NONE,
            Some(oldest) => {
                let left = oldest.until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
            }
        };
        match poll(&mut polled, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = polled.iter().map(|it| it.any().unwrap_or(true)).collect();
        let now = Instant::now();
        let mut index = 0;
        let Server { connections, seen, checks_host, .. } = self;
        connections.retain_mut(|connection| {
            index += 1;
            let goes_on = !ready[index] || connection.step(seen, *checks_host);
            goes_on && now < connection.until
        });
        if ready[0] {
            self.accept(now);
        }
        Ok(())
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..16 {
            match self.listener.accept() {
                Ok(socket) => {
                    if self.connections.len() == CONNECTIONS {
                        self.connections.pop_front();
                    }
                    let (socket, until) = (File::from(socket), now + PATIENCE);
                    self.connections.push_back(Connection { socket, input: Vec::new(), output: None, until });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // Most likely no descriptor is left, and the socket stays readable.
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            }
        }
    }
}

impl Connection {
    /// Reads or writes what can be; false when the connection is over.
    fn step(&mut self, seen: &mut Seen, checks_host: bool) -> bool {
        if self.output.is_none() {
            let mut part = [0; 2048];
            match self.socket.read(&mut part) {
                Ok(0) => return false,
                Ok(count) => self.input.extend_from_slice(&part[..count]),
                Err(error) => return matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
            }
            self.output = answer(&self.input, seen, checks_host).map(VecDeque::from);
        }
        let Some(output) = &mut self.output else { return true };
        while !output.is_empty() {
            let (first, _) = output.as_slices();
            match self.socket.write(first) {
                Ok(count) => drop(output.drain(..count)),
                Err(error) => return matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
            }
        }
        false
    }
}

/// The answer to a request; `None` if it is not whole yet.
fn answer(input: &[u8], seen: &mut Seen, checks_host: bool) -> Option<Vec<u8>> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    let plain = "text/plain; charset=utf-8";
    let refuse = |status: &str| Some(response(status, plain, &format!("{status}\n"), false));
    match request.parse(input) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if input.len() < REQUEST => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return refuse("431 Request Header Fields Too Large");
        }
        Err(_) => return refuse("400 Bad Request"),
    }
    let head = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return refuse("405 Method Not Allowed"),
    };
    let host = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case("host"));
    if checks_host && !host.is_some_and(|host| is_this_host(host.value)) {
        return refuse("403 Forbidden");
    }
    let path = request.path.unwrap_or("/").split('?').next().unwrap_or("/");
    Some(match path {
        "/" => response("200 OK", "text/html; charset=utf-8", PAGE, head),
        "/page.js" => response("200 OK", "text/javascript; charset=utf-8", SCRIPT, head),
        "/metrics" => {
            let text = metrics::text(seen.look().ok().map(|(status, events)| (status, events.last())));
            response("200 OK", "text/plain; version=0.0.4; charset=utf-8", &text, head)
        }
        "/status.json" => {
            let (status, document) = match seen.look() {
                Ok((status, events)) => ("200 OK", serde_json::to_string(&Document { status, events })),
                Err(problem) => ("503 Service Unavailable", serde_json::to_string(&Unavailable { problem })),
            };
            response(status, "application/json", &document.unwrap_or_default(), head)
        }
        _ => return refuse("404 Not Found"),
    })
}

#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    status: &'a Status,
    events: &'a [Event],
}

#[derive(Serialize)]
struct Unavailable<'a> {
    problem: &'a str,
}

/// True for names of this host that no other page can have.
fn is_this_host(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => host.split(':').next().unwrap_or(""),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn response(status: &str, kind: &str, body: &str, head: bool) -> Vec<u8> {
    let mut bytes = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\
         Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
         Content-Security-Policy: default-src 'none'; script-src 'self'; connect-src 'self'; \
         style-src 'unsafe-inline'; frame-ancestors 'none'\r\n\r\n",
        body.len()
    )
    .into_bytes();
    if !head {
        bytes.extend_from_slice(body.as_bytes());
    }
    bytes
}

/// What the service said last.
struct Seen {
    client: Client,
    status: Result<Status, String>,
    events: Vec<Event>,
    at: Option<Instant>,
}

impl Seen {
    fn new(client: Client) -> Seen {
        Seen { client, status: Ok(Status::default()), events: Vec::new(), at: None }
    }

    /// The status and the last events, at most [`PAUSE`] old.
    fn look(&mut self) -> Result<(&Status, &[Event]), &str> {
        if self.at.is_none_or(|at| at.elapsed() >= PAUSE) {
            let before = self.status.as_ref().map_or(0, |status| status.front);
            self.status = self.client.status().map_err(|error| error.to_string());
            // Events are counted by each front.
            if self.status.as_ref().is_ok_and(|status| status.front != before) {
                self.events.clear();
            }
            if let Err(error) = self.add_events() {
                self.status = Err(error.to_string());
            }
            self.at = Some(Instant::now());
        }
        match &self.status {
            Ok(status) => Ok((status, &self.events)),
            Err(problem) => Err(problem),
        }
    }

    fn add_events(&mut self) -> Result<(), Error> {
        if self.status.is_ok() {
            let last = self.events.last().map_or(0, |event| event.number);
            self.events.extend(self.client.events(last)?);
            self.events.drain(..self.events.len().saturating_sub(EVENTS));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> Seen {
        Seen::new(Client::new("/nowhere/socket"))
    }

    fn first_line(input: &[u8]) -> Option<String> {
        let answer = answer(input, &mut seen(), true)?;
        Some(String::from_utf8(answer).unwrap().lines().next().unwrap().to_owned())
    }

    #[test]
    fn only_this_host_is_listened_to() {
        assert_eq!(place("127.0.0.1:0"), Ok(Place::Loopback("127.0.0.1:0".parse().unwrap())));
        assert_eq!(place("[::1]:80"), Ok(Place::Loopback("[::1]:80".parse().unwrap())));
        assert_eq!(place("unix:/run/x"), Ok(Place::Unix("/run/x".into())));
        for wrong in ["0.0.0.0:80", "[::]:80", "192.168.0.1:80", "localhost:80", "80", "unix:", ""] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn requests_that_are_not_whole_wait_and_others_get_their_status() {
        let status = |input: &[u8]| first_line(input).unwrap();
        for part in [&b""[..], b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\n"] {
            assert_eq!(first_line(part), None);
        }
        assert_eq!(status(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "HTTP/1.1 200 OK");
        assert_eq!(status(b"GET /metrics?x HTTP/1.1\r\nhost: [::1]:80\r\n\r\n"), "HTTP/1.1 200 OK");
        assert_eq!(status(b"GET /../etc HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"), "HTTP/1.1 404 Not Found");
        assert_eq!(status(b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "HTTP/1.1 405 Method Not Allowed");
        assert_eq!(status(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"), "HTTP/1.1 403 Forbidden");
        assert_eq!(status(b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n"), "HTTP/1.1 403 Forbidden");
        assert_eq!(status(b"GET / HTTP/1.1\r\n\r\n"), "HTTP/1.1 403 Forbidden");
        assert_eq!(status(b"\x16\x03\x01\x02"), "HTTP/1.1 400 Bad Request");
        let long = [b"GET / HTTP/1.1\r\nCookie: ", &[b'x'; REQUEST][..]].concat();
        assert_eq!(status(&long), "HTTP/1.1 431 Request Header Fields Too Large");
        let many = format!("GET / HTTP/1.1\r\n{}", "A: b\r\n".repeat(65));
        assert_eq!(status(many.as_bytes()), "HTTP/1.1 431 Request Header Fields Too Large");
    }

    #[test]
    fn without_a_service_metrics_say_so_and_the_status_is_an_error() {
        let text = |path: &str| {
            let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
            String::from_utf8(answer(request.as_bytes(), &mut seen(), true).unwrap()).unwrap()
        };
        assert!(text("/metrics").ends_with("ascend_vmm_service_up 0\n"), "{}", text("/metrics"));
        assert!(text("/status.json").starts_with("HTTP/1.1 503 "), "{}", text("/status.json"));
        assert!(text("/status.json").contains("cannot be reached"), "{}", text("/status.json"));
    }

    #[test]
    fn the_head_of_a_page_has_its_length_and_no_body() {
        let whole = response("200 OK", "text/plain", "ä", false);
        let head = response("200 OK", "text/plain", "ä", true);
        assert!(whole.starts_with(&head) && whole.len() == head.len() + 2);
        assert!(String::from_utf8(head).unwrap().contains("Content-Length: 2\r\n"));
    }
}
