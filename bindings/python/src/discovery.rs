//! `probe` and `devices`: which NPUs there are, as data classes.

use crate::error::{Outcome, data, fields, optional};
use crate::wait::{abandonable, limit};
use ascend_vmm::discovery::{self, Environment, MemoryDriver, Npu, Options, Split, Survey};
use ascend_vmm::error::Finding;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Reports everything about the NPUs of this host that can be found without a session. Problems of
/// the host are in `findings`, and never raised.
///
/// >>> survey = probe()
/// >>> survey.generation, len(survey.devices), survey.findings
/// ('26.1', 2, ())
#[pyfunction]
#[pyo3(signature = (*, timeout=10.0))]
pub(crate) fn probe(py: Python<'_>, timeout: f64) -> Outcome<Bound<'_, PyAny>> {
    let options = options(timeout)?;
    let survey = abandonable(py, move || discovery::survey(&options))?;
    Ok(survey_data(py, &survey)?)
}

/// The NPUs of this process. Raises `NoDevices` with the most likely reason if there are none.
///
/// >>> [npu.state for npu in devices()]
/// ['working', 'working']
#[pyfunction]
#[pyo3(signature = (*, timeout=10.0))]
pub(crate) fn devices(py: Python<'_>, timeout: f64) -> Outcome<Vec<Bound<'_, PyAny>>> {
    let options = options(timeout)?;
    let devices = abandonable(py, move || discovery::list_with(&options))??;
    Ok(devices.iter().map(|npu| npu_data(py, npu)).collect::<PyResult<_>>()?)
}

fn options(timeout: f64) -> Outcome<Options> {
    Ok(Options::default().timeout(limit(timeout)?))
}

fn survey_data<'py>(py: Python<'py>, survey: &Survey) -> PyResult<Bound<'py, PyAny>> {
    let devices = survey.devices.iter().map(|npu| npu_data(py, npu)).collect::<PyResult<Vec<_>>>()?;
    let findings = survey.findings.iter().map(|finding| finding_data(py, finding)).collect::<PyResult<Vec<_>>>()?;
    let fields = fields! { py;
        environment: survey.environment.map(|environment| match environment {
            Environment::Host => "host",
            Environment::Container => "container",
        }),
        generation: survey.generation.map(|generation| generation.name()),
        memory_driver: survey.memory_driver.map(|driver| match driver {
            MemoryDriver::V2 => "v2",
            MemoryDriver::V3 => "v3",
            MemoryDriver::Missing => "missing",
        }),
        on_pci: PyTuple::new(py, survey.on_pci.iter().map(ToString::to_string))?,
        devices: PyTuple::new(py, devices)?,
        findings: PyTuple::new(py, findings)?,
    };
    data(py, "Survey", &fields)
}

fn finding_data<'py>(py: Python<'py>, finding: &Finding) -> PyResult<Bound<'py, PyAny>> {
    let fields = fields! { py;
        code: finding.code(),
        severity: format!("{:?}", finding.severity()).to_lowercase(),
        device: finding.device().map(|device| device.0),
        message: finding.to_string(),
        remedy: finding.remedy(),
    };
    data(py, "Finding", &fields)
}

fn npu_data<'py>(py: Python<'py>, npu: &Npu) -> PyResult<Bound<'py, PyAny>> {
    let hbm = match npu.hbm {
        None => None,
        Some(hbm) => Some(data(py, "Hbm", &fields! { py; total: hbm.total, free: hbm.free })?),
    };
    let super_pod = match npu.super_pod {
        None => None,
        Some(pod) => {
            let fields = fields! { py;
                sdid: pod.sdid,
                server: pod.server,
                super_pod: pod.super_pod,
                chassis: pod.chassis,
                scale: pod.scale,
            };
            Some(data(py, "SuperPod", &fields)?)
        }
    };
    let split = npu.split.map(|split| match split {
        Split::Whole => "whole".to_owned(),
        Split::VirtualMachines => "virtual machines".to_owned(),
        Split::Containers => "containers".to_owned(),
        Split::Other(mode) => format!("mode {mode}"),
    });
    let fields = fields! { py;
        logical: npu.logical.0,
        physical: npu.physical.0,
        user: npu.user.map(|user| user.0),
        identity: npu.identity.to_string(),
        card: npu.instance.map(|instance| instance.card.0),
        instance: npu.instance.map(|instance| instance.number),
        state: npu.state.to_string(),
        usable: npu.is_usable(),
        chip: &npu.chip,
        soc: &npu.soc,
        ai_cores: npu.ai_cores,
        pci: npu.pci.map(|pci| pci.to_string()),
        hbm: optional(py, hbm)?,
        health: npu.health.map(|health| health.to_string()),
        super_pod: optional(py, super_pod)?,
        split: split,
        sharing_obstacle: npu.sharing_obstacle(),
    };
    data(py, "Npu", &fields)
}
