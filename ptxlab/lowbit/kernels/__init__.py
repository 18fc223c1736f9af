"""The project's kernels: their specs, found by name, and the public calls of each family."""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import sources
from ptxlab.errors import ArgumentError, UnknownKernel
from ptxlab.lowbit.kernels import attention, dequant, gemm, moe, quantize
from ptxlab.lowbit.kernels import load as load_family
from ptxlab.runtime import Outcome, run_spec
from ptxlab.runtime.arguments import check_flags, check_numbers, output_variant
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec
from ptxlab.spec.user_specs import specs_in

_FAMILIES = (dequant, load_family, quantize, gemm, attention, moe)


@cache
def specs() -> dict[str, KernelSpec]:
    """All specs by name, family after family."""
    return {spec.name: spec for family in _FAMILIES for spec in family.SPECS}


def find(name: str) -> tuple[KernelSpec, tuple[Source, ...]]:
    """The spec of a kernel and its sources, the `.ptx` first; `dequant_lqq.cu` selects one source, `NAME:FORM` a form.

    Raises:
        ArgumentError: unknown name (the nearest ones are shown), or a source or form that the kernel does not have.
    """
    if not isinstance(name, str):
        raise ArgumentError("kernel", "a kernel's name; `ptxlab list` shows them", repr(name))
    named, _, form = name.partition(":")
    stem, _, language = named.partition(".")
    if stem not in specs():
        if written := sources.of_kernel(stem):
            family = sources.family_of(stem)
            rule = f"{written[0].label} has no spec yet: add one to SPECS of the family {family}, or name the file"
            raise ArgumentError("kernel", rule, name)
        known = dict.fromkeys([*specs(), *(spec.family for spec in specs().values())])
        raise UnknownKernel(name, difflib.get_close_matches(stem, known, n=3, cutoff=0.5))
    found = sources.of_kernel(stem)
    chosen = tuple(s for s in found if language in ("", s.language))
    if not chosen:
        raise ArgumentError("kernel", f"{stem} comes as {', '.join(s.label for s in found)}", name)
    forms = {spec.form: spec for spec in (specs()[stem], *gemm.FORMS, *attention.FORMS) if spec.name == stem}
    if form not in forms:
        raise ArgumentError("kernel", f"one of {', '.join(spec.label for spec in forms.values())}", name)
    return forms[form], chosen


def resolve_all(target: str) -> list[tuple[KernelSpec | None, tuple[Source, ...], str | None]]:
    """What a command line names: a kernel (`NAME`), a form of it (`NAME:FORM`), one source (`NAME.cu`, `NAME.cu:FORM`),
    a family (`gemm`), `FILE[:entry]`, `FILE.py[:NAME]` with specs of somebody's own.

    Returns:
        For each kernel: the spec (None for a file), the sources, the entry symbol (None: the only one of the file).
    """
    path, _, entry = target.partition(":")
    if Path(path).suffix in (".ptx", ".cu") and (Path(path).is_file() or Path(path).stem not in specs()):
        return [(None, (Source.read(path),), entry or None)]
    if Path(path).suffix == ".py":
        own = specs_in(Path(path))
        chosen = [(spec, found, spec.name) for spec, found in own if entry in ("", spec.name)]
        if not chosen:
            known = ", ".join(spec.name for spec, _ in own)
            raise ArgumentError("kernel", f"one of {known}, which {path} has a spec for", target)
        return [*chosen]
    names = [name for name, spec in specs().items() if spec.family == target] or [target]
    return [(spec, found, spec.name) for spec, found in map(find, names)]


def resolve(target: str) -> tuple[KernelSpec | None, Source, str | None]:
    """The same where one kernel is wanted, with its first source; ArgumentError for a family of several."""
    found = resolve_all(target)
    if len(found) > 1:
        names = ", ".join(str(name) for *_, name in found)
        raise ArgumentError("kernel", f"one of {names}", f"the family {target}")
    ((spec, sources_of, entry),) = found
    return spec, sources_of[0], entry


def run(
    kernel: str,
    *,
    backend: str | None = None,
    checks: Iterable[str] = (),
    unchecked: bool = False,
    seed: int = 0,
    max_steps: int | None = None,
    out: Mapping[str, Any] | None = None,
    out_dtype: Any = None,
    **arrays: Any,
) -> Outcome:
    """Run one of the project's kernels on arrays given by argument name.

    Args:
        kernel: its name, or `name.ptx` / `name.cu` to select a source, `name:form` a form.
        backend: `"gpu"`, `"emulator"`, or None: the GPU if there is one, else the emulator if that is quick enough.
        checks: what the emulator looks for: `lanes`, `race`, `init`, `async`, `divergence`, or `"all"`.
        unchecked: admit values that break the value rules (to look at overflow).
        seed: orders whatever the emulator may do in any order.
        max_steps: instructions that the emulator dispatches at most per wave of blocks; None: `emulator.MAX_STEPS`.
        out: arrays to write into, by argument name; by default allocated; what is read and written may be here.
        out_dtype: of an output that no input settles: a GEMM's is by default `float16`, scaled; `int32` are its
            accumulators, which neither scales nor bias change.
        arrays: inputs by argument name; a number gives a size (`g=64`) that no shape tells.
    """
    spec, found = find(kernel)
    given = {n: v for n, v in arrays.items() if isinstance(v, (int, float, np.number))}
    check_numbers(spec, given)
    check_flags(unchecked=unchecked)
    if not isinstance(out, Mapping | None):
        raise ArgumentError(f"{spec.name}: out", "arrays by name", type(out).__name__)
    return run_spec(
        spec,
        found[0],
        {n: v for n, v in arrays.items() if n not in given},
        sizes=given,
        out=out,
        backend=backend,
        checks=checks,
        unchecked=unchecked,
        wanted=output_variant(spec, out_dtype),
        seed=seed,
        max_steps=max_steps,
    )
