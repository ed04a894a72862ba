//! Opening and closing the session: what the driver is asked, in which order, and what is said when it refuses.

use ascend_emulator::config::DeviceProcess;
use ascend_emulator::{Config, Emulator, fork, isolated, on_each_generation};
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::error::Errno;
use ascend_vmm::{Error, Generation, Session};

/// A device that starts its process by itself, so that traces show the memory driver only.
fn plain() -> Config {
    Config { device_process: DeviceProcess::Automatic, ..Config::default() }
}

/// What was called, in order: commands by name, other system calls by theirs.
fn calls(emulator: &Emulator) -> Vec<&'static str> {
    emulator.records().iter().map(|record| record.cmd.unwrap_or(record.call)).collect()
}

fn device(session: &Session, id: u32) -> ascend_vmm::Device {
    session.device(LogicalId(id)).unwrap()
}

#[test]
fn bringing_up_the_first_device_takes_the_calls_that_the_driver_needs_and_no_more() {
    on_each_generation(plain(), |generation, emulator| {
        emulator.record();
        let session = Session::open().unwrap();
        assert_eq!(session.generation(), generation);
        let device = device(&session, 0);
        let expected: &[&str] = match generation {
            Generation::V8_5_0 => {
                &["open", "OPEN", "", "ALLOC_PROC_STRUCT", "GET_MMAP_INFO", "mmap", "INIT_PROCESS", "SETUP_DEVICE"]
            }
            Generation::V9_0_0 => {
                &["open", "OPEN", "ALLOC_PROC_STRUCT", "GET_MMAP_INFO", "mmap", "mmap", "INIT_PROCESS", "SETUP_DEVICE"]
            }
            // With the log page, which the driver does not see, these are 13 system calls.
            _ => &[
                "open",
                "OPEN",
                "ALLOC_PROC_STRUCT",
                "GET_MMAP_INFO",
                "mmap",
                "mmap",
                "mprotect",
                "mmap",
                "mprotect",
                "mmap",
                "INIT_PROCESS",
                "SETUP_DEVICE",
            ],
        };
        let mut seen = calls(emulator);
        if generation == Generation::V8_5_0 {
            // Number 101, which this generation does not have.
            seen[2] = "";
        }
        assert_eq!(seen, expected);
        drop(device);
        session.close().unwrap();
    });
}

#[test]
fn the_minimal_sequence_of_one_process_is_what_the_driver_sees() {
    on_each_generation(plain(), |generation, emulator| {
        let session = Session::open().unwrap();
        let device = device(&session, 0);
        emulator.record();
        let memory = device.create(4 << 20).unwrap();
        let reservation = session.reserve(4 << 20).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        mapping.write(0, b"there").unwrap();
        let mut back = [0; 5];
        mapping.read(0, &mut back).unwrap();
        assert_eq!(&back, b"there");
        mapping.unmap().unwrap();
        reservation.free().unwrap();
        memory.free().unwrap();
        device.close().unwrap();
        session.close().unwrap();
        let segments = match generation {
            Generation::V8_5_0 => 1,
            Generation::V9_0_0 => 2,
            _ => 4,
        };
        let mut expected = vec![
            "MEM_CREATE",
            "UPDATE_HEAP",
            "ALLOC",
            "MEM_MAP",
            "MEMCPY",
            "MEMCPY",
            "MEM_UNMAP",
            "FREE_PAGES",
            "MEM_RELEASE",
            "UPDATE_HEAP",
            "PREPARE_CLOSE_DEVICE",
            "CLOSE_DEVICE",
        ];
        expected.extend(vec!["munmap"; segments]);
        // The last one is the log page's.
        expected.extend(["CLOSE", "close", "munmap"]);
        assert_eq!(calls(emulator), expected);
    });
}

#[test]
fn a_full_cycle_after_the_first_is_six_system_calls() {
    isolated(plain(), |emulator| {
        let session = Session::open().unwrap();
        let device = device(&session, 0);
        let keep = session.reserve(2 << 20).unwrap();
        for _ in 0..3 {
            emulator.record();
            let before = calls(emulator).len();
            let memory = device.create(2 << 20).unwrap();
            let reservation = session.reserve(2 << 20).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            drop(memory);
            drop(reservation);
            drop(mapping);
            let seen = calls(emulator).split_off(before);
            assert_eq!(seen.len(), 6, "{seen:?}");
            assert_eq!(seen[..4], ["MEM_CREATE", "ALLOC", "MEM_MAP", "MEM_UNMAP"]);
        }
        drop(keep);
    });
}

#[test]
fn a_session_can_be_opened_again_after_it_was_closed() {
    on_each_generation(Config::default(), |_, _| {
        for round in 0..3u8 {
            let session = Session::open().unwrap();
            let device = device(&session, u32::from(round % 2));
            let memory = device.create(2 << 20).unwrap();
            let reservation = session.reserve(2 << 20).unwrap();
            let mapping = reservation.map(0, &memory).unwrap();
            mapping.fill(0, 2 << 20, round).unwrap();
            // In any order.
            match round {
                0 => {
                    drop(session);
                    drop(device);
                    drop(memory);
                    drop(reservation);
                    drop(mapping);
                }
                1 => {
                    drop(mapping);
                    drop(reservation);
                    drop(device);
                    drop(memory);
                    session.close().unwrap();
                }
                _ => {
                    drop(reservation);
                    drop(memory);
                    drop(mapping);
                    drop(device);
                    drop(session);
                }
            }
        }
    });
}

#[test]
fn a_process_has_one_session_and_everybody_can_take_it() {
    isolated(Config::default(), |_| {
        let first = Session::current().unwrap();
        let second = Session::current().unwrap();
        assert!(matches!(Session::open(), Err(Error::SessionOpen)));
        let failed = first.close().unwrap_err();
        assert!(failed.to_string().contains("1 other reference"), "{failed}");
        let first = failed.object.unwrap();
        drop(second);
        first.close().unwrap();
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn threads_that_open_and_close_at_once_share_one_session_after_the_other() {
    isolated(Config::default(), |emulator| {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for _ in 0..10 {
                        let session = Session::current().unwrap();
                        let device = device(&session, thread % 2);
                        device.create(2 << 20).unwrap().free().unwrap();
                    }
                });
            }
        });
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_session_with_things_alive_is_not_closed_but_handed_back() {
    isolated(Config::default(), |_| {
        let session = Session::open().unwrap();
        let device = device(&session, 0);
        let memory = device.create(2 << 20).unwrap();
        let failed = session.close().unwrap_err();
        assert!(matches!(failed.error, Error::InUse { .. }));
        let session = failed.object.unwrap();
        let failed = device.close().unwrap_err();
        assert!(failed.to_string().contains("device 0"), "{failed}");
        memory.free().unwrap();
        failed.object.close().unwrap();
        session.close().unwrap();
    });
}

#[test]
fn another_session_of_the_process_is_named_and_its_end_is_waited_for_on_the_same_file() {
    on_each_generation(Config::default(), |_, emulator| {
        // Another library in this process, which speaks to the driver by itself and without segments.
        let other = raw::session();
        emulator.record();
        for _ in 0..3 {
            let error = Session::open().unwrap_err();
            assert!(matches!(error, Error::SessionTaken(_)), "{error}");
            assert_eq!(error.errno(), Some(Errno::EEXIST));
            assert!(error.to_string().contains("one memory session per process"), "{error}");
        }
        let opens = calls(emulator).iter().filter(|&&call| call == "open").count();
        assert_eq!(opens, 1, "a file that got EEXIST is never closed, which would leak kernel memory for good");
        assert!(!calls(emulator).contains(&"close"));
        other.end();
        let session = Session::open().unwrap();
        assert!(!session.has_segments(), "the other's end took our segments with it");
        let device = device(&session, 0);
        device.create(2 << 20).unwrap();
        drop(device);
        session.close().unwrap();
    });
}

#[test]
fn a_library_that_has_mapped_the_segments_is_in_the_way_and_nothing_is_lost() {
    on_each_generation(Config::default(), |_, emulator| {
        let other = raw::mapped();
        let error = Session::open().unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EINVAL), "{error}");
        assert!(error.to_string().contains("already used in this process"), "{error}");
        drop(other);
        assert!(emulator.state().is_empty());
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn the_vendors_library_in_the_process_is_named() {
    isolated(Config::default(), |_| {
        // A file of that name that is mapped is all that can be seen of a loaded library.
        let directory = std::env::temp_dir().join(format!("ascend-vmm-vendor-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("libascend_hal.so");
        std::fs::write(&path, [0; 4096]).unwrap();
        let library = raw::load(&path);
        std::fs::remove_file(&path).unwrap();
        std::fs::remove_dir(&directory).unwrap();
        let name = path.to_string_lossy().into_owned();
        let without_segments = raw::session();
        let error = Session::builder().segments(false).open().unwrap_err();
        assert!(matches!(error, Error::SessionTaken(_)) && error.to_string().contains(&name), "{error}");
        drop(without_segments);
        Session::builder().segments(false).open().unwrap().close().unwrap();
        let with_segments = raw::mapped();
        let error = Session::open().unwrap_err();
        assert!(matches!(error, Error::SessionTaken(_)) && error.to_string().contains(&name), "{error}");
        drop((with_segments, library));
    });
}

#[test]
fn in_a_child_the_parents_session_says_so_and_the_child_can_open_its_own() {
    on_each_generation(Config::default(), |_, _| {
        let session = Session::open().unwrap();
        let device0 = device(&session, 0);
        let memory = device0.create(2 << 20).unwrap();
        let reservation = session.reserve(4 << 20).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        mapping.write(0, b"parent").unwrap();
        let (mut session, mut device0, mut memory) = (Some(session), Some(device0), Some(memory));
        let (mut reservation, mut mapping) = (Some(reservation), Some(mapping));
        let child = fork(|| {
            // The child's copies: the parent keeps its own.
            let (session, device0, memory) = (session.take().unwrap(), device0.take().unwrap(), memory.take().unwrap());
            let (reservation, mapping) = (reservation.take().unwrap(), mapping.take().unwrap());
            let in_child = |error: Error| assert!(matches!(error, Error::OtherProcess { .. }), "{error}");
            in_child(session.device(LogicalId(1)).unwrap_err());
            in_child(session.device(LogicalId(0)).unwrap_err());
            in_child(session.host().unwrap_err());
            in_child(session.reserve(2 << 20).unwrap_err());
            in_child(device0.create(2 << 20).unwrap_err());
            in_child(reservation.map(2 << 20, &memory).unwrap_err());
            in_child(mapping.write(0, b"child!").unwrap_err());
            in_child(mapping.read(0, &mut [0; 6]).unwrap_err());
            in_child(mapping.fill(0, 6, 1).unwrap_err());
            in_child(mapping.host_view().unwrap_err());
            in_child(mapping.write_async(0, vec![0; 6]).unwrap_err().error);
            in_child(mapping.unmap().unwrap_err().error);
            in_child(reservation.free().unwrap_err().error);
            in_child(memory.free().unwrap_err().error);
            in_child(device0.close().unwrap_err().error);
            in_child(session.close().unwrap_err().error);
            let own = Session::open().unwrap();
            let device = device(&own, 1);
            device.create(2 << 20).unwrap();
        });
        child.join();
        let mut back = [0; 6];
        mapping.as_ref().unwrap().read(0, &mut back).unwrap();
        assert_eq!(&back, b"parent");
    });
}

#[test]
fn without_segments_device_memory_works_and_the_rest_says_what_is_missing() {
    on_each_generation(Config::default(), |_, emulator| {
        emulator.record();
        let session = Session::builder().segments(false).open().unwrap();
        assert!(!session.has_segments());
        assert!(!calls(emulator).contains(&"mmap"));
        let device = device(&session, 0);
        let memory = device.create(2 << 20).unwrap();
        let reservation = session.reserve(2 << 20).unwrap();
        let mapping = reservation.map(0, &memory).unwrap();
        mapping.write(5, b"bytes").unwrap();
        let mut back = [0; 5];
        mapping.read(5, &mut back).unwrap();
        assert_eq!(&back, b"bytes");
        let error = mapping.host_view().unwrap_err();
        assert!(error.to_string().contains("without address segments"), "{error}");
        let host = session.host().unwrap().create(2 << 20).unwrap();
        let elsewhere = session.reserve(2 << 20).unwrap();
        let error = elsewhere.map(0, &host).unwrap_err();
        assert!(error.to_string().contains("without address segments"), "{error}");
        drop((mapping, memory, reservation, host, elsewhere, device));
        session.close().unwrap();
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn a_driver_of_an_unknown_generation_is_refused_by_name_unless_wanted() {
    isolated(Config { unknown_generation: true, ..Config::default() }, |emulator| {
        let error = Session::open().unwrap_err();
        assert!(matches!(error, Error::UnknownGeneration(_)), "{error}");
        assert!(error.to_string().contains("Known are 8.5.0, 9.0.0, 26.1"), "{error}");
        assert!(emulator.state().is_empty());
    });
}

#[test]
fn a_missing_driver_is_told_with_its_path() {
    isolated(Config::default(), |_| {
        let error = Session::builder().davinci_manager("/nonexistent/davinci_manager").open().unwrap_err();
        assert_eq!(error.errno(), Some(Errno::ENOENT));
        assert!(error.to_string().contains("cannot open /nonexistent/davinci_manager"), "{error}");
        assert!(error.to_string().contains("driver is not loaded"), "{error}");
    });
}

#[test]
fn every_step_of_bring_up_can_fail_and_leaves_nothing_behind() {
    on_each_generation(Config::default(), |_, emulator| {
        let steps = ["OPEN", "ALLOC_PROC_STRUCT", "GET_MMAP_INFO", "INIT_PROCESS", "SETUP_DEVICE"];
        for (step, errno) in steps.into_iter().flat_map(|step| [(step, "ENOMEM"), (step, "EBUSY")]) {
            emulator.inject(format!("{step}#1={errno}").parse().unwrap());
            let result = Session::open().and_then(|session| session.device(LogicalId(0)));
            let error = result.unwrap_err();
            assert_eq!(format!("{:?}", error.errno().unwrap()), errno, "{step}: {error}");
            assert!(error.to_string().contains(step), "{error}");
            assert!(emulator.state().is_empty(), "{step}: {:#?}", emulator.state());
            Session::open().unwrap().close().unwrap();
        }
    });
}

#[test]
fn an_interrupted_init_is_tried_again() {
    isolated(Config::default(), |emulator| {
        for nth in 1..=40 {
            emulator.inject(format!("INIT_PROCESS#{nth}=EAGAIN").parse().unwrap());
        }
        Session::open().unwrap().close().unwrap();
    });
}

#[test]
fn the_ids_of_the_host_are_not_devices_and_absent_ones_are_explained() {
    isolated(Config::default(), |_| {
        let session = Session::open().unwrap();
        for id in [64, 65] {
            let error = session.device(LogicalId(id)).unwrap_err();
            assert!(error.to_string().contains("Session::host"), "{error}");
        }
        let error = session.device(LogicalId(7)).unwrap_err();
        assert!(matches!(error.errno(), Some(Errno::EINVAL)), "{error}");
        assert!(error.to_string().contains("no such device"), "{error}");
        let error = session.device(LogicalId(5000)).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::ENODEV), "{error}");
    });
}

#[test]
fn errors_quote_the_kernels_own_sentences() {
    on_each_generation(Config::default(), |_, _| {
        let session = Session::open().unwrap();
        let host = session.host().unwrap();
        let kind = ascend_vmm::Kind { memory: ascend_vmm::MemoryKind::Ddr, ..Default::default() };
        let first = host.create_on_node(2 << 20, kind, 60_000).unwrap_err();
        let sentence = first.kernel_log().unwrap().to_owned();
        assert!(!sentence.is_empty());
        assert!(first.to_string().contains("The kernel said"), "{first}");
        // Each error has its own, not those of all before.
        let second = host.create_on_node(2 << 20, kind, 60_000).unwrap_err();
        assert_eq!(second.kernel_log().unwrap().lines().count(), sentence.lines().count());
    });
}

/// A second user of the driver in this process, by bare system calls.
mod raw {
    use ascend_ioctl::Generation;
    use ascend_ioctl::davinci::{self, OpenArg};
    use ascend_ioctl::svm::{Arg, InitProcess, MmapInfo, Op, Para, SVM_SIZE, SVM_START};
    use nix::libc;
    use std::os::fd::AsRawFd;

    pub struct Raw {
        file: std::fs::File,
    }

    fn call(file: &std::fs::File, request: u32, arg: *mut libc::c_void) -> i32 {
        // SAFETY: the argument is the struct that belongs to the command.
        unsafe { libc::ioctl(file.as_raw_fd(), request as _, arg) }
    }

    fn svm<P: Para>(file: &std::fs::File, generation: Generation, op: Op, para: &P) -> i32 {
        let mut arg = Arg::new(0, para);
        call(file, generation.svm(op).unwrap().command.request(), (&raw mut arg).cast())
    }

    fn prepared() -> Raw {
        let file = std::fs::File::options().read(true).write(true).open(davinci::PATH).unwrap();
        let mut open = OpenArg::new(davinci::module::SVM);
        assert_eq!(call(&file, davinci::OPEN.request(), (&raw mut open).cast()), 0);
        let newest = svm(&file, Generation::NEWEST, Op::AllocProcStruct, &MmapInfo::default());
        if newest != 0 {
            assert_eq!(svm(&file, Generation::V8_5_0, Op::AllocProcStruct, &MmapInfo::default()), 0);
        }
        Raw { file }
    }

    /// With a session, but without segments.
    pub fn session() -> Raw {
        let raw = prepared();
        assert_eq!(svm(&raw.file, Generation::NEWEST, Op::InitProcess, &InitProcess::default()), 0);
        raw
    }

    /// With the first segment mapped, but without a session.
    pub fn mapped() -> Raw {
        let raw = prepared();
        // SAFETY: without MAP_FIXED only unused addresses are handed out.
        let address = unsafe {
            libc::mmap(
                SVM_START as *mut _,
                SVM_SIZE as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                raw.file.as_raw_fd(),
                0,
            )
        };
        assert_eq!(address as u64, SVM_START);
        raw
    }

    /// Maps a file, as a loader would.
    pub fn load(path: &std::path::Path) -> *mut libc::c_void {
        let file = std::fs::File::open(path).unwrap();
        // SAFETY: without MAP_FIXED only unused addresses are handed out.
        unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) }
    }

    impl Raw {
        /// Ends the session.
        pub fn end(self) {}
    }

    impl Drop for Raw {
        fn drop(&mut self) {
            // Without segments a session outlives its file; what ends it is an unmapping of exactly this range, whosever it is.
            // SAFETY: nobody uses memory there.
            unsafe { libc::munmap(SVM_START as *mut _, SVM_SIZE as usize) };
            let mut open = OpenArg::default();
            assert_eq!(call(&self.file, davinci::CLOSE.request(), (&raw mut open).cast()), 0);
        }
    }
}
