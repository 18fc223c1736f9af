"""`gemm_w4a8` as recorded, beside its floor and everyone else: rows and tables."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ptxlab.bench.gemm import chain, grouped, quantiser, steps
from ptxlab.bench.gemm.headline import MEASURE, ORDER, UNTUNED_MEASURE
from ptxlab.bench.record import Record, Row
from ptxlab.bench.shapes import (
    ALL_TOKENS,
    CHAINS,
    CHOSEN_EXPERTS,
    EXPERTS,
    FEW_TOKENS,
    GROUP,
    LLAMA,
    MIXTRAL,
    SWEPT,
    UNTUNED,
    Layer,
)
from ptxlab.bench.stored import FACTOR, SAME
from report.ladder import NOT_RECORDED, QSERVE, fraction_cell, markdown, mean, place_of, times_cell

PEERS = {  # name -> how tables call it
    "cublas_fp8": "FP8",
    "cublas_int8": "INT8",
    "cublas_fp16": "FP16",
    "fp8_row": "FP8 per row",
    "qserve_w8a8": "QServe W8A8",
    "qserve_w4a8_chn": "QServe per channel",
    "qserve_w4a8_g128": "QServe g128",
    "qqq_w4a8_chn": "QQQ per channel",
    "qqq_w4a8_g128": "QQQ g128",
}


def points(record: Record | None, group: int = GROUP) -> list[Row]:
    """The headline: every point of LLaMA-2 with row-major activations, by matrix and tokens; [] of no record.

    Their token sums come from the quantiser. `otherwise` has the same points for activations that came otherwise.
    """
    return _in_order(row for row in of(record, MEASURE, group) if row.activations == ORDER)


def otherwise(record: Record | None, group: int = GROUP) -> dict[str, list[Row]]:
    """The points with activations in other orders, or without their token sums, by what `Row.activations` says."""
    rows = of(record, MEASURE, group)
    orders = dict.fromkeys(row.activations for row in rows if row.activations != ORDER)
    return {order: _in_order(row for row in rows if row.activations == order) for order in orders}


def of(record: Record | None, measure: str, group: int = GROUP) -> list[Row]:
    """The rows of one measure."""
    rows = record.rows if record else ()
    return [row for row in rows if row.measure == measure and row.sizes.get("g", group) == group]


def named(row: Row, layers: Sequence[Layer] = LLAMA) -> Layer:
    """The matrix of a row by name."""
    return next(layer for layer in layers if (row.sizes["N"], row.sizes["K"]) == (layer.N, layer.K))


def best_peer(row: Row) -> tuple[str, float]:
    """The fastest peer and how many times as fast as that ours is; NaN without peers."""
    if not row.peers:
        return "", math.nan
    name = min(row.peers, key=row.peers.__getitem__)
    return name, row.peers[name] / row.time_us


def over(rows: Iterable[Row], peer: str = "") -> list[float]:
    """How many times as fast as a peer, by default the fastest of each point, where its time is known."""
    if peer:
        return [row.peers[peer] / row.time_us for row in rows if peer in row.peers]
    return [best_peer(row)[1] for row in rows if row.peers]


def fraction(rows: Iterable[Row]) -> float:
    """Of the floor, geometric mean."""
    return mean(row.fraction for row in rows)


def at(rows: Iterable[Row], *tokens: int) -> list[Row]:
    """Those with so many tokens."""
    return [row for row in rows if row.sizes["M"] in tokens]


def slower(rows: Iterable[Row]) -> list[Row]:
    """The points at which some peer is faster."""
    return [row for row in rows if row.peers and best_peer(row)[1] < 1]


class Chain(NamedTuple):
    """A decoder layer's GEMMs in a row, beside the sum of the best peers' times for each alone (NaN: not known)."""

    row: Row
    model: str
    over_fp8: float
    over_best: float


def chains(record: Record | None) -> Iterator[Chain]:
    """Every model at every number of tokens."""
    single = {place_of(row): row for row in points(record)}
    models = {layers[0].K: layers for layers in CHAINS}
    for row in of(record, chain.MEASURE):
        layers, M = models[row.sizes["hidden"]], row.sizes["M"]
        alone = [single.get((layer.N, layer.K, M)) for layer in layers]
        best = sum(min(link.peers.values(), default=math.nan) if link else math.nan for link in alone)
        fp8 = row.peers.get("cublas_fp8", math.nan)
        yield Chain(row, layers[0].model, fp8 / row.time_us, best / row.time_us)


class Routed(NamedTuple):
    """Experts' GEMMs: the loop of singles, and the grouped kernel where it was measured."""

    loop: Row
    grouped: Row | None

    @property
    def gain(self) -> float:
        """How many times as fast the grouped kernel is."""
        return self.loop.time_us / self.grouped.time_us if self.grouped else math.nan


def experts(record: Record | None) -> list[Routed]:
    """Every matrix of Mixtral at every number of tokens."""
    found = {_routing(row): row for row in of(record, grouped.MEASURE)}
    return [Routed(row, found.get(_routing(row))) for row in of(record, grouped.LOOP)]


def _routing(row: Row) -> tuple[int, ...]:
    return tuple(row.sizes[name] for name in ("tokens", "N", "K"))


def untuned_points(record: Record | None) -> list[tuple[Row, Layer]]:
    """Matrices of other models at odd numbers of tokens, with their names."""
    return [(row, named(row, UNTUNED)) for row in of(record, UNTUNED_MEASURE)]


def eight_bit(record: Record | None) -> list[Row]:
    """The points of the kernel with 8-bit weights."""
    return [row for row in record.rows if row.measure == steps.W8A8] if record else []


def dequantising(record: Record | None, *tokens: int) -> list[float]:
    """Time with 4-bit over time with 8-bit weights, by the same skeleton, at so many tokens."""
    eight = {place_of(row): row.time_us for row in eight_bit(record)}
    four = at(points(record), *tokens)
    return [row.time_us / eight[place_of(row)] for row in four if place_of(row) in eight]


def reordering(record: Record | None) -> dict[str, list[float]]:
    """Time of the quantiser over that of the row-major one, by the order that it writes."""
    rows = of(record, quantiser.MEASURE)
    plain = {_shape(row): row.time_us for row in rows if row.activations == "row_major"}
    orders = dict.fromkeys(row.activations for row in rows)
    return {
        order: [row.time_us / plain[_shape(row)] for row in rows if row.activations == order and _shape(row) in plain]
        for order in orders
    }


def _shape(row: Row) -> tuple[int, int]:
    return row.sizes["M"], row.sizes["K"]


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows in the order of matrices and tokens."""
    found = {place_of(row): row for row in rows}
    places = [(layer.N, layer.K, M) for layer in LLAMA for M in ALL_TOKENS]
    return [found[place] for place in places if place in found]


# How tables say it


def cell(row: Row, names: Mapping[str, str]) -> str:
    """Time, of the floor, over the fastest peer by the name that tables give it."""
    name, speed = best_peer(row)
    beside = f", **{speed:.2f}x** {names[name]}" if name else ""
    return f"{row.time_us:.{1 if row.time_us < 100 else 0}f} µs, {row.fraction:.2f}{beside}"


def mean_cell(rows: Sequence[Row]) -> str:
    """Geometric means of floor and speed; nothing of no rows."""
    speed = mean(over(rows))
    return "" if not rows else f"{fraction(rows):.2f}" + ("" if math.isnan(speed) else f", **{speed:.2f}x**")


def slower_points(rows: Iterable[Row], names: Mapping[str, str], place: Callable[[Row], str]) -> str:
    """The points that some peer does faster, by name."""
    found = [(place(row), *best_peer(row)) for row in slower(rows)]
    listed = "; ".join(f"{where} ({speed:.2f}x {names[name]})" for where, name, speed in found)
    return f"Slower than a peer: {listed}." if found else "No peer is faster at any point."


def scaled(factors: Sequence[float], library: str, whose: str = "the others'") -> list[str]:
    """At how many points stored times were scaled, and by how much, in a sentence; none where they were not."""
    moved = [factor for factor in factors if factor != 1.0]
    if not moved:
        return []
    ratios = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(moved), max(moved))))
    return [
        f"At {len(moved)} of {len(factors)} points {library} differed by more than {SAME:.0%} between the two runs:"
        f" there {whose} times are scaled by its ratio, {ratios}."
    ]


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
