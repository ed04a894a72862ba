//! Versions: committed, changed in place, waited for and removed; events, and what a request costs.

use super::*;

#[test]
fn a_committed_layout_outlives_its_writer_and_is_read_by_many() {
    let mut rig = Rig::new(64 * MIB);
    let committed = rig.commit(1, "a/w", 8 * MIB);
    rig.close(1);
    for reader in 2..10 {
        assert_eq!(version(rig.open(reader, "a/w", Mode::Read, 0)), committed);
    }
    (2..10).for_each(|reader| rig.close(reader));
    assert_eq!((rig.free, rig.domain("a/w").unwrap().bytes), (56 * MIB, 8 * MIB));
}

#[test]
fn a_writer_that_dies_leaves_the_version_before_it_and_no_memory() {
    let mut rig = Rig::new(64 * MIB);
    let first = rig.commit(1, "a", 8 * MIB);
    rig.close(1);
    assert_eq!(version(rig.open(2, "a", Mode::Write, 0)), 0);
    rig.allocate(2, 16 * MIB, 0);
    assert_eq!(version(rig.open(3, "a", Mode::Read, 0)), first, "the old one is served meanwhile");
    rig.close(2);
    assert_eq!(rig.free, 56 * MIB);
    assert_eq!(version(rig.open(4, "a", Mode::Read, 0)), first);
}

#[test]
fn a_replaced_version_stays_for_those_who_read_it() {
    let mut rig = Rig::new(64 * MIB);
    let first = rig.commit(1, "a", 8 * MIB);
    assert_eq!(version(rig.open(2, "a", Mode::Read, 0)), first);
    rig.close(1);
    let second = rig.commit(3, "a", 4 * MIB);
    assert!(second > first);
    assert_eq!(rig.free, 52 * MIB, "both versions");
    assert_eq!(rig.domain("a").unwrap().superseded, 8 * MIB);
    rig.close(2);
    assert_eq!(rig.free, 60 * MIB);
}

#[test]
fn an_update_in_place_makes_the_domain_dirty_until_its_commit() {
    let mut rig = Rig::new(64 * MIB);
    let first = rig.commit(1, "a", 8 * MIB);
    assert!(waits(&rig.open(2, "a", Mode::Update, 5000)), "a reader that does not allow it");
    rig.close(1);
    assert_eq!(version(rig.last(2)), first);
    assert_eq!(rig.ask(2, Request::Begin {}), Some(Answer::Done {}));
    assert!(waits(&rig.open(3, "a", Mode::Read, 5000)));
    let second = version(rig.ask(2, Request::Commit {}));
    assert_eq!(version(rig.last(3)), second);
    assert_eq!((rig.free, rig.domain("a").unwrap().state), (56 * MIB, "committed".into()));
    rig.close(3);
    rig.close(2);
    // The next one dies.
    rig.open(4, "a", Mode::Update, 0);
    rig.ask(4, Request::Begin {});
    rig.close(4);
    assert_eq!(rig.domain("a").unwrap().state, "dirty");
    assert_eq!(code(rig.open(5, "a", Mode::Read, 5000)), Code::Dirty);
    // It is mended by a new layout.
    rig.commit(6, "a", 4 * MIB);
    assert_eq!(rig.free, 60 * MIB);
}

#[test]
fn who_waits_for_a_version_hears_of_the_next_commit() {
    let mut rig = Rig::new(64 * MIB);
    rig.connect(1);
    let wait = |newer_than, wait_ms| Request::Wait { newer_than, domain: Some("a".parse().unwrap()), wait_ms };
    assert_eq!(code(rig.ask(1, wait(0, 0))), Code::Timeout);
    assert!(waits(&rig.ask(1, wait(0, 9000))));
    let first = rig.commit(2, "a", 2 * MIB);
    assert_eq!(version(rig.last(1)), first);
    assert_eq!(version(rig.ask(1, wait(0, 0))), first);
    assert!(waits(&rig.ask(1, wait(first, 9000))));
    rig.pass(Duration::from_secs(9));
    assert_eq!(code(rig.last(1)), Code::Timeout);
}

/// The time that this thread has computed.
fn computed() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

#[test]
fn a_request_costs_the_same_beside_ten_thousand_domains() {
    let mut rig = Rig::new(1 << 40);
    rig.commit(1, "a", 2 * MIB);
    let cost = |rig: &mut Rig| {
        let batch = |rig: &mut Rig| {
            let start = computed();
            for _ in 0..100 {
                assert!(version(rig.open(2, "a", Mode::Read, 0)) > 0);
                rig.pass(Duration::ZERO);
                rig.ask(2, Request::Close {});
                assert!(version(rig.open(2, "a", Mode::Write, 0)) == 0);
                rig.allocate(2, 2 * MIB, 0);
                rig.ask(2, Request::Close {});
            }
            computed() - start
        };
        (0..10).map(|_| batch(rig)).min().unwrap()
    };
    let few = cost(&mut rig);
    for number in 0..10_000 {
        rig.commit(3, &format!("many/{number}"), 2 * MIB);
        rig.ask(3, Request::Close {});
    }
    let many = cost(&mut rig);
    // A walk over all of them takes a thousand times as long.
    assert!(many < 5 * few, "{few:?} for 100 with one domain, {many:?} with ten thousand");
}

#[test]
fn only_an_unused_domain_can_be_removed() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 2 * MIB);
    rig.connect(2);
    let remove = Request::Remove { domain: "a".parse().unwrap() };
    assert_eq!(code(rig.ask(2, remove.clone())), Code::Busy);
    rig.close(1);
    assert_eq!(rig.ask(2, remove.clone()), Some(Answer::Done {}));
    assert_eq!(rig.free, 64 * MIB);
    assert_eq!(code(rig.ask(2, remove)), Code::Empty);
    assert_eq!(rig.domain("a"), None, "nothing is left of it");
}

#[test]
fn keys_and_values_of_a_layout_have_an_end() {
    let mut rig = Rig::new(64 * MIB);
    rig.open(1, "a", Mode::Write, 0);
    let Some(Answer::Allocated { allocation }) = rig.allocate(1, 2 * MIB, 0) else { panic!() };
    let put = |from: u32| Request::Put {
        entries: (from..from + 64)
            .map(|key| {
                let value = vec![0; 64 << 10];
                (key.to_string(), Entry { allocation: allocation.id, offset: 0, size: 1, value })
            })
            .collect(),
    };
    let mut refused = 0;
    for from in (0..2048).step_by(64) {
        match rig.ask(1, put(from)) {
            Some(Answer::Done {}) => assert_eq!(refused, 0),
            answer => {
                assert_eq!(code(answer), Code::Invalid);
                refused += 1;
            }
        }
    }
    assert_eq!(refused, 17, "15 requests of 4 MiB and a little fit into 64 MiB");
    // What is put twice before a commit counts twice, and a commit has it once.
    assert_eq!(code(rig.ask(1, put(0))), Code::Invalid);
    assert!(matches!(rig.ask(1, Request::Commit {}), Some(Answer::Committed { .. })));
    rig.close(1);
    assert!(matches!(rig.open(2, "a", Mode::Update, 0), Some(Answer::Opened { entries: 960, .. })));
    (0..15).for_each(|_| assert_eq!(rig.ask(2, put(0)), Some(Answer::Done {})));
    assert!(matches!(rig.ask(2, Request::Commit {}), Some(Answer::Committed { .. })));
    rig.close(2);
    // What was put before stays with it, and both together have the same end.
    assert!(matches!(rig.open(3, "a", Mode::Update, 0), Some(Answer::Opened { entries: 960, .. })));
    assert_eq!(rig.ask(3, put(4096)), Some(Answer::Done {}));
    assert_eq!(code(rig.ask(3, Request::Commit {})), Code::Invalid);
}

#[test]
fn the_beginning_of_every_wait_and_the_end_of_every_version_is_an_event() {
    let mut rig = Rig::new(16 * MIB);
    rig.commit(1, "a", 8 * MIB);
    let events = |rig: &Rig, words: &str| rig.books.events.iter().filter(|event| event.text.contains(words)).count();
    // For a role, for a version, for memory.
    rig.open(2, "b", Mode::Read, 1000);
    assert_eq!(events(&rig, "process 2 (engine-2) waits, mode read: nothing is committed in b"), 1);
    rig.connect(3);
    rig.ask(3, Request::Wait { newer_than: 7, domain: Some("a".parse().unwrap()), wait_ms: 1000 });
    assert_eq!(events(&rig, "process 3 waits for a version after 7"), 1);
    rig.open(4, "c", Mode::Write, 0);
    rig.allocate(4, 10 * MIB, 10_000);
    assert_eq!(events(&rig, "process 4 waits for memory: 10 MiB were asked for, 8 MiB are free"), 1);
    rig.open(5, "d", Mode::Write, 0);
    rig.allocate(5, 2 * MIB, 10_000);
    assert_eq!(events(&rig, "process 5 waits for memory"), 1, "behind the other");
    rig.pass(Duration::from_secs(2));
    assert_eq!(events(&rig, "waits for memory"), 2, "each once");
    rig.close(4);
    rig.close(5);
    // A version that is replaced goes with its last reader.
    rig.close(2);
    rig.commit(6, "a", 2 * MIB);
    assert_eq!(events(&rig, "version 1 was dropped"), 0);
    rig.close(1);
    assert_eq!(events(&rig, "version 1 was dropped"), 1);
}
