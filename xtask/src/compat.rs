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
    /// PyTorch with its NPU back end, from the Python package index: about 7 GB the first time.
    Torch(Torch),
}

/// Options of `compat torch`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  cargo xtask compat torch\n  \
                  cargo xtask compat torch --driver 9.0.0 --part expandable")]
pub struct Torch {
    /// The virtual environment. It is made, and the packages are installed, if it is not there.
    #[arg(long, value_name = "DIR")]
    venv: Option<PathBuf>,
    /// Generation of the emulated driver. Can be given several times.
    #[arg(long = "driver", value_name = "GENERATION", default_values_t = [Generation::NEWEST, Generation::ALL[0]])]
    drivers: Vec<Generation>,
    /// Run only this part.
    #[arg(long, value_name = "PART")]
    part: Option<String>,
}

/// What is installed, in two calls: the back end asks for a build of the framework that the index
/// does not have, so it is installed without what it asks for.
const PACKAGES: [&[&str]; 2] = [&["torch==2.9.0", "numpy", "pyyaml"], &["--no-deps", "torch_npu==2.9.0"]];

/// Bytes that the packages need.
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
    std::fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
    let venv = options.venv.clone().unwrap_or_else(|| place.join("venv"));
    let python = environment(&venv)?;
    let tree = place.join("toolkit");
    toolkit::write(&tree, toolkit::RELEASE)?;
    let write = |name: &str, text: &str| {
        let path = place.join(name);
        std::fs::write(&path, text).map(|()| path.clone()).map_err(|error| format!("{}: {error}", path.display()))
    };
    let script = write("torch_steps.py", include_str!("compat/torch_steps.py"))?;
    let allocator = allocator(&place, &tree, &write("allocator.cpp", include_str!("compat/allocator.cpp"))?)?;
    let mut passed = true;
    for &generation in &options.drivers {
        for (part, variables) in PARTS {
            if options.part.as_deref().is_some_and(|only| only != part) {
                continue;
            }
            outln!("driver {generation}, {part}");
            let mut command = Command::new(&python);
            command.arg(&script).arg(part).current_dir(&place).envs(variables.iter().copied());
            command.env("LD_LIBRARY_PATH", tree.join("lib64")).env("ALLOCATOR", &allocator);
            command.env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
            for variable in ["ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_RT_VISIBLE_DEVICES"] {
                command.env_remove(variable);
            }
            passed &= run_part(generation, &mut command)?;
        }
    }
    outln!("{}", if passed { "all steps passed" } else { "some steps FAILED" });
    Ok(passed)
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

/// The Python of a virtual environment that has the packages.
fn environment(venv: &Path) -> Result<PathBuf, String> {
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
    for packages in PACKAGES {
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
