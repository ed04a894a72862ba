//! The books against a keeper that is a number of free bytes, without sockets, processes and time.

use super::*;
use crate::journal::Token;
use crate::layout::Entry;
use crate::link::HeldMemory;
use ascend_vmm::share::TicketDevice;
use std::cell::Cell;
use std::sync::OnceLock;

thread_local! {
    static TOKENS: Cell<u64> = const { Cell::new(0) };
}

fn token() -> Token {
    let number = TOKENS.get() + 1;
    TOKENS.set(number);
    let mut token = [0; 16];
    token[..8].copy_from_slice(&number.to_le_bytes());
    token
}

/// A ticket of the keeper's.
fn ticket() -> Ticket {
    static FIRST: OnceLock<Ticket> = OnceLock::new();
    *FIRST.get_or_init(|| {
        // Read now: the stored tickets are not in the package.
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/corpus/tickets.txt");
        let corpus = std::fs::read_to_string(corpus).unwrap();
        let mut ticket: Ticket = format!("avm1-{}", corpus.lines().nth(1).unwrap()).parse().unwrap();
        ticket.device = ticket.device.map(|device| TicketDevice { physical: 4, ..device });
        ticket
    })
}

/// A service whose clients are numbers.
struct Rig {
    books: Books,
    policy: String,
    now: Instant,
    free: u64,
    /// Memory of processes outside of the service.
    foreign: u64,
    held: BTreeMap<u64, u64>,
    journal: Vec<Record>,
    answers: BTreeMap<u64, Vec<Answer>>,
    ended: Vec<u64>,
    /// Orders that the keeper has not done yet, if it is slow.
    orders: VecDeque<(u64, Order)>,
    slow: bool,
}

const MIB: u64 = 1 << 20;

fn npus() -> Vec<Npu> {
    (0..2).map(|id| Npu { logical: id, physical: id + 4, identity: format!("c{id}:00.0/{}", id + 4) }).collect()
}

impl Rig {
    fn new(free: u64) -> Rig {
        Rig::with(free, "")
    }

    fn with(free: u64, policy: &str) -> Rig {
        let mut rig = Rig {
            books: Books::new(Policy::from_toml(policy).unwrap(), npus(), 1, 2, token),
            policy: policy.into(),
            now: Instant::now(),
            free,
            foreign: 0,
            held: BTreeMap::new(),
            journal: Vec::new(),
            answers: BTreeMap::new(),
            ended: Vec::new(),
            orders: VecDeque::new(),
            slow: false,
        };
        rig.journal = rig.books.snapshot();
        rig
    }

    fn apply(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Record(record) => self.journal.push(record),
                Effect::Answer(id, answer) => self.answers.entry(id.0).or_default().push(answer),
                Effect::End(id, error) => {
                    self.answers.entry(id.0).or_default().push(Answer::Error(error));
                    self.ended.push(id.0);
                }
                Effect::Keep(number, order) => self.orders.push_back((number, order)),
                Effect::HandOver(_) => {}
            }
        }
        if !self.slow {
            self.keep();
        }
    }

    /// The keeper does what it was told.
    fn keep(&mut self) {
        while let Some((number, order)) = self.orders.pop_front() {
            let kept = match order {
                Order::Create { size, .. } if size > self.free => {
                    let total = self.free + self.foreign + self.held.values().sum::<u64>();
                    Kept::OutOfMemory { free: Some(self.free), total: Some(total), text: "no memory".into() }
                }
                Order::Create { id, .. } if self.held.contains_key(&id) => Kept::Taken,
                Order::Create { id, size, .. } => {
                    self.free -= size;
                    assert_eq!(self.held.insert(id, size), None, "a number is used once");
                    Kept::Created { handle: id, ticket: ticket() }
                }
                Order::Release { ids } => {
                    let released = ids.iter().map(|id| self.held.remove(id).expect("what is released is held"));
                    self.free += released.sum::<u64>();
                    Kept::Done
                }
                Order::Trust { ids, .. } => {
                    assert!(ids.iter().all(|id| self.held.contains_key(id)), "what is trusted is held");
                    Kept::Done
                }
                Order::Ping => Kept::Done,
                Order::Memory { .. } => Kept::Memory { free: self.free, total: self.free },
            };
            let effects = self.books.kept(number, kept, self.now);
            self.apply(effects);
        }
    }

    /// A client that has said hello.
    fn connect(&mut self, id: u64) {
        let peer = Peer { pid: id as i32, user: 1000 + id as u32, ..Peer::default() };
        self.books.connect(ClientId(id), peer, self.now);
        let program = format!("engine-{id}");
        let answer = self.ask(id, Request::Hello { version: VERSION, process: id as i32, program });
        assert!(matches!(answer, Some(Answer::Hello { .. })), "{answer:?}");
    }

    /// Sends a request; the last answer, if there is one.
    fn ask(&mut self, id: u64, request: Request) -> Option<Answer> {
        self.answers.remove(&id);
        let effects = self.books.request(ClientId(id), request, self.now);
        self.apply(effects);
        self.last(id)
    }

    /// The last answer that came since it was asked for.
    fn last(&mut self, id: u64) -> Option<Answer> {
        self.answers.remove(&id).and_then(|mut answers| answers.pop())
    }

    fn open(&mut self, id: u64, domain: &str, mode: Mode, wait_ms: u64) -> Option<Answer> {
        if !self.books.clients.contains_key(&ClientId(id)) {
            self.connect(id);
        }
        let domain = domain.parse().unwrap();
        self.ask(
            id,
            Request::Open {
                domain,
                mode,
                device: 4,
                identity: String::new(),
                wait_ms,
                allow_update: false,
                lends: false,
                token: Vec::new(),
            },
        )
    }

    fn allocate(&mut self, id: u64, size: u64, wait_ms: u64) -> Option<Answer> {
        self.ask(id, Request::Allocate { size, page: PageSize::Huge, tag: String::new(), wait_ms, id: None })
    }

    /// Writes and commits `size` bytes; the version.
    fn commit(&mut self, id: u64, domain: &str, size: u64) -> u64 {
        let opened = self.open(id, domain, Mode::Write, 0);
        assert!(matches!(opened, Some(Answer::Opened { writes: true, .. })), "{opened:?}");
        let allocated = self.allocate(id, size, 0);
        let Some(Answer::Allocated { allocation }) = allocated else { panic!("{allocated:?}") };
        let entry = Entry { allocation: allocation.id, offset: 0, size, value: vec![1] };
        assert_eq!(
            self.ask(id, Request::Put { entries: [("w".into(), entry)].into_iter().collect() }),
            Some(Answer::Done {})
        );
        match self.ask(id, Request::Commit {}) {
            Some(Answer::Committed { version, .. }) => version,
            other => panic!("{other:?}"),
        }
    }

    fn close(&mut self, id: u64) {
        let effects = self.books.disconnect(ClientId(id), self.now);
        self.apply(effects);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let effects = self.books.tick(self.now);
        self.apply(effects);
    }

    /// The front is killed, and another one takes over.
    fn kill_front(&mut self) {
        self.orders.clear();
        self.answers.clear();
        let held = self.held.keys().map(|id| HeldMemory { id: *id, handle: *id }).collect();
        self.books = Books::new(Policy::from_toml(&self.policy).unwrap(), npus(), 1, 3, token);
        let effects = self.books.recover(std::mem::take(&mut self.journal), held, vec![ticket()], self.now);
        self.journal = self.books.snapshot();
        self.apply(effects);
    }

    fn token(&self, id: u64) -> Vec<u8> {
        self.books.clients[&ClientId(id)].role.as_ref().unwrap().token.to_vec()
    }

    /// The process of an earlier connection comes back on a new one.
    fn resume(&mut self, new: u64, old: i32, token: Vec<u8>) -> Option<Answer> {
        let peer = Peer { pid: old, user: 1000 + old as u32, ..Peer::default() };
        self.books.connect(ClientId(new), peer, self.now);
        self.ask(new, Request::Hello { version: VERSION, process: old, program: String::new() });
        self.ask(new, Request::Resume { token })
    }

    fn domain(&self, name: &str) -> Option<DomainStatus> {
        self.books.status(self.now).domains.into_iter().find(|domain| domain.name.as_str() == name)
    }
}

use crate::protocol::DomainStatus;

#[track_caller]
fn code(answer: Option<Answer>) -> Code {
    match answer {
        Some(Answer::Error(error)) => error.code,
        other => panic!("not an error: {other:?}"),
    }
}

#[track_caller]
fn version(answer: Option<Answer>) -> u64 {
    match answer {
        Some(Answer::Opened { version, .. } | Answer::Committed { version, .. } | Answer::Version { version, .. }) => {
            version
        }
        other => panic!("no version: {other:?}"),
    }
}

fn waits(answer: &Option<Answer>) -> bool {
    matches!(answer, Some(Answer::Waiting { .. }))
}

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
    let all = BTreeSet::from_iter(100..100 + memory::LIST_MAX as i32 / 4 * 3 - 1);
    rig.books.listed.insert(version, all);
    rig.open(2, "a", Mode::Read, 0);
    let shares = Request::Shares { allocations: vec![] };
    assert!(matches!(rig.ask(2, shares.clone()), Some(Answer::Shares { .. })));
    assert!(
        rig.books.events.iter().any(|event| event.text.contains("48750 of 65000")),
        "{:?}",
        rig.books.events.back()
    );
    let all = BTreeSet::from_iter((100..100 + memory::LIST_MAX as i32 - 1).chain([2]));
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
