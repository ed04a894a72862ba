//! `ascend-vmm-tool`: the commands for a host, as one static file (`cargo xtask dist`).

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(xtask::run_tool("ascend-vmm-tool", Vec::new(), std::env::args_os().skip(1).collect()))
}
