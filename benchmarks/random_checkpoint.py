"""Write a GPT-OSS checkpoint of random MXFP4 values, of any size."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from gptoss_debug.checkpoints.config import ModelConfig, read_json
from gptoss_debug.checkpoints.names import expected_tensors
from gptoss_debug.checkpoints.toy import toy_path

LAYER_OF_20B = replace(ModelConfig.named("gpt-oss-20b"), num_layers=1, vocab_size=640)
"""One full layer of gpt-oss-20b (32 experts, hidden and intermediate 2880), with the toy's vocabulary."""


def write_random_checkpoint(out: Path, config: ModelConfig = LAYER_OF_20B) -> Path:
    """Write the checkpoint with the toy's tokenizer; scales stay between 2^-10 and 2^-4."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, spec in expected_tensors(config, "mxfp4").items():
        if spec.dtypes[0] is torch.uint8:
            low, high = (117, 124) if name.endswith("_scales") else (0, 256)
            tensors[name] = torch.randint(low, high, spec.shape, dtype=torch.uint8, generator=generator)
        else:
            tensors[name] = torch.randn(spec.shape, generator=generator).mul_(0.05).bfloat16()
    shutil.copytree(toy_path("A"), out)
    sizes = asdict(config)
    names = {"num_experts": "num_local_experts", "num_layers": "num_hidden_layers",
             "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}  # fmt: skip
    changed = {names.get(key, key): value for key, value in sizes.items()}
    changed["layer_types"] = ["sliding_attention", "full_attention"][: config.num_layers] * (-(-config.num_layers // 2))
    changed["layer_types"] = changed["layer_types"][: config.num_layers]
    (out / "config.json").write_text(json.dumps(read_json(out / "config.json") | changed))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
