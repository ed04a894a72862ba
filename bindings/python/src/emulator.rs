//! `Emulator`: the emulated driver, for tests.

use crate::error::{Fault, Outcome};
use crate::node::lock;
use crate::size::Size;
use ascend_emulator::Config;
use ascend_emulator::config::{Attachment, DeviceProcess};
use ascend_emulator::fault::Fault as Injected;
use ascend_vmm::Generation;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// An emulated host with NPUs, until it is closed or dropped.
///
/// `attach` puts the calling thread, and what it starts from then on, on that host. This cannot be
/// undone, so it is for processes that were started for it: the pytest plugin makes one for each
/// test, and `python -m ascend_vmm.emulate` runs a program on one.
#[pyclass(frozen, module = "ascend_vmm.emulate")]
pub(crate) struct Emulator {
    emulator: Mutex<Option<Arc<ascend_emulator::Emulator>>>,
    config: Config,
    process: u32,
}

impl Emulator {
    fn get(&self) -> Outcome<Arc<ascend_emulator::Emulator>> {
        if self.process != std::process::id() {
            let text = "the emulated host belongs to the process that started it";
            return Err(PyRuntimeError::new_err(text).into());
        }
        lock(&self.emulator).clone().ok_or(Fault::Closed("Emulator"))
    }
}

fn wrong(problem: String, rule: &'static str) -> Fault {
    Fault::Argument { operation: "emulate a host", problem, rule }
}

#[pymethods]
impl Emulator {
    #[new]
    #[pyo3(signature = (
        *, devices=2, generation=None, hbm=None, host_memory=None, attach="pcie", device_process="required", faults=None
    ))]
    #[allow(clippy::too_many_arguments, reason = "they have names in Python")]
    fn start(
        py: Python<'_>,
        devices: u32,
        generation: Option<&str>,
        hbm: Option<Size>,
        host_memory: Option<Size>,
        attach: &str,
        device_process: &str,
        faults: Option<Vec<String>>,
    ) -> Outcome<Emulator> {
        let mut config = Config { devices, ..Config::default() };
        if devices > 64 {
            return Err(wrong(format!("{devices} devices are too many"), "The driver knows at most 64."));
        }
        if let Some(name) = generation {
            let unknown = |unknown| wrong(format!("{name:?} is an {unknown}"), "Use one of these.");
            config.generation = name.parse::<Generation>().map_err(unknown)?;
        }
        if let Some(Size(size)) = hbm {
            config.hbm = size;
        }
        if let Some(Size(size)) = host_memory {
            config.host_memory = size;
        }
        config.attachment = match attach {
            "pcie" => Attachment::Pcie,
            "hccs" => Attachment::Hccs,
            other => return Err(wrong(format!("unknown attachment {other:?}"), "It is \"pcie\" or \"hccs\".")),
        };
        config.device_process = match device_process {
            "required" => DeviceProcess::Required,
            "automatic" => DeviceProcess::Automatic,
            other => {
                let rule = "It is \"required\" or \"automatic\".";
                return Err(wrong(format!("device_process cannot be {other:?}"), rule));
            }
        };
        let faults = faults.unwrap_or_default();
        let faults = faults.iter().map(|spec| fault(spec, &config)).collect::<Outcome<Vec<_>>>()?;
        let emulator = py
            .detach(|| {
                let emulator = ascend_emulator::Emulator::start(config.clone())?;
                faults.into_iter().for_each(|fault| emulator.inject(fault));
                Ok::<_, ascend_emulator::Unavailable>(emulator)
            })
            .map_err(|unavailable| PyRuntimeError::new_err(unavailable.to_string()))?;
        Ok(Emulator { emulator: Mutex::new(Some(Arc::new(emulator))), config, process: std::process::id() })
    }

    /// Puts the calling thread, and what it starts from now on, on the emulated host.
    fn attach(&self, py: Python<'_>) -> Outcome<()> {
        let emulator = self.get()?;
        let attached = py.detach(|| emulator.attach());
        Ok(attached.map_err(|unavailable| PyRuntimeError::new_err(unavailable.to_string()))?)
    }

    /// Number of NPUs.
    #[getter]
    fn devices(&self) -> u32 {
        self.config.devices
    }

    /// Generation of the driver.
    #[getter]
    fn generation(&self) -> String {
        self.config.generation.name().to_owned()
    }

    /// Makes the driver or a device misbehave from now on: "MEM_MAP#3=ENOMEM", "device1=dead" …
    fn inject(&self, py: Python<'_>, fault: &str) -> Outcome<()> {
        let (emulator, fault) = (self.get()?, self::fault(fault, &self.config)?);
        py.detach(|| emulator.inject(fault));
        Ok(())
    }

    /// The driver resources that processes hold, as text; "" if there are none.
    fn held(&self, py: Python<'_>) -> Outcome<String> {
        let emulator = self.get()?;
        let state = py.detach(|| emulator.state());
        Ok(if state.is_empty() { String::new() } else { format!("{state:#?}") })
    }

    /// Bytes of physical memory that processes hold.
    fn memory_in_use(&self, py: Python<'_>) -> Outcome<u64> {
        let emulator = self.get()?;
        Ok(py.detach(|| emulator.state().memory.used.values().sum()))
    }

    /// Keeps the commands of the driver from now on, for `commands`.
    fn record(&self, py: Python<'_>) -> Outcome<()> {
        let emulator = self.get()?;
        py.detach(|| emulator.record());
        Ok(())
    }

    /// The names of the commands since `record`, in order.
    fn commands(&self, py: Python<'_>) -> Outcome<Vec<String>> {
        let emulator = self.get()?;
        let records = py.detach(|| emulator.records());
        Ok(records.iter().filter_map(|record| record.cmd.map(str::to_owned)).collect())
    }

    /// What clients did that would have crashed or hung a real host. Each such client was killed.
    fn traps(&self, py: Python<'_>) -> Outcome<Vec<String>> {
        let emulator = self.get()?;
        Ok(py.detach(|| emulator.traps()).iter().map(ToString::to_string).collect())
    }

    /// Ends it. Later calls of threads that are still attached fail.
    fn close(&self, py: Python<'_>) {
        let emulator = lock(&self.emulator).take();
        py.detach(|| drop(emulator));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<Emulator, driver {}, {} devices>", self.config.generation, self.config.devices)
    }
}

fn fault(spec: &str, config: &Config) -> Outcome<Injected> {
    let rule = "docs/emulator.md lists the faults.";
    let fault: Injected = spec.parse().map_err(|bad: ascend_emulator::fault::BadFault| wrong(bad.to_string(), rule))?;
    fault.check(config).map_err(|problem| wrong(problem, rule))?;
    Ok(fault)
}
