//! What the library exports is what the table says: every name, and every argument as C passes it.

mod support;

use ascendcl::absent;
use ascendcl::exports::{ANYWHERE, ERRORS, MEMORY, OTHER, Signature, THIN};
use ascendcl::table::{Class, FUNCTIONS, LINKED};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Command;
use support::{Linked, compile_file, tree};

#[test]
fn the_shared_library_exports_the_names_of_the_table_and_no_others() {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(support::library()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<&str> = text.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    let table: BTreeSet<&str> =
        FUNCTIONS.iter().map(|function| function.name()).chain(LINKED.iter().copied()).collect();
    let missing: Vec<&&str> = table.difference(&exported).collect();
    let more: Vec<&&str> = exported.difference(&table).collect();
    assert!(missing.is_empty() && more.is_empty(), "missing: {missing:?}; not in the table: {more:?}");
}

#[test]
fn the_shared_library_has_the_name_that_programs_look_for() {
    let output = Command::new("objdump").arg("-p").arg(support::library()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let name = text.lines().find_map(|line| line.trim().strip_prefix("SONAME")).unwrap_or_default();
    assert_eq!(name.trim(), "libascendcl.so");
}

/// A Rust type as the facts name it.
fn passed(kind: &str) -> &str {
    match kind.replace(' ', "").as_str() {
        "i32" => "i32",
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
    let facts: Value = serde_json::from_str(include_str!("facts/acl-abi.json")).unwrap();
    let facts: BTreeMap<&str, &Value> = facts["functions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|function| (function["name"].as_str().unwrap(), function))
        .collect();
    let word = |abi: &Value| abi.as_str().unwrap().split(' ').next().unwrap().to_owned();
    let signatures: Vec<&Signature> = [MEMORY, THIN, ANYWHERE, OTHER, ERRORS].into_iter().flatten().collect();
    for signature in &signatures {
        let fact = facts[signature.name];
        let expected: Vec<String> =
            fact["params"].as_array().unwrap().iter().map(|parameter| word(&parameter[2])).collect();
        let own: Vec<&str> = signature.parameters.iter().map(|kind| passed(kind)).collect();
        assert_eq!(own, expected, "{}", signature.name);
        assert_eq!(passed(signature.returns), word(&fact["returns"]["abi"]), "{}", signature.name);
    }
    // The one with variable arguments is written by hand.
    let served: BTreeSet<&str> = signatures.iter().map(|signature| signature.name).chain(["aclAppLog"]).collect();
    let table: BTreeSet<&str> =
        FUNCTIONS.iter().filter(|function| function.class != Class::Absent).map(|function| function.name()).collect();
    assert_eq!(served, table);
}

#[test]
fn memory_functions_are_in_the_list_of_memory_or_return_something_else_than_a_code() {
    let list: BTreeSet<&str> = MEMORY.iter().map(|signature| signature.name).chain(["aclrtGetSocName"]).collect();
    let table: BTreeSet<&str> =
        FUNCTIONS.iter().filter(|function| function.class == Class::Memory).map(|function| function.name()).collect();
    assert_eq!(list, table);
}

#[test]
fn absent_functions_answer_in_the_type_of_their_prototype() {
    let list = |returns: &str| match returns {
        "aclError" => absent::CODES,
        "void" => absent::NOTHING,
        "size_t" => absent::COUNTS,
        "aclFormat" | "aclDataType" => absent::UNDEFINED,
        _ => absent::POINTERS,
    };
    let mut seen = 0;
    for function in FUNCTIONS.iter().filter(|function| function.class == Class::Absent) {
        assert!(list(function.returns()).contains(&function.name()), "{}", function.prototype);
        seen += 1;
    }
    let lists = [absent::CODES, absent::NOTHING, absent::COUNTS, absent::UNDEFINED, absent::POINTERS];
    assert_eq!(seen, lists.iter().map(|list| list.len()).sum::<usize>());
    let linked: BTreeSet<&str> = absent::LINKED.iter().chain(absent::LOADED).copied().collect();
    assert_eq!(linked, LINKED.iter().copied().collect());
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
    let text = format!(
        "#include <stdio.h>\n#include <string.h>\n\n{declarations}\nstatic int wrong;\n\n\
         static void check(const char *name, int good)\n{{\n    const char *said = aclGetRecentErrMsg();\n    \
         if (!good || said == NULL || strncmp(said, name, strlen(name)) != 0) {{\n        \
         printf(\"%s: %s\\n\", name, said != NULL ? said : \"(nothing)\");\n        wrong = 1;\n    }}\n}}\n\n\
         int main(void)\n{{\n{calls}    return wrong;\n}}\n"
    );
    let source = tree().join("absent.c");
    std::fs::write(&source, text).unwrap();
    let output = Command::new(compile_file(&source, Linked::Dynamically).unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
