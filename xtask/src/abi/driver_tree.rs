//! A driver source tree, laid out as hicann/driver, and where in it the interface is declared.
//!
//! The interface is spread over headers that cannot all be included together (the kernel's and the user library's
//! copies of a header share their include guard), so they form units, each compiled on its own. A unit names its headers
//! and the macros that the 910B host build defines. Headers that those include are found by their name wherever the tree
//! keeps them: that is what differs most between generations.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Headers that are compiled together.
pub struct Unit {
    /// What they describe.
    pub name: &'static str,
    /// The headers, relative to the tree.
    pub headers: &'static [&'static str],
    /// Directories in which the headers' own includes are looked for first.
    pub include: &'static [&'static str],
    /// Headers that the tree itself fetches from elsewhere; nothing in them matters here, so they are left empty.
    pub foreign: &'static [&'static str],
    /// Whether every ioctl request in it is of interest, also one that we do not know yet.
    pub all_requests: bool,
}

/// What the 910B host build of the kernel modules defines, as far as the headers ask for it.
pub const DEFINES: [&str; 9] = [
    "DRV_HOST",
    "CFG_HOST_ENV",
    "CFG_FEATURE_SHARE_LOG",
    "CFG_FEATURE_SRIOV",
    "CFG_FEATURE_VF_USE_DEVID",
    "CFG_SOC_PLATFORM_CLOUD",
    "CFG_SOC_PLATFORM_CLOUD_HOST",
    "CFG_SOC_PLATFORM_CLOUD_V2",
    "CONFIG_PLATFORM_910B",
];

/// The header that makes a directory a driver tree for us.
const MEMORY_HEADER: &str = "src/sdk_driver/svm/v2/command/ioctl/svm_ioctl.h";

/// The units, most authoritative first: where two declare the same name, the kernel's own header is listed earlier.
pub const UNITS: [Unit; 8] = [
    Unit {
        name: "memory",
        headers: &[MEMORY_HEADER],
        include: &["src/sdk_driver/svm/v2/command/ioctl", "src/sdk_driver/inc", "pkg_inc"],
        foreign: &[],
        all_requests: true,
    },
    Unit {
        name: "davinci multiplexer",
        headers: &["src/sdk_driver/inc/davinci_interface.h"],
        include: &["src/sdk_driver/inc"],
        foreign: &[],
        all_requests: true,
    },
    Unit {
        name: "device ids",
        headers: &[
            "src/sdk_driver/pbl/uda/command/ioctl/ascend_dev_num.h",
            "src/sdk_driver/pbl/uda/command/ioctl/uda_cmd.h",
        ],
        include: &["src/sdk_driver/pbl/uda/command/ioctl"],
        foreign: &[],
        all_requests: true,
    },
    Unit {
        name: "device queries",
        headers: &[
            "src/sdk_driver/pbl/dev_urd/command/ioctl/urd_ioctl.h",
            "src/sdk_driver/dms/command/ioctl/dms_ioctl.h",
            "src/sdk_driver/dms/command/ioctl/dms_urd_forward_uk_msg.h",
        ],
        include: &[
            "src/sdk_driver/pbl/dev_urd/command/ioctl",
            "src/sdk_driver/dms/command/ioctl",
            "src/sdk_driver/inc",
        ],
        foreign: &[],
        all_requests: false,
    },
    Unit {
        name: "host-device channel",
        headers: &["src/sdk_driver/hdc/command/ioctl/hdcdrv_cmd_ioctl.h", "src/sdk_driver/hdc/inc/hdcdrv_cmd_enum.h"],
        include: &["src/sdk_driver/hdc/command/ioctl"],
        foreign: &[],
        all_requests: false,
    },
    Unit {
        name: "shared log page",
        // Only the user library's source file has the page's layout in a form that compiles outside the kernel.
        headers: &["src/ascend_hal/dmc/logdrv/drv_share_log.c"],
        include: &["src/ascend_hal/inc", "pkg_inc"],
        foreign: &["securec.h"],
        all_requests: false,
    },
    Unit {
        name: "device manager",
        headers: &[
            "src/ascend_hal/dms/drv_devmng/inc/devmng_cmd_def.h",
            "src/ascend_hal/inc/devdrv_user_common.h",
            "src/ascend_hal/inc/dms/dms_devdrv_info_comm.h",
            "src/ascend_hal/inc/dms/dms_soc_interface.h",
        ],
        include: &["src/ascend_hal/inc", "src/ascend_hal/inc/dms", "pkg_inc"],
        foreign: &[],
        all_requests: false,
    },
    Unit {
        name: "user library types",
        headers: &["pkg_inc/ascend_hal.h", "pkg_inc/dsmi_common_interface.h"],
        include: &["pkg_inc"],
        foreign: &[],
        all_requests: false,
    },
];

/// A driver source tree.
pub struct DriverTree {
    root: PathBuf,
    /// Every header by its file name; the kernel's come first, then the shallowest.
    headers: BTreeMap<String, Vec<PathBuf>>,
}

impl DriverTree {
    /// Opens the tree at `directory`, or says in one sentence why it is none.
    pub fn open(directory: &Path) -> Result<DriverTree, String> {
        let root = fs::canonicalize(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        if !root.is_dir() {
            return Err(format!("{} is not a directory", directory.display()));
        }
        if !root.join(MEMORY_HEADER).is_file() {
            let directory = directory.display();
            return Err(format!("{directory} is not a driver source tree: it has no {MEMORY_HEADER}"));
        }
        let mut tree = DriverTree { root, headers: BTreeMap::new() };
        for part in ["src/sdk_driver", "pkg_inc", "src/ascend_hal"] {
            tree.index(&tree.root.join(part));
        }
        Ok(tree)
    }

    /// The tree's directory, without symbolic links.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The headers of `unit`, or the first that the tree lacks.
    pub fn headers(&self, unit: &Unit) -> Result<Vec<PathBuf>, String> {
        let header = |path: &&str| {
            let found = self.root.join(path);
            if found.is_file() { Ok(found) } else { Err(format!("the tree has no {path} ({})", unit.name)) }
        };
        unit.headers.iter().map(header).collect()
    }

    /// The directory that must be searched so that `#include "wanted"` finds a header of the tree.
    pub fn directory_with(&self, wanted: &str) -> Option<PathBuf> {
        let name = wanted.rsplit('/').next()?;
        let found = self.headers.get(name)?.iter().find(|path| path.ends_with(wanted))?;
        found.ancestors().nth(wanted.split('/').count()).map(Path::to_owned)
    }

    fn index(&mut self, directory: &Path) {
        let Ok(entries) = fs::read_dir(directory) else { return };
        let mut entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        // Files before directories and both by name, so that the choice between two copies is always the same.
        entries.sort_by_key(|path| (path.is_dir(), path.clone()));
        for path in entries {
            if path.is_dir() && !path.is_symlink() {
                self.index(&path);
            } else if path.extension().is_some_and(|extension| extension == "h") {
                if let Some(name) = path.file_name() {
                    self.headers.entry(name.to_string_lossy().into_owned()).or_default().push(path);
                }
            }
        }
    }
}
