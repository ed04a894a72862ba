//! The experiment that decides most on a first day with hardware: what does a device need before its memory can be used?
//!
//! Each step tells what was answered, also when that is a refusal: on a real card either answer is news (docs/device-process.md).

use super::{Failure, Run};
use ascend_vmm::Session;
use ascend_vmm::discovery::LogicalId;
use ascend_vmm::process::{self, DeviceProcess, Order, Policy, Settings};
use std::path::Path;

/// The suite.
pub(super) fn run(run: &mut Run<'_>, devices: &[u32]) {
    let manager = Path::new(ascend_ioctl::davinci::PATH);
    for &device in devices {
        let id = LogicalId(device);
        let group = format!("device {device}");
        run.check(&group, "nothing of this process runs on it yet", || match process::device_pid(id, manager)? {
            None => Ok(None),
            Some(pid) => Err(Failure::Failed(format!("device process {pid} is bound to this process already"))),
        });
        let mut needed = false;
        run.check(&group, "SETUP_DEVICE alone is tried", || {
            let settings = Settings { policy: Policy::Never, ..Settings::default() };
            let session = Session::builder().device_process(settings).open()?;
            match session.device(id) {
                Ok(device) => {
                    drop(device);
                    Ok(Some("it succeeded: this firmware needs no device process from us".into()))
                }
                Err(error) => {
                    needed = true;
                    Ok(Some(format!("it was refused, as expected: {error}")))
                }
            }
        });
        run.check(&group, "the daemon on the device answers a greeting", || {
            let greeting = process::greet(id, manager, &Settings::default()).map_err(explained)?;
            Ok(Some(format!("it speaks version {}", greeting.version)))
        });
        let mut started = None;
        for (order, name) in [(Order::Short, "short"), (Order::Vendor, "vendor's longer")] {
            let sentence = format!("the daemon starts a process after the {name} dialogue");
            run.check(&group, &sentence, || {
                let settings = Settings { order, ..Settings::default() };
                let process = DeviceProcess::start(id, manager, &settings).map_err(explained)?;
                let pid = process.pid()?;
                let remark = match pid {
                    Some(pid) => format!("the driver has pid {pid} on the device bound to us"),
                    None => "the daemon said yes, but the driver has nobody bound to us".to_owned(),
                };
                if order == Order::Short {
                    started = Some(process);
                } else {
                    process.close().map_err(explained)?;
                }
                Ok(Some(remark))
            });
            if let Some(process) = started.take() {
                run.check(&group, "the daemon ends it when asked", || {
                    process.close().map(|()| None).map_err(explained)
                });
            }
        }
        run.check(
            &group,
            "the device opens with a process that is started as needed, and its memory can be used",
            || {
                let session = Session::open()?;
                let opened = session.device(id)?;
                let ours = opened.device_process().is_some();
                let mapping = super::library::mapped(&opened, 2 << 20)?;
                mapping.write(0, b"it works")?;
                let mut text = [0; 8];
                mapping.read(0, &mut text)?;
                super::library::same(&text, b"it works")?;
                Ok(Some(match (needed, ours) {
                    (true, true) => "SETUP_DEVICE works once we have started a process".into(),
                    (false, false) => "no device process was needed".into(),
                    (true, false) => "SETUP_DEVICE was refused before and works now without a process of ours".into(),
                    (false, true) => "a process was started although SETUP_DEVICE worked without".into(),
                }))
            },
        );
        run.check(&group, "the device process ended with the session", || match process::device_pid(id, manager)? {
            None => Ok(None),
            Some(pid) => Ok(Some(format!("pid {pid} is still bound; it may take the driver some seconds to notice"))),
        });
    }
}

fn explained(failure: process::Failure) -> Failure {
    Failure::Failed(format!("{failure}. {}", failure.remedy()))
}
