"""The report on W4A4: every figure and every schedule has its row, and the picture its panels."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ptxlab import bench, plot
from ptxlab.bench.plot import record_figure
from ptxlab.lowbit.bench.gemm.w4a4 import COMPARED
from ptxlab.lowbit.cost.published import FIGURES
from ptxlab.lowbit.cost.schedule import COMET, SCHEDULES
from report import accuracy, figures, frames, headers, sections, targets, w4a4
from tests.support import fake_rows, w4a4_record


def rows(table: str) -> list[list[str]]:
    """Split a Markdown table's body into cells."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_claim_and_every_gpu_has_its_row() -> None:
    figures = rows(w4a4.figures_table())
    assert [(row[0], row[1], row[2]) for row in figures] == [(c.source, c.device, c.scheme) for c in FIGURES]
    assert all(row[-1].endswith("%") for row in figures)
    assert [row[0] for row in rows(w4a4.choice_table())] == ["rtx3090", "rtx4090", "l40s", "a100"]


@pytest.mark.full
def test_every_schedule_is_beside_comets() -> None:
    schedule_rows = rows(w4a4.schedule_table())
    assert [(row[0], row[1]) for row in schedule_rows] == [(model, name) for model in COMET for name in COMET[model]]
    assert [float(row[2].rstrip("x")) for row in schedule_rows] == [COMET[row[0]][row[1]] for row in schedule_rows]
    assert [row[5] for row in schedule_rows if row[1] == "naive"] == ["1.00x", "1.00x"]


def test_the_picture_says_how_busy_the_sms_are() -> None:
    titles = [axes.get_title(loc="left") for axes in figures.picture("w4ax_schedules").axes]
    assert titles[: len(SCHEDULES)] == [
        "naive: 10, SMs busy 68%",
        "in order: 10, SMs busy 68%",
        "remapped: 7, SMs busy 96%",
        "decomposed: 6.75, SMs busy 100%",
        "stealing: 6.75, SMs busy 100%",
    ]
    assert len(titles) == 2 * len(SCHEDULES)


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
        {"ladder": ladder, "step": step, "seed": 0, "perplexity": {"wikipedia": perplexity}, "bytes": nbytes}
        for (ladder, step), (perplexity, nbytes) in MEASURED.items()
    ]
    record = {**fake_rows.ACCURACY, "windows": {"wikipedia": [4, 512]}, "calibration": [4, 256], "rows": lines}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "accuracy.json").write_text(json.dumps(record))
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


@pytest.mark.full
def test_measured_beside_w4a8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up record: W4A4 at 1.2 times and W4Ax at 1.3 times W4A8's time, and W4Ax slower than cuBLAS INT8."""
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    assert sections.SECTIONS["w4a4_measured"]() == sections.SECTIONS["w4a4_targets"]() == frames.MISSING
    with pytest.raises(frames.NotMeasuredError, match="python -m benchmarks gemm --only w4a4"):
        figures.picture("w4a4_measured")
    record = w4a4_record.record()
    bench.save(record, tmp_path / "h200" / "gemm_w4a4.json")
    text = sections.SECTIONS["w4a4_measured"]()
    measured_rows = rows(text)
    assert [(row[0], row[1]) for row in measured_rows] == [(s, f"{M:,}") for s in ("W4A4", "W4Ax") for M in COMPARED]
    assert [row[3:9] for row in measured_rows[::5]] == [
        ["1.20x", "1.20x", "1.10x", "1.06x", "1.06x", "0.76x"],
        ["1.30x", "1.30x", "1.19x", "0.98x", "0.98x", "0.70x"],
    ]
    assert "nan" not in text and "8 matrices" in text and "made-up H200" in text and "in software" in text
    targets = {row[0]: row[1:] for row in rows(sections.SECTIONS["w4a4_targets"]())}
    assert targets == {
        "W4A4: of W4A8's time, every point": ["at most 1.25x", "1.20x", "met"],
        "W4A4: the same, stretch": ["at most 1.15x", "1.20x", "missed"],
        "W4A4: points slower than cuBLAS INT8": ["at most 0", "0", "met"],
        "W4Ax: of W4A8's time, every point": ["at most 1.25x", "1.30x", "missed"],
        "W4Ax: the same, stretch": ["at most 1.15x", "1.30x", "missed"],
        "W4Ax: points slower than cuBLAS INT8": ["at most 0", "40", "missed"],
    }
    stated_config = {
        path.stem: " ".join(text.replace("\n//", "").split()) for path, text in headers.corrected_sources().items()
    }
    fives = {"gemm_w4a4_sm90": ("1.20", "1.06"), "gemm_w4ax_sm90": ("1.30", "0.98")}
    for name, (time_ratio, int8) in fives.items():
        sentence = (
            f"{', '.join([time_ratio] * 5)} of gemm_w4a8's time, {', '.join([int8] * 5)} times as fast as cuBLAS INT8"
        )
        assert sentence in stated_config[name]
    (axes,) = figures.picture("w4a4_measured").axes
    assert axes.get_title("left") == "W4A4 1.20x and W4Ax 1.30x W4A8's time on an H200, in the mean"
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["W4A4"] == pytest.approx([1.2] * 5) and drawn["cuBLAS FP8"] == pytest.approx([1 / 1.1] * 5)
    plot.save(record_figure(record), tmp_path / "whole.png")


def test_kernels_that_run_in_software_are_shown_nowhere() -> None:
    """Without the rows of sm_80 every figure is the same, and nothing says that there are any."""
    record = w4a4_record.record()
    alone = replace(record, rows=tuple(row for row in record.rows if not row.kernel.endswith("_sm80")))
    assert len(alone.rows) == 4 * 8 * 5 < len(record.rows)
    assert rows(w4a4.measured_table(alone)) == rows(w4a4.measured_table(record))
    assert "in software" not in w4a4.measured_table(alone)
    assert targets.four_bits(alone) == targets.four_bits(record)


def test_a_record_without_int8_or_without_w4a8_judges_nothing() -> None:
    record = w4a4_record.record()
    bare = replace(record, rows=tuple(replace(row, peers={}) for row in record.rows if row.measure != "headline"))
    assert {target.verdict for target in targets.four_bits(bare)} == {""}
