"""Planted faults: real loads by vLLM in which one thing goes wrong, each of which the diagnosis must name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from gptoss_debug.checkpoints.names import PARTS, layer_of
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.engines.vllm_faults import (
    before_repack,
    changed_bias_permutation,
    changed_stream,
    down_bias_on_every_rank,
)
from gptoss_debug.engines.vllm_reload import Weights
from gptoss_debug.errors import GptOssDebugError

LAYER = 2
"""The layer in which faults of one layer are planted."""


@dataclass(frozen=True)
class Fault:
    """A fault that can be planted into a load of the toy.

    Attributes
    ----------
    name
        What it is called.
    class_id
        The class that the diagnosis must give it.
    words
        A piece of the cause that it must name.
    parts
        The tensors that become wrong.
    layers
        The layers, or None for all.
    plant
        Makes the block in which a load goes wrong so.
    ranks
        On how many ranks it can be planted.
    """

    name: str
    class_id: str
    words: str
    parts: tuple[str, ...]
    layers: tuple[int, ...] | None
    plant: Callable[[], AbstractContextManager[None]]
    ranks: int = 1


def _each(change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Callable[[], AbstractContextManager[None]]:
    """Plant a change of single checkpoint tensors; None leaves the tensor out."""

    def stream(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            changed = change(name, tensor)
            if changed is not None:
                yield name, changed

    return lambda: changed_stream(stream)


def _in_layer(
    ending: str | tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[], AbstractContextManager[None]]:
    """Plant a change of one layer's tensors whose names end so."""
    return _each(lambda name, tensor: change(tensor) if layer_of(name) == LAYER and name.endswith(ending) else tensor)


def _gate_up_exchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(1, (-1, 2)).flip(2).flatten(1, 2).contiguous()


def _halves(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1).contiguous()


def _nibbles(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor << 4) | (tensor >> 4)


def _first_expert(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.cat([change(tensor[:1]), tensor[1:]])


def _other_layer(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if layer_of(name) == LAYER and name.endswith("down_proj_blocks"):
        return Checkpoint.open(toy_path("A")).read(name.replace(f".{LAYER}.", f".{LAYER - 1}."))
    return tensor


def _from_b(name: str, tensor: torch.Tensor) -> torch.Tensor:
    late = (layer_of(name) or 0) >= LAYER and ".mlp.experts." in name
    return Checkpoint.open(toy_path("B")).read(name) if late else tensor


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_fill(1, torch.tensor([7]), torch.nan)


def _fill_padding(part: str, value: int) -> Callable[[nn.Module], None]:
    def fill(module: nn.Module) -> None:
        getattr(module, part).data[:, -3:] = value

    return fill


def _ranks_exchanged(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.shape[1] // 2
    return torch.cat([tensor[:, half:], tensor[:, :half]], dim=1)


GATE_UP = ("w13_weight", "w13_weight_scale", "w13_bias")
_STREAM_GATE_UP = ("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias")

FAULTS: tuple[Fault, ...] = (
    Fault(
        "bias_not_permuted", "B1", "'permute bias' was not applied", ("w13_bias", "w2_bias"), None,
        lambda: changed_bias_permutation(lambda right, bias: bias),
    ),
    Fault(
        "bias_permuted_twice", "B1", "'permute bias' was applied twice", ("w13_bias", "w2_bias"), None,
        lambda: changed_bias_permutation(lambda right, bias: right(right(bias))),
    ),
    Fault("gate_up_exchanged", "B3", "exchanged", GATE_UP, (LAYER,), _in_layer(_STREAM_GATE_UP, _gate_up_exchanged)),
    Fault("gate_up_in_halves", "B3", "two halves", GATE_UP, (LAYER,), _in_layer(_STREAM_GATE_UP, _halves)),
    Fault("gate_up_bias_exchanged", "B3", "exchanged", ("w13_bias",), (LAYER,),
          _in_layer("gate_up_proj_bias", _gate_up_exchanged)),
    Fault("nibbles_exchanged", "B2", "nibble", ("w2_weight",), (LAYER,), _in_layer("down_proj_blocks", _nibbles)),
    Fault("one_expert_nibbles_exchanged", "B2", "nibble", ("w13_weight",), (LAYER,),
          _in_layer("gate_up_proj_blocks", _first_expert(_nibbles))),
    Fault("experts_reversed", "D3", "expert", ("w2_weight",), (LAYER,),
          _in_layer("down_proj_blocks", lambda t: t.flip(0).contiguous())),
    Fault("experts_rolled", "D3", "expert", ("w2_bias",), (LAYER,),
          _in_layer("down_proj_bias", lambda t: t.roll(1, 0))),
    Fault("another_layer", "D3", f"layer {LAYER - 1}", ("w2_weight",), (LAYER,), _each(_other_layer)),
    Fault("bias_never_written", "E1", "never written", ("w13_bias",), (LAYER,),
          _in_layer("gate_up_proj_bias", lambda t: None)),
    Fault("weight_never_written", "E1", "never written", ("w2_weight",), (LAYER,),
          _in_layer("down_proj_blocks", lambda t: None)),
    Fault("late_layers_of_the_previous_model", "E2", "previous", PARTS, (2, 3),
          _each(_from_b)),
    Fault("dirty_bias_padding", "C1", "padding", ("w13_bias",), None,
          lambda: before_repack(_fill_padding("w13_bias", 1))),
    Fault("dirty_weight_padding", "C1", "padding", ("w13_weight",), None,
          lambda: before_repack(_fill_padding("w13_weight", 0x22))),
    Fault("dirty_scale_padding", "C1", "padding", ("w2_weight_scale",), None,
          lambda: before_repack(_fill_padding("w2_weight_scale", 0x7F))),
    Fault("scales_shifted", "I1", "2^1 times", ("w2_weight_scale",), (LAYER,),
          _in_layer("down_proj_scales", _first_expert(lambda t: t + 1))),
    Fault("bias_not_finite", "I1", "NaN", ("w13_bias",), (LAYER,), _in_layer("gate_up_proj_bias", _nan)),
    Fault("bias_in_float8", "I1", "float8", ("w2_bias",), (LAYER,),
          _in_layer("down_proj_bias", lambda t: t.to(torch.float8_e4m3fn).to(t.dtype))),
    Fault("shares_exchanged", "D1", "another rank's share", ("w13_bias",), (LAYER,),
          _in_layer("gate_up_proj_bias", _ranks_exchanged), ranks=2),
    Fault("down_bias_on_every_rank", "D1", "the share of another rank", ("w2_bias",), None,
          down_bias_on_every_rank, ranks=2),
)  # fmt: skip
"""Every fault that can be planted into a load of the toy."""


def fault(name: str) -> Fault:
    """Return a fault by its name.

    Raises
    ------
    GptOssDebugError
        If there is none of that name.
    """
    for one in FAULTS:
        if one.name == name:
            return one
    raise GptOssDebugError("is no fault that can be planted", where=name, expected=", ".join(f.name for f in FAULTS))
