"""What Python adds to the library's calls: `python -m ascend_vmm.emulate -- python bench.py`.

Rates are of copies of 64 MiB by Python's methods and, in turn with them, by the C library's function,
which makes the Rust call: the best of each, until more rounds make neither better. Instructions are
counted by single steps of a process of its own, after the call was made some times; a step over a
system call is one, so what the kernel does is not counted. `docs/bench.md` has the figures, of a
wheel that was built with `maturin build --release`. The exit status is 1 if a limit is missed, and
if single steps are not allowed here.
"""

import ctypes
import os
import platform
import re
import signal
import sys
import time

import ascend_vmm
from ascend_vmm import _ascend_vmm, acl
from ascend_vmm.acl.rt import free, malloc, memcpy  # noqa: F401, they are called by name below

MIB = 1 << 20

RATE = 0.9
"""The least part of the Rust call's rate."""
INSTRUCTIONS = 3000
"""The most of one call: 1 µs at 3 GHz and one instruction in a cycle."""


def best_of(*calls):
    """The shortest time of each call. They are made in turn, until forty rounds improve nothing."""
    best, quiet = [1e9] * len(calls), 0
    while quiet < 40:
        quiet += 1
        for which, call in enumerate(calls):
            begun = time.perf_counter()
            call()
            taken = time.perf_counter() - begun
            if taken < 0.95 * best[which]:
                quiet = 0
            best[which] = min(best[which], taken)
    return best


def rates():
    """Prints the rates; the methods that are too slow."""
    size = 64 * MIB
    session = ascend_vmm.Session.current()
    mapping = session.reserve(size).map(session.device(0).create(size))
    buffer = bytearray(size)
    memory, address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), mapping.address
    acl.init()
    acl.rt.set_device(0)
    pairs = {
        "write": (lambda: mapping.write(buffer), lambda: acl.rt.memcpy(address, size, memory, size, 1)),
        "read_into": (lambda: mapping.read_into(buffer), lambda: acl.rt.memcpy(memory, size, address, size, 2)),
    }
    missed = []
    print(f"\n{'64 MiB':12}{'Python GB/s':>14}{'Rust GB/s':>12}{'part':>8}")
    for name, calls in pairs.items():
        best = best_of(*calls)
        python, rust = (size / seconds / 1e9 for seconds in best)
        print(f"{name:12}{python:14.2f}{rust:12.2f}{python / rust:8.2f}")
        if python / rust < RATE:
            missed.append(f"{name}: {python / rust:.2f} of the Rust call's rate, at least {RATE}")
    mapping.memory.close()
    return missed


REPEATED = 10
"""How often each call is made between two stops."""

CALLS = [
    ("None", 0),
    ("mapping.size", 1),
    ("mapping.write(buffer)", 1),
    ("mapping.read_into(buffer)", 1),
    ("mapping.fill(0, 0, 4096)", 1),
    ("session.reserve(2 << 20).close()", 2),
    ("device.create(2 << 20).close()", 2),
    ("reservation.map(memory).close()", 2),
    ("pool.allocate(4096).close()", 2),
    ("memcpy(target, 4096, address, 4096, 1)", 1),
    ("free(malloc(4096, 0)[0])", 2),
    # Known to take more: two modules are asked for the name, and Python remembers no answer of a
    # module that has a function for names that it does not have.
    ("acl.rt.memcpy(target, 4096, address, 4096, 1)", None),
    # Known to take more: each wait begins a thread, so that Ctrl-C can end it.
    ("mapping.write_async(buffer).wait()", None),
]
"""What is counted, and how many calls it is; `buffer` has 4 KiB. The first is nothing, which is
subtracted from the others."""

TRACEME, PEEK_REGISTER, CONTINUE, STEP = 0, 3, 7, 9
PROGRAM_COUNTER = 16 * 8
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
stop_self = getattr(libc, "raise")


def traced():
    """Makes each call between two stops."""
    session = ascend_vmm.Session.current()
    device = session.device(0)
    mapping = session.reserve("2MiB").map(device.create("2MiB"))
    reservation, memory, pool = session.reserve("2MiB"), device.create("2MiB"), ascend_vmm.Pool(device)
    kept = pool.allocate(64)
    buffer = bytearray(4096)
    address, target = ctypes.addressof(ctypes.c_char.from_buffer(buffer)), mapping.address
    acl.init()
    acl.rt.set_device(0)
    for expression, _ in CALLS:
        scope = {**globals(), **locals()}
        exec("def calls():" + f"\n    {expression}" * REPEATED, scope)
        calls = scope["calls"]
        for _ in range(10):
            calls()
        stop_self(signal.SIGSTOP)
        calls()
        stop_self(signal.SIGSTOP)
    del kept
    os._exit(0)


def wait(pid):
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        sys.exit(f"the traced process ended: {status}")
    return os.WSTOPSIG(status)


def go_on_to_a_stop(pid):
    while True:
        libc.ptrace(CONTINUE, pid, None, None)
        if wait(pid) == signal.SIGSTOP:
            return


def own_code(pid):
    """The addresses of the compiled module's code."""
    with open(f"/proc/{pid}/maps") as maps:
        lines = [line for line in maps if _ascend_vmm.__file__ in line and " r-xp " in line]
    start, end = re.match(r"(\w+)-(\w+)", lines[0]).groups()
    return range(int(start, 16), int(end, 16))


def steps_to_a_stop(pid, own):
    """Instructions, and those of the compiled module."""
    steps, ours = 0, 0
    while True:
        libc.ptrace(STEP, pid, None, None)
        if wait(pid) == signal.SIGSTOP:
            return steps, ours
        steps += 1
        ours += libc.ptrace(PEEK_REGISTER, pid, PROGRAM_COUNTER, None) in own


def instructions():
    """Prints the counts; the calls that take too many."""
    if platform.machine() != "x86_64":
        print("instructions: not counted on this machine")
        return []
    pid = os.fork()
    if pid == 0:
        libc.ptrace(TRACEME, 0, None, None)
        traced()
    wait(pid)
    own = own_code(pid)
    nothing, missed = 0, []
    print(f"{'instructions':48}{'all':>8}{'compiled':>10}")
    for number, (name, calls) in enumerate(CALLS):
        if number > 0:
            go_on_to_a_stop(pid)
        steps, ours = steps_to_a_stop(pid, own)
        if name == "None":
            nothing = steps
            continue
        each, of_module = (steps - nothing) // REPEATED, ours // REPEATED
        print(f"{name:48}{each:8}{of_module:10}")
        if calls and each > calls * INSTRUCTIONS:
            missed.append(f"{name}: {each} instructions, at most {calls * INSTRUCTIONS}")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return missed


if __name__ == "__main__":
    # The process that is counted comes first: a child of fork has no session of its parent's.
    problems = instructions() + rates()
    for problem in problems:
        print(f"missed: {problem}")
    sys.exit(bool(problems))
