//! Which generation the traced driver is of, from the calls alone.
//!
//! The library asks the driver; here its answers to the traced program must do. The rules are the
//! same: numbers that moved, the list of address segments, URD keys that only some generations
//! have. Until the calls tell, several generations are possible, and a number above 65 of the
//! memory module may have several names.

use ascend_emulator::record::{self, Record, bytes};
use ascend_ioctl::svm::{HOST_PIN_SIZE, Op, Segment};
use ascend_ioctl::{Command, Generation, command};

/// The generations that the driver may be of.
#[derive(Debug, Clone)]
pub struct Recogniser {
    possible: Vec<Generation>,
}

impl Recogniser {
    /// Nothing is known, or the user said it.
    pub fn new(given: Option<Generation>) -> Self {
        Recogniser { possible: given.map_or_else(|| Generation::ALL.to_vec(), |generation| vec![generation]) }
    }

    /// The generations that the calls do not rule out, oldest first.
    pub fn possible(&self) -> &[Generation] {
        &self.possible
    }

    /// The generation, or the newest of those that are possible.
    pub fn best(&self) -> Generation {
        self.possible.last().copied().unwrap_or(Generation::NEWEST)
    }

    /// The command of a request as far as it can be told before its answer. Where it may be the one
    /// that lists the address segments, it is taken for that, so that the list is read.
    pub fn provisional(&self, module: &str, request: u32) -> Option<&'static Command> {
        let named = |generation: &Generation| record::command(*generation, module, request);
        let lists = self.possible.iter().find_map(|it| named(it).filter(|it| it.name == Op::GetMmapInfo.name()));
        lists.or_else(|| named(&self.best()))
    }

    /// The name of a request, if all possible generations agree on it.
    pub fn name(&self, module: &str, request: u32) -> Option<Option<&'static str>> {
        let mut names = self.possible.iter().map(|it| record::command(*it, module, request).map(|it| it.name));
        let first = names.next()?;
        names.all(|name| name == first).then_some(first)
    }

    /// Keeps the generations that fit. What fits none is not a rule that we know, and is ignored.
    fn keep(&mut self, fits: impl Fn(Generation) -> bool) {
        if self.possible.len() > 1 && self.possible.iter().any(|it| fits(*it)) {
            self.possible.retain(|it| fits(*it));
        }
    }

    /// Learns from a call and its answer.
    pub fn observe(&mut self, module: &str, request: u32, record: &Record) {
        if self.possible.len() < 2 {
            return;
        }
        let done = record.errno.is_none();
        match module {
            "SVM" => self.observe_memory(command::number(request), done, record),
            "URD" if record.cmd == Some("URD") => {
                let Some(argument) = record.in_hex.as_deref().and_then(|text| bytes(text, 64)) else { return };
                let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| argument[at + byte]));
                let key = (word(8), word(12));
                let known = record.errno.as_deref() != Some("EOPNOTSUPP");
                let telling = Generation::ALL.iter().flat_map(|generation| generation.delta().urd_keys);
                if telling.into_iter().any(|it| (it.main, it.sub) == key) {
                    self.keep(|it| it.delta().urd_keys.iter().any(|it| (it.main, it.sub) == key) == known);
                }
            }
            _ => {}
        }
    }

    fn observe_memory(&mut self, number: u8, done: bool, record: &Record) {
        let is = |generation: Generation, op: Op| generation.svm(op).is_some_and(|it| it.command.number == number);
        if done {
            self.keep(|it| it.svm_by_number(number).is_some());
            let segments = record.buffers.iter().find(|buffer| buffer.field == "array").and_then(segments);
            if let Some(segments) = segments {
                self.keep(|it| is(it, Op::GetMmapInfo) && fits(it, &segments));
            }
        } else if record.errno.as_deref() == Some("EINVAL") {
            // A driver answers EINVAL to the numbers that these have elsewhere: they are too high
            // for it, or need a session.
            self.keep(|it| !is(it, Op::AllocProcStruct) && !is(it, Op::GetMmapInfo));
        }
    }
}

fn segments(buffer: &record::Buffer) -> Option<Vec<Segment>> {
    let text = buffer.out_hex.as_deref()?;
    let bytes = bytes(text, (text.len() / 2).next_multiple_of(16))?;
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    let segments = bytes.chunks_exact(16).map(|it| Segment { start: word(&it[..8]), size: word(&it[8..]) });
    Some(segments.filter(|segment| segment.size != 0).collect())
}

fn fits(generation: Generation, segments: &[Segment]) -> bool {
    let record = generation.delta();
    match segments.strip_prefix(record.segments) {
        Some([]) => true,
        // The host-pin segment is there once a device has come up.
        Some([last]) => record.host_pin && last.size == HOST_PIN_SIZE,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_emulator::record::{Buffer, hex};

    fn request(generation: Generation, op: Op) -> u32 {
        generation.svm(op).unwrap().command.request()
    }

    fn answer(errno: Option<&str>, segments: &[Segment]) -> Record {
        let words = segments.iter().flat_map(|it| [it.start, it.size]).flat_map(u64::to_le_bytes);
        let array =
            Buffer { field: "array".into(), out_hex: Some(hex(&words.collect::<Vec<u8>>())), ..Buffer::default() };
        Record { errno: errno.map(str::to_owned), buffers: vec![array], ..Record::default() }
    }

    #[test]
    fn the_answer_to_the_segment_list_tells_the_generation() {
        for generation in Generation::ALL {
            let mut recogniser = Recogniser::new(None);
            let list = request(generation, Op::GetMmapInfo);
            recogniser.observe("SVM", list, &answer(None, generation.delta().segments));
            assert_eq!(recogniser.possible(), [generation]);
            assert_eq!(recogniser.name("SVM", list), Some(Some("GET_MMAP_INFO")));
        }
    }

    #[test]
    fn a_refused_number_rules_out_the_generations_that_have_it() {
        let mut recogniser = Recogniser::new(None);
        let newest = request(Generation::V26_1, Op::AllocProcStruct);
        assert_eq!(recogniser.name("SVM", newest), None);
        recogniser.observe("SVM", newest, &answer(Some("EINVAL"), &[]));
        assert_eq!(recogniser.possible(), [Generation::V8_5_0]);
        assert_eq!(recogniser.name("SVM", newest), Some(None));
    }

    #[test]
    fn what_fits_no_generation_rules_out_none() {
        let mut recogniser = Recogniser::new(None);
        let list = request(Generation::V26_1, Op::GetMmapInfo);
        recogniser.observe("SVM", list, &answer(None, &[Segment { start: 1, size: 2 }]));
        assert_eq!(recogniser.possible(), [Generation::V9_0_0, Generation::V26_1]);
        assert_eq!(recogniser.best(), Generation::V26_1);
    }
}
