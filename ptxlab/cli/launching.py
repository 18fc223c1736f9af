"""What `run` and `debug` share: their options, and a launch solved from a kernel, arrays by name, and these options."""

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

import numpy as np
import typer

from ptxlab import runtime
from ptxlab.cli.common import parse_dimensions, refuse
from ptxlab.emulator import EmulatorOptions, checks_of
from ptxlab.emulator.options import KINDS
from ptxlab.errors import ArgumentError, EmulationError
from ptxlab.io.files import load_arrays
from ptxlab.runtime.arguments import name_in_order, order_arguments, output_variant, parse_defines
from ptxlab.runtime.inputs import CommandArgument, name_arguments, parse_argument
from ptxlab.runtime.results import compare, split_expected
from ptxlab.runtime.schedules import CHECK, CHECKED_SCHEDULES, Difference, Schedule, first_differences
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec
from ptxlab.testing.annotations import Annotation, of_finding, of_note, relative

_FLOAT_ATOMIC = re.compile(r"^(?:atom|red)\..*\.add\..*f(?:16|32|64)|^(?:atom|red)\.add\..*f(?:16|32|64)")

KernelTarget = Annotated[
    str,
    typer.Argument(
        help="NAME, one of its sources (NAME.cu), one of its forms (NAME:FORM), or FILE[:kernel], such as "
        "'my.cu:ns::add<float, 3>'."
    ),
]
ArgumentsFile = Annotated[
    Path | None,
    typer.Option("--in", help=".npz with the kernel's arguments by name or in order; scalars are 0-d arrays."),
]
ArgumentTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="VALUE",
        help="An argument by name or in order: x=f32[1024]:normal (uniform, arange, zeros, uninitialised or a number), "
        "n=1024, bias=null, x=FILE.npy; for a struct its fields: p=i32:8,f32:0.5.",
    ),
]
Unchecked = Annotated[bool, typer.Option("--unchecked", help="Skip input validation.")]
# Of the emulator: fields of `EmulatorOptions`.
_KINDS = "; ".join(f"{check}: {', '.join(kinds)}" for check, kinds in KINDS.items() if kinds and kinds != (check,))
Check = Annotated[
    str,
    typer.Option(
        help="Emulator checks, comma-separated: lanes, race, init, async, divergence, overrun, schedules, quirks; "
        f"all for these; float, proxy, narrow on request. Checks that report findings under other names: {_KINDS}."
    ),
]
Late = Annotated[
    bool, typer.Option("--late", help="Emulator: complete asynchronous copies as late as allowed, not at once.")
]
MaxSteps = Annotated[
    int | None, typer.Option(help="Emulator: stop after this many instructions per wave. Default: 10 million.")
]


def emulator_options(
    check: str, late: bool, max_steps: int | None, *, count_banks: bool = False, caller_checks: Collection[str] = ()
) -> EmulatorOptions:
    """Parse the command line's options of the emulator; `caller_checks` as in `checks_of`."""
    mode, checks = "late" if late else "early", checks_of("--check", check, caller_checks)
    keywords = {"checks": checks, "mode": mode, "max_steps": max_steps, "count_banks": count_banks}
    return EmulatorOptions.combine(None, keywords)


def run_options(
    check: str, late: bool, max_steps: int | None, *, count_banks: bool = False
) -> tuple[EmulatorOptions, tuple[Schedule, ...]]:
    """Parse the options of `run`: those of the emulator, and the schedules that the check of that name compares.

    `all` includes that check, but for `--late`, which asks for one schedule.
    """
    words = [word.strip() for word in check.split(",")]
    all_schedules = CHECK in words or ("all" in words and not late)
    options = emulator_options(check, late, max_steps, count_banks=count_banks, caller_checks=(CHECK,))
    return options, CHECKED_SCHEDULES if all_schedules else ()


@dataclass(frozen=True, eq=False)
class ScheduledRun:
    """A launch on one or several schedules.

    Attributes:
        outcome: of the first, with the findings of all.
        schedules: those that ran; none where the kernel's results cannot depend on them, or none were asked for.
        differences: of what they left, beyond what atomics on floats may differ by.
    """

    outcome: runtime.Outcome
    schedules: tuple[Schedule, ...] = ()
    differences: tuple[Difference, ...] = ()

    def annotations(self, path: str) -> list[Annotation]:
        """Return findings, differences and notes as annotations; `path` is the source's."""
        places = [of_finding(finding) for finding in self.outcome.findings]
        places += [Annotation(CHECK, relative(path), 1, str(difference)) for difference in self.differences]
        return places + [of_note(note) for note in self.outcome.notes]


def run_on_schedules(
    launch: "SolvedLaunch", backend: str | None, options: EmulatorOptions, schedules: Sequence[Schedule]
) -> ScheduledRun:
    """Run a launch; in the emulator on each schedule, if its results can depend on them, on copies of the arrays."""
    schedules = schedules if schedules and launch.kernel.varies else ()
    copies = [launch.copy_arrays() for _ in schedules[1:]]
    outcome = launch.run(backend=backend, options=options)
    if not schedules or outcome.backend != "emulator":
        return ScheduledRun(outcome)
    entry = launch.kernel.module.entries[launch.kernel.entry]
    # Sums of floats by atomics depend on the order of the threads, which is no fault.
    depends_on_order = any(_FLOAT_ATOMIC.search(instruction.opcode) for instruction in entry.instructions)
    findings = [*outcome.findings]
    differences: dict[str, Difference] = {}
    for schedule, copy in zip(schedules[1:], copies, strict=True):
        try:
            scheduled_outcome = copy.run(backend="emulator", options=schedule.apply(options))
        except EmulationError as error:
            error.args = (f"schedule {schedule}: {error.args[0]}",)
            raise
        finding_keys = {(f.kind, f.path, f.line, f.callers) for f in findings}
        findings += [f for f in scheduled_outcome.findings if (f.kind, f.path, f.line, f.callers) not in finding_keys]
        for difference in first_differences(outcome.outputs, scheduled_outcome.outputs, (schedules[0], schedule)):
            name, is_bfloat16 = difference.name, difference.name in launch.bfloat16_names
            array, scheduled_array = outcome.outputs[name], scheduled_outcome.outputs[name]
            is_float = is_bfloat16 or array.dtype.kind == "f"
            if not (
                depends_on_order
                and is_float
                and not compare(name, scheduled_array, array, is_bfloat16=is_bfloat16).wrong
            ):
                differences.setdefault(name, difference)
    outcome = replace(outcome, findings=tuple(findings))
    return ScheduledRun(outcome, tuple(schedules), tuple(differences.values()))


@dataclass(frozen=True)
class FileOptions:
    """The command line's options for compiling and launching a file without a spec."""

    grid: str | None
    block: str | None
    shared: int | None
    arch: str | None
    define: list[str] | None
    include: list[Path] | None
    std: str | None

    def refuse(self, spec: KernelSpec) -> None:
        """Raise CommandLineError if one is used with a kernel that has a spec."""
        options = {f"--{name}": option for name, option in vars(self).items() if name not in ("define", "include")}
        refuse(
            {**options, "-D": self.define or None, "-I": self.include or None},
            f"is for files only: {spec.name} has a spec, which says it",
        )


class SolvedLaunch(Protocol):
    """A kernel with its arguments and geometry: `runtime.SpecLaunch`, or a `FileLaunch`."""

    @property
    def kernel(self) -> runtime.Kernel:
        """The kernel, compiled when it is first launched or looked at."""

    @property
    def bfloat16_names(self) -> Set[str]:
        """Names of the arrays whose elements, uint16, are bits of bfloat16."""

    def copy_arrays(self) -> Self:
        """Return the same launch on copies of all arrays."""

    def run(self, *, backend: str | None = None, options: EmulatorOptions | None = None) -> runtime.Outcome:
        """Launch."""


@dataclass(frozen=True, eq=False)
class FileLaunch:
    """A kernel without a spec, its arguments in order, and its grid, block and bytes of shared memory.

    The content of arrays in `uninitialised` counts as never written. Elements of `bfloat16_names` are bits, uint16.
    """

    kernel: runtime.Kernel
    arguments: list[Any]
    geometry: tuple[tuple[int, ...], tuple[int, ...], int]
    uninitialised: Sequence[str] = ()
    bfloat16_names: Set[str] = frozenset()

    def copy_arrays(self) -> Self:
        """Return the same launch on copies of all arrays."""
        return replace(self, arguments=[a.copy() if isinstance(a, np.ndarray) else a for a in self.arguments])

    def run(self, *, backend: str | None = None, options: EmulatorOptions | None = None) -> runtime.Outcome:
        """Launch."""
        launch = self.kernel[self.geometry]
        return launch(*self.arguments, backend=backend, uninitialised=self.uninitialised, options=options)


@dataclass(frozen=True, eq=False)
class Arguments:
    """The command line's arguments of a kernel: arrays of `--in`, values of `--arg`, and the outputs to expect.

    `uninitialised` names arrays of `--in` that count as never written.
    """

    arrays: Mapping[str, np.ndarray]
    values: Sequence[CommandArgument]
    expected: Mapping[str, np.ndarray]
    uninitialised: Sequence[str] = ()

    @classmethod
    def read(cls, inputs: Path | None, texts: list[str] | None, uninitialised: list[str] | None) -> "Arguments":
        """Load the file and parse the texts."""
        arrays, expected = split_expected(load_arrays(inputs) if inputs else {})
        values = [parse_argument("--arg", text, seed) for seed, text in enumerate(texts or ())]
        return cls(arrays, values, expected, uninitialised or ())


def solve(
    spec: KernelSpec | None,
    source: Source,
    entry: str | None,
    arguments: Arguments,
    unchecked: bool,
    options: FileOptions,
) -> SolvedLaunch:
    """Solve for the launch of a kernel, as `registry.resolve` finds it, on the command line's arguments."""
    arrays, typed_arguments = dict(arguments.arrays), arguments.values
    if spec is not None:
        options.refuse(spec)
        refuse({"--uninitialised": arguments.uninitialised or None}, f"is for files only: {spec.name} has a spec")
        names = [*dict.fromkeys([*(arg.name for arg in spec.args), *sorted(spec.symbols)])]
        typed_arguments = name_arguments(f"{spec.name}: --arg", names, typed_arguments, arrays)
        placed = arrays | {typed_argument.name: typed_argument.value for typed_argument in typed_arguments}
        return _solve_spec(spec, source, {name: np.asarray(array) for name, array in placed.items()}, unchecked)
    kernel = load_file(source, entry, options)
    geometry = (
        parse_dimensions("grid", options.grid or "1"),
        parse_dimensions("block", options.block or "32"),
        options.shared or 0,
    )
    names = [*kernel.parameters]
    arrays = {kernel.parameter(name): array for name, array in arrays.items()}
    typed_arguments = [
        replace(typed_argument, name=kernel.parameter(typed_argument.name)) for typed_argument in typed_arguments
    ]
    if typed_arguments:
        arrays = dict(name_in_order(names, arrays))
        typed_arguments = name_arguments(f"{kernel.name}: --arg", names, typed_arguments, arrays)
        arrays |= {typed_argument.name: typed_argument.value for typed_argument in typed_arguments}
    uninitialised_names = [typed_argument.name for typed_argument in typed_arguments if typed_argument.is_uninitialised]
    uninitialised_names += map(kernel.parameter, arguments.uninitialised)
    bfloat16_names = {typed_argument.name for typed_argument in typed_arguments if typed_argument.is_bfloat16}
    bfloat16_names |= {parameter.name for parameter in kernel.signature if parameter.is_bfloat16}
    return FileLaunch(
        kernel, order_arguments(kernel.name, kernel.signature, arrays), geometry, uninitialised_names, bfloat16_names
    )


def load_file(source: Source, entry: str | None, options: FileOptions) -> runtime.Kernel:
    """Load a kernel of a file by the command line's options."""
    defines = parse_defines("-D", options.define or [])
    return runtime.load(
        source, entry, defines=defines, arch=options.arch, include=options.include or (), std=options.std
    )


def _solve_spec(
    spec: KernelSpec, source: Source, arrays: Mapping[str, np.ndarray], unchecked: bool
) -> runtime.SpecLaunch:
    """Solve for the launch of a kernel with a spec; an array that is no argument of it is a size."""
    names_with_shape = {arg.name for arg in spec.args if arg.shape}
    sizes = {name: _size(spec, name, array) for name, array in arrays.items() if name not in names_with_shape}
    inputs = {name: array for name, array in arrays.items() if name in names_with_shape}
    output_constants = output_variant(spec, None)  # of the first dtype that the outputs may have
    return runtime.solve_launch(spec, source, inputs, sizes=sizes, unchecked=unchecked, overrides=output_constants)


def _size(spec: KernelSpec, name: str, array: np.ndarray) -> int | float:
    """Return a size of the file, an array without axes: an integer, or a float where a scalar argument is one."""
    if array.shape or name not in spec.symbols:
        inputs, sizes = ", ".join(a.name for a in spec.inputs), ", ".join(sorted(spec.symbols))
        raise ArgumentError(f"{spec.name}: arguments", f"{inputs}, or a size: {sizes}", name)
    is_float = any(arg.name == name and str(arg.dtype).startswith("float") for arg in spec.args)
    if array.dtype.kind not in ("iuf" if is_float else "iu"):
        raise ArgumentError(f"{spec.name}: {name}", "a number" if is_float else "an integer", array)
    return float(array) if is_float else int(array)
