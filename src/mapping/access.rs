//! Access to a mapping for others than the device that owns its memory.
//!
//! A peer gets access by PREFETCH, which makes it build a table of the pages; MEM_SET_ACCESS
//! records it. The CPU gets access to device memory by MEM_SET_ACCESS alone, which maps the
//! device's PCI window at the same address. Access ends with the mapping and cannot be taken back
//! before. The library always asks for read-write access: the kernel maps nothing else, and panics
//! on type 0.

use super::{HostView, Mapped, Mapping};
use crate::device::{Device, DeviceInner};
use crate::driver::svm::HOST_ID;
use crate::error::{Errno, Invalid, Result};
use crate::session::undo::Live;
use crate::slots::lock;
use crate::trace::quiet;
use std::sync::Arc;

/// Who was granted access to a mapping.
#[derive(Debug, Default)]
pub(super) struct Granted {
    /// They stay open as long as the mapping: a peer that is closed forgets what it was granted.
    peers: Vec<Arc<Live<DeviceInner>>>,
    cpu: bool,
}

impl Mapping {
    /// Grants another device access to this mapping, at the same address. The device that owns the
    /// memory has it already. The peer stays open as long as the mapping.
    ///
    /// This first enables peer access between the two devices. Access to imported memory cannot be
    /// granted; access to host memory can be granted to devices that are attached by HCCS.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for a device of another session;
    /// [`Error::Refused`](crate::Error::Refused) if there is no link, or the memory cannot be
    /// granted.
    #[doc(alias = "aclrtMemSetAccess")]
    #[doc(alias = "cuMemSetAccess")]
    pub fn grant(&self, peer: &Device) -> Result<()> {
        let mapped = &*self.inner;
        mapped.session().check_process()?;
        mapped.session().check_same(&peer.inner.session, "grant access to a mapping")?;
        let id = peer.inner.id;
        // Two threads that grant the same access do it once.
        let _quiet = quiet();
        let mut granted = lock(&mapped.access);
        if id == mapped.block.device.id || granted.peers.iter().any(|peer| peer.id == id) {
            return Ok(());
        }
        let block = &mapped.block;
        if !block.device.is_host() {
            block.device.enable_peer_access(peer)?;
            if let Err(refused) = mapped.session().svm.prefetch(id, mapped.address, mapped.size()) {
                return Err(block.device.failed(refused, "grant a peer access", mapped.describe_access(id)));
            }
        }
        mapped.set_access(id)?;
        granted.peers.push(peer.inner.clone());
        Ok(())
    }

    /// True if the kernel has on record that a device has access.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`](crate::Error::Refused) with what the kernel says.
    #[doc(alias = "aclrtMemGetAccess")]
    #[doc(alias = "cuMemGetAccess")]
    pub fn is_granted(&self, device: &Device) -> Result<bool> {
        let (mapped, of) = (&*self.inner, device.inner.id);
        mapped.session().check_process()?;
        let found = mapped.session().svm.mem_get_access(mapped.address, mapped.size(), of);
        found.map_err(|refused| {
            mapped.block.device.failed(refused, "look up who has access", mapped.describe_access(of))
        })
    }

    /// True if the CPU has access: to host memory always, to device memory after the first
    /// [`Mapping::host_view`].
    pub fn is_visible_to_host(&self) -> bool {
        self.inner.block.device.is_host() || lock(&self.inner.access).cpu
    }

    /// The memory as the CPU sees it. For device memory this grants the CPU access first, where the
    /// device allows that.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) in a session without address segments;
    /// [`Error::Refused`](crate::Error::Refused) for memory that does not lie behind the device's
    /// PCI window.
    pub fn host_view(&self) -> Result<HostView<'_>> {
        let mapped = &*self.inner;
        let session = mapped.session();
        session.check_process()?;
        if !session.cpu_access {
            return Err(Invalid::because(
                "make memory visible to the CPU",
                "this session was opened without address segments",
                "Open it with them, or copy.",
            ));
        }
        if !mapped.block.device.is_host() {
            // The kernel must not be called for the CPU by two threads at once.
            let _quiet = quiet();
            let mut granted = lock(&mapped.access);
            if !granted.cpu {
                mapped.set_access(HOST_ID)?;
                granted.cpu = true;
            }
        }
        Ok(HostView::new(self))
    }
}

impl Mapped {
    fn set_access(&self, to: u32) -> Result<()> {
        match self.session().svm.mem_set_access(self.address, self.size(), to) {
            Ok(()) => Ok(()),
            // It was granted before.
            Err(refused) if refused.errno == Errno::EEXIST => Ok(()),
            Err(refused) => {
                Err(self.block.device.failed(refused, "grant access to a mapping", self.describe_access(to)))
            }
        }
    }

    fn describe_access(&self, id: u32) -> String {
        let to = if id == HOST_ID { "the CPU".to_owned() } else { format!("device {id}") };
        format!("address {:#x}, {}, to {to}", self.address, self.block.describe())
    }
}
