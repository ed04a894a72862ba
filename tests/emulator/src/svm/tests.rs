//! Tests of the model without the front. The conformance suite checks the rules of the driver;
//! these tests check what only the model can see, and the few answers that no rule covers.

mod books;
mod extremes;
mod life;
mod memory;
mod sharing;

use super::share::now;
use super::*;
use crate::caller::{BadAddress, Memory};
use crate::config::{Config, DeviceProcess};
use crate::driver::{AddressSpaceChange, Change, ChangeKind, Mmap};
use ascend_ioctl::klog;
use ascend_ioctl::svm::Para;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use zerocopy::FromBytes;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// A heap index of the ordinary range, and its address.
const INDEX: u32 = 2816;
const VA: u64 = 0x12C0_0000_0000;
/// Address of every call's argument, and of pageable memory.
const ARG: u64 = 0x1_0000;
const BUFFER: u64 = 0x10_0000;

/// A caller's memory: the pages that are mapped.
#[derive(Default)]
struct TestPages {
    pages: RefCell<BTreeMap<u64, [u8; 4096]>>,
}

impl TestPages {
    fn map(&self, start: u64, size: u64) {
        for page in (start / 4096..(start + size).div_ceil(4096)).map(|page| page * 4096) {
            self.pages.borrow_mut().insert(page, [0; 4096]);
        }
    }

    /// Calls `each` for every page of a range, with the covered part of the page and its offset in
    /// the range.
    fn each(&self, address: u64, length: usize, mut each: impl FnMut(&mut [u8], usize)) -> Result<(), BadAddress> {
        let mut pages = self.pages.borrow_mut();
        let mut done = 0;
        while done < length {
            let at = address.checked_add(done as u64).ok_or(BadAddress)?;
            let start = (at % 4096) as usize;
            let part = (4096 - start).min(length - done);
            let page = pages.get_mut(&(at & !4095)).ok_or(BadAddress)?;
            each(&mut page[start..start + part], done);
            done += part;
        }
        Ok(())
    }
}

impl Memory for TestPages {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), BadAddress> {
        self.each(address, buffer.len(), |part, at| buffer[at..at + part.len()].copy_from_slice(part))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), BadAddress> {
        self.each(address, bytes.len(), |part, at| part.copy_from_slice(&bytes[at..at + part.len()]))
    }
}

/// A driver, and the memory that all clients share in these tests.
struct Bench {
    machine: Machine,
    svm: Svm,
    memory: TestPages,
    files: u64,
    started: u64,
}

/// A process with a file of the module.
#[derive(Clone)]
struct TestClient {
    tgid: i32,
    start_time: u64,
    file: FileId,
    backing: Arc<File>,
}

impl Bench {
    fn new() -> Self {
        Bench::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config { device_process: DeviceProcess::Automatic, server: 0, ..Config::default() };
        change(&mut config);
        let memory = TestPages::default();
        memory.map(ARG, 4096);
        memory.map(BUFFER, 4 * MIB);
        Bench { machine: Machine::new(config), svm: Svm::default(), memory, files: 0, started: now() }
    }

    fn caller<'a>(memory: &'a TestPages, client: &TestClient) -> Caller<'a> {
        Caller {
            tid: client.tgid,
            tgid: client.tgid,
            start_time: client.start_time,
            identity: 0,
            mount_namespace: 1,
            uid: 0,
            memory,
            arrived: Instant::now(),
        }
    }

    fn open(&mut self, tgid: i32) -> TestClient {
        self.files += 1;
        let backing = File::from(memfd_create("backing", MFdFlags::MFD_CLOEXEC).unwrap());
        backing.set_len(1 << 46).unwrap();
        let kept = Arc::new(backing.try_clone().unwrap());
        let client = TestClient { tgid, start_time: self.started, file: FileId(self.files), backing: kept };
        self.svm.open(client.file, &Bench::caller(&self.memory, &client), backing);
        client
    }

    fn raw(&mut self, client: &TestClient, request: u32, arg: &mut Arg) -> Outcome {
        self.memory.write(ARG, arg.as_bytes()).unwrap();
        let caller = Bench::caller(&self.memory, client);
        let outcome = self.svm.ioctl(&mut self.machine, &caller, client.file, request, ARG);
        self.memory.read(ARG, arg.as_mut_bytes()).unwrap();
        outcome
    }

    fn call<P: Para>(&mut self, client: &TestClient, op: Op, device: u32, para: P) -> Result<P, Errno> {
        let request = self.machine.config.generation.svm(op).unwrap().command.request();
        let mut arg = Arg::new(device, &para);
        match self.raw(client, request, &mut arg) {
            Outcome::Done(result) => result.map(|_| arg.para()),
            Outcome::Sleep(_) | Outcome::Wait(_) => panic!("the call sleeps"),
        }
    }

    fn mmap(&mut self, client: &TestClient, start: u64, length: u64) -> Result<(), Errno> {
        let mmap = Mmap { hint: start, free: true, length, prot: 3, flags: libc::MAP_SHARED, offset: 0 };
        self.svm.mmap(&mut self.machine, &Bench::caller(&self.memory, client), client.file, &mmap)
    }

    fn change(&mut self, client: &TestClient, kind: ChangeKind, range: std::ops::Range<u64>) -> Result<Change, Errno> {
        let change = AddressSpaceChange { kind, start: range.start, length: range.end - range.start, mapped: true };
        self.svm.address_space_change(&mut self.machine, &Bench::caller(&self.memory, client), &change)
    }

    fn segments(&self) -> Vec<svm::Segment> {
        session::segments(&self.machine)
    }

    fn init(&mut self, client: &TestClient) -> Result<(), Errno> {
        self.call(client, Op::InitProcess, 0, svm::InitProcess::default()).map(drop)
    }

    /// A file with a process object and all segments mapped.
    fn prepare(&mut self, tgid: i32) -> TestClient {
        let client = self.open(tgid);
        self.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
        for segment in self.segments() {
            self.mmap(&client, segment.start, segment.size).unwrap();
        }
        client
    }

    /// A session with device 0 set up and a 1 GiB heap of 2 MiB chunks.
    fn session(&mut self, tgid: i32) -> TestClient {
        let client = self.prepare(tgid);
        self.init(&client).unwrap();
        self.setup(&client, 0).unwrap();
        self.enable(&client, INDEX, svm::HEAP_HUGE).unwrap();
        client
    }

    fn setup(&mut self, client: &TestClient, device: u32) -> Result<svm::SetupDevice, Errno> {
        self.call(client, Op::SetupDevice, device, svm::SetupDevice { stats_address: 1, ..Default::default() })
    }

    fn heap(&mut self, client: &TestClient, operation: u32, kind: u32, index: u32, size: u64) -> Result<(), Errno> {
        let para = svm::UpdateHeap { operation, kind, sub_kind: svm::SUB_RESERVE, index, size };
        self.call(client, Op::UpdateHeap, 0, para).map(drop)
    }

    fn enable(&mut self, client: &TestClient, index: u32, kind: u32) -> Result<(), Errno> {
        self.heap(client, svm::HEAP_ENABLE, kind, index, GIB)
    }

    fn alloc(&mut self, client: &TestClient, address: u64, size: u64) -> Result<(), Errno> {
        self.call(client, Op::Alloc, 0, svm::Alloc { address, size }).map(drop)
    }

    fn free(&mut self, client: &TestClient, address: u64) -> Result<(), Errno> {
        self.call(client, Op::FreePages, 0, svm::FreePages { address }).map(drop)
    }

    fn create(&mut self, client: &TestClient, device: u32, size: u64) -> Result<svm::MemCreate, Errno> {
        let side = if device == HOST { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
        let para = svm::MemCreate { size, side, module: 33, page: svm::PAGE_HUGE, ..Default::default() };
        self.call(client, Op::MemCreate, device, para)
    }

    fn release(&mut self, client: &TestClient, device: u32, id: i32, pages: u64) -> Result<u32, Errno> {
        let side = if device == HOST { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
        let para = svm::MemRelease { id, side, pages, ..Default::default() };
        self.call(client, Op::MemRelease, device, para).map(|para| para.kind)
    }

    fn map(
        &mut self,
        client: &TestClient,
        device: u32,
        id: i32,
        address: u64,
        size: u64,
        pages: u64,
    ) -> Result<(), Errno> {
        let side = if device == HOST { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
        let para = svm::MemMap { address, size, id, side, page: svm::PAGE_HUGE, module: 33, pages };
        self.call(client, Op::MemMap, device, para).map(drop)
    }

    fn unmap(&mut self, client: &TestClient, address: u64) -> Result<svm::MemUnmap, Errno> {
        self.call(client, Op::MemUnmap, HOST, svm::MemUnmap { address, ..Default::default() })
    }

    fn copy(&mut self, client: &TestClient, destination: u64, source: u64, size: u64) -> Result<u32, Errno> {
        let para = svm::Memcpy { destination, source, size, direction: svm::COPY_DETECT, ..Default::default() };
        self.call(client, Op::Memcpy, 0, para).map(|para| para.direction)
    }

    fn export(&mut self, client: &TestClient, device: u32, id: i32) -> Result<i32, Errno> {
        let side = i32::from(device != HOST);
        self.call(client, Op::MemExport, device, svm::MemExport { side, id, share: 0 }).map(|para| para.share)
    }

    fn trust(&mut self, client: &TestClient, device: u32, share: i32, pid: i32) -> Result<(), Errno> {
        self.memory.write(BUFFER, &pid.to_le_bytes()).unwrap();
        self.call(client, Op::MemSetPid, device, svm::MemSetPid { share, count: 1, pids: BUFFER }).map(drop)
    }

    fn import(&mut self, client: &TestClient, device: u32, exporter: u32, share: i32) -> Result<svm::MemImport, Errno> {
        self.call(client, Op::MemImport, device, svm::MemImport { share, exporter, ..Default::default() })
    }

    fn access(&mut self, client: &TestClient, address: u64, size: u64, device: u32, access: u32) -> Result<(), Errno> {
        self.call(client, Op::MemSetAccess, 0, svm::MemAccess { address, size, device, access }).map(drop)
    }

    /// Reserves addresses, creates memory of a device and maps it there.
    fn mapped(&mut self, client: &TestClient, device: u32, address: u64, size: u64) -> i32 {
        self.alloc(client, address, size).unwrap();
        let made = self.create(client, device, size).unwrap();
        self.map(client, device, made.id, address, size, made.pages).unwrap();
        made.id
    }

    fn exit(&mut self, client: &TestClient) {
        self.svm.exit(&mut self.machine, client.tgid, client.start_time);
        self.svm.release(&mut self.machine, client.file, false);
    }

    fn poke(&self, client: &TestClient, address: u64, bytes: &[u8]) {
        client.backing.write_all_at(bytes, address - svm::SVM_START).unwrap();
    }

    fn peek(&self, client: &TestClient, address: u64) -> u8 {
        let mut byte = [0];
        client.backing.read_exact_at(&mut byte, address - svm::SVM_START).unwrap();
        byte[0]
    }

    fn trap(&self) -> &'static str {
        self.machine.traps.first().map_or("", |trap| trap.name)
    }
}

#[test]
fn what_is_not_modelled_is_listed() {
    for generation in ascend_ioctl::Generation::ALL {
        let handled = |op: &Op| Behaviour::of(generation).handles(*op);
        for op in Op::ALL.iter().copied().filter(handled).filter(|op| generation.svm(*op).is_some()) {
            let mut bench = Bench::with(|config| config.generation = generation);
            let client = bench.session(100);
            let request = generation.svm(op).unwrap().command.request();
            bench.memory.write(ARG, Arg::new_zeroed().as_bytes()).unwrap();
            let caller = Bench::caller(&bench.memory, &client);
            let answer =
                bench.svm.dispatch(&mut bench.machine, &caller, client.file, request, ARG, &mut Arg::new_zeroed());
            let made_up = matches!(answer, Err(Stop::Refused(_, NOT_MODELLED)));
            assert_eq!(made_up, !is_modelled(op), "{}", op.name());
        }
    }
}
