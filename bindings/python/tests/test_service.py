"""`ascend_vmm.service`: engines with the vendor's stack, and a service, on an emulated driver."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from ascend_vmm import service
from ascend_vmm.service import Client

pytestmark = pytest.mark.ascend_npu(generation="26.1")


class Stack:
    """The vendor's library, as a framework has it: this project's own."""

    def __init__(self):
        self.library = ctypes.CDLL(os.environ["LIBASCENDCL"])
        self.library.aclInit(None)

    def set_device(self, device):
        assert self.library.aclrtSetDevice(device) == 0

    def copy(self, to, source, size, kind):
        arguments = ctypes.c_void_p(to), ctypes.c_size_t(size), source, ctypes.c_size_t(size), kind
        return self.library.aclrtMemcpy(*arguments)

    def write(self, address, data):
        assert self.copy(address, data, len(data), 1) == 0

    def read(self, address, size):
        data = ctypes.create_string_buffer(size)
        code = self.library.aclrtMemcpy(data, ctypes.c_size_t(size), ctypes.c_void_p(address), ctypes.c_size_t(size), 2)
        return data.raw if code == 0 else None


@pytest.fixture
def socket(ascend_npu, tmp_path):
    """The socket of a service, which is killed at the end."""
    path = tmp_path / "socket"
    config = tmp_path / "service.toml"
    config.write_text('[[allow]]\ndomains = ["w*", "q"]\nwrite = true\n[[quota]]\ndomain = "q"\nbytes = "4 MiB"\n')
    command = [sys.executable, "-m", "ascend_vmm", "serve", "--socket", str(path), "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout.readline().startswith("serving")
        yield str(path)
        keeper.kill()


@pytest.fixture
def stack(socket):
    if "LIBASCENDCL" not in os.environ:
        pytest.skip("LIBASCENDCL names no libascendcl.so")
    stack = Stack()
    stack.set_device(0)
    yield stack
    stack.library.aclrtResetDevice(0)
    stack.library.aclFinalize()


DATA = bytes(range(256)) * 64


def write(stack, socket):
    domain = Client(socket).open("w")
    assert domain.writes and domain.version == 0
    stack.write(domain.put("embed", len(DATA), b"u8"), DATA)
    domain.commit()
    return domain


@pytest.mark.ascend_npu(generation="all")
def test_what_one_engine_writes_another_finds_asleep_and_awake(stack, socket):
    write(stack, socket).close()
    with Client(socket).open("w", timeout=10) as domain:
        assert not domain.writes and domain.version == 1 and domain.awake
        entry = domain.entries["embed"]
        assert entry.value == b"u8" and stack.read(entry.address, entry.size) == DATA
        for _ in range(2):
            domain.sleep()
            assert not domain.awake and stack.read(entry.address, 1) is None
            domain.wake(timeout=10)
            assert domain.entries["embed"] == entry and stack.read(entry.address, entry.size) == DATA
    with pytest.raises(Exception, match="closed"):
        domain.wake()


def test_errors_say_what_is_wrong_and_what_to_do(stack, socket):
    client = Client(socket)

    def refused(kind, *arguments, **options):
        with pytest.raises(kind) as caught:
            client.open(*arguments, **options)
        error = caught.value
        assert isinstance(error, service.ServiceError) and error.code and error.cause and error.remedy
        assert error.cause in str(error)
        return error

    assert isinstance(refused(service.Timeout, "w", "read", timeout=0.05), TimeoutError)
    assert isinstance(refused(service.Forbidden, "other"), PermissionError)
    for bad in [("w", "readwrite"), ("../w", "read")]:
        with pytest.raises(ValueError):
            client.open(*bad)
    with pytest.raises(ValueError, match="timeout"):
        client.open("w", timeout=-1)
    with client.open("q") as domain:
        with pytest.raises(MemoryError, match="quota|4"):
            domain.allocate("6MiB")
    with client.open("w", capacity="4MiB") as domain:
        with pytest.raises(service.InvalidCall, match="capacity"):
            domain.put("k", "5MiB")
        with pytest.raises(service.InvalidCall, match="commit"):
            domain.sleep()
    write(stack, socket).close()
    stack.set_device(1)
    refused(service.WrongDevice, "w", "read")
    stack.set_device(0)
    gone = Client("/no/such/socket")
    with pytest.raises(ConnectionError) as caught:
        gone.open("w")
    assert "serve" in caught.value.remedy


def test_an_engine_without_a_device_is_told_to_set_one(socket):
    stack = Stack()
    with pytest.raises(service.WrongDevice, match="torch.npu.set_device") as caught:
        Client(socket).open("w")
    assert caught.value.code == "no-device"
    del stack


def test_importing_it_calls_no_driver(ascend_npu):
    """Nor does connecting, before memory is mapped."""
    ascend_npu.record()
    program = "import ascend_vmm.service, ascend_vmm.service.torch, ascend_vmm.service.vllm"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    program = "import ascend_vmm.service as s\ntry: s.Client('/no').wait('w')\nexcept s.Unreachable: pass"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert ascend_npu.commands() == []


def test_control_c_ends_a_wait(stack, socket):
    # Python leaves it alone where the process that started it ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    for wait in [
        lambda: Client(socket).open("w", "read", timeout=3600),
        lambda: Client(socket).wait("w", timeout=3600),
    ]:
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - begun < 60
    # Nothing of it is left: a writer does not wait.
    write(stack, socket).close()


def test_a_task_waits_without_blocking_the_others_and_may_be_cancelled(stack, socket):
    async def engine():
        client = Client(socket)
        waiting = asyncio.ensure_future(client.open_async("w", "read", timeout=3600))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        reader, newer = client.open_async("w", "read", timeout=60), client.wait_async("w", timeout=60)
        reader, newer = asyncio.ensure_future(reader), asyncio.ensure_future(newer)
        await asyncio.sleep(0.1)
        write(stack, socket).close()
        assert await newer == 1
        domain = await reader
        entry = domain.entries["embed"]
        domain.sleep()
        with client.open("w", "update", timeout=10) as writer:
            with pytest.raises(service.Timeout):
                await domain.wake_async(timeout=0.1)
            assert not domain.awake
            writer.commit()
        await domain.wake_async(timeout=10)
        assert stack.read(entry.address, entry.size) == DATA
        domain.close()

    asyncio.run(engine())


def test_a_changed_layout_is_not_mapped(stack, socket):
    domain = write(stack, socket)
    domain.sleep()
    with Client(socket).open("w", "update") as writer:
        writer.put("embed", len(DATA), b"another type")
        writer.commit()
    for _ in range(2):
        with pytest.raises(service.Stale, match="embed"):
            domain.wake(timeout=10)
        assert not domain.awake
    domain.close()


def test_a_child_of_fork_has_no_part_in_it(stack, socket):
    domain = write(stack, socket)
    child = os.fork()
    if child == 0:
        try:
            domain.sleep()
        except service.OtherProcess:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert stack.read(domain.entries["embed"].address, len(DATA)) == DATA
    domain.close()


def test_nobody_falls_asleep_without_the_keeper(stack, socket):
    domain = write(stack, socket)
    top = [sys.executable, "-m", "ascend_vmm", "service", "--socket", socket, "top", "--json"]
    import json

    status = json.loads(subprocess.run(top, check=True, stdout=subprocess.PIPE, timeout=100).stdout)
    os.kill(status["keeper"], signal.SIGKILL)
    with pytest.raises((service.NotDurable, service.Unreachable)):
        domain.sleep()
    entry = domain.entries["embed"]
    assert domain.awake and stack.read(entry.address, entry.size) == DATA
    domain.close()
