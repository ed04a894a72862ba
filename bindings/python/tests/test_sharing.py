"""Sharing with other processes: tickets, sockets, multiprocessing, numpy on both sides."""

import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time

import ascend_vmm
import pytest
from conftest import GIB, MIB

pytestmark = pytest.mark.ascend_npu(generation="all")


def mapped(session, memory):
    return session.reserve(memory.size).map(memory)


def test_a_ticket_can_be_written_down_pickled_and_compared(session):
    memory = session.device(1).create("2MiB")
    ticket = memory.export().ticket()
    for copy in [pickle.loads(pickle.dumps(ticket)), ascend_vmm.Ticket(str(ticket)), ascend_vmm.Ticket(bytes(ticket))]:
        assert copy == ticket and hash(copy) == hash(ticket)
    assert ticket.size == 2 * MIB and ticket.device == 1 and ticket.memory_kind == "HBM"
    assert ticket.generation == session.generation and ticket.exporter == session.bare_tgid
    assert ticket.handle == memory.export().handle and len(memory.export().fabric_handle()) == 128
    assert ticket != session.device(0).create("2MiB").export().ticket()


def test_trust_is_given_to_processes_that_have_started(session):
    export = session.device(0).create("2MiB").export()
    assert not export.trusts_anyone
    export.trust(os.getpid(), multiprocessing.current_process())
    export.trust_tgid(session.bare_tgid)
    with pytest.raises(ValueError, match="has not started"):
        export.trust(multiprocessing.Process())
    for process in [0, (1 << 22) + 7]:
        with pytest.raises(ascend_vmm.Invalid):
            export.trust(process)
    open_to_all = session.device(0).create("2MiB").export()
    open_to_all.trust_anyone()
    assert open_to_all.trusts_anyone


def import_and_change(connection):
    """In another process: import what the ticket names, read it, change it."""
    with ascend_vmm.Session() as session:
        connection.send(os.getpid())
        ticket = connection.recv()
        memory = session.device(0).import_memory(ticket)
        assert memory.is_imported
        mapping = mapped(session, memory)
        connection.send(mapping.read(6))
        mapping.write(b"change")
    connection.send("closed")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_ticket_goes_through_multiprocessing(session, method):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=import_and_change, args=(theirs,))
    child.start()
    theirs.close()
    memory = session.device(0).create("2MiB")
    mapping = mapped(session, memory)
    mapping.write(b"shared")
    assert ours.recv() == child.pid
    ours.send(memory.share(child))
    assert ours.recv() == b"shared"
    assert ours.recv() == "closed"
    child.join()
    assert child.exitcode == 0 and mapping.read(6) == b"change"


def test_an_untrusted_process_cannot_import(session):
    memory = session.device(0).create("2MiB")
    ticket = memory.export().ticket()
    program = """if True:
        import ascend_vmm, sys
        with ascend_vmm.Session() as session:
            try:
                session.device(0).import_memory(sys.argv[1])
            except ascend_vmm.Refused as error:
                print(error.errno_name)
    """
    result = subprocess.run([sys.executable, "-c", program, str(ticket)], stdout=subprocess.PIPE, check=True)
    assert result.stdout.strip() == b"EACCES"


def receive_and_change(path):
    with ascend_vmm.Session() as session, socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        memory = ascend_vmm.receive(peer, session.device(0), timeout=60)
        mapping = mapped(session, memory)
        assert mapping.read(4) == b"over"
        mapping.write(b"back")
        peer.sendall(b"done")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_memory_goes_over_a_socket(session, tmp_path, method):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        child = multiprocessing.get_context(method).Process(target=receive_and_change, args=(path,))
        child.start()
        peer, _ = listener.accept()
    with peer:
        memory = session.device(0).create("2MiB")
        mapping = mapped(session, memory)
        mapping.write(b"over")
        ascend_vmm.send(peer, memory, timeout=60)
        assert peer.recv(4) == b"done"
    child.join()
    assert child.exitcode == 0 and mapping.read(4) == b"back"


def test_a_multiprocessing_connection_is_a_socket(session):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child():
        with ascend_vmm.Session() as session:
            mapping = mapped(session, ascend_vmm.receive(theirs, session.device(0)))
            theirs.send(mapping.read(4))

    process = context.Process(target=child)
    process.start()
    memory = session.device(0).create("2MiB")
    mapped(session, memory).write(b"pipe")
    ascend_vmm.send(ours, memory)
    assert ours.recv() == b"pipe"
    process.join()
    assert process.exitcode == 0


@pytest.mark.ascend_npu(generation="26.1")
def test_sockets_that_do_not_block_are_waited_for_too(session):
    """Those of asyncio, and those with a time limit of their own."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(0.001)

    def child():
        with ascend_vmm.Session() as session:
            time.sleep(0.2)
            mapping = mapped(session, ascend_vmm.receive(theirs, session.device(0)))
            assert mapping.read(5) == b"async"

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    memory = session.device(0).create("2MiB")
    mapped(session, memory).write(b"async")
    ascend_vmm.send(ours, memory)
    process.join()
    assert process.exitcode == 0 and not ours.getblocking()


def test_only_unix_sockets_are_accepted(session):
    memory = session.device(0).create("2MiB")
    with socket.socket(socket.AF_INET) as internet, pytest.raises(ascend_vmm.Invalid, match="not a Unix socket"):
        ascend_vmm.send(internet, memory)
    with open(os.devnull) as file, pytest.raises(ascend_vmm.Invalid, match="not a Unix socket"):
        ascend_vmm.send(file, memory)
    one, other = socket.socketpair()
    one.close()
    for wrong in [one, -1]:
        with pytest.raises(ValueError):
            ascend_vmm.send(wrong, memory)
    for wrong in [object(), None]:
        with pytest.raises((TypeError, AttributeError)):
            ascend_vmm.send(wrong, memory)
    with pytest.raises(TypeError):
        ascend_vmm.receive(other, session)
    for limit in [-1, float("nan")]:
        with pytest.raises(ValueError):
            ascend_vmm.send(other, memory, timeout=limit)
    other.close()


def test_a_peer_that_says_nothing_ends_with_the_time_limit(session):
    one, other = socket.socketpair()
    with one, other, pytest.raises(ascend_vmm.ExchangeFailed):
        ascend_vmm.send(one, session.device(0).create("2MiB"), timeout=0.1)


def test_control_c_ends_a_long_wait(session):
    one, other = socket.socketpair()
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    with one, other, pytest.raises(KeyboardInterrupt):
        ascend_vmm.receive(one, session.device(0), timeout=float("inf"))
    timer.join()


def test_a_handler_that_does_not_raise_does_not_end_a_wait(session):
    one, other = socket.socketpair()
    calls = []
    signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    with one, other, pytest.raises(ascend_vmm.ExchangeFailed):
        ascend_vmm.receive(one, session.device(0), timeout=0.5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert calls


def test_memory_outlives_its_exporter(session, ascend_npu):
    """The exporter is killed; the importer keeps the memory, and the driver nothing of the dead."""
    numpy = pytest.importorskip("numpy")
    program = """if True:
        import ascend_vmm, sys, time
        session = ascend_vmm.Session()
        memory = session.device(0).create("2MiB")
        session.reserve("2MiB").map(memory).write(b"legacy")
        export = memory.export()
        export.trust(int(sys.argv[1]))
        print(export.ticket(), flush=True)
        time.sleep(600)
    """
    exporter = subprocess.Popen([sys.executable, "-c", program, str(os.getpid())], stdout=subprocess.PIPE, text=True)
    memory = session.device(0).import_memory(exporter.stdout.readline().strip())
    exporter.kill()
    exporter.wait()
    exporter.stdout.close()
    mapping = mapped(session, memory)
    assert numpy.frombuffer(mapping.read(6), "u1").tobytes() == b"legacy"


def numpy_worker(ticket, connection):
    import numpy

    with ascend_vmm.Session() as session:
        connection.send(os.getpid())
        mapping = mapped(session, session.device(0).import_memory(connection.recv()))
        step, numbers = 64 * MIB, numpy.empty(64 * MIB // 8, "u8")
        for offset in range(0, mapping.size, step):
            mapping.read_into(numbers, offset=offset)
            first = offset // 8
            assert numbers[0] == first and numbers[-1] == first + len(numbers) - 1
            numbers += 1
            mapping.write(numbers, offset=offset)
    connection.send("done")


@pytest.mark.ascend_npu(generation="26.1")
def test_a_gibibyte_is_shared_with_numpy_on_both_sides(session):
    numpy = pytest.importorskip("numpy")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=numpy_worker, args=(None, theirs))
    child.start()
    memory = session.device(0).create("1GiB")
    mapping = mapped(session, memory)
    step = 64 * MIB
    for offset in range(0, GIB, step):
        mapping.write(numpy.arange(offset // 8, (offset + step) // 8, dtype="u8"), offset=offset)
    assert ours.recv() == child.pid
    ours.send(memory.share(child))
    assert ours.recv() == "done"
    child.join()
    numbers = numpy.empty(step // 8, "u8")
    for offset in range(0, GIB, step):
        mapping.read_into(numbers, offset=offset)
        first = offset // 8 + 1
        assert (numbers == numpy.arange(first, first + len(numbers), dtype="u8")).all()


def test_a_killed_process_leaves_nothing(ascend_npu):
    program = """if True:
        import ascend_vmm, time
        session = ascend_vmm.Session()
        # Open before it is killed: the driver keeps a session of the daemon that has no owner yet.
        other = session.device(1)
        held = [session.reserve("2MiB").map(session.device(0).create("2MiB")) for _ in range(20)]
        exports = [mapping.memory.export() for mapping in held]
        print("ready", flush=True)
        while True:
            with session.reserve("2MiB") as reservation, other.create("2MiB") as memory:
                reservation.map(memory).fill(1)
    """
    victim = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert victim.stdout.readline() == b"ready\n"
    time.sleep(0.05)
    assert ascend_npu.memory_in_use() >= 40 * MIB
    victim.kill()
    victim.wait()
    victim.stdout.close()
    assert ascend_npu.held() == ""
