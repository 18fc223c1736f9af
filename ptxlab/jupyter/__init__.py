"""The workbench in Jupyter: `%load_ext ptxlab` gives the magics `%%ptx` and `%%cuda`, and displays that can be read.

`cell` compiles what `magics` are given; `displays` show kernels, launches and findings, `registers` words in binary,
lane by lane; `widgets` has the debugger. `errors` prints errors in one line. Only `page` writes HTML. Other rooms and
packages register displays of their own types (`ptxlab.registry`).
"""

from typing import Any

from ptxlab import _moved, registry
from ptxlab.errors import PtxlabError
from ptxlab.jupyter import errors
from ptxlab.jupyter.cell import Cell, compile_cell
from ptxlab.jupyter.displays import PAGES
from ptxlab.jupyter.widgets import debug

__all__ = ["Cell", "compile_cell", "debug", "register"]


def register(shell: Any) -> None:
    """Enter the magics, the HTML of the workbench's types, and a handler of its errors: `%load_ext ptxlab` calls it.

    Their `repr` stays as it is: a terminal shows what it always did.
    """
    from ptxlab.jupyter.magics import PtxlabMagics

    shell.register_magics(PtxlabMagics)
    shell.set_custom_exc((PtxlabError,), errors.show)
    pages = shell.display_formatter.formatters["text/html"]
    for kind, show in PAGES.items():
        pages.for_type(kind, show)
    for _, register_displays in registry.load_all("displays"):
        register_displays(shell)


def __getattr__(name: str) -> Any:
    """Look up a name that has moved to `ptxlab.lowbit.jupyter`."""
    return _moved.name_in(__name__, name)
