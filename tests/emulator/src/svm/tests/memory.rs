//! Addresses, physical memory, mappings and copies.

use super::*;

#[test]
fn heaps_are_enabled_where_nothing_is_and_disabled_by_place_and_size_alone() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let enable = |bench: &mut Bench, index, size| bench.heap(&client, 0, svm::HEAP_HUGE, index, size);
    assert_eq!(enable(&mut bench, INDEX, GIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, INDEX - 1, 2 * GIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 3000, 0), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 3000, GIB + 2 * MIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 3000, 129 * GIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 8191, 2 * GIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 3000, 128 * GIB), Ok(()));
    assert_eq!(bench.heap(&client, 2, svm::HEAP_HUGE, 3200, GIB), Err(Errno::EINVAL));
    assert_eq!(bench.heap(&client, 0, 1, 3200, GIB), Err(Errno::EINVAL));
    assert_eq!(bench.heap(&client, 1, svm::HEAP_HUGE, 3000, GIB), Err(Errno::EINVAL));
    assert_eq!(bench.heap(&client, 1, 99, 3000, 128 * GIB), Ok(()));
}

#[test]
fn reservations_are_taken_and_freed_whole() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let end = VA + GIB;
    assert_eq!(bench.alloc(&client, 0x5000, MIB), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.alloc(&client, VA + GIB, MIB), Err(Errno::EINVAL));
    assert_eq!(bench.alloc(&client, VA, 0), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.alloc(&client, end - 2 * MIB, 4 * MIB), Err(Errno::EADDRNOTAVAIL));
    bench.alloc(&client, VA + 4 * MIB, 4 * MIB).unwrap();
    assert_eq!(bench.alloc(&client, VA + 6 * MIB, 64 * GIB), Err(Errno::EBUSY));
    assert_eq!(bench.alloc(&client, VA, 6 * MIB), Err(Errno::EINVAL));
    bench.alloc(&client, VA, 4 * MIB).unwrap();
    // Unaligned with size 0: one chunk.
    bench.alloc(&client, VA + 8 * MIB + 1, 0).unwrap();
    assert_eq!(bench.free(&client, VA + 9 * MIB), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.free(&client, VA + 11 * MIB), Err(Errno::EINVAL));
    assert_eq!(bench.free(&client, VA + 6 * MIB), Err(Errno::EINVAL));
    for address in [VA, VA + 4 * MIB, VA + 8 * MIB] {
        bench.free(&client, address).unwrap();
        assert_eq!(bench.free(&client, address), Err(Errno::EINVAL));
    }
}

#[test]
fn the_other_segments_have_rules_of_their_own() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, svm::SOMA_START, MIB).unwrap();
    bench.free(&client, svm::SOMA_START + GIB).unwrap();
    assert_eq!(bench.alloc(&client, svm::UVM_START, MIB), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.free(&client, svm::UVM_START), Err(Errno::EINVAL));
    assert_eq!(bench.free(&client, svm::HOST_PIN_START_PCIE), Err(Errno::EINVAL));
    bench.alloc(&client, svm::HOST_PIN_START_PCIE, MIB).unwrap();
    bench.free(&client, svm::HOST_PIN_START_PCIE).unwrap();
}

#[test]
fn ids_go_up_and_a_failed_create_uses_one() {
    let mut bench = Bench::with(|config| config.hbm = 8 * MIB);
    let client = bench.session(10);
    for device in [0, HOST] {
        assert_eq!(bench.create(&client, device, 4 * MIB).unwrap().id, 0);
        assert_eq!(bench.create(&client, device, 1 << 50).map(drop), Err(Errno::ENOMEM));
        assert_eq!(bench.create(&client, device, 5).map(drop), Err(Errno::EINVAL));
        let made = bench.create(&client, device, 4 * MIB).unwrap();
        assert_eq!((made.id, made.pages), (2, 2));
        bench.release(&client, device, 2, 2).unwrap();
        assert_eq!(bench.create(&client, device, 2 * MIB).unwrap().id, 3);
    }
}

#[test]
fn a_handle_can_be_released_in_parts() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, VA, 8 * MIB).unwrap();
    let made = bench.create(&client, HOST, 8 * MIB).unwrap();
    bench.release(&client, HOST, made.id, 1).unwrap();
    assert_eq!(bench.svm.used(HOST), 6 * MIB);
    assert_eq!(bench.map(&client, HOST, made.id, VA, 2 * MIB, 4), Err(Errno::EBADRQC));
    bench.release(&client, HOST, made.id, 100).unwrap();
    assert_eq!(bench.svm.used(HOST), 0);
    assert_eq!(bench.release(&client, HOST, made.id, 1), Err(Errno::EINVAL));
    // None named: on the host a half-freed handle, on the device nothing at all.
    let made = bench.create(&client, HOST, 2 * MIB).unwrap();
    bench.release(&client, HOST, made.id, 0).unwrap();
    assert_eq!(bench.map(&client, HOST, made.id, VA, 2 * MIB, 1), Err(Errno::EBADRQC));
    let made = bench.create(&client, 0, 2 * MIB).unwrap();
    bench.release(&client, 0, made.id, 0).unwrap();
    bench.map(&client, 0, made.id, VA, 2 * MIB, 1).unwrap();
}

#[test]
fn a_map_is_checked_against_the_handle_and_the_reservation() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, VA, 8 * MIB).unwrap();
    for device in [HOST, 0] {
        let made = bench.create(&client, device, 4 * MIB).unwrap();
        let at = VA + 2 * MIB;
        assert_eq!(bench.map(&client, device, made.id + 1, at, 2 * MIB, 2), Err(Errno::EINVAL), "no such handle");
        assert_eq!(bench.map(&client, device, made.id, at, 2 * MIB, 3), Err(Errno::EINVAL), "another page count");
        assert_eq!(bench.map(&client, device, made.id, at, 6 * MIB, 2), Err(Errno::ENOMEM), "larger than the handle");
        assert_eq!(bench.map(&client, device, made.id, at, 10 * MIB, 2), Err(Errno::EINVAL), "larger than reserved");
        assert_eq!(bench.map(&client, device, made.id, at, MIB, 2), Err(Errno::EINVAL), "no whole chunks");
        bench.map(&client, device, made.id, at, 4 * MIB, 2).unwrap();
        assert_eq!(bench.map(&client, device, made.id, at, 4 * MIB, 2), Err(Errno::EADDRINUSE));
        assert_eq!(bench.release(&client, device, made.id, 2), Err(Errno::EBUSY));
        assert_eq!(bench.free(&client, VA), Err(Errno::EBUSY));
        assert_eq!(bench.unmap(&client, at + 2 * MIB).map(drop), Err(Errno::EINVAL));
        let unmapped = bench.unmap(&client, at).unwrap();
        assert_eq!((unmapped.size, unmapped.device), (4 * MIB, device));
        bench.release(&client, device, made.id, 2).unwrap();
        // The owner mark stays until the reservation goes.
        let (other, pages) = (if device == HOST { 0 } else { HOST }, 1);
        let other_made = bench.create(&client, other, 2 * MIB).unwrap();
        assert_eq!(bench.map(&client, other, other_made.id, VA, 2 * MIB, pages), Err(Errno::EINVAL));
        bench.release(&client, other, other_made.id, 1).unwrap();
        bench.free(&client, VA).unwrap();
        bench.alloc(&client, VA, 8 * MIB).unwrap();
    }
}

#[test]
fn a_map_that_meets_another_leaves_stale_chunks_that_spread() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, VA, 16 * MIB).unwrap();
    let made = bench.create(&client, HOST, 16 * MIB).unwrap();
    let map = |bench: &mut Bench, chunk: u64, chunks: u64| {
        bench.map(&client, HOST, made.id, VA + chunk * 2 * MIB, chunks * 2 * MIB, 8)
    };
    map(&mut bench, 4, 1).unwrap();
    assert_eq!(map(&mut bench, 2, 4), Err(Errno::EADDRINUSE));
    assert_eq!(map(&mut bench, 2, 1), Err(Errno::EADDRINUSE), "chunks 2 and 3 are stale");
    assert_eq!(map(&mut bench, 1, 2), Err(Errno::EADDRINUSE), "and make chunk 1 stale");
    assert_eq!(map(&mut bench, 1, 1), Err(Errno::EADDRINUSE));
    map(&mut bench, 0, 1).unwrap();
    // A failure for another reason leaves nothing.
    assert_eq!(bench.map(&client, HOST, 99, VA + 10 * MIB, 2 * MIB, 8), Err(Errno::EINVAL));
    map(&mut bench, 5, 1).unwrap();
    for chunk in [0, 4, 5] {
        bench.unmap(&client, VA + chunk * 2 * MIB).unwrap();
    }
    bench.free(&client, VA).unwrap();
    bench.alloc(&client, VA, 16 * MIB).unwrap();
    map(&mut bench, 1, 3).unwrap();
}

#[test]
fn bytes_go_to_the_device_and_back() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let id = bench.mapped(&client, 0, VA, 4 * MIB);
    let pattern: Vec<u8> = (0..3 * MIB).map(|index| (index * 7 % 251) as u8).collect();
    bench.memory.write(BUFFER, &pattern).unwrap();
    assert_eq!(bench.copy(&client, VA + 5, BUFFER, 3 * MIB), Ok(svm::COPY_HOST_TO_DEVICE));
    bench.memory.write(BUFFER, &vec![0; 3 * MIB as usize]).unwrap();
    assert_eq!(bench.copy(&client, BUFFER, VA + 5, 3 * MIB), Ok(svm::COPY_DEVICE_TO_HOST));
    let mut back = vec![0; 3 * MIB as usize];
    bench.memory.read(BUFFER, &mut back).unwrap();
    assert!(back == pattern);
    // The bytes are the handle's, not the address's.
    bench.unmap(&client, VA).unwrap();
    bench.map(&client, 0, id, VA, 2 * MIB, 2).unwrap();
    bench.memory.write(BUFFER, &[0; 64]).unwrap();
    bench.copy(&client, BUFFER, VA + 5, 64).unwrap();
    bench.memory.read(BUFFER, &mut back[..64]).unwrap();
    assert!(back[..64] == pattern[..64]);
    assert_eq!(bench.copy(&client, VA, BUFFER, 0), Err(Errno::EINVAL));
    assert_eq!(bench.copy(&client, VA, 0x1000, 8), Err(Errno::EFAULT));
    assert_eq!(bench.copy(&client, BUFFER, BUFFER + 64, 8), Ok(svm::COPY_HOST_TO_HOST));
    assert_eq!(bench.copy(&client, VA, BUFFER, 4 * MIB), Err(Errno::EINVAL), "a hole");
}

#[test]
fn the_end_of_a_range_that_begins_inside_a_mapping_is_not_checked() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.memory.write(BUFFER, &[7; 64]).unwrap();
    assert_eq!(bench.copy(&client, VA + 2 * MIB - 16, BUFFER, 64), Err(Errno::EFAULT));
    assert_eq!(bench.copy(&client, BUFFER + 128, VA + 2 * MIB - 16, 16), Ok(svm::COPY_DEVICE_TO_HOST));
    let mut bytes = [0; 16];
    bench.memory.read(BUFFER + 128, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 16], "the mapped part is written");
}

#[test]
fn asynchronous_copies_hold_what_they_use_until_they_are_refreshed() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    let para = svm::AsyncMemcpy { destination: VA, source: BUFFER, size: 100, ..Default::default() };
    let task = bench.call(&client, Op::AsyncMemcpy, 0, para).unwrap().task;
    assert_eq!(bench.unmap(&client, VA).map(drop), Err(Errno::EBUSY));
    let refresh = svm::AsyncMemcpy { task, ..Default::default() };
    let done = bench.call(&client, Op::MemcpyResultRefresh, 0, refresh).unwrap();
    assert_eq!(done.state, svm::ASYNC_DONE);
    assert_eq!(bench.call(&client, Op::MemcpyResultRefresh, 0, refresh).map(drop), Err(Errno::EINVAL));
    assert_eq!(bench.call(&client, Op::AsyncMemcpy, 0, para).unwrap().task, task + 1);
    bench.call(&client, Op::PrepareCloseDevice, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.call(&client, Op::AsyncMemcpy, 0, para).map(drop), Err(Errno::ENONET));
    bench.setup(&client, 0).unwrap();
    assert_eq!(bench.call(&client, Op::AsyncMemcpy, 0, para).map(drop), Err(Errno::ENONET));
}

#[test]
fn the_cpu_sees_host_memory_and_device_memory_that_it_was_given_access_to() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, HOST, VA, 2 * MIB);
    bench.poke(&client, VA + 9, b"cpu");
    bench.mapped(&client, 0, VA + 2 * MIB, 2 * MIB);
    assert_eq!(bench.copy(&client, VA + 2 * MIB, VA + 9, 3), Ok(svm::COPY_HOST_TO_DEVICE));
    bench.access(&client, VA + 2 * MIB, 2 * MIB, HOST, 3).unwrap();
    assert_eq!(bench.peek(&client, VA + 2 * MIB + 1), b'p');
    assert_eq!(bench.access(&client, VA + 2 * MIB, 2 * MIB, HOST, 3), Err(Errno::EEXIST));
    assert_eq!(bench.access(&client, VA, 2 * MIB, 0, 3), Err(Errno::EOPNOTSUPP));
    bench.unmap(&client, VA).unwrap();
    assert_eq!(bench.peek(&client, VA + 9), 0, "no old bytes after the unmap");
    bench.exit(&client);
    assert_eq!(bench.trap(), "");
}

#[test]
fn devices_on_hccs_can_be_given_host_memory() {
    let mut bench = Bench::with(|config| config.attachment = Attachment::Hccs);
    let client = bench.session(10);
    bench.mapped(&client, HOST, VA, 2 * MIB);
    bench.access(&client, VA, 2 * MIB, 0, 3).unwrap();
}

#[test]
fn dynamic_ranges_are_mapped_by_the_process_and_have_no_owner_mark() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let (va, index) = (26u64 << 40, 10 << 10);
    assert_eq!(bench.mmap(&client, 20 << 40, GIB), Err(Errno::EINVAL));
    bench.mmap(&client, va, 2 * GIB).unwrap();
    assert_eq!(bench.mmap(&client, va + GIB, 2 * GIB), Err(Errno::EINVAL));
    assert_eq!(bench.enable(&client, index, svm::HEAP_HUGE), Err(Errno::EINVAL));
    bench.heap(&client, 0, svm::HEAP_HUGE, index, 2 * GIB).unwrap();
    bench.mapped(&client, HOST, va, 2 * MIB);
    bench.alloc(&client, va + 2 * MIB, 4 * MIB).unwrap();
    for (device, at) in [(0, va + 2 * MIB), (HOST, va + 4 * MIB)] {
        let made = bench.create(&client, device, 2 * MIB).unwrap();
        bench.map(&client, device, made.id, at, 2 * MIB, 1).unwrap();
    }
    // A heap without mapping takes device memory only.
    bench.enable(&client, index + 100, svm::HEAP_HUGE).unwrap();
    let bare = va + 100 * GIB;
    bench.alloc(&client, bare, 4 * MIB).unwrap();
    let made = bench.create(&client, HOST, 2 * MIB).unwrap();
    assert_eq!(bench.map(&client, HOST, made.id, bare, 2 * MIB, 1), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.mmap(&client, bare, GIB), Err(Errno::EINVAL));
}

#[test]
fn a_hundred_thousand_reservations_and_mappings_cost_no_more_each() {
    let mut bench = Bench::with(|config| config.hbm = 1 << 40);
    let client = bench.session(10);
    bench.heap(&client, 0, svm::HEAP_HUGE, 3000, 128 * GIB).unwrap();
    bench.heap(&client, 0, svm::HEAP_HUGE, 3200, 128 * GIB).unwrap();
    let address = |index: u64| {
        let heap = if index < 50_000 { 3000 } else { 3200 };
        svm::SVM_START + heap * GIB + index % 50_000 * 2 * MIB
    };
    let begun = Instant::now();
    for index in 0..100_000 {
        bench.alloc(&client, address(index), 2 * MIB).unwrap();
        let made = bench.create(&client, 0, 2 * MIB).unwrap();
        bench.map(&client, 0, made.id, address(index), 2 * MIB, 1).unwrap();
    }
    for index in 0..100_000 {
        bench.unmap(&client, address(index)).unwrap();
        bench.free(&client, address(index)).unwrap();
        bench.release(&client, 0, index as i32, 1).unwrap();
    }
    // A quadratic cost would take hours; the limit is for a debug build on a busy machine.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    assert_eq!(bench.svm.used(0), 0);
}
