//! A tree of files in which programs written for CANN find what they are built with: header,
//! libraries, environment.
//!
//! The layout is the one that the build systems of known programs look for. All libraries are one
//! file under several names: the loader maps it once.

use crate::header;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

/// The library's own names.
pub const LIBRARY: &str = "libascendcl.so";
/// The same, for static linking.
pub const ARCHIVE: &str = "libascendcl.a";

/// Names of libraries that programs link or open besides. They are links to the library, which has
/// the functions of all of them.
pub const LINKS: &[&str] = &[
    "libacl_op_compiler.so",
    "libacl_rt.so",
    "libacl_tdt_channel.so",
    "libascend_hal.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
    "libopapi.so",
    "libprofapi.so",
    "libruntime.so",
];

/// Directories under which build systems look for `include` and `lib64`, besides the tree itself.
const PARTS: &[&str] = &["acllib", "compiler", "fwkacllib", "runtime"];

const ENVIRONMENT: &str = r#"# Source this file: programs then find the tree that it is in.
ascend_here="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")/.." && pwd)"
export ASCEND_HOME_PATH="$ascend_here"
export ASCEND_TOOLKIT_HOME="$ascend_here"
export ASCEND_OPP_PATH="$ascend_here/opp"
export ASCENDC_CMAKE_DIR="$ascend_here/cmake"
export SOC_VERSION="${SOC_VERSION:-Ascend910B3}"
export LD_LIBRARY_PATH="$ascend_here/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
unset ascend_here
"#;

/// What programs that come with a kernel in Ascend C include in their build. The kernel's files are
/// not compiled: the two functions that the vendor's memory samples call copy one number instead.
const KERNELS: &str = r#"# There is no compiler for kernels here. A library of kernels gets two functions that copy
# a number to or from the device and print it, which is what the kernels of the vendor's memory samples
# do.
set(ASCEND_ACL_KERNELS_DIR ${CMAKE_CURRENT_LIST_DIR})
function(ascendc_library name)
    add_library(${name} STATIC ${ASCEND_ACL_KERNELS_DIR}/kernels.cpp)
    target_include_directories(${name} PRIVATE ${ASCEND_ACL_KERNELS_DIR}/../include)
endfunction()
"#;

const KERNEL_FUNCTIONS: &str = r#"#include <cstdint>
#include <cstdio>

#include "acl/acl.h"

void WriteDo(uint32_t, void *, int *address, int value)
{
    aclrtMemcpy(address, sizeof(value), &value, sizeof(value), ACL_MEMCPY_HOST_TO_DEVICE);
    printf("Source data: %d\n", value);
}

void ReadDo(uint32_t, void *, int *address)
{
    int value = 0;
    aclrtMemcpy(&value, sizeof(value), address, sizeof(value), ACL_MEMCPY_DEVICE_TO_HOST);
    printf("Destination data: %d\n", value);
}
"#;

/// What `find_package(ascendcl)` and `find_package(acl_rt)` read: a target of the same name.
const TARGET: &str = r#"get_filename_component(_ascend_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET @NAME@)
    add_library(@NAME@ SHARED IMPORTED)
    set_target_properties(@NAME@ PROPERTIES
        IMPORTED_LOCATION "${_ascend_root}/lib64/lib@NAME@.so"
        IMPORTED_SONAME "libascendcl.so"
        INTERFACE_INCLUDE_DIRECTORIES "${_ascend_root}/include")
endif()
unset(_ascend_root)
"#;

/// The targets of CMake.
const TARGETS: &[&str] = &["acl_rt", "ascendcl"];

/// The device layer of elastic KV caches, for programs in C++.
const ELASTIC_KV: &str = include_str!("../include/gpu_vmm.hpp");

/// Writes the tree. `library` is the built shared library; `archive` the static one, if there is
/// one. What is there already is replaced.
///
/// # Errors
///
/// Those of writing files.
pub fn write(tree: &Path, library: &Path, archive: Option<&Path>) -> io::Result<()> {
    let (include, lib) = (tree.join("include/acl"), tree.join("lib64"));
    for directory in [&include.join("error_codes"), &lib, &tree.join("bin"), &tree.join("cmake"), &tree.join("opp")] {
        fs::create_dir_all(directory)?;
    }
    fs::write(include.join(header::MAIN), header::TEXT)?;
    for path in header::FORWARDING {
        fs::write(include.join(path), header::forwarding(path))?;
    }
    fs::write(tree.join("include").join(header::HAL), header::HAL_TEXT)?;
    let elastic = tree.join("include/kvcached");
    fs::create_dir_all(&elastic)?;
    fs::write(elastic.join("gpu_vmm.hpp"), ELASTIC_KV)?;
    replace(library, &lib.join(LIBRARY))?;
    if let Some(archive) = archive {
        replace(archive, &lib.join(ARCHIVE))?;
    }
    for name in LINKS {
        link(LIBRARY, &lib.join(name))?;
    }
    for name in ["bin/setenv.bash", "set_env.sh"] {
        let script = tree.join(name);
        let up = if name.contains('/') { "/.." } else { "" };
        fs::write(&script, ENVIRONMENT.replace("/..", up))?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    }
    fs::write(tree.join("cmake/ascendc.cmake"), KERNELS)?;
    fs::write(tree.join("cmake/kernels.cpp"), KERNEL_FUNCTIONS)?;
    for name in TARGETS {
        let directory = lib.join("cmake").join(name);
        fs::create_dir_all(&directory)?;
        fs::write(directory.join(format!("{name}-config.cmake")), TARGET.replace("@NAME@", name))?;
    }
    let architecture = format!("{}-linux", std::env::consts::ARCH);
    for part in PARTS.iter().copied().chain([architecture.as_str()]) {
        let part = tree.join(part);
        fs::create_dir_all(&part)?;
        link("../include", &part.join("include"))?;
        link("../lib64", &part.join("lib64"))?;
    }
    Ok(())
}

/// Copies a file over another: by renaming, so that a program which has the old one loaded keeps
/// it.
fn replace(from: &Path, to: &Path) -> io::Result<()> {
    let new = to.with_extension("new");
    fs::copy(from, &new)?;
    fs::rename(new, to)
}

/// Makes a symbolic link, in place of an older one.
fn link(to: &str, at: &Path) -> io::Result<()> {
    match fs::symlink_metadata(at) {
        Ok(old) if old.is_symlink() => fs::remove_file(at)?,
        _ => {}
    }
    symlink(to, at)
}
