"""Run something in processes of its own, one for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptoss_debug.engines.environment import QUIET
from gptoss_debug.engines.vllm_adapter import free_port
from gptoss_debug.environ import core_share
from gptoss_debug.errors import EngineError
from gptoss_debug.layouts.catalog import Placement


def run_ranks(
    module: str,
    task: Mapping[str, Any],
    placement: Placement,
    *,
    doing: str,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run ``python -m module '{...}'`` once for each rank, and wait for all of them.

    Parameters
    ----------
    module
        A module that runs as a program; its one argument is a JSON object.
    task
        What goes into that object; ``rank``, ``tp``, ``ep`` and ``address`` (where the ranks meet) are added.
    placement
        How many ranks, and whether they share out experts; its own rank does not matter.
    doing
        What to say was not possible when a rank fails: ``"vLLM could not load the model"``.
    variables
        Further environment variables.

    Raises
    ------
    EngineError
        If a rank fails; with the last error that it printed.
    """
    address = f"tcp://127.0.0.1:{free_port()}"
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="gptoss-") as scratch:
        logs = [Path(scratch) / f"log{rank}" for rank in range(placement.size)]
        try:
            for rank, log in enumerate(logs):
                options = {**task, "rank": rank, "tp": placement.size, "ep": placement.expert_parallel}
                environment = {**QUIET, **os.environ, **(variables or {})}
                environment["OMP_NUM_THREADS"] = core_share(placement.size)
                with log.open("wb") as stream:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", module, json.dumps(options | {"address": address})],
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=stream,
                            stderr=subprocess.STDOUT,
                        )
                    )
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
            for rank, process in enumerate(processes):
                if process.poll():
                    raise EngineError(
                        f"{doing} (rank {rank}, exit code {process.returncode})",
                        where=task.get("model"),
                        found=_last_error(logs[rank]),
                    )
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "Error" in line or "error" in line), "")
    return (reason or (lines[-1] if lines else "no message"))[:400]


def placement_in(options: Mapping[str, Any]) -> Placement:
    """Return the placement that :func:`run_ranks` put into a task."""
    return Placement(options["rank"], options["tp"], options["ep"])
