"""The vendor's Python functions: the C function behind each, and its arguments.

A line is a name, its C function, and the C arguments in order:

    i u     a 32-bit number, signed or not, checked
    p       a pointer, a handle or a size: 64 bits, taken modulo 2^64
    s       a text, or None for NULL
    P       physical memory's properties, a dict
    C       the attributes of an allocation, a dict; {} is NULL
    L       a list of process ids: their address and their number
    >x      an output, which the function returns; >f is a float, >q a signed 64-bit number,
            >A what pointer_get_attributes fills, >D what get_device_utilization_rate does,
            >U a device's uuid, >V a package's version, >T a text

The function takes the inputs in this order and returns the outputs, then the code.
"""

ACL = """
finalize                            aclFinalize
finalize_reference                  aclFinalizeReference                >p
get_version                         aclrtGetVersion                     >i >i >i
get_cann_version                    aclsysGetCANNVersion                i >V
get_version_str                     aclsysGetVersionStr                 s >T
get_cann_attribute                  aclGetCannAttribute                 i >i
get_device_capability               aclGetDeviceCapability              u i >q
"""

RT = """
set_device                          aclrtSetDevice                      i
reset_device                        aclrtResetDevice                    i
reset_device_force                  aclrtResetDeviceForce               i
get_device                          aclrtGetDevice                      >i
get_device_count                    aclrtGetDeviceCount                 >u
get_run_mode                        aclrtGetRunMode                     >i
get_device_info                     aclrtGetDeviceInfo                  u i >q
get_device_utilization_rate         aclrtGetDeviceUtilizationRate       i >D
query_device_status                 aclrtQueryDeviceStatus              i >i
get_logic_dev_id_by_user_dev_id     aclrtGetLogicDevIdByUserDevId       i >i
get_user_dev_id_by_logic_dev_id     aclrtGetUserDevIdByLogicDevId       i >i
get_logic_dev_id_by_phy_dev_id      aclrtGetLogicDevIdByPhyDevId        i >i
get_phy_dev_id_by_logic_dev_id      aclrtGetPhyDevIdByLogicDevId        i >i
device_get_uuid                     aclrtDeviceGetUuid                  i >U
device_can_access_peer              aclrtDeviceCanAccessPeer            >i i i
device_enable_peer_access           aclrtDeviceEnablePeerAccess         i u
device_disable_peer_access          aclrtDeviceDisablePeerAccess        i
device_peer_access_status           aclrtDevicePeerAccessStatus         i i >i
device_get_bare_tgid                aclrtDeviceGetBareTgid              >i
create_context                      aclrtCreateContext                  >p i
destroy_context                     aclrtDestroyContext                 p
set_context                         aclrtSetCurrentContext              p
get_context                         aclrtGetCurrentContext              >p
create_stream                       aclrtCreateStream                   >p
create_stream_with_config           aclrtCreateStreamWithConfig         >p u u
destroy_stream                      aclrtDestroyStream                  p
destroy_stream_force                aclrtDestroyStreamForce             p
synchronize_stream                  aclrtSynchronizeStream              p
synchronize_stream_with_timeout     aclrtSynchronizeStreamWithTimeout   p i
stream_query                        aclrtStreamQuery                    p >i
stream_get_id                       aclrtStreamGetId                    p >i
set_stream_failure_mode             aclrtSetStreamFailureMode           p p
set_stream_overflow_switch          aclrtSetStreamOverflowSwitch        p u
synchronize_device                  aclrtSynchronizeDevice
synchronize_device_with_timeout     aclrtSynchronizeDeviceWithTimeout   i
create_event                        aclrtCreateEvent                    >p
create_event_with_flag              aclrtCreateEventWithFlag            >p u
create_event_ex_with_flag           aclrtCreateEventExWithFlag          >p u
destroy_event                       aclrtDestroyEvent                   p
record_event                        aclrtRecordEvent                    p p
reset_event                         aclrtResetEvent                     p p
synchronize_event                   aclrtSynchronizeEvent               p
synchronize_event_with_timeout      aclrtSynchronizeEventWithTimeout    p i
stream_wait_event                   aclrtStreamWaitEvent                p p
query_event_status                  aclrtQueryEventStatus               p >i
query_event_wait_status             aclrtQueryEventWaitStatus           p >i
event_elapsed_time                  aclrtEventElapsedTime               >f p p
event_get_timestamp                 aclrtEventGetTimestamp              p >p
subscribe_report                    aclrtSubscribeReport                p p
unsubscribe_report                  aclrtUnSubscribeReport              p p
process_report                      aclrtProcessReport                  i
set_op_wait_timeout                 aclrtSetOpWaitTimeout               u
set_op_execute_timeout              aclrtSetOpExecuteTimeOut            u
set_device_sat_mode                 aclrtSetDeviceSatMode               i
malloc                              aclrtMalloc                         >p p i
malloc_align32                      aclrtMallocAlign32                  >p p i
malloc_cached                       aclrtMallocCached                   >p p i
malloc_with_cfg                     aclrtMallocWithCfg                  >p p i C
malloc_for_task_scheduler           aclrtMallocWithCfg                  >p p i C
malloc_host                         aclrtMallocHost                     >p p
malloc_host_with_cfg                aclrtMallocHostWithCfg              >p p C
free                                aclrtFree                           p
free_host                           aclrtFreeHost                       p
memset                              aclrtMemset                         p p i p
memset_async                        aclrtMemsetAsync                    p p i p p
memcpy                              aclrtMemcpy                         p p p p i
memcpy_async                        aclrtMemcpyAsync                    p p p p i p
memcpy_async_with_condition         aclrtMemcpyAsyncWithCondition       p p p p i p
memcpy2d                            aclrtMemcpy2d                       p p p p p p i
memcpy2d_async                      aclrtMemcpy2dAsync                  p p p p p p i p
get_mem_info                        aclrtGetMemInfo                     i >p >p
pointer_get_attributes              aclrtPointerGetAttributes           p >A
host_register                       aclrtHostRegister                   p p i >p
host_register_v2                    aclrtHostRegisterV2                 p p u
host_unregister                     aclrtHostUnregister                 p
host_get_device_pointer             aclrtHostGetDevicePointer           p >p u
reserve_mem_address                 aclrtReserveMemAddress              >p p p p p
release_mem_address                 aclrtReleaseMemAddress              p
malloc_physical                     aclrtMallocPhysical                 >p p P p
free_physical                       aclrtFreePhysical                   p
map_mem                             aclrtMapMem                         p p p p p
unmap_mem                           aclrtUnmapMem                       p
mem_get_allocation_granularity      aclrtMemGetAllocationGranularity    P i >p
mem_export_to_shareable_handle      aclrtMemExportToShareableHandle     p i p >p
mem_set_pid_to_shareable_handle     aclrtMemSetPidToShareableHandle     p L
mem_import_from_shareable_handle    aclrtMemImportFromShareableHandle   p i >p
ipc_mem_set_import_pid              aclrtIpcMemSetImportPid             s L
ipc_mem_import_by_key               aclrtIpcMemImportByKey              >p s p
ipc_mem_close                       aclrtIpcMemClose                    s
value_write                         aclrtValueWrite                     p p u p
value_wait                          aclrtValueWait                      p p u p
"""
