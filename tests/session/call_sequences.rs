//! What the driver sees: each operation takes the system calls that the driver needs, in this
//! order, and not one more.

use crate::support::processes::start;
use crate::support::{MIB2, calls, contents, device, mapped, open, own_pid, own_tgid, patient, plain};
use ascend_emulator::{Config, Emulator, isolated, on_each_generation};
use ascend_vmm::LogicalId;
use ascend_vmm::device_process::DeviceProcess;
use ascend_vmm::share::{self, BareTgid, ShareableHandle};
use ascend_vmm::{Generation, PhysicalMemory, Session};

/// The commands that use memory once at new addresses.
const USE: &[&str] = &["UPDATE_HEAP", "ALLOC", "MEM_MAP", "MEMCPY", "MEM_UNMAP", "FREE_PAGES"];

/// The calls that start a device process, once the file of DEVMNG is open.
const START_DEVICE_PROCESS: &[&str] = &[
    "GET_PROCESS_SIGN",
    "open",
    "CONNECT",
    "SET_SESSION_OWNER",
    "SEND",
    "RECV_PEEK",
    "RECV",
    "GET_PROCESS_SIGN",
    "SEND",
    "RECV_PEEK",
    "RECV",
];

#[test]
fn bringing_up_the_first_device_takes_these_calls() {
    on_each_generation(plain(), |generation, emulator| {
        emulator.record();
        let session = Session::open().unwrap();
        assert_eq!(session.generation(), generation);
        let device = device(0);
        let mut seen = calls(emulator);
        if generation == Generation::V8_5_0 {
            // Command 101, which this generation does not have and which therefore has no name.
            seen.remove(2);
        }
        // With the mmap of the page of the kernel's messages, which the driver does not see, the
        // newest generation takes 13 system calls.
        let segments: &[&str] = match generation {
            Generation::V8_5_0 => &["mmap"],
            Generation::V9_0_0 => &["mmap", "mmap"],
            _ => &["mmap", "mmap", "mprotect", "mmap", "mprotect", "mmap"],
        };
        let before = ["open", "OPEN", "ALLOC_PROC_STRUCT", "GET_MMAP_INFO"];
        assert_eq!(seen, [&before, segments, &["INIT_PROCESS", "SETUP_DEVICE"]].concat());
        drop(device);
        session.close().unwrap();
    });
}

#[test]
fn starting_a_device_process_takes_thirteen_calls() {
    isolated(Config::default(), |emulator| {
        emulator.record();
        let process = DeviceProcess::start(LogicalId(0), &patient()).unwrap();
        assert_eq!(calls(emulator), [&["open", "OPEN"], START_DEVICE_PROCESS].concat());
        assert_eq!(calls(emulator).len(), 13);
        drop(process);
    });
}

#[test]
fn opening_a_device_that_needs_a_device_process_takes_sixteen_more_calls() {
    isolated(Config::default(), |emulator| {
        let session = Session::builder().device_process(patient()).open().unwrap();
        emulator.record();
        let device = session.device(LogicalId(0)).unwrap();
        let calls = calls(emulator);
        let before = ["SETUP_DEVICE", "open", "OPEN", "QUERY_DEV_PID"];
        assert_eq!(calls, [&before, START_DEVICE_PROCESS, &["SETUP_DEVICE"]].concat());
        // One SETUP_DEVICE is needed anyway; QUERY_DEV_PID needs a getpid, which the driver does
        // not see.
        let (needed_anyway, getpid) = (1, 1);
        assert_eq!(calls.len() - needed_anyway + getpid, 16);
        drop(device);
    });
}

#[test]
fn using_memory_in_one_process_takes_these_calls() {
    on_each_generation(plain(), |generation, emulator| {
        let (session, device) = open(0);
        emulator.record();
        let memory = device.create(2 * MIB2).unwrap();
        let reservation = session.reserve(2 * MIB2).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        mapping.write(0, b"there").unwrap();
        assert_eq!(contents(&mapping, 0, 5), b"there");
        mapping.unmap().unwrap();
        reservation.free().unwrap();
        memory.free().unwrap();
        device.close().unwrap();
        session.close().unwrap();
        let segments = match generation {
            Generation::V8_5_0 => 1,
            Generation::V9_0_0 => 2,
            _ => 4,
        };
        let mut expected = vec![
            "MEM_CREATE",
            "UPDATE_HEAP",
            "ALLOC",
            "MEM_MAP",
            "MEMCPY",
            "MEMCPY",
            "MEM_UNMAP",
            "FREE_PAGES",
            "MEM_RELEASE",
            "UPDATE_HEAP",
            "PREPARE_CLOSE_DEVICE",
            "CLOSE_DEVICE",
        ];
        expected.extend(vec!["munmap"; segments]);
        // The last munmap is that of the page of the kernel's messages.
        expected.extend(["CLOSE", "close", "munmap"]);
        assert_eq!(calls(emulator), expected);
    });
}

#[test]
fn a_full_cycle_after_the_first_takes_six_calls() {
    isolated(plain(), |emulator| {
        let (session, device) = open(0);
        let keep = session.reserve(MIB2).unwrap();
        for _ in 0..3 {
            emulator.record();
            let before = calls(emulator).len();
            let memory = device.create(MIB2).unwrap();
            let reservation = session.reserve(MIB2).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            drop(memory);
            drop(reservation);
            drop(mapping);
            let seen = calls(emulator).split_off(before);
            assert_eq!(seen.len(), 6, "{seen:?}");
            assert_eq!(seen[..4], ["MEM_CREATE", "ALLOC", "MEM_MAP", "MEM_UNMAP"]);
        }
        drop(keep);
    });
}

#[test]
fn access_for_a_peer_and_for_the_cpu_is_requested_once() {
    on_each_generation(plain(), |_, emulator| {
        let (device, peer) = (device(0), device(1));
        let memory = device.create(MIB2).unwrap();
        emulator.record();
        let mapping = mapped(&memory);
        for _ in 0..2 {
            mapping.grant(&peer).unwrap();
            mapping.grant(&device).unwrap();
            let _ = mapping.host_view().unwrap();
        }
        drop(mapping);
        let seen = memory_commands(emulator, own_pid(), "UPDATE_HEAP");
        let access = ["PREFETCH", "MEM_SET_ACCESS", "MEM_SET_ACCESS"];
        assert_eq!(seen, [&USE[..3], &access, &USE[4..]].concat());
    });
}

#[test]
fn export_trust_and_import_take_one_call_each() {
    on_each_generation(plain(), |_, emulator| {
        let (here, there) = (device(0), device(1));
        let share = |memory: &PhysicalMemory| {
            let export = memory.export().unwrap();
            export.trust(&[own_tgid()]).unwrap();
            share::import(&there, export.handle()).unwrap()
        };
        let first = here.create(MIB2).unwrap();
        // The first import of a session queries the devices' numbers.
        drop(share(&first));
        let memory = here.create(MIB2).unwrap();
        emulator.record();
        let imported = share(&memory);
        assert_eq!(calls(emulator), ["MEM_EXPORT", "MEM_SET_PID", "MEM_IMPORT"]);
        let ticket = memory.export().unwrap().ticket().unwrap();
        drop(imported);
        let before = emulator.records().len();
        drop(share::import(&there, &ticket).unwrap());
        assert_eq!(emulator.records().len(), before + 2, "a ticket is checked without a call to the driver");
    });
}

/// The memory module's commands of a process, from the first of this name on.
fn memory_commands(emulator: &Emulator, pid: i32, first: &str) -> Vec<&'static str> {
    let records = emulator.records();
    let ours = records.iter().filter(|record| record.pid == pid).filter_map(|record| record.cmd);
    let memory = ours.filter(|name| Generation::NEWEST.svm_commands().any(|command| command.command.name == *name));
    memory.skip_while(|&name| name != first).collect()
}

/// Exports to another process, which imports. Returns the memory module's commands of both.
fn share_with(emulator: &Emulator, trust: impl FnOnce(&share::Export, BareTgid)) -> [Vec<&'static str>; 2] {
    emulator.record();
    let importer = start(|channel| {
        let device = device(1);
        channel.send_tgid();
        let handle = ShareableHandle::from_u64(channel.receive()).unwrap();
        let memory = share::import(&device, handle).unwrap();
        assert_eq!(contents(&mapped(&memory), 0, 6), b"shared");
        memory.free().unwrap();
    });
    let pid = importer.pid();
    let device = device(0);
    let memory = device.create(MIB2).unwrap();
    mapped(&memory).write(0, b"shared").unwrap();
    let export = memory.export().unwrap();
    trust(&export, importer.receive_tgid());
    importer.send(export.handle().to_u64());
    importer.join();
    drop(export);
    memory.free().unwrap();
    [memory_commands(emulator, own_pid(), "MEM_CREATE"), memory_commands(emulator, pid, "MEM_IMPORT")]
}

#[test]
fn sharing_with_a_trusted_process_takes_these_commands() {
    on_each_generation(plain(), |_, emulator| {
        let [exporter, importer] = share_with(emulator, |export, importer| export.trust(&[importer]).unwrap());
        assert_eq!(exporter, [&["MEM_CREATE"], USE, &["MEM_EXPORT", "MEM_SET_PID", "MEM_RELEASE"]].concat());
        // At its end the importer closes its device, in the order of its drops.
        let end = ["MEM_RELEASE", "UPDATE_HEAP", "PREPARE_CLOSE_DEVICE", "CLOSE_DEVICE"];
        assert_eq!(importer, [&["MEM_IMPORT"], USE, &end].concat());
    });
}

#[test]
fn sharing_with_anyone_takes_another_command_instead_of_the_trust_list() {
    on_each_generation(plain(), |_, emulator| {
        let [exporter, _] = share_with(emulator, |export, _| export.trust_anyone().unwrap());
        assert_eq!(exporter, [&["MEM_CREATE"], USE, &["MEM_EXPORT", "MEM_SET_ATTR", "MEM_RELEASE"]].concat());
    });
}
