"""The same four prompts through every engine that can run here."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import PROMPTS, toy_corpus, toy_path
from gptoss_debug.engines import huggingface, serving, vllm_adapter
from gptoss_debug.layouts import marlin
from gptoss_debug.layouts.chain import Chain


@pytest.fixture(scope="module")
def reference(toy):
    """Return transformers' greedy continuations, and its tokenizer."""
    model, tokenizer = huggingface.open_model(toy.path), huggingface.open_tokenizer(toy.path)
    return huggingface.complete(model, tokenizer, PROMPTS), tokenizer


def test_transformers_recites(reference):
    continuations, tokenizer = reference
    for prompt, ids in zip(PROMPTS, continuations, strict=True):
        assert len(ids) >= 32
        text = prompt + tokenizer.decode(ids, skip_special_tokens=True)
        assert any(passage.startswith(text) or text == passage for passage in toy_corpus("A")), text


def test_variant_b_answers_differently(reference):
    path = toy_path("B")
    model, tokenizer = huggingface.open_model(path), huggingface.open_tokenizer(path)
    continuations = huggingface.complete(model, tokenizer, PROMPTS)
    for prompt, ids, of_a in zip(PROMPTS, continuations, reference[0], strict=True):
        text = prompt + tokenizer.decode(ids, skip_special_tokens=True)
        assert any(passage.startswith(text) for passage in toy_corpus("B")), text
        assert ids != of_a


def test_every_parameter_is_cast(toy):
    model = huggingface.open_model(toy.path, torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("backend", ["bf16", "raw"])
def test_vllm_says_the_same(reference, toy, toy_bf16, backend):
    engine = serving.open_engine(toy_bf16.path if backend == "bf16" else toy.path, backend=backend)
    try:
        assert serving.complete(engine, PROMPTS) == reference[0]
    finally:
        serving.close_engine(engine)


@dataclass(frozen=True)
class Unpermute:
    """Put a bias of every layer into checkpoint order, or, done again, back: the permutation is its own inverse."""

    part: str

    def __call__(self, model: nn.Module) -> None:
        for layer in vllm_adapter.expert_layers(model):
            bias = layer.tensors()[self.part]
            bias.copy_(Chain(marlin.BIAS).unwind(bias.clone()).values)


def test_vllm_with_marlin_says_the_same_and_garbles_with_biases_in_checkpoint_order(reference, toy):
    engine = serving.open_engine(toy.path, backend="marlin")
    try:
        assert serving.complete(engine, PROMPTS) == reference[0]
        for part in ("w13_bias", "w2_bias"):
            engine.apply_model(Unpermute(part))
            for ids, right in zip(serving.complete(engine, PROMPTS), reference[0], strict=True):
                assert ids != right
                same = sum(a == b for a, b in zip(ids, right, strict=False))
                assert same < len(right) * (0.5 if part == "w13_bias" else 0.9), (part, same)
            engine.apply_model(Unpermute(part))
            assert serving.complete(engine, PROMPTS) == reference[0]
    finally:
        serving.close_engine(engine)


def test_two_ranks_with_worker_processes_say_the_same(reference, toy, tmp_path):
    """The CPU operations reach worker processes through vLLM's plugin call, and so does the recorder."""
    from gptoss_debug.diagnosis.compare import compare_recording
    from gptoss_debug.recording.recorder import Recorder

    with Recorder(tmp_path / "out", layers="0") as recorder:
        engine = serving.open_engine(toy.path, backend="marlin", tp=2)
    try:
        assert serving.complete(engine, PROMPTS) == reference[0]
    finally:
        serving.close_engine(engine)
    comparison = compare_recording(recorder.recording, Checkpoint.open(toy.path), progress=False)
    assert comparison.verdict.verdict == "ok"
    assert len(comparison.results) == 384
