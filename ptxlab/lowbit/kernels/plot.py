"""Who holds what after a `load_*` kernel, as a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ptxlab.lowbit.kernels import holders
from ptxlab.lowbit.kernels.holders import RegisterMap, WarpAccess
from ptxlab.plot import RED

_PLATE: dict[str, Any] = {"boxstyle": "square,pad=0.15", "color": "#ffffffe0", "linewidth": 0}  # under a label


def load_picture(name: str) -> Figure:
    """Draw which lane holds what after a `load_*` kernel, and its banks; beside a wrong kernel the right one."""
    register_maps = [holders.map_registers(name)]
    if register_maps[0].wrong.any():
        register_maps.append(holders.map_registers(holders.RIGHT))
    return load_figure(register_maps, holders.shared_accesses(name))


def load_figure(register_maps: Sequence[RegisterMap], accesses: Sequence[WarpAccess]) -> Figure:
    """Draw warp 0's rows of the tile by lane (one panel per kernel), and the banks that its loads meet.

    Args:
        register_maps: the kernels to compare, the one in question first.
        accesses: the first kernel's loads from shared memory, warp 0.
    """
    figure = Figure(figsize=(15, 6.4 * len(register_maps)), layout="constrained")
    axes_by_panel: dict[str, Axes] = figure.subplot_mosaic(
        [[register_map.name, "banks"] for register_map in register_maps], width_ratios=(1.35, 1)
    )
    for register_map in register_maps:
        _draw_lanes(axes_by_panel[register_map.name], register_map)
    _draw_banks(axes_by_panel["banks"], register_maps[0].name, accesses)
    return figure


def _draw_lanes(axes: Axes, register_map: RegisterMap) -> None:
    """Draw who holds warp 0's rows: lanes by colour, threads and registers as labels, red if the MMA wants others."""
    rows, columns = 16, 64
    lanes = register_map.thread[:rows, :columns] % 32
    axes.imshow(lanes, cmap="twilight", vmin=0, vmax=32, interpolation="nearest", aspect="auto")
    for row in range(rows):
        for column in range(0, columns, 4):
            label = f"{register_map.thread[row, column]}.a{register_map.register[row, column]}"
            is_wrong = register_map.wrong[row, column : column + 4].any()
            style: dict[str, Any] = {"color": "white", "weight": "bold"} if is_wrong else {"color": "black"}
            box = {**_PLATE, "color": RED} if is_wrong else _PLATE
            axes.text(column + 1.5, row, label, ha="center", va="center", fontsize=6.5, bbox=box, **style)
    share = register_map.wrong.mean()
    verdict = f"{share:.0%} not where the MMA wants it (red)" if share else "what the MMA wants"
    axes.set_title(f"{register_map.name}: {verdict}", loc="left", weight="bold", fontsize=11)
    axes.set_xticks(range(0, columns, 8))
    axes.set_xlabel("input channel; label: thread and register whose bytes 0-3 are these four channels; colour: lane")
    axes.set_ylabel("output channel")


def _draw_banks(axes: Axes, name: str, accesses: Sequence[WarpAccess]) -> None:
    """Draw one line per wavefront: the lanes whose words each of the 32 banks delivers."""
    fronts = [(access, front) for access in accesses for front in access.fronts]
    grid = np.full((len(fronts), 32), np.nan)
    for line, (_, front) in enumerate(fronts):
        for bank, lanes in front.items():
            grid[line, bank] = lanes[0]
            axes.text(bank, line, str(lanes[0]), ha="center", va="center", fontsize=6, bbox=_PLATE)
    axes.imshow(grid, cmap="twilight", vmin=0, vmax=32, interpolation="nearest", aspect="auto")
    min_wavefronts = sum(access.min_wavefronts for access in accesses)
    axes.set_title(
        f"{name}: {len(fronts)} wavefronts, {min_wavefronts} at best", loc="left", weight="bold", fontsize=11
    )
    axes.set_xlabel("bank; label: lane")
    axes.set_ylabel("wavefront")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
