"""`python -m ascend_vmm probe|selftest|…`: the commands of the project's tool."""

import sys

from ._ascend_vmm import tool


def main(arguments):
    """Runs a command line of the tool and returns its exit status."""
    return tool([sys.executable, "-m", "ascend_vmm"], arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
