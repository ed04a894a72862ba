//! What ordinary files of the host say: kernel modules, PCI functions, the installed driver's
//! version.
//!
//! All of it is optional: a container may see none of these files, and the version file says what
//! is *installed*, not what is loaded.

use super::identity::PciAddress;
use crate::error::printable;
use crate::signals::uninterrupted;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// PCI vendor of the NPUs.
const VENDOR: u32 = 0x19e5;
/// PCI devices that are NPUs of this driver: 910B, 910_93, 950.
const DEVICES: [u32; 3] = [0xd802, 0xd803, 0xd806];
/// The file that names the installer's directory.
const INSTALL_INFO: &str = "etc/ascend_install.info";
/// The installer's default directory.
const INSTALL_DIRECTORY: &str = "/usr/local/Ascend";

/// Version strings of the installed driver package.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Versions {
    /// The file that they come from; `None` if there is none. In containers it is often not
    /// mounted.
    pub file: Option<PathBuf>,
    /// Version of the package, like `25.6.rc1`. It is not ordered between generations: never
    /// compare it.
    pub package: Option<String>,
    /// The vendor's internal version, like `V100R001C23SPC005B219`. It is not ordered either.
    pub internal: Option<String>,
}

impl Versions {
    /// Reads the file of the package that `/etc/ascend_install.info` names.
    pub(crate) fn read(root: &Path) -> Versions {
        let info = fs::read_to_string(root.join(INSTALL_INFO)).unwrap_or_default();
        let directory = value(&info, "Driver_Install_Path_Param").unwrap_or_else(|| INSTALL_DIRECTORY.to_owned());
        let file = root.join(directory.trim_start_matches('/')).join("driver/version.info");
        match fs::read_to_string(&file) {
            Ok(text) => {
                let text = printable(&text);
                Versions { file: Some(file), package: value(&text, "version"), internal: value(&text, "innerversion") }
            }
            Err(_) => Versions::default(),
        }
    }
}

/// The value of a `key=value` line, without quotes. The key may be in any case.
fn value(text: &str, key: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| line.split_once('='))
        .find(|(name, _)| name.trim().eq_ignore_ascii_case(key))
        .map(|(_, value)| value.trim().trim_matches(['"', '[', ']']).to_owned())
        .filter(|value| !value.is_empty())
}

/// True if the driver's base module is loaded; `None` if the list of modules cannot be read.
pub(crate) fn driver_loaded(root: &Path) -> Option<bool> {
    let modules = fs::read_to_string(root.join("proc/modules")).ok()?;
    let loaded = |name| modules.lines().any(|line| line.split(' ').next() == Some(name));
    // The second is the guest driver of virtual machines with a split device.
    Some(loaded("asdrv_pbl") || loaded("asdrv_vpbl"))
}

/// The NPUs that sysfs shows on PCI, started or not, without virtual functions.
pub(crate) fn pci_functions(root: &Path) -> Vec<PciAddress> {
    let listed = || fs::read_dir(root.join("sys/bus/pci/devices"))?.collect::<io::Result<Vec<_>>>();
    let mut found: Vec<_> = uninterrupted(listed)
        .unwrap_or_default()
        .into_iter()
        .filter(|entry| {
            let number = |file| {
                let text = fs::read_to_string(entry.path().join(file)).ok()?;
                u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
            };
            number("vendor") == Some(VENDOR)
                && number("device").is_some_and(|device| DEVICES.contains(&device))
                && !uninterrupted(|| entry.path().join("physfn").try_exists()).unwrap_or(false)
        })
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    found.sort_unstable();
    found
}

/// The domain of the NPU at `bus:device.function`, if exactly one is there.
pub(crate) fn domain(functions: &[PciAddress], bus: u8, device: u8, function: u8) -> Option<u32> {
    let mut here = functions.iter().filter(|at| (at.bus, at.device, at.function) == (bus, device, function));
    match (here.next(), here.next()) {
        (Some(only), None) => only.domain,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The root directory of a host's files, removed when dropped.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Root {
            let path = std::env::temp_dir().join(format!("ascend-vmm-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Root(path)
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_version_is_read_from_where_the_installer_says() {
        let root = Root::new("version");
        assert_eq!(Versions::read(&root.0), Versions::default());
        root.write("etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/npu\n");
        root.write(
            "opt/npu/driver/version.info",
            "Version=25.6.rc1\nInnerversion=V100R001C23\nascendhal_version=7.35.23\n",
        );
        let versions = Versions::read(&root.0);
        assert_eq!(versions.package.as_deref(), Some("25.6.rc1"));
        assert_eq!(versions.internal.as_deref(), Some("V100R001C23"));
    }

    #[test]
    fn the_version_is_read_from_the_default_place_in_either_case() {
        let root = Root::new("version-default");
        root.write("usr/local/Ascend/driver/version.info", "version=[26.1.0]\n");
        assert_eq!(Versions::read(&root.0).package.as_deref(), Some("26.1.0"));
        assert_eq!(Versions::read(&root.0).internal, None);
    }

    #[test]
    fn only_whole_npus_of_this_vendor_are_found_on_pci() {
        let root = Root::new("pci");
        let function = |address: &str, vendor: &str, device: &str| {
            root.write(&format!("sys/bus/pci/devices/{address}/vendor"), vendor);
            root.write(&format!("sys/bus/pci/devices/{address}/device"), device);
        };
        function("0000:c1:00.0", "0x19e5\n", "0xd802\n");
        function("0001:c1:00.0", "0x19e5\n", "0xd802\n");
        function("0000:c2:00.0", "0x19e5\n", "0xd803\n");
        function("0000:c2:00.1", "0x19e5\n", "0xd803\n");
        root.write("sys/bus/pci/devices/0000:c2:00.1/physfn", "");
        function("0000:03:00.0", "0x8086\n", "0xd802\n");
        function("0000:04:00.0", "0x19e5\n", "0x1711\n");
        let found = pci_functions(&root.0);
        let names: Vec<_> = found.iter().map(PciAddress::to_string).collect();
        assert_eq!(names, ["0000:c1:00.0", "0000:c2:00.0", "0001:c1:00.0"]);
        assert_eq!(domain(&found, 0xc2, 0, 0), Some(0));
        assert_eq!(domain(&found, 0xc1, 0, 0), None, "two domains have an NPU there");
        assert_eq!(domain(&found, 0xc3, 0, 0), None);
    }

    #[test]
    fn a_loaded_driver_an_unloaded_one_and_an_unreadable_list_are_distinguished() {
        let root = Root::new("modules");
        assert_eq!(driver_loaded(&root.0), None);
        root.write("proc/modules", "nvme 16384 0 - Live 0x0\nasdrv_pbl_extra 1 0 - Live 0x0\n");
        assert_eq!(driver_loaded(&root.0), Some(false));
        root.write("proc/modules", "nvme 16384 0 - Live 0x0\nasdrv_pbl 16384 3 asdrv_dms, Live 0x0\n");
        assert_eq!(driver_loaded(&root.0), Some(true));
    }
}
