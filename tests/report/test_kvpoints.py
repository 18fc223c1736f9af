"""Tables, targets and the picture of KV4 attention, from a record that is made up and from the one that is not."""

import math
from collections.abc import Callable
from dataclasses import replace

import pandas as pd
import pytest

from benchmarks.stored import OURS, stored_attention
from ptxlab.bench.record import Record, Row
from ptxlab.errors import FileError
from ptxlab.lowbit.bench.attention import PROGRAMMATIC, TABLE1_MEASURE, TABLE1_STEPS
from ptxlab.lowbit.bench.shapes import HEADS, batches
from ptxlab.lowbit.kernels.attention.call import NAME as FACE
from ptxlab.lowbit.kernels.attention.steps import STEPS
from report import attention, figures, frames, sections, targets
from report.targets import Target
from tests.support import kv_record
from tests.support.kv_record import EARLY, SLOWDOWN

RECORD = kv_record.record()
POINTS = attention.points(RECORD)
TABLES: tuple[Callable[[Record | None], str], ...] = (
    attention.batches_table,
    attention.means_table,
    attention.single_table,
    attention.steps_table,
    attention.others_table,
    lambda record: targets.table(targets.attention(record)),
)


def change_rows(change: Callable[[Row], Row]) -> Record:
    return replace(RECORD, rows=tuple(change(row) for row in RECORD.rows))


def target(start: str, of: Record | None = RECORD) -> Target:
    """Return the target of attention whose name begins so, judged on a record."""
    (match,) = [t for t in targets.attention(of) if t.name.startswith(start)]
    return match


def places(rows: pd.DataFrame) -> list[tuple[int, ...]]:
    return [*rows[["Hq", "Hkv", "B", "L"]].itertuples(index=False, name=None)]


def at(*place: int) -> pd.Series:
    return POINTS.iloc[places(POINTS).index(place)]


def test_every_peer_has_a_name_and_a_line() -> None:
    assert all(set(peers) == {OURS, *frames.ATTENTION_PEERS} for peers in stored_attention().values())
    assert {bits: len(names) for bits, names in attention.BITS.items()} == {16: 5, 8: 4, 4: 2}
    assert sorted(name for names in attention.BITS.values() for name in names) == sorted(frames.ATTENTION_PEERS)
    assert set(attention.A100_US) == {step.spec.name for step in STEPS[:6]}


def test_the_points_and_their_peers() -> None:
    assert places(POINTS) == [batch.place for heads in HEADS for batch in batches(heads)]
    assert len(attention.batch_points(POINTS)) == 24 and len(attention.single(POINTS)) == 6
    assert len(attention.beside_all(POINTS)) == 24 and 256 not in {*attention.beside_all(POINTS).B}
    row = at(32, 32, 64, 1024)
    fastest = stored_attention()[32, 32, 64, 1024]["fi_xqa_fp8"]
    assert row.best == "fi_xqa_fp8" and row["over"] == row["over 8"] == pytest.approx(fastest / row.time_us)
    point, stored_peers = at(32, 32, 128, 1024), stored_attention()[32, 32, 128, 1024]
    assert point.peers["fi_xqa_fp8"] == stored_peers["fi_xqa_fp8"], "as it was measured"
    assert point.peers["sdpa_flash_f16"] == pytest.approx(1.1 * stored_peers["sdpa_flash_f16"]), "the record's own"
    assert OURS not in point.peers
    appending = {"qserve_kv4", "qserve_kv8", "lserve_kv4"}  # those whose time has the append in it
    for row in attention.behind_append(RECORD).itertuples():
        assert set(row.peers) == (appending if row.B < 256 and row.L <= 4096 else set())


@pytest.mark.full
def test_targets() -> None:
    for band, minimum in (("240", 0.95), ("60 to 240", 0.90), ("15 to 60", 0.75), ("3.8 to 15", 0.55)):
        floor_target = target(f"of the floor where that is {band} µs")
        assert (
            floor_target.minimum == minimum
            and floor_target.measured == pytest.approx(1 / SLOWDOWN)
            and floor_target.verdict == "met"
        )
    assert target("of the floor, single sequences").minimum == 0.6
    assert target("points slower").measured == 0
    assert target("ragged beside even").measured == pytest.approx(1.2 / 1.1)
    assert target("append, 4096 tokens").measured == pytest.approx(1 / 1.2)
    decode = attention.appends(RECORD, 64).time_us.max()
    assert target("append, a token for each").measured == pytest.approx(decode)
    behind_append = attention.batch_points(attention.behind_append(RECORD))
    behind_append = behind_append[behind_append.heads == "heads 32/32"]
    over = frames.mean(row.peers["qserve_kv4"] / row.time_us for row in behind_append.itertuples() if row.B < 256)
    assert target("append + attention over QServe KV4, MHA").measured == pytest.approx(over)
    assert target("append + attention over QServe KV4, GQA").minimum == 9.0


def test_one_slow_point_is_found() -> None:
    def slow_down_point(row: Row) -> Row:
        is_point = row.measure == "attention" and [*row.sizes.values()] == [32, 32, 128, 4096]
        return replace(row, time_us=1e4, fraction=row.floor_us / 1e4) if is_point else row

    slow_record = change_rows(slow_down_point)
    assert (
        target("points slower", slow_record).measured == 1
        and target("of the floor where that is 240 µs", slow_record).verdict == "missed"
    )
    assert target("of the floor where that is 60 to 240 µs", slow_record).verdict == "met"
    assert "Slower than a peer: heads 32/32, 128 x 4096 (0.1" in attention.means_table(slow_record)
    assert "No peer is faster" in attention.means_table(RECORD)


def test_programmatic_launches_stand_beside_plain_ones() -> None:
    assert f"| {1 / SLOWDOWN:.2f} | {1 / EARLY:.2f} |" in attention.means_table(RECORD)
    without = change_rows(lambda row: replace(row, more={k: v for k, v in row.more.items() if k != PROGRAMMATIC}))
    assert f"| {1 / SLOWDOWN:.2f} |  |" in attention.means_table(without)


@pytest.mark.full
def test_what_is_not_in_the_record_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "stored_attention", dict)
    assert {t.verdict for t in targets.attention(None)} == {""}
    rows = [row for row in RECORD.rows if row.measure == "attention"]
    alone = replace(RECORD, rows=tuple(replace(row, peers={}, more={}) for row in rows))
    verdicts = {t.name: t.verdict for t in targets.attention(alone)}
    assert sum(verdict == "met" for verdict in verdicts.values()) == 5, "the floor alone"
    assert "nan" not in "".join(table(alone) for table in TABLES)
    assert attention.unequal(alone).empty and math.isnan(target("ragged", alone).measured)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.__module__}.{t.__name__}")
def test_tables(table: Callable[[Record | None], str]) -> None:
    text = table(RECORD)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 3 and len({line.count("|") for line in lines}) == 1 and "nan" not in text
    assert table(None) == f"{frames.NOT_RECORDED}\n"


def test_the_first_table() -> None:
    row = at(32, 32, 64, 1024)
    table, speed = attention.batches_table(RECORD), row["over"]
    assert f"| {row.time_us:.1f} µs, 0.96, **{speed:.2f}x** FlashInfer XQA FP8 |" in table
    assert "in that run are 0.96 of those in this one (geometric mean; 0.91 to 0.98 at single points)." in table
    assert f"| {at(32, 32, 256, 1024).time_us:.0f} µs, 0.96 |" in table, "PyTorch alone says nothing of the fastest"


def test_the_ablation() -> None:
    table = attention.steps_table(RECORD)
    assert "| `attention_kv4_prefetch` |" in table and "| 0.28 ms | 1.71x |" in table
    assert table.count("|\n") == 2 + len(STEPS)


def test_the_picture_with_and_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "load_record", lambda: None)
    with pytest.raises(FileError, match="python -m benchmarks attention"):
        figures.picture("attention_speedup")
    monkeypatch.setattr(attention, "load_record", lambda: RECORD)
    figure = figures.picture("attention_speedup")
    assert len(figure.axes) == len(HEADS) * 2
    first = at(32, 32, 1, 1024)
    for line, (bits, names) in zip(figure.axes[0].lines, attention.BITS.items(), strict=False):
        best = min(first.peers[name] for name in names if name in first.peers)
        assert f"with {bits} bits" in line.get_label() and line.get_ydata()[0] == pytest.approx(best / first.time_us)
    everything = attention.beside_all(POINTS)
    assert f"{frames.mean(everything['over 8']):.1f}x as the best 8-bit" in figure.get_suptitle()


def test_the_page_with_and_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "load_record", lambda: None)
    assert sections.kv4_section() == f"{frames.NOT_RECORDED}\n"
    monkeypatch.setattr(attention, "load_record", lambda: RECORD)
    assert "(notebooks/figures/attention_speedup.png)" in sections.kv4_section()


def test_the_record_is_whole() -> None:
    record = attention.load_record()
    assert record
    rows = attention.points(record)
    assert places(rows) == places(POINTS)
    assert all("within the spec's bound" in row.checked and 0 < row.fraction < 1.1 for row in rows.itertuples())
    for row in rows.itertuples():  # cuDNN in the same run where there are no groups, else stored
        everyone = row.B < 256 and row.L <= 4096
        assert len(row.peers) == (11 if everyone else 1 + (row.Hq == row.Hkv))
    assert [*attention.steps(record).kernel] == [step.spec.name for step in STEPS]


def test_qserves_table_1_stands_beside_its_own_ratios() -> None:
    times = dict(zip(TABLE1_STEPS, (30.0, 40.0, 20.0), strict=True))
    sizes = {**RECORD.rows[0].sizes, "B": 64, "L": 512}
    first = replace(RECORD.rows[0], measure=TABLE1_MEASURE, sizes=sizes, face="")
    rows = [replace(first, kernel=name, time_us=us) for name, us in times.items()]
    rows += [
        replace(first, kernel="any", face=FACE, time_us=us, config=config)
        for config, us in (({"bits": 8}, 9), ({"bits": 8, "channel": 1}, 8), ({"bits": 4}, 5))
    ]
    text = attention.table1(replace(RECORD, rows=tuple(rows)))
    assert "| 512 | 30.0 | 40.0 | 20.0 | 9.0 | 8.0 | 5.0 | 0.75x | 0.87x | 1.50x | 1.44x |" in text
    assert attention.table1(None) == frames.MISSING


def test_what_rotation_costs_stands_beside_keys_as_they_come() -> None:
    first = replace(RECORD.rows[0], measure="rotation", face=FACE, time_us=20.6, more={"unrotated_us": 20.0})
    rows = tuple(replace(first, config={"appended": appended}) for appended in (1, 0))
    text = attention.rotation_table(replace(RECORD, rows=rows))
    assert "| append, attention | 20.0 | 20.6 | +3.0% |" in text and "| attention | 20.0 | 20.6 |" in text
    assert attention.rotation_table(None) == frames.MISSING
