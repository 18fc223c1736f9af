"""Tables of the cost model: devices, schemes on one of them, and what the record says of the predictions."""

from dataclasses import asdict, dataclass
from typing import Any

from ptxlab import cost
from ptxlab.bench.record import TOLERANCE, Record
from ptxlab.bench.shapes import DISSECTED_TOKENS
from ptxlab.cost import Cost, Device, Scheme
from ptxlab.ladder import NOT_RECORDED, fraction_cell, markdown
from ptxlab.predictions import (
    W8A8,
    alpha_at,
    alpha_of,
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

# A name that ends in > is of a column of numbers.
DEVICE_COLUMNS = ("GPU", "TB/s>", "INT8>", "issue>", "M* FP16>", "M* W8A8>", "M* W4A8>", "α*>")
SCHEME_COLUMNS = ("scheme", "α>", "load>", "dequant>", "MMA>", "in turn>", "overlap>", "M*>", "α*>")
LEGEND = (
    "M*: tokens from which multiplying takes longer than loading. α: instructions of a thread per weight; α*: as many"
    " hide behind W4A8's loads, or behind its MMA where that is longer."
)
RATES = "INT8 and issue: 10^12 operations and instructions of threads per second."
TIMES = "In turn: max(load, dequant + MMA), LiquidGEMM's Eq. 6; overlap: the longest of the three."


@dataclass(frozen=True)
class Entry:
    """One scheme at one shape."""

    scheme: Scheme
    alpha: float
    cost: Cost
    transition: float
    largest_alpha: float

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready values."""
        times = {"in_turn_us": self.cost.in_turn_us, "overlapped_us": self.cost.overlapped_us, "limit": self.cost.limit}
        return {**asdict(self), "cost": {**asdict(self.cost), **times}}


def entries(device: Device, M: int, N: int, K: int) -> list[Entry]:
    """Every scheme that the device multiplies."""
    found = []
    for scheme in (scheme for scheme in cost.SCHEMES.values() if scheme.operands in device.tops):
        alpha = alpha_of(scheme.dequantiser)
        found.append(
            Entry(
                scheme,
                alpha,
                cost.gemm_cost(device, scheme, M, N, K, alpha=alpha),
                cost.transition(device, scheme),
                cost.largest_alpha(device, scheme, min(M, cost.MOST_TOKENS)),
            )
        )
    return found


def scheme_lines(found: list[Entry]) -> list[list[str]]:
    """Entries as lines of `SCHEME_COLUMNS`."""
    lines = []
    for e in found:
        times = (e.cost.load_us, e.cost.dequantise_us, e.cost.multiply_us, e.cost.in_turn_us, e.cost.overlapped_us)
        hidden = f"{e.largest_alpha:.1f}" if e.scheme.dequantiser else ""
        numbers = [f"{e.alpha:.3g}", *map(_us, times), f"{e.transition:.0f}", hidden]
        lines.append([e.scheme.name, *numbers])
    return lines


def device_json(device: Device) -> dict[str, Any]:
    """A device with what the model makes of it, JSON-ready."""
    schemes = {name: cost.transition(device, s) for name, s in cost.SCHEMES.items() if s.operands in device.tops}
    hidden = cost.largest_alpha(device, cost.SCHEMES["W4A8 LQQ"])
    return {**asdict(device), "issue_tips": device.issue_tips, "transitions": schemes, "largest_alpha": hidden}


def device_lines() -> list[list[str]]:
    """All devices as lines of `DEVICE_COLUMNS`."""
    fp16, w8a8, w4a8 = (cost.SCHEMES[name] for name in ("FP16", "W8A8", "W4A8 LQQ"))
    return [
        [
            device.name,
            f"{device.memory_tbps:.3g}",
            f"{device.tops['int8']:,.0f}",
            f"{device.issue_tips:.1f}",
            *(f"{cost.transition(device, scheme):.0f}" for scheme in (fp16, w8a8, w4a8)),
            f"{cost.largest_alpha(device, w4a8):.1f}",
        ]
        for device in cost.DEVICES.values()
    ]


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


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
