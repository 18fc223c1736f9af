"""What the GEMMs and attention of this project set out to reach, and what the records say that they do."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pandas as pd

from benchmarks.decode import BUDGETS, GENERATE, MEASURE, MODELS
from ptxlab.bench.record import TOLERANCE, Record
from ptxlab.lowbit.bench.attention.append import POINTS
from ptxlab.lowbit.bench.gemm.headline import ORDER
from ptxlab.lowbit.bench.shapes import ALL_TOKENS, FEW_TOKENS, MOST_FEW
from ptxlab.lowbit.kernels.quantize import atom
from report import attention as kv
from report import decode, layer, w4a4
from report.frames import MISSING, fraction, markdown, mean, over, slower
from report.gemm import at_tokens, chains, dequantising, eight_bit, experts, points, reordering, untuned_points
from report.ladder import QSERVE

LEVEL = 1 - TOLERANCE  # two runs of the same kernel differ by so much
_MANY_TOKENS = tuple(M for M in ALL_TOKENS if M > MOST_FEW)
_TIMES, _FRACTION, _PERCENT = "{:.2f}x", "{:.2f}", "{:+.1%}"
_BANDS = ((240.0, 0.95), (60.0, 0.90), (15.0, 0.75), (3.8, 0.55))  # floor in µs, from which so much of it is wanted
_LONG = 0.60  # of single long sequences, whatever their floor
_OVER_QSERVE = {"MHA": 2.5, "GQA": 9.0}
_DECODE, _PREFILL = (tokens for tokens, _ in POINTS)


class Target(NamedTuple):
    """A target and the measured value. `measured` is NaN where the record lacks its inputs."""

    name: str
    measured: float
    form: str
    minimum: float = -math.inf
    maximum: float = math.inf

    @property
    def bound(self) -> str:
        """The bound in words."""
        if self.minimum > -math.inf:
            return f"at least {self.form.format(self.minimum)}"
        return f"at most {self.form.format(self.maximum)}"

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or empty where nothing was measured."""
        if math.isnan(self.measured):
            return ""
        return "met" if self.minimum <= self.measured <= self.maximum else "missed"


def gemm(record: Record | None) -> list[Target]:
    """List the targets of the GEMMs, in groups of 128, with FP16 results."""
    rows, reordered = points(record), reordering(record)
    few_token_rows = at_tokens(rows, *FEW_TOKENS)
    up_to_64 = rows[rows.M <= 64]
    largest = up_to_64[up_to_64.layer == "70B gate+up"].fraction
    smallest = up_to_64[up_to_64.layer == "7B O"].time_us
    means = f"M <= {MOST_FEW}, mean"
    return [
        Target(f"of the floor, {means}", fraction(few_token_rows), _FRACTION, minimum=0.85),
        Target(
            f"points slower than the best peer, M <= {MOST_FEW}", _count_slower(few_token_rows), "{:.0f}", maximum=0
        ),
        Target("over QServe g128, M = 256, mean", mean(over(at_tokens(rows, 256), QSERVE)), _TIMES, minimum=3.3),
        Target("of the floor, 70B gate+up, M <= 64, every point", min_or_nan(largest), _FRACTION, minimum=0.90),
        Target("7B O, M <= 64, every point", max_or_nan(smallest), "{:.2f} µs", maximum=5.0),
        Target(
            f"over cuBLAS FP8, M >= {min(_MANY_TOKENS)}, each mean",
            min_or_nan(mean(over(at_tokens(rows, M), "cublas_fp8")) for M in _MANY_TOKENS),
            _TIMES,
            minimum=LEVEL,
        ),
        Target(
            f"chain of a decoder layer over that of cuBLAS FP8, {means}",
            mean(chains(record)["over cublas_fp8"]),
            _TIMES,
            minimum=1.6,
        ),
        *_of_eight_bits(record),
        *_of_experts(record),
        *_of_untuned(record),
        Target(
            f"quantising into the headline's order ({ORDER.replace('_', '-')}) beside row-major, every size",
            max_or_nan(reordered[reordered.activations == ORDER].ratio - 1),
            _PERCENT,
            maximum=0.05,
        ),
    ]


def four_bits(record: Record | None) -> list[Target]:
    """List the targets of W4A4 and W4Ax on Hopper, which has no INT4 tensor cores.

    They are for groups of 128, LLaMA-2's matrices and M from 64 to 1024.
    """
    rows, targets = w4a4.points(record), []
    for scheme in w4a4.FOUR_BITS:
        scheme_rows = rows[rows.scheme == scheme]
        slowest, int8 = max_or_nan(scheme_rows["of W4A8"]), scheme_rows["over cublas_int8"]
        targets += [
            Target(f"{scheme}: of W4A8's time, every point", slowest, _TIMES, maximum=w4a4.MOST_OVER_W4A8),
            Target(f"{scheme}: the same, stretch", slowest, _TIMES, maximum=w4a4.STRETCH),
            Target(
                f"{scheme}: points slower than cuBLAS INT8",
                float((int8 < 1).sum()) if len(int8) and int8.notna().all() else math.nan,
                "{:.0f}",
                maximum=0,
            ),
        ]
    return targets


_LAYERS = {  # model -> batch -> of the floor
    "LLaMA-2-7B": {1: 0.56, 4: 0.58, 16: 0.62, 64: 0.76, 128: 0.80, 256: 0.87},
    "LLaMA-2-70B": {1: 0.82, 16: 0.80, 64: 0.73, 128: 0.67, 256: 0.77},
}
_OTHERS = {1: 0.14, 16: 0.10, 64: 0.05, 128: 0.05, 256: 0.05}  # batch -> most of their share
_COPIES = ((64e6, math.inf, 0.88), (20e6, 64e6, 0.80), (8e6, 20e6, 0.60))  # bytes, of the copy ceiling


def layers(record: Record | None) -> list[Target]:
    """List the targets of decoder layers beside public mixes, and of the kernels between their GEMMs."""
    rows, fused_rows = layer.points(record), layer.fused_points(record)
    fused_rows = fused_rows[~fused_rows.kernel.isin([spec.name for spec in atom.SPECS])]  # no part of these layers
    model_rows = rows[rows.model.isin(list(_LAYERS))]
    few_sequences = model_rows[model_rows.B <= 64]
    speedup_over_humming = rows[["over humming g128", "over humming per channel"]].min(axis=1, skipna=False)
    targets = [
        Target(
            f"of the floor, {model}, batch {B}",
            _only_or_nan(model_rows[(model_rows.model == model) & (model_rows.B == B)].fraction),
            "{:.2f}",
            bound,
        )
        for model, batches in _LAYERS.items()
        for B, bound in batches.items()
    ]
    targets += [
        Target(
            f"others, 7B and 70B, batch {B}",
            max_or_nan(model_rows[model_rows.B == B].others_share),
            "{:.0%}",
            maximum=share,
        )
        for B, share in _OTHERS.items()
    ]
    targets += [
        Target("over the FP16 mix, mean", mean(rows["over FP16"]), _TIMES, minimum=2.8),
        Target(
            "over the FP8 mix, batch 1 to 64, 7B and 70B, mean", mean(few_sequences["over FP8"]), _TIMES, minimum=1.8
        ),
        Target(
            "over the FP8 mix, batch 1 to 64, 7B and 70B, each",
            min_or_nan(few_sequences["over FP8"]),
            _TIMES,
            minimum=1.65,
        ),
        Target("over the FP8 mix, 7B and 70B, every point", min_or_nan(model_rows["over FP8"]), _TIMES, minimum=1.3),
        Target("over humming's mix, mean", mean(speedup_over_humming), _TIMES, minimum=1.3),
        Target(
            "points slower than humming's mix",
            float((speedup_over_humming < 1).sum()) if speedup_over_humming.notna().any() else math.nan,
            "{:.0f}",
            maximum=0,
        ),
    ]
    for min_bytes, max_bytes, bound in _COPIES:
        range_rows = (
            fused_rows[(fused_rows.bytes >= min_bytes) & (fused_rows.bytes < max_bytes)]
            if len(fused_rows)
            else fused_rows
        )
        size_range = (
            f"from {min_bytes / 1e6:.0f} MB"
            if max_bytes == math.inf
            else f"of {min_bytes / 1e6:.0f} to {max_bytes / 1e6:.0f} MB"
        )
        targets.append(
            Target(
                f"fused kernels {size_range}, of a copy, each", min_or_nan(range_rows.fraction), "{:.2f}", minimum=bound
            )
        )
    low_token_rows = fused_rows[(fused_rows.M <= 64) & (fused_rows.kernel != "rope_append_kv4")]
    narrow_rows = low_token_rows[low_token_rows.width <= 8192]
    wide_rows = low_token_rows[low_token_rows.width == 28672]
    return [
        *targets,
        Target("fused kernels, M <= 64, widths to 8192", max_or_nan(narrow_rows.time_us), "{:.2f} µs", maximum=2.3),
        Target("fused kernels, M <= 64, width 28672", max_or_nan(wide_rows.time_us), "{:.2f} µs", maximum=3.5),
        Target("the same in the chain, widths to 8192", max_or_nan(narrow_rows.chain_us), "{:.2f} µs", maximum=1.5),
    ]


_WHOLE = {  # model -> batch -> of the floor, head included
    "LLaMA-2-7B": {1: 0.58, 16: 0.63, 64: 0.77, 128: 0.82, 256: 0.88},
    "LLaMA-2-70B": {1: 0.82, 16: 0.80, 64: 0.73, 128: 0.67, 256: 0.77},
}
_BANDWIDTHS = 1.43  # of an H200 over an H800's


def whole_models(records: list[Record]) -> list[Target]:
    """List the targets of whole models: of the floor, over LiquidGEMM's Table 1, and over public mixes."""
    steps, rule, peak_rows = decode.points(records, MEASURE), decode.points(records, GENERATE), decode.peaks(records)
    targets = []
    for model, batches in _WHOLE.items():
        for B, bound in batches.items():
            fractions = steps[(steps.model == model) & (steps.B == B)].fraction if len(steps) else pd.Series()
            targets.append(Target(f"of the floor, {model}, batch {B}", _only_or_nan(fractions), _FRACTION, bound))
    small_budget_rows = rule[min(BUDGETS) == rule.L] if len(rule) else rule
    for model, (paper, _) in decode.LIQUIDSERVE.items():
        speed_over_paper = (
            _only_or_nan(small_budget_rows[small_budget_rows.model == model]["decode rate"]) / paper
            if len(small_budget_rows)
            else math.nan
        )
        target_name = f"{model}, {min(BUDGETS)} GB, without prefill, over LiquidServe's figure of an H800"
        targets.append(Target(target_name, speed_over_paper, _TIMES, minimum=1.25 * _BANDWIDTHS))
    are_all_measured = len(peak_rows) == len(BUDGETS) * len(MODELS)

    def of_all(column: str, rows: pd.DataFrame, together: Callable[[pd.Series], float]) -> float:
        """Return one figure of a column, or NaN unless every model has its row for every budget."""
        return (
            together(rows[column].dropna())
            if are_all_measured and len(rows) and rows[column].notna().any()
            else math.nan
        )

    rows = "QServe's rule, both budgets, all models"
    targets += [
        Target(f"{rows}: over the FP8 mix, mean", of_all("rate over FP8", rule, mean), _TIMES, minimum=1.4),
        Target("peak at equal memory over the FP8 mix, mean", of_all("over FP8", peak_rows, mean), _TIMES, minimum=1.8),
        Target(
            "peak at equal memory over the FP8 mix, each",
            of_all("over FP8", peak_rows, min_or_nan),
            _TIMES,
            minimum=1.3,
        ),
        Target("steps over the FP8 mix, every batch", of_all("over FP8", steps, min_or_nan), _TIMES, minimum=1.0),
    ]
    for column in ("over humming g128", "over humming per channel"):
        targets += [
            Target(f"peak at equal memory {column}, mean", of_all(column, peak_rows, mean), _TIMES, minimum=1.5),
            Target(f"steps {column}, every batch", of_all(column, steps, min_or_nan), _TIMES, minimum=1.0),
        ]
    return targets


def _only_or_nan(values: pd.Series) -> float:
    """Return the value of a series of one; NaN if there are none or several."""
    return float(values.iloc[0]) if len(values) == 1 else math.nan


def table(targets: Sequence[Target]) -> str:
    """Build the table of targets: bound, measured value, and whether it is met.

    If nothing was measured, a sentence says so.
    """
    if not any(target.verdict for target in targets):
        return MISSING
    lines = [
        (t.name, t.bound, t.form.format(t.measured) if t.verdict else "", t.verdict or "not measured") for t in targets
    ]
    return markdown(pd.DataFrame(lines, columns=["target", "wanted", "measured", "verdict"]), left=2)


def min_or_nan(values: Iterable[float]) -> float:
    """Return the smallest value; NaN if there are no values or one of them is NaN."""
    numbers = list(values)
    return math.nan if not numbers or any(map(math.isnan, numbers)) else min(numbers)


def max_or_nan(values: Iterable[float]) -> float:
    """Return the largest value; NaN if there are no values or one of them is NaN."""
    return -min_or_nan(-number for number in values)


def _count_slower(rows: pd.DataFrame) -> float:
    """Count the points at which some peer is faster; NaN if there are no points."""
    return len(slower(rows)) if len(rows) else math.nan


def _of_eight_bits(record: Record | None) -> list[Target]:
    """List the targets of W8A8, and of the time of W4A8 beside it."""
    rows = eight_bit(record)
    fp8 = (mean(over(at_tokens(rows, M), "cublas_fp8")) for M in _MANY_TOKENS if M >= 2048)
    dequantised = mean(dequantising(record, *_MANY_TOKENS)) - 1
    return [
        Target("W8A8 over cuBLAS INT8, every point", min_or_nan(over(rows, "cublas_int8")), _TIMES, minimum=1.0),
        Target("W8A8 over cuBLAS FP8, M >= 2048, each mean", min_or_nan(fp8), _TIMES, minimum=LEVEL),
        Target(f"dequantising beside W8A8, M >= {min(_MANY_TOKENS)}, mean", dequantised, _PERCENT, maximum=0.05),
    ]


def _of_experts(record: Record | None) -> list[Target]:
    """List the targets of a grouped GEMM beside a loop of single ones."""
    rows = experts(record).dropna(subset="gain")
    many_tokens = rows[rows.tokens >= 32].gain
    return [
        Target("grouped over the loop, every point", min_or_nan(rows.gain), _TIMES, minimum=1.0),
        Target("grouped over the loop, 32 tokens and more, mean", mean(many_tokens), _TIMES, minimum=1.4),
    ]


def _of_untuned(record: Record | None) -> list[Target]:
    """List the targets of matrices that nothing was tuned to."""
    rows = untuned_points(record)
    tuned_fraction = fraction(at_tokens(points(record), *FEW_TOKENS))
    return [
        Target(
            "untuned shapes: time over floor beside the tuned ones', means",
            tuned_fraction / fraction(rows),
            "{:.2f}",
            maximum=1.15,
        ),
        Target(
            "untuned shapes over cuBLAS FP8, every point", min_or_nan(over(rows, "cublas_fp8")), _TIMES, minimum=1.0
        ),
    ]


def attention(record: Record | None) -> list[Target]:
    """List the targets of KV4 attention."""
    rows, compared_rows = kv.points(record), kv.beside_all(kv.points(record))
    return [
        *_of_bands(rows),
        Target(
            "of the floor, single sequences of 32k and more, every one",
            min_or_nan(kv.single(rows).fraction),
            _FRACTION,
            minimum=_LONG,
        ),
        Target(
            "points slower than a peer",
            _count_slower(rows if len(compared_rows) else compared_rows),
            "{:.0f}",
            maximum=0,
        ),
        Target(
            "over the best 8-bit peer, batch >= 16, mean", mean(kv.batch_points(rows)["over 8"]), _TIMES, minimum=2.0
        ),
        *_over_qserve(record),
        Target("ragged beside even, time, all heads", max_or_nan(kv.unequal(record).longer), _TIMES, maximum=1.15),
        Target(
            "append, 4096 tokens: of a copy, every one",
            min_or_nan(kv.appends(record, _PREFILL).fraction),
            _FRACTION,
            minimum=0.8,
        ),
        Target(
            "append, a token for each of 64 sequences, every one",
            max_or_nan(kv.appends(record, _DECODE).time_us),
            "{:.2f} µs",
            maximum=4.0,
        ),
    ]


def _of_bands(rows: pd.DataFrame) -> list[Target]:
    """List the targets of attention's fraction of the floor, one for each range of floors in `_BANDS`."""
    targets, upper_floor = [], math.inf
    for floor, bound in _BANDS:
        upper_bound_text = "" if math.isinf(upper_floor) else f" to {upper_floor:g}"
        measured = min_or_nan(kv.between(rows, floor, upper_floor))
        targets.append(
            Target(
                f"of the floor where that is {floor:g}{upper_bound_text} µs, every point", measured, _FRACTION, bound
            )
        )
        upper_floor = floor
    return targets


def _over_qserve(record: Record | None) -> list[Target]:
    """List the targets against QServe with the appended token, which QServe's time includes."""
    rows = kv.batch_points(kv.behind_append(record))
    rows_by_kind = {"MHA": rows[rows.Hq == rows.Hkv], "GQA": rows[rows.Hq > rows.Hkv]}
    return [
        Target(
            f"append + attention over QServe KV4, {kind}, batch >= 16, mean",
            mean(over(rows_by_kind[kind], kv.QSERVE)),
            _TIMES,
            bound,
        )
        for kind, bound in _OVER_QSERVE.items()
    ]
