"""The exceptions. The compiled module raises them and sets their fields."""

from typing import NamedTuple, Optional


class VendorCode(NamedTuple):
    """The codes that the vendor's library would have returned."""

    driver: int
    driver_name: str
    acl: int


class Error(Exception):
    """What went wrong, in one text: what was tried, on what, what the kernel answered, what that
    means and what to do. The same as fields, None where there is nothing to say.

    >>> with Session() as session:
    ...     try:
    ...         session.device(0).create("3MiB")
    ...     except Error as error:
    ...         error.operation, error.remedy
    ('create physical memory', 'Sizes are multiples of 2 MiB, and not 0.')
    """

    operation: Optional[str] = None
    """What was tried, as a verb phrase."""
    cause: Optional[str] = None
    """The most likely cause."""
    remedy: Optional[str] = None
    """What to do."""
    errno: Optional[int] = None
    """What the kernel answered."""
    errno_name: Optional[str] = None
    """The same by its name, such as "ENOMEM"."""
    kernel_log: Optional[str] = None
    """The kernel's own sentences."""
    vendor_code: Optional[VendorCode] = None
    """The codes of the vendor's library, for people who search for them."""
    is_device_lost: bool = False
    """Whether the device or its process is gone, and its memory with it."""
    is_not_trusted: bool = False
    """Whether an import failed because this process is not on the exporter's trust list."""


class Refused(Error):
    """The kernel refused a command."""

    command: str = ""
    object: str = ""
    arguments: str = ""


class OutOfMemory(Error, MemoryError):
    """A device, or the host, does not have enough free memory.

    >>> with Session() as session:
    ...     try:
    ...         session.device(0).create("1TiB")
    ...     except MemoryError as error:
    ...         error.errno_name, error.asked >> 40, error.free_huge < error.asked
    ('ENOMEM', 1, True)
    """

    place: str = ""
    asked: int = 0
    page: int = 0
    free_huge: Optional[int] = None
    free_giant: Optional[int] = None
    page_that_fits: Optional[int] = None


class Invalid(Error, ValueError):
    """An invalid argument, refused before the kernel was called."""


class Closed(Error, ValueError):
    """The object is closed."""


class InUse(Error):
    """Something still uses the object: it cannot be closed yet."""


class OpenFailed(Error):
    """A file of the driver could not be opened."""

    filename: str = ""


class SessionOpen(Error):
    """This process has a session already: use `Session.current()`."""


class SessionTaken(Error):
    """Other code in this process has the session: the vendor's library, or another copy of this one."""

    vendor_library: Optional[str] = None
    other_copy: Optional[str] = None


class OtherProcess(Error):
    """An object of the parent was used in a child of fork."""

    process: int = 0


class FileFailed(Error, OSError):
    """A file could not be opened, read or written."""

    filename: str = ""


class UnknownGeneration(Error):
    """The generation of the driver is unknown."""


class NoDevices(Error):
    """There is no NPU; says why."""

    finding: str = ""


class DeviceProcessFailed(Error):
    """No process could be started on the device."""

    device: int = 0


class DeviceProcessDied(Error):
    """The process on the device has died, and its memory with it."""

    device: int = 0


class TicketError(Error, ValueError):
    """The text or bytes are not a valid ticket."""


class ExchangeFailed(Error):
    """The process at the other end of a socket is late, has died, or is not the one it claims to be."""


for _class in [Error, *Error.__subclasses__(), VendorCode]:
    _class.__module__ = "ascend_vmm"
del _class
