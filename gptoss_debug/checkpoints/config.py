"""The sizes of a GPT-OSS model, from its ``config.json`` or by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptoss_debug.errors import CheckpointError

MODEL_TYPE = "gpt_oss"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a GPT-OSS model; names follow the Hugging Face config."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: object = "config") -> ModelConfig:
        """Read a Hugging Face config.

        Raises
        ------
        CheckpointError
            If it is of another model type, or a size is missing or not a positive whole number.
        """
        if config.get("model_type") != MODEL_TYPE:
            raise CheckpointError(
                "is not a GPT-OSS config",
                where=where,
                expected=f'"model_type": "{MODEL_TYPE}"',
                found=json.dumps(config.get("model_type")),
            )
        sizes = {}
        for field, key in HUGGING_FACE_KEYS.items():
            value = config.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(
                    f'"{key}" is unusable',
                    where=where,
                    expected="a positive whole number",
                    found=json.dumps(value),
                )
            sizes[field] = value
        return cls(**sizes)

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read ``config.json``; see :meth:`from_dict`."""
        return cls.from_dict(read_json(path), where=path)

    @classmethod
    def named(cls, name: str) -> ModelConfig:
        """Return the sizes of ``gpt-oss-20b`` or ``gpt-oss-120b``."""
        try:
            return NAMED[name]
        except KeyError:
            raise CheckpointError(
                "is neither a model directory nor a model known by name",
                where=name,
                expected=" or ".join(NAMED),
            ) from None


HUGGING_FACE_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_experts": "num_local_experts",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}

# https://huggingface.co/openai/gpt-oss-20b/blob/main/config.json and gpt-oss-120b
NAMED = {
    "gpt-oss-20b": ModelConfig(2880, 2880, 32, 24, 64, 8, 64, 201088),
    "gpt-oss-120b": ModelConfig(2880, 2880, 128, 36, 64, 8, 64, 201088),
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises
    ------
    CheckpointError
        If the file is missing, or is not one JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError("is missing", where=path) from None
    except (OSError, ValueError) as error:
        raise CheckpointError("cannot be read as JSON", where=path, found=error) from None
    if not isinstance(content, dict):
        raise CheckpointError("does not hold a JSON object", where=path, found=type(content).__name__)
    return content
