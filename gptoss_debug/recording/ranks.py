"""Record a load in processes of its own, one for each rank: ``record_load``.

The child processes load the model with vLLM's own loader and repack, without an engine around it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gptoss_debug.engines.ranks import placement_in, run_ranks
from gptoss_debug.engines.vllm_adapter import loaded_model
from gptoss_debug.engines.vllm_cpu import require_vllm
from gptoss_debug.files import new_directory
from gptoss_debug.layouts.catalog import BackendName, Placement
from gptoss_debug.recording.recorder import VARIABLE
from gptoss_debug.recording.recording import Recording, find_layers


def record_load(
    model: Path,
    out: Path,
    *,
    backend: BackendName = "marlin",
    tp: int = 1,
    expert_parallel: bool = False,
    layers: str = "all",
) -> Recording:
    """Load a model with vLLM, record it, and return the recording.

    Parameters
    ----------
    model
        A model directory.
    out
        Where the recording goes; a directory that does not exist yet, or is empty.
    backend, tp, expert_parallel
        How vLLM is to keep the experts, and on how many ranks.
    layers
        Layers kept in full: ``"all"``, ``"none"``, or numbers as in ``"0,3-5"``.

    Raises
    ------
    EngineError
        If a rank fails; with the last lines that it printed.
    """
    require_vllm()
    find_layers(layers)
    out = Path(out).resolve()
    with new_directory(out) as partial:
        recorder = {"out": str(partial), "layers": layers, "by": os.getpid()}
        run_ranks(
            __name__,
            {"model": str(model), "backend": backend},
            Placement(0, tp, expert_parallel),
            doing="vLLM could not load the model",
            variables={VARIABLE: json.dumps(recorder)},
        )
        Recording.open(partial)
    return Recording.open(out)


def main(task: str) -> None:
    """Be one rank: load and leave; vLLM's plugin call has installed the recorder."""
    options = json.loads(task)
    with loaded_model(
        Path(options["model"]),
        backend=options["backend"],
        placement=placement_in(options),
        address=options["address"],
    ):
        pass


if __name__ == "__main__":
    main(sys.argv[1])
