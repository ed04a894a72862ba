//! `--device-process-policy`, for the commands that open a session of the library.
//!
//! The library's module for device processes is named only here; other files use it through this
//! one.

pub(crate) use ascend_vmm::device_process;

use ascend_vmm::Session;
use clap::ValueEnum;
use device_process::{Policy, Settings};

/// Options of a command that opens a session.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct SessionOptions {
    /// When opening a device starts a process on it: if the device needs one, never, or always.
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = DeviceProcessPolicy::Auto)]
    device_process_policy: DeviceProcessPolicy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum DeviceProcessPolicy {
    #[default]
    Auto,
    Never,
    Always,
}

impl SessionOptions {
    /// Opens the session of this process.
    pub fn open(self) -> ascend_vmm::Result<Session> {
        let policy = match self.device_process_policy {
            DeviceProcessPolicy::Auto => Policy::Auto,
            DeviceProcessPolicy::Never => Policy::Never,
            DeviceProcessPolicy::Always => Policy::Always,
        };
        Session::builder().device_process(Settings::default().policy(policy)).open()
    }

    /// The same options as an argument for another process of this program.
    pub fn argument(self) -> String {
        let policy = self.device_process_policy.to_possible_value();
        format!("--device-process-policy={}", policy.as_ref().map_or("auto", |policy| policy.get_name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct TestCommand {
        #[command(flatten)]
        session: SessionOptions,
    }

    #[test]
    fn every_policy_survives_being_passed_to_another_process() {
        for &policy in DeviceProcessPolicy::value_variants() {
            let argument = SessionOptions { device_process_policy: policy }.argument();
            let parsed = TestCommand::try_parse_from(["program", &argument]).map(|command| command.session);
            assert_eq!(parsed.map(|session| session.device_process_policy).ok(), Some(policy), "{argument}");
        }
    }
}
