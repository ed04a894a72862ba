//! The library is built in floors: a module names only modules below its own floor. The nouns own
//! each other, so they are the one floor whose modules may name each other.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The modules of `src/`, from the lowest floor to the highest.
const FLOORS: &[&[&str]] = &[
    &["range_map"],
    &["segregated_fit"],
    &["bytes"],
    &["id"],
    &["kind"],
    &["error"],
    &["trace"],
    &["fork"],
    &["slots"],
    &["deadline"],
    &["signals"],
    &["driver"],
    &["discovery"],
    &["device_process"],
    &["session", "device", "physical", "reserve", "mapping", "copy", "share"],
    &["pool"],
];

/// What the root re-exports, and the module that each name stands for.
const RE_EXPORTS: &[(&str, &str)] = &[
    ("Bytes", "bytes"),
    ("Error", "error"),
    ("Failed", "error"),
    ("Result", "error"),
    ("Capabilities", "device"),
    ("Device", "device"),
    ("Host", "device"),
    ("HostView", "mapping"),
    ("Mapping", "mapping"),
    ("PhysicalMemory", "physical"),
    ("Reservation", "reserve"),
    ("Session", "session"),
];

fn floor(module: &str) -> Option<usize> {
    let named = RE_EXPORTS.iter().find(|(name, _)| *name == module).map_or(module, |(_, home)| home);
    FLOORS.iter().position(|floor| floor.contains(&named))
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The first segments of all paths that start at the crate's root, in a line of code.
fn named(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    code.match_indices("crate::").filter_map(|(at, word)| {
        // Not the end of another crate's name.
        let whole = !code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_');
        let rest = &code[at + word.len()..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        whole.then_some(&rest[..end])
    })
}

/// Calls `look` with file, line number, module and text of each line of the library's code.
fn each_line(mut look: impl FnMut(&str, usize, &str, &str)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    assert!(files.len() > 30, "the sources are where they were");
    for path in files {
        let file = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        let module = file.split(['/', '.']).next().unwrap().to_owned();
        let text = fs::read_to_string(&path).unwrap();
        // Unit tests may look up and down.
        for (number, line) in text.lines().enumerate().take_while(|(_, line)| *line != "#[cfg(test)]") {
            look(&file, number + 1, &module, line);
        }
    }
}

#[test]
fn no_module_names_one_of_a_higher_floor() {
    let mut wrong = Vec::new();
    each_line(|file, number, module, line| {
        if module == "lib" {
            return;
        }
        let Some(own) = floor(module) else {
            wrong.push(format!("src/{file}: module {module} stands on no floor"));
            return;
        };
        for name in named(line) {
            match floor(name) {
                Some(other) if other > own => {
                    wrong.push(format!("src/{file}:{number}: {module} names {name}, a floor above: {}", line.trim()));
                }
                Some(other) if other == own && name != module && FLOORS[own].len() == 1 => {
                    wrong.push(format!("src/{file}:{number}: {module} names {name} on its own floor"));
                }
                Some(_) => {}
                None => wrong.push(format!("src/{file}:{number}: crate::{name} stands on no floor: {}", line.trim())),
            }
        }
    });
    wrong.sort();
    wrong.dedup();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_the_driver_floor_uses_structs_of_the_abi_and_calls_ioctl() {
    let mut wrong = Vec::new();
    let mut sites = BTreeMap::<String, usize>::new();
    // A `use` that is spread over lines is looked at as one.
    let mut open = String::new();
    each_line(|file, number, module, line| {
        let code = line.split("//").next().unwrap_or_default();
        if code.contains("SYS_ioctl") || code.contains("libc::ioctl") {
            *sites.entry(file.to_owned()).or_default() += 1;
        }
        open += code.trim();
        if open.contains("use ") && !open.contains(';') {
            return;
        }
        let statement = std::mem::take(&mut open);
        let Some((_, path)) = statement.split_once("ascend_ioctl::") else { return };
        if module == "driver" {
            return;
        }
        if path == "svm;" || path.contains("svm::{self") {
            wrong.push(format!("src/{file}:{number}: all of svm: {statement}"));
        }
        // A constant is in capitals; the generation and the names of commands have no layout.
        let names = path.split(|c: char| !c.is_alphanumeric() && c != '_');
        for name in names.filter(|name| name.chars().next().is_some_and(char::is_uppercase)) {
            let constant = name.chars().all(|c| c.is_uppercase() || c.is_numeric() || c == '_');
            if !constant && !["Generation", "Op"].contains(&name) {
                wrong.push(format!("src/{file}:{number}: {name}: {statement}"));
            }
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(sites, BTreeMap::from([("driver.rs".to_owned(), 1)]), "one place calls ioctl(2)");
}

#[test]
fn threads_are_started_in_one_place_that_blocks_their_signals() {
    let mut places = Vec::new();
    each_line(|file, _, _, line| {
        let code = line.split("//").next().unwrap_or_default();
        if ["thread::spawn", "thread::Builder", "thread::scope", "scope.spawn"].iter().any(|start| code.contains(start))
        {
            places.push(file.to_owned());
        }
    });
    assert_eq!(places, ["signals.rs"]);
}

#[test]
fn every_file_has_a_name_of_its_own() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let mut names: Vec<_> = files.iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    names.sort();
    let twice: Vec<_> = names.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| &pair[0]).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

#[test]
fn every_type_has_a_name_of_its_own() {
    let mut places = BTreeMap::<String, Vec<String>>::new();
    each_line(|file, number, _, line| {
        let line = line.trim_start();
        let visibility = ["pub(crate) ", "pub(super) ", "pub "].into_iter().find(|word| line.starts_with(word));
        let item = &line[visibility.map_or(0, str::len)..];
        let keyword = ["struct ", "enum ", "union ", "trait ", "type "].into_iter().find(|word| item.starts_with(word));
        let Some(rest) = keyword.map(|keyword| &item[keyword.len()..]) else { return };
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        // Associated types have the names that their traits give them.
        let associated = keyword == Some("type ") && ["Err", "Output", "Target", "Item"].contains(&&rest[..end]);
        if !associated && rest.starts_with(char::is_uppercase) {
            places.entry(rest[..end].to_owned()).or_default().push(format!("src/{file}:{number}"));
        }
    });
    assert!(places.len() > 100, "the types are found: {}", places.len());
    places.retain(|_, places| places.len() > 1);
    assert!(places.is_empty(), "{places:#?}");
}

#[test]
fn targets_other_than_64_bit_linux_are_refused_in_a_sentence() {
    let library = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let at = library.find("#[cfg(not(all(target_os").unwrap();
    let rule = library[at..].split_inclusive(';').next().unwrap();
    // Without a standard library: those of the other targets are rarely installed.
    let program = format!(
        "#![feature(no_core, rustc_attrs)]\n#![allow(internal_features, unused_macros)]\n#![no_core]\n\
         #[rustc_builtin_macro]\nmacro_rules! compile_error {{ ($text:expr) => {{}}; }}\n{rule}"
    );
    let directory = std::env::temp_dir().join(format!("ascend-vmm-targets-{}", std::process::id()));
    fs::create_dir(&directory).unwrap();
    let source = directory.join("rule.rs");
    fs::write(&source, program).unwrap();
    let mut answers = Vec::new();
    for target in [
        "x86_64-unknown-linux-gnu",
        "aarch64-unknown-linux-musl",
        "i686-unknown-linux-gnu",
        "aarch64-apple-darwin",
        "x86_64-pc-windows-msvc",
    ] {
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
        rustc.args(["--crate-type", "lib", "--emit", "metadata", "--target", target]).current_dir(&directory);
        match rustc.arg(&source).env("RUSTC_BOOTSTRAP", "1").output() {
            Ok(output) => {
                let errors = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(output.status.success(), errors.is_empty(), "{target}: {errors}");
                answers.push(errors.lines().next().unwrap_or("taken").to_owned());
            }
            Err(error) => println!("SKIPPED: {target}, as rustc cannot be started ({error})"),
        }
    }
    fs::remove_dir_all(&directory).unwrap();
    let refused = "error: the Ascend driver exists for 64-bit Linux only";
    assert!(answers.is_empty() || answers == ["taken", "taken", refused, refused, refused], "{answers:#?}");
}
