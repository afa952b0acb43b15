import os

import pytest

from gptoss_debug.diagnosis.coverage import load_coverage
from gptoss_debug.engines import vllm_adapter, vllm_cpu
from gptoss_debug.errors import EngineError, RecordingError
from gptoss_debug.recording.recorder import VARIABLE, Recorder


def hooks():
    """Return what a recorder replaces, as it is now."""
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    return base_loader.initialize_model, base_loader.process_weights_after_loading, GptOssForCausalLM.load_weights


def test_in_process_recording_and_nothing_left_behind(tmp_path, toy, recorded):
    vllm_cpu.prepare_process()
    before, environment = hooks(), dict(os.environ)
    with Recorder(tmp_path / "out") as recorder:
        assert hooks() != before
        assert VARIABLE in os.environ
        with vllm_adapter.loaded_model(toy.path) as model:
            methods = [vars(layer.module.quant_method) for layer in vllm_adapter.expert_layers(model)]
            assert not any("process_weights_after_loading" in method for method in methods)
            # A second load is recorded too, as load 2.
            model.load_weights([("model.norm.weight", toy.read("model.norm.weight"))])
    assert hooks() == before
    ours = ("GPTOSS_", "HF_", "VLLM_DIST", "VLLM_LOGGING", "VLLM_NO_USAGE", "VLLM_ENABLE", "VLLM_CPU", "OMP_")
    assert not {name for name in os.environ.keys() - environment.keys() if name.startswith(ours)}
    assert all(os.environ[name] == value for name, value in environment.items() if name.startswith(ours))
    recording = recorder.recording
    first = [row for row in recording.ledger.rows if row.load == 1]
    assert [(row.source, row.parameter, row.sha256) for row in first] == [
        (row.source, row.parameter, row.sha256) for row in recorded().ledger.rows
    ]
    (second,) = [row for row in recording.ledger.rows if row.load == 2]
    assert second.source == "model.norm.weight"
    for state in recording.first.states:
        assert state.experts == recorded().first.state(state.layer, state.part, state.stage).experts


def test_a_failing_load_restores_everything_and_leaves_no_rank(tmp_path, toy, monkeypatch):
    before = hooks()

    def fail(*args):
        raise RuntimeError("out of memory")

    recorder = Recorder(tmp_path / "out")
    with pytest.raises(RuntimeError, match="out of memory"), recorder:
        monkeypatch.setattr("gptoss_debug.recording.recorder.save_file", fail)
        with vllm_adapter.loaded_model(toy.path):
            pass
    assert hooks() == before
    assert not (tmp_path / "out").exists()


def test_a_load_that_raises_is_recorded_up_to_there(tmp_path, toy, monkeypatch):
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    load = GptOssRoutedExperts.weight_loader

    def fail(self, param, weight, weight_name, *args, **kwargs):
        if "layers.2." in weight_name and weight_name.endswith("w2_bias"):
            raise ValueError("no room for it")
        return load(self, param, weight, weight_name, *args, **kwargs)

    monkeypatch.setattr(GptOssRoutedExperts, "weight_loader", fail)
    recorder = Recorder(tmp_path / "out")
    with pytest.raises(ValueError, match="no room for it"), recorder, vllm_adapter.loaded_model(toy.path):
        pass
    ledger = recorder.recording.ledger
    assert 30 < len(ledger.rows) < 79
    assert ledger.unused == ("model.layers.2.mlp.experts.down_proj_bias",)
    verdict = load_coverage(recorder.recording).verdict
    assert verdict.verdict == "fault"
    assert any("layers.3." in finding["sentence"] for finding in verdict.findings)


def test_a_recorder_is_for_one_load(tmp_path, toy):
    with Recorder(tmp_path / "out", layers="none") as recorder:
        with vllm_adapter.loaded_model(toy.path):
            pass
        with pytest.raises(RecordingError, match="holds a load already"), vllm_adapter.loaded_model(toy.path):
            pass
    assert len(recorder.recording.ranks) == 1


def test_recording_nothing_is_an_error(tmp_path):
    with pytest.raises(RecordingError, match="nothing was recorded"), Recorder(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()


def test_an_output_in_use_is_refused(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(RecordingError, match="holds something already"):
        Recorder(tmp_path)


def test_the_wrong_backend_is_an_error(toy):
    with vllm_adapter.loaded_model(toy.path, backend="raw") as model:
        assert vllm_adapter.chosen_backend(vllm_adapter.expert_layers(model)[0].module) == "raw"
        with pytest.raises(EngineError, match="runs another MoE backend; expected marlin; found raw"):
            vllm_adapter.check_backend(model, "marlin")
