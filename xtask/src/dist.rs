//! `cargo xtask dist`: builds `ascend-vmm`, one static file per architecture that needs
//! nothing else on the host.
//!
//! The C library is linked statically: glibc of the GNU targets, so no other target needs to be
//! installed. Each file is checked afterwards: it must not need a dynamic linker. Beside them is
//! the list of all crates that are in them.

mod bill_of_materials;

use ascend_vmm::Bytes;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// The package of the program.
const PACKAGE: &str = "ascend-vmm-tool";

/// Options of `dist`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo xtask dist\n  scp target/dist/ascend-vmm-aarch64 host:\n  \
                  ssh host ./ascend-vmm-aarch64 probe")]
pub struct Dist {
    /// Build only for this architecture. The default is every one that can be built here.
    #[arg(long, value_enum)]
    arch: Option<Arch>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Arch {
    #[value(name = "x86_64")]
    X86_64,
    #[value(name = "aarch64")]
    Aarch64,
}

impl Arch {
    fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        }
    }

    fn triple(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    fn is_native(self) -> bool {
        std::env::consts::ARCH == self.name()
    }

    /// The C compiler that links for this architecture.
    fn linker(self) -> String {
        if self.is_native() { "cc".to_owned() } else { format!("{}-linux-gnu-gcc", self.name()) }
    }

    /// `e_machine` in the ELF header of its programs.
    fn machine(self) -> u16 {
        match self {
            Arch::X86_64 => 62,
            Arch::Aarch64 => 183,
        }
    }
}

/// A Rust compiler and its cargo.
struct Toolchain {
    cargo: PathBuf,
    rustc: PathBuf,
}

impl Toolchain {
    /// A toolchain with a standard library for the architecture: the current one, or that of the
    /// distribution.
    fn for_arch(arch: Arch) -> Option<Toolchain> {
        let used = std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
        let rustc = std::env::var_os("RUSTC").map_or_else(|| used.with_file_name("rustc"), PathBuf::from);
        let candidates = [
            Toolchain { cargo: used, rustc },
            Toolchain { cargo: "/usr/bin/cargo".into(), rustc: "/usr/bin/rustc".into() },
        ];
        candidates.into_iter().find(|toolchain| toolchain.has_std(arch))
    }

    fn has_std(&self, arch: Arch) -> bool {
        let output =
            Command::new(&self.rustc).args(["--print", "target-libdir", "--target", &arch.triple()]).output().ok();
        let directory = output.and_then(|output| String::from_utf8(output.stdout).ok());
        let Some(Ok(files)) = directory.map(|directory| fs::read_dir(directory.trim())) else { return false };
        files.flatten().any(|file| {
            let name = file.file_name();
            let name = name.to_string_lossy();
            name.starts_with("libstd-") && name.ends_with(".rlib")
        })
    }
}

/// Runs the command and returns its exit status.
pub fn run(options: Dist) -> ExitCode {
    let target = match target_directory() {
        Ok(target) => target,
        Err(reason) => return ascend_vmm_tool::impossible(reason),
    };
    let mut built = 0;
    for arch in [Arch::X86_64, Arch::Aarch64] {
        if options.arch.is_some_and(|only| only != arch) {
            continue;
        }
        match build(arch, &target) {
            Ok(Some(line)) => {
                ascend_vmm_tool::outln!("{line}");
                built += 1;
            }
            Ok(None) => {
                let sentence = format!(
                    "{} cannot be built here: that needs a Rust standard library for {} and the linker {} \
                     (on Debian 12: rustc-web, cargo-web, libstd-rust-web-dev:arm64, gcc-aarch64-linux-gnu, \
                     libc6-dev-arm64-cross; with rustup: rustup target add {})",
                    arch.name(),
                    arch.triple(),
                    arch.linker(),
                    arch.triple()
                );
                if options.arch.is_some() || arch.is_native() {
                    return ascend_vmm_tool::impossible(sentence);
                }
                ascend_vmm_tool::outln!("{sentence}");
            }
            Err(reason) => {
                ascend_vmm_tool::errln!("error: {}: {reason}", arch.name());
                return ExitCode::FAILURE;
            }
        }
    }
    if built == 0 {
        return ExitCode::FAILURE;
    }
    match write_bill_of_materials(&target.join("dist")) {
        Ok(line) => {
            ascend_vmm_tool::outln!("{line}");
            ExitCode::SUCCESS
        }
        Err(reason) => {
            ascend_vmm_tool::errln!("error: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Writes the list of crates, and returns a line for the user.
fn write_bill_of_materials(place: &Path) -> Result<String, String> {
    let metadata = metadata(&["--locked", "--filter-platform", "aarch64-unknown-linux-gnu"])?;
    let lock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.lock");
    let lock = fs::read_to_string(&lock).map_err(|error| format!("{}: {error}", lock.display()))?;
    let bill = bill_of_materials::document(&metadata, &lock, PACKAGE)?;
    let crates = bill["components"].as_array().map_or(0, Vec::len);
    let file = place.join("ascend-vmm.cdx.json");
    let text = serde_json::to_string_pretty(&bill).map_err(|error| error.to_string())?;
    fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(format!("{}  the {crates} crates in it, as CycloneDX", file.display()))
}

/// Builds the file for one architecture and returns a line for the user; `None` if tools are
/// missing.
fn build(arch: Arch, target: &Path) -> Result<Option<String>, String> {
    let Some(toolchain) = Toolchain::for_arch(arch) else { return Ok(None) };
    if Command::new(arch.linker()).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        return Ok(None);
    }
    let linker_variable = format!("CARGO_TARGET_{}_LINKER", arch.triple().to_uppercase().replace('-', "_"));
    // A directory of its own, because other flags would make cargo rebuild everything in the usual
    // one.
    let scratch = target.join("dist-build").join(arch.name());
    let status = Command::new(&toolchain.cargo)
        .args(["build", "--release", "--package", PACKAGE, "--target", &arch.triple()])
        .arg("--target-dir")
        .arg(&scratch)
        .env("RUSTC", &toolchain.rustc)
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env(linker_variable, arch.linker())
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .status()
        .map_err(|error| format!("{} cannot be started: {error}", toolchain.cargo.display()))?;
    if !status.success() {
        return Err(format!("the build failed: {status}"));
    }
    let made = scratch.join(arch.triple()).join("release/ascend-vmm");
    let program = fs::read(&made).map_err(|error| format!("{}: {error}", made.display()))?;
    check_static(&program, arch)?;
    let place = target.join("dist");
    let file = place.join(format!("ascend-vmm-{}", arch.name()));
    fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
    fs::copy(&made, &file).map_err(|error| format!("{}: {error}", file.display()))?;
    let ran = runs(arch, &file)?;
    Ok(Some(format!("{}  {}  static  {ran}", file.display(), Bytes(program.len() as u64).rounded())))
}

/// Runs the file once, if that is possible here.
fn runs(arch: Arch, file: &Path) -> Result<String, String> {
    let emulator = format!("qemu-{}", arch.name());
    let mut command = if arch.is_native() { Command::new(file) } else { Command::new(&emulator) };
    if !arch.is_native() {
        command.arg(file);
    }
    match command.arg("--version").output() {
        Err(_) if !arch.is_native() => Ok(format!("not run: {emulator} is not installed")),
        Err(error) => Err(format!("it does not start: {error}")),
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
        Ok(output) => Err(format!("it does not run: {}", output.status)),
    }
}

/// Refuses a program that is for another machine or that needs a dynamic linker.
fn check_static(program: &[u8], arch: Arch) -> Result<(), String> {
    const INTERPRETER: u32 = 3;
    let half = |at: usize| program.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    let word = |at: usize| program.get(at..at + 4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let bad = || "the built file is not a 64-bit ELF program".to_owned();
    if program.get(..5) != Some(b"\x7fELF\x02") {
        return Err(bad());
    }
    if half(18) != Some(arch.machine()) {
        return Err(format!("the built file is not for {}", arch.name()));
    }
    // The program headers start within the first 4 GiB, so the low word of their offset is enough.
    let (Some(table), Some(size), Some(count)) = (word(32), half(54), half(56)) else { return Err(bad()) };
    for index in 0..usize::from(count) {
        let Some(kind) = word(table as usize + index * usize::from(size)) else { return Err(bad()) };
        if kind == INTERPRETER {
            return Err("the built file is not static: it needs an interpreter".into());
        }
    }
    Ok(())
}

/// The target directory of this clone.
pub(crate) fn target_directory() -> Result<PathBuf, String> {
    let metadata = metadata(&["--no-deps"])?;
    metadata["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .ok_or_else(|| "`cargo metadata` names no target directory".to_owned())
}

/// What `cargo metadata` prints with these options.
fn metadata(options: &[&str]) -> Result<serde_json::Value, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .args(options)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cargo cannot be started: {error}"))?;
    serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("the output of `cargo metadata` cannot be parsed: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_program_and_one_for_another_machine_are_refused() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        let (native, foreign) =
            if Arch::X86_64.is_native() { (Arch::X86_64, Arch::Aarch64) } else { (Arch::Aarch64, Arch::X86_64) };
        // A test binary is linked dynamically on the GNU targets.
        assert!(check_static(&own, native).unwrap_err().contains("interpreter"));
        assert!(check_static(&own, foreign).unwrap_err().contains("not for"));
    }

    #[test]
    fn a_file_that_is_not_a_complete_program_is_refused() {
        assert!(check_static(b"#!/bin/sh\n", Arch::X86_64).is_err());
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        let arch = if Arch::X86_64.is_native() { Arch::X86_64 } else { Arch::Aarch64 };
        assert!(check_static(&own[..60], arch).is_err());
    }
}
