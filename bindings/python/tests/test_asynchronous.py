"""Copies in the background: waited for, awaited, forgotten."""

import asyncio
import faulthandler
import gc
import os
import threading
import time
import weakref

import ascend_vmm
import pytest
from ascend_vmm._asyncio import completed
from conftest import MIB

pytestmark = pytest.mark.ascend_npu(generation="all")


def test_a_copy_runs_in_the_background(mapping):
    data = bytearray(b"background" * 1000)
    copy = mapping.write_async(data, offset=8)
    with pytest.raises(BufferError):
        data.append(1)
    copy.wait()
    copy.wait()
    data.append(1)
    assert copy.done and repr(copy) == "<PendingCopy, over>"
    back = bytearray(10)
    with mapping.read_into_async(back, offset=8) as copy:
        pass
    assert back == b"background"


def test_copies_can_be_awaited(mapping):
    async def main():
        buffers = [bytes([number]) * 4096 for number in range(50)]
        await asyncio.gather(*(wait(mapping.write_async(data, offset=4096 * data[0])) for data in buffers))
        back = [bytearray(4096) for _ in buffers]
        for number, buffer in enumerate(back):
            await mapping.read_into_async(buffer, offset=4096 * number)
        assert back == buffers

    async def wait(copy):
        await copy

    asyncio.run(main())


def test_the_loop_goes_on_while_a_copy_is_awaited(session):
    mapping = session.reserve("64MiB").map(session.device(0).create("64MiB"))

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.ensure_future(tick())
        await mapping.write_async(bytes(64 * MIB))
        ticker.cancel()
        assert ticks > 0

    asyncio.run(main())


def test_a_cancelled_wait_leaves_the_copy_alone(mapping):
    async def main():
        data = bytearray(b"finished anyway")
        copy = mapping.write_async(data)

        async def wait():
            await copy

        task = asyncio.ensure_future(wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        copy.wait()

    asyncio.run(main())
    assert mapping.read(15) == b"finished anyway"


def test_a_copy_that_fails_raises_where_it_is_waited_for(session, mapping, ascend_npu):
    ascend_npu.inject("copies=link-error")
    data = bytearray(4096)
    copy = mapping.write_async(data)
    for _ in range(2):
        with pytest.raises(ascend_vmm.Refused, match="transfer"):
            copy.wait()
    copy.close()  # it is known
    data.append(1)
    with pytest.raises(ascend_vmm.Refused):
        with mapping.write_async(data):
            pass  # no one else would get to know

    async def wait(copy):
        await copy

    async def main():
        copy = mapping.write_async(data)
        failed = await asyncio.gather(*(wait(copy) for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in failed] == [ascend_vmm.Refused] * 3

    asyncio.run(main())


def test_a_copy_that_ends_after_its_loop_was_closed_wakes_no_one():
    """The loop of the wait is gone: the copy's thread has no one to wake."""

    class Copy:
        def add_done_callback(self, callback):
            self.over = callback

        def wait(self):
            raise AssertionError("no one waits any more")

    slow = Copy()

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(completed(slow), 0.01)

    asyncio.run(main())
    slow.over()


def test_a_copy_can_be_awaited_by_several_and_with_a_time_limit(session, mapping, ascend_npu):
    async def wait(copy):
        await copy

    async def main():
        copy = mapping.write_async(bytes(4 * MIB))
        await asyncio.gather(*(asyncio.wait_for(wait(copy), 100) for _ in range(5)))
        ascend_npu.inject("copies=link-error")
        failed = await asyncio.gather(*(wait(mapping.write_async(bytes(16))) for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in failed] == [ascend_vmm.Refused] * 3

    asyncio.run(main())


def test_a_copy_that_cannot_begin_gives_its_buffer_back(mapping):
    data = bytearray(16)
    with pytest.raises(ascend_vmm.Invalid):
        mapping.write_async(data, offset=mapping.size)
    data.append(1)
    with pytest.raises((BufferError, ValueError)):
        mapping.read_into_async(b"read only")


def test_closing_a_mapping_waits_for_its_copies(session):
    mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    copies = [mapping.write_async(bytes(4096), offset=4096 * number) for number in range(20)]
    mapping.close()
    assert mapping.closed and all(copy.done for copy in copies)


def test_a_copy_that_was_closed_can_be_waited_for(session):
    mapping = session.reserve("2MiB").map(session.device(0).create("2MiB"))
    called, copy = [], mapping.write_async(bytes(MIB))

    async def main():
        waiting = asyncio.ensure_future(completed(copy))
        await asyncio.sleep(0)
        mapping.close()
        await waiting
        await copy

    asyncio.run(main())
    copy.wait()
    copy.add_done_callback(lambda: called.append(1))
    assert copy.done and called == [1]


@pytest.mark.ascend_npu(generation="26.1")
def test_threads_look_at_a_copy_while_another_waits_for_it(mapping):
    """The one that waits gives the buffer back, for which it needs the interpreter's lock. Those
    that look have it."""
    faulthandler.dump_traceback_later(300, exit=True)
    data = bytes(4 * MIB)
    for _ in range(150):
        copy, over = mapping.write_async(data), []

        def look():
            while not over:
                repr(copy)
                copy.add_done_callback(int)
                assert copy.done in (False, True)

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        copy.wait()
        over.append(1)
        for thread in threads:
            thread.join()
    faulthandler.cancel_dump_traceback_later()


def test_a_buffer_in_a_cycle_with_its_copy_is_garbage(mapping):
    class Data(bytearray):
        pass

    data = Data(b"in a cycle")
    data.copy_of = mapping.write_async(data)
    ghost = weakref.ref(data)
    del data
    gc.collect()
    assert ghost() is None and mapping.read(10) == b"in a cycle"


def test_a_callback_in_a_cycle_with_its_copy_is_garbage(mapping):
    class Callback:
        def __call__(self):
            pass

    callback = Callback()
    callback.copy_of = mapping.write_async(bytes(MIB))
    callback.copy_of.add_done_callback(callback)
    ghost = weakref.ref(callback)
    del callback
    mapping.close()
    gc.collect()
    deadline = time.monotonic() + 60
    # The thread that called it lets go of it last.
    while ghost() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
        gc.collect()
    assert ghost() is None


def test_forgotten_copies_are_finished(session, mapping):
    data = bytearray(b"forgotten")
    mapping.write_async(data)
    gc.collect()
    data.append(1)
    assert mapping.read(9) == b"forgotten"


def test_memory_of_the_host_is_copied_too(session, mapping):
    host = session.reserve("4MiB").map(session.host().create("4MiB"))
    host.write(b"from the host")
    mapping.copy_from_async(host).wait()
    assert mapping.read(13) == b"from the host"
    host.write_async(b"direct").wait()
    assert host.read(6) == b"direct"


def test_callbacks_are_called_once_and_their_exceptions_are_reported(mapping, monkeypatch):
    import sys

    reported, called, event = [], [], threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda information: reported.append(information.exc_type))

    def wrong():
        raise LookupError

    copy = mapping.write_async(bytes(4 * MIB))
    copy.add_done_callback(wrong)
    copy.add_done_callback(lambda: called.append(1))
    copy.add_done_callback(event.set)
    assert event.wait(60)
    copy.wait()
    copy.add_done_callback(lambda: called.append(2))
    assert called == [1, 2] and reported == [LookupError]


def test_a_child_of_fork_does_not_wait_for_its_parents_copies(session, mapping):
    copy, other = mapping.write_async(b"parent's"), mapping.write_async(bytes(MIB), offset=MIB)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in [copy.wait, copy.close, lambda: copy.done, lambda: copy.add_done_callback(print)]:
                with pytest.raises(ascend_vmm.OtherProcess):
                    call()
            assert repr(copy) == "<PendingCopy of the parent process>"
            del copy, other
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    copy.wait()
