//! Threads that attach to an emulator while other threads of the process fork.

use crate::again;
use ascend_emulator::{Config, Emulator, fork};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Set in the process that runs the test.
const MARKER: &str = "ASCEND_EMULATOR_ATTACH";

/// A child with a copy of the listener would keep it open after the emulator has ended, and what is
/// caught by its filter would wait for an answer that nobody gives.
#[test]
fn a_fork_while_a_thread_attaches_leaves_nobody_waiting() {
    if std::env::var_os(MARKER).is_none() {
        // A process of its own: other tests have descriptors that the forks here would copy.
        let mut alone = again("attach::a_fork_while_a_thread_attaches_leaves_nobody_waiting");
        let status = alone.env(MARKER, "").status().unwrap();
        assert!(status.success(), "{status}");
        return;
    }
    for round in 0..100 {
        let emulator = Arc::new(Emulator::start(Config::default()).unwrap());
        let (attaches, attached) = channel();
        let (go, wait) = channel::<()>();
        let (opens, opened) = channel();
        let client = emulator.clone();
        std::thread::spawn(move || {
            client.attach().unwrap();
            drop(client);
            attaches.send(()).unwrap();
            let _ = wait.recv();
            let _ = opens.send(std::fs::File::open("/dev/davinci_manager").map(drop));
        });
        let mut children = Vec::new();
        while attached.try_recv().is_err() {
            children.push(fork(|| {
                loop {
                    nix::unistd::pause();
                }
            }));
        }
        drop(Arc::into_inner(emulator).expect("the thread has dropped its reference"));
        drop(go);
        let opened = opened.recv_timeout(Duration::from_secs(60));
        let opened = opened.unwrap_or_else(|_| panic!("round {round}: the call still waits"));
        assert_eq!(opened.unwrap_err().raw_os_error(), Some(libc::ENOSYS), "round {round}");
    }
}
