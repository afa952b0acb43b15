"""The layout probe: measure where an engine's own conversion puts every element.

Tensors whose values spell bits of each element's index go through the conversion; what comes out,
read element by element, spells the permutation. Nothing is assumed about the layout but that elements
are moved, not computed with. The chain of the catalog is then held against the measurement.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import pandas as pd
import torch

from gptoss_debug.checkpoints.names import PARTS, Part
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts import mxfp4
from gptoss_debug.layouts.catalog import Backend
from gptoss_debug.layouts.chain import Chain

Convert = Callable[[dict[Part, torch.Tensor]], dict[Part, torch.Tensor]]
"""An engine's conversion of one layer: all six tensors before the repack to those after it."""

# Bits of the index that one element carries, and the value that stands for zero. Scales stay clear of
# 255 (NaN) and of the subnormal powers of two; a bias counts in whole numbers that bfloat16 holds exactly.
_BITS = {"weight": 4, "scale": 7, "bias": 8}
_SCALE_ZERO = 64


@dataclass(frozen=True)
class PartProbe:
    """The measured layout of one tensor.

    Attributes
    ----------
    part
        Which tensor.
    elements
        Elements of one expert: codes, scales or floats.
    moved
        Those that the conversion puts elsewhere than where the raw layout has them.
    agrees
        Whether the catalog's chain gives the measured permutation.
    first
        If not, the first output position at which they part: ``(position, measured, chain)``, as flat
        element numbers.
    """

    part: Part
    elements: int
    moved: int
    agrees: bool
    first: tuple[int, int, int] | None


@dataclass(frozen=True)
class LayoutProbe:
    """The measured layout of a backend, part by part, and whether the known patterns describe it."""

    backend: str
    engine: str
    kernels: str
    parts: tuple[PartProbe, ...]

    @property
    def agrees(self) -> bool:
        """Whether every part follows its chain."""
        return all(part.agrees for part in self.parts)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each tensor."""
        return pd.DataFrame([asdict(p) for p in self.parts], columns=[f.name for f in fields(PartProbe)])

    def to_json(self) -> dict[str, Any]:
        """Return the probe as JSON values."""
        return asdict(self) | {"agrees": self.agrees}

    def __str__(self) -> str:
        how = "measured through its CPU stand-in ops" if self.kernels == "emulated" else "measured on its kernels"
        head = f"{self.engine}, {self.backend} backend ({how})"
        if self.agrees:
            return f"{head}: all {len(self.parts)} tensors follow the known patterns"
        wrong = [p for p in self.parts if not p.agrees]
        lines = [f"{head}: another layout than the one known here"]
        for part in wrong:
            assert part.first is not None
            position, measured, known = part.first
            lines.append(
                f"  {part.part}: output element {position} is input element {measured}, the pattern says {known}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>" + self.to_frame().to_html(index=False, border=0)


def probe(
    convert: Convert, kind: Backend, *, engine: str, kernels: str, hidden: int = 512, intermediate: int = 384
) -> LayoutProbe:
    """Measure a backend's layout and compare it with the catalog's.

    Parameters
    ----------
    convert
        The engine's own conversion.
    kind
        The backend whose chains should describe it.
    engine, kernels
        What was measured, for the report.
    hidden, intermediate
        Sizes of the one-expert layer that is sent through; multiples of what the backend pads to.

    Raises
    ------
    LayoutError
        If the conversion loses or doubles elements: then it is no re-ordering.
    """
    shapes: dict[Part, tuple[int, ...]] = {
        "w13_weight": (1, 2 * intermediate, hidden // 2),
        "w13_weight_scale": (1, 2 * intermediate, hidden // mxfp4.BLOCK),
        "w13_bias": (1, 2 * intermediate),
        "w2_weight": (1, hidden, intermediate // 2),
        "w2_weight_scale": (1, hidden, intermediate // mxfp4.BLOCK),
        "w2_bias": (1, hidden),
    }
    tails = {part: Chain(kind.steps(part)) for part in PARTS}
    measured = _measure(convert, shapes)
    known = _measure(lambda tensors: {part: tails[part].forward(tensor) for part, tensor in tensors.items()}, shapes)
    parts = []
    for part in PARTS:
        found, expected = measured[part], known[part]
        if not torch.equal(found.sort().values, torch.arange(found.numel())):
            raise LayoutError(
                f"{engine}: the conversion of {part} is no re-ordering: it computes, loses or doubles elements"
            )
        different = (found != expected).nonzero().flatten()
        where = int(different[0]) if len(different) else None
        parts.append(
            PartProbe(
                part,
                found.numel(),
                int((found != torch.arange(found.numel())).sum()),
                where is None,
                None if where is None else (where, int(found[where]), int(expected[where])),
            )
        )
    return LayoutProbe(kind.name, engine, kernels, tuple(parts))


def _measure(convert: Convert, shapes: dict[Part, tuple[int, ...]]) -> dict[Part, torch.Tensor]:
    """Return for each part the input element number of every output element, ``[elements]`` int64."""
    counts = {part: _count(part, shape) for part, shape in shapes.items()}
    rounds = max(-(-(count - 1).bit_length() // _BITS[_sort(part)]) for part, count in counts.items())
    found = {part: torch.zeros(count, dtype=torch.int64) for part, count in counts.items()}
    for turn in range(rounds):
        digits = {}
        for part, shape in shapes.items():
            bits = _BITS[_sort(part)]
            digits[part] = _write(part, (torch.arange(counts[part]) >> (turn * bits)) & ((1 << bits) - 1), shape)
        for part, tensor in convert(digits).items():
            found[part] += _read(part, tensor) << (turn * _BITS[_sort(part)])
    return found


def _sort(part: Part) -> str:
    return part.rpartition("_")[2]


def _count(part: Part, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * (2 if _sort(part) == "weight" else 1)


def _write(part: Part, digits: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if _sort(part) == "weight":
        return mxfp4.pack_codes(digits.to(torch.uint8)).view(shape)
    if _sort(part) == "scale":
        return (digits + _SCALE_ZERO).to(torch.uint8).view(shape)
    return digits.to(torch.bfloat16).view(shape)


def _read(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().flatten()
    if _sort(part) == "weight":
        return mxfp4.unpack_codes(flat.view(torch.uint8)).long()
    if _sort(part) == "scale":
        return flat.view(torch.uint8).long() - _SCALE_ZERO
    return flat.float().long()
