"""Record a load in processes of its own, one for each rank: ``record_load``.

The child processes load the model with vLLM's own loader and repack, without an engine around it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from gptoss_debug.engines.environment import QUIET
from gptoss_debug.engines.vllm_adapter import free_port, loaded_model, require_vllm
from gptoss_debug.environ import core_share
from gptoss_debug.errors import EngineError
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
        _run_ranks(model, partial, backend, tp, expert_parallel, layers)
        Recording.open(partial)
    return Recording.open(out)


def _run_ranks(model: Path, out: Path, backend: BackendName, tp: int, expert_parallel: bool, layers: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    processes = []
    logs = []
    try:
        for rank in range(tp):
            task = {
                "model": str(model),
                "backend": backend,
                "rank": rank,
                "tp": tp,
                "ep": expert_parallel,
                "address": address,
            }
            environment = {**QUIET, **os.environ} | {
                VARIABLE: json.dumps({"out": str(out), "layers": layers, "by": os.getpid()}),
                "OMP_NUM_THREADS": core_share(tp),
            }
            log = (out / f".log{rank}").open("w+", encoding="utf-8")
            logs.append(log)
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__, json.dumps(task)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        for rank, process in enumerate(processes):
            if process.poll():
                logs[rank].seek(0)
                lines = [line.strip() for line in logs[rank].read().splitlines() if line.strip()]
                reason = next((line for line in reversed(lines) if "Error" in line or "error" in line), "")
                raise EngineError(
                    f"vLLM could not load the model (rank {rank}, exit code {process.returncode})",
                    where=model,
                    found=(reason or (lines[-1] if lines else "no message"))[:400],
                )
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for rank, log in enumerate(logs):
            log.close()
            (out / f".log{rank}").unlink()


def main(task: str) -> None:
    """Be one rank: load and leave; vLLM's plugin call has installed the recorder."""
    options = json.loads(task)
    placement = Placement(options["rank"], options["tp"], options["ep"])
    with loaded_model(
        Path(options["model"]), backend=options["backend"], placement=placement, address=options["address"]
    ):
        pass


if __name__ == "__main__":
    main(sys.argv[1])
