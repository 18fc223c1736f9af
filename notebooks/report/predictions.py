"""The cost model beside the record: what it predicts of every kernel, how far off, and where W4A8 stops paying."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ptxlab import cost, kernels
from ptxlab.bench import counts
from ptxlab.bench.record import TOLERANCE, Record, Row
from ptxlab.bench.shapes import DISSECTED_TOKENS, Layer
from ptxlab.cost import Cost, Device, Scheme
from report import gemm, ladder
from report.ladder import place_of

W8A8 = "gemm_w8a8_sm90"
_ON_MMA_SYNC = {"gemm_w4a8_qoq_sm80", "gemm_w4a8_qoq_channel_sm80", "gemm_w4a8_small_sm90"}
# Not every iteration of its loop unpacks, so that the record has no instructions per weight: those of the word alone.
_BY_THE_WORD = {"gemm_w4a8_small_sm90": "dequant_lqq_unsigned"}


class Prediction(NamedTuple):
    """A measured GEMM, and what the model makes of it."""

    row: Row
    cost: Cost

    def error(self, us: float) -> float:
        """Of a predicted time: how much of the measured one it lacks (below 0) or has too much."""
        return us / self.row.time_us - 1


def alpha_at(kernel: str, M: int) -> float:
    """α of a GEMM: all instructions of its main loop per weight, of the dissected variant nearest to M tokens."""
    if kernel == W8A8:
        return 0.0
    if kernel in _BY_THE_WORD:
        return counts.alpha_of(_BY_THE_WORD[kernel])
    nearest = min(DISSECTED_TOKENS, key=lambda tokens: abs(math.log(M / tokens)))
    loop = counts.load()["main_loops"][kernels.find(kernel)[1][0].label][str(nearest)]
    return float(sum(loop["pipes"].values())) / float(loop["weights"])


def predict(row: Row, device: Device) -> Prediction:
    """The cost of a recorded GEMM: its packed bytes, its tile's tokens, its instructions per weight."""
    N, K, M = place_of(row)
    operands = "int8_sync" if row.kernel in _ON_MMA_SYNC else "int8"
    scheme = Scheme(row.kernel, 8 * row.more["packed_bytes"] / (N * K), operands)
    # Warps that share out a tile's tokens unpack the same weights.
    alpha = alpha_at(row.kernel, M) * row.variant.get("WM", 1)
    return Prediction(row, cost.gemm_cost(device, scheme, M, N, K, alpha=alpha, tile=row.variant["BM"]))


def predictions(record: Record | None) -> list[Prediction]:
    """Of every step of the ladder, of what `gemm_w4a8` launches, and of its sibling with 8-bit weights."""
    rows = (*ladder.rows_of(record), *gemm.points(record), *gemm.eight_bit(record))
    return [predict(row, measured_device(record)) for row in rows] if record else []


def measured_device(record: Record) -> Device:
    """The measured sheet of the record's card."""
    return cost.sheet(record.device["slug"]).device


def by_kernel(found: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    """Predictions by kernel, in the order in which the kernels come."""
    grouped: dict[str, list[Prediction]] = {}
    for prediction in found:
        grouped.setdefault(prediction.row.kernel, []).append(prediction)
    return grouped


def called(kernel: str) -> str:
    """How tables and figures call a kernel: a step of the ladder by its short name."""
    return ladder.short(kernel) if kernel in {spec.name for spec in kernels.gemm.STEPS} else kernel


def mean_error(found: Sequence[Prediction], *, overlapped: bool = False) -> float:
    """Mean of the absolute relative errors, in turn or overlapped; NaN of nothing."""
    errors = [abs(p.error(p.cost.overlapped_us if overlapped else p.cost.in_turn_us)) for p in found]
    return sum(errors) / len(errors) if errors else math.nan


def mean_ratio(found: Iterable[Prediction], M: int) -> float:
    """Predicted in turn over measured, at M tokens: geometric mean; NaN where there are no such points."""
    return ladder.mean(p.cost.in_turn_us / p.row.time_us for p in found if p.row.sizes["M"] == M)


class Duel(NamedTuple):
    """Time of W4A8 over that of 8-bit weights on one matrix, by tokens: measured, and predicted either way."""

    layer: Layer
    measured: dict[int, float]
    in_turn: dict[int, float]
    overlapped: dict[int, float]


def duels(record: Record | None, other: str) -> list[Duel]:
    """`gemm_w4a8` against `other`: `gemm_w8a8_sm90`, or a peer with FP8 weights by name. [] where not measured."""
    if record is None:
        return []
    device = measured_device(record)
    eight = {place_of(row): row for row in gemm.eight_bit(record)}
    found: dict[Layer, Duel] = {}
    for row in gemm.points(record):
        N, K, M = place_of(row)
        if other == W8A8 and (N, K, M) in eight:
            their_us, theirs = eight[N, K, M].time_us, predict(eight[N, K, M], device).cost
        elif other in row.peers:
            their_us, theirs = row.peers[other], cost.gemm_cost(device, cost.SCHEMES["FP8"], M, N, K)
        else:
            continue
        ours = predict(row, device).cost
        layer = gemm.named(row)
        duel = found.setdefault(layer, Duel(layer, {}, {}, {}))
        duel.measured[M] = row.time_us / their_us
        duel.in_turn[M] = ours.in_turn_us / theirs.in_turn_us
        duel.overlapped[M] = ours.overlapped_us / theirs.overlapped_us
    return list(found.values())


def crossover(device: Device, alpha: float) -> float:
    """Tokens at which W4A8 that dequantises and multiplies in turn is as slow as W8A8 that still waits for its weights.

    α/C + 2M/T = 1/B: the model's answer within one tile. Overlapped, W4A8 is never slower.
    """
    w8a8 = cost.SCHEMES["W8A8"]
    return cost.tensor_rate(device, w8a8) / 2 * (1 / cost.weight_rate(device, w8a8) - alpha / device.issue_tips)


def slower_between(ratios: Mapping[int, float]) -> list[tuple[float, float]]:
    """Intervals of tokens in which a ratio of times is above 1, interpolated between known ones on logarithmic axes.

    One that lasts to the largest number of tokens ends at infinity.
    """
    tokens = sorted(ratios)
    crossings = []  # where the ratio passes 1, upwards and downwards in turn
    above = False
    for before, M in zip([tokens[0], *tokens], tokens, strict=False):
        if (ratios[M] > 1) != above:
            crossings.append(_crossing(before, M, ratios))
            above = not above
    ends = [*crossings, math.inf] if above else crossings
    return list(zip(ends[::2], ends[1::2], strict=True))


def _crossing(before: int, after: int, ratios: Mapping[int, float]) -> float:
    low, high = math.log(ratios[before]), math.log(ratios[after])
    share = 0.0 if before == after else low / (low - high)
    return before * math.pow(after / before, share)


def said(ratios: Mapping[int, float]) -> str:
    """Where W4A8 is slower, in words and two digits."""
    parts = []
    for low, high in slower_between(ratios):
        ends = list(dict.fromkeys(_rounded(end) for end in (low, high) if end < math.inf))
        parts.append(f"from {ends[0]}" if high == math.inf else " to ".join(ends))
    return ", ".join(parts) or f"not up to {max(ratios):,}"


def _rounded(tokens: float) -> str:
    return f"{float(f'{tokens:.2g}'):,.0f}"


def kernels_table(record: Record | None) -> str:
    """How far the model is off, kernel by kernel."""
    found = by_kernel(predictions(record))
    if record is None or not found:
        return f"{ladder.NOT_RECORDED}\n"
    few, many = DISSECTED_TOKENS
    columns = ["kernel", f"α, M = {few} / {many}", "mean error in turn", "overlapped"]
    columns += [f"in turn over measured, M = {M}" for M in DISSECTED_TOKENS]
    lines = []
    for name, mine in found.items():
        alphas = " / ".join(dict.fromkeys(f"{alpha_at(name, M):.2g}" for M in DISSECTED_TOKENS))
        errors = [f"{mean_error(mine, overlapped=overlapped):.0%}" for overlapped in (False, True)]
        ratios = [mean_ratio(mine, M) for M in DISSECTED_TOKENS]
        lines.append([f"`{called(name)}`", alphas, *errors, *map(ladder.fraction_cell, ratios)])
    every = [prediction for mine in found.values() for prediction in mine]
    in_turn = sum(p.row.time_us < p.cost.in_turn_us for p in every)
    overlapped = sum(p.row.time_us < p.cost.overlapped_us for p in every)
    note = (
        f"{len(every)} points of `ptxlab bench gemm`, {record.date[:10]}, commit {record.revision}, of which"
        f" {in_turn} took less than in turn and {overlapped} less than overlapped. α: instructions of a thread per"
        " weight in the main loop's machine code (W8A8 unpacks nothing; of `gemm_w4a8_small_sm90` those of its"
        " dequantiser alone)."
    )
    return f"{ladder.markdown(columns, lines)}\n{note}\n"


def crossover_table(record: Record | None) -> str:
    """Numbers of tokens at which W4A8 is slower than 8-bit weights, matrix by matrix."""
    ours, fp8 = (duels(record, other) for other in (W8A8, "cublas_fp8"))
    if record is None or not ours or not fp8:
        return f"{ladder.NOT_RECORDED}\n"
    columns = ["slower at M"]
    columns += [f"{how}, {what}" for how in ("than our W8A8", "than cuBLAS FP8") for what in ("measured", "predicted")]
    against_fp8 = {duel.layer: duel for duel in fp8}
    lines = []
    for duel in ours:
        pair = (duel, against_fp8[duel.layer])
        cells = [said(ratios) for one in pair for ratios in (one.measured, one.in_turn)]
        lines.append([f"{duel.layer}, {duel.layer.N} x {duel.layer.K}", *cells])
    alpha = alpha_at("gemm_w4a8_sm90", DISSECTED_TOKENS[-1])
    tokens = crossover(measured_device(record), alpha)
    note = (
        "Measured: interpolated between the numbers of tokens of the record; two runs of one kernel differ by up to"
        f" {TOLERANCE:.0%}. Predicted: the same of the model in turn, which within one tile says {tokens:.0f} tokens"
        " for W8A8; overlapped it says never. FP8 is predicted at the best rate that cuBLAS reached on any size."
    )
    return f"{ladder.markdown(columns, lines, left=5)}\n{note}\n"
