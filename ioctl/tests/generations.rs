//! The list of generations, and what each record must not inherit from its parent.

use ascend_ioctl::Generation;
use ascend_ioctl::svm::Op;
use std::collections::BTreeSet;

fn distinct<T: Ord>(fact: impl Fn(Generation) -> T) -> bool {
    Generation::ALL.into_iter().map(fact).collect::<BTreeSet<T>>().len() == Generation::ALL.len()
}

#[test]
fn every_record_has_a_name_a_ticket_code_and_a_table_of_its_own() {
    assert!(distinct(|generation| generation.delta().name));
    assert!(distinct(|generation| generation.delta().ticket));
    assert!(distinct(|generation| generation.delta().table));
}

/// Tickets outlive the program that wrote them, so the codes of released generations are fixed.
#[test]
fn ticket_codes_never_change() {
    let codes = [("8.5.0", 1), ("9.0.0", 2), ("26.1", 3)];
    for (name, code) in codes {
        assert_eq!(name.parse::<Generation>().unwrap().delta().ticket, code);
    }
    assert!(Generation::ALL.iter().all(|generation| generation.delta().ticket != 0));
}

#[test]
fn every_generation_grew_from_the_one_before_it() {
    let mut parent = None;
    for generation in Generation::ALL {
        assert_eq!(generation.delta().parent, parent);
        parent = Some(generation);
    }
    assert_eq!(parent, Some(Generation::NEWEST));
}

/// A client recognises a generation by its URD keys, and by the numbers of two commands together
/// with the segments.
#[test]
fn no_two_generations_look_alike() {
    let number = |generation: Generation, op| generation.svm(op).unwrap().command.number;
    let keys = |generation: Generation| generation.delta().urd_keys.iter().map(|key| (key.main, key.sub));
    assert!(distinct(|generation| keys(generation).collect::<BTreeSet<_>>()));
    let segments = |generation: Generation| generation.delta().segments.iter().map(|range| (range.start, range.size));
    for op in [Op::AllocProcStruct, Op::GetMmapInfo] {
        let face = |generation| (number(generation, op), segments(generation).collect::<Vec<_>>());
        assert!(distinct(face), "{op:?}");
    }
    assert!(
        Generation::ALL.iter().all(|generation| generation.delta().urd_keys.contains(&generation.delta().udis_get))
    );
}

#[test]
fn names_are_parsed_and_unknown_ones_refused_with_the_list() {
    for generation in Generation::ALL {
        assert_eq!(generation.to_string().parse(), Ok(generation));
    }
    let refused = "7.0".parse::<Generation>().unwrap_err().to_string();
    assert!(refused.starts_with("unknown driver generation; known are 8.5.0, 9.0.0"), "{refused}");
    assert!(refused.ends_with(&format!(" and {}", Generation::NEWEST)), "{refused}");
}

#[test]
fn ranges_of_generations_include_their_bound() {
    use Generation::{V8_5_0, V9_0_0, V26_1};
    assert!(V9_0_0.and_newer().starts_with(&[V9_0_0, V26_1]));
    assert_eq!(V9_0_0.and_older(), [V8_5_0, V9_0_0]);
    assert_eq!(Generation::NEWEST.and_newer(), [Generation::NEWEST]);
    assert_eq!(V8_5_0.and_older(), [V8_5_0]);
}
