"""What vLLM calls in every process it starts (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import os


def install() -> None:
    """Make the CPU Marlin path available; record, and sync by the fixed loader, where the environment asks for it.

    The CPU path is left alone unless ``GPTOSS_DEBUG_CPU`` is set to 1: having the package installed
    must not change somebody else's engine.
    """
    if os.environ.get("GPTOSS_DEBUG_CPU") == "1":
        from gptoss_debug.engines.vllm_cpu import prepare_process

        prepare_process()
    if os.environ.get("GPTOSS_DEBUG_SYNC"):
        from gptoss_debug.sync import dropin

        dropin.install(os.environ["GPTOSS_DEBUG_SYNC"])
    if os.environ.get("GPTOSS_DEBUG_RECORD"):
        from gptoss_debug.recording.recorder import install_from_environment

        install_from_environment()
