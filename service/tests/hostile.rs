//! Clients that lie, stall, flood and send nonsense: each loses its own connection, and nobody else
//! notices.

mod support;
#[path = "support/untrusted.rs"]
mod untrusted;

use ascend_emulator::{Config, Line, fork, isolated};
use ascend_vmm_service::protocol::{self, Answer, Code, Request, ServiceError, VERSION};
use ascend_vmm_service::{Allocation, Entry, Mode, PageSize, Policy, Reader};
use nix::sys::stat::{self, umask};
use nix::unistd::{Gid, Uid, getgid, getgroups, getuid, setgid, setgroups, setuid};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use support::{KEYS, MIB, Service, check_weights, device, name, options, write_weights};

/// A connection that has said hello.
struct Attacker {
    socket: UnixStream,
    arrived: Vec<u8>,
}

impl Attacker {
    fn new(service: &Service) -> Attacker {
        let socket = UnixStream::connect(service.path()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut attacker = Attacker { socket, arrived: Vec::new() };
        let process = std::process::id() as i32;
        let hello = Request::Hello { version: VERSION, process, program: "attacker".into() };
        assert!(matches!(attacker.ask(&hello), Answer::Hello { .. }));
        attacker
    }

    fn send(&mut self, bytes: &[u8]) {
        // The service may have ended the connection before all was sent.
        let _ = self.socket.write_all(bytes);
    }

    fn ask(&mut self, request: &impl Serialize) -> Answer {
        self.send(&protocol::encode(request).unwrap());
        self.next().expect("an answer")
    }

    /// The next message; `None` if the service has ended the connection.
    fn next(&mut self) -> Option<Answer> {
        loop {
            if let Some((length, answer)) = protocol::decode::<Answer>(&self.arrived).unwrap() {
                self.arrived.drain(..length);
                return Some(answer);
            }
            let mut part = [0; 64 << 10];
            match self.socket.read(&mut part) {
                Ok(0) => return None,
                Ok(count) => self.arrived.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The error with which the service ends the connection.
    #[track_caller]
    fn last_words(&mut self) -> ServiceError {
        let Some(Answer::Error(error)) = self.next() else { panic!("no error") };
        assert_eq!(self.next(), None, "the connection ends");
        error
    }

    fn write_role(&mut self, service: &Service, domain: &str) {
        let open = Request::Open {
            domain: name(domain),
            mode: Mode::Write,
            device: service.status().devices[0].physical,
            identity: String::new(),
            wait_ms: 60_000,
            allow_update: false,
            lends: false,
            token: Vec::new(),
        };
        assert!(matches!(self.ask(&open), Answer::Opened { writes: true, .. }));
    }
}

/// Runs an attack beside a reader, which notices nothing.
fn attack(attack: impl FnOnce(&Service)) {
    isolated(Config::default(), |emulator| {
        let service = Service::start("");
        let device = device();
        let mut reader: Reader = write_weights(&service.client(), &device, &name("w"), KEYS);
        let front = service.status().front;
        attack(&service);
        check_weights(&reader, KEYS);
        reader.sleep().unwrap();
        reader.wake().unwrap();
        check_weights(&reader, KEYS);
        check_weights(&service.client().read(&device, &name("w"), &options()).unwrap(), KEYS);
        assert_eq!(service.status().front, front, "the front is the same process");
        drop((reader, device));
        service.end(emulator);
    });
}

#[test]
fn a_frame_of_four_gibibytes_ends_the_connection_before_it_is_read() {
    attack(|service| {
        let mut attacker = Attacker::new(service);
        attacker.send(&u32::MAX.to_le_bytes());
        let error = attacker.last_words();
        assert_eq!(error.code, Code::Protocol);
        assert!(error.problem.contains("4294967295 bytes, and 8388608 are allowed"), "{error}");
    });
}

#[test]
fn half_a_frame_is_not_waited_for_for_ever() {
    attack(|service| {
        let mut attackers: Vec<_> = (0..8).map(|_| Attacker::new(service)).collect();
        for (number, attacker) in attackers.iter_mut().enumerate() {
            attacker.send(&[100, 0, 0, 0, 0x81, 0xA4][..number.min(5) + 1]);
        }
        for attacker in &mut attackers {
            assert_eq!(attacker.last_words().code, Code::Protocol);
        }
    });
}

#[test]
fn a_domain_that_leaves_its_place_is_refused_with_the_rule() {
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Raw {
        Remove { domain: String },
    }
    attack(|service| {
        for domain in ["../w", "w/..", "/etc/passwd", "w\0", "", &"w".repeat(100_000)] {
            let mut attacker = Attacker::new(service);
            attacker.send(&protocol::encode(&Raw::Remove { domain: domain.into() }).unwrap());
            let error = attacker.last_words();
            assert_eq!(error.code, Code::Protocol);
            assert!(error.problem.contains("is not a domain") && error.problem.len() < 500, "{error}");
        }
    });
}

#[test]
fn a_million_keys_are_refused_or_held_and_never_more_than_the_limit() {
    attack(|service| {
        let mut attacker = Attacker::new(service);
        attacker.write_role(service, "keys");
        let (size, page, tag, wait_ms, id) = (2 * MIB, PageSize::Huge, String::new(), 60_000, None);
        let allocate = Request::Allocate { size, page, tag, wait_ms, id };
        let Answer::Allocated { allocation: Allocation { id, .. } } = attacker.ask(&allocate) else { panic!() };
        let (mut put, mut refused) = (0, 0);
        for part in 0..50u32 {
            let entry =
                |key: u32| (format!("{part}.{key}"), Entry { allocation: id, offset: 0, size: 1, value: vec![0; 16] });
            match attacker.ask(&Request::Put { entries: (0..20_000).map(entry).collect() }) {
                Answer::Done {} => put += 20_000,
                Answer::Error(error) => {
                    assert_eq!(error.code, Code::Invalid);
                    assert!(error.problem.starts_with("entries: "), "{error}");
                    refused += 20_000;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(put + refused, 1_000_000);
        assert!(refused > 0 && put > 500_000, "{put} were put");
        // All of it in one frame is too much for a frame.
        let mut frame = (9u32 << 20).to_le_bytes().to_vec();
        frame.resize(64 << 10, 0);
        attacker.send(&frame);
        assert_eq!(attacker.last_words().code, Code::Protocol);
    });
}

#[test]
fn a_flood_of_requests_whose_answers_nobody_reads_ends_with_its_connection() {
    attack(|service| {
        let mut attacker = Attacker::new(service);
        attacker.socket.set_nonblocking(true).unwrap();
        let status = protocol::encode(&Request::Status {}).unwrap();
        let mut sent = 0u64;
        // Until the service stops to listen.
        while sent < 2_000_000 {
            match attacker.socket.write(&status) {
                Ok(_) => sent += 1,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(sent < 2_000_000, "it listens to everything");
        // Others are served meanwhile.
        (0..100).for_each(|_| assert_eq!(service.status().domains.len(), 1));
    });
}

#[test]
fn many_connections_of_one_process_leave_room_for_others() {
    attack(|service| {
        let (ready, go) = (Line::new(), Line::new());
        let crowd = fork(|| {
            let all: Vec<_> = (0..300).filter_map(|_| UnixStream::connect(service.path()).ok()).collect();
            ready.send(all.len() as u64);
            go.receive();
        });
        ready.receive();
        (0..10).for_each(|_| assert_eq!(service.status().domains.len(), 1));
        let mine: Vec<_> = (0..16).map(|_| Attacker::new(service)).collect();
        drop(mine);
        go.send(1);
        crowd.join();
    });
}

/// Every request with a number in each of its fields that has one.
fn with_number(number: u64, process: i32) -> Vec<Request> {
    let short = number.min(10);
    let open = |mode, device, token| Request::Open {
        domain: name("extremes"),
        mode,
        device,
        identity: String::new(),
        wait_ms: short,
        allow_update: false,
        lends: false,
        token,
    };
    let put = |allocation, offset, size| {
        let entry = Entry { allocation, offset, size, value: Vec::new() };
        Request::Put { entries: [("k".into(), entry)].into_iter().collect() }
    };
    let allocate = |size, id| {
        [PageSize::Huge, PageSize::Giant].map(|page| {
            let (tag, wait_ms) = (String::new(), short);
            Request::Allocate { size, page, tag, wait_ms, id }
        })
    };
    let mut all = vec![
        Request::Hello { version: number as u32, process, program: String::new() },
        open(Mode::Write, number as u32, Vec::new()),
        open(Mode::Write, 0, vec![1; short as usize]),
        open(Mode::Write, 0, Vec::new()),
        Request::Free { allocations: vec![number; 3] },
        Request::Shares { allocations: vec![number; 3] },
        put(number, 0, 1),
        put(1, number, number),
        Request::Allocations { from: number },
        Request::Entries { after: Some(number.to_string()) },
        Request::Wait { newer_than: number, domain: Some(name("extremes")), wait_ms: short },
        Request::Wake { wait_ms: number },
        Request::Gave { reclaim: number },
        Request::Events { after: number },
        Request::Replace { state: number as u32 & 1, link: number as u32 },
        Request::Resume { token: vec![0; short as usize] },
    ];
    all.extend(allocate(number, None).into_iter().chain(allocate(2 * MIB, Some(number))));
    all
}

#[test]
fn every_number_may_be_as_great_as_it_can() {
    attack(|service| {
        let process = std::process::id() as i32;
        for number in [0, 1, i32::MAX as u64, u64::from(u32::MAX), 1 << 46, (1 << 63) - 1, 1 << 63, u64::MAX] {
            // A writer, and one that has no role.
            for writes in [true, false] {
                let mut attacker = Attacker::new(service);
                if writes {
                    attacker.write_role(service, &format!("extremes/{number}"));
                }
                for request in with_number(number, process) {
                    match attacker.ask(&request) {
                        Answer::Error(error) if error.code == Code::Protocol => {
                            assert_eq!(attacker.next(), None, "{request:?}");
                            attacker = Attacker::new(service);
                            if writes {
                                attacker.write_role(service, &format!("extremes/{number}"));
                            }
                        }
                        Answer::Error(error) => assert!(!error.problem.is_empty() && !error.remedy.is_empty()),
                        Answer::Waiting(_) => assert!(attacker.next().is_some(), "{request:?}"),
                        _ => {}
                    }
                }
            }
        }
        for process in [0, -1, i32::MIN, i32::MAX] {
            let mut attacker = Attacker { socket: UnixStream::connect(service.path()).unwrap(), arrived: Vec::new() };
            attacker.send(&protocol::encode(&Request::Hello { version: 1, process, program: String::new() }).unwrap());
            assert_eq!(attacker.last_words().code, Code::Protocol, "{process}");
        }
    });
}

/// Frames of every kind of request.
fn seeds() -> Vec<Vec<u8>> {
    let entry = Entry { allocation: 1, offset: 2, size: 3, value: vec![9; 40] };
    let requests = [
        Request::Hello { version: 1, process: 1, program: "x".into() },
        Request::Open {
            domain: name("w"),
            mode: Mode::Discard,
            device: 0,
            identity: "-/0".into(),
            wait_ms: 1,
            allow_update: true,
            lends: true,
            token: Vec::new(),
        },
        Request::Close {},
        Request::Resume { token: vec![7; 16] },
        Request::Allocate { size: 2 * MIB, page: PageSize::Giant, tag: "t".into(), wait_ms: 1, id: Some(7) },
        Request::Free { allocations: vec![1, 2, 3] },
        Request::Put { entries: [("k".into(), entry)].into_iter().collect() },
        Request::Begin {},
        Request::Commit {},
        Request::Allocations { from: 7 },
        Request::Entries { after: Some("k".into()) },
        Request::Shares { allocations: vec![1] },
        Request::Sleep {},
        Request::Wake { wait_ms: 1 },
        Request::Wait { newer_than: 1, domain: Some(name("w")), wait_ms: 1 },
        Request::Gave { reclaim: 1 },
        Request::Remove { domain: name("other") },
        Request::Replace { state: 0, link: 7 },
        Request::Ping {},
        Request::Status {},
        Request::Events { after: 0 },
    ];
    requests.iter().map(|request| protocol::encode(request).unwrap()).collect()
}

/// Numbers that a seed decides.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }

    /// A frame that is changed somewhere; its length stays true most of the time.
    fn changed(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut frame = seeds[self.below(seeds.len())].clone();
        for _ in 0..self.below(4) {
            match self.below(4) {
                0 => {
                    let at = self.below(frame.len());
                    frame[at] = self.below(256) as u8;
                }
                1 => frame.truncate(self.below(frame.len()) + 1),
                2 => {
                    let other = seeds[self.below(seeds.len())].clone();
                    let at = self.below(frame.len());
                    frame.splice(at.., other[self.below(other.len())..].iter().copied());
                }
                _ => frame.insert(self.below(frame.len()), [0, 0x80, 0xC0, 0xDD, 0xDF, 0xFF][self.below(6)]),
            }
            if frame.is_empty() {
                frame.push(0);
            }
        }
        if frame.len() >= 4 && self.below(8) > 0 {
            let length = (frame.len() - 4) as u32;
            frame[..4].copy_from_slice(&length.to_le_bytes());
        }
        frame
    }
}

#[test]
fn whatever_bytes_come_reading_them_ends_and_writes_them_the_same() {
    let mut seeds = seeds();
    let found = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/corpus/service_frames.txt");
    let found = std::fs::read_to_string(found).unwrap();
    for line in found.lines().filter(|line| !line.starts_with('#')) {
        let digits = line.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap());
        seeds.push(digits.map(|two| u8::from_str_radix(two, 16).unwrap()).collect());
    }
    assert!(seeds.len() > 200, "{}", seeds.len());
    seeds.iter().for_each(|seed| untrusted::frames(seed));
    let mut dice = Dice(0xF1F2);
    for _ in 0..100_000 {
        let frame = dice.changed(&seeds);
        untrusted::frames(&frame);
        untrusted::policies(&frame);
    }
}

#[test]
fn a_service_that_hears_nonsense_serves_the_others() {
    attack(|service| {
        let seeds = seeds();
        let mut dice = Dice(0xA77AC);
        let mut ended = BTreeMap::from([(true, 0), (false, 0)]);
        for _ in 0..400 {
            let mut attacker = Attacker::new(service);
            attacker.socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
            // It must not remove what the reader has, so it opens a domain of its own.
            for _ in 0..dice.below(6) {
                let frame = dice.changed(&seeds);
                attacker.send(&frame);
            }
            let mut part = [0; 4096];
            let over = loop {
                match attacker.socket.read(&mut part) {
                    Ok(0) => break true,
                    Ok(_) => {}
                    Err(error) => break error.kind() == ErrorKind::ConnectionReset,
                }
            };
            *ended.entry(over).or_default() += 1;
        }
        assert!(ended[&true] > 0 && ended[&false] > 0, "{ended:?}");
    });
}

#[test]
fn nobody_else_can_connect_before_the_socket_has_its_mode_and_group() {
    isolated(Config::default(), |_| {
        let directory = std::env::temp_dir().join(format!("ascend-vmm-socket-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
        fork(|| {
            // A process that allows everything to everybody, and may not give files to every group.
            umask(stat::Mode::empty());
            if getuid().is_root() {
                setgroups(&[]).unwrap();
                setgid(Gid::from_raw(65_534)).unwrap();
                setuid(Uid::from_raw(65_534)).unwrap();
            }
            let own = getgroups().unwrap();
            let other =
                (1..).find(|&group| !own.contains(&Gid::from_raw(group)) && group != getgid().as_raw()).unwrap();
            let policy = Policy::from_toml(&format!("mode = \"0666\"\ngroup = {other}")).unwrap();
            let path = directory.join("socket");
            let refused = ascend_vmm_service::bind(&path, &policy).unwrap_err().to_string();
            assert!(refused.contains("cannot be made"), "{refused}");
            // So it was before the group was refused: its owner's alone.
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
            assert_eq!(std::fs::metadata(directory.join("socket.lock")).unwrap().mode() & 0o7777, 0o600);
        })
        .join();
        std::fs::remove_dir_all(&directory).unwrap();
    });
}
