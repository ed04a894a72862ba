//! Sharing physical memory between processes.
//!
//! To the kernel an export is a *share*: a number that any process of the host can name, with a count of holders and a *trust list* of processes that may
//! import it. A handle can be exported once, imported once per process and device, and its memory lives until the last holder releases it or dies
//! (`docs/lifetimes.md`). The numbers are small and sequential, so **anyone can guess them**: the trust list is what protects the memory, it is on by
//! default here, and this module makes it easy to use.
//!
//! What the kernel refuses is turned into what a user expects: exporting twice gives the same [`Export`], importing twice gives the same memory.
//!
//! The short way, when there is a Unix socket between the two: [`send`] in one process, [`receive`] in the other. The long way, by any other channel:
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

mod handle;
mod process;
mod socket;
mod ticket;

pub use handle::{FabricHandle, HandleKind, ShareableHandle};
pub use process::BareTgid;
pub use socket::{receive, send};
pub use ticket::{Ticket, TicketDevice, TicketError};

use crate::device::{Device, DeviceInner, Host};
use crate::discovery::{self, LogicalId, PhysicalId};
use crate::error::{Errno, Error, Invalid, Result};
use crate::physical::{Block, PhysicalMemory};
use crate::session::call::{EXPORT, GET_ATTR, IMPORT, SET_ATTR, SET_PID};
use crate::session::{Inner, Session, WeakTable, lock};
use ascend_ioctl::svm::{
    HANDLE_FABRIC, HANDLE_NONE, HOST_ID, MemExport, MemGetAttr, MemImport, MemSetAttr, MemSetPid, ShareAttr, TRUST_LIST,
};
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock};

/// What a session knows for sharing. All of it is asked for when it is first needed, once.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Held while a handle is exported, so that the kernel is asked once.
    exporting: Mutex<()>,
    /// Imports of this process: importing device, exporting device, share.
    pub(crate) imports: WeakTable<ImportKey, Block>,
    bare_tgid: OnceLock<i32>,
    /// When this process started, in clock ticks since boot; 0 if /proc does not tell.
    start: OnceLock<u64>,
    devices: OnceLock<Vec<Numbers>>,
}

/// What tells imports apart for the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ImportKey {
    pub(crate) device: u32,
    pub(crate) exporter: u32,
    pub(crate) share: u32,
    /// Super-pod id of an exporter on another server, whose numbers mean something else there; 0 on this one.
    pub(crate) sdid: u32,
}

/// In two words instead of four: an import is looked up twice.
impl Hash for ImportKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(u64::from(self.device) << 32 | u64::from(self.share));
        state.write_u64(u64::from(self.sdid) << 32 | u64::from(self.exporter));
    }
}

/// A device under its numbers.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    logical: LogicalId,
    physical: PhysicalId,
    sdid: Option<u32>,
}

/// Bits of a super-pod id from which on the server's number stands.
const SDID_SERVER_SHIFT: u32 = 22;

const OPERATION_EXPORT: &str = "export memory";
const OPERATION_IMPORT: &str = "import memory";
const OPERATION_TRUST: &str = "trust a process";

impl PhysicalMemory {
    /// Makes the memory importable by processes that are trusted. The kernel is asked the first time; later calls give the same export.
    ///
    /// It stays so until the memory is released: an export cannot be taken back. Nobody is trusted yet.
    #[doc(alias = "aclrtMemExportToShareableHandle")]
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self) -> Result<Export> {
        let (block, session) = (&self.block, &self.block.device.session);
        session.svm.check_process()?;
        if block.imported {
            return Err(Invalid::because(
                OPERATION_EXPORT,
                format!("the {} is not this process's own", block.describe()),
                "memory is exported by the process that created it; forward its ticket, and have that process trust the importer",
            ));
        }
        if block.half_released {
            return Err(Invalid::because(
                OPERATION_EXPORT,
                format!("the release of {} was refused, but may have begun", block.describe()),
                "free it again, and export memory that nobody tried to free",
            ));
        }
        let _one_at_a_time = lock(&session.sharing.exporting);
        let share = match block.share() {
            Some(share) => share,
            None => {
                let wanted = MemExport { side: block.side() as i32, id: block.id, ..Default::default() };
                let exported = session
                    .svm
                    .call(EXPORT, block.device.id, block.size, &wanted)
                    .map_err(|errno| block.device.failed(OPERATION_EXPORT, EXPORT, errno, block.describe()))?;
                block.set_share(exported.share as u32);
                exported.share as u32
            }
        };
        // Logical ids that are open are below 100.
        let handle = ShareableHandle::new(block.device.id as u8, share);
        Ok(Export { memory: self.clone(), handle })
    }

    /// The session that the memory belongs to.
    pub fn session(&self) -> Session {
        Session { inner: self.block.device.session.clone() }
    }
}

/// Memory that other processes can import.
///
/// A reference to the memory: while it lives, so does the memory.
#[derive(Debug, Clone)]
pub struct Export {
    memory: PhysicalMemory,
    handle: ShareableHandle,
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
    pub fn fabric_handle(&self, kind: HandleKind) -> Result<FabricHandle> {
        let numbers = self.numbers()?;
        Ok(FabricHandle {
            kind,
            sdid: numbers.and_then(|numbers| numbers.sdid).unwrap_or(u32::MAX),
            physical: numbers.map_or(HOST_ID, |numbers| numbers.physical.0),
            handle: self.handle,
        })
    }

    /// Everything that an importer needs, to be sent by any channel. Not a secret: the trust list decides who can use it.
    pub fn ticket(&self) -> Result<Ticket> {
        let block = &self.memory.block;
        let tgid = block.device.session.bare_tgid()?;
        Ok(Ticket {
            handle: self.handle,
            size: block.size,
            page: block.page.code() as u8,
            memory: block.memory.code() as u8,
            device: self.numbers()?.map(|numbers| TicketDevice { physical: numbers.physical.0, sdid: numbers.sdid }),
            generation: self.memory.session().generation(),
            exporter: tgid,
            exporter_start: block.device.session.start_time(),
            boot_id: process::boot_id(),
        })
    }

    /// Puts processes on the trust list: they, and no others, may import. Up to 65 535 in the share's life; more than one call adds to the list, and nobody can be taken
    /// off it (`docs/lifetimes.md`). A process must have started before it is trusted.
    ///
    /// If it fails, the processes before the one that was refused are trusted.
    #[doc(alias = "aclrtMemSetPidToShareableHandle")]
    pub fn trust(&self, processes: &[BareTgid]) -> Result<()> {
        let session = self.memory.session();
        session.inner.svm.check_process()?;
        if processes.is_empty() {
            return Ok(());
        }
        if process::is_initial_namespace(&session)? {
            processes.iter().try_for_each(|process| process::exists(process.as_raw()))?;
        }
        let device = &self.memory.block.device;
        for batch in processes.chunks(TRUST_LIST as usize) {
            let list = MemSetPid {
                share: self.handle.share_id() as i32,
                count: batch.len() as u32,
                // A BareTgid is an i32; the kernel reads `count` of them during the call, while `batch` is borrowed.
                pids: batch.as_ptr() as u64,
            };
            session.inner.svm.call(SET_PID, device.id, 0, &list).map_err(|errno| {
                device.failed(
                    OPERATION_TRUST,
                    SET_PID,
                    errno,
                    format!("{} of {} processes", batch.len(), processes.len()),
                )
            })?;
        }
        Ok(())
    }

    /// Turns the trust list off: **any process on this host can then import the memory**, because share ids are small sequential numbers that can be tried out. It
    /// cannot be turned on again, and must be done before anyone is trusted.
    pub fn trust_anyone(&self) -> Result<()> {
        let device = &self.memory.block.device;
        device.session.svm.check_process()?;
        let attribute = MemSetAttr {
            share: self.handle.share_id() as i32,
            kind: 0,
            value: ShareAttr { no_trust_list: 1, ..Default::default() },
        };
        match device.session.svm.call(SET_ATTR, device.id, 0, &attribute) {
            Ok(_) => Ok(()),
            Err(errno) => Err(device.failed("turn the trust list off", SET_ATTR, errno, self.memory.block.describe())),
        }
    }

    /// Whether any process may import: whether the trust list is off.
    pub fn trusts_anyone(&self) -> Result<bool> {
        let device = &self.memory.block.device;
        device.session.svm.check_process()?;
        let query = MemGetAttr { share: self.handle.share_id() as i32, exporter: device.id, ..Default::default() };
        match device.session.svm.call(GET_ATTR, device.id, 0, &query) {
            Ok(answer) => Ok(answer.value.no_trust_list != 0),
            Err(errno) => Err(device.failed("ask about the trust list", GET_ATTR, errno, self.memory.block.describe())),
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
                "the device was removed: open the session anew",
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
    /// On the host: the CPU can see it. Device memory shows through the device's PCI window, if the device has one that is large enough.
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
    fn inner(&self) -> &Arc<DeviceInner> {
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
    /// A ticket of this library's. Checked against this host before the kernel is asked.
    Ticket(&'a Ticket),
    /// The vendor's 64-bit form. Its device number is the exporter's, and is taken for this process's.
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
/// Importing the same on the same device again gives the same memory, as long as it is alive in this process: the driver allows one import per process and device.
///
/// # Errors
///
/// [`Error::Invalid`] for a ticket of another host or boot, or of a device that is not here, before the kernel is asked; [`Error::Refused`] with EACCES if this process is
/// not trusted, and with EFAULT if the memory is gone.
#[doc(alias = "aclrtMemImportFromShareableHandle")]
#[doc(alias = "cuMemImportFromShareableHandle")]
pub fn import<'a>(place: impl Into<Place<'a>>, source: impl Into<Source<'a>>) -> Result<PhysicalMemory> {
    let (place, source) = (place.into(), source.into());
    let device = place.inner();
    let session = &device.session;
    session.svm.check_process()?;
    let wanted = Wanted::new(session, device, source)?;
    let sdid = if wanted.remote { wanted.sdid } else { 0 };
    let key = ImportKey { device: device.id, exporter: wanted.exporter, share: wanted.share, sdid };
    if let Some(block) = session.sharing.imports.enter(key) {
        return Ok(PhysicalMemory { block });
    }
    let block = wanted.import(device, key)?;
    session.sharing.imports.fill(key, &block);
    Ok(PhysicalMemory { block })
}

/// An import whose facts were checked.
struct Wanted<'a> {
    share: u32,
    /// In this process's numbering.
    exporter: u32,
    /// Used for exporters on other servers only.
    physical: u32,
    sdid: u32,
    kind: u32,
    /// Whether the exporter is on another server.
    remote: bool,
    ticket: Option<&'a Ticket>,
}

impl<'a> Wanted<'a> {
    #[inline]
    fn new(session: &Inner, device: &DeviceInner, source: Source<'a>) -> Result<Wanted<'a>> {
        let wanted = match source {
            Source::Ticket(ticket) => {
                let exporter = ticket_device(session, ticket)?;
                let own = ticket.exporter == session.bare_tgid()? && ticket.exporter_start == session.start_time();
                if own && exporter == device.id {
                    return Err(own_export(device));
                }
                Wanted::plain(ticket.handle.share_id(), exporter, Some(ticket))
            }
            Source::Handle(handle) => Wanted::plain(handle.share_id(), handle.device(), None),
            Source::Fabric(fabric) => Wanted::fabric(session, fabric)?,
        };
        if wanted.kind == HANDLE_FABRIC {
            return Ok(wanted);
        }
        // Where a plain import wants a super-pod id it is that of the importing device, of the first for the host.
        let importer = if device.is_host() { 0 } else { device.id };
        let numbers = session.numbers()?.iter().find(|numbers| numbers.logical.0 == importer);
        Ok(Wanted { sdid: numbers.and_then(|numbers| numbers.sdid).unwrap_or(0), ..wanted })
    }

    fn plain(share: u32, exporter: u32, ticket: Option<&'a Ticket>) -> Wanted<'a> {
        Wanted { share, exporter, physical: 0, sdid: 0, kind: HANDLE_NONE, remote: false, ticket }
    }

    fn fabric(session: &Inner, fabric: &FabricHandle) -> Result<Wanted<'a>> {
        let numbers = session.numbers()?;
        let wanted = Wanted::plain(fabric.handle.share_id(), fabric.handle.device(), None);
        // Where the exporting device has no super-pod id, the long form is no more than the short one.
        let wanted = match fabric.kind {
            HandleKind::Fabric if fabric.sdid != u32::MAX => {
                Wanted { kind: HANDLE_FABRIC, sdid: fabric.sdid, physical: fabric.physical, ..wanted }
            }
            _ => wanted,
        };
        // The kernel looks at the same bits (`svm_is_sdid_in_local_server`).
        let server = |sdid: u32| sdid >> SDID_SERVER_SHIFT;
        let of_this_server = |own: &Numbers| own.sdid.is_some_and(|sdid| server(sdid) == server(fabric.sdid));
        if wanted.kind == HANDLE_FABRIC && !numbers.iter().any(of_this_server) {
            return Ok(Wanted { remote: true, ..wanted });
        }
        if fabric.handle.is_host() {
            return Ok(wanted);
        }
        match numbers.iter().find(|numbers| numbers.physical.0 == fabric.physical) {
            Some(numbers) => Ok(Wanted { exporter: numbers.logical.0, ..wanted }),
            None => Err(not_visible(fabric.physical)),
        }
    }

    /// Imports, with the place of this import taken; if it fails the place is given up.
    #[inline]
    fn import(&self, device: &Arc<DeviceInner>, key: ImportKey) -> Result<Arc<Block>> {
        let svm = &device.session.svm;
        let para = MemImport {
            share: self.share as i32,
            sdid: self.sdid,
            exporter: self.exporter,
            exporter_physical: self.physical,
            kind: self.kind,
            ..Default::default()
        };
        let size = self.ticket.map_or(0, |ticket| ticket.size);
        let answer = svm.call(IMPORT, device.id, size, &para).map_err(|errno| {
            let error = self.refused(device, errno);
            device.session.sharing.imports.vacate(&key);
            error
        })?;
        // From here on the block owns the import and its place: both are given back if the rest is not as it should be.
        let told = self.ticket.map(|ticket| (ticket.page.into(), ticket.memory.into()));
        let block = Block::imported(device, &answer, key, told)?;
        match self.ticket {
            Some(ticket) if ticket.size != block.size => Err(other_size(ticket, &block)),
            _ => Ok(block),
        }
    }

    #[cold]
    fn refused(&self, device: &DeviceInner, errno: Errno) -> Error {
        let mut arguments = format!("share {} of device {}", self.share, self.exporter);
        if let Some(ticket) = self.ticket {
            arguments += &format!(", exported by process {}", ticket.exporter);
            if exporter_is_gone(&device.session, ticket) {
                arguments += ", which is not running any more";
            }
        }
        let error = device.failed(OPERATION_IMPORT, IMPORT, errno, arguments);
        if errno == Errno::EACCES && self.is_own(device) { own_export(device) } else { error }
    }

    /// Whether the kernel takes this process for the exporter, on the device of the import. It answers an order to demand a trust list again differently to
    /// the exporter and to others, and executes it for neither (`devmm_share_mem_set_attr_no_wlist_in_server`).
    #[cold]
    fn is_own(&self, device: &DeviceInner) -> bool {
        let demand = MemSetAttr { share: self.share as i32, kind: 0, value: ShareAttr::default() };
        let answer = || device.session.svm.call(SET_ATTR, device.id, 0, &demand);
        self.exporter == device.id && matches!(answer(), Err(Errno::EOPNOTSUPP))
    }
}

/// The ticket's device in this process's numbering, if the ticket is of this host.
fn ticket_device(session: &Inner, ticket: &Ticket) -> Result<u32> {
    let wrong = |problem: String, rule| Err(Invalid::because(OPERATION_IMPORT, problem, rule));
    let numbers = session.numbers()?;
    let here = process::boot_id() == ticket.boot_id;
    let Some(exporter) = ticket.device else {
        return if here { Ok(HOST_ID) } else { wrong(FOREIGN.into(), FOREIGN_RULE) };
    };
    let found = numbers.iter().find(|numbers| numbers.physical.0 == exporter.physical);
    if !here {
        // A super-pod id is unique beyond one server, so the same one means the same machine, some other time.
        let same = exporter.sdid.is_some() && found.is_some_and(|numbers| numbers.sdid == exporter.sdid);
        return if same {
            wrong("this host was rebooted since the ticket was made".into(), "the memory is gone: export it again")
        } else {
            wrong(FOREIGN.into(), FOREIGN_RULE)
        };
    }
    match found {
        Some(numbers) if numbers.sdid.is_none() || exporter.sdid.is_none() || numbers.sdid == exporter.sdid => {
            Ok(numbers.logical.0)
        }
        Some(_) => wrong(
            format!("physical device {} is not the one that the ticket was made on", exporter.physical),
            "the hardware changed since: export it again",
        ),
        None => Err(not_visible(exporter.physical)),
    }
}

#[cold]
fn not_visible(physical: u32) -> Error {
    Invalid::because(
        OPERATION_IMPORT,
        format!("physical device {physical} is not among the devices that this process can see"),
        "the importer must see the exporting device too: pass it through to this container",
    )
}

const FOREIGN: &str = "the ticket was made on another machine, or on this one before it was rebooted";
const FOREIGN_RULE: &str = "memory is shared by processes of one running host";

/// Whether the exporter of a ticket is known to be gone. The memory may live on with other importers, so the kernel is asked all the same.
fn exporter_is_gone(session: &Inner, ticket: &Ticket) -> bool {
    let initial = session.bare_tgid().is_ok_and(|tgid| tgid == std::process::id() as i32);
    initial
        && ticket.exporter_start != 0
        && process::start_time(&ticket.exporter.to_string()) != Some(ticket.exporter_start)
}

#[cold]
fn other_size(ticket: &Ticket, block: &Block) -> Error {
    let problem = format!("the ticket says {} bytes, the driver {}", ticket.size, block.size);
    Invalid::because(OPERATION_IMPORT, problem, "the ticket is of another export: get a new one")
}

#[cold]
fn own_export(device: &DeviceInner) -> Error {
    Invalid::because(
        OPERATION_IMPORT,
        format!("this process exported it itself, on {}", device.name()),
        "use the memory that was exported; the exporter may import it on other devices only",
    )
}

impl Inner {
    /// This process's id in the initial pid namespace. One session lives in one process, so the driver is asked once.
    pub(crate) fn bare_tgid(&self) -> Result<i32> {
        self.svm.check_process()?;
        if let Some(&tgid) = self.sharing.bare_tgid.get() {
            return Ok(tgid);
        }
        let tgid = self.devmng.bare_tgid()?;
        Ok(*self.sharing.bare_tgid.get_or_init(|| tgid))
    }

    /// When this process started.
    fn start_time(&self) -> u64 {
        *self.sharing.start.get_or_init(|| process::start_time("self").unwrap_or(0))
    }

    /// The devices of this process's namespace under all their numbers.
    #[inline]
    fn numbers(&self) -> Result<&[Numbers]> {
        match self.sharing.devices.get() {
            Some(numbers) => Ok(numbers),
            None => self.ask_numbers(),
        }
    }

    #[cold]
    fn ask_numbers(&self) -> Result<&[Numbers]> {
        if self.devices.all(|&device| device == HOST_ID) {
            // Nobody here used a device yet. In a container, the list must be made before it is asked for, or it stays empty.
            let options = discovery::Options { manager: self.driver().0.to_owned(), ..Default::default() };
            if let Err(error) = discovery::prepare(&options) {
                tracing::debug!(%error, "no devices to share with");
            }
        }
        let listed = discovery::numbers(self.driver().0)?;
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
