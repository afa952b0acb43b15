"""The load ledger: one row for every write into a parameter while weights are loaded.

Writes are seen by a ``TorchDispatchMode``, below every loader, so that a bare ``copy_`` (attention sinks
are written so) is recorded as well as a ``weight_loader`` call. Which loader wrote is read off the Python
stack; no parameter is touched for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from types import CodeType, FrameType
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gptoss_debug.recording.digests import digest
from gptoss_debug.recording.regions import Box, box_of, show_box


@dataclass(frozen=True)
class LedgerRow:
    """One write into a parameter.

    Attributes
    ----------
    order
        Position among all writes.
    load
        Which ``load_weights`` call of the model this was, from 1.
    seconds
        Since that call began.
    source
        The checkpoint tensor that was being loaded.
    source_region
        The part of it that was written; None where the values were computed from it.
    parameter
        The parameter written to.
    region
        The box written; None if the write was no box, or by an operation that need not write all of its target.
    parameter_shape
        The parameter's shape at that time.
    loader
        Qualified name of the weight loader, empty for a write that went past all loaders.
    writer
        Qualified name of the function whose line did the writing.
    call
        Number of the loader call; a call may write more than once.
    shard, expert
        The loader's arguments of that meaning, as text, where it had them.
    rank
        The writing rank.
    shape, dtype, sha256
        Of the values written.
    operation
        The torch operation, ``aten.copy_`` as a rule.
    """

    order: int
    load: int
    seconds: float
    source: str
    source_region: Box | None
    parameter: str
    region: Box | None
    parameter_shape: tuple[int, ...]
    loader: str
    writer: str
    call: int
    shard: str
    expert: str
    rank: int
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    operation: str

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> LedgerRow:
        """Read a row back from :meth:`to_json`."""
        boxes = {
            name: None if row[name] is None else tuple((int(a), int(b)) for a, b in row[name])
            for name in ("source_region", "region")
        }
        shapes = {name: tuple(row[name]) for name in ("shape", "parameter_shape")}
        return cls(**{field.name: row[field.name] for field in fields(cls)} | boxes | shapes)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Ledger:
    """All rows of one rank, or of several joined, and the checkpoint tensors that came by.

    Attributes
    ----------
    rows
        In order.
    offered
        ``(load, checkpoint tensor)`` for each tensor that was given to ``load_weights``.
    """

    rows: tuple[LedgerRow, ...]
    offered: tuple[tuple[int, str], ...]

    @property
    def bypassed(self) -> tuple[LedgerRow, ...]:
        """Return the writes that went past every weight loader."""
        return tuple(row for row in self.rows if not row.loader)

    @property
    def unused(self) -> tuple[str, ...]:
        """Return the checkpoint tensors that were offered and from which nothing was written."""
        used = {(row.load, row.source) for row in self.rows}
        return tuple(dict.fromkeys(name for load, name in self.offered if (load, name) not in used))

    def boxes(self, parameter: str, rank: int, load: int = 1) -> list[Box | None]:
        """Return the regions written in a parameter; None for a write whose region is unknown."""
        return [row.region for row in self.rows if (row.parameter, row.rank, row.load) == (parameter, rank, load)]

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each write, regions written as indices."""
        frame = pd.DataFrame([row.to_json() for row in self.rows], columns=[f.name for f in fields(LedgerRow)])
        frame["region"] = [
            "?" if row.region is None else show_box(row.region, row.parameter_shape) for row in self.rows
        ]
        frame["source_region"] = [
            "?" if row.source_region is None else "[" + ", ".join(f"{a}:{b}" for a, b in row.source_region) + "]"
            for row in self.rows
        ]
        return frame

    def __str__(self) -> str:
        return (
            f"{len(self.rows)} writes from {len({row.source for row in self.rows})} checkpoint tensors, "
            f"{len(self.bypassed)} past every weight loader, {len(self.unused)} checkpoint tensors unused"
        )

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, border=0)


# Operations that write every element of their target; of any other (index_put_, masked_fill_ ...) the region
# is not known, and the coverage says so.
_WHOLE_WRITES = frozenset(
    f"aten::{name}_" for name in ("copy", "fill", "zero", "add", "sub", "mul", "div", "normal", "uniform")
)


class LedgerKeeper(TorchDispatchMode):
    """Record the writes into a model's parameters while it is on.

    Use :meth:`loading` around the iterator that goes into ``load_weights``, and enter the mode around
    the call.
    """

    def __init__(self, model: nn.Module, rank: int, load: int, loaders: set[CodeType]) -> None:
        super().__init__()
        self.rows: list[LedgerRow] = []
        self.offered: list[tuple[int, str]] = []
        self._rank, self._load, self._loaders = rank, load, loaders
        self._parameters = {
            tensor.untyped_storage().data_ptr(): (name, tensor.data)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if tensor.device.type != "meta" and tensor.numel()
        }
        self._current: tuple[str, torch.Tensor] | None = None
        self._begin = time.perf_counter()
        self._calls: dict[FrameType, int] = {}

    def loading(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass checkpoint tensors through and remember which one is being loaded."""
        for name, tensor in weights:
            self.offered.append((self._load, name))
            self._current = (name, tensor)
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; record it where it writes to a parameter."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            for target in written if isinstance(written, (list, tuple)) else [written]:
                if isinstance(target, torch.Tensor) and target.device.type != "meta" and target.numel():
                    known = self._parameters.get(target.untyped_storage().data_ptr())
                    if known is not None:
                        self._record(func, known, target, args)
        return result

    def _record(self, func: Any, known: tuple[str, torch.Tensor], target: torch.Tensor, args: tuple[Any, ...]) -> None:
        name, parameter = known
        written = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else target
        writer, loader, call, scope = self._who()
        source, region = "", None
        if self._current is not None:
            source, offered = self._current
            if written.untyped_storage().data_ptr() == offered.untyped_storage().data_ptr():
                region = box_of(written, offered)
        self.rows.append(
            LedgerRow(
                order=len(self.rows) + 1,
                load=self._load,
                seconds=round(time.perf_counter() - self._begin, 6),
                source=source,
                source_region=region,
                parameter=name,
                region=box_of(target, parameter) if func._schema.name in _WHOLE_WRITES else None,
                parameter_shape=tuple(parameter.shape),
                loader=loader,
                writer=writer,
                call=call,
                shard=_text(scope, "shard_id", "loaded_shard_id"),
                expert=_text(scope, "expert_id"),
                rank=self._rank,
                shape=tuple(written.shape),
                dtype=str(written.dtype).removeprefix("torch."),
                sha256=digest(written),
                operation=str(func),
            )
        )

    def _who(self) -> tuple[str, str, int, dict[str, Any]]:
        """Return the writing function, the outermost weight loader above it, its call number and its variables."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch.", __name__)):
            frame = frame.f_back
        writer = _qualified(frame) if frame else ""
        found: FrameType | None = None
        while frame is not None:
            if frame.f_code in self._loaders:
                found = frame
            frame = frame.f_back
        if found is None:
            return writer, "", 0, {}
        # Holding the frames keeps their addresses from being used again, so one number is one call.
        call = self._calls.setdefault(found, len(self._calls) + 1)
        return writer, _qualified(found), call, found.f_locals


def _qualified(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"


def _text(scope: dict[str, Any], *names: str) -> str:
    return next((str(scope[name]) for name in names if scope.get(name) is not None), "")
