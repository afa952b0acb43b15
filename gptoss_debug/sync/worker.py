"""The worker's side: what ``collective_rpc`` reaches in every process of a running vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gptoss_debug.engines import vllm_reload
from gptoss_debug.errors import GptOssDebugError, SyncError
from gptoss_debug.sync.stage import Expect
from gptoss_debug.sync.weight_sync import SyncReport, WeightSync

ANOTHER_RANK = "another rank cannot "
"""How the error of a rank begins that could go on itself."""


class SyncWorker:
    """Extends vLLM's worker: ``LLM(..., worker_extension_cls="gptoss_debug.sync.SyncWorker")``.

    Any framework calls ``collective_rpc("sync_call", args=(name, ...))``, which reaches every method below on
    all ranks and returns errors as values (vLLM's executors mix up later answers after an exception). One
    update is ``sync_begin``, then ``sync_put_file`` for each bucket, then ``sync_commit``, which makes it live
    on all ranks or on none; ``sync_abort`` drops it. ``sync_put`` takes a tensor, from code that runs in
    the worker: vLLM's calls between processes do not carry tensors.

    vLLM keeps the prefix cache where no worker can reach it: call ``reset_prefix_cache()`` on the engine
    after a commit (``sync_weights`` does).
    """

    def sync_begin(self, expect: Expect = "all", atomic: bool = True, token: str = "") -> None:
        """Begin an update on all ranks or none; see :meth:`WeightSync.begin`.

        Parameters
        ----------
        expect, atomic
            As there.
        token
            Whose update it is, for :meth:`sync_abort`.

        Raises
        ------
        SyncError
            As there, or because another rank cannot begin.
        """
        sync = sync_of(self)
        failure: GptOssDebugError | None = None
        try:
            sync.begin(expect, atomic=atomic)
        except GptOssDebugError as error:
            failure = error
        _raise_together(sync, failure, "begin the update")
        self._gptoss_token = token

    def sync_put(self, name: str, tensor: torch.Tensor, at: tuple[int, ...] | None = None) -> None:
        """Take a tensor or a piece of one; see :meth:`WeightSync.put`."""
        sync_of(self).put(name, tensor, None if at is None else tuple(at))

    def sync_put_file(self, path: str, places: dict[str, tuple[str, list[int] | None]] | None = None) -> None:
        """Take all tensors of a safetensors file.

        Parameters
        ----------
        path
            The file.
        places
            Key in the file -> name, and where a piece begins; None when the keys are the names.
        """
        sync = sync_of(self)
        try:
            with safe_open(Path(path), framework="pt") as handle:
                keys = list(handle.keys()) if places is None else list(places)
                for key in keys:
                    name, at = places[key] if places is not None else (key, None)
                    sync.put(name, handle.get_tensor(key), None if at is None else tuple(at))
        except (OSError, SafetensorError) as error:
            sync.abort()
            raise SyncError(
                f"cannot be read ({error})", where=path, expected="a safetensors file on this machine"
            ) from None

    def sync_commit(self) -> dict[str, Any]:
        """Make the update live on all ranks, or raise and leave all as they were; return the report.

        Raises
        ------
        SyncError
            If the update is incomplete here, or any other rank cannot commit.
        """
        return commit_together(sync_of(self)).to_json()

    def sync_abort(self, token: str | None = None) -> None:
        """Drop the update that is open, if one is; with a token, only if it began with that."""
        if token is None or getattr(self, "_gptoss_token", None) == token:
            sync_of(self).abort()

    def sync_generation(self) -> int:
        """Return the number of updates that were committed."""
        return sync_of(self).generation

    def sync_call(self, name: str, *args: Any) -> dict[str, Any]:
        """Call one of the other methods, and return its value or its error: executors pass on no exceptions whole.

        Returns
        -------
        ``{"value": ...}``, or ``{"error": {"what": ..., "where": ...}}`` with what a
        :class:`GptOssDebugError` is made of.
        """
        try:
            return {"value": getattr(SyncWorker, name)(self, *args)}
        except GptOssDebugError as error:
            return {"error": error.to_json()}
        except Exception as error:  # one rank's exception would leave the other ranks' answers in the queue
            sync_of(self).abort()
            what = f"{name} failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            return {"error": SyncError(what).to_json()}


def sync_of(worker: Any) -> WeightSync:
    """Return a worker's :class:`WeightSync`, made when it is first asked for."""
    if "_gptoss_sync" not in vars(worker):
        runner = worker.model_runner
        worker._gptoss_sync = WeightSync(
            runner.get_model(), worker.vllm_config, guard=lambda reason: _guard(runner, reason)
        )
    found: WeightSync = worker._gptoss_sync
    return found


def commit_together(sync: WeightSync) -> SyncReport:
    """Commit when every rank can; see :meth:`SyncWorker.sync_commit`."""
    failure: GptOssDebugError | None = None
    try:
        sync.verify()
    except GptOssDebugError as error:
        failure = error
    _raise_together(sync, failure, "commit the update")
    return sync.commit()


def _raise_together(sync: WeightSync, failure: GptOssDebugError | None, doing: str) -> None:
    """Raise on every rank if one has failed; nothing was changed on any."""
    (together,) = vllm_reload.agree(failure is None)
    if failure is not None:
        raise failure
    if not together:
        sync.abort()
        raise SyncError(ANOTHER_RANK + doing, hint="Its own error says why; nothing was changed.")


def _guard(runner: Any, reason: str | None) -> None:
    """Have a model runner refuse to run, or let it run again."""
    vars(runner).pop("execute_model", None)
    if reason is not None:
        runner.execute_model = _refusing(reason)


def _refusing(reason: str) -> Callable[..., Any]:
    def execute_model(*args: Any, **kwargs: Any) -> Any:
        raise SyncError(reason, hint="Send a whole update first.")

    return execute_model
