"""What the README says works, and its tables are current."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ptxlab import kernels
from ptxlab.errors import FileError
from report import headers, kvpoints, ladder
from report import sections as report
from tests.support.bench_rows import slowed

README = Path(__file__).resolve().parents[2] / "README.md"


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_your_own_kernel_in_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("add4.ptx").write_text(block("ptx"))
    exec(block("python"), {})
    printed = capsys.readouterr().out
    assert "carry: add4.ptx:10: `add.u32 %x0, %x0, %x1`" in printed
    assert re.search(r"lane \d .*thread \(\d+,0,0\)", printed)


def test_the_tables_are_what_the_records_say() -> None:
    assert report.update(write=False) == [], "run `python -m report` in notebooks/"


def test_a_page_of_the_guide_has_links_from_its_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    made = "![picture](notebooks/figures/demo.png) and [page](https://example.org/notebooks/x)\n"
    monkeypatch.setitem(report.SECTIONS, "kernels", lambda: made)
    page = "before\n<!-- report: kernels -->\nold\n<!-- end -->\nafter\n"
    moved = report.renewed(page, README.parent / "notebooks" / "guide" / "kernels")
    assert "![picture](../../figures/demo.png) and [page](https://example.org/notebooks/x)" in moved
    assert report.renewed(page, README.parent) == page.replace("old\n", made)
    with pytest.raises(FileError, match=r"a section named one of .* \(got nosuch\)"):
        report.renewed(page.replace("kernels", "nosuch"), README.parent)


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


def test_every_command_it_names_exists() -> None:
    from ptxlab.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    code = re.findall(r"```[a-z]*\n(.*?)```|`([^`\n]+)`", README.read_text(), re.DOTALL)
    named = {
        word for spans in code for span in spans for word in re.findall(r"(?:^|&& )ptxlab (\w+)", span, re.MULTILINE)
    }
    assert named and named <= known


def test_every_picture_is_there() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README.read_text())
    assert pictures and all((README.parent / p).is_file() for p in pictures)


def test_the_package_knows_nothing_of_it() -> None:
    """Only `notebooks/report` reads the README and knows what this project aims at."""
    imports = re.compile(r"^\s*(?:from|import) report\b", re.MULTILINE)
    assert not [path for path in (README.parent / "ptxlab").rglob("*.py") if imports.search(path.read_text())]
