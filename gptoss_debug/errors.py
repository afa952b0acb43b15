"""The exceptions of the package: one base class, one subclass for each kind of bad input."""

from __future__ import annotations


class GptOssDebugError(Exception):
    """Something the user can act on; ``str(error)`` is one readable line.

    Parameters
    ----------
    what
        What is wrong.
    where
        The file, tensor or option it was found in.
    expected, found
        The two sides of the contradiction, where there is one.
    hint
        What to do next.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(what)

    def to_json(self) -> dict[str, str | None]:
        """Return what the error is made of, as text; the same arguments make it again."""
        pieces = {"what": self.what, "where": self.where, "expected": self.expected, "found": self.found}
        return {name: None if piece is None else str(piece) for name, piece in pieces.items()} | {"hint": self.hint}

    def __str__(self) -> str:
        text = self.what if self.where is None else f"{self.where}: {self.what}"
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.found is not None:
            text += f"; found {self.found}"
        if self.hint:
            text += f". {self.hint}"
        return text


class CheckpointError(GptOssDebugError):
    """A checkpoint cannot be read, or is not the GPT-OSS checkpoint it should be."""


class LayoutError(GptOssDebugError):
    """A tensor does not fit the layout step that was to be applied to it."""


class EngineError(GptOssDebugError):
    """An engine is missing, does not start, or is not the one that was asked for."""


class RecordingError(GptOssDebugError):
    """A recording is missing, incomplete, damaged, or of another model."""


class SyncError(GptOssDebugError):
    """A weight update is incomplete, wrong, or came at a wrong time; the engine keeps its old weights."""
