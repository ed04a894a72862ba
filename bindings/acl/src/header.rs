//! The C header, written from the [table](crate::table).
//!
//! All names stand in `acl/acl.h`. The other names under which programs include them are one-line
//! files, so that any mixture of includes declares each name once.

use crate::table::{ENUMS, ERRORS, FUNCTIONS, Field, Function, HANDLES, MACROS, OPAQUE, STRUCTS, Struct};
use std::fmt::Write;

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

const BEGINNING: &str = "\
/* The C interface of ascend-acl: memory of Ascend NPUs without CANN.
 *
 * Written from the table of functions in bindings/acl/src/table.rs; change that, not this file.
 * docs/cann.md says what stands behind each function.
 */
#ifndef ASCEND_ACL_ACL_H
#define ASCEND_ACL_ACL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern \"C\" {
#endif

#define ACL_FUNC_VISIBILITY
";

const END: &str = "
#ifdef __cplusplus
}
#endif

#endif
";

/// The text of a file that forwards to [`MAIN`], by its path below `acl/`.
pub fn forwarding(path: &str) -> String {
    let up = if path.contains('/') { "../" } else { "" };
    format!("#include \"{up}{MAIN}\"\n")
}

/// The text of [`MAIN`].
pub fn text() -> String {
    let mut text = BEGINNING.to_owned();
    write_all(&mut text);
    text + END
}

/// Lines go to a `String`, which takes all of them.
fn write_all(text: &mut String) {
    let mut line = |line: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{line}");
    };
    line(format_args!(""));
    for (name, value) in ERRORS {
        line(format_args!("#define {name} {value}"));
    }
    line(format_args!(""));
    for (name, value) in MACROS {
        line(format_args!("#define {name} {value}{}", if *value > i32::MAX as u64 { "UL" } else { "" }));
    }
    for enumeration in ENUMS {
        line(format_args!("\ntypedef enum {} {{", enumeration.name));
        for (index, (name, value)) in enumeration.values.iter().enumerate() {
            // The oldest standards take no comma behind the last.
            let comma = if index + 1 == enumeration.values.len() { "" } else { "," };
            line(format_args!("    {name} = {value}{comma}"));
        }
        line(format_args!("}} {};", enumeration.name));
    }
    line(format_args!(""));
    for name in OPAQUE {
        line(format_args!("typedef struct {name} {name};"));
    }
    line(format_args!(""));
    for (name, kind) in HANDLES {
        line(format_args!("typedef {};", declaration(kind, name)));
    }
    for Struct { name, union, fields, .. } in STRUCTS {
        let keyword = if *union { "union" } else { "struct" };
        line(format_args!("\ntypedef {keyword} {name} {{"));
        for Field { name, kind, .. } in *fields {
            line(format_args!("    {};", declaration(kind, name)));
        }
        line(format_args!("}} {name};"));
    }
    line(format_args!(""));
    for function in FUNCTIONS {
        line(format_args!("{};", prototype(function)));
    }
}

/// A prototype as C wants it: without parameters it says so.
fn prototype(function: &Function) -> String {
    function.prototype.replace("()", "(void)")
}

/// A C declaration of a name with a type: `char[4]` and `void (*)(void)` go around the name.
fn declaration(kind: &str, name: &str) -> String {
    if let Some((before, after)) = kind.split_once("(*)") {
        return format!("{before}(*{name}){after}");
    }
    let (kind, array) = match kind.find('[') {
        Some(at) => kind.split_at(at),
        None => (kind, ""),
    };
    let space = if kind.ends_with('*') { "" } else { " " };
    format!("{kind}{space}{name}{array}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_and_function_pointers_go_around_the_name() {
        assert_eq!(declaration("char[16]", "bytes"), "char bytes[16]");
        assert_eq!(declaration("void (*)(void *)", "callback"), "void (*callback)(void *)");
        assert_eq!(declaration("void *", "pointer"), "void *pointer");
        assert_eq!(declaration("int", "number"), "int number");
    }
}
