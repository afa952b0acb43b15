"""The fixed loader against cold starts, in loaded models without an engine around them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptoss_debug.checkpoints.names import expert_name
from gptoss_debug.checkpoints.random import write_random_checkpoint
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path, write_toy
from gptoss_debug.checkpoints.writer import write_bf16_twin
from gptoss_debug.engines import vllm_adapter
from gptoss_debug.engines.vllm_adapter import config_of, joined_rank
from gptoss_debug.errors import LayoutError, SyncError
from gptoss_debug.layouts import mxfp4
from gptoss_debug.sync.conversion import check_chains, choose_way
from gptoss_debug.sync.loaders import tensors_of
from gptoss_debug.sync.state import model_state
from gptoss_debug.sync.weight_sync import WeightSync


@pytest.fixture(scope="module")
def sent(tmp_path_factory, toy_bf16):
    """Return (variant, format) -> a model directory."""
    b16 = write_toy(tmp_path_factory.mktemp("toy") / "b16", "B", bf16=True)
    return {
        ("A", "mxfp4"): toy_path("A"),
        ("B", "mxfp4"): toy_path("B"),
        ("A", "bf16"): toy_bf16.path,
        ("B", "bf16"): b16,
    }


@pytest.mark.parametrize("backend", ["marlin", "raw", "bf16"])
def test_warm_equals_cold_bit_for_bit_and_both_ways_agree(sent, backend):
    own = "bf16" if backend == "bf16" else "mxfp4"
    with joined_rank(sent["A", own], backend=backend) as load:
        cold_b = model_state(load(sent["B", own]))
        model = load(sent["A", own])
        cold_a = model_state(model)
        assert cold_a.differing(cold_b)  # or equality would prove nothing
        for way in ("chains", "engine"):
            sync = WeightSync(model, config_of(model), way=way)
            for source in ("bf16", "mxfp4"):
                report = sync.update(tensors_of(sent["B", source]))
                assert report.way == way
                warm = model_state(model)
                assert warm.differing(cold_b) == []
                assert warm.moved(cold_a) == []
                sync.update(tensors_of(sent["A", source]))
                assert model_state(model).differing(cold_a) == []
            assert sync.generation == 4


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    experts=st.sampled_from([4, 5, 8]),
    hidden=st.integers(2, 10).map(lambda n: 32 * n),
    inner=st.integers(1, 6).map(lambda n: 32 * n),
    layers=st.integers(1, 3),
    source=st.sampled_from(["mxfp4", "bf16"]),
    way=st.sampled_from(["chains", "engine"]),
    seed=st.integers(0, 1000),
)
def test_models_of_any_size(tmp_path_factory, toy, experts, hidden, inner, layers, source, way, seed):
    config = replace(toy.config, num_experts=experts, hidden_size=hidden, intermediate_size=inner, num_layers=layers)
    tmp = tmp_path_factory.mktemp("random")
    a, b = (write_random_checkpoint(tmp / name, config, seed=seed + i) for i, name in enumerate("ab"))
    given_b = b
    if source == "bf16":
        write_bf16_twin(Checkpoint.open(b), tmp / "b16")
        given_b = tmp / "b16"
    with joined_rank(a) as load:
        cold, model = load(b), load(a)
        WeightSync(model, config_of(model), way=way).update(tensors_of(given_b))
        warm = model_state(model)
        differing = warm.differing(model_state(cold))
        if source == "bf16":
            # Random codes leave about one block in 10^4 without a code of 4 or more, which has another spelling.
            differing = [path for path in differing if not _same_values(path, model, cold, a)]
        assert differing == []


def _same_values(path, model, cold, checkpoint):
    from gptoss_debug.layouts.catalog import BACKENDS, chain_for

    part = path.rpartition(".")[2]
    if not part.endswith(("_weight", "_weight_scale")):
        return False
    weight = part.removesuffix("_scale")
    config = Checkpoint.open(checkpoint).config
    values = []
    for one in (model, cold):
        pair = []
        for key in (weight, f"{weight}_scale"):
            unwound = chain_for(key, "mxfp4", BACKENDS["marlin"], config).unwind(
                one.get_parameter(f"{path.rpartition('.')[0]}.{key}").data
            )
            assert not unwound.dirty
            pair.append(unwound.values)
        values.append(mxfp4.decode(*pair))
    return torch.equal(*values)


def test_a_twin_of_what_runs_changes_no_byte(tmp_path, toy):
    # Blocks with only small codes have several spellings; a twin in floats must not change the one that is there.
    source = write_random_checkpoint(tmp_path / "a", replace(toy.config, num_layers=1))
    checkpoint = Checkpoint.open(source)
    tensors = {name: checkpoint.read(name) for name in checkpoint.files}
    for part in ("w13_weight", "w2_weight"):
        tensors[expert_name(0, part, "mxfp4")] &= 0x99  # codes 0, 1 and their negatives
    from gptoss_debug.checkpoints.config import read_json
    from gptoss_debug.checkpoints.writer import save_model

    save_model(tmp_path / "small", read_json(source / "config.json"), tensors, {}, copy_from=source)
    write_bf16_twin(Checkpoint.open(tmp_path / "small"), tmp_path / "twin")
    with joined_rank(tmp_path / "small") as load:
        model = load(tmp_path / "small")
        before = model_state(model)
        WeightSync(model, config_of(model)).update(tensors_of(tmp_path / "twin"))
        assert model_state(model).differing(before) == []


@pytest.fixture(scope="module")
def live(sent):
    """Return a model that holds A, its state, and B's tensors; a test leaves it as it was."""
    with joined_rank(sent["A", "mxfp4"]) as load:
        model = load(sent["A", "mxfp4"])
        state = model_state(model)
        yield model, state, dict(tensors_of(sent["B", "bf16"]))
        assert model_state(model).differing(state) == []


def test_a_partial_update_changes_what_it_names_and_nothing_else(live, sent):
    model, cold_a, b = live
    a = dict(tensors_of(sent["A", "bf16"]))
    chosen = [name for name in b if ".2.mlp.experts." in name or ".1.self_attn.o_proj" in name or "sinks" in name]
    sync = WeightSync(model, config_of(model))
    sync.update(((name, b[name]) for name in chosen), expect=chosen)
    changed = model_state(model).differing(cold_a)
    sync.update(((name, a[name]) for name in chosen), expect=chosen)
    assert {path.split(".quant_method")[0] for path in changed} >= {"model.layers.1.attn.o_proj.packed"}
    allowed = ("layers.2.mlp.experts", "layers.1.attn.o_proj", ".sinks")
    assert all(any(piece in path for piece in allowed) for path in changed)
    assert sum(path.endswith("attn.sinks") for path in changed) == 4


def test_half_and_single_precision_are_taken(live, sent):
    model, _, b = live
    sync = WeightSync(model, config_of(model))
    sync.update((name, tensor.float()) for name, tensor in b.items())
    as_float = model_state(model)
    sync.update(b.items())
    assert model_state(model).differing(as_float) == []
    sync.update(tensors_of(sent["A", "bf16"]))


def test_pieces_and_out_of_order(live, sent):
    model, _, b = live
    sync = WeightSync(model, config_of(model))
    for name, tensor in reversed(b.items()):
        for start in range(0, len(tensor), 3):
            sync.put(name, tensor[start : start + 3], (start, *[0] * (tensor.ndim - 1)))
    assert sync.is_complete
    sync.commit()
    in_pieces = model_state(model)
    sync.update(b.items())
    assert model_state(model).differing(in_pieces) == []
    sync.update(tensors_of(sent["A", "bf16"]))


def test_an_update_that_is_open_keeps_others_out_until_it_is_dropped(live):
    model, _, b = live
    sync = WeightSync(model, config_of(model))
    sync.put("model.norm.weight", b["model.norm.weight"])
    with pytest.raises(SyncError, match=r"open already \(1 tensors have arrived\).*two trainers"):
        sync.begin()
    sync.abort()
    with pytest.raises(SyncError, match="nothing arrived"):
        sync.commit()


def test_in_place_needs_a_guard_and_a_failure_closes_the_engine(live, sent):
    model, _, b = live
    with pytest.raises(SyncError, match="needs an engine that can refuse"):
        WeightSync(model, config_of(model)).begin(atomic=False)
    said = []
    sync = WeightSync(model, config_of(model), guard=said.append)
    sync.begin(atomic=False)
    for name in list(b)[:-2]:
        sync.put(name, b[name])
    with pytest.raises(SyncError, match="incomplete"):
        sync.commit()
    assert said == ["the engine holds parts of two generations of weights"]
    with pytest.raises(SyncError, match="two generations"):
        _ = sync.generation
    with pytest.raises(SyncError, match="two generations"):
        sync.begin(["model.norm.weight"])
    sync.update(tensors_of(sent["A", "bf16"]))
    assert said[1:] == [None]
    assert sync.generation == 1


def test_a_chain_that_the_installed_vllm_does_not_follow_is_not_used(monkeypatch):
    from gptoss_debug.sync import conversion

    cpu = torch.device("cpu")
    assert choose_way("marlin", cpu) == "chains"
    assert choose_way("marlin", torch.device("cuda")) == "engine"
    assert choose_way("flashinfer_trtllm_mxfp4_bf16", cpu) == "engine"
    monkeypatch.setitem(conversion._PROBED, "marlin", False)
    assert choose_way("marlin", cpu) == "engine"
    with pytest.raises(LayoutError, match="does not follow the chain"):
        check_chains("marlin")


def test_the_kernels_own_tensors_are_the_parameters_after_a_sync(live, sent):
    model, _, b = live
    sync = WeightSync(model, config_of(model))
    sync.update(b.items())
    for layer in vllm_adapter.expert_layers(model):
        held = layer.module.quant_method.moe_quant_config
        assert held.w1_bias.data_ptr() == layer.module.w13_bias.data_ptr()
        assert held.w2_scale.data_ptr() == layer.module.w2_weight_scale.data_ptr()
    sync.update(tensors_of(sent["A", "bf16"]))


def test_what_still_comes_of_a_dropped_update_is_refused(live):
    model, cold_a, b = live
    sync = WeightSync(model, config_of(model))
    sync.put("lm_head.weight", b["lm_head.weight"])
    with pytest.raises(SyncError, match="wrong shape"):
        sync.put("model.norm.weight", b["model.norm.weight"][:3])
    with pytest.raises(SyncError, match=r"was dropped \(model.norm.weight: has a wrong shape"):
        sync.put("model.norm.weight", b["model.norm.weight"])
    assert not sync.is_open
    sync.begin()
    sync.abort()
    assert model_state(model).differing(cold_a) == []


def test_an_error_while_writing_closes_the_engine(live, sent, monkeypatch):
    from gptoss_debug.sync.conversion import Replacement

    model, _, b = live
    said = []
    sync = WeightSync(model, config_of(model), guard=said.append)
    for name, tensor in b.items():
        sync.put(name, tensor)
    real, count = Replacement.commit, iter(range(1000))

    def commit(self):
        if next(count) == 20:
            raise MemoryError("no room")
        real(self)

    monkeypatch.setattr(Replacement, "commit", commit)
    with pytest.raises(MemoryError):
        sync.commit()
    assert said == ["the engine holds parts of two generations of weights"]
    with pytest.raises(SyncError, match="two generations"):
        _ = sync.generation
    monkeypatch.setattr(Replacement, "commit", real)
    sync.update(tensors_of(sent["A", "bf16"]))
    assert said[-1] is None


def test_values_that_the_engines_dtype_cannot_hold_are_refused(live):
    model, cold_a, b = live
    sync = WeightSync(model, config_of(model))
    large = {name: tensor.float() for name, tensor in b.items()}
    large["model.layers.1.input_layernorm.weight"][3] = 3.4e38
    with pytest.raises(SyncError, match=r"would hold inf at \[3\]; expected values within the range of bfloat16"):
        sync.update(large.items())
    assert model_state(model).differing(cold_a) == []


def test_two_values_for_one_storage_are_refused():
    from gptoss_debug.sync.conversion import Replacement
    from gptoss_debug.sync.weight_sync import _Update

    live_tensor = torch.zeros(4)
    one = Replacement("embedding.weight", live_tensor, torch.ones(4), True)
    for atomic in (True, False):
        update = _Update(None, None, atomic, 0.0)
        assert update.add([one]) == [one]
        if not atomic:
            one.commit()
        assert update.add([replace(one, path="lm_head.weight")]) == []  # tied, and the same values
        with pytest.raises(SyncError, match=r"lm_head.weight: shares its memory.*the values of embedding.weight"):
            update.add([replace(one, path="lm_head.weight", new=torch.full((4,), 2.0))])
