"""Benchmarks: kernels beside their floor and their peers, recorded as JSON."""

import platform
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import decode as models
from benchmarks import layer, peers
from ptxlab import __version__, gpu, toolchain
from ptxlab.bench import user_kernels as own
from ptxlab.bench.ceilings import Ceilings, measure_ceilings, shortfall
from ptxlab.bench.record import Record, Row, Slower, compare, default_path, load, require_writable, save
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import kernels
from ptxlab.lowbit.bench import attention, dequant, emulation, gemm, loads, stream
from ptxlab.spec.user_specs import specs_in

__all__ = [
    "RESUMED",
    "SUITES",
    "Ceilings",
    "Record",
    "Row",
    "Slower",
    "as_tables",
    "compare",
    "confirmed",
    "default_path",
    "load",
    "measure_ceilings",
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
_PART = "_part"
_UNFINISHED = "not finished"  # why a record is invalid that its run will go on with

SUITES: dict[str, Any] = {
    "dequant": dequant.rows,
    "load": loads.rows,
    "gemm": gemm.rows,
    "attention": attention.rows,
    "layer": layer.rows,
    "decode": models.rows,
}
RESUMED = ("layer", "decode", "torch")  # take long; a run that was stopped goes on where it was
_PARTS: dict[str, Callable[[Sequence[str]], Any]] = {"gemm": gemm.part, "layer": layer.part, "decode": models.part}


def run_suite(
    suite: str,
    progress: Callable[[str], None] = lambda _: None,
    *,
    matrices: Container[tuple[int, int]] | None = None,
    only: Sequence[str] = (),
    resume: Path | None = None,
) -> Record:
    """Measure a suite, or one kernel of it, on the current GPU (the suite `emulator`: on the CPU).

    Args:
        suite: `"dequant"`, `"load"`, `"gemm"`, `"attention"`, `"layer"`, `"decode"`, `"emulator"`, a kernel's name,
            or `FILE.py` with the specs of other kernels.
        progress: called with what is measured next.
        matrices: of a GEMM those alone, by (N, K).
        only: of the suites `gemm`, `layer` and `decode` that part alone, by words (`gemm.part` ...).
        resume: of the suites of `RESUMED` (whole, or whole models of `decode`): a record, which grows with every
            row. Rows that are in it, of the same commit, card and versions, are not measured again.

    Returns:
        The record; its `invalid` says why it must not be used, if the card is slower than it should be.

    Raises:
        ArgumentError: no such suite, or `matrices` or `only` of one that has none.
        BenchmarkError: a timed kernel gave wrong results.
        UnavailableError: no GPU here, or no ptxas.
    """
    _require_part(suite, only)
    is_file = Path(suite).suffix == ".py"
    family = suite if is_file or suite in ("emulator", *SUITES) else kernels.find(suite)[0].family
    if matrices is not None and family != "gemm":
        raise ArgumentError("matrices", f"must be None for the suite {family}", matrices)
    if suite == "emulator":
        device = {"name": platform.processor() or platform.machine(), "slug": "cpu"}
        return Record(suite, device, versions(None), {}, tuple(emulation.rows(progress)))
    if is_file:
        return _record(Path(suite).name, partial(own.rows, specs_in(Path(suite))), progress)
    if family not in SUITES:
        raise ArgumentError("suite", f"emulator, {', '.join(SUITES)}, or a kernel of these families", suite)
    names = [name for name, spec in kernels.specs().items() if suite in (name, spec.family)]
    if suite not in SUITES and not names:
        raise ArgumentError("suite", "a suite or a kernel by its bare name, in all its sources and forms", suite)
    part = {"matrices": matrices} if matrices is not None else {"only": only} if only else {}
    name = _name(suite, only)
    goes_on = suite in RESUMED and not name.endswith(_PART)  # of parts nobody knows what they were asked for
    return _record(name, partial(SUITES[family], names, **part), progress, resume if goes_on else None)


def _record(
    suite: str, rows: Callable[..., Iterable[Row]], progress: Callable[[str], None], resume: Path | None = None
) -> Record:
    """The rows beside the ceilings of the same run; with `resume` beside those that the record there has, kept in it as
    soon as they are measured."""
    info = gpu.device_info()
    progress("ceilings")
    ceilings = measure_ceilings()
    record = Record(
        suite=suite,
        device={
            "name": info.name,
            "slug": info.slug,
            "driver": info.driver,
            "sms": info.sms,
            "l2_bytes": info.l2_bytes,
            "memory_bytes": info.memory_bytes,
            **({} if resume is None else {"card": gpu.card_id()}),
        },
        versions=versions(info),
        ceilings=ceilings.to_json(),
        rows=(),
    )
    done = () if resume is None else _done(resume, record)
    too_slow = shortfall(ceilings, info.slug)
    measured: list[Row] = []
    for row in rows(ceilings, progress) if resume is None else rows(ceilings, progress, done=done):
        measured.append(row)
        if resume is not None:
            here = {row.key for row in measured}
            kept = (*measured, *(row for row in done if row.key not in here))  # those whose turn has not come
            save(replace(record, rows=kept, invalid=too_slow or _UNFINISHED), resume)
    return replace(record, rows=tuple(measured), invalid=too_slow or stream.shortfall(measured, info.slug))


def resumed_path(suite: str, only: Sequence[str]) -> Path:
    """Where the record of one of `RESUMED`, or of that part, goes unless somebody says otherwise."""
    _require_part(suite, only)
    return default_path(Record(_name(suite, only), {"slug": gpu.device_info().slug}, {}, {}, ()))


def _require_part(suite: str, only: Sequence[str]) -> None:
    """Raise ArgumentError for words that name no part of the suite."""
    if suite in _PARTS:
        _PARTS[suite](only)
    elif only:
        raise ArgumentError("only", f"must be empty for the suite {suite}", ", ".join(only))


def _name(suite: str, only: Sequence[str]) -> str:
    """A part is no record of the suite; but W4A4, the epilogues of `layer`, and whole models of `decode` have their
    own."""
    if suite == "gemm" and {*only} == {gemm.w4a4.PART}:
        return f"gemm_{gemm.w4a4.PART}"
    if suite == "decode" and only and set(only) <= {config.name for config in models.MODELS}:
        return f"decode/{'+'.join(only)}"
    if suite == "layer" and [*only] == [layer.EPILOGUES]:
        return f"layer_{layer.EPILOGUES}"
    return f"{suite}{_PART}" if only else suite


def _done(path: Path, record: Record) -> tuple[Row, ...]:
    """The rows of an earlier run on the same card, commit and versions, if there is one whose ceilings were right."""
    before = load(path) if path.is_file() else None
    if before is None or before.invalid not in ("", _UNFINISHED) or record.commit.endswith("+"):
        return ()
    same = all(getattr(before, name) == getattr(record, name) for name in ("device", "versions", "commit"))
    return before.rows if same else ()


def confirmed(
    slower: Sequence[Slower], before: Record, progress: Callable[[str], None] = lambda _: None
) -> list[Slower]:
    """Of the rows that got slower, those that are so again wherever in memory their kernels are measured anew, alone.

    Of some thousand rows a few are slower in any run, by a clock that fell or by where arrays came to lie, which gives
    a kernel two speeds that may be a tenth apart. What a kernel's own run does not measure (a chain, a loop) stays.
    """
    for place in range(_PLACES):
        again: list[Record] = []
        alone = [one for one in slower if not before.suite.startswith("layer") and _has_suite(one.row.kernel)]
        for kernel in sorted({one.row.kernel for one in alone}):
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
    return spec is not None and spec.family in SUITES


def title(record: Record) -> str:
    """What was measured where, the ceilings of the run, and why the record must not be used if so."""
    ceilings = ", ".join(f"{name} {value:.2f}" for name, value in record.ceilings.items())
    invalid = f"  NOT VALID: {record.invalid}" if record.invalid else ""
    return f"{record.suite} on {record.device['name']}: {ceilings}{invalid}"


def as_tables(record: Record) -> list[tuple[str, list[str], list[list[str]]]]:
    """The record for a terminal of 100 columns: title, columns (right-aligned where the name ends in `>`), rows.

    What is the same in all rows of a table is in its title.
    """
    sizes_of: dict[tuple[str, str], set[str]] = {}
    for row in record.rows:
        sizes_of.setdefault((row.measure, row.kernel), set()).add(str(row.sizes))
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in record.rows:
        alone = len(sizes_of[row.measure, row.kernel]) > 1  # one kernel at several sizes; else kernels at one size
        key = row.measure, row.activations, row.rate_unit, row.face or (row.kernel if alone else "")
        tables.setdefault(key, []).append(row)
    return [_table(key, rows) for key, rows in tables.items()]


def _table(key: tuple[str, ...], rows: Sequence[Row]) -> tuple[str, list[str], list[list[str]]]:
    measure, activations, unit, name = key
    first = rows[0].sizes if len(rows) > 1 else {}
    common = {symbol: size for symbol, size in first.items() if all(row.sizes.get(symbol) == size for row in rows)}
    labels = [_label(row) for row in rows]
    columns: dict[str, list[str]] = {
        "kernel": labels if len(set(labels)) > 1 else [],
        "sizes": [_assigned({s: v for s, v in row.sizes.items() if s not in common} | row.config) for row in rows],
        "µs>": [f"{row.time_us:.2f}" if row.time_us < 100 else f"{row.time_us:.1f}" for row in rows],
        f"{unit}>": [f"{row.rate:.1f}" for row in rows],
        "of floor": [f"{row.fraction:4.0%} {row.limit}" for row in rows],
        "over best peer": [_over_best_peer(row) for row in rows],
    }
    shown = {column: cells for column, cells in columns.items() if any(cells)}
    title = [measure, name or (labels[0] if len(set(labels)) == 1 else ""), activations, _assigned(common)]
    return ", ".join(filter(None, title)), list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)]


def _label(row: Row) -> str:
    """The kernels, where a Python call chose them without the call's name: `small_sm90, sm90` of `gemm_w4a8`."""
    if not row.face:
        return f"{row.kernel}.{row.source}"
    return ", ".join(kernel.removeprefix(f"{row.face}_") for kernel in row.kernel.split(", "))


def _assigned(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _over_best_peer(row: Row) -> str:
    """How many times as fast as the fastest peer, and its name."""
    name = min(row.peers, key=row.peers.__getitem__, default="")
    return f"{row.peers[name] / row.time_us:.2f}x {name}" if name else ""


def versions(info: gpu.DeviceInfo | None) -> dict[str, str]:
    """Of every tool and library that takes part; None: without a GPU."""
    own = {"ptxlab": __version__, "python": platform.python_version(), "numpy": metadata.version("numpy")}
    if info is None:
        return own
    found = {"cupy": info.cupy, "cuda-bindings": metadata.version("cuda-bindings"), **toolchain.versions()}
    return {**own, **found, **peers.versions()}
