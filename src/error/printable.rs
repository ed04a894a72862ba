//! Text that somebody else wrote, made fit for a terminal.

/// Text from a peer, the kernel, the device or a file, with each character escaped that could
/// control a terminal or reverse the text around it. Applied where such text enters the library, so
/// that errors, events and every field with such text are safe to print. Line breaks stay: where
/// one line is wanted, the caller joins them.
pub(crate) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\'' | '"' | '\\' => safe.push(character),
            _ => safe.extend(character.escape_debug()),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_controls_a_terminal_is_escaped_and_all_else_stays() {
        for text in ["", "it's \"C:\\x\"", "two\nlines", "größer, 漢字, 🙂", "\u{fffd}"] {
            assert_eq!(printable(text), text);
        }
        assert_eq!(printable("\x1b[31mred\x07\r\t\0"), "\\u{1b}[31mred\\u{7}\\r\\t\\0");
        // C1 controls, and what turns the direction of text or hides in it.
        assert_eq!(printable("\u{9b}31m\u{202e}kv\u{200b}\u{2028}"), "\\u{9b}31m\\u{202e}kv\\u{200b}\\u{2028}");
    }
}
