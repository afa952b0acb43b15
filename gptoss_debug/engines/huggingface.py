"""The Hugging Face model of the same checkpoint: dequantised, eager attention."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import Format, Part
from gptoss_debug.errors import EngineError


def open_model(path: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Load a checkpoint with transformers, its MXFP4 experts dequantised.

    Parameters
    ----------
    path
        A model directory.
    dtype
        Of all parameters; transformers dequantises to bfloat16 whatever it is asked for, and
        ``model.to`` leaves the experts alone, so every parameter is cast here.

    Raises
    ------
    EngineError
        If transformers is not installed.
    """
    transformers = _transformers()
    with _quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=torch.bfloat16
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def open_tokenizer(path: Path) -> Any:
    """Load the checkpoint's tokenizer."""
    return _transformers().AutoTokenizer.from_pretrained(path)


def complete(model: nn.Module, tokenizer: Any, prompts: Sequence[str], max_tokens: int = 48) -> list[list[int]]:
    """Return the greedy continuations of the prompts, as token ids, one prompt at a time."""
    continuations = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            output = model.generate(ids, max_new_tokens=max_tokens, do_sample=False)  # type: ignore[operator]
        continuations.append(output[0, ids.shape[1] :].tolist())
    return continuations


@dataclass(frozen=True)
class HuggingFaceExperts:
    """A loaded Hugging Face model as a source of expert tensors, in place of a checkpoint.

    Comparing with it checks the decode too: the values are those that transformers' own code got.
    """

    path: Path
    config: ModelConfig
    model: nn.Module
    source: Format = "bf16"

    @classmethod
    def open(cls, path: Path) -> HuggingFaceExperts:
        """Load the model; see :func:`open_model`."""
        return cls(path, ModelConfig.from_file(path / "config.json"), open_model(path))

    def read_expert(self, layer: int, part: Part, experts: slice = slice(None)) -> torch.Tensor:
        """Return ``gate_up_proj [E, H, 2I]``, ``down_proj [E, I, H]`` or a bias ``[E, N]``."""
        name = "gate_up_proj" if part.startswith("w13") else "down_proj"
        suffix = "_bias" if part.endswith("_bias") else ""
        module = self.model.get_submodule(f"model.layers.{layer}.mlp.experts")
        return getattr(module, name + suffix).data[experts]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise EngineError("transformers is not installed", hint="pip install 'gptoss-debug[cpu]'.") from None
    return transformers


@contextlib.contextmanager
def _quiet(transformers: Any) -> Any:
    """Keep transformers' remarks on kernels it does not use, and its bars, off the screen."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()
