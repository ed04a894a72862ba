//! Which NPUs are there, under which numbers, in which state; and what is wrong when there are
//! none.
//!
//! The driver gives each mount namespace its own table of devices, numbered from 0. On the host the
//! table has all whole devices; in a container it has the devices whose nodes the container opened
//! *before* the table was made, and then it is frozen. So the order of questions matters
//! (`setup.rs`), and a careless one takes the devices away from the whole container.
//!
//! [`survey`] keeps to that order, asks everything that can be asked without a memory session, and
//! returns the devices together with [`Finding`]s: sentences about what is wrong and what to do. It
//! never blocks longer than [`Options::timeout`]. [`list`] is the short form.
//!
//! ```no_run
//! for npu in ascend_vmm::discovery::list()? {
//!     println!("{}: {} {}", npu.logical, npu.soc.as_deref().unwrap_or("?"), npu.identity);
//! }
//! # Ok::<(), ascend_vmm::Error>(())
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
pub use identity::{Identity, NotAnAddress, NotAnIdentity, PciAddress};
pub use npu::{Hbm, Instance, Npu, Split, State};
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
use crate::signals;
use crate::trace;
use ascend_ioctl::Generation;
use npu::Sources;
use setup::{Nodes, Setup};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// A process that hides all devices from others is cleared away by the driver about a second after
/// its end.
const CLEARING: Duration = Duration::from_secs(2);

/// How long the questions may take, unless the caller says otherwise.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Where to look, and for how long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Where the host's `/proc`, `/sys`, `/etc` and installation directories hang.
    pub root: PathBuf,
    /// Longest wait. The first question after the driver was loaded waits for all devices to start,
    /// for up to 160 s in the kernel.
    pub timeout: Duration,
    /// Which devices the user sees, under which numbers.
    pub visible: VisibleDevices,
}

impl Default for Options {
    fn default() -> Self {
        Options { root: "/".into(), timeout: TIMEOUT, visible: VisibleDevices::from_environment() }
    }
}

/// Where the driver thinks that we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Environment {
    /// On the host, or in a container with all privileges: all whole devices, under the host's
    /// numbers.
    Host,
    /// In an ordinary container: its own devices, numbered from 0. (A private mount namespace on
    /// the host counts as one, too.)
    Container,
}

/// Which memory driver is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryDriver {
    /// SVM v2: the one that this library drives.
    V2,
    /// SVM v3 (Ascend 950): another interface.
    V3,
    /// None.
    Missing,
}

/// What was found out about a host.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Survey {
    /// Where we are; `None` if the driver did not answer.
    pub environment: Option<Environment>,
    /// The memory driver's generation, if it is a known one: the one that a session would find.
    pub generation: Option<Generation>,
    /// The memory driver; `None` if the driver did not answer.
    pub memory_driver: Option<MemoryDriver>,
    /// Version strings of the installed package.
    pub versions: Versions,
    /// NPUs that sysfs shows on PCI, come up or not.
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

    /// A device by its physical id.
    pub fn physical_device(&self, physical: PhysicalId) -> Option<&Npu> {
        self.devices.iter().find(|npu| npu.physical == physical)
    }
}

/// The NPUs of this process.
///
/// # Errors
///
/// [`Error::NoDevices`] with the most likely reason if there are none.
#[doc(alias = "aclrtGetDeviceCount")]
#[doc(alias = "cuDeviceGetCount")]
pub fn list() -> Result<Vec<Npu>> {
    list_with(&Options::default())
}

/// As [`list`], with options.
///
/// # Errors
///
/// As [`list`].
pub fn list_with(options: &Options) -> Result<Vec<Npu>> {
    let survey = survey(options);
    match survey.findings.into_iter().next() {
        Some(finding) if survey.devices.is_empty() => Err(Error::NoDevices(Box::new(finding))),
        _ => Ok(survey.devices),
    }
}

/// Finds out all that can be found out without a memory session, in the order that does no harm.
///
/// It disturbs no session, neither of this library nor of the vendor's in the same process. Beside
/// the vendor's library some facts are missing, and a [`Finding::DriverUsedHere`] says so.
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
    if options.visible == VisibleDevices::from_environment() {
        let listed: Vec<LogicalId> = survey.devices.iter().map(|npu| npu.logical).collect();
        survey.findings.extend(VisibleDevices::finding(&listed));
    }
    survey.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity()));
    survey
}

/// Makes this process's device table if no process did yet: in a container nothing works before.
pub(crate) fn prepare() -> Result<()> {
    let uda = Arc::new(Uda::open()?);
    let mut findings = Vec::new();
    let deadline = Deadline::after(TIMEOUT);
    let listed = set_up(&uda, Nodes::open(&uda), deadline, 0, &mut findings).is_some_and(|devices| !devices.is_empty());
    match findings.into_iter().max_by_key(Finding::severity) {
        Some(finding) if !listed => Err(Error::NoDevices(Box::new(finding))),
        _ => Ok(()),
    }
}

/// Sets up the devices of a container in which no process did that yet; whether there is reason to
/// try again. On the host there is none: the driver makes the table by itself there.
pub(crate) fn prepare_container(devmng: &Devmng) -> bool {
    if !devmng.get_container_flag() {
        return false;
    }
    match prepare() {
        Ok(()) => true,
        Err(error) => {
            trace::warn(error, "the devices of this container could not be set up");
            false
        }
    }
}

/// The physical id behind a logical id of this process.
pub(crate) fn physical(logical: LogicalId) -> Result<PhysicalId> {
    Uda::open()?.devid_to_udevid(logical)
}

/// Every device of this process under its numbers, with its place in a super pod, if it has one.
pub(crate) fn numbers() -> Result<Vec<(LogicalId, PhysicalId, Option<SuperPod>)>> {
    let urd = Urd::open()?;
    let listed = Uda::open()?.get_dev_list();
    let listed = listed.map_err(|answer| answer.refused("GET_DEV_LIST").operation("list the devices"))?;
    // An import without the super-pod id that the device has is never released by the driver, so a
    // question that failed is asked again.
    let pod = |device: &Listed| urd.spod_info(device.logical).or_else(|| urd.spod_info(device.logical));
    let numbers = |device: &Listed| (device.logical, device.physical, pod(device));
    Ok(listed.iter().map(numbers).collect())
}

impl Survey {
    fn ask(&mut self, options: &Options) {
        let uda = match Uda::open() {
            Ok(uda) => Arc::new(uda),
            Err(error) => {
                self.findings.push(closed_door(&error, module::UDA, options));
                return;
            }
        };
        self.environment = Some(if uda.is_admin() { Environment::Host } else { Environment::Container });
        if let Err(errno) = HdcFile::open() {
            self.findings.push(Finding::NoDaemonNode(hdc::PATH.into(), errno));
        }
        let nodes = Nodes::open(&uda);
        // The clock starts here: there may be a thousand nodes to try, and they do not wait.
        let deadline = Deadline::after(options.timeout);
        let listed = set_up(&uda, nodes, deadline, self.on_pci.len(), &mut self.findings);
        // Nothing else before the table, not even what needs no device.
        self.ask_memory_driver(options);
        let Some(listed) = listed else { return };
        let questions = {
            let (options, functions, memory) = (options.clone(), self.on_pci.clone(), self.generation);
            let listed = listed.clone();
            move || ask_devices(&options, &listed, &functions, memory)
        };
        match within(deadline, questions) {
            Some((devices, findings)) => {
                self.devices = devices;
                self.findings.extend(findings);
            }
            None => {
                self.devices = listed.iter().map(|device| Npu::unasked(device, &options.visible)).collect();
                self.findings.push(Finding::Unanswered { waited: options.timeout });
            }
        }
    }

    /// Opening the memory module and closing it again disturbs no session that this process has,
    /// and neither does the question for its address segments, which tells its generation.
    fn ask_memory_driver(&mut self, options: &Options) {
        let driver = match recognise::memory_driver() {
            Ok(generation) => {
                self.generation = Some(generation);
                MemoryDriver::V2
            }
            Err(Error::UnknownGeneration(unknown)) => {
                self.findings.push(Finding::UnknownGeneration(unknown.detected));
                MemoryDriver::V2
            }
            Err(error) if error.errno() == Some(Errno::EINVAL) => {
                // Refused for its device number or not: only a module that is not there says
                // EINVAL.
                match DavinciFile::open(module::SVM_V3) {
                    Err(error) if error.errno() == Some(Errno::EINVAL) => MemoryDriver::Missing,
                    _ => MemoryDriver::V3,
                }
            }
            Err(error) => {
                self.findings.push(closed_door(&error, module::SVM, options));
                return;
            }
        };
        self.memory_driver = Some(driver);
        match driver {
            MemoryDriver::V2 => {
                let bits = segments::too_few_address_bits();
                self.findings.extend(bits.map(|bits| Finding::SmallAddressSpace { bits }));
            }
            MemoryDriver::V3 => self.findings.push(Finding::MemoryDriverV3),
            MemoryDriver::Missing => self.findings.push(Finding::MemoryDriverMissing),
        }
    }
}

/// Asks everything about the devices of the table.
fn ask_devices(
    options: &Options,
    listed: &[Listed],
    functions: &[PciAddress],
    memory: Option<Generation>,
) -> (Vec<Npu>, Vec<Finding>) {
    let mut findings = Vec::new();
    let devmng = Devmng::claim_harmlessly();
    // The harmless question opens the file, so that a missing module is reported once and not for
    // every device.
    match devmng.as_ref().map(Devmng::bare_tgid) {
        Some(Ok(_)) => {}
        Some(Err(error)) => findings.push(closed_door(&error, module::DEVMNG, options)),
        None => findings.push(Finding::DriverUsedHere),
    }
    let urd = match Urd::open() {
        Ok(urd) => Some(urd),
        Err(error) => {
            findings.push(closed_door(&error, module::URD, options));
            None
        }
    };
    // Both parts of the driver come in one package. The rest of it is asked for its keys only where
    // the memory driver did not tell: these questions leave error lines in the kernel's log.
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
        (None, Some(urd)) => match recognise::by_keys(urd) {
            Ok(generation) => Some(generation),
            Err(seen) => {
                findings.push(Finding::UnknownGeneration(seen));
                None
            }
        },
        (memory, None) => memory,
    };
    let sources =
        Sources { devmng: devmng.as_ref(), urd: urd.as_ref(), generation, visible: &options.visible, functions };
    let devices: Vec<_> = listed.iter().map(|device| Npu::ask(&sources, device)).collect();
    findings.extend(devices.iter().flat_map(Npu::findings));
    (devices, findings)
}

/// What `questions` returns, if it does so until `deadline`. They run on a thread of their own,
/// which goes on to its end in any case: some are passed on to a device, and a device that does not
/// answer holds them up in the kernel.
fn within<T: Send + 'static>(deadline: Deadline, questions: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, answer) = mpsc::sync_channel(1);
    let asking = move || {
        // Fails if the caller waits no longer.
        let _ = sender.send(questions());
    };
    signals::spawn("ascend-vmm survey", asking).ok()?;
    answer.recv_timeout(deadline.left()).ok()
}

/// Opens the nodes and makes the table, unless that would do harm. `None` if there is no table to
/// ask about.
fn set_up(
    uda: &Arc<Uda>,
    mut nodes: Nodes,
    deadline: Deadline,
    on_pci: usize,
    findings: &mut Vec<Finding>,
) -> Option<Vec<Listed>> {
    let started = Instant::now();
    let host = uda.is_admin();
    let opened = nodes.opened();
    findings.extend(closed_nodes(&nodes));
    if opened == 0 {
        // No SETUP: on the host it would hide all devices from others, in a container it would
        // freeze an empty table.
        if nodes.closed.is_empty() {
            findings.push(match (host, on_pci) {
                (false, _) => Finding::NoDevicePassed,
                (true, 0) => Finding::NoDevice,
                (true, on_pci) => Finding::NoneCameUp { on_pci },
            });
        }
        return None;
    }
    let mut tried_again = false;
    loop {
        match setup::set_up(uda, nodes, deadline) {
            Setup::Answered(Answer::Done) => {}
            // Given once only: the next caller gets success and an empty list.
            Setup::Answered(Answer::Refused(Errno::ENODEV)) => {
                findings.push(if on_pci == 0 { Finding::NoDevice } else { Finding::NoneCameUp { on_pci } });
                return None;
            }
            // A process of this container asked too early, or another container was faster; either
            // way the nodes must be opened again.
            Setup::Answered(Answer::Refused(Errno::EBUSY)) if !tried_again => {
                tried_again = true;
                nodes = Nodes::open(uda);
                if nodes.opened() == 0 {
                    findings.extend(closed_nodes(&nodes));
                    findings.push(Finding::TakenAway);
                    return None;
                }
                continue;
            }
            Setup::Answered(Answer::Refused(Errno::EBUSY)) => {
                findings.push(Finding::TakenAway);
                return None;
            }
            Setup::Answered(Answer::Refused(errno)) => {
                findings.push(Finding::SetupRefused(errno));
                return None;
            }
            Setup::Answered(Answer::Positive(number)) => {
                findings.push(Finding::Unexpected(format!("SETUP answered {number}, which is no errno")));
                return None;
            }
            Setup::Waiting => {
                findings.push(Finding::StillStarting { waited: started.elapsed() });
                return None;
            }
            Setup::NoThread => {
                findings.push(Finding::Unexpected("no thread could be started to set up the devices".into()));
                return None;
            }
        }
        let mut listed = match uda.get_dev_list() {
            Ok(listed) => listed,
            Err(refused) => {
                findings.push(Finding::Unexpected(format!("the list of devices was refused: {refused:?}")));
                return None;
            }
        };
        // On the host, virtual instances are listed behind the whole devices; they belong to
        // containers.
        listed.retain(|device| device.logical.0 < uda.max_devices());
        if listed.is_empty() && host && !tried_again && deadline.left() > CLEARING {
            // A restricted process was first and its table hides ours: the driver clears it away
            // some time after its end.
            tried_again = true;
            std::thread::sleep(CLEARING);
            nodes = Nodes::open(uda);
            continue;
        }
        findings.extend(missing_devices(&listed, opened, on_pci, host));
        return Some(listed);
    }
}

/// What it means that the list is empty or shorter than it could be.
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
    findings.extend(
        with(&[Errno::ENODEV, Errno::ENXIO]).into_iter().map(|number| Finding::NodeOfNothing(PhysicalId(number))),
    );
    findings
}

/// Why a file of a module could not be had.
fn closed_door(error: &Error, module: &'static str, options: &Options) -> Finding {
    let path = PathBuf::from(MANAGER);
    match error {
        Error::Open(failed) => match failed.errno {
            Errno::ENOENT | Errno::ENOTDIR => match host_files::driver_loaded(&options.root) {
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

    #[test]
    fn answers_that_come_in_time_are_returned() {
        assert_eq!(within(Deadline::after(Duration::from_secs(60)), || 7), Some(7));
    }

    #[test]
    fn answers_that_do_not_come_are_not_waited_for() {
        let (never, nothing) = mpsc::channel::<()>();
        let begun = Instant::now();
        assert_eq!(within(Deadline::after(Duration::from_millis(50)), move || nothing.recv().is_ok()), None);
        assert!(begun.elapsed() >= Duration::from_millis(50));
        drop(never);
    }
}
