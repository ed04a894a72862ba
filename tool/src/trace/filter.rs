//! `-e`: which calls are written as text.

use super::decode;
use ascend_emulator::record::buffer::KEYS;
use ascend_emulator::record::{CALLS, Record};
use ascend_ioctl::{Generation, layout};
use std::str::FromStr;

/// Modules, calls and outcomes; or all but these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    excludes: bool,
    words: Vec<String>,
}

/// The driver's modules that a trace can name, besides those that the trace itself names.
const MODULES: [&str; 7] = ["SVM", "DEVMNG", "URD", "uda", "hdc", "TSDRV", "ESCHED"];

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Filter, String> {
        let (excludes, words) = match text.strip_prefix('!') {
            Some(words) => (true, words),
            None => (false, text),
        };
        let words: Vec<String> = words.split(',').map(|word| word.trim().to_owned()).collect();
        match words.iter().find(|word| !is_known(word)) {
            None => Ok(Filter { excludes, words }),
            Some(word) => Err(format!(
                "`{word}` is no module ({}), no call such as open or MEM_MAP, and no outcome (ok, failed, or an errno)",
                MODULES.join(", ")
            )),
        }
    }
}

/// False for a word that no call could fit.
fn is_known(word: &str) -> bool {
    let commands = || Generation::ALL.into_iter().flat_map(layout::commands).map(|command| command.name);
    let known = ["ok", "failed"].into_iter().chain(MODULES).chain(CALLS).chain(KEYS.iter().map(|(name, _)| *name));
    let is_upper = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit();
    let is_errno = word.len() > 2 && word.starts_with('E') && word.bytes().all(is_upper);
    is_errno || known.chain(commands()).any(|name| fits(name, word))
}

/// True if a name is the word, in which `*` stands for anything. Upper and lower case are the same.
fn fits(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_ascii_lowercase(), word.to_ascii_lowercase());
    let mut parts = word.split('*');
    let (first, last) = (parts.next().unwrap_or_default(), parts.next_back());
    let Some(last) = last else { return name == word };
    let Some(mut rest) = name.strip_prefix(first).and_then(|rest| rest.strip_suffix(last)) else { return false };
    parts.all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

impl Filter {
    /// True if the call is written.
    pub fn passes(&self, record: &Record, module: &str) -> bool {
        let name = decode::name(record, module);
        // `URD CHIP_INFO` is a key of the module's one command.
        let key = name.split_once(' ').map_or("", |(_, key)| key);
        let outcome = if decode::has_failed(record) { "failed" } else { "ok" };
        let errno = record.errno.as_deref().unwrap_or_default();
        let names = [module, record.call, &name, key, outcome, errno];
        self.words.iter().any(|word| names.iter().any(|name| !name.is_empty() && fits(name, word))) != self.excludes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_fit_modules_calls_and_outcomes() {
        let map = Record { call: "ioctl", cmd: Some("MEM_MAP"), ..Record::default() };
        let refused = Record { errno: Some("ENOMEM".into()), ..map.clone() };
        let passes = |filter: &str, record: &Record| filter.parse::<Filter>().unwrap().passes(record, "SVM");
        for filter in ["SVM", "svm", "mem_map", "MEM_*", "*", "M*M*AP", "URD,SVM", "ok", "!URD", "!failed", "ioctl"] {
            assert!(passes(filter, &map), "{filter}");
        }
        for filter in ["URD", "MEM_UNMAP", "MEM_*E", "failed", "ENOMEM", "!SVM", "!URD,MEM_*", "open"] {
            assert!(!passes(filter, &map), "{filter}");
        }
        assert!(passes("failed", &refused) && passes("ENOMEM", &refused) && !passes("ok", &refused));
        let absent = Record {
            call: "open",
            path: Some("/dev/davinci7".into()),
            errno: Some("ENOENT".into()),
            ..Record::default()
        };
        assert!(passes("ok", &absent) && passes("ENOENT", &absent) && passes("open", &absent));
        assert!(!passes("failed", &absent), "a search for nodes is no failure");
        for word in ["", "MEM_MPA", "SVM,", "!", "e*nothing", "Enomem"] {
            assert!(word.parse::<Filter>().is_err(), "{word}");
        }
    }

    #[test]
    fn a_star_stands_for_anything() {
        for (name, word, fit) in [
            ("abc", "a*c", true),
            ("abc", "*", true),
            ("abc", "**", true),
            ("ab", "ab*b", false),
            ("abab", "*ab*ab", true),
            ("aba", "ab*ba", false),
            ("", "*", true),
        ] {
            assert_eq!(fits(name, word), fit, "{name} {word}");
        }
    }
}
