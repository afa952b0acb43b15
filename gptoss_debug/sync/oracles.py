"""The oracles: what must be true of a loader that changes a running engine's weights, asked of one rank.

The measure of all of them is a cold start: after A -> B the model must hold, bit for bit, what a fresh
engine holds that loaded B.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from gptoss_debug.checkpoints.names import PARTS, Part, layer_of
from gptoss_debug.checkpoints.reader import Checkpoint
from gptoss_debug.engines import vllm_adapter
from gptoss_debug.engines.ranks import placement_in
from gptoss_debug.engines.vllm_adapter import Load, config_of, joined_rank
from gptoss_debug.files import write_text
from gptoss_debug.layouts import catalog, mxfp4
from gptoss_debug.layouts.catalog import BackendName, Placement
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.sync.loaders import Loader, load_into, tensors_of
from gptoss_debug.sync.results import Finding, OracleResult
from gptoss_debug.sync.state import ModelState, model_state
from gptoss_debug.sync.streams import STREAMS, Stream, Tensors

SENTINEL = 0xA5
"""A byte that no right tensor is full of; as bfloat16 it is a finite number."""


WARM, BACK, TWICE = "warm A->B equals cold B", "A->B->A equals cold A", "B twice equals cold B"
ADDRESSES, PADDING, WRITTEN = "addresses unchanged", "padding is zero", "every region written"


class Trial:
    """Asks one rank's models all questions about one loader.

    Parameters
    ----------
    load
        Loads a model directory cold.
    a, b
        What the engine starts with, and what it is given.
    sent_a, sent_b
        The tensors of A and B as the trainer sends them.
    loader, rank
        Which loader, on which rank.
    """

    def __init__(
        self, load: Load, a: Path, b: Path, sent_a: Tensors, sent_b: Tensors, loader: Loader, rank: int
    ) -> None:
        self._load, self._a, self._loader, self._rank = load, a, loader, rank
        self._sent = {"A": sent_a, "B": sent_b}
        self._sizes = Checkpoint.open(b).config
        cold = load(b)
        self._cold_b, self._held_b = model_state(cold), _expert_values(cold)
        self._model = load(a)
        self._cold_a = self._before = model_state(self._model)

    def run(self) -> list[OracleResult]:
        """Ask every oracle; after each that left the model other than A, a fresh one is loaded."""
        results = [*self._warm(), self._sentinel()]
        return results + [self._stream(stream) for stream in STREAMS]

    def _fresh(self) -> None:
        """Have a model that holds A, at addresses that are remembered."""
        try:
            now = model_state(self._model)
            clean = not now.differing(self._cold_a) and not now.moved(self._before)
        except Exception:  # a reload that failed leaves tensors without storage
            clean = False
        if not clean:
            del self._model
            self._model = self._load(self._a)
            self._before = model_state(self._model)

    def _give(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Exception | None:
        """Give the model weights by the loader, and return what it raised."""
        # Loaders may write to what they are given (vLLM zeroes a bias), and the next oracle needs it whole.
        copies = ((name, tensor.clone()) for name, tensor in weights)
        try:
            load_into(self._loader, self._model, config_of(self._model), copies)
        except Exception as error:
            return error
        return None

    def _warm(self) -> list[OracleResult]:
        self._fresh()
        refused = self._give(self._sent["B"])
        if refused is not None:
            return [self._raised(name, refused) for name in (WARM, BACK, TWICE, ADDRESSES, PADDING)]
        warm = model_state(self._model)
        results = [
            self._equal(WARM, warm, self._cold_b, self._cold_a),
            self._result(ADDRESSES, self._moved(ADDRESSES, warm), "same addresses"),
            self._result(PADDING, self._dirty(PADDING), "all zero"),
        ]
        for name, weights, cold, stale in (
            (TWICE, self._sent["B"], self._cold_b, self._cold_a),
            (BACK, self._sent["A"], self._cold_a, self._cold_b),
        ):
            refused = self._give(weights)
            if refused is not None:
                results.append(self._raised(name, refused))
            else:
                results.append(self._equal(name, model_state(self._model), cold, stale))
        return results

    def _sentinel(self) -> OracleResult:
        """Fill everything with a sentinel: what is not B afterwards was not written."""
        self._fresh()
        for parameter in self._model.parameters():
            parameter.data.view(torch.uint8).fill_(SENTINEL)
        refused = self._give(self._sent["B"])
        if refused is not None:
            return self._raised(WRITTEN, refused)
        differing = self._not_b(model_state(self._model))
        kept = [path for path in differing if self._full_of_sentinels(path)]
        findings = self._findings(
            WRITTEN,
            {
                ("E1", "was never written"): kept,
                ("E1", "does not hold B after it was filled with a sentinel"): [p for p in differing if p not in kept],
            },
        )
        return self._result(WRITTEN, findings, "all written")

    def _stream(self, stream: Stream) -> OracleResult:
        self._fresh()
        refused = self._give(stream.send(self._sent["B"]))
        name = (
            f"{stream.name}: " + {"loaded": "loads B", "refused": "is refused", "either": "is B or A"}[stream.expected]
        )
        try:
            now = model_state(self._model)
        except Exception as error:
            what = f"raises {_kind(refused)}, and leaves a model that cannot be used ({type(error).__name__})"
            return self._result(name, self._findings(name, {("E3", what): []}, always=True), "")
        left_a, is_b = not now.differing(self._cold_a), not self._not_b(now)
        if refused is None:
            if stream.expected != "refused" and is_b:
                return self._result(name, (), "loads B")
            what = "reports success" + (" and keeps A" if left_a else "" if is_b else ", and holds neither A nor B")
            return self._result(
                name, self._findings(name, {(stream.class_id, what): self._not_b(now)}, always=True), ""
            )
        if stream.expected == "loaded" or not left_a or now.moved(self._before):
            what = f"raises {_kind(refused)}" + ("" if left_a else ", and holds neither A nor B")
            findings = self._findings(name, {("E3", what): now.differing(self._cold_a)}, always=True)
            return self._result(name, findings, "")
        after = self._give(self._sent["B"])
        if after is not None or self._not_b(model_state(self._model)):
            what = f"refuses it, and cannot load B afterwards ({_kind(after)})"
            return self._result(name, self._findings(name, {("E3", what): []}, always=True), "")
        return self._result(name, (), "raises, keeps A, then loads B")

    def _equal(self, oracle: str, now: ModelState, wanted: ModelState, stale: ModelState) -> OracleResult:
        groups: dict[tuple[str, str], list[str]] = {}
        for path in now.differing(wanted):
            if wanted is self._cold_b and self._same_value(path):
                continue
            groups.setdefault(self._cause(path, now, stale), []).append(path)
        return self._result(oracle, self._findings(oracle, groups), "same bits")

    def _cause(self, path: str, now: ModelState, stale: ModelState) -> tuple[str, str]:
        """Name what is wrong with a tensor that should be another: class and words."""
        if path in stale.digests and now.digests.get(path) == stale.digests[path]:
            return "E2", "keeps its old values"
        part = _part(path)
        if part is None:
            derived = path not in dict(self._model.named_parameters())
            return (
                ("F3", "is no parameter, and does not hold what a cold start derives")
                if derived
                else ("E1", "holds neither A nor B")
            )
        chain, live = self._chain(part), self._model.get_parameter(path).data
        if chain is None or live.shape != self._cold_shape(path):
            return "B2", "has another layout than the kernel reads"
        if chain.unwind(live).dirty:
            return "C1", "has something else than zeros in its padding"
        if part.endswith("_bias"):
            return "B1", "is not in the kernel's order"
        return "B2", "is not in the kernel's layout"

    def _cold_shape(self, path: str) -> torch.Size:
        layer, part = layer_of(path), _part(path)
        assert layer is not None
        assert part is not None
        return self._held_b[layer, part].shape

    def _not_b(self, now: ModelState) -> list[str]:
        return [path for path in now.differing(self._cold_b) if not self._same_value(path)]

    def _same_value(self, path: str) -> bool:
        """Whether an MXFP4 tensor spells the values of cold B in other bytes, which a float source may."""
        part, layer = _part(path), layer_of(path)
        if part is None or layer is None or part.endswith("_bias"):
            return False
        weight = part.removesuffix("_scale")
        if (
            any(name.endswith("_blocks") for name, _ in self._sent["B"])
            or (layer, f"{weight}_scale") not in self._held_b
        ):
            return False
        prefix = path.rpartition(".")[0]
        pairs = []
        for key in (weight, f"{weight}_scale"):
            live = getattr(self._model.get_submodule(prefix), key, None)
            chain = self._chain(key)  # type: ignore[arg-type]
            if live is None or chain is None or live.shape != self._held_b[layer, key].shape:  # type: ignore[index]
                return False
            pairs.append((chain.unwind(live.data), chain.unwind(self._held_b[layer, key])))  # type: ignore[index]
        if any(now.dirty for now, _ in pairs):
            return False
        values = [
            mxfp4.decode(codes.values, scales.values).view(torch.int32) for codes, scales in zip(*pairs, strict=True)
        ]
        return torch.equal(*values)

    def _chain(self, part: Part) -> Chain | None:
        experts = vllm_adapter.expert_layers(self._model)[0].module
        backend = vllm_adapter.chosen_backend(experts)
        if backend not in catalog.BACKENDS:
            return None
        kind = catalog.backend(backend)
        placement = vllm_adapter.placement_of(self._model)
        local = Placement() if placement.expert_parallel else placement
        return catalog.chain_for(part, "mxfp4" if kind.quantised else "bf16", kind, self._sizes, local)

    def _dirty(self, oracle: str) -> tuple[Finding, ...]:
        found = []
        for layer in vllm_adapter.expert_layers(self._model):
            for part, tensor in layer.tensors().items():
                chain = self._chain(part)
                fits = tensor.shape == self._held_b[layer.layer, part].shape
                if chain is not None and fits and chain.unwind(tensor).dirty:
                    found.append(f"{layer.name}.{part}")
        return self._findings(oracle, {("C1", "has something else than zeros in its padding"): found})

    def _moved(self, oracle: str, now: ModelState) -> tuple[Finding, ...]:
        return self._findings(oracle, {("F1", "is at another address"): now.moved(self._before)})

    def _full_of_sentinels(self, path: str) -> bool:
        parameters = dict(self._model.named_parameters())
        return path in parameters and bool((parameters[path].data.view(torch.uint8) == SENTINEL).all())

    def _findings(
        self, oracle: str, groups: dict[tuple[str, str], list[str]], always: bool = False
    ) -> tuple[Finding, ...]:
        return tuple(
            Finding(oracle, class_id, what, tuple(paths), self._rank)
            for (class_id, what), paths in groups.items()
            if paths or always
        )

    def _raised(self, oracle: str, error: Exception) -> OracleResult:
        return self._result(oracle, self._findings(oracle, {("A2", f"raises {_kind(error)}"): []}, always=True), "")

    def _result(self, oracle: str, findings: tuple[Finding, ...], good: str) -> OracleResult:
        if not findings:
            return OracleResult(oracle, "pass", good, ())
        tensors = len({path for finding in findings for path in finding.tensors})
        says = findings[0].what if not tensors or len(findings) == 1 else f"{tensors} tensors are wrong"
        if tensors and len(findings) == 1:
            says = f"{tensors} tensor{'' if tensors == 1 else 's'}: {findings[0].what}"
        return OracleResult(oracle, "fault", says, findings)


def _kind(error: Exception | None) -> str:
    if error is None:
        return "nothing"
    text = str(error).splitlines()
    return type(error).__name__ + (f" ({text[0][:90]})" if text and text[0] else "")


def _part(path: str) -> Part | None:
    """Return the expert tensor that a path names, if it names one."""
    last = path.rpartition(".")[2]
    return next((part for part in PARTS if part == last), None) if ".experts." in path else None


def _expert_values(model: nn.Module) -> dict[tuple[int, Part], torch.Tensor]:
    return {
        (layer.layer, part): tensor.clone()
        for layer in vllm_adapter.expert_layers(model)
        for part, tensor in layer.tensors().items()
    }


def ask(
    model_a: Path,
    model_b: Path,
    sent_a: Path,
    sent_b: Path,
    loaders: Iterable[Loader],
    backend: BackendName,
    placement: Placement,
    address: str | None = None,
) -> dict[Loader, list[OracleResult]]:
    """Ask every oracle about each loader, on this process's rank.

    Parameters
    ----------
    model_a, model_b
        Model directories that the engine can start from.
    sent_a, sent_b
        Directories with the same weights as the trainer sends them.
    loaders, backend, placement, address
        As for :func:`joined_rank`.
    """
    with joined_rank(model_a, backend=backend, placement=placement, address=address) as load:
        weights = [list(tensors_of(path)) for path in (sent_a, sent_b)]
        # vLLM collects garbage twice in each load; what is here by now it need not look through.
        gc.freeze()
        try:
            return {
                loader: Trial(load, model_a, model_b, weights[0], weights[1], loader, placement.rank).run()
                for loader in loaders
            }
        finally:
            gc.unfreeze()


def main(task: str) -> None:
    """Be one rank of :func:`gptoss_debug.sync.proof.prove`, and write the results."""
    options = json.loads(task)
    results = ask(
        Path(options["model"]),
        Path(options["model_b"]),
        Path(options["sent_a"]),
        Path(options["sent_b"]),
        options["loaders"],
        options["backend"],
        placement_in(options),
        options["address"],
    )
    out = Path(options["out"]) / f"rank{options['rank']}.json"
    write_text(out, json.dumps({loader: [asdict(result) for result in found] for loader, found in results.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
