"""The diagnosis: for every expert tensor that a comparison found wrong, the named cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from gptoss_debug.checkpoints.names import Part
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.diagnosis.classes import CLASSES
from gptoss_debug.diagnosis.compare import compare_recording
from gptoss_debug.diagnosis.comparison import Comparison, PartResult
from gptoss_debug.diagnosis.edits import Edit
from gptoss_debug.diagnosis.search import Case, Cause, explain
from gptoss_debug.engines.environment import release
from gptoss_debug.errors import LayoutError
from gptoss_debug.layouts import catalog
from gptoss_debug.layouts.catalog import Placement, chain_for
from gptoss_debug.recording.recording import RankRecording, Recording
from gptoss_debug.verdict import Verdict, numbered

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """The cause for one expert's tensor on one rank; see :class:`PartResult` and :class:`Cause`."""

    layer: int
    rank: int
    part: Part
    expert: int
    cause: Cause


@dataclass(frozen=True)
class Diagnosis:
    """A comparison, and the cause of each difference in it.

    Attributes
    ----------
    comparison
        What was compared.
    findings
        A cause for each tensor that is wrong.
    writers
        ``(rank, layer, part)`` -> who wrote it last.
    not_diagnosed
        What no cause was looked for, and why.
    """

    comparison: Comparison
    findings: tuple[Finding, ...]
    writers: dict[tuple[int, int, Part], str]
    not_diagnosed: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Return the comparison's verdict with causes in place of differences."""
        compared = self.comparison.verdict
        groups = list(self._groups())
        if not groups:
            return replace(compared, not_checked=[*compared.not_checked, *self.not_diagnosed])
        named = sum(len(group) for group in groups if group[0].cause.class_id != UNKNOWN)
        total = len(self.findings)
        causes = len({(g[0].part, g[0].cause.class_id) for g in groups if g[0].cause.class_id != UNKNOWN})
        headline = f"{total} expert tensors are wrong; " + (
            f"{'all' if named == total else named} of them for a named reason ({causes} in all)."
            if named
            else "none of them for a reason that could be named."
        )
        return Verdict(
            "fault",
            headline,
            [self._finding(group) for group in groups],
            [*compared.not_checked, *self.not_diagnosed],
            compared.environment,
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each tensor that is wrong."""
        rows = [asdict(finding) | asdict(finding.cause) for finding in self.findings]
        columns = ["layer", "rank", "part", "expert", "class_id", "words", "explained", "wrong", "region"]
        return pd.DataFrame(rows, columns=columns)

    def __str__(self) -> str:
        return str(self.verdict)

    def _repr_html_(self) -> str:
        return self.verdict._repr_html_()

    def _groups(self) -> Iterator[list[Finding]]:
        """Yield findings of the same part and cause together, those with most wrong elements first."""
        groups: dict[tuple[Part, str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.part, finding.cause.class_id, finding.cause.words), []).append(finding)
        yield from sorted(groups.values(), key=lambda group: -sum(f.cause.wrong for f in group))

    def _finding(self, group: list[Finding]) -> dict[str, Any]:
        first = group[0]
        layers, experts, ranks = ([getattr(f, field) for f in group] for field in ("layer", "expert", "rank"))
        where = f"{numbered('layer', layers)}, {first.part}, {numbered('expert', experts)}, {numbered('rank', ranks)}"
        fault = CLASSES.get(first.cause.class_id)
        writer = self.writers.get((first.rank, first.layer, first.part), "")
        region = f" (rows {first.cause.region[0]} to {first.cause.region[1] - 1})" if first.cause.region else ""
        if fault is None:
            sentence = (
                f"{where}: no cause could be named; {first.cause.words}, which explains {first.cause.explained:.1%}"
            )
        else:
            sentence = f"[{fault.class_id}] {where}: {first.cause.words}{region}"
        return {
            "sentence": f"{sentence}.{f' {writer}.' if writer else ''}"
            + (f" Effect: {fault.effect}. To fix: {fault.cure}" if fault else ""),
            "class_id": first.cause.class_id,
            "part": first.part,
            "layers": sorted(set(layers)),
            "experts": sorted(set(experts)),
            "ranks": sorted(set(ranks)),
            "explained": min(f.cause.explained for f in group),
            "wrong": sum(f.cause.wrong for f in group),
        }


def diagnose_recording(
    recording: Recording, checkpoint: Checkpoint, previous: Checkpoint | None = None, *, progress: bool = True
) -> Diagnosis:
    """Compare a recording with a checkpoint, and name the cause of every difference.

    Parameters
    ----------
    recording
        What an engine held after its repack, in full.
    checkpoint
        What it should hold.
    previous
        What it held before, if it was loaded twice: kept values are then recognised.
    progress
        Show bars.

    Raises
    ------
    RecordingError
        If the recording is of a model of other sizes, or its files are damaged.
    """
    comparison = compare_recording(recording, checkpoint, progress=progress)
    if previous is not None:
        recording.check_model(previous.config, previous.path)
    ranks = {rank.placement.rank: rank for rank in recording.ranks}
    bad = [r for r in comparison.results if r.status in ("differs", "padding not zero") or _misshapen(r)]
    findings: list[Finding] = []
    skipped: dict[str, int] = {}
    hints: dict[tuple[int, Part], tuple[Edit, ...]] = {}
    for result in tqdm(bad, desc="diagnose", unit="tensor", disable=None if progress else True, leave=False):
        try:
            case = _case(ranks[result.rank], result, checkpoint, previous)
        except LayoutError as error:
            skipped[str(error)] = skipped.get(str(error), 0) + 1
            continue
        key = (result.rank, result.part)
        # What could not be explained once in full time is not searched for long again.
        searched = any(f.part == result.part and f.cause.class_id == UNKNOWN for f in findings)
        cause, edit = explain(case, hints.get(key, ()), budget=0.0 if searched else 5.0)
        if edit is not None and edit not in hints.get(key, ()):
            hints[key] = (*hints.get(key, ()), edit)
        findings.append(Finding(result.layer, result.rank, result.part, result.expert, cause))
    writers = {(f.rank, f.layer, f.part): _writer(ranks[f.rank], f.layer, f.part) for f in findings}
    not_diagnosed = tuple(f"no cause was looked for in {count} tensors: {why}" for why, count in skipped.items())
    return Diagnosis(comparison, tuple(findings), writers, not_diagnosed)


def _misshapen(result: PartResult) -> bool:
    return result.status == "not compared" and any(
        words in result.reason for words in ("does not fit", "in the engine and", "is too short")
    )


def _case(rank: RankRecording, result: PartResult, checkpoint: Checkpoint, previous: Checkpoint | None) -> Case:
    kind = catalog.backend(rank.backend, release(rank.environment["vllm"]))
    if not kind.quantised and checkpoint.source == "mxfp4":
        raise LayoutError("the engine keeps floats where the checkpoint has MXFP4")
    if kind.quantised and checkpoint.source == "bf16" and not result.part.endswith("_bias"):
        raise LayoutError("a BF16 checkpoint does not fix the bytes of MXFP4 experts; compare with the MXFP4 one")
    if previous is not None and previous.source != checkpoint.source:
        raise LayoutError("the previous checkpoint has experts of another format")
    parallel = rank.placement.expert_parallel
    share = checkpoint.config.num_experts // rank.placement.size if parallel else 0
    local = result.expert - rank.placement.rank * share
    live = rank.tensor(result.layer, result.part, "after", slice(local, local + 1))
    if live is None:
        raise LayoutError("only digests were kept; record these layers in full")
    placement = Placement() if parallel else rank.placement
    chain = chain_for(result.part, checkpoint.source, kind, checkpoint.config, placement)
    return Case(result.layer, result.part, result.expert, live, chain, checkpoint, previous)


def _writer(rank: RankRecording, layer: int, part: Part) -> str:
    """Say who wrote a tensor last."""
    state = rank.state(layer, part, "after")
    rows = [row for row in rank.ledger.rows if state is not None and row.parameter == state.name]
    if not rows:
        return "No write to it was recorded"
    last = rows[-1]
    when = f"in load_weights call {last.load}" + (", after the repack" if last.load > 1 else "")
    return f"The last writer was {last.loader or last.writer} {when}"
