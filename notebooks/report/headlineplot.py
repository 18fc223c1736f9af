"""Figures of what `gemm_w4a8` does, from a record of the suite."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ptxlab.bench.record import Record, Row
from ptxlab.bench.shapes import (
    ALL_TOKENS,
    CHAINS,
    FEW_TOKENS,
    LLAMA,
    MIXTRAL,
    ROUTED_TOKENS,
    UNTUNED,
    UNTUNED_TOKENS,
    Layer,
)
from ptxlab.plot import BLUE, GREY, ORANGE
from report.headline import at, best_peer, chains, experts, fraction, named, over, points, untuned_points
from report.ladder import mean
from report.ladderplot import title, token_axis

_PARTS = {"QKV": BLUE, "O": "#5aae61", "gate+up": ORANGE, "down": "#7b6fb0"}
_MODELS: dict[str, dict[str, Any]] = {  # the larger model in whole lines
    "7B": {"linestyle": "--", "marker": "o", "markersize": 3.5, "markerfacecolor": "white"},
    "70B": {"linestyle": "-", "marker": "o", "markersize": 3.5},
}
_MEAN: dict[str, Any] = {"color": "black", "linewidth": 2.2, "label": "mean"}


def headline_figure(rows: Sequence[Row]) -> Figure:
    """Every matrix over the tokens: how near to the floor, and how many times as fast as the fastest peer."""
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for layer in LLAMA:
        mine = {row.sizes["M"]: row for row in rows if named(row) == layer}
        style = layer_style(layer)
        _line(left, [mine[M].fraction if M in mine else math.nan for M in ALL_TOKENS], style)
        _line(right, [best_peer(mine[M])[1] if M in mine else math.nan for M in ALL_TOKENS], style)
    _line(left, [fraction(at(rows, M)) for M in ALL_TOKENS], _MEAN)
    _line(right, [mean(over(at(rows, M))) for M in ALL_TOKENS], _MEAN)
    left.set_ylim(0, 1.05)
    left.set_ylabel("floor / time")
    right.set_ylim(bottom=0)
    right.set_ylabel("time of the fastest peer / time")
    for axes, text in ((left, "How near to the floor"), (right, "Over the fastest of all peers at every point")):
        _finish(axes, text, ALL_TOKENS)
    right.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def layer_style(layer: Layer) -> dict[str, Any]:
    """How the line of a matrix of LLaMA-2 is drawn."""
    return {"color": _PARTS[layer.part], "linewidth": 1.2, "label": str(layer), **_MODELS[layer.model]}


def beyond_figure(record: Record) -> Figure:
    """Beyond single GEMMs of LLaMA-2: chains of a layer, experts, other models."""
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _chains(left, record)
    _experts(middle, record)
    _untuned(right, record)
    return figure


def _chains(axes: Axes, record: Record) -> None:
    found = {(link.model, link.row.sizes["M"]): link for link in chains(record)}
    for layers in CHAINS:
        model = layers[0].model
        links = [found.get((model, M)) for M in FEW_TOKENS]
        style = _MODELS[model]
        fp8 = [link.over_fp8 if link else math.nan for link in links]
        best = [link.over_best if link else math.nan for link in links]
        _line(axes, fp8, {"color": BLUE, "label": f"{model}, over cuBLAS FP8's chain", **style})
        _line(axes, best, {"color": GREY, "label": f"{model}, over the best peers alone", **style})
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speed")
    _finish(axes, "The four GEMMs of a layer in a row", FEW_TOKENS)
    axes.legend(frameon=False, loc="lower left")


def _experts(axes: Axes, record: Record) -> None:
    found = {(named(loop, MIXTRAL), loop.sizes["tokens"]): (loop, grouped) for loop, grouped in experts(record)}
    for layer, colour in zip(MIXTRAL, (ORANGE, "#7b6fb0"), strict=True):
        pairs = [found.get((layer, tokens), (None, None)) for tokens in ROUTED_TOKENS]
        for label, style, rows in (
            ("loop", {"linestyle": "--"}, [loop for loop, _ in pairs]),
            ("grouped", {"linestyle": "-", "marker": "o", "markersize": 3.5}, [grouped for _, grouped in pairs]),
        ):
            if any(rows):
                near = [row.fraction if row else math.nan for row in rows]
                _line(axes, near, {"color": colour, "label": f"{layer}, {label}", **style})
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("floor / time")
    _finish(axes, "Mixtral's experts", ROUTED_TOKENS)
    axes.legend(frameon=False, loc="lower left")


def _untuned(axes: Axes, record: Record) -> None:
    found = untuned_points(record)
    models = list(dict.fromkeys(layer.model for layer in UNTUNED))
    for model, colour in zip(models, _PARTS.values(), strict=True):
        rows = [row for row, layer in found if layer.model == model]
        near = [fraction(at(rows, M)) for M in UNTUNED_TOKENS]
        _line(axes, near, {"color": colour, "marker": "o", "markersize": 3.5, "label": f"{model}, mean"})
    tuned = fraction(at(points(record), *FEW_TOKENS))
    axes.axhline(tuned, color="black", linestyle=":", label=f"tuned shapes, M <= {FEW_TOKENS[-1]}, mean")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("floor / time")
    _finish(axes, "Other models, odd numbers of tokens", UNTUNED_TOKENS)
    axes.legend(frameon=False, loc="lower left")


def _line(axes: Axes, values: Sequence[float], style: dict[str, Any]) -> None:
    axes.plot(np.arange(len(values)), values, **style)


def _finish(axes: Axes, text: str, tokens: Sequence[int]) -> None:
    axes.axhline(1, color="black", linewidth=0.8, zorder=0)
    token_axis(axes, tokens)
    title(axes, text)
