//! Writes what is derived from `facts`: the C headers, and the functions that exist by name only.
//!
//! The shared library gets the name under which programs look for it, and stays when a program
//! unloads it: its threads go on, and the driver's session is the process's.

mod header;

use serde_json::Value;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

const FACTS: &str = "facts/acl-abi.json";
/// The driver's own library.
const HAL: &str = "facts/hal-abi.json";

fn main() -> Result<(), Box<dyn Error>> {
    // Not `rustc-cdylib-link-arg`: cargo passes that on to every shared library that contains this
    // one, and the loader would take the Python module for libascendcl.so.
    println!("cargo:rustc-link-arg=-Wl,-soname,libascendcl.so");
    println!("cargo:rustc-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-changed={FACTS}");
    println!("cargo:rerun-if-changed={HAL}");
    let facts: Value = serde_json::from_str(&fs::read_to_string(FACTS)?)?;
    let directory = env::var("OUT_DIR")?;
    fs::write(Path::new(&directory).join("acl.h"), header::text(&facts, header::ACL)?)?;
    let hal: Value = serde_json::from_str(&fs::read_to_string(HAL)?)?;
    fs::write(Path::new(&directory).join("ascend_hal.h"), header::text(&hal, header::HAL)?)?;
    fs::write(Path::new(&directory).join("absent.rs"), absent(&facts)?)?;
    Ok(())
}

/// A list of the facts.
fn list<'a>(facts: &'a Value, name: &str) -> &'a [Value] {
    facts[name].as_array().unwrap_or_else(|| panic!("{FACTS}: there is no list {name:?} in {facts}"))
}

/// A text of the facts.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{FACTS}: {value} is no text"))
}

/// Functions that exist by name only, as lists for the macro of `src/absent.rs`: by what they
/// answer, which programs must not take for a success.
fn absent(facts: &Value) -> Result<String, Box<dyn Error>> {
    let mut lists: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for function in list(facts, "functions").iter().filter(|function| function["class"] == "absent") {
        let answer = match (text(&function["returns"][0]), text(&function["returns"][1])) {
            ("aclError", "i32") => "CODES -> i32 = code::RT_NOT_SUPPORTED",
            // An enumeration whose first value is "undefined".
            (_, "i32") => "UNDEFINED -> i32 = -1",
            (_, "ptr") => "POINTERS -> *mut c_void = null_mut()",
            (_, "usize") => "COUNTS -> usize = 0",
            (_, "void") => "NOTHING -> () = ()",
            other => return Err(format!("{FACTS}: {} returns {other:?}", function["name"]).into()),
        };
        lists.entry(answer).or_default().push(text(&function["name"]));
    }
    lists.insert("LINKED -> i32 = code::RT_NOT_SUPPORTED", list(facts, "linked").iter().map(text).collect());
    let mut lines = String::from("absent! {\n");
    for (answer, names) in lists {
        writeln!(lines, "    {answer}; [{}]", names.join(" "))?;
    }
    Ok(lines + "}\n")
}
