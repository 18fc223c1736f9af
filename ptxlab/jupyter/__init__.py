"""The workbench in Jupyter: `%load_ext ptxlab` gives the magics `%%ptx` and `%%cuda`, and displays that can be read.

`cell` compiles what `magics` are given; `displays` show kernels, packed weights and findings, `words` bits lane by
lane, over `page`, which is all that knows of HTML.
"""

from typing import Any

from ptxlab.jupyter.cell import Cell, compile_cell
from ptxlab.jupyter.displays import PAGES

__all__ = ["Cell", "compile_cell", "register"]


def register(shell: Any) -> None:
    """What `%load_ext ptxlab` does: enter the magics, and the HTML of the workbench's types.

    Their `repr` stays as it is: a terminal shows what it always did.
    """
    from ptxlab.jupyter.magics import PtxlabMagics

    shell.register_magics(PtxlabMagics)
    pages = shell.display_formatter.formatters["text/html"]
    for kind, show in PAGES.items():
        pages.for_type(kind, show)
