"""Benchmarks: kernels beside their floor and their peers, recorded as JSON."""

import platform
from collections.abc import Callable, Container, Sequence
from importlib import metadata
from typing import Any

from ptxlab import __version__, gpu, kernels, toolchain
from ptxlab.bench import attention, dequant, emulation, gemm, loads, stream
from ptxlab.bench.ceilings import Ceilings, measure_ceilings, shortfall
from ptxlab.bench.record import Record, Row, Slower, compare, default_path, load, save
from ptxlab.errors import ArgumentError

__all__ = [
    "SUITES",
    "Ceilings",
    "Record",
    "Row",
    "Slower",
    "as_table",
    "compare",
    "confirmed",
    "default_path",
    "load",
    "measure_ceilings",
    "run_suite",
    "save",
    "shortfall",
    "versions",
]

_PLACES = 3  # in memory, at most, where what is slower is measured once more
_PAD = 74 << 20  # bytes between them

SUITES: dict[str, Any] = {"dequant": dequant.rows, "load": loads.rows, "gemm": gemm.rows, "attention": attention.rows}


def run_suite(
    suite: str, progress: Callable[[str], None] = lambda _: None, *, matrices: Container[tuple[int, int]] | None = None
) -> Record:
    """Measure a suite, or one kernel of it, on the current GPU (the suite `emulator`: on the CPU).

    Args:
        suite: `"dequant"`, `"load"`, `"gemm"`, `"attention"`, `"emulator"`, or a kernel's name.
        progress: called with what is measured next.
        matrices: of a GEMM those alone, by (N, K).

    Returns:
        The record; its `invalid` says why it must not be used, if the card is slower than it should be.

    Raises:
        ArgumentError: no such suite, or `matrices` of one without any.
        BenchmarkError: a timed kernel gave wrong results.
        UnavailableError: no GPU here, or no ptxas.
    """
    if suite == "emulator":
        device = {"name": platform.processor() or platform.machine(), "slug": "cpu"}
        return Record(suite, device, versions(None), {}, tuple(emulation.rows(progress)))
    family = suite if suite in SUITES else _suite_of(kernels.find(suite)[0].family)
    if family not in SUITES:
        raise ArgumentError("suite", f"emulator, {', '.join(SUITES)}, or a kernel of these families", suite)
    if matrices is not None and family != "gemm":
        raise ArgumentError("matrices", f"must be None for the suite {family}", matrices)
    info = gpu.device_info()
    names = [name for name, spec in kernels.specs().items() if suite in (name, _suite_of(spec.family))]
    progress("ceilings")
    ceilings = measure_ceilings()
    only = {} if matrices is None else {"matrices": matrices}
    rows = tuple(SUITES[family](names, ceilings, progress, **only))
    return Record(
        suite=suite,
        device={
            "name": info.name,
            "slug": info.slug,
            "driver": info.driver,
            "sms": info.sms,
            "l2_bytes": info.l2_bytes,
            "memory_bytes": info.memory_bytes,
        },
        versions=versions(info),
        ceilings=ceilings.to_json(),
        rows=rows,
        invalid=shortfall(ceilings, info.slug) or stream.shortfall(rows, info.slug),
    )


def confirmed(
    slower: Sequence[Slower], before: Record, progress: Callable[[str], None] = lambda _: None
) -> list[Slower]:
    """Of the rows that got slower, those that are so again wherever in memory their kernels are measured anew, alone.

    Of some thousand rows a few are slower in any run, by a clock that fell or by where arrays came to lie, which gives
    a kernel two speeds that may be a tenth apart. What a kernel's own run does not measure (a chain, a loop) stays.
    """
    for place in range(_PLACES):
        again: list[Record] = []
        for kernel in sorted({one.row.kernel for one in slower if _has_suite(one.row.kernel)}):
            sizes = [one.row.sizes for one in slower if one.row.kernel == kernel]
            of_gemm = kernels.find(kernel)[0].family == "gemm"
            only = {(s["N"], s["K"]) for s in sizes if "N" in s} if of_gemm else None
            with gpu.elsewhere((1 + place) * _PAD):
                again.append(run_suite(kernel, progress, matrices=only))
        measured = {row.key for record in again for row in record.rows}
        still = {one.row.key for record in again for one in compare(record, before)}
        slower = [one for one in slower if one.row.key in still or one.row.key not in measured]
        if not measured:
            break
    return list(slower)


def _has_suite(kernel: str) -> bool:
    """Whether it is the name of a kernel that can be measured alone."""
    spec = kernels.specs().get(kernel)
    return spec is not None and _suite_of(spec.family) in SUITES


def _suite_of(family: str) -> str:
    """The suite that measures a family: `append_kv4` is measured with the attention that it is made for."""
    return "attention" if family == "append" else family


def as_table(record: Record) -> tuple[str, list[str], list[list[str]]]:
    """The record for the terminal: title, columns (right-aligned where the name ends in `>`), rows."""
    ceilings = ", ".join(f"{name} {value:.2f}" for name, value in record.ceilings.items())
    columns = ["kernel", "measure", "sizes", "µs>", "rate>", "unit", "of floor>", "set by", "best peer", "µs>"]
    rows = [
        [
            f"{row.kernel}.{row.source}",
            row.measure,
            " ".join([*(f"{name}={size}" for name, size in row.sizes.items()), row.activations]).rstrip(),
            f"{row.time_us:.2f}",
            f"{row.rate:.1f}",
            row.rate_unit,
            f"{row.fraction:.1%}",
            row.limit,
            *_best_peer(row),
        ]
        for row in record.rows
    ]
    invalid = f"  NOT VALID: {record.invalid}" if record.invalid else ""
    return f"{record.suite} on {record.device['name']}: {ceilings}{invalid}", columns, rows


def _best_peer(row: Row) -> tuple[str, str]:
    """Name and microseconds of the fastest peer, if there is one."""
    if not row.peers:
        return "", ""
    name = min(row.peers, key=row.peers.__getitem__)
    return name, f"{row.peers[name]:.2f}"


def versions(info: gpu.DeviceInfo | None) -> dict[str, str]:
    """Of every tool and library that takes part; None: without a GPU."""
    own = {"ptxlab": __version__, "python": platform.python_version(), "numpy": metadata.version("numpy")}
    if info is None:
        return own
    return {**own, "cupy": info.cupy, "cuda-bindings": metadata.version("cuda-bindings"), **toolchain.versions()}
