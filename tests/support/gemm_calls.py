"""Calls of `gemm_w4a8`: activations, weights of every scheme, and what has to come out."""

from typing import Any

import numpy as np

import ptxlab
from ptxlab.lowbit import layout, quant, reference

M, N, K = 5, 40, 256
RNG = np.random.default_rng(0)
X = RNG.integers(-128, 128, (M, K), dtype=np.int8)
X_SCALE = RNG.uniform(1e-3, 1e-2, M).astype(np.float32)
BIAS = RNG.standard_normal(N, dtype=np.float32)
W = RNG.standard_normal((N, K), dtype=np.float32)
GROUPED = quant.quantize_qoq(W, group=64)
LQQ = quant.quantize_lqq(W, group=64)
CHANNEL = quant.quantize_qoq_channel(W)
WEIGHTS = {
    "qoq": ptxlab.pack(GROUPED, "qserve"),
    "qoq_channel": ptxlab.pack(CHANNEL, "qserve"),
    "lqq": ptxlab.pack(LQQ, "dual_mma"),  # through a tensor map and clusters
}
SCHEMES: dict[str, layout.packed_weight.QuantizedWeight] = {"qoq": GROUPED, "lqq": LQQ, "qoq_channel": CHANNEL}
STRIPS = {scheme: ptxlab.pack(weight, "strips") for scheme, weight in SCHEMES.items()}


def product(weight: Any, x: np.ndarray, x_scale: np.ndarray, bias: np.ndarray | None, dtype: str) -> np.ndarray:
    """Compute the expected Y of a weight and activations by the reference."""
    if isinstance(weight, quant.QoQChannelWeight):
        integers, scale = weight.q4.astype(np.int32) - weight.zero[:, None], weight.scale
    else:
        integers, scale = weight.exact_level1(), weight.channel_scale
    return reference.gemm_epilogue(reference.gemm_accumulators(x, integers), x_scale, scale, bias, dtype)


def expected_product(
    scheme: str, dtype: str = "float16", bias: np.ndarray | None = None, x: np.ndarray = X
) -> np.ndarray:
    """Compute the expected Y of a weight of this scheme by the reference."""
    return product(SCHEMES[scheme], x, X_SCALE[: len(x)], bias, dtype)
