"""What oracles say: results and the findings in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["pass", "fault"]


@dataclass(frozen=True)
class Finding:
    """One fault that an oracle saw on one rank.

    Attributes
    ----------
    oracle
        Which oracle.
    class_id
        The class of ``failures.md``.
    what
        What is wrong, without the tensors: ``"keeps A's values"``.
    tensors
        Paths in the model.
    rank
        The rank.
    """

    oracle: str
    class_id: str
    what: str
    tensors: tuple[str, ...]
    rank: int


@dataclass(frozen=True)
class OracleResult:
    """What one oracle said of one loader on one rank.

    Attributes
    ----------
    oracle
        ``"warm A->B equals cold B"`` and so on.
    outcome
        ``pass`` or ``fault``.
    says
        A few words for a table: ``"same bits"``, ``"12 tensors differ"``, ``"raises RuntimeError"``.
    findings
        The faults.
    """

    oracle: str
    outcome: Outcome
    says: str
    findings: tuple[Finding, ...]

    @classmethod
    def from_json(cls, result: dict[str, Any]) -> OracleResult:
        """Read a result back from JSON."""
        findings = tuple(Finding(**f | {"tensors": tuple(f["tensors"])}) for f in result["findings"])
        return cls(**result | {"findings": findings})
