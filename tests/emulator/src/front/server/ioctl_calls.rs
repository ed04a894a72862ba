//! ioctl on a file of the driver.

use super::{Reply, Server, Who};
use crate::caller::{Memory, Outcome};
use crate::driver::FileId;
use crate::fault::{Answers, Strike};
use crate::front::client_memory::ProcessMemory;
use crate::front::client_process::Inode;
use crate::front::listener::{Answer, Notification};
use crate::record::{self, Record, hex};
use libc::c_int;
use std::time::Instant;

impl Server {
    pub(super) fn ioctl(&mut self, call: &Notification, arrived: Instant, slept: Option<Inode>) -> Reply {
        let [descriptor, request, argument, ..] = call.arguments;
        // A call that slept keeps its file; its descriptor may have been closed or reused.
        let found = match slept {
            Some(inode) => self.who(call.tid, arrived).ok().map(|who| (who, inode)),
            None => self.file(call.tid, descriptor as c_int, arrived),
        };
        let Some((who, inode)) = found else { return Answer::Continue.into() };
        let Some(file) = self.files.get_mut(inode).map(|file| file.id) else { return Answer::Continue.into() };
        let own = self.own_memory.clone().filter(|_| who.key.tgid == self.own_tgid);
        let other = ProcessMemory(call.tid);
        let memory: &dyn Memory = own.as_deref().map_or(&other, |own| own);
        let request = request as u32;
        let observed = self.recorder.is_on() || !self.faults.is_empty();
        let mut record = observed.then(|| self.describe(&who, file, request));
        // A call that slept was counted when it arrived.
        let name = record.as_ref().and_then(|(record, _)| record.cmd).filter(|_| slept.is_none());
        let struck = match slept {
            None => name.and_then(|name| self.faults.strike(name)),
            Some(_) => self.faults.wake(call.tid).map(Strike::Answers),
        };
        let read = |length: usize| {
            let mut bytes = vec![0; length];
            memory.read(argument, &mut bytes).is_ok().then_some(bytes)
        };
        let before = record.as_ref().and_then(|(_, length)| read(*length));
        if let (Some((record, _)), Some(before)) = (&mut record, before.as_deref().filter(|_| self.recorder.is_on())) {
            record.buffers = self.sessions.before(self.driver.module(file), record.cmd, before, memory);
        }
        let (outcome, answer) = match &struck {
            Some(Strike::Fails(errno)) => ((*errno).into(), Vec::new()),
            None if !observed => (self.driver.ioctl(&who.caller(memory), file, request, argument), Vec::new()),
            struck => {
                let alteration = struck.as_ref().and_then(Strike::alteration);
                let answers = Answers::new(memory, alteration);
                (self.driver.ioctl(&who.caller(&answers), file, request, argument), answers.into_bytes())
            }
        };
        let result = match outcome {
            Outcome::Sleep(wake) | Outcome::Wait(wake) => {
                if let Some(Strike::Answers(alteration)) = struck {
                    self.faults.sleep(call.tid, alteration);
                }
                return Reply::Later(wake, inode, matches!(outcome, Outcome::Wait(_)));
            }
            Outcome::Done(result) => result,
        };
        if let Some((mut record, length)) = record.take().filter(|_| self.recorder.is_on()) {
            let after = read(length);
            if let (Ok(0..), Some(before)) = (result, &before) {
                let after = after.as_deref().unwrap_or(before);
                self.sessions.after(self.driver.module(file), record.cmd, before, after, memory, &mut record.buffers);
            }
            let after = after.filter(|after| before.as_ref() != Some(after));
            record.in_hex = before.as_deref().map(hex);
            record.addr = before.is_none().then(|| format!("{argument:#x}"));
            record.out_hex = after.as_deref().map(hex);
            record.answer = answer;
            self.finish(record, result, arrived);
        }
        match result {
            Ok(value) => Answer::Value(value).into(),
            Err(errno) => errno.into(),
        }
    }

    /// The record of an ioctl, and the size of its argument.
    pub(super) fn describe(&self, who: &Who, file: FileId, request: u32) -> (Record, usize) {
        let module = self.driver.module(file);
        let command = record::command(self.driver.machine.config.generation, module, request);
        let mut record = who.record("ioctl");
        record.file = Some(file.0);
        record.value = Some(format!("{request:#x}"));
        record.cmd = command.map(|command| command.name);
        (record, record::argument_size(module, command, request))
    }

    /// Reports to the model that an ALLOC and another call of the same process on the same file
    /// wait at the same time.
    pub(super) fn overlap(&mut self, alloc: &Notification, other: &Notification) {
        let (now, [descriptor, request, argument, ..]) = (Instant::now(), other.arguments);
        if other.number != libc::SYS_ioctl || request as u8 == alloc.arguments[1] as u8 {
            return;
        }
        let one = self.file(alloc.tid, alloc.arguments[0] as c_int, now);
        let other = self.file(other.tid, descriptor as c_int, now);
        let (Some((who, inode)), Some((other, other_inode))) = (one, other) else { return };
        if inode != other_inode || who.key != other.key {
            return;
        }
        if let Some(file) = self.files.get_mut(inode).map(|file| file.id) {
            let memory = ProcessMemory(alloc.tid);
            self.driver.overlap(&who.caller(&memory), file, alloc.arguments[2], request as u32, argument);
        }
    }
}
