"""A layer's expert tensors from the trainer's form to the engine's, expert by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import PARTS, SCALE_OF, WEIGHTS, Format, Part, expert_name
from gptoss_debug.layouts import mxfp4
from gptoss_debug.layouts.catalog import Backend, Placement, chain_for, checkpoint_shape, value_chain
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.layouts.steps import Shard

Tensors = dict[Part, torch.Tensor]
Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ExpertConverter:
    """Converts one rank's share of a layer's experts.

    Attributes
    ----------
    kind
        The engine's backend.
    config, placement
        The model's sizes and the rank.
    known_layout
        Whether the engine's tensors follow the backend's chains; if not, no old bytes can be kept.
    """

    kind: Backend
    config: ModelConfig
    placement: Placement
    known_layout: bool = True

    def checkpoint(
        self, layer: int, tensors: Mapping[str, torch.Tensor], source: Format, live: Tensors
    ) -> dict[str, torch.Tensor]:
        """Return the layer's tensors as a checkpoint of the engine's own format holds them.

        Of what is quantised or dequantised here only this rank's share is filled in.

        Parameters
        ----------
        layer
            The layer.
        tensors
            Its expert tensors by Hugging Face name.
        source
            Their format.
        live
            What the engine holds now; unchanged MXFP4 blocks keep their bytes.
        """
        own = self._own_format
        if source == own:
            return dict(tensors)
        found = {name: tensor for name, tensor in tensors.items() if name.endswith("_bias")}
        for weight in WEIGHTS:
            if own == "bf16":
                codes, scales = (tensors[expert_name(layer, p, "mxfp4")] for p in (weight, SCALE_OF[weight]))
                found[expert_name(layer, weight, "bf16")] = mxfp4.decode(
                    codes.flatten(2), scales, torch.bfloat16
                ).transpose(1, 2)
                continue
            for part, share in self._quantised(layer, weight, tensors, live).items():
                shape, dtype = checkpoint_shape(part, "mxfp4", self.config)
                whole = torch.zeros(shape, dtype=dtype, device=share.device)
                flat = whole.flatten(2) if whole.ndim == 4 else whole
                target = flat
                for step in chain_for(part, "mxfp4", self.kind, self.config, self.placement).steps:
                    if isinstance(step, Shard):
                        target = flat.narrow(step.axis, step.start, step.stop - step.start)
                target.copy_(share)
                found[expert_name(layer, part, "mxfp4")] = flat.view(shape)
        return found

    def kernel(self, layer: int, tensors: Mapping[str, torch.Tensor], source: Format, live: Tensors) -> Tensors:
        """Return what the kernel is to read, by the chains: the parts of this rank, in new tensors.

        Parameters
        ----------
        layer, tensors, source, live
            As for :meth:`checkpoint`.

        Raises
        ------
        LayoutError
            If a chain does not fit.
        """
        own = self._own_format
        found: Tensors = {}
        for weight in WEIGHTS if source == "bf16" and own == "mxfp4" else ():
            for part, share in self._quantised(layer, weight, tensors, live).items():
                chain = self._chain(part, own)
                found[part] = self._by_expert(chain.rewind, share)
        if source == "mxfp4" and own == "bf16":
            tensors = self.checkpoint(layer, tensors, source, live)
        for part in PARTS:
            if part in found or (part.endswith("_scale") and own == "bf16"):
                continue
            whole = tensors[expert_name(layer, part, own)]
            chain = self._chain(part, own)
            found[part] = self._by_expert(chain.forward, whole, self._offset)
        return found

    @property
    def _own_format(self) -> Format:
        return "mxfp4" if self.kind.quantised else "bf16"

    @property
    def _count(self) -> int:
        """Return the number of experts that this rank holds."""
        return self.config.num_experts // (self.placement.size if self.placement.expert_parallel else 1)

    @property
    def _offset(self) -> int:
        return self.placement.rank * self._count if self.placement.expert_parallel else 0

    @property
    def _local(self) -> Placement:
        """Return the placement of a rank whose experts are chosen already."""
        return Placement() if self.placement.expert_parallel else self.placement

    def _chain(self, part: Part, source: Format) -> Chain:
        return chain_for(part, source, self.kind, self.config, self._local)

    def _quantised(self, layer: int, weight: Part, tensors: Mapping[str, torch.Tensor], live: Tensors) -> Tensors:
        """Return codes ``[E, N, K/2]`` and scales ``[E, N, K/32]`` of this rank's share of a float weight."""
        name = expert_name(layer, weight, "bf16")
        values = value_chain(weight, self.kind, self.config, self._local)
        chains = {part: self._chain(part, "mxfp4") for part in (weight, SCALE_OF[weight])}
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

        def one(expert: int) -> mxfp4.Mxfp4:
            first = expert + self._offset
            wanted = values.forward(tensors[name][first : first + 1])
            if not self.known_layout:
                return mxfp4.encode(wanted)
            held = slice(expert, expert + 1)
            old = [chain.unwind(live[part][held]).values.contiguous() for part, chain in chains.items()]
            return mxfp4.encode_like(wanted, mxfp4.Mxfp4(*old))

        with _workers(tensors[name].device) as pool:
            for packed in pool.map(one, range(self._count)):
                parts[0].append(packed.codes)
                parts[1].append(packed.scales)
        return {part: torch.cat(pieces) for part, pieces in zip(chains, parts, strict=True)}

    def _by_expert(self, convert: Move, source: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Convert expert by expert, so that temporaries are as small as one, and put the results together."""
        with _workers(source.device) as pool:
            pieces = pool.map(convert, source[offset : offset + self._count].split(1))
            first = next(pieces)
            result = first.new_empty((self._count, *first.shape[1:]))
            result[0:1] = first
            for expert, piece in enumerate(pieces, start=1):
                result[expert : expert + 1] = piece
        return result


def _workers(device: torch.device) -> ThreadPoolExecutor:
    """Return threads for experts, each of which holds the temporaries of one; a GPU is kept busy by one alone."""
    return ThreadPoolExecutor(torch.get_num_threads() if device.type == "cpu" else 1)
