//! Another user of the driver in the same process, such as the vendor's library: it is not
//! disturbed, and errors say what is not possible beside it.
//!
//! The other user is a raw client that has a session, a device with its device process, and memory.

use crate::support::raw::ModuleFile;
use crate::support::{MIB2, open, own_pid, own_tgid, survey_options, wait_until};
use ascend_conformance::Host;
use ascend_conformance::session as raw;
use ascend_emulator::{Config, Emulator, fork, on_each_generation};
use ascend_ioctl::{davinci, devmng};
use ascend_vmm::discovery::{self, Finding, Npu, Survey};
use ascend_vmm::{Error, Session};

/// The other user's session, and the address of its memory.
struct Other {
    session: raw::Session,
    address: u64,
}

impl Other {
    fn begin() -> Other {
        let host = Host::find().unwrap().expect("the emulated host has a driver");
        let session = raw::Session::start(&host).unwrap();
        let (_, address) = session.device_mapping(0, MIB2).unwrap();
        session.write(address, b"theirs").unwrap();
        Other { session, address }
    }

    /// Its device process lives, its memory is unchanged, and it can create more on every device.
    #[track_caller]
    fn assert_unharmed(&self) {
        assert_eq!(self.session.read(self.address, 6).unwrap(), b"theirs");
        let more = self.session.device_huge(0, MIB2).expect("more memory on its device");
        self.session.release(&more).unwrap();
    }

    fn end(self) {
        self.session.unmap(self.address).unwrap();
        self.session.close_device(0).unwrap();
        self.session.shut_down().unwrap();
    }
}

fn survey() -> Survey {
    discovery::survey(&survey_options())
}

/// The facts that are queried even beside another user.
fn common(npu: &Npu) -> impl PartialEq + std::fmt::Debug + use<> {
    let Npu { logical, physical, user, identity, state, .. } = *npu;
    let names = (npu.chip.clone(), npu.soc.clone());
    (logical, physical, user, identity, state, names, npu.pci, npu.health, npu.super_pod, npu.split)
}

#[test]
fn discovery_does_not_disturb_another_librarys_session() {
    on_each_generation(Config::default(), |generation, _| {
        let alone = survey();
        assert_eq!(alone.findings, []);
        let other = Other::begin();
        let beside = survey();
        other.assert_unharmed();
        assert_eq!(discovery::list_with(&survey_options()).unwrap().len(), 2);
        assert!(discovery::can_access(beside.devices[0].logical, beside.devices[1].logical).unwrap());
        other.assert_unharmed();
        // A device that it opens now needs the registration that an open of DEVMNG would delete.
        other.session.setup(1).unwrap();

        assert_eq!(beside.findings, [Finding::DriverUsedHere]);
        assert_eq!(beside.generation, Some(generation));
        for (alone, beside) in alone.devices.iter().zip(&beside.devices) {
            assert_eq!(common(alone), common(beside));
            assert!(alone.ai_cores.is_some() && beside.ai_cores.is_none());
        }
        other.session.close_device(1).unwrap();
        other.end();
        assert_eq!(survey().findings, [], "the other user is gone");
    });
}

#[test]
fn threads_that_discover_beside_a_session_do_not_disturb_it() {
    on_each_generation(Config::default(), |_, _| {
        let other = Other::begin();
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| (0..8).map(|_| survey()).collect::<Vec<_>>())).collect();
            for survey in threads.into_iter().flat_map(|thread| thread.join().unwrap()) {
                assert_eq!(survey.findings, [Finding::DriverUsedHere]);
            }
        });
        other.assert_unharmed();
        other.end();
    });
}

fn is_registered(emulator: &Emulator) -> bool {
    emulator.state().registrations.contains(&own_pid())
}

#[test]
fn a_library_that_registers_while_we_use_the_driver_stays_registered() {
    on_each_generation(Config::default(), |_, emulator| {
        let session = Session::open().unwrap();
        own_tgid();
        let other = ModuleFile::open(davinci::module::DEVMNG);
        assert_eq!(other.ioctl(devmng::GET_PROCESS_SIGN.request(), &mut devmng::ProcessSign::default()), 0);
        session.close().unwrap();
        assert!(is_registered(emulator), "our file stays open beside the other one");
        // The file is used again, and closed when it is the only one.
        drop(survey());
        assert!(is_registered(emulator));
        drop(other);
        drop(survey());
        wait_until("the end of the last file", || emulator.state().files.is_empty());
    });
}

#[test]
fn a_session_beside_another_one_is_refused_with_what_to_do_instead() {
    on_each_generation(Config::default(), |_, _| {
        let other = Other::begin();
        for session in [Session::open(), Session::current(), Session::builder().segments(false).open()] {
            let error = session.unwrap_err();
            assert!(matches!(error, Error::SessionTaken(_)), "{error}");
            for words in ["Other code in this process", "a process of its own", "trust", "ticket", "64-bit handle"] {
                assert!(error.to_string().contains(words), "{words:?} is not in {error}");
            }
        }
        other.assert_unharmed();
        other.end();
        // The refused attempt kept its file, and the next one continues with it.
        Session::builder().segments(false).open().unwrap().close().unwrap();
    });
}

#[test]
fn a_child_of_a_process_with_a_session_of_ours_discovers_everything() {
    on_each_generation(Config::default(), |_, _| {
        let expected = survey();
        let (_session, device) = open(0);
        fork(|| assert_eq!(survey().devices.len(), expected.devices.len())).join();
        fork(|| assert_eq!(survey().findings, [])).join();
        // So does the parent.
        assert_eq!(survey().findings, []);
        drop(device);
    });
}
