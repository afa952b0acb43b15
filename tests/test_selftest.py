"""Real loads by vLLM into which faults are planted."""

import json

import pytest

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.diagnosis import diagnosis
from gptoss_debug.diagnosis.diagnosis import diagnose_recording
from gptoss_debug.diagnosis.faults import FAULTS, fault
from gptoss_debug.diagnosis.selftest import _judge, selftest
from gptoss_debug.errors import GptOssDebugError


def test_every_planted_fault_is_named_and_no_control_gives_an_alarm():
    result = selftest(controls=3)
    assert result.verdict.verdict == "ok", result.to_frame().to_string()
    assert len(result.trials) == len(FAULTS) + 6
    assert {"B1", "B2", "B3", "C1", "D1", "D3", "E1", "E2", "I1"} == {one.class_id for one in FAULTS}


def test_a_fault_that_is_missed_or_misnamed_and_a_false_alarm_are_wrong(recorded):
    clean = diagnose_recording(recorded(), Checkpoint.open(toy_path("A")), progress=False)
    assert not _judge(fault("bias_not_permuted"), clean).right
    other = diagnose_recording(recorded(), Checkpoint.open(toy_path("B")), progress=False)
    assert not _judge(fault("another_layer"), other).right
    with pytest.raises(GptOssDebugError, match="nonsense: is no fault that can be planted"):
        selftest(["nonsense"])


def test_the_diagnosis_of_a_clean_recording_is_the_comparison(recorded):
    found = diagnose_recording(recorded(tp=2), Checkpoint.open(toy_path("A")), progress=False)
    assert found.findings == ()
    assert found.verdict == found.comparison.verdict


def test_another_models_weights_are_unknown_unless_they_are_the_previous_ones(recorded):
    a, b = (Checkpoint.open(toy_path(v)) for v in "AB")
    named = diagnose_recording(recorded(), b, previous=a, progress=False)
    assert {finding.cause.class_id for finding in named.findings} == {"E2"}
    verdict = named.verdict
    assert verdict.headline == "192 expert tensors are wrong; all of them for a named reason (6 in all)."
    assert "The last writer was vllm" in verdict.findings[0]["sentence"]
    assert "Effect: " in verdict.findings[0]["sentence"]
    json.dumps(verdict.to_json())
    assert list(named.to_frame().columns)[:4] == ["layer", "rank", "part", "expert"]


def test_what_cannot_be_diagnosed_is_said(recorded, toy_bf16):
    a, b = (Checkpoint.open(toy_path(v)) for v in "AB")
    digests = diagnose_recording(recorded(layers="none"), b, progress=False)
    assert not digests.findings
    assert any("only digests were kept" in line for line in digests.verdict.not_checked)
    assert digests.verdict.verdict == "fault"
    floats = diagnose_recording(recorded(), toy_bf16, previous=a, progress=False)
    assert floats.verdict.verdict == "ok"
    assert diagnosis.UNKNOWN == "unknown"
