//! How long an emulated ioctl takes, measured from client threads, and how long a round trip
//! through a seccomp listener takes that does nothing else.
//!
//! Times depend on the machine and its load. The ratio of the two, measured in turns in one run, is
//! what the emulator adds.

use crate::config::Config;
use crate::front::{Answer, Emulator, Listener, Unavailable, install};
use ascend_ioctl::davinci;
use nix::errno::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Times of single calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    /// Number of calls.
    pub calls: usize,
    /// The fastest call.
    pub minimum: Duration,
    /// Half of the calls were faster.
    pub median: Duration,
    /// One call in a hundred was slower.
    pub percentile_99: Duration,
    /// The mean.
    pub mean: Duration,
}

/// Makes `calls` ioctls one after another on a new emulated host. GET_MODULE_STATUS copies an
/// argument in and out.
pub fn measure(calls: usize) -> Result<Latency, Unavailable> {
    let emulator = Emulator::start(Config::default())?;
    let times = emulator.run(|| -> io::Result<Vec<Duration>> {
        let file = File::options().read(true).write(true).open("/dev/davinci_manager")?;
        let descriptor = file.as_raw_fd();
        let (request, mut argument) = (request(), davinci::OpenArg::new("SVM"));
        for _ in 0..calls / 10 {
            call(descriptor, request, &mut argument);
        }
        Ok((0..calls)
            .map(|_| {
                let start = Instant::now();
                call(descriptor, request, &mut argument);
                start.elapsed()
            })
            .collect())
    });
    let mut times = times.map_err(unavailable)?;
    times.sort_unstable();
    let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or_default();
    Ok(Latency {
        calls: times.len(),
        minimum: at(0),
        median: at(50),
        percentile_99: at(99),
        mean: times.iter().sum::<Duration>() / times.len().max(1) as u32,
    })
}

/// The time per call of some client threads that call at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comparison {
    /// Number of client threads.
    pub threads: usize,
    /// An ioctl that a listener answers at once.
    pub bare: Duration,
    /// An ioctl that the emulator answers.
    pub emulated: Duration,
}

impl Comparison {
    /// The emulated ioctl as a multiple of the bare round trip.
    pub fn ratio(&self) -> f64 {
        self.emulated.as_secs_f64() / self.bare.as_secs_f64()
    }
}

/// Measures both in turns, often, and takes the best time of each: what other programs do to
/// the machine meanwhile only makes single turns slower.
pub fn compare(threads: usize, calls: usize) -> Result<Comparison, Unavailable> {
    let calls = (calls / TURNS / threads).max(1);
    let (mut bare, mut emulated) = (Duration::MAX, Duration::MAX);
    for _ in 0..TURNS {
        bare = bare.min(bare_turn(threads, calls)?);
        let emulator = Emulator::start(Config::default())?;
        let turn = emulator.run(|| -> io::Result<Duration> {
            let file = File::options().read(true).write(true).open("/dev/davinci_manager")?;
            Ok(turn(file.as_raw_fd(), threads, calls))
        });
        emulated = emulated.min(turn.map_err(unavailable)?);
    }
    Ok(Comparison { threads, bare, emulated })
}

/// The time per call on the driver that the calling thread is attached to, for a client in a
/// process of its own.
pub fn attached(calls: usize) -> io::Result<Duration> {
    let file = File::options().read(true).write(true).open("/dev/davinci_manager")?;
    let turns = (0..TURNS).map(|_| turn(file.as_raw_fd(), 1, (calls / TURNS).max(1)));
    Ok(turns.min().unwrap_or_default())
}

const TURNS: usize = 40;

/// A command that copies its argument in and out.
fn request() -> u32 {
    davinci::GET_MODULE_STATUS.request()
}

/// Ends the server of a bare turn. The filter does not know the numbers of commands.
fn end() -> u32 {
    request() ^ 0xff
}

fn bare_turn(threads: usize, calls: usize) -> Result<Duration, Unavailable> {
    let (send, receive) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let Ok(listener) = receive.recv().map(Listener::new) else { return };
            while let Ok(received) = listener.receive() {
                let Some(notification) = received else { continue };
                listener.answer(notification.id, Answer::Value(0));
                if notification.arguments[1] as u32 == end() {
                    return;
                }
            }
        });
        let client = scope.spawn(move || {
            // If this fails, the sender is dropped, which ends the server.
            let _ = send.send(install(false)?);
            let time = turn(-1, threads, calls);
            call(-1, end(), &mut davinci::OpenArg::new(""));
            Ok(time)
        });
        client.join().unwrap_or(Err(Unavailable::Server(Errno::ECHILD)))
    })
}

/// The time per call of threads that call at once, without that of the first calls.
fn turn(descriptor: RawFd, threads: usize, calls: usize) -> Duration {
    let start = std::sync::Barrier::new(threads);
    let times: Vec<Duration> = std::thread::scope(|scope| {
        let client = || {
            let (request, mut argument) = (request(), davinci::OpenArg::new("SVM"));
            for _ in 0..calls.div_ceil(10) {
                call(descriptor, request, &mut argument);
            }
            start.wait();
            // A single client is disturbed by other programs, not by other clients: its best
            // stretch counts. Several clients take turns, so all of their calls count.
            let stretch = if threads == 1 { calls.min(20) } else { calls };
            let mut best = Duration::MAX;
            for _ in 0..calls / stretch {
                let start = Instant::now();
                for _ in 0..stretch {
                    call(descriptor, request, &mut argument);
                }
                best = best.min(start.elapsed() / stretch as u32);
            }
            best
        };
        let clients: Vec<_> = (0..threads).map(|_| scope.spawn(client)).collect();
        clients.into_iter().filter_map(|client| client.join().ok()).collect()
    });
    times.into_iter().max().unwrap_or_default() / threads as u32
}

fn call(descriptor: RawFd, request: u32, argument: &mut davinci::OpenArg) {
    // SAFETY: the argument has the command's size and is writable.
    unsafe { libc::ioctl(descriptor, request.into(), std::ptr::from_mut(argument)) };
}

fn unavailable(error: io::Error) -> Unavailable {
    Unavailable::Server(Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}
