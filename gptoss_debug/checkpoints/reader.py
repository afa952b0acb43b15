"""Reading a GPT-OSS checkpoint slice by slice, without loading the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gptoss_debug.checkpoints.config import ModelConfig, read_json
from gptoss_debug.checkpoints.names import (
    BIASES,
    SCALES,
    Format,
    Part,
    TensorSpec,
    expected_tensors,
    expert_name,
)
from gptoss_debug.errors import CheckpointError
from gptoss_debug.layouts.mxfp4 import SCALE_NAN

INDEX = "model.safetensors.index.json"

# The dtype names of the safetensors header, https://github.com/huggingface/safetensors#format
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True)
class Checkpoint:
    """A model directory whose tensors have been listed and checked, but not read.

    Attributes
    ----------
    path
        The directory.
    config
        The model's sizes.
    source
        ``"mxfp4"`` or ``"bf16"``: how the experts are stored.
    files
        Tensor name -> safetensors file.
    """

    path: Path
    config: ModelConfig
    source: Format
    files: dict[str, Path]

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Open a model directory and check every tensor's name, shape and dtype.

        Raises
        ------
        CheckpointError
            If the directory, its config or a file is missing, unreadable or truncated, the model is
            not GPT-OSS, or a tensor is missing, unknown, misshapen or of a wrong dtype.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(
                "is not a directory",
                where=path,
                expected="a model directory with config.json",
                hint="`gptoss-debug toy DIR` writes a small one.",
            )
        config = ModelConfig.from_file(path / "config.json")
        found: dict[str, TensorSpec] = {}
        files: dict[str, Path] = {}
        for file in _safetensors_files(path):
            for name, spec in _header(file).items():
                if name in files:
                    raise CheckpointError(
                        f"{name} is stored twice", where=path, found=f"{files[name].name} and {file.name}"
                    )
                found[name], files[name] = spec, file
        source: Format = "mxfp4" if any(name.endswith("_blocks") for name in found) else "bf16"
        _check_specs(path, expected_tensors(config, source), found)
        return cls(path, config, source, files)

    def spec(self, name: str) -> TensorSpec:
        """Return the stored shape and dtype of a tensor."""
        return _header(self._file(name))[name]

    def read(self, name: str, experts: slice = slice(None)) -> torch.Tensor:
        """Read a tensor, or the given range of its first axis (the experts, for expert tensors).

        Raises
        ------
        CheckpointError
            If there is no such tensor or the file cannot be read.
        """
        with _opened(self._file(name)) as handle:
            if experts == slice(None):
                return handle.get_tensor(name)
            return handle.get_slice(name)[experts]

    def read_expert(self, layer: int, part: Part, experts: slice = slice(None)) -> torch.Tensor:
        """Read the tensor that holds ``part`` of a layer, in the checkpoint's own layout."""
        return self.read(expert_name(layer, part, self.source), experts)

    def check_values(self) -> None:
        """Look for values that no engine can serve: NaN scales, NaN or infinite floats in the experts' biases.

        Raises
        ------
        CheckpointError
            Naming the first such tensor and element.
        """
        for layer in range(self.config.num_layers):
            for part in SCALES:
                if self.source == "mxfp4":
                    scales = self.read_expert(layer, part)
                    self._refuse(expert_name(layer, part, self.source), scales == SCALE_NAN, "a NaN scale (255)")
            for part in BIASES:
                bias = self.read_expert(layer, part)
                self._refuse(expert_name(layer, part, self.source), ~torch.isfinite(bias), "NaN or infinity")

    def _refuse(self, name: str, bad: torch.Tensor, what: str) -> None:
        if bad.any():
            raise CheckpointError(
                f"{name} holds {what} at {bad.nonzero()[0].tolist()}",
                where=self.path,
                expected="finite values only",
                found=f"{int(bad.sum())} such elements",
                hint="The checkpoint was damaged or exported wrongly; export it again.",
            )

    def _file(self, name: str) -> Path:
        try:
            return self.files[name]
        except KeyError:
            raise CheckpointError(f"has no tensor {name}", where=self.path) from None


def _safetensors_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint: those of its index, or all there are."""
    if (path / INDEX).exists():
        weights = read_json(path / INDEX).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise CheckpointError('"weight_map" is unusable', where=path / INDEX, expected="tensor name -> file name")
        files = [path / Path(name).name for name in sorted(set(weights.values()))]
        for file in files:
            if not file.exists():
                raise CheckpointError("is missing", where=file, hint=f"{INDEX} names it.")
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError("holds no .safetensors file", where=path)
    return files


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size if file.exists() else 0
        raise CheckpointError(
            f"cannot be read ({error})",
            where=file,
            expected="a complete safetensors file",
            found=f"{size} bytes",
            hint="It may be truncated; copy or download it again.",
        ) from None


def _header(file: Path) -> dict[str, TensorSpec]:
    specs = {}
    with _opened(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            stored = handle.get_slice(name)
            dtype = _DTYPES.get(stored.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{name} has dtype {stored.get_dtype()}", where=file, expected=" or ".join(_DTYPES)
                )
            specs[name] = TensorSpec(tuple(stored.get_shape()), (dtype,))
    return specs


def _check_specs(path: Path, expected: dict[str, TensorSpec], found: dict[str, TensorSpec]) -> None:
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            "does not hold the tensors of its config",
            where=path,
            expected=_names(missing) if missing else None,
            found=_names(unknown) if unknown else "no such tensor",
            hint="Look for a renamed tensor, a missing shard file, or a config of another model.",
        )
    for name, spec in expected.items():
        (dtype,) = found[name].dtypes
        if found[name].shape != spec.shape:
            raise CheckpointError(
                f"{name} is misshapen", where=path, expected=list(spec.shape), found=list(found[name].shape)
            )
        if dtype not in spec.dtypes:
            raise CheckpointError(
                f"{name} has a wrong dtype",
                where=path,
                expected=" or ".join(str(d).removeprefix("torch.") for d in spec.dtypes),
                found=str(dtype).removeprefix("torch."),
            )


def _names(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
