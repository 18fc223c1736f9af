"""A run of a suite that is stopped goes on behind its last section, on measurements that are made up."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ptxlab import bench, gpu
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.bench.suite import Keep, Suite
from ptxlab.lowbit.bench import attention, gemm
from ptxlab.lowbit.bench.attention import append, merge
from ptxlab.lowbit.bench.gemm import chain, grouped, headline, quantiser
from ptxlab.registry import specs
from tests.support.bench_rows import ROW

CARD = SimpleNamespace(name="NVIDIA H200", slug="h200", driver="580.1", sms=132, l2_bytes=1, memory_bytes=2)


class MadeUp:
    """Sections that are measured in turn, until one of them is interrupted."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.stop_at = ""

    def section(self, name: str) -> Callable[..., list[Row]]:
        """Return a function that measures a section, whatever it is given."""

        def measure(*_: Any, **__: Any) -> list[Row]:
            if name == self.stop_at:
                raise KeyboardInterrupt
            self.measured.append(name)
            return [replace(ROW, face=name), replace(ROW, face=name, source="cu")]

        return measure

    def rows(self, names: Any, ceilings: Any, progress: Any, keep: Keep) -> list[Row]:
        """Measure three sections."""
        return [row for name in ("a", "b", "c") for row in keep(name, self.section(name))]

    def run(self, suite: Suite | str, path: Path, **options: Any) -> tuple[list[str], list[str]]:
        """Run a suite: (the sections that were measured, what was said)."""
        self.measured.clear()
        notes: list[str] = []
        try:
            bench.run_suite(suite, resume=path, say=notes.append, **options)
        except KeyboardInterrupt:
            self.measured.append("stopped")
        return [*self.measured], notes


@pytest.fixture
def made_up_sections(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    monkeypatch.setattr(gpu, "device_info", lambda: CARD)
    monkeypatch.setattr(gpu, "card_id", lambda: "GPU-1")
    monkeypatch.setattr(bench, "measure_ceilings", lambda: Ceilings(4.65, 4.26))
    monkeypatch.setattr(bench, "versions", lambda device: {"cupy": "14.2.0"})
    monkeypatch.setenv("PTXLAB_COMMIT", "abc")
    return MadeUp()


def test_a_run_goes_on_behind_its_last_section(made_up_sections: MadeUp, tmp_path: Path) -> None:
    suite, path = Suite("made_up", made_up_sections.rows, keeps=True), tmp_path / "r.json"
    made_up_sections.stop_at = "c"
    assert made_up_sections.run(suite, path) == (["a", "b", "stopped"], [])
    partial = json.loads(bench.partial_path(path).read_text())
    assert not path.exists() and partial["sections"] == {"a": 2, "b": 2} and partial["invalid"] == "not finished"
    made_up_sections.stop_at = ""
    file = tmp_path / "r.partial.json"
    assert made_up_sections.run(suite, path) == (["c"], [f"made_up goes on behind 4 rows of {file}"])
    record = bench.run_suite(suite, resume=path)
    assert [row.face for row in record.rows] == ["a", "a", "b", "b", "c", "c"] and record.invalid == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("card", "of another GPU or driver"),
        ("GPU", "of another GPU, NVIDIA H200"),
        ("version", "of another version, cupy 14.2.0"),
        ("commit", "of another commit, abc"),
        ("changed", "of uncommitted sources, abc+"),
        ("kernels", "of other kernels or options"),
        ("file", "no file of a stopped run"),
        ("rows", "no file of a stopped run"),
        ("slow", "not valid: memory read reaches 3.00 TB/s"),
    ],
)
def test_another_run_begins_anew_and_says_why(
    change: str, reason: str, made_up_sections: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, path = Suite("made_up", made_up_sections.rows, keeps=True), tmp_path / "r.json"
    file = bench.partial_path(path)
    made_up_sections.stop_at = "c"
    if change == "changed":
        monkeypatch.setenv("PTXLAB_COMMIT", "abc+")
    if change == "slow":
        monkeypatch.setattr(bench, "measure_ceilings", lambda: Ceilings(3.0, 4.26))
    made_up_sections.run(suite, path)
    made_up_sections.stop_at = ""
    if change == "card":
        monkeypatch.setattr(gpu, "card_id", lambda: "GPU-2")
    elif change == "GPU":
        monkeypatch.setattr(gpu, "device_info", lambda: SimpleNamespace(**{**vars(CARD), "name": "NVIDIA L40S"}))
    elif change == "version":
        monkeypatch.setattr(bench, "versions", lambda device: {"cupy": "14.3.0"})
    elif change == "commit":
        monkeypatch.setenv("PTXLAB_COMMIT", "another")
    elif change == "kernels":
        suite = replace(suite, name="other")
    elif change == "file":
        file.write_text("{")
    elif change == "rows":
        file.write_text(file.read_text().replace('"a": 2', '"a": 20'))
    measured, (note,) = made_up_sections.run(suite, path)
    assert measured == ["a", "b", "c"]
    assert note.startswith(f"{suite.name} begins anew: {file} is {reason}") and "\n" not in note


@pytest.mark.full
def test_the_suite_attention_goes_on(made_up_sections: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "why_not", lambda step: None)
    monkeypatch.setattr(gpu, "why_not", lambda arch, exact=False: None)
    monkeypatch.setattr(attention, "choose", lambda options: attention.STEPS[-1])
    monkeypatch.setattr(attention, "compile_all", lambda planned, appending: None)
    monkeypatch.setattr(attention, "batch_rows", lambda step, batch, *_, **__: made_up_sections.section(str(batch))())
    monkeypatch.setattr(
        attention, "ragged_rows", lambda step, batch, *_: made_up_sections.section(f"unequal {batch}")()
    )
    monkeypatch.setattr(attention, "ladder_rows", lambda step, *_: made_up_sections.section(step.spec.name)())
    monkeypatch.setattr(attention, "table1_rows", lambda *_: made_up_sections.section("table1")())
    monkeypatch.setattr(attention, "rotation_rows", lambda *_: iter(()))
    monkeypatch.setattr(merge, "rows", made_up_sections.section("merge"))
    monkeypatch.setattr(append, "rows", made_up_sections.section("append"))
    all_rows, _ = made_up_sections.run("attention", tmp_path / "all.json")
    assert len(all_rows) > 10 and len(set(all_rows)) == len(all_rows)
    for stop in (all_rows[1], all_rows[-3], all_rows[-1]):
        path = tmp_path / f"{all_rows.index(stop)}.json"
        made_up_sections.stop_at = stop
        first, _ = made_up_sections.run("attention", path)
        made_up_sections.stop_at = ""
        resumed_rows, notes = made_up_sections.run("attention", path)
        assert first[:-1] + resumed_rows == all_rows and len(notes) == 1


def test_the_suite_gemm_goes_on(made_up_sections: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm.steps, "points", lambda names: iter([None]))
    monkeypatch.setattr(gemm, "_all_launched", lambda names: True)
    monkeypatch.setattr(gemm.points, "compile_all", list)
    monkeypatch.setattr(gemm.points, "streams", lambda: None)
    monkeypatch.setattr(gemm.limits, "with_limits", list)
    monkeypatch.setattr(gemm, "layer_rows", lambda layer, *_: made_up_sections.section(str(layer))())
    parts = {"chain": chain, "grouped": grouped, "quantiser": quantiser}
    for name, module in parts.items():
        monkeypatch.setattr(module, "rows", made_up_sections.section(name))
    monkeypatch.setattr(headline, "untuned_rows", made_up_sections.section("untuned"))
    suite = replace(gemm.SUITE, shortfall=lambda rows, device: "")
    all_rows, _ = made_up_sections.run(suite, tmp_path / "all.json")
    assert {*parts, "untuned"} < {*all_rows} and len(all_rows) == len(gemm.LAYERS) + 4
    made_up_sections.stop_at = "chain"
    first, _ = made_up_sections.run(suite, tmp_path / "r.json")
    made_up_sections.stop_at = ""
    resumed_rows, _ = made_up_sections.run(suite, tmp_path / "r.json")
    assert first[:-1] + resumed_rows == all_rows


def test_the_command_goes_on_and_removes_what_it_kept(
    made_up_sections: MadeUp, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, path = Suite("made_up", made_up_sections.rows, keeps=True), tmp_path / "r.json"
    monkeypatch.setattr(bench, "suite_of", lambda name: (suite, [*specs()][:1]))
    made_up_sections.stop_at = "b"
    code, _, err = cli("bench", "made_up", "--out", path)
    assert code == 130 and f"rows measured are in {bench.partial_path(path)}" in err.replace("\n", "")
    made_up_sections.stop_at = ""
    code, _, err = cli("bench", "made_up", "--out", path)
    assert code == 0 and f"made_up goes on behind 2 rows of {bench.partial_path(path)}" in err.replace("\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"] and len(bench.load(path).rows) == 6
