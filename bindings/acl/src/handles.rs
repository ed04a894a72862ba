//! Handles: numbers that are looked up in a table, never pointers that are followed.
//!
//! A handle has a mark, the kind of its object, the place in the table of its kind, and the
//! generation of that place, which changes whenever an object leaves it. A stale, foreign or forged
//! handle is therefore not found, whatever the program does. The numbers look like no address, so
//! that a program which follows one stops there.

use crate::border::{lock, using};
use crate::fault::{Fault, Outcome, code};
use std::sync::Mutex;

/// A handle as C sees it.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

impl Handle {
    /// No object.
    pub const NULL: Handle = Handle(0);

    /// Whether it is NULL.
    #[inline]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

/// What a handle stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A context.
    Context = 1,
    /// A stream.
    Stream = 2,
    /// An event.
    Event = 3,
    /// Physical memory.
    Memory = 4,
}

const MARK: u64 = 0x5A << 56;
const MARK_MASK: u64 = 0xFF << 56;
const KIND_SHIFT: u32 = 52;
const GENERATION_SHIFT: u32 = 24;
const GENERATIONS: u32 = 1 << 28;
const PLACES: usize = 1 << 24;

/// The objects of one kind, behind a lock.
#[derive(Debug)]
pub struct Handles<T>(Mutex<Table<T>>);

/// The objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<T> {
    kind: Kind,
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Place<T> {
    generation: u32,
    object: Option<T>,
}

impl<T> Table<T> {
    /// None yet.
    pub(crate) const fn new(kind: Kind) -> Table<T> {
        Table { kind, places: Vec::new(), free: Vec::new() }
    }

    /// Takes an object in.
    #[inline]
    pub(crate) fn insert(&mut self, object: T) -> Outcome<Handle> {
        let place = match self.free.pop() {
            Some(place) => place as usize,
            None => self.new_place()?,
        };
        let entry = &mut self.places[place];
        entry.object = Some(object);
        let generation = entry.generation;
        Ok(self.join(place, generation))
    }

    #[cold]
    fn new_place(&mut self) -> Outcome<usize> {
        if self.places.len() == PLACES {
            return Err(Fault::new(code::RT_RESOURCE, "there are 16 million objects of this kind. Free some."));
        }
        self.places.push(Place { generation: 0, object: None });
        Ok(self.places.len() - 1)
    }

    /// An object; `None` if there is none with this handle.
    #[inline]
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let (place, generation) = self.split(handle)?;
        self.places.get_mut(place).filter(|entry| entry.generation == generation)?.object.as_mut()
    }

    /// Takes an object out: its handle is stale from now on.
    #[inline]
    pub(crate) fn remove(&mut self, handle: Handle) -> Option<T> {
        let (place, generation) = self.split(handle)?;
        let entry = self.places.get_mut(place).filter(|entry| entry.generation == generation)?;
        let object = entry.object.take()?;
        entry.generation += 1;
        // A place whose generations are used up is not used again.
        if entry.generation < GENERATIONS {
            self.free.push(place as u32);
        }
        Some(object)
    }

    /// All objects with their handles.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        let alive = |(place, entry): (usize, &'_ Place<T>)| (self.join(place, entry.generation), place);
        let handles = self.places.iter().enumerate().map(alive);
        handles.filter_map(|(handle, place)| Some((handle, self.places[place].object.as_ref()?)))
    }

    fn join(&self, place: usize, generation: u32) -> Handle {
        let bits = u64::from(generation) << GENERATION_SHIFT | place as u64;
        Handle(MARK | (self.kind as u64) << KIND_SHIFT | bits)
    }

    #[inline]
    fn split(&self, handle: Handle) -> Option<(usize, u32)> {
        let Handle(bits) = handle;
        let wanted = MARK | (self.kind as u64) << KIND_SHIFT;
        if bits & (MARK_MASK | 0xF << KIND_SHIFT) != wanted {
            return None;
        }
        Some((bits as usize & (PLACES - 1), (bits >> GENERATION_SHIFT) as u32 & (GENERATIONS - 1)))
    }
}

impl<T> Handles<T> {
    /// None yet.
    pub const fn new(kind: Kind) -> Handles<T> {
        Handles(Mutex::new(Table::new(kind)))
    }

    /// Takes an object in.
    ///
    /// # Errors
    ///
    /// 207005 when there are 16 million.
    pub fn insert(&self, object: T) -> Outcome<Handle> {
        using();
        lock(&self.0).insert(object)
    }

    /// Looks at an object under the lock of its kind; `None` if there is no such object.
    #[inline]
    pub fn with<R>(&self, handle: Handle, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        lock(&self.0).get_mut(handle).map(look)
    }

    /// A copy of the reference to an object.
    #[inline]
    pub fn get(&self, handle: Handle) -> Option<T>
    where
        T: Clone,
    {
        lock(&self.0).get_mut(handle).cloned()
    }

    /// Takes an object out: its handle is stale from now on.
    pub fn remove(&self, handle: Handle) -> Option<T> {
        lock(&self.0).remove(handle)
    }

    /// The same, if the object is as it should be.
    pub fn remove_if(&self, handle: Handle, wanted: impl FnOnce(&mut T) -> bool) -> Option<T> {
        let mut table = lock(&self.0);
        if table.get_mut(handle).is_some_and(wanted) { table.remove(handle) } else { None }
    }

    /// What `pick` takes of each object, under the lock of their kind.
    pub fn collect<R>(&self, mut pick: impl FnMut(Handle, &T) -> Option<R>) -> Vec<R> {
        lock(&self.0).iter().filter_map(|(handle, object)| pick(handle, object)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_good_until_its_object_is_removed_and_never_again() {
        let handles = Handles::new(Kind::Stream);
        let first = handles.insert("first").unwrap();
        assert_eq!(handles.get(first), Some("first"));
        assert_eq!(handles.remove(first), Some("first"));
        let second = handles.insert("second").unwrap();
        assert_ne!(first, second, "the same place, another generation");
        assert_eq!((handles.get(first), handles.remove(first)), (None, None));
        assert_eq!(handles.get(second), Some("second"));
    }

    #[test]
    fn handles_of_other_kinds_addresses_and_forged_numbers_are_not_found() {
        let (streams, events) = (Handles::new(Kind::Stream), Handles::new(Kind::Event));
        let (stream, event) = (streams.insert(1).unwrap(), events.insert(2).unwrap());
        assert_eq!((streams.get(event), events.get(stream)), (None, None));
        for forged in [0, 1, u64::MAX, 0x7FFF_1234_5678, stream.0 + 1, stream.0 | 1 << 24, stream.0 ^ 1 << 63] {
            assert_eq!(streams.get(Handle(forged)), None, "{forged:#x}");
        }
    }

    #[test]
    fn a_place_whose_generations_are_used_up_is_left_alone() {
        let handles = Handles::new(Kind::Event);
        let first = handles.insert(0).unwrap();
        lock(&handles.0).places[0].generation = GENERATIONS - 1;
        let last = Handle(first.0 | u64::from(GENERATIONS - 1) << GENERATION_SHIFT);
        assert_eq!(handles.remove(last), Some(0));
        assert_eq!(handles.insert(1).unwrap().0 & (PLACES as u64 - 1), 1, "another place");
        assert_eq!(handles.get(first), None);
    }
}
