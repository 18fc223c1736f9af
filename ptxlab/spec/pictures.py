"""`Pictures`: what `ptxlab show` tells of a family's kernels beside contract and source; a family registers its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptxlab.spec import KernelSpec


@dataclass(frozen=True)
class Pictures:
    """Pictures of a kernel.

    Attributes:
        draws: whether there is one of this kernel.
        kernels: which kernels have one, for a message: `load_* kernel`.
        as_text: for a terminal.
        figure: a Matplotlib `Figure`.
    """

    draws: Callable[[KernelSpec], bool]
    kernels: str
    as_text: Callable[[KernelSpec], str]
    figure: Callable[[KernelSpec], Any]
