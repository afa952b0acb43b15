"""Steps: the named operations of which every layout is a chain.

A step is data (a frozen dataclass); ``forward`` goes from the checkpoint towards the kernel and
``inverse`` back. Tensors keep the expert axis first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from einops import EinopsError, rearrange

from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts import mxfp4


class Step(ABC):
    """One operation of a layout chain.

    Attributes
    ----------
    name
        What the step is called in reports and by the diagnosis.
    invertible
        Whether ``inverse`` gives the input back from the output alone. A shard needs the other
        ranks, a quantisation the scales; a pad only drops what it added, so it counts as invertible.
    """

    name: str
    invertible: ClassVar[bool] = True

    @abstractmethod
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Apply the step."""

    @abstractmethod
    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undo the step."""

    @abstractmethod
    def describe(self) -> str:
        """Say in a few words what the step does."""


@dataclass(frozen=True)
class Rearrange(Step):
    """A pure re-ordering of elements, written as an einops pattern with the sizes of its inner axes."""

    name: str
    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Re-order from the left side of the pattern to the right."""
        left, right = self.pattern.split("->")
        return self._apply(tensor, left, right)

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Re-order from the right side of the pattern to the left."""
        left, right = self.pattern.split("->")
        return self._apply(tensor, right, left)

    def describe(self) -> str:
        """Return the pattern and its sizes."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes)
        return f"`{self.pattern}`" + (f" with {sizes}" if sizes else "")

    def _apply(self, tensor: torch.Tensor, source: str, target: str) -> torch.Tensor:
        try:
            pattern, sizes = f"{source.strip()} -> {target.strip()}", dict(self.sizes)
            if tensor.dtype == torch.uint8 and tensor.device.type == "cpu":
                # numpy copies strided bytes twice as fast as torch does.
                return torch.from_numpy(np.ascontiguousarray(rearrange(tensor.numpy(), pattern, **sizes)))
            return rearrange(tensor, pattern, **sizes).contiguous()
        except EinopsError as error:
            raise LayoutError(
                f"step {self.name!r} does not fit a tensor of shape {list(tensor.shape)}",
                expected=self.describe(),
                found=str(error).splitlines()[-1].strip(),
            ) from None


@dataclass(frozen=True)
class Quantise(Step):
    """Floats ``[E, N, K]`` to MXFP4; one chain carries the codes, another the scales."""

    output: Literal["codes", "scales"]
    name: str = "quantise"
    invertible: ClassVar[bool] = False

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return codes ``[E, N, K/2]`` or scales ``[E, N, K/32]``, both uint8."""
        if tensor.is_meta:
            per_value = 2 if self.output == "codes" else mxfp4.BLOCK
            return tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] // per_value), dtype=torch.uint8)
        quantised = mxfp4.encode(tensor)
        return quantised.codes if self.output == "codes" else quantised.scales

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Refuse: values need codes and scales together."""
        raise LayoutError("codes and scales are dequantised together", hint="Use layouts.mxfp4.decode.")

    def describe(self) -> str:
        """Name the part of the quantised tensor that goes on."""
        return f"round to MXFP4, keep the {self.output}"


@dataclass(frozen=True)
class Shard(Step):
    """Cut one axis to the range of this rank: tensor-parallel rows or columns, or this rank's experts."""

    axis: int
    start: int
    stop: int
    what: str
    name: str = "shard"
    invertible: ClassVar[bool] = False

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the range ``start:stop`` of the axis."""
        if self.stop > tensor.shape[self.axis]:
            raise LayoutError(
                f"axis {self.axis} is too short for {self.what} {self.start}:{self.stop}",
                found=list(tensor.shape),
            )
        return tensor.narrow(self.axis, self.start, self.stop - self.start)

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Refuse: the rest of the axis is on the other ranks."""
        raise LayoutError("a shard is undone with the tensors of all ranks", hint="Use layouts.chain.merge.")

    def describe(self) -> str:
        """Name the range."""
        return f"{self.what} {self.start}:{self.stop} (axis {self.axis})"


@dataclass(frozen=True)
class FirstRankOnly(Step):
    """Zeros on every tensor-parallel rank but the first: a bias added once to a sum over the ranks."""

    rank: int
    name: str = "first rank only"
    invertible: ClassVar[bool] = False

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on rank 0, zeros elsewhere."""
        return tensor if self.rank == 0 else torch.zeros_like(tensor)

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Refuse: only rank 0 holds the values."""
        raise LayoutError("only rank 0 holds this tensor", hint="Use layouts.chain.merge.")

    def describe(self) -> str:
        """Say what this rank keeps."""
        return f"rank {self.rank}: " + ("kept" if self.rank == 0 else "zeros")


@dataclass(frozen=True)
class Pad(Step):
    """Append zeros to one axis, up to the size that the kernel wants."""

    axis: int
    size: int
    padded: int
    name: str = "pad"

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Append zeros: the axis grows from ``size`` to ``padded``."""
        self._check(tensor, self.size)
        shape = list(tensor.shape)
        shape[self.axis] = self.padded
        padded = tensor.new_zeros(shape)
        padded.narrow(self.axis, 0, self.size).copy_(tensor)
        return padded

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Drop the padding, whatever it holds."""
        self._check(tensor, self.padded)
        return tensor.narrow(self.axis, 0, self.size)

    def padding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the padding of a padded tensor; it must be zero."""
        self._check(tensor, self.padded)
        return tensor.narrow(self.axis, self.size, self.padded - self.size)

    def describe(self) -> str:
        """Name the axis and its sizes."""
        return f"zeros on axis {self.axis}: {self.size} to {self.padded}"

    def _check(self, tensor: torch.Tensor, size: int) -> None:
        if tensor.shape[self.axis] != size:
            raise LayoutError(f"axis {self.axis} does not fit the padding", expected=size, found=list(tensor.shape))


@dataclass(frozen=True)
class Pack(Step):
    """Four bytes of two codes each, ``[..., 4]``, to one int32 whose low half holds the four even-K codes.

    In the einops notation of a word's eight nibbles, lowest first: ``(b4 p) -> (p b4)`` with p=2, where
    ``b4`` numbers the bytes and ``p`` the code within a byte.
    """

    name: str = "pack"

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[..., 4n]`` uint8 to ``[..., n]`` int32."""
        # An unshuffle of the nibbles n0..n7 to n0 n2 n4 n6 n1 n3 n5 n7: swap the inner pair of nibbles in
        # each half word, then the inner pair of bytes in the word.
        return _swap_bits(tensor.contiguous().view(torch.int32), (4, 0x00F000F0), (8, 0x0000FF00))

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[..., n]`` int32 to ``[..., 4n]`` uint8."""
        return _swap_bits(tensor.contiguous(), (8, 0x0000FF00), (4, 0x00F000F0)).view(torch.uint8)

    def describe(self) -> str:
        """Say what a word holds."""
        return "8 codes to an int32, even-K codes in the low half"


_WORDS_AT_ONCE = 1 << 17
"""Half a MiB: the passes of a bit swap then run in the cache."""


def _swap_bits(words: torch.Tensor, *swaps: tuple[int, int]) -> torch.Tensor:
    """For each (distance, mask), exchange the bits under the mask with those the distance above them."""
    if words.is_meta:
        return words
    result = words.clone()
    for piece in result.view(-1).split(_WORDS_AT_ONCE):
        for distance, mask in swaps:
            change = piece >> distance
            change.bitwise_xor_(piece).bitwise_and_(mask)
            piece.bitwise_xor_(change)
            change.bitwise_left_shift_(distance)
            piece.bitwise_xor_(change)
    return result


@dataclass(frozen=True)
class View(Step):
    """The same bytes under another dtype of the same width."""

    source: torch.dtype
    target: torch.dtype
    name: str = field(default="view")

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes as ``target``."""
        return tensor.view(self.target)

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes as ``source``."""
        return tensor.view(self.source)

    def describe(self) -> str:
        """Name the dtypes."""
        return f"bytes of {_short(self.source)} as {_short(self.target)}"


@dataclass(frozen=True)
class Cast(Step):
    """Floats to the dtype that the engine keeps; a no-op where the checkpoint has it already."""

    dtype: torch.dtype
    name: str = "cast"
    invertible: ClassVar[bool] = False

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Round to ``dtype``."""
        return tensor.to(self.dtype)

    def inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """Refuse: rounding loses digits."""
        raise LayoutError("a cast is not undone")

    def describe(self) -> str:
        """Name the dtype."""
        return f"to {_short(self.dtype)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
