//! A broker that serves many processes: clients of this library, clients that only speak text, and
//! hostile ones.

use crate::support;
use crate::support::events::{AtEvent, Fields};
use crate::support::processes::{start, start_connected};
use crate::support::{Directory, MIB2, PATIENCE, device, inject, own_pid, own_tgid, plain, read, write};
use ascend_emulator::{fork, isolated, on_each_generation};
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, Broker, BrokerOptions, Request, ShareableHandle, Ticket};
use ascend_vmm::{Error, PhysicalMemory, Session};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixCredentials, sendmsg};
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const SHORT: Duration = Duration::from_millis(50);

/// The exchange failed, with these words.
#[track_caller]
fn fails<T: std::fmt::Debug>(result: ascend_vmm::Result<T>, words: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Exchange(_)), "{error:?}");
    assert!(error.to_string().contains(words), "{words:?} is not in {error}");
}

/// Memory with its number in it.
fn numbered(count: u64) -> Vec<PhysicalMemory> {
    (0..count)
        .map(|number| {
            let memory = device(0).create(MIB2).unwrap();
            write(&memory, &number.to_le_bytes());
            memory
        })
        .collect()
}

#[track_caller]
fn check(memories: &[PhysicalMemory]) {
    for (number, memory) in memories.iter().enumerate() {
        assert_eq!(read(memory, 8), (number as u64).to_le_bytes());
    }
}

/// A broker on a socket, and where.
fn broker(
    directory: &Directory,
    options: BrokerOptions,
    answer: impl Fn(&Request) -> Result<Vec<PhysicalMemory>, String> + Send + Sync + 'static,
) -> (Broker, PathBuf) {
    let path = directory.join("broker");
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    (Broker::start(&Session::current().unwrap(), listener, options, answer).unwrap(), path)
}

/// Serves three memories as `pages`, and one of its own to each process as `own`.
fn serve(request: &Request, pages: &[PhysicalMemory]) -> Result<Vec<PhysicalMemory>, String> {
    match &*request.name {
        "pages" => Ok(pages.to_vec()),
        "own" => Ok(numbered(1)),
        "none" => Ok(Vec::new()),
        "panic" => panic!("as it was asked to"),
        other => Err(format!("there is no\n{other}")),
    }
}

fn request(path: &PathBuf, name: &str) -> ascend_vmm::Result<Vec<PhysicalMemory>> {
    share::request(&UnixStream::connect(path).unwrap(), name, &device(0), PATIENCE)
}

#[test]
fn a_broker_serves_many_processes_while_some_are_stuck_and_some_are_killed() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        // All are forked before there are other threads, which may hold locks of the C library.
        let path = directory.join("broker");
        let clients: Vec<_> = (0..8)
            .map(|_| {
                start(|channel| {
                    channel.wait();
                    check(&request(&path, "pages").unwrap());
                    // Memory of which only this client has a reference in the end.
                    check(&request(&path, "own").unwrap());
                    assert!(request(&path, "none").unwrap().is_empty());
                    fails(request(&path, "panic"), "the server failed");
                    fails(request(&path, "nothing"), "there is no nothing");
                })
            })
            .collect();
        let killed = start(|channel| {
            channel.wait();
            let socket = UnixStream::connect(&path).unwrap();
            (&socket).write_all(b"pages ").unwrap();
            channel.pause();
        });
        let pages = numbered(3);
        let options = BrokerOptions::default().timeout(PATIENCE);
        let (broker, path) = broker(&directory, options, move |request| serve(request, &pages));
        // These say nothing, or half of something, and stay.
        let silent: Vec<UnixStream> = (0..20).map(|_| UnixStream::connect(&path).unwrap()).collect();
        silent.iter().step_by(2).for_each(|mut socket| socket.write_all(b"pag").unwrap());
        killed.signal();
        killed.wait();
        killed.kill();
        let begun = Instant::now();
        clients.iter().for_each(|client| client.signal());
        clients.into_iter().for_each(|client| client.join());
        assert!(begun.elapsed() < PATIENCE, "no one waited for the silent ones");
        drop(broker);
        assert!(UnixStream::connect(&path).is_err(), "it does not listen any more");
        drop(silent);
        // The thread of the last client closes the session.
        support::wait_until("the last clients are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_client_whose_second_import_fails_keeps_nothing() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let pages = numbered(3);
        let (broker, path) = broker(&directory, BrokerOptions::default(), move |request| serve(request, &pages));
        inject(emulator, "MEM_IMPORT#2=ENOMEM");
        start(|_| assert_eq!(request(&path, "pages").unwrap_err().errno(), Some(Errno::ENOMEM))).join();
        let shares = emulator.state().memory.shares;
        assert!(shares.len() == 3 && shares.iter().all(|share| share.holders == 1), "{shares:#?}");
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_client_that_only_speaks_text_gets_the_vendors_handle() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let pages = numbered(3);
        let (broker, path) = broker(&directory, BrokerOptions::default(), move |request| {
            assert!(request.process.as_raw() > 0 && request.user == std::fs::metadata("/proc/self").unwrap().uid());
            serve(request, &pages)
        });
        start(|_| {
            let mut socket = BufReader::new(UnixStream::connect(&path).unwrap());
            // As a process of the vendor's stack would: its number, and the number of each handle.
            let request = format!("pages {}\n", own_tgid());
            socket.get_mut().write_all(request.as_bytes()).unwrap();
            let mut line = String::new();
            socket.read_line(&mut line).unwrap();
            assert_eq!(line, "ok 3\n");
            let mut memories = Vec::new();
            for _ in 0..3 {
                line.clear();
                socket.read_line(&mut line).unwrap();
                let words: Vec<&str> = line.split_whitespace().collect();
                assert_eq!(words[1], MIB2.to_string());
                let handle = ShareableHandle::from_u64(words[0].parse().unwrap()).unwrap();
                assert_eq!(words[2].parse::<Ticket>().unwrap().handle, handle);
                memories.push(share::import(&device(0), handle).unwrap());
            }
            check(&memories);
        })
        .join();
        drop(broker);
        support::wait_until("its thread is gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_client_cannot_ask_in_the_name_of_another_process() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let asked = Arc::new(AtomicU32::new(0));
        let counted = asked.clone();
        let (broker, path) = broker(&directory, BrokerOptions::default(), move |request| {
            counted.fetch_add(1, Ordering::Relaxed);
            serve(request, &[])
        });
        for line in [
            format!("pages {}\n", own_pid() + 1),
            "pages 0\n".to_owned(),
            "pages -5\n".to_owned(),
            "pages\n".to_owned(),
            "\n".to_owned(),
            "pages 1 2\n".to_owned(),
            "pages 99999999999999999999\n".to_owned(),
            format!("{} {}\n", "n".repeat(1025), own_pid()),
            format!("{}\n", "x".repeat(5000)),
        ] {
            let mut socket = UnixStream::connect(&path).unwrap();
            // It may be cut off before it has sent all of it.
            let _ = socket.write_all(line.as_bytes());
            let mut answer = String::new();
            let _ = socket.read_to_string(&mut answer);
            assert!(answer.starts_with("error cannot serve memory") || line.len() > 4000, "{line:?}: {answer:?}");
        }
        let mut socket = UnixStream::connect(&path).unwrap();
        socket.write_all(b"\xff\xfe 5\n").unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("not text"), "{answer}");
        assert_eq!(asked.load(Ordering::Relaxed), 0, "the program was not asked");
        drop((broker, socket));
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_request_that_two_processes_send_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        let asked = Arc::new(AtomicU32::new(0));
        let counted = asked.clone();
        let (broker, path) = broker(&directory, BrokerOptions::default(), move |request| {
            counted.fetch_add(1, Ordering::Relaxed);
            serve(request, &[])
        });
        // First the process that begins the request claims it, then the one that ends it.
        for of_beginner in [true, false] {
            let mut socket = UnixStream::connect(&path).unwrap();
            let (beginner, rest) = (own_pid(), socket.try_clone().unwrap());
            send_as_self(&socket, b"own ");
            let child = start(|_| {
                let process = if of_beginner { beginner } else { own_pid() };
                send_as_self(&rest, format!("{process}\n").as_bytes());
            });
            let mut answer = String::new();
            socket.read_to_string(&mut answer).unwrap();
            assert!(answer.contains("two processes or users sent the request"), "{answer}");
            child.join();
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0, "the program was not asked");
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

/// Sends bytes with this process's credentials, whether or not the other end wants them yet.
fn send_as_self(socket: &UnixStream, bytes: &[u8]) {
    let me = UnixCredentials::new();
    let control = [ControlMessage::ScmCredentials(&me)];
    let sent = sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], &control, MsgFlags::empty(), None);
    assert_eq!(sent, Ok(bytes.len()));
}

#[test]
fn a_broker_cuts_off_late_clients_and_serves_others() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let options = BrokerOptions::default().timeout(SHORT).clients(0);
        let (broker, path) = broker(&directory, options, |request| serve(request, &numbered(1)));
        // One place, and all of them want it.
        let mut silent: Vec<UnixStream> = (0..5).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let mut served = None;
        support::wait_until("a client is served within its time", || {
            let socket = UnixStream::connect(&path).unwrap();
            served = share::request(&socket, "pages", &device(1), PATIENCE).ok();
            served.is_some()
        });
        check(&served.take().unwrap());
        for socket in &mut silent {
            let mut answer = String::new();
            socket.read_to_string(&mut answer).unwrap();
            let others_waited = answer.contains("no request came, and others waited");
            assert!(others_waited || answer.contains("did not come in time"), "{answer}");
        }
        let mut answer = String::new();
        UnixStream::connect(&path).unwrap().read_to_string(&mut answer).unwrap();
        assert!(answer.contains("did not come in time"), "nobody waited: {answer}");
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_client_refuses_malformed_answers_of_a_broker() {
    isolated(plain(), |emulator| {
        let theirs = numbered(1);
        let export = theirs[0].export().unwrap();
        let ticket = export.ticket().unwrap();
        let mut other = ticket;
        (other.exporter, other.exporter_start) = (ticket.exporter + 1, 1);
        for (answer, words) in [
            ("ok\n".to_owned(), "malformed"),
            ("ok -1\n".to_owned(), "malformed"),
            ("ok 65537\n".to_owned(), "malformed"),
            ("hello\n".to_owned(), "malformed"),
            ("ok 1\n5\n".to_owned(), "malformed"),
            ("ok 1\n".to_owned(), "closed the socket"),
            (String::new(), "closed the socket"),
            ("error because\n".to_owned(), "it answered: because"),
            (format!("ok 1\n1 2 {other}\n"), "another process sent it"),
            ("o".repeat(10_000), "too long"),
        ] {
            let (socket, mut peer) = UnixStream::pair().unwrap();
            let server = std::thread::spawn(move || {
                BufReader::new(&peer).read_line(&mut String::new()).unwrap();
                // The client may hang up before it has read all.
                let _ = peer.write_all(answer.as_bytes());
            });
            fails(share::request(&socket, "name", &device(0), PATIENCE), words);
            server.join().unwrap();
        }
        let (socket, _peer) = UnixStream::pair().unwrap();
        for name in ["", "two words", "line\n", &"n".repeat(1025)] {
            fails(share::request(&socket, name, &device(0), PATIENCE), "is not a name");
        }
        fails(share::request(&socket, "name", &device(0), SHORT), "in time");
        assert_eq!(emulator.state().memory.shares[0].holders, 1);
    });
}

#[test]
fn a_forked_child_drops_the_broker_and_the_parent_still_serves() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let pages = Mutex::new(numbered(1));
        let answer = move |request: &Request| serve(request, &pages.lock().unwrap());
        let (broker, path) = broker(&directory, BrokerOptions::default(), answer);
        let mut broker = Some(broker);
        fork(|| drop(broker.take())).join();
        start(|_| check(&request(&path, "pages").unwrap())).join();
        drop(broker);
        support::wait_until("its thread is gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_broker_that_is_dropped_at_once_leaves_nothing() {
    on_each_generation(plain(), |_, emulator| {
        let directory = Directory::new();
        for _ in 0..20 {
            let (broker, path) = broker(&directory, BrokerOptions::default(), |_| Ok(Vec::new()));
            let _client = UnixStream::connect(&path).unwrap();
            drop(broker);
        }
        support::wait_until("the clients' threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_broker_ends_although_a_forked_child_keeps_its_descriptors() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let (broker, _) = broker(&directory, BrokerOptions::default(), |_| Ok(Vec::new()));
        let child = start(|channel| channel.pause());
        child.wait();
        drop(broker);
        child.signal();
        child.join();
        support::wait_until("its thread is gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_client_that_never_stops_sending_is_cut_off_and_gives_up_its_place() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        // The first is within its time, however slow this machine is.
        let options = BrokerOptions::default().timeout(Duration::from_secs(2)).clients(1);
        let (broker, path) = broker(&directory, options, |_| Ok(Vec::new()));
        let mut socket = UnixStream::connect(&path).unwrap();
        // It may be cut off at any time: its next bytes are then refused.
        while socket.write_all(format!("none {}\n", own_pid()).as_bytes()).is_ok() {}
        support::wait_until("another is served", || request(&path, "none").is_ok());
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_broker_accepts_limits_that_no_clock_can_hold() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let pages = numbered(2);
        let options = BrokerOptions::default().timeout(Duration::MAX).clients(usize::MAX);
        let (broker, path) = broker(&directory, options, move |request| serve(request, &pages));
        start(|_| {
            let socket = UnixStream::connect(&path).unwrap();
            assert_eq!(share::request(&socket, "own", &device(0), Duration::MAX).unwrap().len(), 1);
        })
        .join();
        drop(broker);
        let (peer, socket) = start_connected(|_, socket| {
            share::receive(&socket, &device(0), Duration::MAX).unwrap();
        });
        share::send(&socket, &numbered(1)[0], Duration::MAX).unwrap();
        peer.join();
        drop(socket);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn no_more_clients_are_served_at_a_time_than_allowed() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let inside = Arc::new((AtomicU32::new(0), AtomicU32::new(0)));
        let counts = inside.clone();
        let (broker, path) = broker(&directory, BrokerOptions::default().clients(2).timeout(PATIENCE), move |_| {
            let now = counts.0.fetch_add(1, Ordering::SeqCst) + 1;
            counts.1.fetch_max(now, Ordering::SeqCst);
            // Time for a third, if one could come.
            std::thread::sleep(SHORT);
            counts.0.fetch_sub(1, Ordering::SeqCst);
            Ok(Vec::new())
        });
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| assert!(request(&path, "none").unwrap().is_empty()));
            }
        });
        assert!(inside.1.load(Ordering::SeqCst) <= 2);
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn answers_that_are_too_long_are_cut_and_too_many_memories_are_refused() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let page = numbered(1).remove(0);
        let (broker, path) = broker(&directory, BrokerOptions::default().timeout(PATIENCE), move |request| {
            if request.name == "many" { Ok(vec![page.clone(); 65_537]) } else { Err("long\n".repeat(10_000)) }
        });
        fails(request(&path, "many"), "65537 memories are too many");
        fails(request(&path, "long"), "long long long");
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

/// Long enough for a client that is served, shorter than a place is held.
const SOON: Duration = Duration::from_secs(30);
const HELD: Duration = Duration::from_secs(120);

/// Opens `count` connections, as many of them as the other side takes, without ever waiting.
fn connect_many(path: &PathBuf, count: usize) -> Vec<UnixStream> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
    let mut sockets = Vec::new();
    for _ in 0..count {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
        if connect(socket.as_raw_fd(), &UnixAddr::new(path).unwrap()).is_ok() {
            sockets.push(UnixStream::from(socket));
        }
    }
    sockets
}

#[test]
fn one_process_cannot_take_all_places_of_a_broker() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let path = directory.join("broker");
        let honest: Vec<_> = (0..2)
            .map(|_| {
                start(|channel| {
                    channel.wait();
                    let socket = UnixStream::connect(&path).unwrap();
                    assert!(share::request(&socket, "none", &device(0), SOON).unwrap().is_empty());
                })
            })
            .collect();
        let greedy: Vec<_> = [false, true]
            .map(|asks| {
                let path = &path;
                start(move |channel| {
                    channel.wait();
                    let sockets = connect_many(path, 300);
                    if asks {
                        // Some may have been refused by now.
                        sockets.iter().for_each(|mut socket| {
                            let _ = socket.write_all(format!("none {}\n", own_pid()).as_bytes());
                        });
                        let mut answer = [0; 5];
                        support::wait_until("one is served", || {
                            sockets.iter().any(|mut socket| socket.read(&mut answer).is_ok())
                        });
                    }
                    channel.pause();
                    drop(sockets);
                })
            })
            .into();
        let options = BrokerOptions::default().timeout(HELD).clients(16);
        let (broker, _) = broker(&directory, options, |request| serve(request, &[]));
        for (greedy, honest) in greedy.iter().zip(honest) {
            greedy.signal();
            greedy.wait();
            honest.signal();
            honest.join();
        }
        greedy.into_iter().for_each(|greedy| {
            greedy.signal();
            greedy.join();
        });
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_silent_client_loses_its_place_to_a_waiting_one_with_an_error() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let (broker, path) =
            broker(&directory, BrokerOptions::default().timeout(HELD).clients(1), |request| serve(request, &[]));
        let mut silent = UnixStream::connect(&path).unwrap();
        silent.write_all(b"no").unwrap();
        let socket = UnixStream::connect(&path).unwrap();
        assert!(share::request(&socket, "none", &device(0), SOON).unwrap().is_empty());
        let mut answer = String::new();
        silent.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("error ") && answer.contains("others waited"), "{answer}");
        drop((broker, socket));
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn too_many_waiting_clients_are_refused_with_an_error() {
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let (broker, path) =
            broker(&directory, BrokerOptions::default().timeout(HELD).clients(1), |request| serve(request, &[]));
        // One has the place or was cut off, 256 wait; its own connections make way for each other.
        let sockets: Vec<_> = (0..300).map(|_| UnixStream::connect(&path).unwrap()).collect();
        // On a busy machine some had the place, and were cut off before too many waited.
        let is_refused = |mut socket: &UnixStream| {
            let mut answer = String::new();
            socket.set_read_timeout(Some(SOON)).unwrap();
            socket.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("error "), "{answer}");
            answer.contains("too many clients wait")
        };
        assert!(sockets.iter().any(is_refused));
        drop((broker, sockets));
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn descriptors_that_clients_send_are_closed_and_killed_clients_leave_nothing() {
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let path = directory.join("broker");
        let killed: Vec<_> = (0..10)
            .map(|number| {
                let path = &path;
                start(move |channel| {
                    channel.wait();
                    let mut socket = UnixStream::connect(path).unwrap();
                    let line = format!("pages {}\n", own_tgid());
                    // Killed at any point: some before they ask, some with an answer that is not
                    // read.
                    socket.write_all(&line.as_bytes()[..line.len() * number / 9]).unwrap();
                    channel.pause();
                })
            })
            .collect();
        let pages = numbered(2);
        let options = BrokerOptions::default().timeout(PATIENCE);
        let (broker, path) = broker(&directory, options, move |request| serve(request, &pages));
        assert!(request(&path, "none").unwrap().is_empty());
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before = descriptors();
        let null = std::fs::File::open("/dev/null").unwrap();
        for count in [1, 2, 100, 253] {
            let mut socket = UnixStream::connect(&path).unwrap();
            let many = vec![null.as_raw_fd(); count];
            let line = format!("none {}\n", own_tgid());
            // Byte by byte, with as many descriptors each.
            for byte in line.as_bytes() {
                let bytes = [std::io::IoSlice::new(std::slice::from_ref(byte))];
                let rights = [ControlMessage::ScmRights(&many)];
                sendmsg::<()>(socket.as_raw_fd(), &bytes, &rights, MsgFlags::empty(), None).unwrap();
            }
            let mut answer = [0; 5];
            socket.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"ok 0\n", "{count}");
        }
        drop(null);
        support::wait_until("no descriptor that was sent is left", || descriptors() <= before);
        // Each has one end of a channel here.
        let before = before - killed.len();
        for client in killed {
            client.signal();
            client.wait();
            client.kill();
        }
        support::wait_until("no descriptor of a client is left", || descriptors() <= before);
        assert!(request(&path, "none").unwrap().is_empty());
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

#[test]
fn a_request_names_the_user_that_asks_not_the_one_that_connected() {
    let own = std::fs::metadata("/proc/self").unwrap().uid();
    isolated(plain(), |emulator| {
        let directory = Directory::new();
        let path = directory.join("broker");
        // Only root can become another user: for others the two are the same.
        let asking = if own == 0 { 65_534 } else { own };
        let client = start_asking(&path, asking);
        let (users, seen) = std::sync::mpsc::channel();
        let (broker, _) = broker(&directory, BrokerOptions::default().timeout(PATIENCE), move |request| {
            users.send((request.user, request.process.as_raw())).unwrap();
            serve(request, &[])
        });
        let pid = client.pid();
        client.signal();
        client.join();
        // First it asked as the user that it was, to let time pass.
        assert_eq!(seen.try_iter().collect::<Vec<_>>()[..2], [(own, pid), (asking, pid)]);
        drop(broker);
        support::wait_until("its threads are gone", || emulator.state().is_empty());
    });
}

/// A process that connects as this user, waits until the broker has long accepted, and asks as
/// another user. Then it connects again and asks half as one and half as the other.
fn start_asking(path: &PathBuf, user: u32) -> support::processes::Peer {
    start(move |channel| {
        channel.wait();
        let is_other = user != std::fs::metadata("/proc/self").unwrap().uid();
        let [mut whole, mut halves] = [(); 2].map(|()| UnixStream::connect(path).unwrap());
        halves.write_all(b"none ").unwrap();
        // When a later client is served the earlier ones are accepted.
        fails(request(path, "nothing"), "there is no");
        // SAFETY: no memory is passed. Without libc's care for other threads: there are none.
        let became = unsafe { nix::libc::syscall(nix::libc::SYS_setresuid, user, user, user) };
        assert_eq!(became, 0);
        let mut answer = [0; 5];
        whole.write_all(format!("none {}\n", own_pid()).as_bytes()).unwrap();
        whole.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"ok 0\n");
        halves.write_all(format!("{}\n", own_pid()).as_bytes()).unwrap();
        halves.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, if is_other { b"error" } else { b"ok 0\n" }, "one line of two users");
    })
}

#[test]
fn no_text_of_a_peer_reaches_an_error_an_event_or_a_broker_with_control_characters() {
    isolated(plain(), |emulator| {
        let events = Arc::new(Mutex::new(Vec::new()));
        let kept = events.clone();
        let keep = AtEvent(move |fields: Fields| kept.lock().unwrap().extend(fields.get("detail").cloned()));
        tracing::subscriber::set_global_default(keep).unwrap();
        let directory = Directory::new();
        let asked = Arc::new(AtomicU32::new(0));
        let counted = asked.clone();
        let (broker, path) = broker(&directory, BrokerOptions::default().timeout(PATIENCE), move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            Err("a\x1b[31m\u{9b}program\u{202e}'s\nreason".to_owned())
        });
        for name in ["\x1b[31mred", "bell\x07", "nul\0", "\u{202e}kv", "\u{9b}31m"] {
            let mut socket = UnixStream::connect(&path).unwrap();
            socket.write_all(format!("{name} {}\n", own_pid()).as_bytes()).unwrap();
            let mut answer = String::new();
            socket.read_to_string(&mut answer).unwrap();
            assert!(answer.contains("malformed"), "{answer}");
            fails(request(&path, name), "is not a name");
        }
        assert_eq!(asked.load(Ordering::Relaxed), 0, "the program was not asked");
        fails(request(&path, "name"), r"a\u{1b}[31m\u{9b}program\u{202e}'s reason");
        drop(broker);
        // Another broker, which escapes nothing.
        let (socket, peer) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            BufReader::new(&peer).read_line(&mut String::new()).unwrap();
            (&peer).write_all("error \x1b[31mred\x07\r\u{202e}\n".as_bytes()).unwrap();
        });
        fails(share::request(&socket, "name", &device(0), PATIENCE), r"it answered: \u{1b}[31mred\u{7}\r\u{202e}.");
        server.join().unwrap();
        support::wait_until("its threads are gone", || emulator.state().is_empty());
        let events = events.lock().unwrap();
        assert!(events.iter().any(|event| event.contains(r"a\u{1b}[31m")), "{events:?}");
        assert!(!events.iter().any(|event| event.contains(['\x1b', '\u{9b}', '\u{202e}'])), "{events:?}");
    });
}
