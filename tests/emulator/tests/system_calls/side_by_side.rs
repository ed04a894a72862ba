//! Commands that take time, while the driver answers others.

use crate::client::Session;
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator, Line, fork, isolated, isolated_leaky, on_each_generation};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, Op};
use nix::errno::Errno;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// A command, which may run in another thread.
type Command<'a> = dyn Fn() -> Result<(), Errno> + Sync + 'a;

const PAGE: usize = svm::HUGE_PAGE as usize;

fn config() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

/// A session with one page of device 0 at the start of its heap.
fn session(generation: Generation) -> (Session, u64, i32) {
    let session = Session::start(generation).unwrap();
    let heap = session.heap().unwrap();
    let id = session.create(1).unwrap();
    session.map(heap, id, 1).unwrap();
    (session, heap, id)
}

fn write(session: &Session, address: u64, bytes: &[u8]) -> Result<(), Errno> {
    session.copy(address, bytes.as_ptr() as u64, bytes.len(), svm::COPY_HOST_TO_DEVICE)
}

fn read(session: &Session, address: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    session.copy(bytes.as_mut_ptr() as u64, address, length, svm::COPY_DEVICE_TO_HOST).unwrap();
    bytes
}

/// Whether a thread sleeps in an ioctl, so that the emulator has its call or gets it next.
fn is_in_ioctl(tid: i32) -> bool {
    let call = std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall")).unwrap();
    call.split(' ').next() == Some(&libc::SYS_ioctl.to_string())
}

/// Runs `body` on a thread of its own, and returns once the driver has its call.
fn waiting<'scope, T: Send + 'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    emulator: &Emulator,
    body: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = scope.spawn(move || {
        sender.send(nix::unistd::gettid().as_raw()).unwrap();
        body()
    });
    let tid = receiver.recv().unwrap();
    while !is_in_ioctl(tid) {
        thread::yield_now();
    }
    // An order is carried out after the calls that came before it.
    emulator.state();
    thread
}

#[test]
fn while_a_copy_is_held_another_thread_is_answered() {
    on_each_generation(config(), |generation, emulator| {
        let (held, done) = (Line::new(), Line::new());
        let hold = emulator.hold("MEMCPY");
        let client = fork(|| {
            let (session, heap, _) = session(generation);
            thread::scope(|scope| {
                let copy = scope.spawn(|| write(&session, heap, &[7; PAGE]));
                held.receive();
                // Only the next copy is held, not this one.
                let other = session.create(1).unwrap();
                session.map(heap + svm::HUGE_PAGE, other, 1).unwrap();
                write(&session, heap + svm::HUGE_PAGE, &[9; PAGE]).unwrap();
                assert!(!copy.is_finished());
                assert_eq!(read(&session, heap, 1), [0], "nothing is copied yet");
                done.send(0);
                copy.join().unwrap().unwrap();
            });
            assert_eq!(read(&session, heap, PAGE), [7; PAGE]);
            assert_eq!(read(&session, heap + svm::HUGE_PAGE, PAGE), [9; PAGE]);
        });
        hold.wait();
        held.send(0);
        done.receive();
        hold.release();
        client.join();
    });
}

#[test]
fn a_held_copy_keeps_its_mappings_and_its_reservation() {
    isolated_leaky(config(), |emulator| {
        let (session, heap, id) = session(Generation::NEWEST);
        let hold = emulator.hold("MEMCPY");
        thread::scope(|scope| {
            let copy = scope.spawn(|| write(&session, heap, &[7; PAGE]));
            hold.wait();
            let unmap = svm::MemUnmap { address: heap, ..Default::default() };
            assert_eq!(session.call(Op::MemUnmap, svm::HOST_ID, &unmap), Err(Errno::EBUSY));
            assert_eq!(session.free(heap), Err(Errno::EBUSY));
            assert_eq!(session.release(id, 1), Err(Errno::EBUSY));
            hold.release();
            copy.join().unwrap().unwrap();
        });
        session.unmap(heap).unwrap();
        session.release(id, 1).unwrap();
    });
}

#[test]
fn a_copy_is_held_in_its_middle_and_at_its_end() {
    isolated_leaky(config(), |emulator| {
        let (session, heap, _) = session(Generation::NEWEST);
        for (bytes, copied) in [(0, 0), (1, 1), (300_000, 300_000), (u64::MAX, PAGE)] {
            write(&session, heap, &[0; PAGE]).unwrap();
            let hold = emulator.hold_after("MEMCPY", bytes);
            thread::scope(|scope| {
                let copy = scope.spawn(|| write(&session, heap, &[7; PAGE]));
                hold.wait();
                let seen = read(&session, heap, PAGE);
                assert_eq!(seen.iter().filter(|byte| **byte == 7).count(), copied, "after {bytes} bytes");
                assert!(seen[..copied].iter().all(|byte| *byte == 7));
                assert!(!copy.is_finished());
                hold.release();
                copy.join().unwrap().unwrap();
            });
            assert_eq!(read(&session, heap, PAGE), [7; PAGE]);
        }
    });
}

/// A copy of 64 bytes in four rows.
fn four_rows(destination: u64, bytes: &[u8; 64]) -> svm::Memcpy2d {
    svm::Memcpy2d {
        destination,
        source: bytes.as_ptr() as u64,
        destination_pitch: 16,
        source_pitch: 16,
        width: 16,
        height: 4,
        direction: svm::COPY_HOST_TO_DEVICE,
        ..Default::default()
    }
}

#[test]
fn held_rows_keep_their_reservation_but_not_their_mappings() {
    isolated_leaky(config(), |emulator| {
        let (session, heap, id) = session(Generation::NEWEST);
        let bytes = [7u8; 64];
        let rows = four_rows(heap, &bytes);
        let hold = emulator.hold_after("MEMCPY2D", 40);
        thread::scope(|scope| {
            let copy = scope.spawn(|| session.call(Op::Memcpy2d, 0, &rows).map(drop));
            hold.wait();
            // Only of one dimension the driver knows which mappings are used.
            let unmap = svm::MemUnmap { address: heap, ..Default::default() };
            session.call(Op::MemUnmap, svm::HOST_ID, &unmap).unwrap();
            assert_eq!(session.free(heap), Err(Errno::EBUSY));
            hold.release();
            assert_eq!(copy.join().unwrap(), Err(Errno::EINVAL), "the next row is not mapped");
        });
        session.free(heap).unwrap();
        session.map(heap, id, 1).unwrap();
        assert_eq!(read(&session, heap, 64), [[7; 40].as_slice(), &[0; 24]].concat());
        session.unmap(heap).unwrap();
    });
}

#[test]
fn a_fill_and_rows_and_a_batch_are_held_in_their_middle() {
    isolated_leaky(config(), |emulator| {
        let (session, heap, _) = session(Generation::NEWEST);
        let bytes = [7u8; 64];
        let (sources, targets, sizes) = ([bytes.as_ptr() as u64; 2], [heap, heap + 32], [32u64; 2]);
        let rows = four_rows(heap, &bytes);
        let batch = svm::MemcpyBatch {
            destinations: targets.as_ptr() as u64,
            sources: sources.as_ptr() as u64,
            sizes: sizes.as_ptr() as u64,
            count: 2,
            ..Default::default()
        };
        let fill = svm::Memset { destination: heap, size: 64, value: 7, ..Default::default() };
        let cases: [(&str, &Command); 3] = [
            ("MEMSET8", &|| session.call(Op::Memset8, 0, &fill).map(drop)),
            ("MEMCPY2D", &|| session.call(Op::Memcpy2d, 0, &rows).map(drop)),
            ("MEMCPY_BATCH", &|| session.call(Op::MemcpyBatch, 0, &batch).map(drop)),
        ];
        for (name, command) in cases {
            write(&session, heap, &[0; 64]).unwrap();
            let hold = emulator.hold_after(name, 40);
            thread::scope(|scope| {
                let thread = scope.spawn(command);
                hold.wait();
                let seen = read(&session, heap, 64);
                assert_eq!(seen.iter().filter(|byte| **byte == 7).count(), 40, "{name}");
                // Only of one dimension the driver knows which mappings are used.
                let unmap = svm::MemUnmap { address: heap, ..Default::default() };
                if name != "MEMCPY2D" {
                    assert_eq!(session.call(Op::MemUnmap, svm::HOST_ID, &unmap), Err(Errno::EBUSY), "{name}");
                }
                assert_eq!(session.free(heap), Err(Errno::EBUSY), "{name}");
                hold.release();
                thread.join().unwrap().unwrap();
            });
            assert_eq!(read(&session, heap, 64), [7; 64], "{name}");
        }
        session.unmap(heap).unwrap();
    });
}

#[test]
fn an_asynchronous_copy_runs_on_after_its_answer() {
    isolated_leaky(config(), |emulator| {
        let (session, heap, _) = session(Generation::NEWEST);
        let bytes = vec![7u8; PAGE];
        let hold = emulator.hold_after("ASYNC_MEMCPY", 100);
        let (destination, source, size) = (heap, bytes.as_ptr() as u64, PAGE as u64);
        let copy = svm::AsyncMemcpy { destination, source, size, ..Default::default() };
        let task = session.call(Op::AsyncMemcpy, 0, &copy).unwrap();
        hold.wait();
        assert_eq!(read(&session, heap, 101), [[7; 100].as_slice(), &[0]].concat());
        assert_eq!(session.unmap(heap), Err(Errno::EBUSY));
        // The device does not close under it.
        assert_eq!(session.call(Op::PrepareCloseDevice, 0, &svm::SetupDevice::default()).map(drop), Err(Errno::EBUSY));
        thread::scope(|scope| {
            let refresh =
                waiting(scope, emulator, || session.call(Op::MemcpyResultRefresh, 0, &task).map(|it| it.state));
            assert_eq!(read(&session, heap, 101), [[7; 100].as_slice(), &[0]].concat());
            assert!(!refresh.is_finished());
            hold.release();
            assert_eq!(refresh.join().unwrap(), Ok(svm::ASYNC_DONE));
        });
        assert_eq!(read(&session, heap, PAGE), [7; PAGE]);
        session.unmap(heap).unwrap();
    });
}

#[test]
fn a_heap_waits_for_a_held_copy_and_later_commands_for_the_heap() {
    isolated_leaky(config(), |emulator| {
        let (session, heap, _) = session(Generation::NEWEST);
        let hold = emulator.hold("MEMCPY");
        let done = std::sync::Mutex::new(Vec::new());
        let note = |what: &'static str| done.lock().unwrap().push(what);
        thread::scope(|scope| {
            let (session, note) = (&session, &note);
            let copy = scope.spawn(move || {
                write(session, heap, &[7; PAGE]).unwrap();
                note("copy");
            });
            hold.wait();
            let index = ((heap - svm::SVM_START) / svm::HEAP_UNIT) as u32 + 1;
            let enable = svm::UpdateHeap {
                operation: svm::HEAP_ENABLE,
                kind: svm::HEAP_HUGE,
                sub_kind: svm::SUB_RESERVE,
                index,
                size: svm::HEAP_UNIT,
            };
            let writer = waiting(scope, emulator, move || {
                session.call(Op::UpdateHeap, 0, &enable).unwrap();
                note("heap");
            });
            let reader = waiting(scope, emulator, move || session.create(1).unwrap());
            // What takes no lock is answered.
            session.call(Op::QueryMemUsedInfo, 0, &svm::MemUsedInfo { memory: 2, ..Default::default() }).unwrap();
            assert!(!writer.is_finished() && !reader.is_finished() && !copy.is_finished());
            assert!(done.lock().unwrap().is_empty());
            hold.release();
            for thread in [copy, writer] {
                thread.join().unwrap();
            }
            reader.join().unwrap();
        });
        assert_eq!(done.into_inner().unwrap().len(), 2);
        assert_eq!(read(&session, heap, PAGE), [7; PAGE]);
    });
}

#[test]
fn other_processes_do_not_wait_for_a_held_heap() {
    isolated_leaky(config(), |emulator| {
        let (go, done) = (Line::new(), Line::new());
        let other = fork(|| {
            go.receive();
            let (session, heap, _) = session(Generation::NEWEST);
            write(&session, heap, &[9; 64]).unwrap();
            done.send(1);
        });
        let hold = emulator.hold("UPDATE_HEAP");
        let opened = Session::start(Generation::NEWEST).unwrap();
        thread::scope(|scope| {
            let held = scope.spawn(|| opened.heap().unwrap());
            hold.wait();
            go.send(1);
            assert_eq!(done.receive(), 1);
            let waits = waiting(scope, emulator, || opened.create(1).unwrap());
            assert!(!held.is_finished() && !waits.is_finished());
            hold.release();
            held.join().unwrap();
            waits.join().unwrap();
        });
        other.join();
    });
}

#[test]
fn a_process_that_is_killed_in_a_held_copy_leaves_nothing() {
    isolated(config(), |emulator| {
        let hold = emulator.hold("MEMCPY");
        let client = fork(|| {
            let (session, heap, _) = session(Generation::NEWEST);
            write(&session, heap, &[7; PAGE]).unwrap();
        });
        hold.wait();
        client.kill();
        assert!(emulator.state().is_empty());
        hold.release();
        fork(|| {
            let (session, heap, _) = session(Generation::NEWEST);
            write(&session, heap, &[7; PAGE]).unwrap();
        })
        .join();
    });
}

#[test]
fn a_hold_that_nothing_met_is_gone_with_its_value() {
    isolated_leaky(config(), |emulator| {
        let (session, heap, _) = session(Generation::NEWEST);
        drop(emulator.hold("MEMCPY"));
        write(&session, heap, &[7; 64]).unwrap();
        // A refused copy is not held, the next one is.
        let hold = emulator.hold("MEMCPY");
        assert_eq!(write(&session, heap + svm::HUGE_PAGE, &[7; 64]), Err(Errno::EINVAL));
        thread::scope(|scope| {
            let copy = scope.spawn(|| write(&session, heap, &[8; 64]));
            hold.wait();
            hold.release();
            copy.join().unwrap().unwrap();
        });
    });
}

#[test]
fn with_a_copy_time_every_copy_takes_it_and_no_other_command() {
    let time = Duration::from_millis(200);
    isolated_leaky(Config { copy_time: time, ..config() }, |_| {
        let (session, heap, _) = session(Generation::NEWEST);
        let start = Instant::now();
        thread::scope(|scope| {
            let copies = [0u64, 1, 2, 3].map(|at| {
                let session = &session;
                scope.spawn(move || write(session, heap + at * 64, &[7; 64]).unwrap())
            });
            for copy in copies {
                copy.join().unwrap();
            }
        });
        assert!(start.elapsed() >= time);
        assert_eq!(read(&session, heap, 256), [7; 256]);
        let bytes = [9u8; 64];
        let copy =
            svm::AsyncMemcpy { destination: heap, source: bytes.as_ptr() as u64, size: 64, ..Default::default() };
        let task = session.call(Op::AsyncMemcpy, 0, &copy).unwrap();
        let task = session.call(Op::MemcpyResultRefresh, 0, &task).unwrap();
        assert_eq!(task.state, svm::ASYNC_DONE);
        assert_eq!(read(&session, heap, 64), [9; 64]);
        assert!(start.elapsed() >= 4 * time, "three more copies, one after the other");
    });
}
