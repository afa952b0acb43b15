"""The fixed loader: stage, convert, verify, commit. A running engine gets new weights, wholly or not at all."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from gptoss_debug.checkpoints.config import ModelConfig
from gptoss_debug.engines import vllm_reload
from gptoss_debug.engines.vllm_reload import ordinary_tensors
from gptoss_debug.errors import GptOssDebugError, SyncError
from gptoss_debug.sync.conversion import Converter, Replacement, Way
from gptoss_debug.sync.stage import Expect, Stage


@dataclass(frozen=True)
class SyncReport:
    """What an update did on one rank.

    Attributes
    ----------
    generation
        The number of the weights that are live now; 0 is what the engine started with.
    tensors
        Checkpoint tensors that arrived.
    parameters, derived
        Tensors of the engine that were written: registered ones, and those that vLLM derives from them.
    bytes
        Their size.
    way
        How experts were converted: by ``chains``, or by the ``engine``'s own processing.
    seconds
        From the beginning of the update to the end of the commit.
    commit_seconds
        Of the commit alone; in atomic mode this is how long the engine must stand still.
    """

    generation: int
    tensors: int
    parameters: int
    derived: int
    bytes: int
    way: Way
    seconds: float
    commit_seconds: float

    def to_frame(self) -> pd.DataFrame:
        """Return one row."""
        return pd.DataFrame([asdict(self)])

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"generation {self.generation}: {self.tensors} checkpoint tensors into {self.parameters} parameters and "
            f"{self.derived} derived tensors ({self.bytes / 1e6:.1f} MB) in {self.seconds:.2f} s, "
            f"{self.commit_seconds:.3f} s of it to commit"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"


class WeightSync:
    """Replaces the weights of one rank's GPT-OSS model in a running vLLM.

    Tensors come under their Hugging Face names, in any order and in pieces. As soon as a layer is whole it
    is converted, beside the engine; :meth:`commit` copies it into the engine's own storage, so captured
    graphs and kernels go on reading where they did. Whatever is wrong or missing raises, drops the update,
    and leaves the old weights in place.

    Parameters
    ----------
    model
        The engine's model on this rank.
    config
        Its ``VllmConfig``.
    way
        How experts are converted; None takes the faster, see :class:`gptoss_debug.sync.conversion.Converter`.
    guard
        Called with a reason when the engine must not generate (an update in place has begun), and with
        None when it may again. Without one, updates in place are refused.

    Examples
    --------
    >>> sync = WeightSync(model, config)              # doctest: +SKIP
    >>> for name, tensor in trainer.state_dict().items():
    ...     sync.put(name, tensor)
    >>> sync.commit()
    """

    def __init__(
        self,
        model: nn.Module,
        config: Any,
        *,
        way: Way | None = None,
        guard: Callable[[str | None], None] | None = None,
    ) -> None:
        vllm_reload.check_reloadable(config)
        self._model, self._config, self._way, self._guard = model, config, way, guard
        where = str(config.model_config.model)
        self._sizes = ModelConfig.from_dict(config.model_config.hf_config.to_dict(), where=where)
        self._update: _Update | None = None
        self._device = next(parameter.device for parameter in model.parameters())
        self._generation = 0
        self._mixed = False
        self._dropped: str | None = None

    @property
    def generation(self) -> int:
        """Return the number of updates that were committed.

        Raises
        ------
        SyncError
            If the engine holds parts of two generations.
        """
        if self._mixed:
            raise SyncError(MIXED, hint=RESYNC)
        return self._generation

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and is neither committed nor dropped."""
        return self._update is not None

    @property
    def is_complete(self) -> bool:
        """Whether an update is open of which nothing is missing any more."""
        return self._update is not None and self._update.stage.is_complete

    def begin(self, expect: Expect = "all", *, atomic: bool = True) -> None:
        """Begin an update; :meth:`put` does it by itself with these defaults.

        Parameters
        ----------
        expect
            The names that will come: ``"all"``, or the names of a partial update.
        atomic
            True keeps the converted weights aside until all are verified. False writes each layer as soon
            as it is whole, in one layer's memory, and has the engine refuse to generate until the end; if
            such an update fails, it refuses until another one succeeds.

        Raises
        ------
        SyncError
            If an update is open, ``expect`` cannot be met, or ``atomic`` is false without a guard.
        EngineError, LayoutError
            If the engine is one whose weights cannot be replaced here.
        """
        if self._update is not None:
            raise SyncError(
                f"an update is open already ({self._update.stage.arrived} tensors have arrived)",
                hint="Commit or abort it first; two trainers cannot send at once.",
            )
        if self._mixed and expect != "all":
            raise SyncError(MIXED, hint=RESYNC)
        began = time.perf_counter()
        self._dropped = None
        if not atomic and self._guard is None:
            raise SyncError(
                "an update in place needs an engine that can refuse to generate",
                hint="Use atomic=True, or sync through SyncWorker.",
            )
        with ordinary_tensors():
            converter = Converter(self._model, self._config, self._sizes, self._way)
        self._update = _Update(Stage(self._sizes, expect, self._device), converter, atomic, began)

    def put(self, name: str, tensor: torch.Tensor, at: tuple[int, ...] | None = None) -> None:
        """Take a tensor, or with ``at`` a piece of it; see :meth:`Stage.put`.

        Raises
        ------
        SyncError
            If it is not what the update can use. The update is dropped.
        """
        if self._dropped is not None:
            raise SyncError(f"the update was dropped ({self._dropped})", hint="Begin a new one, or abort this one.")
        if self._update is None:
            self.begin()
        update = self._update
        assert update is not None
        with self._dropping(), ordinary_tensors():
            update.stage.put(name, tensor, at)
            group = update.stage.complete_group(name)
            if group is not False:
                replacements = update.converter.convert(group, update.stage.take(group), update.stage.source or "bf16")
                replacements = update.add(replacements)
                if not update.atomic:
                    self._refuse()
                    _write(replacements)
                    update.converter.release(group)
            self._wait()

    def verify(self) -> None:
        """Check that all of the update has arrived, and reaches all of the engine's parameters that it should.

        Nothing is written yet in atomic mode.

        Raises
        ------
        SyncError
            Naming what is missing. The update is dropped.
        """
        with self._dropping():
            if self._update is None:
                raise SyncError(
                    "there is no update to commit: nothing arrived",
                    expected="all tensors of the model",
                    hint="Send tensors with put() first.",
                )
            self._update.stage.check_complete()
            if self._update.stage.whole_model:
                named = [name for name, _ in self._model.named_parameters()]
                left = [name for name in named if name not in self._update.paths]
                if left:
                    raise SyncError(
                        f"vLLM's loader made nothing of the update for {len(left)} parameters",
                        where=left[0],
                        expected=f"{len(named)} parameters",
                        found=len(named) - len(left),
                    )

    def commit(self) -> SyncReport:
        """Verify, make the update live, and return what was done.

        Raises
        ------
        SyncError
            Naming what is missing. The update is dropped.
        """
        self.verify()
        update = self._update
        assert update is not None
        began = time.perf_counter()
        # An error of the device from here on leaves some tensors new and some old, and must not be served.
        self._mixed = True
        try:
            _write(update.waiting)
            self._wait()
        except BaseException as error:
            if self._guard is not None:
                self._guard(MIXED)
            self._drop(error)
            raise
        now = time.perf_counter()
        self._generation += 1
        self._mixed = False
        if self._guard is not None:
            self._guard(None)
        self.abort()
        return SyncReport(
            self._generation,
            update.stage.arrived,
            update.parameters,
            update.derived,
            update.bytes,
            update.converter.way,
            round(now - update.began, 6),
            round(now - began, 6),
        )

    def abort(self) -> None:
        """Drop the update that is open, if one is, and let its memory go; weights written in place stay refused."""
        update, self._update, self._dropped = self._update, None, None
        if update is not None:
            update.waiting.clear()
            update.converter.close()

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], expect: Expect = "all") -> SyncReport:
        """Do a whole atomic update: begin, put each tensor, commit.

        Raises
        ------
        SyncError
            As the three do. Whatever else the iterator raises passes through; the update is dropped then, too.
        """
        self.begin(expect)
        try:
            for name, tensor in weights:
                self.put(name, tensor)
            return self.commit()
        finally:
            self.abort()

    def _drop(self, error: BaseException) -> None:
        """Drop the update because of an error; what still comes of it is refused until a new one begins."""
        if self._update is not None:
            self.abort()
            self._dropped = (str(error).splitlines() or [type(error).__name__])[0][:200]

    def _wait(self) -> None:
        """Wait for a GPU: tensors come from, and go to, streams that this one knows nothing of."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _refuse(self) -> None:
        if not self._mixed:
            self._mixed = True
            assert self._guard is not None
            self._guard(MIXED)

    def _dropping(self) -> _Dropping:
        return _Dropping(self)


class _Dropping:
    """Drops the update when the block raises."""

    def __init__(self, sync: WeightSync) -> None:
        self._sync = sync

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._sync._drop(error)
            if isinstance(error, GptOssDebugError) and not isinstance(error, SyncError):
                raise SyncError(str(error)) from error


class _Update:
    """An update under way."""

    def __init__(self, stage: Stage, converter: Converter, atomic: bool, began: float) -> None:
        self.stage, self.converter, self.atomic, self.began = stage, converter, atomic, began
        self.waiting: list[Replacement] = []
        self.paths: set[str] = set()
        self.parameters = self.derived = self.bytes = 0
        self._targets: dict[tuple[int, int, tuple[int, ...]], Replacement] = {}

    def add(self, replacements: list[Replacement]) -> list[Replacement]:
        """Take replacements in, and return them without those whose storage is written already.

        Raises
        ------
        SyncError
            If two of them would write different values to one storage.
        """
        fresh = []
        for one in replacements:
            self.paths.add(one.path)
            live = one.live
            key = (live.untyped_storage().data_ptr(), int(live.storage_offset()), tuple(live.shape))
            known = self._targets.get(key) if live.numel() else None
            if known is not None:
                if not torch.equal(known.new if self.atomic else known.live, one.new):
                    raise SyncError(
                        "shares its memory with another tensor, and the update has other values for it",
                        where=one.path,
                        expected=f"the values of {known.path}",
                    )
                continue
            self._targets[key] = one if self.atomic else replace(one, new=one.live)
            fresh.append(one)
        self.parameters += sum(r.registered for r in fresh)
        self.derived += sum(not r.registered for r in fresh)
        self.bytes += sum(r.new.numel() * r.new.element_size() for r in fresh)
        if self.atomic:
            self.waiting += fresh
        return fresh


def _write(replacements: list[Replacement]) -> None:
    # Inside inference mode tensors of both kinds can be written in place, and the engine's may be of either.
    with torch.inference_mode():
        for replacement in replacements:
            replacement.commit()


MIXED = "the engine holds parts of two generations of weights"
RESYNC = "Send a whole update; the engine refuses to generate until one succeeds."
