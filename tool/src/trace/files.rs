//! The driver's open files, and who refers to them: descriptor tables and address spaces, kept as
//! the kernel keeps them.
//!
//! A table belongs to one or more threads: threads of a process share it, and so do processes that
//! were cloned with CLONE_FILES. An address space refers to the files that are mapped in it. A file
//! is closed when nothing refers to it, which is when the driver hears of it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// A file of the driver, by its number in the order of opening.
pub type FileId = u64;

/// An open file of the driver.
pub struct OpenFile {
    /// The module that it is bound to; empty before OPEN.
    pub module: String,
    /// Whether the trace saw it being opened, so that `module` is right.
    pub seen: bool,
    references: usize,
}

/// Bytes of an address space that show a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedRange {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// The file.
    pub file: FileId,
}

#[derive(Clone, Copy)]
struct Descriptor {
    file: FileId,
    cloexec: bool,
    installed: Installation,
}

/// Which use of a descriptor's number it is: the kernel may give the number to another file before
/// the end of the close(2) that freed it is seen.
pub type Installation = u64;

/// A descriptor table, with the driver's files alone.
#[derive(Clone, Default)]
pub struct DescriptorTable(BTreeMap<i32, Descriptor>);

/// An address space, with the mappings of the driver's files alone.
#[derive(Clone, Default)]
pub struct Space(pub Vec<MappedRange>);

/// A table or an address space that several threads may share.
pub type Shared<T> = Rc<RefCell<T>>;

/// All open files.
#[derive(Default)]
pub struct Files {
    files: BTreeMap<FileId, OpenFile>,
    opened: FileId,
    installed: Installation,
    /// Files that were closed since [`Files::take_closed`].
    closed: Vec<FileId>,
}

impl Files {
    /// A new file that nothing refers to yet.
    pub fn open(&mut self, module: &str, seen: bool) -> FileId {
        self.opened += 1;
        let file = OpenFile { module: module.to_owned(), seen, references: 0 };
        self.files.insert(self.opened, file);
        self.opened
    }

    /// An open file.
    pub fn get_mut(&mut self, file: FileId) -> Option<&mut OpenFile> {
        self.files.get_mut(&file)
    }

    /// Adds a reference: a descriptor, a mapping, or a call that uses the file.
    pub fn refer(&mut self, file: FileId) {
        if let Some(file) = self.files.get_mut(&file) {
            file.references += 1;
        }
    }

    /// Drops a reference.
    pub fn release(&mut self, file: FileId) {
        let Some(open) = self.files.get_mut(&file) else { return };
        open.references = open.references.saturating_sub(1);
        if open.references == 0 {
            self.files.remove(&file);
            self.closed.push(file);
        }
    }

    /// The files that were closed since the last call, oldest first.
    pub fn take_closed(&mut self) -> Vec<FileId> {
        let mut closed = std::mem::take(&mut self.closed);
        closed.sort_unstable();
        closed
    }

    /// Puts a file into a table, in place of what had the descriptor before.
    pub fn install(&mut self, table: &mut DescriptorTable, descriptor: i32, file: FileId, cloexec: bool) {
        self.refer(file);
        self.remove(table, descriptor);
        self.installed += 1;
        table.0.insert(descriptor, Descriptor { file, cloexec, installed: self.installed });
    }

    /// Closes a descriptor.
    pub fn remove(&mut self, table: &mut DescriptorTable, descriptor: i32) {
        if let Some(removed) = table.0.remove(&descriptor) {
            self.release(removed.file);
        }
    }

    /// Closes those descriptors of a table that exec closes.
    pub fn exec(&mut self, table: &mut DescriptorTable) {
        let closed: Vec<i32> = table.0.iter().filter(|(_, it)| it.cloexec).map(|(descriptor, _)| *descriptor).collect();
        for descriptor in closed {
            self.remove(table, descriptor);
        }
    }

    /// A copy of a table for a new process.
    pub fn copy(&mut self, table: &DescriptorTable) -> DescriptorTable {
        for descriptor in table.0.values() {
            self.refer(descriptor.file);
        }
        table.clone()
    }

    /// A thread stops using a table.
    pub fn leave_table(&mut self, table: Shared<DescriptorTable>) {
        if let Ok(table) = Rc::try_unwrap(table) {
            for descriptor in table.into_inner().0.values() {
                self.release(descriptor.file);
            }
        }
    }

    /// A thread stops using an address space.
    pub fn leave_space(&mut self, space: Shared<Space>) {
        if let Ok(space) = Rc::try_unwrap(space) {
            for range in space.into_inner().0 {
                self.release(range.file);
            }
        }
    }

    /// Maps a range of a file, in place of what was mapped there.
    pub fn map(&mut self, space: &mut Space, start: u64, length: u64, file: FileId) {
        self.refer(file);
        self.unmap(space, start, length);
        space.0.push(MappedRange { start, end: start.saturating_add(length), file });
    }

    /// Unmaps a range, and splits a mapping that it is in the middle of.
    pub fn unmap(&mut self, space: &mut Space, start: u64, length: u64) {
        let end = start.saturating_add(length);
        let mut kept = Vec::with_capacity(space.0.len());
        for range in std::mem::take(&mut space.0) {
            if range.end <= start || range.start >= end {
                kept.push(range);
                continue;
            }
            for (start, end) in [(range.start, start), (end, range.end)] {
                if start < end {
                    self.refer(range.file);
                    kept.push(MappedRange { start, end, file: range.file });
                }
            }
            self.release(range.file);
        }
        space.0 = kept;
    }
}

impl DescriptorTable {
    /// The file of a descriptor.
    pub fn get(&self, descriptor: i32) -> Option<FileId> {
        self.0.get(&descriptor).map(|it| it.file)
    }

    /// Which use of its number a descriptor is, if it is the driver's.
    pub fn installation(&self, descriptor: i32) -> Option<Installation> {
        self.0.get(&descriptor).map(|it| it.installed)
    }

    /// Sets whether exec closes a descriptor.
    pub fn set_cloexec(&mut self, descriptor: i32, cloexec: bool) {
        if let Some(known) = self.0.get_mut(&descriptor) {
            known.cloexec = cloexec;
        }
    }

    /// The descriptors from one to another, the last included.
    pub fn range(&self, first: u32, last: u32) -> Vec<i32> {
        let inside = |descriptor: &i32| (first..=last).contains(&(*descriptor as u32));
        self.0.keys().copied().filter(inside).collect()
    }

    /// Descriptors with their files.
    pub fn iter(&self) -> impl Iterator<Item = (i32, FileId)> {
        self.0.iter().map(|(descriptor, it)| (*descriptor, it.file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> (Files, DescriptorTable, FileId) {
        let (mut files, mut table) = (Files::default(), DescriptorTable::default());
        let file = files.open("", true);
        files.install(&mut table, 3, file, true);
        (files, table, file)
    }

    #[test]
    fn a_file_is_closed_with_its_last_descriptor() {
        let (mut files, mut table, file) = one();
        files.install(&mut table, 4, file, false);
        files.remove(&mut table, 3);
        assert!(files.take_closed().is_empty());
        // The same descriptor again is no second reference.
        files.install(&mut table, 4, file, false);
        files.remove(&mut table, 4);
        assert_eq!(files.take_closed(), [file]);
    }

    #[test]
    fn a_copied_table_and_a_mapping_keep_a_file_open() {
        let (mut files, mut table, file) = one();
        let mut child = files.copy(&table);
        let mut space = Space::default();
        files.map(&mut space, 0x1000, 0x3000, file);
        files.remove(&mut table, 3);
        files.exec(&mut child);
        assert!(files.take_closed().is_empty());
        // Unmapping the middle leaves two parts.
        files.unmap(&mut space, 0x2000, 0x1000);
        assert_eq!(space.0.len(), 2);
        files.unmap(&mut space, 0, 0x2000);
        assert!(files.take_closed().is_empty());
        files.unmap(&mut space, 0, u64::MAX);
        assert_eq!(files.take_closed(), [file]);
    }

    #[test]
    fn a_shared_table_lives_as_long_as_its_last_thread() {
        let (mut files, table, file) = one();
        let table = Rc::new(RefCell::new(table));
        files.leave_table(table.clone());
        assert!(files.take_closed().is_empty());
        files.leave_table(table);
        assert_eq!(files.take_closed(), [file]);
    }
}
