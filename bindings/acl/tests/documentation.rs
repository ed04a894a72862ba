//! The page about programs for CANN agrees with the table.

use ascendcl::table::{Class, FUNCTIONS};
use std::collections::BTreeMap;

#[test]
fn the_page_has_a_row_for_every_function_with_its_class_and_no_other() {
    let page = include_str!("../../../docs/cann.md");
    let table = page.split("## Functions").nth(1).unwrap();
    let rows: BTreeMap<&str, &str> =
        table.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` | ")).collect();
    let expected: BTreeMap<&str, &str> = FUNCTIONS
        .iter()
        .map(|function| {
            let class = match function.class {
                Class::Memory => "memory",
                Class::Thin => "thin",
                Class::Absent => "absent",
            };
            (function.name(), class)
        })
        .collect();
    assert_eq!(rows, expected);
}

#[test]
fn the_page_names_every_variable_of_the_environment() {
    let page = include_str!("../../../docs/cann.md");
    let sources = [include_str!("../src/border.rs"), include_str!("../src/devices.rs")];
    let named = |source: &'static str| source.split('"').filter(|text| text.starts_with("ASCEND_ACL_"));
    let variables: Vec<&str> = sources.into_iter().flat_map(named).collect();
    assert!(variables.len() >= 2);
    for variable in variables {
        assert!(page.contains(&format!("| `{variable}` |")), "{variable}");
    }
}
