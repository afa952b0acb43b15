"""The self-test: does the diagnosis name every planted fault, and stay silent where nothing is wrong?"""

from __future__ import annotations

import gc
import html
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

from gptoss_debug.checkpoints.config import ModelConfig, read_json
from gptoss_debug.checkpoints.names import WEIGHTS, expert_name
from gptoss_debug.checkpoints.random import write_random_checkpoint
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.checkpoints.writer import save_model, save_mxfp4, write_bf16_twin
from gptoss_debug.diagnosis.diagnosis import Diagnosis, diagnose_recording
from gptoss_debug.diagnosis.faults import FAULTS, Fault, fault
from gptoss_debug.engines.environment import Environment
from gptoss_debug.engines.ranks import placement_in, run_ranks
from gptoss_debug.engines.vllm_adapter import Load, joined_rank, loaded_model
from gptoss_debug.files import write_text
from gptoss_debug.layouts.catalog import Placement
from gptoss_debug.recording.recorder import VARIABLE, Recorder
from gptoss_debug.recording.recording import Recording
from gptoss_debug.verdict import Verdict

Kind = Literal["fault", "clean", "rounded"]


@dataclass(frozen=True)
class Trial:
    """One load, and what the diagnosis said of it.

    Attributes
    ----------
    name
        The fault, or which control it was.
    kind
        ``fault``; ``clean``, a load in which nothing is wrong; ``rounded``, one whose checkpoint is
        compared with the floats that it was rounded from.
    expected, found
        What should be named, and what was.
    right
        Whether they agree.
    """

    name: str
    kind: Kind
    expected: str
    found: str
    right: bool


@dataclass(frozen=True)
class SelfTest:
    """All trials."""

    trials: tuple[Trial, ...]
    environment: dict[str, str]

    @property
    def verdict(self) -> Verdict:
        """Return ``ok`` if every fault was named exactly, and no control gave an alarm."""
        wrong = [trial for trial in self.trials if not trial.right]
        planted = [trial for trial in self.trials if trial.kind == "fault"]
        controls = len(self.trials) - len(planted)
        headline = (
            f"{sum(t.right for t in planted)} of {len(planted)} planted faults named exactly, "
            f"{sum(t.kind != 'fault' for t in wrong)} false alarms in {controls} controls."
        )
        findings = [
            {"sentence": f"{t.name} ({t.kind}): expected {t.expected}; found {t.found}.", **asdict(t)} for t in wrong
        ]
        return Verdict("fault" if wrong or not planted else "ok", headline, findings, [], self.environment)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each trial."""
        return pd.DataFrame([asdict(trial) for trial in self.trials], columns=list(Trial.__annotations__))

    def __str__(self) -> str:
        return str(self.verdict)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.verdict.headline)}</p>" + self.to_frame().to_html(index=False, border=0)


def selftest(faults: Iterable[str] = (), *, controls: int = 5) -> SelfTest:
    """Plant faults into real loads of the toy, one at a time, and diagnose each; then diagnose what is right.

    Parameters
    ----------
    faults
        Names of faults; none means all.
    controls
        How many models of random sizes are loaded, each once clean and once compared with the floats that
        it was rounded from.

    Raises
    ------
    GptOssDebugError
        If a name is unknown, or vLLM cannot load.
    """
    chosen = [fault(name) for name in faults] or list(FAULTS)
    with tempfile.TemporaryDirectory(prefix="gptoss-selftest-") as scratch:
        out = Path(scratch)
        single = [one.name for one in chosen if one.ranks == 1]
        task = {"model": str(toy_path("A")), "faults": single, "controls": controls, "out": scratch}
        run_ranks("gptoss_debug.diagnosis.selftest", task, Placement(), doing="the self-test could not run")
        trials = [Trial(**trial) for trial in json.loads((out / "trials.json").read_text(encoding="utf-8"))]
        for one in chosen:
            if one.ranks > 1:
                trials.append(_on_ranks(one, out / one.name))
    return SelfTest(tuple(trials), Environment.current().to_json())


def _on_ranks(one: Fault, out: Path) -> Trial:
    """Plant a fault into a load on several ranks; each records itself."""
    out.mkdir()
    run_ranks(
        "gptoss_debug.diagnosis.selftest",
        {"model": str(toy_path("A")), "plant": one.name},
        Placement(0, one.ranks),
        doing=f"the load with {one.name} could not run",
        variables={VARIABLE: json.dumps({"out": str(out), "layers": "all", "by": os.getpid()})},
    )
    return _judge(one, _diagnose(Recording.open(out)))


def _diagnose(recording: Recording) -> Diagnosis:
    a, b = (Checkpoint.open(toy_path(variant)) for variant in ("A", "B"))
    return diagnose_recording(recording, a, b, progress=False)


def _judge(one: Fault, diagnosis: Diagnosis) -> Trial:
    """Hold what was named against what was planted: class, words, tensors and layers, no more and no less."""
    layers = one.layers or tuple(range(4))
    wanted = {(part, layer, one.class_id) for part in one.parts for layer in layers}
    found = {(f.part, f.layer, f.cause.class_id) for f in diagnosis.findings}
    worded = all(one.words in f.cause.words for f in diagnosis.findings)
    said = sorted({f"{f.cause.class_id} {f.cause.words}" for f in diagnosis.findings})
    right = found == wanted and worded and diagnosis.verdict.verdict == "fault"
    return Trial(one.name, "fault", f"{one.class_id} ...{one.words}...", "; ".join(said)[:200] or "nothing", right)


def _controls(number: int, work: Path, load: Load) -> Iterable[Trial]:
    """Load models of random sizes in which nothing is wrong."""
    chance = random.Random(number)
    base = Checkpoint.open(toy_path("A")).config
    for index in range(number):
        config = replace(
            base,
            num_experts=chance.choice([4, 6, 8]),
            hidden_size=32 * chance.randint(2, 12),
            intermediate_size=32 * chance.randint(1, 8),
            num_layers=chance.randint(1, 3),
        )
        name = (
            f"{config.num_experts} experts, hidden {config.hidden_size}, intermediate {config.intermediate_size}, "
            f"{config.num_layers} layers"
        )
        place = work / f"control{index}"
        write_random_checkpoint(place / "clean", config, seed=index)
        yield _control(name, "clean", place / "clean", place / "clean", place, load)
        floats = _between(place / "clean", place, config, index)
        yield _control(name, "rounded", place / "rounded", floats, place, load)


def _between(model: Path, place: Path, config: ModelConfig, seed: int) -> Path:
    """Write a model of floats that MXFP4 cannot hold, and what it is rounded to; return the first."""
    generator = torch.Generator().manual_seed(seed)
    write_bf16_twin(Checkpoint.open(model), place / "twin")
    twin = Checkpoint.open(place / "twin")
    tensors = {name: twin.read(name) for name in twin.files}
    for layer in range(config.num_layers):
        for weight in WEIGHTS:
            name = expert_name(layer, weight, "bf16")
            tensors[name] = torch.randn(tensors[name].shape, generator=generator).mul_(0.02).bfloat16()
    settings = read_json(twin.path / "config.json")
    save_model(place / "floats", settings, tensors, {}, copy_from=twin.path)
    texts = {file.name: file.read_text() for file in twin.path.glob("*.json") if file.name.startswith("token")}
    save_mxfp4(place / "rounded", settings, tensors, texts)
    return place / "floats"


def _control(name: str, kind: Kind, model: Path, against: Path, place: Path, load: Load) -> Trial:
    recorder = Recorder(place / f"recording-{kind}")
    with recorder:
        load(model)
    diagnosis = diagnose_recording(recorder.recording, Checkpoint.open(against), progress=False)
    right = diagnosis.verdict.verdict == "ok" and not diagnosis.findings
    return Trial(name, kind, "nothing", "nothing" if right else diagnosis.verdict.headline, right)


def main(task: str) -> None:
    """Be the process that loads: all faults and controls of one rank, or one fault on one of several."""
    options = json.loads(task)
    model = Path(options["model"])
    if "plant" in options:
        with (
            fault(options["plant"]).plant(),
            loaded_model(model, placement=placement_in(options), address=options["address"]),
        ):
            return
    work = Path(options["out"])
    trials = []
    with joined_rank(model, address=options["address"]) as load:
        gc.freeze()  # vLLM collects garbage twice in each load
        for name in options["faults"]:
            one = fault(name)
            recorder = Recorder(work / name)
            with recorder, one.plant():
                load(model)
            trials.append(_judge(one, _diagnose(recorder.recording)))
        trials += _controls(options["controls"], work, load)
    write_text(work / "trials.json", json.dumps([asdict(trial) for trial in trials]))


if __name__ == "__main__":
    main(sys.argv[1])
