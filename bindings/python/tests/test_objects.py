"""Every class, its context manager, its fields and its repr."""

import dataclasses
import gc
import itertools
import weakref

import ascend_vmm
import pytest
from conftest import GIB, MIB

pytestmark = pytest.mark.ascend_npu(generation="all")


def test_probe_and_devices_are_data_classes(ascend_npu):
    survey = ascend_vmm.probe()
    assert survey.generation == ascend_npu.generation
    assert dataclasses.asdict(survey)["devices"][1]["logical"] == 1
    assert [npu.state for npu in ascend_vmm.devices()] == ["working", "working"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        survey.generation = "0"


@pytest.mark.ascend_npu(devices=0, generation="26.1")
def test_without_a_device_the_reason_is_raised(ascend_npu):
    with pytest.raises(ascend_vmm.NoDevices) as raised:
        ascend_vmm.devices(timeout=0.1)
    assert raised.value.finding == ascend_vmm.probe(timeout=0.1).findings[0].code
    assert raised.value.remedy in str(raised.value)


def test_a_session_has_one_object_per_process(ascend_npu):
    with ascend_vmm.Session() as session:
        assert session.generation == ascend_npu.generation
        assert session.host_page_size >= 4096
        assert session.has_segments and not session.closed
        assert session.bare_tgid > 0
        with pytest.raises(ascend_vmm.SessionOpen):
            ascend_vmm.Session()
        assert ascend_vmm.Session.current().device(1).id == 1
    assert session.closed and repr(session) == "<Session, closed>"
    with ascend_vmm.Session.current() as again:
        assert repr(again) == f"<Session, driver {ascend_npu.generation}>"


def test_closing_the_session_closes_everything_that_was_made_through_it(ascend_npu):
    with ascend_vmm.Session() as session:
        device, host = session.device(0), session.host()
        memory = device.create("4MiB")
        reservation = session.reserve("1GiB")
        mapping = reservation.map(memory)
        # The objects between these and the session are gone at once.
        seen = session.reserve("2MiB").map(session.host().create("2MiB"))
        view = seen.host_view()
        export = memory.export()
    for closed in [session, device, host, memory, reservation, mapping, seen, view]:
        assert closed.closed and "closed" in repr(closed)
    with pytest.raises(ascend_vmm.Closed, match="the Export is closed"):
        export.ticket()
    assert ascend_npu.held() == ""


def test_closing_an_object_closes_what_was_made_from_it_and_nothing_else(session):
    device = session.device(0)
    one, other = device.create("2MiB"), device.create("2MiB")
    with session.reserve("4MiB") as reservation:
        first = reservation.map(one)
        second = reservation.map(other, "2MiB")
        one.close()
        assert first.closed and not second.closed
        assert reservation.mappings() == [(second.address, 2 * MIB)]
    assert second.closed and not other.closed
    assert session.reserve("2MiB").map(other).read(1) == b"\0"


def test_two_users_of_a_device_do_not_close_it_under_each_other(session):
    with session.device(0) as first:
        mine = first.create("2MiB")
        with session.device(0) as second:
            theirs = second.create("2MiB")
        assert theirs.closed and not mine.closed
        assert first.memory_info().huge_total > 0


def test_devices_have_numbers_capabilities_and_memory(session):
    device = session.device(1)
    assert device.id == 1 and repr(device) == "<Device 1>"
    assert isinstance(device.capabilities, ascend_vmm.Capabilities)
    before = device.memory_info("HBM").huge_free
    with device.create("64 MiB") as memory:
        assert device.memory_info().huge_free == before - 64 * MIB
        assert memory.location == 1 and memory.memory_kind == "HBM" and memory.page == 2 * MIB
        assert repr(memory) == "<PhysicalMemory 64 MiB, HBM of device 1>"
    assert device.memory_info().huge_free == before
    assert device.session.device(1).id == 1


def test_memory_of_the_host_is_of_the_host(session):
    with session.host() as host, host.create("2MiB") as memory:
        assert memory.location == "host" and not memory.is_imported
        assert repr(host) == "<Host>" and repr(memory) == "<PhysicalMemory 2 MiB, of the host>"


def test_reservations_have_places(session):
    with session.reserve("1GiB", alignment="1GiB") as reservation:
        assert reservation.address % GIB == 0 and reservation.size == GIB
        place = reservation.address
        assert repr(reservation) == f"<Reservation 1 GiB at {place:#x}>"
    with session.reserve(2 * MIB, address=place) as reservation:
        assert reservation.address == place


def test_what_is_mapped_at_an_address_is_found(session):
    memory = session.device(0).create("2MiB")
    reservation = session.reserve("6MiB")
    mapping = reservation.map(memory, offset="2MiB")
    assert mapping.offset == 2 * MIB and len(mapping) == mapping.size == 2 * MIB
    assert mapping.address == reservation.address + 2 * MIB
    assert mapping.memory.is_same(memory)
    assert session.mapping_at(mapping.address + 5) == (mapping.address, 2 * MIB)
    assert session.memory_at(mapping.address + 5).is_same(memory)
    assert session.memory_at(reservation.address) is None


def test_a_peer_can_be_granted_access(session):
    mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    peer = session.device(1)
    assert not mapping.is_granted(peer)
    session.device(0).enable_peer_access(peer)
    mapping.grant(peer)
    assert mapping.is_granted(peer)


def test_objects_that_are_dropped_in_any_order_leave_nothing(ascend_npu):
    session = ascend_vmm.Session()
    mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    del session
    mapping.write(b"still here")
    assert mapping.read(10) == b"still here"
    del mapping
    assert ascend_npu.held() == ""


@pytest.mark.ascend_npu(generation="26.1")
def test_objects_are_dropped_in_every_order(ascend_npu):
    for order in itertools.permutations(range(5)):
        session = ascend_vmm.Session()
        device, reservation = session.device(0), session.reserve("2MiB")
        memory = device.create("2MiB")
        objects = [session, device, memory, reservation, reservation.map(memory)]
        del session, device, memory, reservation
        for number in order:
            objects[number] = None
        assert ascend_npu.held() == "", order


def test_garbage_in_cycles_is_released(ascend_npu):
    class Holder:
        pass

    session = ascend_vmm.Session()
    holder = Holder()
    holder.self, holder.session = holder, session
    holder.mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    ghost = weakref.ref(holder.mapping)
    del holder, session
    gc.collect()
    assert ghost() is None and ascend_npu.held() == ""


def test_a_session_without_segments_has_no_cpu_access(ascend_npu):
    with ascend_vmm.Session(segments=False) as session:
        assert not session.has_segments
        mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
        mapping.write(b"copies work")
        with pytest.raises(ascend_vmm.Invalid, match="without address segments"):
            mapping.host_view()


def test_batches_and_rows(session):
    mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    ascend_vmm.write_batch([(mapping, 0, b"one"), (mapping, 4096, b"two")])
    first, second = bytearray(3), bytearray(3)
    ascend_vmm.read_batch([(mapping, 0, first), (mapping, "4KiB", second)])
    assert (first, second) == (b"one", b"two")
    mapping.write_rows(b"abcdef", width=2, height=3, pitch=16, offset=8192)
    assert mapping.read(34, offset=8192)[::16] == b"ace"
    back = bytearray(6)
    mapping.read_rows_into(back, width=2, height=3, pitch=16, offset=8192)
    assert back == b"abcdef"
