"""Gantt charts of timelines: a row per warp group, and below it what the tensor cores do for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ptxlab.timeline import PHASES, Timeline

Window = tuple[float, float]  # in clocks or steps

# What is waited for is pale, so that work stands out.
STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "setup": ("set up", {"color": "#b9bec6"}),
    "load": ("ask for copies", {"color": "#1b9e77"}),
    "wait_copy": ("wait for a copy", {"color": "#e9ecf0"}),
    "wait_group": ("wait for another warp group", {"color": "#f6c9c5"}),
    "wait_mma": ("wait for wgmma", {"color": "#cfe1f2"}),
    "dequantise": ("dequantise", {"color": "#e08214"}),
    "issue": ("issue wgmma", {"color": "#08306b"}),
    "multiply": ("multiply (mma.sync)", {"color": "#2f6db5"}),
    "scores": ("scores: K dequantised, Q K", {"color": "#e08214"}),
    "softmax": ("softmax", {"color": "#8073ac"}),
    "values": ("values: V dequantised, P V", {"color": "#2f6db5"}),
    "reduce": ("reduce", {"color": "#c51b7d"}),
    "epilogue": ("epilogue", {"color": "#5e3c99"}),
}
_FLIGHT, _AT_PEAK = "#c6dbef", "#2f6db5"
_TRACK, _TENSOR = 0.56, 0.24  # heights
_STEADY = 14  # repetitions of the main loop in the part that is shown large


def timeline_figure(timeline: Timeline, sm: int | None = None, window: Window | None = None) -> Figure:
    """One SM: above the whole launch, below a part of it, by default from the middle.

    Args:
        timeline: of one launch.
        sm: which; by default the first.
        window: the part, in clocks or steps from the beginning.
    """
    shown = timeline.of_sm(timeline.sms[0] if sm is None else sm)
    begin, end = window or steady(shown)
    rows = len(shown.tracks)
    figure = Figure(figsize=(13, 2.4 + 0.84 * rows), layout="constrained")
    whole, part = figure.subplots(2, 1)
    draw(whole, shown, (0, shown.duration))
    whole.axvspan(begin, end, color="black", alpha=0.09, linewidth=0, zorder=0)
    whole.set_title(_title(shown), loc="left", weight="bold", fontsize=11)
    draw(part, shown, (begin, end))
    part.set_xlabel(_unit(shown))
    _legend(figure, [shown])
    return figure


def comparison_figure(timelines: Sequence[Timeline], titles: Sequence[str], width: float) -> Figure:
    """Several kernels on one SM each, a part of `width` clocks from the middle of each, at the same scale."""
    shown = [timeline.of_sm(timeline.sms[0]) for timeline in timelines]
    rows = [len(timeline.tracks) for timeline in shown]
    figure = Figure(figsize=(13, 1.4 + 0.6 * len(rows) + 0.4 * sum(rows)), layout="constrained")
    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=[count + 0.8 for count in rows])[:, 0]
    for axes, timeline, title in zip(panels, shown, titles, strict=True):
        begin, _ = steady(timeline, width)
        draw(axes, timeline, (begin, begin + width))
        axes.set_title(title, loc="left", weight="bold", fontsize=11)
    panels[-1].set_xlabel(_unit(shown[-1]))
    _legend(figure, shown)
    return figure


def steady(timeline: Timeline, width: float | None = None) -> Window:
    """A part of the main loop, from its middle: of that width, or some repetitions."""
    loops = [[t for t, phase, _ in track.stamps if PHASES[phase] in ("issue", "multiply", "scores")]
             for track in timeline.tracks]  # fmt: skip
    times = max(loops, key=len, default=[])
    if len(times) < 2:
        return 0, max(1, timeline.duration)
    if width is None:
        width = min(_STEADY * float(np.median(np.diff(times))), timeline.duration)
    middle = times[len(times) // 2]
    return max(0, middle - width / 2), max(0, middle - width / 2) + width


def draw(axes: Axes, timeline: Timeline, window: Window) -> None:
    """The rows of one SM's tracks, in that window."""
    begin, end = window
    for row, (track, products) in enumerate(zip(timeline.tracks, timeline.products, strict=True)):
        for phase, (_, style) in STYLES.items():
            spans = [s for s in track.spans if s.phase == phase and s.end > begin and s.begin < end]
            places = [(s.begin - begin, s.end - s.begin) for s in spans]
            axes.broken_barh(places, (row - 0.4, _TRACK), linewidth=0, **style)
        flying = [p for p in products if p.end > begin and p.begin < end]
        low = row - 0.4 + _TRACK + 0.03
        for colour, places in (
            (_FLIGHT, [(p.begin - begin, p.end - p.begin) for p in flying]),
            (_AT_PEAK, [(p.start - begin, p.stop - p.start) for p in flying]),
        ):
            axes.broken_barh(places, (low, _TENSOR), color=colour, linewidth=0)
    axes.set_xlim(0, end - begin)
    axes.set_ylim(len(timeline.tracks) - 0.45, -0.55)
    blocks = len({track.block for track in timeline.tracks})
    names = [(f"block {t.block}, " if blocks > 1 else "") + f"warp {t.warp}: {t.role}" for t in timeline.tracks]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(figure: Figure, shown: Sequence[Timeline]) -> None:
    used = {span.phase for timeline in shown for track in timeline.tracks for span in track.spans}
    handles = [Patch(label=label, **style) for phase, (label, style) in STYLES.items() if phase in used]
    if "issue" in used:
        handles.append(Patch(color=_FLIGHT, label="wgmma in flight"))
        handles.append(Patch(color=_AT_PEAK, label="... what it takes at peak"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)


def _title(timeline: Timeline) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in timeline.sizes.items())
    time = f"{timeline.time_us:.1f} µs ({timeline.recording_us:.1f} with stamps)" if timeline.time_us else "emulator"
    return f"{timeline.kernel}  {sizes}  SM {timeline.sms[0]}: {time}"


def _unit(timeline: Timeline) -> str:
    return f"{timeline.unit} of the SM" + (f" ({timeline.mhz:,.0f} per µs)" if timeline.mhz else "")
