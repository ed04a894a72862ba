"""Errors are exceptions that explain."""

import copy
import errno
import multiprocessing
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
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is ascend_vmm.Invalid and str(again) == str(raised.value)
    assert again.__dict__ == raised.value.__dict__ and again.vendor_code == raised.value.vendor_code


def raise_in_a_worker(kind, place):
    """In another process: an error of a kind, as a program gets it."""
    with ascend_vmm.Session() as session:
        device = session.device(0)
        mapping = session.reserve("2MiB").map(device.create("2MiB"))
        {
            "OutOfMemory": lambda: device.create("1TiB"),
            "Invalid": lambda: session.reserve(3),
            "Refused": lambda: session.device(63),
            "FileFailed": lambda: mapping.load(place / "nowhere"),
            "TicketError": lambda: ascend_vmm.Ticket("avm1-00"),
            "SessionOpen": lambda: ascend_vmm.Session(),
            "Closed": lambda: (device.close(), device.create("2MiB")),
        }[kind]()


@pytest.mark.ascend_npu(generation="26.1")
def test_errors_come_back_from_the_workers_of_multiprocessing(ascend_npu, tmp_path):
    bases = {"OutOfMemory": MemoryError, "FileFailed": OSError, "Invalid": ValueError}
    for method in ["fork", "spawn"]:
        with multiprocessing.get_context(method).Pool(1) as workers:
            for kind in ["OutOfMemory", "Invalid", "Refused", "FileFailed", "TicketError", "SessionOpen", "Closed"]:
                with pytest.raises(getattr(ascend_vmm, kind)) as raised:
                    workers.apply(raise_in_a_worker, (kind, tmp_path))
                error = raised.value
                assert str(error) and (error.operation or error.cause)
                assert isinstance(error, bases.get(kind, ascend_vmm.Error))
                if kind == "OutOfMemory":
                    assert (error.asked, error.errno_name, error.vendor_code.driver_name) == (
                        1 << 40,
                        "ENOMEM",
                        "OUT_OF_MEMORY",
                    )
                if kind == "FileFailed":
                    assert error.errno == errno.ENOENT and error.filename == str(tmp_path / "nowhere")
                if kind == "Refused":
                    assert error.command and error.kernel_log
            workers.close()
            workers.join()


@pytest.mark.parametrize("kind", [ascend_vmm.Error, *ascend_vmm.Error.__subclasses__()])
def test_every_kind_of_error_can_be_pickled_and_copied(kind):
    error = kind("cannot do it")
    names = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    for number, name in enumerate(sorted(names)):
        setattr(error, name, ascend_vmm.VendorCode(1, "name", 2) if name == "vendor_code" else number)
    for again in [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]:
        assert type(again) is kind and str(again) == "cannot do it"
        for name in names:
            assert getattr(again, name) == getattr(error, name), name


SIZES = [-1, 0, 1, 3 << 20, 1 << 63, 1 << 64, 1 << 200, pytest.param(-(1 << 99999), id="long")]
SIZES += ["", "x", "64 MB", "-2MiB", "9e9", "1e3", "2 0MiB", "2.5MiB", "2MiB MiB", "0x200000", "99999999TiB"]
SIZES += ["2 mib", "2MiBs", "-1", " ", "２MiB"]


@pytest.mark.ascend_npu(generation="26.1")
@pytest.mark.parametrize("size", SIZES)
def test_invalid_sizes_are_value_errors(session, size):
    device = session.device(0)
    for call in [device.create, session.reserve, session.host().create]:
        with pytest.raises(ValueError) as raised:
            call(size)
        assert isinstance(raised.value, ascend_vmm.Error), raised.value


def test_sizes_are_written_as_people_write_them(session):
    for size in ["64MiB", "64 MiB", " 64 MiB ", "64M", "65536K", str(64 * MIB), 64 * MIB]:
        with session.reserve(size) as reservation:
            assert reservation.size == 64 * MIB


@pytest.mark.ascend_npu(generation="26.1")
def test_invalid_timeouts_are_value_errors(ascend_npu):
    for timeout in [-1, float("nan"), float("-inf")]:
        for call in [ascend_vmm.probe, ascend_vmm.devices]:
            with pytest.raises(ValueError, match="not negative"):
                call(timeout=timeout)
    assert len(ascend_vmm.devices(timeout=float("inf"))) == 2


def test_other_objects_than_sizes_are_type_errors(session):
    pool = ascend_vmm.Pool(session.device(0))
    for size in [None, 2.0, [], b"2MiB", object(), True, False]:
        for call in [session.reserve, pool.allocate]:
            with pytest.raises(TypeError, match="a size is an int or a text"):
                call(size)


def test_numbers_of_other_classes_are_sizes(session):
    class Number:
        def __index__(self):
            return 2 * MIB

    class Broken:
        def __index__(self):
            raise KeyboardInterrupt

    assert session.reserve(Number()).size == 2 * MIB
    with pytest.raises(KeyboardInterrupt):
        session.reserve(Broken())
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
