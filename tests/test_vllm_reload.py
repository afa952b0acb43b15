"""What the installed vLLM's own paths do to a running model, as the README tells it.

These are not wishes. One that fails after an upgrade says that vLLM has changed: look, and tell the README.
"""

from dataclasses import replace

import pytest
import torch

from gptoss_debug.checkpoints.names import expert_name
from gptoss_debug.checkpoints.random import write_random_checkpoint
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path, write_toy
from gptoss_debug.engines import vllm_adapter, vllm_reload
from gptoss_debug.engines.vllm_adapter import config_of, joined_rank
from gptoss_debug.layouts import marlin
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.sync.dropin import DropIn
from gptoss_debug.sync.loaders import load_into, tensors_of
from gptoss_debug.sync.state import model_state

A, B = toy_path("A"), toy_path("B")


@pytest.fixture
def model(request):
    path, backend = getattr(request, "param", (A, "marlin"))
    with joined_rank(path, backend=backend) as load:
        yield load(path)


def experts_of(tensors):
    return [(name, tensor) for name, tensor in tensors if ".mlp.experts." in name]


def test_load_weights_with_the_bf16_experts_of_a_trainer_raises(model, toy_bf16):
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        load_into("load_weights", model, config_of(model), experts_of(tensors_of(toy_bf16.path)))


def test_reload_weights_with_bf16_experts_raises_and_leaves_no_model(model, toy_bf16):
    with pytest.raises(AssertionError):
        load_into("reload_weights", model, config_of(model), tensors_of(toy_bf16.path))
    assert any(parameter.is_meta for parameter in model.parameters())


def test_reload_weights_of_the_same_padded_checkpoint_damages_it(model):
    before = model_state(model)
    load_into("reload_weights", model, config_of(model), tensors_of(A))
    assert any(".w13_" in path or ".w2_" in path for path in model_state(model).differing(before))


def test_reload_weights_of_the_same_checkpoint_without_padding_is_right(tmp_path, toy):
    path = write_random_checkpoint(tmp_path / "m", replace(toy.config, hidden_size=256, intermediate_size=128))
    with joined_rank(path) as load:
        model = load(path)
        before = model_state(model)
        load_into("reload_weights", model, config_of(model), tensors_of(path))
        differing = model_state(model).differing(before)
        assert not [name for name in differing if name in dict(model.named_parameters())]


def test_reload_weights_of_another_checkpoint_keeps_the_sinks(model):
    sinks = [name for name, _ in model.named_parameters() if name.endswith(".sinks")]
    before = {name: model.get_parameter(name).clone() for name in sinks}
    load_into("reload_weights", model, config_of(model), tensors_of(B))
    assert all(torch.equal(model.get_parameter(name), before[name]) for name in sinks)
    assert not torch.equal(before[sinks[0]], dict(tensors_of(B))["model.layers.0.self_attn.sinks"])


def test_load_weights_with_biases_alone_puts_them_in_checkpoint_order(model, toy):
    biases = [(n, t) for n, t in tensors_of(A) if n.endswith(("gate_up_proj_bias", "down_proj_bias"))]
    load_into("load_weights", model, config_of(model), biases)
    (layer, *_) = vllm_adapter.expert_layers(model)
    stored = toy.read(expert_name(0, "w13_bias", "mxfp4"))
    held = layer.module.w13_bias.data[:, : stored.shape[1]]
    assert torch.equal(held, stored)
    right = Chain(marlin.BIAS).forward(torch.nn.functional.pad(stored, (0, 512 - stored.shape[1])))
    assert not torch.equal(layer.module.w13_bias.data, right)


def test_a_reload_of_a_bf16_engine_keeps_the_experts(tmp_path, toy_bf16):
    b = write_toy(tmp_path / "b", "B", bf16=True)
    with joined_rank(toy_bf16.path, backend="bf16") as load:
        model = load(toy_bf16.path)
        before = {layer.layer: layer.module.w13_weight.clone() for layer in vllm_adapter.expert_layers(model)}
        load_into("reload_weights", model, config_of(model), tensors_of(b))
        after = {layer.layer: layer.module.w13_weight for layer in vllm_adapter.expert_layers(model)}
        assert all(torch.equal(before[layer], after[layer]) for layer in before)


class TestDropIn:
    """The same calls, with the drop-in in place."""

    @pytest.fixture
    def load(self):
        dropin = DropIn()
        dropin.install()
        try:
            with joined_rank(A) as load:
                yield load
        finally:
            dropin.uninstall()

    def test_a_reload_is_right_from_both_formats(self, load, toy_bf16, tmp_path):
        cold_b, model = model_state(load(B)), load(A)
        cold_a = model_state(model)
        vllm_reload.reload_weights(model, config_of(model), tensors_of(B))
        assert model_state(model).differing(cold_b) == []
        vllm_reload.reload_weights(model, config_of(model), tensors_of(toy_bf16.path))
        assert model_state(model).differing(cold_a) == []
        assert model_state(model).moved(cold_a) == []

    def test_one_tensor_a_call_goes_live_with_the_last_one(self, load, tmp_path):
        b = write_toy(tmp_path / "b", "B", bf16=True)
        cold_b, model = model_state(load(B)), load(A)
        cold_a = model_state(model)
        *most, last = tensors_of(b)
        for pair in most:
            model.load_weights([pair])
        assert model_state(model).differing(cold_a) == []
        model.load_weights([last])
        assert model_state(model).differing(cold_b) == []

    def test_a_wrong_one_raises_keeps_a_and_leaves_the_way_free(self, load):
        from gptoss_debug.errors import SyncError

        cold_b, model = model_state(load(B)), load(A)
        cold_a = model_state(model)
        for weights in (list(tensors_of(B))[:-1], []):
            with pytest.raises(SyncError):
                vllm_reload.reload_weights(model, config_of(model), weights)
            assert model_state(model).differing(cold_a) == []
        name, tensor = next(tensors_of(B))
        with pytest.raises(SyncError, match="wrong shape"):
            model.load_weights([(name, tensor[:1])])
        other = list(tensors_of(B))[5]
        with pytest.raises(SyncError, match=r"belongs to an update that has failed.*begins with"):
            model.load_weights([other])  # of an update that has failed: only its first tensor begins another
        with pytest.raises(SyncError, match="got no tensors"):
            model.load_weights([])
        model.load_weights(tensors_of(B))
        assert model_state(model).differing(cold_b) == []

    def test_a_trainer_that_starts_again_drops_what_the_dead_one_sent(self, load):
        cold_b, model = model_state(load(B)), load(A)
        for pair in list(tensors_of(A))[:30]:
            model.load_weights([pair])
        for pair in tensors_of(B):
            model.load_weights([pair])
        assert model_state(model).differing(cold_b) == []

    def test_nothing_is_left_behind(self):
        from vllm.model_executor.model_loader import base_loader, reload
        from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

        names = [(base_loader, "initialize_model"), (reload, "initialize_layerwise_reload")]
        names += [(base_loader, "process_weights_after_loading"), (GptOssForCausalLM, "load_weights")]
        before = [getattr(owner, name) for owner, name in names]
        dropin = DropIn()
        dropin.install()
        with joined_rank(A) as load:
            load(A)
        assert all(getattr(owner, name) is not old for (owner, name), old in zip(names, before, strict=True))
        dropin.uninstall()
        assert [getattr(owner, name) for owner, name in names] == before


def test_the_plugin_refuses_a_value_that_it_does_not_know(monkeypatch):
    from gptoss_debug.engines.plugin import install
    from gptoss_debug.errors import GptOssDebugError

    monkeypatch.setenv("GPTOSS_DEBUG_SYNC", "yes")
    with pytest.raises(GptOssDebugError, match="GPTOSS_DEBUG_SYNC: has an unknown value; expected fixed; found yes"):
        install()


def test_packed_weights_are_read_back_exactly(model):
    packed = dict(vllm_reload.packed_weights(model))
    stored = Checkpoint.open(A)
    read = packed["model.layers.1.attn.o_proj.packed"]
    assert torch.equal(read.T, stored.read("model.layers.1.self_attn.o_proj.weight"))
    assert torch.equal(packed["lm_head.packed"].T, stored.read("lm_head.weight"))
