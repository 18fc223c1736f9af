"""What `ptxlab cost` prints: the limits of every GPU, and what one GEMM costs in every scheme."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ptxlab import cost
from ptxlab.cost import Cost, Device, Scheme

# A name that ends in > is of a column of numbers.
DEVICE_COLUMNS = ("GPU", "TB/s>", "INT8>", "issue>", "M* FP16>", "M* W8A8>", "M* W4A8>", "α*>")
SCHEME_COLUMNS = ("scheme", "α>", "load>", "dequant>", "MMA>", "in turn>", "overlap>", "M*>", "α*>")
LEGEND = (
    "M*: tokens from which multiplying takes longer than loading. α: instructions of a thread per weight; α*: the most"
    " of them that W4A8's loads, or its MMAs where these take longer, can hide."
)
RATES = "INT8 and issue: 10^12 operations and instructions of threads per second."
TIMES = "In turn: max(load, dequant + MMA), LiquidGEMM's Eq. 6; overlap: the longest of the three."


@dataclass(frozen=True)
class SchemeCost:
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


def entries(device: Device, M: int, N: int, K: int, alpha_of: Callable[[str], float]) -> list[SchemeCost]:
    """Every scheme that the device multiplies; `alpha_of` counts a dequantiser's instructions per weight."""
    found = []
    for scheme in (scheme for scheme in cost.SCHEMES.values() if scheme.operands in device.tops):
        alpha = alpha_of(scheme.dequantiser)
        found.append(
            SchemeCost(
                scheme,
                alpha,
                cost.gemm_cost(device, scheme, M, N, K, alpha=alpha),
                cost.transition(device, scheme),
                cost.largest_alpha(device, scheme, min(M, cost.MOST_TOKENS)),
            )
        )
    return found


def scheme_lines(found: list[SchemeCost]) -> list[list[str]]:
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


def device_lines(devices: Iterable[Device]) -> list[list[str]]:
    """Devices as lines of `DEVICE_COLUMNS`."""
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


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
