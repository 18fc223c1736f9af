"""Pictures of dequantisation: which weights a wrong order spoils, why the range is 119, what each way costs."""

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ptxlab import registry
from ptxlab.bench.record import Record, Row
from ptxlab.lowbit import audit, quant, reference
from ptxlab.lowbit.colours import SCHEME_COLOURS
from ptxlab.lowbit.demo.plot import SWEEP
from ptxlab.plot import BLUE, GREY, ORANGE, PALE, RED
from report.style import bare, title

_TITLES = {"qoq": "QoQ", "lqq": "LQQ"}
_GROUP = 32


def wrong_figure(wrong: np.ndarray) -> Figure:
    """Plot which results are wrong, bool [N, K]: the first rows, one square per weight."""
    rows, columns = 24, 96
    figure = Figure(figsize=(11, 3.1), layout="constrained")
    axes = figure.subplots()
    axes.imshow(wrong[:rows, :columns], cmap=ListedColormap([PALE, RED]), interpolation="nearest", aspect="auto")
    axes.set_xticks(np.arange(0, columns + 1, 4) - 0.5, minor=True)
    axes.grid(which="minor", axis="x", color="white", linewidth=1.5)
    axes.set_xticks(range(0, columns, 8))
    axes.set_xlabel("input channel; four neighbours share a register, the leftmost is its lowest byte")
    axes.set_ylabel("output channel")
    title(axes, f"{wrong.mean():.0%} of the weights are wrong (red)", size=12)
    return figure


def range_figure(w: np.ndarray) -> Figure:
    """Plot the effect of the protective range on every scheme.

    At the left is the largest byte that any group dequantises to, at the right the number of overflows of w f32 [N, K].
    """
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for scheme, name in _TITLES.items():
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "color": SCHEME_COLOURS[scheme], "label": name}
        left.plot(SWEEP, [largest_byte(scheme, limit) for limit in SWEEP], **style)
        rows = audit.audit_matrix(w, schemes=(scheme,), ranges=tuple(SWEEP), group=64)
        right.plot(SWEEP, [row.overflows for row in rows], **style)
    left.axhline(127, color=RED, linewidth=1)
    left.annotate("what a byte holds: 127", (SWEEP[0], 127.4), color=RED)
    title(left, "The largest byte that any group comes back as", size=12)
    right.set_yscale("symlog", linthresh=1)
    right.set_ylim(bottom=-0.2)
    title(right, f"Overflowing weights, of {w.size:,}", size=12)
    for axes in (left, right):
        axes.axvline(119, color=GREY, linestyle="--", linewidth=1)
        axes.set_xlabel("protective range of level 1")
        bare(axes)
    left.legend(loc="lower right")
    return figure


def largest_byte(scheme: str, limit: int) -> int:
    """Return the largest integer that any group of integers in ±limit dequantises to.

    A group's constants follow from its smallest and largest element, and a larger element never comes back as less: so
    the pairs of these two are all groups that matter.
    """
    values = np.arange(-limit, limit + 1, dtype=np.int8)
    low, high = np.meshgrid(values, values)
    pairs = np.stack([low, high], axis=-1)[low <= high]
    groups = np.tile(pairs, (1, _GROUP // 2))
    if scheme == "qoq":
        return int(reference.exact_qoq(*quant.qoq_groups(groups, _GROUP)).max())
    q4, scale, minimum = quant.lqq_groups(groups, _GROUP)
    return int(reference.exact_lqq(q4, scale, minimum.view(np.uint8) ^ np.uint8(128)).max())


def cost_figure(record: Record) -> Figure:
    """Plot kernels' weights per clock and SM, from registers, over their ALU instructions per 8 weights."""
    row_by_kernel = {row.kernel: row for row in record.rows if row.measure == "registers"}
    clocks = np.median([row.sm_mhz for row in row_by_kernel.values()]) * 1e6 * record.device["sms"]
    weights_per_clock = 2 * record.ceilings["read_tbps"] * 1e12 / clocks
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    counts = np.geomspace(2.5, 80)
    for lanes, label, horizontal_alignment, vertical_alignment in (
        (64, "all in the ALU", "right", "top"),
        (128, "in all pipes", "left", "bottom"),
    ):
        axes.plot(counts, lanes * 8 / counts, color=GREY, alpha=0.4, zorder=0)
        axes.annotate(label, (40, lanes * 8 / 40), color=GREY, ha=horizontal_alignment, va=vertical_alignment)
    axes.axhline(weights_per_clock, color=ORANGE, linestyle="--", linewidth=1)
    axes.annotate(f"the memory brings {weights_per_clock:.0f}", (2.5, weights_per_clock), color=ORANGE, va="bottom")
    for (count, rate), names in _places(row_by_kernel).items():
        is_wrong = any(registry.specs()[kernel].wrong for kernel in names)
        axes.plot(count, rate, "o", color=RED if is_wrong else BLUE)
        label = ", ".join(kernel.removeprefix("dequant_") for kernel in names) + (
            " (wrong results)" if is_wrong else ""
        )
        is_below_alu_line = rate * count / 8 < 70  # next to the ALU's line
        offset, horizontal_alignment, vertical_alignment = (
            ((-5, -3), "right", "top") if is_below_alu_line else ((5, 2), "left", "bottom")
        )
        axes.annotate(
            label, (count, rate), offset, textcoords="offset points", ha=horizontal_alignment, va=vertical_alignment
        )
    axes.set(xscale="log", yscale="log", xlim=(1.8, 150))
    axes.set(xlabel="ALU instructions per 8 weights", ylabel="weights per clock and SM")
    axes.minorticks_off()
    axes.set_xticks(sorted({row.more["alu_per_8"] for row in row_by_kernel.values()}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks([10, 20, 50, 100, 200])
    axes.yaxis.set_major_formatter("{x:g}")
    bare(axes)
    return figure


def _places(points: dict[str, Row]) -> dict[tuple[float, float], list[str]]:
    """Group kernels by their point (instructions, rate); points too close to tell apart share one label."""
    places: dict[tuple[float, float], list[str]] = {}
    for kernel, row in points.items():
        point = row.more["alu_per_8"], row.rate
        close_points = (place for place in places if place[0] == point[0] and abs(place[1] / point[1] - 1) < 0.04)
        places.setdefault(next(close_points, point), []).append(kernel)
    return places
