"""What the README says works, and its tables are current."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ptxlab import kernels
from ptxlab.errors import FileError
from report import attention, headers, ladder, sections
from tests.support.bench_rows import slowed

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_are_what_the_records_say() -> None:
    assert sections.update(write=False) == [], "run `python -m report` in notebooks/"


def test_a_page_of_the_guide_has_links_from_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    made = "![picture](notebooks/figures/demo.png) and [page](https://example.org/notebooks/x)\n"
    monkeypatch.setitem(sections.SECTIONS, "kernels", lambda: made)
    page = "before\n<!-- report: kernels -->\nold\n<!-- end -->\nafter\n"
    moved = sections.renewed(page, ROOT / "notebooks" / "guide" / "kernels")
    assert "![picture](../../figures/demo.png) and [page](https://example.org/notebooks/x)" in moved
    assert sections.renewed(page, ROOT) == page.replace("old\n", made)
    with pytest.raises(FileError, match=r"a section named one of .* \(got nosuch\)"):
        sections.renewed(page.replace("kernels", "nosuch"), ROOT)


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
    for module in (ladder, attention):
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


def test_the_package_knows_nothing_of_it() -> None:
    """Only `notebooks/report` reads the README and knows what this project aims at."""
    imports = re.compile(r"^\s*(?:from|import) report\b", re.MULTILINE)
    assert not [path for path in (ROOT / "ptxlab").rglob("*.py") if imports.search(path.read_text())]
