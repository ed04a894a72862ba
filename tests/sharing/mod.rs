//! What tests of sharing have in common: other processes that one can talk to, and contents of memory.

// Each test binary uses its own part of this.
#![allow(dead_code)]

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Client, Config, fork};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::share::{BareTgid, Ticket};
use ascend_vmm::{Device, PhysicalMemory, Reservation, ReserveOptions, Session};
use nix::sched::{CloneFlags, unshare};
use std::cell::Cell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

pub const MIB: u64 = 1 << 20;

/// Devices that start their processes by themselves: how that is done otherwise is another test's business.
pub fn plain() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

/// One end of a line in both directions. It ends with the process at the other end, so nobody waits for the dead.
pub struct Talk(UnixStream);

impl Talk {
    /// Both ends. Each process that goes on must drop the other's.
    pub fn pair() -> (Talk, Talk) {
        let (one, other) = UnixStream::pair().unwrap();
        (Talk(one), Talk(other))
    }

    #[track_caller]
    pub fn say(&self, number: u64) {
        (&self.0).write_all(&number.to_le_bytes()).expect("the other process is there");
    }

    #[track_caller]
    pub fn hear(&self) -> u64 {
        let mut bytes = [0; 8];
        (&self.0).read_exact(&mut bytes).expect("the other process is there");
        u64::from_le_bytes(bytes)
    }

    /// Says that one is so far, and waits until one may go on.
    pub fn pause(&self) {
        self.say(0);
        self.hear();
    }

    pub fn say_ticket(&self, ticket: &Ticket) {
        for word in ticket.to_bytes().chunks(8) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            self.say(u64::from_le_bytes(bytes));
        }
    }

    pub fn hear_ticket(&self) -> Ticket {
        let mut bytes = [0; Ticket::LENGTH];
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.hear().to_le_bytes()[..word.len()]);
        }
        Ticket::from_bytes(&bytes).unwrap()
    }

    /// Makes the line this process's standard input, which survives an exec.
    pub fn become_input(&self) {
        nix::unistd::dup2_stdin(&self.0).unwrap();
    }

    /// Says who this process is.
    pub fn say_who(&self, session: &Session) {
        self.say(BareTgid::of_this_process(session).unwrap().as_raw() as u64);
    }

    pub fn hear_who(&self) -> BareTgid {
        BareTgid::from_raw(self.hear() as i32).unwrap()
    }
}

/// Another process, and the line to it.
pub struct Other {
    client: Client,
    pub talk: Talk,
}

/// Starts another process on the same host.
pub fn start(body: impl FnOnce(&Talk)) -> Other {
    let ends = Cell::new(Some(Talk::pair()));
    let client = fork(|| {
        let (_, talk) = ends.take().unwrap();
        body(&talk);
    });
    let (talk, _) = ends.take().unwrap();
    Other { client, talk }
}

impl Other {
    pub fn pid(&self) -> i32 {
        self.client.pid()
    }

    pub fn kill(self) {
        self.client.kill();
    }

    pub fn join(self) {
        self.client.join();
    }

    /// Waits for its end; its children may still be at the other end of the line.
    pub fn join_and_keep_line(self) -> Talk {
        self.client.join();
        self.talk
    }

    /// Waits until it is so far, and lets it go on.
    pub fn proceed(&self) {
        self.talk.hear();
        self.talk.say(0);
    }
}

/// Runs `body` as process 1 of a new pid namespace; a reason if this host does not allow that.
pub fn in_pid_namespace(body: impl FnOnce()) -> Result<(), String> {
    let alone = unshare(CloneFlags::CLONE_NEWPID);
    // Without privileges it takes a user namespace in which one has them.
    let done = alone.or_else(|_| unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWPID));
    done.map_err(|errno| format!("unshare: {errno}"))?;
    fork(body).join();
    Ok(())
}

pub fn device(number: u32) -> Device {
    Session::current().unwrap().device(LogicalId(number)).unwrap()
}

/// Addresses at which memory can be mapped.
fn room_for(memory: &PhysicalMemory) -> Reservation {
    let options = ReserveOptions::new().alignment(memory.page().size());
    memory.session().reserve_with(memory.size(), &options).unwrap()
}

/// Writes to the beginning of memory, through a mapping that goes away again.
#[track_caller]
pub fn write(memory: &PhysicalMemory, bytes: &[u8]) {
    let reservation = room_for(memory);
    reservation.map(0, memory).unwrap().write(0, bytes).unwrap();
}

/// Reads the beginning of memory.
#[track_caller]
pub fn read(memory: &PhysicalMemory, length: usize) -> Vec<u8> {
    let reservation = room_for(memory);
    let mapping = reservation.map(0, memory).unwrap();
    let mut bytes = vec![0; length];
    mapping.read(0, &mut bytes).unwrap();
    bytes
}
