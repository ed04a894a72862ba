//! What the emulated driver itself costs.
//!
//! The figures are ratios of times of one run, measured in turns: what the emulator adds to the
//! kernel's part, which it cannot change. `cargo run --release -p ascend-emulator
//! --example latency` shows the times.

use super::figure::{Figure, Quantity, Target};
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator, latency};
use ascend_vmm::{Device, LogicalId, Mapping, PhysicalMemory, Reservation, Session};
use std::hint::black_box;
use std::time::{Duration, Instant};

const BLOCK: u64 = 2 << 20;

/// All figures, from `calls` ioctls and at most `most` reservations.
pub fn figures(calls: usize, most: u64) -> Vec<Figure> {
    let ioctl = |threads| latency::compare(threads, calls).map(|it| it.ratio()).map_err(|error| error.to_string());
    let mut figures = vec![
        ("emulated ioctl, to a bare seccomp round trip", ioctl(1), Target::must(1.9)),
        ("… with 8 client threads", ioctl(8), Target::must(2.0)),
    ];
    let rounds = calls / 100;
    let [written, read] = apart(of_session(|session| copies(session, rounds)));
    figures.push(("emulated copy of 2 MiB to a device, to memcpy", written, Target::must(3.0)));
    figures.push(("emulated copy of 2 MiB from a device, to memcpy", read, Target::must(3.0)));
    let unmap = of_session(|session| unmap_beside_windows(session, rounds.div_ceil(10)));
    figures.push(("emulated unmap beside 64 doubly mapped blocks", unmap, Target::must(2.0)));
    if most >= 1_000_000 {
        let grown = of_session(reservations);
        figures.push(("emulated reservation, 10⁶ to 10⁵ live", grown, Target::must(2.0)));
    }
    let figure = |(name, ratio, target)| Figure::new(name, None, Quantity::Times, ratio, target);
    figures.into_iter().map(figure).collect()
}

fn apart(both: Result<[f64; 2], String>) -> [Result<f64, String>; 2] {
    match both {
        Ok(both) => both.map(Ok),
        Err(error) => [Err(error.clone()), Err(error)],
    }
}

fn of_session<T: Send>(measure: impl FnOnce(&Session) -> ascend_vmm::Result<T> + Send) -> Result<T, String> {
    let config = Config { device_process: DeviceProcess::Automatic, ..Config::default() };
    let emulator = Emulator::start(config).map_err(|error| error.to_string())?;
    emulator.run(|| Session::open().and_then(|session| measure(&session)).map_err(|error| error.to_string()))
}

fn timed<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<Duration, E> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

fn ratio(one: Duration, other: Duration) -> f64 {
    one.as_secs_f64() / other.as_secs_f64()
}

/// Copies to a device and from it, as multiples of memcpy; the best time of each.
fn copies(session: &Session, rounds: usize) -> ascend_vmm::Result<[f64; 2]> {
    let device: Device = session.device(LogicalId(0))?;
    let memory: PhysicalMemory = device.create(BLOCK)?;
    let room: Reservation = session.reserve(BLOCK)?;
    let mapping: Mapping = room.map(0, &memory)?;
    let (source, mut target) = (vec![1u8; BLOCK as usize], vec![2u8; BLOCK as usize]);
    let mut best = [Duration::MAX; 3];
    for _ in 0..rounds.max(1) {
        let plain = timed(|| {
            black_box(&mut target).copy_from_slice(black_box(&source));
            Ok::<_, ascend_vmm::Error>(())
        })?;
        let times = [plain, timed(|| mapping.write(0, &source))?, timed(|| mapping.read(0, &mut target))?];
        best = std::array::from_fn(|index| best[index].min(times[index]));
    }
    let [plain, written, read] = best;
    Ok([ratio(written, plain), ratio(read, plain)])
}

/// The time to unmap host memory that the CPU wrote, beside blocks whose bytes the emulator must
/// keep equal at two addresses, as a multiple of the time without them.
fn unmap_beside_windows(session: &Session, rounds: usize) -> ascend_vmm::Result<f64> {
    const BLOCKS: u64 = 64;
    let host = session.host()?;
    let room = session.reserve(BLOCK)?;
    let probe = host.create(BLOCK)?;
    let unmap = || {
        let mapping = room.map(0, &probe)?;
        mapping.write(0, &vec![3; BLOCK as usize])?;
        timed(|| mapping.unmap().map_err(ascend_vmm::Error::from))
    };
    let best = || -> ascend_vmm::Result<Duration> {
        let mut best = Duration::MAX;
        for _ in 0..rounds.max(1) {
            best = best.min(unmap()?);
        }
        Ok(best)
    };
    let alone = best()?;
    let twice = session.reserve(2 * BLOCKS * BLOCK)?;
    let mut kept = Vec::new();
    for index in 0..BLOCKS {
        let memory = host.create(BLOCK)?;
        for place in [index, BLOCKS + index] {
            let mapping = twice.map(place * BLOCK, &memory)?;
            mapping.write(0, &vec![index as u8 + 1; BLOCK as usize])?;
            kept.push(mapping);
        }
    }
    Ok(ratio(best()?, alone))
}

/// The time of a reservation with a million live, as a multiple of the time with a tenth as many;
/// each the least disturbed of several runs of ten thousand.
fn reservations(session: &Session) -> ascend_vmm::Result<f64> {
    let mut live = Vec::new();
    let mut piece = || {
        timed(|| {
            for _ in 0..10_000 {
                live.push(session.reserve(BLOCK)?);
            }
            Ok::<_, ascend_vmm::Error>(())
        })
    };
    let mut best = |pieces: usize| -> ascend_vmm::Result<Duration> {
        let mut best = Duration::MAX;
        for _ in 0..pieces {
            best = best.min(piece()?);
        }
        Ok(best)
    };
    let few = best(10)?;
    best(80)?;
    Ok(ratio(best(10)?, few))
}
