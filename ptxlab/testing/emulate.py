"""The fixture `emulate`: find the kernel, pass arguments by name, run it on several schedules, fail on findings."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import runtime
from ptxlab.emulator import EmulatorOptions, remedies_of
from ptxlab.errors import ArgumentError, EmulationError, FileError, PtxlabError, SourceError, VerificationError
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.runtime.arguments import check_defines, geometry, is_text
from ptxlab.runtime.backends import choose_backend
from ptxlab.runtime.schedules import CHECK, Schedule, first_differences
from ptxlab.sources import Source, split_target
from ptxlab.spec import Launch
from ptxlab.testing import adapters
from ptxlab.testing.adapters import Target
from ptxlab.testing.annotations import Annotation, of_error, relative
from ptxlab.validate import is_integer

_MOST = 8  # findings that a failure shows in full


class CheckFailed(VerificationError, AssertionError):  # noqa: N818  (pytest shows the name before the message)
    """A check has findings, or two schedules differ; `annotations` holds each with file and line."""

    def __init__(self, message: str, annotations: list[Annotation]) -> None:
        super().__init__(message)
        self.annotations = annotations


@dataclass(frozen=True)
class Settings:
    """The settings of the running test: from the command line, its marker and its location.

    Attributes:
        folder: the test file's folder, searched first for kernel files.
        root: the project's root; messages name files relative to it.
        test: the test's node id.
        backend: `emulator` or `gpu`.
        first_seed: the first seed of the late schedules.
        only: name of the one schedule to run; empty: all.
        checks: names of checks, `all`, or empty.
        seeds: number of late schedules, beside the early one.
    """

    folder: Path
    root: Path
    test: str = ""
    backend: str = "emulator"
    first_seed: int = 0
    only: str = ""
    checks: Any = "all"
    seeds: int = 1

    def schedules(self, seeds: int | None, varies: bool) -> list[Schedule]:
        """Return the early schedule, then the late ones; only the early one if the kernel does not vary."""
        count = self.seeds if seeds is None else seeds
        if not is_integer(count) or count < 0:
            raise ArgumentError("seeds", "an integer, 0 or more", repr(count))
        if self.only:
            return [Schedule.parse(self.only)]
        late_schedules = [Schedule("late", self.first_seed + i) for i in range(count if varies else 0)]
        return [Schedule(), *late_schedules]

    def shorten(self, text: str) -> str:
        """Return a message with paths relative to the root."""
        return text.replace(f"{self.root}/", "")

    def name_arguments(self, text: str, target: Target) -> str:
        """Replace the kernel's parameter names in an emulator message by the caller's names and positions."""
        parameters = target.kernel.parameters
        for i, (name, place) in enumerate(zip(target.names, target.places, strict=True)):
            text = text.replace(f"argument {place} ({parameters[place]})", f"argument {i} ({name})")
        return self.shorten(text)

    def place(self, path: str, line: int = 1) -> tuple[str, int]:
        """Return the file (relative to the root) and line of an annotation.

        It is the test's file if the kernel is text.
        """
        return (self.test.partition("::")[0], 1) if path.startswith("<") else (relative(path, self.root), line)

    def replay(self, schedule: Schedule) -> str:
        """Return the command that runs the test on this schedule alone."""
        return f"replay: pytest {shlex.quote(self.test)} --ptxlab-schedule {schedule}"


@dataclass(frozen=True)
class Emulated:
    """The arrays after the launch: `out.a` or `out["a"]` by parameter name, `out[0]` by position among the arrays.

    Attributes:
        arrays: the copies that the kernel worked on, by parameter name, in launch order.
        schedules: names of the schedules that ran, `early` first.
        backend: `emulator` or `gpu`.
    """

    arrays: dict[str, np.ndarray]
    schedules: tuple[str, ...]
    backend: str

    def __getattr__(self, name: str) -> np.ndarray:
        if name in (arrays := vars(self).get("arrays", {})):
            array: np.ndarray = arrays[name]
            return array
        raise AttributeError(f"no array {name!r}: the kernel has {', '.join(arrays) or 'none'}")

    def __getitem__(self, key: str | int) -> np.ndarray:
        if isinstance(key, int):
            return list(self.arrays.values())[key]
        return self.arrays[key]


class Emulate:
    """The fixture: a call runs a kernel on copies of the arrays and raises what the checks find."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self._targets: dict[Any, Target] = {}

    def __call__(
        self,
        kernel: Any,
        *args: Any,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...] | None = None,
        shared_bytes: int | None = None,
        cluster: int | tuple[int, ...] = 1,
        entry: str | None = None,
        defines: Mapping[str, int] | None = None,
        arch: str | None = None,
        include: Sequence[str | Path] = (),
        std: str | None = None,
        checks: Any = None,
        seeds: int | None = None,
        same: bool = True,
        max_steps: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Emulated:
        """Run a kernel.

        Args:
            kernel: path of a `.ptx` or `.cu` file (relative to the test or the project's root; `FILE:kernel` names the
                kernel too), the text itself, a `Source` or `Kernel` of ptxlab, a Triton kernel, CuPy's RawKernel or
                RawModule, cuda.core's ObjectCode or Program, a numba.cuda kernel (`ptxlab.testing.adapters`).
            args: arguments in order: host arrays of any library, numbers, tensor maps. Arrays are copied.
            grid, block, shared_bytes, cluster: the launch. A Triton kernel sets its own block.
            entry: the kernel's name, as in C++ (`ns::add<float, 3>`); may be left out if the source has one kernel.
            defines: `-D` constants of a `.cu`.
            arch: the architecture that a `.cu` or a Triton kernel is compiled for.
            include, std: of a `.cu`: further folders for `#include` (relative as `kernel` is), and the language, by
                default `c++17`.
            checks: overrides the marker's: names, `"all"`, or `""` for none.
            seeds: overrides the marker's: number of late schedules, beside the early one.
            same: whether all schedules must leave the same bytes; False for float sums by atomics.
            max_steps: most instructions that a wave of blocks may issue.
            arguments: arguments by name, for names that collide with this call's own (`grid`).
            named: arguments by the kernel's own names, and a Triton kernel's constants.

        Raises:
            CheckFailed: findings, or two schedules differ.
            EmulationError: what would fail on a GPU: a deadlock, an access out of bounds.
            PtxlabError: bad input, in one line.
        """
        __tracebackhide__ = True
        settings = self._settings()
        try:
            check_defines(defines := {} if defines is None else defines, arch)
            if not isinstance(include, str | Path):  # which `load` refuses
                include = [_find_folder(folder, settings) for folder in include]
            load_options = {"entry": entry, "defines": defines, "arch": arch, "include": include, "std": std}
            merged_arguments = _merge_arguments(named, arguments)
            target, arguments_in_order = self._target(kernel, settings, load_options, args, merged_arguments)
            if target.block is not None and block not in (None, target.block):
                raise ArgumentError("block", f"{target.block}, which the kernel was compiled for", block)
            launch = geometry(
                grid, _first_given(target.block, block, 32), _first_given(shared_bytes, target.shared_bytes, 0), cluster
            )
            checks = settings.checks if checks is None else checks
            options = EmulatorOptions.combine(None, {"checks": checks, "max_steps": max_steps})
            accepted_arguments = target.kernel.arguments(arguments_in_order)
            if settings.backend == "gpu":
                choose_backend("gpu", target.kernel, launch, on_device=False)
                target.kernel.launch(copies := _copies(accepted_arguments), launch, backend="gpu")
                return Emulated(_arrays_by_name(target, copies), ("gpu",), "gpu")
            first: list[Any] = []
            schedules = settings.schedules(seeds, target.kernel.varies)
            for schedule in schedules:
                copies = _copies(accepted_arguments)
                _run(target, copies, launch, settings, schedule, options)
                if first and same:
                    _compare(first, copies, target, settings, schedules[0], schedule)
                first = first or copies
        except PtxlabError as error:
            error.args = (settings.shorten(str(error)),)
            if isinstance(error, SourceError):
                vars(error)["annotations"] = [_annotation(error, settings, error.path)]
            raise error.with_traceback(None) from None  # pytest then shows the call, not the frames below it
        return Emulated(_arrays_by_name(target, first), tuple(map(str, schedules)), "emulator")

    def _target(
        self, kernel: Any, settings: Settings, loading: dict[str, Any], args: Sequence[Any], named: dict[str, Any]
    ) -> tuple[Target, list[Any]]:
        """Return the target of the kernel, compiled once per session, and the arguments of all its parameters."""
        key: tuple[Any, ...]
        if isinstance(kernel, runtime.Kernel):
            target = Target.of(kernel)
            return target, target.arguments(args, named)
        if isinstance(kernel, str | Path) and not is_text(kernel):
            if isinstance(kernel, str) and loading["entry"] is None:
                kernel, loading["entry"] = split_target(kernel)
            kernel = _find(Path(kernel), settings)
            key = str(kernel), kernel.stat().st_mtime_ns
        elif isinstance(kernel, str | Source):
            key = (kernel,)
        else:
            return adapters.target(kernel, loading, args, named, self._targets)
        key = (
            *key,
            loading["entry"],
            *sorted(loading["defines"].items()),
            loading["arch"],
            *map(str, loading["include"]),
            loading["std"],
        )
        if key not in self._targets:
            self._targets[key] = Target.of(runtime.load(kernel, **loading))
        return self._targets[key], self._targets[key].arguments(args, named)


def _run(
    target: Target,
    arguments: list[Any],
    launch: Launch,
    settings: Settings,
    schedule: Schedule,
    options: EmulatorOptions,
) -> None:
    """Run one schedule; raise CheckFailed for findings. Errors get an annotation and the command that replays them."""
    try:
        outcome = target.kernel.launch(arguments, launch, backend="emulator", options=schedule.apply(options))
    except EmulationError as error:
        error.args = (settings.name_arguments(str(error), target),)
        vars(error)["annotations"] = [_annotation(error, settings, target.kernel.source.path)]
        error.add_note("\n".join([*remedies_of([type(error).__name__]), settings.replay(schedule)]))
        raise
    if outcome is None or not outcome.findings:
        return
    lines = [settings.name_arguments(str(finding), target) for finding in outcome.findings]
    notes = [
        Annotation(finding.kind, *settings.place(finding.path, finding.line), line, settings.test)
        for finding, line in zip(outcome.findings, lines, strict=True)
    ]
    remainder = [f"... and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    head = f"{target.label}: {len(lines)} finding{'s' * (len(lines) > 1)} (schedule {schedule})"
    remedies = remedies_of(finding.kind for finding in outcome.findings)
    raise CheckFailed("\n".join([head, *lines[:_MOST], *remainder, *remedies, settings.replay(schedule)]), notes)


def _arrays_by_name(target: Target, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
    pairs = ((name, _array_of(arguments[position])) for name, position in zip(target.names, target.places, strict=True))
    return {name: array for name, array in pairs if array is not None}


def _annotation(error: PtxlabError, settings: Settings, path: str) -> Annotation:
    return of_error(error, settings.place(path)[0], settings.test)


def _merge_arguments(named: dict[str, Any], arguments: Any) -> dict[str, Any]:
    """Merge arguments given as keywords with those of a mapping."""
    if arguments is None:
        return named
    if not isinstance(arguments, Mapping):
        raise ArgumentError("arguments", "a mapping from names to arguments", type(arguments).__name__)
    if names_given_twice := named.keys() & arguments.keys():
        raise ArgumentError(
            "arguments", "names that are not given as keywords too", ", ".join(sorted(names_given_twice))
        )
    return {**named, **arguments}


def _find(path: Path, settings: Settings) -> Path:
    """Find a kernel's file relative to the test's folder, then to the root, then to the current folder."""
    for folder in (settings.folder, settings.root, Path.cwd()):
        if os.path.isfile(folder / path):  # Path.is_file raises OSError for a name that is too long
            return folder / path
    folder_name = relative(str(settings.folder), settings.root)
    raise FileError(f"{path}: no such file beside the test ({folder_name}) or in the project's root")


def _find_folder(path: str | Path, settings: Settings) -> str | Path:
    """Find an include folder relative to the test's folder, then to the root.

    If there is none, return the path as it is.
    """
    return next((folder / path for folder in (settings.folder, settings.root) if (folder / path).is_dir()), path)


def _first_given(*candidates: Any) -> Any:
    return next((candidate for candidate in candidates if candidate is not None), None)


def _array_of(argument: Any) -> np.ndarray | None:
    array = argument.array if isinstance(argument, TensorMap) else argument
    return array if isinstance(array, np.ndarray) else None


def _copies(arguments: Sequence[Any]) -> list[Any]:
    """Copy every array of the arguments.

    An array passed twice is copied once, a read-only copy stays read-only.
    """
    copies: dict[int, np.ndarray] = {}

    def copy(argument: Any) -> Any:
        if isinstance(argument, TensorMap):
            return replace(argument, array=copy(argument.array))
        if not isinstance(argument, np.ndarray):
            return argument
        key = id(argument)
        if key not in copies:
            copies[key] = argument.copy()
            copies[key].flags.writeable = argument.flags.writeable
        return copies[key]

    return [copy(argument) for argument in arguments]


def _compare(
    first_arguments: Sequence[Any],
    second_arguments: Sequence[Any],
    target: Target,
    settings: Settings,
    first_schedule: Schedule,
    second_schedule: Schedule,
) -> None:
    """Raise CheckFailed for the first array in which two schedules have left different bytes."""
    arrays, second_arrays = _arrays_by_name(target, first_arguments), _arrays_by_name(target, second_arguments)
    for difference in first_differences(arrays, second_arrays, (first_schedule, second_schedule)):
        message = f"{target.label}: {difference}"
        note = Annotation(CHECK, *settings.place(target.kernel.source.path), message, settings.test)
        raise CheckFailed("\n".join([message, *remedies_of([CHECK]), settings.replay(second_schedule)]), [note])
