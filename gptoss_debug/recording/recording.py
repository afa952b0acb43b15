"""A recording on disk: safetensors and one JSON index for each rank, read without vLLM.

``OUT/rank0/index.json`` beside ``layer-000.before.safetensors`` and so on. Nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import Part
from gptoss_debug.errors import RecordingError
from gptoss_debug.layouts.catalog import Placement
from gptoss_debug.recording.census import Census, CensusEntry
from gptoss_debug.recording.ledger import Ledger, LedgerRow
from gptoss_debug.recording.snapshots import RepackChange, Stage, TensorState

FORMAT = 1
INDEX = "index.json"


@dataclass(frozen=True)
class RankRecording:
    """What one rank recorded.

    Attributes
    ----------
    path
        Its directory.
    model
        The checkpoint directory that was loaded, as the engine was given it.
    config
        The model's sizes.
    source
        The checkpoint's expert format, ``mxfp4`` or ``bf16``.
    backend, experts_class
        The MoE backend that ran, and its kernel class.
    placement
        The rank.
    environment
        Versions, device, emulated or real kernels.
    ledger, states, census
        The records.
    """

    path: Path
    model: str
    config: ModelConfig
    source: str
    backend: str
    experts_class: str
    placement: Placement
    environment: dict[str, str]
    ledger: Ledger
    states: tuple[TensorState, ...]
    census: Census

    @classmethod
    def open(cls, path: Path) -> RankRecording:
        """Read one rank's index.

        Raises
        ------
        RecordingError
            If it is missing, damaged, or of another format.
        """
        file = path / INDEX
        try:
            index = json.loads(file.read_text(encoding="utf-8"))
            if index["format"] != FORMAT:
                raise RecordingError("has another format", where=file, expected=FORMAT, found=index["format"])
            return cls(
                path=path,
                model=index["model"],
                config=ModelConfig(**index["config"]),
                source=index["source"],
                backend=index["backend"],
                experts_class=index["experts_class"],
                placement=Placement(**index["placement"]),
                environment=index["environment"],
                ledger=Ledger(
                    tuple(map(LedgerRow.from_json, index["ledger"])),
                    tuple((int(load), name) for load, name in index["offered"]),
                ),
                states=tuple(map(TensorState.from_json, index["states"])),
                census=Census(tuple(map(CensusEntry.from_json, index["census"]))),
            )
        except FileNotFoundError:
            raise RecordingError("is missing", where=file, hint="Record again.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordingError(
                "is damaged", where=file, found=f"{type(error).__name__}: {error}", hint="Record again."
            ) from None

    def index(self) -> dict[str, Any]:
        """Return what :meth:`open` reads."""
        return {
            "format": FORMAT,
            "model": self.model,
            "config": vars(self.config),
            "source": self.source,
            "backend": self.backend,
            "experts_class": self.experts_class,
            "placement": vars(self.placement),
            "environment": self.environment,
            "ledger": [row.to_json() for row in self.ledger.rows],
            "offered": [list(pair) for pair in self.ledger.offered],
            "states": [state.to_json() for state in self.states],
            "census": [entry.to_json() for entry in self.census.entries],
        }

    def state(self, layer: int, part: Part, stage: Stage) -> TensorState | None:
        """Return the state of a tensor, or None if it was not recorded."""
        return next((s for s in self.states if (s.layer, s.part, s.stage) == (layer, part, stage)), None)

    def tensor(self, layer: int, part: Part, stage: Stage, experts: slice = slice(None)) -> torch.Tensor | None:
        """Read a stored tensor, or some of its experts; None where only digests were kept.

        Raises
        ------
        RecordingError
            If its file is missing or truncated.
        """
        state = self.state(layer, part, stage)
        if state is None or not state.stored:
            return None
        file = self.path / layer_file(layer, stage)
        try:
            with safe_open(file, framework="pt") as handle:
                if experts == slice(None):
                    return handle.get_tensor(part)
                return handle.get_slice(part)[experts]
        except (SafetensorError, OSError) as error:
            raise RecordingError(f"cannot be read ({error})", where=file, hint="Record again.") from None


@dataclass(frozen=True)
class Recording:
    """The recordings of all ranks of one load."""

    path: Path
    ranks: tuple[RankRecording, ...]

    @classmethod
    def open(cls, path: Path | str) -> Recording:
        """Read a recording and check that its ranks belong together.

        Raises
        ------
        RecordingError
            If it is none, a rank is missing, or the ranks are of different loads.
        """
        path = Path(path)
        if not path.is_dir():
            raise RecordingError(
                "is not a directory",
                where=path,
                expected="a recording",
                hint="`gptoss-debug record MODEL --out DIR` makes one.",
            )
        found = sorted(path.glob("rank*/"), key=lambda p: int(p.name[4:]) if p.name[4:].isdigit() else -1)
        ranks = tuple(RankRecording.open(rank) for rank in found)
        if not ranks:
            raise RecordingError(
                "is no recording",
                where=path,
                expected=f"rank0/{INDEX}",
                hint="`gptoss-debug record MODEL --out DIR` makes one.",
            )
        sizes = {rank.placement.size for rank in ranks}
        if sizes != {len(ranks)} or [rank.placement.rank for rank in ranks] != list(range(len(ranks))):
            raise RecordingError(
                "does not hold every rank",
                where=path,
                expected=f"ranks 0 to {max(sizes) - 1}",
                found=f"ranks {[rank.placement.rank for rank in ranks]}",
                hint="Record again.",
            )
        if len({(rank.model, rank.backend, rank.config) for rank in ranks}) > 1:
            raise RecordingError("holds ranks of different loads", where=path)
        return cls(path, ranks)

    @property
    def first(self) -> RankRecording:
        """Return rank 0, for what all ranks share."""
        return self.ranks[0]

    @property
    def ledger(self) -> Ledger:
        """Return the ledgers of all ranks, joined."""
        return Ledger(
            tuple(row for rank in self.ranks for row in rank.ledger.rows),
            tuple(dict.fromkeys(pair for rank in self.ranks for pair in rank.ledger.offered)),
        )

    def changes(self) -> pd.DataFrame:
        """Return what the repack did: a row for each rank, layer and part (see :class:`RepackChange`)."""
        rows = []
        for rank in self.ranks:
            for before in rank.states:
                after = rank.state(before.layer, before.part, "after")
                if before.stage == "before" and after is not None:
                    rows.append({"rank": rank.placement.rank} | vars(RepackChange.between(before, after)))
        return pd.DataFrame(rows)

    def check_model(self, config: ModelConfig, where: object) -> None:
        """Check that the recording is of a model of these sizes.

        Raises
        ------
        RecordingError
            Naming the first size that differs.
        """
        for name, value in vars(config).items():
            recorded = getattr(self.first.config, name)
            if recorded != value:
                raise RecordingError(
                    f"is a recording of another model than {where}: {name} differs",
                    where=self.path,
                    expected=value,
                    found=recorded,
                    hint=f"It was recorded from {self.first.model}.",
                )

    def __str__(self) -> str:
        first = self.first
        return (
            f"{first.model} in vLLM {first.environment['vllm']}, {first.backend} experts ({first.experts_class}), "
            f"{len(self.ranks)} rank(s): {self.ledger}"
        )


def layer_file(layer: int, stage: Stage) -> str:
    """Return the name of the file that holds one layer's tensors at one stage."""
    return f"layer-{layer:03d}.{stage}.safetensors"


def find_layers(text: str) -> frozenset[int] | None:
    """Read a choice of layers: ``"all"`` (None), ``"none"``, or numbers and ranges as in ``"0,3-5"``.

    Raises
    ------
    RecordingError
        If it is none of these.
    """
    if text == "all":
        return None
    if text != "none" and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise RecordingError("is no choice of layers", where=repr(text), expected="all, none, or numbers as 0,3-5")
    layers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        if last and int(last) < int(first):
            raise RecordingError("is no choice of layers", where=repr(text), expected="ranges that go upwards")
        layers |= set(range(int(first), int(last or first) + 1))
    return frozenset(layers)
