//! The C functions: each name, its arguments, and the function that serves it.
//!
//! A pointer is one of the types of [`crate::border`] that check for NULL, a handle is looked up,
//! and an address is never dereferenced, so these functions trust only what C cannot check: that a
//! pointer which is not NULL points to what the prototype says.

use crate::border::{Address, In, Out, Text, ask_or};
use crate::copy::{BatchArguments, BatchAttribute};
use crate::handles::Handle;
use crate::malloc::Config;
use crate::memory_pool::PoolProperties;
use crate::physical::{Location, Properties};
use crate::{
    addresses, border, context, copy, devices, event, hal, host, ipc, malloc, memory_pool, notify, physical, process,
    report, rt, settings, share, stream,
};
use libc::{c_char, c_void};
use std::ptr::{null, null_mut};

/// A function of the program.
pub type Function = Option<unsafe extern "C-unwind" fn(*mut c_void)>;

/// A C function as it is exported: name, parameters and result, as Rust types.
#[derive(Debug, Clone, Copy)]
pub struct Signature {
    /// Its name.
    pub name: &'static str,
    /// The types of its parameters.
    pub parameters: &'static [&'static str],
    /// What it returns.
    pub returns: &'static str,
}

/// Exports functions. Each line is a C function and the Rust function that serves it; `by` names
/// the function of the border that calls it.
macro_rules! exports {
    ($list:ident: $(by $border:ident {
        $($name:ident($($argument:ident: $kind:ty),* $(,)?) => $serves:expr;)*
    })*) => {
        $($(
            #[doc = concat!("`", stringify!($name), "`: docs/cann.md says what programs can expect.")]
            ///
            /// # Safety
            ///
            /// Pointers that are not NULL point to what the C prototype says.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::too_many_arguments, reason = "the name and the arguments are C's")]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> i32 {
                border::$border(stringify!($name), || $serves($($argument),*))
            }
        )*)*

        /// The functions of this face that return a code.
        pub const $list: &[Signature] = &[$($(
            Signature { name: stringify!($name), parameters: &[$(stringify!($kind)),*], returns: "i32" },
        )*)*];
    };
}

/// Exports functions that do not return a code.
macro_rules! exports_other {
    ($list:ident {
        $($name:ident($($argument:ident: $kind:ty),*) -> $returns:ty = $otherwise:expr => $serves:expr;)*
    }) => {
        $(
            #[doc = concat!("`", stringify!($name), "`: docs/cann.md says what programs can expect.")]
            ///
            /// # Safety
            ///
            /// Pointers that are not NULL point to what the C prototype says.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the name is C's")]
            pub unsafe extern "C" fn $name($($argument: $kind),*) -> $returns {
                ask_or(stringify!($name), $otherwise, || $serves($($argument),*))
            }
        )*

        /// The functions of this list.
        pub const $list: &[Signature] = &[$(
            Signature { name: stringify!($name), parameters: &[$(stringify!($kind)),*], returns: stringify!($returns) },
        )*];
    };
}

exports! {
    CODES:
    by ask {
        aclGetCannAttribute(attribute: i32, value: Out<i32>) => settings::attribute;
        aclGetCannAttributeList(list: Out<*const i32>, count: Out<usize>) => settings::attribute_list;
        aclGetCompileopt(option: i32, value: Out<c_char>, length: usize) => settings::compile_option;
        aclGetDeviceCapability(device: u32, wanted: i32, value: Out<i64>) => devices::capability;
        aclSetCompileopt(option: i32, value: Text) => settings::set_compile_option;
        aclmdlFinalizeDump() => settings::nothing;
        aclmdlInitDump() => settings::nothing;
        aclmdlSetDump(path: Text) => settings::set_dump;
        aclrtDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) => devices::can_access_peer;
        aclrtDeviceGetByPCIBusId(text: Text, device: Out<i32>) => devices::by_pci_bus_id;
        aclrtDeviceGetPCIBusId(device: i32, text: Out<c_char>, length: i32) => devices::pci_bus_id;
        aclrtDeviceGetUuid(device: i32, uuid: Out<[u8; 16]>) => devices::uuid;
        aclrtGetCurrentContext(context: Out<Handle>) => context::get;
        aclrtGetDevice(device: Out<i32>) => context::get_device;
        aclrtGetDeviceCount(count: Out<u32>) => devices::count;
        aclrtGetDeviceInfo(device: u32, attribute: i32, value: Out<i64>) => devices::info;
        aclrtGetDeviceResLimit(device: i32, kind: i32, value: Out<u32>) => settings::core_limit;
        aclrtGetDeviceSatMode(mode: Out<i32>) => settings::saturation;
        aclrtGetDeviceUtilizationRate(device: i32, utilization: Out<devices::Utilization>) => devices::utilization;
        aclrtGetLogicDevIdByPhyDevId(physical: i32, logical: Out<i32>) => devices::logical_by_physical;
        aclrtGetLogicDevIdByUserDevId(user: i32, logical: Out<i32>) => devices::logical_by_user;
        aclrtGetMemUceInfo(device: i32, list: In<u8>, room: usize, found: Out<usize>) => settings::memory_errors;
        aclrtGetMemUsageInfo(device: i32, usage: In<devices::Usage>, room: usize, filled: Out<usize>)
            => devices::memory_usage;
        aclrtGetErrorVerbose(device: i32, info: Out<[u64; 322]>) => settings::error_details;
        aclrtGetPhyDevIdByUserDevId(user: i32, physical: Out<i32>) => devices::physical_by_user;
        aclrtGetUserDevIdByPhyDevId(physical: i32, user: Out<i32>) => devices::user_by_physical;
        aclrtHostMemMapCapabilities(device: u32, engine: i32, capability: Out<i32>)
            => settings::host_map_capabilities;
        aclrtGetPhyDevIdByLogicDevId(logical: i32, physical: Out<i32>) => devices::physical_by_logical;
        aclrtGetUserDevIdByLogicDevId(logical: i32, user: Out<i32>) => devices::user_by_logical;
        aclrtMemGetAllocationGranularity(properties: In<Properties>, option: i32, granularity: Out<usize>)
            => physical::granularity;
        aclrtQueryDeviceStatus(device: i32, status: Out<i32>) => devices::status;
        aclrtSetDeviceSatMode(mode: i32) => settings::set_saturation;
        aclrtSetExceptionInfoCallback(callback: *const c_void) => settings::set_exception_callback;
        aclrtSetOpExecuteTimeOut(timeout: u32) => settings::set_timeout;
        aclrtSetOpExecuteTimeOutV2(timeout: u64, actual: Out<u64>) => settings::set_execute_timeout;
        aclrtSetOpWaitTimeout(timeout: u32) => settings::set_timeout;
        rtGetDeviceInfo(device: u32, module: i32, kind: i32, value: Out<i64>) => rt::device_info;
        rtGetLogicDevIdByUserDevId(user: i32, logical: Out<i32>) => devices::logical_by_user;
    }
    by call {
        aclFinalize() => process::finalize;
        aclFinalizeReference(left: Out<u64>) => process::finalize_reference;
        aclInit(path: Text) => process::init;
        aclmdlRICaptureGetInfo(stream: Handle, status: Out<i32>, model: Out<Handle>) => settings::capture_info;
        aclrtCreateContext(context: Out<Handle>, device: i32) => context::create;
        aclrtCreateEvent(event: Out<Handle>) => event::create;
        aclrtCreateEventExWithFlag(event: Out<Handle>, flags: u32) => event::create_newer_with;
        aclrtCreateEventWithFlag(event: Out<Handle>, flags: u32) => event::create_with;
        aclrtCreateStream(stream: Out<Handle>) => stream::create;
        aclrtCreateStreamWithConfig(stream: Out<Handle>, priority: u32, flags: u32) => stream::create_with;
        aclrtCtxGetCurrentDefaultStream(stream: Out<Handle>) => stream::current_default;
        aclrtCtxGetSysParamOpt(option: i32, value: Out<i64>) => settings::context_parameter;
        aclrtCtxSetSysParamOpt(option: i32, value: i64) => settings::set_context_parameter;
        aclrtCreateNotify(notify: Out<Handle>, flags: u64) => notify::create;
        aclrtCreateStreamV2(stream: Out<Handle>, config: In<stream::StreamConfig>) => stream::create_configured;
        aclrtDestroyNotify(notify: Handle) => notify::destroy;
        aclrtDestroyStreamConfigHandle(config: In<stream::StreamConfig>) => stream::destroy_config;
        aclrtDeviceGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) => stream::priorities;
        aclrtGetMemcpyDescSize(kind: i32, size: Out<usize>) => copy::description_size;
        aclrtGetNotifyId(notify: Handle, id: Out<u32>) => notify::id;
        aclrtGetResInCurrentThread(kind: i32, value: Out<u32>) => settings::cores_of_thread;
        aclrtGetStreamAttribute(stream: Handle, attribute: i32, value: Out<[u64; 2]>) => stream::attribute;
        aclrtMemPoolCreate(pool: Out<Handle>, properties: In<PoolProperties>) => memory_pool::create;
        aclrtMemPoolDestroy(pool: Handle) => memory_pool::destroy;
        aclrtMemPoolFreeAsync(address: Address, stream: Handle) => memory_pool::free;
        aclrtMemPoolGetAttr(pool: Handle, attribute: i32, value: Out<u8>) => memory_pool::attribute;
        aclrtMemPoolMallocAsync(address: Out<Address>, size: usize, pool: Handle, stream: Handle)
            => memory_pool::allocate;
        aclrtMemPoolSetAttr(pool: Handle, attribute: i32, value: In<u8>) => memory_pool::set_attribute;
        aclrtMemPoolTrimTo(pool: Handle, keep: usize) => memory_pool::trim;
        aclrtMemcpyAsyncWithDesc(description: Address, kind: i32, stream: Handle) => copy::memcpy_described;
        aclrtMemcpyAsyncWithOffset(to: Address, room: usize, to_offset: usize, from: Address, size: usize,
            from_offset: usize, kind: i32, stream: Handle) => copy::memcpy_with_offsets;
        aclrtNotifyBatchReset(notifies: In<Handle>, count: usize) => notify::reset;
        aclrtQueryEvent(event: Handle, status: Out<i32>) => event::query_older;
        aclrtRecordNotify(notify: Handle, stream: Handle) => notify::record;
        aclrtSetMemcpyDesc(description: Address, kind: i32, from: Address, to: Address, size: usize,
            config: *const c_void) => copy::describe;
        aclrtSetStreamConfigOpt(config: In<stream::StreamConfig>, attribute: i32, value: In<u8>, size: usize)
            => stream::set_config;
        aclrtStreamAbort(stream: Handle) => stream::abort;
        aclrtStreamStop(stream: Handle) => stream::stop;
        aclrtStreamWaitEventWithTimeout(stream: Handle, event: Handle, timeout: i32)
            => event::wait_on_stream_within;
        aclrtWaitAndResetNotify(notify: Handle, stream: Handle, timeout: u32) => notify::wait;
        aclrtDestroyContext(context: Handle) => context::destroy;
        aclrtDestroyEvent(event: Handle) => event::destroy;
        aclrtDestroyStream(stream: Handle) => stream::destroy;
        aclrtDestroyStreamForce(stream: Handle) => stream::destroy_force;
        aclrtDeviceDisablePeerAccess(peer: i32) => devices::disable_peer_access;
        aclrtDeviceEnablePeerAccess(peer: i32, flags: u32) => devices::enable_peer_access;
        aclrtDeviceGetBareTgid(process: Out<i32>) => share::bare_tgid;
        aclrtDevicePeerAccessStatus(device: i32, peer: i32, status: Out<i32>) => devices::peer_access_status;
        aclrtEventElapsedTime(milliseconds: Out<f32>, start: Handle, end: Handle) => event::elapsed;
        aclrtEventGetTimestamp(event: Handle, microseconds: Out<u64>) => event::timestamp;
        aclrtFree(address: Address) => malloc::free;
        aclrtFreeHost(address: Address) => host::free;
        aclrtFreeHostWithDevSync(address: Address) => host::free_after_work;
        aclrtFreePhysical(handle: Handle) => physical::free;
        aclrtFreeWithDevSync(address: Address) => malloc::free_after_work;
        aclrtGetEventId(event: Handle, id: Out<u32>) => event::id;
        aclrtGetMemInfo(attribute: i32, free: Out<usize>, total: Out<usize>) => settings::memory_info;
        aclrtGetPrimaryCtxState(device: i32, flags: Out<u32>, active: Out<i32>) => context::primary_state;
        aclrtGetStreamOverflowSwitch(stream: Handle, on: Out<u32>) => stream::overflow;
        aclrtGetSysParamOpt(option: i32, value: Out<i64>) => settings::parameter;
        aclrtHostGetDevicePointer(address: Address, device: Out<Address>, flags: u32) => host::device_pointer;
        aclrtHostRegister(address: Address, size: u64, kind: i32, device: Out<Address>) => host::register;
        aclrtHostRegisterV2(address: Address, size: u64, flags: u32) => host::register_v2;
        aclrtHostUnregister(address: Address) => host::unregister;
        aclrtIpcMemClose(key: Text) => ipc::close;
        aclrtIpcMemGetExportKey(address: Address, size: usize, key: Out<c_char>, length: usize, flags: u64)
            => ipc::export_key;
        aclrtIpcMemImportByKey(address: Out<Address>, key: Text, flags: u64) => ipc::import;
        aclrtIpcMemSetImportPid(key: Text, processes: In<i32>, count: usize) => ipc::trust;
        aclrtLaunchCallback(function: Function, argument: *mut c_void, block: i32, stream: Handle)
            => report::launch;
        aclrtLaunchHostFunc(stream: Handle, function: Function, argument: *mut c_void)
            => stream::launch_host_function;
        aclrtMalloc(address: Out<Address>, size: usize, policy: i32) => malloc::allocate;
        aclrtMallocAlign32(address: Out<Address>, size: usize, policy: i32) => malloc::allocate_unpadded;
        aclrtMallocCached(address: Out<Address>, size: usize, policy: i32) => malloc::allocate;
        aclrtMallocHost(address: Out<Address>, size: usize) => host::allocate;
        aclrtMallocHostWithCfg(address: Out<Address>, size: u64, config: In<Config>) => host::allocate_with;
        aclrtMallocPhysical(handle: Out<Handle>, size: usize, properties: In<Properties>, flags: u64)
            => physical::allocate;
        aclrtMallocWithCfg(address: Out<Address>, size: usize, policy: i32, config: In<Config>)
            => malloc::allocate_with;
        aclrtMapMem(address: Address, size: usize, offset: usize, handle: Handle, flags: u64) => addresses::map;
        aclrtMemExportToShareableHandle(handle: Handle, kind: i32, flags: u64, shareable: Out<u64>)
            => share::export;
        aclrtMemExportToShareableHandleV2(handle: Handle, flags: u64, kind: i32, shareable: Out<[u8; 128]>)
            => share::export_v2;
        aclrtMemGetAccess(address: Address, location: In<Location>, flags: Out<u64>) => addresses::get_access;
        aclrtMemGetAddressRange(address: Address, base: Out<Address>, size: Out<usize>) => addresses::range;
        aclrtMemGetAllocationPropertiesFromHandle(handle: Handle, properties: Out<Properties>)
            => physical::properties;
        aclrtMemImportFromShareableHandle(shareable: u64, device: i32, handle: Out<Handle>) => share::import;
        aclrtMemImportFromShareableHandleV2(shareable: In<[u8; 128]>, kind: i32, flags: u64, handle: Out<Handle>)
            => share::import_v2;
        aclrtMemMapNoAccess(address: Address, size: usize, offset: usize, handle: Handle, flags: u64)
            => addresses::map;
        aclrtMemP2PMap(address: Address, size: usize, device: i32, flags: u64) => malloc::grant;
        aclrtMemRetainAllocationHandle(address: Address, handle: Out<Handle>) => physical::retain;
        aclrtMemSetAccess(address: Address, size: usize, access: In<addresses::Access>, count: usize)
            => addresses::set_access;
        aclrtMemSetPidToShareableHandle(shareable: u64, processes: In<i32>, count: usize) => share::trust;
        aclrtMemSetPidToShareableHandleV2(shareable: In<[u8; 128]>, kind: i32, processes: In<i32>, count: usize)
            => share::trust_v2;
        aclrtMemcpy(to: Address, room: usize, from: Address, size: usize, kind: i32) => copy::memcpy;
        aclrtMemcpy2d(to: Address, to_pitch: usize, from: Address, from_pitch: usize, width: usize, height: usize,
            kind: i32) => copy::memcpy_2d;
        aclrtMemcpy2dAsync(to: Address, to_pitch: usize, from: Address, from_pitch: usize, width: usize,
            height: usize, kind: i32, stream: Handle) => copy::memcpy_2d_async;
        aclrtMemcpyAsync(to: Address, room: usize, from: Address, size: usize, kind: i32, stream: Handle)
            => copy::memcpy_async;
        aclrtMemcpyAsyncWithCondition(to: Address, room: usize, from: Address, size: usize, kind: i32,
            stream: Handle) => copy::memcpy_async;
        aclrtMemcpyBatch(to: In<Address>, rooms: In<usize>, from: In<Address>, sizes: In<usize>, count: usize,
            attributes: In<BatchAttribute>, indexes: In<usize>, attribute_count: usize, failed: Out<usize>)
            => |to, rooms, from, sizes, count, attributes, _indexes, attribute_count, failed| {
                let arguments =
                    BatchArguments { to, rooms, from, sizes, count, attributes, attribute_count };
                copy::memcpy_batch(arguments, failed)
            };
        aclrtMemcpyBatchAsync(to: In<Address>, rooms: In<usize>, from: In<Address>, sizes: In<usize>, count: usize,
            attributes: In<BatchAttribute>, indexes: In<usize>, attribute_count: usize, failed: Out<usize>,
            stream: Handle)
            => |to, rooms, from, sizes, count, attributes, _indexes, attribute_count, failed, stream| {
                let arguments =
                    BatchArguments { to, rooms, from, sizes, count, attributes, attribute_count };
                copy::memcpy_batch_async(arguments, failed, stream)
            };
        aclrtMemcpyBatchAsyncV2(to: In<Address>, rooms: In<usize>, from: In<Address>, sizes: In<usize>,
            count: usize, attributes: In<BatchAttribute>, indexes: In<usize>, attribute_count: usize,
            stream: Handle)
            => |to, rooms, from, sizes, count, attributes, _indexes, attribute_count, stream| {
                let arguments =
                    BatchArguments { to, rooms, from, sizes, count, attributes, attribute_count };
                copy::memcpy_batch_async(arguments, Out::to(std::ptr::null_mut()), stream)
            };
        aclrtMemcpyBatchV2(to: In<Address>, rooms: In<usize>, from: In<Address>, sizes: In<usize>, count: usize,
            attributes: In<BatchAttribute>, indexes: In<usize>, attribute_count: usize)
            => |to, rooms, from, sizes, count, attributes, _indexes, attribute_count| {
                let arguments =
                    BatchArguments { to, rooms, from, sizes, count, attributes, attribute_count };
                copy::memcpy_batch(arguments, Out::to(std::ptr::null_mut()))
            };
        aclrtMemset(address: Address, room: usize, value: i32, size: usize) => copy::memset;
        aclrtMemsetAsync(address: Address, room: usize, value: i32, size: usize, stream: Handle)
            => copy::memset_async;
        aclrtMemsetD32(address: Address, room: usize, value: u32, count: usize) => copy::memset_numbers;
        aclrtMemsetD32Async(address: Address, room: usize, value: u32, count: usize, stream: Handle)
            => copy::memset_numbers_async;
        aclrtPointerGetAttributes(address: Address, attributes: Out<copy::Attributes>) => copy::attributes;
        aclrtProcessReport(timeout: i32) => report::process;
        aclrtQueryEventStatus(event: Handle, status: Out<i32>) => event::query;
        aclrtQueryEventWaitStatus(event: Handle, status: Out<i32>) => event::query_wait;
        aclrtRecordEvent(event: Handle, stream: Handle) => event::record;
        aclrtReleaseMemAddress(address: Address) => addresses::release;
        aclrtReserveMemAddress(address: Out<Address>, size: usize, alignment: usize, wanted: Address, flags: u64)
            => addresses::reserve;
        aclrtReserveMemAddressNoUCMemory(address: Out<Address>, size: usize, alignment: usize, wanted: Address,
            flags: u64) => addresses::reserve_cached;
        aclrtResetDevice(device: i32) => context::reset_device;
        aclrtResetDeviceForce(device: i32) => context::reset_device_force;
        aclrtResetEvent(event: Handle, stream: Handle) => event::reset;
        aclrtSetCurrentContext(context: Handle) => context::set;
        aclrtSetDevice(device: i32) => context::set_device;
        aclrtSetStreamAttribute(stream: Handle, attribute: i32, value: In<u64>) => stream::set_attribute;
        aclrtSetStreamFailureMode(stream: Handle, mode: u64) => stream::set_failure_mode;
        aclrtSetStreamOverflowSwitch(stream: Handle, on: u32) => stream::set_overflow;
        aclrtSetSysParamOpt(option: i32, value: i64) => settings::set_parameter;
        aclrtStreamGetFlags(stream: Handle, flags: Out<u32>) => stream::flags;
        aclrtStreamGetId(stream: Handle, id: Out<i32>) => stream::id;
        aclrtStreamGetPriority(stream: Handle, priority: Out<u32>) => stream::priority;
        aclrtStreamQuery(stream: Handle, status: Out<i32>) => stream::query;
        aclrtStreamWaitEvent(stream: Handle, event: Handle) => event::wait_on_stream;
        aclrtSubscribeReport(thread: u64, stream: Handle) => report::subscribe;
        aclrtSynchronizeDevice() => stream::synchronize_device;
        aclrtSynchronizeDeviceWithTimeout(timeout: i32) => stream::synchronize_device_within;
        aclrtSynchronizeEvent(event: Handle) => event::synchronize;
        aclrtSynchronizeEventWithTimeout(event: Handle, timeout: i32) => event::synchronize_within;
        aclrtSynchronizeStream(stream: Handle) => stream::synchronize;
        aclrtSynchronizeStreamWithTimeout(stream: Handle, timeout: i32) => stream::synchronize_within;
        aclrtUnSubscribeReport(thread: u64, stream: Handle) => report::unsubscribe;
        aclrtUnmapMem(address: Address) => addresses::unmap;
        aclrtValueWait(address: Address, value: u64, flags: u32, stream: Handle) => copy::value_wait;
        aclrtValueWrite(address: Address, value: u64, flags: u32, stream: Handle) => copy::value_write;
        rtDeviceGetBareTgid(process: Out<u32>) => rt::bare_tgid;
        rtDisableP2P(device: u32, peer: u32) => rt::disable_peer_access;
        rtEnableP2P(device: u32, peer: u32, flags: u32) => rt::enable_peer_access;
        rtIpcCloseMemory(address: Address) => ipc::close_at;
        rtIpcDestroyMemoryName(key: Text) => ipc::destroy;
        rtIpcOpenMemory(address: Out<Address>, key: Text) => |address, key| ipc::import(address, key, 0);
        rtIpcSetMemoryName(address: Address, size: u64, key: Out<c_char>, length: u32) => rt::name;
        rtMemcpyAsyncWithoutCheckKind(to: Address, room: u64, from: Address, size: u64, kind: u32, stream: Handle)
            => rt::memcpy_async;
        rtSetIpcMemorySuperPodPid(key: Text, sdid: u32, processes: In<i32>, count: i32) => rt::trust;
    }
    // These touch no lock and no object, so a child of fork may call them.
    by call_anywhere {
        MsprofRegisterCallback(module: u32, callback: *const c_void) => settings::profile;
        MsprofReportAdditionalInfo(aging: u32, data: *const c_void, length: u32)
            => |aging, data, _length| settings::profile(aging, data);
        MsprofReportApi(aging: u32, api: *const c_void) => settings::profile;
        MsprofReportCompactInfo(aging: u32, data: *const c_void, length: u32)
            => |aging, data, _length| settings::profile(aging, data);
        aclrtGetRunMode(mode: Out<i32>) => settings::run_mode;
        aclrtGetVersion(major: Out<i32>, minor: Out<i32>, patch: Out<i32>) => settings::interface_version;
        aclsysGetCANNVersion(package: i32, version: Out<settings::PackageVersion>) => settings::package_version;
        aclsysGetVersionStr(package: Text, text: Out<[u8; 128]>) => settings::version_text;
    }
}

exports_other! {
    OTHER {
        MsprofGetHashId(text: In<u8>, length: usize) -> u64 = 0 => settings::hash;
        MsprofSysCycleTime() -> u64 = 0 => settings::cycles;
        aclrtCreateStreamConfigHandle() -> *mut stream::StreamConfig = null_mut() => stream::new_config;
        aclGetCompileoptSize(option: i32) -> usize = 0 => settings::compile_option_size;
        aclrtGetSocName() -> *const c_char = null() => devices::soc_name;
    }
}

exports! {
    HAL:
    by call_driver {
        drvDeviceGetIndexByPhyId(physical: u32, index: Out<u32>) => hal::logical_id;
        drvDeviceGetPhyIdByIndex(index: u32, physical: Out<u32>) => hal::physical_id;
        drvGetDevIDs(ids: Out<u32>, length: u32) => hal::device_ids;
        drvGetDevNum(count: Out<u32>) => hal::device_count;
        drvMemcpy(to: u64, room: usize, from: u64, size: usize) => hal::memcpy;
        drvMemsetD8(address: u64, room: usize, value: u8, count: usize) => hal::memset;
        halMemAddressFree(address: Address) => addresses::release;
        halMemAddressReserve(address: Out<Address>, size: usize, alignment: usize, wanted: Address, flags: u64)
            => hal::reserve;
        halMemCreate(handle: Out<Handle>, size: usize, properties: In<hal::Properties>, flags: u64) => hal::create;
        halMemExportToShareableHandle(handle: Handle, kind: i32, flags: u64, shareable: Out<u64>) => hal::export;
        halMemExportToShareableHandleV2(handle: Handle, kind: i32, flags: u64, shareable: Out<[u8; 128]>)
            => hal::export_v2;
        halMemGetAccess(address: Address, location: In<Location>, flags: Out<u64>) => addresses::get_access;
        halMemGetAddressRange(address: u64, base: Out<Address>, size: Out<usize>)
            => |address, base, size| addresses::range(Address(address), base, size);
        halMemGetAllocationGranularity(properties: In<hal::Properties>, option: i32, granularity: Out<usize>)
            => hal::granularity;
        halMemImportFromShareableHandle(shareable: u64, device: u32, handle: Out<Handle>) => hal::import;
        halMemImportFromShareableHandleV2(kind: i32, shareable: In<[u8; 128]>, device: u32, handle: Out<Handle>)
            => hal::import_v2;
        halMemMap(address: Address, size: usize, offset: usize, handle: Handle, flags: u64) => addresses::map;
        halMemRelease(handle: Handle) => physical::free;
        halMemRetainAllocationHandle(handle: Out<Handle>, address: Address) => hal::retain;
        halMemSetAccess(address: Address, size: usize, grants: In<hal::Grant>, count: usize) => hal::set_access;
        halMemSetPidToShareableHandle(shareable: u64, processes: In<i32>, count: u32)
            => |shareable, processes, count| share::trust(shareable, processes, count as usize);
        halMemShareHandleSetAttribute(shareable: u64, attribute: i32, value: hal::ShareAttribute)
            => hal::set_attribute;
        halMemTransShareableHandle(kind: i32, shareable: In<[u8; 128]>, server: Out<u32>, short: Out<u64>)
            => hal::short_form;
        halMemUnmap(address: Address) => addresses::unmap;
    }
}

exports_other! {
    HAL_OTHER {
        drvDeviceGetBareTgid() -> i32 = -1 => hal::bare_tgid;
    }
}

/// The functions that report the thread's latest failure. They do not count as calls themselves.
pub const ERRORS: &[Signature] = &[
    Signature { name: "aclGetRecentErrMsg", parameters: &[], returns: "*const c_char" },
    Signature { name: "aclrtGetLastError", parameters: &["i32"], returns: "i32" },
    Signature { name: "aclrtPeekAtLastError", parameters: &["i32"], returns: "i32" },
];

/// `aclGetRecentErrMsg`: the message of the thread's latest call that failed; NULL if there is
/// none.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    border::recent_error_message()
}

/// `aclrtGetLastError`: the code of the thread's latest call that failed, which it clears.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub extern "C" fn aclrtGetLastError(level: i32) -> i32 {
    border::get_last_error(level)
}

/// `aclrtPeekAtLastError`: the code of the thread's latest call that failed.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub extern "C" fn aclrtPeekAtLastError(level: i32) -> i32 {
    border::peek_at_last_error(level)
}

/// `aclAppLog`: a line in the log. C passes more arguments, which are not read.
///
/// # Safety
///
/// The texts are C strings or NULL.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is C's")]
pub unsafe extern "C" fn aclAppLog(level: i32, function: Text, file: Text, line: u32, format: Text) {
    border::log_of_program(level, function, file, line, format);
}

/// The structs that C passes have the sizes of the facts.
const _: () = {
    assert!(size_of::<Properties>() == 32 && align_of::<Properties>() == 8);
    assert!(size_of::<Location>() == 8 && size_of::<addresses::Access>() == 24);
    assert!(size_of::<copy::Attributes>() == 28 && size_of::<BatchAttribute>() == 32);
    assert!(size_of::<Config>() == 16 && size_of::<malloc::Attribute>() == 12);
    assert!(size_of::<settings::PackageVersion>() == 512 && size_of::<devices::Usage>() == 112);
    assert!(size_of::<devices::Utilization>() == 24);
    assert!(size_of::<stream::StreamConfig>() == 32 && size_of::<PoolProperties>() == 56);
};
