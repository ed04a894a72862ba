//! Driver generations.
/// A generation of the driver's ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Generation {
    /// 8.5.0
    V8_5_0,
    /// 9.0.0
    V9_0_0,
    /// 26.1
    V26_1,
}

impl Generation {
    /// The newest that we know.
    pub const NEWEST: Generation = Generation::V26_1;
}
