//! The table of complaints in docs/hosts.md: every row is what the command says on that host.

use crate::support::{PROGRAM, stderr, stdout};
use std::process::Command;

/// A row of the table.
#[derive(Debug)]
struct Row {
    host: String,
    command: String,
    says: String,
}

/// The rows of the table, from the documentation itself.
fn rows() -> Vec<Row> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/hosts.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (_, table) = text.split_once("| complaint | host | command | says |\n").expect("the table of complaints");
    let lines = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let code = |cell: &str| cell.trim().strip_prefix('`').and_then(|cell| cell.strip_suffix('`')).unwrap().to_owned();
    lines
        .map(|line| match line.trim_matches('|').split('|').collect::<Vec<_>>()[..] {
            [_, host, command, says] => Row { host: code(host), command: code(command), says: code(says) },
            _ => panic!("{line}"),
        })
        .collect()
}

/// Text with one space between its words, however it is broken into lines.
fn joined(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn every_complaint_in_the_documentation_is_answered_as_it_says() {
    let rows = rows();
    assert!(rows.len() > 20, "{rows:?}");
    for row in rows {
        let mut command = Command::new(PROGRAM);
        command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).env_remove("ASCEND_RT_VISIBLE_DEVICES");
        command.arg("emulate").args(row.host.split(' ')).args(["--", PROGRAM]);
        for word in row.command.split(' ') {
            match word.split_once('=') {
                Some((name, value)) => command.env(name, value),
                None => command.arg(word),
            };
        }
        let output = command.output().unwrap();
        let text = joined(&stdout(&output));
        assert!(text.contains(&joined(&row.says)), "{row:#?}\n{}\n{}", stdout(&output), stderr(&output));
    }
}
