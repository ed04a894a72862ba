//! `cargo xtask numbers`: measures how well the tests look, and writes the table of
//! `docs/numbers.md`.
//!
//! Coverage needs `rustup component add llvm-tools`, and mutants `cargo install cargo-mutants`.
//! What is missing is said in the table instead of a number.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Options of `numbers`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo xtask numbers seeds --seeds 1000")]
pub struct Numbers {
    /// What is measured anew; the other rows stay. The default is everything, which takes an hour.
    #[arg(value_enum, value_name = "PART")]
    parts: Vec<Part>,
    /// How many seeds each scenario gets, half of them with all events.
    #[arg(long, value_name = "N", default_value_t = 200)]
    seeds: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Coverage,
    Mutants,
    Seeds,
}

/// The table.
const PAGE: &str = "docs/numbers.md";

/// Where the rows begin.
const HEAD: &str = "| what | figure | date, commit |\n|---|---|---|\n";

/// The tables of objects and of addresses, whose unit tests take seconds.
const MUTATED: [&str; 2] = ["src/slots.rs", "src/range_map.rs"];

/// The scenarios of `tests/seeds`, and the options of their hosts.
const SCENARIOS: [(&str, &[&str]); 8] = [
    ("sharing", &[]),
    ("broker", &[]),
    ("sleep_beside_writes", &[]),
    ("reset_beside_copies", &[]),
    ("trim_beside_reset", &[]),
    ("two_pools_on_a_small_device", &["--devices", "1", "--hbm", "6M"]),
    ("sessions_come_and_go", &[]),
    ("failures_lose_nothing", &[]),
];

/// What a part found: its name, and its figure or why there is none.
type Row = (String, String);

/// Measures the parts and writes the table.
pub fn run(options: &Numbers) -> ExitCode {
    match measure(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: &Numbers) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().map_err(|error| error.to_string())?;
    let every = [Part::Coverage, Part::Mutants, Part::Seeds];
    for part in every.into_iter().filter(|part| options.parts.is_empty() || options.parts.contains(part)) {
        let rows = match part {
            Part::Coverage => coverage(&root),
            Part::Mutants => mutants(&root),
            Part::Seeds => seeds(&root, options.seeds),
        };
        write(&root.join(PAGE), &rows?, &when(&root)?)?;
    }
    Ok(())
}

/// The date and the commit.
fn when(root: &Path) -> Result<String, String> {
    let date = output(Command::new("date").args(["-u", "+%F"]))?;
    let commit = output(Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(root))?;
    Ok(format!("{}, {}", date.trim(), commit.trim()))
}

/// Replaces the rows with these names, or adds them.
fn write(page: &Path, rows: &[Row], when: &str) -> Result<(), String> {
    let text = fs::read_to_string(page).map_err(|error| format!("{}: {error}", page.display()))?;
    let (before, old) = text.split_once(HEAD).ok_or_else(|| format!("{} has no table", page.display()))?;
    let mut lines: Vec<String> = old.lines().map(str::to_owned).collect();
    for (name, figure) in rows {
        let line = format!("| {name} | {figure} | {when} |");
        match lines.iter_mut().find(|line| line.starts_with(&format!("| {name} |"))) {
            Some(old) => *old = line,
            None => lines.push(line),
        }
    }
    fs::write(page, format!("{before}{HEAD}{}\n", lines.join("\n"))).map_err(|error| error.to_string())
}

/// What a program prints, if it succeeds.
fn output(command: &mut Command) -> Result<String, String> {
    let found = command.stderr(Stdio::inherit()).output().map_err(|error| format!("{command:?}: {error}"))?;
    if !found.status.success() {
        return Err(format!("{command:?}: {}", found.status));
    }
    String::from_utf8(found.stdout).map_err(|error| error.to_string())
}

/// The test programs of a package, built.
fn test_programs(cargo: &mut Command) -> Result<Vec<(String, PathBuf)>, String> {
    Ok(programs(&output(cargo.args(["--no-run", "--message-format=json"]))?))
}

/// The programs of which cargo's messages tell.
fn programs(messages: &str) -> Vec<(String, PathBuf)> {
    let program = |line: &str| {
        let message: Value = serde_json::from_str(line).ok()?;
        let file = message["executable"].as_str()?;
        Some((message["target"]["name"].as_str()?.to_owned(), PathBuf::from(file)))
    };
    messages.lines().filter_map(program).collect()
}

/// Lines and branches of `src` that the library's tests run.
fn coverage(root: &Path) -> Result<Vec<Row>, String> {
    let [lines, branches] = ["lines", "branches"].map(|what| format!("{what} of `src` that the library's tests run"));
    let libraries = PathBuf::from(output(Command::new("rustc").args(["--print", "target-libdir"]))?.trim());
    let tools = libraries.with_file_name("bin");
    if !tools.join("llvm-cov").exists() {
        let none = "not measured: no `llvm-tools` here".to_owned();
        return Ok(vec![(lines, none.clone()), (branches, none)]);
    }
    let directory = root.join("target/numbers");
    let profiles = directory.join("profiles");
    let _ = fs::remove_dir_all(&profiles);
    let cargo = || {
        let mut cargo = Command::new("cargo");
        cargo.args(["test", "-p", "ascend-vmm", "--lib", "--tests"]).current_dir(root);
        cargo.env("CARGO_TARGET_DIR", &directory);
        // Branches are counted only on request, which a stable compiler refuses otherwise.
        cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-C instrument-coverage -Z coverage-options=branch");
        // Processes that run the same program add to one of four files.
        cargo.env("LLVM_PROFILE_FILE", profiles.join("%4m.profraw"));
        cargo
    };
    let tests = test_programs(&mut cargo())?;
    let _ = fs::remove_dir_all(&profiles);
    let succeeded = cargo().arg("--no-fail-fast").status().is_ok_and(|status| status.success());
    let files = fs::read_dir(&profiles).map_err(|error| format!("{}: {error}", profiles.display()))?;
    let files: Vec<PathBuf> = files.flatten().map(|entry| entry.path()).collect();
    let merged = directory.join("merged.profdata");
    output(
        Command::new(tools.join("llvm-profdata"))
            .args(["merge", "-sparse", "-failure-mode=all", "-o"])
            .arg(&merged)
            .args(files),
    )?;
    let mut export = Command::new(tools.join("llvm-cov"));
    export.args(["export", "-summary-only", "-instr-profile"]).arg(&merged).current_dir(root);
    for (_, program) in &tests {
        export.arg("-object").arg(program);
    }
    let report: Value = serde_json::from_str(&output(&mut export)?).map_err(|error| error.to_string())?;
    let of = |kind: &str| {
        let mut sums = [0, 0];
        for file in report["data"][0]["files"].as_array().into_iter().flatten() {
            let name = Path::new(file["filename"].as_str().unwrap_or(""));
            if root.join(name).starts_with(root.join("src")) {
                let counted = &file["summary"][kind];
                sums[0] += counted["covered"].as_u64().unwrap_or(0);
                sums[1] += counted["count"].as_u64().unwrap_or(0);
            }
        }
        let note = if succeeded { "" } else { "; some tests failed" };
        format!("{}{note}", share(sums[0], sums[1]))
    };
    Ok(vec![(lines, of("lines")), (branches, of("branches"))])
}

/// A part of a whole, in percent.
fn share(part: u64, whole: u64) -> String {
    format!("{:.1} % ({part} of {whole})", part as f64 * 100.0 / whole.max(1) as f64)
}

/// Changes of the library's code that its unit tests notice.
fn mutants(root: &Path) -> Result<Vec<Row>, String> {
    let directory = root.join("target/numbers");
    fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
    let mut rows = Vec::new();
    for file in MUTATED {
        let name = format!("mutants of `{file}` that the library's unit tests find");
        let mut cargo = Command::new("cargo");
        cargo.args(["mutants", "-p", "ascend-vmm", "--no-shuffle", "--timeout", "120", "--file", file, "--output"]);
        cargo.arg(&directory).args(["--", "--lib"]).current_dir(root);
        // The crates of others are built there already.
        cargo.env("CARGO_TARGET_DIR", root.join("target"));
        // 2 and 3: some were missed, or took too long.
        if !cargo.status().is_ok_and(|status| matches!(status.code(), Some(0 | 2 | 3))) {
            rows.push((name, "not measured: `cargo mutants` does not run here".into()));
            continue;
        }
        let outcomes = fs::read_to_string(directory.join("mutants.out/outcomes.json"));
        let outcomes: Value =
            serde_json::from_str(&outcomes.map_err(|error| error.to_string())?).map_err(|error| error.to_string())?;
        let of = |kind: &str| outcomes[kind].as_u64().unwrap_or(0);
        let found = of("caught") + of("timeout");
        rows.push((name, share(found, found + of("missed"))));
    }
    Ok(rows)
}

/// Runs of the scenarios under seeds.
fn seeds(root: &Path, count: u64) -> Result<Vec<Row>, String> {
    let mut build = Command::new("cargo");
    let build = build.args(["build", "-p", "ascend-vmm-tool", "--message-format=json"]).current_dir(root);
    let tools = programs(&output(build)?);
    let (_, tool) = tools.first().ok_or("the tool is not built")?;
    let mut cargo = Command::new("cargo");
    let tests = test_programs(cargo.args(["test", "-p", "ascend-vmm", "--test", "seeds"]).current_dir(root))?;
    let (_, program) = tests.first().ok_or("tests/seeds is not built")?;
    let mut rows = Vec::new();
    for (scenario, host) in SCENARIOS {
        let mut sums = [0u64; 3];
        let mut failed = 0;
        for (range, events, client) in [
            (format!("0..{}", count / 2), "stop,signal,late", "1"),
            (format!("{}..{count}", count / 2), "all", "disturbed"),
        ] {
            let mut tool = Command::new(tool);
            tool.arg("emulate").args(host).args(["--seeds", &range, "--events", events, "--"]);
            tool.arg(program).args([scenario, "--exact", "--nocapture"]).env("ASCEND_SCENARIO", client);
            let ended = tool.output().map_err(|error| error.to_string())?;
            let said = String::from_utf8_lossy(&ended.stderr);
            let line = said.lines().find(|line| line.contains(" calls, ")).unwrap_or("");
            let numbers = line.split(", ").filter_map(|words| words.split(' ').next()?.parse::<u64>().ok());
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
            if !ended.status.success() {
                eprintln!("{said}");
                failed += 1;
            }
        }
        let [runs, calls, guesses] = sums;
        let verdict = if failed == 0 { "no failure".to_owned() } else { format!("{failed} of 2 ranges fail") };
        rows.push((
            format!("seeds of `{scenario}`"),
            format!("{runs} runs, {calls} calls, {guesses} guesses, {verdict}"),
        ));
    }
    Ok(rows)
}
