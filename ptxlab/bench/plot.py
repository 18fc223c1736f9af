"""A record as a picture: how near every row comes to its floor, a panel per measure."""

from itertools import groupby
from operator import attrgetter
from statistics import geometric_mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ptxlab.arithmetic import ceil_div
from ptxlab.bench.record import Record, Row

_COLUMNS = 3


def record_figure(record: Record) -> Figure:
    """Draw floor over time, by kernel where there is one size, otherwise over the floor."""
    by_measure = attrgetter("measure")
    measures = {measure: list(rows) for measure, rows in groupby(sorted(record.rows, key=by_measure), key=by_measure)}
    columns = min(_COLUMNS, len(measures))
    lines = ceil_div(len(measures), columns)
    figure = Figure(figsize=(1 + 5.2 * columns, 0.6 + 3.8 * lines), layout="constrained")
    figure.suptitle(f"{record.suite} on {record.device['name']}", x=0.01, ha="left", weight="bold")
    colours = {name: f"C{index % 10}" for index, name in enumerate(dict.fromkeys(map(_name, record.rows)))}
    figure.subplots(lines, columns)
    for axes in figure.axes[len(measures) :]:
        axes.set_visible(False)
    for axes, (measure, rows) in zip(figure.axes, measures.items(), strict=False):
        _panel(axes, rows, colours)
        mean = geometric_mean(row.fraction for row in rows)
        axes.set_title(f"{measure}: {mean:.0%} of the floor in the mean", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _name(row: Row) -> str:
    return f"{row.kernel}.{row.source}"


def _panel(axes: Axes, rows: list[Row], colours: dict[str, str]) -> None:
    rows_by_kernel = {name: [row for row in rows if _name(row) == name] for name in dict.fromkeys(map(_name, rows))}
    if all(len(kernel_rows) == 1 for kernel_rows in rows_by_kernel.values()):
        axes.barh(list(rows_by_kernel), [kernel_rows[0].fraction for kernel_rows in rows_by_kernel.values()])
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--", label="floor")
        axes.invert_yaxis()
        axes.set_xlabel("floor / time")
    else:
        for name, kernel_rows in rows_by_kernel.items():
            floors, fractions = [row.floor_us for row in kernel_rows], [row.fraction for row in kernel_rows]
            axes.plot(floors, fractions, "o", markersize=4, color=colours[name], label=name)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="floor")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("floor, µs")
        axes.set_ylabel("floor / time")
    axes.legend(fontsize=7, framealpha=0.8)
