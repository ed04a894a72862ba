"""Fork, threads and the end of the interpreter."""

import os
import re
import subprocess
import sys
import threading

import ascend_vmm
import pytest
from conftest import MIB

pytestmark = pytest.mark.ascend_npu(generation="all")


def in_child(body):
    """Runs `body` in a forked child; its exception fails the test."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException as error:
            print("in the child:", type(error), error, file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_is_refused_its_parents_objects_and_can_have_its_own(session, mapping):
    mapping.write(b"parent")
    view_of = session.reserve("2MiB").map(session.host().create("2MiB"))
    view = view_of.host_view()
    memory = mapping.memory
    export = memory.export()
    pool = ascend_vmm.Pool(session.device(0))
    block = pool.allocate(64, tag=1)

    def body():
        for call in [
            lambda: mapping.write(b"child!"),
            lambda: mapping.read(6),
            lambda: mapping.fill(0),
            lambda: session.device(0),
            lambda: session.reserve("2MiB"),
            lambda: memory.export(),
            lambda: export.trust_anyone(),
            lambda: view.load_u8(0),
            lambda: memoryview(view),
            lambda: pool.allocate(64),
            lambda: pool.sleep(1),
            lambda: pool.trim(),
            lambda: block.read(1),
            lambda: block.write_async(b"x"),
            lambda: pool.close(),
            lambda: mapping.close(),
            lambda: session.close(),
        ]:
            with pytest.raises(ascend_vmm.OtherProcess) as raised:
                call()
            assert raised.value.process == os.getpid()
        with ascend_vmm.Session() as own:
            assert own.reserve("2MiB").map(own.device(0).create("2MiB")).read(6) == bytes(6)

    in_child(body)
    assert mapping.read(6) == b"parent"


def test_the_end_of_a_block_in_a_child_leaves_the_parents_objects_alone(ascend_npu):
    with ascend_vmm.Session() as session:
        with session.reserve("2MiB") as reservation:
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                reservation.map(session.device(0).create("2MiB")).write(b"here")
    if child == 0:
        os._exit(0)


def test_a_child_that_drops_what_it_inherited_makes_no_call_to_the_driver(session, mapping, ascend_npu):
    names = {"session": session, "mapping": mapping}
    del mapping
    ascend_npu.record()

    def body():
        names.clear()

    in_child(body)
    assert ascend_npu.commands() == []


def run(program, *arguments, expect=0):
    """Runs a Python program on this test's emulated host."""
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)
    assert result.returncode == expect, result.stdout
    return result.stdout


LIVE = """if True:
    import ascend_vmm, gc, sys, threading, time
    session = ascend_vmm.Session()
    device = session.device(0)
    memory = device.create("4MiB")
    mapping = session.reserve("4MiB").map(memory)
    seen = session.reserve("2MiB").map(session.host().create("2MiB"))
    view = seen.host_view()
    buffer = memoryview(view)
    export = memory.export()
    mapping.write(b"live")
"""


@pytest.mark.ascend_npu(generation="26.1")
@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "keep = [sys.modules, session]; keep.append(keep)",
        "sys.modules['kept'] = mapping",
        "import atexit; atexit.register(lambda: mapping.write(b'at exit'))",
        "import atexit; atexit.register(session.close); del buffer",
        "import os; os._exit(0)",
        "gc.disable(); cycle = [mapping]; cycle.append(cycle)",
        "class Late:\n    def __del__(self): mapping.read(1)\nlate = Late()",
    ],
)
def test_the_interpreter_ends_with_live_objects(ascend_npu, end):
    program = LIVE + "\n    ".join(["", *end.split("\n")])
    assert run(program) == ""
    assert ascend_npu.held() == ""


@pytest.mark.ascend_npu(generation="26.1")
def test_the_interpreter_ends_while_threads_copy(ascend_npu):
    program = LIVE + """
    big = session.reserve("64MiB").map(device.create("64MiB"))
    data = bytes(64 << 20)
    def work():
        while True:
            big.write(data)
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.2)
    """
    for _ in range(3):
        run(program)
        assert ascend_npu.held() == ""


def test_an_exception_that_is_not_caught_ends_the_program_as_usual(ascend_npu):
    assert "ZeroDivisionError" in run(LIVE + "\n    1 / 0", expect=1)
    assert ascend_npu.held() == ""


@pytest.mark.ascend_npu(generation="26.1")
def test_a_subinterpreter_is_refused(ascend_npu):
    program = """if True:
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        import ascend_vmm
        code = '''if True:
            try:
                import ascend_vmm
            except ImportError as error:
                print("refused")
            else:
                print("allowed")
        '''
        one = interpreters.create()
        failed = interpreters.run_string(one, code)
        assert failed is None, failed
    """
    assert run(program) == "refused\n"


def test_forks_among_threads_do_not_hang(session, mapping):
    stop, failures = threading.Event(), []

    def work():
        while not stop.is_set():
            try:
                with session.reserve("2MiB"):
                    mapping.read(4096)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()

    def body():
        with pytest.raises(ascend_vmm.OtherProcess):
            mapping.read(1)
        with ascend_vmm.Session() as own:
            assert own.reserve("2MiB").size == 2 * MIB

    try:
        for _ in range(20):
            in_child(body)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.ascend_npu(generation="26.1")
def test_ten_thousand_rounds_leak_nothing(session, ascend_npu):
    import gc

    device = session.device(0)

    def memory_of_this_process():
        """What it has allocated: its programs' pages come and go as the host likes."""
        with open("/proc/self/status") as file:
            return int(re.search(r"RssAnon:\s+(\d+) kB", file.read())[1]) * 1024

    def rounds(number):
        for _ in range(number):
            with device.create("2MiB") as memory:
                reservation = session.reserve("2MiB")
                mapping = reservation.map(memory)
                mapping.write(b"round")
                assert mapping.read(5) == b"round"
                try:
                    reservation.map(memory)
                except ascend_vmm.Invalid:
                    pass
                reservation.close()

    rounds(300)
    gc.collect()
    objects, resident, held = len(gc.get_objects()), memory_of_this_process(), ascend_npu.held()
    rounds(10_000)
    gc.collect()
    assert len(gc.get_objects()) <= objects + 5
    assert ascend_npu.held() == held
    # A leak of 50 bytes in each round would be more.
    assert memory_of_this_process() < resident + 512 * 1024


@pytest.mark.ascend_npu(generation="26.1")
def test_a_thousand_of_everything_else_leak_nothing(session, mapping, ascend_npu):
    import gc
    import pickle

    from ascend_vmm import acl

    host = session.reserve("2MiB").map(session.host().create("2MiB"))
    pool, export = ascend_vmm.Pool(session.device(0)), mapping.memory.export()
    kept, buffer = pool.allocate(64), bytearray(4096)

    def one():
        with host.host_view() as view, memoryview(view) as bytes_of_view:
            bytes_of_view[0] = 1
        mapping.write_async(buffer).wait()
        mapping.read_into_async(buffer)
        pool.allocate(1000, tag=1).write(b"block")
        pickle.loads(pickle.dumps(export.ticket()))
        ascend_vmm.write_batch([(mapping, 0, buffer), (mapping, 4096, b"x")])
        session.statistics, pool.statistics(), repr(mapping), session.memory_at(mapping.address)
        pointer, _ = acl.rt.malloc(64, 0)
        acl.rt.free(pointer)
        acl.rt.pointer_get_attributes(mapping.address)
        assert not hasattr(acl.rt, "launch_kernel")
        for wrong in [lambda: mapping.read(1, offset=mapping.size), lambda: session.reserve("3MiB")]:
            with pytest.raises(ascend_vmm.Invalid):
                wrong()

    acl.init()
    acl.rt.set_device(0)
    for _ in range(50):
        one()
    gc.collect()
    objects, references = len(gc.get_objects()), sys.getrefcount(buffer)
    for _ in range(1000):
        one()
    gc.collect()
    assert len(gc.get_objects()) <= objects + 5 and sys.getrefcount(buffer) == references
    buffer.append(1)  # no copy has kept it
    acl.rt.reset_device_force(0)
    acl.finalize()
    kept.close()
    pool.close()
