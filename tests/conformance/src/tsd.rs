//! Starting the device process: the daemon's messages, encoded by hand, over `/dev/hisi_hdc`.
//!
//! SETUP_DEVICE needs a process on the device for this host process. The daemon that starts it
//! takes small protobuf messages, one per packet. Each follows a header of three words: the total
//! length, 1 and 0. Only the fields that a start needs are written here.

use crate::manager::{Manager, close, ioctl, open};
use crate::rule::{Answer, Failure, Judge, note_command};
use ascend_ioctl::{Command, devmng, hdc};

const HANDSHAKE: u64 = 32;
const HANDSHAKE_REPLY: u64 = 33;
const START: u64 = 6;
const START_REPLY: u64 = 8;
const VERSION: u64 = 1230;

/// Message types whose handling both sides announce.
const FEATURES: [(u64, &str); 3] =
    [(35, "check before send aicpu package"), (37, "check before send open qs message"), (64, "get check code retry")];

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn number(out: &mut Vec<u8>, field: u64, value: u64) {
    varint(out, field << 3);
    varint(out, value);
}

/// proto3 omits zeros.
fn number_unless_zero(out: &mut Vec<u8>, field: u64, value: u64) {
    if value != 0 {
        number(out, field, value);
    }
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn framed(body: Vec<u8>) -> Vec<u8> {
    let mut packet = Vec::with_capacity(12 + body.len());
    for word in [12 + body.len() as u32, 1, 0] {
        packet.extend_from_slice(&word.to_le_bytes());
    }
    packet.extend_from_slice(&body);
    packet
}

/// The first message.
pub fn handshake(pid: i32) -> Vec<u8> {
    let mut body = Vec::new();
    number(&mut body, 2, HANDSHAKE);
    let mut identity = Vec::new();
    number(&mut identity, 1, pid as u64);
    bytes(&mut body, 14, &identity);
    let mut version = Vec::new();
    number(&mut version, 1, VERSION);
    for (message, text) in FEATURES {
        let mut feature = Vec::new();
        number(&mut feature, 1, message);
        bytes(&mut feature, 2, text.as_bytes());
        bytes(&mut version, 2, &feature);
    }
    bytes(&mut body, 33, &version);
    framed(body)
}

/// The message that starts the process.
pub fn start(pid: i32, sign: &[u8], device: u32) -> Vec<u8> {
    let mut body = Vec::new();
    number(&mut body, 2, START);
    number_unless_zero(&mut body, 13, u64::from(device % 4));
    let mut identity = Vec::new();
    number(&mut identity, 1, pid as u64);
    bytes(&mut identity, 2, sign);
    bytes(&mut body, 14, &identity);
    number_unless_zero(&mut body, 15, u64::from(device));
    number(&mut body, 32, 1);
    let mut level = Vec::new();
    bytes(&mut level, 1, b"103");
    bytes(&mut body, 35, &level);
    for empty in [42, 61, 62] {
        bytes(&mut body, empty, b"");
    }
    number(&mut body, 68, 2);
    framed(body)
}

/// A message without fields of its own, about device 0.
pub fn question(kind: u64, pid: i32) -> Vec<u8> {
    let mut body = Vec::new();
    number(&mut body, 2, kind);
    let mut identity = Vec::new();
    number(&mut identity, 1, pid as u64);
    bytes(&mut body, 14, &identity);
    framed(body)
}

/// The fields of a reply that a start needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Message type.
    pub kind: u64,
    /// Logical id of the device.
    pub device: u64,
    /// 0: success.
    pub code: u64,
}

/// Parses a packet; `None` if it is not a message.
pub fn parse(packet: &[u8]) -> Option<Reply> {
    let total = u32::from_le_bytes(packet.get(..4)?.try_into().ok()?) as usize;
    if total != packet.len() {
        return None;
    }
    let mut rest = packet.get(12..)?;
    let mut reply = Reply::default();
    while !rest.is_empty() {
        let key = take_varint(&mut rest)?;
        let value = match key & 7 {
            0 => take_varint(&mut rest)?,
            1 => {
                rest = rest.get(8..)?;
                0
            }
            2 => {
                let length = take_varint(&mut rest)? as usize;
                rest = rest.get(length..)?;
                0
            }
            5 => {
                rest = rest.get(4..)?;
                0
            }
            _ => return None,
        };
        match key >> 3 {
            2 => reply.kind = value,
            15 => reply.device = value,
            25 => reply.code = value,
            _ => {}
        }
    }
    Some(reply)
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, tail) = rest.split_first()?;
        *rest = tail;
        value |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// How the driver identifies this process.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Its id in the initial pid namespace.
    pub tgid: i32,
    /// The text by which the device verifies the process.
    pub sign: Vec<u8>,
}

/// Registers the process on its one DEVMNG file.
pub fn register(devmng: &Manager) -> Result<Identity, Failure> {
    let mut answer = devmng::ProcessSign::default();
    devmng.command(&devmng::GET_PROCESS_SIGN, &mut answer).granted()?;
    let length = answer.sign.iter().position(|&byte| byte == 0).unwrap_or(answer.sign.len());
    Ok(Identity { tgid: answer.tgid, sign: answer.sign[..length].to_vec() })
}

/// A session with a daemon on a device. Dropping it closes its file and with it the session.
#[derive(Debug)]
pub struct Channel {
    fd: i32,
    device: i32,
    /// The session's number.
    pub session: i32,
    /// Its reuse counter.
    pub index: u32,
}

/// A command of `/dev/hisi_hdc`.
pub fn hdc_command<V: hdc::View>(fd: i32, command: &Command, view: &V) -> Answer<V> {
    note_command(command.name);
    let mut argument = hdc::Arg::new(view);
    ioctl(fd, command.request(), std::ptr::from_mut(&mut argument) as u64)?;
    Ok(argument.view())
}

/// Opens `/dev/hisi_hdc`.
pub fn hdc_open() -> Answer<i32> {
    open(hdc::PATH, libc::O_RDONLY | libc::O_CLOEXEC)
}

impl Channel {
    /// Connects to the daemon of a device; the session belongs to a new file.
    pub fn connect(device: u32) -> Result<Channel, Failure> {
        let channel = Channel::connect_only(device)?;
        channel.own(channel.fd).granted()?;
        Ok(channel)
    }

    /// As [`Channel::connect`], but the session belongs to no file yet.
    pub fn connect_only(device: u32) -> Result<Channel, Failure> {
        let fd = hdc_open().granted()?;
        let device = device as i32;
        let asked = hdc::Connect { peer_pid: -1, device, service: hdc::SERVICE_TSD, timeout: 30, ..Default::default() };
        let answer = hdc_command(fd, &hdc::CONNECT, &asked).granted()?;
        Ok(Channel { fd, device, session: answer.session, index: answer.alloc_index })
    }

    /// The file.
    pub fn fd(&self) -> i32 {
        self.fd
    }

    /// SET_SESSION_OWNER on a file.
    pub fn own(&self, fd: i32) -> Answer<hdc::SetSessionOwner> {
        let view = hdc::SetSessionOwner { device: self.device, session: self.session, ..Default::default() };
        hdc_command(fd, &hdc::SET_SESSION_OWNER, &view)
    }

    /// SEND.
    pub fn send(&self, packet: &[u8]) -> Answer<()> {
        let view = hdc::Send {
            device: self.device,
            session: self.session,
            source: packet.as_ptr() as u64,
            length: packet.len() as i32,
            wait: hdc::WAIT_TIMEOUT,
            timeout: 10_000,
            ..Default::default()
        };
        hdc_command(self.fd, &hdc::SEND, &view).map(drop)
    }

    /// RECV_PEEK with a timeout in milliseconds.
    pub fn peek(&self, timeout: u32) -> Answer<hdc::RecvPeek> {
        let view = hdc::RecvPeek {
            device: self.device,
            session: self.session,
            wait: hdc::WAIT_TIMEOUT,
            timeout,
            alloc_index: self.index,
            ..Default::default()
        };
        hdc_command(self.fd, &hdc::RECV_PEEK, &view)
    }

    /// RECV of at most `length` bytes.
    pub fn receive(&self, length: usize) -> Answer<Vec<u8>> {
        let mut buffer = vec![0; length];
        let view = hdc::Recv {
            device: self.device,
            session: self.session,
            destination: buffer.as_mut_ptr() as u64,
            length: length as i32,
            buffers: 1,
            ..Default::default()
        };
        let answer = hdc_command(self.fd, &hdc::RECV, &view)?;
        buffer.truncate(answer.received.max(0) as usize);
        Ok(buffer)
    }

    /// GET_SESSION_ATTR: 0 while connected.
    pub fn status(&self) -> Answer<i32> {
        self.attribute(hdc::ATTR_STATUS)
    }

    /// GET_SESSION_ATTR.
    pub fn attribute(&self, kind: i32) -> Answer<i32> {
        let view = hdc::GetSessionAttr {
            device: self.device,
            kind,
            session: self.session,
            alloc_index: self.index,
            ..Default::default()
        };
        hdc_command(self.fd, &hdc::GET_SESSION_ATTR, &view).map(|answer| answer.output)
    }

    /// CLOSE with this reuse counter.
    pub fn close_with(&self, index: u32) -> Answer<()> {
        let view = hdc::Close { device: self.device, session: self.session, alloc_index: index, ..Default::default() };
        hdc_command(self.fd, &hdc::CLOSE, &view).map(drop)
    }

    /// Waits for a message of this type and skips others.
    pub fn wait_for(&self, kind: u64, seconds: u32) -> Result<Reply, Failure> {
        let mut tries = 0;
        loop {
            let answer = match self.peek(1_000) {
                Err(hdc::error::RECEIVE_TIMEOUT | libc::EINTR) if tries < seconds => {
                    tries += 1;
                    continue;
                }
                other => other.granted()?,
            };
            let packet = self.receive(answer.length.max(0) as usize).granted()?;
            match parse(&packet) {
                Some(reply) if reply.kind == kind => return Ok(reply),
                Some(_) => {}
                None => {
                    return Err(Failure::broken(format!(
                        "the daemon sent {} bytes that are not a message",
                        packet.len()
                    )));
                }
            }
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        close(self.fd);
    }
}

/// Starts this process's device process. It lives as long as the channel.
pub fn start_device_process(identity: &Identity, device: u32) -> Result<Channel, Failure> {
    let channel = Channel::connect(device)?;
    shake_hands(&channel, identity)?;
    channel.send(&start(identity.tgid, &identity.sign, device)).granted()?;
    let reply = channel.wait_for(START_REPLY, 150)?;
    if reply.code != 0 || reply.device != u64::from(device) {
        return Err(Failure::broken(format!("the daemon refused to start a device process: {reply:?}")));
    }
    Ok(channel)
}

/// The first two messages.
pub fn shake_hands(channel: &Channel, identity: &Identity) -> Result<Reply, Failure> {
    channel.send(&handshake(identity.tgid)).granted()?;
    channel.wait_for(HANDSHAKE_REPLY, 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    #[test]
    fn the_handshake_is_what_the_daemon_expects() {
        let expected = hex("7f0000000100000000000000 102072030892218a026908ce09
             12230823121f636865636b206265666f72652073656e64206169637075207061636b616765
             122508251221636865636b206265666f72652073656e64206f70656e207173206d657373616765
             12180840121467657420636865636b20636f6465207265747279");
        assert_eq!(handshake(4242), expected);
    }

    #[test]
    fn the_start_message_is_what_the_daemon_expects() {
        let expected = hex("620000000100000000000000 10066801723708ffffff011230
             303132333435363738396162636465663031323334353637383961626364656630313233343536373839616263646566
             7809 8002019a02050a03313033d20200ea0300f20300a00402");
        assert_eq!(start(4_194_303, "0123456789abcdef".repeat(3).as_bytes(), 9), expected);
        assert_eq!(start(4242, &[b'0'; 48], 0).len(), 92);
    }

    #[test]
    fn replies_are_read_by_their_fields() {
        assert_eq!(parse(&hex("0e00000001000000000000001008")), Some(Reply { kind: 8, device: 0, code: 0 }));
        assert_eq!(parse(&hex("10000000010000000000000010087809")), Some(Reply { kind: 8, device: 9, code: 0 }));
        let refused = "24000000010000000000000010087809c80101aa020e0a01781201791a06453330303033";
        assert_eq!(parse(&hex(refused)), Some(Reply { kind: 8, device: 9, code: 1 }));
        assert_eq!(parse(&hex("0f00000001000000000000001008")), None);
        assert_eq!(parse(&hex("0e000000010000000000000010")), None);
    }
}
