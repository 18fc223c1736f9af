"""`ptxlab demo`: what attention loses to a quantised KV cache, on real text in trained layers; by the references."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ptxlab import quant
from ptxlab.bert import AttentionInputs, Bert, attend
from ptxlab.io.files import read_text
from ptxlab.reference.attention import F64
from ptxlab.reference.packed import F32

TOKENS = 254  # of a passage; with [CLS] and [SEP] the 256 that the model was trained for


@dataclass(frozen=True)
class CacheRow:
    """One kind of cache, in all layers.

    Attributes:
        cache: bits of keys and values, and what was done to the keys before.
        bits: per stored element, with its share of scale and zero.
        error: relative, the Frobenius norm of what attention's outputs lost over that of the outputs; all layers.
        worst: the same in the layer that lost most.
    """

    cache: str
    bits: float
    error: float
    worst: float


@dataclass(frozen=True)
class CacheTable:
    """The rows, a line that says on which `inputs`, and how far the keys' `outlier` channel stands out.

    That is, over all layers and heads, the largest max|K| of a channel over the median of its head.
    """

    inputs: str
    outlier: float
    rows: tuple[CacheRow, ...]


class _Operands(NamedTuple):
    """Of the attention of one layer, f32 [tokens, heads, D]."""

    q: F32
    k: F32
    v: F32


def cache_table(path: Path) -> CacheTable:
    """KV16, KV8, KV4 and KV4 + SmoothAttention on a passage of the model's own card, in the model at `path`.

    Every layer is given what the exact model gives it. SmoothAttention is calibrated on the passage that follows.
    Raises FileError if a file of the model cannot be read.
    """
    model = Bert(path)
    tokens = model.tokens(read_text(path.parent / "README.md").split("---", 2)[-1])  # without its front matter
    layers = list(model.attention_inputs(tokens[:TOKENS]))
    calibration = list(model.attention_inputs(tokens[TOKENS : 2 * TOKENS]))

    exact = [_operands(layer) for layer in layers]
    smooth = [_operands(_smoothed(layer, other.keys())) for layer, other in zip(layers, calibration, strict=True)]
    outputs = [attend(*operands) for operands in exact]
    constants = 32 / model.head_dim  # bits of an element's share of its token's scale and zero

    def row(cache: str, bits: float, operands: Sequence[_Operands], stored: Callable[[F32], F32]) -> CacheRow:
        lost = [attend(q, stored(k), stored(v)) - out for (q, k, v), out in zip(operands, outputs, strict=True)]
        by_layer = [_norm([a]) / _norm([b]) for a, b in zip(lost, outputs, strict=True)]
        return CacheRow(cache, bits, _norm(lost) / _norm(outputs), max(by_layer))

    return CacheTable(
        inputs=f"{TOKENS + 2} tokens of the model's card in {model.layers} layers, head dim {model.head_dim}",
        outlier=max(_outlier(operands.k) for operands in exact),
        rows=(
            row("KV16", 16, exact, lambda x: x.astype(np.float16).astype(np.float32)),
            row("KV8", 8 + constants, exact, lambda x: quant.quantize_kv(x, "kv8").dequantize()),
            row("KV4", 4 + constants, exact, lambda x: quant.quantize_kv(x, "kv4").dequantize()),
            row("KV4 + smoothing", 4 + constants, smooth, lambda x: quant.quantize_kv(x, "kv4").dequantize()),
        ),
    )


def _operands(layer: AttentionInputs) -> _Operands:
    return _Operands(layer.queries(), layer.keys(), layer.values())


def _smoothed(layer: AttentionInputs, calibration: F32) -> AttentionInputs:
    """The layer with SmoothAttention folded into its projections, calibrated on keys [tokens, heads, D]."""
    keys_max, head_dim = np.abs(calibration).max(axis=0), layer.head_dim
    smooth = quant.smooth_attention(layer.w_q, layer.w_k, keys_max, head_dim=head_dim, b_q=layer.b_q, b_k=layer.b_k)
    return replace(layer, **{name: getattr(smooth, name) for name in ("w_q", "b_q", "w_k", "b_k")})


def _outlier(keys: F32) -> float:
    peaks = np.abs(keys).max(axis=0)
    return float((peaks.max(axis=1) / np.median(peaks, axis=1)).max())


def _norm(arrays: Sequence[F64]) -> float:
    return float(np.sqrt(sum(np.square(array).sum() for array in arrays)))
