//! The C headers, which the build writes from `facts`.
//!
//! All names stand in `acl/acl.h`. The other names under which programs include them are one-line
//! files, so that any mixture of includes declares each name once.

/// The file with all names.
pub const MAIN: &str = "acl.h";

/// The other files that programs include.
pub const FORWARDING: &[&str] = &[
    "acl_base.h",
    "acl_base_rt.h",
    "acl_mdl.h",
    "acl_op.h",
    "acl_op_compiler.h",
    "acl_prof.h",
    "acl_rt.h",
    "acl_rt_allocator.h",
    "acl_tdt.h",
    "error_codes/rt_error_codes.h",
];

/// The text of [`MAIN`].
pub const TEXT: &str = include_str!(concat!(env!("OUT_DIR"), "/acl.h"));

/// The header of the driver's own library.
pub const HAL: &str = "ascend_hal.h";

/// The text of [`HAL`].
pub const HAL_TEXT: &str = include_str!(concat!(env!("OUT_DIR"), "/ascend_hal.h"));

/// The text of a file that forwards to [`MAIN`], by its path below `acl/`.
pub fn forwarding(path: &str) -> String {
    let up = if path.contains('/') { "../" } else { "" };
    format!("#include \"{up}{MAIN}\"\n")
}
