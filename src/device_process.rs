//! The process on the device that memory needs.
//!
//! Device memory lives in the address space of a process that the device runs for us, bound to our
//! process id. On the firmware of today SETUP_DEVICE very likely answers EFAULT until a daemon on
//! the device was asked to start one (`tsd_message.rs`, over a session of `/dev/hisi_hdc`); nothing
//! of this was tried on hardware, see docs/driver.md. The open session is the process's
//! life line: closing it, or our death, ends it. The order is: register by GET_PROCESS_SIGN,
//! connect, handshake, START, then SETUP_DEVICE; at the end CLOSE_DEVICE, then the daemon's CLOSE,
//! then the session, and the DEVMNG file last.
//!
//! ```no_run
//! use ascend_vmm::{LogicalId, Session, device_process::{Order, Policy, Settings}};
//! use std::time::Duration;
//!
//! // What the vendor's client does, with less patience.
//! let settings = Settings {
//!     policy: Policy::Always,
//!     order: Order::Vendor,
//!     start: Duration::from_secs(20),
//!     ..Settings::default()
//! };
//! let session = Session::builder().device_process(settings).open()?;
//! let device = session.device(LogicalId(0))?;
//! if let Some(process) = device.device_process() {
//!     println!("pid {:?} on device {}", process.pid()?, process.device());
//! }
//! # Ok::<(), ascend_vmm::Error>(())
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
use std::time::Duration;
use tsd_message::{Message, kind};

/// When a device process is started as a device is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// When the device cannot be set up without: SETUP_DEVICE is tried first, which costs one
    /// message on firmware that needs the process.
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
    /// Handshake and START, and once more as [`Order::Vendor`] if START was refused without a clear
    /// cause or not answered.
    #[default]
    ShortThenVendor,
    /// Handshake and START only.
    Short,
    /// Handshake, capability query, package configuration if the daemon knows it, START: what the
    /// vendor's client sends.
    Vendor,
}

/// How device processes are started, and how long each step may take.
#[derive(Debug, Clone)]
pub struct Settings {
    /// When.
    pub policy: Policy,
    /// How.
    pub order: Order,
    /// How long to ask again while no daemon listens: it comes up some time after its device.
    pub patience: Duration,
    /// Connecting; the driver honours at most 30 s, in whole seconds.
    pub connect: Duration,
    /// The answer to the handshake.
    pub handshake: Duration,
    /// The answers to the capability query and to the package configuration, each. They are
    /// optional.
    pub preparation: Duration,
    /// The answer to START.
    pub start: Duration,
    /// The answer to CLOSE.
    pub close: Duration,
    /// Asked every second while a process is being started: whether to give up, for example because
    /// a signal came. It cannot open a device: that is an error. If it panics, nothing is started.
    pub give_up: fn() -> bool,
}

impl Default for Settings {
    /// The vendor's patience, except for closing.
    fn default() -> Self {
        Settings {
            policy: Policy::default(),
            order: Order::default(),
            patience: Duration::from_secs(3),
            connect: Duration::from_secs(30),
            handshake: Duration::from_secs(30),
            preparation: Duration::from_secs(10),
            start: Duration::from_secs(150),
            close: Duration::from_secs(10),
            give_up: || false,
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
    /// The life line; `None` once it was ended.
    connection: Option<Connection>,
    device: LogicalId,
    tgid: u32,
    /// The process that started it: a child of fork(2) must leave it alone.
    owner: ForkGuard,
    patience: Duration,
    /// The registration must outlive the session, so this is the last field: fields are dropped in
    /// order.
    devmng: Devmng,
}

impl DeviceProcess {
    /// Starts the process for `device`.
    ///
    /// There is one per process and device; a second one while the first runs is the daemon's to
    /// refuse. A session starts it by itself according to its [`Policy`]; this is for tools that
    /// look at the steps one by one.
    ///
    /// # Errors
    ///
    /// [`ProcessFailure`] names the step that failed, what the daemon answered and what to do;
    /// nothing runs on the device then.
    pub fn start(device: LogicalId, settings: &Settings) -> Result<DeviceProcess, ProcessFailure> {
        DeviceProcess::start_with(device, Devmng::claim(), settings)
    }

    pub(crate) fn start_with(
        device: LogicalId,
        devmng: Devmng,
        settings: &Settings,
    ) -> Result<DeviceProcess, ProcessFailure> {
        let longer = settings.order == Order::Vendor;
        let mut result = attempt(device, &devmng, settings, longer);
        if let Err(failure) = &result {
            if settings.order == Order::ShortThenVendor && failure.longer_dialogue_may_help() {
                trace::warn(
                    format_args!("device {device}: {failure}"),
                    "starting the device process again, with the vendor's longer dialogue",
                );
                result = attempt(device, &devmng, settings, true);
            }
        }
        let (connection, tgid) = result?;
        Ok(DeviceProcess {
            connection: Some(connection),
            device,
            tgid,
            owner: ForkGuard::new(),
            patience: settings.close,
            devmng,
        })
    }

    /// The device that it runs on.
    pub fn device(&self) -> LogicalId {
        self.device
    }

    /// Its pid on the device, `None` if it died.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] or [`Error::Refused`] if the driver cannot be queried.
    pub fn pid(&self) -> Result<Option<i32>, Error> {
        self.drain();
        self.devmng.query_dev_pid(self.device)
    }

    /// Whether its life line holds. After an orderly end by the device the driver needs some
    /// seconds to notice.
    pub fn connected(&self) -> bool {
        // The answer to a signal cannot be told from a lost session.
        let _signals = Blocked::handled();
        self.drain();
        self.connection().is_some_and(Connection::is_connected)
    }

    /// Ends it and waits until the device says so. Dropping does the same and logs what this
    /// returns.
    ///
    /// # Errors
    ///
    /// [`ProcessFailure`] if the device did not confirm the end in time. The connection is closed
    /// all the same, and the driver ends the process with it.
    pub fn close(mut self) -> Result<(), ProcessFailure> {
        self.end()
    }

    /// Reads what the daemon sent unasked. A session with seven unread packets would hold up the
    /// service for every other process on the device. There is no thread that could do it, so calls
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

    /// The life line, which a child of fork(2) does not have.
    fn connection(&self) -> Option<&Connection> {
        self.connection.as_ref().filter(|_| !self.owner.in_child())
    }

    fn end(&mut self) -> Result<(), ProcessFailure> {
        // Taken out: it is ended once. Dropping the connection closes the session.
        let Some(connection) = self.connection.take().filter(|_| !self.owner.in_child()) else { return Ok(()) };
        let signals = Blocked::handled();
        let dialogue = Dialogue { connection: &connection, signals: &signals, give_up: || false };
        let deadline = Deadline::after(self.patience);
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

/// Opens a device as the policy says: `setup` is SETUP_DEVICE, tried once or twice. Returns the
/// process if one was started.
///
/// A SETUP_DEVICE that failed at the device's door leaves nothing behind in the host's driver, so
/// trying it again is safe.
pub(crate) fn bring_up(
    device: LogicalId,
    devmng: &Devmng,
    settings: &Settings,
    mut setup: impl FnMut() -> Result<(), Error>,
) -> Result<Option<DeviceProcess>, Error> {
    let mut setup = || match setup() {
        // Also the answer of a container whose devices are not set up yet; then it works the
        // second time.
        Err(error) if error.errno() == Some(Errno::EINVAL) && discovery::prepare_container(devmng) => setup(),
        result => result,
    };
    match settings.policy {
        Policy::Never => return setup().map(|()| None),
        Policy::Always => {}
        Policy::Auto => match setup() {
            Ok(()) => return Ok(None),
            // EFAULT is the answer to every failure on the device's side: a missing process is the
            // one that we can do something about.
            Err(error) if error.errno() != Some(Errno::EFAULT) || devmng.query_dev_pid(device)?.is_some() => {
                return Err(error);
            }
            Err(_) => {}
        },
    }
    let process = DeviceProcess::start_with(device, devmng.clone(), settings)
        .map_err(|failure| Error::DeviceProcess { device, failure: Box::new(failure) })?;
    setup().map(|()| Some(process))
}

/// Queries the daemon's version and nothing else: connects, greets, closes. Nothing is started.
///
/// # Errors
///
/// [`ProcessFailure`] names the step that failed: no `/dev/hisi_hdc`, no daemon, no answer in time.
pub fn greet(device: LogicalId, settings: &Settings) -> Result<Greeting, ProcessFailure> {
    let devmng = Devmng::claim();
    let sign = register(&devmng)?;
    let signals = Blocked::handled();
    let connection = connect(device, settings, &signals)?;
    let dialogue = Dialogue { connection: &connection, signals: &signals, give_up: settings.give_up };
    let version = dialogue.handshake(sign.tgid, settings)?;
    Ok(Greeting { version })
}

/// The pid of the device process that is bound to this process on `device`; `None` if there is
/// none.
///
/// # Errors
///
/// [`Error::Open`] or [`Error::Refused`] if the driver cannot be queried.
pub fn device_pid(device: LogicalId) -> Result<Option<i32>, Error> {
    Devmng::claim().query_dev_pid(device)
}

/// One try. On failure the session is closed and no CLOSE is sent, as nothing runs.
fn attempt(
    device: LogicalId,
    devmng: &Devmng,
    settings: &Settings,
    longer: bool,
) -> Result<(Connection, u32), ProcessFailure> {
    // A signal with a handler makes the driver's waits begin again, so that a stream of them never
    // ends one.
    let signals = Blocked::handled();
    let sign = register(devmng)?;
    let connection = connect(device, settings, &signals)?;
    let dialogue = Dialogue { connection: &connection, signals: &signals, give_up: settings.give_up };
    match dialogue.handshake(sign.tgid, settings)? {
        tsd_message::VERSION => {}
        theirs => return Err(ProcessFailure::Version { theirs, ours: tsd_message::VERSION }),
    }
    if longer {
        dialogue.prepare(sign.tgid, device, settings)?;
    }
    // Anew: on kernels from 5.17 on a registration is lost when a thread other than the main one
    // opens DEVMNG, and another library in this process may have done that while we waited.
    let sign = register(devmng)?;
    let deadline = Deadline::after(settings.start);
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
        // Also the answer of a container whose devices are not set up yet.
        Err(error) if error.errno() == Some(Errno::EINVAL) && discovery::prepare_container(devmng) => {
            devmng.get_process_sign()
        }
        result => result,
    };
    sign.map_err(|error| ProcessFailure::Register { reason: error.to_string() })
}

/// Connects to the daemon. While it does not listen, CONNECT is repeated for as long as the caller
/// is patient: the daemon comes up some time after its device.
fn connect(device: LogicalId, settings: &Settings, signals: &Blocked) -> Result<Connection, ProcessFailure> {
    const PAUSE: Duration = Duration::from_millis(100);
    let mut file = HdcFile::open().map_err(|errno| ProcessFailure::Node { path: hdc::PATH.into(), errno })?;
    let deadline = Deadline::after(settings.connect);
    let patience = Deadline::after(settings.patience).or_earlier(deadline);
    loop {
        let (refused, left) = match file.connect(device, deadline.left()) {
            Ok(connection) => return Ok(connection),
            Err(refused) => refused,
        };
        file = match (refused.code, left) {
            // A signal; the kernel has freed the half-made session already.
            (code::COPY_OUT, Some(file)) if !deadline.is_over() => file,
            (code::NOBODY_LISTENS, Some(file)) if patience.left() > PAUSE => {
                std::thread::sleep(PAUSE);
                signals.breathe();
                if gives_up(settings.give_up) {
                    return Err(ProcessFailure::GivenUp { step: Step::Connect });
                }
                file
            }
            _ => return Err(transport(Step::Connect, refused)),
        };
    }
}

/// A connection, the signals that are kept from its waits, and whether to go on waiting.
#[derive(Clone, Copy)]
struct Dialogue<'a> {
    connection: &'a Connection,
    signals: &'a Blocked,
    give_up: fn() -> bool,
}

impl Dialogue<'_> {
    /// Longest wait before signals that came meanwhile are let through.
    const SLICE: Duration = Duration::from_secs(1);

    /// Sends a message.
    fn send(&self, step: Step, message: &Message, deadline: Deadline) -> Result<(), ProcessFailure> {
        let packet = message.packet();
        loop {
            match self.connection.send(&packet, deadline.left().min(Self::SLICE)) {
                Ok(()) => return Ok(()),
                Err(Private { code: code::COPY_OUT | code::SEND_TIMEOUT | code::NOTHING, .. }) => {
                    self.go_on(step, deadline)?;
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
                // A signal, or nothing yet: go on with the time that is left.
                Err(Private { code: code::COPY_OUT | code::RECEIVE_TIMEOUT | code::NOTHING, .. }) => {
                    self.go_on(step, deadline)?;
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
            // No other thread reads from this session, so this is a driver that we do not
            // understand.
            Ok(received) => {
                let what = format!("{length} bytes were announced and {received} came");
                Err(ProcessFailure::Garbage { step, what })
            }
            Err(refused) => Err(transport(step, refused)),
        }
    }

    /// After a wait without result: whether there is time left, and the caller wants to go on.
    fn go_on(&self, step: Step, deadline: Deadline) -> Result<(), ProcessFailure> {
        if deadline.is_over() {
            return Err(ProcessFailure::TimedOut { step });
        }
        self.signals.breathe();
        if gives_up(self.give_up) { Err(ProcessFailure::GivenUp { step }) } else { Ok(()) }
    }

    /// Greets the daemon and returns its version. The features that it names are not needed.
    fn handshake(&self, tgid: u32, settings: &Settings) -> Result<u32, ProcessFailure> {
        let deadline = Deadline::after(settings.handshake);
        self.send(Step::Handshake, &Message::handshake(tgid), deadline)?;
        let reply = self.await_reply(Step::Handshake, kind::HANDSHAKE_REPLY, None, deadline)?;
        Ok(reply.version.map_or(0, |version| version.version))
    }

    /// What the vendor's client sends between handshake and START. Its answers are optional, a lost
    /// session is not.
    fn prepare(&self, tgid: u32, device: LogicalId, settings: &Settings) -> Result<(), ProcessFailure> {
        const TRIES: u32 = 3;
        let optional = |result: Result<Message, ProcessFailure>| match result {
            Ok(reply) => Ok(Some(reply)),
            Err(ProcessFailure::TimedOut { .. }) => Ok(None),
            Err(failure) => Err(failure),
        };
        let mut level = 0;
        for _ in 0..TRIES {
            let deadline = Deadline::after(settings.preparation);
            self.send(Step::Prepare, &Message::about(kind::CAPABILITY, tgid, device), deadline)?;
            let reply = self.await_reply(Step::Prepare, kind::CAPABILITY_REPLY, Some(device), deadline);
            level = optional(reply)?.map_or(0, |reply| reply.capability_level);
            if level != 0 {
                break;
            }
        }
        if level & tsd_message::CAPABILITY_PACKAGES != 0 {
            let deadline = Deadline::after(settings.preparation);
            self.send(Step::Prepare, &Message::packages(tgid, device), deadline)?;
            optional(self.await_reply(Step::Prepare, kind::PACKAGES_REPLY, Some(device), deadline))?;
        }
        Ok(())
    }

    /// Waits for the reply of a kind, about a device where it names one. Others are skipped: a late
    /// answer to an earlier question is not ours.
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
    /// Whether this thread is in a caller's [`Settings::give_up`].
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// Whether the caller of this is asked by this thread whether to give up. The thread is opening a
/// device, and would wait for itself if it opened one now.
pub(crate) fn is_asked() -> bool {
    ASKED.get()
}

/// Asks the caller whether to give up.
fn gives_up(give_up: fn() -> bool) -> bool {
    /// What was before, also after a panic.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            ASKED.set(self.0);
        }
    }
    let _before = Before(ASKED.replace(true));
    give_up()
}

/// A private code that a command gave, with those that mean "closed" and "too late" told apart.
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
    fn codes_that_mean_closed_or_too_late_are_told_apart_from_the_rest() {
        let of = |code| transport(Step::Start, Private { command: "RECV_PEEK", code });
        assert!(matches!(of(15), ProcessFailure::Closed { .. }));
        assert!(matches!(of(22), ProcessFailure::Closed { .. }));
        assert!(matches!(of(49), ProcessFailure::Closed { .. }));
        assert!(matches!(of(27), ProcessFailure::TimedOut { .. }));
        assert!(matches!(of(12), ProcessFailure::TimedOut { .. }));
        assert!(matches!(of(41), ProcessFailure::Transport { code: 41, .. }));
    }
}
