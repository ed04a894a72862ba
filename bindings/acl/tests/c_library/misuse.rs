//! Misuse, driven from data: `misuse/rows.txt` has a call and a code in each row. All rows become
//! one C program, which runs on every generation and leaves nothing in the driver.

use crate::support::facts::{list, text};
use crate::support::{Linked, assert_nothing_left, compile_file, plain, run, tree};
use ascend_emulator::Emulator;
use ascend_ioctl::Generation;
use serde_json::Value;
use std::fmt::Write;
use std::process::Command;

const ROWS: &str = include_str!("../misuse/rows.txt");

/// The states that sections name, in the order of their rows, and how the program gets there.
const SECTIONS: [(&str, &str); 5] = [
    ("no device", "section_0();"),
    ("device", "prepare(); section_1();"),
    (
        "other thread",
        "pthread_t thread; if (pthread_create(&thread, NULL, other_thread, NULL) != 0) { return 1; }\n    \
         pthread_join(thread, NULL);",
    ),
    (
        "child",
        "pid_t child = fork(); if (child == 0) { section_3(); _exit(wrong); }\n    \
         int status = 1; waitpid(child, &status, 0); wrong |= status != 0;",
    ),
    ("finalized", "MUST(aclFinalize()); section_4();"),
];

/// The rows with their line, section by section.
fn sections() -> Vec<Vec<(usize, &'static str, &'static str)>> {
    let mut sections: Vec<Vec<_>> = Vec::new();
    for (number, line) in ROWS.lines().enumerate() {
        if let Some(name) = line.strip_prefix('[') {
            assert_eq!(name.trim_end_matches(']'), SECTIONS[sections.len()].0, "line {}", number + 1);
            sections.push(Vec::new());
        } else if !line.is_empty() && !line.starts_with('#') {
            let (call, code) = line.rsplit_once(" = ").unwrap_or_else(|| panic!("line {}: {line}", number + 1));
            sections.last_mut().unwrap().push((number + 1, call, code));
        }
    }
    sections
}

fn program() -> String {
    let mut text = include_str!("../misuse/prelude.c").to_owned();
    for (index, rows) in sections().into_iter().enumerate() {
        writeln!(text, "\nstatic void section_{index}(void)\n{{").unwrap();
        for (line, call, code) in rows {
            let row = call.replace('\\', "\\\\").replace('"', "\\\"");
            writeln!(text, "    expect({line}, \"{row}\", {call}, {code});").unwrap();
        }
        text += "}\n";
    }
    text += "\nstatic void *other_thread(void *unused)\n{\n    section_2();\n    return unused;\n}\n";
    text += "\nint main(void)\n{\n";
    for (_, way) in SECTIONS {
        writeln!(text, "    {way}").unwrap();
    }
    text + "    return wrong;\n}\n"
}

#[test]
fn every_wrong_call_returns_the_vendors_code_and_a_sentence() {
    let source = tree().join("misuse.c");
    std::fs::write(&source, program()).unwrap();
    let Some(program) = compile_file(&source, Linked::Dynamically) else { return };
    for generation in Generation::ALL {
        let emulator = Emulator::start(plain(generation)).unwrap();
        run(&emulator, &mut Command::new(&program));
        assert_nothing_left(&emulator);
    }
}

#[test]
fn there_are_at_least_400_rows_and_every_function_of_memory_is_in_one() {
    let rows: Vec<&str> = sections().into_iter().flatten().map(|(_, call, _)| call).collect();
    assert!(rows.len() >= 400, "{}", rows.len());
    let is_of_memory = |function: &&Value| function["class"] == "memory" && function["returns"][0] == "aclError";
    let memory = list("functions").iter().filter(is_of_memory);
    let called = |name: &str| rows.iter().any(|row| row.strip_prefix(name).is_some_and(|rest| rest.starts_with('(')));
    let missing: Vec<&str> = memory.map(|function| text(&function["name"])).filter(|name| !called(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
