//! `ascend-vmm completions` and `ascend-vmm man`: what is installed beside the program.

use crate::support::help::{commands, help};
use crate::support::{PROGRAM, refusal, run_program, stderr, stdout};
use std::path::Path;
use std::process::Command;

/// What a command prints, which must succeed.
#[track_caller]
fn printed(arguments: &[&str]) -> String {
    let output = run_program(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    stdout(&output)
}

/// What bash offers for the last word of a command line.
fn completed(line: &str) -> Vec<String> {
    let script = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("completions-{}.bash", line.replace(' ', "-")));
    std::fs::write(&script, printed(&["completions", "bash"])).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    let before = words.len().checked_sub(2).map_or("", |at| words[at]);
    let ask = format!(
        "source '{}'; COMP_WORDS=({line}); COMP_CWORD={}; \
         function=$(complete -p ascend-vmm | sed 's/.* -F \\([^ ]*\\) .*/\\1/'); \
         $function ascend-vmm '{}' '{before}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        script.display(),
        words.len() - 1,
        words[words.len() - 1],
    );
    let output = Command::new("bash").args(["--norc", "-c", &ask]).output().unwrap();
    assert_eq!(stderr(&output), "", "{line}");
    stdout(&output).split_whitespace().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_options() {
    assert_eq!(completed("ascend-vmm pro"), ["probe"]);
    assert_eq!(completed("ascend-vmm emulate --dri"), ["--driver"]);
    assert!(completed("ascend-vmm selftest-").is_empty(), "the processes of a command are not for people");
}

#[test]
fn there_are_completions_for_every_shell_that_is_offered() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = printed(&["completions", shell]);
        assert!(script.contains("ascend-vmm") && script.contains("probe"), "{shell}: {script}");
        assert!(!script.contains("demo-exporter"), "{shell}");
    }
    assert!(refusal(&["completions", "command.com"]).contains("bash"));
}

#[test]
fn the_manual_page_names_every_command_and_each_has_its_own() {
    let page = printed(&["man"]).replace('\\', "");
    assert!(page.contains(".TH ascend-vmm 1"), "{page}");
    let names = commands(&help(&[]));
    assert!(names.len() >= 7, "{names:?}");
    for name in names {
        assert!(page.contains(&format!("ascend-vmm-{name}(1)")), "{name}: {page}");
        let page = printed(&["man", &name]).replace('\\', "");
        let options = help(&[&name]);
        let long = options.lines().filter_map(|line| line.split_once("--").map(|(_, rest)| rest));
        for option in long.filter_map(|rest| rest.split([' ', '<', '.', '`', ')', ',']).next()) {
            assert!(page.contains(&format!("--{option}")), "{name} --{option}: {page}");
        }
    }
    assert!(refusal(&["man", "demo-exporter"]).contains("no command"), "it is not for people");
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let line = format!("'{PROGRAM}' completions zsh | true; '{PROGRAM}' man | head -c 1 >/dev/null");
    let output = Command::new("bash").args(["-c", &line]).output().unwrap();
    assert_eq!(stderr(&output), "");
}
