//! Memory under a name, between this library and a process that uses the driver as the vendor's
//! library does: plain allocations, names, opens.

use crate::support;
use crate::support::processes::{Channel, Peer, start};
use crate::support::raw::ModuleFile;
use crate::support::{MIB2, contents, device, mapped_on, mapped_on_host, open, plain, refused_here};
use ascend_emulator::{Config, isolated, on_each_generation};
use ascend_ioctl::svm::{self, Advice, Op, Para};
use ascend_ioctl::{Generation, davinci};
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, Name};
use ascend_vmm::{Error, Session};
use nix::libc;
use std::os::fd::AsRawFd;

/// A session of the vendor's kind, by bare system calls.
struct Vendor {
    file: ModuleFile,
    generation: Generation,
}

const DEVICE_HEAP: u64 = svm::NORMAL_START + 300 * svm::HEAP_UNIT;
const MANAGED_HEAP: u64 = svm::NORMAL_START + 400 * svm::HEAP_UNIT;

impl Vendor {
    fn open(generation: Generation) -> Vendor {
        let vendor = Vendor { file: ModuleFile::open(davinci::module::SVM), generation };
        vendor.call(Op::AllocProcStruct, &svm::Alloc::default()).unwrap();
        let mut segments = [svm::Segment::default(); 16];
        let array = segments.as_mut_ptr() as u64;
        let info = svm::MmapInfo { segments: 16, array, ..Default::default() };
        let count = vendor.call(Op::GetMmapInfo, &info).unwrap().segments as usize;
        for segment in &segments[..count] {
            let (start, size) = (segment.start as usize as *mut libc::c_void, segment.size as usize);
            // SAFETY: a new mapping at a hint where nothing is mapped.
            let at = unsafe {
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(start, size, prot, libc::MAP_SHARED, vendor.file.as_raw_fd(), 0)
            };
            assert_eq!(at, start);
        }
        vendor.call(Op::InitProcess, &svm::InitProcess::default()).unwrap();
        vendor.call(Op::SetupDevice, &svm::SetupDevice { stats_address: 1, ..Default::default() }).unwrap();
        for (address, sub_kind) in [(DEVICE_HEAP, svm::SUB_DEVICE), (MANAGED_HEAP, svm::SUB_SVM)] {
            let index = ((address - svm::SVM_START) / svm::HEAP_UNIT) as u32;
            let (operation, kind, size) = (svm::HEAP_ENABLE, svm::HEAP_HUGE, svm::HEAP_UNIT);
            vendor.call(Op::UpdateHeap, &svm::UpdateHeap { operation, kind, sub_kind, index, size }).unwrap();
        }
        vendor
    }

    fn call<P: Para>(&self, op: Op, para: &P) -> Result<P, i32> {
        let request = self.generation.svm(op).unwrap().command.request();
        let mut arg = svm::Arg::new(0, para);
        match self.file.ioctl(request, &mut arg) {
            0 => Ok(arg.para()),
            _ => Err(nix::errno::Errno::last_raw()),
        }
    }

    /// Allocates device memory.
    fn allocate(&self, size: u64) {
        self.call(Op::Alloc, &svm::Alloc { address: DEVICE_HEAP, size }).unwrap();
        let advice = (Advice::HUGE | Advice::POPULATE | Advice::LOCK_DEVICE).bits();
        self.call(Op::Advise, &svm::Advise { address: DEVICE_HEAP, size, advice, ..Default::default() }).unwrap();
    }

    fn name(&self, size: u64) -> [u8; 65] {
        let para = svm::IpcCreate { address: DEVICE_HEAP, len: size, name_len: 65, ..Default::default() };
        self.call(Op::IpcMemCreate, &para).unwrap().name
    }

    fn list(&self, name: [u8; 65], pid: i32) {
        let mut para = svm::IpcSetPid { name, num: 1, ..Default::default() };
        para.pids[0] = pid;
        self.call(Op::IpcMemSetPid, &para).unwrap();
    }

    fn open_name(&self, name: [u8; 65]) -> Result<u64, i32> {
        let size = self.call(Op::IpcMemQuery, &svm::IpcQuery { name, ..Default::default() })?.len;
        let address = MANAGED_HEAP;
        self.call(Op::Alloc, &svm::Alloc { address, size }).unwrap();
        self.call(Op::IpcMemOpen, &svm::IpcOpen { address, name, ..Default::default() })?;
        self.call(Op::Prefetch, &svm::Advise { address, size, ..Default::default() })?;
        Ok(address)
    }

    fn close_name(&self) {
        self.call(Op::IpcMemClose, &svm::IpcClose { address: MANAGED_HEAP }).unwrap();
        self.call(Op::FreePages, &svm::FreePages { address: MANAGED_HEAP }).unwrap();
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), i32> {
        self.copy(address, bytes.as_ptr() as u64, bytes.len())
    }

    fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.copy(bytes.as_mut_ptr() as u64, address, length).unwrap();
        bytes
    }

    fn copy(&self, destination: u64, source: u64, size: usize) -> Result<(), i32> {
        let (size, direction) = (size as u64, svm::COPY_DETECT);
        let para = svm::Memcpy { destination, source, size, direction, ..Default::default() };
        self.call(Op::Memcpy, &para).map(drop)
    }
}

/// A process of the vendor's kind with 4 MiB under a name, for which it lists this process.
/// `then` runs there afterwards.
fn owner(generation: Generation, then: impl FnOnce(&Vendor, &Channel)) -> (Peer, Name) {
    let peer = start(|channel| {
        let vendor = Vendor::open(generation);
        vendor.allocate(2 * MIB2);
        vendor.write(DEVICE_HEAP, b"the vendor's tensor").unwrap();
        let name = vendor.name(2 * MIB2);
        vendor.list(name, channel.receive_tgid().as_raw());
        channel.send_bytes(&name);
        then(&vendor, channel);
    });
    peer.send_tgid();
    let name = Name::from_bytes(peer.receive_bytes::<65>()).unwrap();
    (peer, name)
}

#[test]
fn memory_of_a_vendor_process_is_opened_read_written_and_closed() {
    on_each_generation(plain(), |generation, emulator| {
        let (peer, name) = owner(generation, |vendor, channel| {
            channel.wait();
            assert_eq!(vendor.read(DEVICE_HEAP + MIB2, 5), b"hello");
            channel.signal();
        });
        let memory = share::open_named(&device(0), &name).unwrap();
        assert_eq!((memory.size(), memory.name(), memory.location().0), (2 * MIB2, name, 0));
        let mut bytes = [0; 19];
        memory.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"the vendor's tensor");
        memory.write(MIB2, b"hello").unwrap();
        peer.signal();
        peer.wait();
        memory.close().unwrap();
        peer.join();
        assert_eq!(emulator.state().memory.names, 0);
    });
}

#[test]
fn a_vendor_process_opens_memory_of_this_library() {
    on_each_generation(plain(), |generation, _| {
        let peer = start(|channel| {
            let vendor = Vendor::open(generation);
            channel.send(std::process::id().into());
            let name = channel.receive_bytes::<65>();
            let address = vendor.open_name(name).unwrap();
            assert_eq!(vendor.read(address, 6), b"shared");
            vendor.write(address + 8, b"back").unwrap();
            vendor.close_name();
        });
        let pid = peer.receive() as u32;
        let mapping = mapped_on(&device(0), MIB2);
        mapping.write(0, b"shared").unwrap();
        let published = mapping.publish().unwrap();
        let session = Session::current().unwrap();
        published.trust(&[share::BareTgid::of_process(&session, pid).unwrap()]).unwrap();
        peer.send_bytes(&published.name().to_bytes());
        peer.join();
        let mut bytes = [0; 4];
        mapping.read(8, &mut bytes).unwrap();
        assert_eq!(&bytes, b"back");
        published.withdraw().unwrap();
        mapping.unmap().unwrap();
    });
}

#[test]
fn a_name_for_a_part_of_several_mappings_opens_as_one_and_keeps_them_mapped() {
    on_each_generation(plain(), |generation, _| {
        let peer = start(|channel| {
            let vendor = Vendor::open(generation);
            channel.send(std::process::id().into());
            let address = vendor.open_name(channel.receive_bytes::<65>()).unwrap();
            assert_eq!(vendor.read(address + MIB2 - 3, 6), b"shared");
            vendor.close_name();
        });
        let pid = peer.receive() as u32;
        let (session, device) = open(0);
        let reservation = session.reserve(3 * MIB2).unwrap();
        let mappings = [0, 1, 2].map(|place| reservation.map(place * MIB2, &device.create(MIB2).unwrap()).unwrap());
        let start = mappings[1].address();
        let slice = session.slice_at(start, 2 * MIB2).unwrap();
        let published = slice.publish().unwrap();
        drop(slice);
        session.slice_at(start + MIB2 - 3, 6).unwrap().write(b"shared").unwrap();
        published.trust(&[share::BareTgid::of_process(&session, pid).unwrap()]).unwrap();
        peer.send_bytes(&published.name().to_bytes());
        peer.join();
        let [first, second, third] = mappings;
        first.unmap().unwrap();
        let second = second.unmap().unwrap_err().object;
        published.withdraw().unwrap();
        second.unmap().unwrap();
        third.unmap().unwrap();
    });
}

#[test]
fn named_memory_is_copied_to_and_from_mapped_memory() {
    on_each_generation(plain(), |generation, _| {
        let (peer, name) = owner(generation, |vendor, channel| {
            channel.wait();
            assert_eq!(vendor.read(DEVICE_HEAP + MIB2, 6), b"vendor");
            channel.signal();
        });
        let device = device(0);
        let memory = share::open_named(&device, &name).unwrap();
        let mapping = mapped_on(&device, MIB2);
        mapping.slice(0, 19).unwrap().copy_from(&memory.slice(0, 19).unwrap()).unwrap();
        assert_eq!(contents(&mapping, 0, 19), b"the vendor's tensor");
        memory.slice(MIB2, 6).unwrap().copy_from(&mapping.slice(4, 6).unwrap()).unwrap();
        refused_here(&memory.slice(2 * MIB2, 1).unwrap_err(), "not inside");
        refused_here(&memory.slice(0, MIB2).unwrap().publish().unwrap_err(), "not mapped memory");
        peer.signal();
        peer.wait();
        drop(memory);
        peer.join();
    });
}

#[test]
fn a_mapping_that_was_found_by_an_address_stays_until_it_is_dropped() {
    isolated(plain(), |_| {
        let mapping = mapped_on(&device(0), MIB2);
        let session = Session::current().unwrap();
        let found = session.mapping(mapping.address() + 5).unwrap();
        assert_eq!((found.address(), found.size()), (mapping.address(), MIB2));
        let mapping = mapping.unmap().unwrap_err().object;
        drop(found);
        let address = mapping.address();
        mapping.unmap().unwrap();
        assert!(session.mapping(address).is_none() && session.mapping(u64::MAX).is_none());
    });
}

#[test]
fn opening_a_name_twice_gives_the_same_memory() {
    isolated(plain(), |_| {
        let (peer, name) = owner(Generation::NEWEST, |_, channel| channel.wait());
        let (session, device) = open(0);
        let first = share::open_named(&device, &name).unwrap();
        let second = share::open_named(&device, &name).unwrap();
        assert_eq!(first.address(), second.address());
        let other = session.device(ascend_vmm::LogicalId(1)).unwrap();
        let error = share::open_named(&other, &name).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        assert!(first.close().is_err());
        drop(second);
        // It can be opened again, for the other device too.
        let again = share::open_named(&other, &name).unwrap();
        drop(again);
        peer.signal();
        peer.join();
    });
}

#[test]
fn the_error_of_an_unlisted_process_says_what_to_do() {
    isolated(plain(), |emulator| {
        let peer = start(|channel| {
            let vendor = Vendor::open(Generation::NEWEST);
            vendor.allocate(MIB2);
            channel.send_bytes(&vendor.name(MIB2));
            channel.wait();
        });
        let name = Name::from_bytes(peer.receive_bytes::<65>()).unwrap();
        let error = share::open_named(&device(0), &name).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EINVAL));
        assert!(error.to_string().contains("not listed"), "{error}");
        peer.signal();
        peer.join();
        let error = share::open_named(&device(0), &name).unwrap_err();
        assert!(error.to_string().contains("no such name"), "{error}");
        assert!(emulator.state().memory.sessions.iter().all(|session| session.heaps.is_empty()));
    });
}

#[test]
fn memory_that_its_owner_freed_is_an_error_not_a_crash() {
    isolated(plain(), |_| {
        let (peer, name) = owner(Generation::NEWEST, |vendor, channel| {
            channel.wait();
            vendor.call(Op::FreePages, &svm::FreePages { address: DEVICE_HEAP }).unwrap();
            channel.pause();
        });
        let memory = share::open_named(&device(0), &name).unwrap();
        peer.signal();
        peer.wait();
        assert_eq!(memory.read(0, &mut [0; 4]).unwrap_err().errno(), Some(Errno::EFAULT));
        memory.close().unwrap();
        peer.signal();
        peer.join();
    });
}

#[test]
fn memory_that_cannot_have_a_name_is_refused_with_the_reason() {
    isolated(plain(), |_| {
        let exported = mapped_on(&device(0), MIB2);
        exported.memory().export().unwrap();
        let own = device(1).create(MIB2).unwrap().export().unwrap();
        own.trust(&[support::own_tgid()]).unwrap();
        let imported = support::mapped(&share::import(&device(0), &own.ticket().unwrap()).unwrap());
        for (mapping, reason) in [(exported, "exported"), (imported, "imported"), (mapped_on_host(MIB2), "host")] {
            let error = mapping.publish().unwrap_err();
            assert!(matches!(error, Error::Invalid(_)), "{error}");
            assert!(error.to_string().contains(reason), "{error}");
        }
    });
}

#[test]
fn a_name_keeps_its_mapping_and_can_be_open_to_any_process() {
    isolated(plain(), |_| {
        let mapping = mapped_on(&device(0), MIB2);
        let published = mapping.publish().unwrap();
        assert!(matches!(mapping.unmap().unwrap_err().error, Error::InUse { .. }));
        published.trust_anyone().unwrap();
        assert!(published.trust(&[share::BareTgid::from_raw(1).unwrap()]).is_err());
        let peer = start(|channel| {
            let name = channel.receive_bytes::<65>();
            let memory = share::open_named(&device(0), &Name::from_bytes(name).unwrap()).unwrap();
            memory.write(0, b"x").unwrap();
        });
        peer.send_bytes(&published.name().to_bytes());
        peer.join();
    });
}

#[test]
fn objects_of_names_can_be_dropped_in_any_order() {
    isolated(Config { devices: 1, ..plain() }, |emulator| {
        let mapping = mapped_on(&device(0), MIB2);
        let (first, second) = (mapping.publish().unwrap(), mapping.publish().unwrap());
        assert_ne!(first.name(), second.name());
        drop(first);
        drop(mapping);
        drop(second);
        assert!(emulator.state().memory.sessions.is_empty());
    });
}

#[test]
fn a_failing_step_of_an_open_leaves_nothing() {
    isolated(plain(), |emulator| {
        let (peer, name) = owner(Generation::NEWEST, |_, channel| channel.wait());
        let (_session, device) = open(0);
        for command in ["IPC_MEM_QUERY", "UPDATE_HEAP", "ALLOC", "IPC_MEM_OPEN", "PREFETCH"] {
            emulator.inject(format!("{command}#1=ENOMEM").parse().unwrap());
            assert_eq!(share::open_named(&device, &name).unwrap_err().errno(), Some(Errno::ENOMEM), "{command}");
            let state = emulator.state().memory;
            let own = state.sessions.iter().find(|it| it.tgid == support::own_pid()).unwrap();
            assert!(own.heaps.is_empty(), "{command}: {own:?}");
        }
        drop(share::open_named(&device, &name).unwrap());
        for command in ["IPC_MEM_CLOSE", "FREE_PAGES", "UPDATE_HEAP"] {
            let memory = share::open_named(&device, &name).unwrap();
            emulator.inject(format!("{command}#1=EBUSY").parse().unwrap());
            let failed = memory.close().unwrap_err();
            assert_eq!(failed.error.errno(), Some(Errno::EBUSY), "{command}");
            failed.object.close().unwrap();
            let memory = share::open_named(&device, &name).unwrap();
            emulator.inject(format!("{command}#1=EBUSY").parse().unwrap());
            drop(memory);
            // The next open undoes what could not be undone.
        }
        peer.signal();
        peer.join();
    });
}

#[test]
fn copies_stay_inside_of_named_memory() {
    isolated(plain(), |emulator| {
        let (peer, name) = owner(Generation::NEWEST, |_, channel| channel.wait());
        let memory = share::open_named(&device(0), &name).unwrap();
        emulator.record();
        for (offset, length) in [(2 * MIB2, 1), (2 * MIB2 - 1, 2), (u64::MAX, 1), (0, 2 * MIB2 as usize + 1)] {
            support::refused_here(&memory.read(offset, &mut vec![0; length]).unwrap_err(), "not inside of");
            support::refused_here(&memory.write(offset, &vec![0; length]).unwrap_err(), "not inside of");
            support::refused_here(&memory.slice(offset, length as u64).unwrap_err(), "not inside of");
        }
        assert!(support::commands(emulator).is_empty(), "the kernel was not called");
        memory.read(2 * MIB2 - 1, &mut [0]).unwrap();
        memory.write(2 * MIB2, &[]).unwrap();
        // A copy that went another way than it should is an error.
        let offset = svm::DATA + std::mem::offset_of!(svm::Memcpy, direction);
        support::inject(emulator, &format!("MEMCPY#1[{offset}]=00000000"));
        support::refused_here(&memory.write(0, b"lost").unwrap_err(), "may have done nothing");
        drop(memory);
        peer.signal();
        peer.join();
    });
}

#[test]
fn a_name_that_could_not_be_closed_is_found_again_and_goes_with_its_device() {
    isolated(plain(), |emulator| {
        let (peer, name) = owner(Generation::NEWEST, |_, channel| channel.wait());
        let (session, device) = open(0);
        let memory = share::open_named(&device, &name).unwrap();
        let address = memory.address();
        support::inject(emulator, "IPC_MEM_CLOSE#1=EBUSY");
        let back = memory.close().unwrap_err().object;
        let again = share::open_named(&device, &name).unwrap();
        assert_eq!((back.address(), again.address()), (address, address));
        // Refused when it is dropped, and when the device is closed, which closes the name.
        support::inject(emulator, "IPC_MEM_CLOSE#1=EBUSY");
        support::inject(emulator, "IPC_MEM_CLOSE#2=EBUSY");
        drop((back, again));
        assert_eq!(session.statistics().left, 1);
        device.close().unwrap();
        emulator.record();
        session.close().unwrap();
        let calls = support::commands(emulator);
        assert!(!calls.contains(&"IPC_MEM_CLOSE") && calls.contains(&"FREE_PAGES"), "{calls:?}");
        peer.signal();
        peer.join();
    });
}

#[test]
fn any_number_of_processes_is_listed_for_a_name() {
    isolated(plain(), |emulator| {
        let mapping = mapped_on(&device(0), MIB2);
        let published = mapping.publish().unwrap();
        let peers: Vec<_> = (0..33).map(|_| start(|channel| channel.wait())).collect();
        let session = Session::current().unwrap();
        let of = |peer: &Peer| share::BareTgid::of_process(&session, peer.pid() as u32).unwrap();
        let all: Vec<_> = peers.iter().map(of).collect();
        emulator.record();
        published.trust(&all).unwrap();
        assert_eq!(support::count(emulator, "IPC_MEM_SET_PID"), 2, "the kernel takes 31 at once");
        peers.into_iter().for_each(|peer| {
            peer.signal();
            peer.join();
        });
    });
}
