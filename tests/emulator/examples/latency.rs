//! Prints what the emulator costs on this host: an ioctl as a multiple of a bare round trip through
//! a seccomp listener, copies as a multiple of memcpy, and how the cost of a call grows with what
//! the driver holds. Only the ratios can be compared between machines.

#[path = "../tests/system_calls/client.rs"]
#[allow(dead_code, reason = "tests use the rest of it")]
mod client;

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator, Unavailable, latency};
use ascend_ioctl::svm::{self, Op};
use client::Session;
use nix::errno::Errno;
use std::error::Error;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const BLOCK: usize = svm::HUGE_PAGE as usize;

/// A part that needs a memory session.
type Part = fn() -> Result<(), Errno>;

/// A process can have one session, so each part runs in a process of its own.
const PARTS: [(&str, Part); 3] = [("copies", copies), ("reservations", reservations), ("windows", windows)];

fn main() -> ExitCode {
    let result = match std::env::args().nth(1) {
        None => all(),
        Some(name) if name == "elsewhere" => elsewhere(),
        Some(name) => match PARTS.iter().find(|part| part.0 == name) {
            Some((_, part)) => run(*part),
            None => Err(format!("there is no part {name}").into()),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn all() -> Result<(), Box<dyn Error>> {
    println!("{:?}", latency::measure(20_000)?);
    for threads in [1, 8] {
        let compared = latency::compare(threads, 100_000)?;
        println!(
            "ioctl of {threads} threads: {:?} is {:.2} x a bare round trip ({:?})",
            compared.emulated,
            compared.ratio(),
            compared.bare
        );
    }
    host()?.spawn(Command::new(std::env::current_exe()?).arg("elsewhere"))?.wait()?;
    for (name, _) in PARTS {
        Command::new(std::env::current_exe()?).arg(name).status()?;
    }
    Ok(())
}

/// A client in a process of its own, as under `emulate`.
fn elsewhere() -> Result<(), Box<dyn Error>> {
    println!("ioctl of another process: {:?}", latency::attached(100_000)?);
    print!("another process: ");
    Ok(copies()?)
}

fn host() -> Result<Emulator, Unavailable> {
    Emulator::start(Config { device_process: DeviceProcess::Automatic, hbm: 1 << 40, ..Config::default() })
}

fn run(part: Part) -> Result<(), Box<dyn Error>> {
    Ok(host()?.run(part)?)
}

fn session() -> Result<(Session, u64), Errno> {
    let session = Session::start(Config::default().generation)?;
    let heap = session.heap()?;
    Ok((session, heap))
}

/// The best time of some runs.
fn best(runs: usize, mut work: impl FnMut() -> Result<(), Errno>) -> Result<Duration, Errno> {
    let mut best = Duration::MAX;
    for _ in 0..runs {
        let start = Instant::now();
        work()?;
        best = best.min(start.elapsed());
    }
    Ok(best)
}

/// Copies of one block of 2 MiB, compared with memcpy.
fn copies() -> Result<(), Errno> {
    let (session, heap) = session()?;
    let (one, other) = (session.create(1)?, session.create(1)?);
    let second = heap + svm::HUGE_PAGE;
    session.map(heap, one, 1)?;
    session.map(second, other, 1)?;
    let (source, mut target) = (vec![1u8; BLOCK], vec![2u8; BLOCK]);
    let plain = best(400, || {
        std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
        Ok(())
    })?;
    let report = |name: &str, time: Duration| {
        println!(
            "copy of 2 MiB {name}: {time:?} is {:.2} x memcpy ({plain:?})",
            time.as_secs_f64() / plain.as_secs_f64()
        )
    };
    let from = source.as_ptr() as u64;
    let to = target.as_mut_ptr() as u64;
    let copy = |to, from, direction| best(400, || session.copy(to, from, BLOCK, direction));
    report("to the device", copy(heap, from, svm::COPY_HOST_TO_DEVICE)?);
    report("to the host", copy(to, heap, svm::COPY_DEVICE_TO_HOST)?);
    report("on the device", copy(second, heap, svm::COPY_DEVICE_TO_DEVICE)?);
    assert!(source == target, "the copies lost bytes");
    Ok(())
}

/// Reservations of one page, of which more and more are live.
fn reservations() -> Result<(), Errno> {
    let session = Session::start(Config::default().generation)?;
    let index = ((svm::NORMAL_START - svm::SVM_START) / svm::HEAP_UNIT) as u32;
    let size = 8 * svm::HEAP_UNIT;
    let (operation, kind, sub_kind) = (svm::HEAP_ENABLE, svm::HEAP_CHUNK, svm::SUB_RESERVE);
    session.call(Op::UpdateHeap, 0, &svm::UpdateHeap { operation, kind, sub_kind, index, size })?;
    let mut live = 0;
    let mut first = None;
    for until in [100_000, 1_000_000] {
        // The piece of ten thousand calls that was least disturbed.
        let time = best((until - live) / 10_000, || {
            for _ in 0..10_000 {
                let address = svm::NORMAL_START + live as u64 * 4096;
                session.call(Op::Alloc, 0, &svm::Alloc { address, size: 4096 })?;
                live += 1;
            }
            Ok(())
        })? / 10_000;
        let first = *first.get_or_insert(time);
        println!(
            "reservation, up to {until} live: {time:?} is {:.2} x the first",
            time.as_secs_f64() / first.as_secs_f64()
        );
    }
    Ok(())
}

/// Map and unmap of host memory, alone and beside blocks that have two windows each.
fn windows() -> Result<(), Errno> {
    let (session, heap) = session()?;
    let create = |pages: u64| {
        let (size, side, page) = (pages * svm::HUGE_PAGE, svm::SIDE_HOST, svm::PAGE_HUGE);
        let create = svm::MemCreate { size, side, page, ..Default::default() };
        Ok::<i32, Errno>(session.call(Op::MemCreate, svm::HOST_ID, &create)?.id)
    };
    let map = |slot: u64, id: i32| {
        let (address, size) = (heap + slot * svm::HUGE_PAGE, svm::HUGE_PAGE);
        session.call(Op::Alloc, 0, &svm::Alloc { address, size })?;
        let (side, page, pages) = (svm::SIDE_HOST, svm::PAGE_HUGE, 1);
        let map = svm::MemMap { address, size, id, side, page, pages, ..Default::default() };
        session.call(Op::MemMap, svm::HOST_ID, &map)?;
        // SAFETY: host memory was mapped at these addresses just now.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, BLOCK) }.fill(slot as u8 | 1);
        Ok::<u64, Errno>(address)
    };
    let probe = create(1)?;
    let unmap = |slot| {
        let mut best = Duration::MAX;
        let mut all = Duration::ZERO;
        for _ in 0..100 {
            let address = map(slot, probe)?;
            let start = Instant::now();
            session.unmap(address)?;
            best = best.min(start.elapsed());
            all += start.elapsed();
        }
        Ok::<_, Errno>((best, all / 100))
    };
    let alone = unmap(500)?;
    for slot in 0..64 {
        let id = create(1)?;
        map(slot, id)?;
        map(100 + slot, id)?;
    }
    let beside = unmap(501)?;
    println!(
        "unmap of 2 MiB of written host memory: {:?} (mean {:?}); beside 64 blocks with two windows: {:?} (mean {:?})",
        alone.0, alone.1, beside.0, beside.1
    );
    Ok(())
}
