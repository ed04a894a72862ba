//! The header, as a C and a C++ compiler read it: every number and every layout is that of the
//! facts.

use crate::support::facts::{FACTS, HAL, text};
use crate::support::{Linked, compile_file, has_compiler, tree};
use ascendcl::header;
use serde_json::Value;
use std::fmt::Write;
use std::process::Command;

/// A program that does not compile if the header says something else than the facts.
fn assertions() -> String {
    // In an order in which no file comes first in all programs.
    let mut program = String::new();
    for file in header::FORWARDING.iter().rev().copied().chain([header::MAIN]) {
        writeln!(program, "#include \"acl/{file}\"").unwrap();
    }
    writeln!(program, "#include \"{}\"", header::HAL).unwrap();
    program += "#ifdef __cplusplus\n#define SAME(a, b) static_assert((a) == (b), #a)\n#else\n\
             #define SAME(a, b) _Static_assert((a) == (b), #a)\n#endif\n";
    let mut same = |name: &str, value: &Value| writeln!(program, "SAME({name}, {value});").unwrap();
    for facts in [&*FACTS, &*HAL] {
        let list = |name: &str| facts[name].as_array().unwrap();
        let values = list("enums").iter().flat_map(|enumeration| enumeration["values"].as_array().unwrap());
        for number in list("error_codes").iter().chain(list("macros")).chain(values) {
            same(text(&number[0]), &number[1]);
        }
        for layout in list("structs") {
            let name = text(&layout["name"]);
            same(&format!("sizeof({name})"), &layout["size"]);
            for field in layout["fields"].as_array().unwrap() {
                let member = text(&field[1]);
                same(&format!("offsetof({name}, {member})"), &field[2]);
                same(&format!("sizeof((({name} *)0)->{member})"), &field[3]);
            }
        }
    }
    program + "int main(void) { return 0; }\n"
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

#[test]
fn every_standard_of_c_and_cpp_takes_the_header_without_a_warning() {
    let compile = |compiler: &str, standard: &str, source: &str| {
        let source = tree().join(source);
        std::fs::write(&source, "#include <acl/acl.h>\n#include <acl/acl_rt.h>\n#include <ascend_hal.h>\n").unwrap();
        let mut command = Command::new(compiler);
        command.args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", standard, "-I"]);
        let output = command.arg(tree().join("include")).arg(&source).output().unwrap();
        assert!(output.status.success(), "{standard}: {}", String::from_utf8_lossy(&output.stderr));
    };
    for standard in ["-std=c89", "-std=c99", "-std=c11", "-std=c17"] {
        compile("cc", standard, "standards.c");
    }
    if has_compiler("c++") {
        for standard in ["-std=c++98", "-std=c++11", "-std=c++17", "-std=c++20"] {
            compile("c++", standard, "standards.cpp");
        }
    }
}
