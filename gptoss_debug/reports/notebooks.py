"""The notebooks: where they are, running them by papermill, exporting them to single-file HTML."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptoss_debug.engines.environment import QUIET
from gptoss_debug.environ import variables
from gptoss_debug.errors import GptOssDebugError
from gptoss_debug.files import write_text
from gptoss_debug.verdict import Verdict

KERNEL = "python3"

# Kernels show no progress bars and draw into the page, not on a screen.
_KERNEL_VARIABLES = QUIET | {"TQDM_DISABLE": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}


@dataclass(frozen=True)
class NotebookRun:
    """A notebook that was run.

    Attributes
    ----------
    name
        ``01_record_loading``.
    title
        Its first heading.
    verdict
        What it found; an ``error`` verdict if it broke off.
    html
        The exported page.
    """

    name: str
    title: str
    verdict: Verdict
    html: Path


def notebooks_dir() -> Path:
    """Return the directory of the notebooks: in an installed package, or at the top of a source tree."""
    package = Path(__file__).resolve().parents[1]
    return next(d for d in (package / "notebooks", package.parent / "notebooks") if d.is_dir())


def find_notebooks(choices: tuple[str, ...] = ()) -> list[Path]:
    """Return the notebooks whose names begin with the given numbers, or all.

    Raises
    ------
    GptOssDebugError
        If one of the choices fits none.
    """
    there = sorted(notebooks_dir().glob("[0-9]*.ipynb"))
    if not choices:
        return there
    chosen = []
    for choice in choices:
        fits = [path for path in there if path.stem == choice or path.stem.startswith(f"{choice}_")]
        if not fits:
            raise GptOssDebugError(
                "is no notebook of this package", where=choice, expected=" or ".join(p.stem for p in there)
            )
        chosen += fits
    return sorted(set(chosen))


def run_notebook(path: Path, out: Path, parameters: Mapping[str, Any]) -> NotebookRun:
    """Run a notebook and export it, also when it fails: the page then ends with the error.

    Parameters
    ----------
    path
        The notebook.
    out
        Where ``NAME.html`` and ``NAME.json`` (the verdict) go.
    parameters
        Values for its parameters cell, of which it takes those that it knows; ``verdict_file`` is added.
    """
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    logging.getLogger("papermill").setLevel(logging.WARNING)
    verdict_file = out / f"{path.stem}.json"
    failure = None
    known = papermill.inspect_notebook(path)
    chosen = {name: value for name, value in parameters.items() if name in known}
    # Unix sockets need a short path, which no output directory promises to be.
    with variables(**_KERNEL_VARIABLES), tempfile.TemporaryDirectory(prefix="gptoss-") as scratch:
        executed, log = Path(scratch) / "executed.ipynb", Path(scratch) / "log"
        try:
            papermill.execute_notebook(
                path,
                executed,
                parameters=chosen | {"verdict_file": str(verdict_file)},
                kernel_name=KERNEL,
                progress_bar=False,
                log_output=False,
                cwd=str(out),
                kernel_manager_class=_logging_kernel_manager(log),
                # Sockets in the file system, which other users cannot read, in place of TCP ports.
                config=Config({"KernelManager": {"transport": "ipc", "ip": f"{scratch}/kernel"}}),
            )
        except PapermillExecutionError as error:
            failure = Verdict("error", f"The notebook broke off: {error.ename}: {_plain(error.evalue)}")
        except KeyboardInterrupt:
            # The cell that was waited for fails when its kernel goes, and asyncio would print that as a
            # traceback nobody asked for.
            logging.getLogger("asyncio").disabled = True
            raise
        except DeadKernelError:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            failure = Verdict("error", f"The notebook's kernel died: {_plain(last[0]) if last else 'no message'}")
        notebook = nbformat.read(executed if executed.exists() else path, as_version=4)
    page = out / f"{path.stem}.html"
    write_text(page, to_html(notebook))
    verdict = Verdict.from_file(verdict_file) if verdict_file.exists() else None
    # An assertion that follows a "fault" verdict is how a notebook fails; any other break is an error.
    if failure is not None and (verdict is None or verdict.verdict == "ok"):
        verdict = failure
    if verdict is None:
        verdict = Verdict("error", "The notebook gave no verdict.")
    verdict.save(verdict_file)
    return NotebookRun(path.stem, title(notebook), verdict, page)


def _logging_kernel_manager(log: Path) -> type:
    """Return a kernel manager whose kernels write what they say outside cells to a file, not to the terminal."""
    from jupyter_client.manager import AsyncKernelManager

    class LoggingKernelManager(AsyncKernelManager):
        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
            with log.open("ab") as stream:
                await self._async_start_kernel(stdout=stream, stderr=stream, **options)

    return LoggingKernelManager


def to_html(notebook: Any) -> str:
    """Export an executed notebook to one HTML page: code folded, one click to show it."""
    from nbconvert import HTMLExporter

    # The parameters that papermill injected stay, whatever it says about the run goes.
    notebook.cells = [
        cell for cell in notebook.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])
    ]
    page, _ = HTMLExporter(
        template_name="lab", exclude_input_prompt=True, exclude_output_prompt=True
    ).from_notebook_node(notebook, resources={"metadata": {"name": title(notebook)}})
    return page.replace("</body>", _FOLD + "</body>", 1)


# Code cells fold into <details>; done in the page, so that the export keeps its own structure.
_FOLD = """
<style>
details.code > summary { cursor: pointer; color: #666; font: 12px sans-serif; padding: 2px 0; }
.jp-Notebook { max-width: 1180px; margin: auto; }
.jp-RenderedHTMLCommon td, .jp-RenderedHTMLCommon th { text-align: left !important; }
@media print { details.code { display: none; } }
</style>
<script>
for (const input of document.querySelectorAll(".jp-CodeCell .jp-Cell-inputWrapper")) {
  const details = document.createElement("details");
  details.className = "code";
  const summary = document.createElement("summary");
  summary.textContent = "show code";
  details.append(summary);
  input.replaceWith(details);
  details.append(input);
}
</script>
"""


def title(notebook: Any) -> str:
    """Return the first heading of a notebook."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (match := re.search(r"^#\s+(.+)$", cell.source, re.MULTILINE)):
            return match[1].strip()
    return "Notebook"


def _plain(text: str) -> str:
    """Return the first line of a message, without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip().splitlines()[0][:300] if text.strip() else ""
