//! Served memory behind addresses.

use super::Result;
use crate::layout::{Allocation, Entry, PageSize};
use crate::protocol::Share;
use ascend_vmm::copy::Slice;
use ascend_vmm::share::{self, Ticket};
use ascend_vmm::{Device, Mapping, PhysicalMemory, Reservation};

/// Served memory behind addresses: the allocations of a layout side by side.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) device: Device,
    pub(super) reservation: Reservation,
    /// Allocation and where it begins.
    pub(super) places: Vec<(Allocation, u64)>,
    pub(super) mappings: Vec<Mapping>,
    pub(super) end: u64,
}

impl Space {
    pub(super) fn new(device: &Device, capacity: u64) -> Result<Space> {
        let reservation = device.session().reserve(capacity.max(PageSize::Huge.bytes()))?;
        Ok(Space { device: device.clone(), reservation, places: Vec::new(), mappings: Vec::new(), end: 0 })
    }

    /// Maps an allocation behind those that are there.
    pub(super) fn add(&mut self, allocation: &Allocation, memory: &PhysicalMemory) -> Result<()> {
        let mapping = self.reservation.map(self.end, memory)?;
        self.mappings.push(mapping);
        self.places.push((allocation.clone(), self.end));
        self.end += allocation.size;
        Ok(())
    }

    pub(super) fn import(&self, share: &Share) -> Result<PhysicalMemory> {
        let ticket = Ticket::from_bytes(&share.ticket).map_err(ascend_vmm::Error::from)?;
        Ok(share::import(&self.device, &ticket)?)
    }

    pub(super) fn offset_of(&self, entry: &Entry) -> Option<u64> {
        let at = self.places.binary_search_by_key(&entry.allocation, |(allocation, _)| allocation.id).ok()?;
        self.places[at].1.checked_add(entry.offset)
    }

    pub(super) fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        Ok(self.reservation.slice(offset, size)?)
    }
}
