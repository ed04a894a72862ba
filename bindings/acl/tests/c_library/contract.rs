//! What programs rely on is held by a test: a comment `promise: function: what` stands before the
//! call that fails if it changes, in `misuse/rows.txt` or in a program of `c/`.

use crate::support::facts::served;
use std::collections::BTreeSet;
use std::path::Path;

/// The files with promises, and what they say.
fn files() -> Vec<(String, String)> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let programs = std::fs::read_dir(tests.join("c")).unwrap().map(|entry| entry.unwrap().path());
    let paths = programs.chain([tests.join("misuse/rows.txt")]);
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    paths.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), read(&path))).collect()
}

/// The functions of a line that is a promise.
fn promise(line: &str) -> Option<Vec<&str>> {
    let promise = line.trim_start().strip_prefix("/* promise: ").or_else(|| line.strip_prefix("# promise: "))?;
    let (functions, what) = promise.split_once(": ").unwrap_or_else(|| panic!("no function: {line}"));
    assert!(!what.trim_end_matches("*/").trim().is_empty(), "{line}");
    Some(functions.split(", ").collect())
}

#[test]
fn every_promise_stands_before_a_line_of_a_test_that_calls_its_functions() {
    let run = include_str!("programs.rs");
    for (file, text) in files() {
        let lines: Vec<&str> = text.lines().collect();
        for (index, functions) in lines.iter().enumerate().filter_map(|(index, line)| Some((index, promise(line)?))) {
            let place = format!("{file}, line {}", index + 1);
            assert!(file == "rows.txt" || run.contains(&format!("\"{file}\"")), "{place} is run by no test");
            let next = lines[index..].iter().find(|line| promise(line).is_none()).map_or("", |line| line.trim());
            assert!(!next.is_empty() && !next.starts_with(['#', '}']), "{place}: no call follows");
            for function in functions {
                assert!(text.contains(&format!("{function}(")), "{place}: {file} does not call {function}");
            }
        }
    }
}

#[test]
fn every_function_that_is_served_has_a_promise_and_no_other() {
    let files = files();
    let promised: BTreeSet<&str> =
        files.iter().flat_map(|(_, text)| text.lines()).filter_map(promise).flatten().collect();
    assert_eq!(promised, served().collect());
}
