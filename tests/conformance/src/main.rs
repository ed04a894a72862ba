//! `ascend-conformance`: checks the kernel driver's rules on this host and prints a line for each.

use ascend_conformance::{Options, Outcome, Report, rules, run};
use std::process::exit;
use std::time::Duration;

const USAGE: &str = "\
usage: ascend-conformance [OPTION]... [PART]...

Checks the rules of the Ascend kernel driver by system calls alone. With PARTs, only rules whose name
or citation (the kernel function that decides, and its file) contains one of them.

  --list            print each rule, its evidence and its citation, and check nothing
  --quiet           print failures and the summary only
  --times           print how long each rule took
  --exhaustion      also rules that use up all memory of a device, or a whole list, for a moment, or may
                    cost memory until the driver is loaded anew
  --patience        also rules that make tens of thousands of calls
  --timeout SECONDS how long a rule may take (60)
  --help            this text

Exit status: 0 all rules passed, 1 some failed, 2 bad usage, 3 no device.";

fn main() {
    let mut options = Options::default();
    let (mut quiet, mut times) = (false, false);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--help" | "-h" => {
                println!("{USAGE}");
                return;
            }
            "--list" => return list(),
            "--quiet" | "-q" => quiet = true,
            "--times" => times = true,
            "--exhaustion" => options.exhaustion = true,
            "--patience" => options.patience = true,
            "--timeout" => match words.next().and_then(|seconds| seconds.parse().ok()) {
                Some(seconds) if seconds > 0 => options.timeout = Duration::from_secs(seconds),
                _ => usage("--timeout needs a number of seconds"),
            },
            unknown if unknown.starts_with('-') => usage(&format!("unknown option {unknown}")),
            part => options.only.push(part.to_string()),
        }
    }
    if let Some(part) = options.only.iter().find(|part| !rules().any(|rule| rule.matches(part))) {
        usage(&format!("no rule's name or citation contains {part}"));
    }
    match run(&options, &mut |report| print(report, quiet, times)) {
        Err(text) => {
            eprintln!("ascend-conformance: {text}");
            exit(1);
        }
        Ok(summary) => {
            match &summary.host {
                Some(host) => println!(
                    "{host}: {} passed, {} failed, {} skipped",
                    summary.passed, summary.failed, summary.skipped
                ),
                None => println!("no Ascend driver or no device on this host"),
            }
            exit(summary.exit_code());
        }
    }
}

fn print(report: &Report, quiet: bool, times: bool) {
    let mut name = report.rule.name.to_string();
    if times {
        name = format!("{:9.3} ms {name}", report.time.as_secs_f64() * 1e3);
    }
    match &report.outcome {
        Outcome::Passed if quiet => {}
        Outcome::Skipped(_) if quiet => {}
        Outcome::Passed => println!("ok   {name}"),
        Outcome::Skipped(reason) => println!("skip {name}: {reason}"),
        Outcome::Failed(text) => {
            println!("FAIL {name}: {text} [decided by {}; {}]", report.rule.decided_by, report.rule.evidence);
        }
    }
}

fn list() {
    for rule in rules() {
        println!("{:75} {:34} {}", rule.name, rule.evidence, rule.decided_by);
    }
}

fn usage(text: &str) -> ! {
    eprintln!("ascend-conformance: {text}\n\n{USAGE}");
    exit(2);
}
