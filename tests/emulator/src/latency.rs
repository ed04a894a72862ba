//! How long an emulated ioctl takes, measured from a client thread.

use crate::config::Config;
use crate::front::{Emulator, Unavailable};
use ascend_ioctl::davinci;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
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
        let mut argument = davinci::OpenArg::new("SVM");
        let request = davinci::GET_MODULE_STATUS.request();
        let mut call = || {
            let start = Instant::now();
            // SAFETY: the argument has the command's size and is writable.
            unsafe { libc::ioctl(file.as_raw_fd(), request.into(), &raw mut argument) };
            start.elapsed()
        };
        for _ in 0..calls / 10 {
            call();
        }
        Ok((0..calls).map(|_| call()).collect())
    });
    let mut times = times
        .map_err(|error| Unavailable::Server(nix::errno::Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))))?;
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
