import json
import re
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from gptoss_debug.checkpoints.toy import toy_path, write_toy
from gptoss_debug.errors import GptOssDebugError
from gptoss_debug.reports.notebooks import NotebookRun, find_notebooks, run_notebook
from gptoss_debug.reports.report import index_page, make_report, summarise
from gptoss_debug.verdict import Verdict


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "reports"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    return make_report(toy_path("A"), out, name="the toy")


def test_the_report_of_the_toy_is_ok_and_complete(report):
    assert report.verdict.verdict == "ok", report.verdict
    assert [run.verdict.verdict for run in report.runs] == ["ok", "ok", "ok"]
    assert {path.name for path in report.path.iterdir()} == {
        "index.html", "summary.json", "mine.txt", "01_record_loading.html", "01_record_loading.json",
        "02_compare_layouts.html", "02_compare_layouts.json",
        "04_validate_marlin_loader.html", "04_validate_marlin_loader.json",
    }  # fmt: skip
    summary = json.loads((report.path / "summary.json").read_text())
    assert summary.keys() == {"verdict", "headline", "findings", "not_checked", "environment"}
    assert "All 192 expert tensors" in summary["headline"]
    assert "fixed: right in all 15 oracles" in summary["headline"]
    assert summary["environment"]["kernels"] == "emulated"


def test_every_page_says_whether_kernels_were_emulated(report):
    assert "kernels were <strong>emulated</strong>" in report.index.read_text()
    for run in report.runs:
        assert "expert kernels emulated on the CPU" in run.html.read_text()


def test_pages_are_single_files_with_folded_code_and_no_noise(report):
    for run in report.runs:
        page = run.html.read_text()
        assert "show code" in page
        assert not re.search(r'<(?:img|script|link)[^>]+(?:src|href)="(?!data:|https://cdnjs)', page)
        assert "WARNING" not in page
        assert "Traceback" not in page
        first = {"01": "Every region", "02": "All 192", "04": "fixed: right in all"}[run.name[:2]]
        assert page.index(f"<strong>{first}") < page.index("<table")


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """Make the package's notebooks be one that holds the given code."""

    def make(*code):
        cells = [new_markdown_cell("# A <title>")]
        cells.append(new_code_cell('verdict_file: str = ""  # x', metadata={"tags": ["parameters"]}))
        cells += map(new_code_cell, code)
        path = tmp_path / "nb" / "07_test.ipynb"
        path.parent.mkdir(exist_ok=True)
        kernel = {"kernelspec": {"name": "python3", "display_name": "x", "language": "python"}}
        nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
        monkeypatch.setattr("gptoss_debug.reports.notebooks.notebooks_dir", lambda: path.parent)
        return path

    return make


SAVE = """
from pathlib import Path
from gptoss_debug.verdict import Verdict
Verdict("{}", "It is <so>.", [{{"sentence": "a <b> c"}}] if "{}" == "fault" else []).save(Path(verdict_file))
"""


def test_a_fault_and_the_assertion_after_it_are_a_fault(notebook, tmp_path):
    run = run_notebook(notebook(SAVE.format("fault", "fault"), "assert False"), tmp_path, {})
    assert run.verdict.verdict == "fault"
    assert "AssertionError" in run.html.read_text()
    page = index_page([run], summarise([run]), "<model>")
    assert "&lt;model&gt;" in page
    assert "a &lt;b&gt; c" in page
    assert "<so>" not in page
    assert "<title>GPT-OSS weights: fault" in page


def test_a_notebook_that_breaks_off_is_an_error_with_a_page(notebook, tmp_path):
    run = run_notebook(notebook(SAVE.format("ok", "ok"), "1 / 0"), tmp_path, {})
    assert run.verdict.verdict == "error"
    assert run.verdict.headline == "The notebook broke off: ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in run.html.read_text()


def test_a_kernel_that_dies_is_an_error(notebook, tmp_path):
    run = run_notebook(notebook("import os, sys; os.write(2, b'out of luck'); os._exit(7)"), tmp_path, {})
    assert run.verdict.verdict == "error"
    assert run.verdict.headline.startswith("The notebook's kernel died")
    assert run.html.exists()


def test_a_notebook_without_a_verdict_is_an_error(notebook, tmp_path):
    assert run_notebook(notebook("1 + 1"), tmp_path, {}).verdict.headline == "The notebook gave no verdict."


def test_the_worst_verdict_wins(tmp_path):
    runs = [
        NotebookRun(name, "t", Verdict(outcome, f"{outcome} here.", not_checked=["x"]), tmp_path)
        for name, outcome in (("1", "ok"), ("2", "fault"), ("3", "error"))
    ]
    assert summarise(runs[:1]).verdict == "ok"
    assert summarise(runs[:2]).headline == "fault here."
    assert summarise(runs).verdict == "error"
    assert summarise(runs).not_checked == ["x"]
    assert summarise([]).verdict == "error"


def test_notebooks_are_chosen_by_number_or_name():
    assert [path.stem for path in find_notebooks(("02",))] == ["02_compare_layouts"]
    assert [path.stem for path in find_notebooks(("02_compare_layouts", "01"))] == [
        "01_record_loading", "02_compare_layouts",
    ]  # fmt: skip
    with pytest.raises(GptOssDebugError, match="is no notebook of this package"):
        find_notebooks(("2",))


def test_a_checkpoint_that_differs_from_the_recording_fails_the_notebook(recorded, tmp_path):
    (path,) = find_notebooks(("02",))
    run = run_notebook(path, tmp_path, {"model": str(toy_path("B")), "recording": str(recorded().path)})
    assert run.verdict.verdict == "fault"
    assert run.verdict.headline == "192 of 192 expert tensors differ from the checkpoint (4 layers, 1 rank)."


def test_bad_input_leaves_no_report(tmp_path):
    broken = write_toy(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"x")
    with pytest.raises(GptOssDebugError, match="cannot be read"):
        make_report(broken, tmp_path / "out")
    with pytest.raises(GptOssDebugError, match="no CUDA device"):
        make_report(toy_path(), tmp_path / "out", device="cuda")
    (tmp_path / "file").write_text("x")
    with pytest.raises(GptOssDebugError, match="is a file"):
        make_report(toy_path(), tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "file"]


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_ctrl_c_leaves_no_partial_report(tmp_path, seconds):
    process = subprocess.Popen(
        [sys.executable, "-m", "gptoss_debug", "report", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(300):
        time.sleep(0.1)
        if any(tmp_path.glob(".out.*/recording")):
            break
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "nothing was left half-written" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
