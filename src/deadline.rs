//! A point in time until which something may take.

use std::time::{Duration, Instant};

/// The end of a duration that may be too long for the clock: then it is never over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// From now on.
    pub(crate) fn after(duration: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(duration))
    }

    /// What is left of it: zero once it is over, [`Duration::MAX`] if it never is.
    pub(crate) fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }

    pub(crate) fn is_over(self) -> bool {
        self.left().is_zero()
    }

    /// The earlier of two.
    pub(crate) fn or_earlier(self, other: Deadline) -> Deadline {
        match (self.0, other.0) {
            (Some(one), Some(other)) => Deadline(Some(one.min(other))),
            (one, other) => Deadline(one.or(other)),
        }
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
        assert_eq!(never.or_earlier(hour), hour);
        assert_eq!(hour.or_earlier(never), hour);
        let minute = Deadline::after(Duration::from_secs(60));
        assert_eq!((hour.or_earlier(minute), minute.or_earlier(hour)), (minute, minute));
        assert!(!hour.is_over());
    }
}
