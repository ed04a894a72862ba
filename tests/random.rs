//! Long random sequences of safe calls: by one thread against a model of what must happen, and by several at once.
//!
//! Each sequence is made from a seed, which is printed when the sequence fails. `ASCEND_VMM_SEED` runs one seed alone, `ASCEND_VMM_STEPS` makes
//! sequences longer.

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator, isolated, on_each_generation};
use ascend_vmm::copy::{Pending, Rows, read_batch, write_batch};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid};
use ascend_vmm::{Device, Error, Location, Mapping, PhysicalMemory, Reservation, ReserveOptions, Session};
use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const MIB2: u64 = 2 << 20;
const GIB: u64 = 1 << 30;

/// A sequence of numbers that only depends on its seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(length + 8);
        while bytes.len() < length {
            bytes.extend_from_slice(&self.next().to_ne_bytes());
        }
        bytes.truncate(length);
        bytes
    }

    /// A range of a few bytes to some pages inside `size`, often at its ends and at borders of chunks.
    fn range(&mut self, size: u64) -> Range<u64> {
        let length = match self.below(4) {
            0 => self.below(16) + 1,
            1 => 4096,
            _ => self.below(20_000) + 1,
        };
        let last = size - length;
        let start = match self.below(4) {
            0 => 0,
            1 => last,
            2 => (self.below(size / MIB2 + 1) * MIB2).saturating_sub(self.below(length)).min(last),
            _ => self.below(last + 1),
        };
        start..start + length
    }
}

/// Tells the seed if the sequence fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this was the sequence of ASCEND_VMM_SEED={}", self.0);
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn seeds(count: u64) -> Range<u64> {
    number("ASCEND_VMM_SEED").map_or(0..count, |seed| seed..seed + 1)
}

fn steps(usual: u64) -> u64 {
    number("ASCEND_VMM_STEPS").unwrap_or(usual)
}

/// What memory should hold; unknown until it is mapped the first time.
type Contents = Rc<RefCell<Option<Vec<u8>>>>;

/// A reference to memory.
struct Memory {
    object: PhysicalMemory,
    contents: Contents,
    /// What the library should see as the same.
    block: u64,
}

struct Addresses {
    object: Reservation,
    /// The device, and whether it is imported, of the first memory that was mapped.
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
        Err(error) => panic!("the kernel was asked, although {why}: {error}"),
    }
}

impl World {
    fn new(seed: u64, devices: usize) -> World {
        World {
            random: Random(seed),
            session: Session::open().unwrap(),
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

    /// A mapping whose contents are known and not being copied.
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
                // At a place near another.
                let near = self.random.index(self.addresses.len());
                let address = self.addresses[near].object.address() - 8 * MIB2 + self.random.below(16) * MIB2;
                let wanted = address..address + size;
                let taken = self.addresses.iter().any(|other| {
                    let start = other.object.address();
                    start < wanted.end && wanted.start < start + other.object.size()
                });
                let result = self.session.reserve_with(size, &ReserveOptions::new().address(address));
                if taken || address < ReserveOptions::ADDRESSES.start {
                    return refused(result, "the addresses are taken, or not the driver's");
                }
                let object = result.unwrap();
                assert_eq!(object.address(), address);
                object
            }
            1 => {
                let alignment = MIB2 << self.random.below(10);
                let object = self.session.reserve_with(size, &ReserveOptions::new().alignment(alignment)).unwrap();
                assert_eq!(object.address() % alignment, 0);
                object
            }
            2 if self.random.one_in(4) => {
                refused(self.session.reserve(129 * GIB), "it is too large");
                refused(self.session.reserve(size + 1), "the size is odd");
                let odd = ReserveOptions::new().alignment(3 * MIB2);
                return refused(self.session.reserve_with(size, &odd), "the alignment is odd");
            }
            _ => self.session.reserve(size).unwrap(),
        };
        let new = object.address()..object.address() + object.size();
        for other in &self.addresses {
            let start = other.object.address();
            assert!(start >= new.end || new.start >= start + other.object.size(), "addresses were handed out twice");
        }
        self.addresses.push(Addresses { object, owner: None });
    }

    fn map(&mut self) {
        if self.memories.is_empty() || self.addresses.is_empty() {
            return self.create();
        }
        let memory = &self.memories[self.random.index(self.memories.len())];
        // The emulated driver shows memory to the CPU at several places too, but stores at one are seen late at the others: not by this model.
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
        } else if self.mappings.iter().any(|other| other.range().start < wanted.end && wanted.start < other.range().end)
        {
            "something is mapped there"
        } else if into.owner.is_some_and(|other| other != owner) {
            "the reservation is another device's"
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
            // The mappings keep it.
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

    /// A part of a reservation, whatever is mapped there.
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
        // What it covers cannot be unmapped.
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
            // Only some of these work.
            return;
        }
        let target = self.random.range(to.object.size().min(from.object.size()));
        let length = target.end - target.start;
        let start = self.random.below(from.object.size() - length + 1);
        let source = start..start + length;
        let overlap = source.start < target.end && target.start < source.end;
        if Rc::ptr_eq(&to.contents, &from.contents) && overlap && to.range() != from.range() {
            // The same memory at two addresses: what comes of it is the device's to decide.
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
        export.trust(&[BareTgid::of_this_process(&self.session).unwrap()]).unwrap();
        let ticket = export.ticket().unwrap();
        let other = (owner as usize + 1 + self.random.index(self.devices.len() - 1)) % self.devices.len();
        let own = self.device(owner as usize);
        refused(share::import(&own, &ticket), "it is this process's own, on its own device");
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

    /// Drops everything in an order that nobody would think of.
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
        let _told = Seed(seed);
        let mut world = World::new(seed, devices);
        for _ in 0..steps(250) {
            world.step();
        }
        world.end();
        let state = emulator.state();
        assert!(state.is_empty(), "{state:#?}");
        emulator.assert_no_traps();
    }
}

fn host(devices: u32) -> Config {
    Config { devices, device_process: DeviceProcess::Automatic, ..Config::default() }
}

#[test]
fn random_calls_do_on_one_device_what_a_model_says() {
    on_each_generation(host(1), |_, emulator| sequences(emulator, 1, 4));
}

#[test]
fn random_calls_do_on_three_devices_what_a_model_says() {
    on_each_generation(host(3), |_, emulator| sequences(emulator, 3, 4));
}

/// What several threads use at once.
#[derive(Default)]
struct Common {
    /// Addresses into which anyone maps, and memory that anyone maps.
    addresses: Mutex<Vec<std::sync::Arc<Reservation>>>,
    memories: Mutex<Vec<PhysicalMemory>>,
    done: AtomicU64,
}

/// One thread: without a model, since others do the same; but its own memory holds what it wrote.
fn alone_among_others(seed: u64, common: &Common, devices: u64) {
    let random = &mut Random(seed);
    let taken = |list: &Mutex<Vec<PhysicalMemory>>, random: &mut Random| {
        let list = list.lock().unwrap();
        (!list.is_empty()).then(|| list[random.index(list.len())].clone())
    };
    for _ in 0..steps(40) {
        // The session is opened by whoever is first, and closed by whoever is last.
        let session = Session::current().unwrap();
        let device = session.device(LogicalId(random.below(devices) as u32)).unwrap();
        let size = (random.below(3) + 1) * MIB2;
        let own = if random.one_in(4) { session.host().unwrap().create(size) } else { device.create(size) }.unwrap();
        let reservation = std::sync::Arc::new(session.reserve(2 * size).unwrap());
        let mapping = reservation.map(random.below(size / MIB2 + 1) * MIB2, &own).unwrap();
        let range = random.range(size);
        let bytes = random.bytes((range.end - range.start) as usize);
        let running = mapping.write_async(range.start, bytes.clone()).unwrap();
        match random.below(6) {
            0 => common.addresses.lock().unwrap().push(reservation.clone()),
            1 => common.memories.lock().unwrap().push(device.create(MIB2).unwrap()),
            2 => drop(common.addresses.lock().unwrap().pop()),
            3 => drop(common.memories.lock().unwrap().pop()),
            _ => {}
        }
        // Others' things: anything may be refused, nothing may break.
        let others = {
            let list = common.addresses.lock().unwrap();
            (!list.is_empty()).then(|| list[random.index(list.len())].clone())
        };
        if let Some(others) = others {
            let offset = random.below(others.size() / MIB2) * MIB2;
            if let Some(memory) = taken(&common.memories, random) {
                if let Ok(mapping) = others.map(offset, &memory) {
                    if random.one_in(2) {
                        mapping.fill(0, 4096, 1).unwrap();
                    }
                    if let Err(failed) = mapping.unmap() {
                        assert!(matches!(failed.error, Error::InUse { .. }), "{failed}");
                    }
                }
            }
            if let Ok(slice) = others.slice(random.below(others.size() - 64), 64) {
                slice.read(&mut [0; 64]).unwrap();
            }
            let address = others.address() + random.below(others.size());
            session.memory_at(address);
            session.mapping_at(address);
            others.mappings();
        }
        if random.one_in(4) && devices > 1 {
            let peer = session.device(LogicalId(random.below(devices) as u32)).unwrap();
            if own.location() != Location::Host {
                mapping.grant(&peer).unwrap();
            }
        }
        assert!(running.wait().unwrap() == bytes);
        let mut back = vec![0; bytes.len()];
        mapping.read(range.start, &mut back).unwrap();
        assert!(back == bytes, "private memory was written by another");
        if random.one_in(2) {
            let offset = mapping.offset();
            drop(mapping);
            // At the same address again, unless somebody came in between.
            if let Ok(mapping) = reservation.map(offset, &own) {
                mapping.read(range.start, &mut back).unwrap();
                assert!(back == bytes, "private memory was written by another");
            }
        }
        if random.one_in(4) {
            drop(session);
            drop(device);
        }
        common.done.fetch_add(1, Ordering::Relaxed);
    }
}

fn threads(emulator: &Emulator, devices: u64, count: u64) {
    for seed in seeds(count) {
        let _told = Seed(seed);
        let common = Common::default();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let common = &common;
                scope.spawn(move || alone_among_others(seed << 8 | thread, common, devices));
            }
        });
        assert_eq!(common.done.load(Ordering::Relaxed), 4 * steps(40));
        drop(common);
        let state = emulator.state();
        assert!(state.is_empty(), "{state:#?}");
        emulator.assert_no_traps();
    }
}

#[test]
fn threads_that_call_at_random_on_one_device_break_nothing() {
    on_each_generation(host(1), |_, emulator| threads(emulator, 1, 2));
}

#[test]
fn threads_that_call_at_random_on_three_devices_break_nothing() {
    on_each_generation(host(3), |_, emulator| threads(emulator, 3, 2));
}

#[test]
fn a_look_at_an_address_does_not_keep_what_another_thread_drops_there() {
    isolated(host(1), |_| {
        let session = Session::open().unwrap();
        let memory = session.device(LogicalId(0)).unwrap().create(MIB2).unwrap();
        let reservation = session.reserve(MIB2).unwrap();
        let address = reservation.address();
        let over = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while over.load(Ordering::Relaxed) == 0 {
                    session.memory_at(address);
                    session.mapping_at(address);
                }
            });
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for _ in 0..500 {
                    drop(reservation.map(0, &memory).unwrap());
                }
            }));
            over.store(1, Ordering::Relaxed);
            result.unwrap();
        });
        reservation.free().unwrap();
    });
}
