//! Recognises the driver's generation. Version strings are never compared, because the vendor's are
//! not ordered.
//!
//! The memory module is recognised by the numbers of its first commands, which moved, and by its
//! list of address segments; only if that fails, by the URD keys that the driver knows. The facts
//! are in each generation's record in `ascend-ioctl`, so a new generation needs no change here.

use super::svm::{Segment, Svm};
use super::urd::Urd;
use crate::error::{Errno, Error, Result};
use crate::id::LogicalId;
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{HOST_PIN_SIZE, Op};
use ascend_ioctl::urd::Key;

/// The numbers of a session's first commands in a generation.
fn numbers(generation: Generation) -> [Option<u8>; 2] {
    [Op::AllocProcStruct, Op::GetMmapInfo].map(|op| Some(generation.svm(op)?.command.number))
}

/// One generation for each set of numbers, the newest first. A driver answers EINVAL to the numbers
/// of another set, because they are too high for it or need a session.
pub(crate) fn families() -> Vec<Generation> {
    let mut families: Vec<Generation> = Vec::new();
    for generation in Generation::ALL.into_iter().rev() {
        if families.iter().all(|&known| numbers(known) != numbers(generation)) {
            families.push(generation);
        }
    }
    families
}

/// The generation of the memory driver, without making a process object of it, which
/// costs the kernel up to 145 MB.
pub(crate) fn memory_driver() -> Result<Generation> {
    let svm = Svm::open()?;
    for family in families() {
        match svm.get_mmap_info(family) {
            Ok(segments) => {
                return by_segments(family, &segments).ok_or_else(|| unknown(describe(family, &segments)));
            }
            Err(refused) if refused.errno == Errno::EINVAL => {}
            Err(refused) => return Err(refused.operation("read the driver's address segments").into()),
        }
    }
    Err(refused_everywhere(Op::GetMmapInfo))
}

/// The generation that has the numbers of `family` and these segments.
pub(crate) fn by_segments(family: Generation, segments: &[Segment]) -> Option<Generation> {
    Generation::ALL.into_iter().filter(|&generation| numbers(generation) == numbers(family)).find(|generation| {
        let record = generation.delta();
        let Some(rest) = segments.strip_prefix(record.segments) else { return false };
        match rest {
            [] => true,
            // The host-pin segment appears once a device has come up.
            [last] => record.host_pin && last.size == HOST_PIN_SIZE,
            _ => false,
        }
    })
}

/// The generation of the rest of the driver, by the keys that only some generations have. `Err`
/// names the keys that were found.
pub(crate) fn by_keys(urd: &Urd) -> Result<Generation, String> {
    let mut telling: Vec<(Key, bool)> = Vec::new();
    for key in Generation::ALL.iter().flat_map(|generation| generation.delta().urd_keys) {
        if telling.iter().all(|(seen, _)| seen != key) {
            telling.push((*key, urd.knows(key)));
        }
    }
    let fits = |generation: &Generation| {
        let keys = generation.delta().urd_keys;
        telling.iter().all(|(key, known)| keys.contains(key) == *known)
    };
    Generation::ALL.into_iter().find(fits).ok_or_else(|| {
        let word = |known| if known { "known" } else { "unknown" };
        let words = telling.iter().map(|(key, known)| format!("{:#x}/{} {}", key.main, key.sub, word(*known)));
        format!("URD key {}", words.collect::<Vec<_>>().join(", "))
    })
}

/// If the rest of the driver cannot have the memory driver's generation: one that it can have.
/// 9.0.0 and 26.1 are not distinguished, because they differ only in a key that the firmware
/// answers.
pub(crate) fn disagrees(urd: &Urd, device: LogicalId, memory: Generation) -> Option<Generation> {
    if !urd.lacks_published_values(device, memory) {
        return None;
    }
    Generation::ALL.into_iter().rev().find(|&other| !urd.lacks_published_values(device, other))
}

/// Describes a driver of no known generation.
pub(crate) fn describe(family: Generation, segments: &[Segment]) -> String {
    let [number, _] = numbers(family);
    let number = number.map_or_else(|| "unknown".to_owned(), |number| number.to_string());
    let mut text = format!("ALLOC_PROC_STRUCT is number {number}, and the address segments are");
    for segment in segments {
        text += &format!(" {:#x}+{:#x}", segment.start, segment.size);
    }
    text
}

/// The error for a driver that knows a command under none of its numbers.
pub(crate) fn refused_everywhere(op: Op) -> Error {
    let numbers = families().into_iter().filter_map(|family| Some(family.svm(op)?.command.number.to_string()));
    let numbers = numbers.collect::<Vec<_>>().join(" and ");
    unknown(format!("{} is refused under each of its known numbers ({numbers})", op.name()))
}

pub(crate) fn unknown(detected: String) -> Error {
    Error::UnknownGeneration { detected }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_ioctl::svm::{HOST_PIN_START_HCCS, HOST_PIN_START_PCIE};

    const PIN: Segment = Segment { start: HOST_PIN_START_PCIE, size: HOST_PIN_SIZE };

    fn segments_of(generation: Generation, pin: Option<Segment>) -> Vec<Segment> {
        generation.delta().segments.iter().copied().chain(pin).collect()
    }

    #[test]
    fn generations_are_told_apart_by_their_segments() {
        for generation in Generation::ALL {
            let hccs = Segment { start: HOST_PIN_START_HCCS, ..PIN };
            let pins = [None, Some(PIN), Some(hccs)];
            for pin in pins.into_iter().filter(|pin| pin.is_none() || generation.delta().host_pin) {
                assert_eq!(by_segments(generation, &segments_of(generation, pin)), Some(generation));
            }
        }
    }

    #[test]
    fn unfamiliar_segments_are_not_taken_for_a_known_generation() {
        let mut more = segments_of(Generation::V26_1, Some(PIN));
        more.push(PIN);
        assert_eq!(by_segments(Generation::V26_1, &more), None);
        assert_eq!(by_segments(Generation::V8_5_0, &segments_of(Generation::V9_0_0, Some(PIN))), None);
        assert_eq!(by_segments(Generation::V26_1, &[]), None);
        let text = unknown(describe(Generation::V26_1, &more)).to_string();
        assert!(text.contains("number 101") && text.contains("0x100000000000+0x80000000000"), "{text}");
        assert!(text.contains("8.5.0, 9.0.0, 26.1"), "{text}");
    }

    #[test]
    fn the_newest_numbers_are_tried_first() {
        assert_eq!(families(), [Generation::V26_1, Generation::V8_5_0]);
        let text = refused_everywhere(Op::AllocProcStruct).to_string();
        assert!(text.contains("(101 and 67)"), "{text}");
    }
}
