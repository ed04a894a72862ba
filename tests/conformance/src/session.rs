//! A process's memory session: one method per command, with the kernel's own arguments.
//!
//! Methods that issue one command return the kernel's [`Answer`], so that a rule can judge it.
//! Methods of several steps return a [`Failure`] that names the step that the driver refused.

use crate::host::Host;
use crate::manager::{Manager, errno, mmap, munmap};
use crate::rule::{Answer, Failure, Judge, Verdict, note_command};
use crate::tsd::{Channel, Identity, register, start_device_process};
use ascend_ioctl::svm::{self, Op, Para};
use ascend_ioctl::{Generation, davinci};
use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// 2 MiB.
pub const MIB2: u64 = svm::HUGE_PAGE;
/// 1 GiB.
pub const GIB: u64 = svm::HEAP_UNIT;
/// First heap index that ordinary clients use.
pub const FIRST_HEAP: u32 = ((svm::NORMAL_START - svm::SVM_START) / GIB) as u32;
/// The module that rules account their memory to.
pub const MODULE: u32 = 33;
/// A logical id that is in range but that no host has.
pub const ABSENT: u32 = 63;

/// The address of a heap index.
pub fn heap_address(index: u32) -> u64 {
    svm::SVM_START + u64::from(index) * GIB
}

/// A file bound to the module SVM.
#[derive(Debug)]
pub struct Svm {
    /// The file.
    pub file: Manager,
    /// The driver's generation, which decides the numbers of commands.
    pub generation: Generation,
    /// Super-pod id of device 0, by which the kernel knows an import from this server; 0 where
    /// there is none.
    pub sdid: u32,
}

impl Svm {
    /// Opens and binds a file.
    pub fn open(host: &Host) -> Result<Svm, Failure> {
        Ok(Svm::on(Manager::bound(davinci::module::SVM)?, host))
    }

    /// A file that is bound already.
    pub fn on(file: Manager, host: &Host) -> Svm {
        Svm { file, generation: host.generation, sdid: host.sdid.unwrap_or(0) }
    }

    /// The request value of a command: the newest generation's for one that this generation lacks.
    pub fn request_of(&self, op: Op) -> u32 {
        let known = self.generation.svm(op).or_else(|| Generation::NEWEST.svm(op));
        known.map_or(0, |command| command.command.request())
    }

    /// Issues a command; returns the argument as the kernel left it.
    pub fn call<P: Para>(&self, op: Op, device: u32, para: &P) -> Answer<svm::Arg> {
        let mut arg = svm::Arg::new(device, para);
        self.raw(op, &mut arg)?;
        Ok(arg)
    }

    /// Issues a command; returns the command's own member of the union.
    pub fn ask<P: Para>(&self, op: Op, device: u32, para: &P) -> Answer<P> {
        self.call(op, device, para).map(|arg| arg.para())
    }

    /// Issues a command on a prepared argument.
    pub fn raw(&self, op: Op, arg: &mut svm::Arg) -> Answer<i32> {
        note_command(op.name());
        crate::manager::ioctl(self.file.fd(), self.request_of(op), std::ptr::from_mut(arg) as u64)
    }

    /// ALLOC_PROC_STRUCT.
    pub fn alloc_process(&self) -> Answer<()> {
        self.call(Op::AllocProcStruct, 0, &svm::Alloc::default()).map(drop)
    }

    /// GET_MMAP_INFO with room for `capacity` segments.
    pub fn segments(&self, capacity: u32) -> Answer<Vec<svm::Segment>> {
        let mut array = vec![svm::Segment::default(); capacity as usize];
        let para = svm::MmapInfo { segments: capacity, array: array.as_mut_ptr() as u64, ..Default::default() };
        let answer = self.ask(Op::GetMmapInfo, 0, &para)?;
        array.truncate(answer.segments as usize);
        Ok(array)
    }

    /// mmap(2) of a segment by hint: the driver refuses MAP_FIXED.
    pub fn map_segment(&self, segment: &svm::Segment) -> Answer<u64> {
        mmap(segment.start, segment.size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, self.file.fd())
    }

    /// INIT_PROCESS, repeated on EAGAIN, which a signal causes.
    pub fn init(&self) -> Answer<svm::InitProcess> {
        for _ in 0..100 {
            match self.ask(Op::InitProcess, 0, &svm::InitProcess::default()) {
                Err(libc::EAGAIN) => {}
                answer => return answer,
            }
        }
        Err(libc::EAGAIN)
    }

    /// ALLOC_PROC_STRUCT and all segments, ready for INIT_PROCESS.
    pub fn prepare(&self) -> Result<Vec<svm::Segment>, Failure> {
        self.alloc_process().granted()?;
        let segments = self.segments(16).granted()?;
        for segment in &segments {
            let address = self.map_segment(segment).granted()?;
            if address != segment.start {
                return Err(Failure::broken(format!("segment {:#x} was mapped at {address:#x}", segment.start)));
            }
        }
        Ok(segments)
    }
}

/// A handle of physical memory: its id, and the values that later commands must repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    /// Logical id of the device, or 65.
    pub device: u32,
    /// Its id.
    pub id: i32,
    /// The side: host or device.
    pub side: u32,
    /// Page kind.
    pub page: u32,
    /// Number of pages.
    pub pages: u64,
    /// Module.
    pub module: u32,
}

/// A session after INIT_PROCESS.
#[derive(Debug)]
pub struct Session {
    /// Its file.
    pub svm: Svm,
    /// Its segments, empty if none is mapped.
    pub segments: Vec<svm::Segment>,
    next_heap: Cell<u32>,
    devmng: RefCell<Option<Manager>>,
    channels: RefCell<Vec<(u32, Channel)>>,
}

impl Session {
    /// A session on the host alone.
    pub fn host(host: &Host) -> Result<Session, Failure> {
        let svm = Svm::open(host)?;
        let segments = svm.prepare()?;
        svm.init().granted()?;
        Ok(Session::of(svm, segments))
    }

    /// A session whose file has done INIT_PROCESS.
    pub fn of(svm: Svm, segments: Vec<svm::Segment>) -> Session {
        Session {
            svm,
            segments,
            next_heap: Cell::new(FIRST_HEAP),
            devmng: RefCell::new(None),
            channels: RefCell::new(Vec::new()),
        }
    }

    /// A session without mapped segments, on the host alone.
    pub fn unmapped(host: &Host) -> Result<Session, Failure> {
        let svm = Svm::open(host)?;
        svm.alloc_process().granted()?;
        svm.init().granted()?;
        Ok(Session::of(svm, Vec::new()))
    }

    /// A session with device 0.
    pub fn start(host: &Host) -> Result<Session, Failure> {
        let session = Session::host(host)?;
        session.setup(0)?;
        Ok(session)
    }

    /// A session with devices 0 and 1.
    pub fn with_two(host: &Host) -> Result<Session, Failure> {
        let session = Session::start(host)?;
        session.setup(1)?;
        Ok(session)
    }

    /// The process's identity, from its one DEVMNG file.
    pub fn identity(&self) -> Result<Identity, Failure> {
        let mut devmng = self.devmng.borrow_mut();
        let file = match devmng.take() {
            Some(file) => file,
            None => Manager::bound(davinci::module::DEVMNG)?,
        };
        let identity = register(&file);
        *devmng = Some(file);
        identity
    }

    /// Starts the device process of a device, whether SETUP_DEVICE needs it or not.
    pub fn start_process(&self, device: u32) -> Verdict {
        let identity = self.identity()?;
        let mut channels = self.channels.borrow_mut();
        channels.retain(|(owner, _)| *owner != device);
        channels.push((device, start_device_process(&identity, device)?));
        Ok(())
    }

    /// SETUP_DEVICE; starts a device process first if the driver needs one.
    pub fn setup(&self, device: u32) -> Result<svm::SetupDevice, Failure> {
        match self.setup_device(device) {
            Err(libc::EFAULT) => {
                self.start_process(device)?;
                self.setup_device(device).granted()
            }
            answer => answer.granted(),
        }
    }

    /// SETUP_DEVICE.
    pub fn setup_device(&self, device: u32) -> Answer<svm::SetupDevice> {
        self.svm.ask(Op::SetupDevice, device, &svm::SetupDevice { stats_address: 1, ..Default::default() })
    }

    /// CLOSE_DEVICE.
    pub fn close_device(&self, device: u32) -> Answer<()> {
        self.svm.call(Op::CloseDevice, device, &svm::Alloc::default()).map(drop)
    }

    /// PREPARE_CLOSE_DEVICE.
    pub fn prepare_close(&self, device: u32) -> Answer<()> {
        self.svm.call(Op::PrepareCloseDevice, device, &svm::Alloc::default()).map(drop)
    }

    /// Unmaps every segment by its own call, issues CLOSE and closes the file.
    pub fn shut_down(self) -> Verdict {
        self.end_mappings()?;
        drop(self);
        Ok(())
    }

    /// Unmaps every segment by its own call.
    pub fn end_mappings(&self) -> Verdict {
        for segment in &self.segments {
            munmap(segment.start, segment.size).granted()?;
        }
        Ok(())
    }

    /// Whether the session still works: creates host memory and releases it.
    pub fn alive(&self) -> bool {
        match self.host_huge(MIB2) {
            Ok(handle) => {
                let _ = self.release(&handle);
                true
            }
            Err(_) => false,
        }
    }

    // Heaps and reservations.

    /// UPDATE_HEAP.
    pub fn update_heap(&self, para: svm::UpdateHeap) -> Answer<()> {
        self.svm.call(Op::UpdateHeap, 0, &para).map(drop)
    }

    /// Enables a reserve heap.
    pub fn enable(&self, kind: u32, index: u32, size: u64) -> Answer<()> {
        self.update_heap(svm::UpdateHeap { operation: svm::HEAP_ENABLE, kind, sub_kind: svm::SUB_RESERVE, index, size })
    }

    /// Disables a reserve heap.
    pub fn disable(&self, index: u32, size: u64) -> Answer<()> {
        self.update_heap(svm::UpdateHeap {
            operation: svm::HEAP_DISABLE,
            kind: svm::HEAP_HUGE,
            sub_kind: svm::SUB_RESERVE,
            index,
            size,
        })
    }

    /// A new reserve heap of huge chunks, 1 GiB; its index.
    pub fn heap(&self) -> Result<u32, Failure> {
        self.heap_of(svm::HEAP_HUGE)
    }

    /// A new reserve heap, 1 GiB; its index. Consecutive heaps are adjacent.
    pub fn heap_of(&self, kind: u32) -> Result<u32, Failure> {
        let index = self.next_heap.get();
        self.enable(kind, index, GIB).granted()?;
        self.next_heap.set(index + 1);
        Ok(index)
    }

    /// ALLOC.
    pub fn alloc(&self, address: u64, size: u64) -> Answer<()> {
        self.svm.call(Op::Alloc, 0, &svm::Alloc { address, size }).map(drop)
    }

    /// FREE_PAGES.
    pub fn free(&self, address: u64) -> Answer<()> {
        self.svm.call(Op::FreePages, 0, &svm::FreePages { address }).map(drop)
    }

    /// A reservation at the start of a heap of its own.
    pub fn reserve(&self, size: u64) -> Result<u64, Failure> {
        let address = heap_address(self.heap()?);
        self.alloc(address, size).granted()?;
        Ok(address)
    }

    // Physical memory.

    /// MEM_CREATE as given; returns the argument with its outputs.
    pub fn create_raw(&self, device: u32, para: svm::MemCreate) -> Answer<svm::MemCreate> {
        self.svm.ask(Op::MemCreate, device, &para)
    }

    /// MEM_CREATE.
    pub fn create(&self, device: u32, para: svm::MemCreate) -> Answer<Handle> {
        let answer = self.create_raw(device, para)?;
        Ok(Handle {
            device,
            id: answer.id,
            side: if para.side == svm::SIDE_DEVICE { svm::SIDE_DEVICE } else { svm::SIDE_HOST },
            page: para.page,
            pages: answer.pages,
            module: para.module,
        })
    }

    /// Host memory in huge pages.
    pub fn host_huge(&self, size: u64) -> Answer<Handle> {
        self.create(svm::HOST_ID, create_of(svm::SIDE_HOST, svm::PAGE_HUGE, size))
    }

    /// Host memory in the host's pages.
    pub fn host_normal(&self, size: u64) -> Answer<Handle> {
        self.create(svm::HOST_ID, create_of(svm::SIDE_HOST, svm::PAGE_NORMAL, size))
    }

    /// Memory of a device in huge pages.
    pub fn device_huge(&self, device: u32, size: u64) -> Answer<Handle> {
        self.create(device, create_of(svm::SIDE_DEVICE, svm::PAGE_HUGE, size))
    }

    /// MEM_RELEASE.
    pub fn release(&self, handle: &Handle) -> Answer<svm::MemRelease> {
        self.release_pages(handle, handle.pages)
    }

    /// MEM_RELEASE of `pages` pages.
    pub fn release_pages(&self, handle: &Handle, pages: u64) -> Answer<svm::MemRelease> {
        let para = svm::MemRelease { id: handle.id, side: handle.side, pages, ..Default::default() };
        self.svm.ask(Op::MemRelease, handle.device, &para)
    }

    // Mappings.

    /// The argument of MEM_MAP for a handle.
    pub fn map_para(handle: &Handle, address: u64, size: u64) -> svm::MemMap {
        svm::MemMap {
            address,
            size,
            id: handle.id,
            side: handle.side,
            page: handle.page,
            module: handle.module,
            pages: handle.pages,
        }
    }

    /// MEM_MAP as given.
    pub fn map_raw(&self, device: u32, para: svm::MemMap) -> Answer<()> {
        self.svm.call(Op::MemMap, device, &para).map(drop)
    }

    /// MEM_MAP of the beginning of a handle.
    pub fn map(&self, handle: &Handle, address: u64, size: u64) -> Answer<()> {
        self.map_raw(handle.device, Session::map_para(handle, address, size))
    }

    /// MEM_UNMAP.
    pub fn unmap(&self, address: u64) -> Answer<svm::MemUnmap> {
        self.svm.ask(Op::MemUnmap, svm::HOST_ID, &svm::MemUnmap { address, ..Default::default() })
    }

    /// Memory of a device, mapped in a reservation of its own.
    pub fn device_mapping(&self, device: u32, size: u64) -> Result<(Handle, u64), Failure> {
        let handle = self.device_huge(device, size).granted()?;
        let address = self.reserve(size)?;
        self.map(&handle, address, size).granted()?;
        Ok((handle, address))
    }

    /// Host memory, mapped in a reservation of its own.
    pub fn host_mapping(&self, size: u64) -> Result<(Handle, u64), Failure> {
        let handle = self.host_huge(size).granted()?;
        let address = self.reserve(size)?;
        self.map(&handle, address, size).granted()?;
        Ok((handle, address))
    }

    /// MEM_QUERY_OWNER.
    pub fn owner(&self, address: u64, size: u64) -> Answer<svm::MemQueryOwner> {
        let para = svm::MemQueryOwner { address, size, ..Default::default() };
        self.svm.ask(Op::MemQueryOwner, svm::HOST_ID, &para)
    }

    /// MEM_SET_ACCESS.
    pub fn set_access(&self, address: u64, size: u64, device: u32, access: u32) -> Answer<()> {
        let para = svm::MemAccess { address, size, device, access };
        self.svm.call(Op::MemSetAccess, svm::HOST_ID, &para).map(drop)
    }

    /// MEM_GET_ACCESS.
    pub fn get_access(&self, address: u64, size: u64, device: u32) -> Answer<svm::MemAccess> {
        let para = svm::MemAccess { address, size, device, access: 0 };
        self.svm.ask(Op::MemGetAccess, svm::HOST_ID, &para)
    }

    /// RESERVE_ADDR_INFO_QUERY.
    pub fn address_info(&self, address: u64) -> Answer<svm::ReserveAddressInfo> {
        self.svm.ask(Op::ReserveAddrInfoQuery, 0, &svm::ReserveAddressInfo { address, ..Default::default() })
    }

    // Shares.

    /// MEM_EXPORT; returns the id of the share.
    pub fn export(&self, handle: &Handle) -> Answer<i32> {
        let para = svm::MemExport { side: handle.side as i32, id: handle.id, share: 0 };
        self.svm.ask(Op::MemExport, handle.device, &para).map(|answer| answer.share)
    }

    /// MEM_IMPORT as given, from this server unless the argument says otherwise.
    pub fn import_raw(&self, device: u32, mut para: svm::MemImport) -> Answer<svm::MemImport> {
        if para.sdid == 0 {
            para.sdid = self.svm.sdid;
        }
        self.svm.ask(Op::MemImport, device, &para)
    }

    /// MEM_IMPORT on `device` of a share of `exporter`.
    pub fn import(&self, device: u32, exporter: u32, share: i32) -> Answer<Handle> {
        let answer = self.import_raw(device, svm::MemImport { share, exporter, ..Default::default() })?;
        Ok(Handle {
            device,
            id: answer.id,
            side: answer.side,
            page: answer.page,
            pages: answer.pages,
            module: answer.module,
        })
    }

    /// MEM_SET_PID.
    pub fn trust(&self, device: u32, share: i32, pids: &[i32]) -> Answer<()> {
        let para = svm::MemSetPid { share, count: pids.len() as u32, pids: pids.as_ptr() as u64 };
        self.svm.call(Op::MemSetPid, device, &para).map(drop)
    }

    /// MEM_SET_ATTR.
    pub fn set_attr(&self, device: u32, share: i32, kind: u32, flag: u32) -> Answer<()> {
        let value = svm::ShareAttr { no_trust_list: flag, ..Default::default() };
        self.svm.call(Op::MemSetAttr, device, &svm::MemSetAttr { share, kind, value }).map(drop)
    }

    /// MEM_GET_ATTR: the trust-list flag.
    pub fn get_attr(&self, exporter: u32, share: i32, kind: u32) -> Answer<u32> {
        let para = svm::MemGetAttr { share, exporter, kind, ..Default::default() };
        self.svm.ask(Op::MemGetAttr, 0, &para).map(|answer| answer.value.no_trust_list)
    }

    /// MEM_GET_INFO: the exporting device's physical id.
    pub fn get_info(&self, exporter: u32, share: i32) -> Answer<u32> {
        let para = svm::MemGetInfo { share, exporter, ..Default::default() };
        self.svm.ask(Op::MemGetInfo, 0, &para).map(|answer| answer.info.physical)
    }

    // Copies.

    /// MEMCPY; returns the direction that the kernel found.
    pub fn copy(&self, destination: u64, source: u64, size: u64, direction: u32) -> Answer<u32> {
        let para = svm::Memcpy { destination, source, size, direction, ..Default::default() };
        self.svm.ask(Op::Memcpy, 0, &para).map(|answer| answer.direction)
    }

    /// Copies bytes to a driver address.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Answer<()> {
        self.copy(address, bytes.as_ptr() as u64, bytes.len() as u64, svm::COPY_DETECT).map(drop)
    }

    /// Copies bytes from a driver address.
    pub fn read(&self, address: u64, length: usize) -> Answer<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.copy(bytes.as_mut_ptr() as u64, address, length as u64, svm::COPY_DETECT)?;
        Ok(bytes)
    }

    /// ASYNC_MEMCPY; returns the id of the task.
    pub fn copy_async(&self, destination: u64, source: u64, size: u64) -> Answer<i32> {
        let para = svm::AsyncMemcpy { destination, source, size, ..Default::default() };
        self.svm.ask(Op::AsyncMemcpy, 0, &para).map(|answer| answer.task)
    }

    /// MEMCPY_RESULT_REFRESH; returns the state.
    pub fn refresh(&self, task: i32) -> Answer<u64> {
        let para = svm::AsyncMemcpy { task, ..Default::default() };
        self.svm.ask(Op::MemcpyResultRefresh, 0, &para).map(|answer| answer.state)
    }

    /// MEMSET8; returns whether the kernel leaves the fill to the caller.
    pub fn fill(&self, address: u64, value: u64, size: u64) -> Answer<bool> {
        let para = svm::Memset { destination: address, value, size, ..Default::default() };
        self.svm.ask(Op::Memset8, 0, &para).map(|answer| answer.host_mapped == 1)
    }

    /// PREFETCH.
    pub fn prefetch(&self, device: u32, address: u64, size: u64) -> Answer<()> {
        self.svm.call(Op::Prefetch, device, &svm::Advise { address, size, ..Default::default() }).map(drop)
    }

    /// ADVISE.
    pub fn advise(&self, device: u32, address: u64, size: u64, advice: svm::Advice) -> Answer<()> {
        let advice = advice.bits();
        self.svm.call(Op::Advise, device, &svm::Advise { address, size, advice, ..Default::default() }).map(drop)
    }
}

/// The argument of MEM_CREATE.
pub fn create_of(side: u32, page: u32, size: u64) -> svm::MemCreate {
    svm::MemCreate { side, page, size, module: MODULE, ..Default::default() }
}

/// Reads a word of memory through the CPU.
pub fn peek(address: u64) -> u64 {
    // SAFETY: rules read only addresses that they made visible to the CPU, or in a child that may
    // be killed for it.
    unsafe { std::ptr::read_volatile(address as *const u64) }
}

/// Writes a word of memory through the CPU.
pub fn poke(address: u64, value: u64) {
    // SAFETY: rules write only addresses that they made visible to the CPU, or in a child that may
    // be killed for it.
    unsafe { std::ptr::write_volatile(address as *mut u64, value) };
}

/// Lets the kernel write a word to memory through the CPU's mapping, by read(2) of a pipe. Where
/// the CPU may not write, that is EFAULT, and no signal.
pub fn poke_by_kernel(address: u64, value: u64) -> Answer<()> {
    let mut ends = [0; 2];
    let size = size_of::<u64>();
    // SAFETY: the array takes two descriptors, which only this function uses, and the value is as
    // long as it says. The kernel writes only to an address that a rule made visible to the CPU.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return Err(errno());
        }
        libc::write(ends[1], (&raw const value).cast(), size);
        let read = libc::read(ends[0], std::ptr::without_provenance_mut(address as usize), size);
        let answer = if read == size as isize { Ok(()) } else { Err(errno()) };
        for end in ends {
            libc::close(end);
        }
        answer
    }
}

/// How long a rule waits for what the driver does in the background. It takes some seconds, and
/// more on a busy machine.
const PATIENCE: Duration = Duration::from_secs(40);

/// Waits until a condition is true.
pub fn eventually(what: &str, mut true_: impl FnMut() -> bool) -> Verdict {
    let deadline = Instant::now() + PATIENCE;
    while !true_() {
        if Instant::now() > deadline {
            return Err(Failure::broken(format!("not within {PATIENCE:?}: {what}")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}
