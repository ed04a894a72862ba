"""Pools, sleep and wake, files."""

import gc
import os
import pathlib
import sys
import weakref

import ascend_vmm
import pytest
from conftest import MIB

pytestmark = pytest.mark.ascend_npu(generation="all")


@pytest.fixture
def pool(session):
    with ascend_vmm.Pool(session.device(0)) as pool:
        yield pool


def test_blocks_are_taken_used_and_freed(pool):
    with pool.allocate(1000, alignment=512, tag=3) as block:
        assert block.size >= 1000 and block.address % 512 == 0 and block.tag == 3 and len(block) == block.size
        block.write(b"block", offset=10)
        assert block.read(5, offset=10) == b"block"
        other = pool.allocate("1MiB")
        other.copy_from(block, source_offset=10, size=5)
        assert other.read(5) == b"block"
        assert pool.statistics().blocks == 2 and pool.statistics(3).blocks == 1
        assert "tag 3" in repr(block) and "2 blocks" in repr(pool)
    assert block.closed and pool.statistics().blocks == 1
    del other
    assert pool.statistics().blocks == 0 and pool.statistics().mapped > 0
    assert pool.trim() > 0 and pool.statistics().mapped == 0


def test_a_pool_of_host_memory(session):
    with ascend_vmm.Pool(session.host()) as pool, pool.allocate("4KiB") as block:
        block.fill(7)
        assert block.read() == b"\7" * block.size
    with pytest.raises(TypeError):
        ascend_vmm.Pool(session)


def test_closing_a_pool_frees_its_blocks(session, ascend_npu):
    device = session.device(0)
    free = device.memory_info().huge_free
    with ascend_vmm.Pool(device) as pool:
        blocks = [pool.allocate(size) for size in (64, 4096, 3 * MIB, 40 * MIB)]
        assert device.memory_info().huge_free < free
    assert all(block.closed for block in blocks)
    assert device.memory_info().huge_free == free


def test_impossible_blocks_are_refused(pool):
    for size, alignment in [(0, 1), (1 << 62, 1), (64, 3), (64, 0), (64, 1 << 40)]:
        with pytest.raises(ascend_vmm.Invalid):
            pool.allocate(size, alignment=alignment)
    for tag in [-1, 1 << 32]:
        with pytest.raises(OverflowError):
            pool.allocate(64, tag=tag)


@pytest.mark.parametrize("keep", ["host", "pinned", "nothing", None, "file"])
def test_a_tag_sleeps_and_wakes_with_its_addresses(pool, session, tmp_path, keep):
    device = session.device(0)
    weights = pool.allocate("24MiB", tag=1)
    other = pool.allocate("2MiB", tag=2)
    weights.write(b"learned", offset=20 * MIB)
    other.write(b"awake")
    address, free, steps = weights.address, device.memory_info().huge_free, []
    path = tmp_path / "weights"
    where = {"file": (path,), None: ()}.get(keep, (keep,))
    assert pool.sleep(1, *where, progress=lambda done, total: steps.append((done, total))) == 24 * MIB
    assert device.memory_info().huge_free == free + 24 * MIB and pool.statistics().asleep == 24 * MIB
    assert path.exists() == (keep == "file")
    with pytest.raises(ascend_vmm.Invalid):
        weights.read(1)
    assert other.read(5) == b"awake"
    pool.wake(1, 2, progress=lambda *_: None)
    assert weights.address == address and not path.exists()
    if keep != "nothing":
        assert weights.read(7, offset=20 * MIB) == b"learned"
        assert steps and steps[-1][0] == steps[-1][1]


def test_unknown_values_of_keep_are_refused(pool):
    pool.allocate(64, tag=1)
    with pytest.raises(ascend_vmm.Invalid, match="pathlib.Path"):
        pool.sleep(1, "disk")
    with pytest.raises(TypeError):
        pool.sleep(1, 5)


def test_an_exception_in_a_progress_callback_leaves_the_tag_awake(pool):
    block = pool.allocate("8MiB", tag=1)
    block.write(b"unharmed")

    class Enough(BaseException):
        pass

    def stop(done, total):
        raise Enough(done)

    with pytest.raises(Enough):
        pool.sleep(1, progress=stop)
    assert block.read(8) == b"unharmed" and pool.statistics().asleep == 0
    pool.sleep(1)
    with pytest.raises(Enough):
        pool.wake(1, progress=stop)
    assert pool.statistics().asleep > 0
    pool.wake(1)
    assert block.read(8) == b"unharmed"


def test_the_hook_is_called_before_anything_is_unmapped(session, ascend_npu):
    calls = []

    def hook(ranges):
        calls.append(ranges)
        assert pool.statistics().blocks >= 0  # it may use the pool
        if len(calls) == 1:
            raise RuntimeError("not yet")

    pool = ascend_vmm.Pool(session.device(0), before_unmap=hook)
    block = pool.allocate("4MiB")
    address = block.address
    block.close()
    with pytest.raises(RuntimeError, match="not yet"):
        pool.trim()
    assert pool.statistics().mapped == 4 * MIB
    assert pool.trim() == 4 * MIB
    assert calls[1][0][0] <= address < calls[1][0][1]
    pool.close()


def test_a_pool_stays_open_if_its_hook_raises_when_it_is_closed(session):
    class NotYet(BaseException):
        pass

    def hook(ranges):
        if not ready:
            raise NotYet

    device, ready = session.device(0), []
    free = device.memory_info().huge_free
    pool = ascend_vmm.Pool(device, before_unmap=hook)
    block = pool.allocate("2MiB")
    for close in [pool.close, device.close, session.close]:
        with pytest.raises(NotYet):
            close()
        assert not pool.closed and pool.statistics().mapped == 2 * MIB and device.memory_info().huge_free < free
    assert block.closed and pool.allocate(64).read(1) == b"\0"
    ready.append(1)
    pool.close()
    assert pool.closed and device.memory_info().huge_free == free


def test_a_hook_that_fails_when_a_pool_is_dropped_is_reported(session, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda information: reported.append(information.exc_type))

    def hook(ranges):
        raise LookupError

    pool = ascend_vmm.Pool(session.device(0), before_unmap=hook)
    pool.allocate("2MiB").close()
    del pool
    gc.collect()
    assert reported == [LookupError] and session.statistics.physical == 0


def test_a_pool_in_a_cycle_with_its_hook_is_garbage(session):
    class Owner:
        def __init__(self):
            self.pool = ascend_vmm.Pool(session.device(0), before_unmap=self.hook)
            self.block = self.pool.allocate(64)

        def hook(self, ranges):
            pass

    ghost = weakref.ref(Owner())
    gc.collect()
    assert ghost() is None and session.statistics.mapped == 0


@pytest.mark.ascend_npu(generation="26.1")
@pytest.mark.parametrize("by", ["path", "text", "file", "descriptor"])
def test_files_are_loaded_and_stored(session, tmp_path, by):
    mapping = session.reserve("32MiB").map(session.device(0).create("32MiB"))
    path = tmp_path / "data"
    content = os.urandom(20 * MIB + 5)
    path.write_bytes(content)
    steps = []
    with open(path, "rb") as file:
        given = {"path": path, "text": str(path), "file": file, "descriptor": file.fileno()}[by]
        mapping.load(given, offset=3, progress=lambda *step: steps.append(step))
    assert mapping.read(len(content), offset=3) == content
    assert steps[-1] == (len(content), len(content)) and len(steps) > 1
    copy = tmp_path / "copy"
    copy.write_bytes(b"longer than nothing")
    with open(copy, "r+b") as file:
        given = {"path": copy, "text": str(copy), "file": file, "descriptor": file.fileno()}[by]
        mapping.store(given, offset=3, size=len(content))
    assert copy.read_bytes() == content
    mapping.load(path, file_offset=len(content) - 4, offset=0)
    assert mapping.read(4) == content[-4:]
    mapping.store(copy, file_offset=2, size=4)
    assert copy.read_bytes()[:8] == content[:2] + content[-4:] + content[6:8]


def test_files_that_cannot_be_used_are_os_errors(session, tmp_path):
    mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    with pytest.raises(OSError) as raised:
        mapping.load(tmp_path / "nowhere")
    error = raised.value
    assert isinstance(error, ascend_vmm.FileFailed) and error.errno_name == "ENOENT"
    assert error.filename == str(tmp_path / "nowhere")
    with pytest.raises(ascend_vmm.FileFailed):
        mapping.store(tmp_path)
    short = tmp_path / "short"
    short.write_bytes(b"x" * 100)
    with pytest.raises(ascend_vmm.FileFailed):
        mapping.load(short, size=200)
    with open(short, "rb") as file, pytest.raises(OSError):
        mapping.store(file, size=10)
    long = tmp_path / "long"
    long.write_bytes(bytes(3 * MIB))
    with pytest.raises(ascend_vmm.Invalid):
        mapping.load(long)
    with pytest.raises(ascend_vmm.Invalid):
        mapping.store(tmp_path / "never", size=3 * MIB)
    assert not (tmp_path / "never").exists()
    with pytest.raises((TypeError, AttributeError)):
        mapping.load(object())
    closed = open(short, "rb")
    closed.close()
    with pytest.raises(ValueError):
        mapping.load(closed)
    assert isinstance(pathlib.Path(error.filename), pathlib.Path)


def test_an_exception_in_a_callback_ends_a_load(session, tmp_path):
    mapping = session.reserve("32MiB").map(session.device(0).create("32MiB"))
    path = tmp_path / "data"
    path.write_bytes(bytes(32 * MIB))
    with pytest.raises(ZeroDivisionError):
        mapping.load(path, progress=lambda done, total: 1 / 0)
    mapping.close()
