//! The books against a keeper that is a number of free bytes, without sockets, processes and time.

mod memory;
mod recover;
mod roles;
mod versions;

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
