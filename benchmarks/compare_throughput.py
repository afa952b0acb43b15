"""Compare a gpt-oss-20b-sized layer with its checkpoint, beside a plain copy of the same bytes.

python benchmarks/compare_throughput.py
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gptoss_debug.checkpoints.names import PARTS, Part
from gptoss_debug.checkpoints.random import write_random_checkpoint
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.diagnosis.compare import compare_rank
from gptoss_debug.layouts.catalog import BACKENDS, Placement, chain_for

REPEATS = 5


def best(function: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


class Memory:
    """Watch the anonymous memory of this process (pages of mapped files belong to the system's cache)."""

    def __enter__(self) -> Memory:
        self.start, self.peak, self._done = self._now(), 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now() - self.start)

    @staticmethod
    def _now() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Checkpoint.open(write_random_checkpoint(Path(directory) / "model"))
        live = Path(directory) / "live.safetensors"
        kind = BACKENDS["marlin"]
        save_file(
            {
                part: chain_for(part, "mxfp4", kind, checkpoint.config).forward(checkpoint.read_expert(0, part))
                for part in PARTS
            },
            live,
        )

        def fetch(layer: int, part: Part, experts: slice) -> torch.Tensor:
            with safe_open(live, framework="pt") as handle:
                return handle.get_slice(part)[experts]

        def compare() -> None:
            results = compare_rank(fetch, checkpoint, "marlin", Placement(), progress=False)
            assert {result.status for result in results} == {"exact"}, "the layer should be exact"

        sources = [checkpoint.read_expert(0, part) for part in PARTS]
        size = sum(tensor.numel() * tensor.element_size() for tensor in sources)
        targets = [torch.empty_like(tensor) for tensor in sources]

        def copy() -> None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

        copied = best(copy)
        sources.clear()
        targets.clear()
        with Memory() as memory:
            compared = best(compare)
        print(f"checkpoint bytes of the layer: {size / 1e6:.0f} MB; {torch.get_num_threads()} threads")
        print(f"plain copy: {copied:.3f} s, {size / copied / 1e9:.2f} GB/s")
        print(f"compare:    {compared:.3f} s, {size / compared / 1e9:.2f} GB/s; {compared / copied:.1f} times the copy")
        print(f"memory of its own while comparing: {memory.peak:.0f} MiB at most")


if __name__ == "__main__":
    main()
