//! The numbers of a chip that clients decide by, from its name.
//!
//! `hardware_version` has three parts, as the driver's `devdrv_hardware_version.h` combines them:
//! the architecture from bit 16 on, which is 0 for all of these; the chip in bits 8 to 15; the
//! version in bits 0 to 7. The numbers of cores are those of the vendor's public descriptions of
//! these chips (hicann/runtime, `src/platform/platform_config`).

/// A chip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chip {
    kind: u32,
    version: u32,
    /// AI cores of a die.
    pub ai_cores: u32,
    /// AI CPUs of a die.
    pub ai_cpus: u32,
    /// Dies, each of which is a device of its own. Device ids count the dies of all chips.
    pub dies: u32,
}

/// Chip of the Ascend910B and 910_93.
const CLOUD_V2: u32 = 5;
/// Chip of the Ascend950.
const CLOUD_V4: u32 = 15;

impl Chip {
    /// The chip with this name. An unknown name is taken for an Ascend 910B3.
    pub fn named(name: &str) -> Chip {
        let b3 = Chip { kind: CLOUD_V2, version: 3, ai_cores: 20, ai_cpus: 6, dies: 1 };
        let two_dies = Chip { version: 0, dies: 2, ..b3 };
        match name.strip_prefix("Ascend").unwrap_or(name) {
            "910B1" => Chip { version: 1, ai_cores: 24, ..b3 },
            "910B2" => Chip { version: 2, ai_cores: 24, ..b3 },
            "910B2C" => Chip { version: 8, ai_cores: 24, ..b3 },
            "910B4" => Chip { version: 0, ..b3 },
            "910B4-1" => Chip { version: 10, ..b3 },
            "910_9362" | "910_9363" | "910_9372" => two_dies,
            other if other.starts_with("910_93") => Chip { ai_cores: 24, ..two_dies },
            // The numbers of its cores are not public.
            other if other.starts_with("950") => Chip { kind: CLOUD_V4, version: 0, ..b3 },
            _ => b3,
        }
    }

    /// `hardware_version`.
    pub fn hardware_version(self) -> u32 {
        self.kind << 8 | self.version
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_version_are_those_of_the_drivers_header() {
        let versions = [
            ("Ascend910B1", 0x501),
            ("Ascend910B2", 0x502),
            ("Ascend910B2C", 0x508),
            ("Ascend910B3", 0x503),
            ("Ascend910B4", 0x500),
            ("Ascend910B4-1", 0x50A),
            ("Ascend910_9392", 0x500),
            ("Ascend950PR", 0xF00),
        ];
        for (name, version) in versions {
            assert_eq!(Chip::named(name).hardware_version(), version, "{name}");
        }
    }
}
