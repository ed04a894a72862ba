//! Lists the NPUs, and says what is wrong if there are none.
//!
//! Without an NPU: `cargo xtask emulate -- cargo run --quiet --example list`

use ascend_vmm::discovery::{self, Options};
use std::process::ExitCode;

fn main() -> ExitCode {
    let survey = discovery::survey(&Options::default());
    for npu in &survey.devices {
        let chip = npu.soc.as_deref().unwrap_or("unknown chip");
        let free = npu.hbm.map_or("?".to_owned(), |hbm| format!("{} of {} MiB free", hbm.free >> 20, hbm.total >> 20));
        // The identity is the same in every container of this host. The other numbers are not.
        println!(
            "device {} (/dev/davinci{}, {}): {chip}, {free}, {}",
            npu.logical, npu.physical, npu.identity, npu.state
        );
    }
    for finding in &survey.findings {
        println!("{finding}. {}", finding.remedy());
    }
    if survey.devices.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
