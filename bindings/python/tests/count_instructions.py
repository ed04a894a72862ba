"""Counts the instructions of calls, each in this process, by single steps.

    python -m ascend_vmm.emulate -- python tests/count_instructions.py

Not a test: figures are of a wheel that was built with `maturin build --release`. A step over a
system call is one instruction, so what the kernel does is not counted.
"""

import ctypes
import os
import signal
import sys

import ascend_vmm
from ascend_vmm import acl

TRACEME, CONTINUE, STEP = 0, 7, 9
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
raise_signal = libc.raise_ if hasattr(libc, "raise_") else getattr(libc, "raise")


def calls():
    """Names and functions without arguments."""
    session = ascend_vmm.Session.current()
    device = session.device(0)
    mapping = session.reserve("2MiB").map(device.create("2MiB"))
    buffer = bytearray(4096)
    address = ctypes.addressof((ctypes.c_char * 4096).from_buffer(buffer))
    acl.init()
    acl.rt.set_device(0)
    yield "nothing", lambda: None
    yield "mapping.size", lambda: mapping.size
    yield "mapping.write(4 KiB)", lambda: mapping.write(buffer)
    yield "mapping.read_into(4 KiB)", lambda: mapping.read_into(buffer)
    yield "mapping.fill(0, 0, 4096)", lambda: mapping.fill(0, 0, 4096)
    yield "session.reserve, close", lambda: session.reserve(2 << 20).close()
    yield "device.create, close", lambda: device.create(2 << 20).close()
    yield "acl.rt.memcpy(4 KiB)", lambda: acl.rt.memcpy(mapping.address, 4096, address, 4096, 1)


def traced():
    for _, call in calls():
        for _ in range(20):
            call()
        raise_signal(signal.SIGSTOP)
        call()
        raise_signal(signal.SIGSTOP)
    os._exit(0)


def wait(pid):
    while True:
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            sys.exit(f"the traced process ended: {status}")
        return os.WSTOPSIG(status)


def run_to_mark(pid):
    while True:
        libc.ptrace(CONTINUE, pid, None, None)
        if wait(pid) == signal.SIGSTOP:
            return


def count(pid):
    steps = 0
    while True:
        libc.ptrace(STEP, pid, None, None)
        if wait(pid) == signal.SIGSTOP:
            return steps
        steps += 1


def main():
    names = ["nothing", "mapping.size", "mapping.write(4 KiB)", "mapping.read_into(4 KiB)", "mapping.fill(0, 0, 4096)"]
    names += ["session.reserve, close", "device.create, close", "acl.rt.memcpy(4 KiB)"]
    pid = os.fork()
    if pid == 0:
        libc.ptrace(TRACEME, 0, None, None)
        traced()
    wait(pid)
    nothing = 0
    for name in names:
        steps = count(pid)
        nothing = nothing or steps
        print(f"{name:28}{steps - (0 if name == 'nothing' else nothing):8}")
        if name != names[-1]:
            run_to_mark(pid)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
