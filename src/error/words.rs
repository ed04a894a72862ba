//! What this library's names are called for people who do not program in Rust.

/// Who reads an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// Somebody at a command line.
    Tool,
    /// Somebody who programs in Python.
    Python,
    /// Somebody who programs in C with the vendor's functions.
    C,
}

/// Parts of this library's texts with a name of Rust, and the same for each reader. A part that
/// contains another one comes first.
const WORDS: &[(&str, [&str; 3])] = &[
    (
        "Clone that session, or take it with Session::current()",
        ["End that use first", "Use Session.current()", "Finalize what opened it first"],
    ),
    (
        "SessionBuilder::allow_unknown_generation goes on",
        ["a program in Rust or Python can go on", "Session(allow_unknown_generation=True) goes on", "Rust can go on"],
    ),
    (
        "let the importer send BareTgid::of_this_process, or use share::send and share::receive",
        [
            "share over a Unix socket instead",
            "let the importer send Session.bare_tgid, or use ascend_vmm.send and ascend_vmm.receive",
            "let the importer send what aclrtDeviceGetBareTgid says",
        ],
    ),
    (
        "for another one, use Export::trust and a ticket",
        [
            "another one can import a ticket",
            "for another one, use Export.trust and a ticket",
            "for another one, use aclrtMemSetPidToShareableHandle",
        ],
    ),
    (
        "use this library's share::receive",
        ["receive it with this library", "use ascend_vmm.receive", "receive it with the Rust library"],
    ),
    ("use share::import", ["import it by that", "use Device.import_memory", "use aclrtMemImportFromShareableHandle"]),
    ("what Export::ticket made", ["the ticket that was printed", "what Export.ticket made", "what the exporter made"]),
    (
        "use Session::host for its memory",
        ["its memory needs no device", "use Session.host for its memory", "use aclrtMallocHost for its memory"],
    ),
    (
        "use Host::create_with for that",
        ["ask for memory of the host instead", "use Host.create for that", "use aclrtMallocHost for that"],
    ),
    (
        "Settings::give_up only says",
        ["the question only is", "a signal's handler only says", "the function that is asked only says"],
    ),
    (" (ReserveOptions::MAX_SIZE)", ["", "", ""]),
    (" (Pool::wake)", ["", " (Pool.wake)", ""]),
    (", or take the address out of it by Block::into_address", ["", "", ""]),
    (
        "Try the vendor's message order (device_process::Order::Vendor)",
        [
            "Find the message order that it takes (selftest --device-process)",
            "Find the message order that it takes (ascend-vmm selftest --device-process)",
            "Find the message order that it takes (ascend-vmm selftest --device-process)",
        ],
    ),
    ("; allow more time by device_process::Settings::limit", ["", "", ""]),
    (
        "use device_process::Policy::Never",
        ["use --device-process-policy never", "use Session(device_process=\"never\")", "keep that process"],
    ),
];

impl Reader {
    /// A text of this library in the words of this reader.
    ///
    /// ```
    /// use ascend_vmm::error::Reader;
    ///
    /// let text = "Wake it first (Pool::wake).";
    /// assert_eq!(Reader::Python.words(text), "Wake it first (Pool.wake).");
    /// assert_eq!(Reader::C.words(text), "Wake it first.");
    /// ```
    pub fn words(self, text: &str) -> String {
        WORDS.iter().fold(text.to_owned(), |text, (rust, words)| match text.contains(rust) {
            true => text.replace(rust, words[self as usize]),
            false => text,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// Texts of this library that have a Rust path in them.
    fn texts(directory: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() {
                texts(&entry, found);
            } else if !entry.ends_with("words.rs") {
                let source = fs::read_to_string(&entry).unwrap();
                let code = source.split("#[cfg(test)]").next().unwrap_or_default();
                // Lines that continue a text end with a backslash.
                // Attributes are for those who work on this library.
                let is_code = |line: &&str| !["//", "#["].iter().any(|mark| line.trim_start().starts_with(mark));
                let joined =
                    code.lines().filter(is_code).fold(String::new(), |text, line| match text.strip_suffix('\\') {
                        Some(text) => format!("{text}{}", line.trim_start()),
                        None => format!("{text}\n{line}"),
                    });
                for text in joined.lines().flat_map(|line| line.split('"').skip(1).step_by(2)) {
                    let is_path = |word: &str| {
                        word.split("::").count() > 1
                            && word.split("::").all(|part| part.starts_with(|c: char| c.is_ascii_alphabetic()))
                    };
                    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
                    if text.contains(' ') && words.map(|word| word.trim_matches(':')).any(is_path) {
                        found.push(text.to_owned());
                    }
                }
            }
        }
    }

    #[test]
    fn nobody_but_a_rust_programmer_reads_a_rust_path() {
        let mut found = Vec::new();
        texts(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        assert!(found.len() > 10, "{found:#?}");
        for text in &found {
            for reader in [Reader::Tool, Reader::Python, Reader::C] {
                let words = reader.words(text);
                assert!(!words.contains("::"), "{reader:?}: {words}");
            }
        }
        for (rust, _) in WORDS {
            assert!(found.iter().any(|text| text.contains(rust)), "no text has `{rust}`");
        }
    }
}
