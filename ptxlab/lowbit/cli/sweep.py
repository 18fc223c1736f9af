"""The command `sweep`: a kernel's compiled variants, timed on one problem."""

import math
from dataclasses import asdict
from typing import Annotated

import typer

from ptxlab import registry
from ptxlab.cli.common import AsJson, Shape, console, expects, print_json, progress_bar, sizes_text, table
from ptxlab.runtime.arguments import parse_sizes

PANEL = "Measure"


def sweep(
    target: Annotated[str, typer.Argument(help="A kernel of the W4A8 GEMM or of attention.")],
    define: Annotated[
        list[str], typer.Option("-D", metavar="NAME=N[,N..]", help="Constant and its values: -D STAGES=4,6,8.")
    ],
    shape: Shape = None,
    as_json: AsJson = False,
) -> None:
    """Time and check every combination of a kernel's constants on the GPU, against the variant its spec chooses."""
    from ptxlab.lowbit.bench import sweep as sweeps
    from ptxlab.profile import launch_target

    spec, *_ = registry.resolve(target)
    if spec is None:
        raise expects("sweep", "a kernel of the W4A8 GEMM or of attention", target)
    sizes = launch_target.sizes_of(spec, parse_sizes("--shape", shape) if shape else {})
    constants = _constants(define)
    steps = 1 + math.prod(map(len, constants.values()))  # they are compiled first; the spec's choice may be one more
    with progress_bar(f"sweep {target}", steps, quiet=as_json) as advance:
        timed_variants = sweeps.sweep(spec, sizes, constants, advance)
    if as_json:
        return print_json([asdict(variant) for variant in timed_variants])
    title = f"{spec.name} {sizes_text(sizes)}"
    columns = [*(f"{name}>" for name in constants), "µs>", "speed>", "registers>", "local bytes>", ""]
    console.print(table(title, columns, sweeps.lines(timed_variants)))


def _constants(define: list[str]) -> dict[str, list[int]]:
    """Parse the values of every constant, `STAGES=4,6,8`."""
    choices: dict[str, list[int]] = {}
    for text in define:
        name, _, values = text.partition("=")
        if name in choices:
            raise expects("-D", "each name once", name)
        try:
            choices[name] = [int(number) for number in values.split(",")]
        except ValueError:
            raise expects("-D", "NAME=INTEGER[,INTEGER..]", text) from None
    return choices
