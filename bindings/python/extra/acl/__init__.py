"""The module `acl` of ascend-vmm: see `ascend_vmm.acl`."""

import ascend_vmm.acl

ascend_vmm.acl.install()
