"""Functions of the vendor's Python interface, made from the lines of `_table`.

They take positional arguments, check them as the vendor's do, and return their outputs with the
code last. The interpreter's lock is not held during a call.
"""

import ctypes
import os

from .._ascend_vmm import acl_call, acl_functions

NOT_SUPPORTED = 207000
"""The code for what the vendor has on other hardware only."""

_LIBRARY = "libascendcl.so"
_MARK = b"ASCEND_ACL_SEGMENTS"
"""A text that only our library contains."""


def _library():
    """The C library whose functions are called; None for the copy in the compiled module.

    A process has one session with the driver, so it must not have two of these libraries. The one
    that is loaded is taken, ours or the vendor's. Else, if the loader would find one of ours, that
    is loaded now: a framework that is imported later gets the same.
    """
    try:
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        pass
    for directory in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        path = os.path.join(directory, _LIBRARY)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return ctypes.CDLL(path) if _MARK in file.read() else None
    return None


_loaded = _library()
_own = acl_functions()


def _address(name):
    """The address of a C function; None if the library that is loaded does not have it."""
    if _loaded is None:
        return _own.get(name)
    found = getattr(_loaded, name, None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


class NotServed(NotImplementedError, AttributeError):
    """A name of the vendor's that is not served here. `hasattr` is false for it."""


def function(name, result, *parameters):
    """A C function."""
    address = _address(name)
    if address is not None:
        return ctypes.CFUNCTYPE(result, *parameters)(address)

    def absent(*_):
        raise NotServed(f"the {_LIBRARY} of this process does not have {name}")

    return absent


class Location(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int32)]


class Properties(ctypes.Structure):
    _fields_ = [
        ("handleType", ctypes.c_int32),
        ("allocationType", ctypes.c_int32),
        ("memAttr", ctypes.c_int32),
        ("location", Location),
        ("reserve", ctypes.c_uint64),
    ]


class Value(ctypes.Union):
    _fields_ = [("moduleId", ctypes.c_uint16), ("deviceId", ctypes.c_uint32), ("rsv", ctypes.c_uint8 * 8)]


class Attribute(ctypes.Structure):
    _fields_ = [("attr", ctypes.c_int32), ("value", Value)]


class Config(ctypes.Structure):
    _fields_ = [("attrs", ctypes.POINTER(Attribute)), ("numAttrs", ctypes.c_size_t)]


class PointerAttributes(ctypes.Structure):
    _fields_ = [("location", Location), ("page_size", ctypes.c_uint32), ("rsv", ctypes.c_uint32 * 4)]

    def answer(self):
        location = {"id": self.location.id, "type": self.location.type}
        return {"location": location, "page_size": self.page_size, "rsv": list(self.rsv)}


class Utilization(ctypes.Structure):
    _fields_ = [
        ("cube_utilization", ctypes.c_int32),
        ("vector_utilization", ctypes.c_int32),
        ("aicpu_utilization", ctypes.c_int32),
        ("memory_utilization", ctypes.c_int32),
        ("utilization_extend", ctypes.c_uint64),
    ]

    def answer(self):
        return {name: getattr(self, name) for name, _ in self._fields_}


class Version(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_char * 128),
        ("major_version", ctypes.c_char * 64),
        ("minor_version", ctypes.c_char * 64),
        ("release_version", ctypes.c_char * 64),
        ("patch_version", ctypes.c_char * 64),
        ("reserved", ctypes.c_char * 128),
    ]

    def answer(self):
        return {name: getattr(self, name).decode(errors="replace") for name, _ in self._fields_}


class Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 16)]

    def answer(self):
        return {"bytes": list(self.bytes)}


class Text(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 128)]

    def answer(self):
        return self.text.decode(errors="replace")


_OUTPUTS = {
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "p": ctypes.c_uint64,
    "q": ctypes.c_int64,
    "f": ctypes.c_float,
    "A": PointerAttributes,
    "D": Utilization,
    "U": Uuid,
    "V": Version,
    "T": Text,
}


def integer(value):
    """An int, or what has `__index__`; a TypeError otherwise."""
    if isinstance(value, int):
        return value
    return value.__index__() if hasattr(value, "__index__") else _refuse("an int", value)


def _refuse(wanted, value):
    raise TypeError(f"must be {wanted}, not {type(value).__name__}")


def _signed(value):
    number = integer(value)
    if not -(1 << 31) <= number < 1 << 31:
        raise OverflowError(f"{number} is no signed 32-bit number")
    return number


def _unsigned(value):
    number = integer(value)
    if not 0 <= number < 1 << 32:
        raise OverflowError(f"{number} is no unsigned 32-bit number")
    return number


def _wide(value):
    return integer(value) & 0xFFFF_FFFF_FFFF_FFFF


def _text(value):
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else _refuse("a str", value)


def _dict(value):
    return value if isinstance(value, dict) else _refuse("a dict", value)


def _number(given, name):
    """A key's number; 0 if it is missing or is no int."""
    value = given.get(name, 0)
    return value if isinstance(value, int) else 0


def _properties(given):
    given = _dict(given)
    location = _dict(given.get("location", {}))
    made = Properties()
    for name in ("handleType", "allocationType", "memAttr", "reserve"):
        setattr(made, name, _number(given, name))
    made.location = Location(_number(location, "id"), _number(location, "type"))
    return ctypes.byref(made)


def _config(given):
    if not _dict(given):
        return None
    attributes = given.get("attrs", [])
    if not isinstance(attributes, (list, tuple)):
        _refuse("a list of dicts", attributes)
    if _number(given, "numAttrs") != len(attributes):
        raise KeyError("numAttrs is not the number of attrs")
    array = (Attribute * max(len(attributes), 1))()
    for place, attribute in zip(array, attributes):
        place.attr = _number(_dict(attribute), "attr")
        value = _dict(attribute.get("value", {}))
        known = [name for name in ("moduleId", "deviceId", "rsv") if name in value]
        if len(known) != 1:
            raise KeyError("a value has one of moduleId, deviceId and rsv")
        if known == ["rsv"]:
            numbers = list(value["rsv"])
            if len(numbers) > 8:
                raise ValueError("rsv has at most 8 numbers")
            place.value.rsv[: len(numbers)] = numbers
        else:
            setattr(place.value, known[0], _number(value, known[0]))
    return ctypes.byref(Config(array, len(attributes)))


def _processes(given):
    if not isinstance(given, list):
        _refuse("a list", given)
    if not all(isinstance(pid, int) for pid in given):
        raise ValueError("process ids are ints")
    return (ctypes.c_int32 * max(len(given), 1))(*map(_signed, given)), len(given)


_INPUTS = {
    "": [ctypes.c_uint64],
    "i": [ctypes.c_int32],
    "u": [ctypes.c_uint32],
    "s": [ctypes.c_char_p],
    "P": [ctypes.c_void_p],
    "C": [ctypes.c_void_p],
    "L": [ctypes.POINTER(ctypes.c_int32), ctypes.c_size_t],
}


def define(module, lines):
    """Puts the functions of a table into a module's namespace."""
    for line in lines.strip().splitlines():
        name, c_name, *arguments = line.split()
        if _loaded is not None and _address(c_name) is None:
            continue
        module[name] = _made(module["__name__"].replace("ascend_vmm.", ""), name, c_name, arguments)


def _made(owner, name, c_name, parameters):
    """A function that calls the C function: by the compiled module where all are numbers, which is
    five times as fast, and by ctypes otherwise."""
    kinds = [kind if kind[0] == ">" else kind.partition(":")[2] for kind in parameters]
    call = acl_call(c_name, kinds, None if _loaded is None else _address(c_name))
    types, inputs, outputs, arguments = [], [], [], []
    for number, parameter in enumerate(parameters):
        if parameter[0] == ">":
            types.append(ctypes.POINTER(_OUTPUTS[parameter[1]]))
            outputs.append((f"output{number}", parameter[1]))
            arguments.append(f"output{number}")
        else:
            own_name, _, kind = parameter.partition(":")
            types += _INPUTS[kind]
            inputs.append(own_name)
            arguments.append(_CONVERSIONS[kind].format(own_name))
    head = f"def {name}({', '.join([*inputs, '/'] if inputs else [])}):"
    if call is not None:
        lines, scope = [head, f"    return _call({', '.join(inputs)})"], {"_call": call}
    else:
        c_function = function(c_name, ctypes.c_int32, *types)
        lines = [head, *(f"    {output} = _OUTPUTS[{kind!r}]()" for output, kind in outputs)]
        lines.append(f"    code = _c_function({', '.join(arguments)})")
        answers = [f"{output}.{'answer()' if kind in 'ADUVT' else 'value'}" for output, kind in outputs]
        lines.append(f"    return {', '.join([*answers, 'code'])}")
        scope = {"_c_function": c_function, "_OUTPUTS": _OUTPUTS, **_CONVERTERS}
    exec("\n".join(lines), scope)
    made = scope[name]
    made.__module__ = owner
    made.__qualname__ = f"{owner}.{name}"
    made.__doc__ = f"`{c_name}`: docs/cann.md says what it does."
    return made


_CONVERTERS = {made.__name__: made for made in [_signed, _unsigned, _wide, _text, _properties, _config, _processes]}

# What an int of the right size needs no function for.
_CONVERSIONS = {
    "": "{0} & 0xffffffffffffffff if {0}.__class__ is int else _wide({0})",
    "i": "{0} if {0}.__class__ is int and -0x80000000 <= {0} < 0x80000000 else _signed({0})",
    "u": "{0} if {0}.__class__ is int and 0 <= {0} < 0x100000000 else _unsigned({0})",
    "s": "_text({0})",
    "P": "_properties({0})",
    "C": "_config({0})",
    "L": "*_processes({0})",
}


def missing(owner):
    """A module's `__getattr__` for names that are not served."""

    def get(name):
        if name.startswith("_"):
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        raise NotServed(f"{owner}.{name} is not served: ascend-vmm has the vendor's memory functions only")

    return get
