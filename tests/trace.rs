//! Sharing, as the driver sees it: the shortest sequences of commands that share memory between two processes, and not a call more.

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator, Line, fork, on_each_generation};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::share::{self, BareTgid, ShareableHandle};
use ascend_vmm::{Device, PhysicalMemory, Session};

const MIB2: u64 = 2 << 20;

fn plain() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

fn device(id: u32) -> Device {
    Session::current().unwrap().device(LogicalId(id)).unwrap()
}

/// The memory module's commands of a process, from the first of this name on.
fn commands(emulator: &Emulator, pid: i32, first: &str) -> Vec<&'static str> {
    let svm = ascend_vmm::Generation::NEWEST;
    let records = emulator.records();
    let ours = records.iter().filter(|record| record.pid == pid).filter_map(|record| record.cmd);
    let memory = ours.filter(|name| svm.svm_commands().any(|command| command.command.name == *name));
    memory.skip_while(|&name| name != first).collect()
}

fn map_and(memory: &PhysicalMemory, action: impl FnOnce(&ascend_vmm::Mapping)) {
    let reservation = memory.session().reserve(memory.size()).unwrap();
    let mapping = reservation.map(0, memory).unwrap();
    action(&mapping);
    mapping.unmap().unwrap();
    reservation.free().unwrap();
}

/// Exports to a child, which imports; `trusted` tells how. Returns what the two asked of the memory module.
fn share(emulator: &Emulator, trusted: bool) -> [Vec<&'static str>; 2] {
    emulator.record();
    let (up, down) = (Line::new(), Line::new());
    let importer = fork(|| {
        let device = device(1);
        up.send(BareTgid::of_this_process(&device.session()).unwrap().as_raw() as u64);
        let handle = ShareableHandle::from_u64(down.receive()).unwrap();
        let memory = share::import(&device, handle).unwrap();
        map_and(&memory, |mapping| {
            let mut back = [0; 6];
            mapping.read(0, &mut back).unwrap();
            assert_eq!(&back, b"shared");
        });
        memory.free().unwrap();
    });
    let pid = importer.pid();
    let device = device(0);
    let memory = device.create(MIB2).unwrap();
    map_and(&memory, |mapping| mapping.write(0, b"shared").unwrap());
    let export = memory.export().unwrap();
    let tgid = up.receive() as i32;
    match trusted {
        true => export.trust(&[BareTgid::from_raw(tgid).unwrap()]).unwrap(),
        false => export.trust_anyone().unwrap(),
    }
    down.send(export.handle().to_u64());
    importer.join();
    drop(export);
    memory.free().unwrap();
    [commands(emulator, std::process::id() as i32, "MEM_CREATE"), commands(emulator, pid, "MEM_IMPORT")]
}

const USE: &[&str] = &["UPDATE_HEAP", "ALLOC", "MEM_MAP", "MEMCPY", "MEM_UNMAP", "FREE_PAGES"];

#[test]
fn sharing_with_a_process_that_is_trusted_takes_these_commands_and_no_more() {
    on_each_generation(plain(), |_, emulator| {
        let [exporter, importer] = share(emulator, true);
        assert_eq!(exporter, [&["MEM_CREATE"], USE, &["MEM_EXPORT", "MEM_SET_PID", "MEM_RELEASE"]].concat());
        // At its end the importer closes its device, in the order of its drops.
        let end = ["MEM_RELEASE", "UPDATE_HEAP", "PREPARE_CLOSE_DEVICE", "CLOSE_DEVICE"];
        assert_eq!(importer, [&["MEM_IMPORT"], USE, &end].concat());
    });
}

#[test]
fn sharing_with_anyone_takes_another_command_and_no_more() {
    on_each_generation(plain(), |_, emulator| {
        let [exporter, _] = share(emulator, false);
        assert_eq!(exporter, [&["MEM_CREATE"], USE, &["MEM_EXPORT", "MEM_SET_ATTR", "MEM_RELEASE"]].concat());
    });
}

#[test]
fn access_for_a_peer_and_for_the_cpu_is_asked_for_once() {
    on_each_generation(plain(), |_, emulator| {
        let (device, peer) = (device(0), device(1));
        let memory = device.create(MIB2).unwrap();
        emulator.record();
        map_and(&memory, |mapping| {
            for _ in 0..2 {
                mapping.grant(&peer).unwrap();
                mapping.grant(&device).unwrap();
                let _ = mapping.host_view().unwrap();
            }
        });
        let asked = commands(emulator, std::process::id() as i32, "UPDATE_HEAP");
        let access = ["PREFETCH", "MEM_SET_ACCESS", "MEM_SET_ACCESS"];
        assert_eq!(asked, [&USE[..3], &access, &USE[4..]].concat());
    });
}
