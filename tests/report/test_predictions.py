"""The cost model beside a record: errors, where W4A8 stops paying, tables, figures, and the command."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxlab import plot
from ptxlab.bench.record import Record, Row
from ptxlab.errors import FileError
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.bench.shapes import ALL_TOKENS, LLAMA
from report import costplot, figures, frames, gemm, ladder, predictions, sections
from report.predictions import W8A8, ratios_to_8bit, slower_between
from tests.support import ladder_record
from tests.support.headline_record import record

RECORD = record()
DEVICE = predictions.measured_device(RECORD)


def record_timed_at(factor: float = 1.0) -> Record:
    """Make up a record whose times are `factor` times the model's prediction in turn, at all predicted points."""
    predicted = predictions.predictions(RECORD)
    places = predicted[["measure", "kernel", "activations", "N", "K", "M"]].itertuples(index=False, name=None)
    ours = dict(zip(places, predicted.in_turn_us, strict=True))

    def time_row(row: Row) -> Row:
        place = row.measure, row.kernel, row.activations, *(row.sizes.get(name) for name in "NKM")
        is_point = place in ours and row.sizes.get("g", 128) == 128
        return replace(row, time_us=factor * ours[place]) if is_point else row

    return replace(RECORD, rows=tuple(map(time_row, RECORD.rows)))


@pytest.mark.full
def test_errors_are_relative_to_the_measured_time() -> None:
    for factor in (1.0, 2.0, 0.8):
        predicted = predictions.predictions(record_timed_at(factor))
        assert len(predicted) == len(ladder.points(RECORD)) + 2 * len(LLAMA) * len(ALL_TOKENS)
        assert predicted.error.mean() == pytest.approx(abs(1 / factor - 1))
        assert predicted.overlapped_error.mean() >= 0
    assert predictions.predictions(None).empty


def test_alpha_is_counted() -> None:
    """The word's instructions at least, and of the record's variants the one for about so many tokens."""
    loops = counts.load()["main_loops"]
    for name, word in (("gemm_w4a8_lqq_sm90", "dequant_lqq"), ("gemm_w4a8_qoq_sm80", "dequant_qoq_vadd4")):
        alpha_of_few, alpha_of_many = (predictions.alpha_at(name, M) for M in (4, 128))
        assert alpha_of_few == sum(loops[f"{name}.cu"]["16"]["pipes"].values()) / loops[f"{name}.cu"]["16"]["weights"]
        assert counts.alpha_of(word) <= alpha_of_few < alpha_of_many
    assert counts.alpha_of("dequant_lqq") == 7 / 8 and counts.alpha_of("") == 0
    assert predictions.alpha_at(W8A8, 64) == 0
    assert predictions.alpha_at("gemm_w4a8_small_sm90", 16) == 5 / 8
    assert predictions.alpha_at("gemm_w4a8_sm90", 16) > 5 / 8


def test_a_prediction_takes_bytes_tile_and_tensor_path_from_the_row() -> None:
    rows = ladder.points(ladder_record.record(["gemm_w4a8_qoq_sm80"]))
    (row,) = rows[(rows.N == 12288) & (rows.K == 4096) & (rows.M == 256)].itertuples()
    prediction = predictions.predict(row, DEVICE)
    weights = 12288 * 4096
    alpha = predictions.alpha_at(row.kernel, 256)
    shared = row.variant["WM"] * math.ceil(256 / row.variant["BM"])
    assert prediction.load_us == pytest.approx(row.packed_bytes / 4.5e6)
    assert prediction.dequantise_us == pytest.approx(weights * alpha * shared / (132 * 128 * 1.81e9) * 1e6)
    assert prediction.multiply_us == pytest.approx(2 * 256 * weights / 1268e6), "on mma.sync"


@pytest.mark.parametrize(
    ("ratios", "expected", "words"),
    [
        ({1: 0.5, 16: 0.6, 256: 0.9}, [], "not up to 256"),
        ({1: 2.0, 4: 3.0}, [(1, math.inf)], "from 1"),
        ({64: 0.5, 256: 2.0}, [(128, math.inf)], "from 130"),
        ({64: 0.5, 256: 2.0, 4096: 0.5}, [(128, 1024)], "130 to 1,000"),
        ({1: 2.0, 4: 0.5, 16: 2.0, 64: 0.5}, [(1, 2), (8, 32)], "1 to 2, 8 to 32"),
        ({1: 0.5, 4: 1.0, 16: 0.5}, [], "not up to 16"),
        ({64: 0.5, 66: 1.0001, 68: 0.5}, [(66, 66)], "66"),
    ],
)
def test_where_a_ratio_is_above_one(ratios: dict[int, float], expected: list, words: str) -> None:
    ranges = slower_between(ratios)
    assert [end for pair in ranges for end in pair] == pytest.approx([e for pair in expected for e in pair], rel=1e-3)
    assert predictions.describe_slower_ranges(ratios) == words


def test_duels_compare_the_same_matrix_at_the_same_tokens() -> None:
    exact = record_timed_at()
    ratios = ratios_to_8bit(exact, W8A8)
    assert [*zip(ratios.layer, ratios.M, strict=True)] == [(str(layer), M) for layer in LLAMA for M in ALL_TOKENS]
    assert [*ratios.measured] == pytest.approx([*ratios.in_turn]) and (ratios.overlapped <= ratios.in_turn).all()
    peer, row = ratios_to_8bit(exact, "cublas_fp8").iloc[0], gemm.points(exact).iloc[0]
    assert peer.measured == pytest.approx(row.time_us / row.peers["cublas_fp8"])
    assert ratios_to_8bit(RECORD, "nobody").empty and ratios_to_8bit(None, W8A8).empty


def test_the_crossover_is_where_both_take_as_long() -> None:
    alpha = 1.5
    tokens = round(predictions.crossover(DEVICE, alpha))
    four = cost.gemm_cost(DEVICE, cost.SCHEMES["W4A8 LQQ"], tokens, 8192, 8192, alpha=alpha)
    eight = cost.gemm_cost(DEVICE, cost.SCHEMES["W8A8"], tokens, 8192, 8192)
    assert four.in_turn_us == pytest.approx(eight.in_turn_us, rel=0.005) and eight.limit == "load"


@pytest.mark.full
def test_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "load_record", lambda: RECORD)
    section = sections.cost_section()
    tables = [block for block in section.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2 and all(len({line.count("|") for line in t.splitlines()}) == 1 for t in tables)
    assert "nan" not in section and "cost_roofline.png" in section
    for name in ("cost_roofline", "cost_predicted", "cost_crossover"):
        plot.save(figures.picture(name), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000


def test_every_kernel_has_its_line_its_dots_and_its_error_in_the_figure() -> None:
    panels = costplot.predicted_figure(RECORD).axes
    labels = [text.get_text() for axes in panels for text in axes.get_legend().get_texts()]
    for name, predicted in predictions.predictions(RECORD).groupby("kernel"):
        error, ideal = predicted.error.mean(), predicted.overlapped_error.mean()
        assert f"{predictions.display_name(name)}: {error:.0%} ({ideal:.0%})" in labels
    dots = sum(len(line.get_xdata()) for axes in panels for line in axes.lines if line.get_linestyle() == "None")
    assert dots == len(predictions.predictions(RECORD)), "every point"
    assert all(axes.get_ylim()[0] <= y <= axes.get_ylim()[1] for axes in panels for line in axes.lines
               for y in line.get_ydata() if not math.isnan(y))  # fmt: skip


def test_without_both_kernels_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ladder_record.record()
    for measured in (alone, None):
        monkeypatch.setattr(ladder, "load_record", lambda measured=measured: measured)
        assert sections.cost_section() == f"{frames.NOT_RECORDED}\n" == predictions.crossover_table(measured)
        with pytest.raises(FileError, match="python -m benchmarks gemm"):
            figures.picture("cost_roofline")


def test_nothing_recorded_is_faster_than_the_model_overlapped() -> None:
    """The model leaves things out, all of which take time: with measured ceilings it is a bound."""
    measured = ladder.load_record()
    assert measured
    predicted = predictions.predictions(measured)
    assert len(predicted) and (predicted.overlapped_us < 1.03 * predicted.time_us).all()


def test_command_of_all_devices(cli: Any) -> None:
    code, out, _ = cli("cost")
    assert code == 0 and all(name in out for name in cost.DEVICES) and "W4A8     α*" in out, "no column is cut off"
    code, out, _ = cli("cost", "--json")
    devices = {gpu["name"]: gpu for gpu in json.loads(out)}
    assert code == 0 and devices["h100"]["transitions"]["W8A8"] == pytest.approx(295, abs=1)
    assert not devices["h200"]["measured"] and devices["h200-measured"]["measured"]


def test_command_of_one_shape(cli: Any) -> None:
    code, out, _ = cli("cost", "--device", "h100", "--shape", "M=64,N=4096,K=4096", "--json")
    schemes = {entry["scheme"]["name"]: entry for entry in json.loads(out)["schemes"]}
    lqq = schemes["W4A8 LQQ"]
    assert code == 0 and "W4A4" not in schemes, "Hopper multiplies no 4-bit integers"
    assert lqq["alpha"] == 7 / 8 and lqq["cost"]["limit"] == "load"
    assert lqq["cost"]["load_us"] == pytest.approx(4096 * 4096 * 33 / 64 / 3.35e6)
    code, out, _ = cli("cost", "--device", "l40s", "--shape", "M=64,N=4096,K=4096")
    assert code == 0 and "W4A4" in out and "on l40s (data sheet)" in out and "α*" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "b200"), "device: one of a100"),
        (("--shape", "M=1,N=2"), "--shape: M=..,N=..,K=.. (got M=1,N=2)"),
        (("--shape", "M=1,N=2,K=x"), "--shape: NAME=INTEGER (got K=x)"),
        (("--shape", "M,N,K"), "--shape: NAME=INTEGER[,NAME=INTEGER..] (got M)"),
        (("--shape", "M=0,N=2,K=3"), "M: at least 1 (got 0)"),
    ],
)
def test_bad_input_is_one_line(cli: Any, arguments: tuple[str, ...], message: str) -> None:
    code, _, err = cli("cost", *arguments)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
