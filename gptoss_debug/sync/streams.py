"""Update streams as trainers send them, and as they should not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gptoss_debug.checkpoints.names import layer_of

Tensors = Sequence[tuple[str, torch.Tensor]]
Expected = Literal["loaded", "refused", "either"]


@dataclass(frozen=True)
class Stream:
    """A way of sending an update.

    Attributes
    ----------
    name
        What it is called in reports.
    send
        All tensors of a model -> what is sent.
    expected
        ``loaded``: the result must be right. ``refused``: it must raise and change nothing. ``either``:
        one of the two.
    class_id
        The class of ``failures.md`` that a fault here belongs to.
    """

    name: str
    send: Callable[[Tensors], Iterator[tuple[str, torch.Tensor]]]
    expected: Expected
    class_id: str


class Interrupted(Exception):
    """The trainer died in the middle of its update."""


def _interrupted(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors[: len(tensors) // 2]
    raise Interrupted("the trainer died in the middle of its update")


def _last(tensors: Tensors, ending: str) -> str:
    """Return the last layer's tensor whose name ends so."""
    return max((n for n, _ in tensors if n.endswith(ending)), key=lambda name: layer_of(name) or 0)


def _missing(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    left_out = _last(tensors, "mlp.experts.gate_up_proj_bias")
    return ((name, tensor) for name, tensor in tensors if name != left_out)


def _duplicated(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    for number, (name, tensor) in enumerate(tensors):
        yield name, tensor
        if number == len(tensors) // 2:
            yield name, tensor


def _misshapen(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    cut = _last(tensors, "mlp.experts.down_proj_bias")
    for name, tensor in tensors:
        yield name, tensor[..., :-1].contiguous() if name == cut else tensor


def _not_finite(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    spoilt = _last(tensors, "self_attn.sinks")
    for name, tensor in tensors:
        yield name, torch.full_like(tensor, torch.nan) if name == spoilt else tensor


def _renamed(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    renamed = _last(tensors, "self_attn.o_proj.bias")
    for name, tensor in tensors:
        yield name.replace("o_proj", "out_proj") if name == renamed else name, tensor


STREAMS: tuple[Stream, ...] = (
    Stream("out of order", lambda tensors: iter(list(tensors)[::-1]), "loaded", "E1"),
    Stream("interrupted", _interrupted, "refused", "E3"),
    Stream("a tensor missing", _missing, "refused", "E3"),
    Stream("a tensor twice", _duplicated, "either", "E1"),
    Stream("a wrong shape", _misshapen, "refused", "D1"),
    Stream("a NaN", _not_finite, "refused", "I1"),
    Stream("an unknown name", _renamed, "refused", "G2"),
    Stream("nothing at all", lambda tensors: iter(()), "refused", "H1"),
)
"""What the oracles send. Pieces (``put(..., at=...)``) are the fixed loader's alone, and tested with it."""
