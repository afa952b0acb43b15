"""The result of a comparison: one status for each expert tensor, and the verdict over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import pandas as pd

from gptoss_debug.checkpoints.names import Part, expert_name
from gptoss_debug.verdict import Verdict, join, numbered

Status = Literal["exact", "rounded", "differs", "padding not zero", "not compared"]


@dataclass(frozen=True)
class PartResult:
    """The comparison of one expert's tensor on one rank.

    Attributes
    ----------
    layer, rank, part, expert
        Which tensor; ``expert`` is the checkpoint's number.
    status
        ``exact``: every element has the checkpoint's bits and all padding is zero. ``rounded``: the
        checkpoint's floats, rounded to MXFP4 as :func:`gptoss_debug.layouts.mxfp4.encode` rounds.
    compared, differing
        Elements (codes, scales or floats) without padding.
    first
        The first differing element in checkpoint order, ``[N, K]`` within the expert.
    expected, found
        Its value in the checkpoint and in the engine.
    dirty_padding
        Bytes of padding that are not zero.
    reason
        Why it was not compared.
    """

    layer: int
    rank: int
    part: Part
    expert: int
    status: Status
    compared: int = 0
    differing: int = 0
    first: tuple[int, ...] | None = None
    expected: str = ""
    found: str = ""
    dirty_padding: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """All results, and what was not looked at."""

    results: tuple[PartResult, ...]
    not_checked: tuple[str, ...]
    environment: dict[str, str]

    @property
    def verdict(self) -> Verdict:
        """Return the verdict; comparing nothing is an error."""
        compared = [r for r in self.results if r.status != "not compared" and r.compared]
        bad = [r for r in compared if r.status not in ("exact", "rounded")]
        rounded = [r for r in compared if r.status == "rounded"]
        skipped = [r for r in self.results if r.status == "not compared"]
        not_checked = list(self.not_checked)
        for reason in dict.fromkeys(r.reason for r in skipped):
            here = [r for r in skipped if r.reason == reason]
            not_checked.append(f"{numbered('layer', [r.layer for r in here])}, {join(_parts(here), 6)}: {reason}")
        if not compared:
            return Verdict("error", "Nothing was compared.", [], not_checked, self.environment)
        elements = sum(r.compared for r in compared)
        layers, ranks = len({r.layer for r in compared}), len({r.rank for r in compared})
        scope = f"{_count(layers, 'layer')}, {_count(ranks, 'rank')}"
        if skipped and not bad:
            headline = (
                f"{len(skipped)} of {len(self.results)} expert tensors could not be compared; "
                f"the other {len(compared)} are exact ({scope})."
            )
            return Verdict("error", headline, [], not_checked, self.environment)
        if not bad:
            what = (
                f"hold what the checkpoint says, {len(rounded)} of them rounded to MXFP4,"
                if rounded
                else "hold exactly what the checkpoint says,"
            )
            headline = (
                f"All {len(compared)} expert tensors ({elements:,} values; {scope}) {what} and all padding is zero."
            )
            return Verdict("ok", headline, [], not_checked, self.environment)
        findings = list(_findings(bad))
        headline = f"{len(bad)} of {len(compared)} expert tensors differ from the checkpoint ({scope})."
        return Verdict("fault", headline, findings, not_checked, self.environment)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each expert's tensor."""
        return pd.DataFrame([asdict(r) for r in self.results], columns=[f.name for f in fields(PartResult)])

    def summary(self) -> pd.DataFrame:
        """Return statuses counted by part and rank, with the number of elements."""
        frame = self.to_frame()
        counts = frame.pivot_table(
            index=["part", "rank"], columns="status", values="expert", aggfunc="count", fill_value=0, sort=False
        )
        return counts.join(frame.groupby(["part", "rank"])[["compared", "differing", "dirty_padding"]].sum())

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return self.verdict.to_json()

    def __str__(self) -> str:
        return str(self.verdict)

    def _repr_html_(self) -> str:
        return self.verdict._repr_html_() + self.summary().to_html(border=0)


def _findings(bad: list[PartResult]) -> Iterator[dict[str, Any]]:
    """Join results that differ in layer, expert and rank only; most affected values first."""
    groups: dict[tuple[Part, Status], list[PartResult]] = {}
    for result in bad:
        groups.setdefault((result.part, result.status), []).append(result)
    for (part, status), here in sorted(groups.items(), key=lambda g: -sum(r.differing + r.dirty_padding for r in g[1])):
        first = here[0]
        layers, experts, ranks = ([getattr(r, field) for r in here] for field in ("layer", "expert", "rank"))
        where = f"{numbered('layer', layers)}, {part}, {numbered('expert', experts)}, {numbered('rank', ranks)}"
        if status == "differs":
            differing, compared = sum(r.differing for r in here), sum(r.compared for r in here)
            example = (
                f"first in {expert_name(first.layer, part, 'mxfp4').rpartition('.')[0]}, expert {first.expert} at "
                f"{list(first.first)}: expected {first.expected}, found {first.found}"
                if first.first is not None
                else first.reason
            )
            count = (
                f"{differing:,} of {compared:,} values differ ({differing / compared:.1%})" if differing else "differ"
            )
            sentence = f"{where}: {count}; {example}"
        else:
            sentence = f"{where}: {sum(r.dirty_padding for r in here):,} bytes of padding are not zero"
        yield {
            "sentence": sentence,
            "part": part,
            "status": status,
            "layers": sorted(set(layers)),
            "experts": sorted(set(experts)),
            "ranks": sorted(set(ranks)),
            "differing": sum(r.differing for r in here),
            "dirty_padding": sum(r.dirty_padding for r in here),
        }


def _parts(results: list[PartResult]) -> list[str]:
    return list(dict.fromkeys(r.part for r in results))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
