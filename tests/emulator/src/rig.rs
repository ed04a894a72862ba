//! A driver without a front for unit tests. The memory of callers is a map of bytes.

use crate::caller::{BadAddress, Caller, Memory, Outcome};
use crate::config::Config;
use crate::driver::{Driver, FileId};
use ascend_ioctl::davinci::{self, OpenArg};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::time::Instant;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A small pseudo-random generator with the same sequence in every run: xorshift.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Not zero, from which xorshift does not move.
        Random((seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// Allocations by their address; anything else faults.
#[derive(Default)]
pub struct TestMemory {
    blocks: RefCell<BTreeMap<u64, Vec<u8>>>,
}

impl TestMemory {
    /// Stores bytes and returns their address.
    pub fn put(&self, bytes: &[u8]) -> u64 {
        let mut blocks = self.blocks.borrow_mut();
        let end = blocks.last_key_value().map_or(0x1_0000, |(start, block)| start + block.len() as u64);
        let address = end.next_multiple_of(64) + 64;
        blocks.insert(address, bytes.to_vec());
        address
    }

    /// Reads a value back.
    pub fn get<T: FromBytes>(&self, address: u64) -> T {
        let mut bytes = vec![0; size_of::<T>()];
        self.read(address, &mut bytes).expect("an address of this heap");
        T::read_from_bytes(&bytes).expect("the value's own size")
    }

    fn with<R>(&self, address: u64, length: usize, then: impl FnOnce(&mut [u8]) -> R) -> Result<R, BadAddress> {
        let mut blocks = self.blocks.borrow_mut();
        let (start, block) = blocks.range_mut(..=address).next_back().ok_or(BadAddress)?;
        let offset = (address - start) as usize;
        block.get_mut(offset..offset.checked_add(length).ok_or(BadAddress)?).map(then).ok_or(BadAddress)
    }
}

impl Memory for TestMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), BadAddress> {
        self.with(address, buffer.len(), |bytes| buffer.copy_from_slice(bytes))
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), BadAddress> {
        self.with(address, bytes.len(), |to| to.copy_from_slice(bytes))
    }
}

/// A driver, and one heap for all callers.
pub struct Rig {
    pub driver: Driver,
    pub heap: TestMemory,
    /// When calls arrive.
    pub now: Instant,
}

/// A process with one thread.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TestProcess(pub i32);

impl Rig {
    pub fn new(config: Config) -> Self {
        Rig { driver: Driver::new(config), heap: TestMemory::default(), now: Instant::now() }
    }

    fn caller<'a>(heap: &'a TestMemory, process: TestProcess, tid: i32, now: Instant) -> Caller<'a> {
        Caller {
            tid,
            tgid: process.0,
            start_time: process.0 as u64 * 1_000_000_000,
            identity: 0,
            mount_namespace: 1,
            uid: 0,
            memory: heap,
            arrived: now,
        }
    }

    pub fn open(&mut self, process: TestProcess, path: &str) -> Result<FileId, Errno> {
        let backing = File::from(memfd_create(c"backing", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
        let caller = Rig::caller(&self.heap, process, process.0, self.now);
        self.driver.open(&caller, path, libc::O_RDWR, backing).expect("a path that the driver has")
    }

    pub fn ioctl(&mut self, process: TestProcess, file: FileId, request: u32, arg: u64) -> Outcome {
        self.ioctl_from(process, process.0, file, request, arg)
    }

    pub fn ioctl_from(&mut self, process: TestProcess, tid: i32, file: FileId, request: u32, arg: u64) -> Outcome {
        let caller = Rig::caller(&self.heap, process, tid, self.now);
        self.driver.ioctl(&caller, file, request, arg)
    }

    /// An ioctl whose argument is a value; returns the value after the call.
    pub fn call<T: IntoBytes + FromBytes + Immutable + Copy>(
        &mut self,
        process: TestProcess,
        file: FileId,
        request: u32,
        value: T,
    ) -> (Outcome, T) {
        let arg = self.heap.put(value.as_bytes());
        let outcome = self.ioctl(process, file, request, arg);
        (outcome, self.heap.get(arg))
    }

    /// Opens the manager and binds it.
    pub fn module(&mut self, process: TestProcess, name: &str) -> Result<FileId, Errno> {
        let file = self.open(process, davinci::PATH)?;
        match self.call(process, file, davinci::OPEN.request(), OpenArg::new(name)).0 {
            Outcome::Done(result) => result.map(|_| file),
            Outcome::Sleep(_) | Outcome::Wait(_) => unreachable!("OPEN does not sleep"),
        }
    }

    /// CLOSE and close.
    pub fn close(&mut self, process: TestProcess, file: FileId) {
        assert_eq!(self.ioctl(process, file, davinci::CLOSE.request(), 0), OK);
        self.driver.close(file, true);
    }

    /// exit(2) with these files open.
    pub fn exit(&mut self, process: TestProcess, files: &[FileId]) {
        self.driver.exit(process.0, process.0 as u64 * 1_000_000_000);
        for file in files {
            self.driver.close(*file, false);
        }
    }
}

/// Success.
pub const OK: Outcome = Outcome::Done(Ok(0));

/// A failure.
pub fn refused(errno: Errno) -> Outcome {
    Outcome::Done(Err(errno))
}

/// A positive answer.
pub fn positive(value: i64) -> Outcome {
    Outcome::Done(Ok(value))
}
