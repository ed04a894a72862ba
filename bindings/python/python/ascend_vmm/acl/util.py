"""`acl.util`: addresses of Python's objects, and threads for reports."""

import ctypes as _ctypes
import threading as _threading
import warnings as _warnings

from . import _call

# The numbers that numpy's C interface gives to types, and its letters for them; 23 is float16.
_TYPES = {**dict(enumerate("?bBhHiIlLqQfdgFDG")), 23: "e"}

# Threads that were started and not stopped, by their numbers.
_threads = {}


def bytes_to_ptr(data, /):
    """The address of a bytes object's own data, which copies may write to: keep the object."""
    if not isinstance(data, bytes):
        raise TypeError(f"must be bytes, not {type(data).__name__}")
    return _ctypes.cast(_ctypes.c_char_p(data), _ctypes.c_void_p).value


def ptr_to_bytes(ptr, size, /):
    """New bytes with a copy of what is at an address that the CPU can read."""
    return _ctypes.string_at(_address(ptr), _size(size))


def _address(ptr):
    address = _call._wide(ptr)
    if address == 0:
        raise ValueError("there is nothing at the address 0")
    return address


def _size(size):
    size = _call.integer(size)
    if not 0 <= size < 1 << 63:
        raise ValueError(f"{size} is no number of bytes")
    return size


def _array(array):
    import numpy

    _warnings.warn("numpy addresses: use bytes_to_ptr where possible", Warning, stacklevel=3)
    if not isinstance(array, numpy.ndarray):
        raise ValueError("must be a numpy array")
    return numpy


def numpy_to_ptr(array, /):
    """The address of an array's data."""
    _array(array)
    if not array.flags.c_contiguous:
        _warnings.warn("the array is not contiguous", Warning, stacklevel=2)
    return array.ctypes.data


def numpy_contiguous_to_ptr(array, /):
    """(address, array): of a contiguous copy, if the array is not contiguous."""
    array = _array(array).ascontiguousarray(array)
    return array.ctypes.data, array


def ptr_to_numpy(ptr, shape, type_number, /):
    """An array over memory that the CPU can see, without a copy; it does not own the memory."""
    import numpy

    _warnings.warn("the array does not own its memory", Warning, stacklevel=2)
    number = _call.integer(type_number)
    if number not in _TYPES:
        raise ValueError(f"{number} is no number of a type of numbers in numpy")
    kind = numpy.dtype(_TYPES[number])
    size = _size(kind.itemsize * int(numpy.prod(shape, dtype=object)))
    memory = (_ctypes.c_ubyte * size).from_address(_address(ptr))
    return numpy.frombuffer(memory, dtype=kind).reshape(shape)


def start_thread(function, arguments, /):
    """(number, code): a thread that calls `function(arguments)`."""
    if not callable(function) or not isinstance(arguments, list):
        raise TypeError("must be a function and a list")
    thread = _threading.Thread(target=function, args=(arguments,), daemon=True)
    thread.start()
    _threads[thread.ident] = thread
    return thread.ident, 0


def stop_thread(number, /):
    """Waits until the thread has ended, which is up to its function."""
    thread = _threads.pop(_call._wide(number), None)
    if thread is None:
        return 100000
    thread.join()
    return 0


__getattr__ = _call.missing("acl.util")
