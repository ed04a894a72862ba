//! Memory under a name of 64 characters: how the vendor's library shares ordinary allocations.
//!
//! IPC_MEM_CREATE gives device memory of a process a name, and IPC_MEM_SET_PID lists the processes
//! that may open it. An opener queries the size (IPC_MEM_QUERY), allocates addresses in a heap of
//! its own that is not for reservations, ties the name to them (IPC_MEM_OPEN), and maps the memory
//! there with PREFETCH. In two ways this is weaker than an [`Export`](super::Export). A name does
//! **not keep the memory alive**: it is gone when its owner frees it or ends. And a process can
//! open a name once, for one device.

use crate::bytes::Bytes;
use crate::copy::Slice;
use crate::device::{Device, DeviceInner};
use crate::driver::svm::{HeapKind, NAME, NAME_LIST};
use crate::error::{Error, Failed, Invalid, KernelResult, Result};
use crate::id::PhysicalId;
use crate::mapping::{Mapped, Mapping};
use crate::reserve::arena::Window;
use crate::session::SessionInner;
use crate::session::undo::{Left, Live, Undo, undo};
use crate::share::BareTgid;
use crate::slots::Lookup;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The name of memory: 64 characters. The vendor's library passes it as 65 bytes, of which the last
/// is 0. It is not a secret: names are easy to guess, and the list of processes protects the
/// memory.
///
/// ```
/// use ascend_vmm::share::Name;
///
/// let text = "00000a1f0000000000000003000000000000000000000000000000000000000";
/// assert!(text.parse::<Name>().is_err()); // 63 characters
/// assert_eq!(format!("{text}0").parse::<Name>()?.to_string(), format!("{text}0"));
/// # Ok::<(), ascend_vmm::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name([u8; NAME]);

impl Name {
    /// A name as the vendor's library writes it.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] unless it is 64 ASCII letters or digits and a 0.
    pub fn from_bytes(bytes: [u8; NAME]) -> Result<Name> {
        let (end, text) = (bytes[NAME - 1], &bytes[..NAME - 1]);
        if end != 0 || !text.iter().all(u8::is_ascii_alphanumeric) {
            return Err(Invalid::because(
                "read the name of memory",
                "the bytes are not a name",
                "A name is 64 letters or digits, and as bytes a 0 after them.",
            ));
        }
        Ok(Name(bytes))
    }

    /// The name as the vendor's library takes it.
    pub fn to_bytes(self) -> [u8; NAME] {
        self.0
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Name> {
        let mut bytes = [0; NAME];
        if text.len() == NAME - 1 {
            bytes[..NAME - 1].copy_from_slice(text.as_bytes());
        }
        Name::from_bytes(bytes)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.0[..NAME - 1]).unwrap_or_default())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({self})")
    }
}

/// The addresses of an opened name, and which commands are left to undo it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenedAt {
    /// Logical id of the device.
    device: u32,
    size: u64,
    kind: HeapKind,
    window: Window,
    /// IPC_MEM_CLOSE is left to call.
    open: bool,
    /// FREE_PAGES is left to call.
    allocated: bool,
}

impl OpenedAt {
    fn address(&self) -> u64 {
        self.window.start
    }

    /// Notes that a device was closed, which closed the names that were opened for it.
    pub(crate) fn forget_device(&mut self, device: u32) {
        self.open &= self.device != device;
    }
}

impl SessionInner {
    /// Does what is left of IPC_MEM_CLOSE, FREE_PAGES and disabling the heap.
    pub(crate) fn close_named(&self, opened: &mut OpenedAt) -> KernelResult<()> {
        if opened.open {
            self.svm.ipc_mem_close(opened.device, opened.address(), opened.size)?;
            opened.open = false;
        }
        if opened.allocated {
            self.svm.free_pages(opened.address(), opened.size)?;
            opened.allocated = false;
        }
        self.close_heap(opened.kind, opened.window)
    }
}

/// A name that this process has opened.
#[derive(Debug)]
pub(crate) struct Opened {
    name: Name,
    at: OpenedAt,
    physical: PhysicalId,
    pub(crate) device: Arc<Live<DeviceInner>>,
    /// True once it fills its slot in the table of names.
    entered: bool,
}

/// Memory of another process that was opened by its name. Closed when dropped.
///
/// **The owner decides how long it exists**: when it frees the memory or ends, copies fail, or the
/// device reports a fault.
///
/// The example of [`open_named`] makes one.
#[must_use = "memory is closed when it is dropped"]
pub struct NamedMemory {
    pub(crate) inner: Arc<Live<Opened>>,
}

impl fmt::Debug for NamedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NamedMemory({})", self.inner.describe())
    }
}

const OPERATION_OPEN: &str = "open memory by its name";

/// Opens memory by its name, for a device of this process: that of the memory, or one that reaches
/// it ([`Device::enable_peer_access`]). The creator must have listed this process. Opening a name
/// again gives the same memory.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::share::{self, Name};
/// use ascend_vmm::{LogicalId, Session};
/// use std::io::{Read, Write};
/// use std::os::unix::net::UnixStream;
///
/// let (mut socket, mut other) = UnixStream::pair()?;
/// // The opener gets the name, as bytes of the vendor's library or as text, by any channel.
/// let opener = ascend_emulator::fork(move || {
///     let session = Session::open().unwrap();
///     let device = session.device(LogicalId(0)).unwrap();
///     let mut key = [0; 65];
///     other.read_exact(&mut key).unwrap();
///     let memory = share::open_named(&device, &Name::from_bytes(key).unwrap()).unwrap();
///     let mut bytes = [0; 4];
///     memory.read(0, &mut bytes).unwrap();
///     assert_eq!(bytes, [7; 4]);
/// });
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// let mapping = session.reserve(2 << 20)?.map(0, &memory)?;
/// mapping.fill(0, 4, 7)?;
/// let published = mapping.publish()?;
/// // Easier than a list of processes, and less safe.
/// published.trust_anyone()?;
/// socket.write_all(&published.name().to_bytes())?;
/// opener.join();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Invalid`] if this process has opened the name for another device; [`Error::Refused`] if
/// there is no such name, this process is not listed, or the device does not reach the memory.
#[doc(alias = "aclrtIpcMemImportByKey")]
#[doc(alias = "cuIpcOpenMemHandle")]
pub fn open_named(device: &Device, name: &Name) -> Result<NamedMemory> {
    let device = &device.inner;
    let session = &device.session;
    session.check_process()?;
    let slot = match session.sharing.names.find(*name) {
        Lookup::Object(inner) if Arc::ptr_eq(&inner.device, device) => return Ok(NamedMemory { inner }),
        Lookup::Object(inner) => {
            return Err(Invalid::because(
                OPERATION_OPEN,
                format!("this process has opened it for {}", inner.device.name()),
                "A process opens a name for one device: close it there first.",
            ));
        }
        Lookup::Vacant(slot) => slot,
    };
    // A process opens a name once: close an earlier open that the kernel refused to close.
    session.retry();
    let failed = |refused| device.failed(refused, OPERATION_OPEN, name.to_string());
    let found = session.svm.ipc_mem_query(name.0).map_err(failed)?;
    let kind = HeapKind::Managed { huge: found.huge };
    let Some(window) = session.open_heap(kind, found.size).map_err(failed)? else {
        return Err(Invalid::because(
            OPERATION_OPEN,
            format!("no {} of addresses are free in one piece", Bytes(found.size)),
            "Free reservations, or close other names.",
        ));
    };
    let at = OpenedAt { device: device.id, size: found.size, kind, window, open: false, allocated: false };
    // From here on a drop undoes the commands.
    let physical = PhysicalId(found.physical);
    let mut opened = Live::new(Opened { name: *name, at, physical, device: device.clone(), entered: false });
    session.svm.alloc(at.address(), at.size).map_err(failed)?;
    opened.at.allocated = true;
    session.svm.ipc_mem_open(device.id, name.0, at.address(), at.size).map_err(failed)?;
    opened.at.open = true;
    session.svm.prefetch(device.id, at.address(), at.size).map_err(failed)?;
    opened.entered = true;
    let inner = Arc::new(opened);
    slot.fill(&inner);
    Ok(NamedMemory { inner })
}

impl NamedMemory {
    /// First address, for the device.
    pub fn address(&self) -> u64 {
        self.inner.at.address()
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.inner.at.size
    }

    /// The name.
    pub fn name(&self) -> Name {
        self.inner.name
    }

    /// Physical id of the device that the memory is on.
    pub fn location(&self) -> PhysicalId {
        self.inner.physical
    }

    /// Copies the memory at `offset` into a buffer.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a range outside of the memory; [`Error::Refused`] if the owner's
    /// memory is gone, or the device could not copy.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.slice(offset, to.len() as u64)?.read(to)
    }

    /// Copies a buffer into the memory at `offset`.
    ///
    /// # Errors
    ///
    /// Those of [`NamedMemory::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.slice(offset, from.len() as u64)?.write(from)
    }

    /// Closes it. (Dropping it closes it too, and logs what goes wrong.)
    ///
    /// # Errors
    ///
    /// [`Error::InUse`] unless this is the last reference; [`Error::Refused`] if the kernel does
    /// not close it. The memory comes back.
    #[doc(alias = "aclrtIpcMemClose")]
    pub fn close(self) -> Result<(), Failed<NamedMemory>> {
        undo(self.inner).map_err(|(error, inner)| Failed { error, object: NamedMemory { inner } })
    }
}

impl Opened {
    fn leave_table(&self) {
        if self.entered {
            self.device.session.sharing.names.vacate(&self.name);
        }
    }

    fn describe(&self) -> String {
        format!("{}, {} at {:#x}", self.name, Bytes(self.at.size), self.at.address())
    }
}

impl Undo for Opened {
    const OPERATION: &'static str = "close named memory";

    fn session(&self) -> &SessionInner {
        &self.device.session
    }

    fn undo(&mut self) -> Result<()> {
        let session = self.device.session.clone();
        if let Err(refused) = session.close_named(&mut self.at) {
            return Err(self.device.failed(refused, Self::OPERATION, self.describe()));
        }
        self.leave_table();
        Ok(())
    }

    fn abandon(&mut self, error: Error) {
        self.leave_table();
        self.device.session.keep(Left::Opened(self.at), error);
    }

    fn users(&self, others: usize) -> String {
        format!("{others} other reference(s) to {} are alive. Drop them first.", self.describe())
    }

    fn is_awaited(&self) -> bool {
        true
    }

    fn restore(opened: &Arc<Live<Opened>>) {
        opened.device.session.sharing.names.fill(opened.name, opened);
    }
}

/// A name that the kernel has for mapped memory.
#[derive(Debug)]
struct Publication {
    name: Name,
    session: Arc<Live<SessionInner>>,
    #[expect(dead_code, reason = "held, not read: memory with a name stays mapped")]
    mapped: Vec<Arc<Live<Mapped>>>,
}

/// Mapped memory under a name, for processes with the vendor's library. The name ends when this is
/// dropped, and processes that opened it lose the memory then. They can write it until then.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// let mapping = session.reserve(2 << 20)?.map(0, &memory)?;
/// let published = mapping.publish()?;
/// println!("open {}", published.name());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "the name ends when it is dropped"]
pub struct Published {
    inner: Arc<Live<Publication>>,
}

impl fmt::Debug for Published {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Published({})", self.inner.name)
    }
}

const OPERATION_PUBLISH: &str = "give memory a name";
const OPERATION_LIST: &str = "list a process for a name";

impl Mapping {
    /// Gives the memory a name, by which listed processes can open it, also with the vendor's
    /// library. The mapping stays until the name is gone.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for host memory, and for memory that was imported or exported, to which
    /// the kernel gives no name; [`Error::Refused`] with what the kernel says.
    #[doc(alias = "aclrtIpcMemGetExportKey")]
    #[doc(alias = "cuIpcGetMemHandle")]
    pub fn publish(&self) -> Result<Published> {
        publish(self.address(), self.size(), vec![self.inner.clone()])
    }
}

impl Slice<'_> {
    /// Gives mapped memory a name, as [`Mapping::publish`] does. The kernel names whole pages: the
    /// slice begins at a multiple of 2 MiB.
    ///
    /// # Errors
    ///
    /// Those of [`Mapping::publish`], and [`Error::Invalid`] for a slice of no bytes or of named
    /// memory.
    pub fn publish(&self) -> Result<Published> {
        publish(self.address(), self.size(), self.mappings().to_vec())
    }
}

fn publish(address: u64, size: u64, mapped: Vec<Arc<Live<Mapped>>>) -> Result<Published> {
    let impossible = |problem: &'static str| {
        Invalid::because(
            OPERATION_PUBLISH,
            problem,
            "Only device memory that this process created and did not export can have a name: use a \
             ticket for other memory, or memory of its own for the name.",
        )
    };
    let Some(first) = mapped.first() else { return Err(impossible("it is not mapped memory of this process")) };
    let (device, session) = (first.block.device.clone(), first.session().clone());
    session.check_process()?;
    for block in mapped.iter().map(|mapped| &mapped.block) {
        match block.share() {
            _ if block.device.is_host() => return Err(impossible("it is memory of the host")),
            _ if block.is_imported() => return Err(impossible("it is imported")),
            Some(_) => return Err(impossible("it was exported")),
            None => {}
        }
    }
    let created = session.svm.ipc_mem_create(device.id, address, size);
    let named = || format!("{address:#x}, {}", Bytes(size));
    let name = created.map_err(|refused| device.failed(refused, OPERATION_PUBLISH, named()))?;
    let publication = Publication { name: Name(name), session, mapped };
    Ok(Published { inner: Arc::new(Live::new(publication)) })
}

impl Published {
    /// The name.
    pub fn name(&self) -> Name {
        self.inner.name
    }

    /// Lists processes that may open the name. They must have started. A name takes up to 32 768 in
    /// its life.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the list is full or was turned off. This process itself cannot be
    /// listed and need not be: it has the memory.
    #[doc(alias = "aclrtIpcMemSetImportPid")]
    pub fn trust(&self, processes: &[BareTgid]) -> Result<()> {
        let session = self.inner.session();
        session.check_process()?;
        let numbers: Vec<i32> = processes.iter().map(|process| process.as_raw()).collect();
        for batch in numbers.chunks(NAME_LIST) {
            let listed = session.svm.ipc_mem_set_pid(self.inner.name.0, batch);
            listed.map_err(|refused| refused.operation(OPERATION_LIST).object(self.inner.name.to_string()))?;
        }
        Ok(())
    }

    /// Turns the list off: **any process on this host can then open the memory**. It cannot be
    /// turned on again, and must be done before any process is listed.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if processes were listed.
    pub fn trust_anyone(&self) -> Result<()> {
        let session = self.inner.session();
        session.check_process()?;
        let set = session.svm.ipc_mem_set_attr(self.inner.name.0);
        Ok(set.map_err(|refused| refused.operation(OPERATION_LIST).object(self.inner.name.to_string()))?)
    }

    /// Ends the name. (Dropping it does too, and logs what goes wrong.)
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the kernel does not end it. The object comes back.
    #[doc(alias = "aclrtIpcMemClose")]
    pub fn withdraw(self) -> Result<(), Failed<Published>> {
        undo(self.inner).map_err(|(error, inner)| Failed { error, object: Published { inner } })
    }
}

impl Undo for Publication {
    const OPERATION: &'static str = "end the name of memory";

    fn session(&self) -> &SessionInner {
        &self.session
    }

    fn undo(&mut self) -> Result<()> {
        let ended = self.session.svm.ipc_mem_destroy(self.name.0);
        Ok(ended.map_err(|refused| refused.operation(Self::OPERATION).object(self.name.to_string()))?)
    }

    fn abandon(&mut self, error: Error) {
        self.session.keep(Left::Name { name: self.name.0 }, error);
    }

    fn users(&self, others: usize) -> String {
        format!("{others} other reference(s) to {} are alive. Drop them first.", self.name)
    }
}
