//! Sleep and wake.

/// A tag that is asleep.
pub(super) struct Asleep {
    size: u64,
}

impl Asleep {
    pub(super) fn size(&self) -> u64 {
        self.size
    }
}
