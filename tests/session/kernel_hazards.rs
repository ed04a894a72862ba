//! A client can crash or hang the kernel in several ways. These tests check that the library never
//! makes such calls.

use crate::support::{MIB2, device, mapped_on, plain};
use ascend_emulator::record::Record;
use ascend_emulator::{Config, Emulator, fork, isolated, on_each_generation};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{HOST_PIN_SIZE, SOMA_SIZE, SOMA_START, SVM_SIZE, SVM_START, UVM_SIZE, UVM_START};
use ascend_vmm::LogicalId;
use ascend_vmm::Session;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use std::collections::BTreeMap;

/// A number in the argument of a command; `offset` as in the driver's struct.
fn number(record: &Record, offset: usize) -> u64 {
    let hex = record.in_hex.clone().unwrap_or_default();
    let byte =
        |index: usize| hex.get(2 * index..2 * index + 2).map_or(0, |digits| u8::from_str_radix(digits, 16).unwrap());
    u64::from_le_bytes(std::array::from_fn(|index| byte(offset + index)))
}

fn hex(text: &Option<String>) -> u64 {
    let text = text.as_deref().unwrap();
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
}

fn ranges(emulator: &Emulator, call: &str) -> Vec<(u64, u64)> {
    let records = emulator.records();
    records.iter().filter(|record| record.call == call).map(|record| (hex(&record.addr), hex(&record.len))).collect()
}

#[test]
fn the_cpu_cannot_touch_the_segments_that_would_hang_it() {
    isolated(Config::default(), |_| {
        let session = Session::open().unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        for (start, size) in [(SOMA_START, SOMA_SIZE), (UVM_START, UVM_SIZE)] {
            let range = format!("{start:x}-{:x}", start + size);
            let line = maps.lines().find(|line| line.starts_with(&range)).unwrap();
            assert!(line.contains(" ---s "), "{line}");
        }
        assert_eq!(session.generation(), Generation::V26_1);
    });
}

#[test]
fn a_stray_pointer_into_such_a_segment_is_an_ordinary_fault() {
    isolated(Config::default(), |_| {
        let child = fork(|| {
            let _session = Session::open().unwrap();
            // SAFETY: deliberately not safe: it must end in a signal and nothing worse.
            unsafe { std::ptr::with_exposed_provenance::<u8>(SOMA_START as usize + 12_345).read_volatile() };
        });
        assert!(matches!(child.wait(), WaitStatus::Signaled(_, Signal::SIGSEGV, _)));
    });
}

#[test]
fn segments_are_mapped_protected_and_unmapped_as_wholes_and_one_by_one() {
    on_each_generation(Config::default(), |generation, emulator| {
        emulator.record();
        let session = Session::open().unwrap();
        mapped_on(&device(0), MIB2).host_view().unwrap().write(0, &[1]).unwrap();
        session.close().unwrap();
        let mapped = ranges(emulator, "mmap");
        assert_eq!(mapped[0], (SVM_START, SVM_SIZE));
        let protected = ranges(emulator, "mprotect");
        match generation {
            Generation::V8_5_0 => assert_eq!((mapped.len(), protected.len()), (1, 0)),
            Generation::V9_0_0 => assert_eq!((mapped.len(), mapped[1].1, protected.len()), (2, HOST_PIN_SIZE, 0)),
            _ => {
                assert_eq!(mapped[1..3], [(SOMA_START, SOMA_SIZE), (UVM_START, UVM_SIZE)]);
                assert_eq!(protected, mapped[1..3]);
            }
        }
        // All but the page of the kernel's messages, which is not the driver's.
        let unmapped: Vec<_> = ranges(emulator, "munmap").into_iter().filter(|&(_, size)| size > 4096).collect();
        assert_eq!(unmapped, mapped);
        for call in ["madvise", "mremap", "mbind"] {
            assert_eq!(ranges(emulator, call), []);
        }
        let flags: Vec<_> = emulator
            .records()
            .into_iter()
            .filter(|record| record.call == "mmap")
            .filter_map(|record| record.flags)
            .collect();
        assert!(flags.iter().all(|flags| !flags.contains("FIXED")), "{flags:?}");
    });
}

#[test]
fn the_drivers_files_are_closed_by_exec_and_never_shared() {
    isolated(Config::default(), |_| {
        let _session = Session::open().unwrap();
        let mut found = 0;
        for entry in std::fs::read_dir("/proc/self/fdinfo").unwrap() {
            let descriptor = entry.unwrap().file_name().into_string().unwrap();
            let target = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).unwrap_or_default();
            if !target.to_string_lossy().contains("davinci") {
                continue;
            }
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim().to_owned();
            assert_ne!(i64::from_str_radix(&flags, 8).unwrap() & i64::from(nix::libc::O_CLOEXEC), 0, "{flags}");
            found += 1;
        }
        assert!(found > 0, "the emulated driver's file was not found");
    });
}

#[test]
fn no_address_is_used_before_its_alloc_or_after_its_free() {
    isolated(plain(), |emulator| {
        emulator.record();
        let session = Session::open().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let session = &session;
                scope.spawn(move || {
                    let device = session.device(LogicalId(thread % 2)).unwrap();
                    for round in 0..40 {
                        let size = (1 + (round + u64::from(thread)) % 3) * MIB2;
                        let reservation = session.reserve(size).unwrap();
                        let mapping = reservation.map(0, &device.create(size).unwrap()).unwrap();
                        mapping.fill(0, 64, 1).unwrap();
                        mapping.write(7, &[1, 2, 3]).unwrap();
                        drop(reservation);
                        mapping.read(7, &mut [0; 3]).unwrap();
                    }
                });
            }
        });
        session.close().unwrap();
        // In the order of the calls, every address lies in a reservation of that moment.
        let mut live: BTreeMap<u64, u64> = BTreeMap::new();
        let mut used = 0;
        for record in emulator.records() {
            assert_eq!(record.errno, None, "{record:?}");
            let addresses = match record.cmd {
                Some("ALLOC") => {
                    assert!(live.insert(number(&record, 16), number(&record, 24)).is_none());
                    continue;
                }
                Some("FREE_PAGES") => {
                    assert!(live.remove(&number(&record, 16)).is_some());
                    continue;
                }
                Some("MEM_MAP" | "MEM_UNMAP" | "MEMSET8") => vec![number(&record, 16)],
                Some("MEMCPY") => vec![number(&record, 16), number(&record, 24)],
                _ => continue,
            };
            for address in addresses.into_iter().filter(|address| (SVM_START..SVM_START + SVM_SIZE).contains(address)) {
                let (start, size) = live.range(..=address).next_back().unwrap();
                assert!(address < start + size);
                used += 1;
            }
        }
        assert_eq!(used, 4 * 40 * 5);
        assert!(live.is_empty());
    });
}
