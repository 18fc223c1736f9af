"""What the GEMMs and attention of this project set out to reach, and what the records say that they do."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ptxlab.bench.attention.append import POINTS
from ptxlab.bench.gemm.headline import ORDER
from ptxlab.bench.record import TOLERANCE, Record, Row
from ptxlab.bench.shapes import ALL_TOKENS, FEW_TOKENS, HEADS, MOST_FEW
from report import attention as kv
from report.gemm import (
    at,
    chains,
    dequantising,
    eight_bit,
    experts,
    fraction,
    named,
    over,
    points,
    reordering,
    slower,
    untuned_points,
)
from report.ladder import NOT_RECORDED, QSERVE, markdown, mean

LEVEL = 1 - TOLERANCE  # two runs of the same kernel differ by so much
_MANY_TOKENS = tuple(M for M in ALL_TOKENS if M > MOST_FEW)
_TIMES, _FRACTION, _PERCENT = "{:.2f}x", "{:.2f}", "{:+.1%}"
_BANDS = ((240.0, 0.95), (60.0, 0.90), (15.0, 0.75), (3.8, 0.55))  # floor in µs, from which so much of it is wanted
_LONG = 0.60  # of single long sequences, whatever their floor
_OVER_QSERVE = {"MHA": 2.5, "GQA": 9.0}
_DECODE, _PREFILL = (tokens for tokens, _ in POINTS)


class Target(NamedTuple):
    """One of them. `value` is NaN where the record lacks what it is made of."""

    what: str
    value: float
    form: str
    least: float = -math.inf
    most: float = math.inf

    @property
    def wanted(self) -> str:
        """The bound in words."""
        if self.least > -math.inf:
            return f"at least {self.form.format(self.least)}"
        return f"at most {self.form.format(self.most)}"

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or empty where nothing was measured."""
        if math.isnan(self.value):
            return ""
        return "met" if self.least <= self.value <= self.most else "missed"


def gemm(record: Record | None) -> list[Target]:
    """Of the GEMMs, in groups of 128, with FP16 results."""
    rows = points(record)
    few = at(rows, *FEW_TOKENS)
    up_to_64 = [row for row in rows if row.sizes["M"] <= 64]
    largest = [row.fraction for row in up_to_64 if str(named(row)) == "70B gate+up"]
    smallest = [row.time_us for row in up_to_64 if str(named(row)) == "7B O"]
    means = f"M <= {MOST_FEW}, mean"
    return [
        Target(f"of the floor, {means}", fraction(few), _FRACTION, least=0.85),
        Target(f"points slower than the best peer, M <= {MOST_FEW}", _count(slower(few), few), "{:.0f}", most=0),
        Target("over QServe g128, M = 256, mean", mean(over(at(rows, 256), QSERVE)), _TIMES, least=3.3),
        Target("of the floor, 70B gate+up, M <= 64, every point", least(largest), _FRACTION, least=0.90),
        Target("7B O, M <= 64, every point", most(smallest), "{:.2f} µs", most=5.0),
        Target(
            f"over cuBLAS FP8, M >= {min(_MANY_TOKENS)}, each mean",
            least(mean(over(at(rows, M), "cublas_fp8")) for M in _MANY_TOKENS),
            _TIMES,
            least=LEVEL,
        ),
        Target(
            f"chain of a decoder layer over that of cuBLAS FP8, {means}",
            mean(link.over_fp8 for link in chains(record)),
            _TIMES,
            least=1.6,
        ),
        *_of_eight_bits(record),
        *_of_experts(record),
        *_of_untuned(record),
        Target(
            f"quantising into the headline's order ({ORDER.replace('_', '-')}) beside row-major, every size",
            most(ratio - 1 for ratio in reordering(record).get(ORDER, ())),
            _PERCENT,
            most=0.05,
        ),
    ]


def table(found: Sequence[Target]) -> str:
    """Every target, its bound, what was measured, and whether it is met; a sentence where nothing was measured."""
    if not any(target.verdict for target in found):
        return f"{NOT_RECORDED}\n"
    lines = [
        [t.what, t.wanted, "" if math.isnan(t.value) else t.form.format(t.value), t.verdict or "not measured"]
        for t in found
    ]
    return markdown(["target", "wanted", "measured", "verdict"], lines, left=2)


def least(values: Iterable[float]) -> float:
    """The least of them; NaN of nothing, and where one of them is not known."""
    known = list(values)
    return math.nan if not known or any(map(math.isnan, known)) else min(known)


def most(values: Iterable[float]) -> float:
    """The most of them, likewise."""
    return -least(-value for value in values)


def _of_eight_bits(record: Record | None) -> list[Target]:
    rows = eight_bit(record)
    fp8 = (mean(over(at(rows, M), "cublas_fp8")) for M in _MANY_TOKENS if M >= 2048)
    dequantised = mean(dequantising(record, *_MANY_TOKENS)) - 1
    return [
        Target("W8A8 over cuBLAS INT8, every point", least(over(rows, "cublas_int8")), _TIMES, least=1.0),
        Target("W8A8 over cuBLAS FP8, M >= 2048, each mean", least(fp8), _TIMES, least=LEVEL),
        Target(f"dequantising beside W8A8, M >= {min(_MANY_TOKENS)}, mean", dequantised, _PERCENT, most=0.05),
    ]


def _of_experts(record: Record | None) -> list[Target]:
    found = [routed for routed in experts(record) if routed.grouped]
    many = [routed.gain for routed in found if routed.loop.sizes["tokens"] >= 32]
    return [
        Target("grouped over the loop, every point", least(routed.gain for routed in found), _TIMES, least=1.0),
        Target("grouped over the loop, 32 tokens and more, mean", mean(many), _TIMES, least=1.4),
    ]


def _of_untuned(record: Record | None) -> list[Target]:
    rows = [row for row, _ in untuned_points(record)]
    tuned = fraction(at(points(record), *FEW_TOKENS))
    return [
        Target(
            "untuned shapes: time over floor beside the tuned ones', means", tuned / fraction(rows), "{:.2f}", most=1.15
        ),
        Target("untuned shapes over cuBLAS FP8, every point", least(over(rows, "cublas_fp8")), _TIMES, least=1.0),
    ]


def _count(found: Sequence[Row], among: Sequence[Row]) -> float:
    return len(found) if among else math.nan


def attention(record: Record | None) -> list[Target]:
    """Of KV4 attention."""
    rows, compared = kv.points(record), kv.beside_all(kv.points(record))
    long = [row.fraction for row in kv.single(rows)]
    uneven = (pair.longer for pair in kv.unequal(record))
    appended = (row.fraction for row in kv.appends(record, _PREFILL))
    step_us = (row.time_us for row in kv.appends(record, _DECODE))
    return [
        *_bands(rows),
        Target("of the floor, single sequences of 32k and more, every one", least(long), _FRACTION, least=_LONG),
        Target("points slower than a peer", len(slower(rows)) if compared else math.nan, "{:.0f}", most=0),
        Target(
            "over the best 8-bit peer, batch >= 16, mean", mean(kv.over_bits(kv.batched(rows), 8)), _TIMES, least=2.0
        ),
        *_over_qserve(record),
        Target("ragged beside even, time, all heads", most(uneven), _TIMES, most=1.15),
        Target("append, 4096 tokens: of a copy, every one", least(appended), _FRACTION, least=0.8),
        Target("append, a token for each of 64 sequences, every one", most(step_us), "{:.2f} µs", most=4.0),
    ]


def _bands(rows: list[Row]) -> list[Target]:
    found, above = [], math.inf
    for floor, wanted in _BANDS:
        upper = "" if math.isinf(above) else f" to {above:g}"
        value = least(kv.between(rows, floor, above))
        found.append(Target(f"of the floor where that is {floor:g}{upper} µs, every point", value, _FRACTION, wanted))
        above = floor
    return found


def _over_qserve(record: Record | None) -> list[Target]:
    """With the appended token, which QServe's time has in it."""
    rows = kv.batched(kv.behind_append(record))
    grouped = {heads_of: heads_of[0] > heads_of[1] for heads_of in HEADS}
    by_kind = {
        "MHA": [row for row in rows if not grouped[kv.heads(row)]],
        "GQA": [row for row in rows if grouped[kv.heads(row)]],
    }
    return [
        Target(
            f"append + attention over QServe KV4, {kind}, batch >= 16, mean",
            mean(over(by_kind[kind], kv.QSERVE)),
            _TIMES,
            wanted,
        )
        for kind, wanted in _OVER_QSERVE.items()
    ]
