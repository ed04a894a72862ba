//! `selftest --device-process`: what does a device need before its memory can be used?
//!
//! This is the first thing to find out on a new kind of host. Each step reports the answer, even a
//! refusal: which of the two a real card gives is not known yet (docs/driver.md).

use super::{Failure, Run};
use crate::session_options::device_process::{self, DeviceProcess, Order, Policy, Settings};
use ascend_vmm::LogicalId;
use ascend_vmm::Session;

/// The suite.
pub(super) fn run(run: &mut Run<'_>, devices: &[u32]) {
    for &device in devices {
        let id = LogicalId(device);
        let group = format!("device {device}");
        run.check(&group, "it runs no process for us yet", || match device_process::device_pid(id)? {
            None => Ok(None),
            Some(pid) => Err(Failure::Failed(format!("process {pid} on the device is already bound to us"))),
        });
        let mut needed = false;
        run.check(&group, "SETUP_DEVICE is tried without a device process", || {
            let settings = Settings::default().policy(Policy::Never);
            let session = Session::builder().device_process(settings).open()?;
            match session.device(id) {
                Ok(device) => {
                    drop(device);
                    Ok(Some("it succeeded: this firmware does not need one from us".into()))
                }
                Err(error) => {
                    needed = true;
                    Ok(Some(crate::said(format!("it was refused, as expected: {error}"))))
                }
            }
        });
        let mut started = None;
        for (order, name) in [(Order::Short, "short"), (Order::Vendor, "vendor's longer")] {
            let sentence = format!("the daemon starts a process after the {name} dialogue");
            run.check(&group, &sentence, || {
                let process = DeviceProcess::start(id, &Settings::default().order(order)).map_err(explained)?;
                let pid = process.pid()?;
                let remark = match pid {
                    Some(pid) => format!("process {pid} on the device is bound to us"),
                    None => "the daemon agreed, but the driver has no process bound to us".to_owned(),
                };
                if order == Order::Short {
                    started = Some(process);
                } else {
                    process.close().map_err(explained)?;
                }
                Ok(Some(remark))
            });
            if let Some(process) = started.take() {
                run.check(&group, "the daemon ends it on request", || {
                    process.close().map(|()| None).map_err(explained)
                });
            }
        }
        run.check(&group, "the device opens, with a process if it needs one, and its memory can be used", || {
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
                (true, false) => "SETUP_DEVICE was refused before and works now, although we started no process".into(),
                (false, true) => "a process was started, although SETUP_DEVICE worked without one".into(),
            }))
        });
        run.check(&group, "the device process ended with the session", || match device_process::device_pid(id)? {
            None => Ok(None),
            Some(pid) => Ok(Some(format!("process {pid} is still bound; the driver may take some seconds to notice"))),
        });
    }
}

fn explained(failure: device_process::ProcessFailure) -> Failure {
    Failure::Failed(crate::said(format!("{failure}. {}", failure.remedy())))
}
