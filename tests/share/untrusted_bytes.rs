//! Bytes and text from other processes: tickets, handles, addresses. Stored inputs, and thousands
//! that are made from them by a fixed seed; `tests/fuzz` has targets that look for more.
//! `tests/robustness/hostile_answers.rs` does the same for answers of the kernel and of the daemon.

use crate::support::corpus::{mutate, stored};
use crate::support::random::Random;
use crate::support::{MIB2, device, own_tgid, plain, untrusted};
use ascend_emulator::isolated;
use ascend_ioctl::Generation;
use ascend_vmm::share::{self, FabricHandle, ShareableHandle, Ticket, TicketDevice};
use ascend_vmm::{Error, MemoryKind, Page};

#[test]
fn stored_tickets_are_read_and_no_change_of_one_is_accepted_as_another() {
    let mut random = Random(1);
    for bytes in stored("tickets.txt") {
        assert!(untrusted::ticket(&bytes).is_some(), "{bytes:02x?}");
        for _ in 0..5_000 {
            let other = mutate(&bytes, &mut random);
            assert!(other == bytes || untrusted::ticket(&other).is_none(), "{other:02x?}");
            if let Ok(text) = std::str::from_utf8(&other) {
                assert!(text.parse::<Ticket>().is_err());
            }
        }
        let text = Ticket::from_bytes(&bytes).unwrap().to_string();
        for _ in 0..2_000 {
            let other = mutate(text.as_bytes(), &mut random);
            let Ok(other) = String::from_utf8(other) else { continue };
            if let Ok(ticket) = other.parse::<Ticket>() {
                // The same digits in another case, or with space around them.
                assert_eq!(ticket.to_bytes(), *bytes, "{other}");
            }
        }
    }
}

/// A ticket with any value in any field, as a peer can write one: the checksum is right.
fn forged(ticket: &Ticket, random: &mut Random) -> Ticket {
    let mut forged = *ticket;
    let extreme = |random: &mut Random| {
        let next = random.next();
        [0, 1, u64::MAX, 1 << 63, 1 << 31, u32::MAX.into(), MIB2, next][random.index(8)]
    };
    for _ in 0..=random.index(3) {
        let number = extreme(random);
        match random.index(9) {
            0 => forged.size = number,
            1 => forged.exporter = number as i32,
            2 => forged.exporter_start = number,
            3 => forged.boot_id = [number as u8; 16],
            4 => forged.page = [Page::Huge, Page::Giant][random.index(2)],
            5 => forged.memory = [MemoryKind::Hbm, MemoryKind::Ddr, MemoryKind::P2pHbm][random.index(3)],
            6 => forged.handle = ShareableHandle::from_u64(number).unwrap_or(forged.handle),
            7 => forged.generation = Generation::ALL[random.index(3)],
            _ => {
                let sdid = [None, Some(number as u32)][random.index(2)];
                let device = forged.device.map(|_| TicketDevice { physical: extreme(random) as u32, sdid });
                forged.device = [device, None][random.index(2)];
            }
        }
    }
    forged
}

#[test]
fn tickets_with_any_value_in_any_field_are_refused_or_lead_to_that_memory() {
    isolated(plain(), |_| {
        let (here, there) = (device(0), device(1));
        let memory = here.create(MIB2).unwrap();
        let export = memory.export().unwrap();
        export.trust(&[own_tgid()]).unwrap();
        let ticket = export.ticket().unwrap();
        let mut random = Random(2);
        for _ in 0..400 {
            let forged = forged(&ticket, &mut random);
            let Ok(read) = Ticket::from_bytes(&forged.to_bytes()) else { continue };
            match share::import(&there, &read) {
                Ok(imported) => assert_eq!(imported.size(), MIB2, "{forged:?}"),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        // The true one still works.
        assert_eq!(share::import(&there, &ticket).unwrap().size(), MIB2);
    });
}

#[test]
fn fabric_handles_of_any_bytes_are_refused_or_read_as_they_are() {
    let mut random = Random(3);
    for bytes in stored("fabric_handles.txt") {
        assert!(untrusted::fabric_handle(&bytes).is_some(), "{bytes:02x?}");
        for _ in 0..20_000 {
            untrusted::fabric_handles(&mutate(&bytes, &mut random));
        }
    }
}

#[test]
fn fabric_handles_of_any_bytes_are_imported_or_refused() {
    isolated(plain(), |_| {
        let there = device(1);
        let mut random = Random(4);
        for bytes in stored("fabric_handles.txt") {
            for _ in 0..150 {
                let mut other = mutate(&bytes, &mut random);
                other.resize(FabricHandle::LENGTH, 0);
                let Some(handle) = FabricHandle::from_bytes(other[..].try_into().unwrap()) else { continue };
                match share::import(&there, &handle) {
                    Ok(imported) => assert!(imported.size() > 0),
                    Err(error) => assert!(!matches!(error, Error::OtherProcess { .. }), "{error}"),
                }
            }
        }
    });
}

#[test]
fn the_short_form_of_a_handle_is_refused_or_read_as_it_is() {
    let mut random = Random(5);
    let extremes = (0..64).flat_map(|bit| [1u64 << bit, (1u64 << bit).wrapping_sub(1), !(1u64 << bit)]);
    for value in extremes.chain((0..20_000).map(|_| random.next())) {
        if let Some(handle) = ShareableHandle::from_u64(value) {
            assert_eq!(handle.to_u64(), value);
        }
    }
}

#[test]
fn names_of_devices_are_refused_or_read_as_they_are() {
    let mut random = Random(6);
    for name in stored("device_names.txt") {
        for _ in 0..5_000 {
            untrusted::device_names(&mutate(&name, &mut random));
        }
    }
}
