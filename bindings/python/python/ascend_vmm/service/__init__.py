"""The memory service for engines: processes that run the vendor's stack.

The service (`python -m ascend_vmm serve`) owns memory of NPUs for processes that come and go. An
engine writes its weights once and commits them; when it is restarted, or a second one starts, they
are still there, behind an address after a few calls.

    from ascend_vmm.service import Client

    client = Client("/run/ascend-vmm.sock")
    with client.open("llama-70b/tp0/weights", timeout=60) as domain:
        if domain.writes:
            address = domain.put("embed", size, b"bf16 128256 8192")
            ...                                  # write there
            domain.commit()
        domain.entries["embed"].address          # mapped on this thread's device

Nothing here opens the driver, and importing it touches none: memory is imported and mapped by the
functions of the libascendcl.so that the process has loaded, or that the loader finds. Set a device
first. `ascend_vmm.service.torch` puts the parameters of modules there, `ascend_vmm.service.vllm` is
the load format `ascend-vmm` of vLLM.

A call that waits ends with its timeout, with Ctrl-C, or, if it is awaited, when its task is
cancelled. Errors have the service's sentence: what is wrong, and what to do. What is waited for is
in the log `ascend_vmm.service`.

There is no read-only mapping on this driver: whoever maps served memory can write to it. *Reader* is
a promise of the program, not a protection.
"""

import asyncio
import logging
import os
import time
from typing import Dict, NamedTuple, Optional, Union

from .._ascend_vmm import ServedDomain, ServiceOpening, service_wait
from ._errors import (
    Asleep,
    CallFailed,
    Dirty,
    Forbidden,
    InvalidCall,
    Mismatch,
    NoLibrary,
    NoMemory,
    NotDurable,
    OtherProcess,
    RoleLost,
    ServiceError,
    Stale,
    Timeout,
    Unreachable,
    WrongDevice,
)

__all__ = [
    "Asleep",
    "CallFailed",
    "Client",
    "Dirty",
    "Domain",
    "Entry",
    "Forbidden",
    "InvalidCall",
    "Mismatch",
    "NoLibrary",
    "NoMemory",
    "NotDurable",
    "OtherProcess",
    "RoleLost",
    "ServiceError",
    "Stale",
    "Timeout",
    "Unreachable",
    "WrongDevice",
]

_logger = logging.getLogger("ascend_vmm.service")

SOCKET = "ASCEND_VMM_SERVICE"
"""The environment variable with the service's socket."""

_POLL = 0.05


class Entry(NamedTuple):
    """Where the bytes of a key are mapped, and what its writer said about them."""

    address: int
    size: int
    value: bytes


class Domain:
    """A domain that is open, from `Client.open`. Closing it ends its role and unmaps its memory.

    A domain that is dropped without `close` does the same when it is collected; its addresses are
    then invalid for whoever still has them.
    """

    def __init__(self, name: str, served: ServedDomain):
        self._name = name
        self._served = served

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def writes(self) -> bool:
        """True for a writer that has not committed."""
        return self._served.facts()["writes"]

    @property
    def version(self) -> int:
        """The version that is read, or changed in place; 0 for a writer of new memory."""
        return self._served.facts()["version"]

    @property
    def device(self) -> int:
        """The device, as this program numbers it."""
        return self._served.facts()["device"]

    @property
    def address(self) -> int:
        """The first address, which stays the same while it sleeps."""
        return self._served.facts()["address"]

    @property
    def nbytes(self) -> int:
        """Bytes of all its memory."""
        return self._served.facts()["bytes"]

    @property
    def allocations(self) -> int:
        """How many handles of the driver that is."""
        return self._served.facts()["allocations"]

    @property
    def awake(self) -> bool:
        """Whether its memory is mapped."""
        return self._served.facts()["awake"]

    @property
    def entries(self) -> Dict[str, Entry]:
        """What was put, by key, sorted."""
        return {key: Entry(address, size, value) for key, address, size, value in self._served.entries()}

    def allocate(self, size: Union[int, str], tag: str = "", *, timeout: float = 60) -> int:
        """New memory of a writer, behind what it has: its address. Waits for it."""
        offset = self._served.allocate(size, tag, timeout)
        return self.address + offset

    def put(self, key: str, size: Union[int, str], value: bytes = b"", *, timeout: float = 60) -> int:
        """Names new bytes for readers, with a value of up to 64 KiB, and returns their address."""
        return self._served.put(key, size, value, timeout)

    def place(self, key: str, address: int, size: Union[int, str], value: bytes = b"") -> None:
        """Names bytes that this writer has somewhere in its memory."""
        self._served.place(key, address, size, value)

    def commit(self) -> None:
        """Waits for the device, publishes what was put, and reads it from then on."""
        self._served.commit()

    def sleep(self) -> None:
        """Waits for the device, unmaps the memory, and keeps addresses and role.

        Raises NotDurable if the owner of the memory is gone: what everybody has put to sleep then is
        lost.
        """
        self._served.sleep()

    def wake(self, timeout: float = 60) -> None:
        """Maps the memory again at the same addresses. Waits while somebody changes it in place.

        If it raises, nothing is mapped: a kernel that uses the addresses ends, and never computes on
        wrong bytes. Stale says what changed.
        """
        self._served.wake(timeout)

    async def wake_async(self, timeout: float = 60) -> None:
        """The same without blocking the loop while somebody changes the memory."""
        end = time.monotonic() + timeout
        while True:
            try:
                # Mapped by the thread that has the device.
                return self.wake(0)
            except Timeout:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(_POLL)

    def close(self) -> None:
        """Waits for the device, unmaps the memory, and ends the role."""
        self._served.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<{type(self).__name__} {self._name}>"


class Client:
    """A memory service at a socket; ASCEND_VMM_SERVICE names one if it is left out.

    Holds no connection by itself. `program` is what lists of the service call this process.
    """

    _domain = Domain

    def __init__(self, socket: Optional[Union[str, "os.PathLike[str]"]] = None, *, program: Optional[str] = None):
        socket = socket or os.environ.get(SOCKET)
        if not socket:
            raise ValueError(f"pass the service's socket, or set {SOCKET}")
        self.socket = os.fspath(socket)
        self.program = program

    def open(
        self,
        domain: str,
        mode: str = "write-or-read",
        *,
        capacity: Union[int, str] = "64GiB",
        timeout: float = 60,
        allow_update: bool = False,
    ) -> Domain:
        """Opens a domain on this thread's device and maps its memory.

        `mode` is "read", "write", "write-or-read", "discard" or "update". `capacity` is how many
        bytes of addresses a writer reserves. `allow_update` is for readers that stay mapped while a
        writer changes the memory in place.
        """
        opening = self._opening(domain, mode, timeout, allow_update)
        opening.wait()
        return self._domain(domain, opening.map(capacity))

    async def open_async(
        self,
        domain: str,
        mode: str = "write-or-read",
        *,
        capacity: Union[int, str] = "64GiB",
        timeout: float = 60,
        allow_update: bool = False,
    ) -> Domain:
        """The same without blocking the loop while others are waited for."""
        opening = self._opening(domain, mode, timeout, allow_update)
        try:
            await asyncio.get_running_loop().run_in_executor(None, opening.wait)
        except asyncio.CancelledError:
            opening.cancel()
            raise
        # By the thread that has the device.
        return self._domain(domain, opening.map(capacity))

    def wait(self, domain: str, newer_than: int = 0, *, timeout: float = 60) -> int:
        """Waits until a domain has a version that is newer than this one. Needs no device."""
        return service_wait(self.socket, domain, newer_than, timeout)

    async def wait_async(self, domain: str, newer_than: int = 0, *, timeout: float = 60) -> int:
        """The same without blocking the loop."""
        end = time.monotonic() + timeout
        while True:
            try:
                return self.wait(domain, newer_than, timeout=0)
            except Timeout:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(_POLL)

    def _opening(self, domain, mode, timeout, allow_update):
        return ServiceOpening(self.socket, domain, mode, timeout, allow_update, self.program)

    def __repr__(self):
        return f"<{type(self).__name__} {self.socket}>"
