"""What the specs of the family `quantize` share, and those of the kernels that only quantise, or only add up."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.layout.packed_activations import ORDERS
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, round_to_dtype

DTYPES = ("float16", "bfloat16", "float32")  # by IN
MOST_THREADS = 512
MOST_CHUNKS = 4  # of 16 values, that a thread keeps in registers between its two looks at the row
BLOCK_FORM = "block"
_ORDER_OF_SPAN = {32: "row_major", 64: "fragment", 128: "tiles"}

PACKED = (  # what the kernels write that a GEMM takes
    Arg("x_q", "int8", ("ceil_div(M, rows)*rows", "ceil_div(K, span)*span"), "out"),
    Arg("scale", "float32", ("M",), "out"),
    Arg("token_sum", "int32", ("M",), "out"),
    Arg("M", "int32", role="scalar"),
    Arg("K", "int32", role="scalar"),
    Arg("rows", "int32", role="scalar"),
)
ORDER_RULES = (  # a tile is rows x span: row-major, fragment order, swizzled tiles
    "span in (32, 64, 128)",
    "rows == 1 or span != 32",
    "rows == 8 or span != 64",
    "rows % 8 == 0 and 8 <= rows <= 256 or span != 128",
)
FUSED_RULES = ("K % 32 == 0", "1 <= K <= 32768", *ORDER_RULES, "M < 2**28")  # of kernels with a chunk per thread


def layout_of(sizes: Sizes) -> dict[str, int]:
    """Return the constant that stands for an order."""
    return {"LAYOUT": ORDERS.index(_ORDER_OF_SPAN[sizes["span"]])}


def row_geometry(K: int) -> dict[str, int]:
    """Choose the threads of a block, and blocks of a row, for one chunk of 16 per thread.

    The width alone decides, so that neither batch nor order changes a row's sums. More than `MOST_THREADS` chunks have
    a cluster of 2 or 4 blocks.
    """
    chunks = ceil_div(K, 128) * 8
    blocks = 1 << (ceil_div(chunks, MOST_THREADS) - 1).bit_length()
    return {"THREADS": ceil_div(chunks, 32 * blocks) * 32, "CLUSTER": blocks}


def block_geometry(sizes: Sizes) -> dict[str, int]:
    """Choose the threads of a row's one block, for GPUs without clusters, and 1 or 2 chunks of 16 per thread.

    Up to `MOST_THREADS` chunks as `row_geometry` has it. Sums of a row have the same bits: warps that have a second
    chunk add what as many more warps would.
    """
    chunks = ceil_div(sizes["K"], 128) * 8
    chunks_per_thread = ceil_div(chunks, 1024)
    return {"THREADS": ceil_div(chunks, 32 * chunks_per_thread) * 32, "CLUSTER": 1, "CHUNKS": chunks_per_thread}


def one_block_form(spec: KernelSpec, geometry: Callable[[Sizes], dict[str, int]], **fields: Any) -> KernelSpec:
    """Build the form of a kernel in which each row is one block's: it needs no clusters and so runs from sm_80 on."""
    choose: Any = spec.choose
    return replace(
        spec,
        form=BLOCK_FORM,
        summary=f"{spec.summary}; a row is one block's, not a cluster's",
        choose=lambda sizes: choose(sizes) | geometry(sizes),
        arch="sm_80",
        **fields,
    )


def row_launch(sizes: Mapping[str, int]) -> Launch:
    """Return the launch of a block, or a cluster of them, per token, those of the padding included."""
    tokens, blocks = ceil_div(sizes["M"], sizes["rows"]) * sizes["rows"], sizes.get("CLUSTER", 1)
    return Launch((tokens * blocks, 1, 1), (sizes["THREADS"], 1, 1), cluster=(blocks, 1, 1))


def pack_results(
    quantized: quant.QuantizedActivations, rows: int, span: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x_q in the order of `span`, padded to whole tiles, scale and token_sum, as the kernels write them."""
    packed_activations = layout.pack_activations(quantized, _ORDER_OF_SPAN[span], rows)
    (M, K), (tokens, channels) = quantized.shape, (rows, span)
    padded_rows = packed_activations.x_q.reshape(ceil_div(M, tokens) * tokens, ceil_div(K, channels) * channels)
    return padded_rows, packed_activations.scale, packed_activations.token_sum


def draw_activations(rng: np.random.Generator, M: int, K: int) -> np.ndarray:
    """Draw f32 [M, K] with outlier channels, and a token of zeros."""
    x = rng.standard_normal((M, K), dtype=np.float32)
    x[:, rng.integers(0, K, size=max(1, K // 64))] *= 20
    x[M // 2] = 0
    return x


def _choose(sizes: Sizes) -> dict[str, int]:
    """Choose as many threads as there are chunks of 16, or a half, a third ... if a block cannot have so many."""
    chunks = ceil_div(sizes["K"], sizes["span"]) * sizes["span"] // 16
    chunks_per_thread = ceil_div(chunks, MOST_THREADS)
    threads = ceil_div(chunks, 32 * chunks_per_thread) * 32
    return {"IN": 0, **layout_of(sizes), "THREADS": threads, "CHUNKS": min(chunks_per_thread, MOST_CHUNKS)}


def _example(rng: np.random.Generator, *, M: int, K: int, rows: int, span: int) -> Arrays:
    """Draw activations, to be stored in tiles of `rows` tokens and `span` channels."""
    return {"x": draw_activations(rng, M, K), "rows": rows, "span": span}


def quantize_reference(x: np.ndarray, rows: int, span: int, IN: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the reference: `quant.quantize_activations` of x f32 [M, K] as IN stores it, in the order of `span`."""
    return pack_results(quant.quantize_activations(round_to_dtype(x, DTYPES[IN])), rows, span)


QUANTIZE = KernelSpec(
    name="quantize_activations_s8",
    summary="per-token INT8 with token sums, row-major, in fragment order or in swizzled tiles (QServe §5.1)",
    args=(Arg("x", ByVariant("IN", DTYPES), ("M", "K")), *PACKED),
    launch=row_launch,
    choose=_choose,
    rules=("K % 32 == 0", "1 <= K < 131072", *ORDER_RULES, "M < 2**31 - 256"),
    example=_example,
    pack=lambda logical: {"x": logical["x"]},
    reference=quantize_reference,
    arch="sm_80",
    tolerance_reason="every operation is IEEE's, so scales too are compared for equality",
    example_sizes=sizes_rows(
        "M K rows span",
        (1, 32, 1, 32),
        (5, 416, 1, 32),
        (2, 33024, 1, 32),
        (3, 96, 8, 64),
        (9, 1088, 8, 64),
        (5, 160, 16, 128),
        (17, 1152, 8, 128),
    ),
    after_wait=("x",),
    batch_sizes={"M": 300, "K": 1056, "rows": 1, "span": 32},
)


def _sum_example(rng: np.random.Generator, *, M: int, K: int) -> Arrays:
    return {"x_q": rng.integers(-128, 128, size=(M, K), dtype=np.int8)}


def _token_sum(x_q: np.ndarray) -> np.ndarray:
    sums: np.ndarray = x_q.sum(axis=1, dtype=np.int32)
    return sums


SUM = KernelSpec(
    name="sum_activations_s8",
    summary="token sums of activations that come without them (QServe §5.2.2)",
    args=(
        Arg("x_q", "int8", ("M", "K")),
        Arg("token_sum", "int32", ("M",), "out"),
        Arg("K", "int32", role="scalar"),
    ),
    launch=lambda sizes: Launch((sizes["M"], 1, 1), (sizes["THREADS"], 1, 1)),
    configs=({"THREADS": 128},),
    rules=("K % 16 == 0", "1 <= K <= 2**24", "M < 2**31"),  # INT32 sums of -128: see `ptxlab prove`
    operations="M*K",
    example=_sum_example,
    pack=dict[str, Any],
    reference=_token_sum,
    arch="sm_80",
    example_sizes=({"M": 1, "K": 16}, {"M": 5, "K": 4128}, {"M": 33, "K": 256}),
)
