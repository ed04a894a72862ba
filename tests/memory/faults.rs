//! Commands that the kernel refuses and devices that die: nothing hangs, nothing is lost, and the
//! error says what happened. A program that uses all of the library is refused at every call.

use crate::support::{MIB2, assert_nothing_left, contents, count, device, inject, mapped_on, open, own_tgid, plain};
use ascend_emulator::{Config, Emulator, isolated, on_each_generation};
use ascend_vmm::LogicalId;
use ascend_vmm::copy::{Rows, read_batch, write_batch};
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid};
use ascend_vmm::{Error, Failed, MemoryKind, Result, Session};

/// How objects are freed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// By calls, which return the error.
    Explicit,
    /// By drop, from the first to the last.
    Dropped,
}

/// Uses every part of the library once. What was made before an error is dropped.
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

    // Sharing, with this process on the other device.
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

/// What the kernel may answer to a command.
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
        inject(emulator, &format!("{name}#{nth}={errno}"));
        let result = program(end);
        let state = emulator.state();
        let problem = match result {
            _ if !state.is_empty() => format!("{result:?} left behind: {state:#?}"),
            Ok(()) if is_survived(name, end) => continue,
            // The file that withdraws peer access.
            Ok(()) if name == "OPEN" && position > undoing => continue,
            Ok(()) => "went unnoticed".to_owned(),
            Err(error) if explains(&error, name, errno) => continue,
            Err(error) => format!("is reported as {error}"),
        };
        problems.push(format!("{end:?}, call {position}, {name}#{nth}={errno}: {problem}"));
        if !emulator.state().is_empty() {
            break;
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

/// True if an error is about this command and says how it was refused.
fn explains(error: &Error, name: &str, errno: &str) -> bool {
    let text = error.to_string();
    match (name, error) {
        // close(2) then closes every file of the process, and the next use of one reports that.
        ("CLOSE", _) => text.contains("was closed in this process without its CLOSE"),
        ("MEM_CREATE", Error::OutOfMemory(_)) => errno == "ENOMEM",
        // URD only forwards: the error names the request that it forwards.
        ("URD", _) => text.contains("P2P") && text.contains(errno),
        // The device's daemon is reached by commands with codes of their own.
        (name, Error::DeviceProcess { failure, .. }) if DIALOGUE.contains(&name) => {
            text.ends_with(failure.remedy()) && failure.remedy().ends_with('.')
        }
        _ => text.contains(name) && error.errno().is_some_and(|number| format!("{number:?}") == errno),
    }
}

/// Commands that start and end a device process. A start whose connection closes is tried again, an
/// end that is not confirmed is logged.
const DIALOGUE: &[&str] =
    &["CONNECT", "SET_SESSION_OWNER", "SEND", "RECV_PEEK", "RECV", "GET_PROCESS_SIGN", "QUERY_DEV_PID"];

/// Commands without which the program continues: those that a drop makes, and queries for features
/// that a device may not have.
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
fn an_import_whose_release_was_refused_is_found_by_the_next_import() {
    on_each_generation(plain(), |_, emulator| {
        let (device, peer) = (device(0), device(1));
        let export = device.create(MIB2).unwrap().export().unwrap();
        export.trust(&[own_tgid()]).unwrap();
        let ticket = export.ticket().unwrap();
        let imported = share::import(&peer, &ticket).unwrap();
        inject(emulator, "MEM_RELEASE#1=EBUSY");
        let failed = imported.free().unwrap_err();
        assert_eq!(failed.error.errno(), Some(Errno::EBUSY));
        let again = share::import(&peer, &ticket).unwrap();
        assert!(again.is_same(&failed.object));
        drop(failed);
        again.free().unwrap();
        share::import(&peer, &ticket).unwrap().free().unwrap();
    });
}

#[test]
fn memory_whose_release_was_refused_is_not_exported() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        for memory in [session.host().unwrap().create(MIB2).unwrap(), device.create(MIB2).unwrap()] {
            inject(emulator, "MEM_RELEASE#1=EBUSY");
            let memory = memory.free().unwrap_err().object;
            let error = memory.export().unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{error}");
            memory.free().unwrap();
        }
    });
}

#[test]
fn a_reservation_belongs_to_no_device_until_a_mapping_succeeds() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let (one, other) = (device(0), device(1));
        let reservation = session.reserve(MIB2).unwrap();
        inject(emulator, "MEM_MAP#1=ENOMEM");
        reservation.map(0, &one.create(MIB2).unwrap()).unwrap_err();
        reservation.map(0, &other.create(MIB2).unwrap()).unwrap().unmap().unwrap();
        // From now on it belongs to the other device.
        let error = reservation.map(0, &one.create(MIB2).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
    });
}

#[test]
fn memory_whose_release_a_closed_device_refused_is_not_mistaken_for_new_memory() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let (other, device) = (device(1), device(0));
        let memory = device.create(MIB2).unwrap();
        // Refused when it is dropped, and again when the device is closed, which releases it
        // anyway.
        for nth in 1..=2 {
            inject(emulator, &format!("MEM_RELEASE#{nth}=EBUSY"));
        }
        drop(memory);
        device.close().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        // Handles are numbered from 0 again.
        let memory = device.create(MIB2).unwrap();
        emulator.record();
        other.close().unwrap();
        assert_eq!(count(emulator, "MEM_RELEASE"), 0);
        let reservation = session.reserve(MIB2).unwrap();
        reservation.map(0, &memory).unwrap().write(0, b"alive").unwrap();
        drop(reservation);
        memory.free().unwrap();
        device.close().unwrap();
        session.close().unwrap();
    });
}

#[test]
fn a_copy_whose_end_is_unknown_does_not_keep_the_session_open() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let reservation = session.reserve(MIB2).unwrap();
        let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
        let running = mapping.write_async(0, vec![1; 4096]).unwrap();
        inject(emulator, "MEMCPY_RESULT_REFRESH#1=ETIMEDOUT");
        let failed = running.wait().unwrap_err();
        assert!(failed.object.is_none(), "the device may still read the buffer");
        // The kernel keeps the mapping busy, and the error says so.
        let failed = mapping.unmap().unwrap_err();
        assert!(failed.to_string().contains("EBUSY"), "{failed}");
        drop((failed, reservation, device));
        drop(session);
        assert_nothing_left(emulator);
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn a_device_that_dies_loses_only_its_own_memory() {
    on_each_generation(plain(), |_, emulator| {
        let session = Session::open().unwrap();
        let (dead, alive) = (device(0), device(1));
        let reservation = session.reserve(2 * MIB2).unwrap();
        let mapping = reservation.map(0, &dead.create(MIB2).unwrap()).unwrap();
        let more = dead.create(MIB2).unwrap();
        let survivor = mapped_on(&alive, MIB2);
        survivor.write(0, b"alive").unwrap();
        mapping.grant(&alive).unwrap();
        let running = mapping.write_async(0, vec![1; 4096]).unwrap();
        inject(emulator, "device0=dead");

        // Each error says what is wrong.
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
        assert_eq!(contents(&survivor, 0, 5), b"alive");
        drop((mapping, more, reservation, dead));
        survivor.write(0, b"still").unwrap();
        drop((survivor, alive));
        drop(session);
        assert!(emulator.state().memory.is_empty(), "{:#?}", emulator.state());
    });
}
