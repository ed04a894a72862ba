//! `ascend-vmm trace --html`: the page in a real browser, with a hundred thousand calls.

use crate::support::{PROGRAM, run_program, stderr, stdout};
use ascend_emulator::record::{Record, hex};
use ascend_ioctl::Generation;
use ascend_ioctl::svm::{self, Op, Para};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use zerocopy::IntoBytes;

const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// The browser of this host; `None` with a sentence if there is none.
pub fn browser() -> Option<&'static str> {
    let found = BROWSERS.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    if found.is_none() {
        eprintln!("skipped: there is no chromium here");
    }
    found
}

/// A file of the running test alone.
fn file(name: &str) -> PathBuf {
    let test = std::thread::current().name().unwrap_or("main").replace("::", "-");
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("page-{test}-{name}"))
}

/// The document after its scripts have run, and `script` after them.
fn document(browser: &str, page: &Path, script: &str) -> String {
    let html = std::fs::read_to_string(page).unwrap();
    let probed = page.with_extension("probed.html");
    std::fs::write(&probed, format!("{html}<script>{script}</script>")).unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1000", "--dump-dom"])
        .args(["--virtual-time-budget=20000", "--host-resolver-rules=MAP * ~NOTFOUND"])
        .arg(format!("--user-data-dir={}", page.with_extension("profile").display()))
        .arg(format!("file://{}", probed.display()))
        .output()
        .unwrap();
    let document = stdout(&output);
    assert!(document.contains("data-ready="), "{}\n{}", stderr(&output), &document[..document.len().min(2000)]);
    document
}

/// The value of an attribute of the document's root.
fn attribute<'a>(document: &'a str, name: &str) -> &'a str {
    let rest = document.split_once(&format!("{name}=\"")).unwrap_or_else(|| panic!("no {name}")).1;
    rest.split('"').next().unwrap()
}

/// A command of the memory module with its answer.
fn command<A: Para>(op: Op, device: u32, given: &A, answered: &A) -> Record {
    let command = Generation::V26_1.svm(op).unwrap().command;
    Record {
        call: "ioctl",
        file: Some(1),
        cmd: Some(command.name),
        value: Some(format!("{:#x}", command.request())),
        in_hex: Some(hex(svm::Arg::new(device, given).as_bytes())),
        out_hex: Some(hex(svm::Arg::new(device, answered).as_bytes())),
        ..Record::default()
    }
}

/// A trace of this many calls: three processes create, map, unmap and release memory of two
/// devices.
fn long_trace(path: &Path, calls: usize) {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    let mut write = |index: usize, record: Record| {
        let process = 100 + (index / 4 % 3) as i32;
        let failed = index % 1000 == 999;
        let record = Record {
            at: Some(10 * index as u64),
            pid: process,
            tid: process,
            us: 3 + index as u64 * 7919 % 101,
            file: Some(process as u64),
            ret: if failed { -1 } else { 0 },
            errno: failed.then(|| "EBUSY".into()),
            ..record
        };
        serde_json::to_writer(&mut file, &record).unwrap();
        file.write_all(b"\n").unwrap();
    };
    for process in 0..3 {
        let open = Record { call: "open", path: Some("/dev/davinci_manager".into()), ..Record::default() };
        write(4 * process, open);
        let bind = Record {
            call: "ioctl",
            cmd: Some("OPEN"),
            value: Some("0x5a00".into()),
            in_hex: Some("53564d".into()),
            ..Record::default()
        };
        write(4 * process + 1, bind);
    }
    for index in 12..calls + 6 {
        let (id, device) = ((index / 12) as i32, (index / 12 % 2) as u32);
        let address = svm::NORMAL_START + (id as u64) * svm::HUGE_PAGE;
        let (size, side) = (svm::HUGE_PAGE * (1 + id as u64 % 64), svm::SIDE_DEVICE);
        let create = svm::MemCreate { size, side, page: svm::PAGE_HUGE, ..Default::default() };
        let map = svm::MemMap { address, size, id, side, ..Default::default() };
        let unmap = svm::MemUnmap { address, ..Default::default() };
        let release = svm::MemRelease { id, side, pages: 1, ..Default::default() };
        let record = match index % 4 {
            0 => command(Op::MemCreate, device, &create, &svm::MemCreate { id, ..create }),
            1 => command(Op::MemMap, device, &map, &map),
            2 => command(Op::MemUnmap, device, &unmap, &unmap),
            _ => command(Op::MemRelease, device, &release, &release),
        };
        write(index, record);
    }
}

#[test]
fn a_trace_of_a_hundred_thousand_calls_opens_in_a_browser() {
    let Some(browser) = browser() else { return };
    let (trace, page) = (file("long.jsonl"), file("long.html"));
    long_trace(&trace, 100_000);
    let output =
        run_program(&["trace", "--quiet", "--read", trace.to_str().unwrap(), "--html", page.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(std::fs::metadata(&page).unwrap().len() < 20 << 20);
    let document = document(browser, &page, "");
    let ready = attribute(&document, "data-ready");
    let objects: usize = ready.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(ready.starts_with("100000 ") && objects > 40_000, "{ready}");
    eprintln!("the page was drawn after {} ms", attribute(&document, "data-milliseconds"));
    for text in ["100,000", "MEM_CREATE", "EBUSY", "device 1, process 102 (at most", "left to the driver"] {
        assert!(document.contains(text), "{text}");
    }
}

#[test]
fn the_page_of_a_real_program_tells_what_is_under_the_pointer() {
    let Some(browser) = browser() else { return };
    let page = file("selftest.html");
    let output = Command::new(PROGRAM)
        .args(["emulate", "--", PROGRAM, "trace", "--quiet", "--html"])
        .arg(&page)
        .args(["--", PROGRAM, "selftest"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    // Points at the middle of an object, at a call and at memory; then zooms in and out.
    let script = "
        const point = (canvas, type, px, py) => {
            const box = canvas.getBoundingClientRect();
            const at = { clientX: box.left + px, clientY: box.top + py, bubbles: true };
            canvas.dispatchEvent(new MouseEvent(type, at));
            return document.getElementById('tip').textContent;
        };
        const root = document.documentElement.dataset, alive = document.getElementById('alive');
        const width = alive.clientWidth, object = objects.find(object => object.kind === 'heap');
        const middle = (object.born + (object.died ?? duration)) / 2;
        const height = alive.getBoundingClientRect().height;
        root.object = point(alive, 'mousemove', x(middle, width), (object.row + 0.5) * (height - 18) / rows);
        const canvas = document.getElementById('calls'), slow = data.slowest[0];
        const lane = drawCalls.lane * (data.thread[slow] + 0.5);
        root.call = point(canvas, 'mousemove', x(at[slow] + us[slow] / 2, width), lane);
        const line = lines[0], spans = line.times.map((time, i) => line.values[i] ? line.times[i + 1] - time : 0);
        const longest = spans.indexOf(Math.max(...spans)), time = line.times[longest] + spans[longest] / 2;
        root.memory = point(document.getElementById('memory'), 'mousemove', x(time, width), 50);
        point(alive, 'mousedown', width / 4, 5); point(alive, 'mouseup', width / 2, 5);
        root.zoomed = Math.round(100 * (view[1] - view[0]) / duration);
        alive.dispatchEvent(new MouseEvent('dblclick')); root.whole = view[0] === 0 && view[1] === duration;
    ";
    let document = document(browser, &page, script);
    assert!(
        attribute(&document, "data-object").contains("heap 2816, 128 GiB"),
        "{}",
        attribute(&document, "data-object")
    );
    assert!(attribute(&document, "data-call").contains("µs"), "{}", attribute(&document, "data-call"));
    let memory = attribute(&document, "data-memory");
    assert!(memory.contains("device 0, process "), "{memory}");
    assert_eq!(attribute(&document, "data-zoomed"), "25");
    assert_eq!(attribute(&document, "data-whole"), "true");
}

#[test]
fn an_empty_trace_has_a_page_too() {
    let Some(browser) = browser() else { return };
    let page = file("empty.html");
    let output = run_program(&["trace", "--quiet", "--html", page.to_str().unwrap(), "--", "true"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let document = document(browser, &page, "");
    assert_eq!(attribute(&document, "data-ready"), "0 0");
    assert!(document.contains("No call failed.") && document.contains("Everything was released."));
}
