"""Smoothing: outlier channels of activations are scaled down and weights scaled up; the function does not change.

The input of down: x <- x / λ by the rows of up, W_down <- W_down λ, λ = span(x)^alpha / span(W)^beta per channel
(SmoothQuant, with two independent exponents). QServe §4.3.2 smooths the input of o as well, whose λ would go into
v; here the values of each head are rotated instead (`rotate_heads`), which spreads outliers too.

Keys: `quant.smooth_attention`.
"""

from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.decoder import Layer
from ptxlab.llm.recipe.rotation import as_before, wide
from ptxlab.lowbit.quant.smooth import smooth_attention


def smooth_down(layer: Layer, peaks: Any, alpha: float, beta: float) -> tuple[dict[str, Any], Any]:
    """The layer with a smoother input of down, and the λ f64 [F] by which the input was divided.

    Args:
        layer: its matrices.
        peaks: max|x| of every channel of down's input over calibration data, [F]. A channel without input or weight
            stays as it is.
        alpha: exponent of the input's span.
        beta: exponent of the weight's span.
    """
    up, down = layer["up"], layer["down"]
    if peaks.shape != (down.shape[1],):
        raise ArgumentError("peaks", f"must be [{down.shape[1]}], as down's input", f"shape {peaks.shape}")
    span, of_weight = wide(peaks), wide(np.abs(down).max(axis=0))
    usable = (span > 0) & (of_weight > 0)
    factor = np.where(usable, span, 1) ** alpha / np.where(usable, of_weight, 1) ** beta
    factor = factor / np.exp(np.log(factor).mean())  # the mean scale of up and down stays
    smoothed = {"up": as_before(up, wide(up) / factor[:, None]), "down": as_before(down, wide(down) * factor)}
    return {**layer, **smoothed}, factor


def smooth_keys(layer: Layer, peaks: Any, alpha: float = 0.5) -> dict[str, Any]:
    """The layer with SmoothAttention folded in; peaks: max|K| of every channel, [Hkv, D]."""
    smoothed = smooth_attention(
        layer["q"],
        layer["k"],
        peaks,
        head_dim=peaks.shape[1],
        b_q=layer.get("q_bias"),
        b_k=layer.get("k_bias"),
        alpha=alpha,
    )
    found = {"q": smoothed.w_q, "k": smoothed.w_k, "q_bias": smoothed.b_q, "k_bias": smoothed.b_k}
    return {**layer, **{name: array for name, array in found.items() if array is not None}}
