//! What every program of the project does with `--help`, `--version` and a typing error.

use super::{PROGRAM, run, run_program, stderr, stdout};

/// The help text of a command.
pub fn help(path: &[&str]) -> String {
    let arguments: Vec<&str> = path.iter().copied().chain(["--help"]).collect();
    let output = run(PROGRAM, &arguments);
    assert!(output.status.success(), "{arguments:?}");
    stdout(&output)
}

/// The commands that a help text lists.
pub fn commands(help: &str) -> Vec<String> {
    let list = help.split_once("Commands:\n").map_or("", |(_, rest)| rest.split("\n\n").next().unwrap());
    let names =
        list.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next().filter(|name| !name.is_empty()));
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

/// Every command has help with an example that names one of these programs.
pub fn assert_every_command_has_an_example(names: &[&str]) {
    let mut paths: Vec<Vec<String>> = commands(&help(&[])).into_iter().map(|name| vec![name]).collect();
    assert!(paths.len() >= 5, "{paths:?}");
    while let Some(path) = paths.pop() {
        let words: Vec<&str> = path.iter().map(String::as_str).collect();
        let text = help(&words);
        let inner = commands(&text);
        if inner.is_empty() {
            let (_, example) = text.split_once("Example").unwrap_or_else(|| panic!("{words:?} has no example: {text}"));
            assert!(names.iter().any(|name| example.contains(name)), "{words:?}: {text}");
        }
        for name in inner {
            paths.push(path.iter().cloned().chain([name]).collect());
        }
    }
}

/// The program prints its name and version.
pub fn assert_version(name: &str) {
    let output = run_program(&["--version"]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(stdout(&output), format!("{name} {}\n", env!("CARGO_PKG_VERSION")));
}

/// A command that is not there is refused with exit status 2.
pub fn assert_unknown_commands_are_refused() {
    for arguments in [&["prob"][..], &[], &["--nothing"]] {
        let output = run_program(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!stderr(&output).is_empty(), "{arguments:?}");
    }
}
