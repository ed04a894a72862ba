//! `/proc/modules` as a process under emulation reads it: the host's own list, with the emulated
//! driver's modules in place of any real ones.
//!
//! The vendor's user library opens module DEVMNG only if this list names `asdrv_pbl`. Other
//! processes of the host see the real list.

use crate::config::{Config, Door};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::Mode;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};

/// The kernel modules that are emulated, in the order of loading, with those that use them. Sizes
/// and addresses are made up; an unprivileged reader sees the address 0.
const MODULES: [(&str, &str); 4] = [
    ("asdrv_pbl", "asdrv_svm,asdrv_dms,drv_pcie_hdc_host,"),
    ("drv_pcie_hdc_host", "asdrv_dms,"),
    ("asdrv_dms", "asdrv_svm,"),
    ("asdrv_svm", "-"),
];

/// The text of the list.
fn text(config: &Config, host: &str) -> String {
    let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    let is_driver = |line: &&str| MODULES.iter().any(|(module, _)| *module == name(line));
    let mut text = String::new();
    // The kernel lists the module that was loaded last first.
    for (module, users) in MODULES.iter().rev() {
        let door = if *module == "drv_pcie_hdc_host" { config.hdc_door } else { config.door };
        if !matches!(door, Door::Missing | Door::Stale) {
            let count = users.matches(',').count();
            text += &format!("{module} 1048576 {count} {users} Live 0x0000000000000000 (OE)\n");
        }
    }
    for line in host.lines().filter(|line| !is_driver(line)) {
        text += line;
        text.push('\n');
    }
    text
}

/// A file with the list, open for reading.
pub fn file(config: &Config) -> Result<OwnedFd, Errno> {
    let host = fs::read_to_string("/proc/modules").unwrap_or_default();
    let mut file = File::from(memfd_create(c"modules", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(text(config, &host).as_bytes()).map_err(|_| Errno::ENOMEM)?;
    // A new description: at offset 0, and not writable.
    let name = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    nix::fcntl::open(name.as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emulated_modules_replace_real_ones() {
        let host = "nvme 16384 0 - Live 0x0\nasdrv_pbl 1 0 - Live 0x0\n";
        let names = |config: &Config| -> Vec<String> {
            text(config, host).lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect()
        };
        let all = ["asdrv_svm", "asdrv_dms", "drv_pcie_hdc_host", "asdrv_pbl", "nvme"];
        assert_eq!(names(&Config::default()), all);
        assert_eq!(names(&Config { door: Door::Missing, hdc_door: Door::Missing, ..Config::default() }), ["nvme"]);
    }
}
