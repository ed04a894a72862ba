"""The vendor's Python interface `acl`, as far as it is about memory, on ascend-vmm.

Functions, parameters, result tuples and dict keys are those of the vendor's; codes come last, and
errors are codes, not exceptions. `get_recent_err_msg` has the sentence. Names that are not served
raise NotImplementedError.

The functions are those of the libascendcl.so that the process has: of one that is loaded, ours or
the vendor's, or of ours if the loader would find it (LD_LIBRARY_PATH). Only if there is none, of the
copy in this package. So it works beside a framework that links libascendcl.so, imported before or
after it.

As a module of its own name, for programs that say `import acl`, it is there only if it is asked
for, so that it never takes the place of the vendor's by accident: by `pip install ascend-vmm[acl]`,
or for one run by `PYTHONPATH=$(python -m ascend_vmm.acl)`.
"""

import ctypes as _ctypes
import sys as _sys
import types as _types

from . import _call, _table

_call.define(globals(), _table.ACL)

_init = _call.function("aclInit", _ctypes.c_int32, _ctypes.c_char_p)
_soc_name = _call.function("aclrtGetSocName", _ctypes.c_char_p)
_recent = _call.function("aclGetRecentErrMsg", _ctypes.c_char_p)
_attributes = _call.function(
    "aclGetCannAttributeList",
    _ctypes.c_int32,
    _ctypes.POINTER(_ctypes.POINTER(_ctypes.c_int32)),
    _ctypes.POINTER(_ctypes.c_size_t),
)
_log = _call.function(
    "aclAppLog",
    None,
    _ctypes.c_int32,
    _ctypes.c_char_p,
    _ctypes.c_char_p,
    _ctypes.c_uint32,
    _ctypes.c_char_p,
)


def init(*path):
    """`aclInit`, with the path of a configuration or without."""
    if len(path) > 1:
        raise TypeError(f"acl.init() takes at most 1 argument ({len(path)} given)")
    return _init(_call._text(path[0]) if path else None)


def get_soc_name():
    """The chip's name, or None."""
    name = _soc_name()
    return None if name is None else name.decode(errors="replace")


def get_recent_err_msg():
    """What this thread's latest call that failed said, or None."""
    text = _recent()
    return None if text is None else text.decode(errors="replace")


def get_cann_attribute_list():
    """(list, number, code)."""
    first, number = _ctypes.POINTER(_ctypes.c_int32)(), _ctypes.c_size_t()
    code = _attributes(first, number)
    return [first[index] for index in range(number.value)], number.value, code


def app_log(level, text, /):
    """A line in the log."""
    # The text is no format.
    _log(_call._signed(level), b"", b"", 0, _call._text(text).replace(b"%", b"%%"))


from . import rt, util  # noqa: E402, they need what is above

media = _types.ModuleType("acl.media", "Memory for media functions: the same as any other.")


def _dvpp_malloc(size, /):
    """(address, code)."""
    return rt.malloc(size, 0)


media.dvpp_malloc, media.dvpp_free = _dvpp_malloc, rt.free
media.__getattr__ = _call.missing("acl.media")

_modules = {"rt": rt, "util": util, "media": media}
for _name in ("mdl", "op", "blas", "prof", "himpi", "fv"):
    _modules[_name] = _types.ModuleType(f"acl.{_name}", "Not served.")
    _modules[_name].__getattr__ = _call.missing(f"acl.{_name}")
globals().update(_modules)
del _name

__getattr__ = _call.missing("acl")


def install():
    """Makes this the module `acl` of the running program."""
    _sys.modules["acl"] = _sys.modules[__name__]
    for name, module in _modules.items():
        _sys.modules[f"acl.{name}"] = module
