"""Regions: boxes of a tensor that were written, and what of the tensor they cover.

Coverage is counted by region, never by element count: two writes of one half are not one write of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import torch

Box = tuple[tuple[int, int], ...]
"""A half-open range for each axis."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def box_of(view: torch.Tensor, base: torch.Tensor) -> Box | None:
    """Return the box of ``base`` that ``view`` shows, or None if it is no box of it.

    Parameters
    ----------
    view
        A tensor on the storage of ``base``: slices, selected experts, or a reshape of whole axes.
    base
        A contiguous tensor.
    """
    if not base.is_contiguous() or view.numel() == 0:
        return None
    offset = int(view.storage_offset() - base.storage_offset())
    if not 0 <= offset < base.numel():
        return None
    if offset == 0 and view.numel() == base.numel():
        return whole(base.shape)
    strides = [prod(base.shape[axis + 1 :]) for axis in range(base.dim())]
    starts = []
    for stride in strides:
        start, offset = divmod(offset, stride)
        starts.append(start)
    extents = [1] * base.dim()
    # A view keeps the order of the axes, so its axes are matched from the right; an axis that was
    # flattened into its neighbour is split again.
    axis = base.dim() - 1
    for size, stride in reversed([(n, s) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1]):
        while axis >= 0 and (strides[axis] < stride or base.shape[axis] == 1):
            axis -= 1
        left = size
        while axis >= 0 and left > 1 and strides[axis] * left >= stride:
            if extents[axis] != 1:
                return None
            take = min(left, base.shape[axis])
            if left % take or (take < left and take != base.shape[axis]):
                return None
            extents[axis] = take
            left //= take
            axis -= 1
        if left > 1:
            return None
    if any(start + extent > size for start, extent, size in zip(starts, extents, base.shape, strict=True)):
        return None
    box = tuple((start, start + extent) for start, extent in zip(starts, extents, strict=True))
    return box if elements(box) == view.numel() and _same_elements(view, base, box) else None


def _same_elements(view: torch.Tensor, base: torch.Tensor, box: Box) -> bool:
    """Check the last element too: with equal counts and both corners right, a strided view is the box."""
    last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    corner = base.storage_offset() + sum(
        (stop - 1) * stride for (_, stop), stride in zip(box, base.stride(), strict=True)
    )
    return last == corner


def elements(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(stop - start for start, stop in box)


@dataclass(frozen=True)
class Coverage:
    """How often each region of a tensor was written.

    Attributes
    ----------
    shape
        The tensor's.
    elements, never, once, more
        Elements in all, and those written never, once, and more often.
    missing, repeated
        Boxes never written, and boxes written more than once.
    """

    shape: tuple[int, ...]
    elements: int
    never: int
    once: int
    more: int
    missing: tuple[Box, ...]
    repeated: tuple[Box, ...]


def coverage(shape: Sequence[int], boxes: Sequence[Box], within: Box | None = None) -> Coverage:
    """Count the writes of every region of a tensor.

    Parameters
    ----------
    shape
        The tensor's.
    boxes
        One for each write.
    within
        Look at this box only (the tensor without its padding, say).
    """
    limit = within if within is not None else whole(shape)
    # The grid of all box edges: within a cell every element was written equally often.
    edges = [
        sorted({start, stop, *(min(max(edge, start), stop) for box in boxes for edge in box[axis])})
        for axis, (start, stop) in enumerate(limit)
    ]
    counts = np.zeros([len(axis) - 1 for axis in edges], dtype=np.int64)
    for box in boxes:
        cells = tuple(
            slice(np.searchsorted(axis, max(low, axis[0])), np.searchsorted(axis, min(high, axis[-1])))
            for axis, (low, high) in zip(edges, box, strict=True)
        )
        counts[cells] += 1
    volumes = np.ones_like(counts)
    for axis, points in enumerate(edges):
        sizes = np.array([b - a for a, b in pairwise(points)]).reshape(
            [-1 if i == axis else 1 for i in range(len(edges))]
        )
        volumes = volumes * sizes
    never, once, more = (int(volumes[mask].sum()) for mask in (counts == 0, counts == 1, counts > 1))
    return Coverage(
        tuple(shape),
        never + once + more,
        never,
        once,
        more,
        _boxes(counts == 0, edges),
        _boxes(counts > 1, edges),
    )


def _boxes(cells: np.ndarray, edges: list[list[int]]) -> tuple[Box, ...]:
    """Return the cells as boxes, neighbours along the last axes joined."""
    boxes = [tuple((edges[a][i], edges[a][i + 1]) for a, i in enumerate(cell)) for cell in np.argwhere(cells)]
    for axis in range(len(edges)):
        joined: list[Box] = []
        for box in sorted(boxes, key=lambda b: (b[:axis], b[axis + 1 :], b[axis])):
            last = joined[-1] if joined else None
            if (
                last
                and last[:axis] == box[:axis]
                and last[axis + 1 :] == box[axis + 1 :]
                and last[axis][1] == box[axis][0]
            ):
                joined[-1] = (*last[:axis], (last[axis][0], box[axis][1]), *last[axis + 1 :])
            else:
                joined.append(box)
        boxes = joined
    return tuple(sorted(boxes))


def show_box(box: Box, shape: Sequence[int]) -> str:
    """Write a box as an index: ``[0:8, 384:512, :]``."""
    return (
        "["
        + ", ".join(
            ":" if (start, stop) == (0, size) else str(start) if stop == start + 1 else f"{start}:{stop}"
            for (start, stop), size in zip(box, shape, strict=True)
        )
        + "]"
    )
