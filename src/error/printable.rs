//! Text from others, made safe for a terminal.

use std::path::Path;

/// Escapes each character that could control a terminal or reverse the text around it. Applied
/// where text of a peer, the kernel, the device or a file enters the library, so that errors,
/// events and fields are safe to print. Line breaks stay.
///
/// ```
/// assert_eq!(ascend_vmm::error::printable("red\x1b[31m\n"), "red\\u{1b}[31m\n");
/// ```
pub fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\'' | '"' | '\\' => safe.push(character),
            _ => safe.extend(character.escape_debug()),
        }
    }
    safe
}

/// A path, which may contain anything but NUL, as one line.
pub(crate) fn printable_path(path: &Path) -> String {
    printable(&path.to_string_lossy()).replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Errno, Error, Finding, OpenFailed, ProcessFailure};

    #[test]
    fn no_path_in_an_error_or_a_finding_controls_a_terminal() {
        let path = Path::new("/dev/\x1b[31m\u{202e}\u{9b}a\nb");
        let owned = || path.to_owned();
        let said = [
            Error::from(OpenFailed { path: path.to_owned(), errno: Errno::EACCES }).to_string(),
            ProcessFailure::Node { path: owned(), errno: Errno::EIO }.to_string(),
            Finding::NodeMissing(owned()).to_string(),
            Finding::StaleNode(owned()).to_string(),
            Finding::Forbidden(owned()).to_string(),
            Finding::Denied(owned()).to_string(),
            Finding::Unopenable(owned(), Errno::EIO).to_string(),
        ];
        for text in said {
            assert!(text.contains(r"/dev/\u{1b}[31m\u{202e}\u{9b}a\nb"), "{text}");
            assert!(!text.contains(['\x1b', '\u{202e}', '\u{9b}']), "{text}");
        }
    }

    #[test]
    fn characters_that_control_a_terminal_are_escaped_and_others_stay() {
        for text in ["", "it's \"C:\\x\"", "two\nlines", "größer, 漢字, 🙂", "\u{fffd}"] {
            assert_eq!(printable(text), text);
        }
        assert_eq!(printable("\x1b[31mred\x07\r\t\0"), "\\u{1b}[31mred\\u{7}\\r\\t\\0");
        // C1 controls, and what turns the direction of text or hides in it.
        assert_eq!(printable("\u{9b}31m\u{202e}kv\u{200b}\u{2028}"), "\\u{9b}31m\\u{202e}kv\\u{200b}\\u{2028}");
    }
}
