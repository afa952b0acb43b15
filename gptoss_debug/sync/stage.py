"""The stage: where the tensors of an update wait, checked, until all of their layer are there."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import torch

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import FLOATS, Format, TensorSpec, expected_tensors, layer_of
from gptoss_debug.errors import SyncError
from gptoss_debug.layouts.mxfp4 import SCALE_NAN
from gptoss_debug.recording.regions import Box, coverage, elements, show_box, whole

Group = int | None
"""What is converted together: a layer by its number, or (None) the tensors outside the layers."""

Expect = Literal["all"] | Collection[str]
"""The tensors that an update must bring: all of the model's, or these."""

# Tensors that one module of vLLM holds together, so that an update must bring all of them or none. The
# experts of a layer are one unit because vLLM processes them in one go.
_UNITS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.router", "mlp.experts")
_TOGETHER = {
    "self_attn.q_proj": "self_attn.qkv",
    "self_attn.k_proj": "self_attn.qkv",
    "self_attn.v_proj": "self_attn.qkv",
}


@dataclass
class _Staged:
    """One tensor under way: its values, and the boxes of it that have arrived."""

    values: torch.Tensor
    boxes: list[Box] = field(default_factory=list)


class Stage:
    """Takes an update's tensors in any order and in pieces, and refuses what no engine should serve.

    Parameters
    ----------
    config
        The sizes of the engine's model.
    expect
        What the update must bring.
    device
        Where the tensors wait.

    Raises
    ------
    SyncError
        If ``expect`` names an unknown tensor, mixes MXFP4 and BF16 experts, or takes a module apart.
    """

    def __init__(self, config: ModelConfig, expect: Expect, device: torch.device) -> None:
        self._config, self._device = config, device
        self._specs: dict[Format, dict[str, TensorSpec]] = {
            "mxfp4": expected_tensors(config, "mxfp4"),
            "bf16": expected_tensors(config, "bf16"),
        }
        if isinstance(expect, str) and expect != "all":
            raise SyncError("is no choice of tensors", where=repr(expect), expected='"all", or a list of names')
        self._expect = None if isinstance(expect, str) else frozenset(expect)
        self._staged: dict[str, _Staged] = {}
        self._taken: set[str] = set()
        self._first: str | None = None
        self.source: Format | None = None
        if self._expect is not None:
            self._check_expected(self._expect)

    def put(self, name: str, tensor: torch.Tensor, at: tuple[int, ...] | None = None) -> None:
        """Copy a tensor, or a piece of it, in; the caller may use its buffer again at once.

        Parameters
        ----------
        name
            A Hugging Face name: ``model.layers.0.mlp.experts.gate_up_proj`` (float experts),
            ``..._blocks`` and ``..._scales`` (MXFP4), or any other tensor of the checkpoint.
        tensor
            Its values; floats in bfloat16, float16 or float32, codes and scales in uint8.
        at
            Where a piece begins, one index for each axis; None for the whole tensor.

        Raises
        ------
        SyncError
            If the name is unknown, was not expected, or arrived before; if shape or dtype do not fit, or
            a value is NaN or infinite.
        """
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kinds = f"{type(name).__name__} and {type(tensor).__name__}"
            raise SyncError(
                "is no named tensor", where=repr(name)[:80], expected="a str and a torch.Tensor", found=kinds
            )
        if at is not None and not (isinstance(at, tuple) and all(type(index) is int for index in at)):
            raise SyncError("begins nowhere", where=name, expected="a tuple of whole numbers", found=repr(at)[:80])
        spec = self._spec(name)
        box = self._box(name, tensor, spec, at)
        if tensor.dtype not in spec.dtypes:
            raise SyncError(
                "has a wrong dtype",
                where=name,
                expected=" or ".join(map(_short, spec.dtypes)),
                found=_short(tensor.dtype),
            )
        _check_values(name, tensor, box)
        known = self._staged.get(name)
        if name in self._taken or (known is not None and any(_overlap(box, other) for other in known.boxes)):
            raise SyncError(
                "arrived twice",
                where=name if at is None else f"{name}{show_box(box, spec.shape)}",
                expected="every region once",
                hint="Send each tensor once in an update.",
            )
        if known is None:
            if box == whole(spec.shape):
                copied = tensor.detach().to(self._device, copy=True).contiguous()
                self._staged[name] = _Staged(copied, [box])
                return
            known = _Staged(torch.zeros(spec.shape, dtype=tensor.dtype, device=self._device))
            self._staged[name] = known
        elif known.values.dtype != tensor.dtype:
            raise SyncError(
                "comes in pieces of different dtypes",
                where=name,
                expected=_short(known.values.dtype),
                found=_short(tensor.dtype),
            )
        known.values[tuple(slice(start, stop) for start, stop in box)].copy_(tensor)
        known.boxes.append(box)

    def complete_group(self, name: str) -> Group | Literal[False]:
        """Return the group that a tensor belongs to if all of it is here, else False."""
        group = layer_of(name)
        wanted = self._wanted(group)
        if wanted is None or any(not self._complete(one) for one in wanted):
            return False
        return group

    def take(self, group: Group) -> dict[str, torch.Tensor]:
        """Hand out a group's tensors and forget them."""
        names = [name for name in self._staged if layer_of(name) == group]
        self._taken.update(names)
        return {name: self._staged.pop(name).values for name in names}

    def check_complete(self) -> None:
        """Check that nothing is missing.

        Raises
        ------
        SyncError
            Naming what did not arrive, wholly or in part.
        """
        names = self._names()
        missing, partial = self._lacking()
        if not missing and not partial:
            return
        first = partial[0] if partial else missing[0]
        detail = ""
        if partial:
            spec = self._spec(first)
            covered = coverage(spec.shape, self._staged[first].boxes)
            detail = f" (not arrived: {show_box(covered.missing[0], spec.shape)})"
        arrived = len(self._taken) + len(self._staged) - len(partial)
        rest = len(missing) + len(partial) - 1
        raise SyncError(
            f"the update is incomplete: {first}{detail}" + (f" and {rest} more are missing" if rest else " is missing"),
            expected=f"{len(names)} tensors",
            found=f"{arrived}",
            hint="Send a whole update, or say by `expect` which tensors a partial one brings.",
        )

    @property
    def whole_model(self) -> bool:
        """Whether all of the model's tensors are expected."""
        return self._expect is None

    @property
    def is_complete(self) -> bool:
        """Whether everything has arrived."""
        return not any(self._lacking())

    @property
    def arrived(self) -> int:
        """Return the number of tensors of which something has arrived."""
        return len(self._taken) + len(self._staged)

    def _lacking(self) -> tuple[list[str], list[str]]:
        """Return the names of which nothing has arrived, and those of which something is missing."""
        missing = [name for name in self._names() if name not in self._taken and name not in self._staged]
        return missing, [name for name in self._staged if not self._complete(name)]

    def _names(self) -> Collection[str]:
        return self._expect if self._expect is not None else self._specs[self.source or "bf16"]

    def _wanted(self, group: Group) -> list[str] | None:
        """Return the names of a group; None while the format of its experts is not known."""
        if self._expect is None and self.source is None and group is not None:
            return None
        return [name for name in self._names() if layer_of(name) == group]

    def _complete(self, name: str) -> bool:
        known = self._staged.get(name)
        return known is not None and sum(map(elements, known.boxes)) == known.values.numel()

    def _spec(self, name: str) -> TensorSpec:
        sources = [source for source, specs in self._specs.items() if name in specs]
        if not sources:
            close = difflib.get_close_matches(name, self._specs["mxfp4"] | self._specs["bf16"], 1, 0.0)
            raise SyncError("is no tensor of GPT-OSS", where=name, hint=f"The nearest name is {close[0]}.")
        if self._expect is not None and name not in self._expect:
            raise SyncError("was not expected", where=name, expected=f"one of the {len(self._expect)} tensors named")
        if len(sources) == 1:
            if self.source is None:
                self.source, self._first = sources[0], name
            elif self.source != sources[0]:
                raise SyncError(
                    "has experts of another format than the update",
                    where=name,
                    expected=f"{self.source}, as {self._first}",
                    found=sources[0],
                )
        return self._specs[sources[0]][name]

    def _box(self, name: str, tensor: torch.Tensor, spec: TensorSpec, at: tuple[int, ...] | None) -> Box:
        start = at if at is not None else (0,) * len(spec.shape)
        box = tuple((begin, begin + size) for begin, size in zip(start, tensor.shape, strict=False))
        fits = len(start) == tensor.ndim == len(spec.shape) and all(
            0 <= low < high <= size for (low, high), size in zip(box, spec.shape, strict=True)
        )
        if not fits or (at is None and tuple(tensor.shape) != spec.shape):
            raise SyncError(
                "has a wrong shape" if at is None else f"a piece at {list(start)} does not fit",
                where=name,
                expected=list(spec.shape) if at is None else f"a box inside {list(spec.shape)}",
                found=list(tensor.shape),
            )
        return box

    def _check_expected(self, names: frozenset[str]) -> None:
        if not names:
            raise SyncError("an update that expects nothing", expected="the names of its tensors")
        for name in sorted(names):
            self._spec(name)
        units: dict[str, set[str]] = {}
        for name in self._specs[self.source or "bf16"]:
            units.setdefault(_unit(name), set()).add(name)
        for name in sorted(names):
            lacking = sorted(units[_unit(name)] - names)
            if lacking:
                raise SyncError(
                    f"cannot be updated without {lacking[0]}",
                    where=name,
                    expected="all tensors that vLLM keeps and processes together",
                    hint="Name these too: " + ", ".join(lacking[:6]),
                )


def _unit(name: str) -> str:
    """Return the name of the module of vLLM whose tensors come together."""
    for unit in _UNITS:
        if f".{unit}." in name:
            return name.split(f".{unit}.")[0] + "." + _TOGETHER.get(unit, unit)
    return name


def _check_values(name: str, tensor: torch.Tensor, box: Box) -> None:
    if tensor.dtype in FLOATS:
        bad = ~torch.isfinite(tensor)
    elif name.endswith("_scales"):
        bad = tensor == SCALE_NAN
    else:
        return
    if bad.any():
        where = [low + index for (low, _), index in zip(box, bad.nonzero()[0].tolist(), strict=True)]
        value = "a NaN scale (255)" if tensor.dtype == torch.uint8 else tensor[tuple(bad.nonzero()[0])].item()
        raise SyncError(
            f"holds {value} at {where}",
            where=name,
            expected="finite values only",
            found=f"{int(bad.sum())} such elements",
            hint="The trainer diverged, or its export is damaged.",
        )


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
