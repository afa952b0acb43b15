"""Chain: the steps between a checkpoint tensor and the tensor an engine holds on one rank."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import pandas as pd
import torch

from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts.steps import FirstRankOnly, Pad, Shard, Step


@dataclass(frozen=True)
class Unwound:
    """A live tensor taken back to canonical order.

    Attributes
    ----------
    values
        The rank's share in canonical order, padding dropped.
    padding
        Axis -> what the padding along it held; right is all zero.
    """

    values: torch.Tensor
    padding: tuple[tuple[int, torch.Tensor], ...]

    @property
    def dirty(self) -> int:
        """Count the padding elements that are not zero."""
        return sum(int(torch.count_nonzero(pad.contiguous().view(torch.uint8))) for _, pad in self.padding)


@dataclass(frozen=True)
class Chain:
    """A layout: named steps from checkpoint to kernel.

    The chain is cut after its last step that cannot be undone (a shard, a quantisation). Before the
    cut only :meth:`expected` goes forward, after it :meth:`unwind` goes back; the two meet there, in
    canonical order ``[E, N, ...]`` (N output rows as in the checkpoint), where engine and checkpoint
    are compared.

    Attributes
    ----------
    steps
        From checkpoint to kernel.
    canonical
        The number of leading steps that bring the checkpoint's own axes into canonical order; the cut
        never lies before them.
    """

    steps: tuple[Step, ...]
    canonical: int = 0

    @property
    def cut(self) -> int:
        """Return the number of steps before the cut."""
        return max((i + 1 for i, step in enumerate(self.steps) if not step.invertible), default=self.canonical)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the engine should hold for a checkpoint tensor."""
        return reduce(lambda value, step: step.forward(value), self.steps, tensor)

    def expected(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a checkpoint tensor, in canonical order."""
        return reduce(lambda value, step: step.forward(value), self.steps[: self.cut], tensor)

    def unwind(self, live: torch.Tensor) -> Unwound:
        """Take a live tensor back to canonical order and keep what its padding held.

        Raises
        ------
        LayoutError
            If the tensor does not have the shape that the chain produces.
        """
        padding: list[tuple[int, torch.Tensor]] = []
        for step in reversed(self.steps[self.cut :]):
            if isinstance(step, Pad):
                padding.append((step.axis, step.padding(live)))
            live = step.inverse(live)
        return Unwound(live, tuple(padding))

    def rewind(self, values: torch.Tensor) -> torch.Tensor:
        """Take a rank's share in canonical order forward to the kernel's layout: what :meth:`unwind` undoes."""
        return reduce(lambda value, step: step.forward(value), self.steps[self.cut :], values)

    def shapes(self, shape: Sequence[int], dtype: torch.dtype) -> list[tuple[int, ...]]:
        """Return the shape before the first step and after each one; nothing is computed."""
        value = torch.empty(tuple(shape), dtype=dtype, device="meta")
        shapes = [tuple(value.shape)]
        for step in self.steps:
            value = step.forward(value)
            shapes.append(tuple(value.shape))
        return shapes

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each step."""
        return pd.DataFrame(
            [(step.name, step.describe(), step.invertible) for step in self.steps],
            columns=["step", "does", "can be undone on one rank"],
        )

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(step.name)}</td><td><code>{html.escape(step.describe())}</code></td></tr>"
            for step in self.steps
        )
        return f"<table><tr><th>step</th><th>does</th></tr>{rows}</table>"

    def __str__(self) -> str:
        return " -> ".join(step.name for step in self.steps) or "identity"


def merge(chains: Sequence[Chain], live: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the live tensors of all ranks into the whole tensor, in canonical order.

    Parameters
    ----------
    chains, live
        One of each for every rank, in rank order.

    Raises
    ------
    LayoutError
        If the shards do not follow one another without gap or overlap.
    """
    shares = [chain.unwind(tensor).values for chain, tensor in zip(chains, live, strict=True)]
    if any(isinstance(step, FirstRankOnly) for step in chains[0].steps):
        return shares[0]
    cuts = [[step for step in chain.steps if isinstance(step, Shard)] for chain in chains]
    if not cuts[0]:
        return shares[0]
    ends = [0, *(cut[0].stop for cut in cuts)]
    for index, (cut, end) in enumerate(zip(cuts, ends, strict=False)):
        if cut[0].start != end:
            raise LayoutError(
                f"the shard of rank {index} does not follow the one before",
                expected=f"start {end}",
                found=f"start {cut[0].start}",
            )
    return torch.cat(shares, dim=cuts[0][0].axis)
