//! Addresses of a process, with imported memory behind them.

use crate::acl::Acl;
use crate::error::{Error, Result};
use crate::imports::{Import, Memory};
use ascend_vmm_service::protocol::Share;
use ascend_vmm_service::{Allocation, Entry};

/// The least that can be reserved.
const LEAST: u64 = 2 << 20;

/// An allocation, and where it is mapped.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) allocation: Allocation,
    /// From the first address.
    pub(crate) start: u64,
    /// `None` while nothing is mapped.
    import: Option<Import>,
}

/// Allocations side by side, in one reservation.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) device: i32,
    pub(crate) instance: u64,
    /// `None` when it is released.
    address: Option<u64>,
    pub(crate) size: u64,
    pub(crate) places: Vec<Place>,
    /// Where the next allocation begins.
    pub(crate) end: u64,
    process: u32,
}

impl Space {
    pub(crate) fn reserve(acl: &Acl, device: i32, instance: u64, size: u64) -> Result<Space> {
        let address = Some(acl.reserve(size.max(LEAST))?);
        let process = std::process::id();
        Ok(Space { device, instance, address, size, places: Vec::new(), end: 0, process })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address.unwrap_or(0)
    }

    /// The address of an entry.
    pub(crate) fn address_of(&self, entry: &Entry) -> Option<u64> {
        let at = self.places.binary_search_by_key(&entry.allocation, |place| place.allocation.id).ok()?;
        self.address?.checked_add(self.places[at].start)?.checked_add(entry.offset)
    }

    /// The place of an offset.
    pub(crate) fn place_at(&self, offset: u64) -> Option<&Place> {
        let at = self.places.partition_point(|place| place.start <= offset).checked_sub(1)?;
        self.places.get(at)
    }

    /// Adds an allocation behind the others, and maps it.
    pub(crate) fn add(&mut self, acl: &Acl, allocation: Allocation, share: &Share) -> Result<()> {
        // What a service says is checked: nothing is mapped beyond the reservation.
        if allocation.size == 0 || allocation.size > self.size - self.end {
            let problem = format!("an allocation of {} bytes does not fit into {}", allocation.size, self.size);
            return Err(Error::Invalid { problem, remedy: "open the domain with a greater capacity" });
        }
        let start = self.end;
        self.end += allocation.size;
        self.places.push(Place { allocation, start, import: None });
        self.map(acl, self.places.len() - 1, share.handle)
    }

    /// Unmaps the last allocation, and forgets it.
    pub(crate) fn remove_last(&mut self, acl: &Acl) -> Result<()> {
        let address = self.address();
        let Some(place) = self.places.last_mut() else { return Ok(()) };
        if place.import.is_some() {
            acl.unmap(address + place.start)?;
        }
        let import = place.import.take();
        self.end = place.start;
        self.places.pop();
        import.map_or(Ok(()), |import| import.release(acl))
    }

    /// Maps an allocation, which is imported if it is not.
    pub(crate) fn map(&mut self, acl: &Acl, at: usize, shareable: u64) -> Result<()> {
        let address = self.address();
        let place = &mut self.places[at];
        let memory = Memory { instance: self.instance, allocation: place.allocation.id, device: self.device };
        let import = Import::of(acl, memory, shareable)?;
        match acl.map(address + place.start, place.allocation.size, import.handle) {
            Ok(()) => place.import = Some(import),
            Err(error) => {
                let _ = import.release(acl);
                return Err(error);
            }
        }
        Ok(())
    }

    /// The places at which nothing is mapped.
    pub(crate) fn unmapped(&self) -> Vec<usize> {
        let all = self.places.iter().enumerate();
        all.filter(|(_, place)| place.import.is_none()).map(|(at, _)| at).collect()
    }

    /// Unmaps all that can be unmapped, and gives the imports back. Returns the first failure.
    pub(crate) fn unmap(&mut self, acl: &Acl) -> Result<()> {
        let (address, mut result) = (self.address(), Ok(()));
        for place in self.places.iter_mut().rev() {
            let Some(import) = place.import.take() else { continue };
            match acl.unmap(address + place.start) {
                Ok(()) => result = result.and(import.release(acl)),
                Err(error) => {
                    place.import = Some(import);
                    result = result.and(Err(error));
                }
            }
        }
        result
    }

    /// Unmaps everything, and gives the addresses back.
    pub(crate) fn close(&mut self, acl: &Acl) -> Result<()> {
        self.unmap(acl)?;
        if let Some(address) = self.address {
            acl.release(address)?;
            self.address = None;
        }
        Ok(())
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // A child has a copy of the object, and not of the memory.
        if self.process != std::process::id() || self.address.is_none() {
            return;
        }
        let Ok(acl) = Acl::of_this_process() else { return };
        // Work on the device may use it; without a device nobody computes in this thread.
        if acl.device().is_ok_and(|device| device == self.device) {
            let _ = acl.synchronize();
        }
        if let Err(error) = self.close(acl) {
            tracing::warn!("memory of the service stays mapped until this process ends: {error}");
        }
    }
}
