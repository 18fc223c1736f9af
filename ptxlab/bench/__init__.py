"""Benchmarks: kernels beside their floor and their peers, recorded as JSON."""

import hashlib
import platform
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ptxlab import __version__, gpu, registry, toolchain
from ptxlab.bench import user_kernels
from ptxlab.bench.ceilings import Ceilings, measure_ceilings, shortfall
from ptxlab.bench.record import Record, Row, Slower, compare, default_path, load, require_writable, save
from ptxlab.bench.sections import UNFINISHED, PartialRecord, partial_path
from ptxlab.bench.suite import OURS, PART, Keep, Suite
from ptxlab.errors import ArgumentError
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec
from ptxlab.spec.user_specs import specs_in

__all__ = [
    "Ceilings",
    "Record",
    "Row",
    "Slower",
    "Suite",
    "as_tables",
    "compare",
    "confirm_slower",
    "default_path",
    "load",
    "measure_ceilings",
    "named_suite",
    "partial_path",
    "require_writable",
    "resumed_path",
    "run_suite",
    "save",
    "shortfall",
    "title",
    "versions",
]

_PLACES = 3  # in memory, at most, where what is slower is measured once more
_PAD = 74 << 20  # bytes between them
_OUTSIDE = ("decode", "layer", "prefill", "torch")  # suites that time other projects: notebooks/benchmarks


class _Keeper(NamedTuple):
    """The way a run keeps its sections.

    Attributes:
        path: of the record.
        request: what is measured.
        say: called with a line about an earlier run that was stopped.
    """

    path: Path
    request: str
    say: Callable[[str], None]


def suite_of(name: str) -> tuple[Suite, list[str]]:
    """Find a suite by its name or by a kernel's: (suite, names of the kernels to measure).

    Raises ArgumentError for a name that is neither, and for a kernel that no suite measures.
    """
    suites = registry.entries("suites")
    if name in _OUTSIDE:
        raise ArgumentError(
            "suite", f"one that this command has; run `python -m benchmarks {name}` in notebooks/", name
        )
    family = name if name in suites else registry.find(name)[0].family
    if family not in suites:
        raise ArgumentError("suite", f"{', '.join(suites)}, or a kernel of these families", name)
    names = [kernel_name for kernel_name, spec in registry.specs().items() if name in (kernel_name, spec.family)]
    if name not in suites and not names:
        raise ArgumentError("suite", "a suite or a kernel by its bare name, in all its sources and forms", name)
    suite: Suite = suites[family].load()
    return (suite if name == family else replace(suite, name=name)), names


def named_suite(name: str) -> Suite:
    """Find a suite by its name, by a kernel's, or for the kernels of `FILE.py`; raises as `suite_of` does."""
    return Suite(Path(name).name, user_kernels.rows, keeps=True) if _is_file(name) else suite_of(name)[0]


def _is_file(name: str) -> bool:
    return Path(name).suffix == ".py"


def run_suite(
    suite: str | Suite,
    progress: Callable[[str], None] = lambda _: None,
    *,
    matrices: Container[tuple[int, int]] | None = None,
    only: Sequence[str] = (),
    resume: Path | None = None,
    libraries: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Record:
    """Measure a suite, or one kernel of it, on the current GPU (the suite `emulator`: on the CPU).

    Args:
        suite: the name of a registered suite or of a kernel, `FILE.py` with the specs of other kernels, or a `Suite`.
        progress: called with what is measured next.
        matrices: of a GEMM those alone, by (N, K).
        only: that part alone, by the words that the suite knows (`Suite.part`).
        resume: of a suite that resumes (whole, or whole models of `decode`): a record, which grows with every row.
            Rows that are in it, of the same commit, card and versions, are not measured again. Of a suite that keeps
            its sections: the path of the record; beside it lies the file with them (`partial_path`), which the caller
            removes when the record is written.
        libraries: versions of other libraries that take part, by name.
        say: called with a line that says where the run goes on, or why it begins anew.
        options: what else the suite takes by keyword, such as `peers`.

    Returns:
        The record; its `invalid` says why it must not be used, if the card is slower than it should be.

    Raises:
        ArgumentError: no such suite, or `matrices`, `only` or an option that it does not take.
        BenchmarkError: a timed kernel gave wrong results.
        UnavailableError: no GPU here, or no ptxas.
    """
    names: Sequence[Any] = ()
    is_file = isinstance(suite, str) and _is_file(suite)
    if isinstance(suite, Suite) or is_file:
        chosen = suite if isinstance(suite, Suite) else named_suite(suite)
    else:
        chosen, names = suite_of(suite)
    chosen.require_part(only)
    if matrices is not None:
        options["matrices"] = matrices
    for option, setting in options.items():
        if option not in chosen.takes:
            raise ArgumentError(option, f"must be None for the suite {chosen.name}", setting)
    if is_file:
        names = specs_in(Path(str(suite)))
    keeper = _Keeper(resume, _request(chosen, names, only, options), say) if chosen.keeps and resume else None
    if not chosen.on_gpu:
        device = {"name": platform.processor() or platform.machine(), "slug": "cpu"}
        record = Record(chosen.name, device, versions(None), {}, ())
        return replace(record, rows=tuple(chosen.rows(progress, **_keep(keeper, record))))
    if only:
        options["only"] = only
    name = chosen.record_name(only)
    if "peers" in chosen.takes and "peers" not in options and suite in registry.entries("suites"):
        name += OURS  # the record with peers stays what it is
    goes_on = chosen.resumes and not name.endswith(PART)  # of parts nobody knows what they were asked for
    measure = partial(chosen.rows, names, **options)
    return _record(name, measure, progress, libraries or {}, chosen.shortfall, resume if goes_on else None, keeper)


def _record(
    suite: str,
    rows: Callable[..., Iterable[Row]],
    progress: Callable[[str], None],
    libraries: Mapping[str, str],
    slow_rows: Callable[[Sequence[Row], str], str] = lambda rows, device: "",
    resume: Path | None = None,
    keeper: _Keeper | None = None,
) -> Record:
    """Record the rows beside the ceilings of the same run.

    With `resume` the rows that the record there has are kept, and new ones are stored in it as soon as they are
    measured.
    """
    device_info = gpu.device_info()
    progress("ceilings")
    ceilings = measure_ceilings()
    record = Record(
        suite=suite,
        device={
            "name": device_info.name,
            "slug": device_info.slug,
            "driver": device_info.driver,
            "sms": device_info.sms,
            "l2_bytes": device_info.l2_bytes,
            "memory_bytes": device_info.memory_bytes,
            **({} if resume is None and keeper is None else {"card": gpu.card_id()}),
        },
        versions={**versions(device_info), **libraries},
        ceilings=ceilings.to_json(),
        rows=(),
    )
    earlier_rows = () if resume is None else _earlier_rows(resume, record)
    too_slow = shortfall(ceilings, device_info.slug)
    measured_rows: list[Row] = []
    keep = _keep(keeper, replace(record, invalid=too_slow))
    for row in rows(ceilings, progress, **keep) if resume is None else rows(ceilings, progress, done=earlier_rows):
        measured_rows.append(row)
        if resume is not None:
            measured_keys = {row.key for row in measured_rows}
            not_yet_measured = (row for row in earlier_rows if row.key not in measured_keys)
            rows_so_far = (*measured_rows, *not_yet_measured)
            save(replace(record, rows=rows_so_far, invalid=too_slow or UNFINISHED), resume)
    return replace(record, rows=tuple(measured_rows), invalid=too_slow or slow_rows(measured_rows, device_info.slug))


def resumed_path(suite: Suite, only: Sequence[str]) -> Path:
    """Return the default path of the record of a suite that resumes, or of that part of it."""
    suite.require_part(only)
    slug = gpu.device_info().slug if suite.on_gpu else "cpu"
    return default_path(Record(suite.record_name(only), {"slug": slug}, {}, {}, ()))


def _request(suite: Suite, names: Sequence[Any], only: Sequence[str], options: Mapping[str, Any]) -> str:
    """Name what a run of a suite measures: another text for other kernels, parts, options, and sources of the user."""
    kernels = [name if isinstance(name, str) else _digest(*name) for name in names]
    matrices = sorted(options.get("matrices", ()))
    return f"{suite.name}: {' '.join([*kernels, *only])}; {matrices}; peers: {'peers' in options}"


def _digest(spec: KernelSpec, own_sources: Sequence[Source]) -> str:
    """Return a user's kernel's name with a digest of its sources and sizes."""
    text = "".join([str(spec.example_sizes), *(source.text for source in own_sources)])
    return f"{spec.name}={hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _keep(keeper: _Keeper | None, record: Record) -> dict[str, Keep]:
    """Return the keyword with which `Suite.rows` keeps its sections, if this run keeps any."""
    if keeper is None:
        return {}
    partial_record = PartialRecord(partial_path(keeper.path), record, keeper.request)
    if partial_record.note:
        keeper.say(f"{record.suite} {partial_record.note}")
    return {"keep": partial_record}


def _earlier_rows(path: Path, record: Record) -> tuple[Row, ...]:
    """Return the rows of an earlier run on the same card, commit and versions.

    There are none unless there is such a run and its ceilings were right.
    """
    earlier_record = load(path) if path.is_file() else None
    if earlier_record is None or earlier_record.invalid not in ("", UNFINISHED) or record.commit.endswith("+"):
        return ()
    is_same_run = all(
        getattr(earlier_record, name) == getattr(record, name) for name in ("device", "versions", "commit")
    )
    return earlier_record.rows if is_same_run else ()


def confirm_slower(
    slower_rows: Sequence[Slower], baseline: Record, progress: Callable[[str], None] = lambda _: None
) -> list[Slower]:
    """Return the slower rows that are slower again when their kernels are measured alone, at several places in memory.

    Of some thousand rows a few are slower in any run: a clock fell, or arrays came to lie where a kernel runs at the
    lower of two speeds, which may be a tenth apart. What a kernel's own run does not measure (a chain, a loop) stays.
    """
    for place in range(_PLACES):
        rerun_records: list[Record] = []
        rerunnable = [
            comparison
            for comparison in slower_rows
            if not baseline.suite.startswith("layer") and _has_suite(comparison.row.kernel)
        ]
        for kernel in sorted({comparison.row.kernel for comparison in rerunnable}):
            sizes = [comparison.row.sizes for comparison in slower_rows if comparison.row.kernel == kernel]
            takes_matrices = "matrices" in suite_of(kernel)[0].takes
            matrices = {(s["N"], s["K"]) for s in sizes if "N" in s} if takes_matrices else None
            with gpu.allocating_elsewhere((1 + place) * _PAD):
                rerun_records.append(run_suite(kernel, progress, matrices=matrices))
        rerun_keys = {row.key for record in rerun_records for row in record.rows}
        slower_keys = {comparison.row.key for record in rerun_records for comparison in compare(record, baseline)}
        slower_rows = [
            comparison
            for comparison in slower_rows
            if comparison.row.key in slower_keys or comparison.row.key not in rerun_keys
        ]
        if not rerun_keys:
            break
    return list(slower_rows)


def _has_suite(kernel: str) -> bool:
    """Check whether a name is that of a kernel that can be measured alone."""
    spec = registry.specs().get(kernel)
    return spec is not None and spec.family in registry.entries("suites")


def title(record: Record) -> str:
    """Describe a record in a line: suite, device, the ceilings of the run.

    If it must not be used, the line says why.
    """
    ceilings = ", ".join(f"{name} {ceiling:.2f}" for name, ceiling in record.ceilings.items())
    invalid_note = f"  NOT VALID: {record.invalid}" if record.invalid else ""
    return f"{record.suite} on {record.device['name']}: {ceilings}{invalid_note}"


def as_tables(record: Record) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the record for a terminal of 100 columns: title, columns (right-aligned where the name ends in `>`), rows.

    What is the same in all rows of a table is in its title.
    """
    sizes_by_kernel: dict[tuple[str, str], set[str]] = {}
    for row in record.rows:
        sizes_by_kernel.setdefault((row.measure, row.kernel), set()).add(str(row.sizes))
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in record.rows:
        # A table has one kernel at several sizes, or several kernels at one size.
        has_several_sizes = len(sizes_by_kernel[row.measure, row.kernel]) > 1
        key = row.measure, row.activations, row.rate_unit, row.face or (row.kernel if has_several_sizes else "")
        tables.setdefault(key, []).append(row)
    return [_table(key, rows) for key, rows in tables.items()]


def _table(key: tuple[str, ...], rows: Sequence[Row]) -> tuple[str, list[str], list[list[str]]]:
    """Return title, column heads and cells of one table: the rows with this key (measure, activations, unit, name)."""
    measure, activations, unit, name = key
    first = rows[0].sizes if len(rows) > 1 else {}
    common = {symbol: size for symbol, size in first.items() if all(row.sizes.get(symbol) == size for row in rows)}
    labels = [_label(row) for row in rows]
    columns: dict[str, list[str]] = {
        "kernel": labels if len(set(labels)) > 1 else [],
        "sizes": [
            _format_assignments({s: v for s, v in row.sizes.items() if s not in common} | row.config) for row in rows
        ],
        "µs>": [f"{row.time_us:.2f}" if row.time_us < 100 else f"{row.time_us:.1f}" for row in rows],
        f"{unit}>": [f"{row.rate:.1f}" for row in rows],
        "of floor": [f"{row.fraction:4.0%} {row.limit}" for row in rows],
        "over best peer": [_over_best_peer(row) for row in rows],
    }
    filled_columns = {column: cells for column, cells in columns.items() if any(cells)}
    title = [measure, name or (labels[0] if len(set(labels)) == 1 else ""), activations, _format_assignments(common)]
    return (
        ", ".join(filter(None, title)),
        list(filled_columns),
        [list(cells) for cells in zip(*filled_columns.values(), strict=True)],
    )


def _label(row: Row) -> str:
    """Label a row `KERNEL.SOURCE`, or by the kernels that a Python call chose, without the call's name.

    The latter are for example `small_sm90, sm90` of `gemm_w4a8`.
    """
    if not row.face:
        return f"{row.kernel}.{row.source}"
    return ", ".join(kernel.removeprefix(f"{row.face}_") for kernel in row.kernel.split(", "))


def _format_assignments(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={assigned}" for name, assigned in values.items())


def _over_best_peer(row: Row) -> str:
    """Compare a row with its fastest peer: the ratio of times, and the peer's name."""
    name = min(row.peers, key=row.peers.__getitem__, default="")
    return f"{row.peers[name] / row.time_us:.2f}x {name}" if name else ""


def versions(device: gpu.DeviceInfo | None) -> dict[str, str]:
    """Return the versions of every tool and library that takes part; None: without a GPU."""
    host_versions = {"ptxlab": __version__, "python": platform.python_version(), "numpy": metadata.version("numpy")}
    if device is None:
        return host_versions
    gpu_versions = {"cupy": device.cupy, "cuda-bindings": metadata.version("cuda-bindings")}
    return {**host_versions, **gpu_versions, **toolchain.versions()}
