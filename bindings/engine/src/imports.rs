//! The memory that this process has imported.
//!
//! The kernel refuses a second import of memory that a process holds (EFAULT). Two domains, or two
//! objects for one domain, may have the same memory, so imports are counted here.

use crate::acl::Acl;
use crate::error::Result;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Memory, whatever its handle is: numbers of handles are used again, these are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Memory {
    /// The life of the service.
    pub(crate) instance: u64,
    /// The allocation in it.
    pub(crate) allocation: u64,
    /// The device on which it is imported.
    pub(crate) device: i32,
}

struct Held {
    handle: usize,
    /// 0 if it could not be given back.
    count: usize,
}

static IMPORTS: Mutex<BTreeMap<Memory, Held>> = Mutex::new(BTreeMap::new());

/// One use of an import. It is given back by [`Import::release`], because that can fail.
#[derive(Debug)]
pub(crate) struct Import {
    memory: Memory,
    pub(crate) handle: usize,
}

impl Import {
    pub(crate) fn of(acl: &Acl, memory: Memory, shareable: u64) -> Result<Import> {
        let mut imports = IMPORTS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = imports.get_mut(&memory) {
            held.count += 1;
            return Ok(Import { memory, handle: held.handle });
        }
        let handle = acl.import(shareable, memory.device)?;
        imports.insert(memory, Held { handle, count: 1 });
        Ok(Import { memory, handle })
    }

    /// Ends this use; the last one gives the memory back. What cannot be given back is kept, and
    /// used by the next import.
    pub(crate) fn release(self, acl: &Acl) -> Result<()> {
        let mut imports = IMPORTS.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(held) = imports.get_mut(&self.memory) else { return Ok(()) };
        held.count = held.count.saturating_sub(1);
        if held.count == 0 {
            acl.free(held.handle)?;
            imports.remove(&self.memory);
        }
        Ok(())
    }
}
