//! What the next front knows when one was killed.

use super::*;

#[test]
fn nothing_committed_is_lost_with_a_front_and_roles_come_back() {
    let mut rig = Rig::new(64 * MIB);
    let first = rig.commit(1, "a", 8 * MIB);
    rig.open(2, "b", Mode::Write, 0);
    rig.allocate(2, 4 * MIB, 0);
    let tokens: Vec<Vec<u8>> =
        [1, 2].iter().map(|id| rig.books.clients[&ClientId(*id)].role.as_ref().unwrap().token.to_vec()).collect();
    rig.kill_front();
    assert_eq!(rig.free, 52 * MIB);
    // Another process does not get the role.
    rig.connect(7);
    assert_eq!(code(rig.ask(7, Request::Resume { token: tokens[0].clone() })), Code::Unknown);
    for (new, (old, token)) in [(11, (1, &tokens[0])), (12, (2, &tokens[1]))] {
        let peer = Peer { pid: old, user: 1000 + old as u32, ..Peer::default() };
        rig.books.connect(ClientId(new), peer, rig.now);
        rig.ask(new, Request::Hello { version: VERSION, process: old, program: String::new() });
        let opened = rig.ask(new, Request::Resume { token: token.clone() });
        assert!(matches!(opened, Some(Answer::Opened { .. })), "{opened:?}");
    }
    assert!(waits(&rig.open(8, "a", Mode::Discard, 60_000)), "the reader is back, and counts");
    assert!(version(rig.ask(12, Request::Commit {})) > first);
    rig.close(11);
    assert_eq!(version(rig.last(8)), 0);
    // Who does not come back in time is gone.
    rig.kill_front();
    rig.pass(Duration::from_secs(31));
    assert_eq!(rig.free, 60 * MIB, "b alone");
}

/// What a step of a client must leave, wherever in it the front is killed.
fn cut_everywhere(prepare: impl Fn(&mut Rig), step: impl Fn(&mut Rig), check: impl Fn(&mut Rig, bool)) {
    let mut rig = Rig::new(64 * MIB);
    prepare(&mut rig);
    let before = rig.journal.len();
    step(&mut rig);
    let after = rig.journal.len();
    assert!(after > before, "the step is written down");
    for records in before..=after {
        let mut rig = Rig::new(64 * MIB);
        prepare(&mut rig);
        // Memory is released when everything is written down, so behind every cut.
        rig.slow = true;
        step(&mut rig);
        if rig.orders.iter().all(|(_, order)| matches!(order, Order::Create { .. })) {
            rig.keep();
        }
        rig.journal.truncate(records);
        rig.slow = false;
        rig.kill_front();
        check(&mut rig, records == after);
        rig.pass(Duration::from_secs(31));
        let committed: u64 = rig.books.status(rig.now).domains.iter().map(|it| it.bytes).sum();
        assert_eq!(rig.held.values().sum::<u64>(), committed, "{records} of {after} records");
    }
}

#[test]
fn a_front_may_be_killed_between_each_pair_of_records() {
    let update = |rig: &mut Rig| {
        rig.commit(1, "a", 8 * MIB);
        rig.close(1);
        rig.open(2, "a", Mode::Update, 0);
        rig.ask(2, Request::Begin {});
    };
    cut_everywhere(
        update,
        |rig| drop(rig.ask(2, Request::Commit {})),
        |rig, whole| {
            let domain = rig.domain("a").unwrap();
            assert_eq!((domain.bytes, domain.superseded), (8 * MIB, 0));
            assert!(!whole || domain.state == "committed", "{domain:?}");
            let dirty = domain.state == "dirty";
            let token = rig.books.clients.values().find_map(|client| client.role.as_ref()).unwrap().token.to_vec();
            // The writer comes back, and either it has committed or it commits again.
            let Some(Answer::Opened { writes, .. }) = rig.resume(12, 2, token) else { panic!() };
            assert_eq!(writes, dirty);
            if writes {
                assert!(version(rig.ask(12, Request::Commit {})) > 0);
            }
            assert_eq!(rig.domain("a").unwrap().state, "committed");
        },
    );
    let replace = |rig: &mut Rig| {
        rig.commit(1, "a", 8 * MIB);
        rig.close(1);
        rig.open(2, "a", Mode::Write, 0);
        rig.allocate(2, 4 * MIB, 0);
    };
    let served = |rig: &mut Rig, _| {
        let domain = rig.domain("a").unwrap();
        assert!([4, 8].contains(&(domain.bytes / MIB)) && domain.version > 0, "{domain:?}");
    };
    cut_everywhere(replace, |rig| drop(rig.ask(2, Request::Commit {})), served);
    cut_everywhere(replace, |rig| rig.close(2), served);
    cut_everywhere(
        replace,
        |rig| drop(rig.allocate(2, 2 * MIB, 0)),
        |rig, whole| {
            served(rig, whole);
            assert!([4, 6].contains(&(rig.domain("a").unwrap().uncommitted / MIB)));
        },
    );
    // Readers that allow updates are moved to the new version with the commit.
    let with_readers = |rig: &mut Rig| {
        rig.commit(1, "a", 8 * MIB);
        for reader in 3..6 {
            rig.connect(reader);
            let (domain, identity) = ("a".parse().unwrap(), String::new());
            let (mode, device, wait_ms) = (Mode::Read, 4, 0);
            rig.ask(
                reader,
                Request::Open {
                    domain,
                    mode,
                    device,
                    identity,
                    wait_ms,
                    allow_update: true,
                    lends: false,
                    token: Vec::new(),
                },
            );
        }
        rig.close(1);
        rig.open(2, "a", Mode::Update, 0);
        rig.ask(2, Request::Begin {});
    };
    cut_everywhere(
        with_readers,
        |rig| drop(rig.ask(2, Request::Commit {})),
        |rig, _| {
            let domain = rig.domain("a").unwrap();
            let expected = if domain.state == "dirty" { 3 } else { 4 };
            assert_eq!((domain.readers, domain.bytes, domain.superseded), (expected, 8 * MIB, 0), "{domain:?}");
        },
    );
}

#[test]
fn a_role_whose_answer_was_lost_is_found_by_the_token_of_its_request() {
    let mut rig = Rig::new(64 * MIB);
    let open = |token: &[u8]| Request::Open {
        domain: "a".parse().unwrap(),
        mode: Mode::Write,
        device: 4,
        identity: String::new(),
        wait_ms: 1000,
        allow_update: false,
        lends: false,
        token: token.to_vec(),
    };
    (1..4).for_each(|id| rig.connect(id));
    assert!(matches!(rig.ask(1, open(&[7; 16])), Some(Answer::Opened { token, .. }) if token == [7; 16]));
    assert!(waits(&rig.ask(2, open(&[8; 16]))));
    for token in [&[7; 16][..], &[8; 16], &[1; 15], &[1; 17]] {
        assert_eq!(code(rig.ask(3, open(token))), Code::Invalid, "{token:?}");
    }
    rig.kill_front();
    assert!(matches!(rig.resume(11, 1, vec![7; 16]), Some(Answer::Opened { writes: true, .. })));
    assert_eq!(code(rig.resume(12, 2, vec![8; 16])), Code::Unknown, "it only waited");
}

#[test]
fn the_next_front_knows_what_happened_before_it() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 8 * MIB);
    let before: Vec<Event> = rig.books.events.iter().cloned().collect();
    assert!(before.iter().any(|event| event.text.contains("committed version")));
    for _ in 0..2 {
        rig.kill_front();
    }
    let after: Vec<Event> = rig.books.events.iter().cloned().collect();
    assert_eq!(after[..before.len()], before);
    assert!(after.windows(2).all(|two| two[0].number + 1 == two[1].number), "{after:?}");
    assert_eq!(after.iter().filter(|event| event.text.contains("took over")).count(), 2);
    // And not more than are kept.
    (0..2 * EVENTS).for_each(|_| rig.books.event(None, "again".into()));
    rig.journal = rig.books.snapshot();
    rig.kill_front();
    assert_eq!(rig.books.events.len(), EVENTS);
}

#[test]
fn memory_that_no_journal_names_is_released_by_the_next_front() {
    let mut rig = Rig::new(64 * MIB);
    rig.open(1, "a", Mode::Write, 0);
    rig.slow = true;
    rig.allocate(1, 8 * MIB, 0);
    // The keeper has made it, and the front dies before it hears of it.
    let Some((_, Order::Create { id, size, .. })) = rig.orders.pop_front() else { panic!() };
    rig.free -= size;
    rig.held.insert(id, size);
    rig.slow = false;
    rig.kill_front();
    assert_eq!((rig.free, rig.held.len()), (64 * MIB, 0));
}

#[test]
fn a_role_whose_process_lives_waits_for_it_as_long_as_that_lives() {
    let mut rig = Rig::new(64 * MIB);
    let first = rig.commit(1, "a", 8 * MIB);
    let token = rig.token(1);
    rig.kill_front();
    let [(absent, pid, _)] = rig.books.absentees()[..] else { panic!() };
    assert_eq!(pid, 1);
    rig.books.watch(absent);
    rig.pass(Duration::from_secs(86_400));
    assert!(waits(&rig.open(2, "a", Mode::Update, 5000)), "it may map the memory");
    assert_eq!(version(rig.resume(11, 1, token)), first);
    rig.close(11);
    assert_eq!(version(rig.last(2)), first);
}

#[test]
fn a_front_that_speaks_other_packets_than_the_keeper_does_not_take_over() {
    let mut rig = Rig::new(16 * MIB);
    let peer = Peer { pid: 1, user: nix::unistd::getuid().as_raw(), ..Peer::default() };
    rig.books.connect(ClientId(1), peer, rig.now);
    rig.ask(1, Request::Hello { version: VERSION, process: 1, program: String::new() });
    for link in [0, LINK + 1] {
        let refused = rig.ask(1, Request::Replace { state: STATE, link });
        assert!(format!("{refused:?}").contains(&format!("the new front version {link}")), "{refused:?}");
        assert_eq!(code(refused), Code::Invalid);
    }
    let effects = rig.books.request(ClientId(1), Request::Replace { state: STATE, link: LINK }, rig.now);
    assert_eq!(effects, [Effect::HandOver(ClientId(1))]);
}
