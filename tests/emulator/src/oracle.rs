//! Oracles: what must be true after a run, or while nobody runs, whatever the programs did.
//!
//! Each check returns one readable sentence for each thing that is wrong, and nothing if all is
//! well. They look at the driver from outside, so they can be used with any program:
//!
//! ```
//! use ascend_emulator::{Config, Emulator, oracle};
//!
//! let emulator = Emulator::start(Config::default())?;
//! // Run programs under it, then:
//! oracle::assert_clean(&emulator);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::front::Emulator;
use crate::machine::HOST;
use crate::schedule::Summary;
use crate::state::State;
use crate::svm::SessionState;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::{Duration, Instant};

/// Nothing is left in the driver.
pub fn leftovers(state: &State) -> Vec<String> {
    let mut found = Vec::new();
    for session in &state.memory.sessions {
        found.extend(held_by(session));
    }
    for share in &state.memory.shares {
        let holders = counted(u64::from(share.holders), "holder");
        found.push(format!(
            "a share of memory on {} with {holders}, exported by process {}",
            place(share.device),
            share.exporter
        ));
    }
    if state.memory.names > 0 {
        found.push(format!("{} of memory for other processes", counted(state.memory.names as u64, "name")));
    }
    for process in &state.device_processes {
        let orphaned = if process.orphaned { ", which the device believes gone" } else { "" };
        found.push(format!("a process on device {} for process {}{orphaned}", process.device, process.tgid));
    }
    found.extend(state.registrations.iter().map(|tgid| format!("process {tgid} is registered with the devices")));
    // The driver gives a new connection a minute to get an owner, also if its process ends before.
    for session in state.sessions.iter().filter(|session| session.owned || is_alive(session.tgid)) {
        let (device, service, tgid) = (session.device, session.service, session.tgid);
        found.push(format!("a connection to service {service} of device {device}, made by process {tgid}"));
    }
    for (tgid, device, peer, count) in &state.peer_requests {
        let requests = counted(u64::from(*count), "request");
        found.push(format!("{requests} of process {tgid} for access from device {device} to device {peer}"));
    }
    for file in &state.files {
        let module = file.module.as_ref().map_or(String::new(), |module| format!(" (module {module})"));
        found.push(format!("{}{module} is open, opened by process {}", file.path, file.tgid));
    }
    found.extend(lost_memory(state));
    found
}

fn is_alive(tgid: i32) -> bool {
    kill(Pid::from_raw(tgid), None) != Err(Errno::ESRCH)
}

/// What a session holds, without the session itself.
fn held_by(session: &SessionState) -> Vec<String> {
    let by = format!("held by process {}", session.tgid);
    let mut found = Vec::new();
    for handle in &session.handles {
        let kind = match (handle.imported, handle.exported) {
            (true, _) => "one imported handle",
            (_, true) => "one exported handle",
            _ => "one handle",
        };
        let mapped =
            if handle.mapped == 0 { String::new() } else { format!(", {}", counted(handle.mapped.into(), "mapping")) };
        found.push(format!("{} on {} in {kind}{mapped}, {by}", bytes(handle.size), place(handle.device)));
    }
    for (start, (size, _)) in session.heaps.iter().flat_map(|heap| &heap.reservations) {
        found.push(format!("{} of addresses reserved at {start:#x}, {by}", bytes(*size)));
    }
    if session.tasks > 0 {
        found.push(format!("{} without a refresh, {by}", counted(session.tasks as u64, "asynchronous copy")));
    }
    if found.is_empty() {
        found.push(format!("a session with {}, {by}", counted(session.heaps.len() as u64, "heap")));
    }
    found
}

/// Memory that is in use although no process can reach it.
pub fn lost_memory(state: &State) -> Vec<String> {
    let memory = &state.memory;
    let held =
        |device: u32| {
            memory.sessions.iter().any(|session| {
                !session.heaps.is_empty() || session.handles.iter().any(|handle| handle.device == device)
            }) || memory.shares.iter().any(|share| share.device == device)
                || memory.names > 0
        };
    let lost = memory.used.iter().filter(|(device, used)| **used > 0 && !held(**device));
    lost.map(|(device, used)| format!("{} on {} that no process holds", bytes(*used), place(*device))).collect()
}

/// No address of a process was handed out twice, and no memory is mapped outside of a reservation.
pub fn overlaps(state: &State) -> Vec<String> {
    let mut found = Vec::new();
    for session in &state.memory.sessions {
        let of = format!("of process {}", session.tgid);
        for heap in &session.heaps {
            let reservations = heap.reservations.iter().map(|(start, (size, _))| (*start, *size));
            let mappings = heap.mappings.iter().map(|(start, mapping)| (*start, mapping.size));
            for (what, ranges) in
                [("reservations", reservations.collect::<Vec<_>>()), ("mappings", mappings.collect::<Vec<_>>())]
            {
                for pair in ranges.windows(2) {
                    let ((first, size), (second, _)) = (pair[0], pair[1]);
                    if first + size > second {
                        found.push(format!("the {what} at {first:#x} and {second:#x} {of} overlap"));
                    }
                }
            }
        }
        let heaps: Vec<(u64, u64)> = session.heaps.iter().map(|heap| (heap.start, heap.size)).collect();
        for pair in heaps.windows(2) {
            if pair[0].0 + pair[0].1 > pair[1].0 {
                found.push(format!("the heaps at {:#x} and {:#x} {of} overlap", pair[0].0, pair[1].0));
            }
        }
    }
    found
}

/// No thread of a scheduled run waited for ever.
pub fn stuck(summary: &Summary) -> Vec<String> {
    let Some((reason, threads)) = summary.stuck.split_first() else { return Vec::new() };
    vec![format!("stuck: {reason} ({})", threads.join("; "))]
}

/// Everything that is wrong after a run: what is left, what overlaps, who was stuck, and traps.
pub fn findings(emulator: &Emulator) -> Vec<String> {
    let (state, summary) = (emulator.state(), emulator.schedule());
    let mut found: Vec<String> = summary.iter().flat_map(stuck).collect();
    found.extend(emulator.traps().iter().map(ToString::to_string));
    found.extend(overlaps(&state));
    found.extend(leftovers(&state));
    found
}

/// Waits for so long, at most, until no client process runs any more, and ends those that still do.
/// Returns everything that is wrong then.
pub fn conclude(emulator: &Emulator, patience: Duration) -> Vec<String> {
    let begun = Instant::now();
    let living = loop {
        let living = emulator.schedule().map_or_else(Vec::new, |summary| summary.living);
        if living.is_empty() || begun.elapsed() >= patience {
            break living;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let mut found: Vec<String> = living.iter().map(|pid| format!("process {pid} still runs")).collect();
    found.extend(findings(emulator));
    for pid in living {
        // Its driver is about to end.
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    found
}

/// Checks that nothing is wrong after a run.
///
/// # Panics
/// With one line for each of the [`findings`].
pub fn assert_clean(emulator: &Emulator) {
    let found = findings(emulator);
    if !found.is_empty() {
        let seed = emulator.schedule().map_or(String::new(), |summary| format!(" ({summary})"));
        panic!("after the run{seed}:\n{}", found.join("\n"));
    }
}

/// Bytes that say whose they are: a model of what memory must hold.
///
/// ```
/// use ascend_emulator::oracle::Contents;
///
/// let (ours, theirs) = (Contents::of(1, 7), Contents::of(2, 7));
/// assert_eq!(ours.check(64, &ours.bytes(64, 4096)), Ok(()));
/// let wrong = ours.check(0, &theirs.bytes(0, 4096)).unwrap_err();
/// assert_eq!(wrong, "byte 0 is of owner 2 (its byte 0 of round 7), not of owner 1 in round 7");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contents {
    owner: u16,
    round: u16,
}

impl Contents {
    /// What an owner writes in a round.
    pub fn of(owner: u16, round: u16) -> Self {
        Contents { owner, round }
    }

    /// The bytes of a range. Offset and length are multiples of 8.
    pub fn bytes(self, offset: u64, length: usize) -> Vec<u8> {
        (offset / 8..).take(length / 8).flat_map(|word| self.word(word).to_le_bytes()).collect()
    }

    fn word(self, index: u64) -> u64 {
        u64::from(self.owner) << 48 | u64::from(self.round) << 32 | index & 0xffff_ffff
    }

    /// Compares the bytes of a range with the model.
    ///
    /// # Errors
    /// A sentence about the first that differs.
    pub fn check(self, offset: u64, bytes: &[u8]) -> Result<(), String> {
        for (index, chunk) in (offset / 8..).zip(bytes.chunks_exact(8)) {
            let found = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
            if found == self.word(index) {
                continue;
            }
            let (at, Contents { owner, round }) = (index * 8, self);
            let expected = format!("not of owner {owner} in round {round}");
            return Err(if found == 0 {
                format!("byte {at} is zero, {expected}")
            } else {
                let (theirs, of, word) = (found >> 48, found >> 32 & 0xffff, found & 0xffff_ffff);
                format!("byte {at} is of owner {theirs} (its byte {} of round {of}), {expected}", word * 8)
            });
        }
        Ok(())
    }
}

fn place(device: u32) -> String {
    if device == HOST { "the host".into() } else { format!("device {device}") }
}

fn counted(count: u64, noun: &str) -> String {
    match (count, noun.strip_suffix('y')) {
        (1, _) => format!("one {noun}"),
        (_, Some(stem)) => format!("{count} {stem}ies"),
        _ => format!("{count} {noun}s"),
    }
}

/// A number of bytes with its unit.
fn bytes(count: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| count >= *unit && count % unit == 0) {
        Some((unit, name)) => format!("{} {name}", count / unit),
        None => counted(count, "byte"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svm::{HandleState, HeapState};
    use std::collections::BTreeMap;

    fn state_with(session: SessionState) -> State {
        let mut state = State::default();
        state.memory.sessions.push(session);
        state
    }

    fn session() -> SessionState {
        SessionState {
            tgid: 4711,
            is_session: true,
            devices: vec![0],
            heaps: Vec::new(),
            handles: Vec::new(),
            tasks: 0,
            shared: 0,
        }
    }

    #[test]
    fn what_is_left_is_told_in_one_sentence_each() {
        let handle =
            |imported, mapped| HandleState { device: 0, id: 1, size: 2 << 20, mapped, imported, exported: false };
        let state = state_with(SessionState { handles: vec![handle(false, 0), handle(true, 2)], ..session() });
        assert_eq!(
            leftovers(&state),
            [
                "2 MiB on device 0 in one handle, held by process 4711",
                "2 MiB on device 0 in one imported handle, 2 mappings, held by process 4711",
            ]
        );
        assert_eq!(leftovers(&State::default()), [] as [&str; 0]);
    }

    #[test]
    fn a_connection_that_was_new_when_its_process_ended_is_the_drivers_own_matter() {
        // No process has this id: it is more than Linux gives out.
        let of = |tgid, owned| crate::state::ConnectionState { device: 0, tgid, service: 9, owned };
        let own = std::process::id() as i32;
        for (connection, count) in [(of(i32::MAX, false), 0), (of(i32::MAX, true), 1), (of(own, false), 1)] {
            let state = State { sessions: vec![connection], ..State::default() };
            assert_eq!(leftovers(&state).len(), count, "{state:?}");
        }
    }

    #[test]
    fn memory_without_a_holder_is_lost() {
        let mut state = State::default();
        state.memory.used.insert(1, 3 << 30);
        assert_eq!(lost_memory(&state), ["3 GiB on device 1 that no process holds"]);
        let held = HandleState { device: 1, id: 1, size: 3 << 30, mapped: 0, imported: false, exported: false };
        state.memory.sessions.push(SessionState { handles: vec![held], ..session() });
        assert_eq!(lost_memory(&state), [] as [&str; 0]);
    }

    #[test]
    fn addresses_that_were_handed_out_twice_are_found() {
        let heap = |second: u64| HeapState {
            start: 0x1000_0000,
            size: 1 << 30,
            reservations: BTreeMap::from([(0x1000_0000, (0x40_0000, 0)), (second, (0x20_0000, 0))]),
            mappings: BTreeMap::new(),
        };
        let apart = state_with(SessionState { heaps: vec![heap(0x1040_0000)], ..session() });
        assert_eq!(overlaps(&apart), [] as [&str; 0]);
        let twice = state_with(SessionState { heaps: vec![heap(0x1020_0000)], ..session() });
        assert_eq!(overlaps(&twice), ["the reservations at 0x10000000 and 0x10200000 of process 4711 overlap"]);
    }
}
