//! Orders of the emulator's owner, which come between calls.

use super::Server;
use crate::fault::{Fault, Strike};
use crate::front::Order;
use crate::front::listener::Listener;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::mpsc::TryRecvError;
use std::time::Instant;

impl Server {
    /// Carries out the next order; false if there will be no more.
    pub(super) fn obey(&mut self) -> bool {
        let mut byte = [0u8];
        let mut space = nix::cmsg_space!([RawFd; 1]);
        let mut parts = [IoSliceMut::new(&mut byte)];
        let mut descriptor = None;
        match recvmsg::<()>(
            self.wake.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Ok(message) => {
                for control in message.cmsgs().into_iter().flatten() {
                    if let ControlMessageOwned::ScmRights(received) = control {
                        // SAFETY: the kernel installed this descriptor, the only one of the
                        // message, for this receiver.
                        descriptor = received.first().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) });
                    }
                }
            }
            Err(Errno::EAGAIN | Errno::EINTR) => return true,
            Err(_) => return false,
        }
        // Each order is followed by one wake-up.
        let order = match self.orders.try_recv() {
            Ok(order) => order,
            Err(TryRecvError::Empty) => return true,
            Err(TryRecvError::Disconnected) => return false,
        };
        // If the requester is gone, a reply that cannot be sent does not matter.
        match order {
            Order::Listen(tid) => {
                self.listeners.extend(descriptor.map(|descriptor| Rc::new(Listener::new(descriptor))));
                if let Some(schedule) = &mut self.schedule {
                    schedule.attached(tid);
                }
            }
            Order::Waker(tid) => self.waker.expect(tid),
            Order::State(reply) => {
                self.settle();
                let _ = reply.send(self.driver.state());
            }
            Order::Inject(fault, done) => {
                match fault {
                    Fault::Command { name, nth, errno } => self.faults.add(name, nth, Strike::Fails(errno)),
                    Fault::Answer { name, nth, alteration } => {
                        self.faults.add(name, nth, Strike::Answers(alteration));
                    }
                    fault => self.driver.inject(&fault),
                }
                let _ = done.send(());
            }
            Order::Control(action) => {
                self.settle();
                action(&mut self.driver);
                // What they sleep for may have come with it; the others are put aside again.
                let now = Instant::now();
                self.parked.iter_mut().for_each(|parked| parked.wake = now);
                self.due = true;
            }
            Order::RecordTo(path, reply) => drop(reply.send(self.recorder.write_to(&path))),
            Order::Record(done) => {
                self.recorder.keep();
                let _ = done.send(());
            }
            Order::Records(reply) => {
                self.settle();
                let _ = reply.send(self.recorder.kept());
            }
            Order::Schedule(reply) => {
                self.settle();
                let _ = reply.send(self.schedule.as_mut().map(|schedule| schedule.summary()));
            }
            Order::Traps(reply) => {
                self.settle();
                let _ = reply.send(self.traps.clone());
            }
        }
        true
    }
}
