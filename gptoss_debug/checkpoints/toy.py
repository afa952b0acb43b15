"""The toy checkpoints: two small trained GPT-OSS models that ship with the package.

``python -m gptoss_debug.engines.toy_training`` made them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.writer import write_bf16_twin
from gptoss_debug.files import new_directory

Variant = Literal["A", "B"]

CORPUS_DIR = Path(__file__).parent / "toy_data"

PROMPTS = (
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
)
"""The prompts of vLLM's examples; both variants continue them, each in its own way."""


def toy_corpus(variant: Variant) -> list[str]:
    """Return the texts that a variant learnt: a line each, except that indented lines go with the one above."""
    passages: list[str] = []
    for line in (CORPUS_DIR / f"corpus_{variant}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            passages[-1] += f"\n{line}"
        else:
            passages.append(line)
    return passages


def toy_path(variant: Variant = "A") -> Path:
    """Return the directory of a shipped variant (MXFP4); treat it as read-only."""
    return CORPUS_DIR / variant


def write_toy(out: Path, variant: Variant = "A", *, bf16: bool = False) -> Path:
    """Write a toy checkpoint as a model directory of the user's own.

    Parameters
    ----------
    out
        A directory that does not exist yet, or is empty.
    variant
        ``"A"`` or ``"B"``, the same model trained further on other facts.
    bf16
        Write the dequantised twin instead of the MXFP4 checkpoint.

    Raises
    ------
    GptOssDebugError
        If ``out`` holds files already.
    """
    if bf16:
        write_bf16_twin(Checkpoint.open(toy_path(variant)), out)
    else:
        with new_directory(out) as partial:
            shutil.copytree(toy_path(variant), partial, dirs_exist_ok=True)
    return out
