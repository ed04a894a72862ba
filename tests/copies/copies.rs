//! Copies and fills: of device and host memory, in rows, in batches and asynchronous.

use crate::support;
use crate::support::random::Random;
use crate::support::{MIB2, contents, count, device, inject, mapped_on, mapped_on_host, open, plain, refused_here};
use ascend_emulator::{Config, isolated, isolated_leaky, on_each_generation};
use ascend_vmm::copy::{self, Rows};
use ascend_vmm::error::Errno;
use ascend_vmm::{Error, Mapping, PhysicalMemory, Reservation, Session};

/// Bytes that depend on a seed only.
fn pattern(size: usize, seed: u64) -> Vec<u8> {
    Random(seed).bytes(size)
}

#[test]
fn bytes_are_written_and_read_back_at_any_offset_and_size() {
    on_each_generation(Config::default(), |_, _| {
        let device = device(0);
        let mapping = mapped_on(&device, 2 * MIB2);
        for (offset, size) in [(0, 1), (1, 4095), (4093, 9000), (MIB2 - 5, 11), (2 * MIB2 - 1, 1), (7, MIB2 as usize)] {
            let bytes = pattern(size, offset);
            mapping.write(offset, &bytes).unwrap();
            assert_eq!(contents(&mapping, offset, size), bytes);
        }
        mapping.write(0, &[]).unwrap();
        mapping.write(2 * MIB2, &[]).unwrap();
        mapping.read(2 * MIB2, &mut []).unwrap();
        mapping.fill(9, 0, 1).unwrap();
    });
}

#[test]
fn host_memory_is_copied_by_the_cpu_because_the_kernel_refuses_to() {
    on_each_generation(Config::default(), |_, emulator| {
        let _device = device(0);
        let first = mapped_on_host(MIB2);
        let second = mapped_on_host(MIB2);
        emulator.record();
        let bytes = pattern(100_003, 5);
        first.write(11, &bytes).unwrap();
        assert_eq!(contents(&first, 11, bytes.len()), bytes);
        second.slice(1, 100_003).unwrap().copy_from(&first.slice(11, 100_003).unwrap()).unwrap();
        assert_eq!(contents(&second, 1, bytes.len()), bytes);
        second.fill(0, 1000, 0x77).unwrap();
        assert_eq!(contents(&second, 0, 1001), [vec![0x77; 1000], vec![bytes[999]]].concat());
        assert_eq!(emulator.records().len(), 0);
    });
}

#[test]
fn bytes_are_copied_between_devices_and_the_host_in_every_direction() {
    on_each_generation(Config::default(), |_, _| {
        let (device0, device1) = (device(0), device(1));
        let here = mapped_on(&device0, MIB2);
        let beside = mapped_on(&device0, MIB2);
        let there = mapped_on(&device1, MIB2);
        let host = mapped_on_host(MIB2);
        let bytes = pattern(50_000, 1);
        here.write(3, &bytes).unwrap();
        let size = bytes.len() as u64;
        let places = [&here, &beside, &there, &host, &here];
        for (round, pair) in (1..).zip(places.windows(2)) {
            let from = pair[0].slice(if round == 1 { 3 } else { round * 17 - 17 }, size).unwrap();
            pair[1].slice(round * 17, size).unwrap().copy_from(&from).unwrap();
            assert_eq!(contents(pair[1], round * 17, bytes.len()), bytes, "copy {round}");
        }
        let error = here.slice(0, 100).unwrap().copy_from(&here.slice(99, 100).unwrap()).unwrap_err();
        assert!(error.to_string().contains("overlap"), "{error}");
        let error = here.slice(0, 100).unwrap().copy_from(&there.slice(0, 99).unwrap()).unwrap_err();
        assert!(error.to_string().contains("same size"), "{error}");
    });
}

#[test]
fn copies_may_span_mappings_but_not_holes() {
    on_each_generation(Config::default(), |_, emulator| {
        let (session, device) = open(0);
        let reservation = session.reserve(8 * MIB2).unwrap();
        let mut mappings = Vec::new();
        for chunk in [0, 1, 2, 4] {
            mappings.push(reservation.map(chunk * MIB2, &device.create(MIB2).unwrap()).unwrap());
        }
        let bytes = pattern(2 * MIB2 as usize, 3);
        // This starts inside a mapping: the kernel checks the start only.
        reservation.slice(MIB2 / 2, 2 * MIB2).unwrap().write(&bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        reservation.slice(MIB2 / 2, 2 * MIB2).unwrap().read(&mut back).unwrap();
        assert_eq!(back, bytes);
        reservation.slice(0, 3 * MIB2).unwrap().fill(9).unwrap();
        assert_eq!(contents(&mappings[2], MIB2 - 4, 4), [9; 4]);
        emulator.record();
        for (offset, size) in [(MIB2 / 2, 3 * MIB2), (3 * MIB2, 1), (2 * MIB2 + 5, MIB2), (4 * MIB2, MIB2 + 1)] {
            let error = reservation.slice(offset, size).unwrap_err();
            assert!(error.to_string().contains("mapped"), "{error}");
        }
        for (offset, size) in [(8 * MIB2, 1), (0, 9 * MIB2), (u64::MAX, 2)] {
            let error = reservation.slice(offset, size).unwrap_err();
            assert!(error.to_string().contains("inside"), "{error}");
        }
        for (offset, size) in [(0, MIB2 + 1), (MIB2, 1), (MIB2 + 1, 0), (u64::MAX, 1)] {
            let error = mappings[0].slice(offset, size).unwrap_err();
            assert!(error.to_string().contains("inside"), "{error}");
        }
        assert_eq!(emulator.records().len(), 0);
        // A mapping that a slice covers cannot be removed.
        let slice = reservation.slice(0, MIB2).unwrap();
        let failed = mappings.remove(0).unmap().unwrap_err();
        assert!(failed.to_string().contains("Wait for them first"), "{failed}");
        drop(slice);
        failed.object.unmap().unwrap();
    });
}

#[test]
fn rows_are_copied_with_their_pitches() {
    on_each_generation(Config::default(), |_, _| {
        let device = device(0);
        let on_device = mapped_on(&device, MIB2);
        let on_host = mapped_on_host(MIB2);
        for mapping in [&on_device, &on_host] {
            mapping.fill(0, MIB2, 0xFF).unwrap();
            let rows = Rows { width: 100, height: 50, pitch: 4096, buffer_pitch: 128 };
            let bytes = pattern(50 * 128, 9);
            mapping.slice(16, 64 * 4096).unwrap().write_rows(&rows, &bytes).unwrap();
            for row in 0..50 {
                let seen = contents(mapping, 16 + row as u64 * 4096, 101);
                assert_eq!(seen[..100], bytes[row * 128..row * 128 + 100]);
                assert_eq!(seen[100], 0xFF);
            }
            let mut back = vec![0; 50 * 100];
            let dense = Rows { buffer_pitch: 100, ..rows };
            mapping.slice(16, 64 * 4096).unwrap().read_rows(&dense, &mut back).unwrap();
            assert!((0..50).all(|row| back[row * 100..][..100] == bytes[row * 128..][..100]));
            let bad = [
                Rows { width: 129, ..rows },
                Rows { height: 51, ..rows },
                Rows { pitch: 99, ..rows },
                Rows { pitch: 1 << 20, ..rows },
                Rows { height: u64::MAX, ..rows },
                Rows { pitch: u64::MAX, ..rows },
            ];
            for rows in bad {
                let error = mapping.slice(16, 64 * 4096).unwrap().write_rows(&rows, &bytes).unwrap_err();
                assert!(error.to_string().contains("do not fit"), "{error}");
            }
            let none = Rows { height: 0, ..rows };
            mapping.slice(16, 0).unwrap().write_rows(&none, &[]).unwrap();
        }
    });
}

#[test]
fn batches_take_one_command_per_device() {
    on_each_generation(Config::default(), |_, emulator| {
        let (device0, device1) = (device(0), device(1));
        let here = mapped_on(&device0, MIB2);
        let there = mapped_on(&device1, MIB2);
        let host = mapped_on_host(MIB2);
        let buffers: Vec<Vec<u8>> = (0..60).map(|index| pattern(1000 + index, index as u64)).collect();
        let place = |index: usize| ([&here, &there, &host][index % 3], index as u64 * 2000);
        emulator.record();
        let slices = buffers.iter().enumerate().map(|(index, buffer)| {
            let (mapping, offset) = place(index);
            (mapping.slice(offset, buffer.len() as u64).unwrap(), &buffer[..])
        });
        copy::write_batch(&slices.collect::<Vec<_>>()).unwrap();
        let seen: Vec<_> = emulator.records().iter().filter_map(|record| record.cmd).collect();
        assert_eq!(seen, ["MEMCPY_BATCH", "MEMCPY_BATCH"]);
        let mut back: Vec<Vec<u8>> = buffers.iter().map(|buffer| vec![0; buffer.len()]).collect();
        let mut slices: Vec<_> = back
            .iter_mut()
            .enumerate()
            .map(|(index, buffer)| {
                let (mapping, offset) = place(index);
                (mapping.slice(offset, buffer.len() as u64).unwrap(), &mut buffer[..])
            })
            .collect();
        copy::read_batch(&mut slices).unwrap();
        assert_eq!(back, buffers);
        copy::write_batch(&[]).unwrap();
        let short = [(here.slice(0, 10).unwrap(), &[0u8; 9][..])];
        assert!(matches!(copy::write_batch(&short), Err(Error::Invalid(_))));
        let many: Vec<_> = (0..5000).map(|index| (here.slice(index, 1).unwrap(), &[7u8][..])).collect();
        copy::write_batch(&many).unwrap();
        assert_eq!(contents(&here, 0, 5000), [7; 5000]);
    });
}

#[test]
fn asynchronous_copies_return_their_buffer_and_keep_their_mapping() {
    on_each_generation(Config::default(), |_, emulator| {
        let device = device(0);
        let mapping = mapped_on(&device, MIB2);
        let bytes = pattern(100_000, 2);
        let pending = mapping.write_async(5, bytes.clone()).unwrap();
        let failed = mapping.unmap().unwrap_err();
        assert!(failed.to_string().contains("Wait for them first"), "{failed}");
        let mapping = failed.object;
        assert_eq!(pending.wait().unwrap(), bytes);
        let back = mapping.read_async(5, vec![0; bytes.len()]).unwrap().wait().unwrap();
        assert_eq!(back, bytes);
        // Dropping a copy waits for it.
        drop(mapping.write_async(0, vec![1; 100]).unwrap());
        assert_eq!(contents(&mapping, 0, 100), [1; 100]);
        // A mapping that is dropped first stays until the copy is done.
        let pending = mapping.write_async(0, vec![2; 100]).unwrap();
        drop(mapping);
        pending.wait().unwrap();
        let host = mapped_on_host(MIB2);
        assert_eq!(host.write_async(0, vec![3; 10]).unwrap().wait().unwrap(), [3; 10]);
        assert_eq!(contents(&host, 0, 10), [3; 10]);
        let failed = host.write_async(MIB2 - 1, vec![0; 2]).unwrap_err();
        assert_eq!(failed.object, [0, 0]);
        let mapping = mapped_on(&device, MIB2);
        inject(emulator, "ASYNC_MEMCPY#1=ENOSPC");
        let failed = mapping.write_async(0, vec![4; 10]).unwrap_err();
        assert_eq!((failed.error.errno(), failed.object), (Some(Errno::ENOSPC), vec![4; 10]));
    });
}

#[test]
fn asynchronous_copies_use_buffers_of_other_languages() {
    on_each_generation(Config::default(), |_, emulator| {
        for mapping in [mapped_on(&device(0), MIB2), mapped_on_host(MIB2)] {
            let (from, mut to) = (pattern(100_000, 3), vec![0; 100_000]);
            let slice = mapping.slice(5, 100_000).unwrap();
            // SAFETY: both buffers outlive their copies.
            unsafe {
                slice.write_async_from(from.as_ptr()).unwrap().wait().unwrap();
                slice.read_async_into(to.as_mut_ptr()).unwrap().wait().unwrap();
            }
            assert_eq!(to, from);
            // SAFETY: nothing is at the address, and nothing is copied.
            unsafe { mapping.slice(0, 0).unwrap().write_async_from(std::ptr::null()) }.unwrap().wait().unwrap();
        }
        let mapping = mapped_on(&device(0), MIB2);
        inject(emulator, "MEMCPY_RESULT_REFRESH#1=EBUSY");
        let buffer = vec![0; 10].leak();
        // SAFETY: the buffer is never freed.
        let pending = unsafe { mapping.slice(0, 10).unwrap().write_async_from(buffer.as_ptr()) }.unwrap();
        assert_eq!(pending.wait().unwrap_err().object, None, "the device may still be using it");
    });
}

#[test]
fn a_copy_that_is_forgotten_leaks_its_buffer_and_nothing_else() {
    isolated_leaky(Config::default(), |emulator| {
        let (session, device) = open(0);
        let reservation = session.reserve(MIB2).unwrap();
        let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
        std::mem::forget(mapping.write_async(0, vec![5; 4096]).unwrap());
        // The kernel keeps the mapping for a task whose result is never fetched, and so do we.
        let failed = mapping.unmap().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }), "{failed}");
        assert_eq!(contents(&failed.object, 0, 4), [5; 4]);
        drop(failed);
        assert!(matches!(reservation.free().unwrap_err().error, Error::InUse { .. }));
        // Other mappings work.
        let other = mapped_on(&device, MIB2);
        other.write(0, &[1]).unwrap();
        assert!(!emulator.state().is_empty());
    });
}

#[test]
fn a_broken_link_is_an_error_of_the_copy() {
    on_each_generation(Config::default(), |_, emulator| {
        let device = device(0);
        let mapping = mapped_on(&device, MIB2);
        inject(emulator, "copies=link-error");
        let error = mapping.write(0, &[1; 100]).unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error}");
        assert!(mapping.read(0, &mut [0; 100]).is_err());
        match mapping.write_async(0, vec![1; 100]) {
            Ok(pending) => {
                let failed = pending.wait().unwrap_err();
                assert!(matches!(failed.error, Error::Refused(_)), "{}", failed.error);
            }
            Err(failed) => assert_eq!(failed.object, [1; 100]),
        }
    });
}

#[test]
fn any_number_of_empty_rows_is_copied_at_once() {
    on_each_generation(plain(), |_, _| {
        let device = device(0);
        for mapping in [mapped_on_host(MIB2), mapped_on(&device, MIB2)] {
            let slice = mapping.slice(0, MIB2).unwrap();
            let rows = Rows { width: 0, height: u64::MAX, pitch: 0, buffer_pitch: 0 };
            slice.write_rows(&rows, &[]).unwrap();
            slice.read_rows(&rows, &mut []).unwrap();
        }
    });
}

#[test]
fn an_empty_slice_holds_no_mapping_and_copies_nothing() {
    isolated(plain(), |_| {
        let (session, device) = open(0);
        let (first, second) = (session.reserve(MIB2).unwrap(), session.reserve(MIB2).unwrap());
        assert_eq!(first.address() + MIB2, second.address());
        let mapping = second.map(0, &device.create(MIB2).unwrap()).unwrap();
        let slices = [first.slice(0, 0).unwrap(), first.slice(MIB2, 0).unwrap(), second.slice(5, 0).unwrap()];
        for slice in &slices {
            slice.write(&[]).unwrap();
            slice.read(&mut []).unwrap();
            slice.fill(1).unwrap();
            slice.copy_from(&slices[0]).unwrap();
        }
        ascend_vmm::copy::write_batch(&[(first.slice(MIB2, 0).unwrap(), &[])]).unwrap();
        // Neither the neighbour's mapping nor the one that an empty slice is in is held.
        mapping.unmap().unwrap();
        drop(slices);
    });
}

#[test]
fn copies_of_slices_run_across_mappings_and_keep_them_mapped() {
    on_each_generation(plain(), |_, _| {
        let (session, device) = open(0);
        let reservation = session.reserve(2 * MIB2).unwrap();
        let (first, second) = (device.create(MIB2).unwrap(), device.create(MIB2).unwrap());
        let (_first, second) = (reservation.map(0, &first).unwrap(), reservation.map(MIB2, &second).unwrap());
        let running = reservation.slice(MIB2 - 4, 8).unwrap().write_async(b"01234567".to_vec()).unwrap();
        let failed = second.unmap().unwrap_err();
        refused_here(&failed.error, "copies");
        assert_eq!(running.wait().unwrap(), b"01234567");
        let part = reservation.slice(0, 2 * MIB2).unwrap();
        let running = part.part(MIB2 - 4, 8).unwrap().write_async(b"01234567".to_vec()).unwrap();
        drop(part);
        let failed = failed.object.unmap().unwrap_err();
        refused_here(&failed.error, "copies");
        drop(running);
        let part = reservation.slice(0, 2 * MIB2).unwrap();
        let back = part.part(MIB2 - 2, 4).unwrap().read_async(vec![0; 4]).unwrap().wait().unwrap();
        assert_eq!(back, b"2345");
        refused_here(&part.part(1, 2 * MIB2).unwrap_err(), "not inside of");
        refused_here(&part.write_async(vec![0; 3]).unwrap_err().error, "are not the same");
        drop(part);
        failed.object.unmap().unwrap();
    });
}

/// Memory of these sizes, one mapping after the other.
fn row_of(memories: &[PhysicalMemory]) -> (Reservation, Vec<Mapping>) {
    let session = Session::current().unwrap();
    let reservation = session.reserve(memories.iter().map(PhysicalMemory::size).sum()).unwrap();
    let places = memories.iter().scan(0, |end, memory| {
        *end += memory.size();
        Some((*end - memory.size(), memory))
    });
    let mappings = places.map(|(offset, memory)| reservation.map(offset, memory).unwrap()).collect();
    (reservation, mappings)
}

#[test]
fn asynchronous_copies_go_mapping_by_mapping_and_leave_all_of_them_free() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let on_device: Vec<_> = [1, 2, 4].map(|size| device.create(size * MIB2).unwrap()).into();
        let on_host: Vec<_> = [3, 4].map(|size| session.host().unwrap().create(size * MIB2).unwrap()).into();
        let (far, far_mappings) = row_of(&on_device);
        let (near, near_mappings) = row_of(&on_host);
        let mut tasks = 0;
        let mut pairs = |more: usize| {
            tasks += more;
            assert_eq!(count(emulator, "ASYNC_MEMCPY"), tasks);
            assert_eq!(count(emulator, "MEMCPY_RESULT_REFRESH"), tasks);
        };
        emulator.record();
        // All, all but the first and the last byte, over one border, and inside of one mapping.
        let ranges = [(0, 7 * MIB2, 3), (1, 7 * MIB2 - 2, 3), (MIB2 - 5, 11, 2), (MIB2, 2 * MIB2, 1), (9, 99, 1)];
        for (seed, (offset, size, pieces)) in (1..).zip(ranges) {
            let slice = far.slice(offset, size).unwrap();
            let bytes = pattern(size as usize, seed);
            let bytes = slice.write_async(bytes).unwrap().wait().unwrap();
            pairs(pieces);
            let mut pending = slice.read_async(vec![0; bytes.len()]).unwrap();
            let back = std::iter::from_fn(|| Some(pending.try_wait())).flatten().next().unwrap().unwrap();
            assert!(back == bytes, "{offset} {size}");
            pairs(pieces);
        }
        // Borders of both sides: 1, 3 and 3 of them, which two share.
        let (all, here) = (far.slice(0, 7 * MIB2).unwrap(), near.slice(0, 7 * MIB2).unwrap());
        here.copy_from_async(&all).unwrap().wait().unwrap();
        pairs(3);
        let (some, there) = (far.slice(0, 5 * MIB2).unwrap(), near.slice(2 * MIB2, 5 * MIB2).unwrap());
        some.copy_from_async(&there).unwrap().wait().unwrap();
        pairs(3);
        let (mut one, mut other) = (vec![0; 5 * MIB2 as usize], vec![0; 5 * MIB2 as usize]);
        some.read(&mut one).unwrap();
        there.read(&mut other).unwrap();
        assert!(one == other);
        drop((all, here, some, there));
        for mapping in far_mappings.into_iter().chain(near_mappings) {
            mapping.unmap().unwrap();
        }
    });
}

#[test]
fn a_piece_that_fails_is_reported_when_the_others_are_over() {
    on_each_generation(plain(), |_, emulator| {
        let tasks = || emulator.state().memory.sessions.iter().map(|session| session.tasks).sum::<usize>();
        let memories: Vec<_> = (0..3).map(|_| device(0).create(MIB2).unwrap()).collect();
        let (reservation, mappings) = row_of(&memories);
        let slice = reservation.slice(0, 3 * MIB2).unwrap();
        let buffer = || vec![7; 3 * MIB2 as usize];
        // The first: nothing was begun.
        inject(emulator, "ASYNC_MEMCPY#1=ENOSPC");
        let failed = slice.write_async(buffer()).unwrap_err();
        assert_eq!((failed.error.errno(), failed.object.len(), tasks()), (Some(Errno::ENOSPC), 3 * MIB2 as usize, 0));
        // The third: two are running, and have the buffer until they were waited for.
        for polled in [false, true] {
            inject(emulator, "ASYNC_MEMCPY#3=ENOSPC");
            let mut pending = slice.write_async(buffer()).unwrap();
            assert_eq!(tasks(), 2);
            let result = match polled {
                false => pending.wait(),
                true => std::iter::from_fn(|| Some(pending.try_wait())).flatten().next().unwrap(),
            };
            let failed = result.unwrap_err();
            assert_eq!((failed.error.errno(), tasks()), (Some(Errno::ENOSPC), 0));
            assert!(failed.object.is_some_and(|buffer| buffer == vec![7; 3 * MIB2 as usize]));
            assert!(
                failed.error.to_string().contains(&format!("{:#x}", slice.address() + 2 * MIB2)),
                "{}",
                failed.error
            );
        }
        inject(emulator, "ASYNC_MEMCPY#2=EFAULT");
        drop(slice.write_async(buffer()).unwrap());
        assert_eq!(tasks(), 0, "dropping waits too");
        drop(slice);
        for mapping in mappings {
            mapping.unmap().unwrap();
        }
    });
}

#[test]
fn a_buffer_stays_while_a_device_may_use_it_and_a_dead_device_is_waited_for_once() {
    isolated_leaky(plain(), |emulator| {
        let memories: Vec<_> = (0..3).map(|_| device(0).create(MIB2).unwrap()).collect();
        let (reservation, mut mappings) = row_of(&memories);
        let slice = reservation.slice(0, 3 * MIB2).unwrap();
        // It is not known whether the second piece is over; the third is waited for.
        inject(emulator, "MEMCPY_RESULT_REFRESH#2=EINVAL");
        emulator.record();
        let failed = slice.read_async(vec![1; 3 * MIB2 as usize]).unwrap().wait().unwrap_err();
        assert_eq!((failed.error.errno(), failed.object), (Some(Errno::EINVAL), None));
        assert_eq!(count(emulator, "MEMCPY_RESULT_REFRESH"), 3);
        drop(slice);
        mappings.pop().unwrap().unmap().unwrap();
        let failed = mappings.pop().unwrap().unmap().unwrap_err();
        assert_eq!(failed.error.errno(), Some(Errno::EBUSY));
        assert!(failed.to_string().contains("only ending the session gives it back"), "{failed}");
        let (reservation, _mappings) = row_of(&memories);
        let slice = reservation.slice(0, 3 * MIB2).unwrap();
        inject(emulator, "MEMCPY_RESULT_REFRESH#1=ETIMEDOUT");
        let failed = slice.write_async(vec![1; 3 * MIB2 as usize]).unwrap().wait().unwrap_err();
        assert_eq!((failed.error.errno(), failed.object), (Some(Errno::ETIMEDOUT), None));
        assert_eq!(count(emulator, "MEMCPY_RESULT_REFRESH"), 3 + 1);
    });
}

#[test]
fn a_copy_over_thousands_of_mappings_leaves_places_for_others() {
    isolated(plain(), |emulator| {
        let (session, device) = open(0);
        // One memory, mapped many times: the copy is large and needs little memory.
        let (memory, times) = (device.create(MIB2).unwrap(), 1100);
        let reservation = session.reserve(times * MIB2).unwrap();
        let mappings: Vec<_> = (0..times).map(|index| reservation.map(index * MIB2, &memory).unwrap()).collect();
        let slice = reservation.slice(0, times * MIB2).unwrap();
        let pending = slice.write_async(vec![0; (times * MIB2) as usize]).unwrap();
        let tasks = emulator.state().memory.sessions.iter().map(|session| session.tasks).sum::<usize>();
        assert!((1..=1024).contains(&tasks), "{tasks}");
        pending.wait().unwrap();
        drop((slice, mappings));
        reservation.free().unwrap();
    });
}

#[test]
fn imports_are_copied_and_filled_mapping_by_mapping() {
    on_each_generation(Config { devices: 3, ..plain() }, |_, emulator| {
        let (session, here) = open(2);
        let share = |memory: PhysicalMemory| {
            let export = memory.export().unwrap();
            export.trust(&[support::own_tgid()]).unwrap();
            let import = ascend_vmm::share::import(&here, &export.ticket().unwrap()).unwrap();
            (support::mapped(&memory), export, import)
        };
        // Of two exporters, and of the host.
        let shares = [
            share(device(0).create(MIB2).unwrap()),
            share(device(1).create(MIB2).unwrap()),
            share(session.host().unwrap().create(MIB2).unwrap()),
        ];
        let imports: Vec<_> = shares.iter().map(|(_, _, import)| import.clone()).collect();
        let (reservation, _mappings) = row_of(&imports);
        let at = |offset: u64, size: usize| {
            let (share, offset) = (&shares[(offset / MIB2) as usize], offset % MIB2);
            contents(&share.0, offset, size)
        };
        let both = reservation.slice(0, 2 * MIB2).unwrap();
        let border = both.part(MIB2 - 2, 4).unwrap();
        emulator.record();
        border.write(b"abcd").unwrap();
        assert_eq!((count(emulator, "MEMCPY"), at(MIB2 - 2, 2), at(MIB2, 2)), (2, b"ab".to_vec(), b"cd".to_vec()));
        let mut back = [0; 4];
        border.read(&mut back).unwrap();
        assert_eq!(&back, b"abcd");
        both.fill(9).unwrap();
        assert_eq!((at(0, 1), at(MIB2 - 1, 1), at(MIB2, 1), at(2 * MIB2 - 1, 1)), (vec![9], vec![9], vec![9], vec![9]));
        border.write_async(b"efgh".to_vec()).unwrap().wait().unwrap();
        assert_eq!((at(MIB2 - 2, 2), at(MIB2, 2)), (b"ef".to_vec(), b"gh".to_vec()));
        let rows = Rows { width: 4, height: 2, pitch: 6, buffer_pitch: 4 };
        both.part(MIB2 - 8, 16).unwrap().write_rows(&rows, b"01234567").unwrap();
        assert_eq!((at(MIB2 - 8, 4), at(MIB2 - 2, 2), at(MIB2, 2)), (b"0123".to_vec(), b"45".to_vec(), b"67".to_vec()));
        let mut back = [0; 8];
        both.part(MIB2 - 8, 16).unwrap().read_rows(&rows, &mut back).unwrap();
        assert_eq!(&back, b"01234567");
        // From the memory of another device.
        let other = mapped_on(&device(0), MIB2);
        other.write(0, b"ijkl").unwrap();
        copy::write_batch(&[(both.part(MIB2 - 2, 4).unwrap(), b"mnop")]).unwrap();
        assert_eq!((at(MIB2 - 2, 2), at(MIB2, 2)), (b"mn".to_vec(), b"op".to_vec()));
        border.copy_from(&other.slice(0, 4).unwrap()).unwrap();
        assert_eq!((at(MIB2 - 2, 2), at(MIB2, 2)), (b"ij".to_vec(), b"kl".to_vec()));
        // Where host memory follows that the device imported, nothing is done at all.
        let mixed = reservation.slice(2 * MIB2 - 2, 4).unwrap();
        let before = at(2 * MIB2 - 2, 2);
        let one = Rows { width: 4, height: 1, pitch: 4, buffer_pitch: 4 };
        let calls = emulator.records().len();
        for error in [
            mixed.write(b"1234").unwrap_err(),
            mixed.read(&mut [0; 4]).unwrap_err(),
            mixed.fill(1).unwrap_err(),
            mixed.write_rows(&one, b"1234").unwrap_err(),
            mixed.read_rows(&one, &mut [0; 4]).unwrap_err(),
            mixed.write_async(b"1234".to_vec()).unwrap_err().error,
            mixed.copy_from(&other.slice(0, 4).unwrap()).unwrap_err(),
            other.slice(0, 4).unwrap().copy_from(&mixed).unwrap_err(),
            other.slice(0, 4).unwrap().copy_from_async(&mixed).unwrap_err(),
            copy::write_batch(&[(reservation.slice(2 * MIB2 - 2, 4).unwrap(), b"1234")]).unwrap_err(),
        ] {
            refused_here(&error, "copies no host memory that a device imported");
        }
        assert_eq!(emulator.records().len(), calls);
        assert_eq!(at(2 * MIB2 - 2, 2), before);
        assert_eq!(emulator.control(|driver| driver.svm.leaked()), 0);
    });
}

#[test]
fn copies_between_a_device_and_host_memory_of_the_driver_run_without_a_buffer() {
    on_each_generation(plain(), |_, emulator| {
        let (_, device) = open(0);
        let (on_device, on_host, other) = (mapped_on(&device, MIB2), mapped_on_host(MIB2), mapped_on(&device, MIB2));
        on_host.write(0, b"from the host").unwrap();
        emulator.record();
        let slices = [&on_device, &on_host, &other].map(|mapping| mapping.slice(0, MIB2).unwrap());
        let [to, host, second] = &slices;
        to.copy_from_async(host).unwrap().wait().unwrap();
        assert_eq!(contents(&on_device, 0, 13), b"from the host");
        on_device.write(0, b"from a device").unwrap();
        host.copy_from_async(to).unwrap().wait().unwrap();
        assert_eq!(contents(&on_host, 0, 13), b"from a device");
        assert_eq!(count(emulator, "ASYNC_MEMCPY"), 2);
        // The driver knows no others: they are done at once.
        second.copy_from_async(to).unwrap().wait().unwrap();
        assert_eq!(contents(&other, 0, 13), b"from a device");
        assert_eq!(count(emulator, "ASYNC_MEMCPY"), 2);
        refused_here(&to.copy_from_async(&on_host.slice(0, 5).unwrap()).unwrap_err(), "are not the same");
    });
}

#[test]
fn a_copy_can_be_polled_by_hand_and_by_any_runtime() {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Wake};

    struct Thread(std::thread::Thread);
    impl Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    on_each_generation(plain(), |_, emulator| {
        let mapping = mapped_on(&device(0), MIB2);
        emulator.record();
        let mut running = mapping.write_async(0, b"polled".to_vec()).unwrap();
        let mut result = None;
        support::wait_until("the copy is over", || {
            result = running.try_wait();
            result.is_some()
        });
        assert_eq!(result.unwrap().unwrap(), b"polled");
        // A copy that is over holds nothing, even before it is dropped.
        mapping.unmap().unwrap();
        let mapping = mapped_on(&device(0), MIB2);
        mapping.write(0, b"polled").unwrap();
        let error = running.try_wait().unwrap().unwrap_err();
        refused_here(&error.error, "returned before");
        drop(running);

        let waker = Arc::new(Thread(std::thread::current())).into();
        let mut future = pin!(mapping.read_async(0, vec![0; 6]).unwrap());
        let back = loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(result) => break result.unwrap(),
                Poll::Pending => std::thread::park(),
            }
        };
        assert_eq!(back, b"polled");
        // Dropped while a thread waits for it: it is waited for once.
        let mut dropped = mapping.read_async(0, vec![0; 6]).unwrap();
        let _ = dropped.try_wait();
        drop(dropped);
        assert_eq!(count(emulator, "ASYNC_MEMCPY"), count(emulator, "MEMCPY_RESULT_REFRESH"));
        let mut failing = mapping.read_async(0, vec![0; 6]).unwrap();
        inject(emulator, "MEMCPY_RESULT_REFRESH#1=EINVAL");
        let mut result = None;
        support::wait_until("the copy is over", || {
            result = failing.try_wait();
            result.is_some()
        });
        assert!(result.unwrap().unwrap_err().object.is_none(), "the device may still write to it");
    });
}

#[test]
fn a_waker_is_the_callers_code_and_runs_under_no_lock() {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Wake};

    /// Lets the driver go on and waits until the other waker was called, when it is dropped.
    struct Old(Sender<()>, Mutex<Receiver<()>>);
    impl Wake for Old {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for Old {
        fn drop(&mut self) {
            self.0.send(()).unwrap();
            self.1.lock().unwrap().recv().unwrap();
        }
    }
    struct New(Sender<()>);
    impl Wake for New {
        fn wake(self: Arc<Self>) {
            self.0.send(()).unwrap();
        }
    }
    isolated(plain(), |emulator| {
        let mapping = mapped_on(&device(0), MIB2);
        let mut future = pin!(mapping.write_async(0, b"woken".to_vec()).unwrap());
        let ((go, stopped), (woken, was_woken)) = (channel(), channel());
        let (at_rest, rests) = channel();
        std::thread::scope(|scope| {
            // The driver answers nothing until the old waker lets it.
            scope.spawn(|| {
                emulator.control(move |_| {
                    at_rest.send(()).unwrap();
                    stopped.recv().unwrap();
                });
            });
            rests.recv().unwrap();
            let old = Arc::new(Old(go, Mutex::new(was_woken))).into();
            assert!(future.as_mut().poll(&mut Context::from_waker(&old)).is_pending());
            drop(old);
            // The last reference of the old waker goes when the new one takes its place.
            let new = Arc::new(New(woken)).into();
            assert!(future.as_mut().poll(&mut Context::from_waker(&new)).is_pending());
            assert!(future.as_mut().poll(&mut Context::from_waker(&new)).is_ready());
        });
    });
}

#[test]
fn imported_memory_is_part_of_a_batch_and_slices_stay_in_one_reservation() {
    on_each_generation(plain(), |_, _| {
        let (session, here) = open(0);
        let export = device(1).create(MIB2).unwrap().export().unwrap();
        export.trust(&[support::own_tgid()]).unwrap();
        let imported = support::mapped(&ascend_vmm::share::import(&here, &export.ticket().unwrap()).unwrap());
        let own = mapped_on(&here, MIB2);
        let slices = || [imported.slice(0, 4).unwrap(), own.slice(0, 4).unwrap()];
        let [theirs, ours] = slices();
        copy::write_batch(&[(theirs, b"them"), (ours, b"ours")]).unwrap();
        let ([theirs, ours], mut back) = (slices(), [[0; 4]; 2]);
        let [one, two] = &mut back;
        copy::read_batch(&mut [(theirs, one), (ours, two)]).unwrap();
        assert_eq!(back, [*b"them", *b"ours"]);
        // Two reservations side by side.
        let (first, second) = (session.reserve(MIB2).unwrap(), session.reserve(MIB2).unwrap());
        assert_eq!(first.address() + MIB2, second.address());
        let _first = first.map(0, &here.create(MIB2).unwrap()).unwrap();
        let _second = second.map(0, &here.create(MIB2).unwrap()).unwrap();
        refused_here(&session.slice_at(second.address() - 4, 8).unwrap_err(), "more than one reservation");
        session.slice_at(second.address() - 4, 4).unwrap().write(b"last").unwrap();
    });
}

#[test]
fn while_one_thread_copies_the_others_use_the_device() {
    on_each_generation(Config::default(), |_, emulator| {
        let device = device(0);
        let (mapping, other) = (mapped_on(&device, MIB2), mapped_on(&device, MIB2));
        let bytes = pattern(MIB2 as usize, 3);
        let hold = emulator.hold_after("MEMCPY", MIB2 / 2);
        std::thread::scope(|scope| {
            let copy = scope.spawn(|| mapping.write(0, &bytes).unwrap());
            hold.wait();
            other.write(0, b"meanwhile").unwrap();
            assert_eq!(contents(&other, 0, 9), b"meanwhile");
            device.create(MIB2).unwrap();
            assert!(!copy.is_finished());
            assert_eq!(contents(&mapping, 0, bytes.len() / 2), bytes[..bytes.len() / 2]);
            hold.release();
            copy.join().unwrap();
        });
        assert_eq!(contents(&mapping, 0, bytes.len()), bytes);
    });
}
