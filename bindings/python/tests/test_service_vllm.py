"""The load format of vLLM against stand-ins for vLLM, PyTorch and the domain: what is asked for, and
in which order. Neither package is installed here."""

import contextlib
import sys
import types

import pytest
from ascend_vmm import service
from ascend_vmm.service import vllm as plugin


class StandIns:
    """What the loader calls, as a list."""

    def __init__(self):
        self.calls = []
        self.writes = True
        self.loaders = {}
        self.fails = None

    def module(self, name, **members):
        module = types.ModuleType(name)
        vars(module).update(members)
        return module


class Model:
    def eval(self):
        return self


class BaseModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config


def load_config(**extra):
    return types.SimpleNamespace(load_format="ascend-vmm", model_loader_extra_config=extra)


def configs(model="org/Llama-3 8B", rank=1, dtype="bf16"):
    parallel = types.SimpleNamespace(rank=rank, world_size=2, tensor_parallel_size=2, pipeline_parallel_size=1)
    return types.SimpleNamespace(parallel_config=parallel), types.SimpleNamespace(model=model, dtype=dtype)


@pytest.fixture
def vllm(monkeypatch):
    it = StandIns()

    class Inner:
        def __init__(self, config):
            assert config.load_format == "auto" and config.model_loader_extra_config == {}

        def download_model(self, model_config):
            it.calls.append("download")

        def load_model(self, *, vllm_config, model_config):
            it.calls.append("load")
            if it.fails:
                raise it.fails
            return Model()

    class Domain:
        name = "d"
        version = 1

        @property
        def writes(self):
            return it.writes

        @contextlib.contextmanager
        def pool(self, size, *, timeout):
            it.calls.append(("pool", size, timeout))
            yield
            it.calls.append("pool left")

        def commit(self, module, *, outside):
            it.calls.append(("commit", outside))

        def bind(self, module, *, strict):
            it.calls.append(("bind", strict))

        def sleep(self):
            it.calls.append("sleep")

        def wake(self, timeout):
            it.calls.append(("wake", timeout))

        def close(self):
            it.calls.append("close")

    class Client:
        def __init__(self, socket, *, program):
            it.calls.append(("client", socket, program))

        def open(self, name, mode, *, timeout):
            it.calls.append(("open", name, mode, timeout))
            return Domain()

    @contextlib.contextmanager
    def device(name):
        it.calls.append(("device", name))
        yield

    def register(name):
        return lambda loader: it.loaders.setdefault(name, loader)

    default = ["f32"]
    modules = {
        "torch": it.module(
            "torch",
            device=device,
            get_default_dtype=lambda: default[-1],
            set_default_dtype=lambda dtype: it.calls.append(("dtype", dtype)),
        ),
        "vllm": it.module("vllm"),
        "vllm.model_executor": it.module("vllm.model_executor"),
        "vllm.model_executor.model_loader": it.module(
            "vllm.model_executor.model_loader", register_model_loader=register, get_model_loader=Inner
        ),
        "vllm.model_executor.model_loader.base_loader": it.module("base_loader", BaseModelLoader=BaseModelLoader),
        "vllm.model_executor.model_loader.utils": it.module(
            "utils", initialize_model=lambda **options: it.calls.append(("initialize", sorted(options))) or Model()
        ),
        "ascend_vmm.service.torch": it.module("ascend_vmm.service.torch", Client=Client),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "_DOMAINS", [])
    plugin.register()
    return it


def test_the_first_engine_loads_within_the_pool_and_commits(vllm):
    loader = vllm.loaders["ascend-vmm"](load_config(socket="/s", bytes="16GiB", timeout=7))
    vllm_config, model_config = configs()
    model = loader.load_model(vllm_config=vllm_config, model_config=model_config)
    assert isinstance(model, Model)
    client, opened, *rest = vllm.calls
    assert client == ("client", "/s", "vllm rank 1")
    assert opened[0] == "open" and opened[1].startswith("Llama-3-8B/") and opened[1].endswith("/rank1")
    assert opened[2:] == ("write-or-read", 7.0)
    assert rest == [("pool", "16GiB", 7.0), "load", "pool left", ("commit", "copy")]
    plugin.WorkerExtension().sleep_weights()
    plugin.WorkerExtension().wake_weights(5)
    assert vllm.calls[-2:] == ["sleep", ("wake", 5)]


def test_the_next_engine_binds_and_reads_no_file(vllm):
    vllm.writes = False
    loader = vllm.loaders["ascend-vmm"](load_config(socket="/s", read_only=True))
    loader.download_model(None)
    vllm_config, model_config = configs()
    loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix="p")
    assert vllm.calls[1][2] == "read"
    assert vllm.calls[2:] == [
        ("dtype", "bf16"),
        ("device", "meta"),
        ("initialize", ["model_config", "prefix", "vllm_config"]),
        ("dtype", "f32"),
        ("bind", False),
    ]


def test_a_failure_while_loading_commits_nothing_and_closes(vllm):
    loader = vllm.loaders["ascend-vmm"](load_config(socket="/s", bytes="1GiB"))
    vllm.fails = OSError("no such file")
    vllm_config, model_config = configs()
    with pytest.raises(OSError, match="no such file"):
        loader.load_model(vllm_config=vllm_config, model_config=model_config)
    assert vllm.calls[-2:] == ["load", "close"]
    vllm.fails = None
    loader = vllm.loaders["ascend-vmm"](load_config(socket="/s"))
    with pytest.raises(service.InvalidCall, match="bytes"):
        loader.load_model(vllm_config=vllm_config, model_config=model_config)
    assert vllm.calls[-1] == "close"


def test_options_are_checked_and_domains_differ_where_weights_do(vllm):
    with pytest.raises(ValueError, match="sokcet.*socket"):
        vllm.loaders["ascend-vmm"](load_config(sokcet="/s"))
    pattern = "{model}/{config}/rank{rank}"
    others = [{}, {"rank": 0}, {"dtype": "fp8"}, {"model": "b"}]
    names = {plugin.domain_of(pattern, *configs(**other)) for other in others}
    assert len(names) == 4
    assert plugin.domain_of(pattern, *configs(model="/weights/q w+n/")).startswith("q-w-n/")
    with pytest.raises(service.InvalidCall):
        vllm.loaders["ascend-vmm"](load_config()).load_weights(None, None)


def test_without_vllm_the_plug_in_says_so_and_does_no_harm(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "vllm.model_executor.model_loader", raising=False)
    plugin.register()
    assert "ascend-vmm is not there" in caplog.text
