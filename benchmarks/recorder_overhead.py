"""Load with vLLM, unrecorded and recorded (digests only, full snapshots), in turns; report ratios.

python benchmarks/recorder_overhead.py [--large]     --large: one gpt-oss-20b-sized layer in place of the toy
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from gptoss_debug.checkpoints.random import write_random_checkpoint
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.engines.vllm_adapter import loaded_model
from gptoss_debug.recording.recorder import Recorder

REPEATS = 5


def load(model: Path, around: AbstractContextManager[object]) -> float:
    begin = time.perf_counter()
    with around, loaded_model(model):
        pass
    return time.perf_counter() - begin


def main(large: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        model = write_random_checkpoint(work / "model") if large else toy_path("A")
        load(model, nullcontext())  # imports
        times: dict[str, list[float]] = {"unrecorded": [], "digests only": [], "full snapshots": []}
        for turn in range(REPEATS):
            times["unrecorded"].append(load(model, nullcontext()))
            for name, layers in (("digests only", "none"), ("full snapshots", "all")):
                times[name].append(load(model, Recorder(work / f"{turn}-{layers}", layers=layers)))
    print("one gpt-oss-20b-sized layer" if large else "toy checkpoint")
    floor = statistics.median(times["unrecorded"])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:15} {middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), ratio {middle / floor:.2f}")


if __name__ == "__main__":
    main("--large" in sys.argv[1:])
