//! Output for people: tables, colours, sizes and counts.
//!
//! There is colour only on a terminal, and not if `NO_COLOR` is set. A pipe gets plain text.

use comfy_table::{CellAlignment, ContentArrangement, presets};
use std::io::IsTerminal;

pub use comfy_table::CellAlignment as Align;

/// A table with aligned columns and no lines.
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

    /// Prints the table, coloured as [`paint`] does.
    pub fn print(&self) {
        for line in self.0.lines() {
            crate::outln!("{}", paint(line.trim_end()));
        }
    }
}

/// Words that are coloured, by colour.
const GREEN: [&str; 5] = ["working", "normal", "good", "yes", "ok"];
const YELLOW: [&str; 7] = ["starting", "sleeping", "minor", "kept", "warning", "skip", "resetting"];
const RED: [&str; 9] = ["exception", "lost", "removed", "major", "fatal", "MISSED", "FAIL", "no", "error"];

/// Colours the words of a line that mean good or bad, if the output is a terminal.
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

/// A size with its unit.
pub fn bytes(size: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.into_iter().find(|(unit, _)| size >= *unit) {
        Some((unit, name)) if size % unit == 0 => format!("{} {name}", size / unit),
        Some((unit, name)) => format!("{:.1} {name}", size as f64 / unit as f64),
        None => format!("{size} B"),
    }
}

/// A number with its noun: `1 NPU`, `2 NPUs`.
pub fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A list of devices by their ids: `device 0`, `devices 0, 1`.
pub fn devices(ids: &[u32]) -> String {
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    format!("device{} {}", if ids.len() == 1 { "" } else { "s" }, list.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular_and_everything_else_is_plural() {
        assert_eq!([0, 1, 2].map(|number| counted(number, "NPU")), ["0 NPUs", "1 NPU", "2 NPUs"]);
        assert_eq!(devices(&[3]), "device 3");
        assert_eq!(devices(&[0, 3]), "devices 0, 3");
    }

    #[test]
    fn only_whole_words_are_painted_and_the_text_stays_the_same() {
        let line = "0  working  unknown  removed: nothing";
        let text = painted(line);
        assert_eq!(text, "0  \x1b[32mworking\x1b[0m  unknown  \x1b[31mremoved:\x1b[0m nothing");
    }

    #[test]
    fn sizes_have_the_largest_unit_that_fits() {
        for (size, text) in
            [(0, "0 B"), (1023, "1023 B"), (2 << 20, "2 MiB"), (64 << 30, "64 GiB"), (3 << 29, "1.5 GiB")]
        {
            assert_eq!(bytes(size), text);
        }
    }
}
