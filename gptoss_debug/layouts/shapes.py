"""Say in words what a shape is, and which steps lie between two shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import PARTS, Format, Part, expert_name
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts.catalog import BACKENDS, Backend, Placement, chain_for, checkpoint_shape
from gptoss_debug.layouts.steps import Step

Shape = tuple[int, ...]

OTHER_RANKS = (1, 2, 4, 8, 16)
"""Tensor-parallel sizes tried when a shape does not fit the one that was given."""


@dataclass(frozen=True)
class Reading:
    """One thing that a shape can be: a place on a chain.

    Attributes
    ----------
    part, source, backend, tp
        The chain.
    shape
        The shape at that place.
    at
        How many steps have been done.
    steps
        All steps of the chain.
    shapes
        The shape before the first step and after each.
    """

    part: Part
    source: Format
    backend: str
    tp: int
    shape: Shape
    at: int
    steps: tuple[Step, ...]
    shapes: tuple[Shape, ...]

    def __str__(self) -> str:
        name = expert_name(0, self.part, self.source).rpartition(".")[2]
        text = f"{self.part} ({self.source.upper()} {name}"
        if self.at == 0:
            return text + ", as in the checkpoint)"
        done = [_past(step) for step in self.steps[: self.at]]
        backend = "unquantised" if self.backend == "bf16" else self.backend
        share = f" for one rank of TP={self.tp}" if self.tp > 1 else ""
        if self.at == len(self.steps):
            return f"{text}) as the {backend} backend keeps it{share}: {', '.join(done)}"
        return f"{text}) on its way to the {backend} backend{share}: {', '.join(done)}"


@dataclass(frozen=True)
class Explanation:
    """What two shapes are and what lies between them.

    Attributes
    ----------
    first, second
        The shapes.
    readings
        All pairs of readings that fit, the likeliest first; empty if a shape is unknown.
    unknown
        A sentence for each shape that is none of this model's.
    config
        The model's sizes.
    """

    first: Shape
    second: Shape
    readings: tuple[tuple[Reading, Reading], ...]
    unknown: tuple[str, ...]
    config: ModelConfig

    @property
    def between(self) -> tuple[str, ...]:
        """Return the steps from the less to the more processed of the two, each with its shapes."""
        return tuple(
            f"{step.name}: {list(before)} -> {list(after)}   ({step.describe()})" for step, before, after in self._way()
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return in what the two differ: ``format``, ``sharding``, ``padding``, ``layout``."""
        kinds = {
            "quantise": "format",
            "cast": "format",
            "shard": "sharding",
            "first rank only": "sharding",
            "pad": "padding",
        }
        return tuple(dict.fromkeys(kinds.get(step.name, "layout") for step, _, _ in self._way()))

    def _way(self) -> list[tuple[Step, Shape, Shape]]:
        if not self.readings or self.readings[0][0].part != self.readings[0][1].part:
            return []
        early, late = sorted(self.readings[0], key=lambda r: (r.backend != "bf16", r.at))
        # The two may stand on chains of different backends: what both have done is left out.
        done = [step.name for step in early.steps[: early.at]]
        value = torch.empty(
            early.shape,
            dtype=torch.uint8
            if "quantise" in done or (early.source == "mxfp4" and not early.part.endswith("_bias"))
            else torch.bfloat16,
            device="meta",
        )
        way = []
        for step in late.steps[: late.at]:
            if step.name in done:
                done.remove(step.name)
                continue
            after = step.forward(value)
            way.append((step, tuple(value.shape), tuple(after.shape)))
            value = after
        return way

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return {
            "first": list(self.first),
            "second": list(self.second),
            "readings": [[str(a), str(b)] for a, b in self.readings],
            "between": list(self.between),
            "unknown": list(self.unknown),
        }

    def __str__(self) -> str:
        if self.unknown:
            return "\n".join(self.unknown)
        first, second = self.readings[0]
        lines = [f"{list(self.first)} is {first}.", f"{list(self.second)} is {second}."]
        if self.between:
            lines += ["Between them lie:", *(f"  {line}" for line in self.between)]
        elif first.part == second.part:
            lines.append("No step lies between them.")
        if first.part != second.part:
            lines.append("They are different tensors.")
        elif self.kinds:
            lines.append(f"So the mismatch is one of {_and(self.kinds)}.")
        for shape, chosen, found in (
            (self.first, first, [a for a, _ in self.readings]),
            (self.second, second, [b for _, b in self.readings]),
        ):
            others = dict.fromkeys(str(r) for r in found if r.part != chosen.part)
            lines += [f"By its shape alone {list(shape)} could also be {other}." for other in list(others)[:2]]
        return "\n".join(lines)


def parse_shape(text: str) -> Shape:
    """Read ``"[32, 192, 6144]"`` (also with parentheses, ``x`` or spaces).

    Raises
    ------
    LayoutError
        If it holds anything but positive whole numbers.
    """
    pieces = re.split(r"[\s,x×]+", text.strip().strip("[]()").strip())
    if not pieces or not all(piece.isdecimal() and int(piece) > 0 for piece in pieces):
        raise LayoutError("is no shape", where=repr(text), expected="sizes as in [32,192,6144]")
    return tuple(map(int, pieces))


def explain_shapes(a: Shape, b: Shape, config: ModelConfig, tp: int = 1) -> Explanation:
    """Say what each of two shapes is, and which steps lie between them.

    Every chain of the catalog is walked, for the given number of tensor-parallel ranks; where a shape
    fits none, other numbers of ranks are tried and named.

    Parameters
    ----------
    a, b
        Shapes, from an error message say: ``(32, 192, 6144)`` and ``(32, 2880, 2880)``.
    config
        The model's sizes.
    tp
        Tensor-parallel ranks.
    """
    first, second = _readings(a, config, tp), _readings(b, config, tp)
    unknown = tuple(_unknown(shape, config, tp) for shape, found in ((a, first), (b, second)) if not found)
    pairs = [(x, y) for x in first for y in second]
    return Explanation(a, b, tuple(sorted(pairs, key=_unlikely)), unknown, config)


def _unlikely(pair: tuple[Reading, Reading]) -> tuple[bool, bool, int, int]:
    """Sort key: one tensor at two places first, of one format, then places that a person meets, then short ways."""
    x, y = pair
    # A person meets a checkpoint's or an engine's own shape, or the one that a loader is handed.
    unseen = sum(r.at not in (0, len(r.steps)) and r.steps[r.at - 1].name != "shard" for r in pair)
    return x.part != y.part, x.source != y.source, unseen, abs(x.at - y.at)


def _readings(shape: Shape, config: ModelConfig, tp: int) -> list[Reading]:
    found: dict[tuple[Part, Format, Shape, tuple[Step, ...]], Reading] = {}
    for reading in _places(config, tp):
        if reading.shape == shape:
            key = reading.part, reading.source, reading.shape, reading.steps[: reading.at]
            found.setdefault(key, reading)
    # Of a run of places with one shape (a re-ordering keeps it) the last says most.
    best: dict[tuple[Part, Format, str], Reading] = {}
    for reading in found.values():
        best[reading.part, reading.source, reading.backend] = reading
    return list(best.values())


def _places(config: ModelConfig, tp: int) -> Iterator[Reading]:
    kinds: list[tuple[Format, Backend]] = [
        ("bf16", BACKENDS["bf16"]),
        ("mxfp4", BACKENDS["marlin"]),
        ("mxfp4", BACKENDS["raw"]),
        ("bf16", BACKENDS["marlin"]),
    ]
    for source, kind in kinds:
        for part in PARTS:
            if (part.endswith("_scale") and not kind.quantised) or (
                # A bias is the same in both formats, and a float weight is no scale yet.
                source == "bf16" and kind.quantised and not part.endswith("_weight")
            ):
                continue
            # Under an uneven cut the last rank's share is smaller.
            for rank in dict.fromkeys((0, tp - 1)):
                try:
                    chain = chain_for(part, source, kind, config, Placement(rank, tp))
                    shapes = chain.shapes(*checkpoint_shape(part, source, config))
                except LayoutError:
                    continue  # sizes that this backend cannot hold
                for at, shape in enumerate(shapes):
                    yield Reading(part, source, kind.name, tp, shape, at, chain.steps, tuple(shapes))


def _unknown(shape: Shape, config: ModelConfig, tp: int) -> str:
    text = f"{list(shape)} is no expert tensor of this model at TP={tp}"
    for other in OTHER_RANKS:
        if other != tp and (found := _readings(shape, config, other)):
            return f"{text}; at TP={other} it is {found[0]}."
    if shape and shape[0] != config.num_experts:
        return f"{text}: its first axis is {shape[0]}, and the model has {config.num_experts} experts."
    return f"{text}, nor at any of TP={', '.join(map(str, OTHER_RANKS))}."


def _past(step: Step) -> str:
    return {
        "transpose": "transposed",
        "quantise": "quantised",
        "flatten blocks": "blocks flattened",
        "tile": "tiled",
        "pack": "packed into int32",
        "permute scales": "scales permuted",
        "permute bias": "bias permuted",
        "view": "viewed as e8m0",
        "cast": "cast to BF16",
        "first rank only": "kept on the first rank",
        "shard": f"cut to {getattr(step, 'what', '').rpartition(': ')[2]} "
        f"{getattr(step, 'start', 0)}:{getattr(step, 'stop', 0)}",
        "pad": f"axis {getattr(step, 'axis', 0)} padded {getattr(step, 'size', 0)} to {getattr(step, 'padded', 0)}",
    }.get(step.name, step.name)


def _and(words: tuple[str, ...]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
