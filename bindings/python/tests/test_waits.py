"""Ctrl-C, other threads and callbacks while a call waits."""

import os
import signal
import subprocess
import sys
import threading

import ascend_vmm
import pytest
from conftest import MIB

pytestmark = pytest.mark.ascend_npu(generation="26.1")

@pytest.fixture
def counter():
    """A thread of Python's that counts as long as it runs."""
    count, stop = [0], threading.Event()

    def work():
        while not stop.is_set():
            count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    yield lambda: count[0]
    stop.set()
    thread.join()


def on_a_host(*options, program):
    """Runs a program on an emulated host and returns its output."""
    command = [sys.executable, "-m", "ascend_vmm.emulate", *options, "--", sys.executable, "-c", program]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert result.returncode == 0, result.stdout
    return result.stdout


# Prints whether Ctrl-C has ended the call long before its time.
INTERRUPTED = """if True:
    import ascend_vmm, signal, threading, time
    main = threading.main_thread().ident
    threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    begun = time.monotonic()
    try:
        {call}
    except KeyboardInterrupt:
        print(time.monotonic() - begun < 25)
"""


@pytest.mark.parametrize("session", ["Session()", "Session.current()"])
def test_control_c_ends_the_wait_for_a_device(session):
    """The device accepts a connection and says nothing: the library waits for 30 s."""
    program = INTERRUPTED.format(call=f"with ascend_vmm.{session} as session: session.device(0)")
    program += "    print(session.closed)"
    assert on_a_host("--daemon", "silent", program=program) == "True\nTrue\n"


@pytest.mark.parametrize("ask", ["probe", "devices"])
def test_control_c_ends_a_survey(ask):
    """The driver's first answer waits for devices that do not come, for 150 s."""
    program = INTERRUPTED.format(call=f"ascend_vmm.{ask}(timeout=600)")
    assert on_a_host("--detected", "1", program=program) == "True\n"


def test_a_handler_cannot_open_a_device_under_the_wait_for_one():
    program = """if True:
        import ascend_vmm, signal
        session = ascend_vmm.Session()
        signal.signal(signal.SIGALRM, lambda *_: session.device(0))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            session.device(0)
        except RuntimeError as error:
            print(error)
    """
    assert "while its thread waits in such a call" in on_a_host("--daemon", "silent", program=program)


def test_where_no_thread_can_be_started_an_exchange_is_an_error():
    """No address space is left for a thread's stack, as where a container's limit of threads is reached."""
    program = """if True:
        import ascend_vmm, resource, socket
        ours, theirs = socket.socketpair()
        with ascend_vmm.Session() as session:
            memory = session.device(0).create("2MiB")
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, hard))
            try:
                ascend_vmm.send(ours, memory, timeout=1)
            except RuntimeError as error:
                print(str(error).split(':')[0])
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            theirs.setblocking(False)
            try:
                theirs.recv(1)
            except BlockingIOError:
                print("nothing was sent")
    """
    assert on_a_host(program=program) == "the thread for this call cannot be started\nnothing was sent\n"


def test_control_c_ends_sleep_and_files_and_nothing_is_lost(session, tmp_path):
    with ascend_vmm.Pool(session.device(0)) as pool:
        block = pool.allocate("64MiB", tag=1)
        block.write(b"unharmed")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for call in [lambda on: pool.sleep(1, progress=on), lambda on: block.store(tmp_path / "file", progress=on)]:
            steps = []

            def progress(done, total):
                steps.append(done)
                signal.raise_signal(signal.SIGINT)

            with pytest.raises(KeyboardInterrupt):
                call(progress)
            assert len(steps) == 1 and pool.statistics().asleep == 0
        assert block.read(8) == b"unharmed"


def test_control_c_ends_the_tool_and_the_program_that_it_runs():
    # A signal right before a sleep does not shorten it: Python sees it afterwards.
    program = "import time; print('ready', flush=True)\nwhile True: time.sleep(0.1)"
    command = [sys.executable, "-m", "ascend_vmm.emulate", "--", sys.executable, "-c", program]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert tool.stdout.readline() == "ready\n"
    # As a terminal does: both get it.
    os.killpg(tool.pid, signal.SIGINT)
    _, errors = tool.communicate(timeout=100)
    assert tool.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1, "the program's own, and none of the tool's"


def test_other_threads_run_while_an_object_is_dropped(ascend_npu, counter):
    session = ascend_vmm.Session(device_process="always")
    device = session.device(0)
    ascend_npu.inject("device0=silent:1s")
    before = counter()
    del device, session
    assert counter() > before + 1000
    assert ascend_npu.held() == ""


def test_other_threads_run_while_a_device_is_waited_for(ascend_npu, counter):
    with ascend_vmm.Session(device_process="always") as session:
        ascend_npu.inject("device0=silent:1s")
        before = counter()
        session.device(0)
        assert counter() > before + 1000


def test_a_progress_callback_may_use_the_pool_and_everything_else(session):
    pool = ascend_vmm.Pool(session.device(0))
    block = pool.allocate("40MiB", tag=1)
    block.write(b"kept")
    depth = [0]

    def progress(done, total):
        assert pool.statistics(1).blocks == 1 and "1 blocks" in repr(pool) or depth[0]
        with pool.allocate("2MiB", tag=2) as other:
            other.fill(1)
        with pytest.raises(ascend_vmm.Invalid):
            pool.sleep(1)  # it is falling asleep
        with pytest.raises(ascend_vmm.Invalid):
            block.read(1)
        if depth[0] < 20:
            depth[0] += 1
            deeper = pool.allocate("2MiB", tag=100 + depth[0])
            pool.sleep(100 + depth[0], progress=progress)
            pool.wake(100 + depth[0], progress=progress)
            deeper.close()

    pool.sleep(1, progress=progress)
    pool.wake(1)
    assert depth[0] == 20 and block.read(4) == b"kept"
    pool.close()


def test_a_hook_that_fails_under_a_progress_callback_does_not_end_its_call(session, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda information: reported.append(information.exc_type))

    def hook(ranges):
        raise LookupError

    pool = ascend_vmm.Pool(session.device(0))
    block = pool.allocate("2MiB", tag=1)

    def progress(done, total):
        # Dropped inside of the call of another pool, whose business it is not.
        ascend_vmm.Pool(session.device(0), before_unmap=hook).allocate("2MiB").close()

    assert pool.sleep(1, progress=progress) == 2 * MIB
    assert reported == [LookupError]
    block.close()
    pool.close()


def test_a_callback_does_not_hold_up_other_threads(session):
    """A thread that asks the pool while another is in a callback, which waits for the first."""
    pool, asked = ascend_vmm.Pool(session.device(0)), threading.Event()
    block = pool.allocate("4MiB", tag=1)

    def ask():
        assert "mapped" in repr(pool) and pool.statistics().blocks == 1
        ascend_vmm.Pool(session.device(0)).close()
        asked.set()

    def progress(done, total):
        thread = threading.Thread(target=ask)
        thread.start()
        assert asked.wait(100), "a thread waits for a lock that the callback's call holds"
        thread.join()

    pool.sleep(1, progress=progress)
    assert asked.is_set()
    block.close()
    pool.close()
