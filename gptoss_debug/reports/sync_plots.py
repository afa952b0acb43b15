"""The figures of notebook 04: what the oracles found, drawn."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from gptoss_debug.checkpoints.names import layer_of
from gptoss_debug.reports.plots import GREY, ORANGE, PURPLE, SKY, VERMILION
from gptoss_debug.sync.oracles import WARM
from gptoss_debug.sync.proof import Proof

_RIGHT = "#EAF3FA"
# Class of the fault -> letter, colour, words.
_CLASSES = {
    "E2": ("s", VERMILION, "keeps A's values"),
    "C1": ("p", ORANGE, "padding not zero"),
    "B1": ("b", PURPLE, "bias not in the kernel's order"),
    "B2": ("x", SKY, "another layout"),
    "F3": ("d", "#009E73", "derived tensor is wrong"),
    "E1": ("?", GREY, "neither A nor B"),
}


def plot_sync_faults(proof: Proof, *, ax: Axes | None = None) -> Axes:
    """Draw which tensors are not those of a cold B after A -> B: a block for each loader, a column for each layer."""
    results = {
        loader: next(result for result in found if result.oracle == WARM) for loader, found in proof.results.items()
    }
    kinds: list[str] = []
    cells: dict[tuple[str, str, int], str] = {}
    raised = [
        loader for loader, result in results.items() if result.findings and not any(f.tensors for f in result.findings)
    ]
    for loader in results:
        for result in proof.results[loader]:
            if result.oracle != WARM:
                continue
            for finding in result.findings:
                for path in finding.tensors:
                    kind, layer = _kind(path), layer_of(path)
                    kinds.append(kind)
                    cells[loader, kind, -1 if layer is None else layer] = finding.class_id
    rows = sorted(set(kinds) | {"expert weights", "expert scales", "expert biases", "attention sinks"}, key=_order)
    columns = sorted({layer for _, _, layer in cells} | {0})
    width = len(columns) + 1
    grid = np.full((len(rows), width * len(results) - 1), np.nan)
    if ax is None:
        _, ax = plt.subplots(figsize=(2.6 + 0.42 * grid.shape[1], 1.0 + 0.34 * len(rows)))
    order = list(_CLASSES)
    for number, loader in enumerate(results):
        block = slice(number * width, number * width + len(columns))
        grid[:, block] = -2 if loader in raised else -1
        for y, kind in enumerate(rows):
            for x, layer in enumerate(columns, start=number * width):
                if (class_id := cells.get((loader, kind, layer))) is not None:
                    grid[y, x] = order.index(class_id) if class_id in order else order.index("E1")
                    ax.text(x, y, _CLASSES.get(class_id, _CLASSES["E1"])[0], ha="center", va="center", fontsize=8)
        if loader in raised:
            ax.text(block.start + (len(columns) - 1) / 2, (len(rows) - 1) / 2, "raises", ha="center", rotation=90)
    colours = ["#DDDDDD", _RIGHT, *(colour for _, colour, _ in _CLASSES.values())]
    edges = np.arange(-2.5, len(order) + 0.5)
    ax.imshow(grid, cmap=ListedColormap(colours), norm=BoundaryNorm(edges, len(colours)), aspect="auto")
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    ticks = [number * width + x for number in range(len(results)) for x in range(len(columns))]
    ax.set_xticks(ticks, ["out" if layer < 0 else str(layer) for layer in columns] * len(results), fontsize=8)
    for number, loader in enumerate(results):
        ax.text(number * width + (len(columns) - 1) / 2, -0.75, loader, ha="center", fontsize=9)
    ax.set_xlabel("layer, for each loader" + (' ("out": outside the layers)' if -1 in columns else ""))
    present = [class_id for class_id in order if class_id in {c if c in order else "E1" for c in cells.values()}]
    handles = [Patch(facecolor=_RIGHT, edgecolor="#888888", label="same bits as cold B")]
    handles += [Patch(color=_CLASSES[c][1], label=f"{_CLASSES[c][2]} ({_CLASSES[c][0]}, class {c})") for c in present]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    ax.set_frame_on(False)
    ax.tick_params(length=0)
    ax.set_title("After A\u2192B: which tensors are not those of a cold start from B", loc="left", fontsize=10, pad=24)
    return ax


_KINDS = (
    (".sinks", "attention sinks"),
    ("_bias", "expert biases"),
    ("_weight_scale", "expert scales"),
    ("w13_weight", "expert weights"),
    ("w2_weight", "expert weights"),
)


def _kind(path: str) -> str:
    if ".quant_method." in path or ".impl." in path:
        return "tensors of kernels, unregistered"
    if path.endswith(".packed"):
        return "packed weights (CPU)"
    return next((kind for end, kind in _KINDS if path.endswith(end)), "other tensors")


def _order(kind: str) -> int:
    names = ["expert weights", "expert scales", "expert biases", "attention sinks", "tensors of kernels, unregistered"]
    return names.index(kind) if kind in names else len(names)
