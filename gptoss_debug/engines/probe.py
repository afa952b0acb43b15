"""Measure the layout of the installed vLLM."""

from __future__ import annotations

from gptoss_debug.engines.environment import Environment
from gptoss_debug.engines.vllm_adapter import convert_experts
from gptoss_debug.layouts.catalog import BACKENDS, BackendName
from gptoss_debug.layouts.probe import LayoutProbe, probe


def probe_engine(backend: BackendName = "marlin") -> LayoutProbe:
    """Measure the installed vLLM's layout and hold the catalog's pattern against it."""
    environment = Environment.current()
    return probe(
        lambda tensors: convert_experts(backend, tensors),
        BACKENDS[backend],
        engine=f"vLLM {environment.vllm}",
        kernels=environment.kernels,
    )
