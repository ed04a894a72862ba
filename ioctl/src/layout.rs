//! Layout facts: what the driver's headers say about each struct and constant, beside the Rust
//! definition.
//!
//! The kernel copies its own `sizeof` in and out and checks nothing, so a wrong offset corrupts
//! memory silently. Each struct of this crate is declared together with the C name, offset and size
//! of every field. The compiler checks them, and a test compares all of them with tables that were
//! measured on the driver's headers of every generation (`abi/*.json`).

use crate::{Command, Generation};

/// A C struct of the driver and where our definition puts its fields.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Name of the Rust struct.
    pub name: &'static str,
    /// Name of the struct in the driver's headers.
    pub c_name: &'static str,
    /// Size in bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
    /// Fields, without padding.
    pub fields: &'static [Field],
    /// The generations that have this struct in this or a shorter form. Fields are only ever
    /// appended.
    pub generations: &'static [Generation],
}

/// A field of a [`Layout`].
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Name in Rust.
    pub name: &'static str,
    /// Name in the driver's headers.
    pub c_name: &'static str,
    /// Offset in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// A named number of the driver's headers.
#[derive(Debug, Clone, Copy)]
pub struct Constant {
    /// Name in Rust.
    pub name: &'static str,
    /// Name in the driver's headers.
    pub c_name: &'static str,
    /// Value.
    pub value: i128,
    /// The generations that define it with this value.
    pub generations: &'static [Generation],
}

/// Every struct that this crate defines.
pub fn layouts() -> impl Iterator<Item = &'static Layout> {
    [
        crate::davinci::LAYOUTS,
        crate::uda::LAYOUTS,
        crate::urd::LAYOUTS,
        crate::devmng::LAYOUTS,
        crate::svm::LAYOUTS,
        crate::hdc::LAYOUTS,
        crate::klog::LAYOUTS,
        crate::tsdrv::LAYOUTS,
        crate::esched::LAYOUTS,
    ]
    .into_iter()
    .flatten()
    .chain([crate::hdc::UNION])
}

/// Every constant that this crate takes from the driver's headers.
pub fn constants() -> impl Iterator<Item = &'static Constant> {
    [
        crate::davinci::CONSTANTS,
        crate::uda::CONSTANTS,
        crate::urd::CONSTANTS,
        crate::devmng::CONSTANTS,
        crate::svm::CONSTANTS,
        crate::svm::Advice::CONSTANTS,
        crate::hdc::CONSTANTS,
        crate::hdc::error::CONSTANTS,
        crate::klog::CONSTANTS,
        crate::tsdrv::CONSTANTS,
        crate::esched::CONSTANTS,
        crate::esched::code::CONSTANTS,
    ]
    .into_iter()
    .flatten()
}

/// The limits that differ between generations, by their names in the driver's headers.
pub fn limits(generation: Generation) -> [(&'static str, i128); 4] {
    let delta = generation.delta();
    [
        ("DEVMM_SVM_CMD_MAX_CMD", delta.svm_numbers.into()),
        ("DEVMM_SVM_CMD_USE_PRIVATE_MAX_CMD", delta.svm_private_numbers.into()),
        ("SUB_MAX_TYPE", delta.sub_kinds.into()),
        ("DEVDRV_MANAGER_CMD_MAX_NR", delta.devmng_numbers.into()),
    ]
}

/// The texts that this crate takes from the driver's headers, by their names there; without the
/// NUL.
pub fn texts() -> [(&'static str, &'static [u8]); 5] {
    use crate::davinci::module;
    [
        ("UDA_CHAR_DEV_NAME", module::UDA.as_bytes()),
        ("DAVINCI_INTF_MODULE_URD", module::URD.as_bytes()),
        ("DAVINCI_INTF_MODULE_DEVMNG", module::DEVMNG.as_bytes()),
        ("DAVINCI_SVM_SUB_MODULE_NAME", module::SVM.as_bytes()),
        ("SHARE_LOG_MAGIC", crate::klog::MAGIC_TEXT.as_bytes()),
    ]
}

/// Every command of a generation, of all modules.
pub fn commands(generation: Generation) -> impl Iterator<Item = &'static Command> {
    [
        crate::davinci::COMMANDS,
        crate::uda::COMMANDS,
        crate::urd::COMMANDS,
        crate::devmng::COMMANDS,
        crate::hdc::COMMANDS,
        crate::tsdrv::COMMANDS,
        crate::esched::COMMANDS,
    ]
    .into_iter()
    .flatten()
    .chain(generation.svm_commands().map(|svm| &svm.command))
}

/// The generations of a declaration: all, `since` one, or `until` one (inclusive).
macro_rules! declared_generations {
    () => {
        &$crate::Generation::ALL
    };
    (since $generation:ident) => {
        $crate::Generation::$generation.and_newer()
    };
    (until $generation:ident) => {
        $crate::Generation::$generation.and_older()
    };
}

/// Declares `#[repr(C)]` structs with their layout facts, and `LAYOUTS`, the list of them.
///
/// `field: Type = "c_name" @ offset` is a field of the driver; a field without a C name is padding.
macro_rules! declare_layouts {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident = $c_name:literal, $size:literal $(, $bound:ident $generation:ident)? {
            $( $(#[$field_meta:meta])* pub $field:ident: $type:ty $(= $c_field:literal @ $offset:literal)?, )*
        }
    )*) => {
        $(
            $(#[$meta])*
            #[allow(missing_docs)]
            #[repr(C)]
            #[derive(
                Debug, Clone, Copy, PartialEq, Eq,
                zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
            )]
            pub struct $name {
                $( $(#[$field_meta])* pub $field: $type, )*
            }

            impl Default for $name {
                /// All bytes zero.
                fn default() -> Self {
                    zerocopy::FromZeros::new_zeroed()
                }
            }

            const _: () = {
                assert!(size_of::<$name>() == $size);
                $( $( assert!(core::mem::offset_of!($name, $field) == $offset, $c_field); )? )*
            };
        )*

        /// The structs of this module.
        pub const LAYOUTS: &[$crate::layout::Layout] = &[$(
            $crate::layout::Layout {
                name: stringify!($name),
                c_name: $c_name,
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: &[$( $(
                    $crate::layout::Field {
                        name: stringify!($field),
                        c_name: $c_field,
                        offset: core::mem::offset_of!($name, $field),
                        size: size_of::<$type>(),
                    },
                )? )*],
                generations: $crate::layout::declared_generations!($($bound $generation)?),
            },
        )*];
    };
}

/// Declares constants of the driver's headers, and `CONSTANTS`, the list of them.
macro_rules! declare_constants {
    ($(
        $(#[$meta:meta])*
        pub const $name:ident: $type:ty = $value:expr, $c_name:literal $(, $bound:ident $generation:ident)?;
    )*) => {
        $( $(#[$meta])* pub const $name: $type = $value; )*

        /// The numbers that this module takes from the driver's headers.
        pub const CONSTANTS: &[$crate::layout::Constant] = &[$(
            $crate::layout::Constant {
                name: stringify!($name),
                c_name: $c_name,
                value: $value as i128,
                generations: $crate::layout::declared_generations!($($bound $generation)?),
            },
        )*];
    };
}

/// Declares a set of flags of the driver's headers, with `CONSTANTS`, the list of them.
macro_rules! declare_flags {
    (
        $(#[$meta:meta])*
        pub struct $name:ident: $type:ty {
            $(
                $(#[$attribute:ident $($tokens:tt)*])*
                $flag:ident = $value:literal, $c_name:literal $(, $bound:ident $generation:ident)?;
            )*
        }
    ) => {
        bitflags::bitflags! {
            $(#[$meta])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
            pub struct $name: $type {
                $( $(#[$attribute $($tokens)*])* const $flag = $value; )*
            }
        }

        impl $name {
            /// The flags as the driver's headers name them.
            pub const CONSTANTS: &[$crate::layout::Constant] = &[$(
                $crate::layout::Constant {
                    name: stringify!($flag),
                    c_name: $c_name,
                    value: $value,
                    generations: $crate::layout::declared_generations!($($bound $generation)?),
                },
            )*];
        }
    };
}

pub(crate) use {declare_constants, declare_flags, declare_layouts, declared_generations};
