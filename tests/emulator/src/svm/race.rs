//! Calls that overlap in time. The model runs one call after the other and accepts every order; the
//! real driver has one dangerous overlap.
//!
//! ALLOC marks its chunks as reserved before it initialises their counters. A command that uses an
//! address of the range in between raises an uninitialised counter: the kernel crashes, or the
//! range can neither be freed nor reserved until its heap is disabled. The front reports calls that
//! wait together.

use super::{Svm, behaviour};
use crate::caller::Caller;
use crate::driver::FileId;
use crate::machine::Machine;
use crate::trap::Trap;
use ascend_ioctl::command;
use ascend_ioctl::svm::{self, Arg, Op};
use zerocopy::{FromZeros, IntoBytes};

impl Svm {
    /// Two calls on one file wait at the same time: an ALLOC and another one. `alloc` and `other`
    /// are the addresses of their arguments.
    pub fn overlap(
        &mut self,
        machine: &mut Machine,
        caller: &Caller,
        file: FileId,
        alloc: u64,
        request: u32,
        other: u64,
    ) {
        let read = |address: u64| {
            let mut arg = Arg::new_zeroed();
            caller.memory.read(address, arg.as_mut_bytes()).ok().map(|()| arg)
        };
        let Some(known) = self.command(machine, command::number(request)) else { return };
        if !behaviour::counts_reservation(known.op) || command::magic(request) != svm::MAGIC {
            return;
        }
        let process = self.files.get(&file).and_then(|bound| self.processes.get(&bound.process?));
        let Some(process) = process.filter(|process| process.belongs_to(caller)) else { return };
        let (Some(alloc), Some(other)) = (read(alloc), read(other)) else { return };
        let para: svm::Alloc = alloc.para();
        // An ALLOC that fails these checks marks no chunks.
        let heap = process.heap(para.address).filter(|_| process.is_svm(para.address));
        let Some(heap) = heap.filter(|heap| heap.holds(para.address, para.size)) else { return };
        let taken = heap.chunks(para.address, para.size);
        if heap.reservation(taken.start).is_some() {
            return;
        }
        let addresses = match known.op {
            Op::Memcpy | Op::Memcpy2d | Op::AsyncMemcpy => &other.data[..2],
            _ => &other.data[..1],
        };
        if let Some(address) = addresses.iter().find(|address| taken.contains(address)) {
            let detail = format!(
                "{} uses {address:#x} while ALLOC of {:#x} bytes at {:#x} still runs in another thread: the kernel \
                 crashes, or the addresses are lost until their heap is disabled",
                known.op.name(),
                para.size,
                para.address
            );
            machine.traps.push(Trap { name: "use-during-alloc", tgid: caller.tgid, detail });
        }
    }
}
