//! Memory of a writer for a framework's allocator.
//!
//! A framework calls an allocator's functions with nothing that says for whom, so one pool at a
//! time is in use in a process. It hands out pieces of memory that is mapped already: it calls
//! nobody and waits for nobody. What does not fit is NULL.

use crate::error::{Error, Result};
use std::sync::{Mutex, PoisonError};

/// Pieces begin at multiples of this.
const ALIGNMENT: u64 = 512;

/// Mapped memory, of which pieces are handed out one behind another. Nothing is taken back: after
/// the commit a hole would be filled inside of committed memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    address: u64,
    size: u64,
    device: i32,
    used: u64,
    refused: Option<String>,
}

/// What a pool has handed out, and why it refused, if it did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolUse {
    /// Bytes from its first address on.
    pub used: u64,
    /// The first request that it refused, as a sentence.
    pub refused: Option<String>,
}

static CURRENT: Mutex<Option<Pool>> = Mutex::new(None);

impl Pool {
    /// Memory from an address on.
    pub fn new(address: u64, size: u64, device: i32) -> Pool {
        Pool { address, size, device, used: 0, refused: None }
    }

    /// A piece of it.
    fn take(&mut self, size: u64, device: i32) -> Option<u64> {
        let start = self.used.next_multiple_of(ALIGNMENT);
        let end = start.checked_add(size);
        let refused = if device != self.device {
            format!("{size} bytes on device {device}, and the pool is on device {}", self.device)
        } else if end.is_none_or(|end| end > self.size) {
            let left = self.size.saturating_sub(start);
            format!("{size} bytes, and {left} of the pool's {} are left; give the pool more bytes", self.size)
        } else {
            self.used = end?;
            return self.address.checked_add(start);
        };
        self.refused.get_or_insert(refused);
        None
    }

    /// From now on the allocator's functions hand out this memory.
    ///
    /// # Errors
    ///
    /// Another pool is in use.
    pub fn enter(self) -> Result<()> {
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_some() {
            let problem = "another pool of served memory is in use in this process".into();
            return Err(Error::Invalid { problem, remedy: "leave it first: a framework has one allocator" });
        }
        *current = Some(self);
        Ok(())
    }

    /// Ends that; `None` if no pool is in use.
    pub fn leave() -> Option<PoolUse> {
        let pool = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(PoolUse { used: pool.used, refused: pool.refused })
    }

    /// Memory for the allocator's caller, 0 if there is none.
    pub(crate) fn allocate(size: u64, device: i32) -> u64 {
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        current.as_mut().and_then(|pool| pool.take(size, device)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_and_do_not_meet_and_what_does_not_fit_is_said() {
        let mut pool = Pool::new(1 << 40, 4096, 0);
        assert_eq!(pool.take(1, 0), Some(1 << 40));
        assert_eq!(pool.take(600, 0), Some((1 << 40) + 512));
        assert_eq!(pool.take(512, 0), Some((1 << 40) + 1536));
        assert_eq!(pool.take(8, 1), None);
        assert!(pool.refused.as_ref().is_some_and(|text| text.contains("device 1")), "{pool:?}");
        assert_eq!(pool.take(2049, 0), None);
        assert_eq!(pool.take(u64::MAX, 0), None);
        assert_eq!(pool.take(2048, 0), Some((1 << 40) + 2048));
        assert_eq!(pool.take(1, 0), None);
    }
}
