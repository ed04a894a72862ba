"""A program for seeded schedules: processes of multiprocessing share memory of an NPU.

With ASCEND_SCENARIO=disturbed an error of the driver, or the end of another process, ends it early;
wrong bytes never do.
"""

import multiprocessing
import os
import sys
import threading

import ascend_vmm

SIZE = 4096


def reader(connection, number):
    with ascend_vmm.Session() as session:
        with session.device(0).import_memory(connection.recv()) as memory:
            mapping = session.reserve(memory.size).map(memory)
            check(mapping.read(SIZE), 7)
            mapping.write(bytes([number]) * SIZE, offset=SIZE * number)
            connection.send(number)
            mapping.close()


def check(found, byte):
    if found != bytes([byte]) * SIZE:
        print(f"broken promise: {found[:8]!r} in place of {byte}", file=sys.stderr)
        os.kill(ROOT, 6)


def main(context):
    with ascend_vmm.Session() as session:
        memory = session.device(0).create("2MiB")
        mapping = session.reserve("2MiB").map(memory)
        mapping.write(bytes([7]) * SIZE)
        ends = [context.Pipe() for _ in range(2)]
        children = [
            context.Process(target=reader, args=(theirs, number)) for number, (_, theirs) in enumerate(ends, 1)
        ]
        for child, (_, theirs) in zip(children, ends):
            child.start()
            theirs.close()
        # Another thread copies meanwhile.
        copies = threading.Thread(target=lambda: [check(mapping.read(SIZE), 7) for _ in range(3)])
        copies.start()
        for child, (ours, _) in zip(children, ends):
            ours.send(memory.share(child))
        for number, (ours, _) in enumerate(ends, 1):
            assert ours.recv() == number
            check(mapping.read(SIZE, offset=SIZE * number), number)
        copies.join()
        for child in children:
            child.join()
            assert child.exitcode == 0, child.exitcode


ROOT = os.getpid()

if __name__ == "__main__":
    try:
        main(multiprocessing.get_context("fork"))
    except (ascend_vmm.Error, EOFError, OSError, AssertionError) as error:
        if os.environ.get("ASCEND_SCENARIO") != "disturbed":
            raise
        print(f"gave up: {error}", file=sys.stderr)
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
