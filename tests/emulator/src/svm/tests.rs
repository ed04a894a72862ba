//! Rules of the module, asked of the model directly. The whole rule book is the conformance suite's; here are the ones that the model's own structure
//! could break, and what only the model can see.

use super::share::now;
use super::*;
use crate::caller::{Fault, Memory};
use crate::config::{Attachment, Config, DeviceProcess};
use crate::driver::{AddressSpaceChange, ChangeKind, Mmap};
use ascend_ioctl::klog;
use ascend_ioctl::svm::Para;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use zerocopy::FromBytes;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// A heap index of the ordinary range, and its address.
const INDEX: u32 = 2816;
const VA: u64 = 0x12C0_0000_0000;
/// Where the argument of every call lies, and pageable memory.
const ARG: u64 = 0x1_0000;
const BUFFER: u64 = 0x10_0000;

/// A caller's memory: pages that exist, and pages that are read-only.
#[derive(Default)]
struct Pages {
    pages: RefCell<BTreeMap<u64, [u8; 4096]>>,
    read_only: RefCell<BTreeSet<u64>>,
}

impl Pages {
    fn map(&self, start: u64, size: u64) {
        for page in (start / 4096..(start + size).div_ceil(4096)).map(|page| page * 4096) {
            self.pages.borrow_mut().insert(page, [0; 4096]);
        }
    }

    /// Calls `each` with the part of every page that a range covers, and where it lies in the range.
    fn each(&self, address: u64, length: usize, mut each: impl FnMut(&mut [u8], usize)) -> Result<(), Fault> {
        let mut pages = self.pages.borrow_mut();
        let mut done = 0;
        while done < length {
            let at = address + done as u64;
            let start = (at % 4096) as usize;
            let part = (4096 - start).min(length - done);
            let page = pages.get_mut(&(at & !4095)).ok_or(Fault)?;
            each(&mut page[start..start + part], done);
            done += part;
        }
        Ok(())
    }
}

impl Memory for Pages {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.each(address, buffer.len(), |part, at| buffer[at..at + part.len()].copy_from_slice(part))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let pages = address & !4095..address + bytes.len() as u64;
        if self.read_only.borrow().range(pages).next().is_some() {
            return Err(Fault);
        }
        self.each(address, bytes.len(), |part, at| part.copy_from_slice(&bytes[at..at + part.len()]))
    }
}

/// A driver, and the memory that all its clients share in these tests.
struct Bench {
    machine: Machine,
    svm: Svm,
    memory: Pages,
    files: u64,
    started: u64,
}

/// A process with a file of the module's.
#[derive(Clone)]
struct Client {
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
        let memory = Pages::default();
        memory.map(ARG, 4096);
        memory.map(BUFFER, 4 * MIB);
        Bench { machine: Machine::new(config), svm: Svm::default(), memory, files: 0, started: now() }
    }

    fn caller<'a>(memory: &'a Pages, client: &Client) -> Caller<'a> {
        Caller {
            tid: client.tgid,
            tgid: client.tgid,
            start_time: client.start_time,
            mount_namespace: 1,
            uid: 0,
            memory,
            arrived: Instant::now(),
        }
    }

    fn open(&mut self, tgid: i32) -> Client {
        self.files += 1;
        let backing = File::from(memfd_create("backing", MFdFlags::MFD_CLOEXEC).unwrap());
        backing.set_len(1 << 46).unwrap();
        let kept = Arc::new(backing.try_clone().unwrap());
        let client = Client { tgid, start_time: self.started, file: FileId(self.files), backing: kept };
        self.svm.open(client.file, &Bench::caller(&self.memory, &client), backing);
        client
    }

    fn raw(&mut self, client: &Client, request: u32, arg: &mut Arg) -> Outcome {
        self.memory.write(ARG, arg.as_bytes()).unwrap();
        let caller = Bench::caller(&self.memory, client);
        let outcome = self.svm.ioctl(&mut self.machine, &caller, client.file, request, ARG);
        self.memory.read(ARG, arg.as_mut_bytes()).unwrap();
        outcome
    }

    fn call<P: Para>(&mut self, client: &Client, op: Op, device: u32, para: P) -> Result<P, Errno> {
        let request = self.machine.config.generation.svm(op).unwrap().command.request();
        let mut arg = Arg::new(device, &para);
        match self.raw(client, request, &mut arg) {
            Outcome::Done(result) => result.map(|_| arg.para()),
            Outcome::Sleep(_) => panic!("the call sleeps"),
        }
    }

    fn mmap(&mut self, client: &Client, start: u64, length: u64) -> Result<(), Errno> {
        let mmap = Mmap { hint: start, free: true, length, prot: 3, flags: libc::MAP_SHARED, offset: 0 };
        self.svm.mmap(&mut self.machine, &Bench::caller(&self.memory, client), client.file, &mmap)
    }

    fn change(&mut self, client: &Client, kind: ChangeKind, range: std::ops::Range<u64>) -> Result<(), Errno> {
        let change = AddressSpaceChange { kind, start: range.start, length: range.end - range.start };
        self.svm.address_space_change(&mut self.machine, &Bench::caller(&self.memory, client), &change)
    }

    fn segments(&self) -> Vec<svm::Segment> {
        session::segments(&self.machine)
    }

    fn init(&mut self, client: &Client) -> Result<(), Errno> {
        self.call(client, Op::InitProcess, 0, svm::InitProcess::default()).map(drop)
    }

    /// A file with a process object and all segments mapped.
    fn prepare(&mut self, tgid: i32) -> Client {
        let client = self.open(tgid);
        self.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
        for segment in self.segments() {
            self.mmap(&client, segment.start, segment.size).unwrap();
        }
        client
    }

    /// A session with device 0 set up and a 1 GiB heap of 2 MiB chunks.
    fn session(&mut self, tgid: i32) -> Client {
        let client = self.prepare(tgid);
        self.init(&client).unwrap();
        self.setup(&client, 0).unwrap();
        self.enable(&client, INDEX, svm::HEAP_HUGE).unwrap();
        client
    }

    fn setup(&mut self, client: &Client, device: u32) -> Result<svm::SetupDevice, Errno> {
        self.call(client, Op::SetupDevice, device, svm::SetupDevice { stats_address: 1, ..Default::default() })
    }

    fn heap(&mut self, client: &Client, operation: u32, kind: u32, index: u32, size: u64) -> Result<(), Errno> {
        let para = svm::UpdateHeap { operation, kind, sub_kind: svm::SUB_RESERVE, index, size };
        self.call(client, Op::UpdateHeap, 0, para).map(drop)
    }

    fn enable(&mut self, client: &Client, index: u32, kind: u32) -> Result<(), Errno> {
        self.heap(client, svm::HEAP_ENABLE, kind, index, GIB)
    }

    fn alloc(&mut self, client: &Client, address: u64, size: u64) -> Result<(), Errno> {
        self.call(client, Op::Alloc, 0, svm::Alloc { address, size }).map(drop)
    }

    fn free(&mut self, client: &Client, address: u64) -> Result<(), Errno> {
        self.call(client, Op::FreePages, 0, svm::FreePages { address }).map(drop)
    }

    fn create(&mut self, client: &Client, device: u32, size: u64) -> Result<svm::MemCreate, Errno> {
        let side = if device == HOST { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
        let para = svm::MemCreate { size, side, module: 33, page: svm::PAGE_HUGE, ..Default::default() };
        self.call(client, Op::MemCreate, device, para)
    }

    fn release(&mut self, client: &Client, device: u32, id: i32, pages: u64) -> Result<u32, Errno> {
        let side = if device == HOST { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
        let para = svm::MemRelease { id, side, pages, ..Default::default() };
        self.call(client, Op::MemRelease, device, para).map(|para| para.kind)
    }

    fn map(&mut self, client: &Client, device: u32, id: i32, address: u64, size: u64, pages: u64) -> Result<(), Errno> {
        let side = if device == HOST { svm::SIDE_HOST } else { svm::SIDE_DEVICE };
        let para = svm::MemMap { address, size, id, side, page: svm::PAGE_HUGE, module: 33, pages };
        self.call(client, Op::MemMap, device, para).map(drop)
    }

    fn unmap(&mut self, client: &Client, address: u64) -> Result<svm::MemUnmap, Errno> {
        self.call(client, Op::MemUnmap, HOST, svm::MemUnmap { address, ..Default::default() })
    }

    fn copy(&mut self, client: &Client, destination: u64, source: u64, size: u64) -> Result<u32, Errno> {
        let para = svm::Memcpy { destination, source, size, direction: svm::COPY_DETECT, ..Default::default() };
        self.call(client, Op::Memcpy, 0, para).map(|para| para.direction)
    }

    fn export(&mut self, client: &Client, device: u32, id: i32) -> Result<i32, Errno> {
        let side = i32::from(device != HOST);
        self.call(client, Op::MemExport, device, svm::MemExport { side, id, share: 0 }).map(|para| para.share)
    }

    fn trust(&mut self, client: &Client, device: u32, share: i32, pid: i32) -> Result<(), Errno> {
        self.memory.write(BUFFER, &pid.to_le_bytes()).unwrap();
        self.call(client, Op::MemSetPid, device, svm::MemSetPid { share, count: 1, pids: BUFFER }).map(drop)
    }

    fn import(&mut self, client: &Client, device: u32, exporter: u32, share: i32) -> Result<svm::MemImport, Errno> {
        self.call(client, Op::MemImport, device, svm::MemImport { share, exporter, ..Default::default() })
    }

    fn access(&mut self, client: &Client, address: u64, size: u64, device: u32, access: u32) -> Result<(), Errno> {
        self.call(client, Op::MemSetAccess, 0, svm::MemAccess { address, size, device, access }).map(drop)
    }

    /// A mapping of new memory of a device at an address: reserved, created, mapped.
    fn mapped(&mut self, client: &Client, device: u32, address: u64, size: u64) -> i32 {
        self.alloc(client, address, size).unwrap();
        let made = self.create(client, device, size).unwrap();
        self.map(client, device, made.id, address, size, made.pages).unwrap();
        made.id
    }

    fn exit(&mut self, client: &Client) {
        self.svm.exit(&mut self.machine, client.tgid, client.start_time);
        self.svm.release(&mut self.machine, client.file, false);
    }

    fn poke(&self, client: &Client, address: u64, bytes: &[u8]) {
        client.backing.write_all_at(bytes, address - svm::SVM_START).unwrap();
    }

    fn peek(&self, client: &Client, address: u64) -> u8 {
        let mut byte = [0];
        client.backing.read_exact_at(&mut byte, address - svm::SVM_START).unwrap();
        byte[0]
    }

    fn trap(&self) -> &'static str {
        self.machine.traps.first().map_or("", |trap| trap.name)
    }
}

#[test]
fn a_session_comes_up_on_every_generation_and_leaves_nothing() {
    for generation in Generation::ALL {
        let mut bench = Bench::with(|config| config.generation = generation);
        let client = bench.session(10);
        let id = bench.mapped(&client, 0, VA, 4 * MIB);
        assert_eq!(bench.svm.used(0), 4 * MIB);
        assert_eq!(bench.release(&client, 0, id, 2), Err(Errno::EBUSY));
        bench.exit(&client);
        assert!(bench.svm.state().is_empty(), "{generation}: {:?}", bench.svm.state());
        assert_eq!(bench.trap(), "");
    }
}

#[test]
fn the_dispatcher_checks_in_the_drivers_order() {
    let mut bench = Bench::new();
    let client = bench.open(10);
    let mut arg = Arg::new_zeroed();
    let mut ask = |bench: &mut Bench, request| bench.raw(&client, request, &mut arg);
    assert_eq!(ask(&mut bench, 0xC158_4D69), Errno::EINVAL.into(), "number 105");
    assert_eq!(ask(&mut bench, 0xC158_4E24), Errno::EINVAL.into(), "another magic");
    assert_eq!(ask(&mut bench, 0xC158_4D12), Errno::EINVAL.into(), "an unused number before INIT_PROCESS");
    assert_eq!(ask(&mut bench, 0x4158_4D66), Errno::EOPNOTSUPP.into(), "number 102 needs no process");
    assert_eq!(ask(&mut bench, 0xC158_4D24), Errno::EINVAL.into(), "INIT_PROCESS before ALLOC_PROC_STRUCT");
    let client = bench.session(11);
    assert_eq!(bench.raw(&client, 0xC158_4D12, &mut Arg::new_zeroed()), Errno::EOPNOTSUPP.into());
    let caller = Bench::caller(&bench.memory, &client);
    for address in [0, 8] {
        let outcome = bench.svm.ioctl(&mut bench.machine, &caller, client.file, 0xC158_4D32, address);
        assert_eq!(outcome, Errno::EINVAL.into());
    }
    // INIT_PROCESS is known by its whole word.
    assert_eq!(bench.raw(&client, 0xC158_4D24, &mut Arg::new_zeroed()), Errno::ESRCH.into());
}

#[test]
fn the_head_comes_back_rewritten_and_nothing_comes_back_on_error() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let request = svm::stable(Op::MemCreate).unwrap();
    let para = svm::MemCreate { size: 2 * MIB, side: 1, page: 1, ..Default::default() };
    let mut arg = Arg::new(0, &para);
    arg.head.logical = 77;
    assert_eq!(bench.raw(&client, request, &mut arg), Ok(0).into());
    assert_eq!((arg.head.logical, arg.head.device), (0, 0));
    let mut arg = Arg::new(0, &svm::MemCreate { size: 3, ..para });
    arg.head.logical = 77;
    let before = arg;
    assert_eq!(bench.raw(&client, request, &mut arg), Errno::EINVAL.into());
    assert_eq!(arg, before);
    // A word without READ executes without an answer.
    let mut arg = Arg::new(0, &para);
    assert_eq!(bench.raw(&client, request & !(2 << 30), &mut arg), Ok(0).into());
    assert_eq!(arg.para::<svm::MemCreate>().pages, 0);
    assert_eq!(bench.svm.used(0), 4 * MIB);
}

#[test]
fn an_answer_that_cannot_be_written_leaves_the_command_done() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let para = svm::MemCreate { size: 2 * MIB, side: 1, page: 1, ..Default::default() };
    bench.memory.write(ARG, Arg::new(0, &para).as_bytes()).unwrap();
    bench.memory.read_only.borrow_mut().insert(ARG);
    let caller = Bench::caller(&bench.memory, &client);
    let outcome = bench.svm.ioctl(&mut bench.machine, &caller, client.file, svm::stable(Op::MemCreate).unwrap(), ARG);
    assert_eq!(outcome, Errno::EINVAL.into());
    assert_eq!(bench.svm.used(0), 2 * MIB);
}

#[test]
fn segments_are_mapped_in_order_and_before_init() {
    let mut bench = Bench::new();
    let client = bench.open(10);
    let segments = bench.segments();
    assert_eq!(bench.mmap(&client, segments[0].start, segments[0].size), Err(Errno::EINVAL), "no process object");
    bench.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    let again = bench.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default());
    assert_eq!(again.map(drop), Err(Errno::EALREADY));
    assert_eq!(bench.mmap(&client, segments[1].start, segments[1].size), Err(Errno::EINVAL));
    assert_eq!(bench.mmap(&client, segments[0].start, segments[0].size / 2), Err(Errno::EINVAL));
    bench.mmap(&client, segments[0].start, segments[0].size).unwrap();
    bench.init(&client).unwrap();
    // The late segment is refused, and the session goes on.
    assert_eq!(bench.mmap(&client, segments[1].start, segments[1].size), Err(Errno::ESRCH));
    bench.setup(&client, 0).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
}

#[test]
fn a_late_first_segment_spoils_the_session() {
    let mut bench = Bench::new();
    let client = bench.open(10);
    bench.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    bench.init(&client).unwrap();
    bench.setup(&client, 0).unwrap();
    assert_eq!(bench.mmap(&client, svm::SVM_START, svm::SVM_SIZE), Err(Errno::ESRCH));
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::EINVAL));
}

#[test]
fn a_process_has_one_session() {
    let mut bench = Bench::new();
    let first = bench.session(10);
    let second = bench.open(10);
    bench.call(&second, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.init(&second), Err(Errno::EEXIST));
    // The same file is good once the first session is gone.
    bench.change(&first, ChangeKind::Unmap, svm::SVM_START..svm::DYNAMIC_START).unwrap();
    bench.init(&second).unwrap();
    assert_eq!(bench.create(&first, 0, 2 * MIB).map(drop), Err(Errno::EINVAL));
    assert_eq!(bench.svm.stuck(), 0);
    let third = bench.open(10);
    bench.call(&third, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.init(&third), Err(Errno::EEXIST));
    bench.svm.release(&mut bench.machine, third.file, true);
    assert_eq!(bench.svm.stuck(), 1);
}

#[test]
fn a_session_without_mappings_is_in_the_way_until_an_exact_munmap() {
    let mut bench = Bench::new();
    let client = bench.open(10);
    bench.call(&client, Op::AllocProcStruct, 0, svm::Alloc::default()).unwrap();
    bench.init(&client).unwrap();
    bench.setup(&client, 0).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
    bench.svm.release(&mut bench.machine, client.file, true);
    assert_eq!(bench.svm.used(0), 0, "device memory goes with the file");
    let next = bench.prepare(10);
    assert_eq!(bench.init(&next), Err(Errno::EEXIST));
    // Another range says nothing to the driver.
    bench.change(&client, ChangeKind::Advise(libc::MADV_DONTNEED), svm::UVM_START..svm::UVM_START + svm::UVM_SIZE).ok();
    assert_eq!(bench.init(&next), Err(Errno::EEXIST));
    bench.svm.exit(&mut bench.machine, 10, bench.started);
    bench.init(&next).unwrap();
}

#[test]
fn only_exact_or_splitting_changes_end_a_session() {
    let svm_range = svm::SVM_START..svm::DYNAMIC_START;
    let part = VA..VA + MIB;
    let cases: [(ChangeKind, std::ops::Range<u64>, bool); 12] = [
        (ChangeKind::Unmap, svm_range.clone(), false),
        (ChangeKind::Unmap, svm_range.start - 4096..svm_range.end, true),
        (ChangeKind::Unmap, part.clone(), false),
        (ChangeKind::Unmap, svm::SOMA_START..svm::SOMA_START + svm::SOMA_SIZE, true),
        (ChangeKind::Unmap, svm::SOMA_START..svm::SOMA_START + MIB, true),
        (ChangeKind::Unmap, svm::HOST_PIN_START_PCIE..svm::HOST_PIN_START_PCIE + svm::HOST_PIN_SIZE, false),
        (ChangeKind::Protect(libc::PROT_NONE), svm_range.clone(), true),
        (ChangeKind::Protect(libc::PROT_NONE), part.clone(), false),
        (ChangeKind::Protect(3), part.clone(), true),
        (ChangeKind::Advise(libc::MADV_DONTDUMP), part.clone(), true),
        (ChangeKind::Advise(libc::MADV_RANDOM), part.clone(), false),
        (ChangeKind::Remap { length: svm::SVM_SIZE - 4096, fixed: false }, svm_range.clone(), false),
    ];
    for (kind, range, survives) in cases {
        let mut bench = Bench::new();
        let client = bench.session(10);
        bench.change(&client, kind, range.clone()).unwrap();
        let alive = bench.create(&client, HOST, 2 * MIB).is_ok();
        assert_eq!(alive, survives, "{kind:?} of {range:x?}");
    }
    let mut bench = Bench::new();
    let client = bench.session(10);
    assert_eq!(bench.change(&client, ChangeKind::Advise(libc::MADV_DONTNEED), part), Err(Errno::EINVAL));
    let grow = ChangeKind::Remap { length: svm::SVM_SIZE + GIB, fixed: false };
    assert_eq!(bench.change(&client, grow, svm_range), Err(Errno::EFAULT));
    assert!(bench.create(&client, HOST, 2 * MIB).is_ok());
}

#[test]
fn a_device_that_is_not_set_up_does_not_know_the_process() {
    let mut bench = Bench::with(|config| config.device_process = DeviceProcess::Required);
    let client = bench.prepare(10);
    bench.init(&client).unwrap();
    assert_eq!(bench.setup(&client, 0).map(drop), Err(Errno::EFAULT));
    assert_eq!(bench.setup(&client, 64).map(drop), Err(Errno::EFAULT));
    assert_eq!(bench.setup(&client, 5).map(drop), Err(Errno::EINVAL));
    assert_eq!(bench.setup(&client, 1124).map(drop), Err(Errno::ENODEV));
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::ESRCH));
    bench.machine.start_device_process(10, 0).unwrap();
    bench.setup(&client, 0).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
    // The device process dies: so does its memory.
    bench.machine.end_device_process(10, 0);
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::ESRCH));
    assert_eq!(bench.svm.used(0), 0);
}

#[test]
fn heaps_are_enabled_where_nothing_is_and_disabled_by_place_and_size_alone() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let enable = |bench: &mut Bench, index, size| bench.heap(&client, 0, svm::HEAP_HUGE, index, size);
    assert_eq!(enable(&mut bench, INDEX, GIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, INDEX - 1, 2 * GIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 3000, 0), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 3000, GIB + 2 * MIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 3000, 129 * GIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 8191, 2 * GIB), Err(Errno::EINVAL));
    assert_eq!(enable(&mut bench, 3000, 128 * GIB), Ok(()));
    assert_eq!(bench.heap(&client, 2, svm::HEAP_HUGE, 3200, GIB), Err(Errno::EINVAL));
    assert_eq!(bench.heap(&client, 0, 1, 3200, GIB), Err(Errno::EINVAL));
    assert_eq!(bench.heap(&client, 1, svm::HEAP_HUGE, 3000, GIB), Err(Errno::EINVAL));
    assert_eq!(bench.heap(&client, 1, 99, 3000, 128 * GIB), Ok(()));
}

#[test]
fn reservations_are_taken_and_freed_whole() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let end = VA + GIB;
    assert_eq!(bench.alloc(&client, 0x5000, MIB), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.alloc(&client, VA + GIB, MIB), Err(Errno::EINVAL));
    assert_eq!(bench.alloc(&client, VA, 0), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.alloc(&client, end - 2 * MIB, 4 * MIB), Err(Errno::EADDRNOTAVAIL));
    bench.alloc(&client, VA + 4 * MIB, 4 * MIB).unwrap();
    assert_eq!(bench.alloc(&client, VA + 6 * MIB, 64 * GIB), Err(Errno::EBUSY));
    assert_eq!(bench.alloc(&client, VA, 6 * MIB), Err(Errno::EINVAL));
    bench.alloc(&client, VA, 4 * MIB).unwrap();
    // Unaligned with size 0: one chunk.
    bench.alloc(&client, VA + 8 * MIB + 1, 0).unwrap();
    assert_eq!(bench.free(&client, VA + 9 * MIB), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.free(&client, VA + 11 * MIB), Err(Errno::EINVAL));
    assert_eq!(bench.free(&client, VA + 6 * MIB), Err(Errno::EINVAL));
    for address in [VA, VA + 4 * MIB, VA + 8 * MIB] {
        bench.free(&client, address).unwrap();
        assert_eq!(bench.free(&client, address), Err(Errno::EINVAL));
    }
}

#[test]
fn the_other_segments_have_rules_of_their_own() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, svm::SOMA_START, MIB).unwrap();
    bench.free(&client, svm::SOMA_START + GIB).unwrap();
    assert_eq!(bench.alloc(&client, svm::UVM_START, MIB), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.free(&client, svm::UVM_START), Err(Errno::EINVAL));
    assert_eq!(bench.free(&client, svm::HOST_PIN_START_PCIE), Err(Errno::EINVAL));
    bench.alloc(&client, svm::HOST_PIN_START_PCIE, MIB).unwrap();
    bench.free(&client, svm::HOST_PIN_START_PCIE).unwrap();
}

#[test]
fn ids_go_up_and_a_failed_create_uses_one() {
    let mut bench = Bench::with(|config| config.hbm = 8 * MIB);
    let client = bench.session(10);
    for device in [0, HOST] {
        assert_eq!(bench.create(&client, device, 4 * MIB).unwrap().id, 0);
        assert_eq!(bench.create(&client, device, 1 << 50).map(drop), Err(Errno::ENOMEM));
        assert_eq!(bench.create(&client, device, 5).map(drop), Err(Errno::EINVAL));
        let made = bench.create(&client, device, 4 * MIB).unwrap();
        assert_eq!((made.id, made.pages), (2, 2));
        bench.release(&client, device, 2, 2).unwrap();
        assert_eq!(bench.create(&client, device, 2 * MIB).unwrap().id, 3);
    }
}

#[test]
fn a_handle_can_be_released_in_parts() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, VA, 8 * MIB).unwrap();
    let made = bench.create(&client, HOST, 8 * MIB).unwrap();
    bench.release(&client, HOST, made.id, 1).unwrap();
    assert_eq!(bench.svm.used(HOST), 6 * MIB);
    assert_eq!(bench.map(&client, HOST, made.id, VA, 2 * MIB, 4), Err(Errno::EBADRQC));
    bench.release(&client, HOST, made.id, 100).unwrap();
    assert_eq!(bench.svm.used(HOST), 0);
    assert_eq!(bench.release(&client, HOST, made.id, 1), Err(Errno::EINVAL));
    // None named: on the host a half-freed handle, on the device nothing at all.
    let made = bench.create(&client, HOST, 2 * MIB).unwrap();
    bench.release(&client, HOST, made.id, 0).unwrap();
    assert_eq!(bench.map(&client, HOST, made.id, VA, 2 * MIB, 1), Err(Errno::EBADRQC));
    let made = bench.create(&client, 0, 2 * MIB).unwrap();
    bench.release(&client, 0, made.id, 0).unwrap();
    bench.map(&client, 0, made.id, VA, 2 * MIB, 1).unwrap();
}

#[test]
fn a_map_is_checked_against_the_handle_and_the_reservation() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, VA, 8 * MIB).unwrap();
    for device in [HOST, 0] {
        let made = bench.create(&client, device, 4 * MIB).unwrap();
        let at = VA + 2 * MIB;
        assert_eq!(bench.map(&client, device, made.id + 1, at, 2 * MIB, 2), Err(Errno::EINVAL), "no such handle");
        assert_eq!(bench.map(&client, device, made.id, at, 2 * MIB, 3), Err(Errno::EINVAL), "another page count");
        assert_eq!(bench.map(&client, device, made.id, at, 6 * MIB, 2), Err(Errno::ENOMEM), "larger than the handle");
        assert_eq!(bench.map(&client, device, made.id, at, 10 * MIB, 2), Err(Errno::EINVAL), "larger than reserved");
        assert_eq!(bench.map(&client, device, made.id, at, MIB, 2), Err(Errno::EINVAL), "no whole chunks");
        bench.map(&client, device, made.id, at, 4 * MIB, 2).unwrap();
        assert_eq!(bench.map(&client, device, made.id, at, 4 * MIB, 2), Err(Errno::EADDRINUSE));
        assert_eq!(bench.release(&client, device, made.id, 2), Err(Errno::EBUSY));
        assert_eq!(bench.free(&client, VA), Err(Errno::EBUSY));
        assert_eq!(bench.unmap(&client, at + 2 * MIB).map(drop), Err(Errno::EINVAL));
        let unmapped = bench.unmap(&client, at).unwrap();
        assert_eq!((unmapped.size, unmapped.device), (4 * MIB, device));
        bench.release(&client, device, made.id, 2).unwrap();
        // The owner mark stays until the reservation goes.
        let (other, pages) = (if device == HOST { 0 } else { HOST }, 1);
        let other_made = bench.create(&client, other, 2 * MIB).unwrap();
        assert_eq!(bench.map(&client, other, other_made.id, VA, 2 * MIB, pages), Err(Errno::EINVAL));
        bench.release(&client, other, other_made.id, 1).unwrap();
        bench.free(&client, VA).unwrap();
        bench.alloc(&client, VA, 8 * MIB).unwrap();
    }
}

#[test]
fn a_map_that_meets_another_leaves_stale_chunks_that_spread() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, VA, 16 * MIB).unwrap();
    let made = bench.create(&client, HOST, 16 * MIB).unwrap();
    let map = |bench: &mut Bench, chunk: u64, chunks: u64| {
        bench.map(&client, HOST, made.id, VA + chunk * 2 * MIB, chunks * 2 * MIB, 8)
    };
    map(&mut bench, 4, 1).unwrap();
    assert_eq!(map(&mut bench, 2, 4), Err(Errno::EADDRINUSE));
    assert_eq!(map(&mut bench, 2, 1), Err(Errno::EADDRINUSE), "chunks 2 and 3 are stale");
    assert_eq!(map(&mut bench, 1, 2), Err(Errno::EADDRINUSE), "and make chunk 1 stale");
    assert_eq!(map(&mut bench, 1, 1), Err(Errno::EADDRINUSE));
    map(&mut bench, 0, 1).unwrap();
    // A failure for another reason leaves nothing.
    assert_eq!(bench.map(&client, HOST, 99, VA + 10 * MIB, 2 * MIB, 8), Err(Errno::EINVAL));
    map(&mut bench, 5, 1).unwrap();
    for chunk in [0, 4, 5] {
        bench.unmap(&client, VA + chunk * 2 * MIB).unwrap();
    }
    bench.free(&client, VA).unwrap();
    bench.alloc(&client, VA, 16 * MIB).unwrap();
    map(&mut bench, 1, 3).unwrap();
}

#[test]
fn bytes_go_to_the_device_and_back() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let id = bench.mapped(&client, 0, VA, 4 * MIB);
    let pattern: Vec<u8> = (0..3 * MIB).map(|index| (index * 7 % 251) as u8).collect();
    bench.memory.write(BUFFER, &pattern).unwrap();
    assert_eq!(bench.copy(&client, VA + 5, BUFFER, 3 * MIB), Ok(svm::COPY_HOST_TO_DEVICE));
    bench.memory.write(BUFFER, &vec![0; 3 * MIB as usize]).unwrap();
    assert_eq!(bench.copy(&client, BUFFER, VA + 5, 3 * MIB), Ok(svm::COPY_DEVICE_TO_HOST));
    let mut back = vec![0; 3 * MIB as usize];
    bench.memory.read(BUFFER, &mut back).unwrap();
    assert!(back == pattern);
    // The bytes are the handle's, not the address's.
    bench.unmap(&client, VA).unwrap();
    bench.map(&client, 0, id, VA, 2 * MIB, 2).unwrap();
    bench.memory.write(BUFFER, &[0; 64]).unwrap();
    bench.copy(&client, BUFFER, VA + 5, 64).unwrap();
    bench.memory.read(BUFFER, &mut back[..64]).unwrap();
    assert!(back[..64] == pattern[..64]);
    assert_eq!(bench.copy(&client, VA, BUFFER, 0), Err(Errno::EINVAL));
    assert_eq!(bench.copy(&client, VA, 0x1000, 8), Err(Errno::EFAULT));
    assert_eq!(bench.copy(&client, BUFFER, BUFFER + 64, 8), Ok(svm::COPY_HOST_TO_HOST));
    assert_eq!(bench.copy(&client, VA, BUFFER, 4 * MIB), Err(Errno::EINVAL), "a hole");
}

#[test]
fn the_end_of_a_range_that_begins_inside_a_mapping_is_not_checked() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.memory.write(BUFFER, &[7; 64]).unwrap();
    assert_eq!(bench.copy(&client, VA + 2 * MIB - 16, BUFFER, 64), Err(Errno::EFAULT));
    assert_eq!(bench.copy(&client, BUFFER + 128, VA + 2 * MIB - 16, 16), Ok(svm::COPY_DEVICE_TO_HOST));
    let mut bytes = [0; 16];
    bench.memory.read(BUFFER + 128, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 16], "the mapped part is written");
}

#[test]
fn asynchronous_copies_hold_what_they_use_until_they_are_refreshed() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    let para = svm::AsyncMemcpy { destination: VA, source: BUFFER, size: 100, ..Default::default() };
    let task = bench.call(&client, Op::AsyncMemcpy, 0, para).unwrap().task;
    assert_eq!(bench.unmap(&client, VA).map(drop), Err(Errno::EBUSY));
    let refresh = svm::AsyncMemcpy { task, ..Default::default() };
    let done = bench.call(&client, Op::MemcpyResultRefresh, 0, refresh).unwrap();
    assert_eq!(done.state, svm::ASYNC_DONE);
    assert_eq!(bench.call(&client, Op::MemcpyResultRefresh, 0, refresh).map(drop), Err(Errno::EINVAL));
    assert_eq!(bench.call(&client, Op::AsyncMemcpy, 0, para).unwrap().task, task + 1);
    bench.call(&client, Op::PrepareCloseDevice, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.call(&client, Op::AsyncMemcpy, 0, para).map(drop), Err(Errno::ENONET));
    bench.setup(&client, 0).unwrap();
    assert_eq!(bench.call(&client, Op::AsyncMemcpy, 0, para).map(drop), Err(Errno::ENONET));
}

#[test]
fn closing_a_device_leaks_the_counters_of_what_was_mapped() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.call(&client, Op::CloseDevice, 0, svm::Alloc::default()).unwrap();
    assert_eq!(bench.svm.used(0), 0);
    assert_eq!(bench.free(&client, VA), Err(Errno::EBUSY));
    assert_eq!(bench.copy(&client, VA, BUFFER, 8), Err(Errno::EINVAL));
    bench.setup(&client, 0).unwrap();
    let made = bench.create(&client, 0, 2 * MIB).unwrap();
    bench.map(&client, 0, made.id, VA, 2 * MIB, 1).unwrap();
    bench.unmap(&client, VA).unwrap();
    assert_eq!(bench.free(&client, VA), Err(Errno::EBUSY));
    bench.heap(&client, svm::HEAP_DISABLE, svm::HEAP_HUGE, INDEX, GIB).unwrap();
    bench.enable(&client, INDEX, svm::HEAP_HUGE).unwrap();
    bench.alloc(&client, VA, 2 * MIB).unwrap();
}

#[test]
fn the_cpu_sees_host_memory_and_device_memory_that_it_was_given_access_to() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, HOST, VA, 2 * MIB);
    bench.poke(&client, VA + 9, b"cpu");
    bench.mapped(&client, 0, VA + 2 * MIB, 2 * MIB);
    assert_eq!(bench.copy(&client, VA + 2 * MIB, VA + 9, 3), Ok(svm::COPY_HOST_TO_DEVICE));
    bench.access(&client, VA + 2 * MIB, 2 * MIB, HOST, 3).unwrap();
    assert_eq!(bench.peek(&client, VA + 2 * MIB + 1), b'p');
    assert_eq!(bench.access(&client, VA + 2 * MIB, 2 * MIB, HOST, 3), Err(Errno::EEXIST));
    assert_eq!(bench.access(&client, VA, 2 * MIB, 0, 3), Err(Errno::EOPNOTSUPP));
    bench.unmap(&client, VA).unwrap();
    assert_eq!(bench.peek(&client, VA + 9), 0, "no old bytes after the unmap");
    bench.exit(&client);
    assert_eq!(bench.trap(), "");
}

#[test]
fn devices_on_hccs_can_be_given_host_memory() {
    let mut bench = Bench::with(|config| config.attachment = Attachment::Hccs);
    let client = bench.session(10);
    bench.mapped(&client, HOST, VA, 2 * MIB);
    bench.access(&client, VA, 2 * MIB, 0, 3).unwrap();
}

#[test]
fn shared_memory_lives_with_its_last_holder() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let importer = bench.session(11);
    bench.setup(&importer, 1).unwrap();
    let id = bench.mapped(&exporter, 0, VA, 2 * MIB);
    bench.memory.write(BUFFER, b"shared").unwrap();
    bench.copy(&exporter, VA, BUFFER, 6).unwrap();
    let share = bench.export(&exporter, 0, id).unwrap();
    assert_eq!(bench.export(&exporter, 0, id), Err(Errno::EINVAL));
    assert_eq!(bench.import(&importer, 1, 0, share).map(drop), Err(Errno::EACCES));
    assert_eq!(bench.import(&importer, 1, 0, share + 1).map(drop), Err(Errno::EFAULT));
    assert_eq!(bench.import(&exporter, 0, 0, share).map(drop), Err(Errno::EACCES));
    assert_eq!(bench.trust(&importer, 0, share, 11), Err(Errno::EACCES));
    bench.trust(&exporter, 0, share, 11).unwrap();
    let got = bench.import(&importer, 1, 0, share).unwrap();
    assert_eq!((got.id, got.side, got.module, got.pages), (1, 1, 33, 1), "the refused import used id 0");
    assert_eq!(bench.import(&importer, 1, 0, share).map(drop), Err(Errno::EFAULT));
    bench.exit(&exporter);
    assert_eq!(bench.svm.used(0), 2 * MIB);
    bench.alloc(&importer, VA, 2 * MIB).unwrap();
    bench.map(&importer, 1, got.id, VA, 2 * MIB, 1).unwrap();
    bench.memory.write(BUFFER, &[0; 6]).unwrap();
    bench.copy(&importer, BUFFER, VA, 6).unwrap();
    let mut bytes = [0; 6];
    bench.memory.read(BUFFER, &mut bytes).unwrap();
    assert_eq!(&bytes, b"shared");
    bench.unmap(&importer, VA).unwrap();
    assert_eq!(bench.release(&importer, 1, got.id, 1), Ok(2));
    assert_eq!(bench.svm.used(0), 0);
    let fresh = bench.create(&importer, 0, 2 * MIB).unwrap();
    assert_eq!(bench.export(&importer, 0, fresh.id), Ok(share + 1));
}

#[test]
fn a_process_that_was_listed_before_it_started_is_refused() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let made = bench.create(&exporter, 0, 2 * MIB).unwrap();
    let share = bench.export(&exporter, 0, made.id).unwrap();
    bench.trust(&exporter, 0, share, 11).unwrap();
    bench.started = now() + 1;
    let importer = bench.session(11);
    assert_eq!(bench.import(&importer, 0, 0, share).map(drop), Err(Errno::EACCES));
    while now() <= importer.start_time {}
    bench.trust(&exporter, 0, share, 11).unwrap();
    bench.import(&importer, 0, 0, share).unwrap();
}

#[test]
fn without_a_trust_list_anyone_may_import() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let importer = bench.session(11);
    let made = bench.create(&exporter, 0, 2 * MIB).unwrap();
    let share = bench.export(&exporter, 0, made.id).unwrap();
    let value = svm::ShareAttr { no_trust_list: 1, ..Default::default() };
    let para = svm::MemSetAttr { share, kind: 0, value };
    assert_eq!(bench.call(&importer, Op::MemSetAttr, 0, para).map(drop), Err(Errno::EPERM));
    bench.call(&exporter, Op::MemSetAttr, 0, para).unwrap();
    assert_eq!(bench.trust(&exporter, 0, share, 11), Err(Errno::EPERM));
    bench.import(&importer, 0, 0, share).unwrap();
    bench.call(&exporter, Op::MemSetAttr, 0, para).unwrap();
    bench.exit(&importer);
    assert!(bench.svm.state().shares[0].trusted.is_empty());
}

#[test]
fn two_processes_see_each_others_stores_in_shared_host_memory() {
    let mut bench = Bench::new();
    let exporter = bench.session(10);
    let importer = bench.session(11);
    let id = bench.mapped(&exporter, HOST, VA, 2 * MIB);
    bench.poke(&exporter, VA, b"before");
    let share = bench.export(&exporter, HOST, id).unwrap();
    bench.trust(&exporter, HOST, share, 11).unwrap();
    let got = bench.import(&importer, HOST, HOST, share).unwrap();
    bench.alloc(&importer, VA + 8 * MIB, 2 * MIB).unwrap();
    bench.map(&importer, HOST, got.id, VA + 8 * MIB, 2 * MIB, 1).unwrap();
    assert_eq!(bench.peek(&importer, VA + 8 * MIB), b'b');
    bench.poke(&importer, VA + 8 * MIB + 100, b"x");
    bench.svm.settle_windows();
    assert_eq!(bench.peek(&exporter, VA + 100), b'x');
    bench.exit(&exporter);
    assert_eq!(bench.peek(&importer, VA + 8 * MIB + 100), b'x');
    bench.exit(&importer);
    assert!(bench.svm.state().is_empty());
    assert_eq!(bench.trap(), "");
}

#[test]
fn host_memory_is_freed_when_the_address_space_goes_and_device_memory_when_the_file_does() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.create(&client, HOST, 2 * MIB).unwrap();
    bench.create(&client, 0, 2 * MIB).unwrap();
    // A child still holds the file.
    bench.svm.exit(&mut bench.machine, client.tgid, client.start_time);
    assert_eq!((bench.svm.used(HOST), bench.svm.used(0)), (0, 2 * MIB));
    bench.svm.release(&mut bench.machine, client.file, false);
    assert!(bench.svm.state().is_empty());
}

#[test]
fn what_would_crash_the_kernel_is_a_trap() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.access(&client, VA, 2 * MIB, HOST, 0).unwrap();
    assert_eq!(bench.trap(), "");
    bench.access(&client, VA, 2 * MIB, HOST, 3).unwrap();
    assert_eq!(bench.trap(), "access-after-access-none");

    let mut bench = Bench::new();
    let client = bench.session(10);
    let made = bench.create(&client, HOST, 4 * MIB).unwrap();
    bench.release(&client, HOST, made.id, 1).unwrap();
    bench.export(&client, HOST, made.id).unwrap();
    bench.release(&client, HOST, made.id, 2).unwrap();
    assert_eq!(bench.trap(), "release-of-half-freed-export");

    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.alloc(&client, VA, 4 * MIB).unwrap();
    bench.alloc(&client, VA + 4 * MIB, 2 * MIB).unwrap();
    let made = bench.create(&client, HOST, 4 * MIB).unwrap();
    bench.map(&client, HOST, made.id, VA + 2 * MIB, 4 * MIB, 2).unwrap();
    bench.free(&client, VA + 4 * MIB).unwrap();
    assert_eq!(bench.trap(), "free-under-spanning-map");

    let mut bench = Bench::new();
    let client = bench.session(10);
    let child = Client { tgid: 11, ..client.clone() };
    bench.mmap(&child, 25 << 40, GIB).unwrap();
    assert_eq!(bench.trap(), "dynamic-mmap-by-stranger");
}

#[test]
fn a_cpu_touch_where_nothing_is_mapped_is_found() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, HOST, VA, 2 * MIB);
    bench.poke(&client, VA + 100, b"good");
    bench.svm.release(&mut bench.machine, client.file, true);
    assert_eq!(bench.trap(), "");
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.poke(&client, VA + 100, b"bad");
    bench.exit(&client);
    assert_eq!(bench.trap(), "touch-of-unmapped-address");
}

#[test]
fn dynamic_ranges_are_mapped_by_the_process_and_have_no_owner_mark() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    let (va, index) = (26u64 << 40, 10 << 10);
    assert_eq!(bench.mmap(&client, 20 << 40, GIB), Err(Errno::EINVAL));
    bench.mmap(&client, va, 2 * GIB).unwrap();
    assert_eq!(bench.mmap(&client, va + GIB, 2 * GIB), Err(Errno::EINVAL));
    assert_eq!(bench.enable(&client, index, svm::HEAP_HUGE), Err(Errno::EINVAL));
    bench.heap(&client, 0, svm::HEAP_HUGE, index, 2 * GIB).unwrap();
    bench.mapped(&client, HOST, va, 2 * MIB);
    bench.alloc(&client, va + 2 * MIB, 4 * MIB).unwrap();
    for (device, at) in [(0, va + 2 * MIB), (HOST, va + 4 * MIB)] {
        let made = bench.create(&client, device, 2 * MIB).unwrap();
        bench.map(&client, device, made.id, at, 2 * MIB, 1).unwrap();
    }
    // A heap without mapping takes device memory only.
    bench.enable(&client, index + 100, svm::HEAP_HUGE).unwrap();
    let bare = va + 100 * GIB;
    bench.alloc(&client, bare, 4 * MIB).unwrap();
    let made = bench.create(&client, HOST, 2 * MIB).unwrap();
    assert_eq!(bench.map(&client, HOST, made.id, bare, 2 * MIB, 1), Err(Errno::EADDRNOTAVAIL));
    assert_eq!(bench.mmap(&client, bare, GIB), Err(Errno::EINVAL));
}

#[test]
fn a_refusal_is_explained_in_the_log_page() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.memory.map(klog::SVM_ERRORS, 4096);
    bench.create(&client, 0, 5).unwrap_err();
    let page = |bench: &Bench| {
        let mut bytes = [0; 4096];
        bench.memory.read(klog::SVM_ERRORS, &mut bytes).unwrap();
        klog::Page::read_from_bytes(&bytes).unwrap()
    };
    assert_eq!(page(&bench).write, 0, "no magic, no sentence");
    bench.memory.write(klog::SVM_ERRORS, klog::Page::empty(klog::SVM_ERRORS).as_bytes()).unwrap();
    bench.create(&client, 0, 5).unwrap_err();
    let first = page(&bench);
    let text = String::from_utf8(first.text[..first.write as usize].to_vec()).unwrap();
    assert!(text.starts_with("MEM_CREATE") && text.ends_with("errno=22)\n"), "{text}");
    bench.create(&client, 0, 5).unwrap_err();
    assert_eq!(page(&bench).write, 2 * first.write);
    // Without a reader the area runs full: the last sentence is cut, and both positions start anew.
    while page(&bench).write != 0 {
        bench.create(&client, 0, 5).unwrap_err();
    }
    assert_eq!(*page(&bench).text.last().unwrap(), 0);
    // A position beyond the area makes the page useless until it is repaired.
    bench.memory.write(klog::SVM_ERRORS + 48, &4000i32.to_le_bytes()).unwrap();
    bench.create(&client, 0, 5).unwrap_err();
    assert_eq!(page(&bench).write, 4000);
}

#[test]
fn what_a_machine_cannot_do_is_noted_in_the_other_page() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    for page in [klog::SVM_ERRORS, klog::SVM_RUN_INFO] {
        bench.memory.map(page, 4096);
        bench.memory.write(page, klog::Page::empty(page).as_bytes()).unwrap();
    }
    let para = svm::MemImport { kind: 9, ..Default::default() };
    assert_eq!(bench.call(&client, Op::MemImport, 0, para).map(drop), Err(Errno::EOPNOTSUPP));
    let written = |bench: &Bench, page: u64| {
        let mut bytes = [0; 4];
        bench.memory.read(page + 48, &mut bytes).unwrap();
        i32::from_le_bytes(bytes)
    };
    assert_eq!(written(&bench, klog::SVM_ERRORS), 0);
    let noted = written(&bench, klog::SVM_RUN_INFO);
    assert!(noted > 0);
    bench.setup(&client, 1).unwrap();
    assert!(written(&bench, klog::SVM_RUN_INFO) > noted);
}

#[test]
fn in_the_oldest_generation_an_unmap_of_a_whole_dynamic_range_ends_the_session() {
    for (generation, survives) in [(Generation::V8_5_0, false), (Generation::V26_1, true)] {
        let mut bench = Bench::with(|config| config.generation = generation);
        let client = bench.session(10);
        let va = 26u64 << 40;
        bench.mmap(&client, va, GIB).unwrap();
        bench.enable(&client, 10 << 10, svm::HEAP_HUGE).unwrap();
        bench.mapped(&client, HOST, va, GIB);
        bench.unmap(&client, va).unwrap();
        assert_eq!(bench.create(&client, HOST, 2 * MIB).is_ok(), survives, "{generation}");
    }
}

#[test]
fn a_silent_device_makes_calls_wait_and_a_dead_one_fails_them() {
    let mut bench = Bench::new();
    let client = bench.session(10);
    bench.mapped(&client, 0, VA, 2 * MIB);
    bench.machine.silence_device(0, Duration::from_secs(1));
    let para = svm::MemCreate { size: 2 * MIB, side: 1, page: 1, ..Default::default() };
    let outcome = bench.raw(&client, svm::stable(Op::MemCreate).unwrap(), &mut Arg::new(0, &para));
    assert!(matches!(outcome, Outcome::Sleep(_)));
    bench.machine.silence_device(0, Duration::ZERO);
    assert_eq!(bench.create(&client, 0, 2 * MIB).unwrap().id, 1, "the call that waited has changed nothing");
    bench.machine.link_broken = true;
    assert_eq!(bench.copy(&client, VA, BUFFER, 8), Err(Errno::EIO));
    bench.machine.kill_device(0);
    assert_eq!(bench.create(&client, 0, 2 * MIB).map(drop), Err(Errno::ENODEV));
    assert_eq!(bench.copy(&client, VA, BUFFER, 8), Err(Errno::ENXIO));
}

#[test]
fn a_hundred_thousand_reservations_and_mappings_cost_no_more_each() {
    let mut bench = Bench::with(|config| config.hbm = 1 << 40);
    let client = bench.session(10);
    bench.heap(&client, 0, svm::HEAP_HUGE, 3000, 128 * GIB).unwrap();
    bench.heap(&client, 0, svm::HEAP_HUGE, 3200, 128 * GIB).unwrap();
    let address = |index: u64| {
        let heap = if index < 50_000 { 3000 } else { 3200 };
        svm::SVM_START + heap * GIB + index % 50_000 * 2 * MIB
    };
    let begun = Instant::now();
    for index in 0..100_000 {
        bench.alloc(&client, address(index), 2 * MIB).unwrap();
        let made = bench.create(&client, 0, 2 * MIB).unwrap();
        bench.map(&client, 0, made.id, address(index), 2 * MIB, 1).unwrap();
    }
    for index in 0..100_000 {
        bench.unmap(&client, address(index)).unwrap();
        bench.free(&client, address(index)).unwrap();
        bench.release(&client, 0, index as i32, 1).unwrap();
    }
    // A quadratic cost would take hours; the limit is for a debug build on a busy machine.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    assert_eq!(bench.svm.used(0), 0);
}
