"""Calls of `gemm_w4a8`: activations, weights of every scheme, and what has to come out."""

import numpy as np

import ptxlab
from ptxlab import quant, reference

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
SCHEMES = {"qoq": GROUPED, "lqq": LQQ}
STRIPS = {scheme: ptxlab.pack(weight, "strips") for scheme, weight in SCHEMES.items()}


def expected(scheme: str, dtype: str = "float16", bias: np.ndarray | None = None, x: np.ndarray = X) -> np.ndarray:
    if scheme != "qoq_channel":
        weight = {"qoq": GROUPED, "lqq": LQQ}[scheme]
        integers, scale = weight.exact_level1(), weight.channel_scale
    else:
        integers, scale = CHANNEL.q4.astype(np.int32) - CHANNEL.zero[:, None], CHANNEL.scale
    accumulators = reference.gemm_accumulators(x, integers)
    return reference.gemm_epilogue(accumulators, X_SCALE[: len(x)], scale, bias, dtype)
