"""A profile as a picture: one page of one launch, or of two beside each other."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from ptxlab.plot import BLUE, GREY, ORANGE
from ptxlab.profile.nsight import BUSY, FIGURES, Profile, amount

_COLOURS = (BLUE, ORANGE)
_LINES, _REASONS = 7, 9  # that the page shows
_TEXT: dict[str, Any] = {"family": "monospace", "fontsize": 8, "va": "top"}


def page_figure(profiles: Sequence[Profile], words: Sequence[str] = ()) -> Figure:
    """Draw the page of one profile, or of two with their differences in words below."""
    heights = [4.2, 3.4, *([0.12 * len(words) + 0.2] if words else [])]
    figure = Figure(figsize=(15, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(_title(profiles), x=0.01, ha="left", weight="bold")
    rows = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    numbers, busy, stalls = rows[0].subplots(1, 3, width_ratios=(1.15, 1, 1))
    _numbers(numbers, profiles)
    _bars(busy, profiles, [(_label(name), [profile.figures[name] for profile in profiles]) for name in BUSY])
    busy.set_title("Busy: % of what the unit could do", loc="left", weight="bold", fontsize=10)
    busy.set_xlim(0, 105)
    _bars(stalls, profiles, _reasons(profiles))
    stalls.set_title("Stalled warps wait for: % of the samples", loc="left", weight="bold", fontsize=10)
    for axes, profile, colour in zip(
        np.atleast_1d(rows[1].subplots(1, len(profiles))), profiles, _COLOURS, strict=False
    ):
        _carriers(axes, profile, colour, 165 // len(profiles))
    if words:
        axes = rows[2].subplots()
        axes.axis("off")
        half = len(words) // 2 + 1  # two columns of sentences
        for place, part in ((0, words[:half]), (0.5, words[half:])):
            axes.text(place, 1, "\n".join(part), fontsize=9, va="top", linespacing=1.5, transform=axes.transAxes)
    return figure


def _title(profiles: Sequence[Profile]) -> str:
    names = " beside ".join(profile.kernel for profile in profiles)
    sizes = ", ".join(f"{name} = {size}" for name, size in profiles[0].sizes.items())
    return f"{names}: {sizes}, {profiles[0].device}" if sizes else f"{names}, {profiles[0].device}"


def _label(name: str) -> str:
    return next(figure.label for figure in FIGURES if figure.name == name)


def _numbers(axes: Axes, profiles: Sequence[Profile]) -> None:
    """Draw the figures that are no shares as a table."""
    axes.axis("off")
    shown_figures = [
        f for f in FIGURES if f.name not in BUSY and any(f.name in profile.figures for profile in profiles)
    ]
    cells = [[amount(f, profile.figures.get(f.name)) for profile in profiles] for f in shown_figures]
    table = axes.table(
        cells,
        rowLabels=[f.label for f in shown_figures],
        bbox=Bbox.from_bounds(0.36, 0, 0.64, 1),
        edges="open",
        cellLoc="right",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (_, column), cell in table.get_celld().items():
        if column >= 0 and len(profiles) > 1:
            cell.get_text().set_color(_COLOURS[column])


def _reasons(profiles: Sequence[Profile]) -> list[tuple[str, list[float]]]:
    largest_share = {
        reason: max(profile.stalls.get(reason, 0) for profile in profiles)
        for profile in profiles
        for reason in profile.stalls
    }
    ranked_reasons = sorted(largest_share, key=lambda reason: -largest_share[reason])[:_REASONS]
    return [
        (reason.replace("_", " "), [100 * profile.stalls.get(reason, 0) for profile in profiles])
        for reason in ranked_reasons
    ]


def _bars(axes: Axes, profiles: Sequence[Profile], rows: Sequence[tuple[str, list[float]]]) -> None:
    """Draw a row of bars per name, with a bar per profile."""
    height = 0.8 / len(profiles)
    for index, (profile, colour) in enumerate(zip(profiles, _COLOURS, strict=False)):
        places = np.arange(len(rows)) + (index - (len(profiles) - 1) / 2) * height
        bars = axes.barh(places, [values[index] for _, values in rows], height, color=colour, label=profile.kernel)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    if len(profiles) > 1:
        axes.legend(frameon=False, fontsize=8, loc="lower right")


def _carriers(axes: Axes, profile: Profile, colour: str, width: int) -> None:
    """Draw the source lines with the most stalls (`Profile.carriers`) as a table with bars."""
    axes.axis("off")
    sample_note = f"{profile.samples:,} warps sampled, of which {profile.issuing:.0%} issued"
    axes.set_title(f"Where {profile.kernel} waits ({sample_note})", loc="left", weight="bold", fontsize=10)
    shown_carriers = profile.carriers[:_LINES]
    largest_share = max((carrier.share for carrier in shown_carriers), default=1.0)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(shown_carriers), 0)
    for row, carrier in enumerate(shown_carriers):
        reason = next(iter(carrier.reasons), "").replace("_", " ")
        axes.barh(row + 0.45, 0.09 * carrier.share / largest_share, 0.7, color=colour, alpha=0.35)
        axes.text(0.005, row + 0.25, f"{carrier.share:.1%}", weight="bold", **_TEXT)
        carrier_text = f"{carrier.where}, {reason}: {carrier.sass}"
        for depth, text, shade in ((0.08, carrier_text, GREY), (0.5, carrier.text, "black")):
            axes.text(0.1, row + depth, textwrap.shorten(text, width, placeholder=" …"), color=shade, **_TEXT)
