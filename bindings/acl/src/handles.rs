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
pub mod kind {
    /// A context.
    pub const CONTEXT: u8 = 1;
    /// A stream.
    pub const STREAM: u8 = 2;
    /// An event.
    pub const EVENT: u8 = 3;
    /// Physical memory.
    pub const MEMORY: u8 = 4;
}

const MARK: u64 = 0x5A << 56;
const KIND_SHIFT: u32 = 52;
const GENERATION_SHIFT: u32 = 24;
const GENERATIONS: u32 = 1 << 28;
const PLACES: usize = 1 << 24;

/// The objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<T, const KIND: u8> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Place<T> {
    /// Odd while there is an object, so that no handle of a free place was ever given.
    generation: u32,
    object: T,
}

impl<T: Default, const KIND: u8> Table<T, KIND> {
    /// None yet.
    pub(crate) const fn new() -> Self {
        Table { places: Vec::new(), free: Vec::new() }
    }

    /// A handle for a new object, which is to be written to its place.
    ///
    /// # Errors
    ///
    /// 207005 when there are 16 million.
    #[inline]
    pub(crate) fn insert(&mut self) -> Outcome<(Handle, &mut T)> {
        let place = match self.free.pop() {
            Some(place) => place as usize,
            None => self.new_place()?,
        };
        let entry = &mut self.places[place];
        entry.generation += 1;
        Ok((Self::join(place, entry.generation), &mut entry.object))
    }

    #[cold]
    fn new_place(&mut self) -> Outcome<usize> {
        if self.places.len() == PLACES {
            return Err(Fault::new(code::RT_RESOURCE, "there are 16 million objects of this kind. Free some."));
        }
        self.places.push(Place { generation: 0, object: T::default() });
        Ok(self.places.len() - 1)
    }

    /// The place of an object; `None` if there is none with this handle.
    #[inline]
    pub(crate) fn find(&self, handle: Handle) -> Option<usize> {
        let Handle(bits) = handle;
        if bits >> KIND_SHIFT != Self::join(0, 0).0 >> KIND_SHIFT {
            return None;
        }
        let place = bits as usize & (PLACES - 1);
        let generation = (bits >> GENERATION_SHIFT) as u32 & (GENERATIONS - 1);
        let same = self.places.get(place).is_some_and(|entry| entry.generation == generation);
        (same && generation % 2 == 1).then_some(place)
    }

    /// The object at a place that was found.
    #[inline]
    pub(crate) fn at(&mut self, place: usize) -> &mut T {
        &mut self.places[place].object
    }

    /// An object; `None` if there is none with this handle.
    #[inline]
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        self.find(handle).map(|place| self.at(place))
    }

    /// Gives a place up that was found: its handle is stale from now on. What is left of the object
    /// is to be taken out.
    #[inline]
    pub(crate) fn vacate(&mut self, place: usize) -> &mut T {
        let entry = &mut self.places[place];
        entry.generation += 1;
        // A place whose generations are used up is not used again.
        if entry.generation < GENERATIONS {
            self.free.push(place as u32);
        }
        &mut self.places[place].object
    }

    /// All objects with their handles.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        let used = |(_, entry): &(usize, &Place<T>)| entry.generation % 2 == 1;
        let object = |(place, entry): (usize, &'_ Place<T>)| (Self::join(place, entry.generation), place);
        let handles = self.places.iter().enumerate().filter(used).map(object);
        handles.map(|(handle, place)| (handle, &self.places[place].object))
    }

    const fn join(place: usize, generation: u32) -> Handle {
        Handle(MARK | (KIND as u64) << KIND_SHIFT | (generation as u64) << GENERATION_SHIFT | place as u64)
    }
}

/// The objects of one kind, behind a lock.
#[derive(Debug)]
pub struct Handles<T, const KIND: u8>(Mutex<Table<Option<T>, KIND>>);

impl<T, const KIND: u8> Handles<T, KIND> {
    /// None yet.
    pub const fn new() -> Self {
        Handles(Mutex::new(Table::new()))
    }

    /// Takes an object in.
    ///
    /// # Errors
    ///
    /// 207005 when there are 16 million.
    pub fn insert(&self, object: T) -> Outcome<Handle> {
        using();
        let mut table = lock(&self.0);
        let (handle, place) = table.insert()?;
        *place = Some(object);
        Ok(handle)
    }

    /// Looks at an object under the lock of its kind; `None` if there is no such object.
    #[inline]
    pub fn with<R>(&self, handle: Handle, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        lock(&self.0).get_mut(handle)?.as_mut().map(look)
    }

    /// A copy of the reference to an object.
    #[inline]
    pub fn get(&self, handle: Handle) -> Option<T>
    where
        T: Clone,
    {
        lock(&self.0).get_mut(handle)?.clone()
    }

    /// Takes an object out: its handle is stale from now on.
    pub fn remove(&self, handle: Handle) -> Option<T> {
        let mut table = lock(&self.0);
        let place = table.find(handle)?;
        table.vacate(place).take()
    }

    /// What `pick` takes of each object, under the lock of their kind.
    pub fn collect<R>(&self, mut pick: impl FnMut(Handle, &T) -> Option<R>) -> Vec<R> {
        lock(&self.0).iter().filter_map(|(handle, object)| pick(handle, object.as_ref()?)).collect()
    }
}

impl<T, const KIND: u8> Default for Handles<T, KIND> {
    fn default() -> Self {
        Handles::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_good_until_its_object_is_removed_and_never_again() {
        let handles = Handles::<_, { kind::STREAM }>::new();
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
        let (streams, events) = (Handles::<_, { kind::STREAM }>::new(), Handles::<_, { kind::EVENT }>::new());
        let (stream, event) = (streams.insert(1).unwrap(), events.insert(2).unwrap());
        assert_eq!((streams.get(event), events.get(stream)), (None, None));
        for forged in [0, 1, u64::MAX, 0x7FFF_1234_5678, stream.0 + 1, stream.0 ^ 1 << 24, stream.0 ^ 1 << 63] {
            assert_eq!(streams.get(Handle(forged)), None, "{forged:#x}");
        }
    }

    #[test]
    fn a_place_whose_generations_are_used_up_is_left_alone() {
        let handles = Handles::<_, { kind::EVENT }>::new();
        let first = handles.insert(0).unwrap();
        lock(&handles.0).places[0].generation = GENERATIONS - 1;
        let last = Handle(first.0 | u64::from(GENERATIONS - 1) << GENERATION_SHIFT);
        assert_eq!(handles.remove(last), Some(0));
        assert_eq!(handles.insert(1).unwrap().0 & (PLACES as u64 - 1), 1, "another place");
        assert_eq!(handles.get(first), None);
    }
}
