"""The vendor's Python functions: the C function behind each, and its arguments.

A line is a name, its C function, and the C arguments in order. An input has a name and a kind:

    name    a pointer, a handle or a size: 64 bits, taken modulo 2^64
    name:i  a signed 32-bit number, checked; u is an unsigned one
    name:s  a text, or None for NULL
    name:P  physical memory's properties, a dict
    name:C  the attributes of an allocation, a dict; {} is NULL
    name:L  a list of process ids: their address and their number

    >i      an output, which the function returns; >u, >p and >q are numbers too, unsigned, of 64
            bits, and signed of 64 bits; >f is a float,
            >A what pointer_get_attributes fills, >D what get_device_utilization_rate does,
            >U a device's uuid, >V a package's version, >T a text

The function takes the inputs in this order and returns the outputs, then the code.
"""

ACL = """
finalize                         aclFinalize
finalize_reference               aclFinalizeReference              >p
get_version                      aclrtGetVersion                   >i >i >i
get_cann_version                 aclsysGetCANNVersion              name:i >V
get_version_str                  aclsysGetVersionStr               package:s >T
get_cann_attribute               aclGetCannAttribute               attribute:i >i
get_device_capability            aclGetDeviceCapability            device_id:u info:i >q
"""

RT = """
set_device                       aclrtSetDevice                    device_id:i
reset_device                     aclrtResetDevice                  device_id:i
reset_device_force               aclrtResetDeviceForce             device_id:i
get_device                       aclrtGetDevice                    >i
get_device_count                 aclrtGetDeviceCount               >u
get_run_mode                     aclrtGetRunMode                   >i
get_device_info                  aclrtGetDeviceInfo                device_id:u attribute:i >q
get_device_utilization_rate      aclrtGetDeviceUtilizationRate     device_id:i >D
query_device_status              aclrtQueryDeviceStatus            device_id:i >i
get_logic_dev_id_by_user_dev_id  aclrtGetLogicDevIdByUserDevId     device_id:i >i
get_user_dev_id_by_logic_dev_id  aclrtGetUserDevIdByLogicDevId     device_id:i >i
get_logic_dev_id_by_phy_dev_id   aclrtGetLogicDevIdByPhyDevId      device_id:i >i
get_phy_dev_id_by_logic_dev_id   aclrtGetPhyDevIdByLogicDevId      device_id:i >i
device_get_uuid                  aclrtDeviceGetUuid                device_id:i >U
device_can_access_peer           aclrtDeviceCanAccessPeer          >i device_id:i peer:i
device_enable_peer_access        aclrtDeviceEnablePeerAccess       peer:i flags:u
device_disable_peer_access       aclrtDeviceDisablePeerAccess      peer:i
device_peer_access_status        aclrtDevicePeerAccessStatus       device_id:i peer:i >i
device_get_bare_tgid             aclrtDeviceGetBareTgid            >i
create_context                   aclrtCreateContext                >p device_id:i
destroy_context                  aclrtDestroyContext               context
set_context                      aclrtSetCurrentContext            context
get_context                      aclrtGetCurrentContext            >p
create_stream                    aclrtCreateStream                 >p
create_stream_with_config        aclrtCreateStreamWithConfig       >p priority:u flag:u
destroy_stream                   aclrtDestroyStream                stream
destroy_stream_force             aclrtDestroyStreamForce           stream
synchronize_stream               aclrtSynchronizeStream            stream
synchronize_stream_with_timeout  aclrtSynchronizeStreamWithTimeout stream timeout:i
stream_query                     aclrtStreamQuery                  stream >i
stream_get_id                    aclrtStreamGetId                  stream >i
set_stream_failure_mode          aclrtSetStreamFailureMode         stream mode
set_stream_overflow_switch       aclrtSetStreamOverflowSwitch      stream flag:u
synchronize_device               aclrtSynchronizeDevice
synchronize_device_with_timeout  aclrtSynchronizeDeviceWithTimeout timeout:i
create_event                     aclrtCreateEvent                  >p
create_event_with_flag           aclrtCreateEventWithFlag          >p flag:u
create_event_ex_with_flag        aclrtCreateEventExWithFlag        >p flag:u
destroy_event                    aclrtDestroyEvent                 event
record_event                     aclrtRecordEvent                  event stream
reset_event                      aclrtResetEvent                   event stream
synchronize_event                aclrtSynchronizeEvent             event
synchronize_event_with_timeout   aclrtSynchronizeEventWithTimeout  event timeout:i
stream_wait_event                aclrtStreamWaitEvent              stream event
query_event_status               aclrtQueryEventStatus             event >i
query_event_wait_status          aclrtQueryEventWaitStatus         event >i
event_elapsed_time               aclrtEventElapsedTime             >f start end
event_get_timestamp              aclrtEventGetTimestamp            event >p
subscribe_report                 aclrtSubscribeReport              thread_id stream
unsubscribe_report               aclrtUnSubscribeReport            thread_id stream
process_report                   aclrtProcessReport                timeout:i
set_op_wait_timeout              aclrtSetOpWaitTimeout             timeout:u
set_op_execute_timeout           aclrtSetOpExecuteTimeOut          timeout:u
set_device_sat_mode              aclrtSetDeviceSatMode             mode:i
malloc                           aclrtMalloc                       >p size policy:i
malloc_align32                   aclrtMallocAlign32                >p size policy:i
malloc_cached                    aclrtMallocCached                 >p size policy:i
malloc_with_cfg                  aclrtMallocWithCfg                >p size policy:i config:C
malloc_for_task_scheduler        aclrtMallocWithCfg                >p size policy:i config:C
malloc_host                      aclrtMallocHost                   >p size
malloc_host_with_cfg             aclrtMallocHostWithCfg            >p size config:C
free                             aclrtFree                         ptr
free_host                        aclrtFreeHost                     ptr
memset                           aclrtMemset                       ptr max_count value:i count
memset_async                     aclrtMemsetAsync                  ptr max_count value:i count stream
memcpy                           aclrtMemcpy                       dst dest_max src count kind:i
memcpy_async                     aclrtMemcpyAsync                  dst dest_max src count kind:i stream
memcpy_async_with_condition      aclrtMemcpyAsyncWithCondition     dst dest_max src count kind:i stream
memcpy2d                         aclrtMemcpy2d                     dst dpitch src spitch width height kind:i
memcpy2d_async                   aclrtMemcpy2dAsync                dst dpitch src spitch width height kind:i stream
get_mem_info                     aclrtGetMemInfo                   attribute:i >p >p
pointer_get_attributes           aclrtPointerGetAttributes         ptr >A
host_register                    aclrtHostRegister                 ptr size type:i >p
host_register_v2                 aclrtHostRegisterV2               ptr size flag:u
host_unregister                  aclrtHostUnregister               ptr
host_get_device_pointer          aclrtHostGetDevicePointer         ptr >p flag:u
reserve_mem_address              aclrtReserveMemAddress            >p size alignment expect_ptr flags
release_mem_address              aclrtReleaseMemAddress            ptr
malloc_physical                  aclrtMallocPhysical               >p size properties:P flags
free_physical                    aclrtFreePhysical                 handle
map_mem                          aclrtMapMem                       ptr size offset handle flags
unmap_mem                        aclrtUnmapMem                     ptr
mem_get_allocation_granularity   aclrtMemGetAllocationGranularity  properties:P option:i >p
mem_export_to_shareable_handle   aclrtMemExportToShareableHandle   handle handle_type:i flags >p
mem_set_pid_to_shareable_handle  aclrtMemSetPidToShareableHandle   shareable pids:L
mem_import_from_shareable_handle aclrtMemImportFromShareableHandle shareable device_id:i >p
ipc_mem_set_import_pid           aclrtIpcMemSetImportPid           key:s pids:L
ipc_mem_import_by_key            aclrtIpcMemImportByKey            >p key:s flag
ipc_mem_close                    aclrtIpcMemClose                  key:s
value_write                      aclrtValueWrite                   ptr value flag:u stream
value_wait                       aclrtValueWait                    ptr value flag:u stream
"""
