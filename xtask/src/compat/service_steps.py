"""The story of `cargo xtask compat service`: engines with an unmodified framework, and a service.

`service_steps.py story` starts the others: `service_steps.py engine NAME`, which do what they read,
line by line, and answer with a line.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
import warnings

warnings.filterwarnings("ignore")
if "ONE_HOOK" in os.environ:
    # Before the framework, and for all of its libraries: see one_hook.cpp.
    ctypes.CDLL(os.environ["ONE_HOOK"], mode=ctypes.RTLD_GLOBAL)

MIB = 1 << 20
DOMAIN = "small/tp0/weights"
LAYERS, WIDTH = 12, 512


def model(torch, width=WIDTH):
    """A small model with a tied head, buffers, and a tensor that is no parameter."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(width, 4 * width)
            self.down = torch.nn.Linear(4 * width, width, bias=False)
            self.norm = torch.nn.LayerNorm(width)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(32_000, width)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
            self.head = torch.nn.Linear(width, 32_000, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("positions", torch.arange(2048, dtype=torch.int32))

    return Model()


def write_file(path, seed):
    """Weights as a safetensors file; the hash of each tensor."""
    import numpy

    random = numpy.random.default_rng(seed)
    shapes = {"embed.weight": (32_000, WIDTH)}
    for layer in range(LAYERS):
        shapes.update({
            f"layers.{layer}.up.weight": (4 * WIDTH, WIDTH),
            f"layers.{layer}.up.bias": (4 * WIDTH,),
            f"layers.{layer}.down.weight": (WIDTH, 4 * WIDTH),
            f"layers.{layer}.norm.weight": (WIDTH,),
            f"layers.{layer}.norm.bias": (WIDTH,),
        })
    header, parts, hashes, at = {}, [], {}, 0
    for name, shape in shapes.items():
        data = random.standard_normal(shape, dtype=numpy.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
        hashes[name] = hashlib.sha256(data).hexdigest()
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return hashes


def read_file(torch, path):
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = bytearray(file.read())
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        flat = torch.frombuffer(data, dtype=torch.float32, count=(end - begin) // 4, offset=begin)
        yield name, flat.reshape(tensor["shape"])


# --- an engine


class Engine:
    def __init__(self):
        began = time.monotonic()
        import torch
        import torch_npu
        from ascend_vmm.service.torch import Client

        torch.npu.set_device(0)
        self.torch, self.npu = torch, torch_npu
        self.client = Client(os.environ["ASCEND_VMM_SERVICE"], program=sys.argv[2])
        self.domain = self.module = None
        took = time.monotonic() - began
        self.loaded = f"torch {torch.__version__}, torch_npu {torch_npu.__version__} in {took:.0f} s"

    def say_hello(self):
        return self.loaded

    def load(self, path, mode):
        """Reads a file into served memory, and commits."""
        domain = self.client.open(DOMAIN, mode, timeout=600)
        assert domain.writes
        began = time.monotonic()
        module = model(self.torch)
        tensors = dict(read_file(self.torch, path))
        module.load_state_dict({**tensors, "head.weight": tensors["embed.weight"]}, strict=False)
        with domain.pool("192MiB", timeout=600):
            module = module.to("npu")
            module.packed = self.npu.empty_with_format((64, 64), dtype=self.torch.float16, device="npu", acl_format=29)
        took = time.monotonic() - began
        self.pending = domain, module
        return {"seconds": took, "version": domain.version}

    def commit(self):
        began = time.monotonic()
        domain, module = self.pending
        domain.commit(module)
        self.domain, self.module = domain, module
        return {"seconds": time.monotonic() - began, **self.facts()}

    def bind(self):
        """Finds the weights, without a file."""
        began = time.monotonic()
        self.domain = self.client.open(DOMAIN, "read", timeout=600)
        opened = time.monotonic() - began
        with self.torch.device("meta"):
            self.module = model(self.torch)
        began = time.monotonic()
        self.domain.bind(self.module)
        return {"opened": opened, "bound": time.monotonic() - began, **self.facts()}

    def facts(self):
        domain, names = self.domain, self.domain.entries
        ties = self.module.head.weight is self.module.embed.weight
        counted = self.torch.npu.memory_allocated()
        form = int(self.npu.get_npu_format(self.module.packed))
        return {"version": domain.version, "bytes": domain.nbytes, "handles": domain.allocations,
                "tensors": len(names), "tied": ties, "counted": counted, "format": form}

    def hashes(self):
        def of(tensor):
            return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()

        return {name: of(tensor) for name, tensor in self.module.named_parameters()}

    def sleep(self):
        began = time.monotonic()
        self.domain.sleep()
        return time.monotonic() - began

    def wake(self):
        before = self.module.embed.weight.data_ptr()
        began = time.monotonic()
        self.domain.wake(timeout=600)
        took = time.monotonic() - began
        assert self.module.embed.weight.data_ptr() == before
        return took

    def newer(self):
        return self.client.wait(DOMAIN, self.domain.version, timeout=600)

    def close_refused(self):
        try:
            self.domain.close()
        except Exception as error:
            return str(error)

    def again(self):
        """Lets the module go, and binds what is served by now."""
        self.module = None
        self.domain.close()
        return self.bind()

    def wrong(self):
        """A model that is not the one that is served."""
        with self.torch.device("meta"):
            other = model(self.torch, width=256)
        domain = self.client.open(DOMAIN, "read", timeout=600)
        before = {name: id(tensor) for name, tensor in other.named_parameters()}
        try:
            domain.bind(other)
        except Exception as error:
            assert {name: id(tensor) for name, tensor in other.named_parameters()} == before
            domain.close()
            return str(error)

    def too_small(self):
        """A pool that is too small is an error with numbers, and nothing is committed."""
        domain = self.client.open("too-small", "write", timeout=600)
        module = None
        try:
            with domain.pool("4MiB", timeout=600):
                module = model(self.torch).to("npu")
        except MemoryError as error:
            return str(error)
        return repr(module)


def engine():
    it = Engine()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = getattr(it, name)(*arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER " + json.dumps(answer), flush=True)


# --- the story


class Process:
    """An engine, from outside."""

    def __init__(self, name):
        command = [sys.executable, __file__, "engine", name]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, *call):
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer = json.loads(line[7:])
                if isinstance(answer, dict) and "error" in answer:
                    fail(f"{self.name}: {answer['error']}")
                return answer
        fail(f"{self.name} has ended")

    def do(self, *call):
        self.send(*call)
        return self.answer()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def fail(what):
    print(f"  FAILED {what}", flush=True)
    raise SystemExit(1)


def step(name, holds=True):
    if not holds:
        fail(name)
    print(f"  ok    {name}", flush=True)


def tool(*arguments):
    command = [sys.executable, "-m", "ascend_vmm", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def status():
    return json.loads(tool("service", "top", "--json"))


def until(what, holds):
    end = time.monotonic() + 120
    while not holds():
        if time.monotonic() > end:
            fail(what)
        time.sleep(0.1)


def ms(seconds):
    return f"{seconds * 1000:.0f} ms"


def story(started):
    def begin(*command):
        command = [sys.executable, "-m", "ascend_vmm", *command]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    def engine(name):
        started.append(Process(name))
        return started[-1]

    socket = os.environ["ASCEND_VMM_SERVICE"]
    path = os.path.abspath("small.safetensors")
    keeper = begin("serve", "--socket", socket)
    step(keeper.stdout.readline().strip())
    first = write_file(path, 1)
    file_mib = os.path.getsize(path) // MIB
    a = engine("A")
    step(f"A: {a.do('say_hello')}")
    loaded = a.do("load", path, "write-or-read")
    done = a.do("commit")
    step(f"A loads {file_mib} MiB of safetensors into served memory in {ms(loaded['seconds'])}, and commits "
         f"{done['tensors']} tensors in {done['handles']} handle(s) in {ms(done['seconds'])}", a.do("hashes") == first)
    refused = a.do("close_refused")
    step(f"A may not close while its tensors live: {refused[:60]}…", "tensors of" in refused)
    a.kill()
    os.remove(path)
    step("A is killed with -9, and its file is gone")
    b = engine("B")
    b.do("say_hello")
    found = b.do("bind")
    step(f"B finds {found['bytes'] // MIB} MiB: open and map {ms(found['opened'])}, {found['tensors']} tensors "
         f"{ms(found['bound'])}", found["version"] == 1)
    step("its bytes are those of the file, and its head is tied", b.do("hashes") == first and found["tied"])
    step("a matrix in the NPU's own format keeps it", done["format"] == found["format"] == 29)
    step("the framework counts none of it", found["counted"] < MIB)
    c, d = engine("C"), engine("D")
    for reader in (c, d):
        reader.send("bind")
    both = [reader.answer() for reader in (c, d)]
    step("C and D read at the same time", all(reader.do("hashes") == first for reader in (c, d)) and len(both) == 2)
    held = status()["devices"][0]["held"]
    step(f"the service holds {held // MIB} MiB for three engines", status()["domains"][0]["readers"] == 3)
    slept = b.do("sleep")
    os.kill(status()["front"], signal.SIGKILL)
    step(f"B sleeps ({ms(slept)}), and the front is killed")
    woke = b.do("wake")
    step(f"B wakes at the same addresses ({ms(woke)})", b.do("hashes") == first)
    c.do("sleep")
    front = status()["front"]
    begin("serve", "--replace", "--socket", socket)
    until("the new front serves", lambda: status()["front"] != front)
    c.do("wake")
    step("another front takes its place while C sleeps, and C wakes", c.do("hashes") == first)
    second = write_file(path, 2)
    d.do("load", path, "write")
    os.remove(path)
    step("D writes version 2; until it commits, version 1 is served", c.do("again")["version"] == 1)
    d.do("commit")
    step("D commits: B hears of version 2, and reads version 1 as before",
         b.do("newer") == 2 and b.do("hashes") == first)
    step("B lets go and binds version 2", b.do("again")["version"] == 2 and b.do("hashes") == second)
    wrong = c.do("wrong")
    step(f"a wrong model is refused by name: {wrong[:110]}…", "embed.weight" in wrong)
    small = c.do("too_small")
    step(f"a pool that is too small: {small[:110]}…", "left; give the pool more bytes" in small)
    for reader in (b, c, d):
        reader.process.stdin.close()
        step(f"{reader.name} ends with 0", reader.process.wait() == 0)
    until("the readers are gone", lambda: status()["domains"][0]["readers"] == 0)
    keeper.kill()
    step("the service is killed: its memory ends with it")


def main():
    started = []
    try:
        story(started)
    finally:
        for it in started:
            with contextlib.suppress(Exception):
                it.kill()


if __name__ == "__main__":
    engine() if sys.argv[1] == "engine" else main()
