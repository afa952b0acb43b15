"""Put a gpt-oss-20b-sized layer into a running model by the fixed loader, beside vLLM's own preparation of it.

python benchmarks/sync_throughput.py

vLLM's preparation is its ``process_weights_after_loading`` of the layer's experts alone, on tensors that are
in memory; the fixed loader does all of an update: checks, quantising (from BF16), conversion, commit, of
every tensor of the model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from compare_throughput import Memory  # beside this script

from gptoss_debug.checkpoints.names import PARTS
from gptoss_debug.checkpoints.random import write_random_checkpoint
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path, write_toy
from gptoss_debug.checkpoints.writer import write_bf16_twin
from gptoss_debug.engines.vllm_adapter import config_of, convert_experts, joined_rank
from gptoss_debug.layouts.catalog import BACKENDS, Placement, chain_for
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.sync.loaders import tensors_of
from gptoss_debug.sync.state import model_state
from gptoss_debug.sync.weight_sync import WeightSync

REPEATS = 3


def median(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def own_preparation(model: Path) -> float:
    """Time vLLM's conversion of a layer's experts, padded as its loader leaves them."""
    checkpoint = Checkpoint.open(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    raw = {}
    for part in PARTS:
        chain = chain_for(part, "mxfp4", BACKENDS["marlin"], checkpoint.config, Placement())
        before = Chain(chain.steps[: len(chain.steps) - len(BACKENDS["marlin"].steps(part))])
        raw[part] = before.forward(checkpoint.read_expert(0, part)).to(device)
    return median(lambda: convert_experts("marlin", {part: tensor.clone() for part, tensor in raw.items()}))


def update(sync: WeightSync, weights: list[tuple[str, torch.Tensor]], atomic: bool) -> float:
    sync.begin(atomic=atomic)
    for name, tensor in weights:
        sync.put(name, tensor)
    return sync.commit().commit_seconds


def measure(a: Path, b: Path, b16: Path, own: float | None) -> None:
    with joined_rank(a) as load:
        cold = model_state(load(b))
        model = load(a)
        device = next(model.parameters()).device
        for source, path in (("mxfp4", b), ("bf16", b16)):
            weights = [(name, tensor.to(device)) for name, tensor in tensors_of(path)]
            for way in ("chains", "engine"):
                for atomic in (True, False):
                    sync = WeightSync(model, config_of(model), way=way, guard=lambda reason: None)
                    seconds = median(lambda s=sync, w=weights, m=atomic: update(s, w, m))
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                        before = torch.cuda.memory_allocated()
                        update(sync, weights, atomic)
                        mib = (torch.cuda.max_memory_allocated() - before) / 2**20
                    else:
                        with Memory() as memory:
                            update(sync, weights, atomic)
                        mib = memory.peak
                    differing = model_state(model).differing(cold)
                    ratio = "" if own is None else f", {seconds / own:.2f} times vLLM's own preparation"
                    print(
                        f"{source:5} {way:6} {'atomic' if atomic else 'in place':8} {seconds:.3f} s{ratio}; "
                        f"peak {mib:.0f} MiB; {len(differing)} tensors differ from a cold start",
                        flush=True,
                    )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        print("toy checkpoint")
        measure(toy_path("A"), toy_path("B"), write_toy(work / "toy16", "B", bf16=True), None)
        a, b = (write_random_checkpoint(work / name, seed=seed) for seed, name in enumerate("ab"))
        write_bf16_twin(Checkpoint.open(b), work / "b16")
        own = own_preparation(b)
        print(f"one gpt-oss-20b-sized layer; vLLM's own preparation of its experts: {own:.3f} s")
        measure(a, b, work / "b16", own)


if __name__ == "__main__":
    main()
