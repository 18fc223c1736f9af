"""The demo in one picture."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ptxlab.lowbit import audit, quant, reference
from ptxlab.lowbit.colours import SCHEME_COLOURS
from ptxlab.lowbit.demo import DemoRow
from ptxlab.plot import BLUE, GREY, PALE, RED

SWEEP = range(112, 128)  # protective ranges of the overflow curve


def demo_figure(rows: Sequence[DemoRow], matrices: dict[str, np.ndarray], weights_name: str) -> Figure:
    """Draw the demo in one picture: what unpacking costs, why the range is 119, what a wrong order destroys."""
    name, w = max(matrices.items(), key=lambda named: named[1].size)
    figure = Figure(figsize=(16, 5.4), layout="constrained")
    figure.suptitle(
        f"4-bit weights to 8 bits, every way: {weights_name}", fontsize=12, x=0.01, ha="left", weight="bold"
    )
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1.2))
    _instruction_bars(left, rows)
    _overflow_curve(middle, w, name)
    _wrong_tile(right, w, name)
    return figure


def _instruction_bars(axes: Axes, rows: Sequence[DemoRow]) -> None:
    counted_rows = [row for row in rows if row.alu_per_8 is not None]
    names = [row.kernel.removeprefix("dequant_") for row in counted_rows]
    values = [float(row.alu_per_8 or 0) for row in counted_rows]
    bars = axes.barh(names, values, color=[RED if row.wrong else BLUE for row in counted_rows])
    axes.bar_label(
        bars,
        [f"{v:g}" + (" (wrong results)" if row.wrong else "") for v, row in zip(values, counted_rows, strict=True)],
        padding=3,
    )
    axes.invert_yaxis()
    axes.set_xlim(0, max(values, default=1) * 1.3)
    axes.set_xlabel("ALU instructions per 8 weights (SASS, sm_90a)")
    axes.set_title("What unpacking costs, by kernel", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def _overflow_curve(axes: Axes, w: np.ndarray, name: str) -> None:
    for scheme in ("qoq", "lqq"):
        audit_rows = audit.audit_matrix(w, schemes=(scheme,), ranges=tuple(SWEEP), group=64)
        counts = [row.overflows for row in audit_rows]
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
    is_wrong = reference.dequant_qoq_presub(q4, scale, zero) != reference.exact_qoq(q4, scale, zero)
    axes.imshow(is_wrong, cmap=ListedColormap([PALE, RED]), interpolation="nearest", aspect="auto")
    axes.set_xticks(range(0, columns + 1, 8))
    axes.set_xlabel("input channel; four neighbours share a 32-bit word")
    axes.set_ylabel("output channel")
    axes.set_title(f"Subtracting first: {is_wrong.mean():.0%} of a tile wrong (red)", loc="left", weight="bold")
