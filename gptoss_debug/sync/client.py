"""The caller's side: new weights into a running ``vllm.LLM`` in one call."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gptoss_debug.engines.vllm_reload import has_unfinished_requests, refuse_requests
from gptoss_debug.errors import SyncError
from gptoss_debug.sync.stage import Expect
from gptoss_debug.sync.weight_sync import MIXED, RESYNC, SyncReport
from gptoss_debug.sync.worker import ANOTHER_RANK, SyncWorker

BUCKET_BYTES = 256 << 20
"""What travels to the workers at a time."""

_Piece = tuple[str, torch.Tensor, list[int] | None]


def sync_weights(
    llm: Any,
    named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
    *,
    expect: Expect = "all",
    atomic: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[SyncReport]:
    """Replace the weights of a running engine, on all ranks or on none, and reset its prefix cache.

    The tensors travel in files of bounded size in shared memory, so the engine's workers must be on this
    machine. An engine that was not started with
    ``worker_extension_cls="gptoss_debug.sync.SyncWorker"`` is reached by sending it functions, for
    which vLLM wants ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` (``open_engine`` sets it).

    Parameters
    ----------
    llm
        A ``vllm.LLM`` that serves GPT-OSS.
    named_tensors
        Hugging Face names and tensors, such as ``trainer.state_dict().items()``; a generator is read as
        it goes.
    expect, atomic
        As for :meth:`WeightSync.begin`.
    bucket_bytes
        Size of one file; a larger tensor travels in pieces along its first axis, of one row at least.

    Returns
    -------
    One report for each rank.

    Raises
    ------
    SyncError
        If the update is incomplete or wrong, or requests are unfinished. The engine keeps its old weights
        and can be synced again. If it breaks off while weights are being written (``atomic=False``, or a
        device error in the commit), the engine takes no requests until a whole update succeeds.
    """
    if has_unfinished_requests(llm):
        raise SyncError("the engine has unfinished requests", hint="Let them finish, or abort them; then sync.")
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    token, done = uuid.uuid4().hex, False
    # Whatever goes wrong from here to the end, nothing is generated from weights of which that is not known.
    refuse_requests(llm, SyncError(MIXED, hint=RESYNC))
    try:
        _call(llm, "sync_begin", expect if isinstance(expect, str) else sorted(expect), atomic, token)
        with tempfile.TemporaryDirectory(prefix="gptoss-sync-", dir=_shared_memory(bucket_bytes)) as scratch:
            for number, bucket in enumerate(_buckets(pairs, bucket_bytes)):
                file = Path(scratch) / f"{number}.safetensors"
                save_file({str(i): tensor for i, (_, tensor, _) in enumerate(bucket)}, file)
                places = {str(i): (name, at) for i, (name, _, at) in enumerate(bucket)}
                _call(llm, "sync_put_file", str(file), places)
                file.unlink()
        reports = [SyncReport(**report) for report in _call(llm, "sync_commit")]
        done = True
    finally:
        if not done:
            with contextlib.suppress(Exception):  # the first failure is the one to hear of
                _call(llm, "sync_abort", token)
                generation(llm)  # raises where layers were written already
                done = True
        if done:
            refuse_requests(llm, None)
    if not llm.reset_prefix_cache():
        raise SyncError(
            "the new weights are live, but vLLM could not reset its prefix cache",
            hint="Call reset_prefix_cache() when no request is running, before the next one.",
        )
    return reports


def generation(llm: Any) -> int:
    """Return how many updates an engine has had.

    Raises
    ------
    SyncError
        If ranks disagree, or hold parts of two generations.
    """
    found = _call(llm, "sync_generation")
    if len(set(found)) > 1:
        raise SyncError("the ranks hold different generations of weights", found=found, hint="Send a whole update.")
    return int(found[0])


def _call(llm: Any, name: str, *args: Any) -> list[Any]:
    """Call a method of :class:`SyncWorker` on all ranks, by its name where the engine has the extension."""
    extension = str(llm.llm_engine.vllm_config.parallel_config.worker_extension_cls or "")
    method = "sync_call" if extension.startswith("gptoss_debug.") else SyncWorker.sync_call
    answers: list[dict[str, Any]] = llm.collective_rpc(method, args=(name, *args))
    errors = [(rank, SyncError(**answer["error"])) for rank, answer in enumerate(answers) if "error" in answer]
    # A rank that only heard of another's trouble speaks last.
    for rank, error in sorted(errors, key=lambda pair: pair[1].what.startswith(ANOTHER_RANK)):
        if len(answers) > 1:
            error.what += f" (rank {rank})"
        raise error
    return [answer["value"] for answer in answers]


def _buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[_Piece]]:
    """Gather pieces into lists of at most ``limit`` bytes."""
    bucket: list[_Piece] = []
    size = 0
    for name, tensor in named_tensors:
        for piece in _pieces(name, tensor, limit):
            length = piece[1].numel() * piece[1].element_size()
            if bucket and size + length > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            size += length
    if bucket:
        yield bucket


def _pieces(name: str, tensor: torch.Tensor, limit: int) -> Iterator[_Piece]:
    size = tensor.numel() * tensor.element_size()
    if size <= limit or tensor.ndim == 0:
        # Tensors that share memory cannot be stored together, and the caller may write to its own.
        yield name, tensor.detach().cpu().clone().contiguous(), None
        return
    rows = max(1, len(tensor) * limit // size)
    for start in range(0, len(tensor), rows):
        yield name, tensor[start : start + rows].detach().cpu().clone().contiguous(), [start] + [0] * (tensor.ndim - 1)


def _shared_memory(bucket_bytes: int) -> str | None:
    """Return the directory of shared memory, if there is one that is large enough (containers have small ones)."""
    shared = "/dev/shm"
    fits = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2 * bucket_bytes
    return shared if fits else None
