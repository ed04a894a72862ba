//! Driver generations: one record each, written as the parent's record plus what changed.
//!
//! A new generation needs a record and a line in the list below, its command table in
//! [`crate::svm`], and its layout table in `abi/`.
//!
//! Versions are never compared as text: the numbers of the vendor's packages are not ordered. A
//! client recognises a generation by commands, features and address segments that only some
//! generations have, and refuses a driver that fits none of them.

use crate::svm::{self, Op, SvmCommand};
use crate::urd;
use core::fmt;
use core::str::FromStr;

/// All that this crate knows about a generation of the driver.
#[derive(Debug)]
pub struct Delta {
    /// Name of the generation, as on the command line: the release that it was measured on.
    pub name: &'static str,
    /// The generation that this one grew from.
    pub parent: Option<Generation>,
    /// Code of the generation in this project's share tickets. It never changes and is never 0.
    pub ticket: u8,
    /// File name of its layout table in `abi/`.
    pub table: &'static str,
    /// SVM commands that are new, or have another number or argument than in the parent.
    pub svm: &'static [SvmCommand],
    /// SVM numbers from here on are EINVAL.
    pub svm_numbers: u8,
    /// SVM numbers below this need an initialised process.
    pub svm_private_numbers: u8,
    /// [`svm::UpdateHeap::sub_kind`]s from here on are EINVAL.
    pub sub_kinds: u32,
    /// Address ranges that a session maps, in this order, without the host-pin range.
    pub segments: &'static [svm::Segment],
    /// Whether a host-pin range follows once a device has come up.
    pub host_pin: bool,
    /// Whether [`svm::MemImport::memory`] is answered.
    pub import_tells_memory: bool,
    /// Numbers of DEVMNG from here on are EINVAL.
    pub devmng_numbers: u8,
    /// Size of GET_DEVINFO's struct.
    pub devinfo_size: usize,
    /// Size of the P2P feature's struct.
    pub p2p_size: usize,
    /// The feature that reports values published by the device's firmware.
    pub udis_get: urd::Key,
    /// The features of this generation out of those that only some generations have.
    pub urd_keys: &'static [urd::Key],
}

const SVM: svm::Segment = svm::Segment { start: svm::SVM_START, size: svm::SVM_SIZE };
const SOMA: svm::Segment = svm::Segment { start: svm::SOMA_START, size: svm::SOMA_SIZE };
const UVM: svm::Segment = svm::Segment { start: svm::UVM_START, size: svm::UVM_SIZE };

const V8_5_0: Delta = Delta {
    name: "8.5.0",
    parent: None,
    ticket: 1,
    table: "8.5.0.json",
    svm: svm::V8_5_0,
    svm_numbers: 71,
    svm_private_numbers: 66,
    sub_kinds: 7,
    segments: &[SVM],
    host_pin: false,
    import_tells_memory: false,
    devmng_numbers: 208,
    devinfo_size: 312,
    p2p_size: 24,
    udis_get: urd::UDIS_GET_85,
    urd_keys: &[urd::UDIS_GET_85],
};

const V9_0_0: Delta = Delta {
    name: "9.0.0",
    parent: Some(Generation::V8_5_0),
    ticket: 2,
    table: "9.0.0.json",
    svm: svm::V9_0_0,
    svm_numbers: 106,
    svm_private_numbers: 100,
    host_pin: true,
    import_tells_memory: true,
    devmng_numbers: 209,
    p2p_size: 32,
    udis_get: urd::UDIS_GET,
    urd_keys: &[urd::UDIS_GET],
    ..V8_5_0
};

const V26_1: Delta = Delta {
    name: "26.1",
    parent: Some(Generation::V9_0_0),
    ticket: 3,
    table: "26.1.json",
    svm: svm::V26_1,
    svm_numbers: 105,
    sub_kinds: 9,
    segments: &[SVM, SOMA, UVM],
    devinfo_size: 320,
    urd_keys: &[urd::UDIS_GET, urd::MEMORY_INFO],
    ..V9_0_0
};

/// The list of generations, each named like its record.
macro_rules! generations {
    ($($(#[$meta:meta])* $name:ident,)+) => {
        /// A generation of the driver's ABI, named after the driver release that it was measured
        /// on.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Generation {
            $($(#[$meta])* $name,)+
        }

        impl Generation {
            /// All generations that this crate knows, oldest first.
            pub const ALL: [Generation; [$(stringify!($name)),+].len()] = [$(Generation::$name),+];

            /// What is known about the generation.
            pub const fn delta(self) -> &'static Delta {
                match self {
                    $(Generation::$name => &$name,)+
                }
            }
        }
    };
}

// Oldest first.
generations! {
    /// 8.5.0.
    V8_5_0,
    /// 9.0.0.
    V9_0_0,
    /// 26.1.
    V26_1,
}

impl Generation {
    /// The newest that this crate knows.
    pub const NEWEST: Generation = Self::ALL[Self::ALL.len() - 1];

    /// Name of the generation, as on the command line.
    pub const fn name(self) -> &'static str {
        self.delta().name
    }

    /// This generation and all newer ones.
    pub const fn and_newer(self) -> &'static [Generation] {
        const ALL: &[Generation] = &Generation::ALL;
        ALL.split_at(self as usize).1
    }

    /// This generation and all older ones.
    pub const fn and_older(self) -> &'static [Generation] {
        const ALL: &[Generation] = &Generation::ALL;
        ALL.split_at(self as usize + 1).0
    }

    /// An SVM command in this generation; `None` if it does not have it.
    pub fn svm(self, op: Op) -> Option<&'static SvmCommand> {
        let mut generation = Some(self);
        while let Some(delta) = generation.map(Generation::delta) {
            if let Some(found) = delta.svm.iter().find(|command| command.op == op) {
                return Some(found);
            }
            generation = delta.parent;
        }
        None
    }

    /// The SVM command that has this number in this generation.
    pub fn svm_by_number(self, number: u8) -> Option<&'static SvmCommand> {
        let mut generation = Some(self);
        while let Some(delta) = generation.map(Generation::delta) {
            let found = delta.svm.iter().find(|command| command.command.number == number);
            // A number that an older generation used is only good if the command did not move
            // since.
            if let Some(found) = found {
                return self.svm(found.op).filter(|now| now.command.number == number);
            }
            generation = delta.parent;
        }
        None
    }

    /// All SVM commands of this generation.
    pub fn svm_commands(self) -> impl Iterator<Item = &'static SvmCommand> {
        Op::ALL.iter().filter_map(move |&op| self.svm(op))
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for a name that is not the name of a known generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownGeneration;

impl fmt::Display for UnknownGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unknown driver generation; known are ")?;
        for (index, generation) in Generation::ALL.iter().enumerate() {
            let separator = match Generation::ALL.len() - index {
                _ if index == 0 => "",
                1 => " and ",
                _ => ", ",
            };
            write!(f, "{separator}{generation}")?;
        }
        Ok(())
    }
}

impl core::error::Error for UnknownGeneration {}

impl FromStr for Generation {
    type Err = UnknownGeneration;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Generation::ALL.into_iter().find(|generation| generation.name() == name).ok_or(UnknownGeneration)
    }
}
