"""Figures of the cost model: rooflines, predictions beside measurements, and where W4A8 stops paying."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ptxlab.bench.record import Record
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.bench.shapes import ALL_TOKENS, DISSECTED, LLAMA
from ptxlab.lowbit.cost import Device, Scheme
from ptxlab.plot import BLUE, GREY, ORANGE, PURPLE, RED
from report import gemm
from report.frames import mean, means
from report.gemmplot import COLOURS, layer_style
from report.ladder import short_name
from report.predictions import W8A8, display_name, measured_device, predictions, ratios_to_8bit
from report.style import bare, title, token_axis

_ROOFS: dict[str, dict[str, Any]] = {  # scheme -> style
    "W4A4": {"color": PURPLE, "linewidth": 1.4},
    "W4A8": {"color": BLUE, "linewidth": 2.2},
    "W8A8": {"color": ORANGE, "linewidth": 1.8},
    "W4A16": {"color": "#5aae61", "linewidth": 1.6},
    "FP16": {"color": GREY, "linewidth": 1.6},
    "FP8": {"color": "#444444", "linewidth": 1.4, "linestyle": "--"},
}
_DEAR = "dequant_qoq_vadd4_s32"  # QoQ with the vadd4 to avoid: too dear to hide
_OURS = {"gemm_w4a8_small_sm90": ORANGE, "gemm_w4a8_sm90": BLUE, W8A8: "#444444"}
_INTENSITY = np.geomspace(0.5, 2 * ALL_TOKENS[-1], 400)


def roofline_figure(record: Record) -> Figure:
    """Plot QServe's Fig. 3: the roof of each scheme on an A100; on the record's card also the measured rates."""
    figure = Figure(figsize=(14, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    a100, device = cost.device("a100"), measured_device(record)
    for scheme in ("W4A4", "W4A8", "W8A8", "W4A16", "FP16"):
        _plot_roof(left, a100, scheme, label=scheme)
    alpha = counts.alpha_of(_DEAR)
    _plot_roof(left, a100, "W4A8", alpha, color=RED, linestyle=":", label=f"W4A8, {alpha:g} instructions per weight")
    w8a8_transition = cost.transition(a100, _scheme("W8A8"))
    title(left, f"A100 (data sheet): 4-bit weights double the roof below {w8a8_transition / 2:.0f} tokens", size=10)
    for scheme in ("W4A8", "W8A8", "FP8"):
        _plot_roof(right, device, scheme, label=f"{scheme} roof")
    rows, eight_bit_rows = (
        kernel_points[kernel_points.layer == str(DISSECTED)]
        for kernel_points in (gemm.points(record), gemm.eight_bit(record))
    )
    _plot_dots(right, rows.M, rows.rate, color=BLUE, label="gemm_w4a8")
    _plot_dots(right, eight_bit_rows.M, eight_bit_rows.rate, color=ORANGE, label="gemm_w8a8_sm90")
    fp8 = rows.operations / (rows["over cublas_fp8"] * rows.time_us) / 1e6
    _plot_dots(right, rows.M, fp8, color="#444444", marker="s", markersize=5, label="cuBLAS FP8")
    tokens_above_8bit_roof = [
        M for M, rate in zip(rows.M, rows.rate, strict=True) if rate > cost.most_tops(device, _scheme("W8A8"), M, 0)
    ]
    finding = (
        f"gemm_w4a8 is above the 8-bit roof up to {max(tokens_above_8bit_roof)} tokens"
        if tokens_above_8bit_roof
        else "measured beside the roofs"
    )
    title(right, f"{record.device['name'].removeprefix('NVIDIA ')}, {DISSECTED}: {finding}", size=10)
    for axes in (left, right):
        axes.legend(loc="lower right", frameon=False, fontsize=9)
    return figure


def _scheme(name: str) -> Scheme:
    """Return a scheme of the cost model; `W4A8` is that of LiquidQuant."""
    return cost.SCHEMES["W4A8 LQQ" if name == "W4A8" else name]


def _plot_roof(axes: Axes, device: Device, name: str, alpha: float | None = None, **style: Any) -> None:
    scheme = _scheme(name)
    alpha = counts.alpha_of(scheme.dequantiser) if alpha is None else alpha
    roof = [cost.most_tops(device, scheme, M, alpha) for M in _INTENSITY]
    axes.plot(_INTENSITY, roof, **{**_ROOFS[name], **style})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(0.9, 1.4 * ALL_TOKENS[-1])
    axes.set_ylim(4, 4000)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(color="#eceff3", linewidth=0.6)
    bare(axes)
    axes.set_xlabel("tokens M: multiply-adds per weight")
    axes.set_ylabel("TOPS")


def _plot_dots(axes: Axes, tokens: pd.Series, tops: pd.Series, **style: Any) -> None:
    usual = {"linestyle": "none", "marker": "o", "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.7}
    axes.plot(tokens, tops, **{**usual, **style})


def predicted_figure(record: Record) -> Figure:
    """Plot predicted over measured time by tokens: every point, and the mean over the matrices.

    The ladder's steps are at the left, the launched kernels at the right.
    """
    figure = Figure(figsize=(14, 5.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    prediction_rows = predictions(record)
    is_ours = prediction_rows.kernel.isin(_OURS)
    for axes, panel_points, panel_name in zip(
        panels,
        (prediction_rows[~is_ours], prediction_rows[is_ours]),
        ("The ladder's steps", "The launched kernels"),
        strict=True,
    ):
        for kernel, kernel_points in panel_points.groupby("kernel", sort=False):
            colour = _OURS.get(kernel) or COLOURS[short_name(kernel)]
            places = kernel_points.M.map(ALL_TOKENS.index)
            axes.plot(places, kernel_points.in_turn, "o", markersize=3, alpha=0.35, markeredgewidth=0, color=colour)
            errors = f"{kernel_points.error.mean():.0%} ({kernel_points.overlapped_error.mean():.0%})"
            label = f"{display_name(kernel)}: {errors}"
            ratios = means(kernel_points, "M", ["in_turn"]).in_turn.reindex(ALL_TOKENS)
            axes.plot(ratios.to_numpy(), "o-", markersize=5, color=colour, label=label)
        measured_over_predicted = 1 / mean(panel_points.in_turn)
        title(axes, f"{panel_name} take {measured_over_predicted:.1f}x the predicted time in the mean")
        axes.axhline(1, color="black", linewidth=1, label="as predicted")
        axes.set_xlim(-0.4, len(ALL_TOKENS) - 0.6)
        axes.set_ylim(0, 1.6)
        token_axis(axes, ALL_TOKENS)
        legend = {"title": "mean error in turn (overlapped); dots: every matrix", "title_fontsize": 8, "fontsize": 8}
        axes.legend(loc="upper left", frameon=False, ncols=2, **legend)
    panels[0].set_ylabel("predicted in turn / measured")
    return figure


def crossover_figure(record: Record) -> Figure:
    """Plot the time of `gemm_w4a8` over that of 8-bit weights, by matrix, with the model's prediction in the mean."""
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, peer, peer_name in zip(panels, (W8A8, "cublas_fp8"), ("our W8A8", "cuBLAS FP8"), strict=True):
        _plot_ratios_to_8bit(axes, ratios_to_8bit(record, peer))
        title(axes, f"W4A8 over {peer_name}: above 1 it stops paying")
    panels[0].set_ylabel("time of W4A8 / time of 8-bit weights")
    panels[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def _plot_ratios_to_8bit(axes: Axes, ratios: pd.DataFrame) -> None:
    for layer in LLAMA:
        measured = ratios[ratios.layer == str(layer)].set_index("M").measured.reindex(ALL_TOKENS)
        axes.plot(range(len(ALL_TOKENS)), measured, **layer_style(layer))
    overall = means(ratios, "M", ["in_turn", "overlapped"]).reindex(ALL_TOKENS)
    for prediction, style in (("in_turn", "-"), ("overlapped", "--")):
        label = f"predicted {prediction.replace('_', ' ')}, mean"
        axes.plot(
            range(len(ALL_TOKENS)),
            overall[prediction],
            color="black",
            linewidth=2.2,
            linestyle=style,
            label=label,
        )
    axes.axhline(1, color="black", linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)
    token_axis(axes, ALL_TOKENS)
