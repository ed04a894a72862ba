//! Keys with their places and values, in one buffer.
//!
//! A layout may have a million keys. An object for each would cost more than the key itself, so
//! they are bytes one behind another, in messages as in the front. What is committed lies in the
//! journal alone.

use crate::layout::{Allocation, BadLayout, ENTRY_BYTES, Entry, KEYS_MAX, METADATA_MAX, check};
use crate::protocol::{FRAME_MAX, PAGE_MAX};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Before each key and its value.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
struct Head {
    key: U32,
    value: U32,
    allocation: U64,
    offset: U64,
    size: U64,
}

const HEAD: usize = size_of::<Head>();

/// A key, where its bytes are, and what its writer says about them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryRef<'a> {
    /// The key.
    pub key: &'a str,
    /// The allocation in which it begins.
    pub allocation: u64,
    /// The offset there.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
    /// Whatever the writer wants its readers to know.
    pub value: &'a [u8],
}

impl<'a> EntryRef<'a> {
    /// The same, of a key and an entry.
    pub fn new(key: &'a str, entry: &'a Entry) -> EntryRef<'a> {
        let Entry { allocation, offset, size, value } = entry;
        EntryRef { key, allocation: *allocation, offset: *offset, size: *size, value }
    }

    /// The entry without its key.
    pub fn to_entry(&self) -> Entry {
        let EntryRef { allocation, offset, size, value, .. } = *self;
        Entry { allocation, offset, size, value: value.to_vec() }
    }

    /// The bytes before key and value. A layout's hash is over them too.
    pub(crate) fn head(&self) -> [u8; HEAD] {
        let head = Head {
            key: (self.key.len() as u32).into(),
            value: (self.value.len() as u32).into(),
            allocation: self.allocation.into(),
            offset: self.offset.into(),
            size: self.size.into(),
        };
        let mut bytes = [0; HEAD];
        bytes.copy_from_slice(head.as_bytes());
        bytes
    }

    /// How many bytes it has.
    fn length(&self) -> usize {
        HEAD + self.key.len() + self.value.len()
    }

    /// The first entry of some bytes, and how many bytes it has.
    fn first(bytes: &'a [u8]) -> Option<(EntryRef<'a>, usize)> {
        let (head, rest) = Head::read_from_prefix(bytes).ok()?;
        let (key, rest) = rest.split_at_checked(head.key.get() as usize)?;
        let value = rest.get(..head.value.get() as usize)?;
        let entry = EntryRef {
            key: std::str::from_utf8(key).ok()?,
            allocation: head.allocation.get(),
            offset: head.offset.get(),
            size: head.size.get(),
            value,
        };
        Some((entry, entry.length()))
    }
}

/// Keys with their places and values, as a message has them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Entries {
    bytes: Vec<u8>,
    count: usize,
}

impl Entries {
    /// Adds one at the end.
    pub fn push(&mut self, entry: EntryRef<'_>) {
        self.bytes.extend_from_slice(&entry.head());
        self.bytes.extend_from_slice(entry.key.as_bytes());
        self.bytes.extend_from_slice(entry.value);
        self.count += 1;
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// All of them, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = EntryRef<'_>> {
        walk(&self.bytes).map(|(_, entry)| entry)
    }

    /// Bytes as they count for the limit of a layout.
    pub(crate) fn metadata(&self) -> usize {
        self.bytes.len() + self.count * (ENTRY_BYTES - HEAD)
    }
}

/// Entries with their offsets, up to the first that is not whole.
fn walk(bytes: &[u8]) -> impl Iterator<Item = (usize, EntryRef<'_>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let (entry, length) = EntryRef::first(&bytes[at..])?;
        let begins = at;
        at += length;
        Some((begins, entry))
    })
}

impl<'a> FromIterator<EntryRef<'a>> for Entries {
    fn from_iter<I: IntoIterator<Item = EntryRef<'a>>>(entries: I) -> Entries {
        let mut all = Entries::default();
        entries.into_iter().for_each(|entry| all.push(entry));
        all
    }
}

impl FromIterator<(String, Entry)> for Entries {
    fn from_iter<I: IntoIterator<Item = (String, Entry)>>(entries: I) -> Entries {
        let mut all = Entries::default();
        entries.into_iter().for_each(|(key, entry)| all.push(EntryRef::new(&key, &entry)));
        all
    }
}

impl fmt::Debug for Entries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl Serialize for Entries {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.bytes)
    }
}

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entries, D::Error> {
        let bytes: Vec<u8> = serde_bytes::deserialize(deserializer)?;
        let whole = walk(&bytes).fold((0, 0), |(count, end), (_, entry)| (count + 1, end + entry.length()));
        if whole.1 != bytes.len() {
            let (count, end) = whole;
            return Err(D::Error::custom(format_args!("entry {count}, at byte {end} of them, is not whole")));
        }
        Ok(Entries { bytes, count: whole.0 })
    }
}

/// What a writer has put, in the order in which it did. Instead of its number, an allocation is
/// named by its place in the layout: places are the same in the next life of a service.
#[derive(Debug, Default)]
pub(crate) struct Puts {
    /// As they came, without a copy if they are large.
    parts: Vec<Vec<u8>>,
    count: usize,
    metadata: usize,
    last_key: Vec<u8>,
    /// A key did not come after the one before it.
    unsorted: bool,
}

/// Parts that are smaller become one.
const SMALL: usize = 64 << 10;

impl Puts {
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds entries, all of them or none.
    pub(crate) fn add(&mut self, allocations: &[Allocation], more: Entries) -> Result<(), BadLayout> {
        let (count, metadata) = (self.count + more.count, self.metadata + more.metadata());
        within_limits(count, metadata)?;
        let mut bytes = more.bytes;
        let (mut at, mut last, mut unsorted) = (0, None::<Range<usize>>, self.unsorted);
        while let Some((entry, length)) = EntryRef::first(&bytes[at..]) {
            let place = check(allocations, &entry)?;
            let before = last.map_or(&self.last_key[..], |last| &bytes[last]);
            unsorted |= before >= entry.key.as_bytes();
            last = Some(at + HEAD..at + HEAD + entry.key.len());
            bytes[at + offset_of!(Head, allocation)..][..8].copy_from_slice(&(place as u64).to_le_bytes());
            at += length;
        }
        let Some(last) = last else { return Ok(()) };
        (self.last_key, self.unsorted, self.count, self.metadata) = (bytes[last].to_vec(), unsorted, count, metadata);
        match self.parts.last_mut().filter(|part| part.len() + bytes.len() <= SMALL) {
            Some(part) => part.extend_from_slice(&bytes),
            None => self.parts.push(bytes),
        }
        Ok(())
    }

    /// What was committed before with what was put since, by key. Of two with the same key the
    /// later one counts. An error leaves everything as it is.
    pub(crate) fn commit(&mut self, before: &Keys) -> io::Result<Result<Keys, BadLayout>> {
        if !self.unsorted && before.len() == 0 {
            return Ok(Ok(Keys::new(std::mem::take(self).parts)));
        }
        let committed = before.read(0..before.length)?;
        let put = self.parts.iter().flat_map(|part| walk(part));
        let mut all: Vec<EntryRef<'_>> = walk(&committed).chain(put).map(|(_, entry)| entry).collect();
        all.sort_by_key(|entry| entry.key);
        let newest = all.iter().enumerate().filter(|(at, it)| all.get(at + 1).is_none_or(|next| next.key != it.key));
        let entries: Entries = newest.map(|(_, entry)| *entry).collect();
        Ok(within_limits(entries.count, entries.metadata()).map(|()| {
            *self = Puts::default();
            Keys::new(vec![entries.bytes])
        }))
    }
}

fn within_limits(count: usize, metadata: usize) -> Result<(), BadLayout> {
    if count > KEYS_MAX {
        return Err(BadLayout { field: "entries", rule: format!("a layout has at most {KEYS_MAX} keys") });
    }
    if metadata > METADATA_MAX {
        let rule = format!("keys and values of a layout have at most {METADATA_MAX} bytes");
        return Err(BadLayout { field: "entries", rule });
    }
    Ok(())
}

/// Every so many keys the place of one is remembered.
const BLOCK: usize = 64;

/// The keys of a committed layout, sorted. Allocations are named by their places.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    count: usize,
    length: usize,
    /// Where each [`BLOCK`] begins.
    blocks: Vec<u32>,
    store: RefCell<Store>,
}

#[derive(Debug)]
enum Store {
    /// Parts with whole entries.
    Memory(Vec<Vec<u8>>),
    /// The journal, and where in it they begin.
    File(Rc<File>, u64),
}

impl Default for Store {
    fn default() -> Store {
        Store::Memory(Vec::new())
    }
}

impl Keys {
    fn new(parts: Vec<Vec<u8>>) -> Keys {
        let (mut count, mut length, mut blocks) = (0, 0, Vec::new());
        for part in &parts {
            let mut at = 0;
            while let Ok((head, _)) = Head::read_from_prefix(&part[at..]) {
                if count % BLOCK == 0 {
                    // A layout has at most 64 MiB of them.
                    blocks.push((length + at) as u32);
                }
                at += HEAD + head.key.get() as usize + head.value.get() as usize;
                count += 1;
            }
            length += part.len();
        }
        Keys { count, length, blocks, store: RefCell::new(Store::Memory(parts)) }
    }

    /// From the bytes of another front; `None` if they are not whole.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Keys> {
        let end = walk(bytes).last().map_or(0, |(at, last)| at + last.length());
        (end == bytes.len()).then(|| Keys::new(vec![bytes.to_vec()]))
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Bytes.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// They have been written to a file, and need no memory of their own any more.
    pub(crate) fn moved_to(&self, file: &Rc<File>, at: u64) {
        self.store.replace(Store::File(Rc::clone(file), at));
    }

    /// Their bytes, which are the same in every service that has the same layout, part by part.
    pub(crate) fn each_part(&self, mut look: impl FnMut(&[u8])) -> io::Result<()> {
        match &*self.store.borrow() {
            Store::Memory(parts) => parts.iter().for_each(|part| look(part)),
            Store::File(..) => look(&self.read(0..self.length)?),
        }
        Ok(())
    }

    fn read(&self, range: Range<usize>) -> io::Result<Vec<u8>> {
        match &*self.store.borrow() {
            Store::Memory(parts) => {
                let all = parts.concat();
                Ok(all.get(range).ok_or(io::ErrorKind::UnexpectedEof)?.to_vec())
            }
            Store::File(file, at) => {
                let mut bytes = vec![0; range.len()];
                file.read_exact_at(&mut bytes, at + range.start as u64)?;
                Ok(bytes)
            }
        }
    }

    /// Entries behind a key that fit into one answer.
    pub(crate) fn page(&self, allocations: &[Allocation], after: Option<&str>) -> io::Result<Entries> {
        let range = |block: usize| {
            let at = |block: usize| self.blocks.get(block).map_or(self.length, |&at| at as usize);
            at(block)..at(block + 1)
        };
        let mut page = Entries::default();
        // The last block that begins with such a key or one before it.
        let (mut from, mut to) = (0, self.blocks.len());
        while let (Some(after), true) = (after, from + 1 < to) {
            let middle = from.midpoint(to);
            let block = self.read(range(middle))?;
            match EntryRef::first(&block).is_some_and(|(first, _)| first.key <= after) {
                true => from = middle,
                false => to = middle,
            }
        }
        for block in from..self.blocks.len() {
            for (_, entry) in walk(&self.read(range(block))?) {
                if after.is_some_and(|after| entry.key <= after) {
                    continue;
                }
                let bytes = page.metadata() + entry.key.len() + entry.value.len() + ENTRY_BYTES;
                if page.count == PAGE_MAX || bytes > FRAME_MAX / 2 {
                    return Ok(page);
                }
                let allocation = allocations.get(entry.allocation as usize).map_or(u64::MAX, |it| it.id);
                page.push(EntryRef { allocation, ..entry });
            }
        }
        Ok(page)
    }
}

impl PartialEq for Keys {
    fn eq(&self, other: &Keys) -> bool {
        self.count == other.count && self.read(0..self.length).ok() == other.read(0..other.length).ok()
    }
}

impl Eq for Keys {}

/// In a record there is their length alone; the journal has the bytes behind the record.
impl Serialize for Keys {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.length.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Keys, D::Error> {
        Ok(Keys { length: usize::deserialize(deserializer)?, ..Keys::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Layout, PageSize, hash_of};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn allocations() -> Vec<Allocation> {
        [3, 70].map(|id| Allocation { id, size: 4 << 20, page: PageSize::Huge, tag: String::new() }).into()
    }

    fn entry() -> impl Strategy<Value = Entry> {
        let value = prop_oneof![3 => prop::collection::vec(any::<u8>(), 0..40), 1 => Just(vec![7; 60 << 10])];
        (prop_oneof![Just(3u64), Just(70)], 0u64..1 << 20, 0u64..1 << 20, value)
            .prop_map(|(allocation, offset, size, value)| Entry { allocation, offset, size, value })
    }

    /// All pages of the keys, one after another.
    fn all_pages(keys: &Keys) -> Vec<(String, Entry)> {
        let mut all: Vec<(String, Entry)> = Vec::new();
        loop {
            let page = keys.page(&allocations(), all.last().map(|(key, _)| key.as_str())).unwrap();
            if page.is_empty() {
                return all;
            }
            assert!(page.len() <= PAGE_MAX && page.metadata() <= FRAME_MAX / 2);
            all.extend(page.iter().map(|entry| (entry.key.to_owned(), entry.to_entry())));
        }
    }

    #[test]
    fn bytes_that_are_not_whole_entries_are_refused() {
        let entry = Entry { allocation: 3, offset: 1, size: 2, value: vec![7; 40] };
        let entries: Entries = [("key".to_owned(), entry.clone()), ("other".to_owned(), entry)].into_iter().collect();
        let read = |bytes: &[u8]| {
            let message = rmp_serde::to_vec(serde_bytes::Bytes::new(bytes)).unwrap();
            rmp_serde::from_slice::<Entries>(&message)
        };
        let first = EntryRef::first(&entries.bytes).unwrap().0.length();
        assert_eq!(read(&entries.bytes).unwrap(), entries);
        assert!(read(&[]).unwrap().is_empty());
        for end in (1..entries.bytes.len()).filter(|end| *end != first) {
            let error = read(&entries.bytes[..end]).unwrap_err().to_string();
            let number = usize::from(end > first);
            assert!(error.contains(&format!("entry {number}, at byte {} of them", number * first)), "{end}: {error}");
        }
        for at in 0..8 {
            // A key or a value of which there is too little.
            let mut bytes = entries.bytes.clone();
            bytes[at] = 0xFF;
            assert!(read(&bytes).is_err(), "{at}");
        }
        let mut bytes = entries.bytes.clone();
        bytes[HEAD] = 0xFF;
        assert!(read(&bytes).is_err(), "a key that is not UTF-8");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn keys_are_served_sorted_and_the_last_put_of_a_key_counts(
            commits in prop::collection::vec(prop::collection::vec(("[a-d]{1,4}", entry()), 0..300), 1..4),
            after in "[a-d]{0,5}",
        ) {
            let (mut model, mut keys) = (BTreeMap::new(), Keys::default());
            let file = Rc::new(File::from(
                nix::sys::memfd::memfd_create("keys", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap(),
            ));
            for commit in commits {
                let mut puts = Puts::default();
                for part in commit.chunks(50) {
                    puts.add(&allocations(), part.iter().cloned().collect()).unwrap();
                    let bad = Entry { allocation: 4, offset: 0, size: 0, value: Vec::new() };
                    let refused = part.iter().cloned().chain([("z".into(), bad)]).collect();
                    prop_assert_eq!(puts.add(&allocations(), refused).unwrap_err().field, "allocation");
                }
                model.extend(commit);
                keys = puts.commit(&keys).unwrap().unwrap();
                prop_assert!(puts.is_empty());
                // It is the same from a file.
                let before = keys.read(0..keys.length).unwrap();
                file.write_all_at(&before, 5).unwrap();
                prop_assert_eq!(&Keys::from_bytes(&before).unwrap(), &keys);
                if let Some((_, cut)) = before.split_last() {
                    prop_assert!(Keys::from_bytes(cut).is_none());
                }
                if before.len() % 2 == 0 {
                    keys.moved_to(&file, 5);
                }
            }
            let expected: Vec<_> = model.clone().into_iter().collect();
            prop_assert_eq!(keys.len(), expected.len());
            prop_assert_eq!(all_pages(&keys), expected);
            let behind = keys.page(&allocations(), Some(&after)).unwrap();
            let behind: Vec<_> = behind.iter().map(|it| it.key.to_owned()).collect();
            let known = model.keys().filter(|key| **key > after).take(behind.len()).cloned().collect::<Vec<_>>();
            prop_assert_eq!(behind.is_empty(), !model.keys().any(|key| *key > after));
            prop_assert_eq!(behind, known);
            // Clients that know the layout find the same hash.
            let layout = Layout { allocations: allocations(), entries: model };
            let mut hasher = hash_of(&allocations());
            keys.each_part(|part| hasher.write(part)).unwrap();
            prop_assert_eq!(hasher.finish_128().to_le_bytes(), layout.hash());
        }
    }
}
