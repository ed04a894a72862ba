//! The messages of the device's daemon (TSD) that starts processes for a host process.
//!
//! A packet is a head of three little-endian words (total length, 1, 0) and one protobuf message of
//! the same type in both directions; its field 2 says what it is. The daemon is not public: fields,
//! order and byte vectors were taken from its public client, and what the daemon makes of them is
//! inferred (see docs/driver.md). Replies are read defensively: text is bytes until it is
//! printed, unknown fields are skipped, and a packet whose length does not fit is refused.

use crate::id::LogicalId;
use prost::Message as _;

/// The protocol's version, on both sides.
pub(crate) const VERSION: u32 = 1230;

/// Length of the head before the message.
const HEAD: usize = 12;

/// What a message is: its field 2.
pub(crate) mod kind {
    /// Starts a process.
    pub(crate) const START: u32 = 6;
    /// Ends it.
    pub(crate) const CLOSE: u32 = 7;
    /// Answer to [`START`].
    pub(crate) const START_REPLY: u32 = 8;
    /// Answer to [`CLOSE`].
    pub(crate) const CLOSE_REPLY: u32 = 9;
    /// The daemon's side of the connection broke.
    pub(crate) const SOCKET_CLOSED: u32 = 10;
    /// First message: version and features.
    pub(crate) const HANDSHAKE: u32 = 32;
    /// Answer to [`HANDSHAKE`].
    pub(crate) const HANDSHAKE_REPLY: u32 = 33;
    /// Asks what the daemon can do.
    pub(crate) const CAPABILITY: u32 = 40;
    /// Answer to [`CAPABILITY`].
    pub(crate) const CAPABILITY_REPLY: u32 = 41;
    /// The daemon could not receive.
    pub(crate) const RECEIVE_ERROR: u32 = 66;
    /// Package configuration; empty here, as the vendor sends it when it has none.
    pub(crate) const PACKAGES: u32 = 69;
    /// Answer to [`PACKAGES`].
    pub(crate) const PACKAGES_REPLY: u32 = 70;
}

/// Bit of [`Message::capability_level`]: the daemon takes [`kind::PACKAGES`].
pub(crate) const CAPABILITY_PACKAGES: u64 = 1 << 8;

/// What our side can do: bit 1, the new error codes.
const CLIENT_CAPABILITY: u32 = 2;

/// The message of both directions. Fields that neither side needs are left out.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Message {
    /// One of [`kind`].
    #[prost(uint32, tag = "2")]
    pub(crate) kind: u32,
    /// Logical id modulo 4.
    #[prost(uint32, tag = "13")]
    pub(crate) device_modulo: u32,
    #[prost(message, optional, tag = "14")]
    pub(crate) process: Option<Process>,
    /// Logical id; replies repeat it, except for the handshake's.
    #[prost(uint32, tag = "15")]
    pub(crate) device: u32,
    /// Reply: 0 is success.
    #[prost(uint32, tag = "25")]
    pub(crate) code: u32,
    #[prost(bool, tag = "32")]
    pub(crate) start_compute: bool,
    #[prost(message, optional, tag = "33")]
    pub(crate) version: Option<Version>,
    /// Event digit, 0, level digit: never empty, or the device program leaves without a word.
    #[prost(message, optional, tag = "35")]
    pub(crate) log_level: Option<Text>,
    #[prost(message, optional, tag = "37")]
    pub(crate) error: Option<ErrorInfo>,
    #[prost(message, optional, tag = "42")]
    pub(crate) aicpu_path: Option<Text>,
    /// Reply to [`kind::CAPABILITY`].
    #[prost(uint64, tag = "43")]
    pub(crate) capability_level: u64,
    #[prost(message, optional, tag = "61")]
    pub(crate) ccecpu_log_level: Option<Text>,
    #[prost(message, optional, tag = "62")]
    pub(crate) aicpu_log_level: Option<Text>,
    #[prost(uint32, tag = "68")]
    pub(crate) client_capability: u32,
}

/// The host process that the device process belongs to.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Process {
    /// Its id in the initial pid namespace.
    #[prost(uint32, tag = "1")]
    pub(crate) tgid: u32,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) sign: Vec<u8>,
}

/// Protocol version and the features that are negotiated by name.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Version {
    #[prost(uint32, tag = "1")]
    pub(crate) version: u32,
    #[prost(message, repeated, tag = "2")]
    pub(crate) features: Vec<Feature>,
}

/// A feature of a message type.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Feature {
    #[prost(uint32, tag = "1")]
    pub(crate) kind: u32,
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub(crate) names: Vec<Vec<u8>>,
}

/// A text in a message of its own.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Text {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) text: Vec<u8>,
}

/// Why the daemon refused.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ErrorInfo {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) message: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) log: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) code: Vec<u8>,
}

impl Message {
    /// First message of a session. The daemon was never seen to be greeted without the feature
    /// list, so it is always sent.
    pub(crate) fn handshake(tgid: u32) -> Self {
        let feature = |kind, name: &str| Feature { kind, names: vec![name.into()] };
        Message {
            kind: kind::HANDSHAKE,
            process: Some(Process { tgid, sign: Vec::new() }),
            version: Some(Version {
                version: VERSION,
                features: vec![
                    feature(35, "check before send aicpu package"),
                    feature(37, "check before send open qs message"),
                    feature(64, "get check code retry"),
                ],
            }),
            ..Message::default()
        }
    }

    /// A message about a device that carries nothing else: [`kind::CAPABILITY`] or [`kind::CLOSE`].
    pub(crate) fn about(kind: u32, tgid: u32, device: LogicalId) -> Self {
        Message {
            kind,
            device_modulo: device.0 % 4,
            process: Some(Process { tgid, sign: Vec::new() }),
            device: device.0,
            ..Message::default()
        }
    }

    /// Package configuration of a host that has no packages. The vendor leaves the device modulo 4
    /// out here.
    pub(crate) fn packages(tgid: u32, device: LogicalId) -> Self {
        Message { device_modulo: 0, ..Message::about(kind::PACKAGES, tgid, device) }
    }

    /// Starts the process that memory needs. Package check codes stay 0: no packages are sent.
    pub(crate) fn start(tgid: u32, sign: &[u8], device: LogicalId) -> Self {
        Message {
            process: Some(Process { tgid, sign: sign.to_vec() }),
            start_compute: true,
            log_level: Some(Text { text: b"103".to_vec() }),
            aicpu_path: Some(Text::default()),
            ccecpu_log_level: Some(Text::default()),
            aicpu_log_level: Some(Text::default()),
            client_capability: CLIENT_CAPABILITY,
            ..Message::about(kind::START, tgid, device)
        }
    }

    /// The packet that carries the message.
    pub(crate) fn packet(&self) -> Vec<u8> {
        let length = HEAD + self.encoded_len();
        let mut packet = Vec::with_capacity(length);
        // Our messages are some hundred bytes, far below what the word holds.
        packet.extend_from_slice(&(length as u32).to_le_bytes());
        packet.extend_from_slice(&1u32.to_le_bytes());
        packet.extend_from_slice(&0u32.to_le_bytes());
        packet.append(&mut self.encode_to_vec());
        packet
    }

    /// Reads a packet; the error says what is wrong with it.
    pub(crate) fn from_packet(packet: &[u8]) -> Result<Self, String> {
        let Some((head, body)) = packet.split_first_chunk::<HEAD>() else {
            return Err(format!("{} bytes are less than a message's head of {HEAD}", packet.len()));
        };
        let claimed = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        if claimed as usize != packet.len() {
            return Err(format!("the head says {claimed} bytes, the packet has {}", packet.len()));
        }
        Message::decode(body).map_err(|error| format!("no protobuf message: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ZEROS: [u8; 48] = [b'0'; 48];
    const COUNTED: &[u8; 48] = b"0123456789abcdef0123456789abcdef0123456789abcdef";

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u32> = text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_digit(16).unwrap()).collect();
        digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
    }

    fn zeros() -> String {
        "30".repeat(48)
    }

    #[test]
    fn the_handshake_is_byte_for_byte_the_vendors() {
        let expected = hex("7f0000000100000000000000 102072030892218a026908ce09
             12230823121f636865636b206265666f72652073656e64206169637075207061636b616765
             122508251221636865636b206265666f72652073656e64206f70656e207173206d657373616765
             12180840121467657420636865636b20636f6465207265747279");
        assert_eq!(expected.len(), 127);
        assert_eq!(Message::handshake(4242).packet(), expected);
    }

    #[test]
    fn start_is_byte_for_byte_the_vendors() {
        let tail = "8002019a02050a03313033d20200ea0300f20300a00402";
        let first = hex(&format!("5c0000000100000000000000 1006 7235 089221 1230 {} {tail}", zeros()));
        assert_eq!(first.len(), 92);
        assert_eq!(Message::start(4242, &ZEROS, LogicalId(0)).packet(), first);

        let fifth = hex(&format!("600000000100000000000000 1006 6801 7235 089221 1230 {} 7805 {tail}", zeros()));
        assert_eq!(fifth.len(), 96);
        assert_eq!(Message::start(4242, &ZEROS, LogicalId(5)).packet(), fifth);

        let ninth =
            hex("62000000010000000000000010066801723708ffffff011230303132333435363738396162636465663031323334353637
             38396162636465663031323334353637383961626364656678098002019a02050a03313033d20200ea0300f20300a00402");
        assert_eq!(ninth.len(), 98);
        assert_eq!(Message::start(4_194_303, COUNTED, LogicalId(9)).packet(), ninth);
    }

    #[test]
    fn close_is_byte_for_byte_the_vendors() {
        let close = |tgid, device| Message::about(kind::CLOSE, tgid, LogicalId(device)).packet();
        assert_eq!(close(4242, 0), hex("13000000010000000000000010077203089221"));
        assert_eq!(close(4242, 5), hex("1700000001000000000000001007680172030892217805"));
        assert_eq!(close(4_194_303, 9), hex("19000000010000000000000010076801720508ffffff017809"));
    }

    #[test]
    fn the_vendors_longer_dialogue_is_byte_for_byte_the_vendors() {
        let capability = |device| Message::about(kind::CAPABILITY, 4242, LogicalId(device)).packet();
        assert_eq!(capability(0), hex("13000000010000000000000010287203089221"));
        assert_eq!(capability(5), hex("1700000001000000000000001028680172030892217805"));
        let packages = |device| Message::packages(4242, LogicalId(device)).packet();
        assert_eq!(packages(0), hex("13000000010000000000000010457203089221"));
        assert_eq!(packages(5), hex("150000000100000000000000104572030892217805"));
    }

    #[test]
    fn replies_are_understood() {
        let read = |text| Message::from_packet(&hex(text)).unwrap();
        let handshake = read("14000000010000000000000010218a020308ce09");
        assert_eq!((handshake.kind, handshake.version.unwrap().version), (kind::HANDSHAKE_REPLY, VERSION));

        let started = read("0e00000001000000000000001008");
        assert_eq!((started.kind, started.device, started.code), (kind::START_REPLY, 0, 0));
        let started = read("10000000010000000000000010087809");
        assert_eq!((started.kind, started.device, started.code), (kind::START_REPLY, 9, 0));

        let refused = read("24000000010000000000000010087809c80101aa020e0a01781201791a06453330303033");
        assert_eq!((refused.kind, refused.device, refused.code), (kind::START_REPLY, 9, 1));
        let error = refused.error.unwrap();
        assert_eq!((&*error.message, &*error.log, &*error.code), (&b"x"[..], &b"y"[..], &b"E30003"[..]));

        let closed = read("10000000010000000000000010097809");
        assert_eq!((closed.kind, closed.device), (kind::CLOSE_REPLY, 9));
    }

    #[test]
    fn text_that_is_not_utf8_does_not_make_a_reply_unreadable() {
        let mut message = Message::about(kind::START_REPLY, 1, LogicalId(0));
        message.error = Some(ErrorInfo { message: vec![0xff, 0xfe], log: vec![0x80; 4096], code: b"E30003".to_vec() });
        assert_eq!(Message::from_packet(&message.packet()).unwrap(), message);
    }

    #[test]
    fn packets_that_lie_about_their_length_are_refused() {
        let good = Message::handshake(1).packet();
        assert!(Message::from_packet(&[]).is_err());
        assert!(Message::from_packet(&good[..11]).is_err());
        assert!(Message::from_packet(&good[..good.len() - 1]).is_err());
        let mut longer = good.clone();
        longer.push(0);
        assert!(Message::from_packet(&longer).is_err());
    }

    #[test]
    fn no_packet_makes_the_reader_panic() {
        // Every single-byte change, and every cut with a head that fits, of a packet that has all
        // fields.
        let mut message = Message::start(4242, &ZEROS, LogicalId(9));
        message.error = Some(ErrorInfo { message: b"x".to_vec(), log: b"y".to_vec(), code: b"E30003".to_vec() });
        message.version = Message::handshake(1).version;
        let good = message.packet();
        for at in HEAD..good.len() {
            for value in 0..=255 {
                let mut bad = good.clone();
                bad[at] = value;
                let _ = Message::from_packet(&bad);
            }
            let mut cut = good[..at].to_vec();
            cut[..4].copy_from_slice(&(at as u32).to_le_bytes());
            let _ = Message::from_packet(&cut);
        }
    }

    #[test]
    fn unknown_fields_are_skipped() {
        let mut packet = Message::about(kind::START_REPLY, 7, LogicalId(1)).packet();
        // Field 2000, length-delimited, three bytes.
        packet.extend_from_slice(&[0x82, 0x7d, 3, 1, 2, 3]);
        let length = packet.len() as u32;
        packet[..4].copy_from_slice(&length.to_le_bytes());
        assert_eq!(Message::from_packet(&packet).unwrap().kind, kind::START_REPLY);
    }
}
