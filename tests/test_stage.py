"""The stage: what an update may bring, in any order and in pieces."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptoss_debug.checkpoints.names import expected_tensors
from gptoss_debug.errors import SyncError
from gptoss_debug.sync.stage import Stage

CPU = torch.device("cpu")


@pytest.fixture
def config(toy):
    return replace(toy.config, num_layers=2)


def tensors(config, source="mxfp4"):
    """Return every tensor of a model, each filled with its own number."""
    found = {}
    for number, (name, spec) in enumerate(expected_tensors(config, source).items()):
        found[name] = torch.full(spec.shape, number % 100, dtype=spec.dtypes[0])
    return found


@given(order=st.randoms(use_true_random=False), source=st.sampled_from(["mxfp4", "bf16"]))
def test_any_order_is_taken_and_comes_out_by_layers(toy, order, source):
    config = replace(toy.config, num_layers=2)
    sent = list(tensors(config, source).items())
    order.shuffle(sent)
    stage = Stage(config, "all", CPU)
    out = {}
    for name, tensor in sent:
        stage.put(name, tensor)
        group = stage.complete_group(name)
        if group is not False:
            out |= stage.take(group)
    for group in (None, 0, 1):  # a layer whose last tensor came before the format was known
        out |= stage.take(group)
    stage.check_complete()
    assert stage.is_complete
    assert out.keys() == dict(sent).keys()
    assert all(torch.equal(out[name], tensor) for name, tensor in sent)


@given(cuts=st.lists(st.integers(1, 7), max_size=3, unique=True), columns=st.integers(1, 319))
def test_pieces_make_the_whole(toy, cuts, columns):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = torch.randn(8, 160, 384, dtype=torch.bfloat16)
    stage = Stage(toy.config, "all", CPU)
    rows = [0, *sorted(cuts), 8]
    for (a, b), (c, d) in itertools.product(itertools.pairwise(rows), [(0, columns), (columns, 384)]):
        assert stage.complete_group(name) is False
        stage.put(name, whole[a:b, :, c:d], (a, 0, c))
    assert torch.equal(stage.take(0)[name], whole)


def test_the_callers_buffer_can_be_used_again(config):
    stage = Stage(config, "all", CPU)
    buffer = torch.ones(config.hidden_size, dtype=torch.bfloat16)
    stage.put("model.norm.weight", buffer)
    buffer.fill_(7)
    assert (stage.take(None)["model.norm.weight"] == 1).all()


BIAS = "model.layers.0.mlp.experts.gate_up_proj_bias"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("model.layers.0.self_attn.sink", lambda t: t, "is no tensor of GPT-OSS.*nearest name is .*sinks"),
        (BIAS, lambda t: t[:, :-1], r"wrong shape; expected \[8, 384\]; found \[8, 383\]"),
        (BIAS, lambda t: t.double(), "wrong dtype; expected bfloat16 or float16 or float32; found float64"),
        (BIAS, lambda t: t.index_fill(1, torch.tensor([5]), torch.inf), r"holds inf at \[0, 5\].*found 8 such"),
        ("model.layers.0.mlp.experts.down_proj_scales", lambda t: t.fill_(255), "holds a NaN scale"),
        ("model.layers.0.mlp.experts.down_proj", lambda t: torch.zeros(8, 192, 160), "experts of another format"),
    ],
)
def test_what_no_engine_should_serve_is_refused(config, name, change, says):
    given_tensors = tensors(config)
    stage = Stage(config, "all", CPU)
    stage.put(
        "model.layers.1.mlp.experts.down_proj_scales", given_tensors["model.layers.1.mlp.experts.down_proj_scales"]
    )
    with pytest.raises(SyncError, match=says):
        stage.put(name, change(given_tensors.get(name, torch.zeros(4, dtype=torch.bfloat16))))


def test_twice_is_refused_whole_in_pieces_and_after_the_layer_was_taken(config):
    given_tensors = tensors(config)
    stage = Stage(config, "all", CPU)
    stage.put(BIAS, given_tensors[BIAS][:3], (0, 0))
    with pytest.raises(SyncError, match=r"gate_up_proj_bias\[2:4, :\]: arrived twice"):
        stage.put(BIAS, given_tensors[BIAS][2:4], (2, 0))
    stage.put(BIAS, given_tensors[BIAS][3:], (3, 0))
    stage.take(0)
    with pytest.raises(SyncError, match="arrived twice"):
        stage.put(BIAS, given_tensors[BIAS])


def test_what_is_missing_is_named_with_its_region(config):
    given_tensors = tensors(config)
    stage = Stage(config, "all", CPU)
    for name, tensor in given_tensors.items():
        if name == BIAS:
            stage.put(name, tensor[:5], (0, 0))
        else:
            stage.put(name, tensor)
    with pytest.raises(
        SyncError, match=r"gate_up_proj_bias \(not arrived: \[5:8, :\]\) is missing; expected 41 tensors"
    ):
        stage.check_complete()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], "expects nothing"),
        (["model.layers.0.self_attn.q_proj.weight"], "cannot be updated without model.layers.0.self_attn.k_proj.bias"),
        ([BIAS], "cannot be updated without model.layers.0.mlp.experts.down_proj"),
        (["model.layers.9.self_attn.sinks"], "is no tensor of GPT-OSS"),
        (
            ["model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.down_proj_blocks"],
            "experts of another format",
        ),
    ],
)
def test_a_partial_update_takes_no_module_apart(config, names, says):
    with pytest.raises(SyncError, match=says):
        Stage(config, names, CPU)


def test_a_partial_update_refuses_what_was_not_named(config):
    stage = Stage(config, ["model.norm.weight", "model.layers.1.self_attn.sinks"], CPU)
    with pytest.raises(SyncError, match="was not expected; expected one of the 2"):
        stage.put("lm_head.weight", tensors(config)["lm_head.weight"])
    stage.put("model.norm.weight", tensors(config)["model.norm.weight"])
    assert not stage.is_complete
    assert stage.complete_group("model.norm.weight") is None


@pytest.mark.parametrize(
    ("name", "tensor", "at", "says"),
    [
        (
            "model.norm.weight",
            None,
            None,
            "is no named tensor; expected a str and a torch.Tensor; found str and NoneType",
        ),
        (7, torch.zeros(2), None, "is no named tensor"),
        ("model.norm.weight", torch.zeros(160), 5, "begins nowhere; expected a tuple of whole numbers; found 5"),
    ],
)
def test_what_is_no_named_tensor_is_refused(config, name, tensor, at, says):
    with pytest.raises(SyncError, match=says):
        Stage(config, "all", CPU).put(name, tensor, at)
    with pytest.raises(SyncError, match="is no choice of tensors"):
        Stage(config, "model.norm.weight", CPU)
