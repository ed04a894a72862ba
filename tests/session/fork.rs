//! After a fork: the child has copies of its parent's objects, which it must not use, and it may
//! open a session of its own.

use crate::support::processes::{Peer, start};
use crate::support::{
    Directory, MIB2, PATIENCE, contents, device, mapped_on, mapped_on_host, open, refused_in_child, survey_options,
};
use ascend_emulator::config::Door;
use ascend_emulator::{Config, fork, isolated, on_each_generation};
use ascend_vmm::LogicalId;
use ascend_vmm::copy::{Rows, read_batch, write_batch};
use ascend_vmm::device_process;
use ascend_vmm::discovery;
use ascend_vmm::share::{self, BareTgid, Broker, BrokerOptions, HandleKind, Name, Ticket};
use ascend_vmm::{Device, Error, Kind, Mapping, MemoryKind, Reservation, ReserveOptions, Session};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};

/// What a parent has when it forks.
struct Inherited {
    session: Session,
    device: Device,
    reservation: Reservation,
    mapping: Mapping,
}

fn parent() -> Inherited {
    let (session, device) = open(0);
    let reservation = session.reserve(2 * MIB2).unwrap();
    let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
    mapping.write(0, b"parent").unwrap();
    Inherited { session, device, reservation, mapping }
}

#[test]
fn in_a_child_every_call_on_the_parents_objects_is_refused_and_an_own_session_works() {
    on_each_generation(Config::default(), |_, _| {
        let mut all = Some(parent());
        let child = fork(|| {
            // The child's copies: the parent keeps its own.
            let Inherited { session, device, reservation, mapping } = all.take().unwrap();
            let memory = mapping.memory();
            for error in [
                session.device(LogicalId(1)).unwrap_err(),
                session.device(LogicalId(0)).unwrap_err(),
                session.host().unwrap_err(),
                session.reserve(MIB2).unwrap_err(),
                device.create(MIB2).unwrap_err(),
                reservation.map(MIB2, &memory).unwrap_err(),
                mapping.write(0, b"child!").unwrap_err(),
                mapping.read(0, &mut [0; 6]).unwrap_err(),
                mapping.fill(0, 6, 1).unwrap_err(),
                mapping.host_view().unwrap_err(),
                mapping.write_async(0, vec![0; 6]).unwrap_err().error,
                mapping.unmap().unwrap_err().error,
                reservation.free().unwrap_err().error,
                memory.free().unwrap_err().error,
                device.close().unwrap_err().error,
                session.close().unwrap_err().error,
            ] {
                refused_in_child(&error);
            }
            let own = Session::open().unwrap();
            own.device(LogicalId(1)).unwrap().create(MIB2).unwrap();
        });
        child.join();
        assert_eq!(contents(&all.unwrap().mapping, 0, 6), b"parent");
    });
}

#[test]
fn in_a_child_sharing_access_and_batches_of_the_parents_objects_are_refused() {
    on_each_generation(Config::default(), |_, _| {
        let all = parent();
        let peer = device(1);
        let host = all.session.host().unwrap();
        let export = all.mapping.memory().export().unwrap();
        let named = mapped_on(&all.device, MIB2);
        let published = named.publish().unwrap();
        let name = published.name();
        let waiting = all.mapping.write_async(8, b"later".to_vec()).unwrap();
        let (here, _there) = UnixStream::pair().unwrap();
        let directory = Directory::new();
        let mut listener = Some(UnixListener::bind(directory.join("broker")).unwrap());
        let ticket = export.ticket().unwrap();
        let (owner, name_of_another) = published_by_another();
        let opened = share::open_named(&all.device, &name_of_another).unwrap();
        let mut polled = all.mapping.write_async(16, b"later".to_vec()).unwrap();
        let _ = polled.try_wait();
        let mut all = Some((all, peer, host, export, named, published, waiting, opened, polled));
        let child = fork(|| {
            let (inherited, peer, host, export, named, published, waiting, opened, mut polled) = all.take().unwrap();
            let Inherited { session, device, reservation, mapping } = inherited;
            let memory = mapping.memory();
            let rows = Rows { width: 2, height: 2, pitch: 4, buffer_pitch: 2 };
            let tgid = [BareTgid::from_raw(1).unwrap()];
            let own = std::process::id();
            for error in [
                session.reserve_with(MIB2, &ReserveOptions::default()).unwrap_err(),
                host.create(MIB2).unwrap_err(),
                host.create_on_node(MIB2, Kind::default(), 0).unwrap_err(),
                device.create_with(MIB2, Kind::default()).unwrap_err(),
                device.memory_info(MemoryKind::Hbm).unwrap_err(),
                device.enable_peer_access(&peer).unwrap_err(),
                mapping.grant(&peer).unwrap_err(),
                // Even if there is nothing to do.
                mapping.grant(&device).unwrap_err(),
                mapping.is_granted(&peer).unwrap_err(),
                mapping.read_async(0, vec![0; 6]).unwrap_err().error,
                waiting.wait().unwrap_err().error,
                reservation.slice(0, 8).unwrap_err(),
                mapping.slice(0, 8).and_then(|slice| slice.write_rows(&rows, &[0; 4])).unwrap_err(),
                mapping.slice(0, 8).and_then(|slice| slice.read_rows(&rows, &mut [0; 4])).unwrap_err(),
                mapping.slice(0, 8).and_then(|slice| write_batch(&[(slice, b"child")])).unwrap_err(),
                mapping.slice(0, 8).and_then(|slice| read_batch(&mut [(slice, &mut [0; 8])])).unwrap_err(),
                memory.export().unwrap_err(),
                export.ticket().unwrap_err(),
                export.fabric_handle(HandleKind::Fabric).unwrap_err(),
                export.trust(&tgid).unwrap_err(),
                export.trust_anyone().unwrap_err(),
                export.trusts_anyone().unwrap_err(),
                share::import(&peer, &ticket).unwrap_err(),
                share::import(&host, &ticket).unwrap_err(),
                share::send(&here, &memory, PATIENCE).unwrap_err(),
                share::receive(&here, &device, PATIENCE).unwrap_err(),
                share::request(&here, "name", &device, PATIENCE).unwrap_err(),
                Broker::start(&session, listener.take().unwrap(), BrokerOptions::default(), |_| Ok(Vec::new()))
                    .unwrap_err(),
                reservation.map(MIB2, &memory).unwrap_err(),
                session.slice_at(mapping.address(), 8).unwrap_err(),
                mapping.slice(0, 8).and_then(|to| to.copy_from_async(&to)).unwrap_err(),
                opened.read(0, &mut [0; 8]).unwrap_err(),
                opened.write(0, b"child").unwrap_err(),
                opened.slice(0, 8).and_then(|slice| slice.fill(0)).unwrap_err(),
                opened.close().unwrap_err().error,
                device.device_process().unwrap().pid().unwrap_err(),
                polled.try_wait().unwrap().unwrap_err().error,
                share::open_named(&device, &name).unwrap_err(),
                BareTgid::of_this_process(&session).unwrap_err(),
                BareTgid::of_process(&session, own).unwrap_err(),
                named.publish().unwrap_err(),
                published.trust(&tgid).unwrap_err(),
                published.trust_anyone().unwrap_err(),
                published.withdraw().unwrap_err().error,
            ] {
                refused_in_child(&error);
            }
            assert!(!device.device_process().unwrap().is_connected());
            // Objects of the child's own session do not mix with the parent's.
            let own = Session::open().unwrap().device(LogicalId(1)).unwrap();
            let mapped = mapped_on(&own, MIB2);
            for error in [
                mapped.grant(&device).unwrap_err(),
                mapped.grant(&peer).unwrap_err(),
                own.enable_peer_access(&device).unwrap_err(),
            ] {
                assert!(matches!(error, Error::Invalid(_)), "{error}");
            }
        });
        child.join();
        assert_eq!(contents(&all.unwrap().0.mapping, 0, 6), b"parent");
        owner.signal();
        owner.join();
    });
}

/// Another process that keeps memory under a name, which this one may open, until it is signalled.
fn published_by_another() -> (Peer, Name) {
    let owner = start(|channel| {
        let mapping = mapped_on(&device(0), MIB2);
        let published = mapping.publish().unwrap();
        published.trust(&[channel.receive_tgid()]).unwrap();
        channel.send_bytes(&published.name().to_bytes());
        channel.wait();
    });
    owner.send_tgid();
    let name = Name::from_bytes(owner.receive_bytes::<65>()).unwrap();
    (owner, name)
}

#[test]
fn a_child_that_drops_what_it_inherited_makes_no_call_to_the_driver() {
    on_each_generation(Config::default(), |_, emulator| {
        let all = parent();
        let peer = device(1);
        all.mapping.grant(&peer).unwrap();
        let host = all.session.host().unwrap().create(MIB2).unwrap();
        let running = all.mapping.write_async(6, b"later".to_vec()).unwrap();
        let export = all.mapping.memory().export().unwrap();
        let mut all = Some((all, peer, host, running, export));
        emulator.record();
        let child = fork(|| drop(all.take()));
        let pid = child.pid();
        child.join();
        let records = emulator.records();
        let calls = records.iter().filter(|record| record.pid == pid).map(|record| record.cmd.unwrap_or(record.call));
        // CLOSE of files and connections is refused or does nothing in a child.
        let calls: Vec<_> = calls.filter(|&call| call != "CLOSE").collect();
        assert!(calls.is_empty(), "{calls:?}");
        assert_eq!(contents(&all.as_ref().unwrap().0.mapping, 0, 6), b"parent");
    });
}

#[test]
fn a_child_that_drops_what_it_inherited_keeps_its_own_session() {
    on_each_generation(Config::default(), |_, _| {
        let mut all = Some((parent(), mapped_on_host(MIB2)));
        let child = fork(|| {
            let (inherited, inherited_host) = all.take().unwrap();
            let session = Session::open().unwrap();
            let device = session.device(LogicalId(0)).unwrap();
            let reservation = session.reserve(MIB2).unwrap();
            let own = mapped_on_host(MIB2);
            let theirs = inherited_host.slice(0, 8).unwrap();
            refused_in_child(&own.slice(0, 8).unwrap().copy_from(&theirs).unwrap_err());
            refused_in_child(&theirs.copy_from(&own.slice(0, 8).unwrap()).unwrap_err());
            drop(theirs);
            assert!(device.enable_peer_access(&inherited.device).is_err());
            assert!(inherited.reservation.map(MIB2, &device.create(MIB2).unwrap()).is_err());
            assert!(reservation.map(0, &inherited.mapping.memory()).is_err());
            drop((inherited, inherited_host));
            own.write(0, b"child").unwrap();
            // The parent also mapped the page in which the kernel explains its errors.
            let error = device.create(1 << 50).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
            drop((own, mapped_on(&device, MIB2), reservation, device));
            session.close().unwrap();
        });
        child.join();
        assert!(all.is_some());
    });
}

/// Everything that a process does for the first time: its seat, its number, its DEVMNG file, the
/// boot id, and what the libraries below initialise.
fn first_uses() {
    let _ = Session::open();
    let _ = "avm1-00".parse::<Ticket>();
    let _ = discovery::list_with(&survey_options());
    let _ = device_process::device_pid(LogicalId(0));
}

/// Forks `count` times while eight threads make their first uses; each child makes the same. If a
/// child hangs, so does the test.
fn fork_among_first_uses(count: usize) {
    let mut left = count;
    while left > 0 {
        // A fresh process, so that the uses are the first ones again.
        let round = left.min(25);
        let fresh = fork(|| {
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| {
                        while !done.load(Ordering::Relaxed) {
                            first_uses();
                        }
                    });
                }
                let children: Vec<_> = (0..round).map(|_| fork(first_uses)).collect();
                children.into_iter().for_each(|child| child.join());
                done.store(true, Ordering::Relaxed);
            });
        });
        fresh.join();
        left -= round;
    }
}

/// Takes up to a minute: the last fault that it found, a child that took its parent's session for
/// its own, was seen once in ten thousand forks.
#[test]
fn ten_thousand_children_forked_among_first_uses_do_not_hang() {
    isolated(Config { door: Door::Missing, ..Config::default() }, |_| fork_among_first_uses(10_000));
}

#[test]
fn a_child_that_lives_through_its_parents_session_ends_nothing_of_the_next_one() {
    on_each_generation(Config::default(), |_, _| {
        let first = (device(0), crate::support::own_tgid());
        let child = start(|channel| channel.pause());
        child.wait();
        drop(first);
        let (device, _) = (device(0), crate::support::own_tgid());
        let before = device.create(MIB2).unwrap();
        // The child's end drops the last references to the files of the first session.
        child.signal();
        child.join();
        device.create(MIB2).unwrap();
        crate::support::write(&before, b"still there");
    });
}
