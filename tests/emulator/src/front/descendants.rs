//! Children that inherited a client's mappings of the driver.
//!
//! The real driver's mappings are not copied by fork (VM_DONTCOPY), so a child that touches one
//! gets a SIGSEGV. The front can prevent the copy in its own process only. In others it looks now
//! and then for children, and while there are some, whether a page without memory was touched and
//! by which process: a page table has an entry for a touched page (`/proc/PID/pagemap`).

use crate::svm::page_size;
use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Living descendants of clients, by the client's id.
#[derive(Default)]
pub struct Descendants(HashMap<i32, Vec<i32>>);

impl Descendants {
    /// Looks for children of a client. Returns those that lived at the last look or live now.
    pub fn refresh(&mut self, client: i32) -> Vec<i32> {
        let before = self.0.remove(&client).unwrap_or_default();
        let mut living = Vec::new();
        // Children of a process that ended have another parent, so those that are known are kept.
        let mut next: Vec<i32> = before.iter().copied().filter(|pid| has_memory(*pid)).collect();
        next.extend(children(client));
        while let Some(pid) = next.pop() {
            if !living.contains(&pid) && living.len() < MOST {
                living.push(pid);
                next.extend(children(pid));
            }
        }
        let mut known = living.clone();
        known.extend(before.into_iter().filter(|pid| !living.contains(pid)));
        if !living.is_empty() {
            self.0.insert(client, living);
        }
        known
    }
}

/// The most children of a client that are checked.
const MOST: usize = 64;

/// Whether a process has an address space.
fn has_memory(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/statm")).is_ok_and(|text| !text.starts_with("0 "))
}

/// The children of a process that have an address space.
fn children(pid: i32) -> Vec<i32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let pids: Vec<i32> = lists.flat_map(|list| list.split(' ').flat_map(str::parse).collect::<Vec<_>>()).collect();
    pids.into_iter().filter(|pid| has_memory(*pid)).collect()
}

/// Whether a process has a page at an address; `None` if that cannot be known, because it has
/// ended.
pub fn has_page(pid: i32, address: u64) -> Option<bool> {
    const PRESENT_OR_SWAPPED: u64 = 3 << 62;
    let mut entry = [0; 8];
    let pages = File::open(format!("/proc/{pid}/pagemap")).ok()?;
    pages.read_exact_at(&mut entry, address / page_size() * 8).ok()?;
    Some(u64::from_le_bytes(entry) & PRESENT_OR_SWAPPED != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_pages_that_it_touched() {
        let bytes = vec![1u8; 1 << 16];
        let own = std::process::id() as i32;
        assert_eq!(has_page(own, bytes.as_ptr() as u64 + (1 << 15)), Some(true));
        assert_eq!(has_page(own, 0x1000), Some(false));
        assert_eq!(has_page(i32::MAX, 0x1000), None);
    }

    #[test]
    fn children_are_known_as_long_as_they_live() {
        let own = std::process::id() as i32;
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let mut descendants = Descendants::default();
        // Other tests of this process have children, too.
        assert!(descendants.refresh(own).contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(descendants.refresh(own).contains(&pid), "it lived at the last look");
        assert!(!descendants.refresh(own).contains(&pid));
    }
}
