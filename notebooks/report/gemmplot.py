"""Figures of the GEMM ladder and of what `gemm_w4a8` does, from a record."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure

from benchmarks.stored import OURS, Stored
from ptxlab.arithmetic import ceil_div
from ptxlab.bench.record import Record
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench.shapes import (
    CHAINS,
    DISSECTED,
    FEW_TOKENS,
    LAYERS,
    LLAMA,
    MIXTRAL,
    ROUTED_TOKENS,
    TOKENS,
    UNTUNED,
    UNTUNED_TOKENS,
    Layer,
)
from ptxlab.plot import BLUE, GREY, ORANGE, PURPLE, RED
from report.frames import fraction, mean, means
from report.gemm import KINDS, at_tokens, chains, experts, points, untuned_points
from report.ladder import QSERVE, select_step, short_name, speed_over, steps
from report.style import title, token_axis

# The steps of sm_80 in warm colours, those of sm_90 in ever darker blue.
COLOURS = {
    "qoq_sm80": ORANGE,
    "lqq_sm80": RED,
    "qoq_channel_sm80": "#fdbf6f",
    "qoq_sm90": "#a6bddb",
    "lqq_sm90": "#67a9cf",
    "lqq_excp_sm90": PURPLE,
    "lqq_imfp_sm90": "#0b4f8a",
    "lqq_dynamic_sm90": "#5aae61",
}
BASELINE = "gemm_w4a8_qoq_sm90"  # what LiquidGEMM's Fig. 13 starts from
_PEERS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (label, style)
    "cublas_fp8": ("cuBLAS FP8", {"color": "#444444", "linestyle": "--"}),
    "cublas_int8": ("cuBLAS INT8", {"color": GREY, "linestyle": ":"}),
    "cublas_fp16": ("cuBLAS FP16", {"color": "#c9ccd1", "linestyle": "-."}),
    QSERVE: ("QServe W4A8 g128", {"color": RED, "linestyle": "--"}),
}
_STORED: dict[str, dict[str, tuple[str, str]]] = {  # kind of peers -> name -> (label, colour)
    "over g128": {
        QSERVE: ("QServe", RED),
        "qqq_w4a8_g128": ("QQQ", "#5aae61"),
        "humming_w4a8_g128": ("humming", ORANGE),
    },
    "over channel": {
        "qserve_w4a8_chn": ("QServe", RED),
        "qqq_w4a8_chn": ("QQQ", "#5aae61"),
        "humming_w4a8_chn": ("humming", ORANGE),
    },
    "over wide": {
        "qserve_w8a8": ("QServe W8A8", RED),
        "cublas_int8": ("cuBLAS INT8", GREY),
        "cublas_fp8": ("cuBLAS FP8", "#444444"),
        "fp8_row": ("cuBLAS FP8 per row", PURPLE),
        "cublas_fp16": ("cuBLAS FP16", "#c9ccd1"),
    },
}


def packed_bytes(layer: Layer, group: int = 128) -> int:
    """Return the bytes of a packed 4-bit weight: nibbles, and two bytes of constants per group."""
    return layer.N * layer.K // 2 + 2 * layer.N * layer.K // group


def peers_figure(stored: Stored) -> Figure:
    """Plot peers' and our time over the W4A8 floor by tokens, mean over matrices; a panel per kind of peers.

    All times are stored ones, of the run that measured all of them.
    """
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, len(_STORED), sharey=True)
    tokens = sorted({M for _, _, M in stored})
    for axes, (kind, peer_styles) in zip(panels, _STORED.items(), strict=True):
        for peer, (label, colour) in {**peer_styles, OURS: ("ptxlab, groups of 128", BLUE)}.items():
            times = pd.Series([_over_floor(stored, peer, M) for M in tokens])
            measured_times = times.dropna()
            axes.plot(measured_times.index, measured_times, "o-", color=colour, label=label)
        axes.axhline(1, color="black", linewidth=1, label="the floor, groups of 128")
        token_axis(axes, tokens)
        title(axes, KINDS[kind][0])
        axes.legend(loc="upper left", frameon=False, fontsize=9)
    panels[0].set_ylim(0, 1.15 * panels[0].get_ylim()[1])  # room for the legends
    panels[0].set_ylabel("time / floor")
    headline = "Where others stand on an H200: LLaMA-2-7B and -70B, geometric mean of 8 matrices"
    figure.suptitle(headline, x=0.01, ha="left", weight="bold")
    return figure


def _over_floor(stored: Stored, peer: str, M: int) -> float:
    """Return a stored time over the floor of a W4A8 GEMM, the mean over the matrices; NaN without times."""
    ratios = []
    for layer in LAYERS:
        times = stored.get((layer.N, layer.K, M), {})
        if peer in times:
            stream = cost.sheet("h200").stream_us(packed_bytes(layer))
            ratios.append(times[peer] / cost.gemm_floor(stream, 2 * M * layer.N * layer.K, "h200")[0])
    return mean(ratios)


def times_figure(rows: pd.DataFrame) -> Figure:
    """Plot the steps' time over the floor by tokens, mean over the matrices, and the best step's beside peers."""
    tokens, names = _tokens(rows), steps(rows)
    times = {name: [1 / fraction(select_step(rows, name, M)) for M in tokens] for name in names}
    fastest = min(names, key=lambda name: mean(times[name]))
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name in names:
        left.plot(times[name], "o-", markersize=4, **_step_style(name))
    for peer, (label, style) in _PEERS.items():
        ratios_to_floor = [
            mean(best_rows[f"over {peer}"] / best_rows.fraction)
            for M in tokens
            for best_rows in [select_step(rows, fastest, M)]
        ]
        right.plot(ratios_to_floor, "s", markersize=4, label=label, **style)
    right.plot(times[fastest], "o-", markersize=4, **_step_style(fastest))
    first = times[names[0]]
    finding = (
        f"{short_name(fastest)} takes {times[fastest][-1]:.1f}x the floor at {tokens[-1]} tokens, the first step "
        f"{first[-1]:.1f}x"
    )
    title(left, finding, size=10)
    title(right, f"{short_name(fastest)} beside other libraries", size=10)
    for axes in (left, right):
        axes.axhline(1, color="black", linewidth=1, label="floor")
        token_axis(axes, tokens)
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")
    left.set_ylim(0, 1.3 * left.get_ylim()[1])  # room for the legends
    left.set_ylabel("time / floor")
    return figure


def ablation_figure(rows: pd.DataFrame) -> Figure:
    """Plot the speed-up of each step over the baseline, as LiquidGEMM's Fig. 13.

    If the baseline was not measured, the first step takes its place.
    """
    names, tokens = steps(rows), _tokens(rows)
    base = BASELINE if BASELINE in names else names[0]
    figure = Figure(figsize=(max(8, 1.9 * len(tokens)), 4.8), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / len(names)
    for number, step in enumerate(names):
        places = np.arange(len(tokens)) + (number - (len(names) - 1) / 2) * width
        speeds = [speed_over(rows, step, base, M) for M in tokens]
        style = _step_style(step)
        axes.bar(places, speeds, width * 0.94, **style)
        text_colour = "white" if sum(to_rgb(style["color"])) < 1.6 else "black"
        for place, speed in zip(places, speeds, strict=True):
            axes.text(place, 0.03, f"{speed:.2f}", rotation=90, ha="center", va="bottom", fontsize=8, color=text_colour)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", zorder=0)
    token_axis(axes, tokens)
    axes.set_ylabel(f"speed over {short_name(base)}")
    matrices = rows.layer.nunique()
    title(axes, f"What each step gained: geometric mean over {matrices} matrices")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def fraction_figure(rows: pd.DataFrame) -> Figure:
    """Plot each step's fraction of the floor as a map of matrices by tokens."""
    names, tokens = steps(rows), _tokens(rows)
    layers = [str(layer) for layer in LAYERS if str(layer) in set(rows.layer)]
    columns = min(3, len(names))
    lines = ceil_div(len(names), columns)
    figure = Figure(figsize=(4.6 * columns + 1, (0.33 * len(layers) + 1.1) * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for place, axes in enumerate(panels.flat):
        if place >= len(names):
            axes.set_visible(False)
            continue
        values = (
            select_step(rows, names[place])
            .pivot(index="layer", columns="M", values="fraction")
            .reindex(layers, columns=tokens)
        )
        image = axes.imshow(values, cmap="RdYlGn", norm=Normalize(0, 1), aspect="auto")
        for (row_index, column), step_fraction in np.ndenumerate(values.to_numpy()):
            if not np.isnan(step_fraction):
                axes.text(column, row_index, f"{step_fraction:.2f}", ha="center", va="center", fontsize=8)
        overall = mean(fraction(select_step(rows, names[place], M)) for M in tokens)
        title(axes, f"{short_name(names[place])}: {overall:.2f}", size=10)
        axes.set_yticks(range(len(layers)), layers, fontsize=8)
        axes.set_xticks(range(len(tokens)), [str(M) for M in tokens])
        if place >= len(names) - columns:
            axes.set_xlabel("tokens M")
    figure.colorbar(image, ax=panels, label="floor / time", shrink=0.8, pad=0.01)
    return figure


def roofline_figure(rows: pd.DataFrame) -> Figure:
    """Plot every step under the two roofs; a step's line runs over the tokens of one large matrix."""
    sheet = cost.sheet("h200")
    figure = Figure(figsize=(9.5, 5.4), layout="constrained")
    axes = figure.subplots()
    intensity = np.geomspace(8, 2000, 200)
    tbps, peak_tops = sheet.memory_tbps, sheet.tops["int8"]
    roof_tops = np.minimum(tbps * intensity, peak_tops)
    axes.plot(intensity, roof_tops, color="black", linewidth=1.4)
    axes.fill_between(intensity, roof_tops, 1e5, color="#f2f3f5", linewidth=0)
    for step in steps(rows):
        style = _step_style(step)
        step_points = select_step(rows, step)
        axes.plot(
            *_roofline_points(step_points), "o", markersize=3, alpha=0.35, color=style["color"], markeredgewidth=0
        )
        large_layer_points = step_points[step_points.layer == str(DISSECTED)]
        axes.plot(*_roofline_points(large_layer_points), "o-", markersize=6, **style)
    ridge_intensity = peak_tops / tbps
    x, y = 17, 17 * tbps * 1.12  # along the roof: the angle is one in data coordinates, at this point
    rotation: dict[str, Any] = {"rotation_mode": "anchor", "transform_rotates_text": True}
    rotation["rotation"] = math.degrees(math.atan(y / x))
    axes.text(x, y, f"{tbps:g} TB/s into shared memory", fontsize=9, **rotation)
    axes.text(1900, peak_tops * 1.05, f"wgmma s8: {peak_tops:,.0f} TOPS", ha="right", fontsize=9)
    axes.axvline(ridge_intensity, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(8, 2000)
    axes.set_ylim(10, 4000)
    axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axes.set_xlabel("operations per byte of packed weight")
    axes.set_ylabel("TOPS")
    title(axes, f"Roofline of one H200; lines: {DISSECTED}, M = {TOKENS[0]} to {TOKENS[-1]}; dots: all")
    axes.legend(loc="lower right", frameon=False)
    return figure


def _roofline_points(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    rows_by_tokens = rows.sort_values("M", kind="stable")
    return rows_by_tokens.operations / rows_by_tokens.packed_bytes, rows_by_tokens.rate


def _tokens(rows: pd.DataFrame) -> list[int]:
    return sorted(rows.M.unique())


def _step_style(name: str) -> dict[str, Any]:
    return {"color": COLOURS.get(short_name(name), "#555555"), "label": short_name(name)}


_PARTS = {"QKV": BLUE, "O": "#5aae61", "gate+up": ORANGE, "down": PURPLE}
_MODELS: dict[str, dict[str, Any]] = {  # the larger model in whole lines
    "7B": {"linestyle": "--", "marker": "o", "markersize": 3.5, "markerfacecolor": "white"},
    "70B": {"linestyle": "-", "marker": "o", "markersize": 3.5},
}
_MEAN: dict[str, Any] = {"color": "black", "linewidth": 2.2, "label": "mean"}


def headline_figure(rows: pd.DataFrame) -> Figure:
    """Plot every matrix over the tokens: fraction of the floor, and speed-up over the fastest peer of each kind."""
    figure = Figure(figsize=(13, 8.6), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    title_by_column = {"fraction": "How near to the floor"}
    title_by_column |= {
        kind: f"Over the fastest of {len(names)}: {peer_kind}" for kind, (peer_kind, names) in KINDS.items()
    }
    del title_by_column["over all"]
    for axes, (column, text) in zip(panels, title_by_column.items(), strict=True):
        measured_rows = rows.dropna(subset=column)
        tokens = sorted(measured_rows.M.unique())
        for layer in LLAMA:
            layer_values = measured_rows[measured_rows.layer == str(layer)].set_index("M")[column].reindex(tokens)
            _plot_line(axes, layer_values, layer_style(layer))
        _plot_line(axes, means(measured_rows, "M", [column])[column].reindex(tokens), _MEAN)
        axes.set_ylim(0, 1.05 if column == "fraction" else None)
        axes.set_ylabel("floor / time" if column == "fraction" else "time of the fastest peer / time")
        _finish_axes(axes, text, tokens)
    panels[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def layer_style(layer: Layer) -> dict[str, Any]:
    """Return the line style of a matrix of LLaMA-2: colour by part, dashes by model."""
    return {"color": _PARTS[layer.part], "linewidth": 1.2, "label": str(layer), **_MODELS[layer.model]}


def beyond_figure(record: Record) -> Figure:
    """Plot other workloads than single GEMMs of LLaMA-2: chains of a layer, experts, other models."""
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _plot_chains(left, record)
    _plot_experts(middle, record)
    _plot_other_models(right, record)
    return figure


def _plot_chains(axes: Axes, record: Record) -> None:
    chain_rows = chains(record)
    for layers in CHAINS:
        model = layers[0].model
        links, style = chain_rows[chain_rows.model == model].set_index("M").reindex(FEW_TOKENS), _MODELS[model]
        _plot_line(
            axes, links["over cublas_fp8"], {"color": BLUE, "label": f"{model}, over cuBLAS FP8's chain", **style}
        )
        speedup_over_best = links.over_best.dropna()  # where all peers were measured
        axes.plot(
            [FEW_TOKENS.index(M) for M in speedup_over_best.index],
            speedup_over_best,
            color=GREY,
            label=f"{model}, over the best peers alone",
            **style,
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speed")
    _finish_axes(axes, "The four GEMMs of a layer in a row", FEW_TOKENS)
    axes.legend(frameon=False, loc="lower left")


def _plot_experts(axes: Axes, record: Record) -> None:
    expert_rows = experts(record)
    for layer, colour in zip(MIXTRAL, (ORANGE, PURPLE), strict=True):
        layer_rows = expert_rows[expert_rows.layer == str(layer)].set_index("tokens").reindex(ROUTED_TOKENS)
        for label, style, floor_fractions in (
            ("loop", {"linestyle": "--"}, layer_rows.fraction),
            ("grouped", {"linestyle": "-", "marker": "o", "markersize": 3.5}, layer_rows.fraction_grouped),
        ):
            if floor_fractions.notna().any():
                _plot_line(axes, floor_fractions, {"color": colour, "label": f"{layer}, {label}", **style})
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("floor / time")
    _finish_axes(axes, "Mixtral's experts", ROUTED_TOKENS)
    axes.legend(frameon=False, loc="lower left")


def _plot_other_models(axes: Axes, record: Record) -> None:
    untuned_rows = untuned_points(record)
    models = list(dict.fromkeys(layer.model for layer in UNTUNED))
    for model, colour in zip(models, _PARTS.values(), strict=True):
        floor_fractions = means(untuned_rows[untuned_rows.model == model], "M", ["fraction"]).fraction.reindex(
            UNTUNED_TOKENS
        )
        _plot_line(
            axes, floor_fractions, {"color": colour, "marker": "o", "markersize": 3.5, "label": f"{model}, mean"}
        )
    tuned_fraction = fraction(at_tokens(points(record), *FEW_TOKENS))
    axes.axhline(tuned_fraction, color="black", linestyle=":", label=f"tuned shapes, M <= {FEW_TOKENS[-1]}, mean")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("floor / time")
    _finish_axes(axes, "Other models, odd numbers of tokens", UNTUNED_TOKENS)
    axes.legend(frameon=False, loc="lower left")


def _plot_line(axes: Axes, values: pd.Series, style: dict[str, Any]) -> None:
    axes.plot(np.arange(len(values)), values, **style)


def _finish_axes(axes: Axes, text: str, tokens: Sequence[int]) -> None:
    axes.axhline(1, color="black", linewidth=0.8, zorder=0)
    token_axis(axes, tokens)
    title(axes, text)
