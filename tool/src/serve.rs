//! `ascend-vmm serve`: the memory service.
//!
//! This process becomes the keeper, which owns the memory. It starts the front, which talks to
//! clients, as a process of its own, and starts it again when it dies.

use crate::impossible;
use ascend_vmm::Session;
use ascend_vmm_service::{Policy, ServeError, Told, activated, bind, keep, replace_front, run_front, tell_systemd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Options of `serve`.
#[derive(clap::Args)]
#[command(
    after_help = "Clients connect to the socket (docs/service.md). The process that this command becomes owns the\n\
                        memory: what nobody maps is lost when it ends. Its child, which talks to clients, may be\n\
                        killed or replaced at any time.\n\n\
                        Examples:\n  ascend-vmm serve --socket /run/ascend-vmm.sock\n  \
                        ascend-vmm serve --socket /run/ascend-vmm.sock --config service.toml\n  \
                        ascend-vmm serve --socket /run/ascend-vmm.sock --replace"
)]
pub struct Serve {
    /// The Unix socket at which clients connect. Not needed if systemd passes a socket.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Who may do what, and how much: TOML (docs/service.md).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Let every process of the host import the memory. Then even the death of this process loses
    /// nothing while somebody maps the memory, and nothing is protected.
    #[arg(long)]
    trust_everyone: bool,
    /// Serve this NPU alone, by its physical id; may be given several times. Without it, one
    /// service has all NPUs.
    #[arg(long, value_name = "ID")]
    device: Vec<u32>,
    /// Take over from the front of the service that runs, without losing anything: after an update
    /// of this program, or of its configuration.
    #[arg(long)]
    replace: bool,
}

/// The front's process, which `serve` starts.
#[derive(clap::Args)]
pub struct Front {
    #[arg(long)]
    config: Option<PathBuf>,
    #[arg(long)]
    trust_everyone: bool,
    #[arg(long)]
    device: Vec<u32>,
}

impl Serve {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        let policy = match policy(self.config.as_deref(), self.trust_everyone, &self.device) {
            Ok(policy) => policy,
            Err(reason) => return impossible(reason),
        };
        let front = match crate::second_process::this_program() {
            Ok(program) => program,
            Err(error) => return impossible(format_args!("this program cannot be found: {error}")),
        };
        let command = || {
            let mut command = std::process::Command::new(front.get_program());
            command.args(front.get_args()).arg("serve-front");
            if let Some(config) = &self.config {
                // The keeper may start it in another directory.
                command.arg("--config").arg(std::path::absolute(config).unwrap_or_else(|_| config.clone()));
            }
            if self.trust_everyone {
                command.arg("--trust-everyone");
            }
            for device in &self.device {
                command.arg("--device").arg(device.to_string());
            }
            command
        };
        let activated = match activated() {
            Ok(activated) => activated,
            Err(error) => return impossible(error),
        };
        let listener = match (activated, &self.socket) {
            (_, Some(socket)) if self.replace => return ended(replace_front(socket, policy, &command())),
            (Some(listener), _) => Ok(listener),
            (None, Some(socket)) => bind(socket, &policy),
            (None, None) => return impossible("say where clients connect, with --socket"),
        };
        let listener = match listener {
            Ok(listener) => listener,
            Err(error) => return impossible(error),
        };
        let session = match Session::open() {
            Ok(session) => session,
            Err(error) => return impossible(error),
        };
        let path = listener.local_addr().ok().and_then(|address| Some(address.as_pathname()?.to_owned()));
        let mut first = true;
        let told = |told| {
            if told == Told::Serving && std::mem::take(&mut first) {
                crate::outln!(
                    "serving at {}",
                    path.as_deref().unwrap_or(Path::new("a socket without a name")).display()
                );
            }
            tell_systemd(told);
        };
        ended(keep(session, &listener, command, told))
    }
}

impl Front {
    /// Runs the command and returns its exit status.
    pub fn run(self) -> ExitCode {
        match policy(self.config.as_deref(), self.trust_everyone, &self.device) {
            Ok(policy) => ended(run_front(policy)),
            Err(reason) => impossible(reason),
        }
    }
}

fn ended(result: Result<(), ServeError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            crate::errln!("error: {}", crate::said(error));
            ExitCode::FAILURE
        }
    }
}

fn policy(config: Option<&Path>, trust_everyone: bool, devices: &[u32]) -> Result<Policy, String> {
    let policy = match config {
        None => Policy::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
            Policy::from_toml(&text).map_err(|error| format!("{}: {error}", path.display()))?
        }
    };
    let policy = if devices.is_empty() { policy } else { policy.devices(devices) };
    Ok(if trust_everyone { policy.trust_everyone(true) } else { policy })
}
