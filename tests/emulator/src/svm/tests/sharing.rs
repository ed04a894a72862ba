//! Memory that several processes share.

use super::*;
use crate::pod::Pod;

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

/// A directory of its own for a pod.
fn pod_directory(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("ascend-pod-{name}-{}", std::process::id()))
}

/// A server of a pod, with a session.
fn server(directory: &std::path::Path, number: u32, tgid: i32) -> (Bench, TestClient) {
    let pod = Pod::join(directory, number).unwrap();
    let mut bench = Bench::with(|config| (config.server, config.pod) = (number, Some(pod)));
    let client = bench.session(tgid);
    (bench, client)
}

/// Imports a share of device 1 of a server on device 0.
fn import_from(bench: &mut Bench, client: &TestClient, server: u32, share: i32) -> Result<svm::MemImport, Errno> {
    let sdid = server << 22 | 1 << 18 | 1;
    let para = svm::MemImport { share, sdid, exporter_physical: 1, kind: svm::HANDLE_FABRIC, ..Default::default() };
    bench.call(client, Op::MemImport, 0, para)
}

#[test]
fn a_server_imports_memory_of_another_one_and_both_see_the_same_bytes() {
    let directory = pod_directory("two");
    let (mut one, exporter) = server(&directory, 1, 10);
    let (mut two, importer) = server(&directory, 2, 20);
    one.setup(&exporter, 1).unwrap();
    let id = one.mapped(&exporter, 1, VA, 4 * MIB);
    one.memory.write(BUFFER, b"from server 1").unwrap();
    one.copy(&exporter, VA + MIB, BUFFER, 13).unwrap();
    let share = one.export(&exporter, 1, id).unwrap();
    assert_eq!(import_from(&mut two, &importer, 1, share + 1).map(drop), Err(Errno::EFAULT), "no such share");
    assert_eq!(import_from(&mut two, &importer, 3, share).map(drop), Err(Errno::EFAULT), "no such server");
    let got = import_from(&mut two, &importer, 1, share).unwrap();
    assert_eq!((got.pages, got.page, got.side), (2, svm::PAGE_HUGE, svm::SIDE_DEVICE));
    two.alloc(&importer, VA, 4 * MIB).unwrap();
    two.map(&importer, 0, got.id, VA, 4 * MIB, 2).unwrap();
    let mut bytes = [0; 13];
    two.copy(&importer, BUFFER, VA + MIB, 13).unwrap();
    two.memory.read(BUFFER, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from server 1");
    two.memory.write(BUFFER, b"from server 2").unwrap();
    two.copy(&importer, VA + 3 * MIB, BUFFER, 13).unwrap();
    one.copy(&exporter, BUFFER, VA + 3 * MIB, 13).unwrap();
    one.memory.read(BUFFER, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from server 2");
    // The memory outlives its exporter, and goes with the last server that holds it.
    one.exit(&exporter);
    one.svm.release(&mut one.machine, exporter.file, false);
    assert_eq!(one.svm.used(1), 4 * MIB);
    two.copy(&importer, BUFFER, VA + 3 * MIB, 13).unwrap();
    two.memory.read(BUFFER, &mut bytes).unwrap();
    assert_eq!(&bytes, b"from server 2");
    two.unmap(&importer, VA).unwrap();
    assert_eq!(two.release(&importer, 0, got.id, 2).unwrap(), svm::RELEASED_IMPORT);
    let deadline = Instant::now() + Duration::from_secs(60);
    while one.svm.used(1) != 0 && Instant::now() < deadline {
        one.svm.free_unheld();
        std::thread::yield_now();
    }
    assert_eq!(one.svm.used(1), 0);
    let _ = std::fs::remove_dir_all(directory);
}

#[test]
fn a_server_that_is_killed_gives_back_what_it_held() {
    let directory = pod_directory("killed");
    let (mut one, exporter) = server(&directory, 1, 10);
    one.setup(&exporter, 1).unwrap();
    let made = one.create(&exporter, 1, 2 * MIB).unwrap();
    let share = one.export(&exporter, 1, made.id).unwrap();
    let (mut two, importer) = server(&directory, 2, 20);
    import_from(&mut two, &importer, 1, share).unwrap();
    drop(two);
    one.exit(&exporter);
    one.svm.release(&mut one.machine, exporter.file, false);
    let deadline = Instant::now() + Duration::from_secs(60);
    while one.svm.used(1) != 0 && Instant::now() < deadline {
        one.svm.free_unheld();
        std::thread::yield_now();
    }
    assert_eq!(one.svm.used(1), 0);
    let _ = std::fs::remove_dir_all(directory);
}

#[test]
fn a_number_in_a_pod_is_taken_once() {
    let directory = pod_directory("numbers");
    let _one = Pod::join(&directory, 1).unwrap();
    assert_eq!(Pod::join(&directory, 1).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    Pod::join(&directory, 2).unwrap();
    let _ = std::fs::remove_dir_all(directory);
}
