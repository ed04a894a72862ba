//! Which NPUs there are, under which numbers and in which state, and what is wrong if there are
//! none.
//!
//! The driver gives each mount namespace its own table of devices, numbered from 0. On the host the
//! table has all whole devices. In a container it has the devices whose nodes the container opened
//! *before* the table was made, and then it is frozen. So the order of questions matters
//! (`setup.rs`): a wrong order takes the devices away from the whole container.
//!
//! [`survey`] keeps to that order, asks everything that can be asked without a memory session, and
//! returns the devices together with [`Finding`]s: sentences about what is wrong and what to do. It
//! never blocks longer than [`Options::timeout`]. [`list`] is the short form.
//!
//! ```
//! # let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! # emulator.attach()?;
//! for npu in ascend_vmm::discovery::list()? {
//!     println!("{}: {} {}", npu.logical, npu.soc.as_deref().unwrap_or("?"), npu.identity);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod host_files;
mod identity;
mod npu;
mod peer_access;
mod setup;
mod visible_devices;

pub use crate::driver::devmng::Machine;
pub use crate::error::{Finding, Health, Severity};
pub use crate::id::SuperPod;
pub use host_files::Versions;
pub use identity::{Identity, NotAnAddress, PciAddress};
pub use npu::{DeviceState, Hbm, Instance, Npu, Split};
pub(crate) use peer_access::PeerAccess;
pub use peer_access::can_access;
pub use visible_devices::VisibleDevices;

use crate::deadline::Deadline;
use crate::driver::Answer;
use crate::driver::davinci::{DavinciFile, MANAGER, module};
use crate::driver::devmng::Devmng;
use crate::driver::hdc::{self, HdcFile};
use crate::driver::recognise;
use crate::driver::segments;
use crate::driver::uda::{Listed, Uda};
use crate::driver::urd::Urd;
use crate::error::{Errno, Error, Result};
use crate::id::{LogicalId, PhysicalId, UserId};
use crate::trace;
use ascend_ioctl::Generation;
use npu::Sources;
use setup::{Asked, Nodes};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The driver forgets a process that hides all devices from others about a second after its end.
const FORGETTING: Duration = Duration::from_secs(2);

const TIMEOUT: Duration = Duration::from_secs(10);

/// Where to look, and for how long.
///
/// ```
/// use ascend_vmm::discovery::{Options, survey};
/// use std::time::Duration;
///
/// let survey = survey(&Options::default().timeout(Duration::from_secs(1)));
/// for finding in &survey.findings {
///     println!("{finding}. {}", finding.remedy());
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Options {
    root: PathBuf,
    timeout: Duration,
    visible: Option<VisibleDevices>,
}

impl Default for Options {
    fn default() -> Self {
        Options { root: "/".into(), timeout: TIMEOUT, visible: None }
    }
}

impl Options {
    /// The directory of the host's `proc`, `sys`, `etc` and installation directories; `/` by
    /// default.
    pub fn root(mut self, root: impl Into<PathBuf>) -> Options {
        self.root = root.into();
        self
    }

    /// Longest wait; 10 s by default. The first question after the driver was loaded waits for all
    /// devices to start, for up to 160 s in the kernel.
    pub fn timeout(mut self, timeout: Duration) -> Options {
        self.timeout = timeout;
        self
    }

    /// Which devices the user sees, under which numbers; by default what the environment says.
    pub fn visible(mut self, visible: VisibleDevices) -> Options {
        self.visible = Some(visible);
        self
    }
}

/// Where this process runs, according to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Environment {
    /// On the host, or in a container with all privileges: all whole devices, under the host's
    /// numbers.
    Host,
    /// In an ordinary container: its own devices, numbered from 0. A private mount namespace on the
    /// host counts as one, too.
    Container,
}

/// Which memory driver is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryDriver {
    /// SVM v2, which this library drives.
    V2,
    /// SVM v3 (Ascend950), which has another interface.
    V3,
    /// None.
    Missing,
}

/// What [`survey`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Survey {
    /// `None` if the driver did not answer.
    pub environment: Option<Environment>,
    /// The memory driver's generation, if it is a known one. A session would find the same.
    pub generation: Option<Generation>,
    /// `None` if the driver did not answer.
    pub memory_driver: Option<MemoryDriver>,
    /// Version strings of the installed package.
    pub versions: Versions,
    /// NPUs that sysfs shows on PCI, started or not.
    pub on_pci: Vec<PciAddress>,
    /// The devices, by logical id.
    pub devices: Vec<Npu>,
    /// What is wrong or worth knowing, the worst first.
    pub findings: Vec<Finding>,
}

impl Survey {
    /// A device by its logical id.
    pub fn device(&self, logical: LogicalId) -> Option<&Npu> {
        self.devices.iter().find(|npu| npu.logical == logical)
    }

    /// A device by its number in `ASCEND_RT_VISIBLE_DEVICES`.
    pub fn user_device(&self, user: UserId) -> Option<&Npu> {
        self.devices.iter().find(|npu| npu.user == Some(user))
    }
}

/// The NPUs of this process.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// let npus = ascend_vmm::discovery::list()?;
/// assert!(npus.iter().all(|npu| npu.is_usable()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::NoDevices`] with the most likely reason if there are none.
#[doc(alias = "aclrtGetDeviceCount")]
#[doc(alias = "cudaGetDeviceCount")]
#[doc(alias = "cuDeviceGetCount")]
pub fn list() -> Result<Vec<Npu>> {
    list_with(&Options::default())
}

/// The NPUs of this process, with options.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::UserId;
/// use ascend_vmm::discovery::{Options, list_with};
///
/// let npus = list_with(&Options::default().visible("1".into()))?;
/// assert_eq!(npus[1].user, Some(UserId(0)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// As [`list`].
pub fn list_with(options: &Options) -> Result<Vec<Npu>> {
    let survey = survey(options);
    match survey.findings.into_iter().next() {
        Some(finding) if survey.devices.is_empty() => Err(Error::NoDevices(finding)),
        _ => Ok(survey.devices),
    }
}

/// Asks everything that can be asked without a memory session, in the order that does no harm.
///
/// It disturbs no session, neither of this library nor of the vendor's in the same process. Beside
/// the vendor's library some facts are missing, and a [`Finding::DriverUsedHere`] says so.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::discovery::{Options, survey};
///
/// let survey = survey(&Options::default());
/// println!("{:?} with {} NPUs", survey.generation, survey.devices.len());
/// for finding in &survey.findings {
///     println!("{}: {finding}. {}", finding.code(), finding.remedy());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn survey(options: &Options) -> Survey {
    let mut survey = Survey {
        environment: None,
        generation: None,
        memory_driver: None,
        versions: Versions::read(&options.root),
        on_pci: host_files::pci_functions(&options.root),
        devices: Vec::new(),
        findings: Vec::new(),
    };
    survey.ask(options);
    if options.visible.is_none() {
        let listed: Vec<LogicalId> = survey.devices.iter().map(|npu| npu.logical).collect();
        survey.findings.extend(VisibleDevices::finding(&listed));
    }
    survey.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity()));
    survey
}

/// Makes this process's device table if no process did yet: in a container nothing works before.
pub(crate) fn prepare() -> Result<()> {
    prepare_with(Arc::new(Uda::open()?))
}

fn prepare_with(uda: Arc<Uda>) -> Result<()> {
    let mut findings = Vec::new();
    let listed = set_up(&uda, Nodes::open(&uda), Deadline::after(TIMEOUT), 0, &mut findings);
    match findings.into_iter().max_by_key(Finding::severity) {
        Some(finding) if listed.is_none_or(|devices| devices.is_empty()) => Err(Error::NoDevices(finding)),
        _ => Ok(()),
    }
}

/// Makes the device table of a container. Returns true if it is worth trying again what failed. On
/// the host it is not: there the driver makes the table by itself.
///
/// DEVMNG would answer with less, but if the vendor's library has a session in this process,
/// closing a file of that module would end the session.
pub(crate) fn prepare_container() -> bool {
    match Uda::open() {
        Ok(uda) if !uda.is_admin() => {
            let prepared = prepare_with(Arc::new(uda));
            prepared.map_err(|error| trace::warn(error, "the devices of this container could not be set up")).is_ok()
        }
        _ => false,
    }
}

/// The physical id behind a logical id of this process.
pub(crate) fn physical(logical: LogicalId) -> Result<PhysicalId> {
    Uda::open()?.devid_to_udevid(logical)
}

/// A device under its numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceNumbers {
    pub(crate) logical: LogicalId,
    pub(crate) physical: PhysicalId,
    /// Its id in a super pod.
    pub(crate) sdid: Option<u32>,
}

/// Every device of this process under its numbers.
pub(crate) fn numbers() -> Result<Vec<DeviceNumbers>> {
    let urd = Urd::open()?;
    let listed = Uda::open()?.get_dev_list();
    let listed = listed.map_err(|answer| answer.refused("GET_DEV_LIST").operation("list the devices"))?;
    // The driver never releases an import without the super-pod id that the device has, so a
    // question that failed is asked again.
    let pod = |device: &Listed| urd.spod_info(device.logical).or_else(|| urd.spod_info(device.logical));
    let sdid = |device: &Listed| pod(device).map(|pod| pod.sdid);
    let numbers =
        |&device: &Listed| DeviceNumbers { logical: device.logical, physical: device.physical, sdid: sdid(&device) };
    Ok(listed.iter().map(numbers).collect())
}

impl Survey {
    fn ask(&mut self, options: &Options) {
        let uda = match Uda::open() {
            Ok(uda) => Arc::new(uda),
            Err(error) => {
                self.findings.push(failed_open(&error, module::UDA, &options.root));
                return;
            }
        };
        self.environment = Some(if uda.is_admin() { Environment::Host } else { Environment::Container });
        if let Err(errno) = HdcFile::open() {
            self.findings.push(Finding::NoDaemonNode(hdc::PATH.into(), errno));
        }
        let nodes = Nodes::open(&uda);
        // The clock starts here: there may be a thousand nodes to try, and none of them waits.
        let deadline = Deadline::after(options.timeout);
        let listed = set_up(&uda, nodes, deadline, self.on_pci.len(), &mut self.findings);
        // Nothing else before the table, not even what needs no device.
        self.ask_memory_driver(&options.root);
        let Some(listed) = listed else { return };
        let visible = options.visible.clone().unwrap_or_else(VisibleDevices::from_environment);
        let unasked: Vec<_> = listed.iter().map(|device| Npu::unasked(device, &visible)).collect();
        let questions = {
            let (root, on_pci, memory) = (options.root.clone(), self.on_pci.clone(), self.generation);
            move || ask_devices(&root, &listed, &visible, &on_pci, memory)
        };
        // Some questions are passed on to a device, which may never answer.
        let answers = match Asked::start("ascend-vmm survey", questions) {
            Some(asked) => asked.wait(deadline).ok_or(Finding::Unanswered { waited: options.timeout }),
            None => Err(Finding::NoThread { listed: unasked.len() }),
        };
        let (devices, findings) = answers.unwrap_or_else(|finding| (unasked, vec![finding]));
        self.devices = devices;
        self.findings.extend(findings);
    }

    /// Opening the memory module and closing it disturbs no session of this process, and neither
    /// does the question for its address segments, which tells its generation.
    fn ask_memory_driver(&mut self, root: &Path) {
        let driver = match recognise::memory_driver() {
            Ok(generation) => {
                self.generation = Some(generation);
                MemoryDriver::V2
            }
            Err(Error::UnknownGeneration { detected }) => {
                self.findings.push(Finding::UnknownGeneration(detected));
                MemoryDriver::V2
            }
            // Only a module that is not there answers EINVAL.
            Err(error) if error.errno() == Some(Errno::EINVAL) => match DavinciFile::open(module::SVM_V3) {
                Err(error) if error.errno() == Some(Errno::EINVAL) => MemoryDriver::Missing,
                _ => MemoryDriver::V3,
            },
            Err(error) => {
                self.findings.push(failed_open(&error, module::SVM, root));
                return;
            }
        };
        self.memory_driver = Some(driver);
        self.findings.extend(match driver {
            MemoryDriver::V2 => segments::too_few_address_bits().map(|bits| Finding::SmallAddressSpace { bits }),
            MemoryDriver::V3 => Some(Finding::MemoryDriverV3),
            MemoryDriver::Missing => Some(Finding::MemoryDriverMissing),
        });
    }
}

/// Asks everything about the devices of the table.
fn ask_devices(
    root: &Path,
    listed: &[Listed],
    visible: &VisibleDevices,
    on_pci: &[PciAddress],
    memory: Option<Generation>,
) -> (Vec<Npu>, Vec<Finding>) {
    let mut findings = Vec::new();
    let devmng = Devmng::claim_harmlessly();
    // This harmless question opens the file, so that a missing module is reported once and not for
    // every device.
    match devmng.as_ref().map(Devmng::bare_tgid) {
        Some(Ok(_)) => {}
        Some(Err(error)) => findings.push(failed_open(&error, module::DEVMNG, root)),
        None => findings.push(Finding::DriverUsedHere),
    }
    let urd = Urd::open().map_err(|error| findings.push(failed_open(&error, module::URD, root))).ok();
    // Both parts of the driver come in one package. The keys of the rest are asked for only if the
    // generation of the memory driver is unknown: these questions leave lines in the kernel's log.
    let generation = match (memory, &urd) {
        (Some(memory), Some(urd)) => {
            let other = listed.first().and_then(|device| recognise::disagrees(urd, device.logical, memory));
            if let Some(other) = other {
                findings.push(Finding::Unexpected(format!(
                    "the memory driver is of generation {memory} and the rest of the driver of another, like {other}"
                )));
            }
            other.or(Some(memory))
        }
        (None, Some(urd)) => {
            recognise::by_keys(urd).map_err(|seen| findings.push(Finding::UnknownGeneration(seen))).ok()
        }
        (memory, None) => memory,
    };
    let sources = Sources { devmng: devmng.as_ref(), urd: urd.as_ref(), generation, visible, on_pci };
    let devices: Vec<_> = listed.iter().map(|device| Npu::ask(&sources, device)).collect();
    findings.extend(devices.iter().flat_map(Npu::findings));
    (devices, findings)
}

/// Makes the table, unless that would do harm. `None` if there is no table to ask about.
fn set_up(
    uda: &Arc<Uda>,
    nodes: Nodes,
    deadline: Deadline,
    on_pci: usize,
    findings: &mut Vec<Finding>,
) -> Option<Vec<Listed>> {
    let opened = nodes.opened();
    findings.extend(closed_nodes(&nodes));
    if opened == 0 {
        // No SETUP: on the host it would hide all devices from others, in a container it would
        // freeze an empty table.
        if nodes.closed.is_empty() {
            findings.push(if uda.is_admin() { no_device(on_pci) } else { Finding::NoDevicePassed });
        }
        return None;
    }
    match make_table(uda, nodes, deadline, on_pci, findings) {
        Ok(listed) => {
            findings.extend(missing_devices(&listed, opened, on_pci, uda.is_admin()));
            Some(listed)
        }
        Err(finding) => {
            findings.push(finding);
            None
        }
    }
}

/// SETUP and GET_DEV_LIST, twice if there is reason to.
fn make_table(
    uda: &Arc<Uda>,
    mut nodes: Nodes,
    deadline: Deadline,
    on_pci: usize,
    findings: &mut Vec<Finding>,
) -> Result<Vec<Listed>, Finding> {
    let mut tried_again = false;
    loop {
        match setup::set_up(uda, nodes, deadline)? {
            Answer::Done => {}
            // The driver says this only once: the next caller gets success and an empty list.
            Answer::Refused(Errno::ENODEV) => return Err(no_device(on_pci)),
            // A process of this container asked too early, or another container was faster. Either
            // way the nodes must be opened again.
            Answer::Refused(Errno::EBUSY) if !tried_again => {
                tried_again = true;
                nodes = Nodes::open(uda);
                if nodes.opened() == 0 {
                    findings.extend(closed_nodes(&nodes));
                    return Err(Finding::TakenAway);
                }
                continue;
            }
            Answer::Refused(Errno::EBUSY) => return Err(Finding::TakenAway),
            Answer::Refused(errno) => return Err(Finding::SetupRefused(errno)),
            Answer::Positive(number) => {
                return Err(Finding::Unexpected(format!("SETUP answered {number}, which is no errno")));
            }
        }
        let mut listed = uda
            .get_dev_list()
            .map_err(|answer| Finding::Unexpected(format!("the list of devices was refused: {answer:?}")))?;
        // On the host, virtual instances are listed after the whole devices. They belong to
        // containers.
        listed.retain(|device| device.logical.0 < uda.max_devices());
        if listed.is_empty() && uda.is_admin() && !tried_again && deadline.left() > FORGETTING {
            // The table of a restricted process hides ours until the driver has forgotten it.
            tried_again = true;
            std::thread::sleep(FORGETTING);
            nodes = Nodes::open(uda);
            continue;
        }
        return Ok(listed);
    }
}

fn no_device(on_pci: usize) -> Finding {
    if on_pci == 0 { Finding::NoDevice } else { Finding::NoneCameUp { on_pci } }
}

/// Explains a list that is empty or shorter than it could be.
fn missing_devices(listed: &[Listed], opened: usize, on_pci: usize, host: bool) -> Option<Finding> {
    // Two devices can share one PCI function, so only fewer devices than functions say something.
    match (host, listed.len()) {
        (true, 0) => Some(Finding::Hidden),
        (true, listed) if listed < on_pci && listed == opened => Some(Finding::SomeDidNotComeUp { on_pci, listed }),
        (false, listed) if listed < opened => Some(Finding::TableFrozen { opened, listed }),
        (false, listed) if listed < on_pci => Some(Finding::PartlyPassed { listed, on_pci }),
        _ => None,
    }
}

/// Explains the nodes that could not be opened.
fn closed_nodes(nodes: &Nodes) -> Vec<Finding> {
    let mut findings = Vec::new();
    let with = |wanted: &[Errno]| -> Vec<u32> {
        nodes.closed.iter().filter(|(_, errno)| wanted.contains(errno)).map(|(number, _)| *number).collect()
    };
    let forbidden = with(&[Errno::EACCES, Errno::EPERM]);
    if !forbidden.is_empty() {
        findings.push(if nodes.opened() == 0 {
            Finding::NodesForbidden { nodes: forbidden.len() }
        } else {
            Finding::SomeNodesForbidden { nodes: forbidden }
        });
    }
    let occupied = with(&[Errno::EBUSY]);
    if !occupied.is_empty() {
        findings.push(Finding::Occupied { nodes: occupied, others: nodes.opened() > 0 });
    }
    let orphans = with(&[Errno::ENODEV, Errno::ENXIO]);
    findings.extend(orphans.into_iter().map(|number| Finding::OrphanNode(PhysicalId(number))));
    findings
}

/// Explains a failed open of a module.
fn failed_open(error: &Error, module: &'static str, root: &Path) -> Finding {
    let path = PathBuf::from(MANAGER);
    match error {
        Error::Open(failed) => match failed.errno {
            Errno::ENOENT | Errno::ENOTDIR => match host_files::driver_loaded(root) {
                Some(false) => Finding::DriverNotLoaded,
                Some(true) | None => Finding::NodeMissing(path),
            },
            Errno::ENXIO | Errno::ENODEV => Finding::StaleNode(path),
            Errno::EACCES => Finding::Forbidden(path),
            Errno::EPERM => Finding::Denied(path),
            errno => Finding::Unopenable(path, errno),
        },
        other => match other.errno() {
            Some(Errno::EINVAL) => Finding::ModuleMissing(module),
            Some(Errno::EBUSY) => Finding::ModuleUnloading(module),
            Some(errno) => Finding::ModuleRefused(module, errno),
            None => Finding::Unexpected(other.to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Instant;

    #[test]
    fn an_answer_that_comes_in_time_is_returned() {
        let asked = Asked::start("test", || 7).unwrap();
        assert_eq!(asked.wait(Deadline::after(Duration::from_secs(60))), Some(7));
    }

    #[test]
    fn an_answer_that_does_not_come_is_not_waited_for() {
        let (never, nothing) = mpsc::channel::<()>();
        let begun = Instant::now();
        let asked = Asked::start("test", move || nothing.recv().is_ok()).unwrap();
        assert_eq!(asked.wait(Deadline::after(Duration::from_millis(50))), None);
        assert!(begun.elapsed() >= Duration::from_millis(50));
        drop(never);
    }
}
