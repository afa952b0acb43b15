"""The search: which edit of the chain, or which other source, gives the bytes that the engine holds?

A cause is named only if it reproduces every element that is wrong. Otherwise the answer is ``unknown``, with
the nearest hypothesis and the share that it explains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from gptoss_debug.checkpoints.names import Part
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.diagnosis.compare import bits
from gptoss_debug.diagnosis.edits import Edit, edits, pairs, result_of
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts.chain import Chain

FEWEST = 8
"""A region of fewer wrong elements is too small to name a cause by: too many would fit."""


@dataclass(frozen=True)
class Cause:
    """Why one expert's tensor is wrong.

    Attributes
    ----------
    class_id
        The class of fault, or ``unknown``.
    words
        What happened; for an unknown cause, the nearest hypothesis.
    explained
        Share of the wrong elements that the cause reproduces, 0 to 1.
    wrong
        Number of elements that are not what they should be, padding included.
    region
        Rows (checkpoint order) that are wrong, where not all are: ``(first, last + 1)``.
    """

    class_id: str
    words: str
    explained: float
    wrong: int
    region: tuple[int, int] | None = None


@dataclass(frozen=True)
class Case:
    """One expert's tensor, and what it could have come from.

    Attributes
    ----------
    layer, part, expert
        Which tensor; ``expert`` is the checkpoint's number.
    live
        What the engine holds, ``[1, ...]``.
    chain
        From a checkpoint tensor of one expert to the kernel.
    checkpoint
        What it should say.
    previous
        What the engine held before, if that is known.
    """

    layer: int
    part: Part
    expert: int
    live: torch.Tensor
    chain: Chain
    checkpoint: Checkpoint
    previous: Checkpoint | None = None

    def source(self, layer: int | None = None, expert: int | None = None, of: Checkpoint | None = None) -> torch.Tensor:
        """Read a checkpoint tensor ``[1, ...]``: this one, or another layer's, expert's or checkpoint's."""
        number = self.expert if expert is None else expert
        where = of or self.checkpoint
        return where.read_expert(self.layer if layer is None else layer, self.part, slice(number, number + 1))


def explain(case: Case, hints: tuple[Edit, ...] = (), budget: float = 5.0) -> tuple[Cause, Edit | None]:
    """Find out why a tensor is wrong.

    Parameters
    ----------
    case
        The tensor.
    hints
        Edits to try first: what explained its neighbours.
    budget
        Seconds for the search among two changes, when one explains nothing.

    Returns
    -------
    The cause, and the edit by which it was found, if it was one.
    """
    right = case.chain.forward(case.source())
    live = case.live
    if live.shape != right.shape or live.dtype != right.dtype:
        return _misshapen(case, right), None
    wrong = bits(live) != bits(right)
    count = int(wrong.sum())
    if not count:
        return Cause("none", "nothing is wrong", 1.0, 0), None
    padding = _padding_only(case, right)
    if padding is not None:
        return replace(padding, wrong=count), None
    best = Cause("unknown", "no hypothesis explains any of it", 0.0, count)
    for cause, edit in _hypotheses(case, live, right, wrong, count, hints, budget):
        if cause.explained == 1.0 and (count >= FEWEST or cause.region is None or cause.class_id == "I1"):
            return (cause if edit is None else _with_alternatives(case, cause, edit)), edit
        if cause.explained > best.explained:
            best = replace(cause, class_id="unknown", words=f"nearest: {cause.words}", region=None)
    return best, None


def _hypotheses(
    case: Case,
    live: torch.Tensor,
    right: torch.Tensor,
    wrong: torch.Tensor,
    count: int,
    hints: tuple[Edit, ...],
    budget: float,
) -> Iterator[tuple[Cause, Edit | None]]:
    """Yield what could have happened, likely and cheap things first."""

    def judge(candidate: torch.Tensor | None, class_id: str, words: str) -> Cause | None:
        if candidate is None or candidate.shape != live.shape or candidate.dtype != live.dtype:
            return None
        same = bits(candidate) == bits(live)
        hit = int((same & wrong).sum())
        whole = bool(same.all())
        return Cause(class_id, words, hit / count, count, None if whole else _rows(case, wrong))

    def of(edit: Edit, source: torch.Tensor) -> Cause | None:
        return judge(result_of(edit, source), edit.class_id, edit.cause)

    source = case.source()
    for edit in hints:
        if (cause := of(edit, source)) is not None:
            yield cause, edit
    if live.dtype.is_floating_point and live.dtype.itemsize == 2 and not torch.isfinite(live.float()).all():
        yield Cause("I1", "it holds NaN or infinity", 1.0, count, _rows(case, wrong)), None
    if case.previous is not None:
        kept = judge(
            case.chain.forward(case.source(of=case.previous)), "E2", "it keeps the previous checkpoint's values"
        )
        if kept is not None:
            yield kept, None
    if (zeros := judge(torch.zeros_like(live), "E1", "it was never written: it is zero")) is not None:
        yield zeros, None
    yield from ((cause, edit) for edit in edits(case.part, case.chain) if (cause := of(edit, source)))
    shift = _scale_shift(case, live, right)
    if shift is not None:
        yield replace(shift, wrong=count), None
    for layer, expert in _elsewhere(case):
        name = f"expert {expert}" if layer == case.layer else f"layer {layer}'s expert {expert}"
        found = judge(case.chain.forward(case.source(layer, expert)), "D3", f"it holds the values of {name}")
        if found is not None:
            yield found, None
    if case.previous is not None:
        old = case.source(of=case.previous)
        for edit in edits(case.part, case.chain):
            if cause := of(edit, old):
                yield replace(cause, words=f"{cause.words}, on the previous checkpoint's values"), edit
    end = time.monotonic() + budget
    for edit in pairs(case.part, case.chain):
        if time.monotonic() > end:
            return
        if cause := of(edit, source):
            yield cause, edit


def _with_alternatives(case: Case, cause: Cause, found: Edit) -> Cause:
    """Add the other edits that give the same bytes: a permutation that is its own inverse, left out or done twice."""
    if found.depth > 1 or "previous" in cause.words:
        return cause
    source = case.source()
    result = result_of(found, source)
    words = [cause.words]
    for edit in edits(case.part, case.chain):
        other = result_of(edit, source) if edit.cause != found.cause else None
        if other is not None and result is not None and other.shape == result.shape and _same(other, result):
            words.append(edit.cause)
    return replace(cause, words=", or ".join(words) + (" (the same values)" if len(words) > 1 else ""))


def _elsewhere(case: Case) -> Iterator[tuple[int, int]]:
    """Yield the other experts of the layer, then the same expert of other layers."""
    yield from ((case.layer, e) for e in range(case.checkpoint.config.num_experts) if e != case.expert)
    yield from ((n, case.expert) for n in range(case.checkpoint.config.num_layers) if n != case.layer)


def _padding_only(case: Case, right: torch.Tensor) -> Cause | None:
    """Return the cause if only padding is wrong."""
    unwound, wanted = case.chain.unwind(case.live), case.chain.unwind(right)
    if unwound.dirty and torch.equal(bits(unwound.values), bits(wanted.values)):
        return Cause("C1", "its padding is not zero", 1.0, 0)
    return None


def _scale_shift(case: Case, live: torch.Tensor, right: torch.Tensor) -> Cause | None:
    """Return the cause if every scale that is wrong is off by the same power of two."""
    if not case.part.endswith("_scale"):
        return None
    off = bits(live).int() - bits(right).int()
    kinds = off[off != 0].unique()
    if len(kinds) != 1:
        return None
    rows = _rows(case, off != 0) if bool((off == 0).any()) else None
    return Cause("I1", f"its scales are 2^{int(kinds[0])} times what they should be", 1.0, 0, rows)


def _misshapen(case: Case, right: torch.Tensor) -> Cause:
    """Name a tensor of another shape or dtype by the step after which it would have it."""
    value = torch.empty_like(case.source(), device="meta")
    name = "the checkpoint"
    for step in case.chain.steps:
        if value.shape == case.live.shape and value.dtype == case.live.dtype:
            return Cause(
                "B2",
                f"it has the form that it has after '{name}': the steps from '{step.name}' on are missing",
                1.0,
                right.numel(),
            )
        value, name = step.forward(value), step.name
    found = f"{str(case.live.dtype).removeprefix('torch.')} {list(case.live.shape[1:])}"
    wanted = f"{str(right.dtype).removeprefix('torch.')} {list(right.shape[1:])}"
    return Cause("unknown", f"an expert is {found}, and should be {wanted}", 0.0, right.numel())


def _rows(case: Case, wrong: torch.Tensor) -> tuple[int, int] | None:
    """Return the range of rows, in checkpoint order, that wrong elements lie in; None for all of them."""
    marks = wrong.to(case.live.dtype) if case.live.dtype == torch.bfloat16 else None
    if marks is None:
        return None
    try:
        values = case.chain.unwind(marks).values[0]
    except LayoutError:
        return None
    rows = values.reshape(len(values), -1).count_nonzero(dim=1).nonzero().flatten().tolist()
    return None if not rows or len(rows) == len(values) else (rows[0], rows[-1] + 1)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other))
