//! Tickets of memory that is not here: each case has its error, most of them without a system call.

use crate::support::processes::{Channel, fork_with_pid, start};
use crate::support::{
    GIB, MIB, MIB2, count, device, holders, inject, mapped, own_pid, own_tgid, plain, read, refused_here, write,
};
use ascend_emulator::config::{Config, Place};
use ascend_emulator::{Emulator, isolated, on_each_generation};
use ascend_ioctl::svm;
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid, Source, Ticket, TicketDevice};
use ascend_vmm::{Device, Error, Kind, Location, MemoryKind, Page, PhysicalMemory, ReserveOptions, Session};
use std::time::Duration;

/// A valid ticket: for memory of this process on device 1, which it may import on device 0.
fn good() -> (share::Export, Device, Ticket) {
    let memory = device(1).create(4 * MIB).unwrap();
    let export = memory.export().unwrap();
    export.trust(&[own_tgid()]).unwrap();
    let ticket = export.ticket().unwrap();
    (export, device(0), ticket)
}

/// Refused, in these words, and without an import in the kernel.
#[track_caller]
fn refused_without_import(emulator: &Emulator, device: &Device, ticket: &Ticket, words: &str) {
    let before = count(emulator, "MEM_IMPORT");
    refused_here(&share::import(device, ticket).unwrap_err(), words);
    assert_eq!(count(emulator, "MEM_IMPORT"), before);
}

#[test]
fn a_ticket_describes_the_memory_completely() {
    on_each_generation(plain(), |generation, _| {
        let (export, there, ticket) = good();
        assert_eq!((ticket.size, ticket.generation), (4 * MIB, generation));
        assert_eq!(ticket.handle, export.handle());
        assert_eq!(ticket.exporter, own_pid());
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
fn imported_memory_keeps_its_kind() {
    on_each_generation(plain(), |_, _| {
        let (here, there) = (device(0), device(1));
        let session = here.session();
        let host = session.host().unwrap();
        let kind = |page, memory| Kind { page, memory };
        let kinds = [
            here.create_with(4 * MIB, kind(Page::Huge, MemoryKind::P2pHbm)).unwrap(),
            here.create_with(4 * MIB, kind(Page::Huge, MemoryKind::Ddr)).unwrap(),
            here.create_with(2 * GIB, kind(Page::Giant, MemoryKind::Hbm)).unwrap(),
            host.create(4 * MIB).unwrap(),
            host.create_on_node(4 * MIB, kind(Page::Huge, MemoryKind::Ddr), 0).unwrap(),
        ];
        for memory in kinds {
            let export = memory.export().unwrap();
            export.trust(&[own_tgid()]).unwrap();
            let ticket = export.ticket().unwrap();
            let imported = share::import(&there, &ticket).unwrap();
            assert_eq!((imported.size(), imported.memory_kind()), (memory.size(), memory.memory_kind()));
            assert_eq!(imported.page(), memory.page());
            // The driver copies no host memory that a device imported.
            if memory.location() != Location::Host {
                write(&imported, b"kind");
                assert_eq!(read(&memory, 4), b"kind");
                let on_host = share::import(&host, &ticket).unwrap();
                assert_eq!((on_host.size(), on_host.location()), (memory.size(), Location::Host));
            }
        }
    });
}

/// Imports on each side. The host counts its 1 GiB pages; a device counts the 2 MiB pages that its
/// 1 GiB pages consist of, whoever imports them.
#[test]
fn imported_memory_has_the_exporters_pages() {
    on_each_generation(Config { host_giant_pages: true, ..plain() }, |_, emulator| {
        let (here, there) = (device(0), device(1));
        let session = here.session();
        let host = session.host().unwrap();
        let kind = |memory| Kind { page: Page::Giant, memory };
        let shared = |memory: &PhysicalMemory| {
            let export = memory.export().unwrap();
            export.trust(&[own_tgid()]).unwrap();
            export
        };
        let whole = |size| session.reserve_with(size, &ReserveOptions::default().alignment(GIB)).unwrap();

        let of_host = host.create_with(3 * GIB, kind(MemoryKind::P2pDdr)).unwrap();
        let export = shared(&of_host);
        let fabric = export.fabric_handle(share::HandleKind::Fabric).unwrap();
        let ticket = export.ticket().unwrap();
        for source in [Source::from(&ticket), export.handle().into(), (&fabric).into()] {
            let before = session.statistics().physical;
            let imported = share::import(&there, source).unwrap();
            assert_eq!((imported.size(), imported.page()), (3 * GIB, Page::Giant));
            assert_eq!(session.statistics().physical - before, 3 * GIB);
            let addresses = whole(4 * GIB);
            refused_here(&addresses.map(MIB2, &imported).unwrap_err(), "1 GiB");
            let mapping = addresses.map(GIB, &imported).unwrap();
            assert_eq!(mapping.size(), 3 * GIB);
            mapping.unmap().unwrap();
            imported.free().unwrap();
        }

        let of_device = here.create_with(2 * GIB, kind(MemoryKind::Hbm)).unwrap();
        let export = shared(&of_device);
        let imported = share::import(&there, &export.ticket().unwrap()).unwrap();
        assert_eq!((imported.size(), imported.page()), (2 * GIB, Page::Giant));
        refused_here(&whole(3 * GIB).map(MIB2, &imported).unwrap_err(), "1 GiB");
        drop(imported);
        // Firmware may report their real size: the count is the same.
        let offset = svm::DATA + std::mem::offset_of!(svm::MemImport, page);
        inject(emulator, &format!("MEM_IMPORT#1[{offset}]=02000000"));
        let imported = share::import(&there, export.handle()).unwrap();
        assert_eq!((imported.size(), imported.page()), (2 * GIB, Page::Giant));
        whole(2 * GIB).map(0, &imported).unwrap().unmap().unwrap();
        // The host maps what it imported of a device in its own small pages.
        let imported = share::import(&host, export.handle()).unwrap();
        assert_eq!(imported.size(), 2 * GIB);
        let mapping = whole(3 * GIB).map(MIB2, &imported).unwrap();
        write(&of_device, b"kind");
        let mut seen = [0; 4];
        mapping.host_view().unwrap().read(0, &mut seen).unwrap();
        assert_eq!(&seen, b"kind");
    });
}

#[test]
fn a_ticket_of_another_machine_or_of_before_a_reboot_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let (_export, there, ticket) = good();
        emulator.record();
        // The same device, in an earlier boot of the same machine.
        let mut old = ticket;
        old.boot_id[3] ^= 1;
        refused_without_import(emulator, &there, &old, "this host was rebooted since the ticket was made");
        // Another device: another machine.
        let mut foreign = old;
        foreign.device = Some(TicketDevice { physical: 1, sdid: Some(4 << 22 | 1 << 18 | 1) });
        refused_without_import(emulator, &there, &foreign, "made on another machine");
        foreign.device = Some(TicketDevice { physical: 1, sdid: None });
        refused_without_import(
            emulator,
            &there,
            &foreign,
            "made on another machine, or on this one before it was rebooted",
        );
        // Host memory has no device that identifies the machine.
        let host = Session::current().unwrap().host().unwrap().create(MIB2).unwrap();
        let mut host = host.export().unwrap().ticket().unwrap();
        host.boot_id[0] ^= 1;
        refused_without_import(
            emulator,
            &there,
            &host,
            "made on another machine, or on this one before it was rebooted",
        );
    });
}

#[test]
fn a_ticket_of_a_device_that_is_not_here_or_is_another_is_refused() {
    on_each_generation(plain(), |_, emulator| {
        let (_export, there, ticket) = good();
        emulator.record();
        let mut missing = ticket;
        missing.device = Some(TicketDevice { physical: 7, sdid: None });
        refused_without_import(emulator, &there, &missing, "physical device 7 is not among the devices");
        let mut other = ticket;
        other.device = Some(TicketDevice { physical: 1, sdid: Some(3 << 22 | 2 << 18 | 1) });
        refused_without_import(
            emulator,
            &there,
            &other,
            "physical device 1 is not the one that the ticket was made on",
        );
    });
}

#[test]
fn an_import_of_memory_that_is_gone_says_whether_its_exporter_still_runs() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| {
            let export = device(0).create(MIB2).unwrap().export().unwrap();
            export.trust(&[channel.receive_tgid()]).unwrap();
            channel.send_ticket(&export.ticket().unwrap());
            channel.wait();
            drop(export);
            channel.pause();
        });
        let here = device(1);
        other.send_tgid();
        let ticket = other.receive_ticket();
        other.signal();
        other.wait();
        let gone = |words: &str, alive: bool| {
            let error = share::import(&here, &ticket).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EFAULT));
            let text = error.to_string();
            assert!(text.contains(&format!("exported by process {}", ticket.exporter)), "{text}");
            assert_eq!(text.contains(words), !alive, "{text}");
        };
        // It released the memory, and runs.
        gone("not running any more", true);
        other.signal();
        other.join();
        gone("not running any more", false);
    });
}

#[test]
fn a_ticket_with_a_wrong_size_is_refused_and_nothing_stays_imported() {
    on_each_generation(plain(), |_, emulator| {
        let (_export, there, ticket) = good();
        let mut wrong = ticket;
        wrong.size = MIB2;
        let error = share::import(&there, &wrong).unwrap_err();
        assert!(error.to_string().contains("the ticket says 2097152 bytes, the driver 4194304"), "{error}");
        assert_eq!(holders(emulator), 1, "what was imported is released");
        share::import(&there, &ticket).unwrap();
    });
}

#[test]
fn a_device_that_dies_under_an_importer_is_reported_and_the_others_keep_working() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let (here, rest) = (device(1), device(0));
            let mapping = mapped(&channel.import(&here));
            channel.pause();
            let error = mapping.write(0, &[1]).unwrap_err();
            assert!(error.errno().is_some() || matches!(error, Error::DeviceProcessDied { .. }), "{error:?}");
            let spared = rest.create(MIB2).unwrap();
            write(&spared, b"spared");
            assert_eq!(read(&spared, 6), b"spared");
            channel.pause();
        });
        let memory = device(0).create(MIB2).unwrap();
        write(&memory, b"exporter");
        let _export = other.export(&memory);
        other.wait();
        inject(emulator, "device1=dead");
        other.signal();
        other.proceed();
        other.join();
        assert_eq!(read(&memory, 8), b"exporter");
    });
}

#[test]
fn devices_with_the_same_number_in_two_containers_are_not_confused() {
    // The exporter's container and the importer's have one device each, with the number 0 in both.
    let places = vec![Place::host(), Place::container(&[0]), Place::container(&[1])];
    isolated(Config { places, ..plain() }, |emulator| {
        let importer = start(|channel| {
            channel.wait();
            let device = device(0);
            channel.send_tgid();
            let error = share::import(&device, &channel.receive_ticket()).unwrap_err();
            assert!(error.to_string().contains("physical device 0 is not among the devices"), "{error}");
        });
        let exporter = start(|channel| {
            channel.wait();
            let export = device(0).create(MIB2).unwrap().export().unwrap();
            export.trust(&[channel.receive_tgid()]).unwrap();
            assert_eq!(export.handle().device(), 0);
            channel.send_ticket(&export.ticket().unwrap());
            channel.pause();
        });
        for (other, place) in [(&exporter, 1), (&importer, 2)] {
            let pid = other.pid();
            emulator.control(move |driver| driver.machine.put(pid, place));
            other.signal();
        }
        exporter.send(importer.receive());
        importer.send_ticket(&exporter.receive_ticket());
        importer.join();
        exporter.proceed();
        exporter.join();
    });
}

#[test]
fn a_new_process_with_the_pid_of_a_trusted_one_is_not_trusted() {
    on_each_generation(plain(), |_, _| {
        // This process has no session: the library does not notice a fork past the C library.
        let exporter = start(|channel| {
            let memory = device(0).create(MIB2).unwrap();
            let export = memory.export().unwrap();
            channel.send_ticket(&export.ticket().unwrap());
            for _ in 0..2 {
                export.trust(&[BareTgid::of_process(&memory.session(), channel.receive() as u32).unwrap()]).unwrap();
                channel.signal();
            }
            channel.wait();
        });
        let ticket = exporter.receive_ticket();
        let trust = |pid: i32| {
            exporter.send(pid as u64);
            exporter.wait();
        };
        // It ends before it imports, so its entry in the list stays.
        let trusted = start(|channel| channel.pause());
        let pid = trusted.pid();
        trust(pid);
        trusted.kill();
        // Start times count in hundredths of a second: the new process must start in a later one.
        std::thread::sleep(Duration::from_millis(30));
        let (mine, theirs) = Channel::pair();
        let recycled = fork_with_pid(pid, || {
            let device = device(1);
            assert_eq!(BareTgid::of_this_process(&device.session()).unwrap().as_raw(), pid);
            let error = share::import(&device, &ticket).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EACCES), "{error}");
            assert!(error.to_string().contains("listed before it was started"), "{error}");
            theirs.pause();
            // Trusted by itself, it may import.
            share::import(&device, &ticket).unwrap();
        });
        drop(theirs);
        match recycled {
            Ok(child) => {
                mine.wait();
                trust(pid);
                mine.signal();
                child.join();
            }
            Err(reason) => println!("skipped, a process cannot get a certain pid here: {reason}"),
        }
        exporter.kill();
    });
}

#[test]
fn a_second_ticket_is_compared_with_the_existing_import() {
    on_each_generation(plain(), |_, _| {
        let session = Session::open().unwrap();
        let (first, second) = (device(0), device(1));
        let kind = Kind { page: Page::Giant, memory: MemoryKind::Hbm };
        let memory = first.create_with(1 << 30, kind).unwrap();
        let export = memory.export().unwrap();
        export.trust(&[BareTgid::of_this_process(&session).unwrap()]).unwrap();
        let ticket = export.ticket().unwrap();
        // The short form does not say that the pages are parts of larger ones; the ticket does.
        let by_handle = share::import(&second, export.handle()).unwrap();
        let by_ticket = share::import(&second, &ticket).unwrap();
        assert!(by_ticket.is_same(&by_handle));
        assert_eq!((by_ticket.page(), by_handle.page()), (Page::Giant, Page::Giant));
        for (change, words) in [
            ((|ticket: &mut Ticket| ticket.size = 4096) as fn(&mut Ticket), "the ticket says 4096 bytes"),
            (|ticket| ticket.exporter += 1, "an earlier ticket named another"),
        ] {
            let mut lie = ticket;
            change(&mut lie);
            let error = share::import(&second, &lie).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
    });
}

#[test]
fn a_process_with_the_pid_of_an_exporter_that_died_is_not_taken_for_it() {
    isolated(plain(), |_| {
        let (_export, there, ticket) = good();
        let imported = share::import(&there, &ticket).unwrap();
        assert!(share::import(&there, &ticket).unwrap().is_same(&imported));
        // The same number, of a process that started later.
        let mut later = ticket;
        later.exporter_start += 1;
        refused_here(&share::import(&there, &later).unwrap_err(), "an earlier ticket named another");
        let mut other = ticket;
        other.exporter += 1;
        refused_here(&share::import(&there, &other).unwrap_err(), "an earlier ticket named another");
    });
}

#[test]
fn an_import_without_pages_is_an_error_and_a_refused_release_blocks_no_thread() {
    on_each_generation(plain(), |_, emulator| {
        let (export, there, ticket) = good();
        // A handle says no size that could be compared.
        let offset = svm::DATA + std::mem::offset_of!(svm::MemImport, pages);
        inject(emulator, &format!("MEM_IMPORT#1[{offset}]=0000000000000000"));
        refused_here(&share::import(&there, export.handle()).unwrap_err(), "no pages");
        let imported = share::import(&there, &ticket).unwrap();
        inject(emulator, "MEM_RELEASE#1=EBUSY");
        drop(imported);
        // The kernel still has it: a second import is its to refuse, not to be waited for.
        assert_eq!(share::import(&there, &ticket).unwrap_err().errno(), Some(Errno::EFAULT));
    });
}
