"""What the record says of the cost model's predictions."""

from ptxlab.bench.record import TOLERANCE, Record
from ptxlab.bench.shapes import DISSECTED_TOKENS
from report.ladder import NOT_RECORDED, fraction_cell, markdown
from report.predictions import (
    W8A8,
    alpha_at,
    by_kernel,
    called,
    crossover,
    duels,
    mean_error,
    mean_ratio,
    measured_device,
    predictions,
    said,
)


def kernels_table(record: Record | None) -> str:
    """How far the model is off, kernel by kernel."""
    found = by_kernel(predictions(record))
    if record is None or not found:
        return f"{NOT_RECORDED}\n"
    few, many = DISSECTED_TOKENS
    columns = ["kernel", f"α, M = {few} / {many}", "mean error in turn", "overlapped"]
    columns += [f"in turn over measured, M = {M}" for M in DISSECTED_TOKENS]
    lines = []
    for name, mine in found.items():
        alphas = " / ".join(dict.fromkeys(f"{alpha_at(name, M):.2g}" for M in DISSECTED_TOKENS))
        errors = [f"{mean_error(mine, overlapped=overlapped):.0%}" for overlapped in (False, True)]
        ratios = [mean_ratio(mine, M) for M in DISSECTED_TOKENS]
        lines.append([f"`{called(name)}`", alphas, *errors, *map(fraction_cell, ratios)])
    every = [prediction for mine in found.values() for prediction in mine]
    in_turn = sum(p.row.time_us < p.cost.in_turn_us for p in every)
    overlapped = sum(p.row.time_us < p.cost.overlapped_us for p in every)
    note = (
        f"{len(every)} points of `ptxlab bench gemm`, {record.date[:10]}, commit {record.revision}, of which"
        f" {in_turn} took less than in turn and {overlapped} less than overlapped. α: instructions of a thread per"
        " weight in the main loop's machine code (W8A8 unpacks nothing; of `gemm_w4a8_small_sm90` those of its"
        " dequantiser alone)."
    )
    return f"{markdown(columns, lines)}\n{note}\n"


def crossover_table(record: Record | None) -> str:
    """Numbers of tokens at which W4A8 is slower than 8-bit weights, matrix by matrix."""
    ours, fp8 = (duels(record, other) for other in (W8A8, "cublas_fp8"))
    if record is None or not ours or not fp8:
        return f"{NOT_RECORDED}\n"
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
    return f"{markdown(columns, lines, left=5)}\n{note}\n"
