"""Benchmarks: kernels beside their floor and their peers, recorded as JSON."""

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

from rich.table import Table

from ptxlab import __version__, gpu, kernels, toolchain
from ptxlab.bench import dequant
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
    "default_path",
    "load",
    "measure_ceilings",
    "run_suite",
    "save",
    "shortfall",
]

SUITES: dict[str, Any] = {"dequant": dequant.rows}


def run_suite(suite: str, progress: Callable[[str], None] = lambda _: None) -> Record:
    """Measure a suite, or one kernel of it, on the current GPU.

    Args:
        suite: `"dequant"`, or a kernel's name.
        progress: called with what is measured next.

    Returns:
        The record; its `invalid` says why it must not be used, if the card is slower than it should be.

    Raises:
        ArgumentError: no such suite.
        BenchmarkError: a timed kernel gave wrong results.
        UnavailableError: no GPU here, or no ptxas.
    """
    family = suite if suite in SUITES else kernels.find(suite)[0].family
    if family not in SUITES:
        raise ArgumentError("suite", f"one of {', '.join(SUITES)}, or a kernel of these families", suite)
    info = gpu.device_info()
    names = [name for name, spec in kernels.specs().items() if suite in (name, spec.family)]
    progress("ceilings")
    ceilings = measure_ceilings()
    rows = tuple(SUITES[family](names, ceilings, progress))
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
        versions=_versions(info),
        ceilings=ceilings.to_json(),
        rows=rows,
        invalid=shortfall(ceilings, info.slug),
    )


def as_table(record: Record) -> Table:
    """The record for the terminal."""
    ceilings = ", ".join(f"{name} {value:.2f}" for name, value in record.ceilings.items())
    table = Table(title=f"{record.suite} on {record.device['name']}: {ceilings}", title_justify="left")
    for name in ("kernel", "measure", "µs>", "rate>", "", "floor>", "of the floor>", "set by", "SM MHz>"):
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    for row in record.rows:
        figures = (f"{row.time_us:.2f}", f"{row.rate:.1f}", row.rate_unit, f"{row.floor_us:.2f}", f"{row.fraction:.0%}")
        table.add_row(f"{row.kernel}.{row.source}", row.measure, *figures, row.limit, f"{row.sm_mhz:.0f}")
    if record.invalid:
        table.caption = f"NOT VALID: {record.invalid}"
    return table


def _versions(info: gpu.DeviceInfo) -> dict[str, str]:
    return {
        "ptxlab": __version__,
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "cupy": info.cupy,
        "cuda-bindings": metadata.version("cuda-bindings"),
        **toolchain.versions(),
    }
