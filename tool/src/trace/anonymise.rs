//! `--anonymise`: addresses of the program's own memory and ids of processes are replaced, each by
//! the same stand-in wherever it occurs, so that the trace can still be replayed.
//!
//! Addresses of the driver's segments are kept: they are the same on every host. Bytes of an
//! argument that belong to no known field are cleared, since they may hold anything.

use super::decode;
use super::field::{FieldKind, fields};
use super::watch::hex_number;
use ascend_emulator::record::{Buffer, Record, bytes, hex};
use ascend_emulator::seccomp::{WATCHED_END, WATCHED_START};
use ascend_ioctl::{Generation, urd};
use std::collections::HashMap;

/// Where stand-ins of addresses begin: above the driver's.
const FIRST_PAGE: u64 = 0x6000_0000_0000 >> 12;

/// Numbers below this are no addresses.
const LOWEST: u64 = 0x1_0000;

/// The stand-ins that were given.
#[derive(Default)]
pub struct Anonymiser {
    processes: HashMap<i64, i64>,
    pages: HashMap<u64, u64>,
    names: HashMap<Vec<u8>, Vec<u8>>,
}

impl Anonymiser {
    fn process(&mut self, id: i64) -> i64 {
        if id <= 0 {
            return id;
        }
        let next = self.processes.len() as i64 + 1;
        *self.processes.entry(id).or_insert(next)
    }

    fn address(&mut self, address: u64) -> u64 {
        if address < LOWEST || (WATCHED_START..WATCHED_END).contains(&address) {
            return address;
        }
        let next = FIRST_PAGE + self.pages.len() as u64;
        let page = *self.pages.entry(address >> 12).or_insert(next);
        page << 12 | address & 0xfff
    }

    fn address_text(&mut self, text: &mut Option<String>) {
        if let Some(address) = text.as_deref().and_then(hex_number) {
            *text = Some(format!("{:#x}", self.address(address)));
        }
    }

    /// Replaces what a record tells about the host it was made on.
    pub fn apply(&mut self, record: &mut Record, module: &str, generation: Generation) {
        let both = [&mut record.pid, &mut record.tid];
        for id in both {
            *id = self.process((*id).into()) as i32;
        }
        self.address_text(&mut record.addr);
        if record.call != "ioctl" {
            let returns_address = record.errno.is_none() && matches!(record.call, "mmap" | "mremap");
            if returns_address {
                record.ret = self.address(record.ret as u64) as i64;
            }
            return;
        }
        let (before, after) = decode::argument(record, module, generation);
        let request = decode::request(record);
        if record.in_hex.is_some() {
            let clean = self.argument(&before, module, generation, request);
            record.in_hex = Some(hex(&clean));
        }
        if record.out_hex.is_some() {
            let clean = self.argument(&after, module, generation, request);
            record.out_hex = Some(hex(&clean));
        }
        let mut buffers = std::mem::take(&mut record.buffers);
        for buffer in &mut buffers {
            self.buffer(buffer, record, module, &before);
        }
        record.buffers = buffers;
        record.log = record.log.take().map(|text| self.sentence(&text));
    }

    /// An argument with its known fields alone.
    fn argument(&mut self, argument: &[u8], module: &str, generation: Generation, request: u32) -> Vec<u8> {
        let mut clean = vec![0; argument.len()];
        for field in fields(generation, module, request) {
            let mut value = field.bytes(argument).to_vec();
            match field.kind {
                FieldKind::Address | FieldKind::Pointer | FieldKind::Converted => self.words(&mut value),
                // An argument has ids of processes in 4 or in 8 bytes; lists have them in 4.
                FieldKind::Pid if value.len() == 8 => {
                    let id = field.number(argument).unwrap_or(0) as i64;
                    value = self.process(id).to_le_bytes().to_vec();
                }
                FieldKind::Pid => self.ids(&mut value),
                FieldKind::Name => value = self.name(&value),
                _ => {}
            }
            clean[field.offset..field.offset + value.len()].copy_from_slice(&value);
        }
        clean
    }

    /// Replaces each word of a list of addresses.
    fn words(&mut self, list: &mut [u8]) {
        for word in list.chunks_exact_mut(8) {
            let address = word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            word.copy_from_slice(&self.address(address).to_le_bytes());
        }
    }

    /// Replaces each number of a list of processes.
    fn ids(&mut self, list: &mut [u8]) {
        for id in list.chunks_exact_mut(4) {
            let number = i32::from_le_bytes([id[0], id[1], id[2], id[3]]);
            id.copy_from_slice(&(self.process(number.into()) as i32).to_le_bytes());
        }
    }

    /// A name of memory has the id of its maker in it.
    fn name(&mut self, name: &[u8]) -> Vec<u8> {
        let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        if length == 0 {
            return vec![0; name.len()];
        }
        let next = self.names.len() + 1;
        let entry = self.names.entry(name[..length].to_vec());
        let mut stand_in = entry.or_insert_with(|| format!("{next:0>length$}").into_bytes()).clone();
        stand_in.resize(name.len(), 0);
        stand_in
    }

    fn buffer(&mut self, buffer: &mut Buffer, record: &Record, module: &str, argument: &[u8]) {
        let mut address = Some(std::mem::take(&mut buffer.addr));
        self.address_text(&mut address);
        buffer.addr = address.unwrap_or_default();
        let (command, length) = (record.cmd.unwrap_or_default(), buffer.len.min(1 << 20) as usize);
        let field = buffer.field.clone();
        for text in [&mut buffer.in_hex, &mut buffer.out_hex] {
            let Some(mut contents) = text.as_deref().and_then(|text| bytes(text, length)) else { continue };
            match (module, command, field.as_str()) {
                ("SVM", "MEM_SET_PID", _) | ("DEVMNG", "CONTAINER_CMD", _) => self.ids(&mut contents),
                // Sizes, and the driver's own segments.
                ("SVM", "MEMCPY_BATCH", "sizes") | ("SVM", "GET_MMAP_INFO", _) => {}
                ("SVM", _, _) => self.words(&mut contents),
                ("URD", _, "input") => self.query(&mut contents, argument),
                ("hdc", ..) => self.message(&mut contents),
                _ => {}
            }
            *text = Some(hex(&contents));
        }
    }

    /// The input of a query may point to a buffer.
    fn query(&mut self, input: &mut [u8], argument: &[u8]) {
        let word = |at: usize| argument.get(at..at + 4).map(|it| u32::from_le_bytes([it[0], it[1], it[2], it[3]]));
        let key = (word(8).unwrap_or(0), word(12).unwrap_or(0));
        let is = |it: urd::Key| (it.main, it.sub) == key;
        let pointer = if is(urd::SPOD_INFO) {
            8..16
        } else if is(urd::UDIS_GET) || is(urd::UDIS_GET_85) {
            24..32
        } else {
            return;
        };
        if let Some(pointer) = input.get_mut(pointer) {
            self.words(pointer);
        }
    }

    /// A message to or from the daemon has the id of the process in the field 1 of its field 14.
    fn message(&mut self, packet: &mut [u8]) {
        const HEAD: usize = 12;
        let mut at = HEAD;
        while let Some((tag, value)) = varint(packet, at) {
            at = match tag & 7 {
                0 => match varint(packet, value) {
                    Some((_, after)) => after,
                    None => return,
                },
                1 => value + 8,
                5 => value + 4,
                2 => {
                    let Some((length, start)) = varint(packet, value) else { return };
                    let end = start.saturating_add(length as usize).min(packet.len());
                    if tag >> 3 == 14 {
                        self.process_of_message(&mut packet[start..end]);
                    }
                    end
                }
                _ => return,
            };
        }
    }

    fn process_of_message(&mut self, inner: &mut [u8]) {
        let Some((8, value)) = varint(inner, 0) else { return };
        let Some((id, after)) = varint(inner, value) else { return };
        let mut rest = self.process(id as i64) as u64;
        // As many bytes as before, so that no length changes.
        let last = after - value - 1;
        for (index, byte) in inner[value..after].iter_mut().enumerate() {
            *byte = (rest & 0x7f) as u8 | if index < last { 0x80 } else { 0 };
            rest >>= 7;
        }
    }

    /// A sentence of the kernel without the numbers that are addresses or processes.
    fn sentence(&mut self, text: &str) -> String {
        let mut clean = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(start) = rest.find(|c: char| c.is_ascii_alphanumeric()) {
            clean += &rest[..start];
            let token = &rest[start..];
            let end = token.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(token.len());
            let word = &token[..end];
            let digits = word.strip_prefix("0x").unwrap_or(word);
            let is_hex = digits.len() <= 16 && digits.chars().all(|c| c.is_ascii_hexdigit());
            let long = is_hex && (word.starts_with("0x") || digits.len() > 8);
            match (u64::from_str_radix(digits, 16), word.parse::<i64>()) {
                (Ok(number), _) if long => clean += &format!("{:#x}", self.address(number)),
                (_, Ok(number)) if self.processes.contains_key(&number) => {
                    clean += &self.process(number).to_string();
                }
                _ => clean += word,
            }
            rest = &token[end..];
        }
        clean + rest
    }
}

/// A varint of a protobuf, and where it ends.
fn varint(bytes: &[u8], start: usize) -> Option<(u64, usize)> {
    let mut number = 0u64;
    for (index, byte) in bytes.get(start..)?.iter().enumerate().take(10) {
        number |= u64::from(byte & 0x7f).checked_shl(7 * index as u32).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Some((number, start + index + 1));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_the_same_stand_in_everywhere() {
        let mut anonymiser = Anonymiser::default();
        let address = anonymiser.address(0x7ffd_1234_5678);
        assert_eq!(address & 0xfff, 0x678);
        assert_eq!(anonymiser.address(0x7ffd_1234_5000), address & !0xfff);
        assert_ne!(anonymiser.address(0x7ffd_1234_6000) & !0xfff, address & !0xfff);
        for kept in [0, 1, 0xffff, 0x1000_0000_0000, 0x0700_0000_0000] {
            assert_eq!(anonymiser.address(kept), kept);
        }
        assert_eq!([4711, 4712, 4711, -1, 0].map(|id| anonymiser.process(id)), [1, 2, 1, -1, 0]);
        let text = anonymiser.sentence("no page at va=0x7ffd12345678; hostpid=4712; size=4096, ffff888012345678.");
        assert_eq!(text, format!("no page at va={address:#x}; hostpid=2; size=4096, 0x600000002678."));
    }

    #[test]
    fn a_message_keeps_its_length() {
        let mut anonymiser = Anonymiser::default();
        // Kind 6; process 300 and a sign; device 1.
        let mut packet = vec![0; 12];
        packet.extend([0x10, 6, 0x72, 7, 0x08, 0xac, 0x02, 0x12, 2, b'0', b'0', 0x78, 1]);
        let before = packet.clone();
        anonymiser.message(&mut packet);
        assert_eq!(packet.len(), before.len());
        assert_eq!(packet[16..19], [0x08, 0x81, 0x00]);
        assert_eq!((&packet[..16], &packet[19..]), (&before[..16], &before[19..]));
        // Nothing that a packet can hold makes it panic.
        for cut in 0..packet.len() {
            anonymiser.message(&mut before[..cut].to_vec());
            anonymiser.message(&mut vec![0xff; cut]);
        }
    }
}
