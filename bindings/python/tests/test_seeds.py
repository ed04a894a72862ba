"""Python's multiprocessing under seeded schedules of the emulated driver."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("scenario_multiprocessing.py"))


@pytest.mark.parametrize("events, seeds", [("stop,signal,late", 4), ("kill", 2), ("fault,memory", 2), ("reset", 1)])
def test_processes_of_multiprocessing_share_memory(events, seeds):
    random = time.time_ns() % 1_000_000_000
    disturbed = {"ASCEND_SCENARIO": "1" if events.startswith("stop") else "disturbed"}
    for some in [f"0..{seeds}", f"{random}..{random + 1}"]:
        command = [sys.executable, "-m", "ascend_vmm.emulate", "--seeds", some, "--events", events]
        command += ["--", sys.executable, PROGRAM]
        environment = {**os.environ, **disturbed}
        result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert result.returncode == 0, result.stdout
        print(some, result.stdout)
