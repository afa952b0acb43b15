"""The drop-in: vLLM's own second ``load_weights`` and its reload go through the fixed loader.

With ``GPTOSS_DEBUG_SYNC=fixed`` vLLM's plugin call installs it in every process, so that code written for
vLLM works unchanged.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

from torch import nn

from gptoss_debug.engines.vllm_reload import ReloadRoute, Weights, agree, logger
from gptoss_debug.errors import GptOssDebugError, SyncError
from gptoss_debug.sync.weight_sync import WeightSync
from gptoss_debug.sync.worker import commit_together

VARIABLE = "GPTOSS_DEBUG_SYNC"
"""Environment variable that switches the drop-in on; its one value is ``fixed``."""


class DropIn:
    """Routes later loads of every GPT-OSS model of this process through a :class:`WeightSync`.

    A reload of vLLM's (``reload_weights``, a weight transfer) is one update: all tensors of the model, or
    an error. Bare calls of ``load_weights`` may bring a tensor each; they are gathered, the old weights
    serve on, and what was gathered goes live when the model is complete. Such calls have no beginning that
    could be seen. The tensor that opened one update opens the next: when it comes again before the model is
    complete, what was gathered is dropped, and after an error everything is refused until it comes. (A
    trainer that restarts in another order cannot be told from one that goes on; a reload can.)
    """

    def __init__(self) -> None:
        self._syncs: weakref.WeakKeyDictionary[nn.Module, WeightSync] = weakref.WeakKeyDictionary()
        self._reloading: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._opened_by: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._route = ReloadRoute(loaded=self._loaded, begin=self._begin, load=self._load, finish=self._finish)

    def install(self) -> None:
        """Put the routes into place; they hold for models that are loaded from now on."""
        self._route.install()

    def uninstall(self) -> None:
        """Take them away."""
        self._route.uninstall()

    def _loaded(self, model: nn.Module, config: Any) -> None:
        # A strong reference from the model's sync to the model would keep it alive; vLLM keeps it anyway.
        self._syncs[model] = WeightSync(cast(nn.Module, weakref.proxy(model)), config)
        logger().info("GPTOSS_DEBUG_SYNC=fixed: later weights of %s go through gptoss_debug", type(model).__name__)

    def _begin(self, model: nn.Module) -> None:
        sync = self._syncs[model]
        sync.abort()
        self._opened_by.pop(model, None)
        failure: Exception | None = None
        try:
            sync.begin()
        except Exception as error:
            failure = error
        _together(sync, failure)
        self._reloading.add(model)

    def _load(self, model: nn.Module, weights: Weights) -> set[str]:
        sync = self._syncs[model]
        reloading = model in self._reloading
        failure: Exception | None = None
        try:
            arrived = False
            for name, tensor in weights:
                if not reloading:
                    self._open(model, name)
                sync.put(name, tensor)
                arrived = True
            if not arrived:
                raise SyncError("load_weights got no tensors", hint="The engine keeps its old weights.")
        except Exception as error:
            failure = error
            self._reloading.discard(model)
        # Every rank asks once in each call, so that none waits for another that has raised.
        complete = _together(sync, failure, not reloading and sync.is_complete)
        if complete:
            self._opened_by.pop(model, None)
            self._commit(sync)
        return {name for name, _ in model.named_parameters()}

    def _open(self, model: nn.Module, name: str) -> None:
        """Begin an update of bare calls anew where its first tensor comes again."""
        sync, first = self._syncs[model], self._opened_by.get(model)
        if first is None or name == first:
            self._opened_by[model] = name
            sync.abort()
        elif not sync.is_open:
            raise SyncError(
                "belongs to an update that has failed", where=name, hint=f"The next one begins with {first} again."
            )

    def _finish(self, model: nn.Module) -> None:
        if model not in self._reloading:
            raise SyncError("no reload is under way", hint="It failed before; its own error says why.")
        self._reloading.discard(model)
        self._commit(self._syncs[model])

    def _commit(self, sync: WeightSync) -> None:
        report = commit_together(sync)
        logger().info("gptoss_debug: %s", report)


def _together(sync: WeightSync, failure: Exception | None, complete: bool = True) -> bool:
    """Raise on every rank if one has failed; return whether all are complete."""
    fine, all_complete = agree(failure is None, complete)
    if fine:
        return all_complete
    sync.abort()
    try:
        raise failure or SyncError("another rank refused the update", hint="Its own error says why.")
    finally:
        del failure  # the error's traceback holds this frame, and that would hold the tensors


def install(value: str) -> DropIn:
    """Install the drop-in in this process.

    Raises
    ------
    GptOssDebugError
        If the variable has another value than ``fixed``.
    """
    if value != "fixed":
        raise GptOssDebugError("has an unknown value", where=VARIABLE, expected="fixed", found=value)
    dropin = DropIn()
    dropin.install()
    return dropin
