"""Figures. Every function gives a Matplotlib `Figure`; `save` writes it, `figure` in a notebook shows itself."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ptxlab import quant, reference
from ptxlab.errors import ArgumentError
from ptxlab.io.files import write_whole
from ptxlab.weights import audit

if TYPE_CHECKING:
    from ptxlab.demo import Row
    from ptxlab.kernels.holders import Holders, WarpAccess
    from ptxlab.weights.audit import AuditRow

BLUE, ORANGE, RED, GREY, PALE = "#2f6db5", "#e08214", "#c2242b", "#8a8f98", "#dfe5ec"
SCHEME_COLOURS = {"qoq": ORANGE, "lqq": BLUE, "lqq_ceiling": "#74add1", "lqq_search": "#1b3a5f"}
_PLATE: dict[str, Any] = {"boxstyle": "square,pad=0.15", "color": "#ffffffe0", "linewidth": 0}  # under a label
SWEEP = range(112, 128)  # protective ranges of the overflow curve


def format_of(path: Path) -> str:
    """The format that a picture's file name asks for; ArgumentError for none of .png, .svg and .pdf."""
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in ("png", "svg", "pdf"):
        raise ArgumentError("picture", "a file name that ends in .png, .svg or .pdf", path)
    return suffix


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the path's suffix says (`format_of`), whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=format_of(path), dpi=150, bbox_inches="tight", facecolor="white")
    write_whole(path, lambda file: file.write(buffer.getvalue()))


def demo_figure(rows: Sequence["Row"], matrices: dict[str, np.ndarray], what: str) -> Figure:
    """The demo in one picture: what unpacking costs, why the range is 119, what a wrong order destroys."""
    name, w = max(matrices.items(), key=lambda item: item[1].size)
    figure = Figure(figsize=(16, 5.4), layout="constrained")
    figure.suptitle(f"4-bit weights to 8 bits, every way: {what}", fontsize=12, x=0.01, ha="left", weight="bold")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1.2))
    _instruction_bars(left, rows)
    _overflow_curve(middle, w, name)
    _wrong_tile(right, w, name)
    return figure


def audit_figure(rows: Sequence["AuditRow"], title: str) -> Figure:
    """Overflowing weights (above) and relative error (below) per tensor, scheme and protective range."""
    if not rows:
        raise ArgumentError("picture", "at least one tensor that could be audited", "none")
    tensors = list(dict.fromkeys(r.tensor for r in rows))
    figure = Figure(figsize=(max(7, 0.28 * len(tensors) + 3), 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    names = {"qoq": "QoQ", "lqq": "LQQ", "lqq_ceiling": "LQQ ceiling", "lqq_search": "LQQ search"}
    for scheme, limit in dict.fromkeys((r.scheme, r.protective_range) for r in rows):
        chosen = {r.tensor: r for r in rows if (r.scheme, r.protective_range) == (scheme, limit)}
        marker = {119: "o", 120: "s", 127: "^"}.get(limit, "d")
        style = {
            "marker": marker,
            "linestyle": "none",
            "markersize": 5,
            "color": SCHEME_COLOURS.get(scheme, GREY),
            "alpha": 0.8,
        }
        label = f"{names.get(scheme, scheme)} at ±{limit}"
        places = [place for place, tensor in enumerate(tensors) if tensor in chosen]
        above.plot(places, [chosen[tensors[place]].overflows for place in places], label=label, **style)
        below.plot(places, [_or_nan(chosen[tensors[place]].relative_error) for place in places], **style)
    above.set_yscale("symlog", linthresh=1)
    above.set_ylabel("overflowing weights")
    above.legend(ncols=3, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.02))
    figure.suptitle(f"{title}: overflow and error by protective range", x=0.01, ha="left", weight="bold")
    below.set_ylabel("relative error")
    below.set_xticks(range(len(tensors)), tensors, rotation=90, fontsize=7)
    return figure


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _instruction_bars(axes: Axes, rows: Sequence["Row"]) -> None:
    counted = [r for r in rows if r.alu_per_8 is not None]
    names = [r.kernel.removeprefix("dequant_") for r in counted]
    values = [float(r.alu_per_8 or 0) for r in counted]
    bars = axes.barh(names, values, color=[RED if r.wrong else BLUE for r in counted])
    axes.bar_label(
        bars,
        [f"{v:g}" + (" (wrong results)" if r.wrong else "") for v, r in zip(values, counted, strict=True)],
        padding=3,
    )
    axes.invert_yaxis()
    axes.set_xlim(0, max(values, default=1) * 1.3)
    axes.set_xlabel("ALU instructions per 8 weights (SASS, sm_90a)")
    axes.set_title("What unpacking costs, by kernel", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _overflow_curve(axes: Axes, w: np.ndarray, name: str) -> None:
    for scheme in ("qoq", "lqq"):
        found = audit.audit_matrix(w, schemes=(scheme,), ranges=tuple(SWEEP), group=64)
        counts = [row.overflows for row in found]
        axes.plot(
            SWEEP,
            counts,
            color=SCHEME_COLOURS[scheme],
            marker="o",
            markersize=4,
            label={"qoq": "QoQ", "lqq": "LQQ"}[scheme],
        )
    axes.axvline(119, color=GREY, linestyle="--", linewidth=1)
    axes.annotate("up to 119:\nsafe for any\nweights", (118.7, 3), ha="right", fontsize=10, color=GREY)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=-0.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("protective range of the INT8 level")
    axes.set_ylabel(f"overflowing weights of {w.size:,}")
    axes.set_title("Why the range is 119, not 127", loc="left", weight="bold")
    axes.legend(loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def _wrong_tile(axes: Axes, w: np.ndarray, name: str) -> None:
    rows, columns = 32, 64
    q = quant.quantize_qoq(w, group=64)
    q4, scale, zero = q.q4[:rows, :columns], q.group_scale[:rows, :1], q.zero[:rows, :1]
    wrong = reference.dequant_qoq_presub(q4, scale, zero) != reference.exact_qoq(q4, scale, zero)
    axes.imshow(wrong, cmap=ListedColormap([PALE, RED]), interpolation="nearest", aspect="auto")
    axes.set_xticks(range(0, columns + 1, 8))
    axes.set_xlabel("input channel; four neighbours share a 32-bit word")
    axes.set_ylabel("output channel")
    axes.set_title(f"Subtracting first: {wrong.mean():.0%} of a tile wrong (red)", loc="left", weight="bold")


def load_figure(held: Sequence["Holders"], accesses: Sequence["WarpAccess"]) -> Figure:
    """Who holds what: warp 0's rows of the tile by lane (one panel per kernel), and the banks that its loads meet.

    Args:
        held: the kernels to compare, the one in question first.
        accesses: the first kernel's loads from shared memory, warp 0.
    """
    figure = Figure(figsize=(15, 6.4 * len(held)), layout="constrained")
    panels: dict[str, Axes] = figure.subplot_mosaic([[one.name, "banks"] for one in held], width_ratios=(1.35, 1))
    for one in held:
        _lane_tile(panels[one.name], one)
    _bank_grid(panels["banks"], held[0].name, accesses)
    return figure


def _lane_tile(axes: Axes, held: "Holders") -> None:
    rows, columns = 16, 64
    lanes = held.thread[:rows, :columns] % 32
    axes.imshow(lanes, cmap="twilight", vmin=0, vmax=32, interpolation="nearest", aspect="auto")
    for row in range(rows):
        for column in range(0, columns, 4):
            label = f"{held.thread[row, column]}.a{held.register[row, column]}"
            wrong = held.wrong[row, column : column + 4].any()
            style: dict[str, Any] = {"color": "white", "weight": "bold"} if wrong else {"color": "black"}
            box = {**_PLATE, "color": RED} if wrong else _PLATE
            axes.text(column + 1.5, row, label, ha="center", va="center", fontsize=6.5, bbox=box, **style)
    share = held.wrong.mean()
    verdict = f"{share:.0%} not where the MMA wants it (red)" if share else "what the MMA wants"
    axes.set_title(f"{held.name}: {verdict}", loc="left", weight="bold", fontsize=11)
    axes.set_xticks(range(0, columns, 8))
    axes.set_xlabel("input channel; label: thread and register whose bytes 0-3 are these four channels; colour: lane")
    axes.set_ylabel("output channel")


def _bank_grid(axes: Axes, name: str, accesses: Sequence["WarpAccess"]) -> None:
    """One line per wavefront: which lanes' words each of the 32 banks delivers."""
    fronts = [(access, front) for access in accesses for front in access.fronts]
    grid = np.full((len(fronts), 32), np.nan)
    for line, (_, front) in enumerate(fronts):
        for bank, lanes in front.items():
            grid[line, bank] = lanes[0]
            axes.text(bank, line, str(lanes[0]), ha="center", va="center", fontsize=6, bbox=_PLATE)
    axes.imshow(grid, cmap="twilight", vmin=0, vmax=32, interpolation="nearest", aspect="auto")
    least = sum(access.least for access in accesses)
    axes.set_title(f"{name}: {len(fronts)} wavefronts, {least} at best", loc="left", weight="bold", fontsize=11)
    axes.set_xlabel("bank; label: lane")
    axes.set_ylabel("wavefront")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
