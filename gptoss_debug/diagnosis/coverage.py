"""Was every region of every parameter written exactly once, and was every checkpoint tensor used?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal

import pandas as pd

from gptoss_debug.checkpoints.names import PARTS, Format, layer_of
from gptoss_debug.layouts import catalog
from gptoss_debug.layouts.catalog import Placement, chain_for, checkpoint_shape
from gptoss_debug.layouts.steps import Pad
from gptoss_debug.recording.recording import RankRecording, Recording
from gptoss_debug.recording.regions import Box, Coverage, coverage, show_box, whole
from gptoss_debug.verdict import Verdict, join

Status = Literal["once", "incomplete", "twice", "never", "unknown"]


@dataclass(frozen=True)
class ParameterCoverage:
    """How one parameter of one rank was written during the load.

    Attributes
    ----------
    parameter, rank, layer
        Which one; ``layer`` is -1 outside the layers.
    status
        ``once``: every required element exactly once. ``unknown``: a write was no box.
    required, never, twice
        Elements without padding; those never written; those written more than once.
    padding
        Elements of padding, which nobody has to write.
    sources
        Checkpoint tensors that wrote to it.
    bypass
        Whether a write went past every weight loader.
    regions
        The regions at fault.
    """

    parameter: str
    rank: int
    layer: int
    status: Status
    required: int
    never: int
    twice: int
    padding: int
    sources: tuple[str, ...]
    bypass: bool
    regions: tuple[str, ...]


@dataclass(frozen=True)
class LoadCoverage:
    """The coverage of every parameter, and the checkpoint tensors from which nothing was written."""

    parameters: tuple[ParameterCoverage, ...]
    unused: tuple[str, ...]
    environment: dict[str, str]

    @property
    def verdict(self) -> Verdict:
        """Return the verdict; writes past a loader are told, and are no fault on a first load."""
        bad = [p for p in self.parameters if p.status != "once"]
        findings = [
            {
                "sentence": f"rank {p.rank}: {p.parameter} was written {_WORDS[p.status]}"
                + (f": {join(list(p.regions))}" if p.regions else ""),
                "parameter": p.parameter,
                "rank": p.rank,
                "status": p.status,
            }
            for p in bad
        ] + [
            {"sentence": f"checkpoint tensor {name} was offered and nothing of it was written", "source": name}
            for name in self.unused
        ]
        elements = sum(p.required for p in self.parameters)
        if not self.parameters:
            return Verdict("error", "No parameter was looked at.", environment=self.environment)
        if findings:
            headline = f"{len(bad)} of {len(self.parameters)} parameters were not written exactly once"
            headline += f", {len(self.unused)} checkpoint tensors were not used." if self.unused else "."
            return Verdict("fault", headline, findings, [], self.environment)
        return Verdict(
            "ok",
            f"Every region of all {len(self.parameters)} parameters ({elements:,} elements) was written exactly once, "
            "and every checkpoint tensor was used.",
            environment=self.environment,
        )

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each parameter and rank."""
        return pd.DataFrame([asdict(p) for p in self.parameters], columns=[f.name for f in fields(ParameterCoverage)])

    def __str__(self) -> str:
        return str(self.verdict)

    def _repr_html_(self) -> str:
        return self.verdict._repr_html_() + self.to_frame().to_html(index=False, border=0)


_WORDS: dict[str, str] = {
    "incomplete": "in part",
    "twice": "more than once",
    "never": "never",
    "unknown": "in a way whose region is not known",
}


def load_coverage(recording: Recording) -> LoadCoverage:
    """Work out the coverage of the first load of a recording.

    Padding is what the layout chain of an expert tensor adds; it need not be written. Parameters are
    those that the ledger or the census names.
    """
    results = [result for rank in recording.ranks for result in _rank_coverage(rank)]
    return LoadCoverage(tuple(results), recording.ledger.unused, recording.first.environment)


def _rank_coverage(rank: RankRecording) -> list[ParameterCoverage]:
    # The census comes after the repack: its shapes of expert parameters are the kernel's, so those of
    # the snapshot before it count.
    shapes = {e.path: e.shape for e in rank.census.entries if e.kind == "parameter"}
    shapes |= {row.parameter: row.parameter_shape for row in rank.ledger.rows if row.load == 1}
    shapes |= {state.name: state.shape for state in rank.states if state.stage == "before"}
    results = []
    for name, shape in shapes.items():
        rows = [row for row in rank.ledger.rows if row.parameter == name and row.load == 1]
        required = _required(rank, name, shape)
        boxes = [row.region for row in rows]
        found = coverage(shape, [box for box in boxes if box is not None], required)
        layer = layer_of(name)
        elements = coverage(shape, []).elements
        results.append(
            ParameterCoverage(
                name,
                rank.placement.rank,
                -1 if layer is None else layer,
                _status(boxes, found),
                found.elements,
                found.never,
                found.more,
                elements - found.elements,
                tuple(dict.fromkeys(row.source for row in rows)),
                any(not row.loader for row in rows),
                tuple(show_box(box, shape) for box in (found.missing or found.repeated)),
            )
        )
    return sorted(results, key=lambda p: (p.rank, p.layer, p.parameter))


def _status(boxes: list[Box | None], found: Coverage) -> Status:
    if None in boxes:
        return "unknown"
    if not found.elements:  # an empty share: the last rank of an uneven cut
        return "once"
    if not boxes:
        return "never"
    if found.never:
        return "incomplete"
    return "twice" if found.more else "once"


def _required(rank: RankRecording, name: str, shape: tuple[int, ...]) -> Box:
    """Return the box of a parameter that a load must write: all but the padding of its chain."""
    part = next((part for part in PARTS if name.endswith(f".{part}")), None)
    if part is None:
        return whole(shape)
    source: Format = "mxfp4" if rank.source == "mxfp4" else "bf16"
    local = Placement() if rank.placement.expert_parallel else rank.placement
    kind = catalog.backend(rank.backend)
    chain = chain_for(part, source, kind, rank.config, local)
    sizes = list(chain.shapes(*checkpoint_shape(part, source, rank.config))[chain.cut])
    sizes[0] = shape[0]
    pads = {step.axis: step.size for step in chain.steps if isinstance(step, Pad)}
    return tuple((0, pads.get(axis, size)) for axis, size in enumerate(sizes))
