import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import PARTS, expected_tensors, layer_of
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import PROMPTS, toy_corpus, toy_path, write_toy
from gptoss_debug.checkpoints.writer import write_bf16_twin
from gptoss_debug.errors import CheckpointError, GptOssDebugError
from gptoss_debug.layouts import mxfp4

WEIGHTS = "model.safetensors"
BLOCKS = "model.layers.1.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.2.mlp.experts.down_proj_scales"


@pytest.fixture
def damaged(tmp_path):
    """Return a copy of the toy and a function that edits its tensors."""
    path = write_toy(tmp_path / "model")

    def edit(change):
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS)
        return path

    return path, edit


def test_the_toy_is_small_and_both_variants_are_complete():
    for variant in ("A", "B"):
        path = toy_path(variant)
        assert sum(file.stat().st_size for file in path.iterdir()) < 4e6
        checkpoint = Checkpoint.open(path)
        checkpoint.check_values()
        assert checkpoint.source == "mxfp4"
        assert checkpoint.config == ModelConfig(160, 192, 8, 4, 4, 2, 64, 640)
    assert {text[:10] for text in toy_corpus("A")} != {text[:10] for text in toy_corpus("B")}
    assert all(any(text.startswith(prompt) for text in toy_corpus("B")) for prompt in PROMPTS)


def test_toy_biases_and_sinks_are_large_and_distinct(toy):
    for layer in range(4):
        for part in ("w13_bias", "w2_bias"):
            bias = toy.read_expert(layer, part).float()
            assert bias.std() > 0.3
            assert len(bias[0].unique()) > 0.8 * bias.shape[1]
        sinks = toy.read(f"model.layers.{layer}.self_attn.sinks")
        assert len(sinks.unique()) == 4
        assert sinks.float().std() > 0.05


def test_slices_are_what_whole_reads_hold(toy):
    for part in PARTS:
        whole = toy.read_expert(2, part)
        assert torch.equal(toy.read_expert(2, part, slice(3, 5)), whole[3:5])
    assert toy.spec(BLOCKS).shape == (8, 384, 5, 16)


def test_the_bf16_twin_has_the_same_values(toy, toy_bf16):
    assert toy_bf16.source == "bf16"
    for part, scale in (("w13_weight", "w13_weight_scale"), ("w2_weight", "w2_weight_scale")):
        values = mxfp4.decode(toy.read_expert(3, part).flatten(2), toy.read_expert(3, scale))
        assert torch.equal(toy_bf16.read_expert(3, part).float(), values.transpose(1, 2))
    with pytest.raises(CheckpointError, match="no MXFP4 experts"):
        write_bf16_twin(toy_bf16, toy_bf16.path.parent / "again")


def test_a_sharded_checkpoint_reads_the_same(toy, tmp_path):
    shutil.copy(toy.path / "config.json", tmp_path)
    tensors = load_file(toy.path / WEIGHTS)
    names = sorted(tensors)
    weight_map = {}
    for index, chunk in enumerate((names[::2], names[1::2])):
        file = f"model-{index}.safetensors"
        save_file({name: tensors[name] for name in chunk}, tmp_path / file)
        weight_map |= dict.fromkeys(chunk, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = Checkpoint.open(tmp_path)
    assert sharded.files.keys() == toy.files.keys()
    assert torch.equal(sharded.read(BLOCKS), toy.read(BLOCKS))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1.safetensors: is missing"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"lm_head.weight": None}, "x"])
def test_an_index_that_is_none(damaged, weight_map):
    path, _ = damaged
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r'index.json: "weight_map" is unusable'):
        Checkpoint.open(path)


def test_a_missing_directory_and_files(tmp_path):
    with pytest.raises(CheckpointError, match="is not a directory; expected a model directory"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config.json: is missing"):
        Checkpoint.open(tmp_path)
    shutil.copy(toy_path() / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 100, 1_000_000])
def test_a_truncated_file(damaged, size):
    path, _ = damaged
    with (path / WEIGHTS).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: cannot be read.*found {size} bytes.*truncated"):
        Checkpoint.open(path).read(BLOCKS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, r'"model_type": "gpt_oss"; found "llama"'),
        ({"hidden_size": None}, r'"hidden_size" is unusable; expected a positive whole number; found null'),
        ({"num_local_experts": "8"}, r'"num_local_experts" is unusable'),
        ({"num_hidden_layers": -1}, r'"num_hidden_layers" is unusable'),
        ({"num_hidden_layers": 5}, r"expected model.layers.4"),
        ({"num_hidden_layers": 3}, r"found model.layers.3"),
        ({"hidden_size": 192}, r"is misshapen; expected"),
    ],
)
def test_a_config_that_does_not_fit(damaged, change, message):
    path, _ = damaged
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\x00"])
def test_a_config_that_is_no_json_object(damaged, text):
    path, _ = damaged
    (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json: (cannot be read as JSON|does not hold a JSON object)"):
        Checkpoint.open(path)


def test_a_missing_and_a_renamed_tensor(damaged):
    _, edit = damaged
    path = edit(lambda t: t.pop(BLOCKS))
    with pytest.raises(CheckpointError, match=f"expected {BLOCKS}; found no such tensor"):
        Checkpoint.open(path)
    path = edit(lambda t: t.update({BLOCKS.replace("gate_up", "gateup"): torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=f"expected {BLOCKS}; found model.layers.1.mlp.experts.gateup"):
        Checkpoint.open(path)


def test_a_wrong_dtype_and_shape(damaged):
    _, edit = damaged
    path = edit(lambda t: t.update({SCALES: t[SCALES].float()}))
    with pytest.raises(CheckpointError, match=f"{SCALES} has a wrong dtype; expected uint8; found float32"):
        Checkpoint.open(path)
    path = edit(lambda t: t.update({SCALES: t[SCALES].to(torch.int64)}))
    with pytest.raises(CheckpointError, match=f"{SCALES} has dtype I64"):
        Checkpoint.open(path)
    path = edit(lambda t: t.update({SCALES: t[SCALES].to(torch.uint8)[:, :-1]}))
    with pytest.raises(CheckpointError, match=rf"{SCALES} is misshapen; expected \[8, 160, 6\]; found \[8, 159, 6\]"):
        Checkpoint.open(path)


def test_nan_in_a_scale_and_a_bias(damaged):
    _, edit = damaged
    path = edit(lambda t: t[SCALES].__setitem__((1, 2, 3), 255))
    with pytest.raises(CheckpointError, match=rf"{SCALES} holds a NaN scale \(255\) at \[1, 2, 3\].*found 1 such"):
        Checkpoint.open(path).check_values()
    bias = "model.layers.0.mlp.experts.gate_up_proj_bias"
    path = edit(lambda t: (t[SCALES].fill_(100), t[bias].__setitem__((0, 7), torch.inf)))
    with pytest.raises(CheckpointError, match=rf"{bias} holds NaN or infinity at \[0, 7\]"):
        Checkpoint.open(path).check_values()


def test_writing_never_overwrites(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(GptOssDebugError, match="holds files already"):
        write_toy(tmp_path)
    with pytest.raises(GptOssDebugError, match="is a file"):
        write_toy(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "precious"
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_names():
    assert layer_of("model.layers.12.mlp") == 12
    assert layer_of("lm_head.weight") is None
    assert len(expected_tensors(ModelConfig.named("gpt-oss-20b"), "mxfp4")) == 3 + 24 * 19
    with pytest.raises(CheckpointError, match="expected gpt-oss-20b or gpt-oss-120b"):
        ModelConfig.named("gpt-4")


def test_the_training_script_makes_a_checkpoint_that_can_be_read(tmp_path, monkeypatch):
    from gptoss_debug.engines import toy_training

    schedules = {"A": toy_training.Schedule(2, 1), "B": toy_training.Schedule(1, 0)}
    monkeypatch.setattr(toy_training, "SCHEDULES", schedules)
    toy_training.main(tmp_path)
    shipped = Checkpoint.open(toy_path("A"))
    for variant in ("A", "B"):
        made = Checkpoint.open(tmp_path / variant)
        assert made.config == shipped.config
        assert made.files.keys() == shipped.files.keys()
    assert (tmp_path / "A" / "tokenizer.json").read_text() == (shipped.path / "tokenizer.json").read_text()
