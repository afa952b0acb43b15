"""Edits of a chain: the ways in which a layout goes wrong, made from its steps and not from a list of bugs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gptoss_debug.checkpoints.names import Part
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts import mxfp4
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.layouts.steps import FirstRankOnly, Pad, Rearrange, Shard, Step


@dataclass(frozen=True)
class Inverse(Step):
    """A step done backwards."""

    step: Step

    @property
    def name(self) -> str:  # type: ignore[override]
        """Return the name of the step that is undone."""
        return self.step.name

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undo the step."""
        return self.step.inverse(tensor)

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Do the step."""
        return self.step.forward(tensor)

    def describe(self) -> str:
        """Return the step's description, turned round."""
        return f"the inverse of {self.step.describe()}"


@dataclass(frozen=True)
class ExchangeNibbles(Step):
    """The two codes of each byte exchanged."""

    name: str = "exchange nibbles"

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange them."""
        codes = mxfp4.unpack_codes(tensor)
        return mxfp4.pack_codes(codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange them back."""
        return self.forward(tensor)

    def describe(self) -> str:
        """Say what happens."""
        return "low and high nibble of each byte exchanged"


@dataclass(frozen=True)
class Narrow(Step):
    """Floats that went through a dtype of fewer bits on their way."""

    dtype: torch.dtype
    name: str = "narrow"
    invertible = False

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Round to the dtype and back."""
        return tensor.to(self.dtype).to(tensor.dtype)

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Refuse: rounding loses digits."""
        raise LayoutError("a cast is not undone")

    def describe(self) -> str:
        """Name the dtype."""
        return f"through {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Edit:
    """A chain with something wrong in it.

    Attributes
    ----------
    cause
        What was done, in words: ``"the step 'permute bias' was not applied"``.
    class_id
        The class of fault that it belongs to.
    chain
        The edited chain.
    depth
        The number of changes.
    """

    cause: str
    class_id: str
    chain: Chain
    depth: int = 1


def edits(part: Part, chain: Chain) -> Iterator[Edit]:
    """Yield every single change of a chain: a step left out, doubled, inverted, exchanged, or with another argument.

    Parameters
    ----------
    part
        The tensor that the chain is of; it decides which class a fault belongs to.
    chain
        From checkpoint to kernel.
    """
    steps = chain.steps
    for index, step in enumerate(steps):
        before, after = steps[:index], steps[index + 1 :]
        name = f"the step '{step.name}'"

        def edit(
            cause: str,
            *middle: Step,
            step: Step = step,
            before: tuple[Step, ...] = before,
            after: tuple[Step, ...] = after,
        ) -> Edit:
            return Edit(cause, _class(part, step), Chain((*before, *middle, *after), chain.canonical))

        yield edit(f"{name} was not applied")
        if step.invertible:
            yield edit(f"{name} was applied twice", step, step)
            yield edit(f"{name} was applied backwards", Inverse(step))
        if after:
            yield edit(f"{name} came after '{after[0].name}'", after[0], step, after=after[1:])
        for words, other in variants(step):
            yield edit(f"{name} took {words}", other)
    for words, class_id, extra in _extras(part):
        cut = chain.cut
        yield Edit(words, class_id, Chain((*steps[:cut], extra, *steps[cut:]), chain.canonical))


def pairs(part: Part, chain: Chain) -> Iterator[Edit]:
    """Yield every two changes of a chain."""
    for first in edits(part, chain):
        for second in edits(part, first.chain):
            yield Edit(f"{first.cause}, and {second.cause}", first.class_id, second.chain, 2)


def variants(step: Step) -> Iterator[tuple[str, Step]]:
    """Yield a step with other arguments, and what they would mean."""
    if isinstance(step, Shard):
        size = step.stop - step.start
        # The other ranks' shares, as many as are likely; one that does not fit the tensor is left out later.
        for start in range(0, 8 * size, size):
            if start != step.start:
                yield f"{start}:{start + size}, another rank's share", Shard(step.axis, start, start + size, step.what)
    elif isinstance(step, FirstRankOnly):
        yield "the share of another rank", FirstRankOnly(1 if step.rank == 0 else 0)


def _extras(part: Part) -> Iterator[tuple[str, str, Step]]:
    """Yield operations that belong in no chain, but happen."""
    if part.startswith("w13"):
        rest = "" if part.endswith("_bias") else " k"
        yield (
            "gate and up rows were put in two halves in place of interleaved",
            "B3",
            Rearrange("de-interleave", f"e (i two){rest} -> e (two i){rest}", (("two", 2),)),
        )
        yield (
            "gate and up rows were interleaved once more",
            "B3",
            Rearrange("interleave", f"e (two i){rest} -> e (i two){rest}", (("two", 2),)),
        )
        yield "gate and up rows were exchanged", "B3", _ExchangePairs()
    if part.endswith("_bias"):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16):
            yield f"values went through {str(dtype).removeprefix('torch.')}", "I1", Narrow(dtype)
    if part.endswith("_weight"):
        yield "low and high nibble of each byte were exchanged", "B2", ExchangeNibbles()


@dataclass(frozen=True)
class _ExchangePairs(Step):
    """Neighbouring rows exchanged."""

    name: str = "exchange gate and up"

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange rows 2i and 2i+1."""
        return tensor.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange them back."""
        return self.forward(tensor)

    def describe(self) -> str:
        """Say what happens."""
        return "rows 2i and 2i+1 exchanged"


def _class(part: Part, step: Step) -> str:
    """Return the class of a fault in a step."""
    if isinstance(step, Shard):
        return "D3" if step.axis == 0 else "D1"
    if isinstance(step, FirstRankOnly):
        return "D1"
    if isinstance(step, Pad):
        return "C2"
    return "B1" if part.endswith("_bias") else "B2"


def result_of(edit: Edit, source: torch.Tensor) -> torch.Tensor | None:
    """Return what an edited chain makes of a tensor; None where it cannot be done."""
    try:
        return edit.chain.forward(source)
    except (LayoutError, RuntimeError, ValueError):
        return None
