"""`acl.rt`: devices, contexts, streams, events and memory."""

import ctypes as _ctypes
import itertools as _itertools

from . import _call, _table

_call.define(globals(), _table.RT)

_context_state = _call.function(
    "aclrtGetPrimaryCtxState",
    _ctypes.c_int32,
    _ctypes.c_int32,
    _ctypes.POINTER(_ctypes.c_uint32),
    _ctypes.POINTER(_ctypes.c_int32),
)
_key = _call.function(
    "aclrtIpcMemGetExportKey",
    _ctypes.c_int32,
    _ctypes.c_uint64,
    _ctypes.c_size_t,
    _ctypes.c_char_p,
    _ctypes.c_size_t,
    _ctypes.c_uint64,
)
_uce = _call.function(
    "aclrtGetMemUceInfo",
    _ctypes.c_int32,
    _ctypes.c_int32,
    _ctypes.c_void_p,
    _ctypes.c_size_t,
    _ctypes.POINTER(_ctypes.c_size_t),
)
_peek = _call.function("aclrtPeekAtLastError", _ctypes.c_int32, _ctypes.c_int32)
_last = _call.function("aclrtGetLastError", _ctypes.c_int32, _ctypes.c_int32)
_Callback = _ctypes.CFUNCTYPE(None, _ctypes.c_void_p)
_launch = _call.function(
    "aclrtLaunchCallback", _ctypes.c_int32, _Callback, _ctypes.c_void_p, _ctypes.c_int32, _ctypes.c_uint64
)

# Functions that were launched and not called yet, and their arguments, by their numbers.
_launched = {}
_numbers = _itertools.count(1)


# One for all functions: it must not go away while it is running.
@_Callback
def _called(number):
    function, arguments = _launched.pop(number)
    function(arguments)


def get_primary_ctx_state(device_id, /):
    """(active, flags, code)."""
    flags, active = _ctypes.c_uint32(), _ctypes.c_int32()
    code = _context_state(_call._signed(device_id), flags, active)
    return active.value, flags.value, code


def query_event(event, /):
    """(status, code): 0 if the event is complete, 1 if it is not."""
    status, code = query_event_status(event)  # noqa: F821, from the table
    return int(code == 0 and status == 0), code


def ipc_mem_get_export_key(ptr, size, length, flag, /):
    """(key, code); 65 is the length of a key."""
    length = _call.integer(length)
    if not 0 <= length < 1024:
        raise ValueError("the length of a key is below 1024")
    room = _ctypes.create_string_buffer(max(length, 1))
    code = _key(_call._wide(ptr), _call._wide(size), room, length, _call._wide(flag))
    return room.value.decode(errors="replace"), code


def get_mem_uce_info(device_id, number, /):
    """(list, code): memory errors of a device."""
    number = _call.integer(number)
    if not 0 <= number <= 1 << 16:
        raise ValueError("so many memory errors are not asked for")
    room, found = _ctypes.create_string_buffer(max(number, 1) * 128), _ctypes.c_size_t()
    code = _uce(_call._signed(device_id), room, number, found)
    entries = []
    for index in range(min(found.value, number)):
        words = (_ctypes.c_uint64 * 16).from_buffer(room, index * 128)
        entries.append({"addr": words[0], "len": words[1], "reserved": list(words[2:])})
    return entries, code


def mem_uce_repair(device_id, entries, /):
    """Not supported: needs the vendor's firmware interface."""
    _call._signed(device_id)
    if not isinstance(entries, list):
        raise TypeError("must be a list of dicts")
    return _call.NOT_SUPPORTED


def mem_flush(ptr, size, /):
    """Not supported: for hardware on which the CPU's cache does not see the device."""
    _call._wide(ptr), _call._wide(size)
    return _call.NOT_SUPPORTED


def mem_invalidate(ptr, size, /):
    """Not supported: see `mem_flush`."""
    return mem_flush(ptr, size)


def peek_at_last_error(level, /):
    """The code of this thread's latest call that failed."""
    return _peek(_call._signed(level))


def get_last_error(level, /):
    """The same, and forgets it."""
    return _last(_call._signed(level))


def launch_callback(function, arguments, block_type, stream, /):
    """Calls `function(arguments)` when the stream gets there, in the thread that processes reports."""
    if not callable(function):
        raise TypeError("must be callable")
    if arguments is not None and not isinstance(arguments, list):
        raise TypeError("must be a list, or None")
    block_type, stream = _call._signed(block_type), _call._wide(stream)
    number = next(_numbers)
    _launched[number] = function, arguments
    code = _launch(_called, number, block_type, stream)
    if code:
        del _launched[number]
    return code


__getattr__ = _call.missing("acl.rt")
