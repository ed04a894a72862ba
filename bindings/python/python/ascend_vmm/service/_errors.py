"""The exceptions of the memory service. The compiled module raises them by `of`."""

from .. import Error


class ServiceError(Error):
    """What the memory service, or the vendor's library, said: `cause` and `remedy`."""

    code: str = ""
    """For programs: the service's own code, such as "busy", or the engine's, such as "stale"."""


class Timeout(ServiceError, TimeoutError):
    """The time is over: nothing is committed, somebody else writes, reads or waits for memory."""


class Unreachable(ServiceError, ConnectionError):
    """There is no service at the socket."""


class Forbidden(ServiceError, PermissionError):
    """The service's configuration does not allow it."""


class NoMemory(ServiceError, MemoryError):
    """The NPU does not have enough memory, or a quota would be exceeded."""


class InvalidCall(ServiceError, ValueError):
    """The call does not fit: to what the domain is, or to the capacity of its writer."""


class WrongDevice(ServiceError):
    """The memory is on another NPU, or this thread has another one, or none."""


class NotDurable(ServiceError):
    """The owner of the memory is gone, so that nobody may fall asleep."""


class RoleLost(ServiceError):
    """The service was started anew and does not know this role: open the domain again."""


class Stale(ServiceError):
    """Another layout is served than the one that was put to sleep, or than the module has."""


class Asleep(ServiceError):
    """The memory is not mapped."""


class Dirty(ServiceError):
    """A writer died while it changed the memory in place."""


class NoLibrary(ServiceError):
    """There is no libascendcl.so, or it lacks a function."""


class CallFailed(ServiceError):
    """A function of libascendcl.so failed. Nothing of the domain is mapped."""


class OtherProcess(ServiceError):
    """The domain belongs to the parent of this process."""


class Mismatch(ServiceError):
    """A module's tensors and those of the domain do not fit: `differences` has all of them."""

    differences: tuple = ()


_BY_CODE = {
    "timeout": Timeout,
    "unreachable": Unreachable,
    "forbidden": Forbidden,
    "out-of-memory": NoMemory,
    "quota": NoMemory,
    "invalid": InvalidCall,
    "other-device": WrongDevice,
    "no-device": WrongDevice,
    "keeper-gone": NotDurable,
    "unknown": RoleLost,
    "stale": Stale,
    "asleep": Asleep,
    "dirty": Dirty,
    "library": NoLibrary,
    "refused": CallFailed,
    "forked": OtherProcess,
}


def of(code, message, cause, remedy):
    """The exception for an error of the compiled module."""
    error = _BY_CODE.get(code, ServiceError)(message)
    error.code, error.cause, error.remedy = code, cause, remedy
    return error


for _class in [ServiceError, *ServiceError.__subclasses__()]:
    _class.__module__ = "ascend_vmm.service"
del _class
