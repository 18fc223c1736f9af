"""What the README says works, and its tables are current."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ptxlab import registry
from ptxlab.errors import FileError
from report import attention, headers, ladder, sections, w4a4
from tests.support import w4a4_record
from tests.support.bench_rows import slow_down

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_are_what_the_records_say() -> None:
    assert sections.update(write=False) == [], "run `python -m report` in notebooks/"


def test_a_page_of_the_guide_has_links_from_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    section = "![picture](notebooks/figures/demo.png) and [page](https://example.org/notebooks/x)\n"
    monkeypatch.setitem(sections.SECTIONS, "kernels", lambda: section)
    page = "before\n<!-- report: kernels -->\nold\n<!-- end -->\nafter\n"
    moved = sections.renew_sections(page, ROOT / "notebooks" / "guide" / "kernels")
    assert "![picture](../../figures/demo.png) and [page](https://example.org/notebooks/x)" in moved
    assert sections.renew_sections(page, ROOT) == page.replace("old\n", section)
    with pytest.raises(FileError, match=r"a section named one of .* \(got nosuch\)"):
        sections.renew_sections(page.replace("kernels", "nosuch"), ROOT)


def test_no_measurement_in_a_header_is_typed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of half the speed puts every header that states a measurement out of date, and the check says so."""
    for module in (ladder, attention):
        record = module.load_record()
        assert record is not None
        slower = replace(record, rows=tuple(slow_down(row, 0.5) for row in record.rows))
        monkeypatch.setattr(module, "load_record", lambda slower=slower: slower)
    monkeypatch.setattr(w4a4, "load_record", w4a4_record.record)
    rows = {suite: headers.rows("h200", suite) for suite in ("dequant", "load")}
    slower = {
        suite: {key: slow_down(row, 0.5) for key, row in suite_rows.items()} for suite, suite_rows in rows.items()
    }
    monkeypatch.setattr(headers, "rows", lambda gpu, suite: slower.get(suite, {}))
    stating = {
        source.name for _, (source, *_) in map(registry.find, registry.specs()) if "\n// Measured" in source.text
    }
    texts = {path.stem: text for path, text in headers.corrected_sources().items()}
    recorded = {kernel for suite_rows in rows.values() for kernel, _, measure in suite_rows if measure == "streaming"}
    assert set(texts) == stating and recorded <= stating
    table = texts["attention_kv4_sm90"]
    assert table.count("// Measured") == 1 and table.count("//            32 / 8 ") == 1
    streaming, registers = (slower["dequant"]["dequant_lqq", "ptx", measure] for measure in ("streaming", "registers"))
    stated_config = f"{streaming.rate / 1e3:.2f} TB/s on an H200, {streaming.fraction:.2f} of a copy; the word alone in"
    assert f"// Measured   {stated_config} registers: {registers.rate:.0f} weights" in texts["dequant_lqq"]


def test_the_package_knows_nothing_of_it() -> None:
    """Only `notebooks/report` reads the README and knows what this project aims at."""
    imports = re.compile(r"^\s*(?:from|import) report\b", re.MULTILINE)
    assert not [path for path in (ROOT / "ptxlab").rglob("*.py") if imports.search(path.read_text())]
