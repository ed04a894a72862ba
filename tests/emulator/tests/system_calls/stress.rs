//! Clients that are killed at random points: nothing of them is left when waitpid has returned.

use crate::client::{MANAGER, Session, ioctl, open_manager, open_module};
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Client, Config, Emulator, Line, fork, isolated, on_each_generation};
use ascend_ioctl::{svm, uda};
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::time::{Duration, Instant};

/// Clients at a time.
const CLIENTS: usize = 4;

/// A small pseudo-random generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Starts clients, kills each after a random time of at most `longest`, and checks the driver's
/// state after each round.
fn kill_at_random(emulator: &Emulator, rounds: usize, longest: Duration, body: impl Fn(usize, &Line)) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for round in 0..rounds {
        let started = Line::new();
        let clients: Vec<Client> = (0..CLIENTS).map(|_| fork(|| body(round, &started))).collect();
        for _ in 0..CLIENTS {
            started.receive();
        }
        for client in clients {
            let end = Instant::now() + Duration::from_nanos(random.below(longest.as_nanos() as u64));
            while Instant::now() < end {
                std::hint::spin_loop();
            }
            client.kill();
        }
        let state = emulator.state();
        assert!(state.is_empty(), "round {round}: {state:#?}");
    }
}

#[test]
fn clients_killed_between_open_and_close_leave_no_file() {
    isolated(Config::default(), |emulator| {
        kill_at_random(emulator, 150, Duration::from_micros(400), |_, started| {
            started.send(0);
            loop {
                let inherited = open(MANAGER, OFlag::O_RDWR, Mode::empty()).unwrap();
                let duplicate = inherited.try_clone().unwrap();
                drop((open_manager(), inherited));
                drop(duplicate);
            }
        });
    });
}

#[test]
fn clients_with_several_threads_killed_at_random_leave_no_file() {
    isolated(Config::default(), |emulator| {
        kill_at_random(emulator, 60, Duration::from_millis(1), |_, started| {
            let used = || {
                let file = open_module("uda")?;
                ioctl(&file, &uda::GET_USER_INFO, &mut uda::UserInfo::default())
            };
            // A file that a thread closes without CLOSE takes those of the others with it.
            let churn = || loop {
                assert!(matches!(used(), Ok(_) | Err(Errno::EBADFD)));
            };
            std::thread::scope(|scope| {
                scope.spawn(churn);
                scope.spawn(churn);
                started.send(0);
                churn();
            });
        });
    });
}

#[test]
fn clients_killed_while_they_use_memory_leave_no_memory() {
    let config = Config { device_process: DeviceProcess::Automatic, ..Config::default() };
    on_each_generation(config, |generation, emulator| {
        kill_at_random(emulator, 120, Duration::from_millis(1), |round, started| {
            // On a slow machine, a client that reports first is always killed in its bring-up.
            let in_bringup = round % 2 == 0;
            if in_bringup {
                started.send(0);
            }
            let session = Session::start(generation).unwrap();
            let heap = session.heap().unwrap();
            if !in_bringup {
                started.send(0);
            }
            let mut text = *b"what a dead client wrote";
            loop {
                let id = session.create(4).unwrap();
                session.map(heap, id, 4).unwrap();
                session.copy(heap, text.as_ptr() as u64, text.len(), svm::COPY_HOST_TO_DEVICE).unwrap();
                session.export(id).unwrap();
                session.copy(text.as_mut_ptr() as u64, heap, text.len(), svm::COPY_DEVICE_TO_HOST).unwrap();
                session.unmap(heap).unwrap();
                session.release(id, 4).unwrap();
            }
        });
    });
}
