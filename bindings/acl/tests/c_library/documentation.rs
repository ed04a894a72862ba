//! The page about programs for CANN agrees with the library.

#[test]
fn the_page_names_every_variable_of_the_environment() {
    let page = include_str!("../../../../docs/cann.md");
    let sources = [include_str!("../../src/border.rs"), include_str!("../../src/devices.rs")];
    let named = |source: &'static str| source.split('"').filter(|text| text.starts_with("ASCEND_ACL_"));
    let variables: Vec<&str> = sources.into_iter().flat_map(named).collect();
    assert!(variables.len() >= 2);
    for variable in variables {
        assert!(page.contains(&format!("| `{variable}` |")), "{variable}");
    }
}
