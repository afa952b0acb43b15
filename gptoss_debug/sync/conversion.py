"""Conversion: one group of an update's tensors to what the engine is to hold, before anything is touched.

A blank model, as a cold start would make it, is filled by vLLM's own ``load_weights`` and processed by
its own ``process_weights_after_loading``; the experts go that way too, or by the chains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import FLOATS, Format, layer_of
from gptoss_debug.engines import vllm_adapter, vllm_reload
from gptoss_debug.engines.environment import release, vllm_version
from gptoss_debug.errors import GptOssDebugError, LayoutError, SyncError
from gptoss_debug.layouts import catalog
from gptoss_debug.recording.census import reachable_tensors
from gptoss_debug.sync.experts import ExpertConverter, Tensors
from gptoss_debug.sync.stage import Group

Way = Literal["chains", "engine"]
"""How experts are converted: by the chains, or by vLLM's own processing of a blank layer."""


@dataclass(frozen=True)
class Replacement:
    """One tensor of the engine and what it is to hold.

    Attributes
    ----------
    path
        How it is reached from the model.
    live
        The engine's tensor; its storage stays.
    new
        The values.
    registered
        Whether it is a parameter. What is not was derived from one, and the two exchange their contents:
        a packed weight of oneDNN is a number that stands for memory which its owner frees.
    """

    path: str
    live: torch.Tensor
    new: torch.Tensor
    registered: bool

    def check(self) -> None:
        """Check that the new values fit.

        Raises
        ------
        SyncError
            If shape, dtype or device differ.
        """
        for what in ("shape", "dtype", "device"):
            held, wanted = getattr(self.live, what), getattr(self.new, what)
            if held != wanted:
                raise SyncError(
                    f"was converted to another {what} than the engine holds",
                    where=self.path,
                    expected=held,
                    found=wanted,
                )

    def check_finite(self) -> None:
        """Check that no parameter became NaN or infinite in the engine's dtype.

        Raises
        ------
        SyncError
            Naming the first such element.
        """
        if self.registered and self.new.dtype in FLOATS and not torch.isfinite(self.new).all():
            where = (~torch.isfinite(self.new)).nonzero()[0].tolist()
            raise SyncError(
                f"would hold {self.new[tuple(where)].item()} at {where}",
                where=self.path,
                expected=f"values within the range of {str(self.new.dtype).removeprefix('torch.')}",
            )

    def commit(self) -> None:
        """Put the new values into the engine's storage."""
        if self.registered:
            self.live.data.copy_(self.new)
        elif self.live.data_ptr() != self.new.data_ptr():
            held = self.live.clone()
            self.live.copy_(self.new)
            self.new.copy_(held)


class Converter:
    """Converts the groups of one update for one engine.

    Parameters
    ----------
    model
        The engine's model; it is read, never written.
    config
        The engine's ``VllmConfig``.
    sizes
        The model's sizes.
    way
        How experts go. None takes the faster: on a CPU the chains, where one is known and the probe agrees
        with it; on a GPU vLLM's own kernels.

    Raises
    ------
    LayoutError
        If ``way`` is ``"chains"`` and there is none, or the installed vLLM does not follow it.
    """

    def __init__(self, model: nn.Module, config: Any, sizes: ModelConfig, way: Way | None = None) -> None:
        vllm_reload.check_reloadable(config)
        self._model, self._config, self._sizes = model, config, sizes
        layers = vllm_adapter.expert_layers(model)
        self._experts = {layer.layer: layer for layer in layers}
        self._placement = vllm_adapter.placement_of(model)
        self.backend = vllm_adapter.chosen_backend(layers[0].module)
        vllm_reload.check_known_method(layers[0].module)
        self._device = next(parameter.device for parameter in model.parameters())
        self.way: Way = way or choose_way(self.backend, self._device)
        if self.way == "chains":
            check_chains(self.backend)
        self._blank = vllm_reload.blank_model(config, self._device)
        # Held, so that none of their addresses is used again; what is still the same later was not derived.
        self._untouched = {path: (tensor, _version(tensor)) for path, _, tensor in reachable_tensors(self._blank)}
        self._blank_experts = {layer.layer: layer.module for layer in vllm_adapter.expert_layers(self._blank)}

    def convert(self, group: Group, tensors: Mapping[str, torch.Tensor], source: Format) -> list[Replacement]:
        """Convert a group's tensors; each group once.

        Raises
        ------
        SyncError
            If a tensor cannot be quantised, does not fit the engine's, or vLLM's own loader refuses it.
        """
        experts = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
        others = {name: tensor for name, tensor in tensors.items() if name not in experts}
        found: list[Replacement] = []
        live: Tensors = {}
        if group is not None and experts:
            live = self._experts[group].tensors()
            known = self.backend in catalog.BACKENDS
            converter = ExpertConverter(_kind(self.backend), self._sizes, self._placement, known)
            if self.way == "chains":
                name = self._experts[group].name
                for part, new in converter.kernel(group, experts, source, live).items():
                    found.append(Replacement(f"{name}.{part}", live[part], new, True))
                vllm_reload.leave_experts(self._blank_experts[group])
            else:
                others |= converter.checkpoint(group, experts, source, live)
        found += self._by_engine(group, others, with_experts=self.way == "engine" and bool(experts))
        for replacement in found:
            replacement.check()
            replacement.check_finite()
        return found

    def _by_engine(
        self, group: Group, tensors: Mapping[str, torch.Tensor], with_experts: bool
    ) -> Iterator[Replacement]:
        """Let vLLM load and process the group's modules of the blank model."""
        modules = dict(self._modules(group))
        expert = self._blank_experts.get(group) if group is not None else None
        for module in modules.values():
            if module is not expert or with_experts:
                vllm_reload.materialise(module, self._device)
        if expert is not None and not with_experts:
            vllm_reload.leave_experts(expert)
        try:
            with vllm_reload.current_config(self._config), torch.no_grad():
                # vLLM zeroes a down_proj bias that it was given on every rank but the first: it gets a copy.
                given = [(n, t.clone() if n.endswith("down_proj_bias") else t) for n, t in tensors.items()]
                loaded = vllm_reload.fill(self._blank, given)
            for name in self._roots(group):
                vllm_reload.process(self._blank.get_submodule(name), self._config, self._device)
        except GptOssDebugError:
            raise
        except Exception as error:
            raise SyncError(
                f"vLLM's own loading of a blank model failed: {type(error).__name__}: {str(error).splitlines()[0]}"
                if str(error)
                else f"vLLM's own loading of a blank model failed: {type(error).__name__}",
                where=f"layer {group}" if group is not None else "outside the layers",
            ) from error
        yield from self._replacements(modules, loaded)

    def release(self, group: Group) -> None:
        """Let go of what the blank model still holds of a group that was written."""
        for _, module in self._modules(group):
            _empty(module)

    def close(self) -> None:
        """Let go of all that the blank model holds; it can convert nothing more.

        vLLM's modules refer to themselves, so the model itself waits for the garbage collector.
        """
        self._untouched.clear()
        for module in self._blank.modules():
            _empty(module)

    def _replacements(self, modules: Mapping[str, nn.Module], loaded: set[str]) -> Iterator[Replacement]:
        """Pair the blank model's tensors with the engine's: parameters, and what was derived from them."""
        chosen: set[str] = set()
        for name, module in modules.items():
            own = {f"{name}.{key}" for key, value in module._parameters.items() if value is not None}
            if own and own <= loaded:
                chosen.add(name)
            elif own & loaded:
                raise SyncError(
                    "would be updated in part", where=name, expected=sorted(own), found=sorted(own & loaded)
                )
        unused = loaded - {f"{name}.{key}" for name in chosen for key in modules[name]._parameters}
        if unused:
            raise SyncError("vLLM loaded a parameter that is not of this group", where=sorted(unused)[0])
        for name in sorted(chosen):
            for key, parameter in modules[name]._parameters.items():
                if parameter is not None:
                    live = self._model.get_parameter(f"{name}.{key}")
                    yield Replacement(f"{name}.{key}", live, parameter.data, True)
        yield from self._derived(modules, chosen)

    def _derived(self, modules: Mapping[str, nn.Module], chosen: set[str]) -> Iterator[Replacement]:
        held = {path: tensor for path, kind, tensor in reachable_tensors(self._model) if kind != "parameter"}
        registered = {
            p.untyped_storage().data_ptr() for name in modules for p in modules[name].parameters() if not p.is_meta
        }
        for path, kind, tensor in reachable_tensors(self._blank):
            if kind == "parameter" or tensor.untyped_storage().data_ptr() in registered:
                continue
            was, version = self._untouched.get(path, (None, 0))
            if not tensor.numel() or (tensor is was and _version(tensor) == version):
                continue
            if _owner(path, modules) not in chosen:
                continue
            if path not in held:
                raise SyncError("vLLM derives a tensor that the engine does not hold", where=path)
            if held[path].untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                yield Replacement(path, held[path], tensor, False)

    def _modules(self, group: Group) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._blank.named_modules():
            if name and layer_of(f"{name}.") == group:
                yield name, module

    def _roots(self, group: Group) -> list[str]:
        """Return the modules to process: the layer's block, or each module outside the layers."""
        names = [name for name, _ in self._modules(group)]
        if group is not None:
            return names[:1]
        return [name for name in names if self._blank.get_submodule(name)._parameters]


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place; what vLLM made under inference mode does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _empty(module: nn.Module) -> None:
    """Take a blank module's tensors away, and the kernels that hold what was derived from them."""
    module._parameters.clear()
    for name in ("quant_method", "cpu_linear", "impl"):
        if hasattr(module, name):
            setattr(module, name, None)


def _owner(path: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the nearest module above a path that has parameters of its own."""
    while path:
        path = path.rpartition(".")[0]
        if path in modules and any(value is not None for value in modules[path]._parameters.values()):
            return path
    return None


def _kind(backend: str) -> catalog.Backend:
    """Return the sizes and chains of a backend; for one without chains, how its experts are cut at least."""
    if backend in catalog.BACKENDS:
        return catalog.backend(backend)
    return catalog.BACKENDS["bf16" if backend.startswith("bf16") else "raw"]


def choose_way(backend: str, device: torch.device) -> Way:
    """Return ``"chains"`` on a CPU, for a backend whose chain the probe of the installed vLLM agrees with."""
    if device.type != "cpu":
        return "engine"
    try:
        check_chains(backend)
    except LayoutError:
        return "engine"
    return "chains"


_PROBED: dict[str, bool] = {}


def check_chains(backend: str) -> None:
    """Check that the chains describe the installed engine.

    Raises
    ------
    LayoutError
        If there is no chain for the backend, or the probe measures another layout.
    """
    from gptoss_debug.engines.probe import probe_engine

    kind = catalog.backend(backend, release(vllm_version() or ""))
    if not kind.quantised:
        return  # moved by no conversion that could be probed; the blank layer is the check, in the tests
    if backend not in _PROBED:
        _PROBED[backend] = probe_engine(kind.name).agrees
    if not _PROBED[backend]:
        raise LayoutError(
            "the installed vLLM does not follow the chain that is known here",
            where=backend,
            hint="Convert by the engine (way='engine'), and see `gptoss-debug doctor`.",
        )
