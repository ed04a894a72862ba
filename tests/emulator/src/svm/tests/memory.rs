//! Accounting of physical memory, the cost of many mappings, and answers that no rule covers.

use super::*;

#[test]
fn what_was_allocated_in_the_host_pin_segment_can_be_freed_once() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, svm::HOST_PIN_START_PCIE, MIB).unwrap();
    bench.free(&client, svm::HOST_PIN_START_PCIE).unwrap();
    assert_eq!(bench.free(&client, svm::HOST_PIN_START_PCIE), Err(Errno::EINVAL));
}

#[test]
fn a_create_that_fails_for_lack_of_memory_uses_an_id() {
    let mut bench = Bench::with(|config| config.hbm = 8 * MIB);
    let client = bench.session(10);
    assert_eq!(bench.create(&client, 0, 8 * MIB).unwrap().id, 0);
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::ENOMEM));
    bench.release(&client, 0, 0, 4).unwrap();
    assert_eq!(bench.create(&client, 0, 2 * MIB).unwrap().id, 2);
}

#[test]
fn released_pages_are_freed_at_once() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let made = bench.create(&client, HOST, 8 * MIB).unwrap();
    bench.release(&client, HOST, made.id, 1).unwrap();
    assert_eq!(bench.svm.used(HOST), 6 * MIB);
    bench.release(&client, HOST, made.id, 100).unwrap();
    assert_eq!(bench.svm.used(HOST), 0);
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
fn a_hundred_thousand_reservations_and_mappings_cost_no_more_each() {
    let mut bench = Bench::with(|config| config.hbm = 1 << 40);
    let client = bench.session(10);
    bench.heap(&client, 0, svm::HEAP_HUGE, 3000, 128 * GIB).unwrap();
    bench.heap(&client, 0, svm::HEAP_HUGE, 3200, 128 * GIB).unwrap();
    let address = |index: u64| {
        let heap = if index < 50_000 { 3000 } else { 3200 };
        svm::SVM_START + heap * GIB + index % 50_000 * 2 * MIB
    };
    let begun = cpu_time();
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
    // A quadratic cost would take hours; the limit is for a debug build.
    let taken = cpu_time() - begun;
    assert!(taken < Duration::from_secs(60), "{taken:?}");
    assert_eq!(bench.svm.used(0), 0);
}

/// The time that this thread has run, which does not depend on what else the machine does.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one time.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
