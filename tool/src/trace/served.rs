//! Which commands the library uses and the emulator answers: the rest is what this project does not
//! serve yet.

use ascend_emulator::record::buffer::KEYS;
use ascend_emulator::svm::is_modelled;
use ascend_ioctl::Generation;
use ascend_ioctl::svm::Op;

/// Modules and constants that the library's source names: the commands that it makes are among
/// them.
const LIBRARY: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/library_commands.rs"));

/// Whether the library makes a command of a module.
fn is_used(module: &str, command: &str) -> bool {
    LIBRARY.contains(&(module, command))
}

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
        // Some queries tell generations apart, and are asked by what those have.
        let tells = |key| Generation::ALL.iter().any(|generation| generation.delta().urd_keys.contains(&key));
        let library = known.is_some_and(|(name, key)| is_used("URD", name) || tells(*key));
        return Served { library, emulator: known.is_some() };
    }
    let is_manager = matches!(name, "OPEN" | "CLOSE" | "GET_MODULE_STATUS") && module != "hdc";
    let module = if is_manager { "" } else { module };
    let op = Op::ALL.iter().find(|op| module == "SVM" && op.name() == name);
    Served { library: is_used(module, name), emulator: op.is_none_or(|op| is_modelled(*op)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_the_library(module: &str, command: &str) -> bool {
        served(module, Some(command), None).library
    }

    #[test]
    fn commands_that_the_library_makes_are_distinguished_from_others() {
        for (module, used, unused) in [
            ("SVM", "MEM_CREATE", "MEM_HANDLE_SET_ATTR"),
            ("SVM", "ALLOC", "ADVISE"),
            ("SVM", "OPEN", "GET_MODULE_STATUS"),
            ("uda", "GET_DEV_LIST", "GET_DEV_NUM"),
            ("DEVMNG", "GET_PROCESS_SIGN", "GET_PCIE_ID_INFO"),
            ("hdc", "CLOSE", "MEM_CREATE"),
        ] {
            assert!(by_the_library(module, used), "{used}");
            assert!(!by_the_library(module, unused), "{unused}");
        }
        assert!(!served("SVM", None, None).emulator);
        assert!(!served("SVM", Some("SOMA_POOL_CREATE"), None).emulator);
    }

    #[test]
    fn queries_that_the_library_makes_are_distinguished_from_others() {
        let by_the_library = |name: &str| {
            let (_, key) = KEYS.iter().find(|(it, _)| *it == name).unwrap();
            served("URD", Some("URD"), Some((key.main, key.sub))).library
        };
        for used in ["HEALTH", "P2P", "SPOD_INFO", "UDIS_GET", "MEMORY_INFO"] {
            assert!(by_the_library(used), "{used}");
        }
        for unused in ["BOOT_STATUS", "MASTER_ID", "PROBED", "PHYSICAL_INFO"] {
            assert!(!by_the_library(unused), "{unused}");
        }
        assert!(!served("URD", Some("URD"), Some((1, 2))).emulator);
    }
}
