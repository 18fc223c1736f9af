"""Records of measurements: JSON under `notebooks/results/<gpu>/`, written whole, checked when read, compared."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptxlab import sources
from ptxlab.errors import ArgumentError, FileError
from ptxlab.io.files import read_record, require_folder, write_record
from ptxlab.runtime.timing import Measured
from ptxlab.sources import Source, commit
from ptxlab.spec import KernelSpec

SCHEMA = 1
TOLERANCE = 0.03


@dataclass(frozen=True)
class Row:
    """A measurement beside its floor.

    Attributes:
        kernel: its name.
        source: `"ptx"` or `"cu"`.
        measure: what was measured, `"streaming"`, `"registers"` ...
        sizes: symbols of the spec.
        config: `-D` constants.
        time_us: median per call, likewise `fastest_us` and `slowest_us`.
        rate: what rows are compared by; more is better.
        rate_unit: its unit.
        bytes: compulsory traffic of one call.
        operations: arithmetic operations of one call.
        floor_us: the least time that one call could take here.
        fraction: `floor_us / time_us`.
        limit: what sets the floor.
        sm_mhz: SM clock during the measurement.
        checked: how the results of the timed kernel were checked.
        peers: time of others for the same work in the same run, microseconds by name.
        more: further figures of this measure.
        activations: order in memory of the activations of a GEMM; with `-sums` behind it they came without their token
            sums.
        variant: `-D` constants that the spec chose for these sizes. Unlike `config`, which was asked for, they do not
            tell one measurement from another: what is compared is what the user gets.
        face: the Python function that chose the kernel. Then it tells measurements apart, and not the kernel.
    """

    kernel: str
    source: str
    measure: str
    sizes: dict[str, int]
    time_us: float
    fastest_us: float
    slowest_us: float
    rate: float
    rate_unit: str
    bytes: int
    operations: int
    floor_us: float
    fraction: float
    limit: str
    sm_mhz: float
    checked: str
    config: dict[str, int] = field(default_factory=dict)
    peers: dict[str, float] = field(default_factory=dict)
    more: dict[str, float] = field(default_factory=dict)
    activations: str = ""
    variant: dict[str, int] = field(default_factory=dict)
    face: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Fields that identify the measurement across records."""
        sizes_and_constants = tuple(sorted(self.sizes.items())), tuple(sorted(self.config.items()))
        return self.face or self.kernel, self.source, self.measure, self.activations, *sizes_and_constants

    def __str__(self) -> str:
        settings = [f"{n}={v}" for n, v in {**self.sizes, **self.config}.items()]
        settings += [self.activations] if self.activations else []
        return f"{self.kernel}.{self.source} {self.measure} ({', '.join(settings)})"


@dataclass(frozen=True)
class Record:
    """Measurements of a run of a suite.

    Attributes:
        suite: its name.
        device: name, slug, driver and sizes of the GPU.
        versions: of every tool and library that took part.
        commit: of the sources, with `+` behind it if they were changed since; `"unknown"` outside a checkout.
        date: when it was measured, UTC, ISO 8601.
        ceilings: measured in the same run.
        rows: the measurements.
        invalid: why the record must not be used; empty for a valid one.
        schema: version of this layout.
    """

    suite: str
    device: dict[str, Any]
    versions: dict[str, str]
    ceilings: dict[str, float]
    rows: tuple[Row, ...]
    commit: str = field(default_factory=lambda: commit())
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    invalid: str = ""
    schema: int = SCHEMA

    @property
    def revision(self) -> str:
        """The commit as tables name it: its first ten digits, and the `+`."""
        return self.commit[:10] + "+" * self.commit.endswith("+")

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-ready values."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


@dataclass(frozen=True)
class Slower:
    """A row that got slower than in an older record."""

    row: Row
    old: Row

    @property
    def cycles(self) -> float:
        """Clock cycles for the same work beside those of the older record: 1 if only the clock has changed."""
        clock = self.row.sm_mhz / self.old.sm_mhz if self.row.sm_mhz and self.old.sm_mhz else 1.0
        return self.old.rate / self.row.rate * clock

    @property
    def loss(self) -> float:
        """Share of the rate that was lost."""
        return 1 - self.row.rate / self.old.rate

    @property
    def of_floor(self) -> float:
        """Time as a multiple of the floor, beside that of the older record: 1 if only the card's memory is slower."""
        return self.old.fraction / self.row.fraction

    @property
    def is_slower_throughout(self) -> bool:
        """True if every replay is slower than every one of the older record."""
        return self.row.fastest_us > self.old.slowest_us

    def __str__(self) -> str:
        rates = f"{self.row.rate:.4g} {self.row.rate_unit}, was {self.old.rate:.4g} ({self.loss:.1%} less)"
        return f"{self.row}: {rates}, {self.cycles - 1:+.1%} cycles at {self.row.sm_mhz:.0f} MHz"


def row_of(
    spec: KernelSpec,
    measure: str,
    sizes: dict[str, int],
    measured: Measured,
    *,
    floor: tuple[float, str],
    checked: str,
    source: Source | None = None,
    nbytes: int | None = None,
    rate: tuple[float, str] | None = None,
    **further: Any,
) -> Row:
    """Make the row of one measurement.

    Args:
        spec: the kernel.
        measure: what was measured, `"streaming"` ...
        sizes: symbols of the spec.
        measured: the times.
        floor: microseconds, and what sets them.
        checked: how the results of the timed kernel were checked.
        source: which was measured, by default the one that a bare name means.
        nbytes: traffic of one call, by default the compulsory one.
        rate: what rows are compared by and its unit, by default the traffic per second.
        further: other fields of `Row` by name; `kernel` where a call launches others too.
    """
    nbytes = spec.bytes_moved(sizes) if nbytes is None else nbytes
    amount, unit = rate or (nbytes / measured.us / 1e3, "GB/s")
    floor_us, limit = floor
    return Row(
        source=(source or sources.sources_of_kernel(spec.name)[0]).language,
        measure=measure,
        sizes=sizes,
        time_us=measured.us,
        fastest_us=measured.fastest,
        slowest_us=measured.slowest,
        rate=amount,
        rate_unit=unit,
        bytes=nbytes,
        floor_us=floor_us,
        fraction=floor_us / measured.us,
        limit=limit,
        sm_mhz=measured.sm_mhz,
        checked=checked,
        **{"kernel": spec.name, "operations": 0, **further},
    )


def default_path(record: Record) -> Path:
    """Return a record's default path: `notebooks/results/<gpu>/<suite>.json`.

    It is `<suite>-<gpu>.json` in the current folder unless it `_is_kept`.
    """
    slug = str(record.device["slug"])
    if not _is_kept(record.suite):
        return Path(f"{record.suite.removesuffix('.py')}-{slug}.json")
    return sources.results_dir() / slug / f"{record.suite}.json"


def _is_kept(suite: str) -> bool:
    """Check whether a record belongs to this project's results: in a checkout, unless it is of a user's `FILE.py`."""
    return sources.in_checkout() and not suite.endswith(".py")


def require_writable(suite: str, path: Path | None) -> None:
    """Raise FileError if `save` could not write. Call it before anything is measured."""
    if path is not None:
        return require_folder(path)
    folder = sources.results_dir() if _is_kept(suite) else Path.cwd()
    if not os.access(folder, os.W_OK):
        raise FileError(f"{folder}: cannot be written to; --out says where the record goes")


def save(record: Record, path: Path | None = None) -> Path:
    """Write a record with a line per row, whole or not at all; returns where."""
    path = path or default_path(record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path.parent}: cannot be made: {error.strerror}") from None
    write_record(path, record.to_json(), "rows")
    return path


def load(path: Path) -> Record:
    """Read a record; `FileError` says in one line why a file is none."""
    fields_of_record = read_record(Path(path), "a benchmark record", SCHEMA)
    try:
        record = Record(**{**fields_of_record, "rows": tuple(row_from(row) for row in fields_of_record["rows"])})
    except (TypeError, KeyError, ValueError) as error:
        raise FileError(f"{path}: not a benchmark record: {error}") from None
    return record


def compare(new: Record, old: Record, tolerance: float = TOLERANCE) -> list[Slower]:
    """List the rows whose rate fell by more than `tolerance` against the same row of an older record of the same GPU.

    Not those whose clock alone fell: the power limit moves it by a tenth with the card's temperature, from one run to
    the next. A kernel that got slower takes more cycles. Nor those whose floor, measured in the same run, rose as
    much: the memory of one card is a percent or two slower than another's. Nor those of which some replay was as fast
    as some replay then: where arrays lie in memory gives a few kernels two speeds.
    """
    if new.device.get("slug") != old.device.get("slug"):
        raise ArgumentError("against", f"a record of {new.device.get('slug')}", old.device.get("slug"))
    old_rows = {row.key: row for row in old.rows}
    row_pairs = [Slower(row, old_rows[row.key]) for row in new.rows if row.key in old_rows]
    return [
        pair
        for pair in row_pairs
        if pair.is_slower_throughout and min(pair.loss, 1 - 1 / pair.cycles, 1 - 1 / pair.of_floor) > tolerance
    ]


def row_from(fields_of_row: Mapping[str, Any]) -> Row:
    """Check a row of a file; raises TypeError or ValueError for what is none."""
    row = Row(**fields_of_row)
    for name in (f.name for f in fields(Row) if f.type in (float, int)):
        if not isinstance(getattr(row, name), int | float):
            raise ValueError(f"{name} is no number")
    return row
