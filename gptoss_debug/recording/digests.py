"""SHA-256 of tensors, whole and for each expert."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order, as 64 hex digits.

    Shape and dtype are not part of it: a view under another dtype has the same digest.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.device.type != "cpu":
        flat = flat.cpu()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def expert_digests(tensor: torch.Tensor) -> list[str]:
    """Return :func:`digest` of every expert of ``[E, ...]``, two at a time (hashing lets other threads run)."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(digest, tensor))


def combine(digests: list[str]) -> str:
    """Return one digest for a list of them: SHA-256 of their concatenated bytes (the root of a two-level tree)."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
