//! The daemon on the device that starts device processes (`tsdaemon`), behind HDC service 9.
//!
//! One packet per message: a head of three little-endian words (length with the head, number of
//! segments, 0), then protobuf. After a greeting both sides compare versions. START with the
//! client's process id and sign makes the daemon start `aicpu_scheduler` and bind it to that host
//! process, if the host driver has the process registered. CLOSE ends the device process, and so
//! does the end of the session. The daemon's source is not public: what it accepts and how it
//! refuses is inferred from the vendor's client and from the program that it starts.

use crate::config::Daemon;
use crate::machine::Machine;
use prost::Message;
use std::time::Duration;

/// The version that both sides of the dialogue must have.
const VERSION: u32 = 1230;
/// Length of the head.
const HEAD: usize = 12;
/// Capability bit that makes the vendor's client send its package configuration.
const CAPABILITY_PACKAGES: u32 = 1 << 8;

mod kind {
    pub const START: i32 = 6;
    pub const CLOSE: i32 = 7;
    pub const STARTED: i32 = 8;
    pub const CLOSED: i32 = 9;
    pub const GREETING: i32 = 32;
    pub const GREETED: i32 = 33;
    pub const QUALITY: i32 = 38;
    pub const QUALITY_IS: i32 = 39;
    pub const CAPABILITY: i32 = 40;
    pub const CAPABILITY_IS: i32 = 41;
    pub const PACKAGES: i32 = 69;
    pub const PACKAGES_TAKEN: i32 = 70;
}

#[derive(Clone, PartialEq, Message)]
struct ProcessMessage {
    #[prost(uint32, tag = "1")]
    pid: u32,
    #[prost(string, tag = "2")]
    sign: String,
}

#[derive(Clone, PartialEq, Message)]
struct Feature {
    #[prost(uint32, tag = "1")]
    message: u32,
    #[prost(string, repeated, tag = "2")]
    names: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
struct Version {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(message, repeated, tag = "2")]
    features: Vec<Feature>,
}

#[derive(Clone, PartialEq, Message)]
struct Text {
    #[prost(string, tag = "1")]
    text: String,
}

#[derive(Clone, PartialEq, Message)]
struct ErrorInfo {
    #[prost(string, tag = "1")]
    message: String,
    #[prost(string, tag = "2")]
    log: String,
    #[prost(string, tag = "3")]
    code: String,
}

/// The message type, with the fields that the daemon reads or writes.
#[derive(Clone, PartialEq, Message)]
struct Packet {
    #[prost(int32, tag = "2")]
    kind: i32,
    #[prost(uint32, tag = "13")]
    device: u32,
    #[prost(message, optional, tag = "14")]
    process: Option<ProcessMessage>,
    #[prost(uint32, tag = "15")]
    real_device: u32,
    #[prost(uint32, tag = "25")]
    result: u32,
    #[prost(uint32, tag = "28")]
    profiling: u32,
    #[prost(bool, tag = "32")]
    start_cp: bool,
    #[prost(message, optional, tag = "33")]
    version: Option<Version>,
    #[prost(message, optional, tag = "35")]
    log_level: Option<Text>,
    #[prost(message, optional, tag = "37")]
    error: Option<ErrorInfo>,
    #[prost(uint32, tag = "38")]
    device_mode: u32,
    #[prost(uint32, tag = "43")]
    capability: u32,
}

/// The host process at the other end.
pub(crate) struct Requester {
    /// Its id in the initial pid namespace.
    pub tgid: i32,
    /// The device of the session, by physical id.
    pub device: u32,
    /// Whether it is registered with the host driver.
    pub registered: bool,
}

/// The daemon's reaction to a packet.
#[derive(Debug, PartialEq)]
pub(crate) enum Said {
    /// No answer.
    Nothing,
    /// An answer after a delay.
    Reply(Duration, Vec<u8>),
    /// Several packets at once.
    Replies(Vec<Vec<u8>>),
    /// It closes the session.
    HungUp,
}

/// The daemon's side of one session.
#[derive(Debug, Default)]
pub(crate) struct Dialogue {
    greeted: bool,
    asked: bool,
    started: bool,
}

impl Dialogue {
    /// Handles a packet.
    pub fn hear(&mut self, machine: &mut Machine, client: &Requester, bytes: &[u8]) -> Said {
        let Some(packet) = parse(bytes) else { return Said::HungUp };
        let daemon = machine.daemon.clone();
        match daemon {
            Daemon::Silent | Daemon::Floods => return Said::Nothing,
            Daemon::Ignores(kind) if packet.kind == kind => return Said::Nothing,
            _ => {}
        }
        let mut reply = Packet { device: packet.device, real_device: packet.real_device, ..Default::default() };
        match packet.kind {
            kind::GREETING => {
                self.greeted = true;
                reply = Packet { kind: kind::GREETED, version: Some(version(&daemon)), ..Default::default() };
            }
            kind::CAPABILITY => {
                self.asked = true;
                (reply.kind, reply.capability) = (kind::CAPABILITY_IS, CAPABILITY_PACKAGES);
            }
            // The class of service of the device process, in field 41. It is 0 here, which protobuf
            // leaves out.
            kind::QUALITY => reply.kind = kind::QUALITY_IS,
            kind::PACKAGES => reply.kind = kind::PACKAGES_TAKEN,
            kind::START if daemon == Daemon::HangsUp => return Said::HungUp,
            kind::START => {
                reply.kind = kind::STARTED;
                if let Err((result, code)) = self.start(machine, client, &packet, &daemon) {
                    reply.result = result;
                    let error = ErrorInfo { message: "refused".into(), log: "see the device's log".into(), code };
                    reply.error = Some(error);
                }
            }
            kind::CLOSE => {
                reply.kind = kind::CLOSED;
                self.end(machine, client.tgid, client.device);
            }
            _ => return Said::Nothing,
        }
        match daemon {
            Daemon::Garbage => Said::Reply(Duration::ZERO, vec![0x99; 40]),
            Daemon::Late(after) => Said::Reply(after, framed(&reply)),
            Daemon::Chatty(more) if packet.kind == kind::START => {
                let unasked = std::iter::repeat_n(unasked(), more);
                Said::Replies(std::iter::once(framed(&reply)).chain(unasked).collect())
            }
            Daemon::Confused if reply.version.is_none() => {
                let (device, real_device) = (reply.device + 1, reply.real_device + 1);
                let other = Packet { device, real_device, result: 1, ..reply.clone() };
                Said::Replies(vec![framed(&other), framed(&reply)])
            }
            _ => Said::Reply(Duration::ZERO, framed(&reply)),
        }
    }

    fn start(
        &mut self,
        machine: &mut Machine,
        client: &Requester,
        packet: &Packet,
        daemon: &Daemon,
    ) -> Result<(), (u32, String)> {
        let refused = |code: &str| Err((1, code.to_owned()));
        match daemon {
            Daemon::Refuses { code, error } => return Err((*code, error.clone())),
            Daemon::VendorOrder if !self.asked => return refused(""),
            _ => {}
        }
        let process = packet.process.clone().unwrap_or_default();
        let log_level = packet.log_level.clone().unwrap_or_default().text;
        let decimal = !log_level.is_empty() && log_level.bytes().all(|byte| byte.is_ascii_digit());
        // The started program exits without an error code if it cannot parse its arguments.
        let parses = packet.start_cp
            && !process.sign.is_empty()
            && decimal
            && packet.profiling <= 1
            && packet.device_mode <= 1
            && packet.device == packet.real_device % 4;
        // How the daemon answers a second START while the first process runs is not known.
        let running = self.started && machine.runs_device_process(client.tgid, client.device);
        if !self.greeted || running || !parses {
            return refused("");
        }
        // The host driver refuses to bind a process that is not registered or not the session's.
        if !client.registered || process.pid != client.tgid as u32 {
            return refused("E39002");
        }
        let running = machine.companions().filter(|(device, ..)| *device == client.device).count();
        if running >= machine.config.device_process_limit {
            return refused("E30003");
        }
        if machine.start_device_process(client.tgid, client.device).is_none() {
            return refused("E39004");
        }
        self.started = true;
        Ok(())
    }

    /// Ends the device process, on CLOSE or with the session.
    pub fn end(&mut self, machine: &mut Machine, tgid: i32, device: u32) {
        if std::mem::take(&mut self.started) {
            machine.end_device_process(tgid, device);
        }
    }
}

/// A packet that nobody requested.
pub(crate) fn unasked() -> Vec<u8> {
    framed(&Packet::default())
}

fn parse(bytes: &[u8]) -> Option<Packet> {
    let (head, body) = bytes.split_at_checked(HEAD)?;
    let length = u32::from_le_bytes(head[..4].try_into().ok()?);
    if length as usize != bytes.len() {
        return None;
    }
    Packet::decode(body).ok()
}

fn framed(packet: &Packet) -> Vec<u8> {
    let body = packet.encode_to_vec();
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    for word in [(HEAD + body.len()) as u32, 1, 0] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend(body);
    bytes
}

fn version(daemon: &Daemon) -> Version {
    let version = if let Daemon::OtherVersion(version) = daemon { *version } else { VERSION };
    // The daemon sends a list of features, which the client ignores.
    let features = vec![Feature { message: 35, names: vec!["check before send aicpu package".into()] }];
    Version { version, features }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    // Messages of the vendor's client for process 4242.
    const GREETING: &str = "7f0000000100000000000000102072030892218a026908ce09
        12230823121f636865636b206265666f72652073656e64206169637075207061636b616765
        122508251221636865636b206265666f72652073656e64206f70656e207173206d657373616765
        12180840121467657420636865636b20636f6465207265747279";
    const CAPABILITY: &str = "13000000010000000000000010287203089221";
    const PACKAGES: &str = "13000000010000000000000010457203089221";
    const CLOSE: &str = "13000000010000000000000010077203089221";

    fn start() -> Vec<u8> {
        let sign = "30".repeat(48);
        bytes(&format!(
            "5c0000000100000000000000100672350892211230{sign}8002019a02050a03313033d20200ea0300f20300a00402"
        ))
    }

    const CLIENT: Requester = Requester { tgid: 4242, device: 0, registered: true };

    fn answer(said: Said) -> Packet {
        let Said::Reply(_, bytes) = said else { panic!("{said:?}") };
        parse(&bytes).expect("a message")
    }

    fn greeted() -> (Machine, Dialogue) {
        let (mut machine, mut dialogue) = (Machine::new(Config::default()), Dialogue::default());
        let reply = answer(dialogue.hear(&mut machine, &CLIENT, &bytes(GREETING)));
        assert_eq!((reply.kind, reply.version.unwrap().version), (kind::GREETED, VERSION));
        (machine, dialogue)
    }

    #[test]
    fn the_vendors_dialogue_starts_and_ends_a_device_process() {
        let (mut machine, mut dialogue) = greeted();
        let reply = answer(dialogue.hear(&mut machine, &CLIENT, &bytes(CAPABILITY)));
        assert_eq!((reply.kind, reply.capability), (kind::CAPABILITY_IS, CAPABILITY_PACKAGES));
        assert_eq!(answer(dialogue.hear(&mut machine, &CLIENT, &bytes(PACKAGES))).kind, kind::PACKAGES_TAKEN);
        let started = dialogue.hear(&mut machine, &CLIENT, &start());
        assert_eq!(started, Said::Reply(Duration::ZERO, bytes("0e00000001000000000000001008")));
        assert!(machine.device_process(4242, 0).is_some());
        assert_eq!(answer(dialogue.hear(&mut machine, &CLIENT, &bytes(CLOSE))).kind, kind::CLOSED);
        assert_eq!(machine.device_process(4242, 0), None);
    }

    fn refusal(client: &Requester, packet: &[u8], daemon: Daemon) -> (u32, String) {
        let (mut machine, mut dialogue) = greeted();
        machine.daemon = daemon;
        let reply = answer(dialogue.hear(&mut machine, client, packet));
        assert_eq!(machine.device_process(client.tgid, client.device), None);
        (reply.result, reply.error.unwrap().code)
    }

    #[test]
    fn a_process_that_is_not_registered_or_not_the_sessions_is_not_bound() {
        let unknown = Requester { registered: false, ..CLIENT };
        assert_eq!(refusal(&unknown, &start(), Daemon::Works), (1, "E39002".into()));
        let other = Requester { tgid: 4243, ..CLIENT };
        assert_eq!(refusal(&other, &start(), Daemon::Works), (1, "E39002".into()));
    }

    #[test]
    fn what_the_started_program_cannot_parse_is_refused_without_a_code() {
        for spoil in [
            (|packet| packet.start_cp = false) as fn(&mut Packet),
            |packet| packet.log_level = None,
            |packet| packet.log_level = Some(Text { text: "info".into() }),
            |packet| packet.profiling = 2,
            |packet| packet.process = Some(ProcessMessage { pid: 4242, sign: String::new() }),
            |packet| packet.device = 1,
        ] {
            let mut packet = parse(&start()).unwrap();
            spoil(&mut packet);
            assert_eq!(refusal(&CLIENT, &framed(&packet), Daemon::Works), (1, String::new()), "{packet:?}");
        }
    }

    #[test]
    fn the_daemon_misbehaves_as_ordered() {
        let refuses = Daemon::Refuses { code: 7, error: "E30006".into() };
        assert_eq!(refusal(&CLIENT, &start(), refuses), (7, "E30006".into()));
        assert_eq!(refusal(&CLIENT, &start(), Daemon::VendorOrder), (1, String::new()));
        let (mut machine, mut dialogue) = greeted();
        for (daemon, said) in [
            (Daemon::Silent, Said::Nothing),
            (Daemon::Garbage, Said::Reply(Duration::ZERO, vec![0x99; 40])),
            (Daemon::HangsUp, Said::HungUp),
            (Daemon::Floods, Said::Nothing),
            (Daemon::Ignores(kind::START), Said::Nothing),
        ] {
            machine.daemon = daemon;
            assert_eq!(Dialogue { greeted: true, ..Default::default() }.hear(&mut machine, &CLIENT, &start()), said);
        }
        machine.daemon = Daemon::Confused;
        let Said::Replies(replies) = dialogue.hear(&mut machine, &CLIENT, &bytes(CAPABILITY)) else { panic!("one") };
        let [other, own] = [0, 1].map(|at| parse(&replies[at]).unwrap());
        assert_eq!([(other.real_device, other.result), (own.real_device, own.result)], [(1, 1), (0, 0)]);
        machine.daemon = Daemon::OtherVersion(1229);
        let reply = answer(dialogue.hear(&mut machine, &CLIENT, &bytes(GREETING)));
        assert_eq!(reply.version.unwrap().version, 1229);
    }

    #[test]
    fn a_full_device_refuses_with_its_own_code() {
        let (mut machine, mut dialogue) = greeted();
        machine.config.device_process_limit = 1;
        machine.start_device_process(1, 0).unwrap();
        let reply = answer(dialogue.hear(&mut machine, &CLIENT, &start()));
        assert_eq!((reply.result, reply.error.unwrap().code.as_str()), (1, "E30003"));
    }

    #[test]
    fn bytes_that_are_no_message_end_the_session() {
        let (mut machine, mut dialogue) = greeted();
        let mut short = start();
        short.pop();
        for packet in [&[][..], &[0; 11], &short, &bytes("0e00000001000000000000001208")] {
            assert_eq!(dialogue.hear(&mut machine, &CLIENT, packet), Said::HungUp, "{packet:x?}");
        }
    }
}
