//! Finds in the library's source which commands it makes, for `trace`.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;
use std::{env, fs};

/// A module of the driver, how its constants are named, and the file of the library that uses it.
const SOURCES: [(&str, &str, &str); 6] = [
    ("", "davinci::", "davinci.rs"),
    ("uda", "uda::", "uda.rs"),
    ("URD", "urd::", "urd.rs"),
    ("DEVMNG", "devmng::", "devmng.rs"),
    ("hdc", "hdc::", "hdc.rs"),
    ("SVM", "request::", "svm.rs"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("driver");
    let mut found = Vec::new();
    for (module, prefix, file) in SOURCES {
        let path = driver.join(file);
        println!("cargo::rerun-if-changed={}", path.display());
        let constants = constants(&fs::read_to_string(path)?, prefix);
        found.extend(constants.into_iter().map(|constant| (module, constant)));
    }
    fs::write(Path::new(&env::var("OUT_DIR")?).join("library_commands.rs"), format!("&{found:?}"))?;
    Ok(())
}

/// The constants with a prefix that a source names, outside of its comments and tests. Some are not
/// commands.
fn constants(source: &str, prefix: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let named = lines.flat_map(|line| line.split(prefix).skip(1));
    let words = named.filter_map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next());
    let constants = words.filter(|word| !word.is_empty() && !word.contains(|c: char| c.is_ascii_lowercase()));
    constants.map(str::to_owned).collect()
}
