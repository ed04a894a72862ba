//! Output for people: tables, lines that fit the terminal, colours and counts.
//!
//! There is colour only on a terminal, and not if `NO_COLOR` is set, `CLICOLOR` is 0 or `TERM` is
//! `dumb`. A pipe gets plain text of 80 columns.

use indicatif::{ProgressBar, ProgressStyle};
use std::ffi::OsStr;
use std::io::IsTerminal;
use std::time::Duration;

/// Width where there is no terminal.
const WIDTH: usize = 80;

/// The narrowest width that lines are broken for. Below it they overflow.
const NARROWEST: usize = 20;

/// Columns to write: those of `COLUMNS`, those of the terminal, or 80.
pub fn width() -> usize {
    let variable = std::env::var("COLUMNS").ok().and_then(|columns| columns.trim().parse().ok());
    let columns = variable.filter(|columns| *columns > 0).or_else(|| size().map(|(_, columns)| columns));
    columns.unwrap_or(WIDTH).max(NARROWEST)
}

/// Rows and columns of the terminal on the standard output.
pub fn size() -> Option<(usize, usize)> {
    let (rows, columns) = console::Term::stdout().size_checked()?;
    (rows > 0 && columns > 0).then_some((rows.into(), columns.into()))
}

/// Text in lines of at most `width` columns, broken between words: the first begins with `first`,
/// the others with `rest`. A word that is longer than a line overflows.
pub fn wrap(text: &str, width: usize, first: &str, rest: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = first.to_owned();
    let mut empty = true;
    for word in text.split_whitespace() {
        let columns = |text: &str| text.chars().count();
        if !empty && columns(&line) + 1 + columns(word) > width {
            lines.push(std::mem::replace(&mut line, rest.to_owned()));
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    lines.push(line);
    lines
}

/// A table with aligned columns and no lines. Where it is too wide for the terminal, columns of
/// names are cut in their middle, or else its widest column is broken between words.
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<usize>,
    names: Vec<usize>,
}

/// The space between two columns.
const GAP: usize = 2;

/// The narrowest that a column is broken to.
const NARROW_COLUMN: usize = 16;

/// The narrowest that a column of names is cut to.
const NARROW_NAME: usize = 5;

impl Table {
    /// A table with a header.
    pub fn new(header: &[&str]) -> Table {
        Table {
            rows: vec![header.iter().map(|title| (*title).to_owned()).collect()],
            right: Vec::new(),
            names: Vec::new(),
        }
    }

    /// Makes a column one of names: they are cut where the table is too wide.
    pub fn cut(&mut self, column: usize) {
        self.names.push(column);
    }

    /// Aligns a column to the right.
    pub fn align_right(&mut self, column: usize) {
        self.right.push(column);
    }

    /// Adds a row.
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// The lines of the table, of at most `width` columns if its words allow that.
    pub fn lines(&self, width: usize) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let of_column = |column| self.rows.iter().filter_map(move |row: &Vec<String>| row.get(column));
        let mut widths: Vec<usize> =
            (0..columns).map(|column| of_column(column).map(|cell| cell.chars().count()).max().unwrap_or(0)).collect();
        let mut total = widths.iter().sum::<usize>() + GAP * columns.saturating_sub(1);
        while total > width {
            // The widest of them, so that several become narrow together.
            let widest = self.names.iter().copied().filter(|column| *column < columns).max_by_key(|it| widths[*it]);
            let Some(widest) = widest.filter(|column| widths[*column] > NARROW_NAME) else { break };
            widths[widest] -= 1;
            total -= 1;
        }
        let widest = (0..columns).filter(|column| !self.names.contains(column)).max_by_key(|column| widths[*column]);
        if let Some(widest) = widest.filter(|widest| total > width && widths[*widest] > NARROW_COLUMN) {
            widths[widest] = widths[widest].saturating_sub(total - width).max(NARROW_COLUMN);
        }
        let mut lines = Vec::new();
        for row in &self.rows {
            let broken = |(column, cell): (usize, &String)| match widest == Some(column) {
                true => wrap(cell, widths[column], "", ""),
                false if self.names.contains(&column) => vec![cut(cell, widths[column])],
                false => vec![cell.clone()],
            };
            let cells: Vec<Vec<String>> = row.iter().enumerate().map(broken).collect();
            for line in 0..cells.iter().map(Vec::len).max().unwrap_or(0) {
                let mut text = String::new();
                for (column, cell) in cells.iter().enumerate() {
                    let (cell, width) = (cell.get(line).map_or("", String::as_str), widths[column]);
                    text += &match self.right.contains(&column) {
                        true => format!("{cell:>width$}{:GAP$}", ""),
                        false => format!("{cell:<width$}{:GAP$}", ""),
                    };
                }
                lines.push(text.trim_end().to_owned());
            }
        }
        lines
    }

    /// Prints the table, coloured as [`paint`] does.
    pub fn print(&self) {
        for line in self.lines(width()) {
            crate::outln!("{}", paint(&line));
        }
    }
}

/// A name of at most `width` characters: the first and the last ones tell names apart.
fn cut(name: &str, width: usize) -> String {
    let characters: Vec<char> = name.chars().collect();
    if characters.len() <= width {
        return name.to_owned();
    }
    let last = width.saturating_sub(1) / 2;
    let first = width.saturating_sub(1) - last;
    let part = |characters: &[char]| characters.iter().collect::<String>();
    format!("{}…{}", part(&characters[..first]), part(&characters[characters.len() - last..]))
}

/// A bar on the standard error for work of this many steps, with rate and remaining time.
/// There is none if that is no terminal.
pub fn steps(label: &str, number: u64) -> ProgressBar {
    styled(ProgressBar::new(number), "{msg:24} {wide_bar} {pos}/{len}  {per_sec}, {eta} left", label)
}

/// As [`steps`], for bytes.
pub fn transfer(label: &str, bytes: u64) -> ProgressBar {
    styled(ProgressBar::new(bytes), "    {msg:20} {wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}, {eta} left", label)
}

/// True if a terminal understands no control sequences.
pub fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|term| term == "dumb")
}

/// A moving sign on the standard error for a wait of unknown length, if that is a terminal.
pub fn waiting(label: &str) -> Option<ProgressBar> {
    (std::io::stderr().is_terminal() && !is_dumb()).then(|| {
        let bar = styled(ProgressBar::new_spinner(), "{spinner} {msg}, {elapsed}", label);
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    })
}

fn styled(bar: ProgressBar, template: &str, label: &str) -> ProgressBar {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.with_message(label.to_owned())
}

/// Words that are coloured, by colour.
const GREEN: [&str; 4] = ["working", "normal", "yes", "ok"];
const YELLOW: [&str; 8] = ["starting", "sleeping", "minor", "kept", "warning:", "skip", "resetting", "?"];
const RED: [&str; 9] = ["exception", "lost", "removed", "major", "fatal", "fatal:", "MISSED", "FAIL", "no"];

/// Colours the words of a line that mean good or bad, if the output is a terminal. Only words of
/// tables and at the start of a line are painted: in a sentence they mean something else.
pub fn paint(line: &str) -> String {
    let set = |name: &str, to: &dyn Fn(&OsStr) -> bool| std::env::var_os(name).is_some_and(|value| to(&value));
    let unwanted = set("NO_COLOR", &|value| !value.is_empty()) || set("CLICOLOR", &|value| value == "0");
    if !std::io::stdout().is_terminal() || unwanted || is_dumb() {
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
    // A cell is what stands between two spaces or more, or at the start of a line.
    let mut alone = true;
    let mut pieces = line.split_inclusive(' ').peekable();
    while let Some(piece) = pieces.next() {
        let word = piece.trim_end();
        if word.is_empty() {
            text += piece;
            alone = true;
            continue;
        }
        let ends = pieces.peek().is_none_or(|next| next.trim_end().is_empty());
        let starts_line = text.trim().is_empty();
        match colour(word).filter(|_| starts_line || (alone && ends)) {
            Some(colour) => text += &format!("\x1b[{colour}m{word}\x1b[0m{}", &piece[word.len()..]),
            None => text += piece,
        }
        alone = false;
    }
    text
}

/// A number with its noun: `1 NPU`, `2 NPUs`.
pub fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A list of devices by their ids: `device 0`, `devices 0, 1`, `devices 0 to 7`.
pub fn devices(ids: &[u32]) -> String {
    let in_order = ids.len() > 2 && ids.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]));
    let list = match ids {
        [first, .., last] if in_order => format!("{first} to {last}"),
        _ => ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
    };
    format!("device{} {list}", if ids.len() == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular_and_everything_else_is_plural() {
        assert_eq!([0, 1, 2].map(|number| counted(number, "NPU")), ["0 NPUs", "1 NPU", "2 NPUs"]);
        assert_eq!(devices(&[3]), "device 3");
        assert_eq!(devices(&[0, 3]), "devices 0, 3");
        assert_eq!(devices(&[0, 1, 2, 3]), "devices 0 to 3");
        assert_eq!(devices(&[0, 1, 3]), "devices 0, 1, 3");
    }

    #[test]
    fn words_are_painted_as_cells_and_at_the_start_and_not_in_sentences() {
        let line = "0  working  unknown  removed";
        assert_eq!(painted(line), "0  \x1b[32mworking\x1b[0m  unknown  \x1b[31mremoved\x1b[0m");
        assert_eq!(painted("FAIL  there is no device"), "\x1b[31mFAIL\x1b[0m  there is no device");
        assert_eq!(painted("fatal: no such node"), "\x1b[31mfatal:\x1b[0m no such node");
        for line in ["a device that is lost again", "  page  no such thing", ""] {
            assert_eq!(painted(line), line);
        }
    }

    #[test]
    fn text_is_broken_between_words_and_a_long_word_overflows() {
        assert_eq!(wrap("one two three", 9, "- ", "  "), ["- one two", "  three"]);
        assert_eq!(wrap("unbreakable yes", 5, "", ""), ["unbreakable", "yes"]);
        assert_eq!(wrap("", 5, "x", ""), ["x"]);
    }

    #[test]
    fn names_are_cut_in_their_middle_where_the_terminal_is_narrow() {
        let mut table = Table::new(&["name", "n", "other"]);
        table.cut(0);
        table.cut(2);
        table.row(["llama-70b/tp0/weights", "1", "second name"]);
        assert_eq!(table.lines(40), ["name                   n  other", "llama-70b/tp0/weights  1  second name"]);
        // The columns share what is missing.
        assert_eq!(table.lines(24), ["name        n  other", "llama…ghts  1  seco…name"]);
        // Narrower than the names can be cut: it overflows, and does not fail.
        assert_eq!(table.lines(1)[1], "ll…ts  1  se…me");
        assert_eq!(cut("straße", 4), "st…e");
    }

    #[test]
    fn the_widest_column_is_broken_where_the_terminal_is_narrow() {
        let mut table = Table::new(&["n", "text"]);
        table.align_right(0);
        table.row(["10", "some words that are too long"]);
        table.row(["9", "short"]);
        assert_eq!(table.lines(80), [" n  text", "10  some words that are too long", " 9  short"]);
        assert_eq!(table.lines(20), [" n  text", "10  some words that", "    are too long", " 9  short"]);
        // Narrower than its words: it overflows, and does not fail.
        assert_eq!(table.lines(1), table.lines(20));
        let mut table = Table::new(&["what was measured", "n"]);
        table.row(["some words that are too long", "1"]);
        assert_eq!(table.lines(22), ["what was measured    n", "some words that are  1", "too long"]);
    }
}
