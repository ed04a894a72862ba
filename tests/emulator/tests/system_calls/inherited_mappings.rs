//! Children of clients in other processes than the emulator's: they inherit none of the driver's
//! mappings, as with the real driver.

use crate::again;
use crate::client::{Session, open_manager};
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Client, Config, Emulator, fork};
use ascend_ioctl::{Generation, svm};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::unistd::Pid;
use std::time::Duration;

/// Set in the other process, to its generation.
const MARKER: &str = "ASCEND_EMULATOR_CHILD";

/// Runs `body` in another process than the emulator's, once for each generation. `test` is the
/// name of the calling test.
fn in_another_process(test: &str, body: impl FnOnce(Generation)) {
    if let Ok(index) = std::env::var(MARKER) {
        return body(Generation::ALL[index.parse::<usize>().unwrap()]);
    }
    for (index, generation) in Generation::ALL.iter().enumerate() {
        let config = Config { generation: *generation, device_process: DeviceProcess::Automatic, ..Config::default() };
        let emulator = Emulator::start(config).unwrap();
        let mut again = again(&format!("inherited_mappings::{test}"));
        let status = emulator.spawn(again.env(MARKER, index.to_string())).unwrap().wait().unwrap();
        assert!(status.success(), "{generation}: {status}");
        emulator.assert_no_traps();
        assert!(emulator.state().is_empty(), "{generation}: {:?}", emulator.state());
    }
}

/// A session that holds these bytes in its first page.
fn session_with(generation: Generation, bytes: &[u8; 6]) -> Session {
    let session = Session::start(generation).unwrap();
    let heap = session.heap().unwrap();
    session.map(heap, session.create(1).unwrap(), 1).unwrap();
    session.copy(heap, bytes.as_ptr() as u64, bytes.len(), svm::COPY_HOST_TO_DEVICE).unwrap();
    session
}

fn assert_holds(session: &Session, bytes: &[u8; 6]) {
    let mut read = [0; 6];
    session.copy(read.as_mut_ptr() as u64, svm::NORMAL_START, read.len(), svm::COPY_DEVICE_TO_HOST).unwrap();
    assert_eq!(&read, bytes);
}

#[test]
fn a_child_and_its_child_have_sessions_of_their_own() {
    in_another_process("a_child_and_its_child_have_sessions_of_their_own", |generation| {
        let session = session_with(generation, b"parent");
        fork(|| {
            let own = session_with(generation, b"child.");
            fork(|| assert_holds(&session_with(generation, b"third."), b"third.")).join();
            assert_holds(&own, b"child.");
        })
        .join();
        // One that never used the driver lies between.
        fork(|| fork(|| assert_holds(&session_with(generation, b"fourth"), b"fourth")).join()).join();
        assert_holds(&session, b"parent");
    });
}

#[test]
fn a_child_in_its_parents_memory_leaves_the_mappings_alone() {
    extern "C" fn open_and_close(_: *mut libc::c_void) -> i32 {
        drop(open_manager());
        0
    }
    in_another_process("a_child_in_its_parents_memory_leaves_the_mappings_alone", |generation| {
        let session = session_with(generation, b"parent");
        let before = segments();
        assert!(!before.is_empty());
        let mut stack = vec![0u128; 1 << 14];
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: the child runs on a stack of its own while this thread waits, and ends with the
        // function.
        let pid =
            unsafe { libc::clone(open_and_close, stack.as_mut_ptr_range().end.cast(), flags, std::ptr::null_mut()) };
        assert!(pid > 0);
        let status = nix::sys::wait::waitpid(Pid::from_raw(pid), None).unwrap();
        assert_eq!(status, nix::sys::wait::WaitStatus::Exited(Pid::from_raw(pid), 0));
        assert_eq!(segments(), before);
        assert_holds(&session, b"parent");
    });
}

/// The lines of `/proc/self/maps` in the driver's segments.
fn segments() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let start = |line: &str| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
    maps.lines().filter(|line| (svm::SVM_START..svm::DYNAMIC_START).contains(&start(line))).map(str::to_owned).collect()
}

#[test]
fn signals_and_kills_do_not_disturb_a_child_that_opens_its_session() {
    extern "C" fn ignore(_: i32) {}
    /// A client that gets a signal every few hundred microseconds.
    fn pestered(body: impl FnOnce()) -> Client {
        fork(|| {
            let action = SigAction::new(SigHandler::Handler(ignore), SaFlags::SA_RESTART, SigSet::empty());
            // SAFETY: the handler does nothing.
            unsafe { sigaction(Signal::SIGALRM, &action) }.unwrap();
            let every = libc::timeval { tv_sec: 0, tv_usec: 300 };
            let timer = libc::itimerval { it_interval: every, it_value: every };
            // SAFETY: the kernel reads one struct.
            assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) }, 0);
            body();
        })
    }
    in_another_process("signals_and_kills_do_not_disturb_a_child_that_opens_its_session", |generation| {
        let session = session_with(generation, b"parent");
        for round in 0..10 {
            pestered(|| assert_holds(&session_with(generation, b"child."), b"child.")).join();
            let killed = pestered(|| drop(session_with(generation, b"killed")));
            std::thread::sleep(Duration::from_micros(round * 200));
            let _ = kill(Pid::from_raw(killed.pid()), Signal::SIGKILL);
            killed.wait();
        }
        assert_holds(&session, b"parent");
    });
}
