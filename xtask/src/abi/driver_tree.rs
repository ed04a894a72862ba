//! A driver source tree, laid out as hicann/driver, and the headers that declare the interface.
//!
//! The headers cannot all be included together: the copies of a header for the kernel and for the
//! user library have the same include guard. So they form units, and each unit is compiled on its
//! own. Headers that those include are found by name anywhere in the tree, because their
//! directories differ most between generations.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Headers that are compiled together.
pub struct Unit {
    /// What the headers describe.
    pub name: &'static str,
    /// The headers, relative to the tree; a name without a directory is looked for everywhere.
    pub headers: &'static [&'static str],
    /// Directories in which the headers' own includes are looked for first.
    pub include: &'static [&'static str],
    /// Headers that are not part of the tree. They do not matter here, so empty files replace them.
    pub foreign: &'static [&'static str],
    /// Whether every ioctl request of the unit is measured, including unknown ones.
    pub all_requests: bool,
}

/// The macros of the 910B host build of the kernel modules that the headers use.
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

/// The header by which a driver tree is recognised.
const MEMORY_HEADER: &str = "src/sdk_driver/svm/v2/command/ioctl/svm_ioctl.h";

/// The units. If two declare the same name, the first counts, so headers of the kernel come first.
pub const UNITS: [Unit; 10] = [
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
        name: "task scheduler",
        // Its directory has another name in 8.5.0.
        headers: &["trs_ioctl.h"],
        include: &["src/sdk_driver/inc", "pkg_inc"],
        foreign: &[],
        all_requests: false,
    },
    Unit {
        name: "event scheduler",
        headers: &["src/sdk_driver/esched/command/ioctl/esched_ioctl.h"],
        include: &["src/sdk_driver/esched/command/ioctl", "src/sdk_driver/inc", "pkg_inc"],
        foreign: &[],
        all_requests: false,
    },
    Unit {
        name: "shared log page",
        // The only file with the layout of the page that compiles outside the kernel.
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
    /// Every header by its file name. Those of the kernel come first, then those nearest to the
    /// root.
    headers: BTreeMap<String, Vec<PathBuf>>,
}

impl DriverTree {
    /// Opens the tree at `directory`. The error is one sentence.
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

    /// The headers of `unit`. The error names the first that is missing.
    pub fn headers(&self, unit: &Unit) -> Result<Vec<PathBuf>, String> {
        let header = |path: &&str| {
            let found = match self.headers.get(*path).and_then(|found| found.first()) {
                Some(found) => found.clone(),
                None => self.root.join(path),
            };
            if found.is_file() { Ok(found) } else { Err(format!("the tree has no {path} ({})", unit.name)) }
        };
        unit.headers.iter().map(header).collect()
    }

    /// The include directory with which `#include "wanted"` finds a header of the tree.
    pub fn directory_with(&self, wanted: &str) -> Option<PathBuf> {
        let name = wanted.rsplit('/').next()?;
        let found = self.headers.get(name)?.iter().find(|path| path.ends_with(wanted))?;
        found.ancestors().nth(wanted.split('/').count()).map(Path::to_owned)
    }

    fn index(&mut self, directory: &Path) {
        let Ok(entries) = fs::read_dir(directory) else { return };
        let mut entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        // Sorted, so that the choice between two copies of a header is always the same.
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
