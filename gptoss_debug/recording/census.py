"""The storage census: every tensor that a loaded model can reach, registered or not.

Kernels keep tensors where ``named_parameters()`` does not look: attributes, dicts, partials, closures. A
CUDA graph remembers their addresses, so an address that changes at a reload is a stale value or worse.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import FunctionType, MethodType
from typing import Any, Literal

import pandas as pd
import torch
from torch import nn

MAX_DEPTH = 6
"""How many objects deep an attribute is followed: quant method, kernel, experts, config, description, tensor."""

_SKIP_MODULES = ("vllm.config", "transformers", "torch.distributed", "logging", "threading")
_SKIP_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "__doc__", "__module__"}


Kind = Literal["parameter", "buffer", "unregistered"]


@dataclass(frozen=True)
class CensusEntry:
    """One reachable tensor.

    Attributes
    ----------
    path
        How it is reached from the model.
    kind
        ``parameter``, ``buffer`` or ``unregistered``.
    owner
        The path under which the same storage was met first; equals ``path`` for the first.
    pointer, offset
        Address of the storage in this process, and the tensor's offset in it (elements).
    bytes
        Size of the storage.
    """

    path: str
    kind: Kind
    owner: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pointer: int
    offset: int
    bytes: int

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> CensusEntry:
        """Read an entry back from :meth:`to_json`."""
        return cls(**entry | {name: tuple(entry[name]) for name in ("shape", "stride")})

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Census:
    """All reachable tensors of one rank's model."""

    entries: tuple[CensusEntry, ...]

    @property
    def hidden(self) -> tuple[CensusEntry, ...]:
        """Return the tensors that are reachable and share no storage with a parameter or buffer."""
        registered = {entry.pointer for entry in self.entries if entry.kind != "unregistered"}
        return tuple(e for e in self.entries if e.kind == "unregistered" and e.pointer not in registered)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each tensor."""
        return pd.DataFrame([e.to_json() for e in self.entries], columns=[f.name for f in fields(CensusEntry)])

    def __str__(self) -> str:
        kinds = {kind: sum(e.kind == kind for e in self.entries) for kind in ("parameter", "buffer", "unregistered")}
        return (
            f"{kinds['parameter']} parameters, {kinds['buffer']} buffers, {kinds['unregistered']} references from "
            f"elsewhere, {len(self.hidden)} tensors of these with a storage of their own"
        )

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, border=0)


def census(model: nn.Module) -> Census:
    """Return every tensor reachable from a model, each under every path that leads to it from a module."""
    entries: list[CensusEntry] = []
    owners: dict[int, str] = {}
    for path, kind, tensor in reachable_tensors(model):
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        entries.append(
            CensusEntry(
                path,
                kind,
                owners.setdefault(pointer, path),
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tuple(tensor.stride()),
                pointer,
                int(tensor.storage_offset()),
                storage.nbytes(),
            )
        )
    return Census(tuple(entries))


def reachable_tensors(model: nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor]]:
    """Yield path, kind and tensor of what a census lists, parameters first; meta tensors are left out."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            yield name, "parameter", parameter
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            yield name, "buffer", buffer
    seen = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _SKIP_ATTRIBUTES:
                for path, tensor in _reachable(value, f"{name}.{attribute}".lstrip("."), seen, MAX_DEPTH):
                    if not tensor.is_meta:
                        yield path, "unregistered", tensor


def _reachable(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth == 0 or isinstance(value, (str, bytes, int, float, complex, bool, type, torch.dtype)) or value is None:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, child in _children(value):
        yield from _reachable(child, path + name, seen, depth - 1)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Return what an object refers to, with the piece of path that leads there."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                yield f".<{name}>", cell.cell_contents
            except ValueError:  # a cell that was never filled
                continue
    elif not type(value).__module__.startswith(_SKIP_MODULES):
        if is_dataclass(value):
            yield from ((f".{f.name}", getattr(value, f.name, None)) for f in fields(value))
        elif hasattr(value, "__dict__"):
            yield from ((f".{name}", child) for name, child in list(vars(value).items()))
            if isinstance(value, nn.Module):
                yield from ((f".{name}", child) for name, child in value.named_parameters())
        elif hasattr(value, "__slots__"):
            yield from ((f".{name}", getattr(value, name, None)) for name in value.__slots__)
