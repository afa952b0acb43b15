"""Debugging workbench for GPT-OSS weights in vLLM."""

__version__ = "0.1.0"
