//! Safeguards that other tests do not notice when they are missing: each test here fails if its
//! safeguard is taken out of the library.

use crate::support::events::AtEvent;
use crate::support::processes::start;
use crate::support::{
    Directory, MIB2, PATIENCE, commands, count, device, inject, mapped, mapped_on, mapped_on_host, open, own_tgid,
    plain, refused_here, refused_in_child, survey_options, wait_until,
};
use ascend_emulator::{Config, Emulator, fork, isolated, isolated_leaky, on_each_generation};
use ascend_ioctl::{klog, svm};
use ascend_vmm::copy::{Rows, read_batch, write_batch};
use ascend_vmm::discovery;
use ascend_vmm::error::Errno;
use ascend_vmm::share::{self, Broker, BrokerOptions, HandleKind};
use ascend_vmm::{Error, LogicalId, MemoryKind, Session};
use nix::libc;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::socket::sockopt::PassCred;
use nix::sys::socket::{getsockopt, setsockopt};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The system's allocator, which notes when one address is freed.
struct Watching;

static WATCHED: AtomicUsize = AtomicUsize::new(0);
static FREED: AtomicBool = AtomicBool::new(false);

// SAFETY: the system's allocator does everything.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller vouches for it.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if at.addr() == WATCHED.load(Ordering::Relaxed) {
            FREED.store(true, Ordering::Relaxed);
        }
        // SAFETY: the caller vouches for it.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// A buffer. From now on [`FREED`] tells whether it was freed.
fn watched(size: usize) -> Vec<u8> {
    let buffer = vec![1; size];
    WATCHED.store(buffer.as_ptr().addr(), Ordering::Relaxed);
    FREED.store(false, Ordering::Relaxed);
    buffer
}

#[test]
fn the_buffer_of_a_copy_that_may_still_run_is_never_freed() {
    // The kernel keeps the memory of such a copy busy.
    isolated_leaky(plain(), |emulator| {
        let device = device(0);
        for dropped in [false, true] {
            for read in [false, true] {
                let mapping = mapped_on(&device, MIB2);
                let buffer = watched(12_345);
                let begun = if read { mapping.read_async(0, buffer) } else { mapping.write_async(0, buffer) };
                let running = begun.unwrap();
                inject(emulator, "MEMCPY_RESULT_REFRESH#1=ETIMEDOUT");
                if dropped {
                    drop(running);
                } else {
                    assert!(running.wait().unwrap_err().object.is_none());
                }
                assert!(!FREED.load(Ordering::Relaxed), "dropped {dropped}, read {read}");
            }
        }
        // A copy that has ended frees it.
        let mapping = mapped_on(&device, MIB2);
        drop(mapping.write_async(0, watched(12_345)).unwrap());
        assert!(FREED.load(Ordering::Relaxed));
    });
}

#[test]
fn a_view_of_the_parents_memory_is_refused_in_a_child() {
    on_each_generation(Config::default(), |_, _| {
        let device = device(0);
        for mapping in [mapped_on(&device, MIB2), mapped_on_host(MIB2)] {
            let view = mapping.host_view().unwrap();
            view.write(0, b"parent").unwrap();
            let child = fork(|| {
                for error in [
                    view.read(0, &mut [0; 6]).unwrap_err(),
                    view.read(0, &mut []).unwrap_err(),
                    view.write(0, b"child!").unwrap_err(),
                    view.fill(0, 6, 1).unwrap_err(),
                    view.load_u8(0).unwrap_err(),
                    view.load_u32(0).unwrap_err(),
                    view.load_u64(0).unwrap_err(),
                    view.store_u8(0, 1).unwrap_err(),
                    view.store_u32(0, 1).unwrap_err(),
                    view.store_u64(0, 1).unwrap_err(),
                ] {
                    refused_in_child(&error);
                }
            });
            child.join();
            let mut seen = [0; 6];
            view.read(0, &mut seen).unwrap();
            assert_eq!(&seen, b"parent");
        }
    });
}

#[test]
fn in_a_child_no_call_on_the_parents_objects_reaches_the_kernel() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let peer = session.device(LogicalId(1)).unwrap();
        let memory = device.create(MIB2).unwrap();
        let reservation = session.reserve(2 * MIB2).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        let (host, on_host) = (session.host().unwrap(), mapped_on_host(MIB2));
        let (slice, whole) = (mapping.slice(0, 64).unwrap(), reservation.slice(0, 64).unwrap());
        let host_slice = on_host.slice(0, 64).unwrap();
        let export = memory.export().unwrap();
        let own = own_tgid();
        export.trust(&[own]).unwrap();
        let ticket = export.ticket().unwrap();
        let rows = Rows { width: 4, height: 2, pitch: 8, buffer_pitch: 4 };
        emulator.record();
        let child = fork(|| {
            for (number, error) in [
                session.device(LogicalId(0)).err(),
                session.device(LogicalId(1)).err(),
                session.host().err(),
                session.reserve(MIB2).err(),
                device.create(MIB2).err(),
                device.memory_info(MemoryKind::Hbm).err(),
                device.enable_peer_access(&peer).err(),
                host.create(MIB2).err(),
                reservation.map(MIB2, &memory).err(),
                reservation.slice(0, 8).err(),
                slice.write(&[0; 64]).err(),
                slice.read(&mut [0; 64]).err(),
                slice.fill(0).err(),
                slice.write_rows(&rows, &[0; 8]).err(),
                slice.read_rows(&rows, &mut [0; 8]).err(),
                slice.copy_from(&host_slice).err(),
                whole.fill(1).err(),
                host_slice.write(&[0; 64]).err(),
                host_slice.read(&mut [0; 64]).err(),
                host_slice.fill(0).err(),
                host_slice.write_rows(&rows, &[0; 8]).err(),
                host_slice.read_rows(&rows, &mut [0; 8]).err(),
                write_batch(&[(mapping.slice(0, 1).unwrap(), &[0])]).err(),
                read_batch(&mut [(mapping.slice(0, 1).unwrap(), &mut [0])]).err(),
                mapping.write_async(0, vec![0; 8]).err().map(|failed| failed.error),
                mapping.read_async(0, vec![0; 8]).err().map(|failed| failed.error),
                on_host.write_async(0, vec![0; 8]).err().map(|failed| failed.error),
                mapping.grant(&peer).err(),
                mapping.grant(&device).err(),
                on_host.grant(&peer).err(),
                mapping.is_granted(&peer).err(),
                mapping.host_view().err(),
                on_host.host_view().err(),
                memory.export().err(),
                export.trust(&[own]).err(),
                export.trust_anyone().err(),
                export.trusts_anyone().err(),
                export.fabric_handle(HandleKind::Plain).err(),
                share::import(&peer, &ticket).err(),
            ]
            .into_iter()
            .enumerate()
            {
                refused_in_child(&error.unwrap_or_else(|| panic!("call {number} was not refused")));
            }
            assert!(session.memory_at(mapping.address()).is_none());
            assert!(session.mapping_at(mapping.address()).is_none());
            assert!(reservation.mappings().is_empty());
        });
        let pid = child.pid();
        child.join();
        let calls: Vec<_> = emulator.records().into_iter().filter(|record| record.pid == pid).collect();
        assert!(calls.is_empty(), "{calls:#?}");
        drop((slice, whole, host_slice));
    });
}

/// Leaves a message in the log page, as a successful command may do.
fn leave_in_log_page(sentence: &str) {
    let page = std::ptr::with_exposed_provenance_mut::<u8>(klog::SVM_ERRORS as usize);
    let position = |offset: usize| page.wrapping_add(offset).cast::<i32>();
    // SAFETY: an open session has the page mapped, and no command runs.
    unsafe {
        for (index, byte) in sentence.bytes().enumerate() {
            page.wrapping_add(klog::TEXT + index).write_volatile(byte);
        }
        position(offset_of!(klog::Head, read)).write_volatile(0);
        position(offset_of!(klog::Head, write)).write_volatile(sentence.len() as i32);
    }
}

#[test]
fn an_error_does_not_repeat_what_an_earlier_command_left_in_the_log_page() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        let mapping = mapped_on(&device, MIB2);
        for round in 0..2 {
            leave_in_log_page("an old story\n");
            // An injected fault writes nothing into the page.
            inject(emulator, "MEM_CREATE#1=EINVAL");
            let error = device.create(MIB2).unwrap_err();
            assert_eq!(error.errno(), Some(Errno::EINVAL), "{error}");
            assert!(!error.to_string().contains("an old story"), "round {round}: {error}");
            leave_in_log_page("an old story\n");
            inject(emulator, "MEMCPY#1=EFAULT");
            let error = mapping.write(0, &[1; 100]).unwrap_err();
            assert!(!error.to_string().contains("an old story"), "round {round}: {error}");
        }
    });
}

/// Whether messages on a socket carry a pidfd of their sender, after that was set; `None` on
/// kernels that cannot.
fn pass_pidfd(socket: &UnixStream, wanted: Option<bool>) -> Option<bool> {
    const SO_PASSPIDFD: i32 = 76;
    let (level, file) = (libc::SOL_SOCKET, socket.as_raw_fd());
    let (mut value, mut length) = (wanted.map_or(0, i32::from), size_of::<i32>() as u32);
    // SAFETY: both get the address of a number, and its length.
    let answer = unsafe {
        match wanted {
            Some(_) => libc::setsockopt(file, level, SO_PASSPIDFD, (&raw const value).cast(), length),
            None => libc::getsockopt(file, level, SO_PASSPIDFD, (&raw mut value).cast(), &raw mut length),
        }
    };
    (answer == 0).then_some(value != 0)
}

#[test]
fn an_exchange_leaves_the_sockets_options_as_they_were() {
    isolated(plain(), |_| {
        for before in [false, true] {
            let (mine, theirs) = UnixStream::pair().unwrap();
            let set = |socket: &UnixStream| {
                setsockopt(socket, PassCred, &before).unwrap();
                pass_pidfd(socket, Some(before));
            };
            let get = |socket: &UnixStream| {
                let credentials = getsockopt(socket, PassCred).unwrap();
                assert_eq!(pass_pidfd(socket, None).unwrap_or(credentials), credentials);
                credentials
            };
            set(&mine);
            let other = start(|channel| {
                set(&theirs);
                channel.signal();
                let memory = share::receive(&theirs, &device(1), PATIENCE).unwrap();
                assert_eq!((get(&theirs), memory.size()), (before, MIB2), "after receive");
                channel.wait();
            });
            other.wait();
            share::send(&mine, &device(0).create(MIB2).unwrap(), PATIENCE).unwrap();
            assert_eq!(get(&mine), before, "after send");
            other.signal();
            other.join();
            // Also when it fails.
            share::send(&mine, &device(0).create(MIB2).unwrap(), Duration::ZERO).unwrap_err();
            assert_eq!(get(&mine), before, "after a send that failed");
            share::receive(&mine, &device(0), Duration::ZERO).unwrap_err();
            assert_eq!(get(&mine), before, "after a receive that failed");
        }
    });
}

/// Makes the next MEMCPY answer a direction. `data` is the number of bytes that it copies into this
/// process's memory before its answer.
fn answer_direction(emulator: &Emulator, data: usize, direction: u32) {
    let offset = data + svm::DATA + offset_of!(svm::Memcpy, direction);
    let bytes: String = direction.to_le_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    inject(emulator, &format!("MEMCPY#1[{offset}]={bytes}"));
}

#[test]
fn a_copy_that_went_another_way_than_it_should_is_an_error() {
    on_each_generation(plain(), |_, emulator| {
        let (here, there) = (device(0), device(1));
        let (one, two) = (mapped_on(&here, MIB2), mapped_on(&there, MIB2));
        let mut buffer = [0; 64];
        let known = [
            svm::COPY_HOST_TO_HOST,
            svm::COPY_HOST_TO_DEVICE,
            svm::COPY_DEVICE_TO_HOST,
            svm::COPY_DEVICE_TO_DEVICE,
            svm::COPY_DETECT,
            u32::MAX,
        ];
        for direction in known {
            answer_direction(emulator, 0, direction);
            let written = one.write(0, &buffer);
            assert_eq!(written.is_ok(), direction == svm::COPY_HOST_TO_DEVICE, "{direction}: {written:?}");
            answer_direction(emulator, buffer.len(), direction);
            let read = one.read(0, &mut buffer);
            assert_eq!(read.is_ok(), direction == svm::COPY_DEVICE_TO_HOST, "{direction}: {read:?}");
            answer_direction(emulator, 0, direction);
            let copied = two.slice(0, 64).unwrap().copy_from(&one.slice(0, 64).unwrap());
            let done = [svm::COPY_HOST_TO_DEVICE, svm::COPY_DEVICE_TO_HOST, svm::COPY_DEVICE_TO_DEVICE];
            assert_eq!(copied.is_ok(), done.contains(&direction), "{direction}: {copied:?}");
            let offset = svm::DATA + offset_of!(svm::Memset, host_mapped);
            inject(emulator, &format!("MEMSET8#1[{offset}]=01000000"));
            let filled = one.fill(0, 64, 1);
            assert!(filled.is_err(), "the kernel leaves it to the caller");
            for error in [written.err(), read.err(), copied.err(), filled.err()].into_iter().flatten() {
                assert!(matches!(error, Error::Invalid(_)), "{error}");
                assert!(error.to_string().contains("direction"), "{error}");
            }
        }
    });
}

#[test]
fn a_mapping_that_is_gone_is_not_found_while_its_memory_lives() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let memory = device.create(MIB2).unwrap();
        let mapping = mapped(&memory);
        let address = mapping.address();
        assert!(session.memory_at(address).unwrap().is_same(&memory));
        // The kernel still has it, but no object of the caller refers to it.
        inject(emulator, "MEM_UNMAP#1=EBUSY");
        drop(mapping);
        assert!(session.memory_at(address).is_none());
        assert!(session.mapping_at(address).is_none());
        assert!(!memory.is_imported());
    });
}

#[test]
fn heaps_stay_enabled_while_another_device_is_open() {
    on_each_generation(plain(), |_, emulator| {
        let (session, device) = open(0);
        let other = session.device(LogicalId(1)).unwrap();
        session.host().unwrap();
        drop(session.reserve(MIB2).unwrap());
        emulator.record();
        other.close().unwrap();
        assert_eq!(count(emulator, "UPDATE_HEAP"), 0, "{:?}", commands(emulator));
        drop(session.reserve(MIB2).unwrap());
        assert_eq!(count(emulator, "UPDATE_HEAP"), 0, "the heap is still there");
        device.close().unwrap();
        assert_eq!(count(emulator, "UPDATE_HEAP"), 1, "{:?}", commands(emulator));
    });
}

#[test]
fn a_session_that_never_had_a_device_disables_its_heaps_when_it_closes() {
    on_each_generation(plain(), |_, emulator| {
        emulator.record();
        let session = Session::open().unwrap();
        drop(session.reserve(MIB2).unwrap());
        assert_eq!(count(emulator, "UPDATE_HEAP"), 1);
        session.close().unwrap();
        assert_eq!(count(emulator, "UPDATE_HEAP"), 2, "{:?}", commands(emulator));
    });
}

#[test]
fn rows_that_do_not_fit_the_buffer_or_the_memory_are_never_copied() {
    on_each_generation(plain(), |_, emulator| {
        let device = device(0);
        for mapping in [mapped_on(&device, MIB2), mapped_on_host(MIB2)] {
            let slice = mapping.slice(0, 64).unwrap();
            emulator.record();
            let before = emulator.records().len();
            let fitting = Rows { width: 4, height: 4, pitch: 16, buffer_pitch: 8 };
            for (rows, buffer) in [
                (fitting, 27),
                (Rows { height: 5, ..fitting }, 64),
                (Rows { pitch: 3, ..fitting }, 64),
                (Rows { buffer_pitch: 3, ..fitting }, 64),
                (Rows { pitch: u64::MAX, ..fitting }, 64),
                (Rows { buffer_pitch: u64::MAX, ..fitting }, 64),
                (Rows { height: u64::MAX, ..fitting }, 64),
            ] {
                let mut bytes = vec![0; buffer];
                refused_here(&slice.write_rows(&rows, &bytes).unwrap_err(), "do not fit");
                refused_here(&slice.read_rows(&rows, &mut bytes).unwrap_err(), "do not fit");
            }
            assert_eq!(emulator.records().len(), before);
            slice.write_rows(&fitting, &[1; 28]).unwrap();
            slice.read_rows(&fitting, &mut [0; 28]).unwrap();
        }
    });
}

/// The name of this thread, and whether it leaves all signals to others.
fn signals_here() -> (String, bool) {
    let mask = SigSet::thread_get_mask().unwrap();
    let blocked =
        Signal::iterator().all(|signal| [Signal::SIGKILL, Signal::SIGSTOP].contains(&signal) || mask.contains(signal));
    (std::thread::current().name().unwrap_or_default().to_owned(), blocked)
}

#[test]
fn every_thread_of_the_library_leaves_all_signals_to_the_program() {
    isolated(plain(), |emulator| {
        let seen = Arc::new(Mutex::new(BTreeMap::new()));
        let events = seen.clone();
        // Each thread but the one that accepts clients makes calls to the driver, which are events.
        let subscriber = AtEvent(move |_| {
            let (name, blocked) = signals_here();
            events.lock().unwrap().insert(name, blocked);
        });
        tracing::subscriber::set_global_default(subscriber).unwrap();
        assert_eq!(discovery::survey(&survey_options()).devices.len(), 2);
        let (session, device) = open(0);
        let mapping = mapped_on(&device, MIB2);
        let mut running = mapping.write_async(0, vec![1; 8]).unwrap();
        wait_until("the copy is over", || running.try_wait().is_some());
        let directory = Directory::new();
        let path = directory.join("broker");
        let listener = UnixListener::bind(&path).unwrap();
        let page = device.create(MIB2).unwrap();
        let options = BrokerOptions::default().timeout(PATIENCE);
        let broker = Broker::start(&session, listener, options, move |_| Ok(vec![page.clone()])).unwrap();
        start(|_| {
            let socket = UnixStream::connect(&path).unwrap();
            share::request(&socket, "page", &crate::support::device(1), PATIENCE).unwrap();
        })
        .join();
        // The kernel cuts names.
        let accepting = std::fs::read_dir("/proc/self/task").unwrap().flatten().find(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "ascend-vmm-brok")
        });
        let status = std::fs::read_to_string(accepting.unwrap().path().join("status")).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
        // All but SIGKILL and SIGSTOP, which no thread can block, and the two of the C library.
        assert_eq!(u64::from_str_radix(mask, 16).unwrap() | 0x1_8004_0100, u64::MAX);
        drop((broker, running, mapping, device, session));
        wait_until("the threads are gone", || emulator.state().is_empty());
        let seen = seen.lock().unwrap();
        for thread in ["ascend-vmm survey", "ascend-vmm setup", "ascend-vmm-copy", "ascend-vmm-client"] {
            assert_eq!(seen.get(thread), Some(&true), "{thread} of {seen:?}");
        }
    });
}
