"""`gemm_w4a8` from its record: points, means, targets, tables and figures. The record is made up."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from benchmarks.peers import HUMMING
from benchmarks.stored import stored_times
from ptxlab import plot
from ptxlab.bench.record import Record, Row
from ptxlab.errors import FileError
from ptxlab.lowbit.bench.shapes import ALL_TOKENS, FEW_TOKENS, LLAMA, UNTUNED
from report import FIGURES, figures, frames, gemm, gemmplot, ladder, sections, targets
from tests.support import ladder_record
from tests.support.fake_rows import CUBLAS
from tests.support.headline_record import SLOWDOWN, record

RECORD = record()
POINTS = gemm.points(RECORD)
HEADLINE = next(row for row in RECORD.rows if row.measure == "headline" and row.activations == "row_major")
TABLES = (
    gemm.matrices_table,
    gemm.means_table,
    gemm.orders_table,
    gemm.chains_table,
    gemm.experts_table,
    gemm.untuned_table,
    lambda record: targets.table(targets.gemm(record)),
)


def change_rows(change: Callable[[Row], Row]) -> Record:
    return replace(RECORD, rows=tuple(map(change, RECORD.rows)))


def target(start: str, of: Record = RECORD) -> targets.Target:
    (match,) = (t for t in targets.gemm(of) if t.name.startswith(start))
    return match


def test_a_point_is_row_major_with_sums_from_the_quantiser() -> None:
    assert [*zip(POINTS.layer, POINTS.M, strict=True)] == [(str(la), M) for la in LLAMA for M in ALL_TOKENS]
    assert set(POINTS.activations) == {"row_major"}
    orders = gemm.otherwise(RECORD).activations.value_counts().to_dict()
    assert orders == dict.fromkeys(("fragment", "row_major-sums"), len(POINTS))
    faster = change_rows(lambda row: replace(row, time_us=0.1) if row.activations in orders else row)
    assert gemm.points(faster).equals(POINTS), "another order is never the headline, even if it is faster"
    other_group = change_rows(lambda row: replace(row, sizes={**row.sizes, "g": 64}))
    assert gemm.points(other_group).empty and len(gemm.points(other_group, group=64)) == len(POINTS)


@pytest.mark.full
def test_the_ladder_does_not_see_them() -> None:
    assert ladder.points(RECORD).equals(ladder.points(ladder_record.record()))
    assert ladder.ladder_table(RECORD) == ladder.ladder_table(ladder_record.record())


def test_the_best_peer_of_a_point() -> None:
    unknown = {**HEADLINE.sizes, "N": 1}  # not among the stored peers
    row = replace(HEADLINE, sizes=unknown, time_us=10.0, peers={"cublas_fp8": 15.0, "qqq_w4a8_g128": 9.0})
    point, alone = (gemm.points(replace(RECORD, rows=(one,))) for one in (row, replace(row, peers={})))
    assert (*point.best, *point["over"]) == ("qqq_w4a8_g128", 0.9)
    assert len(frames.slower(point)) == 1 and [*frames.over(point, "cublas_fp8")] == [1.5]
    assert alone["over"].isna().all() and frames.slower(alone).empty and frames.over(alone).empty


def test_every_peer_has_a_name_and_a_kind() -> None:
    assert {name for peers in POINTS.peers for name in peers} == set(frames.GEMM_PEERS) and len(frames.GEMM_PEERS) == 11
    kinds = [set(names) for _, names in gemm.KINDS.values()]
    assert [len(names) for names in kinds] == [3, 3, 5, 11] and kinds[0] | kinds[1] | kinds[2] == kinds[3]


def test_kinds_of_peers_stand_apart_and_only_where_all_were_measured() -> None:
    row = POINTS[(POINTS.layer == "7B QKV") & (POINTS.M == 256)].iloc[0]
    for kind, (_, names) in gemm.KINDS.items():
        assert row[kind] == pytest.approx(min(row.peers[name] for name in names) / row.time_us)
    tokens_by_kind = {kind: {*POINTS[POINTS[kind].notna()].M} for kind in gemm.KINDS}
    tokens = {1, 16, 64, 128, 256, 512}  # humming: not at 32
    assert tokens_by_kind == {
        "over g128": tokens,
        "over channel": tokens,
        "over wide": tokens | {32},
        "over all": tokens,
    }


def test_a_record_with_humming_needs_no_stored_times_of_it() -> None:
    """The stored times have none at 32 tokens; beside other peers the record's own time stands."""
    humming_us = dict.fromkeys(gemm.KINDS["over g128"][1][-1:] + gemm.KINDS["over channel"][1][-1:], 1.0)
    with_humming = change_rows(
        lambda row: replace(row, peers={**row.peers, **humming_us}) if row.measure == "headline" else row
    )
    rows = gemm.points(with_humming)
    assert {*rows[rows["over all"].notna()].M} == {1, 16, 32, 64, 128, 256, 512} and set(humming_us) == set(HUMMING)
    assert (rows["over g128"].dropna() * rows.time_us).dropna().tolist() == pytest.approx([1.0] * 7 * len(LLAMA))
    assert "cuBLAS and humming ran beside `ptxlab`" in gemm.matrices_table(with_humming)


def test_chains_beside_the_best_of_each_point() -> None:
    links = gemm.chains(RECORD)
    assert [*zip(links.model, links.M, strict=True)] == [(m, M) for m in ("7B", "70B") for M in FEW_TOKENS]
    alone = [min(row.peers.values()) for row in POINTS.itertuples() if (row.model, row.M) == ("7B", 1)]
    assert links[links.M.isin((4, 32))].over_best.isna().all(), "not all peers were measured"
    first = links.iloc[0]
    assert len(alone) == 4 and first.over_best == pytest.approx(sum(alone) / first.time_us)
    assert first["over cublas_fp8"] == pytest.approx(CUBLAS["cublas_fp8"] / 1.05)
    bare = replace(RECORD, rows=tuple(row for row in RECORD.rows if row.measure == "chain"))
    assert gemm.chains(bare).over_best.isna().all()


@pytest.mark.full
def test_targets_that_are_met_and_missed() -> None:
    assert target("of the floor, M <= 256").verdict == "met"
    assert target("of the floor, M <= 256").measured == pytest.approx(1 / SLOWDOWN)
    assert target("of the floor, 70B gate+up").verdict == "missed", "0.89 is less than 0.90"
    slow = change_rows(lambda row: replace(row, fraction=0.8) if row.measure == "headline" else row)
    assert target("of the floor, M <= 256", slow).verdict == "missed"
    assert target("dequantising").measured == pytest.approx(0.04)
    assert target("grouped over the loop, every").measured == pytest.approx(1.5)
    assert target("untuned shapes: time").measured == pytest.approx(1.1)
    assert target("quantising").measured == pytest.approx(0), "the headline is row-major"
    assert "| quantising: tiles over row_major | 1.040 | 1.040 |" in gemm.orders_table(RECORD)
    assert target("W8A8 over cuBLAS INT8").measured == pytest.approx(1.04 * CUBLAS["cublas_int8"] / SLOWDOWN)


@pytest.mark.smoke
def test_one_slow_point_is_found() -> None:
    largest = LLAMA[6]

    def slow_down_point(row: Row) -> Row:
        is_point = row.measure == "headline" and [row.sizes[name] for name in "NKM"] == [largest.N, largest.K, 64]
        return replace(row, time_us=1e3, fraction=row.floor_us / 1e3) if is_point else row

    slower_before, slower_after = (
        target("points slower", of).measured for of in (RECORD, change_rows(slow_down_point))
    )
    assert slower_after == slower_before + 1
    assert target("of the floor, 70B gate+up", change_rows(slow_down_point)).measured < 0.1
    assert f"{largest}, M = 64 (0." in gemm.means_table(change_rows(slow_down_point))


def test_without_a_peer_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "stored_times", dict)
    without = change_rows(lambda row: replace(row, peers={n: us for n, us in row.peers.items() if n != "cublas_fp8"}))
    assert {target(start, without).verdict for start in ("over cuBLAS FP8", "over QServe g128")} == {""}
    assert "nan" not in targets.table(targets.gemm(without)) + gemm.means_table(without)


@pytest.mark.full
def test_what_is_not_in_the_record_is_not_judged() -> None:
    old = ladder_record.record()
    assert {t.verdict for t in targets.gemm(old)} == {t.verdict for t in targets.gemm(None)} == {""}
    ungrouped = record(with_grouped=False)
    assert target("grouped over the loop, every", ungrouped).verdict == ""
    assert "| not measured |" in targets.table(targets.gemm(ungrouped)) and "nan" not in gemm.experts_table(ungrouped)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.__module__}.{t.__name__}")
def test_tables(table: Callable[[Record | None], str]) -> None:
    text = table(RECORD)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 3 and len({line.count("|") for line in lines}) == 1 and "nan" not in text
    assert table(None) == table(ladder_record.record()) == f"{frames.NOT_RECORDED}\n"


def test_the_first_table() -> None:
    row = POINTS[(POINTS.layer == "7B O") & (POINTS.M == 16)].iloc[0]
    cells = f"16 | {row.time_us:.1f} | {row.fraction:.2f} | {row['over g128']:.2f}x humming | "
    table = gemm.matrices_table(RECORD)
    assert f"| 7B O, 4096 x 4096 | {cells}" in table
    part = gemm.at_tokens(POINTS, 16)
    means = [f"{frames.mean(part[kind]):.2f}x" for kind in ("over g128", "over channel", "over wide")]
    assert f"| **mean** | 16 |  | {frames.fraction(part):.2f} | {' | '.join(means)} |" in table
    assert (
        "row-major activations" in table
        and "cuBLAS ran beside `ptxlab`. The other peers were timed in one earlier run" in table
    )
    assert "| 32 |" not in table and "| 32 | 0.89 |" in gemm.means_table(RECORD)


@pytest.mark.full
def test_figures(tmp_path: Path) -> None:
    drawn = {"headline": gemmplot.headline_figure(POINTS), "ungrouped": gemmplot.beyond_figure(record(False))}
    drawn["few"] = gemmplot.headline_figure(POINTS[3:9])
    drawn["beyond"] = gemmplot.beyond_figure(RECORD)
    for name, figure in drawn.items():
        plot.save(figure, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    floor, *kinds = drawn["headline"].axes
    assert floor.lines[len(LLAMA)].get_ydata() == pytest.approx([1 / SLOWDOWN] * len(ALL_TOKENS))
    for axes, kind in zip(kinds, ("over g128", "over channel", "over wide"), strict=True):
        assert axes.lines[0].get_ydata()[0] == pytest.approx(POINTS[kind].iloc[0])
    models = {layer.model for layer in UNTUNED}
    assert {line.get_label().partition(",")[0] for line in drawn["beyond"].axes[2].lines} >= models


@pytest.mark.full
def test_pictures_and_pages_with_and_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "load_record", lambda: ladder_record.record())
    assert sections.headline_section() == f"{frames.NOT_RECORDED}\n"
    with pytest.raises(FileError, match="python -m benchmarks gemm"):
        figures.picture("gemm_headline")
    monkeypatch.setattr(ladder, "load_record", lambda: RECORD)
    assert "(notebooks/figures/gemm_headline.png)" in sections.headline_section()
    for name in ("gemm_headline", "gemm_beyond"):
        assert figures.picture(name).axes


def test_what_a_record_lacks_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel = replace(RECORD, rows=tuple(row for row in RECORD.rows if row.measure == "headline"))
    monkeypatch.setattr(ladder, "load_record", lambda: one_kernel)
    assert figures.picture("gemm_headline").axes
    with pytest.raises(FileError, match="lacks what is drawn here"):
        figures.picture("gemm_beyond")


def test_every_picture_has_its_file_unless_it_is_not_measured_yet() -> None:
    files = {path.stem for path in FIGURES.glob("*.png")}
    assert files <= set(figures.PICTURES)
    for name in set(figures.PICTURES) - files:
        with pytest.raises(frames.NotMeasuredError):
            figures.picture(name)


def test_what_is_not_measured_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`python -m report --figures` goes on, and says so."""

    def lacking() -> Figure:
        raise frames.NotMeasuredError("layer.json: lacks what is drawn here")

    monkeypatch.setattr(figures, "PICTURES", {"lacking": lacking, "drawn": Figure})
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    message = f"{tmp_path / 'lacking.png'}: Not measured yet. layer.json: lacks what is drawn here"
    assert figures.draw_all() == ([tmp_path / "drawn.png"], [message])
    assert [path.name for path in tmp_path.iterdir()] == ["drawn.png"]


@pytest.fixture
def measured() -> pd.DataFrame:
    return gemm.points(ladder.load_record())


def test_the_record_is_whole(measured: pd.DataFrame) -> None:
    assert [*zip(measured.layer, measured.M, strict=True)] == [(str(la), M) for la in LLAMA for M in ALL_TOKENS]
    rows = [*measured.itertuples()]
    assert all("bit for bit" in row.checked and 0 < row.fraction < 1.1 for row in rows)
    assert all(set(CUBLAS) <= set(row.peers) for row in rows)
    assert all((ladder.QSERVE in row.peers) == ((row.N, row.K, row.M) in stored_times()) for row in rows)
    record = ladder.load_record()
    assert len(gemm.untuned_points(record)) == 80 and len(gemm.chains(record)) == 14
