"""Writing GPT-OSS checkpoints: experts as MXFP4 or BF16, everything else BF16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gptoss_debug.checkpoints.config import read_json
from gptoss_debug.checkpoints.names import SCALES, WEIGHTS, expert_name
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.errors import CheckpointError
from gptoss_debug.files import new_directory
from gptoss_debug.layouts import mxfp4

FILE = "model.safetensors"

# What the published checkpoints leave in BF16.
_QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def save_mxfp4(
    out: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a model directory with MXFP4 experts, replacing one of that name.

    Parameters
    ----------
    out
        The directory.
    config
        A Hugging Face config; its ``quantization_config`` is set here.
    tensors
        A Hugging Face state dict with float experts: ``gate_up_proj [E, H, 2I]``, ``down_proj [E, I, H]``.
    texts
        Further files by name (tokenizer and so on).
    """
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            packed = mxfp4.encode(tensor.transpose(1, 2))
            stored[f"{name}_blocks"] = packed.codes.reshape(*packed.scales.shape, mxfp4.BLOCK // 2)
            stored[f"{name}_scales"] = packed.scales
        else:
            stored[name] = tensor.to(torch.bfloat16)
    save_model(out, dict(config) | {"quantization_config": _QUANTIZATION}, stored, texts or {}, replace=True)


def write_bf16_twin(checkpoint: Checkpoint, out: Path) -> None:
    """Write the BF16 twin of an MXFP4 checkpoint: the same values, experts dequantised.

    Raises
    ------
    CheckpointError
        If the checkpoint is not MXFP4.
    """
    if checkpoint.source != "mxfp4":
        raise CheckpointError("has no MXFP4 experts to dequantise", where=checkpoint.path)
    config = read_json(checkpoint.path / "config.json")
    config.pop("quantization_config", None)
    stored: dict[str, torch.Tensor] = {}
    for name in checkpoint.files:
        if not name.endswith(("_blocks", "_scales")):
            stored[name] = checkpoint.read(name)
    for layer in range(checkpoint.config.num_layers):
        for weight, scale in zip(WEIGHTS, SCALES, strict=True):
            codes = checkpoint.read_expert(layer, weight).flatten(-2)
            values = mxfp4.decode(codes, checkpoint.read_expert(layer, scale), torch.bfloat16)
            stored[expert_name(layer, weight, "bf16")] = values.transpose(1, 2)
    save_model(out, config, stored, {}, copy_from=checkpoint.path)


def save_model(
    out: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    texts: Mapping[str, str],
    *,
    copy_from: Path | None = None,
    replace: bool = False,
) -> None:
    """Write a model directory whose tensors are as they are to be stored.

    Parameters
    ----------
    out, config, tensors
        The directory and what goes into it.
    texts
        Further files by name.
    copy_from
        A model directory whose other JSON files (tokenizer and so on) are taken over.
    replace
        Whether a directory of that name that holds files is replaced.

    Raises
    ------
    GptOssDebugError
        If ``out`` holds files already and ``replace`` is false.
    """
    with new_directory(out, replace=replace) as partial:
        for file in sorted(copy_from.iterdir()) if copy_from else ():
            if file.suffix == ".json" and not file.name.endswith(".index.json"):
                shutil.copy(file, partial / file.name)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name, text in texts.items():
            (partial / name).write_text(text)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            partial / FILE,
            metadata={"format": "pt"},
        )
        (partial / FILE).chmod(0o644)
