"""`ptxlab bench` on a machine whose measurements are made up: what is recorded, printed, drawn and compared."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxlab import bench
from ptxlab.lowbit.bench import sweep
from ptxlab.runtime.timing import Measured
from tests.support import kv_record, ladder_record
from tests.support.bench_rows import slow_down
from tests.support.headline_record import record

RECORD = record()


def fake_measurement(monkeypatch: pytest.MonkeyPatch, record: bench.Record) -> None:
    monkeypatch.setattr(bench, "run_suite", lambda *_, **__: record)
    monkeypatch.setattr(bench.gpu, "allocating_elsewhere", lambda nbytes: nullcontext())


@pytest.mark.default_cases("gemm1")
@pytest.mark.parametrize(
    "record",
    [RECORD, kv_record.record(), ladder_record.record()],
    ids=lambda record: record.suite,
)
def test_one_command_records_and_prints_what_was_measured(
    record: bench.Record, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_measurement(monkeypatch, record)
    code, out, _ = cli("bench", record.suite, "--out", tmp_path / "r.json")
    assert code == 0 and bench.load(tmp_path / "r.json") == record and "target" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"], "nothing is drawn that was not asked for"
    assert all(title.partition(",")[0] in out for title, *_ in bench.as_tables(record))
    code, out, _ = cli("bench", record.suite, "--out", tmp_path / "r.json", "--plot", tmp_path / "p.png", "--json")
    assert code == 0 and len(json.loads(out)["rows"]) == len(record.rows)
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "."), ".: cannot be written: it is a folder"),
        (("--out", "none/r.json"), "none/r.json: cannot be written: none is no folder"),
        (("--out", "r.json", "--plot", "p.gif"), "a file name that ends in .png, .svg or .pdf"),
        (("--out", "r.json", "--plot", "none/p.png"), "none/p.png: cannot be written: none is no folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    options: tuple[str, ...], message: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run_suite", lambda *_, **__: pytest.fail("it was measured"))
    code, _, err = cli("bench", "gemm", *options)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("dequant", "--only", "fused"), "only: must be empty for the suite dequant (got fused)"),
        (("gemm", "--only", "fused"), "only: one of w4a4, g64, compute_80, 7B, 70B (got fused)"),
        (("gemm", "--only", "7B"), "only: must name a part too: w4a4, g64, compute_80 (got 7B)"),
        (("layer",), "suite: one that this command has; run `python -m benchmarks layer` in notebooks/ (got layer)"),
    ],
)
def test_a_part_that_is_not_there_is_refused_in_one_line(options: tuple[str, ...], message: str, cli: Any) -> None:
    code, _, err = cli("bench", *options)
    assert code == 2 and message in " ".join(err.split())


@pytest.mark.full
def test_a_slower_run_fails(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = bench.save(RECORD, tmp_path / "before.json")
    fake_measurement(monkeypatch, replace(RECORD, rows=tuple(slow_down(row, 0.98) for row in RECORD.rows)))
    assert cli("bench", "gemm", "--out", tmp_path / "r.json", "--against", reference)[0] == 0
    slow_record = slow_down(RECORD.rows[-1], 0.96)
    fake_measurement(monkeypatch, replace(RECORD, rows=(*RECORD.rows[:-1], slow_record)))
    code, out, _ = cli("bench", "gemm", "--out", tmp_path / "r.json", "--against", reference)
    assert code == 1 and out.count("slower gemm") == 1 and "4.0% less" in " ".join(out.split())


def test_a_sweep_is_a_table(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Measured(9.0, 9.0, 9.0, 1900.0)
    rows = [
        sweep.VariantFigures({"STAGES": 4}, False, timing, 90),
        sweep.VariantFigures({"STAGES": 6}, True, replace(timing, us=10.0), 80),
    ]
    calls: list[Any] = []
    monkeypatch.setattr(sweep, "sweep", lambda *arguments: calls.append(arguments[1:3]) or rows)
    code, out, _ = cli("sweep", "gemm_w4a8_sm90", "-D", "STAGES=4,6", "--shape", "M=16")
    assert code == 0 and calls == [({"M": 16, "N": 22016, "K": 4096, "g": 128}, {"STAGES": [4, 6]})]
    assert "1.111x" in out and "chosen" in out
    code, out, _ = cli("sweep", "gemm_w4a8_sm90", "-D", "STAGES=4", "--json")
    assert code == 0 and json.loads(out)[1]["measured"]["us"] == 10.0
    code, _, err = cli("sweep", "gemm_w4a8_sm90", "-D", "STAGES=many")
    assert code == 2 and "-D expects NAME=INTEGER[,INTEGER..], got STAGES=many" in err
    code, _, err = cli("sweep", "gemm_w4a8_sm90", "-D", "STAGES=4", "-D", "STAGES=8")
    assert code == 2 and "-D expects each name once, got STAGES" in err
