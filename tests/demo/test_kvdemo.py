"""What a quantised cache costs the trained model's attention, and that the table says so."""

import json
from dataclasses import asdict

import pytest

from ptxlab.bert import Bert
from ptxlab.io.checkpoint import demo_checkpoint
from ptxlab.kvdemo import TOKENS, CacheRow, CacheTable, cache_table
from ptxlab.sources import results_dir


@pytest.fixture(scope="module")
def measured() -> CacheTable:
    path = demo_checkpoint()
    assert path is not None, "the `demo` extra is part of `test`"
    return cache_table(path)


def test_errors_on_real_text(measured: CacheTable) -> None:
    """Each bit halves the error, 16 to 1 from 8 bits to 4; without outliers smoothing changes next to nothing."""
    rows: dict[str, CacheRow] = {row.cache: row for row in measured.rows}
    assert rows["KV16"].error < 5e-4
    assert rows["KV8"].error == pytest.approx(rows["KV4"].error / 17, rel=0.1)  # 255 levels for 15
    assert 0.05 < rows["KV4"].error < 0.12
    assert rows["KV4 + smoothing"].error == pytest.approx(rows["KV4"].error, rel=0.05)
    assert all(row.error < row.worst < 2 * row.error for row in measured.rows)
    assert [row.bits for row in measured.rows] == [16, 9, 5, 5]  # f16 scale and zero for 32 elements
    assert 1 < measured.outlier < 3


def test_the_recorded_table_is_what_the_model_gives(measured: CacheTable) -> None:
    recorded = json.loads((results_dir() / "audit" / "demo.json").read_text(encoding="utf-8"))["attention"]
    found = asdict(measured)
    assert recorded["inputs"] == found["inputs"]
    assert recorded["outlier"] == pytest.approx(found["outlier"], rel=1e-4)
    for a, b in zip(recorded["rows"], found["rows"], strict=True):
        assert a.pop("cache") == b.pop("cache")
        assert a == pytest.approx(b, rel=1e-2)  # another BLAS rounds otherwise, and an element here and there with it


def test_the_text_is_long_enough_to_calibrate_on_what_follows() -> None:
    path = demo_checkpoint()
    assert path is not None
    card = (path.parent / "README.md").read_text(encoding="utf-8")
    assert len(Bert(path).tokens(card)) > 2 * TOKENS
