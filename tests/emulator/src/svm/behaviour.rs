//! What the memory driver does that its interface does not show, by command and by generation.

use ascend_ioctl::Generation;
use ascend_ioctl::svm::Op;

/// Whether the driver converts `head.devid` from a logical to a physical id before the handler runs
/// and copies it back. Ids of the host are not changed.
pub fn converts_device_id(op: Op) -> bool {
    matches!(
        op,
        Op::MemQueryOwner
            | Op::MemSetAccess
            | Op::MemGetAccess
            | Op::ConvertAddr
            | Op::DestroyAddr
            | Op::Advise
            | Op::Prefetch
            | Op::IpcMemOpen
            | Op::SetupDevice
            | Op::ProcessStatusQuery
            | Op::CloseDevice
            | Op::MemRemoteMap
            | Op::MemRemoteUnmap
            | Op::QueryMemUsedInfo
            | Op::CheckMemInfo
            | Op::MapDevReserve
            | Op::MemCreate
            | Op::MemRelease
            | Op::MemMap
            | Op::MemUnmap
            | Op::MemExport
            | Op::MemImport
            | Op::MemSetPid
            | Op::MemSetAttr
            | Op::RegisterDma
            | Op::UnregisterDma
            | Op::MemRepair
            | Op::PrepareCloseDevice
            | Op::MemMapCap
            | Op::SomaPoolCreate
            | Op::SomaPoolDestroy
            | Op::SomaPoolTrim
            | Op::MemHandleSetAttr
            | Op::MemHandleGetAttr
    )
}

/// Whether the driver raises the counter of the reservation that an address of the command lies in,
/// for the time of the call or for longer.
pub fn counts_reservation(op: Op) -> bool {
    matches!(
        op,
        Op::Memcpy
            | Op::Memcpy2d
            | Op::AsyncMemcpy
            | Op::ConvertAddr
            | Op::Advise
            | Op::Prefetch
            | Op::Memset8
            | Op::Translate
            | Op::IpcMemOpen
            | Op::IpcMemClose
            | Op::IpcMemCreate
            | Op::MemRemoteMap
            | Op::MemRemoteUnmap
            | Op::MemMap
            | Op::MemUnmap
            | Op::RegisterDma
            | Op::MemRepair
            | Op::ReserveAddrInfoQuery
    )
}

/// Whether the model does what the driver's handler does. The driver has handlers for the rest too:
/// pools, repair, managed memory of newer cards.
pub fn is_modelled(op: Op) -> bool {
    !matches!(
        op,
        Op::MemRepair
            | Op::SomaPoolCreate
            | Op::SomaPoolDestroy
            | Op::SomaPoolMalloc
            | Op::SomaPoolFree
            | Op::SomaPoolTrim
            | Op::UvmAlloc
            | Op::UvmAdvise
            | Op::UvmMemRangeGetAttributes
            | Op::UvmMemcpy
            | Op::UvmPrefetch
            | Op::UvmPrefetchBatch
    )
}

/// Where the generations behave differently.
pub struct Behaviour {
    /// INIT_PROCESS reports the page size of managed memory.
    pub reports_uvm_page: bool,
    /// SOMA pools have handlers on the host.
    pub has_soma_pools: bool,
    /// Host memory in normal pages can be imported on a device.
    pub imports_normal_host_pages: bool,
    /// MEM_CREATE refuses a NUMA node that is not online.
    pub checks_numa_node: bool,
    /// Unmapping host memory that fills a dynamic range looks like a munmap by the process, whose
    /// handling waits for the lock that MEM_UNMAP holds. Later ones recognise their own unmapping,
    /// but not that of a heap that is disabled.
    pub whole_dynamic_unmap_hangs: bool,
    /// SETUP_DEVICE never returns while a heap reaches beyond this index: it counts heaps in a
    /// number of 16 bits.
    pub setup_heaps: u64,
    /// ADVISE may ask for huge pages in a pinned-host heap.
    pub huge_pinned_pages: bool,
    /// How many kinds of MEM_REMOTE_MAP there are.
    pub remote_kinds: u32,
    /// The bits of an access of MEM_REMOTE_MAP with which the CPU may only read device memory.
    pub read_only_access: u32,
    /// Refreshing an asynchronous copy releases the mappings of its first part only: the others
    /// stay occupied until the process ends.
    pub refresh_releases_first_part: bool,
}

const V8_5_0: Behaviour = Behaviour {
    reports_uvm_page: false,
    has_soma_pools: false,
    imports_normal_host_pages: true,
    checks_numa_node: false,
    whole_dynamic_unmap_hangs: true,
    setup_heaps: 1 << 16,
    huge_pinned_pages: false,
    remote_kinds: 6,
    // Its command has no access.
    read_only_access: 0,
    refresh_releases_first_part: true,
};

const V9_0_0: Behaviour = Behaviour {
    imports_normal_host_pages: false,
    checks_numa_node: true,
    whole_dynamic_unmap_hangs: false,
    huge_pinned_pages: true,
    remote_kinds: 7,
    // It takes every access but 0 for a read-only one (`devmm_is_read_only_mem`).
    read_only_access: u32::MAX,
    ..V8_5_0
};

const V26_1: Behaviour = Behaviour {
    reports_uvm_page: true,
    has_soma_pools: true,
    setup_heaps: u64::MAX,
    read_only_access: 1 << 28,
    refresh_releases_first_part: false,
    ..V9_0_0
};

impl Behaviour {
    /// The behaviour of a generation. A newer one is assumed to behave like the newest of these.
    pub fn of(generation: Generation) -> &'static Behaviour {
        match generation {
            Generation::V8_5_0 => &V8_5_0,
            Generation::V9_0_0 => &V9_0_0,
            _ => &V26_1,
        }
    }

    /// Whether the host driver has a handler for the command; without one it answers EOPNOTSUPP.
    pub fn handles(&self, op: Op) -> bool {
        match op {
            Op::GetProcStatus | Op::DevSetSibling | Op::DevBindSibling => false,
            Op::SomaPoolMalloc | Op::SomaPoolFree => false,
            Op::SomaPoolCreate | Op::SomaPoolDestroy | Op::SomaPoolTrim => self.has_soma_pools,
            _ => true,
        }
    }
}
