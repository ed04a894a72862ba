//! Module `SVM`, second generation ("devmm"): memory.
//!
//! All commands share one 344-byte argument: a head with the device, then a union. The kernel
//! ignores the size bits of the request, copies *its own* size in and out, copies nothing back on
//! error, and rewrites the head of commands that convert the device id. So build the argument anew
//! for every call, and never pass a buffer smaller than the kernel's. The direction bits decide
//! what is copied; only INIT_PROCESS must be the exact value. Which commands exist under which
//! number depends on the generation: [`crate::Generation::svm`].

mod para;

pub use para::*;

use crate::Generation;
use crate::command::{Command, Direction};
use crate::layout::{declare_constants, declare_flags};
use core::marker::PhantomData;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Size of the argument.
pub const ARG_SIZE: usize = 344;

/// Offset of the union in it.
pub const DATA: usize = 16;

const _: () = {
    assert!(size_of::<Arg>() == ARG_SIZE);
    assert!(core::mem::offset_of!(Arg, data) == DATA);
};

impl Arg {
    /// The argument of a command on `device` (a logical id, or [`HOST_ID`]); all other bytes zero.
    #[inline]
    pub fn new<A: Para>(device: u32, para: &A) -> Arg {
        const { assert!(size_of::<A>() <= ARG_SIZE - DATA, "every member fits the union") };
        let mut arg = Arg::new_zeroed();
        arg.head.device = device;
        // It fits, so this writes all of it.
        let _ = para.write_to_prefix(arg.data.as_mut_bytes());
        arg
    }

    /// The member of the union that a command reads.
    #[inline]
    pub fn para<A: Para>(&self) -> A {
        const { assert!(size_of::<A>() <= ARG_SIZE - DATA, "every member fits the union") };
        match A::read_from_prefix(self.data.as_bytes()) {
            Ok((para, _)) => para,
            Err(_) => A::new_zeroed(),
        }
    }
}

declare_constants! {
    /// Magic. DEVMNG has the same; the module that the file is bound to decides.
    pub const MAGIC: u8 = b'M', "DEVMM_SVM_MAGIC";
    /// The host agent's id; unsupported on current hardware.
    pub const HOST_AGENT_ID: u32 = 64, "SVM_HOST_AGENT_ID";
    /// Device ids from here on are ENODEV.
    pub const DEVICE_IDS: u32 = 1124, "DEVMM_MAX_DEVICE_NUM";
    /// Number of physical devices.
    pub const PHYSICAL_DEVICES: u32 = 64, "DEVMM_MAX_PHY_DEVICE_NUM";
    /// Number of ids that can be granted access.
    pub const ACCESS_IDS: u32 = 66, "DEVMM_MAX_LOGIC_DEVICE_NUM";

    /// Start of the SVM segment.
    pub const SVM_START: u64 = 0x1000_0000_0000, "DEVMM_SVM_MEM_START";
    /// Its size: 8 TiB.
    pub const SVM_SIZE: u64 = 0x800_0000_0000, "DEVMM_SVM_MEM_SIZE";
    /// Start of the SOMA segment. **A CPU access there hangs the thread in the kernel forever.**
    pub const SOMA_START: u64 = 0xC00_0000_0000, "DEVMM_SOMA_MEM_START", since V26_1;
    /// Its size: 2 TiB.
    pub const SOMA_SIZE: u64 = 0x200_0000_0000, "DEVMM_SOMA_MEM_SIZE", since V26_1;
    /// Start of the UVM segment.
    pub const UVM_START: u64 = 0x900_0000_0000, "DEVMM_UVM_MEM_START", since V26_1;
    /// Its size: 3 TiB.
    pub const UVM_SIZE: u64 = 0x300_0000_0000, "DEVMM_UVM_MEM_SIZE", since V26_1;
    /// Start of the host-pin segment when devices are attached by PCI Express.
    pub const HOST_PIN_START_PCIE: u64 = 0x700_0000_0000, "DEVMM_DEFAULT_HOST_UVA_START", since V9_0_0;
    /// Start of the host-pin segment when devices are attached by HCCS.
    pub const HOST_PIN_START_HCCS: u64 = 0x800_0000_0000, "DEVMM_HCCS_HOST_UVA_START", since V9_0_0;
    /// Its size: 1 TiB.
    pub const HOST_PIN_SIZE: u64 = 0x100_0000_0000, "DEVMM_HOST_PIN_SIZE", since V9_0_0;
    /// Where ordinary heaps begin; below it are the areas of the video and read-only heaps.
    pub const NORMAL_START: u64 = 0x12C0_0000_0000, "DEVMM_NORMAL_ADDR_START";
    /// Where addresses begin that need a mapping of their own.
    pub const DYNAMIC_START: u64 = 0x1800_0000_0000, "DEVMM_MAX_DYN_ALLOC_BASE";
    /// Unit of heaps: 1 GiB.
    pub const HEAP_UNIT: u64 = 0x4000_0000, "DEVMM_HEAP_SIZE";
    /// Heap indices of the static range.
    pub const STATIC_HEAPS: u32 = 8192, "DEVMM_MAX_HEAP_NUM";
    /// All heap indices.
    pub const HEAPS: u32 = 0x3_C000, "DEVMM_TOTAL_MAX_HEAP_NUM";
    /// 1 GiB.
    pub const GIANT_PAGE: u64 = 0x4000_0000, "DEVMM_GIANT_PAGE_SIZE";
    /// Most pages of a static heap.
    pub const HEAP_PAGES: u64 = 0x1FFF_FFFF, "DEVMM_MAX_ALLOC_PAGE_NUM";

    /// [`UpdateHeap::operation`].
    pub const HEAP_ENABLE: u32 = 0, "DEVMM_HEAP_ENABLE";
    /// [`UpdateHeap::operation`].
    pub const HEAP_DISABLE: u32 = 1, "DEVMM_HEAP_DISABLE";
    /// [`UpdateHeap::kind`]: pinned host memory.
    pub const HEAP_PINNED_HOST: u32 = 0xEFEF_0001, "DEVMM_HEAP_PINNED_HOST";
    /// [`UpdateHeap::kind`]: 2 MiB chunks.
    pub const HEAP_HUGE: u32 = 0xEFEF_0002, "DEVMM_HEAP_HUGE_PAGE";
    /// [`UpdateHeap::kind`]: chunks of the host's page size.
    pub const HEAP_CHUNK: u32 = 0xEFEF_0003, "DEVMM_HEAP_CHUNK_PAGE";
    /// [`UpdateHeap::sub_kind`].
    pub const SUB_SVM: u32 = 0, "SUB_SVM_TYPE";
    /// [`UpdateHeap::sub_kind`].
    pub const SUB_DEVICE: u32 = 1, "SUB_DEVICE_TYPE";
    /// [`UpdateHeap::sub_kind`].
    pub const SUB_HOST: u32 = 2, "SUB_HOST_TYPE";
    /// [`UpdateHeap::sub_kind`].
    pub const SUB_DVPP: u32 = 3, "SUB_DVPP_TYPE";
    /// [`UpdateHeap::sub_kind`].
    pub const SUB_READ_ONLY: u32 = 4, "SUB_READ_ONLY_TYPE";
    /// [`UpdateHeap::sub_kind`]: reservations that physical memory is mapped into.
    pub const SUB_RESERVE: u32 = 5, "SUB_RESERVE_TYPE";
    /// [`UpdateHeap::sub_kind`].
    pub const SUB_DEVICE_READ_ONLY: u32 = 6, "SUB_DEV_READ_ONLY_TYPE";

    /// Side: host memory.
    pub const SIDE_HOST: u32 = 0, "MEM_HOST_SIDE";
    /// Side: device memory.
    pub const SIDE_DEVICE: u32 = 1, "MEM_DEV_SIDE";
    /// Side: host memory of one NUMA node; MEM_CREATE only.
    pub const SIDE_HOST_NUMA: u32 = 2, "MEM_HOST_NUMA_SIDE";
    /// Sides from here on are EINVAL.
    pub const SIDES: u32 = 3, "MEM_MAX_SIDE";
    /// Page: the host's.
    pub const PAGE_NORMAL: u32 = 0, "MEM_NORMAL_PAGE_TYPE";
    /// Page: 2 MiB.
    pub const PAGE_HUGE: u32 = 1, "MEM_HUGE_PAGE_TYPE";
    /// Page: 1 GiB.
    pub const PAGE_GIANT: u32 = 2, "MEM_GIANT_PAGE_TYPE";
    /// Page kinds from here on are EINVAL.
    pub const PAGES: u32 = 3, "MEM_MAX_PAGE_TYPE";
    /// Memory: HBM.
    pub const MEMORY_HBM: u32 = 0, "MEM_HBM_TYPE";
    /// Memory: DDR.
    pub const MEMORY_DDR: u32 = 1, "MEM_DDR_TYPE";
    /// Memory: HBM that peers can reach.
    pub const MEMORY_P2P_HBM: u32 = 2, "MEM_P2P_HBM_TYPE";
    /// Memory: DDR that peers can reach.
    pub const MEMORY_P2P_DDR: u32 = 3, "MEM_P2P_DDR_TYPE";
    /// Memory: the task scheduler's DDR.
    pub const MEMORY_TS_DDR: u32 = 4, "MEM_TS_DDR_TYPE";
    /// Memory kinds from here on are EINVAL.
    pub const MEMORIES: u32 = 5, "MEM_MAX_TYPE";
    /// Access: none. **Never pass it.**
    pub const ACCESS_NONE: u32 = 0, "MEM_ACCESS_TYPE_NONE";
    /// Access: read. Stored, but the mapping is writable anyway.
    pub const ACCESS_READ: u32 = 1, "MEM_ACCESS_TYPE_READ";
    /// Access: read and write.
    pub const ACCESS_READ_WRITE: u32 = 3, "MEM_ACCESS_TYPE_READWRITE";

    /// [`MemImport::kind`].
    pub const HANDLE_NONE: u32 = 0, "MEM_HANDLE_TYPE_NONE";
    /// [`MemImport::kind`].
    pub const HANDLE_FABRIC: u32 = 1, "MEM_HANDLE_TYPE_FABRIC";
    /// [`MemImport::kind`].
    pub const HANDLE_POSIX: u32 = 2, "MEM_HANDLE_TYPE_POSIX", since V9_0_0;
    /// [`MemRelease::kind`]: the handle was an import.
    pub const RELEASED_IMPORT: u32 = 2, "SVM_MEM_HANDLE_IMPORT_TYPE";
    /// Most processes in a trust list, and in one call.
    pub const TRUST_LIST: u32 = 65535, "DEVMM_SHARE_MEM_MAX_PID_CNT";

    /// Direction: host to host. The kernel copies nothing.
    pub const COPY_HOST_TO_HOST: u32 = 0, "DEVMM_COPY_HOST_TO_HOST";
    /// Direction: host to device.
    pub const COPY_HOST_TO_DEVICE: u32 = 1, "DEVMM_COPY_HOST_TO_DEVICE";
    /// Direction: device to host.
    pub const COPY_DEVICE_TO_HOST: u32 = 2, "DEVMM_COPY_DEVICE_TO_HOST";
    /// Direction: device to device.
    pub const COPY_DEVICE_TO_DEVICE: u32 = 3, "DEVMM_COPY_DEVICE_TO_DEVICE";
    /// Direction: the kernel detects it.
    pub const COPY_DETECT: u32 = 4, "DEVMM_COPY_INVILED_DIRECTION";
    /// [`AsyncMemcpy::state`]: done.
    pub const ASYNC_DONE: u64 = 0x5A5A_5A5A, "DEVMM_ASYNC_CPY_FINISH_VALUE";
    /// Most elements of MEMCPY_BATCH.
    pub const BATCH: u32 = 4096, "DEVMM_MEMCPY_BATCH_MAX_COUNT";
    /// [`ASYNC_FAILED`] as the driver writes it.
    pub const ASYNC_ERROR: i64 = -18, "DEVMM_ASYNC_CPY_ERR_VALUE";
}

declare_flags! {
    /// [`Advise::advice`]. The high 8 bits carry a module id.
    pub struct Advice: u32 {
        /// Memory from DDR.
        DDR = 0x1, "DV_ADVISE_DDR";
        /// Memory from HBM.
        HBM = 0x2, "DV_ADVISE_HBM";
        /// 2 MiB pages.
        HUGE = 0x4, "DV_ADVISE_HUGEPAGE";
        /// Populate now; EOPNOTSUPP for reservations.
        POPULATE = 0x8, "DV_ADVISE_POPULATE";
        /// HBM that peers can reach.
        P2P_HBM = 0x10, "DV_ADVISE_P2P_HBM";
        /// DDR that peers can reach.
        P2P_DDR = 0x20, "DV_ADVISE_P2P_DDR";
        /// Lock on the device.
        LOCK_DEVICE = 0x80, "DV_ADVISE_LOCK_DEV";
        /// Physically contiguous.
        CONTIGUOUS = 0x100, "DV_ADVISE_CONTINUTY";
        /// On the host.
        HOST = 0x200, "DV_ADVISE_HOST";
        /// The task scheduler's DDR.
        TS_DDR = 0x400, "DV_ADVISE_TS_DDR";
        /// Keep when freed; a message to the device for reservations.
        PERSISTENT = 0x800, "DV_ADVISE_PERSISTENT";
        /// Read-only.
        READ_ONLY = 0x1000, "DV_ADVISE_READONLY";
        /// Read-only for the device.
        DEVICE_READ_ONLY = 0x2000, "DV_ADVISE_DEV_READONLY";
        /// Not cached; the vendor sets it for fixed addresses.
        NO_CACHE = 0x4000, "DV_ADVISE_NOCACHE";
        /// 1 GiB pages.
        GIANT = 0x8000, "DV_ADVISE_GIANTPAGE";
        /// A host address; from 9.0.0 on.
        HOST_UVA = 0x1_0000, "DV_ADVISE_HOST_UVA", since V9_0_0;
    }
}

/// [`AsyncMemcpy::state`]: failed.
pub const ASYNC_FAILED: u64 = ASYNC_ERROR as u64;
/// The id of the host wherever a device id is expected.
pub const HOST_ID: u32 = 65;
/// 2 MiB.
pub const HUGE_PAGE: u64 = 0x20_0000;
/// Largest reserve heap in the static range: 128 GiB.
pub const RESERVE_HEAP_MAX: u64 = 128 << 30;
/// Most asynchronous copies that have not been refreshed.
pub const ASYNC_TASKS: usize = 65535;

/// A command together with the member of the argument's union that it reads and writes.
///
/// The type is what keeps a command from being sent with another command's argument. Its number may
/// differ between generations: [`Request::number`].
#[derive(Debug)]
pub struct Request<A> {
    /// What it means.
    pub op: Op,
    argument: PhantomData<fn(A) -> A>,
}

impl<A> Clone for Request<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Request<A> {}

impl<A> Request<A> {
    const fn new(op: Op) -> Self {
        const { assert!(size_of::<A>() <= ARG_SIZE - DATA, "every member fits the union") };
        Request { op, argument: PhantomData }
    }

    /// The request value of ioctl(2), if the command has the same number in every generation.
    pub const fn stable(self) -> Option<u32> {
        stable(self.op)
    }

    /// The request value of ioctl(2) in a generation; `None` if it does not have the command.
    pub fn number(self, generation: Generation) -> Option<u32> {
        Some(generation.svm(self.op)?.command.request())
    }
}

/// The argument of commands that read and write nothing behind the head.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NoArgument;

macro_rules! ops {
    ($($constant:ident $name:ident $argument:ident,)*) => {
        /// The commands by meaning; the number may differ between generations.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)]
        pub enum Op { $($name),* }

        impl Op {
            /// Every command of every generation.
            pub const ALL: &[Op] = &[$(Op::$name),*];

            /// Short name, as traces and errors print it.
            #[inline]
            pub const fn name(self) -> &'static str {
                match self { $(Op::$name => stringify!($constant)),* }
            }

            /// Name of the struct that is the command's member of the union.
            pub const fn argument(self) -> &'static str {
                match self { $(Op::$name => stringify!($argument)),* }
            }
        }

        /// Every command with its argument.
        pub mod request {
            use super::*;
            $(
                #[doc = concat!("`", stringify!($constant), "`")]
                pub const $constant: Request<$argument> = Request::new(Op::$name);
            )*
        }
    };
}

ops! {
    MEM_QUERY_OWNER MemQueryOwner MemQueryOwner,
    MEM_SET_ACCESS MemSetAccess MemAccess,
    MEM_GET_ACCESS MemGetAccess MemAccess,
    ALLOC Alloc Alloc,
    FREE_PAGES FreePages FreePages,
    MEMCPY Memcpy Memcpy,
    MEMCPY2D Memcpy2d Memcpy2d,
    ASYNC_MEMCPY AsyncMemcpy AsyncMemcpy,
    MEMCPY_RESULT_REFRESH MemcpyResultRefresh AsyncMemcpy,
    SUBMIT_CONVERT_CPY SubmitConvertCopy ConvertCopy,
    WAIT_CONVERT_CPY_RESULT WaitConvertCopy ConvertCopy,
    CONVERT_ADDR ConvertAddr ConvertAddress,
    DESTROY_ADDR DestroyAddr DestroyAddress,
    ADVISE Advise Advise,
    PREFETCH Prefetch Advise,
    MEMSET8 Memset8 Memset,
    DESTROY_ADDR_BATCH DestroyAddrBatch DestroyAddressBatch,
    TRANSLATE Translate Translate,
    IPC_MEM_OPEN IpcMemOpen IpcOpen,
    IPC_MEM_CLOSE IpcMemClose IpcClose,
    SETUP_DEVICE SetupDevice SetupDevice,
    IPC_MEM_CREATE IpcMemCreate IpcCreate,
    IPC_MEM_DESTROY IpcMemDestroy IpcDestroy,
    IPC_MEM_QUERY IpcMemQuery IpcQuery,
    IPC_MEM_SET_PID IpcMemSetPid IpcSetPid,
    IPC_MEM_SET_PID_POD IpcMemSetPidPod IpcSetPid,
    IPC_MEM_SET_ATTR IpcMemSetAttr IpcSetAttr,
    IPC_MEM_GET_ATTR IpcMemGetAttr IpcGetAttr,
    INIT_PROCESS InitProcess InitProcess,
    UPDATE_HEAP UpdateHeap UpdateHeap,
    GET_PROC_STATUS GetProcStatus NoArgument,
    PROCESS_STATUS_QUERY ProcessStatusQuery ProcessStatusQuery,
    DBG_VA_STATUS DbgVaStatus DebugVaStatus,
    CLOSE_DEVICE CloseDevice NoArgument,
    MEM_REMOTE_MAP MemRemoteMap RemoteMap,
    MEM_REMOTE_UNMAP MemRemoteUnmap RemoteUnmap,
    QUERY_MEM_USEDINFO QueryMemUsedInfo MemUsedInfo,
    CHECK_MEMINFO CheckMemInfo CheckMemInfo,
    MAP_DEV_RESERVE MapDevReserve MapDevReserve,
    MEM_CREATE MemCreate MemCreate,
    MEM_RELEASE MemRelease MemRelease,
    MEM_MAP MemMap MemMap,
    MEM_UNMAP MemUnmap MemUnmap,
    MEM_EXPORT MemExport MemExport,
    MEM_IMPORT MemImport MemImport,
    MEM_SET_PID MemSetPid MemSetPid,
    MEM_SET_ATTR MemSetAttr MemSetAttr,
    MEM_GET_ATTR MemGetAttr MemGetAttr,
    MEM_GET_INFO MemGetInfo MemGetInfo,
    REGISTER_DMA RegisterDma RegisterDma,
    UNREGISTER_DMA UnregisterDma UnregisterDma,
    MEM_REPAIR MemRepair MemRepair,
    RESERVE_ADDR_INFO_QUERY ReserveAddrInfoQuery ReserveAddressInfo,
    PREPARE_CLOSE_DEVICE PrepareCloseDevice NoArgument,
    MEMCPY_BATCH MemcpyBatch MemcpyBatch,
    ALLOC_PROC_STRUCT AllocProcStruct NoArgument,
    DEV_SET_SIBLING DevSetSibling NoArgument,
    DEV_BIND_SIBLING DevBindSibling DevBindSibling,
    GET_MMAP_INFO GetMmapInfo MmapInfo,
    MEM_MAP_CAP MemMapCap MapCapability,
    SOMA_POOL_CREATE SomaPoolCreate SomaPoolCreate,
    SOMA_POOL_DESTROY SomaPoolDestroy SomaPoolDestroy,
    SOMA_POOL_MALLOC SomaPoolMalloc SomaPoolMalloc,
    SOMA_POOL_FREE SomaPoolFree SomaPoolFree,
    SOMA_POOL_TRIM SomaPoolTrim SomaPoolTrim,
    UVM_ALLOC UvmAlloc Alloc,
    UVM_ADVISE UvmAdvise UvmAdvise,
    UVM_MEM_RANGE_GET_ATTRIBUTES UvmMemRangeGetAttributes UvmRangeAttributes,
    UVM_MEMCPY UvmMemcpy Memcpy,
    UVM_PREFETCH UvmPrefetch UvmPrefetch,
    UVM_PREFETCH_BATCH UvmPrefetchBatch UvmPrefetchBatch,
    MEM_HANDLE_SET_ATTR MemHandleSetAttr MemHandleAttr,
    MEM_HANDLE_GET_ATTR MemHandleGetAttr MemHandleAttr,
}

/// A command of one generation.
#[derive(Debug, Clone, Copy)]
pub struct SvmCommand {
    /// What it means.
    pub op: Op,
    /// Its number and argument.
    pub command: Command,
}

/// A line of the command tables: number, meaning, name in the headers, direction, argument.
macro_rules! command {
    ($number:literal $op:ident $c_name:literal $direction:ident $($argument:ident)?) => {
        SvmCommand {
            op: Op::$op,
            command: Command {
                name: Op::$op.name(),
                c_name: $c_name,
                magic: MAGIC,
                number: $number,
                direction: Direction::$direction,
                size: ARG_SIZE as u16,
                argument: command!(@argument $($argument)?),
            },
        }
    };
    (@argument) => { None };
    (@argument $argument:ident) => { Some(stringify!($argument)) };
}

/// 8.5.0: all commands. Numbers up to 65 have not changed since.
pub(crate) const V8_5_0: &[SvmCommand] = &[
    command!(0 MemQueryOwner "DEVMM_SVM_MEM_QUERY_OWNER" ReadWrite MemQueryOwner),
    command!(1 MemSetAccess "DEVMM_SVM_MEM_SET_ACCESS" Write MemAccess),
    command!(2 MemGetAccess "DEVMM_SVM_MEM_GET_ACCESS" ReadWrite MemAccess),
    command!(3 Alloc "DEVMM_SVM_ALLOC" Write Alloc),
    command!(4 FreePages "DEVMM_SVM_FREE_PAGES" Write FreePages),
    command!(5 Memcpy "DEVMM_SVM_MEMCPY" ReadWrite Memcpy),
    command!(6 Memcpy2d "DEVMM_SVM_MEMCPY2D" ReadWrite Memcpy2d),
    command!(7 AsyncMemcpy "DEVMM_SVM_ASYNC_MEMCPY" ReadWrite AsyncMemcpy),
    command!(8 MemcpyResultRefresh "DEVMM_SVM_MEMCPY_RESLUT_REFRESH" ReadWrite AsyncMemcpy),
    command!(9 SubmitConvertCopy "DEVMM_SVM_SUMBIT_CONVERT_CPY" Write ConvertCopy),
    command!(10 WaitConvertCopy "DEVMM_SVM_WAIT_CONVERT_CPY_RESLUT" Write ConvertCopy),
    command!(11 ConvertAddr "DEVMM_SVM_CONVERT_ADDR" ReadWrite ConvertAddress),
    command!(12 DestroyAddr "DEVMM_SVM_DESTROY_ADDR" Write DestroyAddress),
    command!(13 Advise "DEVMM_SVM_ADVISE" Write Advise),
    command!(14 Prefetch "DEVMM_SVM_PREFETCH" Write Advise),
    command!(15 Memset8 "DEVMM_SVM_MEMSET8" ReadWrite Memset),
    command!(16 DestroyAddrBatch "DEVMM_SVM_DESTROY_ADDR_BATCH" Write DestroyAddressBatch),
    command!(17 Translate "DEVMM_SVM_TRANSLATE" ReadWrite Translate),
    command!(21 IpcMemOpen "DEVMM_SVM_IPC_MEM_OPEN" Write IpcOpen),
    command!(22 IpcMemClose "DEVMM_SVM_IPC_MEM_CLOSE" Write IpcClose),
    command!(26 SetupDevice "DEVMM_SVM_SETUP_DEVICE" ReadWrite SetupDevice),
    command!(27 IpcMemCreate "DEVMM_SVM_IPC_MEM_CREATE" ReadWrite IpcCreate),
    command!(28 IpcMemDestroy "DEVMM_SVM_IPC_MEM_DESTROY" Write IpcDestroy),
    command!(29 IpcMemQuery "DEVMM_SVM_IPC_MEM_QUERY" ReadWrite IpcQuery),
    command!(32 IpcMemSetPid "DEVMM_SVM_IPC_MEM_SET_PID" Write IpcSetPid),
    command!(33 IpcMemSetPidPod "DEVMM_SVM_IPC_MEM_SET_PID_POD" Write IpcSetPid),
    command!(34 IpcMemSetAttr "DEVMM_SVM_IPC_MEM_SET_ATTR" Write IpcSetAttr),
    command!(35 IpcMemGetAttr "DEVMM_SVM_IPC_MEM_GET_ATTR" ReadWrite IpcGetAttr),
    command!(36 InitProcess "DEVMM_SVM_INIT_PROCESS" ReadWrite InitProcess),
    command!(37 UpdateHeap "DEVMM_SVM_UPDATE_HEAP" Write UpdateHeap),
    command!(38 GetProcStatus "DEVMM_SVM_GET_PROC_STATUS" Write),
    command!(39 ProcessStatusQuery "DEVMM_SVM_PROCESS_STATUS_QUERY" ReadWrite ProcessStatusQuery),
    command!(41 DbgVaStatus "DEVMM_SVM_DBG_VA_STATUS" ReadWrite DebugVaStatus),
    command!(42 CloseDevice "DEVMM_SVM_CLOSE_DEVICE" Write),
    command!(45 MemRemoteMap "DEVMM_SVM_MEM_REMOTE_MAP" ReadWrite RemoteMap),
    command!(46 MemRemoteUnmap "DEVMM_SVM_MEM_REMOTE_UNMAP" ReadWrite RemoteUnmap),
    command!(47 QueryMemUsedInfo "DEVMM_SVM_QUERY_MEM_USEDINFO" ReadWrite MemUsedInfo),
    command!(48 CheckMemInfo "DEVMM_SVM_CHECK_MEMINFO" Write CheckMemInfo),
    command!(49 MapDevReserve "DEVMM_SVM_MAP_DEV_RESERVE" ReadWrite MapDevReserve),
    command!(50 MemCreate "DEVMM_SVM_MEM_CREATE" ReadWrite MemCreate),
    command!(51 MemRelease "DEVMM_SVM_MEM_RELEASE" ReadWrite MemRelease),
    command!(52 MemMap "DEVMM_SVM_MEM_MAP" Write MemMap),
    command!(53 MemUnmap "DEVMM_SVM_MEM_UNMAP" ReadWrite MemUnmap),
    command!(54 MemExport "DEVMM_SVM_MEM_EXPORT" ReadWrite MemExport),
    command!(55 MemImport "DEVMM_SVM_MEM_IMPORT" ReadWrite MemImport),
    command!(56 MemSetPid "DEVMM_SVM_MEM_SET_PID" Write MemSetPid),
    command!(57 MemSetAttr "DEVMM_SVM_MEM_SET_ATTR" Write MemSetAttr),
    command!(58 MemGetAttr "DEVMM_SVM_MEM_GET_ATTR" ReadWrite MemGetAttr),
    command!(59 MemGetInfo "DEVMM_SVM_MEM_GET_INFO" ReadWrite MemGetInfo),
    command!(60 RegisterDma "DEVMM_SVM_REGISTER_DMA" Write RegisterDma),
    command!(61 UnregisterDma "DEVMM_SVM_UNREGISTER_DMA" Write UnregisterDma),
    command!(62 MemRepair "DEVMM_SVM_MEM_REPLAIR" Write MemRepair),
    command!(63 ReserveAddrInfoQuery "DEVMM_SVM_RESERVE_ADDR_INFO_QUERY" ReadWrite ReserveAddressInfo),
    command!(64 PrepareCloseDevice "DEVMM_SVM_PREPARE_CLOSE_DEVICE" Write),
    command!(65 MemcpyBatch "DEVMM_SVM_MEMCPY_BATCH" Write MemcpyBatch),
    command!(67 AllocProcStruct "DEVMM_SVM_ALLOC_PROC_STRUCT" Write),
    command!(68 DevSetSibling "DEVMM_SVM_DEV_SET_SIBLING" Write),
    command!(69 DevBindSibling "DEVMM_SVM_DEV_BIND_SIBLING" Write DevBindSibling),
    command!(70 GetMmapInfo "DEVMM_SVM_GET_MMAP_INFO" ReadWrite MmapInfo),
];

/// 9.0.0: commands that 8.5.0 lacks, or has under another number.
pub(crate) const V9_0_0: &[SvmCommand] = &[
    command!(66 SomaPoolCreate "DEVMM_SVM_SOMA_POOL_CREATE" Write),
    command!(67 SomaPoolDestroy "DEVMM_SVM_SOMA_POOL_DESTROY" Write),
    command!(71 SomaPoolMalloc "DEVMM_SVM_SOMA_POOL_MALLOC" Write),
    command!(72 SomaPoolFree "DEVMM_SVM_SOMA_POOL_FREE" Write),
    command!(73 SomaPoolTrim "DEVMM_SVM_SOMA_POOL_TRIM" ReadWrite),
    command!(101 AllocProcStruct "DEVMM_SVM_ALLOC_PROC_STRUCT" Write),
    command!(102 DevSetSibling "DEVMM_SVM_DEV_SET_SIBLING" Write),
    command!(103 DevBindSibling "DEVMM_SVM_DEV_BIND_SIBLING" Write DevBindSibling),
    command!(104 GetMmapInfo "DEVMM_SVM_GET_MMAP_INFO" ReadWrite MmapInfo),
    command!(105 MemMapCap "DEVMM_SVM_MEM_MAP_CAP" ReadWrite MapCapability),
];

/// 26.1: commands that 9.0.0 lacks, or has with another number or argument.
pub(crate) const V26_1: &[SvmCommand] = &[
    command!(66 SomaPoolCreate "DEVMM_SVM_SOMA_POOL_CREATE" Write SomaPoolCreate),
    command!(67 SomaPoolDestroy "DEVMM_SVM_SOMA_POOL_DESTROY" Write SomaPoolDestroy),
    command!(68 UvmAlloc "DEVMM_UVM_ALLOC" Write Alloc),
    command!(69 UvmAdvise "DEVMM_UVM_ADVISE" Write UvmAdvise),
    command!(70 UvmMemRangeGetAttributes "DEVMM_UVM_MEM_RANGE_GET_ATTRIBUTES" Write UvmRangeAttributes),
    command!(71 SomaPoolMalloc "DEVMM_SVM_SOMA_POOL_MALLOC" Write SomaPoolMalloc),
    command!(72 SomaPoolFree "DEVMM_SVM_SOMA_POOL_FREE" Write SomaPoolFree),
    command!(73 SomaPoolTrim "DEVMM_SVM_SOMA_POOL_TRIM" ReadWrite SomaPoolTrim),
    command!(74 UvmMemcpy "DEVMM_UVM_MEMCPY" ReadWrite Memcpy),
    command!(75 UvmPrefetch "DEVMM_UVM_PREFETCH" Write UvmPrefetch),
    command!(76 UvmPrefetchBatch "DEVMM_UVM_PREFETCH_BATCH" Write UvmPrefetchBatch),
    command!(77 MemMapCap "DEVMM_SVM_MEM_MAP_CAP" ReadWrite MapCapability),
    command!(78 MemHandleSetAttr "DEVMM_SVM_MEM_HANDLE_SET_ATTR" Write MemHandleAttr),
    command!(79 MemHandleGetAttr "DEVMM_SVM_MEM_HANDLE_GET_ATTR" ReadWrite MemHandleAttr),
];

/// The request value of a command that has the same number in every generation; `None` for the
/// others, which only [`crate::Generation::svm`] can tell.
pub const fn stable(op: Op) -> Option<u32> {
    let mut index = 0;
    while index < V8_5_0.len() {
        if V8_5_0[index].op as u8 == op as u8 && V8_5_0[index].command.number <= 65 {
            return Some(V8_5_0[index].command.request());
        }
        index += 1;
    }
    None
}
