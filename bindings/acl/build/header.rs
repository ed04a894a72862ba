//! The C headers.

use crate::{list, text as word};
use serde_json::Value;
use std::fmt::{self, Write};

/// The beginnings of the two headers.
pub const ACL: &str = "\
/* The C interface of ascend-acl: memory of Ascend NPUs without CANN.
 *
 * Written from bindings/acl/facts/acl-abi.json; change that, not this file. docs/cann.md says what
 * programs can expect.
 */
#ifndef ASCEND_ACL_ACL_H
#define ASCEND_ACL_ACL_H

#define ACL_FUNC_VISIBILITY
";
pub const HAL: &str = "\
/* Names of the driver's own library, by ascend-acl.
 *
 * Written from bindings/acl/facts/hal-abi.json; change that, not this file. docs/cann.md says what
 * programs can expect.
 */
#ifndef ASCEND_ACL_ASCEND_HAL_H
#define ASCEND_ACL_ASCEND_HAL_H
";

const BEGINNING: &str = "
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern \"C\" {
#endif

";

const END: &str = "
#ifdef __cplusplus
}
#endif

#endif
";

/// The classes of functions, and what stands behind them.
const CLASSES: [(&str, &str); 3] = [
    ("memory", "served by the driver"),
    ("thin", "objects and settings in user space"),
    ("absent", "by name only, they answer 207000, NULL, 0 or nothing, by what they return"),
];

/// The text of a header.
pub fn text(facts: &Value, beginning: &str) -> Result<String, fmt::Error> {
    let mut text = format!("{beginning}{BEGINNING}");
    for names in ["error_codes", "macros"] {
        writeln!(text)?;
        for number in list(facts, names) {
            let long = if number[1].as_i64() > Some(i32::MAX.into()) { "UL" } else { "" };
            writeln!(text, "#define {} {}{long}", word(&number[0]), number[1])?;
        }
    }
    for enumeration in list(facts, "enums") {
        let (name, values) = (word(&enumeration["name"]), list(enumeration, "values"));
        let lines: Vec<String> = values.iter().map(|value| format!("    {} = {}", word(&value[0]), value[1])).collect();
        // The oldest standards take no comma behind the last.
        writeln!(text, "\ntypedef enum {name} {{\n{}\n}} {name};", lines.join(",\n"))?;
    }
    writeln!(text)?;
    for name in list(facts, "opaque").iter().map(word) {
        writeln!(text, "typedef struct {name} {name};")?;
    }
    writeln!(text)?;
    for kind in list(facts, "types") {
        writeln!(text, "typedef {};", declaration(word(&kind[1]), word(&kind[0])))?;
    }
    for layout in list(facts, "structs") {
        let (keyword, name) = (word(&layout["kind"]), word(&layout["name"]));
        writeln!(text, "\ntypedef {keyword} {name} {{")?;
        for field in list(layout, "fields") {
            writeln!(text, "    {};", declaration(word(&field[0]), word(&field[1])))?;
        }
        writeln!(text, "}} {name};")?;
    }
    for (class, meaning) in CLASSES {
        let functions: Vec<&Value> =
            list(facts, "functions").iter().filter(|it| it["class"] == class && is_of_header(it)).collect();
        if !functions.is_empty() {
            writeln!(text, "\n/* {class}: {meaning} */")?;
        }
        for function in functions {
            let parameters = list(function, "params").iter();
            let parameters: Vec<String> = parameters.map(|it| declaration(word(&it[0]), word(&it[1]))).collect();
            // Without parameters C wants to be told so.
            let parameters = if parameters.is_empty() { "void".to_owned() } else { parameters.join(", ") };
            writeln!(text, "{}({parameters});", declaration(word(&function["returns"][0]), word(&function["name"])))?;
        }
    }
    Ok(text + END)
}

/// Whether a function is declared. Those of the profiler and of the runtime's inner layer are not:
/// programs that call them have declarations of their own.
fn is_of_header(function: &Value) -> bool {
    !["Msprof", "rt"].iter().any(|of| word(&function["name"]).starts_with(of))
}

/// A C declaration of a name with a type: `char[4]` and `void (*)(void)` go around the name, and
/// `...` has none.
fn declaration(kind: &str, name: &str) -> String {
    if let Some((before, after)) = kind.split_once("(*)") {
        return format!("{before}(*{name}){after}");
    }
    let (kind, array) = kind.find('[').map_or((kind, ""), |at| kind.split_at(at));
    let space = if kind.ends_with('*') || name.is_empty() { "" } else { " " };
    format!("{kind}{space}{name}{array}")
}
