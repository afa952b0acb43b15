import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.random import write_random_checkpoint
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.checkpoints.writer import write_bf16_twin
from gptoss_debug.diagnosis.compare import compare_rank, compare_recording
from gptoss_debug.diagnosis.comparison import Comparison
from gptoss_debug.diagnosis.coverage import load_coverage
from gptoss_debug.engines.huggingface import HuggingFaceExperts
from gptoss_debug.errors import LayoutError, RecordingError
from gptoss_debug.layouts import marlin
from gptoss_debug.layouts.catalog import Placement
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.recording.digests import expert_digests
from gptoss_debug.recording.ranks import record_load
from gptoss_debug.recording.recording import Recording


def compare(recording, checkpoint):
    return compare_recording(recording, checkpoint, progress=False)


def bad(comparison):
    return [r for r in comparison.results if r.status != "exact"]


@pytest.mark.parametrize(
    ("backend", "tp", "expert_parallel", "tensors"),
    [
        ("marlin", 1, False, 192), ("marlin", 2, False, 384), ("marlin", 2, True, 192),
        ("raw", 1, False, 192), ("raw", 2, False, 384), ("bf16", 1, False, 128), ("bf16", 2, False, 256),
    ],
)  # fmt: skip
def test_a_real_load_is_exact(recorded, toy, toy_bf16, backend, tp, expert_parallel, tensors):
    comparison = compare(recorded(backend, tp, expert_parallel), toy_bf16 if backend == "bf16" else toy)
    assert [r.status for r in comparison.results] == ["exact"] * tensors
    assert comparison.verdict.verdict == "ok"
    assert comparison.verdict.headline.startswith(f"All {tensors} expert tensors")


def test_an_uneven_cut_is_exact(tmp_path):
    """Five MXFP4 blocks for two ranks: three and two."""
    config = ModelConfig(96, 160, 4, 2, 4, 2, 64, 640)
    model = Checkpoint.open(write_random_checkpoint(tmp_path / "model", config))
    write_bf16_twin(model, tmp_path / "twin")
    recording = record_load(model.path, tmp_path / "recording", tp=2)
    for source in (model, Checkpoint.open(tmp_path / "twin")):
        assert compare(recording, source).verdict.verdict == "ok"
    assert load_coverage(recording).verdict.verdict == "ok"


@pytest.mark.parametrize("tp", [1, 2])
def test_the_bf16_twin_and_transformers_agree_in_values(recorded, toy, toy_bf16, tp):
    for source in (toy_bf16, HuggingFaceExperts.open(toy.path)):
        comparison = compare(recorded(tp=tp), source)
        assert comparison.verdict.verdict == "ok", comparison
        assert len(comparison.results) == 128 * tp


def test_another_checkpoint_differs_everywhere(recorded):
    comparison = compare(recorded(), Checkpoint.open(toy_path("B")))
    assert comparison.verdict.verdict == "fault"
    assert len(bad(comparison)) == 192
    assert comparison.verdict.findings[0]["part"] == "w13_weight"


def edited(recording: Recording, part: str, change, layer: int = 2, rank: int = 0) -> Recording:
    """Change one recorded tensor after the repack, as if the engine had held that."""
    file = recording.ranks[rank].path / f"layer-{layer:03d}.after.safetensors"
    tensors = load_file(file)
    tensors[part] = change(tensors[part]).contiguous()
    save_file(tensors, file)
    index_file = recording.ranks[rank].path / "index.json"
    index = json.loads(index_file.read_text())
    for state in index["states"]:
        if (state["layer"], state["part"], state["stage"]) == (layer, part, "after"):
            state["experts"] = expert_digests(tensors[part])
    index_file.write_text(json.dumps(index))
    return Recording.open(recording.path)


def set_one(index, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return change


def test_an_unpermuted_bias_is_found_and_nothing_else(recorded, copied, toy):
    recording = edited(copied(recorded()), "w13_bias", lambda bias: Chain(marlin.BIAS).unwind(bias).values)
    comparison = compare(recording, toy)
    found = bad(comparison)
    assert {(r.layer, r.part, r.status) for r in found} == {(2, "w13_bias", "differs")}
    assert {r.expert for r in found} == set(range(8))
    (finding,) = comparison.verdict.findings
    # 288 of the bias's 384 positions move; a few hold a value equal to the one that came.
    assert 8 * 280 <= finding["differing"] <= 8 * 288
    assert "layer 2, w13_bias, experts 0-7, rank 0" in finding["sentence"]


def test_one_flipped_code_is_found_with_its_place_and_values(recorded, copied, toy):
    before = recorded().first.tensor(2, "w2_weight", "after")
    word = int(before[5, 3, 100]) ^ (1 << 8)  # the lowest bit of the word's third code
    comparison = compare(edited(copied(recorded()), "w2_weight", set_one((5, 3, 100), word)), toy)
    (result,) = bad(comparison)
    assert (result.expert, result.differing) == (5, 1)
    codes = toy.read_expert(2, "w2_weight")[5].flatten(1)
    row, column = result.first
    code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
    assert result.expected.startswith(f"code {code} (")
    assert result.found.startswith(f"code {code ^ 1} (")


def test_a_shifted_scale_is_shown_as_a_power_of_two(recorded, copied, toy):
    def shift(scales):
        raw = scales.clone().view(torch.uint8)
        raw[1, 0, 0] += 1
        return raw.view(torch.float8_e8m0fnu)

    (result,) = bad(compare(edited(copied(recorded()), "w13_weight_scale", shift), toy))
    exponent = int(toy.read_expert(2, "w13_weight_scale")[1, 0, 0]) - 127
    assert (result.expert, result.first) == (1, (0, 0))
    assert (result.expected, result.found) == (f"2^{exponent}", f"2^{exponent + 1}")


@pytest.mark.parametrize(
    ("part", "index", "value"),
    [("w13_bias", (0, 511), 1.0), ("w2_bias", (7, 255), float("nan")), ("w13_weight", (3, 15, 1023), 1)],
)
def test_dirty_padding_is_not_exact(recorded, copied, toy, part, index, value):
    comparison = compare(edited(copied(recorded()), part, set_one(index, value)), toy)
    (result,) = bad(comparison)
    assert (result.status, result.part, result.expert) == ("padding not zero", part, index[0])
    assert result.dirty_padding > 0
    assert comparison.verdict.verdict == "fault"
    assert "bytes of padding are not zero" in comparison.verdict.findings[0]["sentence"]


@pytest.mark.parametrize("value", [-0.0, float("nan")])
def test_negative_zero_and_nan_are_differences_of_bits(recorded, copied, toy, value):
    (result,) = bad(compare(edited(copied(recorded()), "w2_bias", set_one((4, 0), value)), toy))
    assert (result.expert, result.first) == (4, (0,))
    assert result.expected == f"{toy.read_expert(2, 'w2_bias')[4, 0].item():.6g}"


def test_a_file_that_changed_since_is_no_fault_of_the_engine(recorded, copied, toy):
    recording = copied(recorded())
    file = recording.first.path / "layer-001.after.safetensors"
    tensors = load_file(file)
    tensors["w2_bias"][3, 0] += 1
    save_file(tensors, file)
    with pytest.raises(RecordingError, match="w2_bias of layer 1, expert 3 is not what was recorded"):
        compare(recording, toy)


@dataclass(frozen=True)
class Changed:
    """A checkpoint with other expert weights."""

    base: Checkpoint
    factor: float = 1.0
    dtype: torch.dtype = torch.bfloat16

    def __getattr__(self, name):
        return getattr(self.base, name)

    def read_expert(self, layer, part, experts=slice(None)):
        tensor = self.base.read_expert(layer, part, experts)
        return (tensor * self.factor if part.endswith("_weight") else tensor).to(self.dtype)


def test_a_float_source_that_rounds_to_the_engines_values_is_ok(recorded, toy_bf16):
    comparison = compare(recorded(), Changed(toy_bf16, factor=1.01))
    assert {r.status for r in comparison.results} == {"exact", "rounded"}
    assert comparison.verdict.verdict == "ok"
    assert "64 of them rounded to MXFP4" in comparison.verdict.headline
    assert compare(recorded(), Changed(toy_bf16, factor=1.5)).verdict.verdict == "fault"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_float_dtypes_are_cast_as_the_engine_casts(recorded, toy_bf16, dtype):
    for backend in ("bf16", "marlin"):
        assert compare(recorded(backend), Changed(toy_bf16, dtype=dtype)).verdict.verdict == "ok"


@pytest.mark.parametrize("tp", [1, 2])
def test_an_unquantised_engine_against_an_mxfp4_checkpoint(recorded, toy, tp):
    comparison = compare(recorded("bf16", tp), toy)
    assert comparison.verdict.verdict == "ok", comparison
    assert len(comparison.results) == 128 * tp
    assert compare(recorded("bf16", tp), Checkpoint.open(toy_path("B"))).verdict.verdict == "fault"


def test_a_fault_on_one_rank_only(recorded, copied, toy):
    recording = edited(copied(recorded(tp=2)), "w2_bias", lambda bias: bias + 1, rank=1)
    found = bad(compare(recording, toy))
    assert {(r.rank, r.part) for r in found} == {(1, "w2_bias")}


def test_digests_alone_tell_that_but_not_where(recorded, toy):
    recording = recorded(layers="none")
    assert compare(recording, toy).verdict.verdict == "ok"
    other = compare(recording, Checkpoint.open(toy_path("B")))
    assert other.verdict.verdict == "fault"
    assert "compared by digest" in other.verdict.findings[0]["sentence"]


def test_a_bf16_source_needs_values_not_digests(recorded, toy_bf16):
    verdict = compare(recorded(layers="none"), toy_bf16).verdict
    assert verdict.verdict == "error"
    assert "could not be compared" in verdict.headline
    assert any("only digests were kept" in item for item in verdict.not_checked)


def test_comparing_nothing_is_an_error():
    verdict = Comparison((), (), {}).verdict
    assert (verdict.verdict, verdict.headline) == ("error", "Nothing was compared.")


def test_a_misshapen_tensor_is_not_compared(recorded, copied, toy):
    recording = edited(copied(recorded()), "w13_bias", lambda bias: bias[:, :384])
    comparison = compare(recording, toy)
    assert {r.status for r in bad(comparison)} == {"not compared"}
    assert comparison.verdict.verdict == "error"
    assert "axis 1 does not fit the padding" in comparison.verdict.not_checked[-1]


def test_a_recording_of_another_model_is_refused(recorded, copied, toy):
    file = copied(recorded()).path / "rank0" / "index.json"
    index = json.loads(file.read_text())
    index["config"]["num_experts"] = 16
    file.write_text(json.dumps(index))
    with pytest.raises(RecordingError, match="num_experts differs; expected 8; found 16"):
        compare(Recording.open(file.parents[1]), toy)


def test_an_unknown_backend_is_refused(toy):
    with pytest.raises(LayoutError, match="no layout is known"):
        compare_rank(lambda *args: None, toy, "flashinfer_trtllm", Placement(), progress=False)


def test_results_can_be_looked_at(recorded, toy):
    comparison = compare(recorded(), toy)
    assert len(comparison.to_frame()) == 192
    assert comparison.summary().exact.sum() == 192
    assert comparison.to_json()["verdict"] == "ok"
    assert "expert tensors" in comparison._repr_html_()
