"""The project's kernels: their specs, found by name, and the Python face of each family."""

import difflib
from functools import cache

from ptxlab import sources
from ptxlab.errors import ArgumentError
from ptxlab.kernels import dequant
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec

_FAMILIES = (dequant,)


@cache
def specs() -> dict[str, KernelSpec]:
    """All specs by name, family after family."""
    return {spec.name: spec for family in _FAMILIES for spec in family.SPECS}


def find(name: str) -> tuple[KernelSpec, tuple[Source, ...]]:
    """The spec of a kernel and its sources, the `.ptx` first; `dequant_lqq.cu` selects one source.

    Raises:
        ArgumentError: unknown name (the nearest ones are shown), or a source that the kernel does not have.
    """
    stem, _, language = name.partition(".")
    if stem not in specs():
        near = difflib.get_close_matches(stem, specs(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "`ptxlab list` shows them"
        raise ArgumentError("kernel", f"a kernel's name; {hint}", name)
    found = sources.of_kernel(stem)
    chosen = tuple(s for s in found if language in ("", s.language))
    if not chosen:
        raise ArgumentError("kernel", f"{stem} comes as {', '.join(s.label for s in found)}", name)
    return specs()[stem], chosen
