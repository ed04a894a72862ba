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
    /// Engines with PyTorch, the memory service, and weights that outlive them: the same packages.
    Service(Service),
}

/// Options of `compat service`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo xtask compat service --torch 2.9.0")]
pub struct Service {
    /// Version of PyTorch; the newest release of its NPU back end is taken. Can be given several
    /// times.
    #[arg(long = "torch", value_name = "VERSION", default_values = ["2.8.0", "2.9.0"])]
    versions: Vec<String>,
    /// Where the virtual environments are: those of `compat torch`.
    #[arg(long, value_name = "DIR")]
    venvs: Option<PathBuf>,
    /// Generation of the emulated driver. Can be given several times.
    #[arg(long = "driver", value_name = "GENERATION", default_values_t = [Generation::NEWEST])]
    drivers: Vec<Generation>,
    /// Profile of cargo that our libraries are built with.
    #[arg(long, value_name = "NAME", default_value = toolkit::RELEASE)]
    profile: String,
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
    /// A checkout of vllm-ascend: its sleep mode is run too, unmodified.
    #[arg(long, value_name = "DIR")]
    vllm_ascend: Option<PathBuf>,
    /// Profile of cargo that our libraries are built with.
    #[arg(long, value_name = "NAME", default_value = toolkit::RELEASE)]
    profile: String,
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
const PARTS: [(&str, &[(&str, &str)]); 9] = [
    ("tensors", &[]),
    ("expandable", &[("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")]),
    ("pluggable", &[]),
    ("processes", &[]),
    ("processes-expandable", &[("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")]),
    ("operators", &[]),
    ("acl-before", &[]),
    ("acl-after", &[]),
    (CAMEM, &[]),
];

/// The part that needs vllm-ascend.
const CAMEM: &str = "camem";

/// A part that prints nothing for so long hangs. Loading the framework takes minutes on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(1200);

/// Runs the command and returns its exit status.
pub fn run(command: Compat) -> ExitCode {
    let passed = match command {
        Compat::Torch(options) => torch(&options),
        Compat::Service(options) => service(&options),
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(reason) => ascend_vmm_tool::impossible(reason),
    }
}

/// The story of engines and a service.
fn service(options: &Service) -> Result<bool, String> {
    let Tools { place, venvs, tree, site } = Tools::prepare("service", options.venvs.as_deref(), &options.profile)?;
    let script = write(&place, "service_steps.py", include_str!("compat/service_steps.py"))?;
    let one_hook = one_hook(&place)?;
    let mut failed = Vec::new();
    for version in &options.versions {
        let python = environment(&venvs.join(format!("venv-{version}")), version)?;
        for &generation in &options.drivers {
            let installed = installed(&python)?;
            outln!("{installed}, driver {generation}");
            let mut command = framework(&python, &script, &place, &tree, &site);
            command.arg("story").env("ASCEND_VMM_SERVICE", place.join("socket"));
            if needs_one_hook(version) {
                command.env("ONE_HOOK", &one_hook);
            }
            if !run_part(generation, &mut command)? {
                failed.push(format!("{installed} FAILED on {generation}"));
            }
        }
    }
    failed.iter().for_each(|line| outln!("{line}"));
    Ok(failed.is_empty())
}

/// What the programs run with.
struct Tools {
    /// A directory for their files.
    place: PathBuf,
    venvs: PathBuf,
    tree: PathBuf,
    /// Where Python finds our package.
    site: PathBuf,
}

impl Tools {
    fn prepare(name: &str, venvs: Option<&Path>, profile: &str) -> Result<Tools, String> {
        let compat = crate::dist::target_directory()?.join("compat");
        let (place, venvs) = (compat.join(name), venvs.map_or_else(|| compat.join("torch"), Path::to_owned));
        for directory in [&place, &venvs] {
            std::fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        }
        let tree = place.join("toolkit");
        toolkit::write(&tree, profile)?;
        let site = python_package(&place, profile)?;
        Ok(Tools { place, venvs, tree, site })
    }
}

fn write(place: &Path, name: &str, text: &str) -> Result<PathBuf, String> {
    let path = place.join(name);
    std::fs::write(&path, text).map(|()| path.clone()).map_err(|error| format!("{}: {error}", path.display()))
}

fn one_hook(place: &Path) -> Result<PathBuf, String> {
    let one_hook = place.join("one_hook.so");
    let source = write(place, "one_hook.cpp", include_str!("compat/one_hook.cpp"))?;
    compile(&source, &one_hook, |command| command.arg("-ldl"))?;
    Ok(one_hook)
}

/// A script of ours with the framework, on our libraries.
fn framework(python: &Path, script: &Path, place: &Path, tree: &Path, site: &Path) -> Command {
    let mut command = Command::new(python);
    command.arg(script).current_dir(place).env("LD_LIBRARY_PATH", tree.join("lib64"));
    let packages = format!("{0}:{0}/ascend_vmm/_acl", site.display());
    command.env("PYTHONPATH", packages).env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    for variable in ["ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_RT_VISIBLE_DEVICES"] {
        command.env_remove(variable);
    }
    command
}

fn torch(options: &Torch) -> Result<bool, String> {
    let Tools { place, venvs, tree, site } = Tools::prepare("torch", options.venvs.as_deref(), &options.profile)?;
    let script = write(&place, "torch_steps.py", include_str!("compat/torch_steps.py"))?;
    let allocator = place.join("allocator.so");
    let source = write(&place, "allocator.cpp", include_str!("compat/allocator.cpp"))?;
    compile(&source, &allocator, |command| {
        command.arg("-I").arg(tree.join("include")).arg("-L").arg(tree.join("lib64")).arg("-lascendcl")
    })?;
    let one_hook = one_hook(&place)?;
    let mut results = Vec::new();
    for version in &options.versions {
        let venv = venvs.join(format!("venv-{version}"));
        let python = environment(&venv, version)?;
        let installed = installed(&python)?;
        outln!("{installed}");
        if let Some(checkout) = &options.vllm_ascend {
            sleep_mode(&site, checkout, &tree, &python)?;
        }
        let mut run =
            Run { place: &place, site: &site, tree: &tree, script: &script, python: &python, variables: vec![] };
        run.variables.push(("ALLOCATOR", &allocator));
        if needs_one_hook(version) {
            run.variables.push(("ONE_HOOK", &one_hook));
        }
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
    /// Where Python finds our package.
    site: &'a Path,
    tree: &'a Path,
    script: &'a Path,
    python: &'a Path,
    /// What the script needs to know.
    variables: Vec<(&'static str, &'a Path)>,
}

impl Run<'_> {
    /// Runs the parts on each driver. Returns those that failed.
    fn parts(&self, options: &Torch) -> Result<Vec<String>, String> {
        let mut failed = Vec::new();
        for &generation in &options.drivers {
            for (part, variables) in PARTS {
                let left_out = part == CAMEM && options.vllm_ascend.is_none();
                if left_out || options.part.as_deref().is_some_and(|only| only != part) {
                    continue;
                }
                outln!("driver {generation}, {part}");
                let mut command = framework(self.python, self.script, self.place, self.tree, self.site);
                command.arg(part).envs(variables.iter().copied()).envs(self.variables.iter().copied());
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
        succeed(&mut step)?;
    }
    Ok(python)
}

/// Compiles a library from one file of C++.
fn compile(source: &Path, library: &Path, options: impl FnOnce(&mut Command) -> &mut Command) -> Result<(), String> {
    let mut command = Command::new("c++");
    command.args(["-shared", "-fPIC", "-O1", "-std=c++17"]).arg("-o").arg(library).arg(source);
    options(&mut command);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?} ended with {status}")),
        Err(error) => Err(format!("there is no C++ compiler here: {error}")),
    }
}

/// Whether a version ends the process beside a build of the framework with CUDA: see
/// `one_hook.cpp`.
fn needs_one_hook(version: &str) -> bool {
    let minor = version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
    minor.is_some_and(|minor| minor >= 10)
}

/// Builds the Python package into a directory.
fn python_package(place: &Path, profile: &str) -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--profile", profile, "--package", "ascend-vmm-python", "--manifest-path"]);
    succeed(build.arg(root.join("Cargo.toml")))?;
    let (site, built) = (place.join("site"), toolkit::built(profile)?.join("lib_ascend_vmm.so"));
    std::fs::create_dir_all(&site).map_err(|error| format!("{}: {error}", site.display()))?;
    succeed(Command::new("cp").arg("-r").arg(root.join("bindings/python/python/ascend_vmm")).arg(&site))?;
    succeed(Command::new("cp").arg(built).arg(site.join("ascend_vmm/_ascend_vmm.abi3.so")))?;
    Ok(site)
}

/// Puts the sleep mode of vllm-ascend into the directory of packages: its two files as they are,
/// without the rest of the package, which needs the vendor's compiler, and with a logger that
/// prints, in place of vllm.
fn sleep_mode(site: &Path, checkout: &Path, tree: &Path, python: &Path) -> Result<(), String> {
    let package = site.join("vllm_ascend/device_allocator");
    let (allocator, module) = (checkout.join("csrc/camem_allocator.cpp"), site.join("vllm_ascend/vllm_ascend_C.so"));
    let write =
        |path: PathBuf, text: &str| std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()));
    for directory in [&package, &site.join("vllm")] {
        std::fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    }
    for path in ["vllm/__init__.py", "vllm_ascend/__init__.py", "vllm_ascend/device_allocator/__init__.py"] {
        write(site.join(path), "")?;
    }
    write(site.join("vllm/logger.py"), "import logging\n\nlogger = logging.getLogger(\"vllm\")\n")?;
    succeed(Command::new("cp").arg(checkout.join("vllm_ascend/device_allocator/camem.py")).arg(&package))?;
    let asked = "import sysconfig; print(sysconfig.get_path('include'))";
    let output = Command::new(python).args(["-c", asked]).output().map_err(|error| error.to_string())?;
    let include = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    compile(&allocator, &module, |command| {
        command.arg("-I").arg(include).arg("-I").arg(tree.join("include"));
        command.arg("-L").arg(tree.join("lib64")).arg("-lascendcl")
    })
}

fn succeed(command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?} ended with {status}")),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}
