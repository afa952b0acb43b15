"""The recorder: hooks around vLLM's loading that fill a recording and leave nothing behind.

It works in this process and, through the environment, in vLLM's worker processes: there vLLM's plugin
call installs it (``engines.plugin``). Each process writes its own rank.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.engines import vllm_adapter, vllm_cpu
from gptoss_debug.engines.environment import Environment
from gptoss_debug.engines.hooks import Hooks
from gptoss_debug.errors import RecordingError
from gptoss_debug.files import partial_directory, write_text
from gptoss_debug.recording.census import census
from gptoss_debug.recording.ledger import Ledger, LedgerKeeper, LedgerRow
from gptoss_debug.recording.recording import (
    INDEX,
    RankRecording,
    Recording,
    find_layers,
    layer_file,
)
from gptoss_debug.recording.snapshots import Stage, TensorState

VARIABLE = "GPTOSS_DEBUG_RECORD"
"""Environment variable that tells worker processes to record: a JSON object of :class:`Recorder`'s arguments."""


class Recorder(AbstractContextManager["Recorder"]):
    """Record every load that vLLM does inside the ``with`` block.

    Parameters
    ----------
    out
        A directory that does not exist yet, or is empty.
    layers
        Layers whose tensors are kept in full: ``"all"``, ``"none"``, or numbers as in ``"0,3-5"``. Of
        the others only digests are kept. Memory stays bounded by one layer either way.

    Raises
    ------
    RecordingError
        If ``out`` holds something, or the block ends well without any model having been loaded. When a
        load raises, what was written until then is recorded, without snapshots.

    Examples
    --------
    >>> with Recorder("recordings/toy") as recorder:          # doctest: +SKIP
    ...     engine = open_engine("toy")
    >>> recorder.recording.ledger                              # doctest: +SKIP
    """

    def __init__(self, out: Path | str, *, layers: str = "all") -> None:
        self.out = Path(out).resolve()
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise RecordingError("holds something already", where=self.out, hint="Name another directory.")
        self._layers = layers
        self._session = _Session(self.out, layers)

    def __enter__(self) -> Recorder:
        """Install the hooks here and announce them to worker processes."""
        vllm_cpu.prepare_process()
        self.out.mkdir(parents=True, exist_ok=True)
        self._session.install()
        os.environ[VARIABLE] = json.dumps({"out": str(self.out), "layers": self._layers, "by": os.getpid()})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore everything."""
        os.environ.pop(VARIABLE, None)
        self._session.uninstall()
        for leftover in self.out.glob(".rank*.partial"):  # of worker processes that ended before their time
            shutil.rmtree(leftover, ignore_errors=True)
        if any(self.out.iterdir()):
            return
        self.out.rmdir()
        if kind is None:
            raise RecordingError(
                "nothing was recorded: no model was loaded inside the block",
                where=self.out,
                hint="Start the engine inside it.",
            )

    @property
    def recording(self) -> Recording:
        """Open what was recorded, all ranks."""
        return Recording.open(self.out)


def install_from_environment() -> None:
    """Start recording in a worker process, as :data:`VARIABLE` says; the hooks stay until it ends."""
    options = json.loads(os.environ[VARIABLE])
    if options["by"] != os.getpid():  # the recorder's own process has its hooks
        _Session(Path(options["out"]), options["layers"]).install()


class _Session:
    """The hooks of one process and what they have collected."""

    def __init__(self, out: Path, layers: str) -> None:
        self._out, self._layers = out, find_layers(layers)
        self._hooks = Hooks()
        self._rows: list[LedgerRow] = []
        self._offered: list[tuple[int, str]] = []
        self._loads = 0
        self._states: list[TensorState] = []
        self._partial: Path | None = None
        self._model_path = ""
        self._config: ModelConfig | None = None
        self._hooked: set[type] = set()

    def install(self) -> None:
        """Wrap the functions that vLLM's loader looks up."""
        module = vllm_adapter.loading_module()
        self._hooks.wrap(module, "initialize_model", self._initialize)
        self._hooks.wrap(module, "process_weights_after_loading", self._process)

    def uninstall(self) -> None:
        """Put everything back, and drop what an interrupted load left."""
        self._hooks.undo()
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial = None

    def _initialize(self, original: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        model = original(*args, **kwargs)
        if not vllm_adapter.holds_experts(model):
            return model  # a draft model, say
        vllm_config: Any = kwargs.get("vllm_config", args[0] if args else None)
        model_config = kwargs.get("model_config") or vllm_config.model_config
        self._model_path = str(model_config.model)
        self._config = ModelConfig.from_dict(model_config.hf_config.to_dict(), where=self._model_path)
        if type(model) not in self._hooked:
            self._hooked.add(type(model))
            self._hooks.wrap(type(model), "load_weights", self._load)
        return model

    def _load(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        weights: Iterable[tuple[str, torch.Tensor]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._loads += 1
        placement = vllm_adapter.placement_of(model)
        keeper = LedgerKeeper(model, placement.rank, self._loads, vllm_adapter.loader_code(model))
        failed = True
        try:
            with keeper:
                result = original(model, keeper.loading(weights), *args, **kwargs)
            failed = False
            return result
        finally:
            self._rows += keeper.rows
            self._offered += keeper.offered
            # A load that fails is worth a recording too, and one after the repack adds to what is there.
            if failed or self._rank_path(placement.rank).exists():
                self._write(model, placement.rank)

    def _process(self, original: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(model) not in self._hooked:
            return original(model, *args, **kwargs)
        rank = vllm_adapter.placement_of(model).rank
        if self._rank_path(rank).exists():
            raise RecordingError(
                "holds a load already", where=self._out, hint="Use a recorder of its own for each model that is loaded."
            )
        self._partial = partial_directory(self._rank_path(rank))
        methods = []
        try:
            for layer in vllm_adapter.expert_layers(model):
                self._watch(layer)
                methods.append(layer.module.quant_method)
            original(model, *args, **kwargs)
        finally:
            for method in methods:
                vars(method).pop("process_weights_after_loading", None)
        self._write(model, rank)

    def _rank_path(self, rank: int) -> Path:
        return self._out / f"rank{rank}"

    def _write(self, model: nn.Module, rank: int) -> None:
        """Put the rank's directory into place, or bring its index up to date."""
        path = self._rank_path(rank)
        if path.exists():
            self._write_index(model, path)
            return
        partial, self._partial = self._partial or partial_directory(path), None
        self._write_index(model, partial)
        partial.rename(path)

    def _watch(self, layer: vllm_adapter.ExpertLayer) -> None:
        """Snapshot one layer around its own repack, so that no more than one is held in memory."""
        method = layer.module.quant_method
        original = method.process_weights_after_loading

        def process(module: nn.Module) -> None:
            self._snapshot(layer, "before")
            original(module)
            self._snapshot(layer, "after")

        method.process_weights_after_loading = process

    def _snapshot(self, layer: vllm_adapter.ExpertLayer, stage: Stage) -> None:
        stored = self._layers is None or layer.layer in self._layers
        for part in layer.tensors():
            tensor = getattr(layer.module, part)
            name = f"{layer.name}.{part}"
            self._states.append(TensorState.of(tensor, layer.layer, part, stage, name, stored))
        if stored and self._partial is not None:
            save_file(
                {part: tensor.cpu().contiguous() for part, tensor in layer.tensors().items()},
                self._partial / layer_file(layer.layer, stage),
            )

    def _write_index(self, model: nn.Module, directory: Path) -> None:
        assert self._config is not None, "initialize_model was not seen"
        first = vllm_adapter.expert_layers(model)[0].module
        backend = vllm_adapter.chosen_backend(first)
        rank = RankRecording(
            path=directory,
            model=self._model_path,
            config=self._config,
            source="mxfp4" if any(name.endswith("_blocks") for _, name in self._offered) else "bf16",
            backend=backend,
            experts_class=vllm_adapter.experts_class(first),
            placement=vllm_adapter.placement_of(model),
            environment=Environment.current(backend).to_json(),
            ledger=Ledger(tuple(self._rows), tuple(self._offered)),
            states=tuple(self._states),
            census=census(model),
        )
        write_text(directory / INDEX, json.dumps(rank.index()))
