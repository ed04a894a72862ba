//! Records of calls: reading them, and comparing a trace with what the emulator recorded.

use ascend_emulator::record::Record;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

/// The calls of a file.
#[track_caller]
pub fn read(path: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    text.lines().map(parse).collect()
}

/// A call without what differs between the two: times, descriptors, the page of the process.
fn call(record: &Record) -> Record {
    Record { us: 0, at: None, fd: None, log: None, file: None, ..record.clone() }
}

/// A call that a signal interrupted is repeated by the kernel; the emulator has not seen the first.
fn interrupted(record: &Record) -> bool {
    record.errno.as_deref().is_some_and(|errno| errno.starts_with("ERESTART"))
}

/// Checks that two lists have the same calls, thread by thread, and the same closes and ends.
///
/// Calls of different threads have no order, so files may be numbered differently. A call that was
/// not finished when its thread was killed may be the last of its thread in either list.
#[track_caller]
pub fn assert_same(emulator: &[Record], trace: &[Record]) {
    let by_thread = |records: &[Record]| {
        let mut threads: BTreeMap<i32, Vec<Record>> = BTreeMap::new();
        let calls = records.iter().filter(|it| !matches!(it.call, "close" | "end") && !interrupted(it));
        for record in calls {
            threads.entry(record.tid).or_default().push(record.clone());
        }
        threads
    };
    let (expected, seen) = (by_thread(emulator), by_thread(trace));
    let mut files: HashMap<u64, u64> = HashMap::new();
    let threads: std::collections::BTreeSet<i32> = expected.keys().chain(seen.keys()).copied().collect();
    for tid in threads {
        let expected = expected.get(&tid).map_or(&[][..], Vec::as_slice);
        let mut seen = seen.get(&tid).map_or(&[][..], Vec::as_slice);
        if let Some((last, rest)) = seen.split_last().filter(|(last, _)| last.unfinished) {
            let done = expected.get(rest.len()).is_none_or(|it| (it.call, it.cmd) == (last.call, last.cmd));
            assert!(done && expected.len() <= seen.len(), "thread {tid}: {last:?}");
            seen = rest;
        } else {
            assert_eq!(expected.len(), seen.len(), "calls of thread {tid}");
        }
        for (index, (expected, seen)) in expected.iter().zip(seen).enumerate() {
            assert_eq!(call(expected), call(seen), "call {index} of thread {tid}");
            if let (Some(expected), Some(seen)) = (expected.file, seen.file) {
                assert_eq!(*files.entry(expected).or_insert(seen), seen, "file of call {index} of thread {tid}");
            } else {
                assert_eq!(expected.file, seen.file, "file of call {index} of thread {tid}");
            }
        }
    }
    let named = |records: &[Record], call: &str| {
        let mut named: Vec<(i32, Option<u64>)> = records
            .iter()
            .filter(|it| it.call == call)
            .map(|it| if call == "end" { (it.pid, None) } else { (0, it.file) })
            .collect();
        named.sort_unstable();
        named
    };
    // The trace does not know the file of an unfinished open, so it tells no close of it.
    let known = emulator.iter().filter(|it| it.file.is_none_or(|file| files.contains_key(&file)));
    let renumbered: Vec<Record> =
        known.map(|it| Record { file: it.file.and_then(|file| files.get(&file).copied()), ..it.clone() }).collect();
    assert_eq!(named(&renumbered, "close"), named(trace, "close"));
    // The emulator also sees the end of processes that only looked for the nodes.
    let callers: HashSet<i32> = emulator.iter().filter(|it| it.call != "end").map(|it| it.pid).collect();
    let mut ends = named(emulator, "end");
    ends.retain(|(pid, _)| callers.contains(pid));
    assert_eq!(ends, named(trace, "end"));
}
