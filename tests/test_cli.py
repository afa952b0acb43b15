import contextlib
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import toy_path
from gptoss_debug.cli import main

SHAPE = {"verdict", "headline", "findings", "not_checked", "environment"}


def run(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def run_json(*arguments):
    result = run(*arguments, "--json")
    answer = json.loads(result.stdout)
    assert answer.keys() == SHAPE
    assert all("sentence" in finding for finding in answer["findings"])
    assert result.exit_code == {"ok": 0, "fault": 1, "error": 2}[answer["verdict"]]
    assert answer["environment"]["kernels"] in {"emulated", "real"}
    return answer


def test_toy_writes_a_model_directory(tmp_path):
    for name, options in {"a": [], "b": ["--variant", "B"], "c": ["--bf16"]}.items():
        assert run_json("toy", tmp_path / name, *options)["verdict"] == "ok"
    assert Checkpoint.open(tmp_path / "c").source == "bf16"
    (tmp_path / "d").mkdir()
    with contextlib.chdir(tmp_path / "d"):
        assert "is the current directory" in run("toy", ".").stderr
    assert run("toy", tmp_path / "a").exit_code == 2


def test_record_and_compare(tmp_path, toy):
    out = tmp_path / "recording"
    result = run("record", toy.path, "--out", out, "--layers", "0")
    assert result.exit_code == 0
    assert "79 writes from 79 checkpoint tensors, 4 past every weight loader" in result.stdout
    assert "OK: Every region of all 63 parameters" in result.stdout
    assert run_json("compare", out, toy.path)["verdict"] == "ok"
    wrong = run_json("compare", out, toy_path("B"))
    assert wrong["verdict"] == "fault"
    assert {finding["part"] for finding in wrong["findings"]} >= {"w13_weight", "w2_bias"}
    named = run_json("diagnose", out, "--against", toy_path("B"), "--previous", toy.path)
    assert {(f["class_id"], *f["layers"]) for f in named["findings"]} == {("E2", 0)}
    assert any("only digests were kept" in item for item in named["not_checked"])
    assert run("record", toy.path, "--out", out).exit_code == 2
    assert "FAULT: 192 of 192" in run("compare", out, toy_path("B")).stdout


def test_verify_sync(tmp_path):
    a, b = toy_path("A"), toy_path("B")
    good = run("verify-sync", a, b, "--source", "bf16", "--no-text")
    assert good.exit_code == 0
    assert "OK: fixed: right in all 14 oracles (bf16 weights into a running marlin engine" in good.stdout
    bad = run_json("verify-sync", a, b, "--loader", "reload_weights", "--no-text")
    assert bad["verdict"] == "fault"
    assert {"E2", "C1"} <= {finding["class_id"] for finding in bad["findings"]}
    sinks = next(f["sentence"] for f in bad["findings"] if f["class_id"] == "E2")
    assert "layers 0-3, attn.sinks" in sinks
    for wrong, says in ((a, "holds the same weights as"), (tmp_path, "config.json: is missing")):
        result = run("verify-sync", a, wrong)
        assert result.exit_code == 2
        assert says in result.stderr
    run("toy", tmp_path / "bf16", "--variant", "B", "--bf16")
    assert "has other experts than" in run("verify-sync", a, tmp_path / "bf16").stderr


def test_explain_shapes():
    options = ("explain-shapes", "[32,192,6144]", "[32,2880,2880]", "--model", "gpt-oss-20b", "--tp", "2")
    result = run(*options)
    assert result.exit_code == 0
    assert result.stdout.startswith("[32, 192, 6144] is w13_weight")
    assert "So the mismatch is one of format, padding and layout." in result.stdout
    answer = run_json(*options)
    assert answer["findings"][0]["between"][0].startswith("quantise:")
    assert run("explain-shapes", "[8,16,1024]", "[8,384,5,16]", "--model", toy_path()).exit_code == 0


def test_doctor_finds_this_machine_fit():
    answer = run_json("doctor")
    assert answer["verdict"] == "ok", answer
    assert "layout of marlin experts" in run("doctor").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "none", "none"], "none: is not a directory; expected a recording"),
        (["record", "none", "--out", "x"], "none: is not a directory; expected a model directory"),
        (["record", toy_path(), "--out", "x", "--tp", "3"], "num_attention_heads 4 cannot be divided among 3 ranks"),
        (["record", toy_path(), "--out", "x", "--layers", "first"], "'first': is no choice of layers"),
        (["record", toy_path(), "--out", "x", "--layers", "1,9"], "--layers 1,9: names a layer that the model has not"),
        (["toy", "/dev/null/x"], "/dev/null/x: cannot be written"),
        (["explain-shapes", "[a]", "[8]", "--model", "gpt-oss-20b"], "'[a]': is no shape"),
        (["explain-shapes", "[8]", "[8]", "--model", "gpt-2"], "gpt-2: is neither a model directory nor"),
        (["explain-shapes", "[8]", "[9]", "--model", "gpt-oss-20b"], "[8] is no expert tensor of this model at TP=1"),
        (["report", "--model", "none"], "none: is not a directory"),
        (["report", "--notebook", "99"], "99: is no notebook of this package"),
        (["report", "--tp", "3"], "--tp 3: num_attention_heads 4 cannot be divided"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output
    answer = run_json(*arguments)
    assert (answer["verdict"], message in answer["headline"]) == ("error", True)
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_expected_is_an_error_too(monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("gptoss_debug.cli.write_toy", fail)
    result = run("toy", tmp_path / "x")
    assert result.exit_code == 2
    assert result.stderr == "error: unexpected RuntimeError: first line. GPTOSS_DEBUG_TRACEBACK=1 shows where.\n"
    monkeypatch.setenv("GPTOSS_DEBUG_TRACEBACK", "1")
    assert isinstance(CliRunner().invoke(main, ["toy", str(tmp_path / "x")]).exception, RuntimeError)


def test_the_module_is_the_command():
    result = subprocess.run([sys.executable, "-m", "gptoss_debug", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "gptoss-debug, version 0.1.0\n")
