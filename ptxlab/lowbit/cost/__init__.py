"""The cost model of a GEMM with quantised weights (LiquidGEMM §3.2), and the floor that a record has to come near.

Per weight that a tile of M̃ tokens multiplies, in seconds:

    load        1 / B       B: weights per second out of device memory
    dequantise  α / C       α: instructions of a thread per weight; C: such instructions that the GPU issues per second
    multiply    2 M̃ / T     T: operations per second on tensor cores, two per multiply-add
    scale       β M̃ / (C g)  where sums leave the tensor cores every g channels; β: instructions per sum

A main loop loads under its computation; a plain one dequantises, then multiplies (Eq. 3-5), an ideal one hides the
shorter of the two under the longer. A GEMM of N K weights goes through them once per tile of tokens (Eq. 6); out of
memory they come once only, as blocks that want the same weights run together and find them in the L2.
Instructions are counted by pipe where the counts say so (`LoopCounts`): then the slowest pipe counts, not C alone.
Left out, as there: the activations, the epilogue, tiles that do not fill the SMs, and what power does to the clock.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ptxlab.errors import ArgumentError
from ptxlab.hardware.sheets import DEVICES, SHEETS, Device, DeviceSheet, device, sheet, slowest_pipe

__all__ = [
    "DEVICES",
    "SCHEMES",
    "SHEETS",
    "Cost",
    "Device",
    "DeviceSheet",
    "LoopCounts",
    "Scheme",
    "device",
    "gemm_cost",
    "gemm_floor",
    "largest_alpha",
    "most_tops",
    "schemes",
    "sheet",
    "tensor_rate",
    "transition",
    "weight_rate",
]

MOST_TOKENS = 256  # of a tile: the widest wgmma


@dataclass(frozen=True)
class Scheme:
    """Storage format and arithmetic of a scheme's weights.

    Attributes:
        name: the name in papers; `u8`: the MMA gets weight + 128, which saves an XOR.
        bits: bits per stored weight, group constants included (two bytes per 128; none per channel).
        operands: operand type of the tensor cores, a key of `Device.tops`.
        dequantiser: the kernel of the family `dequant` whose instructions per weight are α; empty: α is 0.
        loop: the mma.sync GEMM whose whole main loop is counted (`bench.counts.loop_counts`); empty: none.
        group: channels per group, after which sums are scaled outside the tensor cores; 0: only after the last.
        outliers: INT8 channels beside the INT4 ones.
        int8_share: share of INT8 blocks beside the INT4 ones; their weights are dequantised.
    """

    name: str
    bits: float
    operands: str
    dequantiser: str = ""
    loop: str = ""
    group: int = 0
    outliers: int = 0
    int8_share: float = 0.0

    @property
    def slug(self) -> str:
        """The name on a command line: `w4a8-lqq`."""
        return self.name.lower().replace(" ", "-")


_FOUR = 4 + 16 / 128
_S4 = "gemm_w4a4_s4_sm80"
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("FP16", 16, "fp16"),
        Scheme("FP8", 8, "fp8"),
        Scheme("W8A8", 8, "int8"),
        Scheme("W4A16", _FOUR, "fp16", "dequant_u4_f16"),
        Scheme("W4A8 QoQ", _FOUR, "int8", "dequant_qoq_vadd4"),
        Scheme("W4A8 LQQ", _FOUR, "int8", "dequant_lqq"),
        Scheme("W4A8 LQQ u8", _FOUR, "int8", "dequant_lqq_unsigned"),
        Scheme("W4A8 channel", 4, "int8", "dequant_qoq_channel"),
        Scheme("W4A8 sm80", _FOUR, "int8", loop="gemm_w4a8_qoq_sm80"),
        Scheme("W4A8 LQQ sm80", _FOUR, "int8", loop="gemm_w4a8_lqq_sm80"),
        Scheme("W4A4", _FOUR, "int4", loop=_S4),
        Scheme("W4A4 outlier", _FOUR, "int4", loop=_S4, outliers=128),
        Scheme("W4A4 g128", _FOUR, "int4", loop=_S4, group=128),
        Scheme("W4A4 Atom", _FOUR + 0.125, "int4", loop=_S4, group=128, outliers=128),
        # COMET does not say whether a block's activations have scales of their own, or a token one per precision.
        Scheme("W4Ax g128", _FOUR, "int4", "dequant_qoq_channel", loop=_S4, group=128, int8_share=0.25),
        Scheme("W4Ax token", _FOUR, "int4", "dequant_qoq_channel", loop=_S4, int8_share=0.25),
    )
}


def schemes(names: str) -> list[Scheme]:
    """Find schemes by comma-separated names, in any case.

    `w4a8-lqq` is one scheme, `w4a4` is every W4A4 scheme.

    Raises ArgumentError with the nearest names for an unknown one.
    """
    scheme_by_slug = {scheme.slug: scheme for scheme in SCHEMES.values()}
    chosen_schemes: dict[str, Scheme] = {}
    for name in names.lower().split(","):
        scheme_slug = "-".join(name.split())
        family = {
            family_slug: scheme
            for family_slug, scheme in scheme_by_slug.items()
            if family_slug.partition("-")[0] == scheme_slug
        }
        if not family and scheme_slug not in scheme_by_slug:
            candidates = [*scheme_by_slug, "w4a8"]
            near_names = difflib.get_close_matches(scheme_slug, candidates, n=3, cutoff=0.4) or scheme_by_slug
            raise ArgumentError("scheme", f"a known one; nearest: {', '.join(near_names)}", repr(name))
        chosen_schemes |= family or {scheme_slug: scheme_by_slug[scheme_slug]}
    return list(chosen_schemes.values())


@dataclass(frozen=True)
class LoopCounts:
    """Thread instructions other than MMAs, by pipe (`sheets.LANES_PER_CLOCK`).

    Attributes:
        per_weight: per weight and tile of tokens.
        per_sum: per sum of a group: convert, scale, add up, set to zero.
        tile: tokens of a tile.
    """

    per_weight: Mapping[str, float]
    per_sum: Mapping[str, float] = field(default_factory=dict)
    tile: int = MOST_TOKENS


@dataclass(frozen=True)
class Cost:
    """Microseconds of one GEMM, part by part."""

    load_us: float
    dequantise_us: float
    multiply_us: float
    start_us: float
    scale_us: float = 0.0

    @property
    def in_turn_us(self) -> float:
        """Dequantised, then multiplied, while the next weights load (Eq. 6)."""
        return self.start_us + max(self.load_us, self.dequantise_us + self.multiply_us + self.scale_us)

    @property
    def overlapped_us(self) -> float:
        """Loads, MMAs and all other instructions under one another."""
        return self.start_us + max(self.load_us, self.dequantise_us + self.scale_us, self.multiply_us)

    @property
    def limit(self) -> str:
        """Name of the longest part: `load`, `dequantise`, `multiply` or `scale`."""
        parts = {name: getattr(self, f"{name}_us") for name in ("load", "dequantise", "multiply", "scale")}
        return max(parts, key=parts.__getitem__)


def gemm_cost(
    device: Device,
    scheme: Scheme,
    M: int,
    N: int,
    K: int,
    *,
    alpha: float = 0.0,
    tile: int = MOST_TOKENS,
    counts: LoopCounts | None = None,
) -> Cost:
    """Compute the cost of Y [M, N] = X [M, K] Wᵀ (Eq. 6).

    Args:
        device: the GPU.
        scheme: of the weight W [N, K].
        M: tokens.
        N: output channels.
        K: input channels.
        alpha: instructions of a thread per weight, for all that is not MMA.
        tile: most tokens that a weight is multiplied with at once; for every further tile it is dequantised again.
        counts: replaces `alpha` and `tile`: instructions by pipe, with those of group sums.

    Raises:
        ArgumentError: a size below 1, a negative alpha, or operands that the GPU does not multiply.
    """
    counts = counts or LoopCounts({"issue": alpha}, tile=tile)
    for size_name, size in {"M": M, "N": N, "K": K, "tile": counts.tile}.items():
        if size < 1:
            raise ArgumentError(size_name, "at least 1", size)
    if not 0 <= alpha < math.inf:
        raise ArgumentError("alpha", "instructions per weight, 0 or more", alpha)
    weights = N * K / 1e6  # over rates in 10^12 per second: microseconds
    sm_clocks = device.sms * device.clock_ghz / 1e3

    def cuda_us(times: float, per_pipe: Mapping[str, float]) -> float:
        return times * slowest_pipe(per_pipe, device.arch)[0] / sm_clocks

    return Cost(
        load_us=weights / weight_rate(device, scheme),
        dequantise_us=cuda_us(weights * math.ceil(M / counts.tile), counts.per_weight),
        multiply_us=weights * 2 * M / tensor_rate(device, scheme, K),
        start_us=device.start_us,
        scale_us=cuda_us(weights * M / scheme.group, counts.per_sum) if scheme.group else 0.0,
    )


def weight_rate(device: Device, scheme: Scheme) -> float:
    """Compute B, the 10^12 weights per second that device memory delivers."""
    return device.memory_tbps * 8 / scheme.bits


def tensor_rate(device: Device, scheme: Scheme, K: float = math.inf) -> float:
    """Compute T, the tensor cores' 10^12 operations per second, with the INT8 blocks and outliers among K channels.

    Raises ArgumentError if the GPU does not multiply such operands.
    """
    if scheme.operands not in device.tops:
        raise ArgumentError("scheme", f"operands that {device.name} multiplies: {', '.join(device.tops)}", scheme.name)
    rate = device.tops[scheme.operands]
    if int8 := min(1.0, scheme.int8_share + scheme.outliers / K):
        rate /= 1 - int8 + int8 * rate / device.tops["int8"]
    return rate


def transition(device: Device, scheme: Scheme) -> float:
    """Compute T / 2B, the number of tokens from which multiplying takes longer than loading."""
    return tensor_rate(device, scheme) / (2 * weight_rate(device, scheme))


def largest_alpha(device: Device, scheme: Scheme, M: int = 1) -> float:
    """Compute the instructions per weight that an ideal main loop hides.

    C / B instructions hide behind the loads, 2 M̃ C / T behind the MMA.

    The longer of the two counts, in a tile of M tokens.
    """
    us_per_weight = max(1 / weight_rate(device, scheme), 2 * M / tensor_rate(device, scheme))
    return device.issue_tips * us_per_weight


def most_tops(device: Device, scheme: Scheme, M: float, alpha: float = 0.0) -> float:
    """Compute the roof: the 10^12 operations per second that M tokens can reach if everything overlaps."""
    slopes = [weight_rate(device, scheme), *([device.issue_tips / alpha] if alpha else [])]
    return min(tensor_rate(device, scheme), 2 * M * min(slopes))


def gemm_floor(stream_us: float, operations: float, device: str) -> tuple[float, str]:
    """Compute a W4A8 GEMM's floor in microseconds, and its limit: `stream` or `int8`.

    The floor is the longer of the stream floor and the multiplication at the peak rate of the device's data sheet. A
    device without a sheet has the stream floor alone.
    """
    floors = [(stream_us, "stream")]
    if device in SHEETS:
        floors.append((SHEETS[device].int8_us(operations), "int8"))
    return max(floors)
