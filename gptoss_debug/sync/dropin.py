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
    serve on, and what was gathered goes live when the model is complete.
    """

    def __init__(self) -> None:
        self._syncs: weakref.WeakKeyDictionary[nn.Module, WeightSync] = weakref.WeakKeyDictionary()
        self._reloading: weakref.WeakSet[nn.Module] = weakref.WeakSet()
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
        sync.begin()
        self._reloading.add(model)

    def _load(self, model: nn.Module, weights: Weights) -> set[str]:
        sync = self._syncs[model]
        failure: Exception | None = None
        try:
            for name, tensor in weights:
                sync.put(name, tensor)
            if not sync.is_open:
                raise SyncError("load_weights got no tensors", hint="The engine keeps its old weights.")
        except Exception as error:
            failure = error
        # Every rank asks once in each call, so that none waits for another that has raised.
        if not agree(failure is None):
            sync.abort()
            self._reloading.discard(model)
            raise failure or SyncError("another rank refused the update", hint="Its own error says why.")
        if model not in self._reloading and sync.is_complete:
            self._commit(sync)
        return {name for name, _ in model.named_parameters()}

    def _finish(self, model: nn.Module) -> None:
        self._reloading.discard(model)
        self._commit(self._syncs[model])

    def _commit(self, sync: WeightSync) -> None:
        report = commit_together(sync)
        logger().info("gptoss_debug: %s", report)


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
