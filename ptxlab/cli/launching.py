"""What `run` and `debug` share: their options, and a launch solved from a kernel, arrays by name, and these options."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

import numpy as np
import typer

from ptxlab import runtime
from ptxlab.cli.common import dims, refuse
from ptxlab.emulator import EmulatorOptions, checks_of
from ptxlab.errors import ArgumentError
from ptxlab.runtime.arguments import in_order, output_variant, parse_integers
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec

KernelTarget = Annotated[str, typer.Argument(help="NAME, NAME.cu, NAME:FORM, or FILE[:entry].")]
ArgumentsFile = Annotated[
    Path, typer.Option("--in", help=".npz with the kernel's arguments by name; scalars are 0-d arrays.")
]
Unchecked = Annotated[bool, typer.Option("--unchecked", help="Skip input validation.")]
# Of the emulator: fields of `EmulatorOptions`.
Check = Annotated[
    str,
    typer.Option(help="Emulator checks, comma-separated: lanes, race, init, async, divergence, all; float, proxy."),
]
Late = Annotated[
    bool, typer.Option("--late", help="Emulator: complete asynchronous copies as late as allowed, not at once.")
]
MaxSteps = Annotated[
    int | None, typer.Option(help="Emulator: stop after this many instructions per wave. Default: 10 million.")
]


def emulator_options(check: str, late: bool, max_steps: int | None, *, count_banks: bool = False) -> EmulatorOptions:
    """Parse the command line's options of the emulator."""
    mode, checks = "late" if late else "early", checks_of("--check", check)
    keywords = {"checks": checks, "mode": mode, "max_steps": max_steps, "count_banks": count_banks}
    return EmulatorOptions.combine(None, keywords)


@dataclass(frozen=True)
class FileOptions:
    """The command line's options for compiling and launching a file without a spec."""

    grid: str | None
    block: str | None
    shared: int | None
    arch: str | None
    define: list[str] | None

    def refuse(self, spec: KernelSpec) -> None:
        """Raise CommandLineError if one is used with a kernel that has a spec."""
        options = {f"--{name}": option for name, option in vars(self).items() if name != "define"}
        refuse({**options, "-D": self.define}, f"is for files only: {spec.name} has a spec, which says it")


class SolvedLaunch(Protocol):
    """A kernel with its arguments and geometry: `runtime.SpecLaunch`, or a `FileLaunch`."""

    @property
    def kernel(self) -> runtime.Kernel:
        """The kernel, compiled when it is first launched or looked at."""

    def copy_arrays(self) -> Self:
        """Return the same launch on copies of all arrays."""

    def run(self, *, backend: str | None = None, options: EmulatorOptions | None = None) -> runtime.Outcome:
        """Launch."""


@dataclass(frozen=True, eq=False)
class FileLaunch:
    """A kernel without a spec, its arguments in order, and its grid, block and bytes of shared memory."""

    kernel: runtime.Kernel
    arguments: list[Any]
    geometry: tuple[tuple[int, ...], tuple[int, ...], int]

    def copy_arrays(self) -> Self:
        """Return the same launch on copies of all arrays."""
        return replace(self, arguments=[a.copy() if isinstance(a, np.ndarray) else a for a in self.arguments])

    def run(self, *, backend: str | None = None, options: EmulatorOptions | None = None) -> runtime.Outcome:
        """Launch."""
        return self.kernel[self.geometry](*self.arguments, backend=backend, options=options)


def solve(
    spec: KernelSpec | None,
    source: Source,
    entry: str | None,
    arrays: Mapping[str, np.ndarray],
    unchecked: bool,
    options: FileOptions,
) -> SolvedLaunch:
    """Solve for the launch of a kernel, as `registry.resolve` finds it, on arrays by name."""
    if spec is not None:
        options.refuse(spec)
        return _solve_spec(spec, source, arrays, unchecked)
    kernel = runtime.load(source, entry, defines=parse_integers("-D", options.define or []), arch=options.arch)
    geometry = dims("grid", options.grid or "1"), dims("block", options.block or "32"), options.shared or 0
    return FileLaunch(kernel, in_order(kernel.entry, kernel.signature, arrays), geometry)


def _solve_spec(
    spec: KernelSpec, source: Source, arrays: Mapping[str, np.ndarray], unchecked: bool
) -> runtime.SpecLaunch:
    """Solve for the launch of a kernel with a spec; an array that is no argument of it is a size."""
    shaped = {arg.name for arg in spec.args if arg.shape}
    sizes = {name: _size(spec, name, array) for name, array in arrays.items() if name not in shaped}
    inputs = {name: array for name, array in arrays.items() if name in shaped}
    constants = output_variant(spec, None)
    return runtime.solve_launch(spec, source, inputs, sizes=sizes, unchecked=unchecked, wanted=constants)


def _size(spec: KernelSpec, name: str, array: np.ndarray) -> int | float:
    """Return a size of the file, an array without axes: an integer, or a float where a scalar argument is one."""
    if array.shape or name not in spec.symbols:
        inputs, sizes = ", ".join(a.name for a in spec.inputs), ", ".join(sorted(spec.symbols))
        raise ArgumentError(f"{spec.name}: arguments", f"{inputs}, or a size: {sizes}", name)
    is_float = any(arg.name == name and str(arg.dtype).startswith("float") for arg in spec.args)
    if array.dtype.kind not in ("iuf" if is_float else "iu"):
        raise ArgumentError(f"{spec.name}: {name}", "a number" if is_float else "an integer", array)
    return float(array) if is_float else int(array)
