//! The module URD: questions to the driver and to a device's firmware, each named by a key.
//!
//! One ioctl carries key, input and output. An unknown key is EOPNOTSUPP; a refusal may also be a *positive* number (46: not for this
//! user, 65534: not in this environment, others from the feature itself). In a container any known key asked before the device table was
//! set up loses the devices, so a [`Urd`] is opened only after that.

use crate::davinci::DavinciFile;
use crate::devmng::Answer;
use crate::discovery::{LogicalId, SuperPod};
use crate::error::Result;
use ascend_ioctl::urd::{self, Key};
use ascend_ioctl::{Generation, davinci};
use nix::errno::Errno;
use std::path::Path;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A file of the module.
#[derive(Debug)]
pub(crate) struct Urd(DavinciFile);

impl Urd {
    pub(crate) fn open(manager: &Path) -> Result<Urd> {
        DavinciFile::open(manager, davinci::module::URD).map(Urd)
    }

    /// Asks with an input and an output of the sizes that the key wants.
    pub(crate) fn ask<I: IntoBytes + Immutable, O: FromBytes + IntoBytes>(
        &self,
        device: LogicalId,
        key: &Key,
        input: &I,
    ) -> std::result::Result<O, Answer> {
        let mut output = O::new_zeroed();
        match self.call(device, key, input.as_bytes(), output.as_mut_bytes()) {
            Answer::Done => Ok(output),
            refused => Err(refused),
        }
    }

    /// Whether the driver knows a key. Asks with nothing in and nothing out: a known key is refused for that, an unknown one as unknown.
    pub(crate) fn knows(&self, key: &Key) -> bool {
        self.call(LogicalId(0), key, &[], &mut []) != Answer::Refused(Errno::EOPNOTSUPP)
    }

    /// The generation, by the keys that only some of them have; `Err` names those that were found.
    pub(crate) fn generation(&self) -> std::result::Result<Generation, String> {
        let keys = [urd::UDIS_GET_85, urd::UDIS_GET, urd::MEMORY_INFO].map(|key| self.knows(&key));
        match keys {
            [true, false, false] => Ok(Generation::V8_5_0),
            [false, true, false] => Ok(Generation::V9_0_0),
            [false, true, true] => Ok(Generation::V26_1),
            [old, new, memory] => {
                let word = |known| if known { "known" } else { "unknown" };
                Err(format!("URD key 0x60063/0 {}, 0x45/56 {}, 0x47/39 {}", word(old), word(new), word(memory)))
            }
        }
    }

    /// Total and free bytes of a device's HBM, as its firmware publishes them; `None` if it does not.
    pub(crate) fn hbm(&self, device: LogicalId, key: &Key) -> Option<(u64, u64)> {
        /// Longest value that can be published.
        const LONGEST: u32 = 208;
        // System, service and the whole medium; each begins with total and free in KiB.
        let mut blocks = [[0u64; 8]; 4];
        let input = urd::UdisIn {
            name: *urd::HBM_MEM_INFO,
            length: LONGEST,
            data: blocks.as_mut_ptr() as u64,
            ..Default::default()
        };
        let output: urd::UdisOut = self.ask(device, key, &input).ok()?;
        // SAFETY: `blocks` is a live local array; the driver wrote it through the address in the input, so it is read as memory that others write.
        let blocks = unsafe { (&raw const blocks).read_volatile() };
        let [total, free, ..] = blocks[2];
        // A device that never measured says 0.
        (output.length >= 144 && total != 0).then(|| (total.saturating_mul(1024), free.saturating_mul(1024)))
    }

    /// A device's place in a super pod; `None` where it has none.
    pub(crate) fn super_pod(&self, device: LogicalId) -> Option<SuperPod> {
        let mut info = urd::SpodInfo::default();
        let input = urd::DeviceInfoIn {
            device: device.0,
            sub_command: 1,
            buffer: (&raw mut info) as u64,
            buffer_size: size_of::<urd::SpodInfo>() as u32,
            ..Default::default()
        };
        let _: urd::DeviceInfoOut = self.ask(device, &urd::SPOD_INFO, &input).ok()?;
        // SAFETY: `info` is a live local; the driver wrote it through the address in the input, so it is read as memory that others write.
        let info = unsafe { (&raw const info).read_volatile() };
        (info.sdid != u32::MAX).then_some(SuperPod {
            sdid: info.sdid,
            server: info.server_id,
            super_pod: info.super_pod_id,
            chassis: info.chassis_id,
            scale: info.scale_type,
        })
    }

    fn call(&self, device: LogicalId, key: &Key, input: &[u8], output: &mut [u8]) -> Answer {
        let address = |bytes: &[u8]| if bytes.is_empty() { 0 } else { bytes.as_ptr() as u64 };
        let mut arg = urd::CallArg {
            device: device.0,
            key: urd::CallKey {
                main: key.main,
                sub: key.sub,
                filter: address(key.filter.as_bytes()),
                filter_length: key.filter.len() as u32,
                ..Default::default()
            },
            buffers: urd::CallBuffers {
                input: address(input),
                input_length: input.len() as u32,
                output: if output.is_empty() { 0 } else { output.as_mut_ptr() as u64 },
                output_length: output.len() as u32,
                ..Default::default()
            },
            ..Default::default()
        };
        Answer::of(self.0.command(&urd::CALL, &mut arg))
    }
}
