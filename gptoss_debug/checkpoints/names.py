"""What the tensors of a GPT-OSS checkpoint are called and how they are shaped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.layouts.mxfp4 import BLOCK

Format = Literal["mxfp4", "bf16"]
"""How a checkpoint stores its experts."""

Part = Literal["w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias"]
"""The expert tensors of one layer, by vLLM's names: w13 is gate_up_proj, w2 is down_proj."""

PARTS: tuple[Part, ...] = (
    "w13_weight",
    "w13_weight_scale",
    "w13_bias",
    "w2_weight",
    "w2_weight_scale",
    "w2_bias",
)

WEIGHTS: tuple[Part, ...] = ("w13_weight", "w2_weight")
SCALES: tuple[Part, ...] = ("w13_weight_scale", "w2_weight_scale")
SCALE_OF = dict(zip(WEIGHTS, SCALES, strict=True))
"""Weight -> the scale that belongs to it."""

BIASES: tuple[Part, ...] = ("w13_bias", "w2_bias")

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_SUFFIXES: dict[Format, dict[Part, str]] = {
    "mxfp4": {
        "w13_weight": "gate_up_proj_blocks",
        "w13_weight_scale": "gate_up_proj_scales",
        "w13_bias": "gate_up_proj_bias",
        "w2_weight": "down_proj_blocks",
        "w2_weight_scale": "down_proj_scales",
        "w2_bias": "down_proj_bias",
    },
    "bf16": {
        "w13_weight": "gate_up_proj",
        "w13_weight_scale": "gate_up_proj",
        "w13_bias": "gate_up_proj_bias",
        "w2_weight": "down_proj",
        "w2_weight_scale": "down_proj",
        "w2_bias": "down_proj_bias",
    },
}

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class TensorSpec:
    """The shape a tensor must have, and the dtypes it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


def expert_name(layer: int, part: Part, source: Format) -> str:
    """Return the checkpoint tensor that holds ``part``: ``model.layers.0.mlp.experts.gate_up_proj_blocks``.

    In a BF16 checkpoint a weight and its scale both come from the one float tensor.
    """
    return f"model.layers.{layer}.mlp.experts.{_SUFFIXES[source][part]}"


def layer_of(name: str) -> int | None:
    """Return the layer number in a tensor or module name, or None outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def expected_tensors(config: ModelConfig, source: Format) -> dict[str, TensorSpec]:
    """Return every tensor of a GPT-OSS checkpoint with its shape and dtypes.

    Source: ``GptOssForCausalLM`` in transformers; the MXFP4 shapes as in the published
    gpt-oss-20b checkpoint.
    """
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_experts
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    specs = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    integers: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            specs[f"{prefix}.self_attn.{name}.weight"] = (rows, hidden)
            specs[f"{prefix}.self_attn.{name}.bias"] = (rows,)
        specs[f"{prefix}.self_attn.o_proj.weight"] = (hidden, query)
        specs[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        specs[f"{prefix}.self_attn.sinks"] = (config.num_heads,)
        specs[f"{prefix}.input_layernorm.weight"] = (hidden,)
        specs[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        specs[f"{prefix}.mlp.router.weight"] = (experts, hidden)
        specs[f"{prefix}.mlp.router.bias"] = (experts,)
        specs[expert_name(layer, "w13_bias", source)] = (experts, 2 * inner)
        specs[expert_name(layer, "w2_bias", source)] = (experts, hidden)
        if source == "bf16":
            specs[expert_name(layer, "w13_weight", source)] = (experts, hidden, 2 * inner)
            specs[expert_name(layer, "w2_weight", source)] = (experts, inner, hidden)
        else:
            for weight, scale, rows, columns in zip(WEIGHTS, SCALES, (2 * inner, hidden), (hidden, inner), strict=True):
                blocks = columns // BLOCK
                integers[expert_name(layer, weight, source)] = (experts, rows, blocks, BLOCK // 2)
                integers[expert_name(layer, scale, source)] = (experts, rows, blocks)
    return {name: TensorSpec(shape, FLOATS) for name, shape in specs.items()} | {
        name: TensorSpec(shape, (torch.uint8,)) for name, shape in integers.items()
    }
