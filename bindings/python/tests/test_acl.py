"""`acl`, the vendor's Python interface: every function, the steps of its manual, misuse."""

import ctypes
import mmap
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings

import ascend_vmm
import pytest
from ascend_vmm import acl
from ascend_vmm.acl import _table
from conftest import GIB, MIB

pytestmark = pytest.mark.ascend_npu(generation="all")

PROPERTIES = {
    "handleType": 0,
    "allocationType": 0,
    "memAttr": 4,  # HBM in huge pages
    "location": {"id": 0, "type": 1},
    "reserve": 0,
}


def checked(answer):
    """The outputs of a call that must succeed."""
    code = answer[-1] if isinstance(answer, tuple) else answer
    assert code == 0, acl.get_recent_err_msg()
    if not isinstance(answer, tuple):
        return None
    return answer[0] if len(answer) == 2 else answer[:-1]


@pytest.fixture
def device(ascend_npu):
    """Device 0, as programs begin and end."""
    checked(acl.init())
    checked(acl.rt.set_device(0))
    yield 0
    checked(acl.rt.reset_device(0))
    checked(acl.finalize())


def steps_of_the_manual():
    """The seven steps of the manual's page about `reserve_mem_address`, in its order. What was
    copied comes back."""
    vir_ptr, ret = acl.rt.reserve_mem_address(1 * GIB, 0, 0, 1)
    assert ret == 0 and vir_ptr % (2 * MIB) == 0
    handle, ret = acl.rt.malloc_physical(2 * MIB, PROPERTIES, 0)
    assert ret == 0
    assert acl.rt.map_mem(vir_ptr, 2 * MIB, 0, handle, 0) == 0
    data, back = b"the manual's own steps", bytes(22)
    assert acl.rt.memcpy(vir_ptr, 2 * MIB, acl.util.bytes_to_ptr(data), len(data), 1) == 0
    assert acl.rt.memcpy(acl.util.bytes_to_ptr(back), len(back), vir_ptr, len(back), 2) == 0
    assert acl.rt.unmap_mem(vir_ptr) == 0
    assert acl.rt.free_physical(handle) == 0
    assert acl.rt.release_mem_address(vir_ptr) == 0
    return back


def the_same_steps_in_our_spelling(session, npu):
    reservation = session.reserve("1GiB")
    memory = npu.create("2MiB")
    mapping = reservation.map(memory)
    mapping.write(b"the manual's own steps")
    back = mapping.read(22)
    mapping.close()
    memory.close()
    reservation.close()
    return back


def test_the_seven_steps_of_the_manual_in_both_spellings(device, ascend_npu):
    session = ascend_vmm.Session.current()
    npu = session.device(0)
    steps_of_the_manual()  # the first reservation also makes room for the others
    ascend_npu.record()
    assert steps_of_the_manual() == b"the manual's own steps"
    theirs = ascend_npu.commands()
    assert the_same_steps_in_our_spelling(session, npu) == b"the manual's own steps"
    assert ascend_npu.commands()[len(theirs) :] == theirs
    assert theirs == ["ALLOC", "MEM_CREATE", "MEM_MAP", "MEMCPY", "MEMCPY", "MEM_UNMAP", "MEM_RELEASE", "FREE_PAGES"]
    for flags, alignment, expected in [(0, 0, 0), (1, 0, 0)]:
        # Common pages and huge pages: the driver gives huge ones for both.
        pointer, ret = acl.rt.reserve_mem_address(2 * MIB, alignment, expected, flags)
        assert ret == 0 and acl.rt.release_mem_address(pointer) == 0
    assert acl.rt.reserve_mem_address(0, 0, 0, 1)[1] != 0
    del session, npu


def test_the_memory_sample(device):
    """What the vendor's sample does, synchronous and asynchronous."""
    size = 10485760
    context = checked(acl.rt.create_context(0))
    stream = checked(acl.rt.create_stream())
    for attribute in (0, 1):
        free, total, ret = acl.rt.get_mem_info(attribute)
        assert ret == 0 and free <= total
    host = checked(acl.rt.malloc_host(size))
    checked(acl.rt.memset(host, size, 7, size))
    one, other = checked(acl.rt.malloc(size, 0)), checked(acl.rt.malloc(size, 2))
    checked(acl.rt.memcpy(one, size, host, size, 1))
    checked(acl.rt.memcpy(other, size, one, size, 3))
    back = bytes(size)
    checked(acl.rt.memcpy(acl.util.bytes_to_ptr(back), size, other, size, 2))
    assert back == b"\7" * size
    checked(acl.rt.memset_async(host, size, 9, size, stream))
    checked(acl.rt.memcpy_async(one, size, host, size, 1, stream))
    checked(acl.rt.memcpy_async(other, size, one, size, 3, stream))
    checked(acl.rt.memcpy_async(host, size, other, size, 2, stream))
    checked(acl.rt.synchronize_stream(stream))
    assert acl.util.ptr_to_bytes(host, size) == b"\x09" * size
    checked(acl.rt.memcpy(acl.util.bytes_to_ptr(back), size, host, size, 0))
    assert back == b"\x09" * size
    picture = checked(acl.media.dvpp_malloc(4096))
    checked(acl.media.dvpp_free(picture))
    checked(acl.rt.free_host(host))
    for pointer in (one, other):
        checked(acl.rt.free(pointer))
    checked(acl.rt.destroy_stream(stream))
    checked(acl.rt.destroy_context(context))


def test_the_process_and_its_versions(device):
    assert acl.get_version()[-1] == 0 and acl.get_version()[0] >= 1
    assert acl.get_soc_name().startswith("Ascend")
    version, ret = acl.get_cann_version(1)
    assert ret == 0 and sorted(version) == sorted(
        ["version", "major_version", "minor_version", "release_version", "patch_version", "reserved"]
    )
    text, ret = acl.get_version_str("runtime")
    assert ret == 0 and isinstance(text, str)
    names, number, ret = acl.get_cann_attribute_list()
    assert ret == 0 and len(names) == number
    assert acl.get_cann_attribute(names[0])[-1] == 0
    value, ret = acl.get_device_capability(0, 1)
    assert ret == 0 and value > 0
    acl.app_log(1, "100 % of a line")
    assert acl.init() == 100002
    assert "aclInit" in acl.get_recent_err_msg()
    count, ret = acl.finalize_reference()
    assert ret == 0 and isinstance(count, int)


def test_devices_and_contexts(device):
    rt = acl.rt
    assert rt.get_device() == (0, 0) and rt.get_device_count() == (2, 0) and rt.get_run_mode() == (1, 0)
    assert rt.query_device_status(0) == (0, 0)
    assert rt.get_device_info(0, 102)[1] == 0
    utilization, ret = rt.get_device_utilization_rate(0)
    assert ret == 0 and sorted(utilization) == sorted(
        ["cube_utilization", "vector_utilization", "aicpu_utilization", "memory_utilization", "utilization_extend"]
    )
    for name in ("logic_dev_id_by_user", "user_dev_id_by_logic", "logic_dev_id_by_phy", "phy_dev_id_by_logic"):
        assert getattr(rt, f"get_{name}_dev_id")(1) == (1, 0)
    uuid, ret = rt.device_get_uuid(0)
    assert ret == 0 and len(uuid["bytes"]) == 16 and any(uuid["bytes"])
    assert rt.device_can_access_peer(0, 1) == (1, 0)
    assert rt.device_enable_peer_access(1, 0) == 0
    assert rt.device_peer_access_status(0, 1) == (1, 0)
    assert rt.device_disable_peer_access(1) == 0
    tgid, ret = rt.device_get_bare_tgid()
    assert ret == 0 and tgid > 0
    default = checked(rt.get_context())
    context = checked(rt.create_context(0))
    checked(rt.set_context(context))
    assert rt.get_context() == (context, 0)
    checked(rt.set_context(default))
    checked(rt.destroy_context(context))
    active, flags, ret = rt.get_primary_ctx_state(0)
    assert (active, ret) == (1, 0)
    checked(rt.set_device(1))
    checked(rt.reset_device(1))
    checked(rt.set_device(0))
    assert rt.set_device(9) != 0 and rt.peek_at_last_error(0) == rt.get_last_error(0) != 0
    assert rt.get_last_error(0) == 0
    for call in [rt.set_op_wait_timeout, rt.set_op_execute_timeout]:
        assert call(3) == 0
    assert rt.set_device_sat_mode(0) == 0


def test_streams_and_events(device):
    rt = acl.rt
    stream = checked(rt.create_stream_with_config(0, 0))
    checked(rt.set_stream_failure_mode(stream, 0))
    checked(rt.set_stream_overflow_switch(stream, 0))
    assert rt.stream_get_id(stream)[1] == 0
    start, end = checked(rt.create_event_with_flag(8)), checked(rt.create_event_with_flag(8))
    plain, newer = checked(rt.create_event()), checked(rt.create_event_ex_with_flag(1))
    checked(rt.record_event(start, stream))
    pointer = checked(rt.malloc(MIB, 0))
    checked(rt.memset_async(pointer, MIB, 1, MIB, stream))
    checked(rt.record_event(end, stream))
    checked(rt.stream_wait_event(stream, end))
    checked(rt.synchronize_event(end))
    checked(rt.synchronize_event_with_timeout(end, 10000))
    assert rt.query_event(end) == (0, 0) and rt.query_event_status(end) == (1, 0)
    assert rt.query_event_wait_status(end)[1] == 0
    milliseconds, ret = rt.event_elapsed_time(start, end)
    assert ret == 0 and isinstance(milliseconds, float)
    assert rt.event_get_timestamp(end)[1] == 0
    checked(rt.reset_event(end, stream))
    checked(rt.synchronize_stream_with_timeout(stream, 10000))
    checked(rt.synchronize_device())
    checked(rt.synchronize_device_with_timeout(10000))
    assert rt.stream_query(stream) == (0, 0)
    for event in (start, end, plain, newer):
        checked(rt.destroy_event(event))
    checked(rt.free(pointer))
    checked(rt.destroy_stream(stream))
    checked(rt.destroy_stream_force(checked(rt.create_stream())))


def test_reports_call_back_in_their_thread(device):
    calls, stop = [], threading.Event()

    def process(arguments):
        context, timeout = arguments
        checked(acl.rt.set_context(context))
        while not stop.is_set():
            acl.rt.process_report(timeout)

    def called(arguments):
        calls.append((arguments, threading.get_ident()))

    stream = checked(acl.rt.create_stream())
    thread, ret = acl.util.start_thread(process, [checked(acl.rt.get_context()), 50])
    assert ret == 0
    checked(acl.rt.subscribe_report(thread, stream))
    checked(acl.rt.launch_callback(called, ["one", 2], 1, stream))
    checked(acl.rt.synchronize_stream(stream))
    deadline = time.monotonic() + 60
    while not calls:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert calls == [(["one", 2], thread)]
    checked(acl.rt.unsubscribe_report(thread, stream))
    stop.set()
    assert acl.util.stop_thread(thread) == 0 and acl.util.stop_thread(thread) == 100000
    checked(acl.rt.destroy_stream(stream))
    with pytest.raises(TypeError):
        acl.rt.launch_callback(5, [], 0, stream)


def test_memory_of_every_kind(device):
    rt = acl.rt
    config = {"numAttrs": 1, "attrs": [{"attr": 2, "value": {"deviceId": 0}}]}
    for pointer, ret in [
        rt.malloc(100, 0),
        rt.malloc_align32(100, 0),
        rt.malloc_cached(100, 0),
        rt.malloc_with_cfg(100, 0, {}),
        rt.malloc_with_cfg(100, 0, config),
        rt.malloc_for_task_scheduler(100, 0, {}),
    ]:
        assert ret == 0, acl.get_recent_err_msg()
        attributes, ret = rt.pointer_get_attributes(pointer)
        assert ret == 0 and attributes["location"] == {"id": 0, "type": 1} and len(attributes["rsv"]) == 4
        checked(rt.free(pointer))
    pinned, ret = rt.malloc_host_with_cfg(4096, {})
    assert ret == 0
    one = checked(rt.malloc(MIB, 0))
    checked(rt.memset(pinned, 4096, 5, 4096))
    checked(rt.memcpy2d(one, 64, pinned, 32, 16, 4, 1))
    stream = checked(rt.create_stream())
    checked(rt.memcpy2d_async(one, 64, pinned, 32, 16, 4, 1, stream))
    checked(rt.memcpy_async_with_condition(one, MIB, pinned, 16, 1, stream))
    checked(rt.value_write(one, 77, 0, stream))
    checked(rt.value_wait(one, 77, 0, stream))
    checked(rt.synchronize_stream(stream))
    back = bytes(8)
    checked(rt.memcpy(acl.util.bytes_to_ptr(back), 8, one, 8, 2))
    assert int.from_bytes(back, "little") == 77
    checked(rt.destroy_stream(stream))
    checked(rt.free(one))
    checked(rt.free_host(pinned))
    granularity, ret = rt.mem_get_allocation_granularity(PROPERTIES, 0)
    assert (granularity, ret) == (2 * MIB, 0)
    with mmap.mmap(-1, 8192) as pages:
        held = ctypes.c_char.from_buffer(pages)
        address = ctypes.addressof(held)
        assert rt.host_register(address, 4096, 0) == (address, 0)
        assert rt.host_get_device_pointer(address, 0) == (address, 0)
        assert rt.host_register_v2(address, 4096, 0) != 0, "it is registered"
        assert rt.host_unregister(address) == 0
        assert rt.host_register_v2(address, 4096, 0) == 0 and rt.host_unregister(address) == 0
        assert rt.host_unregister(address) == 507911 and rt.host_get_device_pointer(address, 0)[1] != 0
        del held
    assert rt.mem_flush(1, 1) == rt.mem_invalidate(1, 1) == 207000
    assert rt.get_mem_uce_info(0, 4) == ([], 0) and rt.mem_uce_repair(0, []) == 207000


def test_memory_is_shared_by_handles_and_by_names(device):
    rt = acl.rt
    handle = checked(rt.malloc_physical(2 * MIB, PROPERTIES, 0))
    shareable = checked(rt.mem_export_to_shareable_handle(handle, 0, 0))
    pointer = checked(rt.malloc(2 * MIB, 1))
    data = b"from the parent"
    checked(rt.memcpy(pointer, 2 * MIB, acl.util.bytes_to_ptr(data), len(data), 1))
    key, ret = rt.ipc_mem_get_export_key(pointer, 2 * MIB, 65, 0)
    assert ret == 0 and len(key) == 64
    program = """if True:
        import sys
        from ascend_vmm import acl
        acl.init()
        assert acl.rt.set_device(0) == 0
        print(acl.rt.device_get_bare_tgid()[0], flush=True)
        sys.stdin.readline()
        handle, ret = acl.rt.mem_import_from_shareable_handle(int(sys.argv[1]), 0)
        assert ret == 0, acl.get_recent_err_msg()
        assert acl.rt.free_physical(handle) == 0
        pointer, ret = acl.rt.ipc_mem_import_by_key(sys.argv[2], 0)
        assert ret == 0, acl.get_recent_err_msg()
        back = bytes(15)
        assert acl.rt.memcpy(acl.util.bytes_to_ptr(back), 15, pointer, 15, 2) == 0, acl.get_recent_err_msg()
        assert acl.rt.ipc_mem_close(sys.argv[2]) == 0
        print(back.decode(), flush=True)
    """
    command = [sys.executable, "-c", program, str(shareable), key]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    tgid = int(child.stdout.readline())
    checked(rt.mem_set_pid_to_shareable_handle(shareable, [tgid]))
    checked(rt.ipc_mem_set_import_pid(key, [tgid]))
    assert child.communicate("\n", timeout=60)[0] == "from the parent\n"
    assert child.returncode == 0
    checked(rt.ipc_mem_close(key))
    checked(rt.free(pointer))
    checked(rt.free_physical(handle))


def test_helpers_know_numpy(device):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(12, dtype="f4").reshape(3, 4)
    with pytest.warns(Warning):
        assert acl.util.numpy_to_ptr(array) == array.ctypes.data
    with pytest.warns(Warning):
        address, contiguous = acl.util.numpy_contiguous_to_ptr(array.T)
    assert address == contiguous.ctypes.data and contiguous.flags.c_contiguous
    with pytest.warns(Warning):
        view = acl.util.ptr_to_numpy(array.ctypes.data, (3, 4), 11)
    view[0, 0] = 99
    assert array[0, 0] == 99 and view.dtype == numpy.float32
    kinds = [numpy.dtype(letter) for letter in "?bBhHiIlLqQfdgFDGe"]
    room = numpy.zeros(64, "u1")
    with pytest.warns(Warning):
        for kind in kinds:
            assert acl.util.ptr_to_numpy(room.ctypes.data, (2,), kind.num).dtype.num == kind.num
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError):
            acl.util.numpy_to_ptr([1])
        with pytest.raises(ValueError):
            acl.util.ptr_to_numpy(1, (1,), 99)
    assert "bytes_to_ptr" in dir(acl.util)
    with pytest.raises(TypeError):
        acl.util.bytes_to_ptr(bytearray(1))


def test_arguments_are_checked_as_the_vendors_are(device):
    rt = acl.rt
    for call in [
        lambda: rt.malloc(),
        lambda: rt.malloc(1, 2, 3),
        lambda: rt.malloc("16", 0),
        lambda: rt.malloc(16.0, 0),
        lambda: rt.malloc(16, policy=0),
        lambda: rt.malloc_physical(2 * MIB, [], 0),
        lambda: rt.malloc_with_cfg(16, 0, None),
        lambda: rt.mem_set_pid_to_shareable_handle(1, (1,)),
        lambda: rt.ipc_mem_close(5),
        lambda: acl.init(5),
        lambda: acl.init("a", "b"),
    ]:
        with pytest.raises(TypeError):
            call()
    for call in [lambda: rt.set_device(1 << 31), lambda: rt.malloc(16, 1 << 40), lambda: rt.get_device_info(-1, 0)]:
        with pytest.raises(OverflowError):
            call()
    with pytest.raises(ValueError):
        rt.mem_set_pid_to_shareable_handle(1, ["x"])
    with pytest.raises(ValueError):
        rt.ipc_mem_get_export_key(1, 1, 1024, 0)
    for config in [
        {"numAttrs": 2, "attrs": [{"attr": 2, "value": {"deviceId": 0}}]},
        {"numAttrs": 1, "attrs": [{"attr": 2, "value": {}}]},
        {"numAttrs": 1, "attrs": [{"attr": 2, "value": {"deviceId": 0, "moduleId": 1}}]},
    ]:
        with pytest.raises(KeyError):
            rt.malloc_with_cfg(16, 0, config)
    # Sizes and pointers are taken modulo 2^64; outputs are there also when a call fails.
    assert rt.malloc(1 << 64, 0) == (0, 100000) and rt.free(-(1 << 64)) == 100000
    assert rt.malloc_physical(0, {}, 0)[0] == 0
    assert rt.reserve_mem_address(0, 0, 0, 1)[0] == 0


def test_names_that_are_not_served_say_so(ascend_npu):
    for owner, name in [(acl, "foo"), (acl.rt, "launch_kernel"), (acl.mdl, "load_from_file"), (acl.op, "execute")]:
        assert not hasattr(owner, name)
        with pytest.raises(NotImplementedError, match=f"{name} is not served"):
            getattr(owner, name)
    assert acl.rt.__doc__ and not hasattr(acl.rt, "__wrapped__")


def test_every_name_of_the_table_is_a_function():
    for owner, table in [(acl, _table.ACL), (acl.rt, _table.RT)]:
        for line in table.strip().splitlines():
            assert callable(getattr(owner, line.split()[0]))


@pytest.mark.ascend_npu(generation="26.1")
def test_it_is_the_module_acl_only_where_it_is_asked_for(ascend_npu, tmp_path):
    program = "import acl; from acl.rt import memcpy; import acl.util; print(acl.init(), acl.rt.get_device_count())"
    plain = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert plain.returncode != 0 and "No module named 'acl'" in plain.stderr
    where = subprocess.run([sys.executable, "-m", "ascend_vmm.acl"], stdout=subprocess.PIPE, text=True, check=True)
    paths = [where.stdout.strip(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    asked = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    assert asked.stdout == "0 (2, 0)\n"


@pytest.mark.ascend_npu(generation="26.1")
def test_the_extra_makes_it_the_module_acl(ascend_npu, tmp_path):
    """What `pip install ascend-vmm[acl]` installs besides the package itself."""
    pytest.importorskip("setuptools", minversion="70.1", reason="no setuptools that makes wheels")
    extra = pathlib.Path(__file__).parents[1] / "extra"
    if not extra.exists():
        pytest.skip("these tests run without the project's files")
    shutil.copytree(extra, tmp_path / "extra")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(tmp_path / "site")]
    subprocess.run([*install, str(tmp_path / "extra")], check=True)
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    program = "from acl.rt import memcpy; import acl; print(memcpy is acl.rt.memcpy, acl.rt.get_device_count())"
    result = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
    )
    assert result.stdout == "True (2, 0)\n"


def test_both_spellings_live_in_one_process(device):
    with pytest.raises(ascend_vmm.SessionOpen):
        ascend_vmm.Session()
    session = ascend_vmm.Session.current()
    mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    data = b"one session"
    checked(acl.rt.memcpy(mapping.address, 2 * MIB, acl.util.bytes_to_ptr(data), len(data), 1))
    assert mapping.read(len(data)) == data
    with pytest.raises(ascend_vmm.InUse):
        session.close()
    assert mapping.closed
    del session


def growth(call):
    """How much more memory this process had during a call."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew

    def of(name):
        with open("/proc/self/status") as file:
            return int(re.search(rf"{name}:\s+(\d+) kB", file.read())[1]) * 1024

    before = of("VmRSS")
    call()
    return of("VmHWM") - before


@pytest.mark.ascend_npu(generation="26.1")
def test_a_copy_is_one_command_and_makes_no_further_copy(device, ascend_npu):
    """64 MiB by Python's methods, against the C library's function, which is the Rust call."""
    session = ascend_vmm.Session.current()
    mapping = session.reserve("64MiB").map(session.device(0).create("64MiB"))
    data, size, address = bytearray(64 * MIB), 64 * MIB, mapping.address
    source = (ctypes.c_char * size).from_buffer(data)
    ours = [lambda: mapping.write(data), lambda: mapping.write_async(data).wait()]
    theirs = [lambda: checked(acl.rt.memcpy(address, size, ctypes.addressof(source), size, 1))]
    ours += [lambda: mapping.read_into(data), lambda: mapping.read_into_async(data).wait()]
    theirs += [lambda: checked(acl.rt.memcpy(ctypes.addressof(source), size, address, size, 2))]
    mapping.write(data)  # the device's memory exists from now on
    least = max(growth(call) for call in theirs)
    for call in ours:
        assert growth(call) < least + 16 * MIB
    ascend_npu.record()
    for call in [ours[0], theirs[0], ours[2], theirs[1]]:
        call()
    commands = ascend_npu.commands()
    assert commands[0] == commands[1] and commands[2] == commands[3] and len(commands) == 4
    mapping.memory.close()
    del mapping, session, ours


def run_program(program, tmp_path, **environment):
    """What a program prints, in an interpreter of its own."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **environment},
        cwd=tmp_path,
    )
    return result.stdout


LOADED = """
import ctypes, os, sys
library = ctypes.CDLL(os.environ["LIBASCENDCL"])
assert library.aclrtSetDevice(1) == 0
from ascend_vmm import acl
print(acl.rt.get_device())
pointer = ctypes.c_void_p()
assert library.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(4096), 0) == 0
assert acl.rt.memset(pointer.value, 4096, 7, 4096) == 0
back = bytes(3)
assert acl.rt.memcpy(acl.util.bytes_to_ptr(back), 3, pointer.value, 3, 2) == 0
print(back)
attributes, code = acl.rt.pointer_get_attributes(pointer.value)
print(attributes["location"], code)
"""

FOUND = """
import ctypes
from ascend_vmm import acl
assert acl.rt.set_device(1) == 0
device = ctypes.c_int32()
# As a framework does that is imported later: by its name.
assert ctypes.CDLL("libascendcl.so").aclrtGetDevice(ctypes.byref(device)) == 0
print(device.value, len({line.split()[-1] for line in open("/proc/self/maps") if "libascendcl" in line}))
"""

TAKEN = """
import ctypes, os
assert ctypes.CDLL(os.environ["LIBASCENDCL"]).aclrtSetDevice(0) == 0
import ascend_vmm
try:
    ascend_vmm.Session()
except ascend_vmm.SessionTaken as error:
    print(error.other_copy == os.environ["LIBASCENDCL"], error.vendor_library, "vendor's library" in str(error))
"""


@pytest.mark.skipif("LIBASCENDCL" not in os.environ, reason="there is no libascendcl.so here")
def test_the_library_that_the_process_has_is_used(ascend_npu, tmp_path):
    assert run_program(LOADED, tmp_path) == "(1, 0)\nb'\\x07\\x07\\x07'\n{'id': 1, 'type': 1} 0\n"
    directory = os.path.dirname(os.environ["LIBASCENDCL"])
    assert run_program(FOUND, tmp_path, LD_LIBRARY_PATH=directory) == "1 1\n"
    # A file of this name that is not ours is not loaded.
    (tmp_path / "libascendcl.so").write_bytes(b"not ours")
    program = "from ascend_vmm import acl; print(acl.rt.set_device(0))"
    assert run_program(program, tmp_path, LD_LIBRARY_PATH=str(tmp_path)) == "0\n"


@pytest.mark.skipif("LIBASCENDCL" not in os.environ, reason="there is no libascendcl.so here")
def test_a_session_beside_our_own_library_says_who_has_it(ascend_npu, tmp_path):
    assert run_program(TAKEN, tmp_path) == "True None False\n"


def test_a_callback_may_have_no_argument(device):
    stream = checked(acl.rt.create_stream())
    checked(acl.rt.subscribe_report(threading.get_ident(), stream))
    seen = []
    checked(acl.rt.launch_callback(seen.append, None, 0, stream))
    checked(acl.rt.process_report(60000))
    assert seen == [None]
    checked(acl.rt.unsubscribe_report(threading.get_ident(), stream))
    checked(acl.rt.destroy_stream(stream))
