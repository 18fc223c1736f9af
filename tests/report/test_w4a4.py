"""The report on W4A4: every figure and every schedule has its row, and the picture its panels."""

import json
from pathlib import Path

import pytest

from ptxlab.cost.published import FIGURES
from ptxlab.cost.schedule import COMET, SCHEDULES
from report import accuracy, figures, frames, sections, w4a4


def rows(table: str) -> list[list[str]]:
    """Cells of a Markdown table's body."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_claim_and_every_gpu_has_its_row() -> None:
    figures = rows(w4a4.figures_table())
    assert [(row[0], row[1], row[2]) for row in figures] == [(c.source, c.device, c.scheme) for c in FIGURES]
    assert all(row[-1].endswith("%") for row in figures)
    assert [row[0] for row in rows(w4a4.choice_table())] == ["rtx3090", "rtx4090", "l40s", "a100"]


def test_every_schedule_is_beside_comets() -> None:
    found = rows(w4a4.schedule_table())
    assert [(row[0], row[1]) for row in found] == [(model, name) for model in COMET for name in SCHEDULES]
    assert [float(row[2].rstrip("x")) for row in found] == [COMET[row[0]][row[1]] for row in found]
    assert [row[5] for row in found if row[1] == "naive"] == ["1.00x", "1.00x"]


def test_the_picture_says_how_busy_the_sms_are() -> None:
    titles = [axes.get_title(loc="left") for axes in figures.picture("w4ax_schedules").axes]
    assert titles[:3] == [
        "naive: 10, SMs busy 68%",
        "remapped: 7, SMs busy 96%",
        "decomposed: 6.75, SMs busy 100%",
    ]
    assert len(titles) == 6


MEASURED = {
    ("float", "float32"): (20.0, 400e6),
    ("alone", "W8A8"): (20.4, 200e6),
    ("g64", "GPTQ"): (22.0, 150e6),
    ("Atom", "round to nearest"): (900.0, 104e6),
    ("Atom", "KV4"): (30.0, 118e6),
    ("FMPQ", "0% of the blocks in INT8"): (44.0, 112e6),
    ("FMPQ", "100% of the blocks in INT8"): (24.0, 150e6),
    ("schemes, GPTQ", "QoQ"): (23.0, 150e6),
}


def test_perplexity_beside_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "RESULTS", tmp_path)
    assert sections.SECTIONS["w4a4_accuracy"]() == frames.MISSING
    with pytest.raises(frames.NotMeasuredError, match="ptxlab accuracy"):
        figures.picture("w4a4_accuracy")
    lines = [
        {"ladder": ladder, "step": step, "seed": 0, "perplexity": {"wikipedia": value}, "bytes": nbytes}
        for (ladder, step), (value, nbytes) in MEASURED.items()
    ]
    about = {"model": "small", "start": "mixed", "device": "CPU", "date": "2026-11-23", "commit": "0123456789ab"}
    found = {"schema": 1, **about, "windows": {"wikipedia": [4, 512]}, "calibration": [4, 256], "rows": lines}
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "accuracy.json").write_text(json.dumps(found))
    text = sections.SECTIONS["w4a4_accuracy"]()
    table = rows(text)
    assert [row[1] for row in table] == ["104", "112", "118", "150", "150", "200", "400"]
    assert ["W4A4KV4, Atom", "118", "1.50x"] in table and ["W4A8KV4, the whole recipe", "150", "1.10x"] in table
    assert "4 windows of 512" in text and "(notebooks/figures/w4a4_accuracy.png)" in text
    (axes,) = figures.picture("w4a4_accuracy").axes
    assert axes.get_title("left") == "Atom's W4A4 reads 21% fewer bytes than W4A8, at 1.36x its perplexity"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["W4AxKV4: COMET's FMPQ", "W4A4KV4: Atom", "W4A8KV4", "W8A8", "float32"]
    assert {text.get_text() for text in axes.texts} >= {"0% INT8", "100% INT8", "the whole recipe"}
