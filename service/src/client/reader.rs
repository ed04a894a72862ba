//! The reader of a layout.

use super::line::{ANSWER, Role, ServedLayout, milliseconds, strange};
use super::space::Space;
use super::{Error, OpenOptions, Result};
use crate::layout::{Allocation, Entry};
use crate::name::DomainName;
use crate::protocol::{Answer, Request};
use ascend_vmm::Device;
use ascend_vmm::copy::Slice;
use std::collections::BTreeMap;
use std::time::Duration;

/// Reads a committed layout.
#[derive(Debug)]
pub struct Reader {
    pub(super) role: Role,
    pub(super) space: Space,
    pub(super) entries: BTreeMap<String, Entry>,
    pub(super) awake: bool,
    /// How long to wait for somebody who changes the memory in place.
    pub(super) wait: Duration,
}

impl Reader {
    /// The domain.
    pub fn domain(&self) -> &DomainName {
        &self.role.domain
    }

    /// The version that is mapped.
    pub fn version(&self) -> u64 {
        self.role.version
    }

    /// The first address of the memory, which stays the same while it sleeps.
    pub fn address(&self) -> u64 {
        self.space.reservation.address()
    }

    /// Bytes of all allocations.
    pub fn bytes(&self) -> u64 {
        self.space.end
    }

    /// The allocations, in their order.
    pub fn allocations(&self) -> impl Iterator<Item = &Allocation> {
        self.space.places.iter().map(|(allocation, _)| allocation)
    }

    /// What the writer put, by key.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The memory of a key.
    ///
    /// # Errors
    ///
    /// [`Error::NoKey`]; [`Error::Asleep`].
    pub fn get(&self, key: &str) -> Result<Slice<'_>> {
        let Some(entry) = self.entries.get(key) else {
            return Err(Error::NoKey { domain: self.role.domain.clone(), key: key.into() });
        };
        if !self.awake {
            return Err(Error::Asleep(self.role.domain.clone()));
        }
        let offset = self.space.offset_of(entry).ok_or_else(|| Error::Asleep(self.role.domain.clone()))?;
        self.space.slice(offset, entry.size)
    }

    /// Memory by its offset from [`Reader::address`].
    ///
    /// # Errors
    ///
    /// An offset at which nothing is mapped; [`Error::Asleep`].
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        match self.awake {
            true => self.space.slice(offset, size),
            false => Err(Error::Asleep(self.role.domain.clone())),
        }
    }

    /// The life of the service in which this layout was committed.
    pub(crate) fn instance(&self) -> u64 {
        self.role.line.instance
    }

    /// Asks whether this reader still has its role.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.role.ask(&Request::Allocations { from: u64::MAX }, ANSWER).map(drop)
    }

    /// Waits until a newer version is committed. This reader keeps the one that it has: open the
    /// domain again for the new one.
    ///
    /// # Errors
    ///
    /// [`Code::Timeout`](crate::protocol::Code::Timeout).
    pub fn wait_for_newer(&mut self, wait: Duration) -> Result<u64> {
        let request = Request::Wait { newer_than: self.role.version, domain: None, wait_ms: milliseconds(wait) };
        let answer = self.role.ask(&request, wait);
        self.role.line.deliver_panic();
        match answer? {
            Answer::Version { version, .. } => Ok(version),
            other => Err(strange(&other)),
        }
    }

    /// Unmaps the memory and gives the import back; the addresses and the role stay. Refused if the
    /// owner of the memory does not answer: if everybody sleeps then, the memory is lost.
    ///
    /// # Errors
    ///
    /// The service cannot be reached, or the driver refuses to unmap: then it is awake.
    pub fn sleep(&mut self) -> Result<()> {
        if !self.awake {
            return Ok(());
        }
        self.role.ping()?;
        while let Some(mapping) = self.space.mappings.pop() {
            if let Err(failed) = mapping.unmap() {
                let error = failed.error;
                self.space.mappings.push(failed.object);
                self.map_all()?;
                return Err(error.into());
            }
        }
        self.awake = false;
        // From now on the memory may be changed in place.
        if let Err(error) = self.role.sleep() {
            // The owner is gone after all, and the memory with it if nobody else maps it.
            self.map_all()?;
            self.awake = true;
            return Err(error);
        }
        Ok(())
    }

    /// Maps the memory again at the same addresses. Waits while somebody changes it in place, as
    /// long as the reader waited for its role at most.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if something else is served by now; the service or the driver refuses: then
    /// it is asleep.
    pub fn wake(&mut self) -> Result<()> {
        if self.awake {
            return Ok(());
        }
        let (before, hash) = (self.role.version, self.role.hash.clone());
        self.role.wake(self.wait)?;
        if self.role.hash != hash {
            let allocations = self.role.all_allocations()?;
            let sizes = |all: &mut dyn Iterator<Item = &Allocation>| all.map(|it| it.size).sum::<u64>();
            let (was, is) = (sizes(&mut self.allocations()), sizes(&mut allocations.iter()));
            let difference = if was != is {
                format!("{was} bytes then, {is} bytes now")
            } else {
                "keys or places differ".to_owned()
            };
            let (domain, now) = (self.role.domain.clone(), self.role.version);
            // What it compares with the next time.
            (self.role.version, self.role.hash) = (before, hash);
            return Err(Error::Stale { domain, before, now, difference });
        }
        self.map_all()?;
        self.awake = true;
        Ok(())
    }

    /// Maps what is not mapped, or nothing.
    fn map_all(&mut self) -> Result<()> {
        let mapped = self.space.mappings.len();
        let missing: Vec<(Allocation, u64)> = self.space.places[mapped..].to_vec();
        let ids: Vec<u64> = missing.iter().map(|(allocation, _)| allocation.id).collect();
        if ids.is_empty() {
            return Ok(());
        }
        for ((_, start), share) in missing.iter().zip(self.role.shares(&ids)?) {
            let mapped_there = |memory| Ok(self.space.reservation.map(*start, &memory)?);
            match self.space.import(&share).and_then(mapped_there) {
                Ok(mapping) => self.space.mappings.push(mapping),
                Err(error) => {
                    self.space.mappings.truncate(mapped);
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

pub(super) fn reader(mut role: Role, device: &Device, options: &OpenOptions) -> Result<Reader> {
    let ServedLayout { allocations, entries } = role.layout()?;
    let mut space = Space::new(device, role.bytes)?;
    for (allocation, share) in &allocations {
        let memory = space.import(share)?;
        space.add(allocation, &memory)?;
    }
    Ok(Reader { role, space, entries, awake: true, wait: options.wait })
}
