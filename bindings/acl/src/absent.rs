//! Functions that exist by name only: programs link them, and what they would do needs the vendor's
//! kernels or another of its libraries.
//!
//! They take whatever they are passed, which C allows on every architecture that has Ascend hosts,
//! and answer that they are not supported: a code, or nothing where a pointer or a count is
//! returned, since programs would use an error number as one. The build takes their names from
//! `facts/acl-abi.json`.

use crate::border;
use crate::fault::code;
use libc::c_void;
use std::ptr::null_mut;

macro_rules! absent {
    ($($list:ident -> $returns:ty = $value:expr; [$($name:ident)*])*) => {
        $($(
            #[doc = concat!("`", stringify!($name), "`, which is not supported.")]
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the name is C's")]
            pub extern "C" fn $name() -> $returns {
                border::absent(stringify!($name));
                $value
            }
        )*

        /// The functions of this list.
        pub const $list: &[&str] = &[$(stringify!($name)),*];)*
    };
}

include!(concat!(env!("OUT_DIR"), "/absent.rs"));

/// Functions that framework libraries call while they are loaded or set up: they must succeed.
pub const LOADED: &[&str] =
    &["HcclGetCommConfigCapability", "HcclGetRootInfo", "HcclSetConfig", "rtDevBinaryRegister", "rtFunctionRegister"];

/// `HcclGetCommConfigCapability`: a set of features, of which there are none.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub extern "C" fn HcclGetCommConfigCapability() -> u32 {
    0
}

/// `HcclGetRootInfo`: the first process of a group calls it, and the others wait for its answer. It
/// succeeds, so that each of them makes the next call, which says that there is no HCCL.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub extern "C" fn HcclGetRootInfo() -> i32 {
    0
}

/// `HcclSetConfig`: a setting of collective communication, of which there is none. Frameworks set
/// it before their first tensor.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub extern "C" fn HcclSetConfig() -> i32 {
    0
}

/// `rtDevBinaryRegister`: kernels are taken and never run.
///
/// # Safety
///
/// `handle` is NULL or a place for a handle.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub unsafe extern "C" fn rtDevBinaryRegister(_binary: *const c_void, handle: border::Out<usize>) -> i32 {
    handle.write(1);
    0
}

/// `rtFunctionRegister`: kernels are taken and never run.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub extern "C" fn rtFunctionRegister() -> i32 {
    0
}
