//! Tickets that lead nowhere are told apart, most of them before the kernel is asked.

mod sharing;

use ascend_emulator::config::{Config, Place};
use ascend_emulator::fault::{DeviceFault, Fault};
use ascend_emulator::{Emulator, isolated, on_each_generation};
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid, Ticket, TicketDevice};
use ascend_vmm::{Device, Error, Kind, Location, MemoryKind, Page, Session};
use nix::sys::wait::{WaitStatus, waitpid};
use sharing::{MIB, Talk, device, plain, read, start, write};
use std::time::Duration;

/// A ticket that is good: for memory of this process on device 1, which it may import on device 0.
fn good() -> (share::Export, Device, Ticket) {
    let memory = device(1).create(4 * MIB).unwrap();
    let export = memory.export().unwrap();
    export.trust(&[BareTgid::of_this_process(&memory.session()).unwrap()]).unwrap();
    let ticket = export.ticket().unwrap();
    (export, device(0), ticket)
}

/// Refused, with these words, and without asking the kernel for an import.
#[track_caller]
fn refused_unasked(emulator: &Emulator, device: &Device, ticket: &Ticket, words: &str) {
    let imports = |emulator: &Emulator| emulator.records().iter().filter(|it| it.cmd == Some("MEM_IMPORT")).count();
    let before = imports(emulator);
    let error = share::import(device, ticket).unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error:?}");
    assert!(error.to_string().contains(words), "{words:?} is not in {error}");
    assert_eq!(imports(emulator), before);
}

#[test]
fn a_ticket_says_everything_about_the_memory() {
    on_each_generation(plain(), |generation, _| {
        let (export, there, ticket) = good();
        assert_eq!((ticket.size, ticket.generation), (4 * MIB, generation));
        assert_eq!(ticket.handle, export.handle());
        assert_eq!(ticket.exporter, std::process::id() as i32);
        assert_ne!((ticket.exporter_start, ticket.boot_id), (0, [0; 16]));
        let device = ticket.device.unwrap();
        // Server 3, chip 1, die 0, physical id 1.
        assert_eq!((device.physical, device.sdid), (1, Some(3 << 22 | 1 << 18 | 1)));
        let imported = share::import(&there, &ticket).unwrap();
        assert_eq!((imported.size(), imported.page()), (export.memory().size(), export.memory().page()));
        assert_eq!(imported.memory_kind(), MemoryKind::Hbm);
        assert_eq!(ticket.to_string().parse(), Ok(ticket));
    });
}

#[test]
fn memory_of_every_kind_is_imported_as_what_it_is() {
    on_each_generation(plain(), |_, _| {
        let (here, there) = (device(0), device(1));
        let session = here.session();
        let host = session.host().unwrap();
        let me = BareTgid::of_this_process(&session).unwrap();
        let kind = |page, memory| Kind { page, memory };
        let kinds = [
            here.create_with(4 * MIB, kind(Page::Huge, MemoryKind::P2pHbm)).unwrap(),
            here.create_with(4 * MIB, kind(Page::Huge, MemoryKind::Ddr)).unwrap(),
            here.create_with(2 << 30, kind(Page::Giant, MemoryKind::Hbm)).unwrap(),
            host.create(4 * MIB).unwrap(),
            host.create_on_node(4 * MIB, kind(Page::Huge, MemoryKind::Ddr), 0).unwrap(),
        ];
        for memory in kinds {
            let export = memory.export().unwrap();
            export.trust(&[me]).unwrap();
            let ticket = export.ticket().unwrap();
            let imported = share::import(&there, &ticket).unwrap();
            assert_eq!((imported.size(), imported.memory_kind()), (memory.size(), memory.memory_kind()));
            assert_eq!(imported.page(), memory.page());
            write(&imported, b"kind");
            assert_eq!(read(&memory, 4), b"kind");
            if memory.location() != Location::Host {
                let on_host = share::import(&host, &ticket).unwrap();
                assert_eq!((on_host.size(), on_host.location()), (memory.size(), Location::Host));
            }
        }
    });
}

#[test]
fn a_ticket_of_another_machine_or_of_before_a_reboot_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let (_export, there, ticket) = good();
        emulator.record();
        // The same device at another time of the same machine.
        let mut old = ticket;
        old.boot_id[3] ^= 1;
        refused_unasked(emulator, &there, &old, "this host was rebooted since the ticket was made");
        // Another device: another machine.
        let mut foreign = old;
        foreign.device = Some(TicketDevice { physical: 1, sdid: Some(4 << 22 | 1 << 18 | 1) });
        refused_unasked(emulator, &there, &foreign, "made on another machine");
        foreign.device = Some(TicketDevice { physical: 1, sdid: None });
        refused_unasked(emulator, &there, &foreign, "made on another machine, or on this one before it was rebooted");
        // Host memory has no device by which to know the machine.
        let host = Session::current().unwrap().host().unwrap().create(2 * MIB).unwrap();
        let mut host = host.export().unwrap().ticket().unwrap();
        host.boot_id[0] ^= 1;
        refused_unasked(emulator, &there, &host, "made on another machine, or on this one before it was rebooted");
    });
}

#[test]
fn a_ticket_of_a_device_that_is_not_here_or_is_another_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let (_export, there, ticket) = good();
        emulator.record();
        let mut missing = ticket;
        missing.device = Some(TicketDevice { physical: 7, sdid: None });
        refused_unasked(emulator, &there, &missing, "physical device 7 is not among the devices");
        let mut other = ticket;
        other.device = Some(TicketDevice { physical: 1, sdid: Some(3 << 22 | 2 << 18 | 1) });
        refused_unasked(emulator, &there, &other, "physical device 1 is not the one that the ticket was made on");
    });
}

#[test]
fn a_ticket_whose_exporter_is_gone_says_so_when_the_memory_is_gone_too() {
    on_each_generation(plain(), |_, _| {
        let other = start(|talk| {
            let export = device(0).create(2 * MIB).unwrap().export().unwrap();
            export.trust(&[talk.hear_who()]).unwrap();
            talk.say_ticket(&export.ticket().unwrap());
            talk.hear();
            drop(export);
            talk.pause();
        });
        let here = device(1);
        other.talk.say_who(&here.session());
        let ticket = other.talk.hear_ticket();
        other.talk.say(0);
        other.talk.hear();
        let gone = |words: &str, alive: bool| {
            let error = share::import(&here, &ticket).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EFAULT));
            let text = error.to_string();
            assert!(text.contains(&format!("exported by process {}", ticket.exporter)), "{text}");
            assert_eq!(text.contains(words), !alive, "{text}");
        };
        // It released the memory, and lives.
        gone("not running any more", true);
        other.talk.say(0);
        other.join();
        gone("not running any more", false);
    });
}

#[test]
fn a_ticket_that_lies_about_the_size_gives_nothing() {
    on_each_generation(plain(), |_, emulator| {
        let (_export, there, ticket) = good();
        let mut lie = ticket;
        lie.size = 2 * MIB;
        let error = share::import(&there, &lie).unwrap_err();
        assert!(error.to_string().contains("the ticket says 2097152 bytes, the driver 4194304"), "{error}");
        assert_eq!(emulator.state().memory.shares[0].holders, 1, "what was imported is given back");
        share::import(&there, &ticket).unwrap();
    });
}

#[test]
fn a_release_that_fails_leaves_the_import_where_others_find_it() {
    on_each_generation(plain(), |_, emulator| {
        let (_export, there, ticket) = good();
        let memory = share::import(&there, &ticket).unwrap();
        emulator.inject(Fault::Command { name: "MEM_RELEASE".into(), nth: Some(1), errno: Errno::EBUSY });
        let failed = memory.free().unwrap_err();
        assert_eq!(failed.error.errno(), Some(Errno::EBUSY));
        let again = share::import(&there, &ticket).unwrap();
        assert!(again.is_same(&failed.object));
        drop(failed);
        again.free().unwrap();
        share::import(&there, &ticket).unwrap();
    });
}

#[test]
fn a_device_that_dies_under_an_importer_is_told_and_the_rest_goes_on() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let (here, rest) = (device(1), device(0));
            talk.say_who(&here.session());
            let memory = share::import(&here, &talk.hear_ticket()).unwrap();
            let reservation = here.session().reserve(memory.size()).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            talk.pause();
            let error = mapping.write(0, &[1]).unwrap_err();
            println!("told: {error}");
            assert!(error.errno().is_some() || matches!(error, Error::DeviceProcessDied { .. }), "{error:?}");
            let spared = rest.create(2 * MIB).unwrap();
            write(&spared, b"spared");
            assert_eq!(read(&spared, 6), b"spared");
            talk.pause();
        });
        let who = other.talk.hear_who();
        let memory = device(0).create(2 * MIB).unwrap();
        write(&memory, b"exporter");
        let export = memory.export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        emulator.inject(Fault::Device { device: 1, fault: DeviceFault::Dead });
        other.talk.say(0);
        other.proceed();
        other.join();
        assert_eq!(read(&memory, 8), b"exporter");
    });
}

#[test]
fn two_containers_that_both_call_their_device_0_are_not_confused() {
    // The exporter's container and the importer's have one device each, which both call 0.
    let places = vec![Place::host(), Place::container(&[0]), Place::container(&[1])];
    isolated(Config { places, ..plain() }, |emulator| {
        let importer = start(|talk| {
            talk.hear();
            let device = device(0);
            talk.say_who(&device.session());
            let error = share::import(&device, &talk.hear_ticket()).unwrap_err();
            assert!(error.to_string().contains("physical device 0 is not among the devices"), "{error}");
        });
        let exporter = start(|talk| {
            talk.hear();
            let export = device(0).create(2 * MIB).unwrap().export().unwrap();
            export.trust(&[talk.hear_who()]).unwrap();
            assert_eq!(export.handle().device(), 0);
            talk.say_ticket(&export.ticket().unwrap());
            talk.pause();
        });
        for (other, place) in [(&exporter, 1), (&importer, 2)] {
            let pid = other.pid();
            emulator.control(move |driver| driver.machine.put(pid, place));
            other.talk.say(0);
        }
        exporter.talk.say(importer.talk.hear());
        importer.talk.say_ticket(&exporter.talk.hear_ticket());
        importer.join();
        exporter.proceed();
        exporter.join();
    });
}

/// Forks a process that gets a certain number. Needs the right to choose numbers.
fn fork_as(pid: i32, body: impl FnOnce()) -> Result<nix::unistd::Pid, Errno> {
    let numbers = [pid];
    let mut arguments = nix::libc::clone_args {
        flags: 0,
        pidfd: 0,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: nix::libc::SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: numbers.as_ptr() as u64,
        set_tid_size: 1,
        cgroup: 0,
    };
    // SAFETY: without flags clone3 is a fork; the arguments and the array that they point to live through the call.
    let child =
        unsafe { nix::libc::syscall(nix::libc::SYS_clone3, &raw mut arguments, size_of::<nix::libc::clone_args>()) };
    match Errno::result(child)? {
        0 => {
            let well = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_ok();
            // SAFETY: ends the process, whatever its state.
            unsafe { nix::libc::_exit(if well { 0 } else { 101 }) }
        }
        child => Ok(nix::unistd::Pid::from_raw(child as i32)),
    }
}

#[test]
fn a_process_that_got_the_number_of_a_trusted_one_is_not_trusted() {
    on_each_generation(plain(), |_, _| {
        // This process has no session: the library would not notice a fork that the C library does not know of.
        let exporter = start(|talk| {
            let memory = device(0).create(2 * MIB).unwrap();
            let export = memory.export().unwrap();
            talk.say_ticket(&export.ticket().unwrap());
            for _ in 0..2 {
                export.trust(&[BareTgid::of_process(&memory.session(), talk.hear() as u32).unwrap()]).unwrap();
                talk.say(0);
            }
            talk.hear();
        });
        let ticket = exporter.talk.hear_ticket();
        let trust = |pid: i32| {
            exporter.talk.say(pid as u64);
            exporter.talk.hear();
        };
        // It ends without having imported, so its entry in the list stays.
        let trusted = start(|talk| talk.pause());
        let pid = trusted.pid();
        trust(pid);
        trusted.kill();
        // The emulated driver knows start times in hundredths of a second only: let the next one begin.
        std::thread::sleep(Duration::from_millis(30));
        let (mine, theirs) = Talk::pair();
        let recycled = fork_as(pid, || {
            let device = device(1);
            assert_eq!(BareTgid::of_this_process(&device.session()).unwrap().as_raw(), pid);
            let error = share::import(&device, &ticket).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EACCES), "{error}");
            assert!(error.to_string().contains("listed before it was started"), "{error}");
            theirs.pause();
            // Trusted itself, it may.
            share::import(&device, &ticket).unwrap();
        });
        drop(theirs);
        match recycled {
            Ok(child) => {
                assert_eq!(child.as_raw(), pid);
                mine.hear();
                trust(pid);
                mine.say(0);
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
            }
            // No right to choose, or somebody else got the number.
            Err(errno @ (Errno::EPERM | Errno::EEXIST | Errno::ENOSYS)) => {
                println!("skipped: this environment does not let a process choose its number: {errno}");
            }
            Err(errno) => panic!("clone3: {errno}"),
        }
        exporter.kill();
    });
}
