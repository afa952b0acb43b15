"""What the expert tensors were before and after the repack, and what the repack did to them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from gptoss_debug.checkpoints.names import Part
from gptoss_debug.recording.digests import combine, expert_digests

Stage = Literal["before", "after"]
"""Before or after ``process_weights_after_loading``."""


@dataclass(frozen=True)
class TensorState:
    """One expert tensor at one stage.

    Attributes
    ----------
    layer, part, stage
        Which tensor, when.
    name
        Its full name in the model.
    kind
        Class of the tensor object.
    identity
        ``id()`` of that object: another one after the repack means the parameter was replaced.
    shape, dtype, stride, pointer
        As torch reports them; the pointer is the address of the first element.
    attributes
        The attributes set on the object -> their value as text (a loader by its qualified name and owner).
    experts
        SHA-256 of each expert.
    stored
        Whether the values are in the recording.
    """

    layer: int
    part: Part
    stage: Stage
    name: str
    kind: str
    identity: int
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    pointer: int
    attributes: dict[str, str]
    experts: tuple[str, ...]
    stored: bool

    @property
    def sha256(self) -> str:
        """Return one digest of all experts."""
        return combine(list(self.experts))

    @classmethod
    def of(cls, tensor: torch.Tensor, layer: int, part: Part, stage: Stage, name: str, stored: bool) -> TensorState:
        """Describe a tensor ``[E, ...]``."""
        return cls(
            layer,
            part,
            stage,
            name,
            type(tensor).__name__,
            id(tensor),
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.stride()),
            tensor.data_ptr(),
            {key: _attribute(value) for key, value in sorted(vars(tensor).items())},
            tuple(expert_digests(tensor)),
            stored,
        )

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> TensorState:
        """Read a state back from :meth:`to_json`."""
        return cls(**state | {name: tuple(state[name]) for name in ("shape", "stride", "experts")})

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class RepackChange:
    """What the repack did to one tensor; see :class:`TensorState` for the fields compared."""

    layer: int
    part: Part
    shape_before: tuple[int, ...]
    shape_after: tuple[int, ...]
    dtype_before: str
    dtype_after: str
    bytes_changed: bool
    object_replaced: bool
    pointer_moved: bool
    stride_changed: bool
    attributes_lost: tuple[str, ...]
    attributes_gained: tuple[str, ...]

    @classmethod
    def between(cls, before: TensorState, after: TensorState) -> RepackChange:
        """Compare the two stages of one tensor."""
        return cls(
            before.layer,
            before.part,
            before.shape,
            after.shape,
            before.dtype,
            after.dtype,
            before.sha256 != after.sha256,
            before.identity != after.identity,
            before.pointer != after.pointer,
            before.stride != after.stride,
            tuple(sorted(before.attributes.keys() - after.attributes.keys())),
            tuple(sorted(after.attributes.keys() - before.attributes.keys())),
        )


def _attribute(value: object) -> str:
    """Return an attribute as text without addresses: a function or bound method by name and owner."""
    function = getattr(value, "__func__", value)
    name = getattr(function, "__qualname__", None)
    if name is None:
        return value if isinstance(value, str) else repr(value) if _plain(value) else type(value).__name__
    owner = getattr(value, "__self__", None)
    return f"{function.__module__}.{name}" + (f" of {type(owner).__name__}" if owner is not None else "")


def _plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, tuple, list))
