"""`python -m ascend_vmm probe|selftest|…`: the commands of the project's tool."""

import signal
import sys

from ._ascend_vmm import tool


def main(arguments):
    """Runs a command line of the tool and returns its exit status."""
    return tool([sys.executable, "-m", "ascend_vmm"], arguments)


def run(arguments):
    """Runs a command line of the tool and ends this process with its status."""
    # No Python runs meanwhile that could raise KeyboardInterrupt: Ctrl-C ends the tool, or the
    # program that it runs, as it ends other programs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(arguments))


if __name__ == "__main__":
    run(sys.argv[1:])
