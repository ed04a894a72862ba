//! Threads that attach to an emulator while other threads of the process fork.
//!
//! One test, so that nobody else in this process has descriptors that a fork copies.

use ascend_emulator::{Config, Emulator, fork};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// A child with a copy of the listener would keep it open after the emulator has ended, and what is
/// caught by its filter would wait for an answer that nobody gives.
#[test]
fn a_fork_while_a_thread_attaches_leaves_nobody_waiting() {
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
        let opened = opened.unwrap_or_else(|_| panic!("round {round}: the call waits for ever"));
        assert_eq!(opened.unwrap_err().raw_os_error(), Some(libc::ENOSYS), "round {round}");
    }
}
