//! The header, as a C and a C++ compiler read it: every number and every layout is that of the
//! facts.

mod support;

use ascendcl::header;
use serde_json::Value;
use std::fmt::Write;
use support::{Linked, compile_file, tree};

/// A program that does not compile if the header says something else than the facts.
fn assertions() -> String {
    let facts: Value = serde_json::from_str(include_str!("facts/acl-abi.json")).unwrap();
    // In an order in which no file comes first in all programs.
    let mut text = String::new();
    for file in header::FORWARDING.iter().rev().copied().chain([header::MAIN]) {
        writeln!(text, "#include \"acl/{file}\"").unwrap();
    }
    text += "#ifdef __cplusplus\n#define SAME(a, b) static_assert((a) == (b), #a)\n#else\n\
             #define SAME(a, b) _Static_assert((a) == (b), #a)\n#endif\n";
    let mut same = |name: &str, value: &Value| writeln!(text, "SAME({name}, {value});").unwrap();
    for list in ["error_codes", "macros"] {
        facts[list].as_object().unwrap().iter().for_each(|(name, value)| same(name, value));
    }
    for values in facts["enums"].as_object().unwrap().values() {
        values.as_object().unwrap().iter().for_each(|(name, value)| same(name, value));
    }
    for (name, layout) in facts["structs"].as_object().unwrap() {
        same(&format!("sizeof({name})"), &layout["size"]);
        for field in layout["fields"].as_array().unwrap() {
            let member = field[0].as_str().unwrap();
            same(&format!("offsetof({name}, {member})"), &field[2]);
            same(&format!("sizeof((({name} *)0)->{member})"), &field[3]);
        }
    }
    text + "int main(void) { return 0; }\n"
}

#[test]
fn a_c_compiler_finds_the_numbers_and_layouts_of_the_facts() {
    let source = tree().join("assertions.c");
    std::fs::write(&source, assertions()).unwrap();
    assert!(compile_file(&source, Linked::Dynamically).is_some());
}

#[test]
fn a_cpp_compiler_finds_the_numbers_and_layouts_of_the_facts() {
    let source = tree().join("assertions.cpp");
    std::fs::write(&source, assertions()).unwrap();
    compile_file(&source, Linked::Dynamically);
}
