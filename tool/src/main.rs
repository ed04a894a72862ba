//! `ascend-vmm`: the commands for a host with Ascend NPUs, or without.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(ascend_vmm_tool::run_tool("ascend-vmm", Vec::new(), std::env::args_os().skip(1).collect()))
}
