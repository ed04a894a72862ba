//! The module URD: queries to the driver and to a device's firmware, each named by a key.
//!
//! One ioctl carries key, input and output. An unknown key is EOPNOTSUPP. A refusal may also be a
//! *positive* number (46: not for this user, 65534: not in this environment, others from the
//! feature itself). In a container, using any known key before the device table was set up loses
//! the devices, so a [`Urd`] is opened only after that.

use super::Answer;
use super::davinci::{DavinciFile, module};
use crate::error::{Errno, Result, printable};
use crate::id::{LogicalId, PhysicalId, SuperPod};
use ascend_ioctl::Generation;
use ascend_ioctl::urd::{self, Key};
use std::ffi::CStr;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A file of the module.
#[derive(Debug)]
pub(crate) struct Urd(DavinciFile);

/// An operation on the link between two devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum P2p {
    /// Requests access in one direction.
    Enable = urd::P2P_ENABLE as isize,
    /// Withdraws the request.
    Disable = urd::P2P_DISABLE as isize,
    /// Queries whether the two can reach each other.
    CanAccess = urd::P2P_CAN_ACCESS as isize,
}

impl P2p {
    /// Positive answers with a known meaning.
    pub(crate) const NOT_PERMITTED: i32 = urd::NOT_PERMITTED;
    pub(crate) const NOT_SUPPORTED_HERE: i32 = urd::NOT_SUPPORTED_HERE;
    /// Kind of access, from 9.0.0 on: memory.
    const MEMORY: u32 = 1;
}

impl Urd {
    pub(crate) fn open() -> Result<Urd> {
        DavinciFile::open(module::URD).map(Urd)
    }

    /// True if the driver knows a key. The query has no input and no output: the driver refuses a
    /// known key because of that, and an unknown key as unknown.
    ///
    /// Refusing a known key leaves a line or two in the kernel's log. So keys of published values
    /// are first queried in full, which most devices answer.
    pub(super) fn knows(&self, key: &Key) -> bool {
        let published = [urd::UDIS_GET, urd::UDIS_GET_85].contains(key);
        let answered = published && self.memory_sizes(LogicalId(0), key).is_ok();
        answered || self.call(LogicalId(0), key, &[], &mut []) != Answer::Refused(Errno::EOPNOTSUPP)
    }

    /// CHIP_INFO: the name of the chip, like `910B3`.
    pub(crate) fn chip_info(&self, device: LogicalId) -> Option<String> {
        let info: urd::ChipInfo = self.ask(device, &urd::CHIP_INFO, &device.0).ok()?;
        text(&info.text.name)
    }

    /// PCIE_INFO: bus, device and function.
    pub(crate) fn pcie_info(&self, device: LogicalId) -> Option<(u8, u8, u8)> {
        let info: urd::PcieInfo = self.ask(device, &urd::PCIE_INFO, &device.0).ok()?;
        Some((info.bus as u8, info.slot as u8, info.function as u8))
    }

    /// INIT_STATUS: 0 starting, 1 working, 2 exception, 3 sleeping, 4 lost.
    pub(crate) fn init_status(&self, device: LogicalId) -> Option<u32> {
        self.number(device, &urd::INIT_STATUS)
    }

    /// TS_HEARTBEAT: the same from the task scheduler's heartbeat, if that module is loaded.
    pub(crate) fn ts_heartbeat(&self, device: LogicalId) -> Option<u32> {
        let input = urd::TsHeartbeatIn { device: device.0, ..Default::default() };
        self.ask(device, &urd::TS_HEARTBEAT, &input).ok()
    }

    /// HEALTH: 0 normal, 1 minor, 2 major, 3 fatal.
    pub(crate) fn health(&self, device: LogicalId) -> Option<u32> {
        self.number(device, &urd::HEALTH)
    }

    /// SPLIT_MODE: 0 whole, 1 for virtual machines, 2 for containers.
    pub(crate) fn split_mode(&self, device: LogicalId) -> Option<u32> {
        self.number(device, &urd::SPLIT_MODE)
    }

    /// UDIS_GET of the memory's size: total and free bytes of a device's HBM, if its firmware
    /// publishes them.
    pub(crate) fn hbm(&self, device: LogicalId, generation: Generation) -> Option<(u64, u64)> {
        let (length, blocks) = self.memory_sizes(device, &generation.delta().udis_get).ok()?;
        let [total, free, ..] = blocks[2];
        // A device that has not measured yet reports 0.
        (length >= 144 && total != 0).then(|| (total.saturating_mul(1024), free.saturating_mul(1024)))
    }

    /// True if the driver does not know the key under which a generation publishes values. Leaves
    /// no line in the kernel's log, because the query is complete.
    pub(super) fn lacks_published_values(&self, device: LogicalId, generation: Generation) -> bool {
        let answer = self.memory_sizes(device, &generation.delta().udis_get);
        matches!(answer, Err(Answer::Refused(Errno::EOPNOTSUPP)))
    }

    /// UDIS_GET of the memory's sizes. Returns the number of bytes published and the blocks for
    /// system, service and the whole medium, each of which begins with total and free in KiB.
    fn memory_sizes(&self, device: LogicalId, key: &Key) -> Result<(u32, [[u64; 8]; 4]), Answer> {
        /// The longest value that can be published.
        const LONGEST: u32 = 208;
        let mut blocks = [[0u64; 8]; 4];
        let input = urd::UdisIn {
            name: *urd::HBM_MEM_INFO,
            length: LONGEST,
            data: (&raw mut blocks).expose_provenance() as u64,
            ..Default::default()
        };
        let output: urd::UdisOut = self.ask(device, key, &input)?;
        // SAFETY: `blocks` is a live local; the driver wrote it through the address in the input,
        // so it is read as memory that others write.
        Ok((output.length, unsafe { (&raw const blocks).read_volatile() }))
    }

    /// SPOD_INFO: a device's place in a super pod, if it has one.
    pub(crate) fn spod_info(&self, device: LogicalId) -> Option<SuperPod> {
        let mut info = urd::SpodInfo::default();
        let input = urd::DeviceInfoIn {
            device: device.0,
            sub_command: 1,
            buffer: (&raw mut info).expose_provenance() as u64,
            buffer_size: size_of::<urd::SpodInfo>() as u32,
            ..Default::default()
        };
        let _: urd::DeviceInfoOut = self.ask(device, &urd::SPOD_INFO, &input).ok()?;
        // SAFETY: `info` is a live local; the driver wrote it through the address in the input, so
        // it is read as memory that others write.
        let info = unsafe { (&raw const info).read_volatile() };
        (info.sdid != u32::MAX).then_some(SuperPod {
            sdid: info.sdid,
            server: info.server_id,
            super_pod: info.super_pod_id,
            chassis: info.chassis_id,
            scale: info.scale_type,
        })
    }

    /// P2P: the link from a device to a peer. Returns the status word. The struct must have exactly
    /// the generation's size.
    pub(crate) fn p2p(
        &self,
        operation: P2p,
        device: LogicalId,
        peer: PhysicalId,
        generation: Generation,
    ) -> Result<i32, Answer> {
        let operation = operation as u32;
        if generation.delta().p2p_size == size_of::<urd::P2pAttr85>() {
            let arg = urd::P2pAttr85 { operation, device: device.0, peer: peer.0, ..Default::default() };
            return self.ask::<_, urd::P2pAttr85>(device, &urd::P2P, &arg).map(|answer| answer.status);
        }
        let arg = urd::P2pAttr { operation, device: device.0, peer: peer.0, kind: P2p::MEMORY, ..Default::default() };
        self.ask::<_, urd::P2pAttr>(device, &urd::P2P, &arg).map(|answer| answer.status)
    }

    /// Queries a key that takes a logical id and answers a number.
    fn number(&self, device: LogicalId, key: &Key) -> Option<u32> {
        self.ask(device, key, &device.0).ok()
    }

    /// Queries a key with an input and an output of the sizes that it requires.
    fn ask<I: IntoBytes + Immutable, O: FromBytes + IntoBytes>(
        &self,
        device: LogicalId,
        key: &Key,
        input: &I,
    ) -> Result<O, Answer> {
        let mut output = O::new_zeroed();
        self.call(device, key, input.as_bytes(), output.as_mut_bytes()).with(output)
    }

    fn call(&self, device: LogicalId, key: &Key, input: &[u8], output: &mut [u8]) -> Answer {
        let address = |bytes: &[u8]| if bytes.is_empty() { 0 } else { bytes.as_ptr().expose_provenance() as u64 };
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
                output: if output.is_empty() { 0 } else { output.as_mut_ptr().expose_provenance() as u64 },
                output_length: output.len() as u32,
                ..Default::default()
            },
            ..Default::default()
        };
        self.0.command(&urd::CALL, &mut arg)
    }
}

/// A NUL-terminated text. Bytes after the NUL are stale.
pub(super) fn text(bytes: &[u8]) -> Option<String> {
    let text = CStr::from_bytes_until_nul(bytes).ok()?.to_str().ok()?;
    (!text.is_empty()).then(|| printable(text))
}
