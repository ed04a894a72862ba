//! The software bill of materials of the tool: every crate that is linked into it, in the format
//! CycloneDX 1.5, from `cargo metadata` and `Cargo.lock`.

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The document for a package and the crates that it is built from, without those of its tests.
/// `metadata` is what `cargo metadata` printed; `lock` is the text of `Cargo.lock`.
pub fn document(metadata: &Value, lock: &str, package: &str) -> Result<Value, String> {
    let missing = |what: &str| format!("`cargo metadata` has no {what}");
    let packages = metadata["packages"].as_array().ok_or_else(|| missing("packages"))?;
    let nodes = metadata["resolve"]["nodes"].as_array().ok_or_else(|| missing("resolved dependencies"))?;
    let by_id: BTreeMap<&str, &Value> = packages.iter().filter_map(|it| Some((it["id"].as_str()?, it))).collect();
    let nodes: BTreeMap<&str, &Value> = nodes.iter().filter_map(|it| Some((it["id"].as_str()?, it))).collect();
    let root = packages.iter().find(|it| it["name"] == package).and_then(|it| it["id"].as_str());
    let root = root.ok_or_else(|| missing(package))?;

    // Cargo's own ids have paths of this machine.
    let reference = |id: &str| {
        let field = |name: &str| by_id.get(id).and_then(|it| it[name].as_str()).unwrap_or_default();
        format!("pkg:cargo/{}@{}", field("name"), field("version"))
    };
    let mut reached = BTreeSet::from([root]);
    let mut dependencies = Vec::new();
    let mut open = vec![root];
    while let Some(id) = open.pop() {
        let direct: BTreeSet<&str> = nodes.get(id).map(|node| linked(node)).unwrap_or_default();
        open.extend(direct.iter().filter(|it| reached.insert(it)));
        let direct: Vec<String> = direct.into_iter().map(&reference).collect();
        dependencies.push(json!({ "ref": reference(id), "dependsOn": direct }));
    }
    dependencies.sort_by(|one, other| one["ref"].as_str().cmp(&other["ref"].as_str()));

    let checksums = checksums(lock);
    let component = |id: &str, kind: &str| {
        let (name, version) = (&by_id[id]["name"], &by_id[id]["version"]);
        let (name, version) = (name.as_str().unwrap_or_default(), version.as_str().unwrap_or_default());
        let mut component = json!({
            "type": kind, "bom-ref": reference(id), "name": name, "version": version, "purl": reference(id),
        });
        if let Some(license) = by_id[id]["license"].as_str() {
            // The older spelling of OR.
            component["licenses"] = json!([{ "expression": license.replace('/', " OR ") }]);
        }
        if let Some(checksum) = checksums.get(&(name, version)) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        component
    };
    let components: Vec<Value> = reached.iter().filter(|id| **id != root).map(|id| component(id, "library")).collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": component(root, "application") },
        "components": components,
        "dependencies": dependencies,
    }))
}

/// The packages that a package is built from.
fn linked(node: &Value) -> BTreeSet<&str> {
    let normal = |kinds: &Value| kinds.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"] != "dev"));
    let direct = node["deps"].as_array().into_iter().flatten();
    direct.filter(|it| normal(&it["dep_kinds"])).filter_map(|it| it["pkg"].as_str()).collect()
}

/// The SHA-256 of each package that came from a registry, by name and version.
fn checksums(lock: &str) -> BTreeMap<(&str, &str), &str> {
    lock.split("[[package]]").filter_map(entry).collect()
}

/// Name, version and checksum of an entry of `Cargo.lock`.
fn entry(block: &str) -> Option<((&str, &str), &str)> {
    let field =
        |name: &str| block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \"")?.strip_suffix('"'));
    Some(((field("name")?, field("version")?), field("checksum")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A package on a crate from a registry, which needs another to be built; a third is for tests.
    fn metadata() -> Value {
        let package = |name: &str, license: &str| {
            let id = format!("id-{name}");
            json!({ "id": id, "name": name, "version": "1.2.3", "license": license })
        };
        let needs = |name: &str, kind: Value| json!({ "pkg": format!("id-{name}"), "dep_kinds": [{ "kind": kind }] });
        json!({
            "packages": [package("tool", "MIT"), package("used", "MIT/Apache-2.0"), package("builds", "MIT"),
                package("tests", "MIT")],
            "resolve": { "nodes": [
                { "id": "id-tool", "deps": [needs("used", Value::Null), needs("tests", json!("dev"))] },
                { "id": "id-used", "deps": [needs("builds", json!("build"))] },
                { "id": "id-builds", "deps": [] },
                { "id": "id-tests", "deps": [] },
            ] },
        })
    }

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"tool\"\nversion = \"1.2.3\"\n\n\
        [[package]]\nname = \"used\"\nversion = \"1.2.3\"\nsource = \"registry\"\nchecksum = \"abcd\"\n";

    #[test]
    fn what_is_built_into_the_tool_is_listed_and_what_tests_need_is_not() {
        let bill = document(&metadata(), LOCK, "tool").unwrap();
        let names: Vec<&Value> = bill["components"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
        assert_eq!(names, ["builds", "used"]);
        assert_eq!(bill["metadata"]["component"]["name"], "tool");
        let used = &bill["components"][1];
        assert_eq!(used["purl"], "pkg:cargo/used@1.2.3");
        assert_eq!(used["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(used["hashes"][0]["content"], "abcd");
        let of_tool =
            bill["dependencies"].as_array().unwrap().iter().find(|it| it["ref"] == "pkg:cargo/tool@1.2.3").unwrap();
        assert_eq!(of_tool["dependsOn"], json!(["pkg:cargo/used@1.2.3"]));
        assert!(!bill.to_string().contains("id-"), "{bill}");
    }

    #[test]
    fn a_package_that_is_not_there_is_an_error() {
        assert!(document(&metadata(), LOCK, "other").unwrap_err().contains("other"));
        assert!(document(&json!({}), LOCK, "tool").is_err());
    }
}
