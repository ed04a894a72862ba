//! The pages agree with the library and with each other: tables, lists of files, links.

use ascend_vmm::error::{Errno, VendorCode};
use std::fs;
use std::path::{Path, PathBuf};

/// The cells of the table rows of a page.
fn rows(page: &str) -> impl Iterator<Item = Vec<&str>> {
    page.lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"))
        .map(|line| line.split(" | ").map(str::trim).collect())
}

#[test]
fn the_vendors_codes_are_those_of_the_page_for_hosts() {
    let named = |name: &str| (1..=133).map(Errno::from_raw).find(|errno| format!("{errno:?}") == name);
    let mut seen = 0;
    for row in rows(include_str!("../../docs/hosts.md")) {
        let [errnos, driver, acl] = row[..] else { continue };
        if !acl.chars().all(|c| c.is_ascii_digit()) {
            continue;
        }
        for errno in errnos.split(", ").filter_map(named) {
            let code = VendorCode::of(errno);
            assert_eq!(format!("{} {}", code.driver, code.driver_name), driver, "{errno:?}");
            assert_eq!(code.acl.to_string(), acl, "{errno:?}");
            seen += 1;
        }
    }
    assert!(seen >= 18, "only {seen} codes were found on the page");
}

#[test]
fn every_finding_is_documented_with_its_code() {
    let source = include_str!("../../src/error/finding.rs");
    let (documentation, rows) = source.split_once("fn row(&self)").unwrap();
    // The first argument of the functions that make a row.
    let rows = ["fatal(", "warning(", "note(", "Severity::Fatal },"].map(|function| rows.split(function).skip(1));
    let first = rows.into_iter().flatten().filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
    let codes: Vec<&str> = first.collect();
    assert!(codes.len() > 30, "{codes:?}");
    for code in codes {
        assert!(
            documentation.contains(&format!("/// `{code}`: ")),
            "{code} is not in the documentation of its variant"
        );
    }
}

#[test]
fn the_table_of_the_vendors_functions_names_every_one_of_the_family() {
    let page = include_str!("../../docs/cann.md");
    for name in [
        "MallocPhysical",
        "FreePhysical",
        "ReserveMemAddress",
        "ReleaseMemAddress",
        "MapMem",
        "UnmapMem",
        "MemSetAccess",
        "MemGetAccess",
        "MemGetAllocationGranularity",
        "MemRetainAllocationHandle",
        "MemGetAllocationPropertiesFromHandle",
        "MemGetAddressRange",
        "Memcpy",
        "Memset",
        "GetDeviceCount",
        "DeviceEnablePeerAccess",
        "MemExportToShareableHandle",
        "MemImportFromShareableHandle",
        "MemSetPidToShareableHandle",
        "DeviceGetBareTgid",
    ] {
        assert!(page.contains(&format!("`{name}`")), "docs/cann.md does not mention aclrt{name}");
    }
}

/// The repository's root.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The files of a directory, those of its subdirectories included.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// The pages of this repository.
fn pages() -> Vec<PathBuf> {
    let named = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bindings/python/README.md"];
    let named = named.map(|name| root().join(name));
    let docs = files(&root().join("docs")).into_iter().filter(|path| path.extension().is_some_and(|end| end == "md"));
    named.into_iter().chain(docs).collect()
}

/// The targets of the links of a page, without the code blocks.
fn links(page: &str) -> Vec<&str> {
    let text = page.split("```").step_by(2);
    text.flat_map(|text| text.split("](").skip(1)).filter_map(|rest| rest.split(')').next()).collect()
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(page: &str) -> Vec<String> {
    let text = page.split("```").step_by(2);
    let headings = text.flat_map(str::lines).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        words.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn every_relative_link_leads_to_a_file_and_to_a_heading_in_it() {
    let (mut seen, mut broken) = (0, Vec::new());
    for path in pages() {
        let page = fs::read_to_string(&path).unwrap();
        for link in links(&page) {
            // Pages of packages name the pages of the repository by their address.
            let (base, link) = match link.strip_prefix(concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/")) {
                Some(link) => (root(), link),
                None if link.contains("://") => continue,
                None => (path.parent().unwrap(), link),
            };
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { base.join(file) };
            let has_anchor = || anchors(&fs::read_to_string(&target).unwrap()).iter().any(|known| known == anchor);
            if !target.exists() || !anchor.is_empty() && !has_anchor() {
                broken.push(format!("{}: {link}", path.display()));
            }
            seen += 1;
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(seen > 30, "only {seen} links were found");
}

#[test]
fn every_page_named_in_a_source_file_exists() {
    let mut missing = Vec::new();
    for directory in ["src", "ioctl", "tests", "tool", "xtask", "examples"].map(|name| root().join(name)) {
        for path in files(&directory).into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs")) {
            let Ok(text) = fs::read_to_string(&path) else { continue };
            for rest in text.split("docs/").skip(1) {
                let end = rest.find(|c: char| !(c.is_ascii_lowercase() || c == '-' || c == '/')).unwrap_or(rest.len());
                let page = format!("docs/{}.md", &rest[..end]);
                if rest[end..].starts_with(".md") && !root().join(&page).exists() {
                    missing.push(format!("{}: {page}", path.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn the_page_about_the_library_has_a_line_for_every_file() {
    let page = include_str!("../../docs/library.md");
    let named = |path: &Path| format!("| `{}` |", path.strip_prefix(root()).unwrap().display());
    let missing: Vec<String> =
        files(&root().join("src")).iter().map(|path| named(path)).filter(|row| !page.contains(row)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `src/")?.split('`').next());
    for file in rows {
        assert!(root().join("src").join(file).exists(), "src/{file} is not there");
    }
}

#[test]
fn every_guarantee_names_tests_that_exist() {
    let page = include_str!("../../docs/library.md");
    let table = page.split("\n## Guarantees\n").nth(1).and_then(|rest| rest.split("\n### ").next()).unwrap();
    let mut seen = 0;
    for row in rows(table) {
        let [guarantee, tests] = row[..] else { panic!("{row:?}") };
        if guarantee == "guarantee" {
            continue;
        }
        // Files and the tests in them, in this order; commands have spaces or signs in them.
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        let mut source = None;
        for name in names {
            if name.ends_with(".rs") {
                let in_root = ["src/", "bindings/"].iter().any(|folder| name.starts_with(folder));
                let path = root().join(if in_root { "" } else { "tests" }).join(name);
                source = Some(fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())));
            } else if name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_') {
                let source = source.as_ref().unwrap_or_else(|| panic!("no file before {name}"));
                assert!(source.contains(&format!("fn {name}(")), "{name} is not in its file");
            }
        }
        assert!(source.is_some(), "{guarantee:?} names no test");
        seen += 1;
    }
    assert!(seen > 30, "only {seen} guarantees were found");
}
