"""The table and the picture of perplexity by step, of a record that is made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from ptxlab.llm.accuracy.steps import rows
from report import accuracy, figures, frames, sections
from tests.support import fake_rows

STEPS = {
    ("float", "float32"): [20.0],
    ("channel", "round to nearest"): [40.0],
    ("channel", "GPTQ"): [25.0, 26.0],
    ("g64", "round to nearest"): [30.0],
    ("g64", "groups"): [24.0],
    ("g64", "GPTQ"): [22.0, 22.4],
}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    rows = [
        {"ladder": ladder, "step": step, "seed": seed, "perplexity": {"wikipedia": perplexity, "lee": 2 * perplexity}}
        for (ladder, step), values in STEPS.items()
        for seed, perplexity in enumerate(values)
    ]
    written = {**fake_rows.ACCURACY, "windows": {"wikipedia": [8, 512]}, "calibration": [16, 512], "rows": rows}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "accuracy.json").write_text(json.dumps(written))
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    return written


def test_points_are_means_over_seeds(record: dict[str, Any]) -> None:
    rows = accuracy.points(accuracy.load_record()).set_index(["ladder", "step"])
    last = rows.loc[("channel", "GPTQ")]
    assert (last.wikipedia, last.lee, last.ratio, last.spread) == (25.5, 51.0, 25.5 / 20, 1.0)
    assert rows.loc[("float", "float32")].ratio == 1 and rows.spread.isna().sum() == 4
    assert list(rows.index) == list(STEPS)


def test_the_section_and_the_picture(record: dict[str, Any]) -> None:
    text = sections.SECTIONS["accuracy"]()
    assert "| channel | GPTQ | 25.50 | 51.00 | 1.275x | 1.00 |" in text.replace("  ", " ")
    assert "wikipedia: 8 windows of 512; calibrated on 16 samples of 512 tokens" in text and "commit 0123456789" in text
    assert "(notebooks/figures/accuracy_steps.png)" in text
    (axes,) = figures.picture("accuracy_steps").axes
    assert axes.get_title("left") == "W4A8KV4: the recipe removes 72% to 78% of what rounding to nearest adds"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["round to nearest", "groups", "GPTQ"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["per channel", "groups of 64", "float32, 20.00"]


def test_a_record_of_the_ends_alone_has_no_picture(record: dict[str, Any], tmp_path: Path) -> None:
    record["rows"] = [row for row in record["rows"] if row["step"] != "groups"]
    (tmp_path / "h200" / "accuracy.json").write_text(json.dumps(record))
    text = sections.SECTIONS["accuracy"]()
    assert "GPTQ" in text and "accuracy_steps.png" not in text
    with pytest.raises(frames.NotMeasuredError, match="ptxlab accuracy"):
        figures.picture("accuracy_steps")


def test_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    assert sections.SECTIONS["accuracy"]() == frames.MISSING
    with pytest.raises(frames.NotMeasuredError, match="ptxlab accuracy"):
        figures.picture("accuracy_steps")


def test_every_step_of_the_ladders_is_drawn() -> None:
    assert {row.step for row in rows() if row.ladder in accuracy.COLOURS} == set(accuracy.ORDER)
