//! What programs rely on is held by a test: `contract.txt` names it for each function.

use ascendcl::table::{Class, FUNCTIONS};
use std::collections::BTreeSet;
use std::path::Path;

/// The functions of a line, its file, and the text that stands there.
fn lines() -> impl Iterator<Item = (Vec<&'static str>, &'static str, &'static str)> {
    include_str!("contract.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(|line| {
        let mut parts = line.splitn(3, " | ");
        let (Some(what), Some(file), Some(text)) = (parts.next(), parts.next(), parts.next()) else {
            panic!("not three parts: {line}");
        };
        let (functions, what) = what.split_once(": ").unwrap_or_else(|| panic!("no function: {line}"));
        assert!(!what.is_empty() && !text.is_empty(), "{line}");
        (functions.split(", ").collect(), file, text)
    })
}

#[test]
fn every_line_of_the_contract_is_held_by_a_call_in_a_test() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let run = include_str!("programs.rs");
    for (functions, file, text) in lines() {
        let held = if file == "misuse" {
            let rows = include_str!("misuse/rows.txt");
            assert!(rows.lines().any(|row| row == text), "no such row: {text}");
            rows.to_owned()
        } else {
            assert!(run.contains(&format!("\"{file}\"")), "{file} is run by no test");
            let program = std::fs::read_to_string(here.join("c").join(file)).unwrap();
            assert!(program.contains(text), "not in {file}: {text}");
            program
        };
        for function in functions {
            assert!(held.contains(&format!("{function}(")), "{file} does not call {function}");
        }
    }
}

#[test]
fn the_contract_names_every_function_that_is_served_and_no_other() {
    let named: BTreeSet<&str> = lines().flat_map(|(functions, ..)| functions).collect();
    let served = FUNCTIONS.iter().filter(|function| function.class != Class::Absent);
    assert_eq!(named, served.map(|function| function.name()).collect());
}
