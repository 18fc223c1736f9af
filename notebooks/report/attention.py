"""`attention_kv4` as recorded, beside its floor and everyone else: rows, tables and the figure."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ptxlab import bench, kernels
from ptxlab.bench.attention import EVEN, LADDER, MEASURE, PROGRAMMATIC, RAGGED, WITH_APPEND, append, merge
from ptxlab.bench.attention.append import POINTS
from ptxlab.bench.record import Record, Row
from ptxlab.bench.shapes import BATCHES, HEADS, LENGTHS, LONG
from ptxlab.bench.stored import FACTOR
from ptxlab.plot import BLUE, ORANGE, PALE, RED
from report import RESULTS
from report.gemm import cell, fraction, mean_cell, over, scaled, slower_points
from report.gemmplot import title
from report.ladder import NOT_RECORDED, fraction_cell, markdown, mean, times_cell

PEERS = {  # name -> how tables call it
    "sdpa_flash_f16": "PyTorch flash FP16",
    "sdpa_cudnn_f16": "PyTorch cuDNN FP16",
    "fi_cc_f16": "FlashInfer FP16",
    "fi_tc_f16": "FlashInfer tensor FP16",
    "fi_xqa_f16": "FlashInfer XQA FP16",
    "fi_cc_fp8": "FlashInfer FP8",
    "fi_tc_fp8": "FlashInfer tensor FP8",
    "fi_xqa_fp8": "FlashInfer XQA FP8",
    "qserve_kv8": "QServe KV8",
    "lserve_kv8": "LServe KV8",
    "lserve_kv8_mb": "LServe KV8 mb",
    "qserve_kv4": "QServe KV4",
    "lserve_kv4": "LServe KV4",
}
BITS = {  # of an element of the cache -> peers
    bits: tuple(name for name in PEERS if name.endswith(endings))
    for bits, endings in {16: ("f16",), 8: ("fp8", "kv8", "kv8_mb"), 4: ("kv4",)}.items()
}
QSERVE = "qserve_kv4"
A100_US = {  # QServe's steps at 64 x 1024, heads 32/32, on an A100; the baseline is TensorRT-LLM's KV8 (QServe §5.3)
    "attention_kv8": 420,
    "attention_kv4_naive": 480,
    "attention_kv4_bittrick": 440,
    "attention_kv4_simple": 390,
    "attention_kv4_fp16": 330,
    "attention_kv4_prefetch": 280,
}


def recorded(gpu: str = "h200") -> Record | None:
    """The record of the suite on that GPU, if there is one."""
    path = RESULTS / gpu / "attention.json"
    return bench.load(path) if path.is_file() else None


def points(record: Record | None) -> list[Row]:
    """Attention alone, by heads, length and batch; [] of no record."""
    return _of(record, MEASURE)


def behind_append(record: Record | None) -> list[Row]:
    """The same batches, right behind the kernel that appends a token to each sequence."""
    return _of(record, WITH_APPEND)


def steps(record: Record | None) -> list[Row]:
    """Every step of the ladder on QServe's batch, in the ladder's order."""
    return _of(record, LADDER)


def merges(record: Record | None) -> list[Row]:
    """Parts put together by a second kernel."""
    return _of(record, merge.MEASURE)


def appends(record: Record | None, tokens: int, scheme: str = "kv4") -> list[Row]:
    """`append_kv4` of so many tokens: 64 are a step of decoding, 4096 a prompt."""
    wanted = tokens, int(scheme[2]), int(scheme.endswith("channel"))
    return [
        row
        for row in _of(record, append.MEASURE)
        if (row.sizes["T"], row.sizes["bits"], row.sizes["channel"]) == wanted
    ]


class Unequal(NamedTuple):
    """A ragged batch, and an even one of as many bytes."""

    ragged: Row
    even: Row

    @property
    def longer(self) -> float:
        """The ragged one's time over the even one's."""
        return self.ragged.time_us / self.even.time_us


def unequal(record: Record | None) -> list[Unequal]:
    """By heads."""
    evens = {heads(row): row for row in _of(record, EVEN)}
    return [Unequal(row, evens[heads(row)]) for row in _of(record, RAGGED) if heads(row) in evens]


def heads(row: Row) -> tuple[int, int]:
    """Query and kv heads."""
    return row.sizes["Hq"], row.sizes["Hkv"]


def batched_and_single(rows: Iterable[Row]) -> list[Row]:
    """Those of the stored peers' batches."""
    return [row for row in rows if row.sizes["B"] in BATCHES and row.sizes["L"] in LENGTHS]


def batched(rows: Iterable[Row]) -> list[Row]:
    """Those of them with more than one sequence."""
    return [row for row in batched_and_single(rows) if row.sizes["B"] > 1]


def single(rows: Iterable[Row]) -> list[Row]:
    """Those of a single long sequence."""
    return [row for row in rows if row.sizes["B"] == 1 and row.sizes["L"] in LONG]


def beside_all(rows: Iterable[Row]) -> list[Row]:
    """Those where the stored peers are known too."""
    return [row for row in rows if FACTOR in row.more]


def programmatic(rows: Iterable[Row]) -> list[float]:
    """Of the floor, where a launch may begin before the one before it has ended; of rows that say so."""
    return [row.floor_us / row.more[PROGRAMMATIC] for row in rows if PROGRAMMATIC in row.more]


def over_bits(rows: Iterable[Row], bits: int) -> list[float]:
    """How many times as fast as the fastest peer with a cache of so many bits, where there is one."""
    found = ((row, [us for name, us in row.peers.items() if name in BITS[bits]]) for row in rows)
    return [min(times) / row.time_us for row, times in found if times]


def between(rows: Iterable[Row], least_us: float, most_us: float = math.inf) -> list[float]:
    """Fractions of the floor of those whose floor lies in least_us <= floor < most_us."""
    return [row.fraction for row in rows if least_us <= row.floor_us < most_us]


def _of(record: Record | None, measure: str) -> list[Row]:
    return [row for row in record.rows if row.measure == measure] if record else []


def batches(record: Record | None) -> list[Row]:
    """The points at the stored peers' batches."""
    return batched_and_single(points(record))


_MISSING = f"{NOT_RECORDED}\n"


def batches_table(record: Record | None) -> str:
    """Every batch beside all peers: time, of the floor, over the fastest peer."""
    rows = points(record)
    if record is None or not rows:
        return _MISSING
    cells = {(*heads(row), row.sizes["B"], row.sizes["L"]): cell(row, PEERS) for row in rows}
    lines = [
        [f"{_heads(*pair)}, {length} tokens", *(cells.get((*pair, batch, length), "") for batch in BATCHES)]
        for pair in HEADS
        for length in LENGTHS
    ]
    by_batch = ([row for row in rows if (row.sizes["B"], row.sizes["L"]) in _places(batch)] for batch in BATCHES)
    lines.append(["**mean**", *(mean_cell(part) for part in by_batch)])
    return f"{markdown(['', *(f'batch {batch}' for batch in BATCHES)], lines)}\n{_origin(record, rows)}\n"


def means_table(record: Record | None) -> str:
    """By heads, from batch 16 on: of the floor, over the peers; and with an appended token over QServe."""
    rows = batched(points(record))
    if not rows:
        return _MISSING
    lines = []
    for pair in HEADS:
        alone = [row for row in rows if heads(row) == pair]
        behind = [row for row in batched(behind_append(record)) if heads(row) == pair]
        speeds = [mean(over(alone)), mean(over_bits(alone, 8)), mean(over(behind, QSERVE))]
        lines.append(
            [
                _heads(*pair),
                f"{fraction(alone):.2f}",
                fraction_cell(mean(programmatic(alone))),
                *map(times_cell, speeds),
            ]
        )
    columns = [
        "batch 16 and more, means",
        "of the floor",
        "programmatic launches",
        "over the best peer",
        "over the best 8-bit peer",
    ]
    table = markdown([*columns, "append + attention over QServe KV4"], lines)
    return f"{table}\n{slower_points(points(record), PEERS, _where)}\n"


def single_table(record: Record | None) -> str:
    """Single long sequences."""
    rows = single(points(record))
    if not rows:
        return _MISSING
    cells = {(*heads(row), row.sizes["L"]): cell(row, PEERS) for row in rows}
    lines = [[_heads(*pair), *(cells.get((*pair, length), "") for length in LONG)] for pair in HEADS]
    return markdown(["one sequence", *(f"{length >> 10}k tokens" for length in LONG)], lines)


def steps_table(record: Record | None) -> str:
    """QServe's ablation on an A100 beside the same steps here, and what comes after them."""
    rows = steps(record)
    if not rows:
        return _MISSING
    naive = next((row.time_us for row in rows if row.kernel == "attention_kv4_naive"), math.nan)
    lines = []
    for row in rows:
        there = A100_US.get(row.kernel)
        lines.append(
            [
                f"`{row.kernel}`",
                kernels.find(row.kernel)[0].summary,
                f"{there / 1e3:.2f} ms" if there else "",
                times_cell(A100_US["attention_kv4_naive"] / there) if there else "",
                f"{row.time_us / 1e3:.3f} ms",
                times_cell(naive / row.time_us),
                f"{row.fraction:.2f}",
            ]
        )
    columns = ["kernel", "shows", "A100 (QServe)", "over naive", "here", "over naive", "of the floor"]
    note = "64 sequences of 1024 tokens, 32 heads; the A100's times are the paper's, its KV8 is TensorRT-LLM's."
    return f"{markdown(columns, lines, left=2)}\n{note}\n"


def others_table(record: Record | None) -> str:
    """Ragged batches, appended tokens, parts put together by a second kernel."""
    lines = []
    for pair in unequal(record):
        what = f"ragged, {_heads(*heads(pair.ragged))}: log-uniform up to 8192 tokens beside even lengths"
        lines.append([what, f"{pair.ragged.time_us:.1f} µs", f"{pair.even.time_us:.1f} µs", f"{pair.longer:.2f}"])
    for tokens, what in POINTS:
        for row in appends(record, tokens):
            rotated = "rotated" if row.sizes["R"] else "as it is"
            named = f"append, {what} of {tokens} tokens, {row.sizes['H']} heads, k {rotated}, beside a copy"
            lines.append(
                [named, f"{row.time_us:.2f} µs", f"{row.floor_us:.2f} µs", f"{row.time_us / row.floor_us:.2f}"]
            )
    for row in merges(record):
        what = (
            f"merged by a second kernel, {_heads(*heads(row))}, {row.sizes['B']} x {row.sizes['L']}, beside one launch"
        )
        fused = row.more["fused_us"]
        lines.append([what, f"{row.time_us:.1f} µs", f"{fused:.1f} µs", f"{row.time_us / fused:.2f}"])
    return markdown(["", "time", "beside", "ratio"], lines) if lines else _MISSING


def _heads(Hq: int, Hkv: int) -> str:
    return f"heads {Hq}/{Hkv}"


def _places(batch: int) -> list[tuple[int, int]]:
    return [(batch, length) for length in LENGTHS]


def _where(row: Row) -> str:
    return f"{_heads(*heads(row))}, {row.sizes['B']} x {row.sizes['L']}"


def _origin(record: Record, rows: list[Row]) -> str:
    """What the figures are, where they come from, and how far the stored ones were scaled."""
    factors = [row.more[FACTOR] for row in beside_all(rows)]
    sentences = [
        "Head dim 128, FP16, pages of 64 tokens in random order; every result checked against float64, within what the"
        f" kernel's roundings may add up to. Measured on one {record.device['name']}: `ptxlab bench attention`,"
        f" {record.date[:10]}, commit {record.revision}, read ceiling {record.ceilings['read_tbps']:.2f} TB/s.",
    ]
    if factors:
        sentences.append(
            "PyTorch in the same run; FlashInfer, QServe and LServe before that on an H200 too"
            " ([peers](notebooks/results/h200/peers/README.md))."
        )
    return " ".join(sentences + scaled(factors, "PyTorch"))


_STYLES: dict[int, dict[str, Any]] = {
    16: {"color": ORANGE, "marker": "s", "linestyle": "--"},
    8: {"color": BLUE, "marker": "o"},
    4: {"color": RED, "marker": "^", "linestyle": ":"},
}


def speedup_figure(rows: Sequence[Row]) -> Figure:
    """Time of the best peer with so many bits over ours, by batch; a panel for heads and length."""
    figure = Figure(figsize=(12, 6.6), layout="constrained")
    panels = figure.subplots(len(LENGTHS), len(HEADS), sharex=True, sharey=True)
    for (down, across), axes in np.ndenumerate(panels):
        pair, length = HEADS[across], LENGTHS[down]
        here = {row.sizes["B"]: row for row in rows if heads(row) == pair and row.sizes["L"] == length}
        _panel(axes, [here.get(batch) for batch in BATCHES])
        title(axes, f"{pair[0]} query heads, {pair[1]} KV heads, {length:,} tokens", size=10)
        if across == 0:
            axes.set_ylabel("time of the best peer / time")
        if down == len(LENGTHS) - 1:
            axes.set_xlabel("sequences in the batch")
    means = {bits: mean(over_bits(batched_and_single(rows), bits)) for bits in BITS}
    figure.suptitle(
        f"attention_kv4 is {means[16]:.1f}x as fast as the best FP16 kernel, {means[8]:.1f}x as the best 8-bit and "
        f"{means[4]:.1f}x as the best 4-bit one (geometric means)",
        x=0.01,
        ha="left",
        weight="bold",
        fontsize=11,
    )
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _panel(axes: Axes, rows: Sequence[Row | None]) -> None:
    for bits, names in BITS.items():
        speeds = [next(iter(over_bits([row], bits)), np.nan) if row else np.nan for row in rows]
        axes.plot(speeds, label=f"over the best of {len(names)} with {bits} bits", **_STYLES[bits])
    axes.axhline(1, color="black", linewidth=0.8, label="as fast as the peer")
    axes.set_xticks(range(len(rows)), [str(batch) for batch in BATCHES])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
