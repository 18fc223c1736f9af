"""What a decoder computes between its GEMMs, in float64: RMSNorm, and the gate of its FFN."""

import numpy as np
import numpy.typing as npt

from ptxlab.lowbit.reference.attention import F64

ACTIVATIONS = ("silu", "gelu_tanh")


def rms_norm(x: npt.NDArray[np.floating], gamma: npt.NDArray[np.floating], eps: float) -> F64:
    """Compute x / sqrt(mean(x²) + eps) · gamma of every row of x float [..., K], gamma float [K]."""
    wide_values: F64 = x.astype(np.float64)
    mean = (wide_values**2).mean(axis=-1, keepdims=True)
    normalised: F64 = wide_values / np.sqrt(mean + eps) * gamma.astype(np.float64)
    return normalised


def apply_gate(gate_up: npt.NDArray[np.floating], activation: str = "silu") -> F64:
    """Compute act(gate) · up, f64 [..., K], of gate_up float [..., 2 K]: K gates, then the K factors `up`.

    `silu` is g / (1 + exp(-g)); `gelu_tanh`, which is g/2 (1 + tanh(z)), is g / (1 + exp(-2 z)) with
    z = sqrt(2/π) (g + 0.044715 g³).
    """
    K = gate_up.shape[-1] // 2
    wide_values: F64 = gate_up.astype(np.float64)
    gate, up = wide_values[..., :K], wide_values[..., K:]
    with np.errstate(over="ignore"):  # an infinite exponential is a gate of 0
        gate_values: F64 = np.exp(exponent(gate, activation))
    gate_values += 1  # in place: new arrays of this size take longer than the sums in them
    np.divide(gate, gate_values, out=gate_values)
    gate_values *= up
    return gate_values


def exponent(gate: F64, activation: str) -> F64:
    """Compute the exponent x of the activation g / (1 + exp(x)) for each gate g."""
    if activation == "silu":
        return -gate
    if activation != "gelu_tanh":
        raise ValueError(f"activation: one of {', '.join(ACTIVATIONS)} (got {activation})")
    cubic: F64 = -2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return cubic
