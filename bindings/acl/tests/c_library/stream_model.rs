//! Streams, events, callbacks and copies against a model of what must be ordered.
//!
//! Random programs of the C functions. The model is a clock for each stream, for each record of an
//! event and for the calling thread: how many tasks of each stream are over before what comes next.
//! Two things are held against it. Functions on streams count themselves, and look whether all that
//! must precede them was counted. And copies use places in memory only where the clocks order them,
//! so what each place must contain is known. Functions that wait at a gate keep a stream from going
//! on while others must not, or must.

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, isolated};
use ascendcl::border::{Address, Out};
use ascendcl::exports::*;
use ascendcl::fault::code;
use ascendcl::handles::Handle;
use random::{Random, Seed, seeds, steps};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

#[path = "../../../../tests/support/random.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod random;

/// For the module of random numbers.
const MIB2: u64 = 2 << 20;

/// Calls of one program, and how many streams it makes at most.
const CALLS: u64 = 500;
const MOST_STREAMS: usize = 64;
/// Streams and events at one time.
const STREAMS: usize = 5;
const EVENTS: usize = 5;
/// Places of 8 bytes: the first half on the device, the others in pinned host memory.
const PLACES: usize = 12;

#[test]
fn whatever_is_recorded_waited_for_copied_reset_and_destroyed_what_must_be_ordered_is() {
    let config = Config { device_process: DeviceProcess::Automatic, ..Config::default() };
    isolated(config, |_| {
        check(exports::set_device(0));
        let (sender, receiver) = mpsc::channel();
        let serving = Arc::new(AtomicBool::new(true));
        let server = std::thread::spawn({
            let serving = serving.clone();
            move || serve(&sender, &serving)
        });
        let server_id = receiver.recv().unwrap();
        let [device, host] = [exports::malloc(8 * PLACES), exports::malloc_host(8 * PLACES)];
        for seed in seeds(5) {
            let _printed = Seed(seed);
            let mut random = Random(seed);
            for program in 0..steps(20_000).div_ceil(CALLS) {
                // For a program that hangs.
                eprintln!("seed {seed}, program {program}");
                Program::new(&mut random, server_id, device, host).run();
            }
        }
        serving.store(false, Ordering::Release);
        server.join().unwrap();
        exports::free(device, host);
    });
}

fn check(code: i32) {
    assert_eq!(code, 0, "a call failed");
}

/// The C functions with places for their answers.
mod exports {
    use super::*;

    fn answer<T: Copy>(empty: T, call: impl FnOnce(Out<T>) -> i32) -> T {
        let mut place = empty;
        check(call(Out::to(&mut place)));
        place
    }

    pub fn set_device(device: i32) -> i32 {
        // SAFETY: no pointers.
        unsafe { aclrtSetDevice(device) }
    }

    pub fn malloc(size: usize) -> u64 {
        // SAFETY: the place for the answer is there, here and below.
        answer(Address(0), |place| unsafe { aclrtMalloc(place, size, 0) }).0
    }

    pub fn malloc_host(size: usize) -> u64 {
        // SAFETY: as above.
        answer(Address(0), |place| unsafe { aclrtMallocHost(place, size) }).0
    }

    pub fn free(device: u64, host: u64) {
        // SAFETY: nothing uses the memory any more.
        unsafe {
            check(aclrtFree(Address(device)));
            check(aclrtFreeHost(Address(host)));
            check(aclrtResetDevice(0));
            check(aclFinalize());
        }
    }

    pub fn new_stream() -> Handle {
        // SAFETY: as above.
        answer(Handle::NULL, |place| unsafe { aclrtCreateStream(place) })
    }

    pub fn new_event(newer: bool) -> Handle {
        // SAFETY: as above.
        answer(Handle::NULL, |place| unsafe {
            if newer { aclrtCreateEventExWithFlag(place, 1) } else { aclrtCreateEvent(place) }
        })
    }

    pub fn query_event(event: Handle) -> i32 {
        // SAFETY: as above.
        answer(-1, |place| unsafe { aclrtQueryEventStatus(event, place) })
    }

    pub fn query_stream(stream: Handle) -> i32 {
        // SAFETY: as above.
        answer(-1, |place| unsafe { aclrtStreamQuery(stream, place) })
    }
}

/// A thread that processes reports.
fn serve(id: &mpsc::Sender<u64>, serving: &AtomicBool) {
    // SAFETY: a question for a number.
    id.send(unsafe { libc::pthread_self() } as u64).unwrap();
    while serving.load(Ordering::Acquire) {
        // SAFETY: no pointers.
        match unsafe { aclrtProcessReport(5) } {
            0 | code::RT_REPORT_TIMEOUT => {}
            code::RT_THREAD_SUBSCRIBE => std::thread::sleep(Duration::from_micros(100)),
            other => panic!("aclrtProcessReport returned {other}"),
        }
    }
}

/// What functions on streams see.
struct Shared {
    /// For each stream, how many of its functions were called.
    called: Vec<AtomicU64>,
    /// How often a stream was destroyed by force, which releases what waits for it.
    released: AtomicU64,
    wrong: Mutex<Option<String>>,
}

/// A function on a stream.
struct Call {
    shared: Arc<Shared>,
    stream: usize,
    /// How many functions of each stream must have been called before.
    before: Vec<u64>,
    /// [`Shared::released`] when that was computed.
    released: u64,
    /// Whether the stream waits for it.
    counts: bool,
    gate: Option<Arc<AtomicBool>>,
}

impl Call {
    /// SAFETY: the argument is a `Call` in a box, and this is called once.
    unsafe extern "C-unwind" fn run(argument: *mut c_void) {
        // SAFETY: so says the caller.
        let call = unsafe { Box::from_raw(argument.cast::<Call>()) };
        let late = |(stream, &before): (usize, &u64)| call.shared.called[stream].load(Ordering::SeqCst) < before;
        let early = call.before.iter().enumerate().position(late);
        if let (Some(other), true) = (early, call.shared.released.load(Ordering::SeqCst) == call.released) {
            let text = format!("a function on stream {} did not wait for stream {other}", call.stream);
            *call.shared.wrong.lock().unwrap() = Some(text);
        }
        while call.gate.as_ref().is_some_and(|gate| !gate.load(Ordering::Acquire)) {
            std::thread::sleep(Duration::from_micros(20));
        }
        if call.counts {
            call.shared.called[call.stream].fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// How many tasks of each stream are over.
#[derive(Clone)]
struct Clock(Vec<u64>);

impl Clock {
    fn join(&mut self, other: &Clock) {
        self.0.iter_mut().zip(&other.0).for_each(|(own, other)| *own = (*own).max(*other));
    }

    fn has(&self, task: Task) -> bool {
        self.0[task.stream] >= task.number
    }
}

/// A task of a stream; the first has the number 1.
#[derive(Clone, Copy)]
struct Task {
    stream: usize,
    number: u64,
}

struct Stream {
    handle: Handle,
    tasks: u64,
    /// What is over before the next task.
    clock: Clock,
    /// The tasks that are functions which count.
    functions: Vec<u64>,
    /// The task that waits at a gate which is shut.
    gate: Option<(u64, Arc<AtomicBool>)>,
    subscribed: bool,
    /// How many tasks there were when the stream itself was waited for.
    synchronized: u64,
    alive: bool,
    /// Some functions may never be called.
    forced: bool,
}

struct Event {
    handle: Handle,
    newer: bool,
    record: Option<Record>,
}

#[derive(Clone)]
struct Record {
    task: Task,
    clock: Clock,
    reset: Option<Reset>,
    /// Its stream was destroyed by force: it is passed, now or very soon.
    released: bool,
}

#[derive(Clone)]
struct Reset {
    task: Task,
    /// Whether it is known that the record is reached before the reset.
    behind: bool,
}

struct Place {
    address: u64,
    /// What it contains when all tasks are over; `None` if that depends.
    value: Option<u64>,
    /// Tasks that use it and may not be over, and whether they write.
    uses: Vec<(Task, bool)>,
}

struct Program<'a> {
    random: &'a mut Random,
    server: u64,
    shared: Arc<Shared>,
    /// What is over for the calling thread.
    clock: Clock,
    streams: Vec<Stream>,
    events: Vec<Event>,
    places: Vec<Place>,
    value: u64,
}

impl<'a> Program<'a> {
    fn new(random: &'a mut Random, server: u64, device: u64, host: u64) -> Program<'a> {
        let shared = Shared {
            called: (0..MOST_STREAMS).map(|_| AtomicU64::new(0)).collect(),
            released: AtomicU64::new(0),
            wrong: Mutex::new(None),
        };
        let address = |index: usize| if index < PLACES / 2 { device } else { host } + 8 * index as u64;
        let place = |index| Place { address: address(index), value: None, uses: Vec::new() };
        let places = (0..PLACES).map(place).collect();
        let clock = Clock(vec![0; MOST_STREAMS]);
        let (streams, events, shared) = (Vec::new(), Vec::new(), Arc::new(shared));
        Program { random, server, shared, clock, streams, events, places, value: 0 }
    }

    fn run(mut self) {
        for _ in 0..STREAMS {
            self.new_stream();
        }
        while self.events.len() < EVENTS {
            let event = self.new_event();
            self.events.push(event);
        }
        let mut calls = 0;
        while calls < CALLS {
            calls += u64::from(self.call());
            let wrong = self.shared.wrong.lock().unwrap().take();
            assert_eq!(wrong, None);
        }
        self.synchronize_device();
        for place in 0..PLACES {
            assert!(self.read(place), "all is over");
        }
        for stream in self.alive() {
            self.destroy(stream);
        }
        for event in &self.events {
            // SAFETY: handles are looked up.
            check(unsafe { aclrtDestroyEvent(event.handle) });
        }
        let wrong = self.shared.wrong.lock().unwrap().take();
        assert_eq!(wrong, None);
    }

    /// One random call; `false` if the chosen one is not possible now.
    fn call(&mut self) -> bool {
        let alive = self.alive();
        let stream = alive[self.random.index(alive.len())];
        let event = self.random.index(EVENTS);
        match self.random.below(100) {
            0..22 => return self.copy(stream),
            22..28 => return self.fill(stream),
            28..40 => self.function(stream),
            40..45 => return self.callback(stream),
            45..50 => return self.shut_gate(stream),
            50..56 => return self.open_gate(stream),
            56..68 => self.record(event, stream),
            68..80 => self.wait(stream, event),
            80..83 => return self.reset(event, stream),
            83..86 => self.query_event(event),
            86..88 => self.query_stream(stream),
            88..90 => self.synchronize_event(event),
            90..92 => self.synchronize_stream(stream),
            92 => self.synchronize_device(),
            93 => {
                // SAFETY: handles are looked up.
                check(unsafe { aclrtDestroyEvent(self.events[event].handle) });
                self.events[event] = self.new_event();
            }
            94 => self.destroy(stream),
            95 => self.destroy_force(stream),
            96..98 => {
                let place = self.random.index(PLACES);
                return self.read(place);
            }
            _ => return self.write(),
        }
        while self.streams.len() < MOST_STREAMS && self.alive().len() < STREAMS {
            self.new_stream();
        }
        true
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.streams.len()).filter(|&stream| self.streams[stream].alive).collect()
    }

    fn new_stream(&mut self) {
        let handle = exports::new_stream();
        let subscribed = self.random.one_in(2);
        if subscribed {
            // SAFETY: handles are looked up.
            check(unsafe { aclrtSubscribeReport(self.server, handle) });
        }
        self.streams.push(Stream {
            handle,
            tasks: 0,
            clock: self.clock.clone(),
            functions: Vec::new(),
            gate: None,
            subscribed,
            synchronized: 0,
            alive: true,
            forced: false,
        });
    }

    fn new_event(&mut self) -> Event {
        let newer = self.random.one_in(2);
        Event { handle: exports::new_event(newer), newer, record: None }
    }

    /// A new value, different from all others.
    fn value(&mut self) -> u64 {
        self.value += 1;
        self.value << 32 | 0x5EED
    }

    /// Puts a task on a stream.
    fn task(&mut self, stream: usize) -> Task {
        let of = &mut self.streams[stream];
        of.clock.join(&self.clock);
        of.tasks += 1;
        of.clock.0[stream] = of.tasks;
        Task { stream, number: of.tasks }
    }

    /// Whether a stream, or the calling thread, may use a place without another use at the same
    /// time.
    fn may_use(&self, clock: &Clock, place: usize, writes: bool) -> bool {
        self.places[place]
            .uses
            .iter()
            .all(|&(task, wrote)| !(wrote || writes) || clock.has(task) || self.clock.has(task))
    }

    fn copy(&mut self, stream: usize) -> bool {
        let (to, from) = (self.random.index(PLACES), self.random.index(PLACES));
        let clock = &self.streams[stream].clock;
        let between_hosts = to >= PLACES / 2 && from >= PLACES / 2;
        if to == from || between_hosts || !self.may_use(clock, to, true) || !self.may_use(clock, from, false) {
            return false;
        }
        let (to_address, from_address) = (Address(self.places[to].address), Address(self.places[from].address));
        // SAFETY: both places stay until all is over, and nothing else writes them meanwhile.
        check(unsafe { aclrtMemcpyAsync(to_address, 8, from_address, 8, 4, self.streams[stream].handle) });
        let task = self.task(stream);
        self.places[to].uses.push((task, true));
        self.places[from].uses.push((task, false));
        self.places[to].value = self.places[from].value;
        true
    }

    fn fill(&mut self, stream: usize) -> bool {
        let place = self.random.index(PLACES);
        if !self.may_use(&self.streams[stream].clock, place, true) {
            return false;
        }
        let byte = self.random.below(256) as u8;
        let (address, handle) = (Address(self.places[place].address), self.streams[stream].handle);
        // SAFETY: as for copies.
        check(unsafe { aclrtMemsetAsync(address, 8, byte.into(), 8, handle) });
        let task = self.task(stream);
        self.places[place].uses.push((task, true));
        self.places[place].value = Some(u64::from_ne_bytes([byte; 8]));
        true
    }

    /// A function for a stream, with what must precede it.
    fn new_call(&mut self, stream: usize, counts: bool, gate: Option<Arc<AtomicBool>>) -> *mut c_void {
        let mut clock = self.streams[stream].clock.clone();
        clock.join(&self.clock);
        let functions = |(other, of): (usize, &Stream)| match of.forced {
            true => 0,
            false => of.functions.partition_point(|&task| task <= clock.0[other]) as u64,
        };
        let before = self.streams.iter().enumerate().map(functions).collect();
        let released = self.shared.released.load(Ordering::SeqCst);
        let call = Call { shared: self.shared.clone(), stream, before, released, counts, gate };
        Box::into_raw(Box::new(call)).cast()
    }

    /// The function that was launched is a task.
    fn launched(&mut self, stream: usize, counts: bool) -> u64 {
        let task = self.task(stream);
        if counts {
            self.streams[stream].functions.push(task.number);
        }
        task.number
    }

    fn function(&mut self, stream: usize) {
        let call = self.new_call(stream, true, None);
        // SAFETY: the function takes this argument, once.
        check(unsafe { aclrtLaunchHostFunc(self.streams[stream].handle, Some(Call::run), call) });
        self.launched(stream, true);
    }

    fn callback(&mut self, stream: usize) -> bool {
        if !self.streams[stream].subscribed {
            return false;
        }
        let blocks = self.random.one_in(2);
        let call = self.new_call(stream, blocks, None);
        // SAFETY: the function takes this argument, once.
        check(unsafe { aclrtLaunchCallback(Some(Call::run), call, blocks.into(), self.streams[stream].handle) });
        self.launched(stream, blocks);
        true
    }

    fn shut_gate(&mut self, stream: usize) -> bool {
        if self.streams[stream].gate.is_some() {
            return false;
        }
        let gate = Arc::new(AtomicBool::new(false));
        let call = self.new_call(stream, true, Some(gate.clone()));
        // SAFETY: the function takes this argument, once.
        check(unsafe { aclrtLaunchHostFunc(self.streams[stream].handle, Some(Call::run), call) });
        let task = self.launched(stream, true);
        self.streams[stream].gate = Some((task, gate));
        true
    }

    fn open_gate(&mut self, stream: usize) -> bool {
        let gate = self.streams[stream].gate.take();
        if let Some((_, gate)) = &gate {
            gate.store(true, Ordering::Release);
        }
        gate.is_some()
    }

    /// Whether something that precedes waits at a gate.
    fn is_shut(&self, clock: &Clock) -> bool {
        let mut gates = self.streams.iter().zip(&clock.0);
        gates.any(|(stream, &over)| stream.gate.as_ref().is_some_and(|(task, _)| *task <= over))
    }

    /// Opens all gates that something waits for.
    fn open_gates(&mut self, clock: &Clock) {
        for stream in 0..self.streams.len() {
            if self.streams[stream].gate.as_ref().is_some_and(|(task, _)| *task <= clock.0[stream]) {
                self.open_gate(stream);
            }
        }
    }

    fn record(&mut self, event: usize, stream: usize) {
        // SAFETY: handles are looked up.
        check(unsafe { aclrtRecordEvent(self.events[event].handle, self.streams[stream].handle) });
        let task = self.task(stream);
        let clock = self.streams[stream].clock.clone();
        self.events[event].record = Some(Record { task, clock, reset: None, released: false });
    }

    fn wait(&mut self, stream: usize, event: usize) {
        // SAFETY: handles are looked up.
        check(unsafe { aclrtStreamWaitEvent(self.streams[stream].handle, self.events[event].handle) });
        // Reset or not: a reset is of a record that was reached.
        if let Some(record) = &self.events[event].record {
            self.streams[stream].clock.join(&record.clock);
            self.task(stream);
        }
    }

    fn reset(&mut self, event: usize, stream: usize) -> bool {
        let clock = &self.streams[stream].clock;
        let (handle, newer) = (self.events[event].handle, self.events[event].newer);
        let Some(record) = self.events[event].record.as_ref().filter(|record| record.reset.is_none() && !newer) else {
            return false;
        };
        let behind = !record.released && (clock.has(record.task) || self.clock.has(record.task));
        // SAFETY: handles are looked up.
        check(unsafe { aclrtResetEvent(handle, self.streams[stream].handle) });
        let task = self.task(stream);
        if let Some(record) = &mut self.events[event].record {
            record.reset = Some(Reset { task, behind });
        }
        true
    }

    fn query_event(&mut self, event: usize) {
        let found = exports::query_event(self.events[event].handle);
        let Some(record) = &self.events[event].record else {
            assert_eq!(found, i32::from(self.events[event].newer), "an event that was never recorded");
            return;
        };
        match &record.reset {
            _ if self.is_shut(&record.clock) => assert_eq!(found, 0, "a record behind a gate"),
            Some(reset) if reset.behind && self.clock.has(reset.task) => assert_eq!(found, 0, "a reset record"),
            None if self.clock.has(record.task) && !record.released => assert_eq!(found, 1, "a record that is over"),
            _ => {}
        }
    }

    fn query_stream(&mut self, stream: usize) {
        let of = &self.streams[stream];
        let found = exports::query_stream(of.handle);
        if self.is_shut(&of.clock) {
            assert_eq!(found, 1, "a stream at a gate");
        } else if of.synchronized == of.tasks {
            assert_eq!(found, 0, "a stream that was waited for");
        }
    }

    fn synchronize_event(&mut self, event: usize) {
        let handle = self.events[event].handle;
        let record = self.events[event].record.clone();
        let shut = record.as_ref().is_some_and(|record| self.is_shut(&record.clock));
        if shut && self.random.one_in(4) {
            // SAFETY: handles are looked up.
            assert_eq!(unsafe { aclrtSynchronizeEventWithTimeout(handle, 1) }, code::RT_EVENT_TIMEOUT);
            return;
        }
        if let Some(record) = &record {
            self.open_gates(&record.clock);
        }
        // SAFETY: handles are looked up.
        check(unsafe { aclrtSynchronizeEvent(handle) });
        if let Some(record) = &mut self.events[event].record {
            self.clock.join(&record.clock);
            record.released &= record.reset.is_some();
        }
    }

    fn synchronize_stream(&mut self, stream: usize) {
        let (handle, clock) = (self.streams[stream].handle, self.streams[stream].clock.clone());
        if self.is_shut(&clock) && self.random.one_in(4) {
            // SAFETY: handles are looked up.
            assert_eq!(unsafe { aclrtSynchronizeStreamWithTimeout(handle, 1) }, code::RT_STREAM_TIMEOUT);
            return;
        }
        self.open_gates(&clock);
        // SAFETY: handles are looked up.
        check(unsafe { aclrtSynchronizeStream(handle) });
        self.clock.join(&clock);
        self.streams[stream].synchronized = self.streams[stream].tasks;
    }

    fn synchronize_device(&mut self) {
        for stream in self.alive() {
            self.open_gate(stream);
        }
        // SAFETY: no arguments.
        check(unsafe { aclrtSynchronizeDevice() });
        for stream in self.alive() {
            let of = &mut self.streams[stream];
            self.clock.join(&of.clock);
            of.synchronized = of.tasks;
        }
    }

    /// Destroys a stream when all is done that is on it.
    fn destroy(&mut self, stream: usize) {
        let clock = self.streams[stream].clock.clone();
        self.open_gates(&clock);
        // SAFETY: handles are looked up.
        check(unsafe { aclrtDestroyStream(self.streams[stream].handle) });
        self.clock.join(&clock);
        self.streams[stream].alive = false;
    }

    /// Destroys a stream as it is. Its copies are over then, done or not, and what waits for one of
    /// its records goes on. So what was ordered only through this stream is not any more, and what
    /// is left is the order of each stream and what the calling thread knows.
    fn destroy_force(&mut self, stream: usize) {
        for place in &mut self.places {
            if place.uses.iter().any(|(task, _)| !self.clock.has(*task)) {
                place.value = None;
            }
        }
        let known = self.clock.clone();
        self.shared.released.fetch_add(1, Ordering::SeqCst);
        // SAFETY: handles are looked up.
        check(unsafe { aclrtDestroyStreamForce(self.streams[stream].handle) });
        // All: which streams still wait for which gate is not known any more.
        for stream in self.alive() {
            self.open_gate(stream);
        }
        let of = &mut self.streams[stream];
        (of.alive, of.forced) = (false, true);
        self.clock.0[stream] = of.tasks;
        for other in self.alive() {
            let of = &mut self.streams[other];
            of.clock = self.clock.clone();
            of.clock.0[other] = of.tasks;
        }
        for record in self.events.iter_mut().filter_map(|event| event.record.as_mut()) {
            let task = record.task;
            record.clock = self.clock.clone();
            record.clock.0[task.stream] = record.clock.0[task.stream].max(task.number);
            record.released |= task.stream == stream && !known.has(task);
            if let Some(reset) = record.reset.as_mut().filter(|reset| !known.has(reset.task)) {
                reset.behind = false;
            }
        }
        self.write_all_that_is_free();
    }

    /// Writes host memory that nothing uses any more: what a destroyed stream still did would be
    /// found there.
    fn write_all_that_is_free(&mut self) {
        for place in PLACES / 2..PLACES {
            self.write_place(place);
        }
    }

    fn write(&mut self) -> bool {
        let place = self.random.index(PLACES);
        self.write_place(place)
    }

    /// The calling thread writes a place, if it may.
    fn write_place(&mut self, place: usize) -> bool {
        if !self.may_use(&self.clock, place, true) {
            return false;
        }
        let value = self.value();
        let from = Address((&raw const value).expose_provenance() as u64);
        // SAFETY: both places are there, and nothing else uses them meanwhile.
        check(unsafe { aclrtMemcpy(Address(self.places[place].address), 8, from, 8, 4) });
        self.places[place].value = Some(value);
        self.places[place].uses.clear();
        true
    }

    /// The calling thread looks at a place, if it may.
    fn read(&mut self, place: usize) -> bool {
        if !self.may_use(&self.clock, place, false) {
            return false;
        }
        let mut found = 0u64;
        let to = Address((&raw mut found).expose_provenance() as u64);
        // SAFETY: both places are there, and nothing writes them meanwhile.
        check(unsafe { aclrtMemcpy(to, 8, Address(self.places[place].address), 8, 4) });
        if let Some(value) = self.places[place].value {
            assert_eq!(found, value, "place {place}");
        }
        let known = &self.clock;
        self.places[place].uses.retain(|(task, _)| !known.has(*task));
        true
    }
}
