from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path, write_toy
from gptoss_debug.recording.ranks import record_load
from gptoss_debug.recording.recording import Recording


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def toy() -> Checkpoint:
    return Checkpoint.open(toy_path("A"))


@pytest.fixture(scope="session")
def toy_bf16(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_toy(tmp_path_factory.mktemp("toy") / "bf16", "A", bf16=True))


@pytest.fixture(scope="session")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, toy: Checkpoint, toy_bf16: Checkpoint
) -> Callable[..., Recording]:
    """Record a load by real vLLM, once for each way of loading."""
    made: dict[tuple[object, ...], Recording] = {}

    def record(backend: str = "marlin", tp: int = 1, expert_parallel: bool = False, layers: str = "all") -> Recording:
        key = (backend, tp, expert_parallel, layers)
        if key not in made:
            model = toy_bf16 if backend == "bf16" else toy
            out = tmp_path_factory.mktemp("recording") / "out"
            made[key] = record_load(
                model.path, out, backend=backend, tp=tp, expert_parallel=expert_parallel, layers=layers
            )
        return made[key]

    return record


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Recording], Recording]:
    """Return a copy of a recording that a test may damage."""
    import shutil

    def copy(recording: Recording) -> Recording:
        return Recording.open(shutil.copytree(recording.path, tmp_path / "copy"))

    return copy
