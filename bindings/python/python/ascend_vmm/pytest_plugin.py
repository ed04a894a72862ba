"""A pytest plugin: emulated NPUs for tests.

A test that takes the fixture `ascend_npu` runs in a process of its own, on an emulated host with
NPUs, and fails if it leaves something behind in the driver:

    def test_my_cache(ascend_npu):
        with ascend_vmm.Session() as session:
            ...

The mark says what host it is; `generation="all"` runs the test once for each driver generation:

    @pytest.mark.ascend_npu(devices=4, generation="9.0.0", faults=["MEM_MAP#3=ENOMEM"])
    def test_my_cache(ascend_npu):
        ascend_npu.inject("device1=dead")

Parameters of the fixture are options too, and come on top of the mark's:

    @pytest.mark.parametrize("ascend_npu", [{"devices": 1}, {"devices": 8}], indirect=True)
    def test_my_cache(ascend_npu):
        ...

The fixture is an `ascend_vmm.emulate.Emulator`. Options of the mark are those of its constructor,
and `leaky=True` for a test that may leave something behind.

The driver gives a process one session at fixed addresses, and an emulated driver cannot be taken
away from a process again: hence a process for each test, made by fork. A fixture of a wider scope
that no test before it has used is set up in the test's process, and torn down there.
"""

import os
import pickle
import signal
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .emulate import Emulator

GENERATIONS = ("8.5.0", "9.0.0", "26.1")
"""The driver generations that can be emulated."""

_FIXTURE = "ascend_npu"
_emulator: "pytest.StashKey[Emulator]" = pytest.StashKey()


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "ascend_npu(devices=2, generation='26.1', hbm='64GiB', faults=[], …, leaky=False): "
        "the emulated host of a test that takes the fixture ascend_npu",
    )


def _options(item):
    """The options of all marks of a test; the nearest decides."""
    options = {}
    for mark in reversed(list(item.iter_markers(_FIXTURE))):
        if mark.args:
            raise pytest.UsageError("the mark ascend_npu takes options by their names")
        options.update(mark.kwargs)
    return options


def pytest_generate_tests(metafunc):
    if _FIXTURE in metafunc.fixturenames:
        generation = _options(metafunc.definition).get("generation")
        if generation == "all":
            generation = GENERATIONS
        if isinstance(generation, (list, tuple)):
            metafunc.parametrize(_FIXTURE, generation, indirect=True)


@pytest.fixture
def ascend_npu(request):
    """An emulated host with NPUs, in a process of the test's own."""
    return request.node.stash[_emulator]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if _FIXTURE not in getattr(item, "fixturenames", ()):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _in_a_process(item):
        item.ihook.pytest_runtest_logreport(report=report)
    # Modules and fixtures that earlier tests left for later ones in this process.
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class _AsBefore:
    """In place of the next test: what was set up before this process began stays, because it is
    the parent's to tear down."""

    def __init__(self, item):
        self._nodes = list(item.session._setupstate.stack)

    def listchain(self):
        return self._nodes


def _in_a_process(item):
    """The reports of a test that runs in a child."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        child = _fork()
        if child == 0:
            _run(item, file)
        try:
            _, status = os.waitpid(child, 0)
        except BaseException as error:
            # Ctrl-C, or a time limit: the test does not go on without this process.
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if isinstance(error, pytest.fail.Exception):
                return [_failed(item, "call", str(error))]
            raise
        file.seek(0)
        text = file.read()
    try:
        reports = pickle.loads(text)
    except (EOFError, pickle.UnpicklingError):
        return [_crashed(item, status)]
    hook = item.config.hook
    return [hook.pytest_report_from_serializable(config=item.config, data=report) for report in reports]


def _fork():
    with warnings.catch_warnings():
        # Of other threads, such as pytest-xdist's: the child uses nothing that they may have locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run(item, file):
    """Runs the test, writes its reports to a file and ends the process."""
    status = 1
    try:
        reports = _reports(item)
        hook = item.config.hook
        data = [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
        file.write(pickle.dumps(data))
        file.flush()
        status = 0
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        # Not sys.exit: what runs at an interpreter's exit is the parent's.
        os._exit(status)


def _reports(item):
    from _pytest.runner import runtestprotocol

    # Not before: most test runs need no NPU.
    from .emulate import Emulator

    options = _options(item)
    leaky = options.pop("leaky", False)
    callspec = getattr(item, "callspec", None)
    if callspec is not None and _FIXTURE in callspec.params:
        parameter = callspec.params[_FIXTURE]
        options.update(parameter if isinstance(parameter, dict) else {"generation": parameter})
    try:
        emulator = Emulator(**options)
        emulator.attach()
    except Exception as error:  # noqa: BLE001, the test's report has to say it, whatever it is
        return [_failed(item, "setup", f"no emulated NPU for this test: {error}")]
    item.stash[_emulator] = emulator
    reports = runtestprotocol(item, log=False, nextitem=_AsBefore(item))
    if all(report.passed for report in reports):
        problem = "\n".join(emulator.traps())
        held = "" if leaky else emulator.held()
        if held:
            problem += f"the test left this behind in the driver: {held}"
        if problem:
            reports.append(_failed(item, "teardown", problem))
    return reports


def _failed(item, when, text):
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=text,
        when=when,
    )


def _crashed(item, status):
    if os.WIFSIGNALED(status):
        end = f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        end = f"ended with status {os.WEXITSTATUS(status)}, and no report"
    return _failed(item, "call", f"the process of the test {end}")
