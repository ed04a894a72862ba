//! Physical memory by handle: MEM_CREATE, MEM_RELEASE and a handle's attributes.
//!
//! A handle is an integer. Host memory has ids per process, device memory has ids per process and
//! device. Ids go up and wrap around at the largest number; a create that fails for lack of memory
//! uses one up. A map must repeat the handle's page count, module and page kind. A handle can be
//! released in parts, from the end; a partly released handle can only be released further.

use super::behaviour::Behaviour;
use super::store::BlockId;
use super::{Call, SvmResult, page_size, put, refuse};
use crate::machine::HOST;
use crate::trap::Trap;
use ascend_ioctl::svm::{self, Arg, GIANT_PAGE, HUGE_PAGE};
use nix::errno::Errno;
use std::collections::HashMap;

/// Most pages that one message to a device names.
const PAGES_PER_MESSAGE: u64 = 3072;

/// A device's small page, whatever the host's is.
const DEVICE_PAGE: u64 = 4096;

/// Limit of NUMA node numbers in older generations.
const MAX_NUMA_NODES: u32 = 1024;

/// Whether a handle is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandleKind {
    Normal,
    Exported,
    Imported,
}

/// A handle.
#[derive(Debug, Clone)]
pub struct Handle {
    pub block: BlockId,
    pub kind: HandleKind,
    /// Pages at creation, which a map must repeat.
    pub pages: u64,
    /// Pages that are not released yet.
    pub left: u64,
    pub page: u32,
    pub page_size: u64,
    pub giant: bool,
    pub module: u32,
    pub memory: u32,
    /// A release freed a part of it.
    pub half_freed: bool,
    /// Number of mappings.
    pub mapped: u32,
    /// Device memory that was imported on the host: accessed through the device's BAR.
    pub bar: bool,
    /// Host memory that was imported on a device.
    pub of_host: bool,
    /// The route attribute.
    pub route: u32,
}

/// Handles by id.
#[derive(Debug, Default)]
pub struct HandleTable {
    next: i32,
    handles: HashMap<i32, Handle>,
}

impl HandleTable {
    /// The next id, which is used up even if the command fails afterwards.
    pub fn take_id(&mut self) -> i32 {
        loop {
            let id = self.next;
            self.next = if id == i32::MAX { 0 } else { id + 1 };
            if !self.handles.contains_key(&id) {
                return id;
            }
        }
    }

    pub fn insert(&mut self, id: i32, handle: Handle) {
        self.handles.insert(id, handle);
    }

    pub fn get(&self, id: i32) -> Option<&Handle> {
        self.handles.get(&id)
    }

    pub fn get_mut(&mut self, id: i32) -> Option<&mut Handle> {
        self.handles.get_mut(&id)
    }

    pub fn remove(&mut self, id: i32) -> Option<Handle> {
        self.handles.remove(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (i32, &Handle)> {
        self.handles.iter().map(|(&id, handle)| (id, handle))
    }

    pub fn is_empty(&self) -> bool {
        self.handles.is_empty()
    }

    /// Removes all handles.
    pub fn drain(&mut self) -> impl Iterator<Item = Handle> {
        std::mem::take(&mut self.handles).into_values()
    }
}

impl Call<'_, '_> {
    /// The handles of the host, or of a device.
    pub(super) fn table(&mut self, physical: u32) -> Option<&mut HandleTable> {
        if physical == HOST {
            return Some(&mut self.process.host);
        }
        self.process.agents.get_mut(&physical).map(|agent| &mut agent.handles)
    }

    /// MEM_CREATE.
    pub(super) fn mem_create(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemCreate = arg.para();
        let unit = if para.page == svm::PAGE_NORMAL { page_size() } else { HUGE_PAGE };
        if para.size == 0 || para.size % unit != 0 {
            return refuse(Errno::EINVAL, "the size is not a multiple of the page size");
        }
        if para.flags != 0 {
            return refuse(Errno::EINVAL, "no flag is defined");
        }
        if para.side >= svm::SIDES {
            return refuse(Errno::EINVAL, "no such side");
        }
        if para.side == svm::SIDE_HOST_NUMA && para.numa_node != u32::MAX && !self.has_numa_node(para.numa_node) {
            return refuse(Errno::EINVAL, "no such NUMA node");
        }
        if para.side != svm::SIDE_DEVICE && self.physical != HOST {
            return refuse(Errno::EINVAL, "host memory is created on device 65");
        }
        if para.page >= svm::PAGES || para.memory >= svm::MEMORIES {
            return refuse(Errno::EINVAL, "no such kind of page or memory");
        }
        if self.physical == svm::HOST_AGENT_ID {
            return refuse(Errno::EOPNOTSUPP, "the host agent has no memory");
        }
        let physical = self.physical;
        let mut size = para.size;
        let page_size = if para.side == svm::SIDE_DEVICE {
            self.message(physical)?;
            if para.page == svm::PAGE_GIANT {
                size = size.checked_next_multiple_of(GIANT_PAGE).ok_or(Errno::ENOMEM)?;
                if !self.machine.config.giant_pages {
                    return refuse(Errno::ENOMEM, "the device has no giant pages");
                }
            }
            if para.page == svm::PAGE_NORMAL { DEVICE_PAGE } else { HUGE_PAGE }
        } else if para.page == svm::PAGE_GIANT {
            if size % GIANT_PAGE != 0 {
                return refuse(Errno::EINVAL, "the size is not a multiple of 1 GiB");
            }
            if !self.machine.config.host_giant_pages || para.memory != svm::MEMORY_P2P_DDR {
                // The driver takes the id before it finds out.
                self.process.host.take_id();
                return refuse(Errno::ENOMEM, "the host has no giant pages of this kind");
            }
            GIANT_PAGE
        } else {
            unit
        };
        let memory = if physical == HOST { self.machine.config.host_memory } else { self.machine.config.hbm };
        self.world.store.add_pool(physical, memory)?;
        let Some(table) = self.table(physical) else {
            return refuse(Errno::EINVAL, "the host has no channel to itself");
        };
        let id = table.take_id();
        let Ok(block) = self.world.store.create(physical, size) else {
            return refuse(Errno::ENOMEM, "out of memory");
        };
        let handle = Handle {
            block,
            kind: HandleKind::Normal,
            pages: size / page_size,
            left: size / page_size,
            // A giant page of a device consists of contiguous huge pages.
            page: if physical == HOST { para.page } else { para.page.min(svm::PAGE_HUGE) },
            page_size,
            giant: para.page == svm::PAGE_GIANT,
            module: para.module,
            memory: para.memory,
            half_freed: false,
            mapped: 0,
            bar: false,
            of_host: false,
            route: 0,
        };
        para.id = id;
        para.pages = handle.pages;
        if let Some(table) = self.table(physical) {
            table.insert(id, handle);
        }
        put(arg, &para);
        Ok(())
    }

    /// Older generations only check that the number is possible.
    fn has_numa_node(&self, node: u32) -> bool {
        let checked = Behaviour::of(self.machine.config.generation).checks_numa_node;
        node < if checked { self.machine.config.numa_nodes } else { MAX_NUMA_NODES }
    }

    /// MEM_RELEASE.
    pub(super) fn mem_release(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemRelease = arg.para();
        if para.side != svm::SIDE_HOST && para.side != svm::SIDE_DEVICE {
            return refuse(Errno::EINVAL, "no such side");
        }
        if para.side == svm::SIDE_HOST && self.physical != HOST {
            return refuse(Errno::EINVAL, "host memory is released on device 65");
        }
        para.kind = 0;
        match self.process.nodes.get(&(self.physical, para.id)).copied() {
            None if self.process.foreign.contains_key(&(self.physical, para.id)) => {
                self.release_shared(&para)?;
                if let Some((_, block)) = self.process.foreign.remove(&(self.physical, para.id)) {
                    self.world.store.free(block);
                }
                para.kind = svm::RELEASED_IMPORT;
            }
            None => self.release_plain(&para)?,
            Some(node) => {
                self.release_shared(&para)?;
                self.process.nodes.remove(&(self.physical, para.id));
                self.world.shares.put(&mut self.world.store, node, self.physical, self.process.tgid, false);
                if node.foreign {
                    return refuse(Errno::EFAULT, "the other server does not answer");
                }
                if node.imported {
                    para.kind = svm::RELEASED_IMPORT;
                }
            }
        }
        put(arg, &para);
        Ok(())
    }

    /// Frees pages of a handle that is not shared.
    fn release_plain(&mut self, para: &svm::MemRelease) -> SvmResult {
        if para.side == svm::SIDE_HOST {
            return self.release_pages(para.id, para.pages);
        }
        // The device gets one message per group of pages, so with no pages it gets none.
        let mut named = 0;
        while named < para.pages {
            self.message(self.physical)?;
            let pages = (para.pages - named).min(PAGES_PER_MESSAGE);
            self.release_pages(para.id, pages)?;
            named += pages;
        }
        Ok(())
    }

    fn release_pages(&mut self, id: i32, pages: u64) -> SvmResult {
        let physical = self.physical;
        let Some(handle) = self.table(physical).and_then(|table| table.get_mut(id)) else {
            return refuse(Errno::EINVAL, "there is no such handle");
        };
        if handle.mapped != 0 {
            return refuse(Errno::EBUSY, "the handle is mapped");
        }
        handle.left -= pages.min(handle.left);
        let (block, length) = (handle.block, handle.left * handle.page_size);
        if handle.left == 0 {
            if let Some(table) = self.table(physical) {
                table.remove(id);
            }
            self.world.store.free(block);
        } else {
            handle.half_freed = true;
            self.world.store.shrink(block, length);
        }
        Ok(())
    }

    /// Removes an exported or imported handle. The pages belong to the share, so the page count is
    /// ignored.
    fn release_shared(&mut self, para: &svm::MemRelease) -> SvmResult {
        if para.side == svm::SIDE_DEVICE {
            self.message(self.physical)?;
        }
        let physical = self.physical;
        let Some(handle) = self.table(physical).and_then(|table| table.get(para.id)) else {
            return refuse(Errno::EINVAL, "there is no such handle");
        };
        if handle.mapped != 0 {
            return refuse(Errno::EBUSY, "the handle is mapped");
        }
        let trapped = physical == HOST
            && handle.kind == HandleKind::Exported
            && handle.half_freed
            && handle.page == svm::PAGE_HUGE;
        if trapped {
            let detail = format!(
                "MEM_RELEASE of handle {}, huge pages of the host that were partly released and then exported: the \
                 kernel would use a freed page",
                para.id
            );
            self.machine.traps.push(Trap { name: "release-of-half-freed-export", tgid: self.caller.tgid, detail });
        }
        if let Some(table) = self.table(physical) {
            table.remove(para.id);
        }
        Ok(())
    }

    /// MEM_HANDLE_SET_ATTR.
    pub(super) fn handle_set_attr(&mut self, arg: &mut Arg) -> SvmResult {
        let para: svm::MemHandleAttr = arg.para();
        if para.kind != 0 {
            return refuse(Errno::EOPNOTSUPP, "no such attribute");
        }
        if para.value.route > 1 {
            return refuse(Errno::EINVAL, "no such route");
        }
        if para.side != svm::SIDE_DEVICE {
            return refuse(Errno::EOPNOTSUPP, "only device memory has a route");
        }
        self.message(self.physical)?;
        let physical = self.physical;
        let Some(handle) = self.table(physical).and_then(|table| table.get_mut(para.id)) else {
            return refuse(Errno::EINVAL, "there is no such handle");
        };
        handle.route = para.value.route;
        Ok(())
    }

    /// MEM_HANDLE_GET_ATTR.
    pub(super) fn handle_get_attr(&mut self, arg: &mut Arg) -> SvmResult {
        let mut para: svm::MemHandleAttr = arg.para();
        if para.kind != 0 {
            return refuse(Errno::EOPNOTSUPP, "no such attribute");
        }
        self.message(self.physical)?;
        let physical = self.physical;
        let Some(handle) = self.table(physical).and_then(|table| table.get(para.id)) else {
            return refuse(Errno::EINVAL, "there is no such handle");
        };
        para.value.route = handle.route;
        put(arg, &para);
        Ok(())
    }
}
