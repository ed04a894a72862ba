//! A kernel that answers nonsense: every word of every answer is replaced by extremes while a
//! program uses the whole library. It may fail with an error; it must not panic, hang, or allocate
//! for impossible counts.
//!
//! Each altered answer gets a process of its own, so that it leaves nothing for the next.

use crate::support::corpus::{line, mutate, stored};
use crate::support::random::Random;
use crate::support::{MIB2, inject, limits, plain, survey_options};
use ascend_emulator::{Config, Emulator, fork, isolated_leaky};
use ascend_ioctl::Generation;
use ascend_vmm::copy::{Rows, read_batch, write_batch};
use ascend_vmm::device_process::{Settings, Step};
use ascend_vmm::discovery;
use ascend_vmm::share::{self, BareTgid, HandleKind};
use ascend_vmm::{Error, Failed, LogicalId, MemoryKind, Result, Session};
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// The system's allocator, which keeps the size of the largest allocation.
struct Measuring;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Measuring {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: as for this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: as for this function.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as for this function.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as for this function.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Measuring = Measuring;

/// The table of mappings is the largest thing that the library allocates.
const ALLOCATION: usize = 64 << 20;

/// A program that waits longer than this hangs.
const SECONDS: u32 = 60;

fn done<T>(failed: Failed<T>) -> Error {
    failed.error
}

/// Finds out which devices there are.
fn discover() -> Result<()> {
    let options = survey_options().timeout(Duration::from_secs(5));
    // Everything in it can be printed.
    let _ = format!("{:?}", discovery::survey(&options));
    discovery::can_access(LogicalId(0), LogicalId(1)).map(drop)
}

/// True while answers are altered: then some never come.
static ALTERED: AtomicBool = AtomicBool::new(false);

/// Limits for daemons whose answers may be altered.
fn impatient() -> Settings {
    let limit = if ALTERED.load(Ordering::Relaxed) { Duration::from_millis(500) } else { Duration::from_secs(30) };
    limits(limit).limit(Step::Connect, Duration::ZERO)
}

/// Starts a device process and ends it.
fn use_device() -> Result<()> {
    let session = Session::builder().device_process(impatient()).open()?;
    let device = session.device(LogicalId(0))?;
    device.create(MIB2)?;
    device.close().map_err(done)
}

/// Uses every kind of object, and checks nothing that it reads.
fn use_memory() -> Result<()> {
    let session = Session::open()?;
    let device = session.device(LogicalId(0))?;
    let peer = session.device(LogicalId(1))?;
    let _ = format!("{:?} {:?}", device.memory_info(MemoryKind::Hbm), device.capabilities());
    let memory = device.create(MIB2)?;
    let reservation = session.reserve(2 * MIB2)?;
    let mapping = reservation.map(0, &memory)?;
    let more = device.create(MIB2)?;
    let second = reservation.map(MIB2, &more)?;
    reservation.slice(MIB2 - 4, 8)?.write(b"abcdefgh")?;
    second.read(0, &mut [0; 4])?;
    mapping.fill(0, 4096, 7)?;
    let rows = Rows { width: 3, height: 5, pitch: 256, buffer_pitch: 4 };
    mapping.slice(0, 4096)?.write_rows(&rows, &[1; 20])?;
    mapping.slice(0, 4096)?.read_rows(&rows, &mut [0; 20])?;
    write_batch(&[(mapping.slice(0, 2)?, b"ab"), (second.slice(8, 3)?, b"cde")])?;
    read_batch(&mut [(second.slice(8, 3)?, &mut [0; 3])])?;
    second.slice(0, 64)?.copy_from(&mapping.slice(0, 64)?)?;
    mapping.write_async(64, vec![1; 5]).map_err(done)?.wait().map_err(done)?;
    drop(mapping.read_async(64, vec![0; 5]).map_err(done)?);
    let view = mapping.host_view()?;
    view.write(0, b"view")?;
    mapping.grant(&peer)?;
    mapping.is_granted(&peer)?;
    let host = session.host()?.create(MIB2)?;
    let on_host = session.reserve(MIB2)?.map(0, &host)?;
    on_host.slice(0, 64)?.copy_from(&mapping.slice(0, 64)?)?;
    let export = more.export()?;
    export.trust(&[BareTgid::of_this_process(&session)?])?;
    export.trusts_anyone()?;
    let _ = export.fabric_handle(HandleKind::Fabric);
    let imported = share::import(&peer, &export.ticket()?)?;
    let of_import = session.reserve(imported.size())?.map(0, &imported)?;
    of_import.read(0, &mut [0; 4])?;
    // An error that explains itself: it queries what is free.
    let _ = device.create(1 << 45).map_err(|error| error.to_string());
    Ok(())
}

/// How a program ends in a process of its own.
fn run(program: fn() -> Result<()>) -> WaitStatus {
    let child = fork(|| {
        // SAFETY: only sets a timer, which ends a process that hangs.
        unsafe { nix::libc::alarm(SECONDS) };
        LARGEST.store(0, Ordering::Relaxed);
        if let Err(error) = program() {
            assert!(!error.to_string().is_empty());
        }
        let largest = LARGEST.load(Ordering::Relaxed);
        assert!(largest <= ALLOCATION, "an allocation of {largest} bytes");
    });
    child.wait()
}

/// The answers that a program gets, in order, each with its command and which of its calls it
/// belongs to.
fn answers(emulator: &Emulator, program: fn() -> Result<()>) -> Vec<(&'static str, usize, Vec<u8>)> {
    emulator.record();
    let status = run(program);
    assert!(matches!(status, WaitStatus::Exited(_, 0)), "{status:?}");
    let mut counts: BTreeMap<&'static str, usize> = BTreeMap::new();
    let named = emulator.records().into_iter().filter_map(|record| Some((record.cmd?, record.answer)));
    let numbered = named.filter(|(name, _)| !name.is_empty()).map(|(name, answer)| {
        let nth = counts.entry(name).or_default();
        *nth += 1;
        (name, *nth, answer)
    });
    numbered.collect()
}

/// Commands that carry answers of many kinds.
const CARRIERS: [&str; 3] = ["URD", "RECV", "RECV_PEEK"];

/// The first and the last answer of each command, and all answers of carriers.
fn chosen(answers: &[(&'static str, usize, Vec<u8>)]) -> Vec<(String, Vec<u8>)> {
    let last = |name: &str| answers.iter().filter(|(other, ..)| *other == name).count();
    let wanted = |name: &str, nth: usize| CARRIERS.contains(&name) || nth == 1 || nth == last(name);
    let wanted = answers.iter().filter(|(name, nth, _)| wanted(name, *nth));
    wanted.map(|(name, nth, answer)| (format!("{name}#{nth}"), answer.clone())).collect()
}

const EXTREMES: [u32; 4] = [0, 1, u32::MAX, 1 << 31];

/// The faults that replace words of an answer by extremes: each word that is not 0, both halves of
/// a 64-bit number, and all words that are 0 together, because few of those are fields.
fn alterations(call: &str, answer: &[u8]) -> Vec<String> {
    let fault = |offset: usize, bytes: &[u8]| {
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{call}[{offset}]={digits}")
    };
    let mut faults = Vec::new();
    for (offset, word) in (0..).step_by(4).zip(answer.chunks_exact(4)).filter(|(_, word)| **word != [0; 4]) {
        let others = EXTREMES.iter().map(|extreme| extreme.to_le_bytes()).filter(|extreme| extreme != word);
        faults.extend(others.map(|extreme| fault(offset, &extreme)));
        if offset % 8 == 0 {
            faults.extend([u64::MAX, 1 << 63].map(|extreme| fault(offset, &extreme.to_le_bytes())));
        }
    }
    for extreme in &EXTREMES[1..] {
        let mut altered = answer.to_vec();
        for word in altered.chunks_exact_mut(4).filter(|word| **word == [0; 4]) {
            word.copy_from_slice(&extreme.to_le_bytes());
        }
        if altered != answer {
            faults.push(fault(0, &altered));
        }
    }
    faults
}

/// How many alterations a test makes unless all are wanted.
const SOME: usize = 25;

/// The generation whose answers are all altered, if `HOSTILE_ANSWERS_ALL` names one.
fn all_of() -> Option<Generation> {
    std::env::var("HOSTILE_ANSWERS_ALL").ok().map(|name| name.parse().unwrap())
}

/// The host of a test. Without a wanted generation the tests take turns.
fn host(config: Config, part: usize) -> Config {
    Config { generation: all_of().unwrap_or(Generation::ALL[part % Generation::ALL.len()]), ..config }
}

/// Runs a program once for each of some alterations, chosen by a fixed seed, or for all of them if
/// `HOSTILE_ANSWERS_ALL` names a generation. They are divided among `parts` tests, each of which
/// has a time limit.
fn survive(emulator: &Emulator, program: fn() -> Result<()>, part: usize, parts: usize) {
    let answers = chosen(&answers(emulator, program));
    let mut faults: Vec<String> = answers.iter().flat_map(|(call, answer)| alterations(call, answer)).collect();
    let mut random = Random(11);
    for last in (1..faults.len()).rev() {
        faults.swap(last, random.index(last + 1));
    }
    let mine = faults.iter().skip(part).step_by(parts);
    let count = if all_of().is_some() { faults.len() } else { SOME };
    eprintln!("part {part} of {} alterations of {} answers", faults.len(), answers.len());
    run_with(emulator, program, mine.take(count));
}

/// Runs a program once for each fault.
fn run_with<'a>(emulator: &Emulator, program: fn() -> Result<()>, faults: impl Iterator<Item = &'a String>) {
    let mut problems = Vec::new();
    ALTERED.store(true, Ordering::Relaxed);
    for fault in faults {
        inject(emulator, fault);
        match run(program) {
            WaitStatus::Exited(_, 0) => {}
            WaitStatus::Signaled(_, Signal::SIGALRM, _) => problems.push(format!("{fault}: hangs")),
            status => problems.push(format!("{fault}: {status:?}")),
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

macro_rules! parts {
    ($($name:ident: $program:ident, $part:literal of $parts:literal;)*) => {
        $(
            #[test]
            fn $name() {
                isolated_leaky(host(plain(), $part), |emulator| survive(emulator, $program, $part, $parts));
            }
        )*
    };
}

parts! {
    no_answer_breaks_discovery_0: discover, 0 of 3;
    no_answer_breaks_discovery_1: discover, 1 of 3;
    no_answer_breaks_discovery_2: discover, 2 of 3;
    no_answer_breaks_the_use_of_memory_0: use_memory, 0 of 8;
    no_answer_breaks_the_use_of_memory_1: use_memory, 1 of 8;
    no_answer_breaks_the_use_of_memory_2: use_memory, 2 of 8;
    no_answer_breaks_the_use_of_memory_3: use_memory, 3 of 8;
    no_answer_breaks_the_use_of_memory_4: use_memory, 4 of 8;
    no_answer_breaks_the_use_of_memory_5: use_memory, 5 of 8;
    no_answer_breaks_the_use_of_memory_6: use_memory, 6 of 8;
    no_answer_breaks_the_use_of_memory_7: use_memory, 7 of 8;
}

#[test]
fn no_answer_breaks_the_start_of_a_device_process() {
    isolated_leaky(host(Config::default(), 0), |emulator| survive(emulator, use_device, 0, 1));
}

/// Runs a program with answers of `carriers` replaced by stored ones, and by ones made from those.
fn survive_stored(emulator: &Emulator, program: fn() -> Result<()>, carriers: &[&str], file: &str) {
    let answers = answers(emulator, program);
    let places: Vec<_> = answers.iter().filter(|(name, ..)| carriers.contains(name)).collect();
    let mut random = Random(7);
    let mut faults = Vec::new();
    for input in stored(file) {
        for mutated in [false, true, true] {
            let mut bytes = if mutated { mutate(&input, &mut random) } else { input.clone() };
            let (name, nth, answer) = places[random.index(places.len())];
            // An answer keeps its length.
            bytes.resize(answer.len().max(1), 0);
            faults.push(format!("{name}#{nth}[0]={}", line(&bytes)));
        }
    }
    run_with(emulator, program, faults.iter());
}

#[test]
fn stored_answers_of_urd_in_the_wrong_places_do_not_break_discovery() {
    isolated_leaky(plain(), |emulator| survive_stored(emulator, discover, &["URD"], "urd_answers.txt"));
}

#[test]
fn stored_replies_of_a_daemon_in_the_wrong_places_do_not_break_the_start_of_a_device_process() {
    isolated_leaky(Config::default(), |emulator| {
        survive_stored(emulator, use_device, &["RECV", "RECV_PEEK"], "daemon_replies.txt");
    });
}
