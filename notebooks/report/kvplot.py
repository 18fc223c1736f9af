"""Figures of decode attention: how near everyone's own bytes come to the memory's speed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ptxlab import cost
from ptxlab.bench.kvshapes import BATCHES, HEADS, LENGTHS, LONG, even
from ptxlab.bench.record import Row
from ptxlab.bench.stored import Stored
from ptxlab.plot import BLUE, GREY, ORANGE, PALE, RED
from report.kvpoints import PEERS, heads
from report.ladderplot import title

_TOKEN_BYTES = {"kv4": 68, "kv8": 132, "mb": 132, "fp8": 128, "f16": 256}  # of one head's key or value, constants too
_LINES: dict[str, dict[str, Any]] = {
    "sdpa_flash_f16": {"color": "#c9ccd1", "linestyle": "-."},
    "sdpa_cudnn_f16": {"color": GREY, "linestyle": "-."},
    "fi_cc_f16": {"color": "#b7d8b0", "linestyle": ":"},
    "fi_tc_f16": {"color": "#86c07c", "linestyle": ":"},
    "fi_xqa_f16": {"color": "#5aae61", "linestyle": ":"},
    "fi_cc_fp8": {"color": "#c8b9dc"},
    "fi_tc_fp8": {"color": "#a08cc4"},
    "fi_xqa_fp8": {"color": "#7b6fb0"},
    "qserve_kv8": {"color": "#f6c7a0", "linestyle": "--"},
    "lserve_kv8": {"color": "#fdbf6f", "linestyle": "--"},
    "lserve_kv8_mb": {"color": ORANGE, "linestyle": "--"},
    "qserve_kv4": {"color": RED},
    "lserve_kv4": {"color": "#e7868b"},
}
_OURS: dict[str, Any] = {"color": BLUE, "linewidth": 2.4, "marker": "o", "markersize": 4}
_FACE = "attention_kv4"


def bandwidth_figure(rows: Sequence[Row], steps: Sequence[Row], stored: Stored, device: str = "h200") -> Figure:
    """Bytes of each one's own cache over its time, by batch, a panel for heads and length.

    Args:
        rows: the batches as recorded; without any, the stored times of others stand alone.
        steps: the ladder as recorded, which gets a panel of its own, as single long sequences do.
        stored: the stored times.
        device: whose read ceiling is drawn.
    """
    figure = Figure(figsize=(15 if rows else 12, 6.6), layout="constrained")
    panels = figure.subplots(len(LENGTHS), len(HEADS) + bool(rows), squeeze=False)
    for across, pair in enumerate(HEADS):
        for down, length in enumerate(LENGTHS):
            axes = panels[down, across]
            _batches(axes, pair, length, rows, stored)
            title(axes, f"heads {pair[0]}/{pair[1]}, {length} tokens", size=10)
            _finish(axes, device)
            if across == 0:
                axes.set_ylabel("TB/s of one's own bytes")
            if down:
                axes.set_xlabel("sequences")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    if rows:
        _steps(panels[0, -1], steps, device)
        _long(panels[1, -1], rows, device)
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    return figure


def _batches(axes: Axes, pair: tuple[int, int], length: int, rows: Sequence[Row], stored: Stored) -> None:
    ours = {row.sizes["B"]: row for row in rows if heads(row) == pair and row.sizes["L"] == length}
    tokens = {batch: even(pair, batch, length).tokens * pair[1] * 2 for batch in BATCHES}
    for name, style in _LINES.items():
        times = [_time(name, (*pair, batch, length), ours.get(batch), stored) for batch in BATCHES]
        rates = [tokens[b] * _token_bytes(name) / us / 1e6 for b, us in zip(BATCHES, times, strict=True)]
        axes.plot(range(len(BATCHES)), rates, label=PEERS[name], linewidth=1.2, **style)
    if ours:
        rates = [ours[b].bytes / ours[b].time_us / 1e6 if b in ours else np.nan for b in BATCHES]
        axes.plot(range(len(BATCHES)), rates, label=_FACE, **_OURS)
    axes.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])


def _time(name: str, place: tuple[int, ...], row: Row | None, stored: Stored) -> float:
    """Microseconds of a peer: beside ours as the record has it, else as it was stored."""
    beside: Mapping[str, float] = row.peers if row is not None else stored.get(place, {})
    return beside.get(name, np.nan)


def _token_bytes(name: str) -> int:
    return _TOKEN_BYTES[name.rpartition("_")[2]]


def _steps(axes: Axes, rows: Sequence[Row], device: str) -> None:
    """The ladder, each step's own bytes."""
    names = [row.kernel.removeprefix("attention_") for row in rows]
    axes.barh(names, [row.bytes / row.time_us / 1e6 for row in rows], color=BLUE)
    axes.invert_yaxis()
    axes.axvline(cost.sheet(device).read_tbps, color="black", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("TB/s")
    title(axes, "The ladder, heads 32/32, 64 x 1024", size=10)


def _long(axes: Axes, rows: Sequence[Row], device: str) -> None:
    """One long sequence, beside PyTorch."""
    found = {(*heads(row), row.sizes["L"]): row for row in rows if row.sizes["B"] == 1}
    for pair, style in zip(HEADS, ("-", "--", ":"), strict=True):
        here = [found.get((*pair, length)) for length in LONG]
        rates = [row.bytes / row.time_us / 1e6 if row else np.nan for row in here]
        axes.plot(range(len(LONG)), rates, label=f"{pair[0]}/{pair[1]}", **{**_OURS, "linestyle": style})
    axes.set_xticks(range(len(LONG)), [f"{length >> 10}k" for length in LONG])
    axes.set_xlabel("tokens")
    axes.legend(frameon=False, fontsize=8)
    title(axes, "One long sequence", size=10)
    _finish(axes, device)


def _finish(axes: Axes, device: str) -> None:
    axes.axhline(cost.sheet(device).read_tbps, color="black", linewidth=0.8, zorder=0)
    axes.set_ylim(0, 5)
    axes.grid(axis="y", color=PALE, linewidth=0.6)
