"""Gantt charts of timelines: a row per warp group of an SM, and one for its tensor cores."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ptxlab.profile.timeline import Timeline, Window

# What is waited for is pale, so that work stands out.
STYLES: dict[str, tuple[str, str]] = {
    "setup": ("set up", "#b9bec6"),
    "load": ("ask for copies", "#1b9e77"),
    "wait_copy": ("wait for a copy", "#e9ecf0"),
    "wait_group": ("wait for other warps", "#f6c9c5"),
    "wait_mma": ("wait for wgmma", "#cfe1f2"),
    "dequantise": ("dequantise", "#e08214"),
    "issue": ("issue wgmma", "#41b6c4"),
    "multiply": ("multiply (mma.sync)", "#2f6db5"),
    "scores": ("scores: dequantise K, Q K", "#e08214"),
    "softmax": ("softmax", "#8073ac"),
    "values": ("values: dequantise V, P V", "#2f6db5"),
    "reduce": ("reduce", "#c51b7d"),
    "epilogue": ("epilogue", "#5e3c99"),
}
_TENSOR = ("#08306b", "#4292c6", "#6a51a3", "#41ab5d")  # warp groups that issue take turns
_WHOLE = 0.6  # of the launch: so large a part is not shown beside it


def timeline_figure(timeline: Timeline) -> Figure:
    """Draw the first SM's timeline: above the whole launch, below a window in the main loop."""
    shown_timeline = timeline.of_sm(timeline.sms[0])
    begin, end = shown_timeline.steady()
    parts = [(0.0, float(shown_timeline.duration))]
    if end - begin < _WHOLE * shown_timeline.duration:
        parts.append((begin, end))
    rows = len(shown_timeline.tracks) + any(shown_timeline.products)
    figure = Figure(figsize=(13, 1.3 + len(parts) * (0.45 + 0.34 * rows)), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
    for axes, part in zip(panels, parts, strict=True):
        draw(axes, shown_timeline, part)
    if len(parts) > 1:
        panels[0].axvspan(begin, end, color="black", alpha=0.09, linewidth=0, zorder=0)
    sizes = ", ".join(
        f"{n}={size:.4g}" if isinstance(size, float) else f"{n}={size}" for n, size in timeline.sizes.items()
    )
    figure.suptitle(f"{timeline.kernel}  {describe_duration(timeline)}\n{sizes}", x=0.01, ha="left", fontsize=10)
    panels[-1].set_xlabel(_unit(shown_timeline))
    _legend(figure, [shown_timeline], parts[:1])
    return figure


def comparison_figure(timelines: Sequence[Timeline], titles: Sequence[str], width: float, finding: str = "") -> Figure:
    """Draw several launches, one SM each, at the same scale.

    A panel shows `width` clocks from the middle of the launch's main loop.
    """
    sm_timelines = [timeline.of_sm(timeline.sms[0]) for timeline in timelines]
    windows = [timeline.steady(width) for timeline in sm_timelines]
    rows = [
        sum(map(bool, _active(shown_timeline, window))) + 1
        for shown_timeline, window in zip(sm_timelines, windows, strict=True)
    ]
    figure = Figure(figsize=(13, 1.2 + 0.5 * len(rows) + 0.34 * sum(rows)), layout="constrained")
    panels = figure.subplots(len(sm_timelines), 1, squeeze=False, height_ratios=[count + 0.6 for count in rows])[:, 0]
    for axes, timeline, window, title in zip(panels, sm_timelines, windows, titles, strict=True):
        draw(axes, timeline, window)
        axes.set_title(title, loc="left", fontsize=10.5, weight="bold")
        if axes is not panels[-1]:
            axes.set_xticklabels([])
    panels[-1].set_xlabel(_unit(*sm_timelines))
    if finding:
        figure.suptitle(finding, x=0.01, ha="left", fontsize=11, weight="bold")
    _legend(figure, sm_timelines, windows)
    return figure


def describe_duration(timeline: Timeline) -> str:
    """Describe in words how long the launch took."""
    if not timeline.time_us:
        return f"{timeline.duration:,} steps of the emulator"
    device = str(timeline.device.get("slug", "")).upper()
    return f"{timeline.time_us:.1f} µs on an {device}, {timeline.recording_us:.1f} with stamps"


def _active(timeline: Timeline, window: Window) -> list[bool]:
    """Return for each track whether it overlaps the window."""
    return [track.stamps[0][0] < window[1] and track.stamps[-1][0] > window[0] for track in timeline.tracks]


def draw(axes: Axes, timeline: Timeline, window: Window) -> None:
    """Draw the tracks of one SM in that window.

    Below them are its tensor cores, as busy as they are at the least.
    """
    begin, end = window
    active_products = _active(timeline, window)
    names = []
    tracks = [track for track, is_active in zip(timeline.tracks, active_products, strict=True) if is_active]
    has_several_blocks = len({track.block for track in tracks}) > 1
    for row, track in enumerate(tracks):
        block = f"block {track.block}, " if has_several_blocks else ""
        names.append(f"{block}warp {track.warp}: {track.role}")
        for phase, (_, colour) in STYLES.items():
            spans = [(s.begin, s.end) for s in track.spans if s.phase == phase]
            axes.broken_barh(_clip_spans(spans, window), (row - 0.4, 0.8), linewidth=0, color=colour)
    issuers = [p for p, is_active in zip(timeline.products, active_products, strict=True) if p and is_active]
    for number, products in enumerate(issuers):
        places = _clip_spans([(p.start, p.stop) for p in products], window)
        axes.broken_barh(places, (len(tracks) - 0.4, 0.8), linewidth=0, color=_TENSOR[number % len(_TENSOR)])
    if issuers:
        names.append(f"tensor cores: {timeline.busy(window):.0%}")
    axes.set_xlim(0, end - begin)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _clip_spans(spans: Sequence[tuple[float, float]], window: Window) -> list[tuple[float, float]]:
    """Clip spans to the window; return (begin, length) of each, counted from the window's beginning."""
    begin, end = window
    clipped_spans = [(max(a, begin), min(b, end)) for a, b in spans]
    return [(a - begin, b - a) for a, b in clipped_spans if b > a]


def _legend(figure: Figure, shown: Sequence[Timeline], windows: Sequence[Window]) -> None:
    spans = [
        (s, window) for timeline, window in zip(shown, windows, strict=True) for t in timeline.tracks for s in t.spans
    ]
    used_phases = {span.phase for span, (begin, end) in spans if span.begin < end and span.end > begin}
    handles = [Patch(label=label, color=colour) for phase, (label, colour) in STYLES.items() if phase in used_phases]
    issuers = max(sum(map(bool, timeline.products)) for timeline in shown) if "issue" in used_phases else 0
    for number, colour in enumerate(_TENSOR[: min(issuers, len(_TENSOR))], 1):
        handles.append(Patch(color=colour, label=f"tensor cores: wgmma of issuing warp group {number}, at peak rate"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)


def _unit(*shown: Timeline) -> str:
    rates = sorted(timeline.mhz for timeline in shown)
    if not rates[0]:
        return shown[0].unit
    per_us = " to ".join(dict.fromkeys(f"{rate:,.0f}" for rate in (rates[0], rates[-1])))
    return f"{shown[0].unit} of the SM ({per_us} per µs)"
