import json
import shutil

import pytest
import torch

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import PARTS
from gptoss_debug.errors import EngineError, GptOssDebugError, RecordingError
from gptoss_debug.recording.digests import digest
from gptoss_debug.recording.ranks import record_load
from gptoss_debug.recording.recording import Recording, find_layers


def test_every_write_of_the_toy_is_in_the_ledger(recorded, toy):
    recording = recorded()
    ledger = recording.ledger
    assert len(ledger.rows) == len(toy.files) == 79
    assert {row.source for row in ledger.rows} == set(toy.files)
    assert ledger.unused == ()
    assert {row.parameter.rpartition(".")[2] for row in ledger.bypassed} == {"sinks"}
    assert all(row.region is not None and row.source_region is not None for row in ledger.rows)
    by_source = {row.source: row for row in ledger.rows}
    for name in toy.files:
        assert by_source[name].sha256 == digest(toy.read(name))
    key = by_source["model.layers.1.self_attn.k_proj.weight"]
    assert (key.parameter, key.region, key.shard) == (
        "model.layers.1.attn.qkv_proj.weight", ((256, 384), (0, 160)), "k",
    )  # fmt: skip
    assert "QKVParallelLinear.weight_loader" in key.loader


def test_two_ranks_share_the_work(recorded):
    recording = recorded(tp=2)
    assert [rank.placement.rank for rank in recording.ranks] == [0, 1]
    assert len(recording.ledger.rows) == 158
    boxes = [
        next(r.source_region for r in rank.ledger.rows if r.source.endswith("layers.0.mlp.experts.gate_up_proj_blocks"))
        for rank in recording.ranks
    ]
    assert [box[1] for box in boxes] == [(0, 192), (192, 384)]


def test_the_repack_replaces_every_expert_tensor(recorded):
    changes = recorded().changes()
    assert len(changes) == 4 * len(PARTS)
    assert changes.object_replaced.all()
    assert changes.bytes_changed.all()
    weight = changes[(changes.layer == 0) & (changes.part == "w13_weight")].iloc[0]
    assert (weight.shape_before, weight.shape_after) == ((8, 512, 128), (8, 16, 1024))
    assert (weight.dtype_before, weight.dtype_after) == ("uint8", "int32")


def test_snapshots_hold_what_their_digests_say(recorded):
    rank = recorded().first
    for state in rank.states:
        tensor = rank.tensor(state.layer, state.part, state.stage)
        assert [digest(one) for one in tensor] == list(state.experts)
        some = rank.tensor(state.layer, state.part, state.stage, slice(2, 4))
        assert torch.equal(some.view(torch.uint8), tensor[2:4].view(torch.uint8))


def test_chosen_layers_only(recorded):
    rank = recorded(layers="1,3").first
    assert {file.name for file in rank.path.glob("*.safetensors")} == {
        f"layer-00{layer}.{stage}.safetensors" for layer in (1, 3) for stage in ("before", "after")
    }
    assert rank.tensor(0, "w13_bias", "after") is None
    assert rank.state(0, "w13_bias", "after").experts == recorded().first.state(0, "w13_bias", "after").experts


def test_the_census_knows_attention_sinks_by_two_paths(recorded):
    found = recorded().first.census
    paths = [e.path for e in found.entries if e.owner == "model.layers.0.attn.sinks"]
    assert len(paths) > 1
    assert found.hidden


@pytest.mark.parametrize(
    ("text", "layers"), [("all", None), ("none", set()), ("0", {0}), ("0,3-5", {0, 3, 4, 5}), ("2-2,7", {2, 7})]
)
def test_layer_choices(text, layers):
    assert find_layers(text) == (None if layers is None else frozenset(layers))


@pytest.mark.parametrize("text", ["some", "1-", "-", "1;2", "a-b", "5-3"])
def test_layer_choices_that_are_none(text):
    with pytest.raises(RecordingError, match="is no choice of layers"):
        find_layers(text)


def test_what_is_no_recording(tmp_path):
    with pytest.raises(RecordingError, match="is not a directory"):
        Recording.open(tmp_path / "none")
    with pytest.raises(RecordingError, match=r"is no recording; expected rank0/index.json.*gptoss-debug record"):
        Recording.open(tmp_path)
    (tmp_path / "rank0").mkdir()
    with pytest.raises(RecordingError, match=r"index.json: is missing"):
        Recording.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}'])
def test_a_damaged_index(recorded, copied, text):
    recording = copied(recorded())
    (recording.path / "rank0" / "index.json").write_text(text)
    with pytest.raises(RecordingError, match=r"index.json: is damaged"):
        Recording.open(recording.path)


def test_another_format(recorded, copied):
    file = copied(recorded()).path / "rank0" / "index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(RecordingError, match="has another format; expected 1; found 99"):
        Recording.open(file.parents[1])


def test_a_missing_rank_and_a_missing_file(recorded, copied):
    recording = copied(recorded(tp=2))
    (recording.path / "rank1" / "layer-002.after.safetensors").unlink()
    with pytest.raises(RecordingError, match=r"layer-002.after.safetensors: cannot be read"):
        recording.ranks[1].tensor(2, "w2_bias", "after")
    shutil.rmtree(recording.path / "rank1")
    with pytest.raises(RecordingError, match=r"does not hold every rank; expected ranks 0 to 1; found ranks \[0\]"):
        Recording.open(recording.path)


def test_a_recording_of_another_model(recorded):
    other = ModelConfig.named("gpt-oss-20b")
    with pytest.raises(
        RecordingError, match=r"of another model than that: hidden_size differs; expected 2880; found 160"
    ):
        recorded().check_model(other, "that")


def test_a_load_that_fails_leaves_nothing(tmp_path, toy):
    broken = shutil.copytree(toy.path, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(
        EngineError, match=r"broken: vLLM could not load the model \(rank 0, exit code 1\); found .*Error"
    ):
        record_load(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_an_output_that_holds_files_is_left_alone(tmp_path, toy):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(GptOssDebugError, match="holds files already"):
        record_load(toy.path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
