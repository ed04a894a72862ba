//! Committed memory on other servers of the super pod.
//!
//! A service owns memory of its own server. Inside of a super pod the driver lets a process of
//! another server import it by a *fabric handle*, and asks no list of processes there. A
//! [`FabricTicket`] is a layout with a fabric handle for each allocation, as bytes for any channel.
//! The driver keeps the memory as long as the other server holds it; the service does not know of
//! it.

use super::space::Space;
use super::{Client, Error, OpenOptions, Reader, Result};
use crate::layout::{Entry, Layout};
use crate::name::DomainName;
use crate::protocol::{Code, Mode, ServiceError};
use crate::sealed::{seal, unseal};
use ascend_vmm::copy::Slice;
use ascend_vmm::discovery::{self, SuperPod};
use ascend_vmm::share::{self, FabricHandle, HandleKind, Ticket};
use ascend_vmm::{Bytes, Device};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use std::collections::BTreeMap;

/// The first line of a ticket.
const MAGIC: &[u8] = b"ascend-vmm fabric ticket 1\n";
/// Bits of a super-pod id from which on the server's number stands.
const SERVER_SHIFT: u32 = 22;
/// Bytes that are copied at once.
const PART: u64 = 16 << 20;

/// A committed layout, for processes on other servers of the super pod.
///
/// It is good while its version is served, and while somebody holds the memory. **It protects
/// nothing**: between servers the driver asks no list, so every process of the super pod that knows
/// or guesses the numbers in it can import the memory, and write to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FabricTicket {
    contents: Contents,
    handles: Vec<FabricHandle>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Contents {
    super_pod: u32,
    domain: DomainName,
    version: u64,
    hash: [u8; 16],
    layout: Layout,
    /// The vendor's 128 bytes for each allocation.
    handles: Vec<ByteBuf>,
}

fn bad(problem: impl Into<String>) -> Error {
    let remedy = "make a new ticket on the server that has the memory".into();
    ServiceError { code: Code::Invalid, problem: format!("the ticket is not good: {}", problem.into()), remedy }.into()
}

fn other_device(problem: String, remedy: &str) -> Error {
    ServiceError { code: Code::OtherDevice, problem, remedy: remedy.into() }.into()
}

/// Where a device is.
fn super_pod_of(device: &Device) -> Result<SuperPod> {
    let npu = discovery::list()?.into_iter().find(|npu| npu.logical == device.id());
    npu.and_then(|npu| npu.super_pod).ok_or_else(|| {
        let problem = format!("NPU {} is in no super pod, so that it shares no memory with other servers", device.id());
        other_device(problem, "save the domain to files, and load them on the other server")
    })
}

impl Reader {
    /// What a process on another server of the super pod needs to read the same memory.
    ///
    /// # Errors
    ///
    /// [`Code::OtherDevice`] if the NPU is in no super pod; the service cannot be reached.
    pub fn fabric_ticket(&mut self) -> Result<FabricTicket> {
        let super_pod = super_pod_of(&self.space.device)?.super_pod;
        let allocations: Vec<_> = self.allocations().cloned().collect();
        let ids: Vec<u64> = allocations.iter().map(|allocation| allocation.id).collect();
        let mut handles = Vec::new();
        for share in self.role.shares(&ids)? {
            let Ticket { handle, device, .. } = Ticket::from_bytes(&share.ticket).map_err(ascend_vmm::Error::from)?;
            let Some((physical, sdid)) = device.and_then(|it| Some((it.physical, it.sdid?))) else {
                return Err(bad("the service knows no super-pod id of the memory"));
            };
            handles.push(FabricHandle { kind: HandleKind::Fabric, sdid, physical, handle });
        }
        let layout = Layout { allocations, entries: self.entries.clone() };
        let contents = Contents {
            super_pod,
            domain: self.role.domain.clone(),
            version: self.role.version,
            hash: layout.hash(),
            layout,
            handles: handles.iter().map(|handle| ByteBuf::from(handle.to_bytes())).collect(),
        };
        Ok(FabricTicket { contents, handles })
    }
}

impl FabricTicket {
    /// As bytes, for any channel.
    pub fn to_bytes(&self) -> Vec<u8> {
        seal(MAGIC, &self.contents)
    }

    /// Reads a ticket.
    ///
    /// # Errors
    ///
    /// [`Code::Invalid`] for bytes that are not a whole ticket of a layout that can be.
    pub fn from_bytes(bytes: &[u8]) -> Result<FabricTicket> {
        let contents: Contents = unseal(MAGIC, bytes).map_err(bad)?;
        let layout = &contents.layout;
        let whole = |size: u64, page: u64| size > 0 && size % page == 0;
        let total = layout.allocations.iter().try_fold(0u64, |sum, it| sum.checked_add(it.size));
        if total.is_none() || layout.allocations.iter().any(|it| !whole(it.size, it.page.bytes())) {
            return Err(bad("its sizes are not those of memory"));
        }
        if !layout.allocations.is_sorted_by(|one, other| one.id < other.id) || layout.hash() != contents.hash {
            return Err(bad("its layout is not the one that was committed"));
        }
        for (key, entry) in &layout.entries {
            layout.check(key, entry).map_err(|error| bad(error.to_string()))?;
        }
        let handle = |bytes: &ByteBuf| FabricHandle::from_bytes(bytes.as_slice().try_into().ok()?);
        let handles: Option<Vec<_>> = contents.handles.iter().map(handle).collect();
        let handles = handles.filter(|handles| {
            handles.len() == layout.allocations.len() && handles.iter().all(|it| it.kind == HandleKind::Fabric)
        });
        let handles = handles.ok_or_else(|| bad("it has not one fabric handle for each allocation"))?;
        Ok(FabricTicket { contents, handles })
    }

    /// The domain on its server.
    pub fn domain(&self) -> &DomainName {
        &self.contents.domain
    }

    /// The version on its server.
    pub fn version(&self) -> u64 {
        self.contents.version
    }

    /// The layout: allocations, and what lies where in them.
    pub fn layout(&self) -> &Layout {
        &self.contents.layout
    }

    /// Imports the memory of the other server and maps it.
    ///
    /// # Errors
    ///
    /// [`Code::OtherDevice`] on the server that has the memory, in another super pod or in none;
    /// the driver's refusal if the memory is gone or the server does not answer.
    pub fn open(&self, device: &Device) -> Result<FabricReader> {
        let here = super_pod_of(device)?;
        let Contents { super_pod, domain, layout, .. } = &self.contents;
        if here.super_pod != *super_pod {
            let problem = format!("{domain} is in super pod {super_pod}, and this server in {}", here.super_pod);
            return Err(other_device(problem, "save the domain to files, and load them here"));
        }
        if self.handles.iter().any(|handle| handle.sdid >> SERVER_SHIFT == here.sdid >> SERVER_SHIFT) {
            let problem = format!("{domain} is on this server");
            return Err(other_device(problem, "open it at the service of this server"));
        }
        let mut space = Space::new(device, layout.bytes())?;
        for (allocation, handle) in layout.allocations.iter().zip(&self.handles) {
            let memory = share::import(device, handle)?;
            // The numbers of an earlier life of that server may mean other memory by now.
            if memory.size() != allocation.size {
                let (size, is) = (Bytes(allocation.size), Bytes(memory.size()));
                return Err(bad(format!("an allocation of {domain} had {size}, and has {is}")));
            }
            space.add(allocation, &memory)?;
        }
        Ok(FabricReader { ticket: self.clone(), space })
    }

    /// Copies the memory of the other server, by way of this process, into new memory of a service
    /// on this one, and commits it. `progress` is called with bytes.
    ///
    /// # Errors
    ///
    /// Those of [`FabricTicket::open`] and [`Client::write`]; then nothing was committed.
    pub fn load(
        &self,
        client: &Client,
        device: &Device,
        domain: &DomainName,
        mode: Mode,
        options: &OpenOptions,
        progress: &dyn Fn(u64),
    ) -> Result<Reader> {
        let from = self.open(device)?;
        let bytes = self.layout().bytes();
        let mut writer = client.write(device, domain, mode, bytes, options)?;
        writer.restore(self.layout())?;
        // The driver copies no imported memory from device to device.
        let mut buffer = vec![0; PART.min(bytes) as usize];
        for offset in (0..bytes).step_by(PART as usize) {
            let size = PART.min(bytes - offset);
            let part = &mut buffer[..size as usize];
            from.slice(offset, size)?.read(part)?;
            writer.slice(offset, size)?.write(part)?;
            progress(size);
        }
        writer.commit()
    }
}

/// Reads memory of another server.
///
/// It has no role at the service there: an update in place does not wait for it. A version that was
/// replaced stays for it, as long as it is mapped.
#[derive(Debug)]
pub struct FabricReader {
    ticket: FabricTicket,
    space: Space,
}

impl FabricReader {
    /// The first address of the memory.
    pub fn address(&self) -> u64 {
        self.space.reservation.address()
    }

    /// What the writer put, by key.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.ticket.layout().entries
    }

    /// The memory of a key.
    ///
    /// # Errors
    ///
    /// [`Error::NoKey`].
    pub fn get(&self, key: &str) -> Result<Slice<'_>> {
        let entry = self.entries().get(key);
        let Some((offset, size)) = entry.and_then(|entry| Some((self.space.offset_of(entry)?, entry.size))) else {
            return Err(Error::NoKey { domain: self.ticket.domain().clone(), key: key.into() });
        };
        self.space.slice(offset, size)
    }

    /// Memory by its offset from [`FabricReader::address`].
    ///
    /// # Errors
    ///
    /// An offset at which nothing is mapped.
    pub fn slice(&self, offset: u64, size: u64) -> Result<Slice<'_>> {
        self.space.slice(offset, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Allocation, PageSize};
    use ascend_vmm::share::ShareableHandle;

    fn contents() -> Contents {
        let allocation = |id| Allocation { id, size: 4 << 20, page: PageSize::Huge, tag: String::new() };
        let mut layout = Layout { allocations: vec![allocation(3), allocation(5)], entries: BTreeMap::new() };
        let entry = Entry { allocation: 3, offset: 0, size: 6 << 20, value: b"v".to_vec() };
        layout.entries.insert("w".into(), entry);
        let share = |share| ShareableHandle::from_u64(share).unwrap();
        let handle =
            |number| FabricHandle { kind: HandleKind::Fabric, sdid: 1 << 22, physical: 0, handle: share(number) };
        Contents {
            super_pod: 1,
            domain: "w".parse().unwrap(),
            version: 7,
            hash: layout.hash(),
            layout,
            handles: [0, 1].map(|number| ByteBuf::from(handle(number).to_bytes())).to_vec(),
        }
    }

    #[test]
    fn a_ticket_is_read_as_it_was_written_and_every_cut_or_flipped_bit_is_detected() {
        let bytes = seal(MAGIC, &contents());
        let ticket = FabricTicket::from_bytes(&bytes).unwrap();
        assert_eq!((ticket.to_bytes(), ticket.version()), (bytes.clone(), 7));
        for at in 0..bytes.len() {
            assert!(FabricTicket::from_bytes(&bytes[..at]).is_err());
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(FabricTicket::from_bytes(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_layout_that_no_service_commits_is_refused_even_with_a_good_checksum() {
        let refused = |change: fn(&mut Contents)| {
            let mut contents = contents();
            change(&mut contents);
            contents.hash = contents.layout.hash();
            let error = FabricTicket::from_bytes(&seal(MAGIC, &contents)).unwrap_err();
            assert_eq!(error.code(), Some(Code::Invalid));
            error.to_string()
        };
        let count = "one fabric handle for each allocation";
        assert!(refused(|it| drop(it.handles.pop())).contains(count));
        assert!(refused(|it| it.handles[0] = ByteBuf::from([0; 127])).contains(count));
        assert!(refused(|it| it.handles[0] = ByteBuf::from([255; 128])).contains(count));
        assert!(refused(|it| it.handles[0][0] = 0).contains(count), "a plain handle is not for other servers");
        assert!(refused(|it| it.layout.allocations[1].size = 1).contains("sizes"));
        assert!(refused(|it| it.layout.allocations[1].size = 0).contains("sizes"));
        assert!(refused(|it| it.layout.allocations[1].size = u64::MAX - (2 << 20) + 1).contains("sizes"));
        assert!(refused(|it| it.layout.allocations[1].id = 3).contains("layout"));
        assert!(refused(|it| entry_of(it).size = u64::MAX).contains("size"));
        assert!(refused(|it| entry_of(it).allocation = 4).contains("allocation"));
    }

    fn entry_of(contents: &mut Contents) -> &mut Entry {
        contents.layout.entries.get_mut("w").unwrap()
    }
}
