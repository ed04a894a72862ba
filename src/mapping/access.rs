//! Who may touch a mapping, beside the device that owns its memory.
//!
//! Peers get access by PREFETCH, which makes the peer build a table of the pages, and the record of it by MEM_SET_ACCESS; the CPU gets
//! access to device memory by MEM_SET_ACCESS alone, which maps the device's PCI window at the same address. Access goes with the
//! mapping and is not taken back before. The only type of access that is ever passed is read-write: the kernel maps nothing else, and
//! type 0 leads it into a panic.

use super::{HostView, Mapped, Mapping};
use crate::device::Device;
use crate::error::{Errno, Invalid, Result};
use crate::session::call::{GET_ACCESS, PREFETCH, SET_ACCESS};
use crate::session::lock;
use ascend_ioctl::svm::{ACCESS_NONE, ACCESS_READ_WRITE, Advise, HOST_ID, MemAccess};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Mapping {
    /// Grants another device access to this mapping, at the same address. Nothing to do for the device that owns the memory, and once
    /// is enough.
    ///
    /// The peer stays open as long as the mapping.
    ///
    /// Enables peer access between the two devices first. Imported memory cannot be granted on; host memory can be granted to devices
    /// that are attached by HCCS.
    #[doc(alias = "aclrtMemSetAccess")]
    #[doc(alias = "cuMemSetAccess")]
    pub fn grant(&self, peer: &Device) -> Result<()> {
        let mapped = &*self.inner;
        mapped.session().svm.check_process()?;
        if !Arc::ptr_eq(&peer.inner.session, mapped.session()) {
            return Err(Invalid::because(
                "grant access to a mapping",
                "the device is of another session",
                "use one session",
            ));
        }
        let id = peer.inner.id;
        // Two threads that grant the same do it once.
        let mut granted = lock(&mapped.granted);
        if id == mapped.block.device.id || granted.iter().any(|device| device.id == id) {
            return Ok(());
        }
        if !mapped.block.is_host() {
            Device { inner: mapped.block.device.clone() }.enable_peer_access(peer)?;
            let advise = Advise { address: mapped.address, size: mapped.block.size, ..Default::default() };
            if let Err(errno) = mapped.session().svm.call(PREFETCH, id, mapped.block.size, &advise) {
                return Err(mapped.block.device.failed("grant a peer access", PREFETCH, errno, mapped.describe(id)));
            }
        }
        mapped.set_access(id)?;
        granted.push(peer.inner.clone());
        Ok(())
    }

    /// Whether a device has access, as the kernel has it on record.
    #[doc(alias = "aclrtMemGetAccess")]
    #[doc(alias = "cuMemGetAccess")]
    pub fn is_granted(&self, device: &Device) -> Result<bool> {
        self.inner.access(device.inner.id)
    }

    /// The memory as the CPU sees it. For device memory this grants the CPU access first, where the device allows that.
    pub fn host_view(&self) -> Result<HostView<'_>> {
        let mapped = &*self.inner;
        let session = mapped.session();
        session.svm.check_process()?;
        if !session.has_segments() {
            return Err(Invalid::because(
                "make memory visible to the CPU",
                "this session was opened without address segments",
                "open it with them, or copy",
            ));
        }
        if !mapped.block.is_host() && !mapped.seen.load(Ordering::Acquire) {
            // The kernel must not be asked for the CPU twice at the same time.
            let _alone = lock(&mapped.granted);
            if !mapped.seen.load(Ordering::Acquire) {
                mapped.set_access(HOST_ID)?;
                mapped.seen.store(true, Ordering::Release);
            }
        }
        Ok(HostView::new(self))
    }
}

impl Mapped {
    fn set_access(&self, id: u32) -> Result<()> {
        let access = MemAccess { address: self.address, size: self.block.size, device: id, access: ACCESS_READ_WRITE };
        match self.session().svm.call(SET_ACCESS, HOST_ID, self.block.size, &access) {
            // EEXIST: it was granted before.
            Ok(_) | Err(Errno::EEXIST) => Ok(()),
            Err(errno) => {
                Err(self.block.device.failed("grant access to a mapping", SET_ACCESS, errno, self.describe(id)))
            }
        }
    }

    fn access(&self, id: u32) -> Result<bool> {
        self.session().svm.check_process()?;
        let query = MemAccess { address: self.address, size: self.block.size, device: id, access: ACCESS_NONE };
        match self.session().svm.call(GET_ACCESS, HOST_ID, self.block.size, &query) {
            Ok(answer) => Ok(answer.access != ACCESS_NONE),
            Err(errno) => Err(self.block.device.failed("ask who has access", GET_ACCESS, errno, self.describe(id))),
        }
    }

    fn describe(&self, id: u32) -> String {
        let to = if id == HOST_ID { "the CPU".to_owned() } else { format!("device {id}") };
        format!("address {:#x}, {}, to {to}", self.address, self.block.describe())
    }
}
