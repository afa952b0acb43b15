"""The proof: every oracle on every rank, and the texts that real engines generate, for loaders side by side."""

from __future__ import annotations

import html
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gptoss_debug.checkpoints.names import Format, layer_of
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.checkpoints.toy import PROMPTS
from gptoss_debug.checkpoints.writer import write_bf16_twin
from gptoss_debug.engines.environment import QUIET, Environment
from gptoss_debug.engines.ranks import run_ranks
from gptoss_debug.engines.serving import close_engine, complete, open_engine
from gptoss_debug.errors import CheckpointError, SyncError
from gptoss_debug.layouts.catalog import BackendName, Placement, check_parallel, default_backend
from gptoss_debug.sync.loaders import Loader, load_into_engine
from gptoss_debug.sync.results import Finding, OracleResult
from gptoss_debug.verdict import Verdict, join, numbered

TEXT = "text equals cold B's"

NOT_CHECKED = (
    "CUDA graphs and torch.compile: the engines here run eagerly",
    "data and pipeline parallelism, LoRA",
)


@dataclass(frozen=True)
class Texts:
    """What real engines wrote.

    Attributes
    ----------
    prompts
        The prompts.
    before, cold
        Completions by an engine that holds A, and by one that was started with B.
    after
        Completions after A -> B by one loader.
    error
        What the loader or the engine raised, if it did.
    """

    prompts: tuple[str, ...]
    before: tuple[str, ...]
    cold: tuple[str, ...]
    after: tuple[str, ...]
    error: str

    def result(self) -> OracleResult:
        """Return the oracle's word on it."""
        if self.error:
            finding = Finding(TEXT, "A2", f"raises {self.error}", (), 0)
            return OracleResult(TEXT, "fault", finding.what, (finding,))
        wrong = [i for i, (new, cold) in enumerate(zip(self.after, self.cold, strict=True)) if new != cold]
        if not wrong:
            return OracleResult(TEXT, "pass", "same text", ())
        finding = Finding(TEXT, "E1", f"{len(wrong)} of {len(self.cold)} texts differ", (), 0)
        return OracleResult(TEXT, "fault", finding.what, (finding,))


@dataclass(frozen=True)
class Proof:
    """What the oracles say of each loader.

    Attributes
    ----------
    results
        Loader -> results of all ranks.
    texts
        Loader -> texts.
    source, backend, tp
        How the weights were sent, how the engine keeps them, on how many ranks.
    environment
        Who computed it.
    """

    results: dict[Loader, tuple[OracleResult, ...]]
    texts: dict[Loader, Texts]
    source: Format
    backend: BackendName
    tp: int
    environment: dict[str, str]

    def to_frame(self) -> pd.DataFrame:
        """Return the table: a row for each oracle, a column for each loader, what it says in the cell."""
        columns = {}
        for loader, results in self.results.items():
            says: dict[str, str] = {}
            for result in sorted(results, key=lambda r: r.outcome == "pass"):
                says.setdefault(result.oracle, f"{'ok' if result.outcome == 'pass' else 'FAULT'}: {result.says}")
            columns[loader] = {oracle: says[oracle] for oracle in dict.fromkeys(r.oracle for r in results)}
        return pd.DataFrame(columns).rename_axis("oracle")

    def faults(self, loader: Loader) -> list[dict[str, Any]]:
        """Return a loader's findings, those of the same oracle and class on several ranks as one."""
        found: dict[tuple[str, str, str], dict[str, Any]] = {}
        for result in self.results[loader]:
            for finding in result.findings:
                key = (finding.oracle, finding.class_id, finding.what)
                entry = found.setdefault(key, {"loader": loader, **asdict(finding), "tensors": [], "ranks": []})
                entry["tensors"] = list(dict.fromkeys([*entry["tensors"], *finding.tensors]))
                entry["ranks"].append(finding.rank)
                entry.pop("rank", None)
        for entry in found.values():
            entry["sentence"] = _sentence(entry, self.tp)
        return list(found.values())

    def passed(self, loader: Loader) -> bool:
        """Whether a loader passed every oracle."""
        return all(result.outcome == "pass" for result in self.results[loader])

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on all loaders that were asked about."""
        loaders = list(self.results)
        wrong = [loader for loader in loaders if not self.passed(loader)]
        count = len({result.oracle for results in self.results.values() for result in results})
        setting = f"{self.source} weights into a running {self.backend} engine, {self.tp} rank(s)"
        if not count:
            return Verdict("error", "No oracle was asked.", environment=self.environment)
        if not wrong:
            headline = f"{join(list(loaders))}: right in all {count} oracles ({setting})."
        else:
            headline = "; ".join(f"{loader}: {self._summary(loader, count)}" for loader in loaders) + f" ({setting})."
        findings = [fault for loader in wrong for fault in self.faults(loader)]
        return Verdict("fault" if wrong else "ok", headline, findings, list(NOT_CHECKED), self.environment)

    def _summary(self, loader: Loader, count: int) -> str:
        failed = {result.oracle for result in self.results[loader] if result.outcome == "fault"}
        classes = sorted({f.class_id for result in self.results[loader] for f in result.findings})
        return (
            f"wrong in {len(failed)} of {count} oracles ({', '.join(classes)})" if failed else f"right in all {count}"
        )

    def __str__(self) -> str:
        return str(self.verdict)

    def _repr_html_(self) -> str:
        """Return the table, faults in another colour and word."""
        frame = self.to_frame()
        head = "".join(f"<th>{html.escape(str(name))}</th>" for name in ["oracle", *frame.columns])
        rows = ""
        for oracle, row in frame.iterrows():
            cells = "".join(_cell(str(says)) for says in row)
            rows += f"<tr><td>{html.escape(str(oracle))}</td>{cells}</tr>"
        return f"<table><tr>{head}</tr>{rows}</table>"


def prove(
    model_a: Path,
    model_b: Path,
    loaders: Sequence[Loader] = ("fixed",),
    *,
    source: Format = "mxfp4",
    backend: BackendName | None = None,
    tp: int = 1,
    expert_parallel: bool = False,
    prompts: Iterable[str] = PROMPTS,
    max_tokens: int = 32,
) -> Proof:
    """Ask all oracles about loaders that take a running engine from A to B.

    Parameters
    ----------
    model_a, model_b
        Two model directories of the same sizes and format, with different weights.
    loaders
        Which loaders.
    source
        How the weights are sent: ``mxfp4`` as they are stored, ``bf16`` as a trainer has them.
    backend, tp, expert_parallel
        How vLLM keeps the experts, and on how many ranks.
    prompts, max_tokens
        For the text oracle; without prompts it is not asked, and no engine is started.

    Raises
    ------
    CheckpointError, LayoutError
        If the models do not belong together, or cannot be cut so.
    EngineError
        If vLLM cannot start.
    """
    checkpoints = [Checkpoint.open(path) for path in (model_a, model_b)]
    _check_pair(*checkpoints)
    first = checkpoints[0]
    if source == "mxfp4" and first.source == "bf16":
        raise SyncError("holds no MXFP4 experts to send", where=model_a, hint="Send bf16: --source bf16.")
    check_parallel(first.config, tp, expert_parallel)
    backend = backend or default_backend(first.source)
    with tempfile.TemporaryDirectory(prefix="gptoss-proof-") as scratch:
        sent = [model_a, model_b]
        if source == "bf16" and first.source == "mxfp4":
            sent = [Path(scratch) / name for name in ("sent_a", "sent_b")]
            for checkpoint, path in zip(checkpoints, sent, strict=True):
                write_bf16_twin(checkpoint, path)
        run_ranks(
            "gptoss_debug.sync.oracles",
            {
                "model": str(model_a),
                "model_b": str(model_b),
                "sent_a": str(sent[0]),
                "sent_b": str(sent[1]),
                "loaders": list(loaders),
                "backend": backend,
                "out": scratch,
            },
            Placement(0, tp, expert_parallel),
            doing="the oracles could not be asked",
        )
        results: dict[Loader, list[OracleResult]] = {loader: [] for loader in loaders}
        for rank in range(tp):
            found = json.loads((Path(scratch) / f"rank{rank}.json").read_text(encoding="utf-8"))
            for loader in loaders:
                results[loader] += [OracleResult.from_json(result) for result in found[loader]]
        texts: dict[Loader, Texts] = {}
        asked = tuple(prompts)
        if asked:
            options = {"enable_expert_parallel": expert_parallel, "enable_prefix_caching": True}
            texts = _texts(model_a, model_b, sent[1], loaders, asked, max_tokens, backend, tp, options)
            for loader in loaders:
                results[loader].append(texts[loader].result())
    return Proof(
        {loader: tuple(found) for loader, found in results.items()},
        texts,
        source,
        backend,
        tp,
        Environment.current(backend).to_json(),
    )


def _cell(says: str) -> str:
    colour = "#0072B2" if says.startswith("ok") else "#D55E00"
    return f"<td style='color:{colour}'>{html.escape(says)}</td>"


def _check_pair(a: Checkpoint, b: Checkpoint) -> None:
    for name, value in vars(a.config).items():
        if getattr(b.config, name) != value:
            raise CheckpointError(
                f"is another model than {a.path}: {name} differs",
                where=b.path,
                expected=value,
                found=getattr(b.config, name),
            )
    if a.source != b.source:
        raise CheckpointError(f"has other experts than {a.path}", where=b.path, expected=a.source, found=b.source)
    for checkpoint in (a, b):
        checkpoint.check_values()
    if all(a.read(name).equal(b.read(name)) for name in a.files):
        raise CheckpointError(
            f"holds the same weights as {a.path}",
            where=b.path,
            expected="other weights",
            hint="Loading the same weights again proves nothing: what was not written looks right.",
        )


def _texts(
    model_a: Path,
    model_b: Path,
    sent: Path,
    loaders: Sequence[Loader],
    prompts: tuple[str, ...],
    max_tokens: int,
    backend: BackendName,
    tp: int,
    options: dict[str, Any],
) -> dict[Loader, Texts]:
    os.environ.update(
        {**QUIET, "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    )  # vLLM reads them when it is imported, and its workers later
    engine = open_engine(model_b, backend=backend, tp=tp, **options)
    try:
        tokenizer = engine.get_tokenizer()
        cold = _complete(engine, tokenizer, prompts, max_tokens)
    finally:
        close_engine(engine)
    found: dict[Loader, Texts] = {}
    for loader in loaders:
        engine = open_engine(model_a, backend=backend, tp=tp, **options)
        try:
            before = _complete(engine, tokenizer, prompts, max_tokens)
            after, error = before, ""
            try:
                load_into_engine(loader, engine, sent)
                after = _complete(engine, tokenizer, prompts, max_tokens)
            except Exception as raised:
                error = f"{type(raised).__name__} ({(str(raised).splitlines() or [''])[0][:120]})"
            found[loader] = Texts(prompts, before, cold, after, error)
        finally:
            close_engine(engine)
    return found


def _complete(engine: Any, tokenizer: Any, prompts: tuple[str, ...], max_tokens: int) -> tuple[str, ...]:
    return tuple(tokenizer.decode(ids) for ids in complete(engine, prompts, max_tokens))


def _sentence(entry: dict[str, Any], ranks: int) -> str:
    """Say a fault in one sentence."""
    paths: list[str] = entry["tensors"]
    where = ""
    if paths:
        layers = [layer for path in paths if (layer := layer_of(path)) is not None]
        names = list(dict.fromkeys(path.split(f".layers.{layer_of(path)}.")[-1] for path in paths))
        where = (numbered("layer", layers) + ", " if layers else "") + join(names) + ": "
    if ranks > 1:
        where = numbered("rank", entry["ranks"]) + ", " + where
    return f"[{entry['class_id']}] {entry['loader']}, {entry['oracle']}: {where}{entry['what']}."
