"""The report: run notebooks, export them, and write ``index.html`` and ``summary.json`` over them."""

from __future__ import annotations

import html
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.engines.environment import Environment
from gptoss_debug.errors import GptOssDebugError
from gptoss_debug.files import partial_directory, write_text
from gptoss_debug.layouts.catalog import check_parallel
from gptoss_debug.reports.notebooks import NotebookRun, find_notebooks, run_notebook
from gptoss_debug.verdict import Outcome, Verdict

INDEX, SUMMARY = "index.html", "summary.json"


@dataclass(frozen=True)
class Report:
    """A finished report."""

    path: Path
    runs: tuple[NotebookRun, ...]
    verdict: Verdict

    @property
    def index(self) -> Path:
        """Return the page to open."""
        return self.path / INDEX


def make_report(
    model: Path, out: Path, *, notebooks: Sequence[str] = (), tp: int = 1, device: str = "cpu", name: str | None = None
) -> Report:
    """Check the model, run the notebooks on it, and put the pages into a directory.

    Nothing appears in ``out`` before all notebooks have run; files of an older report are replaced one
    by one, the index last, and files of other kinds are left alone.

    Parameters
    ----------
    model
        A GPT-OSS model directory.
    out
        Where the pages go.
    notebooks
        Numbers such as ``"01"``; all of them if empty.
    tp
        Tensor-parallel ranks.
    device
        ``cpu`` or ``cuda``.
    name
        What to call the model in the report; its path if None.

    Raises
    ------
    GptOssDebugError
        If the model, the ranks, the notebooks or the output cannot be used.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise GptOssDebugError("is a file, not a directory", where=out, hint="Name another --out.")
    chosen = find_notebooks(tuple(notebooks))
    checkpoint = Checkpoint.open(model)
    checkpoint.check_values()
    check_parallel(checkpoint.config, tp)
    _check_device(device)
    out = out.resolve()
    # Beside the pages' final place or in it, so that moving them there is a rename on one file system.
    work = partial_directory(out, within=out if out.is_dir() else None)
    try:
        parameters = {
            "model": str(checkpoint.path.resolve()),
            "tp": tp,
            "device": device,
            "recording": str(work / "recording"),
        }
        runs = tuple(run_notebook(path, work, parameters) for path in chosen)
        verdict = summarise(runs)
        write_text(work / INDEX, index_page(runs, verdict, name or str(checkpoint.path)))
        verdict.save(work / SUMMARY)
        out.mkdir(exist_ok=True)
        for run in runs:
            for file in (run.html, run.html.with_suffix(".json")):
                file.replace(out / file.name)
        for page in (SUMMARY, INDEX):
            (work / page).replace(out / page)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    runs = tuple(NotebookRun(r.name, r.title, r.verdict, out / r.html.name) for r in runs)
    return Report(out, runs, verdict)


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise GptOssDebugError("no CUDA device is here", where="--device cuda", hint="Use --device cpu.")


def summarise(runs: Sequence[NotebookRun]) -> Verdict:
    """Join the verdicts of notebooks: the worst outcome, all findings, all that was not checked."""
    order: tuple[Outcome, ...] = ("error", "fault", "ok")
    if not runs:
        return Verdict("error", "No notebook was run.", environment=Environment.current().to_json())
    worst = min((run.verdict.verdict for run in runs), key=order.index)
    if worst == "ok":
        headline = " ".join(run.verdict.headline for run in runs)
    else:
        headline = " ".join(run.verdict.headline for run in runs if run.verdict.verdict == worst)
    return Verdict(
        worst,
        headline,
        [{"notebook": run.name, **finding} for run in runs for finding in run.verdict.findings],
        list(dict.fromkeys(item for run in runs for item in run.verdict.not_checked)),
        next((run.verdict.environment for run in runs if run.verdict.environment), Environment.current().to_json()),
    )


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin-top: 1.6em; } table { border-collapse: collapse; }
td, th { text-align: left; padding: .15em .8em .15em 0; vertical-align: top; } a { color: #0072B2; }
.kernels { background: #f3f3f3; padding: .5em .8em; }
"""


def index_page(runs: Sequence[NotebookRun], verdict: Verdict, model: str) -> str:
    """Return the index: the verdict sentence of each notebook first, then versions and what was not checked."""
    escape = html.escape
    environment = Environment(**verdict.environment)
    kernels = (
        "The experts' kernels were <strong>emulated</strong>: vLLM's own loader and repack ran; its GEMM was replaced "
        "by a CPU decode of the very bytes that the kernel would read."
        if environment.kernels == "emulated"
        else "The kernels were <strong>real</strong>."
    )
    sections = "".join(
        f'<h2><a href="{escape(run.html.name)}">{escape(run.title)}</a></h2>'
        + Verdict(run.verdict.verdict, run.verdict.headline, run.verdict.findings)._repr_html_()
        for run in runs
    )
    not_checked = "".join(f"<li>{escape(item)}</li>" for item in verdict.not_checked) or "<li>nothing further</li>"
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>GPT-OSS weights: {escape(verdict.verdict)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>Does the engine hold the weights? <span>{escape(verdict.verdict.upper())}</span></h1>"
        f"<p>Model: <code>{escape(model)}</code></p><p class='kernels'>{kernels}</p>{sections}"
        f"<h2>Not checked</h2><ul>{not_checked}</ul><h2>Versions</h2>{environment._repr_html_()}"
        f"<p>Made {made}; the same in <a href='{SUMMARY}'>{SUMMARY}</a>.</p></body></html>\n"
    )
