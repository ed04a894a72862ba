//! `cargo xtask compat`: runs unmodified programs of others with the C library on an emulated
//! driver, and reports each step.

use crate::toolkit;
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator};
use ascend_ioctl::Generation;
use ascend_vmm_tool::outln;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The programs.
#[derive(clap::Subcommand)]
pub enum Compat {
    /// PyTorch with its NPU back end, from the Python package index: about 7 GB for each version.
    Torch(Torch),
}

/// Options of `compat torch`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  cargo xtask compat torch\n  \
                  cargo xtask compat torch --torch 2.9.0 --driver 9.0.0 --part expandable")]
pub struct Torch {
    /// Version of PyTorch; the newest release of its NPU back end is taken. Can be given several
    /// times.
    #[arg(long = "torch", value_name = "VERSION", default_values = VERSIONS)]
    versions: Vec<String>,
    /// Where the virtual environments are: one for each version, made if it is not there.
    #[arg(long, value_name = "DIR")]
    venvs: Option<PathBuf>,
    /// Remove each virtual environment after its run.
    #[arg(long)]
    remove: bool,
    /// Generation of the emulated driver. Can be given several times.
    #[arg(long = "driver", value_name = "GENERATION", default_values_t = [Generation::NEWEST, Generation::ALL[0]])]
    drivers: Vec<Generation>,
    /// Run only this part.
    #[arg(long, value_name = "PART")]
    part: Option<String>,
}

/// The minor versions that run by default: those for which the back end has releases of this year.
const VERSIONS: [&str; 8] = ["2.7.1", "2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0"];

/// What is installed, in two calls: the back end asks for a build of the framework that the index
/// does not have, so it is installed without what it asks for. `.*` is the newest post release.
fn packages(version: &str) -> [Vec<String>; 2] {
    let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    [list(&[&format!("torch=={version}"), "numpy", "pyyaml"]), list(&["--no-deps", &format!("torch_npu=={version}.*")])]
}

/// Bytes that the packages of a version need.
const SPACE: u64 = 10 << 30;

/// The parts of the script, each in a process of its own, and their environment.
const PARTS: [(&str, &[(&str, &str)]); 6] = [
    ("tensors", &[]),
    ("expandable", &[("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")]),
    ("pluggable", &[]),
    ("processes", &[]),
    ("processes-expandable", &[("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")]),
    ("operators", &[]),
];

/// A part that prints nothing for so long hangs. Loading the framework takes minutes on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(1200);

/// Runs the command and returns its exit status.
pub fn run(command: Compat) -> ExitCode {
    let Compat::Torch(options) = command;
    match torch(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(reason) => ascend_vmm_tool::impossible(reason),
    }
}

fn torch(options: &Torch) -> Result<bool, String> {
    let place = crate::dist::target_directory()?.join("compat/torch");
    let venvs = options.venvs.clone().unwrap_or_else(|| place.clone());
    for directory in [&place, &venvs] {
        std::fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    }
    let tree = place.join("toolkit");
    toolkit::write(&tree, toolkit::RELEASE)?;
    let write = |name: &str, text: &str| {
        let path = place.join(name);
        std::fs::write(&path, text).map(|()| path.clone()).map_err(|error| format!("{}: {error}", path.display()))
    };
    let script = write("torch_steps.py", include_str!("compat/torch_steps.py"))?;
    let allocator = allocator(&place, &tree, &write("allocator.cpp", include_str!("compat/allocator.cpp"))?)?;
    let mut results = Vec::new();
    for version in &options.versions {
        let venv = venvs.join(format!("venv-{version}"));
        let python = environment(&venv, version)?;
        let installed = installed(&python)?;
        outln!("{installed}");
        let run = Run { place: &place, tree: &tree, script: &script, allocator: &allocator, python: &python };
        let failed = run.parts(options)?;
        results.push((installed, failed));
        if options.remove {
            std::fs::remove_dir_all(&venv).map_err(|error| format!("{}: {error}", venv.display()))?;
        }
    }
    outln!("");
    for (installed, failed) in &results {
        outln!("{installed}: {}", if failed.is_empty() { "all steps passed".into() } else { failed.join(", ") });
    }
    Ok(results.iter().all(|(_, failed)| failed.is_empty()))
}

/// Everything that a run of the parts needs.
struct Run<'a> {
    place: &'a Path,
    tree: &'a Path,
    script: &'a Path,
    allocator: &'a Path,
    python: &'a Path,
}

impl Run<'_> {
    /// Runs the parts on each driver. Returns those that failed.
    fn parts(&self, options: &Torch) -> Result<Vec<String>, String> {
        let mut failed = Vec::new();
        for &generation in &options.drivers {
            for (part, variables) in PARTS {
                if options.part.as_deref().is_some_and(|only| only != part) {
                    continue;
                }
                outln!("driver {generation}, {part}");
                let mut command = Command::new(self.python);
                command.arg(self.script).arg(part).current_dir(self.place).envs(variables.iter().copied());
                command.env("LD_LIBRARY_PATH", self.tree.join("lib64")).env("ALLOCATOR", self.allocator);
                command.env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
                for variable in ["ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_RT_VISIBLE_DEVICES"] {
                    command.env_remove(variable);
                }
                if !run_part(generation, &mut command)? {
                    failed.push(format!("{part} FAILED on {generation}"));
                }
            }
        }
        Ok(failed)
    }
}

/// The versions that a virtual environment has.
fn installed(python: &Path) -> Result<String, String> {
    let asked = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('torch', 'torch_npu')))";
    let output = Command::new(python).arg("-c").arg(asked).output().map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Runs one part on a driver of its own; whether it passed and left nothing.
fn run_part(generation: Generation, command: &mut Command) -> Result<bool, String> {
    let config = Config { generation, device_process: DeviceProcess::Required, ..Config::default() };
    let emulator = Emulator::start(config).map_err(|error| error.to_string())?;
    command.stdout(Stdio::piped());
    let mut child = emulator.spawn(command).map_err(|error| format!("{command:?} cannot be started: {error}"))?;
    let (sender, lines) = channel();
    if let Some(output) = child.stdout.take() {
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
    }
    let hangs = loop {
        match lines.recv_timeout(PATIENCE) {
            Ok(line) => outln!("{line}"),
            Err(error) => break error == RecvTimeoutError::Timeout,
        }
    };
    if hangs {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    if hangs {
        outln!("  FAILED: it hangs");
    } else if !status.success() {
        outln!("  FAILED: {status}");
    }
    let passed = !hangs && status.success();
    // The driver notices the end of a process a moment later.
    let end = Instant::now() + Duration::from_secs(10);
    while !emulator.state().is_empty() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    let (left, traps) = (emulator.state(), emulator.traps());
    if !left.is_empty() {
        outln!("  FAILED: this is left in the driver: {left:?}");
    } else if !traps.is_empty() {
        outln!("  FAILED: it would have crashed a real host ({})", traps[0].name);
    } else {
        outln!("  ok    nothing is left in the driver");
    }
    Ok(passed && left.is_empty() && traps.is_empty())
}

/// The Python of a virtual environment that has the packages of a version.
fn environment(venv: &Path, version: &str) -> Result<PathBuf, String> {
    let python = venv.join("bin/python");
    let has = |module: &str| {
        let asked = format!("import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)");
        Command::new(&python).arg("-c").arg(asked).status().is_ok_and(|status| status.success())
    };
    if has("torch") && has("torch_npu") {
        return Ok(python);
    }
    let parent = venv.parent().filter(|parent| parent.exists()).unwrap_or(Path::new("."));
    let free = nix::sys::statvfs::statvfs(parent).map_err(|error| format!("{}: {error}", parent.display()))?;
    let free = free.blocks_available() * free.fragment_size();
    if free < SPACE {
        return Err(format!("{} has {} GiB free, and the packages need 10", parent.display(), free >> 30));
    }
    let interpreter = ["python3.11", "python3"]
        .into_iter()
        .find(|name| Command::new(name).args(["-c", "import venv"]).status().is_ok_and(|status| status.success()));
    let interpreter = interpreter.ok_or("there is no Python 3 with venv here")?;
    outln!("installing into {}", venv.display());
    let mut steps = vec![Command::new(interpreter)];
    steps[0].args(["-m", "venv"]).arg(venv);
    for packages in packages(version) {
        let mut install = Command::new(&python);
        install.args(["-m", "pip", "install", "--quiet", "--no-cache-dir"]).args(packages);
        steps.push(install);
    }
    for mut step in steps {
        let status = step.status().map_err(|error| format!("{step:?}: {error}"))?;
        if !status.success() {
            return Err(format!("{step:?} ended with {status}"));
        }
    }
    Ok(python)
}

/// Compiles the allocator that the framework loads.
fn allocator(place: &Path, tree: &Path, source: &Path) -> Result<PathBuf, String> {
    let library = place.join("allocator.so");
    let mut command = Command::new("c++");
    command.args(["-shared", "-fPIC", "-O1", "-std=c++17", "-I"]).arg(tree.join("include")).arg("-o").arg(&library);
    command.arg(source).arg("-L").arg(tree.join("lib64")).arg("-lascendcl");
    match command.status() {
        Ok(status) if status.success() => Ok(library),
        Ok(status) => Err(format!("{command:?} ended with {status}")),
        Err(error) => Err(format!("there is no C++ compiler here: {error}")),
    }
}
