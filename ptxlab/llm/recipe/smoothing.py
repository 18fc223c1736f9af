"""Smoothing: outlier channels of activations are scaled down and weights scaled up; the function does not change.

The input of down: x <- x / λ by the rows of up, W_down <- W_down λ, λ = span(x)^alpha / span(W)^beta per channel
(SmoothQuant, with two independent exponents). Or, as LiquidServe does (LiquidGEMM §6), the inputs of qkv, of gate and
up, and of down are divided by λ = span(x)^alpha / span(W)^(1 - alpha), and alpha is searched. The λ of a norm's output
goes into the norm.

The input of o (QServe §4.3.2) is divided through the rows of v, by one λ for the query heads that share a KV head.
Recipes that rotate the values of each head (`rotate_heads`), which spreads outliers too, leave it as it is.

`quant.smooth_attention` smooths keys; `smooth_keys` applies it to a layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.decoder import ROUTER, Layer, expert_of, expert_part
from ptxlab.llm.model.quantized import FUSED, fused_parts
from ptxlab.llm.recipe.rotation import cast_like, to_float64
from ptxlab.lowbit.quant.smooth import smooth_attention

SOURCES = {"q": "input_norm", "gate": "post_norm", "down": "up"}  # what takes the λ of a matrix's input


def matrices_by_input(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the matrices of each input that is smoothed, by the name that `model.decoder.Numerics` has for it.

    With experts the input of all gates and ups is one, which the router reads too; each down has its own.
    """
    if not config.experts:
        return {name: next(parts for parts in FUSED.values() if parts[0] == name) for name in SOURCES}
    fused = fused_parts(config)
    gates = (name for parts in fused.values() for name in parts if name.partition(".")[0] in ("gate", "up"))
    downs = {name: parts for name, parts in fused.items() if name.startswith("down")}
    return {"q": fused["qkv"], ROUTER: (*gates, ROUTER), **downs}


def smooth_down(
    layer: Layer, peaks: Any, alpha: float, beta: float, expert: int | None = None
) -> tuple[dict[str, Any], Any]:
    """Smooth the input of down; return the layer and the λ f64 [F] by which the input was divided.

    Args:
        layer: its matrices.
        peaks: max|x| of every channel of down's input over calibration data, [F]. A channel without input or weight
            stays as it is.
        alpha: exponent of the input's span.
        beta: exponent of the weight's span.
        expert: the one whose matrices these are, None in a dense layer.
    """
    names = expert_part("up", expert), expert_part("down", expert)
    up, down = (layer[name] for name in names)
    if peaks.shape != (down.shape[1],):
        raise ArgumentError("peaks", f"must be [{down.shape[1]}], as down's input", f"shape {peaks.shape}")
    span, weight_span = to_float64(peaks), to_float64(np.abs(down).max(axis=0))
    is_usable = (span > 0) & (weight_span > 0)
    factor = np.where(is_usable, span, 1) ** alpha / np.where(is_usable, weight_span, 1) ** beta
    factor = factor / np.exp(np.log(factor).mean())  # the mean scale of up and down stays
    smoothed_pair = cast_like(up, to_float64(up) / factor[:, None]), cast_like(down, to_float64(down) * factor)
    return {**layer, **dict(zip(names, smoothed_pair, strict=True))}, factor


def smooth_heads(layer: Layer, peaks: Any, alpha: float, beta: float) -> tuple[dict[str, Any], Any]:
    """Return the layer with a smoother input of o, and the λ f64 [Hkv, D] by which values were divided (QServe §4.3.2).

    λ = span(x)^alpha / span(W_o)^beta, spans over the query heads that share a KV head. The rows and the bias of v are
    divided by it, the columns of o multiplied, so that the layer's function does not change.

    Args:
        layer: its matrices.
        peaks: max|x| of every channel of o's input over calibration data, [Hq, D]. A channel without input or weight
            stays as it is.
        alpha: exponent of the input's span; QServe finds it best near 0.
        beta: exponent of the weight's span.

    Raises ArgumentError for peaks that are not of o's input.
    """
    v, o = layer["v"], layer["o"]
    D = peaks.shape[-1]
    if peaks.ndim != 2 or peaks.size != o.shape[1] or len(v) % D:
        raise ArgumentError("peaks", f"must be [Hq, D] of o's {o.shape[1]} channels", f"shape {peaks.shape}")
    Hkv = len(v) // D
    ratio = len(peaks) // Hkv
    input_span, weight_span = (to_float64(x).reshape(Hkv, ratio, D).max(axis=1) for x in (peaks, np.abs(o).max(axis=0)))
    is_usable = (input_span > 0) & (weight_span > 0)
    factor = np.where(is_usable, input_span, 1) ** alpha / np.where(is_usable, weight_span, 1) ** beta
    factor = factor / np.exp(np.log(factor).mean())  # the mean scale of v and o stays
    rows, columns = factor.reshape(-1), np.repeat(factor, ratio, axis=0).reshape(-1)
    smoothed_matrices = {"v": cast_like(v, to_float64(v) / rows[:, None]), "o": cast_like(o, to_float64(o) * columns)}
    if "v_bias" in layer:
        smoothed_matrices["v_bias"] = cast_like(layer["v_bias"], to_float64(layer["v_bias"]) / rows)
    return {**layer, **smoothed_matrices}, factor


def smoothing_factor(peaks: Any, weight_peaks: Any, alpha: float) -> Any:
    """Return SmoothQuant's λ f64 [K] of an input by max|x| and max|W| of every channel, [K].

    A channel where one of them is 0 is scaled as if that were 1.
    """
    spans = (np.where(magnitudes > 0, to_float64(magnitudes), 1) for magnitudes in (peaks, weight_peaks))
    factor = next(spans) ** alpha / next(spans) ** (1 - alpha)
    return factor / np.exp(np.log(factor).mean())  # the mean scale of weights stays


def search_factor(
    x: Any,
    w: Any,
    peaks: Any,
    strengths: Sequence[float],
    quantize_input: Callable[[Any], Any],
    quantize_weight: Callable[[Any], Any],
) -> tuple[float, Any]:
    """Return the strength alpha, and its λ f64 [K], with the least squared error of a product's output.

    Args:
        x: some of its input, [M, K].
        w: the matrix, [N, K].
        peaks: max|x| of every channel over the calibration text, [K].
        strengths: the alphas, of which the first wins a tie.
        quantize_input: gives the input as the product reads it, quantised and dequantised.
        quantize_weight: gives the weights likewise.
    """
    exact_output, weight_peaks = x @ w.T, np.abs(w).max(axis=0)

    def error(alpha: float) -> float:
        factor = smoothing_factor(peaks, weight_peaks, alpha).astype(x.dtype)
        output = quantize_input(x / factor) @ quantize_weight(w * factor).T
        return float(np.square(output - exact_output, dtype=np.float64).sum())

    alpha = min(strengths, key=error)
    return alpha, smoothing_factor(peaks, weight_peaks, alpha)


def smooth_input(layer: Layer, names: Sequence[str], factor: Any) -> dict[str, Any]:
    """Return the layer with the input of these matrices divided by λ [K]: in the norm, or of down in the rows of up.

    `names` are those of `matrices_by_input`.
    """
    smoothed_matrices = {name: cast_like(layer[name], to_float64(layer[name]) * factor) for name in names}
    part, _, _ = names[0].partition(".")
    source = expert_part(SOURCES[part], expert_of(names[0])) if part == "down" else SOURCES[part]
    rows = factor if layer[source].ndim == 1 else factor[:, None]
    return {**layer, **smoothed_matrices, source: cast_like(layer[source], to_float64(layer[source]) / rows)}


def smooth_keys(layer: Layer, peaks: Any, alpha: float = 0.5) -> dict[str, Any]:
    """Fold SmoothAttention into a layer; peaks: max|K| of every channel, [Hkv, D]."""
    smoothed_matrices = smooth_attention(
        layer["q"],
        layer["k"],
        peaks,
        head_dim=peaks.shape[1],
        b_q=layer.get("q_bias"),
        b_k=layer.get("k_bias"),
        alpha=alpha,
    )
    arrays = {
        "q": smoothed_matrices.w_q,
        "k": smoothed_matrices.w_k,
        "q_bias": smoothed_matrices.b_q,
        "k_bias": smoothed_matrices.b_k,
    }
    return {**layer, **{name: array for name, array in arrays.items() if array is not None}}
