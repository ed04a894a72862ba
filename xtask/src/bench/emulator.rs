//! What the emulated driver itself costs.
//!
//! The figures are ratios of times of one run: they say how much the emulator adds to the kernel's
//! part, which it cannot change. `cargo run --release -p ascend-emulator --example latency` shows
//! more of them.

use super::figure::{Figure, Target, Unit};
use ascend_emulator::latency;

/// An emulated ioctl as a multiple of a round trip through a seccomp listener that does nothing
/// else.
pub fn figures(calls: usize) -> Vec<Figure> {
    let names = [(1, "emulated ioctl, to a bare seccomp round trip"), (8, "… with 8 client threads")];
    let figure = |(threads, name)| {
        let compared = latency::compare(threads, calls).map_err(|error| error.to_string());
        Figure::new(name, None, Unit::Times, compared.map(|compared| compared.ratio()), Target::must(2.5).aim(1.5))
    };
    names.into_iter().map(figure).collect()
}
