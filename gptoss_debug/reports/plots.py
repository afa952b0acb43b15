"""The figures of the notebooks. Each draws on the given axes, or new ones, and returns them.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which readers with colour-blindness
can tell apart; a colour that means something comes with a marker, letter or line style, for grey printing.
"""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch

from gptoss_debug.checkpoints.names import PARTS, layer_of
from gptoss_debug.diagnosis.comparison import Comparison
from gptoss_debug.diagnosis.coverage import LoadCoverage
from gptoss_debug.layouts import marlin, mxfp4
from gptoss_debug.layouts.chain import Chain
from gptoss_debug.recording.ledger import Ledger

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#BBBBBB",
)


def plot_load_timeline(ledger: Ledger, *, ax: Axes | None = None) -> Axes:
    """Draw every recorded write at its time and layer, by kind of tensor and size.

    Parameters
    ----------
    ledger
        Of one load; the marker's area grows with the number of values written.
    """
    ax = _axes(ax, (9.0, 3.6))
    rows = [row for row in ledger.rows if row.load == 1]
    outside = max((layer_of(row.parameter) or 0 for row in rows), default=0) + 1
    kinds = (
        ("expert weights", BLUE, "s", lambda r: r.parameter.endswith(("w13_weight", "w2_weight"))),
        ("expert scales", SKY, "D", lambda r: r.parameter.endswith("_scale")),
        ("expert biases", ORANGE, "^", lambda r: r.parameter.endswith(("w13_bias", "w2_bias"))),
        ("other tensors", GREY, "o", lambda r: True),
    )
    left = list(rows)
    for label, colour, marker, chosen in kinds:
        here = [row for row in left if chosen(row)]
        left = [row for row in left if not chosen(row)]
        ax.scatter(
            [row.seconds * 1e3 for row in here],
            [_level(row.parameter, outside) for row in here],
            s=[12 + 4 * np.log2(1 + np.prod(row.shape)) for row in here],
            c=colour,
            marker=marker,
            alpha=0.8,
            linewidths=0.4,
            edgecolors="black",
            label=label,
        )
    bypassed = [row for row in rows if not row.loader]
    if bypassed:
        ax.scatter(
            [row.seconds * 1e3 for row in bypassed],
            [_level(row.parameter, outside) for row in bypassed],
            s=170,
            facecolors="none",
            edgecolors=VERMILION,
            linewidths=1.6,
            label="past every weight loader",
        )
    ax.set_xlabel("time since load_weights began [ms]")
    ax.set_ylabel("layer")
    ax.set_yticks([*range(outside), outside], [*map(str, range(outside)), "outside"])
    ax.margins(x=0.03, y=0.1)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    ax.set_title("When each tensor was written", loc="left", fontsize=10)
    return ax


def _level(parameter: str, outside: int) -> int:
    layer = layer_of(parameter)
    return outside if layer is None else layer


_COVERAGE = {
    "once": ("1", "written exactly once", BLUE),
    "incomplete": ("<1", "in part", ORANGE),
    "twice": (">1", "more than once", PURPLE),
    "never": ("0", "never", VERMILION),
    "unknown": ("?", "region unknown", GREY),
}


def plot_coverage(coverage: LoadCoverage, rank: int = 0, *, ax: Axes | None = None) -> Axes:
    """Draw a map of parameters and layers: how often each was written on one rank.

    Parameters
    ----------
    coverage
        Of a load. A cell says how often the whole parameter was written; a dot marks a write that went
        past every weight loader.
    rank
        Which rank.
    """
    here = [p for p in coverage.parameters if p.rank == rank and p.layer >= 0]
    names = sorted({_short(p.parameter) for p in here})
    layers = sorted({p.layer for p in here})
    ax = _axes(ax, (1.6 + 0.45 * max(len(layers), 6), 0.6 + 0.27 * len(names)))
    order = list(_COVERAGE)
    grid = np.full((len(names), len(layers)), np.nan)
    for parameter in here:
        y, x = names.index(_short(parameter.parameter)), layers.index(parameter.layer)
        grid[y, x] = order.index(parameter.status)
        text = _COVERAGE[parameter.status][0] + (" ●" if parameter.bypass else "")
        if len(layers) <= 24:
            ax.text(x, y, text, ha="center", va="center", color="white", fontsize=7)
    _draw_states(ax, grid, [_COVERAGE[status][2] for status in order])
    ax.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_xlabel("layer")
    present = [status for status in order if (grid == order.index(status)).any()]
    handles = [Patch(color=_COVERAGE[s][2], label=f"{_COVERAGE[s][0]}: {_COVERAGE[s][1]}") for s in present]
    if any(parameter.bypass for parameter in here):
        handles.append(Patch(color="none", label="●: past every weight loader"))
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    ax.set_title(f"How often each parameter was written, rank {rank}", loc="left", fontsize=10)
    return ax


def _short(parameter: str) -> str:
    name = parameter.split(".layers.")[-1].partition(".")[2]
    return name.replace("routed_experts.", "")


_COMPARED = {
    "exact": ("", BLUE),
    "rounded": ("r", SKY),
    "differs": ("x", VERMILION),
    "padding not zero": ("p", ORANGE),
    "not compared": ("?", GREY),
}
"""Status -> letter in the cell, colour."""

_MOST_LETTERS = 1500


def plot_comparison(comparison: Comparison, *, ax: Axes | None = None) -> Axes:
    """Draw a map of all expert tensors against the checkpoint: a row for each layer and rank, a block for each part."""
    results = comparison.results
    rows = sorted({(r.rank, r.layer) for r in results})
    parts = [part for part in PARTS if any(r.part == part for r in results)]
    experts = max((r.expert for r in results), default=0) + 1
    ax = _axes(ax, (1.6 + 0.16 * len(parts) * max(experts, 8), 0.9 + 0.22 * len(rows)))
    order = list(_COMPARED)
    gap = max(1, experts // 8)
    grid = np.full((len(rows), len(parts) * (experts + gap) - gap), np.nan)
    bad = sum(result.status != "exact" for result in results)
    for result in results:
        y = rows.index((result.rank, result.layer))
        x = parts.index(result.part) * (experts + gap) + result.expert
        grid[y, x] = order.index(result.status)
        if bad <= _MOST_LETTERS:
            ax.text(x, y, _COMPARED[result.status][0], ha="center", va="center", color="black", fontsize=7)
    _draw_states(ax, grid, [colour for _, colour in _COMPARED.values()])
    ax.set_xticks(
        [index * (experts + gap) + (experts - 1) / 2 for index in range(len(parts))],
        [str(p) for p in parts],
        fontsize=8,
    )
    ranks = len({rank for rank, _ in rows})
    ax.set_yticks(range(len(rows)), [f"rank {r}, layer {n}" if ranks > 1 else str(n) for r, n in rows], fontsize=8)
    ax.set_ylabel("" if ranks > 1 else "layer")
    ax.set_xlabel(f"expert tensor; {experts} experts each, left to right")
    present = [status for status in order if (grid == order.index(status)).any()]
    handles = [
        Patch(color=_COMPARED[s][1], label=s + (f" ({_COMPARED[s][0]})" if _COMPARED[s][0] else "")) for s in present
    ]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    ax.set_title("Engine against checkpoint", loc="left", fontsize=10)
    return ax


def plot_repack(tensor: torch.Tensor, *, axes: Any = None) -> Any:
    """Draw where Marlin's repack puts the codes of one 64 x 16 tile, coloured by where they came from.

    Parameters
    ----------
    tensor
        Codes before the repack, ``[E, N, K/2]`` uint8; its first tile is sent through the chain to
        check that the picture is of this layout.
    axes
        Four axes, or None for new ones. Left to right: output row n and input column k, before and after.
    """
    if axes is None:
        _, axes = plt.subplots(1, 4, figsize=(11, 4.2), gridspec_kw={"width_ratios": [1, 1.6, 1, 1.6]})
    rows, columns = torch.meshgrid(torch.arange(64), torch.arange(16), indexing="ij")
    chain = Chain(marlin.WEIGHT)
    tile = tensor[:1, :64, :8].contiguous()
    # A byte can only carry 16 values a code, so the tile's index goes through in three digits.
    digits = [(torch.arange(1024) >> shift & 0xF).view(1, 64, 16).to(torch.uint8) for shift in (0, 4, 8)]
    moved = torch.zeros(1024, dtype=torch.int64)
    for position, digit in enumerate(digits):
        moved += _codes(chain.forward(mxfp4.pack_codes(digit))).long() << (4 * position)
    assert torch.equal(_codes(chain.forward(tile)), mxfp4.unpack_codes(tile).flatten()[moved])
    panels = (
        (rows, "before: [n, k]", "output row n", "input column k", "output row n (0-63)"),
        (
            rows.flatten()[moved].view(32, 32),
            "after: 32 codes a line",
            "line of 32 codes",
            "code in the line",
            "output row n (0-63)",
        ),
        (columns, "before: [n, k]", "output row n", "input column k", "input column k (0-15)"),
        (
            columns.flatten()[moved].view(32, 32),
            "after: 32 codes a line",
            "line of 32 codes",
            "code in the line",
            "input column k (0-15)",
        ),
    )
    for ax, (values, title, y, x, colour) in zip(axes, panels, strict=True):
        image = ax.imshow(values.numpy(), cmap="viridis", aspect="auto", interpolation="nearest")
        ax.set_title(title, fontsize=9, loc="left")
        ax.set_xlabel(x, fontsize=8)
        ax.set_ylabel(y, fontsize=8)
        ax.tick_params(labelsize=7)
        bar = ax.figure.colorbar(image, ax=ax, orientation="horizontal", pad=0.17, fraction=0.05)
        bar.set_label(colour, fontsize=8)
        bar.ax.tick_params(labelsize=7)
    axes[0].figure.subplots_adjust(wspace=0.42)
    return axes


def _codes(words: torch.Tensor) -> torch.Tensor:
    return mxfp4.unpack_codes(words.view(torch.uint8)).flatten()


def plot_bias_permutation(before: torch.Tensor, after: torch.Tensor, *, axes: Any = None) -> Any:
    """Draw how Marlin permutes each run of 32 bias values, and the values of one expert before and after.

    Parameters
    ----------
    before, after
        One expert's bias, ``[N]``, before and after the repack.
    axes
        Two axes, or None for new ones.
    """
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(11, 3.6), gridspec_kw={"width_ratios": [1.25, 1]})
    order = Chain(marlin.BIAS).forward(torch.arange(32).view(1, 32))[0]
    left, right = axes
    for target, source in enumerate(order.tolist()):
        fixed = target == source
        left.plot(
            [source, target],
            [1, 0],
            color=VERMILION if fixed else BLUE,
            lw=2.2 if fixed else 0.9,
            ls="-" if fixed else "--",
            alpha=0.95,
            zorder=3 if fixed else 2,
        )
    for y, label in ((1, "checkpoint"), (0, "Marlin")):
        left.scatter(range(32), [y] * 32, s=12, color="black", zorder=4)
        left.text(-1.2, y, label, ha="right", va="center", fontsize=8)
    left.set_xlim(-7, 32)
    left.set_yticks([])
    left.set_xticks(range(0, 32, 4))
    left.set_xlabel("position in a run of 32")
    left.set_title("8 positions stay (solid), 24 move (dashed)", fontsize=9, loc="left")
    for spine in ("left", "right", "top"):
        left.spines[spine].set_visible(False)
    shown = min(64, before.numel())
    right.step(range(shown), before[:shown].float(), where="mid", color=GREY, lw=2.6, label="before the repack")
    right.step(range(shown), after[:shown].float(), where="mid", color=BLUE, lw=1.1, label="after")
    right.set_xlabel("position in the bias")
    right.set_ylabel("bias value")
    right.set_title("The same values, 3 of 4 in another place", fontsize=9, loc="left")
    right.legend(frameon=False, fontsize=8)
    return axes


def _draw_states(ax: Axes, grid: np.ndarray, colours: list[str]) -> None:
    ax.imshow(
        np.ma.masked_invalid(grid),
        cmap=ListedColormap(colours),
        norm=BoundaryNorm(np.arange(-0.5, len(colours)), len(colours)),
        aspect="auto",
        interpolation="nearest",
    )
    ax.set_xticks(np.arange(-0.5, grid.shape[1]), minor=True)
    ax.set_yticks(np.arange(-0.5, grid.shape[0]), minor=True)
    ax.grid(which="minor", color="white", linewidth=0.8)
    ax.tick_params(which="both", length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    return plt.subplots(figsize=size)[1] if ax is None else ax
