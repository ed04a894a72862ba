//! Roles: who gets one, who waits for one, and how one ends.

use super::*;

#[test]
fn one_writes_and_others_wait_in_their_order_until_their_time_is_over() {
    let mut rig = Rig::new(64 * MIB);
    rig.open(1, "a", Mode::Write, 0);
    assert_eq!(code(rig.open(2, "a", Mode::Write, 0)), Code::Timeout);
    assert!(waits(&rig.open(3, "a", Mode::Write, 1000)));
    assert!(waits(&rig.open(4, "a", Mode::Write, 2000)));
    rig.pass(Duration::from_millis(1000));
    assert_eq!(code(rig.last(3)), Code::Timeout);
    rig.close(1);
    assert_eq!(version(rig.last(4)), 0);
}

#[test]
fn a_writer_or_reader_writes_first_and_then_reads() {
    let mut rig = Rig::new(64 * MIB);
    assert!(matches!(rig.open(1, "a", Mode::WriteOrRead, 0), Some(Answer::Opened { writes: true, .. })));
    assert!(waits(&rig.open(2, "a", Mode::WriteOrRead, 1000)));
    assert!(waits(&rig.open(3, "a", Mode::WriteOrRead, 1000)));
    // The writer dies: the next one writes.
    rig.close(1);
    assert!(matches!(rig.last(2), Some(Answer::Opened { writes: true, .. })));
    rig.allocate(2, 2 * MIB, 0);
    let committed = version(rig.ask(2, Request::Commit {}));
    assert!(matches!(rig.last(3), Some(Answer::Opened { writes: false, version, .. }) if version == committed));
}

#[test]
fn a_writer_that_needs_the_domain_alone_goes_before_new_readers() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 8 * MIB);
    assert!(waits(&rig.open(2, "a", Mode::Discard, 5000)));
    assert!(waits(&rig.open(3, "a", Mode::Read, 5000)));
    rig.close(1);
    assert!(matches!(rig.last(2), Some(Answer::Opened { writes: true, .. })));
    assert_eq!(rig.free, 64 * MIB, "what was committed is given up first");
    assert_eq!(rig.last(3), None);
    rig.allocate(2, 2 * MIB, 0);
    rig.ask(2, Request::Commit {});
    assert!(version(rig.last(3)) > 0);
}

#[test]
fn an_update_that_never_began_leaves_the_domain_clean() {
    let mut rig = Rig::new(64 * MIB);
    let first = rig.commit(1, "a", 8 * MIB);
    rig.close(1);
    rig.open(2, "a", Mode::Update, 0);
    rig.close(2);
    assert_eq!(version(rig.open(3, "a", Mode::Read, 0)), first);
}

#[test]
fn readers_that_allow_updates_stay_and_see_the_new_version() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 8 * MIB);
    rig.close(1);
    rig.connect(2);
    let domain: DomainName = "a".parse().unwrap();
    let open = Request::Open {
        domain,
        mode: Mode::Read,
        device: 4,
        identity: String::new(),
        wait_ms: 0,
        allow_update: true,
        lends: false,
        token: Vec::new(),
    };
    rig.ask(2, open);
    rig.open(3, "a", Mode::Update, 0);
    rig.ask(3, Request::Begin {});
    let second = version(rig.ask(3, Request::Commit {}));
    rig.close(3);
    rig.close(2);
    assert_eq!((rig.free, rig.domain("a").unwrap().version), (56 * MIB, second));
}

#[test]
fn who_waits_with_another_npu_than_the_writers_is_refused_at_the_commit() {
    let mut rig = Rig::new(64 * MIB);
    rig.connect(2);
    let open = Request::Open {
        domain: "a".parse().unwrap(),
        mode: Mode::Read,
        device: 5,
        identity: String::new(),
        wait_ms: 1000,
        allow_update: false,
        lends: false,
        token: Vec::new(),
    };
    assert!(matches!(rig.ask(2, open), Some(Answer::Waiting(_))));
    rig.commit(1, "a", 4 * MIB);
    let Some(Answer::Error(refused)) = rig.last(2) else { panic!("it has a role") };
    assert_eq!(refused.code, Code::OtherDevice);
    assert!(matches!(rig.open(3, "a", Mode::Read, 0), Some(Answer::Opened { writes: false, .. })));
}

#[test]
fn a_reader_on_another_npu_is_refused() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 2 * MIB);
    rig.connect(2);
    let open = |device| Request::Open {
        domain: "a".parse().unwrap(),
        mode: Mode::Read,
        device,
        identity: String::new(),
        wait_ms: 0,
        allow_update: false,
        lends: false,
        token: Vec::new(),
    };
    assert_eq!(code(rig.ask(2, open(5))), Code::OtherDevice);
    assert_eq!(code(rig.ask(2, open(0))), Code::OtherDevice);
    assert!(version(rig.ask(2, open(4))) > 0);
}

#[test]
fn what_comes_at_the_wrong_time_ends_the_connection_or_is_refused() {
    let mut rig = Rig::new(64 * MIB);
    rig.books.connect(ClientId(1), Peer { pid: 1, ..Peer::default() }, rig.now);
    assert_eq!(code(rig.ask(1, Request::Ping {})), Code::Protocol);
    assert_eq!(code(rig.ask(1, Request::Hello { version: 2, process: 1, program: String::new() })), Code::Protocol);
    assert_eq!(code(rig.ask(1, Request::Hello { version: 1, process: 2, program: String::new() })), Code::Protocol);
    assert_eq!(rig.ended, [1, 1, 1]);
    rig.connect(2);
    for early in [Request::Commit {}, Request::Begin {}, Request::Allocations { from: 0 }] {
        assert_eq!(code(rig.ask(2, early)), Code::Protocol);
    }
    rig.commit(3, "a", 2 * MIB);
    rig.open(4, "a", Mode::Read, 0);
    for wrong in [
        Request::Commit {},
        Request::Free { allocations: vec![1] },
        Request::Shares { allocations: vec![u64::MAX] },
        Request::Gave { reclaim: 7 },
    ] {
        assert_eq!(code(rig.ask(4, wrong.clone())), Code::Invalid, "{wrong:?}");
    }
    rig.open(5, "b", Mode::Write, 0);
    for size in [0, 1, 2 * MIB + 1, u64::MAX] {
        assert_eq!(code(rig.allocate(5, size, 0)), Code::Invalid, "{size}");
    }
    assert_eq!(code(rig.ask(5, Request::Commit {})), Code::Invalid, "nothing was allocated");
    assert_eq!(code(rig.allocate(5, u64::MAX / 2 / MIB * 2 * MIB, 0)), Code::Invalid);
    assert_eq!(code(rig.allocate(5, 1 << 46, 0)), Code::OutOfMemory);
}

#[test]
fn a_writer_in_place_that_has_not_begun_keeps_new_readers_out() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 8 * MIB);
    rig.close(1);
    rig.open(2, "a", Mode::Update, 0);
    assert!(waits(&rig.open(3, "a", Mode::Read, 5000)), "it would map what is changed");
    assert!(waits(&rig.open(4, "a", Mode::WriteOrRead, 5000)));
    rig.close(2);
    assert!(version(rig.last(3)) > 0 && version(rig.last(4)) > 0);
}

#[test]
fn readers_that_sleep_let_an_update_in_and_wake_after_it() {
    let mut rig = Rig::new(64 * MIB);
    let first = rig.commit(1, "a", 8 * MIB);
    assert!(waits(&rig.open(2, "a", Mode::Update, 5000)));
    assert_eq!(rig.ask(1, Request::Sleep {}), Some(Answer::Done {}));
    assert_eq!(version(rig.last(2)), first);
    assert_eq!(code(rig.ask(1, Request::Shares { allocations: vec![] })), Code::Invalid, "asleep");
    assert_eq!(code(rig.ask(1, Request::Wake { wait_ms: 0 })), Code::Timeout);
    assert!(waits(&rig.ask(1, Request::Wake { wait_ms: 5000 })));
    rig.ask(2, Request::Begin {});
    // It is remembered by the next front.
    let tokens = [rig.token(1), rig.token(2)];
    rig.kill_front();
    assert_eq!(version(rig.resume(11, 1, tokens[0].clone())), first);
    rig.resume(12, 2, tokens[1].clone());
    assert!(waits(&rig.ask(11, Request::Wake { wait_ms: 5000 })));
    let second = version(rig.ask(12, Request::Commit {}));
    assert_eq!(version(rig.last(11)), second);
    let shares = rig.ask(11, Request::Shares { allocations: vec![] });
    assert!(matches!(shares, Some(Answer::Shares { shares }) if shares.len() == 1));
    assert_eq!(rig.free, 56 * MIB);
}

#[test]
fn nobody_wakes_to_memory_whose_update_was_not_finished() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 8 * MIB);
    rig.ask(1, Request::Sleep {});
    rig.open(2, "a", Mode::Update, 0);
    rig.ask(2, Request::Begin {});
    assert!(waits(&rig.ask(1, Request::Wake { wait_ms: 5000 })));
    rig.close(2);
    assert_eq!(code(rig.last(1)), Code::Dirty);
    // Nor after another version took its place.
    rig.commit(3, "a", 4 * MIB);
    let token = rig.token(1);
    assert_eq!(code(rig.ask(1, Request::Wake { wait_ms: 0 })), Code::Dirty);
    rig.kill_front();
    rig.resume(11, 1, token);
    assert_eq!(code(rig.ask(11, Request::Wake { wait_ms: 0 })), Code::Dirty);
}

#[test]
fn an_npu_is_compared_by_its_identity_as_far_as_both_sides_know_it() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 2 * MIB);
    rig.connect(2);
    let open = |identity: &str| Request::Open {
        domain: "a".parse().unwrap(),
        mode: Mode::Read,
        device: 4,
        identity: identity.into(),
        wait_ms: 0,
        allow_update: false,
        lends: false,
        token: Vec::new(),
    };
    for other in ["c1:00.0/4", "c0:00.1/4", "c0:00.0/5", "\u{7}", &"x".repeat(1 << 20)] {
        assert_eq!(code(rig.ask(2, open(other))), Code::OtherDevice, "{}", other.len());
    }
    for same in ["c0:00.0/4", "-/4", "c0:00.0/4@00cc0000", ""] {
        assert!(version(rig.ask(2, open(same))) > 0, "{same}");
        rig.ask(2, Request::Close {});
    }
}

#[test]
fn a_role_that_is_closed_is_over_and_its_connection_can_have_another() {
    let mut rig = Rig::new(64 * MIB);
    rig.open(1, "a", Mode::Write, 0);
    rig.allocate(1, 2 * MIB, 0);
    assert_eq!(rig.ask(1, Request::Close {}), Some(Answer::Done {}));
    assert_eq!((rig.free, rig.domain("a")), (64 * MIB, None));
    assert_eq!(rig.ask(1, Request::Close {}), Some(Answer::Done {}), "once more");
    rig.commit(1, "b", 2 * MIB);
}
