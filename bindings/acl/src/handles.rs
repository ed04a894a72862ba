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

/// The objects of one kind.
#[derive(Debug)]
pub struct Handles<T> {
    kind: Kind,
    table: Mutex<Table<T>>,
}

#[derive(Debug)]
struct Table<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Place<T> {
    generation: u32,
    object: Option<T>,
}

impl<T> Handles<T> {
    /// None yet.
    pub const fn new(kind: Kind) -> Handles<T> {
        Handles { kind, table: Mutex::new(Table { places: Vec::new(), free: Vec::new() }) }
    }

    /// Takes an object in.
    ///
    /// # Errors
    ///
    /// 207005 when there are 16 million.
    pub fn insert(&self, object: T) -> Outcome<Handle> {
        using();
        let mut table = lock(&self.table);
        let place = match table.free.pop() {
            Some(place) => place as usize,
            None if table.places.len() == PLACES => {
                return Err(Fault::new(code::RT_RESOURCE, "there are 16 million objects of this kind. Free some."));
            }
            None => {
                table.places.push(Place { generation: 0, object: None });
                table.places.len() - 1
            }
        };
        let entry = &mut table.places[place];
        entry.object = Some(object);
        let generation = entry.generation;
        Ok(self.join(place, generation))
    }

    /// Looks at an object under the lock of its kind; `None` if there is no such object.
    #[inline]
    pub fn with<R>(&self, handle: Handle, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        let (place, generation) = self.split(handle)?;
        let mut table = lock(&self.table);
        let entry = table.places.get_mut(place).filter(|entry| entry.generation == generation)?;
        entry.object.as_mut().map(look)
    }

    /// A copy of the reference to an object.
    #[inline]
    pub fn get(&self, handle: Handle) -> Option<T>
    where
        T: Clone,
    {
        self.with(handle, |object| object.clone())
    }

    /// Takes an object out: its handle is stale from now on.
    pub fn remove(&self, handle: Handle) -> Option<T> {
        self.remove_if(handle, |_| true)
    }

    /// The same, if the object is as it should be.
    pub fn remove_if(&self, handle: Handle, wanted: impl FnOnce(&mut T) -> bool) -> Option<T> {
        let (place, generation) = self.split(handle)?;
        let mut table = lock(&self.table);
        let entry = table.places.get_mut(place).filter(|entry| entry.generation == generation)?;
        if !entry.object.as_mut().is_some_and(wanted) {
            return None;
        }
        let object = entry.object.take();
        entry.generation += 1;
        // A place whose generations are used up is not used again.
        if entry.generation < GENERATIONS {
            table.free.push(place as u32);
        }
        object
    }

    /// What `pick` takes of each object, under the lock of their kind.
    pub fn collect<R>(&self, mut pick: impl FnMut(Handle, &T) -> Option<R>) -> Vec<R> {
        let table = lock(&self.table);
        let mut picked = Vec::new();
        for (place, entry) in table.places.iter().enumerate() {
            if let Some(object) = &entry.object {
                picked.extend(pick(self.join(place, entry.generation), object));
            }
        }
        picked
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
        lock(&handles.table).places[0].generation = GENERATIONS - 1;
        let last = Handle(first.0 | u64::from(GENERATIONS - 1) << GENERATION_SHIFT);
        assert_eq!(handles.remove(last), Some(0));
        assert_eq!(handles.insert(1).unwrap().0 & (PLACES as u64 - 1), 1, "another place");
        assert_eq!(handles.get(first), None);
    }
}
