"""Copies between Python's buffers and memory, and views."""

import array
import threading
import time

import ascend_vmm
import pytest
from conftest import MIB

numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.ascend_npu(generation="all")


def test_anything_with_a_buffer_can_be_written(mapping):
    text = b"0123456789abcdef"
    for data in [text, bytearray(text), memoryview(text), array.array("b", text), numpy.frombuffer(text, "u2")]:
        mapping.fill(0xFF, size=32)
        mapping.write(data, offset=4)
        assert mapping.read(24) == b"\xff" * 4 + text + b"\xff" * 4


def test_anything_with_a_writable_buffer_can_be_read_into(mapping):
    mapping.write(bytes(range(16)))
    for buffer in [bytearray(16), array.array("H", [0] * 8), numpy.zeros((2, 8), "u1"), memoryview(bytearray(16))]:
        mapping.read_into(buffer)
        assert bytes(memoryview(buffer).cast("B")) == bytes(range(16))


def test_empty_buffers_are_copied(mapping):
    mapping.write(b"", offset=mapping.size)
    mapping.read_into(bytearray(), offset=5)
    assert mapping.read(0, offset=mapping.size) == b"" == mapping.read(offset=mapping.size)
    mapping.fill(1, size=0)


def test_a_buffer_cannot_be_the_destination_if_it_is_read_only(mapping):
    frozen = numpy.zeros(16, "u1")
    frozen.flags.writeable = False
    for buffer in [b"bytes", memoryview(b"view"), frozen]:
        with pytest.raises((BufferError, ValueError)):
            mapping.read_into(buffer)
    with pytest.raises(TypeError):
        mapping.write("text")


def test_buffers_in_pieces_are_refused(mapping):
    with pytest.raises((BufferError, ValueError)):
        mapping.write(memoryview(bytes(16))[::2])
    with pytest.raises((BufferError, ValueError)):
        mapping.write(numpy.zeros((4, 4), "u4", order="F"))
    with pytest.raises((BufferError, ValueError)):
        mapping.read_into(numpy.zeros(16, "u1")[::2])


def test_two_copies_of_a_batch_cannot_have_the_same_destination(mapping):
    buffer = bytearray(64)
    view = memoryview(buffer)
    mapping.write(bytes(range(64)))
    for one, other in [(buffer, buffer), (view[:33], view[32:]), (view[8:16], view), (view[10:11], view[10:11])]:
        for pair in [(one, other), (other, one)]:
            with pytest.raises(ascend_vmm.Invalid, match="overlap"):
                ascend_vmm.read_batch([(mapping, 0, part) for part in pair])
    ascend_vmm.read_batch([(mapping, 32, view[32:]), (mapping, 0, view[:32]), (mapping, 5, view[5:5])])
    assert buffer == bytes(range(64))
    ascend_vmm.write_batch([(mapping, 0, buffer), (mapping, 64, buffer)])
    assert mapping.read(128) == bytes(range(64)) * 2


def test_what_lies_outside_is_refused_before_anything_is_allocated(mapping):
    for call in [
        lambda: mapping.read(1 << 62),
        lambda: mapping.read(1, offset=mapping.size),
        lambda: mapping.write(b"x", offset=mapping.size),
        lambda: mapping.write(b"xy", offset=mapping.size - 1),
        lambda: mapping.read_into(bytearray(2), offset=(1 << 64) - 1),
        lambda: mapping.fill(0, size=mapping.size + 1),
        lambda: mapping.read_rows_into(bytearray(2), width=1, height=1 << 62, pitch=16),
    ]:
        with pytest.raises(ascend_vmm.Invalid):
            call()


def test_a_buffer_is_held_while_it_is_copied(mapping):
    """A bytearray that is resized under a copy would leave the kernel with memory that was freed."""
    data = bytearray(b"x" * (4 * MIB))
    refused, stop = [], threading.Event()

    def resize():
        while not stop.is_set():
            try:
                data.append(0)
                data.pop()
            except BufferError:
                refused.append(1)

    thread = threading.Thread(target=resize)
    thread.start()
    # On one busy CPU thousands of copies may pass before the other thread has a turn during one.
    given_up = time.monotonic() + 100
    while not refused and time.monotonic() < given_up:
        try:
            mapping.write(data)
        except ascend_vmm.Invalid:
            pass  # it was one byte longer at that moment
    stop.set()
    thread.join()
    assert refused, "no resize met a copy"


def test_memory_is_copied_on_and_between_devices(session, mapping):
    mapping.write(b"from here")
    there = session.reserve("2MiB").map(session.device(1).create("2MiB"))
    host = session.reserve("2MiB").map(session.host().create("2MiB"))
    for destination in [there, host]:
        destination.copy_from(mapping, offset=16, size=9)
        assert destination.read(9, offset=16) == b"from here"
    mapping.copy_from(mapping, offset="1MiB", size=9)
    assert mapping.read(9, offset=MIB) == b"from here"


def test_copies_go_over_mappings_side_by_side(session):
    device, reservation = session.device(0), session.reserve("8MiB")
    parts = [reservation.map(device.create("2MiB"), offset=part * 2 * MIB) for part in range(3)]
    pattern = numpy.arange(6 * MIB // 4, dtype="u4")
    reservation.write(pattern)
    assert parts[1].read(4) == pattern[2 * MIB // 4].tobytes()
    back = numpy.zeros_like(pattern)
    reservation.read_into(back)
    assert (back == pattern).all()
    with pytest.raises(ascend_vmm.Invalid, match="not all of"):
        reservation.read()


def test_a_view_is_the_memory_itself(session):
    mapping = session.reserve("2MiB").map(session.host().create("2MiB"))
    view = mapping.host_view()
    numbers = numpy.frombuffer(view, dtype="u4")
    numbers[:4] = [1, 2, 3, 0xFFFFFFFF]
    assert mapping.read(16) == numbers[:4].tobytes()
    mapping.write(b"\7\0\0\0")
    assert numbers[0] == 7 == view.load_u32(0)
    view.store_u64(8, 1 << 40)
    view.store_u8(1, 9)
    assert view.load_u64(8) == 1 << 40 and view.load_u8(1) == 9
    assert view.size == len(view) == 2 * MIB and view.address == mapping.address
    for wrong in [lambda: view.load_u32(2), lambda: view.load_u64(2 * MIB), lambda: view.store_u8(2 * MIB, 1)]:
        with pytest.raises(ascend_vmm.Invalid):
            wrong()
    del numbers


def test_memory_is_not_unmapped_under_a_buffer(session):
    mapping = session.reserve("2MiB").map(session.host().create("2MiB"))
    numbers = numpy.frombuffer(mapping.host_view(), dtype="u1")
    for close in [mapping.close, mapping.memory.close, session.close]:
        with pytest.raises(ascend_vmm.InUse, match="buffer"):
            close()
    numbers[0] = 3
    assert mapping.read(1) == b"\3"
    del numbers
    mapping.close()
    assert mapping.closed


def test_a_buffer_outlives_every_name_of_its_memory(ascend_npu):
    session = ascend_vmm.Session()
    numbers = numpy.frombuffer(session.reserve("2MiB").map(session.host().create("2MiB")).host_view(), "u1")
    del session
    numbers.setflags(write=True)
    numbers[-1] = 5
    assert ascend_npu.held() != "" and numbers[-1] == 5
    del numbers
    assert ascend_npu.held() == ""


def test_a_view_cannot_be_made_by_hand():
    with pytest.raises(TypeError, match="Mapping.host_view"):
        ascend_vmm.HostView()
    with pytest.raises(TypeError, match="Mapping.host_view"):
        ascend_vmm.HostView(5)


def test_a_view_can_be_copied_to_a_device(session, mapping):
    host = session.reserve("2MiB").map(session.host().create("2MiB"))
    with host.host_view() as view, memoryview(view) as buffer:
        buffer[:6] = b"driver"
        mapping.write(buffer)
        assert mapping.read(6) == b"driver"
        mapping.write(b"device")
        mapping.read_into(buffer)
        assert bytes(buffer[:6]) == b"device"


def test_other_threads_run_during_a_copy(session):
    """The interpreter's lock is not held: another thread counts on while one copies."""
    mapping = session.reserve("64MiB").map(session.device(0).create("64MiB"))
    data, count, stop = bytes(64 * MIB), [0], threading.Event()

    def work():
        while not stop.is_set():
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(100):
            before = count[0]
            mapping.write(data)
            if count[0] > before + 100:
                break
        else:
            pytest.fail("no other thread ran during a copy")
    finally:
        stop.set()
        thread.join()


def test_many_threads_share_a_session(session):
    device, failures = session.device(0), []

    def work(number):
        try:
            for _ in range(30):
                with device.create("2MiB") as memory, session.reserve("2MiB") as reservation:
                    mapping = reservation.map(memory)
                    mapping.write(bytes([number]) * 64)
                    assert mapping.read(64) == bytes([number]) * 64
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_mapping_is_not_closed_under_a_copy_of_another_thread(session):
    data, memory = bytes(64 * MIB), session.device(0).create("64MiB")
    for _ in range(1000):
        mapping, begun = session.reserve("64MiB").map(memory), threading.Event()

        def work():
            begun.set()
            try:
                mapping.write(data)
            except ascend_vmm.Closed:
                pass  # it was closed before the copy began

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        try:
            mapping.close()
            refused = None
        except ascend_vmm.InUse as error:
            refused = error
        thread.join()
        mapping.close()
        if refused:
            assert "another thread is using it" in str(refused)
            return
    pytest.fail("no close met a copy")


def test_copies_and_fills_over_several_mappings_leave_each_free(session):
    reservation = session.reserve(6 * MIB)
    mappings = [reservation.map(session.device(0).create(2 * MIB), offset=number * 2 * MIB) for number in range(3)]
    data = bytes(range(256)) * (6 * MIB // 256)
    reservation.write_async(data).wait()
    back = bytearray(6 * MIB)
    reservation.read_into_async(back).wait()
    assert back == data
    reservation.fill(7)
    assert reservation.read(4, offset=2 * MIB - 2) == b"\x07" * 4
    for mapping in mappings:
        mapping.close()
