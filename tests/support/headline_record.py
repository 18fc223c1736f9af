"""What `gemm_w4a8` did, as nobody measured it: for the tables, figures and targets made of records of the suite."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ptxlab.bench.record import Record, Row
from ptxlab.lowbit.bench.gemm import grouped, headline
from ptxlab.lowbit.bench.shapes import (
    ALL_TOKENS,
    CHAINS,
    FEW_TOKENS,
    LLAMA,
    MIXTRAL,
    ROUTED_TOKENS,
    UNTUNED,
    UNTUNED_TOKENS,
    Layer,
)
from tests.support import fake_rows, ladder_record

SLOWDOWN = 1.125  # time over the floor, of all that is ours


def row(measure: str, sizes: dict[str, int], nbytes: int, operations: int, slowdown: float, **fields: Any) -> Row:
    fields = {"kernel": "gemm_w4a8_sm90", "measure": measure, "sizes": sizes, **fields}
    return fake_rows.gemm(nbytes, operations, slowdown, **fields)


def layer_row(measure: str, layer: Layer, M: int, slowdown: float = SLOWDOWN, **fields: Any) -> Row:
    sizes = {"M": M, "N": layer.N, "K": layer.K, "g": 128}
    fields = {"variant": {"BM": min(max(M, 8), 256)}, **fields}
    return row(measure, sizes, layer.N * layer.K * 33 // 64, 2 * M * layer.N * layer.K, slowdown, **fields)


def point_rows(layer: Layer, M: int) -> Iterator[Row]:
    """Make up a point's rows: row-major activations with sums from the quantiser, fragments, and no sums.

    Fragments are a little faster, no sums slower.
    """
    usual = layer_row("headline", layer, M, face="gemm_w4a8")
    yield usual
    for order, factor in (("fragment", 0.95), (headline.WITHOUT_SUMS, 1.1)):
        time = factor * usual.time_us
        yield replace(usual, activations=order, time_us=time, fraction=usual.floor_us / time)


def rows(with_grouped: bool = True) -> Iterator[Row]:
    for layer in LLAMA:
        for M in ALL_TOKENS:
            yield from point_rows(layer, M)
            w8a8 = layer_row("w8a8", layer, M, kernel="gemm_w8a8_sm90")
            yield replace(w8a8, time_us=w8a8.time_us / 1.04)
    for layers in CHAINS:
        for M in FEW_TOKENS:
            weights = sum(layer.N * layer.K for layer in layers)
            sizes = {"hidden": layers[0].K, "M": M, "g": 128}
            link = row("chain", sizes, weights * 33 // 64, 2 * M * weights, 1.05, face="gemm_w4a8")
            link = replace(link, more={**link.more, "plain_us": 1.1 * link.time_us})
            yield from (link, replace(link, sizes={"hidden": layers[0].K, "M": M}))  # in groups and per channel
    for layer in MIXTRAL:
        for tokens in ROUTED_TOKENS:
            yield from routed_rows(layer, tokens, with_grouped)
    for layer in UNTUNED:
        for M in UNTUNED_TOKENS:
            fields = {"peers": {"cublas_fp8": 10_000.0}, "face": "gemm_w4a8"}
            yield layer_row("untuned", layer, M, SLOWDOWN * 1.1, **fields)
    for order, factor in (("row_major", 1.0), ("fragment", 1.02), ("tiles", 1.04)):
        for M in ALL_TOKENS:
            yield row("quantise", {"M": M, "K": 4096}, 3 * M * 4096, 1, 2 * factor, activations=order, peers={})


def routed_rows(layer: Layer, tokens: int, with_grouped: bool) -> Iterator[Row]:
    offsets = grouped.route_at_random(tokens)
    active = int((offsets[1:] > offsets[:-1]).sum())
    sizes = {"tokens": tokens, "N": layer.N, "K": layer.K, "g": 128}
    work = active * layer.N * layer.K * 33 // 64, 2 * int(offsets[-1]) * layer.N * layer.K
    loop = row("experts", sizes, *work, 1.8, face="gemm_w4a8", peers={})
    yield replace(loop, more={**loop.more, "launches": active})
    if with_grouped:
        yield row("grouped", sizes, *work, 1.2, kernel="gemm_w4a8_grouped_sm90", peers={})


def record(with_grouped: bool = True) -> Record:
    """Make up a record: the ladder's made-up rows, and these behind them."""
    ladder = ladder_record.record()
    return replace(ladder, rows=(*ladder.rows, *rows(with_grouped)))
