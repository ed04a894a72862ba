//! Sharing physical memory between processes.
//!
//! To the kernel an export is a *share*: a number that any process of the host can name, with a
//! count of holders and a *trust list* of processes that may import it. A handle can be exported
//! once, and imported once per process and device. Its memory lives until the last holder releases
//! it or dies (`docs/driver.md`). The numbers are small and sequential, so **anyone can guess
//! them**: the trust list protects the memory, and is on by default here.
//!
//! **There is no read-only share on this driver**: every process that imports memory and maps it
//! can write it. A process that only reads does so by convention. Trust only processes that may
//! change the memory, and copy what must not change under you.
//!
//! Exporting twice gives the same [`Export`], and importing twice gives the same memory, although
//! the kernel refuses both.
//!
//! With a Unix socket between the two processes, call [`send`] in one and [`receive`] in the other;
//! to serve many processes, start a [`Broker`]. Over any other channel, send a [`Ticket`]:
//!
//! ```
//! # let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! # emulator.attach()?;
//! use ascend_vmm::share::{self, BareTgid, Ticket};
//! use ascend_vmm::{Device, LogicalId, PhysicalMemory, Result, Session};
//!
//! // In the exporter, after the importer has started and sent its number:
//! fn export(memory: &PhysicalMemory, importer: BareTgid) -> Result<String> {
//!     let export = memory.export()?;
//!     export.trust(&[importer])?;
//!     Ok(export.ticket()?.to_string())
//! }
//!
//! // In the importer:
//! fn import(device: &Device, ticket: &str) -> Result<PhysicalMemory> {
//!     share::import(device, &ticket.parse::<Ticket>()?)
//! }
//!
//! // Here both are one process, which imports on its other device.
//! let session = Session::open()?;
//! let memory = session.device(LogicalId(0))?.create(2 << 20)?;
//! let ticket = export(&memory, BareTgid::of_this_process(&session)?)?;
//! let imported = import(&session.device(LogicalId(1))?, &ticket)?;
//! assert_eq!(imported.size(), memory.size());
//! # Ok::<(), Box<dyn std::error::Error>>(())
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
pub use exchange::{receive, send};
pub(crate) use named::OpenedAt;
pub use named::{Name, NamedMemory, Published, open_named};
pub use shareable_handle::{FabricHandle, HandleKind, ShareableHandle};
pub use ticket::{Ticket, TicketDevice};

use crate::device::{Device, DeviceInner, Host};
use crate::discovery::{self, DeviceNumbers};
use crate::driver::svm::{HOST_ID, ImportKind, TRUST_LIST};
use crate::error::{Errno, Error, Invalid, Refused, Result};
use crate::physical::{PhysicalBlock, PhysicalMemory};
use crate::session::SessionInner;
use crate::session::undo::Live;
use crate::slots::{Lookup, Slots, lock};
use crate::trace::{self, quiet};
use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A session's state for sharing. Facts about the process and the devices are looked up once, when
/// they are first needed.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Held while a handle is exported, so that the kernel is called once.
    exporting: Mutex<()>,
    /// Imports of this process.
    pub(crate) imports: Slots<ImportKey, Live<PhysicalBlock>>,
    /// Names that this process has opened.
    names: Slots<Name, Live<named::Opened>>,
    /// The process that was trusted last.
    last_trusted: AtomicI32,
    process: OnceLock<ProcessIdentity>,
    devices: OnceLock<Vec<DeviceNumbers>>,
}

/// What tickets say of the process that makes them.
#[derive(Debug)]
struct ProcessIdentity {
    /// Its id in the initial pid namespace.
    tgid: BareTgid,
    /// True if it lives in the initial pid namespace: its pid is the same there. (A process of
    /// another namespace that has the same number in both by chance is taken for one of the initial
    /// namespace; nothing in /proc says more in a container.)
    initial: bool,
    /// When it started, in clock ticks since boot; 0 if /proc does not say.
    start: u64,
    boot_id: [u8; 16],
}

/// The kernel's key of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ImportKey {
    pub(crate) share: u32,
    /// The importing device.
    pub(crate) device: u32,
    /// The exporting device.
    pub(crate) exporter: u32,
    /// Super-pod id of an exporter on another server, which numbers its devices differently; 0 on
    /// this one.
    pub(crate) sdid: u32,
}

/// Bits of a super-pod id from which on the server's number stands.
const SDID_SERVER_SHIFT: u32 = 22;

const OPERATION_EXPORT: &str = "export memory";
const OPERATION_IMPORT: &str = "import memory";
const OPERATION_TRUST: &str = "trust a process";

impl PhysicalMemory {
    /// Exports the memory: processes that are trusted can import it. The kernel is called the first
    /// time; later calls return the same export. No process is trusted yet.
    ///
    /// An export cannot be taken back: the memory stays exported until it is released. Whoever
    /// imports and maps it can write it: there is no read-only share.
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
/// ```
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
    /// [`Error::Invalid`] if the device is not in the driver's list any more, and for
    /// [`HandleKind::Fabric`] if it is in no super pod: other servers could not find the memory.
    pub fn fabric_handle(&self, kind: HandleKind) -> Result<FabricHandle> {
        self.memory.block.device.session.check_process()?;
        let numbers = self.numbers()?;
        // For host memory the vendor's library writes the super-pod id of the first device, and
        // refuses an import without one.
        let first = |listed: &[DeviceNumbers]| listed.iter().find(|numbers| numbers.logical.0 == 0).copied();
        let named = match numbers {
            Some(numbers) => Some(numbers),
            None => first(self.memory.block.device.session.device_numbers()?),
        };
        let sdid = named.and_then(|numbers| numbers.sdid);
        if kind == HandleKind::Fabric && sdid.is_none() {
            return Err(Invalid::because(
                "make a fabric handle",
                format!("{} is in no super pod", self.memory.block.device.name()),
                "Other servers cannot import it: share it on this server, by a ticket or the 64-bit handle.",
            ));
        }
        Ok(FabricHandle {
            kind,
            sdid: sdid.unwrap_or(u32::MAX),
            physical: numbers.map_or(HOST_ID, |numbers| numbers.physical.0),
            handle: self.handle,
        })
    }

    /// Everything that an importer needs, for any channel. It is not a secret: the trust list
    /// decides which processes can use it.
    ///
    /// # Errors
    ///
    /// Those of [`Export::fabric_handle`], and of looking up this process's id.
    pub fn ticket(&self) -> Result<Ticket> {
        let block = &self.memory.block;
        block.device.session.check_process()?;
        let (identity, kind) = (block.device.session.process_identity()?, block.kind());
        Ok(Ticket {
            handle: self.handle,
            size: block.size,
            page: kind.page,
            memory: kind.memory,
            device: self.numbers()?.map(|numbers| TicketDevice { physical: numbers.physical.0, sdid: numbers.sdid }),
            generation: self.memory.session().generation(),
            exporter: identity.tgid.as_raw(),
            exporter_start: identity.start,
            boot_id: identity.boot_id,
        })
    }

    /// Adds processes to the trust list: they, and no others, may import, and write what they map.
    /// A share takes up to 65 535 processes in its life, and none can be taken off the list
    /// (`docs/driver.md`). A process must have started before it is trusted.
    ///
    /// The list holds numbers. If a process ends *after* it was trusted, the kernel keeps out
    /// another that gets its number, because it compares start times. If it ended *before*, another
    /// process that has its number by then is trusted. [`send`] and [`Broker`] watch the process
    /// meanwhile. Do the same with a pidfd: open it, get the number, trust, and see that the
    /// process still runs. Trust a child of your own before you wait for its end.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a process that does not exist; [`Error::Refused`] if the list is full
    /// or was turned off. The processes before the refused one are trusted.
    #[doc(alias = "aclrtMemSetPidToShareableHandle")]
    pub fn trust(&self, processes: &[BareTgid]) -> Result<()> {
        let device = &self.memory.block.device;
        let session = &device.session;
        session.check_process()?;
        if processes.is_empty() {
            return Ok(());
        }
        let numbers: Vec<i32> = processes.iter().map(|process| process.as_raw()).collect();
        if session.is_initial_namespace()? {
            // The process that was trusted last is not looked up again: an exporter trusts the same
            // importer for many memories.
            for &process in &numbers {
                if session.sharing.last_trusted.load(Ordering::Relaxed) != process {
                    bare_tgid::check_exists(process)?;
                    session.sharing.last_trusted.store(process, Ordering::Relaxed);
                }
            }
        }
        for batch in numbers.chunks(TRUST_LIST as usize) {
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

    /// True if any process may import, because the trust list is off.
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
    fn numbers(&self) -> Result<Option<DeviceNumbers>> {
        let device = &self.memory.block.device;
        if device.is_host() {
            return Ok(None);
        }
        let numbers = device.session.device_numbers()?.iter().find(|numbers| numbers.logical.0 == device.id).copied();
        numbers.map(Some).ok_or_else(|| {
            Invalid::because(
                OPERATION_EXPORT,
                format!("{} is not in the driver's device list any more", device.name()),
                "The device was removed: open the session anew.",
            )
        })
    }
}

/// Where memory is imported: on a device, for which it can be mapped, or on the host, where the CPU
/// can see it. Device memory shows there through the device's PCI window, if the device has one
/// that is large enough.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a>(pub(crate) &'a Arc<Live<DeviceInner>>);

impl<'a> From<&'a Device> for Place<'a> {
    fn from(device: &'a Device) -> Self {
        Place(&device.inner)
    }
}

impl<'a> From<&'a Host> for Place<'a> {
    fn from(host: &'a Host) -> Self {
        Place(&host.inner)
    }
}

/// What is imported: a ticket, or one of the vendor's forms.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Source<'a> {
    /// A ticket of this library. It is checked against this host before the kernel is called.
    Ticket(&'a Ticket),
    /// The vendor's 64-bit form. Its device number is the exporter's, and is used as this
    /// process's.
    Handle(ShareableHandle),
    /// The vendor's 128-byte form. The device is found by its physical id.
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

/// Imports memory that another process exported, on a device or on the host. The module has an
/// example with a ticket; the vendor's forms are imported in the same way:
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::share::{self, BareTgid, ShareableHandle};
/// use ascend_vmm::{LogicalId, Session};
///
/// let session = Session::open()?;
/// let export = session.device(LogicalId(0))?.create(2 << 20)?.export()?;
/// export.trust(&[BareTgid::of_this_process(&session)?])?;
/// // The number that aclrtMemExportToShareableHandle returns in a process of the vendor's stack.
/// let number: u64 = export.handle().to_u64();
/// let handle = ShareableHandle::from_u64(number).ok_or("not a handle")?;
/// let memory = share::import(&session.device(LogicalId(1))?, handle)?;
/// assert!(memory.is_imported());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Importing the same memory on the same device again gives the same object, as long as it is alive
/// in this process: the driver allows one import per process and device.
///
/// # Errors
///
/// [`Error::Invalid`] for a ticket of another host or boot, or of a device that is not here, before
/// the kernel is called; [`Error::Refused`] with EACCES if this process is not trusted, and with
/// EFAULT if the memory is gone.
#[doc(alias = "aclrtMemImportFromShareableHandle")]
#[doc(alias = "cuMemImportFromShareableHandle")]
pub fn import<'a>(place: impl Into<Place<'a>>, source: impl Into<Source<'a>>) -> Result<PhysicalMemory> {
    let (Place(device), source) = (place.into(), source.into());
    let session = &device.session;
    session.check_process()?;
    let wanted = CheckedSource::new(device, source)?;
    let CheckedSource { share, exporter, ticket, .. } = wanted;
    let key = ImportKey { device: device.id, share, exporter, sdid: wanted.remote };
    let slot = match session.sharing.imports.find(key) {
        Lookup::Object(block) => {
            if let Some(ticket) = ticket {
                block.agree(ticket)?;
            }
            return Ok(PhysicalMemory { block });
        }
        Lookup::Vacant(slot) => slot,
    };
    let size = ticket.map_or(0, |ticket| ticket.size);
    let imported = session.svm.mem_import(device.id, share, exporter, wanted.kind, size);
    let imported = imported.map_err(|refused| wanted.refused(device, refused))?;
    let block = Live::new(PhysicalBlock::imported(device, &imported, key, ticket));
    if let Err(error) = PhysicalBlock::check_import(&imported, ticket) {
        // The import vacates its key when it is released.
        slot.keep();
        return Err(error);
    }
    let block = Arc::new(block);
    slot.fill(&block);
    Ok(PhysicalMemory { block })
}

/// A [`Source`] that was checked against this host.
#[derive(Clone, Copy)]
struct CheckedSource<'a> {
    share: u32,
    /// The exporting device in this process's numbering, or [`HOST_ID`].
    exporter: u32,
    kind: ImportKind,
    /// The super-pod id of an exporter on another server, 0 on this one.
    remote: u32,
    ticket: Option<&'a Ticket>,
}

impl<'a> CheckedSource<'a> {
    fn new(device: &DeviceInner, source: Source<'a>) -> Result<CheckedSource<'a>> {
        let session = &device.session;
        let numbers = session.device_numbers()?;
        let plain = |share: u32, exporter: u32, ticket: Option<&'a Ticket>| {
            // A plain import names the importing device, for the host the first one.
            let id = if device.is_host() { 0 } else { device.id };
            let own = numbers.iter().find(|numbers| numbers.logical.0 == id);
            let kind = ImportKind::Plain { sdid: own.and_then(|own| own.sdid).unwrap_or(0) };
            CheckedSource { share, exporter, kind, remote: 0, ticket }
        };
        match source {
            Source::Ticket(ticket) => {
                let identity = session.process_identity()?;
                let exporter = ticket_device(numbers, ticket, identity.boot_id == ticket.boot_id)?;
                let own = ticket.exporter == identity.tgid.as_raw() && ticket.exporter_start == identity.start;
                if own && exporter == device.id {
                    return Err(own_export(device));
                }
                Ok(plain(ticket.handle.share_id(), exporter, Some(ticket)))
            }
            Source::Handle(handle) => Ok(plain(handle.share_id(), handle.device(), None)),
            Source::Fabric(fabric) => {
                let FabricHandle { kind, sdid, physical, handle } = *fabric;
                let mut checked = plain(handle.share_id(), handle.device(), None);
                // Without a super-pod id the long form says no more than the short one.
                if kind == HandleKind::Fabric && sdid != u32::MAX {
                    checked.kind = ImportKind::Fabric { sdid, physical };
                    // The kernel looks at the same bits (`svm_is_sdid_in_local_server`).
                    let server = |sdid: u32| sdid >> SDID_SERVER_SHIFT;
                    let is_local = |own: &DeviceNumbers| own.sdid.is_some_and(|own| server(own) == server(sdid));
                    if !numbers.iter().any(is_local) {
                        checked.remote = sdid;
                    }
                }
                if checked.remote == 0 && !handle.is_host() {
                    let found = numbers.iter().find(|numbers| numbers.physical.0 == physical);
                    checked.exporter = found.ok_or_else(|| not_visible(physical))?.logical.0;
                }
                Ok(checked)
            }
        }
    }

    fn refused(self, device: &DeviceInner, refused: Box<Refused>) -> Error {
        let CheckedSource { share, exporter, .. } = self;
        let mut arguments = format!("share {share} of device {exporter}");
        if let Some(ticket) = self.ticket {
            arguments += &format!(", exported by process {}", ticket.exporter);
            if exporter_is_gone(&device.session, ticket) {
                arguments += ", which is not running any more";
            }
        }
        // The kernel answers an order to demand a trust list again differently to the exporter
        // (`devmm_share_mem_set_attr_no_wlist_in_server`).
        let demand = || device.session.svm.mem_set_attr(device.id, share, true);
        if refused.errno == Errno::EACCES
            && exporter == device.id
            && demand().is_err_and(|refused| refused.errno == Errno::EOPNOTSUPP)
        {
            return own_export(device);
        }
        device.failed(refused, OPERATION_IMPORT, arguments)
    }
}

/// The ticket's device in this process's numbering, if the ticket is of this host as it runs now.
fn ticket_device(numbers: &[DeviceNumbers], ticket: &Ticket, here: bool) -> Result<u32> {
    let Some(exporter) = ticket.device else {
        return if here { Ok(HOST_ID) } else { Err(foreign(false)) };
    };
    let found = numbers.iter().find(|numbers| numbers.physical.0 == exporter.physical);
    match found {
        // A super-pod id is unique beyond one server: the same one means the same machine at
        // another time.
        _ if !here => {
            Err(foreign(exporter.sdid.is_some() && found.is_some_and(|numbers| numbers.sdid == exporter.sdid)))
        }
        Some(numbers) if numbers.sdid == exporter.sdid || numbers.sdid.is_none() || exporter.sdid.is_none() => {
            Ok(numbers.logical.0)
        }
        Some(_) => Err(Invalid::because(
            OPERATION_IMPORT,
            format!("physical device {} is not the one that the ticket was made on", exporter.physical),
            "The hardware changed since: export it again.",
        )),
        None => Err(not_visible(exporter.physical)),
    }
}

/// Refuses a ticket of another boot, of this machine or another.
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

fn not_visible(physical: u32) -> Error {
    Invalid::because(
        OPERATION_IMPORT,
        format!("physical device {physical} is not among the devices that this process can see"),
        "The importer must see the exporting device too: pass it through to this container.",
    )
}

/// True if the exporter of a ticket is known to be gone. The memory may live on with other
/// importers.
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
    /// What this process's tickets say of it. A session lives in one process, so the driver is
    /// called once.
    fn process_identity(&self) -> Result<&ProcessIdentity> {
        self.check_process()?;
        get_or_try_init(&self.sharing.process, || {
            let tgid = BareTgid::from_raw(self.devmng.bare_tgid()?)?;
            let start = bare_tgid::start_time("self").unwrap_or(0);
            let initial = tgid.as_raw() == std::process::id() as i32;
            Ok(ProcessIdentity { tgid, initial, start, boot_id: bare_tgid::boot_id() })
        })
    }

    /// True if the pids that this process sees are those that the kernel compares.
    fn is_initial_namespace(&self) -> Result<bool> {
        self.process_identity().map(|identity| identity.initial)
    }

    /// The devices of this process's namespace under all their numbers.
    fn device_numbers(&self) -> Result<&[DeviceNumbers]> {
        let numbers = get_or_try_init(&self.sharing.devices, || {
            if self.devices.all(|&device| device == HOST_ID) {
                // This process has used no device yet. In a container the device list must be made
                // before it is read, or it stays empty.
                if let Err(error) = discovery::prepare() {
                    trace::debug(error, "no devices to share with");
                }
            }
            discovery::numbers()
        })?;
        Ok(numbers)
    }
}

/// The value of a cell. If it is empty, `make` makes it.
fn get_or_try_init<T>(cell: &OnceLock<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    if let Some(value) = cell.get() {
        return Ok(value);
    }
    let value = make()?;
    Ok(cell.get_or_init(|| value))
}
