"""The fused quantiser by the order that it writes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.bench.shapes import LLAMA
from ptxlab.lowbit.kernels.quantize import QUANTIZE
from ptxlab.lowbit.kernels.quantize.specs import DTYPES
from ptxlab.lowbit.layout.packed_activations import ORDERS, tile_of
from ptxlab.runtime.launching import allocate_poisoned, prepare_launches
from ptxlab.runtime.timing import GEMM_REPLAYS, measure

MEASURE = "quantise"
TILE = 64  # tokens, of the order `tiles`
_TOKENS = (1, 16, 64, 256, 2048)
_DISTINCT = 64  # tokens that are made on the host; repeated


def rows(ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure the quantiser on FP16 activations in the L2, as another kernel has just left them.

    Rows cover every depth and number of tokens.
    """
    for K in sorted({layer.K for layer in LLAMA}):
        progress(f"quantize_activations, K = {K}")
        x = _repeat_activations(max(_TOKENS), K)
        for M in _TOKENS:
            for order in ORDERS:
                yield measure_quantiser(x[:M], order, ceilings)


def measure_quantiser(x: Any, order: str, ceilings: Ceilings) -> Row:
    """Time the quantiser on x f16 [M, K]; every byte that it writes must be the reference's."""
    M, K = x.shape
    tokens, span = tile_of(order, TILE if order == "tiles" else None)
    sizes = {"M": M, "K": K, "rows": tokens, "span": span}
    config = {**QUANTIZE.config_for(sizes), "IN": DTYPES.index("float16")}
    out = {arg.name: allocate_poisoned(arg.resolve(sizes), str(arg.dtype)) for arg in QUANTIZE.outputs}
    _, calls = prepare_launches(QUANTIZE, sizes, config, [{"x": x, **out}])
    measured = measure(calls, replays=GEMM_REPLAYS)
    packed_activations = layout.pack_activations(quant.quantize_activations(x), order, tokens)
    right = packed_activations.x_q.reshape(out["x_q"].shape), packed_activations.scale, packed_activations.token_sum
    if not all(bool((a == b).all()) for a, b in zip(out.values(), right, strict=True)):
        raise BenchmarkError(f"{QUANTIZE.name}: wrong results in the order {order} at M={M}, K={K}")
    nbytes = QUANTIZE.bytes_moved({**sizes, **config})
    return row_of(
        QUANTIZE,
        MEASURE,
        sizes,
        measured,
        floor=(nbytes / ceilings.copy_tbps / 1e6, "copy"),
        checked="every value, scale and sum equal to the reference",
        nbytes=nbytes,
        activations=order,
        variant=config,
    )


def _repeat_activations(M: int, K: int) -> Any:
    """Repeat `_DISTINCT` random activations to f16 [M, K] on the device."""
    distinct_rows = np.random.default_rng(0).standard_normal((_DISTINCT, K), dtype=np.float32).astype(np.float16)
    return np.tile(gpu.to_device(distinct_rows), (ceil_div(M, _DISTINCT), 1))[:M]
