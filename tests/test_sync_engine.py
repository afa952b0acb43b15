"""Weight sync in real engines: texts, refusals, malformed updates, the plugin."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import PROMPTS, toy_path, write_toy
from gptoss_debug.engines import huggingface, serving
from gptoss_debug.errors import SyncError
from gptoss_debug.sync import sync_weights
from gptoss_debug.sync.client import generation
from gptoss_debug.sync.loaders import tensors_of
from gptoss_debug.sync.proof import prove
from gptoss_debug.sync.state import model_state


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """Return what trainers of A and B send: BF16."""
    tmp = tmp_path_factory.mktemp("sent")
    return {v: list(tensors_of(write_toy(tmp / v, v, bf16=True))) for v in ("A", "B")}


@pytest.fixture(scope="module")
def engine():
    engine = serving.open_engine(
        toy_path("A"), worker_extension_cls="gptoss_debug.sync.SyncWorker", enable_prefix_caching=True
    )
    yield engine
    serving.close_engine(engine)


def say(engine, tokens=24):
    return serving.complete(engine, PROMPTS, tokens)


def test_the_engine_answers_as_the_trainers_own_model_does(engine, sent):
    before = say(engine)
    for variant in ("B", "A"):
        reports = sync_weights(engine, sent[variant], bucket_bytes=100_000)  # pieces, and many files
        assert reports[0].tensors == 71
        model = huggingface.open_model(toy_path(variant))
        tokenizer = huggingface.open_tokenizer(toy_path(variant))
        assert say(engine) == huggingface.complete(model, tokenizer, PROMPTS, 24)
    assert say(engine) == before
    assert generation(engine) == 2


def malformed(tensors, seed):
    """Return one of many ways in which an update goes wrong."""
    chance = random.Random(seed)
    tensors = list(tensors)
    chance.shuffle(tensors)
    at = chance.randrange(len(tensors))
    name, tensor = tensors[at]
    kind = seed % 8
    if kind == 0:
        return tensors[:at]  # truncated
    if kind == 1:
        return tensors[:at] + tensors[at + 1 :]
    if kind == 2:
        tensors[at] = (name, tensor.to(torch.float8_e4m3fn))
    if kind == 3:
        tensors[at] = (name, tensor[..., : tensor.shape[-1] // 2].contiguous())
    if kind == 4:
        tensors[at] = (name.replace("model.", "module."), tensor) if "model." in name else ("head.weight", tensor)
    if kind == 5:
        flat = tensor.clone().view(-1)
        flat[chance.randrange(flat.numel())] = chance.choice([torch.nan, torch.inf, -torch.inf])
        tensors[at] = (name, flat.view(tensor.shape))
    if kind == 6:
        tensors.insert(chance.randrange(len(tensors)), tensors[at])

    def dying():
        yield from tensors[:at]
        raise ConnectionError("the trainer is gone")

    return dying() if kind == 7 else tensors


def test_two_hundred_malformed_updates_leave_a_and_the_way_free(engine, sent):
    text = say(engine, 4)
    state = engine.apply_model(model_state)[0]
    number = generation(engine)
    for seed in range(200):
        with pytest.raises((SyncError, ConnectionError)) as caught:
            sync_weights(engine, malformed(sent["B"], seed))
        assert isinstance(caught.value, ConnectionError) == (seed % 8 == 7)
        if seed % 20 == 19:
            assert engine.apply_model(model_state)[0].differing(state) == []
        assert serving.complete(engine, PROMPTS[:1], 4) == text[:1]
    assert say(engine, 4) == text
    assert generation(engine) == number
    sync_weights(engine, sent["B"])
    assert say(engine, 4) != text
    sync_weights(engine, sent["A"])
    assert say(engine, 4) == text


def test_an_update_in_place_that_fails_closes_the_engine_until_a_whole_one_succeeds(engine, sent):
    before = say(engine, 8)
    with pytest.raises(SyncError, match="incomplete"):
        sync_weights(engine, sent["B"][:-1], atomic=False)
    with pytest.raises(SyncError, match="two generations"):
        say(engine, 8)
    with pytest.raises(SyncError, match="two generations"):
        generation(engine)
    sync_weights(engine, sent["B"], atomic=False)
    assert say(engine, 8) != before
    with pytest.raises(SyncError, match="was not expected"):
        sync_weights(engine, sent["A"], expect=["model.norm.weight"], atomic=False)
    sync_weights(engine, sent["A"])
    assert say(engine, 8) == before


def test_the_prefix_cache_is_reset(engine, sent):
    prompt = [" ".join(PROMPTS) * 3]
    first = serving.complete(engine, prompt, 8)
    assert serving.complete(engine, prompt, 8) == first  # from the cache
    sync_weights(engine, sent["B"])
    warm = serving.complete(engine, prompt, 8)
    engine.reset_prefix_cache()
    assert serving.complete(engine, prompt, 8) == warm
    sync_weights(engine, sent["A"])


def test_worker_methods_answer_errors_as_values(engine, sent, tmp_path):
    def call(*args):
        return engine.collective_rpc("sync_call", args=args)[0]

    assert call("sync_begin") == {"value": None}
    assert "two trainers" in call("sync_begin")["error"]["hint"]
    assert "cannot be read" in call("sync_put_file", str(tmp_path / "none"))["error"]["what"]
    assert "sync_nonsense failed: AttributeError" in call("sync_nonsense")["error"]["what"]
    assert call("sync_abort") == {"value": None}
    sync_weights(engine, dict(sent["A"]))  # a state dict, too


def test_unfinished_requests_keep_an_update_out(engine, sent):
    from vllm import SamplingParams

    engine.llm_engine.add_request("waiting", PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(SyncError, match="unfinished requests"):
        sync_weights(engine, sent["A"])
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()
    sync_weights(engine, sent["A"])


PROGRAM = """
import json, sys
from gptoss_debug.checkpoints.toy import PROMPTS, toy_path
from gptoss_debug.engines import serving
engine = serving.open_engine(toy_path("A"))
engine.collective_rpc("reload_weights", kwargs={"weights_path": sys.argv[1]})
print("SAYS", json.dumps(serving.complete(engine, PROMPTS, 24)))
serving.close_engine(engine)
"""


def test_with_the_variable_set_vllms_own_reload_is_right(tmp_path):
    environment = os.environ | {"GPTOSS_DEBUG_SYNC": "fixed"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(write_toy(tmp_path / "b", "B", bf16=True))],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    said = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("SAYS"))[5:])
    model, tokenizer = huggingface.open_model(toy_path("B")), huggingface.open_tokenizer(toy_path("B"))
    assert said == huggingface.complete(model, tokenizer, PROMPTS, 24)
    assert "go through gptoss_debug" in run.stdout
    assert "gptoss_debug: generation 1" in run.stdout


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_pass_every_oracle(expert_parallel):
    proof = prove(
        toy_path("A"), toy_path("B"), ["fixed"], source="bf16", tp=2, expert_parallel=expert_parallel, prompts=()
    )
    assert proof.verdict.verdict == "ok", str(proof)
    assert {finding.rank for results in proof.results.values() for r in results for finding in r.findings} == set()
    assert len(proof.results["fixed"]) == 2 * 14


def test_an_uneven_cut_passes_every_oracle(tmp_path, toy):
    from dataclasses import replace

    from gptoss_debug.checkpoints.random import write_random_checkpoint

    config = replace(toy.config, intermediate_size=160, num_layers=2)  # 5 blocks over 2 ranks
    a, b = (write_random_checkpoint(tmp_path / name, config, seed=seed) for seed, name in enumerate("ab"))
    assert Checkpoint.open(b).config == config
    proof = prove(a, b, ["fixed"], tp=2, prompts=())
    assert proof.verdict.verdict == "ok", str(proof)
