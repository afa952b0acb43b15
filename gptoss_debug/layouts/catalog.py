"""Which chain each expert tensor follows, for each checkpoint format, backend, rank and release."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import PARTS, Format, Part, expected_tensors, expert_name
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts import marlin
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.layouts.mxfp4 import BLOCK
from gptoss_debug.layouts.steps import Cast, FirstRankOnly, Pad, Quantise, Rearrange, Shard, Step

BackendName = Literal["marlin", "raw", "bf16", "bf16_cpu"]


@dataclass(frozen=True)
class Backend:
    """A way in which vLLM keeps the experts.

    Attributes
    ----------
    name
        ``marlin``: MXFP4 in Marlin tiles. ``raw``: MXFP4 as in the checkpoint (vLLM's "emulation"
        backend). ``bf16``: unquantised, ``[E, N, K]``. ``bf16_cpu``: the same, prepacked for vLLM's
        portable CPU kernel.
    hidden_multiple, intermediate_multiple
        What the sizes are padded to.
    """

    name: BackendName
    hidden_multiple: int
    intermediate_multiple: int
    weight: tuple[Step, ...] = ()
    scale: tuple[Step, ...] = ()
    bias: tuple[Step, ...] = ()

    @property
    def quantised(self) -> bool:
        """Whether the experts are MXFP4."""
        return not self.name.startswith("bf16")

    def steps(self, part: Part) -> tuple[Step, ...]:
        """Return the backend's own steps for a tensor, those after padding."""
        return self.bias if part.endswith("_bias") else self.scale if part.endswith("_scale") else self.weight


BACKENDS: dict[BackendName, Backend] = {
    "marlin": Backend(
        "marlin", marlin.HIDDEN_MULTIPLE, marlin.INTERMEDIATE_MULTIPLE, marlin.WEIGHT, marlin.SCALE, marlin.BIAS
    ),
    "raw": Backend("raw", BLOCK, BLOCK),
    "bf16": Backend("bf16", 1, 1),
    "bf16_cpu": Backend("bf16_cpu", 1, 1),
}

CPU_PREPACK_ROWS = 16
"""Output rows that vLLM's ``_C::prepack_moe_weight`` (isa "vec") interleaves; measured on vLLM 0.32.0."""

MARLIN_SINCE = (0, 12)
"""Before this release Marlin interleaved the scales of neighbouring groups; no chain for that is known here."""


def default_backend(source: Format) -> BackendName:
    """Return the backend that a checkpoint of this format is looked at in: Marlin, where it can be."""
    return "marlin" if source == "mxfp4" else "bf16"


def backend(name: str, release: tuple[int, ...] | None = None) -> Backend:
    """Look up a backend.

    Raises
    ------
    LayoutError
        If no chain is known for it, or not for that vLLM release.
    """
    if name not in BACKENDS:
        raise LayoutError(
            "no layout is known for this MoE backend",
            where=name,
            expected=" or ".join(BACKENDS),
            hint="Start vLLM with moe_backend='marlin', or compare another engine.",
        )
    if name == "marlin" and release is not None and release[:2] < MARLIN_SINCE:
        raise LayoutError(
            "its Marlin scale layout differs from the one known here",
            where=f"vLLM {'.'.join(map(str, release))}",
            expected="0.12 or later",
        )
    return BACKENDS[name]


@dataclass(frozen=True)
class Placement:
    """One rank's place: tensor-parallel or, with ``expert_parallel``, a share of the experts.

    vLLM uses the same ranks for both: with expert parallelism the experts are not cut.
    """

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False


def check_parallel(config: ModelConfig, size: int, expert_parallel: bool = False) -> None:
    """Check that a model can be cut for so many ranks.

    Raises
    ------
    LayoutError
        Naming the size that does not divide.
    """
    # vLLM's GPT-OSS does not replicate key-value heads, so there must be one for each rank.
    sizes = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    if expert_parallel:
        sizes["num_local_experts"] = config.num_experts
    for name, value in sizes.items():
        if size < 1 or value % size:
            fits = [n for n in range(1, 17) if all(v % n == 0 for v in sizes.values())]
            raise LayoutError(
                f"{name} {value} cannot be divided among {size} ranks",
                where=f"--tp {size}",
                expected=f"one of {fits}",
            )


def chain_for(
    part: Part,
    source: Format,
    kind: Backend,
    config: ModelConfig,
    placement: Placement = Placement(),
) -> Chain:
    """Return the chain from a checkpoint tensor to what a rank holds after loading.

    Parameters
    ----------
    part
        The expert tensor.
    source
        How the checkpoint stores experts.
    kind
        The backend; see :func:`backend`.
    config, placement
        The model's sizes and the rank.

    Raises
    ------
    LayoutError
        If the backend has no such tensor (scales of unquantised experts), or cannot hold this source.
    """
    if not kind.quantised and (source == "mxfp4" or part.endswith("_scale")):
        raise LayoutError(f"a {kind.name} engine holds no {part} of an {source} checkpoint")
    first = part.startswith("w13")
    shard = _expert_shard(config, placement) if placement.expert_parallel else None
    steps: list[Step] = []
    if part.endswith("_bias"):
        if shard:
            steps.append(shard)
        elif placement.size > 1:
            steps.append(_row_shard(kind, config, placement) if first else FirstRankOnly(placement.rank))
        steps.append(Cast(torch.bfloat16))
        rows, padded_rows, _, _ = _sizes(first, kind, config, placement)
        return Chain((*steps, *_pad(1, rows, padded_rows), *kind.steps(part)))

    if source == "bf16":
        steps.append(Rearrange("transpose", "e k n -> e n k"))
        if kind.quantised:
            steps.append(Quantise("scales" if part.endswith("_scale") else "codes"))
        else:
            steps.append(Cast(torch.bfloat16))
    elif part.endswith("_weight"):
        steps.append(Rearrange("flatten blocks", "e n g b -> e n (g b)", (("b", BLOCK // 2),)))

    canonical = min(len(steps), 1)
    elements = 1 if not kind.quantised else BLOCK if part.endswith("_scale") else 2
    if shard:
        steps.append(shard)
    elif placement.size > 1:
        steps.append(_row_shard(kind, config, placement) if first else _column_shard(kind, config, placement, elements))
    rows, padded_rows, columns, padded_columns = _sizes(first, kind, config, placement)
    steps += _pad(1, rows, padded_rows)
    steps += _pad(2, columns // elements, padded_columns // elements)
    if kind.name == "bf16_cpu":
        steps += _cpu_prepack(padded_columns)
    return Chain((*steps, *kind.steps(part)), canonical)


def value_chain(part: Part, kind: Backend, config: ModelConfig, placement: Placement = Placement()) -> Chain:
    """Return the chain from a BF16 weight to the values, ``[E, N, K]``, that a rank of a quantised engine stands for.

    It cuts as the engine does, but neither quantises nor pads.
    """
    steps: list[Step] = [Rearrange("transpose", "e k n -> e n k")]
    if placement.size > 1:
        first = part.startswith("w13")
        steps.append(_row_shard(kind, config, placement) if first else _column_shard(kind, config, placement, 1))
    return Chain(tuple(steps), 1)


def chains(source: Format, kind: Backend, config: ModelConfig, placement: Placement = Placement()) -> dict[Part, Chain]:
    """Return the chain of every expert tensor that the backend holds."""
    return {
        part: chain_for(part, source, kind, config, placement)
        for part in PARTS
        if kind.quantised or not part.endswith("_scale")
    }


def checkpoint_shape(part: Part, source: Format, config: ModelConfig) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of the checkpoint tensor that a chain starts from."""
    spec = expected_tensors(config, source)[expert_name(0, part, source)]
    return spec.shape, spec.dtypes[0]


def _pad(axis: int, size: int, padded: int) -> tuple[Step, ...]:
    return () if size == padded else (Pad(axis, size, padded),)


def _cpu_prepack(columns: int) -> tuple[Step, ...]:
    """Return the prepack, and the reshape that gives the prepacked tensor its old shape again."""
    return (
        Rearrange("prepack", "e (nt n) k -> e (nt k n)", (("n", CPU_PREPACK_ROWS), ("k", columns))),
        Rearrange("reshape", "e (rows columns) -> e rows columns", (("columns", columns),)),
    )


def _sizes(first: bool, kind: Backend, config: ModelConfig, placement: Placement) -> tuple[int, int, int, int]:
    """Return rows, padded rows, columns and padded columns of one rank's ``[E, N, K]``."""
    start, stop = _intermediate_range(kind, config, placement)
    share = config.intermediate_size // (1 if placement.expert_parallel else placement.size)
    hidden = config.hidden_size, _round_up(config.hidden_size, kind.hidden_multiple)
    inner = stop - start, _round_up(share, kind.intermediate_multiple)
    if first:
        return 2 * inner[0], 2 * inner[1], *hidden
    return *hidden, *inner


def _intermediate_range(kind: Backend, config: ModelConfig, placement: Placement) -> tuple[int, int]:
    """Return the rank's intermediate units, as ``GptOssModel.load_weights`` cuts them.

    A quantised engine cuts whole MXFP4 blocks, so the last rank may get fewer.
    """
    inner, unit = config.intermediate_size, BLOCK if kind.quantised else 1
    if placement.expert_parallel or placement.size == 1:
        return 0, inner
    share = unit * math.ceil(inner / unit / placement.size)
    start = min(placement.rank * share, inner)
    return start, min(start + share, inner)


def _row_shard(kind: Backend, config: ModelConfig, placement: Placement) -> Shard:
    start, stop = _intermediate_range(kind, config, placement)
    return Shard(1, 2 * start, 2 * stop, f"rank {placement.rank} of {placement.size}: rows")


def _column_shard(kind: Backend, config: ModelConfig, placement: Placement, elements: int) -> Shard:
    start, stop = _intermediate_range(kind, config, placement)
    what = {1: "columns", 2: "byte columns", BLOCK: "scale columns"}[elements]
    return Shard(2, start // elements, stop // elements, f"rank {placement.rank} of {placement.size}: {what}")


def _expert_shard(config: ModelConfig, placement: Placement) -> Shard:
    share = config.num_experts // placement.size
    start = placement.rank * share
    return Shard(0, start, start + share, f"rank {placement.rank} of {placement.size}: experts")


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
