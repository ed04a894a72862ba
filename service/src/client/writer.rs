//! The writer of a layout.

use super::line::{ANSWER, Role, done};
use super::reader::{Reader, reader};
use super::space::Space;
use super::{Error, OpenOptions, Result};
use crate::layout::{Entry, Layout};
use crate::name::DomainName;
use crate::protocol::{Code, Request, ServiceError};
use ascend_vmm::Device;
use ascend_vmm::copy::Slice;
use std::collections::BTreeMap;

/// Chunks of memory in which a writer allocates.
const CHUNK: u64 = 1 << 30;
/// Entries begin at multiples of this.
const ALIGNMENT: u64 = 512;

/// Writes a layout.
///
/// Until [`Writer::commit`], readers see what was committed before. A writer that is dropped, or
/// dies, leaves nothing behind.
#[derive(Debug)]
pub struct Writer {
    role: Role,
    space: Space,
    entries: BTreeMap<String, Entry>,
    used: u64,
    options: OpenOptions,
    in_place: bool,
}

impl Writer {
    /// The domain.
    pub fn domain(&self) -> &DomainName {
        &self.role.domain
    }

    /// Names `size` bytes, and returns their memory. `value` is what readers get to know about
    /// them. New memory is asked for in chunks of 1 GiB, or as much as the writer's capacity
    /// allows.
    ///
    /// # Errors
    ///
    /// No memory, quota, or capacity; a writer in place can only name what was named before.
    pub fn put(&mut self, key: &str, size: u64, value: &[u8]) -> Result<Slice<'_>> {
        if self.in_place {
            let Some(entry) = self.entries.get_mut(key) else {
                return Err(Error::NoKey { domain: self.role.domain.clone(), key: key.into() });
            };
            if size > entry.size {
                let problem = format!("{key} has {} bytes, and {size} are wanted", entry.size);
                let remedy = "open the domain to write new memory".into();
                return Err(ServiceError { code: Code::Invalid, problem, remedy }.into());
            }
            entry.value = value.to_vec();
            let entry = entry.clone();
            return self.entry_slice(&entry, size);
        }
        let offset = self.used.next_multiple_of(ALIGNMENT);
        let end = offset.checked_add(size).ok_or_else(|| self.too_small())?;
        if end > self.space.end {
            self.grow(end - self.space.end)?;
        }
        let at = self.space.places.partition_point(|(_, start)| *start <= offset).saturating_sub(1);
        let Some((allocation, start)) = self.space.places.get(at) else {
            return Err(Error::Asleep(self.role.domain.clone()));
        };
        let entry = Entry { allocation: allocation.id, offset: offset - start, size, value: value.to_vec() };
        self.entries.insert(key.to_owned(), entry);
        self.used = end;
        self.space.slice(offset, size)
    }

    pub(super) fn entry_slice(&self, entry: &Entry, size: u64) -> Result<Slice<'_>> {
        let offset = self.space.offset_of(entry).ok_or_else(|| Error::Asleep(self.role.domain.clone()))?;
        self.space.slice(offset, size)
    }

    /// Gets one more chunk that holds `missing` bytes if the capacity allows.
    pub(super) fn grow(&mut self, missing: u64) -> Result<()> {
        let page = self.options.page.bytes();
        let room = (self.space.reservation.size() - self.space.end) / page * page;
        if missing > room {
            return Err(self.too_small());
        }
        let size = missing.max(CHUNK).next_multiple_of(page).min(room);
        self.allocate(size, "").map(drop)
    }

    fn too_small(&self) -> Error {
        let size = self.space.reservation.size();
        let problem = format!("the writer's capacity of {} is used up", ascend_vmm::Bytes(size));
        let remedy = "open the domain with a greater capacity".into();
        ServiceError { code: Code::Invalid, problem, remedy }.into()
    }

    /// New memory at the end of the writer's space, for programs that place things themselves:
    /// its number and its offset.
    ///
    /// # Errors
    ///
    /// No memory, quota, or capacity.
    pub fn allocate(&mut self, size: u64, tag: &str) -> Result<(u64, u64)> {
        self.allocate_as(None, size, tag)
    }

    /// The same, with the number that it had before if that is free.
    fn allocate_as(&mut self, id: Option<u64>, size: u64, tag: &str) -> Result<(u64, u64)> {
        let known = self.space.places.len() as u64;
        let allocation = self.role.allocate(known, size, self.options.page, tag, id, self.options.wait)?;
        let shares = self.role.shares(&[allocation.id])?;
        let offset = self.space.end;
        for share in &shares {
            let memory = self.space.import(share)?;
            self.space.add(&allocation, &memory)?;
        }
        self.role.line.deliver_panic();
        Ok((allocation.id, offset))
    }

    /// New memory with the same names as another layout, which was checked.
    pub(crate) fn restore(&mut self, layout: &Layout) -> Result<()> {
        let mut numbers = BTreeMap::new();
        for allocation in &layout.allocations {
            self.options.page = allocation.page;
            let (id, _) = self.allocate_as(Some(allocation.id), allocation.size, &allocation.tag)?;
            numbers.insert(allocation.id, id);
        }
        for (key, entry) in &layout.entries {
            let allocation = numbers.get(&entry.allocation).copied().unwrap_or(entry.allocation);
            self.entries.insert(key.clone(), Entry { allocation, ..entry.clone() });
        }
        Ok(())
    }

    /// Memory of the writer's space by its offset.
    ///
    /// # Errors
    ///
    /// An offset at which nothing is mapped.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        self.space.slice(offset, size)
    }

    /// How much others wait for; `None` if nobody does. A writer that lends frees what it can
    /// ([`Writer::free_last`]) and then calls this again, which tells the service.
    ///
    /// # Errors
    ///
    /// The service cannot be reached.
    pub fn reclaim(&mut self) -> Result<Option<u64>> {
        // Whatever has arrived is read with the answer.
        done(self.role.ask(&Request::Ping {}, ANSWER)?)?;
        Ok(self.role.line.reclaims.iter().map(|(_, bytes)| *bytes).max())
    }

    /// Unmaps the newest memory and gives it back to the service: bytes, 0 if there is none. Then
    /// tells the service that what it asked for was answered.
    ///
    /// # Errors
    ///
    /// Something was put, or the driver refuses to unmap.
    pub fn free_last(&mut self) -> Result<u64> {
        let freed = match (self.space.mappings.pop(), self.space.places.pop()) {
            (Some(mapping), Some((allocation, start))) => {
                mapping.unmap().map_err(|failed| failed.error)?;
                self.space.end = start;
                self.role.free_last(self.space.places.len() as u64, allocation.id)?;
                allocation.size
            }
            _ => 0,
        };
        for (reclaim, _) in std::mem::take(&mut self.role.line.reclaims) {
            // It may be too late by now.
            match self.role.ask(&Request::Gave { reclaim }, ANSWER) {
                Ok(_) | Err(Error::Service(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(freed)
    }

    /// Publishes what was put, and goes on as its reader.
    ///
    /// # Errors
    ///
    /// The service refuses or cannot be reached; then nothing is published, and the domain serves
    /// what it served before.
    pub fn commit(mut self) -> Result<Reader> {
        self.role.commit(&self.entries)?;
        let Writer { role, space, entries, options, .. } = self;
        Ok(Reader { role, space, entries, awake: true, wait: options.wait })
    }
}

pub(super) fn writer(role: Role, device: &Device, capacity: u64, options: &OpenOptions) -> Result<Writer> {
    let in_place = role.writes && role.version != 0;
    if !in_place {
        let space = Space::new(device, capacity.next_multiple_of(options.page.bytes()))?;
        let (entries, options) = (BTreeMap::new(), options.clone());
        return Ok(Writer { role, space, entries, used: 0, options, in_place });
    }
    let mut reader = reader(role, device, options)?;
    reader.role.begin()?;
    let used = reader.space.end;
    Ok(Writer {
        role: reader.role,
        space: reader.space,
        entries: reader.entries,
        used,
        options: options.clone(),
        in_place,
    })
}
