"""A real ``vllm.LLM``: start it, let it complete prompts, shut it down."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gptoss_debug.engines.vllm_adapter import check_backend, engine_args
from gptoss_debug.engines.vllm_cpu import prepare_process
from gptoss_debug.environ import core_share, variables
from gptoss_debug.layouts.catalog import BackendName


def open_engine(model: Path, *, backend: BackendName = "marlin", tp: int = 1, **options: Any) -> Any:
    """Start a real ``vllm.LLM`` on the model; with one rank its model is in this process.

    Parameters
    ----------
    model, backend, tp
        As for :func:`loaded_model`.
    options
        Further arguments of ``vllm.LLM``.

    Raises
    ------
    EngineError
        If vLLM is not installed, or chose another backend than the one asked for.
    """
    prepare_process()
    # Functions are sent to the workers (apply_model) as long as the engine lives.
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    from vllm import LLM

    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", core_share(tp))} if tp > 1 else {}
    with variables(VLLM_ENABLE_V1_MULTIPROCESSING="0", **threads):
        engine = LLM(**engine_args(model, backend, tp, **options))
    try:
        engine.apply_model(_BackendCheck(backend))
    except BaseException:
        close_engine(engine)
        raise
    return engine


@dataclass(frozen=True)
class _BackendCheck:
    """A picklable check, sent to every worker."""

    backend: BackendName

    def __call__(self, model: nn.Module) -> None:
        check_backend(model, self.backend)


def complete(engine: Any, prompts: Sequence[str], max_tokens: int = 48) -> list[list[int]]:
    """Return the greedy continuations of the prompts, as token ids."""
    from vllm import SamplingParams

    outputs = engine.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def close_engine(engine: Any) -> None:
    """Shut an engine down, its worker processes and the process group included."""
    engine.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
