"""Checkpoints of random MXFP4 values, of any size: test data for sizes of which no trained weights are at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gptoss_debug.checkpoints.config import HUGGING_FACE_KEYS, ModelConfig, read_json
from gptoss_debug.checkpoints.names import expected_tensors
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.checkpoints.writer import save_model

LAYER_OF_20B = replace(ModelConfig.named("gpt-oss-20b"), num_layers=1, vocab_size=640)
"""One full layer of gpt-oss-20b (32 experts, hidden and intermediate 2880), with the toy's vocabulary."""


def write_random_checkpoint(out: Path, config: ModelConfig = LAYER_OF_20B, *, seed: int = 0) -> Path:
    """Write a model directory of random values, with the toy's tokenizer.

    Codes are uniform, scales between 2^-10 and 2^-4, floats normal with deviation 0.05.

    Parameters
    ----------
    out
        A directory that does not exist yet, or is empty.
    config
        The sizes.
    seed
        The same seed gives the same values.

    Raises
    ------
    GptOssDebugError
        If ``out`` holds files already.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in expected_tensors(config, "mxfp4").items():
        if spec.dtypes[0] is torch.uint8:
            low, high = (117, 124) if name.endswith("_scales") else (0, 256)
            tensors[name] = torch.randint(low, high, spec.shape, dtype=torch.uint8, generator=generator)
        else:
            tensors[name] = torch.randn(spec.shape, generator=generator).mul_(0.05).bfloat16()
    kinds = ["sliding_attention", "full_attention"]
    sizes = {key: getattr(config, field) for field, key in HUGGING_FACE_KEYS.items()}
    config_file = read_json(toy_path("A") / "config.json")
    layers = {"layer_types": [kinds[layer % 2] for layer in range(config.num_layers)]}
    save_model(out, config_file | sizes | layers, tensors, {}, copy_from=toy_path("A"))
    return out
