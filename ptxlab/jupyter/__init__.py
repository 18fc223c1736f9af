"""The workbench in Jupyter: `%load_ext ptxlab` gives the magics `%%ptx` and `%%cuda`, and displays that can be read.

`cell` compiles what `magics` are given; `displays` show kernels, packed weights, launches and findings, `registers`
words in binary, lane by lane. `identities` shows a dequantiser's arithmetic step by step; `maps` computes which lane
holds which weight and `drawing` draws it; `widgets` adds sliders to both, and the debugger. `errors` prints errors in
one line. Only `page` writes HTML.
"""

from typing import Any

from ptxlab.errors import PtxlabError
from ptxlab.jupyter import errors
from ptxlab.jupyter.cell import Cell, compile_cell
from ptxlab.jupyter.displays import PAGES
from ptxlab.jupyter.widgets import debug, dequant_sliders, layout_explorer
from ptxlab.lowbit.jupyter import maps
from ptxlab.lowbit.jupyter.drawing import HolderView
from ptxlab.lowbit.jupyter.identities import Identities, identities

__all__ = [
    "Cell",
    "HolderView",
    "Identities",
    "compile_cell",
    "debug",
    "dequant_sliders",
    "identities",
    "layout_explorer",
    "register",
    "who_holds",
]


def who_holds(name: str, lane: int | None = None) -> HolderView:
    """Which lane holds which element; in a notebook it shows itself as a picture.

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
    """What `%load_ext ptxlab` does: enter the magics, the HTML of the workbench's types, and a handler of its errors.

    Their `repr` stays as it is: a terminal shows what it always did.
    """
    from ptxlab.jupyter.magics import PtxlabMagics

    shell.register_magics(PtxlabMagics)
    shell.set_custom_exc((PtxlabError,), errors.show)
    pages = shell.display_formatter.formatters["text/html"]
    for kind, show in PAGES.items():
        pages.for_type(kind, show)
