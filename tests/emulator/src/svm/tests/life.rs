//! Ends of sessions and devices, traps, and what the log pages say.

use super::*;

#[test]
fn a_process_object_whose_init_was_refused_with_eexist_is_never_released() {
    let mut bench = Bench::new();
    bench.session(10);
    let second = bench.open(10);
    bench.call(&second, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.init(&second), Err(Errno::EEXIST));
    assert_eq!(bench.svm.stuck(), 0);
    bench.svm.release(&mut bench.machine, second.file, true);
    assert_eq!(bench.svm.stuck(), 1);
}

#[test]
fn a_container_without_a_device_table_is_refused_until_it_has_one() {
    let mut bench = Bench::with(|config| config.places = vec![crate::config::Place::container(&[1])]);
    let client = bench.prepare(10);
    assert_eq!(bench.init(&client), Err(Errno::EEXIST));
    let memory = TestPages::default();
    let caller = Bench::caller(&memory, &client);
    bench.machine.occupy(&caller, 1).unwrap();
    bench.machine.setup(&caller, 1).unwrap();
    assert_eq!(bench.init(&client), Ok(()), "on the same file");
    bench.svm.release(&mut bench.machine, client.file, false);
    assert_eq!(bench.svm.stuck(), 0);
}

#[test]
fn memory_of_a_device_process_that_died_is_freed() {
    let mut bench = Bench::with(|config| config.device_process = DeviceProcess::Required);
    let client = bench.prepare(10);
    bench.init(&client).unwrap();
    bench.machine.start_device_process(10, 0).unwrap();
    bench.setup(&client, 0).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
    bench.machine.end_device_process(10, 0);
    bench.create(&client, HOST, 2 * MIB).unwrap();
    assert_eq!(bench.svm.used(0), 0);
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::ESRCH));
}

#[test]
fn host_memory_is_freed_when_the_address_space_goes_and_device_memory_when_the_file_does() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.create(&client, HOST, 2 * MIB).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
    // A child still holds the file.
    bench.svm.exit(&mut bench.machine, client.tgid, client.start_time);
    assert_eq!((bench.svm.used(HOST), bench.svm.used(0)), (0, 2 * MIB));
    bench.svm.release(&mut bench.machine, client.file, false);
    assert!(bench.svm.state().is_empty());
}

#[test]
fn what_would_crash_the_kernel_is_a_trap() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.access(&client, VA, 2 * MIB, HOST, 0).unwrap();
    assert_eq!(bench.trap(), "");
    bench.access(&client, VA, 2 * MIB, HOST, 3).unwrap();
    assert_eq!(bench.trap(), "access-after-access-none");

    let mut bench = Bench::new();
    let client = bench.session(10);
    let made = bench.create(&client, HOST, 4 * MIB).unwrap();
    bench.release(&client, HOST, made.id, 1).unwrap();
    bench.export(&client, HOST, made.id).unwrap();
    bench.release(&client, HOST, made.id, 2).unwrap();
    assert_eq!(bench.trap(), "release-of-half-freed-export");

    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, VA, 4 * MIB).unwrap();
    bench.alloc(&client, VA + 4 * MIB, 2 * MIB).unwrap();
    let made = bench.create(&client, HOST, 4 * MIB).unwrap();
    bench.map(&client, HOST, made.id, VA + 2 * MIB, 4 * MIB, 2).unwrap();
    bench.free(&client, VA + 4 * MIB).unwrap();
    assert_eq!(bench.trap(), "free-under-spanning-map");

    let mut bench = Bench::new();
    let client = bench.session(10);
    let child = TestClient { tgid: 11, ..client.clone() };
    bench.mmap(&child, 25 << 40, GIB).unwrap();
    assert_eq!(bench.trap(), "dynamic-mmap-by-stranger");
}

#[test]
fn a_cpu_touch_where_nothing_is_mapped_is_found() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, HOST, VA, 2 * MIB);
    bench.poke(&client, VA + 100, b"good");
    bench.svm.release(&mut bench.machine, client.file, true);
    assert_eq!(bench.trap(), "");
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.poke(&client, VA + 100, b"bad");
    bench.exit(&client);
    assert_eq!(bench.trap(), "touch-of-unmapped-address");
}

#[test]
fn a_refusal_names_the_command_the_reason_and_the_parameters_in_the_log_page() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.memory.map(klog::SVM_ERRORS, 4096);
    bench.memory.write(klog::SVM_ERRORS, klog::Page::empty(klog::SVM_ERRORS).as_bytes()).unwrap();
    bench.create(&client, 0, 5).unwrap_err();
    let mut bytes = [0; 4096];
    bench.memory.read(klog::SVM_ERRORS, &mut bytes).unwrap();
    let page = klog::Page::read_from_bytes(&bytes).unwrap();
    let text = String::from_utf8(page.text[..page.write as usize].to_vec()).unwrap();
    assert!(text.starts_with("MEM_CREATE is refused: the size is not a multiple of the page size."), "{text}");
    assert!(text.contains("; size=0x5; ") && text.ends_with("; errno=22)\n"), "{text}");
}

#[test]
fn what_a_machine_cannot_do_is_noted_in_the_other_page() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    for page in [klog::SVM_ERRORS, klog::SVM_RUN_INFO] {
        bench.memory.map(page, 4096);
        bench.memory.write(page, klog::Page::empty(page).as_bytes()).unwrap();
    }
    let para = svm::MemImport { kind: 9, ..Default::default() };
    assert_eq!(bench.call(&client, Op::MemImport, 0, para).map(drop), Err(Errno::EOPNOTSUPP));
    let written = |bench: &Bench, page: u64| {
        let mut bytes = [0; 4];
        bench.memory.read(page + 48, &mut bytes).unwrap();
        i32::from_le_bytes(bytes)
    };
    assert_eq!(written(&bench, klog::SVM_ERRORS), 0);
    let noted = written(&bench, klog::SVM_RUN_INFO);
    assert!(noted > 0);
    bench.setup(&client, 1).unwrap();
    assert!(written(&bench, klog::SVM_RUN_INFO) > noted);
}

/// A session with host memory that fills a mapped dynamic range.
fn filled(generation: Generation) -> (Bench, TestClient, u64) {
    let mut bench = Bench::with(|config| config.generation = generation);
    let client = bench.session(10);
    let va = 26u64 << 40;
    bench.mmap(&client, va, GIB).unwrap();
    bench.enable(&client, 10 << 10, svm::HEAP_HUGE).unwrap();
    bench.mapped(&client, HOST, va, GIB);
    (bench, client, va)
}

#[test]
fn host_memory_that_fills_a_dynamic_range_hangs_the_unmap_or_the_disable() {
    for generation in Generation::ALL {
        let oldest = generation == Generation::V8_5_0;
        let (mut bench, client, va) = filled(generation);
        bench.unmap(&client, va).unwrap();
        assert_eq!(bench.trap(), if oldest { "unmap-of-whole-dynamic-range" } else { "" }, "{generation}");
        let (mut bench, client, _) = filled(generation);
        bench.heap(&client, svm::HEAP_DISABLE, svm::HEAP_HUGE, 10 << 10, GIB).unwrap();
        assert_eq!(bench.trap(), "unmap-of-whole-dynamic-range", "{generation}");
    }
}

#[test]
fn a_device_is_not_set_up_while_a_heap_lies_beyond_80_tib_in_older_generations() {
    for generation in Generation::ALL {
        let mut bench = Bench::with(|config| config.generation = generation);
        let client = bench.session(10);
        // From 40 TiB on for 32 TiB; then from 78 TiB on for 32 TiB.
        bench.heap(&client, svm::HEAP_ENABLE, svm::HEAP_HUGE, 24 << 10, 32 << 40).unwrap();
        bench.setup(&client, 1).unwrap();
        assert_eq!(bench.trap(), "", "{generation}");
        bench.heap(&client, svm::HEAP_ENABLE, svm::HEAP_HUGE, 62 << 10, 32 << 40).unwrap();
        bench.call(&client, Op::CloseDevice, 1, svm::SetupDevice::default()).unwrap();
        bench.setup(&client, 1).unwrap();
        let trap = if generation < Generation::V26_1 { "setup-beyond-80-tib" } else { "" };
        assert_eq!(bench.trap(), trap, "{generation}");
    }
}

#[test]
fn a_munmap_beyond_a_dynamic_range_is_found() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mmap(&client, 25 << 40, GIB).unwrap();
    bench.change(&client, ChangeKind::Unmap, 25 << 40..(25 << 40) + 2 * GIB).unwrap();
    assert_eq!(bench.trap(), "munmap-beyond-dynamic-range");
}

#[test]
fn a_silent_device_makes_calls_wait_and_a_dead_one_fails_them() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.machine.silence_device(0, Duration::from_secs(1));
    let para = svm::MemCreate { size: 2 * MIB, side: 1, page: 1, ..Default::default() };
    let outcome = bench.raw(&client, svm::stable(Op::MemCreate).unwrap(), &mut Arg::new(0, &para));
    assert!(matches!(outcome, Outcome::Sleep(_)));
    bench.machine.silence_device(0, Duration::ZERO);
    assert_eq!(bench.create(&client, 0, 2 * MIB).unwrap().id, 1, "the call that waited has changed nothing");
    bench.machine.link_broken = true;
    assert_eq!(bench.copy(&client, VA, BUFFER, 8), Err(Errno::EIO));
    bench.machine.kill_device(0);
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::ENODEV));
    assert_eq!(bench.copy(&client, VA, BUFFER, 8), Err(Errno::ENXIO));
}
