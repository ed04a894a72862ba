//! Which commands the library uses and the emulator answers: the rest is what this project does not
//! serve yet.

use ascend_emulator::record::buffer::KEYS;
use ascend_emulator::svm::is_modelled;
use ascend_ioctl::svm::Op;

/// Commands that the library makes, by module. A test compares them with its source.
const LIBRARY: &[(&str, &[&str])] = &[
    ("", &["OPEN", "CLOSE"]),
    ("uda", &["DEVID_TO_UDEVID", "GET_DEV_LIST", "GET_USER_INFO", "SETUP_DEV_TABLE"]),
    (
        "DEVMNG",
        &[
            "CONTAINER_CMD",
            "GET_CONTAINER_FLAG",
            "GET_DEVICE_HEALTH_STATUS",
            "GET_DEVINFO",
            "GET_HOST_PHY_MACH_FLAG",
            "GET_PCIINFO",
            "GET_PROCESS_SIGN",
            "QUERY_DEV_PID",
        ],
    ),
    ("hdc", &["CLOSE", "CONNECT", "GET_SESSION_ATTR", "RECV", "RECV_PEEK", "SEND", "SET_SESSION_OWNER"]),
    (
        "SVM",
        &[
            "ALLOC",
            "ALLOC_PROC_STRUCT",
            "ASYNC_MEMCPY",
            "CLOSE_DEVICE",
            "FREE_PAGES",
            "GET_MMAP_INFO",
            "INIT_PROCESS",
            "IPC_MEM_CLOSE",
            "IPC_MEM_CREATE",
            "IPC_MEM_DESTROY",
            "IPC_MEM_OPEN",
            "IPC_MEM_QUERY",
            "IPC_MEM_SET_ATTR",
            "IPC_MEM_SET_PID",
            "MEMCPY",
            "MEMCPY2D",
            "MEMCPY_BATCH",
            "MEMCPY_RESULT_REFRESH",
            "MEMSET8",
            "MEM_CREATE",
            "MEM_EXPORT",
            "MEM_GET_ACCESS",
            "MEM_GET_ATTR",
            "MEM_IMPORT",
            "MEM_MAP",
            "MEM_RELEASE",
            "MEM_SET_ACCESS",
            "MEM_SET_ATTR",
            "MEM_SET_PID",
            "MEM_UNMAP",
            "PREFETCH",
            "PREPARE_CLOSE_DEVICE",
            "QUERY_MEM_USEDINFO",
            "SETUP_DEVICE",
            "UPDATE_HEAP",
        ],
    ),
];

/// Queries that the library makes.
const QUERIES: &[&str] = &[
    "HEALTH",
    "SPLIT_MODE",
    "INIT_STATUS",
    "CHIP_INFO",
    "P2P",
    "PCIE_INFO",
    "MEMORY_INFO",
    "TS_HEARTBEAT",
    "SPOD_INFO",
    "UDIS_GET",
];

/// Who serves a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    /// The library uses it.
    pub library: bool,
    /// The emulator answers it as the driver does.
    pub emulator: bool,
}

/// Who serves a command of a module; `key` is that of a URD query.
pub fn served(module: &str, command: Option<&str>, key: Option<(u32, u32)>) -> Served {
    let Some(name) = command else { return Served { library: false, emulator: false } };
    if let (Some(key), "URD") = (key, name) {
        let known = KEYS.iter().find(|(_, it)| (it.main, it.sub) == key);
        return Served { library: known.is_some_and(|(name, _)| QUERIES.contains(name)), emulator: known.is_some() };
    }
    let is_manager = matches!(name, "OPEN" | "CLOSE" | "GET_MODULE_STATUS") && module != "hdc";
    let module = if is_manager { "" } else { module };
    let library = LIBRARY.iter().any(|(it, commands)| *it == module && commands.contains(&name));
    let op = Op::ALL.iter().find(|op| module == "SVM" && op.name() == name);
    Served { library, emulator: op.is_none_or(|op| is_modelled(*op)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_ioctl::{devmng, hdc, uda};

    const SVM: &str = include_str!("../../../src/driver/svm.rs");
    const OTHERS: [(&str, &str, &str); 3] = [
        ("uda", "uda", include_str!("../../../src/driver/uda.rs")),
        ("DEVMNG", "devmng", include_str!("../../../src/driver/devmng.rs")),
        ("hdc", "hdc", include_str!("../../../src/driver/hdc.rs")),
    ];

    /// Whether a source names a constant, as a whole word. What its tests name is not used.
    fn names(source: &str, constant: &str) -> bool {
        let source = source.split("#[cfg(test)]").next().unwrap_or_default();
        source.match_indices(constant).any(|(at, _)| {
            !source[at + constant.len()..].starts_with(|next: char| next.is_ascii_alphanumeric() || next == '_')
        })
    }

    #[test]
    fn the_commands_of_the_library_are_those_of_its_source() {
        for op in Op::ALL {
            let used = names(SVM, &format!("request::{}", op.name()));
            assert_eq!(served("SVM", Some(op.name()), None).library, used, "{}", op.name());
        }
        for (module, prefix, source) in OTHERS {
            for command in [uda::COMMANDS, devmng::COMMANDS, hdc::COMMANDS].into_iter().flatten() {
                if command.magic == source_magic(module) {
                    let used = names(source, &format!("{prefix}::{}", command.name));
                    assert_eq!(served(module, Some(command.name), None).library, used, "{}", command.name);
                }
            }
        }
    }

    fn source_magic(module: &str) -> u8 {
        match module {
            "uda" => uda::MAGIC,
            "hdc" => hdc::MAGIC,
            _ => devmng::MAGIC,
        }
    }

    #[test]
    fn the_queries_of_the_library_are_those_of_its_source() {
        let source = include_str!("../../../src/driver/urd.rs");
        for (name, key) in KEYS {
            // Two queries are named by what their generation has.
            let named = matches!(*name, "UDIS_GET" | "MEMORY_INFO");
            let used = named || names(source, &format!("urd::{name}"));
            assert_eq!(served("URD", Some("URD"), Some((key.main, key.sub))).library, used, "{name}");
        }
        assert!(!served("URD", Some("URD"), Some((1, 2))).emulator);
        assert!(!served("SVM", None, None).emulator);
        assert!(!served("SVM", Some("SOMA_POOL_CREATE"), None).emulator);
    }
}
