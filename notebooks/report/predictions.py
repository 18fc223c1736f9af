"""The cost model beside the record: what it predicts of every kernel, how far off, and where W4A8 stops paying."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ptxlab import registry
from ptxlab.bench.record import TOLERANCE, Record
from ptxlab.lowbit import cost, kernels
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.bench.shapes import DISSECTED_TOKENS, LLAMA
from ptxlab.lowbit.cost import Cost, Device, Scheme
from report import gemm, ladder
from report.frames import GEMM_PEERS, MISSING, markdown, mean

W8A8 = "gemm_w8a8_sm90"
_ON_MMA_SYNC = {"gemm_w4a8_qoq_sm80", "gemm_w4a8_qoq_channel_sm80", "gemm_w4a8_small_sm90"}
# Not every iteration of its loop unpacks, so that the record has no instructions per weight: those of the word alone.
_BY_THE_WORD = {"gemm_w4a8_small_sm90": "dequant_lqq_unsigned"}


def alpha_at(kernel: str, M: int) -> float:
    """Return α of a GEMM: all main-loop instructions per weight, of the dissected variant nearest to M tokens."""
    if kernel == W8A8:
        return 0.0
    if kernel in _BY_THE_WORD:
        return counts.alpha_of(_BY_THE_WORD[kernel])
    nearest = min(DISSECTED_TOKENS, key=lambda tokens: abs(math.log(M / tokens)))
    loop = counts.load()["main_loops"][registry.find(kernel)[1][0].label][str(nearest)]
    return float(sum(loop["pipes"].values())) / float(loop["weights"])


def predict(row: Any, device: Device) -> Cost:
    """Predict the cost of a recorded GEMM from its packed bytes, its tile's tokens and its instructions per weight."""
    operands = "int8_sync" if row.kernel in _ON_MMA_SYNC else "int8"
    scheme = Scheme(row.kernel, 8 * row.packed_bytes / (row.N * row.K), operands)
    # Warps that share out a tile's tokens unpack the same weights.
    alpha = alpha_at(row.kernel, row.M) * row.variant.get("WM", 1)
    return cost.gemm_cost(device, scheme, row.M, row.N, row.K, alpha=alpha, tile=row.variant["BM"])


def add_predictions(rows: pd.DataFrame, device: Device) -> pd.DataFrame:
    """Add the model's predictions to measured GEMMs: columns `in_turn_us` and `overlapped_us`."""
    costs = [predict(row, device) for row in rows.itertuples()]
    return rows.assign(in_turn_us=[c.in_turn_us for c in costs], overlapped_us=[c.overlapped_us for c in costs])


def predictions(record: Record | None) -> pd.DataFrame:
    """Predict every step of the ladder, every launch of `gemm_w4a8`, and its sibling with 8-bit weights.

    `in_turn` is the predicted time over the measured one, `error` and `overlapped_error` how far that is from 1.
    """
    parts = [
        kernel_points
        for kernel_points in (ladder.points(record), gemm.points(record), gemm.eight_bit(record))
        if len(kernel_points)
    ]
    if record is None or not parts:
        return gemm.points(None)
    rows = add_predictions(
        pd.concat([kernel_points.dropna(axis=1, how="all") for kernel_points in parts]), measured_device(record)
    )
    serial_ratio, overlapped_ratio = rows.in_turn_us / rows.time_us, rows.overlapped_us / rows.time_us
    return rows.assign(in_turn=serial_ratio, error=abs(serial_ratio - 1), overlapped_error=abs(overlapped_ratio - 1))


def measured_device(record: Record) -> Device:
    """Return the measured sheet of the record's card."""
    return cost.sheet(record.device["slug"])


def display_name(kernel: str) -> str:
    """Return the name that tables and figures use for a kernel: short for a step of the ladder."""
    return ladder.short_name(kernel) if kernel in {spec.name for spec in kernels.gemm.STEPS} else kernel


def ratios_to_8bit(record: Record | None, peer: str) -> pd.DataFrame:
    """Return the time of `gemm_w4a8` over that of 8-bit weights, by matrix and tokens, measured and predicted.

    `peer` is `gemm_w8a8_sm90`, or a peer with FP8 weights by name; no rows where that was not measured.
    """
    rows = gemm.points(record)
    if record is None or (peer != W8A8 and peer not in GEMM_PEERS):
        return rows.head(0)
    device = measured_device(record)
    rows, times = add_predictions(rows, device), ["time_us", "in_turn_us", "overlapped_us"]
    if peer == W8A8:
        eight_bit_rows = add_predictions(gemm.eight_bit(record), device)[[*gemm.PLACE, *times]]
        rows = rows.merge(eight_bit_rows, on=gemm.PLACE, suffixes=("", "_8"))
    else:
        rows = rows[rows[f"over {peer}"].notna()]
        fp8 = [cost.gemm_cost(device, cost.SCHEMES["FP8"], row.M, row.N, row.K) for row in rows.itertuples()]
        rows = rows.assign(
            time_us_8=rows.time_us * rows[f"over {peer}"],
            in_turn_us_8=[prediction.in_turn_us for prediction in fp8],
            overlapped_us_8=[prediction.overlapped_us for prediction in fp8],
        )
    names = ("measured", "in_turn", "overlapped")
    return rows.assign(**{ratio_name: rows[us] / rows[f"{us}_8"] for ratio_name, us in zip(names, times, strict=True)})


def crossover(device: Device, alpha: float) -> float:
    """Compute the M at which W4A8 without overlap is as slow as W8A8 that still waits for its weights.

    W4A8 dequantises and multiplies in turn here. α/C + 2M/T = 1/B: the model's answer within one tile. Overlapped, W4A8
    is never slower.
    """
    w8a8 = cost.SCHEMES["W8A8"]
    return cost.tensor_rate(device, w8a8) / 2 * (1 / cost.weight_rate(device, w8a8) - alpha / device.issue_tips)


def slower_between(ratios: Mapping[int, float]) -> list[tuple[float, float]]:
    """Find the intervals of tokens in which a ratio of times is above 1.

    Points between the measured ones are interpolated on logarithmic axes. An interval that lasts to the largest number
    of tokens ends at infinity.
    """
    tokens = sorted(ratios)
    log = np.log([ratios[M] for M in tokens])
    crossings = np.flatnonzero(np.diff(log > 0, prepend=False))  # where it passes 1, upwards and downwards in turn
    ends = [
        tokens[i - 1] * (tokens[i] / tokens[i - 1]) ** (log[i - 1] / (log[i - 1] - log[i])) if i else tokens[0]
        for i in crossings
    ]
    ends += [math.inf] * (len(ends) % 2)
    return list(zip(ends[::2], ends[1::2], strict=True))


def describe_slower_ranges(ratios: Mapping[int, float]) -> str:
    """Say at which tokens W4A8 is slower, with numbers of two digits."""
    parts = []
    for low, high in slower_between(ratios):
        ends = list(dict.fromkeys(_round_tokens(end) for end in (low, high) if end < math.inf))
        parts.append(f"from {ends[0]}" if high == math.inf else " to ".join(ends))
    return ", ".join(parts) or f"not up to {max(ratios):,}"


def _round_tokens(tokens: float) -> str:
    return f"{float(f'{tokens:.2g}'):,.0f}"


def kernels_table(record: Record | None) -> str:
    """Build the table of the model's errors, kernel by kernel."""
    prediction_rows = predictions(record)
    if record is None or prediction_rows.empty:
        return MISSING
    few_tokens, many_tokens = DISSECTED_TOKENS
    lines = []
    for kernel, kernel_points in prediction_rows.groupby("kernel", sort=False):
        alphas = dict.fromkeys(f"{alpha_at(kernel, M):.2g}" for M in DISSECTED_TOKENS)
        line: dict[str, object] = {
            "kernel": f"`{display_name(kernel)}`",
            f"α, M = {few_tokens} / {many_tokens}": " / ".join(alphas),
        }
        line |= {"mean error in turn": kernel_points.error.mean(), "overlapped": kernel_points.overlapped_error.mean()}
        line |= {
            f"in turn over measured, M = {M}": mean(gemm.at_tokens(kernel_points, M).in_turn) for M in DISSECTED_TOKENS
        }
        lines.append(line)
    table = pd.DataFrame(lines)
    formats = dict(zip(table.columns[2:], ("{:.0%}", "{:.0%}", "{:.2f}", "{:.2f}"), strict=True))
    in_turn, overlapped = (sum(prediction_rows.time_us < prediction_rows[us]) for us in ("in_turn_us", "overlapped_us"))
    note = (
        f"{len(prediction_rows)} points of `python -m benchmarks gemm`, {record.date[:10]}, commit {record.revision}, "
        "of which"
        f" {in_turn} took less than in turn and {overlapped} less than overlapped. α: instructions of a thread per"
        " weight in the main loop's machine code (W8A8 unpacks nothing; of `gemm_w4a8_small_sm90` those of its"
        " dequantiser alone)."
    )
    return f"{markdown(table, formats)}\n{note}\n"


def crossover_table(record: Record | None) -> str:
    """Build the table of token ranges in which W4A8 is slower than 8-bit weights, matrix by matrix."""
    ratios_by_peer = {"our W8A8": ratios_to_8bit(record, W8A8), "cuBLAS FP8": ratios_to_8bit(record, "cublas_fp8")}
    if record is None or any(peer_ratios.empty for peer_ratios in ratios_by_peer.values()):
        return MISSING
    table = pd.DataFrame(
        {"W4A8 is slower, M": [f"{layer}, {layer.N} x {layer.K}" for layer in LLAMA]}, index=map(str, LLAMA)
    )
    for peer_name, peer_ratios in ratios_by_peer.items():
        for source, column in (("measured", "measured"), ("predicted", "in_turn")):
            table[f"than {peer_name}, {source}"] = (
                peer_ratios.set_index("M")
                .groupby("layer")[column]
                .agg(lambda ratios: describe_slower_ranges(ratios.to_dict()))
            )
    alpha = alpha_at("gemm_w4a8_sm90", DISSECTED_TOKENS[-1])
    tokens = crossover(measured_device(record), alpha)
    note = (
        "Measured: interpolated between the numbers of tokens of the record; two runs of one kernel differ by up to"
        f" {TOLERANCE:.0%}. Predicted: by the model in turn. For a single tile this model says that W4A8 is slower than"
        f" W8A8 from {tokens:.0f} tokens on; the overlapped model says never. FP8 is predicted at the best rate that"
        " cuBLAS reached on any size."
    )
    return f"{markdown(table, left=5)}\n{note}\n"
