"""What KV4 attention set out to reach, and what the record says that it does."""

import math

from ptxlab.bench.attention.append import POINTS
from ptxlab.bench.kvshapes import HEADS
from ptxlab.bench.record import Record
from report.headline import over, slower
from report.kvpoints import (
    QSERVE,
    appends,
    batched,
    behind_append,
    beside_all,
    between,
    heads,
    over_bits,
    points,
    single,
    unequal,
)
from report.ladder import mean
from report.targets import Target, as_lines, as_table, least, most

_TIMES, _FRACTION = "{:.2f}x", "{:.2f}"
_BANDS = ((240.0, 0.95), (60.0, 0.90), (15.0, 0.75), (3.8, 0.55))  # floor in µs, from which so much of it is wanted
_LONG = 0.60  # of single long sequences, whatever their floor
_OVER_QSERVE = {"MHA": 2.5, "GQA": 9.0}
_DECODE, _PREFILL = (tokens for tokens, _ in POINTS)


def targets(record: Record | None) -> list[Target]:
    """All of them."""
    rows, compared = points(record), beside_all(points(record))
    long = [row.fraction for row in single(rows)]
    uneven = (pair.longer for pair in unequal(record))
    appended = (row.fraction for row in appends(record, _PREFILL))
    step_us = (row.time_us for row in appends(record, _DECODE))
    return [
        *_bands(rows),
        Target("of the floor, single sequences of 32k and more, every one", least(long), _FRACTION, least=_LONG),
        Target("points slower than a peer", len(slower(rows)) if compared else math.nan, "{:.0f}", most=0),
        Target("over the best 8-bit peer, batch >= 16, mean", mean(over_bits(batched(rows), 8)), _TIMES, least=2.0),
        *_over_qserve(record),
        Target("ragged beside even, time, all heads", most(uneven), _TIMES, most=1.15),
        Target("append, 4096 tokens: of a copy, every one", least(appended), _FRACTION, least=0.8),
        Target("append, a token for each of 64 sequences, every one", most(step_us), "{:.2f} µs", most=4.0),
    ]


def lines(record: Record | None) -> list[list[str]]:
    """Every target, its bound, what was measured, and whether it is met."""
    return as_lines(targets(record))


def table(record: Record | None) -> str:
    """The lines as Markdown."""
    return as_table(targets(record))


def _bands(rows: list) -> list[Target]:
    found, above = [], math.inf
    for floor, wanted in _BANDS:
        upper = "" if math.isinf(above) else f" to {above:g}"
        value = least(between(rows, floor, above))
        found.append(Target(f"of the floor where that is {floor:g}{upper} µs, every point", value, _FRACTION, wanted))
        above = floor
    return found


def _over_qserve(record: Record | None) -> list[Target]:
    """With the appended token, which QServe's time has in it."""
    rows = batched(behind_append(record))
    grouped = {heads_of: heads_of[0] > heads_of[1] for heads_of in HEADS}
    by_kind = {
        "MHA": [row for row in rows if not grouped[heads(row)]],
        "GQA": [row for row in rows if grouped[heads(row)]],
    }
    return [
        Target(
            f"append + attention over QServe KV4, {kind}, batch >= 16, mean",
            mean(over(by_kind[kind], QSERVE)),
            _TIMES,
            wanted,
        )
        for kind, wanted in _OVER_QSERVE.items()
    ]
