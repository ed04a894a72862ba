//! `/dev` as a process under emulation lists it: the host's own entries, with the emulated driver's
//! nodes in place of any real ones.
//!
//! The list is read by getdents64 on the client's own description, so that its position stays the
//! kernel's business. Our entries come with the first part, at position 0, which a rewind reaches
//! again.

use super::client_process::open_pidfd;
use super::node;
use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// Offset of the name in a `linux_dirent64`.
const NAME: usize = 19;

/// Room that is left for the host's entries besides ours. Programs that pass less do not see ours.
const REST: usize = 1024;

/// The most that is read at once; C libraries pass 32 KiB.
const MOST: usize = 1 << 20;

/// What getdents64 returns for a descriptor of `/dev`; `None` if the kernel is to answer.
pub fn entries(tid: i32, tgid: i32, descriptor: i32, room: u64, nodes: &[String]) -> Option<Vec<u8>> {
    let room = usize::try_from(room).ok()?.min(MOST);
    let directory = client_descriptor(tgid, descriptor).ok()?;
    // Another thread may have closed it and opened something else meanwhile.
    if !is_dev(tid, descriptor) {
        return None;
    }
    let mut list = Vec::new();
    if lseek(&directory, 0, Whence::SeekCur).ok()? == 0 {
        list = nodes.iter().enumerate().flat_map(|(index, name)| entry(name, index)).collect();
    }
    if room < list.len() + REST {
        return None;
    }
    loop {
        let mut part = vec![0u8; room - list.len()];
        // SAFETY: the kernel writes at most the length of the buffer into it.
        let read = unsafe {
            libc::syscall(libc::SYS_getdents64, directory.as_raw_fd(), part.as_mut_ptr(), part.len() as libc::c_uint)
        };
        let read = Errno::result(read).ok()? as usize;
        let others = without_nodes(&part[..read]);
        list.extend_from_slice(&others);
        // All that was read may have been nodes of a real driver, and an empty list is the end.
        if read == 0 || !list.is_empty() {
            return Some(list);
        }
    }
}

/// Whether the descriptor is `/dev`.
pub fn is_dev(tid: i32, descriptor: i32) -> bool {
    fs::read_link(format!("/proc/{tid}/fd/{descriptor}")).is_ok_and(|path| path == Path::new("/dev"))
}

/// A descriptor of the client's description.
fn client_descriptor(tgid: i32, descriptor: i32) -> Result<OwnedFd, Errno> {
    let pidfd = open_pidfd(tgid)?;
    // SAFETY: takes three integers.
    let copy = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), descriptor, 0) })?;
    // SAFETY: the call returned a new descriptor that this value owns.
    Ok(unsafe { OwnedFd::from_raw_fd(copy as i32) })
}

/// A `linux_dirent64` of a character device.
fn entry(name: &str, index: usize) -> Vec<u8> {
    let length = (NAME + name.len() + 1).next_multiple_of(8);
    let mut bytes = Vec::with_capacity(length);
    // The number of an inode is made up; 0 would mean a deleted entry.
    bytes.extend_from_slice(&(1u64 + index as u64).to_ne_bytes());
    bytes.extend_from_slice(&0u64.to_ne_bytes());
    bytes.extend_from_slice(&(length as u16).to_ne_bytes());
    bytes.push(libc::DT_CHR);
    bytes.extend_from_slice(name.as_bytes());
    bytes.resize(length, 0);
    bytes
}

/// The entries that are not nodes of a driver.
fn without_nodes(mut entries: &[u8]) -> Vec<u8> {
    let mut kept = Vec::new();
    while let Some(length) = entries.get(16..18).map(|length| u16::from_ne_bytes([length[0], length[1]]) as usize) {
        let Some((entry, rest)) = entries.split_at_checked(length).filter(|(entry, _)| entry.len() > NAME) else {
            break;
        };
        let name = entry[NAME..].split(|byte| *byte == 0).next().unwrap_or_default();
        if !node::is_driver_name(name) {
            kept.extend_from_slice(entry);
        }
        entries = rest;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_a_real_driver_are_left_out() {
        let list: Vec<u8> = ["null", "davinci0", "hisi_hdc", "tty"].iter().flat_map(|name| entry(name, 0)).collect();
        let kept: Vec<u8> = ["null", "tty"].iter().flat_map(|name| entry(name, 0)).collect();
        assert_eq!(without_nodes(&list), kept);
        // A cut list does not hang or panic.
        for end in 0..list.len() {
            without_nodes(&list[..end]);
        }
        assert_eq!(without_nodes(&[0; 64]), [0; 0]);
    }
}
