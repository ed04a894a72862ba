//! Opens a session, in the order that the driver requires.
//!
//! open and OPEN bind a file. ALLOC_PROC_STRUCT makes the kernel's process object; its number
//! distinguishes the oldest generation from the later ones. GET_MMAP_INFO lists the address
//! segments, which distinguish the later generations. Then the segments and the log page are
//! mapped, and INIT_PROCESS ties everything to this process.

use super::SessionBuilder;
use crate::discovery;
use crate::driver::davinci;
use crate::driver::recognise;
use crate::driver::segments::Segments;
use crate::driver::svm::{HostPages, Segment, Svm};
use crate::error::{Errno, Error, KernelResult, Result, SessionTaken};
use crate::fork::PerProcess;
use crate::signals::Blocked;
use crate::slots::lock;
use crate::trace;
use ascend_ioctl::Generation;
use ascend_ioctl::svm::Op;
use std::sync::{Mutex, MutexGuard};

/// A file with its process object and segments, ready for INIT_PROCESS.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) svm: Svm,
    pub(super) generation: Generation,
    pub(super) segments: Segments,
    /// A generation that has the driver's numbers, and the segments that the driver lists.
    family: Generation,
    listed: Vec<Segment>,
    /// The segments were mapped, now or in an earlier attempt.
    was_mapped: bool,
}

/// The file for which INIT_PROCESS answered EEXIST. Closing it would leak 145 MB of kernel memory,
/// and unmapping its segments could destroy the session that is in its way; so it is kept, and the
/// next attempt goes on from there.
fn parked() -> MutexGuard<'static, Option<Prepared>> {
    static PARKED: PerProcess<Mutex<Option<Prepared>>> = PerProcess::new();
    let parked = PARKED.get(|inherited| {
        if let Some(mut parents) = inherited.and_then(|inherited| inherited.try_lock().ok()?.take()) {
            // Its segments are not mapped in this process.
            parents.segments.forget();
        }
        Mutex::default()
    });
    lock(parked)
}

/// How often INIT_PROCESS is tried. Signals that are not blocked interrupt it, but never that
/// often.
const INIT_ATTEMPTS: u32 = 1000;

/// Brings up the session's file.
pub(super) fn bring_up(builder: &SessionBuilder) -> Result<(Prepared, HostPages)> {
    let earlier = parked().take();
    let mut prepared = match earlier {
        Some(mut prepared) => match prepared.set_options(builder) {
            Ok(()) => prepared,
            Err(error) => {
                *parked() = Some(prepared);
                return Err(error);
            }
        },
        None => prepare(builder)?,
    };
    let mut answer = init_process(|| prepared.svm.init_process());
    // Also the answer in a container whose device table was not made yet.
    if matches!(&answer, Err(refused) if refused.errno == Errno::EEXIST) && discovery::prepare_container() {
        answer = init_process(|| prepared.svm.init_process());
    }
    match answer {
        Ok(pages) => {
            trace::debug(prepared.generation, "memory session, with the driver's generation");
            Ok((prepared, pages))
        }
        Err(refused) if refused.errno == Errno::EEXIST => {
            let taken = taken();
            *parked() = Some(prepared);
            Err(Error::SessionTaken(taken))
        }
        Err(refused) => {
            prepared.segments.unmap();
            Err(refused.operation("initialise the memory session").into())
        }
    }
}

/// INIT_PROCESS, repeated if a signal interrupted it.
fn init_process(mut init: impl FnMut() -> KernelResult<HostPages>) -> KernelResult<HostPages> {
    let mut blocked = None;
    let mut attempt = 1;
    loop {
        match init() {
            Err(refused) if refused.errno == Errno::EAGAIN && attempt < INIT_ATTEMPTS => {
                // A signal came: block signals for the other attempts.
                blocked.get_or_insert_with(Blocked::handled);
                attempt += 1;
            }
            answer => return answer,
        }
    }
}

fn prepare(builder: &SessionBuilder) -> Result<Prepared> {
    let mut svm = Svm::open()?;
    let family = alloc_proc_struct(&svm)?;
    let listed =
        svm.get_mmap_info(family).map_err(|refused| refused.operation("read the driver's address segments"))?;
    let generation = choose(family, &listed, builder.allow_unknown_generation)?;
    let was_mapped = builder.segments;
    let segments = if was_mapped { map(&svm, &listed)? } else { Segments::default() };
    svm.map_log_page();
    Ok(Prepared { svm, generation, segments, family, listed, was_mapped })
}

impl Prepared {
    /// Applies these options to a file of an earlier attempt. Mapped segments stay mapped.
    fn set_options(&mut self, builder: &SessionBuilder) -> Result<()> {
        self.generation = choose(self.family, &self.listed, builder.allow_unknown_generation)?;
        // The end of the session in its way may have unmapped its segments. They cannot be mapped a
        // second time, so the file continues without them.
        self.segments.check();
        if builder.segments && !self.was_mapped {
            self.segments = map(&self.svm, &self.listed)?;
            self.was_mapped = true;
        }
        Ok(())
    }
}

/// Makes the kernel's process object. Returns a generation that has the driver's numbers. 8.5.0
/// refuses number 101 as too high, and later drivers refuse 67 before the session is initialised.
/// So trying the newest first is harmless.
fn alloc_proc_struct(svm: &Svm) -> Result<Generation> {
    for family in recognise::families() {
        match svm.alloc_proc_struct(family) {
            Ok(()) => return Ok(family),
            Err(refused) if refused.errno == Errno::EINVAL => {}
            Err(refused) => return Err(refused.operation("make the kernel's process object").into()),
        }
    }
    Err(recognise::refused_everywhere(Op::AllocProcStruct))
}

/// The generation to treat the driver as.
fn choose(family: Generation, segments: &[Segment], allow_unknown: bool) -> Result<Generation> {
    match recognise::by_segments(family, segments) {
        Some(generation) => Ok(generation),
        None if allow_unknown => {
            let detail = recognise::describe(family, segments);
            trace::warn(detail, "unknown driver generation, treated as a known one as the caller allows");
            Ok(family)
        }
        None => Err(recognise::unknown(recognise::describe(family, segments))),
    }
}

/// Maps the segments. If their addresses are taken and other code has the driver open, that code
/// has the session.
fn map(svm: &Svm, segments: &[Segment]) -> Result<Segments> {
    svm.map_segments(segments).map_err(|refused| {
        let taken = taken();
        if refused.errno == Errno::EINVAL && (taken.driver_in_use || taken.vendor_library.is_some()) {
            trace::debug(refused, "other code in this process has mapped the segments");
            return Error::SessionTaken(taken);
        }
        refused.into()
    })
}

/// Who has the session, as far as this process can tell.
fn taken() -> SessionTaken {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    SessionTaken {
        vendor_library: vendor_library(&maps),
        other_copy: other_copy(&maps, (taken as fn() -> SessionTaken as *const ()).addr()),
        driver_in_use: davinci::others_have_files(),
    }
}

/// Path of the vendor's driver library, if this process has loaded it.
fn vendor_library(maps: &str) -> Option<String> {
    maps.lines().find(|line| line.contains("libascend_hal")).and_then(path_of)
}

/// Path of a file that has this library in it, other than the one with this code: `here` is an
/// address in that.
fn other_copy(maps: &str, here: usize) -> Option<String> {
    let is_here = |line: &&str| {
        let (range, _) = line.split_once(' ').unwrap_or_default();
        let (start, end) = range.split_once('-').unwrap_or_default();
        let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
        (number(start)..number(end)).contains(&here)
    };
    let own = maps.lines().find(is_here).and_then(path_of);
    let named = maps.lines().filter(|line| line.contains("/libascendcl.so") || line.contains("/_ascend_vmm."));
    named.filter_map(path_of).find(|path| own.as_ref() != Some(path))
}

/// The file of a line of `/proc/self/maps`.
fn path_of(line: &str) -> Option<String> {
    let path = &line[line.find('/')?..];
    // The kernel marks a library that was replaced after it was loaded.
    Some(path.strip_suffix(" (deleted)").unwrap_or(path).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Refused, SystemCall};
    use nix::sys::signal::{SigSet, Signal};

    #[test]
    fn an_unknown_generation_is_treated_as_the_newest_with_its_numbers_if_allowed() {
        let newest = Generation::V26_1;
        let known = newest.delta().segments;
        let more: Vec<Segment> = known.iter().chain(known).copied().collect();
        assert!(choose(newest, &more, false).is_err());
        assert_eq!(choose(newest, &more, true).unwrap(), newest);
        assert_eq!(choose(Generation::V8_5_0, &[], true).unwrap(), Generation::V8_5_0);
        // A known generation is not guessed.
        assert_eq!(choose(newest, Generation::V9_0_0.delta().segments, true).unwrap(), Generation::V9_0_0);
    }

    #[test]
    fn another_copy_of_this_library_is_named_and_this_one_is_not() {
        let maps = "1000-2000 r-xp 00000000 08:01 7  /usr/bin/python3\n\
                    5000-6000 r-xp 00000000 08:01 8  /x/_ascend_vmm.abi3.so\n\
                    7000-8000 r-xp 00000000 08:01 9  /opt/lib64/libascendcl.so (deleted)\n";
        assert_eq!(other_copy(maps, 0x5800).as_deref(), Some("/opt/lib64/libascendcl.so"));
        assert_eq!(other_copy(maps, 0x7000).as_deref(), Some("/x/_ascend_vmm.abi3.so"));
        assert_eq!(other_copy(&maps[..maps.len() / 2], 0x5800), None);
        assert_eq!(vendor_library(maps), None);
    }

    #[test]
    fn an_interrupted_init_is_repeated_with_signals_blocked_and_not_forever() {
        // The standard library has a handler for this one.
        let is_blocked = || SigSet::thread_get_mask().unwrap().contains(Signal::SIGSEGV);
        let interrupted = || Refused::new(SystemCall::Svm(Op::InitProcess), Errno::EAGAIN);
        let mut seen = Vec::new();
        let answer = init_process(|| {
            seen.push(is_blocked());
            if seen.len() < 3 { Err(interrupted()) } else { Ok(HostPages { page_size: 4096, giant_pages: false }) }
        });
        assert!(answer.is_ok());
        assert_eq!(seen, [false, true, true]);
        assert!(!is_blocked(), "signals stay blocked");
        let mut attempts = 0;
        let answer = init_process(|| {
            attempts += 1;
            Err(interrupted())
        });
        assert_eq!((answer.unwrap_err().errno, attempts), (Errno::EAGAIN, INIT_ATTEMPTS));
    }
}
