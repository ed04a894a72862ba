//! What the tests of C programs share: a tree to build against, the compiler, and runs on the
//! emulated driver.

pub mod facts;

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator};
use ascend_ioctl::Generation;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// What takes longer hangs.
pub const PATIENCE: Duration = Duration::from_secs(100);

/// The directory with the built libraries: that of this test's own program.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// The shared library.
pub fn library() -> PathBuf {
    built().join(ascendcl::toolkit::LIBRARY)
}

/// The tree, written once by each test binary.
pub fn tree() -> &'static Path {
    static TREE: OnceLock<PathBuf> = OnceLock::new();
    TREE.get_or_init(|| {
        let name = std::env::current_exe().unwrap().file_name().unwrap().to_owned();
        let tree = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        ascendcl::toolkit::write(&tree, &library(), Some(&built().join(ascendcl::toolkit::ARCHIVE))).unwrap();
        tree
    })
}

/// How a program is linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Linked {
    Dynamically,
    /// Dynamically, and built with AddressSanitizer.
    WithSanitizer,
    Statically,
    /// Loads the library itself.
    Not,
}

/// Whether there is a compiler, or another program.
pub fn has_compiler(name: &str) -> bool {
    Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// A source file of `tests/c`, compiled against the tree; `None` without a compiler for it, which
/// is said.
pub fn compile(source: &str, linked: Linked) -> Option<PathBuf> {
    compile_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source), linked)
}

/// Any source file, compiled against the tree.
pub fn compile_file(source: &Path, linked: Linked) -> Option<PathBuf> {
    let plus = source.extension() == Some(OsStr::new("cpp"));
    let compiler = if plus { "c++" } else { "cc" };
    if !has_compiler(compiler) {
        assert!(plus, "there is no C compiler");
        eprintln!("SKIPPED: there is no C++ compiler here, so {} was not built", source.display());
        return None;
    }
    let name = format!("{}-{linked:?}", source.file_name().unwrap().to_string_lossy());
    let program = tree().join(name);
    // Two tests that use one program compile it once.
    static COMPILED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if compiled.contains(&program) {
        return Some(program);
    }
    let mut command = Command::new(compiler);
    command.args([
        "-g",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        "-pthread",
        if plus { "-std=c++17" } else { "-std=c11" },
    ]);
    command.arg("-D_GNU_SOURCE").arg("-I").arg(tree().join("include")).arg("-o").arg(&program).arg(source);
    let libraries = tree().join("lib64");
    match linked {
        Linked::Dynamically | Linked::WithSanitizer => {
            if linked == Linked::WithSanitizer {
                command.arg("-fsanitize=address");
            }
            command.arg("-L").arg(&libraries).arg("-lascendcl");
            // A path that LD_LIBRARY_PATH does not override: Cargo sets it for tests, to a
            // directory with the library of an earlier `cargo build`.
            command.arg(format!("-Wl,--disable-new-dtags,-rpath,{}", libraries.display()));
        }
        Linked::Not => {
            command.arg("-ldl");
        }
        Linked::Statically => {
            command.arg(libraries.join(ascendcl::toolkit::ARCHIVE)).args(["-ldl", "-lm", "-lutil", "-lrt"]);
        }
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    compiled.insert(program.clone());
    Some(program)
}

/// Two devices that start their processes by themselves.
pub fn plain(generation: Generation) -> Config {
    Config { generation, device_process: DeviceProcess::Automatic, hbm: 8 << 30, ..Config::default() }
}

/// Runs a program to its end and returns what it printed.
#[track_caller]
pub fn run(emulator: &Emulator, command: &mut Command) -> String {
    let child = emulator.spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap();
    finish(child, command)
}

/// Waits for a program and returns what it printed.
#[track_caller]
pub fn finish(mut child: Child, command: &Command) -> String {
    let read = |mut stream: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stream.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let out = read(Box::new(child.stdout.take().unwrap()));
    let errors = read(Box::new(child.stderr.take().unwrap()));
    let end = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > end => {
                let _ = child.kill();
                let _ = child.wait();
                panic!("{command:?} hangs: {}{}", out.join().unwrap(), errors.join().unwrap());
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let (out, errors) = (out.join().unwrap(), errors.join().unwrap());
    assert!(status.success(), "{command:?} ended with {status}:\n{out}{errors}");
    out
}

/// Nothing is left in the driver after a program, as soon as it has noticed its end.
#[track_caller]
pub fn assert_nothing_left(emulator: &Emulator) {
    let end = Instant::now() + PATIENCE;
    while !emulator.state().is_empty() {
        assert!(Instant::now() < end, "{:#?}", emulator.state());
        std::thread::sleep(Duration::from_millis(5));
    }
    emulator.assert_no_traps();
}

/// Runs a program of `tests/c` on each generation, and linked statically on the newest, and checks
/// that it leaves nothing.
#[track_caller]
pub fn run_on_each_generation(source: &str) {
    run_ways(source, &[&[]]);
}

/// The same with each of several lists of arguments.
#[track_caller]
pub fn run_ways(source: &str, ways: &[&[&str]]) {
    for (program, generation) in programs(source) {
        for way in ways {
            let emulator = Emulator::start(plain(generation)).unwrap();
            run(&emulator, Command::new(&program).args(*way));
            assert_nothing_left(&emulator);
        }
    }
}

/// A program of `tests/c` for each generation, and linked statically for the newest.
pub fn programs(source: &str) -> Vec<(PathBuf, Generation)> {
    let linked = Generation::ALL.map(|generation| (Linked::Dynamically, generation));
    let all = linked.into_iter().chain([(Linked::Statically, Generation::NEWEST)]);
    all.map_while(|(linked, generation)| Some((compile(source, linked)?, generation))).collect()
}
