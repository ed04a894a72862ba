//! Sharing memory between processes: who may import what, under which names, and what the errors
//! say.

use crate::support;
use crate::support::processes::{Channel, Peer, in_pid_namespace, start};
use crate::support::{
    MIB, MIB2, count, device, holders, mapped, own_tgid, plain, read, refused_here, wait_until, write,
};
use ascend_emulator::config::{Config, Place};
use ascend_emulator::{Emulator, isolated, on_each_generation};
use ascend_vmm::LogicalId;
use ascend_vmm::copy::{Rows, write_batch};
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid, FabricHandle, HandleKind, ShareableHandle, Ticket};
use ascend_vmm::{Device, Error, Location, PhysicalMemory, Session};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// Imports on a device what the other process exports, and checks that it contains `secret`.
fn import_secret(channel: &Channel, number: u32) {
    assert_eq!(read(&channel.import(&device(number)), 6), b"secret");
}

/// Memory on a device that contains `secret`.
fn secret(device: &Device) -> PhysicalMemory {
    let memory = device.create(4 * MIB).unwrap();
    write(&memory, b"secret");
    memory
}

/// Refused by the kernel because the importer is not on the trust list.
#[track_caller]
fn not_trusted(result: ascend_vmm::Result<PhysicalMemory>) {
    let error = result.unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EACCES), "{error}");
    assert!(error.to_string().contains("not trusted"), "{error}");
}

#[test]
fn a_process_is_trusted_by_its_pid() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| import_secret(channel, 0));
        let device = device(0);
        let export = secret(&device).export().unwrap();
        let by_pid = BareTgid::of_process(&device.session(), other.pid() as u32).unwrap();
        assert_eq!(by_pid, other.receive_tgid());
        export.trust(&[by_pid]).unwrap();
        other.send_ticket(&export.ticket().unwrap());
        other.join();
    });
}

/// The program of [`a_child_is_trusted_by_its_handle`]: reads a ticket from its input, and prints
/// what the memory contains.
#[test]
#[ignore = "a program that another test starts"]
fn importer_program() {
    if std::env::var_os("IMPORT").is_none() {
        return;
    }
    let device = device(1);
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    let memory = share::import(&device, &line.parse::<Ticket>().unwrap()).unwrap();
    println!("\nmemory contains {}", String::from_utf8(read(&memory, 6)).unwrap());
}

#[test]
fn a_child_is_trusted_by_its_handle() {
    on_each_generation(plain(), |_, _| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["exports::importer_program", "--exact", "--ignored", "--nocapture"])
            .env("IMPORT", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let device = device(0);
        let export = secret(&device).export().unwrap();
        export.trust(&[BareTgid::of_process(&device.session(), child.id()).unwrap()]).unwrap();
        writeln!(child.stdin.take().unwrap(), "{}", export.ticket().unwrap()).unwrap();
        let lines: Vec<String> = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok).collect();
        assert!(child.wait().unwrap().success(), "{lines:#?}");
        assert!(lines.iter().any(|line| line == "memory contains secret"), "{lines:#?}");
    });
}

#[test]
fn a_process_is_trusted_by_the_number_that_it_sends_itself() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| import_secret(channel, 1));
        let _export = other.export(&secret(&device(0)));
        other.join();
    });
}

#[test]
fn a_process_that_is_not_trusted_gets_nothing_until_it_is() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let device = device(0);
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            not_trusted(share::import(&device, &ticket));
            not_trusted(share::import(&device, ticket.handle));
            not_trusted(share::import(&device.session().host().unwrap(), &ticket));
            channel.pause();
            // Now this process is trusted, too.
            assert_eq!(read(&share::import(&device, &ticket).unwrap(), 6), b"secret");
        });
        let importer = other.receive_tgid();
        let export = secret(&device(0)).export().unwrap();
        export.trust(&[own_tgid()]).unwrap();
        other.send_ticket(&export.ticket().unwrap());
        other.wait();
        assert_eq!(holders(emulator), 1, "a refused import holds nothing");
        export.trust(&[importer]).unwrap();
        other.signal();
        other.join();
    });
}

#[test]
fn a_process_that_does_not_exist_cannot_be_trusted() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let export = device.create(MIB2).unwrap().export().unwrap();
        let gone = start(|_| {});
        let pid = gone.pid();
        gone.join();
        let words = "start it first, then trust it";
        refused_here(&export.trust(&[BareTgid::from_raw(pid).unwrap()]).unwrap_err(), words);
        refused_here(&BareTgid::of_process(&device.session(), pid as u32).unwrap_err(), words);
        assert!(emulator.state().memory.shares[0].trusted.is_empty());
    });
}

#[test]
fn a_thread_is_not_a_process_to_the_trust_list() {
    isolated(plain(), |_| {
        let session = device(0).session();
        let tid = std::thread::spawn(nix::unistd::gettid);
        // A thread that has ended: its number belongs to no process.
        let tid = tid.join().unwrap().as_raw() as u32;
        assert!(BareTgid::of_process(&session, tid).is_err());
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let (done, end) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || {
                sender.send(nix::unistd::gettid().as_raw() as u32).unwrap();
                let _ = end.recv();
            });
            let alive = receiver.recv().unwrap();
            refused_here(&BareTgid::of_process(&session, alive).unwrap_err(), "is a thread of process");
            drop(done);
        });
        for none in [0, u32::MAX] {
            refused_here(&BareTgid::of_process(&session, none).unwrap_err(), "is not a process id");
        }
    });
}

#[test]
fn an_exporter_may_import_its_own_memory_on_another_device_if_it_trusts_itself() {
    on_each_generation(plain(), |_, _| {
        let (here, there) = (device(0), device(1));
        let export = secret(&here).export().unwrap();
        let ticket = export.ticket().unwrap();
        let words = "this process exported it itself, on device 0";
        refused_here(&share::import(&here, &ticket).unwrap_err(), words);
        // A bare handle does not name its exporter; the kernel does.
        refused_here(&share::import(&here, ticket.handle).unwrap_err(), words);
        assert!(!export.trusts_anyone().unwrap());

        not_trusted(share::import(&there, &ticket));
        export.trust(&[own_tgid()]).unwrap();
        let elsewhere = share::import(&there, &ticket).unwrap();
        assert!(elsewhere.is_imported());
        assert_eq!(elsewhere.location(), Location::Device(LogicalId(1)));
        assert_eq!(read(&elsewhere, 6), b"secret");
        write(&elsewhere, b"SECRET");
        assert_eq!(read(export.memory(), 6), b"SECRET");
        refused_here(&elsewhere.export().unwrap_err(), "forward its ticket");
    });
}

#[test]
fn importing_again_returns_the_same_memory_as_long_as_it_is_referenced() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let (zero, one) = (device(0), device(1));
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            let first = share::import(&zero, &ticket).unwrap();
            for again in [share::import(&zero, &ticket), share::import(&zero, ticket.handle)] {
                assert!(again.unwrap().is_same(&first));
            }
            let elsewhere = share::import(&one, &ticket).unwrap();
            assert!(!elsewhere.is_same(&first));
            channel.pause();
            // A mapping is a reference, too.
            let mapping = mapped(&first);
            drop(first);
            assert!(share::import(&zero, &ticket).unwrap().is_same(&mapping.memory()));
            mapping.unmap().unwrap();
            channel.pause();
            // The last reference is gone, so this is a new import in the kernel.
            assert_eq!(read(&share::import(&zero, &ticket).unwrap(), 6), b"secret");
        });
        emulator.record();
        let _export = other.export(&secret(&device(0)));
        other.wait();
        assert_eq!(count(emulator, "MEM_IMPORT"), 2);
        assert_eq!(holders(emulator), 3);
        other.signal();
        other.wait();
        assert_eq!(holders(emulator), 2);
        other.signal();
        other.join();
        assert_eq!(count(emulator, "MEM_IMPORT"), 3);
        assert_eq!(count(emulator, "MEM_RELEASE"), 3);
    });
}

#[test]
fn threads_that_import_the_same_at_once_all_get_it() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| {
            let device = device(1);
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            let start = std::sync::Barrier::new(4);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for round in 0..40 {
                            start.wait();
                            let memory = share::import(&device, &ticket).unwrap();
                            assert_eq!(memory.size(), 4 * MIB, "round {round}");
                            // Some drop it while others still import it.
                            match round % 3 {
                                0 => drop(memory),
                                1 => drop(memory.free()),
                                _ => assert!(share::import(&device, &ticket).unwrap().is_same(&memory)),
                            }
                        }
                    });
                }
            });
        });
        let _export = other.export(&secret(&device(0)));
        other.join();
    });
}

#[test]
fn exporting_again_returns_the_same_handle_and_calls_the_kernel_once() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let memory = device.create(MIB2).unwrap();
        let mapping = mapped(&memory);
        emulator.record();
        let handle = memory.export().unwrap().handle();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(mapping.memory().export().unwrap().handle(), handle));
            }
        });
        assert_eq!(count(emulator, "MEM_EXPORT"), 1);
        let second = device.create(MIB2).unwrap().export().unwrap();
        assert_ne!(second.handle(), handle, "other memory has another handle");
    });
}

#[test]
fn with_the_trust_list_off_any_process_may_import() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| import_secret(channel, 1));
        let importer = other.receive_tgid();
        let export = secret(&device(0)).export().unwrap();
        assert!(!export.trusts_anyone().unwrap());
        export.trust_anyone().unwrap();
        assert!(export.trusts_anyone().unwrap());
        // A second time changes nothing, and there is no list any more to add a process to.
        export.trust_anyone().unwrap();
        let error = export.trust(&[importer]).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EPERM));
        assert!(error.to_string().contains("switched off"), "{error}");
        other.send_ticket(&export.ticket().unwrap());
        other.join();
        assert_eq!(holders(emulator), 1);
    });
}

#[test]
fn the_trust_list_can_be_turned_off_only_before_a_process_is_trusted() {
    on_each_generation(plain(), |_, _| {
        let export = secret(&device(0)).export().unwrap();
        export.trust(&[own_tgid()]).unwrap();
        let error = export.trust_anyone().unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EPERM));
        assert!(error.to_string().contains("only before it trusted anyone"), "{error}");
        assert!(!export.trusts_anyone().unwrap());
    });
}

#[test]
fn a_list_of_processes_is_trusted_in_batches_of_65535() {
    on_each_generation(plain(), |_, emulator| {
        let export = device(0).create(MIB2).unwrap().export().unwrap();
        let own = own_tgid();
        emulator.record();
        export.trust(&[]).unwrap();
        assert_eq!(count(emulator, "MEM_SET_PID"), 0, "an empty list needs no call");
        export.trust(&vec![own; 65_535]).unwrap();
        assert_eq!(count(emulator, "MEM_SET_PID"), 1);
        export.trust(&vec![own; 65_536]).unwrap();
        assert_eq!(count(emulator, "MEM_SET_PID"), 3);
        assert_eq!(emulator.state().memory.shares[0].trusted, [own.as_raw()]);
    });
}

#[test]
fn host_memory_is_shared_with_the_cpu_and_with_devices() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| {
            let device = device(0);
            let session = device.session();
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            assert!(ticket.handle.is_host() && ticket.device.is_none());
            let on_host = share::import(&session.host().unwrap(), &ticket).unwrap();
            assert_eq!((on_host.location(), on_host.size()), (Location::Host, 4 * MIB));
            let mapping = mapped(&on_host);
            let view = mapping.host_view().unwrap();
            let mut bytes = [0; 4];
            view.read(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"host");
            // Written by this CPU, read by the other while both have it mapped.
            view.write(4 * MIB as usize - 3, b"end").unwrap();
            channel.pause();
            let on_device = share::import(&device, &ticket).unwrap();
            assert_eq!(on_device.location(), Location::Device(LogicalId(0)));
            // The device can use it; the driver copies nothing of it.
            let there = mapped(&on_device);
            assert!(matches!(there.read(0, &mut bytes), Err(Error::Invalid(_))));
            wait_until("what the other CPU wrote", || {
                view.read(0, &mut bytes).unwrap();
                &bytes == b"HOST"
            });
        });
        let session = Session::current().unwrap();
        let memory = session.host().unwrap().create(4 * MIB).unwrap();
        let mapping = mapped(&memory);
        let view = mapping.host_view().unwrap();
        view.write(0, b"host").unwrap();
        let export = other.export(&memory);
        assert_eq!(export.handle().device(), 65);
        assert_eq!(export.fabric_handle(HandleKind::Plain).unwrap().physical, 65);
        other.wait();
        // On hardware this is immediate; the emulated driver copies what two CPUs write to one page
        // every few milliseconds.
        wait_until("what the other CPU wrote", || {
            let mut bytes = [0; 3];
            view.read(4 * MIB as usize - 3, &mut bytes).unwrap();
            &bytes == b"end"
        });
        view.write(0, b"HOST").unwrap();
        other.signal();
        other.join();
    });
}

#[test]
fn device_memory_imported_on_the_host_is_seen_by_the_cpu() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| {
            let memory = channel.import(&Session::current().unwrap().host().unwrap());
            assert_eq!(memory.location(), Location::Host);
            let mapping = mapped(&memory);
            let view = mapping.host_view().unwrap();
            let mut bytes = [0; 6];
            view.read(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"secret");
            view.write(6, b" answer").unwrap();
        });
        let export = other.export(&secret(&device(1)));
        other.join();
        assert_eq!(read(export.memory(), 13), b"secret answer");
    });
}

#[test]
fn host_memory_imported_on_a_device_is_not_copied_and_the_error_says_why() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|channel| {
            let device = device(0);
            let imported = channel.import(&device);
            let (mapping, own) = (mapped(&imported), mapped(&device.create(2 * MIB).unwrap()));
            let rows = Rows { width: 8, height: 2, pitch: 64, buffer_pitch: 8 };
            let mut bytes = [0; 16];
            let errors = [
                mapping.write(0, b"bytes").unwrap_err(),
                mapping.read(0, &mut bytes).unwrap_err(),
                mapping.fill(0, 16, 1).unwrap_err(),
                mapping.write_async(0, vec![0; 16]).unwrap_err().error,
                mapping.read_async(0, vec![0; 16]).unwrap_err().error,
                mapping.slice(0, 128).unwrap().write_rows(&rows, &bytes).unwrap_err(),
                mapping.slice(0, 128).unwrap().read_rows(&rows, &mut bytes).unwrap_err(),
                mapping.slice(0, 16).unwrap().copy_from(&own.slice(0, 16).unwrap()).unwrap_err(),
                own.slice(0, 16).unwrap().copy_from(&mapping.slice(0, 16).unwrap()).unwrap_err(),
                write_batch(&[(mapping.slice(0, 16).unwrap(), &bytes)]).unwrap_err(),
            ];
            for error in errors {
                assert!(matches!(error, Error::Invalid(_)), "{error}");
                assert!(error.to_string().contains("no host memory that a device imported"), "{error}");
            }
        });
        emulator.record();
        let memory = Session::current().unwrap().host().unwrap().create(2 * MIB).unwrap();
        let _export = other.export(&memory);
        other.join();
        let copies = emulator.records();
        let copied = |name: &str| name.contains("MEMCPY") || name.contains("MEMSET");
        assert!(!copies.iter().any(|record| record.cmd.is_some_and(copied)), "the kernel was asked");
    });
}

#[test]
fn the_vendors_handles_name_the_same_memory_as_a_ticket() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| {
            let device = device(0);
            let session = device.session();
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            let handle = ShareableHandle::from_u64(channel.receive()).unwrap();
            assert_eq!(handle, ticket.handle);
            let fabric = FabricHandle::from_bytes(&channel.receive_bytes::<{ FabricHandle::LENGTH }>()).unwrap();
            assert_eq!((fabric.handle, fabric.kind), (handle, HandleKind::Fabric));
            let first = share::import(&device, handle).unwrap();
            assert_eq!((first.size(), read(&first, 6)), (4 * MIB, b"secret".to_vec()));
            // All forms name the same memory.
            assert!(share::import(&device, &fabric).unwrap().is_same(&first));
            drop(first);
            let second = share::import(&device, &fabric).unwrap();
            assert_eq!(read(&second, 6), b"secret");
            let plain = FabricHandle { kind: HandleKind::Plain, ..fabric };
            drop(second);
            assert_eq!(read(&share::import(&session.host().unwrap(), &plain).unwrap(), 6), b"secret");
            // A handle of another server, which this host cannot reach, does not name the memory
            // that has the same numbers here.
            let foreign = FabricHandle { sdid: fabric.sdid ^ 1 << 22, ..fabric };
            let _same_numbers = share::import(&device, handle).unwrap();
            assert_eq!(share::import(&device, &foreign).unwrap_err().errno(), Some(Errno::EFAULT));
            let host = session.host().unwrap();
            assert_eq!(share::import(&host, &foreign).unwrap_err().errno(), Some(Errno::EOPNOTSUPP));
        });
        let export = other.export(&secret(&device(1)));
        other.send(export.handle().to_u64());
        assert_eq!(export.handle().to_u64() >> 32, 1);
        let fabric = export.fabric_handle(HandleKind::Fabric).unwrap();
        assert_eq!((fabric.physical, fabric.sdid >> 22), (1, 3), "the emulated host is server 3 of its super pod");
        other.send_bytes(&fabric.to_bytes());
        other.join();
    });
}

#[test]
fn a_device_in_no_super_pod_gives_no_fabric_handle_and_can_still_be_shared() {
    on_each_generation(Config { super_pod: false, ..plain() }, |_, _| {
        let memories = [device(0).create(MIB2), Session::current().unwrap().host().unwrap().create(MIB2)];
        for memory in memories.map(|memory| memory.unwrap()) {
            let export = memory.export().unwrap();
            let refused = export.fabric_handle(HandleKind::Fabric).unwrap_err().to_string();
            assert!(refused.contains("in no super pod") && refused.contains("share it on this server"), "{refused}");
            assert_eq!(export.fabric_handle(HandleKind::Plain).unwrap().sdid, u32::MAX);
            export.ticket().unwrap();
        }
    });
}

#[test]
fn the_fabric_handle_of_host_memory_names_this_server() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| {
            channel.send_tgid();
            let fabric = FabricHandle::from_bytes(&channel.receive_bytes::<{ FabricHandle::LENGTH }>()).unwrap();
            // The vendor's library passes kind and super-pod id to the kernel, and so does this: an
            // id of no server would be looked for on another one.
            let host = Session::current().unwrap().host().unwrap();
            assert_eq!(read(&share::import(&host, &fabric).unwrap(), 4), b"host");
            share::import(&device(1), &fabric).unwrap();
            let nowhere = FabricHandle { sdid: u32::MAX - 1, ..fabric };
            assert_eq!(share::import(&device(1), &nowhere).unwrap_err().errno(), Some(Errno::EFAULT));
        });
        let memory = Session::current().unwrap().host().unwrap().create(MIB2).unwrap();
        write(&memory, b"host");
        let export = memory.export().unwrap();
        export.trust(&[other.receive_tgid()]).unwrap();
        let fabric = export.fabric_handle(HandleKind::Fabric).unwrap();
        let first = ascend_vmm::discovery::survey(&support::survey_options()).devices[0].super_pod.unwrap();
        assert_eq!((fabric.physical, fabric.handle.device(), fabric.sdid), (65, 65, first.sdid));
        other.send_bytes(&fabric.to_bytes());
        other.join();
    });
}

/// Two devices on the host, and a container that has the second one as its first.
fn with_container() -> Config {
    Config { places: vec![Place::host(), Place::container(&[1])], ..plain() }
}

/// Moves a process that waits into the container.
fn contain(emulator: &Emulator, other: &Peer) {
    let pid = other.pid();
    emulator.control(move |driver| driver.machine.put(pid, 1));
    other.signal();
}

#[test]
fn an_importer_in_a_container_finds_the_device_under_its_own_number() {
    on_each_generation(with_container(), |_, emulator| {
        let other = start(|channel| {
            channel.wait();
            let device = device(0);
            channel.send_tgid();
            let ticket = channel.receive_ticket();
            assert_eq!(ticket.handle.device(), 1, "as the exporter numbers it");
            let memory = share::import(&device, &ticket).unwrap();
            assert_eq!(read(&memory, 6), b"secret");
            let hidden = channel.receive_ticket();
            refused_here(&share::import(&device, &hidden).unwrap_err(), "physical device 0 is not among the devices");
            // A bare handle has the exporter's number, which is no device here.
            drop(memory);
            assert_eq!(share::import(&device, ticket.handle).unwrap_err().errno(), Some(Errno::EINVAL));
        });
        contain(emulator, &other);
        let _visible = other.export(&secret(&device(1)));
        let hidden = secret(&device(0)).export().unwrap();
        other.send_ticket(&hidden.ticket().unwrap());
        other.join();
    });
}

#[test]
fn an_exporter_in_a_container_is_understood_outside() {
    on_each_generation(with_container(), |_, emulator| {
        let other = start(|channel| {
            channel.wait();
            let export = channel.export(&secret(&device(0)));
            channel.send(export.handle().to_u64());
            channel.send_bytes(&export.fabric_handle(HandleKind::Plain).unwrap().to_bytes());
            channel.pause();
        });
        contain(emulator, &other);
        let device = device(0);
        other.send_tgid();
        let ticket = other.receive_ticket();
        let handle = ShareableHandle::from_u64(other.receive()).unwrap();
        assert_eq!(handle.device(), 0, "as the container numbers it");
        let fabric = FabricHandle::from_bytes(&other.receive_bytes::<{ FabricHandle::LENGTH }>()).unwrap();
        assert_eq!(read(&share::import(&device, &ticket).unwrap(), 6), b"secret");
        assert_eq!(read(&share::import(&device, &fabric).unwrap(), 6), b"secret");
        // The bare handle names the host's device 0, where there is no such share.
        assert_eq!(share::import(&device, handle).unwrap_err().errno(), Some(Errno::EFAULT));
        other.proceed();
        other.join();
    });
}

#[test]
fn the_first_call_of_an_importer_in_a_container_may_be_an_import_of_host_memory() {
    on_each_generation(with_container(), |_, emulator| {
        let other = start(|channel| {
            channel.wait();
            let session = Session::current().unwrap();
            let memory = channel.import(&session.host().unwrap());
            assert_eq!(memory.location(), Location::Host);
            // No call had set up the container's devices before, and they are still there.
            session.device(LogicalId(0)).unwrap().create(MIB2).unwrap();
        });
        contain(emulator, &other);
        let _export = other.export(&Session::current().unwrap().host().unwrap().create(MIB2).unwrap());
        other.join();
    });
}

#[test]
fn processes_in_pid_namespaces_are_known_by_their_numbers_outside() {
    on_each_generation(plain(), |_, _| {
        let other = start(|channel| {
            let done = in_pid_namespace(|| {
                channel.send(1);
                assert_eq!(std::process::id(), 1);
                let device = device(0);
                let session = device.session();
                assert_eq!(read(&channel.import(&device), 6), b"secret");
                let own = own_tgid();
                assert_ne!(own.as_raw(), 1);
                assert_eq!(BareTgid::of_process(&session, 1).unwrap(), own);
                // The kernel's list does not know numbers of this namespace, and nothing here can
                // translate them.
                refused_here(&BareTgid::of_process(&session, 2).unwrap_err(), "let the importer send");
                let export = secret(&device).export().unwrap();
                // The number that an importer sends is trusted as it is: it cannot be looked up
                // here.
                let everyone: Vec<_> =
                    (0..65_535).map(|number| BareTgid::from_raw((1 << 24) + number).unwrap()).collect();
                let outside = channel.receive_tgid();
                export.trust(&[outside]).unwrap();
                let full = export.trust(&everyone);
                assert_eq!(full.unwrap_err().errno(), Some(Errno::EINVAL), "one more than the list can hold");
                let second = secret(&device).export().unwrap();
                second.trust(&everyone).unwrap();
                channel.send_ticket(&export.ticket().unwrap());
                channel.pause();
            });
            if let Err(reason) = done {
                println!("skipped, no pid namespace can be made here: {reason}");
                channel.signal();
            }
        });
        if other.receive() == 0 {
            return other.join();
        }
        let device = device(0);
        let _export = other.export(&secret(&device));
        assert_eq!(read(&other.import(&device), 6), b"secret");
        other.proceed();
        other.join();
    });
}
