//! Memory shared by a key: how the vendor's library shares what `aclrtMalloc` returned.
//!
//! A key is the kernel's name for the memory, 64 characters, so that a process with the vendor's
//! library can open ours and the other way round. The kernel names whole pages. For a block
//! that does not begin at a page, the key has the offset in place of the end of the name, which the
//! kernel fills with zeros: only this library can open such a key.

use crate::border::{Address, In, Out, Text};
use crate::fault::{Fault, Outcome, code, invalid, refused};
use crate::{context, malloc, process, share};
use ascend_vmm::share::{Name, NamedMemory, Published, open_named};
use ascend_vmm::{LogicalId, Page};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a key, with its zero.
const KEY: usize = 65;
/// Where an offset is written: a mark, and 16 hexadecimal digits.
const OFFSET: usize = KEY - 1 - 17;
const OFFSET_MARK: u8 = b'x';

type Key = [u8; KEY];

static EXPORTS: Mutex<BTreeMap<Key, Export>> = Mutex::new(BTreeMap::new());
static IMPORTS: Mutex<BTreeMap<Key, Import>> = Mutex::new(BTreeMap::new());

/// Whether anything was ever exported.
static EXPORTED: AtomicBool = AtomicBool::new(false);
/// Whether anything was ever imported.
static IMPORTED: AtomicBool = AtomicBool::new(false);

struct Export {
    published: Arc<Published>,
    /// The exported block, or an address in it.
    address: u64,
    device: LogicalId,
}

struct Import {
    memory: Arc<NamedMemory>,
    /// Of the block in it.
    offset: u64,
    /// Imports that were not closed.
    count: u64,
    device: LogicalId,
}

/// `aclrtIpcMemGetExportKey`.
pub fn export_key(address: Address, size: usize, key: Out<c_char>, length: usize, flags: u64) -> Outcome {
    let address = address.check("devPtr")?;
    let key = key.check("key")?;
    if size == 0 || flags > 1 || length < KEY {
        return Err(refused(format!(
            "size {size}, key length {length}, flags {flags}: the size must not be 0, a key needs {KEY} bytes, and \
             flags are 0 (listed processes) or 1 (any process)."
        )));
    }
    let device = context::current()?.device;
    let (start, end) = whole_pages(address, size as u64)?;
    let pages = process::session()?
        .slice_at(start, end - start)
        .map_err(|_| refused(format!("{size} bytes at {address:#x} are not all device memory of this process.")))?;
    let published = pages.publish().map_err(Fault::driver)?;
    if flags == 1 {
        published.trust_anyone()?;
    }
    let text = with_offset(published.name().to_bytes(), address - start)?;
    EXPORTED.store(true, Ordering::Relaxed);
    EXPORTS.lock().insert(text, Export { published: Arc::new(published), address, device });
    for (index, byte) in text.into_iter().enumerate() {
        key.write_at(index, byte as c_char);
    }
    Ok(())
}

/// The pages that a range touches.
fn whole_pages(address: u64, size: u64) -> Outcome<(u64, u64)> {
    let page = Page::Huge.size();
    let end = address.checked_add(size).and_then(|end| end.checked_next_multiple_of(page));
    let end = end.ok_or_else(|| refused(format!("{size} bytes at {address:#x} reach beyond the last address.")))?;
    Ok((address - address % page, end))
}

/// A name with an offset written over its end.
fn with_offset(mut name: Key, offset: u64) -> Outcome<Key> {
    if offset == 0 {
        return Ok(name);
    }
    let end = &mut name[OFFSET..KEY - 1];
    if end.iter().any(|&byte| byte != b'0') {
        let text = "the driver's name has no room for the offset of the block in its page. Allocate 2 MiB or more.";
        return Err(Fault::new(code::RT_NOT_SUPPORTED, text));
    }
    end[0] = OFFSET_MARK;
    end[1..].copy_from_slice(format!("{offset:016x}").as_bytes());
    Ok(name)
}

/// A name and the offset that was written over its end.
fn split(mut key: Key) -> (Key, u64) {
    let end = &mut key[OFFSET..KEY - 1];
    let digits = std::str::from_utf8(&end[1..]).ok().and_then(|digits| u64::from_str_radix(digits, 16).ok());
    match digits {
        Some(offset) if end[0] == OFFSET_MARK => {
            end.fill(b'0');
            (key, offset)
        }
        _ => (key, 0),
    }
}

fn read_key(key: Text) -> Outcome<Key> {
    let bytes =
        key.bytes(KEY - 1).ok_or_else(|| invalid("key is NULL. Pass one that aclrtIpcMemGetExportKey wrote."))?;
    let mut key = [0; KEY];
    key[..bytes.len()].copy_from_slice(&bytes);
    Ok(key)
}

fn unknown() -> Box<Fault> {
    let text = "this process has neither exported nor imported memory by this key, or has closed it.";
    Fault::new(code::RT_DRIVER, text)
}

/// `aclrtIpcMemSetImportPid`.
pub fn trust(key: Text, processes: In<i32>, count: usize) -> Outcome {
    let key = read_key(key)?;
    if processes.is_null() {
        return Err(invalid("pid is NULL. Pass process ids that aclrtDeviceGetBareTgid returned."));
    }
    // The vendor's function takes the count as a signed number.
    if (count as i64) <= 0 {
        return Err(refused(format!("{} processes cannot be listed. Pass one or more.", count as i64)));
    }
    let processes = share::read_processes(processes, count)?;
    let published = EXPORTS.lock().get(&key).map(|export| export.published.clone()).ok_or_else(unknown)?;
    Ok(published.trust(&processes)?)
}

/// `aclrtIpcMemImportByKey`: on the current device. The same key gives the same address again.
pub fn import(address: Out<Address>, key: Text, flags: u64) -> Outcome {
    let address = address.check("devPtr")?;
    let key = read_key(key)?;
    if flags > 1 {
        return Err(refused(format!("flags are {flags}. They are 0, or 1 to enable access between devices.")));
    }
    let device = context::current()?.device;
    if let Some(import) = IMPORTS.lock().get_mut(&key) {
        import.count += 1;
        address.write(Address(import.memory.address() + import.offset));
        return Ok(());
    }
    let (bare, offset) = split(key);
    let name = Name::from_bytes(bare)?;
    let memory = open_named(&process::device(device)?, &name).map_err(Fault::driver)?;
    if offset >= memory.size() {
        return Err(refused("the key has an offset outside its memory. Pass it unchanged."));
    }
    let start = memory.address() + offset;
    let mut imports = IMPORTS.lock();
    // Another thread may have imported the same memory meanwhile.
    let import = imports.entry(key).or_insert(Import { memory: Arc::new(memory), offset, count: 0, device });
    import.count += 1;
    IMPORTED.store(true, Ordering::Relaxed);
    drop(imports);
    address.write(Address(start));
    Ok(())
}

/// `aclrtIpcMemClose`: an import if there is one, else the export.
pub fn close(key: Text) -> Outcome {
    let key = read_key(key)?;
    let mut imports = IMPORTS.lock();
    if let Some(import) = imports.get_mut(&key) {
        import.count -= 1;
        let last = if import.count == 0 { imports.remove(&key) } else { None };
        drop(imports);
        drop(last);
        return Ok(());
    }
    drop(imports);
    let export = EXPORTS.lock().remove(&key).ok_or_else(unknown)?;
    drop(export);
    Ok(())
}

/// `rtIpcDestroyMemoryName`: the export, also where the same process has imported it.
pub fn destroy(key: Text) -> Outcome {
    let export = EXPORTS.lock().remove(&read_key(key)?).ok_or_else(unknown)?;
    drop(export);
    Ok(())
}

/// `rtIpcCloseMemory`: an import by its address.
pub fn close_at(address: Address) -> Outcome {
    let address = address.check("ptr")?;
    let mut imports = IMPORTS.lock();
    let at = |import: &Import| import.memory.address() + import.offset == address;
    let (key, import) = imports.iter_mut().find(|(_, import)| at(import)).ok_or_else(unknown)?;
    import.count -= 1;
    let ended = (import.count == 0).then_some(*key);
    let last = ended.and_then(|key| imports.remove(&key));
    drop(imports);
    drop(last);
    Ok(())
}

/// The device that memory was imported on.
pub(crate) fn device_of(memory: &Arc<NamedMemory>) -> LogicalId {
    let imports = IMPORTS.lock();
    let of = imports.values().find(|import| Arc::ptr_eq(&import.memory, memory));
    of.map_or(LogicalId(0), |import| import.device)
}

/// The imported memory that contains an address, and the offset in it.
pub(crate) fn imported_at(address: u64) -> Option<(Arc<NamedMemory>, u64)> {
    // Checked by every copy, and most programs import nothing.
    if !IMPORTED.load(Ordering::Relaxed) {
        return None;
    }
    let around = |memory: &NamedMemory| address.checked_sub(memory.address()).filter(|&at| at < memory.size());
    let found = |import: &Import| around(&import.memory).map(|offset| (import.memory.clone(), offset));
    IMPORTS.lock().values().find_map(found)
}

/// A block is about to be freed: its keys end.
pub(crate) fn forget(address: u64) {
    // Checked by every free, and most programs export nothing.
    if !EXPORTED.load(Ordering::Relaxed) {
        return;
    }
    // Only a block is freed, and loses its keys.
    let Some((start, size)) = malloc::block_around(address).filter(|(start, _)| *start == address) else { return };
    let mut exports = EXPORTS.lock();
    let of = |(key, export): (&Key, &Export)| (export.address.wrapping_sub(start) < size).then_some(*key);
    let keys: Vec<Key> = exports.iter().filter_map(of).collect();
    let ended: Vec<Export> = keys.iter().filter_map(|key| exports.remove(key)).collect();
    drop(exports);
    drop(ended);
}

/// Whether there is a key.
pub(crate) fn is_used() -> bool {
    !EXPORTS.lock().is_empty() || !IMPORTS.lock().is_empty()
}

/// Ends all keys of a device.
pub(crate) fn end(device: LogicalId) {
    let mut exports = EXPORTS.lock();
    let (kept, ended): (BTreeMap<_, _>, BTreeMap<_, _>) =
        std::mem::take(&mut *exports).into_iter().partition(|(_, export)| export.device != device);
    *exports = kept;
    drop(exports);
    drop(ended);
    let mut imports = IMPORTS.lock();
    let (kept, ended): (BTreeMap<_, _>, BTreeMap<_, _>) =
        std::mem::take(&mut *imports).into_iter().partition(|(_, import)| import.device != device);
    *imports = kept;
    drop(imports);
    drop(ended);
}
