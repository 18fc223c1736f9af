"""Tables of what `gemm_w4a8` does, from the record of the suite: the README's first, and the notebook's."""

import math

from ptxlab.bench.record import Record, Row
from ptxlab.bench.shapes import ALL_TOKENS, CHOSEN_EXPERTS, EXPERTS, FEW_TOKENS, LLAMA, MIXTRAL, SWEPT, UNTUNED
from ptxlab.bench.stored import FACTOR
from report.headline import (
    PEERS,
    at,
    cell,
    chains,
    experts,
    fraction,
    mean_cell,
    named,
    otherwise,
    over,
    points,
    reordering,
    scaled,
    slower,
    slower_points,
    untuned_points,
)
from report.ladder import NOT_RECORDED, QSERVE, fraction_cell, markdown, mean, place_of, times_cell

_SHOWN_TOKENS = (16, 64, 256, 2048)
_MISSING = f"{NOT_RECORDED}\n"


def matrices_table(record: Record | None) -> str:
    """Ours against all peers with the floor, matrix by matrix: time, of the floor, over the fastest peer."""
    rows = points(record)
    if record is None or not rows:
        return _MISSING
    cells = {(named(row), row.sizes["M"]): cell(row, PEERS) for row in rows}
    lines = [
        [f"{layer}, {layer.N} x {layer.K}", *(cells.get((layer, M), "") for M in _SHOWN_TOKENS)] for layer in LLAMA
    ]
    lines.append(["**mean**", *(mean_cell(at(rows, M)) for M in _SHOWN_TOKENS)])
    return f"{markdown(['', *(f'M = {M}' for M in _SHOWN_TOKENS)], lines)}\n{_origin(record, rows)}\n"


def means_table(record: Record | None) -> str:
    """By tokens, and over all up to 256: of the floor, and how many times as fast as others."""
    rows = points(record)
    if not rows:
        return _MISSING
    columns = ["M", "of the floor", "in groups of 64", "over the best peer", "over QServe g128", "over cuBLAS FP8"]
    finer = points(record, group=64)
    few = f"{FEW_TOKENS[0]} to {FEW_TOKENS[-1]}"
    lines = []
    for label, tokens in [*((str(M), (M,)) for M in ALL_TOKENS), (few, FEW_TOKENS)]:
        part = at(rows, *tokens)
        near = [fraction(part), fraction(at(finer, *tokens))]
        speeds = [mean(over(part, peer)) for peer in ("", QSERVE, "cublas_fp8")]
        behind = f"{len(slower(part))} of {len(part)}"
        lines.append([label, *map(fraction_cell, near), *map(times_cell, speeds), behind])
    return f"{markdown([*columns, 'slower than a peer'], lines)}\n{slower_points(rows, PEERS, _where)}\n"


def orders_table(record: Record | None) -> str:
    """What activations cost in another order, or without their token sums; and what the quantiser's orders cost."""
    usual = {place_of(row): row.time_us for row in points(record)}
    ratios = {f"quantising: {order} over row_major": found for order, found in reordering(record).items()}
    ratios.pop("quantising: row_major over row_major", None)
    for order, rows in otherwise(record).items():
        ratios[f"GEMM: {order} over row_major"] = [row.time_us / usual[place_of(row)] for row in rows]
    lines = [[what, f"{mean(found):.3f}", f"{max(found):.3f}"] for what, found in ratios.items()]
    return markdown(["time", "mean", "at most"], lines) if lines else _MISSING


def chains_table(record: Record | None) -> str:
    """The GEMMs of a decoder layer in a row."""
    columns = ["model", "M", "µs", "launched plainly, µs", "over cuBLAS FP8's chain", "over the best peers alone"]
    lines = []
    for row, model, *speeds in chains(record):
        microseconds = [f"{row.time_us:.1f}", f"{row.more['plain_us']:.1f}"]
        lines.append([model, str(row.sizes["M"]), *microseconds, *map(times_cell, speeds)])
    return markdown(columns, lines) if lines else _MISSING


def experts_table(record: Record | None) -> str:
    """Mixtral's experts: the loop of singles, and the grouped kernel."""
    columns = ["matrix", "tokens", "experts with tokens", "loop, µs", "grouped, µs", "of the floor", "over the loop"]
    lines = []
    for routed in experts(record):
        loop, grouped = routed
        microseconds = [f"{loop.time_us:.1f}", f"{grouped.time_us:.1f}" if grouped else ""]
        with_tokens = f"{loop.more['launches']:.0f} of {EXPERTS}"
        figures = [with_tokens, *microseconds, f"{(grouped or loop).fraction:.2f}", times_cell(routed.gain)]
        lines.append([str(named(loop, MIXTRAL)), str(loop.sizes["tokens"]), *figures])
    note = f"Each token takes {CHOSEN_EXPERTS} of {EXPERTS} experts, at random.\n"
    return f"{markdown(columns, lines)}\n{note}" if lines else _MISSING


def untuned_table(record: Record | None) -> str:
    """Other models and odd numbers of tokens, model by model."""
    found = untuned_points(record)
    if not found:
        return _MISSING
    lines = []
    for model in dict.fromkeys(layer.model for layer in UNTUNED):
        rows = [row for row, layer in found if layer.model == model]
        speeds = over(rows, "cublas_fp8")
        lines.append(
            [model, f"{fraction(rows):.2f}", times_cell(mean(speeds)), times_cell(min(speeds, default=math.nan))]
        )
    unseen = [row for row, layer in found if (layer.N, layer.K) not in SWEPT]
    lines.append(["matrices in no sweep", f"{fraction(unseen):.2f}", times_cell(mean(over(unseen, "cublas_fp8"))), ""])
    everything = [row for row, _ in found]
    tuned = at(points(record), *FEW_TOKENS)
    lines.append(["all", f"{fraction(everything):.2f}", times_cell(mean(over(everything, "cublas_fp8"))), ""])
    lines.append(
        [f"tuned, M <= {FEW_TOKENS[-1]}", f"{fraction(tuned):.2f}", times_cell(mean(over(tuned, "cublas_fp8"))), ""]
    )
    return markdown(["", "of the floor", "over cuBLAS FP8, mean", "at least"], lines)


def _where(row: Row) -> str:
    return f"{named(row)}, M = {row.sizes['M']}"


def _origin(record: Record, rows: list[Row]) -> str:
    """What the figures are, where they come from, and how far the stored ones were scaled."""
    orders = " or ".join(dict.fromkeys(row.activations.replace("_", "-") for row in rows))
    factors = [row.more[FACTOR] for row in rows if FACTOR in row.more]
    sentences = [
        f"Groups of {rows[0].sizes['g']}, FP16 out, {orders} activations with their token sums from the quantiser.",
        f"Measured on one {record.device['name']}: `ptxlab bench gemm`, {record.date[:10]}, commit"
        f" {record.revision}; cuBLAS in the same run, QServe, QQQ and FP8 per row before that on an H200 too"
        " ([peers](notebooks/results/h200/peers/README.md)).",
    ]
    return " ".join(sentences + scaled(factors, "cuBLAS"))
