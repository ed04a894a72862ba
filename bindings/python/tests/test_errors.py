"""Errors are exceptions that explain."""

import errno
import os
import pickle

import ascend_vmm
import pytest
from conftest import GIB, MIB

pytestmark = pytest.mark.ascend_npu(generation="all")


@pytest.mark.ascend_npu(generation="all", hbm="1GiB")
def test_memory_that_is_used_up_is_a_memory_error(session):
    device = session.device(0)
    with pytest.raises(MemoryError) as raised:
        device.create("2GiB")
    error = raised.value
    assert isinstance(error, ascend_vmm.OutOfMemory) and isinstance(error, ascend_vmm.Error)
    assert error.errno == errno.ENOMEM and error.errno_name == "ENOMEM"
    assert error.asked == 2 * GIB and error.page == 2 * MIB and error.free_huge == GIB
    assert error.place == "device 0, HBM" and error.page_that_fits is None
    assert error.vendor_code.driver_name == "OUT_OF_MEMORY"
    assert "2 GiB were asked for" in str(error)


def test_what_the_kernel_refuses_has_all_fields(session, ascend_npu):
    memory = session.device(0).create("2MiB")
    ascend_npu.inject("MEM_MAP#1=EINVAL")
    with pytest.raises(ascend_vmm.Refused) as raised:
        session.reserve("2MiB").map(memory)
    error = raised.value
    assert error.errno == errno.EINVAL and error.command == "MEM_MAP"
    assert error.operation == "map physical memory" and "address" in error.arguments
    for text in [error.operation, error.command, error.cause, error.remedy]:
        assert text in str(error)
    assert isinstance(error.vendor_code, ascend_vmm.VendorCode)


def test_the_kernels_own_sentence_is_quoted(session):
    with pytest.raises(ascend_vmm.Refused) as raised:
        session.device(63)
    assert raised.value.kernel_log and raised.value.kernel_log.strip() in str(raised.value)


def test_errors_can_be_pickled(session):
    with pytest.raises(ascend_vmm.Invalid) as raised:
        session.reserve(3)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert type(copy) is ascend_vmm.Invalid and str(copy) == str(raised.value)
    assert copy.__dict__ == raised.value.__dict__ and copy.vendor_code == raised.value.vendor_code


@pytest.mark.parametrize("size", [-1, 0, 1, 3 << 20, 1 << 63, 1 << 64, 1 << 200, "", "x", "64 MB", "-2MiB", "9e9", "99999999TiB"])
def test_sizes_that_cannot_be_are_value_errors(session, size):
    device = session.device(0)
    for call in [device.create, session.reserve, session.host().create]:
        with pytest.raises(ValueError) as raised:
            call(size)
        assert isinstance(raised.value, ascend_vmm.Error), raised.value


def test_things_that_are_no_size_are_type_errors(session):
    for size in [None, 2.0, [], b"2MiB", object()]:
        with pytest.raises(TypeError):
            session.reserve(size)


def test_numbers_of_other_classes_are_sizes(session):
    class Number:
        def __index__(self):
            return 2 * MIB

    assert session.reserve(Number()).size == 2 * MIB
    numpy = pytest.importorskip("numpy")
    assert session.reserve(numpy.int64(2 * MIB)).size == 2 * MIB


def test_names_that_mean_nothing_are_refused(session):
    device = session.device(0)
    for call in [
        lambda: device.create("2MiB", memory="SRAM"),
        lambda: device.create("2MiB", page="4KiB"),
        lambda: device.memory_info("hbm"),
        lambda: ascend_vmm.Ticket("avm1-00"),
        lambda: ascend_vmm.Ticket(b"bytes"),
        lambda: device.import_memory("no ticket"),
        lambda: device.import_memory(b"\xff" * 128),
        lambda: device.import_memory((1 << 64) - 1),
    ]:
        with pytest.raises(ValueError) as raised:
            call()
        assert isinstance(raised.value, ascend_vmm.Error)
    for number in [-1, 1 << 32, 1 << 70]:
        with pytest.raises(OverflowError):
            session.device(number)
    with pytest.raises(ValueError):
        ascend_vmm.Session(device_process="sometimes")


def test_everything_is_refused_after_close(ascend_npu):
    session = ascend_vmm.Session()
    device, host, memory = session.device(0), session.host(), session.device(0).create("2MiB")
    reservation = session.reserve("2MiB")
    mapping, export = reservation.map(memory), memory.export()
    seen = session.reserve("2MiB").map(host.create("2MiB"))
    view = seen.host_view()
    session.close()
    session.close()
    for thing in [session, device, host, memory, reservation, mapping, export, view]:
        thing.close()
        names = [name for name in dir(thing) if not name.startswith("_") and name not in ("close", "closed", "current")]
        for name in names:
            with pytest.raises((ascend_vmm.Closed, TypeError)):
                getattr(thing, name)()
    with pytest.raises(ascend_vmm.Closed):
        memoryview(view)
    with pytest.raises(ascend_vmm.Closed):
        len(mapping)


def test_a_failed_close_can_be_tried_again(session, ascend_npu):
    mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    ascend_npu.inject("MEM_UNMAP#1=EBUSY")
    with pytest.raises(ascend_vmm.Refused):
        mapping.close()
    mapping.write(b"still open")
    mapping.close()
    assert mapping.closed


def test_an_exception_in_a_block_is_the_one_that_arrives(session):
    with pytest.raises(ZeroDivisionError):
        with session.reserve("2MiB") as reservation:
            1 / 0
    assert reservation.closed


def test_without_a_driver_the_error_says_which_file():
    if os.path.exists("/dev/davinci_manager"):
        pytest.skip("this host has a driver")
    with pytest.raises(ascend_vmm.OpenFailed) as raised:
        ascend_vmm.Session()
    assert raised.value.filename == "/dev/davinci_manager" and raised.value.errno == errno.ENOENT
    assert ascend_vmm.probe().findings
