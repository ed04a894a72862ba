//! C programs of `tests/c`, each compiled once for a test binary.

use super::{run, stderr};
use std::collections::BTreeSet;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Compiles a program and returns its path; `None`, and says so, without a C compiler.
pub fn compile(name: &str, options: &[&str]) -> Option<String> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no C compiler here, so {name}.c was not run");
        return None;
    }
    let source = format!("{}/tests/c/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let program = format!("{}/{}-{name}{}", env!("CARGO_TARGET_TMPDIR"), env!("CARGO_CRATE_NAME"), options.concat());
    static COMPILED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // Locked while it compiles: a test must not run what another is still writing.
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if compiled.insert(program.clone()) {
        let output = run(&compiler, &[options, &["-Wall", "-Werror", "-pthread", "-o", &program, &source]].concat());
        assert!(output.status.success(), "{}", stderr(&output));
    }
    Some(program)
}
