//! The ends of the address space, the borders of heaps, and addresses that the kernel frees late.

use crate::support::{GIB, MIB2, contents, count, inject, open, plain, refused_here};
use ascend_emulator::{isolated, on_each_generation};
use ascend_vmm::{Device, Error, Kind, Page, Reservation, ReserveOptions};

/// The largest heap.
const HEAP: u64 = 128 * GIB;
const FIRST: u64 = ReserveOptions::ADDRESSES.start;
const END: u64 = ReserveOptions::ADDRESSES.end;

fn at(address: u64) -> ReserveOptions {
    ReserveOptions::default().address(address)
}

/// Memory works at both ends of a reservation.
fn works(device: &Device, reservation: &Reservation) {
    for offset in [0, reservation.size() - MIB2] {
        let mapping = reservation.map(offset, &device.create(MIB2).unwrap()).unwrap();
        mapping.write(MIB2 - 3, b"end").unwrap();
        let mut back = [0; 3];
        reservation.slice(offset + MIB2 - 3, 3).unwrap().read(&mut back).unwrap();
        assert_eq!(&back, b"end");
    }
}

#[test]
fn all_addresses_can_be_reserved_and_then_none_and_all_come_back() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        emulator.record();
        let heaps = ((END - FIRST) / HEAP) as usize;
        let all: Vec<_> = (0..heaps).map(|_| session.reserve(HEAP).unwrap()).collect();
        assert!(matches!(session.reserve(MIB2), Err(Error::Invalid(_))));
        assert!(matches!(session.reserve_with(MIB2, &at(END - MIB2)), Err(Error::Invalid(_))));
        assert_eq!(count(emulator, "UPDATE_HEAP"), heaps, "one heap each");
        assert_eq!(count(emulator, "ALLOC"), heaps, "no ALLOC for a reservation that cannot exist");
        let last = all.iter().max_by_key(|reservation| reservation.address()).unwrap();
        assert_eq!(last.address() + HEAP, END);
        works(&device, last);
        drop(all);
        // The heaps are still there.
        let again = session.reserve(HEAP).unwrap();
        works(&device, &again);
        assert_eq!(count(emulator, "UPDATE_HEAP"), heaps);
    });
}

#[test]
fn reservations_at_fixed_addresses_lie_inside_one_heap() {
    on_each_generation(plain(), |_, _| {
        let (session, device) = open(0);
        let refused = |address: u64, size: u64, words: &str| {
            refused_here(&session.reserve_with(size, &at(address)).unwrap_err(), words);
        };
        // The first and the last page.
        let first = session.reserve_with(MIB2, &at(FIRST)).unwrap();
        let last = session.reserve_with(MIB2, &at(END - MIB2)).unwrap();
        works(&device, &first);
        works(&device, &last);
        refused(FIRST - MIB2, MIB2, "outside");
        refused(END, MIB2, "outside");
        refused(END - MIB2, 2 * MIB2, "outside");
        refused(u64::MAX - MIB2 + 1, MIB2, "outside");
        refused(0, MIB2, "outside");
        refused(FIRST + 1, MIB2, "not aligned");
        refused(FIRST, MIB2, "already reserved");
        // The first page's heap ends after 128 GiB, and no reservation lies across its end.
        refused(FIRST + HEAP - MIB2, 2 * MIB2, "border");
        let before = session.reserve_with(MIB2, &at(FIRST + HEAP - MIB2)).unwrap();
        let after = session.reserve_with(MIB2, &at(FIRST + HEAP)).unwrap();
        works(&device, &before);
        works(&device, &after);
        // Where there is no heap yet, a new one is made that fits.
        let across = session.reserve_with(2 * GIB, &at(FIRST + 4 * HEAP - GIB)).unwrap();
        works(&device, &across);
        // A slice cannot span two heaps, even where their addresses are adjacent.
        let one = before.map(0, &device.create(MIB2).unwrap()).unwrap();
        let two = after.map(0, &device.create(MIB2).unwrap()).unwrap();
        assert_eq!(one.address() + one.size(), two.address());
        assert!(before.slice(MIB2 - 1, 2).is_err());
    });
}

#[test]
fn giant_pages_lie_at_giant_addresses_up_to_the_last() {
    on_each_generation(plain(), |_, _| {
        let (session, device) = open(0);
        assert!(device.capabilities().giant_pages, "the emulated devices have them");
        let giant = device.create_with(GIB, Kind { page: Page::Giant, ..Kind::default() }).unwrap();
        let last = session.reserve_with(GIB, &at(END - GIB)).unwrap();
        let mapping = last.map(0, &giant).unwrap();
        mapping.write(GIB - 4, b"last").unwrap();
        drop(mapping);
        let odd = session.reserve_with(2 * GIB, &at(FIRST + MIB2)).unwrap();
        assert!(matches!(odd.map(0, &giant), Err(Error::Invalid(_))));
        let mapping = odd.map(GIB - MIB2, &giant).unwrap();
        assert_eq!(contents(&mapping, GIB - 4, 4), b"last");
    });
}

#[test]
fn a_heap_that_the_kernel_refused_is_requested_again() {
    isolated(plain(), |emulator| {
        let (session, device) = open(0);
        for _ in 0..3 {
            inject(emulator, "UPDATE_HEAP#1=ENOMEM");
            let error = session.reserve(MIB2).unwrap_err();
            assert!(error.to_string().contains("UPDATE_HEAP"), "{error}");
            inject(emulator, "UPDATE_HEAP#1=EBUSY");
            session.reserve_with(MIB2, &at(FIRST + HEAP)).unwrap_err();
        }
        works(&device, &session.reserve(2 * MIB2).unwrap());
    });
}

#[test]
fn addresses_that_the_kernel_did_not_free_are_not_reused_before_it_does() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let other = crate::support::device(1);
        let reservation = session.reserve(MIB2).unwrap();
        let address = reservation.address();
        inject(emulator, "FREE_PAGES#1=EBUSY");
        drop(reservation);
        assert_ne!(session.reserve(MIB2).unwrap().address(), address);
        session.reserve_with(MIB2, &at(address)).unwrap_err();
        // Closing a device tries again.
        other.close().unwrap();
        works(&device, &session.reserve_with(MIB2, &at(address)).unwrap());
    });
}

#[test]
fn a_mapping_that_the_kernel_did_not_remove_keeps_its_addresses() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let other = crate::support::device(1);
        let reservation = session.reserve(2 * MIB2).unwrap();
        let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
        inject(emulator, "MEM_UNMAP#1=EBUSY");
        drop(mapping);
        let memory = device.create(MIB2).unwrap();
        assert!(matches!(reservation.map(0, &memory), Err(Error::Invalid(_))));
        assert!(session.memory_at(reservation.address()).is_none());
        assert!(reservation.slice(0, 1).is_err());
        other.close().unwrap();
        reservation.map(0, &memory).unwrap().unmap().unwrap();
        reservation.free().unwrap();
    });
}
