//! Physical memory, reservations and mappings: what works, and what the errors say.

use crate::support::{GIB, MIB2, assert_nothing_left, contents, device, inject, open, plain, refused_here};
use ascend_emulator::{Config, Emulator, isolated, on_each_generation};
use ascend_vmm::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::share;
use ascend_vmm::{Error, Kind, Location, MemoryKind, Page, ReserveOptions, Session};

/// How many calls the driver saw during an action.
fn calls_during(emulator: &Emulator, action: impl FnOnce()) -> usize {
    emulator.record();
    let before = emulator.records().len();
    action();
    emulator.records().len() - before
}

#[test]
fn memory_knows_its_size_kind_and_place() {
    on_each_generation(Config::default(), |_, _| {
        let (session, device) = open(1);
        let memory = device.create(6 << 20).unwrap();
        assert_eq!((memory.size(), memory.page(), memory.memory_kind()), (6 << 20, Page::Huge, MemoryKind::Hbm));
        assert_eq!(memory.location(), Location::Device(LogicalId(1)));
        assert!(!memory.is_imported());
        let giant = Kind { page: Page::Giant, memory: MemoryKind::Hbm };
        assert_eq!(giant.granularity(), GIB);
        assert_eq!(Kind::default().granularity(), MIB2);
        if device.capabilities().giant_pages {
            assert_eq!(device.create_with(2 * GIB, giant).unwrap().size(), 2 * GIB);
        }
        for memory in [MemoryKind::P2pHbm, MemoryKind::Ddr, MemoryKind::P2pDdr] {
            let created = device.create_with(MIB2, Kind { memory, ..Kind::default() }).unwrap();
            assert_eq!(created.memory_kind(), memory);
        }
        let host = session.host().unwrap().create(MIB2).unwrap();
        assert_eq!(host.location(), Location::Host);
        let kind = Kind { memory: MemoryKind::Ddr, ..Kind::default() };
        session.host().unwrap().create_on_node(MIB2, kind, 0).unwrap().free().unwrap();
    });
}

#[test]
fn free_memory_goes_down_and_up_with_what_is_created_and_released() {
    on_each_generation(Config::default(), |_, _| {
        let device = device(0);
        let before = device.memory_info(MemoryKind::Hbm).unwrap();
        assert!(before.huge_free > 0 && before.huge_free <= before.huge_total);
        let memory = device.create(64 << 20).unwrap();
        assert_eq!(device.memory_info(MemoryKind::Hbm).unwrap().huge_free, before.huge_free - (64 << 20));
        memory.free().unwrap();
        assert_eq!(device.memory_info(MemoryKind::Hbm).unwrap(), before);
    });
}

#[test]
fn bad_sizes_of_memory_are_refused_without_a_system_call() {
    isolated(Config::default(), |emulator| {
        let (session, device) = open(0);
        let host = session.host().unwrap();
        let calls = calls_during(emulator, || {
            for size in [0, 1, 4096, MIB2 + 1, MIB2 - 1, u64::MAX] {
                refused_here(&device.create(size).unwrap_err(), "multiples of 2 MiB");
                refused_here(&host.create(size).unwrap_err(), "multiples of 2 MiB");
            }
            let giant = Kind { page: Page::Giant, ..Kind::default() };
            refused_here(&device.create_with(MIB2, giant).unwrap_err(), "1 GiB");
            refused_here(&host.create_with(GIB, giant).unwrap_err(), "no 1 GiB pages");
        });
        assert_eq!(calls, 0);
    });
}

#[test]
fn out_of_memory_reports_the_requested_size_and_what_is_free() {
    on_each_generation(Config { hbm: 4 << 30, ..Config::default() }, |_, _| {
        let device = device(0);
        let _some = device.create(GIB).unwrap();
        let error = device.create(1 << 40).unwrap_err();
        let Error::OutOfMemory(details) = &error else { panic!("{error:?}") };
        assert_eq!((details.asked, details.page), (1 << 40, Page::Huge));
        let free = device.memory_info(MemoryKind::Hbm).unwrap().huge_free;
        assert_eq!(details.free_huge, Some(free));
        assert_eq!(details.page_that_fits(), None);
        assert!(error.to_string().contains("1 TiB were asked for"), "{error}");
        assert_eq!(error.vendor_code().unwrap().acl, 207_001);
        // Nothing was lost.
        device.create(GIB).unwrap();
    });
}

#[test]
fn reservations_are_aligned_apart_and_where_they_were_wanted() {
    on_each_generation(Config::default(), |_, _| {
        let (session, _device) = open(0);
        let first = session.reserve(MIB2).unwrap();
        let second = session.reserve(3 * MIB2).unwrap();
        assert!(
            second.address() >= first.address() + first.size() || second.address() + second.size() <= first.address()
        );
        let giant = session.reserve_with(GIB, &ReserveOptions::default().alignment(GIB)).unwrap();
        assert_eq!(giant.address() % GIB, 0);
        let wanted = 0x13C0_0020_0000;
        let fixed = session.reserve_with(GIB, &ReserveOptions::default().address(wanted)).unwrap();
        assert_eq!(fixed.address(), wanted);
        let error = session.reserve_with(MIB2, &ReserveOptions::default().address(wanted + MIB2)).unwrap_err();
        refused_here(&error, "already reserved");
        fixed.free().unwrap();
        let again = session.reserve_with(MIB2, &ReserveOptions::default().address(wanted + MIB2)).unwrap();
        assert_eq!(again.address(), wanted + MIB2);
        let largest = session.reserve(128 * GIB).unwrap();
        assert_eq!(largest.size(), 128 * GIB);
    });
}

#[test]
fn bad_reservations_are_refused_without_a_system_call() {
    isolated(Config::default(), |emulator| {
        let (session, _device) = open(0);
        let calls = calls_during(emulator, || {
            for size in [0, 1, 4096, MIB2 + 4096] {
                refused_here(&session.reserve(size).unwrap_err(), "multiples of 2 MiB");
            }
            refused_here(&session.reserve(128 * GIB + MIB2).unwrap_err(), "at most 128 GiB");
            refused_here(&session.reserve(!(MIB2 - 1)).unwrap_err(), "at most 128 GiB");
            for alignment in [0, 1, 4096, 3 * MIB2, 2 * GIB] {
                let options = ReserveOptions::default().alignment(alignment);
                refused_here(&session.reserve_with(MIB2, &options).unwrap_err(), "power of two");
            }
            for address in [0, 0x1000, 0x1000_0000_0000, 0x1800_0000_0000, u64::MAX - MIB2 + 1] {
                let error = session.reserve_with(MIB2, &ReserveOptions::default().address(address)).unwrap_err();
                assert!(matches!(error, Error::Invalid(_)), "{error}");
            }
            let options = ReserveOptions::default().address(0x1300_0000_1000);
            refused_here(&session.reserve_with(MIB2, &options).unwrap_err(), "not aligned");
        });
        assert_eq!(calls, 0);
    });
}

#[test]
fn memory_can_be_mapped_at_several_places_and_many_into_one_reservation() {
    on_each_generation(Config::default(), |_, _| {
        let (session, device) = open(0);
        let reservation = session.reserve(16 * MIB2).unwrap();
        let memory = device.create(2 * MIB2).unwrap();
        let first = reservation.map(0, &memory).unwrap();
        let second = reservation.map(8 * MIB2, &memory).unwrap();
        let other = device.create(MIB2).unwrap();
        let third = reservation.map(2 * MIB2, &other).unwrap();
        first.write(MIB2 + 7, b"the same bytes").unwrap();
        assert_eq!(contents(&second, MIB2 + 7, 14), b"the same bytes");
        let start = reservation.address();
        assert_eq!(reservation.mappings(), [(start, 2 * MIB2), (start + 2 * MIB2, MIB2), (start + 8 * MIB2, 2 * MIB2)]);
        // Look-up by any address inside a mapping.
        assert!(session.memory_at(second.address() + 3 * MIB2 / 2).unwrap().is_same(&memory));
        assert_eq!(session.mapping_at(third.address() + 5), Some((third.address(), MIB2)));
        assert_eq!(session.mapping_at(start + 4 * MIB2), None);
        assert!(session.memory_at(start + 16 * MIB2).is_none());
        assert!(session.memory_at(0).is_none() && session.memory_at(u64::MAX).is_none());
        third.unmap().unwrap();
        assert!(session.memory_at(start + 2 * MIB2).is_none());
    });
}

#[test]
fn sleep_and_wake_keep_the_address() {
    on_each_generation(Config::default(), |_, _| {
        let (session, device) = open(0);
        let reservation = session.reserve(8 * MIB2).unwrap();
        let mut saved = vec![0; 4 * MIB2 as usize];
        let mut address = None;
        for round in 0..3u8 {
            let memory = device.create(4 * MIB2).unwrap();
            let mapping = reservation.map(2 * MIB2, &memory).unwrap();
            assert_eq!(*address.get_or_insert(mapping.address()), mapping.address());
            if round > 0 {
                mapping.write(0, &saved).unwrap();
            }
            mapping.fill(u64::from(round) * 100, 100, round + 1).unwrap();
            mapping.read(0, &mut saved).unwrap();
            mapping.unmap().unwrap();
            memory.free().unwrap();
        }
        assert_eq!([saved[50], saved[150], saved[250]], [1, 2, 3]);
    });
}

#[test]
fn mappings_that_leave_their_reservation_or_overlap_are_refused_without_a_system_call() {
    isolated(Config::default(), |emulator| {
        let (session, device) = open(0);
        let reservation = session.reserve(4 * MIB2).unwrap();
        let _neighbour = session.reserve(4 * MIB2).unwrap();
        let memory = device.create(2 * MIB2).unwrap();
        let mapping = reservation.map(MIB2, &memory).unwrap();
        let calls = calls_during(emulator, || {
            for offset in [1, 4096, MIB2 / 2] {
                refused_here(&reservation.map(offset, &memory).unwrap_err(), "multiples of 2 MiB");
            }
            // One chunk too far, which the kernel would map into the neighbour.
            for offset in [3 * MIB2, 4 * MIB2, 400 * GIB, u64::MAX - MIB2 + 1] {
                refused_here(&reservation.map(offset, &memory).unwrap_err(), "not inside of");
            }
            for offset in [0, MIB2, 2 * MIB2] {
                refused_here(&reservation.map(offset, &memory).unwrap_err(), "overlaps");
            }
        });
        assert_eq!(calls, 0, "an occupied chunk would leave those before it unusable in the kernel");
        mapping.unmap().unwrap();
        // No chunk is stale.
        drop(reservation.map(0, &memory).unwrap());
        drop(reservation.map(2 * MIB2, &memory).unwrap());
    });
}

#[test]
fn a_reservation_holds_memory_of_one_device_until_it_is_freed() {
    on_each_generation(Config::default(), |_, emulator| {
        let (session, device0) = open(0);
        let device1 = device(1);
        let reservation = session.reserve(8 * MIB2).unwrap();
        let here = device0.create(MIB2).unwrap();
        let there = device1.create(MIB2).unwrap();
        let host = session.host().unwrap().create(MIB2).unwrap();
        reservation.map(0, &here).unwrap().unmap().unwrap();
        let calls = calls_during(emulator, || {
            refused_here(&reservation.map(0, &there).unwrap_err(), "one device only");
            refused_here(&reservation.map(MIB2, &host).unwrap_err(), "one device only");
        });
        assert_eq!(calls, 0);
        drop(reservation.map(MIB2, &here).unwrap());
        reservation.free().unwrap();
        let reservation = session.reserve(8 * MIB2).unwrap();
        drop(reservation.map(0, &there).unwrap());
    });
}

#[test]
fn giant_pages_need_giant_addresses() {
    isolated(Config::default(), |_| {
        let (session, device) = open(0);
        if !device.capabilities().giant_pages {
            return;
        }
        let memory = device.create_with(GIB, Kind { page: Page::Giant, ..Kind::default() }).unwrap();
        let reservation = session.reserve_with(2 * GIB, &ReserveOptions::default().alignment(GIB)).unwrap();
        refused_here(&reservation.map(MIB2, &memory).unwrap_err(), "multiples of 1 GiB");
        let mapping = reservation.map(GIB, &memory).unwrap();
        mapping.write(GIB - 3, b"end").unwrap();
        assert_eq!(contents(&mapping, GIB - 3, 3), b"end");
    });
}

#[test]
fn giant_pages_that_are_free_can_be_created_and_others_cannot() {
    on_each_generation(Config { hbm: 5 * GIB + MIB2, ..Config::default() }, |_, _| {
        let device = device(0);
        let giant = Kind { page: Page::Giant, ..Kind::default() };
        let free = || device.memory_info(MemoryKind::Hbm).unwrap().giant_free;
        assert_eq!(free(), 5 * GIB);
        let small = device.create(2 * MIB2).unwrap();
        assert_eq!(free(), 4 * GIB);
        let memory = device.create_with(free(), giant).unwrap();
        assert_eq!(free(), 0);
        let Err(Error::OutOfMemory(error)) = device.create_with(GIB, giant) else { panic!("1 GiB was created") };
        assert_eq!(error.free_giant, Some(0), "{error}");
        drop((small, memory));
        assert_eq!(free(), 5 * GIB);
    });
}

#[test]
fn a_host_with_giant_pages_has_them_as_p2p_ddr() {
    on_each_generation(Config { host_giant_pages: true, ..Config::default() }, |_, _| {
        let (session, _device) = open(0);
        assert!(session.has_host_giant_pages());
        let kind = Kind { page: Page::Giant, memory: MemoryKind::P2pDdr };
        let memory = session.host().unwrap().create_with(GIB, kind).unwrap();
        let reservation = session.reserve_with(GIB, &ReserveOptions::default().alignment(GIB)).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        mapping.host_view().unwrap().write(GIB as usize - 3, b"end").unwrap();
        assert_eq!(contents(&mapping, GIB - 3, 3), b"end");
        let ordinary = Kind { page: Page::Giant, memory: MemoryKind::Ddr };
        assert!(matches!(session.host().unwrap().create_with(GIB, ordinary), Err(Error::OutOfMemory(_))));
    });
}

#[test]
fn objects_in_use_are_not_freed_but_returned() {
    isolated(Config::default(), |emulator| {
        let (session, device) = open(0);
        let reservation = session.reserve(MIB2).unwrap();
        let memory = device.create(MIB2).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        let mut kept = None;
        let calls = calls_during(emulator, || {
            let failed = reservation.free().unwrap_err();
            refused_here(&failed.error, "Unmap them first");
            let memory_failed = memory.free().unwrap_err();
            refused_here(&memory_failed.error, "Drop them first");
            kept = Some((failed.object, memory_failed.object));
        });
        assert_eq!(calls, 0);
        mapping.unmap().unwrap();
        let (reservation, memory) = kept.unwrap();
        reservation.free().unwrap();
        memory.free().unwrap();
    });
}

#[test]
fn a_command_that_fails_loses_nothing() {
    on_each_generation(Config::default(), |_, emulator| {
        let (session, device) = open(0);
        let fail = |fault: &str| inject(emulator, fault);
        for errno in ["EINVAL", "ENOMEM", "EBUSY", "ENOSYS"] {
            fail(&format!("MEM_CREATE#1={errno}"));
            let error = device.create(MIB2).unwrap_err();
            assert_eq!(format!("{:?}", error.errno().unwrap()), errno);
        }
        fail("UPDATE_HEAP#1=ENOMEM");
        assert_eq!(session.reserve(MIB2).unwrap_err().errno(), Some(Errno::ENOMEM));
        fail("ALLOC#1=EBUSY");
        assert_eq!(session.reserve(MIB2).unwrap_err().errno(), Some(Errno::EBUSY));
        let reservation = session.reserve(2 * MIB2).unwrap();
        let memory = device.create(MIB2).unwrap();
        fail("MEM_MAP#1=ENOMEM");
        let error = reservation.map(0, &memory).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::ENOMEM));
        assert!(error.to_string().contains("handle"), "{error}");
        // The addresses are free again, and the reservation belongs to no device yet.
        let host = session.host().unwrap().create(MIB2).unwrap();
        let mapping = reservation.map(0, &host).unwrap();
        fail("MEM_UNMAP#1=EBUSY");
        let failed = mapping.unmap().unwrap_err();
        assert_eq!(failed.error.errno(), Some(Errno::EBUSY));
        failed.object.write(0, b"still mapped").unwrap();
        failed.object.unmap().unwrap();
        fail("FREE_PAGES#1=EBUSY");
        let failed = reservation.free().unwrap_err();
        assert_eq!(failed.error.errno(), Some(Errno::EBUSY));
        failed.object.free().unwrap();
        fail("MEM_RELEASE#1=EBUSY");
        let failed = memory.free().unwrap_err();
        assert_eq!(failed.error.errno(), Some(Errno::EBUSY));
        failed.object.free().unwrap();
    });
}

#[test]
fn what_a_drop_could_not_free_is_freed_when_the_session_is_closed() {
    on_each_generation(Config::default(), |_, emulator| {
        let (session, device) = open(0);
        let reservation = session.reserve(MIB2).unwrap();
        let memory = device.create(MIB2).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        inject(emulator, "MEM_UNMAP#1=EBUSY");
        drop(mapping);
        // The kernel still has a mapping there.
        refused_here(&reservation.map(0, &memory).unwrap_err(), "overlaps");
        drop(memory);
        drop(reservation);
        assert!(!emulator.state().is_empty());
        drop(device);
        drop(session);
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_dead_device_is_reported_and_the_session_goes_on_with_the_others() {
    isolated(Config::default(), |emulator| {
        let (session, device0) = open(0);
        let device1 = device(1);
        let memory = device0.create(MIB2).unwrap();
        inject(emulator, "device0=dead");
        let error = device0.create(MIB2).unwrap_err();
        assert!(error.errno().is_some(), "{error}");
        assert!(!error.to_string().is_empty());
        drop(memory);
        let reservation = session.reserve(MIB2).unwrap();
        let other = device1.create(MIB2).unwrap();
        reservation.map(0, &other).unwrap().fill(0, MIB2, 3).unwrap();
    });
}

#[test]
fn many_threads_create_reserve_map_and_copy_at_once() {
    on_each_generation(Config { devices: 4, ..Config::default() }, |_, _| {
        let session = Session::open().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8u32 {
                let session = &session;
                scope.spawn(move || {
                    let device = session.device(LogicalId(thread % 4)).unwrap();
                    let shared = session.reserve(32 * MIB2).unwrap();
                    for round in 0..25u64 {
                        let size = (1 + (round + u64::from(thread)) % 4) * MIB2;
                        let memory = device.create(size).unwrap();
                        let own = session.reserve(size).unwrap();
                        let here = own.map(0, &memory).unwrap();
                        let there = shared.map((round % 8) * 4 * MIB2, &memory).unwrap();
                        let stamp = [thread as u8, round as u8, 0xA5];
                        here.write(size - 3, &stamp).unwrap();
                        assert_eq!(contents(&there, size - 3, 3), stamp);
                        assert!(session.memory_at(there.address()).unwrap().is_same(&memory));
                    }
                });
            }
        });
    });
}

#[test]
fn threads_that_fight_for_one_reservation_leave_it_usable() {
    isolated(Config::default(), |_| {
        let (session, device) = open(0);
        let reservation = session.reserve(4 * MIB2).unwrap();
        let won = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (reservation, device, won) = (&reservation, &device, &won);
                scope.spawn(move || {
                    let memory = device.create((1 + thread % 3) * MIB2).unwrap();
                    for round in 0..50 {
                        match reservation.map((round + thread) % 2 * MIB2, &memory) {
                            Ok(mapping) => {
                                mapping.fill(0, MIB2, 1).unwrap();
                                won.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                            }
                            Err(error) => refused_here(&error, "overlaps"),
                        }
                    }
                });
            }
        });
        assert!(won.into_inner() > 0);
        let whole = device.create(4 * MIB2).unwrap();
        drop(reservation.map(0, &whole).unwrap());
    });
}

#[test]
fn thousands_of_live_objects_are_kept_apart() {
    isolated(Config::default(), |_| {
        let (session, device) = open(0);
        let memory = device.create(MIB2).unwrap();
        let mut all = Vec::new();
        for _ in 0..3000 {
            let reservation = session.reserve(MIB2).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            all.push((reservation, mapping));
        }
        let mut addresses: Vec<u64> = all.iter().map(|(reservation, _)| reservation.address()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), 3000);
        for (_, mapping) in all.iter().step_by(97) {
            assert_eq!(session.mapping_at(mapping.address() + 1), Some((mapping.address(), MIB2)));
        }
    });
}

#[test]
fn debug_output_is_short() {
    isolated(Config::default(), |_| {
        let (session, device) = open(0);
        let memory = device.create(MIB2).unwrap();
        let reservation = session.reserve(MIB2).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        let host = session.host().unwrap();
        // An unwrap of a failed call prints the object that the error returns.
        let failed = session.clone().close().unwrap_err();
        let texts = [
            format!("{session:?}"),
            format!("{device:?}"),
            format!("{memory:?}"),
            format!("{reservation:?}"),
            format!("{mapping:?}"),
            format!("{host:?}"),
            format!("{failed:?}"),
            format!("{:?}", mapping.slice(0, 1).unwrap()),
        ];
        for text in texts {
            assert!(text.len() < 1500, "{} characters: {}", text.len(), &text[..1500]);
        }
        assert!(format!("{mapping:?}").contains(&format!("{:#x}", mapping.address())));
    });
}

#[test]
fn sizes_and_nodes_beyond_what_the_kernel_counts_are_refused_before_it_is_called() {
    isolated(Config::default(), |emulator| {
        let (session, device) = open(0);
        let host = session.host().unwrap();
        let calls = calls_during(emulator, || {
            for size in [u64::MAX / MIB2 * MIB2, 1 << 53, (1 << 53) + MIB2, 1 << 63] {
                refused_here(&device.create(size).unwrap_err(), "32 bits");
                refused_here(&host.create(size).unwrap_err(), "32 bits");
            }
            let kind = Kind { memory: MemoryKind::Ddr, ..Kind::default() };
            refused_here(&host.create_on_node(MIB2, kind, u32::MAX).unwrap_err(), "not a NUMA node");
        });
        assert_eq!(calls, 0);
    });
}

#[test]
fn a_thread_that_only_looks_does_not_keep_the_owner_from_undoing() {
    isolated(Config::default(), |_| {
        use std::sync::atomic::{AtomicBool, Ordering};
        let (session, device) = open(0);
        let reservation = session.reserve(MIB2).unwrap();
        let (address, over) = (reservation.address(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let found = session.mapping_at(address);
                    assert!(found.is_none_or(|found| found == (address, MIB2)));
                }
            });
            for _ in 0..200 {
                let memory = device.create(MIB2).unwrap();
                reservation.map(0, &memory).unwrap().unmap().unwrap();
                memory.free().unwrap();
            }
            over.store(true, Ordering::Relaxed);
        });
        reservation.free().unwrap();
    });
}

#[test]
fn a_mapping_of_many_gib_is_found_at_its_end_and_listed_once() {
    isolated(Config { hbm: 256 * GIB, ..Config::default() }, |_| {
        let (session, device) = open(0);
        let memory = device.create(64 * GIB).unwrap();
        let reservation = session.reserve(128 * GIB).unwrap();
        let mapping = reservation.map(32 * GIB, &memory).unwrap();
        let range = (mapping.address(), 64 * GIB);
        assert_eq!(session.mapping_at(mapping.address() + 64 * GIB - 1), Some(range));
        assert_eq!(session.mapping_at(mapping.address() + 64 * GIB), None);
        assert_eq!(reservation.mappings(), [range]);
        let small = device.create(MIB2).unwrap();
        assert!(reservation.map(95 * GIB, &small).is_err(), "occupied by the end of the large one");
        let after = reservation.map(96 * GIB, &small).unwrap();
        assert_eq!(reservation.mappings(), [range, (after.address(), MIB2)]);
    });
}

#[test]
fn a_session_counts_what_it_has() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let empty = session.statistics();
        assert_eq!((empty.physical, empty.reserved, empty.mapped, empty.mappings, empty.left), (0, 0, 0, 0, 0));
        let memory = device.create(3 * MIB2).unwrap();
        let reservation = session.reserve(GIB).unwrap();
        let one = reservation.map(0, &memory).unwrap();
        let two = reservation.map(6 * MIB2, &memory).unwrap();
        let full = session.statistics();
        assert_eq!((full.physical, full.reserved, full.mapped, full.mappings), (3 * MIB2, GIB, 6 * MIB2, 2));
        assert_eq!(full.to_string(), "memory 6 MiB, addresses 1 GiB, mapped 12 MiB, mappings 2, left 0");
        inject(emulator, "MEM_UNMAP#1=EBUSY");
        drop(one);
        assert_eq!(session.statistics().left, 1);
        drop((two, reservation, memory));
        device.close().unwrap();
        assert_eq!(session.statistics(), empty);
    });
}

#[test]
fn errors_say_whether_memory_ran_out_the_device_is_lost_or_the_process_is_not_trusted() {
    on_each_generation(Config { hbm: 64 << 20, ..plain() }, |_, emulator| {
        let (session, device) = open(0);
        let error = device.create(GIB).unwrap_err();
        assert!(error.is_out_of_memory() && !error.is_device_lost() && !error.is_not_trusted(), "{error}");
        let export = crate::support::device(1).create(MIB2).unwrap().export().unwrap();
        let error = share::import(&device, &export.ticket().unwrap()).unwrap_err();
        assert!(error.is_not_trusted() && !error.is_out_of_memory(), "{error}");
        let error = session.reserve(0).unwrap_err();
        assert!(!error.is_out_of_memory() && !error.is_device_lost() && !error.is_not_trusted(), "{error}");
        crate::support::end_device_process(emulator, 0);
        let error = device.create(MIB2).unwrap_err();
        assert!(error.is_device_lost(), "{error}");
        drop(export);
    });
}
