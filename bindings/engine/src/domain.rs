//! A domain as an engine has it: written or read, awake or asleep.

use crate::acl::Acl;
use crate::error::{Error, Result};
use crate::space::Space;
use ascend_vmm_service::protocol::Request;
use ascend_vmm_service::{
    Allocation, DomainName, Entry, Error as ServiceFault, Mode, OpenOptions, PageSize, Role, ServedLayout,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// New memory is asked for in pieces of this size, if nobody says otherwise.
const CHUNK: u64 = 1 << 30;
/// What [`Domain::put`] gives out begins at multiples of this.
const ALIGNMENT: u64 = 512;

/// A memory service. Holds no connection by itself: each domain has one of its own.
#[derive(Debug, Clone)]
pub struct Client {
    path: PathBuf,
}

/// A domain that is about to be opened, on the device of the thread that asked for it.
pub struct Opening {
    acl: &'static Acl,
    path: PathBuf,
    device: i32,
    process: i32,
    request: Request,
    options: OpenOptions,
}

impl Client {
    /// The service at a socket.
    pub fn new(path: impl Into<PathBuf>) -> Client {
        Client { path: path.into() }
    }

    /// Its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes a role in a domain and maps its memory on the calling thread's device. `capacity` is
    /// how many bytes a writer of new memory may have.
    ///
    /// # Errors
    ///
    /// The service refuses, or cannot be reached; the vendor's library is not there or refuses.
    pub fn open(&self, domain: &DomainName, mode: Mode, capacity: u64, options: &OpenOptions) -> Result<Domain> {
        let opening = self.opening(domain, mode, options)?;
        let role = opening.wait()?;
        opening.map(role, capacity)
    }

    /// The same in three steps: this one and the last belong to the thread that has the device.
    ///
    /// # Errors
    ///
    /// The vendor's library is not there or lacks a function, or the thread has no device.
    pub fn opening(&self, domain: &DomainName, mode: Mode, options: &OpenOptions) -> Result<Opening> {
        let acl = Acl::of_this_process()?;
        let device = acl.device()?;
        // No name that is the same everywhere: the vendor's library does not give one that the
        // service has too.
        let request = options.request(domain, mode, acl.physical(device)?, String::new());
        let process = acl.process()?;
        Ok(Opening { acl, path: self.path.clone(), device, process, request, options: options.clone() })
    }

    /// Waits until a domain has a version that is newer than this one, 0 for any. Calls nothing of
    /// the vendor's.
    ///
    /// # Errors
    ///
    /// The time is over, or the service cannot be reached.
    pub fn wait(&self, domain: &DomainName, newer_than: u64, options: &OpenOptions) -> Result<u64> {
        Ok(ascend_vmm_service::Client::new(&self.path).wait_with(domain, newer_than, options)?)
    }
}

impl Opening {
    /// Waits for the role, in any thread: calls nothing of the vendor's.
    ///
    /// # Errors
    ///
    /// The service refuses, or cannot be reached.
    pub fn wait(&self) -> Result<Role> {
        Ok(Role::open(&self.path, self.process, &self.request, &self.options)?)
    }

    /// Imports and maps what the role has.
    ///
    /// # Errors
    ///
    /// The service or the vendor's library refuses; then nothing is mapped.
    pub fn map(&self, mut role: Role, capacity: u64) -> Result<Domain> {
        check_device(self.acl, self.device, role.domain())?;
        let (in_place, mut entries) = (role.writes() && role.version() != 0, BTreeMap::new());
        let reads = !role.writes() || in_place;
        let size = if reads { role.bytes() } else { capacity.next_multiple_of(PageSize::Huge.bytes()) };
        let hash = role.hash().to_vec();
        let version = role.version();
        let served = if reads { Some(role.layout()?) } else { None };
        let mut space = Space::reserve(self.acl, self.device, role.instance(), size)?;
        if let Some(served) = served {
            for (allocation, share) in served.allocations {
                space.add(self.acl, allocation, &share)?;
            }
            entries = served.entries;
        }
        if in_place {
            role.begin()?;
        }
        let (process, used) = (std::process::id(), space.end);
        Ok(Domain {
            space,
            role,
            acl: self.acl,
            entries,
            used,
            in_place,
            awake: true,
            broken: false,
            version,
            hash,
            process,
        })
    }
}

/// A domain that is open.
///
/// Dropping it, or [`Domain::close`], unmaps its memory and ends its role. A writer that did not
/// commit leaves nothing.
pub struct Domain {
    // Before the role: nobody may change memory in place that is mapped here.
    space: Space,
    role: Role,
    acl: &'static Acl,
    entries: BTreeMap<String, Entry>,
    /// Bytes that were given out.
    used: u64,
    in_place: bool,
    awake: bool,
    /// A mapping call failed, so that not all of a writer's memory is mapped.
    broken: bool,
    version: u64,
    hash: Vec<u8>,
    process: u32,
}

fn check_device(acl: &Acl, device: i32, domain: &DomainName) -> Result<()> {
    match acl.device()? {
        current if current == device => Ok(()),
        current => Err(Error::OtherDevice { domain: domain.clone(), device, current }),
    }
}

fn invalid<T>(problem: impl Into<String>, remedy: &'static str) -> Result<T> {
    Err(Error::Invalid { problem: problem.into(), remedy })
}

impl Domain {
    /// Its name.
    pub fn name(&self) -> &DomainName {
        self.role.domain()
    }

    /// True for a writer that has not committed.
    pub fn writes(&self) -> bool {
        self.role.writes()
    }

    /// The version that is read or changed in place; 0 for a writer of new memory.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The device, as the program numbers it.
    pub fn device(&self) -> i32 {
        self.space.device
    }

    /// The first address, which stays the same while it sleeps; 0 when it is closed.
    pub fn address(&self) -> u64 {
        self.space.address()
    }

    /// Bytes of all its memory.
    pub fn bytes(&self) -> u64 {
        self.space.end
    }

    /// Bytes that its reservation has.
    pub fn capacity(&self) -> u64 {
        self.space.size
    }

    /// How many allocations it has.
    pub fn allocations(&self) -> usize {
        self.space.places.len()
    }

    /// Whether its memory is mapped.
    pub fn is_awake(&self) -> bool {
        self.awake
    }

    /// What was put, by key.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The address of an entry.
    pub fn address_of(&self, entry: &Entry) -> Option<u64> {
        self.space.address_of(entry)
    }

    fn forked(&self) -> Result<()> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(ServiceFault::Forked(self.name().to_string()).into()),
        }
    }

    /// This process may use it, from this thread.
    fn check(&self) -> Result<()> {
        self.forked()?;
        if self.space.address() == 0 {
            return invalid(format!("{} is closed", self.name()), "open it again");
        }
        if self.broken {
            return invalid(format!("a mapping call of {} failed before", self.name()), "close it, and open it again");
        }
        check_device(self.acl, self.space.device, self.name())
    }

    fn check_writes(&self) -> Result<()> {
        self.check()?;
        match self.writes() {
            true => Ok(()),
            false => invalid(format!("{} is read", self.name()), "open it to write, discard or update"),
        }
    }

    /// New memory of a writer, behind what it has: its offset. The service waits up to `wait`.
    ///
    /// # Errors
    ///
    /// No memory, quota, or capacity. After a failed import or mapping only [`Domain::close`] is
    /// left.
    pub fn allocate(&mut self, size: u64, tag: &str, wait: Duration) -> Result<u64> {
        self.check_writes()?;
        if self.in_place {
            return invalid(format!("{} is changed in place", self.name()), "open it to write new memory");
        }
        let room = self.space.size - self.space.end;
        if size > room {
            let problem = format!("{size} bytes are wanted, and {room} are left of the capacity");
            return invalid(problem, "open the domain with a greater capacity");
        }
        let known = self.space.places.len() as u64;
        let allocation = self.role.allocate(known, size, PageSize::Huge, tag, None, wait)?;
        let start = self.space.end;
        let mapped = self.map_new(allocation);
        self.broken = mapped.is_err();
        mapped.map(|()| start)
    }

    /// Gives back memory of a writer that nobody uses: every allocation that begins at `used` or
    /// behind. Returns how many bytes that were.
    ///
    /// # Errors
    ///
    /// Something was put already; the service or the vendor's library refuses.
    pub fn trim(&mut self, used: u64) -> Result<u64> {
        self.check_writes()?;
        let mut freed = 0;
        while let Some(place) = self.space.places.last().filter(|place| place.start >= used) {
            if self.in_place || !self.entries.is_empty() {
                return invalid(format!("keys of {} are put", self.name()), "trim before the first is put");
            }
            let (id, size) = (place.allocation.id, place.allocation.size);
            self.broken = true;
            self.space.remove_last(self.acl)?;
            self.role.free_last(self.space.places.len() as u64, id)?;
            self.broken = false;
            freed += size;
        }
        self.used = self.used.min(self.space.end);
        Ok(freed)
    }

    fn map_new(&mut self, allocation: Allocation) -> Result<()> {
        for share in self.role.shares(&[allocation.id])? {
            self.space.add(self.acl, allocation.clone(), &share)?;
        }
        Ok(())
    }

    /// Names `size` bytes for readers, with a value of up to 64 KiB, and returns their address. A
    /// writer in place gets the memory that the key has.
    ///
    /// # Errors
    ///
    /// Those of [`Domain::allocate`]; a writer in place can only name what was named before.
    pub fn put(&mut self, key: &str, size: u64, value: &[u8], wait: Duration) -> Result<u64> {
        self.check_writes()?;
        if self.in_place {
            let Some(entry) = self.entries.get_mut(key) else {
                let domain = self.role.domain().clone();
                return Err(ServiceFault::NoKey { domain, key: key.into() }.into());
            };
            if size > entry.size {
                let problem = format!("{key} has {} bytes, and {size} are wanted", entry.size);
                return invalid(problem, "open the domain to write new memory");
            }
            entry.value = value.to_vec();
            let entry = entry.clone();
            return Ok(self.address_of(&entry).unwrap_or(0));
        }
        let page = PageSize::Huge.bytes();
        let offset = self.used.next_multiple_of(ALIGNMENT);
        let end = offset.checked_add(size).filter(|end| *end <= self.space.size);
        let Some(end) = end else {
            let problem = format!("the capacity of {} bytes is used up", self.space.size);
            return invalid(problem, "open the domain with a greater capacity");
        };
        if end > self.space.end {
            let room = self.space.size - self.space.end;
            let missing = (end - self.space.end).max(CHUNK).next_multiple_of(page).min(room);
            self.allocate(missing, "", wait)?;
        }
        self.used = end;
        self.place(key, self.space.address() + offset, size, value)?;
        Ok(self.space.address() + offset)
    }

    /// Names bytes that this writer has somewhere in its memory. They may go from one allocation to
    /// the next.
    ///
    /// # Errors
    ///
    /// They are not all in the memory of this writer.
    pub fn place(&mut self, key: &str, address: u64, size: u64, value: &[u8]) -> Result<()> {
        self.check_writes()?;
        let offset = address.checked_sub(self.space.address());
        let inside = offset.filter(|offset| offset.checked_add(size).is_some_and(|end| end <= self.space.end));
        let Some((offset, place)) = inside.and_then(|offset| Some((offset, self.space.place_at(offset)?))) else {
            let problem = format!("{key:?}: {size} bytes at {address:#x} are not in the memory of {}", self.name());
            return invalid(problem, "put what lies in it");
        };
        let (allocation, offset) = (place.allocation.id, offset - place.start);
        self.entries.insert(key.to_owned(), Entry { allocation, offset, size, value: value.to_vec() });
        Ok(())
    }

    /// Waits for the device, then publishes what was put, and reads it from then on.
    ///
    /// # Errors
    ///
    /// The service refuses or cannot be reached; then nothing is published, and the domain serves
    /// what it served before.
    pub fn commit(&mut self) -> Result<()> {
        self.check_writes()?;
        self.acl.synchronize()?;
        self.role.commit(&self.entries)?;
        (self.version, self.hash) = (self.role.version(), self.role.hash().to_vec());
        self.in_place = false;
        Ok(())
    }

    /// Waits for the device, unmaps the memory and gives the imports back; addresses and role stay.
    /// Refused while the owner of the memory does not answer: what everybody has put to sleep then
    /// is lost.
    ///
    /// # Errors
    ///
    /// The service cannot be reached: then it is awake. The vendor's library refuses to unmap: then
    /// it is asleep as far as that was possible, and may be woken.
    pub fn sleep(&mut self) -> Result<()> {
        self.check()?;
        if self.writes() {
            return invalid(format!("{} is not committed", self.name()), "commit it before it sleeps");
        }
        if !self.awake {
            return Ok(());
        }
        self.role.ping()?;
        self.acl.synchronize()?;
        self.awake = false;
        self.space.unmap(self.acl)?;
        // From now on the memory may be changed in place.
        if let Err(error) = self.role.sleep() {
            // The owner is gone after all, and the memory with it if nobody else maps it.
            self.map_all()?;
            self.awake = true;
            return Err(error.into());
        }
        Ok(())
    }

    /// Imports the memory again and maps it at the same addresses. Waits while somebody changes it
    /// in place.
    ///
    /// # Errors
    ///
    /// [`Error::Stale`] if another layout is served by now; the service or the vendor's library
    /// refuses. Then nothing is mapped, and it is asleep.
    pub fn wake(&mut self, wait: Duration) -> Result<()> {
        self.check()?;
        if self.awake {
            return Ok(());
        }
        self.role.wake(wait)?;
        let mapped = if self.role.hash() == self.hash { self.map_all() } else { Err(self.stale()) };
        if let Err(error) = mapped {
            // For the service it is awake by now, and would be waited for.
            let _ = self.role.sleep();
            return Err(error);
        }
        self.version = self.role.version();
        self.awake = true;
        Ok(())
    }

    /// Maps what is not mapped. After a failure nothing is.
    fn map_all(&mut self) -> Result<()> {
        let missing = self.space.unmapped();
        let ids: Vec<u64> = missing.iter().map(|&at| self.space.places[at].allocation.id).collect();
        let mapped = self.role.shares(&ids).map_err(Error::from).and_then(|shares| {
            let mut each = missing.iter().zip(&shares);
            each.try_for_each(|(&at, share)| self.space.map(self.acl, at, share.handle))
        });
        if mapped.is_err() {
            let _ = self.space.unmap(self.acl);
        }
        mapped
    }

    /// What is served by now, compared with what was mapped.
    fn stale(&mut self) -> Error {
        let (domain, before, now) = (self.name().clone(), self.version, self.role.version());
        let difference = match self.role.layout() {
            Ok(served) => self.difference(&served),
            Err(error) => format!("it cannot be compared: {error}"),
        };
        Error::Stale { domain, before, now, difference }
    }

    fn difference(&self, served: &ServedLayout) -> String {
        let sizes = |all: &mut dyn Iterator<Item = &Allocation>| all.map(|it| it.size).sum::<u64>();
        let was = sizes(&mut self.space.places.iter().map(|place| &place.allocation));
        let is = sizes(&mut served.allocations.iter().map(|(allocation, _)| allocation));
        let gone = self.entries.keys().find(|key| !served.entries.contains_key(*key));
        let new = served.entries.keys().find(|key| !self.entries.contains_key(*key));
        let other = self.entries.iter().find(|(key, entry)| {
            let now = served.entries.get(*key);
            now.is_some_and(|now| (now.size, &now.value) != (entry.size, &entry.value))
        });
        match (gone, new, other) {
            (Some(key), ..) => format!("{key} is gone"),
            (_, Some(key), _) => format!("{key} is new"),
            (_, _, Some((key, _))) => format!("{key} has another size, type or shape"),
            _ if was != is => format!("{was} bytes then, {is} bytes now"),
            _ => "its keys lie elsewhere".to_owned(),
        }
    }

    /// Waits for the device, unmaps the memory, gives the addresses back and ends the role.
    ///
    /// # Errors
    ///
    /// The thread has another device, or the vendor's library refuses: then it is still open.
    pub fn close(&mut self) -> Result<()> {
        self.forked()?;
        if self.space.address() == 0 {
            return Ok(());
        }
        check_device(self.acl, self.space.device, self.name())?;
        self.acl.synchronize()?;
        self.awake = false;
        self.space.close(self.acl)
    }
}
