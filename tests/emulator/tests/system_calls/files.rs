//! The front with real processes and the real kernel: how files behave for a program, and when the
//! emulator releases them.
//!
//! Tests that check the release of a file are isolated. In the harness's own process another test
//! may be starting a program, which has a copy of every descriptor between fork and exec. A real
//! driver would keep the file open for it too.

use crate::client::{MANAGER, Session, ioctl, open_manager};
use ascend_emulator::config::{DeviceProcess, Door};
use ascend_emulator::{Config, Emulator, Line, fork, isolated, isolated_leaky, on_each_generation};
use ascend_ioctl::svm::{self, Op};
use ascend_ioctl::{davinci, uda};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate, open};
use nix::sys::mman::{MapFlags, ProtFlags, munmap};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::stat::Mode;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

fn emulator() -> Emulator {
    Emulator::start(Config::default()).unwrap()
}

fn open_files(emulator: &Emulator) -> usize {
    emulator.state().files.len()
}

#[test]
fn an_open_file_is_seen_until_it_is_closed() {
    isolated(Config::default(), |emulator| {
        let file = open_manager();
        assert_eq!(open_files(emulator), 1);
        drop(file);
        assert_eq!(open_files(emulator), 0);
    });
}

#[test]
fn a_thread_that_is_not_attached_sees_the_real_host() {
    let emulator = emulator();
    // The emulator does not see this open, whether or not this host has the node.
    let _file = open(MANAGER, OFlag::O_RDWR, Mode::empty());
    assert_eq!(open_files(&emulator), 0);
}

#[test]
fn every_access_mode_can_be_opened_and_unknown_nodes_do_not_exist() {
    isolated(Config::default(), |emulator| {
        for mode in [OFlag::O_RDONLY, OFlag::O_WRONLY, OFlag::O_RDWR] {
            drop(open(MANAGER, mode, Mode::empty()).unwrap());
        }
        assert_eq!(open("/dev/davinci63", OFlag::O_RDONLY, Mode::empty()).unwrap_err(), Errno::ENOENT);
        assert_eq!(open_files(emulator), 0);
    });
}

#[test]
fn stat_and_access_know_the_nodes() {
    use std::os::unix::fs::FileTypeExt;
    isolated(Config::default(), |_| {
        assert!(std::fs::metadata(MANAGER).unwrap().file_type().is_char_device());
        assert!(std::path::Path::new("/dev/davinci1").exists());
        assert!(!std::path::Path::new("/dev/davinci2").exists());
        nix::unistd::access(MANAGER, nix::unistd::AccessFlags::R_OK).unwrap();
        assert_eq!(nix::unistd::access("/dev/davinci9", nix::unistd::AccessFlags::F_OK), Err(Errno::ENOENT));
        assert_eq!(nix::sys::stat::stat("/dev/davinci1").unwrap().st_mode & libc::S_IFMT, libc::S_IFCHR);
    });
}

#[test]
fn an_open_file_is_the_node_that_was_opened() {
    isolated(Config::default(), |_| {
        let file = open("/dev/davinci1", OFlag::O_RDONLY, Mode::empty()).unwrap();
        let (by_path, by_file) =
            (nix::sys::stat::stat("/dev/davinci1").unwrap(), nix::sys::stat::fstat(&file).unwrap());
        assert_eq!((by_file.st_mode, by_file.st_rdev), (by_path.st_mode, by_path.st_rdev));
        let shown = std::fs::File::from(file.try_clone().unwrap()).metadata().unwrap();
        assert!(std::os::unix::fs::FileTypeExt::is_char_device(&shown.file_type()));
        let number = file.as_raw_fd();
        for directory in ["self", "thread-self", &std::process::id().to_string()] {
            let link = std::fs::read_link(format!("/proc/{directory}/fd/{number}")).unwrap();
            assert_eq!(link, std::path::Path::new("/dev/davinci1"));
        }
        // Other files are what they are.
        assert!(std::fs::File::open("/proc/self/status").unwrap().metadata().unwrap().is_file());
        assert!(std::fs::read_link("/proc/self/fd/0").is_ok());
        let mut short = [0u8; 4];
        let name = std::ffi::CString::new(format!("/proc/self/fd/{number}")).unwrap();
        // SAFETY: the name and the buffer are live locals, and the length is the buffer's.
        let length = unsafe { libc::readlink(name.as_ptr(), short.as_mut_ptr().cast(), short.len()) };
        assert_eq!((length, &short), (4, b"/dev"), "cut off at the end of the buffer");
    });
}

#[test]
fn a_node_is_no_link_and_is_its_own_real_path() {
    isolated(Config::default(), |_| {
        let errno = |path| std::fs::read_link(path).unwrap_err().raw_os_error();
        assert_eq!(errno(MANAGER), Some(libc::EINVAL));
        assert_eq!(errno("/dev/davinci9"), Some(libc::ENOENT));
        for path in [MANAGER, "/dev/davinci1", "/dev/hisi_hdc"] {
            assert_eq!(std::fs::canonicalize(path).unwrap(), std::path::Path::new(path));
        }
    });
}

#[test]
fn the_list_of_modules_names_the_driver() {
    isolated(Config::default(), |_| {
        assert!(std::fs::read_to_string("/proc/modules").unwrap().contains("asdrv_pbl"));
        let emulator = std::thread::spawn(|| Command::new("cat").arg("/proc/modules").output().unwrap());
        assert!(emulator.join().unwrap().stdout.starts_with(b"asdrv_svm "));
    });
}

#[test]
fn the_list_of_modules_names_no_driver_where_none_is_loaded() {
    isolated(Config { door: Door::Missing, ..Config::default() }, |_| {
        assert!(!std::fs::read_to_string("/proc/modules").unwrap().contains("asdrv_pbl"));
    });
}

#[test]
fn a_program_cannot_cut_the_drivers_file_off() {
    isolated_leaky(Config { device_process: DeviceProcess::Automatic, ..Config::default() }, |_| {
        let session = Session::start(Config::default().generation).unwrap();
        let heap = session.heap().unwrap();
        let host = |address: u64| {
            let (size, side, page) = (svm::HUGE_PAGE, svm::SIDE_HOST, svm::PAGE_HUGE);
            let made = svm::MemCreate { size, side, page, ..Default::default() };
            let id = session.call(Op::MemCreate, svm::HOST_ID, &made).unwrap().id;
            session.call(Op::Alloc, 0, &svm::Alloc { address, size }).unwrap();
            let map = svm::MemMap { address, size, id, side, page, pages: 1, ..Default::default() };
            session.call(Op::MemMap, svm::HOST_ID, &map).unwrap();
        };
        host(heap);
        let device = heap + svm::HUGE_PAGE;
        session.map(device, session.create(1).unwrap(), 1).unwrap();
        let copy = || session.copy(device, heap, svm::HUGE_PAGE as usize, svm::COPY_HOST_TO_DEVICE);
        // SAFETY: host memory was mapped there.
        unsafe { std::slice::from_raw_parts_mut(heap as *mut u8, svm::HUGE_PAGE as usize) }.fill(7);
        copy().unwrap();
        assert_eq!(nix::unistd::ftruncate(&session.file, 0), Err(Errno::EPERM));
        copy().unwrap();
    });
}

#[test]
fn a_program_cannot_fill_the_drivers_file() {
    isolated(Config::default(), |_| {
        let much = |file: &OwnedFd, flags| fallocate(file, flags, 0, 1 << 42);
        assert_eq!(much(&open_manager(), FallocateFlags::empty()), Err(Errno::ENODEV));
        // Files of others are as they are.
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let other = nix::sys::memfd::memfd_create("other", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        assert_eq!(much(&other, hole), Ok(()));
    });
}

#[test]
fn a_burst_of_closes_leaves_nothing() {
    isolated(Config::default(), |emulator| {
        let files: Vec<_> = (0..64).map(|_| open_manager()).collect();
        assert_eq!(open_files(emulator), 64);
        drop(files);
        assert_eq!(open_files(emulator), 0);
    });
}

#[test]
fn a_duplicate_keeps_the_file_open() {
    isolated(Config::default(), |emulator| {
        let file = open_manager();
        // SAFETY: the call returned a new descriptor that this value owns.
        let high = unsafe { OwnedFd::from_raw_fd(libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 700)) };
        drop(file);
        assert_eq!(open_files(emulator), 1);
        drop(high);
        assert_eq!(open_files(emulator), 0);
    });
}

const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

#[test]
fn a_mapping_keeps_the_file_open() {
    on_each_generation(Config::default(), |generation, emulator| {
        let (session, segments) = Session::prepare(generation).unwrap();
        let mapped = session.map_segment(&segments[0], READ_WRITE, MapFlags::MAP_SHARED).unwrap();
        assert_eq!(mapped.as_ptr() as u64, segments[0].start);
        drop(session);
        assert_eq!(open_files(emulator), 1);
        // SAFETY: nothing refers to the mapping.
        unsafe { munmap(mapped, segments[0].size as usize) }.unwrap();
        assert_eq!(open_files(emulator), 0);
    });
}

#[test]
fn a_child_does_not_inherit_the_drivers_mappings() {
    isolated(Config::default(), |emulator| {
        let (session, segments) = Session::prepare(Config::default().generation).unwrap();
        let mapped = session.map_segment(&segments[0], READ_WRITE, MapFlags::MAP_SHARED).unwrap();
        assert_eq!(open_files(emulator), 1);
        let address = mapped.as_ptr() as usize;
        let child = fork(move || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            assert!(!maps.contains(&format!("{address:x}-")), "{maps}");
        });
        child.join();
        // SAFETY: nothing refers to the mapping.
        unsafe { munmap(mapped, segments[0].size as usize) }.unwrap();
    });
}

#[test]
fn a_fixed_mapping_of_the_drivers_file_is_refused() {
    on_each_generation(Config::default(), |generation, _| {
        let (session, segments) = Session::prepare(generation).unwrap();
        for flag in [MapFlags::MAP_FIXED, MapFlags::MAP_FIXED_NOREPLACE] {
            let result = session.map_segment(&segments[0], READ_WRITE, MapFlags::MAP_SHARED | flag);
            assert_eq!(result.unwrap_err(), Errno::EINVAL);
        }
    });
}

#[test]
fn the_access_mode_limits_mappings_as_for_any_file() {
    isolated(Config::default(), |_| {
        let file = open(MANAGER, OFlag::O_RDONLY, Mode::empty()).unwrap();
        ioctl(&file, &davinci::OPEN, &mut davinci::OpenArg::new("SVM")).unwrap();
        let session = Session { generation: Config::default().generation, file };
        session.call(Op::AllocProcStruct, 0, &svm::InitProcess::default()).unwrap();
        let segment = svm::Segment { start: svm::SVM_START, size: svm::SVM_SIZE };
        let map = |prot| session.map_segment(&segment, prot, MapFlags::MAP_SHARED);
        assert_eq!(map(READ_WRITE).unwrap_err(), Errno::EACCES);
        let mapped = map(ProtFlags::PROT_READ).unwrap();
        // SAFETY: nothing refers to the mapping.
        unsafe { munmap(mapped, segment.size as usize) }.unwrap();
    });
}

#[test]
fn opening_the_file_again_through_proc_and_closing_that_does_not_close_the_file() {
    isolated(Config::default(), |emulator| {
        let file = open_manager();
        drop(std::fs::File::open(format!("/proc/thread-self/fd/{}", file.as_raw_fd())).unwrap());
        assert_eq!(open_files(emulator), 1);
        drop(file);
        assert_eq!(open_files(emulator), 0);
    });
}

#[test]
fn a_child_that_inherits_the_file_keeps_it_open() {
    isolated(Config::default(), |emulator| {
        let file = open_manager();
        let go = Line::new();
        let child = fork(|| {
            go.receive();
        });
        drop(file);
        assert_eq!(open_files(emulator), 1);
        go.send(0);
        child.join();
        assert_eq!(open_files(emulator), 0);
    });
}

#[test]
fn a_killed_client_releases_everything_before_waitpid_returns() {
    isolated(Config::default(), |emulator| {
        for _ in 0..50 {
            let opened = Line::new();
            let child = fork(|| {
                let _files = [open_manager(), open_manager()];
                opened.send(0);
                std::thread::park();
            });
            opened.receive();
            assert_eq!(emulator.state().files.iter().filter(|file| file.tgid == child.pid()).count(), 2);
            child.kill();
            assert_eq!(open_files(emulator), 0);
        }
    });
}

#[test]
fn hundreds_of_threads_use_one_file() {
    isolated(Config::default(), |_| {
        let file = crate::client::open_module("uda").unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..300)
                .map(|_| scope.spawn(|| ioctl(&file, &uda::GET_USER_INFO, &mut uda::UserInfo::default())))
                .collect();
            for thread in threads {
                assert_eq!(thread.join().unwrap(), Ok(0));
            }
        });
    });
}

/// What the driver's module for device tables says about a descriptor.
fn asked(number: RawFd) -> Result<i32, Errno> {
    let mut info = uda::UserInfo::default();
    // SAFETY: the argument is the command's own and writable.
    let answer = unsafe { libc::ioctl(number, uda::GET_USER_INFO.request().into(), std::ptr::from_mut(&mut info)) };
    Errno::result(answer)
}

#[test]
fn a_number_that_was_closed_or_replaced_is_no_longer_the_drivers() {
    isolated(Config::default(), |_| {
        let kept = crate::client::open_module("uda").unwrap();
        let other = open("/dev/null", OFlag::O_RDWR, Mode::empty()).unwrap();
        for number in [20, 63, 64, 300] {
            let duplicate = || {
                // SAFETY: the number is free, or this test's own.
                assert_eq!(unsafe { libc::dup3(kept.as_raw_fd(), number, libc::O_CLOEXEC) }, number);
                for _ in 0..4 {
                    assert_eq!(asked(number), Ok(0));
                }
            };
            let ends: [&(dyn Fn() + Sync); 4] = [
                // SAFETY: all of them close or replace the number, which is this test's own.
                &|| assert_eq!(unsafe { libc::close(number) }, 0),
                // SAFETY: as above.
                &|| assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, number, number, 0) }, 0),
                // SAFETY: as above.
                &|| assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number),
                // SAFETY: as above.
                &|| assert_eq!(unsafe { libc::dup3(other.as_raw_fd(), number, libc::O_CLOEXEC) }, number),
            ];
            for (index, end) in ends.iter().enumerate() {
                duplicate();
                end();
                let left = if index < 2 { Errno::EBADF } else { Errno::ENOTTY };
                assert_eq!(asked(number), Err(left), "{number}, {index}");
                // By another thread.
                duplicate();
                std::thread::scope(|scope| scope.spawn(end).join().unwrap());
                assert_eq!(asked(number), Err(left), "{number}, {index}, by a thread");
            }
        }
    });
}

#[test]
fn the_file_that_was_used_last_is_closed_when_its_close_returns() {
    isolated(Config::default(), |emulator| {
        let (used, other) = (crate::client::open_module("uda").unwrap(), crate::client::open_module("uda").unwrap());
        for _ in 0..4 {
            assert_eq!(asked(used.as_raw_fd()), Ok(0));
        }
        drop(used);
        // The end of a file that was not given back by CLOSE takes the others with it.
        assert_eq!(asked(other.as_raw_fd()), Err(Errno::EBADFD));
        let last = crate::client::open_module("uda").unwrap();
        for _ in 0..4 {
            assert_eq!(asked(last.as_raw_fd()), Ok(0));
        }
        drop((last, other));
        assert_eq!(open_files(emulator), 0);
    });
}

#[test]
fn a_file_in_place_of_the_drivers_is_not_kept_open() {
    isolated(Config::default(), |_| {
        let used = crate::client::open_module("uda").unwrap();
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).unwrap();
        for _ in 0..4 {
            assert_eq!(asked(used.as_raw_fd()), Ok(0));
        }
        // SAFETY: both numbers are this test's own.
        assert_eq!(unsafe { libc::dup2(writer.as_raw_fd(), used.as_raw_fd()) }, used.as_raw_fd());
        assert_eq!(asked(used.as_raw_fd()), Err(Errno::ENOTTY));
        drop((used, writer));
        assert_eq!(nix::unistd::read(&reader, &mut [0]), Ok(0), "the pipe has no writer");
    });
}

#[test]
fn a_thread_that_attaches_to_an_emulator_that_ended_does_not_wait_for_itself() {
    let emulator = emulator();
    let server = emulator.control(|_| nix::unistd::gettid());
    let ended = std::panic::AssertUnwindSafe(|| emulator.control(|_| panic!("the server ends here")));
    assert!(std::panic::catch_unwind(ended).is_err());
    while std::fs::exists(format!("/proc/self/task/{server}")).unwrap() {
        std::thread::yield_now();
    }
    // As a panic with a backtrace does, which reads the program.
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let _ = std::fs::File::open("/dev/null");
        before(panic);
    }));
    let attached = std::thread::scope(|scope| scope.spawn(|| emulator.attach()).join());
    assert!(attached.is_err(), "the thread says that the server ended");
}

#[test]
fn no_signal_interrupts_a_close() {
    extern "C" fn nothing(_: libc::c_int) {}
    isolated(Config::default(), |_| {
        // Without SA_RESTART: a call that the filter reports would end with EINTR.
        let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing.
        unsafe { sigaction(Signal::SIGUSR1, &action) }.unwrap();
        // SAFETY: takes nothing.
        let (this, over) = (unsafe { libc::pthread_self() } as usize, AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    // SAFETY: that thread waits for this one.
                    unsafe { libc::pthread_kill(this as libc::pthread_t, libc::SIGUSR1) };
                }
            });
            let ends: Vec<i32> = (0..5000)
                .map(|_| {
                    // SAFETY: the number is this test's own.
                    unsafe { libc::close(libc::dup(1)) }
                })
                .collect();
            over.store(true, Ordering::Relaxed);
            assert!(ends.iter().all(|&end| end == 0));
        });
    });
}

#[test]
fn a_number_is_never_taken_for_what_it_was_while_threads_use_it() {
    isolated(Config::default(), |_| {
        let kept = crate::client::open_module("uda").unwrap();
        let other = open("/dev/null", OFlag::O_RDWR, Mode::empty()).unwrap();
        const NUMBER: RawFd = 40;
        // Counts the changes of the number: at 1, 5, 9, … it is the driver's, at 3, 7, 11, …
        // another file, and in between nobody knows.
        let changes = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    loop {
                        let before = changes.load(Ordering::SeqCst);
                        let answer = asked(NUMBER);
                        let expected = match before % 4 {
                            _ if before == u32::MAX => break,
                            1 => Ok(0),
                            3 => Err(Errno::ENOTTY),
                            _ => continue,
                        };
                        if changes.load(Ordering::SeqCst) == before {
                            assert_eq!(answer, expected);
                        }
                    }
                });
            }
            let mut wrong = 0;
            for _ in 0..400 {
                for file in [&kept, &other] {
                    // SAFETY: the number is this test's own.
                    let replaced = unsafe { libc::dup2(file.as_raw_fd(), NUMBER) };
                    changes.fetch_add(1, Ordering::SeqCst);
                    let right = (0..3).all(|_| asked(NUMBER).is_ok() == std::ptr::eq(file, &kept));
                    wrong += usize::from(replaced != NUMBER || !right);
                    changes.fetch_add(1, Ordering::SeqCst);
                }
            }
            // The threads end before this one complains.
            changes.store(u32::MAX, Ordering::SeqCst);
            assert_eq!(wrong, 0);
        });
    });
}

#[test]
fn a_client_without_room_for_a_descriptor_gets_emfile_and_opens_nothing() {
    isolated(Config::default(), |emulator| {
        let (full, counted) = (Line::new(), Line::new());
        let client = fork(|| {
            let limit = libc::rlimit { rlim_cur: 20, rlim_max: 20 };
            // SAFETY: reads the limit.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
            let mut files = Vec::new();
            let error = loop {
                match open(MANAGER, OFlag::O_RDWR, Mode::empty()) {
                    Ok(file) => files.push(file),
                    Err(error) => break error,
                }
            };
            assert_eq!(error, Errno::EMFILE);
            full.send(files.len() as u64);
            counted.receive();
        });
        assert_eq!(full.receive(), open_files(emulator) as u64);
        counted.send(0);
        client.join();
    });
}

#[test]
fn each_emulator_is_a_host_of_its_own() {
    let (one, other) = (emulator(), emulator());
    let _file = one.run(open_manager);
    assert_eq!((open_files(&one), open_files(&other)), (1, 0));
    let _elsewhere = other.run(open_manager);
    assert_eq!((open_files(&one), open_files(&other)), (1, 1));
}

#[test]
#[should_panic(expected = "the body's own words")]
fn a_panic_of_a_body_continues_in_the_caller() {
    emulator().run(|| panic!("the body's own words"));
}

#[test]
fn an_unmodified_program_opens_the_node() {
    let emulator = emulator();
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec 3<>/dev/davinci_manager && test -c /dev/davinci0 && ! test -e /dev/davinci7"]);
    let status = emulator.spawn(&mut shell).unwrap().wait().unwrap();
    assert!(status.success(), "{status}");
    assert!(emulator.state().is_empty());
}

#[test]
fn exec_closes_what_is_marked_and_keeps_the_rest() {
    isolated(Config::default(), |emulator| {
        let go = Line::new();
        let child = fork(|| {
            let _marked = open_manager();
            // Without O_CLOEXEC, so the new program inherits it.
            let kept = open(MANAGER, OFlag::O_RDWR, Mode::empty()).unwrap();
            std::mem::forget(kept);
            go.receive();
            let error = std::os::unix::process::CommandExt::exec(Command::new("sh").args(["-c", "kill -STOP $$"]));
            panic!("{error}");
        });
        go.send(0);
        let pid = nix::unistd::Pid::from_raw(child.pid());
        let stopped = nix::sys::wait::waitpid(pid, Some(nix::sys::wait::WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(stopped, nix::sys::wait::WaitStatus::Stopped(..)), "{stopped:?}");
        assert_eq!(open_files(emulator), 1);
        child.kill();
        assert_eq!(open_files(emulator), 0);
    });
}

#[test]
#[should_panic(expected = "left this behind")]
fn an_isolated_test_that_leaves_a_file_open_fails() {
    isolated(Config::default(), |_| std::mem::forget(open_manager()));
}

#[test]
fn a_leaky_test_may_leave_a_file_open() {
    isolated_leaky(Config::default(), |_| std::mem::forget(open_manager()));
}

#[test]
#[should_panic(expected = "two and two is four")]
fn an_isolated_test_reports_its_own_panic() {
    isolated(Config::default(), |_| assert_eq!(2 + 2, 5, "two and two is four"));
}

#[test]
fn a_body_runs_once_on_each_generation() {
    on_each_generation(Config::default(), |generation, emulator| {
        drop(open_manager());
        assert!(emulator.state().is_empty(), "{generation}");
    });
}

#[test]
fn calls_are_recorded_in_order() {
    isolated(Config::default(), |emulator| {
        emulator.record();
        let file = open_manager();
        // SAFETY: the request takes no pointer.
        unsafe { libc::ioctl(file.as_raw_fd(), 0x5a01, 0) };
        drop(file);
        let records = emulator.records();
        let calls: Vec<_> = records.iter().map(|record| (record.call, record.cmd)).collect();
        assert_eq!(calls, [("open", None), ("ioctl", Some("CLOSE")), ("close", None)]);
        assert!(serde_json::to_string(&records[0]).unwrap().contains(r#""path":"/dev/davinci_manager""#));
    });
}

#[test]
fn a_command_fails_when_the_test_orders_it() {
    isolated(Config::default(), |emulator| {
        emulator.inject("CLOSE#2=ENOMEM".parse().unwrap());
        let file = open_manager();
        let close = || {
            // SAFETY: the request takes no pointer.
            Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), 0x5a01, 0) })
        };
        assert_ne!(close(), Err(Errno::ENOMEM));
        assert_eq!(close(), Err(Errno::ENOMEM));
        assert_ne!(close(), Err(Errno::ENOMEM));
    });
}
