"""Functions that are wrapped where an engine looks them up, and put back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hooks:
    """Wrappers in place of functions; :meth:`undo` takes all of them away, the last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have ``around(original, *args, **kwargs)`` called in place of ``owner.name(*args, **kwargs)``."""
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(lambda: setattr(owner, name, original))

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
