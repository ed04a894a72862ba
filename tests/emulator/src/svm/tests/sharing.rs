//! Memory that several processes hold.

use super::*;

#[test]
fn shared_memory_lives_with_its_last_holder() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let importer = bench.session(11);
    bench.setup(&importer, 1).unwrap();
    let id = bench.mapped(&exporter, 0, VA, 2 * MIB);
    bench.memory.write(BUFFER, b"shared").unwrap();
    bench.copy(&exporter, VA, BUFFER, 6).unwrap();
    let share = bench.export(&exporter, 0, id).unwrap();
    assert_eq!(bench.export(&exporter, 0, id), Err(Errno::EINVAL));
    assert_eq!(bench.import(&importer, 1, 0, share).map(drop), Err(Errno::EACCES));
    assert_eq!(bench.import(&importer, 1, 0, share + 1).map(drop), Err(Errno::EFAULT));
    assert_eq!(bench.import(&exporter, 0, 0, share).map(drop), Err(Errno::EACCES));
    assert_eq!(bench.trust(&importer, 0, share, 11), Err(Errno::EACCES));
    bench.trust(&exporter, 0, share, 11).unwrap();
    let got = bench.import(&importer, 1, 0, share).unwrap();
    assert_eq!((got.id, got.side, got.module, got.pages), (1, 1, 33, 1), "the refused import used id 0");
    assert_eq!(bench.import(&importer, 1, 0, share).map(drop), Err(Errno::EFAULT));
    bench.exit(&exporter);
    assert_eq!(bench.svm.used(0), 2 * MIB);
    bench.alloc(&importer, VA, 2 * MIB).unwrap();
    bench.map(&importer, 1, got.id, VA, 2 * MIB, 1).unwrap();
    bench.memory.write(BUFFER, &[0; 6]).unwrap();
    bench.copy(&importer, BUFFER, VA, 6).unwrap();
    let mut bytes = [0; 6];
    bench.memory.read(BUFFER, &mut bytes).unwrap();
    assert_eq!(&bytes, b"shared");
    bench.unmap(&importer, VA).unwrap();
    assert_eq!(bench.release(&importer, 1, got.id, 1), Ok(2));
    assert_eq!(bench.svm.used(0), 0);
    let fresh = bench.create(&importer, 0, 2 * MIB).unwrap();
    assert_eq!(bench.export(&importer, 0, fresh.id), Ok(share + 1));
}

#[test]
fn a_process_that_was_listed_before_it_started_is_refused() {
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
fn without_a_trust_list_anyone_may_import() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let importer = bench.session(11);
    let made = bench.create(&exporter, 0, 2 * MIB).unwrap();
    let share = bench.export(&exporter, 0, made.id).unwrap();
    let value = svm::ShareAttr { no_trust_list: 1, ..Default::default() };
    let para = svm::MemSetAttr { share, kind: 0, value };
    assert_eq!(bench.call(&importer, Op::MemSetAttr, 0, para).map(drop), Err(Errno::EPERM));
    bench.call(&exporter, Op::MemSetAttr, 0, para).unwrap();
    assert_eq!(bench.trust(&exporter, 0, share, 11), Err(Errno::EPERM));
    bench.import(&importer, 0, 0, share).unwrap();
    bench.call(&exporter, Op::MemSetAttr, 0, para).unwrap();
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
    bench.svm.settle_windows();
    assert_eq!(bench.peek(&exporter, VA + 100), b'x');
    bench.exit(&exporter);
    assert_eq!(bench.peek(&importer, VA + 8 * MIB + 100), b'x');
    bench.exit(&importer);
    assert!(bench.svm.state().is_empty());
    assert_eq!(bench.trap(), "");
}
