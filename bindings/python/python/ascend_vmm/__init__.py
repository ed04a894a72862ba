"""Memory of Huawei Ascend NPUs, by the kernel driver's own ioctls.

A `Session` is this process's one connection to the memory driver. Through it a `Device` is set up,
`PhysicalMemory` is created on it, addresses are reserved as a `Reservation`, and a `Mapping` puts
the memory there; then it can be copied to and from, seen by the CPU, and shared with other
processes.

>>> with Session() as session:
...     memory = session.device(0).create("64MiB")   # HBM, without an address
...     reservation = session.reserve("1GiB")        # addresses, without memory
...     mapping = reservation.map(memory)
...     mapping.write(b"hello, NPU")
...     mapping.read(10)
b'hello, NPU'

Everything is a context manager. Closing an object closes what was made from it; objects that are
dropped are released in the order that the driver wants. Sizes are ints or texts such as "64MiB".
Errors say what was tried, what the kernel answered, what that means and what to do: `Error`.

Without an NPU, `python -m ascend_vmm.emulate -- python program.py` runs a program on an emulated
driver, and the pytest fixture `ascend_npu` gives one to a test.
"""

from ._ascend_vmm import (
    Block,
    Device,
    Export,
    Host,
    HostView,
    Mapping,
    PendingCopy,
    PhysicalMemory,
    Pool,
    Reservation,
    Session,
    Ticket,
    __version__,
    check_interpreter,
    devices,
    probe,
    read_batch,
    receive,
    send,
    write_batch,
)
from ._discovery import (
    Capabilities,
    Finding,
    Hbm,
    MemoryInfo,
    Npu,
    PoolStatistics,
    SessionStatistics,
    SuperPod,
    Survey,
)
from ._errors import (
    Closed,
    DeviceProcessDied,
    DeviceProcessFailed,
    Error,
    ExchangeFailed,
    FileFailed,
    InUse,
    Invalid,
    NoDevices,
    OpenFailed,
    OtherProcess,
    OutOfMemory,
    Refused,
    SessionOpen,
    SessionTaken,
    TicketError,
    UnknownGeneration,
    VendorCode,
)

check_interpreter()
del check_interpreter

__all__ = [
    "Block",
    "Capabilities",
    "Closed",
    "Device",
    "DeviceProcessDied",
    "DeviceProcessFailed",
    "Error",
    "ExchangeFailed",
    "Export",
    "FileFailed",
    "Finding",
    "Hbm",
    "Host",
    "HostView",
    "InUse",
    "Invalid",
    "Mapping",
    "MemoryInfo",
    "NoDevices",
    "Npu",
    "OpenFailed",
    "OtherProcess",
    "OutOfMemory",
    "PendingCopy",
    "PhysicalMemory",
    "Pool",
    "PoolStatistics",
    "Refused",
    "Reservation",
    "Session",
    "SessionOpen",
    "SessionStatistics",
    "SessionTaken",
    "SuperPod",
    "Survey",
    "Ticket",
    "TicketError",
    "UnknownGeneration",
    "VendorCode",
    "__version__",
    "devices",
    "probe",
    "read_batch",
    "receive",
    "send",
    "write_batch",
]
