//! `cargo xtask toolkit`: writes the tree of files that programs for CANN are built against and run
//! with: header, libraries, environment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

/// Options of `toolkit`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo xtask toolkit target/toolkit\n  source target/toolkit/bin/setenv.bash\n  \
                  cc -I$ASCEND_HOME_PATH/include my-program.c -L$ASCEND_HOME_PATH/lib64 -lascendcl\n  \
                  cargo xtask emulate -- ./a.out")]
pub struct Toolkit {
    /// Where the tree is written. What is there is replaced file by file.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Profile of cargo that the libraries are built with; `dev` is built faster.
    #[arg(long, value_name = "NAME", default_value = RELEASE)]
    profile: String,
}

/// The engines' side of the memory service.
const SERVICE_HEADERS: [(&str, &str); 2] = [
    ("ascend_vmm_service.h", include_str!("../../bindings/engine/include/ascend_vmm_service.h")),
    ("ascend_vmm_service.hpp", include_str!("../../bindings/engine/include/ascend_vmm_service.hpp")),
];

/// The profile of libraries that are used for more than a test.
pub const RELEASE: &str = "release";

/// Runs the command and returns its exit status.
pub fn run(options: Toolkit) -> ExitCode {
    let begun = Instant::now();
    ascend_vmm_tool::errln!(
        "building the libraries (profile {}), which takes minutes the first time …",
        options.profile
    );
    match write(&options.directory, &options.profile) {
        Ok(()) => {
            ascend_vmm_tool::errln!("built in {:.0} s; the tree is in:", begun.elapsed().as_secs_f64());
            ascend_vmm_tool::outln!("{}", options.directory.display());
            ExitCode::SUCCESS
        }
        Err(reason) => ascend_vmm_tool::impossible(reason),
    }
}

/// Builds the library with a profile of cargo and writes the tree.
pub fn write(tree: &Path, profile: &str) -> Result<(), String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(&cargo)
        .args(["build", "--quiet", "--profile", profile, "--package", "ascend-acl", "--package", "ascend-vmm-engine"])
        .arg("--manifest-path")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.toml"))
        .status()
        .map_err(|error| format!("cargo cannot be started: {error}"))?;
    if !status.success() {
        return Err(format!("the library cannot be built: {status}"));
    }
    let built = built(profile)?;
    let (library, archive) = (built.join(ascendcl::toolkit::LIBRARY), built.join(ascendcl::toolkit::ARCHIVE));
    let written = ascendcl::toolkit::write(tree, &library, Some(&archive)).and_then(|()| {
        for (name, text) in SERVICE_HEADERS {
            fs::write(tree.join("include").join(name), text)?;
        }
        // Renamed, so that a program which has the old one loaded keeps it.
        let (new, library) = (tree.join("lib64/service.new"), tree.join("lib64/libascend_vmm_service.so"));
        fs::copy(built.join("libascend_vmm_engine.so"), &new)?;
        fs::rename(new, library)
    });
    written.map_err(|error| format!("{} cannot be written: {error}", tree.display()))
}

/// Where cargo puts what it builds with a profile.
pub fn built(profile: &str) -> Result<PathBuf, String> {
    Ok(crate::dist::target_directory()?.join(if profile == "dev" { "debug" } else { profile }))
}
