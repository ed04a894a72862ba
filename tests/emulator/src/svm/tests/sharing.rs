//! Memory that several processes share.

use super::*;

#[test]
fn a_process_that_was_listed_before_it_started_must_be_listed_again() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let made = bench.create(&exporter, 0, 2 * MIB).unwrap();
    let share = bench.export(&exporter, 0, made.id).unwrap();
    bench.trust(&exporter, 0, share, 11).unwrap();
    bench.started = now() + 1;
    let importer = bench.session(11);
    assert_eq!(bench.import(&importer, 0, 0, share).map(drop), Err(Errno::EACCES));
    while now() <= importer.start_time {}
    bench.trust(&exporter, 0, share, 11).unwrap();
    bench.import(&importer, 0, 0, share).unwrap();
}

#[test]
fn a_process_with_the_id_of_a_listed_one_is_not_that_process() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let made = bench.create(&exporter, 0, 2 * MIB).unwrap();
    let share = bench.export(&exporter, 0, made.id).unwrap();
    // A process that ended at once: its successor may have started in the same tick of the clock.
    bench.machine.identity = |_| Some(1);
    bench.trust(&exporter, 0, share, 11).unwrap();
    let importer = bench.session(11);
    assert_eq!(bench.import(&importer, 0, 0, share).map(drop), Err(Errno::EACCES));
    bench.machine.identity = |_| Some(0);
    bench.trust(&exporter, 0, share, 11).unwrap();
    bench.import(&importer, 0, 0, share).unwrap();
}

#[test]
fn an_importer_leaves_the_trust_list_when_it_exits() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let importer = bench.session(11);
    let made = bench.create(&exporter, 0, 2 * MIB).unwrap();
    let share = bench.export(&exporter, 0, made.id).unwrap();
    bench.trust(&exporter, 0, share, 11).unwrap();
    bench.import(&importer, 0, 0, share).unwrap();
    bench.exit(&importer);
    assert!(bench.svm.state().shares[0].trusted.is_empty());
}

#[test]
fn two_processes_see_each_others_stores_in_shared_host_memory() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let importer = bench.session(11);
    let id = bench.mapped(&exporter, HOST, VA, 2 * MIB);
    bench.poke(&exporter, VA, b"before");
    let share = bench.export(&exporter, HOST, id).unwrap();
    bench.trust(&exporter, HOST, share, 11).unwrap();
    let got = bench.import(&importer, HOST, HOST, share).unwrap();
    bench.alloc(&importer, VA + 8 * MIB, 2 * MIB).unwrap();
    bench.map(&importer, HOST, got.id, VA + 8 * MIB, 2 * MIB, 1).unwrap();
    assert_eq!(bench.peek(&importer, VA + 8 * MIB), b'b');
    bench.poke(&importer, VA + 8 * MIB + 100, b"x");
    bench.svm.settle_windows(&mut bench.machine);
    assert_eq!(bench.peek(&exporter, VA + 100), b'x');
    bench.exit(&exporter);
    assert_eq!(bench.peek(&importer, VA + 8 * MIB + 100), b'x');
    bench.exit(&importer);
    assert!(bench.svm.state().is_empty());
    assert_eq!(bench.trap(), "");
}
