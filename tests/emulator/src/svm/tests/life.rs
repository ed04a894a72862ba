//! Sessions: how they begin and end, what reaches them through the dispatcher, and what a client can do to them.

use super::*;

#[test]
fn a_session_comes_up_on_every_generation_and_leaves_nothing() {
    for generation in Generation::ALL {
        let mut bench = Bench::with(|config| config.generation = generation);
        let client = bench.session(10);
        let id = bench.mapped(&client, 0, VA, 4 * MIB);
        assert_eq!(bench.svm.used(0), 4 * MIB);
        assert_eq!(bench.release(&client, 0, id, 2), Err(Errno::EBUSY));
        bench.exit(&client);
        assert!(bench.svm.state().is_empty(), "{generation}: {:?}", bench.svm.state());
        assert_eq!(bench.trap(), "");
    }
}

#[test]
fn the_dispatcher_checks_in_the_drivers_order() {
    let mut bench = Bench::new();
    let client = bench.open(10);
    let mut arg = Arg::new_zeroed();
    let mut ask = |bench: &mut Bench, request| bench.raw(&client, request, &mut arg);
    assert_eq!(ask(&mut bench, 0xC158_4D69), Errno::EINVAL.into(), "number 105");
    assert_eq!(ask(&mut bench, 0xC158_4E24), Errno::EINVAL.into(), "another magic");
    assert_eq!(ask(&mut bench, 0xC158_4D12), Errno::EINVAL.into(), "an unused number before INIT_PROCESS");
    assert_eq!(ask(&mut bench, 0x4158_4D66), Errno::EOPNOTSUPP.into(), "number 102 needs no process");
    assert_eq!(ask(&mut bench, 0xC158_4D24), Errno::EINVAL.into(), "INIT_PROCESS before ALLOC_PROC_STRUCT");
    let client = bench.session(11);
    assert_eq!(bench.raw(&client, 0xC158_4D12, &mut Arg::new_zeroed()), Errno::EOPNOTSUPP.into());
    let caller = Bench::caller(&bench.memory, &client);
    for address in [0, 8] {
        let outcome = bench.svm.ioctl(&mut bench.machine, &caller, client.file, 0xC158_4D32, address);
        assert_eq!(outcome, Errno::EINVAL.into());
    }
    // INIT_PROCESS is known by its whole word.
    assert_eq!(bench.raw(&client, 0xC158_4D24, &mut Arg::new_zeroed()), Errno::ESRCH.into());
}

#[test]
fn the_head_comes_back_rewritten_and_nothing_comes_back_on_error() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let request = svm::stable(Op::MemCreate).unwrap();
    let para = svm::MemCreate { size: 2 * MIB, side: 1, page: 1, ..Default::default() };
    let mut arg = Arg::new(0, &para);
    arg.head.logical = 77;
    assert_eq!(bench.raw(&client, request, &mut arg), Ok(0).into());
    assert_eq!((arg.head.logical, arg.head.device), (0, 0));
    let mut arg = Arg::new(0, &svm::MemCreate { size: 3, ..para });
    arg.head.logical = 77;
    let before = arg;
    assert_eq!(bench.raw(&client, request, &mut arg), Errno::EINVAL.into());
    assert_eq!(arg, before);
    // A word without READ executes without an answer.
    let mut arg = Arg::new(0, &para);
    assert_eq!(bench.raw(&client, request & !(2 << 30), &mut arg), Ok(0).into());
    assert_eq!(arg.para::<svm::MemCreate>().pages, 0);
    assert_eq!(bench.svm.used(0), 4 * MIB);
}

#[test]
fn an_answer_that_cannot_be_written_leaves_the_command_done() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let para = svm::MemCreate { size: 2 * MIB, side: 1, page: 1, ..Default::default() };
    bench.memory.write(ARG, Arg::new(0, &para).as_bytes()).unwrap();
    bench.memory.read_only.borrow_mut().insert(ARG);
    let caller = Bench::caller(&bench.memory, &client);
    let outcome = bench.svm.ioctl(&mut bench.machine, &caller, client.file, svm::stable(Op::MemCreate).unwrap(), ARG);
    assert_eq!(outcome, Errno::EINVAL.into());
    assert_eq!(bench.svm.used(0), 2 * MIB);
}

#[test]
fn segments_are_mapped_in_order_and_before_init() {
    let mut bench = Bench::new();
    let client = bench.open(10);
    let segments = bench.segments();
    assert_eq!(bench.mmap(&client, segments[0].start, segments[0].size), Err(Errno::EINVAL), "no process object");
    bench.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    let again = bench.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default());
    assert_eq!(again.map(drop), Err(Errno::EALREADY));
    assert_eq!(bench.mmap(&client, segments[1].start, segments[1].size), Err(Errno::EINVAL));
    assert_eq!(bench.mmap(&client, segments[0].start, segments[0].size / 2), Err(Errno::EINVAL));
    bench.mmap(&client, segments[0].start, segments[0].size).unwrap();
    bench.init(&client).unwrap();
    // The late segment is refused, and the session goes on.
    assert_eq!(bench.mmap(&client, segments[1].start, segments[1].size), Err(Errno::ESRCH));
    bench.setup(&client, 0).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
}

#[test]
fn a_late_first_segment_spoils_the_session() {
    let mut bench = Bench::new();
    let client = bench.open(10);
    bench.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    bench.init(&client).unwrap();
    bench.setup(&client, 0).unwrap();
    assert_eq!(bench.mmap(&client, svm::SVM_START, svm::SVM_SIZE), Err(Errno::ESRCH));
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::EINVAL));
}

#[test]
fn a_process_has_one_session() {
    let mut bench = Bench::new();
    let first = bench.session(10);
    let second = bench.open(10);
    bench.call(&second, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.init(&second), Err(Errno::EEXIST));
    // The same file is good once the first session is gone.
    bench.change(&first, ChangeKind::Unmap, svm::SVM_START..svm::DYNAMIC_START).unwrap();
    bench.init(&second).unwrap();
    assert_eq!(bench.create(&first, 0, 2 * MIB).map(drop), Err(Errno::EINVAL));
    assert_eq!(bench.svm.stuck(), 0);
    let third = bench.open(10);
    bench.call(&third, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.init(&third), Err(Errno::EEXIST));
    bench.svm.release(&mut bench.machine, third.file, true);
    assert_eq!(bench.svm.stuck(), 1);
}

#[test]
fn a_session_without_mappings_is_in_the_way_until_an_exact_munmap() {
    let mut bench = Bench::new();
    let client = bench.open(10);
    bench.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    bench.init(&client).unwrap();
    bench.setup(&client, 0).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
    bench.svm.release(&mut bench.machine, client.file, true);
    assert_eq!(bench.svm.used(0), 0, "device memory goes with the file");
    let next = bench.prepare(10);
    assert_eq!(bench.init(&next), Err(Errno::EEXIST));
    // Another range says nothing to the driver.
    bench.change(&client, ChangeKind::Advise(libc::MADV_DONTNEED), svm::UVM_START..svm::UVM_START + svm::UVM_SIZE).ok();
    assert_eq!(bench.init(&next), Err(Errno::EEXIST));
    bench.svm.exit(&mut bench.machine, 10, bench.started);
    bench.init(&next).unwrap();
}

#[test]
fn only_exact_or_splitting_changes_end_a_session() {
    let svm_range = svm::SVM_START..svm::DYNAMIC_START;
    let part = VA..VA + MIB;
    let cases: [(ChangeKind, std::ops::Range<u64>, bool); 12] = [
        (ChangeKind::Unmap, svm_range.clone(), false),
        (ChangeKind::Unmap, svm_range.start - 4096..svm_range.end, true),
        (ChangeKind::Unmap, part.clone(), false),
        (ChangeKind::Unmap, svm::SOMA_START..svm::SOMA_START + svm::SOMA_SIZE, true),
        (ChangeKind::Unmap, svm::SOMA_START..svm::SOMA_START + MIB, true),
        (ChangeKind::Unmap, svm::HOST_PIN_START_PCIE..svm::HOST_PIN_START_PCIE + svm::HOST_PIN_SIZE, false),
        (ChangeKind::Protect(libc::PROT_NONE), svm_range.clone(), true),
        (ChangeKind::Protect(libc::PROT_NONE), part.clone(), false),
        (ChangeKind::Protect(3), part.clone(), true),
        (ChangeKind::Advise(libc::MADV_DONTDUMP), part.clone(), true),
        (ChangeKind::Advise(libc::MADV_RANDOM), part.clone(), false),
        (ChangeKind::Remap { length: svm::SVM_SIZE - 4096, fixed: false }, svm_range.clone(), false),
    ];
    for (kind, range, survives) in cases {
        let mut bench = Bench::new();
        let client = bench.session(10);
        bench.change(&client, kind, range.clone()).unwrap();
        let alive = bench.create(&client, HOST, 2 * MIB).is_ok();
        assert_eq!(alive, survives, "{kind:?} of {range:x?}");
    }
    let mut bench = Bench::new();
    let client = bench.session(10);
    assert_eq!(bench.change(&client, ChangeKind::Advise(libc::MADV_DONTNEED), part), Err(Errno::EINVAL));
    let grow = ChangeKind::Remap { length: svm::SVM_SIZE + GIB, fixed: false };
    assert_eq!(bench.change(&client, grow, svm_range), Err(Errno::EFAULT));
    assert!(bench.create(&client, HOST, 2 * MIB).is_ok());
}

#[test]
fn a_device_that_is_not_set_up_does_not_know_the_process() {
    let mut bench = Bench::with(|config| config.device_process = DeviceProcess::Required);
    let client = bench.prepare(10);
    bench.init(&client).unwrap();
    assert_eq!(bench.setup(&client, 0).map(drop), Err(Errno::EFAULT));
    assert_eq!(bench.setup(&client, 64).map(drop), Err(Errno::EFAULT));
    assert_eq!(bench.setup(&client, 5).map(drop), Err(Errno::EINVAL));
    assert_eq!(bench.setup(&client, 1124).map(drop), Err(Errno::ENODEV));
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::ESRCH));
    bench.machine.start_device_process(10, 0).unwrap();
    bench.setup(&client, 0).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
    // The device process dies: so does its memory.
    bench.machine.end_device_process(10, 0);
    bench.create(&client, HOST, 2 * MIB).unwrap();
    assert_eq!(bench.svm.used(0), 0);
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::ESRCH));
}

#[test]
fn closing_a_device_leaks_the_counters_of_what_was_mapped() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.call(&client, Op::CloseDevice, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.svm.used(0), 0);
    assert_eq!(bench.free(&client, VA), Err(Errno::EBUSY));
    assert_eq!(bench.copy(&client, VA, BUFFER, 8), Err(Errno::EINVAL));
    bench.setup(&client, 0).unwrap();
    let made = bench.create(&client, 0, 2 * MIB).unwrap();
    bench.map(&client, 0, made.id, VA, 2 * MIB, 1).unwrap();
    bench.unmap(&client, VA).unwrap();
    assert_eq!(bench.free(&client, VA), Err(Errno::EBUSY));
    bench.heap(&client, svm::HEAP_DISABLE, svm::HEAP_HUGE, INDEX, GIB).unwrap();
    bench.enable(&client, INDEX, svm::HEAP_HUGE).unwrap();
    bench.alloc(&client, VA, 2 * MIB).unwrap();
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
    let child = Client { tgid: 11, ..client.clone() };
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
fn a_refusal_is_explained_in_the_log_page() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.memory.map(klog::SVM_ERRORS, 4096);
    bench.create(&client, 0, 5).unwrap_err();
    let page = |bench: &Bench| {
        let mut bytes = [0; 4096];
        bench.memory.read(klog::SVM_ERRORS, &mut bytes).unwrap();
        klog::Page::read_from_bytes(&bytes).unwrap()
    };
    assert_eq!(page(&bench).write, 0, "no magic, no sentence");
    bench.memory.write(klog::SVM_ERRORS, klog::Page::empty(klog::SVM_ERRORS).as_bytes()).unwrap();
    bench.create(&client, 0, 5).unwrap_err();
    let first = page(&bench);
    let text = String::from_utf8(first.text[..first.write as usize].to_vec()).unwrap();
    assert!(text.starts_with("MEM_CREATE is refused: the size is no multiple of the page."), "{text}");
    assert!(text.contains("; size=0x5; ") && text.ends_with("; errno=22)\n"), "{text}");
    bench.create(&client, 0, 5).unwrap_err();
    assert_eq!(page(&bench).write, 2 * first.write);
    // Without a reader the area runs full: the last sentence is cut, and both positions start anew.
    while page(&bench).write != 0 {
        bench.create(&client, 0, 5).unwrap_err();
    }
    assert_eq!(*page(&bench).text.last().unwrap(), 0);
    // A position beyond the area makes the page useless until it is repaired.
    bench.memory.write(klog::SVM_ERRORS + 48, &4000i32.to_le_bytes()).unwrap();
    bench.create(&client, 0, 5).unwrap_err();
    assert_eq!(page(&bench).write, 4000);
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

#[test]
fn in_the_oldest_generation_an_unmap_of_a_whole_dynamic_range_ends_the_session() {
    for (generation, survives) in [(Generation::V8_5_0, false), (Generation::V26_1, true)] {
        let mut bench = Bench::with(|config| config.generation = generation);
        let client = bench.session(10);
        let va = 26u64 << 40;
        bench.mmap(&client, va, GIB).unwrap();
        bench.enable(&client, 10 << 10, svm::HEAP_HUGE).unwrap();
        bench.mapped(&client, HOST, va, GIB);
        bench.unmap(&client, va).unwrap();
        assert_eq!(bench.create(&client, HOST, 2 * MIB).is_ok(), survives, "{generation}");
    }
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
