//! Memory: who gets it, who waits for it, who pays for it, and who gives it back.

use super::*;
use crate::books::memory::LIST_MAX;

#[test]
fn memory_that_is_missing_is_waited_for_and_the_numbers_are_in_the_error() {
    let mut rig = Rig::new(16 * MIB);
    rig.commit(1, "a", 12 * MIB);
    rig.open(2, "b", Mode::Write, 0);
    let Some(Answer::Error(error)) = rig.allocate(2, 8 * MIB, 0) else { panic!() };
    assert_eq!(error.code, Code::OutOfMemory);
    assert!(error.problem.contains("8 MiB were asked for, 4 MiB are free"), "{}", error.problem);
    assert!(waits(&rig.allocate(2, 8 * MIB, 3000)));
    rig.open(3, "c", Mode::Write, 0);
    assert!(waits(&rig.allocate(3, 2 * MIB, 3000)), "who waits is served before");
    rig.close(1);
    rig.open(4, "a", Mode::Discard, 0);
    assert!(matches!(rig.last(2), Some(Answer::Allocated { .. })));
    assert!(matches!(rig.last(3), Some(Answer::Allocated { .. })));
    assert_eq!(rig.free, 6 * MIB);
}

#[test]
fn waiting_for_memory_ends_with_the_time_and_with_the_client() {
    let mut rig = Rig::new(4 * MIB);
    rig.foreign = 12 * MIB;
    for id in 1..4 {
        rig.open(id, &format!("d{id}"), Mode::Write, 0);
        assert!(waits(&rig.allocate(id, 8 * MIB, 1000 * id)));
    }
    rig.pass(Duration::from_millis(1000));
    assert_eq!(code(rig.last(1)), Code::OutOfMemory);
    rig.close(2);
    // A process outside of the service returns its memory.
    (rig.free, rig.foreign) = (16 * MIB, 0);
    rig.pass(Duration::from_millis(500));
    assert!(matches!(rig.last(3), Some(Answer::Allocated { .. })));
}

#[test]
fn a_writer_that_dies_while_its_memory_is_made_leaves_none() {
    let mut rig = Rig::new(64 * MIB);
    rig.open(1, "a", Mode::Write, 0);
    rig.slow = true;
    assert_eq!(rig.allocate(1, 8 * MIB, 0), None);
    rig.close(1);
    rig.slow = false;
    rig.keep();
    assert_eq!((rig.free, rig.held.len()), (64 * MIB, 0));
}

#[test]
fn quotas_are_exact_for_users_and_domains() {
    let policy = "[[quota]]\nuser = 1001\nbytes = \"16MiB\"\n[[quota]]\ndomain = \"kv/*\"\nbytes = \"8MiB\"";
    let mut rig = Rig::with(64 * MIB, policy);
    rig.open(1, "w", Mode::Write, 0);
    assert!(matches!(rig.allocate(1, 16 * MIB, 0), Some(Answer::Allocated { .. })));
    assert_eq!(code(rig.allocate(1, 2 * MIB, 1000)), Code::Quota);
    rig.open(2, "kv/a", Mode::Write, 0);
    rig.open(3, "kv/b", Mode::Write, 0);
    assert!(matches!(rig.allocate(2, 6 * MIB, 0), Some(Answer::Allocated { .. })));
    assert_eq!(code(rig.allocate(3, 4 * MIB, 0)), Code::Quota);
    assert!(matches!(rig.allocate(3, 2 * MIB, 0), Some(Answer::Allocated { .. })));
    rig.close(2);
    assert!(matches!(rig.allocate(3, 6 * MIB, 0), Some(Answer::Allocated { .. })));
    // What is committed counts for who committed it, also after a new front has taken over.
    rig.ask(1, Request::Commit {});
    rig.kill_front();
    rig.open(11, "x", Mode::Write, 0);
    rig.close(11);
    rig.books.connect(ClientId(12), Peer { pid: 12, user: 1001, ..Peer::default() }, rig.now);
    rig.ask(12, Request::Hello { version: VERSION, process: 12, program: String::new() });
    rig.open(12, "x", Mode::Write, 0);
    assert_eq!(code(rig.allocate(12, 2 * MIB, 0)), Code::Quota);
}

#[test]
fn those_who_lend_are_asked_and_named_if_they_do_not_answer() {
    let mut rig = Rig::new(16 * MIB);
    for id in [1, 2] {
        rig.connect(id);
        let domain = format!("kv{id}").parse().unwrap();
        let open = Request::Open {
            domain,
            mode: Mode::Write,
            device: 4,
            identity: String::new(),
            wait_ms: 0,
            allow_update: false,
            lends: true,
            token: Vec::new(),
        };
        rig.ask(id, open);
    }
    let Some(Answer::Allocated { allocation }) = rig.allocate(1, 8 * MIB, 0) else { panic!() };
    rig.allocate(2, 6 * MIB, 0);
    rig.open(3, "w", Mode::Write, 0);
    rig.answers.clear();
    assert!(waits(&rig.allocate(3, 8 * MIB, 10_000)));
    let Some(Answer::Reclaim { reclaim, bytes, .. }) = rig.last(1) else { panic!() };
    assert_eq!(bytes, 6 * MIB, "what is missing");
    assert!(matches!(rig.last(2), Some(Answer::Reclaim { .. })));
    assert_eq!(rig.ask(1, Request::Free { allocations: vec![allocation.id] }), Some(Answer::Done {}));
    assert_eq!(rig.ask(1, Request::Gave { reclaim }), Some(Answer::Done {}));
    assert!(matches!(rig.last(3), Some(Answer::Allocated { .. })));
    rig.pass(Duration::from_secs(3));
    let Some(Answer::Events { events }) = rig.ask(3, Request::Events { after: 0 }) else { panic!() };
    let silent: Vec<_> = events.iter().filter(|event| event.text.contains("did not answer")).collect();
    assert_eq!(silent.len(), 1);
    assert!(silent[0].text.contains("process 2"), "{silent:?}");
}

#[test]
fn whatever_clients_do_memory_is_counted_right_and_what_is_committed_stays() {
    for seed in 0..300u64 {
        let mut numbers = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut next = |below: u64| {
            numbers ^= numbers << 13;
            numbers ^= numbers >> 7;
            numbers ^= numbers << 17;
            numbers % below
        };
        let mut rig = Rig::new(24 * MIB);
        let mut id = 0;
        let mut alive = Vec::new();
        for _ in 0..200 {
            rig.slow = next(4) == 0;
            let domain = ["a", "b", "c"][next(3) as usize];
            match next(12) {
                0..=2 => {
                    id += 1;
                    let modes = [Mode::Read, Mode::Write, Mode::WriteOrRead, Mode::Discard, Mode::Update];
                    rig.open(id, domain, modes[next(5) as usize], next(3) * 700);
                    alive.push(id);
                }
                3 if !alive.is_empty() => {
                    let gone = alive.swap_remove(next(alive.len() as u64) as usize);
                    rig.close(gone);
                }
                4 => rig.pass(Duration::from_millis(next(900))),
                5 if next(6) == 0 => {
                    rig.kill_front();
                    // Nobody comes back.
                    rig.pass(Duration::from_secs(31));
                    alive.clear();
                }
                _ if !alive.is_empty() => {
                    let one = alive[next(alive.len() as u64) as usize];
                    if !rig.books.is_ready(ClientId(one)) {
                        continue;
                    }
                    match next(6) {
                        0..=2 => rig.allocate(one, (1 + next(4)) * 2 * MIB, next(2) * 900),
                        3 => rig.ask(one, Request::Begin {}),
                        4 => rig.ask(one, Request::Commit {}),
                        _ => rig.ask(one, Request::Shares { allocations: vec![next(40)] }),
                    };
                    let ended = std::mem::take(&mut rig.ended);
                    for gone in ended {
                        rig.close(gone);
                        alive.retain(|it| *it != gone);
                    }
                }
                _ => {}
            }
            if next(2) == 0 {
                rig.slow = false;
                rig.keep();
            }
        }
        rig.slow = false;
        rig.keep();
        let versions = |rig: &Rig| -> Vec<_> {
            let of = |it: DomainStatus| (it.name, it.version, it.bytes, it.state == "dirty");
            rig.books.status(rig.now).domains.into_iter().map(of).filter(|it| it.1 > 0).collect()
        };
        let before = versions(&rig);
        let held: u64 = rig.held.values().sum();
        let status = rig.books.status(rig.now);
        let counted: u64 = status.domains.iter().map(|it| it.bytes + it.uncommitted + it.superseded).sum();
        assert_eq!(held, counted, "seed {seed}: held, and counted in domains");
        assert_eq!(status.devices[0].held, held, "seed {seed}");
        // An update that runs is dirty after its writer is gone.
        rig.kill_front();
        rig.pass(Duration::from_secs(31));
        assert_eq!(versions(&rig), before, "seed {seed}: after a new front took over");
        let committed: u64 = rig.books.status(rig.now).domains.iter().map(|it| it.bytes).sum();
        assert_eq!(rig.held.values().sum::<u64>(), committed, "seed {seed}: nothing else is left");
        assert_eq!(rig.free + committed, 24 * MIB, "seed {seed}");
    }
}

#[test]
fn a_layout_that_cannot_fit_beside_the_committed_one_is_refused_at_once_with_the_numbers() {
    let mut rig = Rig::new(64 * MIB);
    rig.commit(1, "a", 40 * MIB);
    rig.close(1);
    rig.open(2, "a", Mode::Write, 0);
    assert!(matches!(rig.allocate(2, 16 * MIB, 60_000), Some(Answer::Allocated { .. })));
    let Some(Answer::Error(error)) = rig.allocate(2, 16 * MIB, 60_000) else { panic!("it waits in vain") };
    assert_eq!(error.code, Code::OutOfMemory);
    for part in ["has 64 MiB", "no room for 16 MiB", "16 MiB of this writer", "40 MiB that a has committed"] {
        assert!(error.problem.contains(part), "{}", error.problem);
    }
    assert!(error.remedy.contains("discard"), "{}", error.remedy);
    rig.close(2);
    // The caller can choose to give up what is committed.
    rig.open(3, "a", Mode::Discard, 0);
    assert!(matches!(rig.allocate(3, 40 * MIB, 0), Some(Answer::Allocated { .. })));
}

#[test]
fn who_waits_for_memory_hears_how_it_goes_on() {
    let mut rig = Rig::new(4 * MIB);
    rig.foreign = 60 * MIB;
    let heard = |rig: &mut Rig, id: u64| match rig.last(id) {
        Some(Answer::Waiting(waiting)) => Some((waiting.before, waiting.wanted / MIB, waiting.free / MIB)),
        None => None,
        other => panic!("{other:?}"),
    };
    rig.open(1, "a", Mode::Write, 0);
    rig.open(2, "b", Mode::Write, 0);
    let first = rig.allocate(1, 16 * MIB, 60_000);
    assert!(matches!(first, Some(Answer::Waiting(it)) if (it.before, it.wanted, it.free) == (0, 16 * MIB, 4 * MIB)));
    let second = rig.allocate(2, 8 * MIB, 60_000);
    assert!(matches!(second, Some(Answer::Waiting(it)) if (it.before, it.wanted, it.free) == (1, 8 * MIB, 4 * MIB)));
    rig.pass(Duration::from_millis(500));
    assert_eq!((heard(&mut rig, 1), heard(&mut rig, 2)), (None, None), "nothing has changed");
    (rig.free, rig.foreign) = (10 * MIB, 54 * MIB);
    rig.pass(Duration::from_millis(500));
    assert_eq!((heard(&mut rig, 1), heard(&mut rig, 2)), (Some((0, 16, 10)), Some((1, 8, 10))));
    rig.close(1);
    assert!(matches!(rig.last(2), Some(Answer::Allocated { .. })));
}

#[test]
fn the_drivers_list_of_processes_is_counted_and_its_end_is_announced() {
    let mut rig = Rig::new(64 * MIB);
    let version = rig.commit(1, "a", 2 * MIB);
    let all = BTreeSet::from_iter(100..100 + LIST_MAX as i32 / 4 * 3 - 1);
    rig.books.listed.insert(version, all);
    rig.open(2, "a", Mode::Read, 0);
    let shares = Request::Shares { allocations: vec![] };
    assert!(matches!(rig.ask(2, shares.clone()), Some(Answer::Shares { .. })));
    assert!(
        rig.books.events.iter().any(|event| event.text.contains("48750 of 65000")),
        "{:?}",
        rig.books.events.back()
    );
    let all = BTreeSet::from_iter((100..100 + LIST_MAX as i32 - 1).chain([2]));
    rig.books.listed.insert(version, all);
    assert!(matches!(rig.ask(2, shares.clone()), Some(Answer::Shares { .. })), "who is on it comes back");
    rig.open(3, "a", Mode::Read, 0);
    assert_eq!(code(rig.ask(3, shares.clone())), Code::ListFull);
    // The next front knows it, and new memory has a new list.
    rig.journal = rig.books.snapshot();
    rig.kill_front();
    rig.open(4, "a", Mode::Read, 0);
    assert_eq!(code(rig.ask(4, shares.clone())), Code::ListFull);
    rig.commit(5, "a", 2 * MIB);
    rig.open(6, "a", Mode::Read, 0);
    assert!(matches!(rig.ask(6, shares), Some(Answer::Shares { .. })));
}

#[test]
fn without_the_keeper_what_is_mapped_can_be_read_and_nothing_else_can_be_done() {
    let mut rig = Rig::new(64 * MIB);
    let committed = rig.commit(1, "a", 2 * MIB);
    rig.open(2, "b", Mode::Write, 0);
    rig.open(3, "c", Mode::Write, 0);
    assert!(waits(&rig.allocate(3, 64 * MIB, 5000)));
    assert!(waits(&rig.open(4, "a", Mode::Discard, 5000)));
    rig.slow = true;
    rig.ask(1, Request::Ping {});
    let effects = rig.books.orphan();
    rig.apply(effects);
    for waiting in [1, 3, 4] {
        assert_eq!(code(rig.last(waiting)), Code::KeeperGone, "{waiting}");
    }
    rig.orders.clear();
    for request in [Request::Ping {}, Request::Sleep {}] {
        assert_eq!(code(rig.ask(1, request)), Code::KeeperGone);
    }
    assert_eq!(code(rig.allocate(2, 2 * MIB, 5000)), Code::KeeperGone);
    assert_eq!(code(rig.ask(2, Request::Commit {})), Code::KeeperGone);
    assert_eq!(code(rig.open(5, "a", Mode::Write, 5000)), Code::KeeperGone);
    // Those whom the driver lets import it can join.
    assert_eq!(version(rig.open(6, "a", Mode::Read, 0)), committed);
    assert_eq!(version(rig.open(7, "a", Mode::WriteOrRead, 0)), committed);
    assert!(matches!(rig.ask(6, Request::Shares { allocations: vec![] }), Some(Answer::Shares { .. })));
    assert!(rig.orders.is_empty(), "nobody is there to take orders");
    assert_eq!(rig.books.status(rig.now).keeper, 0);
    [1, 2, 3, 6].into_iter().for_each(|id| rig.close(id));
    assert!(rig.books.has_roles());
    rig.close(7);
    assert!(!rig.books.has_roles());
}

#[test]
fn a_number_from_a_snapshot_is_used_again_if_it_is_free() {
    let mut rig = Rig::new(64 * MIB);
    let ask = |rig: &mut Rig, id: u64, number: u64| {
        let (size, page, tag) = (2 * MIB, PageSize::Huge, String::new());
        match rig.ask(id, Request::Allocate { size, page, tag, wait_ms: 0, id: Some(number) }) {
            Some(Answer::Allocated { allocation }) => allocation.id,
            other => panic!("{other:?}"),
        }
    };
    rig.open(1, "a", Mode::Write, 0);
    assert_eq!([700, 900].map(|number| ask(&mut rig, 1, number)), [700, 900]);
    assert!(ask(&mut rig, 1, 800) > 900, "numbers of a layout grow");
    assert!(ask(&mut rig, 1, u64::MAX) < 1000, "and never end");
    rig.open(2, "b", Mode::Write, 0);
    assert_eq!(ask(&mut rig, 2, 500), 500);
    assert!(ask(&mut rig, 2, 900) > 900, "it is taken");
    assert!(matches!(rig.ask(1, Request::Commit {}), Some(Answer::Committed { .. })));
    rig.kill_front();
    // Nobody comes back.
    rig.pass(Duration::from_secs(3600));
    rig.connect(3);
    assert_eq!(rig.ask(3, Request::Remove { domain: "a".parse().unwrap() }), Some(Answer::Done {}));
    rig.open(4, "c", Mode::Write, 0);
    assert_eq!([500, 700].map(|number| ask(&mut rig, 4, number)), [500, 700]);
}
