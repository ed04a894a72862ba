//! From nothing to an initialised session, in the order that the driver demands.
//!
//! open and OPEN bind a file; ALLOC_PROC_STRUCT makes the kernel's process object, and its number tells the oldest generation from the
//! later ones; GET_MMAP_INFO names the address segments, and their list tells the later generations apart; the segments are mapped, the
//! log page is put in place, and INIT_PROCESS ties it all to this process. Version strings are never compared.

use super::SessionBuilder;
use super::call::{INIT_PROCESS, Request, Svm};
use super::fork::{ForkGuard, PerProcess};
use super::klog::LogPage;
use super::lock;
use super::segments::Segments;
use crate::davinci::DavinciFile;
use crate::error::{Errno, Error, Result, SessionTaken, UnknownDriver};
use ascend_ioctl::Generation;
use ascend_ioctl::davinci::module;
use ascend_ioctl::svm::{HOST_PIN_SIZE, InitProcess, MmapInfo, Op, Segment};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

/// A file with its process object and its segments, that INIT_PROCESS makes a session of.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) svm: Svm,
    pub(super) generation: Generation,
    pub(super) segments: Segments,
}

/// A file for which INIT_PROCESS answered EEXIST. Closing it would leak 145 MB of kernel memory for good, and unmapping its segments
/// could destroy the session that is in its way; so it is kept, and the next attempt goes on from here.
fn parked() -> MutexGuard<'static, Option<Prepared>> {
    static PARKED: PerProcess<Mutex<Option<Prepared>>> = PerProcess::new();
    let parked = PARKED.get(|inherited| {
        if let Some(mut parents) = inherited.and_then(|inherited| inherited.try_lock().ok()?.take()) {
            // Its segments are not in this process.
            parents.segments.forget();
        }
        Mutex::default()
    });
    lock(parked)
}

/// INIT_PROCESS is interrupted by signals; under a storm of them up to 40 times in a row were seen.
const INIT_ATTEMPTS: u32 = 1000;

/// Segments that this library has room for; the newest known driver has 4.
const SEGMENTS: usize = 64;

/// Brings up the session's file.
pub(super) fn bring_up(builder: &SessionBuilder, guard: ForkGuard) -> Result<(Prepared, InitProcess)> {
    // Not in the match: the lock would be held through it.
    let left = parked().take();
    let prepared = match left {
        Some(mut prepared) => {
            prepared.segments.check();
            prepared
        }
        None => prepare(builder, guard)?,
    };
    let mut attempt = 0;
    let answer = loop {
        attempt += 1;
        match prepared.svm.call(INIT_PROCESS, 0, 0, &InitProcess::default()) {
            Err(Errno::EAGAIN) if attempt < INIT_ATTEMPTS => {}
            answer => break answer,
        }
    };
    match answer {
        Ok(init) => {
            tracing::debug!(generation = %prepared.generation, "memory session");
            Ok((prepared, init))
        }
        Err(Errno::EEXIST) => {
            *parked() = Some(prepared);
            Err(Error::SessionTaken(Box::new(SessionTaken { vendor_library: vendor_library() })))
        }
        Err(errno) => {
            let error = prepared.svm.refused("initialise the memory session", INIT_PROCESS, errno).into();
            prepared.shut_down();
            Err(error)
        }
    }
}

fn prepare(builder: &SessionBuilder, guard: ForkGuard) -> Result<Prepared> {
    let file = DavinciFile::open(&builder.davinci_manager, module::SVM)?;
    let svm = Svm { file, guard, log: None };

    // 8.5.0 refuses number 101 as too high; later drivers refuse 67 before the session is initialised. So this order is harmless.
    let mut family = Generation::V26_1;
    let mut answer = alloc_proc_struct(&svm, family);
    if answer == Err(Errno::EINVAL) {
        family = Generation::V8_5_0;
        answer = alloc_proc_struct(&svm, family);
        if answer == Err(Errno::EINVAL) {
            return Err(unknown("ALLOC_PROC_STRUCT is refused under both of its known numbers (101 and 67)"));
        }
    }
    if let Err(errno) = answer {
        let Some(request) = Request::of(family, Op::AllocProcStruct) else {
            return Err(unknown("no ALLOC_PROC_STRUCT"));
        };
        return Err(svm.refused("make the kernel's process object", request, errno).into());
    }

    let Some(request) = Request::of(family, Op::GetMmapInfo) else { return Err(unknown("no GET_MMAP_INFO")) };
    let segments = &match address_segments(&svm, request) {
        Ok(segments) => segments,
        Err(errno) => return Err(svm.refused("ask for the driver's address segments", request, errno).into()),
    }[..];
    let generation = choose(family, segments, builder.allow_unknown_generation)?;

    let segments = if builder.segments { map(&svm.file, segments)? } else { Segments::default() };
    let svm = Svm { log: LogPage::new(), ..svm };
    Ok(Prepared { svm, generation, segments })
}

/// The generation to go on with.
fn choose(family: Generation, segments: &[Segment], allow_unknown: bool) -> Result<Generation> {
    match recognise(family, segments) {
        Some(generation) => Ok(generation),
        None if allow_unknown => {
            tracing::warn!(?segments, generation = %family, "unknown driver generation, treated as a known one as asked for");
            Ok(family)
        }
        None => Err(unknown(&describe(family, segments))),
    }
}

/// Maps the segments. If their addresses are taken and the vendor's library is loaded, it is its session that is in the way.
fn map(file: &DavinciFile, segments: &[Segment]) -> Result<Segments> {
    Segments::map(file, segments).map_err(|error| match vendor_library() {
        Some(library) if error.errno() == Some(Errno::EINVAL) => {
            tracing::debug!(%error, "the vendor's library has mapped the segments");
            Error::SessionTaken(Box::new(SessionTaken { vendor_library: Some(library) }))
        }
        _ => error,
    })
}

/// The generation of the memory driver at `manager`, without making a process object of it, which costs the kernel up to 145 MB.
pub(crate) fn probe(manager: &Path) -> Result<Generation> {
    let svm = Svm { file: DavinciFile::open(manager, module::SVM)?, guard: ForkGuard::new(), log: None };
    // 8.5.0 refuses number 104 as too high; later drivers refuse 70 on a file without a session.
    for family in [Generation::V26_1, Generation::V8_5_0] {
        let Some(request) = Request::of(family, Op::GetMmapInfo) else { continue };
        match address_segments(&svm, request) {
            Ok(segments) => return recognise(family, &segments).ok_or_else(|| unknown(&describe(family, &segments))),
            Err(Errno::EINVAL) => {}
            Err(errno) => return Err(svm.refused("ask for the driver's address segments", request, errno).into()),
        }
    }
    Err(unknown("GET_MMAP_INFO is refused under both of its known numbers (104 and 70)"))
}

/// GET_MMAP_INFO. Needs no state of the file.
fn address_segments(svm: &Svm, request: Request) -> std::result::Result<Vec<Segment>, Errno> {
    let mut segments = [Segment::default(); SEGMENTS];
    let info = MmapInfo { segments: SEGMENTS as u32, array: (&raw mut segments) as u64, ..Default::default() };
    let count = svm.call(request, 0, 0, &info)?.segments as usize;
    // More than there is room for is refused by the driver; a driver that says so all the same is not taken for a known one.
    Ok(segments.into_iter().take(count).collect())
}

fn alloc_proc_struct(svm: &Svm, family: Generation) -> std::result::Result<(), Errno> {
    let Some(request) = Request::of(family, Op::AllocProcStruct) else { return Err(Errno::EINVAL) };
    // The command has no argument but its (zeroed) buffer.
    svm.call(request, 0, 0, &MmapInfo::default()).map(drop)
}

/// The generation whose segments these are. The host-pin segment is there once a device has come up.
fn recognise(family: Generation, segments: &[Segment]) -> Option<Generation> {
    let old = family == Generation::V8_5_0;
    Generation::ALL.into_iter().find(|generation| {
        let delta = generation.delta();
        let rest = match segments.strip_prefix(delta.segments) {
            Some(rest) => rest,
            None => return false,
        };
        let host_pin = match rest {
            [] => true,
            [last] => delta.host_pin && last.size == HOST_PIN_SIZE,
            _ => false,
        };
        (*generation == Generation::V8_5_0) == old && host_pin
    })
}

fn describe(family: Generation, segments: &[Segment]) -> String {
    let numbers = if family == Generation::V8_5_0 { "67" } else { "101" };
    let mut text = format!("ALLOC_PROC_STRUCT is number {numbers}, and the address segments are");
    for segment in segments {
        text += &format!(" {:#x}+{:#x}", segment.start, segment.size);
    }
    text
}

#[cold]
fn unknown(detected: &str) -> Error {
    Error::UnknownGeneration(Box::new(UnknownDriver { detected: detected.to_owned() }))
}

/// Path of the vendor's driver library, if this process has it loaded.
fn vendor_library() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.contains("libascend_hal"))?;
    let path = &line[line.find('/')?..];
    // So the kernel marks a library that was replaced since it was loaded.
    Some(path.strip_suffix(" (deleted)").unwrap_or(path).to_owned())
}

impl Prepared {
    /// Ends what INIT_PROCESS did not make a session of.
    fn shut_down(mut self) {
        self.segments.unmap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_ioctl::svm::{HOST_PIN_START_HCCS, HOST_PIN_START_PCIE};

    const PIN: Segment = Segment { start: HOST_PIN_START_PCIE, size: HOST_PIN_SIZE };

    fn segments_of(generation: Generation, pin: Option<Segment>) -> Vec<Segment> {
        generation.delta().segments.iter().copied().chain(pin).collect()
    }

    #[test]
    fn generations_are_told_apart_by_their_segments() {
        let old = Generation::V8_5_0;
        assert_eq!(recognise(old, &segments_of(old, None)), Some(old));
        for generation in [Generation::V9_0_0, Generation::V26_1] {
            let hccs = Segment { start: HOST_PIN_START_HCCS, ..PIN };
            for pin in [None, Some(PIN), Some(hccs)] {
                assert_eq!(recognise(Generation::V26_1, &segments_of(generation, pin)), Some(generation));
            }
        }
    }

    #[test]
    fn unfamiliar_segments_are_not_taken_for_a_known_generation() {
        let mut more = segments_of(Generation::V26_1, Some(PIN));
        more.push(PIN);
        assert_eq!(recognise(Generation::V26_1, &more), None);
        assert_eq!(recognise(Generation::V8_5_0, &segments_of(Generation::V9_0_0, Some(PIN))), None);
        assert_eq!(recognise(Generation::V26_1, &[]), None);
        let text = choose(Generation::V26_1, &more, false).unwrap_err().to_string();
        assert!(text.contains("number 101") && text.contains("0x100000000000+0x80000000000"), "{text}");
        assert!(text.contains("8.5.0, 9.0.0, 26.1"), "{text}");
    }

    #[test]
    fn an_unknown_generation_that_is_wanted_is_treated_as_the_newest_of_its_numbers() {
        let mut more = segments_of(Generation::V26_1, Some(PIN));
        more.push(PIN);
        assert_eq!(choose(Generation::V26_1, &more, true).unwrap(), Generation::V26_1);
        assert_eq!(choose(Generation::V8_5_0, &[], true).unwrap(), Generation::V8_5_0);
        // What is known is not guessed.
        let known = segments_of(Generation::V9_0_0, Some(PIN));
        assert_eq!(choose(Generation::V26_1, &known, true).unwrap(), Generation::V9_0_0);
    }
}
