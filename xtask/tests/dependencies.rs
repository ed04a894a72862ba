//! The dependencies are what deny.toml allows, also where cargo-deny is not installed: licences,
//! crates in two versions, sources.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use toml::Table;

/// What `cargo metadata` says of the workspace on Linux, without a network.
fn metadata() -> Value {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--format-version", "1", "--locked", "--offline"]);
    cargo.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let output = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// deny.toml.
fn policy() -> Table {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deny.toml");
    std::fs::read_to_string(path).unwrap().parse().unwrap()
}

/// The crates of a list of exceptions. Each has a reason.
fn excepted(policy: &Table, list: &str) -> Vec<String> {
    let entries = policy["bans"][list].as_array().unwrap().iter();
    entries
        .map(|entry| {
            assert!(entry["reason"].as_str().is_some_and(|reason| reason.len() > 10), "{entry:?}");
            entry["crate"].as_str().unwrap().split([':', '@']).next().unwrap().to_owned()
        })
        .collect()
}

/// The packages that are built: those of the resolved graph.
fn built(metadata: &Value) -> BTreeMap<&str, &Value> {
    let nodes: BTreeSet<&str> =
        metadata["resolve"]["nodes"].as_array().unwrap().iter().filter_map(|node| node["id"].as_str()).collect();
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages.map(|package| (package["id"].as_str().unwrap(), package)).filter(|(id, _)| nodes.contains(id)).collect()
}

/// Whether a licence expression can be met with these licences.
fn is_met(expression: &str, allowed: &[&str]) -> bool {
    let any = |part: &str| part.replace('/', " OR ").split(" OR ").any(|license| allowed.contains(&license.trim()));
    expression.split(" AND ").all(|part| any(part.trim_matches(['(', ')'])))
}

#[test]
fn every_licence_is_an_allowed_one() {
    let (metadata, policy) = (metadata(), policy());
    let allowed: Vec<&str> =
        policy["licenses"]["allow"].as_array().unwrap().iter().filter_map(|license| license.as_str()).collect();
    let packages = built(&metadata);
    assert!(packages.len() > 50, "{}", packages.len());
    for (id, package) in packages {
        let license = package["license"].as_str().unwrap_or_default();
        assert!(is_met(license, &allowed), "{id} is under {license:?}");
    }
    assert!(!is_met("GPL-3.0", &allowed) && !is_met("MIT AND GPL-3.0", &allowed) && !is_met("", &allowed));
}

#[test]
fn only_the_excepted_crates_come_in_two_versions() {
    let (metadata, policy) = (metadata(), policy());
    let packages = built(&metadata);
    let mut excepted_names: BTreeSet<String> = excepted(&policy, "skip").into_iter().collect();
    let roots = excepted(&policy, "skip-tree");
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap();
    let name = |id: &str| packages[id]["name"].as_str().unwrap().to_owned();
    let mut open: Vec<&str> = packages.keys().copied().filter(|id| roots.contains(&name(id))).collect();
    while let Some(id) = open.pop() {
        if excepted_names.insert(name(id)) {
            let node = nodes.iter().find(|node| node["id"] == id).unwrap();
            open.extend(node["dependencies"].as_array().unwrap().iter().filter_map(|id| id.as_str()));
        }
    }
    let mut versions: BTreeMap<String, usize> = BTreeMap::new();
    for id in packages.keys() {
        *versions.entry(name(id)).or_default() += 1;
    }
    let twice: Vec<&String> = versions.iter().filter(|(_, count)| **count > 1).map(|(name, _)| name).collect();
    for name in &twice {
        assert!(excepted_names.contains(*name), "{name} comes in two versions, and deny.toml does not say why");
    }
    for skipped in excepted(&policy, "skip") {
        assert!(twice.contains(&&skipped), "{skipped} comes in one version: deny.toml need not except it any more");
    }
}

#[test]
fn every_dependency_comes_from_the_registry() {
    let metadata = metadata();
    for (id, package) in built(&metadata) {
        let registry = "registry+https://github.com/rust-lang/crates.io-index";
        let source = package["source"].as_str();
        // Without a source it is a crate of this repository.
        assert!(source.is_none_or(|source| source == registry), "{id} comes from {source:?}");
    }
}
