"""The command line: options, one call, an exit code (0 ok, 1 fault found, 2 bad input or error)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gptoss_debug import __version__
from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.checkpoints.names import Format
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import PROMPTS, toy_path, write_toy
from gptoss_debug.engines.environment import Environment
from gptoss_debug.errors import GptOssDebugError
from gptoss_debug.layouts.catalog import BackendName, check_parallel, default_backend
from gptoss_debug.sync.loaders import LOADERS, Loader
from gptoss_debug.verdict import EXIT_CODES, Verdict

Command = Callable[..., Verdict | tuple[Verdict, str]]
"""Returns a verdict, and the text to print in its place where a verdict is not what was asked for."""

screen = Console(highlight=False, soft_wrap=True)
_COLOURS = {"ok": "green", "fault": "red", "error": "red"}


def _command(function: Command) -> Callable[..., None]:
    """Add ``--json``, print the verdict that a command returns, and leave with its exit code."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object, of the shape of summary.json.")
    @wraps(function)
    def run(as_json: bool, **options: Any) -> None:
        text: str | None = None
        try:
            result = function(as_json=as_json, **options)
            verdict, text = result if isinstance(result, tuple) else (result, None)
        except GptOssDebugError as error:
            verdict = _refuse(error, as_json)
        except OSError as error:
            verdict = _refuse(GptOssDebugError(error.strerror or str(error), where=error.filename), as_json)
        except Exception as error:
            if os.environ.get("GPTOSS_DEBUG_TRACEBACK") == "1":
                raise
            what = f"unexpected {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            verdict = _refuse(GptOssDebugError(what, hint="GPTOSS_DEBUG_TRACEBACK=1 shows where."), as_json)
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was left half-written", err=True)
            sys.exit(130)
        if as_json:
            click.echo(json.dumps(verdict.to_json(), indent=2))
        elif text is not None:
            screen.print(text, markup=False)
        else:
            _print(verdict)
        sys.exit(verdict.exit_code)

    return run


def _refuse(error: GptOssDebugError, as_json: bool) -> Verdict:
    """Say in one line what is wrong, and leave; with ``--json`` return it as a verdict."""
    if not as_json:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(EXIT_CODES["error"])
    return Verdict("error", str(error), environment=Environment.current().to_json())


def _print(verdict: Verdict) -> None:
    colour = _COLOURS[verdict.verdict]
    head, *rest = str(verdict).split("\n")
    label, _, text = head.partition(" ")
    screen.print(f"[bold {colour}]{label}[/]", end=" ")
    screen.print(text, markup=False)
    for line in rest:
        screen.print(line, markup=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gptoss-debug")
def main() -> None:
    """Find out whether vLLM holds the GPT-OSS weights that it was given, and what happened to them."""


@main.command()
@click.option("--model", type=click.Path(path_type=Path), help="Model directory  [default: the toy checkpoint A]")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("reports"), show_default=True, help="Where the pages go."
)
@click.option(
    "--notebook",
    "notebooks",
    multiple=True,
    metavar="NN",
    help="A notebook by its number; again for more  [default: all]",
)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@_command
def report(model: Path | None, out: Path, notebooks: tuple[str, ...], tp: int, device: str, as_json: bool) -> Verdict:
    """Run the notebooks on a model and write an HTML report."""
    from gptoss_debug.reports.report import make_report

    with _busy("running the notebooks (a minute or so)", as_json):
        made = make_report(
            model or toy_path("A"),
            out,
            notebooks=notebooks,
            tp=tp,
            device=device,
            name=None if model else "toy checkpoint A (shipped with gptoss_debug)",
        )
    if not as_json:
        screen.print(f"report: {made.index.resolve()}", markup=False)
    return made.verdict


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory for the recording; new or empty."
)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option(
    "--expert-parallel", is_flag=True, help="Share out whole experts among the ranks instead of cutting them."
)
@click.option(
    "--backend",
    type=click.Choice(["marlin", "raw", "bf16"]),
    help="How vLLM keeps the experts  [default: marlin for an MXFP4 checkpoint, bf16 for a BF16 one]",
)
@click.option(
    "--layers",
    default="all",
    show_default=True,
    metavar="CHOICE",
    help="Layers whose tensors are kept in full: all, none, or 0,3-5. The others keep digests.",
)
@_command
def record(
    model: Path, out: Path, tp: int, expert_parallel: bool, backend: BackendName | None, layers: str, as_json: bool
) -> Verdict:
    """Load MODEL with vLLM and record every write and every expert tensor before and after the repack."""
    from gptoss_debug.diagnosis.coverage import load_coverage
    from gptoss_debug.recording.ranks import record_load
    from gptoss_debug.recording.recording import find_layers

    checkpoint = Checkpoint.open(model)
    checkpoint.check_values()
    check_parallel(checkpoint.config, tp, expert_parallel)
    chosen = find_layers(layers)
    if chosen and max(chosen) >= checkpoint.config.num_layers:
        raise GptOssDebugError(
            "names a layer that the model has not",
            where=f"--layers {layers}",
            expected=f"0 to {checkpoint.config.num_layers - 1}",
            found=max(chosen),
        )
    with _busy(f"vLLM loads {model} on {tp} rank(s)", as_json):
        recording = record_load(
            model,
            out,
            backend=backend or default_backend(checkpoint.source),
            tp=tp,
            expert_parallel=expert_parallel,
            layers=layers,
        )
    if not as_json:
        screen.print(f"recorded: {recording}\nrecording: {recording.path}", markup=False)
    return load_coverage(recording).verdict


@main.command()
@click.argument("recording", type=click.Path(path_type=Path))
@click.argument("model", type=click.Path(path_type=Path))
@_command
def compare(recording: Path, model: Path, as_json: bool) -> Verdict:
    """Compare the expert tensors in RECORDING with the checkpoint MODEL, bit for bit."""
    from gptoss_debug.diagnosis.compare import compare_recording
    from gptoss_debug.recording.recording import Recording

    opened = Recording.open(recording)
    checkpoint = Checkpoint.open(model)
    checkpoint.check_values()
    return compare_recording(opened, checkpoint, progress=not as_json).verdict


@main.command()
@click.argument("recording", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), required=True, help="The checkpoint that it should hold.")
@click.option("--previous", type=click.Path(path_type=Path), help="The checkpoint that it held before.")
@_command
def diagnose(recording: Path, against: Path, previous: Path | None, as_json: bool) -> Verdict:
    """Name the cause of every expert tensor in RECORDING that is not what the checkpoint says."""
    from gptoss_debug.diagnosis.diagnosis import diagnose_recording
    from gptoss_debug.recording.recording import Recording

    opened = Recording.open(recording)
    checkpoint = Checkpoint.open(against)
    checkpoint.check_values()
    before = Checkpoint.open(previous) if previous else None
    return diagnose_recording(opened, checkpoint, before, progress=not as_json).verdict


@main.command()
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="A fault; again for more  [default: all]")
@click.option("--controls", type=click.IntRange(0), default=5, show_default=True, help="Random models without a fault.")
@_command
def selftest(faults: tuple[str, ...], controls: int, as_json: bool) -> Verdict:
    """Plant faults into real loads and see whether the diagnosis names each, and nothing else."""
    from gptoss_debug.diagnosis import selftest as module

    with _busy("planting faults (a minute or so)", as_json):
        result = module.selftest(faults, controls=controls)
    if not as_json:
        table = Table(box=None, pad_edge=False)
        for column in ("", "load", "kind", "expected", "found"):
            table.add_column(column, overflow="fold")
        for trial in result.trials:
            mark = "[green]ok" if trial.right else "[red]WRONG"
            table.add_row(mark, *map(escape, (trial.name, trial.kind, trial.expected, trial.found)))
        Console(highlight=False).print(table)
    return result.verdict


@main.command("verify-sync")
@click.argument("model_a", type=click.Path(path_type=Path))
@click.argument("model_b", type=click.Path(path_type=Path))
@click.option(
    "--loader",
    "loaders",
    multiple=True,
    type=click.Choice(LOADERS),
    help="Which loader; again for more  [default: fixed]",
)
@click.option(
    "--source",
    type=click.Choice(["mxfp4", "bf16"]),
    help="How the weights are sent: as stored, or dequantised as a trainer has them  [default: as stored]",
)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--expert-parallel", is_flag=True, help="Share out whole experts among the ranks.")
@click.option("--no-text", is_flag=True, help="Compare the weights only; do not start engines to generate.")
@_command
def verify_sync(
    model_a: Path,
    model_b: Path,
    loaders: tuple[Loader, ...],
    source: Format | None,
    tp: int,
    expert_parallel: bool,
    no_text: bool,
    as_json: bool,
) -> Verdict:
    """Load MODEL_B's weights into a vLLM that holds MODEL_A, and compare with a vLLM started from MODEL_B."""
    from gptoss_debug.sync.proof import prove

    stored = Checkpoint.open(model_a).source
    with _busy("asking the oracles (a minute or so for each loader)", as_json):
        proof = prove(
            model_a,
            model_b,
            loaders or ("fixed",),
            source=source or stored,
            tp=tp,
            expert_parallel=expert_parallel,
            prompts=() if no_text else PROMPTS,
        )
    if not as_json:
        table = Table(box=None, pad_edge=False)
        for name in ("oracle", *proof.results):
            table.add_column(name, overflow="fold")
        for oracle, row in proof.to_frame().iterrows():
            table.add_row(str(oracle), *(f"[{'red' if c.startswith('FAULT') else 'green'}]{escape(c)}" for c in row))
        Console(highlight=False).print(table)
    return proof.verdict


@main.command("explain-shapes")
@click.argument("first")
@click.argument("second")
@click.option("--model", required=True, help="A model directory, gpt-oss-20b or gpt-oss-120b.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@_command
def explain_shapes(first: str, second: str, model: str, tp: int, as_json: bool) -> tuple[Verdict, str]:
    """Say what two shapes are and what lies between them: "[32,192,6144]" "[32,2880,2880]"."""
    from gptoss_debug.layouts import shapes

    config = ModelConfig.from_file(Path(model) / "config.json") if Path(model).is_dir() else ModelConfig.named(model)
    check_parallel(config, tp)
    explained = shapes.explain_shapes(shapes.parse_shape(first), shapes.parse_shape(second), config, tp)
    if explained.unknown:
        raise GptOssDebugError(" ".join(explained.unknown))
    lines = str(explained).split("\n")
    finding = {"sentence": " ".join(line.strip() for line in lines[2:]), **explained.to_json()}
    return Verdict("ok", " ".join(lines[:2]), [finding], [], Environment.current().to_json()), str(explained)


@main.command()
@_command
def doctor(as_json: bool) -> Verdict:
    """Say what is installed, what will run here, and what cannot."""
    from gptoss_debug.engines.doctor import examine

    with _busy("looking around; importing vLLM takes a while", as_json):
        checks = examine()
    if not as_json:
        table = Table(box=None, pad_edge=False)
        table.add_column("what")
        table.add_column("")
        table.add_column("detail", overflow="fold")
        for check in checks:
            table.add_row(
                check.what,
                {"ok": "[green]ok", "warn": "[yellow]note", "bad": "[red]no"}[check.state],
                escape(check.detail),
            )
        Console(highlight=False).print(table)
    bad = [check for check in checks if check.state == "bad"]
    notes = [f"{check.what}: {check.detail}" for check in checks if check.state == "warn"]
    environment = Environment.current().to_json()
    if bad:
        return Verdict(
            "error",
            f"The main job will not run: {bad[0].what}: {bad[0].detail}.",
            [c.to_json() for c in bad],
            notes,
            environment,
        )
    return Verdict("ok", "`gptoss-debug report` will run here.", [], notes if as_json else [], environment)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--bf16", is_flag=True, help="Write the BF16 twin: the same values, experts dequantised.")
@click.option("--variant", type=click.Choice(["A", "B"]), default="A", show_default=True, help="B knows other facts.")
@_command
def toy(out: Path, bf16: bool, variant: str, as_json: bool) -> Verdict:
    """Write the toy checkpoint into the directory OUT."""
    write_toy(out, variant, bf16=bf16)  # type: ignore[arg-type]
    return Verdict(
        "ok",
        f"Toy checkpoint {variant} ({'BF16' if bf16 else 'MXFP4'} experts) is in {out.resolve()}.",
        environment=Environment.current().to_json(),
    )


def _busy(message: str, as_json: bool) -> Any:
    """Show a spinner while something runs that cannot tell how far it is."""
    return Console(stderr=True, quiet=as_json).status(escape(message))


if __name__ == "__main__":
    main()
