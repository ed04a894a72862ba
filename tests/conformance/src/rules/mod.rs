//! The rules, by what they are about.

mod access;
mod alloc;
mod asynchronous;
mod bring_up;
mod copy;
mod device_handles;
mod device_process;
mod discovery;
mod heaps;
mod host_handles;
mod import;
mod klog;
mod mapping;
mod multiplexer;
mod processes;
mod segments;
mod share;

use crate::rule::Rule;

const ALL: &[&[Rule]] = &[
    multiplexer::RULES,
    discovery::RULES,
    device_process::RULES,
    bring_up::RULES,
    heaps::RULES,
    alloc::RULES,
    host_handles::RULES,
    device_handles::RULES,
    mapping::RULES,
    access::RULES,
    share::RULES,
    import::RULES,
    copy::RULES,
    asynchronous::RULES,
    klog::RULES,
    segments::RULES,
    processes::RULES,
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
        assert!(names.len() >= 150);
    }
}
