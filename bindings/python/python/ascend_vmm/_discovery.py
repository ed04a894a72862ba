"""What the driver says about NPUs, as data classes."""

from dataclasses import dataclass
from typing import Optional, Tuple


@dataclass(frozen=True)
class Hbm:
    """Memory of an NPU in bytes, as its firmware publishes it."""

    total: int
    free: int


@dataclass(frozen=True)
class SuperPod:
    """An NPU's place in a super pod."""

    sdid: int
    server: int
    super_pod: int
    chassis: int
    scale: int


@dataclass(frozen=True)
class Npu:
    """An NPU. Fields that the driver does not report are None."""

    logical: int
    """Its number in this namespace: what `Session.device` takes."""
    physical: int
    """Its number on the host."""
    user: Optional[int]
    """Its number in ASCEND_RT_VISIBLE_DEVICES; None if that hides it."""
    identity: str
    """The same name for it in every container."""
    card: Optional[int]
    """For a virtual instance, the card it is part of …"""
    instance: Optional[int]
    """… and its number on the card."""
    state: str
    """working, starting, exception, sleeping, lost, removed, resetting or unknown."""
    usable: bool
    chip: Optional[str]
    soc: Optional[str]
    ai_cores: Optional[int]
    pci: Optional[str]
    hbm: Optional[Hbm]
    health: Optional[str]
    super_pod: Optional[SuperPod]
    split: Optional[str]
    sharing_obstacle: Optional[str]
    """Why its memory cannot be shared; None if it can."""


@dataclass(frozen=True)
class Finding:
    """A problem of the host, or something worth knowing."""

    code: str
    severity: str
    device: Optional[int]
    message: str
    remedy: str


@dataclass(frozen=True)
class Survey:
    """The state of a host."""

    environment: Optional[str]
    """host or container."""
    generation: Optional[str]
    memory_driver: Optional[str]
    """v2, v3 or missing."""
    on_pci: Tuple[str, ...]
    devices: Tuple[Npu, ...]
    findings: Tuple[Finding, ...]
    """The worst first."""


@dataclass(frozen=True)
class MemoryInfo:
    """How much memory of a kind a device has, in bytes, by the size of pages."""

    huge_total: int
    huge_free: int
    giant_total: int
    giant_free: int
    normal_total: int
    normal_free: int


@dataclass(frozen=True)
class Capabilities:
    """What a device can do."""

    cpu_access: bool
    cpu_access_huge: bool
    device_memory_on_host: bool
    giant_pages: bool
    remote_map: bool
    share_over_external_bus: bool
    host_addresses: bool


@dataclass(frozen=True)
class PoolStatistics:
    """Memory of a pool, or of one of its tags, in bytes."""

    in_use: int
    """In blocks, after rounding."""
    peak: int
    """The largest `in_use` so far."""
    blocks: int
    """Number of blocks."""
    mapped: int
    """In blocks or free."""
    reserved: int
    """Addresses, with memory or without."""
    largest_free: int
    """A free block that is at most a sixteenth smaller than the largest."""
    cached: int
    """In the cache; 0 for one tag."""
    asleep: int
    """Of tags that are asleep: mapped when they wake."""


@dataclass(frozen=True)
class SessionStatistics:
    """Driver resources held by this process, in bytes unless noted."""

    physical: int
    """Physical memory of devices and of the host, own and imported, mapped or not."""
    reserved: int
    """Reserved addresses."""
    mapped: int
    """Addresses with memory behind them."""
    mappings: int
    """Number of mappings."""
    left: int
    """Number of dropped objects that the kernel would not release."""


for _class in [PoolStatistics, SessionStatistics, Hbm, SuperPod, Npu, Finding, Survey, MemoryInfo, Capabilities]:
    _class.__module__ = "ascend_vmm"
del _class
