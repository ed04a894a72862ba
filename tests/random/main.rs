//! Long random sequences of safe calls: by one thread against a model of what must happen, and by several at once.
//!
//! Each sequence is made from a seed, which is printed when the sequence fails. `ASCEND_VMM_SEED` runs one seed alone, `ASCEND_VMM_STEPS` makes
//! sequences longer.

mod model;
mod seed;
mod threads;

use ascend_emulator::Config;
use ascend_emulator::config::DeviceProcess;

const MIB2: u64 = 2 << 20;
const GIB: u64 = 1 << 30;

/// A host whose devices start their processes by themselves, which is faster.
fn host(devices: u32) -> Config {
    Config { devices, device_process: DeviceProcess::Automatic, ..Config::default() }
}
