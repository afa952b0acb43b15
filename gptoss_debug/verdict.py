"""The verdict: one sentence first, then findings, then what was not checked. One shape for every command."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gptoss_debug.engines.environment import Environment
from gptoss_debug.files import write_text

Outcome = Literal["ok", "fault", "error"]

EXIT_CODES: dict[Outcome, int] = {"ok": 0, "fault": 1, "error": 2}


@dataclass(frozen=True)
class Verdict:
    """What a command or a notebook found.

    Attributes
    ----------
    verdict
        ``ok``, ``fault`` (a difference was found) or ``error`` (it could not be checked).
    headline
        One sentence.
    findings
        One object for each fault, worst first; each has a ``sentence``.
    not_checked
        What the verdict does not speak of.
    environment
        Versions, device, emulated or real kernels.
    """

    verdict: Outcome
    headline: str
    findings: list[dict[str, Any]] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command line: 0, 1 or 2."""
        return EXIT_CODES[self.verdict]

    @classmethod
    def from_file(cls, path: Path) -> Verdict:
        """Read a verdict that a notebook wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Write the verdict as JSON."""
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n")

    def __str__(self) -> str:
        lines = [f"{self.verdict.upper()}: {self.headline}"]
        lines += [f"  - {finding['sentence']}" for finding in self.findings]
        if self.not_checked:
            lines += ["Not checked:", *(f"  - {item}" for item in self.not_checked)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        colour = {"ok": "#0072B2", "fault": "#D55E00", "error": "#CC79A7"}[self.verdict]
        items = "".join(f"<li>{html.escape(str(finding['sentence']))}</li>" for finding in self.findings)
        open_points = "".join(f"<li>{html.escape(item)}</li>" for item in self.not_checked)
        return (
            f'<div style="border-left:6px solid {colour};padding:.4em 1em;margin:.5em 0">'
            f'<strong style="color:{colour}">{self.verdict.upper()}</strong> '
            f"<strong>{html.escape(self.headline)}</strong>"
            + (f"<ul>{items}</ul>" if items else "")
            + (f"<p style='margin-bottom:0'>Not checked:</p><ul>{open_points}</ul>" if open_points else "")
            + self._environment_html()
            + "</div>"
        )

    def _environment_html(self) -> str:
        """Say on every page what computed this, and whether kernels were emulated."""
        if not self.environment:
            return ""
        return f"<p style='margin:.3em 0 0;color:#666'>{html.escape(str(Environment(**self.environment)))}</p>"


def join(names: list[str], most: int = 3) -> str:
    """Write a list as text: ``a, b, c and 4 more``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def numbered(noun: str, numbers: list[int]) -> str:
    """Write a noun with the numbers it goes for: ``layer 2``, ``experts 0-3, 7``."""
    return f"{noun}{'' if len(set(numbers)) == 1 else 's'} {ranges(numbers)}"


def ranges(numbers: list[int]) -> str:
    """Write numbers as ranges: ``0-3, 7``."""
    pieces: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pieces and pieces[-1][-1] == number - 1:
            pieces[-1].append(number)
        else:
            pieces.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in pieces)
