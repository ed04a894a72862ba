"""The load format `ascend-vmm` of vLLM: weights that outlive the engine.

    vllm serve MODEL --load-format ascend-vmm \\
        --model-loader-extra-config '{"socket": "/run/ascend-vmm.sock", "bytes": "16GiB"}'

The first engine of a rank loads the model as it is configured, into memory of the service, and
commits it after post-processing. The engines after it build the model on the meta device and bind
what is there. vLLM finds this by the entry point `vllm.general_plugins`.

Options, in `--model-loader-extra-config`:

* `socket`: of the service; ASCEND_VMM_SERVICE if it is left out.
* `domain`: with `{model}`, `{config}` and `{rank}`, where `config` stands for all that decides how
  the weights look. The default is `{model}/{config}/rank{rank}`.
* `bytes`: at least those of the weights of one rank, which a writer needs while it loads. What is not
  used is given back, in pieces of 1 GiB.
* `read_only`: true for engines that never load the model themselves.
* `timeout`: in seconds, for the engine that loads, and for memory; 600 if it is left out.

What a model's post-processing sets besides tensors (functions, kernels, Python objects) is not
served: the second engine has it only as its constructor makes it.
"""

import copy
import hashlib
import json
import logging
import os
import re
from typing import Any, Dict, List

from . import InvalidCall, _errors

_logger = logging.getLogger("ascend_vmm.service")

FORMAT = "ascend-vmm"
_OPTIONS = {"socket", "domain", "bytes", "read_only", "timeout"}
_DOMAINS: List[Any] = []
"""What this worker has open: one for each model that it loaded."""


def _options(load_config) -> Dict[str, Any]:
    options = load_config.model_loader_extra_config or {}
    if isinstance(options, str):
        options = json.loads(options)
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise ValueError(f"unknown options of the load format {FORMAT}: {', '.join(unknown)}; "
                         f"they are {', '.join(sorted(_OPTIONS))}")
    return dict(options)


def _config(vllm_config, model_config) -> str:
    """A word for everything that decides how the weights of a rank look."""
    parallel = vllm_config.parallel_config
    facts = [
        str(model_config.model),
        str(getattr(model_config, "revision", None)),
        str(model_config.dtype),
        str(getattr(model_config, "quantization", None)),
        str(parallel.world_size),
        str(parallel.tensor_parallel_size),
        str(parallel.pipeline_parallel_size),
        str(getattr(parallel, "enable_expert_parallel", False)),
        # The NPU's own format of matrices.
        os.environ.get("VLLM_ASCEND_ENABLE_NZ", ""),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]


def domain_of(pattern: str, vllm_config, model_config) -> str:
    """The name of the domain of this rank."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(str(model_config.model).rstrip("/")))
    model = model.strip("-.") or "model"
    return pattern.format(model=model, config=_config(vllm_config, model_config), rank=vllm_config.parallel_config.rank)


def _loader_class():
    """The loader, on the base class of the vLLM that is installed."""
    import torch  # type: ignore
    from vllm.model_executor.model_loader import get_model_loader  # type: ignore
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # type: ignore
    from vllm.model_executor.model_loader.utils import initialize_model  # type: ignore

    class AscendVmmLoader(BaseModelLoader):
        """Weights in memory of the service."""

        def __init__(self, load_config):
            super().__init__(load_config)
            self.options = _options(load_config)
            inner = copy.copy(load_config)
            inner.load_format, inner.model_loader_extra_config = "auto", {}
            self.inner = get_model_loader(inner)

        def download_model(self, model_config) -> None:
            if not self.options.get("read_only"):
                self.inner.download_model(model_config)

        def load_weights(self, model, model_config) -> None:
            raise InvalidCall(f"the load format {FORMAT} serves whole models; start the engine again for other weights")

        def load_model(self, vllm_config, model_config, **more):
            from .torch import Client

            options = self.options
            timeout = float(options.get("timeout", 600))
            name = domain_of(options.get("domain", "{model}/{config}/rank{rank}"), vllm_config, model_config)
            mode = "read" if options.get("read_only") else "write-or-read"
            domain = Client(options.get("socket"), program=f"vllm rank {vllm_config.parallel_config.rank}").open(
                name, mode, timeout=timeout)
            try:
                model = self._load(domain, vllm_config, model_config, timeout, more)
            except BaseException:
                _close(domain)
                raise
            _DOMAINS.append(domain)
            return model.eval()

        def _load(self, domain, vllm_config, model_config, timeout, more):
            if domain.writes:
                size = self.options.get("bytes")
                if size is None:
                    raise InvalidCall(f"{domain.name} is empty, and the option bytes is missing; say how large the "
                                      "weights of one rank are")
                with domain.pool(size, timeout=timeout):
                    model = self.inner.load_model(vllm_config=vllm_config, model_config=model_config, **more)
                domain.commit(model, outside="copy")
                _logger.info("wrote %s, version %d", domain.name, domain.version)
                return model
            default = torch.get_default_dtype()
            torch.set_default_dtype(model_config.dtype)
            try:
                with torch.device("meta"):
                    model = initialize_model(vllm_config=vllm_config, model_config=model_config, **more)
            finally:
                torch.set_default_dtype(default)
            domain.bind(model, strict=False)
            _logger.info("found %s, version %d: no file was read", domain.name, domain.version)
            return model

    return AscendVmmLoader


def _close(domain):
    """After a failure: its memory is unmapped as soon as no tensor has it."""
    try:
        domain.close()
    except _errors.ServiceError as error:
        _logger.debug("%s stays open: %s", domain.name, error)


class WorkerExtension:
    """`--worker-extension-cls ascend_vmm.service.vllm.WorkerExtension`: sleep and wake of the
    weights, by `collective_rpc("sleep_weights")` and `collective_rpc("wake_weights")`.

    The engine must be idle. Caches of keys and values are vLLM's own, and stay.
    """

    def sleep_weights(self) -> None:
        """Unmaps the weights, which the service goes on holding."""
        for domain in _DOMAINS:
            domain.sleep()

    def wake_weights(self, timeout: float = 600) -> None:
        """Maps them again, at the same addresses."""
        for domain in _DOMAINS:
            domain.wake(timeout)


def register() -> None:
    """Called by vLLM in each of its processes."""
    try:
        from vllm.model_executor.model_loader import register_model_loader  # type: ignore
    except ImportError as error:
        _logger.warning("the load format %s is not there: %s", FORMAT, error)
        return
    register_model_loader(FORMAT)(_loader_class())
