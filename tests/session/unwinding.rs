//! Subscribers of `tracing` are the user's code: they may call back into the library, and panic.

use crate::support::events::{AtEvent, Fields};
use crate::support::processes::{Peer, start};
use crate::support::{MIB2, PATIENCE, assert_nothing_left, inject, mapped_on, survey_options};
use ascend_emulator::{Config, fork, isolated, on_each_generation};
use ascend_vmm::discovery;
use ascend_vmm::pool::{Keep, PageCache, Pool, PoolOptions, Tag};
use ascend_vmm::{Device, LogicalId, Session, share};
use std::cell::Cell;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });
static EVENTS: AtomicUsize = AtomicUsize::new(0);

/// Runs an action at every event, except at events that the action causes.
fn subscribe(action: fn()) {
    let outermost = move |_: Fields| {
        if !INSIDE.replace(true) {
            EVENTS.fetch_add(1, Ordering::Relaxed);
            // The mark is removed even if the action panics.
            struct Outside;
            impl Drop for Outside {
                fn drop(&mut self) {
                    INSIDE.set(false);
                }
            }
            let _outside = Outside;
            action();
        }
    };
    tracing::subscriber::set_global_default(AtEvent(outermost)).unwrap();
}

/// Uses a bit of everything, with refused calls, from opening to closing.
fn scenario(emulator: &ascend_emulator::Emulator) {
    discovery::survey(&survey_options());
    let session = Session::open().unwrap();
    let (first, second) = (session.device(LogicalId(0)).unwrap(), session.device(LogicalId(1)).unwrap());
    let memory = first.create(MIB2).unwrap();
    let reservation = session.reserve(2 * MIB2).unwrap();
    let mapping = reservation.map(0, &memory).unwrap();
    mapping.grant(&second).unwrap();
    mapping.write(0, b"traced").unwrap();
    mapping.read(0, &mut [0; 6]).unwrap();
    mapping.write_async(0, vec![1; 100]).unwrap().wait().unwrap();
    let host = session.host().unwrap().create(MIB2).unwrap();
    let export = memory.export().unwrap();
    export.ticket().unwrap();
    let (here, there) = UnixStream::pair().unwrap();
    let child = fork(|| {
        let device = Session::open().unwrap().device(LogicalId(0)).unwrap();
        let memory = share::receive(&there, &device, PATIENCE).unwrap();
        drop(memory);
    });
    share::send(&here, &memory, PATIENCE).unwrap();
    child.join();
    inject(emulator, "MEM_UNMAP#1=EBUSY");
    drop(mapping);
    inject(emulator, "CLOSE_DEVICE#1=EBUSY");
    drop(second);
    let second = session.device(LogicalId(1)).unwrap();
    drop((reservation, host, export, memory, second, first));
    session.close().unwrap();
    // Sessions that are dropped instead of closed.
    let device = Session::open().unwrap().device(LogicalId(0)).unwrap();
    pools(emulator, &device);
    names(&device);
    imports(emulator, &device.session());
    drop(device);
}

/// A pool that grows, sleeps, wakes and shrinks, with a refused call in each step.
fn pools(emulator: &ascend_emulator::Emulator, device: &Device) {
    let pool = Pool::with(&PageCache::new(device), PoolOptions::default().handles(&[MIB2]).before_unmap(|_| ()));
    inject(emulator, "MEM_MAP#1=EBUSY");
    assert!(pool.allocate(MIB2, 1, Tag(0)).is_err());
    let block = pool.allocate(2 * MIB2, 1, Tag(0)).unwrap();
    inject(emulator, "MEM_UNMAP#2=EBUSY");
    assert!(pool.sleep(Tag(0), Keep::Host, |_| ()).is_err());
    assert_eq!(pool.sleep(Tag(0), Keep::Pinned, |_| ()).unwrap(), 2 * MIB2);
    inject(emulator, "MEM_MAP#2=EBUSY");
    assert!(pool.wake(&[Tag(0)], |_| ()).is_err());
    pool.wake(&[Tag(0)], |_| ()).unwrap();
    block.write(0, b"awake").unwrap();
    drop(block);
    inject(emulator, "MEM_UNMAP#1=EBUSY");
    assert!(pool.trim().is_err());
    assert_eq!(pool.trim().unwrap(), 2 * MIB2);
}

/// The ticket that is being imported and released.
static TICKET: Mutex<Option<share::Ticket>> = Mutex::new(None);

/// Imports memory of this process on another device and releases it; one release is refused.
fn imports(emulator: &ascend_emulator::Emulator, session: &Session) {
    let (first, second) = (session.device(LogicalId(0)).unwrap(), session.device(LogicalId(1)).unwrap());
    let export = first.create(MIB2).unwrap().export().unwrap();
    export.trust(&[share::BareTgid::of_this_process(session).unwrap()]).unwrap();
    let ticket = export.ticket().unwrap();
    *TICKET.lock().unwrap() = Some(ticket);
    for _ in 0..3 {
        drop(share::import(&second, &ticket).unwrap());
    }
    inject(emulator, "MEM_RELEASE#1=EBUSY");
    drop(share::import(&second, &ticket).unwrap());
    *TICKET.lock().unwrap() = None;
}

/// The name that is being opened and closed.
static NAME: Mutex<Option<share::Name>> = Mutex::new(None);

/// Opens memory of another process by name and closes it; one close is refused.
fn names(device: &Device) {
    let (peer, name) = published();
    *NAME.lock().unwrap() = Some(name);
    for _ in 0..3 {
        let memory = share::open_named(device, &name).unwrap();
        memory.write(0, b"named").unwrap();
        drop(memory);
    }
    *NAME.lock().unwrap() = None;
    peer.signal();
    peer.join();
}

/// Another process with memory under a name, which this one may open, until it is signalled.
fn published() -> (Peer, share::Name) {
    let peer = start(|channel| {
        let mapping = mapped_on(&Session::current().unwrap().device(LogicalId(0)).unwrap(), MIB2);
        let published = mapping.publish().unwrap();
        published.trust(&[channel.receive_tgid()]).unwrap();
        channel.send_bytes(&published.name().to_bytes());
        channel.wait();
    });
    peer.send_tgid();
    let name = share::Name::from_bytes(peer.receive_bytes::<65>()).unwrap();
    (peer, name)
}

#[test]
fn a_subscriber_that_calls_back_into_the_library_at_every_event_waits_for_nothing() {
    // On one generation: locks are the same on all, and each event starts and ends device
    // processes.
    isolated(Config::default(), |emulator| {
        subscribe(|| {
            // Any result will do, but the call must return.
            let Ok(session) = Session::current() else { return };
            let _ = session.reserve(MIB2).map(|reservation| reservation.mappings());
            let _ = session.device(LogicalId(0)).and_then(|device| device.create(MIB2)).map(|memory| memory.export());
            let _ = session.device(LogicalId(1));
            let _ = session.host().and_then(|host| host.create(MIB2));
            session.memory_at(0x12c0_0000_0000);
            let ticket = *TICKET.lock().unwrap();
            if let (Some(ticket), Ok(device)) = (ticket, session.device(LogicalId(1))) {
                let _ = share::import(&device, &ticket);
            }
            let name = *NAME.lock().unwrap();
            if let (Some(name), Ok(device)) = (name, session.device(LogicalId(0))) {
                let _ = share::open_named(&device, &name);
                let pool = Pool::new(&PageCache::new(&device));
                let _ = pool.allocate(100, 1, Tag(0)).map(|block| block.into_address());
                let _ = pool.sleep(Tag(0), Keep::Nothing, |_| ());
            }
        });
        // A close may find references of the subscriber, so the session is dropped instead.
        let session = Session::current().unwrap();
        let device = session.device(LogicalId(0)).unwrap();
        let reservation = session.reserve(2 * MIB2).unwrap();
        let mapping = reservation.map(0, &device.create(MIB2).unwrap()).unwrap();
        mapping.write(0, b"traced").unwrap();
        inject(emulator, "MEM_UNMAP#1=EBUSY");
        drop(mapping);
        names(&device);
        imports(emulator, &session);
        let pool = Pool::new(&PageCache::new(&device));
        drop(pool.allocate(3 * MIB2, 1, Tag(0)).unwrap());
        pool.sleep(Tag(0), Keep::Host, |_| ()).unwrap();
        pool.wake(&[Tag(0)], |_| ()).unwrap();
        pool.trim().unwrap();
        drop(pool);
        inject(emulator, "CLOSE_DEVICE#1=EBUSY");
        drop((reservation, device));
        drop(session);
        discovery::survey(&survey_options());
        drop(Session::current().unwrap().device(LogicalId(1)).unwrap());
        assert!(EVENTS.load(Ordering::Relaxed) > 50);
        assert_nothing_left(emulator);
    });
}

#[test]
fn a_subscriber_that_panics_at_every_event_loses_nothing() {
    on_each_generation(Config::default(), |_, emulator| {
        std::panic::set_hook(Box::new(|_| {}));
        subscribe(|| panic!("of the subscriber"));
        scenario(emulator);
        let _ = std::panic::take_hook();
        assert!(EVENTS.load(Ordering::Relaxed) > 50);
        assert_nothing_left(emulator);
    });
}

#[test]
fn every_event_reaches_a_subscriber_after_the_lock_under_which_it_happened() {
    isolated(Config::default(), |emulator| {
        static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let keep = |mut fields: Fields| SEEN.lock().unwrap().extend(fields.remove("command"));
        tracing::subscriber::set_global_default(AtEvent(keep)).unwrap();
        scenario(emulator);
        let seen = SEEN.lock().unwrap();
        for command in ["INIT_PROCESS", "SETUP_DEVICE", "UPDATE_HEAP", "MEM_EXPORT", "CLOSE_DEVICE", "munmap", "CLOSE"]
        {
            assert!(seen.iter().any(|name| name == command), "{command} was not reported");
        }
    });
}
