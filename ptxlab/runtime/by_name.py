"""`run`: one call of a registered kernel by its name."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ptxlab.emulator import EmulatorOptions
from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.registry import find
from ptxlab.runtime import Outcome, run_spec
from ptxlab.runtime.arguments import check_flags, check_numbers, output_variant


@break_graph
def run(
    kernel: str,
    *,
    backend: str | None = None,
    checks: str | Iterable[str] | None = None,
    unchecked: bool = False,
    seed: int | None = None,
    max_steps: int | None = None,
    options: EmulatorOptions | None = None,
    out: Mapping[str, Any] | None = None,
    out_dtype: Any = None,
    **arrays: Any,
) -> Outcome:
    """Run one of the project's kernels on arrays given by argument name.

    Args:
        kernel: its name, or `name.ptx` / `name.cu` to select a source, `name:form` a form.
        backend: `"gpu"`, `"emulator"`, or None: the GPU if there is one, else the emulator if that is quick enough.
        unchecked: admit values that break the value rules (to look at overflow).
        options: how the emulator runs it.
        checks, seed, max_steps: fields of `EmulatorOptions`, in place of those of `options`.
        out: arrays to write into, by argument name; by default allocated; what is read and written may be here.
        out_dtype: of an output that no input settles: a GEMM's is by default `float16`, scaled; `int32` are its
            accumulators, which neither scales nor bias change.
        arrays: inputs by argument name; a number gives a size (`g=64`) that no shape tells.
    """
    spec, sources = find(kernel)
    sizes = {n: v for n, v in arrays.items() if isinstance(v, (int, float, np.number))}
    check_numbers(spec, sizes)
    check_flags(unchecked=unchecked)
    if not isinstance(out, Mapping | None):
        raise ArgumentError(f"{spec.name}: out", "arrays by name", type(out).__name__)
    return run_spec(
        spec,
        sources[0],
        {n: v for n, v in arrays.items() if n not in sizes},
        sizes=sizes,
        out=out,
        backend=backend,
        checks=checks,
        unchecked=unchecked,
        wanted=output_variant(spec, out_dtype),
        options=options,
        seed=seed,
        max_steps=max_steps,
    )
