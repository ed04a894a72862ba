//! What the library exports is what the facts say: every name, and every argument as C passes it.

use crate::support::facts::{functions, list, served, text};
use crate::support::{Linked, compile_file, library, tree};
use ascendcl::absent;
use ascendcl::exports::{CODES, ERRORS, HAL, HAL_OTHER, OTHER, Signature};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Command;

#[test]
fn the_shared_library_exports_the_names_of_the_facts_and_no_others() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let symbols = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<&str> = symbols.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    let functions = functions().map(|function| text(&function["name"]));
    let others = list("linked").iter().chain(list("loaded")).map(text);
    let named: BTreeSet<&str> = functions.chain(others).collect();
    let missing: Vec<&&str> = named.difference(&exported).collect();
    let more: Vec<&&str> = exported.difference(&named).collect();
    assert!(missing.is_empty() && more.is_empty(), "missing: {missing:?}; not in the facts: {more:?}");
}

#[test]
fn the_shared_library_has_the_name_that_programs_look_for() {
    let output = Command::new("objdump").arg("-p").arg(library()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let name = text.lines().find_map(|line| line.trim().strip_prefix("SONAME")).unwrap_or_default();
    assert_eq!(name.trim(), "libascendcl.so");
}

/// A Rust type as the facts name it.
fn passed(kind: &str) -> &str {
    match kind.replace(' ', "").as_str() {
        "i32" => "i32",
        "u8" => "u8",
        "hal::ShareAttribute" => "record",
        "u32" => "u32",
        "i64" => "i64",
        "u64" => "u64",
        "usize" => "usize",
        "Text" | "Address" | "Handle" | "Function" => "ptr",
        kind if kind.starts_with("Out<") || kind.starts_with("In<") || kind.starts_with('*') => "ptr",
        other => panic!("{other}"),
    }
}

#[test]
fn every_argument_is_passed_as_the_facts_say() {
    let facts: BTreeMap<&str, &Value> = functions().map(|function| (text(&function["name"]), function)).collect();
    let signatures: Vec<&Signature> = [CODES, OTHER, ERRORS, HAL, HAL_OTHER].into_iter().flatten().collect();
    for signature in &signatures {
        let fact = facts[signature.name];
        let expected: Vec<&str> =
            fact["params"].as_array().unwrap().iter().map(|parameter| text(&parameter[2])).collect();
        let own: Vec<&str> = signature.parameters.iter().map(|kind| passed(kind)).collect();
        assert_eq!(own, expected, "{}", signature.name);
        assert_eq!(passed(signature.returns), text(&fact["returns"][1]), "{}", signature.name);
    }
    // The one with variable arguments is written by hand.
    let exported: BTreeSet<&str> = signatures.iter().map(|signature| signature.name).chain(["aclAppLog"]).collect();
    assert_eq!(exported, served().collect());
}

#[test]
fn every_absent_function_returns_nothing_to_use_and_is_named_by_its_message() {
    // Declared without arguments, which they do not read.
    let mut declarations = String::from("extern const char *aclGetRecentErrMsg(void);\n");
    let mut calls = String::new();
    for (names, returns, good) in [
        (absent::CODES, "int", "== 207000"),
        (absent::LINKED, "int", "== 207000"),
        (absent::POINTERS, "void *", "== NULL"),
        (absent::COUNTS, "size_t", "== 0"),
        (absent::UNDEFINED, "int", "== -1"),
        (absent::NOTHING, "void", ", 1"),
    ] {
        for name in names {
            writeln!(declarations, "extern {returns} {name}(void);").unwrap();
            writeln!(calls, "    check(\"{name}\", ({name}() {good}));").unwrap();
        }
    }
    let program = format!(
        "#include <stdio.h>\n#include <string.h>\n\n{declarations}\nstatic int wrong;\n\n\
         static void check(const char *name, int good)\n{{\n    const char *said = aclGetRecentErrMsg();\n    \
         if (!good || said == NULL || strncmp(said, name, strlen(name)) != 0) {{\n        \
         printf(\"%s: %s\\n\", name, said != NULL ? said : \"(nothing)\");\n        wrong = 1;\n    }}\n}}\n\n\
         int main(void)\n{{\n{calls}    return wrong;\n}}\n"
    );
    let source = tree().join("absent.c");
    std::fs::write(&source, program).unwrap();
    let output = Command::new(compile_file(&source, Linked::Dynamically).unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
