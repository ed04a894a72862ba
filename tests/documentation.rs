//! The tables in README.md and docs/ agree with the library.

use ascend_vmm::error::{Errno, VendorCode};

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
    for row in rows(include_str!("../docs/hosts.md")) {
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
    let source = include_str!("../src/error/finding.rs");
    let (documentation, rows) = source.split_once("fn row(&self)").unwrap();
    let code = |line: &'static str| line.trim().trim_end_matches(',').strip_prefix('"')?.strip_suffix('"');
    let alone = rows.lines().filter_map(code);
    let inline = rows.lines().filter_map(|line| line.split_once("of(device, \"")?.1.split('"').next());
    let is_code = |text: &&str| text.chars().all(|c| c.is_ascii_lowercase() || c == '-' || c.is_ascii_digit());
    let codes: Vec<&str> = alone.chain(inline).filter(is_code).collect();
    assert!(codes.len() > 30, "{codes:?}");
    for code in codes {
        assert!(
            documentation.contains(&format!("/// `{code}`: ")),
            "{code} is not in the documentation of its variant"
        );
    }
}

#[test]
fn the_readmes_table_names_every_function_of_the_vendors_family() {
    let readme = include_str!("../README.md");
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
        assert!(readme.contains(&format!("`{name}`")), "the README does not mention aclrt{name}");
    }
}
