"""The tables of `ptxlab cost`: the limits of every GPU, and the cost of one GEMM in every scheme."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import cost
from ptxlab.lowbit.cost import Cost, Device, LoopCounts, Scheme
from ptxlab.lowbit.cost.published import CountsOf, Predicted

# A name that ends in > is of a column of numbers.
DEVICE_COLUMNS = ("GPU", "TB/s>", "INT8>", "issue>", "M* FP16>", "M* W8A8>", "M* W4A8>", "α*>")
SCHEME_COLUMNS = ("scheme", "α>", "load>", "dequant>", "scale>", "MMA>", "in turn>", "overlap>", "M*>", "α*>")
PUBLISHED_COLUMNS = ("paper", "GPU", "scheme", "M>", "figure", "reported>", "in turn>", "overlap>", "error>")
SCHEDULE_COLUMNS = ("schedule", "over W4A8>", "COMET reports>", "error>")
LEGEND = (
    "M*: tokens from which multiplying takes longer than loading. α: instructions of a thread per weight; α*: the most"
    " of them that W4A8's loads, or its MMAs where these take longer, can hide."
)
RATES = "INT8 and issue: 10^12 operations and instructions of threads per second."
TIMES = "In turn: max(load, dequant + scale + MMA), LiquidGEMM's Eq. 6; overlap: loads, MMAs and the rest at once."
LOOPS = "W4A8 sm80, W4A4, W4Ax: all instructions of main loops on mma.sync; others: the dequantiser alone."
BOUND = (
    "W4A8 is the same tiles, all INT8, in rounds, of which the last leaves SMs idle. With all SMs busy in both, the"
    " share of INT4 and the cost of a tile bound the gain by"
)
PUBLISHED = (
    "Model: data-sheet rates, instructions of our kernels' machine code, 4096 x 4096; a baseline at its peak rate."
    " Error: of the model in turn, from the nearer end of what is reported."
)


@dataclass(frozen=True)
class SchemeCost:
    """Cost of one scheme at one shape."""

    scheme: Scheme
    counts: LoopCounts
    cost: Cost
    transition: float
    largest_alpha: float

    @property
    def alpha(self) -> float:
        """Instructions of a thread per weight, all pipes."""
        return sum(self.counts.per_weight.values())

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON-ready values."""
        times = {"in_turn_us": self.cost.in_turn_us, "overlapped_us": self.cost.overlapped_us, "limit": self.cost.limit}
        return {**asdict(self), "alpha": self.alpha, "cost": {**asdict(self.cost), **times}}


def entries(
    device: Device, M: int, N: int, K: int, counts_of: CountsOf, schemes: Iterable[Scheme] | None = None
) -> list[SchemeCost]:
    """Compute the cost of each requested scheme, or of all that the device multiplies and that have counts for it.

    Raises ArgumentError for a requested scheme that the device does not multiply or that has no counts for it.
    """
    costs = []
    for scheme in schemes if schemes is not None else cost.SCHEMES.values():
        counts = counts_of(scheme, device.arch) if scheme.operands in device.tops else None
        if counts is not None:
            costs.append(
                SchemeCost(
                    scheme,
                    counts,
                    cost.gemm_cost(device, scheme, M, N, K, counts=counts),
                    cost.transition(device, scheme),
                    cost.largest_alpha(device, scheme, min(M, cost.MOST_TOKENS)),
                )
            )
        elif schemes is not None:
            rule = f"one that {device.name} runs: it multiplies {', '.join(device.tops)} on {device.arch}"
            raise ArgumentError("scheme", rule, scheme.name)
    return costs


def scheme_lines(costs: list[SchemeCost]) -> list[list[str]]:
    """Format entries as lines of `SCHEME_COLUMNS`."""
    lines = []
    for e in costs:
        c = e.cost
        times = (c.load_us, c.dequantise_us, c.scale_us, c.multiply_us, c.in_turn_us, c.overlapped_us)
        hidden_alpha = f"{e.largest_alpha:.1f}" if e.scheme.dequantiser else ""
        numbers = [f"{e.alpha:.3g}", *map(_us, times), f"{e.transition:.0f}", hidden_alpha]
        lines.append([e.scheme.name, *numbers])
    return lines


def device_json(device: Device) -> dict[str, Any]:
    """Convert a device and the model's figures for it to JSON-ready values."""
    schemes = {
        name: cost.transition(device, scheme) for name, scheme in cost.SCHEMES.items() if scheme.operands in device.tops
    }
    hidden_alpha = cost.largest_alpha(device, cost.SCHEMES["W4A8 LQQ"])
    return {**asdict(device), "issue_tips": device.issue_tips, "transitions": schemes, "largest_alpha": hidden_alpha}


def device_lines(devices: Iterable[Device]) -> list[list[str]]:
    """Format devices as lines of `DEVICE_COLUMNS`."""
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
        for device in devices
    ]


def published_lines(predictions: Iterable[Predicted]) -> list[list[str]]:
    """Format published figures and predictions as lines of `PUBLISHED_COLUMNS`."""
    lines = []
    for prediction in predictions:
        figure = prediction.figure
        unit = f"over {figure.over}" if figure.over else "TOPS"
        numbers = (
            figure.reported,
            figure.form(prediction.in_turn),
            figure.form(prediction.overlapped),
            f"{prediction.error:+.0%}",
        )
        lines.append([figure.source, figure.device, figure.scheme, f"{figure.M:,}", unit, *numbers])
    return lines


def schedule_lines(speedups: Mapping[str, float], reported: Mapping[str, float]) -> list[list[str]]:
    """Format speed-ups of schedules over W4A8, and COMET's if reported, as lines of `SCHEDULE_COLUMNS`."""
    lines = []
    for name, times in speedups.items():
        comparison = [f"{reported[name]:.2f}x", f"{times / reported[name] - 1:+.0%}"] if name in reported else ["", ""]
        lines.append([name, f"{times:.2f}x", *comparison])
    return lines


def _us(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"
