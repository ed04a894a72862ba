//! The process on the device that memory needs.
//!
//! Device memory lives in the address space of a process that the device runs for us, bound to our process id. On the firmware of today
//! SETUP_DEVICE very likely answers EFAULT until a daemon on the device was asked to start one (`tsd.rs`, over a session of `/dev/hisi_hdc`,
//! `hdc.rs`); nothing of this was tried on hardware, see docs/device-process.md. The open session is the process's life line: closing it, or
//! our death, ends it. The order is: register by GET_PROCESS_SIGN, connect, handshake, START, then SETUP_DEVICE; at the end CLOSE_DEVICE,
//! then the daemon's CLOSE, then the session, and the DEVMNG file last.
//!
//! ```no_run
//! use ascend_vmm::{Session, discovery::LogicalId, process::{Order, Policy, Settings}};
//! use std::time::Duration;
//!
//! // What the vendor's client does, with less patience.
//! let settings =
//!     Settings { policy: Policy::Always, order: Order::Vendor, start: Duration::from_secs(20), ..Settings::default() };
//! let session = Session::builder().device_process(settings).open()?;
//! let device = session.device(LogicalId(0))?;
//! if let Some(process) = device.device_process() {
//!     println!("pid {:?} on device {}", process.pid()?, process.device());
//! }
//! # Ok::<(), ascend_vmm::Error>(())
//! ```

mod hdc;
mod tsd;

use crate::devmng::{Devmng, Sign};
use crate::discovery::LogicalId;
use crate::error::Error;
use crate::session::ForkGuard;
use hdc::Connection;
use nix::errno::Errno;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tsd::{Message, kind};

/// When a device process is started as a device is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// When the device cannot be set up without: SETUP_DEVICE is tried first, which costs one message on firmware that needs the process.
    #[default]
    Auto,
    /// Never: the caller provides it, for example by the vendor's `TsdOpen` in the same process.
    Never,
    /// Before SETUP_DEVICE is tried, which is the vendor's order.
    Always,
}

/// Which messages are sent before START.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Handshake and START, and once more as [`Order::Vendor`] if START was refused without a clear cause or not answered.
    #[default]
    ShortThenVendor,
    /// Handshake and START only.
    Short,
    /// Handshake, capability query, package configuration if the daemon knows it, START: what the vendor's client sends.
    Vendor,
}

/// How device processes are started, and how long each step may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// When.
    pub policy: Policy,
    /// How.
    pub order: Order,
    /// The device that leads to the daemon.
    pub path: PathBuf,
    /// How long to ask again while no daemon listens: it comes up some time after its device.
    pub patience: Duration,
    /// Connecting; the driver honours at most 30 s, in whole seconds.
    pub connect: Duration,
    /// The answer to the handshake.
    pub handshake: Duration,
    /// The answers to the capability query and to the package configuration, each. They are optional.
    pub preparation: Duration,
    /// The answer to START.
    pub start: Duration,
    /// The answer to CLOSE.
    pub close: Duration,
}

impl Default for Settings {
    /// The vendor's patience, except for closing.
    fn default() -> Self {
        Settings {
            policy: Policy::default(),
            order: Order::default(),
            path: ascend_ioctl::hdc::PATH.into(),
            patience: Duration::from_secs(3),
            connect: Duration::from_secs(30),
            handshake: Duration::from_secs(30),
            preparation: Duration::from_secs(10),
            start: Duration::from_secs(150),
            close: Duration::from_secs(10),
        }
    }
}

/// A step of starting or ending a device process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Registering this process with the driver.
    Register,
    /// Connecting to the daemon.
    Connect,
    /// Greeting it.
    Handshake,
    /// The vendor's messages before START.
    Prepare,
    /// Starting the process.
    Start,
    /// Ending it.
    Close,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Register => "registering with the driver",
            Step::Connect => "connecting to the device's daemon",
            Step::Handshake => "greeting the device's daemon",
            Step::Prepare => "preparing the start",
            Step::Start => "starting the device process",
            Step::Close => "ending the device process",
        })
    }
}

/// Why a device process could not be started or ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The device that leads to the daemon could not be opened.
    #[error("{} could not be opened: {errno}", path.display())]
    Node {
        /// Its path.
        path: PathBuf,
        /// What open(2) answered.
        errno: Errno,
    },
    /// The driver did not register this process.
    #[error("{}: {reason}", Step::Register)]
    Register {
        /// Why.
        reason: String,
    },
    /// The driver of `/dev/hisi_hdc` refused a command, with a code of its own.
    #[error("{step}: {command} failed with the driver's code {code}: {}", hdc::explain(*code).0)]
    Transport {
        /// At which step.
        step: Step,
        /// Which command.
        command: &'static str,
        /// The code; not an errno.
        code: i32,
    },
    /// The device closed the session.
    #[error("{step}: the device closed the session")]
    Closed {
        /// At which step.
        step: Step,
    },
    /// No answer came in the time that the caller allows.
    #[error("{step}: no answer in the time allowed")]
    TimedOut {
        /// At which step.
        step: Step,
    },
    /// The answer makes no sense.
    #[error("{step}: an answer that makes no sense: {what}")]
    Garbage {
        /// At which step.
        step: Step,
        /// What is wrong with it.
        what: String,
    },
    /// The daemon speaks another version of the protocol.
    #[error("the device's daemon speaks version {theirs} of its protocol, ascend-vmm speaks {}", tsd::VERSION)]
    Version {
        /// Its version.
        theirs: u32,
    },
    /// The daemon refused to start the process.
    #[error("the device refused to start a process (code {code}{}{error_code}): {}{}{message}", if error_code.is_empty() { "" } else { ", " }, meaning(error_code), if message.is_empty() { "" } else { "; it says: " })]
    Refused {
        /// The daemon's number.
        code: u32,
        /// Its error code, like `E30003`; may be empty.
        error_code: String,
        /// Its own words; may be empty.
        message: String,
        /// The lines of its log that it sent; may be empty and long.
        log: String,
    },
}

fn meaning(error_code: &str) -> &'static str {
    tsd::explain(error_code).map_or("it gives no cause that ascend-vmm knows", |(meaning, _)| meaning)
}

impl Failure {
    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Failure::Node { errno: Errno::ENOENT, .. } => {
                "pass /dev/hisi_hdc into the container, or load the driver on the host"
            }
            Failure::Node { errno: Errno::EACCES, .. } => "join the group that owns /dev/hisi_hdc (HwHiAiUser by default)",
            Failure::Node { errno: Errno::EPERM, .. } => "allow /dev/hisi_hdc in the container's device list",
            Failure::Node { .. } => "check that the driver is loaded and that /dev/hisi_hdc belongs to it",
            Failure::Register { .. } => {
                "in a container, pass /dev/davinciN of the device in; on the host, end some of the programs that use NPUs"
            }
            Failure::Transport { code, .. } => hdc::explain(*code).1,
            Failure::Closed { .. } => "check the device's health; it was reset or its daemon restarted: try again",
            Failure::TimedOut { step: Step::Start | Step::Prepare } => {
                "try the vendor's message order (process::Order::Vendor); otherwise check the device's health and log (msnpureport)"
            }
            Failure::TimedOut { .. } => "check the device's health; allow more time in process::Settings",
            Failure::Garbage { .. } | Failure::Version { .. } => {
                "the firmware is one that ascend-vmm does not know: please report it with the driver's version; until then start the device \
                 process by the vendor's TsdOpen and use process::Policy::Never"
            }
            Failure::Refused { error_code, .. } => tsd::explain(error_code).map_or(
                "try the vendor's message order (process::Order::Vendor); otherwise the device's log (msnpureport) has the reason",
                |(_, remedy)| remedy,
            ),
        }
    }

    /// Whether the vendor's longer dialogue might help: START was refused for no clear cause, or nobody answered it.
    fn longer_dialogue_may_help(&self) -> bool {
        match self {
            Failure::TimedOut { step } | Failure::Closed { step } => *step == Step::Start,
            Failure::Refused { error_code, .. } => tsd::explain(error_code).is_none() || error_code == "E30006",
            _ => false,
        }
    }
}

/// What the daemon said to our greeting.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Greeting {
    /// Version of its protocol; 1230 is the one that ascend-vmm speaks.
    pub version: u32,
}

/// A running device process. Ends it when dropped.
#[derive(Debug)]
#[must_use = "the device process is ended when this is dropped"]
pub struct DeviceProcess {
    connection: Connection,
    device: LogicalId,
    tgid: u32,
    /// The process that started it: a child of fork(2) must leave it alone.
    owner: ForkGuard,
    patience: Duration,
    ended: bool,
    /// The registration must outlive the session, so this is the last field: fields are dropped in order.
    devmng: Devmng,
}

impl DeviceProcess {
    /// Starts the process for `device`. `manager` is the driver's device, normally `/dev/davinci_manager`.
    ///
    /// There is one per process and device; a second one while the first runs is the daemon's to refuse. A session starts it by itself
    /// according to its [`Policy`]; this is for tools that look at the steps one by one.
    pub fn start(device: LogicalId, manager: &Path, settings: &Settings) -> Result<DeviceProcess, Failure> {
        DeviceProcess::start_with(device, Devmng::hold(manager), settings)
    }

    pub(crate) fn start_with(device: LogicalId, devmng: Devmng, settings: &Settings) -> Result<DeviceProcess, Failure> {
        let span = tracing::debug_span!("start device process", device = device.0);
        let _entered = span.enter();
        let longer = match settings.order {
            Order::Vendor => true,
            Order::Short | Order::ShortThenVendor => false,
        };
        let mut result = attempt(device, &devmng, settings, longer);
        if let Err(failure) = &result {
            if settings.order == Order::ShortThenVendor && failure.longer_dialogue_may_help() {
                tracing::warn!(device = device.0, %failure, "trying again with the vendor's longer dialogue");
                result = attempt(device, &devmng, settings, true);
            }
        }
        let (connection, tgid) = result?;
        Ok(DeviceProcess {
            connection,
            device,
            tgid,
            owner: ForkGuard::new(),
            patience: settings.close,
            ended: false,
            devmng,
        })
    }

    /// The device that it runs on.
    pub fn device(&self) -> LogicalId {
        self.device
    }

    /// Its pid on the device, `None` if it died.
    pub fn pid(&self) -> Result<Option<i32>, Error> {
        self.devmng.device_process(self.device)
    }

    /// Whether its life line holds. After an orderly end by the device the driver needs some seconds to notice.
    pub fn connected(&self) -> bool {
        self.connection.alive()
    }

    /// Ends it and waits until the device says so. Dropping does the same and logs what this returns.
    pub fn close(mut self) -> Result<(), Failure> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Failure> {
        if std::mem::replace(&mut self.ended, true) || self.owner.in_child() {
            return Ok(());
        }
        let deadline = Instant::now() + self.patience;
        let close = Message::about(kind::CLOSE, self.tgid, self.device);
        let answered = self
            .connection
            .send(Step::Close, &close.packet(), deadline)
            .and_then(|()| await_reply(&self.connection, Step::Close, kind::CLOSE_REPLY, Some(self.device), deadline));
        match answered {
            // The device may close the session instead of answering.
            Ok(_) | Err(Failure::Closed { .. }) => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        if let Err(failure) = self.end() {
            tracing::warn!(device = self.device.0, %failure, "the device did not confirm the end; closing the session ends it");
        }
    }
}

/// Opens a device as the policy says: `setup` is SETUP_DEVICE, tried once or twice. Returns the process if one was started.
///
/// A SETUP_DEVICE that failed at the device's door leaves nothing behind in the host's driver, so trying it again is safe.
pub(crate) fn bring_up(
    device: LogicalId,
    devmng: &Devmng,
    settings: &Settings,
    mut setup: impl FnMut() -> Result<(), Error>,
) -> Result<Option<DeviceProcess>, Error> {
    let mut setup = || match setup() {
        // Also the answer of a container whose devices nobody has set up yet; then it works the second time.
        Err(error) if error.errno() == Some(Errno::EINVAL) && devmng.prepare_devices() => setup(),
        result => result,
    };
    match settings.policy {
        Policy::Never => return setup().map(|()| None),
        Policy::Always => {}
        Policy::Auto => match setup() {
            Ok(()) => return Ok(None),
            // EFAULT is the answer to every failure on the device's side: a missing process is the one that we can do something about.
            Err(error) if error.errno() != Some(Errno::EFAULT) || devmng.device_process(device)?.is_some() => {
                return Err(error);
            }
            Err(_) => {}
        },
    }
    let process = DeviceProcess::start_with(device, devmng.clone(), settings)
        .map_err(|failure| Error::DeviceProcess { device: device.0, failure: Box::new(failure) })?;
    setup().map(|()| Some(process))
}

/// Asks the daemon for its version and nothing else: connects, greets, closes. Nothing is started.
pub fn greet(device: LogicalId, manager: &Path, settings: &Settings) -> Result<Greeting, Failure> {
    let devmng = Devmng::hold(manager);
    let sign = register(&devmng)?;
    let connection = connect(device, settings)?;
    let version = handshake(&connection, sign.tgid, settings)?;
    Ok(Greeting { version })
}

/// The pid of the device process that is bound to this process on `device`; `None` if there is none.
pub fn device_pid(device: LogicalId, manager: &Path) -> Result<Option<i32>, Error> {
    Devmng::hold(manager).device_process(device)
}

/// One try. On failure the session is closed and no CLOSE is sent, as nothing runs.
fn attempt(
    device: LogicalId,
    devmng: &Devmng,
    settings: &Settings,
    longer: bool,
) -> Result<(Connection, u32), Failure> {
    let sign = register(devmng)?;
    let connection = connect(device, settings)?;
    match handshake(&connection, sign.tgid, settings)? {
        tsd::VERSION => {}
        theirs => return Err(Failure::Version { theirs }),
    }
    if longer {
        prepare(&connection, sign.tgid, device, settings)?;
    }
    // Anew: on kernels from 5.17 on a registration is lost when a thread other than the main one opens DEVMNG, and another library in this
    // process may have done that while we waited.
    let sign = register(devmng)?;
    let deadline = Instant::now() + settings.start;
    connection.send(Step::Start, &Message::start(sign.tgid, &sign.text, device).packet(), deadline)?;
    let reply = await_reply(&connection, Step::Start, kind::START_REPLY, Some(device), deadline)?;
    if reply.code == 0 {
        return Ok((connection, sign.tgid));
    }
    let error = reply.error.unwrap_or_default();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Err(Failure::Refused {
        code: reply.code,
        error_code: text(&error.code),
        message: text(&error.message),
        log: text(&error.log),
    })
}

fn register(devmng: &Devmng) -> Result<Sign, Failure> {
    let sign = match devmng.sign() {
        // Also the answer of a container whose devices nobody has set up yet.
        Err(error) if error.errno() == Some(Errno::EINVAL) && devmng.prepare_devices() => devmng.sign(),
        result => result,
    };
    sign.map_err(|error| Failure::Register { reason: error.to_string() })
}

fn connect(device: LogicalId, settings: &Settings) -> Result<Connection, Failure> {
    let now = Instant::now();
    Connection::open(&settings.path, device, now + settings.patience, now + settings.connect)
}

/// Greets the daemon and returns its version. The features that it names are not needed.
fn handshake(connection: &Connection, tgid: u32, settings: &Settings) -> Result<u32, Failure> {
    let deadline = Instant::now() + settings.handshake;
    connection.send(Step::Handshake, &Message::handshake(tgid).packet(), deadline)?;
    let reply = await_reply(connection, Step::Handshake, kind::HANDSHAKE_REPLY, None, deadline)?;
    Ok(reply.version.map_or(0, |version| version.version))
}

/// What the vendor's client sends between handshake and START. Its answers are optional, a lost session is not.
fn prepare(connection: &Connection, tgid: u32, device: LogicalId, settings: &Settings) -> Result<(), Failure> {
    const TRIES: u32 = 3;
    let optional = |result: Result<Message, Failure>| match result {
        Ok(reply) => Ok(Some(reply)),
        Err(Failure::TimedOut { .. }) => Ok(None),
        Err(failure) => Err(failure),
    };
    let mut level = 0;
    for _ in 0..TRIES {
        let deadline = Instant::now() + settings.preparation;
        connection.send(Step::Prepare, &Message::about(kind::CAPABILITY, tgid, device).packet(), deadline)?;
        let reply = await_reply(connection, Step::Prepare, kind::CAPABILITY_REPLY, Some(device), deadline);
        level = optional(reply)?.map_or(0, |reply| reply.capability_level);
        if level != 0 {
            break;
        }
    }
    if level & tsd::CAPABILITY_PACKAGES != 0 {
        let deadline = Instant::now() + settings.preparation;
        connection.send(Step::Prepare, &Message::packages(tgid, device).packet(), deadline)?;
        optional(await_reply(connection, Step::Prepare, kind::PACKAGES_REPLY, Some(device), deadline))?;
    }
    Ok(())
}

/// Waits for the reply of a kind, about a device where it names one. Others are skipped: a late answer to an earlier question is not ours.
fn await_reply(
    connection: &Connection,
    step: Step,
    wanted: u32,
    device: Option<LogicalId>,
    deadline: Instant,
) -> Result<Message, Failure> {
    loop {
        let packet = connection.receive(step, deadline)?;
        let message = Message::from_packet(&packet).map_err(|what| Failure::Garbage { step, what })?;
        match message.kind {
            kind if kind == wanted && device.is_none_or(|device| message.device == device.0) => return Ok(message),
            kind::SOCKET_CLOSED | kind::RECEIVE_ERROR => {
                let what = format!("the daemon reports an error of its own (message type {})", message.kind);
                return Err(Failure::Garbage { step, what });
            }
            other => {
                tracing::debug!(kind = other, device = message.device, "a message that nobody waits for was skipped")
            }
        }
        if Instant::now() >= deadline {
            return Err(Failure::TimedOut { step });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(error_code: &str) -> Failure {
        Failure::Refused { code: 1, error_code: error_code.into(), message: "x".into(), log: String::new() }
    }

    #[test]
    fn a_refusal_says_what_its_code_means() {
        let failure = refused("E30003");
        assert_eq!(
            failure.to_string(),
            "the device refused to start a process (code 1, E30003): the device runs as many processes as it can; it says: x"
        );
        assert!(failure.remedy().contains("end other programs"));
    }

    #[test]
    fn a_refusal_without_a_known_code_still_reads_well() {
        let failure =
            Failure::Refused { code: 7, error_code: String::new(), message: String::new(), log: String::new() };
        assert_eq!(
            failure.to_string(),
            "the device refused to start a process (code 7): it gives no cause that ascend-vmm knows"
        );
        assert!(failure.remedy().contains("Order::Vendor"));
    }

    #[test]
    fn the_longer_dialogue_is_tried_only_where_it_can_help() {
        assert!(!refused("E30003").longer_dialogue_may_help(), "a full device stays full");
        assert!(refused("E30006").longer_dialogue_may_help());
        assert!(refused("").longer_dialogue_may_help());
        assert!(Failure::TimedOut { step: Step::Start }.longer_dialogue_may_help());
        assert!(!Failure::TimedOut { step: Step::Handshake }.longer_dialogue_may_help());
        assert!(!Failure::Version { theirs: 1 }.longer_dialogue_may_help());
    }
}
