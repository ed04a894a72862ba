//! A point in time.

use std::time::{Duration, Instant};

/// The end of a duration. One that is too long for the clock never ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// The end of a duration that begins now.
    pub(crate) fn after(duration: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(duration))
    }

    /// The time that is left: zero once it is over, [`Duration::MAX`] if it never ends.
    pub(crate) fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_duration_makes_a_deadline() {
        assert!(Deadline::after(Duration::ZERO).is_over());
        let never = Deadline::after(Duration::MAX);
        assert_eq!(never.left(), Duration::MAX);
        let hour = Deadline::after(Duration::from_secs(3600));
        assert!(!hour.is_over());
    }
}
