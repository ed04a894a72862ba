//! Sharing physical memory between processes.
//!
//! To the kernel an export is a *share*: a number that any process of the host can name, with a
//! count of holders and a *trust list* of processes that may import it. A handle can be exported
//! once, imported once per process and device, and its memory lives until the last holder releases
//! it or dies (`docs/driver.md`). The numbers are small and sequential, so **anyone can guess
//! them**: the trust list is what protects the memory, it is on by default here, and this module
//! makes it easy to use.
//!
//! What the kernel refuses is turned into what a user expects: exporting twice gives the same
//! [`Export`], importing twice gives the same memory.
//!
//! The short way, when there is a Unix socket between the two: [`send`] in one process, [`receive`]
//! in the other. The long way, by any other channel:
//!
//! ```no_run
//! # use ascend_vmm::{Result, Device, PhysicalMemory, share::{self, BareTgid, Ticket}};
//! // In the exporter, after the importer has started and said who it is:
//! fn export(memory: &PhysicalMemory, importer: i32) -> Result<String> {
//!     let export = memory.export()?;
//!     export.trust(&[BareTgid::from_raw(importer)?])?;
//!     Ok(export.ticket()?.to_string())
//! }
//!
//! // In the importer:
//! fn import(device: &Device, ticket: &str) -> Result<PhysicalMemory> {
//!     share::import(device, &ticket.parse::<Ticket>()?)
//! }
//! ```

mod bare_tgid;
mod broker;
mod exchange;
mod named;
mod peer_process;
mod places;
mod shareable_handle;
mod ticket;

pub use crate::error::TicketError;
pub use bare_tgid::BareTgid;
pub use broker::{Broker, BrokerOptions, Request, request};
pub use exchange::{receive, receive_many, send, send_many};
pub(crate) use named::OpenedAt;
pub use named::{Name, NamedMemory, Published, open_named};
pub use shareable_handle::{FabricHandle, HandleKind, ShareableHandle};
pub use ticket::{Ticket, TicketDevice};

use crate::device::{Device, DeviceInner, Host};
use crate::discovery;
use crate::driver::svm::{self, HOST_ID, TRUST_LIST};
use crate::error::{Errno, Error, Invalid, Refused, Result};
use crate::id::{LogicalId, PhysicalId};
use crate::physical::{Block, PhysicalMemory};
use crate::session::SessionInner;
use crate::session::undo::Live;
use crate::slots::{Found, Slots, lock};
use crate::trace::{self, quiet};
use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// What a session knows for sharing. All of it is looked up when it is first needed, once.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Held while a handle is exported, so that the kernel is called once.
    exporting: Mutex<()>,
    /// Imports of this process: importing device, exporting device, share.
    // For a million shares; more than that have two to a place.
    pub(crate) imports: Slots<ImportKey, Live<Block>>,
    /// Names that this process has opened.
    names: Slots<Name, Live<named::Opened>>,
    bare_tgid: OnceLock<i32>,
    /// Whether this process lives in the initial pid namespace.
    initial: OnceLock<bool>,
    /// The process that was trusted last.
    known: AtomicI32,
    identity: OnceLock<Identity>,
    devices: OnceLock<Vec<Numbers>>,
}

/// What a ticket says of the process that made it.
#[derive(Debug)]
struct Identity {
    tgid: i32,
    /// When the process started, in clock ticks since boot; 0 if /proc does not say.
    start: u64,
    /// The kernel's.
    boot_id: [u8; 16],
}

impl Sharing {
    /// Refuses a process that has not started. One that had when it was trusted last is not looked
    /// up again: an exporter trusts the same importer for many memories.
    #[inline]
    fn exists(&self, pid: i32) -> Result<()> {
        if self.known.load(Ordering::Relaxed) != pid {
            bare_tgid::exists(pid)?;
            self.known.store(pid, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// What tells imports apart for the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ImportKey {
    /// The importing device.
    pub(crate) device: u32,
    pub(crate) share: u32,
    /// The exporting device.
    pub(crate) exporter: u32,
    /// Super-pod id of an exporter on another server, whose numbers mean something else there; 0 on
    /// this one.
    pub(crate) sdid: u32,
}

/// A device under its numbers.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    logical: LogicalId,
    physical: PhysicalId,
    sdid: Option<u32>,
}

impl DeviceInner {
    /// The super-pod id that a plain import on this device is made with: its own, for the host the
    /// first device's; 0 if there is none.
    #[inline]
    fn sdid(&self) -> Result<u32> {
        match self.sdid.get() {
            Some(&sdid) => Ok(sdid),
            None => self.ask_sdid(),
        }
    }

    fn ask_sdid(&self) -> Result<u32> {
        let id = if self.is_host() { 0 } else { self.id };
        let found = self.session.numbers()?.iter().find(|numbers| numbers.logical.0 == id);
        let sdid = found.and_then(|numbers| numbers.sdid).unwrap_or(0);
        Ok(*self.sdid.get_or_init(|| sdid))
    }
}

/// Bits of a super-pod id from which on the server's number stands.
const SDID_SERVER_SHIFT: u32 = 22;

const OPERATION_EXPORT: &str = "export memory";
const OPERATION_IMPORT: &str = "import memory";
const OPERATION_TRUST: &str = "trust a process";

impl PhysicalMemory {
    /// Makes the memory importable by processes that are trusted. The kernel is called the first
    /// time; later calls return the same export.
    ///
    /// It stays so until the memory is released: an export cannot be taken back. No process is
    /// trusted yet.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for imported memory, and for memory whose release was refused;
    /// [`Error::Refused`] with what the kernel says.
    #[doc(alias = "aclrtMemExportToShareableHandle")]
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self) -> Result<Export> {
        let (block, session) = (&self.block, &self.block.device.session);
        session.check_process()?;
        if block.is_imported() {
            return Err(Invalid::because(
                OPERATION_EXPORT,
                format!("the {} is not this process's own", block.describe()),
                "Memory is exported by the process that created it: forward its ticket, and have that \
                 process trust the importer.",
            ));
        }
        if block.half_released {
            return Err(Invalid::because(
                OPERATION_EXPORT,
                format!("the release of {} was refused, but may have begun", block.describe()),
                "Free it again, and export memory whose release was not tried.",
            ));
        }
        let _quiet = quiet();
        let _one_at_a_time = lock(&session.sharing.exporting);
        let share = match block.share() {
            Some(share) => share,
            None => {
                let exported = session.svm.mem_export(block.handle, block.size);
                let share =
                    exported.map_err(|refused| block.device.failed(refused, OPERATION_EXPORT, block.describe()))?;
                block.set_share(share);
                share
            }
        };
        // Logical ids that are open are below 100.
        let handle = ShareableHandle::new(block.device.id as u8, share);
        Ok(Export { memory: self.clone(), handle })
    }
}

/// Memory that other processes can import.
///
/// A reference to the memory: while it lives, so does the memory.
///
/// ```standalone_crate
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let memory = session.device(LogicalId(0))?.create(2 << 20)?;
/// let export = memory.export()?;
/// assert!(!export.trusts_anyone()?);
/// // A text for an environment variable, a file or a pipe.
/// let ticket = export.ticket()?.to_string();
/// assert!(ticket.starts_with("avm1-"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Export {
    memory: PhysicalMemory,
    handle: ShareableHandle,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({:#x}, {})", self.handle.to_u64(), self.memory.block.describe())
    }
}

impl Export {
    /// The exported memory.
    pub fn memory(&self) -> &PhysicalMemory {
        &self.memory
    }

    /// The vendor's 64-bit form.
    pub fn handle(&self) -> ShareableHandle {
        self.handle
    }

    /// The vendor's 128-byte form.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if the device is not in the driver's list any more.
    pub fn fabric_handle(&self, kind: HandleKind) -> Result<FabricHandle> {
        self.memory.block.device.session.check_process()?;
        let numbers = self.numbers()?;
        // For host memory the vendor's library writes the first device's, and refuses an import
        // without.
        let first = |listed: &[Numbers]| listed.iter().find(|numbers| numbers.logical.0 == 0).copied();
        let named = match numbers {
            Some(numbers) => Some(numbers),
            None => first(self.memory.block.device.session.numbers()?),
        };
        Ok(FabricHandle {
            kind,
            sdid: named.and_then(|numbers| numbers.sdid).unwrap_or(u32::MAX),
            physical: numbers.map_or(HOST_ID, |numbers| numbers.physical.0),
            handle: self.handle,
        })
    }

    /// Everything that an importer needs, to be sent by any channel. Not a secret: the trust list
    /// decides which processes can use it.
    ///
    /// # Errors
    ///
    /// Those of [`Export::fabric_handle`], and of looking up this process's id.
    pub fn ticket(&self) -> Result<Ticket> {
        let block = &self.memory.block;
        block.device.session.check_process()?;
        let (identity, kind) = (block.device.session.identity()?, block.kind());
        Ok(Ticket {
            handle: self.handle,
            size: block.size,
            page: kind.page,
            memory: kind.memory,
            device: self.numbers()?.map(|numbers| TicketDevice { physical: numbers.physical.0, sdid: numbers.sdid }),
            generation: self.memory.session().generation(),
            exporter: identity.tgid,
            exporter_start: identity.start,
            boot_id: identity.boot_id,
        })
    }

    /// Puts processes on the trust list: they, and no others, may import. Up to 65 535 in the
    /// share's life; more than one call adds to the list, and no process can be taken off it
    /// (`docs/driver.md`). A process must have started before it is trusted.
    ///
    /// The list holds numbers. A process that gets the number of one that ended *after* it was
    /// trusted is kept out by the kernel, which compares start times. One that ended *before*
    /// cannot be told apart: whoever has its number by then is trusted. [`send`] and [`Broker`]
    /// watch the process meanwhile; for a child of your own, trust it before you wait for its end.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a process that does not exist; [`Error::Refused`] if the list is full
    /// or was turned off. The processes before the one that was refused are trusted.
    #[doc(alias = "aclrtMemSetPidToShareableHandle")]
    pub fn trust(&self, processes: &[BareTgid]) -> Result<()> {
        let device = &self.memory.block.device;
        let session = &device.session;
        session.check_process()?;
        if processes.is_empty() {
            return Ok(());
        }
        if session.is_initial_namespace()? {
            processes.iter().try_for_each(|process| session.sharing.exists(process.as_raw()))?;
        }
        for batch in BareTgid::as_raws(processes).chunks(TRUST_LIST as usize) {
            session.svm.mem_set_pid(device.id, self.handle.share_id(), batch).map_err(|refused| {
                let arguments = format!("{} of {} processes", batch.len(), processes.len());
                device.failed(refused, OPERATION_TRUST, arguments)
            })?;
        }
        Ok(())
    }

    /// Turns the trust list off: **any process on this host can then import the memory**, because
    /// share ids are small sequential numbers that can be tried out. It cannot be turned on again,
    /// and must be done before any process is trusted.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a process was trusted already.
    pub fn trust_anyone(&self) -> Result<()> {
        let device = &self.memory.block.device;
        device.session.check_process()?;
        let set = device.session.svm.mem_set_attr(device.id, self.handle.share_id(), false);
        set.map_err(|refused| device.failed(refused, "turn the trust list off", self.memory.block.describe()))
    }

    /// Whether any process may import: whether the trust list is off.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with what the kernel says.
    pub fn trusts_anyone(&self) -> Result<bool> {
        let device = &self.memory.block.device;
        device.session.check_process()?;
        match device.session.svm.mem_get_attr(device.id, self.handle.share_id()) {
            Ok(trust_list) => Ok(!trust_list),
            Err(refused) => Err(device.failed(refused, "look up the trust list", self.memory.block.describe())),
        }
    }

    /// The device's numbers; `None` for the host.
    fn numbers(&self) -> Result<Option<Numbers>> {
        let device = &self.memory.block.device;
        if device.is_host() {
            return Ok(None);
        }
        let numbers = device.session.numbers()?.iter().find(|numbers| numbers.logical.0 == device.id).copied();
        numbers.map(Some).ok_or_else(|| {
            Invalid::because(
                OPERATION_EXPORT,
                format!("{} is not in the driver's device list any more", device.name()),
                "The device was removed: open the session anew.",
            )
        })
    }
}

/// Where memory is imported.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Place<'a> {
    /// On a device: it can be mapped for that device.
    Device(&'a Device),
    /// On the host: the CPU can see it. Device memory shows through the device's PCI window, if the
    /// device has one that is large enough.
    Host(&'a Host),
}

impl<'a> From<&'a Device> for Place<'a> {
    fn from(device: &'a Device) -> Self {
        Place::Device(device)
    }
}

impl<'a> From<&'a Host> for Place<'a> {
    fn from(host: &'a Host) -> Self {
        Place::Host(host)
    }
}

impl Place<'_> {
    pub(crate) fn inner(&self) -> &Arc<Live<DeviceInner>> {
        match self {
            Place::Device(device) => &device.inner,
            Place::Host(host) => &host.inner,
        }
    }
}

/// What is imported: a ticket, or one of the vendor's forms.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Source<'a> {
    /// A ticket of this library's. Checked against this host before the kernel is called.
    Ticket(&'a Ticket),
    /// The vendor's 64-bit form. Its device number is the exporter's, and is taken for this
    /// process's.
    Handle(ShareableHandle),
    /// The vendor's 128-byte form. The device is found by its physical number.
    Fabric(&'a FabricHandle),
}

impl<'a> From<&'a Ticket> for Source<'a> {
    fn from(ticket: &'a Ticket) -> Self {
        Source::Ticket(ticket)
    }
}

impl From<ShareableHandle> for Source<'_> {
    fn from(handle: ShareableHandle) -> Self {
        Source::Handle(handle)
    }
}

impl<'a> From<&'a FabricHandle> for Source<'a> {
    fn from(handle: &'a FabricHandle) -> Self {
        Source::Fabric(handle)
    }
}

/// Imports memory that another process exported, on a device or on the host.
///
/// Importing the same on the same device again gives the same memory, as long as it is alive in
/// this process: the driver allows one import per process and device.
///
/// # Errors
///
/// [`Error::Invalid`] for a ticket of another host or boot, or of a device that is not here, before
/// the kernel is called; [`Error::Refused`] with EACCES if this process is not trusted, and with
/// EFAULT if the memory is gone.
#[doc(alias = "aclrtMemImportFromShareableHandle")]
#[doc(alias = "cuMemImportFromShareableHandle")]
pub fn import<'a>(place: impl Into<Place<'a>>, source: impl Into<Source<'a>>) -> Result<PhysicalMemory> {
    let (place, source) = (place.into(), source.into());
    let device = place.inner();
    let session = &device.session;
    session.check_process()?;
    let wanted = Wanted::new(device, source)?;
    let sdid = device.sdid()?;
    let key = wanted.key(device.id);
    let slot = match session.sharing.imports.find(key) {
        Found::Object(block) => {
            if let Some(ticket) = wanted.ticket {
                block.agree(ticket)?;
            }
            return Ok(PhysicalMemory { block });
        }
        Found::Vacant(slot) => slot,
    };
    let imported = session.svm.mem_import(device.id, &wanted.export(sdid), wanted.size());
    let imported = imported.map_err(|refused| wanted.refused(device, refused))?;
    let block = Live::new(Block::imported(device, &imported, key, wanted.ticket));
    if let Err(error) = Block::check_import(&imported, wanted.ticket) {
        // The import vacates its key when it is released.
        slot.keep();
        return Err(error);
    }
    let block = Arc::new(block);
    slot.fill(&block);
    Ok(PhysicalMemory { block })
}

/// An import whose facts were checked.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    share: u32,
    /// The exporting device in this process's numbering, or [`HOST_ID`].
    exporter: u32,
    ticket: Option<&'a Ticket>,
    /// Of the vendor's long form: super-pod id and physical id of the exporting device.
    fabric: Option<(u32, u32)>,
    /// The super-pod id of an exporter on another server, 0 on this one.
    remote: u32,
}

impl<'a> Wanted<'a> {
    fn new(device: &DeviceInner, source: Source<'a>) -> Result<Wanted<'a>> {
        let session = &device.session;
        match source {
            Source::Ticket(ticket) => {
                let identity = session.identity()?;
                let exporter = ticket_device(session.numbers()?, ticket, identity.boot_id == ticket.boot_id)?;
                let own = ticket.exporter == identity.tgid && ticket.exporter_start == identity.start;
                if own && exporter == device.id {
                    return Err(own_export(device));
                }
                Ok(Wanted::plain(ticket.handle.share_id(), exporter, Some(ticket)))
            }
            Source::Handle(handle) => Ok(Wanted::plain(handle.share_id(), handle.device(), None)),
            Source::Fabric(fabric) => Wanted::fabric(session.numbers()?, fabric),
        }
    }

    fn plain(share: u32, exporter: u32, ticket: Option<&'a Ticket>) -> Wanted<'a> {
        Wanted { share, exporter, ticket, fabric: None, remote: 0 }
    }

    fn fabric(numbers: &[Numbers], fabric: &FabricHandle) -> Result<Wanted<'a>> {
        let mut wanted = Wanted::plain(fabric.handle.share_id(), fabric.handle.device(), None);
        // Where the exporting device has no super-pod id, the long form is no more than the short
        // one.
        if fabric.kind == HandleKind::Fabric && fabric.sdid != u32::MAX {
            let FabricHandle { sdid, physical, .. } = *fabric;
            wanted.fabric = Some((sdid, physical));
            // The kernel looks at the same bits (`svm_is_sdid_in_local_server`).
            let server = |sdid: u32| sdid >> SDID_SERVER_SHIFT;
            let of_this_server = |own: &Numbers| own.sdid.is_some_and(|own| server(own) == server(sdid));
            if !numbers.iter().any(of_this_server) {
                wanted.remote = sdid;
            }
        }
        if wanted.remote != 0 || fabric.handle.is_host() {
            return Ok(wanted);
        }
        match numbers.iter().find(|numbers| numbers.physical.0 == fabric.physical) {
            Some(numbers) => wanted.exporter = numbers.logical.0,
            None => return Err(not_visible(fabric.physical)),
        }
        Ok(wanted)
    }

    /// Its key among the imports on a device.
    fn key(self, device: u32) -> ImportKey {
        ImportKey { device, share: self.share, exporter: self.exporter, sdid: self.remote }
    }

    /// As the kernel takes it, for an import on a device with a super-pod id.
    fn export(self, sdid: u32) -> svm::Export {
        let Wanted { share, exporter, .. } = self;
        match self.fabric {
            Some((sdid, physical)) => svm::Export { share, exporter, physical, sdid, fabric: true },
            None => svm::Export { share, exporter, physical: 0, sdid, fabric: false },
        }
    }

    /// The size as the ticket says, or 0.
    #[inline]
    fn size(self) -> u64 {
        self.ticket.map_or(0, |ticket| ticket.size)
    }

    fn refused(self, device: &DeviceInner, refused: Box<Refused>) -> Error {
        let Wanted { share, exporter, .. } = self;
        let mut arguments = format!("share {share} of device {exporter}");
        if let Some(ticket) = self.ticket {
            arguments += &format!(", exported by process {}", ticket.exporter);
            if exporter_is_gone(&device.session, ticket) {
                arguments += ", which is not running any more";
            }
        }
        if refused.errno == Errno::EACCES && self.is_own(device) {
            return own_export(device);
        }
        device.failed(refused, OPERATION_IMPORT, arguments)
    }

    /// Whether the kernel takes this process for the exporter, on the device of the import: it
    /// answers an order to demand a trust list again differently to the exporter
    /// (`devmm_share_mem_set_attr_no_wlist_in_server`).
    fn is_own(self, device: &DeviceInner) -> bool {
        let Wanted { share, exporter, .. } = self;
        let demand = || device.session.svm.mem_set_attr(device.id, share, true);
        exporter == device.id && demand().is_err_and(|refused| refused.errno == Errno::EOPNOTSUPP)
    }
}

/// The ticket's device in this process's numbering, if the ticket is of this host as it runs now.
#[inline]
fn ticket_device(numbers: &[Numbers], ticket: &Ticket, here: bool) -> Result<u32> {
    let Some(exporter) = ticket.device else {
        return if here { Ok(HOST_ID) } else { Err(foreign(false)) };
    };
    let found = numbers.iter().find(|numbers| numbers.physical.0 == exporter.physical);
    match found {
        // A super-pod id is unique beyond one server, so the same one means the same machine, some
        // other time.
        _ if !here => {
            Err(foreign(exporter.sdid.is_some() && found.is_some_and(|numbers| numbers.sdid == exporter.sdid)))
        }
        Some(numbers) if numbers.sdid == exporter.sdid || numbers.sdid.is_none() || exporter.sdid.is_none() => {
            Ok(numbers.logical.0)
        }
        Some(_) => Err(other_hardware(exporter.physical)),
        None => Err(not_visible(exporter.physical)),
    }
}

/// A ticket of another boot, of this machine or not.
fn foreign(same_machine: bool) -> Error {
    let (problem, rule) = if same_machine {
        ("this host was rebooted since the ticket was made", "The memory is gone: export it again.")
    } else {
        (
            "the ticket was made on another machine, or on this one before it was rebooted",
            "Memory is shared by processes of one running host.",
        )
    };
    Invalid::because(OPERATION_IMPORT, problem, rule)
}

fn other_hardware(physical: u32) -> Error {
    Invalid::because(
        OPERATION_IMPORT,
        format!("physical device {physical} is not the one that the ticket was made on"),
        "The hardware changed since: export it again.",
    )
}

fn not_visible(physical: u32) -> Error {
    Invalid::because(
        OPERATION_IMPORT,
        format!("physical device {physical} is not among the devices that this process can see"),
        "The importer must see the exporting device too: pass it through to this container.",
    )
}

/// Whether the exporter of a ticket is known to be gone. The memory may live on with other
/// importers, so the kernel is called all the same.
fn exporter_is_gone(session: &SessionInner, ticket: &Ticket) -> bool {
    session.is_initial_namespace().unwrap_or(false)
        && ticket.exporter_start != 0
        && bare_tgid::start_time(&ticket.exporter.to_string()) != Some(ticket.exporter_start)
}

fn own_export(device: &DeviceInner) -> Error {
    Invalid::because(
        OPERATION_IMPORT,
        format!("this process exported it itself, on {}", device.name()),
        "Use the memory that was exported: the exporter may import it on other devices only.",
    )
}

impl SessionInner {
    /// This process's id in the initial pid namespace. One session lives in one process, so the
    /// driver is asked once.
    #[inline]
    pub(crate) fn bare_tgid(&self) -> Result<i32> {
        self.check_process()?;
        match self.sharing.bare_tgid.get() {
            Some(&tgid) => Ok(tgid),
            None => self.ask_bare_tgid(),
        }
    }

    fn ask_bare_tgid(&self) -> Result<i32> {
        let tgid = self.devmng.bare_tgid()?;
        Ok(*self.sharing.bare_tgid.get_or_init(|| tgid))
    }

    /// Whether pids of this process are those that the kernel compares: its own is the same there.
    /// (A process of another namespace that has the same number in both by chance is taken for one
    /// of the initial namespace; nothing in /proc says more in a container.)
    #[inline]
    pub(crate) fn is_initial_namespace(&self) -> Result<bool> {
        self.check_process()?;
        if let Some(&initial) = self.sharing.initial.get() {
            return Ok(initial);
        }
        let initial = self.bare_tgid()? == std::process::id() as i32;
        Ok(*self.sharing.initial.get_or_init(|| initial))
    }

    /// What this process's tickets say of it.
    #[inline]
    fn identity(&self) -> Result<&Identity> {
        match self.sharing.identity.get() {
            Some(identity) => Ok(identity),
            None => self.ask_identity(),
        }
    }

    fn ask_identity(&self) -> Result<&Identity> {
        let tgid = self.bare_tgid()?;
        let start = bare_tgid::start_time("self").unwrap_or(0);
        Ok(self.sharing.identity.get_or_init(|| Identity { tgid, start, boot_id: bare_tgid::boot_id() }))
    }

    /// The devices of this process's namespace under all their numbers.
    #[inline]
    fn numbers(&self) -> Result<&[Numbers]> {
        match self.sharing.devices.get() {
            Some(numbers) => Ok(numbers),
            None => self.ask_numbers(),
        }
    }

    fn ask_numbers(&self) -> Result<&[Numbers]> {
        if self.devices.all(|&device| device == HOST_ID) {
            // This process used no device yet. In a container, the list must be made before it is
            // asked for, or it stays empty.
            if let Err(error) = discovery::prepare() {
                trace::debug(error, "no devices to share with");
            }
        }
        let listed = discovery::numbers()?;
        let numbers = listed.into_iter().map(|(logical, physical, pod)| Numbers {
            logical,
            physical,
            sdid: pod.map(|pod| pod.sdid),
        });
        let numbers = numbers.collect();
        Ok(self.sharing.devices.get_or_init(|| numbers))
    }
}

impl From<TicketError> for Error {
    fn from(error: TicketError) -> Error {
        Error::Ticket(error)
    }
}
