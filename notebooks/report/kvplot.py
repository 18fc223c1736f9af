"""The figure of decode attention: how many times as fast as the best kernel with a cache of 16, 8 and 4 bits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ptxlab.bench.record import Row
from ptxlab.bench.shapes import BATCHES, HEADS, LENGTHS
from ptxlab.plot import BLUE, ORANGE, PALE, RED
from report.kvpoints import BITS, batched_and_single, heads, over_bits
from report.ladder import mean
from report.ladderplot import title

_STYLES: dict[int, dict[str, Any]] = {
    16: {"color": ORANGE, "marker": "s", "linestyle": "--"},
    8: {"color": BLUE, "marker": "o"},
    4: {"color": RED, "marker": "^", "linestyle": ":"},
}


def speedup_figure(rows: Sequence[Row]) -> Figure:
    """Time of the best peer with so many bits over ours, by batch; a panel for heads and length."""
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    panels = figure.subplots(len(LENGTHS), len(HEADS), sharex=True, sharey=True)
    for (down, across), axes in np.ndenumerate(panels):
        pair, length = HEADS[across], LENGTHS[down]
        here = {row.sizes["B"]: row for row in rows if heads(row) == pair and row.sizes["L"] == length}
        _panel(axes, [here.get(batch) for batch in BATCHES])
        title(axes, f"{pair[0]} query heads, {pair[1]} KV heads, {length:,} tokens", size=10)
        if across == 0:
            axes.set_ylabel("time of the best peer / time")
        if down == len(LENGTHS) - 1:
            axes.set_xlabel("sequences in the batch")
    means = {bits: mean(over_bits(batched_and_single(rows), bits)) for bits in BITS}
    figure.suptitle(
        f"attention_kv4 is {means[16]:.1f}x as fast as the best FP16 kernel, {means[8]:.1f}x as the best 8-bit and "
        f"{means[4]:.1f}x as the best 4-bit one (geometric means)",
        x=0.01,
        ha="left",
        weight="bold",
        fontsize=11,
    )
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _panel(axes: Axes, rows: Sequence[Row | None]) -> None:
    for bits, names in BITS.items():
        speeds = [next(iter(over_bits([row], bits)), np.nan) if row else np.nan for row in rows]
        axes.plot(speeds, label=f"over the best of {len(names)} with {bits} bits", **_STYLES[bits])
    axes.axhline(1, color="black", linewidth=0.8, label="as fast as the peer")
    axes.set_xticks(range(len(rows)), [str(batch) for batch in BATCHES])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
