//! Memory handed over a Unix socket in one call on each side, and what becomes of it when one of the two does not play along.

mod sharing;

use ascend_emulator::{Config, fork, isolated, on_each_generation};
use ascend_vmm::share::{self, BareTgid, Ticket};
use ascend_vmm::{Error, PhysicalMemory, Session};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixCredentials, sendmsg};
use sharing::{MIB, Talk, device, in_pid_namespace, plain, read, start, write};
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(50);

/// Bytes of the importer's first message: a word, a version, nothing, its number.
const HELLO: usize = 12;

fn hello(tgid: i32) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..4].copy_from_slice(b"AVMH");
    bytes[4] = 1;
    bytes[8..].copy_from_slice(&tgid.to_le_bytes());
    bytes
}

/// Says bytes in this process's name, as the kernel vouches for it, with descriptors if there are any.
fn say(socket: &UnixStream, bytes: &[u8], descriptors: &[i32]) {
    let me = UnixCredentials::new();
    let rights = (!descriptors.is_empty()).then_some(ControlMessage::ScmRights(descriptors));
    let control: Vec<_> = rights.into_iter().chain([ControlMessage::ScmCredentials(&me)]).collect();
    let sent = sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], &control, MsgFlags::empty(), None);
    assert_eq!(sent, Ok(bytes.len()));
}

/// The exchange failed, with these words.
#[track_caller]
fn fails<T: std::fmt::Debug>(result: ascend_vmm::Result<T>, words: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Exchange(_)), "{error:?}");
    assert!(error.to_string().contains(words), "{words:?} is not in {error}");
}

fn hello_memory() -> PhysicalMemory {
    let memory = device(0).create(4 * MIB).unwrap();
    write(&memory, b"hello");
    memory
}

/// A pair of connected sockets of which each process keeps one, so that the death of either ends the other's.
fn start_with_socket(body: impl FnOnce(&Talk, UnixStream)) -> (sharing::Other, UnixStream) {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let theirs = std::cell::Cell::new(Some(theirs));
    let mine = std::cell::Cell::new(Some(mine));
    let other = start(|talk| {
        drop(mine.take());
        body(talk, theirs.take().unwrap());
    });
    drop(theirs.take());
    (other, mine.take().unwrap())
}

#[test]
fn memory_goes_from_a_parent_to_its_child_over_a_socketpair() {
    on_each_generation(Config::default(), |_, _| {
        let (other, socket) = start_with_socket(|_, socket| {
            let memory = share::receive(&socket, &device(1), LONG).unwrap();
            assert_eq!(read(&memory, 5), b"hello");
            write(&memory, b"world");
        });
        let memory = hello_memory();
        share::send(&socket, &memory, LONG).unwrap();
        other.join();
        assert_eq!(read(&memory, 5), b"world");
    });
}

#[test]
fn memory_goes_to_the_process_that_connected_and_lives_on_there() {
    on_each_generation(Config::default(), |_, emulator| {
        let directory = std::env::temp_dir().join(format!("ascend-vmm-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let path = directory.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let other = start(|talk| {
            let socket = UnixStream::connect(&path).unwrap();
            let host = Session::current().unwrap().host().unwrap();
            let memory = share::receive(&socket, &host, LONG).unwrap();
            talk.pause();
            assert_eq!(read(&memory, 5), b"hello");
        });
        let (socket, _) = listener.accept().unwrap();
        std::fs::remove_dir_all(directory).unwrap();
        let memory = hello_memory();
        share::send(&socket, &memory, LONG).unwrap();
        other.talk.hear();
        drop(memory);
        assert_eq!(emulator.state().memory.shares[0].holders, 1);
        other.talk.say(0);
        other.join();
    });
}

#[test]
fn either_side_may_come_first_and_the_socket_stays_usable() {
    isolated(plain(), |_| {
        let (other, socket) = start_with_socket(|talk, socket| {
            socket.set_nonblocking(true).unwrap();
            let device = device(1);
            for _ in 0..2 {
                let memory = share::receive(&socket, &device, LONG).unwrap();
                assert_eq!(read(&memory, 5), b"hello");
                talk.pause();
            }
            socket.set_nonblocking(false).unwrap();
            let mut word = [0; 4];
            (&socket).read_exact(&mut word).unwrap();
            assert_eq!(&word, b"next");
        });
        for first in [true, false] {
            let memory = hello_memory();
            if first {
                // The hello is there before anyone reads it.
                let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
                poll(&mut ready, PollTimeout::NONE).unwrap();
            }
            share::send(&socket, &memory, LONG).unwrap();
            other.proceed();
        }
        assert_eq!((socket.read_timeout().unwrap(), socket.write_timeout().unwrap()), (None, None));
        (&socket).write_all(b"next").unwrap();
        other.join();
    });
}

#[test]
fn one_memory_goes_to_several_processes() {
    on_each_generation(plain(), |_, emulator| {
        let others: Vec<_> = (0..3)
            .map(|number| {
                start_with_socket(move |talk, socket| {
                    let memory = share::receive(&socket, &device(number % 2), LONG).unwrap();
                    talk.pause();
                    assert_eq!(read(&memory, 5), b"hello");
                })
            })
            .collect();
        let memory = hello_memory();
        for (_, socket) in &others {
            share::send(socket, &memory, LONG).unwrap();
        }
        assert_eq!(emulator.state().memory.shares[0].holders, 4);
        for (other, _) in others {
            other.proceed();
            other.join();
        }
    });
}

#[test]
fn memory_goes_into_a_pid_namespace_and_out_of_it() {
    on_each_generation(plain(), |_, _| {
        let (other, socket) = start_with_socket(|talk, socket| {
            let done = in_pid_namespace(|| {
                talk.say(1);
                assert_eq!(std::process::id(), 1);
                let memory = share::receive(&socket, &device(1), LONG).unwrap();
                assert_eq!(read(&memory, 5), b"hello");
                let own = device(1).create(2 * MIB).unwrap();
                write(&own, b"inner");
                share::send(&socket, &own, LONG).unwrap();
            });
            if let Err(reason) = done {
                println!("skipped, no pid namespace can be made here: {reason}");
                talk.say(0);
            }
        });
        if other.talk.hear() == 1 {
            let memory = hello_memory();
            share::send(&socket, &memory, LONG).unwrap();
            assert_eq!(read(&share::receive(&socket, &device(0), LONG).unwrap(), 5), b"inner");
        }
        other.join();
    });
}

#[test]
fn a_peer_that_asks_in_another_name_gets_nothing() {
    on_each_generation(plain(), |_, emulator| {
        let (mine, theirs) = UnixStream::pair().unwrap();
        let parent = std::process::id() as i32;
        let liar = fork(|| {
            say(&theirs, &hello(parent), &[]);
        });
        let memory = hello_memory();
        let error = share::send(&mine, &memory, LONG).unwrap_err().to_string();
        assert!(error.contains(&format!("process {} asks in the name of process {parent}", liar.pid())), "{error}");
        liar.join();
        // Without the kernel's word there is nothing to compare with.
        let (mine, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(&hello(parent)).unwrap();
        fails(share::send(&mine, &memory, LONG), "the kernel does not say which process asks");
        // Nor can two of them make one hello.
        let (mine, theirs) = UnixStream::pair().unwrap();
        fork(|| say(&theirs, &hello(parent)[..8], &[])).join();
        say(&theirs, &hello(parent)[8..], &[]);
        fails(share::send(&mine, &memory, LONG), "two processes sent the hello");
        assert!(emulator.state().memory.shares.is_empty(), "nothing was exported for a liar");
    });
}

#[test]
fn an_importer_that_dies_ends_the_exporter_at_every_step() {
    on_each_generation(plain(), |_, emulator| {
        let memory = hello_memory();
        // Before the hello.
        let (other, socket) = start_with_socket(|_, socket| drop(socket));
        fails(share::send(&socket, &memory, LONG), "died before the hello");
        other.join();
        // In the middle of it.
        let (other, socket) = start_with_socket(|_, socket| (&socket).write_all(&hello(1)[..5]).unwrap());
        fails(share::send(&socket, &memory, LONG), "died before the hello");
        other.join();
        // After it, before it took the ticket.
        let (other, socket) = start_with_socket(|_, socket| {
            say(&socket, &hello(std::process::id() as i32), &[]);
            nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP).unwrap();
        });
        wait_until_stopped(other.pid());
        other.kill();
        fails(share::send(&socket, &memory, LONG), "died before the ticket");
        // After the ticket, before the import was done.
        let (other, socket) = start_with_socket(|_, socket| {
            say(&socket, &hello(std::process::id() as i32), &[]);
            let mut ticket = [0; Ticket::LENGTH];
            (&socket).read_exact(&mut ticket).unwrap();
            assert!(Ticket::from_bytes(&ticket).is_ok());
        });
        fails(share::send(&socket, &memory, LONG), "died before the result of the import");
        other.join();
        // After the import: the memory was theirs, and went with them.
        let (other, socket) = start_with_socket(|_, socket| {
            std::mem::forget(share::receive(&socket, &device(1), LONG).unwrap());
        });
        share::send(&socket, &memory, LONG).unwrap();
        other.join();
        let state = emulator.state();
        assert_eq!(state.memory.shares[0].holders, 1);
        assert_eq!(read(&memory, 5), b"hello", "nothing of it reached the memory");
    });
}

fn wait_until_stopped(pid: i32) {
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    let status = waitpid(nix::unistd::Pid::from_raw(pid), Some(WaitPidFlag::WUNTRACED)).unwrap();
    assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
}

#[test]
fn an_exporter_that_dies_ends_the_importer_at_every_step() {
    on_each_generation(plain(), |_, _| {
        // Before it read the hello.
        let (other, socket) = start_with_socket(|_, socket| drop(socket));
        other.join();
        let device = device(1);
        fails(share::receive(&socket, &device, LONG), "died before the hello");
        // Before it sent the ticket.
        let (other, socket) = start_with_socket(|_, socket| {
            (&socket).read_exact(&mut [0; HELLO]).unwrap();
        });
        fails(share::receive(&socket, &device, LONG), "died before the ticket");
        other.join();
        // In the middle of it.
        let (other, socket) = start_with_socket(|_, socket| {
            (&socket).read_exact(&mut [0; HELLO]).unwrap();
            (&socket).write_all(b"AVMT").unwrap();
        });
        fails(share::receive(&socket, &device, LONG), "died before the ticket");
        other.join();
        // After it, with the memory: there is nothing left to import, and the error says whose it was.
        let (other, socket) = start_with_socket(|_, socket| {
            let memory = hello_memory();
            let mut hello = [0; HELLO];
            (&socket).read_exact(&mut hello).unwrap();
            let export = memory.export().unwrap();
            export.trust(&[BareTgid::from_raw(i32::from_le_bytes(hello[8..].try_into().unwrap())).unwrap()]).unwrap();
            let ticket = export.ticket().unwrap();
            drop((export, memory));
            (&socket).write_all(&ticket.to_bytes()).unwrap();
        });
        let pid = other.pid();
        let error = share::receive(&socket, &device, LONG).unwrap_err().to_string();
        assert!(error.contains(&format!("exported by process {pid}")), "{error}");
        other.join();
    });
}

#[test]
fn a_peer_that_says_nothing_is_given_up_in_time() {
    isolated(plain(), |_| {
        let (mine, theirs) = UnixStream::pair().unwrap();
        let memory = hello_memory();
        let start = Instant::now();
        fails(share::send(&mine, &memory, SHORT), "the hello did not come in time");
        fails(share::receive(&theirs, &device(1), SHORT), "the ticket did not come in time");
        assert!(start.elapsed() >= 2 * SHORT && start.elapsed() < LONG);
        // The hello of the importer that gave up is answered, and nobody tells what became of it.
        fails(share::send(&mine, &memory, SHORT), "the result of the import did not come in time");
        // No time at all is no reason to hang, and for ever is no reason to overflow.
        fails(share::send(&mine, &memory, Duration::ZERO), "did not come in time");
        drop(theirs);
        fails(share::send(&mine, &memory, Duration::MAX), "died before the hello");
    });
}

#[test]
fn a_slow_peer_that_sends_byte_by_byte_is_understood_until_the_time_is_over() {
    isolated(plain(), |_| {
        let (other, socket) = start_with_socket(|_, socket| {
            for byte in hello(std::process::id() as i32) {
                say(&socket, &[byte], &[]);
            }
            let mut ticket = [0; Ticket::LENGTH];
            (&socket).read_exact(&mut ticket).unwrap();
            (&socket).write_all(&[0]).unwrap();
            (&socket).write_all(&[0]).unwrap();
        });
        share::send(&socket, &hello_memory(), LONG).unwrap();
        other.join();
        let (mine, theirs) = UnixStream::pair().unwrap();
        let endless = std::thread::spawn(move || while (&theirs).write_all(b"A").is_ok() {});
        fails(share::send(&mine, &hello_memory(), LONG), "speaks something else");
        drop(mine);
        endless.join().unwrap();
    });
}

#[test]
fn garbage_from_either_side_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let memory = hello_memory();
        let me = std::process::id() as i32;
        let mut newer = hello(me);
        newer[4] = 2;
        for bytes in [[0; HELLO], [0xFF; HELLO], newer] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            (&theirs).write_all(&bytes).unwrap();
            fails(share::send(&mine, &memory, LONG), "speaks something else");
        }
        for nobody in [0, -1, i32::MIN] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            say(&theirs, &hello(nobody), &[]);
            assert!(matches!(share::send(&mine, &memory, LONG), Err(Error::Invalid(_))));
        }
        assert!(emulator.state().memory.shares.is_empty());

        let device = device(1);
        let mut damaged = memory.export().unwrap().ticket().unwrap().to_bytes();
        damaged[20] ^= 1;
        for bytes in [[0; Ticket::LENGTH], [0xFF; Ticket::LENGTH], damaged] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            (&theirs).write_all(&bytes).unwrap();
            let error = share::receive(&mine, &device, LONG).unwrap_err();
            assert!(matches!(error, Error::Ticket(_)), "{error:?}");
            let mut said = [0; HELLO + 2];
            (&theirs).read_exact(&mut said).unwrap();
            assert_eq!(said[..HELLO], hello(me));
            assert_eq!(said[HELLO..], [0xFF, 0xFF], "the exporter is told");
        }
        // An importer that fails says so, and the exporter repeats it.
        for (said, words) in [([13, 0], "EACCES"), ([0xFF, 0xFF], "refused the ticket"), ([14, 0], "EFAULT")] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            say(&theirs, &hello(me), &[]);
            (&theirs).write_all(&said).unwrap();
            fails(share::send(&mine, &memory, LONG), words);
        }
    });
}

#[test]
fn descriptors_that_a_peer_sends_along_are_not_taken() {
    isolated(plain(), |_| {
        let memory = hello_memory();
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut before = None;
        // The first time, the library opens what it asks for this process's number.
        for (first, last) in [(&[][..], &[][..]), (&[], &[0, 1, 2]), (&[0, 1, 2], &[])] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            say(&theirs, &hello(std::process::id() as i32), first);
            say(&theirs, &[0, 0], last);
            let sent = share::send(&mine, &memory, LONG);
            assert_eq!(sent.is_ok(), first.is_empty(), "nobody of ours says hello with descriptors");
            assert_eq!(descriptors(), *before.get_or_insert_with(descriptors));
        }
    });
}
