//! One thread, and a model of what every call must return and what memory must contain.

use crate::support::random::{Random, Seed, seeds, steps};
use crate::support::{GIB, MIB2, assert_nothing_left, own_tgid, plain};
use ascend_emulator::{Config, Emulator, on_each_generation};
use ascend_vmm::LogicalId;
use ascend_vmm::copy::{Pending, Rows, read_batch, write_batch};
use ascend_vmm::error::Errno;
use ascend_vmm::share;
use ascend_vmm::{Device, Error, Location, Mapping, PhysicalMemory, Reservation, ReserveOptions, Session};
use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// What memory must contain; unknown until it is mapped the first time.
type Contents = Rc<RefCell<Option<Vec<u8>>>>;

/// A reference to memory.
struct Memory {
    object: PhysicalMemory,
    contents: Contents,
    /// The same for all references that the library must see as the same memory.
    block: u64,
}

struct Addresses {
    object: Reservation,
    /// The place of the first memory that was mapped, and whether that was imported.
    owner: Option<(Location, bool)>,
}

struct Mapped {
    object: Mapping,
    contents: Contents,
    block: u64,
    granted: Vec<usize>,
    /// Whether the CPU uses it.
    seen: bool,
}

impl Mapped {
    fn range(&self) -> Range<u64> {
        self.object.address()..self.object.address() + self.object.size()
    }

    fn memory(&self) -> PhysicalMemory {
        self.object.memory()
    }
}

/// A copy that is running.
struct Copying {
    object: Pending,
    contents: Contents,
    address: u64,
    at: usize,
    /// For one that reads.
    expected: Option<Vec<u8>>,
}

struct World {
    random: Random,
    session: Session,
    devices: Vec<Option<Device>>,
    memories: Vec<Memory>,
    addresses: Vec<Addresses>,
    mappings: Vec<Mapped>,
    copies: Vec<Copying>,
    blocks: u64,
}

/// Refused by the library itself.
#[track_caller]
fn refused<T>(result: Result<T, Error>, why: &str) {
    match result {
        Ok(_) => panic!("should be refused: {why}"),
        Err(Error::Invalid(_) | Error::InUse { .. }) => {}
        Err(error) => panic!("the kernel was called although {why}: {error}"),
    }
}

impl World {
    fn new(seed: u64, devices: usize) -> World {
        World {
            random: Random(seed),
            // Every third session has no address segments, and so no access by the CPU.
            session: Session::builder().segments(seed % 3 != 2).open().unwrap(),
            devices: vec![None; devices],
            memories: Vec::new(),
            addresses: Vec::new(),
            mappings: Vec::new(),
            copies: Vec::new(),
            blocks: 0,
        }
    }

    fn device(&mut self, id: usize) -> Device {
        let session = &self.session;
        self.devices[id].get_or_insert_with(|| session.device(LogicalId(id as u32)).unwrap()).clone()
    }

    fn new_block(&mut self) -> u64 {
        self.blocks += 1;
        self.blocks
    }

    /// A mapping whose contents are known and not part of a running copy.
    fn mapping(&mut self) -> Option<usize> {
        let count = self.mappings.len();
        let first = self.random.index(count.max(1));
        (0..count).map(|offset| (first + offset) % count).find(|&index| !self.is_copied(&self.mappings[index].contents))
    }

    fn is_copied(&self, contents: &Contents) -> bool {
        self.copies.iter().any(|copy| Rc::ptr_eq(&copy.contents, contents))
    }

    fn step(&mut self) {
        match self.random.below(34) {
            0..=2 => self.create(),
            3..=4 => self.reserve(),
            5..=9 => self.map(),
            10..=11 => self.unmap(),
            12 => self.free_memory(),
            13 => self.free_addresses(),
            14..=17 => self.write_and_read(),
            18 => self.fill(),
            19..=20 => self.slice(),
            21..=22 => self.copy(),
            23 => self.batch(),
            24 => self.rows(),
            25..=26 => self.begin_copy(),
            27 => self.end_copy(),
            28 => self.view(),
            29 => self.look_up(),
            30 => self.share(),
            31 => self.grant(),
            32 => self.close_device(),
            _ => self.close_session(),
        }
    }

    fn create(&mut self) {
        if self.memories.len() > 24 {
            return self.free_memory();
        }
        let size = (self.random.below(3) + 1) * MIB2;
        let place = self.random.index(self.devices.len() + 1);
        let bad = self.random.one_in(10);
        let object = if place == self.devices.len() {
            let host = self.session.host().unwrap();
            if bad {
                return refused(host.create(size - 1), "the size is odd");
            }
            host.create(size).unwrap()
        } else {
            let device = self.device(place);
            if bad {
                return refused(device.create(size + 4096), "the size is odd");
            }
            device.create(size).unwrap()
        };
        let block = self.new_block();
        self.memories.push(Memory { object, contents: Contents::default(), block });
    }

    fn reserve(&mut self) {
        if self.addresses.len() > 24 {
            return self.free_addresses();
        }
        let size = (self.random.below(6) + 1) * MIB2;
        let object = match self.random.below(4) {
            0 if !self.addresses.is_empty() => {
                // At an address near another reservation.
                let near = self.random.index(self.addresses.len());
                let address = self.addresses[near].object.address() - 8 * MIB2 + self.random.below(16) * MIB2;
                let wanted = address..address + size;
                let taken = self.addresses.iter().any(|other| {
                    let start = other.object.address();
                    start < wanted.end && wanted.start < start + other.object.size()
                });
                let result = self.session.reserve_with(size, &ReserveOptions::default().address(address));
                if taken || address < ReserveOptions::ADDRESSES.start {
                    return refused(result, "the addresses are reserved, or not the driver's");
                }
                let object = result.unwrap();
                assert_eq!(object.address(), address);
                object
            }
            1 => {
                let alignment = MIB2 << self.random.below(10);
                let object = self.session.reserve_with(size, &ReserveOptions::default().alignment(alignment)).unwrap();
                assert_eq!(object.address() % alignment, 0);
                object
            }
            2 if self.random.one_in(4) => {
                refused(self.session.reserve(129 * GIB), "it is too large");
                refused(self.session.reserve(size + 1), "the size is odd");
                let odd = ReserveOptions::default().alignment(3 * MIB2);
                return refused(self.session.reserve_with(size, &odd), "the alignment is odd");
            }
            _ => self.session.reserve(size).unwrap(),
        };
        let new = object.address()..object.address() + object.size();
        for other in &self.addresses {
            let start = other.object.address();
            assert!(start >= new.end || new.start >= start + other.object.size(), "addresses were reserved twice");
        }
        self.addresses.push(Addresses { object, owner: None });
    }

    fn map(&mut self) {
        if self.memories.is_empty() || self.addresses.is_empty() {
            return self.create();
        }
        let memory = &self.memories[self.random.index(self.memories.len())];
        // The emulated driver maps memory for the CPU at several addresses, too, but a store at one
        // becomes visible at the others late, which this model does not know.
        let others = self.mappings.iter().filter(|mapped| Rc::ptr_eq(&mapped.contents, &memory.contents));
        let host = memory.object.location() == Location::Host;
        if others.into_iter().any(|mapped| host || mapped.seen) {
            return;
        }
        let index = self.random.index(self.addresses.len());
        let into = &self.addresses[index];
        let (start, space, size) = (into.object.address(), into.object.size(), memory.object.size());
        let offset =
            if self.random.one_in(12) { self.random.below(space) } else { self.random.below(space / MIB2 + 1) * MIB2 };
        let owner = (memory.object.location(), memory.object.is_imported());
        let wanted = start + offset..start + offset + size;
        let problem = if offset % MIB2 != 0 {
            "the offset is odd"
        } else if offset + size > space {
            "it does not fit"
        } else if host && !self.session.has_segments() {
            "there are no segments"
        } else if self.mappings.iter().any(|other| other.range().start < wanted.end && wanted.start < other.range().end)
        {
            "something is mapped there"
        } else if into.owner.is_some_and(|other| other != owner) {
            "the reservation belongs to another device"
        } else {
            ""
        };
        let result = into.object.map(offset, &memory.object);
        if !problem.is_empty() {
            return refused(result, problem);
        }
        let object = result.unwrap();
        assert_eq!((object.address(), object.size()), (wanted.start, size));
        let (contents, block) = (memory.contents.clone(), memory.block);
        contents.borrow_mut().get_or_insert_with(|| {
            object.fill(0, size, block as u8).unwrap();
            vec![block as u8; size as usize]
        });
        self.addresses[index].owner = Some(owner);
        self.mappings.push(Mapped { object, contents, block, granted: Vec::new(), seen: false });
    }

    fn unmap(&mut self) {
        if self.mappings.is_empty() {
            return;
        }
        let mapped = self.mappings.swap_remove(self.random.index(self.mappings.len()));
        if self.copies.iter().any(|copy| mapped.range().contains(&copy.address)) {
            let failed = mapped.object.unmap().unwrap_err();
            assert!(matches!(failed.error, Error::InUse { .. }), "{failed}");
            self.mappings.push(Mapped { object: failed.object, ..mapped });
        } else if self.random.one_in(2) {
            mapped.object.unmap().unwrap();
        }
    }

    fn free_memory(&mut self) {
        if self.memories.is_empty() {
            return;
        }
        let memory = self.memories.swap_remove(self.random.index(self.memories.len()));
        if self.random.one_in(2) {
            // Dropped: its mappings keep it.
            return;
        }
        let same = self.memories.iter().any(|other| other.block == memory.block);
        if same || self.mappings.iter().any(|mapped| mapped.block == memory.block) {
            let failed = memory.object.free().unwrap_err();
            assert!(matches!(failed.error, Error::InUse { .. }), "{failed}");
            self.memories.push(Memory { object: failed.object, ..memory });
        } else {
            memory.object.free().unwrap();
        }
    }

    fn free_addresses(&mut self) {
        if self.addresses.is_empty() {
            return;
        }
        let freed = self.addresses.swap_remove(self.random.index(self.addresses.len()));
        let range = freed.object.address()..freed.object.address() + freed.object.size();
        if self.mappings.iter().any(|mapped| range.contains(&mapped.object.address())) {
            let failed = freed.object.free().unwrap_err();
            assert!(matches!(failed.error, Error::InUse { .. }), "{failed}");
            self.addresses.push(Addresses { object: failed.object, ..freed });
        } else if self.random.one_in(2) {
            freed.object.free().unwrap();
        }
    }

    fn write_and_read(&mut self) {
        let Some(index) = self.mapping() else { return self.map() };
        let size = self.mappings[index].object.size();
        let range = self.random.range(size);
        let bytes = self.random.bytes((range.end - range.start) as usize);
        let mapped = &self.mappings[index];
        if self.random.one_in(10) {
            refused(mapped.object.write(size - bytes.len() as u64 + 1, &bytes), "it is outside");
        }
        mapped.object.write(range.start, &bytes).unwrap();
        let mut contents = mapped.contents.borrow_mut();
        let contents = contents.as_mut().unwrap();
        contents[range.start as usize..range.end as usize].copy_from_slice(&bytes);
        let range = self.random.range(size);
        let mut back = vec![0; (range.end - range.start) as usize];
        mapped.object.read(range.start, &mut back).unwrap();
        assert!(back == contents[range.start as usize..range.end as usize], "other bytes came back");
    }

    fn fill(&mut self) {
        let Some(index) = self.mapping() else { return };
        let mapped = &self.mappings[index];
        let range = self.random.range(mapped.object.size());
        let value = self.random.next() as u8;
        mapped.object.fill(range.start, range.end - range.start, value).unwrap();
        mapped.contents.borrow_mut().as_mut().unwrap()[range.start as usize..range.end as usize].fill(value);
    }

    /// A part of a reservation, with or without mappings.
    fn slice(&mut self) {
        if self.addresses.is_empty() {
            return;
        }
        let addresses = &self.addresses[self.random.index(self.addresses.len())];
        let base = addresses.object.address();
        let range = self.random.range(addresses.object.size());
        let (start, end) = (base + range.start, base + range.end);
        let mut pieces: Vec<&Mapped> =
            self.mappings.iter().filter(|mapped| mapped.range().start < end && start < mapped.range().end).collect();
        pieces.sort_by_key(|mapped| mapped.range().start);
        let covered: u64 =
            pieces.iter().map(|mapped| mapped.range().end.min(end) - mapped.range().start.max(start)).sum();
        let slice = addresses.object.slice(range.start, range.end - range.start);
        if covered != range.end - range.start {
            return refused(slice, "there is a hole");
        }
        let slice = slice.unwrap();
        if !pieces.iter().any(|mapped| self.is_copied(&mapped.contents)) {
            let mut back = vec![0; covered as usize];
            slice.read(&mut back).unwrap();
            let mut expected = Vec::new();
            for mapped in &pieces {
                let from = (mapped.range().start.max(start) - mapped.range().start) as usize;
                let to = (mapped.range().end.min(end) - mapped.range().start) as usize;
                expected.extend_from_slice(&mapped.contents.borrow().as_ref().unwrap()[from..to]);
            }
            assert!(back == expected, "other bytes came back");
        }
        // The mappings that it covers cannot be removed.
        let first = pieces[0].range().start;
        let index = self.mappings.iter().position(|mapped| mapped.range().start == first).unwrap();
        let mapped = self.mappings.swap_remove(index);
        let failed = mapped.object.unmap().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }), "{failed}");
        self.mappings.push(Mapped { object: failed.object, ..mapped });
    }

    fn copy(&mut self) {
        let (Some(to), Some(from)) = (self.mapping(), self.mapping()) else { return };
        let (to, from) = (&self.mappings[to], &self.mappings[from]);
        if to.memory().is_imported() || from.memory().is_imported() {
            // The driver copies only some of these.
            return;
        }
        let target = self.random.range(to.object.size().min(from.object.size()));
        let length = target.end - target.start;
        let start = self.random.below(from.object.size() - length + 1);
        let source = start..start + length;
        let overlap = source.start < target.end && target.start < source.end;
        if Rc::ptr_eq(&to.contents, &from.contents) && overlap && to.range() != from.range() {
            // The same memory at two addresses: the result depends on the device.
            return;
        }
        let one = to.object.slice(target.start, length).unwrap();
        let result = one.copy_from(&from.object.slice(source.start, length).unwrap());
        if to.range() == from.range() && overlap {
            return refused(result, "they overlap");
        }
        result.unwrap();
        let bytes = from.contents.borrow().as_ref().unwrap()[source.start as usize..source.end as usize].to_vec();
        to.contents.borrow_mut().as_mut().unwrap()[target.start as usize..target.end as usize].copy_from_slice(&bytes);
    }

    fn batch(&mut self) {
        let mut chosen: Vec<usize> = Vec::new();
        for _ in 0..6 {
            let Some(index) = self.mapping() else { return };
            let contents = &self.mappings[index].contents;
            if !chosen.iter().any(|&other| Rc::ptr_eq(&self.mappings[other].contents, contents)) {
                chosen.push(index);
            }
        }
        let mut written = Vec::new();
        for index in chosen {
            let range = self.random.range(self.mappings[index].object.size());
            let bytes = self.random.bytes((range.end - range.start) as usize);
            written.push((index, range.start, bytes));
        }
        let slice = |index: usize, start: u64, bytes: &[u8]| {
            self.mappings[index].object.slice(start, bytes.len() as u64).unwrap()
        };
        let copies: Vec<_> =
            written.iter().map(|(index, start, bytes)| (slice(*index, *start, bytes), &bytes[..])).collect();
        write_batch(&copies).unwrap();
        let mut buffers: Vec<Vec<u8>> = written.iter().map(|(_, _, bytes)| vec![0; bytes.len()]).collect();
        let back = written.iter().zip(&mut buffers);
        let mut copies: Vec<_> =
            back.map(|((index, start, bytes), back)| (slice(*index, *start, bytes), &mut back[..])).collect();
        read_batch(&mut copies).unwrap();
        for ((index, start, bytes), back) in written.iter().zip(&buffers) {
            assert!(bytes == back, "other bytes came back");
            let start = *start as usize;
            let mut contents = self.mappings[*index].contents.borrow_mut();
            contents.as_mut().unwrap()[start..start + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn rows(&mut self) {
        let Some(index) = self.mapping() else { return };
        if self.mappings[index].memory().is_imported() {
            return;
        }
        let random = &mut self.random;
        let (width, height) = (random.below(300), random.below(20));
        let rows = Rows {
            width,
            height,
            pitch: (width + random.below(5000)).saturating_sub(random.below(20)),
            buffer_pitch: (width + random.below(50)).saturating_sub(random.below(5)),
        };
        let (memory, buffer) = (random.below(100_000), random.below(8000) as usize);
        let from = random.bytes(buffer);
        let fits = |pitch: u64, size: u64| width <= pitch && (height == 0 || (height - 1) * pitch + width <= size);
        let mapped = &self.mappings[index];
        let slice = mapped.object.slice(0, memory).unwrap();
        let result = slice.write_rows(&rows, &from);
        if !fits(rows.pitch, memory) || !fits(rows.buffer_pitch, buffer as u64) {
            return refused(result, "the rows do not fit");
        }
        result.unwrap();
        let mut back = vec![0; buffer];
        slice.read_rows(&rows, &mut back).unwrap();
        let mut contents = mapped.contents.borrow_mut();
        let contents = contents.as_mut().unwrap();
        for row in 0..height {
            let (at, there) = ((row * rows.pitch) as usize, (row * rows.buffer_pitch) as usize);
            let bytes = &from[there..there + width as usize];
            contents[at..at + width as usize].copy_from_slice(bytes);
            assert!(&back[there..there + width as usize] == bytes, "other bytes came back");
        }
    }

    fn begin_copy(&mut self) {
        let Some(index) = self.mapping() else { return };
        if self.copies.len() > 4 || self.mappings[index].memory().is_imported() {
            return self.end_copy();
        }
        let mapped = &self.mappings[index];
        let range = self.random.range(mapped.object.size());
        let at = range.start as usize;
        let known = || mapped.contents.borrow().as_ref().unwrap()[at..range.end as usize].to_vec();
        let (object, expected) = if self.random.one_in(2) {
            let bytes = self.random.bytes((range.end - range.start) as usize);
            (mapped.object.write_async(range.start, bytes).unwrap(), None)
        } else {
            let buffer = vec![0; (range.end - range.start) as usize];
            (mapped.object.read_async(range.start, buffer).unwrap(), Some(known()))
        };
        let (contents, address) = (mapped.contents.clone(), mapped.object.address());
        self.copies.push(Copying { object, contents, address, at, expected });
    }

    fn end_copy(&mut self) {
        if self.copies.is_empty() {
            return;
        }
        let copy = self.copies.swap_remove(self.random.index(self.copies.len()));
        let bytes = copy.object.wait().unwrap();
        match copy.expected {
            Some(expected) => assert!(bytes == expected, "other bytes came back"),
            None => {
                copy.contents.borrow_mut().as_mut().unwrap()[copy.at..copy.at + bytes.len()].copy_from_slice(&bytes)
            }
        }
    }

    fn view(&mut self) {
        let Some(index) = self.mapping() else { return };
        let mapped = &self.mappings[index];
        let same = self.mappings.iter().filter(|other| Rc::ptr_eq(&other.contents, &mapped.contents)).count();
        if mapped.memory().is_imported() || same > 1 {
            return;
        }
        self.mappings[index].seen = true;
        let mapped = &self.mappings[index];
        if !self.session.has_segments() {
            return refused(mapped.object.host_view(), "there are no segments");
        }
        let view = match mapped.object.host_view() {
            Ok(view) => view,
            Err(error) => {
                assert_eq!(error.errno(), Some(Errno::EOPNOTSUPP), "{error}");
                assert!(mapped.memory().location() != Location::Host);
                return;
            }
        };
        let range = self.random.range(mapped.object.size());
        let (start, length) = (range.start as usize, (range.end - range.start) as usize);
        let mut back = vec![0; length];
        view.read(start, &mut back).unwrap();
        let mut contents = mapped.contents.borrow_mut();
        let contents = &mut contents.as_mut().unwrap()[start..start + length];
        assert!(back == contents, "the CPU sees other bytes");
        let bytes = self.random.bytes(length);
        view.write(start, &bytes).unwrap();
        contents.copy_from_slice(&bytes);
        refused(view.write(view.size(), &[0]), "it is outside");
    }

    fn look_up(&mut self) {
        if self.addresses.is_empty() {
            return;
        }
        let addresses = &self.addresses[self.random.index(self.addresses.len())];
        let address = addresses.object.address() + self.random.below(addresses.object.size());
        let expected = self.mappings.iter().find(|mapped| mapped.range().contains(&address));
        let found = self.session.memory_at(address);
        assert_eq!(found.is_some(), expected.is_some());
        if let (Some(found), Some(expected)) = (found, expected) {
            assert!(found.is_same(&expected.memory()));
            let range = expected.range();
            assert_eq!(self.session.mapping_at(address), Some((range.start, range.end - range.start)));
        }
        let end = addresses.object.address() + addresses.object.size();
        let mut ranges: Vec<_> =
            self.mappings.iter().map(|mapped| (mapped.object.address(), mapped.object.size())).collect();
        ranges.retain(|&(start, _)| (addresses.object.address()..end).contains(&start));
        ranges.sort_unstable();
        assert_eq!(addresses.object.mappings(), ranges);
    }

    /// Exports memory, and imports it in the same process on another device.
    fn share(&mut self) {
        if self.memories.is_empty() || self.devices.len() < 2 {
            return;
        }
        let index = self.random.index(self.memories.len());
        let object = self.memories[index].object.clone();
        let Location::Device(LogicalId(owner)) = object.location() else { return };
        if object.is_imported() {
            return refused(object.export(), "it is imported");
        }
        let export = object.export().unwrap();
        export.trust(&[own_tgid()]).unwrap();
        let ticket = export.ticket().unwrap();
        let other = (owner as usize + 1 + self.random.index(self.devices.len() - 1)) % self.devices.len();
        let own = self.device(owner as usize);
        refused(share::import(&own, &ticket), "it is this process's own memory, on its own device");
        let importer = self.device(other);
        let imported = share::import(&importer, &ticket).unwrap();
        assert_eq!(imported.size(), object.size());
        let contents = self.memories[index].contents.clone();
        let same = self.memories.iter().find(|memory| memory.object.is_same(&imported)).map(|memory| memory.block);
        let mapped = self.mappings.iter().find(|mapped| mapped.memory().is_same(&imported)).map(|mapped| mapped.block);
        let block = same.or(mapped).unwrap_or_else(|| self.new_block());
        self.memories.push(Memory { object: imported, contents, block });
    }

    fn grant(&mut self) {
        let Some(index) = self.mapping() else { return };
        let memory = self.mappings[index].memory();
        let Location::Device(LogicalId(owner)) = memory.location() else { return };
        if memory.is_imported() {
            return;
        }
        let to = self.random.index(self.devices.len());
        let peer = self.device(to);
        let mapped = &mut self.mappings[index];
        mapped.object.grant(&peer).unwrap();
        assert!(mapped.object.is_granted(&peer).unwrap());
        if to != owner as usize {
            mapped.granted.push(to);
        }
    }

    fn close_device(&mut self) {
        let id = self.random.index(self.devices.len());
        let Some(device) = self.devices[id].take() else { return };
        if self.random.one_in(2) {
            return;
        }
        let here = Location::Device(LogicalId(id as u32));
        let used = self.memories.iter().any(|memory| memory.object.location() == here)
            || self.mappings.iter().any(|mapped| mapped.memory().location() == here || mapped.granted.contains(&id));
        match device.close() {
            Ok(()) => assert!(!used),
            Err(failed) => {
                assert!(used && matches!(failed.error, Error::InUse { .. }), "{failed}");
                self.devices[id] = Some(failed.object);
            }
        }
    }

    fn close_session(&mut self) {
        let failed = self.session.clone().close().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }), "{failed}");
        assert!(matches!(Session::open(), Err(Error::SessionOpen)));
    }

    /// Drops everything in a random order.
    fn end(mut self) {
        let mut random = self.random;
        while let Some(copy) = self.copies.pop() {
            drop(copy.object);
        }
        let mut all: Vec<Box<dyn Any>> = vec![Box::new(self.session)];
        all.extend(self.devices.into_iter().flatten().map(|device| Box::new(device) as Box<dyn Any>));
        all.extend(self.memories.into_iter().map(|memory| Box::new(memory.object) as Box<dyn Any>));
        all.extend(self.addresses.into_iter().map(|addresses| Box::new(addresses.object) as Box<dyn Any>));
        all.extend(self.mappings.into_iter().map(|mapped| Box::new(mapped.object) as Box<dyn Any>));
        while !all.is_empty() {
            all.swap_remove(random.index(all.len()));
        }
    }
}

fn sequences(emulator: &Emulator, devices: usize, count: u64) {
    for seed in seeds(count) {
        let _printed = Seed(seed);
        let mut world = World::new(seed, devices);
        for _ in 0..steps(250) {
            world.step();
        }
        world.end();
        assert_nothing_left(emulator);
        emulator.assert_no_traps();
    }
}

#[test]
fn random_calls_on_one_device_match_the_model() {
    on_each_generation(Config { devices: 1, ..plain() }, |_, emulator| sequences(emulator, 1, 4));
}

#[test]
fn random_calls_on_three_devices_match_the_model() {
    on_each_generation(Config { devices: 3, ..plain() }, |_, emulator| sequences(emulator, 3, 4));
}
