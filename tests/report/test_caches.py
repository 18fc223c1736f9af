"""The table and the picture of the KV cache's formats, of a record that is made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from ptxlab.llm.accuracy.steps import rows
from report import accuracy, caches, figures, frames, sections
from tests.support import fake_rows

STEPS = {"float32": (20.0, 1024), "KV4": (22.0, 288), "KV4, keys rotated": (20.6, 288), "K8V4": (21.0, 416)}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    measured = [
        {
            "ladder": "cache" if place else "float",
            "step": step,
            "seed": 0,
            "cache_bytes": size,
            "perplexity": {"lee": perplexity},
        }
        for place, (step, (perplexity, size)) in enumerate(STEPS.items())
    ]
    written = {**fake_rows.ACCURACY, "windows": {"lee": [2, 512]}, "calibration": [8, 512], "rows": measured}
    (tmp_path / "accuracy_cache.json").write_text(json.dumps(written))
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    monkeypatch.setattr(caches, "decode_times", lambda: {"KV4": "71 µs"})
    return written


def test_the_section_and_the_picture(record: dict[str, Any]) -> None:
    text = sections.SECTIONS["accuracy_cache"]()
    assert "| KV4 | 288 | 22.00 | 1.100x | 71 µs |" in text and "| K8V4 | 416 | 21.00 | 1.050x | no kernel |" in text
    assert "lee: 2 windows of 512" in text and "(notebooks/figures/accuracy_cache.png)" in text
    (axes,) = figures.picture("accuracy_cache").axes
    assert axes.get_title("left") == "Rotated keys: 1.100x of float perplexity becomes 1.030x"
    assert [label.get_text() for label in axes.get_yticklabels()] == [*STEPS][::-1]
    assert [round(patch.get_width(), 9) for patch in axes.patches] == [5, 3, 10, 0]


def test_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    assert sections.SECTIONS["accuracy_cache"]() == frames.MISSING
    with pytest.raises(frames.NotMeasuredError, match="ptxlab accuracy"):
        figures.picture("accuracy_cache")


def test_times_are_of_rows_of_the_table() -> None:
    times = caches.decode_times()
    assert set(times) <= {row.step for row in rows() if row.ladder in ("float", "cache")}
    assert times["KV4"].endswith(" µs") and times["FP8 e4m3, scale 1"].endswith("FP8") and "FP16" in times["float32"]
