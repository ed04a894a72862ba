//! Paths of the driver's nodes, and what stat reports for them.

use super::client_memory::ProcessMemory;
use crate::caller::Memory;
use libc::c_int;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// The path that a caller passed, if it may be a node of the driver. Such paths never reach the
/// real file system, even if this host has such devices.
pub fn driver_path(tid: i32, directory: c_int, address: u64) -> Option<String> {
    let path = named_path(tid, directory, address, is_driver_name)?;
    path.starts_with("/dev/").then_some(path)
}

/// The list of loaded modules.
pub const MODULE_LIST: &str = "/proc/modules";

/// As [`driver_path`], or [`MODULE_LIST`]: the paths whose open(2) the emulator answers.
pub fn path_to_open(tid: i32, directory: c_int, address: u64) -> Option<String> {
    let path = named_path(tid, directory, address, |name| is_driver_name(name) || name == b"modules")?;
    ((path.starts_with("/dev/") && !path.ends_with("/modules")) || path == MODULE_LIST).then_some(path)
}

/// The descriptor that a path in `/proc` names, and a task whose it is.
pub fn named_descriptor(tid: i32, directory: c_int, address: u64) -> Option<(i32, c_int)> {
    let is_number = |name: &[u8]| !name.is_empty() && name.iter().all(u8::is_ascii_digit);
    let path = named_path(tid, directory, address, is_number)?;
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    let (task, descriptor) = match parts[..] {
        ["proc", "self" | "thread-self", "fd", descriptor] => (tid, descriptor),
        ["proc", task, "fd", descriptor] | ["proc", _, "task", task, "fd", descriptor] => {
            (task.parse().ok()?, descriptor)
        }
        _ => return None,
    };
    Some((task, descriptor.parse().ok()?))
}

/// Whether a caller passed no path, or an empty one.
pub fn is_empty_path(tid: i32, address: u64) -> bool {
    let mut first = [0];
    address == 0 || (ProcessMemory(tid).read(address, &mut first).is_ok() && first == [0])
}

/// The absolute path that a caller passed, if its last component is `wanted`.
fn named_path(tid: i32, directory: c_int, address: u64, wanted: fn(&[u8]) -> bool) -> Option<String> {
    let path = ProcessMemory(tid).path(address)?;
    // Nearly all paths are others: check the last component first.
    let name = path.rsplit(|byte| *byte == b'/').next()?;
    if !wanted(name) {
        return None;
    }
    let mut path = PathBuf::from(std::ffi::OsString::from_vec(path));
    if path.is_relative() {
        let base = match directory {
            libc::AT_FDCWD => fs::read_link(format!("/proc/{tid}/cwd")).ok()?,
            descriptor => fs::read_link(format!("/proc/{tid}/fd/{descriptor}")).ok()?,
        };
        path = base.join(path);
    }
    Some(normalized(&path))
}

/// Whether a name in `/dev` belongs to the driver.
pub fn is_driver_name(name: &[u8]) -> bool {
    [&b"davinci"[..], b"hisi_hdc", b"devmm_svm"].iter().any(|prefix| name.starts_with(prefix))
}

fn normalized(path: &Path) -> String {
    let mut parts: Vec<String> = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
            Component::ParentDir => drop(parts.pop()),
            _ => {}
        }
    }
    format!("/{}", parts.join("/"))
}

/// Major number of the emulated nodes; the kernel gives the real ones any free number.
const MAJOR: u32 = 236;
const MODE: u32 = libc::S_IFCHR | 0o666;

fn minor(path: &str) -> u32 {
    path.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0)
}

/// What stat reports for a node.
pub fn stat(path: &str) -> Vec<u8> {
    // SAFETY: all zeroes is a valid value of these integers.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    stat.st_mode = MODE;
    stat.st_nlink = 1;
    stat.st_rdev = libc::makedev(MAJOR, minor(path));
    bytes_of(&stat)
}

/// What statx reports for a node.
pub fn statx(path: &str) -> Vec<u8> {
    // SAFETY: all zeroes is a valid value of these integers.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    stat.stx_mask = libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_NLINK | libc::STATX_UID | libc::STATX_GID;
    stat.stx_mode = MODE as u16;
    stat.stx_nlink = 1;
    stat.stx_rdev_major = MAJOR;
    stat.stx_rdev_minor = minor(path);
    bytes_of(&stat)
}

fn bytes_of<T: Copy>(value: &T) -> Vec<u8> {
    // SAFETY: the value was zeroed as a whole before, padding too, so all of its bytes are
    // initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(path: &str) -> Option<String> {
        let text = std::ffi::CString::new(path).unwrap();
        driver_path(std::process::id() as i32, libc::AT_FDCWD, text.as_ptr() as u64)
    }

    #[test]
    fn the_drivers_nodes_are_found_under_any_spelling() {
        for path in ["/dev/davinci_manager", "//dev/./davinci_manager", "/dev/../dev/davinci_manager"] {
            assert_eq!(named(path).as_deref(), Some("/dev/davinci_manager"));
        }
        assert_eq!(named("/dev/davinci0").as_deref(), Some("/dev/davinci0"));
        assert_eq!(named("/dev/hisi_hdc").as_deref(), Some("/dev/hisi_hdc"));
    }

    #[test]
    fn other_paths_are_not_the_drivers() {
        for path in ["/dev/null", "/home/davinci/file", "/tmp/davinci0", "davinci0", "", "/"] {
            assert_eq!(named(path), None, "{path}");
        }
    }

    #[test]
    fn a_path_may_end_at_the_end_of_a_mapping() {
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).unwrap().unwrap() as usize;
        let length = std::num::NonZero::new(2 * page).unwrap();
        let prot = nix::sys::mman::ProtFlags::PROT_READ | nix::sys::mman::ProtFlags::PROT_WRITE;
        // SAFETY: a new anonymous mapping, of which the second page is unmapped and the first one
        // is never unmapped.
        let end = unsafe {
            let start =
                nix::sys::mman::mmap_anonymous(None, length, prot, nix::sys::mman::MapFlags::MAP_PRIVATE).unwrap();
            nix::sys::mman::munmap(start.byte_add(page), page).unwrap();
            start.byte_add(page)
        };
        let text = b"/dev/davinci_manager\0";
        // SAFETY: the bytes lie at the end of the kept page.
        unsafe { end.as_ptr().cast::<u8>().sub(text.len()).copy_from(text.as_ptr(), text.len()) };
        let address = end.as_ptr() as u64 - text.len() as u64;
        let path = driver_path(std::process::id() as i32, libc::AT_FDCWD, address);
        assert_eq!(path.as_deref(), Some("/dev/davinci_manager"));
    }
}
