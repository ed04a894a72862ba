//! Tables and colours for people.
//!
//! Colour only on a terminal, and not where `NO_COLOR` is set; what is read by another program is plain text.

use comfy_table::{CellAlignment, ContentArrangement, presets};
use std::io::IsTerminal;

pub use comfy_table::CellAlignment as Align;

/// A table that is printed at once.
pub struct Table(comfy_table::Table);

impl Table {
    /// A table with a header.
    pub fn new(header: &[&str]) -> Table {
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        table.set_header(header);
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        Table(table)
    }

    /// Aligns a column.
    pub fn align(&mut self, column: usize, alignment: CellAlignment) {
        if let Some(column) = self.0.column_mut(column) {
            column.set_cell_alignment(alignment);
        }
    }

    /// Adds a row.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.0.add_row(cells.into_iter().map(Into::into));
    }

    /// Prints it, with the words that say good and bad in colour where there is any.
    pub fn print(&self) {
        for line in self.0.lines() {
            crate::outln!("{}", paint(line.trim_end()));
        }
    }
}

/// Words whose colour says something.
const GREEN: [&str; 5] = ["working", "normal", "good", "yes", "ok"];
const YELLOW: [&str; 7] = ["starting", "sleeping", "minor", "kept", "warning", "skip", "resetting"];
const RED: [&str; 9] = ["exception", "lost", "removed", "major", "fatal", "MISSED", "FAIL", "no", "error"];

/// Colours the words of a line that say good and bad, on a terminal.
pub fn paint(line: &str) -> String {
    if !std::io::stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
        return line.to_owned();
    }
    painted(line)
}

fn painted(line: &str) -> String {
    let colour = |word: &str| match word {
        word if GREEN.contains(&word) => Some(32),
        word if YELLOW.contains(&word) => Some(33),
        word if RED.contains(&word) => Some(31),
        _ => None,
    };
    let mut text = String::with_capacity(line.len());
    for piece in line.split_inclusive(' ') {
        let word = piece.trim_end();
        match colour(word.trim_end_matches(':')) {
            Some(colour) => text += &format!("\x1b[{colour}m{word}\x1b[0m{}", &piece[word.len()..]),
            None => text += piece,
        }
    }
    text
}

/// A size for people.
pub fn bytes(size: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.into_iter().find(|(unit, _)| size >= *unit) {
        Some((unit, name)) if size % unit == 0 => format!("{} {name}", size / unit),
        Some((unit, name)) => format!("{:.1} {name}", size as f64 / unit as f64),
        None => format!("{size} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_words_are_painted_and_the_text_stays_the_same() {
        let line = "0  working  unknown  removed: nothing";
        let text = painted(line);
        assert_eq!(text, "0  \x1b[32mworking\x1b[0m  unknown  \x1b[31mremoved:\x1b[0m nothing");
    }

    #[test]
    fn sizes_are_written_as_people_do() {
        for (size, text) in
            [(0, "0 B"), (1023, "1023 B"), (2 << 20, "2 MiB"), (64 << 30, "64 GiB"), (3 << 29, "1.5 GiB")]
        {
            assert_eq!(bytes(size), text);
        }
    }
}
