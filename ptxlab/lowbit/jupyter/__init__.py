"""The low-bit formats in Jupyter: a dequantiser's arithmetic step by step, and which lane holds which weight.

`identities` shows the arithmetic, `maps` computes who holds what and `drawing` draws it, `sliders` go over both;
`displays` show packed weights.
"""

from typing import Any

from ptxlab.lowbit.jupyter import maps
from ptxlab.lowbit.jupyter.displays import of_weight
from ptxlab.lowbit.jupyter.drawing import HolderView
from ptxlab.lowbit.jupyter.identities import Identities, identities
from ptxlab.lowbit.jupyter.sliders import dequant_sliders, layout_explorer
from ptxlab.lowbit.layout import PackedWeight

__all__ = [
    "HolderView",
    "Identities",
    "dequant_sliders",
    "identities",
    "layout_explorer",
    "register",
    "who_holds",
]


def who_holds(name: str, lane: int | None = None) -> HolderView:
    """Show which lane holds which element; in a notebook the result displays as a picture.

    Args:
        name: a fragment (`mma.m16n8k32.a`, `wgmma.m64k32.a`, `ldmatrix.x4` ...), a layout of `ptxlab.pack`, or a
            `load_*` kernel that loads a tile.
        lane: the one to bring out; None: none.

    Raises:
        ArgumentError: no such map (the nearest ones are shown), or no such lane.
    """
    view = HolderView(maps.find(name), lane)
    if lane is not None:
        view.holders.held_by(lane)
    return view


def register(shell: Any) -> None:
    """Register the displays of packed weights with a Jupyter shell."""
    shell.display_formatter.formatters["text/html"].for_type(PackedWeight, of_weight)
