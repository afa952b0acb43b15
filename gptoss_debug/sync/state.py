"""All that a rank's model holds, as digests: what two engines must have in common to be the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gptoss_debug.engines.vllm_reload import packed_weights
from gptoss_debug.recording.census import reachable_tensors
from gptoss_debug.recording.digests import digest

# Addresses, which no two engines share: oneDNN's packed weights are compared by what they hold. The cache
# of keys and values is not part of the weights.
_ADDRESSES = (".handler_tensor",)
_NOT_WEIGHTS = (".kv_cache",)


@dataclass(frozen=True)
class ModelState:
    """Digests and addresses of every reachable tensor of one rank's model.

    Attributes
    ----------
    digests
        Path -> SHA-256 of the values, with dtype and shape; for a tensor that shares the storage of one that
        was met before, which one that is.
    pointers
        Path -> address of the first element.
    """

    digests: dict[str, str]
    pointers: dict[str, int]

    def differing(self, other: ModelState) -> list[str]:
        """Return the paths whose values differ, or that only one of the two has."""
        return _differing(self.digests, other.digests)

    def moved(self, other: ModelState) -> list[str]:
        """Return the paths whose tensor is at another address than in the other."""
        return _differing(self.pointers, other.pointers)


def model_state(model: nn.Module) -> ModelState:
    """Digest every parameter, buffer and reachable unregistered tensor, packed weights included."""
    digests: dict[str, str] = {}
    pointers: dict[str, int] = {}
    owners: dict[int, str] = {}
    for path, _, tensor in reachable_tensors(model):
        if path.endswith(_NOT_WEIGHTS):
            continue
        owner = path
        if tensor.numel():
            pointers[path] = tensor.data_ptr()
            owner = owners.setdefault(tensor.untyped_storage().data_ptr(), path)
        if owner != path:
            digests[path] = f"in the storage of {owner} {_form(tensor)}"
        elif not path.endswith(_ADDRESSES):
            digests[path] = f"{digest(tensor)} {_form(tensor)}"
    for path, tensor in packed_weights(model):
        digests[path] = f"{digest(tensor)} {_form(tensor)}"
    return ModelState(digests, pointers)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _differing(one: dict[str, str] | dict[str, int], other: dict[str, str] | dict[str, int]) -> list[str]:
    return [path for path in dict.fromkeys([*one, *other]) if one.get(path) != other.get(path)]
