"""Parameters of PyTorch modules in memory of the service, with torch_npu.

    from ascend_vmm.service.torch import Client

    domain = Client("/run/ascend-vmm.sock").open("llama-70b/tp0/weights")
    if domain.writes:
        with domain.pool("16GiB"):
            model = load_weights().to("npu")     # its tensors lie in served memory
        domain.commit(model)
    else:
        with torch.device("meta"):
            model = Model()
        domain.bind(model)                       # no file is read, nothing is copied
    domain.sleep()
    domain.wake()                                # the same tensors, at the same addresses

The pool hands out pieces of memory that is mapped before it is entered, so the framework's allocator
never waits. A tensor does not own the memory behind it: `close` refuses while tensors of the domain
live. Whoever writes to a bound tensor changes it for every engine that reads the domain.

Of the memory that the pool did not hand out, whole pieces of 1 GiB are given back at the commit.
"""

import atexit
import contextlib
import json
import logging
import os
import threading
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

from .. import _ascend_vmm
from . import Client as _Client
from . import Domain as _Domain
from . import InvalidCall, Mismatch, NoMemory, _errors

__all__ = ["Client", "Domain"]

_logger = logging.getLogger("ascend_vmm.service")

_CHUNK = 1 << 30
_PAGE = 2 << 20
_ALIGNMENT = 512
_KEPT: List[Any] = []
"""Pools and allocators: a framework that destroys one gives its memory to the wrong function."""
_OPEN: "Dict[int, Domain]" = {}
"""Domains whose memory tensors may have: they stay until they are closed, or the process ends."""
_ENTERED = threading.Lock()


class _Place(NamedTuple):
    """A tensor of a module: where it hangs, and how."""

    owner: Any
    attribute: str
    kind: str
    tensor: Any


def _frameworks():
    import torch  # type: ignore
    import torch_npu  # type: ignore

    return torch, torch_npu


def _tensors(module) -> Dict[str, _Place]:
    """Every parameter, buffer and tensor attribute of a module, by its name."""
    torch, _ = _frameworks()
    places = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = path + "." if path else ""
        for kind, tensors in [
            ("parameter", owner._parameters),
            ("buffer", owner._buffers),
            ("attribute", {k: v for k, v in vars(owner).items() if isinstance(v, torch.Tensor)}),
        ]:
            for name, tensor in tensors.items():
                if tensor is not None:
                    places[prefix + name] = _Place(owner, name, kind, tensor)
    return places


def _refuse(problem, remedy, error=InvalidCall, code="invalid"):
    raise _explained(problem, remedy, error, code)


def _explained(problem, remedy, error=InvalidCall, code="invalid"):
    refusal = error(f"{problem}; {remedy}")
    refusal.code, refusal.cause, refusal.remedy = code, problem, remedy
    return refusal


def _mismatch(domain, differences, remedy):
    shown = ", ".join(differences[:5])
    more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
    error = _explained(f"{domain} does not fit the module: {shown}{more}", remedy, Mismatch, "mismatch")
    error.differences = tuple(differences)
    return error


def _described(domain, name, value):
    """What `commit` recorded about a tensor."""
    try:
        told = json.loads(value)
        known = told["kind"] in ("parameter", "buffer", "attribute") and len(told["shape"]) == len(told["stride"])
        numbers = [*told["shape"], *told["stride"], told["offset"], told["format"]]
        if known and all(isinstance(number, int) and number >= 0 for number in numbers):
            return told
    except (ValueError, KeyError, TypeError):
        pass
    raise _mismatch(domain, [f"{name} is no tensor of a module"], "bind what was committed with a module")


def _last_byte(shape, stride, offset, item):
    """How many bytes of a storage a tensor needs."""
    if 0 in shape:
        return 0
    return (offset + sum((length - 1) * step for length, step in zip(shape, stride)) + 1) * item


class Domain(_Domain):
    """A domain with tensors in it, from `Client.open`."""

    def __init__(self, name: str, served: _ascend_vmm.ServedDomain) -> None:
        super().__init__(name, served)
        self._storages: List[Tuple[str, Any]] = []
        self._spare = (0, 0)
        if not _OPEN:
            # After the framework's own, which therefore run later.
            _frameworks()
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _OPEN[id(self)] = self

    @contextlib.contextmanager
    def pool(self, bytes: Union[int, str], *, timeout: float = 60) -> Iterator[None]:
        """Within it, what the framework allocates on this device lies in new memory of this writer.

        The memory is asked for, waited for and mapped before the pool is entered. What does not fit
        is out of memory for the framework, and NoMemory here. Other threads that allocate meanwhile
        may get memory of the pool too: load in one.
        """
        torch, _ = _frameworks()
        self._check_device()
        size = -(-_number(bytes) // _PAGE) * _PAGE
        start = end = 0
        while end - start < size:
            piece = min(_CHUNK, size - (end - start))
            begins = self.allocate(piece, timeout=timeout)
            start, end = start or begins, begins + piece
        self._spare = (start, end)
        with _ENTERED, _without_expandable_segments(torch):
            path = _ascend_vmm.__file__
            allocator = torch.npu.memory.NPUPluggableAllocator(path, "ascend_vmm_pool_malloc", "ascend_vmm_pool_free")
            pool = torch.npu.MemPool(allocator.allocator())
            _KEPT.append((allocator, pool))
            _ascend_vmm.pool_enter(start, end - start, self.device)
            used, refused, failed = 0, None, None
            try:
                with torch.npu.use_mem_pool(pool):
                    yield
            except RuntimeError as error:
                failed = error
                raise
            finally:
                used, refused = _ascend_vmm.pool_leave() or (0, None)
                self._spare = (start + used, end)
                if failed is not None and refused is not None:
                    remedy = "the framework asks for 2 MiB for small tensors, 20 MiB for medium ones, and rounds up"
                    problem = f"the pool of {self.name} refused {refused}"
                    raise _explained(problem, remedy, NoMemory, "out-of-memory") from failed

    def commit(self, module=None, *, outside: str = "refuse") -> None:
        """Publishes the tensors of a module, and reads them from then on.

        Each parameter, buffer and tensor attribute is found by its address. Those that lie elsewhere
        (other memory of the NPU, the host) are named and refused, or copied in with
        `outside="copy"`. Without a module it publishes what was put.
        """
        if module is not None:
            self._put_all(module, outside)
        torch, _ = _frameworks()
        torch.npu.synchronize()
        super().commit()

    def _put_all(self, module: Any, outside: str) -> None:
        torch, torch_npu = _frameworks()
        if outside not in ("refuse", "copy"):
            _refuse(f"outside is {outside!r}", 'pass "refuse" or "copy"')
        self._check_device()
        torch.npu.synchronize()
        if self._spare[1] and not self.entries:
            # Whole allocations that the pool did not need.
            self._served.trim(self._spare[0] - self.address)
            self._spare = (self._spare[0], min(self._spare[1], self.address + self.nbytes))
        first, last = self.address, self.address + self.nbytes
        places = _tensors(module)
        filled = [name for name, place in places.items() if place.tensor.numel()]
        elsewhere = [name for name in filled if not self._holds(places[name].tensor, first, last)]
        if elsewhere and outside == "refuse":
            remedy = 'load it within the pool, or commit with outside="copy"'
            raise _mismatch(self.name, [f"{name} is not in its memory" for name in elsewhere], remedy)
        copied = self._copy_in({name: places[name] for name in elsewhere})
        named: Dict[int, str] = {}
        rows = []
        for name, place in places.items():
            alias = named.setdefault(id(place.tensor), name)
            tensor, onto = copied.get(alias, (place.tensor, "npu"))
            rows.append((name, tensor, self._value(place, tensor, onto, alias if alias != name else None)))
        for name, tensor, value in rows:
            storage = tensor.untyped_storage()
            address, size = (storage.data_ptr(), storage.nbytes()) if tensor.numel() else (first, 0)
            self.place(name, address, size, value)
            if size:
                self._remember(name, storage)
        # Nothing has failed: the module gets what was copied, unless it stays on the host.
        hung: Dict[Any, Any] = {}
        for place in places.values():
            tensor, onto = copied.get(named[id(place.tensor)], (None, ""))
            if tensor is not None and onto == "npu":
                _hang(torch, place, tensor, hung)

    def _value(self, place, tensor, onto, alias):
        _, torch_npu = _frameworks()
        value = {
            "kind": place.kind,
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "offset": tensor.storage_offset(),
            "dtype": str(place.tensor.dtype).split(".")[-1],
            "format": int(torch_npu.get_npu_format(tensor)) if tensor.numel() else 2,
        }
        if onto != "npu":
            value["device"] = onto
        if alias is not None:
            value["alias"] = alias
        if place.kind == "buffer" and place.attribute in place.owner._non_persistent_buffers_set:
            value["persistent"] = False
        return json.dumps(value, separators=(",", ":")).encode()

    def _holds(self, tensor, first, last):
        if tensor.device.type != "npu":
            return False
        storage = tensor.untyped_storage()
        return first <= storage.data_ptr() and storage.data_ptr() + storage.nbytes() <= last

    def _copy_in(self, places):
        """Copies tensors into memory of this domain: the new ones by name, and where they belong."""
        torch, torch_npu = _frameworks()
        sources, total = {}, 0
        for name, place in places.items():
            if place.tensor.device.type == "meta":
                _refuse(f"{name} has no data (it is on the meta device)", "load it before the commit")
            if id(place.tensor) in sources:
                continue
            size = place.tensor.untyped_storage().nbytes()
            sources[id(place.tensor)] = (name, place.tensor, total, size)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        if not sources:
            return {}
        start = -(-self._spare[0] // _ALIGNMENT) * _ALIGNMENT
        if start + total > self._spare[1] or start == 0:
            start = self.allocate(-(-total // _PAGE) * _PAGE)
            self._spare = (start, start + -(-total // _PAGE) * _PAGE)
        self._spare = (start + total, self._spare[1])
        copied = {}
        for name, tensor, offset, size in sources.values():
            there = _raw(start + offset, size, self.device)
            if tensor.device.type == "cpu":
                onto, form = "cpu", 2
                there.copy_(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
            else:
                onto, form = "npu", int(torch_npu.get_npu_format(tensor))
                there.copy_(_raw(tensor.untyped_storage().data_ptr(), size, self.device))
            view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), form)
            copied[name] = (_tensor(start + offset, size, self.device, *view), onto)
        torch.npu.synchronize()
        return copied

    def bind(self, module, *, strict: bool = True) -> None:
        """Puts what the domain has into a module, which is built on the meta device.

        Everything is compared before anything is changed: Mismatch names every tensor that one of
        them lacks, or that has another shape or type. `strict=False` is for modules whose tensors
        change while they are loaded: what is there is bound by its name, whatever its shape, and
        only tensors of the module that the domain does not have are named.
        """
        torch, _ = _frameworks()
        self._check_device()
        if self.writes:
            _refuse(f"{self.name} is not committed", "commit it, or open it to read")
        if not self.awake:
            _refuse(f"{self.name} is asleep", "wake it first", _errors.Asleep, "asleep")
        entries = self.entries
        values = {name: _described(self.name, name, entry.value) for name, entry in entries.items()}
        places, owners = _tensors(module), dict(module.named_modules(remove_duplicate=False))
        differences = [f"{name} is not served" for name in places if name not in values]
        for name, value in values.items():
            owner, _, attribute = name.rpartition(".")
            shape, dtype = tuple(value["shape"]), getattr(torch, value["dtype"], None)
            known, size = places.get(name), entries[name].size
            if not isinstance(dtype, torch.dtype):
                differences.append(f"{name} has the unknown type {value['dtype']}")
            elif _last_byte(shape, value["stride"], value["offset"], dtype.itemsize) > size:
                differences.append(f"{name} goes beyond its {size} bytes")
            elif known is None and (strict and value["kind"] != "attribute" or owner not in owners):
                differences.append(f"{name} is not in the module")
            elif strict and known is not None and known.tensor.shape != shape:
                differences.append(f"{name} is {list(shape)} and not {list(known.tensor.shape)}")
            elif strict and known is not None and known.tensor.dtype != dtype:
                differences.append(f"{name} is {value['dtype']} and not {str(known.tensor.dtype)[6:]}")
        if differences:
            raise _mismatch(self.name, differences, "bind the model that was committed, or open another domain")
        made: Dict[str, Any] = {}
        storages: Dict[Tuple[int, int], Any] = {}
        for name, value in values.items():
            alias = value.get("alias")
            if alias in made:
                made[name] = made[alias]
                continue
            made[name] = self._made(torch, entries[name], value, storages)
        bound: Dict[Any, Any] = {}
        for name, value in values.items():
            owner, _, attribute = name.rpartition(".")
            place = _Place(owners[owner], attribute, value["kind"], None)
            _hang(torch, place, made[name], bound, value)
            if entries[name].size and value.get("device", "npu") == "npu":
                self._remember(name, made[name].untyped_storage())

    def _made(self, torch, entry, value, storages):
        dtype, shape = getattr(torch, value["dtype"]), tuple(value["shape"])
        if entry.size == 0:
            return torch.empty(shape, dtype=dtype, device=value.get("device", f"npu:{self.device}"))
        tensor = _tensor(entry.address, entry.size, self.device, dtype, shape, value["stride"], value["offset"],
                         value["format"], storages)
        if value.get("device", "npu") == "npu":
            return tensor
        # It belongs on the host, and its bytes were served.
        bytes = _raw(entry.address, entry.size, self.device).cpu()
        return torch.empty(0, dtype=dtype).set_(bytes.untyped_storage(), value["offset"], shape, tuple(value["stride"]))

    def _remember(self, name, storage):
        from torch.multiprocessing.reductions import StorageWeakRef  # type: ignore

        self._storages.append((name, StorageWeakRef(storage)))

    def _check_device(self):
        torch, _ = _frameworks()
        current = torch.npu.current_device()
        if current != self.device:
            _refuse(f"{self.name} is on device {self.device}, and this thread has device {current}",
                    f"call torch.npu.set_device({self.device})", _errors.WrongDevice, "other-device")

    def sleep(self) -> None:
        """Waits for the framework's queue and the device, then unmaps. Addresses and tensors stay."""
        torch, _ = _frameworks()
        # The device alone does not know what waits in the framework's queue.
        torch.npu.synchronize()
        super().sleep()

    @property
    def bound(self) -> List[str]:
        """Names of tensors whose memory is still used."""
        self._storages = [(name, storage) for name, storage in self._storages if not storage.expired()]
        return sorted({name for name, _ in self._storages})

    def close(self) -> None:
        """Unmaps the memory and ends the role. Refused while tensors of the domain live."""
        bound = self.bound
        if bound:
            shown = ", ".join(bound[:5]) + (f" and {len(bound) - 5} more" if len(bound) > 5 else "")
            _refuse(f"tensors of {self.name} live: {shown}", "delete the module that has them, or let the process end",
                    _errors.ServiceError, "busy")
        torch, _ = _frameworks()
        torch.npu.synchronize()
        super().close()
        _OPEN.pop(id(self), None)


class Client(_Client):
    """A memory service at a socket, whose domains hold tensors."""

    _domain = Domain

    def open(self, *arguments, **options) -> Domain:
        """As `ascend_vmm.service.Client.open`."""
        domain = super().open(*arguments, **options)
        assert isinstance(domain, Domain)
        return domain


def _close_all():
    """At the end of the process, before the framework ends the device."""
    for domain in list(_OPEN.values()):
        try:
            torch, _ = _frameworks()
            torch.npu.synchronize()
            _Domain.close(domain)
        except Exception as error:  # The process ends all the same, and the driver cleans up.
            _logger.debug("%s stays open until the process has ended: %s", domain.name, error)
    _OPEN.clear()


def _number(size):
    if isinstance(size, str):
        for unit, factor in [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)]:
            if size.endswith(unit):
                return int(float(size[: -len(unit)]) * factor)
    return int(size)


@contextlib.contextmanager
def _without_expandable_segments(torch):
    """Switches expandable segments off: with them the framework passes by every allocator."""
    on = "expandable_segments:True" in os.environ.get("PYTORCH_NPU_ALLOC_CONF", "")
    if on:
        _logger.warning("expandable_segments is switched off while weights are loaded into served memory")
    torch.npu.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        if on:
            torch.npu.memory._set_allocator_settings("expandable_segments:True")


def _tensor(address, size, device, dtype, shape, stride, offset, form, storages: Optional[Dict] = None):
    """A tensor of memory at an address. It does not own it."""
    torch, torch_npu = _frameworks()
    where = torch.device("npu", device)
    storage = None if storages is None else storages.get((address, size))
    if storage is None:
        storage = torch_npu._C._construct_storage_from_data_pointer(address, where, size)
        if storages is not None:
            storages[(address, size)] = storage
    shape, stride = tuple(shape), tuple(stride)
    metadata = {"dtype": dtype, "device": where, "storage_offset": 0, "npu_format": form}
    if form != 2:
        # A private format is of the whole tensor, which is contiguous.
        metadata.update(size=shape, stride=stride)
        return torch_npu._C._construct_NPU_Tensor_From_Storage_And_Metadata(metadata, storage)
    # Built with strides, it could not be copied: so it is built flat, and viewed.
    metadata.update(size=(size // dtype.itemsize,), stride=(1,))
    flat = torch_npu._C._construct_NPU_Tensor_From_Storage_And_Metadata(metadata, storage)
    return torch.as_strided(flat, shape, stride, offset)


def _raw(address, size, device):
    torch, _ = _frameworks()
    return _tensor(address, size, device, torch.uint8, (size,), (1,), 0, 2)


def _hang(torch, place, tensor, bound, value=None):
    """Puts a tensor where it belongs; tensors with one name before stay one object."""
    if place.kind == "parameter":
        parameter, _ = bound.get(id(tensor), (None, None))
        if parameter is None:
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            # With the tensor, so that its number is not used again meanwhile.
            bound[id(tensor)] = parameter, tensor
        place.owner._parameters[place.attribute] = parameter
    elif place.kind == "buffer":
        place.owner._buffers[place.attribute] = tensor
        if value is not None and value.get("persistent") is False:
            place.owner._non_persistent_buffers_set.add(place.attribute)
    else:
        setattr(place.owner, place.attribute, tensor)
