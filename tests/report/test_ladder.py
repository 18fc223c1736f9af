"""The GEMM ladder from its record: means, gains, stored peers, tables and figures. The record is made up."""

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.peers import CUBLAS
from benchmarks.stored import OURS, stored_times
from ptxlab import plot
from ptxlab.bench import compare
from ptxlab.bench.record import Record, Row
from ptxlab.errors import FileError
from ptxlab.lowbit.bench.gemm import headline
from ptxlab.lowbit.bench.shapes import CHAINS, DISSECTED, LAYERS, TOKENS
from report import figures, frames, gemmplot, ladder, sections
from tests.support.bench_rows import slow_down
from tests.support.ladder_record import NAMES, record

RECORD = record()
STORED = stored_times()
FIRST = RECORD.rows[0]
POINTS = ladder.points(RECORD)
UNTIMED = {"gemm_w4a8_lqq_sm80", "gemm_w4a8_lqq_dynamic_sm90"}  # newer than the record; a new one has them


def points(*rows: Row) -> pd.DataFrame:
    return ladder.points(replace(RECORD, rows=rows))


def test_gains_are_geometric_means_over_matrices() -> None:
    base = [
        replace(FIRST, sizes={**FIRST.sizes, "M": 16, "N": n}, kernel="base", time_us=us)
        for n, us in ((1, 8.0), (2, 9.0))
    ]
    faster = [replace(r, kernel="step", time_us=r.time_us / gain) for r, gain in zip(base, (2.0, 8.0), strict=True)]
    alone = replace(FIRST, kernel="step", sizes={**FIRST.sizes, "M": 16, "N": 3}, time_us=1.0)
    rows = points(*base, *faster, alone)
    assert ladder.speed_over(rows, "step", "base", 16) == pytest.approx(4.0)
    assert math.isnan(ladder.speed_over(rows, "step", "base", 64))


def test_the_matrices_of_a_layer_are_added_up_in_groups_of_64() -> None:
    two = [replace(r, time_us=5.0, fraction=0.5) for r in RECORD.rows if r.kernel == NAMES[0] and r.sizes["M"] == 16][
        :2
    ]
    face = [replace(r, measure=headline.MEASURE, time_us=2.0, fraction=0.8) for r in two]
    text = ladder.groups_table(replace(RECORD, rows=(*two, *face)))
    assert "| `qoq_sm80` | 0.50 |  |  | 10.0 | 0.0 | 0.0 |\n| `gemm_w4a8` | 0.80 |" in text and "the 2 matrices" in text
    assert ladder.groups_table(None) == frames.MISSING


def test_the_matrices_of_a_layer_are_added_up_as_code_for_ampere() -> None:
    two = [r for r in RECORD.rows if r.kernel == NAMES[0] and r.sizes["M"] == 16][:2]
    as_ampere = [replace(r, measure="compute_80", time_us=5.0, fraction=0.5) for r in two]
    text = ladder.compute_80_table(replace(RECORD, rows=(*two, *as_ampere)))
    assert f"| `{NAMES[0]}` | 0.50 |  |  | 10.0 | 0.0 | 0.0 |" in text and "the 2 matrices" in text
    assert ladder.compute_80_table(replace(RECORD, rows=tuple(two))) == frames.MISSING == ladder.compute_80_table(None)


def test_speed_over_a_peer() -> None:
    sizes = {**FIRST.sizes, "N": 1}  # not among the stored peers
    rows = points(
        replace(FIRST, sizes=sizes, time_us=10.0, peers={"cublas_fp8": 25.0}),
        replace(FIRST, sizes=sizes, time_us=10.0, peers={}),
    )
    assert [*frames.over(rows, "cublas_fp8")] == pytest.approx([2.5])
    assert math.isnan(frames.mean(frames.over(rows, ladder.QSERVE)))


def test_stored_peers_stand_beside_those_of_the_run() -> None:
    """The stored times are unchanged; peers that the run measured itself have the run's time."""
    row = POINTS[(POINTS.N == 12288) & (POINTS.K == 4096) & (POINTS.M == 16)].iloc[0]
    then = {name: us for name, us in STORED[12288, 4096, 16].items() if name != OURS}
    assert set(row.peers) == set(frames.GEMM_PEERS) == set(then)
    assert all(row.peers[name] == us for name, us in then.items() if name not in CUBLAS)
    assert row.peers["cublas_fp8"] == pytest.approx(1.7 * row.floor_us) != then["cublas_fp8"]
    assert row[f"over {ladder.QSERVE}"] == pytest.approx(then[ladder.QSERVE] / row.time_us)


def test_steps_are_in_the_order_of_the_ladder() -> None:
    assert ladder.steps(POINTS[::-1]) == NAMES
    assert ladder.steps(ladder.points(record(NAMES[2:4]))) == NAMES[2:4]


def test_table() -> None:
    table = ladder.ladder_table(RECORD)
    lines = table.splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert [line.split("`")[1] for line in lines[2 : 2 + len(NAMES)]] == [ladder.short_name(name) for name in NAMES]
    assert (
        "made-up H200" in table and "cuBLAS ran beside `ptxlab`. The other peers were timed in one earlier run" in table
    )
    assert "nan" not in table


def test_table_of_limits_names_the_worst_reasons() -> None:
    table = ladder.limits_table(RECORD)
    assert table.count("long scoreboard 2.5, barrier 1.5, gmma 0.9") == 2 * len(NAMES)
    assert f"| {32 * 3e7 / DISSECTED.N / DISSECTED.K:.2f} |" in table and "| 1750 |" in table
    bare = replace(RECORD, rows=tuple(r for r in RECORD.rows if "tensor_pct" not in r.more))
    assert ladder.limits_table(bare) == f"{frames.NOT_RECORDED}\n"


def test_table_of_main_loops() -> None:
    table = ladder.loop_table()
    assert all(f"| `{ladder.short_name(name)}` | 16 |" in table for name in NAMES)


@pytest.mark.full
@pytest.mark.parametrize("names", [NAMES, NAMES[:1], NAMES[2:4]], ids=("all", "one", "two"))
def test_figures(names: list[str], tmp_path: Path) -> None:
    rows = ladder.points(record(names))
    drawn = {
        "peers": gemmplot.peers_figure(STORED),
        "times": gemmplot.times_figure(rows),
        "ablation": gemmplot.ablation_figure(rows),
        "fraction": gemmplot.fraction_figure(rows),
        "roofline": gemmplot.roofline_figure(rows),
    }
    for name, figure in drawn.items():
        plot.save(figure, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.full
def test_ablation_shows_every_gain() -> None:
    axes = gemmplot.ablation_figure(POINTS).axes[0]
    shown = [float(text.get_text()) for text in axes.texts]
    expected = [ladder.speed_over(POINTS, name, gemmplot.BASELINE, M) for name in NAMES for M in TOKENS]
    assert shown == pytest.approx(expected, abs=0.006)
    assert axes.get_ylabel() == "speed over qoq_sm90"
    assert gemmplot.ablation_figure(ladder.points(record(NAMES[:2]))).axes[0].get_ylabel() == "speed over qoq_sm80"


def test_every_step_has_its_colour() -> None:
    assert set(gemmplot.COLOURS) == {ladder.short_name(name) for name in NAMES}


def test_ratios_are_of_a_layers_sums_and_leave_out_what_was_not_measured() -> None:
    first, slow, fast = NAMES[0], NAMES[2], NAMES[3]
    rows = pd.DataFrame(
        {"kernel": kernel, "M": 16, "N": matrix.N, "K": matrix.K, "time_us": time, f"over {ladder.QSERVE}": 9.0}
        for kernel, times in ((first, (1, 1, 1, 1)), (slow, (4, 1, 1, 6)), (fast, (1, 2, 2, 1)))
        for matrix, time in zip(CHAINS[0], times, strict=True)
    )
    assert ladder.layer_ratios(rows, slow, fast) == [2.0]  # 12 over 6; the other layer and other M are not there
    assert ladder.layer_ratios(rows, ladder.QSERVE, fast) == [6.0]  # the peer takes 9 times the first step's 4
    assert ladder.layer_ratios(rows[1:], ladder.QSERVE, fast) == []


def test_documents_stand_beside_the_record() -> None:
    table = ladder.documents_table(RECORD)
    ratio = ladder.layer_ratios(POINTS, NAMES[3], NAMES[6])
    assert f"| ImFP over the baseline | gains at every M | {min(ratio):.2f}x to {max(ratio):.2f}x |" in table


@pytest.mark.full
def test_pictures_and_pages_with_and_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "load_record", lambda: None)
    assert frames.NOT_RECORDED in sections.ladder_section() and "![" not in sections.ladder_section()
    with pytest.raises(FileError, match="python -m benchmarks gemm"):
        figures.picture("ladder_times")
    monkeypatch.setattr(ladder, "load_record", lambda: RECORD)
    assert "![What each step gained, by tokens](notebooks/figures/ladder_ablation.png)" in sections.ladder_section()
    for name in figures.PICTURES:
        assert not name.startswith("ladder") or figures.picture(name).axes


def test_a_slower_point_is_found_whatever_variant_runs_now() -> None:
    slow_record = replace(slow_down(FIRST, 0.5), variant={**FIRST.variant, "STAGES": 99})
    slower_rows = compare(replace(RECORD, rows=(slow_record, *RECORD.rows[1:])), RECORD)
    assert [slower.row for slower in slower_rows] == [slow_record]


@pytest.fixture
def measured() -> Record:
    record = ladder.load_record()
    assert record
    return record


def test_the_record_is_valid_and_whole(measured: Record) -> None:
    assert measured.invalid == ""
    rows = [row for row in measured.rows if row.measure == "gemm"]
    points = {(r.kernel, r.sizes["N"], r.sizes["K"], r.sizes["M"]) for r in rows}
    timed = [name for name in NAMES if name not in UNTIMED]
    assert points == {(name, layer.N, layer.K, M) for name in timed for layer in LAYERS for M in TOKENS}
    assert all(set(r.peers) == set(CUBLAS) and "bit for bit" in r.checked for r in rows)
    assert all(0 < r.fraction < 1.1 for r in rows)


def test_the_first_step_is_no_slower_than_qserve(measured: Record) -> None:
    """QServe's own kernel of the same scheme, over the matrices of LLaMA-2-7B and -70B: at most 1.1 times its time."""
    assert 1 / frames.mean(frames.over(ladder.select_step(ladder.points(measured), NAMES[0]), ladder.QSERVE)) <= 1.1
