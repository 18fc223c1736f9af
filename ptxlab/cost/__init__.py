"""The cost model of a GEMM with quantised weights (LiquidGEMM §3.2), and the floor that a record has to come near.

Per weight that a tile of M̃ tokens multiplies, in seconds:

    load        1 / B       B: weights per second out of device memory
    dequantise  α / C       α: instructions of a thread per weight; C: such instructions that the GPU issues per second
    multiply    2 M̃ / T     T: operations per second on tensor cores, two per multiply-add

A main loop loads under its computation; a plain one dequantises, then multiplies (Eq. 3-5), an ideal one hides the
shorter of the two under the longer. A GEMM of N K weights goes through them once per tile of tokens (Eq. 6); out of
memory they come once only, as blocks that want the same weights run together and find them in the L2.
Left out, as there: the activations, the epilogue, tiles that do not fill the SMs, and what power does to the clock.
"""

import math
from dataclasses import dataclass

from ptxlab.cost.sheets import DEVICES, SHEETS, Device, DeviceSheet, device, sheet
from ptxlab.errors import ArgumentError

__all__ = [
    "DEVICES",
    "SCHEMES",
    "SHEETS",
    "Cost",
    "Device",
    "DeviceSheet",
    "Scheme",
    "device",
    "gemm_cost",
    "gemm_floor",
    "largest_alpha",
    "most_tops",
    "sheet",
    "tensor_rate",
    "transition",
    "weight_rate",
]

MOST_TOKENS = 256  # of a tile: the widest wgmma


@dataclass(frozen=True)
class Scheme:
    """How weights are stored and multiplied.

    Attributes:
        name: as papers call it; `u8`: the MMA gets weight + 128, which saves an XOR.
        bits: of a stored weight, the constants of its group included (two bytes per 128; none per channel).
        operands: what the tensor cores are given, a key of `Device.tops`.
        dequantiser: the kernel of the family `dequant` whose instructions per weight are its α; empty: 0.
    """

    name: str
    bits: float
    operands: str
    dequantiser: str = ""


_FOUR = 4 + 16 / 128
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
        Scheme("W4A4", _FOUR, "int4"),
    )
}


@dataclass(frozen=True)
class Cost:
    """Microseconds of one GEMM, part by part."""

    load_us: float
    dequantise_us: float
    multiply_us: float
    start_us: float

    @property
    def in_turn_us(self) -> float:
        """Dequantised, then multiplied, while the next weights load (Eq. 6)."""
        return self.start_us + max(self.load_us, self.dequantise_us + self.multiply_us)

    @property
    def overlapped_us(self) -> float:
        """All three under one another."""
        return self.start_us + max(self.load_us, self.dequantise_us, self.multiply_us)

    @property
    def limit(self) -> str:
        """Which of the three takes longest: `load`, `dequantise` or `multiply`."""
        parts = {"load": self.load_us, "dequantise": self.dequantise_us, "multiply": self.multiply_us}
        return max(parts, key=parts.__getitem__)


def gemm_cost(
    device: Device, scheme: Scheme, M: int, N: int, K: int, *, alpha: float = 0.0, tile: int = MOST_TOKENS
) -> Cost:
    """What Y [M, N] = X [M, K] Wᵀ costs (Eq. 6).

    Args:
        device: the GPU.
        scheme: of the weight W [N, K].
        M: tokens.
        N: output channels.
        K: input channels.
        alpha: instructions of a thread per weight, for all that is not MMA.
        tile: most tokens that a weight is multiplied with at once; for every further tile it is dequantised again.

    Raises:
        ArgumentError: a size below 1, a negative alpha, or operands that the GPU does not multiply.
    """
    for name, value in {"M": M, "N": N, "K": K, "tile": tile}.items():
        if value < 1:
            raise ArgumentError(name, "at least 1", value)
    if not 0 <= alpha < math.inf:
        raise ArgumentError("alpha", "instructions per weight, 0 or more", alpha)
    weights = N * K / 1e6  # over rates in 10^12 per second: microseconds
    return Cost(
        load_us=weights / weight_rate(device, scheme),
        dequantise_us=weights * math.ceil(M / tile) * alpha / device.issue_tips,
        multiply_us=weights * 2 * M / tensor_rate(device, scheme),
        start_us=device.start_us,
    )


def weight_rate(device: Device, scheme: Scheme) -> float:
    """B: 10^12 weights per second out of device memory."""
    return device.memory_tbps * 8 / scheme.bits


def tensor_rate(device: Device, scheme: Scheme) -> float:
    """T: 10^12 operations per second; `ArgumentError` where the GPU does not multiply such operands."""
    if scheme.operands not in device.tops:
        raise ArgumentError("scheme", f"operands that {device.name} multiplies: {', '.join(device.tops)}", scheme.name)
    return device.tops[scheme.operands]


def transition(device: Device, scheme: Scheme) -> float:
    """Tokens from which multiplying takes longer than loading: T / 2B."""
    return tensor_rate(device, scheme) / (2 * weight_rate(device, scheme))


def largest_alpha(device: Device, scheme: Scheme, M: int = 1) -> float:
    """Instructions per weight that an ideal main loop hides: C / B behind the loads, 2 M̃ C / T behind the MMA.

    The longer of the two counts, in a tile of M tokens.
    """
    behind = max(1 / weight_rate(device, scheme), 2 * M / tensor_rate(device, scheme))
    return device.issue_tips * behind


def most_tops(device: Device, scheme: Scheme, M: float, alpha: float = 0.0) -> float:
    """The roof: 10^12 operations per second that M tokens can reach, everything overlapped."""
    slopes = [weight_rate(device, scheme), *([device.issue_tips / alpha] if alpha else [])]
    return min(tensor_rate(device, scheme), 2 * M * min(slopes))


def gemm_floor(stream_us: float, operations: float, device: str) -> tuple[float, str]:
    """The least microseconds of a W4A8 GEMM and what sets them, from its stream floor and the device's sheet."""
    floors = [(stream_us, "stream")]
    if device in SHEETS:
        floors.append((SHEETS[device].int8_us(operations), "int8"))
    return max(floors)
