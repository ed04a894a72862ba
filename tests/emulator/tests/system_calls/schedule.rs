//! Seeded schedules: a number decides which of the waiting calls is answered next.

use crate::again;
use ascend_emulator::schedule::{Event, Schedule, Summary};
use ascend_emulator::{Config, Emulator, fork, isolated, oracle};
use std::collections::BTreeSet;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Set in a client.
const CLIENT: &str = "ASCEND_EMULATOR_SCHEDULED";

/// Runs a program to its end, and all that it started.
fn run(schedule: Schedule, command: &mut Command) -> (ExitStatus, Summary, Vec<String>) {
    let emulator = Emulator::start(Config { schedule: Some(schedule), ..Config::default() }).unwrap();
    let status = emulator.spawn(command).unwrap().wait().unwrap();
    let mut summary = emulator.schedule().unwrap();
    while !summary.living.is_empty() {
        std::thread::sleep(Duration::from_millis(1));
        summary = emulator.schedule().unwrap();
    }
    (status, summary, oracle::findings(&emulator))
}

fn seeded(seed: u64, command: &mut Command) -> (ExitStatus, Summary) {
    let (status, summary, findings) = run(Schedule::seed(seed), command);
    assert_eq!(findings, [] as [&str; 0], "{summary}");
    (status, summary)
}

/// Adds one to a number so that an addition by another thread can be lost: a call of the driver is
/// between load and store.
fn add(counter: &AtomicU64) {
    for _ in 0..3 {
        assert!(std::fs::exists("/dev/davinci1").unwrap());
        let before = counter.load(Ordering::SeqCst);
        assert!(std::fs::exists("/dev/davinci0").unwrap());
        counter.store(before + 1, Ordering::SeqCst);
    }
}

#[test]
fn a_seed_finds_a_race_between_threads_and_the_same_seed_finds_it_again() {
    if std::env::var_os(CLIENT).is_some() {
        let counter = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| add(&counter));
            }
        });
        std::process::exit(counter.into_inner() as i32);
    }
    let mut client = again("schedule::a_seed_finds_a_race_between_threads_and_the_same_seed_finds_it_again");
    client.env(CLIENT, "").stdout(Stdio::null());
    let mut sums = BTreeSet::new();
    for seed in 0..12 {
        let (status, first) = seeded(seed, &mut client);
        let sum = status.code().unwrap();
        let (again, second) = seeded(seed, &mut client);
        assert_eq!((again.code(), second.trace), (Some(sum), first.trace), "{first}, then {second}");
        assert!((1..=9).contains(&sum), "{sum}");
        sums.insert(sum);
    }
    assert!(sums.len() > 2, "all orders are alike: {sums:?}");
    let in_turns = Schedule { choices: Some(0), ..Schedule::seed(0) };
    assert_eq!(run(in_turns, &mut client).1.real_choices, 0);
}

#[test]
fn processes_are_put_in_order_whichever_called_first() {
    let script = "for i in 1 2 3; do cat /dev/davinci0 2>/dev/null & done; wait";
    let traces = |seed: u64| -> BTreeSet<u64> {
        (0..4).map(|_| seeded(seed, Command::new("sh").args(["-c", script])).1.trace).collect()
    };
    let of: Vec<BTreeSet<u64>> = (0..4).map(traces).collect();
    assert!(of.iter().all(|traces| traces.len() == 1), "{of:?}");
    assert_eq!(of.iter().flatten().collect::<BTreeSet<_>>().len(), 4);
}

#[test]
fn threads_and_processes_that_start_or_are_stopped_make_the_same_calls_in_each_run() {
    let calls = || (0..12).for_each(|_| assert!(std::fs::exists("/dev/davinci1").unwrap()));
    if std::env::var_os(CLIENT).is_some() {
        // The one that takes the lock first makes its calls before the others.
        let lock = Mutex::new(());
        let alone = || drop((lock.lock().unwrap(), calls()));
        std::thread::scope(|scope| {
            let child = fork(calls);
            scope.spawn(alone);
            alone();
            child.join();
        });
        std::process::exit(0);
    }
    let mut client = again("schedule::threads_and_processes_that_start_or_are_stopped_make_the_same_calls_in_each_run");
    client.env(CLIENT, "").stdout(Stdio::null());
    let mut stops = 0;
    for seed in 0..6 {
        let runs: Vec<Summary> =
            (0..6).map(|_| run(Schedule::seed(seed).with(&Event::HARMLESS), &mut client).1).collect();
        stops += runs[0].events.iter().filter(|event| event.contains(" stop of ")).count();
        let traces: BTreeSet<u64> = runs.iter().map(|run| run.trace).collect();
        assert_eq!(traces.len(), 1, "{runs:#?}");
    }
    assert!(stops > 0);
}

/// Whether Linux ends a thread's wait after a time, and not the seed.
#[test]
fn a_wait_for_a_lock_with_a_time_limit_is_counted() {
    if std::env::var_os(CLIENT).is_some() {
        let (_sender, receiver) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || receiver.recv_timeout(Duration::from_millis(200)));
            (0..20).for_each(|_| assert!(std::fs::exists("/dev/davinci1").unwrap()));
        });
        std::process::exit(0);
    }
    let mut client = again("schedule::a_wait_for_a_lock_with_a_time_limit_is_counted");
    client.env(CLIENT, "").stdout(Stdio::null());
    let (_, summary) = seeded(0, &mut client);
    assert!(summary.timed >= 20, "{summary}");
}

#[test]
fn whatever_happens_between_calls_leaves_nothing_in_the_driver() {
    let script = "for i in 1 2 3 4; do sh -c 'exec 3<>/dev/davinci_manager; cat <&3; cat /dev/davinci1' 2>/dev/null & \
                  done; wait; true";
    let mut events = BTreeSet::new();
    for seed in 0..10 {
        let (status, summary, findings) =
            run(Schedule::seed(seed).with(&Event::ALL), Command::new("sh").args(["-c", script]));
        assert!(status.success(), "{status}: {summary}");
        assert_eq!(findings, [] as [&str; 0], "{summary}: {:?}", summary.events);
        events.extend(summary.events.iter().filter_map(|event| event.split(", ").nth(1)?.get(..4)).map(str::to_owned));
    }
    assert!(events.contains("kill") && events.contains("stop"), "{events:?}");
}

#[test]
fn an_event_can_be_left_out() {
    let script = "for i in 1 2 3 4; do cat /dev/davinci1 2>/dev/null & done; wait; true";
    let run = |schedule| run(schedule, Command::new("sh").args(["-c", script])).1.events.len();
    let stops = |seed| Schedule::seed(seed).with(&[Event::Stop]);
    let seed = (0..20).find(|seed| run(stops(*seed)) > 0).expect("a seed that stops a process");
    let all = (0..1000).collect();
    assert_eq!(run(Schedule { skipped: all, ..stops(seed) }), 0);
}

#[test]
fn clients_that_wait_for_ever_are_ended_and_told() {
    let schedule = Schedule { stuck_after: Duration::from_millis(300), ..Schedule::seed(0) };
    let emulator = Emulator::start(Config { schedule: Some(schedule), ..Config::default() }).unwrap();
    let mut child = emulator.spawn(Command::new("cat").stdin(Stdio::piped())).unwrap();
    // Not `wait`, which would close the pipe.
    while child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let summary = emulator.schedule().unwrap();
    let text = oracle::stuck(&summary).concat();
    assert!(
        text.contains("every thread waits") && text.contains("(cat)") && text.contains("waits in a read"),
        "{text}"
    );
}

#[test]
fn a_sleep_takes_its_time_and_random_numbers_come_from_the_seed() {
    if std::env::var_os(CLIENT).is_some() {
        let before = std::time::Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        assert!(before.elapsed() >= Duration::from_millis(20));
        let mut bytes = [0u8; 1];
        // SAFETY: the buffer has this length.
        assert_eq!(unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), 1, 0) }, 1);
        std::process::exit(i32::from(bytes[0]));
    }
    let mut client = again("schedule::a_sleep_takes_its_time_and_random_numbers_come_from_the_seed");
    client.env(CLIENT, "").stdout(Stdio::null());
    let mut number = |seed| seeded(seed, &mut client).0.code().unwrap();
    let numbers: Vec<i32> = [1, 1, 2, 3].into_iter().map(&mut number).collect();
    assert_eq!(numbers[0], numbers[1]);
    assert!(numbers[1] != numbers[2] || numbers[2] != numbers[3], "{numbers:?}");
}

#[test]
fn threads_of_the_emulators_own_process_have_a_schedule_too() {
    for seed in 0..3 {
        isolated(Config { schedule: Some(Schedule::seed(seed)), ..Config::default() }, |emulator| {
            let counter = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| add(&counter));
                }
            });
            assert!((1..=9).contains(&counter.into_inner()));
            assert!(emulator.schedule().unwrap().real_choices > 0);
            oracle::assert_clean(emulator);
        });
    }
}
