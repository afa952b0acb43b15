"""Environment variables that are set for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def core_share(processes: int) -> str:
    """Return the cores for each of so many processes, at least one, as ``OMP_NUM_THREADS`` takes it.

    Two OpenMP teams on the same cores spin against each other.
    """
    return str(max(1, (os.cpu_count() or 1) // processes))


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set environment variables for the length of the block, then put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
