"""Figures of the cost model: rooflines, predictions beside measurements, and where W4A8 stops paying."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ptxlab import cost
from ptxlab.bench import counts
from ptxlab.bench.record import Record
from ptxlab.bench.shapes import ALL_TOKENS, DISSECTED
from ptxlab.cost import Device
from ptxlab.plot import BLUE, GREY, ORANGE, RED
from report import headline
from report.headlineplot import layer_style
from report.ladder import QSERVE, mean, short
from report.ladderplot import COLOURS, title, token_axis
from report.predictions import (
    W8A8,
    Duel,
    by_kernel,
    called,
    duels,
    mean_error,
    mean_ratio,
    measured_device,
    predictions,
)

_ROOFS: dict[str, dict[str, Any]] = {  # scheme -> style; those whose roofs coincide differ in width
    "FP16": {"color": "#b9bdc4", "linewidth": 2},
    "W4A16": {"color": "#5aae61", "linewidth": 2},
    "FP8": {"color": "#444444", "linewidth": 3.5},
    "W8A8": {"color": ORANGE, "linewidth": 1.6},
    "W4A8 LQQ": {"color": BLUE, "linewidth": 2.2},
    "W4A4": {"color": "#7b6fb0", "linewidth": 1.2},
}
_DEAR = "dequant_qoq_vadd4_s32"  # QoQ with the vadd4 to avoid: too dear to hide
_OTHERS = {  # peer -> (label, colour)
    "cublas_fp8": ("cuBLAS FP8", "#444444"),
    "cublas_fp16": ("cuBLAS FP16", "#b9bdc4"),
    QSERVE: ("QServe W4A8 g128", RED),
}
_OURS = {"gemm_w4a8_small_sm90": "#b2df8a", "gemm_w4a8_sm90": "#1b7837", W8A8: "#444444"}
_INTENSITY = np.geomspace(0.5, 2 * ALL_TOKENS[-1], 400)


def roofline_figure(record: Record) -> Figure:
    """QServe's Fig. 3: what each scheme can reach on an A100, and on the record's card with what was reached there."""
    figure = Figure(figsize=(14, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    a100, here = cost.device("a100"), measured_device(record)
    _roofs(left, a100)
    title(left, "A100 by its data sheet")
    _roofs(right, here)
    _reached(right, record)
    right.text(
        9000, 1.1 * here.tops["int4"], "4-bit MMA, emulated on Hopper", ha="right", fontsize=8.5, color="#7b6fb0"
    )
    title(right, f"{record.device['name'].removeprefix('NVIDIA ')} as measured; dots: {DISSECTED}")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _roofs(axes: Axes, device: Device) -> None:
    for name, style in _ROOFS.items():
        scheme = cost.SCHEMES[name]
        if scheme.operands in device.tops:
            roof = [cost.most_tops(device, scheme, M, counts.alpha_of(scheme.dequantiser)) for M in _INTENSITY]
            axes.plot(_INTENSITY, roof, label=name.removesuffix(" LQQ"), **style)
    alpha = counts.alpha_of(_DEAR)
    roof = [cost.most_tops(device, cost.SCHEMES["W4A8 LQQ"], M, alpha) for M in _INTENSITY]
    axes.plot(_INTENSITY, roof, color=RED, linestyle=":", label=f"W4A8 by vadd4.s32, α = {alpha:g}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(0.9, 1.4 * ALL_TOKENS[-1])
    axes.set_ylim(4, 4000)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(color="#eceff3", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens M: multiply-adds per weight")
    axes.set_ylabel("TOPS")


def _reached(axes: Axes, record: Record) -> None:
    rows = [row for row in headline.points(record) if headline.named(row) == DISSECTED]
    eight = [row for row in headline.eight_bit(record) if headline.named(row) == DISSECTED]
    for name, (label, colour) in _OTHERS.items():
        points = [(row.sizes["M"], row.operations / row.peers[name] / 1e6) for row in rows if name in row.peers]
        _dots(axes, points, color=colour, label=label, marker="s", markersize=5)
    _dots(axes, [(row.sizes["M"], row.rate) for row in eight], color=ORANGE, label="our W8A8")
    _dots(axes, [(row.sizes["M"], row.rate) for row in rows], color=BLUE, label="gemm_w4a8")


def _dots(axes: Axes, points: Iterable[tuple[int, float]], **style: Any) -> None:
    usual = {"linestyle": "none", "marker": "o", "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.7}
    axes.plot(*np.array([*points]).reshape(-1, 2).T, **{**usual, **style})


def predicted_figure(record: Record) -> Figure:
    """Every point's prediction in turn beside its time, and how the ratio of the two runs over the tokens."""
    figure = Figure(figsize=(14.5, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = predictions(record)
    ends = np.array([1.5, 1.4 * max(prediction.row.time_us for prediction in found)])
    left.plot(ends, ends, color="black", linewidth=1)
    left.plot(ends, 2 * ends, color=GREY, linewidth=0.8, linestyle=":")
    left.text(500, 1150, "twice as long", fontsize=8, color=GREY, rotation=45, rotation_mode="anchor")
    for name, mine in by_kernel(found).items():
        style = {"color": _OURS.get(name) or COLOURS[short(name)]}
        errors = [mean_error(mine, overlapped=overlapped) for overlapped in (False, True)]
        label = f"{called(name)}: {errors[0]:.0%} ({errors[1]:.0%})"
        times = [(p.cost.in_turn_us, p.row.time_us) for p in mine]
        left.plot(*np.array(times).T, "o", markersize=4, alpha=0.75, markeredgewidth=0, label=label, **style)
        ratios = [mean_ratio(mine, M) for M in ALL_TOKENS]
        right.plot(range(len(ALL_TOKENS)), ratios, "o-", markersize=4, **style)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlim(*ends)
    left.set_ylim(*ends)
    left.set_aspect("equal")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    left.set_xlabel("predicted in turn, µs")
    left.set_ylabel("measured, µs")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(loc="lower right", frameon=False, fontsize=8, title="mean error in turn (overlapped)", title_fontsize=8)
    title(left, "Predicted and measured, every point")
    right.axhline(1, color="black", linewidth=0.8, zorder=0)
    right.set_ylim(0, 1.25)
    right.set_ylabel("predicted in turn / measured")
    token_axis(right, ALL_TOKENS)
    title(right, "Geometric mean over the matrices")
    return figure


def crossover_figure(record: Record) -> Figure:
    """Time of `gemm_w4a8` over that of 8-bit weights, matrix by matrix, with what the model says in the mean."""
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, other, name in zip(panels, (W8A8, "cublas_fp8"), ("our W8A8", "cuBLAS FP8"), strict=True):
        _duels(axes, duels(record, other))
        title(axes, f"W4A8 over {name}: above 1 it stops paying")
    panels[0].set_ylabel("time of W4A8 / time of 8-bit weights")
    panels[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def _duels(axes: Axes, found: list[Duel]) -> None:
    for duel in found:
        axes.plot(range(len(ALL_TOKENS)), [duel.measured.get(M, np.nan) for M in ALL_TOKENS], **layer_style(duel.layer))
    for label, style, ratios in (
        ("predicted in turn, mean", "-", [duel.in_turn for duel in found]),
        ("predicted overlapped, mean", "--", [duel.overlapped for duel in found]),
    ):
        means = [mean(ratio[M] for ratio in ratios if M in ratio) for M in ALL_TOKENS]
        axes.plot(range(len(ALL_TOKENS)), means, color="black", linewidth=2.2, linestyle=style, label=label)
    axes.axhline(1, color="black", linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)
    token_axis(axes, ALL_TOKENS)
