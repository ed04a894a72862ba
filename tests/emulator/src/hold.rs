//! Commands that a test stops on their way, while the driver answers others.

use crate::front::Emulator;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// No machine is so busy that a command takes longer to arrive.
const PATIENCE: Duration = Duration::from_secs(300);

/// A command that is stopped, or will be: see [`Emulator::hold`]. Dropping this lets it
/// continue.
pub struct Hold<'a> {
    emulator: &'a Emulator,
    id: u64,
    command: String,
    paused: Receiver<()>,
}

impl Emulator {
    /// Stops the next call of a command of the memory module, such as `MEMCPY` or `MEM_UNMAP`, at
    /// its start. It holds what the driver's would: the session's lock (shared, or for UPDATE_HEAP
    /// and the closes of a device alone), and a copy or a fill also its mappings and reservations,
    /// so that they cannot be unmapped and freed (EBUSY). All other commands are answered.
    ///
    /// An ASYNC_MEMCPY is answered at once; its bytes are moved after the release, and
    /// MEMCPY_RESULT_REFRESH waits for that.
    ///
    /// # Panics
    /// If this driver has no such command.
    pub fn hold(&self, command: &str) -> Hold<'_> {
        self.hold_after(command, 0)
    }

    /// As [`Emulator::hold`], but a copy or a fill moves this many bytes first. With `u64::MAX`
    /// it moves all of them and is not answered yet.
    ///
    /// # Panics
    /// As [`Emulator::hold`].
    pub fn hold_after(&self, command: &str, bytes: u64) -> Hold<'_> {
        let (sender, paused) = channel();
        let name = command.to_owned();
        let id = self.control(move |driver| {
            let generation = driver.machine.config.generation;
            let known = (0..=u8::MAX).filter_map(|number| generation.svm_by_number(number));
            let known = known.into_iter().any(|known| known.op.name() == name);
            known.then(|| driver.svm.holds().add(name, bytes, sender))
        });
        let Some(id) = id else { panic!("the memory module has no command {command}") };
        Hold { emulator: self, id, command: command.to_owned(), paused }
    }
}

impl Hold<'_> {
    /// Waits until a command is stopped.
    ///
    /// # Panics
    /// If none comes within some minutes.
    pub fn wait(&self) {
        if self.paused.recv_timeout(PATIENCE).is_err() {
            panic!("no {} came", self.command);
        }
    }

    /// Lets the command continue.
    pub fn release(self) {}
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let id = self.id;
        self.emulator.control(move |driver| driver.svm.holds().release(id));
    }
}
