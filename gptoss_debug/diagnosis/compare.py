"""Compare live expert tensors with the checkpoint, bit for bit, in checkpoint order.

Each live tensor goes back through the inverse of its chain; the rank's share of the checkpoint comes
forward to the same point. Works expert by expert, so memory is bounded by a few of those.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from tqdm.auto import tqdm

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import PARTS, SCALE_OF, Format, Part
from gptoss_debug.diagnosis.comparison import Comparison, PartResult, Status
from gptoss_debug.engines.environment import release
from gptoss_debug.errors import LayoutError, RecordingError
from gptoss_debug.layouts import catalog, mxfp4
from gptoss_debug.layouts.catalog import Backend, Placement, chain_for
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.recording.digests import digest
from gptoss_debug.recording.recording import RankRecording, Recording


class ExpertSource(Protocol):
    """Where the right values come from: a checkpoint, or a model that transformers loaded."""

    @property
    def path(self) -> Path:
        """Return where it was read from."""

    @property
    def config(self) -> ModelConfig:
        """Return the model's sizes."""

    @property
    def source(self) -> Format:
        """Return the format of its expert tensors."""

    def read_expert(self, layer: int, part: Part, experts: slice = slice(None)) -> torch.Tensor:
        """Return a part of a layer, or some of its experts, in that format."""


Fetch = Callable[[int, Part, slice], torch.Tensor | None]
"""``(layer, part, experts) -> live tensor``, or None where its values are not at hand."""


def compare_recording(recording: Recording, checkpoint: ExpertSource, *, progress: bool = True) -> Comparison:
    """Compare what a recording holds after the repack with a checkpoint.

    Layers of which only digests were kept are compared by digest: exact or not, but not where.

    Raises
    ------
    RecordingError
        If the recording is of a model of other sizes, or its files are damaged.
    """
    recording.check_model(checkpoint.config, checkpoint.path)
    results: list[PartResult] = []
    for rank in recording.ranks:

        def fetch(layer: int, part: Part, experts: slice, rank: RankRecording = rank) -> torch.Tensor | None:
            return rank.tensor(layer, part, "after", experts)

        def lookup(layer: int, part: Part, rank: RankRecording = rank) -> tuple[str, ...] | None:
            state = rank.state(layer, part, "after")
            return None if state is None else state.experts

        found = compare_rank(
            fetch,
            checkpoint,
            rank.backend,
            rank.placement,
            release=release(rank.environment["vllm"]),
            digests=lookup,
            progress=progress,
        )
        for result in found:
            if result.status in ("differs", "padding not zero"):
                _check_stored(rank, result)
        results += found
    return Comparison(tuple(results), _OUT_OF_SCOPE, recording.first.environment)


def _check_stored(rank: RankRecording, result: PartResult) -> None:
    """Check that a tensor that differs is what the engine held, not a file that changed since."""
    share = rank.config.num_experts // rank.placement.size if rank.placement.expert_parallel else 0
    local = result.expert - rank.placement.rank * share
    state = rank.state(result.layer, result.part, "after")
    stored = rank.tensor(result.layer, result.part, "after", slice(local, local + 1))
    if state is not None and stored is not None and digest(stored) != state.experts[local]:
        raise RecordingError(
            f"{result.part} of layer {result.layer}, expert {result.expert} is not what was recorded",
            where=rank.path,
            expected=f"SHA-256 {state.experts[local][:12]}...",
            found=f"{digest(stored)[:12]}...",
            hint="The file changed since. Record again.",
        )


_OUT_OF_SCOPE = (
    "tensors outside the experts (attention, router, norms, embeddings): the ledger shows what was written to them",
)


def compare_rank(
    fetch: Fetch,
    checkpoint: ExpertSource,
    backend: str,
    placement: Placement,
    *,
    release: tuple[int, ...] | None = None,
    digests: Callable[[int, Part], tuple[str, ...] | None] | None = None,
    progress: bool = True,
) -> list[PartResult]:
    """Compare one rank's expert tensors with a checkpoint.

    Parameters
    ----------
    fetch
        Where live tensors come from.
    checkpoint
        What they should say.
    backend, placement, release
        Which layout they have.
    digests
        SHA-256 for each expert, for tensors whose values ``fetch`` does not have.
    progress
        Show a bar.

    Raises
    ------
    LayoutError
        If no layout is known for the backend.
    """
    kind = catalog.backend(backend, release)
    # Under expert parallelism a rank holds whole experts: the chain of a single rank, at an offset.
    local = Placement() if placement.expert_parallel else placement
    share = checkpoint.config.num_experts // (placement.size if placement.expert_parallel else 1)
    offset = placement.rank * share if placement.expert_parallel else 0
    tasks = [
        _Task(layer, part, slice(expert, expert + 1), offset, placement.rank, kind, local)
        for layer in range(checkpoint.config.num_layers)
        for part in PARTS
        # In values, a scale is part of the weight that it belongs to.
        if not part.endswith("_scale") or (kind.quantised and checkpoint.source == "mxfp4")
        for expert in range(share)
    ]
    # Reading, copying and comparing release the interpreter, so threads share the cores; each holds one expert.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        done = pool.map(lambda task: task.run(fetch, checkpoint, digests), tasks)
        bar = tqdm(
            done,
            desc=f"compare rank {placement.rank}",
            total=len(tasks),
            unit="tensor",
            disable=None if progress else True,
            leave=False,
        )
        return [result for results in bar for result in results]


@dataclass(frozen=True)
class _Task:
    """One expert of one tensor (a slice, so that the expert axis stays)."""

    layer: int
    part: Part
    experts: slice
    offset: int
    rank: int
    kind: Backend
    placement: Placement

    def run(
        self, fetch: Fetch, checkpoint: ExpertSource, digests: Callable[[int, Part], tuple[str, ...] | None] | None
    ) -> list[PartResult]:
        try:
            live = fetch(self.layer, self.part, self.experts)
            chain = chain_for(
                self.part,
                "bf16" if self._dequantises(checkpoint) else checkpoint.source,
                self.kind,
                checkpoint.config,
                self.placement,
            )
            if live is None:
                return self._by_digest(chain, checkpoint, digests(self.layer, self.part) if digests else None)
            if checkpoint.source == "bf16" and self.kind.quantised and self.part.endswith("_weight"):
                return self._by_value(live, fetch, checkpoint)
            unwound = chain.unwind(live)
            expected = chain.expected(self._source(checkpoint))
            padding = [_dirty([pad[i] for _, pad in unwound.padding]) for i in range(len(live))]
            return self._results(unwound.values, expected, padding)
        except LayoutError as error:
            return self._skipped(str(error))

    def _dequantises(self, checkpoint: ExpertSource) -> bool:
        """Whether the engine keeps floats where the checkpoint has MXFP4."""
        return checkpoint.source == "mxfp4" and not self.kind.quantised

    def _source(self, checkpoint: ExpertSource) -> torch.Tensor:
        chosen = slice(self.experts.start + self.offset, self.experts.stop + self.offset)
        tensor = checkpoint.read_expert(self.layer, self.part, chosen)
        if not self._dequantises(checkpoint) or self.part.endswith("_bias"):
            return tensor
        scales = checkpoint.read_expert(self.layer, SCALE_OF[self.part], chosen)
        return mxfp4.decode(tensor.flatten(2), scales, torch.bfloat16).transpose(1, 2)

    def _by_value(self, live: torch.Tensor, fetch: Fetch, checkpoint: ExpertSource) -> list[PartResult]:
        """Compare dequantised values: the bytes of an MXFP4 block are not unique.

        Values that MXFP4 cannot hold are compared with what they round to, and called ``rounded``.
        """
        live_scales = fetch(self.layer, SCALE_OF[self.part], self.experts)
        if live_scales is None:
            return self._skipped("the scales that belong to it were not kept")
        codes, scales = (
            chain_for(part, "mxfp4", self.kind, checkpoint.config, self.placement).unwind(tensor)
            for part, tensor in ((self.part, live), (SCALE_OF[self.part], live_scales))
        )
        chain = catalog.value_chain(self.part, self.kind, checkpoint.config, self.placement)
        wanted = chain.forward(self._source(checkpoint)).float()
        values = mxfp4.decode(codes.values, scales.values)
        rounded = wanted if torch.equal(values, wanted) else mxfp4.encode(wanted).decode()
        padding = [_dirty([pad[i] for _, pad in (*codes.padding, *scales.padding)]) for i in range(len(live))]
        results = self._results(values, rounded, padding)
        return [
            replace(result, status="rounded") if result.status == "exact" and not torch.equal(one, want) else result
            for result, one, want in zip(results, rounded, wanted, strict=True)
        ]

    def _by_digest(self, chain: Chain, checkpoint: ExpertSource, digests: tuple[str, ...] | None) -> list[PartResult]:
        if digests is None:
            return self._skipped("it was not recorded")
        if checkpoint.source == "bf16" and self.kind.quantised and self.part.endswith("_weight"):
            return self._skipped("only digests were kept, and a BF16 source does not fix the bytes")
        source = self._source(checkpoint)
        wanted = chain.forward(source)
        elements = chain.expected(source)[0].numel() * (
            2 if self.kind.quantised and self.part.endswith("_weight") else 1
        )
        results = []
        for index, number in enumerate(range(self.experts.start, self.experts.stop)):
            same = digest(wanted[index]) == digests[number]
            results.append(
                PartResult(
                    self.layer,
                    self.rank,
                    self.part,
                    number + self.offset,
                    "exact" if same else "differs",
                    compared=elements,
                    reason="" if same else "compared by digest, so where they differ is not known",
                )
            )
        return results

    def _results(self, live: torch.Tensor, expected: torch.Tensor, padding: list[int]) -> list[PartResult]:
        if live.dtype != expected.dtype:
            return self._skipped(f"it is {live.dtype} in the engine and {expected.dtype} by the checkpoint")
        if live.shape != expected.shape:
            return self._skipped(
                f"an expert is {list(live.shape[1:])} in the engine and {list(expected.shape[1:])} in the checkpoint"
            )
        results = []
        for index, number in enumerate(range(self.experts.start, self.experts.stop)):
            one = PartResult(
                self.layer, self.rank, self.part, number + self.offset, "exact", dirty_padding=padding[index]
            )
            results.append(_compare_expert(one, live[index], expected[index]))
        return results

    def _skipped(self, reason: str) -> list[PartResult]:
        return [
            PartResult(self.layer, self.rank, self.part, number + self.offset, "not compared", reason=reason)
            for number in range(self.experts.start, self.experts.stop)
        ]


def _dirty(padding: list[torch.Tensor]) -> int:
    return sum(int(torch.count_nonzero(pad.contiguous().view(torch.uint8))) for pad in padding)


def _compare_expert(result: PartResult, live: torch.Tensor, expected: torch.Tensor) -> PartResult:
    """Compare one expert's tensor; bits for codes, scales and biases, so that -0.0 is not 0.0."""
    packed = result.part.endswith("_weight") and live.dtype == torch.uint8
    elements = live.numel() * (2 if packed else 1)
    known = asdict(result) | {"compared": elements}
    if torch.equal(bits(live), bits(expected)):
        status: Status = "padding not zero" if result.dirty_padding else "exact"
        return PartResult(**known | {"status": status})
    if packed:
        live, expected = mxfp4.unpack_codes(live), mxfp4.unpack_codes(expected)
    differing = (bits(live) != bits(expected)).nonzero()
    first = tuple(differing[0].tolist())
    return PartResult(
        **known
        | {
            "status": "differs",
            "differing": len(differing),
            "first": first,
            "expected": _show(result.part, expected[first]),
            "found": _show(result.part, live[first]),
        }
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as integers of the same width, so that -0.0 is not 0.0 and NaN equals itself."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(views[tensor.element_size()])


def _show(part: Part, element: torch.Tensor) -> str:
    """Write one element for a reader: a code by its E2M1 value, a scale as a power of two, a float as it is."""
    if element.dtype != torch.uint8:
        return f"{element.item():.6g}"
    number = int(element.item())
    if part.endswith("_scale"):
        return "NaN" if number == mxfp4.SCALE_NAN else f"2^{number - mxfp4.SCALE_BIAS}"
    return f"code {number} ({'-' if number > 7 else ''}{mxfp4.E2M1_VALUES[number & 7]})"
