"""Tables of what KV4 attention does, from the record of the suite: the README's, and the notebook's."""

import math

from ptxlab import kernels
from ptxlab.bench.attention.append import POINTS
from ptxlab.bench.record import Record, Row
from ptxlab.bench.shapes import BATCHES, HEADS, LENGTHS, LONG
from ptxlab.bench.stored import FACTOR
from report.headline import cell, fraction, mean_cell, over, scaled, slower_points
from report.kvpoints import (
    A100_US,
    PEERS,
    QSERVE,
    appends,
    batched,
    behind_append,
    beside_all,
    heads,
    merges,
    over_bits,
    points,
    programmatic,
    single,
    steps,
    unequal,
)
from report.ladder import NOT_RECORDED, fraction_cell, markdown, mean, times_cell

_MISSING = f"{NOT_RECORDED}\n"


def batches_table(record: Record | None) -> str:
    """Every batch beside all peers: time, of the floor, over the fastest peer."""
    rows = points(record)
    if record is None or not rows:
        return _MISSING
    cells = {(*heads(row), row.sizes["B"], row.sizes["L"]): cell(row, PEERS) for row in rows}
    lines = [
        [f"{_of(*pair)}, {length} tokens", *(cells.get((*pair, batch, length), "") for batch in BATCHES)]
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
            [_of(*pair), f"{fraction(alone):.2f}", fraction_cell(mean(programmatic(alone))), *map(times_cell, speeds)]
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
    lines = [[_of(*pair), *(cells.get((*pair, length), "") for length in LONG)] for pair in HEADS]
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
        what = f"ragged, {_of(*heads(pair.ragged))}: log-uniform up to 8192 tokens beside even lengths"
        lines.append([what, f"{pair.ragged.time_us:.1f} µs", f"{pair.even.time_us:.1f} µs", f"{pair.longer:.2f}"])
    for tokens, what in POINTS:
        for row in appends(record, tokens):
            rotated = "rotated" if row.sizes["R"] else "as it is"
            named = f"append, {what} of {tokens} tokens, {row.sizes['H']} heads, k {rotated}, beside a copy"
            lines.append(
                [named, f"{row.time_us:.2f} µs", f"{row.floor_us:.2f} µs", f"{row.time_us / row.floor_us:.2f}"]
            )
    for row in merges(record):
        what = f"merged by a second kernel, {_of(*heads(row))}, {row.sizes['B']} x {row.sizes['L']}, beside one launch"
        fused = row.more["fused_us"]
        lines.append([what, f"{row.time_us:.1f} µs", f"{fused:.1f} µs", f"{row.time_us / fused:.2f}"])
    return markdown(["", "time", "beside", "ratio"], lines) if lines else _MISSING


def _of(Hq: int, Hkv: int) -> str:
    return f"heads {Hq}/{Hkv}"


def _places(batch: int) -> list[tuple[int, int]]:
    return [(batch, length) for length in LENGTHS]


def _where(row: Row) -> str:
    return f"{_of(*heads(row))}, {row.sizes['B']} x {row.sizes['L']}"


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
