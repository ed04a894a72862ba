//! The members of the argument's union: what each SVM command reads and writes after the head.
//!
//! Field names are this crate's; the driver's stand beside them. Fields were only ever appended, so
//! the newest form serves every generation.

use crate::layout::declare_layouts;

declare_layouts! {
    /// The argument of every command, in all known generations.
    pub struct Arg = "devmm_ioctl_arg", 344 {
        /// Which device.
        pub head: Head = "head" @ 0,
        /// Padding.
        pub _pad: [u8; 4],
        /// The union: the member of the command, see [`request`](super::request).
        pub data: [u64; 41] = "data" @ 16,
    }

    /// The first bytes of every argument.
    pub struct Head = "devmm_devid", 12 {
        /// Out, for commands that convert the id: what the caller passed in `device`.
        pub logical: u32 = "logical_devid" @ 0,
        /// In: logical id, or 65 for the host. Out, for commands that convert the id: **physical**
        /// id.
        pub device: u32 = "devid" @ 4,
        /// Virtual function; 0.
        pub vf: u32 = "vfid" @ 8,
    }

    /// An address range that a session maps, in the answer of GET_MMAP_INFO.
    pub struct Segment = "devmm_mmap_addr_seg", 16 {
        pub start: u64 = "va" @ 0,
        pub size: u64 = "size" @ 8,
    }

    /// GET_MMAP_INFO.
    pub struct MmapInfo = "devmm_get_mmap_para", 24 {
        /// In: capacity of the array, out: number of segments.
        pub segments: u32 = "seg_num" @ 0,
        /// Not written by the host driver.
        pub need_nptmv: u8 = "is_need_map_nptmv" @ 4,
        pub _pad0: [u8; 3],
        pub hostpid: i32 = "hostpid" @ 8,
        pub aicpupid: i32 = "aicpupid" @ 12,
        /// Address of an array of [`Segment`]s.
        pub array: u64 = "segs" @ 16,
    }

    /// INIT_PROCESS: all fields are output.
    pub struct InitProcess = "devmm_init_process_para", 20 {
        /// The larger of the host page and 4 KiB.
        pub svm_page_size: u32 = "svm_page_size" @ 0,
        pub host_page_size: u32 = "local_page_size" @ 4,
        /// 2 MiB.
        pub huge_page_size: u32 = "huge_page_size" @ 8,
        /// Host memory in 1 GiB pages (aarch64 hosts on HCCS only).
        pub host_giant_page: u8 = "is_enable_host_giant_page" @ 12,
        pub _pad0: [u8; 3],
        /// From 26.1 on; unchanged before.
        pub uvm_page_size: u32 = "uvm_page_size" @ 16,
    }

    /// SETUP_DEVICE: capabilities of the physical device, and one input.
    pub struct SetupDevice = "devmm_setup_dev_para", 72 {
        pub dvpp_size: u64 = "dvpp_mem_size" @ 0,
        /// Device memory can be seen by the CPU.
        pub bar_memory: u32 = "support_bar_mem" @ 8,
        pub support_dev_read_only: u32 = "support_dev_read_only" @ 12,
        pub device_memory_on_host: u32 = "support_dev_mem_map_host" @ 16,
        pub bar_huge_memory: u32 = "support_bar_huge_mem" @ 20,
        pub host_support_pin_user_pages_interface: u32 = "host_support_pin_user_pages_interface" @ 24,
        pub support_host_rw_dev_ro: u32 = "support_host_rw_dev_ro" @ 28,
        pub support_host_pin_pre_register: u32 = "support_host_pin_pre_register" @ 32,
        pub support_host_mem_pool: u32 = "support_host_mem_pool" @ 36,
        pub double_pgtable_offset: u64 = "double_pgtable_offset" @ 40,
        /// In: page-aligned buffer for statistics, or an unaligned value such as 1 for none.
        pub stats_address: u64 = "mem_stats_va" @ 48,
        /// 1 GiB pages.
        pub giant_page: u32 = "support_agent_giant_page" @ 56,
        pub support_remote_mmap: u32 = "support_remote_mmap" @ 60,
        pub support_shmem_map_exbus: u32 = "support_shmem_map_exbus" @ 64,
        /// From 9.0.0 on.
        pub host_uva: u32 = "support_mem_host_uva" @ 68,
    }

    /// UPDATE_HEAP. Disabling checks `index` and `size` only.
    pub struct UpdateHeap = "devmm_update_heap_para", 24 {
        /// [`HEAP_ENABLE`](super::HEAP_ENABLE) or [`HEAP_DISABLE`](super::HEAP_DISABLE).
        pub operation: u32 = "op" @ 0,
        pub kind: u32 = "heap_type" @ 4,
        pub sub_kind: u32 = "heap_sub_type" @ 8,
        /// In GiB from the start of the SVM range.
        pub index: u32 = "heap_idx" @ 12,
        /// Bytes, a multiple of 1 GiB.
        pub size: u64 = "heap_size" @ 16,
    }

    /// ALLOC and UVM_ALLOC: reserves the chunks that the range touches; one call makes one
    /// reservation.
    pub struct Alloc = "devmm_mem_alloc_para", 16 {
        pub address: u64 = "p" @ 0,
        pub size: u64 = "size" @ 8,
    }

    /// FREE_PAGES: frees the whole reservation that starts at the address.
    pub struct FreePages = "devmm_free_pages_para", 8 {
        pub address: u64 = "va" @ 0,
    }

    /// MEM_CREATE: physical memory.
    pub struct MemCreate = "devmm_mem_create_para", 48 {
        /// Out: the handle.
        pub id: i32 = "id" @ 0,
        /// For [`SIDE_HOST_NUMA`](super::SIDE_HOST_NUMA); -1 for no preference.
        pub numa_node: u32 = "host_numa_id" @ 4,
        /// Multiple of the page.
        pub size: u64 = "size" @ 8,
        /// 0.
        pub flags: u64 = "flag" @ 16,
        /// One of the `SIDE_*` values.
        pub side: u32 = "side" @ 24,
        /// The module that the vendor accounts the memory to; must be repeated when mapping.
        pub module: u32 = "module_id" @ 28,
        /// One of the `PAGE_*` values.
        pub page: u32 = "pg_type" @ 32,
        /// One of the `MEMORY_*` values.
        pub memory: u32 = "mem_type" @ 36,
        /// Out: number of pages; must be repeated when mapping and releasing.
        pub pages: u64 = "pg_num" @ 40,
    }

    /// MEM_RELEASE: refused while mapped. With `pages` 0 a device handle returns 0 and frees
    /// nothing.
    pub struct MemRelease = "devmm_mem_release_para", 24 {
        pub id: i32 = "id" @ 0,
        /// Host or device; NUMA memory is host.
        pub side: u32 = "side" @ 4,
        pub pages: u64 = "pg_num" @ 8,
        /// Out: 2 if it was an import.
        pub kind: u32 = "handle_type" @ 16,
        pub _pad0: [u8; 4],
    }

    /// MEM_MAP: maps the start of a handle at an address inside one reservation.
    pub struct MemMap = "devmm_mem_map_para", 40 {
        pub address: u64 = "va" @ 0,
        pub size: u64 = "size" @ 8,
        pub id: i32 = "id" @ 16,
        pub side: u32 = "side" @ 20,
        pub page: u32 = "pg_type" @ 24,
        pub module: u32 = "module_id" @ 28,
        pub pages: u64 = "pg_num" @ 32,
    }

    /// MEM_UNMAP: unmaps the whole mapping that starts at the address.
    pub struct MemUnmap = "devmm_mem_unmap_para", 24 {
        pub address: u64 = "va" @ 0,
        /// Out.
        pub size: u64 = "unmap_size" @ 8,
        /// Out.
        pub side: u32 = "side" @ 16,
        /// Out: logical id.
        pub device: u32 = "logic_devid" @ 20,
    }

    /// MEM_QUERY_OWNER: the range must be exactly one mapping.
    pub struct MemQueryOwner = "devmm_mem_query_owner_para", 24 {
        pub address: u64 = "va" @ 0,
        pub size: u64 = "size" @ 8,
        /// Out: **physical** id.
        pub device: u32 = "devid" @ 16,
        /// Out: 0 for imported memory.
        pub local: u32 = "local_handle_flag" @ 20,
    }

    /// MEM_SET_ACCESS and MEM_GET_ACCESS. **Never set type 0**: the next call for the host panics
    /// the kernel.
    pub struct MemAccess = "devmm_mem_set_access_para", 24 {
        pub address: u64 = "va" @ 0,
        /// The whole mapping; out for GET.
        pub size: u64 = "size" @ 8,
        /// Logical id of the device that is granted access.
        pub device: u32 = "logic_devid" @ 16,
        /// One of the `ACCESS_*` values.
        pub access: u32 = "type" @ 20,
    }

    /// MEM_EXPORT: makes a handle importable, once.
    pub struct MemExport = "devmm_mem_export_para", 12 {
        pub side: i32 = "side" @ 0,
        pub id: i32 = "id" @ 4,
        /// Out: small, sequential, guessable.
        pub share: i32 = "share_id" @ 8,
    }

    /// MEM_IMPORT.
    pub struct MemImport = "devmm_mem_import_para", 56 {
        pub share: i32 = "share_id" @ 0,
        /// Super-pod id; with `kind` 0 that of the importing device, or 0.
        pub sdid: u32 = "share_sdid" @ 4,
        /// The exporting device **in the importer's numbering**, or 65.
        pub exporter: u32 = "share_devid" @ 8,
        /// Not used on one server.
        pub exporter_physical: u32 = "share_phy_devid" @ 12,
        /// 0 none, 1 fabric, 2 posix.
        pub kind: u32 = "handle_type" @ 16,
        /// Out: the handle.
        pub id: i32 = "id" @ 20,
        /// Out.
        pub side: u32 = "side" @ 24,
        /// Out.
        pub module: u32 = "module_id" @ 28,
        /// Out.
        pub page: u32 = "pg_type" @ 32,
        pub _pad0: [u8; 4],
        /// Out.
        pub pages: u64 = "pg_num" @ 40,
        /// Out, from 9.0.0 on.
        pub memory: u32 = "mem_type" @ 48,
        pub _pad1: [u8; 4],
    }

    /// MEM_SET_PID: adds processes to the trust list.
    pub struct MemSetPid = "devmm_mem_set_pid_para", 16 {
        pub share: i32 = "share_id" @ 0,
        /// 1 to 65535.
        pub count: u32 = "pid_num" @ 4,
        /// Address of i32 process ids of the initial pid namespace.
        pub pids: u64 = "pid_list" @ 8,
    }

    /// MEM_SET_ATTR.
    pub struct MemSetAttr = "devmm_mem_set_attr_para", 44 {
        pub share: i32 = "share_id" @ 0,
        /// 0: the trust list.
        pub kind: u32 = "type" @ 4,
        pub value: ShareAttr = "attr" @ 8,
    }

    /// MEM_GET_ATTR.
    pub struct MemGetAttr = "devmm_mem_get_attr_para", 48 {
        pub share: i32 = "share_id" @ 0,
        /// Logical id, or 65.
        pub exporter: u32 = "share_devid" @ 4,
        pub kind: u32 = "type" @ 8,
        /// Out.
        pub value: ShareAttr = "attr" @ 12,
    }

    /// MEM_GET_INFO.
    pub struct MemGetInfo = "devmm_mem_get_info_para", 44 {
        pub share: i32 = "share_id" @ 0,
        /// Logical id, or 65.
        pub exporter: u32 = "share_devid" @ 4,
        /// Out.
        pub info: ShareInfo = "info" @ 8,
    }

    /// MEM_HANDLE_SET_ATTR and MEM_HANDLE_GET_ATTR, from 26.1 on.
    pub struct MemHandleAttr = "devmm_mem_handle_set_attr_para", 48, since V26_1 {
        pub id: i32 = "id" @ 0,
        /// 0: the route.
        pub kind: u32 = "type" @ 4,
        pub side: u32 = "side" @ 8,
        pub value: HandleAttr = "attr" @ 12,
    }

    /// RESERVE_ADDR_INFO_QUERY: reports the *mapping* that contains the address.
    pub struct ReserveAddressInfo = "devmm_resv_addr_info_query_para", 32 {
        pub address: u64 = "va" @ 0,
        /// Out.
        pub start: u64 = "start" @ 8,
        /// Out, inclusive.
        pub end: u64 = "end" @ 16,
        /// Out.
        pub module: u32 = "module_id" @ 24,
        /// Out: logical id.
        pub device: u32 = "devid" @ 28,
    }

    /// MEMCPY. If `direction` comes back 0 nothing was copied: both sides are host memory.
    pub struct Memcpy = "devmm_mem_copy_para", 32 {
        pub destination: u64 = "dst" @ 0,
        pub source: u64 = "src" @ 8,
        pub size: u64 = "ByteCount" @ 16,
        /// 0.
        pub device_local: u8 = "is_support_dev_local_addr" @ 24,
        pub _pad0: [u8; 3],
        /// One of the `COPY_*` values; out: the actual direction.
        pub direction: u32 = "direction" @ 28,
    }

    /// MEMCPY2D: only explicit host to device or device to host.
    pub struct Memcpy2d = "devmm_mem_copy2d_para", 56 {
        pub destination: u64 = "dst" @ 0,
        pub source: u64 = "src" @ 8,
        pub destination_pitch: u64 = "dpitch" @ 16,
        pub source_pitch: u64 = "spitch" @ 24,
        pub width: u64 = "width" @ 32,
        pub height: u64 = "height" @ 40,
        pub direction: u32 = "direction" @ 48,
        pub _pad0: [u8; 4],
    }

    /// ASYNC_MEMCPY and MEMCPY_RESULT_REFRESH.
    pub struct AsyncMemcpy = "devmm_mem_async_copy_para", 48 {
        pub destination: u64 = "dst" @ 0,
        pub source: u64 = "src" @ 8,
        pub size: u64 = "byte_count" @ 16,
        pub start_time: u64 = "start_time" @ 24,
        /// Out of the refresh: [`ASYNC_DONE`](super::ASYNC_DONE) or
        /// [`ASYNC_FAILED`](super::ASYNC_FAILED).
        pub state: u64 = "cpy_state" @ 32,
        /// Out of the copy, in for the refresh, which can be done once.
        pub task: i32 = "task_id" @ 40,
        pub _pad0: [u8; 4],
    }

    /// MEMCPY_BATCH: all host to device or all device to host.
    pub struct MemcpyBatch = "devmm_mem_copy_batch_para", 32 {
        /// Address of u64 addresses.
        pub destinations: u64 = "dst" @ 0,
        /// Address of u64 addresses.
        pub sources: u64 = "src" @ 8,
        /// Address of u64 sizes.
        pub sizes: u64 = "size" @ 16,
        /// At most 4096.
        pub count: u32 = "addr_count" @ 24,
        pub _pad0: [u8; 4],
    }

    /// MEMSET8. If `host_mapped` comes back 1 nothing was filled.
    pub struct Memset = "devmm_mem_memset_para", 32 {
        pub destination: u64 = "dst" @ 0,
        /// Low 8 bits.
        pub value: u64 = "value" @ 8,
        pub size: u64 = "count" @ 16,
        /// Out.
        pub host_mapped: u32 = "hostmapped" @ 24,
        pub _pad0: [u8; 4],
    }

    /// ADVISE and PREFETCH (peer access).
    pub struct Advise = "devmm_mem_advise_para", 24 {
        pub address: u64 = "ptr" @ 0,
        pub size: u64 = "count" @ 8,
        /// [`Advice`](super::Advice) bits.
        pub advice: u32 = "advise" @ 16,
        pub _pad0: [u8; 4],
    }

    /// QUERY_MEM_USEDINFO: bytes per kind of page.
    pub struct MemUsedInfo = "devmm_query_device_mem_usedinfo", 56 {
        /// 1 DDR, 2 HBM, 3 DDR P2P, 4 HBM P2P: not the `MEMORY_*` values.
        pub memory: u32 = "mem_type" @ 0,
        pub _pad0: [u8; 4],
        pub normal_total_size: u64 = "normal_total_size" @ 8,
        pub normal_free_size: u64 = "normal_free_size" @ 16,
        pub huge_total_size: u64 = "huge_total_size" @ 24,
        pub huge_free_size: u64 = "huge_free_size" @ 32,
        pub giant_total_size: u64 = "giant_total_size" @ 40,
        pub giant_free_size: u64 = "giant_free_size" @ 48,
    }

    /// CHECK_MEMINFO.
    pub struct CheckMemInfo = "devmm_check_mem_info", 16 {
        pub addresses: u64 = "va" @ 0,
        pub count: u32 = "cnt" @ 8,
        pub heap_subtype_mask: u32 = "heap_subtype_mask" @ 12,
    }

    /// SUBMIT_CONVERT_CPY and WAIT_CONVERT_CPY_RESULT.
    pub struct ConvertCopy = "devmm_mem_convert_copy_para", 48 {
        pub dma_addr: [u64; 5] = "dmaAddr" @ 0,
        pub sync_flag: i32 = "sync_flag" @ 40,
        pub _pad0: [u8; 4],
    }

    /// CONVERT_ADDR.
    pub struct ConvertAddress = "devmm_mem_convrt_addr_para", 144 {
        pub source: u64 = "pSrc" @ 0,
        pub destination: u64 = "pDst" @ 8,
        pub spitch: u64 = "spitch" @ 16,
        pub dpitch: u64 = "dpitch" @ 24,
        pub len: u64 = "len" @ 32,
        pub height: u64 = "height" @ 40,
        pub fixed_size: u64 = "fixed_size" @ 48,
        pub direction: u32 = "direction" @ 56,
        pub _pad0: [u8; 4],
        pub dma_addr: [u64; 5] = "dmaAddr" @ 64,
        pub dma_node_num: u32 = "dma_node_num" @ 104,
        pub virt_id: u32 = "virt_id" @ 108,
        pub dev_id: u32 = "dev_id" @ 112,
        pub destroy_flag: u32 = "destroy_flag" @ 116,
        pub convert_id: u64 = "convert_id" @ 120,
        pub need_write: u8 = "need_write" @ 128,
        pub _pad1: [u8; 7],
        pub pa_batch: u64 = "pa_batch" @ 136,
    }

    /// DESTROY_ADDR.
    pub struct DestroyAddress = "devmm_mem_destroy_addr_para", 104 {
        pub source: u64 = "pSrc" @ 0,
        pub destination: u64 = "pDst" @ 8,
        pub spitch: u64 = "spitch" @ 16,
        pub dpitch: u64 = "dpitch" @ 24,
        pub len: u64 = "len" @ 32,
        pub height: u64 = "height" @ 40,
        pub fixed_size: u64 = "fixed_size" @ 48,
        pub dma_addr: [u64; 5] = "dmaAddr" @ 56,
        pub host_pid: i32 = "host_pid" @ 96,
        pub _pad0: [u8; 4],
    }

    /// DESTROY_ADDR_BATCH.
    pub struct DestroyAddressBatch = "devmm_destroy_addr_batch_para", 16 {
        pub dma_addr: u64 = "dmaAddr" @ 0,
        pub num: u32 = "num" @ 8,
        pub _pad0: [u8; 4],
    }

    /// TRANSLATE.
    pub struct Translate = "devmm_mem_translate_para", 24 {
        pub address: u64 = "vptr" @ 0,
        pub translated: u64 = "pptr" @ 8,
        pub addr_in_device: u32 = "addr_in_device" @ 16,
        pub _pad0: [u8; 4],
    }

    /// IPC_MEM_OPEN: memory shared by name.
    pub struct IpcOpen = "devmm_mem_ipc_open_para", 80 {
        pub address: u64 = "vptr" @ 0,
        pub name: [u8; 65] = "name" @ 8,
        pub _pad0: [u8; 7],
    }

    /// IPC_MEM_CLOSE.
    pub struct IpcClose = "devmm_mem_ipc_close_para", 8 {
        pub address: u64 = "vptr" @ 0,
    }

    /// IPC_MEM_CREATE.
    pub struct IpcCreate = "devmm_mem_ipc_create_para", 88 {
        pub address: u64 = "vptr" @ 0,
        pub len: u64 = "len" @ 8,
        pub name: [u8; 65] = "name" @ 16,
        pub _pad0: [u8; 3],
        pub name_len: u32 = "name_len" @ 84,
    }

    /// IPC_MEM_DESTROY.
    pub struct IpcDestroy = "devmm_mem_ipc_destroy_para", 65 {
        pub name: [u8; 65] = "name" @ 0,
    }

    /// IPC_MEM_QUERY.
    pub struct IpcQuery = "devmm_mem_query_size_para", 88 {
        pub name: [u8; 65] = "name" @ 0,
        pub _pad0: [u8; 3],
        pub is_huge: i32 = "is_huge" @ 68,
        pub phy_devid: u32 = "phy_devid" @ 72,
        pub _pad1: [u8; 4],
        pub len: u64 = "len" @ 80,
    }

    /// IPC_MEM_SET_PID and IPC_MEM_SET_PID_POD.
    pub struct IpcSetPid = "devmm_mem_ipc_set_pid_para", 204 {
        pub name: [u8; 65] = "name" @ 0,
        pub _pad0: [u8; 3],
        pub pids: [i32; 32] = "set_pid" @ 68,
        pub num: u32 = "num" @ 196,
        pub sdid: u32 = "sdid" @ 200,
    }

    /// IPC_MEM_SET_ATTR.
    pub struct IpcSetAttr = "devmm_mem_ipc_set_attr_para", 88 {
        pub kind: u32 = "type" @ 0,
        pub _pad0: [u8; 4],
        pub attr: u64 = "attr" @ 8,
        pub name: [u8; 65] = "name" @ 16,
        pub _pad1: [u8; 7],
    }

    /// IPC_MEM_GET_ATTR.
    pub struct IpcGetAttr = "devmm_mem_ipc_get_attr_para", 88 {
        pub kind: u32 = "type" @ 0,
        pub _pad0: [u8; 4],
        pub attr: u64 = "attr" @ 8,
        pub name: [u8; 65] = "name" @ 16,
        pub _pad1: [u8; 7],
    }

    /// PROCESS_STATUS_QUERY.
    pub struct ProcessStatusQuery = "devmm_query_process_status_para", 12 {
        pub process_type: u32 = "process_type" @ 0,
        pub pid_status: u32 = "pid_status" @ 4,
        pub status_result: u32 = "status_result" @ 8,
    }

    /// DBG_VA_STATUS.
    pub struct DebugVaStatus = "devmm_status_va_info_para", 16 {
        pub address: u64 = "va" @ 0,
        pub devid: u32 = "devid" @ 8,
        pub mem_type: u32 = "mem_type" @ 12,
    }

    /// MEM_REMOTE_MAP: registers host memory.
    pub struct RemoteMap = "devmm_mem_remote_map_para", 40 {
        pub src_va: u64 = "src_va" @ 0,
        pub dst_va: u64 = "dst_va" @ 8,
        pub size: u64 = "size" @ 16,
        pub map_type: u32 = "map_type" @ 24,
        pub proc_type: u32 = "proc_type" @ 28,
        pub access: u32 = "access" @ 32,
        pub _pad0: [u8; 4],
    }

    /// MEM_REMOTE_UNMAP.
    pub struct RemoteUnmap = "devmm_mem_remote_unmap_para", 24 {
        pub src_va: u64 = "src_va" @ 0,
        pub map_type: u32 = "map_type" @ 8,
        pub proc_type: u32 = "proc_type" @ 12,
        pub dst_va: u64 = "dst_va" @ 16,
    }

    /// MAP_DEV_RESERVE.
    pub struct MapDevReserve = "devmm_map_dev_reserve_para", 24 {
        pub addr_type: u32 = "addr_type" @ 0,
        pub _pad0: [u8; 4],
        pub address: u64 = "va" @ 8,
        pub len: u64 = "len" @ 16,
    }

    /// REGISTER_DMA.
    pub struct RegisterDma = "devmm_register_dma_para", 16 {
        pub address: u64 = "vaddr" @ 0,
        pub size: u64 = "size" @ 8,
    }

    /// UNREGISTER_DMA.
    pub struct UnregisterDma = "devmm_unregister_dma_para", 8 {
        pub address: u64 = "vaddr" @ 0,
    }

    /// MEM_REPAIR: the largest member, which fixes the size of the argument.
    pub struct MemRepair = "devmm_mem_repair_para", 328 {
        pub count: u32 = "count" @ 0,
        pub _pad0: [u8; 4],
        pub repair_addrs: [RepairAddress; 20] = "repair_addrs" @ 8,
    }

    /// MEM_MAP_CAP, from 9.0.0 on.
    pub struct MapCapability = "devmm_mem_map_cap_para", 8, since V9_0_0 {
        pub acc_module_type: u32 = "acc_module_type" @ 0,
        pub mem_map_capability: u32 = "mem_map_capability" @ 4,
    }

    /// DEV_BIND_SIBLING: no handler on a host.
    pub struct DevBindSibling = "devmm_dev_bind_sibling_para", 20 {
        pub hostpid: i32 = "hostpid" @ 0,
        pub aicpupid: i32 = "aicpupid" @ 4,
        pub vfid: u32 = "vfid" @ 8,
        pub devid: u32 = "devid" @ 12,
        pub sync_da_pagetable: u8 = "sync_da_pagetable" @ 16,
        pub _pad0: [u8; 3],
    }

    /// SOMA_POOL_CREATE.
    pub struct SomaPoolCreate = "devmm_soma_pool_create_para", 32, since V26_1 {
        pub dev_id: u64 = "dev_id" @ 0,
        pub pool_id: u64 = "pool_id" @ 8,
        pub address: u64 = "va" @ 16,
        pub size: u64 = "size" @ 24,
    }

    /// SOMA_POOL_DESTROY.
    pub struct SomaPoolDestroy = "devmm_soma_pool_destroy_para", 8, since V26_1 {
        pub pool_id: u64 = "pool_id" @ 0,
    }

    /// SOMA_POOL_MALLOC.
    pub struct SomaPoolMalloc = "devmm_soma_pool_malloc_para", 32, since V26_1 {
        pub pool_id: u64 = "pool_id" @ 0,
        pub address: u64 = "va" @ 8,
        pub size: u64 = "size" @ 16,
        pub policy: i32 = "policy" @ 24,
        pub _pad0: [u8; 4],
    }

    /// SOMA_POOL_FREE.
    pub struct SomaPoolFree = "devmm_soma_pool_free_para", 32, since V26_1 {
        pub pool_id: u64 = "pool_id" @ 0,
        pub address: u64 = "va" @ 8,
        pub size: u64 = "size" @ 16,
        pub policy: i32 = "policy" @ 24,
        pub _pad0: [u8; 4],
    }

    /// SOMA_POOL_TRIM.
    pub struct SomaPoolTrim = "devmm_soma_pool_trim_para", 32, since V26_1 {
        pub pool_id: u64 = "pool_id" @ 0,
        pub reserved_size: u64 = "reserved_size" @ 8,
        pub used_size: u64 = "used_size" @ 16,
        pub free_size: u64 = "free_size" @ 24,
    }

    /// UVM_ADVISE.
    pub struct UvmAdvise = "devmm_mem_managed_advise_para", 32, since V9_0_0 {
        pub address: u64 = "ptr" @ 0,
        pub size: u64 = "size" @ 8,
        pub advise: u32 = "advise" @ 16,
        pub kind: i32 = "type" @ 20,
        pub id: i32 = "id" @ 24,
        pub _pad0: [u8; 4],
    }

    /// UVM_MEM_RANGE_GET_ATTRIBUTES.
    pub struct UvmRangeAttributes = "devmm_mem_range_attributes", 48, since V26_1 {
        pub attributes: u64 = "attributes" @ 0,
        pub attribute_num: u64 = "attribute_num" @ 8,
        pub address: u64 = "ptr" @ 16,
        pub size: u64 = "size" @ 24,
        pub data: u64 = "data" @ 32,
        pub data_sizes: u64 = "data_sizes" @ 40,
    }

    /// UVM_PREFETCH.
    pub struct UvmPrefetch = "devmm_uvm_prefetch_para", 32, since V26_1 {
        pub address: u64 = "va" @ 0,
        pub size: u64 = "size" @ 8,
        pub location: [u32; 2] = "location" @ 16,
        pub flags: u32 = "flags" @ 24,
        pub _pad0: [u8; 4],
    }

    /// UVM_PREFETCH_BATCH.
    pub struct UvmPrefetchBatch = "devmm_uvm_prefetch_batch_para", 56, since V26_1 {
        pub vas: u64 = "vas" @ 0,
        pub sizes: u64 = "sizes" @ 8,
        pub count: u64 = "count" @ 16,
        pub locations: u64 = "locations" @ 24,
        pub loc_ids: u64 = "loc_ids" @ 32,
        pub num_loc: u64 = "num_loc" @ 40,
        pub flags: u64 = "flags" @ 48,
    }

    /// In [`MemSetAttr`] and [`MemGetAttr`].
    pub struct ShareAttr = "ShareHandleAttr", 36 {
        /// 1: any process that knows the id may import; cannot be undone.
        pub no_trust_list: u32 = "enableFlag" @ 0,
        pub rsv: [u32; 8] = "rsv" @ 4,
    }

    /// In [`MemGetInfo`].
    pub struct ShareInfo = "ShareHandleGetInfo", 36 {
        /// Physical id of the exporting device.
        pub physical: u32 = "phyDevid" @ 0,
        pub reserve: [u32; 8] = "reserve" @ 4,
    }

    /// In [`MemHandleAttr`].
    pub struct HandleAttr = "HandleAttr", 36, since V26_1 {
        /// 0 or 1.
        pub route: u32 = "mem_map_route" @ 0,
        pub rsv: [u32; 8] = "rsv" @ 4,
    }

    /// In [`MemRepair`].
    pub struct RepairAddress = "MemRepairAddr", 16 {
        pub address: u64 = "ptr" @ 0,
        pub size: u64 = "len" @ 8,
    }
}

/// A member of the argument's union: any plain struct.
pub trait Para: zerocopy::FromBytes + zerocopy::IntoBytes + zerocopy::Immutable + zerocopy::KnownLayout + Copy {}

impl<T> Para for T where
    T: zerocopy::FromBytes + zerocopy::IntoBytes + zerocopy::Immutable + zerocopy::KnownLayout + Copy
{
}
