//! Seeded schedules: one number decides which waiting call the driver answers next.
//!
//! With a schedule every caught call of every client waits until all other threads of all clients
//! wait as well: in a call, in a known wait of Linux (a futex, a pipe, a child), or stopped. Then
//! the seed picks the next one. Between two calls the seed may also make something happen: see
//! [`Event`]. So a run can be repeated by its number, as far as the programs themselves do the same
//! thing twice; [`Summary::trace`] tells whether two runs were the same.
//!
//! What the seed does not decide: which of two threads goes first between their calls, when a wait
//! with a time limit ends, and what a thread sees that computes for long without a call (the
//! scheduler then guesses, and counts it in [`Summary::guesses`]).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What the seed may do between two calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// kill -9 of a client process, except the first one.
    Kill,
    /// SIGSTOP of a client process, and SIGCONT some calls later.
    Stop,
    /// A signal that the process handles or ignores.
    Signal,
    /// A command of the memory module fails with an errno that the driver has for it.
    Fault,
    /// A command is carried out, and its answer comes some calls later.
    Late,
    /// A device dies with everything on it, and comes back some calls later.
    Reset,
    /// No memory can be created during some calls.
    Memory,
}

impl Event {
    /// All of them.
    pub const ALL: [Event; 7] =
        [Event::Kill, Event::Stop, Event::Signal, Event::Fault, Event::Late, Event::Reset, Event::Memory];

    /// Those that a correct program does not notice.
    pub const HARMLESS: [Event; 3] = [Event::Stop, Event::Signal, Event::Late];

    /// Its name as text.
    pub const fn name(self) -> &'static str {
        match self {
            Event::Kill => "kill",
            Event::Stop => "stop",
            Event::Signal => "signal",
            Event::Fault => "fault",
            Event::Late => "late",
            Event::Reset => "reset",
            Event::Memory => "memory",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Event {
    type Err = String;

    fn from_str(text: &str) -> Result<Event, String> {
        let known = Event::ALL.into_iter().find(|event| event.name() == text);
        known.ok_or_else(|| format!("`{text}` is not one of {}", Event::ALL.map(Event::name).join(", ")))
    }
}

/// How the calls of all clients are put in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The number that decides everything.
    pub seed: u64,
    /// What may happen between calls.
    pub events: Vec<Event>,
    /// Events that do not happen although the seed wants them, counted from 0. For shrinking.
    pub skipped: Vec<u32>,
    /// After so many choices the clients take turns, and nothing happens any more. For shrinking.
    pub choices: Option<u64>,
    /// If nothing happens for this long while a client lives, the clients are stuck.
    pub stuck_after: Duration,
}

impl Schedule {
    /// The schedule of a seed, without events.
    pub fn seed(seed: u64) -> Self {
        Schedule { seed, events: Vec::new(), skipped: Vec::new(), choices: None, stuck_after: Duration::from_secs(20) }
    }

    /// The same with these events.
    #[must_use]
    pub fn with(mut self, events: &[Event]) -> Self {
        self.events = events.to_vec();
        self
    }
}

/// What a schedule has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// The seed.
    pub seed: u64,
    /// Calls that were answered, one after the other.
    pub choices: u64,
    /// Choices between at least two waiting calls.
    pub real_choices: u64,
    /// What happened between calls, in words.
    pub events: Vec<String>,
    /// How often a client was still busy, and the scheduler went on all the same.
    pub guesses: u64,
    /// How often a call was answered while some thread waited with a time limit, which Linux ends
    /// and not the seed.
    pub timed: u64,
    /// A hash of all choices and answers, without ids, numbers of descriptors and addresses.
    pub trace: u64,
    /// Why the clients were ended, and what each thread did then; empty if that did not happen.
    pub stuck: Vec<String>,
    /// Ids of client processes that live, except the emulator's own.
    pub living: Vec<i32>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Summary { seed, choices, real_choices, events, guesses, timed, trace, .. } = self;
        write!(
            f,
            "seed {seed}: {choices} calls, {real_choices} chosen among several, {} events, {guesses} guesses, {timed} \
             beside timed waits, trace {trace:016x}",
            events.len()
        )
    }
}

/// The decisions of a schedule.
pub(crate) struct Scheduler {
    /// What was asked for.
    pub schedule: Schedule,
    /// What was done.
    pub summary: Summary,
    /// In eighths, how often the client that was answered last is answered again.
    sticks: u64,
    drawn: u32,
    /// The step for which an event was drawn last: there is one for each.
    drawn_at: Option<u64>,
    last: Option<u32>,
}

/// What the numbers of a step are for.
#[derive(Clone, Copy)]
pub(crate) enum Draw {
    Choice = 1,
    Stick = 2,
    Event = 3,
    Kind = 4,
    Target = 5,
    Length = 6,
    Random = 7,
}

/// One event in so many choices.
const EVENT_IN: u64 = 24;

impl Scheduler {
    pub fn new(schedule: Schedule) -> Self {
        let summary = Summary { seed: schedule.seed, trace: mix(schedule.seed), ..Summary::default() };
        // Some seeds switch at every call, others seldom.
        let sticks = [0, 4, 7][(mix(schedule.seed ^ 0x5eed) % 3) as usize];
        Scheduler { schedule, summary, sticks, drawn: 0, drawn_at: None, last: None }
    }

    /// A number below `end` for a purpose of the current step.
    pub fn draw(&self, draw: Draw, end: u64) -> u64 {
        let step = mix(self.schedule.seed).wrapping_add(self.summary.choices.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        mix(step ^ (draw as u64) << 56) % end.max(1)
    }

    /// Picks one of the clients, which are in order. `yields` are those that would only go on
    /// waiting.
    pub fn pick(&mut self, clients: &[u32], yields: impl Fn(u32) -> bool) -> Option<usize> {
        if self.is_over() {
            // In turns, so that a client that asks again and again keeps nobody else waiting.
            let next = self.last.and_then(|last| clients.iter().position(|client| *client > last));
            return (!clients.is_empty()).then_some(next.unwrap_or(0));
        }
        if clients.len() > 1 {
            self.summary.real_choices += 1;
        }
        let again = self.last.filter(|last| !yields(*last));
        let again = again.and_then(|last| clients.iter().position(|client| *client == last));
        match again {
            Some(again) if self.draw(Draw::Stick, 8) < self.sticks => Some(again),
            _ => (!clients.is_empty()).then(|| self.draw(Draw::Choice, clients.len() as u64) as usize),
        }
    }

    /// The choice was carried out.
    pub fn chose(&mut self, client: u32) {
        self.last = Some(client);
        self.summary.choices += 1;
        self.note(client.into());
    }

    /// What happens before the next choice, if anything does.
    pub fn event(&mut self) -> Option<Event> {
        let events = &self.schedule.events;
        let step = Some(self.summary.choices);
        if std::mem::replace(&mut self.drawn_at, step) == step
            || events.is_empty()
            || self.is_over()
            || self.draw(Draw::Event, EVENT_IN) != 0
        {
            return None;
        }
        let event = events[self.draw(Draw::Kind, events.len() as u64) as usize];
        self.drawn += 1;
        (!self.schedule.skipped.contains(&(self.drawn - 1))).then_some(event)
    }

    /// Records that an event happened.
    pub fn happened(&mut self, event: Event, detail: &str) {
        let line = format!("{}: after {} calls, {event}{detail}", self.drawn - 1, self.summary.choices);
        self.note(event as u64);
        self.summary.events.push(line);
    }

    /// Adds a number to the hash of the trace.
    pub fn note(&mut self, number: u64) {
        self.summary.trace = mix(self.summary.trace.wrapping_mul(31).wrapping_add(number));
    }

    fn is_over(&self) -> bool {
        self.schedule.choices.is_some_and(|most| self.summary.choices >= most)
    }
}

/// A number whose bits all depend on all bits of another (splitmix64).
pub(crate) fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}
