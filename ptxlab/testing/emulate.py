"""What the fixture `emulate` does: find the kernel, pass arguments by name, run it on several schedules, judge."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import runtime
from ptxlab.errors import ArgumentError, EmulationError, FileError, PtxlabError, VerificationError
from ptxlab.layout.tensor_map import TensorMap
from ptxlab.runtime.arguments import checks_of, geometry
from ptxlab.runtime.backends import choose_backend
from ptxlab.sources import Source
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


@dataclass(frozen=True)
class Target:
    """A kernel and what its own world says of a call.

    Attributes:
        kernel: as `ptxlab.load` makes it.
        names: what the caller calls each parameter, in launch order; None: one that is not the caller's (`hidden`).
        hidden: arguments for those, by position.
        block, shared_bytes, cluster: of its launches, where it and not the caller decides.
    """

    kernel: runtime.Kernel
    names: tuple[str | None, ...]
    hidden: Mapping[int, Any] = field(default_factory=dict)
    block: int | None = None
    shared_bytes: int = 0
    cluster: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, kernel: runtime.Kernel) -> "Target":
        """One whose parameters have names of their own."""
        return cls(kernel, kernel.parameters)

    @cached_property
    def varies(self) -> bool:
        """Whether a schedule can make a difference: it copies asynchronously, or its threads pass flags."""
        entry = self.kernel.module.entries[self.kernel.entry]
        strong = {"relaxed", "volatile", "release"}
        return entry.is_asynchronous or any(strong & {*i.opcode.split(".")} for i in entry.instructions)

    def arguments(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Arguments in launch order; ArgumentError for one that is missing, twice there, or not known."""
        entry, names = self.kernel.entry, [name for name in self.names if name is not None]
        if len(args) > len(names):
            raise ArgumentError(f"{entry}: args", f"at most {len(names)} ({', '.join(names)})", len(args))
        given = dict(zip(names, args, strict=False))
        for name in named:
            if name not in names or name in given:
                rule = f"each of {', '.join(names)} once" if names else "no arguments"
                raise ArgumentError(f"{entry}: arguments", rule, name)
        given.update(named)
        if missing := [name for name in names if name not in given]:
            raise ArgumentError(f"{entry}: {missing[0]}", "must be given", ", ".join(given) or "nothing")
        return [self.hidden[i] if name is None else given[name] for i, name in enumerate(self.names)]


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
        cluster: int | tuple[int, ...] | None = None,
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
        named = {**named, **(arguments or {})}
        options = {"entry": entry, "defines": dict(defines or {}), "arch": arch}
        target, named = self._target(kernel, settings, options, args, named)
        if target.block is not None and block is not None and target.block != block:
            raise ArgumentError("block", f"{target.block}, which the kernel was compiled for", block)
        launch = geometry(
            grid,
            _first(target.block, block, 32),
            _first(shared_bytes, target.shared_bytes),
            _first(cluster, target.cluster),
        )
        chosen = checks_of("checks", settings.checks if checks is None else checks)
        given = target.arguments(args, named)
        accepted = target.kernel.arguments(given)
        if settings.backend == "gpu":
            choose_backend("gpu", target.kernel, launch, on_device=False)
            fresh = _copies(accepted)
            target.kernel.launch(fresh, launch, backend="gpu")
            return Emulated(self._named(target, fresh), ("gpu",), "gpu")
        first: list[Any] = []
        schedules = settings.schedules(seeds, target.varies)
        for schedule in schedules:
            fresh = _copies(accepted)
            try:
                result = target.kernel.launch(
                    fresh,
                    launch,
                    backend="emulator",
                    checks=chosen,
                    mode=schedule.mode,
                    seed=schedule.seed,
                    max_steps=max_steps,
                )
            except EmulationError as error:
                raise self._explained(error, target, settings, schedule) from None
            if result is not None and result.findings:
                raise _failure(result.findings, target, settings, schedule)
            if first and same:
                _compare(first, fresh, target, settings, schedules[0], schedule)
            first = first or fresh
        return Emulated(self._named(target, first), tuple(map(str, schedules)), "emulator")

    def _target(
        self, kernel: Any, settings: Settings, options: dict[str, Any], args: Sequence[Any], named: dict[str, Any]
    ) -> tuple[Target, dict[str, Any]]:
        """The kernel, compiled once, and the arguments that are left when its constants are taken out."""
        if isinstance(kernel, runtime.Kernel):
            return Target.of(kernel), named
        source, key = kernel, None
        if isinstance(kernel, str | Path) and not _is_text(kernel):
            source = _find(Path(kernel), settings)
            key = str(source), source.stat().st_mtime_ns
        elif isinstance(kernel, str | Source):
            key = (kernel,)
        if key is None:
            from ptxlab.testing import adapters

            return adapters.target(kernel, options, args, named, self._targets)
        key = (*key, options["entry"], *sorted(options["defines"].items()), options["arch"])
        if key not in self._targets:
            self._targets[key] = Target.of(runtime.load(source, **options))
        return self._targets[key], named

    def _named(self, target: Target, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
        pairs = zip(target.names, map(_array_of, arguments), strict=True)
        return {name: array for name, array in pairs if name is not None and array is not None}

    def _explained(
        self, error: EmulationError, target: Target, settings: Settings, schedule: Schedule
    ) -> EmulationError:
        """The error without the emulator's own frames, and with how to see it again."""
        found = of_error(error, target.kernel.source.path, settings.test)
        vars(error)["annotations"] = [replace(found, path=relative(found.path, settings.root))]
        error.add_note(_replay(settings, schedule))
        return error.with_traceback(None)


def _find(path: Path, settings: Settings) -> Path:
    """A file beside the test, else below the root, else from the current folder."""
    for folder in (settings.folder, settings.root, Path.cwd()):
        if (folder / path).is_file():
            return folder / path
    raise FileError(
        f"{path}: not found beside the test ({relative(str(settings.folder), settings.root)}) nor in the root"
    )


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


# Failures


def _failure(findings: Sequence[Any], target: Target, settings: Settings, schedule: Schedule) -> CheckFailed:
    """Every finding with file and line, seen from the project's root."""
    root = f"{settings.root.resolve()}/"
    lines = [str(each).replace(root, "") for each in findings]
    notes = [
        Annotation(each.kind, relative(each.path, root), each.line, line, settings.test)
        for each, line in zip(findings, lines, strict=True)
    ]
    more = [f"... and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    count = f"{len(lines)} finding{'s' * (len(lines) > 1)}"
    head = f"{target.kernel.entry}: {count} (schedule {schedule})"
    return CheckFailed("\n".join([head, *lines[:_MOST], *more, _replay(settings, schedule)]), notes)


def _compare(
    first: Sequence[Any], other: Sequence[Any], target: Target, settings: Settings, one: Schedule, two: Schedule
) -> None:
    """Raise CheckFailed where two schedules leave different bytes."""
    __tracebackhide__ = True
    for name, a, b in zip(target.kernel.parameters, map(_array_of, first), map(_array_of, other), strict=True):
        if a is None or b is None or a.tobytes() == b.tobytes():
            continue
        unlike = (a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)).reshape(a.size, -1).any(axis=1)
        place = np.unravel_index(int(np.argmax(unlike)), a.shape)
        where = ", ".join(map(str, map(int, place)))
        message = f"{target.kernel.entry}: {name}[{where}] is {a[place]} in schedule {one} and {b[place]} in {two}"
        path = relative(target.kernel.source.path, settings.root)
        note = Annotation("schedule", path, 1, message, settings.test)
        raise CheckFailed(f"{message}\n{_replay(settings, two)}", [note])


def _replay(settings: Settings, schedule: Schedule) -> str:
    test = f'"{settings.test}"' if " " in settings.test else settings.test
    return f"replay: pytest {test} --ptxlab-schedule {schedule}".replace("pytest  ", "pytest ")


__all__ = ["CheckFailed", "Emulate", "Emulated", "PtxlabError", "Schedule", "Settings", "Target"]
