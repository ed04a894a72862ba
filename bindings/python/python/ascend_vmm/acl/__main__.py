"""`python -m ascend_vmm.acl` prints a directory in which `acl` is found: for PYTHONPATH."""

import pathlib

print(pathlib.Path(__file__).parent.parent / "_acl")
