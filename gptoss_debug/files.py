"""Writing that is never seen half-done: a temporary name beside the target, then a rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gptoss_debug.errors import GptOssDebugError


def partial_directory(target: Path, *, within: Path | None = None) -> Path:
    """Make a temporary directory for what becomes ``target``, beside it or within another directory.

    Raises
    ------
    GptOssDebugError
        If it cannot be made.
    """
    place = within or target.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=place))
        temporary.chmod(0o755)
    except OSError as error:
        raise GptOssDebugError(f"cannot be written ({error.strerror})", where=target) from None
    return temporary


@contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary directory that becomes ``path`` when the block ends well, and vanishes when not.

    Parameters
    ----------
    path
        The final name. An empty directory of that name is taken over.
    replace
        Whether a directory with something in it may be replaced.

    Raises
    ------
    GptOssDebugError
        If ``path`` is a file, the current directory, cannot be written, or holds something and ``replace``
        is false.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise GptOssDebugError("is a file, not a directory", where=path, hint="Name another output.")
    if path == Path.cwd():
        raise GptOssDebugError("is the current directory", where=path, hint="Name one inside it, or beside it.")
    if not replace and path.is_dir() and any(path.iterdir()):
        raise GptOssDebugError(
            "holds files already", where=path, hint="Name another output directory, or empty this one."
        )
    temporary = partial_directory(path)
    try:
        yield temporary
        if replace and path.exists():
            shutil.rmtree(path)
        temporary.rename(path)  # an empty directory of that name gives way
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
