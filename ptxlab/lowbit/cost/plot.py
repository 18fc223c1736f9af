"""Gantt charts of schedules of tiles: a row per SM, INT4 and INT8 tiles in two colours."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ptxlab.lowbit.cost.schedule import PIECES, Costs, Tile, TileWork, lower_bounds, makespan, schedule
from ptxlab.plot import BLUE, ORANGE, PALE

_NUMBERED = 8  # SMs: with more, the tiles are too small for their numbers
_READABLE = 0.5  # INT4 tiles, likewise


def schedule_figure(problems: Mapping[str, tuple[Sequence[Tile], int, Costs]], names: Sequence[str]) -> Figure:
    """Draw a row of panels per problem (tiles, SMs, costs), with its title, and a column per schedule."""
    figure = Figure(figsize=(4.8 * len(names), 0.5 + 3 * len(problems)), layout="constrained")
    panels = figure.subplots(len(problems), len(names), squeeze=False)
    for row, (title, (tiles, sms, costs)) in zip(panels, problems.items(), strict=True):
        works_by_schedule = {name: schedule(name, tiles, sms, costs) for name in names}
        longest_time = max(map(makespan, works_by_schedule.values()))
        least_time = lower_bounds(tiles, sms, costs)[0]
        for axes, (name, works) in zip(row, works_by_schedule.items(), strict=True):
            _draw(axes, works, sms, {tile: number for number, tile in enumerate(tiles)})
            axes.axvline(least_time, color="black", linewidth=1, linestyle="--")
            axes.set_xlim(0, 1.02 * longest_time)
            busy_share = least_time / makespan(works)
            axes.set_title(
                f"{name}: {makespan(works):.4g}, SMs busy {busy_share:.0%}", loc="left", fontsize=10, weight="bold"
            )
        row[0].set_ylabel(f"{title}\nSM")
        for axes in row:
            axes.set_xlabel("time, in INT4 tiles")
    handles = [
        Patch(color=BLUE, label="INT4 tile"),
        Patch(color=ORANGE, label="INT8 tile"),
        Patch(facecolor=PALE, label="idle"),
        Patch(fill=False, linestyle="--", label="all work over all SMs"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def _draw(axes: Axes, works: Sequence[TileWork], sms: int, numbers: Mapping[Tile, int]) -> None:
    axes.set_facecolor(PALE)
    half_height = 0.45 if sms <= _NUMBERED else 0.5
    for int8, colour in ((False, BLUE), (True, ORANGE)):
        works_of_kind = [work for work in works if work.tile.int8 == int8]
        boxes = [
            [
                (w.start, w.sm - half_height),
                (w.end, w.sm - half_height),
                (w.end, w.sm + half_height),
                (w.start, w.sm + half_height),
            ]
            for w in works_of_kind
        ]
        edges = {"edgecolors": "white", "linewidths": 0.8} if sms <= _NUMBERED else {"linewidths": 0}
        axes.add_collection(PolyCollection(boxes, facecolors=colour, **edges))
    if sms <= _NUMBERED:
        for work in (work for work in works if work.end - work.start > _READABLE):
            part = "" if len(work.pieces) == PIECES else f"\n{len(work.pieces)}/{PIECES}"
            middle = (work.start + work.end) / 2
            axes.text(
                middle, work.sm, f"{numbers[work.tile]}{part}", ha="center", va="center", fontsize=7, color="white"
            )
        axes.set_yticks(range(sms))
    axes.set_ylim(sms - 0.5, -0.5)
