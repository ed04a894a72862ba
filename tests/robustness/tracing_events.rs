//! The library's events for subscribers of the crate `tracing`: one for every system call.

use crate::support::events::{AtEvent, Fields};
use crate::support::{MIB2, inject};
use ascend_emulator::{Config, isolated};
use ascend_vmm::LogicalId;
use ascend_vmm::Session;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

#[test]
fn every_system_call_is_an_event_with_its_name_device_size_time_and_result() {
    isolated(Config::default(), |emulator| {
        let events: Arc<Mutex<Vec<Fields>>> = Arc::default();
        let seen = events.clone();
        emulator.record();
        tracing::subscriber::with_default(AtEvent(move |fields| seen.lock().unwrap().push(fields)), || {
            let session = Session::open().unwrap();
            let device = session.device(LogicalId(1)).unwrap();
            let memory = device.create(3 * MIB2).unwrap();
            inject(emulator, "MEM_CREATE#1=ENOMEM");
            device.create(MIB2).unwrap_err();
            drop((memory, device));
            session.close().unwrap();
        });
        let events = events.lock().unwrap();
        let calls: Vec<_> = events.iter().filter(|event| event.contains_key("command")).collect();
        // Commands of /dev/hisi_hdc return codes of their own.
        let complete = |event: &Fields| {
            event.contains_key("duration") && (event.contains_key("result") || event.contains_key("code"))
        };
        assert!(calls.iter().all(|event| complete(event)), "{calls:?}");
        let creates: Vec<_> = calls.iter().filter(|event| event["command"] == "MEM_CREATE").collect();
        let fields = |event: &Fields| (event["device"].clone(), event["size"].clone(), event["result"].clone());
        assert_eq!(fields(creates[0]), ("1".into(), "6291456".into(), "ok".into()));
        assert_eq!(fields(creates[1]), ("1".into(), "2097152".into(), "ENOMEM".into()));
        // Every call that the memory driver saw has its event.
        let mut names: BTreeMap<&str, i64> = BTreeMap::new();
        for record in emulator.records() {
            let ours = record.file.is_none_or(|file| file == 1) && record.call != "close";
            if let (true, name) = (ours, record.cmd.unwrap_or(record.call)) {
                *names.entry(name).or_default() += 1;
            }
        }
        for name in [
            "ALLOC_PROC_STRUCT",
            "GET_MMAP_INFO",
            "INIT_PROCESS",
            "SETUP_DEVICE",
            "MEM_CREATE",
            "MEM_RELEASE",
            "CLOSE_DEVICE",
        ] {
            let count = calls.iter().filter(|event| event["command"] == name).count() as i64;
            assert_eq!(names.get(name), Some(&count), "{name}");
        }
        for name in ["open", "OPEN", "mmap", "mprotect", "munmap", "CLOSE"] {
            assert!(calls.iter().any(|event| event["command"] == name), "{name}");
        }
    });
}
