//! `ascend-vmm probe`: lists the NPUs, what they can be used for, and what is wrong.
//!
//! Without `--open` only queries without side effects are made: there is no memory session and no
//! device process. So it can say that something does not work, and not that it works: for that each
//! device must be opened and tried (`probe/trial.rs`).

mod document;
mod holders;
mod text;
mod trial;

use crate::terminal;
use ascend_vmm::discovery::{self, Options};
use document::Document;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Options of `probe`.
#[derive(clap::Args)]
#[command(after_help = "A capability is `yes` if everything that it needs was seen to work, `no` with the reason,\n\
                        or `?` with the command that finds out.\n\n\
                        Exit status: 0 every device is usable as far as was looked, 1 something is wrong,\n\
                        3 there is no device, 2 wrong arguments.\n\n\
                        Examples:\n  ascend-vmm probe\n  ascend-vmm probe --open\n  \
                        ascend-vmm probe --json | jq '.devices[].identity'")]
pub struct Probe {
    /// Print JSON instead of text (docs/hosts.md). With --watch, one document per line.
    #[arg(long)]
    json: bool,
    /// Also open each device, which may start a process on it, and try everything with a few MiB
    /// (1 GiB for the pages of that size).
    #[arg(long)]
    open: bool,
    /// Print one line with all columns for each device, however wide.
    #[arg(long, conflicts_with = "json")]
    wide: bool,
    /// Repeat after this many seconds, until interrupted, and show what changes: memory, states,
    /// processes, what is wrong. On a terminal the text is redrawn.
    #[arg(long, value_name = "SECONDS", conflicts_with = "open")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    watch: Option<u64>,
    /// How long all of it may take, in seconds: 10 by default, 60 with --open. After the driver was
    /// loaded, the first question may wait for devices for 160.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: Option<u64>,
    /// Where the host's /proc, /sys and /etc are, if not here: in a container that has the host's
    /// root directory mounted.
    #[arg(long, value_name = "DIRECTORY", default_value = "/")]
    root: PathBuf,
}

/// Exit status: something is wrong.
const PROBLEM: u8 = 1;
/// Exit status: no device.
const NO_DEVICE: u8 = 3;

impl Probe {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        if let Err(error) = std::fs::read_dir(&self.root) {
            return crate::impossible(format!("--root {} cannot be read: {error}", self.root.display()));
        }
        if let Some(seconds) = self.watch {
            self.watch(Duration::from_secs(seconds));
        }
        let document = self.look();
        if self.json {
            crate::print_json(&document);
        } else {
            for line in self.lines(&document) {
                crate::outln!("{}", terminal::paint(&line));
            }
        }
        match (document.devices.is_empty(), document.is_healthy()) {
            (true, _) => ExitCode::from(NO_DEVICE),
            (false, false) => ExitCode::from(PROBLEM),
            (false, true) => ExitCode::SUCCESS,
        }
    }

    fn look(&self) -> Document {
        let timeout = Duration::from_secs(self.timeout.unwrap_or(if self.open { 60 } else { 10 }));
        let until = Instant::now() + timeout;
        let options = Options::default().timeout(timeout).root(&self.root);
        let waiting = self.watch.is_none().then(|| terminal::waiting("asking the driver")).flatten();
        let survey = discovery::survey(&options);
        if let Some(waiting) = waiting {
            waiting.finish_and_clear();
        }
        let trials = self.open.then(|| trial::run(&survey, until));
        Document::new(&survey, trials, holders::read(&self.root))
    }

    fn lines(&self, document: &Document) -> Vec<String> {
        match (self.wide, self.watch) {
            (true, _) => text::wide(document),
            (false, Some(_)) => text::watched(document, terminal::width()),
            (false, None) => text::lines(document, terminal::width()),
        }
    }

    /// Looks again and again, until a signal or a closed pipe ends this process.
    fn watch(&self, pause: Duration) -> ! {
        loop {
            let begun = Instant::now();
            let document = self.look();
            if self.json {
                match serde_json::to_string(&document) {
                    Ok(line) => crate::outln!("{line}"),
                    Err(error) => crate::errln!("error: {error}"),
                }
                std::thread::sleep(pause.saturating_sub(begun.elapsed()));
                continue;
            }
            let terminal = std::io::stdout().is_terminal() && !terminal::is_dumb();
            let mut drawn = None;
            loop {
                // Drawn again when the terminal gets another size.
                let size = terminal::size();
                if drawn != Some(size) {
                    draw(&self.lines(&document), terminal.then_some(size).flatten(), pause);
                    drawn = Some(size);
                }
                let left = pause.saturating_sub(begun.elapsed());
                if left.is_zero() {
                    break;
                }
                std::thread::sleep(left.min(Duration::from_millis(200)));
            }
        }
    }
}

/// Draws a picture of `--watch`: over the last one on a terminal of this size, below it elsewhere.
fn draw(lines: &[String], size: Option<(usize, usize)>, pause: Duration) {
    let Some((rows, _)) = size else {
        for line in lines {
            crate::outln!("{line}");
        }
        crate::outln!();
        return;
    };
    let title = format!("every {} s; Ctrl-C ends", pause.as_secs());
    let mut picture = String::from("\x1b[H");
    let room = rows.saturating_sub(2).max(1);
    let cut = lines.len() > room;
    let shown = if cut { room.saturating_sub(1) } else { lines.len() };
    for line in std::iter::once(&title).chain(&lines[..shown]) {
        picture += &format!("{}\x1b[K\n", terminal::paint(line));
    }
    if cut {
        picture += &format!("… {}\x1b[K\n", terminal::counted(lines.len() - shown, "more line"));
    }
    picture += "\x1b[J";
    let mut output = std::io::stdout();
    if output.write_all(picture.as_bytes()).and_then(|()| output.flush()).is_err() {
        std::process::exit(crate::OUTPUT_CLOSED);
    }
}
