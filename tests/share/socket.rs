//! Memory that is sent over a Unix socket with one call on each side, and what happens when one of
//! the two processes dies, is silent or sends something else.

use crate::support;
use crate::support::events::{AtEvent, Fields};
use crate::support::processes::{Channel, Peer, in_pid_namespace, start, start_connected};
use crate::support::{MIB, MIB2, PATIENCE, device, holders, own_pid, plain, read, write};
use ascend_emulator::{Config, fork, isolated, on_each_generation};
use ascend_vmm::share::{self, BareTgid, Ticket};
use ascend_vmm::{Error, PhysicalMemory, Session};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigHandler, Signal, kill, raise, signal};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixCredentials, sendmsg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use std::cell::Cell;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// How long to wait for a message that never comes.
const SHORT: Duration = Duration::from_millis(50);

/// Length of the importer's first message: a magic word, a version, padding, its number.
const HELLO: usize = 12;

fn hello(tgid: i32) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..4].copy_from_slice(b"AVMH");
    bytes[4] = 1;
    bytes[8..].copy_from_slice(&tgid.to_le_bytes());
    bytes
}

/// Sends bytes with this process's credentials, which the kernel checks, and with descriptors if
/// there are any.
fn send_as_self(socket: &UnixStream, bytes: &[u8], descriptors: &[i32]) {
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

/// Starts a process with one half of a socketpair and returns the other. Each process keeps its own
/// half only, so that the death of either closes the connection.
fn start_with_socket(body: impl FnOnce(&Channel, UnixStream)) -> (Peer, UnixStream) {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let theirs = Cell::new(Some(theirs));
    let mine = Cell::new(Some(mine));
    let other = start(|channel| {
        drop(mine.take());
        body(channel, theirs.take().unwrap());
    });
    drop(theirs.take());
    (other, mine.take().unwrap())
}

#[test]
fn a_parent_sends_memory_to_its_child_over_a_socketpair() {
    on_each_generation(Config::default(), |_, _| {
        let (other, socket) = start_with_socket(|_, socket| {
            let memory = share::receive(&socket, &device(1), PATIENCE).unwrap();
            assert_eq!(read(&memory, 5), b"hello");
            write(&memory, b"world");
        });
        let memory = hello_memory();
        share::send(&socket, &memory, PATIENCE).unwrap();
        other.join();
        assert_eq!(read(&memory, 5), b"world");
    });
}

#[test]
fn memory_sent_to_a_process_that_connected_outlives_its_sender_there() {
    on_each_generation(Config::default(), |_, emulator| {
        let (other, socket) = start_connected(|channel, socket| {
            let host = Session::current().unwrap().host().unwrap();
            let memory = share::receive(&socket, &host, PATIENCE).unwrap();
            channel.pause();
            assert_eq!(read(&memory, 5), b"hello");
        });
        let memory = hello_memory();
        share::send(&socket, &memory, PATIENCE).unwrap();
        other.wait();
        drop(memory);
        assert_eq!(holders(emulator), 1);
        other.signal();
        other.join();
    });
}

#[test]
fn either_side_may_call_first_and_the_socket_stays_usable() {
    isolated(plain(), |_| {
        let (other, socket) = start_with_socket(|channel, socket| {
            socket.set_nonblocking(true).unwrap();
            let device = device(1);
            for _ in 0..2 {
                let memory = share::receive(&socket, &device, PATIENCE).unwrap();
                assert_eq!(read(&memory, 5), b"hello");
                channel.pause();
            }
            socket.set_nonblocking(false).unwrap();
            let mut word = [0; 4];
            (&socket).read_exact(&mut word).unwrap();
            assert_eq!(&word, b"next");
        });
        for first in [true, false] {
            let memory = hello_memory();
            if first {
                // The hello arrives before it is read.
                let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
                poll(&mut ready, PollTimeout::NONE).unwrap();
            }
            share::send(&socket, &memory, PATIENCE).unwrap();
            other.proceed();
        }
        assert_eq!((socket.read_timeout().unwrap(), socket.write_timeout().unwrap()), (None, None));
        (&socket).write_all(b"next").unwrap();
        other.join();
    });
}

#[test]
fn the_same_memory_can_be_sent_to_several_processes() {
    on_each_generation(plain(), |_, emulator| {
        let others: Vec<_> = (0..3)
            .map(|number| {
                start_with_socket(move |channel, socket| {
                    let memory = share::receive(&socket, &device(number % 2), PATIENCE).unwrap();
                    channel.pause();
                    assert_eq!(read(&memory, 5), b"hello");
                })
            })
            .collect();
        let memory = hello_memory();
        for (_, socket) in &others {
            share::send(socket, &memory, PATIENCE).unwrap();
        }
        assert_eq!(holders(emulator), 4);
        for (other, _) in others {
            other.proceed();
            other.join();
        }
    });
}

#[test]
fn memory_can_be_sent_into_a_pid_namespace_and_out_of_it() {
    on_each_generation(plain(), |_, _| {
        let (other, socket) = start_with_socket(|channel, socket| {
            let done = in_pid_namespace(|| {
                channel.send(1);
                assert_eq!(std::process::id(), 1);
                let memory = share::receive(&socket, &device(1), PATIENCE).unwrap();
                assert_eq!(read(&memory, 5), b"hello");
                let own = device(1).create(MIB2).unwrap();
                write(&own, b"inner");
                share::send(&socket, &own, PATIENCE).unwrap();
            });
            if let Err(reason) = done {
                println!("skipped, no pid namespace can be made here: {reason}");
                channel.signal();
            }
        });
        if other.receive() == 1 {
            let memory = hello_memory();
            share::send(&socket, &memory, PATIENCE).unwrap();
            assert_eq!(read(&share::receive(&socket, &device(0), PATIENCE).unwrap(), 5), b"inner");
        }
        other.join();
    });
}

#[test]
fn a_peer_that_claims_another_process_id_gets_nothing() {
    on_each_generation(plain(), |_, emulator| {
        let (mine, theirs) = UnixStream::pair().unwrap();
        let parent = own_pid();
        let liar = fork(|| send_as_self(&theirs, &hello(parent), &[]));
        let memory = hello_memory();
        let error = share::send(&mine, &memory, PATIENCE).unwrap_err().to_string();
        assert!(error.contains(&format!("process {} asks in the name of process {parent}", liar.pid())), "{error}");
        liar.join();
        // Without credentials there is nothing to compare with.
        let (mine, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(&hello(parent)).unwrap();
        fails(share::send(&mine, &memory, PATIENCE), "the kernel does not say which process asks");
        // Two processes cannot send one hello.
        let (mine, theirs) = UnixStream::pair().unwrap();
        fork(|| send_as_self(&theirs, &hello(parent)[..8], &[])).join();
        send_as_self(&theirs, &hello(parent)[8..], &[]);
        fails(share::send(&mine, &memory, PATIENCE), "two processes or users sent the hello");
        assert!(emulator.state().memory.shares.is_empty(), "nothing was exported");
    });
}

#[test]
fn the_death_of_an_importer_is_an_error_of_the_exporter_at_every_step() {
    on_each_generation(plain(), |_, emulator| {
        let memory = hello_memory();
        // Before the hello.
        let (other, socket) = start_with_socket(|_, socket| drop(socket));
        fails(share::send(&socket, &memory, PATIENCE), "died before the hello");
        other.join();
        // In the middle of it.
        let (other, socket) = start_with_socket(|_, socket| (&socket).write_all(&hello(1)[..5]).unwrap());
        fails(share::send(&socket, &memory, PATIENCE), "died before the hello");
        other.join();
        // After it, before the ticket.
        let (other, socket) = start_with_socket(|_, socket| {
            send_as_self(&socket, &hello(own_pid()), &[]);
            raise(Signal::SIGSTOP).unwrap();
        });
        wait_until_stopped(other.pid());
        other.kill();
        fails(share::send(&socket, &memory, PATIENCE), "died before the ticket");
        // After the ticket, before the import was done.
        let (other, socket) = start_with_socket(|_, socket| {
            send_as_self(&socket, &hello(own_pid()), &[]);
            let mut ticket = [0; Ticket::LENGTH];
            (&socket).read_exact(&mut ticket).unwrap();
            assert!(Ticket::from_bytes(&ticket).is_ok());
        });
        fails(share::send(&socket, &memory, PATIENCE), "died before the result of the import");
        other.join();
        // After the import: the kernel releases the dead process's reference.
        let (other, socket) = start_with_socket(|_, socket| {
            std::mem::forget(share::receive(&socket, &device(1), PATIENCE).unwrap());
        });
        share::send(&socket, &memory, PATIENCE).unwrap();
        other.join();
        let state = emulator.state();
        assert_eq!(state.memory.shares[0].holders, 1);
        assert_eq!(read(&memory, 5), b"hello", "the memory is unchanged");
    });
}

fn wait_until_stopped(pid: i32) {
    let status = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WUNTRACED)).unwrap();
    assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
}

#[test]
fn the_death_of_an_exporter_is_an_error_of_the_importer_at_every_step() {
    on_each_generation(plain(), |_, _| {
        // As in a program that is not Rust's: writing to a closed socket must not end it.
        // SAFETY: no handler is installed.
        unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }.unwrap();
        // Before it read the hello.
        let (other, socket) = start_with_socket(|_, socket| drop(socket));
        other.join();
        let device = device(1);
        fails(share::receive(&socket, &device, PATIENCE), "died before the hello");
        // Before it sent the ticket.
        let (other, socket) = start_with_socket(|_, socket| {
            (&socket).read_exact(&mut [0; HELLO]).unwrap();
        });
        fails(share::receive(&socket, &device, PATIENCE), "died before the ticket");
        other.join();
        // In the middle of it.
        let (other, socket) = start_with_socket(|_, socket| {
            (&socket).read_exact(&mut [0; HELLO]).unwrap();
            (&socket).write_all(b"AVMT").unwrap();
        });
        fails(share::receive(&socket, &device, PATIENCE), "died before the ticket");
        other.join();
        // After it, with the memory: there is nothing left to import, and the error names the
        // exporter.
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
        let error = share::receive(&socket, &device, PATIENCE).unwrap_err().to_string();
        assert!(error.contains(&format!("exported by process {pid}")), "{error}");
        other.join();
    });
}

#[test]
fn a_silent_peer_is_an_error_after_the_timeout() {
    isolated(plain(), |_| {
        let (mine, theirs) = UnixStream::pair().unwrap();
        let memory = hello_memory();
        let start = Instant::now();
        fails(share::send(&mine, &memory, SHORT), "the hello did not come in time");
        fails(share::receive(&theirs, &device(1), SHORT), "the ticket did not come in time");
        assert!(start.elapsed() >= 2 * SHORT && start.elapsed() < PATIENCE);
        // The hello of the importer that gave up is answered, and no result follows.
        fails(share::send(&mine, &memory, SHORT), "the result of the import did not come in time");
        // A timeout of zero does not hang, and the longest one does not overflow.
        fails(share::send(&mine, &memory, Duration::ZERO), "did not come in time");
        drop(theirs);
        fails(share::send(&mine, &memory, Duration::MAX), "died before the hello");
    });
}

#[test]
fn a_peer_that_sends_byte_by_byte_is_understood_and_an_endless_one_is_refused() {
    isolated(plain(), |_| {
        let (other, socket) = start_with_socket(|_, socket| {
            for byte in hello(own_pid()) {
                send_as_self(&socket, &[byte], &[]);
            }
            let mut ticket = [0; Ticket::LENGTH];
            (&socket).read_exact(&mut ticket).unwrap();
            (&socket).write_all(&[0]).unwrap();
            (&socket).write_all(&[0]).unwrap();
        });
        share::send(&socket, &hello_memory(), PATIENCE).unwrap();
        other.join();
        let (mine, theirs) = UnixStream::pair().unwrap();
        let endless = std::thread::spawn(move || while (&theirs).write_all(b"A").is_ok() {});
        fails(share::send(&mine, &hello_memory(), PATIENCE), "does not speak this protocol");
        drop(mine);
        endless.join().unwrap();
    });
}

#[test]
fn garbage_from_either_side_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let memory = hello_memory();
        let me = own_pid();
        let mut newer = hello(me);
        newer[4] = 2;
        for bytes in [[0; HELLO], [0xFF; HELLO], newer] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            (&theirs).write_all(&bytes).unwrap();
            fails(share::send(&mine, &memory, PATIENCE), "does not speak this protocol");
        }
        for nobody in [0, -1, i32::MIN] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            send_as_self(&theirs, &hello(nobody), &[]);
            assert!(matches!(share::send(&mine, &memory, PATIENCE), Err(Error::Invalid(_))));
        }
        assert!(emulator.state().memory.shares.is_empty());

        let device = device(1);
        let mut damaged = memory.export().unwrap().ticket().unwrap().to_bytes();
        damaged[20] ^= 1;
        for bytes in [[0; Ticket::LENGTH], [0xFF; Ticket::LENGTH], damaged] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            (&theirs).write_all(&bytes).unwrap();
            let error = share::receive(&mine, &device, PATIENCE).unwrap_err();
            assert!(matches!(error, Error::Ticket(_)), "{error:?}");
            let mut sent = [0; HELLO + 2];
            (&theirs).read_exact(&mut sent).unwrap();
            assert_eq!(sent[..HELLO], hello(me));
            assert_eq!(sent[HELLO..], [0xFF, 0xFF], "the exporter gets the result");
        }
        // The exporter's error names the failure of the importer.
        for (result, words) in [([13, 0], "EACCES"), ([0xFF, 0xFF], "refused the ticket"), ([14, 0], "EFAULT")] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            send_as_self(&theirs, &hello(me), &[]);
            (&theirs).write_all(&result).unwrap();
            fails(share::send(&mine, &memory, PATIENCE), words);
        }
    });
}

#[test]
fn descriptors_that_a_peer_sends_are_not_received() {
    isolated(plain(), |_| {
        let memory = hello_memory();
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mut before = None;
        // The first time, the library opens the file by which it finds this process's number.
        for (first, last) in [(&[][..], &[][..]), (&[], &[0, 1, 2]), (&[0, 1, 2], &[])] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            send_as_self(&theirs, &hello(own_pid()), first);
            send_as_self(&theirs, &[0, 0], last);
            let sent = share::send(&mine, &memory, PATIENCE);
            sent.unwrap();
            assert_eq!(descriptors(), *before.get_or_insert_with(descriptors));
        }
    });
}

#[test]
fn a_ticket_of_another_process_is_not_received() {
    isolated(plain(), |_| {
        let victim = hello_memory();
        let export = victim.export().unwrap();
        let ticket = export.ticket().unwrap().to_bytes();
        let (here, there) = UnixStream::pair().unwrap();
        // The importer is trusted by the exporter, but asks another process for memory.
        let (number, told) = UnixStream::pair().unwrap();
        let importer = fork(|| {
            let device = device(1);
            let me = BareTgid::of_this_process(&device.session()).unwrap();
            (&told).write_all(&me.as_raw().to_le_bytes()).unwrap();
            fails(share::receive(&here, &device, PATIENCE), "another process sent it");
        });
        let mut tgid = [0; 4];
        (&number).read_exact(&mut tgid).unwrap();
        export.trust(&[BareTgid::from_raw(i32::from_le_bytes(tgid)).unwrap()]).unwrap();
        let attacker = fork(|| {
            (&there).read_exact(&mut [0; HELLO]).unwrap();
            send_as_self(&there, &ticket, &[]);
            (&there).read_exact(&mut [0; 2]).unwrap();
        });
        importer.join();
        attacker.join();
    });
}

#[test]
fn a_share_that_was_received_from_one_process_is_not_received_from_another() {
    isolated(plain(), |_| {
        let session = Session::open().unwrap();
        let device = device(0);
        let exporter = |socket: UnixStream, share: Option<u64>| {
            fork(move || {
                let memory = hello_memory();
                let Some(share) = share else {
                    return share::send(&socket, &memory, PATIENCE).unwrap();
                };
                // A ticket of its own, in which only the share's number is another process's.
                let mut ticket = memory.export().unwrap().ticket().unwrap();
                ticket.handle = share::ShareableHandle::from_u64(share).unwrap();
                (&socket).read_exact(&mut [0; HELLO]).unwrap();
                send_as_self(&socket, &ticket.to_bytes(), &[]);
                (&socket).read_exact(&mut [0; 2]).unwrap();
            })
        };
        let (here, there) = UnixStream::pair().unwrap();
        let honest = exporter(there, None);
        let received = share::receive(&here, &device, PATIENCE).unwrap();
        honest.join();
        let (here, there) = UnixStream::pair().unwrap();
        let attacker = exporter(there, Some(0));
        let error = share::receive(&here, &device, PATIENCE).unwrap_err();
        assert!(error.to_string().contains("an earlier ticket named another"), "{error}");
        attacker.join();
        drop((received, session));
    });
}

#[test]
fn a_process_that_got_the_number_of_one_that_died_is_not_trusted() {
    isolated(plain(), |emulator| {
        let memory = hello_memory();
        let export = memory.export().unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        // It says hello and dies before it is trusted.
        let friend = fork(|| send_as_self(&there, &hello(own_pid()), &[]));
        let number = friend.pid();
        friend.join();
        let end_of_friend = there;
        emulator.record();
        // Its number is another process's now, where this test may choose numbers.
        let last = std::path::Path::new("/proc/sys/kernel/ns_last_pid");
        let (go, wait) = UnixStream::pair().unwrap();
        let mut stranger = None;
        for _ in 0..200 {
            if std::fs::write(last, (number - 1).to_string()).is_err() {
                println!("SKIPPED in part: this user may not choose process ids, so the number stays free");
                break;
            }
            let child = fork(|| drop((&wait).read_exact(&mut [0])));
            if child.pid() == number {
                stranger = Some(child);
                break;
            }
            (&go).write_all(&[0]).unwrap();
            child.join();
        }
        // The socket is held open by this process, so only the process itself can be missed.
        let error = share::send(&here, &memory, PATIENCE).unwrap_err();
        assert!(matches!(error, Error::Exchange(_)), "{error}");
        let listed = emulator.records().iter().filter(|record| record.cmd == Some("MEM_SET_PID")).count();
        assert_eq!(listed, 0, "no process was put on the list");
        if let Some(stranger) = stranger {
            (&go).write_all(&[0]).unwrap();
            stranger.join();
        }
        drop((end_of_friend, export));
    });
}

/// Answers a request by a ticket that this process made up.
fn send_ticket(socket: &UnixStream, ticket: &Ticket) {
    (&*socket).read_exact(&mut [0; HELLO]).unwrap();
    send_as_self(socket, &ticket.to_bytes(), &[]);
    (&*socket).read_exact(&mut [0; 2]).unwrap();
}

#[test]
fn the_kernel_does_not_say_who_exported_so_a_first_ticket_is_believed_and_a_second_is_not() {
    isolated(plain(), |_| {
        let victim = hello_memory();
        let export = victim.export().unwrap();
        let share = export.handle();
        let (importer, socket) = start_with_socket(|channel, socket| {
            let device = device(1);
            channel.send_tgid();
            let honest = channel.receive_ticket();
            // It names the sender as the exporter, and a share that this process may import. All
            // that the kernel says of a share is its size, its pages and its device.
            let received = share::receive(&socket, &device, PATIENCE).unwrap();
            // The exporter's own ticket does not agree with that, so it is noticed now.
            let error = share::import(&device, &honest).unwrap_err();
            assert!(error.to_string().contains("an earlier ticket named another"), "{error}");
            drop(received);
            // The other way round it is never believed.
            let received = share::import(&device, &honest).unwrap();
            let error = share::receive(&socket, &device, PATIENCE).unwrap_err();
            assert!(error.to_string().contains("an earlier ticket named another"), "{error}");
            drop(received);
            // A share of which the ticket tells the wrong size is not believed either.
            let error = share::receive(&socket, &device, PATIENCE).unwrap_err();
            assert!(error.to_string().contains("the ticket says 2097152 bytes"), "{error}");
        });
        export.trust(&[importer.receive_tgid()]).unwrap();
        importer.send_ticket(&export.ticket().unwrap());
        let attacker = fork(|| {
            let mut ticket = device(0).create(4 * MIB).unwrap().export().unwrap().ticket().unwrap();
            ticket.handle = share;
            send_ticket(&socket, &ticket);
            send_ticket(&socket, &ticket);
            ticket.size = MIB2;
            send_ticket(&socket, &ticket);
        });
        attacker.join();
        importer.join();
    });
}

#[test]
fn a_process_that_hung_up_or_ended_while_it_was_being_trusted_gets_no_ticket() {
    isolated(plain(), |emulator| {
        let memory = hello_memory();
        // It lives, but does not listen: nothing is listed for it.
        let (other, socket) = start_with_socket(|channel, socket| {
            send_as_self(&socket, &hello(own_pid()), &[]);
            drop(socket);
            channel.pause();
        });
        other.wait();
        emulator.record();
        fails(share::send(&socket, &memory, PATIENCE), "died before the ticket");
        assert_eq!(support::count(emulator, "MEM_SET_PID"), 0);
        other.signal();
        other.join();
        // It ends while the kernel puts it on the list. This process keeps its end of the socket,
        // so only the process itself can be missed.
        let (here, there) = UnixStream::pair().unwrap();
        let other = start(|channel| {
            send_as_self(&there, &hello(own_pid()), &[]);
            channel.pause();
        });
        other.wait();
        static VICTIM: AtomicI32 = AtomicI32::new(0);
        VICTIM.store(other.pid(), Ordering::Relaxed);
        let end_it = |fields: Fields| {
            if fields.get("command").is_some_and(|command| command == "MEM_SET_PID") {
                let victim = Pid::from_raw(VICTIM.load(Ordering::Relaxed));
                kill(victim, Signal::SIGKILL).unwrap();
                waitid(Id::Pid(victim), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
            }
        };
        tracing::subscriber::set_global_default(AtEvent(end_it)).unwrap();
        fails(share::send(&here, &memory, PATIENCE), "ended while it was being trusted");
        other.kill();
        assert_eq!(support::count(emulator, "MEM_SET_PID"), 1);
        drop(there);
    });
}
