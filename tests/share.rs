//! Sharing memory between real processes, on the emulated driver: who may import what, and what is said to those who may not.

mod sharing;

use ascend_emulator::config::{Config, Place};
use ascend_emulator::{Emulator, isolated, on_each_generation};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, BareTgid, FabricHandle, HandleKind, ShareableHandle, Ticket};
use ascend_vmm::{Device, Error, Location, PhysicalMemory, Session};
use sharing::{MIB, Other, Talk, device, in_pid_namespace, plain, read, start, write};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Waits for a ticket, imports it on a device, and looks whether the memory says `secret`; says so.
fn import_secret(talk: &Talk, number: u32) {
    let device = device(number);
    talk.say_who(&device.session());
    let memory = share::import(&device, &talk.hear_ticket()).unwrap();
    assert_eq!(read(&memory, 6), b"secret");
    talk.say(0);
}

/// Memory on a device that says `secret`.
fn secret(device: &Device) -> PhysicalMemory {
    let memory = device.create(4 * MIB).unwrap();
    write(&memory, b"secret");
    memory
}

/// Refused by the kernel for lack of trust.
#[track_caller]
fn not_trusted(result: ascend_vmm::Result<PhysicalMemory>) {
    let error = result.unwrap_err();
    assert_eq!(error.errno(), Some(Errno::EACCES), "{error}");
    assert!(error.to_string().contains("not trusted"), "{error}");
}

/// Refused before the kernel was asked, with these words.
#[track_caller]
fn refused_here<T: std::fmt::Debug>(result: ascend_vmm::Result<T>, words: &str) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error:?}");
    assert!(error.to_string().contains(words), "{words:?} is not in {error}");
}

/// How often a command was given since the recording began.
fn count(emulator: &Emulator, command: &str) -> usize {
    emulator.records().iter().filter(|record| record.cmd == Some(command)).count()
}

#[test]
fn a_process_is_trusted_by_its_pid() {
    on_each_generation(plain(), |_, _| {
        let other = start(|talk| import_secret(talk, 0));
        let bare = other.talk.hear_who();
        let device = device(0);
        let export = secret(&device).export().unwrap();
        let by_pid = BareTgid::of_process(&device.session(), other.pid() as u32).unwrap();
        assert_eq!(by_pid, bare);
        export.trust(&[by_pid]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.join();
    });
}

/// What [`a_child_is_trusted_by_its_handle`] starts: reads a ticket's text from its input, and prints what the memory says.
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
    println!("\nmemory says {}", String::from_utf8(read(&memory, 6)).unwrap());
}

#[test]
fn a_child_is_trusted_by_its_handle() {
    on_each_generation(plain(), |_, _| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["importer_program", "--exact", "--ignored", "--nocapture"])
            .env("IMPORT", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let device = device(0);
        let export = secret(&device).export().unwrap();
        export.trust(&[BareTgid::of_child(&device.session(), &child).unwrap()]).unwrap();
        writeln!(child.stdin.take().unwrap(), "{}", export.ticket().unwrap()).unwrap();
        let lines: Vec<String> = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok).collect();
        assert!(child.wait().unwrap().success(), "{lines:#?}");
        assert!(lines.iter().any(|line| line == "memory says secret"), "{lines:#?}");
    });
}

#[test]
fn a_process_is_trusted_by_the_socket_that_it_connected() {
    on_each_generation(plain(), |_, _| {
        let directory = std::env::temp_dir().join(format!("ascend-vmm-peer-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let listener = UnixListener::bind(directory.join("socket")).unwrap();
        let other = start(|talk| {
            let _socket = UnixStream::connect(directory.join("socket")).unwrap();
            import_secret(talk, 0);
        });
        let (socket, _) = listener.accept().unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
        let device = device(0);
        let export = secret(&device).export().unwrap();
        let peer = BareTgid::of_peer(&device.session(), &socket).unwrap();
        assert_eq!(peer, other.talk.hear_who());
        export.trust(&[peer]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.join();
    });
}

#[test]
fn a_process_is_trusted_by_the_number_that_it_says_itself() {
    on_each_generation(plain(), |_, _| {
        let other = start(|talk| import_secret(talk, 1));
        let export = secret(&device(0)).export().unwrap();
        export.trust(&[other.talk.hear_who()]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.join();
    });
}

#[test]
fn a_process_that_is_not_trusted_gets_nothing_until_it_is() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let device = device(0);
            talk.say_who(&device.session());
            let ticket = talk.hear_ticket();
            not_trusted(share::import(&device, &ticket));
            not_trusted(share::import(&device, ticket.handle));
            not_trusted(share::import(&device.session().host().unwrap(), &ticket));
            talk.pause();
            // Not the process that was trusted meanwhile, but this one is trusted now.
            assert_eq!(read(&share::import(&device, &ticket).unwrap(), 6), b"secret");
        });
        let who = other.talk.hear_who();
        let export = secret(&device(0)).export().unwrap();
        let me = BareTgid::of_this_process(&export.memory().session()).unwrap();
        export.trust(&[me]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        assert_eq!(emulator.state().memory.shares[0].holders, 1, "a refused import holds nothing");
        export.trust(&[who]).unwrap();
        other.talk.say(0);
        other.join();
    });
}

#[test]
fn trust_in_a_process_that_does_not_exist_yet_is_refused_with_the_reason() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let export = device.create(2 * MIB).unwrap().export().unwrap();
        let gone = start(|_| {});
        let pid = gone.pid();
        gone.join();
        refused_here(export.trust(&[BareTgid::from_raw(pid).unwrap()]), "start it first, then trust it");
        refused_here(BareTgid::of_process(&device.session(), pid as u32), "start it first, then trust it");
        assert!(emulator.state().memory.shares[0].trusted.is_empty());
    });
}

#[test]
fn a_thread_is_not_a_process_to_the_trust_list() {
    isolated(plain(), |_| {
        let session = device(0).session();
        let tid = std::thread::spawn(nix::unistd::gettid);
        // The thread waits to be joined, or is gone: either way its number is no process's.
        let tid = tid.join().unwrap().as_raw() as u32;
        assert!(BareTgid::of_process(&session, tid).is_err());
        std::thread::scope(|scope| {
            let (say, hear) = std::sync::mpsc::channel();
            let (done, end) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || {
                say.send(nix::unistd::gettid().as_raw() as u32).unwrap();
                let _ = end.recv();
            });
            let alive = hear.recv().unwrap();
            refused_here(BareTgid::of_process(&session, alive), "is a thread of process");
            drop(done);
        });
        for none in [0, u32::MAX] {
            refused_here(BareTgid::of_process(&session, none), "is no process id");
        }
    });
}

#[test]
fn the_exporter_has_its_memory_already_and_may_import_it_elsewhere_if_it_trusts_itself() {
    on_each_generation(plain(), |_, _| {
        let (here, there) = (device(0), device(1));
        let session = here.session();
        let export = secret(&here).export().unwrap();
        let ticket = export.ticket().unwrap();
        refused_here(share::import(&here, &ticket), "this process exported it itself, on device 0");
        // A bare handle does not say whose it is; the kernel does.
        refused_here(share::import(&here, ticket.handle), "this process exported it itself, on device 0");
        assert!(!export.trusts_anyone().unwrap());

        not_trusted(share::import(&there, &ticket));
        export.trust(&[BareTgid::of_this_process(&session).unwrap()]).unwrap();
        let elsewhere = share::import(&there, &ticket).unwrap();
        assert!(elsewhere.is_imported());
        assert_eq!(elsewhere.location(), Location::Device(LogicalId(1)));
        assert_eq!(read(&elsewhere, 6), b"secret");
        write(&elsewhere, b"SECRET");
        assert_eq!(read(export.memory(), 6), b"SECRET");
        refused_here(elsewhere.export(), "forward its ticket");
    });
}

#[test]
fn importing_the_same_again_gives_the_same_memory_while_it_is_alive() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| {
            let (zero, one) = (device(0), device(1));
            talk.say_who(&zero.session());
            let ticket = talk.hear_ticket();
            let first = share::import(&zero, &ticket).unwrap();
            for again in [share::import(&zero, &ticket), share::import(&zero, ticket.handle)] {
                assert!(again.unwrap().is_same(&first));
            }
            let elsewhere = share::import(&one, &ticket).unwrap();
            assert!(!elsewhere.is_same(&first));
            talk.pause();
            // A mapping is a reference too.
            let reservation = zero.session().reserve(first.size()).unwrap();
            let mapping = reservation.map(0, &first).unwrap();
            drop(first);
            assert!(share::import(&zero, &ticket).unwrap().is_same(&mapping.memory()));
            mapping.unmap().unwrap();
            talk.pause();
            // The last reference is gone, so this is asked of the kernel anew.
            assert_eq!(read(&share::import(&zero, &ticket).unwrap(), 6), b"secret");
        });
        let who = other.talk.hear_who();
        let export = secret(&device(0)).export().unwrap();
        export.trust(&[who]).unwrap();
        emulator.record();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        assert_eq!(count(emulator, "MEM_IMPORT"), 2);
        assert_eq!(emulator.state().memory.shares[0].holders, 3);
        other.talk.say(0);
        other.talk.hear();
        assert_eq!(emulator.state().memory.shares[0].holders, 2);
        other.talk.say(0);
        other.join();
        assert_eq!(count(emulator, "MEM_IMPORT"), 3);
        assert_eq!(count(emulator, "MEM_RELEASE"), 3);
    });
}

#[test]
fn threads_that_import_the_same_at_once_all_get_it() {
    on_each_generation(plain(), |_, _| {
        let other = start(|talk| {
            let device = device(1);
            talk.say_who(&device.session());
            let ticket = talk.hear_ticket();
            let start = std::sync::Barrier::new(4);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        for round in 0..40 {
                            start.wait();
                            let memory = share::import(&device, &ticket).unwrap();
                            assert_eq!(memory.size(), 4 * MIB, "round {round}");
                            // Some drop it while others still want it.
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
        let who = other.talk.hear_who();
        let export = secret(&device(0)).export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.join();
    });
}

#[test]
fn exporting_again_gives_the_same_handle_and_asks_the_kernel_once() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let memory = device.create(2 * MIB).unwrap();
        let reservation = device.session().reserve(2 * MIB).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        emulator.record();
        let handle = memory.export().unwrap().handle();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(mapping.memory().export().unwrap().handle(), handle));
            }
        });
        assert_eq!(count(emulator, "MEM_EXPORT"), 1);
        let second = device.create(2 * MIB).unwrap().export().unwrap();
        assert_ne!(second.handle(), handle, "other memory has another handle");
    });
}

#[test]
fn export_trust_and_import_are_one_ioctl_each() {
    on_each_generation(plain(), |_, emulator| {
        let (here, there) = (device(0), device(1));
        let me = BareTgid::of_this_process(&here.session()).unwrap();
        let share = |memory: &PhysicalMemory| {
            let export = memory.export().unwrap();
            export.trust(&[me]).unwrap();
            share::import(&there, export.handle()).unwrap()
        };
        let first = here.create(2 * MIB).unwrap();
        // The first import of a session asks for the devices' numbers.
        drop(share(&first));
        let memory = here.create(2 * MIB).unwrap();
        emulator.record();
        let imported = share(&memory);
        let calls: Vec<_> = emulator.records().iter().map(|record| record.cmd.unwrap_or(record.call)).collect();
        assert_eq!(calls, ["MEM_EXPORT", "MEM_SET_PID", "MEM_IMPORT"]);
        let ticket = memory.export().unwrap().ticket().unwrap();
        drop(imported);
        let before = emulator.records().len();
        drop(share::import(&there, &ticket).unwrap());
        assert_eq!(emulator.records().len(), before + 2, "a ticket is checked without asking the driver");
    });
}

#[test]
fn with_the_trust_list_off_anyone_may_import() {
    on_each_generation(plain(), |_, emulator| {
        let other = start(|talk| import_secret(talk, 1));
        let who = other.talk.hear_who();
        let export = secret(&device(0)).export().unwrap();
        assert!(!export.trusts_anyone().unwrap());
        export.trust_anyone().unwrap();
        assert!(export.trusts_anyone().unwrap());
        // Saying it again changes nothing, and nobody can be trusted any more than that.
        export.trust_anyone().unwrap();
        let error = export.trust(&[who]).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EPERM));
        assert!(error.to_string().contains("switched off"), "{error}");
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        other.join();
        assert_eq!(emulator.state().memory.shares[0].holders, 1);
    });
}

#[test]
fn the_trust_list_is_turned_off_before_anyone_is_trusted_or_not_at_all() {
    on_each_generation(plain(), |_, _| {
        let export = secret(&device(0)).export().unwrap();
        export.trust(&[BareTgid::of_this_process(&export.memory().session()).unwrap()]).unwrap();
        let error = export.trust_anyone().unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EPERM));
        assert!(error.to_string().contains("only before it trusted anyone"), "{error}");
        assert!(!export.trusts_anyone().unwrap());
    });
}

#[test]
fn a_list_of_processes_goes_in_batches_of_65535() {
    on_each_generation(plain(), |_, emulator| {
        let export = device(0).create(2 * MIB).unwrap().export().unwrap();
        let me = BareTgid::of_this_process(&export.memory().session()).unwrap();
        emulator.record();
        export.trust(&[]).unwrap();
        assert_eq!(count(emulator, "MEM_SET_PID"), 0, "nobody to trust, nothing to ask");
        export.trust(&vec![me; 65_535]).unwrap();
        assert_eq!(count(emulator, "MEM_SET_PID"), 1);
        export.trust(&vec![me; 65_536]).unwrap();
        assert_eq!(count(emulator, "MEM_SET_PID"), 3);
        assert_eq!(emulator.state().memory.shares[0].trusted, [me.as_raw()]);
    });
}

#[test]
fn host_memory_is_shared_with_the_cpu_and_with_devices() {
    on_each_generation(plain(), |_, _| {
        let other = start(|talk| {
            let device = device(0);
            let session = device.session();
            talk.say_who(&session);
            let ticket = talk.hear_ticket();
            assert!(ticket.handle.is_host() && ticket.device.is_none());
            let on_host = share::import(&session.host().unwrap(), &ticket).unwrap();
            assert_eq!((on_host.location(), on_host.size()), (Location::Host, 4 * MIB));
            let reservation = session.reserve(4 * MIB).unwrap();
            let mapping = reservation.map(0, &on_host).unwrap();
            let view = mapping.host_view().unwrap();
            let mut bytes = [0; 4];
            view.read(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"host");
            // Written by the CPU here, seen by the CPU there while both have it mapped.
            view.write(4 * MIB as usize - 3, b"end").unwrap();
            talk.pause();
            let on_device = share::import(&device, &ticket).unwrap();
            assert_eq!(on_device.location(), Location::Device(LogicalId(0)));
            assert_eq!(read(&on_device, 4), b"HOST");
        });
        let session = Session::current().unwrap();
        let who = other.talk.hear_who();
        let memory = session.host().unwrap().create(4 * MIB).unwrap();
        let reservation = session.reserve(4 * MIB).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        let view = mapping.host_view().unwrap();
        view.write(0, b"host").unwrap();
        let export = memory.export().unwrap();
        assert_eq!(export.handle().device(), 65);
        assert_eq!(export.fabric_handle(HandleKind::Plain).unwrap().physical, 65);
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        // On hardware at once; the emulated driver carries what two CPUs write to one page between them every few milliseconds.
        let late = Instant::now() + Duration::from_secs(30);
        let mut bytes = [0; 3];
        while &bytes != b"end" {
            assert!(Instant::now() < late, "what the other CPU wrote does not arrive: {bytes:?}");
            view.read(4 * MIB as usize - 3, &mut bytes).unwrap();
        }
        view.write(0, b"HOST").unwrap();
        other.talk.say(0);
        other.join();
    });
}

#[test]
fn device_memory_imported_on_the_host_is_seen_by_the_cpu() {
    on_each_generation(plain(), |_, _| {
        let other = start(|talk| {
            let session = Session::current().unwrap();
            talk.say_who(&session);
            let memory = share::import(&session.host().unwrap(), &talk.hear_ticket()).unwrap();
            assert_eq!(memory.location(), Location::Host);
            let reservation = session.reserve(memory.size()).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            let view = mapping.host_view().unwrap();
            let mut bytes = [0; 6];
            view.read(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"secret");
            view.write(6, b" answer").unwrap();
            talk.say(0);
        });
        let who = other.talk.hear_who();
        let export = secret(&device(1)).export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.hear();
        other.join();
        assert_eq!(read(export.memory(), 13), b"secret answer");
    });
}

#[test]
fn the_vendors_forms_are_as_good_as_a_ticket() {
    on_each_generation(plain(), |_, _| {
        let other = start(|talk| {
            let device = device(0);
            let session = device.session();
            talk.say_who(&session);
            let ticket = talk.hear_ticket();
            let handle = ShareableHandle::from_u64(talk.hear()).unwrap();
            assert_eq!(handle, ticket.handle);
            let mut bytes = [0; FabricHandle::LENGTH];
            for word in bytes.chunks_mut(8) {
                word.copy_from_slice(&talk.hear().to_le_bytes());
            }
            let fabric = FabricHandle::from_bytes(&bytes).unwrap();
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
            // Of another server, which this host cannot reach: not the memory that has the same numbers here.
            let foreign = FabricHandle { sdid: fabric.sdid ^ 1 << 22, ..fabric };
            let _same_numbers = share::import(&device, handle).unwrap();
            assert_eq!(share::import(&device, &foreign).unwrap_err().errno(), Some(Errno::EFAULT));
            let host = session.host().unwrap();
            assert_eq!(share::import(&host, &foreign).unwrap_err().errno(), Some(Errno::EOPNOTSUPP));
        });
        let who = other.talk.hear_who();
        let export = secret(&device(1)).export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.say(export.handle().to_u64());
        assert_eq!(export.handle().to_u64() >> 32, 1);
        let fabric = export.fabric_handle(HandleKind::Fabric).unwrap();
        assert_eq!((fabric.physical, fabric.sdid >> 22), (1, 3), "the emulated host is server 3 of its super pod");
        for word in fabric.to_bytes().chunks(8) {
            other.talk.say(u64::from_le_bytes(word.try_into().unwrap()));
        }
        other.join();
    });
}

/// Two devices on the host; a container that has the second one, as its first.
fn with_container() -> Config {
    Config { places: vec![Place::host(), Place::container(&[1])], ..plain() }
}

/// Puts a process that waits into the container.
fn contain(emulator: &Emulator, other: &Other) {
    let pid = other.pid();
    emulator.control(move |driver| driver.machine.put(pid, 1));
    other.talk.say(0);
}

#[test]
fn an_importer_in_a_container_finds_the_device_under_its_own_number() {
    on_each_generation(with_container(), |_, emulator| {
        let other = start(|talk| {
            talk.hear();
            let device = device(0);
            talk.say_who(&device.session());
            let ticket = talk.hear_ticket();
            assert_eq!(ticket.handle.device(), 1, "the exporter's number of it");
            let memory = share::import(&device, &ticket).unwrap();
            assert_eq!(read(&memory, 6), b"secret");
            let hidden = talk.hear_ticket();
            refused_here(share::import(&device, &hidden), "physical device 0 is not among the devices");
            // A bare handle cannot know: the number means no device here.
            drop(memory);
            assert_eq!(share::import(&device, ticket.handle).unwrap_err().errno(), Some(Errno::EINVAL));
        });
        contain(emulator, &other);
        let who = other.talk.hear_who();
        let (visible, hidden) = (secret(&device(1)).export().unwrap(), secret(&device(0)).export().unwrap());
        visible.trust(&[who]).unwrap();
        hidden.trust(&[who]).unwrap();
        other.talk.say_ticket(&visible.ticket().unwrap());
        other.talk.say_ticket(&hidden.ticket().unwrap());
        other.join();
    });
}

#[test]
fn an_exporter_in_a_container_is_understood_outside() {
    on_each_generation(with_container(), |_, emulator| {
        let other = start(|talk| {
            talk.hear();
            let export = secret(&device(0)).export().unwrap();
            export.trust(&[talk.hear_who()]).unwrap();
            talk.say_ticket(&export.ticket().unwrap());
            talk.say(export.handle().to_u64());
            for word in export.fabric_handle(HandleKind::Plain).unwrap().to_bytes().chunks(8) {
                talk.say(u64::from_le_bytes(word.try_into().unwrap()));
            }
            talk.pause();
        });
        contain(emulator, &other);
        let device = device(0);
        other.talk.say_who(&device.session());
        let ticket = other.talk.hear_ticket();
        let handle = ShareableHandle::from_u64(other.talk.hear()).unwrap();
        assert_eq!(handle.device(), 0, "the container's number of it");
        let mut bytes = [0; FabricHandle::LENGTH];
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&other.talk.hear().to_le_bytes());
        }
        assert_eq!(read(&share::import(&device, &ticket).unwrap(), 6), b"secret");
        let fabric = FabricHandle::from_bytes(&bytes).unwrap();
        assert_eq!(read(&share::import(&device, &fabric).unwrap(), 6), b"secret");
        // The bare handle names the host's device 0, where there is no such share.
        assert_eq!(share::import(&device, handle).unwrap_err().errno(), Some(Errno::EFAULT));
        other.proceed();
        other.join();
    });
}

#[test]
fn an_importer_in_a_container_may_begin_with_host_memory() {
    on_each_generation(with_container(), |_, emulator| {
        let other = start(|talk| {
            talk.hear();
            let session = Session::current().unwrap();
            talk.say_who(&session);
            let memory = share::import(&session.host().unwrap(), &talk.hear_ticket()).unwrap();
            assert_eq!(memory.location(), Location::Host);
            // Nobody had asked for the container's devices before, and they are still there.
            session.device(LogicalId(0)).unwrap().create(2 * MIB).unwrap();
        });
        contain(emulator, &other);
        let who = other.talk.hear_who();
        let export = Session::current().unwrap().host().unwrap().create(2 * MIB).unwrap().export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.join();
    });
}

#[test]
fn processes_in_pid_namespaces_are_known_by_their_numbers_outside() {
    on_each_generation(plain(), |_, _| {
        let other = start(|talk| {
            let done = in_pid_namespace(|| {
                talk.say(1);
                assert_eq!(std::process::id(), 1);
                let device = device(0);
                let session = device.session();
                talk.say_who(&session);
                let me = BareTgid::of_this_process(&session).unwrap();
                assert_ne!(me.as_raw(), 1);
                assert_eq!(BareTgid::of_process(&session, 1).unwrap(), me);
                let memory = share::import(&device, &talk.hear_ticket()).unwrap();
                assert_eq!(read(&memory, 6), b"secret");
                // Numbers of this namespace mean nothing to the kernel's list, and there is no way to translate them.
                refused_here(BareTgid::of_process(&session, 2), "let the importer send");
                let export = secret(&device).export().unwrap();
                // What an importer says is all there is to go by; it cannot be looked up here.
                let everyone: Vec<_> =
                    (0..65_535).map(|number| BareTgid::from_raw((1 << 24) + number).unwrap()).collect();
                let outside = talk.hear_who();
                export.trust(&[outside]).unwrap();
                let full = export.trust(&everyone);
                assert_eq!(full.unwrap_err().errno(), Some(Errno::EINVAL), "one more than the list can hold");
                let second = secret(&device).export().unwrap();
                second.trust(&everyone).unwrap();
                talk.say_ticket(&export.ticket().unwrap());
                talk.pause();
            });
            if let Err(reason) = done {
                println!("skipped, no pid namespace can be made here: {reason}");
                talk.say(0);
            }
        });
        if other.talk.hear() == 0 {
            return other.join();
        }
        let device = device(0);
        let session = device.session();
        let who = other.talk.hear_who();
        let export = secret(&device).export().unwrap();
        export.trust(&[who]).unwrap();
        other.talk.say_ticket(&export.ticket().unwrap());
        other.talk.say_who(&session);
        let memory = share::import(&device, &other.talk.hear_ticket()).unwrap();
        assert_eq!(read(&memory, 6), b"secret");
        other.proceed();
        other.join();
    });
}
