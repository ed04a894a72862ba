//! `cargo xtask abi`: compares our layout tables with the headers of a driver.
//!
//! The kernel checks no sizes, so a wrong offset corrupts memory silently. The tables in
//! `ioctl/abi` are therefore never typed by hand. `dump` writes one from a driver source tree and
//! `check` compares one with a tree. The layout test of `ascend-ioctl` compares the Rust structs
//! with the tables. The names are those that `ascend-ioctl` defines, and every request of the
//! memory driver, including unknown ones.

mod compiler;
mod declarations;
mod driver_tree;
mod layout_table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ascend_ioctl::{Generation, layout};
use ascend_vmm_tool::terminal::counted;
use compiler::Wanted;
use driver_tree::DriverTree;
use layout_table::{Difference, Table};

/// Compare our layout tables with a driver source tree.
#[derive(clap::Subcommand)]
pub enum Abi {
    /// Compare a driver source tree with our table. Exit status: 0 equal, 1 different, 2 the
    /// comparison is not possible.
    #[command(after_help = "Example:\n  cargo xtask abi check --driver-src ../driver --generation 9.0.0")]
    Check {
        /// The driver's source tree, laid out as hicann/driver.
        #[arg(long, value_name = "DIR")]
        driver_src: PathBuf,
        /// Compare with this generation instead of the one that fits best.
        #[arg(long, value_name = "NAME", value_parser = Generation::ALL.map(Generation::name))]
        generation: Option<String>,
    },
    /// Print the table of a driver source tree as JSON.
    #[command(after_help = "Example:\n  \
                      cargo xtask abi dump --driver-src ../driver --generation 27.0 > ioctl/abi/27.0.json")]
    Dump {
        /// The driver's source tree, laid out as hicann/driver.
        #[arg(long, value_name = "DIR")]
        driver_src: PathBuf,
        /// The name of the generation.
        #[arg(long, value_name = "NAME", default_value = "unknown")]
        generation: String,
    },
}

/// The table of a known generation. Read from the source tree, in which this command is run.
fn known_table(generation: Generation) -> Result<Table, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ioctl/abi").join(generation.delta().table);
    let wrong = |error: String| format!("our table {}: {error}", path.display());
    let json = std::fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?;
    serde_json::from_str(&json).map_err(|error| wrong(error.to_string()))
}

/// Runs the command and returns its exit status.
pub fn run(command: Abi) -> ExitCode {
    let result = match &command {
        Abi::Check { driver_src, generation } => check(driver_src, generation.as_deref()),
        Abi::Dump { driver_src, generation } => dump(driver_src, generation),
    };
    result.unwrap_or_else(ascend_vmm_tool::impossible)
}

fn check(driver_src: &Path, generation: Option<&str>) -> Result<ExitCode, String> {
    let measured = compiler::measure(&DriverTree::open(driver_src)?, &wanted())?;
    let mut candidates = Vec::new();
    for known in Generation::ALL.into_iter().filter(|known| generation.is_none_or(|wanted| wanted == known.name())) {
        let table = known_table(known)?;
        candidates.push((table.differences(&measured), table));
    }
    // The version file of a tree is not reliable: that of 9.0.0 still says 8.5.
    let best = candidates.into_iter().min_by_key(|(differences, _)| differences.len());
    let Some((differences, table)) = best else { return Err("there is no such generation".to_owned()) };
    let (name, facts) = (&table.generation, table.facts());
    let chosen = if generation.is_some() { "chosen" } else { "fits best" };
    if differences.is_empty() {
        ascend_vmm_tool::outln!("generation {name} ({chosen}): no difference in {facts} facts");
        return Ok(ExitCode::SUCCESS);
    }
    ascend_vmm_tool::outln!("generation {name} ({chosen}): {}", counted(differences.len(), "difference"));
    print_rows(&differences);
    Ok(ExitCode::FAILURE)
}

fn dump(driver_src: &Path, generation: &str) -> Result<ExitCode, String> {
    let mut table = compiler::measure(&DriverTree::open(driver_src)?, &wanted())?;
    table.generation = generation.to_owned();
    ascend_vmm_tool::outln!("{}", table.to_json().trim_end());
    Ok(ExitCode::SUCCESS)
}

fn print_rows(differences: &[Difference]) {
    let heading = Difference { what: "what".into(), ours: "our table".into(), tree: "the tree".into() };
    let rows = || std::iter::once(&heading).chain(differences);
    let width = |column: fn(&Difference) -> &String| rows().map(|row| column(row).len()).max().unwrap_or(0);
    let (what, ours) = (width(|row| &row.what), width(|row| &row.ours));
    for row in rows() {
        ascend_vmm_tool::outln!("  {:what$}  {:ours$}  {}", row.what, row.ours, row.tree);
    }
}

/// The C names of everything that `ascend-ioctl` defines.
fn wanted() -> Wanted {
    let mut wanted = Wanted::default();
    wanted.structs.extend(layout::layouts().map(|layout| layout.c_name.to_owned()));
    wanted.constants.extend(layout::constants().map(|constant| constant.c_name.to_owned()));
    wanted.constants.extend(layout::texts().map(|(c_name, _)| c_name.to_owned()));
    wanted.constants.extend(Generation::ALL.into_iter().flat_map(layout::limits).map(|(c_name, _)| c_name.to_owned()));
    for command in Generation::ALL.into_iter().flat_map(layout::commands) {
        wanted.requests.insert(command.c_name.to_owned());
    }
    wanted
}
