"""The emulated driver for other programs: the module, the class and the pytest plugin."""

import subprocess
import sys

import ascend_vmm
import pytest
from ascend_vmm.emulate import Emulator


def emulate(*arguments):
    command = [sys.executable, "-m", "ascend_vmm.emulate", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)


def tool(*arguments):
    command = [sys.executable, "-m", "ascend_vmm", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100)


def test_a_program_runs_on_an_emulated_driver_and_its_status_arrives():
    program = "import ascend_vmm, sys; sys.exit(len(ascend_vmm.devices()))"
    result = emulate("--devices", "5", "--", sys.executable, "-c", program)
    assert result.returncode == 5, result.stdout


def test_wrong_arguments_end_with_a_sentence():
    result = emulate("--driver", "1.0", "--", "true")
    assert result.returncode == 2 and "1.0" in result.stdout
    result = emulate("--help")
    assert result.returncode == 0 and "python -m ascend_vmm emulate" in result.stdout
    assert "xtask" not in result.stdout


def test_the_tools_commands_run_from_python():
    result = emulate("--devices", "3", "--", sys.executable, "-m", "ascend_vmm", "probe", "--json")
    assert result.returncode == 0 and '"logical"' in result.stdout, result.stdout


def test_the_tool_offers_what_works_from_python_and_nothing_else():
    listed = tool("--help").stdout.split("Commands:\n")[1].split("\n\n")[0]
    names = [line.split()[0] for line in listed.splitlines()]
    # `completions` and `man` are about an installed `ascend-vmm`, which this is not.
    assert names == ["probe", "demo", "selftest", "emulate", "trace", "serve", "service", "help"]
    itself = [sys.executable, "-m", "ascend_vmm"]
    # Each of these starts a second process of the tool.
    for arguments in [["demo", "--size", "2MiB"], ["selftest"], ["trace", "--", *itself, "probe"]]:
        result = emulate("--", *itself, *arguments)
        assert result.returncode == 0, result.stdout


def test_invalid_options_are_refused():
    for options in [
        {"devices": 65},
        {"generation": "7.0"},
        {"attach": "usb"},
        {"device_process": "no"},
        {"faults": ["nonsense"]},
        {"faults": ["device7=dead"]},
    ]:
        with pytest.raises(ascend_vmm.Invalid):
            Emulator(**options)


@pytest.mark.ascend_npu(devices=4, generation="9.0.0", hbm="8GiB", faults=["MEM_CREATE#1=ENOMEM"])
def test_the_mark_says_what_host_it_is(ascend_npu):
    assert (ascend_npu.devices, ascend_npu.generation) == (4, "9.0.0")
    assert len(ascend_vmm.devices()) == 4
    with ascend_vmm.Session() as session:
        assert session.device(3).memory_info().huge_total == 8 << 30
        with pytest.raises(ascend_vmm.OutOfMemory):
            session.device(0).create("2MiB")
        ascend_npu.inject("MEM_MAP#1=EBUSY")
        with pytest.raises(ascend_vmm.Refused):
            session.reserve("2MiB").map(session.device(0).create("2MiB"))


def test_without_a_mark_there_are_two_devices(ascend_npu):
    assert len(ascend_vmm.devices()) == 2


PLUGIN = """
import ascend_vmm, os, pytest, signal

@pytest.fixture(scope="module")
def wide():
    print("wide is set up")
    yield os.getpid()
    print("wide is torn down")

def test_one(ascend_npu, wide):
    ascend_vmm.Session().close()

def test_no_npu(wide):
    assert wide == os.getpid()

def test_same_process_again(wide):
    assert wide == os.getpid()

@pytest.mark.ascend_npu(generation="all", devices=1)
def test_each(ascend_npu, wide):
    assert len(ascend_vmm.devices()) == 1

@pytest.mark.parametrize("ascend_npu", [{"devices": 3}, {"generation": "8.5.0"}], indirect=True)
def test_parameters(ascend_npu):
    assert (len(ascend_vmm.devices()), ascend_vmm.probe().generation) in [(3, "26.1"), (2, "8.5.0")]

@pytest.mark.parametrize("ascend_npu", [{"faults": ["MEM_CREATE#1=ENOMEM"], "devices": 1}], indirect=True)
def test_faults(ascend_npu):
    with ascend_vmm.Session() as session, session.device(0) as device:
        with pytest.raises(MemoryError):
            device.create("2MiB")
        device.create("2MiB")
        ascend_npu.inject("device0=dead")
        with pytest.raises(ascend_vmm.Error) as raised:
            device.create("2MiB")
        assert raised.value.is_device_lost

def test_fails(ascend_npu):
    assert ascend_npu.devices == 77

kept = []

def test_leaks(ascend_npu):
    kept.append(ascend_vmm.Session())

@pytest.mark.ascend_npu(leaky=True)
def test_leaks_allowed(ascend_npu):
    kept.append(ascend_vmm.Session())

def test_dies(ascend_npu):
    os.kill(os.getpid(), signal.SIGSEGV)

def test_exits(ascend_npu):
    os._exit(3)

@pytest.mark.ascend_npu(devices=99)
def test_impossible(ascend_npu):
    pass

def test_skips(ascend_npu):
    pytest.skip("not today")

@pytest.mark.xfail(strict=True)
def test_expected(ascend_npu):
    assert 0
"""


def test_the_plugin_reports_every_end_of_a_test(pytester):
    pytester.makepyfile(PLUGIN)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rA")
    result.assert_outcomes(passed=11, failed=3, errors=2, skipped=1, xfailed=1)
    text = result.stdout.str()
    assert "the test left this behind in the driver" in text
    assert "the process of the test was ended by SIGSEGV" in text
    assert "the process of the test ended with status 3" in text
    assert "no emulated NPU for this test" in text and "99 devices are too many" in text
    assert "where 2 = " in text


def test_the_plugin_works_with_one_test_selected(pytester):
    pytester.makepyfile(PLUGIN)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "each and 9.0.0")
    result.assert_outcomes(passed=1, deselected=16)


def test_the_time_limit_of_another_plugin_fails_one_test(pytester):
    pytester.makeconftest("""
        import pytest, signal, threading

        threading.Thread(target=threading.Event().wait, daemon=True).start()

        def late(*_):
            pytest.fail("it takes too long")

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(item, nextitem):
            signal.signal(signal.SIGALRM, late)
            signal.setitimer(signal.ITIMER_REAL, 1 if "slow" in item.name else 0)
            return (yield)
    """)
    pytester.makepyfile("""
        import time

        def test_slow(ascend_npu):
            time.sleep(600)

        def test_beside_a_thread(ascend_npu):
            assert ascend_npu.devices == 2
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error:This process:DeprecationWarning")
    result.assert_outcomes(passed=1, failed=1)
    assert "it takes too long" in result.stdout.str()


def test_trace_shows_the_commands_of_a_python_program():
    program = "import ascend_vmm; ascend_vmm.Session().reserve('2MiB')"
    result = emulate("--", sys.executable, "-m", "ascend_vmm", "trace", "--", sys.executable, "-c", program)
    assert result.returncode == 0 and "INIT_PROCESS" in result.stdout, result.stdout


FORKED_READER = """
import multiprocessing
import ascend_vmm

def reader(connection):
    with ascend_vmm.Session() as session:
        memory = session.device(0).import_memory(connection.recv())
        connection.send(session.reserve(memory.size).map(memory).read(6))

multiprocessing.set_start_method("fork")
ours, theirs = multiprocessing.Pipe()
with ascend_vmm.Session() as session:
    memory = session.device(0).create("2MiB")
    session.reserve("2MiB").map(memory).write(b"shared")
    child = multiprocessing.Process(target=reader, args=(theirs,))
    child.start()
    theirs.close()
    ours.send(memory.share(child))
    print(ours.recv())
child.join()
print(child.exitcode)
"""


def test_a_process_that_multiprocessing_forks_has_a_session_of_its_own():
    result = emulate("--", sys.executable, "-c", FORKED_READER)
    assert (result.stdout, result.returncode) == ("b'shared'\n0\n", 0)
