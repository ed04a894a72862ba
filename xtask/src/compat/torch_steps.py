"""Steps of `cargo xtask compat torch`: an unmodified framework, memory only.

Each part is a process of its own. A step prints one line; the first that fails ends the part.
"""

import ctypes
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore")
MIB = 1 << 20
if "ONE_HOOK" in os.environ:
    # Before the framework, and for all of its libraries: see one_hook.cpp.
    ctypes.CDLL(os.environ["ONE_HOOK"], mode=ctypes.RTLD_GLOBAL)


def step(name, holds=True):
    print(f"  {'ok   ' if holds else 'FAILED'} {name}", flush=True)
    if not holds:
        sys.stdout.flush()
        os._exit(1)


def pattern(size, seed, **options):
    import torch

    return (torch.arange(size, dtype=torch.int64) * 31 + seed).to(torch.uint8).clone(**options)


def load():
    began = time.time()
    import torch
    import torch_npu

    step(f"torch {torch.__version__} and torch_npu {torch_npu.__version__} loaded in {time.time() - began:.0f} s")
    step("two devices", torch.npu.is_available() and torch.npu.device_count() == 2)
    return torch


def in_use(torch, device=0):
    free, total = torch.npu.mem_get_info(device)
    return total - free


def round_trips(torch, device):
    for mib in (1, 30, 300):
        host = pattern(mib * MIB, mib)
        there = torch.empty(mib * MIB, dtype=torch.uint8, device=device)
        there.copy_(host)
        step(f"{mib} MiB to {device} and back", torch.equal(there.cpu(), host))
        del there


def tensors():
    torch = load()
    torch.npu.set_device(0)
    before = in_use(torch)
    round_trips(torch, "npu:0")

    host = pattern(8 * MIB, 5).pin_memory()
    stream = torch.npu.Stream()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(stream):
        start.record()
        there = host.to("npu:0", non_blocking=True)
        back = torch.empty_like(host).pin_memory()
        back.copy_(there, non_blocking=True)
        end.record()
    end.synchronize()
    stream.synchronize()
    step("pinned memory, a second stream and events", torch.equal(back, host) and start.elapsed_time(end) >= 0)

    again = there.clone()
    torch.npu.synchronize()
    step("a copy on one device", torch.equal(again.cpu(), host))
    other = there.to("npu:1")
    step("a copy between devices", other.device.index == 1 and torch.equal(other.cpu(), host))
    step("integers are printed", str(torch.tensor([1, 2, 3], device="npu:0").cpu()) == "tensor([1, 2, 3])")
    name, memory = torch.npu.get_device_name(0), torch.npu.get_device_properties(0).total_memory
    step(f"properties: {name}, {memory >> 30} GiB", name.startswith("Ascend") and memory > 1 << 30)

    allocated = torch.npu.memory_allocated(0)
    large = torch.empty(64 * MIB, dtype=torch.uint8, device="npu:0")
    counted = torch.npu.memory_allocated(0) - allocated
    step("statistics count a tensor", 64 * MIB <= counted < 65 * MIB)
    step("and so does the driver", in_use(torch) - before >= 64 * MIB)
    del large, there, again, other
    torch.npu.empty_cache()
    torch.npu.synchronize()
    step("an empty cache has nothing reserved", torch.npu.memory_reserved(0) == 0)
    step("the driver has what it had before", in_use(torch) == before)

    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="npu:0")
        step("more than there is", False)
    except RuntimeError as error:
        text = str(error)
        step("more than there is: NPU out of memory", "out of memory" in text)
    round_trips(torch, "npu:0")


def expandable():
    torch = load()
    torch.npu.set_device(0)
    before = in_use(torch)
    round_trips(torch, "npu:0")
    pieces = [torch.empty(7 * MIB, dtype=torch.uint8, device="npu:0") for _ in range(5)]
    host = pattern(150 * MIB, 9)
    large = host.to("npu:0")
    step("a tensor over many handles", torch.equal(large.cpu(), host))
    addresses = [piece.data_ptr() for piece in pieces]
    step("one segment", max(addresses) - min(addresses) < 72 << 30)
    del pieces, large
    torch.npu.empty_cache()
    torch.npu.synchronize()
    step("an empty cache has nothing reserved", torch.npu.memory_reserved(0) == 0)
    step("the driver has what it had before", in_use(torch) <= before + 2 * MIB)


def pluggable():
    torch = load()
    path = os.environ["ALLOCATOR"]
    allocator = torch.npu.memory.NPUPluggableAllocator(path, "my_malloc", "my_free")
    own = ctypes.CDLL(path)
    torch.npu.memory.change_current_allocator(allocator)
    torch.npu.set_device(0)
    hosts = [pattern(64 * MIB, seed) for seed in (1, 2)]
    tensors = [host.to("npu:0") for host in hosts]
    addresses = [tensor.data_ptr() for tensor in tensors]
    step("the framework uses our allocator", own.my_blocks() >= 2)
    torch.npu.synchronize()
    awake = in_use(torch)
    own.my_sleep()
    asleep = in_use(torch)
    step(f"asleep: {(awake - asleep) // MIB} MiB released", awake - asleep >= 128 * MIB)
    own.my_wake()
    step("awake at the same addresses", [tensor.data_ptr() for tensor in tensors] == addresses)
    step("with the same contents", all(torch.equal(tensor.cpu(), host) for tensor, host in zip(tensors, hosts)))


def child(queue, answers):
    import torch
    import torch_npu  # noqa: F401

    torch.npu.set_device(0)
    there = queue.get(timeout=900)
    seen = there.cpu()
    there.copy_(seen.flip(0))
    torch.npu.synchronize()
    answers.put(int(seen.sum()))
    queue.get(timeout=900)
    del there


def processes():
    torch = load()
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    other = context.Process(target=child, args=(queue, answers))
    other.start()
    torch.npu.set_device(0)
    host = torch.arange(5 * MIB, dtype=torch.int32)
    there = host.to("npu:0")
    torch.npu.synchronize()
    queue.put(there)
    step("another process reads a tensor", answers.get(timeout=900) == int(host.sum()))
    step("and what it writes is seen here", torch.equal(there.cpu(), host.flip(0)))
    queue.put(None)
    other.join(900)
    step("it ends well", other.exitcode == 0)


def operators():
    torch = load()
    torch.npu.set_device(0)
    there = torch.arange(10).to("npu:0")
    refused = []
    for name, act in (
        ("add", lambda: there + there),
        ("fill_", lambda: there.fill_(1)),
        ("zeros", lambda: torch.zeros(3, device="npu:0")),
        ("to(float)", lambda: there.to(torch.float32)),
        ("matmul", lambda: torch.mm(torch.empty(2, 2, device="npu:0"), torch.empty(2, 2, device="npu:0"))),
    ):
        try:
            act()
            torch.npu.synchronize()
            step(f"{name} must be refused", False)
        except (RuntimeError, NotImplementedError):
            refused.append(name)
    step(f"needs kernels, and is refused in the calling thread: {', '.join(refused)}")
    step("memory works on", torch.equal(there.cpu(), torch.arange(10)))


def acl_before():
    import acl

    step("acl.init and set_device, before the framework", acl.init() == 0 and acl.rt.set_device(0) == 0)
    beside(load(), acl)


def acl_after():
    torch = load()
    torch.npu.set_device(0)
    torch.empty(MIB, dtype=torch.uint8, device="npu:0")
    import acl

    device, code = acl.rt.get_device()
    step("acl knows the device that the framework set", (device, code) == (0, 0))
    beside(torch, acl)


def beside(torch, acl):
    """`acl` and the framework use one library: each reads what the other wrote."""
    host = pattern(8 * MIB, 3)
    there = torch.empty(8 * MIB, dtype=torch.uint8, device="npu:0")
    torch.npu.synchronize()
    code = acl.rt.memcpy(there.data_ptr(), 8 * MIB, host.data_ptr(), 8 * MIB, 1)
    step("the framework reads what acl wrote", code == 0 and torch.equal(there.cpu(), host))
    free, total, code = acl.rt.get_mem_info(1)
    step("both see the same memory", code == 0 and (free, total) == tuple(torch.npu.mem_get_info(0)))
    pointer, code = acl.rt.malloc(8 * MIB, 0)
    back = bytes(8 * MIB)
    code = code or acl.rt.memcpy(pointer, 8 * MIB, there.data_ptr(), 8 * MIB, 3)
    code = code or acl.rt.memcpy(acl.util.bytes_to_ptr(back), 8 * MIB, pointer, 8 * MIB, 2)
    step("acl reads what the framework has", code == 0 and back == bytes(host.numpy()))
    step("and frees its own", acl.rt.free(pointer) == 0)
    libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libascendcl" in line}
    step(f"one library: {', '.join(libraries)}", len(libraries) == 1)


def camem():
    torch = load()
    torch.npu.set_device(0)
    from vllm_ascend.device_allocator.camem import CaMemAllocator, camem_available

    step("vllm-ascend's allocator is there", camem_available)
    allocator = CaMemAllocator.get_instance()
    hosts = [pattern(size * MIB, size) for size in (10, 64, 300)]
    with allocator.use_memory_pool(tag="weights"):
        weights = [host.to("npu:0") for host in hosts]
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.empty(200 * MIB, dtype=torch.uint8, device="npu:0")
    addresses = [tensor.data_ptr() for tensor in [*weights, cache]]
    step("weights are there", all(torch.equal(tensor.cpu(), host) for tensor, host in zip(weights, hosts)))
    awake = in_use(torch)
    for round in range(2):
        allocator.sleep(offload_tags=("weights",))
        released = awake - in_use(torch)
        step(f"asleep: {released // MIB} MiB released", released >= 574 * MIB)
        allocator.wake_up(["weights"])
        step("weights are awake", all(torch.equal(tensor.cpu(), host) for tensor, host in zip(weights, hosts)))
        allocator.wake_up(["kv_cache"])
        cache.copy_(pattern(200 * MIB, round))
        step("the cache is awake", torch.equal(cache.cpu(), pattern(200 * MIB, round)))
        step("at the same addresses", [tensor.data_ptr() for tensor in [*weights, cache]] == addresses)


if __name__ == "__main__":
    part = sys.argv[1]
    {
        "tensors": tensors,
        "expandable": expandable,
        "pluggable": pluggable,
        "processes": processes,
        "processes-expandable": processes,
        "operators": operators,
        "acl-before": acl_before,
        "acl-after": acl_after,
        "camem": camem,
    }[part]()
