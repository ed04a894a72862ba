"""`python -m ascend_vmm.emulate -- python program.py`: runs a program on an emulated driver.

The program, in any language, and the processes that it starts see NPUs. `--help` lists the options:
number of devices, driver generation, faults. `Emulator` is the same for tests that start their own
processes.
"""

import sys

from .__main__ import run
from ._ascend_vmm import Emulator

__all__ = ["Emulator"]

if __name__ == "__main__":
    run(["emulate", *sys.argv[1:]])
