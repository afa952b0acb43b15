"""The ways in which new weights get into a loaded model: vLLM's two, and the fixed one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.engines import vllm_reload
from gptoss_debug.engines.vllm_reload import Weights
from gptoss_debug.sync.client import sync_weights
from gptoss_debug.sync.weight_sync import WeightSync
from gptoss_debug.sync.worker import commit_together

Loader = Literal["fixed", "reload_weights", "load_weights"]
LOADERS: tuple[Loader, ...] = get_args(Loader)


def load_into(loader: Loader, model: nn.Module, config: Any, weights: Weights) -> None:
    """Load weights into one rank's model, which holds others already.

    Parameters
    ----------
    loader
        ``fixed``: :class:`WeightSync`. ``reload_weights``: vLLM's reload. ``load_weights``: the model's own
        method, as trainers call it.
    model, config
        The model and its ``VllmConfig``.
    weights
        Hugging Face names and tensors.

    Raises
    ------
    Exception
        Whatever the loader raises.
    """
    _LOADERS[loader](model, config, weights)


def _fixed(model: nn.Module, config: Any, weights: Weights) -> None:
    if model not in _SYNCS:
        # The model must not be kept alive by its own entry.
        _SYNCS[model] = WeightSync(cast(nn.Module, weakref.proxy(model)), config)
    sync = _SYNCS[model]
    try:
        sync.begin()
        for name, tensor in weights:
            sync.put(name, tensor)
    except Exception:
        sync.abort()
        vllm_reload.agree(False)  # the other ranks ask this when they commit
        raise
    commit_together(sync)


_SYNCS: weakref.WeakKeyDictionary[nn.Module, WeightSync] = weakref.WeakKeyDictionary()

_LOADERS: dict[Loader, Callable[[nn.Module, Any, Weights], None]] = {
    "fixed": _fixed,
    "reload_weights": vllm_reload.reload_weights,
    "load_weights": vllm_reload.load_weights,
}


def load_into_engine(loader: Loader, llm: Any, model: Path) -> None:
    """Load a model directory's weights into a running ``vllm.LLM``.

    Raises
    ------
    Exception
        Whatever the loader raises.
    """
    if loader == "fixed":
        sync_weights(llm, tensors_of(model))
        return
    if loader == "reload_weights":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
    else:
        llm.collective_rpc(load_in_worker, args=(str(model),))
    llm.reset_prefix_cache()


def load_in_worker(worker: Any, model: str) -> None:
    """Call the model's ``load_weights`` in a worker: what trainers' worker extensions do."""
    vllm_reload.load_weights(worker.model_runner.get_model(), worker.vllm_config, tensors_of(Path(model)))


def tensors_of(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and values of every tensor of a model directory."""
    checkpoint = Checkpoint.open(model)
    for name in checkpoint.files:
        yield name, checkpoint.read(name)
