"""What the fixture `emulate` does: find the kernel, pass arguments by name, run it on several schedules, judge."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import runtime
from ptxlab.errors import ArgumentError, EmulationError, FileError, PtxlabError, VerificationError
from ptxlab.layout.tensor_map import TensorMap
from ptxlab.runtime.arguments import checks_of, geometry
from ptxlab.runtime.backends import choose_backend
from ptxlab.sources import Source
from ptxlab.spec import Launch
from ptxlab.testing import adapters
from ptxlab.testing.adapters import Target
from ptxlab.testing.annotations import Annotation, of_error, relative
from ptxlab.validate import is_integer

_MOST = 8  # findings that a failure shows in full


class CheckFailed(VerificationError, AssertionError):  # noqa: N818  (pytest shows the name before the message)
    """A check has findings, or schedules give different results; `annotations` has each with file and line."""

    def __init__(self, message: str, annotations: list[Annotation]) -> None:
        super().__init__(message)
        self.annotations = annotations


@dataclass(frozen=True)
class Schedule:
    """When asynchronous operations complete: `early`, or `late` in an order drawn from a seed."""

    mode: str = "early"
    seed: int = 0

    @classmethod
    def named(cls, text: str) -> "Schedule":
        """`early` or `late:3`."""
        mode, _, seed = text.partition(":")
        return cls(mode, int(seed or 0))

    def __str__(self) -> str:
        return f"late:{self.seed}" if self.mode == "late" else "early"


@dataclass(frozen=True)
class Settings:
    """What command line, marker and place of a test say.

    Attributes:
        folder: of the test, where files of kernels are looked for first.
        root: of the project, from which files are named.
        test: its name.
        backend: `emulator` or `gpu`.
        first_seed: of the drawn schedules.
        only: a schedule by name, in the place of all others.
        checks: names of checks, `all`, or empty.
        seeds: how many drawn schedules besides the early one.
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
        """The early one and the drawn ones; the early one alone where none would make a difference."""
        count = self.seeds if seeds is None else seeds
        if not is_integer(count) or count < 0:
            raise ArgumentError("seeds", "an integer, 0 or more", repr(count))
        if self.only:
            return [Schedule.named(self.only)]
        drawn = [Schedule("late", self.first_seed + i) for i in range(count if varies else 0)]
        return [Schedule(), *drawn]

    def seen(self, text: str, target: Target) -> str:
        """A message with files named from the root, and arguments as the caller calls them."""
        symbols = target.kernel.module.entries[target.kernel.entry].params
        for i, (name, place) in enumerate(zip(target.names, target.places, strict=True)):
            text = text.replace(f"argument {place} ({symbols[place].name})", f"argument {i} ({name})")
        return text.replace(f"{self.root}/", "")

    def place(self, path: str, line: int = 1) -> tuple[str, int]:
        """File, named from the root, and line; where the kernel is text in the test, the test's file."""
        return (self.test.partition("::")[0], 1) if path.startswith("<") else (relative(path, self.root), line)

    def replay(self, schedule: Schedule) -> str:
        """The command that runs the test on that schedule alone."""
        return f"replay: pytest {shlex.quote(self.test)} --ptxlab-schedule {schedule}"


@dataclass(frozen=True)
class Emulated:
    """The arrays after the launch: `out.a` or `out["a"]` by the parameter's name, `out[0]` by its place.

    Attributes:
        arrays: copies of the arrays that were given, as the kernel left them, by parameter in launch order.
        schedules: those that ran, `early` first.
        backend: where.
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
    """The fixture: a call runs a kernel on copies of its arrays, and fails with what the checks find."""

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
        checks: Any = None,
        seeds: int | None = None,
        same: bool = True,
        max_steps: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> Emulated:
        """Run a kernel.

        Args:
            kernel: a `.ptx` or `.cu` file (beside the test, or below the project's root), the text itself, a `Source`
                or `Kernel` of ptxlab, a Triton kernel (`ptxlab.testing.adapters`), CuPy's RawKernel or RawModule,
                an ObjectCode or Program of cuda.core, a kernel of numba.cuda.
            args: arguments in order; arrays of any library on the host, numbers, tensor maps. Arrays are copied.
            grid, block, shared_bytes, cluster: the launch. A Triton kernel knows its own block.
            entry: which kernel of the source; may be left out where there is one.
            defines: `-D` constants of a `.cu`.
            arch: that a `.cu` or a Triton kernel is compiled for.
            checks: in the place of the marker's: names, `"all"`, or `""` for none.
            seeds: in the place of the marker's: how many drawn schedules besides the early one.
            same: whether every schedule has to leave the same bytes; False for sums of floats by atomics.
            max_steps: instructions that a wave of blocks may dispatch.
            arguments: arguments by name, for names that this call has itself (`grid`).
            named: arguments by the kernel's own names; for a Triton kernel its constants too.

        Raises:
            CheckFailed: findings, or schedules that differ.
            EmulationError: a deadlock, an access out of bounds, and whatever else would fail on a GPU.
            PtxlabError: what cannot be run, in one line.
        """
        __tracebackhide__ = True
        settings = self._settings()
        options = {"entry": entry, "defines": dict(defines or {}), "arch": arch}
        try:
            target, given = self._target(kernel, settings, options, args, {**named, **(arguments or {})})
            if target.block is not None and block not in (None, target.block):
                raise ArgumentError("block", f"{target.block}, which the kernel was compiled for", block)
            launch = geometry(
                grid, _first(target.block, block, 32), _first(shared_bytes, target.shared_bytes, 0), cluster
            )
            chosen = checks_of("checks", settings.checks if checks is None else checks)
            accepted = target.kernel.arguments(given)
            if settings.backend == "gpu":
                choose_backend("gpu", target.kernel, launch, on_device=False)
                target.kernel.launch(fresh := _copies(accepted), launch, backend="gpu")
                return Emulated(_named(target, fresh), ("gpu",), "gpu")
            first: list[Any] = []
            schedules = settings.schedules(seeds, target.varies)
            for schedule in schedules:
                fresh = _copies(accepted)
                _run(target, fresh, launch, settings, schedule, chosen, max_steps)
                if first and same:
                    _compare(first, fresh, target, settings, schedules[0], schedule)
                first = first or fresh
        except PtxlabError as error:  # without the frames of what raised it: a failure ends at the call
            raise error.with_traceback(None) from None
        return Emulated(_named(target, first), tuple(map(str, schedules)), "emulator")

    def _target(
        self, kernel: Any, settings: Settings, options: dict[str, Any], args: Sequence[Any], named: dict[str, Any]
    ) -> tuple[Target, list[Any]]:
        """The kernel, compiled once, and the arguments of all its parameters."""
        key: tuple[Any, ...]
        if isinstance(kernel, runtime.Kernel):
            target = Target.of(kernel)
            return target, target.arguments(args, named)
        if isinstance(kernel, str | Path) and not _is_text(kernel):
            kernel = _find(Path(kernel), settings)
            key = str(kernel), kernel.stat().st_mtime_ns
        elif isinstance(kernel, str | Source):
            key = (kernel,)
        else:
            return adapters.target(kernel, options, args, named, self._targets)
        key = (*key, options["entry"], *sorted(options["defines"].items()), options["arch"])
        if key not in self._targets:
            self._targets[key] = Target.of(runtime.load(kernel, **options))
        return self._targets[key], self._targets[key].arguments(args, named)


def _run(
    target: Target,
    arguments: list[Any],
    launch: Launch,
    settings: Settings,
    schedule: Schedule,
    checks: Iterable[str],
    max_steps: int | None,
) -> None:
    """One run; CheckFailed for findings, and errors of the run with their place and how to see them again."""
    how: dict[str, Any] = {"mode": schedule.mode, "seed": schedule.seed, "max_steps": max_steps}
    try:
        result = target.kernel.launch(arguments, launch, backend="emulator", checks=checks, **how)
    except EmulationError as error:
        error.args = (settings.seen(str(error), target),)
        vars(error)["annotations"] = [of_error(error, settings.place(target.kernel.source.path)[0], settings.test)]
        error.add_note(settings.replay(schedule))
        raise
    if result is None or not result.findings:
        return
    lines = [settings.seen(str(each), target) for each in result.findings]
    notes = [
        Annotation(each.kind, *settings.place(each.path, each.line), line, settings.test)
        for each, line in zip(result.findings, lines, strict=True)
    ]
    more = [f"... and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    head = f"{target.label}: {len(lines)} finding{'s' * (len(lines) > 1)} (schedule {schedule})"
    raise CheckFailed("\n".join([head, *lines[:_MOST], *more, settings.replay(schedule)]), notes)


def _named(target: Target, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
    pairs = ((name, _array_of(arguments[at])) for name, at in zip(target.names, target.places, strict=True))
    return {name: array for name, array in pairs if array is not None}


def _find(path: Path, settings: Settings) -> Path:
    """A file beside the test, else below the root, else from the current folder."""
    for folder in (settings.folder, settings.root, Path.cwd()):
        if (folder / path).is_file():
            return folder / path
    where = relative(str(settings.folder), settings.root)
    raise FileError(f"{path}: no such file beside the test ({where}) or in the project's root")


def _is_text(source: str | Path) -> bool:
    return isinstance(source, str) and ("\n" in source or "{" in source)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _array_of(argument: Any) -> np.ndarray | None:
    array = argument.array if isinstance(argument, TensorMap) else argument
    return array if isinstance(array, np.ndarray) else None


def _copies(arguments: Sequence[Any]) -> list[Any]:
    """The same with arrays copied, one that is passed twice once; what is read-only stays so."""
    made: dict[int, np.ndarray] = {}

    def copy(array: np.ndarray) -> np.ndarray:
        key = id(array)
        if key not in made:
            made[key] = array.copy()
            made[key].flags.writeable = array.flags.writeable
        return made[key]

    return [
        replace(each, array=copy(each.array))
        if isinstance(each, TensorMap)
        else copy(each)
        if isinstance(each, np.ndarray)
        else each
        for each in arguments
    ]


def _compare(
    first: Sequence[Any], other: Sequence[Any], target: Target, settings: Settings, one: Schedule, two: Schedule
) -> None:
    """Raise CheckFailed where two schedules leave different bytes."""
    left, right = _named(target, first), _named(target, other)
    for name, a in left.items():
        b = right[name]
        if a.tobytes() == b.tobytes():
            continue
        unlike = (a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)).reshape(a.size, -1).any(axis=1)
        place = np.unravel_index(int(np.argmax(unlike)), a.shape)
        where = ", ".join(map(str, map(int, place)))
        message = f"{target.label}: {name}[{where}] is {a[place]} in schedule {one} and {b[place]} in {two}"
        note = Annotation("schedule", *settings.place(target.kernel.source.path), message, settings.test)
        raise CheckFailed(f"{message}\n{settings.replay(two)}", [note])
