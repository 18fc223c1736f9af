"""Who holds what after a `load_*` kernel, as a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ptxlab.lowbit.kernels import holders
from ptxlab.lowbit.kernels.holders import Holders, WarpAccess
from ptxlab.plot import RED

_PLATE: dict[str, Any] = {"boxstyle": "square,pad=0.15", "color": "#ffffffe0", "linewidth": 0}  # under a label


def load_picture(name: str) -> Figure:
    """Draw which lane holds what after a `load_*` kernel, and its banks; beside a wrong kernel the right one."""
    held = [holders.holders(name)]
    if held[0].wrong.any():
        held.append(holders.holders(holders.RIGHT))
    return load_figure(held, holders.shared_accesses(name))


def load_figure(held: Sequence[Holders], accesses: Sequence[WarpAccess]) -> Figure:
    """Draw warp 0's rows of the tile by lane (one panel per kernel), and the banks that its loads meet.

    Args:
        held: the kernels to compare, the one in question first.
        accesses: the first kernel's loads from shared memory, warp 0.
    """
    figure = Figure(figsize=(15, 6.4 * len(held)), layout="constrained")
    panels: dict[str, Axes] = figure.subplot_mosaic([[one.name, "banks"] for one in held], width_ratios=(1.35, 1))
    for one in held:
        _lane_tile(panels[one.name], one)
    _bank_grid(panels["banks"], held[0].name, accesses)
    return figure


def _lane_tile(axes: Axes, held: Holders) -> None:
    rows, columns = 16, 64
    lanes = held.thread[:rows, :columns] % 32
    axes.imshow(lanes, cmap="twilight", vmin=0, vmax=32, interpolation="nearest", aspect="auto")
    for row in range(rows):
        for column in range(0, columns, 4):
            label = f"{held.thread[row, column]}.a{held.register[row, column]}"
            wrong = held.wrong[row, column : column + 4].any()
            style: dict[str, Any] = {"color": "white", "weight": "bold"} if wrong else {"color": "black"}
            box = {**_PLATE, "color": RED} if wrong else _PLATE
            axes.text(column + 1.5, row, label, ha="center", va="center", fontsize=6.5, bbox=box, **style)
    share = held.wrong.mean()
    verdict = f"{share:.0%} not where the MMA wants it (red)" if share else "what the MMA wants"
    axes.set_title(f"{held.name}: {verdict}", loc="left", weight="bold", fontsize=11)
    axes.set_xticks(range(0, columns, 8))
    axes.set_xlabel("input channel; label: thread and register whose bytes 0-3 are these four channels; colour: lane")
    axes.set_ylabel("output channel")


def _bank_grid(axes: Axes, name: str, accesses: Sequence[WarpAccess]) -> None:
    """Draw one line per wavefront: the lanes whose words each of the 32 banks delivers."""
    fronts = [(access, front) for access in accesses for front in access.fronts]
    grid = np.full((len(fronts), 32), np.nan)
    for line, (_, front) in enumerate(fronts):
        for bank, lanes in front.items():
            grid[line, bank] = lanes[0]
            axes.text(bank, line, str(lanes[0]), ha="center", va="center", fontsize=6, bbox=_PLATE)
    axes.imshow(grid, cmap="twilight", vmin=0, vmax=32, interpolation="nearest", aspect="auto")
    least = sum(access.least for access in accesses)
    axes.set_title(f"{name}: {len(fronts)} wavefronts, {least} at best", loc="left", weight="bold", fontsize=11)
    axes.set_xlabel("bank; label: lane")
    axes.set_ylabel("wavefront")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
