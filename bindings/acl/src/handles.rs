//! Handles: numbers that are looked up in a table, never pointers that are followed.
//!
//! A handle has a mark, the kind of its object, the place in the table of its kind, and the
//! generation of that place, which changes whenever an object leaves it. A stale, foreign or forged
//! handle is therefore not found, whatever the program does. The numbers look like no address, so
//! that a program which follows one stops there.

use crate::fault::{Fault, Outcome, code};
use parking_lot::Mutex;

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
const PLACES: usize = 1 << 24;

/// Flipped in what a place without an object has for a handle: such a number is looked for at
/// another place, so it is found nowhere.
const VACANT: u64 = 1;

/// The objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<T, const KIND: u8> {
    places: Vec<Place<T>>,
    /// The first place without an object; beyond the last if there is none.
    free: u32,
}

/// Its size is a power of two, so that a place is found by a shift.
#[derive(Debug)]
#[repr(align(64))]
struct Place<T> {
    /// Of the object; without one, that of the next with [`VACANT`] flipped.
    handle: Handle,
    /// The next place without an object, if this is one.
    next: u32,
    object: T,
}

/// Beyond the last place.
const NONE: u32 = u32::MAX;

impl<T: Default, const KIND: u8> Table<T, KIND> {
    /// None yet.
    pub(crate) const fn new() -> Self {
        Table { places: Vec::new(), free: NONE }
    }

    /// A handle for a new object, which is to be written to its place.
    ///
    /// # Errors
    ///
    /// 207005 when there are 16 million.
    #[inline]
    pub(crate) fn insert(&mut self) -> Outcome<(Handle, &mut T)> {
        if self.free as usize >= self.places.len() {
            self.new_place()?;
        }
        let entry = &mut self.places[self.free as usize];
        self.free = entry.next;
        entry.handle.0 ^= VACANT;
        Ok((entry.handle, &mut entry.object))
    }

    #[cold]
    fn new_place(&mut self) -> Outcome {
        let place = self.places.len();
        if place == PLACES {
            return Err(Fault::new(code::RT_RESOURCE, "there are 16 million objects of this kind. Free some."));
        }
        let first = Self::KIND_BITS | 1 << GENERATION_SHIFT | place as u64;
        self.places.push(Place { handle: Handle(first ^ VACANT), next: NONE, object: T::default() });
        self.free = place as u32;
        Ok(())
    }

    /// The place of an object; `None` if there is none with this handle.
    #[inline]
    pub(crate) fn find(&self, handle: Handle) -> Option<usize> {
        let place = handle.0 as usize & (PLACES - 1);
        (self.places.get(place)?.handle == handle).then_some(place)
    }

    /// The object at a place that was found.
    #[inline]
    pub(crate) fn at(&mut self, place: usize) -> &mut T {
        &mut self.places[place].object
    }

    /// The object at a place that was found, with its handle.
    #[inline]
    pub(crate) fn entry(&mut self, place: usize) -> (Handle, &mut T) {
        let entry = &mut self.places[place];
        (entry.handle, &mut entry.object)
    }

    /// An object; `None` if there is none with this handle.
    #[inline]
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let place = handle.0 as usize & (PLACES - 1);
        let entry = self.places.get_mut(place)?;
        (entry.handle == handle).then_some(&mut entry.object)
    }

    /// Gives a place up that was found: its handle is stale from now on. What is left of the object
    /// is to be taken out.
    #[inline]
    pub(crate) fn vacate(&mut self, place: usize) -> &mut T {
        let entry = &mut self.places[place];
        let next = entry.handle.0 + (1 << GENERATION_SHIFT);
        entry.handle = Handle(next ^ VACANT);
        // A place whose generations are used up is not used again.
        if next >> KIND_SHIFT == Self::KIND_BITS >> KIND_SHIFT {
            entry.next = self.free;
            self.free = place as u32;
        }
        &mut entry.object
    }

    /// All objects with their handles.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        let used = |&(place, entry): &(usize, &Place<T>)| entry.handle.0 as usize & (PLACES - 1) == place;
        self.places.iter().enumerate().filter(used).map(|(_, entry)| (entry.handle, &entry.object))
    }

    /// What all handles of this kind begin with.
    const KIND_BITS: u64 = MARK | (KIND as u64) << KIND_SHIFT;
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
        let mut table = self.0.lock();
        let (handle, place) = table.insert()?;
        *place = Some(object);
        Ok(handle)
    }

    /// Looks at an object under the lock of its kind; `None` if there is no such object.
    #[inline]
    pub fn with<R>(&self, handle: Handle, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.0.lock().get_mut(handle)?.as_mut().map(look)
    }

    /// A copy of the reference to an object.
    #[inline]
    pub fn get(&self, handle: Handle) -> Option<T>
    where
        T: Clone,
    {
        self.0.lock().get_mut(handle)?.clone()
    }

    /// Takes an object out: its handle is stale from now on.
    pub fn remove(&self, handle: Handle) -> Option<T> {
        let mut table = self.0.lock();
        let place = table.find(handle)?;
        table.vacate(place).take()
    }

    /// What `pick` takes of each object, under the lock of their kind.
    pub fn collect<R>(&self, mut pick: impl FnMut(Handle, &T) -> Option<R>) -> Vec<R> {
        self.0.lock().iter().filter_map(|(handle, object)| pick(handle, object.as_ref()?)).collect()
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
        let last = Handle(first.0 | ((1 << KIND_SHIFT) - 1) >> GENERATION_SHIFT << GENERATION_SHIFT);
        handles.0.lock().places[0].handle = last;
        assert_eq!(handles.remove(last), Some(0));
        assert_eq!(handles.insert(1).unwrap().0 & (PLACES as u64 - 1), 1, "another place");
        let beyond = Handle(last.0 + (1 << GENERATION_SHIFT));
        for stale in [first, last, beyond, Handle(beyond.0 ^ VACANT)] {
            assert_eq!(handles.get(stale), None);
        }
        assert_eq!(handles.collect(|_, &object| Some(object)), [1]);
    }

    #[test]
    fn what_a_place_without_an_object_has_is_no_handle_of_it_or_of_its_neighbour() {
        let handles = Handles::<_, { kind::STREAM }>::new();
        let (first, second) = (handles.insert(1).unwrap(), handles.insert(2).unwrap());
        handles.remove(first);
        let vacant = handles.0.lock().places[0].handle;
        assert_eq!((handles.get(vacant), handles.get(Handle(vacant.0 ^ VACANT))), (None, None));
        assert_eq!(handles.get(second), Some(2));
        handles.remove(second);
        for stored in [0, 1].map(|place| handles.0.lock().places[place].handle) {
            assert_eq!(handles.get(stored), None);
        }
    }
}
