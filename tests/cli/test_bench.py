"""`ptxlab bench` on a machine whose measurements are made up: what is recorded, drawn, printed and compared."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxlab import bench
from ptxlab.bench import sweep
from ptxlab.bench.timing import Measured
from tests.support import kv_record, ladder_record
from tests.support.bench_rows import slowed
from tests.support.headline_record import record

RECORD = record()


def measured(monkeypatch: pytest.MonkeyPatch, found: bench.Record) -> None:
    monkeypatch.setattr(bench, "run_suite", lambda *_, **__: found)
    monkeypatch.setattr(bench.gpu, "elsewhere", lambda nbytes: nullcontext())


def test_one_command_records_draws_and_says_what_is_met(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, RECORD)
    code, out, _ = cli("bench", "gemm", "--out", tmp_path / "r.json")
    assert code == 0 and bench.load(tmp_path / "r.json") == RECORD
    assert {path.name for path in tmp_path.iterdir()} == {"r.json", "gemm_headline.png", "gemm_beyond.png"}
    assert "what was aimed at" in out and "missed" in out and "gemm_beyond.png" in out.replace("\n", "")
    code, out, _ = cli("bench", "gemm", "--out", tmp_path / "r.json", "--json")
    assert code == 0 and len(json.loads(out)["rows"]) == len(RECORD.rows)


def test_attention_is_recorded_and_drawn_likewise(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, kv_record.record())
    code, out, _ = cli("bench", "attention", "--out", tmp_path / "r.json")
    assert code == 0 and {path.name for path in tmp_path.iterdir()} == {"r.json", "attention_bandwidth.png"}
    assert out.count("what was aimed at") == 1 and "QServe KV4" in out


def test_the_ladder_alone_is_recorded_alone(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, ladder_record.record())
    code, out, _ = cli("bench", "gemm", "--out", tmp_path / "r.json")
    assert code == 0 and [path.name for path in tmp_path.iterdir()] == ["r.json"] and "aimed at" not in out


def test_a_slower_run_fails(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bench.save(RECORD, tmp_path / "before.json")
    measured(monkeypatch, replace(RECORD, rows=tuple(slowed(row, 0.98) for row in RECORD.rows)))
    assert cli("bench", "gemm", "--out", tmp_path / "r.json", "--against", before)[0] == 0
    slow = slowed(RECORD.rows[-1], 0.96)
    measured(monkeypatch, replace(RECORD, rows=(*RECORD.rows[:-1], slow)))
    code, out, _ = cli("bench", "gemm", "--out", tmp_path / "r.json", "--against", before)
    assert code == 1 and out.count("slower gemm") == 1 and "4.0% less" in out.replace("\n", " ")


def test_a_sweep_is_a_table(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Measured(9.0, 9.0, 9.0, 1900.0)
    found = [
        sweep.Found({"STAGES": 4}, False, timing, 90),
        sweep.Found({"STAGES": 6}, True, replace(timing, us=10.0), 80),
    ]
    asked: list[Any] = []
    monkeypatch.setattr(sweep, "sweep", lambda *given: asked.append(given[1:3]) or found)
    code, out, _ = cli("sweep", "gemm_w4a8_sm90", "-D", "STAGES=4,6", "--shape", "M=16")
    assert code == 0 and asked == [({"M": 16, "N": 22016, "K": 4096, "g": 128}, {"STAGES": [4, 6]})]
    assert "1.111x" in out and "chosen" in out
    code, out, _ = cli("sweep", "gemm_w4a8_sm90", "-D", "STAGES=4", "--json")
    assert code == 0 and json.loads(out)[1]["measured"]["us"] == 10.0
    code, _, err = cli("sweep", "gemm_w4a8_sm90", "-D", "STAGES=many")
    assert code == 2 and "-D: NAME=INTEGER[,INTEGER..] (got STAGES=many)" in err
    code, _, err = cli("sweep", "gemm_w4a8_sm90", "-D", "STAGES=4", "-D", "STAGES=8")
    assert code == 2 and "-D: each name once (got STAGES)" in err
