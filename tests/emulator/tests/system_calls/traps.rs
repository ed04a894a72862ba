//! An action that would crash the real kernel kills the client and fails the test with the trap's
//! name.

use crate::client::Session;
use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, fork, isolated, on_each_generation};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, Op};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;

fn config() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

/// Sets access 0 for the host, then another access: the kernel maps pages that are mapped already,
/// and panics.
fn crash() {
    let session = Session::start(Config::default().generation).unwrap();
    let address = session.heap().unwrap();
    let id = session.create(1).unwrap();
    session.map(address, id, 1).unwrap();
    let set = |access| {
        let access = svm::MemAccess { address, size: svm::HUGE_PAGE, device: svm::HOST_ID, access };
        session.call(Op::MemSetAccess, 0, &access)
    };
    set(svm::ACCESS_NONE).unwrap();
    let _ = set(svm::ACCESS_READ_WRITE);
    eprintln!("the client was not killed");
}

#[test]
#[should_panic(expected = "kernel trap `access-after-access-none`")]
fn a_test_whose_client_crashes_the_kernel_fails_with_the_traps_name() {
    isolated(config(), |emulator| {
        let status = fork(crash).wait();
        assert!(matches!(status, WaitStatus::Signaled(_, Signal::SIGKILL, _)), "{status:?}");
        assert!(emulator.state().is_empty(), "{:?}", emulator.state());
    });
}

#[test]
#[should_panic(expected = "kernel trap `access-after-access-none`")]
fn a_test_that_crashes_the_kernel_itself_fails_with_the_traps_name() {
    isolated(config(), |_| crash());
}

/// One thread reserves and frees addresses while others query them.
fn use_during_alloc() {
    let session = &Session::start(Config::default().generation).unwrap();
    let address = session.heap().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(move || {
                loop {
                    let query = svm::ReserveAddressInfo { address, ..Default::default() };
                    let _ = session.call(Op::ReserveAddrInfoQuery, 0, &query);
                }
            });
        }
        loop {
            session.call(Op::Alloc, 0, &svm::Alloc { address, size: 4 * svm::HUGE_PAGE }).unwrap();
            session.free(address).unwrap();
        }
    });
}

#[test]
#[should_panic(expected = "kernel trap `use-during-alloc`")]
fn a_thread_that_uses_addresses_before_their_alloc_returned_is_found() {
    isolated(config(), |_| {
        let status = fork(use_during_alloc).wait();
        assert!(matches!(status, WaitStatus::Signaled(_, Signal::SIGKILL, _)), "{status:?}");
    });
}

#[test]
fn threads_may_use_one_range_while_another_is_reserved() {
    isolated(config(), |_| {
        fork(|| {
            let session = &Session::start(Config::default().generation).unwrap();
            let address = session.heap().unwrap();
            let id = session.create(1).unwrap();
            session.map(address, id, 1).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(move || {
                        for _ in 0..2000 {
                            let query = svm::ReserveAddressInfo { address, ..Default::default() };
                            session.call(Op::ReserveAddrInfoQuery, 0, &query).unwrap();
                        }
                    });
                }
                let other = address + svm::HUGE_PAGE;
                for _ in 0..2000 {
                    session.call(Op::Alloc, 0, &svm::Alloc { address: other, size: 4 * svm::HUGE_PAGE }).unwrap();
                    session.free(other).unwrap();
                }
            });
        })
        .join();
    });
}

/// Maps the second of two pages of plain device memory for the CPU, and touches a page.
fn touch_beside_a_mapped_part(page: u64) {
    let session = Session::start(Config::default().generation).unwrap();
    let index = ((svm::NORMAL_START - svm::SVM_START) / svm::HEAP_UNIT) as u32;
    let (operation, kind, sub_kind) = (svm::HEAP_ENABLE, svm::HEAP_HUGE, svm::SUB_DEVICE);
    let heap = svm::UpdateHeap { operation, kind, sub_kind, index, size: svm::HEAP_UNIT };
    session.call(Op::UpdateHeap, 0, &heap).unwrap();
    let (address, size) = (svm::NORMAL_START, 2 * svm::HUGE_PAGE);
    session.call(Op::Alloc, 0, &svm::Alloc { address, size }).unwrap();
    session.call(Op::Advise, 0, &svm::Advise { address, size, advice: 0x8c, ..Default::default() }).unwrap();
    let part = svm::RemoteMap {
        src_va: address + svm::HUGE_PAGE,
        size: svm::HUGE_PAGE,
        map_type: 2,
        access: 3,
        ..Default::default()
    };
    session.call(Op::MemRemoteMap, 0, &part).unwrap();
    // SAFETY: the segment is mapped, and nothing else lives there.
    unsafe { ((address + page * svm::HUGE_PAGE) as *mut u64).write_volatile(7) };
}

#[test]
#[should_panic(expected = "kernel trap `touch-of-unmapped-address`")]
fn beside_a_part_that_is_mapped_for_the_cpu_it_sees_nothing() {
    isolated(config(), |_| {
        // It is found when the process ends, at the latest.
        let _ = fork(|| touch_beside_a_mapped_part(0)).wait();
    });
}

#[test]
fn a_part_that_is_mapped_for_the_cpu_is_seen() {
    isolated(config(), |_| fork(|| touch_beside_a_mapped_part(1)).join());
}

/// A session with a handle that is mapped, and its address.
fn mapped(pages: u64) -> (Session, u64) {
    let session = Session::start(Config::default().generation).unwrap();
    let address = session.heap().unwrap();
    let id = session.create(pages).unwrap();
    session.map(address, id, pages).unwrap();
    (session, address)
}

fn remote_map(session: &Session, address: u64) {
    let map = svm::RemoteMap { src_va: address, size: svm::HUGE_PAGE, map_type: 2, ..Default::default() };
    let _ = session.call(Op::MemRemoteMap, 0, &map);
}

fn set_access(session: &Session, address: u64) {
    let (size, device, access) = (svm::HUGE_PAGE, svm::HOST_ID, svm::ACCESS_READ_WRITE);
    let _ = session.call(Op::MemSetAccess, 0, &svm::MemAccess { address, size, device, access });
}

#[test]
#[should_panic(expected = "kernel trap `seen-twice`")]
fn access_for_the_cpu_to_memory_that_it_sees_by_a_remote_mapping_crashes_the_kernel() {
    isolated(config(), |_| {
        let (session, address) = mapped(1);
        remote_map(&session, address);
        set_access(&session, address);
    });
}

#[test]
#[should_panic(expected = "kernel trap `seen-twice`")]
fn a_remote_mapping_of_memory_to_which_the_cpu_has_access_crashes_the_kernel() {
    isolated(config(), |_| {
        let (session, address) = mapped(1);
        set_access(&session, address);
        remote_map(&session, address);
    });
}

#[test]
#[should_panic(expected = "kernel trap `remote-map-inside-page`")]
fn a_remote_mapping_from_inside_a_giant_page_shows_what_lies_behind_it() {
    isolated(Config { host_giant_pages: true, ..config() }, |_| {
        let session = Session::start(Config::default().generation).unwrap();
        let size = svm::GIANT_PAGE;
        // A device's own memory of this kind consists of smaller pages; the host's does not.
        let (side, page, memory) = (svm::SIDE_HOST, svm::PAGE_GIANT, svm::MEMORY_P2P_DDR);
        let create = svm::MemCreate { size, side, page, memory, ..Default::default() };
        let id = session.call(Op::MemCreate, svm::HOST_ID, &create).unwrap().id;
        let export = svm::MemExport { id, ..Default::default() };
        let share = session.call(Op::MemExport, svm::HOST_ID, &export).unwrap().share;
        let value = svm::ShareAttr { no_trust_list: 1, ..Default::default() };
        session.call(Op::MemSetAttr, svm::HOST_ID, &svm::MemSetAttr { share, kind: 0, value }).unwrap();
        let import = svm::MemImport { share, exporter: svm::HOST_ID, ..Default::default() };
        let svm::MemImport { id, side, page, pages, .. } = session.call(Op::MemImport, 0, &import).unwrap();
        let address = svm::NORMAL_START;
        let index = ((address - svm::SVM_START) / svm::HEAP_UNIT) as u32;
        let (operation, kind, sub_kind) = (svm::HEAP_ENABLE, svm::HEAP_HUGE, svm::SUB_RESERVE);
        let heap = svm::UpdateHeap { operation, kind, sub_kind, index, size: 2 * size };
        session.call(Op::UpdateHeap, 0, &heap).unwrap();
        session.call(Op::Alloc, 0, &svm::Alloc { address, size: 2 * size }).unwrap();
        let map = svm::MemMap { address, size, id, side, page, pages, ..Default::default() };
        session.call(Op::MemMap, 0, &map).unwrap();
        remote_map(&session, address + svm::HUGE_PAGE);
    });
}

#[test]
fn memory_of_a_handle_stays_visible_to_the_cpu_until_the_process_ends_if_its_device_is_closed() {
    isolated(config(), |emulator| {
        fork(|| {
            let (session, address) = mapped(1);
            remote_map(&session, address);
            let word = address as *mut u64;
            // SAFETY: the segment is mapped, and nothing else lives there.
            unsafe { word.write_volatile(7) };
            session.call(Op::CloseDevice, 0, &svm::Alloc::default()).unwrap();
            // SAFETY: as above.
            unsafe { word.write_volatile(8) };
            // Other memory at the address is taken for what is mapped for the CPU.
            session.call(Op::SetupDevice, 0, &svm::SetupDevice { stats_address: 1, ..Default::default() }).unwrap();
            map_again(&session, address);
            let map = svm::RemoteMap { src_va: address, size: svm::HUGE_PAGE, map_type: 2, ..Default::default() };
            assert_eq!(session.call(Op::MemRemoteMap, 0, &map).unwrap_err(), Errno::EINVAL);
        })
        .join();
        assert!(emulator.state().is_empty(), "{:?}", emulator.state());
    });
}

/// Maps a new handle in a reservation that exists.
fn map_again(session: &Session, address: u64) {
    let (id, size, side, page) = (session.create(1).unwrap(), svm::HUGE_PAGE, svm::SIDE_DEVICE, svm::PAGE_HUGE);
    let map = svm::MemMap { address, size, id, side, page, pages: 1, ..Default::default() };
    session.call(Op::MemMap, 0, &map).unwrap();
}

/// Disables the heap of memory that the CPU sees, and enables it again.
#[test]
#[should_panic(expected = "kernel trap `seen-twice`")]
fn what_the_cpu_saw_of_a_heap_that_was_disabled_is_still_there() {
    isolated(config(), |_| {
        let (session, address) = mapped(1);
        remote_map(&session, address);
        let index = ((address - svm::SVM_START) / svm::HEAP_UNIT) as u32;
        for operation in [svm::HEAP_DISABLE, svm::HEAP_ENABLE] {
            let (kind, sub_kind, size) = (svm::HEAP_HUGE, svm::SUB_RESERVE, svm::HEAP_UNIT);
            let heap = svm::UpdateHeap { operation, kind, sub_kind, index, size };
            session.call(Op::UpdateHeap, 0, &heap).unwrap();
        }
        session.call(Op::Alloc, 0, &svm::Alloc { address, size: svm::HUGE_PAGE }).unwrap();
        map_again(&session, address);
        remote_map(&session, address);
    });
}

/// An access of MEM_REMOTE_MAP that asks for a read-only mapping.
const READ_ONLY: u32 = 1 << 28;

/// The word of device memory that the CPU sees with an access.
fn seen_with(generation: Generation, access: u32) -> (Session, *mut u64, impl Fn(&Session)) {
    let session = Session::start(generation).unwrap();
    let address = session.heap().unwrap();
    let id = session.create(1).unwrap();
    session.map(address, id, 1).unwrap();
    let map = svm::RemoteMap { src_va: address, size: svm::HUGE_PAGE, map_type: 2, access, ..Default::default() };
    let show = move |session: &Session| {
        session.call(Op::MemRemoteMap, 0, &map).unwrap();
    };
    show(&session);
    (session, address as *mut u64, show)
}

fn remote_unmap(session: &Session, word: *mut u64) {
    let unmap = svm::RemoteUnmap { src_va: word as u64, map_type: 2, ..Default::default() };
    session.call(Op::MemRemoteUnmap, 0, &unmap).unwrap();
}

/// Writes through a window that is read-only.
fn write_to_read_only(generation: Generation, access: u32) -> (Session, *mut u64) {
    let (session, word, _) = seen_with(generation, access);
    // SAFETY: the segment is mapped, and nothing else lives there.
    unsafe { word.write_volatile(7) };
    (session, word)
}

/// Makes no calls until it is killed.
fn wait_for_death() -> ! {
    loop {
        std::thread::park();
    }
}

#[test]
#[should_panic(expected = "kernel trap `write-to-read-only-window`")]
fn on_9_0_0_any_access_makes_a_window_read_only_and_a_write_kills_its_client() {
    isolated(Config { generation: Generation::V9_0_0, ..config() }, |_| {
        let _session = write_to_read_only(Generation::V9_0_0, svm::ACCESS_READ_WRITE);
        wait_for_death();
    });
}

#[test]
#[should_panic(expected = "kernel trap `write-to-read-only-window`")]
fn on_26_1_a_window_is_read_only_if_that_is_asked_for() {
    isolated(Config { generation: Generation::V26_1, ..config() }, |_| {
        let status = fork(|| {
            let _session = write_to_read_only(Generation::V26_1, READ_ONLY);
            wait_for_death();
        })
        .wait();
        assert!(matches!(status, WaitStatus::Signaled(_, Signal::SIGKILL, _)), "{status:?}");
    });
}

#[test]
#[should_panic(expected = "kernel trap `write-to-read-only-window`")]
fn a_write_to_a_read_only_window_is_found_when_the_window_ends() {
    isolated(Config { generation: Generation::V9_0_0, ..config() }, |_| {
        let (session, word) = write_to_read_only(Generation::V9_0_0, 1);
        remote_unmap(&session, word);
    });
}

#[test]
#[should_panic(expected = "kernel trap `write-to-read-only-window`")]
fn a_write_to_a_read_only_window_is_found_when_the_process_ends() {
    isolated(Config { generation: Generation::V9_0_0, ..config() }, |_| {
        let _ = fork(|| drop(write_to_read_only(Generation::V9_0_0, 1))).wait();
    });
}

#[test]
fn a_window_is_written_where_its_access_allows_that() {
    on_each_generation(config(), |generation, _| {
        let accesses: &[u32] = match generation {
            Generation::V8_5_0 => &[0, svm::ACCESS_READ_WRITE, READ_ONLY],
            Generation::V9_0_0 => &[0],
            _ => &[0, svm::ACCESS_READ_WRITE],
        };
        for &access in accesses {
            fork(|| {
                let (session, word, show) = seen_with(generation, access);
                // SAFETY: the segment is mapped, and nothing else lives there.
                unsafe { word.write_volatile(7) };
                remote_unmap(&session, word);
                show(&session);
                // SAFETY: as above.
                assert_eq!(unsafe { word.read_volatile() }, 7, "{generation} {access:#x}");
            })
            .join();
        }
    });
}
