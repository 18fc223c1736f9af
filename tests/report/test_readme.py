"""What the README says works, and its tables are current."""

from dataclasses import replace

import pytest

from ptxlab import headers, kernels, kvpoints, ladder, report
from tests.support.bench_rows import slowed


def test_the_tables_are_what_the_records_say() -> None:
    assert report.update(write=False) == [], "run `ptxlab report`"


def test_figures_in_the_headers_are_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another record, every header that states a measurement is out of date, and says the new figures."""
    measured = {**headers.rows("h200", "dequant"), **headers.rows("h200", "load")}
    slower = {key: replace(row, rate=row.rate / 2, fraction=0.5) for key, row in measured.items()}
    monkeypatch.setattr(headers, "rows", lambda gpu, suite: slower)
    recorded = {kernel for kernel, _, what in measured if what == "streaming"}
    assert {path.stem for path in headers.outdated()} == recorded
    lqq = next(text for path, text in headers.outdated().items() if path.stem == "dequant_lqq")
    streaming, registers = (slower["dequant_lqq", "ptx", what].rate for what in ("streaming", "registers"))
    stated = (
        f"{streaming / 1e3:.2f} TB/s on an H200, 0.50 of a copy; the word alone in registers: {registers:.0f} weights"
    )
    assert f"// Measured   {stated}" in lqq


def test_no_measurement_in_a_header_is_typed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """With records of a card of half the speed every header that states a measurement is out of date."""
    for module in (ladder, kvpoints):
        record = module.recorded()
        assert record is not None
        slower = replace(record, rows=tuple(slowed(row, 0.5) for row in record.rows))
        monkeypatch.setattr(module, "recorded", lambda slower=slower: slower)
    rows = {suite: headers.rows("h200", suite) for suite in ("dequant", "load")}
    slower = {suite: {key: slowed(row, 0.5) for key, row in found.items()} for suite, found in rows.items()}
    monkeypatch.setattr(headers, "rows", lambda gpu, suite: slower.get(suite, {}))
    stating = {source.name for _, (source, *_) in map(kernels.find, kernels.specs()) if "\n// Measured" in source.text}
    assert {path.stem for path in headers.outdated()} == stating
    table = next(text for path, text in headers.outdated().items() if path.stem == "attention_kv4_sm90")
    assert table.count("// Measured") == 1 and table.count("//            32 / 8 ") == 1
