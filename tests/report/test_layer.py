"""Tables, targets and pictures of decoder layers, from a record that is made up and from the one that is not."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks import layer as suite
from ptxlab.bench.record import Record
from ptxlab.errors import FileError
from report import figures, frames, layer, sections, targets
from report.targets import Target
from tests.support import layer_record
from tests.support.layer_record import PEER_SLOWDOWNS, SLOWDOWN

RECORD = layer_record.record()
POINTS = layer.points(RECORD)
TABLES: tuple[Callable[[Record | None], str], ...] = (
    layer.layers_table,
    layer.fused_table,
    layer.timeline_table,
    layer.epilogues_table,
    layer.d64_table,
    lambda record: targets.table(targets.layers(record)),
)


def target(start: str, of: Record | None = RECORD) -> Target:
    (match,) = [t for t in targets.layers(of) if t.name.startswith(start)]
    return match


def test_the_points_and_their_mixes() -> None:
    assert [*zip(POINTS.model, POINTS.B, strict=True)] == [
        (config.name, B) for config in suite.CONFIGS for B in suite.BATCHES
    ]
    assert POINTS.fraction.tolist() == pytest.approx([1 / SLOWDOWN] * len(POINTS))
    seven = POINTS[(POINTS.model == "LLaMA-2-7B") & (POINTS.B == 4)].iloc[0]  # no stored attention at 4 sequences
    assert seven["over FP8"] == pytest.approx(PEER_SLOWDOWNS["fp8_tensor"]) and seven["FP8"] == "fp8_tensor/sdpa"
    assert seven["over humming g128"] == pytest.approx(1.6) and seven["over FP16"] == pytest.approx(4.0)
    assert seven["others_us"] == 8.0
    experts = POINTS[POINTS.model == "Mixtral-8x7B"]
    assert experts["over humming g128"].isna().all() and experts["over FP8"].notna().all()
    stored = POINTS[(POINTS.model == "LLaMA-2-7B") & (POINTS.B == 64)].iloc[0]
    assert {"fp8_row/xqa_stored", "fp16/xqa_stored"} <= set(stored.peers)
    best = min(us for name, us in stored.peers.items() if name.startswith("fp8_"))
    assert stored["over FP8"] == pytest.approx(best / stored.time_us)


@pytest.mark.parametrize("table", TABLES, ids=["layers", "fused", "timeline", "epilogues", "d64", "targets"])
def test_tables(table: Callable[[Record | None], str]) -> None:
    text = table(RECORD)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 3 and "nan" not in text
    assert table(None) == f"{frames.NOT_RECORDED}\n"


def test_the_layers_table() -> None:
    text = layer.layers_table(RECORD)
    row = POINTS.iloc[1]
    over = " | ".join(f"{PEER_SLOWDOWNS[name]:.2f}x" for name in ("fp16", "fp8_tensor", "humming_chn", "humming_g128"))
    assert f"| LLaMA-2-7B | 4 | {row.time_us:.1f} µs | 0.80 | {row.others_share:.0%} | {over} |" in text
    assert "| **mean** |" in text and "FlashInfer's XQA, its stored time" in text
    assert "FlashInfer's XQA over" not in text, "which did not run"


def test_the_fused_table() -> None:
    text = layer.fused_table(RECORD)
    floor = 4096 * 8192 * 7 / 4.2e6
    us = 1.25 * (floor + 1)
    ratios = f"{floor / us:.2f} | 0.80 | 2.00 µs | 1.40 µs | {2 / 1.25:.2f}x | {2.5 / 1.25:.2f}x"
    assert f"| `rmsnorm_quantize` | 8,192 | 4,096 | {us:.2f} µs | {ratios} |" in text


def test_the_ends_that_win() -> None:
    text = layer.epilogues_table(RECORD)
    us = POINTS[(POINTS.model == "LLaMA-2-7B") & (POINTS.B == 16)].time_us.iloc[0]
    changes = "-0.50 µs (predicted -0.25) | +1.00 µs (predicted +0.00) | +0.50 µs (predicted -0.25) | residual add |"
    assert f"| LLaMA-2-7B | 16 | {us:.1f} µs | {changes}" in text


def test_heads_of_64_stand_beside_those_of_128() -> None:
    """Attention takes 1.2 times its floor in both, and `rope_append_kv4` 2 µs."""
    us = [1.2 * (1024 * 8 * 2 * (D // 2 + 4)) / 4.6e6 for D in (64, 128)]
    cells = [f"{attention_us:.1f} µs | 0.83 | 2.0 µs" for attention_us in us]
    assert f"µs | 0.80 | {cells[0]} | {cells[1]} |" in layer.d64_table(RECORD).splitlines()[2]


def test_the_timeline_names_its_gaps() -> None:
    text = layer.timeline_table(RECORD)
    assert "| `gemm qkv` | 2.50 µs | 9.50 µs | 0.50 µs idle |" in text
    assert "| `rope_append_kv4 q` | 11.50 µs | 1.50 µs | 0.50 µs overlapped |" in text
    assert "takes 20.50 µs without tracing" in text


def test_targets() -> None:
    assert target("of the floor, LLaMA-2-7B, batch 64").minimum == 0.76
    assert target("of the floor, LLaMA-2-7B, batch 64").measured == pytest.approx(1 / SLOWDOWN)
    assert target("of the floor, LLaMA-2-7B, batch 256").verdict == "missed"
    assert target("over the FP16 mix").verdict == "met"
    assert target("over humming's mix, mean").measured < 1.6
    assert target("points slower than humming's mix").measured == 1, "70B, one sequence, stored attention"
    assert target("over the FP8 mix, 7B and 70B, every point").measured <= 2.0
    assert target("others, 7B and 70B, batch 16").maximum == 0.10
    bytes_of = [row.bytes for row in RECORD.rows if row.measure == suite.FUSED]
    assert max(bytes_of) > 64e6 and target("fused kernels from 64 MB").minimum == 0.88


def test_what_is_not_in_the_record_is_not_judged() -> None:
    assert {t.verdict for t in targets.layers(None)} == {""}
    alone = replace(RECORD, rows=tuple(replace(row, peers={}) for row in RECORD.rows if row.measure == suite.MEASURE))
    assert "nan" not in "".join(table(alone) for table in TABLES)
    assert (
        math.isnan(target("over the FP16 mix", alone).measured)
        and target("of the floor, LLaMA-2-7B, batch 4", alone).verdict
    )


def test_the_pictures_with_and_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "load_record", lambda *_: None)
    for name in ("layer_breakdown", "layer_timeline"):
        with pytest.raises(FileError, match="python -m benchmarks layer"):
            figures.picture(name)
    monkeypatch.setattr(layer, "load_record", lambda *_: RECORD)
    figure = figures.picture("layer_breakdown")
    first, row = figure.axes[0], POINTS.iloc[0]
    one = row.peers[row["FP8"]]
    assert first.containers[0][0].get_height() == pytest.approx(row.gemm_us / one)
    parts = [sum(bars[place].get_height() for bars in first.containers[4:7]) for place in range(6)]
    assert parts == pytest.approx([1.0] * 6), "the mix, whose parts are stacked, is 1 everywhere"
    assert f"{frames.mean(POINTS[POINTS.model == 'LLaMA-2-7B']['over FP8']):.2f}x the FP8 mix" in first.get_title(
        "left"
    )
    assert [len(axes.patches) for axes in figures.picture("layer_timeline").axes] == [4, 4, 4]
    first_alone = [row for row in RECORD.rows if row.measure != suite.TIMELINE or row.sizes["hidden"] == 8192]
    monkeypatch.setattr(layer, "load_record", lambda *_: replace(RECORD, rows=tuple(first_alone)))
    assert len(figures.picture("layer_timeline").axes) == 1, "the others were not traced"


def test_the_page_with_and_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("layer", "layer_fused", "layer_timeline", "layer_epilogues", "layer_d64")
    monkeypatch.setattr(layer, "load_record", lambda *_: None)
    assert {sections.SECTIONS[name]() for name in names} == {f"{frames.NOT_RECORDED}\n"}
    monkeypatch.setattr(layer, "load_record", lambda *_: RECORD)
    assert "(notebooks/figures/layer_breakdown.png)" in sections.layer_section()
    assert "(notebooks/figures/layer_timeline.png)" in sections.layer_timeline_section()


def test_the_record_is_whole() -> None:
    record = layer.load_record()
    assert record
    rows = layer.points(record)
    assert sorted(zip(rows.model, rows.B, strict=True)) == sorted(zip(POINTS.model, POINTS.B, strict=True))
    assert all("bit for bit" in row.checked and 0 < row.fraction < 1.1 for row in rows.itertuples())
