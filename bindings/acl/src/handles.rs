//! Handles: numbers that are looked up in a table, never pointers that are followed.
//!
//! A handle has a mark, the kind of its object, the place in the table of its kind, and the
//! generation of that place, which changes whenever an object leaves it. A stale, foreign or forged
//! handle is therefore not found, whatever the program does. The numbers look like no address, so
//! a program that dereferences one crashes there.

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
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

/// The kinds of handles.
pub mod kind {
    /// A context.
    pub const CONTEXT: u8 = 1;
    /// A stream.
    pub const STREAM: u8 = 2;
    /// An event.
    pub const EVENT: u8 = 3;
    /// Physical memory.
    pub const MEMORY: u8 = 4;
    /// A notify.
    pub const NOTIFY: u8 = 5;
    /// A memory pool.
    pub const POOL: u8 = 6;
}

const MARK: u64 = 0x5A << 56;
const KIND_SHIFT: u32 = 52;
const GENERATION_SHIFT: u32 = 24;
const PLACES: usize = 1 << 24;

/// The objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<T, const KIND: u8> {
    places: Vec<Place<T>>,
    /// Empty places that can be used again.
    free: Vec<u32>,
}

#[derive(Debug)]
struct Place<T> {
    /// The handle of the object, or of the next one here.
    handle: Handle,
    object: Option<T>,
}

impl<T, const KIND: u8> Table<T, KIND> {
    /// An empty table.
    pub(crate) const fn new() -> Self {
        Table { places: Vec::new(), free: Vec::new() }
    }

    /// Enters an object.
    ///
    /// # Errors
    ///
    /// 207005 when there are 16 million.
    pub(crate) fn insert(&mut self, object: T) -> Outcome<Handle> {
        if let Some(place) = self.free.pop() {
            let place = &mut self.places[place as usize];
            place.object = Some(object);
            return Ok(place.handle);
        }
        let place = self.places.len();
        if place == PLACES {
            return Err(Fault::new(code::RT_RESOURCE, "there are 16 million objects of this kind. Free some."));
        }
        let handle = Handle(Self::KIND_BITS | 1 << GENERATION_SHIFT | place as u64);
        self.places.push(Place { handle, object: Some(object) });
        Ok(handle)
    }

    /// An object; `None` if there is none with this handle.
    pub(crate) fn get(&self, handle: Handle) -> Option<&T> {
        let place = self.places.get(Self::place(handle))?;
        place.object.as_ref().filter(|_| place.handle == handle)
    }

    /// A mutable object; `None` if there is none with this handle.
    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let place = self.places.get_mut(Self::place(handle))?;
        place.object.as_mut().filter(|_| place.handle == handle)
    }

    /// Removes an object: its handle becomes stale.
    pub(crate) fn remove(&mut self, handle: Handle) -> Option<T> {
        let number = Self::place(handle);
        let place = self.places.get_mut(number)?;
        if place.handle != handle {
            return None;
        }
        let object = place.object.take()?;
        let next = handle.0 + (1 << GENERATION_SHIFT);
        // A place that has used up its generations is not used again.
        if next >> KIND_SHIFT == Self::KIND_BITS >> KIND_SHIFT {
            place.handle = Handle(next);
            self.free.push(number as u32);
        }
        Some(object)
    }

    /// All objects with their handles.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        self.places.iter().filter_map(|place| Some((place.handle, place.object.as_ref()?)))
    }

    fn place(handle: Handle) -> usize {
        handle.0 as usize & (PLACES - 1)
    }

    /// The leading bits of all handles of this kind.
    const KIND_BITS: u64 = MARK | (KIND as u64) << KIND_SHIFT;
}

/// The objects of one kind, behind a lock.
#[derive(Debug)]
pub struct Handles<T, const KIND: u8>(Mutex<Table<T, KIND>>);

impl<T, const KIND: u8> Handles<T, KIND> {
    /// An empty table.
    pub const fn new() -> Self {
        Handles(Mutex::new(Table::new()))
    }

    /// Enters an object.
    ///
    /// # Errors
    ///
    /// 207005 when there are 16 million.
    pub fn insert(&self, object: T) -> Outcome<Handle> {
        self.0.lock().insert(object)
    }

    /// Looks at an object under the lock of its kind; `None` if there is no such object.
    pub fn with<R>(&self, handle: Handle, look: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.0.lock().get_mut(handle).map(look)
    }

    /// A copy of the reference to an object.
    pub fn get(&self, handle: Handle) -> Option<T>
    where
        T: Clone,
    {
        self.0.lock().get(handle).cloned()
    }

    /// Removes an object: its handle becomes stale.
    pub fn remove(&self, handle: Handle) -> Option<T> {
        self.0.lock().remove(handle)
    }

    /// What `pick` returns for each object, under the lock of their kind.
    pub fn collect<R>(&self, mut pick: impl FnMut(Handle, &T) -> Option<R>) -> Vec<R> {
        self.0.lock().iter().filter_map(|(handle, object)| pick(handle, object)).collect()
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
        for stale in [first, last, beyond] {
            assert_eq!(handles.get(stale), None);
        }
        assert_eq!(handles.collect(|_, &object| Some(object)), [1]);
    }

    #[test]
    fn the_next_handle_of_a_place_is_not_found_before_it_is_given_out() {
        let handles = Handles::<_, { kind::STREAM }>::new();
        let first = handles.insert(1).unwrap();
        assert_eq!(handles.remove(first), Some(1));
        let next = Handle(first.0 + (1 << GENERATION_SHIFT));
        assert_eq!((handles.get(next), handles.remove(next)), (None, None));
        assert_eq!(handles.insert(2).unwrap(), next);
        assert_eq!(handles.get(next), Some(2));
    }
}
