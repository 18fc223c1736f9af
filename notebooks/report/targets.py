"""What the GEMMs of this project set out to reach, and what the record says that they do."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ptxlab.bench.gemm.headline import ORDER
from ptxlab.bench.record import TOLERANCE, Record
from ptxlab.bench.shapes import ALL_TOKENS, FEW_TOKENS, MOST_FEW
from report.headline import (
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

COLUMNS = ("target", "wanted", "measured>", "verdict>")
LEVEL = 1 - TOLERANCE  # two runs of the same kernel differ by so much
_MANY_TOKENS = tuple(M for M in ALL_TOKENS if M > MOST_FEW)
_TIMES, _FRACTION, _PERCENT = "{:.2f}x", "{:.2f}", "{:+.1%}"


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


def targets(record: Record | None) -> list[Target]:
    """All of them, in groups of 128, with FP16 results."""
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


def lines(record: Record | None) -> list[list[str]]:
    """Every target, its bound, what was measured, and whether it is met."""
    return as_lines(targets(record))


def table(record: Record | None) -> str:
    """The lines as Markdown."""
    return as_table(targets(record))


def as_lines(found: Sequence[Target]) -> list[list[str]]:
    """Targets as lines of `COLUMNS`."""
    return [
        [t.what, t.wanted, "" if math.isnan(t.value) else t.form.format(t.value), t.verdict or "not measured"]
        for t in found
    ]


def as_table(found: Sequence[Target]) -> str:
    """The lines as Markdown; a sentence where nothing was measured."""
    if not any(target.verdict for target in found):
        return f"{NOT_RECORDED}\n"
    return markdown([name.rstrip(">") for name in COLUMNS], as_lines(found), left=2)


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


def _count(found: list, among: list) -> float:
    return len(found) if among else math.nan
