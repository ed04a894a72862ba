//! The process on the device that memory needs.
//!
//! Device memory lives in the address space of a process that the device runs for us, bound to our
//! process id. On today's firmware SETUP_DEVICE very likely answers EFAULT until a daemon on the
//! device was asked to start one (`tsd_message.rs`, over a session of `/dev/hisi_hdc`). None of
//! this was tried on hardware, see docs/driver.md. The process lives as long as that session:
//! closing it, or our death, ends the process. The order is: register by GET_PROCESS_SIGN, connect,
//! handshake, START, then SETUP_DEVICE; at the end CLOSE_DEVICE, then the daemon's CLOSE, then the
//! session, and the DEVMNG file last.
//!
//! ```
//! # let emulator = ascend_emulator::Emulator::start(Default::default())?;
//! # emulator.attach()?;
//! use ascend_vmm::device_process::{Order, Policy, Settings, Step};
//! use ascend_vmm::{LogicalId, Session};
//! use std::time::Duration;
//!
//! // What the vendor's client does, with less patience.
//! let settings = Settings::default()
//!     .policy(Policy::Always)
//!     .order(Order::Vendor)
//!     .limit(Step::Start, Duration::from_secs(20));
//! let session = Session::builder().device_process(settings).open()?;
//! let device = session.device(LogicalId(0))?;
//! let process = device.device_process().unwrap();
//! println!("process {:?} on device {}", process.pid()?, process.device());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod tsd_message;

pub use crate::error::{ProcessFailure, Step};

use crate::deadline::Deadline;
use crate::discovery;
use crate::driver::devmng::{Devmng, Sign};
use crate::driver::hdc::{self, Connection, HdcFile, Private, code};
use crate::error::{Errno, Error, printable};
use crate::fork::ForkGuard;
use crate::id::LogicalId;
use crate::signals::Blocked;
use crate::trace;
use std::cell::Cell;
use std::collections::HashMap;
use std::time::Duration;
use tsd_message::{Message, kind};

/// When a device process is started as a device is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// When the device cannot be set up without one: SETUP_DEVICE is tried first, which costs one
    /// message on firmware that needs the process.
    #[default]
    Auto,
    /// Never: the caller provides it, for example by the vendor's `TsdOpen` in the same process.
    Never,
    /// Before SETUP_DEVICE, as the vendor's client does.
    Always,
}

/// Which messages are sent before START.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Handshake and START. If START is refused without a clear cause or not answered, the same
    /// again as [`Order::Vendor`].
    #[default]
    ShortThenVendor,
    /// Handshake and START only.
    Short,
    /// Handshake, capability query, package configuration if the daemon knows it, START: what the
    /// vendor's client sends.
    Vendor,
}

/// How device processes are started, and how long each step may take.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::device_process::{Settings, Step};
/// use ascend_vmm::{LogicalId, Session};
/// use std::time::Duration;
///
/// let patient = Settings::default().limit(Step::Start, Duration::from_secs(120));
/// let session = Session::builder().device_process(patient).open()?;
/// session.device(LogicalId(0))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct Settings {
    policy: Policy,
    order: Order,
    limits: HashMap<Step, Duration>,
    give_up: Option<fn() -> bool>,
}

impl Settings {
    /// When a process is started; [`Policy::Auto`] by default.
    pub fn policy(mut self, policy: Policy) -> Settings {
        self.policy = policy;
        self
    }

    /// Which messages are sent; [`Order::ShortThenVendor`] by default.
    pub fn order(mut self, order: Order) -> Settings {
        self.order = order;
        self
    }

    /// How long a step may take. The defaults are the vendor's, except for closing:
    ///
    /// | step | default | for |
    /// |---|---|---|
    /// | [`Step::Connect`] | 3 s | asking again until the daemon, which starts late, listens |
    /// | [`Step::Handshake`] | 30 s | the answer |
    /// | [`Step::Prepare`] | 10 s | each of the two answers, which are optional |
    /// | [`Step::Start`] | 150 s | the answer |
    /// | [`Step::Close`] | 10 s | the answer |
    ///
    /// The driver limits CONNECT itself to 30 s. [`Step::Register`] waits for nothing.
    pub fn limit(mut self, step: Step, limit: Duration) -> Settings {
        self.limits.insert(step, limit);
        self
    }

    /// A function that is called every second while a process is being started, and returns true to
    /// give up, for example because a signal came. It cannot open a device: that is an error. If it
    /// panics, nothing is started.
    pub fn give_up(mut self, give_up: fn() -> bool) -> Settings {
        self.give_up = Some(give_up);
        self
    }

    /// The end of a step that begins now.
    fn deadline(&self, step: Step) -> Deadline {
        let default = match step {
            Step::Register => 0,
            Step::Connect => 3,
            Step::Handshake => 30,
            Step::Prepare | Step::Close => 10,
            Step::Start => 150,
        };
        Deadline::after(self.limits.get(&step).copied().unwrap_or(Duration::from_secs(default)))
    }
}

/// A running device process. Ends it when dropped.
#[derive(Debug)]
#[must_use = "the device process is ended when this is dropped"]
pub struct DeviceProcess {
    /// `None` once the process was ended.
    connection: Option<Connection>,
    device: LogicalId,
    tgid: u32,
    /// A child of fork(2) must leave its parent's process alone.
    owner: ForkGuard,
    settings: Settings,
    /// The registration must outlive the session, so this is the last field: fields are dropped in
    /// order.
    devmng: Devmng,
}

impl DeviceProcess {
    /// Starts the process for `device`.
    ///
    /// A session starts it by itself according to its [`Policy`]; this is for tools that look at
    /// the steps one by one. There is one per process and device: the daemon refuses a second one.
    ///
    /// ```
    /// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
    /// # emulator.attach()?;
    /// use ascend_vmm::LogicalId;
    /// use ascend_vmm::device_process::{DeviceProcess, Settings, device_pid};
    ///
    /// let process = DeviceProcess::start(LogicalId(0), &Settings::default())?;
    /// assert_eq!(device_pid(LogicalId(0))?, process.pid()?);
    /// process.close()?;
    /// assert_eq!(device_pid(LogicalId(0))?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ProcessFailure`] names the step that failed, what the daemon answered and what to do. No
    /// process runs on the device then.
    pub fn start(device: LogicalId, settings: &Settings) -> Result<DeviceProcess, ProcessFailure> {
        let devmng = Devmng::claim();
        let first = if settings.order == Order::Vendor { Order::Vendor } else { Order::Short };
        let mut result = attempt(device, &devmng, settings, first);
        if let Err(failure) = &result {
            if settings.order == Order::ShortThenVendor && failure.longer_dialogue_may_help() {
                trace::warn(
                    format_args!("device {device}: {failure}"),
                    "starting the device process again, with the vendor's longer dialogue",
                );
                result = attempt(device, &devmng, settings, Order::Vendor);
            }
        }
        let (connection, tgid) = result?;
        Ok(DeviceProcess {
            connection: Some(connection),
            device,
            tgid,
            owner: ForkGuard::new(),
            settings: settings.clone(),
            devmng,
        })
    }

    /// The device that the process runs on.
    pub fn device(&self) -> LogicalId {
        self.device
    }

    /// The pid on the device, `None` if the process died.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] or [`Error::Refused`] if the driver cannot be queried.
    pub fn pid(&self) -> Result<Option<i32>, Error> {
        self.drain();
        self.devmng.query_dev_pid(self.device)
    }

    /// True while the session with the daemon is open. If the device ends the process, the driver
    /// notices after some seconds.
    pub fn is_connected(&self) -> bool {
        // An interrupted command and a lost session have the same answer.
        let _signals = Blocked::handled();
        self.drain();
        self.connection().is_some_and(Connection::is_connected)
    }

    /// Ends the process and waits until the device confirms it. Dropping does the same and logs the
    /// error.
    ///
    /// # Errors
    ///
    /// [`ProcessFailure`] if the device did not confirm the end in time. The session is closed
    /// anyway, and the driver ends the process with it.
    pub fn close(mut self) -> Result<(), ProcessFailure> {
        self.end()
    }

    /// Reads what the daemon sent unasked. A session with seven unread packets blocks the service
    /// for every other process on the device. There is no thread that could read them, so calls
    /// that are made now and then do.
    pub(crate) fn drain(&self) {
        /// More than the driver queues.
        const MOST: usize = 16;
        let Some(connection) = self.connection() else { return };
        for _ in 0..MOST {
            let length = match connection.recv_peek(Duration::ZERO).map(usize::try_from) {
                Ok(Ok(length @ 1..=hdc::MAX_PACKET)) => length,
                _ => return,
            };
            if connection.recv(&mut vec![0; length]).is_err() {
                return;
            }
        }
    }

    /// The session, which a child of fork(2) does not have.
    fn connection(&self) -> Option<&Connection> {
        self.connection.as_ref().filter(|_| !self.owner.in_child())
    }

    fn end(&mut self) -> Result<(), ProcessFailure> {
        // Dropping the connection closes the session.
        let Some(connection) = self.connection.take().filter(|_| !self.owner.in_child()) else { return Ok(()) };
        let signals = Blocked::handled();
        let dialogue = Dialogue { connection: &connection, signals: &signals, give_up: None };
        let deadline = self.settings.deadline(Step::Close);
        let close = Message::about(kind::CLOSE, self.tgid, self.device);
        let answered = dialogue
            .send(Step::Close, &close, deadline)
            .and_then(|()| dialogue.await_reply(Step::Close, kind::CLOSE_REPLY, Some(self.device), deadline));
        match answered {
            // The device may close the session instead of answering.
            Ok(_) | Err(ProcessFailure::Closed { .. }) => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}

impl Drop for DeviceProcess {
    fn drop(&mut self) {
        if let Err(failure) = self.end() {
            trace::warn(
                format_args!("device {}: {failure}", self.device),
                "the device did not confirm the end of its process; closing the session ends it",
            );
        }
    }
}

/// Opens a device as the policy says. `setup` is SETUP_DEVICE, tried once or twice. Returns the
/// process if one was started.
///
/// A SETUP_DEVICE that the device refuses leaves nothing behind in the host's driver, so it is safe
/// to try it again.
pub(crate) fn bring_up(
    device: LogicalId,
    devmng: &Devmng,
    settings: &Settings,
    mut setup: impl FnMut() -> Result<(), Error>,
) -> Result<Option<DeviceProcess>, Error> {
    let mut setup = || match setup() {
        // Also the answer in a container whose devices are not set up yet.
        Err(error) if error.errno() == Some(Errno::EINVAL) && discovery::prepare_container() => setup(),
        result => result,
    };
    match settings.policy {
        Policy::Never => return setup().map(|()| None),
        Policy::Always => {}
        Policy::Auto => match setup() {
            Ok(()) => return Ok(None),
            // EFAULT is the answer to every failure on the device. A missing process is the one
            // that we can fix.
            Err(error) if error.errno() != Some(Errno::EFAULT) || devmng.query_dev_pid(device)?.is_some() => {
                return Err(error);
            }
            Err(_) => {}
        },
    }
    let process = DeviceProcess::start(device, settings).map_err(|failure| Error::DeviceProcess { device, failure })?;
    setup().map(|()| Some(process))
}

/// The pid of the device process that is bound to this process on `device`; `None` if there is
/// none.
///
/// ```
/// # let emulator = ascend_emulator::Emulator::start(Default::default())?;
/// # emulator.attach()?;
/// use ascend_vmm::{LogicalId, Session, device_process};
///
/// let device = Session::open()?.device(LogicalId(0))?;
/// println!("process {:?} on the device", device_process::device_pid(device.id())?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Open`] or [`Error::Refused`] if the driver cannot be queried.
pub fn device_pid(device: LogicalId) -> Result<Option<i32>, Error> {
    Devmng::claim().query_dev_pid(device)
}

/// One try. On failure the session is closed; CLOSE is not sent, because nothing runs.
fn attempt(
    device: LogicalId,
    devmng: &Devmng,
    settings: &Settings,
    order: Order,
) -> Result<(Connection, u32), ProcessFailure> {
    // A signal with a handler restarts the driver's wait, so a stream of signals makes it endless.
    let signals = Blocked::handled();
    let sign = register(devmng)?;
    let connection = connect(device, settings, &signals)?;
    let dialogue = Dialogue { connection: &connection, signals: &signals, give_up: settings.give_up };
    let deadline = settings.deadline(Step::Handshake);
    dialogue.send(Step::Handshake, &Message::handshake(sign.tgid), deadline)?;
    let reply = dialogue.await_reply(Step::Handshake, kind::HANDSHAKE_REPLY, None, deadline)?;
    // The features that the daemon names are not needed.
    match reply.version.map_or(0, |version| version.version) {
        tsd_message::VERSION => {}
        theirs => return Err(ProcessFailure::Version { theirs, ours: tsd_message::VERSION }),
    }
    if order == Order::Vendor {
        dialogue.prepare(sign.tgid, device, settings)?;
    }
    // Again, because on kernels from 5.17 on a registration is lost when a thread other than the
    // main one opens DEVMNG, and another library in this process may have done that meanwhile.
    let sign = register(devmng)?;
    let deadline = settings.deadline(Step::Start);
    dialogue.send(Step::Start, &Message::start(sign.tgid, &sign.text, device), deadline)?;
    let reply = dialogue.await_reply(Step::Start, kind::START_REPLY, Some(device), deadline)?;
    if reply.code == 0 {
        return Ok((connection, sign.tgid));
    }
    let error = reply.error.unwrap_or_default();
    let text = |bytes: &[u8]| printable(String::from_utf8_lossy(bytes).trim());
    Err(ProcessFailure::Refused {
        code: reply.code,
        error_code: text(&error.code),
        message: text(&error.message),
        log: text(&error.log),
    })
}

fn register(devmng: &Devmng) -> Result<Sign, ProcessFailure> {
    let sign = match devmng.get_process_sign() {
        // Also the answer in a container whose devices are not set up yet.
        Err(error) if error.errno() == Some(Errno::EINVAL) && discovery::prepare_container() => {
            devmng.get_process_sign()
        }
        result => result,
    };
    sign.map_err(|error| ProcessFailure::Register { reason: error.to_string() })
}

/// Connects to the daemon. CONNECT is repeated while no daemon listens.
fn connect(device: LogicalId, settings: &Settings, signals: &Blocked) -> Result<Connection, ProcessFailure> {
    const PAUSE: Duration = Duration::from_millis(100);
    let mut file = HdcFile::open().map_err(|errno| ProcessFailure::Node { path: hdc::PATH.into(), errno })?;
    let no_daemon = settings.deadline(Step::Connect);
    let mut deadline = Deadline::after(hdc::LONGEST_CONNECT);
    loop {
        let (refused, left) = match file.connect(device, deadline.left()) {
            Ok(connection) => return Ok(connection),
            Err(refused) => refused,
        };
        file = match (refused.code, left) {
            // A signal; the kernel has freed the half-made session already.
            (code::COPY_OUT, Some(file)) if !deadline.is_over() => file,
            (code::NOBODY_LISTENS, Some(file)) if no_daemon.left() > PAUSE => {
                std::thread::sleep(PAUSE);
                signals.deliver_pending();
                if should_give_up(settings.give_up) {
                    return Err(ProcessFailure::GivenUp { step: Step::Connect });
                }
                deadline = Deadline::after(hdc::LONGEST_CONNECT);
                file
            }
            _ => return Err(transport(Step::Connect, refused)),
        };
    }
}

/// A session with the daemon, with the signals that are blocked while it waits.
#[derive(Clone, Copy)]
struct Dialogue<'a> {
    connection: &'a Connection,
    signals: &'a Blocked,
    give_up: Option<fn() -> bool>,
}

impl Dialogue<'_> {
    /// Longest wait before pending signals are delivered.
    const SLICE: Duration = Duration::from_secs(1);

    /// Sends a message.
    fn send(&self, step: Step, message: &Message, deadline: Deadline) -> Result<(), ProcessFailure> {
        let packet = message.packet();
        loop {
            match self.connection.send(&packet, deadline.left().min(Self::SLICE)) {
                Ok(()) => return Ok(()),
                Err(Private { code: code::COPY_OUT | code::SEND_TIMEOUT | code::NOTHING, .. }) => {
                    self.check_deadline(step, deadline)?;
                }
                Err(refused) => return Err(transport(step, refused)),
            }
        }
    }

    /// Waits for a packet.
    fn receive(&self, step: Step, deadline: Deadline) -> Result<Vec<u8>, ProcessFailure> {
        let length = loop {
            match self.connection.recv_peek(deadline.left().min(Self::SLICE)) {
                Ok(length) => break length,
                // A signal, or nothing yet.
                Err(Private { code: code::COPY_OUT | code::RECEIVE_TIMEOUT | code::NOTHING, .. }) => {
                    self.check_deadline(step, deadline)?;
                }
                Err(refused) => return Err(transport(step, refused)),
            }
        };
        let mut packet = match usize::try_from(length) {
            Ok(0) => return Err(ProcessFailure::Closed { step }),
            Ok(wanted) if wanted <= hdc::MAX_PACKET => vec![0; wanted],
            _ => return Err(ProcessFailure::Garbage { step, what: format!("the driver announces {length} bytes") }),
        };
        match self.connection.recv(&mut packet) {
            Ok(received) if received == length => Ok(packet),
            // No other thread reads from this session, so this is a driver that we do not know.
            Ok(received) => {
                let what = format!("{length} bytes were announced and {received} came");
                Err(ProcessFailure::Garbage { step, what })
            }
            Err(refused) => Err(transport(step, refused)),
        }
    }

    /// Fails if the time is over or the caller gives up. Delivers pending signals.
    fn check_deadline(&self, step: Step, deadline: Deadline) -> Result<(), ProcessFailure> {
        if deadline.is_over() {
            return Err(ProcessFailure::TimedOut { step });
        }
        self.signals.deliver_pending();
        if should_give_up(self.give_up) { Err(ProcessFailure::GivenUp { step }) } else { Ok(()) }
    }

    /// What the vendor's client sends between handshake and START. The answers are optional, but a
    /// lost session is an error.
    fn prepare(&self, tgid: u32, device: LogicalId, settings: &Settings) -> Result<(), ProcessFailure> {
        const TRIES: u32 = 3;
        let optional = |result: Result<Message, ProcessFailure>| match result {
            Ok(reply) => Ok(Some(reply)),
            Err(ProcessFailure::TimedOut { .. }) => Ok(None),
            Err(failure) => Err(failure),
        };
        let mut level = 0;
        for _ in 0..TRIES {
            let deadline = settings.deadline(Step::Prepare);
            self.send(Step::Prepare, &Message::about(kind::CAPABILITY, tgid, device), deadline)?;
            let reply = self.await_reply(Step::Prepare, kind::CAPABILITY_REPLY, Some(device), deadline);
            level = optional(reply)?.map_or(0, |reply| reply.capability_level);
            if level != 0 {
                break;
            }
        }
        if level & tsd_message::CAPABILITY_PACKAGES != 0 {
            let deadline = settings.deadline(Step::Prepare);
            self.send(Step::Prepare, &Message::packages(tgid, device), deadline)?;
            optional(self.await_reply(Step::Prepare, kind::PACKAGES_REPLY, Some(device), deadline))?;
        }
        Ok(())
    }

    /// Waits for a reply of a kind, about `device` if that is given. Others are skipped: they are
    /// late answers to earlier messages.
    fn await_reply(
        &self,
        step: Step,
        wanted: u32,
        device: Option<LogicalId>,
        deadline: Deadline,
    ) -> Result<Message, ProcessFailure> {
        loop {
            let packet = self.receive(step, deadline)?;
            let message = Message::from_packet(&packet).map_err(|what| ProcessFailure::Garbage { step, what })?;
            match message.kind {
                kind if kind == wanted && device.is_none_or(|device| message.device == device.0) => return Ok(message),
                kind::SOCKET_CLOSED | kind::RECEIVE_ERROR => {
                    let what = format!("the daemon reports an error of its own (message type {})", message.kind);
                    return Err(ProcessFailure::Garbage { step, what });
                }
                other => trace::debug(format_args!("type {other}"), "a message of the daemon that was not waited for"),
            }
            if deadline.is_over() {
                return Err(ProcessFailure::TimedOut { step });
            }
        }
    }
}

thread_local! {
    static IN_GIVE_UP: Cell<bool> = const { Cell::new(false) };
}

/// True while this thread runs [`Settings::give_up`]. It is opening a device, and would wait for
/// itself if it opened one now.
pub(crate) fn in_give_up_callback() -> bool {
    IN_GIVE_UP.get()
}

fn should_give_up(give_up: Option<fn() -> bool>) -> bool {
    /// Restores the flag, also after a panic.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_GIVE_UP.set(self.0);
        }
    }
    let _restore = Restore(IN_GIVE_UP.replace(true));
    give_up.is_some_and(|give_up| give_up())
}

/// The failure for a private code of the driver.
fn transport(step: Step, refused: Private) -> ProcessFailure {
    match refused.code {
        code::PEER_CLOSED | code::CLOSED | code::PEER_REBOOT => ProcessFailure::Closed { step },
        code::SEND_TIMEOUT | code::RECEIVE_TIMEOUT | code::CONNECT_TIMEOUT => ProcessFailure::TimedOut { step },
        code => ProcessFailure::Transport { step, command: refused.command, code },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_mean_closed_or_too_late_are_distinguished_from_the_rest() {
        let of = |code| transport(Step::Start, Private { command: "RECV_PEEK", code });
        assert!(matches!(of(15), ProcessFailure::Closed { .. }));
        assert!(matches!(of(22), ProcessFailure::Closed { .. }));
        assert!(matches!(of(49), ProcessFailure::Closed { .. }));
        assert!(matches!(of(27), ProcessFailure::TimedOut { .. }));
        assert!(matches!(of(12), ProcessFailure::TimedOut { .. }));
        assert!(matches!(of(41), ProcessFailure::Transport { code: 41, .. }));
    }
}
