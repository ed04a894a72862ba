//! The rules, by topic.

mod access;
mod address_check;
mod alloc;
mod asynchronous;
mod batch;
mod bring_up;
mod convert;
mod copy;
mod device_handles;
mod device_process;
mod discovery;
mod dynamic_ranges;
mod events;
mod fill;
mod heaps;
mod host_handles;
mod import;
mod klog;
mod mapping;
mod multiplexer;
mod named;
mod peer_access;
mod plain_memory;
mod processes;
mod register;
mod rows;
mod runtime_questions;
mod segments;
mod share;
mod tasks;
mod vendor_stack;

use crate::rule::Rule;

const ALL: &[&[Rule]] = &[
    multiplexer::RULES,
    discovery::RULES,
    device_process::RULES,
    bring_up::RULES,
    heaps::RULES,
    dynamic_ranges::RULES,
    alloc::RULES,
    host_handles::RULES,
    device_handles::RULES,
    mapping::RULES,
    access::RULES,
    share::RULES,
    import::RULES,
    copy::RULES,
    rows::RULES,
    batch::RULES,
    fill::RULES,
    peer_access::RULES,
    address_check::RULES,
    asynchronous::RULES,
    klog::RULES,
    segments::RULES,
    processes::RULES,
    vendor_stack::RULES,
    runtime_questions::RULES,
    plain_memory::RULES,
    named::RULES,
    register::RULES,
    convert::RULES,
    tasks::RULES,
    events::RULES,
];

/// Every rule, in the order in which they run.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    ALL.iter().copied().flatten()
}

#[cfg(test)]
mod tests {
    use super::rules;
    use std::collections::BTreeSet;

    #[test]
    fn every_rule_has_a_name_of_its_own() {
        let names: BTreeSet<_> = rules().map(|rule| rule.name).collect();
        assert_eq!(names.len(), rules().count());
        assert!(names.len() >= 879, "{}", names.len());
    }

    /// `function, file.c`: an identifier, and a path that ends in the name of a C file.
    fn is_citation(text: &str) -> bool {
        let word =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        let Some((function, path)) = text.split_once(", ") else { return false };
        let Some(stem) = path.strip_suffix(".c").or_else(|| path.strip_suffix(".h")) else { return false };
        word(function) && !function.starts_with(|first: char| first.is_ascii_digit()) && stem.split('/').all(word)
    }

    #[test]
    fn every_rule_cites_the_function_that_decides_it() {
        let wrong: Vec<_> =
            rules().filter(|rule| !is_citation(rule.decided_by)).map(|rule| (rule.name, rule.decided_by)).collect();
        assert!(wrong.is_empty(), "without a citation of the form `function, file.c`: {wrong:?}");
    }

    #[test]
    fn a_citation_is_a_function_and_a_c_file() {
        assert!(is_citation("devmm_svm_ioctl, svm_module_ops.c"));
        assert!(is_citation("__fput, linux/fs/file_table.c"));
        for wrong in
            ["", "4.3", "svm_module_ops.c", "devmm_svm_ioctl", ", a.c", "f, .c", "f, a.rs", "f g, a.c", "1f, a.c"]
        {
            assert!(!is_citation(wrong), "{wrong}");
        }
    }
}
