"""Tables of whole models, from rows that are made up and from no record."""

import math
from dataclasses import replace

import pytest

from benchmarks import decode as models
from benchmarks.layer.decoder import Alone
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Record, Row
from ptxlab.errors import FileError
from ptxlab.runtime.timing import Measured
from report import decode, figures, sections, targets
from report.frames import MISSING
from report.targets import Target
from tests.support import decode_record, fake_rows

SEVEN = models.MODELS[1]


def record() -> Record:
    work = [models.Work("gemm qkv", 9_200_000_000, 1)]
    timed_alone = Alone({"gemm qkv": 50.0, "attention": 10.0}, {"gemm qkv": "gemm", "attention": "attention"})
    measured = Measured(4000.0, 4000.0, 4000.0, 1900.0)
    peers = {"fp8_row/sdpa": 8000.0, "fp8_tensor/sdpa": 6000.0, "without": 5000.0}
    step = models.row_at(SEVEN, 16, measured, work, timed_alone, 80.0, Ceilings(4.6, 4.2), "made up", peers, {})
    figures = {"decode_us": 4e6, "fp8_row/sdpa tokens_per_second": 10_000.0, "fp8_row/xqa tokens_per_second": 8_000.0}
    sizes = models.sizes_of(SEVEN, 100, 80)
    whole: Row = fake_rows.row(1.0, 2.0, 1, kernel="x", measure="generate", sizes=sizes, limit="itself", more=figures)
    rows = (step, Row(**{**vars(whole), "rate": 12_000.0}))
    device = {"name": "NVIDIA H200", "card": "GPU-1"}
    return Record("decode/LLaMA-2-7B", device, {}, {}, rows, commit="0123456789ab", date="2026-11-23")


def test_tables() -> None:
    steps, whole = decode.steps_table([record()]), decode.generate_table([record()])
    row = "| LLaMA-2-7B | 16 | 4.00 | 4,000 | 0.50 | 40% | 8% | 0% | 2% |  | 1.50x |  |  | 1.25x |"
    assert row in steps and "each model alone on the same GPU (NVIDIA H200), at commit 0123456789." in steps
    assert "| LLaMA-2-7B | 80 | 100 | 12,000 | 12,775 |  | 1.20x |  |  | 6,721 | 194 |" in whole
    assert whole.endswith(", at commit 0123456789. Our prompts are attended by attention_kv4_prefill_sm90.\n")
    assert decode.steps_table([]) == decode.generate_table([]) == MISSING


def test_the_table_says_how_many_cards_and_commits_it_is_of() -> None:
    device = {"name": "NVIDIA H200", "card": "GPU-2"}
    second = replace(record(), suite="decode/LLaMA-3-8B", device=device, commit="abcdef012345")
    sentence = "alone on one of 2 GPUs (NVIDIA H200): LLaMA-2-7B at commit 0123456789; LLaMA-3-8B at commit abcdef0123."
    assert sentence in decode.steps_table([record(), second])


def test_first_tokens_stand_beside_those_of_new_prompts() -> None:
    step, rule = record().rows
    sizes = models.sizes_of(models.config_of(step.sizes), 1, 2000)
    first = replace(step, measure=models.FIRST_TOKEN, sizes=sizes, time_us=4000.0, peers={models.NEW: 50_000.0})
    ours = replace(rule, more={**rule.more, "prefill_us": 2e6})
    text = decode.prompts_table(replace(record(), rows=(first, ours)))
    assert "| LLaMA-2-7B | 50.0 | 4.0 | 100 | 51,200 | 12,000 |" in text and "commit 0123456789" in text
    assert decode.prompts_table(None) == MISSING


def test_weights_of_other_systems_stand_below_the_models_own() -> None:
    step, rule = record().rows
    measures = {"groups": models.GROUPS, "channel": models.CHANNEL, "w4a4": models.FOUR_BITS}
    rules = {"groups": models.GROUPS_RULE, "channel": models.CHANNEL_RULE}
    system_rows = [
        *(replace(step, kernel=name, measure=measure, time_us=2000.0) for name, measure in measures.items()),
        *(replace(rule, kernel=name, measure=measure) for name, measure in rules.items()),
    ]
    text = decode.systems_table(replace(record(), rows=tuple(system_rows)))
    assert "| W4A8 in groups of 128 |  | 2.00 ms, 4,000 |  |  |  |  | 12,000 |" in text
    assert "| W4A4 (Atom) |  | 2.00 ms, 4,000 |  |  |  |  |  |" in text and "| W4Ax (COMET) |  |  |" in text
    assert decode.systems_table(None) == MISSING


def test_the_table_says_what_attended_the_prompts() -> None:
    (_, row), eight = record().rows, models.sizes_of(models.MODELS[4], 100, 80)
    by_torch = replace(row, more={**row.more, models.BY_TORCH: 1.0})
    for rows, sentence in (
        ((by_torch,), "Our prompts are attended by PyTorch.\n"),
        (
            (by_torch, replace(row, sizes=eight)),
            "Our prompts are attended by PyTorch, those of LLaMA-3-8B by attention_kv4_prefill_sm90.\n",
        ),
    ):
        assert decode.generate_table([replace(record(), rows=rows)]).endswith(sentence)


WHOLE = [decode_record.record()]


def test_peaks_are_of_what_fits() -> None:
    """The room differs by mix: FP8 with PyTorch's attention over an FP16 cache has less than FlashInfer's over FP8."""
    rates = decode.rates(WHOLE, "LLaMA-2-7B", 80)
    room = {name: models.largest_mix_batch(SEVEN, 80, name) for name in decode_record.PEER_SLOWDOWNS}
    assert room["fp8_row/sdpa"] < room["fp8_tensor/xqa_fp8"] == max(rates["FP8"])
    assert max(rates["FP16"]) == room["fp16/sdpa"] and max(rates[decode.OURS]) == 256
    steps = {row.sizes["B"]: row for row in WHOLE[0].rows if row.kernel == models.FACE and row.sizes["V"] == 32000}
    (at,) = (row for row in WHOLE[0].rows if row.kernel == models.MIX and row.sizes == models.sizes_of(SEVEN, 64))
    head = decode.points(WHOLE, "decode").query("model == 'LLaMA-2-7B' and B == 64").head_us.iloc[0]
    assert steps and rates["FP8"][64] == pytest.approx(64e6 / (at.peers["fp8_tensor/xqa_fp8"] + head))
    best = decode.peaks(WHOLE).set_index(["model", "GB"])
    assert max(rates["FP8"].values()) == best.loc["LLaMA-2-7B", 80].FP8
    assert math.isnan(best.loc["LLaMA-2-70B", 80].FP16), "not one sequence fits"
    assert "| LLaMA-2-70B | 80 |" in decode.peaks_table(WHOLE) and "nan" not in decode.peaks_table(WHOLE)
    assert decode.peaks_table([]) == MISSING


def test_every_table_has_both_formats_of_humming() -> None:
    """Mixtral has neither."""
    both = "| over humming per channel | over humming g128 |"
    tables = decode.steps_table(WHOLE), decode.peaks_table(WHOLE), decode.generate_table(WHOLE)
    assert all(both in table.splitlines()[0] for table in tables)
    rows, best = decode.points(WHOLE, "decode"), decode.peaks(WHOLE)
    dense = rows[rows.model != "Mixtral-8x7B"]
    assert dense["over humming g128"].min() > dense["over humming per channel"].max() > 1
    for points in (rows, best):
        has_peer = [points[f"over {kind}"].notna() for kind in ("humming per channel", "humming g128")]
        assert all(points.model[rows_with_peer].nunique() == 7 for rows_with_peer in has_peer)


def test_heads_at_the_smallest_batch_and_the_largest() -> None:
    rows = [line.split(" | ") for line in decode.heads_table(WHOLE).splitlines() if line.startswith("| LLaMA-2-7B |")]
    times = [float(row.head_us) for row in decode.points(WHOLE, "decode").query("model == 'LLaMA-2-7B'").itertuples()]
    shown = [[f"{us:.0f}", f"{us / decode_record.INT8_HEAD:.0f}", "1.25x |"] for us in (times[0], times[-1])]
    assert rows == [["| LLaMA-2-7B", "32,000", B, *of] for B, of in zip(("1", "256"), shown, strict=True)]
    assert decode.heads_table([]) == MISSING


def test_our_recorded_rates_grow_with_the_batch() -> None:
    """So the largest batch is the best one, as the guide says."""
    for _, rows in decode.points(decode.load_records(), "decode").groupby("model"):
        assert rows.sort_values("B").rate.is_monotonic_increasing


def test_the_readme_has_a_row_a_model() -> None:
    rows = [line for line in decode.front_table(WHOLE).splitlines() if line.startswith("| LLaMA-2-7B |")]
    ours = decode.rates(WHOLE, "LLaMA-2-7B", 80)[decode.OURS]
    best = decode.peaks(WHOLE).query("model == 'LLaMA-2-7B' and GB == 80").iloc[0]
    rule = decode.points(WHOLE, "generate").query("model == 'LLaMA-2-7B' and L == 80").iloc[0]
    steps = f"{ours[1]:,.0f} | 0.80 | {ours[256]:,.0f} | 0.80"
    steps += f" | {best['over FP8']:.2f}x | {best['over humming per channel']:.2f}x"
    assert rows == [f"| LLaMA-2-7B | {steps} | {rule['rate']:,.0f} | {rule['rate over FP8']:.2f}x |"]
    cut = replace(WHOLE[0], rows=tuple(row for row in WHOLE[0].rows if row.measure != "generate"))
    assert decode.front_table([]) == decode.front_table([cut]) == MISSING


def test_what_limits_a_step_is_said_at_three_batches() -> None:
    """The largest is a model's own."""
    thirty = [line.split(" | ")[1] for line in decode.limits_table(WHOLE).splitlines() if "| LLaMA-30B |" in line]
    largest = models.largest_batch(models.MODELS[0], 141, 1536, chunk=2048)
    assert thirty == ["1", "64", str(largest)] and largest < 256
    lines = [line for line in decode.limits_table(WHOLE).splitlines() if line.startswith("| LLaMA-2-7B |")]
    assert [line.split(" | ")[1] for line in lines] == ["1", "64", "256"]
    (row,) = decode.points(WHOLE, "decode").query("model == 'LLaMA-2-7B' and B == 64").to_dict("records")
    share = (row["others_us"] + row["gaps_us"]) / row["time_us"]
    cells = f"{row['power_w']:.0f} | {row['sm_mhz']:,.0f} | {row['fraction']:.2f} | {row['fraction']:.2f}"
    parts = f"{row['others_us'] / 1e3:.2f} | {row['gaps_us'] / 1e3:.2f}"
    assert lines[1] == f"| LLaMA-2-7B | 64 | {cells} | {parts} | {share:.0%} |"
    assert decode.limits_table([]) == MISSING


def test_the_floor_at_a_lower_clock_is_higher_by_products_alone() -> None:
    """Products take twice as long at half the clock of TOPS, or as long as their bytes.

    All else takes as long as before.
    """
    slow = replace(WHOLE[0], rows=tuple(replace(row, sm_mhz=decode.TOPS_MHZ / 2) for row in WHOLE[0].rows))
    configs = {config.name: config for config in models.MODELS}
    for records, factor in ((WHOLE, 1), ([slow], 2)):
        rows = decode.points(records, "decode")
        for _, row in rows[rows.model.isin(("LLaMA-2-70B", "Mixtral-8x7B"))].iterrows():
            right = row["floor attention"] + row["floor head"]
            for work in decode_record._works(configs[row.model], row.B):
                if work.name.startswith("gemm "):
                    right += max(work.nbytes / 4.5e6, factor * work.operations / 1920e6)
            assert decode._floor_at_clock(row) == pytest.approx(right)


def target(start: str, records: list[Record]) -> Target:
    (match,) = [candidate for candidate in targets.whole_models(records) if candidate.name.startswith(start)]
    return match


@pytest.mark.full
def test_targets_are_met_or_missed_and_need_every_model_where_they_say_so() -> None:
    assert {candidate.verdict for candidate in targets.whole_models([])} == {""}
    assert targets.table(targets.whole_models([])) == MISSING
    assert target("of the floor, LLaMA-2-7B, batch 64", WHOLE).verdict == "met"
    assert target("of the floor, LLaMA-2-7B, batch 128", WHOLE).verdict == "missed"
    rule = decode.points(WHOLE, "generate").query("model == 'LLaMA-2-70B' and L == 80").iloc[0]
    over = target("LLaMA-2-70B, 80 GB", WHOLE)
    assert over.measured == pytest.approx(rule.B * 511 / rule.decode_us * 1e6 / 3695) and over.minimum == 1.25 * 1.43
    assert target("QServe's rule", WHOLE).measured == pytest.approx(2.0)
    assert target("steps over humming g128", WHOLE).measured == pytest.approx(1.6, abs=0.01)
    assert target("steps over humming per channel", WHOLE).measured == pytest.approx(1.4, abs=0.01)
    assert target("peak at equal memory over humming g128", WHOLE).verdict == "met"
    assert target("peak at equal memory over humming per channel", WHOLE).verdict == "missed"
    one_model = [decode_record.record(models.MODELS[1:2])]
    assert target("of the floor, LLaMA-2-7B, batch 64", one_model).verdict == "met"
    assert (
        target("LLaMA-2-7B, 80 GB", one_model).verdict == "met"
        and target("LLaMA-2-70B, 80 GB", one_model).verdict == ""
    )
    assert {
        target(start, one_model).verdict for start in ("QServe's rule", "peak at equal memory over humming g128")
    } == {""}


@pytest.mark.full
def test_a_picture_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = decode.model_figure(WHOLE, "LLaMA-2-70B")
    left, right = figure.axes
    rows = decode.points(WHOLE, "decode").query("model == 'LLaMA-2-70B'")
    heights = [sum(bars[i].get_height() for bars in left.containers) for i in range(len(rows))]
    parts = rows[["gemm_us", "attention_us", "others_us", "head_us"]].sum(axis=1) / 1e3
    assert heights == pytest.approx(parts.tolist()) and "0.80 to 0.80 of the floor" in left.get_title("left")
    rates = decode.rates(WHOLE, "LLaMA-2-70B", 80)
    lines = {str(line.get_label()): line for line in right.lines if ":" in str(line.get_label())}
    best = {kind: max(by_batch.values()) for kind, by_batch in rates.items()}
    assert {*lines} == {*(f"{kind}: {peak:,.0f}" for kind, peak in best.items()), "FP16: does not fit"}
    assert len(best) == 4 and len({str(line.get_color()) for line in lines.values()}) == len(lines)
    assert [*lines[f"ptxlab: {best['ptxlab']:,.0f}"].get_xdata()] == [*rates["ptxlab"]]
    for kind in ("FP8", "humming per channel"):
        assert f"{best['ptxlab'] / best[kind]:.2f}x {kind}'s" in right.get_title("left")
    monkeypatch.setattr(decode, "load_records", list)
    with pytest.raises(FileError, match="python -m benchmarks decode --only Yi-34B"):
        figures.picture("decode_yi_34b")
    assert sections.SECTIONS["decode"]() == MISSING
    monkeypatch.setattr(decode, "load_records", lambda: [decode_record.record(models.MODELS[6:7])])
    assert figures.picture("decode_yi_34b").axes
    assert "(notebooks/figures/decode_yi_34b.png)" in sections.SECTIONS["decode"]()


def test_the_papers_figures_are_of_the_models_that_are_measured() -> None:
    assert list(decode.LIQUIDSERVE) == [config.name for config in models.MODELS]
