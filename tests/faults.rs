//! Every command of a program that uses all of the library, refused by the kernel at every place: nothing hangs, nothing is lost, and the error
//! says what happened.

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator, fork, isolated, on_each_generation};
use ascend_vmm::copy::{Rows, read_batch, write_batch};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid};
use ascend_vmm::{Error, Failed, Generation, Kind, MemoryKind, Page, Result, Session};
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::num::NonZeroUsize;

const MIB2: u64 = 2 << 20;

/// How things are given back.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// By calls, which return the error.
    Explicit,
    /// By drop, from the first to the last.
    Dropped,
}

/// Uses everything once. What was made before an error is dropped.
fn program(end: End) -> Result<()> {
    fn done<T>(failed: Failed<T>) -> Error {
        failed.error
    }
    let session = Session::open()?;
    let device = session.device(LogicalId(0))?;
    let peer = session.device(LogicalId(1))?;
    device.memory_info(MemoryKind::Hbm)?;

    // Memory, addresses, mappings and all kinds of copies.
    let memory = device.create(MIB2)?;
    let reservation = session.reserve(2 * MIB2)?;
    let mapping = reservation.map(0, &memory)?;
    let more = device.create(MIB2)?;
    let second = reservation.map(MIB2, &more)?;
    reservation.slice(MIB2 - 4, 8)?.write(b"abcdefgh")?;
    let mut back = [0; 4];
    second.read(0, &mut back)?;
    assert_eq!(&back, b"efgh");
    mapping.fill(0, 4096, 7)?;
    let rows = Rows { width: 3, height: 5, pitch: 256, buffer_pitch: 4 };
    mapping.slice(0, 4096)?.write_rows(&rows, &[1; 20])?;
    mapping.slice(0, 4096)?.read_rows(&rows, &mut [0; 20])?;
    write_batch(&[(mapping.slice(0, 2)?, b"ab"), (second.slice(8, 3)?, b"cde")])?;
    let mut three = [0; 3];
    read_batch(&mut [(second.slice(8, 3)?, &mut three)])?;
    assert_eq!(&three, b"cde");
    second.slice(0, 64)?.copy_from(&mapping.slice(0, 64)?)?;
    let running = mapping.write_async(64, b"later".to_vec()).map_err(done)?;
    running.wait().map_err(done)?;
    let running = mapping.read_async(64, vec![0; 5]).map_err(done)?;
    match end {
        End::Explicit => assert_eq!(running.wait().map_err(done)?, b"later"),
        End::Dropped => drop(running),
    }
    let _ = mapping.host_view()?;
    mapping.grant(&peer)?;
    assert!(mapping.is_granted(&peer)?);

    // Host memory.
    let host = session.host()?.create(MIB2)?;
    let for_host = session.reserve(MIB2)?;
    let on_host = for_host.map(0, &host)?;
    on_host.slice(0, 64)?.copy_from(&mapping.slice(0, 64)?)?;

    // Sharing, with ourselves on the other device.
    let export = more.export()?;
    export.trust(&[BareTgid::of_this_process(&session)?])?;
    let imported = share::import(&peer, &export.ticket()?)?;
    let for_import = session.reserve(MIB2)?;
    let of_import = for_import.map(0, &imported)?;
    of_import.read(0, &mut back)?;
    assert_eq!(&back, b"ab\x01\x07");

    match end {
        End::Explicit => {
            of_import.unmap().map_err(done)?;
            for_import.free().map_err(done)?;
            imported.free().map_err(done)?;
            drop(export);
            on_host.unmap().map_err(done)?;
            for_host.free().map_err(done)?;
            host.free().map_err(done)?;
            mapping.unmap().map_err(done)?;
            second.unmap().map_err(done)?;
            reservation.free().map_err(done)?;
            memory.free().map_err(done)?;
            more.free().map_err(done)?;
            peer.close().map_err(done)?;
            device.close().map_err(done)?;
            session.close().map_err(done)?;
        }
        End::Dropped => {
            drop(session);
            drop(device);
            drop(peer);
            drop(reservation);
            drop(memory);
            drop(more);
            drop(mapping);
            drop(second);
            drop(host);
            drop(for_host);
            drop(on_host);
            drop(export);
            drop(imported);
            drop(for_import);
            drop(of_import);
        }
    }
    Ok(())
}

/// The commands of the program in order, each with its number among those of its name.
fn positions(emulator: &Emulator, end: End) -> Vec<(&'static str, usize)> {
    emulator.record();
    let before = emulator.records().len();
    program(end).unwrap();
    let mut names: Vec<&'static str> = Vec::new();
    let mut positions = Vec::new();
    for record in &emulator.records()[before..] {
        if let Some(name) = record.cmd.filter(|name| !name.is_empty()) {
            names.push(name);
            positions.push((name, names.iter().filter(|&&other| other == name).count()));
        }
    }
    positions
}

/// What the kernel may well answer to a command.
fn errno(name: &str, position: usize) -> &'static str {
    let all: &[&str] = match name {
        "MEM_UNMAP" | "FREE_PAGES" | "MEM_RELEASE" | "PREPARE_CLOSE_DEVICE" | "CLOSE_DEVICE" => &["EBUSY", "EINVAL"],
        "MEMCPY" | "MEMCPY_2D" | "MEMCPY_BATCH" | "MEMSET8" | "ASYNC_MEMCPY" => &["EFAULT", "ENOMEM", "EINVAL"],
        "MEMCPY_RESULT_REFRESH" => &["ETIMEDOUT", "EINVAL"],
        _ => &["ENOMEM", "EBUSY", "EINVAL", "EFAULT"],
    };
    all[position % all.len()]
}

fn refuse_everywhere(emulator: &Emulator, end: End, step: usize, first: usize) {
    let positions = positions(emulator, end);
    assert!(positions.len() > 60, "{positions:?}");
    let undoing = positions.iter().position(|(name, _)| *name == "MEM_UNMAP").unwrap_or(usize::MAX);
    let mut problems = Vec::new();
    for (position, (name, nth)) in positions.into_iter().enumerate().skip(first).step_by(step) {
        let errno = errno(name, position);
        emulator.inject(format!("{name}#{nth}={errno}").parse().unwrap());
        let result = program(end);
        let state = emulator.state();
        let problem = match result {
            _ if !state.is_empty() => format!("{result:?} left behind: {state:#?}"),
            Ok(()) if is_survived(name, end) => continue,
            // The file through which peer access is withdrawn.
            Ok(()) if name == "OPEN" && position > undoing => continue,
            Ok(()) => "went unnoticed".to_owned(),
            Err(error) if explains(&error, name, errno) => continue,
            Err(error) => format!("is told as {error}"),
        };
        problems.push(format!("{end:?}, call {position}, {name}#{nth}={errno}: {problem}"));
        if !emulator.state().is_empty() {
            break;
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// Whether an error is about this command, and says how it was refused.
fn explains(error: &Error, name: &str, errno: &str) -> bool {
    let text = error.to_string();
    match (name, error) {
        // close(2) then takes every file of the process with it, and whoever uses one is told that.
        ("CLOSE", _) => text.contains("was closed in this process without its CLOSE"),
        ("MEM_CREATE", Error::OutOfMemory(_)) => errno == "ENOMEM",
        // A courier: what it carries is named.
        ("URD", _) => text.contains("P2P") && text.contains(errno),
        // The device's daemon is reached by commands with codes of their own.
        (name, Error::DeviceProcess { .. }) if DIALOGUE.contains(&name) => text.contains("Remedy: "),
        _ => text.contains(name) && error.errno().is_some_and(|number| format!("{number:?}") == errno),
    }
}

/// Commands that start and end a device process. A start that is hung up on is tried again, an end that is not confirmed is logged.
const DIALOGUE: &[&str] =
    &["CONNECT", "SET_SESSION_OWNER", "SEND", "RECV_PEEK", "RECV", "GET_PROCESS_SIGN", "QUERY_DEV_PID"];

/// Commands without which the program goes on: those that undo something in drop, and questions about what a device may not have.
fn is_survived(name: &str, end: End) -> bool {
    match name {
        "UPDATE_HEAP" | "CLOSE" | "URD" => true,
        "QUERY_DEV_PID" | "SEND" | "RECV_PEEK" | "RECV" => true,
        "MEMCPY_RESULT_REFRESH"
        | "MEM_UNMAP"
        | "FREE_PAGES"
        | "MEM_RELEASE"
        | "PREPARE_CLOSE_DEVICE"
        | "CLOSE_DEVICE" => end == End::Dropped,
        _ => false,
    }
}

fn plain() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

#[test]
fn every_command_of_a_program_can_be_refused_and_nothing_is_lost() {
    isolated(plain(), |emulator| refuse_everywhere(emulator, End::Explicit, 1, 0));
}

#[test]
fn every_command_of_a_program_that_only_drops_can_be_refused_and_nothing_is_lost() {
    isolated(plain(), |emulator| refuse_everywhere(emulator, End::Dropped, 1, 0));
}

#[test]
fn some_commands_are_refused_on_each_generation() {
    on_each_generation(plain(), |generation, emulator| {
        refuse_everywhere(emulator, End::Explicit, 5, generation as usize % 5)
    });
}

#[test]
fn every_command_that_starts_and_ends_device_processes_can_be_refused_and_nothing_is_lost() {
    isolated(Config::default(), |emulator| refuse_everywhere(emulator, End::Explicit, 1, 0));
}

#[test]
fn an_import_whose_release_is_refused_is_found_by_the_next_import() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let (device, peer) = (session.device(LogicalId(0)).unwrap(), session.device(LogicalId(1)).unwrap());
        let export = device.create(MIB2).unwrap().export().unwrap();
        export.trust(&[BareTgid::of_this_process(&session).unwrap()]).unwrap();
        let ticket = export.ticket().unwrap();
        let imported = share::import(&peer, &ticket).unwrap();
        emulator.inject("MEM_RELEASE#1=EBUSY".parse().unwrap());
        let imported = imported.free().unwrap_err().object;
        let again = share::import(&peer, &ticket).unwrap();
        assert!(again.is_same(&imported));
        drop(imported);
        again.free().unwrap();
        share::import(&peer, &ticket).unwrap().free().unwrap();
    });
}

#[test]
fn memory_whose_release_was_refused_is_not_exported() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        for memory in [session.host().unwrap().create(MIB2).unwrap(), device.create(MIB2).unwrap()] {
            emulator.inject("MEM_RELEASE#1=EBUSY".parse().unwrap());
            let memory = memory.free().unwrap_err().object;
            let error = memory.export().unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{error}");
            memory.free().unwrap();
        }
    });
}

#[test]
fn a_reservation_into_which_nothing_could_be_mapped_is_still_anybodys() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let (one, other) = (session.device(LogicalId(0)).unwrap(), session.device(LogicalId(1)).unwrap());
        let reservation = session.reserve(MIB2).unwrap();
        emulator.inject("MEM_MAP#1=ENOMEM".parse().unwrap());
        reservation.map(0, &one.create(MIB2).unwrap()).unwrap_err();
        reservation.map(0, &other.create(MIB2).unwrap()).unwrap().unmap().unwrap();
        // From then on it is the other's.
        let error = reservation.map(0, &one.create(MIB2).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    });
}

#[test]
fn memory_that_a_closed_device_would_not_release_is_not_mistaken_for_new_memory() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let other = session.device(LogicalId(1)).unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        let memory = device.create(MIB2).unwrap();
        // Refused when it is dropped, and again when the device is closed, which releases it all the same.
        for nth in 1..=2 {
            emulator.inject(format!("MEM_RELEASE#{nth}=EBUSY").parse().unwrap());
        }
        drop(memory);
        device.close().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        // Handles are numbered from 0 again.
        let memory = device.create(MIB2).unwrap();
        emulator.record();
        other.close().unwrap();
        assert!(!emulator.records().iter().any(|record| record.cmd == Some("MEM_RELEASE")));
        let reservation = session.reserve(MIB2).unwrap();
        reservation.map(0, &memory).unwrap().write(0, b"alive").unwrap();
        drop(reservation);
        memory.free().unwrap();
        device.close().unwrap();
        session.close().unwrap();
    });
}

#[test]
fn a_peer_stays_open_as_long_as_what_it_was_granted() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let (device, peer) = (session.device(LogicalId(0)).unwrap(), session.device(LogicalId(1)).unwrap());
        let reservation = session.reserve(MIB2).unwrap();
        let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
        mapping.grant(&peer).unwrap();
        let peer = peer.close().unwrap_err().object;
        drop(peer);
        assert_eq!(emulator.state().memory.sessions[0].devices.len(), 2);
        mapping.unmap().unwrap();
        assert_eq!(emulator.state().memory.sessions[0].devices.len(), 1);
        assert!(emulator.state().peer_requests.is_empty());
    });
}

#[test]
fn a_copy_whose_end_is_unknown_does_not_keep_the_session_open() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        let reservation = session.reserve(MIB2).unwrap();
        let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
        let running = mapping.write_async(0, vec![1; 4096]).unwrap();
        emulator.inject("MEMCPY_RESULT_REFRESH#1=ETIMEDOUT".parse().unwrap());
        let failed = running.wait().unwrap_err();
        assert!(failed.object.is_none(), "the device may still read the buffer");
        // The kernel keeps the mapping busy, and says so.
        let failed = mapping.unmap().unwrap_err();
        assert!(failed.to_string().contains("EBUSY"), "{failed}");
        drop((failed, reservation, device));
        drop(session);
        assert!(emulator.state().is_empty());
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn any_number_of_empty_rows_is_copied_at_once() {
    on_each_generation(plain(), |_, _| {
        let session = Session::open().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        for memory in [session.host().unwrap().create(MIB2).unwrap(), device.create(MIB2).unwrap()] {
            let reservation = session.reserve(MIB2).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            let slice = mapping.slice(0, MIB2).unwrap();
            let rows = Rows { width: 0, height: u64::MAX, pitch: 0, buffer_pitch: 0 };
            slice.write_rows(&rows, &[]).unwrap();
            slice.read_rows(&rows, &mut []).unwrap();
        }
    });
}

#[test]
fn a_child_that_drops_what_it_inherited_tells_the_driver_nothing() {
    on_each_generation(Config::default(), |_, emulator| {
        let session = Session::open().unwrap();
        let (device, peer) = (session.device(LogicalId(0)).unwrap(), session.device(LogicalId(1)).unwrap());
        let memory = device.create(MIB2).unwrap();
        let host = session.host().unwrap().create(MIB2).unwrap();
        let reservation = session.reserve(2 * MIB2).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        mapping.grant(&peer).unwrap();
        mapping.write(0, b"parent").unwrap();
        let running = mapping.write_async(6, b"later".to_vec()).unwrap();
        let export = memory.export().unwrap();
        let mut all = Some((session, device, peer, memory, host, reservation, mapping, running, export));
        emulator.record();
        let child = fork(|| drop(all.take()));
        let pid = child.pid();
        child.join();
        let records = emulator.records();
        let said = records.iter().filter(|record| record.pid == pid).map(|record| record.cmd.unwrap_or(record.call));
        // Of files and connections, which is refused or does nothing in a child.
        let said: Vec<_> = said.filter(|&call| call != "CLOSE").collect();
        assert!(said.is_empty(), "{said:?}");
        let (_, _, _, _, _, _, mapping, running, _) = all.as_ref().unwrap();
        let mut back = [0; 6];
        mapping.read(0, &mut back).unwrap();
        assert_eq!(&back, b"parent");
        let _ = running;
    });
}

#[test]
fn a_child_that_drops_what_it_inherited_keeps_its_own_session() {
    on_each_generation(Config::default(), |_, _| {
        let session = Session::open().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        let reservation = session.reserve(MIB2).unwrap();
        let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
        let host = session.reserve(MIB2).unwrap();
        let on_host = host.map(0, &session.host().unwrap().create(MIB2).unwrap()).unwrap();
        let mut all = Some((session, device, reservation, mapping, host, on_host));
        let child = fork(|| {
            let inherited = all.take().unwrap();
            let session = Session::open().unwrap();
            let device = session.device(LogicalId(0)).unwrap();
            let host = session.reserve(MIB2).unwrap();
            let own = host.map(0, &session.host().unwrap().create(MIB2).unwrap()).unwrap();
            let in_child = |error: Error| assert!(matches!(error, Error::OtherProcess { .. }), "{error}");
            let theirs = inherited.5.slice(0, 8).unwrap();
            in_child(own.slice(0, 8).unwrap().copy_from(&theirs).unwrap_err());
            in_child(theirs.copy_from(&own.slice(0, 8).unwrap()).unwrap_err());
            drop(theirs);
            assert!(device.enable_peer_access(&inherited.1).is_err());
            assert!(inherited.2.map(0, &device.create(MIB2).unwrap()).is_err());
            assert!(host.map(0, &inherited.3.memory()).is_err());
            drop(inherited);
            own.write(0, b"child").unwrap();
            // Errors are explained from a page of memory that the parent's session had too.
            let reservation = session.reserve(MIB2).unwrap();
            let error = device.create(1 << 50).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
            drop((own, host, reservation, device));
            session.close().unwrap();
        });
        child.join();
        assert!(all.is_some());
    });
}

#[test]
fn a_session_can_be_opened_a_hundred_times() {
    isolated(plain(), |emulator| {
        for round in 0..100 {
            let session = Session::builder().segments(round % 3 != 0).open().unwrap();
            let device = session.device(LogicalId(round % 2)).unwrap();
            let reservation = session.reserve(MIB2).unwrap();
            let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
            mapping.write(0, b"again").unwrap();
            drop((session, device, mapping, reservation));
            assert!(emulator.state().is_empty(), "round {round}");
        }
    });
}

#[test]
fn an_address_space_that_is_too_small_for_the_segments_is_told_and_device_memory_works_without_them() {
    on_each_generation(plain(), |generation, emulator| {
        // The 8 TiB of the first segment fit and the next, which only the newest driver needs, does not; then not even the first.
        let limits = [9 << 40, 1 << 40];
        for limit in limits.into_iter().skip(usize::from(generation != Generation::V26_1)) {
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            // SAFETY: the limit is a live local.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
            let error = Session::open().unwrap_err();
            assert_eq!(error.errno(), Some(Errno::ENOMEM), "{error}");
            assert!(error.to_string().contains("mmap"), "{error}");
            assert!(error.to_string().contains("without address segments"), "{error}");
            assert!(emulator.state().is_empty());
        }
        let session = Session::builder().segments(false).open().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        let reservation = session.reserve(MIB2).unwrap();
        reservation.map(0, &device.create(MIB2).unwrap()).unwrap().write(0, b"works").unwrap();
    });
}

#[test]
fn whatever_lies_where_the_kernel_would_explain_itself_is_left_alone() {
    let protections = [ProtFlags::PROT_NONE, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE];
    on_each_generation(plain(), |_, _| {
        let address = NonZeroUsize::new(ascend_ioctl::klog::SVM_ERRORS as usize).unwrap();
        let length = NonZeroUsize::new(4096).unwrap();
        for protection in protections {
            // SAFETY: without MAP_FIXED only unused addresses are handed out.
            let page = unsafe { mmap_anonymous(Some(address), length, protection, MapFlags::MAP_PRIVATE) }.unwrap();
            assert_eq!(page.addr(), address);
            let session = Session::open().unwrap();
            let device = session.device(LogicalId(0)).unwrap();
            let error =
                device.create_with(MIB2, Kind { memory: MemoryKind::Ddr, page: Page::Huge }).and_then(|memory| {
                    let reservation = session.reserve(MIB2)?;
                    let mapping = reservation.map(0, &memory)?;
                    session.host()?.create_on_node(MIB2, Kind::default(), 60_000)?;
                    drop(mapping);
                    Ok(())
                });
            let error = error.unwrap_err();
            assert_eq!(error.kernel_log().unwrap_or_default(), "", "{error}");
            drop(device);
            session.close().unwrap();
            // SAFETY: the page that was mapped above, of which nothing is borrowed.
            unsafe { munmap(page, 4096) }.unwrap();
        }
    });
}

#[test]
fn a_device_that_dies_takes_its_own_memory_only() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let (dead, alive) = (session.device(LogicalId(0)).unwrap(), session.device(LogicalId(1)).unwrap());
        let reservation = session.reserve(2 * MIB2).unwrap();
        let mapping = reservation.map(0, &dead.create(MIB2).unwrap()).unwrap();
        let more = dead.create(MIB2).unwrap();
        let elsewhere = session.reserve(MIB2).unwrap();
        let survivor = elsewhere.map(0, &alive.create(MIB2).unwrap()).unwrap();
        survivor.write(0, b"alive").unwrap();
        mapping.grant(&alive).unwrap();
        let running = mapping.write_async(0, vec![1; 4096]).unwrap();
        emulator.inject("device0=dead".parse().unwrap());

        // Each says what is wrong, in its own way.
        for error in [
            dead.create(MIB2).unwrap_err(),
            mapping.write(0, b"x").unwrap_err(),
            mapping.read(0, &mut [0]).unwrap_err(),
            mapping.fill(0, 1, 0).unwrap_err(),
        ] {
            assert!(error.errno().is_some() && error.to_string().len() > 40, "{error}");
        }
        drop(running);
        let _ = reservation.map(MIB2, &more);
        let mut back = [0; 5];
        survivor.read(0, &mut back).unwrap();
        assert_eq!(&back, b"alive");
        drop((mapping, more, reservation, dead));
        survivor.write(0, b"still").unwrap();
        drop((survivor, elsewhere, alive));
        drop(session);
        assert!(emulator.state().memory.is_empty(), "{:#?}", emulator.state());
    });
}
